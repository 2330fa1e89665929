"""FSDP1 with ``use_orig_params=True``: gradients of frozen weights, against torch's own FSDP1 on two ranks."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan, StageAssignment
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.program import MemoryCategory
from simplan.program.tables.plan_table import plan_table
from simplan.sim.memory import persistent_bytes
from simplan.training import TrainingSpec
from tests.executor.forked import run_program
from tests.executor.rank_programs.flat_ranks import MICROBATCH_SIZE, NUM_MICROBATCHES, NUM_RANKS
from tests.jobs import job_to_lower
from tests.support.slow import slow_except

LLAMA: dict[str, Any] = {
    "family": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "vocab_size": 500,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "seq_len": 16,
}
LORA: dict[str, Any] = {**LLAMA, "lora_rank": 4, "lora_targets": ("q", "v")}
MODELS: dict[str, dict[str, Any]] = {
    "adapters": LORA,
    "adapters of the head": {**LORA, "lora_targets": ("q", "v", "head")},
    "all": LLAMA,
}


def predicted(fields: dict[str, Any], *, defers: bool) -> tuple[list[int], list[int], int]:
    """Bytes of gradients after each microbatch, of all tensors at most during its backward, and of states."""
    model = ModelSpec(**fields)
    training = TrainingSpec(
        global_batch_size=NUM_RANKS * NUM_MICROBATCHES * MICROBATCH_SIZE,
        precision="fp32",
        task="lora" if model.lora_rank else "pretrain",
    )
    sync: Literal["step", "microbatch"] = "step" if defers else "microbatch"
    plan = ParallelPlan(dp_shard=NUM_RANKS, zero_stage=3, microbatch_size=MICROBATCH_SIZE, grad_sync=sync)
    job = job_to_lower(model, training, plan, catalog.software("torch").with_changes(flat_parameters=True))
    whole, table = StageAssignment((0, len(model.layers))), plan_table(plan, NUM_MICROBATCHES)
    program = lower(job, whole, table, Lowering(host_waits=False))
    indices, gradients, peaks = program.rank_indices[0], [], []
    during, after = (effect[program.columns.memory[indices]] for effect in program.effect_bytes)
    held, resting = np.cumsum(after, axis=0), persistent_bytes(program, 0)
    for microbatch in range(NUM_MICROBATCHES):
        at = [k for k, i in enumerate(indices) if str(program.op(int(i)).action) == f"0B{microbatch}"]
        gradients.append(int(held[at[-1], [*MemoryCategory].index(MemoryCategory.GRADIENTS)]))
        peaks.append(resting + int((held - after + during)[at].sum(axis=1).max()))
    return gradients, peaks, program.persistent_bytes[0][MemoryCategory.OPTIMIZER]


def counted(folder: Path, fields: dict[str, Any], *, use_orig_params: bool, defers: bool) -> list[Any]:
    """Bytes that each rank counted, or the error with which torch refused the job."""
    torch.save([(fields, {"use_orig_params": use_orig_params}, defers)], folder / "cases.pt")
    run_program("flat_ranks", NUM_RANKS, folder)
    return [torch.load(folder / f"rank{rank}.pt")[0] for rank in range(NUM_RANKS)]


@pytest.mark.parametrize(("name", "defers"), slow_except([("adapters", True)], product(MODELS, (True, False))))
def test_gradients_of_frozen_weights_are_those_of_torch(name: str, defers: bool, tmp_path: Path) -> None:
    """Shows that what a rank holds and needs is torch's: to the byte for gradients, within 1.5% for the peak.

    AdamW has no states of frozen weights. A rank has those of the adapters in its part of the flat tensors, which can
    be all of them; predicted are equal parts.
    """
    first, second = counted(tmp_path, MODELS[name], use_orig_params=True, defers=defers)
    gradients, peaks, states = predicted(MODELS[name], defers=defers)
    assert first[0] == second[0] == tuple(gradients)
    assert first[2] + second[2] == NUM_RANKS * states
    if defers:
        assert first[1] == pytest.approx(peaks, rel=0.015)


@pytest.mark.slow
def test_torch_refuses_partly_frozen_units_without_original_parameters(tmp_path: Path) -> None:
    """Shows why FSDP1 with use_orig_params=False has no gradients of frozen weights."""
    for refusal in counted(tmp_path, LORA, use_orig_params=False, defers=True):
        assert "both parameters with requires_grad=True and False" in refusal
