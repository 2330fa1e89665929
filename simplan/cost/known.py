"""Number of fitted runs that are like a job, and how much wider its intervals are without any.

``catalog/known.yaml``, which ``make fit`` writes, counts the fitted runs by what they ran on. A job is known by its
counts along six axes, each of which moves one source of error. With n runs at the job's level of an axis, the squared
relative deviation that the axis adds is ``unknown_std ** 2 / (1 + n / half_at)``: that of a random effect of which n
observations are known (Gelman et al., Bayesian Data Analysis, 3rd edition, section 5.4). The deviations are those with
which intervals hold for runs whose source, device, architecture or framework was left out of the fit (``fit.known``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from simplan import catalog
from simplan.job import Job
from simplan.units import counted, format_percent, format_time

Operators = Literal["transformer", "experts", "convolutions", "captured"]
_STEPS_S = (0.03, 0.3, 3.0)
"""Ends of the bins of the size of a step: seconds of its model FLOPs at the peak of the devices."""
_RANKS = (1, 8, 64, 512, 4096)
"""Largest numbers of devices of each bin but the last."""

_GENERAL_STD = 0.3
"""Deviation that an architecture without kernel efficiencies of its own adds. An assumption: predicted as such, H100,
A100 and B200 are 9% faster, 17% slower and 24% faster than with their own constants."""


class Ground(NamedTuple):
    """Properties of a job by which fitted runs are counted.

    Attributes:
        framework: Software profile; empty if its rates are priors, as of a framework that another profile stands for.
        operators: Kind of model, by the operators that take its time.
        step: Bin of the size of the step; -1 if the device has no published peak.
        ranks: Bin of the number of devices.
    """

    architecture: str
    device: str
    precision: str
    framework: str
    operators: Operators
    step: int
    ranks: int


class JobProperty(NamedTuple):
    """A property of jobs that intervals depend on.

    Attributes:
        source: Source of error that it moves.
        level: Level of a ground, by which runs are counted.
        words: What no run was fitted on, as ``no run {words} was fitted``.
    """

    source: Literal["compute", "communication"]
    level: Callable[[Ground], Hashable]
    words: Callable[[Ground], str]


_OPERATORS: Mapping[Operators, str] = {
    "transformer": "of a transformer",
    "experts": "with experts",
    "convolutions": "of convolutions",
    "captured": "of a captured module",
}
AXES: Mapping[str, JobProperty] = {
    "architecture": JobProperty("compute", lambda at: at.architecture, lambda at: f"on {at.architecture}"),
    "device": JobProperty("compute", lambda at: at.device, lambda at: f"on {at.device}"),
    "precision": JobProperty(
        "compute", lambda at: (at.architecture, at.precision), lambda at: f"in {at.precision} on {at.architecture}"
    ),
    "framework": JobProperty(
        "compute", lambda at: at.framework, lambda at: f"under {at.framework or 'this framework'}"
    ),
    "operators": JobProperty("compute", lambda at: at.operators, lambda at: _OPERATORS[at.operators]),
    "step": JobProperty("compute", lambda at: (at.architecture, at.step), lambda at: _step_words(at)),
    "ranks": JobProperty("communication", lambda at: at.ranks, lambda at: _ranks_words(at.ranks)),
}


class KnownAxis(NamedTuple):
    """Fitted runs at the level of a job along an axis.

    Attributes:
        std: Relative standard deviation that is added to those of the source of error.
    """

    name: str
    words: str
    num_runs: int
    std: float

    @property
    def fact(self) -> str:
        """``no run on tpu-v6e was fitted``, or how many were."""
        if not self.num_runs:
            return f"no run {self.words} was fitted"
        return f"{counted(self.num_runs, 'run')} {self.words} {'was' if self.num_runs == 1 else 'were'} fitted"


class Known(NamedTuple):
    """Fitted runs like a job along every axis.

    Attributes:
        axes: By name, in the order of ``AXES``.
        common_std: Relative standard deviation of compute under a framework without fitted runs, on known ground.
    """

    axes: Mapping[str, KnownAxis]
    common_std: float

    def std(self, source: str) -> float:
        """Relative standard deviation that is added to those of a source of error."""
        return math.hypot(*(axis.std for axis in self.axes.values() if AXES[axis.name].source == source))


def ground_of(job: Job) -> Ground:
    """Ground of a job; cheap, since a search asks for each of its plans."""
    device, training, model, cluster = job.cluster.device, job.training, job.model, job.cluster
    peak = device.peak_flop_per_s.get(training.precision)
    num_sequences = training.global_batch_size * training.sequences_per_sample
    work = model.flops_per_sequence() * num_sequences / cluster.num_devices
    return Ground(
        architecture=device.architecture,
        device=device.id,
        precision=training.precision,
        framework="" if job.software.rates.fitted_on is None else job.software.id,
        operators=operators_of(job),
        step=-1 if peak is None else sum(work / peak > most_s for most_s in _STEPS_S),
        ranks=sum(cluster.num_devices > most for most in _RANKS),
    )


def operators_of(job: Job) -> Operators:
    """Kind of model, by the operators that take its time."""
    model = job.model
    if model.captured is not None:
        return "captured"
    if model.depths:
        return "convolutions"
    return "experts" if model.num_experts else "transformer"


@cache
def known_of(ground: Ground) -> Known:
    """Fitted runs of the catalog that are like a job."""
    data = catalog.known()
    stds = data["unknown_std"]
    if not catalog.has_kernel_rates(ground.architecture):
        stds = stds | {"architecture": _GENERAL_STD}
    return known_by(ground, _counts(), stds, data["half_at"], data["common_std"])


def known_by(
    ground: Ground,
    counts: Mapping[str, Mapping[Hashable, int]],
    unknown_std: Mapping[str, float],
    half_at: float,
    common_std: float,
) -> Known:
    """Runs that are like a job, of some runs.

    Args:
        counts: Runs by axis and level; see ``counts_of``.
        unknown_std: Relative standard deviation by axis without runs.
        half_at: Runs that halve its square.
        common_std: See ``Known``.
    """
    axes = {}
    for name, axis in AXES.items():
        num_runs = counts[name].get(axis.level(ground), 0)
        std = unknown_std[name] / math.sqrt(1 + num_runs / half_at)
        axes[name] = KnownAxis(name, axis.words(ground), num_runs, std)
    return Known(axes, common_std)


def counts_of(grounds: Mapping[Ground, int]) -> dict[str, Counter[Hashable]]:
    """Runs by axis and level, from runs by ground."""
    counts: dict[str, Counter[Hashable]] = {name: Counter() for name in AXES}
    for ground, number in grounds.items():
        for name, axis in AXES.items():
            counts[name][axis.level(ground)] += number
    return counts


@cache
def _counts() -> dict[str, Counter[Hashable]]:
    rows: list[list[Any]] = catalog.known()["runs"]
    grounds: Counter[Ground] = Counter()
    for *level, num_runs, _, _ in rows:
        grounds[Ground(*level)] += num_runs
    return counts_of(grounds)


def _step_words(ground: Ground) -> str:
    least, most = ((0.0, *_STEPS_S)[ground.step], (*_STEPS_S, math.inf)[ground.step])
    size = f"below {format_time(most)}" if not least else f"above {format_time(least)}"
    if least and most < math.inf:
        size = f"of {format_time(least)} to {format_time(most)}"
    return f"with steps {size} at peak on {ground.architecture}"


def _ranks_words(ranks: int) -> str:
    least, most = (0, *_RANKS)[ranks] + 1, (*_RANKS, None)[ranks]
    if most is None:
        return f"on {least:,} devices or more"
    return f"on {least:,} to {most:,} devices" if most > least else "on one device"


@dataclass(frozen=True, slots=True)
class ErrorShare:
    """A source of error of a predicted step.

    Attributes:
        longer: Change of the logarithm of the step time when it is one standard deviation longer.
        std: Relative standard deviation of its costs, mean over their time.
        is_calibrated: Most of its time is from timings of this machine.
    """

    longer: float
    std: float
    is_calibrated: bool


@dataclass(frozen=True, slots=True)
class WeakestTerm:
    """The part of a predicted step that is known least, for its effect on the interval.

    Attributes:
        term: Source of error: ``compute``, ``communication`` or ``host``.
        fact: What is known of it, as a sentence without a period.
        num_runs: Fitted runs that are like the job in this respect; None if that is not about runs.
        interval_share: Fraction of the squared half width of the interval.
    """

    term: str
    fact: str
    num_runs: int | None
    interval_share: float


def weakest_term(job: Job, shares: Mapping[str, ErrorShare]) -> WeakestTerm | None:
    """The weakest term of a step with some sources of error; None if it has none.

    The square of the half width is the sum of those of the sources. That of a source is split by what its deviation is
    composed of: the axes along which the job is new, and what is left on known ground.
    """
    known = known_of(ground_of(job))
    total = sum(share.longer**2 for share in shares.values())
    if not total:
        return None
    found: list[tuple[float, str, KnownAxis | None]] = []
    for source, share in shares.items():
        left = 1.0
        for axis in known.axes.values() if not share.is_calibrated and share.std else ():
            if AXES[axis.name].source == source:
                part = min(left, (axis.std / share.std) ** 2)
                left -= part
                found.append((part * share.longer**2, source, axis))
        found.append((left * share.longer**2, source, None))
    square, source, weakest = max(found, key=lambda each: each[0])
    if weakest is None:
        fact = _on_known_ground(job, source, shares[source])
        return WeakestTerm(source, fact, None, square / total)
    cure = f"; {_CURE}" if source == "compute" and job.cluster.device.kind == "gpu" else ""
    return WeakestTerm(source, f"{weakest.fact}{cure}", weakest.num_runs, square / total)


_CURE = "`simplan calibrate` on one such device measures it in a minute"


def _on_known_ground(job: Job, source: str, share: ErrorShare) -> str:
    off = f"+/- {format_percent(share.std)}"
    if share.is_calibrated:
        return f"{source} was timed on this machine, {off}"
    if source == "compute":
        return f"kernels of runs under {job.software.id} scatter by {off} where runs were fitted"
    if source == "host":
        return f"the time of this machine's host is unknown, {off}; `simplan calibrate` measures it in a minute"
    return f"communication in training differs from collectives timed alone, {off}"
