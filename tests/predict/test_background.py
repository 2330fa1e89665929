"""Steps of other jobs on the links of a fabric: closed forms, and what a scenario refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplan import catalog
from simplan.cluster.hardware import BackgroundJob, Straggler
from simplan.cluster.topology import LeafSpine
from simplan.errors import NotModelledError, SpecError
from simplan.job import Job
from simplan.network.load import Network
from simplan.predict import Simulated, predict, predict_step
from simplan.predict.stragglers import slowdowns
from simplan.prediction import Prediction
from simplan.program.program import Stream
from simplan.scenario import load_scenario
from tests.jobs import job_of
from tests.support.problems import says

# Two nodes per leaf switch, whose uplink has the rate of one node. One rank of a node reduces over the card of each.
SHARED = LeafSpine(kind="leaf_spine", nodes_per_leaf=2, oversubscription=2)
DDP = {"dp_replicate": 2, "tp": 8, "bucket_bytes": 2**39}
"""One all-reduce after backward, with all cards of both nodes."""


def job_with(num_layers: int, plan: dict[str, Any] | None = None) -> Job:
    """A job on two nodes of a fabric, without other jobs."""
    model = catalog.model("llama3-8b").model_copy(update={"num_hidden_layers": num_layers})
    job = job_of(model, plan or DDP, num_microbatches=1)
    return replace(job, cluster=job.cluster.model_copy(update={"topology": SHARED}))


def with_background(job: Job, other: Job, nodes: tuple[int, ...], offset_s: float = 0.0) -> Job:
    """The job with another on some nodes."""
    background = BackgroundJob(
        name="other",
        model=other.model,
        training=other.training,
        plan=other.plan,
        software=other.software,
        nodes=nodes,
        offset_s=offset_s,
    )
    background_jobs = (*job.cluster.background, background)
    return replace(job, cluster=job.cluster.model_copy(update={"background": background_jobs}))


def network_of(prediction: Prediction) -> Network:
    assert prediction.network is not None
    return prediction.network


class Parts(NamedTuple):
    """Seconds of a step alone: until the all-reduce begins, its latency, its transfer, and until the end."""

    before: float
    latency: float
    transfer: float
    after: float


@cache
def parts_of(num_layers: int) -> Parts:
    """Parts of a step on one leaf switch, where it shares no link."""
    _, simulated = predict_step(job_with(num_layers))
    reduction = reduction_of(simulated)
    start_s, end_s = (float(ops_s[reduction]) for ops_s in (simulated.times.start_s, simulated.times.end_s))
    assert simulated.contention is not None
    usage = simulated.contention.usages[simulated.contention.usage[reduction]]
    assert end_s - start_s == pytest.approx(usage.fixed_s + usage.transfer_s, rel=1e-9)
    return Parts(start_s, usage.fixed_s, usage.transfer_s, simulated.times.step_time_s - end_s)


def reduction_of(simulated: Simulated) -> int:
    """Longest gradient reduction; all other communication is inside nodes."""
    of_data = np.flatnonzero(simulated.program.on_stream(Stream.DATA))
    return int(of_data[simulated.program_costs.durations_s[of_data].argmax()])


def steps_by_hand(parts: Parts, other: Parts, offset_s: float) -> float:
    """Time of the own step if both transfers share a link equally whenever both run, in small steps of time."""
    delta_s = 2e-6
    own_s, other_s = [parts.before + parts.latency, parts.transfer], [other.before + other.latency, other.transfer]
    rest, time_s = [*other_s, other.after], -offset_s
    while True:
        while not any(left > 0 for left in rest):
            rest = [*other_s, other.after]
        phase = next(place for place, left in enumerate(rest) if left > 0)
        is_sharing = time_s >= 0 and own_s[0] <= 0 and phase == 1
        rest[phase] -= delta_s / 2 if is_sharing else delta_s
        if time_s >= 0:
            which = 0 if own_s[0] > 0 else 1
            own_s[which] -= delta_s / 2 if is_sharing else delta_s
            if own_s[1] <= 0:
                return time_s + parts.after
        time_s += delta_s


def test_equal_jobs_on_one_uplink_reduce_in_twice_the_time() -> None:
    parts = parts_of(4)
    prediction = predict(with_background(job_with(4), job_with(4), (1, 3)))
    alone_s = sum(parts)
    assert prediction.step_time_s == pytest.approx(alone_s + parts.transfer, rel=1e-9)
    network = network_of(prediction)
    assert network.without_background_s == pytest.approx(alone_s, rel=1e-9)
    assert network.slowest is not None
    assert network.slowest.name in ("leaf0 -> spine", "spine -> leaf0", "leaf1 -> spine", "spine -> leaf1")
    assert {share.name.partition(":")[0] for share in network.slowest.communications} >= {"other"}
    (other,) = network.other_jobs
    assert other.alone_s == pytest.approx(alone_s, rel=1e-9)
    assert other.step_times_s == pytest.approx([alone_s + parts.transfer], rel=1e-9)


@pytest.mark.parametrize(("num_layers", "offset_s"), [(2, 0.0), (2, 0.03), (3, 0.01), (6, 0.0), (1, 0.005)])
def test_two_jobs_share_an_uplink_as_two_transfers_do(num_layers: int, offset_s: float) -> None:
    parts, other = parts_of(4), parts_of(num_layers)
    found_s = predict(with_background(job_with(4), job_with(num_layers), (1, 3), offset_s)).step_time_s
    assert found_s == pytest.approx(steps_by_hand(parts, other, offset_s % sum(other)), abs=2e-5)


def test_job_that_ends_its_transfer_early_frees_the_link() -> None:
    parts, other = parts_of(4), parts_of(4)
    # the other began as long ago as its whole transfer takes: it ends when that of this job begins
    offset_s = parts.latency + parts.transfer
    assert predict(with_background(job_with(4), job_with(4), (1, 3), offset_s)).step_time_s == pytest.approx(
        sum(parts), rel=1e-9
    )
    # half of it: both share the link until the other half has passed, in twice its time
    half_s = predict(with_background(job_with(4), job_with(4), (1, 3), parts.transfer / 2)).step_time_s
    assert half_s == pytest.approx(sum(parts) + (other.transfer - parts.transfer / 2), rel=1e-9)


def test_job_on_other_links_changes_nothing() -> None:
    alone = predict(job_with(4))
    prediction = predict(with_background(job_with(4), job_with(3), (2, 3)))
    assert prediction.step_time_s == pytest.approx(alone.step_time_s, rel=1e-9)
    network = network_of(prediction)
    assert network.contention_s <= 1e-9 * alone.step_time_s
    moved = {link.name: link.num_bytes for link in network.links}
    assert moved["node0.nic0 -> leaf0"] == pytest.approx(network_of(alone).links[0].num_bytes, rel=1e-9)
    assert moved["node2.nic0 -> leaf1"] > 0


def test_load_of_links_includes_every_step_of_the_other_job() -> None:
    prediction = predict(with_background(job_with(12), job_with(1), (1, 3), 0.001))
    network = network_of(prediction)
    assert len(network.other_jobs[0].step_times_s) > 2
    link = next(link for link in network.links if link.name == "leaf0 -> spine")
    assert link.series
    assert np.mean(link.series) == pytest.approx(link.busy_share, rel=1e-6)
    card = next(link for link in network.links if link.name.startswith("node1.nic0 -> "))
    uplink = next(link for link in network_of(predict(job_with(1))).links if link.name.startswith("node1.nic0 -> "))
    assert card.num_bytes / uplink.num_bytes > len(network.other_jobs[0].step_times_s)


PLANS: tuple[dict[str, Any], ...] = ({"dp_replicate": 2, "tp": 8}, {"dp_shard": 16}, {"dp_replicate": 8, "pp": 2})


@settings(max_examples=12)
@given(
    plan=st.sampled_from(PLANS),
    num_layers=st.integers(1, 4),
    nodes=st.sampled_from([(1, 3), (0, 2), (2, 3), (3, 0)]),
    offset_s=st.floats(0, 1),
)
def test_background_job_never_shortens_a_step(
    plan: dict[str, Any], num_layers: int, nodes: tuple[int, ...], offset_s: float
) -> None:
    # of one reduction at a time; where several share links, delaying one may let another pass
    other = job_with(max(num_layers, plan.get("pp", 1)), plan)
    prediction = predict(with_background(job_with(2), other, nodes, offset_s))
    without_s = network_of(prediction).without_background_s
    assert without_s is not None
    assert prediction.step_time_s >= without_s * (1 - 1e-9)
    assert without_s >= sum(parts_of(2)) * (1 - 1e-9)


SCENARIO = """
model: {preset: gpt2-124m}
cluster:
  preset: dgx-h100
  num_nodes: 2
  topology: {kind: leaf_spine, nodes_per_leaf: 2, oversubscription: 2}
  background:
    - nodes: [1, 3]
      job: {model: {preset: gpt2-124m}, training: {global_batch_size: 16}, plan: {dp_replicate: 16}}
training: {global_batch_size: 16}
plan: {dp_replicate: 16}
"""


def error_of(tmp_path: Path, *changes: tuple[str, str]) -> SpecError:
    """Error of the scenario with some text replaced."""
    text = SCENARIO
    for before, after in changes:
        assert before in text
        text = text.replace(before, after, 1)
    file = tmp_path / "scenario.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as refused:
        load_scenario(file)
    return refused.value


GPT2 = "job: {model: {preset: gpt2-124m}"
LEAVES = "kind: leaf_spine, nodes_per_leaf: 2, oversubscription: 2"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("nodes: [1, 3]", "nodes: [1, 1]", ":8:7: cluster.background.0.nodes = [1, 1]: ... 1"),
        ("nodes: [1, 3]", "nodes: [1, 4]", "names node 4, and the 4 nodes of all jobs are node 0 to 3"),
        ("nodes: [1, 3]", "nodes: [1]", "1 ... 16 ... 8 ... name 2"),
        ("    - nodes: [1, 3]\n      job", "    - job", "cluster.background.0.nodes: is missing"),
        ("job: {model", "job: {cluster: {preset: dgx-h100}, model", "0.job.cluster: is that of this scenario"),
        ("job: {model", "job: {expect: [], model", "0.job.expect: has no meaning for a background job"),
        (GPT2, "job: {model: {hf_config: a.json}", 'background.0.job.model.hf_config = "a.json": is a file'),
        (GPT2, "job: {model: {preset: gpt9}", "cluster.background.0.job.model.preset = gpt9: is not"),
        (f"{GPT2}, t", "job: {t", "cluster.background.0.job.model: is missing"),
        ("job: {", "job: other.yaml # {", 'job = "other.yaml": ... mapping ... training'),
        ("{global_batch_size: 16}", "{global_batch_size: 15}", "0.job.training.global_batch_size = 15: must be"),
        (f"  topology: {{{LEAVES}}}\n", "", "cluster.background: needs ... cluster"),
        (LEAVES, "kind: fat_tree, radix: 6, levels: 2", "cluster.background: makes 4 nodes of all jobs, which"),
        ("num_nodes: 2", "num_nodes: 1", "has jobs on other nodes, and this job has one node"),
        ("  background:\n", "  stragglers: [{node: node1, slowdown: 2}]\n  background:\n", "is no node of this job"),
    ],
)
def test_wrong_background_job_is_refused(tmp_path: Path, before: str, after: str, words: str) -> None:
    assert says(str(error_of(tmp_path, (before, after))), words)


def test_two_background_jobs_on_one_node_are_refused(tmp_path: Path) -> None:
    second = "    - nodes: [3, 4]\n      job: {model: {preset: gpt2-124m}, training: {global_batch_size: 16}, "
    error = error_of(tmp_path, ("\ntraining: {g", f"\n{second}plan: {{dp_replicate: 16}}}}\ntraining: {{g"))
    [problem] = error.problems
    assert problem.field.endswith("background.1.nodes")
    assert (problem.value, "cluster.background.0.nodes" in problem.rule) == ("[3, 4]", True)


def test_straggler_is_named_by_its_node_of_the_fabric() -> None:
    job = with_background(job_with(2), job_with(2), (1, 3))
    slow = job.cluster.model_copy(update={"stragglers": (Straggler(node="node2", slowdown=2.0),)})
    assert slowdowns(slow, job.plan) == dict.fromkeys(range(8, 16), 2.0)


def test_job_with_too_many_steps_is_refused() -> None:
    tiny = job_of("gpt2-124m", {"dp_replicate": 16}, num_microbatches=1)
    long = job_of("llama3-8b", DDP, num_microbatches=256)
    cluster = long.cluster.model_copy(update={"topology": SHARED})
    words = re.compile(r"cluster\.background\.0: has [\d,]+ steps of [\d,]+ operations .* use constant traffic")
    with pytest.raises(NotModelledError, match=words):
        predict(with_background(replace(long, cluster=cluster), tiny, (1, 3)))


def test_job_with_too_long_a_step_is_refused() -> None:
    words = r"cluster\.background\.0\.job\.training\.global_batch_size = [\d,]+: needs [\d,]+ operations or more"
    with pytest.raises(SpecError, match=words):
        predict(with_background(job_with(2), job_of("gpt2-124m", {"dp_replicate": 16}, num_microbatches=10**8), (1, 3)))
