"""Published runs made up for tests: a small GPT on some A100s, valid unless a test says otherwise."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from simplan.accuracy.outcome import Predicted, RunOutcome
from simplan.accuracy.schema import PublishedRun
from simplan.problems import parse_model

_RUN: dict[str, Any] = yaml.safe_load("""
id: run-1
source: a paper, table 1
software: {framework: megatron-lm, version: "2022", flash_attention: null, compile: null, tp_comm_overlap: null,
  grad_overlap: null}
task: pretrain
model: {name: small, family: gpt, num_hidden_layers: 8, hidden_size: 512, num_attention_heads: 8,
  num_key_value_heads: 8, intermediate_size: 2048, vocab_size: 1024, seq_len: 256, gated_mlp: false,
  tied_embeddings: true}
cluster: {device: a100-sxm-80gb, num_devices: 4, devices_per_node: 8, intra_link: nvlink3,
  inter_link_gbit_per_device: null}
plan: {dp_replicate: 2, dp_shard: 1, zero_stage: 0, tp: 1, sequence_parallel: false, pp: 2, virtual_stages: 1, cp: 1,
  ep: 1, schedule: 1f1b, microbatch_size: 2, num_microbatches: 8, global_batch_size: 32, recompute: none,
  precision: bf16, optimizer: adam}
measured: {step_time_s: 0.02, tokens_per_s_per_device: null, peak_allocated_gib: null, peak_reserved_gib: null,
  peak_memory_gb_as_printed: null, oom: false, model_tflops_per_device_published: null, mfu_published: null}
derived_step_time: false
assumed: []
quality: good
""")


RESNET = yaml.safe_load("""
{name: resnet-50, family: resnet, depths: [3, 4, 6, 3], layer_type: bottleneck, image_size: 224, num_classes: 1000}
""")
VIT = yaml.safe_load("""
{name: vit-b16, family: vit, num_hidden_layers: 12, hidden_size: 768, num_attention_heads: 12, intermediate_size: 3072,
  image_size: 224, patch_size: 16, num_classes: 1000}
""")
T5 = yaml.safe_load("""
{name: t5-small, family: t5, num_hidden_layers: 6, hidden_size: 512, num_attention_heads: 8, num_key_value_heads: 8,
  head_dim: 64, intermediate_size: 2048, vocab_size: 32128, seq_len: 512, num_decoder_layers: 6, decoder_seq_len: 114,
  gated_mlp: false, tied_embeddings: true}
""")
"""Shapes of models, without the keys that models for images do not have."""


def run_data(id: str = "run-1", **changes: Any) -> dict[str, Any]:  # noqa: A002 - the key's name
    """A run as data; ``model__seq_len=512`` changes a key of a section."""
    data = copy.deepcopy(_RUN) | {"id": id}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            data[section][name] = value
        else:
            data[section] = value
    return data


def run(id: str = "run-1", **changes: Any) -> PublishedRun:  # noqa: A002
    return parse_model(PublishedRun, run_data(id, **changes))


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
        "notes": (),
    }
    return RunOutcome(file, published, Predicted(**(known | fields)))
