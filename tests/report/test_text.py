"""The reports in words, against figures worked out from the same data by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.predict import predict
from simplan.prediction import MemoryKind, Prediction
from simplan.program.program import MemoryCategory
from simplan.report.comparison import comparison_text
from simplan.report.text import prediction_text, verdict
from simplan.training import TrainingSpec
from simplan.units import GIB
from simplan.validate.compare import Comparison
from simplan.validate.rows import ComparisonRow
from tests.jobs import Plan, job_of
from tests.support.problems import says


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    plan = {"pp": 2, "dp_replicate": 4, "microbatch_size": 2}
    return predict(job_of("gpt2-124m", plan, global_batch_size=64), name="small")


def assumptions(model: ModelSpec | str = "gpt2-124m", plan: Plan | None = None, **parts: Any) -> tuple[str, ...]:
    return predict(job_of(model, plan, **parts)).assumptions


def with_need(prediction: Prediction, device_bytes: int) -> Prediction:
    interval: dict[MemoryKind, tuple[int, int]] = {"device": (int(0.9 * device_bytes), int(1.1 * device_bytes))}
    fields: dict[str, Any] = {"allocated_bytes": 0, "reserved_bytes": 0, "interval_bytes": interval}
    memory = tuple(replace(m, device_bytes=device_bytes - m.rank, **fields) for m in prediction.memory)
    capacity = 80 * GIB
    return replace(prediction, memory=memory, capacity_bytes=capacity, fits=device_bytes <= capacity)


@pytest.mark.parametrize(
    ("need_gib", "words"),
    [
        (60, "fits: rank 0 needs 60.00 GiB of 80.00 GiB, 20.00 GiB (25.0 %) headroom"),
        (
            76,
            "may not fit: rank 0 needs 76.00 GiB of 80.00 GiB, 4.00 GiB (5.0 %) headroom; the 90 % interval ends at "
            "83.60 GiB",
        ),
        (
            79,
            "likely does not fit: rank 0 needs 79.00 GiB of 80.00 GiB, 1.00 GiB (1.2 %) headroom; the 90 % interval "
            "ends at 86.90 GiB",
        ),
        (
            84,
            "likely does not fit: rank 0 needs 84.00 GiB of 80.00 GiB, 4.00 GiB (5.0 %) over; the 90 % interval "
            "starts at 75.60 GiB",
        ),
        (100, "does not fit: rank 0 needs 100.00 GiB of 80.00 GiB, 20.00 GiB (25.0 %) over"),
    ],
)
def test_the_verdict_tells_the_headroom(prediction: Prediction, need_gib: int, words: str) -> None:
    assert verdict(with_need(prediction, need_gib * GIB)) == words


def test_an_unknown_capacity_is_no_verdict(prediction: Prediction) -> None:
    text = verdict(replace(prediction, capacity_bytes=None, fits=None))
    assert "fit" not in text
    assert "does not know the memory of h100-sxm-80gb" in text


def test_mfu_shows_a_numerator_and_a_denominator_that_give_it(prediction: Prediction) -> None:
    line = next(line for line in prediction_text(prediction).splitlines() if "MFU" in line)
    percent, tflop, time, unit, devices, peak = re.search(  # type: ignore[union-attr]
        r"MFU +([\d.]+) % = ([\d.,]+) TFLOP .* / \(([\d.]+) (m?s) x (\d+) devices x ([\d.]+) TFLOP/s", line
    ).groups()
    seconds = float(time) / (1000 if unit == "ms" else 1)
    utilization = float(tflop.replace(",", "")) / (seconds * int(devices) * float(peak))
    assert utilization == pytest.approx(float(percent) / 100, rel=0.01)
    # 6 FLOPs a parameter and token, plus attention: between the two for a model of this size
    assert float(tflop.replace(",", "")) * 1e12 == pytest.approx(6 * 124.4e6 * 1024 * 64, rel=0.1)


def test_a_large_numerator_is_no_power_of_ten(prediction: Prediction) -> None:
    larger = TrainingSpec(global_batch_size=64 * 1024)  # 1024 times 55.2 TFLOP
    line = next(
        line
        for line in prediction_text(replace(prediction, job=replace(prediction.job, training=larger))).splitlines()
        if "MFU" in line
    )
    assert re.search(r" = \d\d,\d{3} TFLOP ", line)


def test_a_zero_stage_with_one_shard_says_that_it_shards_nothing() -> None:
    sentences = assumptions(plan={"pp": 8, "zero_stage": 3})
    assert sentences[0] == "zero_stage = 3 shards nothing, as dp_shard = 1"
    assert "shards nothing" not in " ".join(assumptions(plan={"dp_shard": 8}))


def test_sequences_longer_than_the_model_takes_are_noted() -> None:
    model = catalog.model("llama3-8b").model_copy(update={"num_hidden_layers": 2, "max_position_embeddings": 4096})
    said = []
    for update in ({"seq_len": 4096}, {"seq_len": 8192}, {"seq_len": 8192, "document_lengths": (4096, 4096)}):
        sentences = assumptions(model.model_copy(update=update), {"dp_replicate": 8})
        said.append(any("a sequence of 8,192 tokens is longer than the model takes" in text for text in sentences))
    assert said == [False, True, False]


def test_options_without_effect_are_noted() -> None:
    bridge = catalog.software("megatron-bridge").model_copy(update={"expert_dispatch": "deepep"})
    small = catalog.model("mixtral-8x7b").model_copy(update={"num_hidden_layers": 2})
    plan = {"dp_shard": 8, "zero_stage": 1}
    sentences = [assumptions(small, {**plan, "ep": ep}, software=bridge) for ep in (1, 8)]
    note = "every rank has all experts, as ep = 1: no effect of software.expert_dispatch"
    assert note in sentences[0]
    assert note not in sentences[1]


def test_warnings_of_sources_on_a_device_are_noted() -> None:
    cluster = catalog.cluster("dgx-h100").model_copy(update={"device": catalog.device("h20-sxm-96gb")})
    sentences = assumptions(plan={"dp_replicate": 8}, cluster=cluster)
    assert any(text.startswith("h20-sxm-96gb: rates of kernels are those fitted on H100") for text in sentences)


def test_whole_gradients_under_fsdp_are_noted() -> None:
    """A rank of 8 holds 4 bytes for each of 124 M parameters where the other plan holds an eighth."""
    held, said = [], []
    for grad_sync in ("step", "microbatch"):
        prediction = predict(job_of("gpt2-124m", {"dp_shard": 8, "grad_sync": grad_sync}, num_microbatches=4))
        held.append(prediction.memory[0].by_category[MemoryCategory.GRADIENTS])
        said.append(
            [
                text
                for text in prediction.assumptions
                if text.startswith("unsharded gradients of 4 microbatches accumulate")
            ]
        )
    assert held[0] - held[1] > 0.8 * 4 * 124.4e6
    assert [len(texts) for texts in said] == [1, 0]
    assert not any(
        "accumulate before reduction" in text for text in assumptions(plan={"dp_shard": 8}, num_microbatches=1)
    )
    for software in ("torch", "torchtitan"):
        default = predict(job_of("gpt2-124m", {"dp_shard": 8}, software=software, num_microbatches=4))
        assert default.memory[0].by_category[MemoryCategory.GRADIENTS] <= held[1]
        assert any(says(text, "gradients", "4 microbatches", f"{software} does") for text in default.assumptions)


def test_large_communication_buffers_are_explained() -> None:
    """The last rank peaks in its last backward: 64 receive buffers and 63 sent gradients, 4 bytes an element."""
    plan, start = {"pp": 4, "recompute": "full"}, "communication buffers take "
    many = predict(job_of("gpt2-124m", plan, num_microbatches=64))
    [text] = [text for text in many.assumptions if text.startswith(start)]
    assert text.startswith(f"{start}381.0 MiB of rank 3: ")
    assert "for each of 64 microbatches from each neighboring stage" in text
    assert many.worst_memory.by_category[MemoryCategory.BUFFERS] == (64 + 63) * 1024 * 768 * 4
    assert not any(text.startswith(start) for text in assumptions(plan=plan, num_microbatches=4))
    megatron = assumptions(plan=plan, num_microbatches=64, software="megatron-core")
    assert not any(text.startswith(start) for text in megatron)


@pytest.mark.parametrize("software", ["torch", "megatron-core"])
def test_fp16_says_what_of_the_loss_scaler_is_missing(software: str) -> None:
    for precision in ("fp16", "bf16"):
        sentences = assumptions(plan={"dp_replicate": 8}, software=software, precision=precision)
        assert any("of the loss scaler" in text for text in sentences) == (precision == "fp16")


def test_ranks_that_read_the_same_share_a_line(prediction: Prediction) -> None:
    text = prediction_text(prediction)
    assert len(re.findall(r"^  0-3 ", text, re.MULTILINE)) == 2  # where the step goes, and memory
    assert len(re.findall(r"^  4-7 ", text, re.MULTILINE)) == 2


def test_columns_that_are_zero_everywhere_are_left_out(prediction: Prediction) -> None:
    text = prediction_text(prediction)
    assert "recompute " not in text.split("Step breakdown")[1].splitlines()[1]
    assert "wait" in text.split("Step breakdown")[1].splitlines()[1]


def test_assumptions_and_next_steps_are_listed(prediction: Prediction) -> None:
    text = prediction_text(replace(prediction, assumptions=("the moon is full",)), ["do this"])
    assert "Assumptions\n  - the moon is full" in text
    assert text.endswith("Next\n  do this")


def test_a_comparison_shows_sign_spread_and_reading() -> None:
    rows = (
        ComparisonRow("step time", 0.9, 1.0, "s", -0.1, 0.2, True),
        ComparisonRow("peak memory", 3.0, 2.0, "GiB", 0.5, None, None),
    )
    text = comparison_text(Comparison(rows, False, True, 0.001, ("a note",)))
    assert re.search(r"step time +900 ms +1\.000 s +-10\.0 % +\+/- 20\.0 % +within", text)
    assert re.search(r"peak memory +3\.00 GiB +2\.00 GiB +\+50\.0 %$", text, re.MULTILINE)
    assert "their order, are NOT those predicted" in text
    assert "lies in the predicted interval" in text
    assert text.endswith("- a note")
