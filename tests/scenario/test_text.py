"""Scenarios given as text: the same as from a file, and without a way to the files of the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simplan.errors import SpecError
from simplan.scenario import load_scenario, load_search, parse_scenario, parse_search

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
START = "model: {preset: llama3-8b}\ncluster: {preset: dgx-h100}\ntraining: {global_batch_size: 16}\n"


@pytest.mark.parametrize("name", ["fsdp", "zb-h1", "mistral", "packed"])
def test_text_says_what_its_file_says(name: str) -> None:
    file = SCENARIOS / f"{name}.yaml"
    parsed = parse_scenario(file.read_text(), name=file.name)
    assert replace(parsed, file=None) == replace(load_scenario(file), file=None)


def test_a_search_as_text(tmp_path: Path) -> None:
    file = tmp_path / "search.yaml"
    file.write_text(f"{START}search: {{tp: [1, 2]}}\n")
    parsed, loaded = parse_search(file.read_text(), "search"), load_search(file)
    assert (parsed.name, parsed.space, parsed.document) == (loaded.name, loaded.space, loaded.document)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("model: {hf_config: secret.json}", "model.hf_config"),
        ("model: {preset: llama3-8b, document_lengths: {file: secret.csv}}", "model.document_lengths.file"),
        ("plan: {pp: 2, schedule: secret.csv}", "plan.schedule"),
    ],
)
def test_files_are_not_opened(text: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("secret.json", "secret.csv"):
        (tmp_path / name).write_text("secret")
    with pytest.raises(SpecError, match=f"{field} = .*: names a file") as caught:
        parse_scenario(text)
    assert "content" not in str(caught.value)
    assert "does not exist" not in str(caught.value)


def test_problems_have_their_line() -> None:
    with pytest.raises(SpecError, match=r"^asked:4:1: plan = .*needs 4 devices"):
        parse_scenario(f"{START}plan: {{dp_shard: 4}}\n", name="asked")
