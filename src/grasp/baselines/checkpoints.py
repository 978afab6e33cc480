"""Checkpoints of a training run: their paths, learning rates and Adam moments.

Start with `training_checkpoints`. `grasp retrain` and `grasp.training.train.train` write `checkpoint-<step>`
directories with `model.safetensors`, `optimizer.safetensors` and `training.json`, which contains the recipe. A
checkpoint of the Hugging Face trainer has its learning rate in `trainer_state.json`. Its moments are a pickle, which is
never read; convert them to `optimizer.safetensors` with `NAME.exp_avg` and `NAME.exp_avg_sq` for each parameter.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from grasp.errors import ModelError
from grasp.files import entry_of
from grasp.methods.contract import MethodInputs
from grasp.models.causal_lm import ReferenceModel
from grasp.text import plain
from grasp.training.recipe import TrainingRecipe
from grasp.training.train import OPTIMIZER, RECORD, WEIGHTS

CONFIG = "config.json"
TRAINER_STATE = "trainer_state.json"
NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A saved state of a training run."""

    path: Path
    step: int | None
    # Learning rate of the optimizer step that led to this state, None if not recorded. It is positive even for the last
    # step of a schedule that decays to zero.
    learning_rate: float | None
    # Fingerprint of the loaded weights, for a model without a directory of its own (a hub name or a GGUF file).
    reference_fingerprint: str | None = None

    @property
    def name(self) -> str:
        """Name for messages and notes."""
        return self.path.name if self.step is None else f"step {self.step}"

    @cached_property
    def fingerprint(self) -> str:
        """Checksum of the weight files; of the loaded weights if there is no directory."""
        if self.reference_fingerprint is not None:
            return self.reference_fingerprint
        files = sorted(self.path.glob("*.safetensors"), key=lambda file: file.name)
        return "+".join(entry_of(file).checksum for file in files if file.name != OPTIMIZER)

    @property
    def has_moments(self) -> bool:
        """Return whether the directory has Adam's moments in a supported format."""
        return (self.path / OPTIMIZER).is_file() and any(
            (self.path / name).is_file() for name in (RECORD, TRAINER_STATE)
        )

    @cached_property
    def moments_fingerprint(self) -> str:
        """Checksum of Adam's moments and their recipe; empty if there are none."""
        if not self.has_moments:
            return ""
        files = [self.path / name for name in (OPTIMIZER, RECORD) if (self.path / name).is_file()]
        return "+".join(entry_of(file).checksum for file in files)

    def load(self, inputs: MethodInputs) -> ReferenceModel:
        """Load the checkpoint with the tokenizer, dtype, device and batch size of the reference model.

        Raises:
            ModelError: it cannot be loaded, or names or shapes of weights differ; the message names the first.
        """
        reference, settings = inputs.model, inputs.settings.model
        if self.reference_fingerprint is None:
            tokenizer = settings.tokenizer or settings.path
            settings = settings.model_copy(update={"path": str(self.path), "tokenizer": tokenizer, "check": False})
        loaded = ReferenceModel.load(settings)
        got, expected = (
            {name: tuple(tensor.shape) for name, tensor in model.model.state_dict().items()}
            for model in (loaded, reference)
        )
        if differ := sorted(name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name)):
            first = differ[0]
            raise ModelError(
                f"checkpoints: {self.path}: {len(differ)} weights differ from the reference model, e.g. {first}: got "
                f"{got.get(first, 'none')}, expected {expected.get(first, 'none')}; pass checkpoints of its own "
                "training"
            )
        loaded.batch_tokens = reference.batch_tokens
        return loaded

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return Adam's (exp_avg, exp_avg_sq) by Hugging Face parameter name, float32 on the CPU.

        Raises:
            ModelError: they are not those of named parameters.
        """
        assert self.has_moments
        try:
            state = load_file(self.path / OPTIMIZER)
            names = [key.removesuffix(".exp_avg") for key in state if key.endswith(".exp_avg")]
            return {name: (state[f"{name}.exp_avg"], state[f"{name}.exp_avg_sq"]) for name in names}
        except (KeyError, SafetensorError, OSError) as err:
            raise ModelError(
                f"{self.path / OPTIMIZER}: not the moments of named parameters: {' '.join(str(err).split())}; restore "
                "it from a copy"
            ) from err


# Checkpoints by inputs, so that their checksums are computed once.
_CHECKPOINTS: WeakKeyDictionary[MethodInputs, tuple[Checkpoint, ...]] = WeakKeyDictionary()


def training_checkpoints(inputs: MethodInputs) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of the reference model's training, by step; the model itself if there are no others.

    Raises:
        ModelError: a directory that the user passed is missing or contains no checkpoint.
    """
    if inputs not in _CHECKPOINTS:
        model_path = Path(inputs.settings.model.path)
        if inputs.checkpoint_paths or model_path.is_dir():
            _CHECKPOINTS[inputs] = find_checkpoints(inputs.checkpoint_paths or (model_path,))
        else:
            reference_fingerprint = inputs.artifact.manifest.fingerprints["model"]
            _CHECKPOINTS[inputs] = (Checkpoint(model_path, None, None, reference_fingerprint),)
    return _CHECKPOINTS[inputs]


def find_checkpoints(paths: Iterable[Path]) -> tuple[Checkpoint, ...]:
    """Return checkpoints ordered by step; those without a step last, in the given order.

    Args:
        paths: checkpoints, or directories of runs (their `checkpoint-*`, and the directory itself if it is finished).
    Raises:
        ModelError: a path is neither.
    """
    checkpoints: dict[Path, Checkpoint] = {}
    for directory in paths:
        candidates = [path for path in directory.glob("checkpoint-*") if NAME.fullmatch(path.name)]
        candidates = [*sorted(candidates, key=lambda path: int(path.name.split("-")[1])), directory]
        saved = [path for path in candidates if (path / CONFIG).is_file()]
        if not saved:
            problem = "no such directory"
            if directory.exists():
                problem = f"neither {CONFIG} nor checkpoint-<step> directories"
            raise ModelError(
                f"checkpoints: {directory}: {problem}; expected a Hugging "
                "Face checkpoint, or the directory of a training run such as ENV/reference/seed-0"
            )
        for path in saved:
            if not any(file.name != OPTIMIZER for file in path.glob("*.safetensors")):
                raise ModelError(f"checkpoints: {path}: no {WEIGHTS}; save its weights as safetensors")
            step, rate = None, None
            if (path / RECORD).is_file():
                recipe, step = read_recipe(path / RECORD)
                rate = recipe.learning_rate_at(step - 1)
            elif (path / TRAINER_STATE).is_file():
                state = _read_record(path / TRAINER_STATE)
                rates = [line["learning_rate"] for line in state.get("log_history", []) if "learning_rate" in line]
                step = int(state["global_step"]) if state.get("global_step") is not None else None
                rate = float(rates[-1]) if rates else None
            elif named := NAME.fullmatch(path.name):
                step = int(named.group(1))
            checkpoints[path] = Checkpoint(path, step, rate)
    return tuple(sorted(checkpoints.values(), key=lambda saved: float("inf") if saved.step is None else saved.step))


def read_recipe(path: Path) -> tuple[TrainingRecipe, int]:
    """Return the recipe and the step of the record of a training run."""
    record = _read_record(path)
    with _restored(path):
        return TrainingRecipe.model_validate(record["identity"]["recipe"]), int(record["step"])


def _read_record(path: Path) -> dict[str, Any]:
    with _restored(path):
        return dict(json.loads(path.read_text(encoding="utf-8")))


@contextmanager
def _restored(path: Path) -> Iterator[None]:
    """Report a record that cannot be read or has other fields."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ModelError(f"{path}: not the record of a training run: {plain(err)}; restore it from a copy") from err
