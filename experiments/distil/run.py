"""Rows chosen by a distilled scorer, tested by training beside relevance, BM25, a classifier and random choice.

    python -m experiments.distil.run --artifact bench-out/cc-completion --corpus cc_weborganizer.parquet \
        --work bench-out/distil/cc --out experiments/distil/cc.json

Models, held-out documents and scored units are those of `experiments/curation`. Killed, it goes on where it was.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression
from transformers.utils import logging as hf_logging

from experiments.curation.choices import ADDITIVE, BM25, RANDOM, Chooser, SelectionRequest, best_rows
from experiments.curation.setting import Settings, World
from experiments.curation.table import Reading, as_text, lines
from experiments.one_line_errors import in_one_line
from grasp.distil.distil import distil
from grasp.distil.scorer import Scorer
from grasp.files import write_atomically
from grasp.retraining.worker import retrain
from grasp.runs.retrained import RetrainedRuns
from grasp.seeds import stream

DISTILLED, CLASSIFIER = "distilled", "classifier"
TRAIN_SHARES = {DISTILLED: 0.1, "distilled from half": 0.5}  # share of the rows that a scorer learns from
METHODS = (ADDITIVE, *TRAIN_SHARES, BM25, CLASSIFIER, RANDOM)
SHARE = 0.2
NEGATIVES = 10  # random rows a unit


class TextChooser(Chooser):
    """Chooses by text as well: by a scorer learned from some of the rows, and by a classifier of target text."""

    def _chosen(self, request: SelectionRequest) -> tuple[NDArray[np.int64], dict[str, Any]]:
        if request.method not in (*TRAIN_SHARES, CLASSIFIER):
            return super()._chosen(request)
        texts = self.world.material.texts(0, self.world.artifact.n_rows)
        score_N, about = (self._distilled if request.method in TRAIN_SHARES else self._classified)(request, texts)
        return best_rows(score_N, self.world.pool_N, self.world.budget(request.share)), about

    def _distilled(self, request: SelectionRequest, texts: list[str]) -> tuple[NDArray[np.float64], dict[str, Any]]:
        place = self.world.work / f"scorer-{request.targets}-{TRAIN_SHARES[request.method]}"
        if not place.exists():
            rows = round(TRAIN_SHARES[request.method] * self.world.artifact.n_rows)
            distil(self.world.artifact, request.targets, place, rows=rows)
        scorer = Scorer.open(place)
        score_N, _ = scorer.score(texts)
        return score_N.astype(np.float64), {"rows": scorer.card.rows, "quality": scorer.card.quality.model_dump()}

    def _classified(self, request: SelectionRequest, texts: list[str]) -> tuple[NDArray[np.float64], dict[str, Any]]:
        """Words and pairs of words of the target's units against those of random rows, by logistic regression."""
        trusted = (unit for unit in self.world.material.units.units if unit.target == request.targets)
        units = [unit.prompt + unit.completion for unit in trusted]
        drawn = stream(0, "distil", "negatives").permutation(np.flatnonzero(self.world.pool_N))
        others = [texts[i] for i in drawn[: NEGATIVES * len(units)]]
        vectors = HashingVectorizer(ngram_range=(1, 2), token_pattern=r"\w+", n_features=1 << 18)
        is_unit = np.repeat([1, 0], [len(units), len(others)])
        model = LogisticRegression(C=10.0, class_weight="balanced", max_iter=1000)
        model.fit(vectors.transform(units + others), is_unit)
        return model.decision_function(vectors.transform(texts)), {"units": len(units), "random rows": len(others)}

    def _digest(self, request: SelectionRequest) -> str:
        return "" if request.method in (*TRAIN_SHARES, CLASSIFIER) else super()._digest(request)


def gains(table: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What every method gains over random choice, and as a share of what relevance gains; by target and measure."""
    summaries: dict[str, dict[str, float]] = {}
    for line in table:
        summary = summaries.setdefault(f"{line['targets']}, {line['method']}", {})
        for measure in ("selected_loss", "fresh_loss"):
            if f"{measure}_minus_random" in line:
                summary[measure] = -line[f"{measure}_minus_random"]["mean"]
    for line in table:
        summary, whole = (summaries[f"{line['targets']}, {method}"] for method in (line["method"], ADDITIVE))
        summary |= {
            f"{measure}_of_relevance": summary[measure] / whole[measure] for measure in whole if measure in summary
        }
    return {name: summary for name, summary in summaries.items() if summary}


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Choose, train, write the table; what is there already costs nothing."""
    parser = argparse.ArgumentParser(prog="python -m experiments.distil.run", description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, required=True, help="Artifact with multiple-choice targets.")
    parser.add_argument("--corpus", help="Where the corpus lies now; none: where the artifact was built from.")
    parser.add_argument("--work", type=Path, required=True, help="Where selections and models are kept.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write; a Markdown table goes beside it.")
    parser.add_argument("--targets", nargs="+", default=["sciq"], help="Chosen for, one after the other.")
    parser.add_argument("--seeds", type=int, default=3, help="Training seeds of every selection.")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    settings = Settings(args.artifact, args.corpus, first_target=args.targets[0], seeds=tuple(range(args.seeds)))
    world = World(settings, args.work)
    chosen = []
    for target in args.targets:
        wanted = [SelectionRequest(method, "all" if method == RANDOM else target, SHARE) for method in METHODS]
        chosen += TextChooser(world).select_all(wanted)
        retrain(world.retraining(args.work / "subsets.parquet"), args.work / "llama")
        table = lines(Reading(world, RetrainedRuns.open(args.work / "llama")), chosen)
        result = {"rows": world.artifact.n_rows, "gains": gains(table), "trained": table}
        write_atomically(args.out, (json.dumps(result, indent=1) + "\n").encode())
        write_atomically(args.out.with_suffix(".md"), as_text(table).encode())


if __name__ == "__main__":
    main()
