"""What is trained further on what: corpora, the units that are scored, and the rows of every subset. All is seeded.

    documents      16 sources of the labelled pool, 24 documents each, the first 128 tokens; every token has loss
    instructions   10 groups of instructions, 38 each, in the model's chat template; only the response has loss
    lengths        16 other sources, 24 documents each, their first 16 to 128 tokens; every token has loss
    small          3,000 documents of the pool, of all sources, for a model of 0.36 M parameters
    contrasts      16 groups that differ much: programs in ten languages, sums, trivia, manuals (`contrasts`)
    longer         1,000 other instructions of the same ten groups, their first 64 tokens, for 60 steps

A subset keeps of every source (or group) a fraction drawn from Beta(1/2, 1/2); of what it keeps, 96 rows are trained
on; with `small` 16 a step, with `longer` 8. These are the subset: `subsets.parquet` names no row that a run has not
seen. A run of `longer-60` is looked at after 12 and 24 steps too: what it has seen by then is a subset of `longer-12`
and of `longer-24`, whose runs these are.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.sparse import csr_array
from transformers import PreTrainedTokenizerBase

from experiments.worlds.training import LONG, LORA, REFERENCE, SHORT, Recipe
from grasp.artifact.label_table import LabelColumn
from grasp.corpus import RowStore
from grasp.models.tokenizer import HfTokenizer
from grasp.predict.families import parse_family
from grasp.predict.weights import SubsetBlock, Weights
from grasp.runs.training_runs import Role
from grasp.seeds import stream
from grasp.settings import CorpusSettings, TargetSettings
from grasp.targets import load_units

Name = Literal[
    "documents",
    "instructions",
    "lengths",
    "small-12",
    "small-48",
    "small-192",
    "small-48-slow",
    "contrasts",
    "documents-lora",
    "longer-12",
    "longer-24",
    "longer-60",
]
TASKS = ("sciq", "arc_easy", "hellaswag")
UNITS_OF_TARGET = 32
SUBSET_ROWS = 96
Rows = Literal["documents", "instructions", "lengths", "small", "contrasts", "longer"]


@dataclass(frozen=True)
class Kind:
    """What an environment is for, and how its runs are made."""

    role: Role
    label: str  # that its subsets are drawn by
    rows: Rows  # trained on; environments of the same rows have the same units
    recipe: Recipe = SHORT
    subsets: int = 24
    subset_rows: int = SUBSET_ROWS
    prefix_of: Name | None = None  # the environment whose runs pass through the end of these

    @property
    def nested(self) -> bool:
        """Whether a subset of fewer rows is the beginning of one of more."""
        return self.rows in ("small", "longer")


def _small(name: str, steps: int, learning_rate: float = 5e-4) -> Kind:
    recipe = Recipe(name, REFERENCE, steps, batch_rows=16, learning_rate=learning_rate, bfloat16=False)
    return Kind("dev", "source", "small", recipe, subsets=40, subset_rows=16 * steps)


def _longer(steps: int) -> Kind:
    """The first steps of runs of sixty."""
    recipe = replace(LONG, stop=steps if steps < LONG.steps else 0)
    prefix_of: Name | None = "longer-60" if recipe.stop else None
    return Kind(
        "dev", "group", "longer", recipe, subsets=12, subset_rows=recipe.batch_rows * steps, prefix_of=prefix_of
    )


ENVIRONMENTS: dict[Name, Kind] = {  # in the order in which they take their units
    "documents": Kind("dev", "source", "documents"),
    "instructions": Kind("held-out", "group", "instructions"),
    "lengths": Kind("dev", "source", "lengths"),
    "small-12": _small("small-12", 12),
    "small-48": _small("small-48", 48),
    "small-192": _small("small-192", 192),
    "small-48-slow": _small("small-48-slow", 48, 1e-4),
    "contrasts": Kind("dev", "group", "contrasts"),
    "documents-lora": Kind("dev", "source", "documents", LORA, subsets=12),
    "longer-12": _longer(12),
    "longer-24": _longer(24),
    "longer-60": _longer(60),
}
NAMES = tuple(ENVIRONMENTS)
BEGUN_FIRST: tuple[Rows, ...] = ("documents", "instructions", "lengths")

LENGTH = 128  # longest row and longest unit, in tokens
SOURCES, ROWS_OF_SOURCE = 16, 24
MIN_DOCUMENTS = 64  # of a source that may be drawn
MIN_WORDS = 110  # of a document that fills a row
SHORTEST, OF_SOURCE = 16, 0.3  # of `lengths`: tokens; how far a source's rows may be longer or shorter than others'
ROWS_OF_GROUP = 38
UNITS_OF_GROUP = 4
SYSTEM = "Answer."
LONGER_ROWS_OF_GROUP, LONGER_MAX_PROMPT, LONGER_LENGTH = 152, 48, 64  # rows; tokens of a question, of a row
LONGER_UNITS, LONGER_UNITS_OF_GROUP = 16, 2  # of a benchmark, and of instructions
MEDQUAD_COLLECTIONS = ("3_GHR_QA", "2_GARD_QA", "4_MPlus_Health_Topics_QA", "6_NINDS_QA")  # the rest is one group
MAX_PROMPT, MIN_RESPONSE = 96, 8  # tokens of an instruction of the pool
SMALL_ROWS, SMALL_TASKS, SMALL_UNITS = 3000, (*TASKS, "openbookqa"), 64


@dataclass(frozen=True)
class Corpus:
    """Rows, the first label of each that carries loss, and the label that subsets are drawn by."""

    store: RowStore
    first_N: NDArray[np.int64]  # position of the first token that is predicted; 1: all that can be
    label: LabelColumn

    @property
    def rows(self) -> list[NDArray[np.int32]]:
        shards = [self.store.shard(k) for k in range(self.store.n_shards)]
        return [shard.ids(i) for shard in shards for i in range(len(shard))]


# ------------------------------------------------------------------------------------------------------- rows


def write_corpora(data: Path, work: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The first three corpora as Parquet, and the held-out instructions as targets, once."""
    if not (work / "documents.parquet").exists():
        usable, sources = _pool(data / "pool.parquet")
        documents, others = (list(_documents(usable, of)) for of in sources)
        write_parquet(work / "lengths.parquet", pa.Table.from_pylist(list(_cut(others, tokenizer))))
        write_parquet(work / "documents.parquet", pa.Table.from_pylist(documents))
    if not (work / "instructions.parquet").exists():
        groups = instructions_of(data / "instructions.parquet", tokenizer)
        for k, name in enumerate(BEGUN_FIRST):
            _write_units(work / f"{name}-units.jsonl", groups, k)
        pool = [row for rows in groups.values() for row in rows[:ROWS_OF_GROUP]]
        write_parquet(work / "instructions.parquet", pa.Table.from_pylist(pool))


def write_small(data: Path, work: Path) -> None:
    """Documents of all sources, as often as the pool has them, that share nothing with a question; once."""
    if not (work / "small.parquet").exists():
        table = pq.read_table(data / "pool.parquet", columns=["doc_id", "text", "source", "eval_overlap"])
        usable = [row for row in table.to_pylist() if not row["eval_overlap"]]
        drawn = sorted(stream(0, "finetune", "small").permutation(len(usable))[:SMALL_ROWS])
        rows = [usable[k] for k in drawn]
        lines = [{"doc_id": r["doc_id"], "text": r["text"][:4000], "source": r["source"], "first": 1} for r in rows]
        write_parquet(work / "small.parquet", pa.Table.from_pylist(lines))


def write_longer(data: Path, work: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Instructions with short questions, and others of them as questions, once; no row or question of others is."""
    if not (work / "longer.parquet").exists():
        pool: list[dict[str, Any]] = []
        units = ""
        for rows in others_of(data, work, tokenizer).values():
            short_rows = [row for row in rows if row["first"] <= LONGER_MAX_PROMPT]
            unit_rows = [row for row in short_rows if row["tokens"] <= LENGTH][:LONGER_UNITS_OF_GROUP]
            units += "".join(unit_line("instructions", row) for row in unit_rows)
            pool += [row for row in short_rows if row not in unit_rows][:LONGER_ROWS_OF_GROUP]
        (work / "longer-units.jsonl").write_text(units, encoding="utf-8")
        write_parquet(work / "longer.parquet", pa.Table.from_pylist(pool))


def others_of(data: Path, work: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[dict[str, Any]]]:
    """Usable instructions by group, but for rows and questions of the first environments; with a short system message,
    which is in every row.
    """
    used = set(pq.read_table(work / "instructions.parquet", columns=["doc_id"])["doc_id"].to_pylist())
    for name in BEGUN_FIRST:
        lines = (work / f"{name}-units.jsonl").read_text(encoding="utf-8").splitlines()
        used |= {json.loads(line)["unit_id"] for line in lines}
    groups = instructions_of(data / "instructions.parquet", tokenizer, system=SYSTEM)
    return {group: [row for row in rows if row["doc_id"] not in used] for group, rows in groups.items()}


def corpus_settings(name: Name, work: Path) -> CorpusSettings:
    path = work / f"{ENVIRONMENTS[name].rows}.parquet"
    longest = LONGER_LENGTH if ENVIRONMENTS[name].rows == "longer" else LENGTH
    return CorpusSettings(path=str(path), text_column="text", max_length=longest, max_rows_per_document=1)


def target_settings(name: Name, work: Path) -> TargetSettings:
    """Benchmarks and questions of the corpus's own kind; the units of one corpus are not those of another."""
    rows = ENVIRONMENTS[name].rows
    unit_file = str(work / f"{rows}-units.jsonl")
    if rows == "contrasts":
        return TargetSettings(names=(unit_file,), max_length=LENGTH)
    settings = TargetSettings(names=TASKS, units_per_target=UNITS_OF_TARGET, max_length=LENGTH)
    earlier = BEGUN_FIRST[: BEGUN_FIRST.index(rows)] if rows in BEGUN_FIRST else BEGUN_FIRST
    for _ in earlier:
        used = settings.exclude_units + tuple(unit.unit_id for unit in load_units(settings).units)
        settings = settings.model_copy(update={"exclude_units": used})
    if rows == "small":
        return settings.model_copy(update={"names": SMALL_TASKS, "units_per_target": SMALL_UNITS})
    if rows == "longer":
        settings = settings.model_copy(update={"units_per_target": LONGER_UNITS})
    return settings.model_copy(update={"names": (*TASKS, unit_file)})


def open_corpus(name: Name, work: Path, tokenizer: HfTokenizer) -> Corpus:
    kind = ENVIRONMENTS[name]
    store = RowStore.write(work / f"{kind.rows}-tokens", corpus_settings(name, work), tokenizer, shard_rows=1024)
    table = pq.read_table(work / f"{kind.rows}.parquet", columns=["doc_id", "first", kind.label])
    stored = [doc_id for k in range(store.n_shards) for doc_id in store.table(k).column("doc_id").to_pylist()]
    assert stored == table.column("doc_id").to_pylist()
    labels = LabelColumn.from_values(table.column(kind.label).to_pylist(), kind.label)
    return Corpus(store, table.column("first").to_numpy(), labels)


# ---------------------------------------------------------------------------------------------------- subsets


def draw_subsets(
    label: LabelColumn, n_subsets: int, subset_rows: int = SUBSET_ROWS, *, nested: bool = False
) -> SubsetBlock:
    """The rows that each run sees, (B, N) zeros and ones.

    Args:
        subset_rows: of a subset; all that it keeps if these are fewer.
        nested: fewer rows are the first of more.
    """
    family = parse_family(f"mixture:{label.name}")
    (subset,) = family.draw(
        n_subsets, n_rows=len(label.codes_N), labels=label, seed=0, purpose="evaluation", block=n_subsets
    )
    weights_BN = np.zeros((n_subsets, len(label.codes_N)))
    for b, row_BN in enumerate(subset.weights_BN.toarray()):
        rows = np.flatnonzero(row_BN)
        size = min(subset_rows, len(rows))
        draw = stream(0, "finetune", "seen", b)
        seen = draw.permutation(rows)[:size] if nested else draw.choice(rows, size=size, replace=False)
        weights_BN[b, seen] = 1.0
    return SubsetBlock(subset.subset_ids, Weights(csr_array(weights_BN)))


def row_order(seed: int, n_rows: int) -> NDArray[np.int64]:
    """One permutation a seed, shared by all subsets: rows that are not in a subset are skipped."""
    return stream(seed, "finetune", "order").permutation(n_rows)


# ----------------------------------------------------------------------------------------------------- inside


def _pool(path: Path) -> tuple[list[dict[str, Any]], tuple[list[str], list[str]]]:
    """Documents that fill a row and share nothing with a question, and the sources of `documents` and of `lengths`."""
    table = pq.read_table(path, columns=["doc_id", "text", "source", "n_words", "eval_overlap"])
    usable = [row for row in table.to_pylist() if row["n_words"] >= MIN_WORDS and not row["eval_overlap"]]
    counts = Counter(row["source"] for row in usable)
    large = sorted(source for source, count in counts.items() if count >= MIN_DOCUMENTS)
    first = sorted(stream(0, "finetune", "sources").choice(large, size=SOURCES, replace=False).tolist())
    others = [source for source in large if source not in first]
    second = sorted(stream(0, "finetune", "other sources").choice(others, size=SOURCES, replace=False).tolist())
    return usable, (first, second)


def _documents(usable: list[dict[str, Any]], sources: list[str]) -> Iterator[dict[str, Any]]:
    for source in sources:
        rows = [row for row in usable if row["source"] == source]
        for k in sorted(stream(0, "finetune", "documents", source).permutation(len(rows))[:ROWS_OF_SOURCE]):
            yield {"doc_id": rows[k]["doc_id"], "text": rows[k]["text"][:4000], "source": source, "first": 1}


def _cut(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """Rows as token ids of drawn lengths: log-uniform, and a source's as a whole somewhat longer or shorter."""
    for row in rows:
        shift = stream(0, "finetune", "length", row["source"]).uniform(-OF_SOURCE, OF_SOURCE)
        drawn = stream(0, "finetune", "length", row["source"], row["doc_id"]).uniform()
        length = round(SHORTEST * (LENGTH / SHORTEST) ** float(np.clip(drawn + shift, 0.0, 1.0)))
        ids = tokenizer(row["text"], add_special_tokens=False)["input_ids"][:length]
        yield row | {"input_ids": ids, "text": tokenizer.decode(ids)}


def chat(
    tokenizer: PreTrainedTokenizerBase, instruction: str, response: str, system: str | None = None
) -> tuple[str, str]:
    """Prompt and completion of an instruction in the model's own template, which has a system message by default."""
    turns = [] if system is None else [{"role": "system", "content": system}]
    turns.append({"role": "user", "content": instruction})
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert isinstance(prompt, str)
    return prompt, f"{response}<|im_end|>"


def chat_row(
    tokenizer: PreTrainedTokenizerBase,
    doc_id: str,
    group: str,
    instruction: str,
    response: str,
    system: str | None = None,
) -> dict[str, Any] | None:
    """A row, which may become a unit; none where a token spans prompt and response."""
    prompt, completion = chat(tokenizer, instruction, response, system)
    before, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, prompt + completion))
    if whole[: len(before)] != before:
        return None
    # as a row of the corpus it gets its end-of-text token, which is <|im_end|> here, from the packer
    line = {"doc_id": doc_id, "text": prompt + response, "group": group, "first": len(before)}
    return line | {"prompt": prompt, "completion": completion, "tokens": len(whole)}


def group_of(row: dict[str, Any]) -> str:
    """Source of an instruction; medical questions by the collection that they come from."""
    if row["source"] != "MedQuAD":
        return str(row["source"])
    collection = row["id"].removeprefix("MedQuAD:").split("/")[0]
    return f"MedQuAD:{collection if collection in MEDQUAD_COLLECTIONS else 'other'}"


def instructions_of(
    path: Path, tokenizer: PreTrainedTokenizerBase, system: str | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Usable instructions by group, in a drawn order; those beyond the pool may become units."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in pq.read_table(path).to_pylist():
        instruction = "\n".join(part for part in (row["instruction"].strip(), row["input"].strip()) if part)
        line = chat_row(tokenizer, row["id"], group_of(row), instruction, row["response"].strip(), system)
        if line is not None and line["first"] <= MAX_PROMPT and line["tokens"] - line["first"] >= MIN_RESPONSE:
            groups.setdefault(line["group"], []).append(line)
    return {
        group: [rows[k] for k in stream(0, "finetune", "instructions", group).permutation(len(rows))]
        for group, rows in sorted(groups.items())
    }


def _write_units(path: Path, groups: dict[str, list[dict[str, Any]]], k: int) -> None:
    """The k-th handful of every group's instructions beyond the pool that are no longer than a row."""
    lines = []
    for rows in groups.values():
        short = [row for row in rows[ROWS_OF_GROUP:] if row["tokens"] <= LENGTH]
        lines += [unit_line("instructions", row) for row in short[k * UNITS_OF_GROUP : (k + 1) * UNITS_OF_GROUP]]
    path.write_text("".join(lines), encoding="utf-8")


def unit_line(task: str, row: dict[str, Any]) -> str:
    """A row as a question of a target's file."""
    unit = {"task": task, "unit_id": row["doc_id"]}
    return json.dumps(unit | {"prompt": row["prompt"], "completion": row["completion"]}) + "\n"


def write_parquet(path: Path, table: pa.Table) -> None:
    """It appears when it is whole."""
    part = path.with_suffix(".part")
    pq.write_table(table, part)
    part.replace(path)
