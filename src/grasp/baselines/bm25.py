"""BM25: rows are documents, units are queries; the words that both share, weighed by how rare they are.

Shape letters: N rows, E units, T top rows of a unit, W words of a row that occur in any query.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal
from unicodedata import category, normalize

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from grasp.arrays import I32, I64
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.errors import TargetError
from grasp.extras import require
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.settings import Settings
from grasp.targets.units import Unit

# Two characters and more, in any alphabet, with the vowel signs and accents that \w leaves out. Where words are written
# without spaces between them (Han, kana, Thai, Lao, Khmer, Burmese) every pair of neighbouring characters is one.
MARKS = "".join(map(re.escape, filter(lambda c: category(c).startswith("M"), map(chr, range(0x300, 0x10000)))))
WORD = re.compile(f"[\\w{MARKS}]{{2,}}")
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")
STOP_WORDS = frozenset(
    WORD.findall(
        "about above after again against all also am an and any are aren as at be because been before being below "
        "between both but by can could couldn did didn do does doesn doing don done down during each either else "
        "ever few for from further had hadn has hasn have haven having he her here hers herself him himself his if "
        "in into is isn it its itself just let ll may me might more most much must my myself neither no nor not "
        "now of off on once one only or other our ours ourselves out over own per re same shall she should shouldn "
        "since so some such than that the their theirs them themselves then there these they this those through to "
        "too under until up upon us ve very was wasn we were weren whether while will with within without won "
        "would wouldn yes yet you your yours yourself yourselves"
    )
)
# They ask, or name the parts of a prompt: `Question: ... Answer:` is in nearly every unit and says nothing of it.
QUESTION_WORDS = frozenset(
    WORD.findall("what which who whom whose when where why how question questions answer answers")
)
TOP = np.dtype([("row", "<i4"), ("score", "<f4")])
FILLER = 0  # stands for every word of a row that no query has: it counts in the row's length, and nowhere else


class Bm25Settings(Settings):
    """BM25 as the paper has it."""

    k1: float = Field(1.2, ge=0, description="Saturation of a word's frequency in a row. Paper: 1.2.")
    b: float = Field(0.75, ge=0, le=1, description="How much longer rows count for less. Paper: 0.75.")
    top: int = Field(50_000, ge=1, description="Rows kept a unit; all others score 0. Paper: 50,000.")
    query: Literal["both", "prompt", "completion"] = Field(
        "both", description="Text of a unit that is searched for: prompt and completion, or one of them."
    )
    variant: Literal["lucene", "robertson", "atire"] = Field(
        "lucene",
        description="Weight of a word found in n of N rows, as bm25s names it. lucene: ln(1 + (N - n + 0.5) / "
        "(n + 0.5)); robertson: ln((N - n + 0.5) / (n + 0.5)), at least 0; atire: ln(N / n). The paper does not say.",
    )


class Bm25(BlockMethod[Bm25Settings]):
    """Words that row and unit share, weighed by rarity.

    Okapi BM25 of every row for every unit's text, by bm25s.

    Source: Robertson et al. 1994, in the variants of Kamphuis et al. 2020; settings of the paper's appendix.
    Deviation: rows are decoded from their tokens, so a word that the end of a row cuts counts as what is left of it;
    the list of stop words is ours, the paper has none. Words that no unit has are not indexed. Memory: the index, some
    30 bytes a row and word of a query in it.
    """

    settings_type = Bm25Settings
    version = 2  # words of every alphabet
    looks_at = frozenset({"tokens"})
    needs_modules: ClassVar[Mapping[str, str]] = {"bm25s": "baselines"}
    dtype = "float16"

    def prepare(self, material: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        del part
        queries = [words(query_text(unit, self.settings.query)) for unit in material.units.units]
        _refuse_empty(queries, material.units.units, self.settings.query)
        vocabulary = {word: i for i, word in enumerate(sorted({w for query in queries for w in query}), FILLER + 1)}
        rows = _WordsOfRows.from_rows(material, work, vocabulary)
        top_ET = work.kept("top", lambda: self._search(rows, vocabulary, queries))
        counts = {
            "units without a word to search for: 0 for every row": sum(not query for query in queries),
            "rows without a word: 0 for every unit": rows.n_empty,
        }
        return _Top(top_ET, self._account(counts))

    def _search(
        self, rows: "_WordsOfRows", vocabulary: dict[str, int], queries: Sequence[list[str]]
    ) -> NDArray[np.void]:
        """The best rows of each unit, in corpus order, (E, T) of row and score."""
        bm25s = require("bm25s", extra="baselines", feature="bm25")
        index = bm25s.BM25(k1=self.settings.k1, b=self.settings.b, method=self.settings.variant)
        index.index(_Indexed(rows, {"": FILLER} | vocabulary), show_progress=False)
        kept = min(self.settings.top, len(rows))
        top_ET = np.empty((len(queries), kept), dtype=TOP)
        for e, query in enumerate(queries):
            score_N = np.zeros(len(rows), dtype=np.float32)
            if query:
                score_N = index.get_scores([vocabulary[word] for word in query])
            top_ET["row"][e] = top_rows(score_N, kept)
            top_ET["score"][e] = score_N[top_ET["row"][e]]
        return top_ET

    def _account(self, counts: dict[str, int]) -> Account:
        query = {"both": "prompts and completions", "prompt": "prompts", "completion": "completions"}
        return Account(
            covers=("text of the rows, decoded from their tokens", f"units' {query[self.settings.query]}"),
            notes=(f"idf and saturation of bm25s' {self.settings.variant}",),
            counts={reason: n for reason, n in counts.items() if n},
        )


def words(text: str) -> list[str]:
    """Words of a text as rows and queries are cut: lower case, two characters and more, no stop or question words.

    Letters are composed first (NFC), so that both ways to write an accent are one word.
    """
    found: list[str] = []
    for run in WORD.findall(normalize("NFC", text.lower())):
        found += [run] if run.isascii() else _cut(run)
    return [word for word in found if word not in STOP_WORDS and word not in QUESTION_WORDS]


def _cut(run: str) -> list[str]:
    """Letters of several alphabets: pairs where there are no spaces, whole words elsewhere."""
    pairs = [part[i : i + 2] for part in UNSPACED.findall(run) for i in range(max(1, len(part) - 1))]
    return pairs + WORD.findall(UNSPACED.sub(" ", run))


def query_text(unit: Unit, which: Literal["both", "prompt", "completion"]) -> str:
    """What of a unit is searched for."""
    return {"both": unit.prompt + unit.completion, "prompt": unit.prompt, "completion": unit.completion}[which]


def top_rows(score_N: NDArray[np.floating[Any]], kept: int) -> I64:
    """The `kept` rows of highest score, in corpus order; of equal ones the first."""
    if kept == len(score_N):
        return np.arange(kept)
    last = np.partition(score_N, len(score_N) - kept)[len(score_N) - kept]
    above = np.flatnonzero(score_N > last)
    ties = np.flatnonzero(score_N == last)[: kept - len(above)]
    return np.sort(np.concatenate([above, ties]))


@dataclass(frozen=True, slots=True)
class _WordsOfRows:
    """The words of every row as numbers, read from disk block by block each time they are gone through."""

    n_rows: int
    starts: tuple[int, ...]
    work: WorkArea
    n_empty: int

    @classmethod
    def from_rows(cls, material: MethodInputs, work: WorkArea, vocabulary: dict[str, int]) -> "_WordsOfRows":
        """Cut every row into words, a block at a time; blocks that are there already are kept."""
        starts, n_empty = [], 0
        material.progress.stage("words of rows", rows=material.n_rows, tokens=None)
        for start, stop in material.blocks():
            flat = work.kept(f"words-{start}", partial(_packed, material, start, stop, vocabulary))
            n_empty += sum(1 for n_words, _ in _unpacked(flat) if not n_words)
            starts.append(start)
            material.progress.advance(stop - start, 0)
        return cls(material.n_rows, tuple(starts), work, n_empty)

    def __len__(self) -> int:
        return self.n_rows

    def __iter__(self) -> Iterator[list[int]]:
        for start in self.starts:
            for n_words, known in _unpacked(self.work.loaded(f"words-{start}")):
                yield known + [FILLER] * (n_words - len(known))


@dataclass(frozen=True, slots=True)
class _Indexed:
    """Rows and vocabulary under the names that bm25s asks for."""

    ids: _WordsOfRows
    vocab: dict[str, int]


def _packed(material: MethodInputs, start: int, stop: int, vocabulary: dict[str, int]) -> I32:
    """Row after row: the number of its words, how many of them a query has, and which those are."""
    flat: list[int] = []
    for row in map(words, material.texts(start, stop)):
        known = [vocabulary[word] for word in row if word in vocabulary]
        flat += [len(row), len(known), *known]
    return np.array(flat, dtype=np.int32)


def _unpacked(flat: I32) -> Iterator[tuple[int, list[int]]]:
    """The number of words of each row, and those that a query has."""
    numbers = flat.tolist()
    at = 0
    while at < len(numbers):
        n_words, n_known = numbers[at : at + 2]
        yield n_words, numbers[at + 2 : at + 2 + n_known]
        at += 2 + n_known


class _Top(RowScorer):
    """The kept scores of every unit; 0 elsewhere."""

    def __init__(self, top_ET: NDArray[np.void], account: Account) -> None:
        self._top_ET, self._account = top_ET, account

    def score(self, start: int, stop: int) -> Scores:
        out = np.zeros((stop - start, len(self._top_ET)), dtype=np.float32)
        for e, top_T in enumerate(self._top_ET):
            low, high = np.searchsorted(top_T["row"], (start, stop))
            out[top_T["row"][low:high] - start, e] = top_T["score"][low:high]
        return out

    def account(self) -> Account:
        return self._account


def _refuse_empty(queries: Sequence[list[str]], units: Sequence[Unit], which: str) -> None:
    if not any(queries):
        raise TargetError(
            f"bm25: none of the {len(units)} units has a word to search for, e.g. {units[0].unit_id!r} of "
            f"{units[0].target}: expected words of two letters or more that are no stop words; its "
            f"setting query is {which!r}, try 'both'"
        )
