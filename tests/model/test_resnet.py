"""ResNet's layers: published work and sizes of images, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.errors import SpecError
from simplan.model.families.resnet import block_forms
from simplan.model.model import ModelSpec
from simplan.predict import predict
from simplan.problems import parse_model
from simplan.program.program import Communication
from tests.jobs import job_of, lowered, problems
from tests.support.problems import says

GFLOPS = {"resnet-18": 1.814, "resnet-34": 3.664, "resnet-50": 4.089, "resnet-101": 7.801, "resnet-152": 11.514}
"""Multiply-adds of an image, in 10^9, as torchvision documents its weights (``_ops``)."""


@pytest.mark.parametrize("name", GFLOPS)
def test_flops_are_those_of_torchvision(name: str) -> None:
    flops = sum(layer.flops() for layer in catalog.model(name).layers)
    assert flops / 2e9 == pytest.approx(GFLOPS[name], abs=5e-4)


def test_sizes_of_images_are_those_of_the_paper() -> None:
    """He et al. 2016, table 1: 56, 28, 14 and 7 pixels; 256 to 2048 channels."""
    forms = block_forms(catalog.model("resnet-50"))
    ends = [forms[last] for last in (2, 6, 12, 15)]
    assert [(form.output_size, form.outputs) for form in ends] == [(56, 256), (28, 512), (14, 1024), (7, 2048)]
    odd = block_forms(ModelSpec(family="resnet", depths=(1, 1), image_size=33))
    assert [(form.size, form.output_size) for form in odd] == [(9, 9), (9, 5)]


def test_boundaries_carry_what_the_block_before_them_gives() -> None:
    """After stages of 56, 28 and 14 pixels, 16 bits each under autocast: half as much from boundary to boundary."""
    job = job_of("resnet-50", {"pp": 4, "microbatch_size": 2}, num_microbatches=4)
    program = lowered(job, stage_layers=(3, 4, 6, 3))
    for stage, (pixels, channels) in enumerate([(56, 256), (28, 512), (14, 1024)]):
        work = [item for op in program.ops if str(op.action) == f"{stage}SEND_F0" for item in op.work]
        assert [item.num_bytes for item in work if isinstance(item, Communication)] == [2 * 2 * channels * pixels**2]


def test_throughput_is_in_images() -> None:
    prediction = predict(job_of("resnet-50", {"dp_replicate": 2, "microbatch_size": 32}, global_batch_size=64))
    assert prediction.samples_per_s_per_device == pytest.approx(32 / prediction.step_time_s)
    assert prediction.tokens_per_s_per_device == 0


@pytest.mark.parametrize(
    ("plan", "training", "sentence"),
    [
        ({"tp": 2, "sequence_parallel": False}, {}, "plan.tp = 2: ... not modeled"),
        ({"cp": 2}, {}, "plan.cp = 2: ... not modeled"),
        ({"recompute": "selective"}, {}, "plan.recompute = selective: recomputation of batch norms"),
        ({"recompute": "full"}, {}, "plan.recompute = full: recomputation of batch norms"),
        ({"dp_shard": 2}, {"precision": "bf16"}, "training.precision = bf16: ... weights FSDP"),
        ({"pp": 2, "schedule": "zb-h1"}, {}, "plan.schedule = zb-h1: ... convolutions ... backward"),
    ],
)
def test_plans_that_are_not_modelled(plan: dict[str, Any], training: dict[str, Any], sentence: str) -> None:
    refusals = problems("resnet-50", plan, **{"precision": "fp32", **training})
    assert any(says(problem, sentence) for problem in refusals)


def test_plans_that_are() -> None:
    assert problems("resnet-50", {"dp_shard": 2}, precision="fp32") == []
    assert problems("resnet-50", {"dp_shard": 2, "zero_stage": 1}) == []
    interleaved = {"pp": 8, "schedule": "interleaved_1f1b"}
    assert problems("resnet-50", {**interleaved, "virtual_stages": 2}, precision="fp32") == []
    assert problems("resnet-50", {"pp": 2, "stage_layers": (9, 7)}) == []
    [refusal] = problems("resnet-50", {**interleaved, "virtual_stages": 3}, precision="fp32")
    assert "24 stages must be at most the 16 blocks" in refusal


def test_blocks_must_be_said() -> None:
    with pytest.raises(SpecError, match=r"model\.depths: is missing"):
        parse_model(ModelSpec, {"family": "resnet"}, prefix=("model",))
    empty = ModelSpec(family="resnet", depths=())
    assert any("must name the blocks of one stage or more" in refusal for refusal in problems(empty))
