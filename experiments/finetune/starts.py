"""At which weights a gradient is taken: the plain model's, those of an adapter before it is trained, a warm-up's.

    python -m experiments.finetune.starts documents-lora documents lengths instructions longer-12 longer-24 \\
        longer-60 --data ../shared/data --out experiments/finetune/starts.json

Every start has an artifact of `grasp build --train further`; killed, a build goes on. `warm-up` is a checkpoint after
12 steps on 96 rows that are drawn from the corpus. `both` is the sum of the gradients at the start and at the warm-up,
each divided by its spread. The built-in rule is the gradient and a quarter each of token and input. Differences are
relative to the gradient of the first start.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.finetune.methods import warmed_up
from experiments.one_line_errors import in_one_line
from experiments.worlds.artifacts import FEATURES, artifact_of, relevance, shares
from experiments.worlds.evaluate import Method, compare, noise
from experiments.worlds.prepare import environments_parser, model_directory, prepared
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import ENVIRONMENTS, Name, open_corpus
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.files import write_atomically
from grasp.models.tokenizer import HfTokenizer
from grasp.runs.retrained import RetrainedRuns

STARTS = ("adapter", "start", "warm-up")
KERNELS = ("gradient", "token", "input")
WEIGHTS = (1.0, 0.25, 0.25)
FORWARD_ALONE = "token + input"


def artifact_at(start: str, name: Name, work: Path, reader: HfTokenizer) -> ArtifactReader | None:
    """The artifact of one start; none where an environment has no such start."""
    kind, plain = ENVIRONMENTS[name], work / "model"
    if start == "adapter":
        where, has_adapter = model_directory(name, work), bool(kind.recipe.lora_rank)
        return artifact_of(name, work, where, reader, {}, 8192, f"at-{start}") if has_adapter else None
    if start == "warm-up":
        corpus = open_corpus(name, work, reader)
        if not kind.recipe.bfloat16 or kind.recipe.lora_rank:
            return None
        where = warmed_up(work / f"{kind.prefix_of or name}-{start}", plain, corpus.rows, corpus.first_N)
        return artifact_of(name, work, where, reader, {}, 8192, f"at-{start}")
    return artifact_of(name, work, plain, reader, FEATURES, 8192, "further")


def report(name: Name, starts: Sequence[str], data: Path, work: Path) -> dict[str, Any]:
    """Every start against the runs that there are."""
    _, reader = prepared(name, data, work)
    environment = RetrainedRuns.open(FOLDER / name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    score_by_start: dict[str, tuple[F64, ...]] = {}
    for start in starts:
        artifact = artifact_at(start, name, work, reader)
        if artifact is not None:
            columns = np.concatenate([artifact.unit_columns(target) for target in dict.fromkeys(utilities.targets)])
            assert tuple(artifact.units["unit_id"].take(columns).to_pylist()) == utilities.unit_ids
            score_by_start[start] = tuple(relevance(artifact, kernel, columns) for kernel in KERNELS)
    first = next(iter(score_by_start))
    methods = {FORWARD_ALONE: Method(score_by_start[first][1:], negative=0.25)}
    for start, kernels in score_by_start.items():
        methods[f"{start}: gradient"] = Method(kernels[:1])
        methods[f"{start}: what ships"] = Method(kernels, WEIGHTS, WEIGHTS)
    if {"start", "warm-up"} <= set(score_by_start):
        methods["both: gradient"] = Method((score_by_start["start"][0], score_by_start["warm-up"][0]))
    share_BN = shares(environment, open_corpus(name, work, reader).store, utilities)
    print(f"{name}: {len(share_BN)} subsets", flush=True)
    return {
        "environment": name,
        "role": environment.role,
        "subsets": len(share_BN),
        "noise": noise(environment, utilities),
        "base": f"{first}: gradient",
        "methods": compare(methods, utilities, share_BN, base=f"{first}: gradient"),
    }


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, build, compare, write."""
    parser = environments_parser("finetune.starts", __doc__)
    parser.add_argument("--starts", default=",".join(STARTS), help="Some of them, separated by commas.")
    args = parser.parse_args(arguments)
    reports = [report(name, args.starts.split(","), args.data, args.work) for name in args.names]
    write_atomically(args.out, (json.dumps({"environments": reports}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
