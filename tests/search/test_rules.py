"""The rules of a search against ``check_plan``."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from simplan.errors import NotModelledError, SpecError
from simplan.job import Job
from simplan.search import SearchSpace
from simplan.search.enumeration import Enumeration
from simplan.search.jobs import check_without_plan
from simplan.search.rules import RULES, Rules, in_words
from simplan.spec import catalogue
from simplan.spec.plan import ParallelPlan
from simplan.spec.rules import check_plan
from simplan.spec.schedules import SCHEDULE_FACTS
from tests.search.jobs import FAMILIES, plain_plan, plans_of, small_job


def is_plan(asked: Job, candidate: ParallelPlan) -> bool:
    try:
        check_plan(asked.with_plan(candidate))
    except SpecError:
        return False
    return True


@st.composite
def candidates(draw: st.DrawFn) -> ParallelPlan:
    schedule = draw(st.sampled_from(["none", "none", "1f1b", "1f1b", "interleaved_1f1b", "zb-v", *SCHEDULE_FACTS]))
    facts = SCHEDULE_FACTS.get(schedule)
    stages = (1 if facts is None else facts.virtual_stages) or 2
    return plain_plan(
        dp_replicate=draw(st.sampled_from([1, 1, 2, 3])),
        dp_shard=draw(st.sampled_from([1, 1, 2, 4])),
        zero_stage=draw(st.integers(0, 3)),
        reshard_after_forward=draw(st.sampled_from([True, True, False])),
        tp=draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
        sequence_parallel=draw(st.sampled_from([False, False, True])),
        cp=draw(st.sampled_from([1, 1, 1, 2, 4])),
        cp_comm=draw(st.sampled_from(["ring", "ring", "all_gather", "a2a"])),
        ep=draw(st.sampled_from([1, 1, 1, 2, 3])),
        pp=1 if schedule == "none" and draw(st.booleans()) else draw(st.sampled_from([1, 2, 2, 3])),
        virtual_stages=draw(st.sampled_from([stages, stages, stages, 1, 2, 3])),
        schedule=schedule,
        microbatch_size=draw(st.integers(1, 2)),
        recompute=draw(st.sampled_from(["none", "none", "selective", "full", "selective_op"])),
        grad_sync=draw(st.sampled_from(["step", "step", "microbatch"])),
    )


@given(
    candidates(),
    st.sampled_from(sorted(FAMILIES)),
    st.booleans(),
    st.sampled_from(["bf16", "fp32"]),
    st.sampled_from([8, 12, 600_000]),
)
@settings(max_examples=600, deadline=None)
def test_a_candidate_is_rejected_exactly_when_check_plan_refuses_it(
    candidate: ParallelPlan, family: str, enough: bool, precision: str, batch: int
) -> None:
    changes: dict[str, Any] = {"qk_norm": "projection"} if family == "moe" and batch == 12 else {}
    changes |= {"sliding_window": 8} if family == "llama" and batch == 12 else {}
    devices = candidate.num_devices if enough else 4
    asked = small_job(family, devices, batch=batch, precision=precision, **changes)
    why = Rules(asked, tp_across_nodes=True).first(candidate)
    assert (why is None) == is_plan(asked, candidate), why
    assert why is None or why in RULES
    event(str(why))


def test_words_are_those_of_the_framework() -> None:
    torch, jax = catalogue.software("megatron-core"), catalogue.software("maxtext")
    assert in_words("tp_in_node", torch) == in_words("tp_in_node", jax) == RULES["tp_in_node"]
    for name in ("virtual_stages_ddp", "split_backward_ddp", "split_backward_reshard"):
        assert re.search("torch|DistributedDataParallel", in_words(name, torch))
    assert not any(re.search("torch|DistributedDataParallel|FSDP", in_words(name, jax)) for name in RULES)


SPECIAL: dict[str, dict[str, Any]] = {
    "adapters": {"lora_rank": 4, "task": "lora"},
    "documents": {"document_lengths": (16, 12)},
    "fp8": {"precision": "fp8"},
    "mxfp8": {"precision": "mxfp8", "hidden_size": 256, "intermediate_size": 256, "seq_len": 64},
    "nvfp4 of 64 tokens": {"precision": "nvfp4", "hidden_size": 512, "intermediate_size": 512, "seq_len": 64},
}


@pytest.mark.parametrize("name", SPECIAL)
@given(candidate=candidates())
@settings(max_examples=150, deadline=None)
def test_so_it_is_where_more_is_refused(name: str, candidate: ParallelPlan) -> None:
    asked = small_job("llama", candidate.num_devices, batch=12, **SPECIAL[name])
    check_without_plan(asked, SearchSpace())
    assert (Rules(asked, tp_across_nodes=True).first(candidate) is None) == is_plan(asked, candidate)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_so_it_is_where_exchanges_are_beside_another_microbatch(precision: str) -> None:
    software = catalogue.software("megatron-core").model_copy(update={"expert_overlap": True})
    made = [
        plain_plan(dp_replicate=2, ep=ep, pp=pp, virtual_stages=v, schedule=schedule, recompute=recompute)
        for ep in (1, 2)
        for pp, v, schedule in ((1, 1, "none"), (2, 1, "1f1b"), (2, 1, "gpipe"), (2, 2, "interleaved_1f1b"))
        for recompute in ("none", "full")
    ]
    found = []
    for one in made:
        asked = replace(small_job("moe", one.num_devices, batch=8, precision=precision), software=software)
        why = Rules(asked).first(one)
        assert (why is None) == is_plan(asked, one), one
        found += [(one.pp, one.virtual_stages)] * (why is None and one.ep > 1)
    assert found == ([] if precision == "fp32" else [(1, 1), (2, 2)])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"cuda_graphs": ("attn", "mlp")}),
        ("llama", {"cuda_graphs": ("full_iteration",)}),
        ("gpt", {"cuda_graphs": ("attn",)}),  # Megatron trains it with dropout
        ("moe", {"cuda_graphs": ("attn", "moe_router"), "expert_overlap": True}),
    ],
)
@given(candidate=candidates())
@settings(max_examples=80, deadline=None)
def test_so_it_is_with_cuda_graphs(family: str, options: dict[str, Any], candidate: ParallelPlan) -> None:
    assume(candidate.zero_stage != 2)  # which the space of this software does not have
    asked = small_job(family, candidate.num_devices, batch=12)
    asked = replace(asked, software=catalogue.software("megatron-bridge").model_copy(update=options))
    check_without_plan(asked, SearchSpace())
    assert (Rules(asked, tp_across_nodes=True).first(candidate) is None) == is_plan(asked, candidate)


def test_graphs_of_parts_beside_exchanges_that_overlap_have_no_sharded_parameters() -> None:
    changed = {"cuda_graphs": ("attn",), "expert_overlap": True}
    software = catalogue.software("megatron-bridge").model_copy(update=changed)
    for stage, why in ((1, None), (3, "cuda_graphs_sharded")):
        candidate = plain_plan(dp_shard=2, zero_stage=stage, ep=2)
        asked = replace(small_job("moe", candidate.num_devices, batch=8), software=software)
        assert Rules(asked).first(candidate) == why
        assert is_plan(asked, candidate) is (why is None)


@given(candidate=candidates())
@settings(max_examples=80, deadline=None)
def test_so_it_is_with_attention_in_8_bits(candidate: ParallelPlan) -> None:
    assume(candidate.zero_stage != 2)  # which the space of this software does not have
    asked = small_job("llama", candidate.num_devices, "dgx-b200", batch=12, **SPECIAL["mxfp8"])
    software = catalogue.software("megatron-bridge").model_copy(update={"fp8_dot_product_attention": True})
    asked = replace(asked, software=software)
    check_without_plan(asked, SearchSpace())
    assert (Rules(asked, tp_across_nodes=True).first(candidate) is None) == is_plan(asked, candidate)


@given(candidate=candidates(), family=st.sampled_from(["llama", "moe", "deepseek"]), odd=st.booleans())
@settings(max_examples=150, deadline=None)
def test_so_it_is_beside_layers_for_later_tokens(candidate: ParallelPlan, family: str, odd: bool) -> None:
    hidden: dict[str, Any] = {"num_attention_heads": 12, "hidden_size": 50} | (
        {} if family == "deepseek" else {"head_dim": 4}
    )
    sizes: dict[str, Any] = hidden | ({"num_key_value_heads": 12} if family == "llama" else {}) if odd else {}
    asked = small_job(family, candidate.num_devices, batch=12, mtp_num_layers=1, **sizes)
    asked = replace(asked, software=catalogue.software("megatron-core"))
    check_without_plan(asked, SearchSpace())
    assert (Rules(asked, tp_across_nodes=True).first(candidate) is None) == is_plan(asked, candidate)


def test_layers_for_later_tokens_rule_out_shards_and_split_backwards() -> None:
    asked = replace(small_job("llama", 2, mtp_num_layers=1), software=catalogue.software("megatron-bridge"))
    found = [
        plain_plan(dp_shard=2, zero_stage=3),
        plain_plan(pp=2, schedule="zb-h1"),
        plain_plan(pp=2, schedule="1f1b"),
    ]
    whys = ["mtp_sharded", "schedule_modelled", None]
    assert [Rules(asked).first(candidate) for candidate in found] == whys
    assert [is_plan(asked, candidate) for candidate in found] == [why is None for why in whys]


@pytest.mark.parametrize("software", ["megatron-bridge", "deepspeed-2021", "maxtext", "torchtitan"])
@pytest.mark.parametrize("changes", [{"lora_rank": 4, "task": "lora"}, {"precision": "fp16"}, {"precision": "fp8"}])
def test_sharded_parameters_are_rejected_where_the_software_has_none_of_such_a_training(
    software: str, changes: dict[str, Any]
) -> None:
    asked = replace(small_job("llama", 2, **changes), software=catalogue.software(software))
    try:
        check_without_plan(asked, SearchSpace())
    except NotModelledError:
        return  # no plan at all
    sharded = [plain_plan(dp_shard=2, zero_stage=stage) for stage in asked.software.zero_stages if stage]
    rules = Rules(asked)
    assert [rules.first(one) is None for one in sharded] == [is_plan(asked, one) for one in sharded]


def test_sequence_parallelism_is_rejected_where_the_software_has_none() -> None:
    """Megatron-LM has it since 2022 (Korthikanti et al., arXiv:2205.05198)."""
    one, found = plain_plan(tp=2, sequence_parallel=True), []
    for name in ("megatron-lm-2021", "megatron-lm-2022", "megatron-deepspeed", "megatron-core"):
        asked = replace(small_job("gpt", 2), software=catalogue.software(name))
        found.append(is_plan(asked, one))
        assert (Rules(asked).first(one) is None) == found[-1]
        assert is_plan(asked, one.model_copy(update={"sequence_parallel": False}))
    assert found == [False, True, False, True]


@pytest.mark.parametrize(
    ("software", "found"), [("megatron-lm-2022", [6]), ("megatron-core", [4, 6]), ("torch", [4, 6])]
)
def test_stages_have_as_many_blocks_where_the_software_has_no_others(software: str, found: list[int]) -> None:
    asked = replace(small_job("llama", 2, num_hidden_layers=6), software=catalogue.software(software))
    plans = {
        stages: ParallelPlan(pp=2, virtual_stages=stages // 2, schedule="interleaved_1f1b", microbatch_size=2)
        for stages in (4, 6)
    }
    assert [stages for stages, one in plans.items() if Rules(asked).first(one) is None] == found
    assert [stages for stages, one in plans.items() if is_plan(asked, one)] == found


@pytest.mark.parametrize("name", SPECIAL)
def test_they_are_counted_there_too(name: str) -> None:
    asked = small_job("llama", 4, batch=4, **SPECIAL[name])
    enumeration, rejected = Enumeration(SearchSpace(cp=(1, 2), cp_comm=("all_gather",)), asked), Counter[str]()
    found = [t.plan(row) for t in enumeration.tables(rejected) for row in range(len(t))]
    assert all(is_plan(asked, candidate) for candidate in found)
    assert len(found) + rejected.total() == enumeration.total
    assert found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_candidates_are_all_plans_of_the_ranges(family: str) -> None:
    """Against all combinations of values, those left out that mean nothing in a plan."""
    asked = small_job(family, 4, batch=4)
    enumeration = Enumeration(SearchSpace(), asked)
    rejected: Counter[str] = Counter()
    found = [t.plan(row) for t in enumeration.tables(rejected) for row in range(len(t))]
    assert len(set(found)) == len(found)
    assert len(found) + rejected.total() == enumeration.total
    assert set(rejected) <= set(RULES)
    degrees = (1, 2, 4)
    tps, eps = ((1,), degrees) if asked.model.num_experts else (degrees, (1,))
    every = set()
    for dp_replicate, dp_shard, tp, pp, ep in product(degrees, degrees, tps, degrees, eps):
        if dp_replicate * dp_shard * tp * pp != 4:
            continue
        shardings = [(0, True)] if dp_shard == 1 else [(1, True), (2, True), (3, True)]
        pipelines = [("none", 1)]
        if pp > 1:
            pipelines = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)]
            pipelines += [("interleaved_1f1b", v) for v in range(2, asked.model.num_blocks + 1)]
        for sharding, pipeline, split, size, recompute, grad_sync in product(
            shardings, pipelines, {False, tp > 1}, (1, 2, 4), ("none", "selective", "full"), ("step", "microbatch")
        ):
            if grad_sync == "microbatch" and (sharding[0] < 2 or dp_replicate * dp_shard * size == 4):
                continue  # whole gradients are there anyway, or there is one microbatch
            one = plain_plan(
                dp_replicate=dp_replicate,
                dp_shard=dp_shard,
                zero_stage=sharding[0],
                reshard_after_forward=sharding[1],
                tp=tp,
                sequence_parallel=split,
                ep=ep,
                pp=pp,
            )
            every.add(
                one.model_copy(
                    update={
                        "schedule": pipeline[0],
                        "virtual_stages": pipeline[1],
                        "microbatch_size": size,
                        "recompute": recompute,
                        "grad_sync": grad_sync,
                    }
                )
            )
    assert set(found) == {candidate for candidate in every if is_plan(asked, candidate)}


def test_ranges_narrow_and_widen() -> None:
    asked = small_job(num_devices=4)
    space = SearchSpace(
        tp=(2, 3), zero_stage=(3,), reshard_after_forward=(False,), schedule=("naive", "zb-2p"), recompute=("minimal",)
    )
    found = plans_of(asked, space)
    assert {c.tp for c in found} == {2}
    assert {(c.zero_stage, c.reshard_after_forward) for c in found if c.dp_shard > 1} == {(3, False)}
    assert {c.schedule for c in found} == {"none", "naive"}  # zb-2p cannot recompute whole layers
    assert {c.recompute for c in found} == {"minimal"}


def test_tensor_parallel_groups_stay_inside_a_node_unless_asked_otherwise() -> None:
    asked = small_job(num_devices=32, num_attention_heads=16, hidden_size=256, num_key_value_heads=16)

    def degrees(space: SearchSpace) -> tuple[set[int], int]:
        enumeration, rejected = Enumeration(space, asked), Counter[str]()
        found = {tp for table in enumeration.tables(rejected) for tp in table["tp"].tolist()}
        return found, rejected["tp_in_node"]

    assert degrees(SearchSpace()) == ({1, 2, 4, 8}, 0)
    assert degrees(SearchSpace(tp_across_nodes=True)) == ({1, 2, 4, 8, 16}, 0)
    found, number = degrees(SearchSpace(tp=(16,)))
    assert (found, number > 0) == (set(), True)


def test_context_parallelism_is_tried_for_long_sequences() -> None:
    def degrees(seq_len: int) -> set[int]:
        asked = small_job("llama", 8, seq_len=seq_len)
        return {mesh.cp for mesh in Enumeration(SearchSpace(), asked).meshes}

    assert (degrees(32_767), degrees(32_768)) == ({1}, {1, 2, 4, 8})


def test_what_no_plan_could_mend_is_refused() -> None:
    asked = small_job(num_devices=16)
    asked = replace(asked, cluster=asked.cluster.model_copy(update={"inter_link": None}))
    with pytest.raises(SpecError, match="2 nodes need a network"):
        check_without_plan(asked, SearchSpace())
    check_without_plan(small_job(num_devices=16, batch=3), SearchSpace())
