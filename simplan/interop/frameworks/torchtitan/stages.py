"""Pipelines of torchtitan: names of schedules, and which modules each stage has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved_1f1b",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}
"""Classes of torch.distributed.pipelining, as its ``get_schedule_class`` spells them, with simplan's names."""
OTHER_SCHEDULES = ("InterleavedZeroBubble", "LoopedBFS")
CUSTOM_SINGLE, CUSTOM_MULTI = "PipelineScheduleSingle", "PipelineScheduleMulti"
"""Schedules whose action table is in a CSV file, with one stage per rank and with several."""
_OF_ONE_STAGE = ("1F1B", "GPipe", CUSTOM_SINGLE)
_EMBEDDING = "tok_embeddings"
_ENDS = ("norm", "output", "lm_head")


def schedule_class(name: object) -> str | None:
    """Name of a schedule as torch spells it; torch ignores case. None if torch has no such schedule."""
    known = [*SCHEDULES, *OTHER_SCHEDULES, CUSTOM_SINGLE, CUSTOM_MULTI]
    return next((candidate for candidate in known if candidate.lower() == str(name).lower()), None)


def default_stages_per_rank(schedule: str) -> int:
    """Stages per rank, if neither modules nor blocks per stage are given."""
    return 1 if schedule in _OF_ONE_STAGE else 2


def generated_layers(num_layers: int, num_stages: int, first_less: int = 1, last_less: int = 1) -> tuple[int, ...]:
    """Blocks of each stage that torchtitan generates.

    Embedding and head count as blocks, and the first stages take the remainder of the division.

    Source: pytorch/torchtitan 0.3.0, torchtitan/distributed/pipeline_parallel.py, _generate_llm_fqn_per_model_part;
    the same since 2025 (6b11290c1, torchtitan/distributed/pipeline.py, generate_split_points).

    Raises:
        ValueError: There are too few blocks, which torchtitan refuses.
    """
    layers_per_stage, rest = divmod(num_layers + first_less + last_less, num_stages)
    if layers_per_stage < max(1, first_less, last_less):
        raise ValueError(f"{num_layers} blocks are too few for {num_stages} stages")
    layers = [layers_per_stage + (stage < rest) for stage in range(num_stages)]
    layers[0] -= first_less
    layers[-1] -= last_less
    return tuple(layers)


def generated_layers_of_2024(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage that torchtitan generated until the end of 2024.

    The stages after the first one take the remainder of the division.

    Source: pytorch/torchtitan at 3f20451, torchtitan/parallelisms/pipelining_utils.py, generate_split_points.

    Raises:
        ValueError: There are fewer blocks than stages, which torchtitan refuses.
    """
    layers_per_stage, rest = divmod(num_layers, num_stages)
    if layers_per_stage < 1:
        raise ValueError(f"{num_layers} blocks are too few for {num_stages} stages")
    layers = [layers_per_stage + (1 <= stage <= rest) for stage in range(num_stages)]
    layers[-1] = num_layers - sum(layers[:-1])
    return tuple(layers)


def layers_of_splits(splits: Sequence[str], num_layers: int) -> tuple[int, ...]:
    """Blocks of each stage by the modules at which stages begin, such as ``layers.4``.

    Raises:
        ValueError: A module is no block, or blocks are out of order.
    """
    begins = [0, *(_block(name) for name in splits), num_layers]
    layers = tuple(end - begin for begin, end in pairwise(begins))
    if any(number < 1 for number in layers):
        raise ValueError(f"the stages {', '.join(splits)} are no parts of {num_layers} blocks in their order")
    return layers


def layers_of_modules(parts: Sequence[Sequence[str]], num_layers: int) -> tuple[int, ...]:
    """Blocks of each stage by the names of its modules.

    Raises:
        ValueError: The modules are not all modules of the model, in their order.
    """
    names = [name for part in parts for name in part]
    blocks = [_block(name) for name in names if name not in (_EMBEDDING, *_ENDS)]
    if blocks != list(range(num_layers)):
        raise ValueError(f"the stages do not have the blocks 0 to {num_layers - 1}, once each and in order")
    if _EMBEDDING not in parts[0] or not all(name in parts[-1] for name in names if name in _ENDS):
        raise ValueError(f"{_EMBEDDING} is not in the first stage, or norm and head are not both in the last one")
    return tuple(sum(name not in (_EMBEDDING, *_ENDS) for name in part) for part in parts)


def modules_of_layers(layers: Sequence[int], head: str) -> list[list[str]]:
    """Names of the modules of each stage.

    >>> modules_of_layers((1, 2), "lm_head")
    [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'lm_head']]

    Args:
        layers: Blocks of each stage.
        head: Name of the output head: ``output`` up to version 0.2, ``lm_head`` since.
    """
    parts, first = [], 0
    for number in layers:
        parts.append([f"layers.{block}" for block in range(first, first + number)])
        first += number
    parts[0].insert(0, _EMBEDDING)
    parts[-1] += ["norm", head]
    return parts


def _block(name: Any) -> int:
    prefix, _, number = str(name).partition(".")
    if prefix != "layers" or not number.isdecimal():
        raise ValueError(f"{name} is no block of the model")
    return int(number)
