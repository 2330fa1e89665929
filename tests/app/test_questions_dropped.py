"""Files that people drop: right ones become scenarios, all others sentences."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.state import document_text
from app.uploads import config_fields, scenario_data
from simplan.errors import SpecError
from simplan.scenario import load_scenario, parse_scenario
from tests.app.views.pages import SMALL, assert_no_bug, opened

CONFIG = {
    "model_type": "llama",
    "_name_or_path": "someone/tiny",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def test_a_config_becomes_the_model_that_a_file_of_it_is(tmp_path: Path) -> None:
    fields = config_fields("config.json", json.dumps(CONFIG).encode(), 1024)
    document = {**SMALL, "model": fields}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "scenario.yaml").write_text(
        document_text({**SMALL, "model": {"hf_config": "config.json", "seq_len": 1024}})
    )
    loaded = load_scenario(tmp_path / "scenario.yaml").job.model
    assert parse_scenario(document_text(document)).job.model == loaded.model_copy(update={"name": "someone/tiny"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "this is not JSON"),
        (b"[1]", "must be one JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model_type": "banana"}', "model_type"),
        (b" " * (3 * 2**20), "larger than 2 MiB"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
    ],
)
def test_other_files_are_refused_in_a_sentence(content: bytes, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        config_fields("config.json", content, 1024)


@given(st.binary(max_size=200))
def test_any_bytes_are_data_or_refused(content: bytes) -> None:
    for read in (partial(config_fields, seq_len=1024), scenario_data):
        with suppress(SpecError):
            assert isinstance(read("file", content), dict)


def test_own_yaml_is_applied_and_what_is_wrong_is_said() -> None:
    page = opened()
    text = document_text({**SMALL, "name": "mine", "training": {"global_batch_size": 32}})
    page.text_area(key="form text").set_value(text)
    page.button(key="form apply").click().run()
    assert_no_bug(page)
    assert page.query_params["training.global_batch_size"] in ("32", ["32"])
    page.text_area(key="form text").set_value("model: [")
    page.button(key="form apply").click().run()
    assert_no_bug(page)
    assert "not YAML" in page.warning[0].value
    page.text_area(key="form text").set_value("!!python/object/apply:os.system ['true']")
    page.button(key="form apply").click().run()
    assert_no_bug(page)
    assert page.warning
