"""One rank of a calibration, started by torchrun: ``calibrate_worker REQUEST.json RESULT.json``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from executor.calibration.kernel_timing import time_kernels
from executor.calibration.layer_timing import time_layers
from executor.calibration.link_timing import time_host_copies, time_links
from executor.calibration.overlap_timing import time_overlap
from executor.calibration.timing import Reference, of_rank_0
from executor.distributed.precision import allow_tf32
from executor.launch.rank import StopRequest, live_as_rank
from executor.launch.watchdog import Heartbeat, RankState
from executor.profiling.memory import context_bytes
from executor.profiling.results import environment
from executor.worker import start_rank, use_device
from simplan.cost.calibration import (
    Calibration,
    CalibrationRequest,
    KernelTiming,
    LayerTiming,
    ShapeRequest,
    TimedDtype,
)
from simplan.files import write_whole

__all__ = ["main"]

_LEAST_ROUNDS = 5
_MOST_OVERRUN = 3  # times the share of the budget that the least rounds may take
_MOST_ROUNDS = 200
_REFERENCE_ROUNDS = 25

Found = dict[str, tuple[Any, ...]]
KeepGoing = Callable[[int], bool]
_Timing = TypeVar("_Timing", LayerTiming, KernelTiming)


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of a calibration.

    Attributes:
        name: What is timed, the same from one calibration to the next.
        share: Of the budget, relative to the others'.
        run: Times it; gives fields of ``Calibration``.
    """

    name: str
    share: float
    run: Callable[[KeepGoing], Found]


def main(argv: list[str]) -> None:
    """Measures what the request in ``argv[0]`` names; a rank of each node writes ``argv[1]``, anew after every part."""
    request_file, result_file = Path(argv[0]), Path(argv[1])
    live_as_rank(request_file.parent, lambda heartbeat, stop, rank: _run(request_file, result_file, heartbeat, stop))


def _run(request_file: Path, result_file: Path, heartbeat: Heartbeat, stop: StopRequest) -> None:
    del stop  # a calibration has nothing to keep but what is written already
    request = CalibrationRequest.model_validate_json(request_file.read_bytes())
    device = use_device(request.device, request.num_ranks)
    start_rank(device, request.budget_s + 60)
    dist.barrier()  # so that the connections count
    result = Calibration(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment(request.num_ranks, cuda=device.type == "cuda"),
        device_kind="gpu" if device.type == "cuda" else "cpu",
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(device),
        context_bytes=context_bytes(device),
    )
    writes = os.environ["LOCAL_RANK"] == "0"  # all ranks have the same
    parts = list(_parts(request, device))
    left = [part for part in parts if part.name in request.pending]
    parts = left or parts
    total = sum(part.share for part in parts)
    spent = 0.0
    for index, part in enumerate(parts):
        first, share = spent / total, part.share / total
        found = part.run(_keep_going(part.name, heartbeat, first, share, request.budget_s))
        spent += part.share
        pending = tuple(later.name for later in parts[index + 1 :])
        merged = {name: (*getattr(result, name), *timings) for name, timings in found.items()}
        result = result.model_copy(update={**merged, "pending": pending})
        if writes:
            write_whole(result_file, result.model_dump_json())
    if not parts:
        result = result.model_copy(update={"reference_s": _reference_s(device)})
        if writes:
            write_whole(result_file, result.model_dump_json())
    dist.barrier()
    dist.destroy_process_group()


def _parts(request: CalibrationRequest, device: torch.device) -> Iterator[_Part]:
    """What the request names."""
    n, small = request.num_ranks, request.small_grid
    on = f"on {n} {device.type} rank{'s' if n > 1 else ''}"
    if request.num_nodes > 1:
        on += f" of each of {request.num_nodes} nodes"

    def layers(shape: ShapeRequest, going: KeepGoing) -> Found:
        allow_tf32(allowed=shape.dtype == "tf32")
        reference = Reference(device)
        found = time_layers(shape, n, device, reference.beside(going))
        return {"layers": _stamped(found, reference)}

    def kernels(dtype: TimedDtype, going: KeepGoing) -> Found:
        allow_tf32(allowed=dtype == "tf32")
        reference = Reference(device)
        found = time_kernels(dtype, n, device, reference.beside(going), small=small)
        return {"kernels": _stamped(found, reference)}

    def links(going: KeepGoing) -> Found:
        timed = time_links(
            request.communication, n * request.num_nodes, device, going, ranks_per_node=n, budget_s=request.budget_s
        )
        return {"communication": tuple(timed)}

    def copies(going: KeepGoing) -> Found:
        return {"host_copies": tuple(time_host_copies(n, device, going))}

    def overlap(going: KeepGoing) -> Found:
        return {"overlaps": tuple(time_overlap(request.grid[0], n, device, going, small=small))}

    for shape in request.shapes:
        name = f"layers of {shape.model.name} in {shape.dtype}, microbatch {shape.microbatch_size}, {on}"
        yield _Part(name, 6 / len(request.shapes), partial(layers, shape))
    for dtype in request.grid:
        yield _Part(f"kernels in {dtype} {on}", 6 / len(request.grid), partial(kernels, dtype))
    if request.communication and n * request.num_nodes > 1:
        yield _Part(f"collectives and messages {on}", 3, links)
    if request.host_copies:
        yield _Part(f"copies between device and host {on}", 1, copies)
    if request.overlap and request.grid and n > 1:
        yield _Part(f"computing beside collectives {on}", 1, overlap)


def _stamped(timings: Iterable[_Timing], reference: Reference) -> tuple[_Timing, ...]:
    """The timings, and how fast the machine was meanwhile."""
    median_s = reference.median_s()
    return tuple(timing.model_copy(update={"reference_s": median_s}) for timing in timings)


def _reference_s(device: torch.device) -> float | None:
    """How fast the machine is now."""
    reference = Reference(device)
    for _ in range(_REFERENCE_ROUNDS):
        reference.time_once()
    return reference.median_s()


def _keep_going(name: str, heartbeat: Heartbeat, first: float, share: float, budget_s: float) -> KeepGoing:
    """Whether to do another round of one part, the same on all ranks; tells the heartbeat.

    Args:
        name: What is timed.
        heartbeat: Is told.
        first: Part of the budget that is spent.
        share: This one's.
        budget_s: The whole.
    """
    allowed_s = budget_s * share
    started_s = time.perf_counter()

    def keep_going(done: int) -> bool:
        elapsed_s = time.perf_counter() - started_s
        percent = 100 * (first + share * min(1.0, elapsed_s / allowed_s))
        heartbeat.beat(RankState.RUNNING, f"timing {name}", int(percent))
        overdue = elapsed_s >= (allowed_s if done >= _LEAST_ROUNDS else _MOST_OVERRUN * allowed_s)
        enough = done >= _MOST_ROUNDS or (done >= 1 and overdue)
        return not of_rank_0(enough)

    return keep_going


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(sys.argv[1:])
