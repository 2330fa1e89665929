"""Numbers of whole runs: steps, units, bytes and seconds of checkpoints, sizes, all against values by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from simplan import catalog
from simplan.predict import predict
from simplan.scenario.elastic import scenario_on
from simplan.scenario.whole_run.checkpoints import checkpoint_bytes
from tests.scenario.whole_run.scenarios import DOCUMENT, refusal, run_of, scenario_of
from tests.support.problems import says

STATE_BYTES = 4 + 4 + 4  # of FSDP: an FP32 weight, and Adam's moments


def test_times_are_seconds_and_units_those_of_a_node() -> None:
    reliability = {
        "device_mtbf_h": 1000,
        "node_mtbf_h": 2000,
        "link_mtbf_h": 3000,
        "causes": [{"name": "job", "per": "job", "mtbf_h": 4000, "scope": "process", "repair_h": 2, "planned": True}],
        "detected": {"at_once": 0.25},
        "detection_s": 60,
        "silent_corruption": {"device_mtbf_h": 10, "found_h": 20},
        "fail_slow": {"device_mtbf_h": 30, "slowdown": 1.5, "found_h": 40},
        "maintenance": {"every_h": 50, "duration_h": 5},
    }
    recovery = {"restart_s": 100, "init_s_per_device": 0.5, "warmup_s": 7, "takeover_s": 10, "spares": 1, "repair_h": 3}
    setup = run_of(scenario_of(reliability=reliability, recovery=recovery)).setup
    causes = [
        (cause.name, cause.units_per_node, cause.mtbf_s, cause.num_nodes, cause.repair_s) for cause in setup.causes
    ]
    assert causes == [
        ("device failure", 8, 1000 * 3600, 1, 3 * 3600),
        ("node failure", 1, 2000 * 3600, 1, 3 * 3600),
        ("link failure", 8, 3000 * 3600, 0, 3 * 3600),
        ("job", 0, 4000 * 3600, 0, 2 * 3600),
    ]
    assert {cause.at_once for cause in setup.causes} == {0.25}
    assert (setup.restart_s, setup.takeover_s) == (100 + 32 * 0.5 + 7, 10 + 32 * 0.5 + 7)
    assert (setup.corruption_mtbf_s, setup.corruption_found_s) == (36_000, 72_000)
    assert (setup.slow_mtbf_s, setup.slow_factor, setup.slow_found_s) == (108_000, 1.5, 144_000)
    assert (setup.maintenance_every_s, setup.maintenance_s) == (180_000, 18_000)


def test_section_that_is_left_out_means_that_nothing_of_its_kind_happens() -> None:
    only_run = dict.fromkeys(("reliability", "checkpoint", "recovery"))
    scenario = scenario_of(**only_run)
    run = run_of(scenario)
    assert run.checkpoint is None
    assert run.setup.undisturbed_s == 1000 * scenario.predict().step_time_s
    assert run.setup.causes == ()
    assert {run.setup.preemption_mtbf_s, run.setup.slow_mtbf_s, run.setup.corruption_mtbf_s} == {math.inf}


def test_job_on_one_node_has_no_links_that_fail() -> None:
    node = {"cluster": {"preset": "dgx-h100", "num_nodes": 1}, "plan": {"dp_shard": 8}}
    assert run_of(scenario_of(**node, reliability={"link_mtbf_h": 1})).setup.causes == ()


@pytest.mark.parametrize(
    ("topology", "rack", "pod"),
    [
        ({"kind": "leaf_spine", "nodes_per_leaf": 2}, 2, None),
        ({"kind": "leaf_spine", "nodes_per_leaf": 1, "leaves_per_pod": 3}, 1, 3),
        ({"kind": "rail", "nodes_per_group": 3}, 3, None),
        (
            {"kind": "fat_tree", "radix": 32},
            2,
            4,
        ),  # 16 cards a leaf of nodes with 8; a pod has 16 leaves, the job 4 nodes
        ({"kind": "dragonfly", "nodes_per_router": 1, "routers_per_group": 2, "global_gbit": 400}, 1, 2),
        ({"kind": "sites", "nodes_per_site": 2, "gbit_per_site": 100, "latency_s": 0.01}, None, 2),
        (None, None, None),
    ],
)
def test_rack_and_pod_are_groups_of_the_topology(topology: dict[str, Any] | None, rack: int, pod: int) -> None:
    cluster = {**DOCUMENT["cluster"], **({} if topology is None else {"topology": topology})}
    for scope, expected in (("rack", rack), ("pod", pod)):
        reliability = {"causes": [{"name": "power", "per": "node", "mtbf_h": 99, "scope": scope}]}
        if expected is None:
            sentence = f'reliability.causes.0.scope = "{scope}": takes all nodes of a {scope} away, and '
            assert sentence in refusal(cluster=cluster, reliability=reliability)
        else:
            (cause,) = run_of(scenario_of(cluster=cluster, reliability=reliability)).setup.causes
            assert cause.num_nodes == expected


def test_bytes_are_weights_and_states_of_each_parameter_once() -> None:
    scenario = scenario_of()
    num = scenario.job.model.num_parameters
    assert checkpoint_bytes(scenario.predict()) == STATE_BYTES * num
    replicated = scenario_of(plan={"dp_replicate": 32}).predict()
    assert checkpoint_bytes(replicated) == STATE_BYTES * num, "replicas have the same bytes"
    sgd = scenario_of(training={**DOCUMENT["training"], "optimizer": "sgd_momentum"}).predict()
    assert checkpoint_bytes(sgd) == 8 * num


def test_bytes_of_a_parameter_under_megatron_are_those_of_bloom() -> None:
    """2.3 TB (BigScience's chronicles) of 176.2 billion: BF16 weights, FP32 copies of them and of two moments."""
    scenario = scenario_of(software="megatron-core", plan={"dp_shard": 32, "zero_stage": 1})
    bytes_per_parameter = checkpoint_bytes(scenario.predict()) / scenario.job.padded_model.num_parameters
    assert bytes_per_parameter == 14
    assert bytes_per_parameter * 176.2e9 / 2**40 == pytest.approx(2.3, rel=0.04), "tebibytes, as du prints them"


def test_adapters_alone_are_written() -> None:
    model = {**DOCUMENT["model"], "lora_rank": 4}
    scenario = scenario_of(model=model, training={**DOCUMENT["training"], "task": "lora"})
    trained = scenario.job.model.num_trained_parameters
    assert checkpoint_bytes(scenario.predict()) == STATE_BYTES * trained < scenario.job.model.num_parameters


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        ({"storage_bytes_per_s": 1e3}, 1.0),
        ({"node_bytes_per_s": 1e3}, 1 / 4),
        ({"device_bytes_per_s": 1e3}, 1 / 32),
        ({"storage_bytes_per_s": 1e3, "device_bytes_per_s": 1.0}, 1000 / 32),
        ({"device_bytes_per_s": 1e3, "writers": "node"}, 1 / 4),
        ({"node_bytes_per_s": 1e3, "writers": "one"}, 1.0),
    ],
)
def test_slowest_bandwidth_bounds_writing_and_loading(policy: dict[str, Any], seconds: float) -> None:
    """1,000 bytes, spread over 4 nodes of 8 devices."""
    run = run_of(scenario_of(checkpoint={"interval_steps": 50, "num_bytes": 1000, **policy}))
    assert run.setup.blocking_s == pytest.approx(seconds)
    assert run.setup.load_s == pytest.approx(seconds)
    assert run.setup.write_s == 0


def test_asynchronous_writing_blocks_for_the_copy_and_counts_later() -> None:
    policy = {"interval_steps": 50, "num_bytes": 3200, "async_save": True, "copy_bytes_per_s": 50}
    run = run_of(scenario_of(checkpoint={**policy, "storage_bytes_per_s": 1600, "read_bytes_per_s": 800}))
    assert (run.setup.blocking_s, run.setup.write_s, run.setup.load_s) == pytest.approx((2.0, 2.0, 4.0))
    assert run.faster_storage is not None
    assert (run.faster_storage.blocking_s, run.faster_storage.write_s) == pytest.approx((2.0, 1.0))
    assert run.faster_storage.load_s == pytest.approx(2.0)


def test_interval_is_rounded_to_steps_and_is_one_at_least() -> None:
    step_s = scenario_of().predict().step_time_s
    for seconds, every in ((2.4 * step_s, 2), (2.6 * step_s, 3), (0.01 * step_s, 1)):
        assert run_of(scenario_of(checkpoint={"interval_s": seconds, "blocking_s": 1})).setup.checkpoint_every == every


def test_shrinking_job_has_the_plans_of_an_elastic_run() -> None:
    """Four nodes: the batch of 64 divides by 16 and 8 ranks, not by 24."""
    scenario = scenario_of(recovery={"policy": "shrink", "restart_s": 1})
    sizes = run_of(scenario).setup.sizes
    assert [size.num_nodes for size in sizes] == [4, 2, 1]
    assert [size.step_s for size in sizes[1:]] == [scenario_on(scenario, n).predict().step_time_s for n in (2, 1)]
    assert {size.advance for size in sizes} == {1.0}, "the batch stays"
    bounded = scenario_of(recovery={"policy": "shrink", "min_nodes": 2})
    assert [size.num_nodes for size in run_of(bounded).setup.sizes] == [4, 2]
    text = refusal(recovery={"policy": "shrink", "min_nodes": 3})
    assert "recovery.min_nodes = 3: cannot run this plan: " in text
    assert text.endswith("use 2 or 4")


def test_job_that_continues_has_a_size_for_each_number_of_groups_with_the_batch_of_these() -> None:
    scenario = scenario_of(recovery={"policy": "continue"})
    setup = run_of(scenario).setup
    assert [(size.num_nodes, size.advance) for size in setup.sizes] == [(4, 1.0), (3, 0.75), (2, 0.5), (1, 0.25)]
    assert setup.group_nodes == 1
    changes = {"plan.dp_replicate": 3, "training.global_batch_size": 48}
    three = predict(scenario.job.with_num_devices(24).with_changes(changes)).step_time_s
    assert setup.sizes[1].step_s == pytest.approx(three, rel=1e-12)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"run": None}, "run: is missing: ... length; add ... {num_steps: 100000}"),
        ({"recovery": {"policy": "continue"}, "plan": {"dp_shard": 32}}, "plan.dp_replicate = 1; use policy: restart"),
        (
            {"recovery": {"policy": "continue"}, "plan": {"dp_replicate": 8, "dp_shard": 4}},
            "whole ... 4 ... multiple of plan.dp_replicate",
        ),
        (
            {"recovery": {"policy": "continue", "min_nodes": 3}, "plan": {"dp_replicate": 2, "dp_shard": 16}},
            "recovery.min_nodes = 3: ... whole ... 2 ... use 2 or 4",
        ),
        ({"recovery": {"policy": "shrink", "min_nodes": 9}}, "recovery.min_nodes = 9: is more than the 4 nodes"),
        (
            {"cluster": {"preset": "dgx-h100", "num_devices": 28}, "plan": {"dp_shard": 28},
             "training": {"global_batch_size": 28}},
            "cluster.num_devices = 28: ... 4 of 8",
        ),
    ],
)  # fmt: skip
def test_run_that_cannot_be_is_refused(sections: dict[str, Any], sentence: str) -> None:
    assert says(refusal(**sections), sentence)


def test_spot_zone_of_the_catalog_gives_rate_and_wait() -> None:
    (zone, *_) = catalog.names("spot_zones")
    setup = run_of(scenario_of(spot={"zone": zone, "notice_s": 120})).setup
    published = catalog.spot_zone(zone)
    assert setup.preemption_mtbf_s == pytest.approx(3600 / published["preemptions_per_h"])
    assert setup.spot_wait_s == pytest.approx(3600 * published["wait_h"])
    assert (setup.notice_s, setup.on_demand, setup.is_spot) == (120, False, True)


def test_first_steps_with_whole_gradients_count_in_the_mean_step() -> None:
    plan = {"dp_replicate": 32, "compression": {"kind": "powersgd", "start_step": 400}}
    scenario = scenario_of(plan=plan)
    prediction = scenario.predict()
    assert prediction.compression is not None
    mean_s = 0.4 * prediction.compression.whole_s + 0.6 * prediction.step_time_s
    assert run_of(scenario).setup.step_s == pytest.approx(mean_s)
