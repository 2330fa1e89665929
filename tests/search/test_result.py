"""What a search returns, for each family too, how it is stopped, and where it runs."""

from __future__ import annotations

import json
import math
from typing import Any

import joblib
import pytest

import simplan
from simplan.errors import SpecError
from simplan.predict import predict
from simplan.problems import parse_model
from simplan.search import SearchProgress, SearchResult, SearchSpace, search
from tests.search.jobs import FAMILIES, small_job
from tests.support.slow import slow_except

SPACE = SearchSpace(
    objectives=("step_time", "memory"), top=3, microbatch_size=(1, 2), schedule=("1f1b",), recompute=("none",)
)
ASKED = small_job(num_devices=4)


def test_a_result_goes_into_pandas_and_json() -> None:
    package: Any = simplan.search
    result = package(ASKED, SPACE)
    frame = result.to_dataframe()
    assert list(frame["rank"][:3]) == [1, 2, 3]
    assert list(frame["step_time_s"][:3]) == [plan.step_time_s for plan in result.ranked]
    assert frame["on_front"].sum() == len(result.pareto)
    assert set(frame.columns) >= {"pp", "tp", "zero_stage", "schedule", "device_gib", "tokens_per_s_per_device"}
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document["best"] == document["ranked"][0]
    assert {"plan", "step_time_s", "peak_memory_gib"} <= set(document["best"])
    space = document["space"]
    assert space["total"] == sum(space["rejected"].values()) + space["bounded"] + space["timed"]


@pytest.mark.parametrize(
    ("family", "software", "ranges", "axes"),
    [
        ("llama", "torch", {}, {"cp", "compiled"}),
        *slow_except(
            [("llama", "megatron-lm-2021", {}, set())],
            [
                ("llama", "torch", {"cp": [1], "compiled": [True]}, set()),
                ("llama", "megatron-core", {}, {"cp"}),
                ("llama", "megatron-lm-2021", {}, set()),
                ("moe", "megatron-core", {}, {"tp", "cp"}),
                ("resnet", "torch", {}, {"compiled"}),
            ],
        ),
    ],
)
def test_axes_left_out_are_named(family: str, software: str, ranges: dict[str, Any], axes: set[str]) -> None:
    """Each of them, added as the result says, gives plans that the search did not have."""
    job = small_job(family, software=software, precision="fp32" if family == "resnet" else "bf16")
    few = {"microbatch_size": 1, "recompute": "none", "pp": 1, "top": 1000}
    space = parse_model(SearchSpace, {**few, **ranges})
    result = search(job, space, explain=False)
    assert set(result.unsearched) == axes
    for axis, values in result.unsearched.items():
        wider = search(job, space.model_copy(update={axis: values}), explain=False)
        of_axis = {plan.software.get(axis, getattr(plan.plan, axis, None)) for plan in wider.ranked}
        assert of_axis == set(values)
        assert axis not in wider.unsearched


def test_long_sequences_are_searched_with_context_parallelism() -> None:
    space = SearchSpace(microbatch_size=(1,), recompute=("none",), pp=(1,), zero_stage=(3,))
    assert "cp" not in search(small_job(seq_len=32_768), space, explain=False).unsearched


def test_a_stopped_search_gives_the_best_so_far() -> None:
    def stop(progress: SearchProgress) -> None:
        if progress.best_step_time_s is not None:
            raise KeyboardInterrupt

    result = search(ASKED, SPACE, on_progress=stop)
    assert result.interrupted
    assert result.best is not None
    assert 0 < result.space.timed < search(ASKED, SPACE, explain=False).space.total
    assert result.space.total == sum(result.space.rejected.values()) + result.space.bounded + result.space.timed


def test_a_search_stopped_at_once_gives_a_plan_that_fits() -> None:
    """Before any plan is simulated there are only bounds, of which a few are tried."""

    def stop(_: SearchProgress) -> None:
        raise KeyboardInterrupt

    result = search(ASKED, SPACE, on_progress=stop)
    assert result.interrupted
    assert result.best is not None
    assert result.space.timed == 1


def test_progress_ends_at_the_total() -> None:
    seen: list[SearchProgress] = []
    result = search(ASKED, SPACE, explain=False, on_progress=seen.append)
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
    assert seen[-1].done == seen[-1].total == result.space.total
    assert result.best is not None
    assert seen[-1].best_step_time_s == result.best.step_time_s


def test_the_answer_so_far_becomes_the_answer() -> None:
    answers: list[SearchResult] = []
    result = search(ASKED, SPACE, on_progress=lambda progress: answers.append(progress.so_far()))
    assert all(answer.interrupted for answer in answers)
    explained = [sum(plan.explanation is not None for plan in answer.ranked) for answer in answers]
    assert explained[-3:] == [0, 1, 2], "one after the other, and the last one is not there yet"
    last = answers[-1]
    assert [plan.plan for plan in last.ranked] == [plan.plan for plan in result.ranked]
    assert (last.ranked[:2], last.space) == (result.ranked[:2], result.space)


def test_two_objectives_outlive_a_copy_and_a_document() -> None:
    space = SearchSpace(objectives=("memory", "step_time"))
    copy = space.model_copy(update={"zero_stage": (0, 1)})
    assert copy.goals == space.goals == ("memory", "step_time")
    assert SearchSpace.model_validate_json(copy.model_dump_json(exclude_none=True)) == copy


@pytest.mark.parametrize(
    ("fields", "communication"),
    [
        ({"objective": "cost"}, "give dollars_per_device_hour and token_budget"),
        ({"objectives": ["memory", "memory"]}, "has memory twice"),
        ({"objective": "memory", "objectives": ["step_time", "memory"]}, "keep one of the two"),
    ],
)
def test_objectives_that_do_not_go_together(fields: dict[str, Any], communication: str) -> None:
    with pytest.raises(ValueError, match=communication):
        SearchSpace.model_validate(fields)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what dask says about its ports and its memory is not ours
def test_a_dask_cluster_of_two_workers_finds_the_same() -> None:
    distributed: Any = pytest.importorskip("distributed")

    alone = search(ASKED, SPACE, explain=False)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        spread = search(ASKED, SPACE, jobs=2, explain=False)
    assert (spread.ranked, spread.pareto) == (alone.ranked, alone.pareto)
    assert spread.space.rejected == alone.space.rejected


@pytest.mark.parametrize(
    ("ranges", "sentences"),
    [
        ({"tp": "2"}, ['tp = "2": must be a whole number; write 2 without quotes']),
        ({"microbatch_size": 1.5}, ["microbatch_size = 1.5: must be a whole number"]),
        ({"tp": []}, ["tp = []: must not be empty"]),
        ({"objectives": ["memory"]}, ['objectives = ["memory"]: must have at least 2 values']),
        (
            {"objectives": ["memory", "num_devices", "step_time"]},
            ['objectives = ["memory", "num_devices", "step_time"]: must have at most 2 values'],
        ),
    ],
)
def test_a_wrong_range_is_one_problem_in_our_words(ranges: dict[str, Any], sentences: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_model(SearchSpace, ranges)
    assert [problem.sentence() for problem in caught.value.problems] == sentences


@pytest.mark.parametrize("family", slow_except(["gpt", "moe", "resnet", "t5"], sorted(FAMILIES)))
def test_predict_confirms_the_best_plan(family: str) -> None:
    precision = "fp32" if family == "resnet" else "bf16"
    job = small_job(family, 4, batch=4, precision=precision)
    space = SearchSpace(top=1, microbatch_size=(1,), recompute=("none",), virtual_stages=(1, 2))
    result = search(job, space)
    best = result.best
    assert best is not None
    prediction = predict(job.with_plan(best.plan), name="x")
    assert best.step_time_s == pytest.approx(prediction.step_time_s, rel=1e-9)
    assert best.device_bytes == prediction.worst_memory.device_bytes
    assert best.headroom_bytes == int(0.95 * prediction.job.cluster.device.memory_bytes) - best.device_bytes  # type: ignore[operator]
    per_step = prediction.samples_per_s_per_device if result.unit == "images" else prediction.tokens_per_s_per_device
    assert best.tokens_per_s_per_device == pytest.approx(per_step)
    why = best.explanation
    assert why is not None
    assert math.fsum(why.shares.values()) == pytest.approx(1)
    assert why.step_time_interval_s == prediction.step_time_interval_s
    assert why.device_interval_bytes == prediction.worst_memory.device_interval_bytes
    assert why.memory_verdict == prediction.memory_verdict
    assert why.saved is not None
    assert all(0 < share < 1 / 11 + 1e-9 for name, share in why.saved.items() if name != "memory"), (
        "10 % more of one thing saves at most an eleventh"
    )
