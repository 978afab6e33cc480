"""Retraining of a model that is trained further: one run after the other, of one environment or of several.

    python -m experiments.worlds.run small-12 small-48 --data ../shared/data

Killed at any moment, the same command goes on where it was: every run is a small file in `NAME/runs` in this
folder, written when it is done. All that are named fill together, first seeds first; `--until 15:25` stops in time.
"""

import argparse
import copy
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM
from transformers.utils import logging as hf_logging

import grasp
from experiments.one_line_errors import in_one_line
from experiments.worlds.prepare import prepared
from experiments.worlds.setting import (
    ENVIRONMENTS,
    LENGTH,
    NAMES,
    Corpus,
    Kind,
    Name,
    draw_subsets,
    open_corpus,
    row_order,
    target_settings,
)
from experiments.worlds.training import train, unit_losses
from grasp.files import write_atomically
from grasp.models.tokenizer import HfTokenizer
from grasp.retraining.plan import row_names
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import Run, RunsInfo, TargetInfo
from grasp.runs.utility_tables import encode_utilities
from grasp.targets import Unit, UnitSet, UnitTokens, load_units
from grasp.targets.units import LossOn

FOLDER = Path(__file__).parent
SEEDS = (0, 1)
COMPLETION: LossOn = "completion"


@dataclass(frozen=True)
class World:
    """An environment with the model, rows and units that its runs need."""

    kind: Kind
    model: LlamaForCausalLM
    environment: RetrainedRuns
    corpus: Corpus
    units: list[UnitTokens]
    retained: dict[str, NDArray[np.int64]]


def open_world(name: Name, model: LlamaForCausalLM, tokenizer: HfTokenizer, work: Path, out: Path) -> World:
    """Begin an environment, or go on with it."""
    kind = ENVIRONMENTS[name]
    corpus = open_corpus(name, work, tokenizer)
    units = list(load_units(target_settings(name, work)).units)
    block = draw_subsets(corpus.label, kind.subsets, kind.subset_rows, nested=kind.nested)
    info = RunsInfo(
        role=kind.role,
        recipe=kind.recipe.name,
        recipe_settings=kind.recipe.settings(),
        seeds=SEEDS,
        corpus_fingerprint=corpus.store.fingerprint,
        n_rows=corpus.store.n_rows,
        targets=_targets(units),
        family=None,
        subset_ids=(),
        masks_checksum="",
        reference=False,
        made_by={"program": f"grasp {grasp.__version__}", "torch": torch.__version__},
    )
    environment = RetrainedRuns.create(out / name, info, [block], row_names(corpus.store))
    retained = {b: block.weights_BN[[k]].indices.astype(np.int64) for k, b in enumerate(block.subset_ids)}
    return World(kind, model, environment, corpus, UnitSet(tuple(units)).tokenize(tokenizer, LENGTH), retained)


def _targets(units: list[Unit]) -> dict[str, TargetInfo]:
    by_target: dict[str, list[Unit]] = {}
    for unit in units:
        by_target.setdefault(unit.target, []).append(unit)
    return {
        target: TargetInfo(
            fingerprint=UnitSet(tuple(units)).fingerprint,
            loss_on=COMPLETION,
            unit_ids=tuple(unit.unit_id for unit in units),
        )
        for target, units in by_target.items()
    }


def turns(worlds: dict[Name, World]) -> list[tuple[Name, Run]]:
    """All runs in the order in which they are made: a second seed when every subset has a first."""
    trained = {name: world for name, world in worlds.items() if world.kind.prefix_of is None}
    all_runs = [(name, run) for name, world in trained.items() for run in world.environment.runs()]
    return sorted(all_runs, key=lambda turn: (turn[1].seed, turn[1].subset_id))


def stages(name: Name, worlds: dict[Name, World]) -> dict[int, World]:
    """Where a run of an environment is looked at: numbers of steps with the environments that they are runs of."""
    steps_of = {other: world.kind.recipe.stop or world.kind.recipe.steps for other, world in worlds.items()}
    trained = [other for other, world in worlds.items() if name in (other, world.kind.prefix_of)]
    return {steps_of[other]: worlds[other] for other in sorted(trained, key=lambda other: steps_of[other])}


def order_of(run: Run, passed: Iterable[World]) -> list[int]:
    """Rows in the order of training: those of an earlier stage first, within a stage in the order of the seed."""
    order: dict[int, None] = {}
    for world in passed:
        retained = set(world.retained[run.subset_id].tolist())
        order |= dict.fromkeys(int(i) for i in row_order(run.seed, world.corpus.store.n_rows) if int(i) in retained)
    return list(order)


def losses_of(world: World) -> NDArray[np.float64]:
    """Of every unit, by the model as it is now."""
    return unit_losses(world.model, world.units, bfloat16=world.kind.recipe.bfloat16)


def fill(worlds: dict[Name, World], until: float) -> None:
    """Make every run that is missing, until none is or the time is up."""
    models = {id(world.model): world.model for world in worlds.values()}
    base_of = {key: copy.deepcopy(model.state_dict()) for key, model in models.items()}
    for name, world in worlds.items():
        path = world.environment.path / "before.parquet"
        if not path.exists():
            loss_E = losses_of(world)
            write_atomically(path, encode_utilities([Run(0, "before")], world.environment.units, -loss_E[None]))
            print(f"{name} before: mean loss {loss_E.mean():.4f}", flush=True)
    rows_of = {name: world.corpus.rows for name, world in worlds.items()}
    for name, run in turns(worlds):
        world = worlds[name]
        if run not in world.environment.pending():
            continue
        if time.time() > until:
            print("time is up", flush=True)
            return
        began, work = time.time(), time.process_time()
        world.model.load_state_dict(base_of[id(world.model)])
        passed = stages(name, worlds)
        loss_at: dict[int, NDArray[np.float64]] = {}

        def look(
            steps: int, passed: dict[int, World] = passed, loss_at: dict[int, NDArray[np.float64]] = loss_at
        ) -> None:
            if steps in passed:
                loss_at[steps] = losses_of(passed[steps])

        order = order_of(run, passed.values())
        losses = train(world.model, rows_of[name], world.corpus.first_N, order, world.kind.recipe, after=look)
        for steps, loss_E in loss_at.items():  # the last one, by which a run is known to be there, last
            passed[steps].environment.write_run(run, -loss_E)
        print(
            f"{datetime.now():%H:%M:%S} {name} {run.stem}: training loss {np.mean(losses):.3f}, units "
            f"{', '.join(f'{loss_E.mean():.4f}' for loss_E in loss_at.values())}; {time.time() - began:.0f} s, "
            f"{time.process_time() - work:.0f} s of CPU",
            flush=True,
        )


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, run, say what went wrong in one line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.worlds.run", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=NAMES, help="Environments.")
    parser.add_argument("--data", type=Path, required=True, help="Folder of pool.parquet and instructions.parquet.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="Where the environments are.")
    parser.add_argument("--work", type=Path, help="Model and rows; Default: `work` in this folder.")
    parser.add_argument("--until", help="Begin no run after this time of day, HH:MM.")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads.")
    args = parser.parse_args(arguments)
    work: Path = args.work or FOLDER / "work"
    torch.set_num_threads(args.threads)
    hf_logging.disable_progress_bar()
    until = float("inf")
    if args.until:
        until = datetime.combine(datetime.now().date(), datetime.strptime(args.until, "%H:%M").time()).timestamp()
    whole = {ENVIRONMENTS[name].prefix_of or name for name in args.names}
    names = [name for name in NAMES if {name, ENVIRONMENTS[name].prefix_of} & whole]
    fill({name: open_world(name, *prepared(name, args.data, work), work, args.out) for name in names}, until)


if __name__ == "__main__":
    main()
