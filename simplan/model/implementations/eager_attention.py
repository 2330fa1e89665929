"""Attention with materialized scores: T5 uses it, since fused kernels give no gradient of a bias.

Gemma 2 uses it as well, since its scores pass through a tanh. Scores are matmuls of queries and keys, plus a bias if
there is one; their softmax, in FP32, weights the values.
"""

from __future__ import annotations

from typing import Any

from simplan.model.layer import Attention, Lookup, Operator, Role, Tensor
from simplan.model.parts.mlp import row_linear
from simplan.model.parts.part import FP32_BYTES, INDEX_BYTES, MASK_BYTES, LayerPart, joined, linear, with_role
from simplan.model.share import RankShare


def eager_attention(
    source: str, keys: str, share: RankShare, num_keys: int, *, prefix: str = "", causal: bool = False, table: str = ""
) -> LayerPart:
    """Queries, keys and values without biases, the attention core, and the projection, ``{prefix}proj output``.

    Args:
        source: Name of the tensor that queries are made from.
        keys: Name of the tensor that keys and values are made from.
        share: Sizes on the side of the queries.
        num_keys: Tokens that keys and values are made from: those of the queries, or those of an encoder.
        prefix: Prefix of the names of the core and the matrices.
        causal: Each query attends to the keys up to its own.
        table: Name of an input tensor with one row per distance. The row of every query-key pair is added to the scores
            of all heads (Raffel et al. 2020, section 2.1). Empty for none.
    """
    assert share.shard.tp == share.shard.cp == 1, "nothing is split over ranks"
    n, h, q = share.tokens, share.hidden, share.q
    names = [f"{prefix}{name}" for name in ("q", "k", "v")]
    core = Attention(
        share.heads,
        share.heads,
        share.head_dim,
        n,
        causal=causal,
        num_keys=0 if num_keys == n else num_keys,
        eager=True,
        name=f"{prefix}attention",
    )
    output, outputs = f"{core.name} output", tuple(f"{name} output" for name in names)
    attended = eager_core(core, outputs, output, table=table)
    tables = list[Tensor]()
    if table:
        tables.append(Tensor("rows of earlier distances" if causal else "rows of distances", n * num_keys, INDEX_BYTES))
    if table and causal:
        tables.append(Tensor("later keys", n * num_keys, MASK_BYTES))
    joint = "+".join(names if keys == source else names[1:])
    matrices = [linear(names[0], source, (n, q, h), joint=joint if keys == source else "")]
    matrices += [linear(name, keys, (num_keys, q, h), joint=joint) for name in names[1:]]
    return joined(
        with_role(joined(*matrices), Role.ATTENTION, Role.COLUMN_PARALLEL),
        LayerPart(operators=tuple(attended), constants=tuple(tables)),
        with_role(row_linear(f"{prefix}proj", output, q, share), Role.ATTENTION),
    )


def eager_core(
    core: Attention,
    names: tuple[str, ...],
    result: str,
    *,
    table: str = "",
    masked: bool = False,
    as_transformers: bool = False,
) -> list[Operator]:
    """Scores, operations on them, the softmax in FP32, and the matmul of weights and values.

    Keys and values are copied to the number of query heads.

    Args:
        names: Names of queries, keys and values.
        table: Name of a tensor with one row per distance, added to the scores; empty for none.
        masked: Masked scores are overwritten.
        as_transformers: Scores are scaled, and a mask is added, by operations of their own (transformers 5.23,
            eager_attention_forward). Backward of the softmax multiplies gradients by its result first (torch 2.13,
            aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out).
    """
    width = core.num_heads * core.head_dim
    keys = (core.num_keys or core.seq_len) * width
    sizes = (core.seq_len * width, keys, keys)
    heads = tuple(Tensor(f"{name} in the order of heads", size) for name, size in zip(names, sizes, strict=True))
    a, b, c = (tensor.name for tensor in heads)
    operators = [Operator(kernel=core, reads=names, makes=heads)]

    def step(word: str, *reads: str, **fields: Any) -> str:
        """Name of the scores after one more operation on them."""
        made = Tensor(f"{core.name} {word}", core.num_scores, fields.pop("width", None))
        operators.append(Operator(reads=reads, makes=(made,), **fields))
        return made.name

    scores = step("scores", a, b, saves=(a, b), saves_for=((a, b), (b, a)))
    if core.soft_cap:
        capped = f"{core.name} scores under tanh"
        scores = step("scores, scaled", scores)
        scores = step("scores under tanh", scores, saves=(capped,))
        scores = step("scores, capped", scores)
    if as_transformers:
        scores = step("scores, scaled", scores)
        scores = step("scores with a mask", scores, passes=True)
    if table:
        bias = Tensor(f"{core.name} bias", core.num_scores, residual=True, per_microbatch=True)
        lookup = Lookup(bias.name, core.num_scores // core.num_heads, core.num_heads)
        operators.insert(0, Operator(kernel=lookup, reads=(table,), makes=(bias,)))
        scores = step("scores with bias", scores, bias.name, in_place=True, passes=True)
    if masked:
        scores = step("scores that count", scores, in_place=True)
    wide = step("scores in FP32", scores, width=FP32_BYTES, is_cast=True)
    softmax = f"{core.name} weights"
    scratch = (Tensor(f"{core.name} weights, gradients times", core.num_scores, FP32_BYTES),) * as_transformers
    weights = step("weights", wide, width=FP32_BYTES, saves=(softmax,), backward_scratch=scratch)
    narrow = step("weights in 16 bits", weights, is_cast=True)
    output = Tensor(result, core.seq_len * width)
    operands = (narrow, c)
    operators.append(Operator(reads=operands, makes=(output,), saves=operands, saves_for=((narrow, c), (c, narrow))))
    return operators
