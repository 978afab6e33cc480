"""The commands and how they explain themselves. Heavy modules are imported inside commands, so that help is quick.

A command is grouped by what people come for; its rarer options stand under MORE; the words of the house that its help
uses are explained below it, half a line each. Help is plain text, the same on a terminal and in a pipe.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

import grasp
from grasp.signatures import REQUIRED, Declaration, declared, signed

GROUPS = {
    "Start": ("demo", "build", "merge", "info", "verify", "fit-head"),
    "Ask what rows and slices are worth": ("score", "predict", "explain", "report", "serve"),
    "Choose what to train on": ("select", "mix", "distil", "apply"),
    "Find what should not be there": ("detect",),
    "See how far to trust it": ("retrain", "runs", "evaluate", "calibrate", "methods"),
}
OPTIONS = "Options"
MORE = "More options"

WORDS = {
    "artifact": "what grasp build wrote: the rows, and what each should teach; here ART",
    "target": "a task the model should do well, e.g. sciq",
    "unit": "one question of a target, with its answer",
    "relevance": "how much training on a row should help a target; above 0 it helps",
    "utility": "minus the loss on a target; higher is better",
    "runs": "models trained on parts of the corpus, and how well each did",
    "protocol": "the rule that adds relevance up to a prediction; one ships",
    "family": "a way to draw subsets, e.g. uniform:0.5 (random halves), mixture:topic",
    "label": "a column of the corpus, e.g. topic",
    "slice": "all rows with one value of a label",
    "recipe": "the settings of a training run: model, steps, batch, learning rate",
}


def _records(context: Any, parameters: Iterable[Any]) -> list[tuple[str, str]]:
    """Name and help of parameters that are shown."""
    records = (parameter.get_help_record(context) for parameter in parameters)
    return [record for record in records if record is not None]


def _words(text: str) -> list[tuple[str, str]]:
    """The words of the house in a text, with what they mean."""
    return [(word, meaning) for word, meaning in WORDS.items() if re.search(rf"(?i)\b{word}s?\b", text)]


GO_ON = ("demo", "build", "apply", "retrain")


class Command(TyperCommand):
    """A command whose options stand in two parts, whose words are explained, and that says what Ctrl-C leaves."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            kept = "what was finished is kept; the same command goes on from there"
            left = kept if self.name in GO_ON else "a result is written when it is whole, so this one was not"
            print(f"stopped: {left}", file=sys.stderr)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters = self.get_params(ctx)
        options = [one for one in parameters if one.param_type_name == "option"]
        rare = [one for one in options if getattr(one, "rich_help_panel", None) == MORE]
        parts = {
            "Arguments": [one for one in parameters if one.param_type_name == "argument"],
            OPTIONS: [one for one in options if one not in rare],
            MORE: rare,
        }
        sections = {title: _records(ctx, part) for title, part in parts.items()}
        sections["Words"] = _words(
            " ".join([self.help or "", *(getattr(one, "help", None) or "" for one in parameters)])
        )
        for title, lines in sections.items():
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


class Commands(TyperGroup):
    """The list of commands, by what people come for."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for group, names in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), self.commands[name].get_short_help_str(80)) for name in names])
        with formatter.section(OPTIONS):
            formatter.write_dl(_records(ctx, self.get_params(ctx)))


app = typer.Typer(
    name="grasp",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=(
        "What happens to a model on a task if part of its training corpus is kept, dropped or re-weighted? "
        "GRASP predicts it from one forward pass, without retraining."
    ),
    epilog="Start with: grasp demo. More about a command: grasp COMMAND --help",
)


F = TypeVar("F", bound=Callable[..., None])

# How arguments of verbs are written on a command line, where it is not --name, and FILE, N, X or NAME by its kind.
FLAGS = {"count": "-B", "k": "-k", "suspects": "--detect", "columns": "--weights", "oracles": "--oracle"}
FLAGS |= {"keep_features": "--keep-features/--no-keep-features"}
METAVARS = {
    name: metavar
    for metavar, names in {
        "EXPR": "drop keep where exclude_where",
        "EXPR:NUMBER": "weight",
        "LABEL": "by label clean truth",
        "ID": "unit row",
        "AMOUNT": "budget",
        "[VALUE:]AMOUNT": "floor cap",
        "SHARE": "distance false_positives",
        "TIMES": "max_repeat",
        "N": "train_tokens",
        "RULE": "documents",
        "ROLE": "role",
        "SIZE": "size",
        "COLUMN": "text_column id_column",
        "PATTERN": "columns metrics higher lower",
        "COMMAND": "train_command",
        "PATH": "corpus",
        "DIR": "out runs development checkpoints cache model tokenizer",
        "further|new": "train",
        "ART": "previous like",
    }.items()
    for name in names.split()
}
BY_KIND = {str: "NAME", int: "N", float: "X", bool: "", Path: "FILE"}
LEAST = {"resamples": 10} | dict.fromkeys(("top", "bottom", "min_tokens", "seed", "explain", "cautious"), 0)
LEAST |= dict.fromkeys(("count", "seeds", "workers", "stack", "limit"), 1)


def flag_of(name: str) -> str:
    """The flag of a verb's argument."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def command(
    *examples: str,
    also: str = "",
    name: str | None = None,
    group: typer.Typer = app,
    verb: str | None = None,
    more: str = "",
) -> Callable[[F], F]:
    """Register a function as a command, by default of its own name.

    Args:
        examples: command lines that its help shows.
        also: what stands below them.
        verb: module of the verb of the function's name. What it declares are options of the command, which are given to
            the function as keywords; those that the function has itself take the place of the verb's.
        more: options of the verb that stand under MORE.
    """
    lines = [f"  {line}" for example in examples for line in example.split("\n")]
    # \b keeps the lines as they are
    epilog = "\n".join(["\b", "Examples:" if len(examples) > 1 else "Example:", *lines, also])
    registered = group.command(name, cls=Command, epilog=epilog)

    def made(function: F) -> F:
        if verb is not None:
            _take(function, declared(verb, function.__name__), more.split())
        return registered(function)

    return made


def _take(function: Callable[..., None], verb: Declaration, more: list[str]) -> None:
    """Give a function of keywords the options of a verb, and its words where it has none of its own."""
    flags = {name: flag_of(name) for name in verb.arguments}

    def with_flags(text: str) -> str:
        return re.sub("`([^`]+)`", lambda word: flags.get(word[1], word[1]), text)

    options = {}
    for name, argument in verb.arguments.items():
        metavar = METAVARS.get(name, BY_KIND[argument.kind]) + "S" * argument.in_commas
        about = argument.about[:1].upper() + argument.about[1:] + " Repeatable." * argument.repeatable
        default = ... if argument.default is REQUIRED else argument.default
        made, least = rare if name in more else option, None if argument.kind is bool else LEAST.get(name)
        shown = made(f"{flags[name]} {metavar}".strip(), with_flags(about), default, min=least)
        options[name] = argument.annotation, shown
    own = inspect.signature(function).parameters.values()
    mine = {each.name: (each.annotation, each.default) for each in own if each.kind is not each.VAR_KEYWORD}
    signed(function, options | mine, function.__doc__ or with_flags(verb.about))


def option(spelling: str, help: str, default: Any = ..., **more: Any) -> Any:
    """An option as its help shows it, e.g. `--budget AMOUNT`; without a default it must be given.

    Args:
        more: anything else that `typer.Option` takes, e.g. `min`.
    """
    flag, _, metavar = spelling.partition(" ")
    return typer.Option(default, flag, metavar=metavar or None, help=help, **more)


def rare(spelling: str, help: str, default: Any = ..., **more: Any) -> Any:
    """An option that most people leave alone; it stands under MORE."""
    return option(spelling, help, default, rich_help_panel=MORE, **more)


def _version(show: bool) -> None:
    if show:
        print(grasp.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options that belong to no command."""
