"""Children are waited for so that a signal, whenever it comes, leaves them as they were."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from simplan.children import exit_code, terminate_child


class _Locked:
    """As Popen: locked while it is looked at. The signal comes just then."""

    def __init__(self, number: signal.Signals, code: int | None) -> None:
        self.number, self.code, self.locked = number, code, False

    def wait(self, timeout: float | None = None) -> int:
        self._be_looked_at()
        if self.code is None:
            raise subprocess.TimeoutExpired("child", timeout or 0.0)
        return self.code

    def terminate(self) -> None:
        self._be_looked_at()

    def _be_looked_at(self) -> None:
        assert not self.locked
        self.locked = True
        signal.raise_signal(self.number)
        self.locked = False


class _Stop(BaseException):
    pass


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def ending(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal whose handler raises."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stop

    before = signal.signal(request.param, stop)
    yield request.param
    assert signal.signal(request.param, before) is stop


@pytest.mark.parametrize("code", [0, None])
@pytest.mark.parametrize("act", [exit_code, terminate_child])
def test_a_signal_does_not_leave_a_child_locked(
    ending: signal.Signals, act: Callable[[_Locked], None], code: int | None
) -> None:
    child = _Locked(ending, code)
    with pytest.raises(_Stop):
        act(child)
    assert not child.locked


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert exit_code(_Locked(signal.SIGHUP, 3)) == 3
    assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN


def test_the_exit_code_of_a_process() -> None:
    program = "import sys; sys.stdin.read(); sys.exit(7)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
        assert exit_code(child, 0.0) is None
        assert exit_code(child, 0.2) is None
        assert child.stdin is not None
        child.stdin.close()
        assert exit_code(child) == 7
        assert exit_code(child, 0.0) == 7


def test_a_process_that_is_asked_to_end_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        terminate_child(child)
        assert exit_code(child) == -signal.SIGTERM
