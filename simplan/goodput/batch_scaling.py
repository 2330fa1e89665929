"""Samples to a target loss against the batch, by which more devices are worth their price or not.

A larger batch needs fewer steps and more samples. With the critical batch size B_crit, at which a run needs twice the
samples that small batches need (McCandlish et al. 2018, arXiv:1812.06162, from S / S_min - 1 = 1 / (E / E_min - 1)):

    samples(B) = E_min (1 + B / B_crit),    steps(B) = samples(B) / B = S_min (1 + B_crit / B)

B_crit is measured, or follows from the loss (Kaplan et al. 2020, arXiv:2001.08361) or from the number of samples (Zhang
et al. 2024, arXiv:2410.21676). These hold with a learning rate tuned for each batch (``learning_rate_rule``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from simplan.base import Count, Positive, SpecOfKind
from simplan.optimizers import OPTIMIZERS, OptimizerName
from simplan.training import NumTokens

_KAPLAN_TOKENS, _KAPLAN_EXPONENT = 2e8, 0.21
_MIN_POINTS = 2


class SamplesAtBatch(SpecOfKind):
    """Samples that a run needs to its target, by batch.

    ``critical_batch`` states the critical batch size in samples. ``loss`` derives it from the loss of the target in
    nats per token: 2e8 tokens / loss ** (1 / 0.21) (Kaplan et al. 2020, equation 5.3, for transformers on WebText2).
    ``data`` has one that was measured on ``at_samples`` and grows with the samples of the run to the power ``exponent``
    (Zhang et al. 2024: 0.47). They call the batch with 20 % more samples critical, which is a fifth of the one here.
    ``table`` interpolates points of the user's own between logarithms.

    Attributes:
        num_samples: Samples to the target at ``batch_size``.
        batch_size: Batch of ``num_samples``; None for the limit of small batches.
        critical_batch_size: Batch at which a run needs twice the samples of small batches.
        loss: Loss of the target.
        at_samples: Samples of the run on which ``critical_batch_size`` was measured.
        exponent: Power of samples with which it grows.
        table: Pairs of batch and samples to the target, batches rising.
    """

    keys_of_kinds: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "critical_batch": ("num_samples", "batch_size", "critical_batch_size"),
        "loss": ("num_samples", "batch_size", "loss"),
        "data": ("num_samples", "batch_size", "critical_batch_size", "at_samples", "exponent"),
        "table": ("table",),
    }

    kind: Literal["critical_batch", "loss", "data", "table"] = Field(description="law of samples against batch")
    num_samples: NumTokens | None = Field(None, description="samples to the target at batch_size")
    batch_size: Count | None = Field(None, description="batch of num_samples; else the limit of small batches")
    critical_batch_size: Positive | None = Field(None, description="batch that needs twice the samples of small ones")
    loss: Annotated[float, Field(gt=0, le=100)] | None = Field(None, description="loss of the target, nats per token")
    at_samples: NumTokens | None = Field(None, description="samples of the run with critical_batch_size")
    exponent: Annotated[float, Field(ge=0, le=1)] = Field(0.47, description="growth of it with samples")
    table: tuple[tuple[Count, NumTokens], ...] | None = Field(None, description="pairs of batch and samples")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        optional = ("batch_size", "exponent")
        missing = [key for key in self._own_keys if key not in optional and getattr(self, key) is None]
        if missing:
            raise ValueError(f"of kind {self.kind} needs {' and '.join(missing)}")
        batches = [batch for batch, _ in self.table or ()]
        if self.table is not None and (len(batches) < _MIN_POINTS or batches != sorted(set(batches))):
            raise ValueError("table needs two or more points, with rising batches")
        return self

    def critical_batch(self, tokens_per_sample: int) -> float | None:
        """Critical batch size in samples; None for a table."""
        if self.loss is not None:
            return float(_KAPLAN_TOKENS / self.loss ** (1 / _KAPLAN_EXPONENT)) / tokens_per_sample
        if self.critical_batch_size is None or self.at_samples is None or self.num_samples is None:
            return self.critical_batch_size
        return float(self.critical_batch_size * (self.num_samples / self.at_samples) ** self.exponent)

    def samples(self, batch_size: int, tokens_per_sample: int = 1) -> float:
        """Samples to the target at a batch.

        Raises:
            ValueError: The batch is outside the table.
        """
        if self.table is not None:
            return _interpolated(self.table, batch_size)
        critical, num_samples = self.critical_batch(tokens_per_sample), self.num_samples
        assert critical is not None
        assert num_samples is not None
        least = num_samples / (1 + (self.batch_size or 0) / critical)
        return least * (1 + batch_size / critical)

    def num_steps(self, batch_size: int, tokens_per_sample: int = 1) -> int:
        """Whole steps to the target at a batch.

        Raises:
            ValueError: The batch is outside the table.
        """
        return math.ceil(self.samples(batch_size, tokens_per_sample) / batch_size * (1 - 1e-12))


def _interpolated(table: Sequence[tuple[int, float]], batch_size: int) -> float:
    """Samples between the two nearest points, linear between logarithms."""
    low, high = table[0][0], table[-1][0]
    if not low <= batch_size <= high:
        raise ValueError(
            f"the batch {batch_size:,} is outside the table, which has {low:,} to {high:,}; "
            f"add a point with that batch, or use kind: critical_batch"
        )
    after = next(number for number in range(1, len(table)) if table[number][0] >= batch_size)
    (batch0, samples0), (batch1, samples1) = table[after - 1], table[after]
    share = math.log(batch_size / batch0) / math.log(batch1 / batch0)
    return float(samples0 * (samples1 / samples0) ** share)


def fitted(points: Sequence[tuple[int, float]]) -> SamplesAtBatch:
    """Law of the critical batch by least squares of relative errors.

    Args:
        points: Batch and samples to the target, at least two.

    Raises:
        ValueError: Samples do not rise with the batch: the points have no critical batch.
    """
    # samples = E_min + slope B: weights 1 / samples**2
    weights = [1 / samples**2 for _, samples in points]
    total = sum(weights)
    batch = sum(w * b for w, (b, _) in zip(weights, points, strict=True)) / total
    samples = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    squares = sum(w * (b - batch) ** 2 for w, (b, _) in zip(weights, points, strict=True))
    slope = sum(w * (b - batch) * (s - samples) for w, (b, s) in zip(weights, points, strict=True)) / squares
    least = samples - slope * batch
    if slope <= 0 or least <= 0:
        raise ValueError("samples must rise with the batch, by less than in proportion; use kind: table")
    return SamplesAtBatch(kind="critical_batch", num_samples=round(least), critical_batch_size=least / slope)


@dataclass(frozen=True, slots=True)
class LearningRateRule:
    """Learning rate for another batch.

    Attributes:
        power: Power of the batch with which the learning rate grows.
        sentence: The rule with its source and range.
    """

    power: float
    sentence: str

    def factor(self, batch_factor: float) -> float:
        """Factor on the learning rate for a factor on the batch."""
        return float(batch_factor**self.power)


_LINEAR = LearningRateRule(
    1.0,
    "linear in the batch, with a warm-up over the first epochs (Goyal et al. 2017, arXiv:1706.02677: "
    "ResNet-50 up to 8,192 images)",
)
_SQUARE_ROOT = LearningRateRule(
    0.5,
    "with the square root of the batch, with a warm-up (Malladi et al. 2022, arXiv:2205.10287); runs of MLPerf's "
    "Llama 3.1 405B take it linear, from 3.1e-5 at 448 to 1.07e-4 at 1,536",
)
_LEARNING_RATES: Mapping[OptimizerName, LearningRateRule] = {
    "sgd": _LINEAR,
    "sgd_momentum": _LINEAR,
    "adam": _SQUARE_ROOT,
    "adamw": _SQUARE_ROOT,
    "lars": LearningRateRule(
        1.0,
        "linear in the batch, with a warm-up, and a rate of each layer by its norms (You et al. 2017, "
        "arXiv:1708.03888: ResNet-50 up to 32,768 images)",
    ),
    "lamb": LearningRateRule(
        0.5,
        "with the square root of the batch, with a warm-up that grows with it (You et al. 2020, arXiv:1904.00962: "
        "BERT up to 65,536 sequences)",
    ),
}


def learning_rate_rule(optimizer: OptimizerName) -> LearningRateRule:
    """Growth of the learning rate of an optimizer with the batch; LARS and LAMB are for batches beyond the others."""
    return _LEARNING_RATES.get(optimizer) or _LEARNING_RATES[OPTIMIZERS[optimizer].like]  # type: ignore[index]
