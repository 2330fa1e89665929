"""The private names of torch's pipelining and FSDP2 that are used; torch 2.11 and 2.13 have them alike."""

from __future__ import annotations

import inspect

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.pipelining import PipelineStage, schedules

RUNTIME = schedules._PipelineScheduleRuntime


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_runtime_has_the_methods_that_are_called_and_overridden() -> None:
    assert parameters(RUNTIME._prepare_schedule_with_comms) == ["self", "actions", "format"]
    assert parameters(RUNTIME._maybe_compute_loss)[:5] == ["self", "stage", "output", "target_mbs", "mb_index"]
    assert parameters(RUNTIME._maybe_get_loss) == ["self", "stage", "mb_index"]
    assert parameters(RUNTIME._update_losses) == ["self", "stages", "losses"]
    assert {"target", "return_outputs"} <= set(parameters(RUNTIME.step))


def test_stage_has_the_methods_that_are_overridden() -> None:
    assert parameters(PipelineStage.forward_one_chunk)[:3] == ["self", "fwd_chunk_id", "args"]
    assert parameters(PipelineStage.backward_one_chunk) == [
        "self", "bwd_chunk_id", "loss", "full_backward", "last_backward",
    ]  # fmt: skip
    assert parameters(PipelineStage.backward_weight_one_chunk) == ["self", "bwd_chunk_id", "last_backward"]
    assert parameters(PipelineStage.perform_reduce_grad) == ["self", "grad_scale_factor"]
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops"):
        assert parameters(getattr(PipelineStage, name)) == ["self", "fwd_chunk_id"]
    for name in ("get_bwd_recv_ops", "get_bwd_send_ops"):
        assert parameters(getattr(PipelineStage, name)) == ["self", "bwd_chunk_id"]


def test_the_cache_holds_outputs_and_inputs_and_the_last_stage_needs_no_outputs() -> None:
    """The adapter empties the outputs of the last stage: backward there starts from the loss."""
    source = inspect.getsource(PipelineStage)
    assert source  # PipelineStage is plain Python
    base = inspect.getsource(PipelineStage.forward_one_chunk)
    assert "self.fwd_cache[fwd_chunk_id] = (" in base
    backward = inspect.getsource(PipelineStage.backward_one_chunk)
    assert '"stage_output": loss,' in backward


def test_actions_are_read_from_the_same_text() -> None:
    for text in ("0F1", "1B0", "2SEND_F3", "2RECV_B3", "1REDUCE_GRAD", "0UNSHARD", "0RESHARD", "0I1", "0W1"):
        assert str(schedules._Action.from_str(text)) == text


def test_fsdp_takes_other_collectives_and_torchs_own_can_be_extended() -> None:
    gather, scatter = _fsdp_collectives.DefaultAllGather, _fsdp_collectives.DefaultReduceScatter
    assert parameters(gather.__call__) == ["self", "output_tensor", "input_tensor", "group", "async_op"]
    assert parameters(scatter.__call__) == ["self", "output_tensor", "input_tensor", "group", "op", "async_op"]
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        assert parameters(getattr(FSDPModule, name)) == ["self", "comm"]
    assert parameters(FSDPModule.set_all_reduce_hook)[:2] == ["self", "hook"]


def test_fsdp_calls_the_all_reduce_hook_after_its_own_all_reduce() -> None:
    source = inspect.getsource(_fsdp_collectives.foreach_reduce)
    order = [source.index(call) for call in ("reduce_scatter_comm(", "dist.all_reduce(", "all_reduce_hook(reduce")]
    assert order == sorted(order)


def test_the_version_is_one_that_was_looked_at() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert (major, minor) >= (2, 11)
