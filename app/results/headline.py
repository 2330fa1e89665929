"""What people ask first: does it fit, how long is a step, how much is done with it."""

from __future__ import annotations

from dataclasses import dataclass

from app.results.quick import Quick
from simplan.prediction import Prediction
from simplan.scenario import Scenario

__all__ = ["Headline", "Training", "headline_of_prediction", "headline_of_quick", "training_of"]

_HOURS_A_DAY = 24
_SECONDS_AN_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Headline:
    """The answer in a few numbers.

    Attributes:
        step_time_s: Time of one optimizer step.
        step_time_interval_s: Holds the truth in 9 of 10 cases; None while it is worked out.
        fits: Whether the worst rank's device bytes are within the capacity; None when that is unknown.
        worst_rank: The rank that needs most; None while it is worked out.
        device_bytes: What it needs.
        capacity_bytes: What a device has; None when unknown.
        samples_per_s: Sequences or images, all devices together.
        tokens_per_s: Tokens, all devices together; 0 for images.
        mfu: Model FLOPs utilization, causal attention counted half; None when the peak is unknown.
        short_bytes: What its allocator would reserve more on a larger device.
    """

    step_time_s: float
    step_time_interval_s: tuple[float, float] | None
    fits: bool | None
    worst_rank: int | None
    device_bytes: int
    capacity_bytes: int | None
    samples_per_s: float
    tokens_per_s: float
    mfu: float | None
    short_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Training:
    """A whole training at this pace, without failures and checkpoints.

    Attributes:
        days: Wall time.
        device_hours: Of all devices.
        cost: At a price per device and hour; None without one.
    """

    days: float
    device_hours: float
    cost: float | None


def headline_of_quick(asked: Scenario, numbers: Quick) -> Headline:
    """Of step time and memory alone; throughput follows from the step time."""
    job = asked.job
    samples_per_s = job.training.global_batch_size / numbers.step_time_s
    capacity = job.cluster.device.memory_bytes
    peak = job.cluster.device.peak_flop_per_s.get(job.training.precision)
    flop_per_s = samples_per_s * job.model.flops_per_sequence(full_attention=False)
    return Headline(
        step_time_s=numbers.step_time_s,
        step_time_interval_s=None,
        fits=None if capacity is None else numbers.device_bytes <= capacity,
        worst_rank=None,
        device_bytes=numbers.device_bytes,
        capacity_bytes=capacity,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * job.model.seq_len,
        mfu=None if peak is None else flop_per_s / (peak * job.cluster.num_devices),
    )


def headline_of_prediction(prediction: Prediction) -> Headline:
    """Of a whole one."""
    devices = prediction.job.cluster.num_devices
    worst = prediction.worst_memory
    fits = prediction.fits
    return Headline(
        step_time_s=prediction.step_time_s,
        step_time_interval_s=prediction.step_time_interval_s,
        fits=fits,
        worst_rank=worst.rank,
        device_bytes=worst.device_bytes,
        capacity_bytes=prediction.capacity_bytes,
        samples_per_s=prediction.samples_per_s_per_device * devices,
        tokens_per_s=prediction.tokens_per_s_per_device * devices,
        mfu=prediction.mfu,
        short_bytes=worst.short_bytes,
    )


def training_of(headline: Headline, num_devices: int, budget: float, price: float | None) -> Training:
    """Days, device hours and cost to train on a budget.

    Args:
        headline: The pace.
        num_devices: Devices that are paid for.
        budget: Tokens, or images for models without tokens.
        price: Per device and hour, in any currency.
    """
    hours = budget / (headline.tokens_per_s or headline.samples_per_s) / _SECONDS_AN_HOUR
    device_hours = hours * num_devices
    return Training(hours / _HOURS_A_DAY, device_hours, None if price is None else price * device_hours)
