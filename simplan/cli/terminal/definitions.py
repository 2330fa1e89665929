"""Terms in reports, sections of a scenario and keys of ``expect:``, as printed by ``simplan show``."""

from __future__ import annotations

from simplan.scenario import METRICS
from simplan.scenario.expectation import Expectation

_REPORTED = {
    "split: compute": "forward and backward on a rank's compute stream",
    "split: recompute": "forward recomputed for the backward pass",
    "split: exposed communication": "communication while the compute stream idles",
    "split: wait": "bubble, or a late peer, also inside a collective",
    "split: host": "CPU-bound time",
    "split: optimizer": "the optimizer step; the six shares exclude each other and sum to the step",
    "interval": "90 % interval, from the uncertainty of each cost",
    "allocated": "memory held by tensors",
    "reserved": "memory held by the caching allocator: allocated, rounded and fragmented",
    "device": "memory in use on the device: reserved, and the context of driver and communication library",
    "memory verdict": "fits, or does not fit; may not fit, or likely does not fit, where the 90 % interval of the peak "
    "reaches over the device memory; likely not, if tensors and context leave less than 3 % of it; unknown, where more "
    "is predicted for a runtime whose peaks were never compared with measured ones",
    "packed documents": "several documents in a sequence: attention within each, model FLOPs without padding",
    "multi-token prediction": "FLOPs of layers for later tokens are model FLOPs, as in Megatron; tokens count once",
    "signed error": "(predicted - measured) / measured",
    "spread": "half the distance of the 10th and 90th percentile of the repeats, relative to their median",
}


def definitions() -> list[dict[str, str]]:
    """Name, unit and definition of every metric that ``expect`` knows, then of the other words in reports."""
    metrics = [
        {"name": name, "unit": metric.unit, "definition": metric.definition, "expect": "yes"}
        for name, metric in METRICS.items()
    ]
    words = [{"name": name, "unit": "", "definition": text, "expect": ""} for name, text in _REPORTED.items()]
    return metrics + words


MINIMAL_SCENARIO = """\
model: {preset: llama3-8b}
cluster: {preset: dgx-h100}
training: {global_batch_size: 16}
plan: {dp_shard: 8, recompute: full}"""
"""Complete scenario without optional sections, as a file."""

_SECTIONS = {
    "name": ("the file's name", "title of reports", ""),
    "model": ("required", "preset, config.json of Hugging Face, or sizes", "simplan show model, models"),
    "cluster": ("required", "devices, nodes and links", "simplan show cluster, clusters, devices, links, topologies"),
    "training": ("required", "batch, precision, optimizer and task", "simplan show training"),
    "software": ("torch", "framework profile: a name, or a mapping of preset and options", "simplan show software"),
    "plan": ("required without search", "one parallel plan", "simplan show plan"),
    "search": ("required without plan", "ranges of plans for simplan search; {} for all", "simplan show search-space"),
    "expect": ("none", "expectations for simplan check, with plan only", "simplan show expect"),
    "measured": ("none", "figures of a run, for simplan accuracy", "simplan show measured"),
    "run": ("none", "length of the whole run", "simplan show run"),
    "reliability": ("none", "failures, and how they are noticed", "simplan show run, reliability"),
    "checkpoint": ("none", "when checkpoints are written, and how long that takes", "simplan show run"),
    "recovery": ("none", "from a failure until training goes on: restart, spares, repair", "simplan show run"),
    "spot": ("none", "nodes that their provider takes back", "simplan show run, reliability"),
    "evaluation": ("none", "pauses for evaluations", "simplan show run"),
    "price": ("none", "price of devices on demand, spot and spare", "simplan show run"),
    "power": ("none", "power of devices, and emissions", "simplan show run"),
}
_OPERATORS = {
    "metric": "one of the metrics below; required",
    "value": "required value: a number, or true or false for fits and host_fits",
    "min": "lower bound, inclusive; instead of value",
    "max": "upper bound, inclusive; instead of value",
    "rel_tol": "allowed deviation from value, excess over max or shortfall from min, as a fraction of it",
    "abs_tol": "the same in the unit of the metric; with both, the larger counts",
    "why": "source of the expectation, printed if it fails",
}


def scenario_sections() -> list[dict[str, str]]:
    """Every section of a scenario file, with its default and the command that lists its keys."""
    return [
        {"name": name, "default": default, "what for": about, "more": more}
        for name, (default, about, more) in _SECTIONS.items()
    ]


def expectation_fields() -> list[dict[str, str]]:
    """Every key of an entry of ``expect:``, then every metric with its unit."""
    keys = [{"name": key, "kind": "key", "unit": "", "what for": _OPERATORS[key]} for key in Expectation.model_fields]
    metrics = [
        {"name": name, "kind": "metric", "unit": metric.unit, "what for": metric.definition}
        for name, metric in METRICS.items()
    ]
    return [*keys, *metrics]
