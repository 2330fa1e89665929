"""How nodes meet, through torch's store on a port as they do: all, as many as there are, and too few."""

from __future__ import annotations

import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import executor.guest
import executor.meeting
from executor.failure import Failure
from executor.guest import NotNeededError
from executor.meeting import meet
from simplan.errors import RunError, SpecError
from simplan.program.fewer_nodes import FewerNodes, on_fewer_devices
from simplan.program.nodes import Nodes
from tests.executor.conftest import MakeJob
from tests.executor.test_nodes import free_port
from tests.executor.test_waiting_room import HERE, PATIENCE_S, STRANGERS
from tests.interrupts import heeded_interrupts


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor.guest, "_COUNT_S", 0.001)
    monkeypatch.setattr(executor.meeting, "_POLL_S", 0.01)


def test_a_node_that_comes_later_meets_those_that_have_begun(make_job: MakeJob) -> None:
    """Through torch's store on a port, as nodes do: two begin, one waits and is let in after them."""
    job = make_job(dp=3)
    one = FewerNodes(num_nodes=2, plan=on_fewer_devices(job.plan, 2), boundaries=job.boundaries, table=job.table)
    text = job.model_copy(update={"fewer_nodes": (one,)}).model_dump_json()
    nodes = Nodes(num_nodes=2, min_nodes=1, ranks_per_node=1, host="127.0.0.1", port=free_port())
    notes: list[str] = []
    with ThreadPoolExecutor() as pool:
        teams = [pool.submit(meet, nodes, text), pool.submit(meet, nodes, None)]
        first, second = (team.result(PATIENCE_S) for team in teams)
        third = pool.submit(meet, nodes, None, notes.append)
        deadline_s = time.monotonic() + PATIENCE_S
        room = first.room
        assert room is not None
        while not room.here:
            assert time.monotonic() < deadline_s
            first.ask(room.look)
            time.sleep(0.05)
        (guest,) = room.here
        hosts = [*first.hosts, guest.met.host]
        first.ask(lambda: room.admit([guest], 1, hosts, 1))
        came = third.result(PATIENCE_S)
    assert (first.node_rank, second.node_rank, came.node_rank) == (0, 1, 2)
    assert (came.number, came.first_attempt, came.ranks) == (1, 1, range(2, 3))
    assert came.hosts == tuple(hosts)
    assert notes == [f"the run at {nodes.endpoint} has begun; waiting for a place in it"]


def test_a_node_of_another_version_ends_the_meeting_with_a_sentence(make_job: MakeJob) -> None:
    nodes = Nodes(num_nodes=2, ranks_per_node=1, host="127.0.0.1", port=free_port())
    said = f"a node that joins has another version of simplan than node 0 ({HERE}); install one version on all nodes"
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, nodes, make_job(dp=2).model_dump_json())
        store = TCPStore("127.0.0.1", nodes.port, is_master=False, wait_for_workers=False)
        store.add("guests", 1)
        store.set("guest/1", STRANGERS[0])
        with pytest.raises(SpecError, match=f"^{re.escape(said)}$"):
            first.result(PATIENCE_S)
        assert Failure.model_validate_json(store.get("over")) == Failure(sentence=said, exit_code=2)


def test_a_node_that_is_interrupted_while_it_waits_says_goodbye(make_job: MakeJob) -> None:
    text = make_job(dp=2).model_dump_json()
    nodes = Nodes(num_nodes=2, min_nodes=1, ranks_per_node=1, host="127.0.0.1", port=free_port())
    main = threading.main_thread().ident
    assert main is not None
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, nodes, text)
        pool.submit(meet, nodes, None).result(PATIENCE_S)
        room, ask = first.result().room, first.result().ask
        assert room is not None
        with heeded_interrupts(), pytest.raises(KeyboardInterrupt):
            meet(nodes, None, lambda note: signal.pthread_kill(main, signal.SIGINT))
        assert ask(lambda: room._store.check(["bye-guest/2"]))


def elastic_job(make_job: MakeJob, num_nodes: int, *fewer: int) -> str:
    job = make_job(dp=num_nodes)
    left = tuple(
        FewerNodes(num_nodes=n, plan=on_fewer_devices(job.plan, n), boundaries=job.boundaries, table=job.table)
        for n in fewer
    )
    return job.model_copy(update={"fewer_nodes": left}).model_dump_json()


def test_a_run_begins_with_those_that_are_there_after_the_last_call(make_job: MakeJob) -> None:
    """Of four nodes three come, two can begin: the third one waits, and leaves without an error."""
    nodes = Nodes(
        num_nodes=4,
        min_nodes=1,
        ranks_per_node=1,
        host="127.0.0.1",
        port=free_port(),
        join_timeout_s=0.5,
        last_call_timeout_s=1.0,
    )
    text, notes = elastic_job(make_job, 4, 2, 1), list[str]()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, nodes, text)
        others = [
            pool.submit(meet, nodes.model_copy(update={"node_rank": place}), None, notes.append) for place in (3, 2)
        ]
        teams = [first.result(PATIENCE_S), others[1].result(PATIENCE_S)]
        with pytest.raises(NotNeededError, match=r"^the run at \S+ did not need this node for 0.5 s$"):
            others[0].result(PATIENCE_S)
    assert [(team.node_rank, team.num_ranks, team.number) for team in teams] == [(0, 2, 0), (1, 2, 0)]
    assert [team.job_here().plan.dp for team in teams] == [2, 2]
    begun = f"the run at {nodes.endpoint} has begun without {HERE}, which is not needed now; waiting for a place in it"
    assert notes == [begun]


def test_nobody_waits_for_the_last_call_when_all_are_there(make_job: MakeJob) -> None:
    nodes = Nodes(num_nodes=2, min_nodes=1, ranks_per_node=1, host="127.0.0.1", port=free_port())
    nodes = nodes.model_copy(update={"last_call_timeout_s": 10 * PATIENCE_S})
    with ThreadPoolExecutor() as pool:
        teams = [pool.submit(meet, nodes, job) for job in (elastic_job(make_job, 2, 1), None)]
        assert [len(team.result(PATIENCE_S).hosts) for team in teams] == [2, 2]


def test_too_few_nodes_do_not_begin(make_job: MakeJob) -> None:
    nodes = Nodes(num_nodes=4, min_nodes=3, ranks_per_node=1, host="127.0.0.1", port=free_port(), join_timeout_s=1.0)
    said = f"1 more of 3:4 nodes did not join {nodes.endpoint} within 1 s (node 1 ({HERE}) did); start the same command"
    with ThreadPoolExecutor() as pool:
        met_nodes = [pool.submit(meet, nodes, job) for job in (elastic_job(make_job, 4, 3), None)]
        for node in met_nodes:
            with pytest.raises(RunError, match=f"^{re.escape(said)}"):
                node.result(PATIENCE_S)


def test_a_run_of_all_nodes_lets_no_other_in(make_job: MakeJob) -> None:
    nodes = Nodes(num_nodes=2, ranks_per_node=1, host="127.0.0.1", port=free_port())
    with ThreadPoolExecutor() as pool:
        teams = [pool.submit(meet, nodes, job) for job in (make_job(dp=2).model_dump_json(), None)]
        kept = [team.result(PATIENCE_S) for team in teams]
        with pytest.raises(RunError, match=r"^2 nodes have joined \S+ already$"):
            pool.submit(meet, nodes, None).result(PATIENCE_S)
    assert [team.node_rank for team in kept] == [0, 1]
