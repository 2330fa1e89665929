"""Messages between server and workers, pickled; both sides run the same version of the code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simplan.errors import SimplanError, SpecError


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """Request to a worker: a function with arguments.

    Attributes:
        task: A function of a module, without Streamlit.
        args, kwargs: Plain data.
        reports_progress: True when the task reports progress: it gets an additional argument ``report``, a ``Report``.
    """

    task: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    reports_progress: bool = False

    def run(self, report: Report) -> Done | Failed:
        """Runs the task; errors of simplan become a ``Failed``, bugs are raised."""
        more = {"report": report} if self.reports_progress else {}
        try:
            return Done(self.task(*self.args, **self.kwargs, **more))
        except SpecError as error:
            return Failed(type(error), (error.problems,), error.file)
        except SimplanError as error:
            return Failed(type(error), error.args)


class Update(NamedTuple):
    """Progress of a task.

    Attributes:
        done, total: Completed and total units of work.
        doing: Description of the current work.
        value: Intermediate result; None for none.
        left_s: Upper estimate of the remaining seconds of the current work; None while it is unknown.
    """

    done: int
    total: int
    doing: str
    value: Any = None
    left_s: float | None = None


Report = Callable[[Update], object]


class Done(NamedTuple):
    """End of a task, with its result."""

    value: Any


class Failed(NamedTuple):
    """End of a task with an error, in a form that can be pickled.

    Attributes:
        kind: Class of the error.
        args: Arguments of the error.
        file: File with the problems; None if they are not in a file.
    """

    kind: type[SimplanError]
    args: tuple[Any, ...]
    file: str | None = None

    def error(self) -> SimplanError:
        """The error that was raised."""
        return self.kind(*self.args, file=self.file) if issubclass(self.kind, SpecError) else self.kind(*self.args)
