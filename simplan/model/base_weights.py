"""Frozen weights of few bits below adapters (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

Linear layers of blocks are stored in few bits, and every matmul unpacks its weight first: once per microbatch in
forward, again in recomputation, and again in backward for the gradient of the input. Embeddings, the output head,
norms, biases, routers and experts held as one tensor stay wide (transformers 5.24, quantizers/base.py,
get_keys_to_not_convert; bitsandbytes replaces modules of class nn.Linear only).

PEFT's adapters have a precision of their own. Without autocast their input is cast to it, saved once more, and their
result is cast back (huggingface/peft at 5d602fd, src/peft/tuners/lora/layer.py and bnb.py, ``_cast_input_dtype``).
Under autocast every cast of a wide input makes a copy of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from simplan.base import Count, Spec
from simplan.model.adapters import NORMED_WEIGHT
from simplan.model.kernel import Pointwise
from simplan.model.layer import Attention, Gemm, LayerKind, LayerSpec, Operator, Role, Tensor
from simplan.model.parts.part import FP32_BYTES, cast
from simplan.model.weight_format import (
    BLOCK_SIZE,
    GROUP_SIZE,
    WeightFormat,
    WeightFormatName,
    WeightLibrary,
    WeightStorage,
    weight_format,
)


class BaseWeights(Spec):
    """Form of the frozen weights of linear layers; all other frozen weights stay wide.

    Attributes:
        block_size: Elements per scale; None for that of the format.
        library: Library whose tensors hold the weights; None for that of the framework, bitsandbytes if it has it, and
            for checkpoints in other formats.
        keeps_inputs: Backward keeps the inputs of 4-bit layers (bitsandbytes pull request 1270, ``MatMul4Bit``).
        upcast: Remaining frozen weights are FP32 (PEFT's ``prepare_model_for_kbit_training``); None for what the
            framework does (``SoftwareSpec.upcast_frozen``).
    """

    format: WeightFormatName = Field(
        description=(
            "nf4 and fp4 (4 bits, bitsandbytes or torchao), int8 (LLM.int8), fp8, gptq_int4, awq_int4, aqlm_2bit (1x16)"
        )
    )
    double_quantization: bool = Field(
        False, description="scales of nf4 and fp4 are quantized to 8 bits as well, with a scale per 256 of them"
    )
    block_size: Count | None = Field(None, description="elements per scale; default: 64, of GPTQ and AWQ 128")
    storage: WeightStorage = Field(
        "uint8", description="type of the packed tensor (bnb_4bit_quant_storage); FSDP1 and ZeRO-3 shard floats only"
    )
    library: WeightLibrary | None = Field(
        None,
        description="bitsandbytes or torchao (nf4 alone, always with double quantization); default: of the software",
    )
    experts: bool = Field(
        False, description="experts held as one tensor are stored so as well (axolotl's quantize_moe_experts)"
    )
    keeps_inputs: bool = Field(
        False, description="inputs of 4-bit layers stay until backward, as in bitsandbytes before 0.43.2 (July 2024)"
    )
    upcast: bool | None = Field(
        None,
        description=(
            "embeddings, head, norms and biases are FP32, as prepare_model_for_kbit_training makes them; default: as "
            "the framework does"
        ),
    )

    def of_software(self, libraries: Sequence[str]) -> BaseWeights:
        """Form in tensors of a framework without bitsandbytes, which are torchao's, unless a library is given.

        Args:
            libraries: See ``SoftwareSpec.base_weights``.
        """
        if self.library is not None or self.format != "nf4" or [*libraries] != ["torchao"]:
            return self
        doubled = self.double_quantization or "double_quantization" not in self.model_fields_set
        return self.model_copy(update={"library": "torchao", "double_quantization": doubled})

    @property
    def is_of_bitsandbytes(self) -> bool:
        """True if the weights are tensors of bitsandbytes."""
        return self.library != "torchao" and self.format in ("nf4", "fp4", "int8")

    @property
    def is_quantized_while_loaded(self) -> bool:
        """True if a library quantizes wide weights of the checkpoint; else the checkpoint has them as they are."""
        return self.format in ("nf4", "fp4", "int8")

    @property
    def elements_per_scale(self) -> int:
        """``block_size``, or that of the format."""
        return self.block_size or (GROUP_SIZE if self.format in ("gptq_int4", "awq_int4") else BLOCK_SIZE)

    def __str__(self) -> str:
        """See ``words``."""
        return self.words

    @property
    def words(self) -> str:
        """Format in words."""
        doubled = " with double quantization" * self.double_quantization + " with experts" * self.experts
        return f"{self.format}{doubled}" + (f" ({self.library})" if self.library == "torchao" else "")

    def stored_experts(self, width: int) -> WeightFormat | None:
        """Stored form of experts held as one tensor; ``width`` as in ``weight_format``.

        A parametrization unpacks the whole tensor where forward reads it, and autograd keeps the result for backward
        (bitsandbytes, nn/parametrize.py, Bnb4bitParametrization).
        """
        if not self.experts:
            return None
        form = self.model_copy(update={"storage": "uint8"}).stored(width)
        return replace(form, name=f"{form.name}-experts", keeps_weight=True)

    def stored(self, width: int, *, compiled: bool = False) -> WeightFormat:
        """Stored form of the weights; ``width`` and ``compiled`` as in ``weight_format``."""
        form = weight_format(
            self.format,
            library=self.library or "bitsandbytes",
            double_quantization=self.double_quantization,
            block_size=self.elements_per_scale,
            storage=self.storage,
            width=width,
            compiled=compiled,
        )
        return replace(form, name=f"{form.name}-inputs", keeps_input=True) if self.keeps_inputs else form


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenBase:
    """Frozen weights and adapters of one run.

    Attributes:
        weights: Stored form of linear layers; None for wide weights.
        experts: Stored form of experts held as one tensor; None for wide ones.
        activation_bytes: Bytes per element of activations.
        compute_bytes: Bytes per element of operands of matmuls with unpacked weights.
        adapter_bytes: Bytes per element of operands of adapters.
        attention_bytes: Bytes per element of operands of the attention core.
        autocast: Matmuls that torch.autocast knows narrow their operands; else a module computes in the precision of
            its weight, adapters in FP32.
        peft: Adapters are PEFT's, which copy the result of a 4-bit layer before they add to it.
        head: The matrix of the head is stored as those of blocks are.
        widens: PEFT casts the input of an adapter to the precision in which adapters are stored, and autocast back.
            Each adapter saves a copy of its own, and the wide one is there until its result is added.
        leaves_casts: Adapters of layers stored in few bits leave casts to autocast (lora/bnb.py and awq.py,
            ``requires_conversion``, in contrast to lora/layer.py and gptq.py).
        holds_graph: The loop holds the graph of a microbatch until the next one's loss is there, and with it the inputs
            that 4-bit layers keep.
    """

    weights: WeightFormat | None
    activation_bytes: int
    compute_bytes: int
    adapter_bytes: int
    attention_bytes: int
    autocast: bool
    peft: bool
    experts: WeightFormat | None = None
    head: bool = False
    holds_graph: bool = False
    widens: bool = False
    leaves_casts: bool = False

    @property
    def key(self) -> str:
        """Suffix of the keys of layers."""
        stored = "" if self.weights is None else f",{self.weights.name}" + ",experts" * (self.experts is not None)
        widths = self.activation_bytes, self.compute_bytes, self.adapter_bytes, self.attention_bytes
        flags = ",peft" * self.peft + ",head" * self.head + ",graph" * self.holds_graph
        flags += ",wide" * self.widens + ",left" * self.leaves_casts
        return f"{stored}{flags},{':'.join(map(str, widths))}{',autocast' * self.autocast}"

    @property
    def copies_results(self) -> bool:
        """True if PEFT copies results of base layers."""
        return self.peft and self.weights is not None and self.weights.element_bits == 4


def with_frozen_base(layer: LayerSpec, base: FrozenBase) -> LayerSpec:
    """A layer with adapters, or frozen, whose base weights are stored as ``base`` says."""
    stored: dict[str, WeightFormat] = {}
    if base.weights is not None:
        stored |= dict.fromkeys(stored_weights(layer, base.weights, head=base.head), base.weights)
    if base.experts is not None:
        stored |= dict.fromkeys(stored_experts(layer), base.experts)
    operators = tuple(_operators(layer, base, stored))
    parameters = tuple(replace(p, stored=stored.get(p.name)) for p in layer.parameters)
    constants = layer.constants
    if stored and base.weights is not None and base.weights.has_buffer:
        most = max(p.num_elements for p in parameters if p.stored is not None)
        scales = -(-most // (base.weights.unpacked_scale_elements or most))
        constants += (Tensor("unpacked weight", most, base.compute_bytes), Tensor("its scales", scales, FP32_BYTES))
    key = f"{layer.key}{base.key}"
    return replace(layer, key=key, operators=operators, parameters=parameters, constants=constants)


def stored_weights(layer: LayerSpec, form: WeightFormat | None, *, head: bool = False) -> frozenset[str]:
    """Names of the weights of a layer that are stored in few bits: frozen matrices of linear layers of a block.

    Args:
        head: Also the matrix of the output head.
    """
    if form is None or (layer.kind is not LayerKind.BLOCK and not (head and layer.kind is LayerKind.HEAD)):
        return frozenset()
    linear = {
        f"{kernel.name}.weight"
        for kernel, roles in zip(layer.kernels, layer.roles, strict=True)
        if isinstance(kernel, Gemm) and kernel.num_groups == 1 and roles.isdisjoint(_WIDE) and not kernel.trained
    }
    return frozenset(p.name for p in layer.parameters if p.frozen and p.name in linear and len(p.shape) == 2)


def stored_experts(layer: LayerSpec) -> frozenset[str]:
    """Names of the frozen weights of a layer that hold all experts, one matrix each."""
    grouped = {
        _weight_of(operator, operator.kernel)
        for operator in layer.operators
        if isinstance(operator.kernel, Gemm) and operator.kernel.num_groups > 1 and not operator.kernel.trained
    }
    return frozenset(
        p.name for p in layer.parameters if p.frozen and p.name in grouped and len(p.shape) == _EXPERT_DIMS
    )


_EXPERT_DIMS = 3


def _weight_of(operator: Operator, kernel: Gemm) -> str:
    """Name of the weight of a matmul; a capture's operator has it among its parameters, under any name."""
    own = f"{kernel.name}.weight"
    return own if own in operator.parameters or not operator.parameters else operator.parameters[-1]


_WIDE = frozenset({Role.GATING, Role.EXPERTS, Role.ADAPTER, Role.UNQUANTIZED})
"""Roles of matmuls whose weights stay wide."""


def _operators(layer: LayerSpec, base: FrozenBase, stored: Mapping[str, WeightFormat]) -> Iterator[Operator]:
    operators = _in_formats(layer, base, stored)
    if not base.peft:
        yield from operators
        return
    drops = {kernel.name.removesuffix(_DROPOUT) for kernel in layer.kernels if kernel.name.endswith(_DROPOUT)}
    sources: dict[str, tuple[str, ...]] = {}
    for operator in operators:
        name = _adapted_by(operator)
        leaves = base.leaves_casts and f"{name}.weight" in stored
        widens = base.widens and not leaves
        yield from _as_peft(operator, name, base, sources, leaves=leaves, widens=widens, drops=name in drops)


def _adapted_by(operator: Operator) -> str:
    """Name of the matmul to whose adapter an operator belongs; empty for none."""
    of = operator.reads[0] if operator.in_place and operator.reads else operator.kernel and operator.kernel.name
    ends = (f"{_B} output", _SUM, _A, _DROPOUT)
    return next((of.removesuffix(end) for end in ends if of.endswith(end)), "") if of else ""


def _as_peft(
    operator: Operator,
    name: str,
    base: FrozenBase,
    sources: dict[str, tuple[str, ...]],
    *,
    leaves: bool,
    widens: bool,
    drops: bool,
) -> Iterator[Operator]:
    """Operators of an adapter as in PEFT, which scales the adapter's result apart, and holds inputs of modules.

    Args:
        sources: Adapter -> tensors that its module holds until it returns.
        leaves, widens: ``FrozenBase.leaves_casts`` and ``widens`` for this matmul.
        drops: The adapter's input passes through dropout.
    """
    kernel = operator.kernel
    if not name:
        yield operator
    elif isinstance(kernel, Pointwise) and kernel.name.endswith(_DROPOUT):
        source, wide = operator.reads[0], Tensor(f"{name}{_A} input in FP32", kernel.reads, FP32_BYTES)
        sources[name] = (source, *[wide.name] * widens)
        if not widens:
            yield operator
            return
        yield cast(source, wide)
        dropped, mask = operator.makes
        yield replace(operator, reads=(wide.name,), makes=(replace(dropped, bytes_per_element=FP32_BYTES), mask))
    elif isinstance(kernel, Gemm):
        source, wide = operator.reads[0], Tensor(f"{name}{_A} input in FP32", kernel.input_elements, FP32_BYTES)
        sources.setdefault(name, (source, *[wide.name] * widens))
        if not widens:
            yield operator
            return
        narrow = Tensor(f"{name}{_A} input", kernel.input_elements)
        if not drops:
            yield cast(source, wide)
        yield cast(source if drops else wide.name, narrow)
        yield replace(operator, reads=(narrow.name, *operator.reads[1:]), saves=(narrow.name,))
    elif operator.in_place:
        yield from _scaled(operator, base, leaves=leaves)
    else:
        yield from _summed(operator, name, base, leaves=leaves)
        yield Operator(reads=(*sources.get(name, ()), operator.reads[0]), detached=True, roles=operator.roles)


def _scaled(operator: Operator, base: FrozenBase, *, leaves: bool) -> Iterator[Operator]:
    """The adapter's result times its scale, in the precision of adapters unless the layer casts it back."""
    (scaled,), back = operator.makes, leaves and not base.autocast and base.adapter_bytes != base.activation_bytes
    made = replace(scaled, name=f"{scaled.name} apart" if back else scaled.name, bytes_per_element=base.adapter_bytes)
    yield replace(operator, makes=(made,), in_place=False)
    if back:
        yield cast(made.name, scaled)


def _summed(operator: Operator, name: str, base: FrozenBase, *, leaves: bool) -> Iterator[Operator]:
    """The sum of both results, which has the wider precision of the two and is cast to that of the matmul."""
    (result,) = operator.makes
    if leaves or base.adapter_bytes <= base.activation_bytes:
        yield operator
        return
    total = replace(result, name=f"{name} sum", bytes_per_element=base.adapter_bytes)
    yield replace(operator, makes=(total,))
    yield cast(total.name, result)


def _in_formats(layer: LayerSpec, base: FrozenBase, stored: Mapping[str, WeightFormat]) -> Iterator[Operator]:
    names = {kernel.name for kernel in layer.kernels if isinstance(kernel, Gemm)}
    magnitudes, inputs = {parameter.name for parameter in layer.parameters}, set[str]()
    for each in layer.operators:
        operator = _with_unpacked_norms(each, stored)
        kernel = operator.kernel
        form = stored.get(_weight_of(operator, kernel)) if isinstance(kernel, Gemm) else None
        if isinstance(kernel, Gemm) and kernel.merged_rank and form is not None:  # the sum with adapters is kept
            form = replace(form, keeps_weight=False)
        if isinstance(kernel, Gemm) and form is not None:
            copies = base.copies_results and f"{kernel.name}{_A}" in names
            is_first = operator.reads[0] not in inputs
            inputs.add(operator.reads[0])
            yield from _unpacked(operator, kernel, form, base, copies=copies, is_first=is_first)
        elif isinstance(kernel, Gemm):
            is_adapter = kernel.name.endswith((_A, _B))
            width = base.adapter_bytes if is_adapter else base.activation_bytes
            whole = not base.autocast and width == FP32_BYTES
            wide = replace(operator, kernel=replace(kernel, full_precision=whole))
            if kernel.name.endswith(_B) and (base.peft or f"{kernel.name.removesuffix(_B)}.magnitude" in magnitudes):
                yield replace(wide, makes=(replace(wide.makes[0], bytes_per_element=width),))  # read as it is
                continue
            yield from _in_width(wide, width, base) if is_adapter else (wide,)
        elif isinstance(kernel, Attention) and not kernel.eager:
            yield from _core(operator, layer, base)
        else:
            yield operator


_A, _B, _SUM, _DROPOUT = ".lora_a", ".lora_b", ".lora_sum", ".lora_dropout"


def _with_unpacked_norms(operator: Operator, stored: Container[str]) -> Operator:
    """An operator while whose weight's norms are there; a packed weight has a copy in every precision."""
    scratch = tuple(
        replace(tensor, widened=False)
        if tensor.name.endswith(f" {NORMED_WEIGHT}")
        and f"{tensor.name.removesuffix(f' {NORMED_WEIGHT}')}.weight" in stored
        else tensor
        for tensor in operator.forward_scratch
    )
    return operator if scratch == operator.forward_scratch else replace(operator, forward_scratch=scratch)


def _unpacked(
    operator: Operator, kernel: Gemm, form: WeightFormat, base: FrozenBase, *, copies: bool, is_first: bool
) -> Iterator[Operator]:
    """A matmul that unpacks its weight; its input is cast to the precision of the weight, and its result back."""
    (result, *others), name = operator.makes, kernel.name
    output = replace(result, name=f"{name} result to copy") if copies else result
    inner = replace(operator, kernel=replace(kernel, stored=form), makes=(output, *others))
    for step in _in_width(inner, base.compute_bytes, base):
        yield step if step.kernel is None else _saving(step, kernel, form, base, is_first=is_first)
    if copies:
        copy = Pointwise(f"{name}.lora_copy", result.elements, result.elements, moves=True)
        yield Operator(kernel=copy, reads=(output.name,), makes=(result,), passes=True, roles=operator.roles)


def _saving(operator: Operator, kernel: Gemm, form: WeightFormat, base: FrozenBase, *, is_first: bool) -> Operator:
    """A matmul with a packed weight, with what autograd saves for it; ``is_first`` of those with its input."""
    if kernel.merged_rank:
        return operator
    saves, others = operator.reads[:1] if form.keeps_input else (), []
    if is_first and form.keeps_input and form.element_bits == 4 and base.holds_graph:  # backward does not free it
        others.append(Tensor(f"{kernel.name} input of the last microbatch", kernel.input_elements))
    if form.keeps_weight:
        size = kernel.weight_elements
        others.append(Tensor(f"{kernel.name} unpacked", size, base.compute_bytes, per_microbatch=True))
    names = (tensor.name for tensor in others)
    return replace(operator, makes=(*operator.makes, *others), saves=(*saves, *names))


def _in_width(operator: Operator, width: int, base: FrozenBase) -> Iterator[Operator]:
    """A matmul in another precision than activations: its input is cast, and its result is cast back.

    A of an adapter reads what B makes of it in their precision, so that only B casts back.
    """
    kernel, (result, *others) = operator.kernel, operator.makes
    assert isinstance(kernel, Gemm)
    if width == base.activation_bytes:
        yield operator
        return
    source = operator.reads[0]
    if not kernel.name.endswith(_B):
        copy = Tensor(f"{kernel.name} input", kernel.input_elements, width)
        yield cast(source, copy)
        saves = tuple(copy.name if name == source else name for name in operator.saves)
        operator = replace(operator, reads=(copy.name, *operator.reads[1:]), saves=saves)
    if kernel.name.endswith(_A):
        yield replace(operator, makes=(replace(result, bytes_per_element=width), *others))
        return
    product = replace(result, name=f"{kernel.name} result", bytes_per_element=width)
    yield replace(operator, makes=(product, *others))
    yield cast(product.name, result)


def _core(operator: Operator, layer: LayerSpec, base: FrozenBase) -> Iterator[Operator]:
    """An attention core whose operands autocast narrows."""
    width = base.attention_bytes
    if width == base.activation_bytes:
        yield operator
        return
    copies = {name: Tensor(f"{name}, cast", layer.tensors[name].elements, width) for name in operator.reads}
    for name, copy in copies.items():
        yield cast(name, copy)
    names = {name: copy.name for name, copy in copies.items()}
    yield replace(
        operator,
        reads=tuple(names.values()),
        makes=tuple(replace(tensor, bytes_per_element=tensor.bytes_per_element or width) for tensor in operator.makes),
        saves=tuple(names.get(name, name) for name in operator.saves),
    )
