"""The built-in rule for models with continued training: forms of gradient and forward kernels against the runs.

    python -m experiments.finetune.further documents lengths contrasts small-12 small-48 small-192 small-48-slow \\
        --data ../shared/data --out experiments/finetune/further.json
    python -m experiments.finetune.further instructions --data ../shared/data --out further-held.json

Artifacts are those of `grasp build --train further`, in bfloat16 (the small model in float32); killed, a build goes on.
Over several environments a form has a lower bound; a held-out one (`instructions`) stands alone.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from scipy.stats import norm

from experiments.one_line_errors import in_one_line
from experiments.worlds.artifacts import FEATURES, FORWARD, artifact_of, relevance, shares
from experiments.worlds.evaluate import Method, agreements, noise, records
from experiments.worlds.prepare import environments_parser, model_directory, prepared
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import ENVIRONMENTS, Name, open_corpus
from grasp.arrays import F64
from grasp.artifact.manifest import LOSS_TOKENS
from grasp.errors import GraspError
from grasp.files import write_atomically
from grasp.paper.agreement import standard_errors
from grasp.runs.retrained import RetrainedRuns

FORWARD_ALONE = "token + input"
DELTA = 0.05
WEIGHTS = {".125": 0.125, ".25": 0.25, ".5": 0.5}
RESAMPLES = 400


def forms(kernel_of: dict[str, F64], tokens_N: F64) -> dict[str, Method]:
    """Negative scores of forward kernels count a quarter, those of gradients whole, but where it says so.

    A build has gradients of a row's whole loss; `mean loss` is that over its tokens, `root of tokens` lies between.
    """
    gradient, forward = kernel_of["gradient"], tuple(kernel_of[name] for name in FORWARD)
    out = {
        "gradient": Method((gradient,)),
        "gradient, negative x .25": Method((gradient,), negative=0.25),
        "gradient of the mean loss": Method((gradient / tokens_N[:, None],)),
        "gradient of the loss over the root of tokens": Method((gradient / np.sqrt(tokens_N)[:, None],)),
        FORWARD_ALONE: Method(forward, negative=0.25),
    }

    def weighted_sum(weight: float, *others: F64, of_task: bool = False) -> Method:
        count = len(others)
        return Method((gradient, *others), (1.0, *[0.25] * count), (1.0, *[weight] * count), of_task=of_task)

    out |= {f"gradient + {named} of token + input": weighted_sum(weight, *forward) for named, weight in WEIGHTS.items()}
    out["gradient + .25 of token + input, by task"] = weighted_sum(0.25, *forward, of_task=True)
    whole = tuple(kernel_NE * tokens_N[:, None] for kernel_NE in forward)
    out["gradient + .25 of token + input, whole loss too"] = weighted_sum(0.25, *whole)
    return out


def report(name: Name, data: Path, work: Path) -> tuple[dict[str, Any], dict[str, F64]]:
    """Every form against the runs that there are, and its mean LDS by target and resample, (T, 1 + R)."""
    _, reader = prepared(name, data, work)
    artifact = artifact_of(name, work, model_directory(name, work), reader, FEATURES, 8192, "further")
    environment = RetrainedRuns.open(FOLDER / name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    columns = np.concatenate([artifact.unit_columns(target) for target in dict.fromkeys(utilities.targets)])
    assert tuple(artifact.units["unit_id"].take(columns).to_pylist()) == utilities.unit_ids
    table = artifact.rows(np.arange(artifact.n_rows))
    names = table.column_names
    tokens_N = table[LOSS_TOKENS] if LOSS_TOKENS in names else pc.subtract(table["n_tokens"], 1)
    methods = forms(
        {kernel: relevance(artifact, kernel, columns) for kernel in ("gradient", *FORWARD)},
        tokens_N.to_numpy().astype(np.float64),
    )
    share_BN = shares(environment, open_corpus(name, work, reader).store, utilities)
    agreed = agreements(methods, utilities, share_BN, RESAMPLES)
    print(f"{name}: {len(share_BN)} subsets", flush=True)
    bounds = {
        "environment": name,
        "role": environment.role,
        "subsets": len(share_BN),
        "noise": noise(environment, utilities),
        "methods": records(agreed, utilities, FORWARD_ALONE),
    }
    return bounds, {label: agreement.lds_TR for label, agreement in agreed.items()}


def together(names: Sequence[Name], figures: Sequence[dict[str, F64]]) -> list[dict[str, Any]]:
    """Each form's mean over all targets, less z of its standard errors; the best first.

    Environments of the same rows and questions are one world, the mean over them: worlds count alike.
    """
    worlds: dict[str, list[F64]] = {}
    for name, figure in zip(names, figures, strict=True):
        worlds.setdefault(ENVIRONMENTS[name].rows, []).append(np.stack(list(figure.values())))
    each = [np.mean(values, axis=0) for values in worlds.values()]  # (C, T, 1 + R)
    mean_C = np.concatenate([value[:, :, 0] for value in each], axis=1).mean(axis=1)
    z, se_C = float(norm.ppf(1 - DELTA / len(mean_C))), standard_errors([value[:, :, 1:] for value in each])
    results = [
        {
            "method": name,
            "mean_lds": round(float(m), 4),
            "se": round(float(se), 4),
            "bound": round(float(m - z * se), 4),
        }
        for name, m, se in zip(figures[0], mean_C, se_C, strict=True)
    ]
    return sorted(results, key=lambda figure: -figure["bound"])


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, build, compare, write."""
    args = environments_parser("finetune.further", __doc__).parse_args(arguments)
    if len(args.names) > 1 and "held-out" in {ENVIRONMENTS[name].role for name in args.names}:
        raise GraspError(f"{', '.join(args.names)}: one of them is held out, expected it alone")
    reports, figures = zip(*(report(name, args.data, args.work) for name in args.names), strict=True)
    summary: dict[str, Any] = {"environments": list(reports)}
    if len(reports) > 1:
        summary["together"] = together(args.names, figures)
    write_atomically(args.out, (json.dumps(summary, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
