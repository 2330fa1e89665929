"""A key in another section than its own, or in the words of another framework, is told where it belongs."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan.errors import SpecError
from simplan.scenario import load_scenario, load_search
from simplan.scenario.collecting import _OTHER_WORDS, _SECTIONS, where_keys_belong
from simplan.software.software import SoftwareSpec

CASE = """\
model: {preset: llama3-8b, tp: 2}
cluster: {preset: dgx-h100, gpus: 4}
training: {global_batch_size: 64, micro_batch_size: 2, seq_len: 4096, gradient_accumulation_steps: 4}
precision: bf16
"""


def refusal(folder: Path, text: str) -> list[str]:
    path = folder / "case.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        (load_search if "search" in text else load_scenario)(path)
    return [line.removeprefix(f"{path}:").partition(" ")[2] for line in str(caught.value).splitlines()]


def test_a_key_is_told_where_it_belongs(tmp_path: Path) -> None:
    assert refusal(tmp_path, CASE + "plan: {fsdp: 8, activation_checkpointing: full}\n") == [
        "model.tp: is not a known key; write plan.tp",
        "cluster.gpus: is not a known key; write cluster.num_devices",
        "training.micro_batch_size: is not a known key; write plan.microbatch_size",
        "training.seq_len: is not a known key; write model.seq_len",
        "training.gradient_accumulation_steps: is not a known key; "
        "write training.global_batch_size, from which it follows",
        "precision: is not a known key; write training.precision",
        "plan.fsdp: is not a known key; write plan.dp_shard",
        "plan.activation_checkpointing: is not a known key; write plan.recompute",
    ]


def test_a_file_that_searches_has_ranges_instead(tmp_path: Path) -> None:
    found = refusal(tmp_path, CASE + "search: {}\n")
    assert found[0] == "model.tp: is not a known key; write search.tp"
    assert found[2] == "training.micro_batch_size: is not a known key; write search.microbatch_size"
    [line] = refusal(tmp_path, "model: {preset: llama3-8b, seq_len: 4096}\ncluster: {preset: dgx-h100}\n"
                               "training: {global_batch_size: 64}\nsearch: {bucket_bytes: 8}\n")  # fmt: skip
    assert line.endswith(
        "write plan.bucket_bytes in the scenario that --save-plan writes, as a search does not vary it"
    )


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
    [line] = refusal(tmp_path, "model: {preset: llama3-8b}\ncluster: {preset: dgx-h100}\n"
                               "training: {global_batch_size: 64}\nplan: {frobnicate: 8}\n")  # fmt: skip
    assert line.startswith(
        "plan.frobnicate: is not a known key; known: bucket_bytes, collectives, compression, cp, cp_comm, "
    )
