"""A small example on real text: build a corpus, train a reference model, build an artifact, and query it.

All files are kept in the output directory, and a second run reuses them. Passages, tokenizer and rows are the same on
every machine, so that the package can contain models retrained on subsets of them; a mismatch of fingerprints is
detected. Start with `make_demo`, then `print_answers`.
"""

import shlex
from collections.abc import Callable
from pathlib import Path

import grasp
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import lock_artifact
from grasp.errors import RunsError
from grasp.file_readers import readers
from grasp.files import claim_directory
from grasp.pipeline.pipeline import build_artifact
from grasp.pipeline.proxy import prepare_rows
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.progress import Progress
from grasp.runs.alignment import match_targets
from grasp.runs.retrained import RetrainedRuns
from grasp.settings import BuildSettings, CorpusSettings, FeatureSettings, ModelSettings, TargetSettings
from grasp.targets import load_units
from grasp.text import number, plain, signed, size_text, text_table
from grasp.training.recipe import named_recipe
from grasp.training.train import train

TASKS = (
    "sciq",
    "openbookqa",
    "commonsense_qa",
    "basic_skills_common_knowledge",
    "basic_skills_logical_reasoning",
)
PASSAGES_PER_SOURCE = 900
UNITS_PER_TARGET = 128
ROWS_PER_PASSAGE = 1  # the first 128 tokens, enough for a model of this size
STEPS = 200  # training steps of the reference model; the retrained models had 320
POSITIONS = "stride:2"  # every second position: half of the computation
SEED = 0
LABEL = "source"
BUNDLED_RUNS = Path(__file__).with_name("environment")  # written by `grasp retrain` with `Demo.retrain_flags`
SELECTION_RUNS = Path(__file__).with_name("checked")  # trained on its selections: experiments/exposure
RETRAININGS = 16
TARGET = "sciq"
BUDGET = "20%"
DISTANCE = "40%"  # maximum share of the data that a mixture may replace


class Demo:
    """Paths and settings of the demo."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.corpus_path, self.model_path, self.artifact_path = out / "corpus.parquet", out / "model", out / "artifact"
        self.environment_path = out / "environment"  # the user's own retrained runs, if any
        self.selection_path, self.mixture_path = out / "kept.parquet", out / "mixture.parquet"
        self.weights_path = out / "weights.parquet"

    @property
    def retrain_flags(self) -> tuple[str, ...]:
        """Return options of `grasp retrain` that train models on subsets of the demo's rows."""
        lengths = (f"corpus.max_rows_per_document={ROWS_PER_PASSAGE}", f"targets.units_per_target={UNITS_PER_TARGET}")
        settings = [word for assignment in lengths for word in ("--set", assignment)]
        data = ["--corpus", str(self.corpus_path), "--targets", ",".join(TASKS), *settings]
        return (*data, "--family", f"mixture:{LABEL}", "-B", str(RETRAININGS), "--seeds", "2")

    @property
    def targets(self) -> TargetSettings:
        return TargetSettings(
            names=TASKS, units_per_target=UNITS_PER_TARGET, max_length=named_recipe("tiny").shape.context
        )

    @property
    def corpus(self) -> CorpusSettings:
        context = named_recipe("tiny").shape.context
        return CorpusSettings(path=str(self.corpus_path), max_length=context, max_rows_per_document=ROWS_PER_PASSAGE)

    @property
    def settings(self) -> BuildSettings:
        model, features = ModelSettings(path=str(self.model_path)), FeatureSettings(positions=POSITIONS)
        return BuildSettings(model=model, corpus=self.corpus, targets=self.targets, features=features)


def make_demo(out: Path, progress: Progress | None = None) -> Demo:
    """Build the corpus, the reference model and the artifact, each unless it already exists."""
    progress = progress or Progress()
    claim_directory(out, ".grasp-demo", lambda path: (path / "artifact").is_dir() and (path / "model").is_dir())
    demo = Demo(out)
    if not demo.corpus_path.exists():  # passages of twelve sources, without those that support the units of SciQ
        passages = readers("passages")["olmes"]
        supporting = {passages.normalised(unit.support) for unit in load_units(demo.targets).units if unit.support}
        passages.write_passages(demo.corpus_path, exclude_texts=supporting, per_source=PASSAGES_PER_SOURCE)
    recipe = named_recipe("tiny").model_copy(update={"steps": STEPS})
    with lock_artifact(demo.artifact_path):  # the build reuses these rows
        tokenizer, rows = prepare_rows(
            out / "tokenizer", demo.artifact_path / "tokens", demo.corpus, shard_rows=demo.settings.shard_rows
        )
    tokens = recipe.batch_rows * recipe.shape.context
    progress.stage("training", rows=recipe.steps * recipe.batch_rows, tokens=recipe.steps * tokens)
    train(
        recipe,
        rows,
        seed=SEED,
        tokenizer=tokenizer,
        out=demo.model_path,
        checkpoints=(recipe.steps // 2,),
        progress=lambda _: progress.advance(recipe.batch_rows, tokens),
    )
    build_artifact(demo.settings, demo.artifact_path, progress=progress)
    return demo


def open_runs(demo: Demo, artifact: ArtifactReader) -> RetrainedRuns:
    """Open the user's own retrained runs of the demo, else those of the package.

    Raises:
        RunsError: there are no runs, they are unfinished, or were trained on other rows.
    """
    user_path = demo.environment_path
    if not user_path.exists() and not BUNDLED_RUNS.exists():
        raise RunsError("this version of the package contains no retrained runs")
    runs = RetrainedRuns.open(user_path if user_path.exists() else BUNDLED_RUNS)
    match_targets(runs, artifact)
    if runs.pending():
        raise RunsError(
            f"{runs.path}: unfinished; continue with grasp retrain --out {shlex.quote(str(user_path))} --resume"
        )
    return runs


def print_answers(demo: Demo, say: Callable[[str], None]) -> None:
    """Query the artifact as a data curator would, and print each query as a command with its result."""

    def command(*arguments: object) -> None:
        say(f"$ {shlex.join(['grasp', *map(str, arguments)])}")

    path, art = demo.artifact_path, grasp.open(demo.artifact_path)
    say(f"{art}\n")
    say("1. How does each source affect SciQ, a set of science questions?")
    command("predict", path, "--by", LABEL, "--target", TARGET)
    say(f"{art.predict(by=LABEL, target=[TARGET])}\n")
    say("2. Which rows help SciQ most, and which least?")
    command("score", path, "--target", TARGET, "--top", 5, "--bottom", 5, "--min-tokens", 32)
    say(f"{art.score(TARGET, top=5, bottom=5, min_tokens=32)}\n")
    say("3. Are the predictions right? Compare them with small models retrained on 16 mixtures of the sources.")
    runs: RetrainedRuns | None = None
    runs_options: tuple[object, ...] = ()
    try:
        runs = open_runs(demo, art.files)
    except RunsError as err:
        say(f"No comparison: {plain(err)}")
        say("Train models on a few mixtures (about a minute each), then run the demo again:")
        command("retrain", *demo.retrain_flags, "--out", demo.environment_path)
        say("")
    else:
        runs_options = ("--runs", runs.path)
        lines = []
        for record in grasp.evaluate(art, runs).to_arrow().to_pylist():
            if record["method"] == DEFAULT_PROTOCOL.name:
                lines.append([record["target"]])
                for metric in ("task_rho", "task_ceiling"):
                    value, low, high = (number(record[metric + end], 2) for end in ("", "_low", "_high"))
                    lines[-1] += [value, f"{low} to {high}"]
        say(text_table("", ("target", "rank correlation", "95 % interval", "ceiling", "95 % interval"), lines))
        say(
            "1 is the exact order, 0 is chance. Retraining is noisy: a perfect prediction would reach the noise "
            "ceiling."
        )
        say("The ceiling is estimated from the agreement of two trainings, and has a confidence interval, too.\n")
    say("4. Select a fifth of the corpus for SciQ.")
    select_options = ("--budget", BUDGET, "--target", TARGET, "--by", LABEL)
    command("select", path, *select_options, *runs_options, "--out", demo.selection_path)
    selection = art.select(BUDGET, TARGET, by=LABEL, runs=runs)
    say(f"{selection}\n")
    selection_json = selection.save(demo.selection_path).with_suffix(".json")
    say("5. Or keep all rows, and change the mixture weights of the sources, for all five tasks together.")
    mix_options = ("--by", LABEL, "--target", ",".join(TASKS), "--distance", DISTANCE)
    command("mix", path, *mix_options, *runs_options, "--out", demo.mixture_path, "--weights", demo.weights_path)
    mixture = art.mix(LABEL, list(TASKS), distance=DISTANCE, runs=runs)
    say(f"{mixture}\n")
    mixture_json = mixture.save(demo.mixture_path).with_suffix(".json")
    mixture.write_weights(demo.weights_path)
    say("6. All results on one page, with sliders for your own mixtures.")
    report, results = demo.out / "report.html", ("--selection", selection_json, "--mixture", mixture_json)
    command("report", path, *runs_options, *results, "--out", report)
    page = art.report(report, runs=runs, selection=selection_json, mixture=mixture_json)
    say(f"{page}: {size_text(page.stat().st_size)}; open it in a browser (works offline)\n")
    say("7. Verify the prediction: train on the selection (or, with subsets=weights.parquet, on the mixture).")
    subsets = f"subsets={demo.selection_path}"
    command("retrain", "--like", path, "--set", subsets, "--seeds", 2, "--out", demo.out / "kept")
    if SELECTION_RUNS.exists():
        checked = RetrainedRuns.open(SELECTION_RUNS)
        change_BT = (checked.task_utilities(checked.targets) - checked.task_reference(checked.targets)).mean(axis=1)
        seeds = ", ".join(map(str, checked.info.seeds))
        say(f"Our own runs (seed {seeds}), change in nats relative to the whole corpus:")
        for name, change_T in zip(checked.subset_ids, change_BT, strict=True):
            changes = zip(checked.targets, change_T.tolist(), strict=True)
            text = ", ".join(f"{target} {signed(nats, 2)}" for target, nats in changes)
            say(f"  {'mixture' if 'mixture' in name else 'selection'}: {text}")
    say("")
