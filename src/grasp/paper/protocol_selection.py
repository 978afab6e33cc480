"""Select a protocol on development runs by the lower confidence bound (LCB) of its mean agreement.

Start with `select_protocol`. Every member of a finite family (`candidates`) is evaluated on every development result
(environment x target, `development_runs`) by the criterion of the family (`agreement`). The standard error (SE) of the
mean over results is a bootstrap estimate: subsets are resampled within every environment (the same draws for all of its
targets and for all members), and if there are two or more environments, these are resampled too. With K members,

    LCB = mean - z_(1 - DELTA/K) SE,

so that all bounds hold simultaneously with confidence 1 - DELTA (Bonferroni). The member with the largest LCB is
selected; ties go to fewer terms (kernels and components), then to the order of the family.

Shape letters: C candidates, T targets, R resamples.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri

import grasp
from grasp.arrays import F64
from grasp.errors import ProtocolError
from grasp.files import write_atomically
from grasp.paper.agreement import measure_agreement, standard_errors
from grasp.paper.candidates import DELTA, Candidate, ProtocolFamily
from grasp.paper.development_runs import Development
from grasp.paper.protocol import DEFAULT_CALIBRATION, CalibrationSettings
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.runs.metrics import RESAMPLES

TIE_TOLERANCE = 1e-9  # bounds that differ by less are equal
MAX_LISTED = 20  # candidates listed in the provenance


@dataclass(frozen=True, slots=True)
class Score:
    """Agreement of one candidate with every development result, and its mean."""

    candidate: Candidate
    mean: float
    se: float  # standard error of the mean
    lcb: float  # lower confidence bound of the mean
    agreement: Mapping[str, float]  # by `environment/target`


@dataclass(frozen=True, slots=True)
class ProtocolSelection:
    """Result of a selection: all candidates, best first, and the inputs of the selection."""

    scores: tuple[Score, ...]  # by descending LCB, ties broken
    criterion: str
    undefined: Mapping[str, int]  # by reason: candidates whose criterion is undefined on a result
    not_served: int  # candidates that require arrays which an artifact lacks
    z: float  # z_(1 - DELTA/K)
    resamples: int
    results: tuple[str, ...]  # development results, as `environment/target`

    @property
    def best(self) -> Score:
        return self.scores[0]


def select_protocol(
    family: ProtocolFamily,
    developments: Sequence[Development],
    *,
    resamples: int = RESAMPLES,
) -> ProtocolSelection:
    """Select the member of the family with the highest lower confidence bound of mean agreement.

    Args:
        family: candidate protocols.
        developments: development runs with their artifacts.
        resamples: bootstrap resamples of the subsets.
    Raises:
        ProtocolError: fewer than two development results (the bound is undefined), no candidate for which all
            artifacts have the arrays, no candidate with varying predictions, or constant utilities.
    """
    paths = [development.runs.path for development in developments]  # those of one environment become adjacent
    developments = sorted(developments, key=lambda development: paths.index(development.runs.path))
    results = tuple(name for development in developments for name in development.results)
    if len(set(results)) < len(results):
        raise ProtocolError(
            f"selection: results {list(results)} contain duplicates; pass each environment once, with one artifact of "
            "each target"
        )
    if len(results) < 2:
        raise ProtocolError(
            f"selection: got {len(results)} development results {list(results)}, expected at least 2 (environment x "
            "target), otherwise the bound is undefined"
        )
    members_of = [family.members(development.predictor.source.array_names) for development in developments]
    in_all = set.intersection(*(set(members) for members, _ in members_of))
    members, n_others = members_of[0]
    candidates, total = [candidate for candidate in members if candidate in in_all], len(members) + n_others
    if not candidates:
        raise ProtocolError(f"selection: none of the {total} protocols has all arrays; build more kernels and sketches")
    # (C, T, 1 + R) per environment: the criterion at index 0 of the last axis, then its bootstrap resamples
    by_path: dict[Path, list[F64]] = {}
    for development in developments:
        values = measure_agreement(development, candidates, family.criterion, resamples=resamples)
        by_path.setdefault(development.runs.path, []).append(values)
    agreements = [np.concatenate(values, axis=1) for values in by_path.values()]
    value_CT = np.concatenate([agreement_CTR[:, :, 0] for agreement_CTR in agreements], axis=1)
    defined_C = np.isfinite(value_CT).all(axis=1)
    if not defined_C.any():
        raise ProtocolError("selection: no candidate has a rho on every development result; predictions are constant")
    z = float(ndtri(1 - DELTA / len(candidates)))
    se_C = standard_errors([agreement_CTR[:, :, 1:] for agreement_CTR in agreements])
    scores = [
        Score(
            candidate, float(mean), float(se), float(mean - z * se), dict(zip(results, value_T.tolist(), strict=True))
        )
        for candidate, mean, se, value_T, defined in zip(
            candidates, value_CT.mean(axis=1), se_C, value_CT, defined_C, strict=True
        )
        if defined
    ]
    remaining = sorted(scores, key=lambda score: -score.lcb)  # stable: equal scores keep the order of the family
    ranked: list[Score] = []
    while remaining:
        tied = [score for score in remaining if score.lcb >= remaining[0].lcb - TIE_TOLERANCE]
        ranked += sorted(tied, key=lambda score: len(score.candidate.match + score.candidate.components))
        remaining = remaining[len(tied) :]
    return ProtocolSelection(
        scores=tuple(ranked),
        criterion=family.criterion,
        undefined={"predictions are constant": int((~defined_C).sum())} if not defined_C.all() else {},
        not_served=total - len(candidates),
        z=z,
        resamples=resamples,
        results=results,
    )


def freeze(
    selection: ProtocolSelection, developments: Sequence[Development], family: ProtocolFamily, name: str
) -> ScoringProtocol:
    """Return the best candidate as a protocol that records what it was selected on.

    Args:
        selection: result of `select_protocol`.
        developments: development runs of the selection.
        family: family of the selection.
        name: name of the protocol.
    Raises:
        ProtocolError: the family is that of a control without relevance, or with shuffled pairs.
    """
    candidate = selection.best.candidate
    specs = {development.predictor.calibration.family for development in developments}
    spec = family.frozen_calibration
    if spec == "same":
        spec = specs.pop() if len(specs) == 1 else DEFAULT_CALIBRATION
    return candidate.protocol(
        name,
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
        "delta": DELTA,
        "z": selection.z,
        "resamples": selection.resamples,
        "family": family.model_dump(mode="json"),
        "family_checksum": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        "candidates": len(selection.scores) + sum(selection.undefined.values()),
        "undefined": dict(selection.undefined),
        "not_served": selection.not_served,
        "results": list(selection.results),
        "environments": [
            {
                "name": development.runs.name,
                "role": info.role,
                "recipe": info.recipe,
                "family": info.family.spec if info.family else "given",
                "subsets": len(info.subset_ids),
                "seeds": list(info.seeds),
                "corpus": info.corpus_fingerprint,
                "masks": info.masks_checksum,
                "targets": {name: info.targets[name].fingerprint for name in development.targets},
                "artifacts": {"only": dict(development.predictor.source.manifest.fingerprints)},
            }
            for development in developments
            for info in [development.runs.info]
        ],
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
