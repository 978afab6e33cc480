"""Notes on the texts of a build: how columns, documents and questions were read, and what was left out.

Start with `note_corpus` and `note_questions`.
"""

import shlex
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa

from grasp.corpus.conversations import unread_notes
from grasp.corpus.documents import Corpus
from grasp.corpus.row_store import RowStore
from grasp.models.tokenizer import HfTokenizer
from grasp.progress import Progress
from grasp.targets import UnitSet
from grasp.targets.units import UnitTokens
from grasp.text import skipped_lines

SEARCHED_SHARDS = 8  # shards that are searched for a column of unique names
MIN_DOCUMENTS = 20  # documents that such a column must distinguish to be suggested as --id-column
COLUMN_ROLES = {"input_ids": "token ids", "row_id": "row names", "doc_id": "document names"}  # in words


def note_questions(
    unit_set: UnitSet, unit_tokens: Sequence[UnitTokens], tokenizer: HfTokenizer, progress: Progress
) -> None:
    """Note questions that the model reads differently from a chat or from an evaluation harness, and skipped ones."""
    plain_text_targets = sorted({unit.target for unit in unit_set.units if unit.conversation is None})
    if plain_text_targets and tokenizer.writes_chats:
        progress.note(
            f"{', '.join(plain_text_targets)}: prompts are plain text; the model has a chat template, which is applied "
            "only to questions given as conversations (messages)"
        )
    for line in skipped_lines(unit_set.unwritten.counts, unit_set.unwritten.examples):
        progress.note(f"questions skipped: {line}")
    # such prompts whose white space is a token of its own, rather than the beginning of the answer's first token
    last_prompt_ids = [[int(unit.input_ids[unit.first - 1])] for unit in unit_tokens]
    trailing_space_units = [
        unit.unit_id
        for unit, last_token in zip(unit_set.units, tokenizer.decode(last_prompt_ids), strict=True)
        if unit.conversation is None and unit.prompt != unit.prompt.rstrip() and not last_token.strip()
    ]
    if trailing_space_units:
        progress.note(
            f"{len(trailing_space_units):,} prompts (e.g. {trailing_space_units[0]!r}) end in white space, which is "
            "not scored; lm-evaluation-harness scores it with the answer. To do the same, move it before the answer"
        )


def note_corpus(
    corpus: Corpus,
    store: RowStore,
    unit_set: UnitSet,
    tokenizer: HfTokenizer,
    context: int | None,
    progress: Progress,
) -> None:
    """Note how the corpus was read: columns, labels, rows and tokens, skipped documents; and the number of questions.

    Args:
        corpus: the corpus.
        store: its rows.
        unit_set: units of all targets.
        tokenizer: tokenizer of the model.
        context: context length of the model; None if it has no limit.
        progress: receives the notes.
    """
    roles = store.details["columns"]
    columns = ", ".join(f"{COLUMN_ROLES.get(role, role)} from {column!r}" for role, column in roles.items())
    if not {"row_id", "doc_id"} & roles.keys():
        columns += "; row names are generated from content and position"
        if label := next((name for name in store.label_columns if _names_documents(store, name)), None):
            columns += (
                f"; {label!r} has a different value in every document: use it with --id-column {shlex.quote(label)}"
            )
    labels = "labels: " + (", ".join(store.label_columns) or "none (no predictions by slice)")
    if store.ignored_columns:
        labels += f"; left out (binary, lists of numbers or of records): {', '.join(store.ignored_columns)}"
        labels += f"; request a value of them by its path, e.g. --set corpus.label_paths=[{store.ignored_columns[0]}.0]"
    notes = [*corpus.notes, f"columns: {columns}", labels]
    notes += unread_notes(roles, [*store.label_columns, *store.ignored_columns])
    if "rejected" in roles:
        notes.append("preference pairs: rows are scored by the gradient of the DPO loss at this model")
    loss = f", {store.n_loss_positions:,} with loss" if store.masked else ""
    limit = f"the model's context is {context:,}" if context else "the model has no context limit"
    split = "; longer documents are split into several rows" if store.n_rows > store.n_documents else ""
    notes.append(
        f"{store.n_rows:,} rows of {store.n_documents:,} documents, {store.n_tokens:,} tokens{loss}, at most "
        f"{store.details['max_length']:,} in a row ({limit}){split}"
    )
    notes += [f"skipped: {line}" for line in skipped_lines(store.skipped.counts, store.skipped.examples)]
    notes.append(tokenizer.describe())
    if tokenizer.writes_chats and tokenizer.writes_date:
        notes.append(
            f"the chat template writes the date: fixed at {tokenizer.chat_date} (model.chat_date sets another)"
        )
    n_units, n_available = Counter(unit.target for unit in unit_set.units), unit_set.drawn_from
    questions = [
        f"all {n:,} of {target}" if n == n_available[target] else f"{n:,} of the {n_available[target]:,} of {target}"
        for target, n in n_units.items()
    ]
    notes.append(f"questions: {', '.join(questions)}")
    for note in notes:
        progress.note(note)


def _names_documents(store: RowStore, label: str) -> bool:
    """Return whether a label has a different value for each document of the first `SEARCHED_SHARDS` shards."""
    shards = range(min(store.n_shards, SEARCHED_SHARDS))
    table = pa.concat_tables([store.table(k).select(["doc_id", label]) for k in shards])
    if not (pa.types.is_string(table[label].type) or pa.types.is_integer(table[label].type)) or table[label].null_count:
        return False
    n_documents, n_values = len(table["doc_id"].unique()), len(table[label].unique())
    n_pairs = len(table.group_by(["doc_id", label]).aggregate([]))  # distinct pairs: one per document, if one to one
    return n_documents >= MIN_DOCUMENTS and n_values == n_documents == n_pairs
