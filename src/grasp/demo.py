"""A whole run on real text, small: passages, a reference model trained on the spot, an artifact, and what it answers.

Every step is kept in the output directory, and a second run reuses what is there. The passages, the tokenizer and so
the rows come out the same everywhere, so retrained subsets of them can be shipped; where they do not, this is noticed.
"""

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import grasp
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import lock_artifact
from grasp.build.pipeline import build_artifact
from grasp.corpus import RowStore, normalised, read_documents, write_passages
from grasp.errors import EnvironmentDataError
from grasp.files import own_directory, written_aside
from grasp.models.tokenizer import HfTokenizer, train_tokenizer
from grasp.predict.scoring_rule import DEFAULT_PROTOCOL
from grasp.progress import Progress, Silent
from grasp.runs.alignment import artifact_targets
from grasp.runs.retrained import Environment
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
ROWS_PER_PASSAGE = 1  # the first 128 tokens: enough for a model of this size
STEPS = 200  # of training, where the retrained models took 320
POSITIONS = "stride:2"  # of a row that the model is asked at: half of the work, and of what each row is known by
SEED = 0
LABEL = "source"
SHIPPED = Path(__file__).with_name("demo_environment")  # written by `grasp retrain` with the flags of `retrain_flags`
CHECKED = Path(__file__).with_name("demo_checked")  # its own choices, trained: experiments/exposure
RETRAININGS = 16
TARGET = "sciq"
RANDOM_SUBSETS = 10_000
BUDGET = "20%"
DISTANCE = "40%"  # of the data that a mixture may change


class Demo:
    """Where everything of the demo lies, and what it is made of."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.corpus_path, self.model_path, self.artifact_path = out / "corpus.parquet", out / "model", out / "artifact"
        self.environment_path = out / "environment"  # where the user's own is looked for
        self.kept_path, self.mixture_path = out / "kept.parquet", out / "mixture.parquet"
        self.weights_path = out / "weights.parquet"

    @property
    def retrain_flags(self) -> tuple[str, ...]:
        """Arguments of `grasp retrain` that give an environment of the rows and units of the demo."""
        lengths = (f"corpus.max_rows_per_document={ROWS_PER_PASSAGE}", f"targets.units_per_target={UNITS_PER_TARGET}")
        settings = [part for assignment in lengths for part in ("--set", assignment)]
        asked = ["--corpus", str(self.corpus_path), "--targets", ",".join(TASKS), *settings]
        return (*asked, "--family", f"mixture:{LABEL}", "-B", str(RETRAININGS), "--seeds", "2")

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


def make(out: Path, progress: Progress | None = None) -> Demo:
    """Corpus, reference model and artifact, each unless it is there already."""
    progress = progress or Silent()
    own_directory(out, ".grasp-demo", lambda there: (there / "artifact").is_dir() and (there / "model").is_dir())
    demo = Demo(out)
    make_corpus(demo)
    make_model(demo, progress)
    build_artifact(demo.settings, demo.artifact_path, progress=progress)
    return demo


def retrained(demo: Demo, artifact: ArtifactReader) -> Environment:
    """Retrained subsets of the rows of `artifact`: the user's own, else those that ship; others are refused."""
    own = demo.environment_path
    if not own.exists() and not SHIPPED.exists():
        raise EnvironmentDataError("no retrained subsets ship with this version")
    environment = Environment.open(own if own.exists() else SHIPPED)
    artifact_targets(environment, artifact)
    if environment.pending():
        raise EnvironmentDataError(
            f"{environment.path}: is unfinished; grasp retrain --out {shlex.quote(str(own))} --resume goes on"
        )
    return environment


def make_corpus(demo: Demo) -> None:
    """Passages of twelve sources; the support passages of the SciQ units that are scored are left out."""
    if demo.corpus_path.exists():
        return
    supports = {normalised(unit.support) for unit in load_units(demo.targets).units if unit.support}
    write_passages(demo.corpus_path, exclude_texts=supports, per_source=PASSAGES_PER_SOURCE)


def make_model(demo: Demo, progress: Progress) -> None:
    """The `tiny` recipe, shortened, from scratch on the whole corpus: an ordinary Hugging Face checkpoint."""
    recipe = named_recipe("tiny").model_copy(update={"steps": STEPS})
    tokenizer_path = demo.out / "tokenizer"
    if not tokenizer_path.exists():
        texts = (document.text or "" for document in read_documents(demo.corpus))
        with written_aside(tokenizer_path) as part:
            train_tokenizer(texts, vocab_size=recipe.shape.vocab_size).save_pretrained(part)
    tokenizer = HfTokenizer(
        AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False), vocab_size=recipe.shape.vocab_size
    )
    with lock_artifact(demo.artifact_path):  # the build finds the rows there
        rows = RowStore.write(
            demo.artifact_path / "tokens", demo.corpus, tokenizer, shard_rows=demo.settings.shard_rows
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


def tell(demo: Demo, say: Callable[[str], None]) -> None:
    """Ask what a curator would ask, each time with the command that asks the same."""
    art = grasp.open(demo.artifact_path)
    say(f"{art}\n")
    say("1. What is each source worth for SciQ, a set of science questions?")
    _command(say, "predict", demo.artifact_path, "--by", LABEL, "--target", TARGET)
    say(f"{art.predict(by=LABEL, target=[TARGET])}\n")
    say("2. Which rows teach these answers most, and which least?")
    _command(say, "score", demo.artifact_path, "--target", TARGET, "--top", 5, "--bottom", 5, "--min-tokens", 32)
    say(f"{art.score(TARGET, top=5, bottom=5, min_tokens=32)}\n")
    say(f"3. Any subset can be asked about. {RANDOM_SUBSETS:,} random tenths of the corpus:")
    path = demo.out / "predictions.parquet"
    _command(say, "predict", demo.artifact_path, "--family", "uniform:0.1", "-B", RANDOM_SUBSETS, "--out", path)
    begun = time.monotonic()
    lines = art.predict(family="uniform:0.1", count=RANDOM_SUBSETS, out=path).lines
    seconds = time.monotonic() - begun
    say(f"{lines:,} predictions in {seconds:.1f} s: {RANDOM_SUBSETS / seconds:,.0f} subsets a second\n")
    runs = _trust(demo, art, say)
    _choose(demo, art, runs, say)


def _command(say: Callable[[str], None], *arguments: object) -> None:
    say(f"$ {shlex.join(['grasp', *map(str, arguments)])}")


def _trust(demo: Demo, art: grasp.Artifact, say: Callable[[str], None]) -> Environment | None:
    """Predictions beside models that were retrained on some subsets; None if there are none."""
    say("4. Is it true? Small models were retrained on 16 mixtures of the sources. Were they predicted?")
    try:
        runs = retrained(demo, art.files)
    except EnvironmentDataError as err:
        say(f"Nothing to compare with: {plain(err)}")
        say("Retrain on a few mixtures yourself (about a minute each), then run this again:")
        _command(say, "retrain", *demo.retrain_flags, "--out", demo.environment_path)
        say("")
        return None
    say(_agreement(grasp.evaluate(art, runs)))
    say("1 is the right order, 0 is chance. Retraining is noisy: a perfect prediction would reach the ceiling.")
    say("The ceiling is an estimate from how well two trainings agree, with an interval of its own.\n")
    return runs


def _agreement(evaluation: grasp.Result) -> str:
    """How the protocol that ships orders what was retrained, a line a target; the verb has far more."""
    name = DEFAULT_PROTOCOL.name
    lines = [
        (
            line["target"],
            number(line["task_rho"], 2),
            _interval(line, "task_rho"),
            number(line["task_ceiling"], 2),
            _interval(line, "task_ceiling"),
        )
        for line in evaluation.to_arrow().to_pylist()
        if line["method"] == name
    ]
    return text_table("", ("target", "rank correlation", "95 % interval", "ceiling", "95 % interval"), lines)


def _interval(line: dict[str, Any], figure: str) -> str:
    return f"{number(line[f'{figure}_low'], 2)} to {number(line[f'{figure}_high'], 2)}"


def _choose(demo: Demo, art: grasp.Artifact, runs: Environment | None, say: Callable[[str], None]) -> None:
    """A fifth of the rows for SciQ, a mixture for all targets, and the page."""
    at, trust = demo.artifact_path, () if runs is None else ("--runs", runs.path)
    say("5. Choose a fifth of the corpus for SciQ.")
    asked = ("--budget", BUDGET, "--target", TARGET, "--by", LABEL)
    _command(say, "select", at, *asked, *trust, "--out", demo.kept_path)
    selection = art.select(BUDGET, TARGET, by=LABEL, runs=runs)
    say(f"{selection}\n")
    summary = selection.save(demo.kept_path).with_suffix(".json")
    say("6. Or keep everything, and change how much of each source the model sees: for all five tasks together.")
    asked = ("--by", LABEL, "--target", ",".join(TASKS), "--distance", DISTANCE)
    _command(say, "mix", at, *asked, *trust, "--out", demo.mixture_path, "--weights", demo.weights_path)
    mixture = art.mix(LABEL, list(TASKS), distance=DISTANCE, runs=runs)
    say(f"{mixture}\n")
    shares = mixture.save(demo.mixture_path).with_suffix(".json")
    mixture.write_weights(demo.weights_path)
    say("7. All of it on one page, with sliders to try what if.")
    report = demo.out / "report.html"
    _command(say, "report", at, *trust, "--selection", summary, "--mixture", shares, "--out", report)
    page = art.report(report, runs=runs, selection=summary, mixture=shares)
    say(f"{page}: {size_text(page.stat().st_size)}; open it in any browser, it needs no network\n")
    say("8. Does the promise come true? Train on the choice and see; with subsets=weights.parquet, on the mixture.")
    check = ("--like", at, "--set", f"subsets={demo.kept_path}", "--seeds", 2, "--out", demo.out / "kept")
    _command(say, "retrain", *check)
    if CHECKED.exists():
        say(_came(Environment.open(CHECKED)))
    say("")


def _came(checked: Environment) -> str:
    """What came of the demo's choices when they were trained: change against the whole corpus, in nats a token."""
    came_BT = (checked.task_utilities(checked.targets) - checked.task_reference(checked.targets)).mean(axis=1)
    seeds = ", ".join(map(str, checked.info.seeds))
    lines = [f"When we did (seed {seeds}), in nats against the whole corpus:"]
    for name, came_T in zip(checked.subset_ids, came_BT, strict=True):
        came = ", ".join(
            f"{target} {signed(float(nats), 2)}" for target, nats in zip(checked.targets, came_T, strict=True)
        )
        lines.append(f"  {'the mixture' if 'mixture' in name else 'the choice'}: {came}")
    return "\n".join(lines)
