"""See how far to trust it: grasp diagnose, methods."""

import textwrap
from pathlib import Path

import typer

import grasp
from grasp.cli.app import command, option, rare
from grasp.cli.console import show
from grasp.cli.options import Art, JsonFile, OwnSettings, ProtocolFile, merged
from grasp.files import check_outputs


@command(
    "grasp diagnose art",
    "grasp diagnose art --environment dev --protocol protocol.json --json findings.json",
)
def diagnose(
    art: Art,
    environment: Path | None = option(
        "--environment DIR", "Retrained subsets: do predictions order them rightly?", None
    ),
    json_file: JsonFile = None,
    protocol: ProtocolFile = None,
    rows: int = rare("--rows N", "Rows that are looked at.", 256),
    subsets: int = rare("--subsets N", "Subsets whose sketches are compared.", 64),
    assignments: OwnSettings = [],
    seed: int = rare("--seed N", "Seed of the draw of rows.", 0, min=0),
) -> None:
    """Check the approximations of an artifact on its own rows.

    Every line says what a healthy value is, and what to change when it is not. Features that were not kept are computed
    again with the model, where it is still there.
    """
    artifact = grasp.open(art)
    read = {"--protocol reads": protocol, "is the environment": environment}
    check_outputs({"--json": json_file}, artifact.files.reads | read)
    found = artifact.diagnose(
        rows=rows, subsets=subsets, seed=seed, runs=environment, protocol=protocol, own=merged(None, assignments, {})
    )
    print(found)
    if json_file is not None:
        found.write_json(json_file)


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
    from grasp.runs.methods import entry_of
    from grasp.runs.methods import methods as installed

    if name is None:
        show("methods", ("name", "text"), [(entry.name, entry.says()) for entry in installed().values()])
        return
    entry = entry_of(name)
    kind = entry.load()
    print(f"{entry.name}\n")
    print("\n".join(line.strip() for line in (kind.__doc__ or "").strip().splitlines()))
    print(f"\nlooks at: {', '.join(['rows and units', *sorted(kind.looks_at)])}")
    if kind.needs_modules:
        extras = sorted(set(kind.needs_modules.values()))
        print(f"needs: pip install 'grasp-attribution[{','.join(extras)}]'")
    for field, info in kind.settings_type.model_fields.items():
        default = "must be given" if info.is_required() else f"default {info.get_default(call_default_factory=True)!r}"
        print(f"\n{field}, {default}")
        print(textwrap.fill(info.description or "", width=100, initial_indent="    ", subsequent_indent="    "))
