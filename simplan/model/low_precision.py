"""Linear layers whose matrix products are in 8 or 4 bits: what is quantized when, with which scales, and what is kept.

All else is bf16 mixed precision: weights and optimizer states, embedding, head, norms, the core of attention, routers,
adapters, and the experts of software whose grouped products are not of that kind. A linear layer y = x W' has three
products: the output, the gradient of the input (g W) and that of the weight (g' x). Each adds up along another
dimension, and elements that are added up have scales in common, so that every operand is needed quantized twice: along
its rows and along its columns.

Sources, called by these names below:

- torchao: pytorch/ao at 36027d82, torchao/float8 (config.py, float8_linear.py), torchao/prototype/moe_training
  (mxfp8_linear.py, nvfp4_training/nvfp4_linear.py), torchao/prototype/blockwise_fp8_training/linear.py; its own count
  of what compiled casts read and write is torchao/testing/training/roofline_utils.py. Eager: pytorch/ao v0.18.0,
  torchao/float8/float8_utils.py (tensor_to_amax, amax_to_scale, to_fp8_saturated), float8_training_tensor.py
  (_ToFloat8ConstrFunc), float8_ops.py (preprocess_addmm, addmm_float8_unwrapped)
- TE: NVIDIA/TransformerEngine at d0067d0d, transformer_engine/common/recipe/__init__.py, pytorch/module/linear.py
- DeepSeek-V3: DeepSeek-AI 2024 (arXiv:2412.19437), section 3.3
- OCP: Microscaling formats specification 1.0, and Rouhani et al. 2023 (arXiv:2310.10537)
- NVFP4: NVIDIA 2025 (arXiv:2509.25149)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from simplan.model.layer import Gemm, LayerKind, LayerSpec, Role

__all__ = [
    "DEFAULT_RECIPE",
    "LOW_PRECISIONS",
    "TORCHAO_RECIPES",
    "Cast",
    "Fp8Recipe",
    "Kept",
    "LinearFormat",
    "LowPrecision",
    "QuantizedWeights",
    "casts",
    "linear_format",
    "linears",
    "quantized_linears",
]

LowPrecision = Literal["fp8", "mxfp8", "nvfp4"]
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "delayed"]
Kept = Literal["wide", "quantized"]
"""What of its operands a linear layer keeps for backward: them as they are, in 16 bits, or what it made of them."""

QuantizedWeights = Literal["microbatch", "step", "stored"]
"""How often weights are quantized, and how long that lives: for every microbatch, to the end of its backward; once a
step, beside the weights in 16 bits, to the next one; or when they are updated, in place of weights in 16 bits."""

LOW_PRECISIONS: tuple[LowPrecision, ...] = ("fp8", "mxfp8", "nvfp4")
DEFAULT_RECIPE: Fp8Recipe = "tensorwise"
TORCHAO_RECIPES: tuple[Fp8Recipe, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""Recipes of ``torchao.float8``, whose casts are torch's operations; those of its blockwise one are Triton kernels."""

_SCALE_OF_TENSOR_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFormat:
    """How linear layers are quantized.

    Attributes:
        precision: What the products are computed in, and whose rate of a device they have.
        recipe: Of fp8, how it is scaled; of the others the same as ``precision``.
        element_bits: Of a quantized element.
        scale_bytes: Of one scale.
        block: Elements in a row that share a scale, rows along which products add up; 0 for a whole row.
        block_rows: Rows of activations that share one; 0 for all of them.
        weight_block_rows: Rows of weights that share one; 0 for all of them.
        scale_of_tensor: The scales have a scale of the whole tensor besides.
        finds_largest: A pass over the operand finds its largest element before another one quantizes it; else a pass
            has the whole block at hand, or the scale from earlier steps.
        both_at_once: One pass quantizes along rows and along columns.
        transposes_wide: Columns are quantized as the rows of a transposed copy in 16 bits.
        wide_weight_gradient: The gradient of the weight is a product in 16 bits.
        eager: Casts are torch's own operations one after the other, through FP32, as torchao's are to FP8 where it is
            not compiled. Each matmul has casts of its own, and copies operands that its kernel wants in another order.
        orders_scales: Products want the scales of blocks in another order than casts write them: for each operand a
            small kernel comes before (TE, common/swizzle and pytorch/csrc/extensions/gemm.cpp; torchao, to_blocked).
        multiple: Rows, columns and tokens are multiples of it.
        kept: What is kept for backward.
        weights: How often weights are quantized.
        experts: The grouped products of experts are quantized as well.
    """

    precision: LowPrecision
    recipe: str
    element_bits: int
    scale_bytes: int
    block: int
    block_rows: int = 1
    weight_block_rows: int = 1
    scale_of_tensor: bool = False
    finds_largest: bool = False
    both_at_once: bool = False
    transposes_wide: bool = False
    wide_weight_gradient: bool = False
    eager: bool = False
    orders_scales: bool = False
    multiple: int = 16
    kept: Kept = "wide"
    weights: QuantizedWeights = "microbatch"
    experts: bool = False

    @property
    def has_one_scale(self) -> bool:
        """All elements of an operand have one, so that it is the same along rows and along columns."""
        return not (self.block or self.block_rows or self.weight_block_rows)

    def quantized_bytes(self, rows: int, columns: int, *, weight: bool = False) -> int:
        """Bytes of a quantized matrix with its scales.

        Args:
            rows, columns: Its size; products add up along a row.
            weight: It is one.
        """
        in_rows = self.weight_block_rows if weight else self.block_rows
        num_scales = -(-rows // (in_rows or rows)) * -(-columns // (self.block or columns))
        whole = _SCALE_OF_TENSOR_BYTES if self.scale_of_tensor else 0
        return rows * columns * self.element_bits // 8 + num_scales * self.scale_bytes + whole


_FP8 = LinearFormat(precision="fp8", recipe="", element_bits=8, scale_bytes=4, block=0)
_MXFP8 = LinearFormat(
    precision="mxfp8", recipe="mxfp8", element_bits=8, scale_bytes=1, block=32, orders_scales=True, multiple=32
)
_FORMATS: dict[tuple[LowPrecision, str], LinearFormat] = {
    (form.precision, form.recipe): form
    for form in (
        # one fp32 scale a tensor, e4m3 and for gradients e5m2 (torchao's default; TE's Float8CurrentScaling)
        replace(_FP8, recipe="tensorwise", block_rows=0, weight_block_rows=0, finds_largest=True, both_at_once=True),
        # the same, its scale from the largest elements of earlier steps (TE's DelayedScaling)
        replace(_FP8, recipe="delayed", block_rows=0, weight_block_rows=0, both_at_once=True),
        # one a row (torchao); its kernels transpose in 16 bits (roofline_utils.py)
        replace(_FP8, recipe="rowwise", transposes_wide=True),
        # the gradient of the weight in bf16, that of the input by weights of one scale (torchao)
        replace(_FP8, recipe="rowwise_with_gw_hp", wide_weight_gradient=True),
        # 1 x 128 for activations and gradients, 128 x 128 for weights (DeepSeek-V3; torchao; TE's Float8BlockScaling)
        replace(_FP8, recipe="blockwise", block=128, weight_block_rows=128, multiple=128),
        # 1 x 32 with scales of 8 bits, e8m0 (OCP, torchao; TE's MXFP8BlockScaling)
        _MXFP8,
        # 1 x 16 with e4m3 scales and one fp32 scale a tensor; those of weights, equal in 16 x 16, are written out. The
        # pass for the largest element also does the random Hadamard transform's (NVFP4, torchao, TE). Rounding
        # stochastically takes no pass.
        replace(
            _MXFP8,
            precision="nvfp4",
            recipe="nvfp4",
            element_bits=4,
            block=16,
            scale_of_tensor=True,
            finds_largest=True,
            both_at_once=True,
            multiple=128,
        ),
    )
}


def linear_format(
    precision: LowPrecision,
    recipe: Fp8Recipe | None,
    kept: Kept,
    weights: QuantizedWeights = "microbatch",
    *,
    experts: bool = False,
    eager: bool = False,
) -> LinearFormat:
    """The format of a training.

    Args:
        precision: ``TrainingSpec.precision``.
        recipe: Of fp8 alone.
        kept: What the software keeps.
        weights: How often it quantizes weights.
        experts: It quantizes those of experts, too.
        eager: It casts to FP8 in eager mode, where the recipe has no kernels of its own.
    """
    name = (recipe or DEFAULT_RECIPE) if precision == "fp8" else precision
    eager = eager and name in TORCHAO_RECIPES
    return replace(_FORMATS[precision, name], kept=kept, weights=weights, experts=experts, eager=eager)


def linears(layer: LayerSpec, *, experts: bool = False) -> list[Gemm]:
    """The matrix products of a layer that a low precision is for, in order; none outside of blocks.

    Routers and adapters stay in bf16 (adapters: NVIDIA-NeMo/Megatron-Bridge at 067f987,
    src/megatron/bridge/peft/utils.py, and NVIDIA/NeMo, nemo/collections/llm/peft/utils.py: linear layers of Megatron
    Core, not of TE).

    Args:
        layer: The layer.
        experts: The grouped products of its experts are among them: of torchao's linear layers they are not, of TE's
            they are (``GroupedLinear``).
    """
    if layer.kind is not LayerKind.BLOCK:
        return []
    wide = {Role.GATING, Role.ADAPTER} if experts else {Role.GATING, Role.ADAPTER, Role.EXPERTS}
    kernels = zip(layer.kernels, layer.roles, strict=True)
    gemms = [kernel for kernel, roles in kernels if isinstance(kernel, Gemm) and wide.isdisjoint(roles)]
    return [gemm for gemm in gemms if not gemm.image_elements]


def quantized_linears(layer: LayerSpec, form: LinearFormat) -> list[Gemm]:
    """Those of a layer that a format is for.

    Not in 4 bits are those of layers for multi-token prediction, which run in 16 then (NVIDIA/Megatron-LM at d98e8a6,
    megatron/core/transformer/multi_token_prediction.py, ``_proj_and_transformer_layer``: "ignoring FP4").
    """
    if layer.mtp_depth and form.precision == "nvfp4":
        return []
    return linears(layer, experts=form.experts)


class Cast(NamedTuple):
    """A quantization of one operand.

    Attributes:
        operand: Which.
        backward: It is done in backward, not in forward.
        reads: Passes that read the operand as it is.
        writes: Quantized copies that are written.
        wide_writes: Copies in 16 bits that are written on the way.
        between_bytes: Per element, what operations in between read and write.
        copies: Quantized copies that are copied once more, in another order.
        kernels: How many there are.
    """

    operand: Literal["input", "weight", "gradient"]
    backward: bool
    reads: int
    writes: int
    wide_writes: int = 0
    between_bytes: int = 0
    copies: int = 0
    kernels: int = 1


_EAGER_CAST_BYTES = 32
"""Per element: abs, max, to FP32, times the scale, clamped, to FP8. An operand in FP32 is wider and not upcast, which
comes to the same. The result is not among it."""

_EAGER_CAST_KERNELS = 12
"""These six, and of the scale: to FP64, clamped, reciprocal, times the largest number, to FP32, and inverted."""

_POWER_OF_TWO_KERNELS = 3


def casts(form: LinearFormat, *, trained: bool = True, propagates: bool = True) -> Iterator[Cast]:
    """What a linear layer quantizes in one forward and backward.

    Software that keeps its operands quantized makes both copies of input and weight in forward, as far as backward
    needs them (TE, linear.py: ``set_usage`` of the quantizers). The other makes those along rows in forward, and in
    backward begins again with what it kept. The gradient is quantized in backward.

    Args:
        form: How it is quantized.
        trained: Backward has a product for its weight; always so of software that keeps operands as they are.
        propagates: Backward has a product for its input; as above.
    """
    passes = 1 + form.finds_largest
    if form.kept == "quantized":
        yield Cast("input", False, passes, 1 + trained)
        yield Cast("weight", False, passes, 1 + propagates)
        if trained or propagates:
            yield Cast("gradient", True, passes, trained + propagates)
        return
    assert trained
    if form.eager:
        yield from _eager_casts(form)
        return
    both = Cast("gradient", True, passes if form.both_at_once else 2 * passes, 2, int(form.transposes_wide))
    yield from (Cast(operand, False, passes, 1) for operand in ("input", "weight"))
    if form.wide_weight_gradient:
        yield Cast("gradient", True, passes, 1)
        yield Cast("weight", True, 2, 1)  # one scale for all of it
        return
    yield both
    again = passes + form.transposes_wide
    yield from (Cast(operand, True, again, 1, int(form.transposes_wide)) for operand in ("weight", "input"))


def _eager_casts(form: LinearFormat) -> Iterator[Cast]:
    """Two for each matmul in FP8; see ``simplan.program.memory.low_precision_footprint`` for those that are copied."""
    kernels = _EAGER_CAST_KERNELS + (0 if form.has_one_scale else _POWER_OF_TWO_KERNELS)
    cast = partial(Cast, reads=0, writes=1, between_bytes=_EAGER_CAST_BYTES)
    yield from (cast(operand, False, kernels=kernels) for operand in ("input", "weight"))
    yield cast("gradient", True, kernels=kernels)
    yield cast("weight", True, kernels=kernels + 1, copies=1)
    if not form.wide_weight_gradient:
        yield from (cast(operand, True, kernels=kernels + 1, copies=1) for operand in ("gradient", "input"))
