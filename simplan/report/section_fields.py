"""Fields of the scenario sections ``model:``, ``cluster:``, ``training:`` and ``search:``, and of topologies."""

from __future__ import annotations

import re
from inspect import getdoc

from pydantic import BaseModel

from simplan.cluster.topology import TOPOLOGIES, GraphLink, LayeredTopology, Pcie
from simplan.documentation import documentation
from simplan.model.families import FAMILIES
from simplan.model.model import ModelSpec
from simplan.report.plan_fields import values_of, word_of
from simplan.search.enumeration import DEFAULT_SCHEDULES, LONG_SEQUENCE
from simplan.search.space import OBJECTIVES, RANGES, SOFTWARE_RANGES, SearchSpace
from simplan.training import TrainingSection

_TRAINING = {
    "global_batch_size": "sequences (or images) of an optimizer step, over all devices",
    "precision": "precision of the matmuls of linear layers; all except fp32 and tf32 are mixed precision",
    "pure_bf16": "weights, gradients and optimizer states in bf16 as well, without fp32 copies",
    "fp8_recipe": "for fp8: scaling granularity; default: per tensor",
    "optimizer": "optimizer, with its states per parameter",
    "fused_optimizer": "one kernel for the update; false for torch's foreach; default: where such a kernel exists",
    "clip_grad_norm": "maximum norm of the gradients of the model",
    "task": "lora trains adapters of model.lora_rank only; sft computes the same as pretrain",
    "backup_workers": "replicas of plan.dp_replicate whose gradients, the last to arrive, a step drops",
    "num_tokens": "tokens of the full training, for its days and cost; at most 1e18; a step does not depend on it",
}
_CLUSTER = {
    "preset": ("a name of `simplan show clusters`; the other keys override its fields", "name"),
    "nodes": (
        f"groups of different nodes ({documentation('how-to/mixed-devices')}), each a mapping with preset, num_nodes "
        "and other keys of this list",
        "list of mappings",
    ),
    "num_nodes": ("number of nodes; 1, or the nodes that num_devices needs", "1 and more"),
    "num_devices": ("in place of num_nodes: devices, node by node", "1 and more"),
    "device": (
        f"a name of `simplan show devices`, or its datasheet ({documentation('how-to/devices')})",
        "name, or mapping",
    ),
    "devices_per_node": ("without a preset: devices of a node", "1 and more"),
    "intra_link": ("link between devices of a node: a name of `simplan show links`, or a mapping", "name, or mapping"),
    "nics_per_node": ("network cards of a node, which its devices share; default: the preset's, else 1", "1 and more"),
    "nic_gbit": ("rate of one network card, Gbit/s: InfiniBand or RoCE", "more than 0"),
    "inter_link_gbit_per_node": ("network of a node, Gbit/s, instead of its cards", "more than 0"),
    "inter_link_gbit_per_device": (
        "network of a node divided by its devices, Gbit/s, instead of its cards",
        "more than 0",
    ),
    "inter_link": (
        "link of the network instead of a rate, e.g. efa-400gbit per device, tcp-10gbit for one card per node",
        "name, or mapping",
    ),
    "topology": (
        "how nodes are joined: a name of `simplan show topologies`, or kind and keys (`simplan show topology`)",
        "name, or mapping",
    ),
    "background": (
        "other jobs on the topology: constant rates, [{from: node0, to: node4, gbit: 100}], or jobs on nodes of their "
        f"own ({documentation('how-to/network')}), [{{nodes: [1, 3], offset_s: 0.1, job: {{model: ...}}}}]",
        "list",
    ),
    "stragglers": ("ranks that compute more slowly: [{rank: 17, slowdown: 1.3}, {node: node2, slowdown: 1.1}]", "list"),
    "slow_links": (
        "links of the topology: [{link: leaf0 -> spine, bandwidth_share: 0.5}]; flapping with slow_s and period_s",
        "list",
    ),
    "jitter": (
        "random variation of durations: {compute_relative_std: 0.05, communication_relative_std: 0.1, seed: 1}",
        "mapping",
    ),
    "host_memory_bytes": ("host memory of a node, for offloading", "1 and more"),
    "host_memory_bandwidth_bytes_per_s": (
        "host memory bandwidth of all sockets, for updates on the CPU; default: 409.6e9",
        "more than 0",
    ),
    "price_per_device_hour": (
        "price of one device for one hour in any currency, for the cost of training.num_tokens",
        "more than 0, at most 1e6",
    ),
}
_MAPPINGS = {"inside": "name, or mapping", "links": "list of mappings", "between": "two names"}
"""Values of keys of a topology that are no scalars."""
_OF_NO_FILE = ("name", "family", "packs", "sources")
_PROPER = ("Hugging Face",)
_PROBE = {
    **{name: 1001 + index for index, name in enumerate(ModelSpec.model_fields)},
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
_WRITTEN_OTHERWISE = {"document_lengths": "list of 1 and more; or a mapping with their distribution"}


def training_fields() -> list[dict[str, str]]:
    """Every key of ``training:`` in the order of ``TrainingSection``."""
    return [
        {
            "name": name,
            "default": "required" if field.is_required() else word_of(field.default),
            "description": _TRAINING[name],
            "values": values_of(field.annotation, field.metadata),
        }
        for name, field in TrainingSection.model_fields.items()
    ]


def cluster_fields() -> list[dict[str, str]]:
    """Every key of ``cluster:``."""
    return [{"name": name, "description": about, "values": values} for name, (about, values) in _CLUSTER.items()]


def topology_fields() -> list[dict[str, str]]:
    """Every key of ``cluster.topology``: for all kinds, then for each kind, then those of ``node`` and ``links``."""
    preset = "in place of kind: a name of `simplan show topologies`; the other keys override its fields"
    rows = [_topology_row("", "preset", preset, "", "name")]
    rows.append(_topology_row("", "kind", "kind of the topology", "required", ", ".join(TOPOLOGIES)))
    wiring = "wiring inside a node; default: a switch that joins all devices without contention"
    rows.append(_topology_row("all except torus", "node", wiring, "", "mapping"))
    routing = _attributes(LayeredTopology)["routing"]
    rows.append(_topology_row("leaf_spine, rail, fat_tree", "routing", routing, "adaptive", "adaptive, ecmp"))
    parts: dict[str, tuple[str, type[BaseModel]]] = {kind: ("", spec) for kind, spec in TOPOLOGIES.items()}
    parts |= {"node": ("node.", Pcie), "graph links": ("links.", GraphLink)}
    for kind, (prefix, spec) in parts.items():
        about = _attributes(spec)
        for name, field in spec.model_fields.items():
            if name in ("node", "routing") or (name == "kind" and not prefix):
                continue
            default = "required" if field.is_required() else word_of(field.default)
            values = _MAPPINGS.get(name) or values_of(field.annotation, field.metadata)
            about_field = "pcie: devices below PCIe switches or the host" if name == "kind" else about[name]
            rows.append(_topology_row(kind, f"{prefix}{name}", about_field, default, values))
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
    about = _attributes(ModelSpec)
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
    (most, _), *others = sorted(families.items(), key=lambda item: -len(item[1]))
    return "; ".join([most, *(f"{default} for {', '.join(some)}" for default, some in others)])


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


def _attributes(spec: type[BaseModel]) -> dict[str, str]:
    """The first sentence of a docstring on each attribute, from a small letter on and without its full stop."""
    listed = (getdoc(spec) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    sentences: dict[str, str] = {}
    for names, text in found:
        first = re.split(r"(?<=[^.])\. |; ", " ".join(text.replace("``", "").split()))[0].rstrip(".")
        small = first[1:2].islower() and not first.startswith(_PROPER)
        sentences |= dict.fromkeys(names.split(", "), first[:1].lower() + first[1:] if small else first)
    return sentences


_DEFAULTS = {
    "tp": (
        "every divisor of the attention heads up to the devices of a node",
        "must also divide key-value heads, MLP and any vocabulary that is not padded; 1 for mixtures of experts",
    ),
    "sequence_parallel": ("true, false", "where tp > 1"),
    "cp": (f"1, 2, 4, 8 from {LONG_SEQUENCE:,} tokens on, else 1", ""),
    "cp_comm": ("ring; on CPU ranks all_gather", "where cp > 1"),
    "ep": ("every divisor of the experts that divides the ranks of a stage", "mixtures of experts"),
    "pp": ("every divisor of the devices up to the number of layers", ""),
    "schedule": (", ".join(DEFAULT_SCHEDULES), "where pp > 1"),
    "virtual_stages": ("every number that leaves each stage a layer", "where pp > 1; those of the schedule"),
    "dp_replicate": ("every factorization of the rest into", "dp_replicate x dp_shard x tp x cp x pp = devices"),
    "dp_shard": ("dp_replicate x dp_shard", ""),
    "zero_stage": ("0, 1, 2, 3", "where there are several shards; 0 only where dp_shard = 1"),
    "reshard_after_forward": ("true, false", "at zero_stage 3; ZeRO-3 that does not reshard is ZeRO-2, listed as that"),
    "microbatch_size": ("every divisor of the local batch", "global_batch_size / (dp_replicate x dp_shard)"),
    "microbatch_sizes": (
        "equal ones; on different nodes also balanced",
        "balanced, null for equal ones, or both: [null, balanced]",
    ),
    "recompute": ("none, selective, full", ""),
    "recompute_modules": (
        "core_attn alone",
        "of recompute selective: lists of modules to recompute together, where the software has them",
    ),
    "grad_sync": (
        "microbatch, step at zero_stage 2 and 3, else step",
        "where pp = 1, a step has several microbatches and the software has both",
    ),
    "placement": (
        "tp, cp, dp_shard, dp_replicate, pp",
        "orders of axes to compare, each from inside of nodes outwards",
    ),
    "compiled": ("the scenario's software.compiled", "true, false to compare both, where the software has the option"),
    "loss": ("the scenario's software.loss", "whole and losses in chunks to compare, where the software has them"),
    "objective": ("step_time", ", ".join(OBJECTIVES)),
    "objectives": ("", "two objectives: Pareto front, ranked by the first"),
    "top": ("5", "plans to rank"),
    "max_memory_fraction": (
        "0.95",
        "maximum fraction of the device memory of a plan, allocator reserve included; 1 keeps no memory free",
    ),
    "max_step_time_s": ("", "deadline of a step"),
    "dollars_per_device_hour": ("", "your price, for the objective cost; default: cluster.price_per_device_hour"),
    "token_budget": ("", "tokens to train on, for the objective cost; default: training.num_tokens"),
    "num_devices": ("the cluster's; with the objective num_devices its halves too", "numbers of devices to compare"),
    "recompute_layers": (
        "least",
        "plans that need full recomputation, also with the fewest blocks per stage that fit; or all: only with all",
    ),
    "tp_across_nodes": ("false", "tensor-parallel groups may span nodes"),
}


def search_space() -> list[dict[str, str]]:
    """Every key with its default and its meaning, ranges of the plan and of the software first.

    The layer split is not a range: each plan has the one that ``predict`` gives it.
    """
    ranges = (*RANGES, *SOFTWARE_RANGES)
    others = [name for name in SearchSpace.model_fields if name not in ranges]
    return [
        {"name": name, "default": _DEFAULTS[name][0], "description": _DEFAULTS[name][1]} for name in (*ranges, *others)
    ]
