"""Curation tested by training: rows chosen by several methods, models trained on them, tasks and held-out text scored.

    python -m experiments.curation.run --artifact art --work bench-out/curation/cc --out experiments/curation/cc.json

Killed at any moment, the same command goes on where it was; run twice at once, the two share the work. Given another
--protocol it trains what that chooses otherwise, and keeps the rest.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as hf_logging

from experiments.curation.choices import (
    GRASP,
    RANDOM,
    REFERENCE,
    Chooser,
    SelectionRecord,
    SelectionRequest,
    copied,
    of_methods,
    other_draws,
)
from experiments.curation.gpt2 import NAME as GPT2
from experiments.curation.gpt2 import fill_gpt2, reference
from experiments.curation.setting import Settings, World
from experiments.curation.table import Reading, as_text, lines
from experiments.one_line_errors import in_one_line
from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.files import write_atomically
from grasp.pipeline.pipeline import build_artifact
from grasp.progress import RetrainStatus
from grasp.retraining.plan import fitted_lengths, resolved_recipe
from grasp.retraining.settings import RetrainSettings
from grasp.retraining.worker import retrain
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import INFO
from grasp.settings import build_settings


class Experiment:
    """One corpus: selections, models, table."""

    def __init__(self, settings: Settings, work: Path, out: Path) -> None:
        self.settings, self.work, self.out = settings, work, out
        self.world = World(settings, work)
        self.chosen: dict[str, list[SelectionRecord]] = {REFERENCE: [], GPT2: []}  # by the architecture that is trained
        self._began = time.perf_counter()
        self._done = -1

    def run(self, *, cross: bool) -> None:
        """Stage after stage: choose, train, write the table; what is there already costs nothing."""
        for wanted in self.stages():
            self.chosen[REFERENCE] += self._select_all(Chooser(self.world), wanted)
            self._train()
            self._write()
        if cross:
            self._cross()

    def stages(self) -> list[list[SelectionRequest]]:
        """What is chosen and trained on, the most telling first."""
        settings = self.settings
        cells = [(share, targets) for share in settings.budgets for targets in (settings.first_target, "all")]
        draws = [other_draws(share, settings.draws) for share in settings.budgets if settings.draws > 1]
        return [of_methods(targets, share) for share, targets in cells] + draws

    def _cross(self) -> None:
        """Scored by one architecture and trained by the other, both ways."""
        share, target = self.settings.budgets[0], self.settings.first_target
        chooser = Chooser(self.world, {GPT2: self._gpt2_artifact()})
        ours = SelectionRequest(GRASP, target, share)
        wanted = [SelectionRequest(RANDOM, "all", share), ours, replace(ours, scorer=GPT2)]
        self.chosen[GPT2] = self._select_all(chooser, wanted)
        self.chosen[REFERENCE].append(self.chosen[GPT2][-1])
        self._train()
        self._write()
        names = [selected.subset_id for selected in self.chosen[GPT2]]
        table = copied(chooser.subsets, names, self.work / f"subsets-{GPT2}.parquet")
        fill_gpt2(self._retraining(table), self.work / REFERENCE, self.work / GPT2, self._say)
        self._write()

    def _gpt2_artifact(self) -> ArtifactReader:
        """What GRASP builds of a GPT-2-style reference model on the same rows and units."""
        recipe = resolved_recipe(self._retraining(self.work / "subsets.parquet"))
        material = self.world.material
        model = reference(recipe, material.store, material.tokenizer, self.work / f"{GPT2}-reference")
        recorded = dict(self.world.artifact.manifest.settings)
        recorded["model"] = recorded["model"] | {"path": str(model), "tokenizer": None}
        recorded["train"] = "new"
        recorded["corpus"] = self.world.corpus.model_dump(mode="json")
        return ArtifactReader.open(build_artifact(build_settings(recorded), self.work / f"{GPT2}-artifact"))

    def _select_all(self, chooser: Chooser, wanted: Sequence[SelectionRequest]) -> list[SelectionRecord]:
        selections = chooser.select_all(wanted)
        for selected in selections:
            self._say(
                f"{selected.asked.method} for {selected.asked.targets}, "
                f"{selected.asked.share:.0%}: {selected.subset_id}"
            )
        return selections

    def _train(self) -> None:
        retrain(self.world.retraining(self.work / "subsets.parquet"), self.work / REFERENCE, self._progress)

    def _retraining(self, subsets: Path) -> RetrainSettings:
        return fitted_lengths(self.world.retraining(subsets))

    def _progress(self, status: RetrainStatus) -> None:
        if status.stage == "runs" and status.done != self._done:
            self._done = status.done
            left = "" if status.seconds_left is None else f", {status.seconds_left / 60:.0f} min left of this stage"
            self._say(f"{status.done} of {status.total} runs{left}")

    def _write(self) -> None:
        """The table of what is trained so far."""
        tables = {}
        for architecture, choices in self.chosen.items():
            if choices and (self.work / architecture / INFO).exists():
                reading = Reading(self.world, RetrainedRuns.open(self.work / architecture))
                tables[architecture] = lines(reading, choices)
        result = self._described() | {"trained": tables}
        write_atomically(self.out, (json.dumps(result, indent=1) + "\n").encode())
        text = "\n".join(f"Trained: {name}\n\n{as_text(table)}" for name, table in tables.items())
        write_atomically(self.out.with_suffix(".md"), text.encode())
        self._say(f"{self.out}, {self.out.with_suffix('.md')}")

    def _described(self) -> dict[str, Any]:
        """What decided the numbers; paths by their names, since where things lie says nothing."""
        world, settings = self.world, self.settings
        return {
            "corpus": Path(world.corpus.path).name,
            "rows": world.artifact.n_rows,
            "pool_rows": int(world.pool_N.sum()),
            "recipe": settings.recipe,
            "overrides": dict(settings.overrides),
            "seeds": list(settings.seeds),
            "held_out_documents": settings.held_out,
            "fresh_units": settings.fresh_units,
            "mixed_label": settings.label,
            "protocol": world.protocol.model_dump(mode="json"),
            "fingerprints": dict(world.artifact.manifest.fingerprints),
        }

    def _say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.0f} s] {text}", flush=True)


def _shares(text: str) -> tuple[float, ...]:
    shares = tuple(float(part) / 100 for part in text.split(","))
    if not shares or not all(0 < share < 1 for share in shares):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected percents between 0 and 100, e.g. 20,40")
    return shares


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, run, say what went wrong in one line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.curation.run", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--artifact", type=Path, required=True, help="Artifact of the corpus, with multiple-choice targets."
    )
    parser.add_argument("--corpus", help="Where the corpus lies now; none: where the artifact was built from.")
    parser.add_argument("--work", type=Path, required=True, help="Where selections and models are kept.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write; a Markdown table goes beside it.")
    parser.add_argument("--protocol", type=Path, help="Protocol file. Default: the built-in rule.")
    parser.add_argument("--by", default="topic", help="Label of the mixtures.")
    parser.add_argument("--target", default="sciq", help="Curated for alone, and together with all others.")
    parser.add_argument("--budgets", type=_shares, default=(0.2, 0.4), help="Percents of the pool's rows.")
    parser.add_argument("--seeds", type=int, default=3, help="Training seeds of every selection.")
    parser.add_argument("--draws", type=int, default=3, help="Random selections of each size.")
    parser.add_argument("--held-out", type=int, default=512, help="Documents that nobody trains on.")
    parser.add_argument("--fresh-units", type=int, default=256, help="Units a target beside those selected for.")
    parser.add_argument("--recipe", default="tiny", help="Training recipe.")
    parser.add_argument("--cross", action="store_true", help="Then score with one architecture, train the other.")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    settings = Settings(
        artifact=args.artifact,
        corpus=args.corpus,
        protocol=args.protocol,
        label=args.by,
        first_target=args.target,
        budgets=args.budgets,
        seeds=tuple(range(args.seeds)),
        draws=args.draws,
        held_out=args.held_out,
        fresh_units=args.fresh_units,
        recipe=args.recipe,
    )
    if not args.out.absolute().parent.is_dir():
        raise SettingsError(f"--out: there is no directory {args.out.parent}; make it first")
    Experiment(settings, args.work, args.out).run(cross=args.cross)


if __name__ == "__main__":
    main()
