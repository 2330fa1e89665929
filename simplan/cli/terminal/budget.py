"""Options ``--tokens`` and ``--price``: length and price of the full training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simplan.errors import Problem, SpecError
from simplan.model.model import ModelSpec
from simplan.problems import parse_model
from simplan.scenario.file import check_budget
from simplan.training import TrainingBudget

_OPTIONS = {"num_tokens": "--tokens", "price_per_device_hour": "--price"}


def chosen_budget(options: Mapping[str, float | None], model: ModelSpec, *, has_length: bool) -> dict[str, float]:
    """Fields of ``TrainingBudget`` that options give.

    Args:
        options: Fields of ``TrainingBudget``; None for options that are not given.
        model: Model of the scenario.
        has_length: True if the length of the training is known without ``--tokens``.

    Raises:
        SpecError: An option is out of range or has no effect; the error names the option.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        check_budget(parse_model(TrainingBudget, given), model)
    except SpecError as error:
        raise SpecError([replace(p, field=_OPTIONS[p.field.rpartition(".")[2]]) for p in error.problems]) from None
    price = given.get("price_per_device_hour")
    if price is not None and "num_tokens" not in given and not has_length:
        rule = "is the price of a training whose number of tokens is missing"
        raise SpecError(Problem(field="--price", value=f"{price:g}", rule=rule, fix="give --tokens too, e.g. 1e12"))
    return given
