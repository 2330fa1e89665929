"""Progress of long commands on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from simplan.cli.terminal.output import say
from simplan.wording import visible

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_QUARTERS = 4
_LINE_EVERY_S = 10.0


class ProgressLine:
    """Progress bar of one task; a context manager.

    Args:
        title: Name of the task.
        quarters: Where stderr is no terminal, print a line at once and at every quarter; False for one every 10 s.
    """

    def __init__(self, title: str, *, quarters: bool = True) -> None:
        self._title = title
        self._in_quarters, self._told_s = quarters, time.monotonic()
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._quarter = 0

    def __enter__(self) -> Self:
        if sys.stderr is None or not sys.stderr.isatty():
            if self._in_quarters:
                say(f"{self._title} ...")
            return self
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[what]}", markup=False),
            TimeElapsedColumn(),
        )
        self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(visible(self._title), total=None, what="")
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, of: int, what: str = "") -> None:
        """Shows the parts done, of all parts (0 while unknown), and the current part of the task."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=of or None, what=visible(what) or f"{done}/{of}")
        elif self._in_quarters:
            self._tell_quarters(done, of)
        elif time.monotonic() - self._told_s >= _LINE_EVERY_S:
            self._told_s = time.monotonic()
            say(f"{self._title}: {what or f'{done} of {of}'}")

    def _tell_quarters(self, done: int, of: int) -> None:
        quarter = _QUARTERS * done // max(of, 1)
        if quarter > self._quarter:
            self._quarter = quarter
            say(f"{self._title}: {done} of {of}")


def show_event(event: Mapping[str, Any], progress: ProgressLine) -> None:
    """Shows an event of the executor: a note, a step of a run, or a part of a calibration."""
    if event["event"] == "note":
        say(f"note: {event['text']}")
    elif "step" in event:
        progress.update(event["step"], event["of"], f"step {event['step']} of {event['of']}")
    else:
        progress.update(event["done"], event["of"], event.get("what", ""))
