"""Tensor parallelism of captured modules: against torch's DTensors, against families, and against one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.architectures import small_config
from executor.capture.capture import model_from_module
from executor.capture.hugging_face import batch_of, module_of_config
from executor.models.captured import CapturedData
from executor.run import run_job
from simplan import catalog
from simplan.errors import NotModelledError, SpecError
from simplan.interop.huggingface import model_fields_from_config
from simplan.job import Job
from simplan.model.captured.facts import CapturedModel, ComputedIn
from simplan.model.captured.layers import captured_layers
from simplan.model.implementations.layer_implementation import LayerImplementation, implemented_layers
from simplan.model.kernel import LayerCollective
from simplan.model.layer import LayerSpec
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.plan.shard import Shard as Split
from simplan.predict import predict, run_spec_of
from simplan.prediction import Prediction
from simplan.runs.run_spec import RunSpec
from simplan.search import search
from simplan.training import Precision, TrainingSpec
from simplan.validate.compare import issued_as_predicted
from tests.executor.capture import split_modules
from tests.executor.capture.test_capture import NUM_SAMPLES, call, saved
from tests.executor.capture.test_running import doubled
from tests.executor.dry_run.accounting import account
from tests.executor.train.test_checkpoints import in_two_parts, undisturbed
from tests.executor.train.test_equality import RELATIVE, run_in_float64
from tests.support.problems import refuses
from tests.support.slow import slow_except

MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[..., Any]]] = {
    "by heads": (split_modules.Decoder, split_modules.decoder_batch, split_modules.by_heads),
    "by tokens": (split_modules.Decoder, split_modules.decoder_batch, split_modules.by_tokens),
    "split loss": (split_modules.Decoder, split_modules.decoder_batch, split_modules.with_split_loss),
    "perceptron": (split_modules.Perceptron, split_modules.perceptron_batch, split_modules.split_perceptron),
}
NUM_MICROBATCHES, SIZE, SEED = 2, 2, 0
FP32 = 4


@cache
def captured(name: str, degree: int, precision: ComputedIn = "fp32") -> CapturedModel:
    """As ``simplan capture`` writes it."""
    make, batch, plan = MODULES[name]
    of = split_modules.__name__
    origin = {"factory": make, "batch": batch, "tp_plan": plan}
    model = model_from_module(make(), batch, precisions=(precision,), tensor_parallel=(degree,), tp_plan=plan)
    return model.model_copy(update={key: f"{of}:{value.__name__}" for key, value in origin.items()})


def job_of(name: str, plan: dict[str, Any], precision: Precision = "fp32", model: CapturedModel | None = None) -> Job:
    made = ParallelPlan(microbatch_size=SIZE, **plan)
    computed_in: ComputedIn = "fp32" if precision == "fp32" else "bf16" if made.shards_parameters else "autocast"
    spec = ModelSpec(name=name, family="captured", captured=model or captured(name, made.tp, computed_in))
    training = TrainingSpec(global_batch_size=NUM_MICROBATCHES * SIZE * made.dp, precision=precision)
    return Job(spec, catalog.cluster("dgx-h100", made.num_devices), training, made, catalog.software("torch"))


def run_of(prediction: Prediction, **fields: Any) -> RunSpec:
    usual = {"num_steps": 2, "num_warmup_steps": 2, "device": "cpu", "profile_memory": False, "seed": SEED}
    return run_spec_of(prediction).model_copy(update=usual | fields)


@contextmanager
def fake_mesh(degree: int) -> Iterator[DeviceMesh]:
    """Ranks of which only the first is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=degree)
    try:
        yield DeviceMesh("cpu", list(range(degree)))
    finally:
        dist.destroy_process_group()


def local(tensor: torch.Tensor) -> torch.Tensor:
    shard = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return shard.elem if isinstance(shard, AsyncCollectiveTensor) else shard


def really_saved(module: nn.Module, batch: Any) -> int:
    """Bytes that torch keeps for backward on this rank, weights and the batch excepted."""
    known = {local(p).untyped_storage().data_ptr() for p in module.parameters()}
    known |= {t.untyped_storage().data_ptr() for t in (batch.values() if isinstance(batch, dict) else batch)}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shard = local(tensor)
        if shard.untyped_storage().data_ptr() not in known:
            kept[shard.untyped_storage().data_ptr()] = shard
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(module, batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("name", "degree"),
    slow_except([("by tokens", 2), ("perceptron", 4)], product(("by heads", "by tokens", "perceptron"), (2, 4))),
)
def test_a_rank_has_what_torchs_dtensors_have(name: str, degree: int) -> None:
    """Weights and saved bytes of torch's own split module; matmuls have a part of the FLOPs where all are split."""
    make, batch, plan = MODULES[name]
    layers = captured_layers(captured(name, degree).of_degree(degree))
    with fake_mesh(degree) as mesh:
        module, data = make(), batch(NUM_SAMPLES)
        if name == "perceptron":
            plan(module, mesh)
        else:
            parallelize_module(module, mesh, plan(), src_data_rank=None)
        shapes = sorted(tuple(local(p).shape) for p in module.parameters())
        kept = really_saved(module, data)
    assert sorted(p.shape for layer in layers for p in layer.parameters) == shapes
    assert saved(layers, "fp32") == kept
    if name == "by tokens":
        whole = captured_layers(captured(name, degree))
        assert sum(layer.flops() for layer in layers) * degree == sum(layer.flops() for layer in whole)


def sizes_of(layer: LayerSpec) -> tuple[Any, ...]:
    """Parameters, FLOPs forward and backward, and saved bytes of a block, and what it communicates."""
    collectives = [(k.forward, k.backward, k.elements) for k in layer.kernels if isinstance(k, LayerCollective)]
    moved = [sum(collective[2] for collective in collectives if collective[way] is not None) for way in (0, 1)]
    passes = layer.flops(full_attention=True), layer.backward_flops(full_attention=True)
    return layer.num_parameters, *passes, sum(layer.saved_bytes(FP32)), moved[0]


@pytest.mark.parametrize("degree", slow_except([2], [2, 4]))
def test_a_rank_of_transformers_llama_is_that_of_the_family(degree: int) -> None:
    """Split by transformers' own plan; it reduces the gradients of queries, keys and values apart from each other."""
    pytest.importorskip("transformers")
    data = small_config("llama") | {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    data |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    module, config = module_of_config(data)
    model = model_from_module(
        module, batch_of(module, config, 64), precisions=("fp32",), tensor_parallel=(degree,)
    ).of_degree(degree)
    spec = ModelSpec(**model_fields_from_config(config.to_dict(), name="llama", seq_len=64))
    layers = spec.layers_of(Split(tp=degree))
    theirs = implemented_layers(layers, LayerImplementation(model_code="transformers"), spec.family)
    ours = captured_layers(model)
    assert sizes_of(ours[1]) == sizes_of(theirs[1])
    assert [layer.num_parameters for layer in ours] == [layer.num_parameters for layer in theirs]


PLANS: dict[str, dict[str, Any]] = {
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4},
    "tp 2, ddp": {"tp": 2, "dp_replicate": 2},
    "tp 2, zero1": {"tp": 2, "dp_shard": 2, "zero_stage": 1},
    "tp 2, zero3": {"tp": 2, "dp_shard": 2},
    "tp 2, zero3, recomputed": {"tp": 2, "dp_shard": 2, "recompute": "full"},
    "tp 2, diloco": {"tp": 2, "dp_replicate": 2, "replication": {"kind": "diloco", "inner_steps": 2}},
    "tp 2, ddp, recomputed": {"tp": 2, "dp_replicate": 2, "recompute": "full"},
}
CASES = [
    (name, plan)
    for name, plan in product(MODULES, PLANS)
    if plan != "tp 2, diloco" and not (name == "perceptron" and "recomputed" in plan)
]


@pytest.mark.parametrize(
    ("name", "plan", "precision"),
    slow_except(
        [("by tokens", "tp 2, zero3, recomputed", "fp32"), ("perceptron", "tp 4", "bf16")],
        [(*case, precision) for case in CASES for precision in ("fp32", "bf16")],
    ),
)
def test_the_peak_of_a_rank_is_that_of_torchs_tracker(name: str, plan: str, precision: Precision) -> None:
    """On tensors without data, which have no scratch inside of kernels."""
    prediction = predict(job_of(name, PLANS[plan], precision))
    assert prediction.memory[0].allocated_bytes == pytest.approx(account(run_of(prediction), 0).total_bytes, rel=0.035)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp 2", "tp 2, zero3"])
def test_a_run_goes_on_from_a_checkpoint_with_other_shards(plan: str, tmp_path: Path) -> None:
    """Weights of all ranks are stored with the dimension along which they are split."""
    jobs = []
    for way in (PLANS[plan], PLANS["tp 2, ddp"]):
        job = job_of("by tokens", way)
        training = job.training.model_copy(update={"global_batch_size": 8})
        jobs.append(run_of(predict(replace(job, training=training)), dtype="fp64", num_warmup_steps=1))
    whole = undisturbed(jobs[1], tmp_path / "whole")
    first, second = in_two_parts(jobs[0], jobs[1], tmp_path)
    assert first.losses == pytest.approx(whole.losses[:4], rel=RELATIVE)
    assert second.losses == pytest.approx(whole.losses[4:], rel=RELATIVE)


def plain_loop(
    module: nn.Module, job: RunSpec, batch: Callable[[int, int], Any]
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of a loop of one process over all microbatches.

    Args:
        batch: Arguments of forward, by the number of the step and of the microbatch in it.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses, gradients = [], []
    number = job.training.global_batch_size // SIZE
    for step in range(job.num_all_steps):
        total = 0.0
        for microbatch in range(number):
            inputs = torch.utils._pytree.tree_map(doubled, batch(step, microbatch))
            out = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
            loss = getattr(out, "loss", out) / number
            loss.backward()
            total += loss.item()
        losses.append(total)
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        if job.training.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), job.training.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def one_process(job: RunSpec) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of the whole module."""
    make, batch, _ = MODULES[job.model.name]
    torch.manual_seed(SEED)

    def seeded(step: int, microbatch: int) -> Any:
        torch.manual_seed((SEED * 100_003 + step) * 1_000_003 + microbatch)
        return batch(SIZE)

    return plain_loop(make().double(), job, seeded)


def assert_equal(
    job: RunSpec,
    folder: Path,
    losses: Sequence[float],
    wanted_losses: Sequence[float],
    wanted: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Losses and all gradients of a run, of which each rank has parts."""
    assert losses == pytest.approx(wanted_losses, rel=RELATIVE)
    for step, whole in enumerate(wanted):
        for rank in range(job.plan.num_devices):
            gradients = torch.load(folder / f"gradients.rank{rank}.step{step}.pt")
            assert {name.removeprefix("module.") for name in gradients} == set(whole)
            for key, gradient in gradients.items():
                expected = own_part(whole[key.removeprefix("module.")], gradient, rank % job.plan.tp, job.plan.tp)
                assert torch.allclose(gradient, expected, rtol=1e-8, atol=1e-12), (step, rank, key)


def own_part(whole: torch.Tensor, shard: torch.Tensor, rank: int, degree: int) -> torch.Tensor:
    for dim, (size, part) in enumerate(zip(whole.shape, shard.shape, strict=True)):
        if part < size:
            whole = whole.chunk(degree, dim)[rank]
    return whole


@pytest.mark.parametrize(("name", "plan"), slow_except([("by tokens", "tp 2")], CASES))
def test_ranks_equal_one_process(name: str, plan: str, tmp_path: Path) -> None:
    """Losses and all gradients of the whole module, of a loop without simplan; collectives are those predicted."""
    job = run_of(predict(job_of(name, PLANS[plan])), dtype="fp64")
    run = run_in_float64(job, tmp_path)
    assert_equal(job, tmp_path, run.measurement.losses, *one_process(job))


QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
"""Its norms of queries and keys see the heads of one rank, and its head has the weight of the embedding."""


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp 2", "tp 2, ddp", "tp 2, zero3, recomputed"])
def test_ranks_of_transformers_equal_one_process(plan: str, tmp_path: Path) -> None:
    """Split by transformers' own plan."""
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3))
    module, config = module_of_config(QWEN3)
    model = model_from_module(module, batch_of(module, config, 16), precisions=("fp32",), tensor_parallel=(2,))
    model = model.model_copy(update={"factory": str(file)})
    job = run_of(predict(job_of("qwen3", PLANS[plan], model=model)), dtype="fp64")
    run = run_in_float64(job, tmp_path)
    torch.manual_seed(SEED)
    whole = module_of_config(QWEN3, "cpu")[0].double()
    data = CapturedData(model, SEED)
    losses, gradients = plain_loop(whole, job, lambda step, number: data.batch(step, number, SIZE))
    assert_equal(job, tmp_path, run.measurement.losses, losses, gradients)
    assert issued_as_predicted(run_job(job.model_copy(update={"dtype": "fp32"}), tmp_path / "fp32"))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp 2", "tp 2, ddp", "tp 2, zero3"])
def test_gradients_are_clipped_by_the_norm_of_all_parts(plan: str, tmp_path: Path) -> None:
    """Weights that all ranks have count once."""
    job = job_of("by tokens", PLANS[plan])
    training = job.training.model_copy(update={"clip_grad_norm": 0.05})
    asked = run_of(predict(replace(job, training=training)), dtype="fp64", num_steps=4)
    losses, _ = one_process(asked)
    assert run_job(asked, tmp_path).losses == pytest.approx(losses, rel=1e-8)


@pytest.mark.parametrize(("name", "plan"), slow_except([], [*CASES, ("by tokens", "tp 2, diloco")]))
def test_ranks_issue_what_is_predicted(name: str, plan: str, tmp_path: Path) -> None:
    """Kinds, groups, bytes and order of collectives."""
    assert issued_as_predicted(run_job(run_of(predict(job_of(name, PLANS[plan]))), tmp_path))


def test_collectives_of_a_layer_are_those_of_its_plan() -> None:
    """Four with sequence parallelism, in pairs; weights of norms have gradients of their tokens alone."""
    layer = captured_layers(captured("by tokens", 2).of_degree(2))[1]
    collectives = [(k.forward, k.backward) for k in layer.kernels if isinstance(k, LayerCollective)]
    assert collectives == 2 * [("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather")]
    assert [p.name for p in layer.parameters if p.partial_gradient] == [
        f"norm{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")
    ]


WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "pattern": ({"layers.*.mpl.up": ColwiseParallel()}, 2, r"layers\.\*\.mpl\.up: matches no module"),
    "dimension": (
        {"mlp": ColwiseParallel()},
        3,
        r"3: mlp\.weight: has 32 elements in dimension 0, which 3 ranks cannot",
    ),
    "style": ({"mlp": "colwise"}, 2, "mlp: is 'colwise', and must be a style of torch"),
    "module": ({"norm": RowwiseParallel()}, 2, "norm: RowwiseParallel does not go with it"),
    "heads": (
        {"attention.q": ColwiseParallel(), "attention.k": ColwiseParallel()},
        2,
        r"split_modules\.py, line \d+: failed.*; leave 2",
    ),
}


class Small(nn.Module):
    """Some of each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(32), nn.Linear(32, 32)
        self.attention = split_modules.Attention(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(self.attention(self.norm(x))).square().mean()
        return out


def small_batch(number: int) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(number, 6, 32),)


@pytest.mark.parametrize("case", WRONG)
def test_a_plan_that_does_not_fit_is_named(case: str) -> None:
    plan, degree, said = WRONG[case]
    with pytest.raises(SpecError, match=said):
        model_from_module(Small(), small_batch, precisions=("fp32",), tensor_parallel=(degree,), tp_plan=lambda: plan)


def test_tied_weights_that_a_plan_splits_apart_are_refused() -> None:
    """torch would train two weights in place of one."""
    module = Small()
    module.mlp.weight = module.attention.q.weight
    plan = {"mlp": ColwiseParallel()}
    with refuses("--tp-plan", rule="mlp.weight and attention.q.weight, which are"):
        model_from_module(module, small_batch, precisions=("fp32",), tensor_parallel=(2,), tp_plan=lambda: plan)


def test_communication_besides_layouts_is_refused() -> None:
    """It would be taken for an operator of this rank."""

    def plan(module: nn.Module, mesh: DeviceMesh) -> None:
        hook = lambda part, inputs, output: all_reduce(output, "sum", mesh.get_group())  # noqa: E731
        module.get_submodule("mlp").register_forward_hook(hook)

    with refuses("--tp-plan", rule="communicates by all_reduce in the backward", kind=NotModelledError):
        model_from_module(Small(), small_batch, precisions=("fp32",), tensor_parallel=(2,), tp_plan=plan)


def test_experts_of_transformers_are_refused_by_their_style() -> None:
    pytest.importorskip("transformers")
    module, config = module_of_config(small_config("mixtral"))
    with refuses("--tp-plan", rule="packed_colwise, a style of transformers' plan", kind=NotModelledError):
        model_from_module(module, batch_of(module, config, 8), precisions=("fp32",), tensor_parallel=(2,))


def test_a_degree_that_was_not_captured_is_refused_and_not_searched() -> None:
    model = captured("by tokens", 2)
    with refuses("plan.tp", "4", rule="was not captured", fix="capture it again with --tensor-parallel"):
        predict(job_of("by tokens", {"tp": 4}, model=model))
    result = search(job_of("by tokens", {"tp": 2, "dp_replicate": 2}, model=model))
    assert {1, 2} >= {ranked.plan.tp for ranked in result.ranked}
