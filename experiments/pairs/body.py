"""Do kernels of the body's own matrices help in a deep model? `down_proj` of SmolLM2, without a backward pass.

    python -m experiments.pairs.body --out experiments/pairs/body.json

With the residual stream taken as the identity, the gradient of a matrix that writes into it is delta_t (x) its input:
delta_t = W^T xi_t is the same for every layer, the input a_lt of `down_proj` is the layer's own. So its kernel is

    a_ie^l = mean_t mean_s <delta_t, delta_s> <a_lt, a_ls>

for all 30 layers, over the rows and units of `documents` (experiments/finetune), against its runs. `whitened`: delta
is. `all layers`: each divided by its standard deviation, then added; thirds are counted from the input.
Shape letters: N rows, E units, P positions of rows, S positions of units, I inner width.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as hf_logging

from experiments.finetune.evaluate import Method, compare
from experiments.finetune.features import Features
from experiments.finetune.run import FOLDER
from experiments.finetune.scores import TAU, Sides, shift_kernel
from experiments.finetune.setting import LENGTH, open_corpus, target_settings
from experiments.finetune.training import load_model, padded
from experiments.mistakes import in_one_line
from grasp.arrays import F64
from grasp.files import write_atomically
from grasp.models.tokenizer import HfTokenizer
from grasp.retraining.plan import row_names
from grasp.runs.retrained import RetrainedRuns
from grasp.targets import load_units

Sequences = Sequence[tuple[NDArray[np.int32], int]]  # token ids, and the first that carries loss
AT_ONCE = 8  # sequences of one forward pass
SHIFT = "shift (what ships)"


@torch.inference_mode()
def inputs_of(model: LlamaForCausalLM, ids: Sequence[NDArray[np.int32]], firsts: Sequence[int]) -> list[Tensor]:
    """What enters `down_proj` of every layer at the positions with loss, one after the other, (P, I) each, bfloat16."""
    caught: list[Tensor] = []
    hooks = [
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].detach()))
        for layer in model.model.layers
    ]
    ids_BL, labels_BL = padded(ids, firsts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.model(input_ids=ids_BL, use_cache=False)
    for hook in hooks:
        hook.remove()
    at_loss_BL = labels_BL[:, 1:] >= 0
    return [each[:, :-1][at_loss_BL].bfloat16() for each in caught]


def kernels(model: LlamaForCausalLM, sides: Sides, rows: Sequences, units: Sequences) -> dict[str, F64]:
    """A matrix (layers, N, E) for delta as it is, and for delta whitened."""
    parts = [inputs_of(model, *zip(*units[k : k + AT_ONCE], strict=True)) for k in range(0, len(units), AT_ONCE)]
    unit_input = [torch.cat(layer).float() for layer in zip(*parts, strict=True)]
    map_HH = sides.delta_map(TAU).astype(np.float32)
    unit_delta = {"plain": sides.units.delta_PH, "whitened": sides.units.delta_PH @ map_HH @ map_HH}
    member_SE = torch.zeros(len(sides.units.owner_P), sides.units.n)
    member_SE[torch.arange(len(member_SE)), torch.from_numpy(sides.units.owner_P)] = 1.0
    member_SE /= member_SE.sum(dim=0)
    out = {name: np.zeros((len(unit_input), sides.rows.n, sides.units.n)) for name in unit_delta}
    for first in range(0, len(rows), AT_ONCE):
        positions = np.flatnonzero((sides.rows.owner_P >= first) & (sides.rows.owner_P < first + AT_ONCE))
        owner_P = sides.rows.owner_P[positions] - first
        delta_PH = torch.from_numpy(sides.rows.delta_PH[positions])
        agree = {name: delta_PH @ torch.from_numpy(each).T for name, each in unit_delta.items()}
        inputs = inputs_of(model, *zip(*rows[first : first + AT_ONCE], strict=True))
        assert len(inputs[0]) == len(positions)
        count_N = np.bincount(owner_P)
        for layer, (row_PI, unit_SI) in enumerate(zip(inputs, unit_input, strict=True)):
            near_PS = row_PI.float() @ unit_SI.T
            for name, agree_PS in agree.items():
                sum_NE = torch.zeros(len(count_N), sides.units.n)
                sum_NE.index_add_(0, torch.from_numpy(owner_P), (near_PS * agree_PS) @ member_SE)
                out[name][layer, first : first + len(count_N)] = sum_NE.numpy() / count_N[:, None]
        print(f"{first + len(count_N)} of {len(rows)} rows", flush=True)
    return out


def methods(kernel_by_layer: dict[str, F64], shift_NE: F64) -> dict[str, Method]:
    """The built-in rule, every sum of layers by itself, and its sum with the built-in rule at half the weight."""
    n_layers = len(next(iter(kernel_by_layer.values())))
    third = n_layers // 3
    spans = {
        "all layers": range(n_layers),
        "first third": range(third),
        "middle third": range(third, 2 * third),
        "last third": range(2 * third, n_layers),
        "last layer": range(n_layers - 1, n_layers),
    }
    out = {SHIFT: Method((shift_NE,), negative=0.25)}
    for name, kernel in kernel_by_layer.items():
        for span, layers in spans.items():
            sum_NE = np.sum([kernel[layer] / kernel[layer].std(axis=0) for layer in layers], axis=0)
            out[f"down_proj {name}, {span}"] = Method((sum_NE,), negative=0.25)
            out[f"shift + .5 down_proj {name}, {span}"] = Method((shift_NE, sum_NE), negative=0.25, weights=(1.0, 0.5))
    return out


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Run the model once more over rows and units, and compare."""
    parser = argparse.ArgumentParser(prog="python -m experiments.pairs.body", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    parser.add_argument(
        "--work",
        type=Path,
        default=FOLDER / "work",
        help="Where experiments.finetune.compare left model, rows, features.",
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    model = load_model(args.work / "model")
    reader = HfTokenizer(AutoTokenizer.from_pretrained(args.work / "model"), vocab_size=model.config.vocab_size)
    corpus = open_corpus("documents", args.work, reader)
    tokens = load_units(target_settings("documents", args.work)).tokenize(reader, LENGTH)
    rows = list(zip(corpus.rows, corpus.first_N.tolist(), strict=True))
    features = [Features.load(args.work / f"documents-{side}.npz") for side in ("rows", "units")]
    sides = Sides(*features, model.config.vocab_size)
    kernel_by_layer = kernels(model, sides, rows, [(token.input_ids, token.first) for token in tokens])
    environment = RetrainedRuns.open(FOLDER / "documents")
    utilities = environment.utilities(seeds=(0,), partial=True)
    blocks = list(environment.subset_blocks(row_names(corpus.store)))
    names = [name for block in blocks for name in block.subset_ids]
    weight_BN = np.concatenate([block.weights_BN.toarray() for block in blocks])
    weight_BN = weight_BN[[names.index(name) for name in utilities.subset_ids]]
    share_BN = weight_BN / weight_BN.sum(axis=1, keepdims=True)
    table = compare(methods(kernel_by_layer, shift_kernel(sides)), utilities, share_BN, base=SHIFT)
    result = {"subsets": len(utilities.subset_ids), "units": sides.units.n, "methods": table}
    write_atomically(args.out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
