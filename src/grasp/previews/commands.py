"""The commands `grasp corpus` and `grasp targets`: parse options, call a function, print the result."""

from typing import Annotated, Any

import typer

import grasp
from grasp.cli.app import command, option
from grasp.cli.options import Assignments, merge_settings
from grasp.errors import SettingsError

commands = typer.Typer()  # the entry point of the group `grasp.commands`

PreviewModel = Annotated[
    str | None, option("--model DIR", "Model whose tokenizer divides texts into tokens. Default: none are counted.")
]


def _print_preview(group: str, assign: list[str], flags: dict[str, Any], **options: Any) -> None:
    """Print the preview of a corpus or of targets: `group` is that of the settings, `options` are of the function."""
    from grasp.settings import CorpusSettings, ModelSettings, TargetSettings
    from grasp.yaml_files import require_flags, validated

    preview: Any = {"corpus": grasp.preview_corpus, "targets": grasp.preview_targets}[group]
    settings_class: Any = {"corpus": CorpusSettings, "targets": TargetSettings}[group]
    data = merge_settings(None, assign, flags)
    if idle := sorted(data.keys() - {group, "model"}):
        raise SettingsError(f"--set {idle[0]}: no effect on a preview, which reads settings of {group} and model")
    model = data.get("model", {})
    if isinstance(model, dict) and model.keys() <= {"tokenizer"}:
        options["tokenizer"] = validated(ModelSettings, {"path": "", **model}, "model").tokenizer
    else:
        require_flags(data, {"--model": "model.path"}, "--set model")
        options["model"] = validated(ModelSettings, model, "model")
    print(preview(validated(settings_class, data[group], group), **options))


@command(
    "grasp corpus web.jsonl.gz",
    "grasp corpus chats.json --model ./ckpt",
    name="corpus",
    group=commands,
    verb="grasp.previews.preview",
    python="tokenizer",
)
def preview_corpus(
    corpus: str = typer.Argument(..., metavar="FILE", help="Corpus: a file, directory, URL or hub dataset."),
    model: PreviewModel = None,
    assign: Assignments = [],
    **params: Any,
) -> None:
    """Show what a build would read of a corpus.

    Prints rows, labels, columns and records left out, and examples. Labels are listed with the option of grasp predict
    that predicts by them. The model is not run, and nothing is written.
    """
    _print_preview("corpus", assign, {"corpus.path": corpus, "model.path": model}, **params)


@command("grasp targets sciq", "grasp targets quiz.jsonl@margin --model ./ckpt", group=commands)
def targets(
    names: list[str] = typer.Argument(
        ..., metavar="NAMES", help="Tasks, or files of questions; NAME@margin for multiple choice."
    ),
    model: PreviewModel = None,
    assign: Assignments = [],
) -> None:
    """Show what a build would read of targets.

    Prints the number of units and of tokens with loss, and examples as the model sees them. The model is not run, and
    nothing is written.
    """
    from grasp.targets.load import split_names

    split = [name for text in names for name in split_names(text)]
    _print_preview("targets", assign, {"targets.names": split, "model.path": model})
