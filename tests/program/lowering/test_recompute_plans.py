"""Plans that run some modules, or some blocks, again: what they take and what they save."""

from __future__ import annotations

import pytest

from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation
from simplan.plan.plan import RecomputeModule
from simplan.predict.step import predict
from simplan.prediction import Prediction
from tests.jobs import job_of

DEEPSEEK = catalog.model("deepseek-v2-lite")
LLAMA = catalog.model("llama3-8b").model_copy(update={"num_hidden_layers": 6, "seq_len": 2048})
MODULES: tuple[RecomputeModule, ...] = ("mla_up_proj", "layernorm", "moe_act", "mlp", "moe", "shared_experts")


def predicted(model: ModelSpec, software: str = "megatron-core", **fields: object) -> Prediction:
    plan = {"dp_shard": 2, "pp": 4, "zero_stage": 1, "microbatch_size": 2, **fields}
    return predict(job_of(model, plan, software=software, global_batch_size=64, optimizer="adamw"))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_runs_again_saves_what_it_keeps_of_every_microbatch_in_flight(module: RecomputeModule) -> None:
    """Of the first rank, which has four microbatches in flight in 1F1B, and one more while one runs backward."""
    plain = predicted(DEEPSEEK, ep=2)
    prediction = predicted(DEEPSEEK, ep=2, recompute="selective", recompute_modules=(module,))
    layers = prediction.job.software.layers_of(prediction.job.model, prediction.job.plan)
    saved_bytes = []
    for layer in (layers[i] for i in prediction.assignment.layer_range(0)):
        kept = recomputation(layer, prediction.job.plan.recompute, modules=prediction.job.plan.recompute_modules).saved
        gone = [tensor for tensor in layer.saved if tensor.name not in kept]
        saved_bytes.append(prediction.job.plan.microbatch_size * sum(tensor.num_bytes(2, 2) for tensor in gone))
    less = plain.memory[0].allocated_bytes - prediction.memory[0].allocated_bytes
    # of one block it may have been made again at the worst point, where running it needs more; the allocator rounds
    assert 4 * sum(saved_bytes) - 1.05 * max(saved_bytes) <= less <= 4.001 * sum(saved_bytes)
    assert prediction.step_time_s > plain.step_time_s


@pytest.mark.parametrize("software", ["torch", "megatron-core"])
def test_the_first_blocks_of_every_stage_are_between_none_and_all(software: str) -> None:
    """Six blocks on two ranks: each one more that runs again takes as much longer and saves as much."""
    fields = {"pp": 2, "dp_shard": 4, "stage_layers": [3, 3], "zero_stage": 1 if software == "megatron-core" else 2}
    runs = [predicted(LLAMA, software, **fields)]
    runs += [predicted(LLAMA, software, **fields, recompute="full", recompute_layers=n) for n in (1, 2, 3)]
    full = predicted(LLAMA, software, **fields, recompute="full")
    assert runs[3].step_time_s == pytest.approx(full.step_time_s, rel=1e-12)
    assert [m.allocated_bytes for m in runs[3].memory] == [m.allocated_bytes for m in full.memory]
    times = [run.step_time_s for run in runs]
    assert times == sorted(times)
    assert runs[2].step_time_s - runs[1].step_time_s == pytest.approx(times[3] - times[2], rel=0.05)
    peaks = [run.memory[0].allocated_bytes for run in runs]
    assert peaks == sorted(peaks, reverse=True)


def test_a_reentrant_checkpoint_runs_the_last_product_again() -> None:
    """As FLOPs of the hardware over those of the model say: a third of a forward of the MLP more."""
    torch_, megatron = (
        predicted(LLAMA, name, pp=1, dp_shard=8, recompute="full") for name in ("torch", "megatron-core")
    )
    block = LLAMA.layers[1]
    down = next(kernel for kernel in block.kernels if kernel.name == "down")
    total = sum(layer.flops() + layer.backward_flops() for layer in LLAMA.layers)
    more = again(megatron) - again(torch_)
    assert more == pytest.approx(LLAMA.num_hidden_layers * down.flops / total, rel=1e-9)  # type: ignore[union-attr]


def again(prediction: Prediction) -> float:
    """FLOPs that run again over those of the model."""
    assert prediction.hfu is not None
    assert prediction.mfu is not None
    return prediction.hfu / prediction.mfu - 1
