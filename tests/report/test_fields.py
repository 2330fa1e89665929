"""``simplan show plan``, ``model``, ``cluster`` and ``training`` against what reads these sections."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from simplan.model.families import FAMILIES
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.report.plan_fields import plan_fields
from simplan.report.section_fields import cluster_fields, model_fields, training_fields
from simplan.scenario.clusters import _Cluster
from simplan.training.training import TrainingSpec

ROWS = {row["name"]: row for row in plan_fields()}
TRAINING = {row["name"]: row for row in training_fields()}
MODEL = {row["name"]: row for row in model_fields()}


def test_every_key_is_there_and_says_what_it_is_for() -> None:
    assert list(ROWS) == list(ParallelPlan.model_fields)
    assert list(TRAINING) == list(TrainingSpec.model_fields)
    assert {row["name"] for row in cluster_fields()} == set(_Cluster.model_fields)
    made_elsewhere = {"name", "packs", "sources"}
    assert set(MODEL) - {"preset", "hf_config"} == set(ModelSpec.model_fields) - made_elsewhere
    for row in (*ROWS.values(), *TRAINING.values(), *MODEL.values(), *cluster_fields()):
        assert row["what for"], row
        assert row["values"], row


@pytest.mark.parametrize(
    ("spec", "name", "values"),
    [
        *((ParallelPlan, name, row["values"]) for name, row in ROWS.items()),
        *((TrainingSpec, name, row["values"]) for name, row in TRAINING.items()),
    ],
)
def test_values_are_what_a_section_takes(spec: type[ParallelPlan | TrainingSpec], name: str, values: str) -> None:
    """Each choice is read, and what is none is not."""
    needed = {"global_batch_size": 8} if spec is TrainingSpec else {}
    many = values.startswith("list of ")
    choices = values.removeprefix("list of ").split(", ")
    taken: list[object]
    if values == "more than 0":
        taken, refused = [0.5], 0
    elif "and more" in values or " to " in values:
        least = int(choices[0].split()[0])
        taken, refused = [least, least + 1], least - 1
    elif values == "true, false":
        taken, refused = [True, False], 7
    elif name == "schedule":
        taken, refused = ["1f1b"], 7
    else:
        taken, refused = [*choices], 7
    for value in taken:
        spec.model_validate({**needed, name: (value,) if many else value})
    with pytest.raises(ValidationError):
        spec.model_validate({**needed, name: (refused,) if many else refused})


def test_defaults_are_those_of_a_plan() -> None:
    plan = ParallelPlan()
    for name, row in ROWS.items():
        value = getattr(plan, name)
        shown = "" if value is None else str(value).lower()
        assert shown in row["default"], name


def test_families_are_those_that_have_the_field() -> None:
    assert MODEL["q_lora_rank"]["families"] == "deepseek"
    assert MODEL["num_hidden_layers"]["families"] == "all but resnet"
    for name, row in MODEL.items():
        named = set(row["families"].removeprefix("all but ").split(", ")) & set(FAMILIES)
        if named:
            having = set(FAMILIES) - named if row["families"].startswith("all but ") else named
            assert having == {family for family in FAMILIES if name in FAMILIES[family].fields}


def test_what_a_key_is_for_is_the_first_sentence_of_its_docstring() -> None:
    assert MODEL["num_hidden_layers"]["what for"] == "blocks"
    assert MODEL["top_k"]["what for"] == "Hugging Face's num_experts_per_tok"
    assert MODEL["hidden_size"]["what for"] == "as in Hugging Face's config.json"
    assert MODEL["capacity_factor"]["values"] == "more than 0"
