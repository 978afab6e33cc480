"""The Typer application: how commands are registered, grouped and documented.

Most commands call a public function of the same name. The decorator `command` turns the arguments of that function into
options of the command, with help texts from its docstring (see `grasp.signatures`), so both have one documentation.

`--help` groups commands by task and lists rarely used options under "More options". Help is plain text, the same on a
terminal and in a pipe. Commands import heavy modules in their bodies, so that help is fast. Start with `command`.
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
from grasp.signatures import REQUIRED, Signature, parse_signature, signed

# Commands by group, in the order of `grasp --help`.
GROUPS = {
    "Build artifacts": ("corpus", "targets", "build", "merge", "info", "verify"),
    "Predict the effect of rows and slices": ("score", "predict", "explain", "report", "serve"),
    "Select training data": ("select", "mix"),
    "Evaluate predictions": ("check-selection", "retrain", "runs", "evaluate", "methods"),
}
OPTIONS_AS_COMMANDS = {  # what is looked for as a command
    "add-target": "grasp build --add-target NAMES --out ART",
    "export": "grasp select ART --budget 20% --export DIR",
}
OTHER_COMMANDS = "Other commands"  # group of commands of other packages that name none
QUIET, NOTES = "--quiet", "--notes"  # options of all commands
OPTIONS = "Options"
MORE_OPTIONS = "More options"


def _help_records(context: Any, parameters: Iterable[Any]) -> list[tuple[str, str]]:
    """Return the name and the help text of every parameter that is not hidden.

    Typer writes the type of an argument after its name, `ART <str>`; it is removed.
    """
    records = (parameter.get_help_record(context) for parameter in parameters)
    return [(re.sub(r" <.*>$", "", record[0]), record[1]) for record in records if record is not None]


# commands that continue from the finished parts of their output
RESUMABLE = ("demo", "build", "apply", "retrain", "check-selection")


class Command(TyperCommand):
    """A command with a section for rarely used options; Ctrl-C prints what was saved."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; every command accepts --quiet and --notes."""
        if QUIET in args:
            from grasp.progress_display import Watch

            Watch.quiet = True
        if NOTES in args:
            from grasp.results import Result

            Result.all_notes = True
        return super().parse_args(ctx, [argument for argument in args if argument not in (QUIET, NOTES)])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; if it is interrupted, print whether its work is kept."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            resumable = "finished parts are kept; run the same command again to resume"
            state = resumable if self.name in RESUMABLE else "results are written only when complete; nothing was saved"
            print(f"stopped: {state}", file=sys.stderr)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, without the braces that Typer writes around required arguments."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of the help below its text: arguments, options, more options."""
        parameters = self.get_params(ctx)
        options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
        rare_options = [option for option in options if getattr(option, "rich_help_panel", None) == MORE_OPTIONS]
        parameters_by_section = {
            "Arguments": [parameter for parameter in parameters if parameter.param_type_name == "argument"],
            OPTIONS: [option for option in options if option not in rare_options],
            MORE_OPTIONS: rare_options,
        }
        for title, members in parameters_by_section.items():
            if records := _help_records(ctx, members):
                with formatter.section(title):
                    formatter.write_dl(records)


class CommandGroups(TyperGroup):
    """The list of commands, grouped by task."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; name the option that does what a missing command is expected to do."""
        if args[0] in OPTIONS_AS_COMMANDS:
            ctx.fail(f"No such command {args[0]!r}. Use: {OPTIONS_AS_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of every group, then the options."""
        width = max(map(len, self.commands))
        groups = {group: [name for name in names if name in self.commands] for group, names in GROUPS.items()}
        listed = {name for names in GROUPS.values() for name in names}
        for name, further in self.commands.items():  # of other packages
            if name not in listed:
                groups.setdefault(getattr(further, "rich_help_panel", None) or OTHER_COMMANDS, []).append(name)
        for group, command_names in groups.items():
            with formatter.section(group):
                formatter.write_dl(
                    [(name.ljust(width), self.commands[name].get_short_help_str(80)) for name in command_names]
                )
        with formatter.section(OPTIONS):
            formatter.write_dl(_help_records(ctx, self.get_params(ctx)))


app = typer.Typer(
    name="grasp",
    cls=CommandGroups,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=(
        "Predict how a model's results on a task change if a part of its training corpus is kept, dropped or "
        "re-weighted, without retraining."
    ),
    epilog=(
        "Start with: grasp demo. More about a command: grasp COMMAND --help. "
        "Every command accepts --quiet, no progress and no notes on standard error, and --notes, all notes on a result."
    ),
)


F = TypeVar("F", bound=Callable[..., None])

# The option of an argument of a public function, if it is not `--name`.
FLAGS = {"count": "-B", "columns": "--weights", "tolerance": "--within"}
FLAGS |= {"keep_features": "--keep-features/--no-keep-features"}
# The placeholder of the option's value in the help, if it is not that of `METAVAR_BY_TYPE`.
METAVARS = {
    name: metavar
    for metavar, arguments in {
        "EXPR": "drop keep where exclude_where",
        "EXPR:NUMBER": "weight",
        "LABEL": "by label clean",
        "ID": "unit row",
        "AMOUNT": "budget",
        "[VALUE:]AMOUNT": "floor cap",
        "SHARE": "distance false_positives",
        "TIMES": "max_repeat",
        "N": "train_tokens planned_tokens params tokens",
        "RULE": "documents",
        "ROLE": "role",
        "SIZE": "size",
        "MEASURE": "measure",
        "COLUMN": "text_column id_column",
        "PATTERN": "columns metrics higher lower",
        "FILE": "source_tokens",
        "PATH": "corpus",
        "DIR": "out runs development checkpoints model tokenizer monitor",
        "further|new": "train",
        "ART": "like",
    }.items()
    for name in arguments.split()
}
METAVAR_BY_TYPE = {str: "NAME", int: "N", float: "X", bool: "", Path: "FILE"}
# The smallest accepted value of an option.
MINIMUM = {"resamples": 10} | dict.fromkeys(("top", "bottom", "min_tokens", "seed", "explain", "cautious"), 0)
MINIMUM |= dict.fromkeys(("count", "seeds", "workers", "limit"), 1)


def flag_of(name: str) -> str:
    """Return the option of a function's argument, e.g. `--min-tokens`."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def command(
    *examples: str,
    epilog: str = "",
    name: str | None = None,
    group: typer.Typer = app,
    section: str | None = None,
    verb: str | None = None,
    more: str = "",
    python: str = "",
) -> Callable[[F], F]:
    """Register a function as a command.

    Args:
        examples: command lines that the help shows.
        epilog: text below the examples.
        name: name of the command. Default: that of the function.
        group: the application, a group of commands in it, or the application of another package.
        section: section of `grasp --help` that lists a command of another package.
        verb: module of the public function of the same name. Its arguments become options of the command, which
            are passed to the decorated function as keywords; parameters of the decorated function override them.
        more: arguments of the public function that are listed under "More options".
        python: arguments of the public function that have no option.
    """
    lines = [f"  {line}" for example in examples for line in example.split("\n")]
    # \b tells Click not to rewrap the lines that follow
    text = "\n".join(["\b", "Examples:" if len(examples) > 1 else "Example:", *lines, epilog])
    register = group.command(name, cls=Command, epilog=text, rich_help_panel=section)

    def decorate(function: F) -> F:
        if verb is not None:
            _add_options(function, parse_signature(verb, function.__name__), more.split(), python.split())
        return register(function)

    return decorate


def _add_options(function: Callable[..., None], verb: Signature, more: list[str], python: list[str]) -> None:
    """Replace `**params` in the signature of a function by the options of a public function.

    Typer reads the options of a command from its signature. A function without docstring gets that of `verb`.
    """
    flags = {name: flag_of(name) for name in verb.arguments}

    def with_flags(text: str) -> str:
        """Write arguments in backquotes as options: `min_tokens` becomes --min-tokens."""
        return re.sub("`([^`]+)`", lambda word: flags.get(word[1], word[1]), text)

    options = {}
    for name, argument in verb.arguments.items():
        if name in python:
            continue
        metavar = METAVARS.get(name, METAVAR_BY_TYPE[argument.kind]) + "S" * argument.in_commas
        help_text = argument.about[:1].upper() + argument.about[1:] + " Repeatable." * argument.repeatable
        default = ... if argument.default is REQUIRED else argument.default
        declare = rare if name in more else option
        minimum = None if argument.kind is bool else MINIMUM.get(name)
        declaration = declare(f"{flags[name]} {metavar}".strip(), with_flags(help_text), default, min=minimum)
        options[name] = argument.annotation, declaration
    parameters = inspect.signature(function).parameters.values()
    overrides = {
        parameter.name: (parameter.annotation, parameter.default)
        for parameter in parameters
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    signed(function, options | overrides, function.__doc__ or with_flags(verb.about))


def option(spelling: str, help: str, default: Any = ..., **typer_arguments: Any) -> Any:
    """Declare an option.

    Args:
        spelling: the option as the help shows it, e.g. `--budget AMOUNT`.
        help: its help text.
        default: its default; without one, the option is required.
        typer_arguments: further arguments of `typer.Option`, e.g. `min`.
    """
    flag, _, metavar = spelling.partition(" ")
    return typer.Option(default, flag, metavar=metavar or None, help=help, **typer_arguments)


def rare(spelling: str, help: str, default: Any = ..., **typer_arguments: Any) -> Any:
    """Declare a rarely used option, listed under "More options"; see `option`."""
    return option(spelling, help, default, rich_help_panel=MORE_OPTIONS, **typer_arguments)


def _print_version(requested: bool) -> None:
    """Print the version and exit, if --version was given."""
    if requested:
        print(grasp.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Options that belong to no command."""
