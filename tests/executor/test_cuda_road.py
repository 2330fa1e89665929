"""What the road of CUDA devices does, told by stand-ins where there is no device."""

from __future__ import annotations

import os
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import executor.dry_run.rehearse
from executor.calibration.kernel_timing import Probe
from executor.calibration.timing import Stopwatch
from executor.distributed.activation_offload import HostLink, _Kept, _Saved
from executor.distributed.context_parallel import attend
from executor.distributed.mesh import ParallelDims
from executor.distributed.precision import allow_tf32
from executor.dry_run.rehearse import rehearse
from executor.profiling.memory import peak_memory
from executor.worker import use_device
from tests.executor.conftest import make_job

META = torch.device("meta")


def test_a_rank_that_nobody_started_has_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsed one; torchrun says which device the ranks of a machine have."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert use_device("cuda", 1) == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert use_device("cuda", 4) == torch.device("cuda", 3)


@pytest.mark.parametrize("allowed", [True, False])
def test_convolutions_round_as_products_do(allowed: bool) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        allow_tf32(allowed=allowed)
        assert torch.backends.cudnn.allow_tf32 is allowed
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(
    ("dtype", "masked", "head_dim", "capability", "cudnn", "heads"),
    [
        (torch.float32, False, 64, 9, 91600, 8),
        (torch.bfloat16, False, 64, 8, 91600, 2),
        (torch.bfloat16, True, 64, 8, 91600, 8),
        (torch.bfloat16, True, 128, 9, 91600, 2),
        (torch.bfloat16, True, 256, 9, 91600, 8),
        (torch.bfloat16, True, 64, 10, 91500, 8),
        (torch.float64, False, 64, 9, 91600, 2),
    ],
)
def test_keys_are_repeated_where_no_fused_attention_takes_groups(
    dtype: torch.dtype,
    masked: bool,
    head_dim: int,
    capability: int,
    cudnn: int,
    heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's kernels for FP32 and for masks take as many keys as queries; its fallback keeps the scores."""
    asked: list[tuple[int, bool]] = []

    def attention(q: torch.Tensor, k: torch.Tensor, *others: object, enable_gqa: bool, **options: object) -> Any:
        asked.append((k.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    with FakeTensorMode():
        q, k = (torch.empty(1, h, 16, head_dim, device="cuda", dtype=dtype) for h in (8, 2))
        attend(q, k, k, torch.empty(16, 16, device="cuda", dtype=dtype) if masked else None, is_causal=not masked)
    assert asked == [(heads, heads == 2)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of torch.cuda in order; the n-th event of a test happens at second n."""
    names: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            events.append(self)
            self.number = len(events) - 1

        def record(self) -> None:
            names.append(f"event {self.number}")

        def elapsed_time(self, other: Any) -> float:
            return 1000.0 * float(other.number - self.number)

    events: list[Event] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: names.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: names.append("sleep"))
    return names


def test_nothing_waits_between_collectives_and_the_products_beside_them(calls: list[str]) -> None:
    """Else the products would begin when the collectives are done, and nothing be slowed down."""
    watch = Stopwatch(torch.device("cuda"))
    seconds = watch.overlapped(lambda: calls.append("begin"), lambda: calls.append("run"), lambda: calls.append("wait"))
    middle = ["event 0", "begin", "run", "event 1", "wait", "event 2"]
    assert calls == ["synchronize", *middle, "synchronize"]
    assert seconds == (1.0, 2.0)


def test_layers_in_a_row_are_timed_without_waiting_for_any(calls: list[str]) -> None:
    """The host runs ahead of a device that is kept busy first, so that launching does not count."""
    seconds = Stopwatch(torch.device("cuda")).each(partial(calls.append, name) for name in ("first", "second"))
    middle = ["event 0", "first", "event 1", "second", "event 2"]
    assert calls == ["synchronize", "sleep", *middle, "synchronize"]
    assert seconds == [1.0, 1.0]


def test_kernels_are_timed_with_the_host_ahead_and_launches_with_the_host(calls: list[str]) -> None:
    watch = Stopwatch(torch.device("cuda"))
    Probe("gelu", (1,), lambda n: calls.append("run")).round(watch, 0)
    assert calls == ["synchronize", "sleep", "event 0", "run", "event 1", "synchronize"]
    calls.clear()
    Probe("launch", (1,), lambda n: calls.append("run")).round(watch, 0)
    assert calls == ["synchronize", "run", "synchronize"]


def test_a_rehearsed_rank_has_the_mesh_of_its_device(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of the CPU, FSDP moves the weights of a rank of a GPU there."""
    devices: list[str] = []

    def noted(*args: Any, device_type: str, alone: bool) -> None:
        devices.append(device_type)
        raise InterruptedError

    monkeypatch.setattr(ParallelDims, "of", noted)
    monkeypatch.setattr(executor.dry_run.rehearse, "use_device", lambda device, num_ranks: torch.device("cuda", 0))
    with pytest.raises(InterruptedError):
        rehearse(make_job(dp=2), 0, fake=False)
    assert devices == ["cuda"]


@pytest.mark.parametrize(("is_known", "wanted"), [(True, 700), (False, 900)])
def test_memory_of_other_processes_is_not_counted_where_nvml_tells(
    is_known: bool, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container NVML has other process ids: then all that is used on the device counts."""
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            SimpleNamespace(pid=os.getpid() if is_known else 1, usedGpuMemory=700)
        ],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="some"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 600)
    assert peak_memory(torch.device("cuda")).device_bytes == wanted


def test_offloading_leaves_what_is_on_the_host_already() -> None:
    """Such as numbers that autograd keeps as tensors: they would come back on the device."""
    link = HostLink(torch.device("cpu"))
    link.device = META
    kept = _Kept(torch.nn.Linear(2, 2), link, ())
    number, activation = torch.tensor(0.5), torch.zeros(3, 4, device=META)
    assert kept.pack(number) is number
    assert isinstance(kept.pack(activation), _Saved) or not activation.untyped_storage().nbytes()
