"""One of two gloo ranks that load a checkpoint of transformers under FSDP2: bytes that torch allocates at its peak.

``python loading_ranks.py FOLDER RANK``: the folder has ``model``, a Llama of 16 bits, and gets ``rank0.json`` and
``rank1.json``: by way of loading, the peak.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import barrier, broadcast, destroy_process_group, get_rank, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.executor.models.layer_runs import traced

NUM_RANKS = 2


def sharded(model: Any) -> Any:
    """The model with a unit for each block, for the embedding and for the head."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for unit in (*model.model.layers, model.model.embed_tokens, model.lm_head, model):
        fully_shard(unit, mesh=mesh)
    return model


def every_rank_loads(folder: Path) -> Any:
    """Weights become FP32 on the CPU before they are sharded, as accelerate does it for trained ones."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32)
    return sharded(model)


def rank_0_loads(folder: Path) -> Any:
    """Others have meta tensors, and rank 0 broadcasts tensor by tensor, as accelerate's fsdp2_load_full_state_dict."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    full = {}
    if get_rank() == 0:
        full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    shards = {}
    for name, shard in sharded(model).state_dict().items():
        tensor = full[name] if get_rank() == 0 else torch.empty(shard.size())
        broadcast(tensor, 0)
        shards[name] = distribute_tensor(tensor, shard.device_mesh, shard.placements)
        del tensor
        barrier()  # gloo's threads hold what they sent for a moment longer
    model.load_state_dict(shards, assign=True)
    return model


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    peaks = {}
    for load in (every_rank_loads, rank_0_loads):
        _, _, peaks[load.__name__] = traced(partial(load, folder / "model"))
    (folder / f"rank{rank}.json").write_text(json.dumps(peaks))
    destroy_process_group()


if __name__ == "__main__":
    main()
