r"""Measure what one more step on each source does to the loss of each target, to first order.

With g_s the gradient of the mean loss per token of a source, g_t that of a target, and P the preconditioner of the
optimizer (Adam: 1 / (sqrt(v / (1 - beta2^k)) + eps) from its state), a step on the source alone changes the target by

    effect = -lr c <P g_s, g_t>,

where lr is the initial learning rate and c the mean factor of gradient clipping. Momentum spreads a gradient over
later steps, and does not change the sum. Both gradients are means of R groups of rows and Q groups of questions, so the
inner products form an R x Q table: the interval is that of its mean, from the variances of its row and column means and
of the sample of coordinates. Losses are computed without dropout. The model's gradients and modes stay as they are.
Start with `Effects.measure`.

Shape letters: S sources, T targets, R groups of rows, Q groups of questions, D sampled coordinates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from grasp.arrays import F64
from grasp.errors import ModelError
from grasp.models.causal_lm import pad_rows, restored_modes
from grasp.models.tokenizer import HfTokenizer
from grasp.monitor.batches import Segment, token_losses
from grasp.select.change_intervals import COVERAGE
from grasp.settings import TargetSettings
from grasp.targets.load import load_units

GROUPS = 4  # of rows of a source, and of questions of a target
ROWS, QUESTIONS = 16, 32  # rows of a source and questions of a target in a measurement
MAX_TOKENS = 512  # of a row or a question
MAX_COORDINATES = 16_000_000  # numbers of all gradients of targets together: 64 MB in float32

Row = tuple[Segment, ...]  # one segment, or chosen and rejected side of a preference pair
LabelledRow = tuple[Row, float]  # and the reference's difference of log-probabilities


@dataclass(frozen=True, slots=True)
class Measurement:
    """Effects and the half-widths of their intervals, (T, S) each, and losses of the targets, (T,)."""

    effect_TS: F64
    half_width_TS: F64
    loss_T: F64


def clip_window(segment: Segment) -> Segment:
    """Return at most MAX_TOKENS tokens of a segment that include its first token with loss, without losses."""
    start = max(0, int(np.argmax(segment.has_loss)) - MAX_TOKENS // 2)
    part = slice(start, start + MAX_TOKENS)
    return Segment(segment.ids[part], segment.has_loss[part] & (np.arange(len(segment.ids[part])) > 0))


class Effects:
    """Targets, and the parameters of a model that is trained.

    Args:
        model: causal LM, not wrapped for parallel training.
        optimizer: its optimizer.
        targets: groups of questions by target, see `load_questions`.
        beta: of the DPO loss; None: rows have the loss of their tokens.
    Raises:
        ModelError: no parameter of the model is trained.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, targets: Mapping[str, Sequence[LabelledRow]], beta: float | None = None
    ) -> None:
        while hasattr(optimizer, "optimizer"):  # of accelerate
            optimizer = optimizer.optimizer
        self.model, self.optimizer, self.targets, self.beta = model, optimizer, targets, beta
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.SGD):
            name = type(optimizer).__name__
            raise ModelError(f"the optimizer {name} has an unknown preconditioner; expected Adam or SGD")
        groups = ((parameter, group) for group in optimizer.param_groups for parameter in group["params"])
        self.groups = [(parameter, group) for parameter, group in groups if parameter.requires_grad]
        if not self.groups:
            raise ModelError("no parameter of the model has a gradient; expected a model that is trained")
        total = sum(parameter.numel() for parameter, _ in self.groups)
        self.stride = max(1, -(-total * GROUPS * len(targets) // MAX_COORDINATES))
        while self.stride > 1 and any(self.stride % k == 0 for k in (2, 3, 5, 7)):
            self.stride += 1  # coprime to common widths, so that all columns of a matrix are sampled

    def relative_rate(self) -> float:
        """Return the learning rate of the next step as a part of the initial one."""
        group = self.groups[0][1]
        return float(group["lr"]) / float(group.get("initial_lr", group["lr"]) or 1.0)

    def sample(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return every `stride`-th coordinate of tensors that belong to the parameters, (D,), float32 or wider."""
        parts = []
        for k, tensor in enumerate(tensors):
            part = tensor.detach().reshape(-1)[k % self.stride :: self.stride]
            parts.append(part.to(self.groups[0][0].device, torch.promote_types(part.dtype, torch.float32)))
        return torch.cat(parts)

    def preconditioner(self) -> Tensor:
        """Return the change of the sampled parameters per unit of gradient, (D,); 0 without a gradient so far."""
        factors = []
        for parameter, group in self.groups:
            state, factor = self.optimizer.state.get(parameter), torch.zeros_like(parameter)
            if isinstance(self.optimizer, torch.optim.SGD):
                factor = torch.full_like(parameter, 1 / (1 - group["momentum"]))
            elif state:
                correction = 1 - group["betas"][1] ** float(state["step"])
                factor = 1 / ((state["exp_avg_sq"] / correction).sqrt() + group["eps"])
            factors.append(group.get("initial_lr", group["lr"]) * factor)
        return self.sample(factors)

    def gradients(self, rows: Sequence[LabelledRow], beta: float | None = None) -> tuple[float, Tensor]:
        """Return the mean loss of rows, per token or per pair, and its gradient for each group of rows, (R, D)."""
        losses, gradients, parameters = [], [], [parameter for parameter, _ in self.groups]
        for k in range(min(GROUPS, len(rows))):
            loss = self._loss(rows[k::GROUPS], beta)
            losses.append(float(loss.detach()))
            gradients.append(self.sample(torch.autograd.grad(loss, parameters, materialize_grads=True)))
        return float(np.mean(losses)), torch.stack(gradients)

    def _loss(self, rows: Sequence[LabelledRow], beta: float | None) -> Tensor:
        parts = [segment for k in range(len(rows[0][0])) for segment in (row[k] for row, _ in rows)]
        ids_BL, mask_BL = (
            tensor.to(self.groups[0][0].device)
            for tensor in pad_rows([part.ids.astype(np.int32) for part in parts], [part.has_loss for part in parts])
        )
        present = torch.arange(ids_BL.shape[1]) < torch.tensor([[len(part.ids)] for part in parts])
        logits = self.model(input_ids=ids_BL, attention_mask=present.long().to(ids_BL.device), use_cache=False).logits
        losses = token_losses(logits[:, -ids_BL.shape[1] :][:, :-1][mask_BL[:, 1:]], ids_BL[mask_BL])
        if beta is None:
            return losses.mean()
        sums = losses.new_zeros(len(parts)).index_add(0, mask_BL.nonzero()[:, 0], losses)
        chosen, rejected = sums.chunk(2)
        reference = losses.new_tensor([difference for _, difference in rows])
        return -F.logsigmoid(beta * (rejected - chosen - reference)).mean()

    def measure(self, rows_of: Sequence[Sequence[LabelledRow]], clip: float = 1.0) -> Measurement:
        """Measure the effects of sources.

        Args:
            rows_of: recent rows of each source, at least one.
            clip: mean factor of gradient clipping.
        """
        effect, half_width = np.zeros((2, len(self.targets), len(rows_of)))
        with restored_modes(self.model), torch.enable_grad():
            self.model.eval()
            targets = [self.gradients(questions) for questions in self.targets.values()]
            factor_D = -self.stride * clip * self.preconditioner()
            for s, rows in enumerate(rows_of):
                step_RD = factor_D * self.gradients(rows, self.beta)[1]
                for t, (_, gradient_QD) in enumerate(targets):
                    terms_D = (gradient_QD.mean(dim=0) * step_RD.mean(dim=0)).cpu().double()
                    sampling = float(terms_D.var()) * len(terms_D) * (1 - 1 / self.stride)
                    product_RQ = (step_RD @ gradient_QD.T).cpu().double().numpy()
                    effect[t, s], half_width[t, s] = interval_of_mean(product_RQ, sampling)
        return Measurement(effect, half_width, np.array([loss for loss, _ in targets]))


def interval_of_mean(product_RQ: F64, sampling_variance: float = 0.0) -> tuple[float, float]:
    """Return the mean of a two-way table, and half the width of its interval; infinite with one row or column."""
    variance = sampling_variance
    for axis in (0, 1):
        means = product_RQ.mean(axis=axis)
        variance += float(means.var(ddof=1)) / len(means) if len(means) > 1 else np.inf
    quantile = stats.t.ppf((1 + COVERAGE) / 2, max(1, min(product_RQ.shape) - 1))
    return float(product_RQ.mean()), float(quantile * np.sqrt(variance))


def load_questions(targets: Sequence[str], tokenizer: Any, vocab_size: int) -> dict[str, list[LabelledRow]]:
    """Load the questions of targets: QUESTIONS of each, whose right answers carry loss.

    Raises:
        TargetError: a target cannot be read, or an answer has no tokens.
    """
    wrapped = HfTokenizer(getattr(tokenizer, "tokenizer", tokenizer), vocab_size=vocab_size)
    settings = TargetSettings(names=tuple(map(str, targets)), units_per_target=QUESTIONS, max_length=MAX_TOKENS)
    units = load_units(settings).rendered(wrapped)
    questions: dict[str, list[LabelledRow]] = {target: [] for target in units.targets}
    for unit, tokens in zip(units.units, units.tokenize(wrapped, MAX_TOKENS), strict=True):
        ids = tokens.input_ids.astype(np.int64)
        questions[unit.target].append(((Segment(ids, np.arange(len(ids)) >= tokens.first),), 0.0))
    return questions
