"""Find rows that contain questions of the targets, in linear time: contamination of the corpus by the evaluation.

A question is compared by its words; case, punctuation and white space do not count. Runs of `GRAM` words are hashed,
and a row with the runs of a question is looked at closely: it contains the question if all of its words but one in ten
lie in common runs, close to one another. What all prompts of a target begin or end with (`Question:`, few-shot
examples) is no part of a question. Start with `find_leaks`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Final

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import I64
from grasp.corpus.store import RowStore
from grasp.targets.units import Unit

Hashes = NDArray[np.uint64]

WORD: Final = re.compile(r"\w+")
GRAM: Final = 4  # words of a run
FEWEST_WORDS: Final = 8  # shorter questions are found everywhere, so they are taken with their answer
CHANGED: Final = 10  # one word in so many may differ: a question of fewer must be there to the letter
STRETCH: Final = 2  # a question may be spread over so many times its own length
SEAM: Final = 400  # characters on either side of a cut, in which a question that two rows share is looked for
ROWS_AT_ONCE: Final = 512


def find_leaks(
    store: RowStore, units: Sequence[Unit], decode: Callable[[Sequence[Sequence[int]]], list[str]]
) -> list[I64]:
    """Return the rows that contain the question of each unit, (E,) arrays of row_index, ascending.

    A question that lies across the cut between two rows of a document is in both.

    Cost: the rows are decoded and hashed once, some millions of tokens a second; memory is a shard and what is found.
    """
    index = QuestionIndex(units)
    found: list[set[int]] = [set() for _ in units]
    before, document_before = "", None  # text of the row before, and its document
    for k in range(store.n_shards if index.n_questions else 0):
        shard = store.shard(k)
        documents = shard.table["doc_id"].to_pylist()
        for start in range(0, len(shard), ROWS_AT_ONCE):
            rows = range(start, min(start + ROWS_AT_ONCE, len(shard)))
            for i, text in zip(rows, decode([shard.ids(i).tolist() for i in rows]), strict=True):
                row = shard.start + i
                for e in index.questions_in(text):
                    found[e].add(row)
                if documents[i] == document_before:
                    for e in index.questions_in(before[-SEAM:] + text[:SEAM]):
                        if not {row - 1, row} & found[e]:
                            found[e] |= {row - 1, row}
                before, document_before = text, documents[i]
    return [np.array(sorted(rows), dtype=np.int64) for rows in found]


class QuestionIndex:
    """Hashed runs of words of all questions, ready to be looked for in texts."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._words = question_words(units)
        grams, owners = [], []
        for e, words in enumerate(self._words):
            hashes = _grams(_hashes(words)) if len(words) >= FEWEST_WORDS else np.zeros(0, dtype=np.uint64)
            grams.append(hashes)
            owners.append(np.full(len(hashes), e, dtype=np.int64))
        every, owner = (
            np.concatenate([*grams, np.zeros(0, np.uint64)]),
            np.concatenate([*owners, np.zeros(0, np.int64)]),
        )
        order = np.argsort(every, kind="stable")
        self._gram_G, start_G = np.unique(every[order], return_index=True)
        self._owners = np.split(owner[order], start_G[1:])  # of each distinct run, the questions that have it
        self._n_grams = np.array([len(hashes) for hashes in grams], dtype=np.int64)

    @property
    def n_questions(self) -> int:
        """Return how many questions are long enough to be looked for."""
        return int((self._n_grams > 0).sum())

    def questions_in(self, text: str) -> list[int]:
        """Return the units whose question a text contains, ascending."""
        words = WORD.findall(text.casefold())
        gram_T = _grams(_hashes(words))
        place_T = np.searchsorted(self._gram_G, gram_T).clip(max=max(0, len(self._gram_G) - 1))
        at_T = np.flatnonzero(self._gram_G[place_T] == gram_T) if len(self._gram_G) else gram_T[:0]
        places: dict[int, list[int]] = {}
        for t in at_T.tolist():
            for e in self._owners[place_T[t]].tolist():
                places.setdefault(e, []).append(t)
        likely = (e for e, where in places.items() if 2 * len(where) >= self._n_grams[e])
        return sorted(e for e in likely if self._holds(e, words, places[e]))

    def _holds(self, e: int, words: Sequence[str], where: Sequence[int]) -> bool:
        """Return whether a text holds the words of question `e` in runs that begin at `where`, close together."""
        question = self._words[e]
        least = len(question) - len(question) // CHANGED
        run_of: dict[tuple[str, ...], list[int]] = {}
        for k in range(len(question) - GRAM + 1):
            run_of.setdefault(tuple(question[k : k + GRAM]), []).append(k)
        covers_T = {t: {k + i for k in run_of.get(tuple(words[t : t + GRAM]), ()) for i in range(GRAM)} for t in where}
        if len(set().union(*covers_T.values())) < least:
            return False
        for first in range(len(where)):
            covered = set[int]()
            for t in where[first:]:
                if t - where[first] >= STRETCH * len(question):
                    break
                covered |= covers_T[t]
            if len(covered) >= least:
                return True
        return False


def question_words(units: Sequence[Unit]) -> list[list[str]]:
    """Return the words of each unit's question: of a conversation what the user said last, else the prompt.

    What all prompts of a target begin and end with is taken off. A question of few words is taken with its answer.
    """
    found: list[list[str]] = [[] for _ in units]
    by_target: dict[str, list[int]] = {}
    for e, unit in enumerate(units):
        by_target.setdefault(unit.target, []).append(e)
        asked = unit.prompt
        if unit.conversation is not None:
            users = [turn["content"] for turn in unit.conversation.turns if turn["role"] == "user"]
            asked = users[-1] if users else ""
        found[e] = WORD.findall(asked.casefold())
    for members in by_target.values():
        plain = [e for e in members if units[e].conversation is None]
        several = len({tuple(found[e]) for e in plain}) > 1
        begin = _common(found[e] for e in plain) if several else 0
        end = _common(found[e][begin:][::-1] for e in plain) if several else 0
        for e in plain:
            words = found[e][begin : len(found[e]) - end]
            found[e] = words[words[:1] == ["question"] : len(words) - (words[-1:] == ["answer"])]
    for e, unit in enumerate(units):
        if len(found[e]) < FEWEST_WORDS:
            said = unit.completion if unit.conversation is None else unit.conversation.turns[-1]["content"]
            found[e] = [*found[e], *WORD.findall(said.casefold())]
    return found


def _common(lists: Iterable[Sequence[str]]) -> int:
    """Return how many first words all lists have in common."""
    return sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False)))


def _hashes(words: Sequence[str]) -> Hashes:
    """Return 64-bit hashes of words, (T,), of this process."""
    return np.fromiter(map(hash, words), dtype=np.int64, count=len(words)).astype(np.uint64)


def _grams(hash_T: Hashes) -> Hashes:
    """Return hashes of the runs of `GRAM` words that begin at each word, (max(0, T - GRAM + 1),), modulo 2^64."""
    n = max(0, len(hash_T) - GRAM + 1)
    total: Hashes = np.zeros(n, dtype=np.uint64)
    for k in range(GRAM):  # a polynomial in an odd number, so that the order of words counts
        total = total * np.uint64(0x9E3779B97F4A7C15) + hash_T[k : k + n]
    return total
