"""Do two trainings on the same rows change the same questions? Predict the runs of one environment by another's.

    python -m experiments.finetune.adapter documents-lora documents --out experiments/finetune/adapter.json

Runs of the first seed, in the same order of rows. Beside it stands how far two orders agree within the second.
Nothing is read but runs, and it takes seconds. Shape letters: B subsets, E units.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.one_line_errors import in_one_line
from experiments.worlds.evaluate import Predictions, compare, noise
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import ENVIRONMENTS, NAMES, Name
from grasp.errors import GraspError
from grasp.files import write_atomically
from grasp.runs.retrained import RetrainedRuns


def report(name: Name, other: Name) -> dict[str, Any]:
    """Mean LDS and task rho of the other's runs, and by target the correlation over subsets and units, each unit less
    its mean: as `noise` has it for two seeds.
    """
    if ENVIRONMENTS[name].rows != ENVIRONMENTS[other].rows:
        raise GraspError(f"{name}, {other}: trained on other rows; expected two environments of the same")
    first, second = (RetrainedRuns.open(FOLDER / each) for each in (name, other))
    first_values, second_values = (environment.utilities(seeds=(0,), partial=True) for environment in (first, second))
    both = [subset for subset in first_values.subset_ids if subset in second_values.subset_ids]
    if both != list(first_values.subset_ids) or first_values.unit_ids != second_values.unit_ids:
        raise GraspError(f"{other}: lacks subsets or questions of {name}; expected at least the same")
    value_BE = second_values.values_BSE[[second_values.subset_ids.index(subset) for subset in both]].mean(axis=1)
    first_BE, targets = first_values.values_BSE.mean(axis=1), np.array(first_values.targets)
    column_of = {target: np.flatnonzero(targets == target) for target in dict.fromkeys(first_values.targets)}
    task_BT = np.stack([value_BE[:, columns].mean(axis=1) for columns in column_of.values()], axis=1)
    centred = [value - value.mean(axis=0) for value in (first_BE, value_BE)]
    return {
        "environments": [name, other],
        "subsets": len(both),
        "correlation": {
            target: round(float(np.corrcoef(*(part[:, columns].ravel() for part in centred))[0, 1]), 3)
            for target, columns in column_of.items()
        },
        "agreement": compare(
            {other: Predictions(value_BE, task_BT)}, first_values, np.zeros((len(both), 1)), base=other
        ),
        "two_seeds": {other: noise(second, second_values)},
        "mean_utility": {
            environment_name: {
                target: round(float(values[:, columns].mean()), 4) for target, columns in column_of.items()
            }
            for environment_name, values in ((name, first_BE), (other, value_BE))
        },
    }


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, compare, write."""
    parser = argparse.ArgumentParser(prog="python -m experiments.finetune.adapter", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES, help="Environment whose runs are predicted.")
    parser.add_argument("other", choices=NAMES, help="Environment of the same rows whose runs predict them.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    args = parser.parse_args(arguments)
    write_atomically(args.out, (json.dumps(report(args.name, args.other), indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
