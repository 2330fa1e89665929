"""Content of the file of a captured model: layers, and the operators of each with shapes of one sample.

The file has what torch dispatched and what autograd saved, not how simplan prices it: kernels follow in
``simplan.model.captured.kernels``, layers in ``simplan.model.captured.layers``.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from simplan.base import Count, Line, Natural, Spec

ComputedIn = Literal["fp32", "bf16", "autocast"]
"""Precision of a forward pass: FP32 weights and activations; BF16 weights and activations; or FP32 weights under
autocast to BF16."""

Width = Literal["compute", "wide"] | Count
"""Bytes per element: ``compute`` for the width of matmuls' results, ``wide`` for FP32 under autocast, else a number."""


def to_tuple(value: object) -> object:
    """A list as JSON has it, as a tuple."""
    return tuple(map(to_tuple, value)) if isinstance(value, list) else value


Shape = Annotated[tuple[Natural, ...], BeforeValidator(to_tuple)]
Shapes = Annotated[tuple[Shape, ...], BeforeValidator(to_tuple)]
Names = Annotated[tuple[Line, ...], BeforeValidator(to_tuple)]
Setting = Annotated[bool | Natural | Line, BeforeValidator(to_tuple)]


class CapturedTensor(Spec):
    """A tensor inside a layer.

    Attributes:
        elements: Elements for one sample.
        width: See ``Width``.
        per_microbatch: The tensor does not grow with the batch.
    """

    name: Line
    elements: Natural
    width: Width = "compute"
    per_microbatch: bool = False


class CapturedParameter(Spec):
    """A weight.

    Attributes:
        name: Name inside of its layer.
        frozen: The weight has no gradient.
        elsewhere: The weight is outside of the layer's module, and its name is that in the whole module.
        partial: Each tensor-parallel rank has a part of the gradient: that of its own tokens or heads.
    """

    name: Line
    shape: Shape
    frozen: bool = False
    elsewhere: bool = False
    partial: bool = False


Communication = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


class CapturedCollective(Spec):
    """A collective over tensor-parallel ranks.

    Attributes:
        forward, backward: Its kind in each direction; None for none.
        elements: Elements of the buffer for one sample (``simplan.model.kernel.CollectiveKind`` says which buffer).
        width: See ``Width``.
        reorders: The parts of the ranks are copied to be in order along another dimension than the first.
    """

    forward: Communication | None = None
    backward: Communication | None = None
    elements: Natural
    width: Width = "compute"
    reorders: bool = False


class CapturedOperator(Spec):
    """One operator that torch dispatched, with shapes of one sample.

    Attributes:
        op: Namespace and name, such as ``aten.mm``.
        module: Path of the module that ran it, inside of its layer.
        operands, results: Shapes of tensor arguments and of results, in order.
        weights: Places among the operands of parameters, and of what is computed from parameters alone.
        settings: Arguments that are not tensors, where the kernel depends on them.
        reads: Names of the tensors read, of weights excepted.
        makes: Tensors made.
        saves: Names of the tensors that backward reads, of weights excepted.
        parameters: Names of weights that no operator before used, in the order in which backward completes their
            gradients.
        trains: Backward computes gradients of weights, or of more than one of the tensors read.
        propagates: Backward computes gradients of tensors read.
        is_cast: Only the dtype changes.
        in_place: The result overwrites the first tensor read.
        passes: The gradient of the result is that of the tensors read, and backward runs no kernel.
        gradient_scratch: Elements that backward makes besides the gradients: the part of other tensor-parallel ranks
            in the gradient of an embedding.
        collective: The communication that the operator is; None for all others.
    """

    op: Line
    module: Line = ""
    operands: Shapes = ()
    results: Shapes = ()
    weights: Shape = ()
    settings: dict[str, Setting] = Field(default_factory=dict)
    reads: Names = ()
    makes: Annotated[tuple[CapturedTensor, ...], BeforeValidator(to_tuple)] = ()
    saves: Names = ()
    parameters: Names = ()
    trains: bool = False
    propagates: bool = False
    is_cast: bool = False
    in_place: bool = False
    passes: bool = False
    gradient_scratch: Natural = 0
    collective: CapturedCollective | None = None


class CapturedLayer(Spec):
    """Operators between two cuts.

    Attributes:
        parameters: Weights in the order in which forward uses them.
        inputs: Tensors made in an earlier layer, or given with the batch.
        elsewhere: Names of inputs whose memory is counted in the layer that made them, or as the batch.
        outputs: Names of tensors for the next layer, in its order.
        output_shapes: Shape of each, of one sample.
        passed: Places among the outputs of inputs that are passed on.
        forwarded: Names of tensors made here that later layers than the next one read.
        tied: Names of parameters that are the same tensor as one of the first layer.
        buffers: Buffers of the module that no layer before reads; of the last layer, also those that none reads.
    """

    parameters: Annotated[tuple[CapturedParameter, ...], BeforeValidator(to_tuple)] = ()
    inputs: Annotated[tuple[CapturedTensor, ...], BeforeValidator(to_tuple)] = ()
    elsewhere: Names = ()
    operators: Annotated[tuple[CapturedOperator, ...], BeforeValidator(to_tuple)]
    outputs: Names = ()
    output_shapes: Shapes = ()
    passed: Shape = ()
    forwarded: Names = ()
    tied: Names = ()
    buffers: Annotated[tuple[CapturedTensor, ...], BeforeValidator(to_tuple)] = ()


class CapturedGraph(Spec):
    """All layers of one forward pass.

    Attributes:
        layers: The layers that differ.
        order: By layer of the model, its place among ``layers``.
        shared: Names of parameters that several layers use, those of a first and a last layer excepted; the first of
            these layers has them.
    """

    layers: Annotated[tuple[CapturedLayer, ...], BeforeValidator(to_tuple), Field(min_length=1)]
    order: Annotated[Shape, Field(min_length=1, max_length=2_002)]
    shared: Names = ()


class CapturedSplit(Spec):
    """The part of a model that one tensor-parallel rank has and computes, of a degree.

    Attributes:
        unused, graphs, refused: As of the whole model.
    """

    degree: Count
    unused: Annotated[tuple[CapturedParameter, ...], BeforeValidator(to_tuple)] = ()
    graphs: dict[ComputedIn, CapturedGraph]
    refused: dict[ComputedIn, Line] = Field(default_factory=dict)


class CapturedInput(Spec):
    """A tensor of the batch, of one sample."""

    name: Line
    shape: Shape
    dtype: Line
    high: Natural = Field(0, description="integers below it are valid; 0 for other dtypes")

    def num_bytes(self, width: int) -> int:
        """Bytes of one sample, whose numbers in floating point have ``width`` bytes."""
        bits = "".join(filter(str.isdigit, self.dtype)) or "8"
        return prod(self.shape) * (width if self.is_cast else int(bits) // 8)

    @property
    def is_cast(self) -> bool:
        """True for numbers in floating point, which have the dtype of the weights or of compute."""
        return "float" in self.dtype


class CapturedImages(Spec):
    """Images of one sample, of a model of images and texts.

    Attributes:
        number: Images.
        height, width: Pixels of each, after resizing.
        tokens: Tokens of the text that stand for each.
    """

    number: Count
    height: Count
    width: Count
    tokens: Count

    def __str__(self) -> str:
        plural = "image" if self.number == 1 else "images"
        return f"{self.number} {plural} of {self.height} x {self.width} pixels, {self.tokens:,} tokens each"


class CapturedModel(Spec):
    """The file that ``simplan capture`` writes.

    Attributes:
        factory, batch, loss: ``module:function`` of the module, of a batch, and of the loss; empty for the output's own
            loss, or the sum of the outputs.
        source_sha256: Hash of the source of the module's classes.
        software: Versions of the packages that were used, by name.
        inputs: Tensors of the batch.
        images: Images among them, which ``simplan capture --images`` asked for; None without.
        modules: Paths of the modules that became layers, by layer; empty for code between modules.
        classes: Names of the classes of these modules; none in files of earlier versions.
        starts: By layer, how it starts: ``enter PATH`` or ``leave PATH`` of a module, of its first call where it is
            left, and of its last one where it is entered. Empty for the beginning of forward, and where no module
            tells.
        input_embeddings: Paths of the modules whose results ``enable_input_require_grads`` of transformers gives a
            gradient; none in files of earlier versions.
        unused: Names of parameters that take no part in the loss.
        graphs: Layers by precision.
        refused: By precision, why forward does not run in it.
        computed_in: Precision whose layers are meant; a job sets it.
        tp_plan: ``module:function`` of the tensor-parallel plan; empty for the one that transformers has.
        splits: Parts by tensor-parallel degree, ascending.
    """

    format: Literal["simplan-captured-model"]
    schema_version: Literal[1]
    name: Line
    factory: Line = ""
    batch: Line = ""
    loss: Line = ""
    source_sha256: Line = ""
    software: dict[str, Line] = Field(default_factory=dict)
    inputs: Annotated[tuple[CapturedInput, ...], BeforeValidator(to_tuple)] = ()
    images: CapturedImages | None = None
    modules: Names = ()
    classes: Names = ()
    starts: Names = ()
    input_embeddings: Names = ()
    unused: Annotated[tuple[CapturedParameter, ...], BeforeValidator(to_tuple)] = ()
    graphs: dict[ComputedIn, CapturedGraph]
    refused: dict[ComputedIn, Line] = Field(default_factory=dict)
    computed_in: ComputedIn = "fp32"
    tp_plan: Line = ""
    splits: Annotated[tuple[CapturedSplit, ...], BeforeValidator(to_tuple)] = ()

    @property
    def graph(self) -> CapturedGraph:
        """Layers in the precision that is meant."""
        return self.graphs.get(self.computed_in) or next(iter(self.graphs.values()))

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that were captured, 1 for the whole model among them."""
        return (1, *(split.degree for split in self.splits))

    def splits_tokens(self, degree: int) -> bool:
        """True if ranks of a degree have parts of the tokens between matrices (sequence parallelism)."""
        return _splits_tokens(self, degree)

    def of_degree(self, degree: int) -> CapturedModel:
        """The model that one rank of a tensor-parallel degree has, which must have been captured."""
        return self if degree == 1 else _of_degree(self, degree)

    def module_of(self, layer: int) -> str:
        """Path of the module that a layer is; empty for code between modules."""
        return self.modules[layer] if layer < len(self.modules) else ""

    def class_of(self, layer: int) -> str:
        """Name of the class of the module that a layer is; empty for code between modules, or if it is unknown."""
        return self.classes[layer] if layer < len(self.classes) else ""

    @property
    def sees(self) -> bool:
        """True for a model of texts that has images with them."""
        return self.tokens > 0 and any(each.name == "pixel_values" for each in self.inputs)

    @property
    def tokens(self) -> int:
        """Tokens of one sample: the length of the first input of integers with one dimension; 0 without."""
        return next((i.shape[0] for i in self.inputs if "int" in i.dtype and len(i.shape) == 1), 0)


@lru_cache(maxsize=64)
def _of_degree(model: CapturedModel, degree: int) -> CapturedModel:
    split = next(split for split in model.splits if split.degree == degree)
    own = {"graphs": split.graphs, "refused": split.refused, "unused": split.unused, "splits": ()}
    return model.model_copy(update=own)


@lru_cache(maxsize=64)
def _splits_tokens(model: CapturedModel, degree: int) -> bool:
    operators = (operator for layer in model.of_degree(degree).graph.layers for operator in layer.operators)
    return any(o.collective is not None and o.collective.forward == "reduce_scatter" for o in operators)
