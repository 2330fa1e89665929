"""Frozen weights of a captured model, and LoRA adapters (Hu et al. 2021, arXiv:2106.09685) next to linear layers.

The result is what a capture of the module with adapters in its code gives: y = x W^T + b + (x A^T) B^T scale, as PEFT's
``lora.Linear`` runs it, with dropout of x before A. What torch saves changes with what is trained: a frozen matrix
saves no input, and of a product of two tensors each is saved for the gradient of the other. Operators below the first
adapter have no backward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from functools import lru_cache
from typing import NamedTuple

from simplan.model.adapters import MODULES
from simplan.model.captured.facts import (
    CapturedGraph,
    CapturedLayer,
    CapturedModel,
    CapturedOperator,
    CapturedParameter,
    CapturedTensor,
    Shape,
)
from simplan.model.captured.kernels import PRODUCTS, word
from simplan.model.captured.linear import Linear, linear_calls, linear_layers
from simplan.model.parts.part import MASK_BYTES

ALL = "all"
"""Target that means every linear layer except the output head."""


class _Given(NamedTuple):
    """Facts about the inputs of a layer, from the layers before.

    Attributes:
        flowing: By input, whether it has a gradient.
        saved: By input, whether the layer that made it saves it.
    """

    flowing: tuple[bool, ...] = ()
    saved: tuple[bool, ...] = ()


def targets_of(model: CapturedModel, targets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Linear layers that each target names: by their path, or by its end, as PEFT's ``target_modules``.

    ``all`` means every linear layer, except the model's last one if it is outside of blocks (PEFT's ``all-linear``
    leaves out the output head). A name of a family's matrix (``q``) means modules of its name in transformers
    (``q_proj``) where no module is called so. A regular expression means the paths that it matches as a whole, as PEFT
    does.
    """
    paths, head = linear_layers(model), _output_head(model)
    found = {target: _named(paths, target) for target in targets if target != ALL}
    others = tuple(path for path in paths if path != head)
    return {
        target: others if target == ALL else found[target] or _ending(paths, *_IN_TRANSFORMERS.get(target, ()))
        for target in targets
    }


_IN_TRANSFORMERS = {matrix: (module,) for module, matrix in MODULES.items()} | {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "head": ("lm_head",),
    **{
        f"shared_{word}": (f"shared_expert.{word}_proj", f"shared_experts.{word}_proj")
        for word in ("gate", "up", "down")
    },
}


_MARKS = frozenset("()*+[]\\|?^$")


def _named(paths: Sequence[str], target: str) -> tuple[str, ...]:
    if _MARKS.isdisjoint(target):
        return _ending(paths, target)
    try:
        pattern = re.compile(target)
    except re.error:
        return ()
    return tuple(path for path in paths if pattern.fullmatch(path))


def _ending(paths: Sequence[str], *ends: str) -> tuple[str, ...]:
    return tuple(path for path in paths if any(path == end or path.endswith(f".{end}") for end in ends))


def _output_head(model: CapturedModel) -> str:
    """Name of the model's last linear layer if it is outside of blocks; else empty."""
    calls = [
        (linear, path) for linears, path in zip(linear_calls(model), model.modules, strict=True) for linear in linears
    ]
    return next((linear.path for linear, path in calls[-1:] if linear.elsewhere or not path), "")


@lru_cache(maxsize=64)
def with_adapters(
    model: CapturedModel, rank: int, targets: tuple[str, ...], *, dropout: bool = False, input_grads: bool = False
) -> CapturedModel:
    """The model with adapters of a rank at its targets (``targets_of``), in the precision that is meant.

    With ``input_grads`` the results of its input embeddings have gradients.
    """
    chosen = frozenset(path for paths in targets_of(model, targets).values() for path in paths)
    given = model.input_embeddings if input_grads else ()
    return _trained_in_part(model, frozenset(), chosen, rank, dropout=dropout, given=given)


@lru_cache(maxsize=64)
def with_frozen(model: CapturedModel, names: tuple[str, ...]) -> CapturedModel:
    """The model whose parts of these names (``parts_of``) are not trained, in the precision that is meant."""
    frozen = {name for parts in parts_of(model, names).values() for name in parts}
    return _trained_in_part(model, frozenset(parameter_names(model)) - frozen, frozenset(), 0, dropout=False)


def parameter_names(model: CapturedModel) -> tuple[str, ...]:
    """Names in the whole model of all parameters that take part in the loss, in the order of their first use."""
    return tuple(
        dict.fromkeys(
            full_name(parameter, path)
            for path, number in zip(model.modules, model.graph.order, strict=True)
            for parameter in model.graph.layers[number].parameters
        )
    )


def full_name(parameter: CapturedParameter, path: str) -> str:
    """Name in the whole model of a parameter of the layer of a module."""
    return parameter.name if parameter.elsewhere or not path else f"{path}.{parameter.name}"


def parts_of(model: CapturedModel, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parameters of the modules that each name names.

    A name is the path of a module, or some words of it that follow one another (``vision_tower``, ``visual.blocks``).
    """
    known = parameter_names(model)
    return {name: tuple(each for each in known if f".{name}." in f".{each}.") for name in names}


def names_of_parts(model: CapturedModel, chosen: Set[str]) -> list[str]:
    """Names for ``parts_of`` that name these parameters and no others: those of whole modules where all are chosen."""
    found, known = list[str](), parameter_names(model)
    waiting = [("", 0)]
    while waiting:
        prefix, depth = waiting.pop()
        inside = [name for name in known if not prefix or f"{name}.".startswith(f"{prefix}.")]
        if prefix and chosen >= {*inside}:
            found.append(prefix)
        elif not chosen.isdisjoint(inside):
            longer = dict.fromkeys(".".join(name.split(".")[: depth + 1]) for name in inside)
            waiting += [(each, depth + 1) for each in reversed(longer)]
    named = {name for parts in parts_of(model, found).values() for name in parts}
    return found if named == chosen else sorted(chosen)


def pattern_of(model: CapturedModel, paths: Sequence[str]) -> list[str]:
    """Targets for ``targets_of`` that mean these linear layers and no others: a regular expression if there is one."""
    words = dict.fromkeys(re.sub(r"\b\d+\b", r"\\d+", re.escape(path)) for path in paths)
    pattern = "|".join(words)
    return [pattern] if {*_named(linear_layers(model), pattern)} == {*paths} else [*paths]


def _trained_in_part(
    model: CapturedModel,
    trained: frozenset[str],
    adapted: frozenset[str],
    rank: int,
    *,
    dropout: bool,
    given: Sequence[str] = (),
) -> CapturedModel:
    """The model of which some parameters are trained, and adapters next to some linear layers, and nothing else.

    The results of modules whose paths are ``given`` have gradients.
    """
    made: dict[
        tuple[int, tuple[Linear, ...], frozenset[str], _Given, frozenset[int]], tuple[CapturedLayer, _Given]
    ] = {}
    layers: dict[CapturedLayer, int] = {}
    order, before = [], _Given()
    for path, number, linears in zip(model.modules, model.graph.order, linear_calls(model), strict=True):
        here = tuple(linear._replace(path="") for linear in linears if linear.path in adapted)
        layer = model.graph.layers[number]
        own = frozenset(each.name for each in layer.parameters if not each.frozen and full_name(each, path) in trained)
        ends = _ends_of(layer, path, given)
        key = number, here, own, before, ends
        if key not in made:
            made[key] = _Adapting(layer, here, rank, before, own, ends, dropout=dropout).layer()
        layer, before = made[key]
        order.append(layers.setdefault(layer, len(layers)))
    graph = CapturedGraph(layers=tuple(layers), order=tuple(order), shared=model.graph.shared)
    return model.model_copy(update={"graphs": {**model.graphs, model.computed_in: graph}})


def _ends_of(layer: CapturedLayer, path: str, modules: Sequence[str]) -> frozenset[int]:
    """Places of the last operators of some modules in the layer of a module; empty for others."""
    found: dict[str, int] = {}
    for place, operator in enumerate(layer.operators):
        own = f"{path}.{operator.module}" if path and operator.module else path or operator.module
        found |= {name: place for name in modules if f"{own}.".startswith(f"{name}.")}
    return frozenset(found.values())


class _Adapting:
    """One layer of which some linear layers get adapters, and some parameters are trained."""

    def __init__(
        self,
        layer: CapturedLayer,
        linears: Sequence[Linear],
        rank: int,
        given: _Given,
        trained: frozenset[str],
        ends: frozenset[int],
        *,
        dropout: bool,
    ) -> None:
        self._ends = ends
        self._layer, self._rank, self._dropout = layer, rank, dropout
        self._trained = trained
        self._linears = {linear.place: linear for linear in linears}
        names = [tensor.name for tensor in layer.inputs]
        self._flowing = {name for name, flows in zip(names, given.flowing, strict=False) if flows}
        self._kept = {name for name, saved in zip(names, given.saved, strict=False) if saved}
        self._adapters: dict[str, tuple[CapturedParameter, ...]] = {}  # by the weight that they are next to

    def layer(self) -> tuple[CapturedLayer, _Given]:
        """The layer with adapters, and what the next layer gets."""
        layer = self._layer
        operators = tuple(made for place, each in enumerate(layer.operators) for made in self._at(place, each))
        found = layer.model_copy(update={"operators": operators, "parameters": tuple(self._parameters())})
        saved = {name for operator in operators for name in operator.saves}
        own = {tensor.name for operator in operators for tensor in operator.makes}
        flowing = tuple(name in self._flowing for name in layer.outputs)
        return found, _Given(flowing, tuple(name in saved & own for name in layer.outputs))

    def _parameters(self) -> Iterator[CapturedParameter]:
        waiting: tuple[CapturedParameter, ...] = ()
        for parameter in self._layer.parameters:
            name = parameter.name.rpartition(".")[0]
            if waiting and parameter.name != f"{waiting[0].name.removesuffix('.lora_a.weight')}.bias":
                yield from waiting
                waiting = ()
            is_trained = parameter.name in self._trained
            yield parameter if is_trained else parameter.model_copy(update={"frozen": True, "partial": False})
            if f"{name}.weight" == parameter.name or f"{name}.bias" == parameter.name:
                waiting = self._adapters.pop(name, waiting)
        yield from waiting

    def _at(self, place: int, operator: CapturedOperator) -> Iterator[CapturedOperator]:
        """The operators of a place, after which results of input embeddings have gradients."""
        yield from self._operators(place, operator)
        if place in self._ends:
            self._flowing.update(tensor.name for tensor in operator.makes)

    def _operators(self, place: int, operator: CapturedOperator) -> Iterator[CapturedOperator]:
        linear = self._linears.get(place)
        frozen = self._frozen(operator)
        if operator.trains and self._trains(operator):
            # a product of what follows from a trained weight and of a tensor without a gradient saves the latter alone
            is_derived = word(operator) in PRODUCTS and not operator.parameters and len(operator.reads) > 1
            saves = tuple(n for n in operator.saves if not is_derived or n in self._kept or self._saves(operator, n))
            own = [name for name in operator.reads if name in self._flowing]
            yield operator.model_copy(
                update={"propagates": frozen.propagates and (len(own) > 1 or not is_derived), "saves": saves}
            )
            self._flowing.update(tensor.name for tensor in operator.makes)
            return
        if linear is None:
            yield frozen
        else:
            yield from self._adapted(operator, frozen, linear)
            self._flowing.add(operator.makes[0].name)
        if frozen.propagates:
            self._flowing.update(tensor.name for tensor in operator.makes)

    def _trains(self, operator: CapturedOperator) -> bool:
        """True if an operator uses a trained weight, also one that an operator before used."""
        own = [*operator.parameters]
        if operator.weights and not own:
            own = [p.name for p in self._layer.parameters if p.name.rpartition(".")[0] == operator.module]
        return not self._trained.isdisjoint(own)

    def _frozen(self, operator: CapturedOperator) -> CapturedOperator:
        """An operator all of whose weights are frozen."""
        flowing = [name for name in operator.reads if name in self._flowing]
        flows = bool(flowing) and (operator.trains or operator.propagates)
        several = len(flowing) > 1 or (len(operator.reads) == 1 and not operator.weights)
        saves = tuple(name for name in operator.saves if name in self._kept or (flows and self._saves(operator, name)))
        return operator.model_copy(
            update={"trains": operator.trains and flows and several, "propagates": flows, "saves": saves}
        )

    def _saves(self, operator: CapturedOperator, name: str) -> bool:
        """True if a gradient needs a tensor that the operator saves as long as all of its operands are trained."""
        others = [each for each in operator.reads if each != name]
        if name not in operator.reads or word(operator) not in PRODUCTS or not (others or operator.weights):
            return True
        divides = word(operator) == "div" and name == operator.reads[-1] and not operator.weights
        return divides or not self._flowing.isdisjoint(others)

    def _adapted(
        self, operator: CapturedOperator, frozen: CapturedOperator, linear: Linear
    ) -> Iterator[CapturedOperator]:
        """The frozen linear layer, A, B, the scaling of its result, and the sum."""
        (result,), rank, name = operator.makes, self._rank, linear.name
        rows, (k, n) = operator.operands[-2][:-1], operator.operands[-1]
        source = operator.reads[:1]
        flows = not self._flowing.isdisjoint(source)
        weights = _adapter_weights(linear, operator.operands[-1], rank)
        is_first = f"{name}.weight" in operator.parameters
        if is_first:
            self._adapters[name] = weights

        def made(what: str, columns: int) -> CapturedTensor:
            return result.model_copy(
                update={"name": f"{result.name}, {what}", "elements": result.elements // n * columns}
            )

        base, low, high, scaled = made("base", n), made("lora_a", rank), made("lora_b", n), made("scaled", n)
        yield frozen.model_copy(update={"makes": (base,)})
        if self._dropout:
            kept, mask = made("lora_dropout", k), made("lora_dropout mask", k).model_copy(update={"width": MASK_BYTES})
            yield CapturedOperator(
                op="aten.native_dropout",
                module=operator.module,
                operands=((*rows, k),),
                results=((*rows, k), (*rows, k)),
                reads=source,
                makes=(kept, mask),
                saves=(mask.name,) if flows else (),
                propagates=flows,
            )
            source = (kept.name,)
        matmul = CapturedOperator(op="aten.mm", weights=(1,), trains=True)
        yield matmul.model_copy(
            update={
                "module": f"{operator.module}.lora_a",
                "operands": ((*rows, k), (k, rank)),
                "results": ((*rows, rank),),
                "reads": source,
                "makes": (low,),
                "saves": source,
                "parameters": (weights[0].name,) if is_first else (),
                "propagates": flows,
                "weights": (1,) if source else (0, 1),
            }
        )
        yield matmul.model_copy(
            update={
                "module": f"{operator.module}.lora_b",
                "operands": ((*rows, rank), (rank, n)),
                "results": ((*rows, n),),
                "reads": (low.name,),
                "makes": (high,),
                "saves": (low.name,),
                "parameters": (weights[1].name,) if is_first else (),
                "propagates": True,
            }
        )
        whole = (*rows, n)
        yield CapturedOperator(
            op="aten.mul",
            module=operator.module,
            operands=(whole,),
            results=(whole,),
            reads=(high.name,),
            makes=(scaled,),
            propagates=True,
        )
        yield CapturedOperator(
            op="aten.add",
            module=operator.module,
            operands=(whole, whole),
            results=(whole,),
            reads=(base.name, scaled.name),
            makes=(result,),
            trains=flows,
            propagates=True,
        )


def _adapter_weights(linear: Linear, shape: Shape, rank: int) -> tuple[CapturedParameter, CapturedParameter]:
    k, n = shape
    a, b = (f"{linear.name}.lora_{letter}.weight" for letter in "ab")
    return (
        CapturedParameter(name=a, shape=(rank, k), elsewhere=linear.elsewhere),
        CapturedParameter(name=b, shape=(n, rank), elsewhere=linear.elsewhere),
    )
