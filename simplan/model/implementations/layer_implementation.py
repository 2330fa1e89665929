"""Framework implementations of transformer layers, where they differ from eager torch modules.

Families of models build their layers as torch would run them (``simplan.model.families``). An implementation changes
the tensors a layer saves for backward, and the communication of context-parallel ranks. Unfused attention materializes
its scores, dropout saves its masks, fused functions save only their inputs. The computed results stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from simplan.base import Count, Spec
from simplan.model.implementations.attention import (
    in_one_call,
    is_core,
    is_masked_for_gathering,
    skipping_keys,
    unfused,
    with_core,
    with_narrow_values,
    with_repeated_keys,
)
from simplan.model.implementations.eager_attention import eager_core
from simplan.model.implementations.expert_dispatch import (
    ExpertDispatch,
    dispatched,
    one_by_one,
    with_biases_apart,
    with_fused_experts,
)
from simplan.model.implementations.gates import with_fused_gates
from simplan.model.implementations.litgpt_code import as_litgpt
from simplan.model.implementations.loss_in_chunks import ChunkedLoss, with_loss_in_chunks
from simplan.model.implementations.torchtune_code import as_torchtune
from simplan.model.implementations.transformers_code import as_transformers
from simplan.model.implementations.unsloth_code import as_unsloth
from simplan.model.kernel import LOSS, LayerCollective
from simplan.model.layer import Attention, Gemm, LayerKind, LayerSpec, Operator, Pointwise, Role, Tensor
from simplan.model.parts.attention import MASK
from simplan.model.parts.experts import GATE_AND_UP
from simplan.model.parts.part import FP32_BYTES, MASK_BYTES
from simplan.model.share import biases_after_sums, regathered

Loss = Literal["log_probabilities", "probabilities", "gradients", "logits"]
SplitBackward = Literal["all", "matmuls"]
ModelCode = Literal["framework", "transformers", "litgpt", "torchtune", "unsloth"]

COMPILED = "compiled"
_KEPT_BY_LOSS: dict[Loss, tuple[str, int | None]] = {
    "log_probabilities": ("log-probabilities", FP32_BYTES),
    "probabilities": ("probabilities", FP32_BYTES),
    "gradients": ("gradients of logits", None),
    "logits": ("logits", None),
}


class LayerImplementation(Spec):
    """Differences of a framework's layers from eager torch modules.

    Attributes:
        model_code: Source of the model's modules: the framework (for torch, simplan's executor), or Hugging Face
            transformers (``simplan.model.implementations.transformers_code``), or LitGPT, torchtune or Unsloth
            (``litgpt_code``, ``torchtune_code``, ``unsloth_code``).
        fused_softmax: False if scaling, mask and softmax of unfused attention are single operations, the softmax in
            FP32 as under torch's autocast.
        dropout: Families whose models train with dropout after the embedding, after both branches of a block and, in
            unfused attention, on its weights. Masks of one byte per element are saved. A fused kernel samples them
            again.
        fused_gemms: Matrices with one input are fused (QKV, gate-up).
        fused_norms: An RMSNorm is one kernel, as a LayerNorm is; else it is a sequence of single operations, unless
            blocks are compiled. On CPUs it is a sequence in any case.
        fused_gates: The activation of a gated MLP and its multiplication by the other half are one function, which
            saves its inputs.
        loss: Tensors that the cross-entropy saves. ``log_probabilities``: FP32 logarithms of probabilities, in addition
            to the logits (torch, also its loss_parallel with a split vocabulary). ``probabilities``: probabilities in
            place of an FP32 copy of the logits, which become their gradients (Megatron-LM). ``gradients``: gradients in
            place of the logits, in their precision (Transformer Engine's fused cross-entropy). ``logits``: the logits
            alone, from which one kernel makes their gradients (torch.compile).
        compiled_loss: ``loss`` where the loss is compiled, usually with the blocks; None for the same.
        chunked_loss: Chunks of tokens in which output projection and loss are computed; None for all tokens at once.
            Set from the profile.
        repeated_keys: Keys and values are expanded to the number of query heads before attention. Context-parallel
            ranks all-gather the expanded tensors in forward and again in backward. Gradients of keys and values travel
            around a ring in FP32 (torch's context parallelism).
        narrow_values: Values narrower than keys are not padded.
        skips_keys: The attention kernel skips keys outside of a window, for which torch has a mask tensor. The kernel
            also includes sinks in its softmax; otherwise they scale its output afterwards.
        split_backward: Tensors that stay between input gradient and weight gradient of a split backward. ``all``:
            nearly all that forward saved (torch). ``matmuls``: input and output gradient of each matmul with a weight.
        gathered_keys: Attention to keys all-gathered from context-parallel ranks: in one call with a mask tensor
            (``masked``, simplan's executor), or to the keys of one rank after the other or up to a chunk's own, without
            a mask tensor (``by_rank``).
        documents_in_one_call: One kernel call attends for all packed documents, and its outputs are one tensor.
        expert_dispatch: Dispatch of tokens to experts (``simplan.model.implementations.expert_dispatch``), set from the
            profile.
        weighted_activations: Experts' activations are multiplied by the weights of experts, so that outputs of experts
            are not saved for backward. Dispatch algorithms other than ``copies`` always do that.
        expert_streams: Streams on which separate kernels of the experts' matmuls and casts run; None for grouped GEMMs.
            With separate kernels, the last biases are added separately.
        fused_experts: Activations of experts, and their casts to FP8, are fused into the matmuls before them; set from
            the profile.
        eight_bit_attention: Fused attention is in FP8; set from the profile.
        eight_bit_gate_inputs: Forward saves copies in FP8 of what a fused gate reads; set from the profile.
        regathers_tokens: Matrices split by columns save each rank's own tokens, which backward gathers again
            (Megatron-LM's linear_with_grad_accumulation); else they save the gathered tokens (torch's DTensor). Biases
            of matrices split by rows are added to the sum over ranks; else to each rank's part.
        compiled: Blocks are compiled with torch.compile. Backward recomputes a gate's activation, and the sum in the
            middle of a block from the branch that is added, if the branch is narrower. Inputs of matmuls with weights
            are saved, as backward would have to write them to memory anyway (the partitioner of torch 2.13,
            torch/_functorch/config.py: ban_recompute_materialized_backward).
        padded_matmuls: Operands of matmuls are padded to aligned sizes, as torch.compile of a whole model does from
            torch 2.1 on (torch/_inductor/config.py: shape_padding); compiled blocks leave the head as it is.
        compiled_in_parts: Compiled blocks with collectives are several graphs, between which recomputation is eager
            (simplan's executor); else one (torchtitan: fullgraph=True). Set from the profile.
        shifted_logits: The loss copies the FP32 logits without each sequence's last token, and its caller holds the
            logits as the projection makes them (transformers 4.46 to 4.48, loss/loss_utils.py, ``ForCausalLMLoss``:
            ``logits[..., :-1, :].contiguous()``; 4.49 shifts labels, and up to 4.45 nothing holds the narrow logits).
        holds_logits: The training loop holds the model's output, with its logits, until backward is done
            (``outputs.loss.backward()``); else they are freed after the loss.
        full_recompute_pass: Recomputation re-executes a block to its end, as in an autograd function that calls the
            block (Megatron's CheckpointFunction, torch's reentrant checkpoint); else up to the last tensor that is
            needed.
    """

    model_code: ModelCode = "framework"
    attention: Literal["fused", "unfused"] = Field(
        "fused",
        description=(
            "fused: one kernel without materialized scores (FlashAttention). unfused: scores are materialized; "
            "scaling, mask and softmax are one kernel, which saves its result in the precision of activations "
            "(Megatron-LM's masked_softmax_fusion)."
        ),
    )
    fused_softmax: bool = True
    dropout: Annotated[tuple[str, ...], Field(strict=False)] = ()
    fused_gemms: bool = False
    fused_norms: bool = True
    fused_gates: bool = False
    loss: Loss = "log_probabilities"
    compiled_loss: Loss | None = None
    chunked_loss: ChunkedLoss | None = Field(default=None, exclude=True)
    repeated_keys: bool = False
    narrow_values: bool = False
    skips_keys: bool = False
    split_backward: SplitBackward = "all"
    gathered_keys: Literal["masked", "by_rank"] = "masked"
    documents_in_one_call: bool = False
    expert_dispatch: ExpertDispatch = Field(default="copies", exclude=True)
    weighted_activations: bool = False
    expert_streams: Count | None = None
    fused_experts: bool = Field(default=False, exclude=True)
    eight_bit_attention: bool = Field(default=False, exclude=True)
    eight_bit_gate_inputs: bool = Field(default=False, exclude=True)
    regathers_tokens: bool = False
    compiled: bool = False
    padded_matmuls: bool = False
    compiled_in_parts: bool = Field(default=False, exclude=True)
    shifted_logits: bool = False
    holds_logits: bool = False
    full_recompute_pass: bool = False


def implemented_layers(
    layers: Sequence[LayerSpec], implementation: LayerImplementation, family: str
) -> tuple[LayerSpec, ...]:
    """Layers of a model under an implementation; equal layers become one object."""
    made = {
        layer.key: implemented_layer(layer, implementation, dropout=family in implementation.dropout)
        for layer in {*layers}
    }
    return tuple(made[layer.key] for layer in layers)


def implemented_layer(layer: LayerSpec, implementation: LayerImplementation, *, dropout: bool) -> LayerSpec:
    """One layer under an implementation; ``dropout`` if the model trains with it."""
    layer = _as_in_code(layer, implementation)
    operators, parameters = layer.operators, layer.parameters
    if implementation.regathers_tokens:
        operators, parameters = biases_after_sums(operators, parameters)
        operators = tuple(regathered(operators))
    as_megatron = operators != layer.operators
    saved = operators
    if any(kernel.name == GATE_AND_UP[0] for kernel in layer.kernels):
        operators = dispatched(
            operators, implementation.expert_dispatch, weighted_activations=implementation.weighted_activations
        )
    if implementation.fused_experts:
        operators = with_fused_experts(operators)
    elif implementation.expert_streams:
        operators = with_biases_apart(layer, one_by_one(operators, implementation.expert_streams))
    other_experts = operators != saved
    operators, skips, attention_words = _with_attention(operators, implementation, dropout=dropout)
    compiled = implementation.compiled and layer.kind is LayerKind.BLOCK
    if implementation.fused_gates or compiled:
        operators = with_fused_gates(operators, narrow=implementation.eight_bit_gate_inputs)
    if compiled:
        operators = tuple(_summed_again(operator) for operator in operators)
    if dropout:
        operators = tuple(_with_masks(layer, operators))
    operators, loss_words = _with_losses(layer, operators, implementation)
    constants = layer.constants
    if skips or (implementation.gathered_keys == "by_rank" and is_masked_for_gathering(layer)):
        constants = tuple(table for table in constants if table.name != MASK)
    # with a split block, the recomputed function is compiled; else recomputation itself is compiled
    in_parts = compiled and implementation.compiled_in_parts
    split = in_parts and any(isinstance(operator.kernel, LayerCollective) for operator in operators)
    to_end = split or (implementation.full_recompute_pass and layer.kind is LayerKind.BLOCK)
    if not (compiled or to_end or (operators, constants) != (layer.operators, layer.constants)):
        return layer
    words = ["dropout" * dropout, "gates" * implementation.fused_gates, implementation.loss, *attention_words]
    kernels = "fused" if implementation.fused_experts else f"{implementation.expert_streams or 'all'} concurrent"
    words += [f"experts by {implementation.expert_dispatch}, {kernels}" * other_experts, "as Megatron" * as_megatron]
    words += ["weighted activations" * (other_experts and implementation.weighted_activations)]
    words += ["FP8 gate inputs" * implementation.eight_bit_gate_inputs]
    words += loss_words
    words += ["by rank" * (constants != layer.constants), COMPILED * compiled, "to end" * to_end]
    return replace(
        layer,
        key=f"{layer.key},{'+'.join(filter(None, words))}",
        operators=operators,
        parameters=parameters,
        constants=constants,
        compiled=compiled,
        full_recompute_pass=to_end,
    )


def _as_in_code(layer: LayerSpec, implementation: LayerImplementation) -> LayerSpec:
    """A layer as in the model's code."""
    match implementation.model_code:
        case "transformers":
            return as_transformers(layer)
        case "litgpt":
            return as_litgpt(layer)
        case "torchtune":
            chunked = implementation.chunked_loss is not None
            return as_torchtune(layer, compiled=implementation.compiled, chunked=chunked)
        case "unsloth":
            return as_unsloth(layer)
        case "framework":
            return layer


def _with_attention(
    operators: tuple[Operator, ...], implementation: LayerImplementation, *, dropout: bool
) -> tuple[tuple[Operator, ...], bool, list[str]]:
    """Operators with an implementation's attention, whether its kernel skips keys of a window, and its key's words."""
    if implementation.attention == "unfused" and implementation.model_code == "transformers":
        operators = tuple(found for operator in operators for found in _eager(operator))
    elif implementation.attention == "unfused":
        operators = tuple(
            found
            for operator in operators
            for found in unfused(operator, dropout=dropout, fused_softmax=implementation.fused_softmax)
        )
    if implementation.repeated_keys:
        operators = tuple(with_repeated_keys(operators))
    one_call = implementation.documents_in_one_call and any(
        is_core(o, lambda core: bool(core.documents)) for o in operators
    )
    if one_call:
        operators = in_one_call(operators)
    if implementation.narrow_values:
        operators = with_narrow_values(operators)
    skips = implementation.skips_keys and any(
        is_core(o, lambda core: core.masked and core.window > 0) for o in operators
    )
    if implementation.skips_keys:
        operators = skipping_keys(operators)
    eight_bits = implementation.eight_bit_attention and any(is_core(o) for o in operators)
    if eight_bits:
        operators = tuple(with_core(operator, eight_bits=True) for operator in operators)
    words = [
        implementation.attention,
        "separate softmax" * (implementation.attention == "unfused" and not implementation.fused_softmax),
        "repeated" * implementation.repeated_keys,
        "narrow" * implementation.narrow_values,
    ]
    words += ["skips" * implementation.skips_keys, "one call" * one_call, "FP8 attention" * eight_bits]
    return operators, skips, words


def _eager(operator: Operator) -> Iterator[Operator]:
    """Attention of transformers with ``attn_implementation="eager"``, in place of one kernel."""
    core = operator.kernel
    if not isinstance(core, Attention) or core.eager:
        yield operator
        return
    eager = replace(core, eager=True, fused_softmax=False)
    yield from eager_core(eager, operator.reads, operator.makes[0].name, as_transformers=True)


def _summed_again(operator: Operator) -> Operator:
    """A sum of the residual stream that backward of a compiled block recomputes from the branch that is added."""
    if not (operator.passes and isinstance(operator.kernel, Pointwise) and len(operator.reads) > 1):
        return operator
    return replace(operator, makes=tuple(replace(tensor, residual=False) for tensor in operator.makes))


def _with_masks(layer: LayerSpec, operators: Sequence[Operator]) -> Iterator[Operator]:
    """Operators with dropout masks where a branch joins the residual stream, and after the embedding."""
    for number, operator in enumerate(operators, 1):
        kernel = operator.kernel
        ends_embedding = layer.kind is LayerKind.EMBEDDING and number == len(operators)
        if not (ends_embedding or (layer.kind is LayerKind.BLOCK and Role.RESIDUAL in operator.roles)):
            yield operator
            continue
        name = kernel.name if isinstance(kernel, Pointwise) else "embedding"
        mask = Tensor(f"{name} mask", operator.makes[0].elements, MASK_BYTES)
        yield replace(operator, makes=(*operator.makes, mask), saves=(*operator.saves, mask.name))


def _with_losses(
    layer: LayerSpec, operators: tuple[Operator, ...], implementation: LayerImplementation
) -> tuple[tuple[Operator, ...], list[str]]:
    """Operators with an implementation's loss, and its words in the layer's key."""
    if implementation.loss != "log_probabilities":
        operators = tuple(_with_loss(operators, implementation.loss))
    if layer.kind is not LayerKind.HEAD:
        return operators, []
    if implementation.chunked_loss is not None:
        chunked = implementation.chunked_loss
        return tuple(with_loss_in_chunks(operators, chunked)), [chunked.words]
    if implementation.shifted_logits:
        operators = tuple(_with_logits_shifted(operators))
    words = ["logits shifted" * implementation.shifted_logits, "logits held" * implementation.holds_logits]
    return tuple(_with_logits_held(operators)) if implementation.holds_logits else operators, words


def _with_logits_shifted(operators: Sequence[Operator]) -> Iterator[Operator]:
    """Operators of a head whose loss copies its logits; the narrow, wide and copied ones are there until it ends."""
    sources = {operator.makes[0].name: operator.reads[0] for operator in operators if operator.is_cast}
    tensors = {tensor.name: tensor for operator in operators for tensor in operator.makes}
    for operator in operators:
        if not (isinstance(operator.kernel, Pointwise) and operator.kernel.name == LOSS):
            yield operator
            continue
        (wide,), (kept,) = operator.reads, operator.makes
        copy = replace(tensors[wide], name=f"{wide}, shifted")
        size = copy.elements
        yield Operator(kernel=Pointwise("shift", size, size, moves=True), reads=(wide,), makes=(copy,))
        yield replace(operator, reads=(copy.name,))
        yield Operator(reads=(sources.get(wide, wide), wide, copy.name, kept.name), detached=True)


def _with_logits_held(operators: Sequence[Operator]) -> Iterator[Operator]:
    """Operators of a head whose loss keeps the logits as the projection makes them."""
    logits = {operator.makes[0].name for operator in operators if isinstance(operator.kernel, Gemm) and operator.makes}
    sources = {o.makes[0].name: o.reads[0] for o in operators if o.is_cast and o.reads[0] in logits}
    for operator in operators:
        if isinstance(operator.kernel, Pointwise) and operator.kernel.name == LOSS:
            source = operator.reads[0]
            held = sources.get(source, source)
            operator = replace(operator, saves=tuple(dict.fromkeys((*operator.saves, held))))
        yield operator


def _with_loss(operators: Sequence[Operator], loss: Loss) -> Iterator[Operator]:
    """Operators with another implementation of the loss; a loss on unconverted logits needs no FP32 copy of them."""
    reads = {o.reads[0] for o in operators if isinstance(o.kernel, Pointwise) and o.kernel.name == LOSS}
    narrow = {o.makes[0].name: o.reads[0] for o in operators if o.is_cast and o.makes[0].name in reads}
    as_they_are = loss in ("gradients", "logits")
    for operator in operators:
        if operator.is_cast and operator.makes[0].name in narrow and as_they_are:
            continue
        if not (isinstance(operator.kernel, Pointwise) and operator.kernel.name == LOSS):
            yield operator
            continue
        (wide,), (kept,) = operator.reads, operator.makes
        source = narrow.get(wide, wide) if as_they_are else wide
        name, width = _KEPT_BY_LOSS[loss]
        kept = replace(kept, name=kept.name.replace("log-probabilities", name), bytes_per_element=width)
        saves_source = loss == "logits"
        yield replace(
            operator,
            reads=(source,),
            makes=() if saves_source else (kept,),
            saves=(source if saves_source else kept.name,),
            in_place=loss in ("probabilities", "gradients"),
            passes=loss in ("probabilities", "gradients"),
            forward_scratch=(),
            backward_scratch=(),
        )
