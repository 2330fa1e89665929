"""The device of a scenario's cluster: a name, or a mapping that overrides fields of a named one.

::

    device: h100-sxm-80gb
    device: {preset: h100-sxm-80gb, memory_bytes: 100000000000}
    device: {peak_flop_per_s: {bf16: 2e14}, memory_bandwidth_bytes_per_s: 1e12, memory_bytes: 34359738368}

Measured values of the named device are dropped with the field they belong to: another peak drops the best measured
matmul, and another architecture brings its own kernels.
"""

from __future__ import annotations

from typing import Any

from simplan import catalog
from simplan.cluster.hardware import DeviceSpec
from simplan.problems import Path
from simplan.scenario.collecting import Sections

__all__ = ["read_device"]

_PATH: Path = ("cluster", "device")
_ANY = "h100-sxm-80gb"  # base for reading the other fields if the device is unknown
_LEAST: dict[str, tuple[float, str]] = {
    "memory_bytes": (1e6, "bytes: 80 GiB is 85899345920"),
    "memory_bandwidth_bytes_per_s": (1e8, "bytes per second: 3.35 TB/s is 3.35e12"),
    "peak_flop_per_s": (1e9, "FLOP per second: 989 TFLOP/s is 989e12"),
    "matmul_flop_per_s": (1e9, "FLOP per second: 795 TFLOP/s is 795e12"),
}
"""Lower bounds of plausible values, with their units: smaller numbers have the wrong unit."""


def read_device(sections: Sections, data: Any, default: DeviceSpec | None) -> DeviceSpec | None:
    """Device of the file; None, after recording the problems, when the description is invalid.

    Args:
        data: Value of ``cluster.device``.
        default: Device whose fields a mapping without ``preset`` overrides: the one of the cluster's preset.
    """
    if not isinstance(data, dict):
        return sections.look_up(_PATH, catalog.device, data)
    given, before = {key: value for key, value in data.items() if key != "preset"}, sections.num_problems
    if "preset" in data:
        found = sections.look_up((*_PATH, "preset"), catalog.device, data["preset"])
        default = found or catalog.device(_ANY)
    if "architecture" in given:
        sections.look_up((*_PATH, "architecture"), catalog.kernel_fields, given["architecture"])
    if sections.num_problems > before:  # read the other fields nevertheless, to report their problems
        given.pop("architecture", None)
    base = default.model_dump() if default else {"id": "inline"}
    device = sections.read(DeviceSpec, {**base, **_implied(given, default), **given}, _PATH)
    _refuse_implausible(sections, given)
    link = base.get("host_link") if "host_link" not in given else given["host_link"]
    if isinstance(link, str):
        sections.look_up((*_PATH, "host_link"), catalog.link, link)
    return device if sections.num_problems == before else None


def _implied(given: dict[str, Any], default: DeviceSpec | None) -> dict[str, Any]:
    """Fields that change with the given fields, and all sources."""
    implied: dict[str, Any] = {}
    sources = {} if default is None else default.sources
    if default is None or "architecture" in given:
        of_kernels = catalog.kernel_fields(given.get("architecture", "other"))
        sources = {key: source for key, source in sources.items() if not key.startswith("kernels.")}
        sources |= of_kernels["sources"]
        implied["kernels"] = of_kernels["kernels"]
    peak = given.get("peak_flop_per_s")
    if default is not None and isinstance(peak, dict):
        before, measured = default.peak_flop_per_s, default.matmul_flop_per_s
        kept = {dtype: rate for dtype, rate in measured.items() if peak.get(dtype) == before.get(dtype)}
        implied["matmul_flop_per_s"] = kept
    return implied | {"sources": sources | dict.fromkeys(given, "the scenario")}


def _refuse_implausible(sections: Sections, given: dict[str, Any]) -> None:
    """Records a problem for each number below the range of real devices."""
    for field in _LEAST.keys() & given.keys():
        least, unit = _LEAST[field]
        value = given[field]
        for key, number in value.items() if isinstance(value, dict) else [(None, value)]:
            if isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < least:
                path = (*_PATH, field) if key is None else (*_PATH, field, key)
                sections.refuse(path, "is less than any device has", value=number, fix=f"write it in {unit}")
