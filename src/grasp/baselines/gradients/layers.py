"""Selection of the parameters that a gradient method covers, by patterns over their names.

Start with `choose_layers`.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from grasp.errors import SettingsError
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Block, LayerSet, layers_of

LAYER_NAMES = "all, head, embedding, body, blocks, block:N (block:-1 is the last) and final_norm"
BLOCK = re.compile(r"block:(-?\d+)")
MAX_EXAMPLES = 6


def choose_layers(model: ReferenceModel, patterns: Sequence[str]) -> LayerSet:
    """Return the blocks of all parameters that match the patterns.

    Args:
        patterns: keywords (all, head, embedding, body, blocks, block:N, final_norm), wildcards over the names of
            parameters or modules (`model.layers.2`, `*.mlp.*`), or `re:` and a regular expression; a leading `!`
            excludes matches.
    Raises:
        SettingsError: a pattern matches nothing, or nothing is left; the message lists names.
        ModelError: a selected parameter has no per-example gradient.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        matched = _matched_names(model, pattern.removeprefix("!"))
        chosen = chosen - matched if pattern.startswith("!") else chosen | matched
    if not chosen:
        raise SettingsError(
            f"layers: {list(patterns)} selects no parameters; expected {LAYER_NAMES}, or a pattern over names"
        )
    return layers_of(model, chosen)


def describe_layers(layers: LayerSet) -> str:
    """Return a one-line summary: number of parameters, and blocks."""
    names = [block.name for block in layers.blocks]
    shown = ", ".join(names if len(names) <= MAX_EXAMPLES else [*names[:3], "...", *names[-3:]])
    return f"{layers.size:,} of {layers.total:,} parameters in {len(names)} blocks ({shown})"


def as_matrix(block: Block, parameters: Mapping[str, Tensor]) -> Tensor:
    """Arrange tensors with the shapes of a block's parameters, by canonical name, as the block's (X, Y) matrix."""
    tensors = [parameters[name] for name in block.parameters]
    if "vector" in block.kinds:
        return torch.cat([tensor.flatten() for tensor in tensors])[None]
    weights = [tensor.T if block.transposed else tensor for tensor in tensors if tensor.ndim == 2]
    return torch.cat([*weights, *(tensor[:, None] for tensor in tensors if tensor.ndim == 1)], dim=1)


def _matched_names(model: ReferenceModel, pattern: str) -> set[str]:
    """Return the canonical names of the parameters that a pattern matches; aliases of tied parameters match too."""
    root = model.model
    name_of = {id(parameter): name for name, parameter in root.named_parameters()}

    def names_in(module: nn.Module | None) -> set[str]:
        return set() if module is None else {name_of[id(parameter)] for parameter in module.parameters()}

    find_embedding = getattr(root, "get_input_embeddings", lambda: None)
    if (block := BLOCK.fullmatch(pattern)) is not None:
        blocks, number = _decoder(model)[1], int(block[1])
        if not -len(blocks) <= number < len(blocks):
            raise SettingsError(f"layers: got {pattern!r}, but the model has blocks 0 to {len(blocks) - 1}")
        return names_in(blocks[number])
    match pattern:
        case "all":
            return set(name_of.values())
        case "head":
            return names_in(model.head.linear)
        case "embedding":
            return names_in(find_embedding())
        case "body":
            return set(name_of.values()) - names_in(model.head.linear) - names_in(find_embedding())
        case "blocks":
            return names_in(_decoder(model)[1])
        case "final_norm":
            norms = [
                child
                for child in _decoder(model)[0].children()
                if not list(child.children()) and {parameter.ndim for parameter in child.parameters()} == {1}
            ]
            if not norms:
                raise SettingsError(
                    f"layers: {type(root).__name__} has no norm after its blocks; select it by a pattern over names"
                )
            return names_in(norms[-1])
    try:
        test = re.compile(pattern[3:]).fullmatch if pattern.startswith("re:") else partial(fnmatchcase, pat=pattern)
    except re.error as err:
        raise SettingsError(f"layers: {pattern!r} is not a valid regular expression: {err}") from err
    parameters = dict(root.named_parameters(remove_duplicate=False))
    matched = {name_of[id(parameter)] for name, parameter in parameters.items() if any(map(test, _prefixes(name)))}
    if not matched:
        close = get_close_matches(pattern, [prefix for name in parameters for prefix in _prefixes(name)], n=3)
        shown = close or [*list(parameters)[:3], "...", *list(parameters)[-3:]]
        raise SettingsError(
            f"layers: {pattern!r} matches no parameter and no module of {type(root).__name__}; expected "
            f"{LAYER_NAMES}, or a pattern over names such as {', '.join(shown)}"
        )
    return matched


def _prefixes(name: str) -> list[str]:
    """Return the dotted prefixes of a name: `a.b.weight` -> a, a.b, a.b.weight."""
    steps = name.split(".")
    return [".".join(steps[: k + 1]) for k in range(len(steps))]


def _decoder(model: ReferenceModel) -> tuple[nn.Module, nn.ModuleList]:
    """Return the module that contains the transformer blocks, and their list."""
    depth = getattr(model.model.config, "num_hidden_layers", None)
    for module in model.body.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                return module, child
    raise SettingsError(
        f"layers: {type(model.model).__name__} has no list of {depth} blocks; select layers by a pattern over names"
    )
