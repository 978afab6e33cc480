"""Start: grasp demo, build, merge, info, verify."""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import grasp
from grasp.cli.app import command, option, rare
from grasp.cli.console import program, show
from grasp.cli.options import Address, Assignments, ConfigFile, OwnSettings, Quiet, cluster, merged
from grasp.cli.progress_display import Watch
from grasp.errors import SettingsError
from grasp.text import json_text, size_text, skipped_text
from grasp.yaml_files import leaf

if TYPE_CHECKING:
    from grasp.artifact.inspection import ArtifactInfo


@command("grasp demo --out demo-out")
def demo(
    out: Path = option("--out DIR", "Directory for everything the demo makes.", Path("demo-out")),
    quiet: Quiet = False,
) -> None:
    """Everything from a corpus to a report, small, on real text.

    A few minutes on two cores; a second run reuses what is there.
    """
    begun = time.monotonic()
    from grasp.demo import make, tell

    print("12 sources of text, some 10,000 passages. A small model is trained on them here, from scratch;")
    print("then it reads them once more. That one pass is all that GRASP needs.")
    with Watch(quiet=quiet) as watch:
        made = make(out, watch)
    tell(made, print)
    art = shlex.quote(str(made.artifact_path))
    print(f"Done in {time.monotonic() - begun:.0f} s. Everything lies in {out}. Ask it something yourself:")
    print(f"  {program()} predict {art} --drop \"source = 'gsm8k'\"")
    print(f"  {program()} predict {art} --by domain --target openbookqa")
    print(f"  {program()} score {art} --target commonsense_qa --top 20 --min-tokens 32")


@command(
    "grasp build --train new --model ./ckpt --corpus corpus.parquet --targets sciq,openbookqa --out art",
    "grasp build --train new --model gpt2 --corpus posts.jsonl --text-column body --targets exam.jsonl --out art",
    "grasp build --train further --model ./chat-model --corpus chats.jsonl --targets held-out-chats.jsonl --out art",
    "grasp build --resume --out art",
    "grasp build --config art/run.yaml --out s3://bucket/art",
    "grasp build --model ./vit --set model.classifier.head=classifier --corpus images.parquet \\\n"
    "            --targets trusted.parquet --out art",
    verb="grasp.build.build",
    more="resume untrained tokenizer keep_features like rule dtype",
)
def build(
    out: str = option("--out DIR", "Directory for the artifact, or a URL such as s3://bucket/art."),
    targets: list[str] = option(
        "--targets NAMES",
        "What the model should do well: tasks (sciq, ...) or files of questions (exam.jsonl; a line is "
        '{"question": ..., "answer": ...}, or prompt and completion), separated by commas; repeatable.',
        [],
    ),
    forecast: bool = option(
        "--forecast", "Only estimate rows, kernels, time and disk, and report what would stop the build.", False
    ),
    add_target: str | None = rare("--add-target NAMES", "Add targets to a finished artifact.", None),
    settings: ConfigFile = None,
    assign: Assignments = [],
    engine: str = rare("--engine KIND", "local: this process; ray: a Ray cluster.", "local"),
    workers: int | None = rare(
        "--workers N", "Workers of the cluster. Default: one for each GPU, or each core where it has none.", None, min=1
    ),
    address: Address = None,
    quiet: Quiet = False,
    **asked: Any,
) -> None:
    from grasp.build.build import NAMED, SETTINGS, add_targets, split_names
    from grasp.build.build import build as run

    resume, untrained = asked.pop("resume"), asked.pop("untrained")
    flags = {(NAMED | SETTINGS)[name]: value for name, value in asked.items()}
    flags["features.kernels"] = [] if asked["rule"] else None  # a file may name those of another rule
    flags["targets.names"] = [name for text in targets for name in split_names(text)] or None
    data = merged(settings, assign, flags)
    if add_target is not None:
        idle = {"--engine": engine != "local", "--workers": workers, "--address": address, "--resume": resume}
        _refuse_idle(idle | {"--untrained": untrained}, "--add-target, which runs in this process on what is finished")
        with Watch(quiet=quiet) as watch:
            source = add_targets(out, add_target, settings=data, progress=watch)
        done = {
            "kept features": f"added {add_target} from the features that were kept",
            "pass": f"added {add_target} by a pass over the corpus",
            "there already": f"{add_target} is there already, with the same units; nothing was done",
        }
        print(f"{out}: {done[source]}; targets now: {', '.join(grasp.open(out).targets)}")
        return
    if forecast:
        idle = {"--engine": engine != "local", "--workers": workers, "--address": address, "--resume": resume}
        _refuse_idle(idle, "--forecast, which looks at the first rows in this process")
        from grasp.build.forecast import forecast as estimate

        with Watch(quiet=quiet) as watch:
            print(estimate(out, data, untrained=untrained, progress=watch))
        return
    if engine == "local":
        _refuse_idle({"--workers": workers}, "--engine local; say --engine ray")
    spec = cluster(engine, workers, address, leaf(data, "model.threads"))
    with Watch(quiet=quiet) as watch:
        artifact = run(out=out, settings=data, resume=resume, untrained=untrained, cluster=spec, progress=watch)
    _say(out, artifact.path)


def _refuse_idle(flags: dict[str, Any], beside: str) -> None:
    given = [flag for flag, value in flags.items() if value]
    if given:
        raise SettingsError(f"{', '.join(given)}: no meaning with {beside}; leave it out")


def _say(out: str, path: Path) -> None:
    """What was built and what to do with it."""
    from grasp.artifact.inspection import info
    from grasp.store.remote import remote_url

    done: ArtifactInfo = info(remote_url(out) or path)
    units = sum(done.targets.values())
    print(
        f"{out}: {done.n_rows:,} rows x {units:,} units ({', '.join(done.targets)}), "
        f"{size_text(done.bytes_total)}, {done.bytes_per_row:,.0f} bytes a row"
    )
    if done.skipped["rows"]["counts"]:
        print(f"left out: {skipped_text(done.skipped['rows']['counts'])} (listed in {out}/manifest.json)")
    score = ["score", out, "--target", next(iter(done.targets)), "--top", "10", "--min-tokens", "32"]
    print(f"next: {program()} {shlex.join(score)}")


@command(
    "grasp build --model ./ckpt --corpus news --targets sciq --out news-art",
    "grasp build --model ./ckpt --corpus code --targets sciq --like news-art --out code-art",
    "grasp merge news-art code-art --out art",
)
def merge(
    parts: list[str] = typer.Argument(..., metavar="ART", help="Two or more artifacts, in the order of the rows."),
    out: Path = option("--out DIR", "New directory for the artifact."),
    quiet: Quiet = False,
) -> None:
    """Join artifacts that were built on different sources.

    They must have the same model, features, moments and targets: build the later ones with --like. Texts stay with the
    parts: ask those for explain and select --export.
    """
    with Watch(quiet=quiet) as watch:
        done = grasp.merge(parts, out, progress=watch)
    print(f"{out}: {len(done):,} rows of {len(parts)} parts x {', '.join(done.targets)}")


@command("grasp info art", "grasp info art --check --runs dev")
def info(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact; or a scorer."),
    as_json: bool = option("--json", "Everything, as JSON.", False),
    checked: bool = option("--check", "Check its approximations on its own rows instead.", False),
    runs: Path | None = option(
        "--runs DIR", "With --check: retrained subsets; do predictions order them rightly?", None
    ),
    protocol: Path | None = rare("--protocol FILE", "Protocol to predict with. Default: the one that ships.", None),
    assignments: OwnSettings = [],
) -> None:
    """Print what is in an artifact, check it, or say how good a scorer is.

    Every line of --check says what a healthy value is, and what to change when it is not. Features that were not kept
    are computed again with the model, where it is still there.
    """
    from grasp.artifact.inspection import info as describe
    from grasp.distil.scorer import SIGNED_CARD, is_scorer
    from grasp.errors import ArtifactError
    from grasp.files import kind_of
    from grasp.store.remote import remote_url

    if checked:
        own = merged(None, assignments, {})
        checks = grasp.open(path).check(runs=runs, protocol=protocol, own=own)
        print(checks.to_json() if as_json else checks)
        return
    for flag, value in (("--runs", runs), ("--protocol", protocol), ("--set", assignments)):
        if value:
            raise SettingsError(f"{flag}: no meaning without --check; leave it out")
    if is_scorer(path):
        card = SIGNED_CARD.read(path)
        print(json_text(card.model_dump(mode="json")) if as_json else card)
        return
    try:
        found = describe(path)
    except ArtifactError as err:
        if remote_url(path) is not None or kind_of(path) != "nothing":
            raise
        raise ArtifactError(f"{err}; a scorer is there once `grasp distil` has ended") from err
    if as_json:
        print(json_text(found.to_dict()))
        return
    state = "complete" if found.complete else f"{found.finished_shards} of {found.n_shards} shards finished"
    print(
        f"{found.path}: {state}, format {found.format_version}, {found.n_rows:,} rows, {size_text(found.bytes_total)}"
    )
    for name, value in {**found.made_by, **{f"{key} fingerprint": v for key, v in found.fingerprints.items()}}.items():
        print(f"  {name}: {value}")
    print("targets: " + ", ".join(f"{name} ({units} units)" for name, units in found.targets.items()))
    show(
        "arrays",
        ("array", "dtype", "shape", "size", "bytes a row"),
        [
            (a.name, a.dtype, f"{a.shape[0]} x {a.shape[1]}", size_text(a.bytes), f"{a.bytes_per_row:.0f}")
            for a in found.arrays
        ],
    )
    rest = ", ".join(f"{kind} {size_text(size)}" for kind, size in found.bytes.items() if kind != "arrays")
    print(f"beside the arrays: {rest}; {found.bytes_per_row:,.0f} bytes a row in all")
    if counts := found.skipped.get("rows", {}).get("counts"):
        print(f"left out: {skipped_text(counts)}")
    if found.extension_in_progress is not None:
        print(f"targets are being added: {found.extension_in_progress} finished")


@command("grasp verify art")
def verify(
    path: Path = typer.Argument(..., metavar="ART", help="Directory or URL of the artifact; or a scorer."),
) -> None:
    """Compare every file of an artifact with its checksum, or of a scorer.

    Exit code 1 if anything is broken; every broken file is named.
    """
    from grasp.artifact.inspection import verify as check
    from grasp.distil.scorer import Scorer, is_scorer
    from grasp.errors import ArtifactError

    if is_scorer(path):
        try:
            Scorer.open(path)  # reads and compares all of it
        except ArtifactError as err:
            print(f"broken: {err}")
            raise typer.Exit(code=1) from err
        print(f"{path}: scorer, all whole")
        return
    with Watch() as watch:
        watch.stage("verifying", rows=None, tokens=None)
        report = check(path)
    for problem in report.problems:
        print(f"broken: {problem}")
    what = "artifact" if report.complete else "unfinished artifact"
    verdict = "all whole" if report.ok else f"{len(report.problems)} broken"
    print(f"{report.path}: {what}, {report.n_files:,} files, {size_text(report.n_bytes)}: {verdict}")
    if not report.ok:
        raise typer.Exit(code=1)
