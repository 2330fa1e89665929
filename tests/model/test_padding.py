"""Vocabularies that software pads: how far, what ranks then hold, compute and send, and what stays as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simplan import catalog
from simplan.job import Job
from simplan.model.layer import Gemm
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.prediction import Prediction
from simplan.program.program import MemoryCategory
from simplan.scenario import parse_scenario
from tests.jobs import job_of, problems, tiny_model
from tests.support.problems import refuses, says

GPT3 = catalog.model("gpt3-175b")
PADDING = {
    "deepspeed-2021",
    "megatron-core",
    "megatron-deepspeed",
    "megatron-deepspeed-2023",
    "megatron-lm-2021",
    "megatron-lm-2022",
    "megatron-lm-2023",
    "nemo",
    "nemo-2022",
}


def job(vocab_size: int, plan: dict[str, Any]) -> Job:
    return job_of(model(vocab_size), plan, software="megatron-core", global_batch_size=8)


def model(vocab_size: int) -> ModelSpec:
    return tiny_model(num_hidden_layers=4, hidden_size=192, num_attention_heads=12, vocab_size=vocab_size, seq_len=64)


def said(prediction: Prediction) -> list[str]:
    return [sentence for sentence in prediction.assumptions if "padded" in sentence]


@pytest.mark.parametrize(
    ("vocab_size", "tp", "padded"),
    [
        (50257, 8, 51200),  # Narayanan et al. 2021, section 5: a vocabulary of 51,200, a multiple of 1024
        (50257, 1, 50304),
        (51200, 8, 51200),
        (32000, 4, 32256),
        (32000, 2, 32000),
        (250680, 4, 250880),  # BLOOM: 250,680 entries of its tokenizer, 250,880 rows of its embedding
        (1, 1, 128),
    ],
)
def test_vocabularies_are_padded_to_multiples_of_128_for_every_rank(vocab_size: int, tp: int, padded: int) -> None:
    model = GPT3.model_copy(update={"vocab_size": vocab_size})
    for name in PADDING:
        software, plan = catalog.software(name), ParallelPlan(tp=tp)
        padded_model = software.padded(model, plan)
        assert padded_model == model.model_copy(update={"vocab_size": padded}), name
        assert software.padded(padded_model, plan) is padded_model


def test_only_megatron_and_its_relatives_pad() -> None:
    """The executor's layers have the vocabulary of the model, so what it runs must not pad."""
    profiles = [catalog.software(name) for name in catalog.names("software")]
    assert {software.id for software in profiles if software.vocab_multiple > 1} == PADDING
    assert not any(software.executable for software in profiles if software.vocab_multiple > 1)


def test_images_have_no_vocabulary_to_pad() -> None:
    assert catalog.software("megatron-core").padded(vit := catalog.model("vit-b16"), ParallelPlan()) is vit


def test_a_rank_holds_and_computes_its_part_of_the_padded_vocabulary() -> None:
    """GPT-3 on 8 ranks: 51,200 / 8 rows of 12,288 at both ends, and a product of as many columns for each token."""
    model = GPT3.model_copy(update={"tied_embeddings": False})
    layers = catalog.software("megatron-lm-2021").layers_of(model, ParallelPlan(tp=8))
    rows, hidden = 6400, 12288
    assert [p.shape for p in layers[0].parameters if p.name == "wte.weight"] == [(rows, hidden)]
    assert [p.shape for p in layers[-1].parameters if len(p.shape) == 2] == [(rows, hidden)]
    (matmul,) = (kernel for kernel in layers[-1].kernels if isinstance(kernel, Gemm))
    assert matmul.flops == 2 * 2048 * hidden * rows


def test_states_grow_by_the_padded_rows() -> None:
    """18 bytes a parameter in bf16 (Megatron Core's dist_optimizer.md), of 24 more rows on each of two ranks.

    At the peak there is also Transformer Engine's placeholder for the gradient of the head, 2 bytes a parameter.
    """
    asked = job(208, {"tp": 2})
    plain = replace(asked, software=asked.software.model_copy(update={"vocab_multiple": 1}))
    states = (MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER)
    padded, less = (predict(asked_job).memory[0].by_category for asked_job in (asked, plain))
    assert [padded[state] - less[state] for state in states] == [24 * 192 * width for width in (2, 4 + 2, 12)]


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 4, "pp": 2},
        {"tp": 4, "sequence_parallel": True, "dp_shard": 2, "zero_stage": 1},
        {"tp": 2, "dp_replicate": 2, "recompute": "full", "microbatch_size": 2},
    ],
)
def test_padding_is_as_if_the_vocabulary_were_as_large(plan: dict[str, Any]) -> None:
    """The same time and memory as of a model that was written with the padded vocabulary, but not the same MFU."""
    padded, written = predict(job(1000, plan)), predict(job(1024, plan))
    assert padded.step_time_s == written.step_time_s
    assert padded.memory == written.memory
    assert padded.mfu is not None
    assert written.mfu is not None
    ratio = padded.job.model.flops_per_sequence() / written.job.model.flops_per_sequence()
    assert ratio < 1
    assert padded.mfu / written.mfu == pytest.approx(ratio)
    multiple = 128 * plan["tp"]
    (note,) = said(padded)
    assert says(note, "model.vocab_size = 1000: ", "1024", f"128 x tp = {multiple}", "megatron-core", "without padding")
    assert said(written) == []


def test_tp_need_not_divide_a_vocabulary_that_is_padded() -> None:
    plan = {"tp": 12, "sequence_parallel": False}
    assert problems(model(601), plan, software="megatron-core") == []
    for name in ("torch", "megatron-bridge"):
        (sentence,) = problems(model(601), plan, software=name)
        assert says(sentence, "plan.tp = 12: ", "divide model.vocab_size = 601", "1 or 601", "612")


def test_a_vocabulary_that_cannot_grow_is_not_padded() -> None:
    refusals = problems(model(10**8), {"tp": 3}, software="megatron-core")
    assert any("must divide model.vocab_size = 100000000" in sentence for sentence in refusals)


_SCENARIO = """
model: {{family: gpt, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 1000, seq_len: 32}}
cluster: {{preset: dgx-h100, num_devices: 2}}
training: {{global_batch_size: 4, precision: bf16}}
software: {{preset: {preset}, vocab_multiple: {multiple}}}
plan: {{tp: 2}}
"""


@pytest.mark.parametrize(("preset", "multiple", "padded"), [("megatron-bridge", 128, 1024), ("megatron-core", 1, 1000)])
def test_the_multiple_is_an_option(preset: str, multiple: int, padded: int) -> None:
    """Megatron's --make-vocab-size-divisible-by; of Megatron Bridge where the tokenizer states the vocabulary."""
    scenario = parse_scenario(_SCENARIO.format(preset=preset, multiple=multiple))
    assert scenario.job.padded_model.vocab_size == padded


def test_torch_has_no_such_option() -> None:
    with refuses("software.vocab_multiple", "128", rule="is no option of torch"):
        parse_scenario(_SCENARIO.format(preset="torch", multiple=128))
