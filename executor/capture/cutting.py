"""Layers of a model: where its operators are cut, from the modules that ran them.

Repeated modules are blocks: children of a list or a sequence of which at least two have the same class, each called
once. Modules without modules inside, such as ``nn.Linear``, are no blocks. A list whose blocks hold nearly all of their
weights in lists of their own is cut there. Operators before the first block make the first layer, those after the last
block make the head, and operators between two blocks belong to the one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from executor.capture.trace import ModuleCall, Trace
from simplan.errors import Problem, SpecError

_LEAST = 3  # layers: a pipeline has a first, a middle and a last one
_MOST = 0.9  # of the weights of a list's blocks


class Cut(NamedTuple):
    """One layer: the operators ``begin`` to ``end``, without the last, and the module that it stands for.

    Attributes:
        starts: See ``CapturedModel.starts``.
    """

    module: str
    begin: int
    end: int
    starts: str


def cut(module: nn.Module, trace: Trace) -> tuple[Cut, ...]:
    """Layers of a model, in order."""
    calls = Counter(call.module for call in trace.calls)
    once = {call.module: call for call in trace.calls if calls[call.module] == 1}
    blocks = sorted((once[name] for name in _blocks(module, "", once)), key=lambda call: call.begin)
    blocks = [call for call in blocks if call.end > call.begin]
    num_operators = len(trace.operators)
    cuts = _between(blocks, num_operators) if blocks else []
    return tuple(cuts) if len(cuts) >= _LEAST else _ends_apart(module, trace)


def _between(blocks: Sequence[ModuleCall], num_operators: int) -> list[Cut]:
    first, last = blocks[0], blocks[-1]
    cuts = [Cut("", 0, first.begin, "")] if first.begin else []
    for block, after in pairwise(blocks):
        cuts.append(Cut(block.module, block.begin, after.begin, f"enter {block.module}"))
    cuts.append(Cut(last.module, last.begin, last.end, f"enter {last.module}"))
    if last.end < num_operators:
        cuts.append(Cut("", last.end, num_operators, f"leave {last.module}"))
    return cuts


def _ends_apart(module: nn.Module, trace: Trace) -> tuple[Cut, ...]:
    """Layers of a model without blocks: its first module with weights, its last one and the loss, and all between."""
    weighted = {name for name, part in module.named_modules() if [*part.parameters(recurse=False)]}
    calls = [call for call in trace.calls if call.module in weighted and call.end > call.begin]
    num_operators = len(trace.operators)
    first = calls[0].end if calls else 1
    final = max(calls, key=lambda call: call.begin, default=None)
    last = 0 if final is None else final.begin
    places = "", "", ""
    if final is not None and last > first:
        places = "", f"leave {calls[0].module}", f"enter {final.module}"
    else:
        first, last = 1, num_operators - 1
    if last <= first:
        rule = f"has {num_operators} operators, of which layers cannot be made"
        raise SpecError(Problem(field="module", rule=rule, fix="capture a larger part of the model"))
    spans = (0, first), (first, last), (last, num_operators)
    return tuple(Cut("", *span, place) for span, place in zip(spans, places, strict=True))


def _blocks(module: nn.Module, path: str, once: dict[str, ModuleCall]) -> Iterator[str]:
    """Paths of the blocks inside of a module."""
    for name, child in module.named_children():
        inside = f"{path}.{name}" if path else name
        if _is_list(child, inside, once) and not _holds_lists(child):
            yield from (f"{inside}.{number}" for number, _ in child.named_children() if f"{inside}.{number}" in once)
        else:
            yield from _blocks(child, inside, once)


def _is_list(module: nn.Module, path: str, once: dict[str, ModuleCall]) -> bool:
    """True for a list or a sequence of blocks."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    return _repeats(child for name, child in module.named_children() if f"{path}.{name}" in once)


def _holds_lists(module: nn.Module) -> bool:
    """True if the children of a list are lists of blocks themselves."""
    inner = 0
    for child in module.children():
        for part in child.modules():
            if isinstance(part, nn.ModuleList | nn.Sequential) and _repeats(part.children()):
                inner += _num_weights(part)
                break
    return inner > _MOST * _num_weights(module)


def _repeats(modules: Iterable[nn.Module]) -> bool:
    """True if two have the same class, and weights in modules of their own."""
    kinds = Counter(type(module) for module in modules if _num_weights(module) and any(True for _ in module.children()))
    return any(number > 1 for number in kinds.values())


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
