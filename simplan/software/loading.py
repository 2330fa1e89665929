"""A framework's way of loading a checkpoint before the first step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simplan.base import Spec

LoadingMethod = Literal["device_map", "cpu", "broadcast", "rank0", "zero_init", "shards"]
"""Method of loading; ``SoftwareSpec.loading`` says what each does."""
LoadingOption = Literal["auto", "none", "device_map", "cpu", "broadcast", "rank0", "zero_init", "shards"]
"""Method that a scenario chooses; ``auto`` for that of the framework, ``none`` for random weights."""


class CheckpointLoading(Spec):
    """A framework's way of loading a checkpoint where a scenario says nothing (``SoftwareSpec.loading``).

    Attributes:
        replicated: Method of ranks that hold whole parameters; None where that is not modeled.
        sharded: Method of ranks that shard parameters; None likewise. Ranks that split layers read their own shards.
        quantized: Method for weights that a library quantizes while they are loaded; None for that of others.
        methods: Methods that a scenario may choose, besides random weights.
        mapped: Checkpoints are mapped into memory: only tensors that are cast, quantized or stacked take memory of
            their own, and pages of the file, which the kernel can drop, are those of all ranks of a node together.
        keeps_unsharded: Sharding frees the whole tensors of a model on a device at its end only.
        stacks_experts: Experts that are one tensor are stacked from the tensors of a checkpoint.
        flattens_on_host: Trained shards are copied into one flat buffer on the host, and back.
    """

    replicated: LoadingMethod | None = None
    sharded: LoadingMethod | None = None
    quantized: LoadingMethod | None = None
    methods: Annotated[tuple[LoadingMethod, ...], Field(strict=False)] = ()
    mapped: bool = True
    keeps_unsharded: bool = False
    stacks_experts: bool = False
    flattens_on_host: bool = False
