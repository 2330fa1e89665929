"""Offloading changes where bytes are, not what is computed: gradients and weights are bit for bit the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from executor.distributed.activation_offload import ActivationOffload, HostLink
from executor.dry_run.memory_tracker import _parameter_groups
from executor.models.model import Stage, build_stage
from executor.train.loss import cross_entropy
from simplan.program.action import Action, ActionKind
from tests.executor.conftest import make_job, make_model
from tests.executor.dry_run.accounting import SilentRecorder, fake_trainer

CPU = torch.device("cpu")
ROW = [Action(0, ActionKind.FORWARD, 0), Action(0, ActionKind.BACKWARD, 0), Action(0, ActionKind.OPTIM)]


def stage_of(family: str, recompute: Any = "none") -> Stage:
    model = make_model(family, num_hidden_layers=4)
    return build_stage(model, range(len(model.layers)), torch.float32, CPU, 0, recompute=recompute)


def loss_of(stage: Stage) -> Tensor:
    tokens = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
    logits = stage(tokens)
    assert isinstance(logits, Tensor)
    return cross_entropy(logits, tokens.flip(1))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("at_once", [True, False])
def test_gradients_are_the_same_to_the_bit(family: str, recompute: str, *, at_once: bool) -> None:
    here, there = stage_of(family, recompute), stage_of(family, recompute)
    recorder = SilentRecorder(ROW)
    recorder.begin_step(0)
    recorder.begin(ROW[0])
    offload = ActivationOffload(HostLink(CPU), recorder, 0, range(1, 5), ROW[:1] if at_once else ())
    there.around_layers = offload.forward
    for stage in (here, there):
        loss_of(stage).backward()  # type: ignore[no-untyped-call]
    for wanted, parameter in zip(here.parameters(), there.parameters(), strict=True):
        assert wanted.grad is not None
        assert parameter.grad is not None
        assert torch.equal(wanted.grad, parameter.grad)
    issued = [c.kind for c in recorder.record(0.0, 1.0, []).collectives]
    # without the last block, or with it: then the last one's copy, and no other, is in vain
    assert issued == ["to_host"] * (3 if at_once else 4) + ["from_host"] * 3


@pytest.mark.parametrize("schedule", ["none", "1f1b"])
def test_fsdp_is_told_to_keep_its_shards_on_the_host(schedule: str) -> None:
    """Of every parameter; gradients are there from a reduction to the update."""
    plan = {"dp_shard": 2, "offload_optimizer": True}
    job = make_job(schedule, pp=2 if schedule == "1f1b" else 1, model=make_model("llama"), plan=plan)
    with fake_trainer(job, 0) as built:
        built.step(*built.batch(0))
        held = [
            parameter
            for stage in built.stages.values()
            for module in stage.modules()
            if isinstance(module, FSDPModule)
            for group in _parameter_groups(module)
            for parameter in group.fsdp_params
        ]
        assert len(held) == sum(len(list(stage.parameters())) for stage in built.stages.values()) > 0
        assert all(parameter.offload_to_cpu and not parameter.pin_memory for parameter in held)
        assert all(parameter.sharded_param.grad is None for parameter in held)
