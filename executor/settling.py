"""One piece of work on all nodes: done here, then agreed upon how it went everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from executor.decision import NodeResult, settle
from executor.departure import LeftError
from executor.exchange import OtherNodeError, RegroupError
from executor.failure import Failure
from executor.launch import RanksError
from executor.team import Team
from simplan.errors import SimplanError

__all__ = ["on_all_nodes"]


def on_all_nodes(
    team: Team,
    work: Callable[[], None],
    steps: Callable[[], Mapping[int, str]] = dict,
    keep: Callable[[NodeResult], None] = lambda result: None,
) -> None:
    """Does this node's part, and settles with the others how theirs went.

    Args:
        team: The nodes, which have met.
        work: This node's part.
        steps: What the ranks of this node have measured, once the work has ended, also early.
        keep: On node 0, gets what every other node has to say, also when the work has failed.

    Raises:
        RegroupError: Others than these nodes are to go on; nothing is settled.
        LeftError: This node has left; nothing is settled.
        SpecError, RunError: What the nodes have agreed on, the same on all of them.
    """
    without = "; it has the store of the run, which ends without it" if team.is_elastic and team.leads else ""
    failure: Failure | None = Failure(sentence=f"{team.me} was interrupted{without}")
    settles = True
    try:
        work()
        failure = None
    except (RegroupError, LeftError):
        settles = False
        raise
    except OtherNodeError as error:
        failure = Failure(sentence=str(error), consequence=True)
    except RanksError as error:  # which names its node
        failure = Failure(sentence=str(error), consequence=error.consequence)
    except SimplanError as error:
        failure = Failure(sentence=f"{team.me}: {error}", exit_code=error.exit_code)
    finally:
        found, theirs = settle(team, failure, steps()) if settles else (None, [])
        for result in theirs:
            keep(result)
    if found is not None:
        raise found.error()
