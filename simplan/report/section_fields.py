"""Fields of the scenario sections ``model:``, ``training:``, ``search:`` and ``measured:``, and of topologies."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from simplan.accuracy.measured import Measured
from simplan.cluster.topology import TOPOLOGIES, GraphLink, Pcie
from simplan.goodput.sections import SECTIONS
from simplan.model.base_weights import BaseWeights
from simplan.model.families import FAMILIES
from simplan.model.model import ModelSpec
from simplan.report.plan_fields import values_of, word_of
from simplan.search.enumeration import DEFAULT_SCHEDULES, LONG_SEQUENCE
from simplan.search.space import OPTION_RANGES, RANGES, WAYS, SearchSpace
from simplan.training import TrainingSection

_MAPPINGS = {"inside": "name, or mapping", "links": "list of mappings", "between": "two names"}
"""Values of keys of a topology that are no scalars."""
_OF_NO_FILE = ("name", "family", "packs", "sources", "objective", "trains_nothing")
_PROPER = ("Hugging Face",)
_PROBE = {
    **{name: 10_007 + index for index, name in enumerate(ModelSpec.model_fields)},
    "num_attention_heads": 7,
    "hidden_size": 7 * 997,
    "patch_size": 16,
    "image_size": 16 * 11,
}
"""Distinct values of all fields, by which a default is recognized as a formula."""
_FORMULAS = {
    **{value: name for name, value in _PROBE.items()},
    997: "hidden_size / num_attention_heads",
    4 * 7 * 997: "4 x hidden_size",
    11 * 11 + 1: "(image_size / patch_size)^2 + 1",
}
_OF_MEASURED = dict.fromkeys(("source", "version"), "text") | {
    **dict.fromkeys(("assumed", "notes"), "list of texts"),
    "sources": "mapping of texts",
}
_WRITTEN_OTHERWISE = {"document_lengths": "list of 1 and more; or a mapping with their distribution"}


def training_fields() -> list[dict[str, str]]:
    """Every key of ``training:`` in the order of ``TrainingSection``."""
    written = {
        "base_weights": values_of(BaseWeights.model_fields["format"].annotation, []),
        "preference": "adapters_off, second_model, precomputed",
        "fake_quantization": "mapping of weights, activations and group_size",
        "optimizer_dtypes": "mapping of exp_avg, exp_avg_sq and main_params",
    }
    rows = _fields_of(TrainingSection)
    return [row | {"values": written.get(row["name"], row["values"])} for row in rows]


def measured_fields() -> list[dict[str, str]]:
    """Every key of ``measured:`` in the order of ``Measured``."""
    return _fields_of(Measured)


def _fields_of(section: type[BaseModel]) -> list[dict[str, str]]:
    rows = []
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        word = "required" if field.is_required() else "" if default in ((), {}) else word_of(default)
        values = _OF_MEASURED.get(name) or values_of(field.annotation, field.metadata)
        rows.append({"name": name, "default": word, "description": field.description or "", "values": values})
    return rows


def whole_run_fields() -> list[dict[str, str]]:
    """Every key of the sections of a whole run, those of a mapping or list inside of a section after it."""
    return [row for name, spec in SECTIONS.items() for row in _nested_fields(name, spec)]


def _nested_fields(section: str, spec: type[BaseModel], prefix: str = "") -> Iterator[dict[str, str]]:
    for name, field in spec.model_fields.items():
        inner = _inner_spec(field.annotation)
        default = "required" if field.is_required() else "" if inner else _default_word(field.default)
        is_list = inner is not None and get_origin(field.annotation) is tuple
        values = (
            ("list of mappings" if is_list else "mapping") if inner else values_of(field.annotation, field.metadata)
        )
        row = {"name": f"{prefix}{name}", "default": default, "description": field.description or "", "values": values}
        yield {"section": section, **row}
        if inner is not None:
            yield from _nested_fields(section, inner, f"{prefix}{name}.")


def _default_word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else word_of(value)


def _inner_spec(annotation: Any) -> type[BaseModel] | None:
    """Spec of a mapping, or of the entries of a list of mappings; None for any other value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((spec for part in get_args(annotation) if (spec := _inner_spec(part)) is not None), None)


def topology_fields() -> list[dict[str, str]]:
    """Every key of ``cluster.topology``: for all kinds, then for each kind, then those of ``node`` and ``links``."""
    preset = "in place of kind: a name of `simplan show topologies`; the other keys override its fields"
    rows = [_topology_row("", "preset", preset, "", "name")]
    rows.append(_topology_row("", "kind", "kind of the topology", "required", ", ".join(TOPOLOGIES)))
    wiring = "wiring inside a node; default: a switch that joins all devices without contention"
    rows.append(_topology_row("all except torus", "node", wiring, "", "mapping"))
    parts: dict[str, tuple[str, type[BaseModel]]] = {kind: ("", spec) for kind, spec in TOPOLOGIES.items()}
    parts |= {"node": ("node.", Pcie), "graph links": ("links.", GraphLink)}
    kinds: defaultdict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for kind, (prefix, spec) in parts.items():
        about = _first_sentences(spec)
        for name, field in spec.model_fields.items():
            if name == "node" or (name == "kind" and not prefix):
                continue
            default = "required" if field.is_required() else word_of(field.default)
            values = _MAPPINGS.get(name) or values_of(field.annotation, field.metadata)
            about_field = "pcie: devices below PCIe switches or the host" if name == "kind" else about[name]
            kinds[f"{prefix}{name}", about_field, default, values].append(kind)
    for key, of in kinds.items():
        rows.append(_topology_row("" if len(of) == len(TOPOLOGIES) else ", ".join(of), *key))
    return rows


def _topology_row(kind: str, name: str, about: str, default: str, values: str) -> dict[str, str]:
    return {"kind": kind, "name": name, "default": default, "description": about, "values": values}


def model_fields() -> list[dict[str, str]]:
    """Keys of ``model:``: first the sources of a model, then its fields, which may also override a preset."""
    of_hugging_face = "as in Hugging Face's config.json"
    families = ", ".join(FAMILIES)
    rows = [
        _row("preset", "a name of `simplan show models`; the other keys override its fields", "name"),
        _row("hf_config", "path of a config.json of Hugging Face; the other keys override its fields", "path"),
        _row("family", "family of the layers; without preset and hf_config, required keys must be given", families),
    ]
    about = _first_sentences(ModelSpec)
    for name, field in ModelSpec.model_fields.items():
        if name in _OF_NO_FILE:
            continue
        values = _WRITTEN_OTHERWISE.get(name, values_of(field.annotation, field.metadata))
        rows.append(_row(name, about.get(name, of_hugging_face), values, _default(name), _families_with(name)))
    return rows


def _row(name: str, about: str, values: str, default: str = "", families: str = "") -> dict[str, str]:
    return {"name": name, "default": default, "description": about, "values": values, "families": families}


def _default(name: str) -> str:
    """Default of a field in most families, then its defaults in others; ``required`` for none."""
    families: dict[str, list[str]] = {}
    for family in _having(name):
        families.setdefault(_default_of(name, family), []).append(family)
    (usual, _), *others = sorted(families.items(), key=lambda item: -len(item[1]))
    return "; ".join([usual, *(f"{default} for {', '.join(some)}" for default, some in others)])


def _default_of(name: str, family: str) -> str:
    required = ModelSpec.required_fields(family)
    if name in required:
        return "required"
    derived = FAMILIES[family].defaults({key: _PROBE[key] for key in required})
    value = derived.get(name, ModelSpec.model_fields[name].default)
    if isinstance(value, int) and value in _FORMULAS:
        return _FORMULAS[value]
    return (
        ", ".join(map(str, value))
        if isinstance(value, tuple) and value
        else word_of(None if value == () else value) or "none"
    )


def _having(name: str) -> list[str]:
    """Families with a field."""
    return [family for family, its in FAMILIES.items() if name in its.fields]


def _families_with(name: str) -> str:
    """Model families with a field, or the families without it if they are fewer."""
    having = _having(name)
    lacking = [family for family in FAMILIES if family not in having]
    return f"all but {', '.join(lacking)}" if len(lacking) < len(having) else ", ".join(having)


def _first_sentences(spec: type[BaseModel]) -> dict[str, str]:
    """The first sentence of the description of each field, from a small letter on and without its full stop."""
    sentences: dict[str, str] = {}
    for name, field in spec.model_fields.items():
        if field.description is not None:
            first = re.split(r"(?<=[^.])\. |; ", field.description)[0].rstrip(".")
            small = first[1:2].islower() and not first.startswith(_PROPER)
            sentences[name] = first[:1].lower() + first[1:] if small else first
    return sentences


_DEFAULTS = {
    "tp": "every divisor of the attention heads up to the devices of a node",
    "sequence_parallel": "true, false",
    "cp": f"1, 2, 4, 8 from {LONG_SEQUENCE:,} tokens on, else 1",
    "cp_comm": "ring; on CPU ranks all_gather",
    "ep": "every divisor of the experts that divides the ranks of a stage",
    "pp": "every divisor of the devices up to the number of layers",
    "schedule": ", ".join(DEFAULT_SCHEDULES),
    "virtual_stages": "every number that leaves each stage a layer",
    "dp_replicate": "every factorization of the rest into",
    "dp_shard": "dp_replicate x dp_shard",
    "zero_stage": "0, 1, 2, 3",
    "reshard_after_forward": "true, false",
    "microbatch_size": "every divisor of the local batch",
    "microbatch_sizes": "equal ones; on different nodes also balanced",
    "recompute": "none, selective, full",
    "recompute_modules": "core_attn alone",
    "grad_sync": "microbatch, step at zero_stage 2 and 3, else step",
    "placement": "tp, cp, dp_shard, dp_replicate, pp",
    "compiled": "the scenario's software.compiled",
    "loss": "the scenario's software.loss",
    "offload_activations": "the scenario's plan.offload_activations",
    "offload_optimizer": "the scenario's plan.offload_optimizer",
    "optimizer": "the scenario's training.optimizer",
    "base_weights": "the scenario's training.base_weights",
    "lora_rank": "the scenario's model.lora_rank",
    "objective": "step_time",
    "objectives": "",
    "top": "5",
    "max_memory_fraction": "0.95",
    "max_step_time_s": "",
    "dollars_per_device_hour": "",
    "token_budget": "",
    "num_devices": "the cluster's; with the objective num_devices its halves too",
    "recompute_layers": "least",
    "tp_across_nodes": "false",
    "replication": "whole gradients in every step",
    "compression": "none",
    "samples_factor": "",
}


def search_space() -> list[dict[str, str]]:
    """Every key with its default and its meaning, ranges of the plan and of the software first.

    The layer split is not a range: each plan has the one that ``predict`` gives it.
    """
    ranges = (*RANGES, *WAYS, *OPTION_RANGES)
    others = [name for name in SearchSpace.model_fields if name not in ranges]
    return [
        {"name": name, "default": _DEFAULTS[name], "description": SearchSpace.model_fields[name].description or ""}
        for name in (*ranges, *others)
    ]
