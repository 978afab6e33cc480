"""Formats of files of mixtures, those of training tools and two of GRASP. Start with `MixtureFormat`.

The tools differ in what their weights are:

    olmo-core      `SourceMixtureList`: target_ratio, shares of tokens
    megatron       `--data-args-path`: alternating weights and prefixes, shares of tokens (of sequences of one length)
    llama-factory  dataset and interleave_probs, shares of documents (of examples)
    axolotl        datasets: one entry per repetition of the documents, the last one with a part of the split
    datatrove      a Python module with one pipeline per repetition; SamplerFilter selects a part of the documents
    torchtitan     a Python module with WEIGHTS of interleaved sources, shares of tokens (of packed rows of one length)
    nemo-automodel dataset.paths and domain_mixture, shares of tokens
    yaml, csv      shares of rows, tokens and documents, and the number of repetitions of each row

In file names, special characters of label values are replaced; a comment records the original.
"""

import ast
import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grasp.mixtures import DIGITS, MEASURES, MixtureFile, MixtureWeights
from grasp.yaml_files import read_yaml, yaml_text

YAML = (".yaml", ".yml")
PREFIX = "_text_document"  # suffix that Megatron's preprocessing appends to file names
Weights = dict[str, float]  # by the name in a file
# Comment that records the label value of a name in the file.
NAME_LINE = re.compile(r"^# name (\S+): (.*)$", re.MULTILINE)


def _yaml_with_comments(weights: MixtureWeights, comments: Sequence[str], data: Mapping[str, Any]) -> str:
    """Return a YAML file that begins with comments, and with the label values whose names differ."""
    renamed = [
        f"name {name}: {value}"
        for name, value in zip(weights.names(), weights.values, strict=True)
        if name != value and value == " ".join(value.split())
    ]
    return "".join(f"# {line}\n" for line in (*comments, *renamed)) + yaml_text(data)


def _positive_shares(weights: MixtureWeights, measure: str) -> dict[str, float]:
    """Return the share of each name that has one; shares add up to 1."""
    shares = zip(weights.names(), weights.shares(measure).tolist(), strict=True)
    return {name: share for name, share in shares if share > 0}


def _olmo_core(weights: MixtureWeights) -> tuple[str, str]:
    tokens_G = weights.size_G["tokens"]
    # repetitions of each value, if as many tokens are trained on as the corpus has
    repetitions_G = weights.shares("tokens") * tokens_G.sum() / np.maximum(tokens_G, 1)
    largest = dict(zip(weights.names(), np.maximum(1.0, np.ceil(100 * repetitions_G) / 100).tolist(), strict=True))
    comments = (
        "OLMo-core, SourceMixtureList: target_ratio is a share of tokens. Set paths to your tokenized files.",
        "max_repetition_ratio is for one epoch of the corpus; multiply it by the number of epochs of a longer run.",
    )
    sources = [
        {
            "source_name": name,
            "target_ratio": share,
            "paths": [f"data/{name}/*.npy"],
            "max_repetition_ratio": largest[name],
        }
        for name, share in _positive_shares(weights, "tokens").items()
    ]
    text = _yaml_with_comments(weights, comments, {"sources": sources})
    return text, "target_ratio is a share of tokens; set paths"


def _megatron(weights: MixtureWeights) -> tuple[str, str]:
    lines = [f"{share!r} data/{name}{PREFIX}\n" for name, share in _positive_shares(weights, "tokens").items()]
    return "".join(lines), "for --data-args-path; weights are shares of tokens"


def _llama_factory(weights: MixtureWeights) -> tuple[str, str]:
    shares = _positive_shares(weights, "documents")
    comments = ("LLaMA-Factory: interleave_probs are shares of documents. Use these names in dataset_info.json.",)
    data = {
        "dataset": ",".join(shares),
        "mix_strategy": "interleave_over",
        "interleave_probs": ",".join(map(repr, shares.values())),
    }
    return _yaml_with_comments(weights, comments, data), "interleave_probs are shares of documents"


def _axolotl(weights: MixtureWeights) -> tuple[str, str]:
    comments = ("Axolotl: one entry per repetition of the documents, rounded to percent. Set path and type.",)
    entries = []
    for name, times in zip(weights.names(), weights.times_G, strict=True):
        whole, percent = divmod(round(100 * times), 100)
        entries += [
            {"path": f"data/{name}.jsonl", "ds_type": "json", "type": "completion", "split": split}
            for split in ["train"] * whole + [f"train[:{percent}%]"] * bool(percent)
        ]
    text = _yaml_with_comments(weights, comments, {"datasets": entries})
    return text, "one entry per repetition of the documents; set path and type"


def _in_docstring(label: str) -> str:
    """Return the name of a label without characters that end a docstring."""
    return re.sub(r'["\\]', "", " ".join(label.split()))


DATATROVE_MODULE = '''"""A mixture by {label}: number of repetitions of the documents of each value."""

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
    return DATATROVE_MODULE.format(
        label=_in_docstring(weights.label), mixture=mixture
    ), "pipelines(*steps); numbers are repetitions of documents"


TORCHTITAN_MODULE = '''"""A mixture by {label}: shares of tokens, for sources that are packed before they are mixed.

torchtitan 0.3:  InterleavedHuggingFaceTextDataLoader.Config(
                     sources=[HFDataSource(dataset=name, weight=weight) for name, weight in WEIGHTS.values()])
with Grain:      DatasetMixConfig(
                     datasets=tuple(WeightedDataset(dataset=packed[name], weight=weight) ...))
"""

# Value: name of its dataset, and its share of the tokens.
WEIGHTS = {mixture}
'''


def _torchtitan(weights: MixtureWeights) -> tuple[str, str]:
    pairs = zip(weights.values, weights.names(), weights.shares("tokens").tolist(), strict=True)
    mixture = "".join(f"    {value!r}: {(name, share)!r},\n" for value, name, share in pairs if share > 0)
    text = TORCHTITAN_MODULE.format(label=_in_docstring(weights.label), mixture="{\n" + mixture + "}")
    return text, "WEIGHTS are shares of tokens; set the names of the datasets"


def _nemo_automodel(weights: MixtureWeights) -> tuple[str, str]:
    share_of = _positive_shares(weights, "tokens")
    path_of = {name: f"data/{name}{PREFIX}" for name in share_of}
    comments = (
        "NeMo Automodel: weights are shares of tokens. Set paths, and merge with your recipe.",
        "domain_mixture reports the loss of each domain. It requires a loss_fn with reduction: sum, and no packing,",
        "pipeline or context parallelism. dataset.paths alone trains on the same mixture.",
    )
    domains = [
        {"name": name, "path": path_of[name], "sampling_weight": share, "objective_weight": share}
        for name, share in share_of.items()
    ]
    paths = [word for name, share in share_of.items() for word in (repr(share), path_of[name])]
    data = {"dataset": {"paths": paths}, "domain_mixture": {"domains": domains}}
    return _yaml_with_comments(weights, comments, data), "weights are shares of tokens; set paths"


def _yaml(weights: MixtureWeights) -> tuple[str, str]:
    columns = {measure: weights.shares(measure) for measure in MEASURES} | {"times": weights.times_G}
    rounded = {name: np.round(values_G, DIGITS).tolist() for name, values_G in columns.items()}
    by_value = {name: dict(zip(weights.values, numbers, strict=True)) for name, numbers in rounded.items()}
    comment = "# Shares of each value in the mixture, and the number of times that each of its rows is seen.\n"
    text = comment + yaml_text({"label": weights.label, "weights": by_value})
    return text, "shares of rows, tokens and documents"


def _csv(weights: MixtureWeights) -> tuple[str, str]:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["value", *(f"share_of_{measure}" for measure in MEASURES), "times_as_often"])
    columns = [weights.shares(measure) for measure in MEASURES] + [weights.times_G]
    for value, *numbers in zip(weights.values, *columns, strict=True):
        table.writerow([value, *(repr(round(float(number), DIGITS)) for number in numbers)])
    return text.getvalue(), "shares of rows, tokens and documents"


def _read_axolotl(path: Path) -> Weights:
    percents: Counter[str] = Counter()
    for entry in read_yaml(path)["datasets"]:
        split = re.fullmatch(r"\w+(?:\[:(\d+)%\])?", str(entry.get("split") or "train"))
        if split is None:
            raise ValueError(f"split {entry['split']!r}, expected e.g. train or train[:40%]")
        percents[Path(str(entry["path"])).stem] += int(split[1] or 100)
    return {name: percent / 100 for name, percent in percents.items()}


def _read_megatron(path: Path) -> Weights:
    """Read alternating weights and prefixes."""
    words = path.read_text(encoding="utf-8").split()
    if len(words) % 2:
        raise ValueError(f"has {len(words)} words, expected alternating weights and prefixes")
    names = [Path(prefix).name.removesuffix(PREFIX) for prefix in words[1::2]]
    return dict(zip(names, map(float, words[::2]), strict=True))


def _read_module(path: Path) -> Weights:
    """Read the literal that is assigned to MIXTURE or WEIGHTS; the module is parsed, not executed."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) in ("MIXTURE", "WEIGHTS"):
            pairs = ast.literal_eval(statement.value)
            return {str(value): float(pair[1]) for value, pair in pairs.items()}
    raise ValueError("has no MIXTURE or WEIGHTS")


def _read_llama_factory(path: Path) -> Weights:
    data = read_yaml(path)
    names, shares = (str(data[key]).split(",") for key in ("dataset", "interleave_probs"))
    return {name.strip(): float(share) for name, share in zip(names, shares, strict=True)}


def _read_csv(path: Path) -> Weights:
    records = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    return {record["value"]: float(record["share_of_tokens"]) for record in records}


@dataclass(frozen=True, slots=True)
class MixtureFormat:
    """A reader of `mixture`, see `grasp.mixtures`: of files with a suffix, or of files with a field.

    Attributes:
        key: the suffix, the name of a field of YAML files, or that of a variable of Python modules, in upper case.
        measure: what the weights are: shares of tokens or documents, or times.
        weights_of: function that returns the weight of each name in a file.
        write: function that returns the text of a file, and a description of its weights.
    """

    key: str
    measure: str
    weights_of: Callable[[Path], Weights]
    write: Callable[[MixtureWeights], tuple[str, str]]

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Return the suffixes of its files, the one that is written first."""
        if self.key.startswith("."):
            return (self.key,)
        return (".py",) if self.key.isupper() else YAML

    def claims(self, path: Path) -> str:
        """Return why it reads a file; empty if it does not."""
        if self.key.startswith("."):
            return f"it ends in {self.key}" * (path.suffix == self.key)
        if path.suffix not in self.suffixes:
            return ""
        if self.key.isupper():
            assigned = re.findall(r"^(\w+) = ", path.read_text(encoding="utf-8"), re.MULTILINE)
            return f"it assigns {self.key}" * (self.key in assigned)
        return f"it has the field {self.key}" * (self.key in read_yaml(path))

    def read(self, path: Path) -> MixtureFile:
        """Return the weights by label value, which a comment gives if it differs from the name in the file."""
        value_of = dict(NAME_LINE.findall(path.read_text(encoding="utf-8")))
        weights = {value_of.get(name, name): weight for name, weight in self.weights_of(path).items()}
        return MixtureFile(self.measure, weights)


OLMO_CORE = MixtureFormat(
    "sources",
    "tokens",
    lambda path: {entry["source_name"]: float(entry["target_ratio"]) for entry in read_yaml(path)["sources"]},
    _olmo_core,
)
LLAMA_FACTORY = MixtureFormat("interleave_probs", "documents", _read_llama_factory, _llama_factory)
AXOLOTL = MixtureFormat("datasets", "times", _read_axolotl, _axolotl)
SHARES = MixtureFormat(
    "weights",
    "tokens",
    lambda path: {str(value): float(share) for value, share in read_yaml(path)["weights"]["tokens"].items()},
    _yaml,
)
NEMO_AUTOMODEL = MixtureFormat(
    "domain_mixture",
    "tokens",
    lambda path: {
        entry["name"]: float(entry["sampling_weight"]) for entry in read_yaml(path)["domain_mixture"]["domains"]
    },
    _nemo_automodel,
)
DATATROVE = MixtureFormat("MIXTURE", "times", _read_module, _datatrove)
TORCHTITAN = MixtureFormat("WEIGHTS", "tokens", _read_module, _torchtitan)
MEGATRON = MixtureFormat(".txt", "tokens", _read_megatron, _megatron)
CSV = MixtureFormat(".csv", "tokens", _read_csv, _csv)
