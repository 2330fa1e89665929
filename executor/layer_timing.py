"""Times the layers of a model one by one, in the state in which a training step finds them.

In a step a layer runs after others, so its weights are not in the processor's caches, and its backward adds to
gradients that exist. So a few copies of a layer take turns, each timed alone, forward in order and backward in
reverse, until they together are larger than any cache. Weights cast to half precision (FSDP's) get new gradients from
every backward, and the optimizer updates fp32 copies of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from executor.data import make_batch
from executor.fsdp_timing import FsdpBench
from executor.loss import cross_entropy
from executor.model import build_stage
from executor.parallel import Parallel
from executor.precision import Autocast
from executor.timing import TIMED_DTYPES, Stopwatch, sample_of, together
from executor.trainer import make_optimizer
from simplan.cost.calibration import LayerTiming, ShapeRequest, way_of_mixing
from simplan.spec.layer import LayerKind

__all__ = ["time_layers"]

_CACHE_BYTES = 128 * 2**20
_MOST_COPIES = 12
_SCALE = 3.0


def time_layers(
    shape: ShapeRequest, num_ranks: int, device: torch.device, keep_going: Callable[[int], bool]
) -> list[LayerTiming]:
    """Times embedding, block and head of one model.

    Args:
        shape: Which model, what a rank has of it, at which microbatch size and precision.
        num_ranks: Ranks that do this at the same time.
        device: Where.
        keep_going: Asked before each round with the number of rounds done; the same answer on all ranks.
    """
    benches = [_LayerBench(shape, index, device) for index in (0, 1, len(shape.model.layers) - 1)]
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

    def __init__(self, shape: ShapeRequest, index: int, device: torch.device) -> None:
        layers = shape.model.layers_of(shape.shard)
        layer = layers[index]
        self._shape, self._layer = shape, layer
        self._parallel = Parallel.silent(shape.shard)
        self._watch = Stopwatch(device)
        self._mixed = way_of_mixing(shape.dtype, sharded=shape.mixed == "cast")
        autocast = shape.dtype in ("bf16", "fp16") and self._mixed == "autocast"
        dtype = torch.float32 if autocast else TIMED_DTYPES[shape.dtype]
        saved = sum(tensor.elements * (tensor.bytes_per_element or dtype.itemsize) for tensor in layer.saved)
        footprint = 2 * layer.num_parameters * dtype.itemsize + saved * shape.microbatch_size
        repeats = shape.model.num_hidden_layers if layer.kind is LayerKind.BLOCK else 1
        num_copies = min(_MOST_COPIES, repeats, 1 + _CACHE_BYTES // max(1, footprint))
        self._copies: list[nn.Module] = [
            build_stage(shape.model, [index], dtype, device, seed, self._parallel) for seed in range(num_copies)
        ]
        weights = [parameter for copy in self._copies for parameter in copy.parameters()]
        # what the optimizer updates: the weights themselves, or the fp32 copies that they were cast from
        self._masters = weights if self._mixed == "autocast" else [nn.Parameter(w.detach().float()) for w in weights]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._optimizer = make_optimizer(shape.optimizer, self._masters)
        compute_dtype = dtype if self._mixed == "cast" else None
        self._sharded = [
            FsdpBench(
                build_stage(shape.model, [index], torch.float32, device, seed, self._parallel), compute_dtype, device
            )
            for seed in range(num_copies)
        ]
        if autocast:
            self._copies = [Autocast(copy, TIMED_DTYPES[shape.dtype], device.type) for copy in self._copies]
        tokens, targets = make_batch(
            shape.model.vocab_size,
            shape.model.seq_len,
            seed=0,
            step=0,
            first_sample=0,
            num_samples=shape.microbatch_size,
        )
        self._tokens, self._targets = (self._parallel.local_tokens(x).to(device) for x in (tokens, targets))
        own_tokens = layers[0].output_elements // shape.model.hidden_size
        self._hidden = torch.randn(
            shape.microbatch_size, own_tokens, shape.model.hidden_size, device=device, dtype=dtype
        )
        self._seconds: dict[str, list[float]] = {}
        self.forget()

    def forget(self) -> None:
        """Drops the timings so far."""
        self._seconds = {"forward": [], "backward": [], "optimizer": [], "scale": []}
        self._seconds |= {"gather_copy": [], "reduce_copy": []}

    def round(self) -> None:
        """Forward of every copy, backward of every copy in reverse, FSDP's part, then their optimizer."""
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
            optimizer_s=sample_of(self._seconds["optimizer"]),
            scale_s=sample_of(self._seconds["scale"]),
            gather_copy_s=sample_of(self._seconds["gather_copy"], len(self._sharded)),
            reduce_copy_s=sample_of(self._seconds["reduce_copy"], len(self._sharded)),
        )

    def _input(self) -> Tensor:
        if self._layer.kind is LayerKind.EMBEDDING:
            return self._tokens
        return self._hidden.clone().requires_grad_()

    def _forward(self, copy: nn.Module, x: Tensor, outputs: list[Tensor]) -> None:
        y: Tensor = copy(x)
        if self._layer.kind is LayerKind.HEAD:
            y = cross_entropy(y, self._targets, self._parallel)
        outputs.append(y)

    def _scale(self) -> None:
        for master in self._masters:
            assert master.grad is not None
            master.grad.div_(_SCALE)

    def _optimize(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
