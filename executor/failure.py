"""Why a run ended early, and which of several accounts of it is the cause."""

from __future__ import annotations

from collections.abc import Sequence

from simplan.errors import Problem, RunError, SimplanError, SpecError
from simplan.spec.base import Spec

__all__ = ["Failure", "first_cause"]


class Failure(Spec):
    """Why a run, or an attempt to run its ranks, ended early, as one node sees it.

    Attributes:
        sentence: For people.
        consequence: It may be the consequence of what happened on another node.
        exit_code: Of the error.
    """

    sentence: str
    consequence: bool = False
    exit_code: int = RunError.exit_code

    def error(self) -> SimplanError:
        """The same as an error."""
        if self.exit_code == SpecError.exit_code:
            return SpecError(Problem(field="", rule=self.sentence))
        return RunError(self.sentence)


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """Of what the nodes say, in their order: the first that is no consequence, else the first; None for nothing."""
    return next((failure for failure in failures if not failure.consequence), failures[0] if failures else None)
