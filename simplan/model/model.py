"""The model, with the keys of Hugging Face configs, and its layers."""

from __future__ import annotations

from collections import Counter
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from simplan.base import Count, Spec
from simplan.model.adapters import partly_trained
from simplan.model.captured.facts import CapturedModel
from simplan.model.families import FAMILIES
from simplan.model.layer import Attention, LayerKind, LayerSpec
from simplan.model.packing import PackStatistics
from simplan.model.parts.embedding_and_head import head_for
from simplan.plan.shard import Shard
from simplan.wording import either

Objective = Literal["tokens", "odds_ratio", "score", "score_and_logits", "divergence", "logits"]
"""Output of a language model's head: logits of tokens and their cross-entropy, with that of chosen sequences apart
(ORPO), or one score of every token in place of logits (reward models)."""
_OF_ALL = frozenset({"name", "family", "packs", "sources", "objective", "trains_nothing"})
_LARGEST_VOCABULARY = 10**8
MAX_LAYERS = 2_000
"""Blocks of the largest model, more than ten times as many as any model has that was published."""
NAMES = ("lora_targets", "lora_modules_to_save", "frozen")
"""Fields that are lists of names, also written as one string with commas."""
_TUPLES = ("depths", "document_lengths", *NAMES)

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]


class ModelSpec(Spec):
    """A model of one of the families of ``simplan.model.families``, which define its layers.

    Keys are those of Hugging Face's ``config.json`` where it has them. A family takes some keys, has defaults for
    others, and rejects the rest with an error that names the key. Sizes that a family does not have are 0. Defaults as
    in transformers: ``num_key_value_heads`` = ``num_attention_heads``, ``head_dim = hidden_size /
    num_attention_heads``, and ``max_position_embeddings`` = ``seq_len``.
    """

    name: str = "inline"
    family: FamilyName = Field(
        description=(
            "gpt: learned positions, LayerNorm, biases, a two-matrix GELU MLP (GPT-2). llama: rotary positions, "
            "RMSNorm, no biases, a gated SiLU MLP, grouped queries. mpt: gpt with ALiBi for positions and no biases. "
            "bert: a post-norm encoder trained on masked tokens. vit: image classification. moe: llama with experts in "
            "place of the MLP. deepseek: moe with latent attention. t5: an encoder and a decoder. resnet: image "
            "classification by convolutions."
        )
    )
    # the limits are written inside Annotated: after an equals sign they would lose against those of the type
    num_hidden_layers: Annotated[int, Field(le=MAX_LAYERS)] = Field(
        description="Blocks; for T5, blocks of the encoder."
    )
    hidden_size: Annotated[int, Field(le=10**6)]
    num_attention_heads: Annotated[int, Field(le=10**5)]
    num_key_value_heads: Annotated[int, Field(le=10**5)]
    head_dim: Annotated[int, Field(le=10**5)]
    intermediate_size: Annotated[int, Field(le=10**7)]
    vocab_size: Annotated[int, Field(le=_LARGEST_VOCABULARY)] = Field(
        description=(
            "Rows of the embedding, including padding. Padding that the framework adds itself "
            "(SoftwareSpec.padded) may be left out."
        )
    )
    seq_len: Annotated[int, Field(le=10**8)] = Field(
        description=(
            "Tokens of one sequence; for images, patches and the class token, which is the default. For "
            "T5, tokens in the encoder."
        )
    )
    document_lengths: Annotated[tuple[Count, ...], Field(max_length=10_000)] = Field(
        (),
        description=(
            "Tokens of the documents packed into every sequence, in order; empty for one document that "
            "fills the sequence. A token attends only to its own document, and positions restart in "
            "each. The rest of a sequence is padding at its end: it attends to itself alone, is "
            "computed like other tokens, and is in no loss (torchtune's PackedDataset)."
        ),
    )
    packs: PackStatistics | None = None
    max_position_embeddings: Annotated[int, Field(le=10**8)]
    tied_embeddings: bool = Field(
        description=(
            "Input embedding and output head share one weight. With a pipeline, first and last stage "
            "each hold a copy, and the gradients of both are all-reduced every step."
        )
    )
    attention_bias: bool = Field(False, description="Biases of q, k, v and the output projection of attention.")
    qkv_bias: bool = Field(False, description="Biases of q, k and v only (Qwen2).")
    qk_norm: Literal["head", "projection"] | None = Field(
        None,
        description=(
            "head: one RMSNorm weight shared by all heads normalizes each head of queries and keys "
            "(Qwen3). projection: one RMSNorm over all heads together (OLMoE)."
        ),
    )
    attention_sinks: bool = Field(
        False,
        description=("Each head has a learned score that takes part in the softmax and in nothing else (gpt-oss)."),
    )
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Fraction of the width of a head's queries and keys that is rotated (GPT-NeoX: a quarter)."
    )
    sliding_window: Annotated[Count, Field(le=10**8)] | None = Field(
        None,
        description=(
            "Largest number of keys up to its own that a query attends to (Mistral 7B v0.1); None for no limit."
        ),
    )
    sliding_window_pattern: Annotated[int, Field(ge=0, le=2_000)] = Field(
        0, description=("Period in blocks: the last block of each period has no window; 0 for a window in all blocks.")
    )
    num_decoder_layers: Annotated[int, Field(le=MAX_LAYERS)] = Field(
        description="Blocks of T5's decoder; default num_hidden_layers."
    )
    decoder_seq_len: Annotated[int, Field(le=10**8)] = Field(
        description="Tokens of one sequence in the decoder; default seq_len."
    )
    gated_mlp: bool = Field(
        False,
        description=(
            "MLPs have a gate. For T5, true is version 1.1, which has a separate head. Every other "
            "family is fixed to one value (Family.gated_mlp), and the other value is rejected."
        ),
    )
    relative_attention_buckets: Annotated[int, Field(le=10**6)] = Field(
        description="Distances between tokens that T5 distinguishes."
    )
    type_vocab_size: Annotated[int, Field(le=10**6)] = Field(
        description="Types that a token can have (BERT's first and second segment)."
    )
    max_predictions_per_seq: Annotated[int, Field(ge=0, le=10**8)] = Field(
        0,
        description=(
            "Tokens of a sequence for which BERT's head computes logits, as pre-training gathers masked "
            "tokens before it (google-research/bert); 0 for all tokens."
        ),
    )
    image_size: Annotated[int, Field(le=10**5)] = Field(description="Pixels along each side of an image.")
    patch_size: Annotated[int, Field(le=10**5)] = Field(description="Pixels along each side of a patch.")
    num_channels: Annotated[int, Field(le=10**5)] = Field(description="Color channels of an image.")
    num_classes: Annotated[int, Field(le=10**8)] = Field(description="Classes that an image can have.")
    depths: Annotated[tuple[Annotated[Count, Field(le=500)], ...], Field(max_length=8)] = Field(
        description="Blocks of each stage of a ResNet."
    )
    layer_type: Literal["basic", "bottleneck"] = Field(
        "bottleneck",
        description=(
            "Convolutions of a block: two (basic), or three, of which the first narrows and the last "
            "widens (bottleneck)."
        ),
    )
    embedding_size: Annotated[int, Field(le=10**5)] = Field(
        description="Channels inside the blocks of a ResNet's first stage; each further stage doubles them."
    )
    num_experts: Annotated[int, Field(le=10**5)] = Field(description="Experts of a block, of which a token uses top_k.")
    top_k: Annotated[int, Field(le=10**4)] = Field(description="Hugging Face's num_experts_per_tok.")
    moe_intermediate_size: Annotated[int, Field(le=10**7)] = Field(description="Intermediate size of one expert.")
    num_dense_layers: Annotated[int, Field(ge=0, le=MAX_LAYERS)] = Field(
        0, description=("Leading blocks with an MLP of intermediate_size instead of experts (first_k_dense_replace).")
    )
    shared_expert_intermediate_size: Annotated[int, Field(ge=0, le=10**7)] = Field(
        0, description="Intermediate size of all shared experts together, which every token uses."
    )
    shared_expert_gate: bool = Field(
        False, description="One number per token weights the output of the shared experts (Qwen1.5-MoE)."
    )
    router_bias: bool = Field(False, description="The router has a bias (gpt-oss).")
    expert_bias: bool = Field(False, description="The experts' matrices have biases (gpt-oss).")
    capacity_factor: Annotated[float, Field(gt=0, le=10**4)] = Field(
        1.0,
        description=(
            "Capacity slots of an expert per sequence, relative to its even share of the tokens. All "
            "slots are computed: 1 is enough for balanced experts."
        ),
    )
    expert_imbalance: Annotated[float, Field(ge=1, le=10**4)] = Field(
        1.0, description="Expected tokens of the fullest expert of a sequence, relative to the even share."
    )
    drop_tokens: bool = Field(
        False, description="Tokens without a capacity slot skip the expert; false requires slots for all tokens."
    )
    q_lora_rank: Annotated[Count, Field(le=10**6)] | None = Field(
        None, description="Width of the latent vector of queries; None for the hidden states (DeepSeek-V2-Lite)."
    )
    kv_lora_rank: Annotated[int, Field(le=10**6)] = Field(description="Width of the latent vector of keys and values.")
    qk_nope_head_dim: Annotated[int, Field(le=10**5)] = Field(
        description="Width of a head's queries and keys that is not rotated."
    )
    qk_rope_head_dim: Annotated[int, Field(le=10**5)] = Field(
        description="Width of a head's queries and keys that is rotated; all heads share the rotated keys."
    )
    v_head_dim: Annotated[int, Field(le=10**5)] = Field(description="Width of a head's values.")
    mtp_num_layers: Annotated[int, Field(ge=0, le=100)] = Field(
        0,
        description=(
            "Layers after the last block, beyond num_hidden_layers, that each predict one token further "
            "ahead (num_nextn_predict_layers). DeepSeek-V3 has 1. Model FLOPs and parameters include "
            "these layers."
        ),
    )
    lora_rank: Annotated[int, Field(ge=0, le=10**5)] = Field(
        0,
        description=(
            "Rank of adapters next to matrices, all other weights frozen (simplan.model.adapters); 0 for none."
        ),
    )
    lora_targets: Annotated[tuple[str, ...], Field(min_length=1, max_length=1000)] = Field(
        ("all",),
        description=(
            "Matrices with adapters: their names (q, k, v or qkv, proj, gate, up, down), attention, mlp or all, in "
            "some blocks alone as blocks.0-15.q; head; embedding. Of captured modules paths, their ends, or patterns "
            "of them."
        ),
    )
    lora_rank_pattern: dict[str, Annotated[int, Field(ge=1, le=10**5)]] = Field(
        default_factory=dict,
        description="Ranks of some of lora_targets other than lora_rank, by the same names; the first fit counts.",
    )
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Dropout of the adapters' inputs; above 0 each adapter keeps a copy of its input and a mask."
    )
    lora_dora: bool = Field(
        False,
        description=(
            "DoRA: the rows of a matrix and its adapter, divided by their norms, times a trained vector of magnitudes."
        ),
    )
    lora_oft: bool = Field(
        False,
        description=(
            "OFT: an adapter rotates blocks of lora_rank elements of a matrix's input, and adds nothing to its result."
        ),
    )
    lora_modules_to_save: Annotated[tuple[Literal["embedding", "head"], ...], Field(max_length=2)] = Field(
        (), description="PEFT's modules_to_save: trained in full, while the original stays in memory."
    )
    frozen: Annotated[tuple[str, ...], Field(max_length=1000)] = Field(
        (),
        description=(
            "Parts that are not trained: embedding, head, blocks, blocks.0-15, names of matrices or groups of "
            "them as of lora_targets, norms, or both as blocks.0-15.attention; of captured modules parts of their "
            "paths, as vision_tower. With lora_rank everything is."
        ),
    )
    input_require_grads: bool = Field(
        False,
        description=(
            "The embedding's result has a gradient though nothing below it is trained, so that backward runs "
            "through all blocks (enable_input_require_grads, which PEFT and others call with recomputation)."
        ),
    )
    captured: CapturedModel | None = Field(None, description="A captured module; the file of simplan capture has it.")
    sources: dict[str, str] = Field(default_factory=dict)
    objective: Objective = Field(default="tokens", exclude=True)
    trains_nothing: bool = Field(default=False, exclude=True)

    if TYPE_CHECKING:  # fields without a default may be left out when others imply them

        def __init__(self, **fields: Any) -> None: ...

    @property
    def sample(self) -> str:
        """Name of one input: ``sequence``, ``image``, or ``sample`` of a captured model without tokens."""
        if self.captured is not None and not self.captured.tokens:
            return "sample"
        return "image" if FAMILIES[self.family].inputs == "images" else "sequence"

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if isinstance(data.get("captured"), dict):
            data = data | {"captured": CapturedModel.model_validate(data["captured"])}
        lists = {field: tuple(data[field]) for field in _TUPLES if isinstance(data.get(field), list)}
        lists |= {f: tuple(map(str.strip, data[f].split(","))) for f in NAMES if isinstance(data.get(f), str)}
        data = data | lists  # a file has lists, and strict mode wants the tuple itself
        name = data.get("family")
        family = FAMILIES.get(name) if isinstance(name, str) else None
        if family is None:  # a separate error, next to which nothing else is missing
            return {field: _nothing(field) for field in cls._sizes()} | data
        absent = {field: _nothing(field) for field in cls._sizes() if field not in family.fields}
        gate = {} if "gated_mlp" in family.fields else {"gated_mlp": family.gated_mlp}
        return absent | gate | family.defaults(data) | data

    @model_validator(mode="after")
    def _has_its_capture(self) -> ModelSpec:
        if self.family == "captured" and self.captured is None:
            raise ValueError("family = captured is for files of simplan capture; write model: {file: FILE}")
        own = {} if self.captured is None else FAMILIES[self.family].defaults({"captured": self.captured})
        for name, value in own.items():
            if getattr(self, name) != value:
                rule = f"{name} = {getattr(self, name)} is not that of the capture, {value}"
                raise ValueError(f"{rule}; change the code, and capture it again")
        return self

    @field_validator("*")
    @classmethod
    def _fits_the_family(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject fields of other families, except for the value that means absent."""
        name, chosen = info.field_name or "", info.data.get("family")
        if name in _OF_ALL or chosen is None:
            return value
        field = cls.model_fields[name]
        if name == "gated_mlp" and name not in FAMILIES[chosen].fields:
            if value is not FAMILIES[chosen].gated_mlp:
                raise ValueError(_other_gate(chosen))
        elif name not in FAMILIES[chosen].fields:
            if value != (_nothing(name) if field.is_required() else field.get_default(call_default_factory=True)):
                having = either([other for other, family in FAMILIES.items() if name in family.fields])
                raise ValueError(f"is for models of family {having}, and family = {chosen}; remove it")
        elif field.is_required() and field.annotation is int and value < 1:
            raise ValueError("must be at least 1")
        return value

    @classmethod
    def _sizes(cls) -> list[str]:
        """Names of fields without a default."""
        return [name for name, field in cls.model_fields.items() if field.is_required() and name not in _OF_ALL]

    @classmethod
    def required_fields(cls, family: str) -> tuple[str, ...]:
        """Fields that describe a model of a family completely: all others have a default or follow from them."""
        sizes = [name for name in cls._sizes() if name in FAMILIES[family].fields]
        derived = FAMILIES[family].defaults(dict.fromkeys(sizes, 1))
        return tuple(name for name in sizes if name not in derived)

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """All layers, unsharded, from the one that takes the input to the head with the loss."""
        return self.layers_of(Shard())

    def layers_of(self, shard: Shard, *, is_flat: bool = False) -> tuple[LayerSpec, ...]:
        """All layers, as one rank holds and computes them; degrees divide what they split (``simplan.rules``).

        Args:
            is_flat: Weights of a unit of FSDP1 are one tensor (``SoftwareSpec.flat_parameters``).
        """
        layers = FAMILIES[self.family].layers(self, shard)
        if self.objective != "tokens" and FAMILIES[self.family].task == "next_token":
            layers = (*layers[:-1], head_for(layers[-1], self.objective))
        adapts_itself = self.captured is not None
        trains_all = not (self.lora_rank or self.frozen or self.trains_nothing)
        return layers if trains_all or adapts_itself else partly_trained(layers, self, shard, is_flat=is_flat)

    @property
    def without_training(self) -> ModelSpec:
        """The model without adapters, all of whose weights are frozen."""
        return self.model_copy(update={"trains_nothing": True, "input_require_grads": False})

    @property
    def shared_by_ends(self) -> bool:
        """The first and the last layer share a weight, of which a pipeline has two copies."""
        return self.tied_embeddings if self.captured is None else bool(self.layers[-1].tied)

    def padded(self, multiple: int) -> ModelSpec:
        """The model with its vocabulary padded to a multiple; unchanged if it has none or the result is too large."""
        size = -(-self.vocab_size // multiple) * multiple
        return self if size in (0, self.vocab_size) or size > _LARGEST_VOCABULARY else _with_vocabulary(self, size)

    @property
    def segments(self) -> tuple[int, ...]:
        """Lengths of the parts of a sequence that attend to themselves: documents and padding, or all of it."""
        padding = self.seq_len - sum(self.document_lengths)
        return (*self.document_lengths, padding) if padding or not self.document_lengths else self.document_lengths

    @property
    def document_share(self) -> float:
        """Fraction of the tokens of a sequence that are not padding."""
        return sum(self.document_lengths) / self.seq_len if self.document_lengths else 1.0

    @property
    def windows(self) -> tuple[int, ...]:
        """Attention window of each block; 0 for none, also if no document is longer than the window."""
        window = self.sliding_window or 0
        window = 0 if window >= max(self.segments) else window
        every = self.sliding_window_pattern
        return tuple(0 if every and (block + 1) % every == 0 else window for block in range(self.num_hidden_layers))

    @cached_property
    def num_parameters(self) -> int:
        """Weights of the model, a tied embedding counted once."""
        tied = sum(p.num_elements for layer in self.layers for p in layer.parameters if p.name in layer.tied)
        return sum(layer.num_parameters for layer in self.layers) - tied

    @cached_property
    def num_trained_parameters(self) -> int:
        """Weights that are not frozen: all of them, except with LoRA."""
        frozen = sum(layer.num_parameters - layer.num_trained for layer in self.layers)
        return self.num_parameters if not frozen else sum(layer.num_trained for layer in self.layers)

    def flops_per_sequence(self, *, full_attention: bool = False) -> int:
        """Model FLOPs of one sequence, forward and backward, no recomputation.

        The vocabulary is the model's own, without padding by the framework (``SoftwareSpec.padded``).

        Backward is twice forward if all weights are trained. With LoRA it leaves out gradients of frozen weights, and
        everything below the first adapter. MFU is computed from these FLOPs. Padding tokens count for nothing, in
        attention and in matmuls. ``full_attention`` counts the full square of every document.
        """
        return self._flops_per_sequence[full_attention]

    def forward_flops_per_sequence(self, *, full_attention: bool = False) -> int:
        """Model FLOPs of one sequence in forward alone."""
        return self._flops(full_attention=full_attention, backward=False)

    @cached_property
    def _flops_per_sequence(self) -> tuple[int, int]:
        """Model FLOPs of one sequence, without and with full attention."""
        return self._flops(full_attention=False), self._flops(full_attention=True)

    def _flops(self, *, full_attention: bool, backward: bool = True) -> int:
        alike = Counter(layer.key for layer in self.layers)
        total = attention = 0
        for layer in {layer.key: layer for layer in self.layers}.values():
            back = layer.backward_flops(full_attention=full_attention) if backward else 0
            total += alike[layer.key] * (layer.flops(full_attention=full_attention) + back)
            for core in (kernel for kernel in layer.kernels if isinstance(kernel, Attention)):
                matmuls = alike[layer.key] * (3 if core.propagates and backward else 1)
                attention += matmuls * (core.full_flops if full_attention else core.flops)
        return attention + round((total - attention) * self.document_share)

    @property
    def num_blocks(self) -> int:
        """Blocks of encoder and decoder, or of all stages of a ResNet."""
        return self.num_hidden_layers + self.num_decoder_layers + sum(self.depths)

    @property
    def num_last_layers(self) -> int:
        """Layers after the last block, which are in the last pipeline stage: the head, and multi-token prediction."""
        return 1 + self.mtp_num_layers

    def block_indices(self) -> tuple[int, ...]:
        """Indices of the blocks in ``layers``."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.kind is LayerKind.BLOCK)


def _other_gate(chosen: str) -> str:
    """Error text for a family whose MLPs cannot have (or lack) a gate, with the families that can."""
    own = FAMILIES[chosen]
    having = [
        name
        for name, other in FAMILIES.items()
        if "gated_mlp" not in other.fields
        and (other.gated_mlp, other.task) == (not own.gated_mlp, own.task)
        and ("num_experts" in other.fields) == ("num_experts" in own.fields)
    ]
    of = "experts" if "num_experts" in own.fields else "convolutions" if "depths" in own.fields else "MLPs"
    rule = f"is not modeled: in family = {chosen} {of} have {'a' if own.gated_mlp else 'no'} gate"
    if not having:
        return f"{rule}; remove it"
    return f"{rule}; remove it, or use family = {either(having)}, whose MLPs have {'none' if own.gated_mlp else 'one'}"


def _nothing(name: str) -> int | bool | tuple[()]:
    """Value of a field for a model whose family does not have the field."""
    return () if name == "depths" else False if name == "tied_embeddings" else 0


@lru_cache(maxsize=64)
def _with_vocabulary(model: ModelSpec, size: int) -> ModelSpec:
    """Cached, because a search requests the same few sizes again and again."""
    return model.model_copy(update={"vocab_size": size})
