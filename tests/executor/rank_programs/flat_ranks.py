"""One of two ranks that train a small Llama under FSDP1: bytes of gradients and of states of AdamW.

``python flat_ranks.py FOLDER RANK``: the folder has ``cases.pt``, a list of (model, arguments of FSDP, defers), and
gets ``rank0.pt`` and ``rank1.pt``, for each case the counted bytes, or the sentence with which torch refuses it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import cross_entropy

from executor.dry_run.memory_tracker import StorageTracker
from executor.models.model import build_stage
from simplan.model.model import ModelSpec

NUM_RANKS, NUM_MICROBATCHES, MICROBATCH_SIZE = 2, 3, 2


class Counted(NamedTuple):
    """Bytes of a rank.

    Attributes:
        gradients: Storages of gradients after each microbatch.
        peaks: Largest bytes of all tensors during each microbatch's backward.
        states: States of AdamW.
    """

    gradients: tuple[int, ...]
    peaks: tuple[int, ...]
    states: int


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of storages, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def counted(spec: ModelSpec, arguments: dict[str, Any], *, defers: bool) -> Counted:
    """The second step of a run, under ``no_sync`` for all microbatches but the last one if it ``defers``."""
    tracker, device = StorageTracker(), torch.device("cpu")
    with tracker.counting():
        stage = build_stage(spec, range(len(spec.layers)), torch.float32, device, 0)
        policy = ModuleWrapPolicy({type(stage.layers["1"])})
        module = FullyShardedDataParallel(stage, auto_wrap_policy=policy, device_id=device, **arguments)
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], foreach=False)
        units = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(module)]
        flat = [unit.flat_param for unit in units if unit is not None]
        for _ in range(2):
            gradients, peaks = [], []
            for microbatch in range(NUM_MICROBATCHES):
                tokens = torch.zeros(MICROBATCH_SIZE, spec.seq_len, dtype=torch.long)
                with module.no_sync() if defers and microbatch + 1 < NUM_MICROBATCHES else nullcontext():
                    loss = cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())
                    tracker.peak_bytes = tracker.total_bytes
                    loss.backward()  # type: ignore[no-untyped-call]
                    del loss
                peaks.append(tracker.peak_bytes)
                gradients.append(storage_bytes(p.grad for p in (*flat, *module.parameters())))
            optimizer.step()
            optimizer.zero_grad()
    states = [state for of in optimizer.state.values() for key, state in of.items() if key != "step"]
    return Counted(tuple(gradients), tuple(peaks), sum(state.nbytes for state in states))


def main(folder: Path, rank: int) -> None:
    """All cases."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    found: list[Counted | str] = []
    for fields, arguments, defers in torch.load(folder / "cases.pt"):
        try:
            found.append(counted(ModelSpec(**fields), arguments, defers=defers))
        except ValueError as error:
            found.append(str(error))
    torch.save([tuple(each) if isinstance(each, Counted) else each for each in found], folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
