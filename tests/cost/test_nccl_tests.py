"""Output of nccl-tests, as its versions print it, and what a calibration of it changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplan import catalog
from simplan.cost.analytic import AnalyticCost
from simplan.cost.calibration.calibrated import CalibratedCost
from simplan.cost.calibration.format import Calibration
from simplan.cost.calibration.measured_links import catalog_cluster, measured_collectives
from simplan.cost.calibration.nccl_tests import read_nccl_tests
from simplan.cost.model import Provenance
from simplan.errors import SpecError
from simplan.job import Job
from simplan.model.layer import CollectiveKind
from simplan.plan.plan import ParallelPlan
from simplan.predict.build import cost_model
from simplan.program.program import Communication
from simplan.training import TrainingSpec

HEADER = """\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 1 iters: 40 agg iters: 1 validation: 1
# Using devices
"""
TABLE = """\
NCCL version 2.29.3+cuda13.1
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0     float     sum      -1     5.70    0.00    0.00      0     5.54    0.00    0.00      0
"""


def ranks_text(num_ranks: int, num_nodes: int, device: str = "NVIDIA H100 80GB HBM3") -> str:
    """Lines that list ranks, which fill nodes in order."""
    local = num_ranks // num_nodes
    return "".join(
        f"#  Rank {rank:2} Group  0 Pid {900 + rank} on  node-{rank // local} device {rank % local:2} [0x1b] {device}\n"
        for rank in range(num_ranks)
    )


def row(num_bytes: int, time_us: float) -> str:
    rate = num_bytes / time_us / 1e3
    rates = f"{rate:.2f}  {rate:.2f}  0"
    return f"{num_bytes:12} {num_bytes // 4:12}  float  sum  -1  {time_us:.2f}  {rates}  {time_us:.2f}  {rates}\n"


def calibration_of(tmp_path: Path, text: str, name: str = "log.txt") -> Calibration:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return read_nccl_tests([tmp_path / name])


def test_sizes_times_and_groups_are_read(tmp_path: Path) -> None:
    """Rows of two nodes of Alps with GH200 (eth-cscs/cscs-docs, nccl-tests 2.17.1), with its prefixes of a shell."""
    text = f"""    /nccl-tests-2.17.1/build/all_reduce_perf: libnl-3.so.200: no version information available
{HEADER}{ranks_text(8, 2, "NVIDIA GH200 120GB")}{TABLE}
           8             2     float     sum      -1    17.93    0.00    0.00      0    17.72    0.00    0.00      0
    134217728      33554432     float     sum      -1   1916.4   70.04  122.57      0   1907.8   70.35  123.11      0
"""
    calibration = calibration_of(tmp_path, text)
    small, large = calibration.communication
    assert (small.num_bytes, large.num_bytes) == (8, 134217728)
    assert small.seconds.mean_s == pytest.approx(17.93e-6)
    assert large.seconds.mean_s == pytest.approx(1916.4e-6)
    assert (large.num_ranks, large.num_nodes, large.world_size, large.seconds.num_repeats) == (8, 2, 4, 40)
    assert calibration.environment["device"] == "NVIDIA GH200 120GB"
    assert calibration.environment["nccl"] == "2.29.3+cuda13.1"
    (measured,) = measured_collectives(calibration, None)
    assert measured.bus_bytes_per_s == pytest.approx(122.57e9, rel=1e-3)  # as nccl-tests prints it


def test_a_table_without_roots_is_read(tmp_path: Path) -> None:
    """Rows of version 2.0 (NVIDIA/nccl-tests, issue 107), whose test is named by the command or by the file."""
    text = """#   Rank  0 Pid   1320 on host-a device  0 [0x00] Tesla V100-SXM2-16GB
#   Rank  1 Pid   2066 on host-b device  0 [0x00] Tesla V100-SXM2-16GB
#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error
  1310720000     327680000     float     sum  1126440    1.16    1.16  0e+00  1125989    1.16    1.16  0e+00
"""
    for named, name in ((f"$ ./build/all_reduce_perf -g 1\n{text}", "log.txt"), (text, "all_reduce_perf.log")):
        (timing,) = calibration_of(tmp_path, named, name).communication
        assert (timing.num_bytes, timing.num_ranks, timing.num_nodes) == (1310720000, 2, 2)
        assert timing.seconds.mean_s == pytest.approx(1.12644)


def test_several_runs_in_one_log(tmp_path: Path) -> None:
    first = HEADER + ranks_text(8, 1) + TABLE + row(2**20, 60)
    second = "# Collective test starting: all_gather_perf\n" + TABLE + row(2**20, 50)
    third = HEADER.replace("all_reduce", "sendrecv") + ranks_text(16, 2) + TABLE + row(2**20, 40)
    timings = calibration_of(tmp_path, first + second + third).communication
    assert [(t.kind, t.num_ranks, t.num_nodes) for t in timings] == [
        (CollectiveKind.ALL_REDUCE, 8, 1),
        (CollectiveKind.ALL_GATHER, 8, 1),
        (CollectiveKind.RING, 16, 2),
    ]


@pytest.mark.parametrize(
    ("text", "name", "parts"),
    [
        ("hello\n", "log.txt", ["has no results of nccl-tests"]),
        (
            ranks_text(8, 1) + TABLE + row(1024, 9),
            "log.txt",
            ["does not say which test was run", "all_reduce_perf.txt"],
        ),
        (HEADER.replace("all_reduce", "gather") + ranks_text(8, 1) + TABLE + row(1024, 9), "log.txt", ["gather_perf"]),
        (HEADER + TABLE + row(1024, 9), "log.txt", ["does not list its ranks"]),
        (HEADER + ranks_text(1, 1) + TABLE + row(1024, 9), "log.txt", ["was run with one rank"]),
        (HEADER + ranks_text(1, 1) * 2 + TABLE + row(1024, 9), "log.txt", ["rank 0 twice", "MPI=1"]),
        (
            HEADER + ranks_text(2, 1) + TABLE + row(2**30, 9e6).replace(f" {2**30 / 9e6 / 1e3:.2f} ", " 9.00 "),
            "log.txt",
            ["1,073,741,824 bytes", "do not agree"],
        ),
        (
            HEADER
            + ranks_text(2, 1)
            + ranks_text(3, 1, "NVIDIA A100-SXM4-40GB").split("\n")[2]
            + "\n"
            + TABLE
            + row(8, 9),
            "log.txt",
            ["ranks on NVIDIA H100 80GB HBM3 and on NVIDIA A100"],
        ),
        (
            HEADER + ranks_text(4, 2).replace("Group  0 Pid 901", "Group  1 Pid 901") + TABLE + row(8, 9),
            "log.txt",
            ["several groups on several nodes"],
        ),
    ],
)
def test_unreadable_input_is_refused(tmp_path: Path, text: str, name: str, parts: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        calibration_of(tmp_path, text, name)
    for part in parts:
        assert part in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_logs_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    text = HEADER + ranks_text(4, 2) + TABLE + row(2**20, 60) + row(2**30, 9000)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    damaged = text[:start] + data.draw(st.text(max_size=8)) + text[end:]
    file = tmp_path_factory.mktemp("nccl") / "log.txt"
    file.write_text(damaged, encoding="utf-8")
    try:
        calibration = read_nccl_tests([file])
    except SpecError:
        return
    assert all(t.seconds.mean_s > 0 and t.num_bytes > 0 and t.num_ranks > 1 for t in calibration.communication)


def h100_job(num_nodes: int) -> Job:
    cluster = catalog.cluster("dgx-h100", 8 * num_nodes)
    plan = ParallelPlan(dp_shard=8 * num_nodes)
    training = TrainingSpec(global_batch_size=8 * num_nodes)
    return Job(catalog.model("gpt2-124m"), cluster, training, plan, catalog.software("torch"))


def test_measured_groups_cost_what_was_measured_and_others_are_corrected(tmp_path: Path) -> None:
    """A network that takes three times as long as the catalog says does so for groups that were not timed, too."""
    job = h100_job(4)
    datasheet = cost_model(job, None)
    assert isinstance(datasheet, AnalyticCost)
    timed = Communication(CollectiveKind.ALL_REDUCE, 2**30, tuple(range(16)))
    expected_s = datasheet.communication(timed).seconds
    text = HEADER + ranks_text(16, 2) + TABLE + row(2**30, 3e6 * expected_s)
    cost = cost_model(job, calibration_of(tmp_path, text))
    assert isinstance(cost, CalibratedCost)
    assert cost.communication(timed).seconds == pytest.approx(3 * expected_s, rel=1e-3)
    larger = timed._replace(ranks=tuple(range(32)))
    estimate = cost.communication(larger)
    assert estimate.seconds == pytest.approx(3 * datasheet.communication(larger).seconds, rel=1e-3)
    assert estimate.provenance is Provenance.EXTRAPOLATED
    inside = timed._replace(ranks=tuple(range(8)))
    assert cost.communication(inside) == datasheet.communication(inside)  # no group inside a node was timed
    other = Communication(CollectiveKind.ALL_GATHER, 2**30, tuple(range(16)))
    assert cost.communication(other) == datasheet.communication(other)
    cluster = catalog_cluster(calibration_of(tmp_path, text))
    assert cluster is not None
    assert (cluster.id, cluster.num_devices) == ("dgx-h100", 16)
