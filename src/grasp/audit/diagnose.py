"""Is an artifact fit for what it is used for? Each finding has a healthy value, and what to change when it is not.

Shape letters: N rows of the sample, B subsets, D sketch width.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import isnan, sqrt
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array

from grasp.artifact.reader import RELEVANCE, Artifact
from grasp.audit import checks
from grasp.audit.sample import HOW_TO_KEEP, Rerun, SampleFeatures, sample_features, sample_rows
from grasp.build.moments import unspool_moments
from grasp.errors import ArtifactError, GraspError, SettingsError
from grasp.features.whitening import Whitener
from grasp.fidelity.environment import Environment
from grasp.protocol.agreement import agreement
from grasp.protocol.scoring import ScoringProtocol, default_protocol
from grasp.seeds import stream
from grasp.settings import FeatureSettings

F64 = NDArray[np.float64]
T = TypeVar("T")

MIN_ROWS = 8
ALONE_ROWS = 16
RANKS = 0.8  # agreement of orders that is called healthy
SKETCHES = ("hidden_sketch", "residual_sketch", "product_sketch")
BATCH_TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was measured, whether it is healthy, and what to change."""

    name: str
    value: str
    healthy: str  # what a healthy value is
    verdict: str  # healthy, look, or not measured
    advice: str  # what to change, or why nothing was measured
    numbers: dict[str, float]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings of an artifact."""

    n_rows: int
    n_subsets: int
    source: str  # where full features came from
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(
    artifact: Artifact,
    *,
    rows: int = 256,
    subsets: int = 64,
    seed: int = 0,
    environment: Environment | None = None,
    protocol: ScoringProtocol | None = None,
) -> Diagnosis:
    """Measure everything that the artifact, its model and an environment allow, on a sample of rows and subsets.

    Args:
        rows: rows of the sample; memory is rows^2 numbers and their full features.
        subsets: halves of the sample that K is compared on.
        environment: for the stability of the ranking of its subsets.
        protocol: what predicts in the environment.
    Raises:
        SettingsError: fewer than 8 rows or 3 subsets.
        GraspError: the environment does not belong to the artifact.
    """
    if rows < MIN_ROWS or subsets < 3:
        raise SettingsError(f"diagnose: got {rows} rows and {subsets} subsets, expected at least {MIN_ROWS} and 3")
    index = sample_rows(artifact, rows, seed)
    if len(index) < MIN_ROWS:
        raise ArtifactError(f"{artifact.where}: has {artifact.n_rows} rows, diagnostics need at least {MIN_ROWS}")
    subject = _Subject.of(artifact, index, subsets, seed)
    findings = [*_of_features(subject), *_of_arrays(subject), _batches(subject)]
    if environment is None:
        findings.append(_missing("ranking stability", "an accuracy of 70% or more", "name an environment"))
    else:
        findings += _stability(artifact, environment, protocol)
    source = subject.features.source if isinstance(subject.features, SampleFeatures) else "nothing"
    return Diagnosis(len(index), subsets, source, tuple(findings))


@dataclass(frozen=True)
class _Subject:
    """The artifact, the sample, and what could be had of its features."""

    artifact: Artifact
    index: NDArray[np.int64]
    weight_BN: F64
    rerun: Rerun | GraspError
    features: SampleFeatures | GraspError

    @classmethod
    def of(cls, artifact: Artifact, index: NDArray[np.int64], subsets: int, seed: int) -> "_Subject":
        rerun = _or_error(lambda: Rerun.of(artifact))
        features = _or_error(lambda: sample_features(artifact, index, rerun))
        generator = stream(seed, "audit", "subsets")
        half = len(index) // 2
        weight_BN = np.zeros((subsets, len(index)))
        for weight_N in weight_BN:
            weight_N[generator.choice(len(index), size=half, replace=False)] = 1.0 / half
        return cls(artifact, index, weight_BN, rerun, features)

    def sketch(self, name: str) -> F64:
        return np.asarray(self.artifact.array_rows(name, self.index), dtype=np.float64)

    def grams(self, features: SampleFeatures) -> tuple[F64, F64]:
        """Inner products of whitened hidden states, and of scaled residuals, of all pairs of the sample."""
        whitener = self._whitener()
        white_NH = (features.hidden_NH - whitener.mean_H) @ whitener.map_HH
        return checks.gram(white_NH, self.scaled(features.residual_NV, whitener))

    def scaled(self, residual_NV: csr_array, whitener: Whitener) -> csr_array:
        return csr_array(residual_NV.astype(np.float64) @ diags_array(np.sqrt(whitener.precondition_V)))

    def _whitener(self) -> Whitener:
        settings = FeatureSettings.model_validate(self.artifact.feature_settings)
        moments = unspool_moments(self.artifact.moments, "pooled.")
        return Whitener.fit(moments, tau=settings.tau, alpha=settings.alpha, epsilon=settings.epsilon)


def _or_error(get: Callable[[], T]) -> T | GraspError:
    try:
        return get()
    except GraspError as err:
        return err


def _of_features(subject: _Subject) -> Iterator[Finding]:
    """What takes full features of the sample."""
    names = ("sketch of K", "direct sum for product", "residual beyond top-k", "pooled for tokens")
    features = subject.features
    if isinstance(features, GraspError):
        why = f"{features}; {HOW_TO_KEEP}" if HOW_TO_KEEP not in str(features) else str(features)
        yield from (_missing(name, "-", why) for name in names)
        return
    hidden_NN, residual_NN = subject.grams(features)
    yield _sketch_error(subject, hidden_NN, residual_NN)
    yield _direct_sum(checks.direct_sum(hidden_NN, residual_NN, subject.weight_BN))
    yield _outside(checks.mass_outside(features.residual_NV), subject.artifact.feature_settings["top_k"])
    if features.positions is None:
        yield _missing(names[3], "0.5 or more", f"positions were not kept; {HOW_TO_KEEP}")
    else:
        at = features.positions
        share = checks.rank_one_share(at.hidden_PH, at.residual_PV, at.row_P, len(subject.index))
        yield _rank_one(share)


def _sketch_error(subject: _Subject, hidden_NN: F64, residual_NN: F64) -> Finding:
    worst, ranks, width = 0.0, 1.0, 0
    numbers: dict[str, float] = {}
    for name, full_NN in (("hidden", hidden_NN), ("residual", residual_NN)):
        sketch_ND = subject.sketch(f"{name}_sketch") / _gain(subject.artifact, f"{name}_sketch")
        found_B = (subject.weight_BN @ sketch_ND) ** 2
        true_B = checks.subset_norms(subject.weight_BN, full_NN)
        error, rho = (
            checks.relative_error(found_B.sum(axis=1), true_B),
            checks.rank_agreement(found_B.sum(axis=1), true_B),
        )
        numbers |= {f"{name}_error": error, f"{name}_ranks": rho}
        if error >= worst:
            worst, ranks, width = error, rho, sketch_ND.shape[1]
    expected = sqrt(2 / width)
    return _finding(
        "sketch of K",
        f"{worst:.1%} off, ranks agree {ranks:+.2f} (worse half, {width} wide)",
        f"at most {2 * expected:.0%}: twice what {width} numbers give",
        worst <= 2 * expected,
        "raise features.hidden_width or features.residual_width, and build again",
        numbers,
    )


def _gain(artifact: Artifact, name: str) -> float:
    return float(artifact.manifest.arrays[name].gain) or 1.0


def _direct_sum(found: checks.DirectSum) -> Finding:
    return _finding(
        "direct sum for product",
        f"K ranks agree {found.ranks:+.2f}; bound {'holds' if found.satisfied else 'BROKEN'}: largest gap "
        f"{found.largest:.3f} of {found.bound:.3f}, mean {found.mean_share:.0%} of it",
        f"ranks {RANKS} or more, and the bound holds",
        found.satisfied and found.ranks >= RANKS,
        "use product.* components in a protocol (features.product_width > 0): the direct sum is no stand-in here",
        {"largest": found.largest, "bound": found.bound, "mean_share": found.mean_share, "ranks": found.ranks},
    )


def _outside(share: float, top_k: int) -> Finding:
    return _finding(
        "residual beyond top-k",
        f"{share:.1%} of its absolute mass",
        "at most 20%",
        share <= 0.2,
        f"raise features.top_k above {top_k}, or use a better trained model: flat predictions have long tails",
        {"share": share},
    )


def _rank_one(share: float) -> Finding:
    return _finding(
        "pooled for tokens",
        f"{share:.2f} of the output gradient's square is in h x xi (mean squared cosine)",
        "0.5 or more",
        share >= 0.5,
        "rank by the token kernel (features.match: both or token); the pooled one has lost most of the gradient",
        {"share": share},
    )


def _of_arrays(subject: _Subject) -> Iterator[Finding]:
    """What the arrays of the artifact tell by themselves."""
    artifact = subject.artifact
    for name in (name for name in SKETCHES if name in artifact.array_names):
        yield _rank(name, subject.sketch(name))
    joint = [subject.sketch(name) for name in SKETCHES[:2] if name in artifact.array_names]
    if joint:
        all_ND = np.concatenate(joint, axis=1)
        yield _negative(*checks.negative_pairs(all_ND @ all_ND.T))
    built = [kernel for kernel, array in RELEVANCE.items() if array in artifact.array_names]
    if {"pooled", "token"} <= set(built):
        yield _kernels(subject)


def _rank(name: str, sketch_ND: F64) -> Finding:
    rank = checks.effective_rank(sketch_ND)
    width = min(sketch_ND.shape[1], len(sketch_ND) - 1)
    return _finding(
        f"effective rank, {name.replace('_', ' ')}",
        f"{rank:.1f} of {width}",
        f"{max(1, width // 8)} or more",
        rank >= width / 8,
        "a few directions carry it: lower features.tau (hidden), raise features.epsilon (residual), or use a narrower "
        "sketch; near-duplicate rows do it too",
        {"rank": rank, "width": float(width)},
    )


def _negative(pairs: float, mass: float) -> Finding:
    return _finding(
        "pairs that complement",
        f"{pairs:.0%} of pairs have a negative inner product, {mass:.0%} of the mass",
        "at most 5% of the mass: then the surrogate is nearly submodular",
        mass <= 0.05,
        "diminishing returns fail on those pairs and greedy selection has no guarantee: read the certificate that "
        "`grasp select` prints",
        {"pairs": pairs, "mass": mass},
    )


def _kernels(subject: _Subject) -> Finding:
    pooled_NE, token_NE = (subject.sketch(RELEVANCE[kernel]) for kernel in ("pooled", "token"))
    each = [checks.rank_agreement(a, b) for a, b in zip(pooled_NE.T, token_NE.T, strict=True)]
    rho = float(np.nanmean(each)) if not all(map(isnan, each)) else float("nan")
    return _finding(
        "pooled against token relevance",
        f"ranks of rows agree {rho:+.2f}, mean over units",
        "0.5 or more",
        rho >= 0.5,
        "the kernels rank rows differently: prefer token, or let `grasp calibrate` choose",
        {"ranks": rho},
    )


def _batches(subject: _Subject) -> Finding:
    healthy = "rounding only"
    if isinstance(subject.rerun, GraspError):
        return _missing("batch invariance", healthy, str(subject.rerun))
    index = subject.index[:: max(1, len(subject.index) // ALONE_ROWS)][:ALONE_ROWS]
    together = subject.rerun.features(index)
    hidden_NH, residual_NV = subject.rerun.alone(index)
    spread = float(np.abs(hidden_NH - hidden_NH.mean(axis=0)).mean()) or 1.0
    hidden = float(np.abs(hidden_NH - together.hidden_NH).max()) / spread
    residual = float(abs(residual_NV - together.residual_NV).max())
    worst = max(hidden, residual)
    kind = str(subject.rerun.model.dtype).removeprefix("torch.")
    allowed = BATCH_TOLERANCE.get(kind, BATCH_TOLERANCE["float32"])
    return _finding(
        "batch invariance",
        f"rows alone and in batches differ by {worst:.1e} ({kind}, {len(index)} rows)",
        f"at most {allowed:.0e}",
        worst <= allowed,
        "build with model.dtype: float32; if it is that already, the model mixes the rows of a batch (batch "
        "normalisation in training mode, attention over padding)",
        {"hidden": hidden, "residual": residual},
    )


def _stability(artifact: Artifact, environment: Environment, protocol: ScoringProtocol | None) -> Iterator[Finding]:
    for points in agreement(artifact, environment, protocol or default_protocol()).points:
        found = checks.stability(points.predicted_B, points.realized_B)
        yield _finding(
            f"ranking stability, {points.target}",
            f"{found.accuracy:.0%} of pairs in order; certain by the bound {found.bound:.0%}, by own errors "
            f"{found.certain:.0%}",
            "an accuracy of 70% or more",
            found.accuracy >= 0.7,
            "calibrate a protocol, or compare only subsets whose utilities are farther apart; more seeds tell noise "
            "from error",
            asdict(found),
        )


def _finding(name: str, value: str, healthy: str, good: bool, advice: str, numbers: dict[str, float]) -> Finding:
    return Finding(name, value, healthy, "healthy" if good else "look", "" if good else advice, numbers)


def _missing(name: str, healthy: str, why: str) -> Finding:
    return Finding(name, "not measured", healthy, "not measured", why, {})
