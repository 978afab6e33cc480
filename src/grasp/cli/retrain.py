"""grasp retrain"""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from grasp.cli.app import command
from grasp.cli.options import cluster, merged, names, require
from grasp.cli.progress import Watch
from grasp.settings import RetrainSettings, Settings, retrain_settings

if TYPE_CHECKING:
    from grasp.runs.environment import Environment

REQUIRED = {"--corpus": ("corpus.path",), "--targets": ("targets.names", "targets.datasets")}
# \b keeps the lines of the epilog as they are.
EXAMPLES = """\b
Examples:
  grasp retrain --corpus corpus.parquet --targets sciq --family mixture:topic -B 64 --seeds 2 --out env
  grasp retrain --out env --resume
  grasp retrain --out env --resume --engine ray --workers 16 --address auto
"""


@command(EXAMPLES)
def retrain(
    out: Path = typer.Option(..., "--out", help="Directory of the environment; several processes may share it."),
    corpus: str | None = typer.Option(None, "--corpus", help="Parquet, JSONL(.gz/.zst), a directory, or a URL."),
    targets: str | None = typer.Option(None, "--targets", help="Tasks or JSONL files, separated by commas."),
    recipe: str | None = typer.Option(None, "--recipe", help="Training recipe: tiny, small or paper-50m."),
    family: str | None = typer.Option(None, "--family", help="Draw uniform:F, bernoulli:Q, mixture:L or groups:L."),
    count: int | None = typer.Option(None, "-B", min=1, help="Subsets drawn from the family."),
    seeds: int | None = typer.Option(None, "--seeds", min=1, help="Training seeds a subset: 0, 1, ..."),
    role: str | None = typer.Option(None, "--role", help="dev: protocols may be selected on it; or held-out."),
    config: Path | None = typer.Option(None, "--config", help="YAML file of settings; a run.yaml replays a run."),
    assign: list[str] = typer.Option([], "--set", help="One setting, e.g. --set overrides.steps=500; repeatable."),
    workers: int | None = typer.Option(
        None, "--workers", min=1, help="Processes that fill it; none: one, or on a cluster one for each GPU, or core."
    ),
    stack: int | None = typer.Option(None, "--stack", min=1, help="Models that a worker trains as one program."),
    engine: str = typer.Option(
        "local", "--engine", help="local: processes here; ray: of a Ray cluster whose nodes all reach --out."
    ),
    address: str | None = typer.Option(
        None, "--address", help="Ray cluster, e.g. auto or head:6379; none: one is started on this machine."
    ),
    resume: bool = typer.Option(False, "--resume", help="Go on with the settings of the run.yaml that is there."),
    quiet: bool = typer.Option(False, "--quiet", help="Plain lines instead of a progress bar."),
) -> None:
    """Train a model on each of many subsets, and score it.

    Gives the utilities that predictions are tested against, and the reference models of the whole corpus. What is
    finished is never trained again: the same command, or --resume, goes on after a kill.
    """
    flags = {
        "corpus.path": corpus,
        "targets.names": names(targets),
        "recipe": recipe,
        "family": family,
        "n_subsets": count,
        "seeds": None if seeds is None else list(range(seeds)),
        "role": role,
        "workers": workers,
        "stack": stack,
    }
    replay = out / "run.yaml"
    if config is None and resume and replay.exists():
        config = replay
    data = merged(config, assign, flags)
    require(data, REQUIRED, f"retrain --resume: there is no {replay}" if resume and config is None else "retrain")
    settings = retrain_settings(data)
    from grasp.runs.retrain import fitted_lengths
    from grasp.runs.retrain import retrain as run

    settings = fitted_lengths(settings)
    spec = cluster(engine, settings.workers, address, settings.threads)
    with Watch(quiet=quiet) as watch:
        environment = run(settings, out, watch.runs, cluster=spec)
    _print_done(environment, settings)


def _print_done(environment: "Environment", settings: RetrainSettings) -> None:
    info, out = environment.info, environment.path
    per_target = ", ".join(f"{name} ({len(target.unit_ids)} units)" for name, target in info.targets.items())
    print(
        f"{out}: {info.role}, recipe {info.recipe}, {len(info.subset_ids)} subsets x {len(info.seeds)} seeds of "
        f"{info.n_rows:,} rows: {per_target}"
    )
    build = ["--model", str(out / info.checkpoint), "--corpus", settings.corpus.path]
    build += ["--targets", ",".join(settings.targets.names)] if settings.targets.names else []
    build += [*_changed("corpus", settings.corpus), *_changed("targets", settings.targets), "--out", "art"]
    print(f"next: grasp build {shlex.join(build)}")
    print(f"then: grasp evaluate art --environment {shlex.quote(str(out))}")


def _changed(group: str, settings: Settings) -> list[str]:
    """What a build must be told for the same rows and units, beside path and names."""
    data, fields = settings.model_dump(mode="json"), type(settings).model_fields
    other = [name for name in data if name not in ("path", "names") and getattr(settings, name) != fields[name].default]
    return [part for name in other for part in ("--set", f"{group}.{name}={json.dumps(data[name])}")]
