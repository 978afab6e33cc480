"""Published detectors of planted rows. Each gives a number a row, (N,), higher for more suspicious ones.

Sources: STRIP (Gao et al. 2019), ONION (Qi et al. 2021) and prediction divergence as arXiv 2504.09026 and its public
code compare them; written anew here.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from experiments.safety.setting import Row, review
from experiments.safety.tuned import Base, Tuned
from grasp.arrays import F64
from grasp.files import write_atomically
from grasp.seeds import stream
from grasp.vision.detection import mean_ranks

REPLACED = 0.5  # share of words that STRIP replaces
LEAST = 1e-12
PACKED = 1024  # tokens of a row of ONION, unless one branch is longer


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

    def __init__(self, base: Base, cache: Path) -> None:
        self.base, self.path = base, cache
        self._known: dict[str, float] = json.loads(cache.read_bytes()) if cache.exists() else {}

    def __call__(self, rows: Sequence[Row]) -> F64:
        return np.array([self._score(" ".join(row.text.split())) for row in rows])

    def _score(self, text: str) -> float:
        if text not in self._known:
            self._known[text] = self._drop(text)
            if self.path.exists():  # what another process has kept meanwhile
                self._known = json.loads(self.path.read_bytes()) | self._known
            write_atomically(self.path, json.dumps(self._known).encode())
        return float(self._known[text])

    def _drop(self, text: str) -> float:
        words = text.split()
        shorter = [" ".join(words[:i] + words[i + 1 :]) for i in range(len(words))]
        perplexity = self.perplexities(text, shorter)
        return float(perplexity[0] - perplexity[1:].min(initial=perplexity[0])) if np.isfinite(perplexity[0]) else 0.0

    @torch.no_grad()
    def perplexities(self, text: str, changed: Sequence[str]) -> F64:
        """Of a text and then of its variants: exp of the mean loss a token; infinite for fewer than two tokens.

        What a variant has in common with the beginning of the text is run once: variants are branches of it, packed
        into one row, each seeing its own past alone.
        """
        stem, *branches = self.base.tokenizer.encode([text, *changed])
        forks = [_common(stem, branch) for branch in branches]
        losses = [self._losses(stem, [], [])[0]] if len(stem) > 1 else [np.empty(0)]
        for packed in _packs(len(stem), branches, forks):
            losses += self._losses(stem, [branches[i] for i in packed], [forks[i] for i in packed])[1:]
        return np.array([math.exp(min(20.0, float(loss.mean()))) if len(loss) else np.inf for loss in losses])

    def _losses(self, stem: list[int], branches: Sequence[list[int]], forks: Sequence[int]) -> list[F64]:
        """Losses of the tokens from the second on, of the stem and of each branch that leaves it at its fork."""
        rows, first = [stem, *branches], [0, *forks]
        place = torch.cat([torch.arange(fork, len(row)) for row, fork in zip(rows, first, strict=True)])
        edges = np.cumsum([0, *(len(row) - fork for row, fork in zip(rows, first, strict=True))])
        sees_LL = torch.zeros(len(place), len(place), dtype=torch.bool)
        for fork, start, stop in zip(first, edges, edges[1:], strict=False):
            sees_LL[start:stop, :fork] = True
            sees_LL[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        mask_LL = torch.zeros(sees_LL.shape).masked_fill(~sees_LL, torch.finfo(torch.float32).min)
        ids = torch.tensor([token for row, fork in zip(rows, first, strict=True) for token in row[fork:]])
        logits_LV = (
            self.base.whole(
                input_ids=ids[None], attention_mask=mask_LL[None, None], position_ids=place[None], use_cache=False
            )
            .logits[0]
            .float()
        )
        out = []
        for row, fork, start in zip(rows, first, edges, strict=False):
            positions = range(max(1, fork), len(row))
            before = [t - 1 if t == fork else start + t - 1 - fork for t in positions]
            tokens = torch.tensor([row[t] for t in positions], dtype=torch.long)
            mine = F.cross_entropy(logits_LV[before], tokens, reduction="none").double().numpy()
            out.append(np.concatenate([out[0][: max(0, fork - 1)], mine]) if out else mine)
        return out


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two rows begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _packs(stem: int, branches: Sequence[Sequence[int]], forks: Sequence[int]) -> Iterator[list[int]]:
    """Branches that are run together with the stem, `PACKED` tokens or a single branch at once."""
    pack: list[int] = []
    tokens = stem
    for i, (branch, fork) in enumerate(zip(branches, forks, strict=True)):
        if pack and tokens + len(branch) - fork > PACKED:
            yield pack
            pack, tokens = [], stem
        pack.append(i)
        tokens += len(branch) - fork
    if pack:
        yield pack


def unanimous(mean_N: F64, changed: Sequence[F64]) -> F64:
    """How high a share all kinds agree on: strong on the queries as they are, and hardly moved by any transform.

    A cut at q flags the rows that are among the 1 - q strongest and, for every kind, among the 1 - q that change
    least: the unanimous vote, at every level at once.

    Args:
        mean_N: mean influence of each row on the queries.
        changed: the same after each kind of transform.
    """
    strength_N = np.abs(mean_N)
    steady = [mean_ranks([-np.abs(mean_N - other_N) / (strength_N + LEAST)]) for other_N in changed]
    return np.asarray(np.min([mean_ranks([strength_N]), *steady], axis=0))


def variance(mean_N: F64, changed: Sequence[F64]) -> F64:
    """Mean rank of a strong influence and of a small variance of it, in units of its strength, over the kinds."""
    strength_N = np.abs(mean_N)
    spread_N = np.var([mean_N, *changed], axis=0) / (strength_N + LEAST) ** 2
    return mean_ranks([strength_N, -spread_N])
