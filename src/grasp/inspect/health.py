"""Check the approximations behind the scores of an artifact; each check has a healthy range and advice.

Scores rest on truncated residuals, batched forward passes and, optionally, sketches (random
projections). Each check measures one of these on a sample of rows. Start with `check`; `health_metrics` has the
measurements.

Shape letters: N rows of the sample, E units.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.api.evaluate import agreement
from grasp.artifact.reader import ArtifactReader
from grasp.errors import GraspError, SettingsError
from grasp.inspect import health_metrics as metrics
from grasp.inspect.health_metrics import Check, judge_check, unmeasured_check
from grasp.inspect.rescoring import (
    SampleFeatures,
    features_one_by_one,
    forward_only,
    reopen_source,
    sample_features,
    sample_rows,
)
from grasp.models.build_source import BuildSource
from grasp.pipeline.model_pass import merge_batches
from grasp.predict.default_protocol import resolve_protocol
from grasp.predict.scoring_rule import RegisteredProtocol, ScoringProtocol, kernel_weights
from grasp.results import Result
from grasp.runs.imported_runs import bind_runs
from grasp.runs.table import RunTable
from grasp.runs.training_runs import TrainingRuns
from grasp.text import json_text, plain

T = TypeVar("T")

MIN_ROWS = 8  # of the sample
SINGLE_ROWS = 16  # rows that are also computed in batches of their own
# Largest difference, relative to the mean deviation of the features, that rounding may cause between batches.
BATCH_TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 5e-2, "float16": 1e-2}
HEALTHY_PAIRS = "70% of pairs or more in order"
HEALTHY_TAIL = "at most 20%"
HEALTHY_CONCENTRATION = "half of the units have at most 20% of their squared relevance in one row"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Health(Result):
    """Results of the health checks of an artifact for a scoring rule.

    Attributes:
        table: check, verdict (healthy, look, or not measured), number (on which the verdict is based), measured,
            healthy (the healthy range), advice.
        checks: the checks with all their numbers.
        source: source of full features: stored features, the model, or nothing.
    """

    checks: tuple[Check, ...]
    source: str

    def __repr__(self) -> str:
        lines = [self.headline]
        for check in self.checks:
            lines += [plain(f"[{check.verdict}] {check.name}: {check.measured}")]
            lines += ["    " + plain(f"healthy: {check.healthy}{f'; change: {check.advice}' if check.advice else ''}")]
        return "\n".join([*lines, *map(plain, self.notes)])

    def to_json(self) -> str:
        """Return all checks with their numbers as JSON."""
        data = {"headline": self.headline, "notes": self.notes, "checks": [asdict(check) for check in self.checks]}
        return json_text(data)


def check(
    artifact: ArtifactReader,
    *,
    runs: TrainingRuns | RunTable | Path | str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    rows: int = 256,
    subsets: int = 64,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> Health:
    """Check the approximations of a scoring rule, on a sample of the artifact's rows and subsets of them.

    Args:
        artifact: artifact to check.
        runs: retrained runs, to check whether predictions rank their subsets correctly.
        protocol: scoring rule. Default: the built-in one. A registered rule may have further checks.
        rows: rows of the sample; memory is rows^2 numbers and their full features.
        subsets: number of subsets for checks of a registered rule: those of the runs, or else halves of the sample.
        seed: seed of the samples of rows and subsets.
        overrides: settings of the user; custom code of the artifact runs only if they name it too.
    Raises:
        SettingsError: fewer than 8 rows or 3 subsets.
        GraspError: the runs do not belong to the artifact.
    """
    index = sample_rows(artifact, rows, seed)
    if len(index) < MIN_ROWS or subsets < 3:
        raise SettingsError(f"check: got {len(index)} rows and {subsets} subsets, expected at least {MIN_ROWS} and 3")
    bound_runs = None if runs is None else bind_runs(artifact, runs)
    source = _result_or_error(lambda: reopen_source(artifact, overrides))
    features = _result_or_error(lambda: sample_features(artifact, index, source))
    sample = SampledArtifact(artifact, index, source, features, bound_runs, subsets, seed)
    rule = resolve_protocol(protocol, artifact)
    weights = kernel_weights(rule.resolved_for(artifact))

    results = [_check_concentration(artifact, kernel) for kernel in weights]
    results += [_check_truncation(sample), _check_batches(sample), *_check_ranking(artifact, bound_runs, rule)]
    if isinstance(rule, RegisteredProtocol):
        results += rule.checks(sample)

    counts = Counter(result.verdict for result in results)
    table = pa.table(
        {
            "check": [result.name for result in results],
            "verdict": [result.verdict for result in results],
            "number": pa.array([next(iter(result.numbers.values()), None) for result in results], pa.float64()),
            "measured": [result.measured for result in results],
            "healthy": [result.healthy for result in results],
            "advice": [result.advice for result in results],
        }
    )
    headline = f"{counts['healthy']} of {len(results)} checks are healthy"
    headline += f", {counts['look']} need a look" * bool(counts["look"])
    headline += f", {counts['not measured']} were not measured" * bool(counts["not measured"])
    features_from = "nothing" if isinstance(features, GraspError) else features.source
    notes = (f"{len(index)} rows, full features from {features_from}",)
    return Health(table, f"{headline}.", notes, checks=tuple(results), source=features_from)


@dataclass(frozen=True)
class SampledArtifact:
    """The artifact, the sample, and its features, or the errors of loading them."""

    artifact: ArtifactReader
    index: NDArray[np.int64]
    source: BuildSource | GraspError
    features: SampleFeatures | GraspError
    runs: TrainingRuns | None
    subsets: int  # number of subsets of a check that needs some, and the seed of their draws
    seed: int


def _result_or_error(compute: Callable[[], T]) -> T | GraspError:
    """Return the result of a function, or the error that it raises."""
    try:
        return compute()
    except GraspError as err:
        return err


def _check_concentration(artifact: ArtifactReader, kernel: str) -> Check:
    """Check whether single rows dominate the relevance of a kernel, over all rows of the artifact."""
    share_E = metrics.top_shares(block for _, block in artifact.array_blocks(f"relevance_{kernel}"))
    median, worst = float(np.median(share_E)), int(share_E.argmax())
    worst_name = f"{artifact.units['target'][worst].as_py()}/{artifact.units['unit_id'][worst].as_py()}"
    return judge_check(
        f"tail, {kernel}",
        f"one row of {artifact.n_rows:,} holds {median:.0%} of a unit's squared relevance in the median, "
        f"{share_E[worst]:.0%} of {worst_name}",
        HEALTHY_CONCENTRATION,
        median <= 0.2,
        f"a ranking by {kernel} depends on single rows: inspect the best row of a unit, use more units per "
        "target, or a weaker preconditioner of rare tokens (features.alpha: 0.5)",
        {"median": median, "most": float(share_E[worst])},
    )


def _check_truncation(sample: SampledArtifact) -> Check:
    """Check how much of the residuals the truncation to the top k probabilities removes."""
    name = "residual beyond top-k"
    if isinstance(sample.features, GraspError):
        return unmeasured_check(name, HEALTHY_TAIL, str(sample.features))
    share = metrics.truncated_mass(sample.features.batch.summary.residual_NV)
    top_k = sample.artifact.feature_settings["top_k"]
    return judge_check(
        name,
        f"{share:.1%} of its absolute mass",
        HEALTHY_TAIL,
        share <= 0.2,
        f"raise features.top_k above {top_k}, or use a better trained model: flat predictions have long tails",
        {"share": share},
    )


def _check_ranking(artifact: ArtifactReader, runs: TrainingRuns | None, protocol: ScoringProtocol) -> list[Check]:
    """Check whether predictions rank the subsets of runs correctly, for every target."""
    if runs is None:
        return [unmeasured_check("ranking stability", HEALTHY_PAIRS, "pass retrained runs (--runs)")]
    results = []
    for points in agreement(artifact, runs, protocol).points:
        stability = metrics.stability(points.predicted_B, points.realized_B)
        results.append(
            judge_check(
                f"ranking stability, {points.target}",
                f"{stability.accuracy:.0%} of pairs in order; certain by the bound {stability.bound:.0%}, by the "
                f"errors of the pair {stability.certain:.0%}",
                HEALTHY_PAIRS,
                stability.accuracy >= 0.7,
                "calibrate a scoring rule, or compare only subsets with more different utilities; more seeds "
                "distinguish noise from error",
                asdict(stability),
            )
        )
    return results


def _check_batches(sample: SampledArtifact) -> Check:
    """Check whether the features of a row depend on the other rows of its batch."""
    healthy = "rounding of the model's dtype: at most 1e-4 in float32"
    if isinstance(sample.source, GraspError):
        return unmeasured_check("batch invariance", healthy, str(sample.source))
    index = sample.index[:: max(1, len(sample.index) // SINGLE_ROWS)][:SINGLE_ROWS]
    rows, model = sample.source.rows.rows(index), sample.source.model
    batches = list(forward_only(sample.source).batches(rows))
    batched = merge_batches(batches, len(index)).summary
    single = features_one_by_one(sample.source, index)
    mean_deviation = float(np.abs(single.hidden_NH - single.hidden_NH.mean(axis=0)).mean()) or 1.0
    hidden = float(np.abs(single.hidden_NH - batched.hidden_NH).max()) / mean_deviation
    residual = float(abs(single.residual_NV - batched.residual_NV).max())
    worst = max(hidden, residual)
    dtype = str(model.dtype).removeprefix("torch.")
    tolerance = BATCH_TOLERANCE.get(dtype, BATCH_TOLERANCE["float32"])
    return judge_check(
        "batch invariance",
        f"rows alone and in batches differ by {worst:.1e} ({dtype}, {len(index)} rows)",
        f"at most {tolerance:.0e}",
        worst <= tolerance,
        "build with model.dtype: float32; if it is float32 already, the model mixes the rows of a batch (batch "
        "normalisation in training mode, attention to padding)",
        {"hidden": hidden, "residual": residual},
    )
