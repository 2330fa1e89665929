"""The calibration format: what this machine's kernels and links were measured to take.

The executor writes it (``simplan calibrate``), the cost model reads it. It holds single layers, single kernels
over a grid of sizes, collectives and sends; never a stage, a schedule or a step of a plan.
"""

from __future__ import annotations

import math
import statistics
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from simplan.base import Count, NonNegative, Positive, Spec
from simplan.model.implementations.layer_style import LayerStyle, ModelCode, styled_layers
from simplan.model.layer import CollectiveKind, LayerSpec
from simplan.model.low_precision import DEFAULT_RECIPE, Fp8Recipe
from simplan.model.model import ModelSpec
from simplan.plan.shard import Shard
from simplan.training.optimizer import UpdateName

__all__ = [
    "Calibration",
    "CalibrationRequest",
    "CommunicationTiming",
    "HostCopyTiming",
    "KernelName",
    "KernelTiming",
    "LayerTiming",
    "Mixed",
    "OverlapTiming",
    "Sample",
    "ShapeRequest",
    "TimedDtype",
    "pace_in_words",
    "way_of_mixing",
]

TimedDtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
Mixed = Literal["autocast", "cast"]
"""How half precision comes about: fp32 weights under torch.autocast, or weights cast to it, as FSDP gathers them."""


KernelName = Literal[
    "linear",
    "linear_input_gradient",
    "linear_weight_gradient",
    "attention",
    "layer_norm",
    "rms_norm",
    "gelu",
    "silu_multiply",
    "add",
    "rotary",
    "lookup",
    "cross_entropy",
    "accumulate",
    "scale",
    "adamw",
    "sgd",
    "gather_copy",
    "reduce_copy",
    "copy",
    "launch",
]
"""Kernels of the grid, as the executor's layers run them; ``launch`` is the least time of any, ``copy`` the bandwidth
of the memory."""
Slowdown = Annotated[float, Field(ge=1.0)]

_Timing = TypeVar("_Timing", bound=Spec)
_SLOWDOWNS = ("compute_slowdown", "communication_slowdown")
_CONDITIONS = ("device", "num_cores", "backend", "torch", "driver", "nccl")


def way_of_mixing(dtype: str, *, sharded: bool) -> Mixed:
    """How torch comes by half precision; without half precision there is one way only.

    Args:
        dtype: Precision of the run.
        sharded: FSDP shards the parameters.
    """
    return "cast" if sharded and dtype in ("bf16", "fp16", "fp8") else "autocast"


_SAME_PACE = 0.05
_PACE_STD = 0.25  # of the change, as a logarithm: what is not bound by the cores' clock changes by less


class Sample(Spec):
    """Repeated timings of one thing.

    A step is a sum of many of them, so what counts is their mean, not their median: timings on a busy machine are
    skewed. The slowest and fastest twentieth are moved to the 5th and 95th percentile first (a winsorized mean), so
    that a single stall of the machine does not count.

    Attributes:
        mean_s: Winsorized mean over all repeats of all ranks.
        low_s: 10th percentile.
        high_s: 90th percentile.
        round_std: Relative standard deviation of the means of rounds, robustly from their 10th and 90th percentile. A
            round is a fraction of a second, so this is how much one step differs from the next on this machine.
        num_repeats: How many timings there were.
    """

    mean_s: NonNegative
    low_s: NonNegative
    high_s: NonNegative
    round_std: NonNegative
    num_repeats: Count

    def times(self, factor: float) -> Sample:
        """On a machine that is so much slower; where it would end up between the two paces is not sure."""
        return self.model_copy(
            update={
                "mean_s": self.mean_s * factor,
                "low_s": self.low_s * factor,
                "high_s": self.high_s * factor,
                "round_std": math.hypot(self.round_std, _PACE_STD * abs(math.log(factor))),
            }
        )


class LayerTiming(Spec):
    """One layer alone, the other ranks as busy.

    Attributes:
        key: ``LayerSpec.key``.
        microbatch_size: Sequences.
        dtype: Precision of the run.
        fp8_recipe: Scaling of linear layers, if the precision is FP8.
        mixed: How half precision came about.
        num_ranks: Ranks that ran the same thing at the same time.
        optimizer: Which optimizer.
        forward_s: Forward, keeping what backward needs; for the head, loss included.
        backward_s: Backward, accumulating into existing gradients.
        backward_input_s: The first part of a backward in two parts, gradients of activations; None for a layer whose
            input has no gradient, which has no such part.
        backward_weight_s: The second part, gradients of weights, accumulating; None where there is no first one.
        optimizer_s: The optimizer's step over this layer's fp32 parameters, gradients zeroed.
        scale_s: Dividing this layer's fp32 gradients by a number.
        gather_copy_s: What FSDP does around an all-gather of this layer's parameters over all ranks: its hooks, copying
            the rank's shards in and whole parameters out.
        reduce_copy_s: What it does around a reduce-scatter of their gradients.
        reference_s: What the executor's reference product took meanwhile, in the median: how fast the machine was.
    """

    key: str
    microbatch_size: Count
    dtype: TimedDtype
    fp8_recipe: Fp8Recipe = DEFAULT_RECIPE
    mixed: Mixed = "autocast"
    num_ranks: Count
    optimizer: UpdateName
    forward_s: Sample
    backward_s: Sample
    backward_input_s: Sample | None
    backward_weight_s: Sample | None
    optimizer_s: Sample
    scale_s: Sample
    gather_copy_s: Sample
    reduce_copy_s: Sample
    reference_s: Positive | None = None


class KernelTiming(Spec):
    """A kernel of the grid, from which layers that were not timed themselves are priced.

    Attributes:
        kernel: What it does.
        sizes: Of a product ``rows, columns, depth``; of attention ``heads of all sequences, seq_len, head_dim``; of all
            others the elements that it makes (of the optimizer and of FSDP's copies, parameters).
        dtype: Precision.
        num_ranks: Ranks that did the same at the same time.
        seconds: One of them, weights not in any cache.
        backward_s: Its backward; None where that is a kernel of its own.
        reference_s: As of ``LayerTiming``.
    """

    kernel: KernelName
    sizes: tuple[Count, ...]
    dtype: TimedDtype
    num_ranks: Count
    seconds: Sample
    backward_s: Sample | None = None
    reference_s: Positive | None = None


class CommunicationTiming(Spec):
    """A collective or a message.

    Attributes:
        kind: How; ``send`` is one way, from the call of send to the receiver's having the bytes.
        num_ranks: Ranks in the group (2 for a send).
        world_size: Ranks on the machine, or on each of several, all taking part in groups like this one at once.
        num_bytes: As ``CollectiveKind`` counts them.
        num_nodes: Nodes that the group is spread over.
    """

    kind: CollectiveKind
    num_ranks: Count
    world_size: Count
    num_bytes: Count
    seconds: Sample
    num_nodes: Count = 1


class OverlapTiming(Spec):
    """How much computing and a collective slow each other down.

    Attributes:
        kind: Of the collective.
        num_ranks: In its group, all ranks of the machine.
        num_bytes: Its size.
        compute_slowdown: Time of matrix products while it runs, over their time alone; at least 1.
        communication_slowdown: Its time beside matrix products, over its time alone; at least 1.
    """

    kind: CollectiveKind
    num_ranks: Count
    num_bytes: Count
    compute_slowdown: Slowdown
    communication_slowdown: Slowdown


class HostCopyTiming(Spec):
    """A copy from the device to its host, which on a CPU is one from memory to memory.

    Attributes:
        world_size: Ranks on the machine, all copying at the same time.
        num_bytes: Of the tensor.
    """

    world_size: Count
    num_bytes: Count
    seconds: Sample


class ShapeRequest(Spec):
    """A model whose layers are to be timed at one microbatch size.

    Attributes:
        model: Its layers.
        shard: What each rank has of them; exchanges are left out of the timings.
        microbatch_size: Sequences.
        dtype: Precision.
        fp8_recipe: Scaling of linear layers, if the precision is FP8.
        mixed: How half precision comes about; see ``way_of_mixing``.
        optimizer: Whose step is timed, over fp32 weights.
        compiled: Blocks are compiled.
        model_code: Whose modules are timed.
    """

    model: ModelSpec
    shard: Shard = Field(default_factory=Shard)
    microbatch_size: Count
    mixed: Mixed = "autocast"
    dtype: TimedDtype = "fp32"
    fp8_recipe: Fp8Recipe = DEFAULT_RECIPE
    optimizer: UpdateName = "adamw"
    compiled: bool = False
    model_code: ModelCode = "framework"

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each rank has, with the keys by which they are priced."""
        style = LayerStyle(compiled=self.compiled, model_code=self.model_code)
        return styled_layers(self.model.layers_of(self.shard), style, self.model.family)


class CalibrationRequest(Spec):
    """What to measure.

    Attributes:
        shapes: Layers to time.
        num_ranks: Processes that run at the same time, on each node.
        num_nodes: Nodes; on several, collectives and messages are timed and nothing else.
        device: What they compute on.
        budget_s: Time to spend on the measurements, start-up excluded.
        communication: Kinds of collectives and messages to time too.
        grid: Precisions in which to time kernels over sizes, for layers of any model.
        host_copies: Time copies between device and host too.
        overlap: Time how computing and collectives slow each other down.
        small_grid: Fewer and smaller sizes, for a first look.
        pending: What an interrupted calibration has left to do: of the parts of this one only these are measured, if
            any of them is among these.
    """

    schema_version: Literal[1] = 1
    shapes: tuple[ShapeRequest, ...]
    num_ranks: Count
    num_nodes: Count = 1
    device: Literal["cpu", "cuda"] = "cpu"
    budget_s: Positive = 60.0
    communication: tuple[CollectiveKind, ...] = (CollectiveKind.ALL_REDUCE, CollectiveKind.SEND)
    grid: tuple[TimedDtype, ...] = ()
    host_copies: bool = False
    overlap: bool = False
    small_grid: bool = False
    pending: tuple[str, ...] = ()


class Calibration(Spec):
    """What was measured on one machine.

    Attributes:
        created: ISO date and time, UTC.
        environment: Machine, versions, threads, backend.
        device_kind: ``cpu`` or ``gpu``.
        num_cores: Cores that the ranks of the machine share.
        memory_bytes: Memory of the machine (CPU) or of one device (GPU).
        context_bytes: What a rank takes of it before it holds a tensor: the program (CPU) or the driver's context,
            and the communication library.
        layers, kernels, communication, host_copies, overlaps: The timings.
        pending: Parts that were to be measured and have not been, where a calibration was interrupted; the next one
            goes on with them.
        reference_s: What the executor's reference product took, where nothing else was measured.
        pace: What the timings of computing were multiplied by, in the median, for a machine whose pace has changed
            since; None where they are as measured.
    """

    schema_version: Literal[1] = 1
    created: str
    environment: dict[str, str | int | float | None] = Field(default_factory=dict)
    device_kind: Literal["cpu", "gpu"]
    num_cores: Count
    memory_bytes: Count
    context_bytes: Annotated[int, Field(ge=0)] = 0
    layers: tuple[LayerTiming, ...] = ()
    kernels: tuple[KernelTiming, ...] = ()
    communication: tuple[CommunicationTiming, ...] = ()
    host_copies: tuple[HostCopyTiming, ...] = ()
    overlaps: tuple[OverlapTiming, ...] = ()
    pending: tuple[str, ...] = ()
    reference_s: Positive | None = None
    pace: Positive | None = None

    def at_pace(self, reference_s: float, num_ranks: int) -> Calibration:
        """For a machine on which the reference product now takes another time than when this was measured.

        Each timing of computing has the time that the product took meanwhile, so that what was measured while the
        machine was busy is corrected by itself. Changes below 5 % are those of the product's own timings.

        Args:
            reference_s: Of so many ranks at once, now.
            num_ranks: Timings of other numbers of ranks stay.
        """
        factors: list[float] = []

        def factor_of(timing: LayerTiming | KernelTiming) -> float:
            if timing.num_ranks != num_ranks or timing.reference_s is None:
                return 1.0
            factors.append(reference_s / timing.reference_s)
            return factors[-1] if abs(factors[-1] - 1) > _SAME_PACE else 1.0

        def paced(timing: _Timing, factor: float) -> _Timing:
            if factor == 1.0:
                return timing
            samples = {name: getattr(timing, name) for name in type(timing).model_fields}
            scaled = {name: value.times(factor) for name, value in samples.items() if isinstance(value, Sample)}
            return timing.model_copy(update={**scaled, "reference_s": reference_s})

        layers = tuple(paced(timing, factor_of(timing)) for timing in self.layers)
        kernels = tuple(paced(timing, factor_of(timing)) for timing in self.kernels)
        pace = statistics.median(factors) if factors else 1.0
        return self.model_copy(
            update={"layers": layers, "kernels": kernels, "pace": pace if abs(pace - 1) > _SAME_PACE else None}
        )

    def merged(self, newer: Calibration) -> Calibration:
        """This calibration with ``newer``'s timings added; where both timed the same thing, the newer one counts.

        Timings of another processor, number of cores, backend or version of torch are no measure of now: where one of
        these changed, only the newer timings are left.
        """
        if any(self.environment.get(fact) != newer.environment.get(fact) for fact in _CONDITIONS):
            return newer
        layer_values = frozenset(name for name in LayerTiming.model_fields if name.endswith("_s"))
        seconds = frozenset({"seconds"})
        return newer.model_copy(
            update={
                "layers": _merge(self.layers, newer.layers, layer_values),
                "kernels": _merge(self.kernels, newer.kernels, seconds | {"backward_s", "reference_s"}),
                "communication": _merge(self.communication, newer.communication, seconds),
                "host_copies": _merge(self.host_copies, newer.host_copies, seconds),
                "overlaps": _merge(self.overlaps, newer.overlaps, frozenset(_SLOWDOWNS)),
            }
        )


def _merge(old: tuple[_Timing, ...], new: tuple[_Timing, ...], values: frozenset[str]) -> tuple[_Timing, ...]:
    """Both, one of each identity: all fields but ``values`` tell what was timed."""

    def identity(timing: _Timing) -> str:
        return repr([(name, getattr(timing, name)) for name in type(timing).model_fields if name not in values])

    return tuple({identity(timing): timing for timing in (*old, *new)}.values())


def pace_in_words(pace: float) -> str:
    """How much slower, or faster, a machine has become."""
    return f"{pace:.2f} times slower" if pace > 1 else f"{1 / pace:.2f} times faster"
