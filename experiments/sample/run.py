"""How large must the sample of rows be from which kernels take their moments?

    python -m experiments.sample.run cc-topic cc-format pool-source small-48 small-192 documents lengths contrasts \\
        --data ../shared/data --out experiments/sample/sample.json

The first loop of a build estimates moments on a sample. Each environment is built with samples of 128 to 1,024 rows,
with all rows and summaries over the last 32 positions (`before`: as builds did before 0.3), and with the default. Each
artifact is compared with the retrained subsets. From scratch, the default's sketches are checked against the earlier
ones too: rank correlation of the redundancy of slices, and coverage of the intervals of 16 runs at nominal 90 %.
`cc-*` and `pool-*` train from scratch and need their reference checkpoints (`experiments/lds_main/run.sh`,
`experiments/lds_pool/run.sh`); the others fine-tune. `cc-format` and `pool-source` are held out: nothing is chosen on
them. An environment that the JSON holds is not measured again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from scipy.stats import spearmanr

import grasp
from experiments.runs.curves import draw, of_environment
from experiments.worlds.artifacts import artifact_of, relevance, shares
from experiments.worlds.evaluate import Method, agreements
from experiments.worlds.prepare import model_directory, prepared
from experiments.worlds.run import FOLDER as FINETUNE
from experiments.worlds.setting import NAMES, open_corpus
from grasp.files import write_atomically
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.runs.retrained import RetrainedRuns
from grasp.seeds import stream

ROOT = Path(__file__).parents[1]
SAMPLES: dict[str, int | None] = {"128": 128, "256": 256, "512": 512, "1024": 1024, "before": 10**6, "default": None}
BEFORE = "before"
REDRAWN = "before, other projections"  # the sketches of `before` with another seed: how much of them is noise
FROM_SCRATCH = {"cc-topic": "cc-completion", "cc-format": "cc-completion", "pool-source": "pool-completion"}
LABELS = ("topic", "format")
RUNS, DRAWS = 16, 32  # runs that intervals are learned from; random choices of them
RESAMPLES = 400
SKETCHES = "sketches"
Z_95 = 2 * 1.96  # width of a 95 % interval in standard errors


def built_from_scratch(name: str, label: str, work: Path) -> Path:
    """Build the default artifact of a from-scratch environment, with the sample of this label; return its path."""
    settings = yaml.safe_load((ROOT / "artifacts" / f"{FROM_SCRATCH[name]}.yaml").read_text())
    settings["model"]["threads"] = 1
    settings["features"] = {}
    if label == REDRAWN:
        settings["features"]["seed"] = 1
    if (n_rows := SAMPLES.get(label, SAMPLES[BEFORE])) is not None:
        settings["features"]["sample_positions"] = n_rows * settings["corpus"]["max_length"]
    if label in (BEFORE, REDRAWN):
        settings["features"] |= {"summary_positions": "tail:32", "sample_rows": n_rows}
    out = work / f"sample-{FROM_SCRATCH[name]}-{label.replace(', ', '-').replace(' ', '-')}"
    grasp.build(out=out, settings=settings)
    return out


def from_scratch(name: str, label: str, work: Path) -> dict[str, float]:
    """Return LDS and task rho of an artifact of a from-scratch environment, with standard errors."""
    artifact = grasp.open(built_from_scratch(name, label, work))
    evaluation = grasp.evaluate(artifact, ROOT / "environments" / name, resamples=RESAMPLES)
    mean = next(result.mean for result in evaluation.methods if result.method == DEFAULT_PROTOCOL.name)
    lds, rho = mean["mean_lds"], mean["task_rho"]
    return {
        "lds": lds.value,
        "lds_se": (lds.high - lds.low) / Z_95,
        "task_rho": rho.value,
        "task_rho_se": (rho.high - rho.low) / Z_95,
    }


def sketch_checks(name: str, work: Path) -> dict[str, float]:
    """Compare the default's sketches with those before: redundancy of slices, and coverage of runs' intervals.

    For redundancy, the sketches before are also compared with themselves under other random projections.
    """
    places = {label: built_from_scratch(name, label, work) for label in (BEFORE, "default", REDRAWN)}
    checks = {}
    for by in LABELS:
        redundancy = [
            grasp.open(place).predict(by=by).to_pandas().groupby("value")["redundancy"].first()
            for place in places.values()
        ]
        for label, values in zip(list(places)[1:], redundancy[1:], strict=True):
            checks[f"redundancy of {by}: rank correlation, {label}"] = float(spearmanr(redundancy[0], values).statistic)
    for label, place in list(places.items())[:2]:
        world = of_environment(name, place.name, work)
        drawn = [draw(world, RUNS, stream(0, "curves", world.name, RUNS, k))["learned, both"] for k in range(DRAWS)]
        covered = np.array(drawn)[:, 2]
        checks[f"coverage, {label}"] = float(covered.mean())
        checks[f"coverage, {label}: standard error"] = float(covered.std(ddof=1) / np.sqrt(DRAWS))
    return checks


def fine_tuned(name: Any, label: str, data: Path, work: Path) -> dict[str, float]:
    """Build the default artifact of a fine-tuning environment with the sample of this label, and evaluate it."""
    _, tokenizer = prepared(name, data, work)
    features: dict[str, Any] = {}
    if (n_rows := SAMPLES[label]) is not None:
        features = {"sample_rows": n_rows, "sample_positions": 2}
    rows = artifact_of(name, work, model_directory(name, work), tokenizer, features, 8192, f"sample-{label}")
    environment = RetrainedRuns.open(FINETUNE / name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    columns = np.concatenate([rows.unit_columns(target) for target in dict.fromkeys(utilities.targets)])
    kernels = tuple(relevance(rows, kernel, columns) for kernel in ("gradient", "output_layer", "embedding"))
    rule = Method(kernels, (1.0, 0.25, 0.25), (1.0, 0.25, 0.25))
    share_BN = shares(environment, open_corpus(name, work, tokenizer).store, utilities)
    agreement = agreements({"default": rule}, utilities, share_BN, RESAMPLES)["default"]
    lds_R = agreement.lds_TR.mean(axis=0)
    return {
        "lds": float(lds_R[0]),
        "lds_se": float(lds_R[1:].std()),
        "task_rho": float(agreement.task_R[0]),
        "task_rho_se": float(np.nanstd(agreement.task_R[1:])),
    }


def main() -> None:
    """Measure every environment at every size of the sample; write the JSON after each."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="python -m experiments.sample.run", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=[*FROM_SCRATCH, *NAMES])
    parser.add_argument("--data", type=Path, required=True, help="Folder of pool.parquet and instructions.parquet.")
    parser.add_argument("--work", type=Path, default=Path("bench-out"), help="Artifacts and models.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    parser.add_argument("--samples", nargs="*", choices=[*SAMPLES, SKETCHES], help="Only these.")
    arguments = parser.parse_args()
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in arguments.names:
        labels = [*SAMPLES, SKETCHES] if name in FROM_SCRATCH else SAMPLES
        for label in arguments.samples or labels:
            if label in results.get(name, {}):
                continue
            if label == SKETCHES:
                measured = sketch_checks(name, arguments.work)
            elif name in FROM_SCRATCH:
                measured = from_scratch(name, label, arguments.work)
            else:
                measured = fine_tuned(name, label, arguments.data, arguments.work / "finetune")
            measured = {key: round(value, 4) for key, value in measured.items()}
            print(name, label, measured, flush=True)
            results.setdefault(name, {})[label] = measured
            write_atomically(arguments.out, (json.dumps(results, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
