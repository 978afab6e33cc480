"""Generate the reference pages of all packages, and add them to the navigation."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGE = Path(__file__).parents[1] / "src" / "grasp"
REFERENCE = "Reference"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages at the end of the section "Reference"."""
    assert config.nav is not None
    section = next(entry for entry in config.nav if isinstance(entry, dict) and REFERENCE in entry)
    section[REFERENCE] += [f"reference/{name}.md" for name in _packages()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
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
