"""environment.json: what was trained on what, and what may change when an environment is gone on with."""

import json
import shlex
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import to_jsonable_python

from grasp.errors import EnvironmentDataError
from grasp.files import differences, is_signed
from grasp.settings import CorpusSettings, Settings, TargetSettings
from grasp.targets.units import LossOn
from grasp.yaml_files import describe

Role = Literal["dev", "held-out"]

FORMAT_VERSION = 1
INFO = "environment.json"


class TargetInfo(Settings):
    """One target as it was scored."""

    fingerprint: str = Field(description="Of its units: ids, prompts, completions, tokens that carry loss.")
    loss_on: LossOn
    unit_ids: tuple[str, ...]


class FamilyInfo(Settings):
    """How the subsets were drawn, so that they can be drawn again."""

    spec: str = Field(description="E.g. mixture:topic.")
    seed: int
    purpose: str


class EnvironmentInfo(Settings):
    """environment.json."""

    format: Literal["grasp-environment"] = "grasp-environment"
    format_version: int = FORMAT_VERSION
    role: Role = Field(description="Whether protocols may be selected on it.")
    held_out_targets: tuple[str, ...] = Field((), description="Targets of a dev environment that are held out.")
    recipe: str = Field(description="Name of the recipe.")
    recipe_settings: dict[str, Any] = Field({}, description="The recipe in full.")
    checkpoint: str = Field("reference/seed-0", description="The reference model, relative to the environment.")
    seeds: tuple[int, ...]
    corpus_fingerprint: str
    n_rows: int
    targets: dict[str, TargetInfo]
    side: Literal["retained"] = "retained"
    family: FamilyInfo | None = Field(None, description="None: the subsets were given as a table.")
    subset_ids: tuple[str, ...]
    masks_checksum: str = Field(description="Over subset ids, row positions and weights, in order.")
    reference: bool = Field(True, description="Whether the whole corpus is trained on as well, once a seed.")
    made_by: dict[str, Any] = Field({}, description="Program, versions and settings; not compared on resume.")
    checksum: str = Field("", description="Of this file, with the checksum itself as zeros; empty: written by hand.")

    def build_command(self, path: Path, out: str = "art") -> str | None:
        """The `grasp build` that gives an artifact of the same rows and units; None: it is not known how they came.

        Args:
            path: directory of the environment.
        """
        corpus, targets = (self.made_by.get(group) for group in ("corpus", "targets"))
        if not isinstance(corpus, dict) or not isinstance(targets, dict) or not self.reference:
            return None
        words = ["--model", str(path / self.checkpoint), "--corpus", str(corpus["path"])]
        words += ["--targets", ",".join(targets["names"])] if targets.get("names") else []
        words += [*_changed("corpus", corpus, CorpusSettings), *_changed("targets", targets, TargetSettings)]
        return f"grasp build {shlex.join([*words, '--out', out])}"


def _changed(group: str, given: dict[str, Any], kind: type[Settings]) -> list[str]:
    """What a build must be told beside path and names: settings that are not the default."""
    fields = {name: field for name, field in kind.model_fields.items() if name not in ("path", "names")}
    plain = {name: to_jsonable_python(field.get_default(call_default_factory=True)) for name, field in fields.items()}
    other = [name for name in given if name in plain and given[name] != plain[name]]
    return [part for name in other for part in ("--set", f"{group}.{name}={json.dumps(given[name])}")]


def check_growth(path: Path, begun: EnvironmentInfo, now: EnvironmentInfo, checksums: list[str]) -> None:
    """Allow more seeds and more subsets of the same family; name every other difference."""
    fixed = set(EnvironmentInfo.model_fields) - {"seeds", "subset_ids", "masks_checksum", "made_by", "checksum"}
    differs = list(
        differences(begun.model_dump(mode="json", include=fixed), now.model_dump(mode="json", include=fixed))
    )
    if now.seeds[: len(begun.seeds)] != begun.seeds:
        differs.append(f"seeds: was {begun.seeds}, is {now.seeds}")
    n_begun = len(begun.subset_ids)
    if len(checksums) < n_begun or checksums[n_begun - 1] != begun.masks_checksum:
        differs.append(
            f"subsets: was {n_begun} with checksum {begun.masks_checksum}, is {len(checksums)} with {checksums[-1]}"
        )
    if differs:
        shortened = [text if len(text) < 400 else text[:400] + " ..." for text in differs]
        raise EnvironmentDataError(
            f"{path}: another environment was begun here: {'; '.join(shortened)}; "
            "go on with the old settings, or choose another directory"
        )


def read_info(path: Path) -> EnvironmentInfo:
    try:
        data = path.read_bytes()
        info = EnvironmentInfo.model_validate_json(data)
    except (FileNotFoundError, NotADirectoryError) as err:
        raise EnvironmentDataError(f"{path}: no such file; {path.parent} is not an environment") from err
    except ValidationError as err:
        raise EnvironmentDataError(f"{describe(err, str(path))}; restore it from a copy") from err
    if info.format_version != FORMAT_VERSION:
        raise EnvironmentDataError(f"{path}: format version {info.format_version}, this program reads {FORMAT_VERSION}")
    if info.checksum and not is_signed(data):
        raise EnvironmentDataError(f"{path}: damaged: its checksum does not match; restore it from a copy")
    return info.model_copy(update={"checksum": ""})
