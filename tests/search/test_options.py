"""Searched options besides the ranges of plans: what is best, compared with predictions of the keys set by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.report.search import search_text
from simplan.scenario import load_scenario, parse_search, plan_document
from simplan.scenario.writing import scenario_text
from simplan.search import SearchSpace, search
from simplan.search.space import OPTION_KEYS
from tests.jobs import job_of

SMALL = {"microbatch_size": (1,), "recompute": ("none",), "max_memory_fraction": 1.0, "dp_shard": (2,)}
VALUES: Mapping[str, tuple[Any, Any]] = {
    "compiled": (False, True),
    "loss": ("whole", "chunked"),
    "offload_activations": (False, True),
    "offload_optimizer": (False, True),
    "optimizer": ("adamw", "adamw_torch_8bit"),
    "base_weights": ("none", "nf4"),
    "lora_rank": (8, 64),
}
BY_HAND = {"none": None}


def adapted(name: str) -> Job:
    fields: dict[str, Any] = {"task": "lora"} if name in ("base_weights", "lora_rank") else {}
    rank = {"lora_rank": 8} if fields else {}
    model = "llama3.2-1b" if fields else "gpt2-124m"
    software = "torchtitan" if name == "loss" else "torch"
    plan = ParallelPlan(dp_shard=2)
    job = job_of(model, plan, global_batch_size=2, software=software, precision="bf16", **fields)
    return job.with_changes({f"model.{key}": value for key, value in rank.items()}) if rank else job


@pytest.mark.parametrize("name", OPTION_KEYS)
def test_an_option_is_an_axis(name: str) -> None:
    """The ranking over both values is that of ``predict`` of the same plan, with the key set by hand."""
    job = adapted(name)
    space = SearchSpace.model_validate({**SMALL, name: VALUES[name]})
    result = search(job, space)
    plans = {plan.software[name]: plan for plan in result.ranked}
    wanted = {
        value: predict(job.with_changes({OPTION_KEYS[name]: BY_HAND.get(value, value)}).with_plan(plan.plan))
        for value, plan in plans.items()
    }
    assert {value: plan.step_time_s for value, plan in plans.items()} == pytest.approx(
        {value: plan.step_time_s for value, plan in wanted.items()}, rel=1e-5
    )
    assert {value: plan.device_bytes for value, plan in plans.items()} == {
        value: plan.worst_memory.device_bytes for value, plan in wanted.items()
    }
    assert set(plans) == set(VALUES[name])
    assert ("Losses were not compared" in search_text(result)) == (name in ("optimizer", "base_weights", "lora_rank"))


SCENARIO = """
name: cards
model: {preset: llama3-8b, seq_len: 2048, lora_rank: 16}
cluster: {device: rtx-4090, devices_per_node: 1, num_devices: 1}
training:
  global_batch_size: 4
  task: lora
  precision: bf16
  base_weights: {format: nf4, double_quantization: true}
software: accelerate
search: {microbatch_size: 1, recompute: full, base_weights: [none, nf4], optimizer: [adamw, paged_adamw_8bit]}
"""


def test_a_saved_plan_has_its_options(tmp_path: Path) -> None:
    """Weights keep the other keys of their format; without a format the section has none."""
    asked = parse_search(SCENARIO)
    result = asked.search()
    assert {tuple(plan.software.items()) for plan in result.ranked} >= {
        (("optimizer", "paged_adamw_8bit"), ("base_weights", "nf4"))
    }
    for number, plan in enumerate(result.ranked):
        file = tmp_path / f"{number}.yaml"
        file.write_text(scenario_text(plan_document(asked, plan.plan, tmp_path, plan.software), "A plan."))
        job = load_scenario(file).job
        base = job.training.base_weights
        assert job.training.optimizer == plan.software["optimizer"]
        assert plan.software["base_weights"] == ("none" if base is None else base.format)
        assert base is None or base.double_quantization
        assert predict(job).step_time_s == pytest.approx(plan.step_time_s, rel=1e-5)
