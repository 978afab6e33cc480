"""Which form fits mixtures over decades? Linear, saturating and learned, on runs left out.

    python -m experiments.dirichlet.curves --runs bench-out/environments/pool-dirichlet \
        --art bench-out/pool-completion --out experiments/dirichlet/curves.json

Takes what an unfinished environment has: the mixtures with a result for the first seed, and the second seed where all
have it.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from experiments.runs.curves import World, curve
from grasp.artifact.label_table import LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.predict.predictor import Predictor
from grasp.predict.subset_tables import RowIndex
from grasp.runs.calibration import SubsetFeaturizer
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.subset_features import SubsetFeatures

KS = (8, 16, 24, 32)


def of_environment(path: Path, art: Path) -> World:
    """The mixtures that have results, with the artifact of the same rows."""
    environment, artifact = RetrainedRuns.open(path), ArtifactReader.open(art)
    predictor = Predictor.from_artifact(artifact, sketches=("hidden", "residual"))
    assert environment.label is not None
    column = LabelTable(artifact.rows_path).column(environment.label)
    known = SubsetFeaturizer.from_predictor(predictor, artifact, (environment.label,))
    blocks = environment.subset_blocks(RowIndex.from_parquet(artifact.rows_path), column)
    features = SubsetFeatures.concatenate([known.features(block.weights) for block in blocks])
    both = environment.utilities(partial=True)
    utilities = (
        both
        if len(both.subset_ids) == len(environment.subset_ids)
        else environment.utilities(seeds=environment.info.seeds[:1], partial=True)
    )
    order = np.array([environment.subset_ids.index(name) for name in utilities.subset_ids])
    columns = [utilities.select(target).values_BSE.mean(axis=2) for target in predictor.units.targets]
    return World("pool-dirichlet", features.take(order), np.stack(columns, axis=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--art", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=8)
    args = parser.parse_args()
    world = of_environment(args.runs, args.art)
    n_runs, n_seeds = world.utility_RST.shape[:2]
    lines = curve(world, tuple(k for k in KS if k <= n_runs - 8), args.draws)
    args.out.write_text(json.dumps({"mixtures": n_runs, "seeds": n_seeds, "curves": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
