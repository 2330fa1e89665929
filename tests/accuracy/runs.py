"""Published runs made up for tests: a small GPT on some A100s, valid unless a test says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from simplan.accuracy.outcome import Predicted, RunOutcome
from simplan.accuracy.run import PublishedRun
from simplan.scenario.published.reading import parse_published
from tests.support.documents import changed

_RUN: dict[str, Any] = yaml.safe_load("""
name: run-1
model: {name: small, family: gpt, num_hidden_layers: 8, hidden_size: 512, num_attention_heads: 8, vocab_size: 1024,
  seq_len: 256}
cluster: {device: a100-sxm-80gb, num_devices: 4, devices_per_node: 8}
training: {global_batch_size: 32, precision: bf16, optimizer: adam}
software: {preset: megatron-lm-2022}
plan: {dp_replicate: 2, pp: 2, microbatch_size: 2}
measured: {source: "a paper, table 1", version: "2022", step_time_s: 0.02}
""")


def run_data(name: str = "run-1", **changes: Any) -> dict[str, Any]:
    """A run as data; ``model__seq_len=512`` changes a key of a section."""
    return changed(_RUN, {"name": name, **changes})


def run(name: str = "run-1", **changes: Any) -> PublishedRun:
    """A run as it is read."""
    [read] = parse_published(yaml.safe_dump(run_data(name, **changes)), "f").runs or ()
    return read


def write_runs(path: Path, *runs: dict[str, Any]) -> Path:
    """A file of runs."""
    path.write_text(yaml.safe_dump({"meta": {"source": "a test"}, "runs": list(runs)}, sort_keys=False))
    return path


def outcome(published: PublishedRun, predicted_s: float, *, file: str = "f", **fields: Any) -> RunOutcome:
    """As if so many seconds had been predicted."""
    known: dict[str, Any] = {
        "step_time_s": predicted_s,
        "step_time_interval_s": None,
        "memory_gib": {},
        "memory_interval_gib": {},
        "oom": None,
        "flops": 1.0,
        "software": "torch",
    }
    return RunOutcome(file, published, Predicted(**(known | fields)))
