"""LoRA: what layers with adapters keep and compute, as torch accounts for it, and ranks against one process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from executor import tensor_parallel
from executor.data import model_batch
from executor.loss import cross_entropy
from executor.model import build_stage
from executor.parallel import Parallel
from executor.run import run_job
from simplan.program.footprint import layer_footprint
from simplan.spec.layer import LayerKind
from simplan.spec.model import ModelSpec
from simplan.spec.plan import Recompute
from simplan.spec.recompute import recomputation
from simplan.spec.software import StateBytes
from simplan.spec.training import TrainingSpec
from simplan.validate.structure import predicted_messages
from tests.executor.conftest import RANK_PROGRAMS, MakeJob, MakeModel
from tests.executor.test_equality import one_process, own_part
from tests.executor.test_level2 import group_of, issued
from tests.executor.test_recompute import SCALARS, SHARDS, STATES, traced

CPU = torch.device("cpu")
BATCH = 3
FROZEN_STATES = {
    **STATES,
    "autocast": StateBytes(parameter=4, frozen=2, gradient=4, activation=2, boundary=2, weight_copy=2),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt"},
    "llama": {"family": "llama", "num_key_value_heads": 4, "qk_norm": "head"},
    "mpt": {"family": "mpt"},
    "packed": {"family": "llama", "num_key_value_heads": 4, "document_lengths": (29, 3, 32)},
}


def model_of(name: str, targets: tuple[str, ...] = ("all",), **fields: Any) -> ModelSpec:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 500}
    sizes |= {"intermediate_size": 256, "seq_len": 64, "lora_rank": 4, "lora_targets": targets}
    return ModelSpec(**{**sizes, **FAMILIES[name], **fields})


class LayerRun:
    """One layer, run forward and backward; the first block gets what a frozen embedding gives."""

    def __init__(self, spec: ModelSpec, shard: str, index: int, recompute: Recompute, precision: str) -> None:
        self._precision, self._parallel = precision, Parallel.silent(SHARDS[shard])
        layers = spec.layers_of(SHARDS[shard])
        self.layer = layers[index]
        dtype = torch.bfloat16 if precision == "cast" else torch.float32
        frozen = dtype if precision == "fp32" else torch.bfloat16
        self._stage = build_stage(
            spec, [index % len(layers)], dtype, CPU, 0, self._parallel, recompute, frozen_dtype=frozen
        )
        inputs, targets = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=BATCH)
        self._targets, self._input = self._parallel.local_tokens(targets), self._parallel.local_tokens(inputs)
        if self.layer.kind is not LayerKind.EMBEDDING:
            self._input = torch.randn(BATCH, *layers[0].output_shapes[0], dtype=frozen).requires_grad_(index != 1)
        for parameter in self._stage.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.backward(self.forward())  # whatever torch makes once
        self._input.grad = None

    def forward(self) -> Tensor:
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        with autocast if self._precision == "autocast" else nullcontext():
            out: Tensor = self._stage(self._input)
        return cross_entropy(out, self._targets, self._parallel) if self.layer.kind is LayerKind.HEAD else out

    def backward(self, out: Tensor) -> None:
        if out.requires_grad:
            (out if out.dim() == 0 else (2.0 * out).sum()).backward()  # type: ignore[no-untyped-call]


TARGETS = (("all",), ("attention",), ("mlp",), ("proj", "up"), ("down",))
QUICK = {("llama", "whole", "fp32"), ("gpt", "sequence", "autocast"), ("packed", "tensor", "fp32")}
CASES = [
    pytest.param(name, shard, index, recompute, precision, targets, marks=marks)
    for name in FAMILIES
    for shard, parts in SHARDS.items()
    if name != "packed" or parts.cp == 1
    for index, modes in ((0, ("none",)), (1, ("none", "selective", "full")), (2, ("none", "full")), (-1, ("none",)))
    for recompute in modes
    for precision in FROZEN_STATES
    for targets in (TARGETS if shard in ("whole", "sequence") else TARGETS[:1])
    for marks in [[] if (name, shard, precision) in QUICK and recompute != "full" else [pytest.mark.slow]]
]


@pytest.mark.parametrize(("name", "shard", "index", "recompute", "precision", "targets"), CASES)
def test_kept_bytes_are_those_of_the_layer(
    name: str, shard: str, index: int, recompute: Recompute, precision: str, targets: tuple[str, ...]
) -> None:
    """To the byte, by torch's trace of allocations."""
    run = LayerRun(model_of(name, targets), shard, index, recompute, precision)
    kept = recomputation(run.layer, recompute)
    footprint = layer_footprint(run.layer, BATCH, FROZEN_STATES[precision], kept)
    out, held, _ = traced(run.forward)
    wanted = footprint.activations + footprint.logits - footprint.input_bytes
    if FAMILIES[name]["family"] != "llama" and precision != "fp32":  # statistics of LayerNorm: fp32 on CUDA only
        wanted -= BATCH * sum(
            2 * t.elements for t in run.layer.saved if t.name in kept.saved and t.name.endswith("statistics")
        )
    result = 0 if out.dim() == 0 else out.nbytes
    assert 0 <= held - result - wanted <= (SCALARS if run.layer.kind is LayerKind.HEAD else 0)


@pytest.mark.parametrize("precision", FROZEN_STATES)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shard", ["whole", "sequence"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("index", [1, 2])
def test_peak_of_backward_is_that_of_the_layer(
    name: str, shard: str, index: int, recompute: Recompute, precision: str
) -> None:
    run = LayerRun(model_of(name), shard, index, recompute, precision)
    footprint = layer_footprint(run.layer, BATCH, FROZEN_STATES[precision], recomputation(run.layer, recompute))
    _, _, peak = traced(lambda: run.backward(run.forward()))
    kept = footprint.activations - footprint.input_bytes + footprint.output_bytes
    assert kept + footprint.backward_workspace == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("name", FAMILIES)
def test_flops_are_those_that_torch_counts(
    name: str, targets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward of two sequences on tensors without data; torch counts all scores, whatever masks them."""
    monkeypatch.setattr(tensor_parallel, "compute_dtype", lambda x: x)  # there is no autocast on meta tensors
    spec = model_of(name, targets)
    stage = build_stage(spec, range(len(spec.layers)), torch.float32, torch.device("meta"), seed=0)
    inputs, _ = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=2)
    with FlopCounterMode(display=False) as counter:
        out = stage(inputs.to("meta"))
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == pytest.approx(2 * sum(layer.flops(full_attention=True) for layer in spec.layers), rel=0.005)
    wanted = sum(layer.backward_flops(full_attention=True) for layer in spec.layers)
    assert counter.get_total_flops() - forward == pytest.approx(2 * wanted, rel=0.005)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_and_the_order_of_their_gradients(name: str) -> None:
    spec = model_of(name)
    stage = build_stage(spec, range(len(spec.layers)), torch.float32, CPU, seed=0)
    order: list[str] = []
    for index, layer in enumerate(spec.layers):
        module = stage.layers[str(index)]
        found = [(n, tuple(p.shape), not p.requires_grad) for n, p in module.named_parameters()]
        assert found == [(p.name, p.shape, p.frozen) for p in layer.parameters]
    for parameter_name, parameter in stage.named_parameters():
        if parameter.requires_grad:
            hook = partial(lambda n, _: order.append(n), parameter_name)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    inputs, targets = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=BATCH)
    cross_entropy(stage(inputs), targets).backward()  # type: ignore[no-untyped-call]
    layers = reversed(list(enumerate(spec.layers)))
    assert order == [f"layers.{i}.{layer.parameters[k].name}" for i, layer in layers for k in layer.gradient_order]


RANKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ddp": ("none", {}, {"dp_replicate": 2, "bucket_bytes": 4_000}),
    "zero1": ("none", {"family": "llama"}, {"dp_shard": 2, "zero_stage": 1}),
    "zero2": ("none", {"family": "llama", "lora_targets": ("q", "v")}, {"dp_shard": 2, "zero_stage": 2}),
    "zero3": ("none", {"family": "llama"}, {"dp_shard": 2}),
    "zero3-tied": ("none", {}, {"dp_shard": 2}),
    "zero3-every-microbatch": ("none", {"family": "mpt"}, {"dp_shard": 2, "grad_sync": "microbatch"}),
    "1f1b": ("1f1b", {}, {"pp": 2}),
    "1f1b-packed": ("1f1b", {"family": "llama", "document_lengths": (7, 2, 5)}, {"pp": 2}),
    "zero3-packed": ("none", {"family": "llama", "document_lengths": (7, 2, 5)}, {"dp_shard": 2}),
    "interleaved": ("interleaved_1f1b", {"family": "llama", "num_hidden_layers": 4}, {"pp": 2, "virtual_stages": 2}),
    "tp": ("none", {"family": "llama", "vocab_size": 96}, {"tp": 2, "sequence_parallel": False}),
    "tp-sequence": ("none", {"vocab_size": 96, "lora_targets": ("attention", "down")}, {"tp": 2}),
    "cp-zero3": ("none", {"family": "llama"}, {"cp": 2, "cp_comm": "all_gather", "zero_stage": 3}),
    "ddp-recompute": ("none", {"family": "llama"}, {"dp_replicate": 2, "recompute": "full", "bucket_bytes": 4_000}),
    "hsdp": ("none", {"family": "llama"}, {"dp_replicate": 2, "dp_shard": 2}),
    "1f1b-zero3": ("1f1b", {"family": "llama"}, {"pp": 2, "dp_shard": 2}),
    "tp-zero3": ("none", {"vocab_size": 96}, {"tp": 2, "dp_shard": 2}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "1f1b-packed")) for n in RANKS])
def test_ranks_equal_one_process_and_issue_what_is_predicted(
    name: str, tmp_path: Path, make_job: MakeJob, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradients of what is trained, in float64; collectives twice as wide as in float32."""
    monkeypatch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
    schedule, fields, plan = RANKS[name]
    heads = {"num_key_value_heads": 4} if fields.get("family") == "mpt" else {}
    model = make_model(**{"lora_rank": 4, **heads, **fields})
    job = make_job(schedule, model=model, plan=plan, dtype="fp64")
    training = TrainingSpec(global_batch_size=job.training.global_batch_size, precision="fp32", task="lora")
    job = job.model_copy(update={"training": training})
    measurement = run_job(job, tmp_path, rank_module="dumping_worker")
    losses, gradients = one_process(job, job.num_all_steps)
    assert measurement.losses == pytest.approx(losses, rel=1e-9)
    for step, wanted in enumerate(gradients):
        seen = set()
        for rank in range(job.plan.num_devices):
            for key, found in torch.load(tmp_path / f"gradients.rank{rank}.step{step}.pt").items():
                expected = own_part(job, rank, key, wanted[key], found)
                assert float((found - expected).abs().max()) < 1e-9 * float(expected.abs().max()), (step, rank, key)
                seen.add(key)
        assert seen == set(wanted)
    half = None if job.plan.bucket_bytes is None else job.plan.bucket_bytes // 2
    narrow = job.model_copy(update={"plan": job.plan.model_copy(update={"bucket_bytes": half})})
    for rank, predicted in predicted_messages(narrow).items():
        wide = [(kind, ranks, 2 * num_bytes, action) for kind, ranks, num_bytes, action in predicted]
        found_messages = issued(measurement, rank)
        if job.plan.tp * job.plan.cp > 1:
            wide.sort(key=group_of)
            found_messages.sort(key=group_of)
        assert found_messages == wide
