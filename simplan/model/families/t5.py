"""T5's architecture: a stack of encoder blocks, a stack of decoder blocks (Raffel et al. 2020).

RMSNorm before attention and MLP, no biases, no dropout. One embedding for the tokens of both stacks. The first version
(``gated_mlp = false``) has an MLP with ReLU and ties the head to the embedding. Version 1.1 has an MLP gated by GELU
and a separate head.

Layers pass on three tensors: the encoder's hidden states, the decoder's hidden states, and the two tables of relative
positions. So embedding and tables are in the first layer only, wherever a pipeline is cut. The decoder's tokens are
embedded together with the encoder's and pass through the encoder blocks. Each block looks up the bias of its own
scores; Hugging Face transformers stores one bias for a full stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simplan.model.families.family import TRANSFORMER, Family, transformer_defaults, with_wide_mlp
from simplan.model.implementations.eager_attention import EagerForm, eager_attention
from simplan.model.layer import LayerKind, LayerSpec, Lookup, Operator, ParameterSpec, Pointwise, Tensor
from simplan.model.parts.embedding_and_head import output_distribution
from simplan.model.parts.mlp import gated_mlp, relu_mlp
from simplan.model.parts.part import LayerPart, NormKind, cast, hidden_input, layer_of, norm, residual
from simplan.model.share import RankShare, share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

__all__ = ["T5"]

_NORM = NormKind(statistics=1, bias=False)
_CROSS = EagerForm(name="cross_attention", prefix="cross_")
_ENCODER_STATES, _DECODER_STATES, _TABLES = range(3)  # what layers hand on
_NAMES = ("encoder states", "decoder states", "tables of relative positions")
_ENCODED = "encoder output"


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    encoder = share_of(model, shard)
    decoder = encoder._replace(tokens=model.decoder_seq_len, own_tokens=model.decoder_seq_len)
    inner = _encoder_block(model, encoder, decoder, last=False)
    last = _encoder_block(model, encoder, decoder, last=True)
    return (
        _embedding(model, encoder, decoder),
        *(inner for _ in range(model.num_hidden_layers - 1)),
        last,
        *(_decoder_block(model, encoder, decoder) for _ in range(model.num_decoder_layers)),
        _head(model, decoder),
    )


def _handed_on(model: ModelSpec, encoder: RankShare, decoder: RankShare) -> tuple[tuple[int, ...], ...]:
    tables = (2, model.relative_attention_buckets, encoder.heads)
    return (*encoder.hidden_shapes, *decoder.hidden_shapes, tables)


def _key(model: ModelSpec, kind: str) -> str:
    sizes = [f"h{model.hidden_size}", f"a{model.num_attention_heads}", f"d{model.head_dim}"]
    sizes += [f"i{model.intermediate_size}", f"s{model.seq_len}", f"ds{model.decoder_seq_len}"]
    sizes += [f"b{model.relative_attention_buckets}", *["gated"] * model.gated_mlp]
    return f"t5-{kind}:{','.join(sizes)}"


def _inputs(model: ModelSpec, encoder: RankShare, decoder: RankShare, *, decodes: bool) -> tuple[Tensor, ...]:
    tables = Tensor(_NAMES[2], 2 * model.relative_attention_buckets * encoder.heads, residual=True, elsewhere=True)
    states = Tensor(_ENCODED, encoder.own_tokens * encoder.hidden, elsewhere=True)
    first = states if decodes else hidden_input(encoder, _NAMES[0])
    return first, hidden_input(decoder, _NAMES[1], elsewhere=not decodes), tables


def _embedding(model: ModelSpec, encoder: RankShare, decoder: RankShare) -> LayerSpec:
    """One lookup for the tokens of both stacks, then one tensor for each; every sequence gets a copy of the tables."""
    buckets, heads = model.relative_attention_buckets, encoder.heads
    tokens = encoder.tokens + decoder.tokens
    elements, table = tokens * encoder.hidden, buckets * heads
    parameters = (
        ParameterSpec("wte.weight", (encoder.vocab, encoder.hidden)),
        ParameterSpec("encoder_bias.weight", (buckets, heads)),
        ParameterSpec("decoder_bias.weight", (buckets, heads)),
    )
    states = (hidden_input(encoder, _NAMES[0]), hidden_input(decoder, _NAMES[1]))
    tables = Tensor(_NAMES[2], 2 * table, residual=True)
    looked_up = Tensor("wte output", elements, residual=True)
    operators = (
        Operator(kernel=Lookup("wte", tokens, encoder.hidden), makes=(looked_up,), parameters=("wte.weight",)),
        Operator(kernel=Pointwise("split", elements, elements), reads=(looked_up.name,), makes=states),
        Operator(kernel=Pointwise("encoder_bias", table, table)),
        Operator(
            kernel=Pointwise("decoder_bias", table, table),
            makes=(tables,),
            parameters=("encoder_bias.weight", "decoder_bias.weight"),
        ),
    )
    sizes = [f"h{model.hidden_size}", f"v{model.vocab_size}", f"a{model.num_attention_heads}", f"b{buckets}"]
    sizes += [f"s{model.seq_len}", f"ds{model.decoder_seq_len}"]
    return layer_of(
        f"t5-embedding:{','.join(sizes)}",
        LayerKind.EMBEDDING,
        [LayerPart(parameters=parameters, operators=operators)],
        inputs=(),
        outputs=_NAMES,
        output_shapes=_handed_on(model, encoder, decoder),
    )


def _encoder_block(model: ModelSpec, encoder: RankShare, decoder: RankShare, *, last: bool) -> LayerSpec:
    """An encoder block; the last one also norms its output, from which all decoder blocks make keys and values."""
    source, tables = _NAMES[0], _NAMES[2]
    form = EagerForm(table=tables)
    parts = [
        norm("norm1", source, _NORM, encoder),
        eager_attention(form, "norm1 output", "norm1 output", encoder, encoder.tokens),
        residual("residual1", source, "proj output", encoder),
        norm("norm2", "residual1", _NORM, encoder),
        _mlp(model, encoder),
        residual("residual2", "residual1", "down output", encoder),
    ]
    if last:
        normed = norm("norm3", "residual2", _NORM, encoder)
        *others, narrow = normed.operators
        narrow = cast("norm3 result", Tensor(_ENCODED, encoder.tokens * encoder.hidden, forwarded=True))
        parts.append(replace(normed, operators=(*others, narrow)))
    return layer_of(
        _key(model, "last-encoder-block" if last else "encoder-block"),
        LayerKind.BLOCK,
        parts,
        inputs=_inputs(model, encoder, decoder, decodes=False),
        outputs=(_ENCODED if last else "residual2", *_NAMES[1:]),
        output_shapes=_handed_on(model, encoder, decoder),
        passed_outputs=(_DECODER_STATES, _TABLES),
        product_outputs=(_ENCODER_STATES,) if last else (),
    )


def _decoder_block(model: ModelSpec, encoder: RankShare, decoder: RankShare) -> LayerSpec:
    source, tables = _NAMES[1], _NAMES[2]
    form = EagerForm(causal=True, table=tables)
    return layer_of(
        _key(model, "decoder-block"),
        LayerKind.BLOCK,
        [
            norm("norm0", source, _NORM, decoder),
            eager_attention(form, "norm0 output", "norm0 output", decoder, decoder.tokens),
            residual("residual0", source, "proj output", decoder),
            norm("norm1", "residual0", _NORM, decoder),
            eager_attention(_CROSS, "norm1 output", _ENCODED, decoder, encoder.tokens),
            residual("residual1", "residual0", "cross_proj output", decoder),
            norm("norm2", "residual1", _NORM, decoder),
            _mlp(model, decoder),
            residual("residual2", "residual1", "down output", decoder),
        ],
        inputs=_inputs(model, encoder, decoder, decodes=True),
        outputs=(_ENCODED, "residual2", tables),
        output_shapes=_handed_on(model, encoder, decoder),
        passed_outputs=(_ENCODER_STATES, _TABLES),
        product_outputs=(_ENCODER_STATES,),
    )


def _mlp(model: ModelSpec, share: RankShare) -> LayerPart:
    return gated_mlp("norm2 output", share, activation="gelu") if model.gated_mlp else relu_mlp("norm2 output", share)


def _head(model: ModelSpec, decoder: RankShare) -> LayerSpec:
    """The decoder's head; the first version of T5 scales its input, since the tied embedding learns no scale."""
    elements, source = decoder.tokens * decoder.hidden, _NAMES[1]
    if model.tied_embeddings:
        scale = Operator(
            kernel=Pointwise("scale", elements, elements),
            reads=("norm output",),
            makes=(Tensor("scaled", elements, residual=True),),
        )
        narrow = cast("scaled", Tensor("scaled output", elements))
        parts = [norm("norm", source, _NORM, decoder, for_matmuls=False), LayerPart(operators=(scale, narrow))]
    else:
        parts = [norm("norm", source, _NORM, decoder)]
    parts.append(output_distribution("scaled output" if model.tied_embeddings else "norm output", decoder))
    tied = "tied" if model.tied_embeddings else "own"
    return layer_of(
        f"t5-head:h{model.hidden_size},v{model.vocab_size},{tied},ds{model.decoder_seq_len}",
        LayerKind.HEAD,
        parts,
        inputs=(hidden_input(decoder, source),),
        output_shapes=decoder.logits_shapes,
        tied=("lm_head.weight",) if model.tied_embeddings else (),
    )


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    fixed = {"relative_attention_buckets": 32, "tied_embeddings": not given.get("gated_mlp", False)}
    found = with_wide_mlp(transformer_defaults(**fixed))(given)
    for source, field in (("num_hidden_layers", "num_decoder_layers"), ("seq_len", "decoder_seq_len")):
        if source in given:
            found[field] = given[source]
    return {name: value for name, value in found.items() if name in T5.fields}


T5 = Family(
    layers=_layers,
    fields=(TRANSFORMER - {"num_key_value_heads"})
    | {"vocab_size", "tied_embeddings", "gated_mlp", "num_decoder_layers", "decoder_seq_len"}
    | {"relative_attention_buckets"},
    defaults=_defaults,
    inputs="token_pairs",
    task="target_tokens",
    causal=False,
    whole_layers="an encoder and a decoder",
)
"""Raffel et al. 2020; ``T5ForConditionalGeneration`` of Hugging Face's transformers."""
