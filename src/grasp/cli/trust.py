"""See how far to trust it: grasp retrain, evaluate, methods."""

import textwrap
from pathlib import Path
from typing import Any

import typer

import grasp
from grasp.cli.app import command, option, rare
from grasp.cli.console import check_outputs, show, tell
from grasp.cli.options import Address, Art, Assignments, ConfigFile, JsonFile, Quiet, cluster, merged, names
from grasp.cli.progress_display import Watch
from grasp.errors import SettingsError
from grasp.extras import install_hint
from grasp.files import STREAMS, write_whole
from grasp.text import printable


@command(
    "grasp methods",
    "grasp methods bm25",
    also="A settings file for --method-settings, two configurations of one method:\n"
    "  bm25: {query: completion}\n"
    "  bm25-lucene: {method: bm25, variant: lucene}\n"
    "Beside its settings a configuration may have `seed`, `weighting` (mean or count\n"
    "over a subset's rows), `negative` (what negative scores are multiplied by where\n"
    "subsets are predicted), and `oracle_selected: true` if it was chosen on the\n"
    "runs it will be judged by: it is then kept apart.",
)
def methods(
    name: str = typer.Argument(None, metavar="[METHOD]", help="Method whose settings are shown; none: all methods."),
) -> None:
    """List published methods, or the settings of one.

    They are what `grasp evaluate --methods` and `grasp score --method` take.
    """
    from grasp.methods.registry import find_method
    from grasp.methods.registry import methods as installed

    if name is None:
        show("methods", ("name", "text"), [(entry.name, entry.summary()) for entry in installed().values()])
        return
    entry = find_method(name)
    kind = entry.load()
    print(f"{entry.name}\n")
    print("\n".join(line.strip() for line in (kind.__doc__ or "").strip().splitlines()))
    print(f"\nlooks at: {', '.join(['rows and units', *sorted(kind.requires)])}")
    if kind.required_modules:
        extras = sorted(set(kind.required_modules.values()))
        print(f"needs: {install_hint(*extras)}")
    for field, info in kind.settings_type.model_fields.items():
        default = "must be given" if info.is_required() else f"default {info.get_default(call_default_factory=True)!r}"
        print(f"\n{field}, {default}")
        print(textwrap.fill(info.description or "", width=100, initial_indent="    ", subsequent_indent="    "))


@command(
    "grasp retrain --corpus corpus.parquet --targets sciq --family mixture:topic --out env",
    "grasp retrain --like art --family mixture:topic --out env",
    "grasp retrain --out env --resume -B 64",
    "grasp retrain --like art --train-command 'python train.py --data {corpus} --out {checkpoint}' --out env",
    "grasp retrain --out env --resume --engine ray --workers 16 --address auto",
    verb="grasp.api.retrain",
    more="text_column id_column workers train_command stack",
)
def retrain(
    settings: ConfigFile = None,
    assign: Assignments = [],
    print_jobs: bool = rare(
        "--print-jobs",
        "Score what earlier jobs left; print a shell line for each run of --train-command that is left.",
        False,
    ),
    engine: str = rare(
        "--engine NAME", "local: processes here; ray: of a Ray cluster whose nodes all reach --out.", "local"
    ),
    address: Address = None,
    quiet: Quiet = False,
    **asked: Any,
) -> None:
    asked["targets"] = names(asked["targets"])
    given = merged(settings or {}, assign, {}) if settings or assign else None
    spec = cluster(engine, asked["workers"], address, None)
    with Watch(quiet=quiet) as watch:
        environment = grasp.retrain(
            **asked, settings=given, jobs=print if print_jobs else None, cluster=spec, progress=watch.runs
        )
    if not (print_jobs and environment.pending()):  # lines are for a scheduler: nothing else on standard output
        tell(environment.summary())


@command(
    "grasp evaluate art --runs env --protocol protocol.yaml --csv result.csv",
    "grasp evaluate art --runs test --controls --development dev --oracle ridge",
    "grasp evaluate art --runs env --methods bm25,loss,datamodels",
    "grasp evaluate art --runs env --method-settings methods.yaml --checkpoints env/reference/seed-0",
    "grasp evaluate art --runs env --predictions theirs.parquet --predictions row_scores.npy",
    verb="grasp.api.evaluate",
    more="partial controls development family method_settings checkpoints cache oracles resamples",
)
def evaluate(
    art: Art,
    csv_file: Path | None = option("--csv FILE", "A line a method and target, as CSV.", None),
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **asked: Any,
) -> None:
    opened = grasp.open(art)
    outputs = {"--json": json_file, "--csv": csv_file}
    check_outputs(outputs, artifact=opened.files, asked=asked, streamed=("--json", "--csv"))
    if names(asked["methods"]) == []:
        raise SettingsError(
            f"--methods: got {asked['methods']!r}, expected names separated by commas; see grasp methods"
        )
    with Watch(quiet=quiet) as watch:
        result = grasp.evaluate(opened, **asked, progress=watch)
    if not {json_file, csv_file} & {*STREAMS}:
        print(result)
    for file, text in ((json_file, result.to_json), (csv_file, result.to_csv)):
        if file in STREAMS:
            print(printable(text()), end="")
        elif file is not None:
            write_whole(file, text().encode())
