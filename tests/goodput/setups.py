"""Setups of whole runs, small enough for the reference."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from simplan.goodput.setup import CauseSetup, RunSetup, Size

STEP_S = 10.0
NODES = 8
INF = float("inf")


def checkpointed(num_steps: int, **changes: Any) -> RunSetup:
    """One device, a step of one second, and a checkpoint after each that takes no time."""
    usual: dict[str, Any] = {
        "sizes": (Size(num_nodes=1, step_s=1.0),),
        "devices_per_node": 1,
        "checkpoint_every": 1,
    }
    return RunSetup(num_steps=num_steps, **usual | changes)


def failures(mtbf_s: float, **changes: Any) -> CauseSetup:
    """Failures of the job as a whole that take no node away."""
    usual: dict[str, Any] = {"name": "failure", "units_per_node": 0, "mtbf_s": mtbf_s, "num_nodes": 0}
    return CauseSetup(**usual | changes)


def _causes() -> st.SearchStrategy[CauseSetup]:
    return st.builds(
        CauseSetup,
        name=st.just("cause"),
        units_per_node=st.sampled_from([0, 1, 8, 0.5]),
        mtbf_s=st.sampled_from([3e3, 1e4, 3e4]),
        shape=st.sampled_from([1.0, 1.0, 0.7, 2.0]),
        age_s=st.sampled_from([0.0, 500.0]),
        num_nodes=st.integers(0, 3),
        planned=st.booleans(),
        at_once=st.sampled_from([0.0, 0.3]),
        timeout=st.sampled_from([0.0, 0.4]),
        repair_s=st.sampled_from([0.0, 700.0, 2000.0]),
    )


def _sizes(policy: str, group_nodes: int) -> tuple[Size, ...]:
    if policy == "shrink":
        return tuple(Size(num_nodes=num, step_s=STEP_S * NODES / num) for num in (NODES, 6, 3))
    if policy == "continue":
        groups = range(NODES, NODES // 2 - 1, -group_nodes)
        return tuple(Size(num_nodes=num, step_s=STEP_S + 0.1 * (NODES - num), advance=num / NODES) for num in groups)
    return (Size(num_nodes=NODES, step_s=STEP_S),)


@st.composite
def setups(draw: st.DrawFn) -> RunSetup:
    """Setups with all that engines know, each part absent in half of them."""

    def some(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    policy, group_nodes = some("restart", "shrink", "continue"), some(1, 2)
    is_spot, has_trace = draw(st.booleans()), some(False, False, True)
    return RunSetup(
        num_steps=draw(st.integers(50, 300)),
        sizes=_sizes(policy, group_nodes),
        devices_per_node=some(1, 8),
        policy=policy,
        evaluation_every=some(0, 35),
        evaluation_s=40.0,
        checkpoint_every=some(0, 7, 10, 10),
        blocking_s=some(0.0, 5.0),
        write_s=some(0.0, 60.0, 150.0),
        load_s=some(0.0, 30.0),
        keep=some(0, 1, 3),
        memory_every=some(0, 3),
        memory_blocking_s=some(0.0, 1.0),
        memory_load_s=some(0.0, 5.0),
        causes=tuple(draw(st.lists(_causes(), max_size=3))),
        detection_s=some(0.0, 30.0),
        timeout_s=some(0.0, 300.0),
        corruption_mtbf_s=some(INF, 8e4),
        corruption_found_s=some(0.0, 400.0),
        slow_mtbf_s=some(INF, 8e4),
        slow_factor=some(1.0, 1.5),
        slow_found_s=some(0.0, 400.0),
        maintenance_every_s=some(INF, 1000.0),
        maintenance_s=100.0,
        restart_s=some(0.0, 95.0),
        takeover_s=some(INF, 20.0),
        diagnosis_s=some(0.0, 60.0),
        spares=some(0, 1, 4),
        repair_s=some(0.0, 1500.0),
        repair_is_exponential=draw(st.booleans()),
        group_nodes=group_nodes,
        reconfigure_s=some(0.0, 5.0),
        join_s=some(0.0, 3.0),
        preemption_mtbf_s=some(1e4, 3e4) if is_spot and not has_trace else INF,
        notice_s=some(0.0, 20.0),
        spot_wait_s=some(0.0, 500.0),
        on_demand=draw(st.booleans()),
        is_spot=is_spot,
        trace_s=(0.0, 2500.0, 3100.0, 4700.0, 5000.0) if is_spot and has_trace else (),
        trace_nodes=(some(NODES, 2 * NODES), some(2, 7), NODES, some(0, 5)) if is_spot and has_trace else (),
    )


def changed_fields(setup: RunSetup) -> set[str]:
    """Fields of a setup, its causes and its sizes that are not at their defaults, or have none."""
    parts: tuple[RunSetup | CauseSetup | Size, ...] = (setup, *setup.causes, *setup.sizes)
    return {
        f"{type(part).__name__}.{field_of_part.name}"
        for part in parts
        for field_of_part in fields(part)
        if getattr(part, field_of_part.name) != field_of_part.default
    }
