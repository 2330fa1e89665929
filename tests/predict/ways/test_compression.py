"""Predictions with gradient compression: bytes, steps before it starts, and what more ranks change."""

from __future__ import annotations

import math
from typing import Any

import pytest

from simplan.predict import predict
from simplan.prediction import CompressionStep, Prediction
from simplan.training import TrainingBudget
from tests.jobs import job_of, tiny_model


def with_compression(model: Any, num_ranks: int, compression: Any) -> tuple[Prediction, CompressionStep]:
    plan = {"dp_replicate": num_ranks, "compression": compression}
    prediction = predict(job_of(model, plan, num_microbatches=1, precision="fp32"))
    assert prediction.compression is not None
    return prediction, prediction.compression


@pytest.mark.parametrize("kind", ["one_bit", "one_bit_adam"])
def test_signs_have_the_volume_of_one_bit_adam(kind: str) -> None:
    """5 times less than FP16 on BERT-large with 15 % warm-up (DeepSpeed, 2020-09-09)."""
    (_, half), (_, signs) = (with_compression("bert-large", 8, compression) for compression in ("fp16", kind))
    assert half.whole_bytes == 2 * half.sent_bytes
    assert signs.warmup_share == 0.15
    volume = signs.warmup_share + (1 - signs.warmup_share) * signs.sent_bytes / half.sent_bytes
    assert 1 / volume == pytest.approx(5, rel=0.05)


def test_all_gather_of_top_k_grows_with_the_ranks() -> None:
    model = tiny_model(hidden_size=128, vocab_size=4096)
    gathered = [with_compression(model, n, {"kind": "top_k", "ratio": 0.1})[1].sent_bytes for n in (2, 4, 8)]
    reduced = [with_compression(model, n, {"kind": "random_k", "ratio": 0.1})[1].sent_bytes for n in (2, 4, 8)]
    assert [sent / gathered[0] for sent in gathered] == pytest.approx([1, 3, 7])
    assert [sent / reduced[0] for sent in reduced] == pytest.approx([1, 1.5, 1.75])


@pytest.mark.parametrize(
    ("compression", "num_whole"),
    [
        ({"kind": "powersgd", "start_step": 40}, 40),
        ({"kind": "powersgd", "start_step": 1000}, 100),
        ({"kind": "one_bit", "warmup_share": 0.3}, 30),
        ({"kind": "one_bit_adam", "warmup_share": 0.3}, 30),
        ({"kind": "int8"}, 0),
    ],
)
def test_training_counts_steps_with_whole_gradients(compression: dict[str, Any], num_whole: int) -> None:
    prediction, step = with_compression(tiny_model(hidden_size=128, vocab_size=4096), 8, compression)
    whole = predict(prediction.job.with_plan(prediction.job.plan.with_changes(compression=None)))
    assert step.whole_s == whole.step_time_s
    tokens = prediction.job.sequences_per_step * prediction.job.model.seq_len
    run = prediction.with_budget(TrainingBudget(num_tokens=100.0 * tokens)).training_run
    assert run is not None
    seconds = num_whole * step.whole_s + (100 - num_whole) * prediction.step_time_s
    assert run.days * 86400 == pytest.approx(seconds)


MODEL = tiny_model(hidden_size=128, vocab_size=4096)


def test_one_bit_adam_communicates_once_after_backward() -> None:
    """A bit per value and a scale per 1,024, of tensors in whole blocks; every rank has an equal part of the blocks."""
    prediction, step = with_compression(MODEL, 4, "one_bit_adam")
    sizes = [p.num_elements for layer in MODEL.layers for p in layer.parameters if p.name not in layer.tied]
    assert sum(sizes) == MODEL.num_parameters
    num_blocks = 4 * -(-sum(-(-size // 1024) for size in sizes) // 4)
    assert step.sent_bytes == 2 * 3 / 4 * num_blocks * (1024 / 8 + 4)
    spans = [span for span in prediction.timeline.spans if span.rank == 0]
    backward_s = max(span.end_s for span in spans if "B" in span.action)
    parts, averages = [span for span in spans if span.stream != "compute"]
    assert backward_s < parts.start_s < parts.end_s < averages.start_s


def test_batched_powersgd_sends_factors_of_a_square() -> None:
    compression = {"kind": "powersgd", "batched": True, "rank": 3}
    plan = {"dp_replicate": 4, "bucket_bytes": 2**30, "compression": compression}
    step = predict(job_of(MODEL, plan, num_microbatches=1, precision="fp32")).compression
    assert step is not None
    assert step.sent_bytes == 2 * 3 / 4 * 2 * 4 * 3 * math.ceil(math.sqrt(MODEL.num_parameters))
