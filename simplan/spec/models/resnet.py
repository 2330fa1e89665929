"""ResNets, for classes of images (He et al. 2016), as torchvision has them (v1.5: the 3 x 3 convolution strides).

A stem, residual blocks of convolutions and batch norms, a classifier. Everything between layers is as wide as
activations: under autocast convolutions give 16 bits, and norms and sums keep to them.

A batch norm normalizes by the mean and variance of a microbatch on its rank. So more microbatches, or more ranks of
data parallelism, are another computation: one process computes the same only microbatch by microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from simplan.spec.layer import Gemm, LayerKind, LayerSpec, ParameterSpec, Pointwise, Saved
from simplan.spec.models.ends import output_distribution
from simplan.spec.models.family import Family
from simplan.spec.models.part import FP32_BYTES, Part, layer_of
from simplan.spec.share import Share

if TYPE_CHECKING:
    from simplan.spec.model import ModelSpec
    from simplan.spec.shard import Shard

__all__ = ["RESNET", "BlockForm", "block_forms"]

_EXPANSION = {"basic": 1, "bottleneck": 4}
_STEM_WIDTH, _POOL_WIDTH = 7, 3
_INDEX_BYTES = 8


class BlockForm(NamedTuple):
    """Sizes of a residual block.

    Attributes:
        channels: Of its input.
        width: Of its inner convolutions.
        outputs: Channels of its output.
        size: Pixels along each side of its input.
        stride: Pixels from one output to the next.
    """

    channels: int
    width: int
    outputs: int
    size: int
    stride: int

    @property
    def output_size(self) -> int:
        """Pixels along each side of its output."""
        return -(-self.size // self.stride)

    @property
    def has_shortcut(self) -> bool:
        """The input is brought to the size of the output by a convolution of its own."""
        return self.stride > 1 or self.channels != self.outputs


def block_forms(model: ModelSpec) -> tuple[BlockForm, ...]:
    """The blocks in order: each stage but the first begins with one that halves the image."""
    expansion = _EXPANSION[model.layer_type]
    channels, size = model.embedding_size, _pooled_size(model)
    found = []
    for stage, depth in enumerate(model.depths):
        width = model.embedding_size * 2**stage
        for block in range(depth):
            form = BlockForm(channels, width, width * expansion, size, 2 if stage and not block else 1)
            found.append(form)
            channels, size = form.outputs, form.output_size
    return tuple(found)


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    assert shard.tp == shard.cp == 1, "nothing is split"
    forms = block_forms(model)
    blocks = {form: _block(model, form) for form in forms}
    return (_stem(model), *(blocks[form] for form in forms), _head(model, forms[-1], shard))


def _stem(model: ModelSpec) -> LayerSpec:
    channels, image, size = model.embedding_size, model.image_size, _halved(model.image_size)
    pooled = _pooled_size(model)
    made, given = channels * size**2, channels * pooled**2
    pool = Part(
        kernels=(Pointwise("maxpool", made, given),),
        saved=(Saved("places of maxima", given, _INDEX_BYTES, made_by="maxpool"),),
    )
    return layer_of(
        f"resnet-stem:c{model.num_channels},w{channels},image{image}",
        LayerKind.EMBEDDING,
        [
            Part(saved=(Saved("input", model.num_channels * image**2, narrowed=True),)),
            _convolution("conv1", model.num_channels, channels, _STEM_WIDTH, image, size),
            _batch_norm("bn1", channels, size),
            _relu("relu1", channels * size**2),
            pool,
        ],
        output_shapes=((channels, pooled, pooled),),
        product_outputs=(0,),
    )


def _block(model: ModelSpec, form: BlockForm) -> LayerSpec:
    """Convolutions with norms and ReLUs between them; a ReLU of the sum of the last norm and the input."""
    c, w, out, size, small = form.channels, form.width, form.outputs, form.size, form.output_size
    if model.layer_type == "basic":
        steps = [(c, w, 3, size, small), (w, out, 3, small, small)]
    else:
        steps = [(c, w, 1, size, size), (w, w, 3, size, small), (w, out, 1, small, small)]
    parts = [Part(saved=(Saved("input", c * size**2, as_given=True),))]
    for number, (inputs, outputs, kernel, before, after) in enumerate(steps, 1):
        parts.append(_convolution(f"conv{number}", inputs, outputs, kernel, before, after))
        parts.append(_batch_norm(f"bn{number}", outputs, after))
        if number < len(steps):
            parts.append(_relu(f"relu{number}", outputs * after**2))
    if form.has_shortcut:
        parts += [_convolution("shortcut", c, out, 1, size, small), _batch_norm("shortcut_norm", out, small)]
    given = out * small**2
    parts.append(Part(kernels=(Pointwise("add", 2 * given, given), Pointwise("relu", given, given))))
    sizes = [f"c{c}", f"w{w}", f"out{out}", f"px{size}", f"stride{form.stride}"]
    return layer_of(
        f"resnet-{model.layer_type}:{','.join(sizes)}",
        LayerKind.BLOCK,
        parts,
        output_shapes=((out, small, small),),
        product_outputs=(0,),
    )


def _head(model: ModelSpec, last: BlockForm, shard: Shard) -> LayerSpec:
    channels, pixels = last.outputs, last.output_size**2
    share = Share(shard, 1, 1, channels, 0, 0, 0, 0, model.num_classes)
    return layer_of(
        f"resnet-head:c{channels},px{last.output_size},classes{model.num_classes}",
        LayerKind.HEAD,
        [
            Part(saved=(Saved("input", channels * pixels, as_given=True),)),
            Part(
                kernels=(Pointwise("avgpool", channels * pixels, channels),),
                saved=(Saved("means", channels, made_by="avgpool"),),
            ),
            output_distribution("means", share, name="fc", bias=True),
        ],
        output_shapes=((1, model.num_classes),),
    )


def _pooled_size(model: ModelSpec) -> int:
    """Pixels along each side after the stem's convolution and pooling."""
    return _halved(_halved(model.image_size))


def _halved(size: int) -> int:
    """What is left of a side when every second pixel is taken, the first one always."""
    return -(-size // 2)


def _convolution(name: str, inputs: int, outputs: int, width: int, before: int, after: int) -> Part:
    """Without bias; its input is kept by whoever makes it.

    Args:
        name: Of its weight.
        inputs, outputs: Channels.
        width: Pixels along each side of its kernel.
        before, after: Pixels along each side of its input and its output.
    """
    return Part(
        parameters=(ParameterSpec(f"{name}.weight", (outputs, inputs, width, width)),),
        kernels=(Gemm(name, after**2, outputs, inputs * width**2, image_elements=inputs * before**2),),
        saved=(Saved(f"{name} output", outputs * after**2, made_by=name),),
        gradients=(f"{name}.weight",),
    )


def _batch_norm(name: str, channels: int, size: int) -> Part:
    """Reads its input twice: for its statistics, and to normalize. Keeps running statistics and counts microbatches."""
    elements = channels * size**2
    return Part(
        parameters=(ParameterSpec(f"{name}.weight", (channels,)), ParameterSpec(f"{name}.bias", (channels,))),
        kernels=(Pointwise(name, 2 * elements, elements),),
        saved=(Saved(f"{name} statistics", 2 * channels, FP32_BYTES, made_by=name, of_microbatch=True),),
        buffers=(
            Saved(f"{name} running statistics", 2 * channels, FP32_BYTES),
            Saved(f"{name} microbatches", 1, _INDEX_BYTES),
        ),
        gradients=(f"{name}.weight", f"{name}.bias"),
    )


def _relu(name: str, elements: int) -> Part:
    """In place; the next convolution's input is what its backward needs, too."""
    return Part(
        kernels=(Pointwise(name, elements, elements),),
        saved=(Saved(f"{name} output", elements, made_by=name),),
    )


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    del given
    return {"embedding_size": 64, "image_size": 224, "num_channels": 3, "num_classes": 1000}


RESNET = Family(
    layers=_layers,
    fields=frozenset({"depths", "layer_type", "embedding_size", "image_size", "num_channels", "num_classes"}),
    defaults=_defaults,
    inputs="images",
    task="class",
    causal=False,
    whole_layers="convolutions",
)
"""He et al. 2016; ``resnet50`` and its siblings of torchvision."""
