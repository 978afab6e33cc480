"""Passages of a pool with a benchmark's own text in some of them: as it is, in another word order, with gaps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grasp.seeds import stream
from grasp.targets import Unit

NATURAL, CLEAN = "natural", "clean"
WORDS = 64  # of a passage
SHARED = 8  # words in a row that make a natural overlap, as the pool counts them
MASKED, MASK = 0.3, "_"
WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Passage:
    """One row of the corpus."""

    row_id: str
    text: str
    kind: str  # clean, natural, or how a unit's text was changed


def folded(text: str) -> list[str]:
    """Words in lower case, without punctuation."""
    return WORD.findall(text.lower())


def grams(words: Sequence[str], n: int) -> set[tuple[str, ...]]:
    """All runs of n words."""
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def own_text(unit: Unit, *, whole: bool = False) -> str:
    """Question and answer without the words of the prompt's template; the passage before them where `whole`."""
    question_text = unit.prompt.rsplit("\nAnswer:", 1)[0]
    passage, _, question = question_text.rpartition("Question:")
    return " ".join([passage.strip() if whole else "", question.strip(), unit.completion.strip()]).strip()


def verbatim(words: Sequence[str], unit_id: str) -> list[str]:
    del unit_id
    return list(words)


def shuffled(words: Sequence[str], unit_id: str) -> list[str]:
    order = stream(0, "contamination", "shuffle", unit_id).permutation(len(words))
    return [words[i] for i in order]


def masked(words: Sequence[str], unit_id: str) -> list[str]:
    draw = stream(0, "contamination", "mask", unit_id)
    gaps = set(draw.choice(len(words), size=round(MASKED * len(words)), replace=False).tolist())
    return [MASK if i in gaps else word for i, word in enumerate(words)]


CHANGES = {"verbatim": verbatim, "shuffled": shuffled, "masked": masked}


def passages(
    pool: Path, units: Sequence[Unit], planted: int, clean: int, *, whole: bool = False
) -> tuple[list[Passage], list[Unit]]:
    """Passages of equal length, planted and natural ones among them, and the units to look for.

    Natural ones are windows round a run of 8 words that a document of the pool shares with a question; the documents
    are those that the pool itself marks. Planted ones hold a unit's question and answer at a place drawn inside a
    passage of a document without any overlap. No unit is planted twice or both planted and natural.

    Args:
        planted: units of each way of planting.
        whole: plant the passage that comes with a question as well; what is longer than a passage fills it.
        clean: passages without anything.
    Returns:
        Passages in an order that tells nothing, and the units: those found naturally, then those planted.
    """
    documents = pq.read_table(pool, columns=["doc_id", "text", "eval_overlap"]).to_pylist()
    natural, contaminated = _natural([document for document in documents if _marked(document)], units)
    rest = [unit for unit in units if unit.unit_id not in contaminated]
    order = stream(0, "contamination", "units").permutation(len(rest))
    hidden = [rest[i] for i in order[: planted * len(CHANGES)]]
    free = [document for document in documents if not document["eval_overlap"]]
    hosts = iter(free[i] for i in stream(0, "contamination", "hosts").permutation(len(free)))
    out = list(natural)
    for place, change in enumerate(CHANGES):
        out += [_host(next(hosts), change, unit, whole) for unit in hidden[place * planted : (place + 1) * planted]]
    out += [Passage(host["doc_id"], " ".join(_window(host)), CLEAN) for host in islice(hosts, clean)]
    mixed = stream(0, "contamination", "order").permutation(len(out))
    return [out[i] for i in mixed], [unit for unit in units if unit.unit_id in contaminated] + hidden


def _marked(document: dict[str, object]) -> bool:
    return "sciq" in str(document["eval_overlap"])


def _natural(documents: Sequence[dict[str, str]], units: Sequence[Unit]) -> tuple[list[Passage], set[str]]:
    unit_of_gram = {gram: unit.unit_id for unit in units for gram in grams(folded(own_text(unit)), SHARED)}
    out, matched = [], set()
    for document in documents:
        words = document["text"].split()
        # a word with a hyphen is two: of each, the word of the document that it stands in
        plain = [(part, place) for place, word in enumerate(words) for part in folded(word)]
        for i in range(len(plain) - SHARED + 1):
            unit_id = unit_of_gram.get(tuple(part for part, _ in plain[i : i + SHARED]))
            if unit_id is not None:
                start = max(0, min(plain[i][1] - (WORDS - SHARED) // 2, len(words) - WORDS))
                out.append(Passage(document["doc_id"], " ".join(words[start : start + WORDS]), NATURAL))
                matched.add(unit_id)
                break
    return out, matched


def _window(document: dict[str, str]) -> list[str]:
    words = document["text"].split()
    last = max(0, len(words) - WORDS)
    start = int(stream(0, "contamination", "window", document["doc_id"]).integers(last + 1))
    return words[start : start + WORDS]


def _host(document: dict[str, str], change: str, unit: Unit, whole: bool) -> Passage:
    text = CHANGES[change](own_text(unit, whole=whole).split(), unit.unit_id)[:WORDS]
    around = _window(document)[: max(0, WORDS - len(text))]
    place = int(stream(0, "contamination", "place", unit.unit_id).integers(len(around) + 1))
    return Passage(document["doc_id"], " ".join([*around[:place], *text, *around[place:]]), change)


def write_corpus(path: Path, rows: Sequence[Passage]) -> None:
    """The corpus, with a column for each kind and one for all of them."""
    table = {
        "row_id": [row.row_id for row in rows],
        "text": [row.text for row in rows],
        "kind": [row.kind for row in rows],
        "leaked": [row.kind != CLEAN for row in rows],
    }
    part = path.with_suffix(".part")
    pq.write_table(pa.table(table), part)
    part.replace(path)
