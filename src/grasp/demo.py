"""A whole run on real text, small: passages, a reference model trained on the spot, an artifact.

Every step is kept in the output directory, and a second run reuses what is there. The passages, the tokenizer and so
the rows come out the same everywhere, so retrained subsets of them can be shipped; where they do not, this is noticed.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from grasp.artifact.reader import Artifact
from grasp.corpus import RowStore, normalised, read_documents, write_passages
from grasp.errors import EnvironmentDataError
from grasp.extract.local import build
from grasp.extract.progress import Progress, Silent
from grasp.files import own_directory, written_aside
from grasp.models.tokenizer import HfTokenizer, train_tokenizer
from grasp.runs.environment import Environment
from grasp.runs.evaluate import artifact_targets
from grasp.runs.recipe import named_recipe, train
from grasp.settings import BuildSettings, CorpusSettings, ModelSettings, TargetSettings
from grasp.targets import load_units

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
SEED = 0
LABEL = "source"
SHIPPED = Path(__file__).with_name("demo_environment")  # written by `grasp retrain` with the flags of `retrain_flags`
RETRAININGS = 16


@dataclass(frozen=True, slots=True)
class Demo:
    """Where everything of the demo lies, and what it is made of."""

    out: Path

    @property
    def corpus_path(self) -> Path:
        return self.out / "corpus.parquet"

    @property
    def model_path(self) -> Path:
        return self.out / "model"

    @property
    def artifact_path(self) -> Path:
        return self.out / "artifact"

    @property
    def predictions_path(self) -> Path:
        return self.out / "predictions.parquet"

    @property
    def kept_path(self) -> Path:
        return self.out / "kept.parquet"

    @property
    def mixture_path(self) -> Path:
        return self.out / "mixture.parquet"

    @property
    def environment_path(self) -> Path:
        """Where an environment of the user's own is looked for."""
        return self.out / "environment"

    @property
    def report_path(self) -> Path:
        return self.out / "report.html"

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
        return BuildSettings(model=ModelSettings(path=str(self.model_path)), corpus=self.corpus, targets=self.targets)


def make(out: Path, progress: Progress | None = None) -> Demo:
    """Corpus, reference model and artifact, each unless it is there already."""
    progress = progress or Silent()
    own_directory(out, ".grasp-demo", lambda there: (there / "artifact").is_dir() and (there / "model").is_dir())
    demo = Demo(out)
    make_corpus(demo)
    make_model(demo, progress)
    build(demo.settings, demo.artifact_path, progress=progress)
    return demo


def retrained(demo: Demo, artifact: Artifact) -> Environment:
    """Retrained subsets of the rows of `artifact`: the user's own, else those that ship.

    Raises:
        EnvironmentDataError: neither is of these rows and units; the message says in what they differ.
    """
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
    """The `tiny` recipe from scratch on the whole corpus: an ordinary Hugging Face checkpoint."""
    recipe = named_recipe("tiny")
    tokenizer_path = demo.out / "tokenizer"
    if not tokenizer_path.exists():
        texts = (document.text or "" for document in read_documents(demo.corpus))
        with written_aside(tokenizer_path) as part:
            train_tokenizer(texts, vocab_size=recipe.shape.vocab_size).save_pretrained(part)
    tokenizer = HfTokenizer(
        AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False), vocab_size=recipe.shape.vocab_size
    )
    rows = RowStore.write(demo.out / "rows", demo.corpus, tokenizer, shard_rows=4096)
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
