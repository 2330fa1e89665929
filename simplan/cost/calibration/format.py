"""The calibration format: measured times of a machine's kernels and links.

The executor writes a calibration (``simplan calibrate``); the cost model reads it. It contains single layers, single
kernels over a grid of sizes, collectives and P2P sends; never a stage, a schedule or a step of a plan.
"""

from __future__ import annotations

import math
import statistics
from datetime import datetime
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator

from simplan.base import Count, Natural, NonNegative, Positive, Seconds, Spec
from simplan.model.base_weights import BaseWeights, FrozenBase, with_frozen_base
from simplan.model.captured.compiled import compiled_blocks
from simplan.model.implementations.layer_implementation import LayerImplementation, ModelCode, implemented_layers
from simplan.model.implementations.loss_in_chunks import ChunkedLoss
from simplan.model.layer import CollectiveKind, LayerSpec
from simplan.model.low_precision import DEFAULT_RECIPE, Fp8Recipe
from simplan.model.model import ModelSpec, Objective
from simplan.optimizers import UpdateName
from simplan.plan.shard import Shard

TimedDtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
Mixed = Literal["autocast", "cast"]
"""Method of mixed precision: FP32 weights under torch.autocast, or weights cast to low precision, as in FSDP."""


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
"""Kernels of the grid, as the executor's layers run them. ``launch`` is the minimum time of any kernel, ``copy`` the
memory bandwidth."""
Slowdown = Annotated[float, Field(ge=1.0, le=1e6, allow_inf_nan=False)]

_Timing = TypeVar("_Timing", bound=Spec)
_Paced = TypeVar("_Paced", "LayerTiming", "KernelTiming")
_MEASURED = ("_s", "_slowdown", "seconds")  # ends of the names of measured fields; all others say what was timed
_CONDITIONS = ("device", "num_cores", "backend", "torch", "driver", "nccl")


def way_of_mixing(dtype: str, *, sharded: bool) -> Mixed:
    """Returns torch's method of mixed precision; without mixed precision, or without FSDP's sharding, ``autocast``."""
    return "cast" if sharded and dtype in ("bf16", "fp16", "fp8") else "autocast"


_ReferenceTime = Annotated[float, Field(ge=1e-9, le=3600, allow_inf_nan=False)]
_Pace = Annotated[float, Field(ge=1e-13, le=1e13, allow_inf_nan=False)]  # a ratio of two of these
_SAME_PACE = 0.05
_PACE_STD = 0.25  # of the change, as a logarithm: kernels not bound by the cores' clock change by less


class Sample(Spec):
    """Statistics of repeated timings of one item.

    A step is a sum of many items, so the relevant value is their mean, not their median: timings on a busy machine are
    skewed. The slowest and fastest twentieth are first moved to the 5th and 95th percentile (a winsorized mean). A
    single stall of the machine therefore does not count.

    Attributes:
        mean_s: Winsorized mean over all repeats of all ranks, in seconds.
        low_s: 10th percentile, in seconds.
        high_s: 90th percentile, in seconds.
        round_std: Relative standard deviation of the means of rounds, estimated from their 10th and 90th percentile. A
            round is a fraction of a second, so the value is the difference between steps on this machine.
        num_repeats: Number of timings.
    """

    mean_s: Seconds
    low_s: Seconds
    high_s: Seconds
    round_std: NonNegative
    num_repeats: Count

    def times(self, factor: float) -> Sample:
        """Returns the sample for a machine slower by ``factor``; the change of pace adds to its deviation."""
        return self.model_copy(
            update={
                "mean_s": self.mean_s * factor,
                "low_s": self.low_s * factor,
                "high_s": self.high_s * factor,
                "round_std": math.hypot(self.round_std, _PACE_STD * abs(math.log(factor))),
            }
        )


class LayerTiming(Spec):
    """Timings of one layer alone, while the other ranks run the same.

    Attributes:
        key: ``LayerSpec.key``.
        microbatch_size: Microbatch size, in sequences.
        fp8_recipe: Scaling of linear layers if the precision is FP8.
        num_ranks: Ranks that ran the same layer simultaneously.
        forward_s: Forward, saving tensors for backward; includes the loss for the head.
        backward_s: Backward, accumulating into existing gradients.
        backward_input_s: Gradients of activations of a split backward; None for a layer whose input has no gradient.
        backward_weight_s: Gradients of weights of a split backward, accumulating; None if ``backward_input_s`` is None.
        optimizer_s: Optimizer step over this layer's FP32 parameters, with gradients set to zero.
        scale_s: Division of this layer's FP32 gradients by a number.
        gather_copy_s: FSDP's work around an all-gather of this layer's parameters over all ranks: its hooks, copies of
            the rank's shards into the buffer, and copies of unsharded parameters out of it.
        reduce_copy_s: FSDP's work around a reduce-scatter of their gradients.
        reference_s: Median seconds of the executor's reference matmul during the timings, a measure of the machine's
            speed; None if it was not timed.
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
    reference_s: _ReferenceTime | None = None


class KernelTiming(Spec):
    """Timing of a kernel of the grid, from which layers without a timing are estimated.

    Attributes:
        sizes: ``rows, columns, depth`` of a matmul; ``heads of all sequences, seq_len, head_dim`` of attention; output
            elements of any other kernel (parameters for the optimizer and for FSDP's copies).
        num_ranks: Ranks that ran the same kernel simultaneously.
        seconds: One run, with weights in no cache.
        backward_s: Its backward; None if that is a separate kernel.
        reference_s: See ``LayerTiming``.
    """

    kernel: KernelName
    sizes: tuple[Count, ...]
    dtype: TimedDtype
    num_ranks: Count
    seconds: Sample
    backward_s: Sample | None = None
    reference_s: _ReferenceTime | None = None


class CommunicationTiming(Spec):
    """Timing of a collective or a P2P send.

    Attributes:
        kind: Kind of communication. ``send`` is one direction, from the call of send until the receiver has the bytes.
        num_ranks: Ranks in the group (2 for a send).
        world_size: Ranks per machine; all communicate simultaneously, in groups of the same kind.
        num_bytes: Size in bytes as in ``CollectiveKind``.
        num_nodes: Nodes that the group spans.
    """

    kind: CollectiveKind
    num_ranks: Count
    world_size: Count
    num_bytes: Count
    seconds: Sample
    num_nodes: Count = 1


class OverlapTiming(Spec):
    """Mutual slowdown of compute and a collective that overlap.

    Attributes:
        num_ranks: Ranks in the collective's group: all ranks of the machine.
        num_bytes: Size of the collective in bytes.
        compute_slowdown: Time of matmuls during the collective over their time alone; at least 1.
        communication_slowdown: Time of the collective during matmuls over its time alone; at least 1.
    """

    kind: CollectiveKind
    num_ranks: Count
    num_bytes: Count
    compute_slowdown: Slowdown
    communication_slowdown: Slowdown


class HostCopyTiming(Spec):
    """Timing of a copy from the device to its host; on a CPU, a copy from memory to memory.

    Attributes:
        world_size: Ranks per machine, all copying simultaneously.
        num_bytes: Size of the tensor in bytes.
    """

    world_size: Count
    num_bytes: Count
    seconds: Sample


class ShapeRequest(Spec):
    """A model whose layers are to be timed at one microbatch size.

    Attributes:
        shard: Part of the layers that each rank has; collectives are excluded from the timings.
        microbatch_size: Microbatch size, in sequences.
        fp8_recipe: Scaling of linear layers if the precision is FP8.
        mixed: Method of mixed precision; see ``way_of_mixing``.
        optimizer: Optimizer whose step over FP32 weights is timed.
        compiled: True if blocks are compiled.
        model_code: Source of the modules that are timed.
        chunked_loss: Chunks of output projection and loss; None for all tokens in one piece.
        base_weights: Form of frozen matrices of few bits; None for whole ones.
        frozen_base: The same with the widths of a run, by which layers differ.
        objective, trains_nothing: See ``ModelSpec``, whose fields they are.
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
    chunked_loss: ChunkedLoss | None = None
    base_weights: BaseWeights | None = None
    frozen_base: FrozenBase | None = None
    objective: Objective = "tokens"
    trains_nothing: bool = False

    @model_validator(mode="after")
    def _of_task(self) -> Self:
        """Gives the model what belongs to a job and is in no file."""
        facts = {"objective": self.objective, "trains_nothing": self.trains_nothing}
        if any(getattr(self.model, name) != value for name, value in facts.items()):
            object.__setattr__(self, "model", self.model.model_copy(update=facts))
        return self

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Layers of each rank, with the keys by which their timings are looked up."""
        if self.model.captured is not None:
            layers = self.model.layers_of(self.shard)
            return compiled_blocks(layers, self.model.captured.computed_in) if self.compiled else layers
        implementation = LayerImplementation(
            compiled=self.compiled, model_code=self.model_code, chunked_loss=self.chunked_loss
        )
        layers = implemented_layers(self.model.layers_of(self.shard), implementation, self.model.family)
        if self.frozen_base is None:
            return layers
        made = {layer: with_frozen_base(layer, self.frozen_base) for layer in {*layers}}
        return tuple(made[layer] for layer in layers)


class CalibrationRequest(Spec):
    """Items to measure.

    Attributes:
        shapes: Layers to time.
        num_ranks: Simultaneous processes per node.
        num_nodes: Number of nodes; on several, only communication is timed.
        budget_s: Seconds for the measurements, start-up excluded.
        communication: Kinds of communication to time as well.
        grid: Precisions in which to time kernels over sizes, for layers of any model.
        host_copies: True to time copies between device and host as well.
        overlap: True to time the mutual slowdown of compute and collectives.
        small_grid: True for fewer and smaller sizes, for a quick calibration.
        pending: Remaining items of an interrupted calibration. If any of them belongs to this request, only these items
            are measured.
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


def _time_with_zone(text: str) -> str:
    """Checks a date and time.

    Raises:
        ValueError: It is none, or has no time zone.
    """
    try:
        zone = datetime.fromisoformat(text).tzinfo
    except ValueError:
        zone = None
    if zone is None:
        raise ValueError("must be an ISO date and time with its time zone, such as 2026-01-31T12:00:00+00:00")
    return text


class Calibration(Spec):
    """Measurements of one machine.

    Attributes:
        created: ISO date and time, UTC.
        environment: Machine, versions, threads, backend.
        num_cores: Cores that the ranks of the machine share; None for unknown, on GPUs.
        memory_bytes: Memory of the machine (CPU) or of one device (GPU); None for unknown, on GPUs.
        context_bytes: Bytes that a rank uses before it allocates a tensor: the program (CPU) or the driver's context
            (GPU), and the communication library.
        pending: Items not measured because the calibration was interrupted; the next one resumes with them.
        reference_s: Seconds of the executor's reference matmul, if nothing else was measured; None otherwise.
        pace: Median factor by which compute timings were multiplied, for a machine whose speed has changed since; None
            for unchanged timings.
    """

    schema_version: Literal[1] = 1
    created: Annotated[str, AfterValidator(_time_with_zone)]
    environment: dict[str, str | int | float | None] = Field(default_factory=dict)
    device_kind: Literal["cpu", "gpu"]
    num_cores: Count | None = None
    memory_bytes: Count | None = None
    context_bytes: Natural = 0
    layers: tuple[LayerTiming, ...] = ()
    kernels: tuple[KernelTiming, ...] = ()
    communication: tuple[CommunicationTiming, ...] = ()
    host_copies: tuple[HostCopyTiming, ...] = ()
    overlaps: tuple[OverlapTiming, ...] = ()
    pending: tuple[str, ...] = ()
    reference_s: _ReferenceTime | None = None
    pace: _Pace | None = None

    def at_pace(self, reference_s: float, num_ranks: int) -> Calibration:
        """Returns the calibration rescaled to the current time of the reference matmul.

        Each compute timing records the time of the reference matmul during that timing, so timings on a busy machine
        are corrected individually. Changes below 5% are noise of the reference itself.

        Args:
            reference_s: Current seconds of the reference matmul with ``num_ranks`` ranks simultaneously.
            num_ranks: Rank count of the timings to rescale; others are unchanged.
        """
        factors: list[float] = []

        def paced(timing: _Paced) -> _Paced:
            if timing.num_ranks != num_ranks or timing.reference_s is None:
                return timing
            factor = reference_s / timing.reference_s
            factors.append(factor)
            if abs(factor - 1) <= _SAME_PACE:
                return timing
            scaled = {name: value.times(factor) for name, value in timing if isinstance(value, Sample)}
            return timing.model_copy(update={**scaled, "reference_s": reference_s})

        layers, kernels = tuple(map(paced, self.layers)), tuple(map(paced, self.kernels))
        pace = statistics.median(factors) if factors else 1.0
        return self.model_copy(
            update={"layers": layers, "kernels": kernels, "pace": pace if abs(pace - 1) > _SAME_PACE else None}
        )

    @model_validator(mode="after")
    def _machine_is_known(self) -> Self:
        assert self.device_kind == "gpu" or None not in (self.num_cores, self.memory_bytes), (
            "needs num_cores and memory_bytes on a CPU"
        )
        return self

    def with_communication(self, newer: Calibration) -> Calibration:
        """Returns this calibration with ``newer``'s timings of communication added, whatever else was timed."""
        return self.model_copy(update={"communication": _merge(self.communication, newer.communication)})

    def merged(self, newer: Calibration) -> Calibration:
        """Returns this calibration with ``newer``'s timings added; for equal items the newer timing counts.

        Timings with another processor, number of cores, backend or version of torch do not apply. If one of these
        changed, only the newer timings remain.
        """
        if any(self.environment.get(fact) != newer.environment.get(fact) for fact in _CONDITIONS):
            return newer
        names = ("layers", "kernels", "communication", "host_copies", "overlaps")
        return newer.model_copy(update={name: _merge(getattr(self, name), getattr(newer, name)) for name in names})


def _merge(old: tuple[_Timing, ...], new: tuple[_Timing, ...]) -> tuple[_Timing, ...]:
    """Returns both, without duplicates: timings are equal if all fields that are not measured are."""

    def identity(timing: _Timing) -> str:
        names = type(timing).model_fields
        return repr([(name, getattr(timing, name)) for name in names if not name.endswith(_MEASURED)])

    return tuple({identity(timing): timing for timing in (*old, *new)}.values())


def pace_in_words(pace: float) -> str:
    """Returns the change of a machine's speed in words."""
    return f"{pace:.2f} times slower" if pace > 1 else f"{1 / pace:.2f} times faster"
