"""Explain the effect of a row on a target by the contributions of its tokens. Start with `explain`.

A row is a training text, and a unit is one question of the target with its answer. The row's effect is
sum_m share_m (a_im - mean a_m) over the kernels m of the protocol (the scoring rule), where a kernel is one way to
compute the relevance a of a row to a unit. For most kernels a_im is a mean over the positions of the row and of the
units, so the effect is a sum of contributions of single positions. They are recomputed by the model, one row at a time:
the kernels of the build return contributions if every position is passed to them as a separate row, or unit:

    a_{i,e} = 1/|P_i| sum_{t in P_i} a_{t,e} = 1/(|P_i||P_e|) sum_{t in P_i} sum_{s in P_e} a_{t,s}

Here P_i and P_e are the positions with loss of row i and unit e. A kernel that is not linear (`Kernel.is_linear`), but
a function of averages over positions, is no sum over pairs: the contribution of a position is then what the kernel
returns for its share of the mean residual and the mean hidden state of the whole row. The replay (the derivative of a
training by the weight of a row) has no contributions by position.

Shape letters: L tokens of a row, P row positions, S unit positions, E units, K sampled coordinates of a gradient, C
columns of a kernel's result (E units, or S positions of one unit).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.arrays import F64, I64
from grasp.artifact.manifest import UNITS
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import indices_of_row_ids, only_target
from grasp.corpus.row_store import TokenRows
from grasp.errors import ModelError, ProtocolError
from grasp.hub import fetched_before
from grasp.inspect.explanation import EffectTerms, Explanation, by_word, dominant_word_notes, join_words
from grasp.kernel_table import REPLAY
from grasp.kernels.gradient import Gradient
from grasp.kernels.kernel import kernel_class
from grasp.models.batch import Batch, UnitGradients
from grasp.models.build_source import BuildSource
from grasp.models.causal_lm import BATCH_ROWS, ReferenceModel, pad_rows
from grasp.models.checkpoint import REPOSITORY
from grasp.models.forward_pass import position_mask
from grasp.models.gradients import Example
from grasp.models.residuals import PooledFeatures
from grasp.pipeline.model_pass import ModelPass, read_batches, row_examples, unit_gradients
from grasp.pipeline.stored_inputs import load_kernels
from grasp.predict.predictor import Predictor, additive_predictor
from grasp.predict.scoring_rule import ScoringProtocol, kernel_weights
from grasp.targets.units import UnitTokens

MAX_PAIRS = 100  # pairs of words in a result
# Tolerance of the recomputed effect, relative above 1 and absolute below; float16 rounding is a tenth of it.
EFFECT_TOLERANCE = 0.01
TEXT_NOTE = (
    "prediction from its text and labels: the effect that regressions on rows of other documents expect of such a row, "
    "from its words and labels; it is no part of the words above"
)
UNIT_SCALE_NOTE = (
    "effects on a question are standardised for this question: compare them only with those of other rows on it"
)
SUMMARY_NOTE = "contributions of words are their shares of the mean residual, since the kernel is no sum over words"


def explain(
    artifact: ArtifactReader,
    target: str | None,
    row: str,
    *,
    unit: str | None = None,
    match: str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Explanation:
    """Explain the effect of a row on a target by the contributions of its words.

    With `unit`, also show the words of the answer and the strongest pairs of words; without it, the questions that the
    row helps and harms most. The model is run on the row, and on the questions if their features are not stored.

    In Python use one `Explainer` for many rows.

    Args:
        artifact: artifact of the row.
        target: target to explain. Default: the only one.
        row: row to explain, by its row_id.
        unit: one question of the target, by its unit_id.
        match: explain the relevance by one kernel, e.g. output_layer or gradient.
        protocol: scoring rule. Default: the built-in one.
        overrides: settings of the user; custom code of the artifact runs only if they name it too.
    Raises:
        SettingsError: no such row.
        ProtocolError: no such target, unit or kernel.
        ArtifactError: the rows are no texts or were not stored, or model or corpus differ from those of the build.
        ModelError: the model does not exist any more.
    """
    return Explainer(artifact, overrides).explain(target, row, unit=unit, match=match, protocol=protocol)


class Explainer:
    """Explain rows of an artifact; model and rows are loaded once, at the first call.

    Args:
        artifact: artifact of the rows.
        overrides: settings of the user; custom code of the artifact runs only if they name it too.
    """

    def __init__(self, artifact: ArtifactReader, overrides: Mapping[str, Any] | None = None) -> None:
        self.artifact = artifact
        self._overrides = overrides
        # The last request and its units, since preparing kernels is slow and rows are often explained one by one.
        self._last_prepared: tuple[Any, _PreparedUnits] | None = None

    @cached_property
    def _source(self) -> BuildSource:
        source = BuildSource(self.artifact, self._overrides)
        _ = source.rows  # loads the rows, so that their errors precede those of the model
        name = source.settings.model.path
        if not (Path(name).exists() or (REPOSITORY.fullmatch(name) and fetched_before(name))):
            raise ModelError(
                f"model.path: {name}: no such local model; restore it, or pass its present directory with --set "
                "model.path=DIR"
            )
        _ = source.model
        return source

    def explain(
        self,
        target: str | None,
        row: str,
        *,
        unit: str | None = None,
        match: str | None = None,
        protocol: ScoringProtocol | Path | str | None = None,
    ) -> Explanation:
        """See `explain`."""
        artifact = self.artifact
        artifact.require_texts("explain shows the contributions of words")
        target = only_target(artifact, target)
        if match is not None:
            artifact.relevance_name(match)  # raises an error that lists the kernels
        if match == REPLAY:
            raise ProtocolError(
                "match: replay is the derivative by the weight of a whole row, which has no parts by word; "
                "`grasp score --match replay` prints it"
            )
        index = int(indices_of_row_ids(artifact, [row])[0])
        request = target, unit, match, protocol
        if self._last_prepared is None or self._last_prepared[0] != request:
            predictor = additive_predictor(artifact, target, protocol=protocol, match=match, unit=unit)
            self._last_prepared = request, _PreparedUnits(self._source, predictor, by_position=unit is not None)
        return self._last_prepared[1].explanation(index, row)


class _PreparedUnits:
    """The units of a target, or one of them, with kernels that are prepared to score rows against them.

    For one unit, the columns C of the kernels are its S positions, each as a separate unit. The kernels then lack the
    factor 1/S, by which their results are multiplied here. `explanation` explains one row.
    """

    def __init__(self, source: BuildSource, predictor: Predictor, *, by_position: bool) -> None:
        assert isinstance(source.model, ReferenceModel)
        self.artifact, self.model, self.rows = source.artifact, source.model, source.rows
        self.settings, self.predictor, self.by_position = source.settings.features, predictor, by_position
        self.units = self.artifact.units.take(pa.array(predictor.units.columns_E))
        self.unit_tokens: list[UnitTokens] = []
        kernels = load_kernels(self.artifact, self.model, self.settings)
        used_kernels = [kernel for kernel in kernels if kernel.name in kernel_weights(self.predictor.protocol)]
        self.settings = self.settings.model_copy(update={"kernels": tuple(kernel.name for kernel in used_kernels)})
        self.model_pass = ModelPass.choose(self.model, self.settings)
        self.n_columns, self.n_positions, self.kernels = len(self.units), 1, used_kernels
        if not by_position and self._prepare_from_artifact():
            return
        self.unit_tokens = [source.unit_tokens[e] for e in predictor.units.columns_E]
        if by_position and self.unit_tokens[0].others:
            raise ProtocolError(
                f"unit: {self.units['unit_id'][0].as_py()!r} has {1 + len(self.unit_tokens[0].others)} answers, and "
                "a single answer is explained word by word; explain its target without --unit"
            )
        units = self.model_pass.units(self.unit_tokens, self.units["unit_id"].to_pylist())
        if by_position:
            (tokens,) = self.unit_tokens
            _, loss_mask_1L = pad_rows([tokens.input_ids], [tokens.first])
            used_1L = position_mask(self.settings.unit_positions, loss_mask_1L)
            self.answer_S = used_1L[0].nonzero()[:, 0].numpy() + 1  # position t predicts token t + 1
            self.n_columns = self.n_positions = len(self.answer_S)
            units = self._single_positions(units, self._unit_gradients(tokens))
        for kernel in used_kernels:
            kernel.prepare(units)

    def _prepare_from_artifact(self) -> bool:
        """Prepare the kernels with the stored features of the target's units, and return whether they exist.

        Of gradients only the mean over the units is stored, which is used as a single unit if all units have the same
        weight.
        """
        has_gradient = any(isinstance(kernel, Gradient) for kernel in self.kernels)
        if has_gradient and self.predictor.protocol.task == "estimate":
            return False  # every unit is scaled by its own standard deviation, so the mean gradient is of no use
        prefix = f"{UNITS}{self.predictor.units.targets[0]}."
        arrays = {
            name.removeprefix(prefix): array for name, array in self.artifact.moments.items() if name.startswith(prefix)
        }
        if len(arrays.get("0.rows", ())) != len(self.units):
            return False
        batch = {name: array for name, array in arrays.items() if name.startswith("0.")}
        ((_, units),) = read_batches(batch, self.model_pass, self.model.vocab_size)
        for kernel in self.kernels:
            if isinstance(kernel, Gradient):
                assert self.model_pass.sampled is not None
                kernel.prepare_mean(self.model_pass.sampled, arrays)
            else:
                kernel.prepare(units)
        return True

    def _unit_gradients(self, tokens: UnitTokens) -> UnitGradients | None:
        """Return what computes the gradient of the loss at each position of the unit; None if no kernel needs it."""
        sampled = self.model_pass.sampled
        if sampled is None:
            return None
        token_L = np.arange(len(tokens.input_ids))
        examples = [Example(tokens.input_ids, loss_mask=token_L == t) for t in self.answer_S]
        index_S = np.arange(len(examples))
        return partial(unit_gradients, sampled, examples, index_S, np.ones(len(examples)), len(examples))

    def _single_positions(self, batch: Batch, gradients: UnitGradients | None = None) -> Batch:
        """Return the positions of a row, or unit, as separate rows.

        For kernels of summaries, each position has the hidden summary of the whole row, and its share of the residual.
        """
        n_positions = len(batch.row_P)
        index_P = torch.arange(n_positions, device=batch.row_P.device)
        positions = replace(
            batch.at_positions(index_P, index_P, n_positions), unit_gradients=gradients, loss_B=batch.residual.loss_P
        )
        hidden_PH = np.repeat(batch.summary.hidden_NH, n_positions, axis=0)
        residual_PV = csr_array(positions.summary.residual_NV / n_positions)
        # `summary` is a cached property of the frozen batch, which averages its positions: replace its value.
        vars(positions)["summary"] = PooledFeatures(hidden_PH, residual_PV)
        return positions

    def _token_contributions(
        self, batch: Batch, token_P: I64, examples: Sequence[Example]
    ) -> Iterator[tuple[str, I64, F64]]:
        """Yield contributions of tokens to the relevance of a row: kernel, token indices (n,), contributions (n, C)."""
        for kernel in self.kernels:
            if isinstance(kernel, Gradient):
                assert kernel.sampled is not None
                # The gradient of a preference pair is that of the chosen side minus that of the rejected side.
                contribution_LC = np.concatenate(
                    [
                        sign * side.labels * kernel.sampled.by_position(side, kernel.unit_EK)
                        for sign, side in zip((1, -1), examples, strict=False)
                    ]
                )
                # position t predicts token t + 1, to which its contribution is assigned
                yield kernel.name, np.arange(1, len(contribution_LC)), contribution_LC[:-1] / self.n_positions
        for kernel in self.kernels:
            if not kernel.is_linear:
                shares_PC = kernel.score(self._single_positions(batch))
                yield kernel.name, token_P, shares_PC.double().cpu().numpy()
        n_positions = len(token_P)
        for start in range(0, n_positions, BATCH_ROWS):
            index_P = torch.arange(start, min(start + BATCH_ROWS, n_positions), device=batch.row_P.device)
            positions = batch.at_positions(index_P, index_P - start, len(index_P))
            for kernel in self.kernels:
                if kernel.is_linear and not isinstance(kernel, Gradient):
                    relevance_PC = kernel.score(positions).double().cpu().numpy()
                    contribution_PC = relevance_PC / (n_positions * self.n_positions)
                    yield kernel.name, token_P[start : start + BATCH_ROWS], contribution_PC

    def explanation(self, index: int, row: str) -> Explanation:
        """Explain a row.

        Args:
            index: position of the row.
            row: its row_id.
        """
        shard = self.rows.rows(np.array([index]))
        terms = EffectTerms.from_artifact(self.artifact, self.predictor, index)
        sums = self._row_contributions(shard, terms)
        stored = {name: float(terms.weights[name] @ terms.stored[name]) for name in sums.by_kernel_L}
        recomputed = {name: float(contribution_L.sum()) for name, contribution_L in sums.by_kernel_L.items()}
        total = sum(recomputed.values())
        gap = total + sums.replay + terms.text + terms.average - terms.effect

        table, notes = self._token_table(shard, sums), []
        subject = target = self.predictor.units.targets[0]
        unit, questions, answer, pairs = None, None, None, None
        if self.by_position:
            unit = self.units["unit_id"][0].as_py()
            subject = f"{unit} of {target}"
            (tokens,) = self.unit_tokens
            received_L = np.full(len(tokens.input_ids), np.nan)
            received_L[self.answer_S] = sums.by_column_C
            pair_LL = np.zeros((len(sums.pair_LC), len(received_L)), dtype=np.float32)
            pair_LL[:, self.answer_S] = sums.pair_LC
            answer = pa.table(
                {
                    "position": np.arange(len(received_L)),
                    "text": self.model.tokenizer.token_texts(tokens.input_ids.tolist()),
                    "received": pa.array(received_L, from_pandas=True),
                }
            )
            pairs = _strongest_pairs(pair_LL[:, tokens.first :], table, answer, tokens.first)
            notes.append(UNIT_SCALE_NOTE)
        else:
            questions = self.units.select(["unit_id", "prompt", "completion"])
            questions = questions.append_column("contribution", pa.array(sums.by_column_C))
            questions = questions.take(pa.array(np.argsort(-sums.by_column_C, kind="stable")))
            positive_E = np.maximum(questions["contribution"].to_numpy(), 0.0)
            if len(questions) > 2 and positive_E[0] > positive_E.sum() / 2:
                name, share = questions["unit_id"][0].as_py(), positive_E[0] / positive_E.sum()
                notes += [f"{name} alone has {share:.0%} of the positive contributions; the effect depends on it"]
        words, contributions, _ = by_word(table["text"].to_pylist(), table["contribution"].to_numpy())
        notes += dominant_word_notes(words, contributions)
        if REPLAY in terms.weights:
            recomputed[REPLAY] = stored[REPLAY] = sums.replay
        return Explanation(
            table,
            f"row {row}: effect {terms.effect:+z.3f} on {subject}. Its words contribute {total:+z.3f}; "
            + (f"the prediction from its text and labels contributes {terms.text:+z.3f}; " if terms.text else "")
            + (f"the replayed training contributes {sums.replay:+z.3f}; " if REPLAY in terms.weights else "")
            + f"the average row's {-terms.average:+z.3f} is subtracted",
            (*notes, *_result_notes(terms, recomputed, gap), self.predictor.protocol_text),
            row_id=row,
            target=target,
            unit_id=unit,
            effect=terms.effect,
            text=terms.text,
            average=terms.average,
            gap=gap,
            replay=sums.replay,
            kernels=pa.table(
                {"kernel": list(recomputed), "contribution": list(recomputed.values()), "stored": list(stored.values())}
            ),
            answer=answer,
            pairs=pairs,
            questions=questions,
            prompt=self.units["prompt"][0].as_py() if self.by_position else "",
        )

    def _row_contributions(self, shard: TokenRows, terms: EffectTerms) -> "_RowContributions":
        """Run the model on a row, given as a shard of one row, and sum the contributions of its tokens."""
        ((_, batch),) = self.model_pass.batches(shard)
        _, loss_mask_BL = pad_rows([shard.ids(0)], [shard.mask(0)])
        # position t predicts token t + 1
        token_P = position_mask(self.settings.positions, loss_mask_BL)[0].nonzero()[:, 0].numpy() + 1
        examples = row_examples(shard if shard.split_N is None else shard.sides(), self.settings)

        by_kernel_L = {name: np.zeros(shard.n_tokens) for name in terms.weights if name != REPLAY}
        by_column_C = np.zeros(self.n_columns)
        pair_LC = np.zeros((shard.n_tokens if self.by_position else 0, self.n_columns), dtype=np.float32)
        kernels_by_mean: set[str] = set()  # kernels that return one column, the mean over all units
        for name, tokens, relevance_PC in self._token_contributions(batch, token_P, examples):
            if name not in by_kernel_L:
                continue
            if relevance_PC.shape[1] < self.n_columns:
                by_kernel_L[name][tokens] += (relevance_PC * terms.weights[name].sum())[:, 0]
                kernels_by_mean.add(name)
                continue
            contribution_PC = relevance_PC * terms.weights[name]
            by_kernel_L[name][tokens] += contribution_PC.sum(axis=1)
            by_column_C += contribution_PC.sum(axis=0)
            if self.by_position:
                pair_LC[tokens] += contribution_PC.astype(np.float32)
        # of kernels that return the mean over units, the contribution of each unit comes from the artifact
        by_column_C += sum(
            (terms.weights[name] * terms.stored[name] for name in kernels_by_mean), np.zeros(self.n_columns)
        )
        replay_E = terms.weights.get(REPLAY, np.zeros(1)) * terms.stored.get(REPLAY, np.zeros(1))
        return _RowContributions(by_kernel_L, by_column_C + replay_E, pair_LC, token_P, float(replay_E.sum()))

    def _token_table(self, shard: TokenRows, sums: "_RowContributions") -> pa.Table:
        """Return one row per token; tokens without loss and without contribution have no number."""
        has_number_L = np.any([contribution_L != 0 for contribution_L in sums.by_kernel_L.values()], axis=0)
        has_number_L[sums.token_P] = True
        columns = {"contribution": np.sum(list(sums.by_kernel_L.values()), axis=0), **sums.by_kernel_L}
        texts = self.model.tokenizer.token_texts(shard.ids(0).tolist())
        return pa.table(
            {"position": np.arange(shard.n_tokens), "text": texts}
            | {name: pa.array(contribution_L, mask=~has_number_L) for name, contribution_L in columns.items()}
        )


@dataclass(frozen=True, slots=True)
class _RowContributions:
    """Contributions to the effect of one row, in units of the effect."""

    by_kernel_L: dict[str, F64]
    by_column_C: F64
    pair_LC: NDArray[np.float32]
    token_P: I64
    replay: float


def _result_notes(terms: EffectTerms, recomputed: Mapping[str, float], gap: float) -> Iterator[str]:
    """Yield notes on the terms of the effect, and on the agreement of recomputed and stored numbers."""
    if terms.text:
        yield TEXT_NOTE
    if len(recomputed) > 1:
        yield "by kernel: " + ", ".join(f"{name} {value:+z.3f}" for name, value in recomputed.items())
    for name in recomputed:
        if name != REPLAY and not kernel_class(name).is_linear:
            yield f"{name}: {SUMMARY_NOTE}"
    if abs(gap) > EFFECT_TOLERANCE * max(1.0, abs(terms.effect)):
        yield (
            f"the parts in the first line add up to {gap:+.2g} more than the stored effect: another device or "
            "dtype than the build's, or a target that was added with another max_length"
        )
    else:
        yield f"the parts in the first line add up to the stored effect, within {abs(gap):.1g}"


def _strongest_pairs(pair_LC: NDArray[np.float32], row: pa.Table, answer: pa.Table, first: int) -> pa.Table:
    """Return the pairs of words with the largest contributions; `first` is the first token of the answer."""
    row_words, row_starts = join_words(row["text"].to_pylist())
    answer_words, answer_starts = join_words(answer["text"].to_pylist()[first:])
    # sums over the tokens of both words
    pair_WW = np.add.reduceat(np.add.reduceat(pair_LC, row_starts, axis=0, dtype=np.float64), answer_starts, axis=1)
    i, j = np.unravel_index(np.argsort(-np.abs(pair_WW), axis=None)[:MAX_PAIRS], pair_WW.shape)
    return pa.table(
        {
            "row_position": row_starts[i],
            "row_text": [row_words[k] for k in i],
            "answer_position": answer_starts[j] + first,
            "answer_text": [answer_words[k] for k in j],
            "contribution": pair_WW[i, j],
        }
    )
