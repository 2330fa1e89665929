"""Which software profile stands for a framework and version, and what its figures mean: small tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from simplan.accuracy.schema import Framework, MemoryKind, RunPlan, RunSoftware

__all__ = ["STACKS", "Stack", "profile_name", "splits_experts"]


class Stack(NamedTuple):
    """What a framework brings that a published run does not print.

    Attributes:
        profiles: Name of the software profile, by the first year that it holds for.
        cp_comm: How its context parallelism exchanges keys and values.
        fp8_recipe: How it scales fp8 unless told otherwise.
        prints: What a peak is a figure of where the source prints "GB" only.
        printed_gb_bytes: How many bytes such a GB has.
        whole_experts_since: The first year in which tensor-parallel ranks have whole experts and route their own
            tokens (etp = 1); before, or where there is none, they split every expert.
        fused_attention: Whether attention is one kernel where a run does not say; None for as in the profile.
        combining: Profiles of plans with tensor parallelism and pipelines, or with sharded optimizer states alone,
            where that is another lineage of software than the rest.
        is_known: Its profiles are of itself; else they stand in for it, and what was fitted to them is not of it.
    """

    profiles: tuple[tuple[int, str], ...]
    cp_comm: Literal["ring", "all_gather", "a2a"] = "ring"
    fp8_recipe: Literal["tensorwise", "delayed"] = "tensorwise"
    prints: MemoryKind = "allocated"
    printed_gb_bytes: int = 2**30
    whole_experts_since: int | None = None
    fused_attention: bool | None = None
    combining: tuple[tuple[int, str], ...] = ()
    is_known: bool = True


_MEGATRON = (
    (0, "megatron-lm-2021"),
    (2022, "megatron-lm-2022"),
    (2023, "megatron-lm-2023"),
    (2024, "megatron-core"),
)

_FOLDED = 2024
"""When Megatron Core gave experts a mesh of their own (Liu et al. 2025, arXiv:2504.14960): the year is assumed."""

STACKS: Mapping[Framework, Stack] = MappingProxyType(
    {
        # sail-sg/zero-bubble-pipeline-parallelism, schedules.py: max_memory_allocated() // 1000000
        "megatron-lm": Stack(_MEGATRON, fp8_recipe="delayed", printed_gb_bytes=10**9, whole_experts_since=_FOLDED),
        "megatron-core": Stack(((0, "megatron-core"),), fp8_recipe="delayed", whole_experts_since=_FOLDED),
        # memory in use on the device, as the driver reports it (bigscience, chronicles-prequel.md)
        "megatron-deepspeed": Stack(((0, "megatron-deepspeed"), (2023, "megatron-deepspeed-2023")), prints="device"),
        "deepspeed": Stack(((0, "deepspeed-2021"), (2022, "megatron-deepspeed")), prints="device"),
        # one scale a tensor from its largest elements of earlier steps: TransformerEngine's recipe of the time. What
        # was printed before 2024 is in the README of NeMo-Framework-Launcher, up to its version 23.08 unchanged since
        # commits a2b2f83a and 9623fd7a (2022-09-06 and 07)
        "nemo": Stack(((0, "nemo-2022"), (2024, "nemo")), fp8_recipe="delayed", whole_experts_since=2025),
        # expert_tensor_parallel_size = 1 in its recipes, whose plans the tables are of
        "megatron-bridge": Stack(((0, "megatron-bridge"),), whole_experts_since=0),
        # torchtitan/config/job_config.py: context_parallel_rotate_method = allgather; metrics.py: max_reserved
        # and expert_tensor_parallel_degree = 1
        "torchtitan": Stack(
            ((0, "torchtitan"), (2025, "torchtitan-2025")),
            cp_comm="all_gather",
            prints="reserved",
            whole_experts_since=0,
        ),
        "llm-foundry": Stack(((0, "llm-foundry"),), fp8_recipe="delayed"),
        "maxtext": Stack(((0, "maxtext"),), cp_comm="all_gather", prints="device"),
        # Zhao et al. 2023 (arXiv:2304.11277), section 5.1: minGPT and Hugging Face's T5, where attention
        # is several eager operations
        "fsdp-paper": Stack(((0, "torch"),), prints="reserved", fused_attention=False, is_known=False),
        "gpipe": Stack(((0, "torch"),), is_known=False),
        # who combines tensor parallelism and pipelines, or deals out optimizer states, mostly builds on Megatron-LM
        "other": Stack(((0, "torch"),), whole_experts_since=_FOLDED, combining=_MEGATRON, is_known=False),
    }
)
"""By framework."""

_YEAR = re.compile(r"\b(?:19|20)[0-9]{2}\b")
_YEAR_AND_MONTH = re.compile(r"(?<![0-9.])(2[0-9])\.(?:0[1-9]|1[0-2])(?![0-9])")


def profile_name(software: RunSoftware, plan: RunPlan) -> str:
    """The name of the software profile.

    A version without a year, or year and month (23.08), is taken for a recent one, unless attention is not fused, which
    it was before 2022.
    """
    stack, year = STACKS[software.framework], _year(software)
    combines = (plan.tp > 1 and plan.pp > 1) or plan.zero_stage == 1
    profiles = stack.combining if stack.combining and combines else stack.profiles
    return [name for first, name in profiles if first <= year][-1]


def splits_experts(software: RunSoftware) -> bool:
    """Whether tensor-parallel ranks split every expert (etp = tp); else each has whole ones (etp = 1)."""
    since = STACKS[software.framework].whole_experts_since
    return since is None or _year(software) < since


def _year(software: RunSoftware) -> int:
    version = software.version or ""
    years = _YEAR.findall(version) or [f"20{year}" for year in _YEAR_AND_MONTH.findall(version)]
    return int(years[-1]) if years else 2021 if software.flash_attention is False else 9999
