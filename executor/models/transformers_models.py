"""The layers of models of Hugging Face transformers, so that they are trained as this package's own models are.

The model is built by transformers from a configuration, without weights of anyone, and cut into embedding, decoder
blocks, and norm with head. What transformers' forward does between these is done here: causal attention needs no mask
(its own ``attention_mask=None``), and the tables of rotary positions are made once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from executor.models.attention_cores import ROTARY_BASE, LayerRequest
from executor.models.embedding_and_head import OutputHead
from simplan.model.layer import LayerKind
from simplan.model.model import ModelSpec

_EPS = 1e-5
_LLAMAS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_layer(request: LayerRequest) -> nn.Module:
    """One layer of the model, without initialized weights."""
    spec, kind = request.spec, request.spec.layers[request.index].kind
    model: Any = whole_model(spec)
    is_gpt = spec.family == "gpt"
    body = model.transformer if is_gpt else model.model
    layer: nn.Module
    match kind:
        case LayerKind.EMBEDDING:
            layer = TokenEmbedding(body.wte, body.wpe) if is_gpt else TokenEmbedding(body.embed_tokens)
        case LayerKind.HEAD:
            layer = TransformersHead(body.ln_f if is_gpt else body.norm, model.lm_head)
        case _:
            layer = TransformersBlock((body.h if is_gpt else body.layers)[request.block])
    if isinstance(layer, TokenEmbedding) and is_gpt:
        layer.positions = request.stage.own_positions().unsqueeze(0)
    elif isinstance(layer, TransformersBlock) and not is_gpt:
        with torch.device("cpu"):
            rotary = type(body.rotary_emb)(model.config)
        layer.tables = RotaryTables(rotary, spec.seq_len, request.stage.tables)
    return layer


def whole_model(spec: ModelSpec) -> PreTrainedModel:
    """The whole model as transformers has it, on the default device, which may be without memory.

    Args:
        spec: A model that ``simplan.rules.model`` lets through.
    """
    sizes: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "tie_word_embeddings": spec.tied_embeddings,
        "use_cache": False,
    }
    if spec.family == "gpt":
        sizes |= {"bos_token_id": None, "eos_token_id": None}  # the tokenizer's ids may be beyond the vocabulary
        return GPT2LMHeadModel(
            GPT2Config(
                **sizes,
                n_inner=spec.intermediate_size,
                layer_norm_epsilon=_EPS,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                resid_pdrop=0.0,
            )
        )
    sizes |= {"num_key_value_heads": spec.num_key_value_heads, "head_dim": spec.head_dim, "rms_norm_eps": _EPS}
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": ROTARY_BASE}
    if spec.family == "moe":
        width = spec.moe_intermediate_size
        sizes |= {"num_local_experts": spec.num_experts, "num_experts_per_tok": spec.top_k}
        if spec.qk_norm is None:
            return MixtralForCausalLM(MixtralConfig(**sizes, intermediate_size=width))
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, moe_intermediate_size=width, norm_topk_prob=True))
    config, model = _LLAMAS["qwen2" if spec.qkv_bias else "qwen3" if spec.qk_norm else "llama"]
    if not spec.qkv_bias:
        sizes["attention_bias"] = spec.attention_bias
    return model(config(**sizes, intermediate_size=spec.intermediate_size))


class TokenEmbedding(nn.Module):
    """Tokens (batch, tokens) int64 to hidden states (batch, tokens, hidden_size); GPT-2's with a table of positions."""

    positions: Tensor

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding | None = None) -> None:
        super().__init__()
        self.wte = tokens
        self.wpe = positions
        self.register_buffer("positions", None, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks up tokens and positions."""
        x: Tensor = self.wte(tokens)
        return x if self.wpe is None else x + self.wpe(self.positions)


class RotaryTables:
    """Cosines and sines of positions, (1, tokens, head_dim) each, computed once for the blocks of a stage.

    Args:
        rotary: Module of transformers that computes them.
        shared: Tables that the blocks of the stage share.
    """

    def __init__(self, rotary: nn.Module, seq_len: int, shared: dict[str, Tensor]) -> None:
        self._rotary, self._seq_len, self._shared = rotary, seq_len, shared

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As wide as hidden states, and on their device."""
        cos, sin = f"cosines, {x.dtype}", f"sines, {x.dtype}"
        if cos not in self._shared:
            positions = torch.arange(self._seq_len, device=x.device).unsqueeze(0)
            self._shared[cos], self._shared[sin] = self._rotary.to(x.device)(x, positions)
        return self._shared[cos], self._shared[sin]


class TransformersBlock(nn.Module):
    """A decoder block of transformers, hidden states (batch, tokens, hidden_size) to hidden states."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.tables: RotaryTables | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, each added to the residual stream."""
        rotary = {} if self.tables is None else {"position_embeddings": self.tables(x)}
        out: Tensor = self.block(x, attention_mask=None, use_cache=False, **rotary)
        return out


class TransformersHead(OutputHead):
    """Norm and output projection of transformers."""

    def __init__(self, norm: nn.Module, lm_head: nn.Linear) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head
