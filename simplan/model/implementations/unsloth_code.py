"""Layers as in Unsloth (unslothai/unsloth at 015bdef, unsloth/kernels and models/llama.py), where they differ.

- RMSNorm and rotation are kernels that write gradients over those that come in; rotation also turns queries and keys in
  place (rms_layernorm.py, ``Fast_RMS_Layernorm``; rope_embedding.py, ``Fast_RoPE_Embedding``).
- Matrices of attention, and of the MLP, with adapters and without biases, magnitudes or dropout are autograd functions
  (fast_lora.py, ``LoRA_QKV``, ``LoRA_W``, ``LoRA_MLP``; models/llama.py, ``patch_peft_model``). They add the adapter's
  result to that of the matrix in its matmul, and save their input, the results of gate and up, and nothing else: what A
  makes and the input of the down projection are computed again. The MLP's backward writes the gradients of gate and up
  over them, and those of inputs of attention and MLP over these inputs.
- Other adapters are PEFT's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from simplan.model.implementations.gates import fused_gates
from simplan.model.kernel import Gemm, Pointwise
from simplan.model.layer import LayerKind, LayerSpec, Operator, Tensor

_FUNCTIONS = (("q", "k", "v"), ("proj",), ("gate", "up", "down"))
_A, _B, _DROPOUT, _SUM = ".lora_a", ".lora_b", ".lora_dropout", ".lora_sum"


def as_unsloth(layer: LayerSpec) -> LayerSpec:
    """A layer of Llama's kind as in Unsloth."""
    operators = tuple(found for operator in layer.operators for found in _kernels(operator))
    if layer.kind is LayerKind.BLOCK:
        fused = _fused(layer)
        if "down" in fused:
            operators = tuple(fused_gates(operators))
        operators = tuple(_functions(operators, fused))
    return replace(layer, key=f"{layer.key},unsloth", operators=operators)


def _fused(layer: LayerSpec) -> frozenset[str]:
    """Names of the matrices whose adapters are part of a function."""
    names = {kernel.name for kernel in layer.kernels}
    parameters = {parameter.name for parameter in layer.parameters}

    def is_plain(name: str) -> bool:
        other = {f"{name}.bias", f"{name}.magnitude"}
        return f"{name}{_A}" in names and f"{name}{_DROPOUT}" not in names and other.isdisjoint(parameters)

    return frozenset(name for function in _FUNCTIONS if all(map(is_plain, function)) for name in function)


def _kernels(operator: Operator) -> Iterator[Operator]:
    """Norms that overwrite gradients, and rotations in place."""
    match operator.kernel:
        case Pointwise(like="rms_norm"):
            yield replace(operator, composed=False, passes=True, backward_scratch=())
        case Pointwise(like="rotary") as kernel:
            total = sum(tensor.elements for tensor in operator.makes)
            for source, made in zip(operator.reads, operator.makes, strict=True):
                share = made.elements / total
                part = replace(
                    kernel,
                    name=f"{kernel.name} {source[0]}",
                    reads=round(kernel.reads * share),
                    writes=round(kernel.writes * share),
                )
                yield Operator(kernel=part, reads=(source,), makes=(made,), in_place=True, passes=True)
        case _:
            yield operator


def _functions(operators: Sequence[Operator], fused: frozenset[str]) -> Iterator[Operator]:
    """Operators with adapters that are part of the functions of their matrices."""
    sums = {o.kernel.name: o.makes[0] for o in operators if o.kernel is not None and o.kernel.name.endswith(_SUM)}
    scaled: set[str] = set()  # results of B, which the sums scale
    for operator in operators:
        kernel = operator.kernel
        name, _, of_adapter = ("", "", "") if kernel is None else kernel.name.partition(".")
        if isinstance(kernel, Pointwise) and _is_gate(operator) and "down" in fused:
            both = tuple((source, source) for source in operator.reads)
            yield replace(operator, gradients_into=both)
        elif name not in fused and not (kernel is None and scaled.intersection(operator.reads)):
            yield operator
        elif not of_adapter and isinstance(kernel, Gemm):
            yield _with_gradients(operator, name, operators)
        elif f".{of_adapter}" == _A:
            saves = () if name == "down" else operator.saves
            yield replace(_with_gradients(operator, name, operators), saves=saves, backward_scratch=())
        elif f".{of_adapter}" == _B:
            scaled.add(operator.makes[0].name)
            product = f"{name} product"
            yield replace(
                operator,
                reads=(product, *operator.reads),
                makes=(sums[f"{name}{_SUM}"],),
                saves=(),
                in_place=True,
                passes=True,
            )


def _is_gate(operator: Operator) -> bool:
    """True for a gate that saves what it reads."""
    return len(operator.reads) == 2 and operator.saves == operator.reads and operator.saves_for != ()


def _with_gradients(operator: Operator, name: str, operators: Sequence[Operator]) -> Operator:
    """A matmul that writes the gradient of its input over that input, or adds to it."""
    source = operator.reads[0]
    into = "" if name in ("proj", "down") else source
    scratch: tuple[Tensor, ...] = ()
    if name in ("gate", "up"):  # the input of the down projection is there again
        size = next(o.makes[0].elements for o in operators if o.kernel is not None and o.kernel.name == "up")
        scratch = (Tensor("input of down, again", size),)
    return replace(operator, gradients_into=((source, into),), backward_scratch=scratch)
