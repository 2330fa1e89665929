"""Linear layers with FP8, MXFP8 or NVFP4 matmuls: quantized operands, their scales, and tensors saved for backward.

All else is BF16 mixed precision: weights and optimizer states, embedding, head, norms, the attention core, routers and
adapters. So are experts where the framework does not quantize grouped GEMMs. A linear layer y = x W' has three matmuls:
the output, the input gradient (g W) and the weight gradient (g' x). Each sums along another dimension, and elements
that are summed share scales. So every operand is needed quantized twice: along its rows and along its columns.

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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from simplan.model.layer import Gemm, LayerKind, LayerSpec, Role

LowPrecision = Literal["fp8", "mxfp8", "nvfp4"]
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "delayed"]
Kept = Literal["wide", "quantized"]
"""Form in which a linear layer saves operands for backward: ``wide`` for unquantized (BF16), or ``quantized``."""

QuantizedWeights = Literal["microbatch", "step", "stored"]
"""Lifetime of quantized weights. ``microbatch``: quantized for every microbatch, freed at the end of its backward.
``step``: quantized once per step and stored in addition to the BF16 weights. ``stored``: quantized at the update and
stored in place of BF16 weights."""

LOW_PRECISIONS: tuple[LowPrecision, ...] = ("fp8", "mxfp8", "nvfp4")
DEFAULT_RECIPE: Fp8Recipe = "tensorwise"
TORCHAO_RECIPES: tuple[Fp8Recipe, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""Recipes of ``torchao.float8`` whose casts are torch operations; the casts of its blockwise recipe are Triton
kernels."""

_SCALE_OF_TENSOR_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFormat:
    """Quantization format of linear layers.

    Attributes:
        precision: Precision of the matmuls, which selects the device's rate.
        recipe: FP8 scaling recipe; equal to ``precision`` for MXFP8 and NVFP4.
        scale_bytes: Bytes of one scale.
        block: Elements in a row that share a scale; matmuls sum along rows. 0 for a full row.
        block_rows: Rows of activations that share a scale; 0 for all of them.
        weight_block_rows: Rows of weights that share a scale; 0 for all of them.
        scale_of_tensor: In addition to block scales there is a per-tensor scale.
        finds_largest: One pass over the operand finds its largest element (amax) before another pass quantizes it.
            Otherwise a pass reads the full block, or the scale comes from earlier steps.
        both_at_once: One pass quantizes along rows and along columns.
        transposes_wide: Columns are quantized as the rows of a transposed BF16 copy.
        wide_weight_gradient: The weight gradient is a BF16 matmul.
        eager: Casts to FP8 are single torch operations through FP32, as in uncompiled torchao. Each matmul has its own
            casts, and copies operands that its kernel needs in another memory layout.
        orders_scales: Matmuls need block scales in another layout than casts write: a small kernel reorders them for
            each operand (TE, common/swizzle and pytorch/csrc/extensions/gemm.cpp; torchao, to_blocked).
        multiple: Required divisor of rows, columns and tokens. For quantized operands, the last 128 x 128 block of
            Transformer Engine may be incomplete (NVIDIA/TransformerEngine at 03328ccb,
            tests/pytorch/test_float8_blockwise_gemm_exact.py: 320 x 64 and 64 x 336); torchao's is assumed not to be.
        experts: Grouped GEMMs of experts are quantized as well.
        any_layout: Matmuls take operands along rows or columns (``KernelRates.fp8_any_layout``).
        keeps_columns: See ``LowPrecisionLinears``.
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
    any_layout: bool = False
    keeps_columns: bool = True

    @property
    def has_one_copy(self) -> bool:
        """True if the copy along rows serves matmuls of both directions."""
        return self.any_layout and self.has_one_scale

    @property
    def has_one_scale(self) -> bool:
        """True for per-tensor scaling, where the scale is the same along rows and along columns."""
        return not (self.block or self.block_rows or self.weight_block_rows)

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element with its part of a scale, along one dimension."""
        return self.element_bits / 8 + (self.scale_bytes / self.block if self.block else 0)

    def quantized_bytes(self, rows: int, columns: int, *, weight: bool = False) -> int:
        """Bytes of a quantized matrix, or of a weight, with its scales; matmuls sum along a row."""
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
        # one FP32 scale per tensor, e4m3 and for gradients e5m2 (torchao's default; TE's Float8CurrentScaling)
        replace(_FP8, recipe="tensorwise", block_rows=0, weight_block_rows=0, finds_largest=True, both_at_once=True),
        # per-tensor scale from the largest elements of earlier steps (TE's DelayedScaling)
        replace(_FP8, recipe="delayed", block_rows=0, weight_block_rows=0, both_at_once=True),
        # one scale per row (torchao); its kernels transpose in BF16 (roofline_utils.py)
        replace(_FP8, recipe="rowwise", transposes_wide=True),
        # weight gradient in BF16, input gradient with weights of one scale (torchao)
        replace(_FP8, recipe="rowwise_with_gw_hp", wide_weight_gradient=True),
        # 1 x 128 for activations and gradients, 128 x 128 for weights (DeepSeek-V3; torchao; TE's Float8BlockScaling)
        replace(_FP8, recipe="blockwise", block=128, weight_block_rows=128, multiple=128),
        # 1 x 32 with 8-bit scales, e8m0 (OCP, torchao; TE's MXFP8BlockScaling)
        _MXFP8,
        # 1 x 16 with e4m3 scales and one FP32 scale per tensor; weight scales, equal in 16 x 16, are expanded. The
        # pass for the largest element also does that of the random Hadamard transform (NVFP4, torchao, TE).
        # Stochastic rounding takes no pass.
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
    any_layout: bool = False,
    keeps_columns: bool = True,
) -> LinearFormat:
    """Quantization format of a training run.

    Args:
        recipe: FP8 scaling recipe; None for ``DEFAULT_RECIPE``, ignored for other precisions.
        experts: Weights of experts are quantized, too.
        eager: Casts to FP8 run in eager mode, for recipes without separate kernels.
        any_layout, keeps_columns: See ``LinearFormat``.
    """
    name = (recipe or DEFAULT_RECIPE) if precision == "fp8" else precision
    form = _FORMATS[precision, name]
    multiple = _FP8.multiple if name == "blockwise" and kept == "quantized" else form.multiple
    eager = eager and name in TORCHAO_RECIPES
    return replace(
        form,
        kept=kept,
        weights=weights,
        experts=experts,
        eager=eager,
        multiple=multiple,
        any_layout=any_layout,
        keeps_columns=keeps_columns,
    )


def linears(layer: LayerSpec, *, experts: bool = False) -> list[Gemm]:
    """Matmuls of a layer that can be quantized, in order; none outside of blocks.

    Routers and adapters stay in BF16 (adapters: NVIDIA-NeMo/Megatron-Bridge at 067f987,
    src/megatron/bridge/peft/utils.py, and NVIDIA/NeMo, nemo/collections/llm/peft/utils.py: linear layers of Megatron
    Core, not of TE).

    Args:
        experts: Include the grouped GEMMs of experts. torchao's linear layers do not cover them; TE's do
            (``GroupedLinear``).
    """
    if layer.kind is not LayerKind.BLOCK:
        return []
    wide = {Role.GATING, Role.ADAPTER, Role.UNQUANTIZED} | (set() if experts else {Role.EXPERTS})
    kernels = zip(layer.kernels, layer.roles, strict=True)
    gemms = [kernel for kernel, roles in kernels if isinstance(kernel, Gemm) and wide.isdisjoint(roles)]
    return [gemm for gemm in gemms if not gemm.image_elements]


def quantized_linears(layer: LayerSpec, form: LinearFormat) -> list[Gemm]:
    """Matmuls of a layer that a format quantizes.

    NVFP4 leaves out layers for multi-token prediction, which then run in BF16 (NVIDIA/Megatron-LM at d98e8a6,
    megatron/core/transformer/multi_token_prediction.py, ``_proj_and_transformer_layer``: "ignoring FP4").
    """
    if layer.mtp_depth and form.precision == "nvfp4":
        return []
    return linears(layer, experts=form.experts)


class Cast(NamedTuple):
    """A quantization of one operand.

    Attributes:
        backward: The cast runs in backward, not in forward.
        reads: Passes that read the unquantized operand.
        writes: Quantized copies written.
        wide_writes: Intermediate BF16 copies written.
        between_bytes: Bytes per element that intermediate operations read and write.
        copies: Quantized copies that are copied once more, into another memory layout.
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
"""Bytes per element of six operations: abs, max, to FP32, times the scale, clamp, to FP8; without the result. An FP32
operand is wider but not upcast, which gives the same sum."""

_EAGER_CAST_KERNELS = 12
"""The six operations, and six on the scale: to FP64, clamp, reciprocal, times the largest number, to FP32, inverse."""

_POWER_OF_TWO_KERNELS = 3


def casts(form: LinearFormat, *, trained: bool = True, propagates: bool = True) -> Iterator[Cast]:
    """Quantizations of a linear layer in one forward and backward.

    Frameworks that save quantized operands make both copies of input and weight in forward, as far as backward needs
    them (TE, linear.py: ``set_usage`` of the quantizers). Frameworks that save BF16 operands quantize along rows in
    forward, and in backward quantize the saved operands again. The output gradient is quantized in backward.

    Args:
        trained: Backward computes the weight gradient; always true if operands are saved in BF16.
        propagates: Backward computes the input gradient; always true if operands are saved in BF16.
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
    """Two casts per FP8 matmul; ``simplan.program.memory.low_precision_footprint`` has those that are copied."""
    kernels = _EAGER_CAST_KERNELS + (0 if form.has_one_scale else _POWER_OF_TWO_KERNELS)
    cast = partial(Cast, reads=0, writes=1, between_bytes=_EAGER_CAST_BYTES)
    yield from (cast(operand, False, kernels=kernels) for operand in ("input", "weight"))
    yield cast("gradient", True, kernels=kernels)
    yield cast("weight", True, kernels=kernels + 1, copies=1)
    if not form.wide_weight_gradient:
        yield from (cast(operand, True, kernels=kernels + 1, copies=1) for operand in ("gradient", "input"))


def fused_gemms(gemms: Iterable[Gemm]) -> list[Gemm]:
    """Matmuls of a layer, with those that share one input fused into one, and likewise their adapters."""
    made: dict[tuple[object, ...], Gemm] = {}
    for gemm in gemms:
        key = _joint(gemm)
        first = made.get(key)
        made[key] = gemm if first is None else replace(first, name=f"{first.name}+{gemm.name}", n=first.n + gemm.n)
    return list(made.values())


def joins(one: Gemm, other: Gemm) -> bool:
    """True if two matmuls of a layer are fused into one."""
    return _joint(one) == _joint(other)


def _joint(gemm: Gemm) -> tuple[object, ...]:
    """Fusion key, equal for matmuls that are fused into one."""
    return gemm.joint or gemm.name, replace(gemm, name="", n=0)
