"""Key numbers of a prediction: fit, step time and throughput."""

from __future__ import annotations

from dataclasses import dataclass

from app.results.quick import PlanEstimate
from simplan.prediction import Prediction
from simplan.scenario import Scenario

__all__ = ["Headline", "Training", "headline_of_prediction", "headline_of_quick", "training_of"]

_HOURS_A_DAY = 24
_SECONDS_AN_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Headline:
    """Key numbers of a prediction.

    Attributes:
        step_time_s: Time of one optimizer step.
        step_time_interval_s: 90 % interval of the step time; None until the full prediction is computed.
        fits: True when the peak memory is within the capacity; None when the capacity is unknown.
        worst_rank: Peak-memory rank; None until the full prediction is computed.
        device_bytes: Peak device memory of that rank, in bytes.
        capacity_bytes: Memory of a device in bytes; None when unknown.
        samples_per_s: Sequences or images per second, all devices together.
        tokens_per_s: Tokens per second, all devices together; 0 for images.
        mfu: Model FLOPs utilization, causal attention counted half; None when the peak FLOP/s is unknown.
        short_bytes: Additional bytes that the rank's allocator would reserve on a larger device.
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
    """A full training at a constant step time, without failures and checkpoints.

    Attributes:
        days: Wall time in days.
        device_hours: Device hours of all devices.
        cost: Cost at a price per device and hour; None without a price.
    """

    days: float
    device_hours: float
    cost: float | None


def headline_of_quick(asked: Scenario, numbers: PlanEstimate) -> Headline:
    """Headline from step time and memory; throughput follows from the step time."""
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
    """Headline from a full prediction."""
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
        headline: Headline with the throughput.
        num_devices: Number of devices that are paid for.
        budget: Number of tokens, or of images for models without tokens.
        price: Price per device and hour, in any currency; None for no cost.
    """
    hours = budget / (headline.tokens_per_s or headline.samples_per_s) / _SECONDS_AN_HOUR
    device_hours = hours * num_devices
    return Training(hours / _HOURS_A_DAY, device_hours, None if price is None else price * device_hours)
