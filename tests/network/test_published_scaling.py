"""Published scaling of synchronous data parallelism: step times of one GPU give compute, all else is predicted.

Horovod's benchmarks (horovod/horovod at 2626dc87, docs/benchmarks.rst): 128 servers of 4 P100, 25 Gbit/s RoCE, 90 % of
linear scaling for Inception v3 and ResNet-101, 68 % for VGG-16. Rates of one P100, batch 64: TensorFlow's benchmarks,
docs_src/performance/benchmarks.md at 5984ffe (Inception v3, VGG-16); of ResNet-101, a sixteenth of Horovod at 16 GPUs.
"""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec, DeviceSpec, LinkSpec
from simplan.cost.program_costs import estimate_program
from simplan.model.kernel import Gemm
from simplan.model.layer import LayerKind, LayerSpec, ParameterSpec, Tensor
from simplan.model.model import ModelSpec
from simplan.model.parts.part import layer_of, matmul
from simplan.plan.shard import Shard
from simplan.sim.compiled import compile_program
from tests.jobs import job_of, lowered
from tests.network.test_parameter_servers import BATCH, INCEPTION, RESNET, Convolution, TrainingCost, column

NUM_GPUS, PER_NODE, CARD_BYTES_PER_S = 512, 4, 25e9 / 8


class VGG16(ModelSpec):
    """Convolutions and fully connected layers of VGG-16 (Simonyan and Zisserman 2014); the last is ResNet's."""

    def layers_of(self, shard: Shard, *, is_flat: bool = False) -> tuple[LayerSpec, ...]:
        assert shard == Shard()
        every: list[Convolution] = []
        inputs = 3
        for outputs, number, side in ((64, 2, 224), (128, 2, 112), (256, 3, 56), (512, 3, 28), (512, 3, 14)):
            every += column(inputs, *[(outputs, 9)] * number, side=side)
            inputs = outputs
        every += column(25_088, (4096, 1), (4096, 1), side=1)
        layers = []
        for number, (channels, outputs, kernel, side) in enumerate(every):
            weights = (
                ParameterSpec("conv.weight", (outputs, channels, kernel)),
                ParameterSpec("conv.bias", (outputs,)),
            )
            part, tensor = (
                matmul(Gemm("conv", side**2, outputs, channels * kernel), "input", weights),
                channels * side**2,
            )
            kind, shape = LayerKind.BLOCK if number else LayerKind.EMBEDDING, (outputs, side, side)
            given_tensor = Tensor("input", tensor)
            layers.append(layer_of(f"conv{number}", kind, [part], inputs=(given_tensor,), output_shapes=(shape,)))
        return (*layers, RESNET.layers[-1])


VGG = VGG16.model_construct(**dict(RESNET))


def efficiency(model: Any, images_per_s: float) -> float:
    """Throughput of all GPUs over that of as many alone."""
    intra = LinkSpec(id="pcie", bytes_per_s=10e9, latency_s=0.0, library="nccl")
    card = {"bytes_per_s": CARD_BYTES_PER_S / PER_NODE}
    between = catalog.cluster("dgx-v100", 16).inter_link
    assert between is not None
    between = between.model_copy(update=card)
    cluster = ClusterSpec(
        id="nodes",
        device=DeviceSpec(id="gpu"),
        num_devices=NUM_GPUS,
        devices_per_node=PER_NODE,
        intra_link=intra,
        inter_link=between,
    )
    job = job_of(model, {"dp_replicate": NUM_GPUS, "microbatch_size": BATCH}, cluster=cluster, num_microbatches=1)
    program, compute_s = lowered(job), BATCH / images_per_s
    costs = estimate_program(program, TrainingCost(job, compute_s))
    return compute_s / compile_program(program).times(costs.durations_s).step_time_s


def test_vgg_has_its_published_parameters() -> None:
    assert VGG.num_parameters == pytest.approx(138_357_544, rel=0.02)


@pytest.mark.parametrize(
    ("model", "images_per_s", "published", "tolerance"),
    [
        (INCEPTION, 142.0, 0.90, 0.12),
        (catalog.model("resnet-101"), 1656.8 / 16, 0.90, 0.12),
        (VGG, 154.0, 0.68, 0.21),
    ],
    ids=["Inception v3", "ResNet-101", "VGG-16"],
)
def test_horovod_scales_to_512_gpus_as_published(
    model: ModelSpec, images_per_s: float, published: float, tolerance: float
) -> None:
    """Always above: nothing but communication is lost here. Of VGG-16 twice as much was exposed as is predicted."""
    reached = efficiency(model, images_per_s)
    assert published < reached < (1 + tolerance) * published
