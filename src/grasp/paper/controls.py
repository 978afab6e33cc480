"""The controls and ablations of the paper, with weights selected on development runs.

Start with `controls`. `candidates.CONTROLS` lists what each control leaves out.
"""

from collections.abc import Sequence
from dataclasses import replace

from grasp.api.evaluate import compare
from grasp.artifact.reader import Opened
from grasp.errors import SettingsError
from grasp.paper.calibrate import bind_all_runs
from grasp.paper.candidate_predictor import CandidatePredictor
from grasp.paper.candidates import (
    CONTROLS,
    Candidate,
    ProtocolFamily,
    default_family,
    load_family,
    needed_arrays,
)
from grasp.paper.development_runs import bind_developments
from grasp.paper.protocol_selection import select_protocol
from grasp.paper.shuffled_pairs import MAX_ROWS
from grasp.predict.default_protocol import resolve_protocol
from grasp.predict.scoring_rule import targets_selected_on
from grasp.predict.weights import Side
from grasp.runs.alignment import read_cost
from grasp.runs.evaluation import Evaluation
from grasp.runs.imported_runs import bind_runs
from grasp.runs.metrics import RESAMPLES
from grasp.runs.table import Place, Runs

SIDES: tuple[Side, ...] = ("retained", "omitted")


def controls(
    art: Opened,
    runs: Runs,
    *,
    development: Sequence[Runs] = (),
    family: ProtocolFamily | Place | None = None,
    resamples: int = RESAMPLES,
) -> Evaluation:
    """Compare the controls and ablations of the paper with retrained models.

    Args:
        art: artifact of the runs.
        runs: retrained subsets; of an unfinished directory, the finished ones.
        development: runs on which the weights of every control are selected. Default: `runs`.
        family: candidate protocols. Default: the built-in family.
        resamples: bootstrap resamples of the subsets.
    Raises:
        SettingsError: `development` is empty and the evaluated runs are held out.
    """
    artifact, evaluated = art.files, bind_runs(art.files, runs)
    if not development and evaluated.role != "dev":
        raise SettingsError(
            f"controls: {evaluated.path} is held out, so weights must not be selected on it; pass development runs "
            "(--development)"
        )
    full = default_family() if family is None else load_family(family)
    selection_runs = bind_all_runs(development, artifact) or [evaluated]
    developments = bind_developments([artifact], selection_runs, calibration_subsets=full.calibration_subsets)
    families = {control.name: full.restricted(control) for control in CONTROLS}
    families |= {f"full-{side}": full.model_copy(update={"sides": (side,)}) for side in SIDES}
    sources = [each.predictor.source for each in developments]
    fingerprints = {result: value for each in developments for result, value in each.results.items()}
    candidates: dict[str, Candidate] = {}
    notes = [f"weights of every control were selected on {', '.join(fingerprints)}"]
    for name, restricted in families.items():
        if not all(restricted.members(source.array_names)[0] for source in sources):
            notes.append(f"control {name}: skipped; no protocol of the family remains")
            continue
        if restricted.shuffled and max(source.n_rows for source in sources) > MAX_ROWS:
            notes.append(f"control {name}: skipped; more than {MAX_ROWS:,} rows have too many pairs")
            continue
        candidates[name] = select_protocol(restricted, developments, resamples=resamples).best.candidate
        notes.append(f"control {name}: {candidates[name].name}")
    predictor = CandidatePredictor.from_runs(evaluated, artifact)
    predictions = [
        replace(result, cost=read_cost(needed_arrays(candidates[result.method]), artifact))
        for result in predictor.predict_candidates(candidates, tuple(predictor.run_targets.values()))
    ]
    selected_on = targets_selected_on(fingerprints, predictor.runs_fingerprint)
    built_in = resolve_protocol(None, artifact, known_questions=True)
    return compare(
        artifact,
        evaluated,
        {built_in.name: built_in},
        predicted=predictions,
        selected_on=dict.fromkeys(candidates, selected_on),
        resamples=resamples,
        notes=[f"protocol {built_in.name}: {built_in.selection_summary}", *notes],
    )
