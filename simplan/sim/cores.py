"""Processor sharing: CPU cores that several ranks use at once."""

from __future__ import annotations

from simpy import Environment, Event

__all__ = ["SharedCores"]

_DONE_S = 1e-15


class SharedCores:
    """Cores that work is spread over evenly, as an operating system's scheduler does.

    While the work that is running asks for no more cores than there are, all of it runs at full speed; beyond that,
    all of it slows down alike, by cores / demand.

    Args:
        env: The simulation.
        num_cores: Cores to share.
    """

    def __init__(self, env: Environment, num_cores: int) -> None:
        self._env = env
        self._num_cores = num_cores
        self._remaining_s: dict[Event, float] = {}
        self._demand: dict[Event, float] = {}
        self._updated_at_s = 0.0
        self._version = 0

    def run(self, done: Event, work_s: float, demand: float) -> None:
        """Runs work; ``done`` happens at its end.

        Args:
            done: An event not yet triggered.
            work_s: Time it takes alone.
            demand: Cores it keeps busy.
        """
        self._advance()
        self._remaining_s[done] = work_s
        self._demand[done] = demand
        self._schedule()

    @property
    def _speed(self) -> float:
        demand = sum(self._demand.values())
        return min(1.0, self._num_cores / demand) if demand > 0 else 1.0

    def _advance(self) -> None:
        """Accounts for the work done since the last change."""
        elapsed_s = (self._env.now - self._updated_at_s) * self._speed
        self._updated_at_s = self._env.now
        for event in self._remaining_s:
            self._remaining_s[event] -= elapsed_s

    def _schedule(self) -> None:
        """Sets the alarm for the next completion; older alarms become void."""
        self._version += 1
        if not self._remaining_s:
            return
        version = self._version
        wait_s = max(0.0, min(self._remaining_s.values())) / self._speed
        alarm = self._env.timeout(wait_s)
        assert alarm.callbacks is not None
        alarm.callbacks.append(lambda _: self._complete() if version == self._version else None)

    def _complete(self) -> None:
        self._advance()
        nearest_s = min(self._remaining_s.values())
        for event in [e for e, left in self._remaining_s.items() if left <= nearest_s + _DONE_S]:
            del self._remaining_s[event], self._demand[event]
            event.succeed()
        self._schedule()
