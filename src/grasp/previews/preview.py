"""Preview what a build would read of a corpus or of targets, before anything is computed.

`preview_corpus` and `preview_targets` read the first records as a build does. With a tokenizer they also divide them
into rows, count tokens and show examples as the model sees them: `[loss: ...]` encloses what carries loss.
"""

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from grasp.arrays import I32, Bool
from grasp.artifact.label_functions import DEFAULT_BINS
from grasp.artifact.label_table import MAX_UNBINNED_VALUES, identifier
from grasp.corpus.conversations import column_notes
from grasp.corpus.documents import Corpus
from grasp.corpus.labels import Kind, kind_of_all, label_text, widest
from grasp.corpus.packing import Skipped
from grasp.corpus.row_store import RowStore
from grasp.corpus.sources import open_source
from grasp.errors import ModelError
from grasp.results import Result
from grasp.settings import CorpusSettings, ModelSettings, TargetSettings
from grasp.targets.load import load_units, split_names, unread_files_notes
from grasp.targets.units import LOSS, Unit
from grasp.text import ending, plain, skipped_lines

MAX_EXAMPLES = 3
MAX_EXAMPLE_CHARS = 400
MAX_VALUES_CHARS = 48  # of the frequent values of a label, or of a wrong answer
_UNQUOTED = re.compile(r"[\w.]+")  # expressions that a shell reads without quotes
_LABEL_TABLE = pa.schema(
    {
        "label": pa.string(),
        "values": pa.int64(),
        "missing": pa.int64(),
        "most frequent": pa.string(),
        "select with": pa.string(),
    }
)


@dataclass(frozen=True, eq=False, repr=False)
class Preview(Result):
    """A preview of a corpus or of targets: a table of labels or targets, and examples below it."""

    max_printed: ClassVar[int] = 100
    examples: tuple[str, ...] = ()

    def _below(self) -> Sequence[str]:
        lines = [f"example {k}: {example}" for k, example in enumerate(self.examples, start=1)]
        return [*super()._below(), *lines]


def preview_corpus(
    corpus: CorpusSettings | Path | str,
    *,
    model: ModelSettings | Path | str | None = None,
    tokenizer: str | None = None,
    split: str | None = None,
    text_column: str | None = None,
    id_column: str | None = None,
    limit: int = 1_000,
) -> Preview:
    """Read the first records of a corpus: rows, labels and expressions that select them, columns, and skipped records.

    Args:
        corpus: settings, or a path.
        model: settings or directory of a model, whose tokenizer is used. Default: no tokens are counted.
        tokenizer: the model's tokenizer; without a model, the one that divides texts into tokens. Default: the one in
            the directory of the model.
        split: split of a corpus that has several.
        text_column: column of the text, or of conversation turns. Default: text or messages.
        id_column: column of row names. Default: row_id or id; "" for none.
        limit: maximum number of records to read.
    Raises:
        CorpusError: the corpus cannot be read.
    """
    settings = corpus if isinstance(corpus, CorpusSettings) else CorpusSettings(path=str(corpus))
    arguments = {"split": split, "text_column": text_column, "row_id_column": id_column}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    settings = settings.model_copy(update={"limit": min(limit, settings.limit or limit), **arguments})
    opened = Corpus(open_source(settings.path, settings.split), settings)
    counts_of: dict[str, Counter[str]] = {}  # label -> value -> number of records
    kinds_of: dict[str, set[Kind]] = {}  # label -> kinds of its values
    ignored: set[str] = set()  # columns and nested fields that cannot be labels
    n_read, examples, skipped = 0, list[str](), Skipped()
    for document in opened.documents(0):
        n_read += 1
        for label, value in document.labels.items():
            counts = counts_of.setdefault(label, Counter())
            if (text := label_text(value)) is not None:
                counts[text] += 1
            kinds_of.setdefault(label, set()).add(kind_of_all([value]))
        ignored.update(document.ignored)
        content = str(document.conversation or document.text or "")
        if not content.strip() and document.input_ids is None:
            skipped.add("whitespace" if content else "empty", document.name, document.location)
        if len(examples) < MAX_EXAMPLES and content.strip():
            examples.append(plain(content, MAX_EXAMPLE_CHARS))
            if document.rejected is not None:
                rejected = str(document.rejected.conversation or document.rejected.text)
                examples.append(plain(f"[rejected] {rejected}", MAX_EXAMPLE_CHARS))
    notes = [*opened.notes, *column_notes(opened.columns, list(counts_of), sorted(ignored))]
    headline = f"{settings.path}: {n_read:,} records" + f" (the first {limit:,})" * (n_read == limit)
    encoder, context = _load_tokenizer(model, tokenizer)
    if encoder is None:
        notes += skipped_lines(skipped.counts, skipped.examples, "skipped")
        notes.append("rows and tokens: pass --model or --set model.tokenizer=DIR, to divide the records")
    else:
        with TemporaryDirectory() as directory:
            store = RowStore.write(Path(directory) / "rows", settings, encoder, shard_rows=4_096, context=context)
            headline += f", {store.n_rows:,} rows, {store.n_tokens:,} tokens, {store.n_loss_positions:,} with loss"
            # the first rows as the model sees them; of preference pairs, the chosen and the rejected side
            rows = store.rows(np.arange(min(MAX_EXAMPLES, store.n_rows)))
            rows = rows if rows.split_N is None else rows.sides()
            texts = (_mark_loss(encoder, rows.ids(k), rows.mask(k)) for k in range(min(MAX_EXAMPLES, len(rows))))
            examples = [plain(text, MAX_EXAMPLE_CHARS) for text in texts]
        notes += skipped_lines(store.skipped.counts, store.skipped.examples, "skipped", store.n_documents)
        notes.append(encoder.describe())
    lines = []
    for label, counts in counts_of.items():
        expression = identifier(label)
        if widest(kinds_of[label]) in ("int", "long", "float") and len(counts) > MAX_UNBINNED_VALUES:
            expression = f"bins({expression}, {DEFAULT_BINS})"
        line: dict[str, Any] = {"label": label, "values": len(counts), "missing": n_read - counts.total()}
        line["most frequent"] = plain(", ".join(value for value, _ in counts.most_common(3)), MAX_VALUES_CHARS)
        quoted = expression if _UNQUOTED.fullmatch(expression) else shlex.quote(expression)
        lines.append(line | {"select with": f"--by {quoted}"})
    table = pa.Table.from_pylist(lines, _LABEL_TABLE)
    return Preview(table, headline, tuple(notes), signs=False, examples=tuple(examples[:MAX_EXAMPLES]))


def preview_targets(
    targets: TargetSettings | Sequence[str] | str,
    *,
    model: ModelSettings | Path | str | None = None,
    tokenizer: str | None = None,
) -> Preview:
    """Read targets: units, tokens, and three examples as the model sees them.

    Args:
        targets: settings, or names of tasks and files; one text has them separated by commas.
        model: settings or directory of a model, whose tokenizer is used. Default: no tokens are counted.
        tokenizer: the model's tokenizer; without a model, the one that divides texts into tokens. Default: the one in
            the directory of the model.
    Raises:
        TargetError: a target cannot be read.
    """
    names = split_names(targets) if isinstance(targets, str) else targets
    settings = names if isinstance(names, TargetSettings) else TargetSettings(names=tuple(map(str, names)))
    units = load_units(settings)
    # at most three examples: the first unit of each target, then the next ones
    first = {unit.target: k for k, unit in reversed(list(enumerate(units.units)))}
    later = [k for k in range(len(units.units)) if k not in first.values()]
    example_index = sorted([*sorted(first.values()), *later][:MAX_EXAMPLES])
    encoder, context = _load_tokenizer(model, tokenizer)
    lengths: dict[str, list[int]] = {}  # tokens with loss of each unit, by target, if they are known
    if encoder is None:
        texts = []
        for unit in (units.units[k] for k in example_index):
            if unit.conversation is not None:
                text = plain(str(unit.conversation), MAX_EXAMPLE_CHARS)
            else:
                text = ending(f"{unit.prompt}[loss:{unit.completion}]", MAX_EXAMPLE_CHARS)
            weight = f"[weight:{unit.weight:+g}]" if unit.weight != 1.0 else ""
            texts.append(weight + text + _wrong_answers(unit, [other.completion for other in unit.others]))
        notes = ["tokens: pass --model or --set model.tokenizer=DIR, to encode the questions"]
    else:
        units = units.rendered(encoder)
        encoded = units.tokenize(encoder, settings.max_length, context)
        for unit, tokens in zip(units.units, encoded, strict=True):  # those of wrong answers included
            n_tokens = sum(len(answer.input_ids) - answer.first for answer in (tokens, *tokens.others))
            lengths.setdefault(unit.target, []).append(n_tokens)
        texts = []
        for unit, tokens in ((units.units[k], encoded[k]) for k in example_index):
            has_loss = np.arange(len(tokens.input_ids)) >= tokens.first
            text = ending(_mark_loss(encoder, tokens.input_ids, has_loss), MAX_EXAMPLE_CHARS)
            wrong = [answer.input_ids[answer.first :].tolist() for answer in tokens.others]
            texts.append(text + (_wrong_answers(unit, encoder.decode(wrong)) if wrong else ""))
        skipped = skipped_lines(units.unwritten.counts, units.unwritten.examples, "skipped")
        notes = [*skipped, encoder.describe()]
    counts = Counter(unit.target for unit in units.units)
    columns: dict[str, list[Any]] = {
        "target": list(counts),
        "units": list(counts.values()),
        "of": [units.drawn_from[target] for target in counts],
        "read as": [*{unit.target: _scoring(unit) for unit in units.units}.values()],
    }
    if lengths:
        columns["tokens with loss, mean"] = [round(float(np.mean(lengths[target])), 1) for target in counts]
        columns["most"] = [max(lengths[target]) for target in counts]
    table = pa.table(columns)
    examples = tuple(f"{units.units[k].unit_id}: {text}" for k, text in zip(example_index, texts, strict=True))
    headline = f"{len(table):,} target{'s' * (len(table) > 1)}, {len(units.units):,} units"
    return Preview(table, headline, (*unread_files_notes(settings), *notes), signs=False, examples=examples)


def _scoring(unit: Unit) -> str:
    """Describe how a unit is scored."""
    if unit.weight != 1.0:
        return f"weighted {unit.metric.replace('_', ' ')}"
    if unit.others and not unit.choices:
        return f"{unit.metric.replace('_', ' ')} of a preference pair"
    if unit.conversation is not None:
        return "conversation"
    if unit.metric != LOSS:
        return f"{unit.metric.replace('_', ' ')} of {1 + len(unit.others)} answers"
    return f"multiple choice of {len(unit.choices)}" if unit.choices else "prompt and completion"


def _wrong_answers(unit: Unit, texts: Sequence[str]) -> str:
    """Return the wrong answers of a unit for display; their prompts instead if these are what differs."""
    if unit.others and unit.others[0].completion == unit.completion:
        texts = [ending(other.prompt, MAX_VALUES_CHARS) for other in unit.others]
    return "".join(f"[wrong:{' ' if text[:1].isspace() else ''}{plain(text, MAX_VALUES_CHARS)}]" for text in texts)


def _mark_loss(tokenizer: Any, ids: I32, loss_mask: Bool | None) -> str:
    """Return a text as the model sees it; what carries loss is in brackets, unless all of it does."""
    if loss_mask is None or loss_mask[1:].all():  # the first token is never predicted
        return str(tokenizer.decode([ids.tolist()])[0])
    starts = np.flatnonzero(np.diff(loss_mask.astype(np.int8))) + 1  # of all spans but the first
    texts = tokenizer.decode([span.tolist() for span in np.split(ids, starts)])
    spans = zip(texts, loss_mask[[0, *starts]], strict=True)
    return "".join(f"[loss:{text}]" if has_loss else text for text, has_loss in spans)


def _load_tokenizer(model: ModelSettings | Path | str | None, tokenizer: str | None) -> tuple[Any, int | None]:
    """Return the tokenizer and the context length of a model, without its weights; None if they are not known."""
    if model is None and tokenizer is None:
        return None, None
    from grasp.models.causal_lm import tokenizer_and_context  # noqa: PLC0415 - loads torch
    from grasp.models.checkpoint import tokenizer_at  # noqa: PLC0415
    from grasp.models.tokenizer import HfTokenizer  # noqa: PLC0415

    if model is None:
        assert tokenizer is not None
        loaded = tokenizer_at("model.tokenizer", tokenizer, ModelSettings(path=tokenizer))
        return HfTokenizer(loaded, vocab_size=len(loaded)), None
    settings = model if isinstance(model, ModelSettings) else ModelSettings(path=str(model))
    settings = settings if tokenizer is None else settings.model_copy(update={"tokenizer": tokenizer})
    if settings.reader is not None:
        raise ModelError(f"model.{settings.reader}: has no tokenizer; previews are of texts")
    return tokenizer_and_context(settings)
