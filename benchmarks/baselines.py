"""Seconds a row of every gradient method at one checkpoint, beside a plain forward and a forward and backward pass.

    python benchmarks/baselines.py                              # about a minute on one core
    python benchmarks/baselines.py --hidden 192 --layers 6 --vocab 6144 --rows 64
    python benchmarks/baselines.py --peers --rows 64            # and traker and dattri, pip install -e '.[peers]'

The model is a Llama of the `tiny` recipe's size with random weights, rows are Zipf tokens, all of one length, in
batches of 8,192 tokens; everything runs on one thread and is timed in CPU seconds. "prepare" is what comes before the
first row: gradients of the units, Fisher rows. "backward" is the usual one: gradients of all weights, summed over the
batch, which is what training costs. The methods compute gradients of activations and reduce them row by row.
The peers project the gradients of the same parameters of the same rows to the same width: traker's `featurize` with its
projector for CPUs, dattri's TracIn for four units, whose gradients it forms again for every batch of rows.
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grasp.baselines.datainf import precondition
from grasp.baselines.gradients.curvature import (
    Basis,
    Fisher,
    apply_ekfac,
    apply_kfac,
    corrected_eigenvalues,
    second_moments,
)
from grasp.baselines.gradients.features import Featurizer
from grasp.baselines.gradients.layers import choose_layers
from grasp.baselines.gradients.method_settings import PAPER_LAYERS
from grasp.baselines.gradients.whole import UnitGradients, inner_products
from grasp.baselines.less import adam_update
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Example, PerExample

UNIT_TOKENS, UNIT_LABELS = 50, 5
FISHER_ROWS = 64

Rows = Sequence[Example]
Score = Callable[[Rows], object]


class NoTokenizer:
    """Rows are token ids already."""


@dataclass(frozen=True)
class World:
    """What every method is timed on."""

    model: ReferenceModel
    rows: list[Example]
    units: list[Example]

    def engine(self, *layers: str) -> PerExample:
        return PerExample(self.model, choose_layers(self.model, layers))


def make_world(options: argparse.Namespace) -> World:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=2,
        max_position_embeddings=options.length,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = ReferenceModel(LlamaForCausalLM(config), NoTokenizer(), batch_tokens=8192)
    generator = np.random.default_rng(0)

    def zipf(length: int) -> np.ndarray:
        return (np.minimum(generator.zipf(1.2, size=length), options.vocab) - 1).astype(np.int32)

    rows = [Example(zipf(options.length)) for _ in range(options.rows)]
    unit_tokens = min(UNIT_TOKENS, options.length)
    units = [Example(zipf(unit_tokens), unit_tokens - UNIT_LABELS) for _ in range(options.units)]
    return World(model, rows, units)


def forward(world: World) -> Score:
    def score(rows: Rows) -> None:
        with torch.inference_mode():
            for ids in batches(world, rows):
                world.model.model(input_ids=ids, labels=ids, use_cache=False)

    return score


def backward(world: World) -> Score:
    def score(rows: Rows) -> None:
        world.model.model.requires_grad_(True)
        for ids in batches(world, rows):
            world.model.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            world.model.model.zero_grad()
        world.model.model.requires_grad_(False)

    return score


def batches(world: World, rows: Rows) -> list[torch.Tensor]:
    size = max(1, world.model.batch_tokens // len(rows[0].input_ids))
    ids = torch.from_numpy(np.stack([row.input_ids for row in rows]).astype(np.int64))
    return list(torch.split(ids, size))


def projected(world: World, width: int, *layers: str, adam: bool = False) -> Score:
    engine = world.engine(*layers)
    featurizer = Featurizer.with_projection(engine, width, seed=0, tokens=len(world.rows[0].input_ids))
    featurizer.features(world.units)
    if adam:
        moments = [torch.rand(block.left, block.right) for block in engine.layers.blocks]
        featurizer = replace(featurizer, transform=adam_update(moments, moments, (0.9, 0.99)))
    return featurizer.features


def exact(world: World, *layers: str, curvature: str = "none") -> Score:
    engine = world.engine(*layers)
    units = UnitGradients.collect(engine, world.units)
    fisher = Fisher(world.rows[:FISHER_ROWS], None)
    if curvature == "datainf":
        precondition(units, list(fisher.rows), 0.1)
    elif curvature != "none":
        factors = second_moments(engine, fisher, 2048)
        if curvature == "kfac":
            apply_kfac(units, factors, 0.1)
        else:
            bases = [Basis.from_factors(factor) for factor in factors]
            apply_ekfac(units, bases, corrected_eigenvalues(engine, fisher, bases), 0.1)
    norms = curvature == "none"
    return lambda rows: inner_products(units, rows, norms=norms)


CASES: dict[str, Callable[[World], Score]] = {
    "forward": forward,
    "forward and backward": backward,
    "tracin, trak, less: 128, last block + norm": lambda world: projected(world, 128, *PAPER_LAYERS),
    "tracin, trak, less: 128, body": lambda world: projected(world, 128, "body"),
    "tracin, trak, less: 128, all": lambda world: projected(world, 128, "all"),
    "trak: 512, all": lambda world: projected(world, 512, "all"),
    "less with Adam: 128, all": lambda world: projected(world, 128, "all", adam=True),
    "tracin exact: last block + norm": lambda world: exact(world, *PAPER_LAYERS),
    "tracin exact: head": lambda world: exact(world, "head"),
    "tracin exact: embedding": lambda world: exact(world, "embedding"),
    "tracin exact: all": lambda world: exact(world, "all"),
    "datainf exact: last block + norm": lambda world: exact(world, *PAPER_LAYERS, curvature="datainf"),
    "influence kfac: head": lambda world: exact(world, "head", curvature="kfac"),
    "influence ekfac: body": lambda world: exact(world, "body", curvature="ekfac"),
}


# ------------------------------------------------------------------------------------------- peers


def covered_names(world: World, *layers: str) -> list[str]:
    return [name for block in choose_layers(world.model, layers).blocks for name in block.parameters]


def ids_of(rows: Rows) -> torch.Tensor:
    return torch.from_numpy(np.stack([row.input_ids for row in rows]).astype(np.int64))


def log_p(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]


def traker(world: World, width: int, *layers: str) -> Score:
    from trak import TRAKer  # noqa: PLC0415
    from trak.modelout_functions import AbstractModelOutput  # noqa: PLC0415

    class MeanMargin(AbstractModelOutput):
        """The mean log odds of the labels, and 1 - p."""

        def __init__(self) -> None:
            super().__init__()

        @staticmethod
        def get_output(net, weights, buffers, ids):
            logits = torch.func.functional_call(net, (weights, buffers), (ids[None],)).logits
            own_log_probs = log_p(logits, ids[None])
            return (own_log_probs - torch.log1p(-own_log_probs.exp())).mean()

        @staticmethod
        def get_out_to_loss_grad(net, weights, buffers, batch):
            logits = torch.func.functional_call(net, (weights, buffers), (batch[0],)).logits
            return (1 - log_p(logits, batch[0]).exp().mean(1)).clone().detach().unsqueeze(-1)

    def score(rows: Rows) -> None:
        net = world.model.model.requires_grad_(True)
        with tempfile.TemporaryDirectory() as place:
            traker = TRAKer(
                model=net,
                task=MeanMargin(),
                train_set_size=len(rows),
                save_dir=place,
                device="cpu",
                proj_dim=width,
                use_half_precision=False,
                grad_wrt=covered_names(world, *layers),
                logging_level=logging.ERROR,
            )
            traker.load_checkpoint(net.state_dict(), model_id=0)
            for ids in torch.split(ids_of(rows), PEER_BATCH):
                traker.featurize(batch=[ids], num_samples=len(ids))
        net.requires_grad_(False)

    return score


def dattri(world: World, width: int, *layers: str) -> Score:
    from dattri.algorithm.tracin import TracInAttributor  # noqa: PLC0415
    from dattri.task import AttributionTask  # noqa: PLC0415
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415

    def loss(parameters, data):
        ids = data[0].view(-1, len(world.rows[0].input_ids))
        return -log_p(torch.func.functional_call(world.model.model, parameters, (ids,)).logits, ids).mean()

    def score(rows: Rows) -> None:
        net = world.model.model.requires_grad_(True)
        task = AttributionTask(loss_func=loss, model=net, checkpoints=net.state_dict())
        how = {"proj_dim": width, "device": "cpu", "proj_max_batch_size": 32}
        attributor = TracInAttributor(task, torch.ones(1), True, how, covered_names(world, *layers))
        sets = (ids_of(rows), ids_of(rows[:4]))
        attributor.attribute(*(DataLoader(TensorDataset(ids), batch_size=PEER_BATCH) for ids in sets))
        net.requires_grad_(False)

    return score


PEER_BATCH = 32
PEERS: dict[str, Callable[[World], Score]] = {
    "traker: 128, last block + norm": lambda world: traker(world, 128, *PAPER_LAYERS),
    "traker: 128, all": lambda world: traker(world, 128, "all"),
    "dattri tracin: 128, last block + norm": lambda world: dattri(world, 128, *PAPER_LAYERS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("rows", 256),
        ("length", 128),
        ("units", 640),
        ("vocab", 1536),
        ("hidden", 64),
        ("layers", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--peers", action="store_true", help="time traker and dattri as well")
    parser.add_argument("--only", default="", help="cases that have this in their names, beside forward and backward")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = make_world(options)
    size = sum(parameter.numel() for parameter in world.model.model.parameters())
    print(f"{size:,} parameters, {options.rows} rows of {options.length} tokens, {options.units} units, one thread")
    print(f"{'':46s} {'prepare s':>10s} {'ms a row':>9s} {'of forward and backward':>24s}")
    base = 0.0
    cases = CASES | (PEERS if options.peers else {})
    for name, make in cases.items():
        if not (name.startswith("forward") or options.only in name):
            continue
        begun = time.process_time()
        score = make(world)
        prepared = time.process_time()
        score(world.rows[: max(1, len(world.rows) // 4)])  # warm
        warmed = time.process_time()
        score(world.rows)
        spent = time.process_time() - warmed
        base = spent if name == "forward and backward" else base
        share = f"{spent / base:.2f}" if base else "-"
        print(f"{name:46s} {prepared - begun:10.2f} {1000 * spent / len(world.rows):9.2f} {share:>24s}", flush=True)


if __name__ == "__main__":
    main()
