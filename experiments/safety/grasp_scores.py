"""What a user gets: the fine-tuned model and its rows through `grasp build`, then predict and the methods.

The scores of `grasp detect`, which accepts images only, are computed by its functions.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.safety.setting import Case, Row
from experiments.safety.tuned import Tuned
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import label_column
from grasp.methods.registry import configure_methods, score_artifact
from grasp.pipeline.pipeline import build_artifact
from grasp.predict.predictor import Predictor
from grasp.predict.scoring_rule import ScoringProtocol, load_protocol, parse_protocol
from grasp.predict.weights import WeightedRows, in_blocks
from grasp.settings import build_settings
from grasp.vision.detect import NEIGHBOURS, low_relevance
from grasp.vision.detection import mean_ranks
from grasp.vision.neighbours import disagreement

TARGET = "trusted"
FULL_PROTOCOL = Path(__file__).with_name("protocol.yaml")


def artifact_of(case: Case, tuned: Tuned, checkpoint: Path, work: Path) -> ArtifactReader:
    """Rows, trusted units and a model, built; rows are cut as `tuned` was trained on them."""
    sequences = tuned.base.sequences(case.rows, tuned.longest)
    table = {
        "row_id": [row.row_id for row in case.rows],
        "text": [row.prompt + row.completion for row in case.rows],
        "input_ids": pa.array([list(sequence.ids) for sequence in sequences], pa.list_(pa.int32())),
        "label": [row.completion.strip()[:40] for row in case.rows],
        "planted": case.planted_N,
    }
    corpus, units = work / "corpus.parquet", work / "trusted.jsonl"
    pq.write_table(pa.table(table), corpus)
    units.write_text("".join(_unit(row) for row in case.trusted), encoding="utf-8")
    # a label is one token and the last: all that a review is trained on; an answer is the end of its row
    positions = "tail:1" if case.is_backdoor else "tail:32"
    settings = build_settings(
        {
            "model": {"path": str(checkpoint), "threads": 1, "batch_tokens": 2048},
            "corpus": {"path": str(corpus), "max_length": tuned.longest},
            "targets": {"names": [str(units)], "units_per_target": None, "max_length": tuned.longest},
            "train": "further",
            "features": {
                "kernels": ["output_layer", "embedding", "pooled", "hidden_sketch", "residual_sketch"],
                "positions": positions,
                "summary_positions": positions,
            },
        }
    )
    return ArtifactReader.open(build_artifact(settings, work / "artifact"))


def _unit(row: Row) -> str:
    line = {"task": TARGET, "prompt": row.prompt, "completion": row.completion, "unit_id": row.row_id}
    return json.dumps(line) + "\n"


def relevance(artifact: ArtifactReader) -> dict[str, F64]:
    """Minus the mean relevance to the trusted units by each kernel, (N,) each: higher for more suspicious rows."""
    return {
        f"GRASP relevance ({name})": low_relevance(artifact, f"relevance_{kernel}", TARGET)
        for name, kernel in KERNELS.items()
    }


def others(artifact: ArtifactReader, *, label: str | None) -> dict[str, F64]:
    """Every other score that comes from the artifact, (N,) each, higher for more suspicious rows."""
    out = {}
    if label is not None:
        _, sketch_ND = next(artifact.array_blocks("hidden_sketch", block_rows=artifact.n_rows))
        label_N = label_column(artifact, label).codes_N.astype(np.int64)
        share_N = disagreement(sketch_ND, label_N, NEIGHBOURS).share_N
        relevance_N = low_relevance(artifact, "relevance_output_layer", TARGET)
        out |= {"detect: geometry": share_N, "detect: fused": mean_ranks([relevance_N, share_N])}
    out["GRASP (full)"] = without_each(artifact, load_protocol(FULL_PROTOCOL))
    for method in configure_methods(["bm25"]):
        rows = score_artifact(artifact, method, cache=artifact.path / "methods")
        blocks = rows.array_blocks(rows.array_names[0], columns=rows.unit_columns(TARGET))
        out[NAMES[method.label]] = -np.concatenate([block.mean(axis=1) for _, block in blocks])
    return out


KERNELS = {"token": "output_layer", "pooled": "pooled"}  # by what the recorded results call them
NAMES = {"bm25": "BM25"}


def without_each(artifact: ArtifactReader, protocol: ScoringProtocol) -> F64:
    """Predicted change if each row is left out: high where the row does harm, geometry included.

    Geometry is standardised by uniform halves, since there are no topics here.
    """
    halves = {"calibration": {"family": "uniform:0.5", "n_subsets": 256, "seed": 0}}
    half = parse_protocol(protocol.model_dump() | halves, protocol.name)
    n_rows = artifact.n_rows
    each = (WeightedRows(f"{i:06d}", np.delete(np.arange(n_rows), i)) for i in range(n_rows))
    predictor = Predictor.from_artifact(artifact, half, [TARGET])
    return np.concatenate([predictor.change(block.weights)[:, 0] for block in in_blocks(each, n_rows, 256)])
