"""T5's layers against independent implementations and torch's own accounts; real ranks against one process."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.models.model import build_stage
from executor.models.t5 import relative_buckets
from executor.train.data import model_batch
from simplan.model.layer import LayerKind
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan, Recompute
from simplan.training import Precision
from simplan.validate.compare import issued_as_predicted
from tests.executor.conftest import make_job
from tests.executor.distributed.test_level2 import check_run, run_predicted
from tests.executor.dry_run.accounting import peaks
from tests.executor.models.layer_runs import (
    STATES,
    assert_kept_and_peak,
    assert_parameters_and_order_of_gradients,
    counted_flops,
)
from tests.support.slow import slow_except

CPU = torch.device("cpu")
assert_close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
VERSIONS = [False, True]  # gated_mlp
HEADS, HEAD_DIM, HIDDEN, QUERIES, KEYS = 8, 8, 64, 40, 64


def model(*, gated: bool = False, **fields: Any) -> ModelSpec:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_decoder_layers": 2, "hidden_size": HIDDEN}
    sizes |= {"num_attention_heads": HEADS, "intermediate_size": 256, "vocab_size": 500}
    sizes |= {"seq_len": KEYS, "decoder_seq_len": QUERIES, "gated_mlp": gated}
    return ModelSpec(**{"family": "t5", **sizes, **fields})


def layer_of(spec: ModelSpec, index: int) -> Any:
    """A layer with random weights, and norms that matter, in float64."""
    layer = build_stage(spec, [index], torch.float64, CPU, seed=0).layers[str(index)]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return layer


def torchs_attention(layer: Any, prefix: str, queries: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """``nn.MultiheadAttention`` with the same weights; it divides scores by the root of the head's width."""
    theirs = nn.MultiheadAttention(HIDDEN, HEADS, bias=False, batch_first=True, dtype=torch.float64)
    parts = [getattr(layer, f"{prefix}{name}").weight for name in ("q", "k", "v")]
    weights = {"in_proj_weight": torch.cat([parts[0] * HEAD_DIM**0.5, *parts[1:]])}
    theirs.load_state_dict({**weights, "out_proj.weight": getattr(layer, f"{prefix}proj").weight})
    mask = None if bias is None else bias.expand(len(queries), -1, -1, -1).flatten(0, 1)
    out, _ = theirs(queries, keys, keys, attn_mask=mask, need_weights=False)
    attended: Tensor = out
    return attended


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (HIDDEN,), weight, 1e-5)


def feed_forward(layer: Any, x: Tensor) -> Tensor:
    if hasattr(layer, "gate"):
        gate = functional.gelu(x @ layer.gate.weight.T, approximate="tanh")
        gated: Tensor = gate * (x @ layer.up.weight.T) @ layer.down.weight.T
        return gated
    plain: Tensor = (x @ layer.up.weight.T).clamp(min=0) @ layer.down.weight.T
    return plain


def bias_of(table: Tensor, length: int, *, causal: bool) -> Tensor:
    """By its definition, pair by pair; (heads, queries, keys)."""
    bias = torch.full((HEADS, length, length), -torch.inf, dtype=torch.float64)
    for query in range(length):
        for key in range(query + 1 if causal else length):
            distance = torch.tensor(key - query)
            bias[:, query, key] = table[int(relative_buckets(distance, 32, causal=causal))]
    return bias


def states() -> list[Tensor]:
    shapes = (2, KEYS, HIDDEN), (2, QUERIES, HIDDEN), (1, 2, 32, HEADS)
    encoder, decoder, tables = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [encoder.requires_grad_(), decoder.requires_grad_(), tables.expand(2, -1, -1, -1).clone()]


@pytest.mark.parametrize("gated", VERSIONS)
@pytest.mark.parametrize("last", [False, True])
def test_encoder_blocks_are_those_of_torchs_attention(gated: bool, last: bool) -> None:
    layer = layer_of(model(gated=gated), 2 if last else 1)
    encoder, decoder, tables = states()
    output, passed, _ = layer((encoder, decoder, tables))
    normed = norm(encoder, layer.norm1.weight)
    bias = bias_of(tables[0, 0], KEYS, causal=False)
    x = encoder + torchs_attention(layer, "", normed, normed, bias)
    x = x + feed_forward(layer, norm(x, layer.norm2.weight))
    wanted = norm(x, layer.norm3.weight) if last else x
    assert_close(output, wanted)
    assert passed is decoder


@pytest.mark.parametrize("gated", VERSIONS)
def test_decoder_blocks_are_those_of_torchs_attention(gated: bool) -> None:
    """Values, and gradients of the encoder's output and of the decoder's states."""
    layer = layer_of(model(gated=gated), 3)
    encoder, decoder, tables = states()
    passed, output, _ = layer((encoder, decoder, tables))
    normed = norm(decoder, layer.norm0.weight)
    x = decoder + torchs_attention(layer, "", normed, normed, bias_of(tables[0, 1], QUERIES, causal=True))
    x = x + torchs_attention(layer, "cross_", norm(x, layer.norm1.weight), encoder, None)
    wanted = x + feed_forward(layer, norm(x, layer.norm2.weight))
    assert_close(output, wanted)
    weight = torch.randn_like(output)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), (encoder, decoder)) for y in (output, wanted))
    assert_close(ours, theirs)
    assert passed is encoder


def test_buckets_of_distances() -> None:
    """Raffel et al. 2020, section 2.1: 32 of them, whose ranges grow logarithmically up to 128, beyond which all share
    one; for both directions together as many as for one in the decoder."""
    distances = torch.arange(-200, 201)
    for causal, exact in ((True, 16), (False, 8)):
        buckets = dict(zip(distances.tolist(), relative_buckets(distances, 32, causal=causal).tolist(), strict=True))
        assert [buckets[-distance] for distance in range(exact)] == list(range(exact))
        earlier = [buckets[-distance] for distance in range(201)]
        assert earlier == sorted(earlier)
        assert set(earlier) == set(range(2 * exact))
        assert {buckets[-distance] for distance in range(128, 201)} == {2 * exact - 1}
        # half way in the logarithm from the first range to 128, half of the ranges
        assert buckets[-round((exact * 128) ** 0.5) - 1] == exact + exact // 2
        if causal:
            assert {buckets[distance] for distance in range(201)} == {0}
        else:
            assert [buckets[distance] for distance in range(1, 201)] == [16 + bucket for bucket in earlier[1:]]


def test_targets_are_the_decoders_next_tokens() -> None:
    spec = model()
    tokens, targets = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=3)
    assert tokens.shape == (3, KEYS + QUERIES)
    assert torch.equal(tokens[:, KEYS + 1 :], targets[:, :-1])
    assert not tokens[:, KEYS].any()


def test_the_first_version_scales_what_it_applies_the_embedding_to() -> None:
    for gated, scale in ((False, HIDDEN**-0.5), (True, 1.0)):
        head = layer_of(model(gated=gated), 5)
        _, decoder, _ = inputs = states()
        wanted = scale * norm(decoder, head.norm.weight) @ head.lm_head.weight.T
        assert_close(head(inputs), wanted)


def cases() -> list[Any]:
    """Every kind of layer: embedding, encoder block, the last one, decoder block, head."""
    layers = []
    for gated in VERSIONS:
        for index in (0, 1, 2, 3, 5):
            is_block = model().layers[index].kind is LayerKind.BLOCK
            for mode in ("none", "selective", "full") if is_block else ("none",):
                for precision in STATES:
                    slow = [pytest.mark.slow] * ((gated and mode != "none") or (precision == "cast" and mode != "full"))
                    layers.append(pytest.param(gated, index, mode, precision, marks=slow))
    return layers


@pytest.mark.parametrize(("gated", "index", "recompute", "precision"), cases())
def test_memory_is_that_of_the_layer(gated: bool, index: int, recompute: Recompute, precision: str) -> None:
    assert_kept_and_peak(model(gated=gated), index, recompute, precision)


@pytest.mark.parametrize("gated", VERSIONS)
def test_parameters_and_order_of_gradients_are_those_of_the_layers(gated: bool) -> None:
    assert_parameters_and_order_of_gradients(model(gated=gated))


@pytest.mark.parametrize("gated", VERSIONS)
def test_flops_are_those_that_torch_counts(gated: bool) -> None:
    """The scores that the decoder masks as well."""
    spec = model(gated=gated, hidden_size=256, intermediate_size=1024, vocab_size=8192, seq_len=256)
    wanted = 2 * sum(layer.flops(full_attention=True) for layer in spec.layers)
    assert counted_flops(spec) == pytest.approx(wanted, rel=0.005)


def tiny(*, gated: bool) -> ModelSpec:
    fields = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80, "vocab_size": 98}
    return model(gated=gated, seq_len=24, decoder_seq_len=16, **fields)


STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("none", {"dp_replicate": 2, "bucket_bytes": 40_000}),
    "fsdp": ("none", {"dp_shard": 2}),
    "1f1b": ("1f1b", {"pp": 2}),
    "1f1b of four": ("1f1b", {"pp": 4}),  # boundaries within the encoder and within the decoder
    "zb-h1": ("zb-h1", {"pp": 2}),
    "zb-v": ("zb-v", {"pp": 2}),
    "1f1b of selective": ("1f1b", {"pp": 2, "recompute": "selective"}),
    "ddp of full": ("none", {"dp_replicate": 2, "recompute": "full"}),
}


@pytest.mark.parametrize(
    ("name", "gated"),
    slow_except([("1f1b", False)], product(STRATEGIES, VERSIONS)),
)
def test_ranks_equal_one_process(name: str, gated: bool, tmp_path: Path) -> None:
    schedule, plan = STRATEGIES[name]
    if schedule == "zb-v":
        plan = {**plan, "virtual_stages": 2}
    job = make_job(schedule, model=tiny(gated=gated), plan=plan, dtype="fp64", num_steps=1)
    check_run(job, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"pp": 4}, {"pp": 2, "dp_shard": 2}], ids=str)
def test_pipelines_in_bf16_send_what_is_predicted(plan: dict[str, Any], tmp_path: Path) -> None:
    """Under autocast the encoder's output is in 16 bits, everything else that is handed on in 32."""
    made = ParallelPlan(**plan)
    _, measurement = run_predicted(model(gated=True), made, 4 * made.dp, "bf16", tmp_path)
    assert issued_as_predicted(measurement)
    sent = {c.num_bytes for rank in measurement.ranks for c in rank.collectives if c.kind == "send"}
    tables, states = 2 * 32 * HEADS, KEYS * HIDDEN
    wide = 2 if made.shards_parameters else 4
    assert sent == {wide * tables, wide * states, 2 * states, wide * QUERIES * HIDDEN}


# plan, microbatches, pipeline rank
MEMORY: dict[str, tuple[dict[str, Any], int, int]] = {
    "one device": ({}, 1, 0),
    "selective": ({"recompute": "selective", "microbatch_size": 4}, 1, 0),
    "zero3": ({"dp_shard": 4}, 2, 0),
    "ddp": ({"dp_replicate": 2}, 2, 0),
    "1f1b, first of two": ({"pp": 2}, 4, 0),
    "1f1b, second of four": ({"pp": 4}, 6, 1),
    "1f1b, third of four": ({"pp": 4}, 6, 2),
    "1f1b, last of four": ({"pp": 4}, 6, 3),
    "zb-h1, last of two": ({"pp": 2, "schedule": "zb-h1"}, 4, 1),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of what only passes, which nothing changes in place
@pytest.mark.parametrize(
    ("name", "gated", "precision"),
    slow_except(
        [("1f1b, second of four", False, "fp32")],
        [
            (name, gated, kind)
            for name, gated, kind in product(MEMORY, VERSIONS, ("fp32", "bf16"))
            if gated or kind == "fp32" or name != "zero3"  # fake tensors add up a tied weight's two gradients twice
        ],
    ),
)
def test_peak_of_a_rank_is_torchs(name: str, gated: bool, precision: Precision) -> None:
    """What pass through the encoder, and the encoder's output, are in the receive buffers and nowhere twice."""
    fields: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    spec = model(gated=gated, num_decoder_layers=6, vocab_size=8192, seq_len=256, decoder_seq_len=160, **fields)
    predicted, torchs = peaks(spec, *MEMORY[name], precision)
    assert predicted == pytest.approx(torchs, rel=0.01)
