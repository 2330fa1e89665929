"""Outer steps of replicas that may leave and join: which of them meet, and that all of those have the same mean.

torch's process groups end with any of their ranks. Here every replica is a world of its own, and replicas meet in
a group of gloo that is made again whenever others meet than before (as torchft 0.2 does, with a server of its own).
An outer step is agreed on in the store of the run (``executor.launch.roster``); of several writers of a key, the first
one counts (``compare_set``):

1. Every rank says that it is there. The last to arrive writes the *members*: the replicas that are there. If some are
   missing, a rank that waits writes them without the replicas that have left.
2. Members average their pseudo-gradients. A member that leaves now makes that fail, or stand still.
3. Every rank that has the mean says so. The last one writes the *outcome* ``kept``; a rank for which it failed, or that
   sees a member leave before it had said so, writes ``failed``. Only what is kept is used; else all go back to 1.

So a mean is used by all members or by none, also by those that got it before another one left. A repeated step
makes the pseudo-gradient again: parameters are as they were.

A replica that starts later waits to be taken in. The members write it down next to an outer step, and the first of them
sends it its state after that step. It is expected at the next one.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from executor.distributed.mesh import Peers
from executor.launch.roster import Pulse, Roster, appears, connect
from executor.profiling.recorder import Recorder
from simplan.errors import RunError
from simplan.units import counted

_POLL_S = 0.1
_MAX_ATTEMPTS = 5  # of the same members: their network is broken, and nobody has left


class GivenUpError(RunError):
    """The other replicas have gone on without this one: it was not heard from for too long."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """An outer step as the replicas have agreed on it.

    Attributes:
        number: Number of the outer step in the run, from 1.
        members: Members by their number, ascending, with their incarnations.
        joining: Replicas that take the state of the first member after it, with their incarnations.
    """

    number: int
    members: Mapping[int, int]
    joining: Mapping[int, int]

    @property
    def replicas(self) -> tuple[int, ...]:
        """Numbers of the members."""
        return tuple(self.members)

    @property
    def expected_next(self) -> Mapping[int, int]:
        """Replicas expected at the next outer step, with their incarnations."""
        return dict(sorted({**self.members, **self.joining}.items()))

    @classmethod
    def parse(cls, text: bytes) -> Meeting:
        """Reads the text of ``str``."""
        number, *both = json.loads(text)
        members, joining = ({int(replica): start for replica, start in starts.items()} for starts in both)
        return cls(number, members, joining)

    def __str__(self) -> str:
        return json.dumps([self.number, self.members, self.joining])


class Membership:
    """One rank's side of the outer steps.

    Args:
        roster: Roster of the run.
        incarnation: Incarnation of this replica.
        rank: Global rank; ranks of a replica follow each other.
        min_replicas: Fewest replicas with which the run goes on.
        timeout: Longest time for a collective.
        recorder: Records collectives and waits.
    """

    def __init__(
        self, roster: Roster, incarnation: int, rank: int, min_replicas: int, timeout: timedelta, recorder: Recorder
    ) -> None:
        self.replica, self._column = divmod(rank, roster.num_ranks)
        self.meeting: Meeting | None = None
        self._roster, self._store, self._incarnation, self._rank = roster, roster.store, incarnation, rank
        self._min_replicas, self._timeout, self._recorder = min_replicas, timeout, recorder
        self._expected: Mapping[int, int] = dict.fromkeys(range(roster.num_replicas), 1)
        self._peers: tuple[tuple[int, ...], Peers] | None = None
        self._has_stuck_thread = False
        self._pulse = Pulse(roster, rank, incarnation)

    @property
    def is_late(self) -> bool:
        """True if the others may have taken steps before this replica has started."""
        return self._incarnation > 1

    def join(self) -> Meeting | None:
        """Waits until the others take this replica in; None if the run ended before.

        Returns:
            The outer step after which this replica goes on, once ``receive`` has its state.
        """
        self._store.add(f"joining/{self.replica}.{self._incarnation}", 1)
        key = f"admitted/{self.replica}.{self._incarnation}"
        while not self._appears(key, "waiting to be taken in by the other replicas"):
            if self._roster.is_finished:
                return None
        meeting = self.meeting = Meeting.parse(self._store.get(key))
        self._expected = meeting.expected_next
        return meeting

    def receive(self, tensors: Iterable[Tensor]) -> None:
        """Fills tensors with those that the first member sends to this replica."""
        group = self._pair(self.replica, self._incarnation, 1)
        for tensor in tensors:
            group.recv([tensor], 0, 0).wait()

    def send_state(self, tensors: Callable[[], Sequence[Tensor]]) -> None:
        """Sends the tensors to replicas that join after the last outer step, if this replica is its first member.

        A replica that leaves meanwhile is not missed: it has not been in an outer step.
        """
        meeting = self.meeting
        if meeting is None or not meeting.joining or meeting.replicas[0] != self.replica:
            return
        sent = [tensor.contiguous() for tensor in tensors()]
        for replica, incarnation in meeting.joining.items():
            try:
                group = self._pair(replica, incarnation, 0)
                for tensor in sent:
                    group.send([tensor], 1, 0).wait()
            except RuntimeError:
                continue

    def average(
        self, number: int, make: Callable[[int], Tensor], average: Callable[[Tensor, Peers], None]
    ) -> tuple[Tensor, Meeting]:
        """Averages what members have, in an outer step.

        Args:
            number: Number of the outer step in the run, from 1.
            make: Makes this rank's tensor, given the number of members; called again for a repeated step.
            average: Replaces a tensor by its mean over peers.

        Raises:
            GivenUpError: The others have gone on without this replica.
            RunError: Fewer replicas than ``min_replicas`` are left, or the network between members is broken.
        """
        before, same = self._expected, 0
        for attempt in range(10**6):
            key = f"{number}.{attempt}"
            meeting = self._meet(number, key)
            same = same + 1 if meeting.members == before else 1
            if same > _MAX_ATTEMPTS:
                raise RunError(f"outer step {number} failed {_MAX_ATTEMPTS} times, and no replica has left")
            before = meeting.members
            tensor = make(len(meeting.replicas))
            if self._is_kept(key, meeting, self._has_mean(key, meeting, tensor, average)):
                break
            self._expected = meeting.members
        for replica, incarnation in meeting.joining.items():
            self._store.set(f"admitted/{replica}.{incarnation}", str(meeting))
        self._store.set("last", json.dumps(meeting.replicas))
        self._expected = meeting.expected_next
        self.meeting = meeting
        return tensor, meeting

    def finish(self) -> None:
        """Notes that the last step is done."""
        self._roster.finish()

    def close(self) -> None:
        """Ends this process if a collective still waits for a replica that is gone: torch cannot abort one of gloo."""
        self._pulse.end()
        if self._has_stuck_thread:
            os._exit(0)

    def _meet(self, number: int, key: str) -> Meeting:
        if self._roster.incarnation(self.replica) != self._incarnation:
            raise GivenUpError(f"replica {self.replica} was started again elsewhere, and this is its earlier start")
        self._store.set(f"{key}/here/{self._rank}", "")
        if self._store.add(f"{key}/here", 1) == len(self._expected) * self._roster.num_ranks:
            self._decide(number, key, [*self._expected])
        while not self._appears(f"{key}/members", "waiting for the other replicas"):
            here = [replica for replica in self._expected if self._all_say(f"{key}/here", replica)]
            left = set(filter(self._has_left, self._expected))
            if left.union(here) == set(self._expected):
                self._decide(number, key, [replica for replica in here if replica not in left])
        meeting = Meeting.parse(self._store.get(f"{key}/members"))
        if self.replica not in meeting.replicas:
            raise GivenUpError(f"the other replicas have gone on without replica {self.replica}")
        if len(meeting.replicas) < self._min_replicas:
            left_over = f"{len(meeting.replicas)} of {counted(self._roster.num_replicas, 'replica')}"
            raise RunError(f"only {left_over} are left, and plan.replication.min_replicas = {self._min_replicas}")
        return meeting

    def _decide(self, number: int, key: str, replicas: Sequence[int]) -> None:
        meeting = Meeting(number, {replica: self._expected[replica] for replica in replicas}, dict(self._waiting()))
        self._store.compare_set(f"{key}/members", "", str(meeting))

    def _waiting(self) -> Iterator[tuple[int, int]]:
        """Replicas all of whose ranks wait to be taken in, and their incarnations."""
        for replica in range(self._roster.num_replicas):
            if replica not in self._expected and not self._pulse.has_left(replica):
                incarnation = self._roster.incarnation(replica)
                if self._store.add(f"joining/{replica}.{incarnation}", 0) == self._roster.num_ranks:
                    yield replica, incarnation

    def _has_left(self, replica: int) -> bool:
        """True if a replica that is expected has left; it may have been started again since."""
        return self._pulse.has_left(replica, self._expected[replica])

    def _has_mean(self, key: str, meeting: Meeting, tensor: Tensor, average: Callable[[Tensor, Peers], None]) -> bool:
        """Averages in a thread, while this one looks after the other members; False if that failed."""
        failures: list[RuntimeError] = []

        def run() -> None:
            try:
                average(tensor, self._peers_of(key, meeting.replicas))
            except RuntimeError as error:
                failures.append(error)

        thread = threading.Thread(target=run, name=f"outer step {key}", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_S)
            self._recorder.waiting("averaging over replicas", self._recorder.step)
            is_lost = any(map(self._has_left, meeting.replicas)) or self._store.check([f"{key}/outcome"])
            if thread.is_alive() and is_lost:
                self._has_stuck_thread = True
                break
        if failures or thread.is_alive():
            self._peers = None
            return False
        return True

    def _is_kept(self, key: str, meeting: Meeting, has_mean: bool) -> bool:
        """Agrees with the other members on whether the mean is used."""
        outcome = f"{key}/outcome"
        if has_mean:
            self._store.set(f"{key}/done/{self._rank}", "")
            if self._store.add(f"{key}/done", 1) == len(meeting.replicas) * self._roster.num_ranks:
                self._store.compare_set(outcome, "", "kept")
        else:
            self._store.compare_set(outcome, "", "failed")
        while not self._appears(outcome, "waiting for the other replicas"):
            silent = [replica for replica in meeting.replicas if not self._all_say(f"{key}/done", replica)]
            if any(map(self._has_left, silent)):
                self._store.compare_set(outcome, "", "failed")
        is_kept = bool(self._store.get(outcome) == b"kept")
        if not is_kept:
            self._peers = None
        return is_kept

    def _appears(self, key: str, doing: str) -> bool:
        """Waits for a key for a moment; the launcher and the other replicas know meanwhile that this rank waits."""
        self._recorder.waiting(doing, self._recorder.step)
        if self._pulse.error is not None:
            raise RunError(f"the store of the run does not answer: {self._pulse.error}")
        return appears(self._store, key)

    def _all_say(self, key: str, replica: int) -> bool:
        return bool(self._store.check([f"{key}/{rank}" for rank in self._roster.ranks_of(replica)]))

    def _peers_of(self, key: str, replicas: tuple[int, ...]) -> Peers:
        """The ranks with the same shard in these replicas."""
        if self._peers is None or self._peers[0] != replicas:
            store = PrefixStore(f"{key}/group/{self._column}", connect(*self._roster.address))
            group = gloo_group(store, replicas.index(self.replica), len(replicas), self._timeout)
            ranks = tuple(self._roster.ranks_of(replica)[self._column] for replica in replicas)
            self._peers = replicas, Peers.of(group, ranks, self._rank, self._recorder)
        return self._peers[1]

    def _pair(self, replica: int, incarnation: int, place: int) -> dist.ProcessGroup:
        """The first member (place 0) and the replica that joins."""
        store = PrefixStore(f"state/{replica}.{incarnation}/{self._column}", connect(*self._roster.address))
        return gloo_group(store, place, 2, self._timeout)


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A process group of gloo apart from the default one, as torch makes its own (torch 2.13, distributed_c10d)."""
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, timeout))
    return group
