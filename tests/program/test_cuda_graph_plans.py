"""Plans with CUDA graphs: what a step saves, and what their buffers hold."""

from __future__ import annotations

from typing import Any

import pytest

from simplan.errors import SpecError
from simplan.job import Job
from simplan.predict.build import cost_model
from simplan.predict.evaluate import predict
from simplan.prediction import Prediction
from simplan.spec import catalogue
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.training import TrainingSpec
from simplan.units import format_time
from tests.cost.test_calibrated import CALIBRATION

CLUSTER = catalogue.cluster("dgx-h100")
LLAMA = catalogue.model("llama3-8b").model_copy(update={"num_hidden_layers": 6, "seq_len": 2048})
DEEPSEEK = catalogue.model("deepseek-v2-lite")
KERNELS = CLUSTER.device.kernels
TRAINING = TrainingSpec(global_batch_size=64, precision="bf16", optimizer="adamw")


def predicted(model: ModelSpec, *graphs: str, num_devices: int = 8, **fields: Any) -> Prediction:
    where = catalogue.cluster("dgx-h100", num_devices=num_devices)
    plan = ParallelPlan.model_validate({"microbatch_size": 2, "zero_stage": 1, **fields})
    software = catalogue.software("megatron-core").model_copy(update={"cuda_graphs": graphs})
    return predict(Job(model, where, TRAINING, plan, software), name="graphs")


def test_a_step_saves_a_launch_for_every_kernel_but_one_of_each_graph() -> None:
    """On one device: 32 microbatches, 6 blocks, 6 kernels of attention in forward and 8 in backward."""
    eager, replayed = (predicted(LLAMA, *graphs, num_devices=1, zero_stage=0) for graphs in ((), ("attn",)))
    saved_s = 32 * 6 * (5 + 7) * KERNELS.launch_s
    assert eager.step_time_s - replayed.step_time_s == pytest.approx(saved_s, rel=1e-6)
    whole = predicted(LLAMA, "full_iteration", num_devices=1, zero_stage=0)
    assert whole.step_time_s < predicted(LLAMA, "attn", "mlp", num_devices=1, zero_stage=0).step_time_s
    assert whole.step_time_s > KERNELS.step_s  # the optimizer and what the trainer does are outside of it


def test_what_graphs_give_stays_in_their_buffers() -> None:
    """The first of four pipeline ranks has four microbatches in flight in 1F1B, each with the outputs of its graphs.

    Of a block with experts these are the shared expert's, beside tensors that backward would have kept; gradients of
    all three come back in buffers that all blocks share.
    """
    fields = {"dp_shard": 2, "pp": 4, "ep": 2}
    plain, found = (predicted(DEEPSEEK, *graphs, **fields) for graphs in ((), ("attn", "moe_router")))
    hidden_bytes = 2 * DEEPSEEK.seq_len * DEEPSEEK.hidden_size * 2
    blocks = [found.job.software.layers_of(DEEPSEEK, found.job.plan)[i] for i in found.assignment.layer_range(0)]
    with_experts = sum(any(kernel.name == "router" for kernel in layer.kernels) for layer in blocks)
    more_bytes = found.memory[0].allocated_bytes - plain.memory[0].allocated_bytes
    held_bytes = 4 * with_experts * hidden_bytes
    shared_bytes = (3 + 1) * hidden_bytes  # the first block, which is dense, has a graph of attention alone
    assert more_bytes == pytest.approx(held_bytes + shared_bytes, rel=0.001)


def test_a_dense_block_in_a_graph_holds_its_output_beside_the_next_ones_input() -> None:
    plain, found = (predicted(LLAMA, *graphs, num_devices=1, zero_stage=0) for graphs in ((), ("attn", "mlp")))
    hidden_bytes = 2 * LLAMA.seq_len * LLAMA.hidden_size * 2
    more_bytes = found.memory[0].allocated_bytes - plain.memory[0].allocated_bytes
    assert more_bytes == pytest.approx((6 + 1) * hidden_bytes, rel=0.001)


def test_a_prediction_says_what_graphs_are_taken_to_save_and_what_is_not_counted() -> None:
    said = " ".join(predicted(LLAMA, "attn", num_devices=1, zero_stage=0).assumptions)
    kernel = format_time(CLUSTER.device.kernels.kernel_s)
    assert f"of the {kernel} that any kernel takes beyond its work, one in a CUDA graph does not take 5.0 us" in said
    assert "memory that graphs hold for themselves alone is not counted" in said


def test_a_calibration_says_nothing_of_graphs() -> None:
    software = catalogue.software("megatron-core").model_copy(update={"cuda_graphs": ("attn",)})
    cluster = CLUSTER.model_copy(update={"cores_per_node": 2})
    with pytest.raises(SpecError, match="cannot be told from a calibration, whose kernels were launched one by one"):
        cost_model(Job(LLAMA, cluster, TRAINING, ParallelPlan(), software), CALIBRATION)
