"""What server and workers tell each other: pickled one after the other. Both are ours and of one version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simplan.errors import SimplanError, SpecError

__all__ = ["Done", "Failed", "Question", "Tell", "Update"]


@dataclass(frozen=True, slots=True)
class Question:
    """A piece of work.

    Attributes:
        task: A function of a module, without Streamlit.
        args, kwargs: Plain data.
        tells: Whether it says how far it is: it takes ``tell``, a ``Tell``, besides.
    """

    task: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    tells: bool = False

    def answer(self, tell: Tell) -> Done | Failed:
        """Does the work; what is wrong with the question is an answer, a bug is not."""
        more = {"tell": tell} if self.tells else {}
        try:
            return Done(self.task(*self.args, **self.kwargs, **more))
        except SpecError as error:
            return Failed(type(error), (error.problems,), error.file)
        except SimplanError as error:
            return Failed(type(error), error.args)


class Update(NamedTuple):
    """How far the work is.

    Attributes:
        done, total: Parts of the work.
        doing: What is done at present, in words.
        value: What is known so far; None for nothing.
    """

    done: int
    total: int
    doing: str
    value: Any = None


Tell = Callable[[Update], object]


class Done(NamedTuple):
    """The end, with what came of it."""

    value: Any


class Failed(NamedTuple):
    """The end, with the reason; errors do not survive the way between processes as they are.

    Attributes:
        kind: The error.
        args: What it is made of.
        file: Where the problems are, if in a file.
    """

    kind: type[SimplanError]
    args: tuple[Any, ...]
    file: str | None = None

    def error(self) -> SimplanError:
        """The error as it was raised."""
        return self.kind(*self.args, file=self.file) if issubclass(self.kind, SpecError) else self.kind(*self.args)
