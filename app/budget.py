"""Length and price of a training, of which a scenario has one each, in two forms.

Widgets write tokens as ``training.num_tokens``, steps and images into the section ``run``, and a price as
``cluster.price_per_device_hour``, unless the scenario has the section ``price``. They show the length and the price in
effect, whatever form the scenario has, and take the other form away.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from app.fitting import Document, section, with_value
from simplan.goodput.sections import SECTIONS
from simplan.scenario import Scenario

TOKENS = ("training", "num_tokens")
STEPS = ("run", "num_steps")
IMAGES = ("run", "num_samples")
_PRICES = ("cluster", "price_per_device_hour"), ("price", "device_hour")

TOKENS_START, IMAGES_START = 1e12, 3e8
"""Training budget of scenarios without one."""


class Length(NamedTuple):
    """Length of a training: optimizer steps, and the tokens (images for models without tokens) of the budget."""

    num_steps: int
    budget: float


def length_of(scenario: Scenario) -> Length | None:
    """Length of the training; None for a scenario without one."""
    job, budget = scenario.job, scenario.budget
    steps = budget.steps(job.sequences_per_step, job.model.seq_len)
    if steps is None:
        return None
    sample_size = 1 if job.model.sample != "sequence" else job.model.seq_len
    budget_size = budget.num_tokens if budget.num_samples is None else budget.num_samples * sample_size
    return Length(steps, steps * job.sequences_per_step * sample_size if budget_size is None else budget_size)


def budget_of(scenario: Scenario) -> tuple[float, float | None]:
    """Number of tokens (or images) of the training budget, and price per device and hour; None without a price."""
    length = length_of(scenario)
    start = IMAGES_START if scenario.job.model.sample != "sequence" else TOKENS_START
    return start if length is None else length.budget, scenario.budget.price_per_device_hour


def with_length(document: Document, value: float | None, path: tuple[str, str]) -> Document:
    """The scenario with a length at one of the paths above, and no other length; with none for None or 0."""
    document = with_value(document, TOKENS, None) if isinstance(document.get("training"), dict) else document
    document = {key: inside for key, inside in document.items() if key != "run"}
    return with_value(document, path, value) if value else document


def price_of(document: Document) -> Any:
    """Price of one device for one hour, as the scenario writes it; None for none."""
    return next((price for name, key in _PRICES if (price := section(document, name).get(key)) is not None), None)


def with_price(document: Document, value: float | None) -> Document:
    """The scenario with a price of one device for one hour; with no prices at all for None or 0."""
    (name, key), (section_name, _) = _PRICES
    if isinstance(document.get(name), dict):
        document = with_value(document, (name, key), None)
    if not value:
        return {key: inside for key, inside in document.items() if key != section_name}
    return with_value(document, _PRICES[section_name in document], value)


def with_spot_price(document: Document, value: float | None) -> Document:
    """The scenario with another price of a spot device for one hour, next to its price; None or 0 for that price."""
    price = price_of(document)
    prices = {**section(document, "price"), "device_hour": price, "spot_device_hour": value}
    return {
        **with_price(document, None),
        "price": {key: inside for key, inside in prices.items() if inside},
    }


def without_budget(document: Document) -> Document:
    """The scenario without all that no step depends on: length, price, and the other sections of a whole run."""
    document = {name: inside for name, inside in document.items() if name not in SECTIONS}
    for name, key in (TOKENS, _PRICES[0]):
        if isinstance(document.get(name), dict):
            document[name] = {other: value for other, value in document[name].items() if other != key}
    return document
