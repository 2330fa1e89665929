"""One rank of a calibration: ``python -m executor.calibrate_worker REQUEST.json RESULT.json``, started by torchrun."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from executor.environment import environment
from executor.heartbeat import Heartbeat, RankState
from executor.host_timing import time_host_copies
from executor.layer_timing import time_layers
from executor.link_timing import time_links
from executor.matmul_timing import time_matmuls
from executor.memory import context_bytes
from executor.rank import live_as_rank
from executor.worker import start_rank, use_device
from simplan.cost.calibration import (
    Calibration,
    CalibrationRequest,
    CommunicationTiming,
    HostCopyTiming,
    LayerTiming,
    MatmulTiming,
    TimedDtype,
)

__all__ = ["main"]

_LEAST_ROUNDS = 5
_MOST_OVERRUN = 3  # times the share of the budget that the least rounds may take
_MOST_ROUNDS = 200
_SHARES = {"layers": 0.6, "matmuls": 0.1, "links": 0.3, "copies": 0.1}


def main(argv: list[str]) -> None:
    """Measures what the request in ``argv[0]`` names; rank 0 writes ``argv[1]``."""
    request_file, result_file = Path(argv[0]), Path(argv[1])
    live_as_rank(request_file.parent, lambda heartbeat, rank: _run(request_file, result_file, heartbeat, rank))


def _run(request_file: Path, result_file: Path, heartbeat: Heartbeat, rank: int) -> None:
    request = CalibrationRequest.model_validate_json(request_file.read_bytes())
    num_ranks = request.num_ranks
    device = use_device(request.device, num_ranks)
    start_rank(device, request.budget_s + 60)
    dist.barrier()  # so that the connections count
    context = context_bytes(device)
    layers: list[LayerTiming] = []
    matmuls: list[MatmulTiming] = []
    links: list[CommunicationTiming] = []
    copies: list[HostCopyTiming] = []
    with_links = bool(request.communication) and num_ranks > 1
    wanted = {
        "layers": bool(request.shapes),
        "matmuls": request.matmuls,
        "links": with_links,
        "copies": request.host_copies,
    }
    total = sum(_SHARES[part] for part, is_wanted in wanted.items() if is_wanted) or 1.0
    spent = 0.0

    def budget(what: str, share: float) -> Callable[[int], bool]:
        """Whether to do another round of one part; tells the heartbeat."""
        nonlocal spent
        first_percent, percent = 100 * spent / total, 100 * share / total
        spent += share
        allowed_s = request.budget_s * share / total
        started_s = time.perf_counter()

        def keep_going(done: int) -> bool:
            elapsed_s = time.perf_counter() - started_s
            heartbeat.beat(
                RankState.RUNNING, f"timing {what}", int(first_percent + percent * min(1.0, elapsed_s / allowed_s))
            )
            overdue = elapsed_s >= (allowed_s if done >= _LEAST_ROUNDS else _MOST_OVERRUN * allowed_s)
            enough = done >= _MOST_ROUNDS or (done >= 1 and overdue)
            return not _of_rank_0(enough)

        return keep_going

    for shape in request.shapes:
        _compute_in(shape.dtype)
        going = budget(f"layers of {shape.model.name}", _SHARES["layers"] / len(request.shapes))
        layers += time_layers(shape, num_ranks, device, going)
    if request.matmuls:
        # products in fp8 are timed with the layers that they are in
        dtypes = sorted({"bf16" if shape.dtype == "fp8" else shape.dtype for shape in request.shapes}) or ["fp32"]
        for dtype in dtypes:
            _compute_in(dtype)
            going = budget(f"matmuls in {dtype}", _SHARES["matmuls"] / len(dtypes))
            matmuls += time_matmuls(dtype, num_ranks, device, going)
    if with_links:
        going = budget("collectives and sends", _SHARES["links"])
        links += time_links(request.communication, num_ranks, device, going)
    if request.host_copies:
        going = budget("copies between device and host", _SHARES["copies"])
        copies += time_host_copies(num_ranks, device, going)
    if rank == 0:
        result = Calibration(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            environment=environment(num_ranks, cuda=device.type == "cuda"),
            device_kind="gpu" if device.type == "cuda" else "cpu",
            num_cores=len(os.sched_getaffinity(0)),
            memory_bytes=_memory_bytes(device),
            context_bytes=context,
            layers=tuple(layers),
            matmuls=tuple(matmuls),
            communication=tuple(links),
            host_copies=tuple(copies),
        )
        result_file.write_text(result.model_dump_json())
    dist.barrier()
    dist.destroy_process_group()


def _compute_in(dtype: TimedDtype) -> None:
    """tf32 is fp32 whose matrix products may round their factors."""
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")


def _of_rank_0(value: bool) -> bool:
    """What rank 0 says, so that all ranks do the same number of rounds."""
    flag = [value]
    dist.broadcast_object_list(flag, src=0)
    return flag[0]


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(sys.argv[1:])
