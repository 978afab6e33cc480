"""Train the model of a build to a state in the middle of the training that is predicted, before kernels read it.

Initially, the gradients of all rows have a common part, such as the format of the answers. It does not distinguish
rows, and some steps of training remove it, so that the gradients of the trained model predict subsets better. After
half of a training they are those that the runs have on average (experiments/finetune). The trained model is stored in
the directory of the artifact; replays and retrainings begin with the model before it. Start with `warm_up`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging as hf_logging

from grasp.artifact.manifest import MODEL, TOKENS
from grasp.artifact.writer import lock_artifact
from grasp.corpus import RowStore
from grasp.errors import ArtifactError, SettingsError
from grasp.files import atomic_path, differences, discard
from grasp.models.build_source import WARM_UP, WarmUpRecord
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import is_adapter
from grasp.pipeline.add_replay import refuse_longer_rows, training_problem
from grasp.pipeline.replay_plan import make_trainable, read_recipe
from grasp.progress import Progress
from grasp.settings import SHARD_ROWS, CorpusSettings, ModelSettings, path_settings
from grasp.store.records import dump_json, read_record
from grasp.training.adamw import AdamWTraining
from grasp.training.fine_tuning_recipe import FineTuningRecipe, default_recipe
from grasp.training.trajectory import Trajectory

STATES = "warm-up"  # in the artifact, while the model is trained


def warm_up(
    model: ModelSettings | Mapping[str, Any] | Path | str,
    corpus: CorpusSettings | Mapping[str, Any] | Path | str,
    steps: int | None,
    out: Path | str,
    *,
    recipe: FineTuningRecipe | Mapping[str, Any] | Path | str | None = None,
    shard_rows: int = SHARD_ROWS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Train a model on random rows of a corpus, as `build` does with `warm_up`; return the directory of the result.

    The result is stored in `out`, and a finished one is reused. An interrupted training is resumed by the same call,
    with the same weights on a CPU.

    Args:
        model: directory or hub name of a causal LM, or settings of the model by name: path, dtype, ...
        corpus: path of texts or chats, or settings of the corpus by name: path, text_column, max_length, ...
        steps: steps of the training by the recipe that are taken. None: half of them.
        out: directory of an artifact.
        recipe: the training: a YAML or JSON file, or settings by name, see `build`. Default: as of `build`.
        shard_rows: rows per shard.
        seed: seed of the order of the rows.
        progress: receives stages, notes and numbers of rows.
    Raises:
        ArtifactError: the directory has a model that was trained with other settings.
        SettingsError: the training is no fine-tuning of all parameters on texts, has fewer steps, or rows are longer
            than the recipe's.
        ModelError: the training diverges.
    """
    out, progress, recipe = Path(out), progress or Progress(), read_recipe(recipe)
    corpus = path_settings(CorpusSettings, corpus, "corpus")
    model_settings = path_settings(ModelSettings, model, "model")
    if model_settings.path == str(out / MODEL):
        return out / MODEL
    if problem := warm_up_problem(model_settings, corpus, recipe):
        raise SettingsError(f"--warm-up: {problem}")
    with lock_artifact(out):
        directory = out / MODEL
        requested: dict[str, Any] = {
            "model": model_settings.path,
            "corpus": corpus.path,
            "recipe": None if recipe is None else recipe.model_dump(mode="json"),
            "steps": steps,
            "seed": seed,
        }
        if (directory / WARM_UP).exists():
            earlier = read_record(directory / WARM_UP, WarmUpRecord).model_dump(exclude={"fingerprint"})
            if changed := list(differences(earlier, requested)):
                raise ArtifactError(
                    f"{directory}: was trained with other settings: {'; '.join(changed)}; choose another --out, or "
                    f"delete {out}"
                )
            return directory
        reference = ReferenceModel.load(model_settings)
        fingerprint = reference.fingerprint()
        progress.stage("rows", rows=None, tokens=None)
        tokenizer, context = reference.tokenizer, reference.context
        rows = RowStore.write(out / TOKENS, corpus, tokenizer, shard_rows=shard_rows, context=context)
        recipe = recipe or default_recipe(rows.n_rows)
        refuse_longer_rows(recipe, rows, out)
        all_steps = recipe.steps(rows.n_rows)
        count = all_steps // 2 if steps is None else steps
        if steps is None and count == 0:  # a training of one step
            return Path(model_settings.path)
        if not 0 < count <= all_steps:
            raise SettingsError(f"--warm-up: got {count}, expected 1 to {all_steps}, the steps of the training")
        trained, notes = make_trainable(reference.model, reference.frozen, recipe, seed)
        training = AdamWTraining(trained, recipe.optimizer(rows.n_rows))
        order = recipe.order(rows.n_rows, seed)[:count]
        for line in (*notes, *training.notes):
            progress.note(line)
        trajectory = Trajectory(training, rows, order, directory=out / STATES)
        progress.note(
            f"--warm-up: the model is trained {count} of the {all_steps} steps of the training, of {recipe.batch_rows} "
            f"rows; see {directory}"
        )
        progress.stage("warm-up", rows=sum(map(len, order)), tokens=None)
        trajectory.train(lambda done: progress.advance(len(order[done - 1]), 0))
        with atomic_path(directory) as part:
            hf_logging.disable_progress_bar()  # the command line has its own progress display
            trained.save_pretrained(part)
            tokenizer.save(part)
            record = WarmUpRecord(fingerprint=fingerprint, **requested)
            (part / WARM_UP).write_bytes(dump_json(record))
        discard(out / STATES)
    return directory


def warm_up_problem(model: ModelSettings, corpus: CorpusSettings, recipe: FineTuningRecipe | None) -> str:
    """Return why a model cannot be trained to a state, or an empty text."""
    if is_adapter(model.path) or (recipe is not None and recipe.lora_r is not None):
        return (
            "trains all parameters, but got an adapter; train the adapter for these steps, and pass its directory as "
            "--model"
        )
    return training_problem(model, corpus)
