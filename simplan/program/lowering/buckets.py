"""The buckets in which DDP reduces gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from simplan.model.kernel import TOKEN_TABLE
from simplan.model.layer import LayerSpec

__all__ = ["Bucket", "ddp_buckets"]


class Bucket(NamedTuple):
    """Gradients that are reduced together.

    Attributes:
        num_bytes: Their bytes.
        ready_layer: Position, in the given list of layers, of the layer whose backward completes the bucket.
    """

    num_bytes: int
    ready_layer: int


def ddp_buckets(
    layers: Iterable[LayerSpec], gradient_bytes: int, bucket_bytes: int, first_bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Buckets in the order in which DDP reduces them from the second step on.

    After the first step DDP rebuilds its buckets in the order in which gradients became ready: a bucket takes
    gradients until it holds at least its limit; the first bucket's limit is small so that reduction starts early
    (torch/csrc/distributed/c10d/reducer.cpp, ``compute_bucket_assignment_by_size``). A weight tied to the embedding
    of the same list is ready only with the embedding. Experts of which other ranks have others are not among them, nor
    are frozen weights, which ``gradient_order`` has none of.

    Args:
        layers: The stage's layers in forward order.
        gradient_bytes: Bytes of one gradient element.
        bucket_bytes: Limit of all buckets but the first.
        first_bucket_bytes: Limit of the first.
    """
    stage = list(layers)
    holds_embedding = any(p.name == f"{TOKEN_TABLE}.weight" for layer in stage for p in layer.parameters)
    buckets: list[Bucket] = []
    limit, filled = first_bucket_bytes, 0
    ready_layer = 0
    for position in reversed(range(len(stage))):
        layer = stage[position]
        for index in layer.gradient_order:
            parameter = layer.parameters[index]
            if parameter.expert or (holds_embedding and parameter.name in layer.tied):
                continue
            filled += parameter.num_elements * gradient_bytes
            ready_layer = position
            if filled >= limit:
                buckets.append(Bucket(filled, position))
                limit, filled = bucket_bytes, 0
    if filled:
        buckets.append(Bucket(filled, ready_layer))
    return tuple(buckets)
