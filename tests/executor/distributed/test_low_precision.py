"""torchao's FP8 linear layers against arithmetic in float64, one process, and torch's account of memory."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from executor import checks
from executor.checks import check_job
from executor.distributed import compiling
from executor.distributed.precision import Autocast, with_fp8_linears
from executor.dry_run.memory_tracker import StorageTracker
from executor.models.model import Stage, build_stage
from executor.run import run_job
from executor.train.data import make_batch
from executor.train.loss import cross_entropy
from simplan import catalog
from simplan.cost.compute.low_precision import LinearRates
from simplan.cost.compute.matmul import MatmulRates
from simplan.errors import NotModelledError
from simplan.model.implementations.layer_implementation import LayerImplementation, implemented_layer
from simplan.model.layer import Gemm, LayerKind, ParameterSpec
from simplan.model.low_precision import TORCHAO_RECIPES, Fp8Recipe, linear_format
from simplan.model.model import ModelSpec
from simplan.program.memory.low_precision_footprint import backward_scratch, forward_scratch_bytes, keeping_quantized
from simplan.program.program import Phase
from simplan.program.tables.plan_table import plan_table
from simplan.runs.run_spec import RunSpec
from simplan.software.software import StateBytes
from simplan.training import TrainingSpec
from tests.cost.rates import PLAIN, changed
from tests.executor.conftest import RANK_PROGRAMS, make_job
from tests.executor.dry_run.accounting import account, predicted_peak
from tests.executor.models.family_models import variant
from tests.executor.models.layer_runs import BATCH, STATES, LayerRun, traced
from tests.layers import layer_of_kernels
from tests.support.slow import slow_except

E4M3_LARGEST, E5M2_LARGEST = 448.0, 57344.0
ROWS, COLUMNS, TENSOR = (1,), (0,), (0, 1)
"""Dimensions over which elements have a scale in common."""

UP = layer_of_kernels((Gemm("up", 64, 48, 64),), (ParameterSpec("up.weight", (48, 64)),), key="up")
"""A block with one linear layer, 64 to 48."""


def rounded(x: Tensor, mantissa_bits: int, least_exponent: int, scale: Tensor) -> Tensor:
    """The nearest numbers of a floating-point format to x times its scales, over these; ties to even.

    e4m3 has 3 bits of mantissa, e5m2 has 2; numbers below 2^-6 and 2^-14 are subnormal (OCP 8-bit floating point 1.0).
    """
    scale = scale.float().double()
    scaled = (x.double() * scale).float().double()
    _, exponents = torch.frexp(scaled)
    unit = torch.exp2((exponents.double() - 1).clamp(min=least_exponent) - mantissa_bits)
    return torch.round(scaled / unit) * unit / scale


def e4m3(x: Tensor, dims: tuple[int, ...] = TENSOR, *, powers: bool = True) -> Tensor:
    """The largest element of each scale becomes the largest number; or scales are the powers of two below that."""
    scale = E4M3_LARGEST / x.double().abs().amax(dims, keepdim=True)
    return rounded(x, 3, -6, torch.exp2(torch.floor(torch.log2(scale))) if powers else scale)


def e5m2(x: Tensor) -> Tensor:
    return rounded(x, 2, -14, E5M2_LARGEST / x.double().abs().max())


def matmuls(recipe: Fp8Recipe, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of input and weight, in float64."""
    if recipe == "tensorwise":
        x, weight, gradient = e4m3(x, powers=False), e4m3(weight, powers=False), e5m2(gradient)
        return x @ weight.T, gradient @ weight, gradient.T @ x
    output = e4m3(x, ROWS) @ e4m3(weight, ROWS).T
    if recipe == "rowwise":
        of_weight = e4m3(gradient, COLUMNS).T @ e4m3(x, COLUMNS)
        return output, e4m3(gradient, ROWS) @ e4m3(weight, COLUMNS), of_weight
    return output, e4m3(gradient, ROWS) @ e4m3(weight), gradient.double().T @ x.double()


@pytest.mark.parametrize("recipe", TORCHAO_RECIPES)
@pytest.mark.parametrize(
    ("weights", "inputs"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_output_and_gradients_are_products_of_rounded_operands(
    recipe: Fp8Recipe, weights: torch.dtype, inputs: torch.dtype
) -> None:
    """Under the CPU's autocast an input in fp32 is rounded to 16 bits first, as for other linear layers."""
    torch.manual_seed(0)
    block = nn.Sequential(OrderedDict(up=nn.Linear(64, 48, dtype=weights)))
    linear = with_fp8_linears(block, UP, recipe).get_submodule("up")
    x = torch.randn(2, 32, 64, dtype=inputs, requires_grad=True)
    gradient = torch.randn(2, 32, 48, dtype=torch.bfloat16)
    before, bias = linear.get_parameter("weight"), linear.get_parameter("bias")
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    assert y.dtype is torch.bfloat16
    y.backward(gradient)
    rows, g = x.detach().bfloat16().flatten(0, 1), gradient.flatten(0, 1)
    output, of_input, of_weight = matmuls(recipe, rows, before.detach(), g)
    wanted = output + bias.detach().to(torch.bfloat16)
    assert x.grad is not None
    assert before.grad is not None
    assert bias.grad is not None
    in_16_bits = 2.0**-8
    torch.testing.assert_close(y.flatten(0, 1).double(), wanted, rtol=2 * in_16_bits, atol=in_16_bits)
    torch.testing.assert_close(x.grad.flatten(0, 1).double(), of_input, rtol=2 * in_16_bits, atol=1e-6)
    assert before.grad.dtype is weights
    torch.testing.assert_close(before.grad.double(), of_weight, rtol=2 * in_16_bits, atol=1e-5)
    summed = gradient.double().sum((0, 1))
    torch.testing.assert_close(bias.grad.double(), summed, rtol=in_16_bits, atol=0.05)


@pytest.mark.parametrize(
    ("family", "others"), [("gpt", set()), ("moe", {"router"}), ("deepseek", {"router"}), ("bert", set())]
)
def test_linear_layers_of_blocks_only(family: str, others: set[str]) -> None:
    """Routers, embeddings and heads are as they were, and experts are no linear layers."""
    model = larger(family)
    stage = build_stage(
        model, range(len(model.layers)), torch.float32, torch.device("cpu"), 0, fp8_recipe="rowwise_with_gw_hp"
    )
    for layer, spec in zip(stage.layers.values(), model.layers, strict=True):
        linears = {path.rpartition(".")[2]: m for path, m in layer.named_modules() if isinstance(m, nn.Linear)}
        in_fp8 = {name for name, linear in linears.items() if type(linear) is not nn.Linear}
        is_block = spec.kind is LayerKind.BLOCK
        assert linears.keys() - in_fp8 == (others & linears.keys() if is_block else linears.keys())
        assert not is_block or {"proj", "down"} & in_fp8


def test_zeros_have_a_scale() -> None:
    block = with_fp8_linears(nn.Sequential(OrderedDict(up=nn.Linear(64, 48, bias=False))), UP)
    y = block(torch.zeros(16, 64, dtype=torch.bfloat16))
    assert torch.equal(y, torch.zeros_like(y))


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch's operations other than matmuls read and write of matrices, and the operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = self.num_kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the tensors inside of quantized ones come next
        made = func(*args, **(kwargs or {}))
        is_view = func.is_view and made.data_ptr() == args[0].data_ptr()  # contiguous may copy
        if not is_view and func not in (torch.ops.aten._scaled_mm.default, torch.ops.aten.mm.default):
            self.num_kernels += 1
            matrices = [x for x in (*args, made) if isinstance(x, Tensor) and min(x.shape[-2:], default=0) > 1]
            self.num_bytes += sum(x.nbytes for x in matrices)
        return made


@pytest.mark.parametrize("recipe", TORCHAO_RECIPES)
@pytest.mark.parametrize("weights", slow_except([torch.bfloat16], [torch.float32, torch.bfloat16]))
def test_casts_are_priced_as_torchaos_operations(recipe: Fp8Recipe, weights: torch.dtype) -> None:
    """A weight in fp32 is not upcast, and its gradient is, which is counted elsewhere; a scale may be repeated."""
    m, n, k = 256, 512, 128
    block = with_fp8_linears(nn.Sequential(OrderedDict(up=nn.Linear(k, n, bias=False, dtype=weights))), UP, recipe)
    x = torch.randn(m, k, dtype=torch.bfloat16, requires_grad=True)
    state = StateBytes(parameter=4, gradient=4, activation=2, boundary=2, gathered=weights.itemsize)
    one_s_per_kernel = changed(MatmulRates(1.0, math.inf, None, PLAIN), kernel_overhead_s=1.0)
    form = linear_format("fp8", recipe, "wide", eager=True)
    rates = LinearRates(form, state, one_s_per_kernel, one_s_per_kernel, 1.0)
    with Traffic() as forward, torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    gradient = torch.ones_like(y)
    with Traffic() as backward:
        torch.autograd.grad(y, (x, block.get_parameter("up.weight")), gradient)
    for phase, traffic in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
        casts = [
            part
            for part in rates.parts(Gemm("up", m, n, k), 1, phase)
            if " cast of " in part.name or "scale" in part.name
        ]
        cast_bytes, upcast = sum(part.numbers[0] for part in casts), 0
        if weights is torch.float32 and phase is Phase.BACKWARD:
            upcast = 6 * n * k
        assert traffic.num_bytes == pytest.approx(cast_bytes + upcast, rel=0.001)
        assert traffic.num_kernels == pytest.approx(sum(part.seconds for part in casts), abs=1)


@pytest.mark.parametrize("recipe", TORCHAO_RECIPES)
@pytest.mark.parametrize("weights", slow_except([torch.bfloat16], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize(
    ("m", "n", "k", "bias"),
    slow_except(
        [(256, 512, 128, False)],
        [(256, 512, 128, False), (256, 256, 256, False), (128, 256, 256, False), (2048, 512, 32, True)],
    ),
)
def test_peak_of_one_linear_layer_is_torchs(
    recipe: Fp8Recipe, weights: torch.dtype, m: int, n: int, k: int, bias: bool
) -> None:
    """What there is beside input, weight and the gradient of the output; scales in between take up to 3 %."""
    gemm = Gemm("up", m, n, k)
    parameters = [ParameterSpec("up.weight", (n, k)), *([ParameterSpec("up.bias", (n,))] if bias else [])]
    layer = layer_of_kernels((gemm,), parameters, key="up")
    state = StateBytes(parameter=4, gradient=4, activation=2, boundary=2, gathered=weights.itemsize)
    state = state.model_copy(update={"linear": linear_format("fp8", recipe, "wide", eager=True)})
    storages, peaks = StorageTracker(), []

    def noting_peak(run: Callable[[], Any]) -> Any:
        before = storages.peak_bytes = storages.total_bytes
        made = run()
        peaks.append(storages.peak_bytes - before)
        return made

    with storages.counting():
        linear = nn.Linear(k, n, bias=bias, dtype=weights)
        block = with_fp8_linears(nn.Sequential(OrderedDict(up=linear)), layer, recipe)
        x = torch.randn(m, k, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = noting_peak(lambda: block(x))
        gradient = torch.ones_like(y)
        noting_peak(lambda: torch.autograd.grad(y, (x, linear.weight), gradient))
    points = [scratch + weight for scratch, weight in backward_scratch(layer, gemm, 1, state)]
    assert peaks == [
        pytest.approx(forward_scratch_bytes(layer, gemm, 1, state) + y.nbytes, rel=0.03),
        pytest.approx(max(points) + x.nbytes, rel=0.03),
    ]


def tiny(family: str) -> ModelSpec:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}
    return ModelSpec(family=family, intermediate_size=96, seq_len=24, **sizes)


def job_of(
    model: ModelSpec,
    plan: dict[str, Any],
    num_microbatches: int,
    recipe: Fp8Recipe = "tensorwise",
    **fields: Any,
) -> RunSpec:
    ranks = plan.get("dp_replicate", 1) * plan.get("dp_shard", 1)
    microbatch_size = plan.get("microbatch_size", 2)
    size = num_microbatches * microbatch_size * ranks
    training = TrainingSpec(global_batch_size=size, precision="fp8", fp8_recipe=recipe)
    schedule = "1f1b" if "pp" in plan else "none"
    job: RunSpec = make_job(schedule, model=model, plan=plan, training=training, dtype="bf16", **fields)
    table = tuple(tuple(map(str, row)) for row in plan_table(job.plan, num_microbatches))
    return job.model_copy(update={"table": table})


def one_process(job: RunSpec, num_steps: int, *, casts_weights: bool) -> list[float]:
    """Mean losses of steps over the microbatches of all ranks.

    Args:
        job: Which.
        num_steps: How many.
        casts_weights: Everything is computed with weights in bf16, as FSDP does, not under autocast.
    """
    cpu = torch.device("cpu")
    master = build_stage(
        job.model, range(len(job.model.layers)), torch.float32, cpu, job.seed, fp8_recipe=job.training.fp8_recipe
    )
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-3)
    losses = []
    for step in range(num_steps):
        num_samples = job.training.global_batch_size
        tokens, targets = make_batch(
            job.model.vocab_size, job.model.seq_len, seed=job.seed, step=step, first_sample=0, num_samples=num_samples
        )
        num_parts = num_samples // job.plan.microbatch_size
        model = _with_cast_weights(master) if casts_weights else Autocast(master, torch.bfloat16, "cpu")
        optimizer.zero_grad()
        losses_of_step = []
        for x, y in zip(tokens.chunk(num_parts), targets.chunk(num_parts), strict=True):
            loss = cross_entropy(model(x), y)
            losses_of_step.append(loss.item())
            (loss / num_parts).backward()  # type: ignore[no-untyped-call]
        if casts_weights:
            for parameter, copy in zip(master.parameters(), model.parameters(), strict=True):
                assert copy.grad is not None
                parameter.grad = copy.grad.float()
        optimizer.step()
        losses.append(sum(losses_of_step) / num_parts)
    return losses


def _with_cast_weights(model: nn.Module) -> nn.Module:
    """Weights in bf16, tables of rotary positions as they are."""
    copy = deepcopy(model)
    for parameter in copy.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "plan", "recipe"),
    [
        ("gpt", {"dp_replicate": 2, "bucket_bytes": 40_000}, "tensorwise"),
        ("gpt", {"dp_replicate": 2, "bucket_bytes": 40_000}, "rowwise"),
        ("llama", {"dp_shard": 2}, "tensorwise"),
        ("llama", {"dp_shard": 2, "recompute": "full"}, "rowwise_with_gw_hp"),
        ("llama", {"pp": 2}, "tensorwise"),
        ("llama", {"pp": 2, "recompute": "selective"}, "rowwise"),
    ],
)
def test_ranks_have_the_losses_of_one_process(
    family: str, plan: dict[str, Any], recipe: Fp8Recipe, tmp_path: Path
) -> None:
    """The first step's to rounding in fp32; then rounding in 16 and 8 bits of updates that differ in the last one."""
    job = job_of(tiny(family), plan, 4, recipe)
    measurement = run_job(job, tmp_path)
    wanted = one_process(job, 3, casts_weights="dp_shard" in plan)
    assert measurement.losses[0] == pytest.approx(wanted[0], rel=1e-6)
    assert measurement.losses == pytest.approx(wanted, rel=5e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of itself
def test_compiled_ranks_have_the_losses_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding: a compiled graph keeps in FP32 what eager operations round to 16 bits."""
    compiled = catalog.software("torch").model_copy(update={"compiled": True})
    job = job_of(tiny("llama"), {"dp_shard": 2}, 4, software=compiled)
    monkeypatch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
    measurement = run_job(job, tmp_path, rank_module="compiling_worker")
    assert all(int((tmp_path / f"graphs.rank{rank.rank}").read_text()) > 0 for rank in measurement.ranks)
    assert measurement.losses == pytest.approx(one_process(job, 3, casts_weights=True), rel=5e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("family", "precision", "recipe"),
    slow_except([("llama", "cast", "rowwise")], list(product(("gpt", "llama"), ("autocast", "cast"), TORCHAO_RECIPES))),
)
def test_a_compiled_block_saves_what_torch_saves(
    family: str, precision: str, recipe: Fp8Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved bytes equal those of torch's partitioner; scales of columns count for every sequence."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager_decomp_partition")
    torch._dynamo.reset()
    spec, form = variant(family), linear_format("fp8", recipe, "wide")

    def prepare(stage: Stage) -> None:
        for layer in stage.layers.values():
            with_fp8_linears(layer, spec.layers[1], recipe)
        compiling.compile_blocks(stage, spec, whole=True)

    state = STATES[precision].model_copy(update={"linear": form})
    run = LayerRun(spec, 1, "none", precision, state=state, prepare=prepare)
    layer = keeping_quantized(implemented_layer(run.layer, LayerImplementation(compiled=True), dropout=False), form)
    made = BATCH * run.layer.output_bytes(run.state.activation, run.state.residual)[0]
    outputs, held, _ = traced(run.forward)
    assert held - made == pytest.approx(run.kept_bytes(layer), rel=0.01)
    del outputs


@pytest.mark.parametrize(
    ("family", "plan", "recipe"),
    [
        pytest.param("gpt", {"microbatch_size": 16}, "tensorwise", marks=pytest.mark.slow),
        ("llama", {"dp_shard": 4}, "rowwise"),
        pytest.param(
            "llama", {"recompute": "full", "microbatch_size": 8}, "rowwise_with_gw_hp", marks=pytest.mark.slow
        ),
        pytest.param("llama", {"dp_shard": 4, "microbatch_size": 16}, "tensorwise", marks=pytest.mark.slow),
        pytest.param("gpt", {"dp_shard": 4, "recompute": "selective"}, "rowwise", marks=pytest.mark.slow),
        pytest.param("bert", {"dp_replicate": 2, "microbatch_size": 8}, "rowwise", marks=pytest.mark.slow),
        pytest.param("neox", {"dp_replicate": 2}, "rowwise_with_gw_hp", marks=pytest.mark.slow),
        pytest.param("mpt", {"pp": 2}, "tensorwise", marks=pytest.mark.slow),
        pytest.param("moe", {}, "tensorwise", marks=pytest.mark.slow),
        pytest.param("deepseek", {"dp_shard": 2}, "rowwise", marks=pytest.mark.slow),
    ],
)
def test_peak_is_torchs(family: str, plan: dict[str, Any], recipe: Fp8Recipe) -> None:
    """On fake tensors. The vocabulary is small, so that the peak is in a block, and casts matter."""
    job = job_of(larger(family), plan, 2, recipe)
    peak_bytes, wanted = predicted_peak(job, 0).total_bytes, account(job, 0).total_bytes
    assert peak_bytes == pytest.approx(wanted, rel=0.01)


def larger(family: str) -> ModelSpec:
    fields: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 128}
    if family in ("moe", "deepseek"):
        fields |= {"num_experts": 4, "top_k": 2, "moe_intermediate_size": 512, "capacity_factor": 2.0}
        fields |= {"drop_tokens": True}
    if family == "deepseek":
        fields |= {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    else:
        fields |= {"num_key_value_heads": 8}
    return ModelSpec(family=family, intermediate_size=2048, seq_len=160, **fields)


def test_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where something is in fp8: the same job in fp64 checks other precisions' arithmetic."""
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    job = job_of(tiny("gpt"), {}, 2)
    with pytest.raises(NotModelledError, match=r"pip install 'simplan\[float8\]', or use bf16"):
        check_job(job)
    check_job(job.model_copy(update={"dtype": "fp64"}))
