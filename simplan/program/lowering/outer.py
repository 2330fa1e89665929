"""Outer steps of replicas that train alone: parameters or pseudo-gradients are averaged, and parameters updated.

Kernels, collectives and buffers are those of the executor (executor/distributed/outer.py). It copies the parameters of
a fragment into one flat buffer, as torch's model averager does
(torch/distributed/algorithms/model_averaging/utils.py, ``average_parameters``), and updates it by ``torch.optim.SGD``.
"""

from __future__ import annotations

from simplan.model.layer import CollectiveKind, LayerSpec
from simplan.plan.compression import Compression
from simplan.plan.replication import Replication
from simplan.program.action import Action
from simplan.program.lowering.compression import BucketStep, bucket_steps
from simplan.program.lowering.hooks import Bucket
from simplan.program.lowering.writer import RankWriter
from simplan.program.memory.states import RankStates
from simplan.program.program import (
    BucketWork,
    Communication,
    LayerWork,
    MemoryCategory,
    MemoryEffect,
    Phase,
    Stream,
)
from simplan.program.timeline import SpanKind

_PASS = 8  # bytes that the division of an FP32 gradient reads and writes
_FP32 = 4


class OuterStep:
    """The outer step of one fragment on a rank.

    ``send`` makes the pseudo-gradient and begins to communicate it; ``merge`` waits for its mean and updates.

    Args:
        states: States of the rank.
        writer: Writer of the rank.
        layer: A layer of the rank, at whose rate flat buffers are read and written.
    """

    def __init__(self, states: RankStates, writer: RankWriter, layer: LayerSpec) -> None:
        stages = states.stages
        assert stages.plan.replication is not None
        self._replication: Replication = stages.plan.replication
        self._writer, self._layer, self._microbatch_size = writer, layer, stages.plan.microbatch_size
        self._group = stages.mapping.group("replicate", writer.rank)
        self._elements = -(-states.elements.trained // self._replication.outer_steps)
        self._num_tensors = -(-states.num_updated_tensors // self._replication.outer_steps)

    @property
    def _averages(self) -> bool:
        return self._replication.kind == "local_sgd"

    def send(self, action: Action) -> None:
        """Writes the pseudo-gradient of the fragment, or its parameters, and their mean over replicas."""
        outer, elements, whole = self._replication.outer, self._elements, _FP32 * self._elements
        # parameters are joined, then divided by the number of replicas, or taken from the outer ones
        num_bytes = elements * (2 * _FP32 + (2 if self._averages else 3) * _FP32)
        on_host = outer.on_host and not self._averages
        self._compute(action, "flatten parameters", num_bytes, 2, whole, whole, on_host=on_host)
        if on_host:
            self._copy(action, "parameters to host", to_host=True)
            self._copy(action, "pseudo-gradient from host", to_host=False)
        dtype = "fp32" if self._averages else outer.dtype
        if dtype == "fp32":
            communication = Communication(CollectiveKind.ALL_REDUCE, whole, self._group)
            name = "all_reduce parameters" if self._averages else "all_reduce pseudo-gradient"
            self._writer.collective(action, Stream.REPLICATE, name, communication, (self._writer.last_compute,))
            return
        last = self._writer.last_compute
        bucket = Bucket(whole, 0, ())
        compression = Compression(kind=dtype, error_feedback=False) if dtype[0] == "i" else Compression(kind=dtype)
        for step in bucket_steps(compression, bucket, len(self._group)):
            last = self._write(action, step, last)

    def _write(self, action: Action, step: BucketStep, last: int | None) -> int:
        """Writes kernels or a collective on quantized pseudo-gradients, beside compute."""
        name, writer = f"{step.what} of pseudo-gradient", self._writer
        during = max(step.kept_bytes, 0) if step.kind is not None else max(step.during_bytes, step.kept_bytes)
        effects = (MemoryEffect(MemoryCategory.BUFFERS, during, step.kept_bytes),)
        if step.kind is not None:
            communication = Communication(step.kind, step.num_bytes, self._group)
            return writer.collective(action, Stream.REPLICATE, name, communication, (last,), effects)
        work = (self._work(step.what, step.num_bytes, step.num_kernels),)
        return writer.callback(action, Stream.REPLICATE, name, work, (last,), effects)

    def merge(self, action: Action) -> None:
        """Writes the update by the mean, and copies it into the parameters."""
        replication, elements, whole = self._replication, self._elements, _FP32 * self._elements
        outer = replication.outer
        back = 3 * _FP32 if replication.steps_beside and replication.mixing else 2 * _FP32
        if self._averages:
            self._compute(action, "set parameters", elements * back, self._num_tensors, 0, -whole)
            return
        passes, kernels = (2 + 5 + 3 + 3, 5) if outer.optimizer == "nesterov" else (2 + 3, 2)
        if outer.on_host:
            self._copy(action, "mean to host", to_host=True)
        during = whole if outer.optimizer == "nesterov" else 0
        num_bytes = elements * passes * _FP32
        self._compute(action, "outer update", num_bytes, kernels, during, 0, on_host=outer.on_host)
        if outer.on_host:
            self._copy(action, "parameters from host", to_host=False)
        self._compute(action, "set parameters", elements * back, self._num_tensors, 0, -whole)

    def _compute(
        self,
        action: Action,
        name: str,
        num_bytes: int,
        num_kernels: int,
        during: int,
        after: int,
        *,
        on_host: bool = False,
    ) -> None:
        category = MemoryCategory.HOST if on_host and not after else MemoryCategory.BUFFERS
        effects = (MemoryEffect(category, during, after),)
        work = (self._work(name, num_bytes, num_kernels, on_host=on_host),)
        self._writer.compute(action, name, work, effects, SpanKind.OPTIMIZER)

    def _copy(self, action: Action, name: str, *, to_host: bool) -> None:
        writer = self._writer
        num_bytes = _FP32 * self._elements
        index = writer.host_copy(action, name, num_bytes, (writer.last_compute,), (), to_host=to_host)
        writer.block_on(index)
        writer.compute(action, f"wait for {name}")

    def _work(self, name: str, num_bytes: int, num_kernels: int, *, on_host: bool = False) -> BucketWork:
        elements = -(-num_bytes // _PASS)
        streamed = LayerWork(self._layer, Phase.SCALE, self._microbatch_size, elements, on_host=on_host)
        return BucketWork(f"outer: {name}", streamed, num_kernels)
