"""Ranges without a single candidate between them, in the words of who gave them."""

from __future__ import annotations

from collections.abc import Mapping

from simplan.errors import Problem
from simplan.problems import render_value
from simplan.search.enumeration import Enumeration
from simplan.search.space import SearchSpace, given_ranges
from simplan.spec.numbers import divisors, either
from simplan.spec.software import SoftwareSpec

__all__ = ["nothing_to_compare"]

_AXES = ("tp", "cp", "pp", "dp_replicate", "dp_shard")


def nothing_to_compare(space: SearchSpace, software: SoftwareSpec, enumerations: Mapping[int, Enumeration]) -> Problem:
    """What to tell of a space whose enumerations are all empty.

    Args:
        space: The ranges.
        software: Whose own restrictions are nothing that a user gave.
        enumerations: By number of devices.
    """
    given = given_ranges(software, space)
    if any(enumeration.meshes for enumeration in enumerations.values()):
        return _problem(space, given, "have no plan in common", "widen one of them, or leave it out")
    sizes = either(f"{size:,}" for size in enumerations)
    axes = tuple(name for name in given if name in _AXES)
    rule = f"no values make tp x cp x pp x dp_replicate x dp_shard = {sizes} devices"
    if len(axes) == 1:
        fitting = sorted({divisor for size in enumerations for divisor in divisors(size)})
        return _problem(space, axes, rule, f"{axes[0]} must divide {sizes}: {either(fitting)}")
    return _problem(space, axes, rule, "change one of them, or leave it out")


def _problem(space: SearchSpace, names: tuple[str, ...], rule: str, fix: str) -> Problem:
    ranges = {name: list(getattr(space, name)) for name in names}
    if len(names) == 1:
        return Problem(field=f"search.{names[0]}", value=render_value(ranges[names[0]]), rule=rule, fix=fix)
    shown = ", ".join(f"{name} {render_value(values)}" for name, values in ranges.items())
    return Problem(field="search", value=shown, rule=rule, fix=fix)
