"""grasp methods"""

import textwrap

import typer

from grasp.cli.app import command
from grasp.cli.console import show


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
    from grasp.runs.configured import entry_of
    from grasp.runs.configured import methods as installed

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
