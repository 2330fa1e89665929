"""Search over ways to train that change the mathematics: gradient compression, and replicas that train alone.

Such a step is not worth as much as one with whole gradients in every step. So a way is ranked among other plans only
with the number of samples that it needs for the same loss, relative to theirs (``SearchSpace.samples_factor``). Without
that it is shown apart, with the number up to which it pays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from simplan.errors import Problem, SpecError
from simplan.job import Job
from simplan.plan.compression import Compression
from simplan.plan.replication import Replication
from simplan.search.incumbents import Goal
from simplan.search.result import RankedPlan, SearchedWay, SearchResult
from simplan.search.space import SearchSpace
from simplan.wording import divisors


class PublishedFactor(NamedTuple):
    """A published number of samples for the same loss, relative to synchronous training with whole gradients.

    Attributes:
        source: Where it is from, and for what.
        read: What of the source was read: ``paper``, ``abstract``, or ``recalled`` for a figure that was not looked up.
    """

    factor: float
    source: str
    read: str

    @property
    def words(self) -> str:
        """``1 by Douillard et al. 2023 ... (paper)``."""
        return f"{self.factor:g} by {self.source} ({self.read})"


PUBLISHED: Mapping[str, PublishedFactor] = MappingProxyType(
    {
        "diloco": PublishedFactor(
            1.0,
            "Douillard et al. 2023, arXiv:2311.08105: 150M parameters, 8 replicas, 500 inner steps, perplexity 15.02 "
            "after as many samples as synchronous training with 15.30",
            "paper",
        ),
        "streaming_diloco": PublishedFactor(
            1.0, "Douillard et al. 2025, arXiv:2501.18512: the quality of data-parallel training", "abstract"
        ),
        "one_bit_adam": PublishedFactor(
            1.0, "Tang et al. 2021, arXiv:2102.02888: the convergence of Adam, after a warm-up", "abstract"
        ),
        "powersgd": PublishedFactor(
            1.0,
            "Vogels et al. 2019, arXiv:1905.13727: ResNet-18 on CIFAR-10, rank 2, 94.4 and 94.3 %",
            "recalled",
        ),
    }
)
"""By kind of replication or compression."""


@dataclass(frozen=True, slots=True)
class _Way:
    field: str
    value: Replication | Compression

    @property
    def kind(self) -> str:
        return self.value.kind


def ways_of(space: SearchSpace) -> Iterator[_Way]:
    """Yields the ways that a space asks for."""
    yield from (_Way("replication", value) for value in dict.fromkeys(space.replication or ()))
    yield from (_Way("compression", value) for value in dict.fromkeys(space.compression or ()))


def with_ways(
    result: SearchResult, job: Job, space: SearchSpace, search_one: Callable[[Job, SearchSpace], SearchResult]
) -> SearchResult:
    """Result of a search with the best plans of other ways to train.

    Args:
        result: Best plans with whole gradients in every step.
        job, space: The request.
        search_one: Searches one way.
    """
    sizes = space.num_devices or (job.cluster.num_devices,)
    replicas = sorted({divisor for size in sizes for divisor in divisors(size)} - {1})
    plain = space.model_copy(update={"replication": None, "compression": None, "samples_factor": None})
    if plain.dp_replicate is None:
        plain = plain.model_copy(update={"dp_replicate": tuple(replicas) or (1,)})
    goal, ways = Goal.of(space, job), list[SearchedWay]()
    ranked = [(_value(goal, plan), plan) for plan in result.ranked]
    best_s = result.best.step_time_s if result.best is not None else math.inf
    for way in ways_of(space):
        asked = job.with_plan(job.plan.with_changes(**{way.field: way.value}))
        factor, source = _samples_factor(space, way.kind)
        try:
            plans = search_one(asked, plain).ranked
        except SpecError as error:
            ways.append(SearchedWay(way.value.words, None, factor, source, None, error.problems[0].sentence()))
            continue
        why = "" if plans else "no plan of it fits"
        best = plans[0] if plans else None
        pays = None if best is None or math.isinf(best_s) else best_s / best.step_time_s
        ways.append(SearchedWay(way.value.words, best, factor, source, pays, why))
        if factor is not None:
            plans = tuple(replace(plan, samples_factor=factor) for plan in plans)
            ranked += [(_value(goal, plan), plan) for plan in plans]
    ranked.sort(key=lambda ranked_plan: ranked_plan[0])
    shown = tuple(plan for _, plan in ranked[: space.top])
    return replace(result, ranked=shown, ways=tuple(ways), synchronous=result.best)


def _value(goal: Goal, plan: RankedPlan) -> tuple[float, ...]:
    return goal.values(plan.num_devices, plan.device_bytes, plan.step_time_s * plan.samples_factor)


def _samples_factor(space: SearchSpace, kind: str) -> tuple[float | None, str]:
    """The factor of a way with its source; None if the user gives none."""
    factors = {str(name): factor for name, factor in (space.samples_factor or {}).items()}
    stated = factors.get(kind)
    if stated == "published":
        if (published := PUBLISHED.get(kind)) is None:
            rule = f"there is no published number of samples of {kind}; there is one of {', '.join(PUBLISHED)}"
            field = f"search.samples_factor.{kind}"
            raise SpecError(Problem(field=field, value="published", rule=rule, fix="give a number, or leave it out"))
        return published.factor, published.words
    return stated, "" if stated is None else f"{stated:g} as given"
