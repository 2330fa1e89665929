"""The graph of a captured model, from two traces: one of a batch of two samples, and one of three.

What grows from two samples to three belongs to a sample; what does not is there once for a microbatch. (With one sample
alone, a transposed tensor is often contiguous, and copies would not be seen.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import cast

import torch

from executor.capture.cutting import Cut
from executor.capture.loops import signature, without_loops
from executor.capture.trace import Operand, Seen, Trace
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.model.captured.facts import (
    CapturedCollective,
    CapturedGraph,
    CapturedLayer,
    CapturedOperator,
    CapturedParameter,
    CapturedTensor,
    Communication,
    ComputedIn,
    Setting,
    Shape,
    Shapes,
    Width,
)
from simplan.model.captured.kernels import one_sample

_SETTINGS = {"aten.convolution": ("groups", "transposed")}
_ATTENTION_SETTINGS = ("is_causal",)
_COPY = "aten._to_copy"


def graph_of(
    two: Trace,
    three: Trace,
    cuts: Sequence[Cut],
    computed_in: ComputedIn,
    shapes: dict[str, tuple[int, ...]],
    partial: frozenset[str] = frozenset(),
) -> CapturedGraph:
    """Layers of a model.

    Args:
        two, three: Traces of batches of two and of three samples.
        cuts: Layers by the operators of ``two``.
        shapes: Shapes of parameters by name.
        partial: Names of parameters whose gradients are parts, besides those that the traces name.

    Raises:
        SpecError: Both traces have different operators.
    """
    three = without_loops(two, three)
    _check_alike(two, three)
    return _Graph(two, three, cuts, computed_in, shapes, partial | two.partial).graph()


def _check_alike(two: Trace, three: Trace) -> None:
    pairs = zip(two.operators, three.operators, strict=False)
    other = next((a for a, b in pairs if not a.is_left_out and signature(a) != signature(b)), None)
    if other is None and len(two.operators) != len(three.operators):
        other = two.operators[-1]
    if other is not None:
        raise SpecError(
            Problem(
                field="module",
                value=other.module or "the model",
                rule=f"runs other operators for three samples than for two, from {other.name} on",
                fix="make its operators independent of the number of samples",
            )
        )


def _derived(two: Trace, three: Trace, weights: set[int]) -> Iterator[int]:
    """Storages computed from weights alone that do not grow with the batch, such as standardized weights."""
    for seen in two.operators:
        if seen.reads and weights.issuperset(operand.storage for operand in seen.reads):
            batch_sized = [storage for storage in seen.makes if three.sizes[storage] == two.sizes[storage]]
            weights.update(batch_sized)
            yield from batch_sized


class _Graph:
    def __init__(
        self,
        two: Trace,
        three: Trace,
        cuts: Sequence[Cut],
        computed_in: ComputedIn,
        shapes: dict[str, tuple[int, ...]],
        partial: frozenset[str],
    ) -> None:
        self._two, self._three, self._cuts, self._shapes = two, three, cuts, shapes
        self._partial = partial
        self._computed_in = computed_in
        self._trained = {two.parameters[storage] for storage in two.needs_gradient if storage in two.parameters}
        self._weights = dict(two.parameters)  # also copies that autocast makes, and keeps, of trained weights
        if computed_in == "autocast":
            for seen in two.operators:
                name = self._weights.get(seen.reads[0].storage) if _is_cast(seen) else None
                if name in self._trained:
                    self._weights[seen.makes[0]] = name
        self._derived = set(_derived(two, three, {*self._weights}))
        self._layer_of: dict[int, int] = {}  # by storage that an operator makes
        self._readers: dict[int, set[int]] = {}
        for number, layer in enumerate(cuts):
            for seen in two.operators[layer.begin : layer.end]:
                self._layer_of.update(dict.fromkeys(seen.makes, number))
                for storage in (*(operand.storage for operand in seen.reads), *seen.saves, *seen.writes):
                    self._readers.setdefault(storage, set()).add(number)
        self._saved_by_maker = {
            storage
            for number, layer in enumerate(cuts)
            for seen in two.operators[layer.begin : layer.end]
            for storage in seen.saves
            if self._layer_of.get(storage) == number
        }
        self._holders: dict[int, int] = {}  # by storage of a buffer, its layer: the first to read it, or the last
        for storage in two.buffers:
            self._holders[storage] = min(self._readers.get(storage, {len(cuts) - 1}))
        self._users: dict[str, set[int]] = {}  # layers that use a parameter
        for number, layer in enumerate(cuts):
            for seen in two.operators[layer.begin : layer.end]:
                for operand in seen.reads:
                    if operand.storage in self._weights:
                        self._users.setdefault(self._weights[operand.storage], set()).add(number)

    def graph(self) -> CapturedGraph:
        """All layers; equal ones once."""
        layers: list[CapturedLayer] = []
        order = []
        for number in range(len(self._cuts)):
            layer = self._layer(number)
            if layer not in layers:
                layers.append(layer)
            order.append(layers.index(layer))
        ends = {0, len(self._cuts) - 1}
        shared = tuple(name for name, users in self._users.items() if len(users) > 1 and users != ends)
        return CapturedGraph(layers=tuple(layers), order=tuple(order), shared=shared)

    def _layer(self, number: int) -> CapturedLayer:
        layer = self._cuts[number]
        alive, handed = self._alive(number), self._alive(number + 1)
        names = {storage: f"input{place}" for place, storage in enumerate(alive)}
        calls = self._two.operators[layer.begin : layer.end]
        read = {operand.storage for seen in calls for operand in seen.reads}
        batch = {storage: name for storage, name in self._two.inputs.items() if storage in read}
        names |= batch
        inputs = [self._tensor(storage, names[storage]) for storage in (*alive, *batch)]
        elsewhere = {names[s] for s in alive if self._is_forwarded(s)} | set(batch.values())
        parameters: dict[str, CapturedParameter] = {}
        operators = list(self._operators(number, names, parameters))
        tied = tuple(
            self._local(self._weights[storage], layer.module)
            for storage in dict.fromkeys(o.storage for seen in calls for o in seen.reads)
            if storage in self._two.parameters
            and number
            and self._users[self._weights[storage]] == {0, len(self._cuts) - 1}
        )
        buffers = [self._tensor(s, name) for s, name in self._two.buffers.items() if self._holders[s] == number]
        made = [s for s in handed if self._layer_of[s] == number]
        return CapturedLayer(
            parameters=tuple(parameters.values()),
            inputs=tuple(inputs),
            elsewhere=tuple(sorted(elsewhere)),
            operators=tuple(operators),
            outputs=tuple(names[storage] for storage in handed),
            output_shapes=tuple((self._tensor(storage, "").elements,) for storage in handed),
            passed=tuple(place for place, storage in enumerate(handed) if storage in alive),
            forwarded=tuple(names[storage] for storage in made if self._is_forwarded(storage)),
            tied=tied,
            buffers=tuple(t.model_copy(update={"name": self._local(t.name, layer.module)}) for t in buffers),
        )

    def _alive(self, number: int) -> list[int]:
        """Storages made before a layer that it or a later layer reads: first those that are passed on, then by age."""
        alive = (
            storage
            for storage, maker in self._layer_of.items()
            if maker < number <= max(self._readers.get(storage, {-1})) and storage not in self._weights
        )
        return sorted(alive, key=lambda storage: (not self._is_forwarded(storage), storage))

    def _is_forwarded(self, storage: int) -> bool:
        """True if layers after the next one read a tensor."""
        return max(self._readers[storage]) > self._layer_of[storage] + 1

    def _operators(
        self, number: int, names: dict[int, str], parameters: dict[str, CapturedParameter]
    ) -> Iterator[CapturedOperator]:
        layer = self._cuts[number]
        for place in range(layer.begin, layer.end):
            seen = self._two.operators[place]
            if seen.is_left_out or (seen.makes and all(storage in self._weights for storage in seen.makes)):
                continue  # part of another one, or autocast's copy of a weight
            yield self._operator(place, number, names, parameters)

    def _operator(
        self, place: int, number: int, names: dict[int, str], parameters: dict[str, CapturedParameter]
    ) -> CapturedOperator:
        seen, other, layer = self._two.operators[place], self._three.operators[place], self._cuts[number]
        written = [storage for storage in seen.writes if storage in names]
        others = seen.saves if seen.function else ()  # a function in Python saves its inputs, which others read for it
        storages = dict.fromkeys((*written, *(operand.storage for operand in seen.reads), *others))
        reads = tuple(names[storage] for storage in storages if storage in names)
        used = [self._weights[o.storage] for o in seen.reads if o.storage in self._weights]
        first = [
            name
            for name in dict.fromkeys(used)
            if self._local(name, layer.module) not in parameters and self._owns(name, number)
        ]
        for name in first:
            local = self._local(name, layer.module)
            frozen = name not in self._trained
            elsewhere = bool(layer.module) and not name.startswith(f"{layer.module}.")
            parameters[local] = CapturedParameter(
                name=local,
                shape=self._shapes[name],
                frozen=frozen,
                elsewhere=elsewhere,
                partial=name in self._partial and not frozen,
            )
        makes = []
        for index, storage in enumerate(written[:1] or seen.makes):
            names[storage] = f"{seen.name.rpartition('.')[2]} {place - layer.begin}" + (f".{index}" if index else "")
            makes.append(self._tensor(storage, names[storage]))
        saved = {*seen.saves}
        # What the layer before saves of its output is counted here, as families do.
        saved.update(s for s in storages if s in self._saved_by_maker and self._layer_of[s] == number - 1)
        trained = self._trained.intersection(used) or self._derived & self._two.needs_gradient & storages.keys()
        flows = self._two.needs_gradient & storages.keys() - self._weights.keys() - self._derived
        if seen.function and not flows:
            rule = f"runs {seen.function}, an autograd function that saves none of its inputs: not modeled yet"
            fix = "capture the module with the plain form of the function"
            raise NotModelledError(Problem(field="module", value=seen.module or "the model", rule=rule, fix=fix))
        return CapturedOperator(
            op=seen.name,
            module=self._local(seen.module, layer.module),
            operands=_shapes(seen.reads, other.reads),
            results=_shapes(seen.results, other.results),
            weights=tuple(
                place for place, o in enumerate(seen.reads) if o.storage in self._weights or o.storage in self._derived
            ),
            settings=dict(_settings(seen)),
            reads=reads,
            makes=tuple(makes),
            saves=tuple(names[storage] for storage in sorted(saved) if storage in names),
            parameters=tuple(self._local(name, layer.module) for name in first),
            trains=seen.has_gradient and (bool(trained) or seen.num_gradients > 1),
            propagates=seen.has_gradient and bool(flows),
            is_cast=_is_cast(seen) and bool(reads) and not used,
            in_place=bool(written) or seen.is_alias,
            passes=seen.passes,
            gradient_scratch=max(0, seen.backward_elements - sum(prod(self._shapes[name]) for name in used)),
            collective=self._collective(place),
        )

    def _collective(self, place: int) -> CapturedCollective | None:
        seen, other = self._two.operators[place].collective, self._three.operators[place].collective
        if seen is None or other is None:
            return None
        less, more = prod(seen.buffer.shape), prod(other.buffer.shape)
        if less == more:
            what = f"{seen.forward or seen.backward} of a tensor that does not grow with the batch"
            rule, fix = f"runs an {what}, which is not modeled yet", "split its operands by other styles"
            where = self._two.operators[place].module or "the model"
            raise NotModelledError(Problem(field="--tp-plan", value=where, rule=rule, fix=fix))
        return CapturedCollective(
            forward=cast("Communication | None", seen.forward or None),
            backward=cast("Communication | None", seen.backward or None),
            elements=more - less,
            width=self._width(seen.buffer.dtype),
            reorders=seen.reorders,
        )

    def _owns(self, name: str, number: int) -> bool:
        """True for a layer that lists a parameter: the first one that uses it, and a head that shares it with that."""
        users = self._users[name]
        return number == min(users) or users == {0, number} == {0, len(self._cuts) - 1}

    def _local(self, name: str, module: str) -> str:
        """Name inside of a layer's module; names of other modules stay as they are."""
        if name == module:
            return ""
        return name.removeprefix(f"{module}.") if module else name

    def _tensor(self, storage: int, name: str) -> CapturedTensor:
        dtype, two, three = self._two.dtypes[storage], self._two.sizes[storage], self._three.sizes[storage]
        grows = three > two
        return CapturedTensor(
            name=name,
            elements=(three - two if grows else two) // dtype.itemsize,
            width=self._width(dtype),
            per_microbatch=not grows,
        )

    def _width(self, dtype: torch.dtype) -> Width:
        if dtype is (torch.float32 if self._computed_in == "fp32" else torch.bfloat16):
            return "compute"
        return "wide" if dtype is torch.float32 and self._computed_in == "autocast" else dtype.itemsize


def _shapes(two: Sequence[Operand], three: Sequence[Operand]) -> Shapes:
    """Shapes of one sample; a list with a tensor for each sample is one tensor of its elements."""
    if len(two) == len(three):
        return tuple(one_sample(less.shape, more.shape) for less, more in zip(two, three, strict=True))
    less, more = (sum(prod(operand.shape) for operand in operands) for operands in (two, three))
    return ((more - less,),)


def _is_cast(seen: Seen) -> bool:
    """True if only the dtype changes."""
    if seen.name != _COPY or not seen.makes:
        return False
    (source,), (result,) = seen.reads, seen.results
    return source.shape == result.shape and source.dtype is not result.dtype


def _settings(seen: Seen) -> Iterator[tuple[str, Setting]]:
    wanted = _ATTENTION_SETTINGS if "scaled_dot_product" in seen.name else _SETTINGS.get(seen.name, ())
    for key in wanted:
        if key in seen.settings:
            yield key, seen.settings[key]


def shape_of_sample(two: Sequence[int], three: Sequence[int]) -> Shape:
    """Shape of one sample of a tensor of the batch: without the dimension that grows by one, if it is the first."""
    whole = one_sample(tuple(two), tuple(three))
    return whole[1:] if tuple(two[:1]) == (2,) and tuple(three[:1]) == (3,) else whole
