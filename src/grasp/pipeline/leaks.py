"""Detect contamination: find rows that contain questions of the targets, in linear time.

Questions are compared by words, ignoring case, punctuation and white space. N-grams of `GRAM_WORDS` words are hashed,
and a passage with the rare n-grams of a question is compared in detail: it contains the question if at least nine in
ten of its words are in common n-grams that are close together. A long prompt is searched for as a whole, without the
common beginning and end of all prompts of a target (`Question:`, few-shot examples), and by its question alone: its
last paragraph, and its last line that ends in a question mark. A short question must occur verbatim, with its answer.
Start with `find_leaks`.
"""

import re
import unicodedata
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, takewhile
from typing import Final

import numpy as np
from numpy.typing import NDArray

from grasp.artifact.reader import Leaks
from grasp.corpus.row_store import RowStore
from grasp.targets.units import Unit

Hashes = NDArray[np.uint64]

# Scripts without spaces between words: each of their characters counts as one.
_UNSPACED: Final = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uac00-\ud7af"
WORD: Final = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
GRAM_WORDS: Final = 4  # words of an n-gram
LONG_WORDS: Final = 8  # questions of at least this many words are searched for without the answer
MIN_WORDS: Final = 5  # words of a question with its answer; shorter ones are not searched for
WORDS_PER_CHANGE: Final = 10  # one word in ten may differ; a question of fewer words must occur verbatim
MAX_STRETCH: Final = 2  # a question may be spread over twice its length
MAX_QUESTIONS_PER_GRAM: Final = 32  # an n-gram of more questions is not indexed: it costs time and is not specific
CHUNK_CHARS: Final = 200_000  # characters of rows that are searched together
BLOCK_ROWS: Final = 512


def find_leaks(
    store: RowStore, units: Sequence[Unit], decode: Callable[[Sequence[Sequence[int]]], list[str]]
) -> dict[str, Leaks]:
    """Return the rows that contain a question, by target.

    A question that crosses the boundary between rows counts in each of them. Cost: the rows are decoded and hashed
    once, at some millions of tokens per second; memory: a chunk of rows and the matches.

    Args:
        store: rows of the corpus.
        units: all questions of the targets, including those that are not scored.
        decode: returns the texts of lists of token ids.
    """
    index = QuestionIndex(units)
    targets = {unit.target: e for e, unit in reversed(list(enumerate(units)))}
    rows_of: dict[str, set[int]] = {target: set() for target in sorted(targets, key=targets.__getitem__)}
    for first_row, texts in _chunks(store, decode, index.reach) if index.compared else ():
        starts = [0, *accumulate(map(len, texts))]
        for e, begin, end in index.questions_in("".join(texts)):
            rows = range(bisect_right(starts, begin) - 1, bisect_right(starts, end - 1))
            rows_of[units[e].target].update(first_row + i for i in rows)
    return {
        target: Leaks(
            np.array(sorted(rows), dtype=np.int64),
            sum(e in index.compared for e, unit in enumerate(units) if unit.target == target),
            sum(unit.target == target for unit in units),
        )
        for target, rows in rows_of.items()
    }


def _chunks(
    store: RowStore, decode: Callable[[Sequence[Sequence[int]]], list[str]], reach: int
) -> Iterator[tuple[int, list[str]]]:
    """Yield the texts of consecutive rows, with the number of the first one.

    Chunks overlap by the last rows of the previous one, so that a question of `reach` characters can cross them.
    """
    texts: list[str] = []
    first_row, n_new_chars, document = 0, 0, None
    for k in range(store.n_shards):
        shard = store.shard(k)
        documents = shard.table["doc_id"].to_pylist()
        for begin in range(0, len(shard), BLOCK_ROWS):
            rows = range(begin, min(begin + BLOCK_ROWS, len(shard)))
            for i, text in zip(rows, decode([shard.ids(i).tolist() for i in rows]), strict=True):
                # pieces of a document are joined without a space, documents with a line break
                texts.append(_normalise(text) if documents[i] == document else f"\n{_normalise(text)}")
                document = documents[i]
                n_new_chars += len(texts[-1])
                if n_new_chars >= CHUNK_CHARS:
                    yield first_row, texts
                    n_done, n_chars = len(texts), 0
                    while n_done and n_chars < 2 * reach:  # rows that the next chunk repeats
                        n_done -= 1
                        n_chars += len(texts[n_done])
                    first_row, texts, n_new_chars = first_row + n_done, texts[n_done:], 0
    if n_new_chars:
        yield first_row, texts


class QuestionIndex:
    """An index of hashed n-grams of all questions, to search for in texts.

    Attributes:
        compared: units whose question is long enough to be searched for.
        reach: about how many characters an occurrence can span.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        units_of: dict[tuple[str, ...], dict[int, None]] = {}  # by the words of an entry: a question, or its last part
        for e, entries in enumerate(question_words(units)):
            for words in entries:
                units_of.setdefault(words, {})[e] = None
        self._entries = list(units_of)
        self._units = [list(units_of_entry) for units_of_entry in units_of.values()]
        self.compared = {e for units_of_entry in self._units for e in units_of_entry}
        longest = max((sum(len(word) + 1 for word in words) for words in self._entries), default=0)
        self.reach = MAX_STRETCH * longest
        grams = [np.unique(_grams(words)) for words in self._entries]
        owner = np.repeat(np.arange(len(grams)), [len(hashes) for hashes in grams])
        all_hashes = np.concatenate([*grams, np.zeros(0, np.uint64)])
        order = np.argsort(all_hashes, kind="stable")
        gram_G, start_G, count_G = np.unique(all_hashes[order], return_index=True, return_counts=True)
        # Index the rare n-grams of each entry, or its rarest one if none is rare.
        shared = count_G[np.searchsorted(gram_G, all_hashes)]
        least = np.full(len(grams), np.iinfo(np.int64).max)
        np.minimum.at(least, owner, shared)
        rare = (
            shared <= np.maximum(MAX_QUESTIONS_PER_GRAM, least[owner]) if len(all_hashes) else np.zeros(0, dtype=bool)
        )
        self._n_grams = np.bincount(owner[rare], minlength=len(grams))
        rare_order = order[rare[order]]
        self._gram_G, start_G = np.unique(all_hashes[rare_order], return_index=True)
        self._owners = np.split(owner[rare_order], start_G[1:])  # entries of each indexed n-gram

    def questions_in(self, text: str) -> list[tuple[int, int, int]]:
        """Return occurrences of questions in a text: unit, and the characters from and up to which it extends."""
        matches = list(WORD.finditer(_normalise(text)))
        words = [match[0] for match in matches]
        gram_T = _grams(words)
        if not len(self._gram_G) or not len(gram_T):
            return []
        index_T = np.searchsorted(self._gram_G, gram_T).clip(max=len(self._gram_G) - 1)
        positions: dict[int, list[int]] = {}  # by entry: words at which one of its indexed n-grams begins
        for t in np.flatnonzero(self._gram_G[index_T] == gram_T).tolist():
            for entry in self._owners[index_T[t]].tolist():
                positions.setdefault(entry, []).append(t)
        candidates = sorted(entry for entry, hits in positions.items() if 2 * len(hits) >= self._n_grams[entry])
        occurrences = []
        for entry in candidates:
            for begin, end in self._occurrences(self._entries[entry], words, positions[entry]):
                first_char, end_char = matches[begin].start(), matches[end - 1].end()
                occurrences += [(e, first_char, end_char) for e in self._units[entry]]
        return occurrences

    def _occurrences(
        self, question: Sequence[str], words: Sequence[str], hits: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Yield the words from and up to which a text contains a question, by common n-grams that are close together.

        A window slides over the n-grams of the text that the question has too. It is an occurrence if its n-grams
        cover at least nine in ten words of the question, and it is about as long as the question. Only n-grams near
        `hits` are visited, each once.
        """
        min_length, reach = len(question) - len(question) // WORDS_PER_CHANGE, MAX_STRETCH * len(question)
        # words of the question that an n-gram covers, at its first occurrence in the question
        covered_by: dict[tuple[str, ...], range] = {}
        for k in range(len(question) - GRAM_WORDS + 1):
            covered_by.setdefault(tuple(question[k : k + GRAM_WORDS]), range(k, k + GRAM_WORDS))
        n_coverable = len(set().union(*covered_by.values()))
        min_covered = n_coverable - n_coverable // WORDS_PER_CHANGE
        window = deque[tuple[int, range]]()  # n-grams: position in the text, and covered words of the question
        times_covered = Counter[int]()  # by word of the question: number of n-grams in the window that cover it
        next_position = 0  # n-grams before it have been visited
        end_of_last = 0  # n-grams before it belong to the last occurrence
        for hit in hits:
            for t in range(max(next_position, hit - reach), min(hit + reach, len(words) - GRAM_WORDS + 1)):
                next_position = t + 1
                covered = covered_by.get(tuple(words[t : t + GRAM_WORDS]))
                if t < end_of_last or covered is None:
                    continue
                window.append((t, covered))
                times_covered.update(covered)
                while t - window[0][0] >= reach or (
                    # long enough without the first n-gram, whose words are covered by others
                    len(window) > 1
                    and t + GRAM_WORDS - window[1][0] >= min_length
                    and all(times_covered[w] > 1 for w in window[0][1])
                ):
                    for w in window.popleft()[1]:
                        times_covered[w] -= 1
                        if not times_covered[w]:
                            del times_covered[w]
                if len(times_covered) >= min_covered and t + GRAM_WORDS - window[0][0] >= min_length:
                    yield window[0][0], t + GRAM_WORDS
                    # words that are not covered yet are the rest of this occurrence
                    end_of_last = next_position + n_coverable - len(times_covered)
                    window.clear()
                    times_covered.clear()


def question_words(units: Sequence[Unit]) -> list[list[tuple[str, ...]]]:
    """Return the entries of each unit: words of its prompt, of its last parts, or of prompt and answer."""
    questions, answers = [], []
    for unit in units:
        if unit.conversation is None:
            questions.append(unit.prompt)
            answers.append(unit.completion)
        else:
            users = [str(turn["content"]) for turn in unit.conversation.turns if turn["role"] == "user"]
            questions.append(users[-1] if users else "")
            answers.append(unit.conversation.turns[-1]["content"])
    whole = [_words(text) for text in questions]
    by_target: dict[str, list[int]] = {}
    for e, unit in enumerate(units):
        by_target.setdefault(unit.target, []).append(e)
    stripped = list(whole)
    for members in by_target.values():
        if len({whole[e] for e in members}) == 1:  # nothing to tell the common part from the question
            continue
        n_first = _count_common_words(whole[e] for e in members)
        n_last = _count_common_words(whole[e][n_first:][::-1] for e in members)
        for e in members:
            stripped[e] = whole[e][n_first : len(whole[e]) - n_last]
    entries_of_units = []
    for text, answer, words, all_words in zip(questions, answers, stripped, whole, strict=True):
        paragraphs = [part for part in text.split("\n\n") if part.strip()]
        lines = [line for line in text.splitlines() if line.rstrip().endswith(("?", "\uff1f"))]
        parts = [words, *(_words(part) for part in (*paragraphs[-1:], *lines[-1:]))]
        bare = [part[part[:1] == ("question",) : len(part) - (part[-1:] == ("answer",))] for part in parts]
        entries = dict.fromkeys(part for part in bare if len(part) >= LONG_WORDS)
        if not entries:
            entries = dict.fromkeys(part for part in [(*all_words, *_words(answer))] if len(part) >= MIN_WORDS)
        entries_of_units.append(list(entries))
    # a part that several questions share, e.g. `what is the passage about`, is not specific
    shared = Counter(part for entries in entries_of_units for part in entries[1:])
    return [[*entries[:1], *(part for part in entries[1:] if shared[part] == 1)] for entries in entries_of_units]


def _count_common_words(lists: Iterable[Sequence[str]]) -> int:
    """Return the number of first words that all lists have in common."""
    return sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False)))


def _normalise(text: str) -> str:
    """Return a text in lower case and compatibility form."""
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()


def _words(text: str) -> tuple[str, ...]:
    """Return the words of a text, normalised."""
    return tuple(WORD.findall(_normalise(text)))


def _grams(words: Sequence[str]) -> Hashes:
    """Return hashes of the n-grams that begin at each word, (max(0, T - GRAM_WORDS + 1),), modulo 2^64.

    They differ between processes.
    """
    hash_T = np.fromiter(map(hash, words), dtype=np.int64, count=len(words)).astype(np.uint64)
    n = max(0, len(hash_T) - GRAM_WORDS + 1)
    total: Hashes = np.zeros(n, dtype=np.uint64)
    for k in range(GRAM_WORDS):  # a polynomial hash, so that the order of words matters; odd, so that no bits are lost
        total = total * np.uint64(0x9E3779B97F4A7C15) + hash_T[k : k + n]
    return total
