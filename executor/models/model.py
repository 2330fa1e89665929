"""Modules of a model, built from its ModelSpec, with the parameters, kernels and saved tensors of its LayerSpecs.

A stage is a plain sequence of layers. Each layer is built unsharded on the meta device, split over ranks, and then
allocated and initialized, with weights in the order of its LayerSpec. The embedding takes the rank's tokens (batch,
tokens) int64. Blocks take and return hidden states (batch, local tokens, hidden_size). The head returns logits (batch,
tokens, local part of the vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor

from executor.distributed.expert_parallel import own_experts, split_experts
from executor.distributed.mesh import ParallelDims
from executor.distributed.precision import with_fp8_linears
from executor.distributed.recompute import Around, of_block, recompute_block
from executor.distributed.tensor_parallel import split_layer, with_local_weights
from executor.models.attention_cores import LayerRequest, StageContext
from executor.models.blocks import (
    bert_block,
    gemma_block,
    gpt_block,
    llama_block,
    mpt_block,
    neox_block,
    sandwich_block,
)
from executor.models.embedding_and_head import (
    BertEmbedding,
    CappedHead,
    ClassHead,
    Embedding,
    Head,
    MaskedHead,
    PatchEmbedding,
    PositionEmbedding,
    ScaledEmbedding,
)
from executor.models.lora import add_adapters, freeze
from executor.models.moe import deepseek_block, moe_block
from executor.models.resnet import ResNetHead, ResNetStem, resnet_block
from executor.models.t5 import T5Embedding, T5Head, t5_block
from simplan.model.base_weights import BaseWeights
from simplan.model.fake_quantization import FakeQuantization
from simplan.model.implementations.layer_implementation import ModelCode
from simplan.model.layer import LayerKind, LayerSpec, ParameterSpec
from simplan.model.low_precision import Fp8Recipe
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan, Recompute
from simplan.plan.shard import Shard
from simplan.runs.run_spec import RunSpec

_Maker = Callable[[LayerRequest], nn.Module]

MODULES: dict[str, tuple[_Maker, _Maker, _Maker]] = {
    "gpt": (PositionEmbedding, gpt_block, Head),
    "llama": (Embedding, llama_block, Head),
    "neox": (Embedding, neox_block, Head),
    "gemma": (ScaledEmbedding, gemma_block, Head),
    "gemma2": (ScaledEmbedding, sandwich_block, CappedHead),
    "gemma3": (ScaledEmbedding, sandwich_block, Head),
    "mpt": (Embedding, mpt_block, Head),
    "bert": (BertEmbedding, bert_block, MaskedHead),
    "vit": (PatchEmbedding, gpt_block, ClassHead),
    "resnet": (ResNetStem, resnet_block, ResNetHead),
    "t5": (T5Embedding, t5_block, T5Head),
    "moe": (Embedding, moe_block, Head),
    "deepseek": (Embedding, deepseek_block, Head),
}
"""Builders of embedding, block and head, by family."""

_INIT_STD = 0.02  # GPT-2's
_SINGLE = ParallelDims()


class Stage(nn.Module):
    """Consecutive layers of a model.

    Attributes:
        layers: The modules of layers, by the index of their LayerSpec (as text).
        around_layers: Runs the layers instead of ``forward``, given each and its index; None for just running them.
        shared_tables: Tensors that layers share and that are no buffers of theirs.
    """

    around_layers: Callable[[Sequence[tuple[int, nn.Module]], Tensor], Tensor] | None
    shared_tables: Callable[[], Iterable[Tensor]]
    layers: nn.ModuleDict | dict[str, nn.Module]

    def __init__(self, layers: Iterable[tuple[int, nn.Module]]) -> None:
        super().__init__()
        self.around_layers, self.shared_tables = None, tuple
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers})

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Applies the layers in order; where layers hand on several tensors, they take a tuple and give one."""
        if self.around_layers is not None:
            (only,) = inputs
            return self.around_layers([(int(index), layer) for index, layer in self.layers.items()], only)
        x: Any = inputs if len(inputs) > 1 else inputs[0]
        for layer in self.layers.values():
            x = layer(x)
        passed: Tensor | tuple[Tensor, ...] = x
        return passed

    def with_specs(self, layers: Sequence[LayerSpec]) -> Iterator[tuple[str, nn.Parameter, ParameterSpec]]:
        """Parameters by name, each with its ParameterSpec; the stage may be sharded by FSDP.

        Args:
            layers: LayerSpecs of all layers of the model, as sharded on one rank.
        """
        for index, layer in self.layers.items():
            for (name, parameter), said in zip(layer.named_parameters(), layers[int(index)].parameters, strict=True):
                yield f"layers.{index}.{name}", parameter, said

    def joined(self, others: Sequence[Stage]) -> Stage:
        """All stages of a rank as one module, whose parameters have the names of the whole model.

        Args:
            others: The other stages of the rank.
        """
        if not others:
            return self
        return Stage((int(index), layer) for stage in (self, *others) for index, layer in stage.layers.items())


def build_stage(
    spec: ModelSpec,
    layer_range: Iterable[int],
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None,
    dims: ParallelDims = _SINGLE,
    recompute: Recompute = "none",
    *,
    recompute_layers: int | None = None,
    around_rerun: Around = nullcontext,
    fp8_recipe: Fp8Recipe | None = None,
    frozen_dtype: torch.dtype | None = None,
    base_weights: BaseWeights | None = None,
    fake_quantization: FakeQuantization | None = None,
    model_code: ModelCode = "framework",
    finish: Callable[[int, nn.Module], None] = lambda index, layer: None,
) -> Stage:
    """Builds a stage with weights that depend only on the seed and the layers' indices, not on the parallel split.

    A tied output head shares the embedding's tensor when both are in the stage; otherwise it has an equal copy.

    Args:
        seed: Seed of the weights; None for weights of each rank's own, drawn on its device.
        recompute: ``none``, ``selective`` (the attention core), ``selective_op`` (every block except some matmuls),
            ``full`` (every block) or ``selective_layer`` (every second block, from the second on).
        recompute_layers: Number of the stage's first blocks that ``recompute`` applies to; None for all blocks.
        fp8_recipe: Scaling recipe of the blocks' FP8 linear layers; None without FP8.
        frozen_dtype: Dtype of weights below adapters; None for ``dtype``, in which weights that are frozen alone stay.
        base_weights: Form of frozen matrices of few bits; None for ``frozen_dtype``.
        fake_quantization: Simulated quantization of linear layers; None for none.
        model_code: Origin of the modules: this package, or transformers.
        finish: Called with the index of every layer and the layer after its construction. Sharding a layer there keeps
            the device from ever storing an unsharded stage.
    """
    layer_range = list(layer_range)
    modes = {layer: of_block(recompute, number) for number, layer in enumerate(spec.block_indices())}
    here = [layer for layer in modes if layer in layer_range]
    modes |= dict.fromkeys(here[recompute_layers:] if recompute_layers is not None else (), "none")
    context = StageContext(spec, dims, device, dtype, recompute=recompute == "selective", around_rerun=around_rerun)
    router = (spec.hidden_size, spec.num_experts) if spec.num_experts else None
    layers: dict[int, nn.Module] = {}
    for index in layer_range:
        # tensors without data need no memory either; torch makes no batch norms of both kinds
        with device if active_fake_mode() else torch.device("meta"):
            layer = _maker(spec, index, model_code)(LayerRequest(spec, index, context))
            if spec.lora_rank:
                add_adapters(layer, spec.layers[index], spec.lora_dropout)
        split_experts(layer, dims)
        if dims.tp.mesh is not None:
            split_layer(layer, dims)
        _materialize(layer, device, dtype)
        _draw_weights(layer, spec, index, seed, dims)
        if spec.lora_rank or spec.frozen or spec.trains_nothing:
            freeze(layer, spec.layers[index], (frozen_dtype if spec.lora_rank else None) or dtype)
        if base_weights is not None:
            from executor.models.base_weights import quantize

            quantize(layer, spec.layers[index], base_weights)
        if fake_quantization is not None:
            from executor.models.fake_quantization import simulate  # an extra

            simulate(layer, spec.layers[index], fake_quantization)
        if dims.tp.mesh is not None and dims.dp.size > 1:
            with_local_weights(layer, dims.tp.mesh)
        if spec.layers[index].tied and index == len(spec.layers) - 1 and 0 in layers and hasattr(layer, "lm_head"):
            layer.get_submodule("lm_head").weight = layers[0].get_parameter("wte.weight")
        if spec.input_require_grads and index == 0:
            layer.register_forward_hook(_require_gradient)
        if fp8_recipe is not None:
            layer = with_fp8_linears(layer, spec.layers[index], fp8_recipe)
        recompute_block(layer, modes.get(index, "none"), around_rerun, router)
        layers[index] = layer
        finish(index, layer)
    stage = Stage(layers.items())
    stage.shared_tables = context.shared_tables
    return stage


def _require_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Makes autograd compute the gradient of a result, as ``enable_input_require_grads`` of transformers does."""
    output.requires_grad_()


def _maker(spec: ModelSpec, index: int, model_code: ModelCode) -> _Maker:
    """Function that builds a layer of a model."""
    if model_code == "transformers":
        from executor.models.transformers_models import make_layer  # an extra, and seconds to import

        return make_layer
    embedding, block, head = MODULES[spec.family]
    return {LayerKind.EMBEDDING: embedding, LayerKind.BLOCK: block, LayerKind.HEAD: head}[spec.layers[index].kind]


def split_dimensions(stage: Stage, job: RunSpec) -> dict[str, int]:
    """Parameter name -> first dimension along which ranks split the parameter, for the parameters of a stage."""
    if job.plan.shard == Shard():
        return {}
    whole = stage.with_specs(job.software.layers_of(job.model, ParallelPlan()))
    shapes = {name: said.shape for name, _, said in whole}
    return {
        name: next(dim for dim, size in enumerate(shapes[name]) if part.shape[dim] < size)
        for name, _, part in stage.with_specs(job.software.layers_of(job.model, job.plan))
        if shapes[name] != part.shape
    }


def own_weight(whole: Tensor, name: str, shard: Tensor, dims: ParallelDims) -> Tensor:
    """This rank's shard of a weight.

    Args:
        name: Name of the parameter inside its layer.
        shard: Tensor with the shape of the shard; dimensions smaller than in ``whole`` are split.
    """
    module = name.split(".")[-2] if "." in name else ""
    if module.startswith("experts_"):
        return own_experts(whole, module, dims)
    for dim, (size, part) in enumerate(zip(whole.shape, shard.shape, strict=True)):
        if part < size:
            whole = dims.own_part(whole, dim)
    return whole


def _materialize(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Allocates tensors on the meta device, as ``nn.Module.to_empty``; keeps existing tables and fake tensors."""

    def made(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device, dtype=dtype if tensor.is_floating_point() else None)

    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(made(parameter), requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, made(buffer))


def _draw_weights(layer: nn.Module, spec: ModelSpec, layer_index: int, seed: int | None, dims: ParallelDims) -> None:
    """Norms and magnitudes 1, biases and class tokens 0, matrices normal(0, 0.02), each whole one of its own generator.

    Adapters too, of which a training would begin with B = 0: no gradient of A would then say anything.
    """
    for module in layer.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    specs = spec.layers[layer_index].parameters
    for number, (name, parameter) in enumerate(layer.named_parameters()):
        source = (layer_index, number)
        if name == "lm_head.weight" and spec.layers[layer_index].tied:
            source = (0, 0)  # the embedding's wte.weight
        weight = parameter.detach()
        weight = weight.to_local() if isinstance(weight, DTensor) else weight
        if parameter.dim() == 1:
            weight.fill_(1.0 if name.endswith(("weight", "magnitude")) else 0.0)
        elif seed is None:
            weight.normal_(0.0, _INIT_STD)
        else:
            generator = torch.Generator().manual_seed((seed * 100_003 + source[0]) * 101 + source[1])
            # expert-parallel experts are not DTensors
            shape = specs[number].shape if ".experts_" in name else parameter.shape
            whole = torch.empty(shape).normal_(0.0, _INIT_STD, generator=generator)
            weight.copy_(own_weight(whole, name, weight, dims))
