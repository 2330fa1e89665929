"""A captured model as JSON and as text."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from math import prod
from typing import Any

from simplan.model.captured.facts import CapturedModel
from simplan.model.captured.layers import captured_layers
from simplan.model.layer import LayerCollective, LayerSpec
from simplan.report.table import format_table_text
from simplan.units import format_bytes, format_count

_HEADERS = ("layer", "module", "parameters", "forward FLOPs", "saved", "operators")
_PRECISION_WORDS = {"autocast": "autocast (bf16 under DDP and ZeRO-1)"}
_WIDTHS = {"fp32": (4, 4), "bf16": (2, 2), "autocast": (2, 4)}


def captured_json(captured: CapturedModel) -> dict[str, Any]:
    """Sizes of a captured model, of one sample in its first precision, and its layers."""
    layers = captured_layers(captured)
    widths = _WIDTHS[captured.computed_in]
    return {
        "schema_version": 1,
        "kind": "captured_model",
        "name": captured.name,
        "num_parameters": _num_parameters(layers),
        "forward_flops": sum(layer.flops(full_attention=True) for layer in layers),
        "backward_flops": sum(layer.backward_flops(full_attention=True) for layer in layers),
        "saved_bytes": sum(sum(layer.saved_bytes(*widths)) for layer in layers),
        "precisions": [*captured.graphs],
        "refused": dict(captured.refused),
        "images": None if captured.images is None else captured.images.model_dump(mode="json"),
        "inputs": [tensor.model_dump(mode="json", exclude_defaults=True) for tensor in captured.inputs],
        "unused_parameters": [parameter.name for parameter in captured.unused],
        "tensor_parallel": [_rank_json(captured, degree) for degree in captured.degrees[1:]],
        "layers": [
            {
                "module": module,
                "kind": str(layer.kind),
                "num_parameters": layer.num_parameters,
                "forward_flops": layer.flops(full_attention=True),
                "saved_bytes": sum(layer.saved_bytes(*widths)),
                "operators": len(layer.operators),
            }
            for module, layer in zip(captured.modules, layers, strict=True)
        ],
    }


def _rank_json(captured: CapturedModel, degree: int) -> dict[str, Any]:
    """Sizes of the part of one tensor-parallel rank, of one sample in the first precision."""
    part = captured.of_degree(degree)
    layers, widths = captured_layers(part), _WIDTHS[part.computed_in]
    return {
        "degree": degree,
        "num_parameters": _num_parameters(layers),
        "forward_flops": sum(layer.flops(full_attention=True) for layer in layers),
        "saved_bytes": sum(sum(layer.saved_bytes(*widths)) for layer in layers),
        "collectives": sum(isinstance(kernel, LayerCollective) for layer in layers for kernel in layer.kernels),
        "refused": dict(part.refused),
    }


def captured_text(captured: CapturedModel) -> str:
    """Text of ``captured_json``; equal layers in a row are one row of the table."""
    document = captured_json(captured)
    rows = []
    for first, last in _runs(captured):
        layer = document["layers"][first]
        rows.append(
            [
                f"{first}" if first == last else f"{first}-{last}",
                layer["module"] or "(code between modules)",
                format_count(layer["num_parameters"]),
                format_count(layer["forward_flops"]),
                format_bytes(layer["saved_bytes"]),
                str(layer["operators"]),
            ]
        )
    sums = captured.factory and not captured.loss
    lines = [
        f"{captured.name}: {format_count(document['num_parameters'])} parameters; one sample: "
        f"{format_count(document['forward_flops'])} FLOPs forward, "
        f"{format_count(document['backward_flops'])} backward, "
        f"{format_bytes(document['saved_bytes'])} saved for backward in {captured.computed_in}",
        *([] if captured.images is None else [f"one sample: {captured.tokens:,} tokens, with {captured.images}"]),
        f"precisions: {', '.join(_PRECISION_WORDS.get(each, each) for each in captured.graphs)}",
        *(["loss: that of the output, or the sum of what forward returns; --loss names yours"] if sums else []),
        *(f"not {precision}: {why}" for precision, why in captured.refused.items()),
        *(_rank_text(rank) for rank in document["tensor_parallel"]),
        "",
        format_table_text(_HEADERS, rows, left=2),
    ]
    if captured.unused:
        parts = ", ".join(f"{name} ({format_count(number)} parameters)" for name, number in _unused(captured))
        lines.append(f"without a part in the loss: {parts}")
    return "\n".join(lines)


def _rank_text(rank: dict[str, Any]) -> str:
    refused = "".join(f"; not {precision}: {why}" for precision, why in rank["refused"].items())
    return (
        f"tp {rank['degree']}: a rank has {format_count(rank['num_parameters'])} parameters, "
        f"{format_count(rank['forward_flops'])} FLOPs forward, {format_bytes(rank['saved_bytes'])} saved, "
        f"{rank['collectives']} tensors communicated{refused}"
    )


def _runs(captured: CapturedModel) -> list[tuple[int, int]]:
    """First and last index of equal layers that follow one another."""
    order = captured.graph.order
    runs: list[tuple[int, int]] = []
    for index, number in enumerate(order):
        if runs and order[runs[-1][0]] == number:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def _unused(captured: CapturedModel) -> list[tuple[str, int]]:
    """Largest modules whose parameters take no part in the loss, or such a parameter, and number of their elements."""
    used = {""}
    for module, number in zip(captured.modules, captured.graph.order, strict=True):
        for parameter in captured.graph.layers[number].parameters:
            name = parameter.name if parameter.elsewhere or not module else f"{module}.{parameter.name}"
            used.update(_prefixes(name))
    counts: Counter[str] = Counter()
    for parameter in captured.unused:
        counts[next(p for p in _prefixes(parameter.name) if p not in used)] += prod(parameter.shape)
    return sorted(counts.items())


def _prefixes(name: str) -> list[str]:
    """Modules around a parameter, from the outside, and its own name."""
    return list(accumulate(name.split("."), lambda outer, inner: f"{outer}.{inner}"))


def _num_parameters(layers: tuple[LayerSpec, ...]) -> int:
    return sum(p.num_elements for layer in layers for p in layer.parameters if p.name not in layer.tied)
