"""What the training framework brings: state precision, buckets, buffers and hooks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from simplan.spec.base import Count, NonNegative, Spec

__all__ = ["SoftwareSpec", "StateBytes"]


class StateBytes(Spec):
    """Bytes per parameter, as the framework keeps them in memory during training.

    Attributes:
        parameter: The weights the forward pass reads.
        gradient: The accumulated gradient.
        master: A separate fp32 copy of the weights, when there is one.
        activation: Bytes of one activation element that the backward pass keeps.
        boundary: Bytes of one element sent between stages.
    """

    parameter: Count
    gradient: Count
    master: NonNegative = 0
    activation: Count
    boundary: Count


class SoftwareSpec(Spec):
    """A software profile: everything about a framework that moves time or memory.

    Attributes:
        id: Catalogue name.
        state_bytes: By training precision; a precision that is missing is not supported by the profile.
        bucket_bytes: Size at which DDP closes a gradient bucket.
        first_bucket_bytes: Size of the first bucket, smaller so that the reduction starts early.
        grad_overlap: Buckets are reduced while the backward pass still runs.
        gradient_as_bucket_view: Gradients live inside the buckets, so buckets cost no extra memory.
        preallocated_receives: The pipeline runtime keeps one receive buffer per microbatch and direction.
        fused_optimizer: The optimizer step is one kernel over all states, without temporaries.
        context_bytes: Device memory of the driver context and the communication library, by device kind.
        sources: Field name -> where its value comes from.
    """

    id: str
    state_bytes: dict[Literal["fp32", "tf32", "fp16", "bf16"], StateBytes]
    bucket_bytes: Count
    first_bucket_bytes: Count
    grad_overlap: bool = True
    gradient_as_bucket_view: bool = True
    preallocated_receives: bool = True
    fused_optimizer: bool = True
    context_bytes: dict[Literal["gpu", "tpu", "cpu", "other"], NonNegative] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)
