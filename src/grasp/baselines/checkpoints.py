"""Checkpoints of one training run: where they are, which learning rate led to them, their Adam moments.

`grasp retrain` and `grasp.training.train.train` keep `checkpoint-<step>` directories with `model.safetensors`,
`optimizer.safetensors` and `training.json`, which holds the recipe. A checkpoint of the Hugging Face trainer has its
learning rate in `trainer_state.json`; its moments are a pickle, which is not read. Written anew as
`optimizer.safetensors`, with `NAME.exp_avg` and `NAME.exp_avg_sq` of every parameter, they are.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from grasp.errors import ModelError
from grasp.files import entry_of
from grasp.methods.contract import MethodInputs
from grasp.models.causal_lm import ReferenceModel
from grasp.training.llama import StackedLlama
from grasp.training.recipe import TrainingRecipe
from grasp.training.train import OPTIMIZER, RECORD, WEIGHTS

CONFIG = "config.json"
TRAINER_STATE = "trainer_state.json"
NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One saved state of a run."""

    path: Path
    step: int | None
    # Of the optimizer step that led here; None: it is not written down. The last step of a rate that decays to zero
    # has a positive one.
    learning_rate: float | None
    # Of a model that has no directory, a hub name or a GGUF file: fingerprint of its weights as loaded.
    of_reference: str | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Checksum of the weights as they lie on disk; as they are loaded, where there is no directory."""
        if self.of_reference is not None:
            return self.of_reference
        files = sorted(self.path.glob("*.safetensors"), key=lambda file: file.name)
        return "+".join(entry_of(file).checksum for file in files if file.name != OPTIMIZER)

    @property
    def has_moments(self) -> bool:
        """Whether Adam's moments lie beside the weights in a form that is read."""
        return (self.path / OPTIMIZER).is_file() and any(
            (self.path / name).is_file() for name in (RECORD, TRAINER_STATE)
        )

    @cached_property
    def moments_fingerprint(self) -> str:
        """Checksum of Adam's moments and of the recipe beside them; empty: there are none."""
        if not self.has_moments:
            return ""
        files = [self.path / name for name in (OPTIMIZER, RECORD) if (self.path / name).is_file()]
        return "+".join(entry_of(file).checksum for file in files)

    def load(self, material: MethodInputs) -> ReferenceModel:
        """The checkpoint as a reference model, with tokenizer, dtype, device and batches of the artifact's own.

        Raises:
            ModelError: it cannot be loaded, or has weights of other names or shapes; the message names the first.
        """
        reference, settings = material.model, material.settings.model
        if self.of_reference is None:
            tokenizer = settings.tokenizer or settings.path
            settings = settings.model_copy(update={"path": str(self.path), "tokenizer": tokenizer, "check": False})
        loaded = ReferenceModel.load(settings)
        _refuse_other_shape(self.path, _shapes(loaded.model), _shapes(reference.model))
        loaded.batch_tokens = reference.batch_tokens
        return loaded

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Adam's (exp_avg, exp_avg_sq) by Hugging Face name of the parameter, float32 on the CPU.

        Raises:
            ModelError: there are none (see `has_moments`), or they are not of the recipe beside them.
        """
        if not self.has_moments:
            raise ModelError(
                f"{self.path}: has no {OPTIMIZER} with a {RECORD} beside it, or a {TRAINER_STATE}, so no Adam moments; "
                "ask for the form of the method without them, or keep them in training"
            )
        by_recipe = (self.path / RECORD).is_file()
        record = _read_record(self.path / RECORD) if by_recipe else {}
        try:
            state = load_file(self.path / OPTIMIZER)
            if not by_recipe:
                names = [key.removesuffix(".exp_avg") for key in state if key.endswith(".exp_avg")]
                return {name: (state[f"{name}.exp_avg"], state[f"{name}.exp_avg_sq"]) for name in names}
            shape = TrainingRecipe.model_validate(record["identity"]["recipe"]).shape
            first, second = (_named(shape, state, moment) for moment in ("exp_avg", "exp_avg_sq"))
        except (KeyError, ValidationError, SafetensorError, RuntimeError, OSError) as err:
            of_what = f"the recipe in {RECORD}" if by_recipe else "named parameters"
            raise ModelError(
                f"{self.path / OPTIMIZER}: not the moments of {of_what}: {' '.join(str(err).split())}; restore it from "
                "a copy"
            ) from err
        return {name: (first[name], second[name]) for name in first}


_KNOWN: WeakKeyDictionary[MethodInputs, tuple[Checkpoint, ...]] = WeakKeyDictionary()  # with the checksums they took


def checkpoints_of(material: MethodInputs) -> tuple[Checkpoint, ...]:
    """Checkpoints of the reference model's training, by step. Never empty: the model itself, if nothing else.

    Raises:
        ModelError: a directory that was given holds none, or one that was given is missing.
    """
    if material not in _KNOWN:
        own = Path(material.settings.model.path)
        if material.checkpoint_places or own.is_dir():
            _KNOWN[material] = find_checkpoints(material.checkpoint_places or (own,))
        else:
            of_reference = material.artifact.manifest.fingerprints["model"]
            _KNOWN[material] = (Checkpoint(own, None, None, of_reference),)
    return _KNOWN[material]


def find_checkpoints(places: Iterable[Path]) -> tuple[Checkpoint, ...]:
    """Checkpoints in the order of their steps; those without one last, as they were given.

    Args:
        places: each a checkpoint, or the directory of a run: its `checkpoint-*` and, if it is finished, itself.
    Raises:
        ModelError: a place that is neither.
    """
    paths = list(dict.fromkeys(path for place in places for path in _checkpoints_in(place)))
    found = [_checkpoint(path) for path in paths]
    return tuple(sorted(found, key=lambda one: float("inf") if one.step is None else one.step))


def _checkpoints_in(place: Path) -> list[Path]:
    inner = [path for path in place.glob("checkpoint-*") if NAME.fullmatch(path.name) and (path / CONFIG).is_file()]
    own = [place] if (place / CONFIG).is_file() else []
    if not inner and not own:
        what = "no such directory" if not place.exists() else f"neither {CONFIG} nor checkpoint-<step> directories"
        raise ModelError(
            f"checkpoints: {place}: {what}; expected a Hugging Face checkpoint, or the directory of a training run "
            "such as ENV/reference/seed-0"
        )
    for path in [*inner, *own]:
        if not any(file.name != OPTIMIZER for file in path.glob("*.safetensors")):
            raise ModelError(f"checkpoints: {path}: no {WEIGHTS}; save its weights as safetensors")
    return sorted(inner, key=lambda path: int(path.name.split("-")[1])) + own


def _checkpoint(path: Path) -> Checkpoint:
    step, rate = None, None
    if (path / RECORD).is_file():
        step, rate = _of_recipe(path / RECORD)
    elif (path / TRAINER_STATE).is_file():
        step, rate = _of_trainer(path / TRAINER_STATE)
    elif named := NAME.fullmatch(path.name):
        step = int(named.group(1))
    return Checkpoint(path, step, rate)


def _of_recipe(path: Path) -> tuple[int, float]:
    record = _read_record(path)
    try:
        recipe, step = TrainingRecipe.model_validate(record["identity"]["recipe"]), int(record["step"])
    except (KeyError, TypeError, ValidationError) as err:
        raise ModelError(f"{path}: not the record of a training run; restore it from a copy") from err
    return step, recipe.learning_rate_at(step - 1)


def _of_trainer(path: Path) -> tuple[int | None, float | None]:
    record = _read_record(path)
    step = record.get("global_step")
    rates = [line["learning_rate"] for line in record.get("log_history", []) if "learning_rate" in line]
    return (int(step) if step is not None else None), (float(rates[-1]) if rates else None)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ModelError(f"{path}: cannot be read as JSON: {err}; restore it from a copy") from err
    if not isinstance(record, dict):
        raise ModelError(f"{path}: got {type(record).__name__}, expected a record; restore it from a copy")
    return record


def _named(shape: Any, state: Mapping[str, Tensor], moment: str) -> dict[str, Tensor]:
    """A moment's flat buffers under the names of the parameters, by the layout that training uses."""
    layout = StackedLlama(shape, 1, torch.device("cpu"))
    with torch.no_grad():
        layout.matrices.copy_(state[f"matrices.{moment}"])
        layout.vectors.copy_(state[f"vectors.{moment}"])
    return layout.state(0)


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _refuse_other_shape(path: Path, got: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    differ = sorted(name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name))
    if differ:
        first = differ[0]
        raise ModelError(
            f"checkpoints: {path}: {len(differ)} weights are not those of the reference model, e.g. {first}: got "
            f"{got.get(first, 'none')}, expected {expected.get(first, 'none')}; pass checkpoints of its own training"
        )
