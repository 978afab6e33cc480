r"""Measure what one more step on each source does to the loss of each target, to first order.

With g_s the gradient of the mean loss per token of a source, g_t that of a target, and P the preconditioner of the
optimizer (Adam: 1 / (sqrt(v / (1 - beta2^k)) + eps) from its state), a step on the source alone changes the target by

    effect = -lr c <P g_s, g_t>,

where lr is the initial learning rate and c the mean factor of gradient clipping. Momentum spreads a gradient over
later steps, and does not change the sum. Both gradients are means of R groups of rows and Q groups of questions, so the
inner products form an R x Q table: the interval is that of its mean, from the variances of its row and column means and
of the sample of coordinates. Losses are computed without dropout. The model's gradients, modes and random numbers stay
as they are. Start with `Effects.measure`.

Shape letters: S sources, T targets, R groups of rows, Q groups of questions, D sampled coordinates.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from grasp.arrays import F64
from grasp.errors import ModelError
from grasp.models.causal_lm import pad_rows
from grasp.models.tokenizer import HfTokenizer
from grasp.monitor.batches import Segment
from grasp.settings import TargetSettings
from grasp.targets.load import load_units

GROUPS = 4  # of rows of a source, and of questions of a target
ROWS, QUESTIONS = 16, 32  # rows of a source and questions of a target in a measurement
MAX_TOKENS = 512  # of a row or a question
MAX_COORDINATES = 16_000_000  # numbers of all gradients of targets together: 64 MB in float32
COVERAGE = 0.95

Row = tuple[Segment, ...]  # one segment, or chosen and rejected side of a preference pair
LabelledRow = tuple[Row, float]  # and the reference's difference of log-probabilities


@dataclass(frozen=True, slots=True)
class Measurement:
    """Effects (T, S) with bounds of their intervals, and losses of the targets, (T,)."""

    effect_TS: F64
    low_TS: F64
    high_TS: F64
    loss_T: F64


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and restore modes and random numbers afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices, key=str)), torch.enable_grad():
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode


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
        self.model, self.targets, self.beta = model, targets, beta
        self.optimizer = optimizer
        while hasattr(self.optimizer, "optimizer"):  # of accelerate
            self.optimizer = self.optimizer.optimizer
        self.groups = [
            (parameter, group)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        if not self.groups:
            raise ModelError("no parameter of the model has a gradient; expected a model that is trained")
        total = sum(parameter.numel() for parameter, _ in self.groups)
        self.stride = max(1, -(-total * GROUPS * len(targets) // MAX_COORDINATES))
        while self.stride > 1 and any(self.stride % k == 0 for k in (2, 3, 5, 7)):
            self.stride += 1  # coprime to common widths, so that all columns of a matrix are sampled
        if self.preconditioner() is None:
            raise ModelError(
                f"the optimizer {type(self.optimizer).__name__} has an unknown preconditioner; expected Adam or SGD"
            )

    def sample(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return every `stride`-th coordinate of tensors that belong to the parameters, (D,), float32 or wider."""
        parts = []
        for k, (tensor, (parameter, _)) in enumerate(zip(tensors, self.groups, strict=True)):
            values = torch.zeros_like(parameter) if tensor is None else tensor
            part = values.detach().reshape(-1)[k % self.stride :: self.stride]
            parts.append(part.to(self.groups[0][0].device, torch.promote_types(part.dtype, torch.float32)))
        return torch.cat(parts)

    def preconditioner(self) -> Tensor | None:
        """Return the change of the sampled parameters per unit of gradient, (D,); None: the optimizer is unknown."""
        factors: list[Tensor] = []
        for parameter, group in self.groups:
            state, rate = self.optimizer.state.get(parameter, {}), group.get("initial_lr", group["lr"])
            if "exp_avg_sq" in state:
                correction = 1 - group["betas"][1] ** float(state["step"])
                factor = rate / ((state["exp_avg_sq"] / correction).sqrt() + group["eps"])
            elif isinstance(self.optimizer, torch.optim.SGD):
                factor = torch.full_like(parameter, rate / (1 - group["momentum"]))
            elif isinstance(self.optimizer, torch.optim.Adam):  # before its first step, or without a gradient so far
                factor = torch.zeros_like(parameter)
            else:
                return None
            factors.append(factor)
        return self.sample(factors)

    def gradient(self, rows: Sequence[LabelledRow], beta: float | None = None) -> tuple[float, Tensor]:
        """Return the mean loss of rows, per token or per pair, and its gradient, (D,)."""
        loss = self._loss(rows, beta)
        gradients = torch.autograd.grad(loss, [parameter for parameter, _ in self.groups], allow_unused=True)
        return float(loss.detach()), self.sample(gradients)

    def _loss(self, rows: Sequence[LabelledRow], beta: float | None) -> Tensor:
        parts = [segment for k in range(len(rows[0][0])) for segment in (row[k] for row, _ in rows)]
        ids_BL, mask_BL = (
            tensor.to(self.groups[0][0].device)
            for tensor in pad_rows([part.ids.astype(np.int32) for part in parts], [part.has_loss for part in parts])
        )
        present = torch.arange(ids_BL.shape[1]) < torch.tensor([[len(part.ids)] for part in parts])
        logits = self.model(input_ids=ids_BL, attention_mask=present.long().to(ids_BL.device), use_cache=False).logits
        scored = logits[:, -ids_BL.shape[1] :][:, :-1][mask_BL[:, 1:]]
        losses = F.cross_entropy(
            scored.to(torch.promote_types(scored.dtype, torch.float32)), ids_BL[mask_BL], reduction="none"
        )
        if beta is None:
            return losses.mean()
        sums = losses.new_zeros(len(parts)).index_add(0, mask_BL.nonzero()[:, 0], losses)
        chosen, rejected = sums.chunk(2)
        reference = losses.new_tensor([difference for _, difference in rows])
        return -F.logsigmoid(beta * (rejected - chosen - reference)).mean()

    def measure(self, rows_of: Sequence[Sequence[LabelledRow]], clip: float = 1.0) -> Measurement:
        """Measure the effects of sources.

        Args:
            rows_of: recent rows of each source; none: its effect is NaN.
            clip: mean factor of gradient clipping.
        """
        shape = len(self.targets), len(rows_of)
        effect, half_width = np.full(shape, np.nan), np.full(shape, np.inf)
        with evaluation_mode(self.model):
            losses: list[float] = []
            gradients = []
            for questions in self.targets.values():
                measured = [self.gradient(group) for group in split_groups(questions)]
                losses.append(float(np.mean([loss for loss, _ in measured])))
                gradients.append(torch.stack([gradient for _, gradient in measured]))
            factor_D = self.preconditioner()
            for s, rows in enumerate(rows_of):
                products: list[list[F64]] = [[] for _ in gradients]  # by target and group of rows, (Q,)
                mean_D: Any = 0.0
                groups = split_groups(rows)
                for group in groups:
                    step_D = -self.stride * clip * factor_D * self.gradient(group, self.beta)[1]
                    mean_D = mean_D + step_D / len(groups)
                    for t, gradient_QD in enumerate(gradients):
                        products[t].append((gradient_QD @ step_D).double().cpu().numpy())
                for t, gradient_QD in enumerate(gradients if groups else ()):
                    terms_D = gradient_QD.mean(dim=0) * mean_D
                    sampling = float(terms_D.double().var()) * len(terms_D) * (1 - 1 / self.stride)
                    effect[t, s], half_width[t, s] = interval_of_mean(np.stack(products[t]), sampling)
        return Measurement(effect, effect - half_width, effect + half_width, np.array(losses))


def interval_of_mean(product_RQ: F64, sampling_variance: float = 0.0) -> tuple[float, float]:
    """Return the mean of a two-way table, and half the width of its interval; infinite with one row or column."""
    variance = sampling_variance
    for axis in (0, 1):
        means = product_RQ.mean(axis=axis)
        variance += float(means.var(ddof=1)) / len(means) if len(means) > 1 else np.inf
    quantile = stats.t.ppf((1 + COVERAGE) / 2, max(1, min(product_RQ.shape) - 1))
    return float(product_RQ.mean()), float(quantile * np.sqrt(variance))


def split_groups(rows: Sequence[LabelledRow]) -> list[list[LabelledRow]]:
    """Split rows into at most GROUPS groups of about the same size."""
    return [list(rows[k::GROUPS]) for k in range(min(GROUPS, len(rows)))]


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
