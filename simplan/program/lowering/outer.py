"""Outer steps of replicas that train alone: parameters or pseudo-gradients are averaged, and parameters updated.

Kernels, collectives and buffers are those of executor/distributed/replicas/outer.py. It copies the parameters of
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

_FP32 = 4
_COPY = 2 * _FP32  # bytes per element: a read and a write
_DIVIDE = 2 * _FP32
_ADD = 3 * _FP32  # two reads and a write
_QUANTIZED = ("int8", "int4")


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

    @property
    def _on_host(self) -> bool:
        return self._replication.outer.on_host and not self._averages

    def send(self, action: Action) -> None:
        """Writes the pseudo-gradient of the fragment, or its parameters, and their mean over replicas."""
        elements, whole = self._elements, _FP32 * self._elements
        dtype = "fp32" if self._averages else self._replication.outer.dtype
        divide = (_DIVIDE * elements, 1) if dtype == "fp32" else (0, 0)  # others divide what they have cast
        subtract = (0, 0) if self._averages else (_ADD * elements, 1)  # from the outer parameters
        if self._on_host:
            self._compute(action, "flatten parameters", (_COPY * elements, 1), whole, whole)
            self._copy(action, "parameters to host", whole, to_host=True)
            self._compute(action, "pseudo-gradient", subtract, on_host=True)
            self._copy(action, "pseudo-gradient from host", -whole, to_host=False)
            if divide[1]:
                self._compute(action, "divide pseudo-gradient", divide)
        else:
            passes, kernels = zip((_COPY * elements, 1), subtract, divide, strict=True)
            self._compute(action, "flatten parameters", (sum(passes), sum(kernels)), whole, whole)
        if dtype == "fp32":
            communication = Communication(CollectiveKind.ALL_REDUCE, whole, self._group)
            name = "all_reduce parameters" if self._averages else "all_reduce pseudo-gradient"
            self._writer.collective(action, Stream.REPLICATE, name, communication, (self._writer.last_compute,))
            return
        last = self._writer.last_compute
        compression = Compression(kind=dtype, error_feedback=False) if dtype in _QUANTIZED else Compression(kind=dtype)
        for step in bucket_steps(compression, Bucket(whole, 0, ()), len(self._group)):
            last = self._write(action, step, last)

    def _write(self, action: Action, step: BucketStep, last: int | None) -> int:
        """Writes kernels or a collective on quantized pseudo-gradients, beside compute."""
        name, writer = f"{step.what} of pseudo-gradient", self._writer
        if step.kind is not None:
            communication = Communication(step.kind, step.num_bytes, self._group)
            return writer.collective(action, Stream.REPLICATE, name, communication, (last,), step.effects)
        work = (self._work(step.what, step.num_bytes, step.num_kernels),)
        return writer.callback(action, Stream.REPLICATE, name, work, (last,), step.effects, SpanKind.OPTIMIZER)

    def merge(self, action: Action) -> None:
        """Writes the update by the mean, and copies it into the parameters."""
        replication, elements, whole = self._replication, self._elements, _FP32 * self._elements
        if not self._averages:
            # momentum is scaled, and the mean added; the update is made anew, and added to the outer parameters
            nesterov = replication.outer.optimizer == "nesterov"
            passes, kernels = (_DIVIDE + 3 * _ADD, 4) if nesterov else (_ADD, 1)
            if self._on_host:
                self._copy(action, "mean to host", whole, to_host=True)
            during = whole if nesterov else 0
            self._compute(action, "outer update", (elements * passes, kernels), during, on_host=self._on_host)
            if self._on_host:
                self._copy(action, "parameters from host", -whole, to_host=False)
        back = _ADD if replication.steps_beside and replication.mixing else _COPY
        self._compute(action, "set parameters", (elements * back, self._num_tensors), 0, -whole)

    def _compute(
        self,
        action: Action,
        name: str,
        work: tuple[int, int],
        during: int = 0,
        after: int = 0,
        *,
        on_host: bool = False,
    ) -> None:
        """Writes kernels, given the bytes that they read and write and their number, and their buffers."""
        category = MemoryCategory.HOST if on_host else MemoryCategory.BUFFERS
        effects = (MemoryEffect(category, during, after),) if during or after else ()
        self._writer.compute(action, name, (self._work(name, *work, on_host=on_host),), effects, SpanKind.OPTIMIZER)

    def _copy(self, action: Action, name: str, buffer_bytes: int, *, to_host: bool) -> None:
        """Writes a copy of a fragment that the host waits for, and the change of buffers on the host."""
        writer = self._writer
        during = max(buffer_bytes, 0)
        effects = (MemoryEffect(MemoryCategory.HOST, during, buffer_bytes),)
        num_bytes = _FP32 * self._elements
        index = writer.host_copy(action, name, num_bytes, (writer.last_compute,), effects, to_host=to_host)
        writer.block_on(index)
        writer.compute(action, f"wait for {name}")

    def _work(self, name: str, num_bytes: int, num_kernels: int, *, on_host: bool = False) -> BucketWork:
        elements = -(-num_bytes // _DIVIDE)
        streamed = LayerWork(self._layer, Phase.SCALE, self._microbatch_size, elements, on_host=on_host)
        return BucketWork(f"outer: {name}", streamed, num_kernels)
