"""The output head of a causal LM: linear layer, scale and soft cap between the last hidden state and the softmax.

The *link* is the function from the outputs of the layer to the logits. Start with `output_head`, which determines the
head of a model by experiments, because configurations of models do not describe it completely.

Shape letters: P positions, H hidden width, V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from grasp.errors import ModelError

READABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BLOCK_ROWS = 4_096  # rows of W that are summed at once: on a CPU torch copies them to float32, and W may have gigabytes

# Largest difference attributed to rounding, in units of the standard deviation of the compared values. Parts of a
# float64 model may compute in float32.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

# Config fields of a factor of the logits (or its reciprocal), and of a soft cap.
SCALE_FIELDS = ("logit_scale", "logits_scaling", "lm_head_multiplier")
CAP_FIELDS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
PROBE_RANGE = 64.0  # scale and cap are inferred from the logits for layer outputs in [-PROBE_RANGE, PROBE_RANGE]
PROBE_SCALE = 1_024.0  # a power of two, so that products are exact; larger than a bias, so that few digits cancel
PROBED_TOKENS = 6
PROBED_ROUNDING = 4  # tolerance in units in the last place, for a division, a tanh and a product


@dataclass(frozen=True)
class OutputHead:
    """The function from the last hidden state h to the logits: z = A h + b, then scale, then soft cap.

    For an `nn.Linear`, A is its weight W. For any other linear module, A is its effective matrix, e.g. W with a LoRA
    adapter. If every row of A is a multiple of the same row of W, the factors are part of the slope, so that
    h (x) xi is the gradient with respect to W.
    """

    linear: nn.Module
    scale: float = 1.0
    cap: float | None = None
    classes: int | None = None  # number of outputs of the layer that the model uses as logits; None: all

    @property
    def is_plain(self) -> bool:
        """Return whether the layer is exactly W h + b."""
        return type(self.linear) is nn.Linear

    def linear_logits(self, hidden_PH: Tensor, out: Tensor | None = None) -> Tensor:
        """Return z = A h + b, (P, V), in the dtype of the layer; written to `out` if the layer is a plain matrix."""
        if out is None or not self.is_plain or self.classes is not None:
            return self.linear(hidden_PH)[..., : self.classes]  # type: ignore[no-any-return]
        weight, bias = self.linear.weight, self.linear.bias
        assert isinstance(weight, Tensor)
        torch.mm(hidden_PH, weight.T, out=out)
        return out.add_(bias) if isinstance(bias, Tensor) else out

    def matrix(self) -> Tensor:
        """Return W if `slope` contains the difference between A and W, else A; (V, H), in the dtype of the model.

        Raises:
            ModelError: the weight is quantised, or the layer is not linear in its input.
        """
        weight: Tensor = self.linear.weight  # type: ignore[assignment]
        if weight.dtype not in READABLE_DTYPES:
            raise ModelError(
                f"{type(self.linear).__name__}: the output head is quantised to {weight.dtype}, expected float; build "
                "with --set features.kernels=[output_layer]"
            )
        if not self.is_plain and (matrix_VH := self._effective_matrix[0]) is not None:
            return matrix_VH
        return weight.detach()[: self.classes]

    @property
    def is_weight(self) -> bool:
        """Return whether h (x) xi is the gradient with respect to the complete weight of the layer."""
        return self.classes is None and (self.is_plain or self._effective_matrix[0] is None)

    @property
    def factor_V(self) -> Tensor | None:  # noqa: N802 - a shape suffix
        """Return the factor between each row of A and of W, (V,), float32 or float64; None: A is `matrix`."""
        return None if self.is_plain else self._effective_matrix[1]

    @cached_property
    def mean_H(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Return the mean of the rows of `matrix`, (H,), float32."""
        matrix_VH = self.matrix()
        block_sums = [block.sum(dim=0, dtype=torch.float32) for block in torch.split(matrix_VH, BLOCK_ROWS)]
        return torch.stack(block_sums).sum(dim=0) / len(matrix_VH)

    def link(self, z_PV: Tensor) -> Tensor:
        """Return the logits, i.e. the outputs z of the layer with scale and soft cap."""
        if self.scale != 1.0:
            z_PV = z_PV * self.scale
        return z_PV if self.cap is None else self.cap * torch.tanh(z_PV / self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return d logits / d (matrix h), elementwise, from the logits; 1 for a head without scale and cap.

        A tensor has the shape of the logits, or (V,).
        """
        slope: Tensor | float = self.scale
        if self.cap is not None:
            # d/dx [cap tanh(x / cap)] = 1 - tanh^2, and tanh = logits / cap
            slope = self.scale * (1.0 - (logits / self.cap) ** 2)
        return slope if self.factor_V is None else slope * self.factor_V

    @cached_property
    @torch.no_grad()
    def _effective_matrix(self) -> tuple[Tensor | None, Tensor | None]:
        """Compute the effective matrix A of the layer from its outputs for multiples of unit vectors.

        Returns:
            A, (V, H), or None if its rows are those of W times factors; these factors, (V,), or None if all are 1.
        """
        linear, weight_VH = self.linear, self.linear.get_parameter("weight").detach()
        width, dtype = weight_VH.shape[1], weight_VH.dtype
        unit_HH = torch.eye(width, dtype=dtype, device=weight_VH.device)
        offset_V = linear(0 * unit_HH[:1])
        matrix_VH = (linear(PROBE_SCALE * unit_HH) - offset_V).T / PROBE_SCALE
        hidden_PH = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(unit_HH)

        def computes(expected: Tensor, **replaced: Tensor) -> bool:
            """Return whether the module, with some parameters replaced, has the expected output without its offset."""
            actual = torch.func.functional_call(linear, replaced, (hidden_PH,)) - offset_V
            std = max(float(expected.std()), 1e-6)
            return float((actual - expected).abs().max()) <= TOLERANCE[dtype] * std

        work = torch.promote_types(dtype, torch.float32)
        if not computes(hidden_PH.to(work) @ matrix_VH.to(work).T):
            raise ModelError(
                f"{type(linear).__name__}: the output layer is not linear in its input, expected a matrix and a bias; "
                "its gradient is unknown"
            )
        eps = max(torch.finfo(dtype).eps, torch.finfo(matrix_VH.dtype).eps)  # a module may compute in another dtype
        rounding_VH = 8 * eps * (matrix_VH.abs() + float(offset_V.abs().max()) / PROBE_SCALE)
        if bool(((matrix_VH - weight_VH).abs() <= rounding_VH).all()):
            return None, None
        squares_V = weight_VH.to(work).square().sum(dim=1).clamp(min=torch.finfo(work).tiny)
        factor_V = (matrix_VH.to(work) * weight_VH.to(work)).sum(dim=1) / squares_V
        if (
            "weight" in dict(linear.named_parameters(recurse=False))
            and bool((factor_V != 0).all())
            and bool(((matrix_VH - factor_V[:, None] * weight_VH).abs() <= rounding_VH).all())
            # If the module normalises rows, the factors depend on the weight: they fail for permuted rows.
            and computes(
                hidden_PH.to(work) @ weight_VH.to(work).roll(1, dims=0).T * factor_V, weight=weight_VH.roll(1, dims=0)
            )
        ):
            return None, factor_V[: self.classes]
        return matrix_VH[: self.classes].to(dtype).contiguous(), None


def output_layer(model: nn.Module) -> nn.Module:
    """Return the output layer of a Hugging Face causal LM.

    Raises:
        ModelError: there is none, or it has no weight matrix.
    """
    name = type(model).__name__
    get_output_embeddings = getattr(model, "get_output_embeddings", None)
    linear: nn.Module | None = None if get_output_embeddings is None else get_output_embeddings()
    if linear is None or getattr(getattr(linear, "weight", None), "ndim", 0) != 2:
        raise ModelError(
            f"{name}: its output embeddings are a {type(linear).__name__} without a (V, H) weight; expected a causal "
            "LM with one linear head"
        )
    return linear


def output_head(model: nn.Module) -> OutputHead:
    """Determine the output layer, scale and soft cap of a Hugging Face causal LM.

    The model runs once, and the output of its layer is replaced by a grid of numbers. The resulting logits are compared
    with the scales and caps of the config, and then with the best fitting scale.

    Raises:
        ModelError: the model has no linear output layer, or transforms its output in another way.
    """
    name, linear = type(model).__name__, output_layer(model)
    weight = linear.get_parameter("weight")
    output_V, logits_V = _probe_link(model, linear, len(weight))
    classes = len(logits_V) if len(logits_V) < len(output_V) else None
    output_V = output_V[: len(logits_V)].double()
    allowed_V = PROBED_ROUNDING * torch.finfo(logits_V.dtype).eps * logits_V.abs().double()
    logits_V, smallest_difference = logits_V.double(), torch.inf
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    config_scales, caps = (
        [float(value) for name in names if isinstance(value := getattr(text, name, None), int | float) and value > 0]
        for names in (SCALE_FIELDS, CAP_FIELDS)
    )
    scales = [number for value in config_scales for number in (value, 1.0 / value)]
    best_scale = float(output_V @ logits_V / (output_V @ output_V))
    for scale, cap in (*product([*scales, 1.0], [*caps, None]), (best_scale, None)):
        head = OutputHead(linear, scale, cap, classes)
        difference_V = (head.link(output_V) - logits_V).abs()
        if bool((difference_V <= allowed_V).all()):
            if not head.is_plain and weight.dtype in READABLE_DTYPES:
                head.matrix()  # raises an error now if the layer is not linear
            return head
        smallest_difference = min(smallest_difference, float(difference_V.max()))
    raise ModelError(
        f"{name}: its logits are not the outputs of its output layer with a scale or a soft cap of a known name "
        f"({', '.join(CAP_FIELDS)}): off by {smallest_difference:.3g} of {PROBE_RANGE:.0f}; GRASP cannot read this head"
    )


@torch.no_grad()
def _probe_link(model: nn.Module, linear: nn.Module, vocab: int) -> tuple[Tensor, Tensor]:
    """Replace the outputs of the layer by a grid of numbers; return the grid, (V,), and the resulting logits, (V,)."""
    outputs: list[Tensor] = []

    def replace(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        outputs.append(torch.linspace(-PROBE_RANGE, PROBE_RANGE, output.shape[-1]).to(output))
        return outputs[-1].expand_as(output).clone()

    ids_1L = torch.arange(PROBED_TOKENS, device=next(model.parameters()).device)[None] % vocab
    handle = linear.register_forward_hook(replace)
    try:
        logits = model(input_ids=ids_1L, use_cache=False).logits
    finally:
        handle.remove()
    if not outputs or logits.ndim != 3 or logits.shape[1] != ids_1L.shape[1]:
        raise ModelError(
            f"{type(model).__name__}: its logits for {ids_1L.shape[1]} tokens have the shape {tuple(logits.shape)}, "
            f"expected one distribution per token, computed by its output layer, a {type(linear).__name__}"
        )
    return outputs[-1], logits[0, -1]
