"""What the launcher says about ranks that ended or went silent, from files and beats made by hand."""

from __future__ import annotations

import ast
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import executor
from executor.distributed.mesh import run_timeout
from executor.launch.errors import RankEnd
from executor.launch.launcher import logging_to, rank_environment
from executor.launch.nodes import Rendezvous
from executor.launch.rank import THREADS_VARIABLE, unfinished_error_file
from executor.launch.watchdog import Beat, RankState, find_stall, late_in_collective, late_in_p2p
from executor.run import _Run
from executor.worker import use_device
from simplan.errors import RunError
from simplan.runs.elastic import RendezvousOptions
from simplan.runs.measurement import Measurement
from tests.executor.conftest import make_job
from tests.support.problems import says

RUNNING, WAITING, FINISHED = RankState.RUNNING, RankState.WAITING, RankState.FINISHED
TIMEOUT_S = 10.0
CUT_SHORT = -6
BOOM = (5.0, "boom")
NCCL_MEMORY = (5.0, "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error; Cuda failure 2 'out of memory'")
LOST = (4.0, "Connection closed by peer [127.0.0.1]:1234")  # before BOOM, as clocks and files may have it


@pytest.mark.parametrize(
    ("exits", "errors", "said"),
    [
        # torchrun sends SIGTERM to whoever is left: a consequence
        ({0: -15, 1: 1}, {1: BOOM}, "rank 1 raised RuntimeError: boom; the traceback is in "),
        ({0: -15, 1: 3}, {}, "rank 1 ended with exit code 3; its output is in "),
        ({0: -15, 1: -9}, {}, "rank 1 was killed by signal 9"),
        ({0: -15}, {}, "rank 0 was terminated"),
        ({0: 143, 1: 3}, {}, "rank 1 ended with exit code 3; its output is in "),
        # ranks that lost their peer: victims of a kill, of an error, of a silent exit
        ({0: 1, 1: -9}, {0: LOST}, "rank 1 was killed by signal 9"),
        ({0: 1, 1: 1}, {0: LOST, 1: BOOM}, "rank 1 raised RuntimeError: boom; "),
        ({0: 1, 1: 3}, {0: LOST}, "rank 1 ended with exit code 3; "),
        ({0: 1, 1: -15}, {0: LOST}, "rank 0 raised RuntimeError: Connection closed by peer"),
        # of two errors, the earlier
        ({0: 1, 1: 1}, {0: (6.0, "later"), 1: BOOM}, "rank 1 raised RuntimeError: boom; "),
        # an error comes before an exit that may be its consequence
        ({0: 1, 1: 1}, {1: BOOM}, "rank 1 raised RuntimeError: boom; "),
        # ended while it wrote down that it had lost its peer
        ({0: CUT_SHORT, 1: 3}, {}, "rank 1 ended with exit code 3; "),
        # NCCL's own words for a lack of memory are no other rank's fault
        ({0: 1, 1: 1}, {0: LOST, 1: NCCL_MEMORY}, "rank 1 raised RuntimeError: NCCL error"),
        # before a restart torchrun does not tell exit codes
        (None, {0: LOST}, "rank 1 was killed"),
        (None, {0: LOST, 1: BOOM}, "rank 1 raised RuntimeError: boom; "),
        ({}, {}, "torchrun ended without having run the ranks; their output is in "),
    ],
)
def test_the_first_cause_is_told(
    exits: dict[int, int] | None, errors: dict[int, tuple[float, str]], said: str, tmp_path: Path
) -> None:
    files = {rank: tmp_path / f"error{rank}.json" for rank in range(2)}
    for rank, (time_s, message) in errors.items():  # as torch's ``@record`` writes them
        files[rank].write_text(json.dumps({"message": {"message": f"RuntimeError: {message}", "extraInfo": {}}}))
        os.utime(files[rank], (time_s, time_s))
    for rank in range(2):
        if (exits or {}).get(rank) == CUT_SHORT:
            unfinished_error_file(files[rank]).touch()
    end = RankEnd(dict.fromkeys(range(2)), files, {rank: tmp_path / f"{rank}.log" for rank in range(2)}, exits)
    assert str(end.cause()).startswith(said)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        # silent longer than the timeout, but what it waits for still comes
        (((WAITING, 30.0, "0B1"), (RUNNING, 1.0, "1F1")), None),
        (((WAITING, 30.0, "0B1"), (WAITING, 1.0, "1F1")), None),
        (((RUNNING, 9.0, "0B1"), (WAITING, 9.0, "1F1")), None),
        (((FINISHED, 30.0, "finished"), (RUNNING, 1.0, "1F1")), None),
        (((FINISHED, 30.0, "finished"), (FINISHED, 30.0, "finished")), None),
        (
            ((WAITING, 30.0, "0B1"), (RUNNING, 11.0, "1F1")),
            "rank 1 ... no progress ... 10 s ... 1F1 of step 3 ... rank 0 ... waiting in 0B1",
        ),
        # a rank that does not wait and is silent ends the run though another still beats
        (
            ((RUNNING, 11.0, "0F1"), (WAITING, 1.0, "1F1")),
            "rank 0 ... no progress ... 10 s ... 0F1 of step 3 ... rank 1 ... waiting in 1F1",
        ),
        (
            ((RUNNING, 11.0, "0F1"), (RUNNING, 1.0, "1F1")),
            "rank 0 ... no progress ... 10 s ... 0F1 of step 3 ... rank 1 ... in 1F1",
        ),
        (
            ((WAITING, 12.0, "0B1"), (WAITING, 11.0, "1F1")),
            "no rank ... progress ... 10 s ... rank 0 ... waiting in 0B1 ... rank 1 ... waiting in 1F1",
        ),
        (
            ((FINISHED, 12.0, "finished"), (WAITING, 11.0, "1F1")),
            "no rank ... progress ... 10 s ... rank 1 ... waiting in 1F1 ... rank 0 ... finished",
        ),
        (((WAITING, 250.0, "waiting for step 1 to start"), None), None),  # importing torch on a busy host
    ],
)
def test_a_hang_is_a_silent_rank_that_does_not_wait_or_silence_of_all(
    ranks: tuple[tuple[RankState, float, str] | None, ...], said: str | None
) -> None:
    now_s = time.monotonic()
    beats = {k: rank and Beat(1, now_s - rank[1], 2, rank[0], rank[2]) for k, rank in enumerate(ranks)}
    stall = find_stall(beats, now_s - 60.0, TIMEOUT_S)
    assert (stall is None) == (said is None)
    assert says(stall.sentence if stall else "", said or "")


def test_ranks_have_five_minutes_for_their_start() -> None:
    """The timeout is for steps: a short one must not end a run that imports torch or builds its model."""
    now_s = time.monotonic()
    other = Beat(1, now_s - 301.0, 0, WAITING, "waiting for step 1 to start")
    for beat, said in (
        (None, "rank 1 did not start within 300 s; rank 0 was waiting for step 1 to start"),
        (
            Beat(2, now_s - 301.0, 0, RUNNING, "building the model"),
            "rank 1 made no progress for 300 s (building the model); rank 0 was waiting for step 1 to start",
        ),
    ):
        assert find_stall({0: other, 1: beat}, now_s - 301.0, TIMEOUT_S) == (1, said)
        assert find_stall({0: other, 1: beat and beat._replace(time_s=now_s - 299.0)}, now_s - 299.0, TIMEOUT_S) is None


def test_where_all_ranks_of_a_node_wait_another_node_is_to_act_first() -> None:
    now_s = time.monotonic()
    said = "no rank of this node made progress for 10 s: rank 0 was waiting in 0B1"
    for silent_s, sentence in ((12.0, None), (16.0, said)):
        stall = find_stall({0: Beat(1, now_s - silent_s, 2, WAITING, "0B1")}, now_s - 60.0, TIMEOUT_S, others=True)
        assert (stall and stall.sentence) == sentence


def dump(*issued: int, retired: bool = True) -> dict[str, Any]:
    """What torch 2.13's Flight Recorder has on a rank of two groups; the last collective may not have come back."""
    entries = [
        {
            "process_group": (str(group), name),
            "collective_seq_id": number,
            "profiling_name": "nccl:all_reduce",
            "state": "scheduled",
            "retired": retired or number < issued[-1],
            "is_p2p": False,
        }
        for group, (count, name) in enumerate(zip(issued, ("default_pg", "mesh_dp"), strict=False))
        for number in range(1, count + 1)
    ]
    config = {str(group): {"name": str(group), "desc": "", "ranks": "[0, 1, 2]"} for group in range(len(issued))}
    return {"version": "2.10", "pg_config": config, "entries": entries}


def test_flight_recorder_names_the_rank_that_has_not_issued_a_collective() -> None:
    """The host of the ranks 0 and 2 runs ahead: their heartbeats say OPTIM, while the device waits in number 7."""
    late = late_in_collective({0: dump(3, 7, retired=False), 1: dump(3, 6), 2: dump(3, 7, retired=False)})
    said = "rank 1 has not issued nccl:all_reduce number 7 of group mesh_dp, in which rank 0 waits"
    assert late == (1, said)
    assert late_in_collective({0: dump(3, 7), 1: dump(3, 7)}) is None
    assert late_in_collective({}) is None


class _Nodes:
    """A leading node to which the other node never sends what its rank measured."""

    nodes = SimpleNamespace(leads=True)

    def leave(self, files: dict[int, dict[str, str]]) -> None:
        self._files = files

    def collect(self, num_ranks: int, *, failed: bool) -> dict[int, tuple[str, dict[str, str]]]:
        return {rank: ("here", texts) for rank, texts in self._files.items()}


def test_a_run_without_the_measurements_of_another_node_is_not_complete(tmp_path: Path) -> None:
    run = _Run(make_job(dp=2), tmp_path, None, None, cast(Rendezvous, _Nodes()), local_ranks=(0,))
    with pytest.raises(RunError, match=r"did not send .* 1 rank .* rank 1; "):
        run._gather(None)
    assert not Measurement.model_validate_json((tmp_path / "measurement.json").read_bytes()).complete


def transfers(*pending: str, group: Sequence[int] = (0, 1, 2, 3)) -> dict[str, Any]:
    """Flight Recorder's entries on a rank of a pipeline: one transfer that ended, then those that did not."""
    entries = [
        {"process_group": ("1", "pp"), "collective_seq_id": 0, "profiling_name": name, "retired": not n, "is_p2p": True}
        for n, name in enumerate(("nccl:recv 1<-0", *pending))
    ]
    return {"pg_config": {"1": {"name": "1", "ranks": str(list(group))}}, "entries": entries}


def test_flight_recorder_names_the_rank_that_has_not_issued_a_transfer() -> None:
    """Stage 0 waits for stage 1, that for stage 2, and that for stage 3, which hangs: heartbeats would name any."""
    dumps = {
        0: transfers("nccl:recv 0<-1"),
        1: transfers("nccl:recv 1<-2"),
        2: transfers("nccl:send 2->3"),
        3: transfers(),
    }
    rank, sentence = late_in_p2p(dumps) or (None, "")
    assert rank == 3
    assert says(sentence, "rank 3", "has not issued", "nccl:send 2->3", "rank 2 waits")
    assert late_in_p2p(dumps, 1) == (3, sentence)  # the rank that is late in a collective is a victim too
    rank, sentence = late_in_p2p({0: transfers("nccl:recv 0<-1", group=(5, 7)), 7: transfers()}) or (None, "")
    assert rank == 7
    assert says(sentence, "rank 7", "has not issued", "nccl:recv 0<-1", "rank 0 waits")
    assert late_in_p2p({0: transfers("nccl:recv 0<-1"), 1: transfers("nccl:recv 1<-0")}) is None
    assert late_in_p2p({0: transfers()}) is None


def test_threads_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launcher, however often it prepares the environment, and by a rank; without any, cores are shared."""
    for variable in ("OMP_NUM_THREADS", THREADS_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    assert rank_environment()["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for name, value in rank_environment().items():
        monkeypatch.setenv(name, value)
    assert rank_environment()["OMP_NUM_THREADS"] == "7"
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for device in ("cpu", "cuda"):
        use_device(device, 1)
    assert chosen == []
    monkeypatch.setenv(THREADS_VARIABLE, "")
    for device in ("cpu", "cuda"):
        use_device(device, 1)
    assert chosen == [len(os.sched_getaffinity(0))] * 2


@pytest.mark.parametrize("file", ["/dev/full", "/no/such/folder/torchrun.log"])
def test_a_log_that_cannot_be_written_prints_nothing(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The disk is full; the run's own sentence is the only one."""
    with logging_to(Path(file)):
        for _ in range(2):
            logging.getLogger("torch.distributed.elastic").error("lost")
    assert capsys.readouterr().err == ""


def test_a_node_says_where_it_listens() -> None:
    """Who reaches the store can change the run, so that its address is no secret of the code."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nodes = RendezvousOptions(min_nodes=1, max_nodes=2, ranks_per_node=1, host="127.0.0.1", port=port, leads=True)
    leading = Rendezvous(nodes, "{}")
    listens = f"ranks listen at ports of {leading.address}: torch asks for no password"
    assert leading.listening.startswith(f"the store of the run listens at 127.0.0.1:{port}, and {listens}")
    socket.create_connection(("127.0.0.1", port)).close()
    joining = Rendezvous(nodes.model_copy(update={"leads": False}), None)
    assert joining.listening.startswith(listens)


def test_every_group_has_the_timeout_of_the_run() -> None:
    """torch gives groups its own timeout, whatever the default group has."""
    timeout = timedelta(seconds=7777)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        assert run_timeout() == timeout
    finally:
        dist.destroy_process_group()
    makers = ("new_group", "new_subgroups_by_enumeration", "init_device_mesh")
    calls = [
        (path.name, ast.unparse(node))
        for path in Path(executor.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers
    ]
    assert len(calls) >= 3
    assert [call for call in calls if "timeout=run_timeout()" not in call[1]] == []
