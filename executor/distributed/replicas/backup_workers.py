"""Backup workers: a step uses the gradients of the first replicas, and drops those of the last.

Chen et al. 2016 (arXiv:1604.00981) have a parameter server for this. Here a replica with complete gradients counts
itself in at the store of the ranks, and the first replicas average theirs in a ring of P2P sends: an all-reduce would
wait for all ranks. Each of the first then sends the part that it has summed to the late replicas, for which it does not
wait. A late replica learns at its next layer that the step is over. It leaves its passes, receives the mean and updates
its parameters like the others, so that all replicas stay equal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Work  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from executor.distributed.gradients import StepOverError
from executor.distributed.mesh import Peers
from executor.profiling.recorder import Recorder

_ASK_EVERY_S = 0.005  # the store takes 0.1 ms to answer
_trainings = count()


class FirstReplicas:
    """Replicas of a model, of which every step averages the gradients of the first to complete them.

    Every replica must make it as often as the others, and take the same steps: ``begin_step``, then ``average`` or,
    after a ``StepOverError``, ``take_mean``; after the last step ``finish``.

    Args:
        peers: Ranks with one replica each.
        num_dropped: Gradients that a step drops.
        parameters: Trained parameters, in an order that all replicas share.

    Attributes:
        kept: Ranks whose gradients the last step used, in order of their arrival.
        arrived_s: Time at which this replica completed its gradients or left its passes in the last step, on the clock
            that processes of a host share.
    """

    def __init__(self, peers: Peers, num_dropped: int, parameters: Sequence[nn.Parameter], recorder: Recorder) -> None:
        self._peers, self._parameters, self._recorder = peers, parameters, recorder
        self._rank, self._num_kept = peers.ranks[peers.rank], peers.size - num_dropped
        self._store = PrefixStore(f"simplan/replicas{next(_trainings)}", _get_default_store())
        self._bucket = parameters[0].new_empty(sum(parameter.numel() for parameter in parameters))
        self._step, self._ask_s = -1, 0.0
        self._first_leaf = torch.zeros((), requires_grad=True)
        self._first_node = self._first_leaf.clone()
        self._sending: dict[tuple[int, int], tuple[Work, Tensor]] = {}
        self.kept: tuple[int, ...] = ()
        self.arrived_s = 0.0

    def begin_step(self) -> None:
        """Begins the next step, and frees what the other replicas have received of the steps before."""
        self._step += 1
        self._sending = {key: sent for key, sent in self._sending.items() if not self._store.check([_received(*key)])}

    def leave_if_over(self) -> None:
        """To be called between layers.

        Raises:
            StepOverError: The step is over.
        """
        now_s = time.monotonic()
        if now_s < self._ask_s:
            return
        self._ask_s = now_s + _ASK_EVERY_S
        if self._store.check([_arrival(self._step, self._num_kept)]):
            raise StepOverError

    def average(self) -> None:
        """Replaces complete gradients by the mean of those of the first replicas, of which this must be one.

        Raises:
            StepOverError: The step is over.
        """
        self.arrived_s = time.perf_counter()
        place = self._store.add(f"step{self._step}", 1)
        if place > self._num_kept:
            raise StepOverError
        self._store.set(_arrival(self._step, place), str(self._rank))
        handle = self._peers.issue("all_reduce", self._bucket)
        self._wait_for_arrivals()
        torch._foreach_copy_(self._views(), [_gradient(parameter) for parameter in self._parameters])
        self._bucket.div_(self._num_kept)
        self._sum()
        self._take_bucket()
        self._peers.complete(handle)

    def take_mean(self) -> None:
        """Receives the mean of the gradients of the first replicas, after a ``StepOverError``."""
        self.arrived_s = time.perf_counter()
        self.free_backward()
        self._wait_for_arrivals()
        ring, parts = sorted(self.kept), self._bucket.tensor_split(self._num_kept)
        works = [self._receive(_summed(parts, number), rank) for number, rank in enumerate(ring)]
        for work in works:
            work.wait()
        self._store.set(_received(self._step, self._rank), "")
        self._take_bucket()

    def finish(self) -> None:
        """Waits until late replicas have received all means that this one sends them."""
        for work, _ in self._sending.values():
            work.wait()
        self._sending.clear()

    def free_backward(self) -> None:
        """Frees the activations of a backward that an exception has ended.

        torch 2.13 leaves nodes that were due in a queue of this thread. Later nodes come first, so that a backward of a
        node from before takes them all out of it.
        """
        torch.autograd.grad(self._first_node, self._first_leaf, retain_graph=True)

    def _wait_for_arrivals(self) -> None:
        self._recorder.waiting("waiting for the gradients of other replicas", self._step)
        keys = [_arrival(self._step, place) for place in range(1, self._num_kept + 1)]
        self._store.wait(keys)
        self.kept = tuple(int(rank) for rank in self._store.multi_get(keys))

    def _sum(self) -> None:
        """All-reduces the bucket over the kept replicas in a ring, and sends the own part of the sum to the others."""
        ring, parts = sorted(self.kept), self._bucket.tensor_split(self._num_kept)
        size, place = len(ring), ring.index(self._rank)
        received = torch.empty_like(parts[0])
        for turn in range(size - 1):
            part = parts[(place - turn - 1) % size]
            self._pass_on(ring, parts[(place - turn) % size], received[: part.numel()])
            part.add_(received[: part.numel()])
        summed = _summed(parts, place)
        for rank in self._peers.ranks:
            if rank not in ring:
                sent = summed.clone()  # the next step overwrites the bucket
                self._sending[self._step, rank] = self._send(sent, rank), sent
        for turn in range(size - 1):
            self._pass_on(ring, parts[(place + 1 - turn) % size], parts[(place - turn) % size])

    def _pass_on(self, ring: Sequence[int], sent: Tensor, received: Tensor) -> None:
        """Sends to the next rank of the ring, and receives from the one before."""
        place, size = ring.index(self._rank), len(ring)
        works = self._receive(received, ring[(place - 1) % size]), self._send(sent, ring[(place + 1) % size])
        for work in works:
            work.wait()

    def _send(self, tensor: Tensor, rank: int) -> Work:
        work = dist.isend(tensor, rank, group=self._peers.group)
        assert work is not None
        return work

    def _receive(self, tensor: Tensor, rank: int) -> Work:
        work = dist.irecv(tensor, rank, group=self._peers.group)
        assert work is not None
        return work

    def _views(self) -> list[Tensor]:
        parts = torch.split(self._bucket, [parameter.numel() for parameter in self._parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self._parameters, strict=True)]

    def _take_bucket(self) -> None:
        """Copies the mean to the gradients, which a replica that left its passes may not have."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        torch._foreach_copy_([_gradient(parameter) for parameter in self._parameters], self._views())


def _arrival(step: int, place: int) -> str:
    """Key of the rank that arrived in a place, from 1."""
    return f"step{step}/place{place}"


def _received(step: int, rank: int) -> str:
    """Key that a late replica sets when it has received the mean."""
    return f"step{step}/received{rank}"


def _summed(parts: Sequence[Tensor], number: int) -> Tensor:
    """Part of the bucket that a member of the ring has summed after the first half of an all-reduce."""
    return parts[(number + 1) % len(parts)]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
