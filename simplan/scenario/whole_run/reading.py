"""Sections of a whole run in a scenario file; what other sections say about length and price must agree with them."""

from __future__ import annotations

import math
from typing import Any

from simplan import catalog
from simplan.goodput.sections import SECTIONS, Reliability, RunLength, RunSections, Spot
from simplan.model.model import ModelSpec
from simplan.scenario.collecting import Sections
from simplan.training import TrainingBudget, TrainingSection

_CAUSES = "causes"


def read_run(sections: Sections, data: dict[str, Any]) -> RunSections | None:
    """Sections of a whole run; None for none. An invalid section is left out, its problems recorded."""
    sections_read: dict[str, Any] = {}
    for name, spec in SECTIONS.items():
        if name in data:
            fields = _with_preset(sections, data[name]) if spec is Reliability else data[name]
            sections_read[name] = sections.read(spec, fields, (name,))
    spot = sections_read.get("spot")
    if isinstance(spot, Spot) and spot.zone is not None:
        sections.look_up(("spot", "zone"), catalog.spot_zone, spot.zone)
    return RunSections(**sections_read) if sections_read else None


def _with_preset(sections: Sections, data: Any) -> Any:
    """The section ``reliability`` with the keys of its preset, and the causes of both."""
    if not isinstance(data, dict) or "preset" not in data:
        return data
    preset = sections.look_up(("reliability", "preset"), catalog.reliability, data["preset"])
    own_causes = data.get(_CAUSES, [])
    if preset is None or not isinstance(own_causes, list):
        return data
    names = [cause.get("name") for cause in own_causes if isinstance(cause, dict)]
    causes = [*own_causes, *(cause for cause in preset.get(_CAUSES, ()) if cause["name"] not in names)]
    return {**preset, **data, _CAUSES: causes}


def read_budget(
    sections: Sections,
    run: RunSections | None,
    model: ModelSpec | None,
    training: TrainingSection | None,
    price: float | None,
) -> TrainingBudget:
    """Length and price of the training, from the sections of a whole run or from those of a step.

    Args:
        price: ``cluster.price_per_device_hour``.
    """
    length = _length(sections, None if run is None else run.run, model, training)
    budget = TrainingBudget(**length)
    tokens = None if training is None else training.num_tokens
    if not length:
        budget = TrainingBudget(num_tokens=tokens)
    elif tokens is not None and model is not None and training is not None:
        num_sequences = training.global_batch_size * training.sequences_per_sample
        steps = budget.steps(num_sequences, model.seq_len)
        by_tokens = math.ceil(tokens / (num_sequences * model.seq_len))
        if steps != by_tokens:
            rule = f"is {by_tokens:,} steps, and run is {steps:,}: both are the length of the training"
            sections.refuse(("training", "num_tokens"), rule, value=int(tokens), fix="keep one of the two")
    run_price = None if run is None or run.price is None else run.price.device_hour
    if run_price is not None and price is not None and run_price != price:
        rule = f"is another price than cluster.price_per_device_hour = {price:g}"
        sections.refuse(("price", "device_hour"), rule, value=run_price, fix="keep one of the two")
    return budget.model_copy(update={"price_per_device_hour": price if run_price is None else run_price})


def _length(
    sections: Sections, run: RunLength | None, model: ModelSpec | None, training: TrainingSection | None
) -> dict[str, Any]:
    """Length of ``run`` as a field of ``TrainingBudget``; empty for none. A law of the batch is one of steps."""
    if run is None or run.samples_at_batch is None:
        return {} if run is None else run.model_dump(exclude_none=True)
    if model is None or training is None:
        return {}
    tokens_per_sample = 1 if model.sample != "sequence" else model.seq_len
    try:
        return {"num_steps": run.samples_at_batch.num_steps(training.global_batch_size, tokens_per_sample)}
    except ValueError as error:
        sections.refuse(("run", "samples_at_batch"), str(error))
        return {}
