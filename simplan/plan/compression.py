"""Gradient compression of a plan: fewer bytes than whole gradients between data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from simplan.base import Count, NonNegative, SpecOfKind

CompressionKind = Literal["fp16", "bf16", "powersgd", "top_k", "random_k", "int8", "int4", "one_bit"]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

_KEYS: Mapping[str, tuple[str, ...]] = {
    "fp16": (),
    "bf16": (),
    "powersgd": ("rank", "start_step", "min_compression", "error_feedback"),
    "top_k": ("ratio", "error_feedback"),
    "random_k": ("ratio", "error_feedback"),
    "int8": ("error_feedback",),
    "int4": ("error_feedback",),
    "one_bit": ("warmup_share", "error_feedback"),
}
"""Keys of each kind besides ``kind``."""

_EXCHANGES = ("all_to_all", "all_gather")
BLOCK = 1024
"""Gradient elements with a common FP32 scale, in ``int8``, ``int4`` and ``one_bit``."""


def _named(data: Any) -> Any:
    """The mapping of ``compression: fp16``."""
    return {"kind": data} if isinstance(data, str) else data


class Compression(SpecOfKind):
    """Compression of the gradients that data-parallel ranks communicate, bucket by bucket.

    ``fp16`` and ``bf16`` all-reduce values of 16 bits. ``powersgd`` all-reduces two thin factors of every matrix
    (Vogels et al. 2019, arXiv:1905.13727); its defaults are those of torch 2.13 (powerSGD_hook.py). ``top_k``
    all-gathers the values of largest magnitude with their indices, which differ between ranks. ``random_k`` all-reduces
    values at random indices, which all ranks draw alike. ``int8``, ``int4`` and ``one_bit`` send
    8 bits, 4 bits or the sign of each value, and one FP32 scale per ``BLOCK`` values. An all-to-all brings each rank
    its part of all gradients, and an all-gather brings back the compressed mean (the all-reduce of 1-bit Adam, Tang et
    al. 2021, arXiv:2102.02888).

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
    ratio: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        0.01, description="for top_k and random_k: fraction of the elements of a bucket that is communicated"
    )
    warmup_share: Fraction = Field(
        0.15, description="for one_bit: fraction of the run's steps, the first, that reduce whole gradients"
    )
    error_feedback: bool = Field(
        True, description="except for fp16 and bf16: errors of compression are added to the next gradients"
    )

    @property
    def blocks(self) -> bool:
        """True if a bucket's next backward waits for its communication, which has several phases."""
        return self.kind in ("powersgd", "int8", "int4", "one_bit")

    @property
    def collectives(self) -> tuple[str, ...]:
        """Collectives of compressed gradients."""
        return {"top_k": ("all_gather",), "int8": _EXCHANGES, "int4": _EXCHANGES, "one_bit": _EXCHANGES}.get(
            self.kind, ("all_reduce",)
        )

    @property
    def keeps_errors(self) -> bool:
        """True if ranks keep the errors of compression between steps."""
        return self.error_feedback and "error_feedback" in _KEYS[self.kind]

    def num_kept(self, num_elements: int) -> int:
        """Elements of a bucket that ``top_k`` and ``random_k`` communicate, at least one."""
        return max(1, int(self.ratio * num_elements))

    def warmup_steps(self, num_steps: int) -> int:
        """Steps with whole gradients before the first compressed one, in a run of ``num_steps``."""
        if self.kind == "powersgd":
            return self.start_step
        return math.ceil(self.warmup_share * num_steps) if self.kind == "one_bit" else 0

    @property
    def words(self) -> str:
        """Description, e.g. ``gradients compressed by powersgd (rank 4)``."""
        number = {
            "powersgd": f" (rank {self.rank})",
            "top_k": f" (ratio {self.ratio:g})",
            "random_k": f" (ratio {self.ratio:g})",
        }.get(self.kind, "")
        return f"gradients compressed by {self.kind}{number}"


CompressionSection = Annotated[
    Compression, BeforeValidator(_named, json_schema_input_type=Compression | CompressionKind)
]


def compressed_matrix_rank(rows: int, columns: int, compression: Compression) -> int:
    """Columns of the factors of a matrix by PowerSGD; 0 for a matrix that stays whole (torch, ``_should_compress``)."""
    rank = min(rows, columns, compression.rank)
    return rank if (rows + columns) * rank * compression.min_compression < rows * columns else 0


def quantized_part(num_elements: int, num_ranks: int) -> int:
    """Elements of a bucket that each rank averages with ``int8``, ``int4`` or ``one_bit``: parts of whole blocks."""
    return -(-num_elements // (num_ranks * BLOCK)) * BLOCK
