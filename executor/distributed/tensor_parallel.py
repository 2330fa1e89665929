"""Tensor and sequence parallelism by torch's ``parallelize_module``: matrices split in pairs, by columns then by rows.

Shoeybi et al. 2019 (arXiv:1909.08053), section 3, and Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2. Hidden
states are (batch, tokens, hidden_size); with sequence parallelism ranks split dimension 1 between attention and MLP.
Norms and other parameters applied to local tokens stay plain tensors. torch's SequenceParallel would all-reduce each
of their gradients in every microbatch; ``executor.distributed.gradients`` reduces all of them together once per step
(``tests/executor/distributed/test_split_layers.py``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from executor.distributed.mesh import ParallelDims, Peers
from executor.models.lora import LoraLinear

_TOKENS = 1  # the dimension
_BY_ROWS = ("proj", "down")  # ends of names of matrices that are split by rows, transformers' among them
_COLUMNS, _ROWS = Shard(0), Shard(1)  # of a weight (outputs, inputs)


def split_layer(layer: nn.Module, dims: ParallelDims) -> None:
    """Splits the matrices of a layer over tensor-parallel ranks, in place.

    Args:
        layer: Layer with unsharded weights, which may be on the meta device.
    """
    modules = dict(layer.named_modules())
    plan = {name: style for name, style in _plan(modules, dims).items() if name in modules}
    parallelize_module(layer, dims.tp.mesh, plan, src_data_rank=None)
    for name in plan:
        if name.endswith(_BY_ROWS):
            layer.get_submodule(name).register_forward_hook(_wait)


def _plan(modules: dict[str, nn.Module], dims: ParallelDims) -> dict[str, ParallelStyle]:
    """Parallel style of every submodule of a layer, by its name in ``executor.models``."""
    tokens_placement: Placement = Shard(_TOKENS) if dims.splits_tokens else Replicate()
    gathered = PrepareModuleInput(input_layouts=(tokens_placement,), desired_input_layouts=(Replicate(),))

    def columns(*names: str, of: Placement | None = None) -> dict[str, ParallelStyle]:
        style = ColwiseParallel(input_layouts=of or Replicate())
        return {name: _with_adapters(style, modules.get(name)) for name in names}

    def rows(*names: str) -> dict[str, ParallelStyle]:
        return {
            name: _with_adapters(RowwiseParallel(output_layouts=tokens_placement), modules.get(name)) for name in names
        }

    plan: dict[str, ParallelStyle] = {"wte": VocabularyParallel(dims.tp.rank, tokens_placement)}
    plan |= columns("lm_head", "head", of=tokens_placement)
    if "block.self_attn" in modules:  # transformers' names
        before, after = ({"hidden_states": placement} for placement in (tokens_placement, Replicate()))
        by_name = PrepareModuleInput(input_kwarg_layouts=before, desired_input_kwarg_layouts=after)
        plan |= {"block.self_attn": by_name, "block.mlp": gathered}
        plan |= columns(*(f"block.self_attn.{name}_proj" for name in "qkv"))
        plan |= columns("block.mlp.gate_proj", "block.mlp.up_proj")
        return plan | rows("block.self_attn.o_proj", "block.mlp.down_proj")
    if "attention.kv_b" in modules:  # narrow vectors are gathered, not hidden states
        plan |= {"attention.shared_key": SharedByHeads(tokens_placement)}
        plan |= columns("attention.q", "attention.q_b", "attention.kv_b", of=tokens_placement)
    else:
        plan |= {"attention": gathered, **columns("attention.qkv", *(f"attention.{name}" for name in "qkv"))}
    mlp = "mlp.shared" if "mlp.router" in modules else "mlp"
    plan |= {mlp: gathered, **columns(f"{mlp}.gate", f"{mlp}.up")}
    return plan | rows("attention.proj", f"{mlp}.down")


def _wait(module: nn.Module, inputs: Any, output: Any) -> None:
    """Waits for a sum over ranks.

    torch waits when something is computed with it, and holds it for ever where a block that runs again ends before.
    """
    if isinstance(output, AsyncCollectiveTensor):
        output.trigger_wait()  # type: ignore[no-untyped-call]


class VocabularyParallel(ParallelStyle):
    """Vocabulary-parallel embedding: each rank looks up tokens (batch, tokens) in its part of the vocabulary.

    torch's RowwiseParallel of an embedding makes the gradient of the whole vocabulary on every rank
    (``tests/executor/distributed/test_split_layers.py``).

    Args:
        rank: Index of this rank among those that split the vocabulary.
        output_layouts: Layout of hidden states: local tokens, or all.
    """

    def __init__(self, rank: int, output_layouts: Placement) -> None:
        super().__init__()
        self._rank, self._output_layouts = rank, output_layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, "weight", device_mesh, Shard(0))
        assert isinstance(module, nn.Embedding)
        module.forward = partial(self._look_up, module, device_mesh)  # type: ignore[method-assign]
        return module

    def _look_up(self, embedding: nn.Embedding, mesh: DeviceMesh, tokens: Tensor) -> Tensor:
        weight = _local(embedding.weight)
        rows = tokens - self._rank * len(weight)
        foreign = (rows < 0) | (rows >= len(weight))
        x = functional.embedding(rows.masked_fill_(foreign, 0), weight)
        parts = _placed(x.masked_fill_(foreign.unsqueeze(-1), 0.0), Partial(), mesh)
        return parts.redistribute(placements=(self._output_layouts,)).to_local()


class SharedByHeads(ParallelStyle):
    """All tokens of a tensor (batch, tokens, k) that every head needs; gradients are summed over ranks.

    Args:
        input_layouts: Layout of the tensor: local tokens, or all.
    """

    def __init__(self, input_layouts: Placement) -> None:
        super().__init__()
        self._input_layouts = input_layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda module, inputs, x: self._gathered(x, device_mesh))
        return module

    def _gathered(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        whole = _placed(x, self._input_layouts, mesh).redistribute(placements=(Replicate(),))
        return whole.to_local(grad_placements=(Partial(),))


class _AdaptedParallel(ParallelStyle):
    """A linear layer with LoRA adapters, one of which is split as the matrix is; adapter gradients stay partial."""

    def __init__(self, style: ColwiseParallel | RowwiseParallel) -> None:
        super().__init__()
        self._style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, LoraLinear)
        a, b = module.lora_a, module.lora_b
        del module.lora_a, module.lora_b  # torch's style takes all parameters below a linear layer for its own
        self._style.src_data_rank = None
        self._style._apply(module, device_mesh)
        split = _COLUMNS if isinstance(self._style, ColwiseParallel) else _ROWS
        _distribute(b if split is _COLUMNS else a, "weight", device_mesh, split)
        module.lora_a, module.lora_b = a, b
        module.forward = partial(_matmul, module, split, device_mesh)  # type: ignore[method-assign]
        return module


def _with_adapters(style: ColwiseParallel | RowwiseParallel, linear: nn.Module | None) -> ParallelStyle:
    return _AdaptedParallel(style) if isinstance(linear, LoraLinear) else style


def with_local_weights(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Replaces DTensor weights by plain tensors of this rank's shards, in place.

    DDP and ZeroRedundancyOptimizer do not accept DTensors. torch's own workaround makes DTensors only during forward
    (``torch.distributed.tensor.parallel.ddp``), so they are missing when backward recomputes a block.

    Args:
        layer: Layer, split by ``split_layer``.
    """
    for module in list(layer.modules()):
        placed = {name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
        if isinstance(module, nn.Linear) and placed and "forward" not in vars(module):
            split = placed["weight"].placements[0]
            module.forward = partial(_matmul, module, split, mesh)  # type: ignore[method-assign]
        for name, parameter in placed.items():
            part = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
            module.register_parameter(name, part)


def _matmul(linear: nn.Linear, split: Placement, mesh: DeviceMesh, x: DTensor) -> DTensor:
    """Output of a tensor-parallel linear layer, whose weights are DTensors or local shards."""
    weight = _as_placed(linear.weight, split, mesh)
    bias = None
    if linear.bias is not None:
        bias = _as_placed(linear.bias, _COLUMNS if split == _COLUMNS else Replicate(), mesh)
    output: Any = functional.linear(x, weight, bias)
    if isinstance(linear, LoraLinear):
        by_columns = split == _COLUMNS
        inputs = x.to_local(grad_placements=(Partial(),) if by_columns else x.placements)
        placements = output.placements if by_columns else (Replicate(),)  # all ranks have the gradient of a sum
        narrow = functional.linear(linear.dropped(inputs), _local(linear.lora_a.weight))
        adapted = linear.adapted(output.to_local(grad_placements=placements), narrow, _local(linear.lora_b.weight))
        output = DTensor.from_local(adapted, output.device_mesh, output.placements, run_check=False)
    return output  # type: ignore[no-any-return]


def gather_parts(x: Tensor, peers: Peers, dim: int = _TOKENS) -> Tensor:
    """All-gather along a dimension; in backward each rank gets the sum of the gradients of its part."""
    whole = _placed(x, Shard(dim), peers.mesh).redistribute(placements=(Replicate(),))
    return whole.to_local(grad_placements=(Partial(),))


def scatter_sum(x: Tensor, tp: Peers) -> Tensor:
    """Reduce-scatter along dimension 1; backward all-gathers the gradients."""
    return _placed(x, Partial(), tp.mesh).redistribute(placements=(Shard(_TOKENS),)).to_local()


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    parameter = module.get_parameter(name)
    placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def _as_placed(weight: Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    return weight if isinstance(weight, DTensor) else _placed(weight, placement, mesh)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _placed(x: Tensor, placement: Placement, mesh: DeviceMesh | None) -> DTensor:
    return DTensor.from_local(x, mesh, (placement,), run_check=False)
