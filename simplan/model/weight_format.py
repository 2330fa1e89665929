"""Formats in which frozen weights are stored: packed elements, their scales, and what unpacking a weight takes.

Sources, called by these names below:

- bitsandbytes: bitsandbytes 0.50.2, functional.py (quantize_4bit, QuantState), nn/modules.py (Params4bit, Int8Params),
  autograd/_functions.py (MatMul4Bit, MatMul8bitLt); Dettmers et al. 2023 (arXiv:2305.14314) for NF4, Dettmers et al.
  2022 (arXiv:2208.07339) for LLM.int8
- torchao: torchao 0.18.0, quantization/quantize_/workflows/nf4/nf4_tensor.py
- GPTQ, AWQ: AutoGPTQ's and AutoAWQ's packed linear layers (qweight, qzeros, scales; GPTQ also g_idx)
- AQLM: aqlm 1.1.7, inference.py (QuantizedLinear) and inference_kernels/cuda_kernel.py (code1x16_matmat_dequant);
  Egiazarian et al. 2024 (arXiv:2401.06118)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

WeightFormatName = Literal["nf4", "fp4", "int8", "fp8", "gptq_int4", "awq_int4", "aqlm_2bit"]
WeightLibrary = Literal["bitsandbytes", "torchao"]
WeightStorage = Literal["uint8", "bf16", "fp16", "fp32"]

FOUR_BITS: tuple[WeightFormatName, ...] = ("nf4", "fp4", "gptq_int4", "awq_int4")
PREQUANTIZED: tuple[WeightFormatName, ...] = ("gptq_int4", "awq_int4", "aqlm_2bit")
"""Formats of checkpoints whose weights were quantized before."""
BLOCK_SIZE = 64
"""Elements per scale of bitsandbytes' and torchao's 4-bit formats."""
SCALES_PER_BLOCK = 256
"""First-level scales per second-level scale of double quantization."""
GROUP_SIZE = 128
"""Elements of a row per scale of GPTQ and AWQ checkpoints."""
STORAGE_BYTES: dict[WeightStorage, int] = {"uint8": 1, "bf16": 2, "fp16": 2, "fp32": 4}


class UnpackingSteps(NamedTuple):
    """Single operations of torch that unpack a weight, instead of one kernel.

    Attributes:
        peak_bytes, peak_copies: Bytes per element at their peak: fixed ones, and copies as wide as the result.
        traffic_bytes, traffic_copies: Bytes per element that they read and write, likewise.
        kernels: Number of these operations.
    """

    peak_bytes: int
    peak_copies: int
    traffic_bytes: int
    traffic_copies: int
    kernels: int


_TORCHAO_STEPS = UnpackingSteps(8, 3, 15, 9, 16)
"""At the peak two indices of 8 bytes per pair of elements, their values, the scaled values and the result
(get_original_weight)."""
_GPTQ_STEPS = UnpackingSteps(5, 0, 15, 1, 5)
"""Shift to INT32, cast to INT8, mask in place, difference to the zeros, product with the scales (AutoGPTQ/AutoGPTQ at
179776b, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, forward of many rows)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """Stored form of a frozen weight.

    Attributes:
        name: Format, with its variant, as in keys of layers and in formulas.
        element_bits: Bits per element, without scales.
        scales: Pairs of the bytes of a scale and the elements that share it, by level.
        row_bytes, column_bytes: Bytes per output and per input feature.
        tensor_bytes: Bytes per weight: tables and offsets.
        storage_bytes: Bytes of an element of the packed tensor; FSDP shards it in whole ones.
        shards_scales: Sharded data parallelism shards and gathers the scales together with the packed tensor (torchao).
            Else every rank holds all of them, since they are attributes of the parameter and no parameters themselves
            (bitsandbytes, Params4bit.quant_state).
        keeps_input: The matmul saves its input for backward although its weight is frozen (bitsandbytes, MatMul8bitLt;
            before 0.43.2 also MatMul4Bit).
        casts_unpacked: A weight is unpacked in the type in which it was quantized, and then cast.
        has_buffer: Forward unpacks every weight into one buffer, which stays.
        quantizes_input: Forward multiplies integers: the input is quantized, and the result is unpacked from INT32.
        unpacked_scale_elements: Elements per scale that unpacking expands to FP32 first; 0 for none.
        steps: Single operations that unpack a weight; None for one kernel.
        keeps_weight: autograd keeps the unpacked weight for backward, which does not unpack it again, as of AutoGPTQ's
            plain tensors.
    """

    name: str
    element_bits: int
    scales: tuple[tuple[int, int], ...] = ()
    row_bytes: int = 0
    column_bytes: int = 0
    tensor_bytes: int = 0
    storage_bytes: int = 1
    shards_scales: bool = False
    keeps_input: bool = False
    casts_unpacked: bool = False
    has_buffer: bool = False
    quantizes_input: bool = False
    unpacked_scale_elements: int = 0
    steps: UnpackingSteps | None = None
    keeps_weight: bool = False

    def packed_bytes(self, elements: int) -> int:
        """Bytes of the packed tensor of a weight."""
        return self.storage_bytes * -(-elements * self.element_bits // (8 * self.storage_bytes))

    def scale_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of all scales, offsets and tables of a weight (outputs x inputs, or experts of such)."""
        elements = math.prod(shape)
        blocks = sum(width * -(-elements // shared) for width, shared in self.scales)
        rows = math.prod(shape[:-1]) * self.row_bytes
        return blocks + rows + shape[-1] * self.column_bytes + self.tensor_bytes

    def replicated_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a weight that every rank holds, however many share its packed tensor."""
        return self.tensor_bytes if self.shards_scales else self.scale_bytes(shape)

    def divided_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a weight that sharded data parallelism divides and all-gathers."""
        return self.packed_bytes(math.prod(shape)) + self.scale_bytes(shape) - self.replicated_bytes(shape)

    def shard_bytes(self, shape: Sequence[int], num_shards: int, shard: int = 0) -> int:
        """Bytes of a weight that one of ``num_shards`` ranks holds; shard 0 has the padded size."""
        units = -(-self.divided_bytes(shape) // self.storage_bytes)
        each = -(-units // num_shards)
        return self.storage_bytes * max(0, min(each, units - shard * each)) + self.replicated_bytes(shape)

    def gathered_bytes(self, shape: Sequence[int], num_shards: int) -> int:
        """Bytes that an all-gather of a weight moves, padded to equal shards."""
        return num_shards * (self.shard_bytes(shape, num_shards) - self.replicated_bytes(shape))

    def scratch_bytes(self, n: int, k: int, rows: int, width: int, *, forward: bool, experts: int = 1) -> int:
        """Bytes next to input and result while a matmul unpacks its weight and runs.

        The unpacked weight is there during the matmul. What unpacking takes beyond it is gone before the result exists.

        Args:
            n, k: Outputs and inputs.
            rows: Rows of the input.
            width: Bytes per element of the unpacked weight and of the result.
            forward: The result has n columns; in backward k.
            experts: Matrices of the weight.
        """
        elements, result = experts * n * k, rows * (n if forward else k) * width
        if forward and self.quantizes_input:  # INT8 input, INT32 result
            return rows * (k + 4 * n)
        if (self.keeps_weight and not forward) or (self.has_buffer and forward):
            return 0
        steps, unpacking = self.steps, elements * width * (1 + self.casts_unpacked)
        if steps is not None:
            unpacking = elements * (steps.peak_bytes + steps.peak_copies * width)
            unpacking += width * -(-elements // self.scales[0][1])
        if self.unpacked_scale_elements:
            unpacking += 4 * -(-elements // self.unpacked_scale_elements)
        held = elements * width if self.keeps_weight else 0  # counted as a saved tensor
        return max(elements * width, unpacking - result) - held

    def unpacked_traffic(self, n: int, k: int, width: int) -> int:
        """Bytes read and written to unpack a weight of n x k once."""
        if self.steps is not None:
            return (self.steps.traffic_bytes + self.steps.traffic_copies * width) * n * k
        return self.packed_bytes(n * k) + self.scale_bytes((n, k)) + width * n * k

    @property
    def unpacking_kernels(self) -> int:
        """Kernels that unpack a weight once."""
        return self.steps.kernels if self.steps is not None else 1 + bool(self.unpacked_scale_elements)


def weight_format(
    name: WeightFormatName,
    *,
    library: WeightLibrary,
    double_quantization: bool,
    block_size: int,
    storage: WeightStorage,
    width: int,
    compiled: bool,
) -> WeightFormat:
    """Stored form of the frozen weights of a run.

    Args:
        block_size: Elements per scale.
        width: Bytes per element of the weights before they were quantized.
        compiled: torch.compile fuses what single operations would do.
    """
    wide = WeightFormat(name=name, element_bits=4)
    if name in ("nf4", "fp4") and library == "torchao":
        # uint8 pairs, an int8 scale per block; a factor per 256 blocks, their mean and the table as wide as the weights
        levels = ((1, block_size), (width, block_size * SCALES_PER_BLOCK))
        tables = 17 * width
        return replace(
            wide,
            name=f"{name}-torchao",
            scales=levels,
            tensor_bytes=tables,
            shards_scales=True,
            steps=None if compiled else _TORCHAO_STEPS,
        )
    if name in ("nf4", "fp4"):
        odd = f"-b{block_size}" * (block_size != BLOCK_SIZE)
        packed = replace(wide, name=f"{name}{odd}", storage_bytes=STORAGE_BYTES[storage])
        if not double_quantization:  # FP32 per block; a table of 16 numbers in FP32
            return replace(packed, scales=((4, block_size),), tensor_bytes=64)
        # a byte per block, FP32 per 256 blocks, an FP32 offset, and tables of 16 and 256 numbers in FP32
        return replace(
            packed,
            name=f"{packed.name}-dq",
            scales=((1, block_size), (4, block_size * SCALES_PER_BLOCK)),
            tensor_bytes=64 + 1024 + 4,
            unpacked_scale_elements=block_size,
        )
    if name == "int8":  # FP32 per row
        return replace(wide, element_bits=8, row_bytes=4, keeps_input=True, quantizes_input=True)
    if name == "fp8":  # one FP32 scale per weight
        return replace(wide, element_bits=8, tensor_bytes=4, shards_scales=True)
    if (
        name == "aqlm_2bit"
    ):  # 16 bits per group of 8 inputs, which name one of the 65,536 vectors of a table; row scales
        table = 2**16 * 8 * width
        return replace(wide, element_bits=2, row_bytes=width, tensor_bytes=table, storage_bytes=2, keeps_input=True)
    # a 16-bit scale and a 4-bit zero per group of inputs; GPTQ also the group of each input in INT32
    levels = ((2, block_size), (1, 2 * block_size))
    packed = replace(wide, scales=levels, storage_bytes=4, shards_scales=True)
    return packed if name == "awq_int4" else replace(packed, column_bytes=4, steps=_GPTQ_STEPS, keeps_weight=True)
