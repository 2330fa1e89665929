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

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simplan.model.families.family import TRANSFORMER, Family, transformer_defaults
from simplan.model.implementations.eager_attention import eager_attention
from simplan.model.layer import LayerKind, LayerSpec, Lookup, Operator, ParameterSpec, Pointwise, Tensor
from simplan.model.parts.embedding_and_head import output_distribution
from simplan.model.parts.mlp import gated_mlp, relu_mlp
from simplan.model.parts.part import RMS_NORM, LayerPart, cast, hidden_input, layer_of, norm, residual
from simplan.model.share import RankShare, share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

_ENCODER_STATES, _DECODER_STATES, _TABLES = range(3)  # what layers hand on
_NAMES = ("encoder states", "decoder states", "tables of relative positions")
_ENCODED = "encoder output"


_Stacks = tuple[RankShare, RankShare]
"""Sizes of the encoder and of the decoder."""


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    encoder = share_of(model, shard)
    decoder = encoder._replace(tokens=model.decoder_seq_len, own_tokens=model.decoder_seq_len)
    stacks = encoder, decoder
    inner, last = (_encoder_block(model, stacks, last=last) for last in (False, True))
    return (
        _embedding(model, stacks),
        *(inner for _ in range(model.num_hidden_layers - 1)),
        last,
        *(_decoder_block(model, stacks) for _ in range(model.num_decoder_layers)),
        _head(model, decoder),
    )


def _handed_on(model: ModelSpec, stacks: _Stacks) -> tuple[tuple[int, ...], ...]:
    encoder, decoder = stacks
    return (*encoder.hidden_shapes, *decoder.hidden_shapes, (2, model.relative_attention_buckets, encoder.heads))


def _block(
    model: ModelSpec, stacks: _Stacks, kind: str, parts: Iterable[LayerPart | Operator], *, last: bool, decodes: bool
) -> LayerSpec:
    """A block of a stack, which passes on the states of the other stack and the tables."""
    encoder, decoder = stacks
    sizes = f"h{model.hidden_size},a{model.num_attention_heads},d{model.head_dim},i{model.intermediate_size}"
    sizes += f",s{model.seq_len},ds{model.decoder_seq_len},b{model.relative_attention_buckets}"
    sizes += ",gated" * model.gated_mlp
    encoded = Tensor(_ENCODED, encoder.own_tokens * encoder.hidden, elsewhere=True)
    tables = Tensor(_NAMES[2], 2 * model.relative_attention_buckets * encoder.heads, residual=True, elsewhere=True)
    outputs = (_ENCODED, "residual2") if decodes else (_ENCODED if last else "residual2", _NAMES[1])
    return layer_of(
        f"t5-{kind}:{sizes}",
        LayerKind.BLOCK,
        parts,
        inputs=(
            encoded if decodes else hidden_input(encoder, _NAMES[0]),
            hidden_input(decoder, _NAMES[1], elsewhere=not decodes),
            tables,
        ),
        outputs=(*outputs, tables.name),
        output_shapes=_handed_on(model, stacks),
        passed_outputs=(_ENCODER_STATES if decodes else _DECODER_STATES, _TABLES),
        matmul_dtype_outputs=(_ENCODER_STATES,) if last or decodes else (),
    )


def _embedding(model: ModelSpec, stacks: _Stacks) -> LayerSpec:
    """One lookup for the tokens of both stacks, then one tensor for each; every sequence gets a copy of the tables."""
    encoder, decoder = stacks
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
    sizes = f"h{model.hidden_size},v{model.vocab_size},a{model.num_attention_heads},b{buckets}"
    return layer_of(
        f"t5-embedding:{sizes},s{model.seq_len},ds{model.decoder_seq_len}",
        LayerKind.EMBEDDING,
        [LayerPart(parameters=parameters, operators=operators)],
        outputs=_NAMES,
        output_shapes=_handed_on(model, stacks),
    )


def _encoder_block(model: ModelSpec, stacks: _Stacks, *, last: bool) -> LayerSpec:
    """An encoder block; the last one also norms its output, from which all decoder blocks make keys and values."""
    source, (encoder, _) = _NAMES[0], stacks
    parts: list[LayerPart | Operator] = [
        norm("norm1", source, RMS_NORM, encoder),
        eager_attention("norm1 output", "norm1 output", encoder, encoder.tokens, table=_NAMES[2]),
        residual("residual1", source, "proj output", encoder),
        norm("norm2", "residual1", RMS_NORM, encoder),
        _mlp(model, encoder),
        residual("residual2", "residual1", "down output", encoder),
    ]
    if last:
        normed = norm("norm3", "residual2", RMS_NORM, encoder)
        narrow = cast("norm3 result", Tensor(_ENCODED, encoder.tokens * encoder.hidden, forwarded=True))
        parts.append(replace(normed, operators=(*normed.operators[:-1], narrow)))
    return _block(model, stacks, "last-encoder-block" if last else "encoder-block", parts, last=last, decodes=False)


def _decoder_block(model: ModelSpec, stacks: _Stacks) -> LayerSpec:
    source, (encoder, decoder) = _NAMES[1], stacks
    parts: list[LayerPart | Operator] = [
        norm("norm0", source, RMS_NORM, decoder),
        eager_attention("norm0 output", "norm0 output", decoder, decoder.tokens, causal=True, table=_NAMES[2]),
        residual("residual0", source, "proj output", decoder),
        norm("norm1", "residual0", RMS_NORM, decoder),
        eager_attention("norm1 output", _ENCODED, decoder, encoder.tokens, prefix="cross_"),
        residual("residual1", "residual0", "cross_proj output", decoder),
        norm("norm2", "residual1", RMS_NORM, decoder),
        _mlp(model, decoder),
        residual("residual2", "residual1", "down output", decoder),
    ]
    return _block(model, stacks, "decoder-block", parts, last=False, decodes=True)


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
        parts: list[LayerPart | Operator] = [
            norm("norm", source, RMS_NORM, decoder, for_matmuls=False),
            scale,
            narrow,
        ]
    else:
        parts = [norm("norm", source, RMS_NORM, decoder)]
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
    tied = not given.get("gated_mlp", False)
    found = transformer_defaults(given, wide_mlp=True, relative_attention_buckets=32, tied_embeddings=tied)
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
