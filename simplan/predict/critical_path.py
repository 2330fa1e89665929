"""What the step time is made of: the chain of operations that determines it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from simplan.cost.pricing import Pricing
from simplan.predict.simulated import Simulated
from simplan.program.program import Op, Program, Stream
from simplan.program.timeline import SpanKind
from simplan.sim.compiled import compile_program

__all__ = ["CriticalPath", "critical_path"]

_SENDS = {Stream.RECV_F: Stream.SEND_F, Stream.RECV_B: Stream.SEND_B}


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """A longest chain of a simulated step: every operation starts when the one before it ends.

    Attributes:
        ops: Indices into ``Program.ops``, first to last; of a meeting the first member. Operations that take no time
            are left out.
        seconds: Time on the path by what it goes to: ``compute``, ``recompute``, ``optimizer`` (``SpanKind``), and
            communication by its stream, a message as the ``send_f`` or ``send_b`` that it is. They sum to the step.
    """

    ops: tuple[int, ...]
    seconds: dict[str, float]


def critical_path(simulated: Simulated) -> CriticalPath:
    """Follows the last operation back to what it waited for, and so on to the beginning of the step.

    Where two chains are equally long, the one over the operation's own stream is taken.

    Args:
        simulated: One step of a static Program.

    Raises:
        NotModelledError: Ranks share cores: no chain determines the step then.
    """
    program, pricing = simulated.program, simulated.pricing
    compiled = compile_program(program, simulated.sharing)
    end_s = [simulated.times.end_s[op] for op in compiled.leader.tolist()]
    path = []
    node = max(range(len(end_s)), key=end_s.__getitem__, default=None)
    while node is not None:
        path.append(int(compiled.leader[node]))
        before = compiled.before[compiled.first[node] : compiled.first[node + 1]].tolist()
        node = max(before, key=end_s.__getitem__, default=None)
    ops = tuple(op for op in reversed(path) if pricing.durations_s[op])
    return CriticalPath(ops, _seconds(program, pricing, ops))


def _seconds(program: Program, pricing: Pricing, ops: tuple[int, ...]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for index in ops:
        parts.setdefault(_share(program.ops[index]), []).append(pricing.durations_s[index])
    return {share: math.fsum(seconds) for share, seconds in parts.items()}


def _share(op: Op) -> str:
    return str(_SENDS.get(op.stream, op.stream) if op.kind is SpanKind.COMMUNICATION else op.kind)
