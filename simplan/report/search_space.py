"""Fields of ``search:``, and the defaults of a search."""

from __future__ import annotations

from simplan.search.enumeration import DEFAULT_SCHEDULES, LONG_SEQUENCE
from simplan.search.space import OBJECTIVES, RANGES, SearchSpace

__all__ = ["search_space"]

_DEFAULTS = {
    "tp": (
        "every divisor of the attention heads up to the devices of a node",
        "must also divide key-value heads, MLP and any vocabulary that is not padded; 1 for mixtures of experts",
    ),
    "sequence_parallel": ("true, false", "where tp > 1"),
    "cp": (f"1, 2, 4, 8 from {LONG_SEQUENCE:,} tokens on, else 1", ""),
    "cp_comm": ("ring; on CPU ranks all_gather", "where cp > 1"),
    "ep": ("every divisor of the experts that divides the ranks of a stage", "mixtures of experts"),
    "pp": ("every divisor of the devices up to the number of layers", ""),
    "schedule": (", ".join(DEFAULT_SCHEDULES), "where pp > 1"),
    "virtual_stages": ("every number that leaves each stage a layer", "where pp > 1; those of the schedule"),
    "dp_replicate": ("every factorization of the rest into", "dp_replicate x dp_shard x tp x cp x pp = devices"),
    "dp_shard": ("dp_replicate x dp_shard", ""),
    "zero_stage": ("0, 1, 2, 3", "where there are several shards; 0 only where dp_shard = 1"),
    "reshard_after_forward": ("true, false", "at zero_stage 3; ZeRO-3 that does not reshard is ZeRO-2, listed as that"),
    "microbatch_size": ("every divisor of the local batch", "global_batch_size / (dp_replicate x dp_shard)"),
    "recompute": ("none, selective, full", ""),
    "recompute_modules": (
        "core_attn alone",
        "of recompute selective: lists of modules to recompute together, where the software has them",
    ),
    "grad_sync": (
        "step, microbatch at zero_stage 2 and 3, else step",
        "where pp = 1 and a step has several microbatches",
    ),
    "objective": ("step_time", ", ".join(OBJECTIVES)),
    "objectives": ("", "two objectives: Pareto front, ranked by the first"),
    "top": ("5", "plans to rank"),
    "max_memory_fraction": (
        "1",
        "maximum fraction of the device memory of a plan; at 1 a plan fits, but not tightly",
    ),
    "max_step_time_s": ("", "deadline of a step"),
    "dollars_per_device_hour": ("", "your price, for the objective cost"),
    "token_budget": ("", "tokens to train on, for the objective cost"),
    "num_devices": ("the cluster's; with the objective num_devices its halves too", "numbers of devices to compare"),
    "recompute_layers": (
        "least",
        "plans that need full recomputation, also with the fewest blocks per stage that fit; or all: only with all",
    ),
    "tp_across_nodes": ("false", "tensor-parallel groups may span nodes"),
}


def search_space() -> list[dict[str, str]]:
    """Every key with its default and its meaning, ranges of the plan first.

    The layer split is not a range: each plan has the one that ``predict`` gives it.
    """
    others = [name for name in SearchSpace.model_fields if name not in RANGES]
    return [
        {"name": name, "default": _DEFAULTS[name][0], "where, or what for": _DEFAULTS[name][1]}
        for name in (*RANGES, *others)
    ]
