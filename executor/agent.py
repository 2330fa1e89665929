"""torchrun, ending with its parent and writing down which ranks failed and how.

Run as ``python -m executor.agent FAILURES.json <arguments of torchrun>``. What torchrun knows about failed ranks
(rank, exit code, or signal) it otherwise only prints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from executor.processes import PARENT_VARIABLE, die_with_parent
from executor.rank import ATTEMPT_VARIABLE, FIRST_ATTEMPT_VARIABLE, FIRST_RANK_VARIABLE

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Runs torchrun with ``argv[1:]``; returns its exit code.

    ``argv[0]`` is the file that gets a line for every attempt that has failed: a JSON list of ``{rank, exitcode}``, a
    negative exit code being a signal; empty when the first to fail were ranks of another node.
    """
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api
    from torch.distributed.run import parse_args, run

    api.LocalElasticAgent = _telling_agent(Path(argv[0]))  # type: ignore[assignment, attr-defined]
    try:
        run(parse_args(argv[1:]))  # type: ignore[no-untyped-call]
    except ChildFailedError:
        return 1
    except SignalException as error:
        return 128 + int(signal.Signals(error.sigval))
    return 0


def _telling_agent(failures_file: Path) -> type:
    """Torchrun's agent, which tells its ranks which attempt they are, and us at once which ranks of it failed.

    A restart that another node has begun counts like one of this node's own, which torch does not: all nodes have made
    the same number of attempts, and run out of them together. The methods are those that torch has for agents of one's
    own (``SimpleElasticAgent``).
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    first = int(os.environ.get(FIRST_ATTEMPT_VARIABLE, "0"))

    class TellingAgent(LocalElasticAgent):
        attempt = first - 1
        num_told = first

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            self.attempt += 1
            self._remaining_restarts = max(0, worker_group.spec.max_restarts - (self.attempt - first))
            os.environ[ATTEMPT_VARIABLE] = str(self.attempt)
            started: dict[int, Any] = super()._start_workers(worker_group)
            return started

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            if result.is_failed():
                rank = int(os.environ[FIRST_RANK_VARIABLE])
                self._tell([{"rank": rank + f.local_rank, "exitcode": f.exitcode} for f in result.failures.values()])
            return result

        def _restart_workers(self, worker_group: WorkerGroup) -> None:
            self._tell([])  # when ranks here have not failed, those of another node have
            super()._restart_workers(worker_group)

        def _tell(self, failed: list[dict[str, int]]) -> None:
            if self.num_told <= self.attempt:
                self.num_told += 1
                with failures_file.open("a") as file:
                    file.write(json.dumps(failed) + "\n")

    return TellingAgent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
