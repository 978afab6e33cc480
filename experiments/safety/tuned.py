"""A causal LM whose upper layers are fine-tuned with LoRA; what lies below them is run once a text and kept.

Shape letters: B sequences, L positions, P positions that carry loss, H hidden width, V vocabulary.
"""

import copy
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from experiments.safety.setting import NEGATIVE, POSITIVE, Row
from grasp.models.causal_lm import ReferenceModel
from grasp.models.tokenizer import HfTokenizer
from grasp.seeds import stream

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj"]
RANK, ALPHA, RATE, BATCH = 8, 16, 2e-3, 8
ENOUGH = 0.02  # mean loss of an epoch, nats per token: what can be learned is learned
RUN_AT_ONCE = 32  # sequences in one forward pass


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, and where the completion begins."""

    ids: tuple[int, ...]
    first: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Hidden states below the adapters, the next token where it carries loss (-100 elsewhere), 1 where no padding."""

    state_BLH: Tensor
    label_BL: Tensor
    real_BL: Tensor


class Base:
    """The model as it was before: its lower part, its upper part, its tokenizer."""

    def __init__(self, model: nn.Module, tokenizer: HfTokenizer, *, layers: int, keep_bytes: int = 1 << 30) -> None:
        self.whole, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        count = model.config.num_hidden_layers
        self.split = max(0, count - layers)
        self.lower = _cut(model, slice(0, self.split)).model
        self.lower.norm = nn.Identity()
        self._cache: dict[bytes, Tensor] = {}
        self._remaining_bytes = keep_bytes

    @classmethod
    def from_reference(cls, reference: ReferenceModel, layers: int) -> "Base":
        return cls(reference.model, reference.tokenizer, layers=layers)

    def upper(self) -> nn.Module:
        """A copy of the upper layers with the head, ready for adapters."""
        return _cut(self.whole, slice(self.split, None))

    def sequences(self, rows: Sequence[Row], longest: int) -> list[Tokens]:
        """Prompt and completion as tokens; a prompt that is too long loses its beginning."""
        prompts = self.tokenizer.encode([row.prompt for row in rows])
        completions = self.tokenizer.encode([row.completion for row in rows])
        out = []
        for whole, completion in zip(prompts, completions, strict=True):
            answer = completion[: longest - 1]
            prompt = whole[max(0, len(whole) + len(answer) - longest) :]
            out.append(Tokens((*prompt, *answer), len(prompt)))
        return out

    @torch.no_grad()
    def states(self, sequences: Sequence[Tokens]) -> list[Tensor]:
        """Hidden states below the adapters, (L, H) each; known texts are not run again."""
        keys = [
            hashlib.blake2b(np.array(sequence.ids, np.int32).tobytes(), digest_size=16).digest()
            for sequence in sequences
        ]
        states_by_key: dict[bytes, Tensor] = {key: self._cache[key] for key in keys if key in self._cache}
        missing = {key: sequence for key, sequence in zip(keys, sequences, strict=True) if key not in states_by_key}
        order = sorted(missing, key=lambda key: len(missing[key].ids))
        for start in range(0, len(order), RUN_AT_ONCE):
            chunk = order[start : start + RUN_AT_ONCE]
            state_BLH = self._below(_padded([missing[key].ids for key in chunk]))
            states_by_key |= {key: state_BLH[b, : len(missing[key].ids)].clone() for b, key in enumerate(chunk)}
        for key in missing:
            if self._remaining_bytes >= (size := states_by_key[key].nbytes):
                self._cache[key], self._remaining_bytes = states_by_key[key], self._remaining_bytes - size
        return [states_by_key[key] for key in keys]

    def _below(self, ids_BL: Tensor) -> Tensor:
        if self.split == 0:
            return self.whole.get_input_embeddings()(ids_BL)
        return self.lower(input_ids=ids_BL, use_cache=False).last_hidden_state

    def batches(self, sequences: Sequence[Tokens]) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Sequences alike in length together, with their places."""
        order = np.argsort([len(sequence.ids) for sequence in sequences], kind="stable")
        for start in range(0, len(order), RUN_AT_ONCE):
            place = order[start : start + RUN_AT_ONCE]
            chosen = [sequences[i] for i in place]
            yield place, collate(self.states(chosen), chosen)


def collate(states: Sequence[Tensor], sequences: Sequence[Tokens], longest: int | None = None) -> Batch:
    """Pad on the right: under causal attention padding reaches no real position."""
    longest = longest or max(len(sequence.ids) for sequence in sequences)
    state_BLH = torch.zeros(len(states), longest, states[0].shape[1])
    label_BL = torch.full((len(states), longest), -100)
    real_BL = torch.zeros(len(states), longest, dtype=torch.int64)
    for b, (state, tokens) in enumerate(zip(states, sequences, strict=True)):
        state_BLH[b, : len(state)] = state
        label_BL[b, tokens.first - 1 : len(tokens.ids) - 1] = torch.tensor(tokens.ids[tokens.first :])
        real_BL[b, : len(state)] = 1
    return Batch(state_BLH, label_BL, real_BL)


def _cut(model: nn.Module, layers: slice) -> Any:
    """The model with some of its layers."""
    out = copy.copy(model)
    out._modules = dict(model._modules)
    out.config = copy.deepcopy(model.config)
    body = copy.copy(model.model)
    body._modules = dict(model.model._modules)
    body.layers = nn.ModuleList(copy.deepcopy(layer) for layer in model.model.layers[layers])
    body.config = out.config
    out.config.num_hidden_layers = len(body.layers)
    out.model = body
    return out


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    out = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.int64)
    for b, row in enumerate(rows):
        out[b, : len(row)] = torch.tensor(row)
    return out


def label_logits(upper: Any, batch: Batch) -> Tensor:
    """Logits at the positions that carry loss, (P, V), sequence after sequence."""
    core = upper.get_base_model() if isinstance(upper, PeftModel) else upper
    hidden_BLH = core.model(inputs_embeds=batch.state_BLH, use_cache=False).last_hidden_state
    return core.lm_head(hidden_BLH[batch.label_BL != -100]).float()


def losses(upper: Any, batch: Batch) -> Tensor:
    """Mean loss on the completion of each sequence, (B,), nats per token."""
    chosen_BL = batch.label_BL != -100
    loss_P = F.cross_entropy(label_logits(upper, batch), batch.label_BL[chosen_BL], reduction="none")
    sequence_P = chosen_BL.nonzero()[:, 0]
    count_B = chosen_BL.sum(dim=1)
    return torch.zeros(len(count_B)).index_add(0, sequence_P, loss_P) / count_B


class Tuned:
    """The model with adapters in its upper layers."""

    def __init__(self, base: Base, model: PeftModel, longest: int) -> None:
        self.base, self.model, self.longest = base, model.eval(), longest

    @classmethod
    def train(cls, base: Base, rows: Sequence[Row], *, seed: int, epochs: int, longest: int) -> "Tuned":
        """Fine-tune on the completions of the rows; the same arguments give the same weights.

        Ends before the last epoch where the mean loss of one is below `ENOUGH`.
        """
        torch.manual_seed(seed)
        how = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, bias="none", target_modules=MODULES)
        model = get_peft_model(base.upper(), how).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01)
        sequences = base.sequences(rows, longest)
        states = base.states(sequences)
        steps = epochs * -(-len(rows) // BATCH)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1, (step + 1) / 10) * (1 - step / steps)
        )
        for epoch in range(epochs):
            order = stream(seed, "safety", "epoch", epoch).permutation(len(rows))
            total = 0.0
            for start in range(0, len(rows), BATCH):
                place = order[start : start + BATCH]
                batch = collate([states[i] for i in place], [sequences[i] for i in place])
                loss = losses(model, batch).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                schedule.step()
                total += loss.item() * len(place)
            if total / len(rows) < ENOUGH:
                break
        return cls(base, model, longest)

    @classmethod
    def open(cls, base: Base, path: Path, longest: int) -> "Tuned":
        """The adapters that `save` wrote."""
        return cls(base, PeftModel.from_pretrained(base.upper(), path), longest)

    def save(self, path: Path) -> None:
        """Write the adapters, whole or not at all."""
        part = path.with_name(path.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        self.model.save_pretrained(part)
        part.replace(path)

    @contextmanager
    def _seen(self, adapted: bool) -> Iterator[None]:
        if adapted:
            yield
        else:
            with self.model.disable_adapter():
                yield

    @torch.no_grad()
    def losses(self, rows: Sequence[Row], *, adapted: bool = True) -> NDArray[np.float64]:
        """Mean loss on each completion, nats per token; without the adapters where `adapted` is false."""
        sequences = self.base.sequences(rows, self.longest)
        out = np.zeros(len(rows))
        with self._seen(adapted):
            for place, batch in self.base.batches(sequences):
                out[place] = losses(self.model, batch).numpy()
        return out

    @torch.no_grad()
    def log_odds(self, rows: Sequence[Row], *, adapted: bool = True) -> NDArray[np.float64]:
        """Log-odds of positive against negative after each prompt, whatever its completion."""
        ids = [token_ids[0] for token_ids in self.base.tokenizer.encode([POSITIVE, NEGATIVE])]
        sequences = self.base.sequences(rows, self.longest)
        out = np.zeros(len(rows))
        with self._seen(adapted):
            for place, batch in self.base.batches(sequences):
                first_B = torch.tensor([sequences[i].first - 1 for i in place])
                label_BL = torch.full_like(batch.label_BL, -100)
                label_BL[torch.arange(len(place)), first_B] = 0
                logits_BV = label_logits(self.model, Batch(batch.state_BLH, label_BL, batch.real_BL))
                out[place] = (logits_BV[:, ids[0]] - logits_BV[:, ids[1]]).numpy()
        return out

    def checkpoint(self, path: Path) -> Path:
        """The whole model with the adapters merged into its weights, as `grasp build` reads it."""
        part = path.with_name(path.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        merged = copy.deepcopy(self.model).merge_and_unload()
        whole = _cut(self.base.whole, slice(0, self.base.split))
        whole.model.layers.extend(merged.model.layers)
        whole.config.num_hidden_layers = len(whole.model.layers)
        whole.save_pretrained(part)
        self.base.tokenizer.save(part)
        shutil.rmtree(path, ignore_errors=True)
        part.replace(path)
        return path
