"""grasp demo"""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from grasp.cli.app import app, command
from grasp.cli.progress import Watch
from grasp.text import plain, size_text

if TYPE_CHECKING:
    from grasp.artifact.reader import Artifact
    from grasp.demo import Demo
    from grasp.runs.environment import Environment

SHOWN_TARGETS = ("sciq", "commonsense_qa", "basic_skills_logical_reasoning")
RANDOM_SUBSETS = 10_000
BUDGET = "20%"
MIX_LIMITS = ("--floor", "2%", "--cap", "20%", "--distance", "40%")


@command("Example: grasp demo --out demo-out")
def demo(
    out: Path = typer.Option(Path("demo-out"), "--out", help="Directory for everything the demo makes."),
    quiet: bool = typer.Option(False, "--quiet", help="Plain lines instead of a progress bar."),
) -> None:
    """Everything from a corpus to a report, small, on real text.

    Corpus, model, artifact, predictions, a selection, a mixture, a comparison with retraining. A few minutes on two
    cores; a second run reuses what is there.
    """
    begun = time.monotonic()
    from grasp.artifact.reader import Artifact
    from grasp.demo import make

    print("Passages of twelve sources, a model of 0.36 M parameters trained on them, one pass over the corpus.")
    with Watch(quiet=quiet) as watch:
        made = make(out, watch)
    artifact = Artifact.open(made.artifact_path)
    units = sum(artifact.manifest.targets.values())
    print(f"{artifact.n_rows:,} rows, {units} units of {len(artifact.targets)} targets\n")
    _slices(artifact)
    _rows(artifact)
    _random_subsets(artifact, made.predictions_path)
    environment = _retrained(made, artifact)
    _decide(made, environment)
    _report(made, artifact, environment)
    print(
        f"Everything lies in {out}: corpus.parquet, model (a Hugging Face checkpoint), artifact, predictions.parquet,"
    )
    print(f"kept.parquet, mixture.parquet. Done in {time.monotonic() - begun:.0f} s. Ask it something yourself:")
    art = shlex.quote(str(made.artifact_path))
    print(f"  grasp predict {art} --drop \"source = 'gsm8k'\"")
    print(f"  grasp predict {art} --by domain --targets openbookqa")
    print(f"  grasp score {art} --target commonsense_qa --top 20 --min-tokens 32")
    print(f"What it found, with sliders to try what if: {made.report_path.resolve()}")


def _slices(artifact: "Artifact") -> None:
    from grasp.predict.verb import predict

    print("What is each source worth?")
    print(predict(artifact, by="source", targets=SHOWN_TARGETS), end="\n\n")


def _rows(artifact: "Artifact") -> None:
    from grasp.predict.ranking import score

    print(score(artifact, "sciq", top=6, bottom=6, min_tokens=32, labels=["source"]), end="\n\n")


def _random_subsets(artifact: "Artifact", path: Path) -> None:
    from grasp.predict.verb import predict

    begun = time.monotonic()
    lines = predict(artifact, family="uniform:0.1", count=RANDOM_SUBSETS, out=path).lines
    seconds = time.monotonic() - begun
    print(
        f"{RANDOM_SUBSETS:,} random subsets of a tenth of the corpus, {lines:,} predicted changes: "
        f"{seconds:.1f} s, {RANDOM_SUBSETS / seconds:,.0f} subsets a second (drawing them included)\n"
    )


def _retrained(made: "Demo", artifact: "Artifact") -> "Environment | None":
    """How far to trust it: predictions beside models that were retrained on some subsets; None if there are none."""
    from grasp.demo import retrained
    from grasp.errors import EnvironmentDataError

    try:
        environment = retrained(made, artifact)
    except EnvironmentDataError as err:
        print(f"Nothing to compare with: {plain(err)}")
        print("To see how far to trust the predictions, retrain on a few subsets (a minute each), then run this again:")
        print(f"  {shlex.join(['grasp', 'retrain', *made.retrain_flags, '--out', str(made.environment_path)])}\n")
        return None
    _run("evaluate", made.artifact_path, "--environment", environment.path)
    return environment


def _decide(made: "Demo", environment: "Environment | None") -> None:
    """A fifth of the rows for SciQ, and a mixture of the sources for all targets together."""
    from grasp.demo import LABEL, TASKS

    trust = () if environment is None else ("--environment", environment.path)
    _run(
        *("select", made.artifact_path, "--budget", BUDGET, "--target", "sciq", "--by", LABEL),
        *(*trust, "--out", made.kept_path),
    )
    _run(
        *("mix", made.artifact_path, "--by", LABEL, "--target", ",".join(TASKS), *MIX_LIMITS),
        *(*trust, "--out", made.mixture_path),
    )


def _report(made: "Demo", artifact: "Artifact", environment: "Environment | None") -> None:
    from grasp.predict.protocol import default_protocol
    from grasp.report.findings import Question, findings
    from grasp.report.page import write_report

    selection, mixture = made.kept_path.with_suffix(".json"), made.mixture_path.with_suffix(".json")
    trust = [] if environment is None else ["--environment", str(environment.path)]
    files = ["--selection", str(selection), "--mixture", str(mixture), "--out", str(made.report_path)]
    command = shlex.join(["grasp", "report", str(made.artifact_path), *trust, *files])
    question = Question(environment=environment, selection=selection, mixture=mixture, command=command)
    print(f"$ {command}")
    size = write_report(findings(artifact, default_protocol(), question), made.report_path)
    print(f"{made.report_path}: {size_text(size)}\n")


def _run(*arguments: object) -> None:
    """Show a command line of grasp, and run it."""
    argv = [str(argument) for argument in arguments]
    print(f"$ {shlex.join(['grasp', *argv])}")
    app(argv, standalone_mode=False)
    print()
