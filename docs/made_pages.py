"""Generate the reference pages of all packages and commands, and add them to the navigation."""

from pathlib import Path

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from grasp.cli import app

PACKAGE = Path(__file__).parents[1] / "src" / "grasp"
REFERENCE, COMMANDS = "Reference", "reference/commands.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages at the end of the section "Reference"."""
    assert config.nav is not None
    section = next(entry for entry in config.nav if isinstance(entry, dict) and REFERENCE in entry)
    section[REFERENCE] += [COMMANDS, *(f"reference/{name}.md" for name in _packages())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    files.append(File.generated(config, COMMANDS, content=_commands()))
    for name in _packages():
        files.append(File.generated(config, f"reference/{name}.md", content=_package(name)))
    return files


def _packages() -> list[str]:
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "cli")


def _package(name: str) -> str:
    """Return a page with all public modules of a package and of its subpackages."""
    root = PACKAGE / name
    modules = sorted(path.relative_to(PACKAGE.parent).with_suffix("") for path in root.rglob("*.py"))
    dotted = [".".join(path.parts).removesuffix(".__init__") for path in modules if path.name != "__main__"]
    return "\n\n".join([f"# grasp.{name}", *(f"::: {module}" for module in dotted)]) + "\n"


def _commands() -> str:
    """Return a page with the help text of every command."""
    group = typer.main.get_command(app)
    parts = ["# Commands", "The output of `grasp COMMAND --help`."]
    commands = dict(group.commands)  # type: ignore[attr-defined]
    commands |= {f"runs {name}": command for name, command in commands.pop("runs").commands.items()}
    for name, command in sorted(commands.items()):
        with command.make_context(f"grasp {name}", [], resilient_parsing=True) as context:
            parts.append(f"## grasp {name}\n\n```text\n{command.get_help(context).strip()}\n```")
    return "\n\n".join(parts) + "\n"
