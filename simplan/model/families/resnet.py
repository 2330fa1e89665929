"""ResNets for image classification (He et al. 2016), as in torchvision (v1.5: the 3 x 3 convolution strides).

A stem, residual blocks of convolutions and batch norms, a classifier. Every tensor between layers has the width of
activations: under autocast convolutions return 16-bit tensors, and norms and sums keep that width.

A batch norm normalizes by the mean and variance of a microbatch on its rank. So another number of microbatches or
data-parallel ranks changes the result: a single process matches it only microbatch by microbatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from simplan.model.families.family import Family
from simplan.model.layer import Gemm, LayerKind, LayerSpec, Operator, ParameterSpec, Pointwise, Tensor
from simplan.model.parts.embedding_and_head import output_distribution
from simplan.model.parts.part import FP32_BYTES, INDEX_BYTES, LayerPart, cast, joined, layer_of, matmul
from simplan.model.share import RankShare

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

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
    blocks = {form: _block(model, form) for form in set(forms)}
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
            cast("images", Tensor("input", pixels)),
            _convolution("conv1", "bn1", "input", (model.num_channels, channels), _STEM_WIDTH, (image, size)),
            _relu("relu1", "bn1 output", channels * size**2),
            pool,
        ],
        inputs=(Tensor("images", pixels, residual=True, elsewhere=True),),
        outputs=("pooled",),
        output_shapes=((channels, pooled, pooled),),
        matmul_dtype_outputs=(0,),
    )


def _block(model: ModelSpec, form: BlockForm) -> LayerSpec:
    """Convolutions with norms and ReLUs between them; a ReLU of the sum of the last norm and the input."""
    c, w, out, size, small = form.channels, form.width, form.outputs, form.size, form.output_size
    if model.layer_type == "basic":
        steps = [(c, w, 3, size, small), (w, out, 3, small, small)]
    else:
        steps = [(c, w, 1, size, size), (w, w, 3, size, small), (w, out, 1, small, small)]
    parts, source, stream = list[LayerPart | Operator](), "input", "input"
    for number, (inputs, outputs, kernel, before, after) in enumerate(steps, 1):
        parts.append(_convolution(f"conv{number}", f"bn{number}", source, (inputs, outputs), kernel, (before, after)))
        source = f"bn{number} output"
        if number < len(steps):
            parts.append(_relu(f"relu{number}", source, outputs * after**2))
            source = f"relu{number} output"
    if form.has_shortcut:
        parts.append(_convolution("shortcut", "shortcut_norm", "input", (c, out), 1, (size, small)))
        stream = "shortcut_norm output"
    given = out * small**2
    add = Operator(
        kernel=Pointwise("add", 2 * given, given),
        reads=(source, stream),
        makes=(Tensor("sum", given),),
        in_place=True,
        passes=True,
    )
    parts += [add, _relu("relu", "sum", given)]
    sizes = [f"c{c}", f"w{w}", f"out{out}", f"px{size}", f"stride{form.stride}"]
    return layer_of(
        f"resnet-{model.layer_type}:{','.join(sizes)}",
        LayerKind.BLOCK,
        parts,
        inputs=(Tensor("input", c * size**2),),
        output_shapes=((out, small, small),),
        matmul_dtype_outputs=(0,),
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
        [pool, output_distribution("means", share, name="fc", bias=True)],
        inputs=(Tensor("input", channels * pixels),),
        output_shapes=((1, model.num_classes),),
    )


def _pooled_size(model: ModelSpec) -> int:
    """Pixels along each side after the stem's convolution and pooling."""
    return _halved(_halved(model.image_size))


def _halved(size: int) -> int:
    """Pixels along a side after taking every second pixel, beginning with the first."""
    return -(-size // 2)


def _convolution(
    name: str, norm: str, source: str, channels: tuple[int, int], width: int, sizes: tuple[int, int]
) -> LayerPart:
    """A convolution without bias, and a batch norm, which reads its input twice and keeps running statistics.

    Args:
        name, norm: Names of the convolution and of the norm.
        source: Name of the input.
        channels: Channels of the input and of the output.
        width: Pixels along each side of the kernel.
        sizes: Pixels along each side of the input and of the output.
    """
    (inputs, outputs), (before, after) = channels, sizes
    elements = outputs * after**2
    kernel = Gemm(name, after**2, outputs, inputs * width**2, image_elements=inputs * before**2)
    weight = ParameterSpec(f"{name}.weight", (outputs, inputs, width, width))
    weights = ParameterSpec(f"{norm}.weight", (outputs,)), ParameterSpec(f"{norm}.bias", (outputs,))
    statistics = Tensor(f"{norm} statistics", 2 * outputs, FP32_BYTES, per_microbatch=True)
    running = (Tensor(f"{norm} running {what}", outputs, FP32_BYTES) for what in ("mean", "variance"))
    normed = Operator(
        kernel=Pointwise(norm, 2 * elements, elements),
        reads=(f"{name} output",),
        makes=(Tensor(f"{norm} output", elements), statistics),
        saves=(f"{name} output", statistics.name),
        parameters=tuple(parameter.name for parameter in weights),
    )
    buffers = (*running, Tensor(f"{norm} microbatches", 1, INDEX_BYTES))
    convolution = matmul(kernel, source, (weight,))
    return joined(convolution, LayerPart(parameters=weights, operators=(normed,), buffers=buffers))


def _relu(name: str, source: str, elements: int) -> Operator:
    """A ReLU in place; its backward needs its output, which is the input of the next convolution."""
    result = Tensor(f"{name} output", elements)
    kernel = Pointwise(name, elements, elements)
    return Operator(kernel=kernel, reads=(source,), makes=(result,), saves=(result.name,), in_place=True)


RESNET = Family(
    layers=_layers,
    fields=frozenset({"depths", "layer_type", "embedding_size", "image_size", "num_channels", "num_classes"}),
    defaults=lambda _: {"embedding_size": 64, "image_size": 224, "num_channels": 3, "num_classes": 1000},
    inputs="images",
    task="class",
    causal=False,
    whole_layers="convolutions",
)
"""He et al. 2016; ``resnet50`` and its siblings of torchvision."""
