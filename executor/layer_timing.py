"""Times the layers of a model one by one, in the state in which a training step finds them.

In a step a layer runs after others, so its weights are not in the processor's caches, and its backward adds to
gradients that exist. So a few copies of a layer take turns, each timed alone, forward in order and backward in
reverse, until they together are larger than any cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from executor.data import make_batch
from executor.model import build_stage, cross_entropy
from executor.timing import Stopwatch, sample_of, together
from executor.trainer import TORCH_DTYPES, make_optimizer
from simplan.cost.calibration import LayerTiming, ShapeRequest
from simplan.spec.layer import LayerKind, LayerSpec

__all__ = ["time_layers"]

_CACHE_BYTES = 128 * 2**20
_MOST_COPIES = 12
_SCALE = 3.0


def time_layers(
    shape: ShapeRequest, num_ranks: int, device: torch.device, keep_going: Callable[[int], bool]
) -> list[LayerTiming]:
    """Times embedding, block and head of one model.

    Args:
        shape: Which model, at which microbatch size.
        num_ranks: Ranks that do this at the same time.
        device: Where.
        keep_going: Asked before each round with the number of rounds done; the same answer on all ranks.
    """
    benches = [
        _LayerBench(shape, index, shape.model.layers[index], device) for index in (0, 1, len(shape.model.layers) - 1)
    ]
    for bench in benches:
        bench.round()  # warm-up, not counted
        bench.forget()
    done = 0
    while keep_going(done):
        together()
        for bench in benches:
            bench.round()
        done += 1
    return [bench.timing(num_ranks) for bench in benches]


class _LayerBench:
    """Copies of one layer and their timings."""

    def __init__(self, shape: ShapeRequest, index: int, layer: LayerSpec, device: torch.device) -> None:
        self._shape, self._layer = shape, layer
        self._watch = Stopwatch(device)
        self._dtype = TORCH_DTYPES["fp32" if shape.dtype == "tf32" else shape.dtype]
        width = torch.empty((), dtype=self._dtype).itemsize
        saved = sum(layer.saved_bytes(width)) * shape.microbatch_size
        footprint = 2 * layer.num_parameters * width + saved
        repeats = shape.model.num_hidden_layers if layer.kind is LayerKind.BLOCK else 1
        num_copies = min(_MOST_COPIES, repeats, 1 + _CACHE_BYTES // max(1, footprint))
        self._copies: list[nn.Module] = [
            build_stage(shape.model, [index], self._dtype, device, seed) for seed in range(num_copies)
        ]
        for copy in self._copies:
            for parameter in copy.parameters():
                parameter.grad = torch.zeros_like(parameter)
        parameters = [parameter for copy in self._copies for parameter in copy.parameters()]
        self._optimizer = make_optimizer(shape.optimizer, parameters)
        self._parameters = parameters
        tokens, targets = make_batch(
            shape.model.vocab_size,
            shape.model.seq_len,
            seed=0,
            step=0,
            first_sample=0,
            num_samples=shape.microbatch_size,
        )
        self._tokens, self._targets = tokens.to(device), targets.to(device)
        self._hidden = torch.randn(*tokens.shape, shape.model.hidden_size, device=device, dtype=self._dtype)
        self._seconds: dict[str, list[float]] = {}
        self.forget()

    def forget(self) -> None:
        """Drops the timings so far."""
        self._seconds = {"forward": [], "backward": [], "optimizer": [], "scale": []}

    def round(self) -> None:
        """Forward of every copy, backward of every copy in reverse, then their optimizer."""
        inputs = [self._input() for _ in self._copies]
        outputs: list[Tensor] = []
        for copy, x in zip(self._copies, inputs, strict=True):
            self._seconds["forward"].append(self._watch(self._forward, copy, x, outputs))
        gradients = [None if y.dim() == 0 else torch.randn_like(y) for y in outputs]
        while outputs:
            y, gradient = outputs.pop(), gradients.pop()
            self._seconds["backward"].append(self._watch(torch.autograd.backward, y, gradient))
            del y, gradient
            inputs.pop()
        share = 1 / len(self._copies)
        self._seconds["scale"].append(share * self._watch(self._scale))
        self._seconds["optimizer"].append(share * self._watch(self._optimize))

    def timing(self, num_ranks: int) -> LayerTiming:
        """The timings of all ranks as one record."""
        return LayerTiming(
            key=self._layer.key,
            microbatch_size=self._shape.microbatch_size,
            dtype=self._shape.dtype,
            num_ranks=num_ranks,
            optimizer=self._shape.optimizer,
            forward_s=sample_of(self._seconds["forward"], len(self._copies)),
            backward_s=sample_of(self._seconds["backward"], len(self._copies)),
            optimizer_s=sample_of(self._seconds["optimizer"]),
            scale_s=sample_of(self._seconds["scale"]),
        )

    def _input(self) -> Tensor:
        if self._layer.kind is LayerKind.EMBEDDING:
            return self._tokens
        return self._hidden.clone().requires_grad_()

    def _forward(self, copy: nn.Module, x: Tensor, outputs: list[Tensor]) -> None:
        y: Tensor = copy(x)
        outputs.append(cross_entropy(y, self._targets) if self._layer.kind is LayerKind.HEAD else y)

    def _scale(self) -> None:
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.div_(_SCALE)

    def _optimize(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
