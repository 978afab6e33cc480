"""BM25: rows are documents and units are queries; shared words are weighted by their rarity.

Start with `Bm25`; `words` is the tokenizer.

Shape letters: N rows, E units, T top rows of a unit, W words of a row that occur in any query.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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

# Words have two or more characters of any alphabet, with the vowel signs and accents that \w does not match. In scripts
# without spaces between words (Han, kana, Thai, Lao, Khmer, Burmese) every pair of adjacent characters is a word.
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
# Question words and parts of a prompt template: `Question: ... Answer:` occurs in nearly every unit.
QUESTION_WORDS = frozenset(
    WORD.findall("what which who whom whose when where why how question questions answer answers")
)
ROW_SCORE = np.dtype([("row", "<i4"), ("score", "<f4")])  # one of the top rows of a unit
# what a method covers, by its setting `query`
QUERY_NOTES = {"both": "units' prompts and completions", "prompt": "units' prompts", "completion": "units' completions"}
FILLER = 0  # id of every word that occurs in no query: it counts towards the row's length only


class Bm25Settings(Settings):
    """BM25 as in the GRASP paper."""

    k1: float = Field(1.2, ge=0, description="Saturation of the term frequency. Paper: 1.2.")
    b: float = Field(0.75, ge=0, le=1, description="Strength of length normalisation, 0 to 1. Paper: 0.75.")
    top: int = Field(50_000, ge=1, description="Rows stored per unit; all others score 0. Paper: 50,000.")
    query: Literal["both", "prompt", "completion"] = Field(
        "both", description="Text of a unit used as the query: prompt and completion, or one of them."
    )
    variant: Literal["lucene", "robertson", "atire"] = Field(
        "lucene",
        description="Weight of a word that occurs in n of N rows, named as in bm25s. lucene: ln(1 + (N - n + 0.5) / "
        "(n + 0.5)); robertson: ln((N - n + 0.5) / (n + 0.5)), at least 0; atire: ln(N / n). Paper: not specified.",
    )


class Bm25(BlockMethod[Bm25Settings]):
    """Words that row and unit share, weighted by rarity.

    Okapi BM25 of each row for each unit's text, computed by bm25s.

    Source: Robertson et al. 1994 (Okapi at TREC-3), in the variants of Kamphuis et al. 2020.
    As published: ranks documents for a query; the GRASP paper uses k1 1.2 and b 0.75 and keeps 50,000 rows per unit.
    Deviation: rows are decoded from their tokens, so a word at the end of a row may be truncated; the stop words are
    chosen here, since the paper lists none. Words that occur in no unit are not indexed, which changes no score.
    Memory: the index, about 30 bytes per row and query word in it.
    """

    settings_type = Bm25Settings
    version = 2  # words of every alphabet
    requires = frozenset({"tokens"})
    required_modules: ClassVar[Mapping[str, str]] = {"bm25s": "baselines"}
    dtype = "float16"

    def prepare(self, inputs: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        del part
        queries = [words(query_text(unit, self.settings.query)) for unit in inputs.units.units]
        check_queries(self.name, queries, inputs.units.units, self.settings.query)
        vocabulary = {word: i for i, word in enumerate(sorted({w for query in queries for w in query}), FILLER + 1)}
        rows = _RowWords.from_rows(inputs, work, vocabulary)
        top_ET = work.load_or_compute("top", lambda: self._search(rows, vocabulary, queries))
        counts = {
            "units without a query word: 0 for every row": sum(not query for query in queries),
            "rows without a word: 0 for every unit": rows.n_empty,
        }
        return RowScorer(partial(_scores_of_top_rows, top_ET), self._account(counts))

    def _search(self, rows: "_RowWords", vocabulary: dict[str, int], queries: Sequence[list[str]]) -> NDArray[np.void]:
        """Return the top rows of each unit in corpus order, (E, T) of row and score."""
        bm25s = require("bm25s", extra="baselines", feature="bm25")
        index = bm25s.BM25(k1=self.settings.k1, b=self.settings.b, method=self.settings.variant)
        index.index(_IndexInput(rows, {"": FILLER} | vocabulary), show_progress=False)
        n_top = min(self.settings.top, len(rows))
        top_ET = np.empty((len(queries), n_top), dtype=ROW_SCORE)
        for e, query in enumerate(queries):
            score_N = np.zeros(len(rows), dtype=np.float32)
            if query:
                score_N = index.get_scores([vocabulary[word] for word in query])
            top_ET["row"][e] = top_rows(score_N, n_top)
            top_ET["score"][e] = score_N[top_ET["row"][e]]
        return top_ET

    def _account(self, counts: dict[str, int]) -> Account:
        return Account(
            covers=("text of the rows, decoded from their tokens", QUERY_NOTES[self.settings.query]),
            notes=(f"idf and saturation of bm25s' {self.settings.variant}",),
            counts={reason: n for reason, n in counts.items() if n},
        )


def words(text: str) -> list[str]:
    """Tokenize a text into lower-case words of two or more characters, without stop and question words.

    Characters are composed first (NFC), so that both encodings of an accent give the same word.
    """
    tokens: list[str] = []
    for run in WORD.findall(normalize("NFC", text.lower())):
        tokens += [run] if run.isascii() else _split_run(run)
    return [word for word in tokens if word not in STOP_WORDS and word not in QUESTION_WORDS]


def _split_run(run: str) -> list[str]:
    """Split a run of letters: character pairs in scripts without spaces, whole words elsewhere."""
    pairs = [part[i : i + 2] for part in UNSPACED.findall(run) for i in range(max(1, len(part) - 1))]
    return pairs + WORD.findall(UNSPACED.sub(" ", run))


def query_text(unit: Unit, which: Literal["both", "prompt", "completion"]) -> str:
    """Return the text of a unit that is used as the query."""
    return {"both": unit.prompt + unit.completion, "prompt": unit.prompt, "completion": unit.completion}[which]


def top_rows(score_N: NDArray[np.floating[Any]], n_top: int) -> I64:
    """Return the `n_top` rows with the highest scores, in corpus order; ties go to the first row."""
    if n_top == len(score_N):
        return np.arange(n_top)
    last = np.partition(score_N, len(score_N) - n_top)[len(score_N) - n_top]
    above = np.flatnonzero(score_N > last)
    ties = np.flatnonzero(score_N == last)[: n_top - len(above)]
    return np.sort(np.concatenate([above, ties]))


@dataclass(frozen=True, slots=True)
class _RowWords:
    """Word ids of all rows, read from disk block by block on each iteration."""

    n_rows: int
    starts: tuple[int, ...]
    work: WorkArea
    n_empty: int

    @classmethod
    def from_rows(cls, inputs: MethodInputs, work: WorkArea, vocabulary: dict[str, int]) -> "_RowWords":
        """Tokenize all rows, block by block; reuse blocks that are on disk."""
        starts, n_empty = [], 0
        inputs.progress.stage("words of rows", rows=inputs.n_rows, tokens=None)
        for start, stop in inputs.blocks():
            flat = work.load_or_compute(f"words-{start}", partial(_pack_words, inputs, start, stop, vocabulary))
            n_empty += sum(1 for n_words, _ in _unpack_words(flat) if not n_words)
            starts.append(start)
            inputs.progress.advance(stop - start, 0)
        return cls(inputs.n_rows, tuple(starts), work, n_empty)

    def __len__(self) -> int:
        return self.n_rows

    def __iter__(self) -> Iterator[list[int]]:
        for start in self.starts:
            for n_words, known in _unpack_words(self.work.load_required(f"words-{start}")):
                yield known + [FILLER] * (n_words - len(known))


@dataclass(frozen=True, slots=True)
class _IndexInput:
    """Rows and vocabulary under the attribute names that bm25s expects."""

    ids: _RowWords
    vocab: dict[str, int]


def _pack_words(inputs: MethodInputs, start: int, stop: int, vocabulary: dict[str, int]) -> I32:
    """Encode rows one after another: number of words, number of query words, ids of the query words."""
    flat: list[int] = []
    for row in map(words, inputs.texts(start, stop)):
        known = [vocabulary[word] for word in row if word in vocabulary]
        flat += [len(row), len(known), *known]
    return np.array(flat, dtype=np.int32)


def _unpack_words(flat: I32) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of words and the query word ids of each row."""
    numbers = flat.tolist()
    start = 0
    while start < len(numbers):
        n_words, n_known = numbers[start : start + 2]
        yield n_words, numbers[start + 2 : start + 2 + n_known]
        start += 2 + n_known


def _scores_of_top_rows(top_ET: NDArray[np.void], start: int, stop: int) -> Scores:
    """Return the stored top scores of each unit; 0 elsewhere."""
    out = np.zeros((stop - start, len(top_ET)), dtype=np.float32)
    for e, top_T in enumerate(top_ET):
        low, high = np.searchsorted(top_T["row"], (start, stop))
        out[top_T["row"][low:high] - start, e] = top_T["score"][low:high]
    return out


def check_queries(method: str, queries: Sequence[Collection[str]], units: Sequence[Unit], which: str) -> None:
    """Check that at least one unit has a word to search for."""
    if not any(queries):
        raise TargetError(
            f"{method}: none of the {len(units)} units has a query word, e.g. {units[0].unit_id!r}: expected words of "
            f"two or more characters that are not stop words; the setting query is {which!r}, try 'both'"
        )
