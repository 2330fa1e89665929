"""Predictions as a whole: against closed forms, published counts and each other."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplan import catalog
from simplan.api import predict as predict_from
from simplan.model.layer import CollectiveKind
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict import build, build_program, cost_model, predict
from simplan.predict.simulated import StepContext, simulate_program
from simplan.prediction import Prediction
from simplan.program.program import Communication, MemoryCategory, Stream
from simplan.units import GIB
from tests.jobs import Plan, job_of, tiny_model
from tests.support.slow import slow_except

GPT2 = catalog.model("gpt2-124m")


def ask(plan: Plan, *, batch: int = 32, model: ModelSpec = GPT2, cluster: str = "dgx-h100") -> Prediction:
    return predict(job_of(model, plan, cluster=cluster, global_batch_size=batch), name="test")


def test_a_single_device_has_no_bubble_and_no_communication() -> None:
    prediction = ask(ParallelPlan(microbatch_size=4))
    assert prediction.bubble_fraction == pytest.approx(0.0, abs=1e-12)
    (split,) = prediction.splits
    assert split.exposed_communication_s == 0.0
    assert split.compute_s + split.optimizer_s == pytest.approx(prediction.step_time_s)


def test_mfu_is_model_flops_over_peak() -> None:
    """6 N per token and 12 L h s per token of full attention (PaLM, appendix B), by hand; causal counts half."""
    prediction = ask(ParallelPlan(dp_replicate=8, microbatch_size=2), batch=64)
    matrices = 12 * 12 * 768**2 + 50257 * 768
    tokens = 64 * 1024
    full = tokens * (6 * matrices + 12 * 12 * 768 * 1024)
    causal = tokens * (6 * matrices + 6 * 12 * 768 * 1024)
    peak = 8 * 989e12 * prediction.step_time_s
    assert prediction.mfu_full_attention == pytest.approx(full / peak, rel=1e-9)
    assert prediction.mfu == prediction.hfu == pytest.approx(causal / peak, rel=1e-9)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 8)])
def test_bubble_is_near_the_closed_form_of_equal_stages(schedule: str, p: int, m: int) -> None:
    """Stages are equal up to embedding and head, whose share is small here; communication is nearly free."""
    model = GPT2.model_copy(update={"num_hidden_layers": 48 * p, "vocab_size": 64, "max_position_embeddings": 1024})
    prediction = ask(ParallelPlan(pp=p, schedule=schedule), batch=m, model=model)
    closed = (p - 1) / p if schedule == "naive" else (p - 1) / (m + p - 1)
    assert prediction.bubble_fraction == pytest.approx(closed, abs=0.02)


def test_a_pipeline_spreads_the_states() -> None:
    """The tied embedding is held twice, once at each end."""
    prediction = ask(ParallelPlan(pp=4), batch=8)
    held = sum(rank.by_category[MemoryCategory.PARAMETERS] for rank in prediction.memory)
    assert held == 4 * (GPT2.num_parameters + 50257 * 768)


def test_tied_embeddings_cost_an_all_reduce_between_the_ends() -> None:
    tied = ask(ParallelPlan(pp=2), batch=8)
    untied = ask(ParallelPlan(pp=2), batch=8, model=GPT2.model_copy(update={"tied_embeddings": False}))

    def all_reduces(prediction: Prediction) -> list[Communication]:
        ops = build_program(prediction, folded=False).ops
        return [m for op in ops if (m := op.communication) and m.kind is CollectiveKind.ALL_REDUCE]

    assert all_reduces(untied) == []
    assert all_reduces(tied) == [Communication(CollectiveKind.ALL_REDUCE, 4 * 50257 * 768, (0, 1))] * 2
    assert tied.step_time_s > untied.step_time_s


@settings(max_examples=25)
@given(
    st.sampled_from(["gpipe", "1f1b", "naive"]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 5]),
)
def test_bytes_are_conserved_and_replicas_fold(schedule: str, p: int, dp: int, b: int, m: int) -> None:
    """What is sent is received; every gradient is reduced once; folding a replica changes nothing."""
    model = tiny_model(num_hidden_layers=4, hidden_size=96, vocab_size=500, seq_len=32)
    plan = {"pp": p, "dp_replicate": dp, "microbatch_size": b, "schedule": schedule if p > 1 else "none"}
    prediction = ask(plan, batch=b * m * dp, model=model)
    program = build_program(prediction, folded=False)
    sent = [op.communication for op in program.ops if op.action.kind.value.startswith("SEND")]
    received = [op.communication for op in program.ops if op.action.kind.value.startswith("RECV")]
    assert sorted(map(str, sent)) == sorted(map(str, received))
    assert len(sent) == 2 * m * (p - 1) * dp
    assert all(
        w is not None and w.num_bytes == b * 32 * 96 * prediction.job.software.state_bytes["bf16"].boundary
        for w in sent
    )
    reduced = sum(op.communication.num_bytes for op in program.ops if op.communication and op.stream is Stream.DATA)
    held = sum(program.persistent_bytes[rank][MemoryCategory.PARAMETERS] for rank in program.ranks)  # FP32 as well
    assert reduced == (held if dp > 1 else 0)
    folded = build_program(prediction)
    assert len(folded.ops) * dp == len(program.ops)
    assert [split.total_s for split in prediction.splits] == pytest.approx(
        [prediction.step_time_s] * (p * dp), rel=1e-9
    )


def test_json_has_what_others_rely_on() -> None:
    prediction = ask(ParallelPlan(pp=2, dp_replicate=2), batch=8)
    document = json.loads(json.dumps(prediction.to_json()))
    assert document["step_time_s"] == prediction.step_time_s
    low, high = document["step_time_interval_s"]
    assert low < prediction.step_time_s < high
    assert document["fits"] is True
    assert set(document["peak_memory_gib"]) == {"allocated", "reserved", "device"}
    worst = document["ranks"][document["worst_rank"]]
    assert sum(worst["memory_gib"].values()) * GIB == pytest.approx(
        prediction.worst_memory.allocated_bytes + worst["memory_gib"]["context"] * GIB
    )
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1, 2, 3]
    assert sum(worst["split"].values()) == pytest.approx(prediction.step_time_s)


def test_a_plan_that_does_not_fit_still_has_a_time() -> None:
    prediction = ask(ParallelPlan(dp_replicate=8), batch=8, model=catalog.model("llama3-8b"))
    assert prediction.fits is False
    assert prediction.worst_memory.by_category[MemoryCategory.PARAMETERS] == 4 * 8_030_261_248
    assert prediction.step_time_s > 0


def test_collectives_of_two_axes_are_terms_of_their_own() -> None:
    """Both axes have two ranks."""
    names = {term.name for term in ask(ParallelPlan(tp=2, dp_shard=2), batch=8, model=catalog.model("llama3-8b")).terms}
    assert {"all_gather over 2 ranks (shard)", "all_gather over 2 ranks (tensor_parallel)"} <= names


def test_terms_add_up_to_what_ranks_spend() -> None:
    """Seconds times occurrences a rank, over everything that computes, is the mean of the ranks' compute shares."""
    prediction = ask(ParallelPlan(pp=2), batch=8)
    computing = [t for t in prediction.terms if not t.name.startswith(("send", "all_reduce"))]
    spent_s = sum(t.seconds * t.count for t in computing)
    shares_s = [split.compute_s + split.optimizer_s for split in prediction.splits]
    assert spent_s == pytest.approx(sum(shares_s) / len(shares_s), rel=1e-9)


@pytest.mark.parametrize(("num_devices", "written_out"), [(8, 1), (12, 2), (16, 1)])
def test_one_replica_stands_for_those_that_use_the_same_links(num_devices: int, written_out: int) -> None:
    """Twelve devices in nodes of eight, two stages: only some of the six pipelines cross nodes."""
    plan = ParallelPlan(pp=2, dp_replicate=num_devices // 2)
    prediction = ask(plan, batch=2 * num_devices, cluster="dgx-a100-80gb")
    whole = build_program(prediction, folded=False)
    cost = cost_model(prediction.job, None)
    step_time_s = simulate_program(whole, cost, StepContext.of(prediction.job)).times.step_time_s
    assert prediction.step_time_s == pytest.approx(step_time_s, rel=1e-9)
    assert len(build_program(prediction).ranks) == 2 * written_out


def test_interval_of_a_single_device_by_hand() -> None:
    """Nothing overlaps, so the step is a sum; all of it is computation, whose prices err together."""
    prediction = ask(ParallelPlan(microbatch_size=16))
    longer = 1 + sum(t.seconds * t.count * t.relative_std for t in prediction.terms) / prediction.step_time_s
    low_s, high_s = prediction.step_time_interval_s
    assert math.log(high_s / prediction.step_time_s) == pytest.approx(1.645 * math.log(longer))
    assert math.log(prediction.step_time_s / low_s) == pytest.approx(1.645 * math.log(longer))


def test_interval_ends_where_the_network_does() -> None:
    """FSDP over slow Ethernet: weights are gathered twice in BF16, and gradients reduced in FP32, over every node."""
    cluster = catalog.cluster("dgx-h100", num_devices=16)
    slow = cluster.model_copy(update={"inter_link": catalog.network_link(3.125)})
    prediction = predict(job_of("llama3-8b", {"dp_shard": 16}, cluster=slow, global_batch_size=16))
    node_bytes_per_s = 8 * 3.125e9 / 8
    wire_s = (2 + 2 + 4) * prediction.job.model.num_parameters * 15 / 16 / node_bytes_per_s
    low_s, _ = prediction.step_time_interval_s
    assert 0.9 * wire_s <= low_s <= prediction.step_time_s


def test_the_host_errs_apart_from_the_device() -> None:
    """As of one device, whose step is a sum, but of software that waits for the batch before every forward."""
    prediction = predict(job_of(GPT2, cluster="dgx-a100-80gb", software="megatron-lm-2023", global_batch_size=32))
    deviations_s = {"host": 0.0, "device": 0.0}
    for term in prediction.terms:
        deviations_s["host" if "host" in term.name else "device"] += term.seconds * term.count * term.relative_std
    assert all(deviations_s.values())
    longer = [math.log1p(deviation_s / prediction.step_time_s) for deviation_s in deviations_s.values()]
    _, high_s = prediction.step_time_interval_s
    assert math.log(high_s / prediction.step_time_s) == pytest.approx(1.645 * math.hypot(*longer))


def test_scores_of_gemma_2_are_said_to_be_tensors() -> None:
    """Of 8,192 tokens they are most of what a block keeps; Llama's blocks, under the same plan, have none."""
    sentences = (predict(job_of(name, {"dp_shard": 8})).assumptions for name in ("gemma2-2b", "llama3-8b"))
    said = [any("flex_attention" in line for line in assumptions) for assumptions in sentences]
    assert said == [True, False]


def test_communicators_that_device_memory_leaves_out_are_counted() -> None:
    """Of the framework and of its runs, some profiles have a context that was fitted on many communicators."""
    counted = []
    for software, plan in (
        ("torch", {"dp_shard": 4}),
        ("torch", {"tp": 2, "dp_shard": 2, "pp": 4}),
        ("megatron-core", {"tp": 2, "pp": 2}),
        ("megatron-deepspeed", {"dp_replicate": 2, "pp": 2}),
        ("maxtext", {"tp": 2, "dp_shard": 2}),
    ):
        prediction = predict(job_of("llama3-8b", plan, software=software, global_batch_size=8))
        counted += [re.findall(r"NCCL's buffers.* of this plan has (\d)", " ".join(prediction.assumptions))]
    assert counted == [[], ["4"], ["2"], [], []]


def test_the_residual_stream_under_autocast_is_said_to_be_fp32() -> None:
    """It is why DDP and ZeRO-1 save more for backward than FSDP does."""
    start = "under autocast the residual stream is saved in FP32"
    said = []
    for software, precision, plan in (
        ("torch", "bf16", {"dp_replicate": 8}),
        ("torch", "bf16", {"dp_shard": 8, "zero_stage": 1}),
        ("torch", "bf16", {"dp_shard": 8}),
        ("torch", "fp32", {"dp_replicate": 8}),
        ("megatron-core", "bf16", {"dp_replicate": 8}),
    ):
        prediction = predict(job_of(GPT2, plan, software=software, global_batch_size=8, precision=precision))
        activations = prediction.worst_memory.by_category[MemoryCategory.ACTIVATIONS]
        said.append((any(sentence.startswith(start) for sentence in prediction.assumptions), activations))
    assert [is_said for is_said, _ in said] == [True, True, False, False, False]
    assert said[0][1] > 1.1 * said[2][1]


def test_unmodelled_parts_of_deepseek_are_named() -> None:
    prediction = predict(job_of("deepseek-v2-lite", {"dp_shard": 8, "ep": 8}))
    assert any("no layer predicts a second token" in sentence for sentence in prediction.assumptions)


def test_stages_have_as_many_blocks_under_megatron_and_nemo() -> None:
    """As these build a stage (get_num_layers_to_build); the head makes the last stage slowest, unlike balanced ones."""
    model = GPT2.model_copy(update={"num_hidden_layers": 6})
    boundaries = {
        name: predict(job_of(model, {"pp": 2}, software=name)).assignment.boundaries
        for name in ("torch", "megatron-lm-2022", "megatron-core", "megatron-bridge", "nemo")
    }
    assert boundaries.pop("torch") == (0, 6, 8), "the head counts for blocks: its 50,257 tokens are odd"
    assert {*boundaries.values()} == {(0, 4, 8)}


def test_torch_and_torchtitan_differ_by_the_trainer() -> None:
    """FSDP2 is the same code under both: same memory, and the same time except what torchtitan does between steps."""
    plan = ParallelPlan(dp_shard=16, zero_stage=2)
    mine, theirs = (
        predict(job_of("llama3-8b", plan, cluster="dgx-a100-80gb", software=name, num_microbatches=4, precision="bf16"))
        for name in ("torch", "torchtitan")
    )
    between_s = catalog.kernel_rates("ampere").host_step_overhead_s
    assert theirs.step_time_s - mine.step_time_s == pytest.approx(between_s, rel=1e-6)
    assert mine.memory[0].by_category == theirs.memory[0].by_category
    assert (mine.fits, mine.memory[0].short_bytes) == (theirs.fits, theirs.memory[0].short_bytes)


@pytest.mark.parametrize("compiled", slow_except([True], [False, True]))
@pytest.mark.parametrize("cluster", slow_except(["dgx-h100"], ["dgx-h100", "dgx-b200"]))
@pytest.mark.parametrize(
    ("model", "seq_len", "plan"),
    [
        ("llama3-8b", 8192, {"dp_shard": 16}),
        ("llama3-8b", 8192, {"tp": 8, "dp_shard": 8}),
        ("llama3-8b", 32768, {"dp_shard": 16, "recompute": "full"}),
        ("llama3-8b", 2**20, {"dp_shard": 1, "cp": 16, "cp_comm": "all_gather", "recompute": "full"}),
        ("llama3-70b", 8192, {"dp_shard": 64, "recompute": "full"}),
        ("qwen3-14b", 4096, {"dp_shard": 8, "recompute": "selective_op"}),
    ],
)
def test_one_fsdp2_plan_takes_as_long_under_torch_and_torchtitan(
    model: str, seq_len: int, plan: dict[str, Any], cluster: str, *, compiled: bool
) -> None:
    ranks = plan["dp_shard"] * plan.get("tp", 1) * plan.get("cp", 1)
    keys = {"cluster.preset": cluster, "cluster.num_devices": ranks, "model.seq_len": seq_len}
    keys |= {"global_batch_size": 4 * plan["dp_shard"]} | {f"plan.{key}": value for key, value in plan.items()}
    mine, theirs = (
        predict_from(model, keys | {"software": {"preset": name, "compiled": compiled}})
        for name in ("torch", "torchtitan")
    )
    assert theirs.step_time_s == pytest.approx(mine.step_time_s, rel=0.03)


def test_many_ranks_of_zero1_are_as_slow_as_the_one_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 64 ranks, one stands for all to which whole parameters are assigned; one by one, the answer is the same."""
    job = job_of("gpt2-124m", ParallelPlan(dp_shard=72, zero_stage=1), global_batch_size=72)
    folded = predict(job)
    assert any(sentence.startswith("ZeroRedundancyOptimizer assigns") for sentence in folded.assumptions)
    monkeypatch.setattr(build, "MAX_DEALT_RANKS", 72)
    single = predict(job)
    assert folded.step_time_s == single.step_time_s
    assert folded.worst_memory.device_bytes == single.worst_memory.device_bytes
    assert len({rank.device_bytes for rank in single.memory}) > len({rank.device_bytes for rank in folded.memory})
