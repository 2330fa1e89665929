"""Models of all families: against independent implementations, and real ranks against one process."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.models.attention_cores import alibi_slopes
from executor.models.model import build_stage
from executor.train.data import IGNORED, model_batch
from executor.train.loss import cross_entropy
from tests.executor.conftest import make_job
from tests.executor.models.family_models import VARIANTS, variant
from tests.executor.models.layer_runs import without_levels
from tests.executor.train.test_equality import assert_equal_to_one_process, run_in_float64
from tests.support.slow import slow_except

CPU = torch.device("cpu")
EXACT: Any = {"rtol": 1e-9, "atol": 1e-9}


def block_of(name: str, **fields: Any) -> Any:
    """A block with random weights, and biases and norms that matter, in float64."""
    block = build_stage(variant(name, **fields), [1], torch.float64, CPU, seed=0).layers["1"]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return block


@pytest.mark.parametrize(("name", "post_norm"), [("bert", True), ("vit", False)])
def test_encoder_blocks_are_torchs(name: str, post_norm: bool) -> None:
    """``nn.TransformerEncoderLayer`` with the same weights: values and the gradient of the input."""
    block = block_of(name)
    theirs = nn.TransformerEncoderLayer(
        64, 8, 256, dropout=0.0, activation="gelu", batch_first=True, norm_first=not post_norm, dtype=torch.float64
    )
    fused = name == "vit"
    names = {"linear1": "up", "linear2": "down", "norm1": "norm1", "norm2": "norm2", "self_attn.out_proj": "proj"}
    ours = {without_levels(name): parameter for name, parameter in block.named_parameters()}
    if fused:
        ours |= {f"qkv.{kind}": by_parts(ours[f"qkv.{kind}"]) for kind in ("weight", "bias")}
    state = {f"{to}.{kind}": ours[f"{from_}.{kind}"] for to, from_ in names.items() for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        parts = [ours[f"qkv.{kind}"]] if fused else [ours[f"{part}.{kind}"] for part in "qkv"]
        state[f"self_attn.in_proj_{kind}"] = torch.cat(parts)
    theirs.load_state_dict(state)
    assert_alike(block, theirs, (2, 65 if fused else 64, 64))


def by_parts(grouped: Tensor) -> Tensor:
    """Rows of all queries, of all keys, of all values; the block's are grouped by heads."""
    return torch.unflatten(grouped, 0, (8, 3, -1)).transpose(0, 1).flatten(0, 2)


def assert_alike(ours: nn.Module, theirs: nn.Module, shape: tuple[int, ...]) -> None:
    results = []
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        (out * weight).sum().backward()
        results.append((out, leaf.grad))
    for tensor, wanted in zip(*results, strict=True):
        torch.testing.assert_close(tensor, wanted, **EXACT)


def written_out(block: Any, x: Tensor, bias: Tensor) -> Tensor:
    """Attention of an MPT block by its definition; ``bias`` (heads, n, n) is added to the scores."""
    normed = functional.layer_norm(x, x.shape[-1:], block.norm1.weight)
    q, k, v = (normed @ by_parts(block.attention.qkv.weight).T).chunk(3, dim=-1)
    heads = [torch.unflatten(part, -1, (8, 8)).transpose(1, 2) for part in (q, k, v)]
    scores = heads[0] @ heads[1].transpose(-1, -2) / math.sqrt(8) + bias
    attended: Tensor = (scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(-2) @ block.attention.proj.weight.T
    return attended


def test_mpt_attention_is_alibi() -> None:
    """Press et al. 2022, section 3: -m (i - j) is added to the scores of heads with slopes 1/2, 1/4, ..., 1/256."""
    block = block_of("mpt")
    x = torch.randn(2, 64, 64, dtype=torch.float64)
    slopes = torch.tensor([2.0**-i for i in range(1, 9)], dtype=torch.float64)
    places = torch.arange(64)
    distance = places.unsqueeze(1) - places
    bias = (-slopes.view(8, 1, 1) * distance).masked_fill(distance < 0, -torch.inf)
    torch.testing.assert_close(block.attention(block.norm1(x)), written_out(block, x, bias), **EXACT)


def turned(x: Tensor, width: int) -> Tensor:
    """(batch, heads, n, d), the first columns of which turn in pairs as complex numbers (Su et al. 2021, section 3)."""
    half = width // 2
    angles = torch.arange(x.shape[2]).double().outer(10_000.0 ** (-torch.arange(half).double() / half))
    tables = (table.float().double() for table in (angles.cos(), angles.sin()))  # they are of single precision
    pairs = torch.complex(x[..., :half], x[..., half:width]) * torch.complex(*tables)
    return torch.cat((pairs.real, pairs.imag, x[..., width:]), dim=-1)


def heads_of(x: Tensor, number: int) -> Tensor:
    return torch.unflatten(x, -1, (number, -1)).transpose(1, 2)


def test_neox_blocks_are_written_out() -> None:
    """Black et al. 2022, sections 2.1 and 2.2: a quarter of each head is rotated; x + Attn(LN1(x)) + FF(LN2(x))."""
    block, x = block_of("neox", hidden_size=64, num_attention_heads=4), torch.randn(2, 64, 64, dtype=torch.float64)
    normed = block.norm1(x)
    heads = torch.unflatten(block.attention.qkv(normed), -1, (4, 3, -1))
    q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))
    attended = functional.scaled_dot_product_attention(turned(q, 4), turned(k, 4), v, is_causal=True)
    mlp = block.mlp.down(functional.gelu(block.mlp.up(block.norm2(x))))
    wanted = x + block.attention.proj(attended.transpose(1, 2).flatten(-2)) + mlp
    torch.testing.assert_close(block(x), wanted, **EXACT)


@pytest.mark.parametrize(("index", "window"), [(0, 24), (1, 64)])
def test_gemma2_blocks_are_written_out(index: int, window: int) -> None:
    """Gemma Team 2024, section 2: norms around branches, scores under 50 tanh(s / 50), every second block a window."""
    spec = variant("gemma2")
    block: Any = build_stage(spec, [1 + index], torch.float64, CPU, seed=0).layers[str(1 + index)]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter))

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (64,), weight, eps=1e-5)

    hidden = torch.randn(2, 64, 64, dtype=torch.float64)
    normed = rms(hidden, block.norm1.weight)
    q = turned(heads_of(block.attention.q(normed), 8), 16)
    k, v = (
        heads_of(matrix(normed), 4).repeat_interleave(2, dim=1) for matrix in (block.attention.k, block.attention.v)
    )
    distances = torch.arange(64).unsqueeze(1) - torch.arange(64)
    scores = 50 * torch.tanh(q @ turned(k, 16).transpose(-1, -2) / 4 / 50)
    scores = scores.masked_fill((distances < 0) | (distances >= window), -torch.inf)
    attended = block.attention.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
    x = hidden + rms(attended, block.norm2.weight)
    normed = rms(x, block.norm3.weight)
    product = functional.gelu(block.mlp.gate(normed), approximate="tanh") * block.mlp.up(normed)
    wanted = x + rms(block.mlp.down(product), block.norm4.weight)
    torch.testing.assert_close(block(hidden), wanted, **EXACT)


def test_gemma2_begins_with_larger_rows_and_ends_under_a_cap() -> None:
    """Rows times sqrt(64); logits of the same rows under 30 tanh(z / 30)."""
    spec = variant("gemma2")
    stage: Any = build_stage(spec, range(len(spec.layers)), torch.float64, CPU, seed=0)
    embedding, head = stage.layers["0"], stage.layers[str(len(spec.layers) - 1)]
    tokens = torch.randint(500, (2, 64))
    torch.testing.assert_close(embedding(tokens), 8 * embedding.wte.weight[tokens], **EXACT)
    x = 1000 * torch.randn(2, 64, 64, dtype=torch.float64)
    logits = head.norm(x) @ (100 * embedding.wte.weight).T
    with torch.no_grad():
        head.lm_head.weight.mul_(100)
    torch.testing.assert_close(head(x), 30 * torch.tanh(logits / 30), **EXACT)


def test_slopes_between_powers_of_two() -> None:
    """MPT-30B has 64 heads; for 12 the paper's code takes those of 8, then every second one of 16."""
    ours = sorted(alibi_slopes(12).tolist())
    paper = [2.0**-i for i in range(1, 9)] + [2.0 ** (-8 * i / 16) for i in (1, 3, 5, 7)]
    assert ours == pytest.approx(sorted(paper))


def test_a_window_ends_what_a_query_meets() -> None:
    """Token 40 does not change when tokens before its window of 24 do; token 41's window begins one later."""
    block = block_of("window")
    x = torch.randn(1, 64, 64, dtype=torch.float64)
    changed = x.clone()
    changed[0, :17] = torch.randn(17, 64, dtype=torch.float64)
    same = (block(x) - block(changed)).abs().amax(-1)[0] < 1e-12
    assert not same[:40].any()
    assert same[40:].all()
    whole = block_of("window", sliding_window=None)
    whole.load_state_dict(block.state_dict())
    torch.testing.assert_close(block(x)[0, :24], whole(x)[0, :24], **EXACT)


def test_masked_tokens_alone_have_targets() -> None:
    """As many in every sequence, so that means of microbatches are those of the batch."""
    spec = variant("bert")
    tokens, targets = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=5)
    asked = targets != IGNORED
    assert (asked.sum(1) == round(0.15 * 64)).all()
    logits = torch.randn(5, 64, 500, dtype=torch.float64)
    wanted = functional.cross_entropy(logits[asked], targets[asked])
    torch.testing.assert_close(cross_entropy(logits, targets), wanted)
    assert (tokens[asked] == 0).all()


def test_the_head_of_images_reads_the_class_token_alone() -> None:
    spec = variant("vit")
    head = build_stage(spec, [len(spec.layers) - 1], torch.float64, CPU, seed=0)
    x = torch.randn(2, 65, 64, dtype=torch.float64)
    changed = torch.cat((x[:, :1], torch.randn(2, 64, 64, dtype=torch.float64)), dim=1)
    torch.testing.assert_close(head(x), head(changed), **EXACT)


def test_patches_are_a_product_of_a_matrix() -> None:
    """The convolution against torch's own unfolding of images."""
    spec = variant("vit")
    layer: Any = build_stage(spec, [0], torch.float64, CPU, seed=0).layers["0"]
    images, _ = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=2)
    patches = functional.unfold(images.double(), 4, stride=4).transpose(1, 2)
    products = patches @ layer.conv_proj.weight.flatten(1).T
    torch.testing.assert_close(layer(images.double())[:, 1:], products + layer.pos_embedding[1:], **EXACT)


STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("none", {"dp_replicate": 2, "bucket_bytes": 40_000}),
    "fsdp": ("none", {"dp_shard": 2}),
    "pipeline": ("1f1b", {"pp": 2}),
}
"""Schedule and plan."""

QUICK = {("bert", "pipeline"), ("neox", "fsdp")}


@pytest.mark.parametrize(
    ("name", "strategy"),
    slow_except(QUICK, product(VARIANTS, STRATEGIES)),
)
def test_two_ranks_equal_one_process(name: str, strategy: str, tmp_path: Path) -> None:
    """Losses and gradients of every step in float64."""
    schedule, plan = STRATEGIES[strategy]
    job = make_job(schedule, model=variant(name), plan=plan, dtype="fp64", num_steps=1)
    assert_equal_to_one_process(run_in_float64(job, tmp_path))
