"""1-bit Adam: two real ranks against two models of one process, whose momentum numpy averages in one bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from simplan.plan.compression import BLOCK
from simplan.runs.run_spec import RunSpec
from simplan.training import TrainingSpec
from tests.executor.conftest import make_job
from tests.executor.distributed.test_compression import InBlocks, to_sign
from tests.executor.distributed.test_outer import Replicas, weighed
from tests.support.slow import slow_except

NUM_WHOLE, NUM_STEPS = 3, 7
RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8
Vector = NDArray[np.float64]


def job_of(optimizer: str, compression: Any, **fields: Any) -> RunSpec:
    training = TrainingSpec.from_fields({"global_batch_size": 16, "precision": "fp32", "optimizer": optimizer})
    plan = {"dp_replicate": 2, "compression": compression}
    return make_job(
        plan=plan, dp=2, training=training, num_warmup_steps=NUM_WHOLE, num_steps=NUM_STEPS - NUM_WHOLE, **fields
    )


def replayed(job: RunSpec, decay: float) -> list[Vector]:
    """By step, the weights after it: the algorithm of Tang et al. 2021, with the variance's bias corrected."""
    replicas = Replicas(job)
    weights = replicas.get(0).numpy()
    m, v = np.zeros_like(weights), np.zeros_like(weights)
    blocks, weights_by_step, places = (
        InBlocks(to_sign, num_padded(replicas)),
        list[Vector](),
        places_in_blocks(replicas),
    )
    for step in range(1, NUM_STEPS + 1):
        replicas.backward(step - 1)
        gradients = np.stack([gradient_of(model) for model in replicas.models])
        if step <= NUM_WHOLE:
            mean = gradients.mean(0)
            m = BETA1 * m + (1 - BETA1) * mean
            v = BETA2 * v + (1 - BETA2) * mean**2
            corrected = v / (1 - BETA2**step)
            is_known = np.sqrt(corrected) >= EPSILON
        else:
            errors = np.zeros((2, blocks.num_elements))
            errors[:, places] = (BETA1 * m + (1 - BETA1) * gradients) * is_known
            m = blocks.mean(errors)[places] * is_known
        update = m / (1 - BETA1**step) / (np.sqrt(corrected) + EPSILON)
        weights = weights - RATE * (update + decay * weights)
        for rank in range(2):
            replicas.set(rank, torch.from_numpy(weights.copy()))
        weights_by_step.append(weights)
    return weights_by_step


def num_padded(replicas: Replicas) -> int:
    return sum(-(-p.numel() // BLOCK) * BLOCK for p in replicas.models[0].parameters())


def places_in_blocks(replicas: Replicas) -> NDArray[np.int64]:
    """Places of all weights among those of tensors that begin with a new block."""
    first, places = 0, []
    for p in replicas.models[0].parameters():
        places.append(first + np.arange(p.numel()))
        first += -(-p.numel() // BLOCK) * BLOCK
    return np.concatenate(places)


def gradient_of(model: torch.nn.Module) -> Vector:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).numpy()


@pytest.mark.parametrize(("optimizer", "decay"), slow_except([("adamw", 0.01)], [("adamw", 0.01), ("adam", 0.0)]))
def test_weights_equal_a_replay(optimizer: str, decay: float, tmp_path: Path) -> None:
    share = NUM_WHOLE / NUM_STEPS
    job = job_of(optimizer, {"kind": "one_bit_adam", "warmup_share": share}, dtype="fp64")
    _, weights = weighed(job, tmp_path)
    for of_ranks, expected in zip(weights, replayed(job, decay), strict=True):
        assert torch.equal(*of_ranks)
        assert of_ranks[0].numpy() == pytest.approx(expected, abs=RATE / 1000)  # scales are FP32


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_first_steps_are_those_of_adam(optimizer: str, tmp_path: Path) -> None:
    """To the last bit; the steps after them are not."""
    compression = {"kind": "one_bit_adam", "warmup_share": NUM_WHOLE / NUM_STEPS}
    (_, plain), (_, compressed) = (
        weighed(job_of(optimizer, kind), tmp_path / str(number)) for number, kind in enumerate((None, compression))
    )
    equal = [torch.equal(ours[0], theirs[0]) for ours, theirs in zip(compressed, plain, strict=True)]
    assert equal == [True] * NUM_WHOLE + [False] * (NUM_STEPS - NUM_WHOLE)
