"""grasp select"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from grasp.cli.app import command
from grasp.cli.console import MOST_LINES, show
from grasp.cli.options import beside, chosen_protocol
from grasp.cli.printed import nats, number, print_protocol, print_trust
from grasp.cli.progress import Watch
from grasp.errors import SettingsError
from grasp.files import check_outputs
from grasp.text import plain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from grasp.artifact.reader import Artifact
    from grasp.choose.documents import Rule
    from grasp.choose.select import Request, RowSelection
    from grasp.predict.scorer import Scorer
    from grasp.predict.slices import LabelTable
    from grasp.runs.old_trust import Verdict

PLACES = 8  # of the curve that are printed
# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp select art --budget 20% --target sciq --out kept.parquet
  grasp select art --budget 2Mtokens --target sciq=2,openbookqa=1 --diversity 0.25 --out kept.parquet
  grasp select art --budget 5000 --target sciq --by topic --floor 1% --cap Games:20% --out kept.parquet
  grasp select art --budget 20% --target sciq --exclude seen.txt --corpus-out kept --ids-out kept.txt
"""


@command(EXAMPLES)
def select(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact."),
    budget: str = typer.Option(..., "--budget", help="20%, 5000 (rows), 2Mtokens or 20%tokens, of the whole corpus."),
    target: str = typer.Option(..., "--target", help="Target, or targets and their weights: sciq=2,openbookqa=1."),
    out: Path | None = typer.Option(
        None, "--out", help="Parquet of row ids in order, with gains; its summary and protocol beside it."
    ),
    protocol: Path | None = typer.Option(None, "--protocol", help="Protocol file; none: the one that ships."),
    calibration: str | None = typer.Option(None, "--calibration", help="Family that standardises, e.g. uniform:0.5."),
    diversity: float | None = typer.Option(
        None, "--diversity", help="Penalty on redundancy instead of the protocol's own geometry, e.g. 0.25; 0: none."
    ),
    by: str | None = typer.Option(None, "--by", metavar="LABEL", help="Label that floors and caps speak of."),
    floor: list[str] = typer.Option(
        [], "--floor", metavar="[VALUE:]AMOUNT", help="At least so much of the budget, e.g. Games:5%; repeatable."
    ),
    cap: list[str] = typer.Option(
        [], "--cap", metavar="[VALUE:]AMOUNT", help="At most so much of the budget, e.g. 10% of each; repeatable."
    ),
    exclude: Path | None = typer.Option(None, "--exclude", help="List of row_ids or doc_ids: text or Parquet."),
    exclude_where: str | None = typer.Option(
        None, "--exclude-where", metavar="EXPR", help="Exclude the rows for which a label expression is true."
    ),
    environment: Path | None = typer.Option(
        None, "--environment", help="Development environment; gives intervals for realized utility, and warnings."
    ),
    ids_out: Path | None = typer.Option(None, "--ids-out", help="Text list of the documents kept, one name a line."),
    corpus_out: Path | None = typer.Option(None, "--corpus-out", help="New directory for the filtered corpus."),
    form: str | None = typer.Option(
        None, "--format", help="Of the filtered corpus: parquet, jsonl or datasets; none: as it is."
    ),
    documents: str = typer.Option("half", "--documents", help="Keep a document if any, half or all of it is chosen."),
    corpus: str | None = typer.Option(
        None, "--corpus", help="Where the corpus lies now; none: where it was built from."
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Plain lines instead of a progress bar."),
) -> None:
    """Choose rows under a budget that maximise predicted utility.

    Relevance minus the protocol's geometry, by exact marginal gains, with a bound on what any choice could reach.
    """
    outputs = {**beside("--out", out), "--ids-out": ids_out, "--corpus-out": corpus_out}
    _check_flags(out, corpus_out, form, corpus)
    from grasp.artifact.reader import Artifact
    from grasp.choose.amounts import parse_targets
    from grasp.choose.documents import checked_rule
    from grasp.choose.export import checked_format
    from grasp.predict.predictions import describe
    from grasp.predict.slices import LabelTable
    from grasp.predict.source import checked_targets
    from grasp.runs.old_trust import scorer_and_trust

    rule, kind = checked_rule(documents), None if form is None else checked_format(form)
    artifact = Artifact.open(path)
    read = {"--exclude reads": exclude, "--protocol reads": protocol, "is the environment": environment}
    check_outputs(outputs, artifact.reads | read | {"--corpus reads": corpus})
    checked_targets(artifact, list(parse_targets(target)), "--target")
    if corpus_out is not None:
        _check_corpus(artifact, corpus)
    chosen = chosen_protocol(protocol, calibration, diversity=diversity, array_names=artifact.array_names)
    table = LabelTable(artifact.rows_path)
    request, notes = _request(artifact, table, budget, target, by, floor, cap, exclude, exclude_where)
    scorer, trust = scorer_and_trust(artifact, chosen, table, list(parse_targets(target)), environment)
    selection = _watched(scorer, artifact, request, quiet=quiet)
    verdict = None if trust is None else trust.verdict(scorer, selection.sums)
    print_protocol(describe(scorer))
    _print_selection(selection, verdict, notes)
    if out is not None:
        _write(selection, verdict, artifact, out, by)
    if ids_out is not None or corpus_out is not None:
        _write_documents(artifact, selection, rule, ids_out, corpus_out, kind, corpus)


def _watched(scorer: "Scorer", artifact: "Artifact", request: "Request", *, quiet: bool) -> "RowSelection":
    """Select, and tell how far it is."""
    from grasp.choose.select import select_with

    with Watch(quiet=quiet) as watch:
        watch.stage("selecting", rows=None, tokens=None)
        return select_with(scorer, artifact, request, progress=_Advance(watch))


class _Advance:
    """Rows so far -> rows more, for the progress bar."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._done = 0

    def __call__(self, done: int) -> None:
        self._watch.advance(done - self._done, 0)
        self._done = done


def _check_flags(out: Path | None, corpus_out: Path | None, form: str | None, corpus: str | None) -> None:
    """See that the outputs have names that they can have, and that no flag is given that says nothing of them."""
    if out is not None and out.suffix != ".parquet":
        raise SettingsError(f"--out: got {out}, expected a name that ends in .parquet")
    if corpus_out is not None and corpus_out.exists():
        raise SettingsError(f"--corpus-out: {corpus_out} is there already; give another name, or remove it")
    if corpus_out is not None and not corpus_out.absolute().parent.is_dir():
        raise SettingsError(f"--corpus-out: there is no directory {corpus_out.parent}; make it first")
    if corpus_out is None and (form is not None or corpus is not None):
        useless = ", ".join(flag for flag, value in (("--format", form), ("--corpus", corpus)) if value is not None)
        raise SettingsError(f"select: got {useless} without --corpus-out, where it has no meaning; leave it out")


def _check_corpus(artifact: "Artifact", corpus: str | None) -> None:
    """See, before the work begins, that the corpus is where it is said to be."""
    from grasp.choose.documents import corpus_settings
    from grasp.corpus.sources import open_source
    from grasp.errors import CorpusError

    try:
        open_source(corpus_settings(artifact, corpus).path)
    except (CorpusError, SettingsError) as err:
        remedy = "; say with --corpus where it lies now" if corpus is None else ""
        raise SettingsError(f"--corpus{'-out' if corpus is None else ''}: {err}{remedy}") from err


def _request(
    artifact: "Artifact",
    table: "LabelTable",
    budget: str,
    target: str,
    by: str | None,
    floor: list[str],
    cap: list[str],
    exclude: Path | None,
    exclude_where: str | None,
) -> tuple["Request", list[str]]:
    """What is asked, and what is worth saying of what is excluded."""
    from grasp.choose.amounts import parse_bounds, parse_budget, parse_targets
    from grasp.choose.records import read_exclusion
    from grasp.choose.select import Request

    notes: list[str] = []
    excluded_N: NDArray[np.bool_] | None = None
    if exclude is not None:
        found = read_exclusion(artifact, exclude)
        excluded_N = found.mask_N
        listed = f"{found.listed:,} names exclude {int(found.mask_N.sum()):,} rows; {found.unknown:,} are unknown"
        notes.append(f"{exclude}: {listed if found.listed else 'is empty, and excludes nothing'}")
    if exclude_where is not None:
        chosen = table.selection(exclude_where)
        excluded_N = chosen.mask_N if excluded_N is None else excluded_N | chosen.mask_N
        unlabelled = f"; {chosen.n_null:,} rows have no label there and stay" if chosen.n_null else ""
        notes.append(f"{exclude_where}: excludes {int(chosen.mask_N.sum()):,} rows{unlabelled}")
    request = Request(
        parse_budget(budget),
        parse_targets(target),
        labels=None if by is None else table.column(by, "--by"),
        floors=parse_bounds(floor, "--floor"),
        caps=parse_bounds(cap, "--cap"),
        excluded_N=excluded_N,
    )
    return request, notes


def _print_selection(selection: "RowSelection", verdict: "Verdict | None", notes: list[str]) -> None:
    from grasp.choose.select import guarantee

    taken, known = len(selection.row_index), selection.certificate
    print(f"{taken:,} of {selection.n_rows:,} rows ({taken / selection.n_rows:.1%}), {selection.n_tokens:,} tokens")
    headings = ["target", "weight", "utility", "against the corpus"]
    if verdict is not None:
        headings += ["expected", "low", "high"]
    lines = []
    for name, weight in selection.targets.items():
        line = [name, f"{weight:.2f}", number(selection.utility[name])]
        line.append(number(selection.utility[name] - selection.whole[name]))
        if verdict is not None:
            span = verdict.utility.get(name)
            line += [nats(None if span is None else value) for value in _ends(span)]
        lines.append(line)
    show("predicted utility", headings, lines)
    bound = "none" if known.bound is None else f"{number(known.bound)}, {known.bound - known.value:.3f} above the value"
    print(f"value {number(known.value)}; upper bound {bound}")
    print(plain(guarantee(selection)))
    _print_curve(selection)
    _print_labels(selection)
    for note in (*notes, *selection.notes):
        print(plain(note))
    if verdict is not None:
        print_trust(verdict.title, verdict.warnings)


def _ends(span: object) -> list[float | None]:
    return [getattr(span, name, None) for name in ("expected", "low", "high")]


def _print_curve(selection: "RowSelection") -> None:
    curve = selection.curve
    step = max(1, len(curve.rows) // PLACES)
    places = sorted({*range(step - 1, len(curve.rows), step), len(curve.rows) - 1})
    show(
        "value of the first rows",
        ("rows", "tokens", "value"),
        [(f"{curve.rows[k]:,}", f"{curve.tokens[k]:,}", number(curve.value[k])) for k in places],
        left=0,
    )


def _print_labels(selection: "RowSelection") -> None:
    if not selection.labels:
        return
    ordered = sorted(selection.labels, key=lambda one: -one.taken)
    show(
        f"what is taken of each value, in {selection.unit}",
        ("value", "taken", "of", "share", "floor", "cap"),
        [
            (
                one.value,
                f"{one.taken:,}",
                f"{one.pool:,}",
                f"{one.taken / max(one.pool, 1):.1%}",
                f"{one.floor:,}" if one.floor else "-",
                f"{one.cap:,}" if one.cap < selection.budget else "-",
            )
            for one in ordered[:MOST_LINES]
        ],
    )
    if len(ordered) > MOST_LINES:
        rest = ordered[MOST_LINES:]
        print(f"... and {len(rest):,} more values with {sum(one.taken for one in rest):,} {selection.unit} in all")


def _write(
    selection: "RowSelection", verdict: "Verdict | None", artifact: "Artifact", out: Path, label: str | None
) -> None:
    from grasp.choose.records import selection_table, write_summary, write_table
    from grasp.predict.protocol import save_protocol

    write_table(selection_table(selection, artifact, label), out)
    record = out.with_suffix(".json")
    write_summary(selection.summary() | ({} if verdict is None else {"trust": verdict.summary()}), record)
    print(f"{out}: {len(selection.row_index):,} rows in order; {record}: the summary, for grasp report --selection")
    protocol = out.with_suffix(".protocol.yaml")
    save_protocol(selection.protocol, protocol)
    same = ["grasp", "predict", artifact.where, "--subsets", str(out), "--protocol", str(protocol)]
    print(f"the same numbers: {shlex.join(same)}")


def _write_documents(
    artifact: "Artifact",
    selection: "RowSelection",
    rule: "Rule",
    ids_out: Path | None,
    corpus_out: Path | None,
    kind: str | None,
    corpus: str | None,
) -> None:
    import numpy as np

    from grasp.choose.documents import corpus_settings, kept_documents, write_ids
    from grasp.choose.export import checked_format, own_format, write_corpus

    chosen_N = np.zeros(selection.n_rows, dtype=np.bool_)
    chosen_N[selection.row_index] = True
    if ids_out is not None:
        print(f"{ids_out}: {write_ids(artifact, chosen_N, rule, ids_out):,} documents by name")
    if corpus_out is not None:
        settings = corpus_settings(artifact, corpus)
        kept = kept_documents(artifact, settings, chosen_N, rule)
        form = own_format(settings.path) if kind is None else checked_format(kind)
        lines = write_corpus(settings.path, kept.mask_M, corpus_out, form)
        print(
            f"{corpus_out}: {lines:,} of {len(kept.mask_M):,} documents, {kept.tokens:,} tokens, of which "
            f"{kept.chosen:,} were chosen; {kept.partly:,} documents were chosen in part"
        )
