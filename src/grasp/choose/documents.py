"""From chosen rows to documents: which to keep, and proof that a corpus is the one that was built from.

A document may give several rows, and a packed row holds pieces of several documents: it goes by the name of the one
with the most tokens in it. Rows lie in the order of their documents, so both are read as streams, side by side.
Shape letters: N rows, M documents of the corpus.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from grasp.artifact.reader import Artifact
from grasp.corpus.documents import Document, read_documents
from grasp.errors import CorpusError, SettingsError
from grasp.files import written_aside
from grasp.settings import CorpusSettings, describe

Rule = Literal["any", "half", "all"]
COLUMNS = ("row_id", "doc_id", "n_tokens", "snippet")
_REPEAT = re.compile(r"#\d+")


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """The rows that go by the name of one document."""

    name: str  # row_id of its first row
    doc_id: str
    tokens: int
    chosen: int  # tokens of its chosen rows
    snippet: str  # of its first row

    def kept(self, rule: Rule) -> bool:
        """Whether the document is kept: any of its tokens was chosen, half of them, or all."""
        if rule == "any":
            return self.chosen > 0
        return self.chosen >= self.tokens if rule == "all" else 2 * self.chosen >= self.tokens and self.chosen > 0


@dataclass(frozen=True, slots=True)
class Kept:
    """Which documents of a corpus are kept, and how that compares with the rows that were chosen."""

    mask_M: NDArray[np.bool_]
    tokens: int  # in rows of kept documents
    chosen: int  # of these, in chosen rows
    partly: int  # documents of which some rows were chosen, and some not

    @property
    def n_documents(self) -> int:
        """Documents kept."""
        return int(self.mask_M.sum())


def checked_rule(text: str) -> Rule:
    """A rule by its name.

    Raises:
        SettingsError: another name.
    """
    for known in get_args(Rule):
        if text == known:
            found: Rule = known
            return found
    raise SettingsError(f"--documents: got {text!r}, expected any, half or all: how much of a document must be chosen")


def document_rows(artifact: Artifact, chosen_N: NDArray[np.bool_]) -> Iterator[DocumentRows]:
    """Documents that gave rows, in order."""
    current: DocumentRows | None = None
    start = 0
    for batch in artifact.row_batches(list(COLUMNS)):
        chosen = chosen_N[start : start + batch.num_rows].tolist()
        start += batch.num_rows
        columns = [batch.column(name).to_pylist() for name in COLUMNS]
        for name, doc_id, tokens, snippet, is_chosen in zip(*columns, chosen, strict=True):
            own = tokens if is_chosen else 0
            if current is not None and _belongs(current, name, doc_id):
                current = DocumentRows(
                    current.name, doc_id, current.tokens + tokens, current.chosen + own, current.snippet
                )
                continue
            if current is not None:
                yield current
            current = DocumentRows(name, doc_id, tokens, own, snippet)
    if current is not None:
        yield current


def write_ids(artifact: Artifact, chosen_N: NDArray[np.bool_], rule: Rule, path: Path) -> int:
    """Names of the kept documents, one a line; the file appears only when whole. Returns how many.

    The name is the row_id or doc_id that the corpus gave the document, else the name that was made for it.

    Raises:
        CorpusError: a name with a line break.
        SettingsError: no document is kept.
    """
    lines = 0
    with written_aside(path) as part, part.open("w", encoding="utf-8", newline="\n") as file:
        for document in document_rows(artifact, chosen_N):
            if not document.kept(rule):
                continue
            if "\n" in document.name or "\r" in document.name:
                raise CorpusError(
                    f"document {document.name!r}: a list with one name a line cannot hold it; give names without breaks"
                )
            file.write(document.name + "\n")
            lines += 1
        _check_some(lines, rule)
    return lines


def corpus_settings(artifact: Artifact, path: str | None = None) -> CorpusSettings:
    """How the corpus was read when the artifact was built.

    Args:
        path: where the corpus lies now; None: where it lay then.
    Raises:
        SettingsError: the artifact does not say.
    """
    recorded = artifact.manifest.settings.get("corpus")
    if not isinstance(recorded, dict):
        raise SettingsError(f"{artifact.where}: does not record the corpus that it was built from; build it again")
    try:
        settings = CorpusSettings.model_validate(recorded)
    except ValidationError as err:
        raise SettingsError(describe(err, f"{artifact.where}: settings.corpus", CorpusSettings)) from err
    return settings if path is None else settings.model_copy(update={"path": path})


def kept_documents(artifact: Artifact, settings: CorpusSettings, chosen_N: NDArray[np.bool_], rule: Rule) -> Kept:
    """Find the documents of the chosen rows in the corpus.

    Raises:
        CorpusError: the corpus is not the one that was built from: documents are missing, in another order, begin
            with other words, or are of another number. The message names the first.
        SettingsError: no document is kept.
    """
    expected = document_rows(artifact, chosen_N)
    current = next(expected, None)
    kept: list[bool] = []
    tokens = chosen = partly = 0
    for document in read_documents(settings):
        found = current is not None and current.name == _name(document)
        if current is None or not found:
            kept.append(False)
            continue
        _check_beginning(current, document, settings, artifact)
        kept.append(current.kept(rule))
        tokens += current.tokens if kept[-1] else 0
        chosen += current.chosen if kept[-1] else 0
        partly += 0 < current.chosen < current.tokens
        current = next(expected, None)
    if current is not None:
        raise CorpusError(
            f"{settings.path}: has no document {current.name!r} where {artifact.where} has it; it is not the corpus "
            "that was built from, or its order is another: name the right one with --corpus"
        )
    _check_number(artifact, settings, len(kept))
    _check_some(sum(kept), rule)
    return Kept(np.array(kept, dtype=np.bool_), tokens, chosen, partly)


def _belongs(current: DocumentRows, name: str, doc_id: str) -> bool:
    """Whether a row continues a document: `name#1`, `name#2` follow `name`."""
    return (
        doc_id == current.doc_id
        and name.startswith(current.name)
        and _REPEAT.fullmatch(name, len(current.name)) is not None
    )


def _name(document: Document) -> str:
    return document.doc_id if document.row_id is None else document.row_id


def _check_beginning(rows: DocumentRows, document: Document, settings: CorpusSettings, artifact: Artifact) -> None:
    """The first row of a document that was cut, not packed, keeps its beginning for reading."""
    if settings.packing != "document" or not settings.snippet_chars or document.text is None:
        return
    beginning = " ".join((document.text or "")[: 4 * settings.snippet_chars].split())[: settings.snippet_chars]
    if beginning != rows.snippet:
        raise CorpusError(
            f"{document.where}: document {rows.name!r} begins with {beginning[:40]!r}, in {artifact.where} with "
            f"{rows.snippet[:40]!r}; it is not the corpus that was built from: name the right one with --corpus"
        )


def _check_some(n_kept: int, rule: Rule) -> None:
    if not n_kept:
        share = {"any": "any", "half": "half", "all": "all"}[rule]
        raise SettingsError(
            f"--documents {rule}: there is no document of whose tokens {share} were chosen; use --documents any, or a "
            "larger budget"
        )


def _check_number(artifact: Artifact, settings: CorpusSettings, found: int) -> None:
    built = artifact.manifest.details.get("n_documents")
    if built is not None and built != found:
        raise CorpusError(
            f"{settings.path}: has {found:,} documents, {artifact.where} was built from {built:,}; name the right "
            "corpus with --corpus"
        )
