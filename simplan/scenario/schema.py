"""Keys of a scenario file: those of the cluster for people, and all of them as a JSON Schema for editors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simplan import catalog
from simplan.accuracy.measured import FALLBACK_FOR, Measured
from simplan.base import Spec
from simplan.goodput.sections import SECTIONS
from simplan.model.model import NAMES, ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.scenario.clusters import ClusterSection
from simplan.scenario.expectation import METRICS, Expectation
from simplan.search.space import OPTION_RANGES, RANGES, WAYS, SearchSpace
from simplan.software.software import SoftwareSpec
from simplan.training import TrainingSection

_CLUSTER_VALUES = {
    "preset": "name",
    "nodes": "list of mappings",
    "num_nodes": "1 and more",
    "num_devices": "1 and more",
    "device": "name, or mapping",
    "devices_per_node": "1 and more",
    "intra_link": "name, or mapping",
    "nics_per_node": "1 and more",
    "nic_gbit": "more than 0",
    "inter_link_gbit_per_node": "more than 0",
    "inter_link_gbit_per_device": "more than 0",
    "inter_link": "name, or mapping",
    "topology": "name, or mapping",
    "background": "list",
    "stragglers": "list",
    "slow_links": "list",
    "jitter": "mapping",
    "host_memory_bytes": "1 and more",
    "host_memory_bandwidth_bytes_per_s": "more than 0",
    "price_per_device_hour": "more than 0, at most 1e6",
}
"""Values of the keys of a cluster, most of which are read apart from their types; in the order of reading."""

_SCALARS_OR_LISTS = (*RANGES, *OPTION_RANGES, "num_devices", "objectives")
"""Keys of a search whose single value needs no brackets."""


def cluster_fields() -> list[dict[str, str]]:
    """Every key of ``cluster:``."""
    fields = ClusterSection.model_fields
    return [
        {"name": name, "description": fields[name].description or "", "values": values}
        for name, values in _CLUSTER_VALUES.items()
    ]


def scenario_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a scenario file.

    Every file that simplan reads is valid. The schema knows keys, types, limits and names of the catalog. simplan alone
    checks what must hold between keys.
    """
    definitions: dict[str, Any] = {}
    model = _section(ModelSpec, definitions, leave_out=("name", "packs", "sources", "captured"))
    names = ", ".join(catalog.names("models"))
    model["properties"] |= {
        "preset": _name("a name of `simplan show models`; the other keys override its fields", catalog.names("models")),
        "hf_config": {"type": "string", "description": "path of a config.json of Hugging Face"},
        "file": {"type": "string", "description": "path of a captured model (simplan capture)"},
        "captured": {"type": "string", "description": "a captured model as one word, which the dashboard writes"},
        "name": {"type": "string", "description": f"display name of a model that is none of {names}"},
        "document_lengths": _also(model["properties"]["document_lengths"], {"type": "object"}),
        **{name: _also(model["properties"][name], {"type": "string"}) for name in NAMES},
    }
    cluster = _section(ClusterSection, definitions)
    cluster["properties"]["preset"] = _also(
        _name(cluster["properties"]["preset"]["description"], catalog.names("clusters")), {"type": "null"}
    )
    training = _section(TrainingSection, definitions)
    plan = _section(ParallelPlan, definitions)
    plan["properties"]["stage_layers"] = _also(plan["properties"]["stage_layers"], {"type": "integer"})
    plan["properties"]["placement"] = _also(plan["properties"]["placement"], {"type": "string"})
    search = _section(SearchSpace, definitions)
    for key in _SCALARS_OR_LISTS:
        search["properties"][key] = _also(search["properties"][key], {"type": ["string", "number", "boolean"]})
    for key in WAYS:
        search["properties"][key] = _also(search["properties"][key], {"type": ["string", "object"]})
    options = {option for name in catalog.names("software") for option in catalog.software(name).options}
    fields = _section(SoftwareSpec, definitions)["properties"]
    profile = _name("a name of `simplan show software`", catalog.names("software"))
    of_profile: dict[str, Any] = {"preset": profile} | {option: fields[option] for option in sorted(options)}
    software = {"type": "object", "properties": of_profile, "additionalProperties": False}
    of_measured = dict.fromkeys(sorted({"preset", FALLBACK_FOR, *SoftwareSpec.model_fields} - {"id"}), True)
    any_field = {"anyOf": [profile, {"type": "object", "properties": of_measured, "additionalProperties": False}]}
    expect = _section(Expectation, definitions)
    expect["properties"]["metric"] = {"enum": sorted(METRICS)}
    whole_run = {name: _section(spec, definitions) for name, spec in SECTIONS.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "simplan scenario",
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 200},
            "model": model,
            "cluster": cluster,
            "training": training,
            "software": any_field,
            "plan": _also(plan, {"type": "null"}),
            "search": _also(search, {"type": "null"}),
            "expect": {"type": "array", "items": expect},
            "measured": _section(Measured, definitions),
            **whole_run,
        },
        "if": {"not": {"required": ["measured"]}},
        "then": {"properties": {"software": {"anyOf": [profile, software]}}},
        "required": ["model", "cluster", "training"],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _section(spec: type[Spec], definitions: dict[str, Any], leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """Schema of a section: no key is required, since presets and defaults give them; other keys are errors."""
    schema = spec.model_json_schema(ref_template="#/$defs/{model}")
    definitions.update(schema.pop("$defs", {}))
    left_out = set(leave_out)
    properties = {
        name: {key: value for key, value in field.items() if key != "title"}
        for name, field in schema["properties"].items()
        if name not in left_out
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _name(description: str, known: Iterable[str]) -> dict[str, Any]:
    """Schema of a name of the catalog; an editor offers those that are known, and simplan reads other spellings."""
    return {"type": "string", "description": description, "examples": sorted(known)}


def _also(schema: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Schema of values that either schema allows."""
    description: dict[str, Any] = {key: schema[key] for key in ("description", "default") if key in schema}
    return {"anyOf": [schema, other], **description}
