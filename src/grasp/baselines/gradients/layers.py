"""Which parameters a gradient method covers, chosen by patterns over their names."""

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from grasp.errors import SettingsError
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Block, LayerSet, layers_of

WORDS = "all, head, embedding, body, blocks, block:N (block:-1 is the last) and final_norm"
BLOCK = re.compile(r"block:(-?\d+)")
EXAMPLES = 6


def choose_layers(model: ReferenceModel, patterns: Sequence[str]) -> LayerSet:
    """Blocks of all parameters that the patterns name.

    Args:
        patterns: words (all, head, embedding, body, blocks, block:N, final_norm), wildcards over the names of
            parameters or modules (`model.layers.2`, `*.mlp.*`), or `re:` and a regular expression; `!` in front
            takes away.
    Raises:
        SettingsError: a pattern matches nothing, or all is taken away; the message lists names.
        ModelError: a parameter that was asked for has no per-example form.
    """
    names = _Names(model)
    chosen: set[str] = set()
    for pattern in patterns:
        matched = names.match(pattern.removeprefix("!"))
        chosen = chosen - matched if pattern.startswith("!") else chosen | matched
    if not chosen:
        raise SettingsError(f"layers: {list(patterns)} chooses nothing; expected {WORDS}, or a pattern over names")
    return layers_of(model, chosen)


def described(layers: LayerSet) -> str:
    """One line: how many parameters, in which modules."""
    names = [block.name for block in layers.blocks]
    shown = ", ".join(names if len(names) <= EXAMPLES else [*names[:3], "...", *names[-3:]])
    return f"{layers.size:,} of {layers.total:,} parameters in {len(names)} blocks ({shown})"


def as_matrix(block: Block, parameters: Mapping[str, Tensor]) -> Tensor:
    """Tensors in the shape of a block's parameters, by canonical name, as the block's (X, Y)."""
    found = [parameters[name] for name in block.parameters]
    if "vector" in block.kinds:
        return torch.cat([tensor.flatten() for tensor in found])[None]
    weights = [tensor.T if block.transposed else tensor for tensor in found if tensor.ndim == 2]
    return torch.cat([*weights, *(tensor[:, None] for tensor in found if tensor.ndim == 1)], dim=1)


class _Names:
    """Parameters by every name that they have, and what the words stand for."""

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model
        self._root = model.model
        aliases = self._root.named_parameters(remove_duplicate=False)
        first = {id(parameter): name for name, parameter in self._root.named_parameters()}
        self._canonical = {name: first[id(parameter)] for name, parameter in aliases}

    def match(self, pattern: str) -> set[str]:
        """Canonical names of the parameters."""
        if (block := BLOCK.fullmatch(pattern)) is not None:
            return self._of(self._block(int(block[1]), pattern))
        if (word := self._words().get(pattern)) is not None:
            return word()
        try:
            test = re.compile(pattern[3:]).fullmatch if pattern.startswith("re:") else None
        except re.error as err:
            raise SettingsError(f"layers: {pattern!r} is no regular expression: {err}") from err
        found = set()
        for name, canonical in self._canonical.items():
            heads = _prefixes(name)
            if any(test(head) if test is not None else fnmatchcase(head, pattern) for head in heads):
                found.add(canonical)
        if not found:
            close = get_close_matches(pattern, [head for name in self._canonical for head in _prefixes(name)], n=3)
            shown = close or [*list(self._canonical)[:3], "...", *list(self._canonical)[-3:]]
            raise SettingsError(
                f"layers: {pattern!r} matches no parameter and no module of {type(self._root).__name__}; expected "
                f"{WORDS}, or a pattern over names such as {', '.join(shown)}"
            )
        return found

    def _words(self) -> dict[str, Callable[[], set[str]]]:
        everything, model = set(self._canonical.values()), self._model
        return {
            "all": lambda: everything,
            "head": lambda: self._of(model.head.linear),
            "embedding": self._input_embedding,
            "body": lambda: everything - self._of(model.head.linear) - self._input_embedding(),
            "blocks": lambda: self._of(_decoder(model)[1]),
            "final_norm": lambda: self._of(_final_norm(model)),
        }

    def _of(self, module: nn.Module) -> set[str]:
        own = {id(parameter) for parameter in module.parameters()}
        return {name for name, parameter in self._root.named_parameters() if id(parameter) in own}

    def _input_embedding(self) -> set[str]:
        find = getattr(self._root, "get_input_embeddings", None)
        module = find() if find is not None else None
        return self._of(module) if isinstance(module, nn.Module) else set()

    def _block(self, number: int, pattern: str) -> nn.Module:
        blocks = _decoder(self._model)[1]
        if not -len(blocks) <= number < len(blocks):
            raise SettingsError(f"layers: got {pattern!r}, the model has blocks 0 to {len(blocks) - 1}")
        return blocks[number]


def _prefixes(name: str) -> list[str]:
    """`a.b.weight` -> a, a.b, a.b.weight."""
    steps = name.split(".")
    return [".".join(steps[: k + 1]) for k in range(len(steps))]


def _decoder(model: ReferenceModel) -> tuple[nn.Module, nn.ModuleList]:
    """The stack of transformer blocks, and the module that holds it."""
    depth = getattr(model.model.config, "num_hidden_layers", None)
    for module in model.body.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                return module, child
    raise SettingsError(
        f"layers: {type(model.model).__name__} has no list of {depth} blocks; name its layers by a pattern over names"
    )


def _final_norm(model: ReferenceModel) -> nn.Module:
    parent, _ = _decoder(model)
    found = [
        child
        for child in parent.children()
        if not list(child.children()) and {parameter.ndim for parameter in child.parameters()} == {1}
    ]
    if not found:
        raise SettingsError(
            f"layers: {type(model.model).__name__} has no norm after its blocks; name it by a pattern over names"
        )
    return found[-1]
