"""One rank of ``executor_speed``: steps of the executor, with and without recording, and of a hand-written loop.

A round runs every variant twice, the second time in reverse order, and starts with a different variant than the round
before. ``times<rank>.json`` contains wall time and CPU time of the process, in seconds, by variant and step. Where
permitted (root on Linux), ranks get scheduling priority over all other sessions.

The hand-written loops use the executor's modules, loss, data and fused AdamW. The rest is torch's: DDP, FSDP2 and
``torch.distributed.pipelining``, as in their tutorials. Tensor parallelism uses torch's own modules and loss.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.torch_llama import tensor_parallel_llama
from executor.distributed.mesh import ParallelDims
from executor.launch.rank import live_as_rank
from executor.launch.watchdog import Heartbeat, RankState
from executor.models.model import Stage, build_stage
from executor.profiling.recorder import Recorder, make_clock
from executor.train.loss import cross_entropy
from executor.train.trainer import Trainer
from executor.worker import start_rank, use_device
from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan, RankMapping
from simplan.program.action import Action, format_table
from simplan.program.tables.plan_table import plan_table
from simplan.runs.measurement import IssuedKind
from simplan.runs.run_spec import RunSpec
from simplan.training import TrainingSpec

_MICROBATCHES = 4
_MICROBATCH_SIZE = 2
_WARMUP_ROUNDS = 2
_MIN_ROUNDS, _MAX_ROUNDS = 6, 40
_BUDGET_S = 30.0
_TIMEOUT_S = 300.0
_LEARNING_RATE = 1e-3
MODEL = ModelSpec(
    name="small",
    family="llama",
    num_hidden_layers=4,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=688,
    vocab_size=2048,
    seq_len=128,
)

Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True, slots=True)
class SpeedCase:
    """One comparison.

    Attributes:
        plan: Plan that the executor runs.
        against: Description of the hand-written loop.
    """

    plan: ParallelPlan
    against: str


CASES = {
    "one device": SpeedCase(ParallelPlan(microbatch_size=_MICROBATCH_SIZE), "a plain loop"),
    "2 ranks, DDP": SpeedCase(
        ParallelPlan(dp_replicate=2, microbatch_size=_MICROBATCH_SIZE), "DistributedDataParallel"
    ),
    "2 ranks, FSDP": SpeedCase(
        ParallelPlan(dp_shard=2, microbatch_size=_MICROBATCH_SIZE), "fully_shard of every layer"
    ),
    "2 ranks, pipeline": SpeedCase(
        ParallelPlan(pp=2, schedule="1f1b", microbatch_size=_MICROBATCH_SIZE), "Schedule1F1B of two PipelineStages"
    ),
    "2 ranks, tensor parallelism": SpeedCase(
        ParallelPlan(tp=2, sequence_parallel=True, microbatch_size=_MICROBATCH_SIZE),
        "parallelize_module and loss_parallel",
    ),
}


class _SilentRecorder(Recorder):
    """Recorder that records nothing."""

    def begin_step(self, step: int) -> None:
        pass

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        self._current = action
        yield

    def open(self, action: Action) -> None:
        self._current = action

    def close(self) -> None:
        pass

    def begin(self, action: Action) -> None:
        self._current = action

    def end(self, action: Action) -> None:
        pass

    def issue(self, kind: IssuedKind, ranks: tuple[int, ...], num_bytes: int, action: Action | None = None) -> int:
        return 0

    def complete(self, handle: int) -> None:
        pass


def _job(case: SpeedCase) -> RunSpec:
    plan = case.plan
    num_layers, num_stages = len(MODEL.layers), plan.num_stages
    return RunSpec(
        name="executor-speed",
        model=MODEL,
        training=TrainingSpec(
            global_batch_size=_MICROBATCHES * _MICROBATCH_SIZE * plan.dp, precision="fp32", optimizer="adamw"
        ),
        plan=plan,
        software=catalog.software("torch"),
        boundaries=tuple(round(stage * num_layers / num_stages) for stage in range(num_stages + 1)),
        table=tuple(tuple(row) for row in format_table(plan_table(plan, _MICROBATCHES))),
        device="cpu",
        timeout_s=_TIMEOUT_S,
    )


def _plain(job: RunSpec, device: torch.device) -> Step:
    """Step of the hand-written training loop."""
    if job.plan.pp > 1:
        return _plain_pipeline(job, device)
    if job.plan.tp > 1:
        return _plain_tensor_parallel(job, device)
    model: nn.Module = build_stage(MODEL, range(len(MODEL.layers)), torch.float32, device, job.seed)
    assert isinstance(model, Stage)
    if job.plan.dp_shard > 1:
        mesh = init_device_mesh(device.type, (job.plan.dp_shard,))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif job.plan.dp_replicate > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        parts = list(zip(tokens.chunk(_MICROBATCHES), targets.chunk(_MICROBATCHES), strict=True))
        for number, (x, y) in enumerate(parts):
            last = number == len(parts) - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = last  # what no_sync sets
            loss = cross_entropy(model(x), y) / _MICROBATCHES
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _plain_pipeline(job: RunSpec, device: torch.device) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    module = build_stage(MODEL, job.assignment.layer_range(rank), torch.float32, device, job.seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=_LEARNING_RATE, fused=True)
    stage = PipelineStage(module, rank, job.plan.pp, device)
    schedule = Schedule1F1B(stage, _MICROBATCHES, loss_fn=cross_entropy)

    def step(tokens: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets)
        optimizer.step()

    return step


def _plain_tensor_parallel(job: RunSpec, device: torch.device) -> Step:
    model = tensor_parallel_llama(MODEL, init_device_mesh(device.type, (job.plan.tp,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        for x, y in zip(tokens.chunk(_MICROBATCHES), targets.chunk(_MICROBATCHES), strict=True):
            with loss_parallel():
                loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / _MICROBATCHES
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _before_others() -> None:
    """Raise the scheduling priority of the session (``man 7 sched``, autogroups); cores are shared among sessions."""
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("-20")


def _measured(name: str, out_dir: Path, heartbeat: Heartbeat, rank: int) -> None:
    _before_others()
    job = _job(CASES[name])
    device = use_device("cpu", len(os.sched_getaffinity(0)))  # one core each, also for a single rank
    start_rank(device, _TIMEOUT_S)
    heartbeat.beat(RankState.RUNNING, "building the model", 0)
    table = job.parsed_table()
    row = table[RankMapping.of(job.plan).place(rank).pp]

    def executor(kind: type[Recorder]) -> tuple[Trainer, Step]:
        recorder = kind(row, make_clock(device), heartbeat)
        trainer = Trainer(job, rank, device, ParallelDims.of(job, rank, recorder), recorder)

        def step(tokens: Tensor, targets: Tensor) -> None:
            recorder.begin_step(0)
            trainer.step(tokens, targets)
            recorder.end_step()

        return trainer, step

    trainer, recorded = executor(Recorder)
    ways = {"executor": recorded, "silent": executor(_SilentRecorder)[1], "plain": _plain(job, device)}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    batch: Any = trainer.batch(0)
    end_s = time.perf_counter() + _BUDGET_S
    for number in range(_WARMUP_ROUNDS + _MAX_ROUNDS):
        over = torch.tensor(number >= _WARMUP_ROUNDS + _MIN_ROUNDS and time.perf_counter() > end_s)
        dist.broadcast(over, 0)
        if over:
            break
        first = number % len(ways)
        order = [*list(ways)[first:], *list(ways)[:first]]
        for way in [*order, *reversed(order)]:  # twice, so that speed drift affects all variants equally
            heartbeat.beat(RankState.RUNNING, way, number)
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            ways[way](*batch)
            if number >= _WARMUP_ROUNDS:
                times[way].append((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
    (out_dir / f"times{rank}.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    live_as_rank(
        Path(sys.argv[2]), lambda heartbeat, stop, rank: _measured(sys.argv[1], Path(sys.argv[2]), heartbeat, rank)
    )
