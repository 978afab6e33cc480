"""Which parameters a gradient method covers, chosen by name, and the blocks in which their gradients come.

A block is what one matrix product owns: the weight of a linear layer with its bias, an embedding, the vectors of a
norm. A weight that several modules use, a tied head say, is one block, and its gradient the sum over all uses.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from grasp.errors import ModelError, SettingsError
from grasp.models.causal_lm import ReferenceModel

Kind = Literal["linear", "embedding", "vector"]

WORDS = "all, head, embedding, body, blocks, block:N (block:-1 is the last) and final_norm"
BLOCK = re.compile(r"block:(-?\d+)")
MAX_VECTOR = 1_000_000  # numbers in a module that is neither linear nor embedding: its gradients are held a row each
EXAMPLES = 6


class UntakenLayerError(ModelError):
    """A layer has no gradient for each row of a batch; `layer` is its name."""

    def __init__(self, layer: str, why: str) -> None:
        super().__init__(f"layers: {why}; leave it out with !{layer}")
        self.layer = layer


@dataclass(frozen=True, slots=True)
class Block:
    """One matrix whose gradient is a sum of outer products left x right, or the vectors of one module as (1, P)."""

    name: str
    kinds: tuple[Kind, ...]  # of its uses: a tied head is ("embedding", "linear")
    left: int
    right: int  # the bias, where it is covered, is the last column
    weight: bool  # False: the bias alone
    bias: bool
    parameters: tuple[str, ...]  # canonical names
    transposed: bool = False  # the parameter is (right, left), as GPT-2 has it
    head: bool = False  # of the model: it sees positions with a label only

    @property
    def size(self) -> int:
        return self.left * self.right

    @property
    def shared(self) -> bool:
        return len(self.kinds) > 1


@dataclass(frozen=True, slots=True)
class LayerSet:
    """Blocks that patterns chose, with the modules that feed them."""

    blocks: tuple[Block, ...]
    modules: tuple[tuple[nn.Module, int], ...]  # each with its block
    patterns: tuple[str, ...]
    total: int  # parameters of the model

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def coverage(self) -> dict[str, object]:
        """What was covered, for a report."""
        return {
            "patterns": list(self.patterns),
            "blocks": [block.name for block in self.blocks],
            "parameters": self.size,
            "of": self.total,
            "tied": [list(block.parameters) for block in self.blocks if block.shared],
        }

    def describe(self) -> str:
        """One line: how many parameters, in which modules."""
        names = [block.name for block in self.blocks]
        shown = ", ".join(names if len(names) <= EXAMPLES else [*names[:3], "...", *names[-3:]])
        return f"{self.size:,} of {self.total:,} parameters in {len(names)} blocks ({shown})"


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
        found = names.match(pattern.removeprefix("!"))
        chosen = chosen - found if pattern.startswith("!") else chosen | found
    if not chosen:
        raise SettingsError(f"layers: {list(patterns)} chooses nothing; expected {WORDS}, or a pattern over names")
    blocks, modules = _blocks(model, chosen)
    total = sum(parameter.numel() for parameter in model.model.parameters())
    return LayerSet(tuple(blocks), tuple(modules), tuple(patterns), total)


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


def _kind(module: nn.Module) -> Kind:
    if isinstance(module, nn.Linear | Conv1D):
        return "linear"
    return "embedding" if isinstance(module, nn.Embedding) else "vector"


def _blocks(model: ReferenceModel, chosen: set[str]) -> tuple[list[Block], list[tuple[nn.Module, int]]]:
    """Blocks in the order of the modules.

    Parameters with the same owners go together; a weight that is tied goes without a bias.
    """
    root = model.model
    canonical = {id(parameter): name for name, parameter in root.named_parameters()}
    owners: dict[str, list[tuple[str, nn.Module]]] = {}
    for module_name, module in root.named_modules():
        for parameter in module.parameters(recurse=False):
            if (name := canonical[id(parameter)]) in chosen:
                owners.setdefault(name, []).append((module_name, module))
    together: dict[tuple[int, ...], list[str]] = {}
    for name, own in owners.items():
        together.setdefault(tuple(id(module) for _, module in own), []).append(name)
    blocks: list[Block] = []
    modules: list[tuple[nn.Module, int]] = []
    for names in together.values():
        uses = [module for _, module in owners[names[0]]]
        block = _block(tuple(names), owners[names[0]], canonical)
        modules += [(module, len(blocks)) for module in uses]
        blocks.append(replace(block, head=uses == [model.head.linear]))
    return blocks, modules


def _block(names: tuple[str, ...], owners: Sequence[tuple[str, nn.Module]], canonical: dict[int, str]) -> Block:
    """The block of the parameters `names`, which have the same owners."""
    name, module = owners[0]
    kinds = tuple(_kind(owner) for _, owner in owners)
    own = list(module.named_parameters(recurse=False))
    if "vector" in kinds:
        total = sum(parameter.numel() for _, parameter in own)
        if len(owners) > 1:
            why = f"{names[0]} is shared by {len(kinds)} modules that are no linear layers"
            raise UntakenLayerError(names[0], why)
        if total > MAX_VECTOR or list(module.children()):
            raise UntakenLayerError(
                name,
                f"{name} ({type(module).__name__}, {total:,} parameters of its own) is neither linear nor an embedding "
                "nor small, so it has no per-example form here",
            )
        size = sum(parameter.numel() for _, parameter in own if canonical[id(parameter)] in names)
        return Block(name, kinds, 1, size, True, False, names)
    roles = {canonical[id(parameter)]: role for role, parameter in own}
    for parameter in names:
        if roles[parameter] not in ("weight", "bias"):
            raise UntakenLayerError(
                parameter,
                f"{parameter}: a {type(module).__name__} with another parameter than weight and bias has no "
                "per-example form here",
            )
    has_weight, has_bias = (role in {roles[parameter] for parameter in names} for role in ("weight", "bias"))
    left, width = _shape(module)
    right = (width if has_weight else 0) + has_bias
    return Block(name, kinds, left, right, has_weight, has_bias, names, isinstance(module, Conv1D))


def _shape(module: nn.Module) -> tuple[int, int]:
    """(left, right) widths: (output, input), or (vocabulary, width) of an embedding."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    rows, columns = weight.shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)
