"""Times the layers of a model separately, in the state in which a training step finds them.

In a step a layer runs after others, so its weights are not in the processor's caches, and its backward accumulates into
existing gradients. Therefore a few copies of a layer alternate, forward in order and backward in reverse, until they
together are larger than any cache. Weights cast to half precision (FSDP's) get new gradients from every backward, and
the optimizer updates FP32 copies of them. Every second round repeats this with backward in two parts, as torch's
pipelines run it: the first part of all copies in reverse, then the second part of all copies in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
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

from executor.calibration.timing import TIMED_DTYPES, Bench, Stopwatch, sample_of, together
from executor.distributed.gradients import divide_gradients, zero_gradients
from executor.distributed.mesh import ParallelDims, Peers
from executor.distributed.precision import Autocast
from executor.models.embedding_and_head import OutputHead
from executor.models.lora import trained_parameters
from executor.models.model import Stage, build_stage
from executor.train.data import model_batch
from executor.train.loss import cross_entropy, loss_in_chunks, split_loss
from executor.train.optimizers import make_optimizer
from simplan.cost.calibration.format import LayerTiming, Mixed, Sample, ShapeRequest, way_of_mixing
from simplan.model.layer import LayerKind

_CACHE_BYTES = 128 * 2**20
_MAX_COPIES = 12
_SCALE = 3
_Loss = Callable[[Tensor, Tensor], Tensor]


def time_layers(shape: ShapeRequest, bench: Bench) -> list[LayerTiming]:
    """Times every different layer of one model."""
    first_of_key: dict[str, int] = {}
    for index, layer in enumerate(shape.layers):
        first_of_key.setdefault(layer.key, index)
    layers = [_LayerBench(shape, index, bench.device) for index in first_of_key.values()]
    for layer_bench in layers:
        layer_bench.round(with_split=True)  # warm-up
        layer_bench.seconds.clear()
    done = 0
    while bench.keep_going(done):
        together()
        for layer_bench in layers:
            layer_bench.round(with_split=done % 2 == 0)
        done += 1
    return [layer_bench.timing(bench.num_ranks) for layer_bench in layers]


class _LayerBench:
    """Copies of one layer and their timings.

    Attributes:
        seconds: Timings by name, a list for every field of ``LayerTiming`` without its unit.
    """

    def __init__(self, shape: ShapeRequest, index: int, device: torch.device) -> None:
        layers = shape.layers
        layer = layers[index]
        self._shape, self._layer = shape, layer
        self._dims = ParallelDims.silent(shape.shard, device.type)
        self._watch = Stopwatch(device)
        self._mixed = way_of_mixing(shape.dtype, sharded=shape.mixed == "cast")
        autocast = shape.dtype in ("bf16", "fp16", "fp8") and self._mixed == "autocast"
        compute_dtype = TIMED_DTYPES[shape.dtype]
        dtype = torch.float32 if autocast else compute_dtype
        saved = sum(tensor.elements * (tensor.bytes_per_element or dtype.itemsize) for tensor in layer.saved)
        footprint = 2 * layer.num_parameters * dtype.itemsize + saved * shape.microbatch_size
        num_copies = min(_MAX_COPIES, Counter(layers)[layer], 1 + _CACHE_BYTES // max(1, footprint))

        def copies(weights: torch.dtype, dims: ParallelDims, **options: Any) -> list[Stage]:
            build = partial(build_stage, shape.model, [index], weights, device, dims=dims)
            return [build(seed=seed, model_code=shape.model_code, **options) for seed in range(num_copies)]

        recipe = shape.fp8_recipe if shape.dtype == "fp8" else None
        packed = shape.base_weights
        stages = copies(dtype, self._dims, fp8_recipe=recipe, frozen_dtype=compute_dtype, base_weights=packed)
        if shape.compiled:
            from executor.distributed.compiling import compile_blocks

            for stage in stages:
                compile_blocks(stage, shape.model, whole=shape.shard.tp * shape.shard.cp == 1)
        self._copies: list[nn.Module] = [*stages]
        self._losses = [self._loss(stage, compute_dtype if autocast else None, device) for stage in stages]
        weights = [parameter for copy in self._copies for parameter in trained_parameters(copy)]
        # the optimizer updates the weights themselves, or the FP32 copies that they were cast from
        self._masters = weights if self._mixed == "autocast" else [nn.Parameter(w.detach().float()) for w in weights]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._optimizer = make_optimizer(shape.optimizer, self._masters) if self._masters else None
        cast = dtype if self._mixed == "cast" else None
        parts = replace(self._dims, dp=Peers(2))  # weights as DDP has them: no DTensors, which have another mesh
        self._sharded = [FsdpCopies(layer, cast, device) for layer in copies(torch.float32, parts, frozen_dtype=cast)]
        if autocast:
            self._copies = [Autocast(copy, compute_dtype, device.type) for copy in self._copies]
        batch = model_batch(shape.model, seed=0, step=0, first_sample=0, num_samples=shape.microbatch_size)
        inputs, self._targets = (self._dims.local_tokens(x).to(device) for x in batch)
        self._first_input = inputs.to(dtype) if inputs.is_floating_point() else inputs
        self._layer_inputs: list[Tensor] = []  # outputs of the layer before, if there is one
        self._has_input_gradients = index > 0
        if index:
            before = layers[index - 1]
            # a frozen embedding needs no gradients of its outputs
            self._has_input_gradients = before.kind is not LayerKind.EMBEDDING or before.num_trained > 0
            for number, sizes in enumerate(before.output_shapes):
                narrow = number in before.matmul_dtype_outputs or shape.model.lora_rank
                output_dtype = compute_dtype if narrow else dtype
                self._layer_inputs.append(torch.randn(shape.microbatch_size, *sizes, device=device, dtype=output_dtype))
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def round(self, *, with_split: bool) -> None:
        """Times forward of every copy, backward of every copy in reverse, FSDP's copies, then the optimizer.

        Args:
            with_split: Forward and backward also with backward in two parts.
        """
        with split_loss(self._dims):
            self._backward()
            if with_split and self._has_input_gradients and self._can_be_split:
                self._split_backward()
        for copy in self._copies:
            if self._mixed == "cast":
                copy.zero_grad(set_to_none=True)
        for sharded in self._sharded:
            gather_s, reduce_s = sharded.seconds(self._watch)
            self.seconds["gather_copy"].append(gather_s)
            self.seconds["reduce_copy"].append(reduce_s)
        share = 1 / len(self._copies)
        self.seconds["scale"].append(share * self._watch(divide_gradients, self._masters, _SCALE))
        self.seconds["optimizer"].append(share * self._watch(self._optimize))

    @property
    def _can_be_split(self) -> bool:
        """True if a schedule may split the backward."""
        chunked = self._shape.chunked_loss
        recomputed = chunked is not None and chunked.recomputed
        return not (self._shape.model.lora_rank or self._shape.compiled or recomputed)

    def _backward(self) -> None:
        """Times forward and backward of every copy."""
        inputs, outputs = self._forwards()
        gradients = [_gradients(y) for y in outputs]

        def calls() -> Iterator[Callable[[], object]]:
            while outputs:
                y, gradient = outputs.pop(), gradients.pop()
                run = torch.autograd.backward if y[0].requires_grad else _no_backward
                yield partial(run, y, gradient)
                del y, gradient, run
                inputs.pop()

        self.seconds["backward"] += self._watch.each(calls())

    def _split_backward(self) -> None:
        """Times a split backward: input gradients of all copies, then weight gradients of all copies."""
        inputs, outputs = self._forwards()
        left: list[list[dict[str, Any]]] = []
        gradients = [_gradients(y) for y in outputs]

        def backward_input(copy: nn.Module, y: list[Tensor], gradient: list[Tensor] | None, x: list[Tensor]) -> None:
            left.append(stage_backward_input(y, gradient, x, copy.parameters())[1])

        def first_parts() -> Iterator[Callable[[], object]]:
            for copy in reversed(self._copies):
                yield partial(backward_input, copy, outputs.pop(), gradients.pop(), inputs.pop())

        def second_parts() -> Iterator[Callable[[], object]]:
            for copy in self._copies:
                yield partial(stage_backward_weight, copy.parameters(), left.pop())

        self.seconds["backward_input"] += self._watch.each(first_parts())
        self.seconds["backward_weight"] += self._watch.each(second_parts())

    def _forwards(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Times forward of every copy; returns the inputs and outputs of all copies."""
        inputs = [self._input() for _ in self._copies]
        outputs: list[list[Tensor]] = []
        copies = zip(self._copies, inputs, self._losses, strict=True)
        calls = (partial(self._forward, copy, x, loss, outputs) for copy, x, loss in copies)
        self.seconds["forward"] += self._watch.each(calls)
        return inputs, outputs

    def timing(self, num_ranks: int) -> LayerTiming:
        """The timings of all ranks as one record; every rank must call this."""
        per_round = {part: len(self._copies) for part in self.seconds if part not in ("optimizer", "scale")}
        return layer_timing(self._shape, self._layer.key, self._mixed, num_ranks, self.seconds, per_round)

    def _input(self) -> list[Tensor]:
        return [x.clone().requires_grad_(self._has_input_gradients) for x in self._layer_inputs] or [self._first_input]

    def _loss(self, stage: Stage, autocast: torch.dtype | None, device: torch.device) -> _Loss:
        """Returns the loss of a head."""
        chunked, objective = self._shape.chunked_loss, self._shape.model.objective
        (layer,) = stage.layers.values()
        if objective == "score":
            return lambda scores, targets: scores[:, -1].sum()
        if objective == "odds_ratio" and chunked is None:
            return _with_chosen_loss
        if chunked is None or not isinstance(layer, OutputHead):
            return partial(cross_entropy, parallel=self._dims)
        return loss_in_chunks(layer, chunked, autocast, device)

    def _forward(self, copy: nn.Module, x: list[Tensor], loss: _Loss, outputs: list[list[Tensor]]) -> None:
        y: Tensor | tuple[Tensor, ...] = copy(*x)
        if self._layer.kind is LayerKind.HEAD:
            assert isinstance(y, Tensor)
            y = loss(y, self._targets)
        outputs.append([y] if isinstance(y, Tensor) else list(y))

    def _optimize(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
            zero_gradients(self._masters)


def _with_chosen_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Losses of ORPO: of all sequences, and of the chosen ones, the first half."""
    half = len(targets) // 2
    return cross_entropy(logits, targets) + cross_entropy(logits[:half], targets[:half])


def layer_timing(
    shape: ShapeRequest,
    key: str,
    mixed: Mixed,
    num_ranks: int,
    seconds: Mapping[str, list[float]],
    per_round: Mapping[str, int],
) -> LayerTiming:
    """The timings of one layer on all ranks as one record; every rank must call this.

    Args:
        shape: Request that the layer belongs to.
        key: Key of the layer.
        mixed: Method of mixed precision.
        seconds: Timings of this rank by field of ``LayerTiming`` without its unit.
        per_round: Timings of one round, where there are several.
    """
    split: dict[str, Sample | None] = {"backward_input_s": None, "backward_weight_s": None}
    samples = {f"{part}_s": sample_of(seconds[part], per_round.get(part, 1)) for part in sorted(seconds)}
    return LayerTiming.model_validate(
        {
            "key": key,
            "microbatch_size": shape.microbatch_size,
            "dtype": shape.dtype,
            "fp8_recipe": shape.fp8_recipe,
            "mixed": mixed,
            "num_ranks": num_ranks,
            "optimizer": shape.optimizer,
            **split,
            **samples,
        }
    )


def _no_backward(outputs: list[Tensor], gradients: list[Tensor] | None) -> None:
    """Backward of a layer without trained parameters in it or below it."""


def _gradients(outputs: list[Tensor]) -> list[Tensor] | None:
    """Gradients of the outputs of a layer; None for a loss."""
    return None if outputs[0].dim() == 0 else [torch.randn_like(y) for y in outputs]


class FsdpCopies:
    """FSDP's copies around the collectives of one layer, without the collectives and the layer's compute.

    Args:
        layer: The layer, whose parameters are FP32; it is sharded in place.
        cast: Dtype of the parameters that are gathered; None for FP32.

    Attributes:
        input: Input of the layer, which gets gradients.
    """

    def __init__(self, layer: nn.Module, cast: torch.dtype | None, device: torch.device) -> None:
        assert dist.group.WORLD is not None
        mesh = DeviceMesh.from_group(dist.group.WORLD, device.type, mesh_dim_names=("shard",))
        policy = MixedPrecisionPolicy()
        if cast is not None:
            policy = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=torch.float32)
        unit = _Untouched(layer)
        sharded = fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        sharded.set_custom_all_gather(_NothingGathered())
        sharded.set_custom_reduce_scatter(_NothingReduced())
        # the outermost unit has additional work; in a model it is not a layer
        self._root: nn.Module = nn.Sequential(unit)
        fully_shard(self._root, mesh=mesh, mp_policy=policy)
        self.input = torch.zeros(1, device=device, requires_grad=True)

    def gather(self) -> Tensor:
        """Runs the copies around an all-gather; backward of the output runs those around a reduce-scatter."""
        output: Tensor = self._root(self.input)
        return output

    def seconds(self, watch: Stopwatch) -> tuple[float, float]:
        """Seconds of the copies around an all-gather, and of those around a reduce-scatter."""
        outputs: list[Tensor] = []
        gather_s = watch(lambda: outputs.append(self.gather()))
        return gather_s, watch(outputs.pop().backward)


class _Untouched(nn.Module):
    """Module with a layer's parameters, whose backward allocates gradients without computing them."""

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
