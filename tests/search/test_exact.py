"""A search against brute force: ``predict`` of every plan of a small space, under several frameworks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from simplan import catalog
from simplan.errors import NotModelledError
from simplan.job import Job
from simplan.plan.collectives import Collectives
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.search import SearchProgress, SearchResult, SearchSpace, explore, search
from simplan.search.evaluation import workers
from simplan.search.evaluation.evaluator import Evaluator, Numbers
from simplan.search.evaluation.workers import WorkerPool
from simplan.units import MIB
from tests.search.brute_force import Row, every_plan, front, shown
from tests.search.jobs import small_job
from tests.support.problems import refuses
from tests.support.slow import slow_except

SPACE: dict[str, Any] = {
    "schedule": ("gpipe", "1f1b", "zb-h1"),
    "microbatch_size": (1, 2),
    "recompute": ("none", "full"),
    "recompute_layers": "all",
    "max_memory_fraction": 1.0,
}
CAPACITY = 1091 * MIB
SIZES: dict[str, Any] = {"hidden_size": 512, "vocab_size": 4096, "seq_len": 256}
FRAMEWORKS = ("torch", "torchtitan", "megatron-core", "megatron-lm-2022", "megatron-deepspeed", "maxtext")


def capacity_of(software: str, num_devices: int) -> int:
    """Of devices on which some plans fit and some do not, which are the fastest; a context of DeepSpeed is larger."""
    return ({4: 1098, 8: 1080}[num_devices] + {"megatron-deepspeed": 5740, "maxtext": -20}.get(software, 0)) * MIB


def asked_for(num_devices: int = 4, software: str = "torch", capacity: int = CAPACITY) -> Job:
    return small_job(num_devices=num_devices, memory_bytes=capacity, software=software, **SIZES)


def fitting(job: Job, space: SearchSpace) -> list[Row]:
    return [row for row in every_plan(job, space) if row[1] <= (job.cluster.device.memory_bytes or 0)]


def found_by(space: SearchSpace) -> SearchResult:
    return search(asked_for(), space, explain=False)


def best_of(rows: list[Row], number: int) -> list[float]:
    """Step times of the best plans that are shown."""
    return [seconds for _, _, seconds, _ in shown(sorted(rows, key=lambda row: row[2]))[:number]]


def counts_add_up(result: SearchResult) -> bool:
    space = result.space
    return space.total == sum(space.rejected.values()) + space.bounded + space.timed


def test_the_space_is_worth_searching() -> None:
    """Some plans fit and some do not, and what is fastest of all does not."""
    rows, inside = every_plan(asked_for(), SearchSpace(**SPACE)), fitting(asked_for(), SearchSpace(**SPACE))
    assert 20 < len(inside) < len(rows) - 20
    assert min(rows, key=lambda row: row[2])[1] > CAPACITY


@pytest.mark.parametrize("software", slow_except(["torch", "megatron-core"], FRAMEWORKS))
@pytest.mark.parametrize("num_devices", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_best_are_the_best_of_predict(software: str, num_devices: int) -> None:
    """Whatever the framework, and few plans are timed for it."""
    profile = catalog.software(software)
    job = asked_for(num_devices, software, capacity_of(software, num_devices))
    space = SearchSpace.model_validate(
        {
            **SPACE,
            "schedule": ("1f1b", "interleaved_1f1b", "zb-h1"),
            "tp": (1, 2),
            "zero_stage": profile.zero_stages,
            "sequence_parallel": profile.sequence_parallelism,
            "top": 6,
        }
    )
    inside = fitting(job, space)
    assert min(every_plan(job, space), key=lambda row: row[2]) not in inside
    result = search(job, space, explain=False)
    wanted = shown(sorted(inside, key=lambda row: row[2]))[:6]
    assert [plan.step_time_s for plan in result.ranked] == [seconds for _, _, seconds, _ in wanted]
    assert [plan.alike.num_plans for plan in result.ranked] == [others for *_, others in wanted]
    for plan in result.ranked:
        assert (plan.plan, plan.device_bytes, plan.step_time_s) in inside
    assert counts_add_up(result)
    assert result.space.timed < len(inside)


BY_TENSOR = [
    ("adamw_8bit", "torch"),
    ("muon", "torch"),
    ("adamw_torch_4bit", "torch"),
    ("adafactor_torch", "torch"),
    ("muon", "megatron-core"),
    ("adafactor", "deepspeed"),
]


@pytest.mark.parametrize(("optimizer", "software"), slow_except(BY_TENSOR[:2], BY_TENSOR))
def test_so_they_are_with_states_by_tensor(optimizer: str, software: str) -> None:
    """Bytes of states per weight differ between tensors and shards, and bounds have the least."""
    job = asked_for(4, software).with_changes({"training.optimizer": optimizer})
    stages = catalog.software(software).zero_stages
    space = SearchSpace.model_validate({**SPACE, "schedule": ("1f1b",), "tp": (1, 2), "zero_stage": stages, "top": 6})
    capacity = sorted(num_bytes for _, num_bytes, _ in every_plan(job, space))[len(every_plan(job, space)) // 2]
    device = job.cluster.device.model_copy(update={"memory_bytes": capacity})
    job = job.with_changes({"cluster.device": device})
    result = search(job, space, explain=False)
    assert [plan.step_time_s for plan in result.ranked] == best_of(fitting(job, space), 6)
    assert counts_add_up(result)


@pytest.mark.slow
def test_so_they_are_with_steps_in_backward() -> None:
    """No gradients wait for an update, which runs next to the backward of sharded plans; others are rejected."""
    job = small_job(num_devices=4, batch=8, memory_bytes=1113 * MIB, **SIZES)
    job = job.with_changes({"training.fused_optimizer": False, "training.optimizer_in_backward": True})
    space = SearchSpace.model_validate({**SPACE, "schedule": ("1f1b",), "tp": (1, 2), "zero_stage": (0, 1, 2, 3)})
    inside = fitting(job, space)
    assert 0 < len(inside) < len(every_plan(job, space))
    result = search(job, space, explain=False)
    assert [plan.step_time_s for plan in result.ranked] == best_of(inside, 10)
    assert result.space.rejected["optimizer_in_backward_modelled"] > 0
    assert counts_add_up(result)


@pytest.mark.parametrize("software", slow_except(["megatron-core"], ["torch", "megatron-core"]))
def test_so_they_are_with_prescribed_collectives(software: str) -> None:
    """All plans keep them, also plans that lack one of these collectives."""
    algorithms = Collectives(all_reduce="tree", all_gather="ring", reduce_scatter="halving_doubling")
    job = asked_for(4, software, capacity_of(software, 4)).with_plan(ParallelPlan(collectives=algorithms))
    space = SearchSpace.model_validate({**SPACE, "schedule": ("1f1b", "gpipe"), "tp": (1, 2), "top": 6})
    inside = fitting(job, space)
    result = search(job, space, explain=False)
    assert [plan.step_time_s for plan in result.ranked] == best_of(inside, 6)
    assert {plan.plan.collectives for plan in result.ranked} == {algorithms}
    assert "collectives_of_groups" not in result.space.rejected
    assert counts_add_up(result)


def test_plans_that_cannot_run_a_prescribed_collective_are_rejected() -> None:
    """Recursive halving needs a power of two of ranks, so that three devices cannot be data-parallel."""
    job = small_job(num_devices=3, batch=12, memory_bytes=1150 * MIB, num_hidden_layers=6).with_plan(
        ParallelPlan(collectives=Collectives(all_reduce="halving_doubling"))
    )
    result = search(job, {"recompute": "none"}, explain=False)
    assert result.space.rejected["collectives_of_groups"] > 0
    assert {plan.plan.dp for plan in result.ranked} == {1}


def test_so_they_are_with_the_optimizer_on_the_host() -> None:
    """Of plans that shard parameters, others are rejected; some fit and some do not, the fastest of all among these."""
    job = asked_for(4, capacity=1069 * MIB).with_plan(ParallelPlan(offload_optimizer=True))
    space = SearchSpace.model_validate({**SPACE, "schedule": ("1f1b", "gpipe"), "top": 6})
    inside = fitting(job, space)
    assert 6 < len(inside) < len(every_plan(job, space)) - 6
    assert min(every_plan(job, space), key=lambda row: row[2]) not in inside
    result = search(job, space, explain=False)
    assert [plan.step_time_s for plan in result.ranked] == best_of(inside, 6)
    assert all(plan.plan.offload_optimizer and plan.plan.shards_parameters for plan in result.ranked)
    assert result.space.rejected["offload_of_sharded_parameters"] > 0
    assert counts_add_up(result)
    assert result.space.bounded > 0


@pytest.mark.parametrize("software", slow_except(["torch"], ["torch", "megatron-core"]))
def test_so_they_are_over_placements(software: str) -> None:
    """On nodes of two, where the best placement is another one than that of the mesh for some plans."""
    job = small_job(num_devices=16, memory_bytes=1150 * MIB, software=software, **SIZES)
    job = job.with_changes({"cluster.devices_per_node": 2}).with_num_devices(8)
    options = {"schedule": "1f1b", "microbatch_size": 1, "recompute": "none", "max_memory_fraction": 1.0, "top": 12}
    orders = [["tp", "cp", "dp", "pp"], ["tp", "pp", "dp"], ["dp", "tp", "pp"], ["pp", "dp", "tp"]]
    space = SearchSpace.model_validate({**options, "tp": [1, 2], "tp_across_nodes": True, "placement": orders})
    inside = fitting(job, space)
    result = search(job, space, explain=False)
    wanted = shown(sorted(inside, key=lambda row: row[2]))[:12]
    assert [plan.step_time_s for plan in result.ranked] == [seconds for _, _, seconds, _ in wanted]
    assert {plan.plan.placement for plan in result.ranked} > {None}
    assert counts_add_up(result)
    assert result.space.bounded > 0
    mesh_only = search(job, space.model_copy(update={"placement": None}), explain=False)
    assert mesh_only.space.total < result.space.total


def test_so_they_are_on_nodes_that_are_not_full() -> None:
    job = small_job(num_devices=12, batch=12, memory_bytes=1150 * MIB, num_attention_heads=12, hidden_size=768,
                    num_key_value_heads=12, intermediate_size=768, vocab_size=3072, seq_len=192)  # fmt: skip
    space = SearchSpace.model_validate({**SPACE, "microbatch_size": 1, "recompute": "none", "schedule": "1f1b"})
    inside = fitting(job, space)
    assert len(inside) > 10
    result = search(job, space, explain=False)
    assert [plan.step_time_s for plan in result.ranked] == best_of(inside, 5)


@pytest.mark.parametrize(
    ("objective", "value"),
    [
        ("step_time", lambda size, seconds: (seconds,)),
        ("tokens_per_s_per_device", lambda size, seconds: (-1 / seconds,)),
        ("memory", lambda size, seconds: (size, seconds)),
        ("num_devices", lambda size, seconds: (seconds,)),
        ("cost", lambda size, seconds: (seconds,)),
    ],
)
def test_every_objective_has_its_own_best(objective: str, value: Callable[[int, float], tuple[float, ...]]) -> None:
    options = {"objective": objective, "top": 7, "num_devices": 4, "dollars_per_device_hour": 2.0, "token_budget": 1e9}
    result = found_by(SearchSpace.model_validate({**SPACE, **options}))
    inside = fitting(asked_for(), SearchSpace(**SPACE))
    wanted = shown(sorted(inside, key=lambda row: value(*row[1:])), alone=objective == "memory")[:7]
    for plan, (_, wanted_size, wanted_s, others) in zip(result.ranked, wanted, strict=True):
        assert plan.step_time_s == wanted_s
        assert objective != "memory" or plan.device_bytes == wanted_size
        assert plan.alike.num_plans == others
    assert counts_add_up(result)
    assert result.space.bounded > 0, "bounds that never cut are no bounds"


@pytest.mark.parametrize("software", ["torch", "megatron-core"])
@pytest.mark.parametrize("objectives", [("step_time", "memory"), ("memory", "step_time")])
def test_the_front_is_all_that_is_not_dominated(objectives: tuple[str, str], software: str) -> None:
    job = asked_for(4, software, capacity_of(software, 4))
    ranges = {**SPACE, "zero_stage": job.software.zero_stages}
    result = search(job, SearchSpace.model_validate({**ranges, "objectives": objectives, "top": 2}), explain=False)
    wanted = front(fitting(job, SearchSpace.model_validate(ranges)))
    assert {(plan.device_bytes, plan.step_time_s) for plan in result.pareto} == wanted
    assert len(result.pareto) == len(wanted) > 2


def test_a_deadline_and_less_memory_are_limits() -> None:
    inside = fitting(asked_for(), SearchSpace(**SPACE))
    deadline_s = sorted(seconds for _, _, seconds in inside)[len(inside) // 2]
    result = found_by(SearchSpace(**SPACE, objective="memory", max_step_time_s=deadline_s))
    within = [(size, s) for _, size, s in inside if s <= deadline_s]
    assert result.best is not None
    assert (result.best.device_bytes, result.best.step_time_s) == min(within)
    assert counts_add_up(result)
    smallest = min(size for _, size, _ in inside)
    narrow = found_by(SearchSpace.model_validate({**SPACE, "max_memory_fraction": (smallest + 1) / CAPACITY}))
    assert {plan.device_bytes for plan in narrow.ranked} == {smallest}


def test_default_search_keeps_5_percent_free() -> None:
    ranges = {key: value for key, value in SPACE.items() if key != "max_memory_fraction"}
    rows = every_plan(asked_for(), SearchSpace(**SPACE))
    sizes = sorted({size for _, size, _ in rows})
    capacity = int(sizes[len(sizes) // 2] / 0.95) + 1
    result = search(asked_for(capacity=capacity), SearchSpace(**ranges, top=1000), explain=False)
    assert (result.space.bounded, result.max_memory_fraction) == (0, 0.95)
    assert result.best is not None
    assert result.best.step_time_s == best_of([row for row in rows if row[1] <= 0.95 * capacity], 1)[0]
    in_headroom = sum(0.95 * capacity < size <= capacity for size in (row[1] for row in rows))
    assert 0 < in_headroom <= result.space.in_headroom < result.space.rejected["memory"]
    whole = search(asked_for(capacity=capacity), SearchSpace(**SPACE, top=1), explain=False)
    assert whole.space.in_headroom == 0


def test_nothing_within_the_deadline_tells_the_nearest() -> None:
    result = found_by(SearchSpace(**SPACE, max_step_time_s=1e-9))
    assert result.best is None
    fastest_s = min(seconds for _, _, seconds in fitting(asked_for(), SearchSpace(**SPACE)))
    [nearest, *_] = result.nearest_misses
    assert nearest.step_time_s == fastest_s
    assert nearest.lacking_s == pytest.approx(fastest_s - 1e-9)


def test_where_nothing_fits_the_nearest_misses_are_those_that_lack_least() -> None:
    sizes = sorted(size for _, size, _ in every_plan(asked_for(), SearchSpace(**SPACE)))
    result = search(asked_for(capacity=sizes[0] - MIB), SearchSpace(**SPACE), explain=False)
    assert result.best is None
    assert [miss.device_bytes for miss in result.nearest_misses] == sizes[:3]
    assert result.space.rejected["memory"] == len(sizes)


def test_processes_find_and_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_ALONE_S", -1.0)
    monkeypatch.setattr(workers._Processes, "is_ready", True)  # so that no call is made here
    monkeypatch.setattr(explore, "_PART_ROWS", 16)  # several parts of a table
    alone, spread = (
        json.dumps(search(asked_for(), SearchSpace(**SPACE, top=3), jobs=jobs).to_json()) for jobs in (1, 2)
    )
    assert alone == spread


@pytest.mark.parametrize(
    ("capacity", "options"),
    [
        pytest.param(1085, {"top": 1}, marks=pytest.mark.slow),
        (1085, {"top": 2, "objectives": ("memory", "step_time")}),
        (1085, {"max_step_time_s": 0.003}),
        pytest.param(100, {}, marks=pytest.mark.slow),  # with which nothing fits
    ],
)
def test_calls_made_ahead_change_nothing(
    monkeypatch: pytest.MonkeyPatch, capacity: int, options: dict[str, Any]
) -> None:
    """Workers that make all calls of a phase before the first result is taken, also those that it makes needless."""
    job, space = asked_for(capacity=capacity * MIB), SearchSpace(**SPACE, **options)
    one_by_one = json.dumps(search(job, space).to_json())
    num_calls = []

    def ahead(self: WorkerPool, function: Any, calls: Any) -> Iterator[tuple[Any, Any]]:
        results = [(key, function(*arguments)) for key, arguments in calls]
        num_calls.append(len(results))
        return iter(results)

    monkeypatch.setattr(WorkerPool, "each", ahead)
    assert json.dumps(search(job, space).to_json()) == one_by_one
    assert max(num_calls) > 5


def test_several_numbers_of_devices_are_one_space() -> None:
    result = found_by(SearchSpace(**SPACE, objective="num_devices", num_devices=(2, 4), top=3))
    assert not fitting(asked_for(2), SearchSpace(**SPACE))
    assert {plan.num_devices for plan in result.ranked} == {4}
    assert result.best is not None
    assert result.best.step_time_s == min(s for _, _, s in fitting(asked_for(), SearchSpace(**SPACE)))


def test_ranked_plans_are_predicted_whole_and_ranked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated steps that are too short by much change nothing but the work."""
    space = SearchSpace(**SPACE, top=4)
    truth = found_by(space)
    numbers = Evaluator.numbers

    def short(self: Evaluator, plan: ParallelPlan, max_bytes: int | None, *, whole: bool = False) -> Numbers:
        size, seconds = numbers(self, plan, max_bytes, whole=whole)
        share = 1.0 if whole else 0.5 + 0.5 * (plan.virtual_stages * 7 + plan.pp * 3 + plan.dp_shard) % 5 / 5
        return size, seconds if seconds is None else share * seconds

    monkeypatch.setattr(Evaluator, "numbers", short)
    monkeypatch.setattr(Evaluator, "is_approximate", lambda *_: True)
    seen: list[SearchProgress] = []
    result = search(asked_for(), space, explain=False, on_progress=seen.append)
    assert [plan.step_time_s for plan in result.ranked] == [plan.step_time_s for plan in truth.ranked]
    assert counts_add_up(result)
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)


def test_software_without_a_zero_stage_is_searched_without_it() -> None:
    result = search(
        asked_for(software="megatron-core"), SearchSpace(microbatch_size=(1,), recompute=("none",)), explain=False
    )
    assert {ranked.plan.zero_stage for ranked in result.ranked} <= {0, 1}


@pytest.mark.parametrize(
    ("software", "capacity"), [("torch", 1085), pytest.param("torchtitan", 1102, marks=pytest.mark.slow)]
)
def test_compiled_is_an_axis(software: str, capacity: int) -> None:
    """The best plans over both values are those of ``predict``; of both, some fit and some do not."""
    job = asked_for(4, software, capacity * MIB)
    space = SearchSpace.model_validate({**SPACE, "schedule": ("1f1b", "zb-h1"), "zero_stage": job.software.zero_stages})
    rows = [
        (row, compiled)
        for compiled in (False, True)
        for row in shown(sorted(fitting(_blocks(job, compiled=compiled), space), key=lambda row: row[2]))
    ]
    wanted = sorted(rows, key=lambda row: (row[0][2], row[0][1]))
    assert {compiled for _, compiled in wanted[:12]} == {False, True}
    for compiled in (False, True):
        assert any(size > capacity * MIB for _, size, _ in every_plan(_blocks(job, compiled=compiled), space))
    both = space.model_copy(update={"compiled": (True, False), "top": 12})
    result = search(job, both, explain=False)
    assert [(plan.step_time_s, plan.software["compiled"], plan.alike.num_plans) for plan in result.ranked] == [
        (seconds, compiled, others) for (_, _, seconds, others), compiled in wanted[:12]
    ]
    assert counts_add_up(result)
    assert result.space.bounded > 0
    alone = search(_blocks(job, compiled=True), space, explain=False)
    assert search(job, space.model_copy(update={"compiled": (True,)}), explain=False).space == alone.space
    best = search(job, both.model_copy(update={"top": 1})).ranked[0]
    assert best.explanation is not None
    [other] = best.explanation.other_software
    assert other.software == {"compiled": not best.software["compiled"]}
    alone_s = predict(_blocks(job, **other.software).with_plan(best.plan)).step_time_s
    assert other.step_time_s == pytest.approx(alone_s, rel=1e-12)


def test_loss_is_an_axis() -> None:
    """The best plans of both losses are those of two searches; a loss that the software lacks is refused."""
    job = asked_for(software="torchtitan")
    space = SearchSpace.model_validate({**SPACE, "schedule": ("1f1b",), "zero_stage": job.software.zero_stages})
    alone = {
        loss: search(job.with_changes({"software.loss": loss}), space, explain=False).ranked
        for loss in ("whole", "chunked")
    }
    wanted = sorted((plan.step_time_s, loss) for loss, ranked in alone.items() for plan in ranked)[:5]
    result = search(job, space.model_copy(update={"loss": ("whole", "chunked")}), explain=False)
    assert [(plan.step_time_s, plan.software["loss"]) for plan in result.ranked] == wanted
    with refuses("search.loss", rule="torchtitan has whole or chunked only", kind=NotModelledError):
        search(job, space.model_copy(update={"loss": ("fused",)}), explain=False)


def _blocks(job: Job, *, compiled: bool) -> Job:
    return replace(job, software=job.software.model_copy(update={"compiled": compiled}))
