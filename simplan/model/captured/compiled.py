"""Tensors that a compiled block of a captured model saves for backward.

torch.compile saves what costs least (torch 2.13, torch/_functorch/partitioners.py). Backward recomputes memory-bound
operators inside of its own kernels, as far as what they read is saved. Results of matmuls, convolutions, attention and
reductions are not recomputed, and neither are the operands of those in backward, which would have to be written to
memory. All else is a minimum cut between what cannot be recomputed and what backward reads. A tensor counts twice if
forward would not write it otherwise, and more the farther it is from backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from simplan.model.captured.facts import ComputedIn
from simplan.model.kernel import Kernel, Pointwise
from simplan.model.layer import LayerSpec, Operator, Tensor
from simplan.model.operator import saved_by

MAX_FUSED = 64
"""Most operators of one fused kernel (torch 2.13, torch/_inductor/config.py: max_fusion_size)."""
_SPLIT = 30
"""Operators in a row from which Inductor writes tensors in between (config.py: realize_opcount_threshold): bytes of
their kernels are too few, by 70 to 80 % for a scan over 12 tokens."""
_SPLIT_STD = 1.0
_WIDTHS: Mapping[ComputedIn, tuple[int, int]] = {"fp32": (4, 4), "bf16": (2, 2), "autocast": (2, 4)}
_REDUCES = 4  # times as few elements as are read: a reduction
_FARTHER = 1.1  # weight of a tensor for each operator between it and backward
_FARTHEST = 100
_UNWRITTEN = 2
_ENDLESS = 1 << 62


def compiled_blocks(layers: Sequence[LayerSpec], computed_in: ComputedIn) -> tuple[LayerSpec, ...]:
    """Layers of which those that are modules are compiled, one by one."""
    made = {layer: layer if layer.in_root else _compiled(layer, *_WIDTHS[computed_in]) for layer in {*layers}}
    return tuple(made[layer] for layer in layers)


def _compiled(layer: LayerSpec, activation_bytes: int, residual_bytes: int) -> LayerSpec:
    block = _Block(layer, activation_bytes, residual_bytes)
    saved = block.saved()
    operators = (
        replace(o, kernel=kernel, in_place=False, saves=tuple(block.read_by(o, saved)))
        for o, kernel in _priced(_fused_late(layer.operators), is_split=longest_run(layer) > _SPLIT)
    )
    return replace(layer, key=f"{layer.key},compiled", operators=tuple(operators), compiled=True)


def _priced(operators: Iterable[Operator], *, is_split: bool) -> Iterator[tuple[Operator, Kernel | None]]:
    """Operators with their kernels; fused ones of a long run have an interval as wide as what is not known."""
    for operator in operators:
        kernel = operator.kernel
        if is_split and isinstance(kernel, Pointwise) and is_fused(operator):
            kernel = replace(kernel, relative_std=_SPLIT_STD)
        yield operator, kernel


def _fused_late(operators: Sequence[Operator]) -> Iterator[Operator]:
    """Operators in an order in which those that are fused run just before the first kernel that needs them."""
    makers = {tensor.name: number for number, operator in enumerate(operators) for tensor in operator.makes}
    waiting: list[int] = []
    for number, operator in enumerate(operators):
        if is_fused(operator):
            waiting.append(number)
            continue
        needed = {number}
        for earlier in (number, *reversed(waiting)):
            if earlier in needed:
                needed.update(makers[name] for name in operators[earlier].reads if name in makers)
        yield from (operators[earlier] for earlier in waiting if earlier in needed)
        waiting = [earlier for earlier in waiting if earlier not in needed]
        yield operator
    yield from (operators[earlier] for earlier in waiting)


def longest_run(layer: LayerSpec) -> int:
    """Most memory-bound operators of a layer between two others, which should be one kernel."""
    runs = (sum(1 for _ in run) for fuses, run in groupby(layer.operators, key=is_fused) if fuses)
    return max(runs, default=0)


class _Block:
    """The operators of a layer as a graph of what each tensor is recomputed from."""

    def __init__(self, layer: LayerSpec, activation_bytes: int, residual_bytes: int) -> None:
        self._layer, self._widths = layer, (activation_bytes, residual_bytes)
        self._sources: dict[str, tuple[str, ...]] = {}  # of tensors that can be recomputed
        for operator in layer.operators:
            for number, tensor in enumerate(operator.makes):
                if sources := self._sources_of(operator, number, tensor):
                    self._sources[tensor.name] = sources
        fused = [operator for operator in layer.operators if is_fused(operator)]
        others = [operator for operator in layer.operators if not is_fused(operator)]
        self._forced = {name for o in others for name in saved_by(o, layer.needed)}
        self._wanted = {name for o in fused for name in saved_by(o, layer.needed)}
        self._written = {*layer.outputs, *(tensor.name for tensor in layer.inputs)}
        for operator in others:
            self._written.update(operator.reads, (tensor.name for tensor in operator.makes))
        self._distances = self._from_backward()

    def _sources_of(self, operator: Operator, number: int, tensor: Tensor) -> tuple[str, ...]:
        """Names of the tensors that a tensor is recomputed from; none for one that is not, as statistics and masks."""
        reads = operator.kernel.reads if isinstance(operator.kernel, Pointwise) else 0
        if number or not is_fused(operator) or _REDUCES * tensor.elements < reads:
            return ()
        return (*operator.reads, *(other.name for other in operator.makes[1:]))

    def _bytes_of(self, tensor: Tensor) -> int:
        return tensor.num_bytes(*self._widths)

    def _from_backward(self) -> dict[str, int]:
        """Operators between each tensor and the first one that backward reads."""
        found = dict.fromkeys(self._forced | self._wanted, 0)
        for operator in reversed(self._layer.operators):
            after = [found[tensor.name] for tensor in operator.makes if tensor.name in found]
            for name in operator.reads if after else ():
                found[name] = min(found.get(name, _FARTHEST), min(after) + 1)
        return found

    def _weight(self, name: str) -> int:
        tensor = self._layer.tensors.get(name)
        if tensor is None or tensor.elsewhere or name in self._forced:
            return 0
        written = 1 if name in self._written else _UNWRITTEN
        return int(self._bytes_of(tensor) * written * _FARTHER ** min(self._distances.get(name, 0), _FARTHEST))

    def saved(self) -> frozenset[str]:
        """Names of the tensors that the block saves."""
        cut = _Cut()
        names = {*self._layer.tensors, *(name for o in self._layer.operators for name in o.reads)}
        for name in names:
            cut.connect((name, 0), (name, 1), self._weight(name))
            for source in self._sources.get(name, ()):
                cut.connect((source, 1), (name, 0), _ENDLESS)
            if name not in self._sources:
                cut.connect("begin", (name, 0), _ENDLESS)
            if name in self._wanted:
                cut.connect((name, 1), "end", _ENDLESS)
        reached = cut.reached("begin", "end")
        return frozenset({name for name in names if (name, 0) in reached and (name, 1) not in reached} | self._forced)

    def read_by(self, operator: Operator, saved: frozenset[str]) -> Iterator[str]:
        """Saved tensors that the backward of an operator reads, or from which it recomputes what it reads."""
        found: dict[str, None] = {}
        waiting = list(operator.saves)
        seen = set(waiting)
        while waiting:
            name = waiting.pop(0)
            if name in saved or name not in self._sources:
                found[name] = None
                continue
            waiting += [source for source in self._sources[name] if source not in seen]
            seen.update(self._sources[name])
        yield from found


def is_fused(operator: Operator) -> bool:
    """True if the compiler puts an operator into a kernel with its neighbors."""
    return operator.kernel is None or (isinstance(operator.kernel, Pointwise) and operator.kernel.fusion != "none")


class _Cut:
    """A graph and its minimum cut (Dinic 1970)."""

    def __init__(self) -> None:
        self._edges: dict[object, dict[object, int]] = {}

    def connect(self, source: object, target: object, capacity: int) -> None:
        """Adds an edge."""
        self._edges.setdefault(source, {})[target] = capacity
        self._edges.setdefault(target, {}).setdefault(source, 0)

    def reached(self, begin: object, end: object) -> set[object]:
        """Nodes on the side of ``begin``, after as much has flowed as can."""
        while True:
            levels = self._levels(begin)
            if end not in levels:
                return {*levels}
            ahead = {node: deque(edges) for node, edges in self._edges.items()}
            while self._push(begin, end, levels, ahead):
                pass

    def _levels(self, begin: object) -> dict[object, int]:
        levels, waiting = {begin: 0}, deque([begin])
        while waiting:
            node = waiting.popleft()
            for target, capacity in self._edges.get(node, {}).items():
                if capacity > 0 and target not in levels:
                    levels[target] = levels[node] + 1
                    waiting.append(target)
        return levels

    def _push(
        self, begin: object, end: object, levels: Mapping[object, int], ahead: Mapping[object, deque[object]]
    ) -> bool:
        """Lets flow what fits through one path; False without a path."""
        path = [begin]
        while path[-1] != end:
            node = path[-1]
            while ahead[node]:
                target = ahead[node][0]
                if self._edges[node][target] > 0 and levels.get(target) == levels[node] + 1:
                    path.append(target)
                    break
                ahead[node].popleft()
            else:
                if len(path) == 1:
                    return False
                path.pop()
                ahead[path[-1]].popleft()
        steps = list(pairwise(path))
        flow = min(self._edges[source][target] for source, target in steps)
        for source, target in steps:
            self._edges[source][target] -= flow
            self._edges[target][source] += flow
        return True
