"""Files of lengths beside a scenario."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan.errors import SpecError
from simplan.scenario import Scenario, load_scenario

TEXT = """\
model: {preset: gpt2-124m, seq_len: 512, document_lengths: {file: lengths.csv, packing: first_fit_decreasing, seed: 4}}
cluster: {preset: dgx-a100-80gb, num_devices: 2}
training: {global_batch_size: 24, task: sft}
plan: {dp_replicate: 2}
"""


def load(folder: Path) -> Scenario:
    path = folder / "case.yaml"
    path.write_text(TEXT)
    return load_scenario(path)


def test_a_file_of_lengths(tmp_path: Path) -> None:
    """Of documents that all are as long, three fill a sequence, and 62 of 512 tokens are padding."""
    (tmp_path / "lengths.csv").write_text("150\n150\n\n 150 \n")
    model = load(tmp_path).job.model
    assert model.document_lengths == (150, 150, 150)
    assert model.segments == (150, 150, 150, 62)
    assert model.packs is not None
    assert (model.packs.packing, model.packs.seed) == ("first_fit_decreasing", 4)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "holds no lengths; write one whole number of tokens a line"),
        (b"12\n0\n", 'line 2 holds "0"'),
        (b"-3\n", 'line 1 holds "-3"'),
        (b"length\n12\n", 'line 1 holds "length"'),
        (b"9" * 13, 'line 1 holds "9999999999999"'),
        ("\u0663\n".encode(), "line 1 holds"),
        (b"1\0", "is a binary file"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"1\n" * (2 * 2**20 + 1), "is larger than 4 MiB"),
    ],
)
def test_files_that_hold_no_lengths(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "lengths.csv").write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load(tmp_path)
    assert sentence in str(caught.value)
    assert "model.document_lengths.file" in str(caught.value)
