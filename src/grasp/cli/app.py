"""The commands. Heavy modules are imported inside them, so that `grasp --help` is quick and loads no torch."""

import typer

import grasp

app = typer.Typer(
    name="grasp",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=(
        "Predict what a model would gain or lose if part of its training corpus were kept, dropped or re-weighted, "
        "from one forward pass and without retraining."
    ),
    epilog="Start with: grasp demo",
)


def _version(show: bool) -> None:
    if show:
        print(grasp.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options that belong to no command."""
