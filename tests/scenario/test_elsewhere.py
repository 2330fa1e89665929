"""A key in another section than its own, or in the words of another framework, is told where it belongs."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan.errors import SpecError
from simplan.scenario import load_scenario, load_search
from simplan.scenario.collecting import _OTHER_WORDS, _SECTIONS, where_keys_belong
from simplan.software.software import SoftwareSpec
from tests.support.problems import says

CASE = """\
model: {preset: llama3-8b, tp: 2}
cluster: {preset: dgx-h100, gpus: 4}
training: {global_batch_size: 64, micro_batch_size: 2, seq_len: 4096, gradient_accumulation_steps: 4}
precision: bf16
"""


def refusal(folder: Path, text: str) -> dict[str, str]:
    """The fixes, by field as in the file."""
    path = folder / "case.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        (load_search if "search" in text else load_scenario)(path)
    assert {problem.rule for problem in caught.value.problems} == {"is not a known key"}
    return {problem.field: problem.fix for problem in caught.value.problems}


def test_a_key_is_told_where_it_belongs(tmp_path: Path) -> None:
    fixes = refusal(tmp_path, CASE + "plan: {fsdp: 8, activation_checkpointing: full}\n")
    assert {field: fix.removeprefix("write ").partition(",")[0] for field, fix in fixes.items()} == {
        "model.tp": "plan.tp",
        "cluster.gpus": "cluster.num_devices",
        "training.micro_batch_size": "plan.microbatch_size",
        "training.seq_len": "model.seq_len",
        "training.gradient_accumulation_steps": "training.global_batch_size",
        "precision": "training.precision",
        "plan.fsdp": "plan.dp_shard",
        "plan.activation_checkpointing": "plan.recompute",
    }


def test_a_file_that_searches_has_ranges_instead(tmp_path: Path) -> None:
    fixes = refusal(tmp_path, CASE + "search: {}\n")
    assert fixes["model.tp"] == "write search.tp"
    assert fixes["training.micro_batch_size"] == "write search.microbatch_size"
    fixes = refusal(tmp_path, "model: {preset: llama3-8b, seq_len: 4096}\ncluster: {preset: dgx-h100}\n"
                              "training: {global_batch_size: 64}\nsearch: {bucket_bytes: 8}\n")  # fmt: skip
    assert says(fixes["search.bucket_bytes"], "write plan.bucket_bytes", "--save-plan", "search does not vary it")


def test_words_of_other_frameworks_are_none_of_ours() -> None:
    ours = {key for spec in _SECTIONS.values() for key in spec.model_fields}
    words = [word for words in _OTHER_WORDS.values() for word in words.split()]
    assert len(words) == len(set(words))
    assert not ours & set(words)
    for place in where_keys_belong("", searches=False).values():
        section, _, key = place.partition(",")[0].partition(".")
        spec = SoftwareSpec if section == "software" else _SECTIONS.get(section)
        assert section == "cluster" or (spec is not None and key in spec.model_fields)


def test_a_key_that_is_like_none_is_told_all_there_are(tmp_path: Path) -> None:
    fixes = refusal(tmp_path, "model: {preset: llama3-8b}\ncluster: {preset: dgx-h100}\n"
                              "training: {global_batch_size: 64}\nplan: {frobnicate: 8}\n")  # fmt: skip
    assert says(fixes["plan.frobnicate"], "known: bucket_bytes, collectives, ", "cp_comm")
