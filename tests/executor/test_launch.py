"""What the launcher says about ranks that ended or went silent, from files and beats made by hand."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from executor.causes import cause_of, read_exits
from executor.heartbeat import Beat, RankState
from executor.rank import RankFiles
from executor.stalls import find_stall

RUNNING, WAITING, FINISHED = RankState.RUNNING, RankState.WAITING, RankState.FINISHED
TIMEOUT_S = 10.0
BOOM = (5.0, "boom")
LOST = (4.0, "Connection closed by peer [127.0.0.1]:1234")  # before BOOM, as clocks and files may have it


@pytest.mark.parametrize(
    ("exits", "errors", "said"),
    [
        # torchrun sends SIGTERM to whoever is left: a consequence
        ({0: -15, 1: 1}, {1: BOOM}, "rank 1 raised RuntimeError: boom; the traceback is in "),
        ({0: -15, 1: 3}, {}, "rank 1 ended with exit code 3; its output is in "),
        ({0: -15, 1: -9}, {}, "rank 1 was killed by signal 9"),
        ({0: -15}, {}, "rank 0 was killed by signal 15"),
        # ranks that lost their peer: victims of a kill, of an error, of a silent exit
        ({0: 1, 1: -9}, {0: LOST}, "rank 1 was killed by signal 9"),
        ({0: 1, 1: 1}, {0: LOST, 1: BOOM}, "rank 1 raised RuntimeError: boom; "),
        ({0: 1, 1: 3}, {0: LOST}, "rank 1 ended with exit code 3; "),
        ({0: 1, 1: -15}, {0: LOST}, "rank 0 raised RuntimeError: Connection closed by peer"),
        # of two errors, the earlier
        ({0: 1, 1: 1}, {0: (6.0, "later"), 1: BOOM}, "rank 1 raised RuntimeError: boom; "),
        # an error comes before an exit that may be its consequence
        ({0: 1, 1: 1}, {1: BOOM}, "rank 1 raised RuntimeError: boom; "),
        (None, {}, "torchrun ended without having run the ranks; its output is in "),
    ],
)
def test_the_first_cause_is_told(
    exits: dict[int, int] | None, errors: dict[int, tuple[float, str]], said: str, tmp_path: Path
) -> None:
    failures = tmp_path / "failures.json"
    if exits is not None:
        failures.write_text(json.dumps([{"rank": rank, "exitcode": code} for rank, code in exits.items()]))
    files = [RankFiles(tmp_path, rank) for rank in range(2)]
    for rank, (time_s, message) in errors.items():
        files[rank].error.write_text(json.dumps({"time_s": time_s, "type": "RuntimeError", "message": message}))
    found = (read_exits(failures) or [{}])[0]
    assert cause_of(found, files, (None, None), tmp_path / "torchrun.log").sentence.startswith(said)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        # silent longer than the timeout, but what it waits for still comes
        (((WAITING, 30.0, "0B1"), (RUNNING, 1.0, "1F1")), None),
        (((WAITING, 30.0, "0B1"), (WAITING, 1.0, "1F1")), None),
        (((WAITING, 30.0, "0B1"), None), None),
        (((RUNNING, 9.0, "0B1"), (WAITING, 9.0, "1F1")), None),
        (((FINISHED, 30.0, "finished"), (RUNNING, 1.0, "1F1")), None),
        (((FINISHED, 30.0, "finished"), (FINISHED, 30.0, "finished")), None),
        (
            ((WAITING, 30.0, "0B1"), (RUNNING, 11.0, "1F1")),
            "rank 1 made no progress for 10 s (last action 1F1 of step 3); rank 0 was waiting in 0B1",
        ),
        # a rank that does not wait and is silent ends the run though another still beats
        (
            ((RUNNING, 11.0, "0F1"), (WAITING, 1.0, "1F1")),
            "rank 0 made no progress for 10 s (last action 0F1 of step 3); rank 1 was waiting in 1F1",
        ),
        (
            ((RUNNING, 11.0, "0F1"), (RUNNING, 1.0, "1F1")),
            "rank 0 made no progress for 10 s (last action 0F1 of step 3); rank 1 was in 1F1",
        ),
        (
            ((WAITING, 12.0, "0B1"), (WAITING, 11.0, "1F1")),
            "no rank made progress for 10 s: rank 0 was waiting in 0B1; rank 1 was waiting in 1F1",
        ),
        (
            ((FINISHED, 12.0, "finished"), (WAITING, 11.0, "1F1")),
            "no rank made progress for 10 s: rank 1 was waiting in 1F1; rank 0 was finished",
        ),
    ],
)
def test_a_hang_is_a_silent_rank_that_does_not_wait_or_silence_of_all(
    ranks: tuple[tuple[RankState, float, str] | None, ...], said: str | None
) -> None:
    now_s = time.monotonic()
    beats = tuple(rank and Beat(1, now_s - rank[1], 2, rank[0], rank[2]) for rank in ranks)
    stall = find_stall(beats, now_s, TIMEOUT_S)
    assert (stall and stall.sentence) == said


def test_a_rank_that_never_starts_is_named() -> None:
    now_s = time.monotonic()
    beats = (Beat(1, now_s, 0, WAITING, "waiting for step 1 to start"), None)
    said = "rank 1 did not start within 10 s; rank 0 was waiting for step 1 to start"
    assert find_stall(beats, now_s - 11.0, TIMEOUT_S) == (1, said)
