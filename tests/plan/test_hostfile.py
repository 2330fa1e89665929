"""Hostfiles: read as launchers read them, written so that they come back, and refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.errors import SpecError
from simplan.plan.hostfile import host_lines, read_host_file, task_lines
from tests.support.problems import refuses, says


def devices_in(folder: Path, text: str, num_devices: int = 8) -> tuple[int, ...]:
    file = folder / "job.hosts"
    file.write_text(text)
    return read_host_file(file, 4, num_devices)


@given(st.permutations(range(5)), st.sampled_from([host_lines, task_lines]))
def test_written_files_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], write: object
) -> None:
    devices = tuple(4 * node + local for node in order for local in range(4))
    assert callable(write)
    text = "\n".join(write(devices, 4))
    assert devices_in(tmp_path_factory.mktemp("hosts"), text, 20) == devices


@pytest.mark.parametrize(
    "text",
    ["node1 slots=4\nnode0 slots=4\n", "node1\nnode0", "node1:4\nnode0:4", "# a comment\nnode1 slots = 4 # b\n\nnode0"],
)
def test_forms_of_one_order(tmp_path: Path, text: str) -> None:
    assert devices_in(tmp_path, text) == (4, 5, 6, 7, 0, 1, 2, 3)


def test_ranks_of_a_node_need_not_follow_each_other(tmp_path: Path) -> None:
    assert devices_in(tmp_path, "node1\nnode0\n" * 4) == (4, 0, 5, 1, 6, 2, 7, 3)
    assert devices_in(tmp_path, "node1 slots=2\nnode0 slots=4", 6) == (4, 5, 0, 1, 2, 3)  # of a node that is not full


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu-7 slots=4\nnode0 slots=4", "1 ... gpu-7 ... node0 to node1; write"),
        ("node2 slots=4\nnode0 slots=4", "line 1 names node2, and the nodes"),
        ("node0 slots=4\nnode0 slots=4", "2 ... node0 ... 4 ... use slots=4"),
        ("node0 slots=5\nnode1 slots=3", "line 1 gives node0 more ranks"),
        ("node0 slots=4\n", "4 ... 8 ... add node1 slots=4"),
        ("node0 slots=4\nnode1 slots=3", "7 ... 8 ... add node1 slots=1"),
        ("node0 slots=-1", "1 is 'node0 slots=-1'; write ... node0 slots=8"),
        ("", "has 0 ranks, and the cluster has 8 devices"),
    ],
)
def test_hostfiles_that_do_not_match_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        devices_in(tmp_path, text)
    assert says(str(caught.value), said)


def test_orders_that_a_launcher_cannot_say_are_refused() -> None:
    with refuses("plan.placement", rule="puts ranks on node0 that do", fix="use --to slurm-hostfile"):
        host_lines((0, 4, 1, 5), 4)
    assert task_lines((0, 4, 1, 5), 4) == ("node0", "node1", "node0", "node1")
    with refuses("plan.placement", rule="puts rank 0 on device 1"):
        task_lines((1, 0), 4)
