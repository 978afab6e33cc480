"""grasp build"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from grasp.cli.app import command
from grasp.cli.options import cluster, merged, names, require
from grasp.cli.progress import Watch
from grasp.errors import SettingsError
from grasp.settings import (
    CODE,
    BuildSettings,
    build_settings,
    put,
    read_yaml,
    take,
    target_settings,
    without_foreign_code,
)
from grasp.text import size_text, skipped_text

if TYPE_CHECKING:
    from grasp.artifact.inspection import ArtifactInfo
    from grasp.extract.cluster import ClusterSpec

REQUIRED = {
    "--model": ("model.path",),
    "--corpus": ("corpus.path",),
    "--targets": ("targets.names", "targets.datasets"),
}


# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp build --model ./ckpt --corpus corpus.parquet --targets sciq,openbookqa --out art
  grasp build --out art --resume --engine ray --workers 8
  grasp build --config run.yaml --out s3://bucket/art
  grasp build --model ./vit --set model.classifier.head=classifier --corpus images.parquet --targets trusted.parquet \\
              --out art
"""


@command(EXAMPLES)
def build(
    out: Path = typer.Option(..., "--out", help="Directory of the artifact, or a URL such as s3://bucket/art."),
    model: str | None = typer.Option(
        None, "--model", help="Hugging Face checkpoint, or a classifier's file of weights."
    ),
    corpus: str | None = typer.Option(
        None, "--corpus", help="Parquet, JSONL, a directory (of images: a folder a class), URL."
    ),
    targets: str | None = typer.Option(None, "--targets", help="Tasks or files of units, separated by commas."),
    config: Path | None = typer.Option(None, "--config", help="YAML file of settings; a run.yaml replays a build."),
    assign: list[str] = typer.Option([], "--set", help="One setting, e.g. --set features.tau=0.02; repeatable."),
    max_length: int | None = typer.Option(None, "--max-length", help="Longest row, in tokens."),
    match: str | None = typer.Option(None, "--match", help="Relevance kernels: pooled, token or both."),
    dtype: str | None = typer.Option(None, "--dtype", help="float32, bfloat16 or float16."),
    resume: bool = typer.Option(False, "--resume", help="Go on with a build that was cut off."),
    add_target: str | None = typer.Option(None, "--add-target", help="Add targets to a finished artifact."),
    keep_features: bool | None = typer.Option(
        None, "--keep-features/--no-keep-features", help="Keep features, so that targets can be added without a pass."
    ),
    engine: str = typer.Option("local", "--engine", help="local: this process; ray: workers of a Ray cluster."),
    workers: int | None = typer.Option(
        None, "--workers", min=1, help="Workers of the cluster; none: one for each GPU, or each core where it has none."
    ),
    address: str | None = typer.Option(
        None, "--address", help="Ray cluster, e.g. auto or head:6379; none: one is started on this machine."
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Plain lines instead of a progress bar."),
) -> None:
    """Run the model once over a corpus and write an artifact.

    The model is a causal LM, or an image classifier if its output layer is named: --set model.classifier.head=NAME.

    A build that was cut off goes on with --resume, on one machine or on a cluster, whatever it was begun on.
    """
    flags = {
        "model.path": model,
        "model.dtype": dtype,
        "corpus.path": corpus,
        "corpus.max_length": max_length,
        "targets.names": names(targets),
        "features.match": match,
        "keep_features": keep_features,
    }
    from grasp.artifact.remote import IN_PROCESS, local_path, remote_url, staging_directory

    out = local_path(out)

    if add_target is not None:
        if engine != "local":
            raise SettingsError(f"--engine: got {engine} with --add-target, which runs in this process; leave it out")
        if remote_url(out) is not None:
            raise SettingsError(f"--out: got {out} with --add-target, which changes an artifact on this machine only")
        _add(out, add_target, merged(config, assign, flags), quiet)
        return
    url = remote_url(out)
    if url is not None and url.partition(":")[0] in IN_PROCESS:
        raise SettingsError(f"--out: got {url}, which ends with this process; choose a directory or an object store")
    replay = (out if url is None else staging_directory(url)) / "run.yaml"
    data, found = merged(config, assign, flags), None
    if config is None and resume and replay.exists():
        found = without_foreign_code(read_yaml(replay), str(replay), data)
        data = merged(found, assign, flags)
    require(data, REQUIRED, f"build --resume: there is no {replay}" if resume and found is None else "build")
    settings = build_settings(data)
    if engine == "local" and workers is not None:
        raise SettingsError(f"--workers: got {workers}, which has no meaning without --engine ray; leave it out")
    spec = cluster(engine, workers, address, settings.model.threads)
    if url is None:
        _say(_run(settings, out, resume, quiet, spec), str(out))
    else:
        _run_remote(settings, url, resume, quiet, spec)


def _run_remote(settings: BuildSettings, url: str, resume: bool, quiet: bool, spec: "ClusterSpec | None") -> None:
    """Build on this machine's disk, then publish: who reads the URL sees a whole artifact or none."""
    from grasp.artifact.remote import discard_staging, is_published, publish_artifact, staging_directory

    if is_published(url):
        if not resume:
            raise SettingsError(f"--out: a complete artifact lies at {url}; choose another place, or delete it")
        print(f"{url}: was complete already; corpus and model were not read again")
        return
    local = staging_directory(url)
    done = _run(settings, local, resume, quiet, spec)
    publish_artifact(local, url)
    discard_staging(url)
    _say(done, url)


def _run(settings: BuildSettings, out: Path, resume: bool, quiet: bool, spec: "ClusterSpec | None") -> "ArtifactInfo":
    from grasp.artifact.inspection import info
    from grasp.extract.local import build as build_artifact
    from grasp.extract.ray_engine import RayEngine

    engine = None if spec is None else RayEngine(spec)
    complete = resume and (out / "manifest.json").exists()
    with Watch(quiet=quiet) as watch:
        build_artifact(settings, out, resume=resume, progress=watch, engine=engine)
    if complete:
        print(f"{out}: was complete already; corpus and model were not read again")
    return info(out)


def _say(done: "ArtifactInfo", where: str) -> None:
    """What was built and what to do with it; `where` is what the user calls it."""
    units = sum(done.targets.values())
    print(
        f"{where}: {done.n_rows:,} rows x {units:,} units ({', '.join(done.targets)}), "
        f"{size_text(done.bytes_total)}, {done.bytes_per_row:,.0f} bytes a row"
    )
    if done.skipped["rows"]["counts"]:
        print(f"left out: {skipped_text(done.skipped['rows']['counts'])} (listed in {where}/manifest.json)")
    score = ["grasp", "score", where, "--target", next(iter(done.targets)), "--top", "10"]
    print(f"next: {shlex.join(score)}")


def _add(out: Path, add_target: str, data: dict[str, Any], quiet: bool) -> None:
    from grasp.artifact.reader import Artifact
    from grasp.extract.extend import add_target as add_targets

    code: dict[str, Any] = {}
    for name in CODE:  # the user's own word for what is run
        if value := take(data, name):
            put(code, name, value)
    given = data.pop("targets", {})
    if data or not isinstance(given, dict) or "names" in given:
        raise SettingsError(
            f"--add-target: got {', '.join(sorted(data)) or 'targets'} as well; a target is added with the artifact's "
            "own settings, of which targets.max_length and the like can be changed with --set, and no other"
        )
    old = Artifact.open(out).manifest.settings["targets"]
    settings = target_settings({**old, "datasets": [], **given, "names": names(add_target)})
    with Watch(quiet=quiet) as watch:
        source = add_targets(out, settings, own=code, progress=watch)
    done = {
        "kept features": f"added {add_target} from the features that were kept",
        "pass": f"added {add_target} by a pass over the corpus",
        "there already": f"{add_target} is there already, with the same units; nothing was done",
    }
    print(f"{out}: {done[source]}; targets now: {', '.join(Artifact.open(out).targets)}")
