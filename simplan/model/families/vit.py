"""The Vision Transformer, for image classification (Dosovitskiy et al. 2021).

GPT-2's blocks with full attention on patches of an image and a class token, which the head reads; without dropout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simplan.model.families.family import TRANSFORMER, Family, transformer_defaults
from simplan.model.families.gpt import gelu_block
from simplan.model.layer import Gemm, LayerKind, LayerSpec, Operator, ParameterSpec, Pointwise, Tensor
from simplan.model.parts.attention import AttentionForm
from simplan.model.parts.embedding_and_head import output_distribution
from simplan.model.parts.part import LAYER_NORM, LayerPart, block_layer, cast, hidden_input, layer_of, norm
from simplan.model.share import RankShare, share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

_ATTENTION = AttentionForm(fused=True, bias="all", causal=False)


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    share = share_of(model, shard)
    image = f"image{model.image_size},patch{model.patch_size},channels{model.num_channels}"
    embedding = layer_of(
        f"vit-embedding:h{model.hidden_size},{image}{share.suffix}",
        LayerKind.EMBEDDING,
        [_patches(model, share)],
        inputs=(Tensor("images", model.num_channels * model.image_size**2, residual=True, elsewhere=True),),
        output_shapes=share.hidden_shapes,
    )
    block = block_layer(*gelu_block(model, share, LAYER_NORM, _ATTENTION), share)
    token = Tensor("class token", share.hidden, residual=True)
    narrow = Tensor("class token for matmuls", share.hidden)
    head = layer_of(
        f"vit-head:h{model.hidden_size},classes{model.num_classes},s{model.seq_len}{share.suffix}",
        LayerKind.HEAD,
        [
            norm("norm", "input", LAYER_NORM, share, for_matmuls=False),
            Operator(reads=("norm output",), makes=(token,)),
            cast(token.name, narrow),
            output_distribution(narrow.name, share, name="head", bias=True, rows=1),
        ],
        inputs=(hidden_input(share),),
        output_shapes=((1, share.vocab),),
    )
    return (embedding, *(block for _ in range(model.num_hidden_layers)), head)


def _patches(model: ModelSpec, share: RankShare) -> LayerPart:
    """The patch convolution (a matmul, since its stride is its width), the class token in front, and positions."""
    n, h = share.tokens, share.hidden
    channels, width = model.num_channels, model.patch_size
    return LayerPart(
        parameters=(
            ParameterSpec("class_token", (h,)),
            ParameterSpec("pos_embedding", (n, h)),
            ParameterSpec("conv_proj.weight", (h, channels, width, width)),
            ParameterSpec("conv_proj.bias", (h,)),
        ),
        operators=(
            cast("images", Tensor("images for matmuls", channels * model.image_size**2)),
            Operator(
                kernel=Gemm("conv_proj", n - 1, h, channels * width**2),
                reads=("images for matmuls",),
                makes=(Tensor("patches", (n - 1) * h),),
                saves=("images for matmuls",),
                parameters=("conv_proj.weight", "conv_proj.bias"),
            ),
            Operator(
                kernel=Pointwise("cat", n * h, n * h),
                reads=("patches",),
                makes=(Tensor("class token and patches", n * h, residual=True, elsewhere=True),),
                parameters=("class_token",),
            ),
            Operator(
                kernel=Pointwise("add", 2 * n * h, n * h),
                reads=("class token and patches",),
                makes=(Tensor("add", n * h, residual=True, elsewhere=True),),
                parameters=("pos_embedding",),
                passes=True,
            ),
        ),
    )


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    found = transformer_defaults(given, wide_mlp=True, num_channels=3)
    image, patch = given.get("image_size"), given.get("patch_size")
    if isinstance(image, int) and isinstance(patch, int) and patch > 0:
        found["seq_len"] = (image // patch) ** 2 + 1
    return {name: value for name, value in found.items() if name != "max_position_embeddings"}


VIT = Family(
    layers=_layers,
    fields=TRANSFORMER | {"image_size", "patch_size", "num_channels", "num_classes"},
    defaults=_defaults,
    inputs="images",
    task="class",
    causal=False,
)
"""Dosovitskiy et al. 2021; ``vit_b_16`` and its siblings of torchvision."""
