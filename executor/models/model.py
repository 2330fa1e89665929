"""The modules of a model, built from its ModelSpec: same parameters, kernels and saved tensors as its LayerSpecs say.

A stage is a plain sequence of layers, whole or as one rank of ``ParallelDims`` has them. The embedding takes the rank's
tokens (batch, tokens) int64, blocks take and give hidden states (batch, own tokens, hidden_size), the head gives logits
(batch, tokens, own part of the vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from executor.distributed.mesh import ParallelDims
from executor.distributed.recompute import Around, of_block
from executor.distributed.tensor_parallel import split_parameters
from executor.models.attention_cores import Attentions
from executor.models.blocks import (
    BertBlock,
    Gemma2Block,
    GptBlock,
    LayerRequest,
    LlamaBlock,
    MptBlock,
    NeoxBlock,
    Rotary,
)
from executor.models.ends import (
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
from executor.train.loss import cross_entropy
from simplan.spec.layer import LayerKind
from simplan.spec.layer_style import ModelCode
from simplan.spec.low_precision import Fp8Recipe
from simplan.spec.model import ModelSpec
from simplan.spec.plan import Recompute
from simplan.spec.shard import Shard

__all__ = ["FAMILY_MODULES", "MODULES", "Stage", "build_stage", "cross_entropy", "own_weights", "split_dimensions"]

MODULES: Mapping[str, Mapping[LayerKind, Callable[[LayerRequest], nn.Module]]] = {
    "gpt": {LayerKind.EMBEDDING: PositionEmbedding, LayerKind.BLOCK: GptBlock, LayerKind.HEAD: Head},
    "llama": {LayerKind.EMBEDDING: Embedding, LayerKind.BLOCK: LlamaBlock, LayerKind.HEAD: Head},
    "neox": {LayerKind.EMBEDDING: Embedding, LayerKind.BLOCK: NeoxBlock, LayerKind.HEAD: Head},
    "gemma2": {LayerKind.EMBEDDING: ScaledEmbedding, LayerKind.BLOCK: Gemma2Block, LayerKind.HEAD: CappedHead},
    "mpt": {LayerKind.EMBEDDING: Embedding, LayerKind.BLOCK: MptBlock, LayerKind.HEAD: Head},
    "bert": {LayerKind.EMBEDDING: BertEmbedding, LayerKind.BLOCK: BertBlock, LayerKind.HEAD: MaskedHead},
    "vit": {LayerKind.EMBEDDING: PatchEmbedding, LayerKind.BLOCK: GptBlock, LayerKind.HEAD: ClassHead},
}
"""What runs the layers of a family, by their kind."""

FAMILY_MODULES = {"resnet": "resnet", "t5": "t5", "moe": "moe", "deepseek": "mla"}
"""Modules of this package whose ``LAYERS`` are what runs the layers of the other families."""

_INIT_STD = 0.02  # GPT-2's
_SINGLE = ParallelDims()


class Stage(nn.Module):
    """Consecutive layers of a model.

    Attributes:
        layers: The modules, by the index of their LayerSpec (as text).
        around_layers: Runs the layers instead of ``forward``, given each and its index; None for just running them.
    """

    around_layers: Callable[[Sequence[tuple[int, nn.Module]], Tensor], Tensor] | None

    def __init__(self, layers: Iterable[tuple[int, nn.Module]]) -> None:
        super().__init__()
        self.around_layers = None
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers})

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Applies the layers in order; where layers hand on several tensors, they take a tuple and give one."""
        if self.around_layers is not None:
            (only,) = inputs
            return self.around_layers([(int(index), layer) for index, layer in self.layers.items()], only)
        x: Any = inputs if len(inputs) > 1 else inputs[0]
        for layer in self.layers.values():
            x = layer(x)
        given: Tensor | tuple[Tensor, ...] = x
        return given


def build_stage(
    spec: ModelSpec,
    layer_range: Iterable[int],
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None,
    parallel: ParallelDims = _SINGLE,
    recompute: Recompute = "none",
    *,
    recompute_layers: int | None = None,
    around_rerun: Around = nullcontext,
    fp8_recipe: Fp8Recipe | None = None,
    frozen_dtype: torch.dtype | None = None,
    model_code: ModelCode = "framework",
    finish: Callable[[int, nn.Module], None] = lambda index, layer: None,
) -> Stage:
    """A stage with its weights, which depend on the seed and the layers' indices only, not on how layers are split.

    A tied output head shares the embedding's tensor when both are in the stage, else it holds an equal copy.

    Args:
        spec: The model.
        layer_range: Indices of its layers.
        dtype: Of weights.
        device: Where they are.
        seed: Of the weights; None where any will do, which are then made on the device at once.
        parallel: Which part of each layer this rank has.
        recompute: ``none``, ``selective`` (the attention core), ``selective_op`` (every block but for some products),
            ``full`` (every block) or ``selective_layer`` (every second one, the first not).
        recompute_layers: Of how many of these blocks, the first ones; None of all.
        around_rerun: Is entered around every second forward.
        fp8_recipe: Scaling of linear layers of blocks in FP8; None where they are not in FP8.
        frozen_dtype: Of weights that are not trained; None for the same.
        model_code: Whose modules: this package's, or those of transformers.
        finish: Called with the index of every layer and the layer as soon as it is there: to shard it before the next
            one is made, so that a stage need never be whole on the device.
    """
    modes = {layer: of_block(recompute, number) for number, layer in enumerate(spec.block_indices())}
    here = [layer for layer in modes if layer in layer_range]
    modes |= dict.fromkeys(here[recompute_layers:] if recompute_layers is not None else (), "none")
    attentions = Attentions(spec, parallel, device, recompute=recompute == "selective", around_rerun=around_rerun)
    split = split_dimensions(spec, parallel.shard) if parallel.tp.size > 1 else {}
    layers: dict[int, nn.Module] = {}
    tables: tuple[Tensor, Tensor] | None = None
    for index in layer_range:
        make = _maker(spec, index, model_code)
        with nullcontext() if seed is not None else device:
            layer = make(LayerRequest(spec, index, parallel, attentions, modes.get(index, "none"), around_rerun))
            add_adapters(layer, spec.layers[index], spec.lora_rank)
        if seed is not None:
            _draw_weights(layer, spec, index, seed, parallel)
        if any(not _is_there(tensor, device, dtype) for tensor in (*layer.parameters(), *layer.buffers())):
            layer = layer.to(device=device, dtype=dtype)
        freeze(layer, spec.layers[index], frozen_dtype or dtype)
        if isinstance(layer, Rotary):  # one pair of tables per stage
            layer.cos, layer.sin = tables = tables or (layer.cos, layer.sin)
        if spec.tied_embeddings and index == len(spec.layers) - 1 and 0 in layers and hasattr(layer, "lm_head"):
            layer.get_submodule("lm_head").weight = layers[0].get_parameter("wte.weight")
        if parallel.tp.mesh is not None and parallel.dp.size == 1:  # DDP and ZeRO-1 take no DTensors
            split_parameters(layer, _weights_of(layer, f"layers.{index}.", split), parallel)
        if fp8_recipe is not None:
            from executor.distributed.low_precision import with_fp8_linears

            layer = with_fp8_linears(layer, spec.layers[index], fp8_recipe)
        layers[index] = layer
        finish(index, layers[index])
    return Stage(layers.items())


def _maker(spec: ModelSpec, index: int, model_code: ModelCode) -> Callable[[LayerRequest], nn.Module]:
    """What makes a layer of a model."""
    if model_code == "transformers":
        from executor.models.transformers_models import make_layer  # an extra, and seconds to import

        return make_layer
    layers = MODULES.get(spec.family)
    if layers is None:
        layers = import_module(f"executor.models.{FAMILY_MODULES[spec.family]}").LAYERS
    return layers[spec.layers[index].kind]


def split_dimensions(spec: ModelSpec, shard: Shard) -> dict[str, int]:
    """By name in a stage, the dimension along which tensor-parallel ranks split a parameter; experts aside.

    Args:
        spec: The model.
        shard: How its layers are split.
    """
    found = {}
    for index, (whole, split) in enumerate(zip(spec.layers, spec.layers_of(shard), strict=True)):
        for before, after in zip(whole.parameters, split.parameters, strict=True):
            if before.shape != after.shape and not after.expert:
                dimension = next(dim for dim, size in enumerate(before.shape) if after.shape[dim] < size)
                found[f"layers.{index}.{after.name}"] = dimension
    return found


def _weights_of(layer: nn.Module, prefix: str, split: Mapping[str, int]) -> dict[str, int]:
    """Those of linear layers and embeddings, by name in the layer; adapters stay plain tensors."""
    kinds = nn.Linear | nn.Embedding
    return {
        name: split[f"{prefix}{name}"]
        for name, _ in layer.named_parameters(remove_duplicate=False)
        if f"{prefix}{name}" in split
        and ".lora_" not in name
        and isinstance(layer.get_submodule(name.rpartition(".")[0]), kinds)
    }


def _is_there(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it need not be moved or cast; tensors without data can be neither."""
    return tensor.device == device and (tensor.dtype is dtype or not tensor.is_floating_point())


def own_weights(whole: Tensor, name: str, shape: tuple[int, ...], spec: ModelSpec, parallel: ParallelDims) -> Tensor:
    """This rank's part of a weight.

    Args:
        whole: All of it.
        name: Of the parameter inside its layer.
        shape: Of the part: it is split along the dimension where this is smaller.
        spec: The model.
        parallel: The ranks.
    """
    for dim, (size, part) in enumerate(zip(whole.shape, shape, strict=True)):
        if part < size:
            if name.startswith("qkv."):  # each rank has some heads of all three
                kv = spec.num_key_value_heads * spec.head_dim
                parts = torch.split(whole, [size - 2 * kv, kv, kv], dim)
            else:
                parts = (whole,)
            peers = parallel.ep if name.startswith("experts_") and dim == 0 else parallel.tp
            whole = torch.cat([x.chunk(peers.size, dim)[peers.rank] for x in parts], dim)
    return whole


def _draw_weights(layer: nn.Module, spec: ModelSpec, layer_index: int, seed: int, parallel: ParallelDims) -> None:
    """Norms 1, biases and class tokens 0, matrices normal(0, 0.02), each whole tensor from its own generator.

    Adapters too, of which a training would begin with B = 0: no gradient of A would then say anything.
    """
    for number, (name, parameter) in enumerate(layer.named_parameters()):
        source = (layer_index, number)
        if name == "lm_head.weight" and spec.tied_embeddings:
            source = (0, 0)  # the embedding's wte.weight
        with torch.no_grad():
            if parameter.dim() > 1:
                generator = torch.Generator().manual_seed((seed * 100_003 + source[0]) * 101 + source[1])
                # modules of transformers, which are never split, have other matrices
                is_whole = parallel.shard == Shard()
                shape = parameter.shape if is_whole else spec.layers[layer_index].parameters[number].shape
                whole = parameter.new_empty(shape)
                whole.normal_(0.0, _INIT_STD, generator=generator)
                parameter.copy_(own_weights(whole, name, tuple(parameter.shape), spec, parallel))
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
