"""What plain data parallelism adds to a stage: DDP's buckets beside the last backward, ZeRO-1's update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.program.buckets import ddp_buckets
from simplan.program.partition_states import partition_states
from simplan.program.program import Phase
from simplan.search.layers import Layers
from simplan.search.part import Part
from simplan.spec.layer import CollectiveKind
from simplan.spec.software import SoftwareSpec

__all__ = ["Bucketed", "Dealt", "MessageTime", "bucketed", "dealt_update", "reduced_backward_s"]

MessageTime = Callable[[CollectiveKind, int], float]
"""Seconds of a collective of so many bytes in some group."""

_ENDLESS = 2**62


class Bucketed(NamedTuple):
    """DDP's buckets of a stage, in the order in which they are reduced.

    Attributes:
        left_s: ``(buckets,)``: time of the reductions of each and of all after it.
        ready: ``(buckets,)``: of each, how many layers backward has passed once its gradients are there, less one.
    """

    left_s: NDArray[np.float64]
    ready: NDArray[np.int64]


def bucketed(
    layers: Layers, part: Part, software: SoftwareSpec, bucket_bytes: int | None, message_s: MessageTime
) -> Bucketed:
    """The buckets of a stage.

    Args:
        layers: The layers.
        part: The stage.
        software: Sizes of buckets.
        bucket_bytes: The plan's own size.
        message_s: All-reduces of the data-parallel group.
    """
    limits = (software.bucket_bytes, software.first_bucket_bytes)
    if not software.grad_overlap:
        limits = (_ENDLESS, _ENDLESS)
    elif bucket_bytes is not None:
        limits = (bucket_bytes, bucket_bytes)
    buckets = ddp_buckets([layers.specs[i] for i in part.layers], layers.state.gradient, *limits)
    last = len(part.layers) - 1
    seconds = np.array([message_s(CollectiveKind.ALL_REDUCE, bucket.num_bytes) for bucket in buckets])
    return Bucketed(
        np.cumsum(seconds[::-1])[::-1],
        np.array([last - bucket.ready_layer for bucket in buckets], np.int64),
    )


def reduced_backward_s(layers: Layers, part: Part, buckets: Bucketed) -> float:
    """The last backward of a stage: gradients are divided layer by layer, and reduced in buckets beside what is left.

    Buckets run one after the other on a stream of their own, so the last one ends when the one that hindered most and
    all after it are through.

    Args:
        layers: The layers.
        part: The stage.
        buckets: Of the stage.
    """
    seconds, computed_s = layers.passed_back(part, tied=part.tied)
    passed_s = np.cumsum(seconds)
    ended_s = (passed_s - seconds + computed_s)[buckets.ready]
    return max(float(passed_s[-1]), float((ended_s + buckets.left_s).max(initial=0.0)))


class Dealt(NamedTuple):
    """ZeRO-1 on the stages of a pipeline rank.

    Attributes:
        elements: Largest number of parameters that one rank of the shard group updates.
        update_s: Longest time that one of them needs.
        broadcast_s: Until all have handed round what they updated.
    """

    elements: int
    update_s: float
    broadcast_s: float


def dealt_update(layers: Layers, parts: Sequence[Part], num_shards: int, message_s: MessageTime) -> Dealt:
    """Whole parameters, each updated by one rank of the shard group and then broadcast.

    Args:
        layers: The layers.
        parts: All stages of the pipeline rank.
        num_shards: Ranks of the group.
        message_s: Broadcasts of the shard group.
    """
    keys, sizes = [], []
    for part in parts:
        for i in part.layers:
            spec = layers.specs[i]
            for parameter in spec.parameters:
                if not (part.tied and parameter.name in spec.tied):
                    keys.append(i)
                    sizes.append(parameter.num_elements)
    owned: list[dict[int, int]] = [{} for _ in range(num_shards)]
    for layer, size, owner in zip(keys, sizes, partition_states(sizes, num_shards), strict=True):
        owned[owner][layer] = owned[owner].get(layer, 0) + size
    update_s = max(sum(layers.seconds(i, Phase.OPTIMIZER, n) for i, n in own.items()) for own in owned)
    filled = [sum(own.values()) for own in owned]
    sent = [n * layers.state.parameter for n in filled if n]
    *_, broadcast_s = accumulate((message_s(CollectiveKind.BROADCAST, num_bytes) for num_bytes in sent), initial=0.0)
    return Dealt(max(filled), update_s, broadcast_s)
