"""Faults that a run is to meet: the clock of the leading launcher, and the signals of every launcher to its ranks."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from executor.launch.nodes import Rendezvous
from executor.launch.processes import children_by_rank, signal_ours
from executor.launch.watchdog import Beats, is_action
from simplan.runs.faults import Fault

_SLOW_PERIOD_S = 0.05

OnLost = Callable[[float | None], None]
"""Called before this node is lost, with the seconds until it is there again; None for never."""


class FaultHappened(NamedTuple):
    """A fault, and its time on ``time.monotonic``'s clock of the leading node."""

    fault: Fault
    time_s: float


class _Coming(NamedTuple):
    """A fault that is due, of ranks that meet at an address."""

    fault: Fault
    ranks: tuple[int, ...]
    meeting: str


class FaultInjector:
    """Makes the faults of a run happen.

    Args:
        faults: Faults of the run.
        rendezvous: Connection to the other nodes; None for this machine alone.
        rank_of: As of ``RankLaunch``.
        on_lost: See ``OnLost``.

    Attributes:
        happened: On the leading node, the faults so far.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        rendezvous: Rendezvous | None,
        rank_of: Callable[[int, int], int],
        on_lost: OnLost | None,
    ) -> None:
        self._pending, self._rendezvous, self._rank_of, self._on_lost = list(faults), rendezvous, rank_of, on_lost
        self._leads = rendezvous is None or rendezvous.nodes.leads
        self._processes: tuple[int, ...] = ()
        self._num_processes, self._num_active = 0, 0
        self._age_s, self._since_s = 0.0, None if self._leads else 0.0
        self._has_begun = False
        self._meeting = ""
        self._coming: list[_Coming] = []
        self._num_heard = 0 if rendezvous is None or self._leads else rendezvous.num_told()
        self.happened: list[FaultHappened] = []

    def ranks_start(self, meeting: str, processes: tuple[int, ...], num_processes: int, num_active: int) -> None:
        """To be called when ranks start.

        Args:
            meeting: Address at which these ranks meet.
            processes: torchrun's numbers of the processes of this node.
            num_processes, num_active: Number of all processes, and of those that have work.
        """
        self._processes, self._num_processes, self._num_active = processes, num_processes, num_active
        self._meeting = meeting
        if self._has_begun and self._since_s is None:
            self._since_s = time.monotonic()

    def poll(self, beats: Beats) -> None:
        """Lets faults happen that are due; to be called often, with the heartbeats of this node's ranks."""
        if self._leads:
            self._begin(beats)
            for fault in [fault for fault in self._pending if self._is_due(fault, beats)]:
                if self._since_s is not None:  # the one before may have stopped the ranks
                    self._pending.remove(fault)
                    self._happens(fault)
        elif self._rendezvous is not None:
            for told in self._rendezvous.told_since(self._num_heard):
                self._num_heard += 1
                heard = json.loads(told)
                self._coming.append(_Coming(Fault(**heard["fault"]), tuple(heard["ranks"]), heard["meeting"]))
        # those of other ranks are of earlier ones, which have ended, or of ranks that this node is about to start
        now = [coming for coming in self._coming if coming.meeting == self._meeting]
        hit = [coming for coming in now if self._hit(coming.fault, coming.ranks)]
        self._coming = [coming for coming in self._coming if coming not in hit]

    def _begin(self, beats: Beats) -> None:
        if not self._has_begun and any(beat is not None and is_action(beat.doing) for beat in beats.values()):
            self._has_begun, self._since_s = True, time.monotonic()

    def _is_due(self, fault: Fault, beats: Beats) -> bool:
        if self._since_s is None:
            return False
        if fault.at_s is not None:
            return self._age_s + time.monotonic() - self._since_s >= fault.at_s
        steps = [beat.step for beat in beats.values() if beat is not None]
        return fault.at_step is not None and max(steps, default=0) >= fault.at_step

    def _happens(self, fault: Fault) -> None:
        now_s = time.monotonic()
        ranks = self._ranks_of(fault)
        if ranks is None:
            return
        self.happened.append(FaultHappened(fault, now_s))
        if fault.kind != "slow" and self._since_s is not None:
            self._age_s, self._since_s = self._age_s + now_s - self._since_s, None
        self._coming.append(_Coming(fault, ranks, self._meeting))
        if self._rendezvous is not None:
            told = {"fault": fault.model_dump(), "ranks": ranks, "meeting": self._meeting}
            self._rendezvous.tell(json.dumps(told))

    def _ranks_of(self, fault: Fault) -> tuple[int, ...] | None:
        """Ranks that a fault hits; None where there is no node but the one at the endpoint."""
        if fault.rank is not None:
            return (fault.rank % self._num_active,)
        assert fault.node is not None
        per_node, number = len(self._processes), self._num_processes // len(self._processes)
        others = [node for node in range(number) if node != self._processes[0] // per_node]
        if not others:
            return None
        first = others[(fault.node - 1) % len(others)] * per_node
        return tuple(self._rank_of(self._num_processes, process) for process in range(first, first + per_node))

    def _hit(self, fault: Fault, ranks: tuple[int, ...]) -> bool:
        """Hits the ranks of this node; False where one has not been started yet."""
        mine = {p for p in self._processes if self._rank_of(self._num_processes, p) in ranks}
        if not mine:
            return True
        if fault.node is not None and fault.kind in ("kill", "preempt"):
            self._lose_this_node(fault)
            return True
        started = children_by_rank()  # also while they import torch, before their first heartbeat
        if not mine <= started.keys():
            return False
        for pid in (started[process] for process in mine):
            if fault.kind == "kill":
                signal_ours(pid, signal.SIGKILL)
            elif fault.kind == "stop":
                signal_ours(pid, signal.SIGSTOP)
            elif fault.kind == "slow":
                _in_background(_slow_down, pid, fault.slowdown or 1.0, fault.for_s or 0.0)
            elif signal_ours(pid, signal.SIGTERM):
                _in_background(_kill_later, pid, fault.notice_s or 0.0)
        return True

    def _lose_this_node(self, fault: Fault) -> None:
        """Ends this launcher, and with it its ranks, at once or after a notice."""
        if self._on_lost is not None:
            self._on_lost(fault.for_s)
        if fault.kind == "preempt":
            os.kill(os.getpid(), signal.SIGTERM)
            _in_background(_kill_this_process_later, fault.notice_s or 0.0)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def _in_background(work: Callable[..., None], *args: float) -> None:
    threading.Thread(target=work, args=args, name="fault", daemon=True).start()


def _slow_down(pid: int, slowdown: float, for_s: float) -> None:
    """Stops a process for a share of every period, so that it takes ``slowdown`` times as long."""
    end_s, run_s = time.monotonic() + for_s, _SLOW_PERIOD_S / slowdown
    with suppress(ProcessLookupError):
        while time.monotonic() < end_s and signal_ours(pid, signal.SIGSTOP):
            time.sleep(_SLOW_PERIOD_S - run_s)
            signal_ours(pid, signal.SIGCONT)
            time.sleep(run_s)


def _kill_later(pid: int, notice_s: float) -> None:
    time.sleep(notice_s)
    signal_ours(pid, signal.SIGKILL)


def _kill_this_process_later(notice_s: float) -> None:
    time.sleep(notice_s)
    os.kill(os.getpid(), signal.SIGKILL)
