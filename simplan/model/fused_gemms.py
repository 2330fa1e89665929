"""Matrices with one input that a framework holds as one: one product, and its input is quantized once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from simplan.model.layer import Gemm

__all__ = ["joined_gemms", "joins"]


def joined_gemms(gemms: Iterable[Gemm]) -> list[Gemm]:
    """Matrix products of a layer with those of one input as one, and those of their adapters likewise.

    Args:
        gemms: Of one layer.
    """
    made: dict[tuple[object, ...], Gemm] = {}
    for gemm in gemms:
        key = _joint(gemm)
        first = made.get(key)
        made[key] = gemm if first is None else replace(first, name=f"{first.name}+{gemm.name}", n=first.n + gemm.n)
    return list(made.values())


def joins(one: Gemm, other: Gemm) -> bool:
    """Whether two products of a layer are parts of one."""
    return _joint(one) == _joint(other)


def _joint(gemm: Gemm) -> tuple[object, ...]:
    """Equal for parts of one product."""
    return gemm.joint or gemm.name, replace(gemm, name="", n=0)
