"""What must hold where linear layers are in 8 or 4 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.low_precision import LOW_PRECISIONS, LinearFormat, quantized_linears
from simplan.spec.model import ModelSpec
from simplan.spec.numbers import either
from simplan.spec.plan import ParallelPlan
from simplan.spec.schedules import SCHEDULE_FACTS, is_own_schedule
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["low_precision_rules", "low_precision_sizes", "unmodelled_low_precision"]

_UNMODELLED_FAMILIES = {
    "resnet": "its matrix products are convolutions",
    "t5": "nobody has compared its memory with torch's",
}


def unmodelled_low_precision(
    model: ModelSpec, training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec
) -> Iterator[Problem]:
    """What is known and not modelled; nothing in 16 bits and more.

    Args:
        model, training, plan, software: What is asked.
    """
    if training.precision not in LOW_PRECISIONS:
        return
    low = software.low_precision.get(training.precision)
    if low is None:  # said with the precisions that are in no software's list
        return
    recipe = training.fp8_recipe
    if recipe is not None and training.precision == "fp8" and recipe not in low.recipes:
        yield Problem(
            field="training.fp8_recipe",
            value=recipe,
            rule=f"linear layers of {software.id} have no such recipe",
            fix=f"use {either(low.recipes)}",
        )
    if model.family in _UNMODELLED_FAMILIES:
        yield Problem(
            field="training.precision",
            value=training.precision,
            rule=f"is not modelled yet for {model.family}: {_UNMODELLED_FAMILIES[model.family]}",
            fix="use bf16",
        )
    if low.kept == "quantized":
        yield from _unmodelled_kept(model, training)
    facts = SCHEDULE_FACTS.get(plan.schedule)
    if is_own_schedule(plan.schedule) or (facts is not None and facts.splits_backward):
        what = "a schedule of your own" if facts is None else "a backward in two parts"
        yield Problem(
            field="plan.schedule",
            value=plan.schedule,
            rule=f"{what} is not modelled with training.precision = {training.precision}: a linear layer in low "
            "precision is one function of autograd, which makes the gradients of input and weight together",
            fix="use 1f1b, or precision bf16",
        )


def _unmodelled_kept(model: ModelSpec, training: TrainingSpec) -> Iterator[Problem]:
    """Which quantized tensors replace which others is known of pre-norm blocks."""
    if model.family not in ("gpt", "llama", "mpt", "vit", "moe", "deepseek"):
        yield Problem(
            field="training.precision",
            value=training.precision,
            rule=f"is not modelled yet for {model.family}: what its blocks keep of quantized tensors",
            fix="use mxfp8 or bf16",
        )


def low_precision_rules(training: TrainingSpec) -> Iterator[Problem]:
    """What cannot be, whatever the model and the plan."""
    if training.fp8_recipe is not None and training.precision != "fp8":
        yield Problem(
            field="training.fp8_recipe",
            value=training.fp8_recipe,
            rule=f"is for training.precision = fp8, not for {training.precision}",
            fix="remove it",
        )


def low_precision_sizes(model: ModelSpec, plan: ParallelPlan, form: LinearFormat) -> Iterator[Problem]:
    """Sizes that the kernels take: whole blocks, and 16 bytes of every row.

    Args:
        model, plan: What is asked.
        form: How linear layers are quantized.
    """
    multiple = form.multiple
    odd: dict[str, int] = {}
    rows: set[int] = set()
    for layer in set(model.layers_of(plan.shard)):
        for gemm in quantized_linears(layer, form):
            sides = (("outputs", gemm.n), ("inputs", gemm.k))
            odd |= {f"{side} of {gemm.name}": size for side, size in sides if size % multiple}
            rows.add(gemm.m * plan.microbatch_size)
    if odd:
        name, size = min(odd.items())
        yield Problem(
            field="model",
            value=f"{size} {name}",
            rule=f"linear layers in {form.precision} ({form.recipe}) need sizes that are multiples of {multiple}",
            fix="use training.precision = bf16",
        )
    uneven = sorted(number for number in rows if number % multiple)
    if uneven:
        per_sequence = uneven[0] // plan.microbatch_size
        whole = multiple // math.gcd(per_sequence, multiple)
        yield Problem(
            field="plan.microbatch_size",
            value=str(plan.microbatch_size),
            rule=f"gives {uneven[0]} tokens, and the gradients of weights in {form.precision} ({form.recipe}) need a "
            f"multiple of {multiple}",
            fix=f"use a multiple of {whole}",
        )
