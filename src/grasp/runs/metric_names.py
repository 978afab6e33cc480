"""What the name of a metric says: which direction is better, its kind, and whether it is a standard error.

In `sciq/acc_norm,none`, the metric is `acc_norm`, the task is `sciq`, and `none` is a filter of the harness. Only
metrics that are known as a whole count, never a part of a task's name: `wic_gloss/acc` is an accuracy, not a loss. A
prefix that ends in an underscore is allowed, as in `sciq_loss`.
"""

import re
from collections.abc import Iterable, Iterator

import numpy as np

from grasp.arrays import F64
from grasp.runs.training_runs import Direction

STANDARD_ERROR = r"(.*_)?(std_?err|std_error|standard_error)"
SPLIT_NAMES = r"train|val|valid|validation|dev|eval|test"
SPLIT = rf"(({SPLIT_NAMES})_)?"  # prefix of a metric that is written before its task
LOSS, SHARE = "loss", "share"  # kinds: nats per token; shares of 1
METRICS: tuple[tuple[Direction, str, str], ...] = (  # direction, kind (empty: the metric itself), names
    ("lower", LOSS, r"loss|nll|ce|cross_?entropy|negative_log_likelihood"),
    (
        "lower",
        "",
        r"ppl|((word|byte|token)_)?perplexity|bpb|bits_per_(byte|token|char|character)(_corr)?|[wct]er|error_rate"
        r"|brier(_score)?|ece|calibration_error|r?mse|mae|mape|mean_(squared|absolute)_error",
    ),
    (
        "higher",
        SHARE,
        r"acc(uracy)?(_(norm|raw|all|uncond|bytes|mutual_info|per_(token|char|byte)|macro|micro|score))*"
        r"|(quasi_)?exact(_match)?|em|f1(_(macro|micro|weighted|score))?|(google_|sacre)?bleu(_?\d)?(_score)?"
        r"|rouge_?(\d|w|l|s|l_?sum)?(_(precision|recall|fmeasure|f1))?|(pass|maj)(@|_at_)\d+"
        r"|auc|(roc_)?auc|auroc|(mrr|recall|precision|ndcg)(@\d+)?",
    ),
    ("higher", "", r"reward|utility|win_rate|log_?likelihood|(sum_logits|logits_per_(token|char))(_corr)?"),
)


def direction_by_name(metric: str) -> Direction | None:
    """Return whether higher or lower is better by the name of a metric; None if it is unknown."""
    return next((direction for direction, _ in _known(metric)), None)


def metric_kind(metric: str) -> str:
    """Return the kind of a metric: `loss`, `share`, or the name of the metric itself, without its task."""
    return next((kind for _, kind in _known(metric)), _segments(metric)[-1] if "/" in metric else "")


def metric_kinds(metrics: Iterable[str], utility_RST: F64) -> list[str]:
    """Return the kind of each metric; numbers of different kinds must not be averaged. Shares above 1 are `percent`."""
    largest_T = np.nanmax(np.abs(utility_RST), axis=(0, 1))
    kinds = zip(map(metric_kind, metrics), largest_T, strict=True)
    return ["percent" if kind == SHARE and largest > 1 else kind for kind, largest in kinds]


def is_standard_error(name: str) -> bool:
    """Return whether a column holds standard errors of a metric, such as `sciq/acc_stderr,none`."""
    return any(re.fullmatch(STANDARD_ERROR, segment) for segment in _segments(name))


def _known(metric: str) -> Iterator[tuple[Direction, str]]:
    """Yield direction and kind of known metrics in a name, the last one first.

    Before the last slash, only the whole segment counts, as in `val_loss/arxiv`.
    """
    *before, last = _segments(metric)
    for prefix, segment in ((r"(?!neg_)(.*?_)??", last), *((SPLIT, segment) for segment in reversed(before))):
        for direction, kind, names in METRICS:
            if match := re.fullmatch(rf"{prefix}(?P<metric>{names})", segment):
                yield direction, kind or match["metric"]


def _segments(name: str) -> list[str]:
    """Return the parts between slashes in snake case, without the filter of the last one."""
    *before, last = name.split("/")
    words = (
        re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", part) for part in (*before, last.split(",")[0])
    )
    return [re.sub(r"[^a-z0-9@]+", "_", part.lower()).strip("_") for part in words]
