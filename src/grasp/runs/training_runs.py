"""What retrained and imported runs have in common: the trained subsets, and the utilities of the trained models.

A subset is a set of rows with weights; a model was trained on each subset with each seed. A `Run` is one such training.
A utility is minus the loss in nats per token, or a metric of imported runs; higher is better. It is measured for every
unit, i.e. every scored element of a target. Start with `TrainingRuns.utilities`. `retrained.RetrainedRuns` and
`table.RunTable` implement the base class; both are described by the same record, `RunsInfo`, and store their results in
the same table, see `utility_tables`.

Shape letters: B subsets, S seeds, E units of all targets, T targets, R runs.
"""

import hashlib
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from pydantic import Field
from pydantic_core import to_jsonable_python

from grasp.arrays import F64
from grasp.artifact.label_table import LabelColumn
from grasp.errors import RunsError
from grasp.files import FileEntry
from grasp.predict.families import parse_family
from grasp.predict.subset_tables import RowIndex
from grasp.predict.weights import SubsetBlock
from grasp.settings import CorpusSettings, Settings, TargetSettings
from grasp.store.records import Signed
from grasp.targets.margins import split_metric
from grasp.targets.units import LossOn

Role = Literal["dev", "held-out"]
Kind = Literal["shares", "times", "rows"]
Measure = Literal["tokens", "rows", "documents"]
Direction = Literal["higher", "lower"]

FORMAT_VERSION = 1
INFO = "environment.json"
SUBSETS = "subsets.parquet"
UTILITIES = "utilities.parquet"
WHOLE_CORPUS_RUN = "full"  # subset id of the runs on the whole corpus
ALL_SUFFIX = "@all"  # suffix of targets with loss on every token
MAX_EXAMPLES = 3


class TargetInfo(Settings):
    """One target as it was evaluated."""

    fingerprint: str = Field(description="Fingerprint of the units: ids, prompts, completions, tokens with loss.")
    loss_on: LossOn
    unit_ids: tuple[str, ...]


class FamilyInfo(Settings):
    """Family, seed and stream of the subsets, from which they can be regenerated."""

    spec: str = Field(description="E.g. mixture:topic.")
    seed: int
    purpose: str = Field(description="Name of the stream of random numbers.")


class RunsInfo(Settings):
    """Contents of environment.json. Of imported runs, only the last fields are known before they have an artifact."""

    format: Literal["grasp-environment"] = "grasp-environment"
    format_version: int = FORMAT_VERSION
    role: Role = Field(description="dev: protocols may be selected on the runs; held-out: evaluation only.")
    held_out_targets: tuple[str, ...] = Field((), description="Targets of development runs that are held out.")
    recipe: str = Field(description="Name of the recipe.")
    recipe_settings: dict[str, Any] = Field({}, description="All settings of the recipe.")
    checkpoint: str = Field("reference/seed-0", description="Path of the reference model, relative to the directory.")
    seeds: tuple[int, ...]
    corpus_fingerprint: str
    n_rows: int
    targets: dict[str, TargetInfo]
    side: Literal["retained"] = "retained"
    family: FamilyInfo | None = Field(None, description="None: the subsets were read from a table.")
    subset_ids: tuple[str, ...]
    masks_checksum: str = Field(description="Checksum of subset ids, row positions and weights, in order.")
    reference: bool = Field(True, description="Whether models are also trained on the whole corpus, one per seed.")
    made_by: dict[str, Any] = Field({}, description="Program, versions and settings; not compared on resume.")
    kind: Kind = Field("rows", description="What has weights: shares of label values, times each is seen, or rows.")
    label: str | None = Field(None, description="The label, for shares and times.")
    measure: Measure = Field("tokens", description="What shares are shares of: the training tokens, rows or documents.")
    metrics: dict[str, Direction] = Field({}, description="higher or lower is better, by metric of imported runs.")
    files: dict[Literal["subsets.parquet", "utilities.parquet"], FileEntry] = Field(
        {}, description="Checksums of the files of imported runs, which are written at once."
    )
    checksum: str = Field(
        "", description="Checksum of this file, computed with zeros in its place; empty: written by hand."
    )

    def build_command(self, path: Path) -> str | None:
        """Return the `grasp build` command for an artifact of the same rows and units; None if it is unknown.

        Settings that differ from their defaults become `--set` options.

        Args:
            path: directory of the runs.
        """
        corpus, targets = (self.made_by.get(group) for group in ("corpus", "targets"))
        if not isinstance(corpus, dict) or not isinstance(targets, dict) or not self.reference:
            return None
        arguments = ["--model", str(path / self.checkpoint), "--corpus", str(corpus["path"])]
        if targets.get("names"):
            arguments += ["--targets", ",".join(targets["names"])]
        for group, group_settings, settings_type in (
            ("corpus", corpus, CorpusSettings),
            ("targets", targets, TargetSettings),
        ):
            for name, value in group_settings.items():
                if name in ("path", "names") or (field := settings_type.model_fields.get(name)) is None:
                    continue
                if value != to_jsonable_python(field.get_default(call_default_factory=True)):
                    arguments += ["--set", f"{group}.{name}={json.dumps(value)}"]
        return f"grasp build {shlex.join([*arguments, '--out', 'art'])}"


SIGNED_INFO = Signed(
    INFO,
    RunsInfo,
    "the record of an environment",
    "grasp-environment",
    FORMAT_VERSION,
    "restore it from a copy",
    RunsError,
    missing_message=f"is not an environment (no {INFO}); pass a directory written by grasp retrain or grasp runs "
    "import",
)


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """The training of one model: on one subset, with one seed."""

    seed: int
    subset_id: str

    @property
    def stem(self) -> str:
        """File name without suffix, escaped for any subset id."""
        return f"{quote(self.subset_id, safe='')}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Utilities:
    """Utilities by subset, seed and unit.

    Attributes:
        values_BSE: minus the loss in nats per token, or the metric of imported runs; higher is better.
        subset_ids: subset of each entry of the first axis.
        seeds: seed of each entry of the second axis.
        targets: target of each unit, (E,).
        unit_ids: id of each unit within its target, (E,).
    """

    values_BSE: F64
    subset_ids: tuple[str, ...]
    seeds: tuple[int, ...]
    targets: tuple[str, ...]
    unit_ids: tuple[str, ...]

    def select(self, *targets: str) -> "Utilities":
        """Return the utilities of the units of these targets, in the same order."""
        columns = [e for e, name in enumerate(self.targets) if name in targets]
        return Utilities(
            self.values_BSE[:, :, columns],
            self.subset_ids,
            self.seeds,
            tuple(self.targets[e] for e in columns),
            tuple(self.unit_ids[e] for e in columns),
        )


@dataclass(eq=False, repr=False)
class TrainingRuns(ABC):
    """Base class of retrained and imported runs.

    Attributes:
        path: directory of the runs; of runs that are not saved, their name.
        info: record of the runs.
        notes: notes for reports.
        unit: unit of the utilities, used as column name.
        metric_of_target: metric of each target, for imported runs.
        measurement: text that describes the measured utility, and text that describes the models.
    """

    path: Path
    info: RunsInfo
    notes: Sequence[str] = ()
    unit: str = "nats"
    metric_of_target: Mapping[str, str] = field(default_factory=dict)
    measurement: tuple[str, str] = ("", "")

    def pending(self) -> tuple[Run, ...]:
        """Return the runs without a result."""
        return ()

    def unfinished(self) -> str:
        """Return how many of how many runs have a result, in words; "" if all have one."""
        n_runs, n_pending = len(self.info.seeds) * (len(self.subset_ids) + self.info.reference), len(self.pending())
        done = f"{n_runs - n_pending} of {n_runs} runs have a result"
        return f"unfinished: {done}, and the numbers will change" if n_pending else ""

    @abstractmethod
    def subset_blocks(
        self, rows: RowIndex, labels: LabelColumn | None = None, *, block: int = 256
    ) -> Iterator[SubsetBlock]:
        """Yield the subsets in blocks, in the order of `subset_ids`."""

    @abstractmethod
    def _values_by_subset(self) -> F64:
        """Return utilities by subset and seed, (B, S, E), or (1 + B, S, E) with the whole corpus first; nan: no result.

        The whole corpus is included if models were trained on it.
        """

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def role(self) -> Role:
        return self.info.role

    @property
    def label(self) -> str | None:
        """The label column that the subsets were drawn by, if any."""
        return self.info.label if self.info.family is None else parse_family(self.info.family.spec).label

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(self.info.targets)

    @property
    def subset_ids(self) -> tuple[str, ...]:
        return self.info.subset_ids

    @property
    def units(self) -> tuple[tuple[str, str], ...]:
        """(target, unit_id) of every unit, target by target: the order of the last axis of utilities."""
        return tuple((name, unit_id) for name, target in self.info.targets.items() for unit_id in target.unit_ids)

    def role_of(self, target: str) -> Role:
        """Return the role of a target; all targets of held-out runs are held out.

        A task is held out with all of its losses and metrics: if `sciq` is held out, so are `sciq@all` and
        `sciq@margin`.
        """
        self._check_target(target)
        task, _ = split_metric(target.removesuffix(ALL_SUFFIX))
        return "held-out" if {target, task} & set(self.info.held_out_targets) else self.info.role

    def fingerprint(self, first_block: SubsetBlock) -> str:
        """Return a fingerprint of corpus, recipe and family; it does not depend on the directory or number of runs.

        Args:
            first_block: first block of the subsets; if the subsets come from a table, the rows of its first subset are
                used in place of a family.
        """
        info = self.info
        drawn_from = info.family.model_dump() if info.family else np.sort(first_block.weights_BN[[0]].indices).tolist()
        identity = [info.corpus_fingerprint, info.recipe, info.recipe_settings, drawn_from]
        return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()

    def check_corpus(self, fingerprint: str, location: str) -> None:
        """Check that a corpus is the one that the runs were trained on.

        Args:
            fingerprint: fingerprint of the corpus.
            location: path of the corpus or artifact, for the message.
        Raises:
            RunsError: fingerprints differ; the message contains both.
        """
        if fingerprint != self.info.corpus_fingerprint:
            raise RunsError(
                f"{location}: corpus fingerprint {fingerprint}, but {self.path} was trained on "
                f"{self.info.corpus_fingerprint}; build from the same corpus, tokenizer and packing"
            )

    def _check_target(self, target: str) -> None:
        if target not in self.info.targets:
            raise RunsError(f"{self.path}: has no target {target!r}, expected one of {list(self.info.targets)}")

    def utilities(
        self, target: str | None = None, *, seeds: Sequence[int] | None = None, partial: bool = False
    ) -> Utilities:
        """Return realized utilities, (B, S, E); higher is better: -loss in nats per token, or the metric of a target.

        Args:
            target: default: all targets, one after the other.
            seeds: default: all seeds.
            partial: return only the subsets that have a result for each of `seeds`, instead of raising an error.
        Raises:
            RunsError: a run is missing (unless `partial`), repeated or not a number, or a subset, seed, target or unit
                is unknown. The message names it.
        """
        if target is not None:
            self._check_target(target)
        selected_seeds = self.info.seeds if seeds is None else tuple(seeds)
        unknown = [seed for seed in selected_seeds if seed not in self.info.seeds]
        if unknown or not selected_seeds:
            raise RunsError(f"{self.path}: got seeds {list(selected_seeds)}, expected some of {self.info.seeds}")
        values_BSE = self._values_by_subset()[-len(self.subset_ids) :]  # without the runs on the whole corpus
        values_BSE = values_BSE[:, [self.info.seeds.index(seed) for seed in selected_seeds]]
        is_missing_BS = np.isnan(values_BSE[:, :, 0])
        if is_missing_BS.any() and not partial:
            missing = [Run(selected_seeds[s], self.subset_ids[b]).stem for s, b in np.argwhere(is_missing_BS.T)]
            raise RunsError(
                f"{self.path}: {len(missing)} runs are missing, e.g. {missing[:MAX_EXAMPLES]}; "
                "continue with `grasp retrain --resume`"
            )
        complete = np.flatnonzero(~is_missing_BS.any(axis=1))
        utilities = Utilities(
            values_BSE[complete],
            subset_ids=tuple(self.subset_ids[b] for b in complete),
            seeds=selected_seeds,
            targets=tuple(name for name, _ in self.units),
            unit_ids=tuple(unit_id for _, unit_id in self.units),
        )
        return utilities if target is None else utilities.select(target)

    def task_utilities(self, targets: Sequence[str]) -> F64:
        """Return the mean over the units of each target, (B, S, T); nan if a run has no such seed."""
        utilities = self.utilities()
        return np.stack([utilities.select(name).values_BSE.mean(axis=2) for name in targets], axis=2)

    def reference_utilities(self) -> F64:
        """Return utilities of the models trained on the whole corpus, (S, E); S is 0 if there are none."""
        if not self.info.reference:
            return np.empty((0, len(self.units)))
        whole_corpus_SE = self._values_by_subset()[0]
        return np.asarray(whole_corpus_SE[~np.isnan(whole_corpus_SE[:, 0])])

    def task_reference(self, targets: Sequence[str]) -> F64:
        """Return the mean utility of each target of the models trained on the whole corpus, (S, T)."""
        reference_SE = self.reference_utilities()
        columns_of_target = [[e for e, (name, _) in enumerate(self.units) if name == target] for target in targets]
        return np.stack([reference_SE[:, columns].mean(axis=1) for columns in columns_of_target], axis=1)
