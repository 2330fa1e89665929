"""DDP hooks with gradient compression: buckets, or the optimizer's momentum, are compressed and communicated.

Kernels, collectives and buffers are those of the executor's communication hooks (executor/distributed/compression.py),
which are torch's where torch has them. Bytes per element are what single kernels of eager torch read and write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from simplan.model.layer import CollectiveKind, LayerSpec
from simplan.plan.compression import (
    BLOCK,
    Compression,
    CompressionKind,
    compressed_matrix_rank,
    in_whole_blocks,
    quantized_part,
)
from simplan.program.action import Action
from simplan.program.lowering.hooks import Bucket, DdpHooks, ddp_buckets
from simplan.program.lowering.stage import Stages
from simplan.program.lowering.writer import RankWriter
from simplan.program.memory.states import RankStates
from simplan.program.program import BucketWork, Communication, LayerWork, MemoryCategory, MemoryEffect, Phase, Stream
from simplan.program.timeline import SpanKind

_FP32 = 4
_INDEX = 8  # of torch's selections; indices are sent in 4 bytes
_ADD = 3 * _FP32  # two reads and a write per element
_PASS = 2 * _FP32


class BucketStep(NamedTuple):
    """Kernels on a bucket, or a collective, in the order of a communication hook.

    Attributes:
        what: Kernels: ``compress``, ``decompress`` or the like. Collectives: what is communicated.
        kind: Kind of a collective; None for kernels.
        num_bytes: Bytes of the collective, or read and written by the kernels.
        num_kernels, flops, num_selected: See ``BucketWork``.
        during_bytes: Buffers that exist only meanwhile.
        kept_bytes: Change of the buffers that exist afterwards.
    """

    what: str
    kind: CollectiveKind | None
    num_bytes: int
    num_kernels: int = 0
    flops: int = 0
    num_selected: int = 0
    during_bytes: int = 0
    kept_bytes: int = 0

    @property
    def effects(self) -> tuple[MemoryEffect, ...]:
        """Change of the buffers; a collective has no other ones than those that exist afterwards."""
        during = max(self.kept_bytes, 0 if self.kind is not None else self.during_bytes)
        return (MemoryEffect(MemoryCategory.BUFFERS, during, self.kept_bytes),) if during or self.kept_bytes else ()


Steps = Iterator[BucketStep]


def bucket_steps(compression: Compression, bucket: Bucket, num_ranks: int) -> Steps:
    """Yields the steps of one bucket of FP32 gradients over a group of ranks."""
    steps = _STEPS[compression.kind] if compression.bits is None else _quantized
    yield from steps(compression, bucket, num_ranks)


def state_bytes(compression: Compression, bucket: Bucket, num_ranks: int) -> int:
    """Bytes that a rank keeps between steps for a bucket: errors, and factors of PowerSGD."""
    kept = bucket.num_bytes if compression.keeps_errors else 0
    if compression.bits is not None:  # of all parts, and of the mean of the own part
        part = quantized_part(bucket.num_bytes // _FP32, num_ranks)
        return _FP32 * part * (num_ranks + 1) if kept else 0
    if compression.kind != "powersgd":
        return kept
    if not compression.batched:
        return kept + _FP32 * sum(_factors(compression, bucket))
    side, rank = _square(compression, bucket)  # padded to a square; P is made anew
    return _FP32 * (side * side * compression.keeps_errors + side * rank)


def _sixteen_bits(compression: Compression, bucket: Bucket, num_ranks: int) -> Steps:
    del compression, num_ranks
    half = bucket.num_bytes // 2
    elements = bucket.num_bytes // _FP32
    yield BucketStep("compress", None, elements * (_FP32 + 2 + 2 + 2), 2, kept_bytes=half)
    yield BucketStep("values", CollectiveKind.ALL_REDUCE, half)
    yield BucketStep("decompress", None, elements * (2 + _FP32), 1, kept_bytes=-half)


def _top_k(compression: Compression, bucket: Bucket, num_ranks: int) -> Steps:
    elements = bucket.num_bytes // _FP32
    kept = compression.num_kept(elements)
    sent, added = 2 * _FP32 * kept, _ADD * elements * compression.keeps_errors
    gathered = num_ranks * sent
    # values are picked, indices are cast, both are joined, and values become zero
    picked = kept * (_INDEX + _PASS + _INDEX + _FP32 + 2 * _PASS + _INDEX + _FP32)
    yield BucketStep(
        "compress",
        None,
        added + _PASS * elements + picked,
        7 + compression.keeps_errors,
        num_selected=elements,
        during_bytes=max(bucket.num_bytes + kept * (_FP32 + _INDEX), kept * (_FP32 + _INDEX + _FP32) + sent),
        kept_bytes=sent + kept * _INDEX,
    )
    yield BucketStep("values and indices", CollectiveKind.ALL_GATHER, gathered, kept_bytes=gathered)
    yield BucketStep(
        "decompress",
        None,
        (_FP32 + _PASS) * elements + num_ranks * kept * (_FP32 + _ADD),
        2 + num_ranks,
        kept_bytes=-gathered - sent - kept * _INDEX,
    )


def _random_k(compression: Compression, bucket: Bucket, num_ranks: int) -> Steps:
    del num_ranks
    elements = bucket.num_bytes // _FP32
    kept = compression.num_kept(elements)
    sent, added = _FP32 * kept, _ADD * elements * compression.keeps_errors
    yield BucketStep(
        "compress",
        None,
        added + _INDEX * elements + kept * (2 * _INDEX + _INDEX + _PASS + _INDEX + _FP32),
        4 + compression.keeps_errors,
        num_selected=elements,
        during_bytes=_INDEX * (elements + kept),
        kept_bytes=sent + _INDEX * kept,
    )
    yield BucketStep("values", CollectiveKind.ALL_REDUCE, sent)
    yield BucketStep(
        "decompress",
        None,
        _FP32 * elements + kept * (_PASS + _INDEX + _PASS),
        3,
        kept_bytes=-sent - _INDEX * kept,
    )


QUANTIZER_KERNELS: Mapping[int, tuple[tuple[int, int], tuple[int, int]]] = {
    8: ((38, 5), (14, 4)),
    4: ((43, 8), (25, 6)),
    1: ((34, 7), (14, 3)),
}
"""By bits, bytes per element and kernels to compress (magnitudes, scales of blocks, packed numbers or signs), and back.

A test compares the bytes with those of the executor's functions."""


def _quantized(compression: Compression, bucket: Bucket, num_ranks: int) -> Steps:
    bits, feeds = compression.bits, compression.keeps_errors
    assert bits is not None, compression
    (encode, encode_kernels), (decode, decode_kernels) = QUANTIZER_KERNELS[bits]
    part = quantized_part(bucket.num_bytes // _FP32, num_ranks)
    padded = num_ranks * part
    copies = padded * _FP32 != bucket.num_bytes  # of values that are no whole blocks for every rank
    sent = num_ranks * (part * bits // 8 + _FP32 * (part // BLOCK))
    # errors are added, and what is sent is taken from the sum
    errors, error_kernels = (2 * _ADD + decode, 2 + decode_kernels) if feeds else (0, 0)
    whole = _FP32 * padded
    temporary = whole + padded  # values, and the bytes that they are made of
    yield BucketStep(
        "compress",
        None,
        padded * ((_FP32 + _PASS) * copies + encode + errors),
        2 * copies + encode_kernels + error_kernels,
        during_bytes=whole * copies + sent * feeds + temporary,
        kept_bytes=sent,
    )
    yield BucketStep("parts", CollectiveKind.ALL_TO_ALL, sent, kept_bytes=sent)
    yield BucketStep(
        "average",
        None,
        padded * (decode + _FP32) + part * (_FP32 + encode + errors),
        1 + decode_kernels + encode_kernels + error_kernels,
        during_bytes=max(temporary, whole + _FP32 * part),
    )
    yield BucketStep("averages", CollectiveKind.ALL_GATHER, sent)
    yield BucketStep(
        "decompress",
        None,
        padded * (decode + _PASS),
        1 + decode_kernels,
        during_bytes=temporary,
        kept_bytes=-2 * sent,
    )


def _square(compression: Compression, bucket: Bucket) -> tuple[int, int]:
    """Rows of the square matrix of a bucket, and columns of its factors."""
    side = math.isqrt(bucket.num_bytes // _FP32 - 1) + 1
    return side, min(compression.rank, side)


def _factors(compression: Compression, bucket: Bucket) -> tuple[int, int]:
    """Elements of the factors P and Q of the matrices of a bucket."""
    ranks = [(rows, columns, compressed_matrix_rank(rows, columns, compression)) for rows, columns in _matrices(bucket)]
    return sum(rows * rank for rows, _, rank in ranks), sum(columns * rank for _, columns, rank in ranks)


def _matrices(bucket: Bucket) -> Iterator[tuple[int, int]]:
    """Yields rows and columns of all gradients, as PowerSGD views them."""
    for rows, *others in bucket.shapes:
        columns = 1
        for size in others:
            columns *= size
        yield rows, columns


def _batched_powersgd(compression: Compression, bucket: Bucket) -> Steps:
    """Q is made orthonormal, P = M Q, P likewise, Q = M^T P, and the gradients are P Q^T, for one square matrix M."""
    side, rank = _square(compression, bucket)
    elements, padded, feeds = bucket.num_bytes // _FP32, side * side, compression.keeps_errors
    whole, factor, multiplied = _FP32 * padded, _FP32 * side * rank, 2 * side * side * rank
    passes, kernels = 2 * rank, 4 * rank  # of a QR decomposition
    orthonormal = (passes + 2) * factor, kernels + 1  # and its result
    flops = multiplied + 2 * rank * rank * side
    yield BucketStep(
        "compress",
        None,
        _FP32 * padded + _PASS * elements + _ADD * padded * feeds + orthonormal[0] + whole + 2 * factor,
        3 + feeds + orthonormal[1],
        flops,
        during_bytes=whole + 3 * factor,
        kept_bytes=whole + factor,
    )
    yield BucketStep("P", CollectiveKind.ALL_REDUCE, factor)
    yield BucketStep(
        "multiply",
        None,
        orthonormal[0] + whole + 2 * factor,
        orthonormal[1] + 1,
        flops,
        during_bytes=3 * factor,
        kept_bytes=factor,
    )
    yield BucketStep("Q", CollectiveKind.ALL_REDUCE, factor)
    yield BucketStep(
        "decompress",
        None,
        _PASS * side * rank + whole + 2 * factor + _ADD * padded * feeds + _PASS * elements,
        3 + feeds,
        multiplied,
        during_bytes=whole,
        kept_bytes=-whole - 2 * factor,
    )


def _powersgd(compression: Compression, bucket: Bucket, num_ranks: int) -> Steps:
    """Torch's hook: Q is made orthonormal, P = M Q, P likewise, Q = M^T P, and the gradient is P Q^T."""
    del num_ranks
    if compression.batched:
        yield from _batched_powersgd(compression, bucket)
        return
    split = [(rows, columns, compressed_matrix_rank(rows, columns, compression)) for rows, columns in _matrices(bucket)]
    made = [each for each in split if each[2]]
    left = sum(rows * columns for rows, columns, rank in split if not rank)
    matrices = sum(rows * columns for rows, columns, _ in made)
    multiplied = 2 * sum(rows * columns * rank for rows, columns, rank in made)
    p, q = _factors(compression, bucket)
    elements, feeds = bucket.num_bytes // _FP32, compression.keeps_errors
    copy = bucket.num_bytes if feeds else 0
    orthonormal = [_orthonormal(rank) for *_, rank in made]
    passes, kernels = max((a for a, _ in orthonormal), default=0), sum(b for _, b in orthonormal)
    orthonormal_flops = [2 * rank * rank for *_, rank in made]
    q_flops = sum(columns * flops for (_, columns, _), flops in zip(made, orthonormal_flops, strict=True))
    p_flops = sum(rows * flops for (rows, _, _), flops in zip(made, orthonormal_flops, strict=True))
    product, num = _FP32 * (matrices + p + q), len(made)
    yield BucketStep(
        "compress",
        None,
        elements * (_ADD + _PASS) * feeds + _PASS * left + passes * _FP32 * q + product,
        2 * feeds + 1 + kernels + num,
        multiplied + q_flops,
        kept_bytes=copy + _FP32 * left,
    )
    if left:
        yield BucketStep("uncompressed", CollectiveKind.ALL_REDUCE, _FP32 * left)
        unpacked = len(split) - num
        yield BucketStep("unpack", None, 2 * _PASS * left, 1 + unpacked)
    if not num:
        yield BucketStep(
            "errors", None, elements * _ADD * feeds, feeds, kept_bytes=-copy - _FP32 * left, during_bytes=copy
        )
        return
    yield BucketStep("P", CollectiveKind.ALL_REDUCE, _FP32 * p)
    yield BucketStep("multiply", None, passes * _FP32 * p + product, kernels + num, multiplied + p_flops)
    yield BucketStep("Q", CollectiveKind.ALL_REDUCE, _FP32 * q)
    yield BucketStep(
        "decompress",
        None,
        _PASS * q + product + elements * _ADD * feeds,
        1 + num + feeds,
        multiplied,
        during_bytes=copy,
        kept_bytes=-copy - _FP32 * left,
    )


def _orthonormal(rank: int) -> tuple[int, int]:
    """Passes over a factor, and kernels, that make its columns orthonormal.

    Gram-Schmidt up to rank 2, of 2 kernels per column and 4 per pair; else a QR decomposition, whose panels reflect
    column after column (torch, ``_orthogonalize``; LAPACK geqrf and orgqr).
    """
    if rank <= 2:
        return 3 * rank, 2 * rank + 4 * (rank - 1)
    return 2 * rank, 4 * rank


_STEPS: dict[CompressionKind, Callable[[Compression, Bucket, int], Steps]] = {
    "fp16": _sixteen_bits,
    "bf16": _sixteen_bits,
    "powersgd": _powersgd,
    "top_k": _top_k,
    "random_k": _random_k,
}
"""Steps of a compression, by the kinds that do not round values to few bits."""


class CompressedDdpHooks(DdpHooks):
    """DDP hooks with compression.

    ``one_bit_adam`` leaves gradients to the optimizer (``step_one_bit_adam``). Other kinds of a single collective
    compress a bucket on the compute stream, once backward has completed its gradients, and decompress it next to
    backward. Kinds of several phases (``Compression.blocks``) hold backward up until the bucket
    is done: torch 2.13's PowerSGD waits for the whole device on GPUs (``torch.cuda.synchronize``), and on gloo its
    callbacks of two buckets would wait for each other.
    """

    def __init__(self, stages: Stages, writer: RankWriter, level: int, compression: Compression) -> None:
        super().__init__(stages, writer, level)
        self._compression = compression
        self._buckets: dict[int, tuple[Bucket, ...]] = {}
        self._reduced: list[int] = []  # what the end of this backward waits for
        self._num_done = 0  # buckets of this backward

    def persistent_bytes(self) -> int:
        """Errors and factors of all stages of the rank, and padding of a momentum."""
        stages, group = self.stages, self._group
        mine = stages.stages_of(stages.mapping.place(self.writer.rank).pp)
        each = [bucket for stage in mine for bucket in self._of_stage(stage)]
        if self._compression.of_momentum:
            momentum = momentum_bucket(
                map(math.prod, (shape for bucket in each for shape in bucket.shapes)), len(group)
            )
            padding_bytes = momentum.num_bytes - sum(bucket.num_bytes for bucket in each)
            return padding_bytes + state_bytes(self._compression, momentum, len(group))
        return sum(state_bytes(self._compression, bucket, len(group)) for bucket in each)

    def scaling(self, action: Action, part: range) -> tuple[LayerWork, ...]:
        """Returns nothing: hooks divide what is compressed."""
        del action, part
        return ()

    def after_backward(self, action: Action, part: range, phase: Phase) -> None:
        """Compresses and communicates the buckets that this backward has completed."""
        super().after_backward(action, part, phase)
        if not self._reduces or phase is Phase.BACKWARD_INPUT or self._compression.of_momentum:
            return
        buckets = self._of_stage(action.stage)
        while self._num_done < len(buckets) and buckets[self._num_done].ready_layer >= part.start:
            self._reduced += self._reduce(action, buckets[self._num_done])
            self._num_done += 1

    def _reductions(self, action: Action) -> list[int]:
        del action
        reduced, self._reduced, self._num_done, self._ended = self._reduced, [], 0, {}
        return reduced

    def _reduce(self, action: Action, bucket: Bucket) -> list[int]:
        """Writes the steps of a bucket; returns the operations to wait for."""
        writer, blocks = self.writer, self._compression.blocks
        layer = self.stages.layers[action.stage][bucket.ready_layer]
        of = f" bucket {self._num_done}" if self.level == 2 else ""
        last: int | None = None
        for number, step in enumerate(bucket_steps(self._compression, bucket, len(self._group))):
            name, effects = f"{step.what}{of}", step.effects
            if step.kind is not None:
                communication = Communication(step.kind, step.num_bytes, self._group)
                last = writer.collective(action, Stream.DATA, name, communication, (writer.last_compute,), effects)
                if blocks:
                    writer.block_on(last)
                continue
            work = (_work(self._compression, step, layer, self.stages.plan.microbatch_size),)
            if blocks or number == 0:
                writer.compute(action, name, work, effects)
            else:
                last = writer.callback(action, Stream.DATA, name, work, (last,), effects)
        return [] if blocks or last is None else [last]

    def _of_stage(self, stage: int) -> tuple[Bucket, ...]:
        if stage not in self._buckets:
            self._buckets[stage] = ddp_buckets(self.stages.layers[stage], self.stages.state.reduced, *self._limits)
        return self._buckets[stage]


def momentum_bucket(sizes: Iterable[int], num_ranks: int) -> Bucket:
    """The momentum of parameters of these elements, padded to whole blocks of tensors, and for every rank."""
    return Bucket(_FP32 * num_ranks * quantized_part(sum(in_whole_blocks(sizes)), num_ranks), 0, ())


_MOMENTUM = 2 * _ADD + 2 * _PASS, 4  # the gradient is added; the variance is copied, and its sign is a mask
_UPDATE = (
    _ADD + 3 * _PASS + 4 * _FP32 + _FP32,
    6,
)  # the mask; a root, and a constant added; the update; zeroed gradients
_DECAY = {"adam": (0, 0), "adamw": (_PASS, 1)}
"""Bytes per parameter, and kernels, of what 1-bit Adam does to weights and momentum besides communicating it."""


def step_one_bit_adam(action: Action, states: RankStates, writer: RankWriter, release: Sequence[MemoryEffect]) -> None:
    """Writes a step of 1-bit Adam after its first steps: the momentum of a rank, its average, and the update.

    Gradients become scratch memory, and the variance is read only (executor/train/optimizers.py, ``OneBitAdam``).
    """
    stages, plan = states.stages, states.stages.plan
    compression = plan.compression
    assert compression is not None
    group, elements = stages.mapping.group(plan.gradient_group, writer.rank), states.elements.trained
    layer = stages.layers[action.stage][0]
    update_bytes, update_kernels = map(sum, zip(_UPDATE, _DECAY[stages.training.optimizer], strict=True))
    steps = (
        BucketStep("momentum", None, elements * _MOMENTUM[0], _MOMENTUM[1]),
        *bucket_steps(compression, momentum_bucket(states.tensor_sizes, len(group)), len(group)),
        BucketStep("update", None, elements * update_bytes, update_kernels),
    )
    for step in steps:
        name = "{action}" if step.what == "update" else step.what
        if step.kind is not None:
            communication = Communication(step.kind, step.num_bytes, group)
            waits = (*writer.blocking, writer.last_compute)
            writer.block_on(writer.collective(action, Stream.DATA, name, communication, waits, step.effects))
            continue
        effects = (*step.effects, *release) if step.what == "update" else step.effects
        work = (_work(compression, step, layer, plan.microbatch_size),)
        writer.compute(action, name, work, effects, SpanKind.OPTIMIZER)


def _work(compression: Compression, step: BucketStep, layer: LayerSpec, microbatch_size: int) -> BucketWork:
    """Kernels of a step, at the rate of a layer."""
    scaled = LayerWork(layer, Phase.SCALE, microbatch_size, -(-step.num_bytes // _PASS))
    return BucketWork(f"{compression.kind}: {step.what}", scaled, step.num_kernels, step.flops, step.num_selected)
