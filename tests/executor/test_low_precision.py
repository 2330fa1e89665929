"""The fp8 linear layer against arithmetic in float64, one process, and torch's account of memory."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.checks import check_job
from executor.distributed.low_precision import Fp8Linear
from executor.distributed.precision import Autocast
from executor.models.model import build_stage
from executor.run import run_job
from executor.train.data import make_batch
from executor.train.loss import cross_entropy
from simplan.errors import NotModelledError
from simplan.program.run_spec import RunSpec
from simplan.program.table import plan_table
from simplan.spec.model import ModelSpec
from simplan.spec.training import TrainingSpec
from tests.executor.accounting import account, predicted_peak

E4M3_LARGEST, E5M2_LARGEST = 448.0, 57344.0


def rounded(x: Tensor, mantissa_bits: int, least_exponent: int, largest: float) -> Tensor:
    """The nearest numbers of a floating-point format to x times a scale, over the scale; ties to even.

    e4m3 has 3 bits of mantissa, e5m2 has 2; numbers below 2^-6 and 2^-14 are subnormal (OCP 8-bit floating point 1.0).
    """
    scale = (largest / x.double().abs().max()).float().double()
    scaled = (x.double() * scale).float().double()
    _, exponents = torch.frexp(scaled)
    unit = torch.exp2((exponents.double() - 1).clamp(min=least_exponent) - mantissa_bits)
    return torch.round(scaled / unit) * unit / scale


def e4m3(x: Tensor) -> Tensor:
    return rounded(x, 3, -6, E4M3_LARGEST)


def e5m2(x: Tensor) -> Tensor:
    return rounded(x, 2, -14, E5M2_LARGEST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_are_products_of_rounded_operands(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, dtype=dtype)
    x = torch.randn(2, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(2, 32, 48, dtype=torch.bfloat16)
    before = linear.weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        y = Fp8Linear.of(linear)(x)
    y.backward(gradient)
    assert torch.equal(linear.weight, before)
    rows, weight, g = e4m3(x.detach().flatten(0, 1)), e4m3(before), e5m2(gradient.flatten(0, 1))
    wanted = rows @ weight.T + linear.bias.detach().to(torch.bfloat16)
    assert x.grad is not None
    assert linear.weight.grad is not None
    in_16_bits = 2.0**-8
    torch.testing.assert_close(y.flatten(0, 1).double(), wanted, rtol=2 * in_16_bits, atol=in_16_bits)
    torch.testing.assert_close(x.grad.flatten(0, 1).double(), g @ weight, rtol=in_16_bits, atol=1e-6)
    assert linear.weight.grad.dtype is dtype
    rtol = 1e-5 if dtype is torch.float32 else in_16_bits
    torch.testing.assert_close(linear.weight.grad.double(), g.T @ rows, rtol=rtol, atol=1e-5)
    assert linear.bias.grad is not None
    summed = gradient.double().sum((0, 1))
    torch.testing.assert_close(linear.bias.grad.double(), summed, rtol=in_16_bits, atol=0.05)


def test_zeros_have_a_scale() -> None:
    linear = Fp8Linear(16, 16, bias=False)
    y = linear(torch.zeros(16, 16, dtype=torch.bfloat16))
    assert torch.equal(y, torch.zeros_like(y))


def tiny(family: str) -> ModelSpec:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}
    return ModelSpec(family=family, intermediate_size=96, seq_len=24, **sizes)


def job_of(make_job: Any, model: ModelSpec, plan: dict[str, Any], num_microbatches: int, **fields: Any) -> RunSpec:
    ranks = plan.get("dp_replicate", 1) * plan.get("dp_shard", 1)
    microbatch_size = plan.get("microbatch_size", 2)
    training = TrainingSpec(global_batch_size=num_microbatches * microbatch_size * ranks, precision="fp8")
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
    master = build_stage(job.model, range(len(job.model.layers)), torch.float32, cpu, job.seed, fp8=True)
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
        found = []
        for x, y in zip(tokens.chunk(num_parts), targets.chunk(num_parts), strict=True):
            loss = cross_entropy(model(x), y)
            found.append(loss.item())
            (loss / num_parts).backward()  # type: ignore[no-untyped-call]
        if casts_weights:
            for parameter, copy in zip(master.parameters(), model.parameters(), strict=True):
                assert copy.grad is not None
                parameter.grad = copy.grad.float()
        optimizer.step()
        losses.append(sum(found) / num_parts)
    return losses


def _with_cast_weights(model: nn.Module) -> nn.Module:
    """Weights in bf16, tables of rotary positions as they are."""
    copy = deepcopy(model)
    for parameter in copy.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "plan"),
    [("gpt", {"dp_replicate": 2, "bucket_bytes": 40_000}), ("llama", {"dp_shard": 2}), ("llama", {"pp": 2})],
)
def test_ranks_have_the_losses_of_one_process(family: str, plan: dict[str, Any], tmp_path: Path, make_job: Any) -> None:
    """The first step's to rounding in fp32; then rounding in 16 and 8 bits of updates that differ in the last one."""
    job = job_of(make_job, tiny(family), plan, 4)
    measurement = run_job(job, tmp_path)
    wanted = one_process(job, 3, casts_weights="dp_shard" in plan)
    assert measurement.losses[0] == pytest.approx(wanted[0], rel=1e-6)
    assert measurement.losses == pytest.approx(wanted, rel=5e-4)


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("gpt", {}),
        ("llama", {"dp_shard": 4}),
        pytest.param("llama", {"recompute": "full", "microbatch_size": 8}, marks=pytest.mark.slow),
        pytest.param("gpt", {"dp_shard": 4, "recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param("bert", {"dp_replicate": 2}, marks=pytest.mark.slow),
        pytest.param("mpt", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("moe", {}, marks=pytest.mark.slow),
        pytest.param("deepseek", {"dp_shard": 2}, marks=pytest.mark.slow),
    ],
)
def test_peak_is_torchs(family: str, plan: dict[str, Any], make_job: Any) -> None:
    """On fake tensors, of which a cast has at most 2^18 elements in fp32 at a time."""
    job = job_of(make_job, larger(family), plan, 2)
    found, wanted = predicted_peak(job, 0).total_bytes, account(job, 0).total_bytes
    assert found == pytest.approx(wanted, rel=0.03)


def larger(family: str) -> ModelSpec:
    fields: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 4096}
    if family in ("moe", "deepseek"):
        fields |= {"num_experts": 4, "top_k": 2, "moe_intermediate_size": 512, "capacity_factor": 2.0}
        fields |= {"drop_tokens": True}
    if family == "deepseek":
        fields |= {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    else:
        fields |= {"num_key_value_heads": 8}
    return ModelSpec(family=family, intermediate_size=2048, seq_len=160, **fields)


@pytest.mark.parametrize(
    ("training", "plan", "sentence"),
    [
        ({"precision": "mxfp8"}, {}, "training.precision = mxfp8: the executor does not run this precision"),
        ({"precision": "nvfp4"}, {}, "training.precision = nvfp4: the executor does not run this precision"),
        (
            {"precision": "fp8", "fp8_recipe": "rowwise"},
            {},
            "training.fp8_recipe = rowwise: the executor's linear layers have no such recipe",
        ),
        ({"precision": "fp8"}, {"tp": 2}, "plan.tp = 2: the executor does not split matrices whose scale in fp8"),
    ],
)
def test_what_the_executor_has_not_is_refused_by_name(
    training: dict[str, Any], plan: dict[str, Any], sentence: str, make_job: Any
) -> None:
    asked = TrainingSpec.model_validate({"global_batch_size": 8, **training})
    job = make_job("none", model=tiny("gpt"), plan=plan, training=asked, dtype="bf16")
    with pytest.raises(NotModelledError, match=r".*") as caught:
        check_job(job)
    assert str(caught.value).startswith(sentence)
