"""How often do the 95 % intervals of `predict --by` exclude zero for groups that are random?

    python -m experiments.intervals.run --data ../shared/data --model MODEL --out experiments/intervals/groups.json

`pages` has 1,500 documents of the pool in up to ten rows each, `rows` 10,000 web pages of one row each. All documents
are divided at random into groups, equally likely or of sizes that differ as topics do; the true change of each group is
0. A label of the corpus (source, topic) is counted for comparison. MODEL is a checkpoint, such as that of `grasp demo`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from experiments.one_line_errors import in_one_line
from experiments.worlds.setting import write_parquet
from grasp.artifact.label_table import LabelColumn
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import label_column, row_documents, row_tokens
from grasp.files import write_atomically
from grasp.pipeline.build import build
from grasp.predict.predictor import Predictor
from grasp.predict.slice_intervals import dropped_errors
from grasp.predict.slices import label_slices, slice_effects
from grasp.seeds import stream

TARGETS = ("sciq", "arc_easy", "hellaswag", "openbookqa")
CORPORA = {
    "pages": ({"max_rows_per_document": 10}, "pool.parquet", 1_500, "source"),
    "rows": ({"max_rows_per_document": 1}, "cc_weborganizer.parquet", 10_000, "topic"),
}
N_GROUPS, DRAWS = 20, 50


def artifact_of(name: str, data: Path, model: Path, work: Path) -> ArtifactReader:
    """Build the artifact of one corpus as `grasp build --train new` does, once."""
    options, file, n_documents, _ = CORPORA[name]
    corpus = work / f"{name}.parquet"
    if not corpus.exists():
        work.mkdir(parents=True, exist_ok=True)
        table = pq.read_table(data / file)
        drawn = stream(0, "intervals", name).permutation(table.num_rows)[:n_documents]
        write_parquet(corpus, table.take(np.sort(drawn)))
    settings: dict[str, Any] = {
        "model": {"path": str(model), "threads": 1},
        "corpus": {"path": str(corpus), "max_length": 128, **options},
        "targets": {"names": TARGETS, "units_per_target": 64},
        "train": "new",
    }
    return build(out=work / name, settings=settings)


def excluded(artifact: ArtifactReader, predictor: Predictor, column: LabelColumn) -> tuple[list[int], list[int]]:
    """Count the intervals that exclude zero: alone, and corrected for all slices of the label."""
    slices = label_slices(column, row_tokens(artifact))
    errors = dropped_errors(artifact, predictor, slice_effects(predictor, slices), slices)
    beyond = [np.abs(errors.value_GT) > errors.half_widths(n) for n in (1, len(slices.slices))]
    return [int(values_GT.sum()) for values_GT in beyond], [values_GT.size for values_GT in beyond]


def report(name: str, data: Path, model: Path, work: Path) -> dict[str, Any]:
    """Count over all draws of groups, and over a label of the corpus."""
    artifact = artifact_of(name, data, model, work)
    predictor = Predictor.from_artifact(artifact)
    documents_N = row_documents(artifact)
    counts: dict[str, Any] = {}
    for sizes in ("equal", "unequal"):
        single = corrected = total = 0
        for draw in range(DRAWS):
            rng = stream(0, "intervals", name, sizes, draw)
            share_G = np.full(N_GROUPS, 1 / N_GROUPS) if sizes == "equal" else rng.dirichlet(np.ones(N_GROUPS))
            group_D = rng.choice(N_GROUPS, size=int(documents_N.max()) + 1, p=share_G)
            column = LabelColumn.from_values([f"g{g}" for g in group_D[documents_N]], "group")
            beyond, of = excluded(artifact, predictor, column)
            single, corrected, total = single + beyond[0], corrected + beyond[1], total + of[0]
        counts[sizes] = {"intervals": total, "excluding_zero": single, "corrected_excluding_zero": corrected}
        print(name, sizes, counts[sizes], flush=True)
    beyond, of = excluded(artifact, predictor, label_column(artifact, CORPORA[name][3]))
    counts["label"] = {"intervals": of[0], "excluding_zero": beyond[0], "corrected_excluding_zero": beyond[1]}
    print(name, "label", counts["label"], flush=True)
    return {"artifact": name, "rows": artifact.n_rows, "documents": int(documents_N.max()) + 1, **counts}


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, build, count, write."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="python -m experiments.intervals.run", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="Folder of pool.parquet and cc_weborganizer.parquet.")
    parser.add_argument("--model", type=Path, required=True, help="A trained checkpoint.")
    parser.add_argument("--work", type=Path, default=Path(__file__).parent / "work", help="Artifacts.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    args = parser.parse_args(arguments)
    reports = [report(name, args.data, args.model, args.work) for name in CORPORA]
    summary = {"groups": N_GROUPS, "draws": DRAWS, "artifacts": reports}
    write_atomically(args.out, (json.dumps(summary, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
