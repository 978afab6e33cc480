"""BM25: rows are documents and units are queries; shared words are weighted by their rarity.

Start with `Bm25`; `words` is the tokenizer.

Shape letters: N rows, E units, T top rows of a unit, W words of a row that occur in any query.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unicodedata import category, normalize

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from grasp.arrays import I32, I64
from grasp.baselines.stored import BlockMethod, RowScorer, cached
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
        "would wouldn yes yet you your yours yourself yourselves "
        # question words and parts of a prompt template: `Question: ... Answer:` occurs in nearly every unit
        "what which who whom whose when where why how question questions answer answers"
    )
)
COVERS = ("text of the rows, decoded from their tokens", "units' prompts and completions")
FILLER = 0  # id of every word that occurs in no query: it counts towards the row's length only


class Bm25Settings(Settings):
    """BM25 as in the GRASP paper."""

    k1: float = Field(1.2, ge=0, description="Saturation of the term frequency. Paper: 1.2.")
    b: float = Field(0.75, ge=0, le=1, description="Strength of length normalisation, 0 to 1. Paper: 0.75.")
    top: int = Field(50_000, ge=1, description="Rows stored per unit; all others score 0. Paper: 50,000.")


class Bm25(BlockMethod[Bm25Settings]):
    """Words that row and unit share, weighted by rarity.

    Okapi BM25 of each row for each unit's text, computed by bm25s.

    Source: Robertson et al. 1994 (Okapi at TREC-3), in the variant `lucene` of Kamphuis et al. 2020.
    As published: ranks documents for a query; the GRASP paper uses k1 1.2 and b 0.75 and keeps 50,000 rows per unit.
    Deviation: rows are decoded from their tokens, so a word at the end of a row may be truncated; the stop words are
    chosen here, since the paper lists none. Words that occur in no unit are not indexed, which changes no score.
    Memory: the index, about 30 bytes per row and query word in it.
    """

    settings_type = Bm25Settings
    requires = frozenset({"tokens"})
    required_modules: ClassVar[Mapping[str, str]] = {"bm25s": "baselines"}
    dtype = "float16"

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del part
        queries = [words(query_text(unit)) for unit in inputs.units.units]
        check_queries(self.name, queries, inputs.units.units)
        top = cached(work / "top.safetensors", lambda: self._search(inputs, queries))

        def score(start: int, stop: int) -> Scores:
            """Return the stored top scores of each unit; 0 elsewhere."""
            out = np.zeros((stop - start, len(queries)), dtype=np.float32)
            for e, (row_T, score_T) in enumerate(zip(top["row_ET"], top["score_ET"], strict=True)):
                block = slice(*np.searchsorted(row_T, (start, stop)))
                out[row_T[block] - start, e] = score_T[block]
            return out

        counts = {
            "units without a query word: 0 for every row": sum(not query for query in queries),
            "rows without a word: 0 for every unit": int(top["n_empty"][0]),
        }
        notes = ("idf and saturation of bm25s' lucene",)
        return RowScorer(score, Account(0, COVERS, notes, {reason: n for reason, n in counts.items() if n}))

    def _search(self, inputs: MethodInputs, queries: Sequence[list[str]]) -> dict[str, NDArray[Any]]:
        """Return the top rows of each unit in corpus order with their scores, (E, T); and the number of empty rows."""
        bm25s = require("bm25s", extra="baselines", feature="bm25")
        vocabulary = {word: i for i, word in enumerate(sorted({w for query in queries for w in query}), FILLER + 1)}
        counts: list[int] = []
        known: list[I32] = []
        inputs.progress.stage("words of rows", rows=inputs.n_rows, tokens=None)
        for start, stop in inputs.blocks():
            for row in map(words, inputs.texts(start, stop)):
                counts.append(len(row))
                known.append(np.array([vocabulary[word] for word in row if word in vocabulary], dtype=np.int32))
            inputs.progress.advance(stop - start, 0)
        rows = _RowWords(np.array(counts, dtype=np.int32), known)
        index = bm25s.BM25(k1=self.settings.k1, b=self.settings.b, method="lucene")
        index.index(bm25s.tokenization.Tokenized(rows, {"": FILLER} | vocabulary), show_progress=False)
        n_top = min(self.settings.top, len(rows))
        row_ET = np.empty((len(queries), n_top), dtype=np.int32)
        score_ET = np.empty((len(queries), n_top), dtype=np.float32)
        for e, query in enumerate(queries):
            score_N = np.zeros(len(rows), dtype=np.float32)
            if query:
                score_N = index.get_scores([vocabulary[word] for word in query])
            row_ET[e] = top_rows(score_N, n_top)
            score_ET[e] = score_N[row_ET[e]]
        n_empty = np.array([np.count_nonzero(rows.count_N == 0)])
        return {"row_ET": row_ET, "score_ET": score_ET, "n_empty": n_empty}


def words(text: str) -> list[str]:
    """Tokenize a text into lower-case words of two or more characters, without stop and question words.

    Characters are composed first (NFC), so that both encodings of an accent give the same word.
    """
    tokens: list[str] = []
    for run in WORD.findall(normalize("NFC", text.lower())):
        if run.isascii():
            tokens.append(run)
        else:  # character pairs in scripts without spaces, whole words elsewhere
            tokens += [part[i : i + 2] for part in UNSPACED.findall(run) for i in range(max(1, len(part) - 1))]
            tokens += WORD.findall(UNSPACED.sub(" ", run))
    return [word for word in tokens if word not in STOP_WORDS]


def query_text(unit: Unit) -> str:
    """Return the text of a unit that is used as the query."""
    return unit.prompt + unit.completion


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
    """Words of all rows: their number in each row, and the ids of those that occur in a query."""

    count_N: I32
    known: list[I32]

    def __len__(self) -> int:
        return len(self.known)

    def __iter__(self) -> Iterator[list[int]]:
        for n_words, known in zip(self.count_N, self.known, strict=True):
            yield known.tolist() + [FILLER] * (int(n_words) - len(known))


def check_queries(method: str, queries: Sequence[Collection[str]], units: Sequence[Unit]) -> None:
    """Check that at least one unit has a word to search for."""
    if not any(queries):
        raise TargetError(
            f"{method}: none of the {len(units)} units has a query word, e.g. {units[0].unit_id!r}: expected words of "
            "two or more characters that are not stop words"
        )
