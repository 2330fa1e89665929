"""FSDP units of a captured model: which of its blocks torch gathers by themselves, by class or by size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from simplan.model.captured.facts import CapturedModel
from simplan.model.layer import LayerSpec

FsdpUnits = tuple[str, ...] | int | None
"""Names of classes, or the least number of parameters; None for all blocks (``ParallelPlan.fsdp_units``)."""


def blocks_in_root(model: CapturedModel, layers: Sequence[LayerSpec], units: FsdpUnits) -> frozenset[int]:
    """Indices of layers that are blocks and no units, so that FSDP's root unit has their weights.

    By class as torch's ``transformer_auto_wrap_policy``, by size as its ``size_based_auto_wrap_policy``.
    """
    blocks = [index for index, layer in enumerate(layers) if not layer.in_root]
    match units:
        case None:
            return frozenset()
        case int():
            return frozenset(index for index in blocks if _num_own(layers[index]) < units)
        case _:
            return frozenset(index for index in blocks if model.class_of(index) not in units)


def _num_own(layer: LayerSpec) -> int:
    return sum(parameter.num_elements for parameter in layer.parameters if not parameter.in_root)


def other_large_modules(model: CapturedModel, layers: Sequence[LayerSpec], size: int) -> Iterator[str]:
    """Names of modules of at least so many parameters that are no blocks: inside of one, or outside of all."""
    seen = set()
    for index, layer in enumerate(layers):
        path = model.module_of(index)
        totals: Counter[str] = Counter()
        for parameter in layer.parameters:
            *parents, _ = parameter.name.split(".")
            own = path if path and not parameter.in_root else ""
            for end in range(1, len(parents) + 1):
                totals[".".join([own, *parents[:end]] if own else parents[:end])] += parameter.num_elements
        for name, number in totals.items():
            if number >= size and name not in seen and not any(block.startswith(f"{name}.") for block in model.modules):
                seen.add(name)
                yield name
