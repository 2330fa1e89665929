"""T5's layers: published counts of work, what goes from layer to layer, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from simplan.model.layer import LayerKind
from simplan.model.model import ModelSpec
from simplan.problems import parse_model
from simplan.program.program import Program
from simplan.training import Precision
from tests.jobs import job_of, lowered, problems
from tests.support.problems import says

SIZES: dict[str, Any] = {
    "family": "t5",
    "num_hidden_layers": 3,
    "num_decoder_layers": 5,
    "hidden_size": 96,
    "num_attention_heads": 12,
    "vocab_size": 240,
    "seq_len": 48,
    "decoder_seq_len": 20,
}
TABLES = 2 * 32 * 12


def model(**fields: Any) -> ModelSpec:
    return parse_model(ModelSpec, {**SIZES, **fields}, prefix=("model",))


def test_flops_are_those_of_the_paper() -> None:
    """Raffel et al. 2020, section 3.2.1: an encoder and a decoder of as many layers together cost as much as one stack
    of them that has all tokens: each token passes through half of the blocks, with cross-attention in the decoder's."""
    spec = model(num_hidden_layers=6, num_decoder_layers=6, decoder_seq_len=48)
    blocks = [spec.layers[i] for i in spec.block_indices()]
    encoder, decoder = (
        sum(b.flops(full_attention=True) for b in blocks[:6]),
        sum(b.flops(full_attention=True) for b in blocks[6:]),
    )
    n, h, a, d, i = 48, 96, 12, 8, 384
    attention = 2 * n * 4 * h * a * d + 4 * n * n * a * d
    assert encoder == 6 * (attention + 2 * n * 2 * h * i)
    assert decoder - encoder == 6 * attention


def test_cross_attention_meets_the_encoders_tokens() -> None:
    """Keys and values of 48 tokens, queries of 20; none of the scores is masked, as half of the decoder's own are."""
    block = model().layers[-2]
    n, m, h, q, i = 20, 48, 96, 96, 384
    of_self = 2 * n * 4 * h * q + 4 * n * n * q // 2
    cross = 2 * (2 * n * h * q + 2 * m * h * q) + 4 * n * m * q
    assert block.flops() == of_self + cross + 2 * n * 2 * h * i


def test_kinds_of_layers() -> None:
    """The last encoder block differs in its norm alone; all decoder blocks are equal."""
    layers = model().layers
    assert [layer.kind for layer in layers] == [LayerKind.EMBEDDING, *[LayerKind.BLOCK] * 8, LayerKind.HEAD]
    keys = [layer.key for layer in layers]
    assert len(set(keys[1:3])) == 1 == len(set(keys[4:9]))
    assert layers[3].num_parameters - layers[2].num_parameters == 96
    assert model().num_blocks == 8
    gated = model(gated_mlp=True).layers
    assert not set(keys) & {layer.key for layer in gated[1:]}


def program_of(precision: Precision) -> Program:
    """Four stages: embedding and a block of the encoder, one more, the last one and two of the decoder, the rest."""
    plan = {"pp": 4, "microbatch_size": 2}
    return lowered(
        job_of(model(tied_embeddings=False), plan, num_microbatches=4, precision=precision), stage_layers=(1, 1, 3, 3)
    )


def communications(program: Program, action: str) -> list[tuple[int, int]]:
    """Bytes of each, and how many of them are held until it is done."""
    ops = [op for op in program.ops if str(op.action) == action and op.communication is not None]
    return [
        (op.communication.num_bytes, sum(e.after_bytes for e in op.memory))
        for op in ops
        if op.communication is not None
    ]


@pytest.mark.parametrize(("precision", "narrow"), [("fp32", 4), ("bf16", 2)])
def test_every_boundary_carries_three_tensors(precision: Precision, narrow: int) -> None:
    """States of the encoder and the decoder, and the tables; the encoder's output is in 16 bits under autocast.

    What only passes through a stage is in its receive buffer and held nowhere else. All of them have gradients.
    """
    program = program_of(precision)
    encoder, decoder, tables = 2 * 48 * 96, 4 * 2 * 20 * 96, 4 * 2 * TABLES
    assert communications(program, "0SEND_F0") == [(size, size) for size in (4 * encoder, decoder, tables)]
    assert communications(program, "1SEND_F0") == [(4 * encoder, 4 * encoder), (decoder, 0), (tables, 0)]
    output = narrow * encoder
    assert communications(program, "2SEND_F0") == [(output, output), (decoder, decoder), (tables, 0)]
    assert communications(program, "3SEND_B0") == [(size, size) for size in (output, decoder, tables)]
    assert communications(program, "2SEND_B0") == [(size, size) for size in (4 * encoder, decoder, tables)]
    assert [size for size, _ in communications(program, "1RECV_B0")] == [4 * encoder, decoder, tables]


def test_buckets_are_halved_twice() -> None:
    [refusal] = problems(model(relative_attention_buckets=30))
    assert re.search(r"buckets = 30: must be a multiple of 4: .*; use 28 or 32", refusal)


def test_defaults() -> None:
    spec = model(num_decoder_layers=3, decoder_seq_len=48)
    short = {
        key: value for key, value in SIZES.items() if not key.startswith("num_decoder") and key != "decoder_seq_len"
    }
    assert parse_model(ModelSpec, short, prefix=("model",)) == spec
    assert (spec.tied_embeddings, spec.intermediate_size, spec.head_dim) == (True, 4 * 96, 8)
    assert not model(gated_mlp=True).tied_embeddings


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"tp": 2, "sequence_parallel": False}, "plan.tp = 2: ... parallelism ... encoder"),
        ({"cp": 2}, "plan.cp = 2: ... not modeled ... use 1"),
        ({"pp": 2, "dp_shard": 2}, "model.tied_embeddings = true: sharding ... embedding"),
    ],
)
def test_plans_that_are_not_modelled(plan: dict[str, Any], sentence: str) -> None:
    [refusal] = problems(model(), plan)
    assert says(refusal, sentence)


def test_stages_are_counted_in_blocks_of_both_stacks() -> None:
    assert problems(model(), {"pp": 8}) == []
    assert problems(model(), {"pp": 2, "stage_layers": (5, 3)}) == []
    [refusal] = problems(model(), {"pp": 8, "virtual_stages": 2, "schedule": "interleaved_1f1b"})
    assert "16 stages must be at most the 8 blocks" in refusal
    [refusal] = problems(model(), {"pp": 2, "stage_layers": (4, 3)})
    assert "sums to 7 and the model has the 8 blocks" in refusal
