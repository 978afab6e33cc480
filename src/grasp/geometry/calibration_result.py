"""Choosing a protocol on development environments, by the lower confidence bound of its mean agreement.

For every member of a finite family and every development result (environment x target) there is a figure, by the
family's criterion

    task_rho    Spearman's rho between predicted and realized utility of the task, or
    mean_lds    the mean over the task's units of each unit's own rho, which is several times less noisy.

Its mean over results has a standard error by
bootstrap: subsets are resampled within every environment (the same ones for its targets and for all members), and
where there are two or more environments these are resampled as well. With K members evaluated,
LCB = mean - z_(1 - delta/K) SE: at confidence 1 - delta the bound holds for all of them at once. The largest LCB wins;
ties go to fewer components, then to the member listed first.

Held-out results cannot be handed in: a `Development` can only be made from what is not held out.
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
from grasp.errors import EnvironmentDataError, ProtocolError, ProtocolLeakError
from grasp.files import write_whole
from grasp.geometry.candidates import DELTA, Candidate, Criterion, ProtocolFamily
from grasp.geometry.geometry_rule import CalibrationSettings
from grasp.geometry.scored import DEFAULT_CALIBRATION, Parts, Scored
from grasp.predict.scoring_rule import Requirements, ScoringProtocol
from grasp.runs.alignment import artifact_targets
from grasp.runs.metrics import RESAMPLES, mean_defined, rank_correlations
from grasp.runs.predictions import WHOLE_TASK
from grasp.runs.retrained import Environment, Utilities
from grasp.seeds import bootstrap_weights, stream

TIE = 1e-9
LISTED = 20  # candidates, in a provenance
COLUMNS_AT_ONCE = 2_048


@dataclass(frozen=True, slots=True)
class Development:
    """An environment that protocols may be chosen on, with the artifacts built for it.

    Only `of` makes one, and it refuses held-out environments: so what was held out cannot be chosen on by mistake.
    """

    environment: Environment
    targets: tuple[str, ...]
    variants: Mapping[str, Scored]  # by the feature settings in which the artifacts differ

    def __post_init__(self) -> None:
        held_out = [name for name in self.targets if self.environment.role_of(name) != "dev"]
        if held_out:
            raise ProtocolLeakError(
                f"{self.environment.path}: selection was given {held_out}, which are held out; pass development "
                "environments and targets only"
            )

    @property
    def results(self) -> dict[str, str]:
        """The results that a choice is made on, as `environment/target`, each with the fingerprint of its runs."""
        (fingerprint,) = {one.runs_fingerprint for one in self.variants.values()}
        return {f"{self.environment.name}/{target}": fingerprint for target in self.targets}

    @classmethod
    def from_environment(
        cls,
        environment: Environment,
        artifacts: Sequence[ArtifactReader],
        *,
        targets: Sequence[str] | None = None,
        calibration_subsets: int = 256,
    ) -> "Development":
        """Bind an environment and one artifact for each of the feature settings that are tried.

        Args:
            targets: None: all development targets that the artifacts have.
        Raises:
            ProtocolLeakError: the environment, or a target that was asked for, is held out.
            ProtocolError: no development target, or two artifacts of the same feature settings.
            EnvironmentDataError: an artifact does not belong to the environment.
        """
        if environment.role != "dev":
            raise ProtocolLeakError(
                f"{environment.path}: selection was given a held-out environment; pass development environments only"
            )
        scored = [
            Scored.from_environment(environment, artifact, calibration_subsets=calibration_subsets)
            for artifact in artifacts
        ]
        common = [name for name in environment.targets if all(name in one.renamed.values() for one in scored)]
        chosen = tuple(targets) if targets is not None else tuple(n for n in common if environment.role_of(n) == "dev")
        missing = [name for name in chosen if name not in common]
        if missing or not chosen or not scored:
            raise ProtocolError(
                f"{environment.path}: development targets {list(chosen)}, the artifacts have {common}; "
                "expected at least one target that all of them have"
            )
        names = variant_names([one.source.feature_settings for one in scored])
        if len(set(names)) < len(names):
            raise ProtocolError(f"{environment.path}: two artifacts have the same feature settings; pass one of them")
        return cls(environment, chosen, dict(zip(names, scored, strict=True)))


def variant_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each of several feature settings, out of the required fields in which they differ."""
    fields = list(Requirements.model_fields)
    differing = [name for name in fields if len({json.dumps(own.get(name)) for own in settings}) > 1]
    return [", ".join(f"{name}={own.get(name)}" for name in differing) for own in settings]


def developments_of(
    artifacts: Sequence[ArtifactReader],
    environments: Sequence[Environment],
    *,
    targets: Sequence[str] | None = None,
    calibration_subsets: int = 256,
) -> list[Development]:
    """Give every environment the artifacts of its corpus.

    Args:
        targets: by the environments' names; None: all development targets.
    Raises:
        ProtocolLeakError: an environment, or a target that was asked for, is held out.
        EnvironmentDataError: an environment without an artifact of its corpus, or an artifact without an environment.
    """
    used: set[Path] = set()
    bound: list[Development] = []
    for environment in environments:
        same = [
            one for one in artifacts if one.manifest.fingerprints.get("corpus") == environment.info.corpus_fingerprint
        ]
        used |= {one.path for one in same}
        # without one of its corpus, the first artifact's mismatch is told
        bound += [
            Development.from_environment(environment, group, targets=wanted, calibration_subsets=calibration_subsets)
            for group, wanted in _shared_out(environment, same or artifacts[:1], targets)
        ]
    idle = [str(one.path) for one in artifacts if one.path not in used]
    if idle:
        raise EnvironmentDataError(
            f"{', '.join(idle)}: of no corpus that an environment was trained on; leave it out, or pass its environment"
        )
    return bound


def _shared_out(
    environment: Environment, artifacts: Sequence[ArtifactReader], targets: Sequence[str] | None
) -> list[tuple[list[ArtifactReader], Sequence[str] | None]]:
    """Artifacts that have targets in common, which tell feature settings apart, and the targets asked of them.

    Those of other targets, or of the other loss, stand beside each other.
    """
    groups: list[tuple[set[str], list[ArtifactReader]]] = []
    for one in artifacts:
        names = set(artifact_targets(environment, one))
        joined = [group for group in groups if group[0] & names]
        groups = [group for group in groups if not group[0] & names]
        groups.append((names.union(*(own for own, _ in joined)), [a for _, some in joined for a in some] + [one]))
    if targets is None or len(groups) == 1:
        return [(group, targets) for _, group in groups]
    missing = sorted(set(targets).difference(*(names for names, _ in groups)))
    if missing:
        raise EnvironmentDataError(f"target: got {missing}, which {environment.path} and the artifacts do not share")
    shared = [(group, [name for name in targets if name in names]) for names, group in groups]
    return [(group, wanted) for group, wanted in shared if wanted]


# ------------------------------------------------------------------------------------------- the choice among protocols


@dataclass(frozen=True, slots=True)
class Score:
    """How well one candidate did on every development result, and on average."""

    candidate: Candidate
    mean: float
    se: float
    lcb: float
    agreement: Mapping[str, float]  # by `environment/target`


@dataclass(frozen=True, slots=True)
class ProtocolChoice:
    """The result: the winner first, every other candidate after it, and what it was chosen from."""

    scores: tuple[Score, ...]  # by LCB, ties as the rule breaks them
    criterion: str
    undefined: Mapping[str, int]  # candidates without a figure on every result, by reason
    not_served: int  # candidates that ask for arrays which an artifact lacks
    delta: float
    z: float
    resamples: int
    results: tuple[str, ...]

    @property
    def best(self) -> Score:
        return self.scores[0]


def choose_protocol(
    family: ProtocolFamily,
    developments: Sequence[Development],
    *,
    delta: float = DELTA,
    resamples: int = RESAMPLES,
) -> ProtocolChoice:
    """Choose the member of the family with the highest lower confidence bound of mean agreement.

    Feature settings are part of the family over the artifacts that were given, where every environment has one.

    Raises:
        ProtocolError: fewer than two development results, which leave the bound undefined; no candidate that all
            artifacts can serve, or none whose predictions vary; utilities that are constant.
    """
    developments = _grouped(developments)
    results = tuple(name for one in developments for name in one.results)
    if len(set(results)) < len(results):
        raise ProtocolError(f"selection: results {list(results)} are not all different; pass each once")
    if len(results) < 2:
        raise ProtocolError(
            f"selection: got {len(results)} development results {list(results)}, expected at least 2 (environment x "
            "target): the bound is undefined"
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
    return ProtocolChoice(
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
    """Those of one environment beside each other, in the order in which environments occur."""
    paths = [one.environment.path for one in developments]
    return sorted(developments, key=lambda one: paths.index(one.environment.path))


def _by_environment(
    developments: Sequence[Development],
    candidates: Sequence[Candidate],
    family: ProtocolFamily,
    resamples: int,
) -> list[F64]:
    """Agreement (C, T, 1 + R), an array for each environment: its targets share the subsets that are drawn."""
    found: dict[Path, list[F64]] = {}
    for one in developments:
        values = _figures(one, candidates, family.criterion, resamples=resamples)
        found.setdefault(one.environment.path, []).append(values)
    return [np.concatenate(values, axis=1) for values in found.values()]


def freeze(
    selection: ProtocolChoice, developments: Sequence[Development], family: ProtocolFamily, name: str
) -> ScoringProtocol:
    """The selected protocol, with where it comes from.

    Raises:
        ProtocolError: the family was that of a control without relevance, or with shuffled pairs.
    """
    candidate = selection.best.candidate
    scored = developments[0].variants[candidate.variant]
    several = len(developments[0].variants) > 1
    required = {
        field: scored.source.feature_settings.get(field)
        for field in Requirements.model_fields
        if several and f"{field}=" in candidate.variant
    }
    specs = {one.variants[candidate.variant].calibration.family for one in developments}
    spec = family.frozen_calibration
    if spec == "same":
        spec = specs.pop() if len(specs) == 1 else DEFAULT_CALIBRATION
    return candidate.protocol(
        name,
        Requirements.model_validate(required),
        calibration=CalibrationSettings(family=spec, n_subsets=family.calibration_subsets),
        selected_on=selection.results,
        selected_runs={name: fingerprint for one in developments for name, fingerprint in one.results.items()},
    )


def choice_provenance(
    selection: ProtocolChoice, developments: Sequence[Development], family: ProtocolFamily
) -> dict[str, Any]:
    """All that is needed to see how a protocol was chosen, as plain JSON; of the candidates the best ones."""
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
        "environments": [_described(one) for one in developments],
        "best": [
            {"protocol": s.candidate.name, "mean": s.mean, "se": s.se, "lcb": s.lcb, "results": dict(s.agreement)}
            for s in selection.scores[:LISTED]
        ],
    }


def provenance_path(protocol: Path) -> Path:
    """Where the record of a protocol lies: beside it."""
    return protocol.with_suffix(".provenance.json")


def write_provenance(record: Mapping[str, Any], path: Path) -> None:
    """Write the record; it appears only when whole."""
    write_whole(path, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def _described(one: Development) -> dict[str, Any]:
    info = one.environment.info
    return {
        "name": one.environment.name,
        "role": info.role,
        "recipe": info.recipe,
        "family": info.family.spec if info.family else "given",
        "subsets": len(info.subset_ids),
        "seeds": list(info.seeds),
        "corpus": info.corpus_fingerprint,
        "masks": info.masks_checksum,
        "targets": {name: info.targets[name].fingerprint for name in one.targets},
        "artifacts": {
            variant or "only": dict(scored.source.manifest.fingerprints) for variant, scored in one.variants.items()
        },
    }


def _candidates(family: ProtocolFamily, developments: Sequence[Development]) -> tuple[list[Candidate], int]:
    """Members of the family for every variant that all environments have an artifact of."""
    variants = [name for name in developments[0].variants if all(name in one.variants for one in developments)]
    if not variants:
        raise ProtocolError(
            f"selection: feature settings {[list(one.variants) for one in developments]} have none in common; build "
            "artifacts of the same settings for every environment"
        )
    listed: list[Candidate] = []
    total = 0
    for variant in variants:
        served = [family.members(one.variants[variant].source.array_names, variant) for one in developments]
        everywhere = set.intersection(*(set(members) for members, _ in served))
        listed += [candidate for candidate in served[0][0] if candidate in everywhere]
        total += len(served[0][0]) + served[0][1]
    if not listed:
        raise ProtocolError(f"selection: the artifacts serve none of the {total} protocols; build kernels and sketches")
    return listed, total - len(listed)


def _ranked(scores: Sequence[Score]) -> list[Score]:
    """By LCB from the highest; among those within TIE of the best of what is left, fewer components first."""
    left = sorted(scores, key=lambda score: -score.lcb)  # stable: the order of the family among equals
    ranked: list[Score] = []
    while left:
        tied = [score for score in left if score.lcb >= left[0].lcb - TIE]
        ranked += sorted(tied, key=lambda score: score.candidate.n_components)
        left = left[len(tied) :]
    return ranked


# ------------------------------------------------------------------------------------------ figures and their errors


def _figures(one: Development, candidates: Sequence[Candidate], criterion: Criterion, *, resamples: int) -> F64:
    """Criterion of every candidate on every target, plain and then resampled, (C, T, 1 + R).

    nan where it is undefined: predictions that are constant, for mean_lds those of every unit.

    Raises:
        ProtocolError: realized utilities that are constant.
    """
    utilities = one.environment.utilities()
    criterion = "task_rho" if WHOLE_TASK in utilities.unit_ids else criterion  # no unit has results of its own
    realized = [_realized(utilities, name, criterion) for name in one.targets]
    flat = [name for name, values_BE in zip(one.targets, realized, strict=True) if not np.ptp(values_BE, axis=0).any()]
    if flat:
        raise ProtocolError(f"{one.environment.path}: utilities of {flat} are constant; no protocol can be told apart")
    plain_1B = np.ones((1, len(utilities.subset_ids)))
    weights_RB = bootstrap_weights(len(utilities.subset_ids), resamples=resamples)
    out = np.empty((len(candidates), len(one.targets), 1 + resamples))
    for variant in dict.fromkeys(candidate.variant for candidate in candidates):
        own = [c for c, candidate in enumerate(candidates) if candidate.variant == variant]
        listed = [candidates[c] for c in own]
        parts = one.variants[variant].parts(listed, one.targets, per_unit=criterion == "mean_lds")
        order = _in_order(utilities.subset_ids, next(iter(parts.values())).subset_ids)
        for t, realized_BE in enumerate(realized):
            at_once = max(1, COLUMNS_AT_ONCE // realized_BE.shape[1])
            for start in range(0, len(own), at_once):
                group = own[start : start + at_once]
                chosen = [candidates[c] for c in group]
                predicted = [_predicted(parts[one.binding], one, t, criterion)[order] for one in chosen]
                out[group, t, :1] = _mean_rho(predicted, realized_BE, plain_1B)
                out[group, t, 1:] = _mean_rho(predicted, realized_BE, weights_RB)
    return out


def _mean_rho(predicted: Sequence[F64], realized_BE: F64, weights_RB: NDArray[np.floating[Any]]) -> F64:
    """Mean over columns of each prediction's rho, (C, R); the ranks of what was realized are made once."""
    pairs = [(0, 1 + c) for c in range(len(predicted))]
    return mean_defined(rank_correlations([realized_BE, *predicted], pairs, weights_RB), axis=1)


def _realized(utilities: Utilities, target: str, criterion: Criterion) -> F64:
    """Mean over seeds, (B, E) by units, or (B, 1) of the task."""
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
    """Standard error of each candidate's mean over all results, (C,); `resampled` has (C, T, R) an environment.

    A resample of environments takes, for each place, an environment at random and one of its resamples of subsets.
    Its mean weighs environments by their targets, as the plain mean does. A resample without a value is left out.
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
