"""Related-domain retrieval on WebOrganizer's labels: pages that are kept apart ask for pages of their topic and format.

    python -m experiments.weborganizer.related --corpus cc_weborganizer.parquet --work bench-out/weborganizer \
        --out experiments/weborganizer/related.json

Killed at any moment, the same command goes on where it was.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoTokenizer
from transformers.utils import logging as hf_logging

from experiments.curation.setting import held_out_documents
from experiments.one_line_errors import in_one_line
from experiments.weborganizer.retrieval import Recall, retrieve
from grasp.artifact.reader import ArtifactReader
from grasp.corpus import RowStore
from grasp.errors import SettingsError
from grasp.files import temporary_path, write_atomically
from grasp.models.tokenizer import HfTokenizer, train_tokenizer
from grasp.pipeline.pipeline import build_artifact
from grasp.runs.metrics import Estimate
from grasp.settings import CorpusSettings, build_settings
from grasp.training.recipe import named_recipe
from grasp.training.train import train

LABELS = ("topic", "format")
TASK = "pages"
RECIPE = "tiny"
PROMPT, COMPLETION = 63, 64  # tokens of a query that are context, and that carry loss
SCORES = "bm25,grasp,input,random,overlap,grasp+bm25,grasp+overlap,grasp+input,grasp+input+bm25"


class Pages:
    """The corpus in two: the pool that is ranked, and pages that ask."""

    def __init__(self, corpus: Path, work: Path, *, held_out: int, queries: int, model: Path | None) -> None:
        self.corpus, self.work = corpus, work
        self.n_held_out, self.n_queries = held_out, queries
        self._model = model
        work.mkdir(parents=True, exist_ok=True)
        missing = {"doc_id", "text", *LABELS} - set(pq.read_schema(corpus).names)
        if missing:
            raise SettingsError(f"--corpus: {corpus}: lacks {sorted(missing)}")
        if queries > held_out:
            raise SettingsError(f"--queries: got {queries}, expected at most the {held_out} pages of --held-out")

    def pool(self) -> Path:
        """All pages but those kept apart."""
        path = self.work / "pool.parquet"
        if not path.exists():
            table = pq.read_table(self.corpus)
            training_rows = np.setdiff1d(np.arange(table.num_rows), held_out_documents(table.num_rows, self.n_held_out))
            part = temporary_path(path)
            pq.write_table(table.take(pa.array(training_rows)), part)
            part.replace(path)
        return path

    def settings(self) -> CorpusSettings:
        """Rows are the beginnings of pages."""
        context = named_recipe(RECIPE).shape.context
        return CorpusSettings(path=str(self.pool()), max_length=context, max_rows_per_document=1)

    def model(self) -> Path:
        """The reference model: the one that is given, or one trained on the pool."""
        if self._model is not None:
            return self._model
        out, recipe = self.work / "model", named_recipe(RECIPE)
        texts = pq.read_table(self.pool(), columns=["text"]).column("text").to_pylist()
        tokenizer = HfTokenizer(
            train_tokenizer(texts, vocab_size=recipe.shape.vocab_size), vocab_size=recipe.shape.vocab_size
        )
        store = RowStore.write(self.work / "tokens", self.settings(), tokenizer, shard_rows=4096)
        train(recipe, store, seed=0, tokenizer=tokenizer, out=out)
        return out

    def queries(self) -> Path:
        """Pages that ask, with their labels, as a target."""
        path = self.work / "queries.jsonl"
        if not path.exists():
            lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self._query_lines())
            write_atomically(path, lines.encode())
        return path

    def _query_lines(self) -> Iterator[dict[str, str]]:
        table = pq.read_table(self.corpus, columns=["doc_id", "text", *LABELS])
        asking = held_out_documents(table.num_rows, self.n_held_out)[: self.n_queries]
        model = AutoTokenizer.from_pretrained(self.model())
        tokenizer = HfTokenizer(model, vocab_size=len(model))
        for line in table.take(pa.array(asking)).to_pylist():
            (ids,) = tokenizer.encode([line["text"][:4000]])
            prompt, completion = tokenizer.decode([ids[:PROMPT], ids[PROMPT : PROMPT + COMPLETION]])
            if completion.strip():
                labels = {name: line[name] for name in LABELS}
                yield {"task": TASK, "unit_id": line["doc_id"], "prompt": prompt, "completion": completion} | labels

    def artifact(self) -> ArtifactReader:
        """What GRASP builds of the pool for these queries."""
        settings = build_settings(
            {
                "model": {"path": str(self.model()), "threads": 1},
                "corpus": self.settings().model_dump(mode="json"),
                # a cut character is encoded again as several tokens: room for a few of them
                "targets": {"names": [str(self.queries())], "units_per_target": None, "max_length": 128},
                "train": "new",
                "features": {"kernels": ["output_layer", "embedding", "knn"]},
            }
        )
        return ArtifactReader.open(build_artifact(settings, self.work / "artifact"))


def run(pages: Pages, ks: Sequence[int], scores: str, out: Path) -> tuple[Recall, ...]:
    """Rank, measure, write the table."""
    artifact = pages.artifact()
    names = [name.strip() for name in scores.split(",")]
    single, together = (
        retrieve(artifact, pages.queries(), by=LABELS, together=grouped, k=ks, methods=names)
        for grouped in (False, True)
    )
    related = {recall.domains.name: recall.domains for recall in single}.values()
    result = {
        "corpus": pages.corpus.name,
        "rows": artifact.n_rows,
        "queries": {domains.name: len(domains.unit_ids) for domains in related},
        "values": {domains.name: len(set(domains.values)) for domains in related},
        "loss": f"on the {COMPLETION} tokens after the first {PROMPT} of a page",
        "every_page_a_query": [described(recall) for recall in single],
        "pages_of_one_value_together": [described(recall) for recall in together],
    }
    write_atomically(out, (json.dumps(result, indent=1) + "\n").encode())
    text = f"Every page a query\n\n{as_text(single)}\nPages of one value together\n\n{as_text(together)}"
    write_atomically(out.with_suffix(".md"), text.encode())
    return single


def described(recall: Recall) -> dict[str, Any]:
    """One number of the table with its intervals."""
    against = None if recall.against is None else _interval(recall.against)
    named = {"label": recall.domains.name, "k": recall.k, "score": recall.score}
    return named | {"lift": _interval(recall.mean), "against_first": against}


def _interval(estimate: Estimate) -> dict[str, float | None]:
    return {"mean": estimate.value, "low": estimate.low, "high": estimate.high}


def as_text(recalls: Sequence[Recall]) -> str:
    """Return a Markdown table with one row per score and one column per label and k."""
    columns = list(dict.fromkeys((recall.domains.name, recall.k) for recall in recalls))
    cell = {
        (
            recall.score,
            recall.domains.name,
            recall.k,
        ): f"{recall.mean.value:.2f} ({recall.mean.low:.2f} to {recall.mean.high:.2f})"
        for recall in recalls
    }
    lines = ["| score | " + " | ".join(f"{label}, best {k:,}" for label, k in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    lines += [
        f"| {score} | " + " | ".join(cell[score, label, k] for label, k in columns) + " |"
        for score in dict.fromkeys(recall.score for recall in recalls)
    ]
    return "\n".join(lines) + "\n"


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, run, say what went wrong in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.weborganizer.related", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--corpus", type=Path, required=True, help="Parquet with doc_id, text, topic, format.")
    parser.add_argument("--work", type=Path, required=True, help="Where pool, model and artifact are kept.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write; a Markdown table goes beside it.")
    parser.add_argument("--model", type=Path, help="Reference model trained on the pool; none: one is trained.")
    parser.add_argument("--held-out", type=int, default=512, help="Pages kept apart.")
    parser.add_argument("--queries", type=int, default=144, help="Of these, pages that ask.")
    parser.add_argument("--k", type=lambda text: [int(part) for part in text.split(",")], default=[100, 1000])
    parser.add_argument("--scores", default=SCORES, help="grasp, kernels and methods; + fuses.")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    pages = Pages(args.corpus, args.work, held_out=args.held_out, queries=args.queries, model=args.model)
    run(pages, args.k, args.scores, args.out)
    print(args.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
