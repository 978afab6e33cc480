"""Replay trainings on the rows of a finished artifact, and add a column of relevance for each target.

A replay differentiates a training: for further training, a fine-tuning of the artifact's model; for a new model,
several trainings of a small model from scratch (see `grasp.pipeline.replay_plan`). The derivative of a target's utility
with respect to the weight of every row is stored as the array `relevance_replay`, if the checks of
`grasp.training.replay_checks` pass. Otherwise the artifact keeps its other kernels, and its manifest says so.
Start with `replay_targets`.

Shape letters: N rows, K steps, T targets.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from grasp.artifact.manifest import REPLAY, ReplayRecord
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_documents
from grasp.artifact.writer import ArraySpec, add_target_columns, lock_artifact
from grasp.corpus.row_store import RowStore
from grasp.errors import ArtifactError, SettingsError
from grasp.files import differences, discard
from grasp.models.build_source import BuildSource
from grasp.models.causal_lm import ReferenceModel
from grasp.models.forward_pass import Reference
from grasp.pipeline.replay_plan import MEGABYTE, Forecast, ReplayPlan, forecast_replay, plan_replay
from grasp.progress import Progress
from grasp.settings import BuildSettings, CorpusSettings, ModelSettings, ReplaySettings
from grasp.training.fine_tuning_recipe import FineTuningRecipe
from grasp.training.metagradient import Target
from grasp.training.replayed_rows import ReplayedRows, replay_rows, scores_from_text
from grasp.training.trajectory import Trajectory
from grasp.yaml_files import validated

ARRAY = "relevance_replay"
SPEC = ArraySpec(
    1,
    "derivative of the target's utility after a training by the weight of a row; standard deviations over the rows",
    "positive: more weight of the row in training should lower the target's loss",
)
NEW_MODEL_NOTE = "predict and evaluate use it for subsets; score, select, mix and report do not, for a new model"


def replay_targets(
    out: Path,
    recipe: FineTuningRecipe | None,
    settings: ReplaySettings,
    *,
    overrides: Mapping[str, Any] | None = None,
    model: Reference | None = None,
    progress: Progress | None = None,
) -> ReplayRecord:
    """Replay the targets of the artifact `out` that have no replay, and return the record of the last replay.

    A call that was killed is resumed by the same call, to the same bytes on a CPU.

    Args:
        out: directory of the artifact.
        recipe: training that is replayed. Default: that of an earlier replay of the artifact, else see `plan_replay`.
        settings: number of orders, probes and memory of the replay. Default of each: that of an earlier replay of the
            artifact.
        overrides: settings of the user, see `BuildSource`.
        model: the loaded model of the build. Default: load it.
        progress: receives stages, notes and numbers of rows.
    Raises:
        ArtifactError: the artifact has a replay by another recipe; or its inputs changed.
        SettingsError: the model of the artifact is no causal LM, or rows are longer than the recipe's.
        ModelError: the training cannot be differentiated, or diverges.
    """
    progress = progress or Progress()
    ArtifactReader.open(out)  # before the lock, which would create the directory
    with lock_artifact(out):
        artifact = ArtifactReader.open(out)
        origin = BuildSource(artifact, overrides)
        plan = _plan_for_artifact(artifact, origin, recipe, settings, model)
        targets = _targets_without_replay(artifact, plan)
        if not targets:
            return artifact.manifest.replays[-1]
        trainings, price = forecast_replay(plan, origin.rows, artifact.n_rows, len(targets))
        count = f"{plan.n_orders} trainings" if plan.n_orders > 1 else "a training"
        for line in (*plan.notes, f"replay: {count} of {plan.optimizer}, the price of {trainings:.1f}: {price}"):
            progress.note(line)
        result = _run_replay(artifact, origin, plan, targets, out, progress)
        relevance_NT = result.relevance()  # None if it failed the checks
        use = (NEW_MODEL_NOTE,) if plan.from_scratch and relevance_NT is not None else ()
        record = ReplayRecord(
            recipe=plan.recipe.model_dump(mode="json"),
            settings=plan.settings.model_dump(mode="json"),
            targets=targets,
            passed=relevance_NT is not None,
            steps=plan.optimizer.steps,
            trainings=round(trainings, 2),
            agreement=dict(zip(targets, np.mean(result.agreements, axis=0).round(3).tolist(), strict=True))
            if result.agreements
            else {},
            notes=(*use, *result.notes),
        )
        add_target_columns(
            out,
            ARRAY,
            {} if relevance_NT is None else dict(zip(targets, relevance_NT.T, strict=True)),
            spec=SPEC,
            dtype=origin.settings.array_dtype,
            details={"replays": [*artifact.manifest.details.get("replays", ()), record.model_dump(mode="json")]},
        )
        discard(out / REPLAY)
        return record


def _plan_for_artifact(
    artifact: ArtifactReader,
    origin: BuildSource,
    recipe: FineTuningRecipe | None,
    settings: ReplaySettings,
    model: Reference | None = None,
) -> ReplayPlan:
    """Plan a replay on the model and the rows of an artifact; the arguments are as of `replay_targets`."""
    refuse_replay(origin.settings)
    passed_replays = [record for record in artifact.manifest.replays if record.passed]
    if passed_replays:  # scores of later targets are comparable if recipe and settings are the same
        earlier, changed = passed_replays[-1], settings.model_dump(exclude_unset=True)
        recipe = recipe or FineTuningRecipe.model_validate(earlier.recipe)
        settings = validated(ReplaySettings, earlier.settings | changed, "replay")
    reference = model or origin.start()
    assert isinstance(reference, ReferenceModel)
    rows = origin.rows
    if recipe is not None:
        refuse_longer_rows(recipe, rows, artifact.location)
    return plan_replay(
        reference,
        str(origin.settings.train),
        recipe,
        settings,
        n_rows=rows.n_rows,
        context=int(rows.lengths().max()),
        copied=model is not None,  # the caller may use the model further
    )


def _run_replay(
    artifact: ArtifactReader,
    origin: BuildSource,
    plan: ReplayPlan,
    targets: Sequence[str],
    out: Path,
    progress: Progress,
) -> ReplayedRows:
    """Train and differentiate every order of the plan; intermediate results are stored in the artifact `out`."""
    rows, unit_tokens = origin.rows, origin.unit_tokens
    # its name is a hash of all that determines the intermediate results
    replay_settings = plan.settings.model_dump(mode="json", exclude={"orders", "memory_mb"})
    content = [plan.recipe.model_dump(mode="json"), replay_settings, list(targets), artifact.manifest.fingerprints]
    key = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()
    directory = out / REPLAY / key
    if any(other != directory for other in directory.parent.glob("*")):
        progress.note(
            f"{directory.parent} also has an unfinished replay with another recipe, settings or targets, which is kept "
            "until this one is finished; to continue it instead, repeat the command that started it"
        )
    directory.mkdir(parents=True, exist_ok=True)

    def trajectory(k: int) -> Trajectory:
        """Return the training of the k-th order, which is run or resumed when it is differentiated."""
        return Trajectory(
            plan.start(k),
            rows,
            plan.order(rows.n_rows, k),
            directory=directory / f"order-{k}",
            memory_bytes=plan.settings.memory_mb * MEGABYTE,
        )

    predict_all_rows = partial(scores_from_text, rows=rows, document_N=row_documents(artifact), seed=plan.settings.seed)
    return replay_rows(
        trajectory,
        [Target(name, [unit_tokens[int(e)] for e in artifact.unit_columns(name)]) for name in targets],
        plan.differentiation,
        plan.n_orders,
        directory,
        rate_K=np.array([plan.optimizer.learning_rate_at(step) for step in range(plan.optimizer.steps)]),
        predict_all_rows=predict_all_rows if plan.from_scratch else None,
        progress=progress,
    )


def refuse_longer_rows(recipe: FineTuningRecipe, rows: RowStore, artifact: Path | str) -> None:
    """Check that a recipe does not truncate the rows of an artifact, given by its path."""
    longest = int(rows.lengths().max())
    if recipe.max_length is not None and recipe.max_length < longest:
        raise SettingsError(
            f"recipe: max_length: got {recipe.max_length}, but a row of {artifact} has {longest} tokens; build it with "
            f"--max-length {recipe.max_length}"
        )


def refuse_replay(settings: BuildSettings) -> None:
    """Check that the training of a build can be replayed.

    Raises:
        SettingsError: the model cannot be trained on the corpus, or the rows are not stored.
    """
    if not settings.keep_tokens:
        raise SettingsError("--replay: reads the rows that the build stores; got keep_tokens: false, remove it")
    if problem := training_problem(settings.model, settings.corpus):
        raise SettingsError(f"--replay: {problem}")


def training_problem(model: ModelSettings, corpus: CorpusSettings) -> str:
    """Return why a model cannot be trained on a corpus by a recipe, or an empty text."""
    is_pairs = corpus.form == "preference"
    inputs = "preference pairs (--loss dpo)" if is_pairs else f"model.{model.reader}"
    is_problem = is_pairs or model.reader is not None
    return f"got {inputs}, expected a causal LM and texts or conversations; omit it" if is_problem else ""


def _targets_without_replay(artifact: ArtifactReader, plan: ReplayPlan) -> tuple[str, ...]:
    """Return the targets that have no replay by the recipe and the settings of a plan."""
    current = {"recipe": plan.recipe.model_dump(mode="json"), "settings": plan.settings.model_dump(mode="json")}
    done: set[str] = set()
    for record in artifact.manifest.replays:
        settings = {**record.settings, "memory_mb": plan.settings.memory_mb}  # the memory changes no score
        changed = list(differences({"recipe": record.recipe, "settings": settings}, current))
        if changed and record.passed:
            raise ArtifactError(
                f"{artifact.location}: has a replay with other settings: {'; '.join(changed)}; use the same, or build "
                "another artifact"
            )
        if not changed:
            done |= set(record.targets)
    return tuple(target for target in artifact.targets if target not in done)


def forecast_added_replay(
    out: Path, recipe: FineTuningRecipe | None, settings: ReplaySettings, overrides: Mapping[str, Any]
) -> Forecast:
    """Forecast a replay that `replay_targets` would add."""
    artifact = ArtifactReader.open(out)
    origin = BuildSource(artifact, overrides)
    plan = _plan_for_artifact(artifact, origin, recipe, settings)
    targets = _targets_without_replay(artifact, plan)
    if not targets:
        raise ArtifactError(f"{artifact.location}: all targets have a replay by this recipe; nothing to forecast")
    return forecast_replay(plan, origin.rows, artifact.n_rows, len(targets))[1]
