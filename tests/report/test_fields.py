"""``simplan show plan``, ``model``, ``cluster`` and ``training`` against what reads these sections."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
from pydantic import ValidationError

from simplan.document import parse_yaml
from simplan.model.families import FAMILIES
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.report.plan_fields import plan_fields
from simplan.report.section_fields import model_fields, search_space, training_fields
from simplan.scenario.clusters import ClusterSection
from simplan.scenario.published.reading import run_documents
from simplan.scenario.schema import cluster_fields, scenario_schema
from simplan.training import TrainingSection
from tests.support.problems import says
from tests.support.slow import slow_except

ROWS = {row["name"]: row for row in plan_fields()}
TRAINING = {row["name"]: row for row in training_fields()}
MODEL = {row["name"]: row for row in model_fields()}


def test_every_key_is_there_and_says_what_it_is_for() -> None:
    assert list(ROWS) == list(ParallelPlan.model_fields)
    assert list(TRAINING) == list(TrainingSection.model_fields)
    assert {row["name"] for row in cluster_fields()} == set(ClusterSection.model_fields)
    made_elsewhere = {"name", "packs", "sources", "objective", "trains_nothing"}
    assert set(MODEL) - {"preset", "hf_config"} == set(ModelSpec.model_fields) - made_elsewhere
    for row in (*ROWS.values(), *TRAINING.values(), *MODEL.values(), *cluster_fields()):
        assert row["description"], row
        assert row["values"], row


@pytest.mark.parametrize("step", slow_except([10], [10, 1]))
def test_every_scenario_is_valid_by_the_schema(step: int) -> None:
    """By another implementation of JSON Schema; a key that is not known is invalid in every section.

    Of a file of published runs every tenth one, quickly: they are alike.
    """
    schema = scenario_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator, sections = jsonschema.Draft202012Validator(schema), set[str]()
    for file in sorted((Path(__file__).resolve().parents[2] / "scenarios").rglob("*.yaml")):
        document = parse_yaml(file.read_text(encoding="utf-8"), str(file))
        if "training" not in document.data and "runs" not in document.data:
            continue  # published data of another kind
        runs = [run.data for run in run_documents(document, str(file))] if "runs" in document.data else [document.data]
        for data in runs[::step]:
            assert [error.message for error in validator.iter_errors(data)] == [], (file, data.get("name"))
        data = runs[0]
        for section in {"model", "cluster", "training", "plan", "software", "measured"} & data.keys():
            if isinstance(data[section], dict):
                sections.add(section)
                assert not validator.is_valid({**data, section: {**data[section], "unknown": 1}}), (file, section)
    assert sections == {"model", "cluster", "training", "plan", "software", "measured"}


def test_the_schema_says_what_show_says() -> None:
    properties = scenario_schema()["properties"]
    plan, _ = properties["plan"]["anyOf"]
    for rows, section in ((plan_fields(), plan), (training_fields(), properties["training"])):
        assert {row["name"]: row["description"] for row in rows} == {
            name: field["description"] for name, field in section["properties"].items()
        }
    assert {row["name"] for row in search_space()} == set(properties["search"]["anyOf"][0]["properties"])


@pytest.mark.parametrize(
    ("spec", "name", "values"),
    [
        *((ParallelPlan, name, row["values"]) for name, row in ROWS.items()),
        *((TrainingSection, name, row["values"]) for name, row in TRAINING.items()),
    ],
)
def test_values_are_what_a_section_takes(spec: type[ParallelPlan | TrainingSection], name: str, values: str) -> None:
    """Each choice is read, and what is none is not."""
    needed = {"global_batch_size": 8} if spec is TrainingSection else {}
    many = values.startswith("list of ")
    choices = values.removeprefix("list of ").split(", ")
    taken: list[object]
    if name == "fsdp_units":
        many, taken, refused = False, [("Block", "Other"), 1000], 0
    elif values == "more than 0":
        taken, refused = [0.5], 0
    elif "and more" in values or " to " in values:
        least = int(choices[0].split()[0])
        taken, refused = [least, least + 1], least - 1
    elif values == "true, false":
        taken, refused = [True, False], 7
    elif name == "schedule":
        taken, refused = ["1f1b"], 7
    elif name == "collectives":
        taken, refused = [{kind: "hierarchical"} for kind in ("all_reduce", "all_gather", "all_to_all")], 7
    elif name == "fake_quantization":
        taken, refused = [{"weights": "int4", "group_size": 32}], 7
    elif name == "optimizer_dtypes":
        taken, refused = [{"exp_avg": "bf16"}, {"exp_avg_sq": "fp8", "main_params": "fp16"}], 7
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


def test_a_keys_purpose_is_the_first_sentence_of_its_docstring() -> None:
    assert MODEL["num_hidden_layers"]["description"] == "blocks"
    assert MODEL["top_k"]["description"] == "Hugging Face's num_experts_per_tok"
    assert MODEL["hidden_size"]["description"] == "as in Hugging Face's config.json"
    assert MODEL["capacity_factor"]["values"] == "more than 0"


def test_required_keys_are_marked_and_others_have_their_default() -> None:
    defaults = {name: row["default"] for name, row in MODEL.items()}
    assert {name for name, default in defaults.items() if default == "required"} >= {
        "hidden_size",
        "vocab_size",
        "top_k",
    }
    assert defaults["head_dim"] == "hidden_size / num_attention_heads"
    assert defaults["num_key_value_heads"] == "num_attention_heads"
    assert defaults["max_position_embeddings"] == "seq_len"
    length = defaults["intermediate_size"]
    assert says(length, "4 x hidden_size", "required for llama, gemma", "moe_intermediate_size for moe, deepseek")
    assert defaults["seq_len"] == "required; (image_size / patch_size)^2 + 1 for vit"
    assert defaults["sliding_window"] == "none; 4096 for gemma2; 1024 for gemma3"
    assert defaults["lora_rank"] == "0"
    assert defaults["preset"] == ""
    assert TRAINING["global_batch_size"]["default"] == "required"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "captured"])
def test_required_keys_suffice(family: str) -> None:
    """And each of them is missing if it is left out."""
    sizes = {"depths": (2, 2), "image_size": 32, "patch_size": 16, "num_attention_heads": 2, "top_k": 2}
    fields = {name: sizes.get(name, 64) for name in ModelSpec.required_fields(family)}
    ModelSpec.model_validate({"family": family, **fields})
    for name in fields:
        with pytest.raises(ValidationError, match=name):
            ModelSpec.model_validate({"family": family, **{key: fields[key] for key in fields if key != name}})
        assert MODEL[name]["default"].partition("required")[1]
