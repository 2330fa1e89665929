"""Few microbatches written out, the rest added: the numbers of ``predict``, which writes all of them out."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from simplan import catalog
from simplan.model.layer import CollectiveKind
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.predict.step_summary import OverlapSlowdown, step_terms, summarize_step
from simplan.program.program import Communication
from tests.jobs import job_of, tiny_model

SIZES: dict[str, Any] = {"num_hidden_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 2048}
MODEL = tiny_model(**SIZES, seq_len=128)
UNTIED = MODEL.model_copy(update={"tied_embeddings": False})
TORCH = catalog.software("torch")
BLOCKING = TORCH.model_copy(update={"runtime": "megatron", "prefetch_receive_schedules": ("interleaved_1f1b",)})


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
    model = UNTIED if asked.shards_parameters and asked.pp > 1 else MODEL
    job = job_of(model, asked, cluster="dgx-a100-80gb", software=software, num_microbatches=14 // asked.microbatch_size)
    brief, full = summarize_step(job), predict(job)
    assert brief.step_time_s == pytest.approx(full.step_time_s, rel=1e-9)
    # merged operations share the uncertainty of the host
    assert brief.step_time_interval_s == pytest.approx(full.step_time_interval_s, rel=1e-3)
    worst = full.worst_memory
    assert brief.peak_bytes["allocated"] == max(memory.allocated_bytes for memory in full.memory)
    assert brief.peak_bytes["device"] == worst.device_bytes
    assert brief.peak_interval_bytes["device"] == worst.device_interval_bytes
    assert brief.fits == full.fits


@pytest.mark.parametrize(("pp", "virtual_stages"), [(4, 2), (2, 4), (1, 1)])
def test_exchanges_for_experts_beside_another_microbatch_are_there_from_the_second_round_on(
    pp: int, virtual_stages: int
) -> None:
    """Forwards of the first microbatches have no backward beside them, of none of the stages."""
    model = tiny_model("moe", **SIZES, seq_len=512, num_experts=16, top_k=4, moe_intermediate_size=512)
    software = catalog.software("megatron-bridge").model_copy(update={"expert_overlap": True})
    plan = {"dp_replicate": 8, "ep": 8, "pp": pp, "virtual_stages": virtual_stages}
    job = job_of(model, plan, software=software, num_microbatches=24, clip_grad_norm=None)
    assert summarize_step(job).step_time_s == pytest.approx(predict(job).step_time_s, rel=1e-3)


@pytest.mark.parametrize("pp", [1, 2])
def test_costs_of_one_microbatch_are_spread_over_all(pp: int) -> None:
    """Weights in 8 bits, which are quantized once a step."""
    plan = {"pp": pp, "tp": 2}
    job = job_of(MODEL, plan, software="megatron-core", precision="fp8", fp8_recipe="delayed")
    assert summarize_step(job).step_time_s == pytest.approx(predict(job).step_time_s)


def test_steps_that_overlap_last_as_long_as_the_busiest_rank_is_at_them() -> None:
    plan = {"pp": 4, "schedule": "zb-h2", "stage_layers": (2, 2, 2, 2)}
    # untied: nothing waits for both ends of the pipeline
    job = job_of(UNTIED, plan, cluster="dgx-a100-80gb", software=BLOCKING, global_batch_size=12)
    whole, overlapping = (summarize_step(job, steps_overlap=overlap) for overlap in (False, True))
    full = predict(job)
    assert whole.step_time_s == pytest.approx(full.step_time_s, rel=1e-9)
    ranks = [[s for s in full.timeline.spans if s.rank == rank and s.stream == "compute"] for rank in range(4)]
    busiest_s = max(max(span.end_s for span in rank) - min(span.start_s for span in rank) for rank in ranks)
    assert overlapping.step_time_s == pytest.approx(busiest_s, rel=1e-9)
    assert overlapping.step_time_s < whole.step_time_s


@pytest.mark.parametrize(("waits", "reductions"), [("step", 1), ("backward", 4)])
def test_stages_reduce_their_gradients_beside_each_other_where_nobody_waits_in_backward(
    waits: str, reductions: int
) -> None:
    """Where a rank waits for them before it sends the last gradient on, four stages reduce one after the other."""
    software = catalog.software("megatron-lm-2022").model_copy(update={"waits_for_gradients": waits})
    plan = {"pp": 4, "dp_replicate": 2}
    terms = step_terms(
        job_of(UNTIED, plan, cluster="dgx-a100-80gb", software=software, global_batch_size=16, precision="fp16")
    )
    occurrences = [
        t.times for t in terms if isinstance(t.work, Communication) and t.work.kind is CollectiveKind.ALL_REDUCE
    ]
    assert sum(occurrences) == pytest.approx(reductions, abs=1e-3)


def test_terms_add_up_to_the_step_where_less_than_a_millisecond_is_computed_beside_communications() -> None:
    small = MODEL.model_copy(update={"num_hidden_layers": 2})
    job = job_of(small, {"dp_shard": 2}, cluster="dgx-a100-80gb", global_batch_size=4)
    terms = step_terms(job)
    [overlap] = [term for term in terms if isinstance(term.work, OverlapSlowdown)]
    assert 0 < overlap.times < 1e-3
    found_s = sum(term.seconds * term.times for term in terms)
    assert found_s == pytest.approx(summarize_step(job).step_time_s, rel=1e-4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_equal_tensors_are_sent_in_parts_and_gathered(sequence_parallel: bool) -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473), section 4.1; with sequence parallelism they are halves."""
    plan = {"pp": 2, "tp": 2, "sequence_parallel": sequence_parallel}
    terms = step_terms(job_of(MODEL, plan, cluster="dgx-a100-80gb", software="megatron-lm-2022", precision="fp16"))
    sizes: dict[CollectiveKind, set[int]] = defaultdict(set)
    for communication in (term.work for term in terms if isinstance(term.work, Communication)):
        sizes[communication.kind].add(communication.num_bytes)
    whole = 2 * MODEL.seq_len * MODEL.hidden_size
    assert (sizes[CollectiveKind.SEND], sizes[CollectiveKind.ALL_GATHER]) == ({whole // 2}, {whole})
