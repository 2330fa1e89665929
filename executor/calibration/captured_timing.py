"""Times the layers of a captured module inside of its training step, where layers begin and end.

Forward passes from one layer to the next where a module is entered or left, and backward where the gradients of the
tensors there are complete. A gap between two layers belongs to one of them, so that the times of all layers are that of
the whole pass.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from executor.calibration.layer_timing import FsdpCopies, layer_timing
from executor.calibration.timing import TIMED_DTYPES, Bench, Stopwatch, together
from executor.distributed.gradients import divide_gradients, zero_gradients
from executor.distributed.mesh import ParallelDims
from executor.distributed.precision import Autocast
from executor.models.captured import CapturedData, build_captured, moved
from executor.models.lora import trained_parameters
from executor.train.optimizers import make_optimizer
from simplan.cost.calibration.format import LayerTiming, ShapeRequest, way_of_mixing
from simplan.model.layer import LayerSpec

_SCALE = 3
_AHEAD_S = 0.5  # the host issues a whole step


def time_captured(shape: ShapeRequest, bench: Bench) -> list[LayerTiming]:
    """Times every different layer of one captured module."""
    module = _ModuleBench(shape, bench.device)
    module.round()  # warm-up
    module.seconds.clear()
    done = 0
    while bench.keep_going(done):
        together()
        module.round()
        done += 1
    return module.timings(bench.num_ranks)


class _ModuleBench:
    """A captured module and the timings of its layers.

    Attributes:
        seconds: Timings by key of the layer and by field of ``LayerTiming`` without its unit.
    """

    def __init__(self, shape: ShapeRequest, device: torch.device) -> None:
        model, layers = shape.model.captured, shape.layers
        assert model is not None, "a request of a captured model"
        self._shape, self._layers, self._watch = shape, layers, Stopwatch(device)
        self._mixed = way_of_mixing(shape.dtype, sharded=shape.mixed == "cast")
        autocast = shape.dtype in ("bf16", "fp16", "fp8") and self._mixed == "autocast"
        compute_dtype = TIMED_DTYPES[shape.dtype]
        dtype = torch.float32 if autocast else compute_dtype
        tp = ParallelDims.silent(shape.shard, device.type).tp.mesh  # without communication, as of families
        stage = build_captured(
            model,
            layers,
            dtype,
            device,
            seed=0,
            tp=tp,
            frozen_dtype=compute_dtype,
            fp8_recipe=shape.fp8_recipe if shape.dtype == "fp8" else None,
            finish=lambda index, layer: _compiled(layer) if layers[index].compiled else None,
        )
        if shape.model.lora_rank:  # adapters are cast by themselves, and all else has the compute dtype
            autocast, dtype = False, compute_dtype
        self._batch = moved(CapturedData(model, seed=0).batch(0, 0, shape.microbatch_size), device, dtype)
        self._crossings = _Crossings(model.starts, stage.module, device)
        self._module: nn.Module = Autocast(stage, compute_dtype, device.type) if autocast else stage
        self._weights = trained_parameters(stage)
        owners = {id(parameter): key for key, parameter in _owned(stage.with_specs(layers), layers)}
        # the optimizer updates the weights themselves, or the FP32 copies that they were cast from
        masters = {w: w if self._mixed == "autocast" else nn.Parameter(w.detach().float()) for w in self._weights}
        self._masters: dict[str, list[nn.Parameter]] = defaultdict(list)
        for weight, master in masters.items():
            master.grad = torch.zeros_like(master)
            self._masters[owners[id(weight)]].append(master)
        self._optimizers = {key: make_optimizer(shape.optimizer, held) for key, held in self._masters.items()}
        cast = dtype if self._mixed == "cast" else None
        first_of_key = {layer.key: layer for layer in reversed(layers)}
        self._sharded = {key: FsdpCopies(_Weights(layer), cast, device) for key, layer in first_of_key.items()}
        self._num_layers = Counter(layer.key for layer in layers)
        self.seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def round(self) -> None:
        """Times forward and backward of all layers, FSDP's copies, then the optimizer."""
        forward, backward = self._crossings.of_step(lambda: self._module(self._batch))
        for layer, forward_s, backward_s in zip(self._layers, forward, backward, strict=True):
            self.seconds[layer.key]["forward"].append(forward_s)
            self.seconds[layer.key]["backward"].append(backward_s)
        if self._mixed == "cast":
            for weight in self._weights:
                weight.grad = None
        for masters in self._masters.values():
            zero_gradients(masters)  # weights stay: fitted to one batch, they would have gradients too small for CPUs
        for key, number in self._num_layers.items():
            seconds, masters = self.seconds[key], self._masters.get(key, [])
            gather_s, reduce_s = self._sharded[key].seconds(self._watch)
            seconds["gather_copy"].append(gather_s)
            seconds["reduce_copy"].append(reduce_s)
            seconds["scale"].append(self._watch(divide_gradients, masters, _SCALE) / number)
            seconds["optimizer"].append(self._watch(self._optimize, key) / number)

    def timings(self, num_ranks: int) -> list[LayerTiming]:
        """The timings of all ranks, a record for each different layer; every rank must call this."""
        return [
            layer_timing(
                self._shape,
                key,
                self._mixed,
                num_ranks,
                self.seconds[key],
                {"forward": number, "backward": number},
            )
            for key, number in self._num_layers.items()
        ]

    def _optimize(self, key: str) -> None:
        if key in self._optimizers:
            self._optimizers[key].step()
            zero_gradients(self._masters[key])


def _compiled(layer: nn.Module) -> None:
    from executor.distributed.compiling import compile_block  # a second to import: only where needed

    compile_block(layer, whole=True)


def _owned(
    weights: Iterator[tuple[str, nn.Parameter, Any]], layers: Sequence[LayerSpec]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields each weight of a module with the key of the first layer that lists it."""
    specs = {id(said): layer.key for layer in reversed(layers) for said in layer.parameters}
    for _, parameter, said in weights:
        yield specs[id(said)], parameter


class _Weights(nn.Module):
    """The weights of a layer, FP32."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(said.shape or (1,)), requires_grad=not said.frozen) for said in layer.parameters
        )


class _Crossings:
    """Times at which a step passes from one layer to the next.

    Args:
        starts: See ``CapturedModel.starts``.
        module: The module; it gets hooks.
    """

    def __init__(self, starts: Sequence[str], module: nn.Module, device: torch.device) -> None:
        self._num_layers, self._cuda = len(starts), device.type == "cuda"
        self._marks: list[dict[int, Any]] = [{}, {}]  # of forward and of backward, by layer
        self._is_forward = True
        for number, start in enumerate(starts):
            how, _, path = start.partition(" ")
            if how == "enter":
                module.get_submodule(path).register_forward_pre_hook(self._entered(number), with_kwargs=True)
            elif how == "leave":
                module.get_submodule(path).register_forward_hook(self._left(number))

    def of_step(self, forward: Callable[[], Tensor]) -> tuple[list[float], list[float]]:
        """Runs forward and backward; seconds of each by layer."""
        if self._cuda:
            torch.cuda.synchronize()
        self._marks, self._is_forward = [{}, {}], True
        begin = self._now()
        loss = forward()
        between, self._is_forward = self._now(), False
        loss.backward()  # type: ignore[no-untyped-call]
        end = self._now()
        if self._cuda:
            torch.cuda.synchronize()
        first, second = self._marks
        upward = [first.get(number) for number in range(self._num_layers)]
        downward = [second.get(number) for number in range(self._num_layers)]
        forwards = self._spans([begin, *upward[1:], between])
        backwards = self._spans([between, *reversed(downward[1:]), end])
        return forwards, backwards[::-1]

    def _spans(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between marks; a layer without a mark has an equal share of the span that it is in."""
        spans_s: list[float] = []
        known = [place for place, mark in enumerate(marks) if mark is not None]
        for low, high in pairwise(known):
            spans_s += [max(0.0, self._seconds(marks[low], marks[high])) / (high - low)] * (high - low)
        return spans_s

    def _entered(self, number: int) -> Callable[..., None]:
        def entered(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            self._reach(number, (inputs, named), is_last=True)

        return entered

    def _left(self, number: int) -> Callable[..., None]:
        def left(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self._reach(number, output, is_last=False)

        return left

    def _reach(self, number: int, tensors: Any, *, is_last: bool) -> None:
        """Forward has reached a layer, of which backward gives gradients to tensors at last."""
        if not self._is_forward:
            return
        if is_last or number not in self._marks[0]:
            self._marks[0][number] = self._now()

        def passed(gradient: Tensor) -> None:
            self._marks[1].setdefault(number, self._now())

        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(passed)  # type: ignore[no-untyped-call]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3 if self._cuda else float(second - first)
