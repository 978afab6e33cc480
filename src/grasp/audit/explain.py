"""Why does a row count for a target? Its effect, taken apart into what each of its tokens adds.

A row's effect is sum_m share_m (a_im - mean a_m) over the protocol's kernels m, and a_im a mean over positions of the
row and of the units. So every position of the row, and every position of a unit, has a part in it, and the parts add
up. They are computed anew from the model, for one row at a time: the build's own kernels take a relevance apart when
every position is handed to them as a row, or as a unit, of its own:

    a_{i,e} = 1/|P_i| sum_{t in P_i} a_{t,e} = 1/(|P_i||P_e|) sum_{t in P_i} sum_{s in P_e} a_{t,s}

The pooled kernel, a = R sgn(H) log(1 + |H|), is no sum over pairs, since H is damped as a whole. It is linear in the
residuals: a position counts by its share in R, times the damped H of the whole row with the whole unit.
Shape letters: L tokens of a row, P row positions, S unit positions, E units, C columns (E, or S of one unit).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.audit.explanation import EffectParts, Explanation, joined_words
from grasp.audit.sample import reopened
from grasp.corpus.store import RowShard, RowStore
from grasp.extract.backward import examples_of
from grasp.extract.extend import kernels
from grasp.extract.forward import PositionBatch, PositionKernels, UnitFeatures, forward_units
from grasp.extract.pictures import Pictured, vision
from grasp.extract.reopen import BuildSource
from grasp.features.extract import BatchFeatures, position_mask, row_passes, supervised_positions
from grasp.features.pooled_match import PooledKernel
from grasp.features.residuals import PooledFeatures, SparseResidual, pool
from grasp.models.causal_lm import BATCH_ROWS, ReferenceModel, pad_rows
from grasp.models.gradients import Example
from grasp.predict.predictor import Predictor, additive_predictor
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.rows import only_target, row_index
from grasp.settings import FeatureSettings
from grasp.targets import UnitTokens

Part = tuple[str, NDArray[np.int64], F64]  # kernel, (n,) tokens of the row, (n, C) what they add


KEPT_PAIRS = 100
ROUNDING = 0.01  # of an effect, and of a standard deviation: float16 moves it by a tenth of that
OWN_SCALE = "effects on one question are on its own scale: compare them with those of other rows on this question"
POOLED = "pooled: its summaries are damped as a whole; a word counts by its share in the residual match"


def explain(
    artifact: ArtifactReader,
    target: str | None,
    row: str,
    *,
    unit: str | None = None,
    match: str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    own: Mapping[str, Any] | None = None,
) -> Explanation | Pictured:
    """Why does a row count for a target? Shows what each of its words adds.

    With `unit` the answer's words as well, and which word of the row bears on which of the answer; without it the
    questions that the row helps and hurts most. The model is run again on the row and on the questions. For an image:
    the trusted images that it bears on most.

    In Python make one `Explainer` for many rows.

    Args:
        target: target that is asked about. Default: the only one.
        row: row to explain, by its row_id.
        unit: one question of the target, by its unit_id.
        match: by one kernel: gradient, token, input, neighbour, shift, tilt or pooled.
        protocol: protocol to predict with. Default: the one that ships.
        own: settings of the user: code that the artifact was built with is run only if they name it as well.
    Raises:
        SettingsError: no such row.
        ProtocolError: no such target, unit or kernel.
        ArtifactError: rows were not kept, or model or corpus are not those of the build.
        ModelError: the model is not where it was.
    """
    return Explainer(artifact, own).explain(target, row, unit=unit, match=match, protocol=protocol)


class Explainer:
    """Model and rows of an artifact, opened once, when the first row is explained."""

    def __init__(self, artifact: ArtifactReader, own: Mapping[str, Any] | None = None) -> None:
        self.artifact = artifact
        self._own = own
        self._asked: tuple[Any, _Question] | None = None

    @cached_property
    def _origin(self) -> BuildSource:
        return reopened(self.artifact, self._own)

    def explain(
        self,
        target: str | None,
        row: str,
        *,
        unit: str | None = None,
        match: str | None = None,
        protocol: ScoringProtocol | Path | str | None = None,
    ) -> Explanation | Pictured:
        """See `explain`."""
        artifact = self.artifact
        if BuildSource(artifact).has_images:
            (found,) = vision().explain(artifact, target, [row], unit=unit, match=match, protocol=protocol)
            return found
        target = only_target(artifact, target)
        if match is not None:
            artifact.relevance_name(match)  # or it says what there is
        index = int(row_index(artifact, [row])[0])
        asked = target, unit, match, protocol
        if self._asked is None or self._asked[0] != asked:
            predictor = additive_predictor(artifact, target, protocol=protocol, match=match, unit=unit)
            self._asked = asked, _Question.from_origin(self._origin, predictor, by_position=unit is not None)
        return self._asked[1].explanation(index, row)


@dataclass(frozen=True, slots=True)
class RowFeatures:
    """Features of one row at the positions of the kernels: first those of the pooled one, then of the others."""

    batch: BatchFeatures
    token_P: NDArray[np.int64]  # the token that each position predicts, by its place in the row
    vocab: int
    example: Example

    @classmethod
    def from_row(cls, model: ReferenceModel, row: RowShard, settings: FeatureSettings) -> Self:
        """Run the model over a row."""
        specs = settings.pooling, settings.token_positions
        ((_, batch),) = row_passes(model, row, specs, settings.top_k)
        _, labelled_BL = pad_rows([row.ids(0)], [row.mask(0)])
        supervised_BL = supervised_positions(labelled_BL)
        used_L = torch.stack([position_mask(spec, supervised_BL) for spec in specs]).any(dim=0)[0]
        (example,) = examples_of(row, settings)
        return cls(batch, used_L.nonzero()[:, 0].numpy() + 1, model.vocab_size, example)

    def tokens(self, which: int) -> NDArray[np.int64]:
        """Tokens that are predicted at the positions of one specification."""
        return np.asarray(self.token_P[self.batch.chosen[which].cpu().numpy()])


def unit_by_position(unit: UnitFeatures, settings: FeatureSettings, vocab: int) -> UnitFeatures:
    """One unit as if each of its S positions were a unit. The kernels of positions then lack the factor 1/S."""
    n = len(unit.unit_S)
    used_S = position_mask(settings.pooling, torch.ones(1, n, dtype=torch.bool))[0].to(unit.unit_S.device)
    (example,) = unit.examples
    answer = range(len(example.input_ids) - n, len(example.input_ids))
    return replace(
        unit,
        examples=tuple(Example(example.input_ids, labelled=np.arange(len(example.input_ids)) == k) for k in answer),
        pooled=_shares(unit.pooled, unit.hidden_SH, unit.residual, used_S, vocab),
        unit_S=torch.arange(n, device=unit.unit_S.device),
        loss_E=np.repeat(unit.loss_E, n),
    )


def relevance_by_position(
    row: RowFeatures, token: PositionKernels | None, pooled: PooledKernel, unit_positions: int = 1
) -> Iterator[Part]:
    """What every position of a row adds to its relevance by each kernel that is built, some positions at a time.

    Args:
        unit_positions: S, where the kernels were prepared for `unit_by_position`.
    """
    if pooled.units is not None:
        hidden_PH, residual, row_P = row.batch.take(0)
        shares = _shares(pool(hidden_PH, residual, row_P, 1, row.vocab), hidden_PH, residual, row_P == 0, row.vocab)
        yield "pooled", row.tokens(0), pooled.relevance(shares)["relevance_pooled"].astype(np.float64)
    if token is None:
        return
    if token.gradient is not None:
        kernel = token.gradient
        added_LC = row.example.labels * kernel.gradients.by_position(row.example, kernel.side_EK)
        # what the model makes of token t goes to the token after it, as everywhere; after the last nothing has loss
        yield "gradient", np.arange(1, len(added_LC)), added_LC[:-1] / unit_positions
    every, predicted = PositionBatch.from_batch(row.batch, 1), row.tokens(1)
    for start in range(0, len(predicted), BATCH_ROWS):
        some = slice(start, start + BATCH_ROWS)
        tokens = predicted[some]
        alone = PositionBatch(
            every.hidden_PH[some],
            every.residual.at(some),
            torch.arange(len(tokens), device=every.row_P.device),
            every.input_P[some],
            len(tokens),
        )
        for name, part_PC in token.relevance(alone).items():
            mean_PC = part_PC.double().cpu().numpy() / (len(predicted) * unit_positions)
            yield name.removeprefix("relevance_"), tokens, mean_PC


def _shares(
    whole: PooledFeatures, hidden_PH: Tensor, residual: SparseResidual, used_P: Tensor, vocab: int
) -> PooledFeatures:
    """Every position of one row as a row with its share in the pooled residual, and the pooled hidden state."""
    n = len(hidden_PH)
    own_PV = pool(hidden_PH, residual, torch.arange(n, device=hidden_PH.device), n, vocab).residual_NV
    share_P = used_P.float().cpu().numpy() / float(used_P.sum())
    return PooledFeatures(np.repeat(whole.hidden_NH, n, axis=0), csr_array(own_PV.multiply(share_P[:, None])))


@dataclass(frozen=True)
class _Question:
    """One target, or one unit of it, with the kernels made ready for it."""

    origin: BuildSource
    predictor: Predictor
    units: pa.Table
    unit_tokens: list[UnitTokens]
    token: PositionKernels | None
    pooled: PooledKernel
    by_position: bool  # the columns of the kernels are the positions of the one unit

    @classmethod
    def from_origin(cls, origin: BuildSource, predictor: Predictor, *, by_position: bool) -> "_Question":
        settings, model = origin.settings, _language_model(origin)
        units = origin.artifact.units.take(pa.array(predictor.units.columns_E))
        tokens = [origin.unit_tokens[e] for e in predictor.units.columns_E]
        features = forward_units(model, tokens, units["unit_id"].to_pylist(), settings.features)
        if by_position:
            features = unit_by_position(features, settings.features, model.vocab_size)
        prepared = kernels(origin.artifact, features, settings.features, model)
        return cls(origin, predictor, units, tokens, *prepared, by_position)

    def explanation(self, index: int, row: str) -> Explanation:
        """Why one row counts."""
        store, model = self.origin.rows, _language_model(self.origin)
        assert isinstance(store, RowStore)
        shard = store.rows(np.array([index]))
        parts = EffectParts.from_artifact(self.origin.artifact, self.predictor, index)
        features = RowFeatures.from_row(model, shard, self.origin.settings.features)
        added = self._added(features, shard.n_tokens, parts.weights)
        held = parts.by_kernel
        here = {name: float(added.kernel_L[name].sum()) for name in held}
        gap = sum(here.values()) + parts.average - parts.effect
        table = _row_table(model.tokenizer.pieces(shard.ids(0).tolist()), features, added.kernel_L)
        target, unit = self.predictor.targets[0], self.units["unit_id"][0].as_py() if self.by_position else None
        total, answer = sum(here.values()), self._answer(model, added)
        where = f"{unit} of {target}" if unit else target
        questions = None
        if not self.by_position:  # what the row adds to each, the most helped first
            questions = self.units.select(["unit_id", "prompt", "completion"])
            questions = questions.append_column("contribution", pa.array(added.column_C))
            questions = questions.take(pa.array(np.argsort(-added.column_C, kind="stable")))
        return Explanation(
            table,
            f"row {row}: effect {parts.effect:+z.3f} on {where}. Its words add {total:+z.3f}; the average row's "
            f"{-parts.average:+z.3f} is taken off",
            (*([OWN_SCALE] * self.by_position), *_mostly_one(questions), *self._notes(here, parts.effect, gap)),
            row_id=row,
            target=target,
            unit_id=unit,
            effect=parts.effect,
            average=parts.average,
            gap=gap,
            kernels=pa.table(
                {"kernel": list(here), "contribution": list(here.values()), "stored": [held[name] for name in here]}
            ),
            answer=answer,
            pairs=None if answer is None else _strongest(added.pair_LC, table, answer, self.unit_tokens[0].first),
            questions=questions,
            prompt=self.units["prompt"][0].as_py() if self.by_position else "",
        )

    def _added(self, row: RowFeatures, n_tokens: int, weights: Mapping[str, F64]) -> "_Added":
        positions = len(self.unit_tokens[0].input_ids) - self.unit_tokens[0].first if self.by_position else 1
        n_columns = positions if self.by_position else len(self.units)
        added = _Added(
            {name: np.zeros(n_tokens) for name in weights},
            np.zeros(n_columns),
            np.zeros((n_tokens if self.by_position else 0, n_columns), dtype=np.float32),
        )
        for name, tokens, part_PC in relevance_by_position(row, self.token, self.pooled, positions):
            if name in weights:
                weighted_PC = part_PC * weights[name]
                added.kernel_L[name][tokens] += weighted_PC.sum(axis=1)
                added.column_C[:] += weighted_PC.sum(axis=0)
                if self.by_position:
                    added.pair_LC[tokens] += weighted_PC.astype(np.float32)
        return added

    def _answer(self, model: ReferenceModel, added: "_Added") -> pa.Table | None:
        """The unit's tokens, and what those that carry loss received."""
        if not self.by_position:
            return None
        (unit,) = self.unit_tokens
        received_L = np.concatenate([np.full(unit.first, np.nan), added.column_C])
        return pa.table(
            {
                "position": np.arange(len(received_L)),
                "text": model.tokenizer.pieces(unit.input_ids.tolist()),
                "received": pa.array(received_L, from_pandas=True),
            }
        )

    def _notes(self, here: Mapping[str, float], effect: float, gap: float) -> tuple[str, ...]:
        notes = []
        if len(here) > 1:
            notes.append("by kernel: " + ", ".join(f"{name} {value:+z.3f}" for name, value in here.items()))
        if "pooled" in here:
            notes.append(POOLED)
        if abs(gap) > ROUNDING * max(1.0, abs(effect)):
            notes.append(
                f"the words add up to {gap:+.2g} more than the artifact holds: another device or dtype than the "
                "build's, or a target that was added with a max_length of its own"
            )
        else:
            notes.append(f"the words add up to what the artifact holds, to {abs(gap):.1g}")
        return (*notes, f"protocol {self.predictor.protocol.name}")


@dataclass(frozen=True, slots=True)
class _Added:
    """What was added up of one row, in effect."""

    kernel_L: dict[str, F64]
    column_C: F64
    pair_LC: NDArray[np.float32]  # of one unit; else without lines


def _language_model(origin: BuildSource) -> ReferenceModel:
    assert isinstance(origin.model, ReferenceModel)
    return origin.model


def _row_table(pieces: Sequence[str], row: RowFeatures, kernel_L: Mapping[str, F64]) -> pa.Table:
    """position, text, contribution, and the same by kernel; none where a token has no part in a loss."""
    used_L = np.any([value_L != 0 for value_L in kernel_L.values()], axis=0)
    used_L[row.token_P] = True
    columns = {"contribution": np.sum(list(kernel_L.values()), axis=0), **kernel_L}
    return pa.table(
        {"position": np.arange(len(pieces)), "text": list(pieces)}
        | {name: pa.array(value_L, mask=~used_L) for name, value_L in columns.items()}
    )


def _strongest(pair_LC: NDArray[np.float32], row: pa.Table, answer: pa.Table, first: int) -> pa.Table:
    """The pairs of words that add most, either way; `first` is the token at which the answer begins."""
    row_words, starts = joined_words(row["text"].to_pylist())
    answer_words, heard = joined_words(answer["text"].to_pylist()[first:])
    pair_WC = np.add.reduceat(np.add.reduceat(pair_LC, starts, axis=0, dtype=np.float64), heard, axis=1)
    places, columns = np.unravel_index(np.argsort(-np.abs(pair_WC), axis=None)[:KEPT_PAIRS], pair_WC.shape)
    return pa.table(
        {
            "row_position": starts[places],
            "row_text": [row_words[place] for place in places],
            "answer_position": heard[columns] + first,
            "answer_text": [answer_words[column] for column in columns],
            "contribution": pair_WC[places, columns],
        }
    )


def _mostly_one(questions: pa.Table | None) -> tuple[str, ...]:
    """A line, if more than half of the help goes to a single one of several questions."""
    if questions is None or len(questions) < 3:
        return ()
    adds_E = np.maximum(questions["contribution"].to_numpy(), 0.0)
    if adds_E[0] <= adds_E.sum() / 2:
        return ()
    name = questions["unit_id"][0].as_py()
    return (f"{name} alone gets {adds_E[0] / adds_E.sum():.0%} of the help: the effect on the target rests on it",)
