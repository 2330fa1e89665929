"""Sections of a whole run in files, and length and price that other sections say, too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from simplan import catalog
from simplan.cli.listing import listing
from simplan.errors import SpecError
from simplan.goodput.sections import SECTIONS
from simplan.scenario import load_scenario, parse_scenario, parse_search, read_source, scenario_from
from simplan.scenario.file import _File, relocated
from simplan.scenario.schema import scenario_schema
from simplan.scenario.search import plan_document
from tests.scenario.whole_run.scenarios import BATCH, DOCUMENT, SEQ_LEN, refusal, scenario_of
from tests.support.problems import refuses, says

TOKENS = 1000 * BATCH * SEQ_LEN
WITHOUT = {name: section for name, section in DOCUMENT.items() if name not in SECTIONS}


def with_keys(section: str, **keys: Any) -> dict[str, Any]:
    return {section: {**DOCUMENT[section], **keys}}


def test_every_section_is_a_key_of_a_file_of_the_schema_and_of_show() -> None:
    """A section that one of them forgot could not be written, edited or looked up."""
    assert SECTIONS.keys() <= _File.model_fields.keys()
    assert SECTIONS.keys() <= scenario_schema()["properties"].keys()
    shown = {(row["section"], row["name"]) for row in listing("run")}
    assert {(name, key) for name, spec in SECTIONS.items() for key in spec.model_fields} <= shown
    assert SECTIONS.keys() <= {row["name"] for row in listing("scenario")}


def test_schema_takes_what_is_read() -> None:
    document = {
        **DOCUMENT,
        "checkpoint": {
            "interval_s": "best",
            "storage_bytes_per_s": 1e9,
            "memory_tier": {"interval_steps": 5, "blocking_s": 1},
        },
        "spot": {"preemptions_per_h": 0.1, "fallback": "on_demand"},
        "evaluation": {"every_steps": 10, "time_s": 3},
        "price": {"device_hour": 2.5},
        "power": {"device_w": 700},
    }
    scenario_from(document)
    jsonschema.Draft202012Validator(scenario_schema()).validate(document)
    wrong = {**document, "checkpoint": {"interval_s": "soon", "blocking_s": 1}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(scenario_schema()).validate(wrong)


@pytest.mark.parametrize(
    "run",
    [
        {"num_steps": 1000},
        {"num_tokens": TOKENS},
        {"num_samples": 1000 * BATCH},
        {"num_tokens": TOKENS - BATCH * SEQ_LEN + 1},
    ],
)
def test_length_in_each_unit_gives_the_steps_and_the_same_training_run(run: dict[str, float]) -> None:
    by_training = scenario_from({**WITHOUT, **with_keys("training", num_tokens=TOKENS)}).predict().training_run
    assert by_training is not None
    training_run = scenario_of(run=run).predict().training_run
    assert training_run is not None
    assert (training_run.num_steps, training_run.days) == (1000, by_training.days)


def test_law_of_the_batch_is_a_number_of_steps() -> None:
    law = {"kind": "table", "table": [[32, 32_000], [128, 256_000]]}
    scenario = scenario_of(run={"samples_at_batch": law})
    assert scenario.budget.num_steps == math.ceil((32_000 * 256_000) ** 0.5 / BATCH)
    outside = {"kind": "table", "table": [[128, 32_000], [256, 256_000]]}
    assert "run.samples_at_batch: the batch 64 is outside the table" in refusal(run={"samples_at_batch": outside})


def test_price_of_either_section_is_the_same() -> None:
    new = scenario_of(price={"device_hour": 2.5}).predict().training_run
    old = scenario_of(**with_keys("cluster", price_per_device_hour=2.5)).predict().training_run
    assert new == old
    assert new is not None
    assert new.cost == pytest.approx(2.5 * new.device_hours)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            with_keys("training", num_tokens=2 * TOKENS),
            "training.num_tokens = 4096000: is 2,000 ... 1,000",
        ),
        (
            {**with_keys("cluster", price_per_device_hour=3), "price": {"device_hour": 2.5}},
            "price.device_hour = 2.5: ... cluster.price_per_device_hour = 3",
        ),
    ],
)
def test_length_or_price_given_twice_and_different_is_refused(sections: dict[str, Any], sentence: str) -> None:
    assert says(refusal(**sections), sentence)


def test_length_and_price_given_twice_and_equal_are_taken() -> None:
    sections = {**with_keys("training", num_tokens=TOKENS), **with_keys("cluster", price_per_device_hour=3)}
    assert scenario_of(**sections, price={"device_hour": 3}).budget.price_per_device_hour == 3


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"reliability": {"device_mtbf_h": 0}}, "reliability.device_mtbf_h = 0: must be greater than 0"),
        ({"reliability": {"device_mtbf_h": math.inf}}, "reliability.device_mtbf_h = .inf: must be a finite number"),
        ({"reliability": {"preset": "llama3-2042"}}, "reliability.preset = llama3-2042: is not in the catalog"),
        ({"reliability": {"causes": [{"name": "a", "mtbf_h": 1}, {"name": "a", "mtbf_h": 2}]}}, "causes has a twice"),
        ({"reliability": {"preset": "llama3-2024", "causes": [{"name": [], "mtbf_h": 1}]}}, "name = []: must be"),
        ({"spot": {"zone": "aws-moon-1a"}}, "spot.zone = aws-moon-1a: is not in the catalog"),
        ({"spot": {"preemptions_per_h": 0}}, "spot.preemptions_per_h = 0: must be greater than 0"),
        ({"spot": {}}, "needs one of preemptions_per_h, trace and zone"),
        ({"price": {"device_hour": -1}}, "price.device_hour = -1: must be greater than 0"),
        ({"price": {"device_hour": 1, "spot_device_hour": -1}}, "price.spot_device_hour = -1: must be greater"),
        ({"checkpoint": {"interval_s": "soon", "blocking_s": 1}}, '"soon": must be seconds above 0, or best'),
        ({"checkpoint": {"interval_s": 60}}, "needs blocking_s, or a bandwidth such as storage_bytes_per_s"),
        ({"run": {"num_steps": 5, "num_tokens": 5}}, "needs one of num_steps, num_tokens"),
        ({"recovery": {"spares": 5}}, "recovery.spares = 5: ... 4 nodes ... use 4"),
        ({"recovery": {"mtbf": 3}}, "recovery.mtbf: is not ... known ... write reliability.device_mtbf_h"),
        (with_keys("training", spares=3), "training.spares: is not a known key; write recovery.spares"),
        ({"save_interval": 5}, "save_interval: is not ... known ... write checkpoint.interval_steps"),
        ({"checkpoint": {"checkpoint_every_s": 9}}, "is not a known key; write checkpoint.interval_s"),
        ({"reliability": "llama3-2024"}, "must be a mapping (key: value); write {preset: llama3-2024}"),
        ({"power": {}}, "power.device_w: is missing"),
        ({"expect": [{"metric": "goodput", "min": 0.9}], "run": None}, "expect: has goodput of a whole run, which"),
    ],
)  # fmt: skip
def test_wrong_section_is_refused_in_one_sentence(sections: dict[str, Any], sentence: str) -> None:
    text = refusal(**sections)
    assert says(text, sentence)
    assert len(text.splitlines()) == 1


def test_error_has_the_line_of_its_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {preset: gpt2-124m}\ncluster: {preset: dgx-h100}\ntraining: {global_batch_size: 8}\n"
        "plan: {dp_replicate: 8}\nrun: {num_steps: 9}\nrecovery:\n  spares: 3\n"
    )
    with refuses("recovery.spares", "3", rule="1 node of the job", file=str(file)) as caught:
        load_scenario(file)
    assert str(caught.value).startswith(f"{file}:7:3: ")


def test_preset_gives_its_causes_and_own_ones_replace_them() -> None:
    name = "llama3-2024"
    published = catalog.reliability(name)["causes"]
    replaced = [{"name": published[0]["name"], "mtbf_h": 1.0}, {"name": "of my own", "per": "job", "mtbf_h": 2.0}]
    run = scenario_of(reliability={"preset": name, "causes": replaced, "detection_s": 7}).whole_run
    assert run is not None
    assert run.reliability is not None
    causes = {cause.name: cause.mtbf_h for cause in run.reliability.all_causes}
    assert len(causes) == len(published) + 1
    assert (causes[published[0]["name"]], causes["of my own"]) == (1.0, 2.0)
    assert causes[published[1]["name"]] == published[1]["mtbf_h"]
    assert run.reliability.detection_s == 7


def test_a_step_does_not_depend_on_the_sections_and_says_so() -> None:
    alone, whole = scenario_from(WITHOUT).predict(), scenario_of(run=None).predict()
    assert whole.step_time_s == alone.step_time_s
    (more,) = set(whole.assumptions) - set(alone.assumptions)
    assert says(more, "reliability, checkpoint, recovery: ", "does not depend", "`simplan goodput`")


def test_overrides_replace_other_units_and_the_other_form() -> None:
    assert scenario_from(DOCUMENT, {"run.num_samples": 640}).budget.steps(BATCH, SEQ_LEN) == 10
    by_training = {**DOCUMENT, **with_keys("training", num_tokens=TOKENS)}
    assert scenario_from(by_training, {"run.num_steps": 7}).budget.steps(BATCH, SEQ_LEN) == 7
    assert scenario_from(by_training, {"training.num_tokens": BATCH * SEQ_LEN * 3}).budget.steps(BATCH, SEQ_LEN) == 3
    priced = {**DOCUMENT, **with_keys("cluster", price_per_device_hour=3)}
    assert scenario_from(priced, {"price.device_hour": 4}).budget.price_per_device_hour == 4


def test_trace_of_a_moved_file_is_the_same_file(tmp_path: Path) -> None:
    document = {**DOCUMENT, "spot": {"trace": "traces/a.csv"}}
    moved = relocated(document, tmp_path, tmp_path / "below")
    assert moved["spot"] == {"trace": "../traces/a.csv"}
    with pytest.raises(SpecError, match=r"spot\.trace = .*names a file"):
        parse_scenario("spot: {trace: a.csv}\n")


def test_search_takes_length_and_price_and_keeps_the_sections(tmp_path: Path) -> None:
    document = {name: section for name, section in DOCUMENT.items() if name != "plan"}
    text = read_source({**document, "price": {"device_hour": 2}, "search": {}}, searches=True).text(tmp_path)
    search = parse_search(text)
    assert (search.space.token_budget, search.space.dollars_per_device_hour) == (TOKENS, 2)
    saved = scenario_from(plan_document(search, scenario_of().job.plan, tmp_path))
    assert saved.budget.steps(BATCH, SEQ_LEN) == 1000
    assert saved.budget.price_per_device_hour == 2
    assert saved.whole_run is not None
    assert saved.whole_run.recovery == scenario_of().whole_run.recovery  # type: ignore[union-attr]


def test_written_scenario_has_all_sections(tmp_path: Path) -> None:
    source = read_source("gpt2-124m", {"run.num_steps": 10, "recovery.spares": 1, "price.device_hour": 2.0})
    text = source.text(tmp_path)
    assert "run:  # keys: simplan show run" in text
    again = parse_scenario(text)
    assert again.whole_run == source.scenario().whole_run


def test_failures_of_an_override_replace_those_of_the_file_and_say_so() -> None:
    """Failures are counted once: those of an option replace a file's, and two options say that they add up."""
    document, preset = {**DOCUMENT, "reliability": {"preset": "llama3-2024", "detection_s": 7}}, "llama3-2024"
    published = len(catalog.reliability(preset)["causes"])
    by_unit = scenario_from(document, {"reliability.device_mtbf_h": 50.0})
    by_preset = scenario_from(DOCUMENT, {"reliability.preset": preset})
    both = scenario_from(DOCUMENT, {"reliability.preset": preset, "reliability.device_mtbf_h": 50.0})
    numbers, words = [], []
    for scenario in (by_unit, by_preset, both):
        assert scenario.whole_run is not None
        assert scenario.whole_run.reliability is not None
        numbers.append(len(scenario.whole_run.reliability.all_causes))
        words.append([note for note in scenario.assumptions if "reliability" in note])
    assert numbers == [1, published, published + 1]
    of_unit, of_preset, of_both = (note for (note,) in words)
    assert says(of_unit, "reliability.preset", "scenario", "replaced by reliability.device_mtbf_h")
    assert says(of_preset, "reliability.device_mtbf_h", "scenario", "replaced by reliability.preset")
    assert says(of_both, "reliability.device_mtbf_h: ", "besides", "reliability.preset")
