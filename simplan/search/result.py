"""The answer of a search. Plain data; ``simplan.search.search`` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from simplan.plan.plan import ParallelPlan
from simplan.search.space import Objective
from simplan.units import GIB

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "SEARCH_SCHEMA_VERSION",
    "Alike",
    "Change",
    "NearestMiss",
    "RankedPlan",
    "SearchExplanation",
    "SearchResult",
    "SpaceCount",
]

SEARCH_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchExplanation:
    """Why a plan takes as long as it does.

    Attributes:
        step_time_interval_s: Interval of the step time in 9 of 10 cases.
        mfu: Model FLOPs utilization; None when the peak is unknown.
        allocated_bytes, reserved_bytes: Of the worst rank, beside its device bytes.
        worst_rank: The rank that needs most memory.
        busiest_rank: The rank that waits least: the others wait for it.
        shares: Its step in shares that sum to 1: compute, recompute, exposed_communication, wait, host, optimizer.
        saved: By resource, the share of the step time that 10 % more of it saves; what is left out has no effect.
    """

    step_time_interval_s: tuple[float, float]
    mfu: float | None
    allocated_bytes: int
    reserved_bytes: int
    worst_rank: int
    busiest_rank: int
    shares: Mapping[str, float]
    saved: Mapping[str, float]

    @property
    def limit(self) -> str:
        """The largest share of the busiest rank's step."""
        return max(self.shares, key=lambda name: self.shares[name])

    @property
    def help(self) -> str | None:
        """The resource of which 10 % more saves most; None when nothing does."""
        return max(self.saved, key=lambda name: self.saved[name], default=None)


@dataclass(frozen=True, slots=True)
class Alike:
    """Plans that are as good as one that is shown, to a thousandth, on as many ranks of every axis.

    Attributes:
        num_plans: How many.
        differ_in: By key of a plan, the values that they have and the one that is shown has not.
    """

    num_plans: int = 0
    differ_in: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan that fits, with its numbers.

    Attributes:
        plan: The plan.
        num_devices: Devices it needs.
        step_time_s: Time of one optimizer step.
        device_bytes: Device memory of the worst rank.
        headroom_bytes: What is left of the memory that plans may use; None when the capacity is unknown.
        tokens_per_s_per_device: Throughput; images per second for models of images.
        cost_dollars: Price of the token budget; None without a price.
        explanation: Why it takes so long; of ranked plans only.
        alike: Others that are as good; of ranked plans only.
    """

    plan: ParallelPlan
    num_devices: int
    step_time_s: float
    device_bytes: int
    headroom_bytes: int | None
    tokens_per_s_per_device: float
    cost_dollars: float | None = None
    explanation: SearchExplanation | None = None
    alike: Alike = Alike()

    def to_json(self) -> dict[str, Any]:
        """As in the document of ``simplan search --json``."""
        memory = {"device": self.device_bytes / GIB}
        document: dict[str, Any] = {
            "plan": self.plan.model_dump(mode="json"),
            "num_devices": self.num_devices,
            "step_time_s": self.step_time_s,
            "peak_memory_gib": memory,
            "headroom_gib": None if self.headroom_bytes is None else self.headroom_bytes / GIB,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "cost_dollars": self.cost_dollars,
            "alike": to_jsonable_python(self.alike),
        }
        why = self.explanation
        if why is not None:
            memory |= {"allocated": why.allocated_bytes / GIB, "reserved": why.reserved_bytes / GIB}
            document |= {
                "step_time_interval_s": list(why.step_time_interval_s),
                "mfu": why.mfu,
                "worst_rank": why.worst_rank,
                "busiest_rank": why.busiest_rank,
                "shares": dict(why.shares),
                "limit": why.limit,
                "saved_by_10_percent_more": dict(why.saved),
                "help": why.help,
            }
        return document


@dataclass(frozen=True, slots=True)
class SpaceCount:
    """Where every candidate went: total = sum of rejected + bounded + timed.

    Attributes:
        total: Candidates of the space.
        rejected: By the rule that removed them; ``memory`` and ``max_step_time_s`` are among the rules.
        bounded: Could not be among the best by a bound on their time; nobody knows whether these fit.
        timed: The others.
        why: What the rules say, of those that removed any.
        some_blocks: Plans timed besides those of the space, that run only some blocks again (``recompute_layers``).
            Which are worth it depends on how many plans are ranked, so they are no part of the total.
    """

    total: int
    rejected: Mapping[str, int]
    bounded: int
    timed: int
    why: Mapping[str, str]
    some_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestMiss:
    """A plan that breaks no rule but a limit.

    Attributes:
        plan: The plan.
        num_devices: Devices it is for.
        device_bytes: What its worst device needs.
        lacking_bytes: How much of that is too much; None when it fits.
        step_time_s: Its time, when it fits.
        lacking_s: How much of that is beyond the deadline; None when memory is what it lacks.
    """

    plan: ParallelPlan
    num_devices: int
    device_bytes: int
    lacking_bytes: int | None = None
    step_time_s: float | None = None
    lacking_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As in the document of ``simplan search --json``."""
        return {
            "plan": self.plan.model_dump(mode="json"),
            "num_devices": self.num_devices,
            "peak_memory_gib": {"device": self.device_bytes / GIB},
            "lacking_gib": None if self.lacking_bytes is None else self.lacking_bytes / GIB,
            "step_time_s": self.step_time_s,
            "lacking_s": self.lacking_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of the question with which there is a plan; tried, not guessed.

    Attributes:
        what: ``num_devices``, ``memory_bytes``, ``global_batch_size``, ``recompute``, ``ranges`` or ``deadline``.
        value: What it must be.
        words: The same as a sentence.
        plan: A plan that is then within all limits.
    """

    what: str
    value: float | str
    words: str
    plan: ParallelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plans of a space, and why not the others.

    Attributes:
        name: For people.
        objectives: What was made best.
        ranked: The best plans by the first objective, best first; of plans that are alike and as good to a thousandth,
            the simplest.
        pareto: With two objectives, all plans that none is better than in both, by the first.
        space: Where every candidate went.
        nearest_misses: Plans that lack least: memory, or time where nothing is within the deadline.
        changes: When there is no plan: changes that make one, each tried.
        interrupted: The search was stopped: the best so far, and counts of what was looked at.
        inputs: What was asked.
        unit: What throughput counts: ``tokens`` or ``images``.
    """

    name: str
    objectives: tuple[Objective, ...]
    ranked: tuple[RankedPlan, ...]
    pareto: tuple[RankedPlan, ...]
    space: SpaceCount
    nearest_misses: tuple[NearestMiss, ...] = ()
    changes: tuple[Change, ...] = ()
    interrupted: bool = False
    inputs: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "tokens"

    @property
    def best(self) -> RankedPlan | None:
        """The best plan; None when there is none."""
        return self.ranked[0] if self.ranked else None

    def to_dataframe(self) -> pd.DataFrame:
        """A row a plan, ranked ones first, then those of the front that are not ranked; columns are the plan's keys.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas as pd

        rows = [(rank + 1, plan) for rank, plan in enumerate(self.ranked)]
        rows += [(0, plan) for plan in self.pareto if plan not in self.ranked]
        return pd.DataFrame(
            {
                "rank": rank or None,
                "on_front": plan in self.pareto,
                **plan.plan.model_dump(mode="json"),
                "num_devices": plan.num_devices,
                "step_time_s": plan.step_time_s,
                "device_gib": plan.device_bytes / GIB,
                "tokens_per_s_per_device": plan.tokens_per_s_per_device,
                "cost_dollars": plan.cost_dollars,
                "limit": plan.explanation.limit if plan.explanation else None,
                "help": plan.explanation.help if plan.explanation else None,
            }
            for rank, plan in rows
        )

    def to_json(self) -> dict[str, Any]:
        """The document of ``simplan search --json``."""
        best = self.best
        return {
            "schema_version": SEARCH_SCHEMA_VERSION,
            "kind": "search",
            "name": self.name,
            "inputs": dict(self.inputs),
            "objectives": list(self.objectives),
            "best": None if best is None else best.to_json(),
            "ranked": [plan.to_json() for plan in self.ranked],
            "pareto": [plan.to_json() for plan in self.pareto],
            "space": {
                "total": self.space.total,
                "rejected": dict(self.space.rejected),
                "bounded": self.space.bounded,
                "timed": self.space.timed,
                "some_blocks": self.space.some_blocks,
            },
            "rules": dict(self.space.why),
            "nearest_misses": [miss.to_json() for miss in self.nearest_misses],
            "changes": to_jsonable_python(self.changes),
            "interrupted": self.interrupted,
        }
