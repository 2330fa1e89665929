"""Random damage to a valid scenario: the file still loads or is refused in words, nothing else."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simplan.errors import SpecError
from simplan.scenario import load_scenario

VALID = """\
name: valid
model: {preset: gpt2-124m, seq_len: 128, num_hidden_layers: 4}
cluster:
  device: {preset: a100-sxm-80gb, memory_bytes: 60000000000}
  devices_per_node: 2
  intra_link: pcie4
  inter_link_gbit_per_device: 100
  num_nodes: 2
training: {global_batch_size: 16, precision: bf16, optimizer: adamw}
software: torch
plan: {dp_replicate: 2, pp: 2, schedule: 1f1b, microbatch_size: 2, stage_layers: [2, 2]}
expect:
  - {metric: step_time_s, value: 1.5, rel_tol: 0.1, why: measured}
  - {metric: fits, value: true}
"""
TOKENS = [
    "-1", "0", "1e999", ".nan", ".inf", "1e9", "true", "null", '"2"', "[]", "{}", "[1, 2]", "{a: 1}", "&a", "*a",
    "!!str ", "<<", "~", ":", "- ", "\t", "\n", "  ", "---\n", "#", "'", '"', "0x1f", "9" * 50, "\\", "|", ">", "%",
    "@", "\x07", "é", "preset", "device", "this-machine", "hf_config", "num_devices", "tp: 2", "search: {}",
    "expect", "family: llama",
]  # fmt: skip

damage = st.lists(
    st.tuples(
        st.integers(0, len(VALID)),
        st.integers(0, 12),
        st.one_of(st.sampled_from(TOKENS), st.text(max_size=6)),
    ),
    min_size=1,
    max_size=6,
)


def load(path: Path) -> None:
    with contextlib.suppress(SpecError):
        load_scenario(path)


def test_the_valid_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "valid.yaml"
    path.write_text(VALID)
    assert load_scenario(path).job.plan.stage_layers == (2, 2)


@pytest.mark.timeout(120)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage)
def test_damaged_text_loads_or_is_refused(tmp_path: Path, changes: list[tuple[int, int, str]]) -> None:
    text = VALID
    for start, length, replacement in changes:
        text = text[:start] + replacement + text[start + length :]
    path = tmp_path / "damaged.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    load(path)


@pytest.mark.timeout(120)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, len(VALID)))
def test_foreign_bytes_load_or_are_refused(tmp_path: Path, noise: bytes, where: int) -> None:
    path = tmp_path / "noise.yaml"
    path.write_bytes(VALID.encode()[:where] + noise + VALID.encode()[where:])
    load(path)
