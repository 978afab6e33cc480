"""A benchmark's own text in a corpus: recall at 100 of relevance, BM25 and 13-gram overlap.

    python -m experiments.contamination.run --pool ../shared/data/pool.parquet --work bench-out/contamination

Makes passages, a reference model of the tiny recipe trained on them as they are, and an artifact, each unless it is
there; a killed run goes on.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

from experiments.contamination.plant import CLEAN, Passage, folded, grams, own_text, passages, write_corpus
from experiments.detection import auroc
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.corpus.row_store import RowStore
from grasp.files import write_atomically
from grasp.methods.registry import MethodRows, configure_methods, score_artifact
from grasp.models.tokenizer import HfTokenizer, train_tokenizer
from grasp.pipeline.pipeline import build_artifact
from grasp.progress import Progress
from grasp.seeds import stream
from grasp.settings import BuildSettings, CorpusSettings, TargetSettings, build_settings
from grasp.targets import Unit, load_units
from grasp.training.recipe import TrainingRecipe, named_recipe
from grasp.training.train import train
from grasp.vision.detect import relevance_array, standardised_blocks

K, GRAM, RESAMPLES = 100, 13, 1000
KERNELS = {"token": "output_layer", "input": "embedding", "pooled": "pooled"}  # by the names in recorded results
ANSWER, WHOLE = "sciq", "sciq_text"  # the loss on the answer; on every token of the unit


def make(
    pool: Path, work: Path, recipe: TrainingRecipe, planted: int, clean: int, *, whole: bool = False
) -> tuple[ArtifactReader, list[Passage], list[Unit]]:
    """Corpus, model and artifact, each unless it is there; the passages, and the units that are looked for."""
    work.mkdir(parents=True, exist_ok=True)
    all_units = load_units(TargetSettings(names=("sciq",), units_per_target=None)).units
    rows, units = passages(pool, all_units, planted, clean, whole=whole)
    corpus, unit_file = work / "corpus.parquet", work / "units.jsonl"
    if not corpus.exists():
        write_corpus(corpus, rows)
        write_atomically(unit_file, "".join(_line(task, unit) for task in (ANSWER, WHOLE) for unit in units).encode())
    settings = settings_of(corpus, unit_file, work / "model", recipe.shape.context)
    if not (work / "model" / "training.json").exists():  # written last
        _train(recipe, settings.corpus, [row.text for row in rows], work)
    return ArtifactReader.open(build_artifact(settings, work / "artifact")), rows, units


def settings_of(corpus: Path, units: Path, model: Path, context: int) -> BuildSettings:
    """What `grasp build` is given: rows of the model's context, one a passage."""
    return build_settings(
        {
            "model": {"path": str(model), "threads": 1},
            "corpus": {"path": str(corpus), "max_length": context, "max_rows_per_document": 1},
            "targets": {"names": [str(units)], "units_per_target": None, "max_length": context},
            "train": "new",
            "features": {"kernels": [*KERNELS.values(), "hidden_sketch", "residual_sketch"]},
        }
    )


def _line(task: str, unit: Unit) -> str:
    line = {"task": task, "prompt": unit.prompt, "completion": unit.completion, "unit_id": f"{task}:{unit.unit_id}"}
    return json.dumps(line | {"loss_on": "all" if task == WHOLE else "completion"}) + "\n"


def _train(recipe: TrainingRecipe, corpus: CorpusSettings, texts: Sequence[str], work: Path) -> None:
    if not (work / "tokenizer").exists():
        part = work / "tokenizer.part"
        train_tokenizer(texts, vocab_size=recipe.shape.vocab_size).save_pretrained(part)
        part.replace(work / "tokenizer")
    tokenizer = HfTokenizer(AutoTokenizer.from_pretrained(work / "tokenizer"), vocab_size=recipe.shape.vocab_size)
    rows = RowStore.write(work / "rows", corpus, tokenizer, shard_rows=4096)
    train(recipe, rows, seed=0, tokenizer=tokenizer, out=work / "model", checkpoints=(recipe.steps // 2,))


def gram_overlap(texts: Sequence[str], units: Sequence[Unit], *, whole: bool = False) -> F64:
    """Largest share of a unit's 13-grams that a text holds, (N,); a shorter unit is one gram of all its words."""
    words = [folded(own_text(unit, whole=whole)) for unit in units]
    unit_grams = [(n := min(GRAM, len(word)), grams(word, n)) for word in words]
    out = np.zeros(len(texts))
    for i, text in enumerate(texts):
        plain = folded(text)
        held = {n: grams(plain, n) for n in {n for n, _ in unit_grams}}
        out[i] = max(len(grams_of_unit & held[n]) / len(grams_of_unit) for n, grams_of_unit in unit_grams)
    return out


def unit_scores(rows: ArtifactReader | MethodRows, array: str, target: str) -> tuple[F64, F64]:
    """Mean and largest of a row's standardised scores for the units of a target, (N,) each."""
    mean_N, largest_N = np.empty(rows.n_rows), np.empty(rows.n_rows)
    for start, score_NE in standardised_blocks(rows, array, target, Progress()):
        block = slice(start, start + len(score_NE))
        mean_N[block], largest_N[block] = score_NE.mean(axis=1), score_NE.max(axis=1)
    return mean_N, largest_N


def scores(
    artifact: ArtifactReader, units: Sequence[Unit], texts: Sequence[str], *, whole: bool = False
) -> dict[str, F64]:
    """Every method's score of every row: the largest over the units, each standardised over the rows."""
    out = {
        f"GRASP ({name}, loss on {what})": unit_scores(artifact, relevance_array(artifact, kernel), target)[1]
        for target, what in ((ANSWER, "answer"), (WHOLE, "all"))
        for name, kernel in KERNELS.items()
    }
    (bm25_settings,) = configure_methods(["bm25"])
    bm25 = score_artifact(artifact, bm25_settings)
    blocks = bm25.array_blocks(bm25.array_names[0], columns=bm25.unit_columns(ANSWER))
    out["BM25"] = unit_scores(bm25, bm25.array_names[0], ANSWER)[1]
    out["BM25 (as it is)"] = np.concatenate([block.max(axis=1) for _, block in blocks])
    out["13-gram overlap"] = gram_overlap(texts, units, whole=whole)
    return out


def recall(score_N: F64, kind_N: NDArray[np.str_], kind: str) -> dict[str, Any]:
    """Of one kind among the clean rows: share that the first 100 hold, with an interval by bootstrap over its rows."""
    of_kind = (kind_N == kind) | (kind_N == CLEAN)
    is_planted_N, score_N = kind_N[of_kind] == kind, score_N[of_kind]
    # ties are broken by a draw: most rows share no 13-gram with any unit
    tie_N = stream(0, "contamination", "ties", kind).random(len(score_N))
    first = np.lexsort((tie_N, -score_N))[:K]
    hit = np.isin(np.flatnonzero(is_planted_N), first)
    draws = stream(0, "contamination", "bootstrap", kind).integers(len(hit), size=(RESAMPLES, len(hit)))
    low, high = np.percentile(hit[draws].mean(axis=1), [2.5, 97.5])
    result = {"recall": float(hit.mean()), "low": float(low), "high": float(high), "rows": len(hit)}
    return result | {"auroc": auroc(score_N, is_planted_N)}


def table(score_by_method: Mapping[str, F64], kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Recall of every method and kind."""
    kind_N = np.array(kinds)
    names = [kind for kind in dict.fromkeys(sorted(kinds)) if kind != CLEAN]
    return {
        method: {kind: recall(score_N, kind_N, kind) for kind in names} for method, score_N in score_by_method.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", type=Path, required=True, help="Parquet of doc_id, text, eval_overlap.")
    parser.add_argument("--work", type=Path, default=Path(__file__).with_name("work"))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    parser.add_argument("--planted", type=int, default=60, help="Units planted in each way.")
    parser.add_argument("--clean", type=int, default=4000, help="Passages without any.")
    parser.add_argument("--whole", action="store_true", help="Plant the passage of a question as well.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, recipe = time.process_time(), named_recipe("tiny")
    artifact, rows, units = make(args.pool, args.work, recipe, args.planted, args.clean, whole=args.whole)
    kinds = pq.read_table(artifact.rows_path)["kind"].to_pylist()
    results = table(scores(artifact, units, [row.text for row in rows], whole=args.whole), kinds)
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    result = {"rows": counts, "units": len(units), "cpu_seconds": round(time.process_time() - began), "table": results}
    write_atomically(args.out, (json.dumps(result, indent=1) + "\n").encode())
    for method, kinds_found in results.items():
        print(method, {kind: round(result["recall"], 3) for kind, result in kinds_found.items()})


if __name__ == "__main__":
    main()
