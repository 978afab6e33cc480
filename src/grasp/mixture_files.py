"""Write and read mixtures in the file formats of training tools. Start with `write_mixture` and `read_mixture`.

A mixture says how often the rows of each value of a label are trained on. The tools differ in what their weights are:

    olmo-core      `SourceMixtureList`: target_ratio, shares of tokens
    megatron       `--data-args-path`: alternating weights and prefixes, shares of tokens (of sequences of one length)
    llama-factory  dataset and interleave_probs, shares of documents (of examples)
    axolotl        datasets: one entry per repetition of the documents, the last one with a part of the split
    datatrove      a Python module with one pipeline per repetition; SamplerFilter selects a part of the documents
    yaml, csv      shares of rows, tokens and documents, and the number of repetitions of each row

In file names, special characters of label values are replaced; a comment records the original.

Shape letter: G label values.
"""

import ast
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grasp.arrays import F64
from grasp.errors import RunsError, SettingsError
from grasp.files import write_atomically
from grasp.text import did_you_mean
from grasp.yaml_files import read_yaml

MEASURES = ("rows", "tokens", "documents")
SUFFIXES = {
    "olmo-core": ".yaml",
    "datatrove": ".py",
    "axolotl": ".yaml",
    "megatron": ".txt",
    "llama-factory": ".yaml",
    "yaml": ".yaml",
    "csv": ".csv",
}
# Suffixes of a file with a mixture. A CSV file is a table of runs, unless it is in a directory of mixtures.
READABLE_SUFFIXES = (".yaml", ".yml", ".py", ".txt")
PREFIX = "_text_document"  # suffix that Megatron's preprocessing appends to file names
# Comment that records the label value of a name in the file.
NAME_LINE = re.compile(r"^# name (\S+): (.*)$", re.MULTILINE)
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


def check_format(path: Path | None, form: str) -> None:
    """Validate the format of a mixture and the suffix of its file.

    Raises:
        SettingsError: the format is unknown, there is no path, or it has another suffix.
    """
    if form not in WRITERS:
        raise SettingsError(f"format: got {form!r}{did_you_mean(form, WRITERS)}; expected one of {', '.join(WRITERS)}")
    if path is None:
        raise SettingsError(f"format: {form} requires a file; pass --out mixture{SUFFIXES[form]}")
    if path.suffix != SUFFIXES[form]:
        raise SettingsError(f"{path}: expected a path that ends in {SUFFIXES[form]} for {form}")


def write_mixture(weights: MixtureWeights, path: Path | str, form: str) -> str:
    """Write a mixture in the format of a tool and return a line that describes its weights.

    Args:
        weights: the mixture.
        path: file to write.
        form: name of the format, a key of `WRITERS`.
    Raises:
        SettingsError: the format is unknown, or the path has another suffix.
    """
    path = Path(path)
    check_format(path, form)
    text, description = WRITERS[form](weights)
    write_atomically(path, text.encode())
    return f"{path}: {form}, {description}"


def _positive_shares(weights: MixtureWeights, measure: str) -> list[tuple[str, float, float]]:
    """Return name, share and repetitions of each value with a positive share; shares add up to 1."""
    records = zip(weights.names(), weights.shares(measure), weights.times_G, strict=True)
    return [(name, float(share), float(times)) for name, share, times in records if share > 0]


def _comments(weights: MixtureWeights, *lines: str) -> list[str]:
    """Return the comments at the head of a file, including the label values whose names differ."""
    renamed = [
        f"# name {name}: {value}"
        for name, value in zip(weights.names(), weights.values, strict=True)
        if name != value and value == " ".join(value.split())
    ]
    return [*(f"# {line}" for line in lines), *renamed]


# ------------------------------------------------------------------------------------------------------ writing
# Each writer returns the text of the file, and a description of its weights.


def _olmo_core(weights: MixtureWeights) -> tuple[str, str]:
    shares = _positive_shares(weights, "tokens")
    tokens_G = weights.size_G["tokens"]
    # repetitions of each value, if as many tokens are trained on as the corpus has
    repetitions_G = weights.shares("tokens") * tokens_G.sum() / np.maximum(tokens_G, 1)
    repetitions = dict(zip(weights.names(), repetitions_G, strict=True))
    lines = _comments(
        weights,
        "OLMo-core, SourceMixtureList: target_ratio is a share of tokens. Set paths to your tokenized files.",
        "max_repetition_ratio is for one epoch of the corpus; multiply it by the number of epochs of a longer run.",
    )
    lines.append("sources:")
    for name, share, _ in shares:
        lines += [
            f"  - source_name: {json.dumps(name)}",
            f"    target_ratio: {share!r}",
            f"    paths: [{json.dumps(f'data/{name}/*.npy')}]",
            f"    max_repetition_ratio: {max(1.0, float(np.ceil(100 * repetitions[name]) / 100))!r}",
        ]
    return "\n".join(lines) + "\n", "target_ratio is a share of tokens; set paths"


def _megatron(weights: MixtureWeights) -> tuple[str, str]:
    lines = [f"{share!r} data/{name}{PREFIX}" for name, share, _ in _positive_shares(weights, "tokens")]
    return "\n".join(lines) + "\n", "for --data-args-path; weights are shares of tokens"


def _llama_factory(weights: MixtureWeights) -> tuple[str, str]:
    shares = _positive_shares(weights, "documents")
    lines = _comments(
        weights,
        "LLaMA-Factory: interleave_probs are shares of documents. Use these names in dataset_info.json.",
    )
    lines += [
        f"dataset: {json.dumps(','.join(name for name, *_ in shares))}",
        "mix_strategy: interleave_over",
        f"interleave_probs: {json.dumps(','.join(repr(probability) for _, probability, _ in shares))}",
    ]
    return "\n".join(lines) + "\n", "interleave_probs are shares of documents"


def _axolotl(weights: MixtureWeights) -> tuple[str, str]:
    lines = _comments(
        weights,
        "Axolotl: one entry per repetition of the documents, rounded to percent. Set path and type.",
    )
    lines.append("datasets:")
    for name, _, times in _positive_shares(weights, "documents"):
        whole, percent = divmod(round(100 * times), 100)
        splits = ["train"] * whole + ([f"train[:{percent}%]"] if percent else [])
        lines += [
            line
            for split in splits
            for line in (
                f"  - path: {json.dumps(f'data/{name}.jsonl')}",
                "    ds_type: json",
                "    type: completion",
                f"    split: {json.dumps(split)}",
            )
        ]
    return "\n".join(lines) + "\n", "one entry per repetition of the documents; set path and type"


DATATROVE = '''"""A mixture by {label}: number of repetitions of the documents of each value."""

from datatrove.pipeline.filters import SamplerFilter
from datatrove.pipeline.readers import JsonlReader

# Value: directory of its documents, and how often each document is seen. Set the directories.
MIXTURE = {mixture}


def pipelines(*following):
    """Yield one datatrove pipeline per repetition of a value, followed by the given steps."""
    for folder, times in MIXTURE.values():
        whole, part = divmod(times, 1)
        for copy in range(int(whole) + (part > 0)):
            yield [JsonlReader(folder), SamplerFilter(rate=1.0 if copy < whole else part, seed=copy), *following]
'''


def _datatrove(weights: MixtureWeights) -> tuple[str, str]:
    names = weights.names()
    pairs = {
        value: (f"data/{name}", round(float(times), DIGITS))
        for value, name, times in zip(weights.values, names, weights.times_G, strict=True)
        if times > 0
    }
    mixture = "{\n" + "".join(f"    {value!r}: {pair!r},\n" for value, pair in pairs.items()) + "}"
    label = re.sub(r'["\\]', "", " ".join(weights.label.split()))
    return DATATROVE.format(label=label, mixture=mixture), "pipelines(*steps); numbers are repetitions of documents"


def _yaml(weights: MixtureWeights) -> tuple[str, str]:
    lines = ["# Shares of each value in the mixture, and the number of times that each of its rows is seen."]
    lines += [f"label: {json.dumps(weights.label)}", "weights:"]
    columns = {measure: weights.shares(measure) for measure in MEASURES} | {"times": weights.times_G}
    for measure, values_G in columns.items():
        lines.append(f"  {measure}:")
        pairs = zip(weights.values, values_G, strict=True)
        lines += [f"    {json.dumps(value)}: {round(float(number), DIGITS)!r}" for value, number in pairs]
    return "\n".join(lines) + "\n", "shares of rows, tokens and documents"


def _csv(weights: MixtureWeights) -> tuple[str, str]:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["value", *(f"share_of_{measure}" for measure in MEASURES), "times_as_often"])
    columns = [weights.shares(measure) for measure in MEASURES] + [weights.times_G]
    for value, *numbers in zip(weights.values, *columns, strict=True):
        table.writerow([value, *(repr(round(float(number), DIGITS)) for number in numbers)])
    return text.getvalue(), "shares of rows, tokens and documents"


WRITERS: Mapping[str, Callable[[MixtureWeights], tuple[str, str]]] = {
    "olmo-core": _olmo_core,
    "datatrove": _datatrove,
    "axolotl": _axolotl,
    "megatron": _megatron,
    "llama-factory": _llama_factory,
    "yaml": _yaml,
    "csv": _csv,
}


# ------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class MixtureFile:
    """A mixture read from a file.

    Attributes:
        form: format of the file.
        measure: what the weights are shares of, or `times` if they are repetitions.
        weight_of: weight by label value.
    """

    form: str
    measure: str
    weight_of: Mapping[str, float]


def mixture_files(path: Path) -> list[Path]:
    """Return the files of a directory of mixtures, one per run, or a single file; none if it is a table of runs."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in (*READABLE_SUFFIXES, ".csv"))
    return [path] if path.suffix in READABLE_SUFFIXES else []


def read_mixture(path: Path) -> MixtureFile:
    """Read a mixture in the format of a tool, written by `grasp mix --format` or by hand.

    Raises:
        RunsError: the file cannot be read, its format is unknown, or weights are negative or not numbers.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RunsError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB, expected a mixture")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            mixture = _read_datatrove(text)
        elif path.suffix == ".txt":
            mixture = _read_megatron(text)
        elif path.suffix == ".csv":
            records = list(csv.DictReader(io.StringIO(text)))
            weight_of = {record["value"]: float(record["share_of_tokens"]) for record in records}
            mixture = MixtureFile("csv", "tokens", weight_of)
        else:
            mixture = _read_yaml_mixture(read_yaml(path), dict(NAME_LINE.findall(text)))
    except SettingsError as err:
        raise RunsError(str(err)) from err
    except OSError as err:
        raise RunsError(f"{path}: cannot be read: {err.strerror or err}") from err
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError) as err:
        expected = ", ".join(WRITERS)
        raise RunsError(f"{path}: not a mixture in a known format ({expected}): {err}") from err
    weights = list(mixture.weight_of.values())
    if not weights or not (np.isfinite(weights).all() and min(weights) >= 0 and sum(weights) > 0):
        raise RunsError(f"{path}: got weights {weights[:5]}, expected nonnegative numbers that are not all 0")
    return mixture


def _read_yaml_mixture(data: Mapping[str, Any], value_of: Mapping[str, str]) -> MixtureFile:
    """Read a mixture of OLMo-core, LLaMA-Factory, Axolotl or GRASP, which are told apart by their fields.

    Args:
        data: content of the file.
        value_of: label value by name, if the name differs.
    """
    if "sources" in data:
        weight_of_name = {entry["source_name"]: float(entry["target_ratio"]) for entry in data["sources"]}
        form, measure = "olmo-core", "tokens"
    elif "interleave_probs" in data:
        names, shares = (str(data[key]).split(",") for key in ("dataset", "interleave_probs"))
        weight_of_name = {name.strip(): float(share) for name, share in zip(names, shares, strict=True)}
        form, measure = "llama-factory", "documents"
    elif "datasets" in data:
        percents: Counter[str] = Counter()
        for entry in data["datasets"]:
            split = re.fullmatch(r"\w+(?:\[:(\d+)%\])?", str(entry.get("split") or "train"))
            if split is None:
                raise ValueError(f"split {entry['split']!r}, expected e.g. train or train[:40%]")
            percents[Path(str(entry["path"])).stem] += int(split[1] or 100)
        weight_of_name = {name: percent / 100 for name, percent in percents.items()}
        form, measure = "axolotl", "times"
    elif "weights" in data:
        return MixtureFile("yaml", "tokens", {str(k): float(v) for k, v in data["weights"]["tokens"].items()})
    else:
        raise ValueError("has none of sources, datasets, interleave_probs and weights")
    return MixtureFile(form, measure, {value_of.get(name, name): weight for name, weight in weight_of_name.items()})


def _read_megatron(text: str) -> MixtureFile:
    """Read alternating weights and prefixes."""
    words = text.split()
    if len(words) % 2:
        raise ValueError(f"has {len(words)} words, expected alternating weights and prefixes")
    names = [Path(prefix).name.removesuffix(PREFIX) for prefix in words[1::2]]
    return MixtureFile("megatron", "tokens", dict(zip(names, map(float, words[::2]), strict=True)))


def _read_datatrove(text: str) -> MixtureFile:
    """Read the literal that is assigned to MIXTURE; the module is parsed, not executed."""
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and any(
            getattr(target, "id", None) == "MIXTURE" for target in statement.targets
        ):
            pairs = ast.literal_eval(statement.value)
            return MixtureFile("datatrove", "times", {str(value): float(pair[1]) for value, pair in pairs.items()})
    raise ValueError("has no MIXTURE")


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
