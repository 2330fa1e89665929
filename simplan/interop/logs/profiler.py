"""Traces of torch.profiler (Kineto's JSON): steps, and the time of one GPU or CPU rank by kind.

``ProfilerStep#N`` spans come from ``prof.step()``. Kernels of the device run behind the host, so shares are taken over
all profiled steps together. On a CPU, ``gloo:`` spans are the collectives.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simplan.errors import file_error
from simplan.interop.logs.reading import LoggedStep, LogReading
from simplan.units import GIB, counted
from simplan.validate.logged_run import GpuTime

_US = 1e-6  # Kineto writes microseconds
_STEP = re.compile(r"ProfilerStep#(\d{1,12})")
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
_COMMUNICATION = re.compile(r"nccl|rccl|nvshmem|deep_ep", re.I)
_OPERATOR = re.compile(r"(aten|fsdp)::")  # others, such as autograd's, contain the waits of DDP's and FSDP's hooks
_CPU_MEMORY = (
    "memory of the CPU is not compared: torch.profiler counts it from the start of profiling, without the weights; "
    "write peak_allocated_gib into a YAML file"
)
_Spans = NDArray[np.float64]


def is_trace(data: Mapping[str, Any]) -> bool:
    """True for the JSON of a trace."""
    return isinstance(data.get("traceEvents"), list)


def read_trace(data: Mapping[str, Any], file: str) -> LogReading:
    """Read a trace of one process.

    Raises:
        SpecError: The trace has no steps.
    """
    events = [event for event in data["traceEvents"] if isinstance(event, dict)]
    complete = list(_complete(events))
    steps = _steps(complete, "gpu_user_annotation") or _steps(complete, "user_annotation") or _steps(complete, None)
    if not steps:
        rule = "has no ProfilerStep# spans, so it does not say where a step begins"
        raise file_error(file, rule, "call prof.step() after every step, and profile some of them")
    numbers = sorted(steps)
    begins = [steps[number][0] for number in numbers]
    end_us = max(end for _, end in steps.values())
    times_s = [(after - start) * _US for start, after in zip(begins, [*begins[1:], end_us], strict=True)]
    logged_steps = [LoggedStep(n, time_s, 0, 0) for n, time_s in zip(numbers, times_s, strict=True) if time_s > 0]
    if not logged_steps:
        raise file_error(file, "has ProfilerStep# spans without a duration", "profile again")
    others: dict[str, Any] = dict(_peaks(events))
    memory_notes = [] if others or not _has_cpu_memory(events) else [_CPU_MEMORY]
    window = begins[0], end_us, len(numbers), _rank(data)
    gpu_time = _gpu_time(complete, *window) or _cpu_time(complete, *window)
    notes = ["profiled steps may be slower than others: with_stack, record_shapes and profile_memory take time"]
    if gpu_time is None:
        notes.append("the trace has neither GPU kernels nor gloo: spans: only the times of steps are compared")
    else:
        others["gpu_time"] = gpu_time
        device = "CPU" if gpu_time.idle_s is None else "GPU"
        notes.append(f"{device} time is the mean over {counted(len(numbers), 'profiled step')} of one process")
    return LogReading("torch.profiler", "`ProfilerStep`", "step_times_s", logged_steps, others, (*notes, *memory_notes))


def _complete(events: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str, float, float, Any]]:
    """Yield name, lower-case category, start and end in microseconds, and arguments of events with a duration."""
    for event in events:
        start, duration = _number(event.get("ts")), _number(event.get("dur"))
        name, category = event.get("name"), event.get("cat", "")
        if event.get("ph") != "X" or start is None or duration is None or duration < 0:
            continue
        if isinstance(name, str) and isinstance(category, str):
            yield name, category.lower(), start, start + duration, event.get("args")


def _steps(
    events: Iterable[tuple[str, str, float, float, Any]], category: str | None
) -> dict[int, tuple[float, float]]:
    """Start and end of every profiled step, by its number; the device has one span for every stream."""
    bounds_of: dict[int, tuple[float, float]] = {}
    for name, kind, start, end, _ in events:
        if (category is None or kind == category) and (step := _STEP.match(name)):
            first, last = bounds_of.get(int(step[1]), (start, end))
            bounds_of[int(step[1])] = (min(first, start), max(last, end))
    return bounds_of


def _gpu_time(
    events: Iterable[tuple[str, str, float, float, Any]],
    start_us: float,
    end_us: float,
    num_steps: int,
    rank: int | None,
) -> GpuTime | None:
    """Time of the device with most kernels, per step; None without kernels."""
    kernels: dict[Any, tuple[list[tuple[float, float]], list[tuple[float, float]]]] = {}
    for name, category, start, end, args in events:
        if category in _ON_DEVICE and end > start_us and start < end_us:
            device = args.get("device") if isinstance(args, dict) else None
            device = device if isinstance(device, int | str) else None
            compute, communication = kernels.setdefault(device, ([], []))
            span = max(start, start_us), min(end, end_us)
            (communication if _COMMUNICATION.search(name) else compute).append(span)
    if not kernels:
        return None
    device, _ = Counter({key: len(a) + len(b) for key, (a, b) in kernels.items()}).most_common(1)[0]
    compute_us, exposed_us, hidden_us = _parts(*kernels[device])
    scale = _US / num_steps
    return GpuTime(
        compute_s=compute_us * scale,
        exposed_communication_s=exposed_us * scale,
        hidden_communication_s=hidden_us * scale,
        idle_s=max(0.0, end_us - start_us - compute_us - exposed_us) * scale,
        rank=rank,
    )


def _cpu_time(
    events: Iterable[tuple[str, str, float, float, Any]],
    start_us: float,
    end_us: float,
    num_steps: int,
    rank: int | None,
) -> GpuTime | None:
    """Time of a CPU rank per step; None without collectives. All of it but exposed communication is compute."""
    operators: list[tuple[float, float]] = []
    collectives: list[tuple[float, float]] = []
    for name, category, start, end, _ in events:
        if end > start_us and start < end_us:
            span = max(start, start_us), min(end, end_us)
            if name.startswith("gloo:"):
                collectives.append(span)
            elif category == "cpu_op" and _OPERATOR.match(name):
                operators.append(span)
    if not collectives:
        return None
    _, exposed_us, hidden_us = _parts(operators, collectives)
    scale = _US / num_steps
    return GpuTime(
        compute_s=max(0.0, end_us - start_us - exposed_us) * scale,
        exposed_communication_s=exposed_us * scale,
        hidden_communication_s=hidden_us * scale,
        idle_s=None,
        rank=rank,
    )


def _parts(compute: list[tuple[float, float]], communication: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Microseconds of compute, and of communication without and with compute at the same time."""
    compute_us, communication_us = _length(_merged(compute)), _length(_merged(communication))
    exposed_us = max(0.0, _length(_merged(compute + communication)) - compute_us)
    return compute_us, exposed_us, max(0.0, communication_us - exposed_us)


def _merged(spans: Iterable[tuple[float, float]]) -> _Spans:
    """``(num_spans, 2)`` Disjoint spans that cover the same time, in order."""
    rows = np.array(sorted(map(tuple, spans)), dtype=np.float64).reshape(-1, 2)
    if not len(rows):
        return rows
    ends = np.maximum.accumulate(rows[:, 1])
    begins_new = np.concatenate(([True], rows[1:, 0] > ends[:-1]))
    first = np.flatnonzero(begins_new)
    last = np.concatenate((first[1:] - 1, [len(rows) - 1]))
    return np.stack((rows[first, 0], ends[last]), axis=1)


def _length(spans: _Spans) -> float:
    return float((spans[:, 1] - spans[:, 0]).sum())


def _peaks(events: Iterable[dict[str, Any]]) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield peaks on the GPU (device type 1) in GiB, of a trace with profile_memory."""
    keys = {"Total Allocated": "peak_allocated_gib", "Total Reserved": "peak_reserved_gib"}
    peaks = dict.fromkeys(keys, 0.0)
    for event in events:
        args = event.get("args")
        if event.get("name") == "[memory]" and isinstance(args, dict) and args.get("Device Type") == 1:
            for key in keys:
                peaks[key] = max(peaks[key], _number(args.get(key)) or 0.0)
    yield from ((keys[key], (peak / GIB,)) for key, peak in peaks.items() if 0 < peak < 1e18)


def _has_cpu_memory(events: Iterable[dict[str, Any]]) -> bool:
    """True for a trace with profile_memory of a process that allocated on the CPU (device type 0)."""
    arguments = (event.get("args") for event in events if event.get("name") == "[memory]")
    return any(isinstance(args, dict) and args.get("Device Type") == 0 for args in arguments)


def _rank(data: Mapping[str, Any]) -> int | None:
    info = data.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
    return float(value) if is_number else None
