"""Labels that the text and the SVG of a pipeline share: headings, labels of boxes, ticks of the time axis."""

from __future__ import annotations

import math
from typing import NamedTuple

from simplan.program.action import ActionKind
from simplan.report.drawings.drawing import Box, DrawnRank, PipelineDrawing
from simplan.units import counted, format_percent, format_time

__all__ = ["IDLE_WORDS", "WORDS", "Tick", "clean", "heading", "labels", "row_figures", "subheading", "ticks"]

WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward of inputs",
    ActionKind.BACKWARD_WEIGHT: "backward of weights",
    ActionKind.UNSHARD: "unpacking gathered parameters",
    ActionKind.REDUCE_GRAD: "scaling and packing gradients",
    ActionKind.OPTIM: "optimizer step",
}
"""Every kind of action that computes something, in words."""

IDLE_WORDS = "idle: share of the time from the first to the last computation, without the optimizer step"


class Tick(NamedTuple):
    """Tick of the time axis: position and label."""

    time_s: float
    label: str


def clean(name: str) -> str:
    """A name without line breaks and other characters that neither a line of text nor XML can hold."""
    return "".join(character if character.isprintable() else "?" for character in name)


def heading(drawing: PipelineDrawing) -> str:
    """Name and step time."""
    return f"{clean(drawing.name)}: one step in {format_time(drawing.step_time_s)}, as predicted"


def subheading(drawing: PipelineDrawing) -> str:
    """Number of pipeline ranks and microbatches of a drawing."""
    one_of = f", the first of {drawing.ranks_per_row} ranks at each place" if drawing.ranks_per_row > 1 else ""
    several = f"{drawing.num_microbatches} microbatch{'' if drawing.num_microbatches == 1 else 'es'}"
    return f"{counted(len(drawing.rows), 'pipeline rank')}{one_of}; {several}"


def row_figures(row: DrawnRank) -> tuple[str, str]:
    """Idle share and activations in flight (stage by stage, empty when unknown) of a rank."""
    in_flight = "+".join(str(number) for _, number in sorted(row.activations_in_flight.items()))
    return format_percent(row.idle_fraction), in_flight


def labels(box: Box, several_stages: bool) -> tuple[str, ...]:
    """Labels of a box, longest first, in torch's notation; the stage is shown only if ranks have several stages.

    >>> from simplan.program.action import Action
    >>> labels(Box(Action.parse("3F12"), 0.0, 1.0), several_stages=True)
    ('3F12', 'F12')
    """
    action = box.action
    short = str(action.kind) if action.microbatch is None else f"{action.kind}{action.microbatch}"
    return (str(action), short) if several_stages and action.microbatch is not None else (short,)


def ticks(step_time_s: float, most: int) -> tuple[Tick, ...]:
    """Round times from 0 to the end of the step, in s from a second on, else in ms; the last one names the unit.

    Args:
        step_time_s: Length of the axis.
        most: Largest number of ticks after the one at 0; at least 1.

    >>> [tick.label for tick in ticks(0.26, 6)]
    ['0', '50', '100', '150', '200', '250 ms']
    """
    unit, unit_s = ("s", 1.0) if step_time_s >= 1.0 else ("ms", 1e-3)
    length = step_time_s / unit_s
    power = 10.0 ** math.floor(math.log10(length / most))
    distance = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power * most >= length)
    values = [number * distance for number in range(int(length / distance) + 1)]
    texts = [f"{value:.6g}" for value in values]
    texts[-1] += f" {unit}"
    return tuple(Tick(value * unit_s, text) for value, text in zip(values, texts, strict=True))
