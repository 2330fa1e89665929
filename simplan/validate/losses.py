"""Loss of runs against samples and seconds, and a run's cost of a loss compared with that of a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simplan.errors import Problem, SpecError
from simplan.runs.measurement import LossPoint, Measurement
from simplan.training import least_loss

_WINDOW = 0.05
"""Fraction of a run's steps over which losses are averaged: a step's own loss scatters with its samples."""


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Loss of a run, step by step.

    Attributes:
        name: Name of the run.
        least_loss: Loss of the best possible model, in nats.
        num_samples: Samples of all ranks up to each step.
        seconds: Seconds of training up to each step.
        losses: Mean loss of the last steps up to each step, a twentieth of the run's steps, in nats.
    """

    name: str
    least_loss: float
    num_samples: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]

    @classmethod
    def of(cls, measurement: Measurement) -> LossCurve | None:
        """Curve of a run; None if its data has nothing to learn."""
        job, points = measurement.job, measurement.loss_curve
        least = least_loss(job.training.data, job.model.vocab_size)
        return None if least is None or not points else cls.of_points(job.name, least, points)

    @classmethod
    def of_points(cls, name: str, least: float, points: Sequence[LossPoint]) -> LossCurve:
        """Curve of recorded losses."""
        return cls(
            name,
            least,
            tuple(point.num_samples for point in points),
            tuple(point.seconds for point in points),
            tuple(running_mean([point.loss for point in points])),
        )

    def step_at(self, num_samples: int) -> int | None:
        """Index of the last step within a number of samples; None if the run begins or ends elsewhere."""
        within = [step for step, samples in enumerate(self.num_samples) if samples <= num_samples]
        return within[-1] if within and num_samples <= self.num_samples[-1] else None

    def step_reaching(self, loss: float) -> int:
        """Index of the first step whose loss is at most this one, which the run must reach."""
        return next(step for step, reached in enumerate(self.losses) if reached <= loss)


@dataclass(frozen=True, slots=True)
class LossComparison:
    """Cost of a loss in a run and in a baseline.

    Attributes:
        baseline: Loss of the baseline.
        loss: Largest of the two final losses, which both runs reach, in nats.
        num_samples, seconds: Cost of this loss in the run.
        baseline_num_samples, baseline_seconds: Cost of this loss in the baseline.
    """

    baseline: LossCurve
    loss: float
    num_samples: int
    seconds: float
    baseline_num_samples: int
    baseline_seconds: float

    @property
    def samples_factor(self) -> float:
        """Samples of the run over those of the baseline."""
        return self.num_samples / self.baseline_num_samples

    @property
    def seconds_factor(self) -> float:
        """Seconds of the run over those of the baseline."""
        return self.seconds / self.baseline_seconds


def compare_losses(run: LossCurve, baseline: LossCurve) -> LossComparison:
    """Compare the cost of the loss that both runs reach."""
    loss = max(run.losses[-1], baseline.losses[-1])
    step, other = run.step_reaching(loss), baseline.step_reaching(loss)
    samples, others = run.num_samples[step], baseline.num_samples[other]
    return LossComparison(baseline, loss, samples, run.seconds[step], others, baseline.seconds[other])


def compare_with_baseline(run: Measurement, baseline: Measurement) -> LossComparison:
    """Compare the losses of two runs of one model.

    Raises:
        SpecError: A run has data with nothing to learn, or the models differ.
    """
    curve, other = LossCurve.of(run), LossCurve.of(baseline)
    if curve is None or other is None:
        data = (run if curve is None else baseline).job.training.data
        rule, fix = "has no losses that tell ways to train apart", "run both with markov or gratings"
        raise SpecError(Problem(field="training.data", value=data, rule=rule, fix=fix))
    if run.job.model != baseline.job.model:
        rule = "differs from that of the run, and losses of different models do not tell ways to train apart"
        raise SpecError(Problem(field="model", rule=rule, fix="run both with one model"))
    return compare_losses(curve, other)


def running_mean(losses: Sequence[float]) -> Iterable[float]:
    """Yield the mean of the last losses up to each step, at most a twentieth of all."""
    window = max(1, round(_WINDOW * len(losses)))
    for end in range(1, len(losses) + 1):
        last = losses[max(0, end - window) : end]
        yield sum(last) / len(last)
