"""Runs that a command of the user's trains: it is given a subset as a file, and leaves a checkpoint, which is scored.

<out>/rows.jsonl          every row of the corpus: text, row_id and labels
<out>/work/<run>/<pid>/   corpus.jsonl and checkpoint of a run in flight
<out>/jobs/<run>/         the same of a run that a scheduler was given; its checkpoint appears when it is whole
<out>/logs/<run>.*        what the command said
"""

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grasp.arrays import F64
from grasp.corpus.documents import Corpus
from grasp.corpus.row_store import RowStore
from grasp.corpus.sources import open_source
from grasp.errors import ModelError, SettingsError
from grasp.files import discard, written_aside
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import TOKENIZER_FILES
from grasp.models.tokenizer import HfTokenizer
from grasp.models.unit_loss import evaluate_units
from grasp.runs.retrained import FULL, Run
from grasp.seeds import stream
from grasp.settings import CorpusSettings, ModelSettings
from grasp.targets.units import UnitTokens
from grasp.text import json_text, plain

ROWS = "rows.jsonl"
LAST_BYTES = 8192  # of stderr, in which its last line is looked for
SHOWN = 300


def command_words(command: str) -> list[str]:
    """The arguments of a command, placeholders still in them; no shell ever sees them."""
    expected = (
        "{corpus} and {checkpoint}, and {seed} if it draws, e.g. "
        "'python train.py --data {corpus} --seed {seed} --out {checkpoint}'"
    )
    try:
        words = shlex.split(command)
    except ValueError as err:
        raise SettingsError(f"train_command: got {command!r}: {err}; quote as in a shell") from err
    found = {name for word in words for name in re.findall(r"\{(\w+)\}", word)}
    if unknown := sorted(found - {"corpus", "checkpoint", "seed"}):
        raise SettingsError(f"train_command: unknown placeholders {unknown} in {command!r}, expected {expected}")
    if missing := [name for name in ("corpus", "checkpoint") if name not in found]:
        raise SettingsError(f"train_command: placeholders {missing} are missing in {command!r}, expected {expected}")
    return words


def write_corpus(store: RowStore, settings: CorpusSettings, tokenizer: HfTokenizer, out: Path) -> None:
    """Write every row of the corpus with its text and labels, in order; subsets are copied out of it."""
    corpus = Corpus(open_source(settings.path, settings.split), settings)
    texts = store.texts(np.arange(store.n_rows), corpus, lambda: tokenizer)
    with written_aside(out / ROWS) as part, part.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        for k in range(store.n_shards):
            shard = store.shard(k)
            names = ["row_id", *store.label_columns]
            for i, row in enumerate(shard.table.select(names).to_pylist()):
                text = next(texts)
                if text is None:
                    (text,) = tokenizer.decode([shard.ids(i).tolist()])
                labels = {f"{name}_" if name == "text" else name: value for name, value in row.items()}
                file.write(json_text({"text": text, **labels}, None, only_ascii=False) + "\n")


def write_subset(rows: Path, weight_N: F64, seed: int, out: Path) -> None:
    """Copy the rows of a subset: a row of weight 2 twice, one of weight 0.3 with probability 0.3.

    The draw of a row depends on the seed alone, so two subsets of a seed share the rows that they can.
    """
    phase_N = stream(seed, "order", "phase").random(len(weight_N))
    times_N = np.floor(weight_N + phase_N).astype(np.int64)
    with rows.open(encoding="utf-8", newline="\n") as lines, out.open("w", encoding="utf-8", newline="\n") as file:
        for line, times in zip(lines, times_N.tolist(), strict=True):
            file.write(line * times)


def utility_by_command(
    words: Sequence[str],
    run: Run,
    weight_N: F64,
    environment: Path,
    tokenizer: HfTokenizer,
    tokens: Sequence[UnitTokens],
    device: str,
) -> F64:
    """Train one run by the command and score what it leaves: -loss of every unit, (E,).

    The corpus and the checkpoint are removed afterwards; the checkpoint of the whole corpus is kept as the reference.

    Args:
        words: the command as `command_words` gives it; not called where a job has left a checkpoint.
        tokenizer: of the environment; the checkpoint must have the same.
    Raises:
        ModelError: the command failed, or left no checkpoint, or one that cannot be read or has another tokenizer.
    """
    attempts = job_of(run, environment)
    by_job = (attempts / "checkpoint").exists()
    if not by_job:
        attempts = environment.resolve() / "work" / run.stem
        discard(attempts)  # of a run that was killed
    work = attempts if by_job else attempts / str(os.getpid())
    work.mkdir(parents=True, exist_ok=by_job)
    corpus, checkpoint = work / "corpus.jsonl", work / "checkpoint"
    try:
        if not by_job:
            write_subset(environment / ROWS, weight_N, run.seed, corpus)
            _call(_filled(words, run, corpus, checkpoint), environment / "logs" / run.stem)
        if not checkpoint.is_dir() or not any(checkpoint.iterdir()):
            raise ModelError("the command left no checkpoint in the directory that {checkpoint} names")
        own = any((checkpoint / name).exists() for name in TOKENIZER_FILES)
        beside = None if own else tokenizer.tokenizer.name_or_path
        model = ReferenceModel.load(
            ModelSettings(path=str(checkpoint), tokenizer=beside, dtype="float32", device=device, check=False)
        )
        if model.tokenizer.fingerprint != tokenizer.fingerprint:
            raise ModelError(
                "the checkpoint has another tokenizer than the one that units were read with; name its directory with "
                "--set tokenizer=DIR and a new --out"
            )
        longest = max(len(unit.input_ids) for unit in tokens)
        if model.context is not None and longest > model.context:
            raise ModelError(
                f"the checkpoint reads {model.context} tokens, a unit has {longest}; set targets.max_length to "
                f"{model.context} and choose a new --out"
            )
        utility_E: F64 = -evaluate_units(model.model, tokens)
        if run.subset_id == FULL:
            reference = environment / "reference" / f"seed-{run.seed}"
            discard(reference)
            reference.parent.mkdir(exist_ok=True)
            checkpoint.rename(reference)
    finally:
        discard(attempts)
    return utility_E


def job_of(run: Run, environment: Path) -> Path:
    """Where the job of a run has its corpus and leaves its checkpoint."""
    return environment.resolve() / "jobs" / run.stem


def job_line(words: Sequence[str], run: Run, weight_N: F64, environment: Path) -> str:
    """Write the corpus of a run, and give the shell line that trains on it; the line may be run again."""
    work = job_of(run, environment)
    work.mkdir(parents=True, exist_ok=True)
    corpus, part, whole = work / "corpus.jsonl", work / "checkpoint.part", work / "checkpoint"
    if not corpus.exists():
        with written_aside(corpus) as aside:
            write_subset(environment / ROWS, weight_N, run.seed, aside)
    steps = [["rm", "-rf", str(part), str(whole)], _filled(words, run, corpus, part), ["mv", str(part), str(whole)]]
    return " && ".join(shlex.join(step) for step in steps)


def _filled(words: Sequence[str], run: Run, corpus: Path, checkpoint: Path) -> list[str]:
    values = {"corpus": str(corpus), "checkpoint": str(checkpoint), "seed": str(run.seed)}
    return [re.sub(r"\{(\w+)\}", lambda match: values[match[1]], word) for word in words]


def _call(words: Sequence[str], log: Path) -> None:
    """Run a command; of one that fails the last line on stderr is what it was."""
    log.parent.mkdir(exist_ok=True)
    said, complained = (log.parent / f"{log.name}.{kind}.txt" for kind in ("stdout", "stderr"))
    try:
        with said.open("wb") as stdout, complained.open("wb") as stderr:
            ended = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, check=False)
    except OSError as err:
        raise ModelError(f"{words[0]!r} cannot be started: {err.strerror}") from err
    if ended.returncode:
        with complained.open("rb") as file:  # it may be as long as it likes
            file.seek(max(0, complained.stat().st_size - LAST_BYTES))
            lines = file.read(LAST_BYTES).decode("utf-8", errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        last = plain(written[-1], SHOWN) if written else "nothing on stderr"
        raise ModelError(f"exit status {ended.returncode}: {last} (all of it: {complained})")
