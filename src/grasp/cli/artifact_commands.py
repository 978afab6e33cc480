"""Commands that build and inspect artifacts: grasp build, info, verify."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import grasp
from grasp.cli.app import command, option, rare
from grasp.cli.console import program
from grasp.cli.options import Assignments, ConfigFile, RayHost, cluster_spec, merge_settings
from grasp.errors import SettingsError
from grasp.progress_display import Watch
from grasp.text import TRUNCATED, json_text, size_text, skipped_lines, skipped_text
from grasp.yaml_files import get_setting

if TYPE_CHECKING:
    from grasp.artifact.reader import ArtifactReader


@command(
    "grasp build --train new --model ./ckpt --corpus corpus.parquet --targets sciq,openbookqa --out art",
    "grasp build --train new --model gpt2 --corpus posts.jsonl --text-column body --targets exam.jsonl --out art",
    "grasp build --train further --model ./chat-model --corpus chats.jsonl --targets held-out-chats.jsonl --out art",
    "grasp build --train further --loss dpo --model ./ckpt --corpus pairs.jsonl --targets exam.jsonl --out art",
    "grasp build --replay --recipe sft.yaml --out art",
    "grasp build --resume --out art",
    "grasp build --config art/run.yaml --out s3://bucket/art",
    verb="grasp.pipeline.build",
    more="resume untrained tokenizer keep_features like rule replay warm_up recipe",
    python="id_column dtype",
)
def build(
    out: str = option("--out DIR", "Directory for the artifact, or a URL such as s3://bucket/art."),
    targets: list[str] = option(
        "--targets NAMES",
        "Tasks (sciq, ...) or files of questions (exam.jsonl with question and answer, or prompt and completion, on "
        "each line) that the model should perform well, separated by commas. Repeatable. For multiple choice, "
        "NAME@margin compares the right answer with the wrong ones.",
        [],
    ),
    forecast: bool = option(
        "--forecast", "Only estimate rows, time, memory and disk space, and report errors in advance.", False
    ),
    add_target: str | None = rare("--add-target NAMES", "Add targets to a finished artifact.", None),
    settings: ConfigFile = None,
    assign: Assignments = [],
    ray: RayHost = None,
    workers: int | None = rare(
        "--workers N", "Workers of the cluster. Default: one per GPU, or one per core without GPUs.", None, min=1
    ),
    **params: Any,
) -> None:
    from grasp.pipeline.add_targets import add_targets
    from grasp.pipeline.build import build as run
    from grasp.pipeline.build_plan import argument_settings
    from grasp.targets.load import split_names

    resume, untrained, replay, recipe = (params.pop(name) for name in ("resume", "untrained", "replay", "recipe"))
    warm_up = params.pop("warm_up")
    names = [name for text in targets for name in split_names(text)]
    flags = argument_settings(params) | {"targets.names": names or None}
    data = merge_settings(settings, assign, flags)
    idle = {"--ray": ray, "--workers": workers, "--resume": resume}
    if add_target is not None:
        idle |= {"--untrained": untrained, "--warm-up": warm_up, "--replay": replay, "--recipe": recipe}
        _refuse_idle(idle, "--add-target, which runs in this process on a finished artifact")
        with Watch() as watch:
            source = add_targets(out, add_target, settings=data, progress=watch)
        outcome = {
            "kept features": f"added {add_target} from the stored features",
            "pass": f"added {add_target} by a pass over the corpus",
            "there already": f"{add_target} already exists with the same units; nothing to do",
        }
        print(f"{out}: {outcome[source]}; targets: {', '.join(grasp.open(out).targets)}")
        return
    if forecast:
        _refuse_idle(idle, "--forecast, which looks at the first rows in this process")
        from grasp.pipeline.forecast import forecast as estimate

        trainings: dict[str, Any] = {"replay": replay, "warm_up": warm_up, "recipe": recipe}
        with Watch() as watch:
            print(estimate(out, data, untrained=untrained, progress=watch, **trainings))
        return
    if ray is None and workers:
        raise SettingsError("--workers: no effect without --ray; add --ray local")
    spec = cluster_spec(ray, workers, get_setting(data, "model.threads"))
    with Watch() as watch:
        artifact = run(
            out=out,
            settings=data,
            resume=resume,
            untrained=untrained,
            replay=replay,
            warm_up=warm_up,
            recipe=recipe,
            cluster=spec,
            progress=watch,
        )
    _print_summary(out, artifact)


def _refuse_idle(flags: dict[str, Any], reason: str) -> None:
    """Raise an error if options are given that have no effect with other ones."""
    idle_flags = [flag for flag, value in flags.items() if value]
    if idle_flags:
        raise SettingsError(f"{', '.join(idle_flags)}: no effect with {reason}")


def _print_summary(out: str, artifact: "ArtifactReader") -> None:
    """Print the size of a new artifact, its skipped rows, and a command to continue with."""
    from grasp.artifact.inspection import UNFINISHED_REPLAY
    from grasp.artifact.manifest import REPLAY
    from grasp.artifact.rows import MIN_RELIABLE_TOKENS, row_lengths

    manifest, n_bytes = artifact.manifest, sum(entry.bytes for entry in artifact.manifest.files.values())
    print(
        f"{out}: {artifact.n_rows:,} rows x {sum(manifest.targets.values()):,} units ({', '.join(manifest.targets)}), "
        f"{size_text(n_bytes)}, {n_bytes / artifact.n_rows:,.0f} bytes per row"
    )
    for record in manifest.replays:
        print(record)
    if (artifact.path / REPLAY).exists():
        print(UNFINISHED_REPLAY)
    counts, n_documents = manifest.skipped["rows"]["counts"], manifest.details["n_documents"]
    if left_out := {reason: count for reason, count in counts.items() if reason not in TRUNCATED}:
        print(f"left out: {skipped_text(left_out)} (listed in {out}/manifest.json)")
    truncated = {reason: count for reason, count in counts.items() if reason in TRUNCATED}
    for line in skipped_lines(truncated, {}, "truncated", n_documents):
        print(line)
    score = ["score", out, "--target", next(iter(manifest.targets)), "--top", "10"]
    if (row_lengths(artifact) >= MIN_RELIABLE_TOKENS).sum() >= 10:
        score += ["--min-tokens", str(MIN_RELIABLE_TOKENS)]
    if not Watch.quiet:
        print(f"next: {program()} {shlex.join(score)}")


@command("grasp info art")
def info(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of an artifact or a scorer."),
    as_json: bool = option("--json", "Print JSON.", False),
) -> None:
    """Describe an artifact or a scorer."""
    from grasp.artifact.inspection import info as describe
    from grasp.file_readers import claimed

    claim = claimed("output", path)
    summary = describe(path) if claim is None else claim.reader.read(path)
    print(json_text(summary.to_dict()) if as_json else summary)


@command("grasp verify art")
def verify(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of an artifact or a scorer."),
) -> None:
    """Verify the checksum of every file of an artifact or a scorer.

    The exit code is 1 if a file is broken; all broken files are listed.
    """
    from grasp.artifact.inspection import verify as check
    from grasp.errors import ArtifactError
    from grasp.file_readers import claimed

    if (claim := claimed("output", path)) is not None:
        try:
            claim.reader.verify(path)
        except ArtifactError as err:
            print(f"broken: {err}")
            raise typer.Exit(code=1) from err
        print(f"{path}: {claim.name}, all files intact")
        return
    with Watch() as watch:
        watch.stage("verifying", rows=None, tokens=None)
        report = check(path)
    for file, damage in report.problems.items():
        print(f"broken: {file}: {damage}")
    verdict = "all files intact" if report.ok else f"{len(report.problems)} broken"
    print(f"{report.path}: artifact, {report.n_files:,} files, {size_text(report.n_bytes)}: {verdict}")
    if not report.ok:
        raise typer.Exit(code=1)
