"""Times the layers of a model one by one, in the state in which a training step finds them.

In a step a layer runs after others, so its weights are not in the processor's caches, and its backward adds to
gradients that exist. So a few copies of a layer take turns, each timed alone, forward in order and backward in
reverse, until they together are larger than any cache. Weights cast to half precision (FSDP's) get new gradients from
every backward, and the optimizer updates fp32 copies of them. Every second round does it all again with backward in
two parts, as torch's pipelines run it: the first part of all copies in reverse, then the second of all in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from executor.calibration.timing import TIMED_DTYPES, Stopwatch, sample_of, together
from executor.distributed.mesh import ParallelDims, Peers
from executor.distributed.precision import Autocast
from executor.models.lora import trained_parameters
from executor.models.model import build_stage
from executor.train.data import model_batch
from executor.train.loss import cross_entropy, split_loss
from executor.train.optimizers import divide_gradients, make_optimizer, zero_gradients
from simplan.cost.calibration import LayerTiming, Sample, ShapeRequest, way_of_mixing
from simplan.spec.layer import LayerKind

__all__ = ["FsdpBench", "time_layers"]

_CACHE_BYTES = 128 * 2**20
_MOST_COPIES = 12
_SCALE = 3


def time_layers(
    shape: ShapeRequest, num_ranks: int, device: torch.device, keep_going: Callable[[int], bool]
) -> list[LayerTiming]:
    """Times every layer of one model that differs from those before it.

    Args:
        shape: Which model, what a rank has of it, at which microbatch size and precision.
        num_ranks: Ranks that do this at the same time.
        device: Where.
        keep_going: Asked before each round with the number of rounds done; the same answer on all ranks.
    """
    first_of_key: dict[str, int] = {}
    for index, layer in enumerate(shape.layers):
        first_of_key.setdefault(layer.key, index)
    benches = [_LayerBench(shape, index, device) for index in first_of_key.values()]
    for bench in benches:
        bench.round(with_split=True)  # warm-up, not counted
        bench.forget()
    done = 0
    while keep_going(done):
        together()
        for bench in benches:
            bench.round(with_split=done % 2 == 0)
        done += 1
    return [bench.timing(num_ranks) for bench in benches]


class _LayerBench:
    """Copies of one layer and their timings."""

    def __init__(self, shape: ShapeRequest, index: int, device: torch.device) -> None:
        layers = shape.layers
        layer = layers[index]
        self._shape, self._layer = shape, layer
        self._parallel = ParallelDims.silent(shape.shard, device.type)
        self._watch = Stopwatch(device)
        self._mixed = way_of_mixing(shape.dtype, sharded=shape.mixed == "cast")
        autocast = shape.dtype in ("bf16", "fp16", "fp8") and self._mixed == "autocast"
        dtype = torch.float32 if autocast else TIMED_DTYPES[shape.dtype]
        saved = sum(tensor.elements * (tensor.bytes_per_element or dtype.itemsize) for tensor in layer.saved)
        footprint = 2 * layer.num_parameters * dtype.itemsize + saved * shape.microbatch_size
        repeats = Counter(layers)[layer]
        num_copies = min(_MOST_COPIES, repeats, 1 + _CACHE_BYTES // max(1, footprint))
        frozen = TIMED_DTYPES[shape.dtype]
        stages = [
            build_stage(
                shape.model,
                [index],
                dtype,
                device,
                seed,
                self._parallel,
                fp8=shape.dtype == "fp8",
                frozen_dtype=frozen,
                model_code=shape.model_code,
            )
            for seed in range(num_copies)
        ]
        if shape.compiled:
            from executor.distributed.compiling import compile_blocks

            for stage in stages:
                compile_blocks(stage, shape.model, whole=shape.shard.tp * shape.shard.cp == 1)
        self._copies: list[nn.Module] = [*stages]
        weights = [parameter for copy in self._copies for parameter in trained_parameters(copy)]
        # what the optimizer updates: the weights themselves, or the fp32 copies that they were cast from
        self._masters = weights if self._mixed == "autocast" else [nn.Parameter(w.detach().float()) for w in weights]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._optimizer = make_optimizer(shape.optimizer, self._masters) if self._masters else None
        compute_dtype = dtype if self._mixed == "cast" else None
        parts = replace(self._parallel, dp=Peers(2))  # weights as DDP has them: no DTensors, which have another mesh
        self._sharded = [
            FsdpBench(
                build_stage(
                    shape.model,
                    [index],
                    torch.float32,
                    device,
                    seed,
                    parts,
                    frozen_dtype=compute_dtype,
                    model_code=shape.model_code,
                ),
                compute_dtype,
                device,
            )
            for seed in range(num_copies)
        ]
        if autocast:
            self._copies = [Autocast(copy, TIMED_DTYPES[shape.dtype], device.type) for copy in self._copies]
        batch = model_batch(shape.model, seed=0, step=0, first_sample=0, num_samples=shape.microbatch_size)
        inputs, self._targets = (self._parallel.local_tokens(x).to(device) for x in batch)
        self._first_input = inputs.to(dtype) if inputs.is_floating_point() else inputs
        self._given: list[Tensor] = []  # what the layer before gives, if there is one
        self._gives_gradients = index > 0
        if index:
            before = layers[index - 1]
            # nothing below of a frozen embedding is trained
            self._gives_gradients = before.kind is not LayerKind.EMBEDDING or before.num_trained > 0
            for number, given in enumerate(before.output_shapes):
                narrow = number in before.product_outputs or shape.model.lora_rank
                width = frozen if narrow else dtype
                self._given.append(torch.randn(shape.microbatch_size, *given, device=device, dtype=width))
        self._seconds: dict[str, list[float]] = {}
        self.forget()

    def forget(self) -> None:
        """Drops the timings so far."""
        self._seconds = {"forward": [], "backward": [], "backward_input": [], "backward_weight": []}
        self._seconds |= {"optimizer": [], "scale": [], "gather_copy": [], "reduce_copy": []}

    def round(self, *, with_split: bool) -> None:
        """Forward of every copy, backward of every copy in reverse, FSDP's part, then their optimizer.

        Args:
            with_split: Forward and backward also once with backward in two parts.
        """
        with split_loss(self._parallel):
            self._backward()
            if with_split and self._gives_gradients and not (self._shape.model.lora_rank or self._shape.compiled):
                self._split_backward()
        for copy in self._copies:
            if self._mixed == "cast":
                copy.zero_grad(set_to_none=True)
        for sharded in self._sharded:
            gather_s, reduce_s = sharded.round()
            self._seconds["gather_copy"].append(gather_s)
            self._seconds["reduce_copy"].append(reduce_s)
        share = 1 / len(self._copies)
        self._seconds["scale"].append(share * self._watch(self._scale))
        self._seconds["optimizer"].append(share * self._watch(self._optimize))

    def _backward(self) -> None:
        """Forward and backward of every copy."""
        inputs, outputs = self._forwards()
        gradients = [_gradients(y) for y in outputs]

        def calls() -> Iterator[Callable[[], object]]:
            while outputs:
                y, gradient = outputs.pop(), gradients.pop()
                run = torch.autograd.backward if y[0].requires_grad else _no_backward
                yield partial(run, y, gradient)
                del y, gradient, run
                inputs.pop()

        self._seconds["backward"] += self._watch.each(calls())

    def _split_backward(self) -> None:
        """The same with the gradients of activations of every copy before the gradients of weights of any."""
        inputs, outputs = self._forwards()
        left: list[list[dict[str, Any]]] = []
        gradients = [_gradients(y) for y in outputs]

        def first_parts() -> Iterator[Callable[[], object]]:
            for copy in reversed(self._copies):
                yield partial(self._backward_input, copy, inputs.pop(), outputs.pop(), gradients.pop(), left)

        def second_parts() -> Iterator[Callable[[], object]]:
            for copy in self._copies:
                yield partial(stage_backward_weight, copy.parameters(), left.pop())

        self._seconds["backward_input"] += self._watch.each(first_parts())
        self._seconds["backward_weight"] += self._watch.each(second_parts())

    def _forwards(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Inputs and outputs of all copies."""
        inputs = [self._input() for _ in self._copies]
        outputs: list[list[Tensor]] = []
        calls = (partial(self._forward, copy, x, outputs) for copy, x in zip(self._copies, inputs, strict=True))
        self._seconds["forward"] += self._watch.each(calls)
        return inputs, outputs

    def timing(self, num_ranks: int) -> LayerTiming:
        """The timings of all ranks as one record."""
        return LayerTiming(
            key=self._layer.key,
            microbatch_size=self._shape.microbatch_size,
            dtype=self._shape.dtype,
            mixed=self._mixed,
            num_ranks=num_ranks,
            optimizer=self._shape.optimizer,
            forward_s=sample_of(self._seconds["forward"], len(self._copies)),
            backward_s=sample_of(self._seconds["backward"], len(self._copies)),
            backward_input_s=self._split_sample("backward_input"),
            backward_weight_s=self._split_sample("backward_weight"),
            optimizer_s=sample_of(self._seconds["optimizer"]),
            scale_s=sample_of(self._seconds["scale"]),
            gather_copy_s=sample_of(self._seconds["gather_copy"], len(self._sharded)),
            reduce_copy_s=sample_of(self._seconds["reduce_copy"], len(self._sharded)),
        )

    def _split_sample(self, part: str) -> Sample | None:
        return sample_of(self._seconds[part], len(self._copies)) if self._seconds[part] else None

    def _input(self) -> list[Tensor]:
        return [x.clone().requires_grad_(self._gives_gradients) for x in self._given] or [self._first_input]

    def _forward(self, copy: nn.Module, x: list[Tensor], outputs: list[list[Tensor]]) -> None:
        y: Tensor | tuple[Tensor, ...] = copy(*x)
        if self._layer.kind is LayerKind.HEAD:
            assert isinstance(y, Tensor)
            y = cross_entropy(y, self._targets, self._parallel)
        outputs.append([y] if isinstance(y, Tensor) else list(y))

    def _backward_input(
        self,
        copy: nn.Module,
        x: list[Tensor],
        y: list[Tensor],
        gradients: list[Tensor] | None,
        left: list[list[dict[str, Any]]],
    ) -> None:
        left.append(stage_backward_input(y, gradients, x, copy.parameters())[1])

    def _scale(self) -> None:
        divide_gradients(self._masters, _SCALE)

    def _optimize(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
            zero_gradients(self._masters)


def _no_backward(outputs: list[Tensor], gradients: list[Tensor] | None) -> None:
    """Of a layer in which nothing is trained, nor below it."""


def _gradients(outputs: list[Tensor]) -> list[Tensor] | None:
    """Of the outputs of a layer; a loss has none."""
    return None if outputs[0].dim() == 0 else [torch.randn_like(y) for y in outputs]


class FsdpBench:
    """One layer's weights, sharded.

    Args:
        layer: The layer, whose parameters are fp32; it is sharded in place.
        compute_dtype: What they are cast to before they are gathered; None for nothing.
        device: Where they are.
    """

    def __init__(self, layer: nn.Module, compute_dtype: torch.dtype | None, device: torch.device) -> None:
        mesh = DeviceMesh.from_group(_world(), device.type, mesh_dim_names=("shard",))
        policy = MixedPrecisionPolicy()
        if compute_dtype is not None:
            policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        unit = _Untouched(layer)
        sharded = fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        sharded.set_custom_all_gather(_NothingGathered())
        sharded.set_custom_reduce_scatter(_NothingReduced())
        # the outermost unit has duties of its own; in a model it is not a layer
        self._root: nn.Module = nn.Sequential(unit)
        fully_shard(self._root, mesh=mesh, mp_policy=policy)
        self._watch = Stopwatch(device)
        self._input = torch.zeros(1, device=device, requires_grad=True)

    def round(self) -> tuple[float, float]:
        """Seconds around one all-gather and one reduce-scatter."""
        outputs: list[Tensor] = []
        gather_s = self._watch(lambda: outputs.append(self._root(self._input)))
        reduce_s = self._watch(outputs.pop().backward)
        return gather_s, reduce_s


class _Untouched(nn.Module):
    """Has a layer's parameters, and makes gradients for them without computing them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The input."""
        out: Tensor = _Passed.apply(x, *self.layer.parameters())  # type: ignore[no-untyped-call]
        return out


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (gradients[0], *(torch.empty_like(parameter) for parameter in ctx.saved_tensors))


class _NothingGathered(DefaultAllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        return None


class _NothingReduced(DefaultReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        return None


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
