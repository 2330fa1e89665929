"""ResNets for image classification (He et al. 2016), as in torchvision (v1.5: the 3 x 3 convolution strides).

A stem, residual blocks of convolutions and batch norms, a classifier. Every tensor between layers has the width of
activations: under autocast convolutions return 16-bit tensors, and norms and sums keep that width.

A batch norm normalizes by the mean and variance of a microbatch on its rank. So another number of microbatches or
data-parallel ranks changes the result: a single process matches it only microbatch by microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from simplan.model.families.family import Family
from simplan.model.layer import Gemm, LayerKind, LayerSpec, Operator, ParameterSpec, Pointwise, Tensor
from simplan.model.parts.embedding_and_head import output_distribution
from simplan.model.parts.part import FP32_BYTES, INDEX_BYTES, LayerPart, cast, layer_of
from simplan.model.share import RankShare

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

__all__ = ["RESNET", "BlockForm", "block_forms"]

_EXPANSION = {"basic": 1, "bottleneck": 4}
_STEM_WIDTH, _POOL_WIDTH = 7, 3


class BlockForm(NamedTuple):
    """Sizes of a residual block.

    Attributes:
        channels: Channels of the input.
        width: Channels of the inner convolutions.
        outputs: Channels of the output.
        size: Pixels along each side of the input.
        stride: Pixels from one output to the next.
    """

    channels: int
    width: int
    outputs: int
    size: int
    stride: int

    @property
    def output_size(self) -> int:
        """Pixels along each side of the output."""
        return -(-self.size // self.stride)

    @property
    def has_shortcut(self) -> bool:
        """True if a separate convolution brings the input to the size of the output."""
        return self.stride > 1 or self.channels != self.outputs


def block_forms(model: ModelSpec) -> tuple[BlockForm, ...]:
    """Blocks in order; every stage except the first begins with a block that halves the image."""
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
    pooled, pixels = _pooled_size(model), model.num_channels * image**2
    made, given = channels * size**2, channels * pooled**2
    places = Tensor("places of maxima", given, INDEX_BYTES)
    pool = Operator(
        kernel=Pointwise("maxpool", made, given),
        reads=("relu1 output",),
        makes=(Tensor("pooled", given), places),
        saves=("relu1 output", places.name),
    )
    return layer_of(
        f"resnet-stem:c{model.num_channels},w{channels},image{image}",
        LayerKind.EMBEDDING,
        [
            LayerPart(operators=(cast("images", Tensor("input", pixels)),)),
            _convolution("conv1", "input", model.num_channels, channels, _STEM_WIDTH, image, size),
            _batch_norm("bn1", "conv1 output", channels, size),
            _relu("relu1", "bn1 output", channels * size**2),
            LayerPart(operators=(pool,)),
        ],
        inputs=(Tensor("images", pixels, residual=True, elsewhere=True),),
        outputs=("pooled",),
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
    parts, source, stream = list[LayerPart](), "input", "input"
    for number, (inputs, outputs, kernel, before, after) in enumerate(steps, 1):
        parts.append(_convolution(f"conv{number}", source, inputs, outputs, kernel, before, after))
        parts.append(_batch_norm(f"bn{number}", f"conv{number} output", outputs, after))
        source = f"bn{number} output"
        if number < len(steps):
            parts.append(_relu(f"relu{number}", source, outputs * after**2))
            source = f"relu{number} output"
    if form.has_shortcut:
        parts.append(_convolution("shortcut", "input", c, out, 1, size, small))
        parts.append(_batch_norm("shortcut_norm", "shortcut output", out, small))
        stream = "shortcut_norm output"
    given = out * small**2
    add = Operator(
        kernel=Pointwise("add", 2 * given, given),
        reads=(source, stream),
        makes=(Tensor("sum", given),),
        in_place=True,
        passes=True,
    )
    parts += [LayerPart(operators=(add,)), _relu("relu", "sum", given)]
    sizes = [f"c{c}", f"w{w}", f"out{out}", f"px{size}", f"stride{form.stride}"]
    return layer_of(
        f"resnet-{model.layer_type}:{','.join(sizes)}",
        LayerKind.BLOCK,
        parts,
        inputs=(Tensor("input", c * size**2),),
        output_shapes=((out, small, small),),
        product_outputs=(0,),
    )


def _head(model: ModelSpec, last: BlockForm, shard: Shard) -> LayerSpec:
    channels, pixels = last.outputs, last.output_size**2
    share = RankShare(shard, 1, 1, channels, 0, 0, 0, 0, model.num_classes)
    pool = Operator(
        kernel=Pointwise("avgpool", channels * pixels, channels),
        reads=("input",),
        makes=(Tensor("means", channels),),
        saves=("input",),
    )
    return layer_of(
        f"resnet-head:c{channels},px{last.output_size},classes{model.num_classes}",
        LayerKind.HEAD,
        [LayerPart(operators=(pool,)), output_distribution("means", share, name="fc", bias=True)],
        inputs=(Tensor("input", channels * pixels),),
        output_shapes=((1, model.num_classes),),
    )


def _pooled_size(model: ModelSpec) -> int:
    """Pixels along each side after the stem's convolution and pooling."""
    return _halved(_halved(model.image_size))


def _halved(size: int) -> int:
    """Pixels along a side after taking every second pixel, beginning with the first."""
    return -(-size // 2)


def _convolution(name: str, source: str, inputs: int, outputs: int, width: int, before: int, after: int) -> LayerPart:
    """A convolution without bias.

    Args:
        name: Name of the convolution and its weight.
        source: Name of the input.
        inputs, outputs: Channels.
        width: Pixels along each side of the kernel.
        before, after: Pixels along each side of the input and the output.
    """
    weight = ParameterSpec(f"{name}.weight", (outputs, inputs, width, width))
    image = inputs * before**2
    operator = Operator(
        kernel=Gemm(name, after**2, outputs, inputs * width**2, image_elements=image),
        reads=(source,),
        makes=(Tensor(f"{name} output", outputs * after**2),),
        saves=(source,),
        parameters=(weight.name,),
    )
    return LayerPart(parameters=(weight,), operators=(operator,))


def _batch_norm(name: str, source: str, channels: int, size: int) -> LayerPart:
    """A batch norm, which reads its input twice, keeps running statistics and counts microbatches."""
    elements = channels * size**2
    statistics = Tensor(f"{name} statistics", 2 * channels, FP32_BYTES, per_microbatch=True)
    parameters = ParameterSpec(f"{name}.weight", (channels,)), ParameterSpec(f"{name}.bias", (channels,))
    operator = Operator(
        kernel=Pointwise(name, 2 * elements, elements),
        reads=(source,),
        makes=(Tensor(f"{name} output", elements), statistics),
        saves=(source, statistics.name),
        parameters=tuple(parameter.name for parameter in parameters),
    )
    return LayerPart(
        parameters=parameters,
        operators=(operator,),
        buffers=(
            Tensor(f"{name} running statistics", 2 * channels, FP32_BYTES),
            Tensor(f"{name} microbatches", 1, INDEX_BYTES),
        ),
    )


def _relu(name: str, source: str, elements: int) -> LayerPart:
    """A ReLU in place; its backward needs its output, which is the input of the next convolution."""
    result = Tensor(f"{name} output", elements)
    kernel = Pointwise(name, elements, elements)
    operator = Operator(kernel=kernel, reads=(source,), makes=(result,), saves=(result.name,), in_place=True)
    return LayerPart(operators=(operator,))


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
