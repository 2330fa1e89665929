"""Gradient compression of a plan: fewer bytes than whole gradients between data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from simplan.base import Count, NonNegative, SpecOfKind, named_kind

CompressionKind = Literal["fp16", "bf16", "powersgd", "top_k", "random_k", "int8", "int4", "one_bit", "one_bit_adam"]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

_KEYS: Mapping[str, tuple[str, ...]] = {
    "fp16": (),
    "bf16": (),
    "powersgd": ("rank", "start_step", "min_compression", "batched", "error_feedback"),
    "top_k": ("ratio", "error_feedback"),
    "random_k": ("ratio", "error_feedback"),
    "int8": ("error_feedback",),
    "int4": ("error_feedback",),
    "one_bit": ("warmup_share", "error_feedback"),
    "one_bit_adam": ("warmup_share",),
}
"""Keys of each kind besides ``kind``."""

_EXCHANGES = ("all_to_all", "all_gather")
_BITS: Mapping[str, int] = {"int8": 8, "int4": 4, "one_bit": 1, "one_bit_adam": 1}
"""Bits of each value, in kinds that send few."""
BLOCK = 1024
"""Elements with a common FP32 scale, in kinds that send few bits of each."""


class Compression(SpecOfKind):
    """Compression of the gradients that data-parallel ranks communicate, bucket by bucket.

    ``fp16`` and ``bf16`` all-reduce values of 16 bits. ``powersgd`` all-reduces two thin factors of every matrix
    (Vogels et al. 2019, arXiv:1905.13727); its defaults are those of torch 2.13 (powerSGD_hook.py). ``top_k``
    all-gathers the values of largest magnitude with their indices, which differ between ranks. ``random_k`` all-reduces
    values at random indices, which all ranks draw alike. ``int8``, ``int4`` and ``one_bit`` send
    8 bits, 4 bits or the sign of each value, and one FP32 scale per ``BLOCK`` values. An all-to-all brings each rank
    its part of all gradients, and an all-gather brings back the compressed mean (the all-reduce of 1-bit Adam, Tang et
    al. 2021, arXiv:2102.02888).

    ``one_bit_adam`` is that optimizer. After the first steps the variance is frozen, gradients stay local, and ranks
    average the momentum of Adam or AdamW once a step, as ``one_bit`` does gradients, with error feedback.

    Error feedback adds to each gradient what compression left out of the previous ones (Karimireddy et al. 2019,
    arXiv:1901.09847).
    """

    keys_of_kinds: ClassVar[Mapping[str, tuple[str, ...]]] = _KEYS

    kind: CompressionKind = Field(description="what a compressed gradient is")
    rank: Count = Field(1, description="for powersgd: columns of the two factors of a matrix")
    start_step: Annotated[int, Field(ge=2, le=10**12)] = Field(
        1000, description="for powersgd: steps with whole gradients before compression starts, 2 or more"
    )
    min_compression: NonNegative = Field(
        2.0, description="for powersgd: matrices with fewer elements than this times those of their factors stay whole"
    )
    batched: bool = Field(
        False, description="for powersgd: all gradients of a bucket are one square matrix, which costs more accuracy"
    )
    ratio: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        0.01, description="for top_k and random_k: fraction of the elements of a bucket that is communicated"
    )
    warmup_share: Fraction = Field(
        0.15,
        description="for one_bit and one_bit_adam: fraction of the run's steps, the first, that reduce whole gradients",
    )
    error_feedback: bool = Field(
        True,
        description="errors of compression are added to the next gradients; fp16 and bf16 have none, and one_bit_adam "
        "always has",
    )

    @model_validator(mode="after")
    def _of_optimizer(self) -> Compression:
        if self.of_momentum and not self.warmup_share:
            raise ValueError("has warmup_share = 0, and the variance is that of the first steps; use 0.15")
        return self

    @property
    def _own_keys(self) -> tuple[str, ...]:
        """Keys of the kind; one matrix has no minimum for others."""
        return tuple(key for key in super()._own_keys if not (self.batched and key == "min_compression"))

    @property
    def blocks(self) -> bool:
        """True if a bucket's next backward waits for its communication, which has several phases."""
        return self.kind == "powersgd" or self.bits is not None

    @property
    def bits(self) -> int | None:
        """Bits of each value that is sent, besides the scales; None in kinds that do not round values to few bits."""
        return _BITS.get(self.kind)

    @property
    def of_momentum(self) -> bool:
        """True if the optimizer's momentum is communicated, and not gradients."""
        return self.kind == "one_bit_adam"

    @property
    def depends_on_buckets(self) -> bool:
        """True if the values of a bucket are compressed together."""
        return self.kind not in ("fp16", "bf16", "one_bit_adam")

    @property
    def collectives(self) -> tuple[str, ...]:
        """Collectives of compressed gradients."""
        if self.bits is not None:
            return _EXCHANGES
        return ("all_gather",) if self.kind == "top_k" else ("all_reduce",)

    @property
    def keeps_errors(self) -> bool:
        """True if ranks keep the errors of compression between steps."""
        return self.of_momentum or (self.error_feedback and "error_feedback" in _KEYS[self.kind])

    @property
    def keeps_state(self) -> bool:
        """True if ranks keep errors, or factors, between steps."""
        return self.keeps_errors or self.kind == "powersgd"

    def num_kept(self, num_elements: int) -> int:
        """Elements of a bucket that ``top_k`` and ``random_k`` communicate, at least one."""
        return max(1, int(self.ratio * num_elements))

    def warmup_steps(self, num_steps: int) -> int:
        """Steps with whole gradients before the first compressed one, in a run of ``num_steps``."""
        if self.kind == "powersgd":
            return self.start_step
        return math.ceil(self.warmup_share * num_steps) if "warmup_share" in _KEYS[self.kind] else 0

    @property
    def words(self) -> str:
        """Description, e.g. ``gradients compressed by powersgd (rank 4)``."""
        number = {
            "powersgd": f" (rank {self.rank}, batched)" if self.batched else f" (rank {self.rank})",
            "top_k": f" (ratio {self.ratio:g})",
            "random_k": f" (ratio {self.ratio:g})",
        }.get(self.kind, "")
        return f"{'momentum' if self.of_momentum else 'gradients'} compressed by {self.kind}{number}"


CompressionSection = Annotated[
    Compression, BeforeValidator(named_kind, json_schema_input_type=Compression | CompressionKind)
]


def compressed_matrix_rank(rows: int, columns: int, compression: Compression) -> int:
    """Columns of the factors of a matrix by PowerSGD; 0 for a matrix that stays whole (torch, ``_should_compress``)."""
    rank = min(rows, columns, compression.rank)
    return rank if (rows + columns) * rank * compression.min_compression < rows * columns else 0


def in_whole_blocks(sizes: Iterable[int]) -> list[int]:
    """Elements of tensors, each padded to whole blocks, so that tensors have no scale in common."""
    return [-(-size // BLOCK) * BLOCK for size in sizes]


def quantized_part(num_elements: int, num_ranks: int) -> int:
    """Elements that each rank averages of those compressed to few bits: parts of whole blocks."""
    return -(-num_elements // (num_ranks * BLOCK)) * BLOCK
