"""Published detectors of planted rows. Each gives a number a row, (N,), higher for more suspicious ones.

Sources: STRIP (Gao et al. 2019), ONION (Qi et al. 2021) and prediction divergence as arXiv 2504.09026 and its public
code compare them; written anew here.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F  # noqa: N812

from experiments.safety.setting import Row, review
from experiments.safety.tuned import Base, Tuned
from grasp.audit.detection import fused
from grasp.fidelity.files import write_whole
from grasp.seeds import stream

F64 = NDArray[np.float64]
REPLACED = 0.5  # share of words that STRIP replaces
LEAST = 1e-12


def strip(tuned: Tuned, rows: Sequence[Row], *, copies: int, seed: int) -> F64:
    """Mean probability of the target class over copies with half of the words replaced from another row."""
    changed = [
        review(row.row_id, _mixed(rows, i, copy, seed), row.completion, len(row.text.split()))
        for i, row in enumerate(rows)
        for copy in range(copies)
    ]
    odds = tuned.log_odds(changed).reshape(len(rows), copies)
    return np.asarray((1 / (1 + np.exp(-odds))).mean(axis=1))


def _mixed(rows: Sequence[Row], i: int, copy: int, seed: int) -> str:
    draw = stream(seed, "safety", "strip", rows[i].row_id, copy)
    words = rows[i].text.split()
    other = rows[int(draw.integers(len(rows)))].text.split() or words
    for place in draw.choice(len(words), size=max(1, int(len(words) * REPLACED)), replace=False):
        words[place] = other[int(draw.integers(len(other)))]
    return " ".join(words)


def prediction_divergence(tuned: Tuned, rows: Sequence[Row], *, backdoor: bool) -> F64:
    """Absolute change of the label's log-odds by the adapters; of an answer, of its mean log-probability."""
    if backdoor:
        return np.abs(tuned.log_odds(rows) - tuned.log_odds(rows, adapted=False))
    return np.abs(tuned.losses(rows) - tuned.losses(rows, adapted=False))


class Onion:
    """Largest drop of the perplexity when one word is left out, under the model before fine-tuning.

    Every text's number is kept as it comes, so that a kill costs one text, and cases share the texts they share.
    """

    def __init__(self, base: Base, kept: Path) -> None:
        self.base, self.path = base, kept
        self._known: dict[str, float] = json.loads(kept.read_bytes()) if kept.exists() else {}

    def __call__(self, rows: Sequence[Row]) -> F64:
        return np.array([self._score(" ".join(row.text.split())) for row in rows])

    def _score(self, text: str) -> float:
        if text not in self._known:
            self._known[text] = self._drop(text)
            write_whole(self.path, json.dumps(self._known).encode())
        return float(self._known[text])

    def _drop(self, text: str) -> float:
        words = text.split()
        shorter = [" ".join(words[:i] + words[i + 1 :]) for i in range(len(words))]
        found = self.perplexity([text, *shorter])
        return float(found[0] - found[1:].min(initial=found[0])) if np.isfinite(found[0]) else 0.0

    @torch.no_grad()
    def perplexity(self, texts: Sequence[str]) -> F64:
        """exp of the mean loss a token; infinite for a text of fewer than two tokens."""
        rows = self.base.tokenizer.encode(texts)
        out = np.full(len(rows), np.inf)
        order = [i for i in np.argsort([len(row) for row in rows], kind="stable") if len(rows[i]) > 1]
        for start in range(0, len(order), 32):
            place = order[start : start + 32]
            longest = max(len(rows[i]) for i in place)
            ids_BL = torch.tensor([rows[i] + [0] * (longest - len(rows[i])) for i in place])
            logits_BLV = self.base.whole(input_ids=ids_BL[:, :-1], use_cache=False).logits.float()
            loss_BL = F.cross_entropy(logits_BLV.transpose(1, 2), ids_BL[:, 1:], reduction="none").numpy()
            for b, i in enumerate(place):
                out[i] = math.exp(min(20.0, float(loss_BL[b, : len(rows[i]) - 1].mean())))
        return out


def unanimous(mean_N: F64, changed: Sequence[F64]) -> F64:
    """How high a share all kinds agree on: strong on the queries as they are, and hardly moved by any transform.

    A cut at q flags the rows that are among the 1 - q strongest and, for every kind, among the 1 - q that change
    least: the unanimous vote, at every level at once.

    Args:
        mean_N: mean influence of each row on the queries.
        changed: the same after each kind of transform.
    """
    strength_N = np.abs(mean_N)
    steady = [fused([-np.abs(mean_N - other_N) / (strength_N + LEAST)]) for other_N in changed]
    return np.asarray(np.min([fused([strength_N]), *steady], axis=0))


def variance(mean_N: F64, changed: Sequence[F64]) -> F64:
    """Mean rank of a strong influence and of a small variance of it, in units of its strength, over the kinds."""
    strength_N = np.abs(mean_N)
    spread_N = np.var([mean_N, *changed], axis=0) / (strength_N + LEAST) ** 2
    return fused([strength_N, -spread_N])
