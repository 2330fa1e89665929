"""Placements in the words of other programs, and those that cannot say them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simplan.errors import NotModelledError
from simplan.interop.formats import formats
from simplan.interop.hostfiles import HOSTFILES
from simplan.job import Job
from simplan.scenario import scenario_from
from simplan.scenario.source import make_job
from tests.support.problems import refuses

TP_PP_DP = ("tp", "cp", "pp", "dp")


def job_of(software: str, **plan: Any) -> Job:
    keys: dict[str, Any] = {"cluster": "dgx-h100", "num_nodes": 2, "num_microbatches": 8, "software": software}
    return make_job("gpt2-1.5b" if software == "accelerate" else "llama3-8b", **keys, **plan)


@pytest.mark.parametrize(("target", "software"), [("megatron", "megatron-core"), ("bridge", "megatron-bridge")])
def test_pipelines_inside_data_parallel_groups_come_back(target: str, software: str, tmp_path: Path) -> None:
    job = job_of(software, tp=2, pp=4, placement=TP_PP_DP)
    export = formats()[target].export
    assert export is not None
    files = export(job, "out").files
    for name, text in files.items():
        assert isinstance(text, str)
        (tmp_path / name).write_text(text)
    again = scenario_from(tmp_path / next(iter(files)), {"cluster.preset": "dgx-h100", "cluster.num_nodes": 2}).job
    assert again.plan.placement == TP_PP_DP
    assert again.placement == job.placement

    with refuses("plan.placement", rule="cannot be said", fix="use [tp, cp, pp, dp]", kind=NotModelledError):
        export(job_of(software, tp=2, pp=4, placement=("dp", "tp", "pp")), "out")
    # an order that is that of the mesh needs no word
    assert export(job_of(software, tp=2, pp=4, placement=("tp", "dp", "pp")), "out").files


@pytest.mark.parametrize(
    ("target", "software", "plan"),
    [
        ("torchtitan", "torchtitan", {"tp": 2, "pp": 4, "placement": TP_PP_DP}),
        ("accelerate", "accelerate", {"dp_replicate": 2, "placement": ("dp_replicate", "dp_shard")}),
    ],
)
def test_placement_that_a_target_cannot_say_is_refused(target: str, software: str, plan: dict[str, Any]) -> None:
    export = formats()[target].export
    assert export is not None
    with refuses("plan.placement", rule="cannot be said", fix="leave it out", kind=NotModelledError):
        export(job_of(software, **plan), "out")


def test_traces_have_the_numbers_of_devices() -> None:
    """ASTRA-sim places NPU i at place i of its network: groups of a placed plan are those of the devices."""
    export = formats()["chakra"].export
    assert export is not None
    plan: dict[str, Any] = {"seq_len": 512, "num_hidden_layers": 4, "tp": 2, "dp_replicate": 8}
    plain, placed = job_of("torch", **plan), job_of("torch", **plan, placement=("dp", "tp"))
    assert placed.placement is not None
    mesh, groups = (json.loads(export(job, "x").files["comm_groups.json"]) for job in (plain, placed))
    wanted = {tuple(sorted(placed.placement.devices_of(ranks))) for ranks in mesh.values()}
    assert wanted == {tuple(ranks) for ranks in groups.values()}
    assert (0, 8) in wanted


def test_hostfiles_have_the_order_of_ranks() -> None:
    nodes_swapped = (*range(8, 16), *range(8))
    job = job_of("torch", dp_shard=16, placement=nodes_swapped)
    files = [HOSTFILES[target](job, "job").files[target] for target in ("hostfile", "slurm-hostfile")]
    assert files == ["node1 slots=8\nnode0 slots=8\n", "node1\n" * 8 + "node0\n" * 8]
    between = job_of("torch", pp=8, dp_shard=2, placement=("pp", "dp"))  # a pipeline in each node
    assert HOSTFILES["slurm-hostfile"](between, "job").files["slurm-hostfile"] == "node0\nnode1\n" * 8
    with refuses("plan.placement", rule="ranks on node0 that do not"):
        HOSTFILES["hostfile"](between, "job")
