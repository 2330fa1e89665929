"""Definitions of the terms in reports, as printed by ``simplan show metrics``."""

from __future__ import annotations

from simplan.scenario import METRICS

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
