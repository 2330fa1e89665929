"""The private names of torch's pipelining and FSDP2 that are used; torch 2.11 and 2.13 have them alike."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.pipelining import PipelineStage, schedules

RUNTIME = schedules._PipelineScheduleRuntime
GATHER, SCATTER = _fsdp_collectives.DefaultAllGather, _fsdp_collectives.DefaultReduceScatter


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (RUNTIME._prepare_schedule_with_comms, "actions format"),
        (RUNTIME._split_inputs, "args kwargs"),
        (RUNTIME._maybe_compute_loss, "stage output target_mbs mb_index"),
        (RUNTIME._maybe_get_loss, "stage mb_index"),
        (RUNTIME._update_losses, "stages losses"),
        (PipelineStage.forward_one_chunk, "fwd_chunk_id args"),
        (PipelineStage.backward_one_chunk, "bwd_chunk_id loss full_backward last_backward"),
        (PipelineStage.backward_weight_one_chunk, "bwd_chunk_id last_backward"),
        (PipelineStage.perform_reduce_grad, "grad_scale_factor"),
        *((getattr(PipelineStage, f"get_fwd_{kind}_ops"), "fwd_chunk_id") for kind in ("recv", "send")),
        *((getattr(PipelineStage, f"get_bwd_{kind}_ops"), "bwd_chunk_id") for kind in ("recv", "send")),
        (GATHER.__call__, "output_tensor input_tensor group async_op"),
        (SCATTER.__call__, "output_tensor input_tensor group op async_op"),
        (FSDPModule.set_custom_all_gather, "comm"),
        (FSDPModule.set_custom_reduce_scatter, "comm"),
        (FSDPModule.set_all_reduce_hook, "hook"),
    ],
)
def test_methods_that_are_called_or_overridden_have_these_parameters(function: object, parameters: str) -> None:
    """The first ones; what follows has defaults."""
    first, *others = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    assert first.name == "self"
    wanted = parameters.split()
    assert [parameter.name for parameter in others[: len(wanted)]] == wanted
    assert all(
        parameter.default is not inspect.Parameter.empty or parameter.kind in (2, 4)
        for parameter in others[len(wanted) :]
    )


def test_the_runtime_takes_targets_and_need_not_return_outputs() -> None:
    assert {"target", "return_outputs"} <= inspect.signature(RUNTIME.step).parameters.keys()


def test_the_cache_holds_outputs_and_inputs_and_the_last_stage_needs_no_outputs() -> None:
    """The adapter empties the outputs of the last stage: backward there starts from the loss."""
    assert "self.fwd_cache[fwd_chunk_id] = (" in inspect.getsource(PipelineStage.forward_one_chunk)
    assert "self.bwd_cache[bwd_chunk_id] = " in inspect.getsource(PipelineStage.backward_one_chunk)
    assert '"stage_output": loss,' in inspect.getsource(PipelineStage.backward_one_chunk)


def test_actions_are_read_from_the_same_text() -> None:
    for text in ("0F1", "1B0", "2SEND_F3", "2RECV_B3", "1REDUCE_GRAD", "0UNSHARD", "0RESHARD", "0I1", "0W1"):
        assert str(schedules._Action.from_str(text)) == text


def test_fsdp_calls_the_all_reduce_hook_after_its_own_all_reduce() -> None:
    source = inspect.getsource(_fsdp_collectives.foreach_reduce)
    order = [source.index(call) for call in ("reduce_scatter_comm(", "dist.all_reduce(", "all_reduce_hook(reduce")]
    assert order == sorted(order)


def test_the_version_is_one_that_was_looked_at() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert (major, minor) >= (2, 11)
