"""Few microbatches written out, the rest added: the numbers of ``predict``, which writes all of them out."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.job import Job
from simplan.model.layer import CollectiveKind
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.predict.step_summary import OverlapSlowdown, step_terms, summarize_step
from simplan.program.program import Communication
from simplan.training.training import TrainingSpec

MODEL = ModelSpec(
    family="gpt", num_hidden_layers=8, hidden_size=256, num_attention_heads=8, vocab_size=2048, seq_len=128
)
TORCH = catalog.software("torch")
BLOCKING = TORCH.model_copy(
    update={
        "runtime": "megatron",
        "prefetch_receive_schedules": ("interleaved_1f1b",),
    }
)


@pytest.mark.parametrize("software", [TORCH, BLOCKING], ids=["torch", "blocking"])
@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"dp_replicate": 2, "recompute": "full"},
        {"dp_shard": 4},
        {"dp_shard": 4, "zero_stage": 2},
        {"tp": 2},
        {"cp": 2, "pp": 2},
        {"pp": 4},
        {"pp": 4, "schedule": "gpipe", "dp_replicate": 2},
        {"pp": 4, "stage_layers": (1, 4, 3, 0), "recompute": "selective"},
        {"pp": 2, "virtual_stages": 4, "tp": 2},
        {"pp": 2, "virtual_stages": 3, "stage_layers": (0, 2, 2, 2, 2, 0)},
        {"pp": 2, "dp_shard": 2},
        {"pp": 2, "schedule": "zb-h1"},
    ],
    ids=str,
)
def test_it_is_the_prediction(plan: dict[str, Any], software: Any) -> None:
    asked = ParallelPlan.model_validate(plan)
    untied = MODEL.model_copy(update={"tied_embeddings": not asked.shards_parameters or asked.pp == 1})
    cluster = catalog.cluster("dgx-a100-80gb", asked.num_devices)
    training = TrainingSpec(global_batch_size=14 * asked.dp, precision="bf16")
    brief = summarize_step(Job(untied, cluster, training, asked, software))
    full = predict(Job(untied, cluster, training, asked, software), name="all")
    assert brief.step_time_s == pytest.approx(full.step_time_s, rel=1e-9)
    assert brief.step_time_interval_s == pytest.approx(full.step_time_interval_s, rel=1e-9)
    assert brief.allocated_bytes == max(memory.allocated_bytes for memory in full.memory)
    assert brief.device_bytes == max(memory.device_bytes for memory in full.memory)
    assert brief.fits == full.fits


@pytest.mark.parametrize(("pp", "virtual_stages"), [(4, 2), (2, 4), (1, 1)])
def test_exchanges_for_experts_beside_another_microbatch_are_there_from_the_second_round_on(
    pp: int, virtual_stages: int
) -> None:
    """Forwards of the first microbatches have no backward beside them, of none of the stages."""
    model = ModelSpec(
        family="moe", num_hidden_layers=8, hidden_size=256, num_attention_heads=8, vocab_size=2048, seq_len=512,
        num_experts=16, top_k=4, moe_intermediate_size=512,
    )  # fmt: skip
    software = catalog.software("megatron-bridge").model_copy(update={"expert_overlap": True})
    plan = ParallelPlan(dp_replicate=8, ep=8, pp=pp, virtual_stages=virtual_stages)
    cluster = catalog.cluster("dgx-h100", plan.num_devices)
    training = TrainingSpec(global_batch_size=24 * plan.dp, precision="bf16", clip_grad_norm=None)
    brief = summarize_step(Job(model, cluster, training, plan, software))
    assert brief.step_time_s == pytest.approx(
        predict(Job(model, cluster, training, plan, software), name="all").step_time_s, rel=1e-3
    )


@pytest.mark.parametrize("pp", [1, 2])
def test_what_is_done_in_one_microbatch_is_spread_over_all_of_them(pp: int) -> None:
    """Weights in 8 bits, which are quantized once a step."""
    plan, software = ParallelPlan(pp=pp, tp=2), catalog.software("megatron-core")
    training = TrainingSpec(global_batch_size=24, precision="fp8", fp8_recipe="delayed")
    cluster = catalog.cluster("dgx-h100", 2 * pp)
    brief = summarize_step(Job(MODEL, cluster, training, plan, software))
    assert brief.step_time_s == pytest.approx(
        predict(Job(MODEL, cluster, training, plan, software), name="all").step_time_s
    )


def test_steps_that_overlap_last_as_long_as_the_busiest_rank_is_at_them() -> None:
    plan = ParallelPlan(pp=4, schedule="zb-h2", stage_layers=(2, 2, 2, 2))
    cluster, training = catalog.cluster("dgx-a100-80gb", 4), TrainingSpec(global_batch_size=12)
    untied = MODEL.model_copy(update={"tied_embeddings": False})  # nothing waits for both ends of the pipeline
    whole, overlapping = (
        summarize_step(Job(untied, cluster, training, plan, BLOCKING), steps_overlap=overlap)
        for overlap in (False, True)
    )
    full = predict(Job(untied, cluster, training, plan, BLOCKING), name="all")
    assert whole.step_time_s == pytest.approx(full.step_time_s, rel=1e-9)
    spans = [
        (min(span.start_s for span in rank), max(span.end_s for span in rank))
        for rank in (
            [span for span in full.timeline.spans if span.rank == number and span.stream == "compute"]
            for number in range(4)
        )
    ]
    assert overlapping.step_time_s == pytest.approx(max(end_s - start_s for start_s, end_s in spans), rel=1e-9)
    assert overlapping.step_time_s < whole.step_time_s


@pytest.mark.parametrize(("waits", "reductions"), [("step", 1), ("backward", 4)])
def test_stages_reduce_their_gradients_beside_each_other_where_nobody_waits_in_backward(
    waits: str, reductions: int
) -> None:
    """Where a rank waits for them before it sends the last gradient on, four stages reduce one after the other."""
    plan = ParallelPlan(pp=4, dp_replicate=2)
    untied = MODEL.model_copy(update={"tied_embeddings": False})
    software = catalog.software("megatron-lm-2022").model_copy(update={"waits_for_gradients": waits})
    training = TrainingSpec(global_batch_size=16, precision="fp16")
    terms = step_terms(Job(untied, catalog.cluster("dgx-a100-80gb", 8), training, plan, software))
    found = [t.times for t in terms if isinstance(t.work, Communication) and t.work.kind is CollectiveKind.ALL_REDUCE]
    assert sum(found) == pytest.approx(reductions, abs=1e-3)


def test_terms_add_up_to_the_step_where_less_than_a_millisecond_is_computed_beside_communications() -> None:
    plan, training, software = ParallelPlan(dp_shard=2), TrainingSpec(global_batch_size=4), catalog.software("torch")
    small = MODEL.model_copy(update={"num_hidden_layers": 2})
    asked = Job(small, catalog.cluster("dgx-a100-80gb", 2), training, plan, software)
    terms = step_terms(asked)
    [beside] = [term for term in terms if isinstance(term.work, OverlapSlowdown)]
    assert 0 < beside.times < 1e-3
    found_s = sum(term.seconds * term.times for term in terms)
    assert found_s == pytest.approx(summarize_step(asked).step_time_s, rel=1e-4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_equal_tensors_are_sent_in_parts_and_gathered(sequence_parallel: bool) -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473), section 4.1; with sequence parallelism they are halves."""
    plan = ParallelPlan(pp=2, tp=2, sequence_parallel=sequence_parallel)
    software, training = catalog.software("megatron-lm-2022"), TrainingSpec(global_batch_size=8, precision="fp16")
    terms = step_terms(Job(MODEL, catalog.cluster("dgx-a100-80gb", 4), training, plan, software))
    sent = {t.work.num_bytes for t in terms if isinstance(t.work, Communication) and t.work.kind is CollectiveKind.SEND}
    whole = 2 * MODEL.seq_len * MODEL.hidden_size
    assert sent == {whole // 2}
    gathered = {
        t.work.num_bytes
        for t in terms
        if isinstance(t.work, Communication) and t.work.kind is CollectiveKind.ALL_GATHER
    }
    assert gathered == {whole}
