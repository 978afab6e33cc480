"""Readers of other tools' files: here, and only here, it is decided who reads a file.

A package registers its readers in the group `grasp.readers` under the name DOOR.NAME, as GRASP does with its own:

    [project.entry-points."grasp.readers"]
    "corpus.axolotl" = "grasp.formats.axolotl_entries"

A reader is a module or another object with `claims(source)`, which returns why it reads a source, or an empty text if
it does not, and `read(source, ...)`. What a source is, and what else a reader has, depends on its door:

    door       source                                   read
    corpus     path of a corpus or target               (path): fields of `grasp.settings.CorpusSettings`
    record     `FieldNames` of the records of a corpus  (values, names): record in the usual names
    target     first record of a file of units          (records, task, loss_on): list of `grasp.targets.units.Unit`
               `LOG_NAME`: pattern of file names without suffix, with the group `task`
    task       name of a target that is no file         (name, variant, loss_on): list of units
               `ALIASES`: name of the task of each alias
    passages   texts of a benchmark, for `grasp demo`   `write_passages(path, exclude_texts, per_source)`
    mixture    path of the mixture of a run             (path): `grasp.mixtures.MixtureFile`
    results    directory with the results of runs       (path): results, see `grasp.mixing.import_runs`
    run_table  table of runs                            (table): the table with one line per run
    recipe     fields of a training recipe              (fields): fields of `FineTuningRecipe`
    report     path of `grasp report --NAME`            (path): `grasp.results.Result` with tables for the page
    output     path of `grasp info` and `grasp verify`  (path): description that prints itself, with `to_dict()`
               `verify(path)`: raise ArtifactError if a file is damaged

Start with `claimed`.
"""

from typing import Any, NamedTuple

from grasp.entry_points import entries, load, package_of

GROUP = "grasp.readers"
OWN_PACKAGE = "grasp-attribution"


class Claim(NamedTuple):
    """A reader, and why it reads a source."""

    name: str
    reader: Any
    reason: str


def readers(door: str) -> dict[str, Any]:
    """Return the readers of a door by name: those of other packages first, then alphabetically.

    Raises:
        MissingExtraError: a reader cannot be imported.
    """
    names = [name for name in entries(GROUP) if name.startswith(f"{door}.")]
    names.sort(key=lambda name: package_of(entries(GROUP)[name]) == OWN_PACKAGE)
    return {name.removeprefix(f"{door}."): load(GROUP, name) for name in names}


def claimed(door: str, source: Any) -> Claim | None:
    """Return the first reader that claims a source, and why; None: no reader does, so it is in a form of GRASP.

    Raises:
        MissingExtraError: a reader cannot be imported.
    """
    for name, reader in readers(door).items():
        if reason := reader.claims(source):
            return Claim(name, reader, reason)
    return None
