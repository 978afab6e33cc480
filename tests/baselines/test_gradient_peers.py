"""Beside other people's code, where it is installed: traker, dattri and kronfluence give the same scores."""

import logging

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from grasp.baselines.datainf import precondition
from grasp.baselines.gradients.curvature import (
    Basis,
    Fisher,
    apply_ekfac,
    corrected_eigenvalues,
    second_moments,
)
from grasp.baselines.gradients.features import Featurizer
from grasp.baselines.gradients.layers import choose_layers
from grasp.baselines.gradients.whole import UnitGradients, inner_products, run_whole
from grasp.baselines.trak import newton_map
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Example, PerExample
from tests.baselines.gradient_world import NoTokenizer

# What they warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB, LENGTH = 50, 9
LAYERS = ("*layers.1*dense_4h_to_h", "final_norm")
NAMES = [
    "gpt_neox.layers.1.mlp.dense_4h_to_h.weight",
    "gpt_neox.layers.1.mlp.dense_4h_to_h.bias",
    "gpt_neox.final_layer_norm.weight",
    "gpt_neox.final_layer_norm.bias",
]


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    network = GPTNeoXForCausalLM(config)
    for parameter in network.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return ReferenceModel(network, NoTokenizer(), batch_tokens=300)


def tokens(n: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(1, VOCAB, size=(n, LENGTH)))


def examples(ids: torch.Tensor) -> list[Example]:
    return [Example(row.numpy().astype(np.int32)) for row in ids]


def log_p(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits[..., :-1, :], -1).gather(-1, ids[..., 1:, None])[..., 0]


def test_trak_equals_traker_up_to_its_scale(model, tmp_path):
    trak = pytest.importorskip("trak")
    from trak.modelout_functions import AbstractModelOutput  # noqa: PLC0415
    from trak.projectors import NoOpProjector  # noqa: PLC0415

    class MeanMargin(AbstractModelOutput):
        """The mean log odds of the labels, and 1 - p."""

        def __init__(self):
            super().__init__()

        @staticmethod
        def get_output(net, weights, buffers, ids):
            logits = torch.func.functional_call(net, (weights, buffers), (ids[None],)).logits[0]
            label_log_p = log_p(logits, ids)
            return (label_log_p - torch.log1p(-label_log_p.exp())).mean()

        @staticmethod
        def get_out_to_loss_grad(net, weights, buffers, batch):
            logits = torch.func.functional_call(net, (weights, buffers), (batch[0],)).logits
            return (1 - log_p(logits, batch[0]).exp().mean(1)).clone().detach().unsqueeze(-1)

    rows, units, level = tokens(150, 0), tokens(5, 1), 0.1
    engine = PerExample(model, choose_layers(model, LAYERS))
    width = engine.layers.size
    assert width == 120
    model.model.requires_grad_(True)
    traker = trak.TRAKer(
        model=model.model,
        task=MeanMargin(),
        train_set_size=len(rows),
        save_dir=str(tmp_path),
        device="cpu",
        projector=NoOpProjector(device="cpu"),
        proj_dim=width,
        use_half_precision=False,
        grad_wrt=NAMES,
        logging_level=logging.ERROR,
        lambda_reg=level,
    )
    traker.load_checkpoint(model.model.state_dict(), model_id=0)
    traker.featurize(batch=[rows], num_samples=len(rows))
    traker.finalize_features()
    traker.start_scoring_checkpoint("x", model.model.state_dict(), model_id=0, num_targets=len(units))
    traker.score(batch=[units], num_samples=len(units))
    theirs = np.array(traker.finalize_scores("x"))
    model.model.requires_grad_(False)

    featurizer = Featurizer(engine, None)
    (row_NK, doubt_N), (unit_EK, _) = (featurizer.features(examples(ids), "margin") for ids in (rows, units))
    wide = row_NK.astype(np.float64)
    ridge = level * width / np.trace(wide.T @ wide) * width  # theirs is of gradients divided by the root of their width
    scores = wide @ newton_map(wide.T @ wide, unit_EK.astype(np.float64), ridge, "x") * doubt_N[:, None]
    scale = (scores * theirs).sum() / (theirs**2).sum()
    assert scale > 0
    assert np.abs(scores - scale * theirs).max() < 1e-3 * np.abs(scores).max()


def dattri_loss(model):
    """Mean loss of one row as dattri calls it."""

    def loss(parameters, data):
        ids = data[0].view(-1, LENGTH)
        return -log_p(torch.func.functional_call(model.model, parameters, (ids,)).logits, ids).mean()

    return loss


@pytest.mark.parametrize("normalise", [True, False])
def test_tracin_without_projection_equals_dattri(model, normalise):
    pytest.importorskip("dattri")
    from dattri.algorithm.tracin import TracInAttributor  # noqa: PLC0415
    from dattri.task import AttributionTask  # noqa: PLC0415

    rows, units, weights = tokens(12, 0), tokens(4, 1), (0.7, 0.3)
    states = [{name: scale * value for name, value in model.model.state_dict().items()} for scale in (1.0, 1.1)]
    model.model.requires_grad_(True)
    task = AttributionTask(loss_func=dattri_loss(model), model=model.model, checkpoints=states)
    attributor = TracInAttributor(task, torch.tensor(weights), normalise, layer_name=NAMES)
    attributor.projector_kwargs = None  # given to the constructor, None means its default of 512
    loaders = [DataLoader(TensorDataset(ids), batch_size=4, shuffle=False) for ids in (rows, units)]
    theirs = attributor.attribute(*loaders).detach().numpy()

    ours = np.zeros_like(theirs)
    for state, weight in zip(states, weights, strict=True):
        copied = GPTNeoXForCausalLM(model.model.config).requires_grad_(False)
        copied.load_state_dict(state)
        reference = ReferenceModel(copied, NoTokenizer(), batch_tokens=300)
        engine = PerExample(reference, choose_layers(reference, LAYERS))
        gradients = UnitGradients.collect(engine, examples(units))
        product_NE, square_N = inner_products(gradients, examples(rows), norms=True)
        scale_NE = np.sqrt(np.outer(square_N, gradients.squared_norms())) if normalise else 1.0
        ours += weight * product_NE / scale_NE
    model.model.requires_grad_(False)
    np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=1e-4 * np.abs(theirs).max())


def test_datainf_equals_dattri(model):
    pytest.importorskip("dattri")
    from dattri.algorithm.influence_function import IFAttributorDataInf  # noqa: PLC0415
    from dattri.task import AttributionTask  # noqa: PLC0415

    rows, units, level = tokens(12, 0), tokens(4, 1), 0.05
    model.model.requires_grad_(True)
    task = AttributionTask(loss_func=dattri_loss(model), model=model.model, checkpoints=model.model.state_dict())
    attributor = IFAttributorDataInf(task=task, device="cpu", regularization=level, layer_name=NAMES[:1])
    loaders = [DataLoader(TensorDataset(ids), batch_size=4, shuffle=False) for ids in (rows, units)]
    attributor.cache(loaders[0])
    theirs = attributor.attribute(*loaders).detach().numpy()
    model.model.requires_grad_(False)

    engine = PerExample(model, choose_layers(model, NAMES[:1]))
    square_N = UnitGradients.collect(engine, examples(rows)).squared_norms()
    gradients = UnitGradients.collect(engine, examples(units))
    precondition(gradients, examples(rows), level * engine.layers.size / square_N.mean())
    ours, _ = inner_products(gradients, examples(rows))
    np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=1e-4 * np.abs(theirs).max())


def test_ekfac_influence_equals_kronfluence(model, tmp_path):
    pytest.importorskip("kronfluence")
    from kronfluence.analyzer import Analyzer, prepare_model  # noqa: PLC0415
    from kronfluence.arguments import FactorArguments, ScoreArguments  # noqa: PLC0415
    from kronfluence.task import Task  # noqa: PLC0415

    class MeanLoss(Task):
        """Of each row its mean loss; positions without a label are masked."""

        def compute_train_loss(self, batch, model, sample=False):
            assert not sample
            return -log_p(model(batch[0]).logits, batch[0]).mean(1).sum()

        def compute_measurement(self, batch, model):
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self):
            return ["gpt_neox.layers.1.mlp.dense_4h_to_h"]

        def get_attention_mask(self, batch):
            mask = torch.ones_like(batch[0])
            mask[:, -1] = 0
            return mask

    rows, units = tokens(40, 0), tokens(4, 1)
    copied = GPTNeoXForCausalLM(model.model.config)
    copied.load_state_dict(model.model.state_dict())
    tracked = prepare_model(copied, MeanLoss())
    analyzer = Analyzer("x", tracked, MeanLoss(), cpu=True, output_dir=str(tmp_path), disable_tqdm=True)
    how = FactorArguments(strategy="ekfac", use_empirical_fisher=True)
    batches = {"per_device_batch_size": 8}
    analyzer.fit_all_factors("f", TensorDataset(rows), factor_args=how, **batches)
    analyzer.compute_pairwise_scores(
        "s",
        "f",
        query_dataset=TensorDataset(units),
        train_dataset=TensorDataset(rows),
        score_args=ScoreArguments(damping_factor=None),
        per_device_query_batch_size=4,
        per_device_train_batch_size=8,
    )
    theirs = analyzer.load_pairwise_scores("s")["all_modules"].numpy().T

    engine = PerExample(model, choose_layers(model, ["*layers.1*dense_4h_to_h"]))
    fisher = Fisher(examples(rows), None)
    bases = [Basis.from_factors(factors_of_block) for factors_of_block in second_moments(engine, fisher, full_width=64)]
    gradients = UnitGradients.collect(engine, examples(units))
    apply_ekfac(gradients, bases, corrected_eigenvalues(engine, fisher, bases), 0.1)
    ours, _ = inner_products(gradients, examples(rows))
    # our eigenvalues are of one label's loss, theirs of the row's mean over its labels
    np.testing.assert_allclose(ours * (LENGTH - 1), theirs, rtol=5e-3, atol=2e-3 * np.abs(theirs).max())


@pytest.mark.parametrize("output", ["loss", "margin"])
def test_gradients_of_every_row_equal_bergsons(model, output, tmp_path):
    """bergson covers the weights of the linear modules of the body, which all of its methods, TRAK too, start from."""
    pytest.importorskip("bergson")
    from bergson import GradientProcessor, IndexConfig, collect_gradients, load_module_gradients  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415

    rows = tokens(6, 0)
    config = IndexConfig(
        run_path=str(tmp_path / "run"),
        projection_dim=0,
        loss_fn={"loss": "ce", "margin": "log_odds"}[output],
        loss_reduction="mean",
    )
    data = Dataset.from_dict({"input_ids": rows.tolist(), "length": [LENGTH] * len(rows)})
    copied = GPTNeoXForCausalLM(model.model.config).eval()
    copied.load_state_dict(model.model.state_dict())
    collect_gradients(copied, data, GradientProcessor(projection_dim=None), config, batches=[[0, 1, 2, 3], [4, 5]])
    theirs = load_module_gradients(config.partial_run_path)

    engine = PerExample(model, choose_layers(model, ["*.attention.*", "*.mlp.*"]))
    matrices = [torch.zeros(len(rows), b.left, b.right) for b in engine.layers.blocks]
    run_whole(engine, examples(rows), lambda number, matrix, part: matrices[number][part].copy_(matrix), output)
    assert len(engine.layers.blocks) == len(list(theirs)) == 8
    for block, matrix in zip(engine.layers.blocks, matrices, strict=True):
        ours = matrix[:, :, :-1] if block.bias else matrix
        expected = np.asarray(theirs[block.parameters[0].removeprefix("gpt_neox.").removesuffix(".weight")])
        np.testing.assert_allclose(ours.flatten(1), expected, rtol=2e-3, atol=2e-5 * np.abs(expected).max())
