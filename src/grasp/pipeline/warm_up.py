"""Train the model of a build a few steps further before kernels read it.

Initially, the gradients of all rows have a common part, such as the format of the answers. It does not distinguish
rows, and a few steps of training remove it, so that the gradients of the trained model predict subsets better. The
trained model is stored in the directory of the artifact. Start with `warm_up`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging as hf_logging

from grasp.artifact.writer import lock_artifact
from grasp.corpus import RowStore
from grasp.errors import ArtifactError, SettingsError
from grasp.files import atomic_path, differences, discard
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import is_adapter
from grasp.pipeline.add_replay import WARM_UP, refuse_longer_rows, refuse_untrainable
from grasp.pipeline.proxy import MODEL
from grasp.pipeline.replay_plan import make_trainable
from grasp.progress import Progress
from grasp.settings import BuildSettings
from grasp.targets import Unit, load_units
from grasp.training.adamw import AdamWTraining
from grasp.training.fine_tuning_recipe import FineTuningRecipe, default_recipe
from grasp.training.trajectory import Trajectory

STATES = "warm-up"  # in the artifact, while the model is trained


def warm_up(
    out: Path,
    settings: BuildSettings,
    steps: int,
    recipe: FineTuningRecipe | None,
    progress: Progress,
    *,
    units: Sequence[Unit] = (),
) -> Path:
    """Train the model of `settings` on random rows, and return the directory of the result; a finished one is reused.

    An interrupted training is resumed by the same call, with the same weights on a CPU.

    Args:
        out: directory of the artifact.
        settings: resolved settings of the build, with the original model; or, of a resumed build, with the result.
        steps: optimizer steps; the learning rate decays to its end within them.
        recipe: optimizer and batch. Default: `default_recipe`.
        units: units of targets that are passed as objects.
    Raises:
        ArtifactError: the directory has a model that was trained with other settings.
        SettingsError: the training is no fine-tuning of all parameters on texts, or rows are longer than the recipe's.
        ModelError: the training diverges.
    """
    if settings.model.path == str(out / MODEL):
        return out / MODEL
    if steps < 1:
        raise SettingsError(f"--warm-up: got {steps}, expected at least 1 step")
    refuse_untrainable(settings, "--warm-up")
    if settings.train != "further":
        raise SettingsError(
            "--warm-up: has no effect with --train new, where the model is not trained further; omit it"
        )
    load_units(settings.targets, units)  # report errors before the training
    if is_adapter(settings.model.path) or (recipe is not None and recipe.lora_r is not None):
        raise SettingsError(
            "--warm-up: trains all parameters, but got an adapter; train the adapter for these steps, and pass its "
            "directory as --model"
        )
    record = {
        "model": settings.model.path,
        "corpus": settings.corpus.path,
        "recipe": ({} if recipe is None else recipe.model_dump(mode="json")) | {"max_steps": steps},
        "seed": settings.features.seed,
    }
    with lock_artifact(out):
        directory = out / MODEL
        if (directory / WARM_UP).exists():
            if changed := list(differences(json.loads((directory / WARM_UP).read_bytes()), record)):
                raise ArtifactError(
                    f"{directory}: was trained with other settings: {'; '.join(changed)}; choose another --out, or "
                    f"delete {out}"
                )
            return directory
        reference = ReferenceModel.load(settings.model)
        progress.stage("rows", rows=None, tokens=None)
        rows = RowStore.write(
            out / "tokens",
            settings.corpus,
            reference.tokenizer,
            shard_rows=settings.shard_rows,
            context=reference.context,
        )
        recipe = (recipe or default_recipe(rows.n_rows)).model_copy(update={"max_steps": steps})
        refuse_longer_rows(recipe, rows, out)
        tokenizer = reference.tokenizer
        model, notes = make_trainable(reference.model, reference.frozen, recipe, settings.features.seed)
        training = AdamWTraining(model, recipe.optimizer(rows.n_rows))
        order = recipe.order(rows.n_rows, settings.features.seed)
        for line in (*notes, *training.notes):
            progress.note(line)
        trajectory = Trajectory(training, rows, order, directory=out / STATES)
        progress.note(f"--warm-up: the model is trained {steps} steps of {recipe.batch_rows} rows; see {directory}")
        progress.stage("warm-up", rows=sum(map(len, order)), tokens=None)
        trajectory.train(lambda done: progress.advance(len(order[done - 1]), 0))
        with atomic_path(directory) as part:
            hf_logging.disable_progress_bar()  # the command line has its own progress display
            model.save_pretrained(part)
            tokenizer.save(part)
            (part / WARM_UP).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        discard(out / STATES)
    return directory
