"""The commands `grasp fit-head` and `grasp detect`: parse options, call a function, print the result."""

import shlex
from pathlib import Path
from typing import Any

import typer

import grasp
from grasp.cli.app import command, option
from grasp.cli.console import check_outputs
from grasp.cli.options import Art, Assignments, ConfigFile, merge_settings
from grasp.errors import SettingsError
from grasp.progress_display import Watch
from grasp.text import plain, skipped_text
from grasp.vision.settings import FitSettings
from grasp.yaml_files import require_flags, validated

commands = typer.Typer()  # the entry point of the group `grasp.commands`

REQUIRED = {"--model": "model.path", "--corpus": "corpus.path", "--head": "model.classifier.head"}
MAX_LISTED = 20  # names of unusable images that are printed


@command(
    "grasp fit-head --model resnet18.pth --factory torchvision.models:resnet18 --head fc \\\n"
    "               --corpus images.parquet --out head.safetensors",
    "grasp fit-head --model net.pth --factory net.py:Net --head fc --corpus photos/ --out head.safetensors",
    "grasp fit-head --model ./vit --head classifier --corpus photos/ --out head.safetensors",
    group=commands,
    section="Build artifacts",
)
def fit_head(
    out: Path = option("--out FILE", "File of the fitted head, .safetensors."),
    model: str | None = option("--model PATH", "Checkpoint of an image classifier, or file of weights.", None),
    factory: str | None = option("--factory NAME", "Factory of the module: package.module:name or FILE.py:name.", None),
    head: str | None = option("--head NAME", "Dotted name of the linear output layer to replace.", None),
    corpus: str | None = option("--corpus PATH", "Parquet, JSONL, or a directory with one folder per class.", None),
    config: ConfigFile = None,
    assign: Assignments = [],
) -> None:
    """Fit the output layer of a classifier to images.

    Needed if the model was not trained on the classes of the corpus. Then build with
    --set model.classifier.fitted_head=FILE.
    """
    if out.suffix != ".safetensors":
        raise SettingsError(f"--out: got {out}, expected the name of a .safetensors file")
    flags = {
        "model.path": model,
        "model.classifier.factory": factory,
        "model.classifier.head": head,
        "corpus.path": corpus,
    }
    data = merge_settings(config, assign, flags)
    require_flags(data, REQUIRED, "fit-head")
    settings = validated(FitSettings, data, "settings")
    read = {"is the corpus": settings.corpus.path, "is the model": settings.model.path, "--config reads": config}
    check_outputs({"--out": out}, read)
    from grasp.vision.fit_head import fit_head as fit

    with Watch() as watch:
        result = fit(settings.model, settings.corpus, out, progress=watch)
    print(
        f"{out}: {len(result.classes)} classes, fitted to {result.n_images:,} images: accuracy on them "
        f"{result.accuracy:.1%}, loss {result.loss:.3f} nats"
    )
    for reason, count in result.skipped.counts.items():
        listed = [plain(name) for name in result.skipped.ids[reason][:MAX_LISTED]]
        more = f" and {count - len(listed):,} more" if count > len(listed) else ""
        print(f"left out: {skipped_text({reason: count})}: {', '.join(listed)}{more}")
    print(f"next: grasp build --set {shlex.quote(f'model.classifier.fitted_head={out}')} ...")


@command(
    "grasp detect art --target trusted --top 20 --out suspects.parquet",
    "grasp detect art --target trusted --out suspects.html",
    verb="grasp.vision.detect",
    group=commands,
    section="Find suspicious rows",
    more="match",
)
def detect(
    art: Art,
    out: Path | None = option("--out FILE", "Write the table as .parquet or .csv, or the first rows as .html.", None),
    **params: Any,
) -> None:
    artifact = grasp.open(art).files
    is_page = out is not None and out.suffix == ".html"
    check_outputs({"--out": out}, artifact=artifact, tables=[] if is_page else ["--out"])
    from grasp.vision.detect import detect as find_suspects

    with Watch() as watch:
        suspects = find_suspects(artifact, **params, progress=watch)
    print(suspects)
    if out is not None:
        print(f"{suspects.write(out)}: {len(suspects):,} rows")
