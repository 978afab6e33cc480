"""Mixtures of label values, and their files: each format is a reader of `mixture` (`grasp.file_readers`).

A mixture says how often the rows of each value of a label are trained on. A format has `suffixes`, of which the first
is that of files it writes, `write(weights)`, which returns the text of a file and a description of its weights,
`claims(path)` and `read(path)`. Start with `write_mixture` and `read_mixture`.

Shape letter: G label values.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grasp.arrays import F64
from grasp.errors import RunsError, SettingsError
from grasp.file_readers import claimed, readers
from grasp.files import write_atomically
from grasp.text import did_you_mean

MEASURES = ("rows", "tokens", "documents")
TABLE_SUFFIX = ".csv"  # such a file is a table of runs, unless it is in a directory of mixtures
MAX_FILE_BYTES = 4 << 20
DIGITS = 8  # decimal digits of weights


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """A mixture of the values of a label.

    Attributes:
        label: name of the label.
        values: its values.
        size_G: rows, tokens and documents of each value in the corpus, (G,), by measure.
        times_G: number of times that each row of a value is seen in one epoch of the corpus, (G,).
    """

    label: str
    values: tuple[str, ...]
    size_G: Mapping[str, F64]
    times_G: F64

    def shares(self, measure: str) -> F64:
        """Return the shares of rows, tokens or documents in the mixture, (G,): decimals that add up to 1."""
        seen_G = self.times_G * self.size_G[measure]
        unrounded_G = seen_G / seen_G.sum() * 10**DIGITS
        share_G = np.floor(unrounded_G)
        n_missing = round(10**DIGITS - share_G.sum())
        share_G[np.argsort(share_G - unrounded_G, kind="stable")[:n_missing]] += 1  # the largest remainders
        return np.asarray(share_G / 10**DIGITS)

    def names(self) -> tuple[str, ...]:
        """Return distinct names for files that consist of letters, digits, `-`, `_` and `.`."""
        names: list[str] = []
        for value in self.values:
            name = re.sub(r"[^\w.-]+", "_", value, flags=re.ASCII).strip("_.") or "value"
            names.append(name if name not in names else f"{name}-{len(names) + 1}")
        return tuple(names)


@dataclass(frozen=True, slots=True)
class MixtureFile:
    """A mixture read from a file.

    Attributes:
        measure: what the weights are shares of, or `times` if they are repetitions.
        weight_of: weight by label value.
    """

    measure: str
    weight_of: Mapping[str, float]


def check_format(path: Path | None, form: str) -> None:
    """Validate the format of a mixture and the suffix of its file.

    Raises:
        SettingsError: the format is unknown, there is no path, or it has another suffix.
    """
    formats = readers("mixture")
    if form not in formats:
        raise SettingsError(f"format: got {form!r}{did_you_mean(form, formats)}; expected one of {', '.join(formats)}")
    suffix = formats[form].suffixes[0]
    if path is None:
        raise SettingsError(f"format: {form} requires a file; pass --out mixture{suffix}")
    if path.suffix != suffix:
        raise SettingsError(f"{path}: expected a path that ends in {suffix} for {form}")


def write_mixture(weights: MixtureWeights, path: Path | str, form: str) -> str:
    """Write a mixture in the format of a tool and return a line that describes its weights.

    Args:
        weights: the mixture.
        path: file to write.
        form: name of the format.
    Raises:
        SettingsError: the format is unknown, or the path has another suffix.
    """
    path = Path(path)
    check_format(path, form)
    text, description = readers("mixture")[form].write(weights)
    write_atomically(path, text.encode())
    return f"{path}: {form}, {description}"


def mixture_files(path: Path) -> list[Path]:
    """Return the files of a directory of mixtures, one per run, or a single file; none if it is a table of runs."""
    suffixes = {suffix for form in readers("mixture").values() for suffix in form.suffixes}
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in suffixes)
    return [path] if path.suffix in suffixes - {TABLE_SUFFIX} else []


def read_mixture(path: Path) -> MixtureFile:
    """Read a mixture in the format of a tool, written by `grasp mix --format` or by hand.

    Raises:
        RunsError: the file cannot be read, its format is unknown, or weights are negative or not numbers.
    """
    reason = "in a known format"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RunsError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB, expected a mixture")
        claim = claimed("mixture", path)
        if claim is None:
            raise RunsError(f"{path}: not a mixture in a known format ({', '.join(readers('mixture'))})")
        reason = f"although {claim.reason}"
        mixture: MixtureFile = claim.reader.read(path)
    except SettingsError as err:
        raise RunsError(str(err)) from err
    except OSError as err:
        raise RunsError(f"{path}: cannot be read: {err.strerror or err}") from err
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError) as err:
        raise RunsError(f"{path}: not a mixture {reason}: {err}") from err
    weights = list(mixture.weight_of.values())
    if not weights or not (np.isfinite(weights).all() and min(weights) >= 0 and sum(weights) > 0):
        raise RunsError(f"{path}: got weights {weights[:5]}, expected nonnegative numbers that are not all 0")
    return mixture


def read_mixtures_of_runs(files: Sequence[Path]) -> tuple[str, dict[str, Mapping[str, float]]]:
    """Read the mixtures of runs, one file per run, whose stem is the name of the run.

    Returns:
        What the weights are shares of, or `times`, and the weights by run and label value.

    Raises:
        RunsError: as `read_mixture`, two files have the same stem, or their weights are of different kinds.
    """
    mixtures = {file.stem: read_mixture(file) for file in files}
    if len(mixtures) < len(files):
        (duplicate, _), *_ = Counter(file.stem for file in files).most_common(1)
        raise RunsError(f"{files[0].parent}: has several mixtures named {duplicate}; rename all but one")
    measures = {mixture.measure for mixture in mixtures.values()}
    if len(measures) > 1:
        first = {mixture.measure: name for name, mixture in reversed(mixtures.items())}
        raise RunsError(
            f"{files[0].parent}: weights are of different kinds: "
            f"{', '.join(f'{measure} in {name}' for measure, name in sorted(first.items()))}; write all in one format"
        )
    (measure,) = measures
    return measure, {name: mixture.weight_of for name, mixture in mixtures.items()}
