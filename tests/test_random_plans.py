"""Any plan at all is refused with a sentence, or predicted with all laws kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count, product
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from simplan import catalog
from simplan.errors import NotModelledError, SpecError
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.predict import Simulated, StepContext, cost_model, folding_of, predict_step, simulate_program
from simplan.program.lowering import lower as lower_module
from simplan.program.lowering.lower import Lowering, _RankLowering, lower
from simplan.program.lowering.walk import RankRow, row_of_actions
from simplan.program.program import Program
from tests.jobs import job_of
from tests.laws import (
    check_bytes,
    check_engines,
    check_memory,
    check_prediction,
    check_reductions,
    check_same,
    check_times,
    meetings,
)
from tests.support.slow import examples, slow_except

SIZES: dict[str, Any] = {
    "family": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 96,
    "vocab_size": 128,
    "seq_len": 32,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "one device": {"microbatch_size": 2},
    "ddp": {"dp_replicate": 4},
    "ddp every microbatch": {"dp_replicate": 4, "grad_sync": "microbatch"},
    "zero 1": {"dp_shard": 4, "zero_stage": 1},
    "zero 1 replicated": {"dp_shard": 2, "dp_replicate": 2, "zero_stage": 1},
    "zero 2": {"dp_shard": 4, "zero_stage": 2},
    "fsdp": {"dp_shard": 4},
    "fsdp once a step": {"dp_shard": 4, "grad_sync": "step"},
    "fsdp without reshard": {"dp_shard": 4, "reshard_after_forward": False},
    "hsdp": {"dp_shard": 2, "dp_replicate": 2},
    "hsdp with groups within a node and across nodes": {"dp_replicate": 2, "dp_shard": 3, "tp": 2},
    "naive": {"pp": 4, "schedule": "naive"},
    "gpipe": {"pp": 4, "schedule": "gpipe"},
    "1f1b": {"pp": 4},
    "interleaved": {"pp": 2, "virtual_stages": 2},
    "1f1b x ddp": {"pp": 2, "dp_replicate": 2},
    "1f1b x zero 1": {"pp": 2, "dp_shard": 2, "zero_stage": 1},
    "interleaved x fsdp": {"pp": 2, "virtual_stages": 2, "dp_shard": 2},
    "interleaved x hsdp": {"pp": 2, "virtual_stages": 2, "dp_shard": 2, "dp_replicate": 2, "zero_stage": 2},
    "tp": {"tp": 4},
    "tp without sequence parallelism": {"tp": 4, "sequence_parallel": False},
    "tp x fsdp": {"tp": 2, "dp_shard": 2},
    "tp x 1f1b": {"tp": 2, "pp": 2},
    "ring": {"cp": 4},
    "ring x fsdp": {"cp": 2, "dp_shard": 2, "zero_stage": 3},
    "gathered keys": {"cp": 2, "cp_comm": "all_gather", "zero_stage": 3},
    "ulysses": {"cp": 2, "cp_comm": "a2a", "tp": 2},
    "selective": {"dp_shard": 2, "recompute": "selective"},
    "full": {"dp_shard": 2, "recompute": "full"},
    "zb-h1": {"pp": 3, "schedule": "zb-h1"},
    "zb-h2 x fsdp": {"pp": 2, "schedule": "zb-h2", "dp_shard": 2, "zero_stage": 2, "recompute": "selective"},
    "zb-1p": {"pp": 3, "schedule": "zb-1p"},
    "zb-2p x tp": {"pp": 2, "schedule": "zb-2p", "tp": 2},
    "zb-v x hsdp": {"pp": 2, "schedule": "zb-v", "dp_replicate": 2, "dp_shard": 2, "reshard_after_forward": False},
    "dualpipe-v x ulysses": {"pp": 2, "schedule": "dualpipe-v", "cp": 2, "cp_comm": "a2a", "zero_stage": 2},
    "all at once": {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 2, "pp": 2, "virtual_stages": 2, "recompute":
     "full"},
}  # fmt: skip
QUICK = (
    "ddp every microbatch",
    "zero 1 replicated",
    "zero 2",
    "fsdp once a step",
    "hsdp with groups within a node and across nodes",
    "gpipe",
    "1f1b x zero 1",
    "tp x 1f1b",
    "tp without sequence parallelism",
    "ring x fsdp",
    "gathered keys",
    "ulysses",
    "selective",
    "zb-1p",
    "zb-v x hsdp",
    "dualpipe-v x ulysses",
    "all at once",
)
"""Every axis, schedule family and kind of sharding; all others are slow."""


def _check_stamped(stamped: Program, lowered: Callable[[], Program]) -> None:
    """Actions that are lowered once and stamped, for ranks that are alike, too, are the actions lowered one by one."""
    number = count()

    def every_one_alone(*args: Any, **options: Any) -> RankRow:
        row = row_of_actions(*args, **options)
        numbered = zip(row.actions, row.variant.tolist(), strict=True)
        variants = [row.variants[number]._replace(action=action) for action, number in numbered]
        return row._replace(variant=np.arange(len(variants)), variants=variants)

    with (
        mock.patch.object(lower_module, "row_of_actions", every_one_alone),
        mock.patch.object(lower_module, "_rank_key", lambda _, rank, **__: rank),
        mock.patch.object(_RankLowering, "_template_key", side_effect=number),
    ):
        one_by_one = lowered()
    assert len(one_by_one) == len(stamped)
    for ours, theirs in zip(stamped.ops, one_by_one.ops, strict=True):
        assert replace(ours, meeting=None) == replace(theirs, meeting=None)
    assert list(meetings(stamped).values()) == list(meetings(one_by_one).values())


SPLIT = tuple(name for name, facts in SCHEDULE_FACTS.items() if facts.splits_backward)


def keeps_the_laws(job: Job) -> None:
    plan, software = job.plan, job.software
    prediction, step = predict_step(job, name="random")
    check_prediction(prediction)
    assert step.times.step_time_s == prediction.step_time_s
    cost = cost_model(job, None)

    def lowered(how: Lowering, *, stamped: bool = True) -> Simulated:
        made = lower(job, prediction.assignment, prediction.table, how)
        simulated = simulate_program(made, cost, StepContext.of(job))
        check_memory(made)
        if stamped:
            _check_stamped(made, lambda: lower(job, prediction.assignment, prediction.table, how))
        check_times(simulated)
        check_engines(made, simulated.program_costs.durations_s)
        return simulated

    folding = folding_of(job)
    for level, host_waits in product((1, 2), (False, True)):
        stamped = host_waits == (level == 2)  # each level once, the finer one with all that it can have
        unfolded = lowered(Lowering(level, host_waits=host_waits), stamped=stamped)
        check_bytes(unfolded.program)
        folded = lowered(Lowering(level, folding, host_waits=host_waits), stamped=False)  # as the unfolded one is
        check_same(folded, unfolded)
        if level == 2:
            evenly = software.optimizer_shards == "elements"
            state = software.state(job.training, plan)
            held = state.gradient + state.unaccumulated
            check_reductions(
                unfolded.program,
                plan,
                job.num_microbatches,
                held=held,
                reduced=state.reduced,
                evenly=evenly,
            )
            merged = lowered(Lowering(level, folding, expand_all=False, host_waits=host_waits))
            assert merged.times.step_time_s == pytest.approx(folded.times.step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "tied"),
    slow_except([(name, bool(place % 2)) for place, name in enumerate(QUICK)], product(STRATEGIES, (False, True))),
)
def test_every_strategy_keeps_the_laws(name: str, tied: bool) -> None:
    model = ModelSpec.model_validate({**SIZES, "tied_embeddings": tied})
    job = job_of(model, STRATEGIES[name], num_microbatches=3)
    if tied and job.plan.pp > 1 and job.plan.shards_parameters:
        with pytest.raises(NotModelledError, match=r"model\.tied_embeddings = true"):
            keeps_the_laws(job)
    else:
        keeps_the_laws(job)


MEGATRON: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("gpt", {"dp_replicate": 4}),
    "zero 1": ("gpt", {"dp_shard": 4, "zero_stage": 1}),
    "zero 1 replicated": ("gpt", {"dp_shard": 2, "dp_replicate": 2, "zero_stage": 1, "grad_dtype": "fp32"}),
    "interleaved x zero 1": ("gpt", {"pp": 2, "virtual_stages": 2, "dp_shard": 2, "zero_stage": 1, "recompute":
     "full"}),
    "zb-h1 x zero 1": ("gpt", {"pp": 2, "schedule": "zb-h1", "dp_shard": 2, "zero_stage": 1, "recompute": "selective"}),
    "tp x 1f1b x ddp": ("gpt", {"tp": 2, "pp": 2, "dp_replicate": 2, "recompute": "selective"}),
    "fsdp, reduced every microbatch": ("llama", {"dp_shard": 4, "zero_stage": 3}),
    # what runs beside a product also waits for what that product waits for
    "a2a x overlapped tp x 1f1b": ("llama", {"dp_shard": 2, "zero_stage": 1, "tp": 2, "cp": 2, "cp_comm": "a2a", "pp":
     2}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("software", "name"),
    slow_except(
        [("megatron-lm-2022", "zero 1 replicated"), ("megatron-lm-2022", "interleaved x zero 1")]
        + [("megatron-bridge", name) for name in MEGATRON if name not in ("ddp", "zero 1", "zero 1 replicated")],
        [
            *(("megatron-lm-2022", name) for name, (family, _) in MEGATRON.items() if family == "gpt"),
            *(("megatron-bridge", name) for name in MEGATRON),
        ],
    ),
)
def test_strategies_of_megatron_keep_the_laws(software: str, name: str) -> None:
    family, plan = MEGATRON[name]
    model = ModelSpec.model_validate({**SIZES, "family": family})
    keeps_the_laws(job_of(model, plan, software=software, num_microbatches=3))


def rarely(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """Most often the usual value, so that not every plan has something wrong."""
    return st.sampled_from([usual] * 5 * len(others) + list(others))


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    family = draw(st.sampled_from(["gpt", "llama", "moe"]))
    heads = draw(rarely(8, 3, 4, 12))
    return ModelSpec(
        family=family,
        num_hidden_layers=draw(rarely(6, 1, 5, 8)),
        hidden_size=heads * draw(rarely(8, 4, 5, 16)),
        num_attention_heads=heads,
        num_key_value_heads=draw(rarely(heads, heads // 2, 3)) if family == "llama" else heads,
        intermediate_size=draw(rarely(96, 10, 64)),
        vocab_size=draw(rarely(128, 97, 120)),
        seq_len=draw(rarely(32, 7, 48, 64)),
        max_position_embeddings=64,
        tied_embeddings=draw(rarely(False, True)),
        **({"num_experts": 8, "top_k": 2, "moe_intermediate_size": 32} if family == "moe" else {}),
        mtp_num_layers=0 if family == "gpt" else draw(rarely(0, 1, 2)),
    )


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    """Most keys go together in most plans, and any key may have any value in some."""
    pp = draw(st.sampled_from([1, 1, 2, 2, 3, 4]))
    dp_shard = draw(st.sampled_from([1, 1, 2, 2, 3, 4]))
    schedule = draw(rarely("1f1b", "gpipe", *SPLIT)) if pp > 1 else "none"
    virtual_stages = draw(rarely(1, 2, 3)) if schedule == "1f1b" else 1
    if schedule == "1f1b" and virtual_stages > 1:
        schedule = "interleaved_1f1b"
    if schedule in SPLIT:
        virtual_stages = SCHEDULE_FACTS[schedule].virtual_stages or 2
    zero_stages = [2, 3] if dp_shard > 1 and virtual_stages > 1 else [1, 2, 3] if dp_shard > 1 else [0, 2, 3]
    keys: dict[str, Any] = {
        "dp_replicate": draw(st.sampled_from([1, 1, 2, 3])),
        "dp_shard": dp_shard,
        "zero_stage": draw(st.sampled_from(zero_stages)),
        "tp": draw(rarely(1, 2, 2, 4)),
        "cp": draw(rarely(1, 2, 2, 4)),
        "pp": pp,
        "virtual_stages": virtual_stages,
        "schedule": schedule,
        "reshard_after_forward": schedule not in SPLIT or dp_shard == 1,
        "microbatch_size": draw(st.integers(1, 3)),
        "recompute": draw(rarely("none", "selective", "full", "selective_op", "selective_layer")),
    }
    anything: dict[str, st.SearchStrategy[Any]] = {
        "zero_stage": st.integers(0, 3),
        "reshard_after_forward": st.booleans(),
        "tp": st.integers(1, 5),
        "sequence_parallel": st.booleans(),
        "cp": st.integers(1, 5),
        "cp_comm": st.sampled_from(["ring", "all_gather", "a2a"]),
        "schedule": st.sampled_from(["none", "zb-2p-optsync", *SCHEDULE_FACTS]),
        "virtual_stages": st.integers(1, 4),
        "recompute": st.sampled_from(["minimal", "qkv_proj_offloaded"]),
        "grad_sync": st.sampled_from(["step", "microbatch"]),
        "bucket_bytes": st.sampled_from([1, 1000, 40_000]),
        "stage_layers": st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple),
        "ep": st.sampled_from([1, 2, 4]),
        "grad_dtype": st.just("bf16"),
    }
    odd = draw(st.lists(st.sampled_from(list(anything)), unique=True, max_size=2))
    return ParallelPlan.model_validate(keys | {key: draw(anything[key]) for key in odd})


@given(st.data())
@settings(max_examples=examples(5, 15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_plan_is_refused_with_a_sentence_or_keeps_the_laws(data: st.DataObject) -> None:
    plan, model = data.draw(plans(), "plan"), data.draw(models(), "model")
    training: dict[str, Any] = {
        "global_batch_size": data.draw(rarely(plan.dp * plan.microbatch_size * 3, 1, 8, 12), "batch"),
        "precision": data.draw(rarely("bf16", "fp32", "tf32", "fp16", "fp8"), "precision"),
        "optimizer": data.draw(st.sampled_from(["adam", "adamw", "sgd"]), "optimizer"),
    }
    cluster = data.draw(rarely("dgx-h100", "dgx-v100", "dgx-a100-80gb", "gb200-nvl72", "this-machine"), "cluster")
    devices = data.draw(rarely(plan.num_devices, 1, 4, 16), "devices")
    software = data.draw(rarely("torch", *catalog.names("software")), "software")
    try:
        where = catalog.cluster(cluster, num_devices=devices)
        keeps_the_laws(job_of(model, plan, cluster=where, software=software, **training))
    except SpecError as error:
        refused = error.problems
    else:
        refused = ()
    assert all(problem.field and problem.rule for problem in refused)
    event("refused" if refused else "predicted")


USES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "adapters": ({"lora_rank": 4, "lora_targets": ("q", "v", "down")}, {"task": "lora"}, {}),
    "documents": ({"document_lengths": (20, 5, 4)}, {}, {}),
    "fp8": ({}, {"precision": "fp8", "fp8_recipe": "rowwise"}, {}),
    "mxfp8": ({}, {"precision": "mxfp8"}, {}),
    "pure bf16": ({}, {"pure_bf16": True}, {}),
    "optimizer on the host": ({}, {}, {"offload_optimizer": True}),
    "activations on the host": ({}, {}, {"offload_activations": True}),
}
"""What each way of using a model adds to model, training and plan."""


@given(st.data())
@settings(max_examples=examples(5, 15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_use_of_a_model_is_refused_with_a_sentence_or_keeps_the_laws(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(STRATEGIES)), "strategy")
    plan = ParallelPlan.model_validate(STRATEGIES[name])
    names = data.draw(st.lists(st.sampled_from(list(USES)), min_size=1, max_size=2, unique=True), "uses")
    of_model, of_training, of_plan = ({k: v for name in names for k, v in USES[name][i].items()} for i in range(3))
    recompute = data.draw(st.sampled_from(["none", "selective", "full"]), "recompute")
    try:
        model = ModelSpec.model_validate({**SIZES, "num_hidden_layers": 6, **of_model})
        used = plan.model_copy(update={"recompute": recompute, **of_plan})
        cluster = "dgx-b200" if "mxfp8" in names else "dgx-h100"
        keeps_the_laws(job_of(model, used, cluster=cluster, num_microbatches=3, **of_training))
    except SpecError as error:
        refused = error.problems
    else:
        refused = ()
    assert all(problem.field and problem.rule for problem in refused)
    what = ", ".join(sorted({problem.field for problem in refused}) or names)
    event(f"refused: {what}" if refused else f"predicted: {what}")
