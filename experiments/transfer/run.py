"""Component weights calibrated on some tasks, frozen, and tested on the others: the paper's transfer table.

    python -m experiments.transfer.run bench-out/cc-completion --runs experiments/environments/cc-topic \
        --runs experiments/environments/cc-format --out experiments/transfer/result.json

Relevance is the shipped protocol's; what is calibrated is the geometry. A row of the table was calibrated on its tasks
in every environment given, so that its other tasks are what it has not seen; the row `none` is relevance alone. The
roles of the environments are set aside here: no protocol that ships is selected by this.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.mistakes import in_one_line
from grasp.artifact.reader import ArtifactReader
from grasp.files import write_atomically
from grasp.paper.candidates import Candidate, ProtocolFamily, candidate_of, default_family
from grasp.paper.development_runs import Development
from grasp.paper.protocol_selection import select_protocol
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.runs.evaluation import evaluate_predictions
from grasp.runs.retrained import RetrainedRuns

Tested = Mapping[str, Mapping[str, Mapping[str, Any]]]  # figures by environment and task

METRICS = ("task_rho", "mean_lds", "positive")
SAME = "without_geometry_over_the_same"
CALIBRATED_ON = (
    ("sciq",),
    ("basic_skills_logical_reasoning",),
    ("sciq", "basic_skills_logical_reasoning"),
)


def family_of(base: Candidate) -> ProtocolFamily:
    """The family that ships, with relevance as it is in `base`."""
    return default_family().model_copy(
        update={
            "matches": (dict(base.match),),
            "sides": (base.settings.side,),
            "weightings": (base.settings.weighting,),
            "negatives": (base.settings.negative,),
            "standardize": (base.settings.task,),
        }
    )


def opened(path: Path) -> RetrainedRuns:
    """An environment all of whose targets may be calibrated on."""
    environment = RetrainedRuns.open(path)
    return RetrainedRuns(path, environment.info.model_copy(update={"role": "dev", "held_out_targets": ()}))


def run(artifact: ArtifactReader, environments: Sequence[RetrainedRuns], resamples: int) -> list[dict[str, Any]]:
    """A record for every row of the table."""
    base = candidate_of(DEFAULT_PROTOCOL, artifact)
    family = family_of(base)
    chosen: dict[str, tuple[tuple[str, ...], Candidate]] = {
        "none": ((), Candidate(base.settings, base.match, ())),
        "shipped": ((), base),
    }
    for tasks in CALIBRATED_ON:
        developments = [Development.from_runs(environment, [artifact], targets=tasks) for environment in environments]
        best = select_protocol(family, developments, resamples=resamples).best.candidate
        chosen[" + ".join(tasks)] = (tasks, best)
    measured = {
        name: {environment.name: tested(artifact, environment, candidate) for environment in environments}
        for name, (_, candidate) in chosen.items()
    }
    return [
        {
            "calibrated_on": name,
            "protocol": candidate.name,
            "environments": measured[name],
            "mean_over_unseen": mean_without(measured[name], tasks),
            SAME: mean_without(measured["none"], tasks),
        }
        for name, (tasks, candidate) in chosen.items()
    ]


def mean_without(tested: Tested, tasks: Sequence[str]) -> dict[str, float]:
    """Means over all tasks of all environments but `tasks`."""
    others = [
        r for result_by_target in tested.values() for target, r in result_by_target.items() if target not in tasks
    ]
    return {metric: float(np.mean([r[metric] for r in others])) for metric in METRICS}


def tested(artifact: ArtifactReader, environment: RetrainedRuns, candidate: Candidate) -> dict[str, dict[str, Any]]:
    """Figures with intervals, and ceilings, by task."""
    development = Development.from_runs(environment, [artifact])
    predictions = development.variants[""].predict_candidates({"protocol": candidate}, development.targets)
    report = evaluate_predictions(environment, predictions, targets=development.targets)
    wanted = (*METRICS, "task_ceiling", "lds_ceiling")
    return {
        record["target"]: {name: value for name, value in record.items() if name.startswith(wanted)}
        for record in report.records()
        if record["role"]
    }


@in_one_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--runs", type=Path, action="append", required=True)
    parser.add_argument("--resamples", type=int, default=1_000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results = run(ArtifactReader.open(args.artifact), [opened(path) for path in args.runs], args.resamples)
    write_atomically(args.out, (json.dumps(results, indent=1, allow_nan=False) + "\n").encode())
    for row in results:
        print(f"{row['calibrated_on']:<40} {row['protocol']}")
        for title, key in (("tasks not calibrated on", "mean_over_unseen"), ("the same, no geometry", SAME)):
            print(f"    {title}: {', '.join(f'{name} {value:.3f}' for name, value in row[key].items())}")


if __name__ == "__main__":
    main()
