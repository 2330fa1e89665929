"""Models of Hugging Face transformers as the executor trains them, against their layers and the executor's own."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import checks
from executor.models.model import Stage, build_stage
from executor.run import run_job
from executor.train.data import model_batch
from simplan import catalog
from simplan.errors import NotModelledError
from simplan.job import Job
from simplan.model.implementations.layer_implementation import LayerImplementation, implemented_layers
from simplan.model.layer import Gemm, LayerKind, LayerSpec
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan, Recompute
from simplan.predict import predict, run_spec_of
from simplan.program.program import MemoryCategory
from simplan.rules.model import has_transformers_code
from simplan.runs.run_spec import RunSpec
from simplan.training import TrainingSpec
from simplan.validate.compare import compare
from tests.executor.models import layer_runs
from tests.executor.models.layer_runs import (
    BATCH,
    FACTOR,
    SHARDS,
    LayerRun,
    assert_parameters_and_order_of_gradients,
    traced,
    without_levels,
)
from tests.support.problems import refuses

pytest.importorskip("transformers")

CPU = torch.device("cpu")
STYLE = LayerImplementation(model_code="transformers")
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 500, "seq_len": 32,
}  # fmt: skip
GROUPED: dict[str, Any] = {"family": "llama", "num_key_value_heads": 2, "intermediate_size": 96}
MODELS: dict[str, ModelSpec] = {
    "gpt2": ModelSpec(family="gpt", **SIZES),
    "llama": ModelSpec(**GROUPED, **SIZES),
    "qwen2": ModelSpec(**GROUPED, **SIZES, qkv_bias=True, tied_embeddings=True),
    "qwen3": ModelSpec(**GROUPED, **SIZES, qk_norm="head", head_dim=32),
    "mixtral": ModelSpec(
        **SIZES, family="moe", num_key_value_heads=2, moe_intermediate_size=96, num_experts=4, top_k=2,
        tied_embeddings=False,
    ),
    "qwen3moe": ModelSpec(
        **SIZES, family="moe", num_key_value_heads=2, moe_intermediate_size=96, num_experts=4, top_k=2,
        tied_embeddings=False, qk_norm="head", head_dim=32,
    ),
}  # fmt: skip
PRECISIONS = [
    (name, precision)
    for name in MODELS
    for precision in ("fp32", "autocast", "cast")
    if not (MODELS[name].num_experts and precision == "autocast")  # refused
]
NUMBERS_BYTES = 24
"""Constants of gelu_new that autograd holds as tensors: five in FP32 or 64 bits."""


def layers_of(name: str) -> tuple[LayerSpec, ...]:
    return implemented_layers(MODELS[name].layers, STYLE, MODELS[name].family)


@pytest.fixture
def _cuda_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's autocast has powers in FP32, the CPU's has not (torch.amp, "CUDA Ops that can autocast to float32")."""
    from transformers import activations

    power = torch.pow

    def wide(x: Tensor, exponent: float) -> Tensor:
        return power(x.float() if torch.is_autocast_enabled("cpu") else x, exponent)

    patched = type("torch", (), {"pow": staticmethod(wide), "tanh": torch.tanh})
    monkeypatch.setattr(activations, "torch", patched)


def layer_run(name: str, index: int, recompute: Recompute, precision: str, monkeypatch: pytest.MonkeyPatch) -> LayerRun:
    monkeypatch.setattr(layer_runs, "build_stage", partial(build_stage, model_code="transformers"))
    run = LayerRun(MODELS[name], index, recompute, precision)
    run.layer = layers_of(name)[index]
    return run


@pytest.mark.usefixtures("_cuda_lists")
@pytest.mark.parametrize(("name", "precision"), PRECISIONS)
@pytest.mark.parametrize("index", [1, -1])
def test_saved_bytes_are_those_of_the_layer(
    name: str, precision: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, by torch's hooks for what autograd saves: each storage once, weights aside."""
    run, spec = layer_run(name, index, "none", precision, monkeypatch), MODELS[name]
    held: list[Tensor] = []

    def kept(x: Tensor) -> Tensor:
        held.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(kept, lambda x: x):
        outputs = run.forward()
    weights = {p.untyped_storage().data_ptr() for p in run._stage.parameters()}
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    num_bytes = sum(size for pointer, size in sizes.items() if pointer not in weights)
    widths = run.state.activation, run.state.residual
    roots = run.layer.storages(*widths)
    saved = {root.name: root for tensor in run.layer.saved for root in [roots[tensor.name]]}
    wanted = sum((1 if t.per_microbatch else BATCH) * t.elements * t.width(*widths) for t in saved.values())
    wanted += sum(table.elements * table.width(*widths) for table in run.layer.constants)
    if precision == "autocast":
        wanted += sum(2 * k.weight_elements for k in run.layer.kernels if isinstance(k, Gemm))
    if precision == "cast" and name == "gpt2":  # statistics of LayerNorm: FP32 on CUDA only
        wanted -= sum(2 * BATCH * t.elements for t in saved.values() if t.name.endswith("statistics"))
    if run.layer.kind is LayerKind.HEAD:
        wanted += BATCH * spec.seq_len * 8  # targets
    # and scalars: the weight of the loss, and numbers of gelu_new
    assert 0 <= num_bytes - wanted <= NUMBERS_BYTES
    del outputs


@pytest.mark.usefixtures("_cuda_lists")
@pytest.mark.parametrize(("name", "precision"), PRECISIONS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_kept_bytes_and_peak_are_those_of_the_layer(
    name: str, precision: str, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's trace of allocations; the peak within 3 %."""
    run = layer_run(name, 1, recompute, precision, monkeypatch)
    made = BATCH * run.layer.output_bytes(run.state.activation, run.state.residual)[0]
    outputs, held, _ = traced(run.forward)
    del outputs
    assert 0 <= held - made - run.kept_bytes() <= NUMBERS_BYTES
    if (name, precision, recompute) == ("gpt2", "autocast", "full"):
        pytest.xfail("predicted 5.9 % more: what is made again for gelu_new is gone earlier than is known")
    run.assert_peak()


@pytest.mark.parametrize("precision", ["fp32", "cast"])
def test_a_loss_of_shifted_logits_has_one_copy_more(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss of transformers 4.46 to 4.48, whose copies lack one of 32 tokens; that of 4.49 has a peak 14 % smaller."""

    def loss_of_shifted(logits: Tensor, labels: Tensor, _: Any) -> Tensor:
        wide = logits.float()
        shifted = wide[..., :-1, :].contiguous()
        return functional.cross_entropy(shifted.flatten(0, -2), labels[..., 1:].flatten())

    monkeypatch.setattr(layer_runs, "cross_entropy", loss_of_shifted)
    run = layer_run("llama", -1, "none", precision, monkeypatch)
    style = STYLE.model_copy(update={"shifted_logits": True})
    run.layer = implemented_layers(MODELS["llama"].layers, style, "llama")[-1]
    run.assert_peak(within=0.03)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_order_of_gradients_are_those_of_the_layers(name: str) -> None:
    """Shapes in the order of registration, and which gradient follows which, on which DDP's buckets depend."""
    assert_parameters_and_order_of_gradients(MODELS[name], layers_of(name), "transformers")


@pytest.mark.parametrize("precision", ["fp32", "cast"])
@pytest.mark.parametrize("shard", ["tensor", "sequence"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_kept_bytes_of_split_layers(name: str, shard: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte. Peaks in bf16 are 10 % higher with whole tokens: gradients that are summed are copied first."""
    for index in (1, -1):
        monkeypatch.setattr(layer_runs, "build_stage", partial(build_stage, model_code="transformers"))
        run = LayerRun(MODELS[name], index, "none", precision, SHARDS[shard])
        run.layer = implemented_layers(MODELS[name].layers_of(SHARDS[shard]), STYLE, MODELS[name].family)[index]
        run.assert_kept()
        if precision == "fp32":
            run.assert_peak()


def weights_of(block: nn.Module, name: str) -> dict[str, Tensor]:
    """Weights of a block of transformers, as LayerSpec calls them; queries, keys and values grouped by heads."""
    by_name: dict[str, Tensor] = dict(
        zip((p.name for p in layers_of(name)[1].parameters), block.parameters(), strict=True)
    )
    if name == "gpt2":
        by_name = {n: w.T if w.dim() > 1 else w for n, w in by_name.items()}
        heads = MODELS[name].num_attention_heads
        grouped = {
            n: torch.unflatten(w, 0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
            for n, w in by_name.items()
            if n.startswith("qkv.")
        }
        return by_name | grouped
    if MODELS[name].num_experts:
        both = by_name.pop("experts_gate_up.weight")
        by_name["experts_gate.weight"], by_name["experts_up.weight"] = both.chunk(2, dim=1)
    return by_name


@pytest.mark.parametrize("name", MODELS)
def test_own_blocks_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor's own block with the same weights: outputs and gradients of the input. GELU as GPT-2's tanh."""
    if name == "gpt2":
        monkeypatch.setattr(functional, "gelu", partial(functional.gelu, approximate="tanh"))
    spec = MODELS[name]
    if spec.num_experts:  # places for all tokens
        spec = spec.model_copy(update={"capacity_factor": 2.0})
    theirs = build_stage(MODELS[name], [1], torch.float32, CPU, 0, model_code="transformers")
    ours = build_stage(spec, [1], torch.float32, CPU, 1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(3.0)  # else all gates are nearly the same
    weights = weights_of(theirs.layers["1"], name)
    ours.layers["1"].load_state_dict({n: weights[without_levels(n)] for n in ours.layers["1"].state_dict()})
    x = torch.randn(BATCH, spec.seq_len, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    results = []
    for stage in (ours, theirs):
        leaf = x.clone().requires_grad_()
        out = stage(leaf)
        assert isinstance(out, Tensor)
        out.square().sum().backward()  # type: ignore[no-untyped-call]
        results.append((out.detach(), leaf.grad))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_layers_together_are_the_whole_model(name: str) -> None:
    """Logits of transformers' own forward, with the same weights."""
    from executor.models.transformers_models import whole_model

    spec = MODELS[name]
    stage: Stage = build_stage(spec, range(len(spec.layers)), torch.float32, CPU, 0, model_code="transformers")
    model: Any = whole_model(spec)
    with torch.no_grad():
        for ours, other in zip(stage.parameters(), model.parameters(), strict=True):
            other.copy_(ours)
    tokens, _ = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=2)
    torch.testing.assert_close(stage(tokens), model(tokens).logits)


PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "fsdp": {"dp_shard": 2},
    "fsdp-recompute": {"dp_shard": 2, "recompute": "full"},
    "zero1": {"dp_shard": 2, "zero_stage": 1},
    "1f1b": {"pp": 2},
    "tp": {"tp": 2},
    "tp-whole-tokens": {"tp": 2, "sequence_parallel": False},
}


def predicted(name: str, plan: dict[str, Any], **training: Any) -> Any:
    job = Job(
        MODELS[name],
        catalog.cluster("dgx-h100", num_devices=2),
        TrainingSpec(global_batch_size=8, **{"precision": "fp32", **training}),
        ParallelPlan(microbatch_size=2, **plan),
        catalog.software("transformers"),
    )
    return predict(job, name=name)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param("gpt2", "ddp", marks=pytest.mark.slow),
        pytest.param("gpt2", "1f1b", marks=pytest.mark.slow),
        pytest.param("llama", "zero1", marks=pytest.mark.slow),
        pytest.param("qwen2", "fsdp-recompute", marks=pytest.mark.slow),
        pytest.param("qwen3", "ddp", marks=pytest.mark.slow),
        pytest.param("mixtral", "fsdp", marks=pytest.mark.slow),
        pytest.param("qwen3moe", "fsdp", marks=pytest.mark.slow),
        pytest.param("qwen2", "tp", marks=pytest.mark.slow),
        pytest.param("qwen3", "tp-whole-tokens", marks=pytest.mark.slow),
    ],
)
def test_ranks_do_what_is_predicted(name: str, plan: str, tmp_path: Any) -> None:
    """Actions and collectives, byte by byte."""
    prediction = predicted(name, PLANS[plan])
    spec = run_spec_of(prediction, num_steps=4, num_warmup_steps=2, profile_memory=False, device="cpu")
    measurement = run_job(spec, tmp_path)
    assert compare(prediction, measurement).structure_equal


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "splits of Conv1D": ("gpt2", {}, {"tp": 2}, {}, "plan.tp = 2: tensor parallelism of transformers' GPT-2"),
    "splits of experts": ("mixtral", {}, {"tp": 2}, {}, "plan.tp = 2: tensor parallelism of transformers' Mixtral"),
    "splits in autocast": ("llama", {}, {"tp": 2}, {"precision": "bf16"}, "under autocast, where every matrix casts"),
    "selective": ("llama", {}, {"dp_shard": 2, "recompute": "selective"}, {}, "recomputing parts of transformers'"),
    "split backward": ("llama", {}, {"pp": 2, "schedule": "zb-h1"}, {}, "a split backward of transformers' code"),
    "window": ("llama", {"sliding_window": 8}, {"dp_shard": 2}, {}, "model.sliding_window = 8: this with"),
    "window as long as sequences": (
        "llama",
        {"sliding_window": 32},
        {"dp_shard": 2},
        {},
        "if attention is FlashAttention 2",
    ),
    "mpt": ("gpt2", {"family": "mpt"}, {"dp_shard": 2}, {}, "model.family = mpt: transformers' code"),
    "experts in autocast": ("mixtral", {}, {"dp_replicate": 2}, {"precision": "bf16"}, "under autocast"),
    "fp8": ("llama", {}, {"dp_shard": 2}, {"precision": "fp8"}, "this precision with transformers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_by_name(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, fields, plan, training, words = REFUSED[case]
    changed = ModelSpec(**{**MODELS[name].model_dump(exclude_unset=True), **fields})
    monkeypatch.setitem(MODELS, name, changed)
    with pytest.raises(NotModelledError, match=words):
        predicted(name, plan, **training)


def test_experts_without_autocast_are_predicted() -> None:
    """Pure BF16 under DDP: 2 and 4 bytes of weights and moments; layers are those of FSDP's casts, compared above."""
    held = predicted("mixtral", {"dp_replicate": 2}, precision="bf16", pure_bf16=True).memory[0].by_category
    number = MODELS["mixtral"].num_parameters
    assert held[MemoryCategory.PARAMETERS] == pytest.approx(2 * number, rel=0.02)
    assert held[MemoryCategory.OPTIMIZER] == pytest.approx(4 * number, rel=0.02)


def test_a_window_longer_than_sequences_does_nothing() -> None:
    """Mistral 7B v0.1 with sequences below 4,096 tokens: no mask, as in transformers."""
    windowed = MODELS["llama"].model_copy(update={"sliding_window": 33})
    assert has_transformers_code(windowed)
    assert [layer.key for layer in windowed.layers] == [layer.key for layer in MODELS["llama"].layers]


def job_of(name: str) -> RunSpec:
    return run_spec_of(predicted(name, PLANS["ddp"]), num_steps=1, num_warmup_steps=0, device="cpu")


def test_needs_transformers_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    with refuses("software", "transformers", fix="pip install 'simplan", kind=NotModelledError):
        checks.check_job(job_of("llama"))


def test_is_not_rehearsed() -> None:
    with refuses("software", "transformers", rule="has modules whose tensors a rehearsal", kind=NotModelledError):
        checks.check_rehearsal(job_of("llama"), 0, fake=True)


OF_ADAPTERS = ModelSpec(
    family="llama",
    num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512,
    vocab_size=500, seq_len=64,
)  # fmt: skip
RANK, WITHIN = 2, 0.005
TARGETS = {"q": "q_proj", "v": "v_proj", "proj": "o_proj", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class Quoted(nn.Module):
    """``Linear`` of PEFT 0.21 (tuners/lora/layer.py): the statements of its forward, with CUDA's dropout."""

    def __init__(self, base: nn.Module, dropout: float) -> None:
        super().__init__()
        self.base_layer, self.dropout = base, dropout
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)  # type: ignore[arg-type]
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """(..., k) to (..., n)."""
        result: Tensor = self.base_layer(x)
        dtype = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        result = result + self.lora_B(self.lora_A(self.dropped(x))) * 2.0
        return result.to(dtype)

    def dropped(self, x: Tensor) -> Tensor:
        """The input after dropout."""
        return torch.native_dropout(x, self.dropout, train=True)[0] if self.dropout else x


def adapted(stage: Stage, targets: tuple[str, ...], dropout: float, code: str) -> None:
    """Freezes the weights of a stage and gives linear layers adapters in FP32."""
    stage.requires_grad_(requires_grad=False)
    names = {TARGETS[target] for target in targets}
    if code == "peft":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=RANK, target_modules=sorted(names))
        peft.inject_adapter_in_model(config, stage)
        for name, parameter in stage.named_parameters():
            parameter.data = parameter.data.float() if ".lora_" in name else parameter.data
        return
    for module in [*stage.modules()]:
        for name, child in [*module.named_children()]:
            if name in names:
                setattr(module, name, Quoted(child, dropout))


ADAPTED = [
    pytest.param(targets, autocast, dropout, "quoted", id=f"{'+'.join(targets)}-{autocast}-{dropout}")
    for targets in (("q", "v"), tuple(TARGETS))
    for autocast in (True, False)
    for dropout in ((0.0, 0.1) if len(targets) > 2 else (0.0,))
]
PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
ADAPTED += [pytest.param(tuple(TARGETS), autocast, 0.0, "peft", marks=PEFT) for autocast in (True, False)]


@pytest.mark.parametrize(("targets", "autocast", "dropout", "code"), ADAPTED)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_blocks_with_adapters_of_peft_save_what_is_predicted(
    recompute: Recompute,
    targets: tuple[str, ...],
    autocast: bool,
    dropout: float,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every adapter saves a copy of its input; modules hold arguments; frozen matrices save nothing."""

    def build(_: ModelSpec, indices: Any, dtype: Any, *rest: Any, frozen_dtype: torch.dtype) -> Stage:
        return build_stage(OF_ADAPTERS, indices, dtype, *rest, model_code="transformers").to(frozen_dtype)

    monkeypatch.setattr(layer_runs, "build_stage", build)
    spec = OF_ADAPTERS.model_copy(update={"lora_rank": RANK, "lora_targets": targets, "lora_dropout": dropout})
    software = catalog.software("accelerate").model_copy(update={"autocast": autocast})
    training, plan = TrainingSpec(global_batch_size=1, task="lora"), ParallelPlan(recompute=recompute)
    precision = "autocast" if autocast else "cast"
    prepare = partial(adapted, targets=targets, dropout=dropout, code=code)
    run = LayerRun(spec, 2, recompute, precision, state=software.state(training, plan), prepare=prepare)
    run.layer = software.layers_of(spec, plan, training)[2]
    run.assert_kept(also_bytes=FACTOR * len(targets))
    if autocast and not dropout:  # the CPU's sums of two dtypes, and its dropout, have copies that CUDA's have not
        run.assert_peak(within=WITHIN)
