"""Commands that evaluate predictions: grasp evaluate, methods."""

import textwrap
from typing import Any

import typer

import grasp
from grasp.cli.app import command
from grasp.cli.console import check_outputs, print_evaluation
from grasp.cli.options import Art, JsonFile, split_names
from grasp.errors import SettingsError
from grasp.extras import install_hint
from grasp.progress_display import Watch
from grasp.text import text_table


@command(
    "grasp methods",
    "grasp methods bm25",
    epilog="Example of a file for --method-settings, with two configurations of one method:\n"
    "  bm25: {query: completion}\n"
    "  bm25-lucene: {method: bm25, variant: lucene}\n"
    "In addition to its settings, a configuration may have `seed`, `weighting` (mean\n"
    "or count over the rows of a subset), `negative` (factor of negative scores when\n"
    "subsets are predicted), and `oracle_selected: true` if it was selected on the\n"
    "runs on which it is evaluated; it is then listed separately.",
)
def methods(
    name: str = typer.Argument(None, metavar="METHOD", help="Show the settings of a method. Default: list all."),
) -> None:
    """List published attribution methods, or the settings of one.

    Use their names with `grasp evaluate --methods` and `grasp score --method`.
    """
    from grasp.entry_points import summary_of
    from grasp.methods.registry import load_method, registered_methods

    if name is None:
        rows = [(name, summary_of(point)) for name, point in registered_methods().items()]
        print(text_table("methods", ("name", "description"), rows))
        return
    method_class = load_method(name)
    print(f"{name}\n")
    print("\n".join(line.strip() for line in (method_class.__doc__ or "").strip().splitlines()))
    print(f"\ninputs: {', '.join(['rows and units', *sorted(method_class.requires)])}")
    if method_class.required_modules:
        extras = sorted(set(method_class.required_modules.values()))
        print(f"needs: {install_hint(*extras)}")
    for field, info in method_class.settings_type.model_fields.items():
        default = "required" if info.is_required() else f"default {info.get_default(call_default_factory=True)!r}"
        print(f"\n{field}, {default}")
        print(textwrap.fill(info.description or "", width=100, initial_indent="    ", subsequent_indent="    "))


@command(
    "grasp evaluate art --runs env --protocol protocol.yaml --json result.json",
    "grasp evaluate art --runs env --methods bm25,loss,datamodels",
    "grasp evaluate art --runs env --method-settings methods.yaml --checkpoints env/reference/seed-0",
    verb="grasp.api.evaluate",
    more="method_settings checkpoints",
    python="resamples",
)
def evaluate(
    art: Art,
    json_file: JsonFile = None,
    **params: Any,
) -> None:
    opened = grasp.open(art)
    check_outputs({"--json": json_file}, artifact=opened.files, params=params, streamed=("--json",))
    if split_names(params["methods"]) == []:
        raise SettingsError(
            f"--methods: got {params['methods']!r}, expected names separated by commas; see grasp methods"
        )
    with Watch() as watch:
        result = grasp.evaluate(opened, **params, progress=watch)
    print_evaluation(result, json_file)
