"""Fused GEMMs: matrices with one input that a framework stores as one, so that their input is quantized once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from simplan.model.layer import Gemm


def fused_gemms(gemms: Iterable[Gemm]) -> list[Gemm]:
    """Matmuls of a layer, with those that share one input fused into one, and likewise their adapters."""
    made: dict[tuple[object, ...], Gemm] = {}
    for gemm in gemms:
        key = _joint(gemm)
        first = made.get(key)
        made[key] = gemm if first is None else replace(first, name=f"{first.name}+{gemm.name}", n=first.n + gemm.n)
    return list(made.values())


def joins(one: Gemm, other: Gemm) -> bool:
    """True if two matmuls of a layer are fused into one."""
    return _joint(one) == _joint(other)


def _joint(gemm: Gemm) -> tuple[object, ...]:
    """Fusion key, equal for matmuls that are fused into one."""
    return gemm.joint or gemm.name, replace(gemm, name="", n=0)
