"""The controls and ablations of the paper, with weights selected on development runs.

Start with `controls`. `candidates.CONTROLS` lists what each control leaves out.
"""

from collections.abc import Sequence

from grasp.api.retrain import Place, Runs
from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.geometry.calibrate import bind_all_runs
from grasp.geometry.candidates import CONTROLS, Candidate, ProtocolFamily, default_family, load_family
from grasp.geometry.development_runs import Development, bind_developments
from grasp.geometry.protocol_selection import select_protocol
from grasp.predict.weights import Side
from grasp.runs.metrics import RESAMPLES
from grasp.runs.training_runs import TrainingRuns

SIDES: tuple[Side, ...] = ("retained", "omitted")


def controls(
    artifact: ArtifactReader,
    runs: TrainingRuns,
    development: Sequence[Runs],
    *,
    family: ProtocolFamily | Place | None = None,
    resamples: int = RESAMPLES,
) -> tuple[dict[str, Candidate], dict[str, str], list[str]]:
    """Select the weights of every control on development runs (default: the evaluated runs, if they are development).

    Args:
        artifact: artifact of the runs.
        runs: runs that the controls will be evaluated on.
        development: development runs; may be empty.
        family: candidate protocols; default: the built-in family.
        resamples: bootstrap resamples of the subsets.
    Returns:
        The selected candidate of each control, the results that they were selected on with the fingerprints of their
        runs, and notes.
    Raises:
        SettingsError: `development` is empty and the evaluated runs are held out.
    """
    if not development and runs.role != "dev":
        raise SettingsError(
            f"controls: {runs.path} is held out, so weights must not be selected on it; pass development runs "
            "(--development)"
        )
    full = default_family() if family is None else load_family(family)
    selection_runs = bind_all_runs(development, artifact) or [runs]
    developments = bind_developments([artifact], selection_runs, calibration_subsets=full.calibration_subsets)
    selected, notes = control_methods(full, developments, resamples=resamples)
    fingerprints = {
        result: fingerprint for development in developments for result, fingerprint in development.results.items()
    }
    return selected, fingerprints, notes


def control_methods(
    family: ProtocolFamily, developments: Sequence[Development], *, resamples: int = RESAMPLES
) -> tuple[dict[str, Candidate], list[str]]:
    """Select the controls of the paper, and the full predictor for each side, on development results.

    Args:
        family: candidate protocols of the full predictor.
        developments: development runs with their artifacts.
        resamples: bootstrap resamples of the subsets.
    Returns:
        The selected candidate of each control, and one note per control: the candidate, or why there is none.
    Raises:
        ProtocolError: fewer than two development results.
    """
    families = {control.name: family.restricted(control) for control in CONTROLS}
    families |= {f"full-{side}": family.model_copy(update={"sides": (side,)}) for side in SIDES}
    array_names_of = [predictor.source.array_names for dev in developments for predictor in dev.variants.values()]
    results = ", ".join(name for dev in developments for name in dev.results)
    selected: dict[str, Candidate] = {}
    notes = [f"weights of every control were selected on {results}"]
    for name, restricted in families.items():
        if not all(restricted.members(array_names)[0] for array_names in array_names_of):
            notes.append(f"control {name}: skipped; no protocol of the family remains")
            continue
        selected[name] = select_protocol(restricted, developments, resamples=resamples).best.candidate
        notes.append(f"control {name}: {selected[name].name}")
    return selected, notes
