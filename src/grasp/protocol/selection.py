"""Choosing a protocol on development environments, by the lower confidence bound of its mean task-level rho.

For every member of a finite family and every development result (environment x target) there is a rho; its mean over
results has a standard error by bootstrap: subsets are resampled within every environment (the same ones for its
targets and for all members), and where there are two or more environments these are resampled as well. With K
members evaluated, LCB = mean - z_(1 - delta/K) SE: at confidence 1 - delta the bound holds for all of them at once.
The largest LCB wins; ties go to fewer components, then to the member listed first.

Held-out results cannot be handed in: a `Development` can only be made from what is not held out.
Shape letters: B subsets, C candidates, T targets, R resamples.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

import grasp
from grasp.artifact.reader import Artifact
from grasp.errors import ProtocolError, ProtocolLeakError
from grasp.fidelity.environment import Environment
from grasp.fidelity.evaluate import artifact_targets
from grasp.fidelity.metrics import RESAMPLES, bootstrap_weights, rank_correlations
from grasp.fidelity.predictions import Predictions
from grasp.protocol.family import Binding, Candidate, ProtocolFamily, candidate_of
from grasp.protocol.parts import Parts, PartsSource
from grasp.protocol.scorer import CalibrationFamily
from grasp.protocol.scoring import Calibration, Requirements, ScoringProtocol
from grasp.protocol.source import F64, FeatureSource
from grasp.seeds import stream
from grasp.subsets import LabelTable, RowIndex, SubsetBlock, parse_family

DELTA = 0.05
TIE = 1e-9
CANDIDATES_AT_ONCE = 256
DEFAULT_CALIBRATION = "uniform:0.5"


@dataclass(frozen=True, slots=True)
class Scored:
    """An artifact beside an environment: what predictions for its subsets are made of. Says nothing of roles."""

    environment: Environment
    source: FeatureSource
    renamed: Mapping[str, str]  # the artifact's name of a target -> the environment's
    blocks: tuple[SubsetBlock, ...]
    calibration: CalibrationFamily
    fingerprints: Mapping[str, str]

    @classmethod
    def of(
        cls, environment: Environment, artifact: Artifact, *, calibration_subsets: int = 256, seed: int = 0
    ) -> "Scored":
        """Check that both belong together, and draw a calibration family like the environment's own.

        Its stream is another than that of the subsets that were retrained, so no intervention that is scored
        standardises itself. A table of given subsets has no family: uniform:0.5 stands in.

        Raises:
            EnvironmentDataError: corpora or targets differ, the masks are not those trained on.
        """
        common = artifact_targets(environment, artifact)
        label_table = LabelTable(artifact.rows_path)
        spec = environment.info.family.spec if environment.info.family else DEFAULT_CALIBRATION
        family = parse_family(spec)
        labels = label_table.column(family.label) if family.label is not None else None
        blocks = tuple(environment.subset_blocks(RowIndex.from_parquet(artifact.rows_path), labels))
        return cls(
            environment=environment,
            source=artifact,
            renamed={own: name for name, own in common.items()},
            blocks=blocks,
            calibration=CalibrationFamily(family, calibration_subsets, seed, labels),
            fingerprints=dict(artifact.manifest.fingerprints),
        )

    def parts(
        self, candidates: Sequence[Candidate], targets: Sequence[str], *, per_unit: bool = False
    ) -> dict[Binding, Parts]:
        """Parts of every binding that occurs, for targets by the environment's names."""
        own = {name: mine for mine, name in self.renamed.items()}
        maker = PartsSource(self.source, tuple(own[name] for name in targets), self.blocks, self.calibration)
        groups: dict[Binding, list[Candidate]] = {}
        for candidate in candidates:
            groups.setdefault(candidate.binding, []).append(candidate)
        return {binding: maker.parts(binding, group, per_unit=per_unit) for binding, group in groups.items()}

    def predictions(self, candidates: Mapping[str, Candidate], targets: Sequence[str]) -> list[Predictions]:
        """Predictions of units and tasks by each of the candidates, whatever the environment's role."""
        parts = self.parts(tuple(candidates.values()), targets, per_unit=True)
        return [parts[c.binding].predictions(c, name, self.renamed) for name, c in candidates.items()]

    def predict(self, protocols: Mapping[str, ScoringProtocol], targets: Sequence[str]) -> list[Predictions]:
        """Predictions of units and tasks by frozen protocols, standardised by the environment's calibration family.

        Raises:
            ProtocolError: the artifact does not fit a protocol.
        """
        return self.predictions({n: candidate_of(p, self.source) for n, p in protocols.items()}, targets)


@dataclass(frozen=True, slots=True)
class Development:
    """An environment that may be selected on, with the artifacts built for it: made by `of` alone."""

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

    @classmethod
    def of(
        cls,
        environment: Environment,
        artifacts: Sequence[Artifact],
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
        scored = [Scored.of(environment, artifact, calibration_subsets=calibration_subsets) for artifact in artifacts]
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


@dataclass(frozen=True, slots=True)
class Score:
    """One candidate on all development results."""

    candidate: Candidate
    mean: float
    se: float
    lcb: float
    rho: Mapping[str, float]  # by `environment/target`


@dataclass(frozen=True, slots=True)
class Selection:
    """The result: the winner first, every other candidate after it, and what it was chosen from."""

    scores: tuple[Score, ...]  # by LCB, ties as the rule breaks them
    undefined: Mapping[str, int]  # candidates without a rho, by reason
    not_served: int  # candidates that ask for arrays which an artifact lacks
    delta: float
    z: float
    resamples: int
    results: tuple[str, ...]

    @property
    def best(self) -> Score:
        return self.scores[0]


def variant_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each of several feature settings, out of the required fields in which they differ."""
    fields = list(Requirements.model_fields)
    differing = [name for name in fields if len({json.dumps(own.get(name)) for own in settings}) > 1]
    return [", ".join(f"{name}={own.get(name)}" for name in differing) for own in settings]


def select(
    family: ProtocolFamily,
    developments: Sequence[Development],
    *,
    delta: float = DELTA,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Selection:
    """Choose the member of the family with the highest lower confidence bound of mean rho.

    Feature settings are part of the family over the artifacts that were given, where every environment has one.

    Raises:
        ProtocolError: fewer than two development results, which leave the bound undefined; no candidate that all
            artifacts can serve, or none with a rho; utilities that are constant.
    """
    results = tuple(f"{one.environment.name}/{target}" for one in developments for target in one.targets)
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
    each = [_rho(one, candidates, resamples, seed) for one in developments]
    rho_CT = np.concatenate([rho[:, :, 0] for rho in each], axis=1)
    defined_C = np.isfinite(rho_CT).all(axis=1)
    if not defined_C.any():
        raise ProtocolError("selection: no candidate has a rho on every development result; predictions are constant")
    z = float(norm.ppf(1 - delta / len(candidates)))
    se_C = _standard_errors([rho[:, :, 1:] for rho in each], seed)
    scores = [
        Score(
            candidate, float(mean), float(se), float(mean - z * se), dict(zip(results, map(float, rho_T), strict=True))
        )
        for candidate, mean, se, rho_T, defined in zip(
            candidates, rho_CT.mean(axis=1), se_C, rho_CT, defined_C, strict=True
        )
        if defined
    ]
    return Selection(
        scores=tuple(_ranked(scores)),
        undefined={"predictions are constant": int((~defined_C).sum())} if not defined_C.all() else {},
        not_served=not_served,
        delta=delta,
        z=z,
        resamples=resamples,
        results=results,
    )


def freeze(
    selection: Selection, developments: Sequence[Development], family: ProtocolFamily, name: str
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
    specs = {str(one.variants[candidate.variant].calibration.family) for one in developments}
    spec = family.frozen_calibration
    if spec == "same":
        spec = specs.pop() if len(specs) == 1 else DEFAULT_CALIBRATION
    return candidate.protocol(
        name,
        Requirements.model_validate(required),
        calibration=Calibration(family=spec, n_subsets=family.calibration_subsets),
        selected_on=selection.results,
    )


def provenance(
    selection: Selection, developments: Sequence[Development], family: ProtocolFamily, *, listed: int = 20
) -> dict[str, Any]:
    """All that is needed to see how a protocol was chosen, as plain JSON.

    Args:
        listed: candidates that are shown, from the best on.
    """
    text = json.dumps(family.model_dump(mode="json"), sort_keys=True)
    return {
        "made_by": f"grasp {grasp.__version__}",
        "rule": "highest mean - z SE of task-level rho; ties to fewer components",
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
            {"protocol": s.candidate.name, "mean": s.mean, "se": s.se, "lcb": s.lcb, "rho": dict(s.rho)}
            for s in selection.scores[:listed]
        ],
    }


def write_provenance(record: Mapping[str, Any], protocol_path: Path) -> Path:
    """Write the record beside the protocol, as `<protocol>.provenance.json`; it appears only when whole."""
    path = protocol_path.with_suffix(".provenance.json")
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)
    return path


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
        "artifacts": {variant or "only": dict(scored.fingerprints) for variant, scored in one.variants.items()},
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


def _rho(one: Development, candidates: Sequence[Candidate], resamples: int, seed: int) -> F64:
    """(C, T, 1 + R): task-level rho of every candidate, plain and resampled; nan where predictions are constant."""
    utilities = one.environment.utilities()
    realized_BT = np.stack([utilities.of(name).values_BSE.mean(axis=(1, 2)) for name in one.targets], axis=1)
    flat = [name for t, name in enumerate(one.targets) if np.ptp(realized_BT[:, t]) == 0]
    if flat:
        raise ProtocolError(f"{one.environment.path}: utilities of {flat} are constant; no protocol can be told apart")
    n_subsets, n_targets = realized_BT.shape
    plain_1B = np.ones((1, n_subsets))
    weights_RB = bootstrap_weights(n_subsets, resamples=resamples, seed=seed)
    out = np.empty((len(candidates), n_targets, 1 + resamples))
    for variant in dict.fromkeys(candidate.variant for candidate in candidates):
        own = [c for c, candidate in enumerate(candidates) if candidate.variant == variant]
        parts = one.variants[variant].parts([candidates[c] for c in own], one.targets)
        order = _in_order(utilities.subset_ids, next(iter(parts.values())).subset_ids)
        for start in range(0, len(own), CANDIDATES_AT_ONCE):
            group = own[start : start + CANDIDATES_AT_ONCE]
            predicted = [parts[candidates[c].binding].tasks_of(candidates[c])[order] for c in group]
            x_BE = np.concatenate(predicted, axis=1)
            y_BE = np.tile(realized_BT, (1, len(group)))
            shape = (len(group), n_targets)
            out[group, :, 0] = rank_correlations([x_BE, y_BE], [(0, 1)], plain_1B)[0, :, 0].reshape(shape)
            out[group, :, 1:] = rank_correlations([x_BE, y_BE], [(0, 1)], weights_RB)[0].reshape(*shape, -1)
    return out


def _in_order(wanted: Sequence[str], have: Sequence[str]) -> NDArray[np.int64]:
    position = {name: b for b, name in enumerate(have)}
    return np.array([position[name] for name in wanted], dtype=np.int64)


def _standard_errors(resampled: Sequence[F64], seed: int) -> F64:
    """Standard error of each candidate's mean rho over all results, (C,); `resampled` has (C, T, R) an environment.

    A resample of environments takes, for each place, an environment at random and one of its resamples of subsets.
    Its mean weighs environments by their targets, as the plain mean does. A resample without a rho is left out.
    """
    n_places, n_resamples = len(resampled), resampled[0].shape[2]
    rng = stream(seed, "selection", "environments")
    total_CR = np.zeros((len(resampled[0]), n_resamples))
    count_CR = np.zeros_like(total_CR)
    for _ in range(n_places):
        drawn_R = rng.integers(0, n_places, size=n_resamples) if n_places > 1 else np.zeros(n_resamples, dtype=int)
        which_R = rng.permutation(n_resamples)
        for j, rho_CTR in enumerate(resampled):
            picked = drawn_R == j
            rho = rho_CTR[:, :, which_R[picked]]
            total_CR[:, picked] += np.where(np.isfinite(rho), rho, 0.0).sum(axis=1)
            count_CR[:, picked] += np.isfinite(rho).sum(axis=1)
    mean_CR = np.divide(total_CR, count_CR, out=np.full_like(total_CR, np.nan), where=count_CR > 0)
    return np.array([_deviation(row) for row in mean_CR])


def _deviation(values: F64) -> float:
    known = values[np.isfinite(values)]
    return float(known.std(ddof=1)) if len(known) > 1 else np.inf


def _ranked(scores: Sequence[Score]) -> list[Score]:
    """By LCB from the highest; among those within TIE of the best of what is left, fewer components first."""
    left = sorted(scores, key=lambda score: -score.lcb)  # stable: the order of the family among equals
    ranked: list[Score] = []
    while left:
        tied = [score for score in left if score.lcb >= left[0].lcb - TIE]
        ranked += sorted(tied, key=lambda score: score.candidate.n_components)
        left = left[len(tied) :]
    return ranked
