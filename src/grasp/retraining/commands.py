"""The commands `grasp retrain` and `grasp check-selection`: parse options, call a function, print the result."""

from typing import Any

import typer

import grasp
from grasp.cli.app import command, rare
from grasp.cli.console import print_result
from grasp.cli.options import Address, Art, Assignments, ConfigFile, cluster_spec, merge_settings, split_names
from grasp.progress_display import Watch

commands = typer.Typer()  # the entry point of the group `grasp.commands`


@command(
    "grasp retrain --corpus corpus.parquet --targets sciq --family mixture:topic --out env",
    "grasp retrain --like art --family mixture:topic --out env",
    "grasp retrain --out env --resume -B 64",
    "grasp retrain --like art --train-command 'python train.py --data {corpus} --out {checkpoint}' --out env",
    "grasp retrain --like art --train further --recipe dpo.yaml --family uniform:0.5 --out env",
    "grasp retrain --out env --resume --engine ray --workers 16 --address auto",
    group=commands,
    verb="grasp.retraining.retrain",
    more="model loss workers train_command",
    python="text_column id_column",
)
def retrain(
    settings: ConfigFile = None,
    assign: Assignments = [],
    print_jobs: bool = rare(
        "--print-jobs",
        "Score checkpoints of earlier jobs; print a shell line per remaining run of --train-command.",
        False,
    ),
    engine: str = rare(
        "--engine NAME", "local: processes on this machine; ray: a Ray cluster whose nodes share --out.", "local"
    ),
    address: Address = None,
    **params: Any,
) -> None:
    params["targets"] = split_names(params["targets"])
    settings_data = merge_settings(settings or {}, assign, {}) if settings or assign else None
    spec = cluster_spec(engine, params["workers"], address, None)
    with Watch() as watch:
        retrained = grasp.retrain(
            **params, settings=settings_data, jobs=print if print_jobs else None, cluster=spec, progress=watch.runs
        )
    if not (print_jobs and retrained.pending()):  # with --print-jobs, standard output has nothing but shell lines
        print_result(retrained.summary())


@command(
    "grasp check-selection art --selection kept.json --out check",
    name="check-selection",
    group=commands,
    verb="grasp.retraining.check_selection",
)
def check_selection(art: Art, **params: Any) -> None:
    from grasp.retraining.check_selection import check_selection as check

    with Watch() as watch:
        result = check(grasp.open(art).files, **params, progress=watch.runs)
    print_result(result)
