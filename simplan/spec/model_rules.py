"""What must hold between the fields of a model."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.adapter_rules import adapter_rules
from simplan.spec.document_rules import document_rules
from simplan.spec.expert_rules import expert_rules
from simplan.spec.model import ModelSpec
from simplan.spec.models import FAMILIES
from simplan.spec.numbers import either, nearest_divisors

__all__ = ["model_rules"]


def model_rules(model: ModelSpec) -> Iterator[Problem]:
    """Models that cannot be."""
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if kv_heads and heads % kv_heads:
        yield Problem(
            field="model.num_key_value_heads",
            value=str(kv_heads),
            rule=f"must divide num_attention_heads = {heads}",
            fix=f"use {either(nearest_divisors(heads, kv_heads))}",
        )
    rotated = "qk_rope_head_dim" if model.family == "deepseek" else "head_dim"
    width = getattr(model, rotated)
    if model.family in ("llama", "moe", "deepseek") and width % 2:
        yield Problem(
            field=f"model.{rotated}",
            value=str(width),
            rule="must be even: rotary positions turn pairs",
            fix=f"use {either([d for d in (width - 1, width + 1) if d])}",
        )
    yield from document_rules(model)
    if (
        FAMILIES[model.family].position_rows
        and not model.document_lengths
        and model.seq_len > model.max_position_embeddings
    ):
        yield Problem(
            field="model.seq_len",
            value=str(model.seq_len),
            rule=f"must be at most max_position_embeddings = {model.max_position_embeddings}",
            fix=f"use {model.max_position_embeddings}, or set max_position_embeddings to {model.seq_len} as well",
        )
    if model.sliding_window_pattern and model.sliding_window is None:
        yield Problem(
            field="model.sliding_window_pattern",
            value=str(model.sliding_window_pattern),
            rule="says which blocks have a window, and there is no sliding_window",
            fix="give sliding_window, or remove it",
        )
    buckets = model.relative_attention_buckets
    if buckets % 4:
        yield Problem(
            field="model.relative_attention_buckets",
            value=str(buckets),
            rule="must be a multiple of 4: each direction has half of them, of which half are for one distance each",
            fix=f"use {either([near for near in (buckets // 4 * 4, buckets // 4 * 4 + 4) if near])}",
        )
    if model.family == "resnet" and not model.depths:
        yield Problem(
            field="model.depths",
            value="[]",
            rule="must name the blocks of one stage or more",
            fix="use [3, 4, 6, 3] for ResNet-50",
        )
    yield from _image_rules(model)
    yield from adapter_rules(model)
    if model.num_experts:
        yield from expert_rules(model)


def _image_rules(model: ModelSpec) -> Iterator[Problem]:
    image, patch = model.image_size, model.patch_size
    if not patch:
        return
    if image % patch:
        yield Problem(
            field="model.patch_size",
            value=str(patch),
            rule=f"must divide image_size = {image}",
            fix=f"use {either(nearest_divisors(image, patch))}",
        )
    elif model.seq_len != (image // patch) ** 2 + 1:
        yield Problem(
            field="model.seq_len",
            value=str(model.seq_len),
            rule=f"must be the {(image // patch) ** 2} patches of an image and the class token",
            fix=f"use {(image // patch) ** 2 + 1}, or remove it",
        )
