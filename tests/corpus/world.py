"""A small corpus in every format, a readable tokenizer of words, and slow references for packing."""

import gzip
import itertools
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from grasp.corpus import Document, RowStore
from grasp.settings import CorpusSettings


class Words:
    """A tokenizer with one token per word, by a hash, which records the texts that it encodes."""

    def __init__(
        self, vocab_size: int = 500, eos_id: int | None = 0, salt: str = "", prefix_ids: tuple[int, ...] = ()
    ) -> None:
        self.vocab_size, self.eos_id, self.salt, self.prefix_ids = vocab_size, eos_id, salt, prefix_ids
        self.suffix_ids = () if eos_id is None else (eos_id,)
        self.context_ids = self.prefix_ids or self.suffix_ids
        self.seen: list[str] = []

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        self.seen.extend(texts)
        return [[1 + zlib.crc32((self.salt + word).encode()) % 400 for word in text.split()] for text in texts]

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        spans = [[match.span() for match in re.finditer(r"\S+", text)] for text in texts]
        return list(zip(self.encode(texts), spans, strict=True))

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [" ".join(f"t{token}" for token in row) for row in rows]


def sentences(n: int, *, words: int = 7, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{rng.integers(99)}" for _ in range(rng.integers(1, 2 * words))) + f" d{i}" for i in range(n)]


def records(n: int) -> list[dict]:
    return [{"text": text, "topic": "ab"[i % 2], "year": 1990 + i} for i, text in enumerate(sentences(n))]


def write_jsonl(path: Path, rows: Sequence[dict]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pa.compress(data, codec="zstd", asbytes=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def write_parquet(path: Path, rows: Sequence[dict], group: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=group)
    return path


def write_chunked(directory: Path, rows: Sequence[dict], cuts: Sequence[int], suffix: str) -> Path:
    edges = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    for k, (first, last) in enumerate(itertools.pairwise(edges)):
        if first < last:
            writer = write_parquet if suffix == ".parquet" else write_jsonl
            writer(directory / f"part-{k:03d}{suffix}", rows[first:last])
    return directory


def settings_for(path: Path | str, **changes) -> CorpusSettings:
    return CorpusSettings(path=str(path), **{"max_length": 8, **changes})


def rows_of(store: RowStore) -> list[tuple]:
    shards = [store.shard(k) for k in range(store.n_shards)]
    return [(row, shard.ids(i).tolist()) for shard in shards for i, row in enumerate(shard.table.to_pylist())]


def tokens_of(texts: Sequence[str], tokenizer: Words) -> list[list[int]]:
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return [ids + eos for ids in tokenizer.encode(texts) if ids]


def cut_slowly(tokens: Sequence[int], length: int) -> list[list[int]]:
    rows, rest = [], list(tokens)
    while rest:
        rows.append(rest[:length])
        rest = rest[length:]
    return rows


def document(index: int, text: str | None = None, ids: Sequence[int] | None = None, **labels) -> Document:
    array = None if ids is None else np.array(ids, dtype=np.int32)
    return Document(index=index, doc_id=f"d{index}", row_id=None, text=text, input_ids=array, labels=labels)


TEXTS = st.lists(st.text(alphabet="ab  \n", max_size=40), min_size=1, max_size=12).filter(
    lambda texts: any(text.strip() for text in texts)
)
