"""Candidates with few microbatches written out, against ``predict``'s whole steps."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from simplan.search.abridged import AbridgedEvaluator
from simplan.search.evaluators import abridges
from simplan.search.outline import Outlines
from simplan.search.reference import ReferenceEvaluator

from simplan.predict.build import assign_layers, cost_model
from simplan.search.candidate import Candidate
from simplan.search.enumeration import Enumeration
from simplan.search.question import Question
from simplan.search.space import SearchSpace
from simplan.spec import catalogue
from tests.search.questions import question

STACKS = (
    "megatron-core", "megatron-lm-2021", "megatron-lm-2022", "megatron-deepspeed", "megatron-bridge", "nemo",
    "torchtitan", "llm-foundry", "maxtext",
)  # fmt: skip
BLOCK_BYTES = 2**21
FAMILIES = ("gpt", "llama", "moe", "deepseek", "t5", "bert")


def asked_for(family: str, software: str, precision: str = "bf16", **changes: Any) -> Question:
    asked = question(family, num_devices=8, batch=32, precision=precision, **changes)
    return replace(asked, software=catalogue.software(software))


def some(asked: Question, number: int, seed: int) -> list[Candidate]:
    enumeration = Enumeration(SearchSpace(zero_stage=asked.software.zero_stages), asked)
    found = list(enumeration.candidates(enumeration.meshes, Counter()))
    return random.Random(seed).sample(found, min(number, len(found)))


def holds(asked: Question, candidates: list[Candidate]) -> None:
    evaluator, reference = AbridgedEvaluator(asked), ReferenceEvaluator(asked)
    for candidate in candidates:
        [least], [found] = evaluator.least_bytes([candidate]), evaluator.device_bytes([candidate])
        [whole] = reference.device_bytes([candidate])
        assert 0 < least <= found, candidate
        assert abs(found - whole) <= 3 * BLOCK_BYTES, candidate
        [seconds], [whole_s] = evaluator.step_times_s([candidate]), reference.step_times_s([candidate])
        assert seconds == pytest.approx(whole_s, rel=1e-9), candidate
        [least_s] = evaluator.least_time_s([candidate])
        assert 0 < least_s <= seconds * (1 + 1e-9), candidate


@pytest.mark.parametrize(
    ("family", "software"), [("gpt", "megatron-lm-2022"), ("llama", "megatron-core"), ("moe", "nemo")]
)
def test_numbers_are_those_of_whole_steps(family: str, software: str) -> None:
    """And bounds are below."""
    holds(asked_for(family, software), some(asked_for(family, software), 6, seed=1))


@pytest.mark.parametrize(
    ("family", "software", "candidate"),
    [
        ("bert", "megatron-bridge", Candidate(1, 2, 1, tp=2, pp=2, virtual_stages=2, schedule="zb-v")),
        ("llama", "maxtext", Candidate(1, 2, 3, tp=2, pp=2, virtual_stages=2, schedule="interleaved_1f1b")),
    ],
)
def test_what_messages_take_is_the_same_where_layers_are_written_out_together(
    family: str, software: str, candidate: Candidate
) -> None:
    asked = asked_for(family, software, hidden_size=512, seq_len=512)
    holds(asked, [candidate])
    assert cost_model(asked.job(candidate.plan()), None).taken_share > 0


@pytest.mark.parametrize(
    ("family", "software", "depths"), [("llama", "megatron-core", 2), ("deepseek", "megatron-bridge", 1)]
)
def test_numbers_are_those_of_whole_steps_with_layers_for_later_tokens(family: str, software: str, depths: int) -> None:
    asked = asked_for(family, software, mtp_num_layers=depths)
    holds(asked, some(asked, 3, seed=5))
    for stages in (2, 4):
        candidate = Candidate(pp=stages, dp_shard=8 // stages, zero_stage=1, schedule="1f1b")
        plan, bounds = candidate.plan(), Outlines(asked).boundaries(candidate)
        job = asked.job(plan)
        assert tuple(bounds) == assign_layers(job, cost_model(job, None)).boundaries


@pytest.mark.slow
@pytest.mark.parametrize("software", STACKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_whole_steps_of_every_stack(family: str, software: str) -> None:
    asked = asked_for(family, software)
    holds(asked, some(asked, 25, seed=2))


@pytest.mark.slow
@pytest.mark.parametrize("software", ["megatron-core", "nemo"])
def test_numbers_are_those_of_whole_steps_in_8_bits(software: str) -> None:
    """Copies of weights are kept once for all microbatches."""
    asked = asked_for("llama", software, "fp8", hidden_size=128, intermediate_size=256, seq_len=64)
    holds(asked, some(asked, 25, seed=3))


def test_a_search_for_a_megatron_plan_of_a_large_model_writes_out_few() -> None:
    """70B on 64 devices: bounds leave less than half of all plans to be looked at."""
    model, cluster = catalogue.model("llama3-70b"), catalogue.cluster("dgx-h100", 64)
    asked = replace(question(batch=256), model=model, cluster=cluster, software=catalogue.software("megatron-core"))
    assert abridges(asked)
    enumeration = Enumeration(SearchSpace(tp=(4, 8), zero_stage=(0, 1), virtual_stages=(1, 2)), asked)
    found = list(enumeration.candidates(enumeration.meshes, Counter()))
    chosen = random.Random(4).sample(found, 200)
    capacity = cluster.device.memory_bytes
    assert capacity is not None
    left = sum(least <= capacity for least in AbridgedEvaluator(asked).least_bytes(chosen))
    assert left < len(chosen) / 2
