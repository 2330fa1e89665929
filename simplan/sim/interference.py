"""Computing that is slower while bytes move: kernels of the communication library take multiprocessors and memory."""

from __future__ import annotations

from simpy import Environment, Event

__all__ = ["SlowedStream"]


class SlowedStream:
    """What one device computes, one operation after the other.

    Args:
        env: The simulation.
        slowdown: Time of computing beside communication over its time alone, at least 1.
    """

    def __init__(self, env: Environment, slowdown: float) -> None:
        self._env = env
        self._slowdown = slowdown
        self._moving = 0
        self._done: Event | None = None
        self._left_s = 0.0
        self._updated_at_s = 0.0
        self._version = 0

    def run(self, done: Event, work_s: float) -> None:
        """Computes; ``done`` happens at its end.

        Args:
            done: An event not yet triggered.
            work_s: Time it takes alone.
        """
        assert self._done is None, "one operation at a time"
        self._done, self._left_s, self._updated_at_s = done, work_s, self._env.now
        self._schedule()

    def move(self, change: int) -> None:
        """So many communications more are under way."""
        self._advance()
        self._moving += change
        self._schedule()

    @property
    def _speed(self) -> float:
        return 1.0 / self._slowdown if self._moving else 1.0

    def _advance(self) -> None:
        """Accounts for the work done since the last change."""
        self._left_s -= (self._env.now - self._updated_at_s) * self._speed
        self._updated_at_s = self._env.now

    def _schedule(self) -> None:
        """Sets the alarm for the end; older alarms become void."""
        self._version += 1
        if self._done is None:
            return
        version = self._version
        alarm = self._env.timeout(max(0.0, self._left_s) / self._speed)
        assert alarm.callbacks is not None
        alarm.callbacks.append(lambda _: self._complete() if version == self._version else None)

    def _complete(self) -> None:
        assert self._done is not None
        done, self._done = self._done, None
        done.succeed()
