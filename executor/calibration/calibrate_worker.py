"""One rank of a calibration, started by torchrun: ``calibrate_worker REQUEST.json RESULT.json``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.calibration.communication_timing import time_host_copies, time_links, time_overlap
from executor.calibration.kernel_timing import time_kernels
from executor.calibration.layer_timing import time_layers
from executor.calibration.timing import Bench, KeepGoing, ReferenceMatmul, of_rank_0
from executor.distributed.precision import allow_tf32
from executor.launch.rank import StopRequest, live_as_rank
from executor.launch.watchdog import Heartbeat, RankState
from executor.profiling.memory import context_bytes
from executor.profiling.results import environment
from executor.worker import start_rank, use_device
from simplan.cost.calibration.format import Calibration, CalibrationRequest, ShapeRequest, TimedDtype
from simplan.io import write_whole

_MIN_ROUNDS = 5
_MAX_OVERRUN = 3  # times the share of the budget, for the first rounds
_MAX_ROUNDS = 200
_REFERENCE_ROUNDS = 25


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of a calibration.

    Attributes:
        name: Name for progress and for ``pending``, the same in every calibration.
        field: Field of ``Calibration`` that gets the timings.
        weight: Share of the budget, relative to the other parts.
        dtype: Precision of a part that computes, which is timed with the reference matmul; None for other parts.
    """

    name: str
    field: str
    weight: float
    run: Callable[[Bench], Sequence[Any]]
    dtype: TimedDtype | None = None

    def timings(self, bench: Bench) -> Sequence[Any]:
        """Measures, with the machine's speed during the measurement where the part computes."""
        if self.dtype is None:
            return self.run(bench)
        allow_tf32(allowed=self.dtype == "tf32")
        reference = ReferenceMatmul(bench.device)
        timings = self.run(Bench(bench.num_ranks, bench.device, reference.before_rounds(bench.keep_going)))
        median_s = reference.median_s()
        return [timing.model_copy(update={"reference_s": median_s}) for timing in timings]


def main(argv: list[str]) -> None:
    """Measures the request in ``argv[0]``; a rank of each node writes ``argv[1]`` after every part."""
    request_file, result_file = Path(argv[0]), Path(argv[1])
    live_as_rank(request_file.parent, lambda heartbeat, stop, rank: _run(request_file, result_file, heartbeat, stop))


def _run(request_file: Path, result_file: Path, heartbeat: Heartbeat, stop: StopRequest) -> None:
    del stop  # nothing to keep that is not written already
    request = CalibrationRequest.model_validate_json(request_file.read_bytes())
    device = use_device(request.device, request.num_ranks)
    start_rank(device, request.budget_s + 60)
    dist.barrier()  # so that context_bytes includes the connections
    result = Calibration(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment(request.num_ranks, cuda=device.type == "cuda"),
        device_kind="gpu" if device.type == "cuda" else "cpu",
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(device),
        context_bytes=context_bytes(device),
    )
    parts = list(_parts(request, device))
    parts = [part for part in parts if part.name in request.pending] or parts
    total = sum(part.weight for part in parts)
    spent = 0.0
    for index, part in enumerate(parts):
        keep_going = _keep_going(part, heartbeat, spent / total, part.weight / total, request.budget_s)
        timings = part.timings(Bench(request.num_ranks, device, keep_going))
        spent += part.weight
        pending = tuple(later.name for later in parts[index + 1 :])
        result = result.model_copy(update={part.field: (*getattr(result, part.field), *timings), "pending": pending})
        _write(result_file, result)
    if not parts:
        reference = ReferenceMatmul(device)
        for _ in range(_REFERENCE_ROUNDS):
            reference.time_once()
        _write(result_file, result.model_copy(update={"reference_s": reference.median_s()}))
    dist.barrier()
    dist.destroy_process_group()


def _write(file: Path, result: Calibration) -> None:
    """Writes the result, which all ranks have, on one rank of each node."""
    if os.environ["LOCAL_RANK"] == "0":
        write_whole(file, result.model_dump_json())


def _parts(request: CalibrationRequest, device: torch.device) -> Iterator[_Part]:
    n, small = request.num_ranks, request.small_grid
    on = f"on {n} {device.type} rank{'s' if n > 1 else ''}"
    if request.num_nodes > 1:
        on += f" of each of {request.num_nodes} nodes"
    for shape in request.shapes:
        name = f"layers of {shape.model.name} in {shape.dtype}, microbatch {shape.microbatch_size}, {on}"
        run = partial(time_layers if shape.model.captured is None else _time_captured, shape)
        yield _Part(name, "layers", 6 / len(request.shapes), run, shape.dtype)
    for dtype in request.grid:
        kernels = partial(time_kernels, dtype, small=small)
        yield _Part(f"kernels in {dtype} {on}", "kernels", 6 / len(request.grid), kernels, dtype)
    if request.communication and n * request.num_nodes > 1:
        links = partial(time_links, request.communication, num_nodes=request.num_nodes, budget_s=request.budget_s)
        yield _Part(f"collectives and P2P sends {on}", "communication", 3, links)
    if request.host_copies:
        yield _Part(f"copies between device and host {on}", "host_copies", 1, time_host_copies)
    if request.overlap and request.grid and n > 1:
        overlap = partial(time_overlap, request.grid[0], small=small)
        yield _Part(f"matmuls overlapped with collectives {on}", "overlaps", 1, overlap)


def _time_captured(shape: ShapeRequest, bench: Bench) -> Sequence[Any]:
    from executor.calibration.captured_timing import time_captured  # the user's code: only where it is asked for

    return time_captured(shape, bench)


def _keep_going(part: _Part, heartbeat: Heartbeat, first: float, share: float, budget_s: float) -> KeepGoing:
    """Decides about another round of a part, the same on all ranks; reports progress by the heartbeat.

    Args:
        first: Fraction of the budget that is spent.
        share: Fraction of the budget for this part.
    """
    allowed_s = budget_s * share
    started_s = time.perf_counter()

    def keep_going(done: int) -> bool:
        elapsed_s = time.perf_counter() - started_s
        percent = 100 * (first + share * min(1.0, elapsed_s / allowed_s))
        heartbeat.beat(RankState.RUNNING, f"timing {part.name}", int(percent))
        overdue = elapsed_s >= (allowed_s if done >= _MIN_ROUNDS else _MAX_OVERRUN * allowed_s)
        return not of_rank_0(done >= _MAX_ROUNDS or (done >= 1 and overdue))

    return keep_going


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(sys.argv[1:])
