"""Notes on the texts of a build: how columns, documents and questions were read, and what was left out.

Start with `note_inputs`.
"""

from collections import Counter

from grasp.corpus.documents import Corpus
from grasp.corpus.row_store import RowStore
from grasp.models.tokenizer import HfTokenizer
from grasp.pipeline.preview import column_notes
from grasp.progress import Progress
from grasp.targets import UnitSet
from grasp.text import skipped_lines


def note_inputs(
    corpus: Corpus,
    store: RowStore,
    unit_set: UnitSet,
    tokenizer: HfTokenizer,
    context: int | None,
    progress: Progress,
) -> None:
    """Note how corpus and questions were read: columns, labels, rows and tokens, and what was skipped."""
    roles = store.details["columns"]
    notes = [*corpus.notes, *column_notes(roles, store.label_columns, store.ignored_columns)]
    notes.append("labels: " + (", ".join(store.label_columns) or "none (no predictions by slice)"))
    if not {"row_id", "doc_id"} & roles.keys():
        notes.append("row names are generated from content and position")
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
    plain_text_targets = sorted({unit.target for unit in unit_set.units if unit.conversation is None})
    if plain_text_targets and tokenizer.writes_chats:
        notes.append(
            f"{', '.join(plain_text_targets)}: prompts are plain text; the model has a chat template, which is applied "
            "only to questions given as conversations (messages)"
        )
    notes += [
        f"questions skipped: {line}" for line in skipped_lines(unit_set.unwritten.counts, unit_set.unwritten.examples)
    ]
    for note in notes:
        progress.note(note)
