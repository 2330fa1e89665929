"""Linear layers of a captured model: calls of modules that multiply their input with a matrix of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from simplan.model.captured.facts import CapturedLayer, CapturedModel, Shape
from simplan.model.captured.kernels import MATMULS, word

ADAPTER_NAMES = (".lora_a", ".lora_b")
"""Ends of the names of adapters."""
_KERNEL_MULTIPLE = 16  # elements of FP8 in the 16 bytes of which rows must be multiples


class Linear(NamedTuple):
    """One call of a linear layer.

    Attributes:
        place: Place of the operator in its layer.
        name: Name of the module inside of its layer.
        path: Name of the module in the whole model.
        elsewhere: The module is outside of the layer's module.
        shape: Inputs and outputs.
        is_transposed: The weight has one row for each input, as ``Conv1D`` of transformers, in place of each output.
    """

    place: int
    name: str
    path: str
    elsewhere: bool
    shape: tuple[int, int]
    is_transposed: bool

    @property
    def is_square(self) -> bool:
        """True for as many inputs as outputs."""
        return self.shape[0] == self.shape[1]

    @property
    def has_low_precision(self) -> bool:
        """True if low precision has kernels for the layer: torchtitan converts no others (``module_filter_fn``)."""
        is_adapter = self.name.endswith(ADAPTER_NAMES)
        sizes = all(size % _KERNEL_MULTIPLE == 0 for size in self.shape)
        return sizes and not (self.elsewhere or self.is_transposed or is_adapter)


def linear_layers(model: CapturedModel) -> tuple[str, ...]:
    """Names in the whole model of all linear layers, in the order of their first use."""
    return tuple(dict.fromkeys(linear.path for linears in linear_calls(model) for linear in linears))


@lru_cache(maxsize=64)
def linear_calls(model: CapturedModel) -> tuple[tuple[Linear, ...], ...]:
    """Calls of linear layers, by layer of the model: matmuls in a module with its own matrix."""
    weights = {
        (parameter.name if parameter.elsewhere or not path else f"{path}.{parameter.name}"): parameter.shape
        for path, number in zip(model.modules, model.graph.order, strict=True)
        for parameter in model.graph.layers[number].parameters
    }
    found = [
        [*_calls(model.graph.layers[number], path, weights)]
        for path, number in zip(model.modules, model.graph.order, strict=True)
    ]
    # of square matrices nobody can tell: they are as the others of the model
    transposes = any(linear.is_transposed for linears in found for linear in linears)
    return tuple(
        tuple(each._replace(is_transposed=transposes) if each.is_square else each for each in linears)
        for linears in found
    )


def _calls(layer: CapturedLayer, path: str, weights: Mapping[str, Shape]) -> Iterator[Linear]:
    outside = {parameter.name for parameter in layer.parameters if parameter.elsewhere}
    for place, operator in enumerate(layer.operators):
        if word(operator) not in MATMULS or len(operator.operands) - 1 not in operator.weights:
            continue
        name, second = operator.module, operator.operands[-1]
        inside = f"{path}.{name}" if path else name
        elsewhere = bool(path) and (f"{name}.weight" in outside or f"{inside}.weight" not in weights)
        full = name if elsewhere else inside
        weight = weights.get(f"{full}.weight", ())
        if sorted(weight) == sorted(second):
            k, n = second
            yield Linear(place, name, full, elsewhere, (k, n), is_transposed=weight == (k, n) and k != n)
