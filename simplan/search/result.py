"""Result of a search as plain data; made by ``simplan.search.search``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from simplan.cost.known import WeakestTerm
from simplan.plan.plan import ParallelPlan
from simplan.prediction import MemoryVerdict
from simplan.search.space import Objective
from simplan.units import GIB, format_time

if TYPE_CHECKING:
    import pandas as pd

_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSoftware:
    """A plan with other options of the software.

    Attributes:
        software: Values of the searched options.
        step_time_s: Step time in seconds, on devices of any memory.
        device_bytes: Memory that the worst device needs.
        fits: False if that exceeds the memory limit of plans.
    """

    software: Mapping[str, Any]
    step_time_s: float
    device_bytes: int
    fits: bool

    def to_json(self) -> dict[str, Any]:
        """As in the document of ``simplan search --json``."""
        memory = {"device": self.device_bytes / GIB}
        return {
            "software": dict(self.software),
            "step_time_s": self.step_time_s,
            "peak_memory_gib": memory,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchExplanation:
    """Bottleneck and sensitivities of a plan.

    Attributes:
        step_time_interval_s: 90% interval of the step time, in seconds.
        weakest_term: What is known least, for its effect on the interval; None without uncertainty.
        mfu: Model FLOPs utilization; None if the device peak is unknown.
        allocated_bytes, reserved_bytes: Allocated and reserved peak of the peak-memory rank.
        device_interval_bytes: 90% interval of the device memory of the peak-memory rank.
        memory_verdict: Verdict on the whole device memory; None if that is unknown.
        worst_rank: Peak-memory rank.
        worst_bytes: Device memory of this rank, with the full allocator reserve.
        worst_capacity_bytes: Memory of its device; None if unknown.
        busiest_rank: Rank with the least wait time.
        shares: Fractions of the busiest rank's step, which sum to 1: compute, recompute, exposed_communication, wait,
            host, optimizer.
        saved: By resource, the fraction of the step time that 10% more of it saves; resources without effect are
            missing. None if ranks share cores, whose rates are not modeled.
        other_software: The plan with each combination of the searched options that differs in one and has it.
        slowest_link, contention: Link that delays communications most, or the busiest, and cost of contention, in words
            of ``Network``; empty for a cluster without a topology.
    """

    step_time_interval_s: tuple[float, float]
    weakest_term: WeakestTerm | None
    mfu: float | None
    allocated_bytes: int
    reserved_bytes: int
    device_interval_bytes: tuple[int, int]
    memory_verdict: MemoryVerdict | None
    worst_rank: int
    worst_bytes: int
    worst_capacity_bytes: int | None
    busiest_rank: int
    shares: Mapping[str, float]
    saved: Mapping[str, float] | None
    other_software: tuple[OtherSoftware, ...] = ()
    slowest_link: str = ""
    contention: str = ""

    @property
    def limit(self) -> str:
        """Name of the largest fraction of the busiest rank's step."""
        return max(self.shares, key=lambda name: self.shares[name])

    @property
    def help(self) -> str | None:
        """Resource of which 10% more saves the most time; None if none saves any."""
        return max(self.saved or {}, key=(self.saved or {}).__getitem__, default=None)


@dataclass(frozen=True, slots=True)
class EquivalentPlans:
    """Plans equivalent to a shown plan: the same degrees and microbatch size, and step times within 0.1%.

    Attributes:
        num_plans: Number of other plans.
        differ_in: By plan field, the values of the other plans that differ from the shown plan.
    """

    num_plans: int = 0
    differ_in: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan that fits, with its memory, step time and throughput.

    Attributes:
        software: Options of the software that the search varies, such as ``{"compiled": True}``.
        num_devices: Devices that the plan needs.
        step_time_s: Seconds of one optimizer step.
        device_bytes: Device memory of the worst rank.
        headroom_bytes: Usable device memory that the worst rank leaves free; None if the device memory is unknown.
        tokens_per_s_per_device: Throughput; images per second for image models.
        cost_dollars: Price of the token budget; None without a price.
        explanation: Bottleneck and sensitivities; None for plans that are not ranked.
        alike: Equivalent plans; empty for plans that are not ranked.
        samples_factor: Samples for the same loss, relative to synchronous training with whole gradients; plans are
            ranked as if a step took so many times longer.
    """

    plan: ParallelPlan
    num_devices: int
    step_time_s: float
    device_bytes: int
    headroom_bytes: int | None
    tokens_per_s_per_device: float
    cost_dollars: float | None = None
    explanation: SearchExplanation | None = None
    alike: EquivalentPlans = EquivalentPlans()
    software: Mapping[str, Any] = field(default_factory=dict)
    samples_factor: float = 1.0

    def main_difference(self, best: RankedPlan) -> tuple[str, float] | None:
        """Category of the step breakdown with most of the time by which the step is longer than the best plan's.

        Returns:
            Category and seconds more than in the best plan; None if the step is not longer or a plan is not explained.
        """
        mine, its = self.explanation, best.explanation
        if mine is None or its is None or self.step_time_s <= best.step_time_s:
            return None
        more_s = {
            name: share * self.step_time_s - its.shares[name] * best.step_time_s for name, share in mine.shares.items()
        }
        return max(more_s.items(), key=lambda item: item[1])

    def to_json(self) -> dict[str, Any]:
        """As in the document of ``simplan search --json``."""
        memory = {"device": self.device_bytes / GIB}
        document: dict[str, Any] = {
            "plan": self.plan.model_dump(mode="json"),
            "software": dict(self.software),
            "num_devices": self.num_devices,
            "step_time_s": self.step_time_s,
            "peak_memory_gib": memory,
            "headroom_gib": None if self.headroom_bytes is None else self.headroom_bytes / GIB,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "cost_dollars": self.cost_dollars,
            **({} if self.samples_factor == 1.0 else {"samples_factor": self.samples_factor}),
            "alike": to_jsonable_python(self.alike),
        }
        why = self.explanation
        if why is not None:
            memory |= {"allocated": why.allocated_bytes / GIB, "reserved": why.reserved_bytes / GIB}
            document |= {
                "step_time_interval_s": list(why.step_time_interval_s),
                "weakest_term": to_jsonable_python(why.weakest_term),
                "memory_verdict": why.memory_verdict,
                "peak_memory_interval_gib": {"device": [end / GIB for end in why.device_interval_bytes]},
                "mfu": why.mfu,
                "worst_rank": why.worst_rank,
                "busiest_rank": why.busiest_rank,
                "shares": dict(why.shares),
                "limit": why.limit,
                **({"slowest_link": why.slowest_link, "contention": why.contention} if why.contention else {}),
                "saved_by_10_percent_more": dict(why.saved or {}),
                "help": why.help,
                "other_software": [other.to_json() for other in why.other_software],
            }
        return document


@dataclass(frozen=True, slots=True)
class SearchedWay:
    """A way to train that changes the mathematics, and its best plan.

    Attributes:
        words: Description of the way.
        best: Its best plan; None if none fits.
        samples_factor: Samples that it needs for the same loss, relative to synchronous training with whole gradients;
            None if it is not given, and the way is not ranked.
        source: Where the factor is from; empty for none.
        pays_below: Factor up to which its best plan reaches a loss before the best synchronous plan; None without both.
        why_not: Reason for which it has no plan; empty if it has one.
    """

    words: str
    best: RankedPlan | None
    samples_factor: float | None
    source: str
    pays_below: float | None
    why_not: str = ""

    def to_json(self) -> dict[str, Any]:
        """As in the document of ``simplan search --json``."""
        return {
            "way": self.words,
            "best": None if self.best is None else self.best.to_json(),
            "samples_factor": self.samples_factor,
            "source": self.source,
            "pays_below": self.pays_below,
            "why_not": self.why_not,
        }


@dataclass(frozen=True, slots=True)
class SpaceCount:
    """Candidate counts of a search: total = sum of rejected + bounded + timed.

    Attributes:
        total: Candidates of the space.
        rejected: Candidates by the rule that rejected them; ``memory`` and ``max_step_time_s`` count as rules.
        bounded: Candidates pruned by the lower bound on their objective; it is unknown if they fit.
        timed: Candidates with a simulated step time.
        why: By rule that rejected candidates, its text.
        some_blocks: Plans timed in addition to those of the space that recompute only some blocks
            (``recompute_layers``). They are not part of the total, since their number depends on the number of ranked
            plans.
        in_headroom: Candidates rejected for memory that the headroom of the search (``max_memory_fraction``) may hold:
            an upper limit, since bounds on memory are below the memory.
    """

    total: int
    rejected: Mapping[str, int]
    bounded: int
    timed: int
    why: Mapping[str, str]
    some_blocks: int = 0
    in_headroom: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestMiss:
    """A plan that violates no rule, but exceeds the memory or the deadline.

    Attributes:
        software: Options of the software that the search varies.
        num_devices: Devices that the plan needs.
        device_bytes: Memory that the worst device needs.
        lacking_bytes: Bytes over the usable memory; None if the plan fits.
        step_time_s: Step time in seconds; None if the plan does not fit.
        lacking_s: Seconds over the deadline; None if the plan does not fit.
    """

    plan: ParallelPlan
    num_devices: int
    device_bytes: int
    lacking_bytes: int | None = None
    step_time_s: float | None = None
    lacking_s: float | None = None
    software: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As in the document of ``simplan search --json``."""
        return {
            "plan": self.plan.model_dump(mode="json"),
            "software": dict(self.software),
            "num_devices": self.num_devices,
            "peak_memory_gib": {"device": self.device_bytes / GIB},
            "lacking_gib": None if self.lacking_bytes is None else self.lacking_bytes / GIB,
            "step_time_s": self.step_time_s,
            "lacking_s": self.lacking_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestChange:
    """One change of the request that makes a plan feasible; verified by a search.

    Attributes:
        what: Kind of change: ``num_devices``, ``max_memory_fraction``, ``memory_bytes``, ``global_batch_size``,
            ``recompute``, ``ranges`` or ``max_step_time_s``, or a setting that no search varies, such as
            ``plan.offload_optimizer``.
        words: The change as a phrase for reports.
        plan: A plan that is feasible after the change.
        software: Options of the software that the search varies, with which it is.
    """

    what: str
    value: float | str
    words: str
    plan: ParallelPlan
    software: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchResult:
    """Best plans of a space, and counts of and reasons for the others.

    Attributes:
        objectives: Objectives of the search, the ranking one first.
        max_memory_fraction: Fraction of the device memory that plans may use.
        ranked: Best plans by the first objective, best first; the simplest of each group of equivalent plans.
        pareto: Pareto front of two objectives, sorted by the first; empty with one objective.
        nearest_misses: Infeasible plans closest to the memory limit; closest to the deadline if plans fit but are too
            slow.
        changes: Changes that make a plan feasible; empty if a plan was found.
        interrupted: True if the search was stopped: ranking and counts then cover only the evaluated candidates.
        unsearched: Axes with one value by default of which the job has plans with others, and values to search.
        unit: Unit of throughput: ``tokens`` or ``images``.
        links: ``ClusterSpec.links`` of the job; a plan of fewer devices may lack one.
        assumptions: Sentences about values that were not given.
        ways: Ways to train that change the mathematics; empty if the search asks for none.
        synchronous: Best plan with whole gradients in every step, if the search compares other ways as well.
    """

    name: str
    objectives: tuple[Objective, ...]
    ranked: tuple[RankedPlan, ...]
    pareto: tuple[RankedPlan, ...]
    space: SpaceCount
    max_memory_fraction: float = 1.0
    nearest_misses: tuple[NearestMiss, ...] = ()
    changes: tuple[RequestChange, ...] = ()
    interrupted: bool = False
    unsearched: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "tokens"
    links: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    ways: tuple[SearchedWay, ...] = ()
    synchronous: RankedPlan | None = None

    def __repr__(self) -> str:
        """Number of plans and the best one, in one line."""
        best = "no plan is feasible"
        if self.best is not None:
            best = f"best {format_time(self.best.step_time_s)} a step with {self.best.plan!r}"
        return f"SearchResult({self.name}: {self.space.total:,} plans, {len(self.ranked)} ranked, {best})"

    @property
    def best(self) -> RankedPlan | None:
        """The best plan; None if no plan is feasible."""
        return self.ranked[0] if self.ranked else None

    def report(self) -> str:
        """The text that ``simplan search`` prints."""
        from simplan.report.search import search_text

        return search_text(self)

    def to_dataframe(self) -> pd.DataFrame:
        """Table with one row per plan: ranked plans, then unranked plans of the front.

        Columns have the names of plan fields and result keys.

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
                **plan.software,
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
        """JSON document of ``simplan search --json``."""
        ranked = [plan.to_json() for plan in self.ranked]
        for plan, document in zip(self.ranked, ranked, strict=True):
            difference = plan.main_difference(self.ranked[0])
            document["main_difference"] = difference and {"category": difference[0], "seconds": difference[1]}
        return {
            "schema_version": _SCHEMA_VERSION,
            "kind": "search",
            "name": self.name,
            "inputs": dict(self.inputs),
            "links": dict(self.links),
            "assumptions": list(self.assumptions),
            "objectives": list(self.objectives),
            "max_memory_fraction": self.max_memory_fraction,
            "best": ranked[0] if ranked else None,
            "ranked": ranked,
            "pareto": [plan.to_json() for plan in self.pareto],
            "space": to_jsonable_python(self.space, exclude={"why"}),
            "rules": dict(self.space.why),
            "nearest_misses": [miss.to_json() for miss in self.nearest_misses],
            "changes": to_jsonable_python(self.changes),
            "interrupted": self.interrupted,
            "unsearched": {name: list(values) for name, values in self.unsearched.items()},
            **self._ways_json(),
        }

    def _ways_json(self) -> dict[str, Any]:
        if not self.ways:
            return {}
        synchronous = None if self.synchronous is None else self.synchronous.to_json()
        return {"ways": [way.to_json() for way in self.ways], "synchronous": synchronous}
