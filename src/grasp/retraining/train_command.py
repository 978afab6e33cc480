"""Train runs by a command of the user, which reads a subset from a file and writes a checkpoint, and score them.

    <out>/rows.jsonl          all rows of the corpus: text, row_id and labels
    <out>/work/<run>/<pid>/   corpus.jsonl and checkpoint of the current run
    <out>/jobs/<run>/         the same for a run of a scheduler; the checkpoint is renamed when it is complete
    <out>/logs/<run>.*        output of the command

Start with `utility_by_command`.
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
from grasp.files import atomic_path, discard
from grasp.models.causal_lm import ReferenceModel
from grasp.models.checkpoint import TOKENIZER_FILES
from grasp.models.tokenizer import HfTokenizer
from grasp.models.unit_loss import evaluate_units
from grasp.runs.training_runs import WHOLE_CORPUS_RUN, Run
from grasp.seeds import stream
from grasp.settings import CorpusSettings, ModelSettings
from grasp.targets.units import UnitTokens
from grasp.text import json_text, plain

ROWS = "rows.jsonl"
STDERR_TAIL_BYTES = 8192  # bytes at the end of stderr that are searched for the last line
MAX_STDERR_CHARS = 300  # characters of stderr in a message


def command_words(command: str) -> list[str]:
    """Split a command into arguments with placeholders. The command is never passed to a shell.

    Raises:
        SettingsError: quotes are not closed, or placeholders are unknown or missing.
    """
    expected = (
        "{corpus} and {checkpoint}, and {seed} if training is random, e.g. "
        "'python train.py --data {corpus} --seed {seed} --out {checkpoint}'"
    )
    try:
        words = shlex.split(command)
        placeholders = {name for word in words for name in re.findall(r"\{(\w+)\}", word)}
        unknown = sorted(placeholders - {"corpus", "checkpoint", "seed"})
        missing = [name for name in ("corpus", "checkpoint") if name not in placeholders]
        if not unknown and not missing:
            return words
        problem = f"unknown placeholders {unknown}" if unknown else f"placeholders {missing} are missing"
    except ValueError as err:
        problem = f"{err}; quote as in a shell"
    raise SettingsError(f"train_command: got {command!r}: {problem}; expected {expected}")


def write_corpus(store: RowStore, settings: CorpusSettings, tokenizer: HfTokenizer, out: Path) -> None:
    """Write all rows of the corpus with text and labels as JSONL, from which subsets are copied.

    A label named `text` is written as `text_`. Text that is not stored is decoded from the tokens.
    """
    corpus = Corpus(open_source(settings.path, settings.split), settings)
    texts = store.texts(np.arange(store.n_rows), corpus, lambda: tokenizer)
    with atomic_path(out / ROWS) as part, part.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
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
    """Copy the rows of a subset: a row of weight 2 twice, a row of weight 0.3 with probability 0.3.

    The random number of a row depends on the seed only, so subsets with the same seed have as many rows in common as
    possible.
    """
    # floor(w + u) with u uniform on [0, 1) has the mean w.
    phase_N = stream(seed, "order", "phase").random(len(weight_N))
    times_N = np.floor(weight_N + phase_N).astype(np.int64)
    with rows.open(encoding="utf-8", newline="\n") as lines, out.open("w", encoding="utf-8", newline="\n") as file:
        for line, times in zip(lines, times_N.tolist(), strict=True):
            file.write(line * times)


def utility_by_command(
    words: Sequence[str],
    run: Run,
    weight_N: F64,
    runs_path: Path,
    tokenizer: HfTokenizer,
    tokens: Sequence[UnitTokens],
    device: str,
) -> F64:
    """Train a run by the command, and return the utility (-loss, nats per token) of every unit, (E,).

    Corpus and checkpoint are deleted afterwards, except for the checkpoint of the whole corpus, which is the reference.
    The checkpoint of a job remains if scoring fails for a reason that is not its own, e.g. because it is interrupted.

    Args:
        words: result of `command_words`; not executed if a job has already written a checkpoint.
        weight_N: weights of the rows.
        runs_path: directory of the runs.
        tokenizer: tokenizer of the units; that of the checkpoint must be the same.
    Raises:
        ModelError: the command failed or wrote no checkpoint, or the checkpoint is unreadable or has another tokenizer.
    """
    job = job_of(run, runs_path)
    by_job = (job / "checkpoint").exists()
    if by_job:
        outer = work = job
    else:
        outer = runs_path.resolve() / "work" / run.stem
        discard(outer)  # left by a process that was killed; only the holder of the run's lease gets here
        work = outer / str(os.getpid())
        work.mkdir(parents=True)
    corpus, checkpoint = work / "corpus.jsonl", work / "checkpoint"
    try:
        if not by_job:
            write_subset(runs_path / ROWS, weight_N, run.seed, corpus)
            _run_logged(_fill_placeholders(words, run, corpus, checkpoint), runs_path / "logs" / run.stem)
        if not checkpoint.is_dir() or not any(checkpoint.iterdir()):
            raise ModelError("the command left no checkpoint in the directory of {checkpoint}")
        has_tokenizer = any((checkpoint / name).exists() for name in TOKENIZER_FILES)
        tokenizer_path = None if has_tokenizer else tokenizer.tokenizer.name_or_path
        model = ReferenceModel.load(
            ModelSettings(path=str(checkpoint), tokenizer=tokenizer_path, dtype="float32", device=device, check=False)
        )
        longest, context = max(unit.longest for unit in tokens), model.context
        if model.tokenizer.fingerprint != tokenizer.fingerprint or (context is not None and longest > context):
            raise ModelError(
                "the checkpoint has another tokenizer than the units, or a shorter context: it reads at most "
                f"{context} tokens, a unit has {longest}; set tokenizer and targets.max_length to its own with a new "
                "--out"
            )
        utility_E: F64 = -evaluate_units(model.model, tokens)
        if run.subset_id == WHOLE_CORPUS_RUN:
            reference = runs_path / "reference" / f"seed-{run.seed}"
            discard(reference)
            reference.parent.mkdir(exist_ok=True)
            checkpoint.rename(reference)
    except BaseException as err:
        if not by_job or isinstance(err, ModelError):
            discard(outer)
        raise
    discard(outer)
    return utility_E


def job_of(run: Run, runs_path: Path) -> Path:
    """Return the directory with the corpus and the checkpoint of a run's job."""
    return runs_path.resolve() / "jobs" / run.stem


def job_line(words: Sequence[str], run: Run, weight_N: F64, runs_path: Path) -> str:
    """Write the corpus of a run, and return the shell line that trains on it.

    The line can be run repeatedly, as schedulers do with a job that is requeued: a complete checkpoint is kept.
    """
    work = job_of(run, runs_path)
    work.mkdir(parents=True, exist_ok=True)
    corpus, part, checkpoint = work / "corpus.jsonl", work / "checkpoint.part", work / "checkpoint"
    if not corpus.exists():
        with atomic_path(corpus) as aside:
            write_subset(runs_path / ROWS, weight_N, run.seed, aside)
    steps = [
        ["rm", "-rf", str(part)],
        _fill_placeholders(words, run, corpus, part),
        ["mv", str(part), str(checkpoint)],
    ]
    train = " && ".join(shlex.join(step) for step in steps)
    return f"{shlex.join(['test', '-e', str(checkpoint)])} || {{ {train}; }}"


def _fill_placeholders(words: Sequence[str], run: Run, corpus: Path, checkpoint: Path) -> list[str]:
    values = {"corpus": str(corpus), "checkpoint": str(checkpoint), "seed": str(run.seed)}
    return [re.sub(r"\{(\w+)\}", lambda match: values[match[1]], word) for word in words]


def _run_logged(words: Sequence[str], log: Path) -> None:
    """Run a command with its output in log files; the error of a failure has the last line of stderr."""
    log.parent.mkdir(exist_ok=True)
    stdout_path, stderr_path = (log.parent / f"{log.name}.{kind}.txt" for kind in ("stdout", "stderr"))
    try:
        with stdout_path.open("wb") as stdout, stderr_path.open("wb") as stderr:
            process = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, check=False)
    except OSError as err:
        raise ModelError(f"{words[0]!r} cannot be started: {err.strerror}") from err
    if process.returncode:
        with stderr_path.open("rb") as file:  # the log may be long: read its end only
            file.seek(max(0, stderr_path.stat().st_size - STDERR_TAIL_BYTES))
            lines = file.read(STDERR_TAIL_BYTES).decode("utf-8", errors="replace").split("\n")
        lines_of_text = [line.strip() for line in lines if line.strip()]
        last = plain(lines_of_text[-1], MAX_STDERR_CHARS) if lines_of_text else "nothing on stderr"
        raise ModelError(f"exit status {process.returncode}: {last} (full log: {stderr_path})")
