"""The life of one rank: where its output goes, its signs of life, and how its errors are told."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from executor.heartbeat import Heartbeat, RankState
from simplan.files import write_whole

__all__ = [
    "ATTEMPT_VARIABLE",
    "FIRST_ATTEMPT_VARIABLE",
    "FIRST_RANK_VARIABLE",
    "TEAM_VARIABLE",
    "RankFiles",
    "attempt",
    "first_rank",
    "live_as_rank",
    "team_number",
]

ATTEMPT_VARIABLE = "SIMPLAN_ATTEMPT"
"""Environment variable in which the agent tells its ranks how often it has started ranks before them."""

FIRST_ATTEMPT_VARIABLE = "SIMPLAN_FIRST_ATTEMPT"
"""Environment variable with the attempt that an agent begins with: more than 0 where a team before has made some."""

FIRST_RANK_VARIABLE = "SIMPLAN_FIRST_RANK"
"""Environment variable with the rank of this node's first process."""

TEAM_VARIABLE = "SIMPLAN_TEAM"
"""Environment variable with the number of teams of nodes that have run ranks of this job before this one."""


class RankFiles:
    """The files of one rank in the folder of a run.

    Attributes:
        heartbeat: Its signs of life (binary).
        log: Its output, tracebacks included.
        steps: One JSON line per finished step, written by ``run`` jobs.
        losses: Of rank 0: for every step until the last checkpoint, ``{step, loss}`` with the mean over all ranks.
        checkpoints: One JSON line per checkpoint, of rank 0.
        error: The exception that ended it, as JSON; absent when none did.
    """

    def __init__(self, out_dir: Path, rank: int) -> None:
        self.heartbeat = out_dir / f"rank{rank}.heartbeat"
        self.log = out_dir / f"rank{rank}.log"
        self.steps = out_dir / f"rank{rank}.steps.jsonl"
        self.losses = out_dir / f"rank{rank}.losses.jsonl"
        self.checkpoints = out_dir / f"rank{rank}.checkpoints.jsonl"
        self.error = out_dir / f"rank{rank}.error.json"

    def remove(self) -> None:
        """Deletes what an earlier run left."""
        for path in (self.heartbeat, self.log, self.steps, self.losses, self.checkpoints, self.error):
            path.unlink(missing_ok=True)


def attempt() -> int:
    """How often the ranks of this job had been started before."""
    return int(os.environ.get(ATTEMPT_VARIABLE, "0"))


def team_number() -> int:
    """How many teams of nodes have run ranks of this job before."""
    return int(os.environ.get(TEAM_VARIABLE, "0"))


def first_rank() -> int:
    """The rank of this node's first process."""
    return int(os.environ[FIRST_RANK_VARIABLE])


def live_as_rank(out_dir: Path, body: Callable[[Heartbeat, int], RankState | None]) -> None:
    """Runs ``body(heartbeat, rank)`` as the whole work of this process, which torchrun started.

    The body gives the state that it ends in, None for ``FINISHED``.

    stdout and stderr go to the rank's log. An exception is written to the rank's error file and ends the process at
    once with exit code 1: threads of torch may be stuck in communication with ranks that are gone.
    """
    # torchrun's own count follows the order in which nodes came; ours is that of the nodes' places
    rank = first_rank() + int(os.environ["LOCAL_RANK"])
    os.environ["RANK"] = str(rank)
    files = RankFiles(out_dir, rank)
    log = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    heartbeat = Heartbeat(files.heartbeat, attempt())
    try:
        ended = body(heartbeat, rank) or RankState.FINISHED
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: whatever ends a rank early is told
        told = {"time_s": time.monotonic(), "type": type(error).__name__, "message": str(error), "attempt": attempt()}
        try:
            write_whole(files.error, json.dumps(told))
        except OSError as full:  # the heartbeat has its place on the disk already
            heartbeat.beat(RankState.FAILED, f"{full.strerror} in the folder of the run")
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    heartbeat.beat(ended, ended.name.lower())
