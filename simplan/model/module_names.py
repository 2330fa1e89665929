"""Names of parts of a model, by which adapters and frozen weights are chosen.

A name is ``embedding`` or ``head``; ``blocks``, one block (``blocks.3``) or several (``blocks.0-15``); or a part of all
blocks: a matrix (``q``), a group of them (``attention``), or ``norms``. A part of some blocks has both words:
``blocks.0-15.attention``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from simplan.model.kernel import Gemm
from simplan.model.layer import LayerKind, LayerSpec
from simplan.model.operator import Role

_NAME = re.compile(r"(?:(embedding|head)|blocks(?:\.(\d{1,5})(?:-(\d{1,5}))?)?(?:\.(\w[\w-]*))?|(\w[\w-]*))")

NORMS = "norms"
"""Name of all norms of a block."""


@dataclass(frozen=True, slots=True)
class PartName:
    """A part of a model.

    Attributes:
        kind: Kind of the layers.
        first, last: First and last block; ``last`` is None for all from ``first`` on.
        inside: Name of what is inside of them; empty for whole layers.
    """

    kind: LayerKind
    first: int = 0
    last: int | None = None
    inside: str = ""

    def has(self, kind: LayerKind, block: int) -> bool:
        """True for a layer of this kind, which is this block of the model."""
        return kind is self.kind and self.first <= block and (self.last is None or block <= self.last)


def part_name(text: str) -> PartName | None:
    """The part that a text names; None for a text that is no name."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    end, first, last, inside, alone = found.groups()
    if end is not None:
        return PartName(LayerKind(end))
    if alone is not None:
        return PartName(LayerKind.BLOCK, inside=alone)
    start = int(first or 0)
    return PartName(LayerKind.BLOCK, start, None if first is None else int(last or first), inside or "")


def matrices(layers: Iterable[LayerSpec]) -> Mapping[str, tuple[str, ...]]:
    """Matrices of a model's blocks, by the names that choose them.

    Each matrix has its own name. ``attention`` and ``mlp`` choose the matrices of these parts, ``all`` both, and
    ``qkv`` the matrices that make queries, keys and values. Routers and experts of a mixture have names of their own
    alone: they are tensors of several matrices, or no linear layers.
    """
    blocks = {layer.key: layer for layer in layers if layer.kind is LayerKind.BLOCK}.values()
    roles = {
        operator.kernel.name: operator.roles
        for layer in blocks
        for operator in layer.operators
        if isinstance(operator.kernel, Gemm)
    }

    def named(*wanted: Role) -> tuple[str, ...]:
        apart = {Role.EXPERTS, Role.GATING}
        return tuple(name for name, has in roles.items() if has.isdisjoint(apart) and not has.isdisjoint(wanted))

    by_rows = named(Role.ROW_PARALLEL)
    groups = {
        "all": named(Role.ATTENTION, Role.MLP),
        "attention": named(Role.ATTENTION),
        "qkv": tuple(name for name in named(Role.ATTENTION) if name not in by_rows),
        "mlp": named(Role.MLP),
    }
    return {name: (name,) for name in roles} | {word: names for word, names in groups.items() if names}


def modules(layers: Iterable[LayerSpec]) -> Mapping[str, frozenset[str]]:
    """Modules with weights in a model's blocks, by the names that choose them: ``matrices``, norms and others."""
    blocks = {layer.key: layer for layer in layers if layer.kind is LayerKind.BLOCK}.values()
    found = {word: frozenset(names) for word, names in matrices(blocks).items()}
    norms = {
        parameter.rpartition(".")[0]
        for layer in blocks
        for operator in layer.operators
        if Role.NORM in operator.roles
        for parameter in operator.parameters
    }
    others = {parameter.name.rpartition(".")[0] for layer in blocks for parameter in layer.parameters} - found.keys()
    return found | {name: frozenset({name}) for name in others} | ({NORMS: frozenset(norms)} if norms else {})


def numbered(layers: Sequence[LayerSpec]) -> list[tuple[LayerSpec, int]]:
    """Layers, each with the number of its block; 0 for other layers."""
    found, block = [], 0
    for layer in layers:
        found.append((layer, block if layer.kind is LayerKind.BLOCK else 0))
        block += layer.kind is LayerKind.BLOCK
    return found
