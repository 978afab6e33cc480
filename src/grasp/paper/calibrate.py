"""Select a scoring protocol on development runs: the function behind `grasp.calibrate`.

`calibrate` binds runs to artifacts, lets `protocol_selection` select a candidate, and returns it with its record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from grasp.artifact.reader import ArtifactReader, Opened
from grasp.paper.candidates import ProtocolFamily, default_family, load_family, subsets_for
from grasp.paper.development_runs import bind_developments
from grasp.paper.protocol_selection import (
    ProtocolSelection,
    freeze,
    provenance_path,
    select_protocol,
    selection_provenance,
    write_provenance,
)
from grasp.predict.scoring_rule import ScoringProtocol, save_protocol
from grasp.results import Result
from grasp.runs.imported_runs import bind_runs
from grasp.runs.metrics import RESAMPLES
from grasp.runs.table import Place, Runs
from grasp.runs.training_runs import TrainingRuns
from grasp.text import parse_names

MAX_PROTOCOLS_SHOWN = 10  # protocols listed in the result


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Calibration(Result):
    """The selected protocol, and the candidates that it was selected from."""

    protocol: ScoringProtocol
    selection: ProtocolSelection
    record: Mapping[str, Any]  # provenance of the selection, as plain JSON

    def save(self, path: Place) -> Path:
        """Write the protocol and, next to it, the provenance of the selection; return the path of the provenance."""
        out = Path(path)
        save_protocol(self.protocol.model_copy(update={"name": out.stem}), out)
        write_provenance(self.record, provenance_path(out))
        return provenance_path(out)


def calibrate(
    arts: Opened | Sequence[Opened],
    runs: Runs | Sequence[Runs],
    *,
    family: ProtocolFamily | Place | None = None,
    target: str | Sequence[str] | None = None,
    resamples: int = RESAMPLES,
    name: str = "calibrated",
) -> Calibration:
    """Select the protocol with the highest lower confidence bound of its mean agreement with development runs.

    Args:
        arts: artifacts; each is used for the runs of its corpus.
        runs: development runs.
        family: candidate protocols; default: the built-in family, or its short version if there are few subsets.
        target: one or several targets; default: all targets that are not held out.
        resamples: bootstrap resamples of the subsets.
        name: name of the selected protocol.
    Raises:
        ProtocolLeakError: runs or targets are held out.
        ProtocolError: fewer than two results (runs x target).
        RunsError: no artifact was built from the corpus of some runs.
    """
    artifacts = [art.files for art in (arts if isinstance(arts, Sequence) else [arts])]
    development_runs = bind_all_runs(runs, artifacts[0])
    n_subsets = len({(each.path, subset_id) for each in development_runs for subset_id in each.info.subset_ids})
    candidate_family, reasons = default_family() if family is None else load_family(family), list[str]()
    if family is None and n_subsets < (required := subsets_for(n_protocols := candidate_family.size)):
        # kernels and their sums, with the side and scale of the built-in protocol
        restrictions = {"sides": ("retained",), "standardize": ("mean_relevance",), "components": ((),)}
        candidate_family = candidate_family.model_copy(update=restrictions)
        reasons.append(
            f"short list of {candidate_family.size} protocols without geometry: with {n_subsets} subsets the best of "
            f"{n_protocols:,} would be chance; the whole list requires {required} subsets (--family overrides this)"
        )
    developments = bind_developments(
        artifacts,
        development_runs,
        targets=None if target is None else parse_names(target, artifacts[0].targets),
        calibration_subsets=candidate_family.calibration_subsets,
    )
    selection = select_protocol(candidate_family, developments, resamples=resamples)
    protocol = freeze(selection, developments, candidate_family, name)
    mean_column = f"mean {selection.criterion}"
    bounds = [
        {"protocol": score.candidate.name, "bound": score.lcb, mean_column: score.mean, "se": score.se}
        for score in selection.scores[:MAX_PROTOCOLS_SHOWN]
    ]
    n_candidates = len(selection.scores) + sum(selection.undefined.values())
    left_out = [f"{n:,} without a rho: {reason}" for reason, n in selection.undefined.items()]
    left_out += [f"{selection.not_served:,} more require arrays that an artifact lacks"] if selection.not_served else []
    bound = f"bound = mean {selection.criterion} - {selection.z:.2f} standard errors"
    return Calibration(
        table=pa.Table.from_pylist(bounds),
        headline=f"protocol {protocol.name}: {selection.best.candidate.name}, {protocol.selection_summary}",
        notes=(
            "; ".join([f"{n_candidates:,} protocols on {', '.join(selection.results)}", bound, *left_out]),
            *reasons,
            *(f"{result}: {value:+.3f}" for result, value in selection.best.agreement.items()),
        ),
        protocol=protocol,
        selection=selection,
        record=selection_provenance(selection, developments, candidate_family),
    )


def bind_all_runs(runs: Runs | Sequence[Runs], artifact: ArtifactReader) -> list[TrainingRuns]:
    """Bind one or several runs to the artifact."""
    return [
        bind_runs(artifact, source)
        for source in (runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs])
    ]
