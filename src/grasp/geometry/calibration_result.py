"""Select a protocol on development runs by the lower confidence bound (LCB) of its mean agreement.

Start with `select_protocol`. Every member of a finite family is evaluated on every development result (environment x
target) by the criterion of the family:

    task_rho    Spearman's rho between predicted and realized utility of the task, or
    mean_lds    the mean over the units of the task of the rho of each unit, which is several times less noisy.

The standard error (SE) of the mean over results is a bootstrap estimate: subsets are resampled within every
environment (the same draws for all of its targets and for all members), and if there are two or more environments,
these are resampled too. With K members, LCB = mean - z_(1 - delta/K) SE, so that all bounds hold simultaneously with
confidence 1 - delta (Bonferroni). The member with the largest LCB is selected; ties go to fewer components, then to the
order of the family.

Held-out results cannot leak into the selection: a `Development` cannot be created from them.
Shape letters: B subsets, C candidates, E columns of one target (its units, or the task), T targets, R resamples.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

import grasp
from grasp.arrays import F64, ratio
from grasp.artifact.reader import ArtifactReader
from grasp.errors import ProtocolError, ProtocolLeakError, RunsError
from grasp.files import write_atomically
from grasp.geometry.candidates import DELTA, Candidate, Criterion, ProtocolFamily
from grasp.geometry.geometry_rule import CalibrationSettings
from grasp.geometry.scored import DEFAULT_CALIBRATION, Parts, Scored
from grasp.predict.scoring_rule import Requirements, ScoringProtocol
from grasp.runs.alignment import match_targets
from grasp.runs.metrics import RESAMPLES, mean_defined, rank_correlations
from grasp.runs.predictions import WHOLE_TASK
from grasp.runs.training_runs import TrainingRuns, Utilities
from grasp.seeds import bootstrap_weights, stream

TIE_TOLERANCE = 1e-9
MAX_LISTED = 20  # candidates listed in the provenance
COLUMNS_AT_ONCE = 2_048


@dataclass(frozen=True, slots=True)
class Development:
    """Development runs that protocols may be selected on, with the artifacts of their corpus.

    Creating one from held-out runs or targets raises ProtocolLeakError.
    """

    runs: TrainingRuns
    targets: tuple[str, ...]
    variants: Mapping[str, Scored]  # by feature settings, as far as the artifacts differ

    def __post_init__(self) -> None:
        held_out = [name for name in self.targets if self.runs.role_of(name) != "dev"]
        if held_out:
            raise ProtocolLeakError(
                f"{self.runs.path}: selection was given {held_out}, which are held out; pass development "
                "environments and targets only"
            )

    @property
    def results(self) -> dict[str, str]:
        """Results used for the selection, as `environment/target`, each with the fingerprint of its runs."""
        (fingerprint,) = {scored.runs_fingerprint for scored in self.variants.values()}
        return {f"{self.runs.name}/{target}": fingerprint for target in self.targets}

    @classmethod
    def from_runs(
        cls,
        runs: TrainingRuns,
        artifacts: Sequence[ArtifactReader],
        *,
        targets: Sequence[str] | None = None,
        calibration_subsets: int = 256,
    ) -> "Development":
        """Bind runs to artifacts, one artifact for each of the feature settings to compare.

        Args:
            targets: default: all development targets that the artifacts have.
        Raises:
            ProtocolLeakError: the runs, or one of `targets`, are held out.
            ProtocolError: no development target, or two artifacts have the same feature settings.
            RunsError: an artifact does not match the runs.
        """
        if runs.role != "dev":
            raise ProtocolLeakError(
                f"{runs.path}: selection was given a held-out environment; pass development environments only"
            )
        scored = [Scored.from_runs(runs, artifact, calibration_subsets=calibration_subsets) for artifact in artifacts]
        common = [name for name in runs.targets if all(name in item.run_targets.values() for item in scored)]
        chosen = tuple(targets) if targets is not None else tuple(n for n in common if runs.role_of(n) == "dev")
        missing = [name for name in chosen if name not in common]
        if missing or not chosen or not scored:
            raise ProtocolError(
                f"{runs.path}: development targets {list(chosen)}, the artifacts have {common}; "
                "expected at least one target that all of them have"
            )
        names = variant_names([item.source.feature_settings for item in scored])
        if len(set(names)) < len(names):
            raise ProtocolError(f"{runs.path}: two artifacts have the same feature settings; pass one of them")
        return cls(runs, chosen, dict(zip(names, scored, strict=True)))


def variant_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each of several feature settings, from the fields of `Requirements` in which they differ."""
    fields = list(Requirements.model_fields)
    differing = [name for name in fields if len({json.dumps(features.get(name)) for features in settings}) > 1]
    return [", ".join(f"{name}={features.get(name)}" for name in differing) for features in settings]


def bind_developments(
    artifacts: Sequence[ArtifactReader],
    all_runs: Sequence[TrainingRuns],
    *,
    targets: Sequence[str] | None = None,
    calibration_subsets: int = 256,
) -> list[Development]:
    """Bind every environment to the artifacts that were built from its corpus.

    Args:
        targets: target names of the environments; default: all development targets.
    Raises:
        ProtocolLeakError: an environment, or one of `targets`, is held out.
        RunsError: no artifact was built from the corpus of an environment, or an artifact matches no environment.
    """
    used: set[Path] = set()
    bound: list[Development] = []
    for runs in all_runs:
        same = [
            artifact
            for artifact in artifacts
            if artifact.manifest.fingerprints.get("corpus") == runs.info.corpus_fingerprint
        ]
        used |= {artifact.path for artifact in same}
        # if no artifact has this corpus, binding the first one raises the error that explains the mismatch
        bound += [
            Development.from_runs(runs, group, targets=wanted, calibration_subsets=calibration_subsets)
            for group, wanted in _group_by_targets(runs, same or artifacts[:1], targets)
        ]
    idle = [str(artifact.path) for artifact in artifacts if artifact.path not in used]
    if idle:
        raise RunsError(
            f"{', '.join(idle)}: not built from the corpus of any environment; drop it, or pass its environment"
        )
    return bound


def _group_by_targets(
    runs: TrainingRuns, artifacts: Sequence[ArtifactReader], targets: Sequence[str] | None
) -> list[tuple[list[ArtifactReader], Sequence[str] | None]]:
    """Group artifacts that share targets, and assign the requested targets to the groups.

    Artifacts in one group are variants with different feature settings; artifacts of different targets, or of another
    loss, form separate groups.
    """
    groups: list[tuple[set[str], list[ArtifactReader]]] = []
    for artifact in artifacts:
        names = set(match_targets(runs, artifact))
        overlapping = [group for group in groups if group[0] & names]
        groups = [group for group in groups if not group[0] & names]
        members = [member for _, group in overlapping for member in group]
        groups.append((names.union(*(group_names for group_names, _ in overlapping)), [*members, artifact]))
    if targets is None or len(groups) == 1:
        return [(group, targets) for _, group in groups]
    missing = sorted(set(targets).difference(*(names for names, _ in groups)))
    if missing:
        raise RunsError(f"target: got {missing}, which {runs.path} and the artifacts do not have in common")
    shared = [(group, [name for name in targets if name in names]) for names, group in groups]
    return [(group, wanted) for group, wanted in shared if wanted]


# ------------------------------------------------------------------------------------------------------- selection


@dataclass(frozen=True, slots=True)
class Score:
    """Agreement of one candidate with every development result, and its mean."""

    candidate: Candidate
    mean: float
    se: float
    lcb: float
    agreement: Mapping[str, float]  # by `environment/target`


@dataclass(frozen=True, slots=True)
class ProtocolSelection:
    """Result of a selection: all candidates, best first, and the inputs of the selection."""

    scores: tuple[Score, ...]  # by descending LCB, ties broken
    criterion: str
    undefined: Mapping[str, int]  # by reason: candidates whose criterion is undefined on a result
    not_served: int  # candidates that require arrays which an artifact lacks
    delta: float
    z: float
    resamples: int
    results: tuple[str, ...]

    @property
    def best(self) -> Score:
        return self.scores[0]


def select_protocol(
    family: ProtocolFamily,
    developments: Sequence[Development],
    *,
    delta: float = DELTA,
    resamples: int = RESAMPLES,
) -> ProtocolSelection:
    """Select the member of the family with the highest lower confidence bound of mean agreement.

    If every environment has artifacts of several feature settings, these are selected too.

    Raises:
        ProtocolError: fewer than two development results (the bound is undefined), no candidate for which all
            artifacts have the arrays, no candidate with varying predictions, or constant utilities.
    """
    developments = _grouped(developments)
    results = tuple(name for development in developments for name in development.results)
    if len(set(results)) < len(results):
        raise ProtocolError(f"selection: results {list(results)} contain duplicates; pass each result once")
    if len(results) < 2:
        raise ProtocolError(
            f"selection: got {len(results)} development results {list(results)}, expected at least 2 (environment x "
            "target), otherwise the bound is undefined"
        )
    if not 0 < delta < 1:
        raise ProtocolError(f"selection: delta is {delta}, expected a number between 0 and 1")
    candidates, not_served = _candidates(family, developments)
    each = _by_environment(developments, candidates, family, resamples)
    value_CT = np.concatenate([value[:, :, 0] for value in each], axis=1)
    defined_C = np.isfinite(value_CT).all(axis=1)
    if not defined_C.any():
        raise ProtocolError("selection: no candidate has a rho on every development result; predictions are constant")
    z = float(ndtri(1 - delta / len(candidates)))
    se_C = standard_errors([value[:, :, 1:] for value in each])
    scores = [
        Score(
            candidate, float(mean), float(se), float(mean - z * se), dict(zip(results, value_T.tolist(), strict=True))
        )
        for candidate, mean, se, value_T, defined in zip(
            candidates, value_CT.mean(axis=1), se_C, value_CT, defined_C, strict=True
        )
        if defined
    ]
    return ProtocolSelection(
        scores=tuple(_ranked(scores)),
        criterion=family.criterion,
        undefined={"predictions are constant": int((~defined_C).sum())} if not defined_C.all() else {},
        not_served=not_served,
        delta=delta,
        z=z,
        resamples=resamples,
        results=results,
    )


def _grouped(developments: Sequence[Development]) -> list[Development]:
    """Sort developments so that those of one environment are adjacent, in order of first appearance."""
    paths = [development.runs.path for development in developments]
    return sorted(developments, key=lambda development: paths.index(development.runs.path))


def _by_environment(
    developments: Sequence[Development],
    candidates: Sequence[Candidate],
    family: ProtocolFamily,
    resamples: int,
) -> list[F64]:
    """Return the agreement (C, T, 1 + R) for each environment, whose targets share the resamples of subsets."""
    by_path: dict[Path, list[F64]] = {}
    for development in developments:
        values = _agreement(development, candidates, family.criterion, resamples=resamples)
        by_path.setdefault(development.runs.path, []).append(values)
    return [np.concatenate(values, axis=1) for values in by_path.values()]


def freeze(
    selection: ProtocolSelection, developments: Sequence[Development], family: ProtocolFamily, name: str
) -> ScoringProtocol:
    """Return the best candidate as a protocol that records what it was selected on.

    Raises:
        ProtocolError: the family is that of a control without relevance, or with shuffled pairs.
    """
    candidate = selection.best.candidate
    scored = developments[0].variants[candidate.variant]
    several = len(developments[0].variants) > 1
    required = {
        field: scored.source.feature_settings.get(field)
        for field in Requirements.model_fields
        if several and f"{field}=" in candidate.variant
    }
    specs = {development.variants[candidate.variant].calibration.family for development in developments}
    spec = family.frozen_calibration
    if spec == "same":
        spec = specs.pop() if len(specs) == 1 else DEFAULT_CALIBRATION
    return candidate.protocol(
        name,
        Requirements.model_validate(required),
        calibration=CalibrationSettings(family=spec, n_subsets=family.calibration_subsets),
        selected_on=selection.results,
        selected_runs={
            name: fingerprint for development in developments for name, fingerprint in development.results.items()
        },
    )


def selection_provenance(
    selection: ProtocolSelection, developments: Sequence[Development], family: ProtocolFamily
) -> dict[str, Any]:
    """Return the record of a selection as plain JSON: inputs, settings, and the best candidates."""
    text = json.dumps(family.model_dump(mode="json"), sort_keys=True)
    return {
        "made_by": f"grasp {grasp.__version__}",
        "rule": f"highest mean - z SE of {selection.criterion}; ties to fewer components",
        "delta": selection.delta,
        "z": selection.z,
        "resamples": selection.resamples,
        "family": family.model_dump(mode="json"),
        "family_checksum": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        "candidates": len(selection.scores) + sum(selection.undefined.values()),
        "undefined": dict(selection.undefined),
        "not_served": selection.not_served,
        "results": list(selection.results),
        "environments": [_describe(development) for development in developments],
        "best": [
            {"protocol": s.candidate.name, "mean": s.mean, "se": s.se, "lcb": s.lcb, "results": dict(s.agreement)}
            for s in selection.scores[:MAX_LISTED]
        ],
    }


def provenance_path(protocol: Path) -> Path:
    """Return the path of the selection record of a protocol file, in the same directory."""
    return protocol.with_suffix(".provenance.json")


def write_provenance(record: Mapping[str, Any], path: Path) -> None:
    """Write the record atomically."""
    write_atomically(path, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def _describe(development: Development) -> dict[str, Any]:
    info = development.runs.info
    return {
        "name": development.runs.name,
        "role": info.role,
        "recipe": info.recipe,
        "family": info.family.spec if info.family else "given",
        "subsets": len(info.subset_ids),
        "seeds": list(info.seeds),
        "corpus": info.corpus_fingerprint,
        "masks": info.masks_checksum,
        "targets": {name: info.targets[name].fingerprint for name in development.targets},
        "artifacts": {
            variant or "only": dict(scored.source.manifest.fingerprints)
            for variant, scored in development.variants.items()
        },
    }


def _candidates(family: ProtocolFamily, developments: Sequence[Development]) -> tuple[list[Candidate], int]:
    """Return the members of the family for every variant of which all environments have an artifact."""
    variants = [name for name in developments[0].variants if all(name in item.variants for item in developments)]
    if not variants:
        raise ProtocolError(
            f"selection: feature settings {[list(item.variants) for item in developments]} have none in common; build "
            "artifacts of the same settings for every environment"
        )
    listed: list[Candidate] = []
    total = 0
    for variant in variants:
        served = [family.members(item.variants[variant].source.array_names, variant) for item in developments]
        everywhere = set.intersection(*(set(members) for members, _ in served))
        listed += [candidate for candidate in served[0][0] if candidate in everywhere]
        total += len(served[0][0]) + served[0][1]
    if not listed:
        raise ProtocolError(f"selection: none of the {total} protocols has all arrays; build more kernels and sketches")
    return listed, total - len(listed)


def _ranked(scores: Sequence[Score]) -> list[Score]:
    """Sort by descending LCB; ties (TIE_TOLERANCE) are sorted by number of components."""
    remaining = sorted(scores, key=lambda score: -score.lcb)  # stable: equal scores keep the order of the family
    ranked: list[Score] = []
    while remaining:
        tied = [score for score in remaining if score.lcb >= remaining[0].lcb - TIE_TOLERANCE]
        ranked += sorted(tied, key=lambda score: score.candidate.n_components)
        remaining = remaining[len(tied) :]
    return ranked


# ------------------------------------------------------------------------------------- agreement and standard errors


def _agreement(
    development: Development, candidates: Sequence[Candidate], criterion: Criterion, *, resamples: int
) -> F64:
    """Return the criterion of every candidate on every target, (C, T, 1 + R): the estimate, then its resamples.

    nan if undefined: predictions are constant (for mean_lds, those of every unit).

    Raises:
        ProtocolError: realized utilities are constant.
    """
    utilities = development.runs.utilities()
    criterion = "task_rho" if WHOLE_TASK in utilities.unit_ids else criterion  # runs without results per unit
    realized = [_realized(utilities, name, criterion) for name in development.targets]
    flat = [
        name
        for name, values_BE in zip(development.targets, realized, strict=True)
        if not np.ptp(values_BE, axis=0).any()
    ]
    if flat:
        raise ProtocolError(
            f"{development.runs.path}: utilities of {flat} are constant, so protocols cannot be compared"
        )
    plain_1B = np.ones((1, len(utilities.subset_ids)))
    weights_RB = bootstrap_weights(len(utilities.subset_ids), resamples=resamples)
    out = np.empty((len(candidates), len(development.targets), 1 + resamples))
    for variant in dict.fromkeys(candidate.variant for candidate in candidates):
        indices = [c for c, candidate in enumerate(candidates) if candidate.variant == variant]
        members = [candidates[c] for c in indices]
        parts = development.variants[variant].parts(members, development.targets, per_unit=criterion == "mean_lds")
        order = _in_order(utilities.subset_ids, next(iter(parts.values())).subset_ids)
        for t, realized_BE in enumerate(realized):
            at_once = max(1, COLUMNS_AT_ONCE // realized_BE.shape[1])
            for start in range(0, len(indices), at_once):
                group = indices[start : start + at_once]
                predicted = [
                    _predicted(parts[candidates[c].binding], candidates[c], t, criterion)[order] for c in group
                ]
                out[group, t, :1] = _mean_rho(predicted, realized_BE, plain_1B)
                out[group, t, 1:] = _mean_rho(predicted, realized_BE, weights_RB)
    return out


def _mean_rho(predicted: Sequence[F64], realized_BE: F64, weights_RB: NDArray[np.floating[Any]]) -> F64:
    """Return the mean over columns of the rho of each prediction, (C, R); realized utilities are ranked only once."""
    pairs = [(0, 1 + c) for c in range(len(predicted))]
    return mean_defined(rank_correlations([realized_BE, *predicted], pairs, weights_RB), axis=1)


def _realized(utilities: Utilities, target: str, criterion: Criterion) -> F64:
    """Return realized utilities averaged over seeds: (B, E) per unit, or (B, 1) for the task."""
    values_BE = utilities.select(target).values_BSE.mean(axis=1)
    return np.asarray(values_BE if criterion == "mean_lds" else values_BE.mean(axis=1, keepdims=True))


def _predicted(parts: Parts, candidate: Candidate, target: int, criterion: Criterion) -> F64:
    if criterion == "task_rho":
        return parts.tasks_of(candidate)[:, target : target + 1]
    return parts.units_of(candidate)[:, [name == parts.targets[target] for name, _ in parts.units]]


def _in_order(wanted: Sequence[str], have: Sequence[str]) -> NDArray[np.int64]:
    position = {name: b for b, name in enumerate(have)}
    return np.array([position[name] for name in wanted], dtype=np.int64)


def standard_errors(resampled: Sequence[F64]) -> F64:
    """Return the standard error of the mean over all results of each candidate, (C,).

    Each bootstrap resample draws environments with replacement, and for each draw one of its resamples of subsets. The
    mean weights environments by their number of targets, like the estimate. Undefined resamples are ignored.

    Args:
        resampled: agreement (C, T, R) of each environment.
    """
    n_places, n_resamples = len(resampled), resampled[0].shape[2]
    rng = stream(0, "selection", "environments")
    total_CR = np.zeros((len(resampled[0]), n_resamples))
    count_CR = np.zeros_like(total_CR)
    for _ in range(n_places):
        drawn_R = rng.integers(0, n_places, size=n_resamples) if n_places > 1 else np.zeros(n_resamples, dtype=int)
        which_R = rng.permutation(n_resamples)
        for j, value_CTR in enumerate(resampled):
            picked = drawn_R == j
            value = value_CTR[:, :, which_R[picked]]
            total_CR[:, picked] += np.where(np.isfinite(value), value, 0.0).sum(axis=1)
            count_CR[:, picked] += np.isfinite(value).sum(axis=1)
    mean_CR = ratio(total_CR, count_CR, undefined=np.nan)
    known = [row[np.isfinite(row)] for row in mean_CR]
    return np.array([row.std(ddof=1) if len(row) > 1 else np.inf for row in known])
