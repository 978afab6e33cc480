"""Pages that are made, not written: the reference of every package and command, and their places in the site."""

from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from grasp.cli import app

PACKAGE = Path(__file__).parents[1] / "src" / "grasp"
HOW_TO, REFERENCE, COMMANDS = "How to", "Reference", "reference/commands.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put pages that the settings do not name under "How to", and the reference before the last page."""
    assert config.nav is not None
    named = set(_pages(config.nav))
    others = [path.name for path in sorted(Path(config.docs_dir).glob("*.md")) if path.name not in named]
    how_to = next(entry for entry in config.nav if isinstance(entry, dict) and HOW_TO in entry)
    how_to[HOW_TO] += others
    packages = [f"reference/{name}.md" for name in _packages()]
    config.nav.insert(len(config.nav) - 1, {REFERENCE: [COMMANDS, *packages]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference."""
    files.append(File.generated(config, COMMANDS, content=_commands()))
    for name in _packages():
        files.append(File.generated(config, f"reference/{name}.md", content=_package(name)))
    return files


def _pages(entries: list[Any]) -> list[str]:
    """Files that a navigation names, sections within sections."""
    found: list[str] = []
    for entry in entries:
        inner = list(entry.values()) if isinstance(entry, dict) else [entry]
        for one in inner:
            found += _pages(one) if isinstance(one, list) else [one]
    return found


def _packages() -> list[str]:
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "cli")


def _package(name: str) -> str:
    """A page with every public module of a package, and the modules of packages inside it."""
    root = PACKAGE / name
    modules = sorted(path.relative_to(PACKAGE.parent).with_suffix("") for path in root.rglob("*.py"))
    dotted = [".".join(path.parts).removesuffix(".__init__") for path in modules if path.name != "__main__"]
    return "\n\n".join([f"# grasp.{name}", *(f"::: {module}" for module in dotted)]) + "\n"


def _commands() -> str:
    """What every command says of itself."""
    group = typer.main.get_command(app)
    parts = ["# Commands", "What `grasp COMMAND --help` says."]
    found = dict(group.commands)  # type: ignore[attr-defined]
    found |= {f"runs {name}": command for name, command in found.pop("runs").commands.items()}
    for name, command in sorted(found.items()):
        with command.make_context(f"grasp {name}", [], resilient_parsing=True) as context:
            parts.append(f"## grasp {name}\n\n```text\n{command.get_help(context).strip()}\n```")
    return "\n\n".join(parts) + "\n"
