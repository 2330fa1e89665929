"""Runs of the former schema for tests: a small GPT on some A100s."""

from __future__ import annotations

from typing import Any

import yaml

from simplan.accuracy.run import PublishedRun
from simplan.scenario.published.reading import parse_published
from tests.support.documents import changed

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


def former_text(recipes: dict[str, Any] | None = None, **changes: Any) -> str:
    """A file with one run; ``plan__tp=2`` changes a key of a section, and ``dp_replicate`` and the batch follow."""
    data = changed(_RUN, changes)
    plan, degrees = (
        data["plan"],
        data["plan"]["dp_shard"] * data["plan"]["tp"] * data["plan"]["pp"] * data["plan"]["cp"],
    )
    if "plan__dp_replicate" not in changes:
        plan["dp_replicate"] = max(1, data["cluster"]["num_devices"] // degrees)
    if "plan__global_batch_size" not in changes:
        dp = plan["dp_replicate"] * plan["dp_shard"]
        plan["global_batch_size"] = plan["num_microbatches"] * plan["microbatch_size"] * dp
    if plan["pp"] == 1:
        plan["schedule"] = "none"
    return yaml.safe_dump({"meta": {}, "recipes": recipes or {}, "runs": [data]})


def former(recipes: dict[str, Any] | None = None, **changes: Any) -> PublishedRun:
    """The run as it is read."""
    [run] = parse_published(former_text(recipes, **changes), "f").runs or ()
    return run
