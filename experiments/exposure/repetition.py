"""Up to how many repetitions is a repeated token of a scarce source worth half of a new one, in a mixture?

    python -m experiments.exposure.repetition --data shared/data/pool.parquet --out repetition

A quarter of the tokens of every run are science documents. `times-8` has an eighth of the distinct ones, each seen
eight times. `share-8` has the same distinct ones, each seen once, and other documents for the rest. The loss of
`times-1`, `share-2`, `share-4`, ... gives the number of new tokens that `times-8` is worth. The worth of its repeated
tokens is their part of this number: (worth - distinct) / (seen - distinct). Distinct documents are drawn anew for each
seed. Training continues where it was interrupted.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import grasp
from grasp.predict.subset_tables import RowIndex, write_subsets
from grasp.predict.weights import WeightedRows, in_blocks
from grasp.seeds import stream
from grasp.training.recipe import named_recipe

TOPIC = "Science, Math & Technology"
SHARE = 0.25  # of science in the mixture
TIMES = (1, 4, 8, 16, 32)
DILUTED = (4, 16)
SEEDS = (0, 1, 2)
STEPS = 200  # as of the demo's reference model
N_PASSAGES = 256  # held-out passages of science, and of other documents
PROMPT_CHARS, PASSAGE_CHARS = 60, 180
LEAST_WORDS = 100  # shorter documents are left out, so that nearly all rows have as many tokens
TARGETS = ("science", "sciq", "other")
DRAWS = 2000


def write_corpus(data: Path, out: Path) -> None:
    """Write the documents, and questions about held-out ones: the continuation of their first words."""
    table = pq.read_table(data, columns=["doc_id", "text", "topic", "eval_overlap", "n_words"]).to_pylist()
    table = [row for row in table if not row["eval_overlap"] and row["n_words"] >= LEAST_WORDS]
    order = stream(0, "repetition", "held out").permutation(len(table))
    kinds = {"science": [], "other": []}
    for row in (table[i] for i in order):
        kinds["science" if row["topic"] == TOPIC else "other"].append(row)
    for kind, rows in kinds.items():
        with (out / f"{kind}.jsonl").open("w") as file:
            for row in rows[:N_PASSAGES]:
                text = " ".join(row["text"].split())[:PASSAGE_CHARS].encode("ascii", "ignore").decode()
                unit = {"prompt": text[:PROMPT_CHARS], "completion": text[PROMPT_CHARS:]}
                file.write(json.dumps({"unit_id": row["doc_id"], **unit}) + "\n")
    documents = [(row["doc_id"], row["text"], kind) for kind, rows in kinds.items() for row in rows[N_PASSAGES:]]
    columns = dict(zip(("row_id", "text", "kind"), zip(*documents, strict=True), strict=True))
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), out / "corpus.parquet")


def write_mixtures(out: Path, seed: int) -> None:
    """Write the weights of the runs of a seed; weight 1 is one visit in a training."""
    corpus = pq.read_table(out / "corpus.parquet", columns=["row_id", "kind"])
    is_science = np.array(corpus["kind"].to_pylist()) == "science"
    science, other = np.flatnonzero(is_science), np.flatnonzero(~is_science)
    seen = STEPS * named_recipe("tiny").batch_rows
    wanted = round(SHARE * seen)
    assert wanted <= len(science)
    shuffled = stream(seed, "repetition", "distinct").permutation(science)
    subsets = []
    for name, part, times in [(f"times-{n}", n, n) for n in TIMES] + [(f"share-{n}", n, 1) for n in DILUTED]:
        weight_N = np.zeros(len(is_science))
        distinct = shuffled[: round(wanted / part)]
        weight_N[distinct] = times
        weight_N[other] = (seen - len(distinct) * times) / len(other)
        rows = np.flatnonzero(weight_N)
        subsets.append(WeightedRows(name, rows, weight_N[rows]))
    index = RowIndex.from_ids(corpus["row_id"].to_pylist())
    write_subsets(out / f"mixtures-{seed}.parquet", in_blocks(subsets, len(is_science)), index, weights=True)


def train(out: Path, seed: int) -> None:
    """Train the models of a seed."""
    grasp.retrain(
        out / "corpus.parquet",
        ["sciq", str(out / "science.jsonl"), str(out / "other.jsonl")],
        out=out / f"runs-{seed}",
        settings={
            "subsets": str(out / f"mixtures-{seed}.parquet"),
            "seeds": [seed],
            "overrides": {"steps": STEPS},
            "threads": 1,
            "tokenizer": None if seed == SEEDS[0] else str(out / f"runs-{SEEDS[0]}" / "tokenizer"),
            "corpus": {"max_rows_per_document": 1},
            "targets": {"units_per_target": N_PASSAGES, "max_length": 128},
        },
    )


def losses(out: Path, target: str, seeds: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the loss of each question by mixture, (S, E), in nats per token."""
    by_name: dict[str, list[np.ndarray]] = {}
    for seed in seeds:
        utilities = grasp.open_runs(out / f"runs-{seed}").utilities(target)
        for name, values_SE in zip(utilities.subset_ids, utilities.values_BSE, strict=True):
            by_name.setdefault(name, []).append(-values_SE[0])
    return {name: np.stack(values) for name, values in by_name.items()}


def worth_of_repeated(loss_of: Mapping[str, float]) -> dict[int, float]:
    """Return the worth of a repeated token in new ones, by the number of times, from losses of mixtures.

    The loss is interpolated in the logarithm of the share of new tokens; beyond the range of shares it is that of the
    nearest end.
    """
    shares = np.array([1.0] + [1 / part for part in DILUTED])
    new = np.maximum.accumulate([loss_of["times-1"]] + [loss_of[f"share-{part}"] for part in DILUTED])
    as_new = {times: np.exp(np.interp(loss_of[f"times-{times}"], new, np.log(shares))) for times in TIMES[1:]}
    return {times: float((worth - 1 / times) / (1 - 1 / times)) for times, worth in as_new.items()}


def most_repetitions(worth: Mapping[int, float], least: float = 0.5) -> float:
    """Return up to how many times repeated tokens are worth at least `least` of new ones, interpolated."""
    times = [1, *worth]
    values = np.minimum.accumulate([1.0, *worth.values()])  # decreasing in the number of times
    if values[-1] >= least:
        return float(times[-1])
    return float(np.exp(np.interp(-least, -values, np.log(times))))


def excess_losses(
    science: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], corrected: bool
) -> dict[str, float]:
    """Return the mean loss of each mixture beyond that on other passages, since training noise is common to both.

    Other passages gain in `share-N`, where more tokens are of their kind. `corrected` removes this gain, estimated by
    linear regression on the logarithm of their share.
    """
    names = list(science)
    other_B = np.array([other[name].mean() for name in names])
    if corrected:
        parts_B = np.array([int(name.removeprefix("share-")) if name.startswith("share") else 1 for name in names])
        log_share_B = np.log(1 - SHARE / parts_B)
        slope = min(np.polyfit(log_share_B, other_B, 1)[0], 0.0)
        other_B = other_B - slope * (log_share_B - np.log(1 - SHARE))
    return {name: float(science[name].mean() - value) for name, value in zip(names, other_B, strict=True)}


def measure(out: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Return losses, excess losses and worths, with 90 % intervals over questions and seeds."""
    loss_of = {target: losses(out, target, seeds) for target in TARGETS}
    result: dict[str, Any] = {"seeds": list(seeds), "steps": STEPS, "share": SHARE, "targets": {}}
    for target, by_mixture in loss_of.items():
        of_seed = {name: values_SE.mean(axis=1).round(4).tolist() for name, values_SE in by_mixture.items()}
        result["targets"][target] = {"loss_by_seed": of_seed}
    for target, corrected in product(TARGETS[:-1], (False, True)):
        rng = stream(0, "repetition", "bootstrap", target)
        both = loss_of[target], loss_of[TARGETS[-1]]
        draws = []
        for draw in range(DRAWS + 1):
            s, *questions = (rng.integers(0, n, n) for n in (len(seeds), *(v["times-1"].shape[1] for v in both)))
            if draw == 0:  # the measurement itself
                s, *questions = (np.arange(len(index)) for index in (s, *questions))
            drawn = (
                {name: values_SE[np.ix_(s, e)] for name, values_SE in by_mixture.items()}
                for by_mixture, e in zip(both, questions, strict=True)
            )
            excess = excess_losses(*drawn, corrected)
            worth = worth_of_repeated(excess)
            draws.append([*excess.values(), *worth.values(), most_repetitions(worth)])
        names = [*(f"excess {name}" for name in both[0]), *(f"worth {times}" for times in TIMES[1:])]
        low, high = np.quantile(draws[1:], (0.05, 0.95), axis=0)
        result["targets"][target]["corrected" if corrected else "plain"] = {
            name: {"value": round(value, 4), "low": round(below, 4), "high": round(above, 4)}
            for name, value, below, above in zip([*names, "most repetitions"], draws[0], low, high, strict=True)
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, help="train only the runs of this seed")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "corpus.parquet").exists():
        write_corpus(args.data, args.out)
    for seed in SEEDS if args.seed is None else [args.seed]:
        if not (args.out / f"mixtures-{seed}.parquet").exists():
            write_mixtures(args.out, seed)
        train(args.out, seed)
    records = {seed: args.out / f"runs-{seed}" / "environment.json" for seed in SEEDS}
    finished = [seed for seed, path in records.items() if path.exists() and not grasp.open_runs(path.parent).pending()]
    text = json.dumps(measure(args.out, finished), indent=1)
    (args.out / "repetition.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
