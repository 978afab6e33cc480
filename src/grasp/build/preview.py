"""Preview what a build would read of a corpus or of targets, before anything is computed.

`preview_corpus` and `preview_targets` read the first records as a build does. With a tokenizer they also divide them
into rows, count tokens and show examples as the model sees them: `[loss: ...]` encloses what carries loss.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from grasp.arrays import I32, Bool
from grasp.artifact.label_functions import DEFAULT_BINS
from grasp.artifact.label_table import MAX_UNBINNED_VALUES, identifier
from grasp.corpus.conversations import entry_notes, preference_note
from grasp.corpus.documents import Corpus
from grasp.corpus.labels import Kind, kind_of_all, label_text, widest
from grasp.corpus.packing import Skipped
from grasp.corpus.row_store import RowStore
from grasp.corpus.sources import open_source
from grasp.errors import ModelError
from grasp.results import Result
from grasp.settings import CorpusSettings, ModelSettings, TargetSettings
from grasp.targets.load import load_units, split_names
from grasp.targets.units import LOSS, Unit
from grasp.text import ending, plain, skipped_lines

MAX_EXAMPLES = 3
MAX_EXAMPLE_CHARS = 400  # characters
MAX_VALUES_CHARS = 48
_URL = re.compile(r"(?:https?:)?//[^/\s]+")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


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
    roles = ", ".join(f"{role} from {column!r}" for role, column in opened.columns.items())
    values: dict[str, Counter[str | None]] = {}
    kinds: dict[str, set[Kind]] = {}
    without_labels: set[str] = set()
    texts: list[str] = []
    n_read, skipped = 0, Skipped()
    for document in opened.documents(0):
        n_read += 1
        for name, value in document.labels.items():
            values.setdefault(name, Counter())[label_text(value)] += 1
            kinds.setdefault(name, set()).add(kind_of_all([value]))
        without_labels.update(document.ignored)
        text = str(document.conversation or document.text or "")
        if not text.strip() and document.input_ids is None:
            skipped.add("whitespace" if text else "empty", document.name, document.location)
        if len(texts) < MAX_EXAMPLES and text.strip():
            texts.append(plain(text, MAX_EXAMPLE_CHARS))
            if document.rejected is not None:
                other = str(document.rejected.conversation or document.rejected.text)
                texts.append(plain(f"[rejected] {other}", MAX_EXAMPLE_CHARS))
    notes = [*entry_notes(settings), f"columns: {roles or 'none'}"]
    if without_labels:
        example = min(without_labels)
        notes.append(
            f"left out: {', '.join(sorted(without_labels))} (binary, lists of numbers or of records); request a value "
            f"by its path, e.g. --set corpus.label_paths=[{example}.0]"
        )
    text_column = opened.columns.get("text", opened.columns.get("turns"))
    all_columns = [*opened.columns.values(), *values, *without_labels]
    note = preference_note(text_column, all_columns, turns="turns" in opened.columns)
    if note and "rejected" not in opened.columns:
        notes.append(note)
    headline = f"{settings.path}: {n_read:,} records" + f" (the first {limit:,})" * (n_read == limit)
    encoder, context = _tokenizer(model, tokenizer)
    if encoder is None:
        notes += [f"skipped: {line}" for line in skipped_lines(skipped.counts, skipped.examples)]
        notes.append("rows and tokens: pass --model or --tokenizer, to divide the records")
    else:
        with TemporaryDirectory() as directory:
            store = RowStore.write(Path(directory) / "rows", settings, encoder, shard_rows=4_096, context=context)
            headline += f", {store.n_rows:,} rows, {store.n_tokens:,} tokens, {store.n_loss_positions:,} with loss"
            notes += [f"skipped: {line}" for line in skipped_lines(store.skipped.counts, store.skipped.examples)]
            shard = store.rows(np.arange(min(MAX_EXAMPLES, store.n_rows)))
            if shard.split_N is not None:
                shard = shard.sides()
            shown = (_mark_loss(encoder, shard.ids(k), shard.mask(k)) for k in range(min(MAX_EXAMPLES, len(shard))))
            texts = [plain(text, MAX_EXAMPLE_CHARS) for text in shown]
            notes.append(encoder.describe())
    labels = [_label_line(name, counts, widest(kinds[name]), n_read) for name, counts in values.items()]
    names = ("label", "values", "missing", "most frequent", "select with")
    columns = zip(*labels, strict=True) if labels else [[]] * len(names)
    table = pa.table(dict(zip(names, map(list, columns), strict=True)))
    return Preview(table, headline, tuple(notes), signs=False, examples=tuple(texts[:MAX_EXAMPLES]))


def _label_line(name: str, counts: Counter[str | None], kind: Kind, n_read: int) -> tuple[str, int, int, str, str]:
    """Return name, number of values, number of records without one, frequent values, and a label expression."""
    present = {value: count for value, count in counts.items() if value is not None}
    frequent = sorted(present, key=lambda value: -present[value])[:3]
    expression, values = identifier(name), list(islice(present, 100))
    if values and kind in ("int", "long", "float") and len(present) > MAX_UNBINNED_VALUES:
        expression = f"bins({expression}, {DEFAULT_BINS})"
    elif values and all(_URL.match(value) for value in values):
        expression = f"host({expression})"
    elif len(present) > MAX_UNBINNED_VALUES and all(_DATE.match(value) for value in values):
        expression = f"year({expression})"
    shown = plain(", ".join(frequent), MAX_VALUES_CHARS)
    option = f"--by {expression}" if re.fullmatch(r"[\w.]+", expression) else f"--by {shlex.quote(expression)}"
    return name, len(present), n_read - sum(present.values()), shown, option


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
    notes: list[str] = []
    tokens: Mapping[str, tuple[float, int]] = {}
    encoder, context = _tokenizer(model, tokenizer)
    if encoder is None:
        shown = [_example(unit) for unit in units.units]
        notes.append("tokens: pass --model or --tokenizer, to encode the questions")
    else:
        units = units.rendered(encoder)
        encoded = units.tokenize(encoder, settings.max_length, context)
        notes += [f"skipped: {line}" for line in skipped_lines(units.unwritten.counts, units.unwritten.examples)]
        tokens = {
            target: _lengths(
                sum(len(answer.input_ids) - answer.first for answer in (each, *each.others))
                for unit, each in zip(units.units, encoded, strict=True)
                if unit.target == target
            )
            for target in units.targets
        }
        masks = [np.arange(len(each.input_ids)) >= each.first for each in encoded]
        examples_of = zip(encoded, masks, strict=True)
        shown = [ending(_mark_loss(encoder, each.input_ids, mask), MAX_EXAMPLE_CHARS) for each, mask in examples_of]
        for k, (unit, each) in enumerate(zip(units.units, encoded, strict=True)):
            wrong = [other.input_ids[other.first :].tolist() for other in each.others]
            shown[k] += _wrong_answers(unit, encoder.decode(wrong)) if wrong else ""
        notes.append(encoder.describe())
    counts, kinds = Counter(unit.target for unit in units.units), {unit.target: _kind(unit) for unit in units.units}
    table = pa.table(
        {
            "target": list(counts),
            "units": list(counts.values()),
            "of": [units.drawn_from[target] for target in counts],
            "read as": [kinds[target] for target in counts],
        }
        | ({"tokens with loss, mean": [round(tokens[target][0], 1) for target in counts]} if tokens else {})
        | ({"most": [tokens[target][1] for target in counts]} if tokens else {})
    )
    selected = [k for k in range(len(shown)) if k in _first_of_targets(units.units)][:MAX_EXAMPLES]
    examples = tuple(f"{units.units[k].unit_id}: {shown[k]}" for k in selected)
    headline = f"{len(counts):,} target{'s' * (len(counts) > 1)}, {len(units.units):,} units"
    return Preview(table, headline, tuple(notes), signs=False, examples=examples)


def _first_of_targets(units: Sequence[Unit]) -> set[int]:
    """Return the positions of about three units: the first of each target, then the next ones."""
    first = {unit.target: k for k, unit in reversed(list(enumerate(units)))}
    rest = [k for k in range(len(units)) if k not in first.values()]
    return {*sorted(first.values())[:MAX_EXAMPLES], *rest[: max(0, MAX_EXAMPLES - len(first))]}


def _kind(unit: Unit) -> str:
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


def _example(unit: Unit) -> str:
    """Return a unit as text, with the completion in brackets."""
    if unit.conversation is not None:
        text = plain(str(unit.conversation), MAX_EXAMPLE_CHARS)
    else:
        text = ending(f"{unit.prompt}[loss:{unit.completion}]", MAX_EXAMPLE_CHARS)
    weight = f"[weight:{unit.weight:+g}]" if unit.weight != 1.0 else ""
    return weight + text + _wrong_answers(unit, [other.completion for other in unit.others])


def _wrong_answers(unit: Unit, texts: Sequence[str]) -> str:
    """Return the wrong answers of a unit for display; their prompts instead if these are what differs."""
    if unit.others and unit.others[0].completion == unit.completion:
        texts = [ending(other.prompt, MAX_VALUES_CHARS) for other in unit.others]
    return "".join(f"[wrong:{' ' if text[:1].isspace() else ''}{plain(text, MAX_VALUES_CHARS)}]" for text in texts)


def _lengths(lengths: Iterator[int]) -> tuple[float, int]:
    """Return the mean and the maximum."""
    values = list(lengths)
    return float(np.mean(values)), max(values)


def _mark_loss(tokenizer: Any, ids: I32, mask: Bool | None) -> str:
    """Return a text as the model sees it; what carries loss is in brackets, unless all of it does."""
    if mask is None or mask[1:].all():
        return str(tokenizer.decode([ids.tolist()])[0])
    starts = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
    parts = [part.tolist() for part in np.split(ids, starts)]
    texts = tokenizer.decode(parts)
    marked = [
        f"[loss:{text}]" if mask[start] else text for text, start in zip(texts, (0, *starts.tolist()), strict=True)
    ]
    return "".join(marked)


def _tokenizer(model: ModelSettings | Path | str | None, tokenizer: str | None) -> tuple[Any, int | None]:
    """Return the tokenizer and the context length of a model, without its weights; None if they are not known."""
    if model is None and tokenizer is None:
        return None, None
    from grasp.models.causal_lm import context_of  # noqa: PLC0415 - loads torch
    from grasp.models.checkpoint import text_config_of, tokenizer_at, tokenizer_of  # noqa: PLC0415
    from grasp.models.tokenizer import HfTokenizer  # noqa: PLC0415

    if model is None:
        assert tokenizer is not None
        loaded = tokenizer_at("model.tokenizer", tokenizer, ModelSettings(path=tokenizer))
        return HfTokenizer(loaded, vocab_size=len(loaded)), None
    settings = model if isinstance(model, ModelSettings) else ModelSettings(path=str(model))
    settings = settings if tokenizer is None else settings.model_copy(update={"tokenizer": tokenizer})
    if settings.classifier is not None:
        raise ModelError("model.classifier: previews are of text; an image classifier has no tokenizer")
    config, loaded = text_config_of(settings), tokenizer_of(settings)
    vocab_size = getattr(config, "vocab_size", None) or len(loaded)
    return HfTokenizer.from_settings(loaded, settings, vocab_size), context_of(config)
