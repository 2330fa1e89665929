"""Outer steps of replicas that train alone: Local SGD, post-local SGD, DiLoCo and streaming DiLoCo.

torch's own model averager (torch 2.13, ``torch/distributed/algorithms/model_averaging/utils.py``) makes parameters
views of its flat buffer, which local shards of FSDP and ZeRO-1 cannot be, and its all-reduce is not recorded.
``local_sgd`` has its arithmetic. The outer optimizer of DiLoCo is ``torch.optim.SGD``.

Only trained parameters are averaged. Buffers, such as the statistics of batch normalization, and states of the inner
optimizer stay each replica's own (Douillard et al. 2023, arXiv:2311.08105, section 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.distributed.mesh import Peers, local
from executor.distributed.quantization import average_quantized, quantized_bytes
from executor.distributed.replicas.membership import Meeting, Membership
from executor.profiling.recorder import Recorder
from simplan.plan.replication import Replication
from simplan.program.action import Action
from simplan.runs.measurement import IssuedKind

_SIXTEEN_BITS = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Fragment:
    """An equal part of the elements of a rank's parameters.

    Attributes:
        slices: Parameters with the first element, and the one after the last, of each that are in the fragment.
        num_elements: Elements, with padding at the end.
        like: A tensor with the dtype and device of the parameters.
    """

    slices: tuple[tuple[nn.Parameter, int, int], ...]
    num_elements: int
    like: Tensor

    def parts(self) -> list[Tensor]:
        """Views of the parameters, (elements,) each."""
        return [local(parameter).detach().view(-1)[first:end] for parameter, first, end in self.slices]

    def joined(self) -> Tensor:
        """``(num_elements,)`` Copy of the parameters."""
        padding = self.num_elements - sum(end - first for _, first, end in self.slices)
        return torch.cat([*self.parts(), *([self.like.new_zeros(padding)] if padding else [])])

    def separate(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each view of the parameters, with its part of a flat tensor."""
        parts = self.parts()
        num_elements = sum(part.numel() for part in parts)
        of_parts = torch.split(flat[:num_elements], [part.numel() for part in parts])
        yield from zip(parts, of_parts, strict=True)


def _fragments(parameters: Sequence[nn.Parameter], num_fragments: int, shards: Peers) -> list[_Fragment]:
    """Cuts the parameters, in their order, into fragments of equal size; a parameter may lie in several.

    Args:
        shards: Ranks with other shards of the same parameters. All have fragments as large as the first of them, whose
            shards have the most elements.
    """
    like = local(parameters[0]).detach()
    max_elements = torch.tensor([sum(local(parameter).numel() for parameter in parameters)], device=like.device)
    if shards.group is not None:
        dist.all_reduce(max_elements, dist.ReduceOp.MAX, group=shards.group)
    size = -(-int(max_elements) // num_fragments)
    slices: list[list[tuple[nn.Parameter, int, int]]] = [[] for _ in range(num_fragments)]
    start = 0
    for parameter in parameters:
        first, num_elements = 0, local(parameter).numel()
        while first < num_elements:
            fragment = (start + first) // size
            end = min(num_elements, (fragment + 1) * size - start)
            slices[fragment].append((parameter, first, end))
            first = end
        start += num_elements
    return [_Fragment(tuple(of_fragment), size, like) for of_fragment in slices]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A fragment that is communicated beside steps.

    Attributes:
        number: Number of the outer step in the run, from 1; 0 for none, before the first.
        mean: Pseudo-gradient, and its mean once it has arrived.
        arrived: Done when the mean is there; None for one of a checkpoint.
    """

    number: int
    mean: Tensor
    arrived: Future[None] | None


class OuterSteps:
    """The outer steps of one rank.

    A round has ``inner_steps`` steps. The fragments of streaming DiLoCo are evenly staggered: fragment f of F is sent
    after (f + 1) / F of the steps of a round, and merged ``overlap_steps`` later. Others have one fragment, and
    replicas wait for it. A fragment is communicated by a thread on a process group of its own, so that its collectives
    match those of other ranks whatever the steps beside it communicate.

    Args:
        replication: One with rounds.
        parameters: Trained parameters of the rank, in the same order on all replicas.
        replicas: Ranks with the same shard in all replicas.
        shards: Ranks with the other shards of the same replica; this rank alone where nothing is sharded.
        recorder: Records kernels as parts of an action, and each collective when it is issued. One that is handed to
            the thread ends in a later step, and has no end in the record.
        action: The action that outer steps are part of.
        members: Membership of replicas that may leave and join; None if every outer step has all of them.

    Attributes:
        meeting: Outer step after the last step; None if there was none, or all replicas always meet.
    """

    def __init__(
        self,
        replication: Replication,
        parameters: Sequence[nn.Parameter],
        replicas: Peers,
        shards: Peers,
        recorder: Recorder,
        action: Action,
        members: Membership | None = None,
    ) -> None:
        self._replication, self._recorder, self._action = replication, recorder, action
        self._members = members
        self.meeting: Meeting | None = None
        self._peers, self._fragments = replicas, _fragments(parameters, replication.outer_steps, shards)
        self._between = replication.inner_steps // replication.outer_steps
        self._averages = replication.kind == "local_sgd"
        self._on_host = replication.outer.on_host and not self._averages
        self._dtype = "fp32" if self._averages else replication.outer.dtype
        self._outer = [] if self._averages else [self._host_copy(fragment.joined()) for fragment in self._fragments]
        self._momenta: list[Tensor] = []
        self._optimizer = self._make_optimizer() if self._outer else None
        self._in_flight: _InFlight | None = None
        self._thread = ThreadPoolExecutor(max_workers=1) if replication.steps_beside else None
        is_cuda = self._thread is not None and self._fragments[0].like.is_cuda
        self._stream = torch.cuda.Stream() if is_cuda else None  # type: ignore[no-untyped-call]

    def _make_optimizer(self) -> torch.optim.SGD | None:
        outer = self._replication.outer
        if outer.optimizer == "average":
            return None
        # foreach has more temporary tensors
        optimizer = torch.optim.SGD(
            self._outer, outer.lr, outer.momentum, nesterov=outer.momentum > 0, foreach=False, fused=False
        )
        if outer.momentum:  # zeros become the first gradient
            self._momenta = [torch.zeros_like(parameters) for parameters in self._outer]
        for parameters, momentum in zip(self._outer, self._momenta, strict=False):
            optimizer.state[parameters]["momentum_buffer"] = momentum
        return optimizer

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Does what is due after a step: merges the fragment in flight, and sends the next.

        Args:
            step: Index of the step in the run.
        """
        done, overlapped_steps = step + 1 - self._replication.start_step, self._replication.steps_beside
        self.meeting = None
        flying = self._in_flight
        if flying is not None and flying.number and done == flying.number * self._between + overlapped_steps:
            self._in_flight = None
            self._wait(flying)
            self._merge(flying.number, flying.mean)
        if done > 0 and done % self._between == 0:
            self._send(done // self._between)

    def finish(self) -> None:
        """Waits for what is in flight, at the end of a run; it is not merged."""
        if self._in_flight is not None:
            self._wait(self._in_flight)
        if self._members is not None:
            self._members.finish()

    def tensors(self) -> dict[str, Tensor]:
        """State between two steps, by name; a pseudo-gradient in flight has arrived.

        Tensors are not copied, so that a checkpoint can be read into them.
        """
        tensors = {f"parameters{index}": outer for index, outer in enumerate(self._outer)}
        tensors |= {f"momentum{index}": momentum for index, momentum in enumerate(self._momenta)}
        if self._thread is not None:
            if self._in_flight is None:
                fragment = self._fragments[0]
                self._in_flight = _InFlight(0, fragment.like.new_zeros(fragment.num_elements), None)
            self._wait(self._in_flight)
            tensors["mean"] = self._in_flight.mean
        return tensors

    def resume(self, step: int) -> None:
        """Goes on after a number of steps, whose state was read into ``tensors``."""
        if self._in_flight is not None:
            number = max(0, step - self._replication.start_step) // self._between
            self._in_flight = replace(self._in_flight, number=number)

    def _send(self, number: int) -> None:
        """Averages over replicas what a fragment is sent as."""
        index = self._index(number)
        if self._members is not None:
            mean, self.meeting = self._members.average(number, partial(self._sent, index), self._average)
            self._merge(number, mean)
            return
        flat = self._sent(index, self._peers.size)
        if self._thread is None:
            self._average(flat, self._peers)
            self._merge(number, flat)
            return
        for kind, num_bytes in self._collectives(flat):
            self._recorder.issue(kind, self._peers.ranks, num_bytes, self._action)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        arrived = self._thread.submit(self._average_in_thread, flat)
        self._in_flight = _InFlight(number, flat, arrived)

    def _sent(self, index: int, num_replicas: int) -> Tensor:
        """Pseudo-gradient of a fragment, or its joined parameters; in FP32 divided by the number of replicas."""
        with self._recorder.span(self._action):
            flat = self._fragments[index].joined()
            if self._outer and not self._on_host:
                torch.sub(self._outer[index], flat, out=flat)
            if self._dtype == "fp32" and not self._on_host:
                flat.div_(num_replicas)
        if self._on_host:
            self._subtract_on_host(index, flat, num_replicas)
        return flat

    def _subtract_on_host(self, index: int, flat: Tensor, num_replicas: int) -> None:
        """Makes a pseudo-gradient from parameters, by way of the host."""
        host = self._to_host(flat)
        with self._recorder.span(self._action):
            torch.sub(self._outer[index], host, out=host)
        self._from_host(host, flat)
        if self._dtype == "fp32":
            with self._recorder.span(self._action):
                flat.div_(num_replicas)

    def _average_in_thread(self, flat: Tensor) -> None:
        """Averages in the thread, whose collectives were recorded when it got them."""
        unrecorded = replace(self._peers, recorder=None)
        with torch.cuda.stream(self._stream):  # nothing without CUDA
            self._average(flat, unrecorded)

    def _average(self, flat: Tensor, peers: Peers) -> None:
        """Replaces values, in FP32 already divided by the number of replicas, by their mean over replicas."""
        if self._dtype == "fp32":
            peers.all_reduce(flat)
        elif self._dtype in _SIXTEEN_BITS:
            narrow = flat.to(_SIXTEEN_BITS[self._dtype]).div_(peers.size)
            peers.all_reduce(narrow)
            flat.copy_(narrow)
        else:
            average_quantized(flat, self._dtype, peers)

    def _collectives(self, flat: Tensor) -> Iterator[tuple[IssuedKind, int]]:
        """Kinds and bytes of the collectives that average a fragment."""
        if self._dtype in ("int8", "int4"):
            num_bytes = quantized_bytes(flat, self._dtype, self._peers.size)
            yield from (("all_to_all", num_bytes), ("all_gather", num_bytes))
        else:
            yield "all_reduce", flat.numel() * _SIXTEEN_BITS.get(self._dtype, flat.dtype).itemsize

    def _wait(self, flying: _InFlight) -> None:
        """Waits for the thread; on CUDA the current stream waits for the thread's."""
        if flying.arrived is not None:
            flying.arrived.result()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _merge(self, number: int, mean: Tensor) -> None:
        """Updates the outer parameters of a fragment, and sets or mixes the parameters."""
        index, replication = self._index(number), self._replication
        if self._outer:
            gradient = self._to_host(mean) if self._on_host else mean
            with self._recorder.span(self._action):
                self._update(self._outer[index], gradient)
            if self._on_host:
                self._from_host(self._outer[index], mean)
        with self._recorder.span(self._action):
            merged = self._outer[index] if self._outer and not self._on_host else mean
            for part, of_part in self._fragments[index].separate(merged):
                if replication.steps_beside and replication.mixing:
                    part.lerp_(of_part, 1 - replication.mixing)
                else:
                    part.copy_(of_part)

    def _update(self, outer: Tensor, gradient: Tensor) -> None:
        """The outer optimizer, on one fragment."""
        if self._optimizer is None:
            outer.sub_(gradient)
            return
        outer.grad = gradient
        self._optimizer.step()
        outer.grad = None

    def _index(self, number: int) -> int:
        return (number - 1) % len(self._fragments)

    def _host_copy(self, flat: Tensor) -> Tensor:
        """A tensor where outer parameters are."""
        return flat.cpu().pin_memory() if self._on_host and flat.is_cuda else flat

    def _to_host(self, flat: Tensor) -> Tensor:
        """A copy on the host, which waits for it; on CPUs a copy, too."""
        return self._copy("to_host", flat, torch.empty_like(flat, device="cpu", pin_memory=flat.is_cuda))

    def _from_host(self, host: Tensor, flat: Tensor) -> None:
        """Copies from the host, which waits for it."""
        self._copy("from_host", host, flat)

    def _copy(self, kind: IssuedKind, source: Tensor, to: Tensor) -> Tensor:
        handle = self._recorder.issue(kind, (self._peers.ranks[self._peers.rank],), source.nbytes, self._action)
        to.copy_(source)
        self._recorder.complete(handle)
        return to
