"""The output head: what happens between the last hidden state and the softmax.

Shape letters: P positions, H hidden width, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from grasp.errors import ModelError

READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ADDED_ROWS = 4_096  # of W at once: on a CPU torch copies what it adds up to float32, and all of W may be gigabytes

# Largest difference that passes as rounding, in units of the standard deviation of what is compared. Parts of a model
# of float64 may compute in float32.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

# Names under which configurations have a factor of the logits or its reciprocal, and a soft cap.
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
WIDEST = 64.0  # the scale and the cap are read from what the model makes of outputs of its layer up to this size
PROBE = 1_024.0  # a power of two, so that a product with it is exact; large against a bias, so that it leaves digits
PROBED_TOKENS = 6
PROBED_ROUNDING = 4  # units in the last place: of a division, a tanh and a product


@dataclass(frozen=True)
class OutputHead:
    """What happens between the last hidden state and the softmax: z = A h + b, then scale, then soft cap.

    A is the weight W of an `nn.Linear`. Another module is applied as it is, and A is what it multiplies its input
    with: W and a LoRA adapter, for example. If each row of A is a row of W times a factor of its own, the factor
    counts as part of the slope, so that h (x) xi is the gradient by W.
    """

    linear: nn.Module
    scale: float = 1.0
    cap: float | None = None
    classes: int | None = None  # logits that the model keeps of those that the layer gives; None: all

    @property
    def is_plain(self) -> bool:
        """Whether the layer is nothing but W h + b."""
        return type(self.linear) is nn.Linear

    def linear_logits(self, hidden_PH: Tensor, out: Tensor | None = None) -> Tensor:
        """z = A h + b, (P, V), in the layer's dtype; written to `out` where the layer is a plain matrix."""
        if out is None or not self.is_plain or self.classes is not None:
            return self.linear(hidden_PH)[..., : self.classes]  # type: ignore[no-any-return]
        weight, bias = self.linear.weight, self.linear.bias
        assert isinstance(weight, Tensor)
        torch.mm(hidden_PH, weight.T, out=out)
        return out.add_(bias) if isinstance(bias, Tensor) else out

    def matrix(self) -> Tensor:
        """W if the slope makes up for the difference, else A, (V, H), in the model's dtype.

        Raises:
            ModelError: it is quantised: its numbers are not the weights. Or the layer is not linear in its input.
        """
        weight: Tensor = self.linear.weight  # type: ignore[assignment]
        if weight.dtype not in READABLE:
            raise ModelError(
                f"{type(self.linear).__name__}: the output head is quantised to {weight.dtype}, expected float; build "
                "with features.kernels that name output_layer alone"
            )
        if not self.is_plain and self._applied.matrix is not None:
            return self._applied.matrix
        return weight.detach()[: self.classes]

    @property
    def is_weight(self) -> bool:
        """Whether h (x) xi is the gradient by all of the layer's weight."""
        return self.classes is None and (self.is_plain or self._applied.matrix is None)

    @property
    def factor_V(self) -> Tensor | None:  # noqa: N802 - a shape suffix
        """Rows of A divided by rows of W, (V,), in the dtype of probabilities; None: A is `matrix`."""
        return None if self.is_plain else self._applied.factor_V

    @cached_property
    def mean_H(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Mean of the rows of `matrix`, (H,), float32."""
        matrix_VH = self.matrix()
        parts = [some.sum(dim=0, dtype=torch.float32) for some in torch.split(matrix_VH, ADDED_ROWS)]
        return torch.stack(parts).sum(dim=0) / len(matrix_VH)

    def link(self, z_PV: Tensor) -> Tensor:
        """Logits as the softmax sees them."""
        if self.scale != 1.0:
            z_PV = z_PV * self.scale
        return z_PV if self.cap is None else self.cap * torch.tanh(z_PV / self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """d logits / d (matrix h), elementwise, from the logits themselves; 1 for an ordinary head.

        A tensor has the shape of the logits, or (V,).
        """
        slope: Tensor | float = self.scale
        if self.cap is not None:
            slope = self.scale * (1.0 - (logits / self.cap) ** 2)
        return slope if self.factor_V is None else slope * self.factor_V

    @cached_property
    def _applied(self) -> "_Applied":
        return _applied(self.linear, self.classes)


@dataclass(frozen=True, slots=True)
class _Applied:
    """What a module that is no plain `nn.Linear` multiplies its input with, compared with its weight."""

    matrix: Tensor | None = None  # (V, H); None: the weight, its rows times the factors
    factor_V: Tensor | None = None  # None: 1


@torch.no_grad()
def _applied(linear: nn.Module, classes: int | None) -> _Applied:
    """Read A from what a module gives for multiples of unit vectors.

    Raises:
        ModelError: the module is not linear in its input.
    """
    weight_VH: Tensor = linear.weight.detach()  # type: ignore[operator]
    width, dtype = weight_VH.shape[1], weight_VH.dtype
    unit_HH = torch.eye(width, dtype=dtype, device=weight_VH.device)
    offset_V = linear(0 * unit_HH[:1])
    matrix_VH = (linear(PROBE * unit_HH) - offset_V).T / PROBE
    hidden_PH = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(unit_HH)

    def gives(expected: Tensor, **replaced: Tensor) -> bool:
        found = torch.func.functional_call(linear, replaced, (hidden_PH,)) - offset_V
        spread = max(float(expected.std()), 1e-6)
        return float((found - expected).abs().max()) <= TOLERANCE[dtype] * spread

    wide = torch.promote_types(dtype, torch.float32)
    if not gives(hidden_PH.to(wide) @ matrix_VH.to(wide).T):
        raise ModelError(
            f"{type(linear).__name__}: the output layer is not linear in its input, expected a matrix and a bias; what "
            "flows back through it is not known"
        )
    eps = max(torch.finfo(dtype).eps, torch.finfo(matrix_VH.dtype).eps)  # a module may compute in another one
    rounding_VH = 8 * eps * (matrix_VH.abs() + float(offset_V.abs().max()) / PROBE)
    if bool(((matrix_VH - weight_VH).abs() <= rounding_VH).all()):
        return _Applied()
    squares_V = weight_VH.to(wide).square().sum(dim=1).clamp(min=torch.finfo(wide).tiny)
    factor_V = (matrix_VH.to(wide) * weight_VH.to(wide)).sum(dim=1) / squares_V
    if (
        "weight" in dict(linear.named_parameters(recurse=False))
        and bool((factor_V != 0).all())
        and bool(((matrix_VH - factor_V[:, None] * weight_VH).abs() <= rounding_VH).all())
        # those of rows that are normalised depend on the weight, and are no factors of another one
        and gives(
            hidden_PH.to(wide) @ weight_VH.to(wide).roll(1, dims=0).T * factor_V, weight=weight_VH.roll(1, dims=0)
        )
    ):
        return _Applied(factor_V=factor_V[:classes])
    return _Applied(matrix=matrix_VH[:classes].to(dtype).contiguous())


def output_layer(model: nn.Module) -> nn.Module:
    """The module that gives the logits of a Hugging Face causal LM.

    Raises:
        ModelError: there is none, or it is no matrix.
    """
    name = type(model).__name__
    find = getattr(model, "get_output_embeddings", None)
    linear: nn.Module | None = find() if find is not None else None
    if linear is None:
        raise ModelError(f"{name}: no output embeddings; expected a causal LM with a linear head")
    weight = getattr(linear, "weight", None)
    if weight is None or weight.ndim != 2:
        raise ModelError(
            f"{name}: its output embeddings are a {type(linear).__name__} without a (V, H) weight; expected a causal "
            "LM with one linear head"
        )
    return linear


def output_head(model: nn.Module) -> OutputHead:
    """Head, scale and soft cap of a Hugging Face causal LM.

    The model runs once, with a grid of numbers in the place of what its output layer gives: what becomes of them is
    compared with the scales and caps that its configuration names, and else with the scale that fits best.

    Raises:
        ModelError: the model has no linear output layer, or does something else to its output.
    """
    name, linear = type(model).__name__, output_layer(model)
    weight = linear.get_parameter("weight")
    given_V, logits_V = _probe(model, linear, len(weight))
    classes = len(logits_V) if len(logits_V) < len(given_V) else None
    given_V = given_V[: len(logits_V)].double()
    allowed_V = PROBED_ROUNDING * torch.finfo(logits_V.dtype).eps * logits_V.abs().double()
    logits_V, least = logits_V.double(), torch.inf
    for scale, cap in _links(model.config, given_V, logits_V):
        head = OutputHead(linear, scale, cap, classes)
        difference_V = (head.link(given_V) - logits_V).abs()
        if bool((difference_V <= allowed_V).all()):
            if not head.is_plain and weight.dtype in READABLE:
                head.matrix()  # what is not linear is refused now
            return head
        least = min(least, float(difference_V.max()))
    raise ModelError(
        f"{name}: its logits are not those of its output layer, times a scale, with a soft cap of a known name "
        f"({', '.join(CAPS)}): off by {least:.3g} of {WIDEST:.0f}; GRASP cannot read such an output head"
    )


@torch.no_grad()
def _probe(model: nn.Module, linear: nn.Module, vocab: int) -> tuple[Tensor, Tensor]:
    """Numbers in the place of the output layer's at one position, and the logits that the model makes of them."""
    given: list[Tensor] = []

    def replace(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        given.append(torch.linspace(-WIDEST, WIDEST, output.shape[-1]).to(output))
        return given[-1].expand_as(output).clone()

    ids_1L = torch.arange(PROBED_TOKENS, device=next(model.parameters()).device)[None] % vocab
    handle = linear.register_forward_hook(replace)
    try:
        logits = model(input_ids=ids_1L, use_cache=False).logits
    finally:
        handle.remove()
    if not given:
        raise ModelError(
            f"{type(model).__name__}: its output layer, a {type(linear).__name__}, is not called by its forward pass; "
            "expected logits that this layer gives"
        )
    if logits.ndim != 3 or logits.shape[1] != ids_1L.shape[1]:
        raise ModelError(
            f"{type(model).__name__}: its logits for {ids_1L.shape[1]} tokens have the shape {tuple(logits.shape)}, "
            "expected one distribution a token"
        )
    return given[-1], logits[0, -1]


def _links(config: Any, given_V: Tensor, logits_V: Tensor) -> Iterator[tuple[float, float | None]]:
    """Scales and caps to try, those that the configuration names first."""
    text = config.get_text_config(decoder=True)
    named, caps = (
        [float(value) for name in names if isinstance(value := getattr(text, name, None), int | float) and value > 0]
        for names in (SCALES, CAPS)
    )
    scales = [number for value in named for number in (value, 1.0 / value)]
    yield from product([*scales, 1.0], [*caps, None])
    yield float(given_V @ logits_V / (given_V @ given_V)), None
