"""The rows of an artifact, read from its corpus again: text and tokens of each, and proof that they are the same rows.

The corpus is tokenised and packed as it was for the build. Every row must have the name that the artifact has, and all
of them together its fingerprint, which is a hash of names and tokens.
Shape letters: N rows, M documents of the corpus.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.corpus.documents import Tokenizer
from grasp.corpus.packing import Row
from grasp.corpus.store import Fingerprint, rows_with_texts
from grasp.errors import CorpusError, SettingsError
from grasp.settings import CorpusSettings
from grasp.yaml_files import validated

Rule = Literal["any", "half", "all"]
NOTHING_LEFT = "left out: nothing is, so that there is nothing to write; take a smaller budget"


@dataclass(frozen=True, slots=True)
class Kept:
    """Whole documents that are kept, and how that compares with the rows that were chosen."""

    mask_M: NDArray[np.bool_]
    names: tuple[str, ...]  # of the kept ones: the row_id or doc_id that the corpus gave, else the name that was made
    tokens: int  # in rows of kept documents
    added: int  # of these, in rows that were not chosen
    lost: int  # tokens of chosen rows whose documents are not kept


def checked_rule(text: str) -> Rule:
    """A rule by its name.

    Raises:
        SettingsError: another name.
    """
    if text not in get_args(Rule):
        raise SettingsError(
            f"documents: got {text!r}, expected any, half or all: how much of a document must be chosen"
        )
    return cast(Rule, text)


def corpus_settings(artifact: ArtifactReader, path: str | None = None) -> CorpusSettings:
    """How the corpus was read when the artifact was built.

    Args:
        path: where the corpus lies now; None: where it lay then.
    Raises:
        SettingsError: the artifact does not say, or its rows are images.
        ArtifactError: it was merged, of parts with corpora of their own.
    """
    artifact.require_one_corpus()
    recorded = artifact.manifest.settings.get("corpus")
    if not isinstance(recorded, dict):
        raise SettingsError(f"{artifact.where}: does not record the corpus that it was built from; build it again")
    if (artifact.manifest.settings.get("model") or {}).get("classifier") is not None:
        raise SettingsError(f"{artifact.where}: its rows are images, which are not exported; take the list of row_ids")
    settings = validated(CorpusSettings, recorded, f"{artifact.where}: settings.corpus")
    return settings.model_copy(update={"path": artifact.place(settings.path) if path is None else path})


def are_records(artifact: ArtifactReader) -> bool:
    """Whether a row is a record of the corpus, which holds a conversation, a pair or an instruction."""
    columns = artifact.manifest.details.get("columns") or {}
    return not {"text", "input_ids"} & columns.keys()


def proven_rows(artifact: ArtifactReader, settings: CorpusSettings, tokenizer: Tokenizer) -> Iterator[Row]:
    """The rows of the artifact, in order; what is made of them counts only when the last one has come.

    Raises:
        CorpusError: the corpus is not the one that was built from, or was cut into rows by another tokenizer.
    """
    found = Fingerprint()
    remedy = "it is not the corpus that was built from: say with `corpus` where that lies"
    names = (name for batch in artifact.row_batches(["row_id"]) for name in batch.column(0).to_pylist())
    rows = rows_with_texts(settings, tokenizer)
    for name in names:
        row = next(rows, None)
        if row is None or row.row_id != name:
            here = "ends" if row is None else f"has {row.row_id!r}"
            raise CorpusError(f"{settings.path}: {here} where {artifact.where} has row {name!r}; {remedy}")
        found.add(row)
        yield row
    extra = next(rows, None)
    if extra is not None:
        raise CorpusError(
            f"{settings.path}: has {extra.row_id!r} beyond the {artifact.n_rows:,} rows of {artifact.where}; {remedy}"
        )
    if str(found) != artifact.manifest.fingerprints.get("corpus"):
        raise CorpusError(
            f"{settings.path}: its rows have the names of {artifact.where} and other tokens; {remedy}, or restore the "
            "tokenizer"
        )


def kept_documents(rows: Iterable[Row], chosen_N: NDArray[np.bool_], rule: Rule, *, others: bool = False) -> Kept:
    """Which documents have any, half or all of their tokens in chosen rows, or all the others.

    A packed row holds pieces of several documents: it counts for the one that has the most tokens in it.

    Raises:
        SettingsError: no document is kept.
    """
    names: dict[int, str] = {}
    tokens: dict[int, int] = {}
    chosen: dict[int, int] = {}
    for row, is_chosen in zip(rows, chosen_N.tolist(), strict=True):
        names.setdefault(row.document, row.row_id)
        tokens[row.document] = tokens.get(row.document, 0) + len(row.input_ids)
        chosen[row.document] = chosen.get(row.document, 0) + len(row.input_ids) * is_chosen
    least = {"any": 0.0, "half": 0.5, "all": 1.0}[rule]
    kept = [d for d, own in chosen.items() if (own > 0 and own >= least * tokens[d]) is not others]
    if not kept and others:
        raise SettingsError(NOTHING_LEFT)
    if not kept:
        raise SettingsError(
            f"documents: there is no document of whose tokens {rule} were chosen; take any, or a larger budget"
        )
    mask_M = np.zeros(max(names) + 1, dtype=np.bool_)
    mask_M[kept] = True
    whole, own = sum(tokens[d] for d in kept), sum(chosen[d] for d in kept)
    return Kept(mask_M, tuple(names[d] for d in kept), whole, whole - own, sum(chosen.values()) - own)
