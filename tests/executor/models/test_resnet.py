"""ResNet's layers against torchvision's formulas and torch's own accounts; real ranks against one process."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from executor.models.model import build_stage
from executor.train.data import model_batch
from executor.train.loss import cross_entropy
from simplan import catalog
from simplan.model.families.resnet import block_forms
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.training import Precision
from simplan.validate.compare import issued_as_predicted
from tests.executor.conftest import make_job
from tests.executor.distributed.test_level2 import check_run, run_predicted
from tests.executor.dry_run.accounting import peaks
from tests.executor.dry_run.test_memory_accounting import TOTAL
from tests.executor.models.layer_runs import LayerRun, assert_parameters_and_order_of_gradients, counted_flops
from tests.support.slow import slow_except

CPU = torch.device("cpu")
TYPES = ["basic", "bottleneck"]
assert_close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def model(layer_type: str = "bottleneck", **fields: Any) -> ModelSpec:
    sizes = {"depths": (1, 2), "embedding_size": 16, "image_size": 32, "num_classes": 10}
    return ModelSpec(**{"family": "resnet", "layer_type": layer_type, **sizes, **fields})


def normed(x: Tensor, norm: Any) -> Tensor:
    """By the definition of batch norms: mean and variance over all images and pixels."""
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, correction=0)
    by_channel = (1, -1, 1, 1)
    output: Tensor = (x - mean) / (variance + 1e-5).sqrt() * norm.weight.view(by_channel) + norm.bias.view(by_channel)
    return output


@pytest.mark.parametrize("layer_type", TYPES)
@pytest.mark.parametrize("index", [1, 2, 3])
def test_blocks_are_those_of_the_paper(layer_type: str, index: int) -> None:
    """He et al. 2016, figure 5, with the stride in the 3 x 3 convolution; values and the gradient of the input."""
    spec = model(layer_type)
    form = block_forms(spec)[index - 1]
    block: Any = build_stage(spec, [index], torch.float64, CPU, seed=0).layers[str(index)]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.rand_like(parameter))
    x = torch.randn(3, form.channels, form.size, form.size, dtype=torch.float64).requires_grad_()
    y, number = x, 0
    for name, convolution in block.named_children():
        if name.startswith("conv"):
            number += 1
            wide = convolution.weight.shape[-1] == 3
            stride = form.stride if wide and convolution.weight.shape[0] == form.width and number < 3 else 1
            stride = stride if layer_type == "bottleneck" or number == 1 else 1
            y = functional.conv2d(y, convolution.weight, stride=stride, padding=int(wide))
            y = normed(y, getattr(block, f"bn{number}"))
            y = y if number == (2 if layer_type == "basic" else 3) else y.clamp(min=0)
    shortcut = x
    if form.has_shortcut:
        shortcut = normed(functional.conv2d(x, block.shortcut.weight, stride=form.stride), block.shortcut_norm)
    wanted = (y + shortcut).clamp(min=0)
    output = block(x)
    assert_close(output, wanted)
    assert output.shape[1:] == spec.layers[index].output_shapes[0]
    weight = torch.randn_like(output)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), x)[0] for out in (output, wanted))
    assert_close(ours, theirs)


def test_first_blocks_of_stages_have_shortcuts() -> None:
    """torchvision: of basic blocks those of the later stages only, since the first does not change the image."""
    shortcuts = {name: [form.has_shortcut for form in block_forms(model(name, depths=(2, 2, 1)))] for name in TYPES}
    assert shortcuts["basic"] == [False, False, True, False, True]
    assert shortcuts["bottleneck"] == [True, False, True, False, True]


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
@pytest.mark.parametrize("layer_type", TYPES)
@pytest.mark.parametrize("index", range(5))
def test_kept_bytes_are_those_of_the_layer(layer_type: str, index: int, precision: str) -> None:
    """To the byte, by torch's trace of allocations; images themselves are the batch's."""
    LayerRun(model(layer_type), index, "none", precision).assert_kept(onednn=True)


@pytest.mark.parametrize(("layer_type", "index"), [("basic", 0), ("bottleneck", 0), ("bottleneck", 1)])
def test_peaks_are_those_of_the_layer(layer_type: str, index: int) -> None:
    """By the same trace, where the CPU's convolutions need no copies in another order of channels."""
    LayerRun(model(layer_type, embedding_size=32, image_size=64), index, "none", "fp32").assert_peak(onednn=True)


@pytest.mark.parametrize("layer_type", TYPES)
def test_parameters_and_order_of_gradients_are_those_of_the_layers(layer_type: str) -> None:
    spec = model(layer_type)
    assert_parameters_and_order_of_gradients(spec)
    stage = build_stage(spec, range(len(spec.layers)), torch.float32, CPU, seed=0)
    for index, layer in enumerate(spec.layers):
        buffers = sum(buffer.nbytes for buffer in stage.layers[str(index)].buffers())
        assert buffers == sum(table.num_bytes(4, 4) for table in layer.buffers)


@pytest.mark.parametrize("name", slow_except(["resnet-18", "resnet-50"], ["resnet-18", "resnet-50", "resnet-101"]))
def test_flops_are_those_that_torch_counts(name: str) -> None:
    """Of images of 224 x 224 pixels, which have no gradient."""
    spec = catalog.model(name)
    assert counted_flops(spec) == pytest.approx(2 * sum(layer.flops() for layer in spec.layers), rel=0.005)
    wanted = 2 * sum(layer.backward_flops() for layer in spec.layers)
    assert counted_flops(spec, backward=True) == pytest.approx(wanted, rel=0.005)


STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("none", {"dp_replicate": 2, "bucket_bytes": 40_000}),
    "fsdp": ("none", {"dp_shard": 2}),
    "gpipe": ("gpipe", {"pp": 2}),
    "1f1b": ("1f1b", {"pp": 2}),
    "1f1b of three": ("1f1b", {"pp": 3}),
    "1f1b of fsdp": ("1f1b", {"pp": 2, "dp_shard": 2}),
}


@pytest.mark.parametrize(
    ("name", "layer_type"),
    slow_except([("1f1b", "bottleneck")], product(STRATEGIES, TYPES)),
)
def test_ranks_equal_one_process(name: str, layer_type: str, tmp_path: Path) -> None:
    """One process that runs the same microbatches: batch norms take the statistics of each, on its rank.

    Running statistics are buffers, which no training step reads; DDP broadcasts those of the first rank.
    """
    schedule, plan = STRATEGIES[name]
    job = make_job(schedule, model=model(layer_type), plan=plan, dtype="fp64", num_steps=1)
    check_run(job, tmp_path)


def test_other_microbatches_are_another_computation() -> None:
    """Why the same microbatches have to be compared."""
    spec = model()
    stage = build_stage(spec, range(len(spec.layers)), torch.float64, CPU, seed=0)
    images, classes = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=4)
    whole = cross_entropy(stage(images.double()), classes)
    parts = [cross_entropy(stage(x), y) for x, y in zip(images.double().chunk(2), classes.chunk(2), strict=True)]
    assert (whole - torch.stack(parts).mean()).abs().item() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"pp": 2}, {"dp_replicate": 2}], ids=str)
def test_ranks_in_bf16_issue_what_is_predicted(plan: dict[str, Any], tmp_path: Path) -> None:
    """Under autocast stages hand on 16 bits; their sizes differ from boundary to boundary."""
    made = ParallelPlan(**plan)
    _, measurement = run_predicted(model(), made, 4 * made.dp, "bf16", tmp_path)
    job = measurement.job
    assert issued_as_predicted(measurement)
    shape = job.model.layers[job.boundaries[1] - 1].output_shapes[0]
    sent = {c.num_bytes for rank in measurement.ranks for c in rank.collectives if c.kind == "send"}
    assert sent == ({2 * shape[0] * shape[1] * shape[2]} if made.pp > 1 else set())


# plan, microbatches, pipeline rank
MEMORY: dict[str, tuple[dict[str, Any], int, int]] = {
    "one device": ({"microbatch_size": 16}, 1, 0),
    "accumulation": ({"microbatch_size": 4}, 12, 0),
    "ddp": ({"dp_replicate": 2, "microbatch_size": 16}, 2, 0),
    "zero3": ({"dp_shard": 4, "microbatch_size": 16}, 2, 0),
    "gpipe, last of two": ({"pp": 2, "schedule": "gpipe", "microbatch_size": 8}, 4, 1),
    "1f1b, first of four": ({"pp": 4, "microbatch_size": 8}, 6, 0),
    "1f1b, second of four": ({"pp": 4, "microbatch_size": 8}, 6, 1),
    "1f1b of fsdp": ({"pp": 2, "dp_shard": 2, "microbatch_size": 8}, 4, 0),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of logits, which nothing changes in place
@pytest.mark.parametrize(
    ("name", "layer_type", "precision"),
    slow_except(
        [("1f1b, second of four", "basic", "fp32")],
        [
            (name, layer_type, kind)
            for name, layer_type, kind in product(MEMORY, TYPES, ("fp32", "bf16"))
            if kind == "fp32" or "dp_shard" not in MEMORY[name][0]
        ],
    ),
)
def test_peak_of_a_rank_is_torchs(name: str, layer_type: str, precision: Precision) -> None:
    """Images of all microbatches are held through the step, on the ranks of the first stage."""
    changes, num_microbatches, pp_rank = MEMORY[name]
    model = ModelSpec(family="resnet", depths=(2, 2, 3, 2), layer_type=layer_type, image_size=128)
    predicted, torchs = peaks(model, {"microbatch_size": 1, **changes}, num_microbatches, pp_rank, precision)
    assert predicted == pytest.approx(torchs, rel=TOTAL if ParallelPlan(**changes).shards_parameters else 0.01)
