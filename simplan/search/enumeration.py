"""Enumeration of the candidates of a space; each rule is checked once its fields are decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby, product
from typing import Any, NamedTuple, TypeVar

from simplan.errors import Problem, SpecError
from simplan.job import Job
from simplan.model.families import FAMILIES
from simplan.plan.placement import DEFAULT_ORDER, axes_of
from simplan.plan.plan import ParallelPlan
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.predict.balance import groups_of_replicas
from simplan.problems import render_value
from simplan.rules import MEMORY_RULES, RULES, SEARCH_RULES
from simplan.rules.filter import FilterStage, PlanFilter
from simplan.search.candidates import Candidates, categories
from simplan.search.space import (
    SOFTWARE_RANGES,
    SearchSpace,
    check_without_plan,
    given_ranges,
    searched_options,
    that_it_has,
    with_options,
)
from simplan.software.software import SoftwareSpec
from simplan.wording import divisors, either

LONG_SEQUENCE = 32_768
"""Sequence length, in tokens, from which context parallelism is tried by default."""

DEFAULT_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb-h1", "zb-v")
DEFAULT_RECOMPUTE = ("none", "selective", "full")

_TABLE_ROWS = 32_768

T = TypeVar("T", bound=tuple[Any, ...])
Value = TypeVar("Value")

_STEPS = (
    "tp cp pp dp_replicate dp_shard ep placement",
    "zero_stage reshard_after_forward",
    "schedule virtual_stages",
    "sequence_parallel cp_comm",
    "recompute recompute_modules",
    "microbatch_size microbatch_sizes grad_sync",
)
"""Plan fields in the order in which they are decided."""
_NAMES = " ".join(_STEPS).split()
_OF_REDUCTION = [rule for rule in RULES if "grad_sync" in rule.reads]


class _Steps(NamedTuple):
    """Rule checks of each step; each returns the first violated rule."""

    mesh: FilterStage
    sharding: FilterStage
    pipeline: FilterStage
    sequence_and_context: FilterStage
    recompute: FilterStage
    batch: FilterStage


class Mesh(NamedTuple):
    """Parallel degrees of a plan, and the placement of its ranks."""

    tp: int
    cp: int
    pp: int
    dp_replicate: int
    dp_shard: int
    ep: int
    placement: tuple[str, ...] | tuple[int, ...] | None = None


_MESH = len(Mesh._fields)


class Enumeration:
    """The candidates of a space on the devices of one cluster.

    Values without effect are not candidates: a schedule without a pipeline, ZeRO with one shard, sequence parallelism
    with tp = 1, gradient reductions per microbatch with one microbatch, and balanced microbatches on replicas of equal
    devices. ZeRO-3 without resharding is ZeRO-2, and is listed as ZeRO-2. Of placements that put all ranks on the same
    devices, one is a candidate.

    Args:
        job: The job. Its plan supplies the fields that a search does not vary.
    """

    def __init__(self, space: SearchSpace, job: Job) -> None:
        self._space, self._job = space, job
        self._values = categories(_unique(space.recompute_modules), _unique(space.placement))
        self._uneven: dict[Mesh, bool] = {}
        rules = (*RULES, *MEMORY_RULES) if space.tp_across_nodes else (*RULES, *SEARCH_RULES, *MEMORY_RULES)
        if space.placement is None:  # rules about placements hold, and would be checked for every mesh
            job = job.with_plan(job.plan.model_copy(update={"placement": None}))
            needed = {"groups_of_equal_devices"} if job.cluster.is_mixed else set[str]()
            if job.plan.collectives is not None:
                needed |= {"collectives_of_groups", "parameter_servers_of_replicas"}
            rules = tuple(rule for rule in rules if "placement" not in rule.reads or rule.name in needed)
        self.filter = PlanFilter(job, rules)
        self._why_not = _Steps(*self.filter.stages(*_STEPS))
        assert not self._why_not.batch.reads & {*_STEPS[4].split()}, "batches are checked for one recomputation"
        [self._why_not_sync] = PlanFilter(job, _OF_REDUCTION).stages(f"{_STEPS[0]} zero_stage grad_sync")
        self.meshes = list(self._meshes())

    @property
    def num_devices(self) -> int:
        """Devices that every candidate needs."""
        return self._job.cluster.num_devices

    def has(self, plan: ParallelPlan) -> bool:
        """True if the search combines the values of a plan, in an order of its own axes and without a fixed option."""
        mesh = Mesh(*(getattr(plan, name) for name in Mesh._fields))
        fixed = set(ParallelPlan.model_fields) - {*_NAMES, "recompute_layers"}
        return (
            mesh in self.meshes
            and all(getattr(plan, name) == getattr(self._job.plan, name) for name in fixed)
            and (plan.schedule, plan.virtual_stages) in self._pipelines(mesh)
            and (plan.sequence_parallel, plan.cp_comm) in self._sequence_and_context_options(mesh)
            and (plan.recompute, plan.recompute_modules) in self._recomputes()
        )

    @cached_property
    def total(self) -> int:
        """Number of candidates."""
        return sum(self.size(mesh) for mesh in self.meshes)

    def size(self, mesh: Mesh) -> int:
        """Number of candidates of one mesh."""
        return len(self._pipelines(mesh)) * sum(self._inner((*mesh, *of)) for of in self._shardings(mesh))

    def tables(self, rejected: Counter[str], meshes: Iterable[Mesh] | None = None) -> Iterator[Candidates]:
        """Yield tables of thousands of candidates that violate no rule.

        Args:
            rejected: Counter of the other candidates by violated rule; updated.
            meshes: Meshes to enumerate; None for all.
        """
        rows: list[tuple[Any, ...]] = []
        for _, group in groupby(self.meshes if meshes is None else meshes, key=lambda mesh: mesh.pp):
            of_pp = list(_allowed(group, self._why_not.mesh, self.size, rejected))
            for columns in self._of_meshes(of_pp, rejected) if of_pp else ():
                rows += columns
                if len(rows) >= _TABLE_ROWS:
                    yield Candidates.of_rows(self._job.plan, self._values, _NAMES, rows)
                    rows = []
        if rows:
            yield Candidates.of_rows(self._job.plan, self._values, _NAMES, rows)

    def _of_meshes(self, meshes: Sequence[Mesh], rejected: Counter[str]) -> Iterator[list[tuple[Any, ...]]]:
        """Rows of meshes with equal pipeline degree, grouped by schedule."""
        why_not, pipelines = self._why_not, self._pipelines(meshes[0])
        options = [(*mesh, *sharding) for mesh in meshes for sharding in self._shardings(mesh)]
        sharded = list(_allowed(options, why_not.sharding, lambda known: len(pipelines) * self._inner(known), rejected))
        for pipeline in pipelines:
            for known in _allowed([(*known, *pipeline) for known in sharded], why_not.pipeline, self._inner, rejected):
                yield self._of_pipeline(known, rejected)

    def _inner(self, known: tuple[Any, ...]) -> int:
        """Number of candidates with one mesh, sharding and pipeline."""
        mesh, zero_stage = Mesh(*known[:_MESH]), known[_MESH]
        return (
            len(self._sequence_and_context_options(mesh))
            * len(self._microbatches(mesh, zero_stage))
            * len(self._recomputes())
        )

    def _of_pipeline(self, known: tuple[Any, ...], rejected: Counter[str]) -> list[tuple[Any, ...]]:
        """Rows with one mesh, sharding and pipeline."""
        mesh, zero_stage, why_not = Mesh(*known[:_MESH]), known[_MESH], self._why_not
        batches, recomputes = self._microbatches(mesh, zero_stage), self._recomputes()
        options = [(*known, *option) for option in self._sequence_and_context_options(mesh)]
        rows_so_far = list(_allowed(options, why_not.sequence_and_context, len(batches) * len(recomputes), rejected))
        rows: list[tuple[Any, ...]] = []
        for here in rows_so_far:
            options = [(*here, *recompute) for recompute in recomputes]
            kept = list(_allowed(options, why_not.recompute, len(batches), rejected))
            if kept:
                options = [(*kept[0], *batch) for batch in batches]
                cut = [option[-3:] for option in _allowed(options, why_not.batch, len(kept), rejected)]
                rows += [(*recompute, *batch) for batch in cut for recompute in kept]
        return rows

    def _meshes(self) -> Iterator[Mesh]:
        space, model, cluster = self._space, self._job.model, self._job.cluster
        devices = cluster.num_devices
        in_node = devices if space.tp_across_nodes else min(cluster.devices_per_node, devices)
        whole = bool(FAMILIES[model.family].whole_layers)
        heads = [] if whole else [d for d in divisors(model.num_attention_heads or 1) if d <= in_node]
        if model.captured is not None:
            heads = [degree for degree in model.captured.degrees if degree <= in_node]
        long = model.seq_len >= LONG_SEQUENCE and not whole
        tps = space.tp or tuple(heads or [1] if not model.num_experts else [1])  # with experts, tp only on request
        cps = space.cp or ((1, 2, 4, 8) if long else (1,))
        eps = space.ep or tuple(divisors(model.num_experts) if model.num_experts else [1])
        for pp in _unique(space.pp) or divisors(devices):  # outermost, so that plans of one table share a pipeline
            if space.pp is None and pp > model.num_blocks:
                continue
            for tp, cp in product(_unique(tps), _unique(cps)):
                dp, rest = divmod(devices, tp * cp * pp)
                if rest:
                    continue
                for dp_shard in divisors(dp):
                    if not _in(dp_shard, space.dp_shard) or not _in(dp // dp_shard, space.dp_replicate):
                        continue
                    for ep in _unique(eps):
                        if space.ep is not None or dp * tp * cp % ep == 0:
                            mesh = Mesh(tp, cp, pp, dp // dp_shard, dp_shard, ep)
                            for placement in self._placements(mesh):
                                yield mesh._replace(placement=placement)

    def _placements(self, mesh: Mesh) -> tuple[tuple[str, ...] | tuple[int, ...] | None, ...]:
        """Placements that differ on a mesh; None for its own order."""
        if self._space.placement is None:
            return (None,)
        placements: dict[tuple[object, ...], tuple[str, ...] | tuple[int, ...] | None] = {}
        usual = tuple(axis for axis in DEFAULT_ORDER if getattr(mesh, axis) > 1)
        for placement in self._space.placement:
            if isinstance(placement[0], int):
                is_own = placement == tuple(range(len(placement)))
                placements.setdefault(usual if is_own else placement, None if is_own else placement)
                continue
            order = tuple(axis for axis in axes_of(map(str, placement)) if getattr(mesh, axis) > 1)
            says_ep = "ep" in placement and mesh.ep > 1  # a rule says where it may be
            placements.setdefault(order, None if order == usual and not says_ep else placement)
        return tuple(placements.values())

    def _shardings(self, mesh: Mesh) -> list[tuple[int, bool]]:
        """Pairs of ZeRO stage and ``reshard_after_forward``."""
        if mesh.dp_shard * mesh.cp == 1:
            return [(0, True)]
        stages = _unique(self._space.zero_stage) or (0, 1, 2, 3)
        stages_and_reshards = [(stage, True) for stage in stages if (stage < 3 and (stage or mesh.dp_shard == 1))]
        if 3 in stages:
            reshard = self._space.reshard_after_forward or (True, False)
            stages_and_reshards += [(3, kept) for kept in _unique(reshard) if kept or 2 not in stages]
        return stages_and_reshards

    def _pipelines(self, mesh: Mesh) -> list[tuple[str, int]]:
        """Pairs of schedule and stages per rank."""
        if mesh.pp == 1:
            return [("none", 1)]
        max_stages = self._job.model.num_blocks // mesh.pp
        pipelines = []
        for schedule in _unique(self._space.schedule) or DEFAULT_SCHEDULES:
            wanted = SCHEDULE_FACTS[schedule].virtual_stages
            stages = (
                range(2, max_stages + 1) if self._space.virtual_stages is None else _unique(self._space.virtual_stages)
            )
            choices = [wanted] if wanted is not None else [v for v in stages if v > 1]
            pipelines += [(schedule, v) for v in choices if _in(v, self._space.virtual_stages)]
        return pipelines

    def _sequence_and_context_options(self, mesh: Mesh) -> list[tuple[bool, str]]:
        """Pairs of ``sequence_parallel`` and ``cp_comm``."""
        default = "all_gather" if self._job.cluster.device.kind == "cpu" else "ring"
        splits = (_unique(self._space.sequence_parallel) or (True, False)) if mesh.tp > 1 else (False,)
        captured = self._job.model.captured
        if captured is not None and mesh.tp in captured.degrees[1:]:  # its plan says what it splits
            splits = (captured.splits_tokens(mesh.tp),)
        ways = (_unique(self._space.cp_comm) or (default,)) if mesh.cp > 1 else ("ring",)
        return list(product(splits, ways))

    def _microbatches(self, mesh: Mesh, zero_stage: int) -> list[tuple[int, str | None, str | None]]:
        """Microbatch size, ``microbatch_sizes`` and ``grad_sync``.

        By default, FSDP without a pipeline is also tried with one reduction per step, for slow networks.
        """
        dp, batch = mesh.dp_replicate * mesh.dp_shard, self._job.training.global_batch_size
        sizes, syncs = self._microbatch_sizes(mesh), self._grad_syncs(mesh, zero_stage)
        return [
            (size, shares, sync)
            for size in sizes
            for shares in self._shares(mesh, size)
            for sync in (syncs if batch >= 2 * dp * size else (None,))
        ]

    def _shares(self, mesh: Mesh, size: int) -> tuple[str | None, ...]:
        """Values of ``microbatch_sizes``: balanced ones only where ranks can have different sizes."""
        asked = _unique(self._space.microbatch_sizes) or (None, "balanced")
        return asked if size > 1 and self._is_uneven(mesh) else (None,)

    def _is_uneven(self, mesh: Mesh) -> bool:
        """True if data-parallel ranks of a mesh may differ in their devices, and so in their microbatches."""
        if not self._job.cluster.is_mixed or mesh.dp_replicate * mesh.dp_shard == 1 or mesh.ep > 1:
            return False
        if mesh.placement is not None:
            return True
        if mesh not in self._uneven:
            plan = self._job.plan.model_copy(update=mesh._asdict())
            self._uneven[mesh] = len(set(groups_of_replicas(self._job.with_plan(plan)))) > 1
        return self._uneven[mesh]

    def _grad_syncs(self, mesh: Mesh, zero_stage: int) -> tuple[str | None, ...]:
        """Values of ``grad_sync`` with several microbatches; the plan's default is None."""
        in_shards = zero_stage >= 2 and mesh.dp_shard * mesh.cp > 1 and mesh.pp == 1
        default = "microbatch" if in_shards else "step"
        asked = _unique(self._space.grad_sync) or (("microbatch", "step") if in_shards else ("step",))
        allowed = [sync for sync in asked if self._why_not_sync((*mesh, zero_stage, sync)) is None]
        return tuple(None if sync == default else sync for sync in allowed) or (None,)

    def _microbatch_sizes(self, mesh: Mesh) -> list[int]:
        """Divisors of the local batch; 1 if the batch cannot be split evenly among data-parallel ranks."""
        if self._space.microbatch_size is not None:
            return list(_unique(self._space.microbatch_size))
        local, rest = divmod(self._job.training.global_batch_size, mesh.dp_replicate * mesh.dp_shard)
        return [1] if rest else divisors(local)

    def _recomputes(self) -> list[tuple[str, tuple[str, ...] | None]]:
        """Pairs of ``recompute`` and ``recompute_modules``; modules are None by default."""
        choices = _unique(self._space.recompute) or DEFAULT_RECOMPUTE
        named = _unique(self._space.recompute_modules) or (None,)
        return [(choice, modules) for choice in choices for modules in (named if choice == "selective" else (None,))]


def _allowed(
    options: Iterable[T], why_not: FilterStage, size: int | Callable[[T], int], rejected: Counter[str]
) -> Iterator[T]:
    """Yield options that violate no rule; each other one counts as ``size`` candidates under the violated rule."""
    for option in options:
        rule = why_not(option)
        if rule is None:
            yield option
        else:
            rejected[rule] += size if isinstance(size, int) else size(option)


def _unique(values: Iterable[Value] | None) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values or ()))


def _in(value: Value, values: tuple[Value, ...] | None) -> bool:
    return values is None or value in values


def unsearched(space: SearchSpace, job: Job) -> dict[str, tuple[Any, ...]]:
    """Axes with one value by default, of which the job has plans with others, and values to search.

    Args:
        space: Ranges of the search, with the restrictions of the software.
    """
    axes_left: dict[str, tuple[Any, ...]] = {}
    for axis in ("tp", "cp"):
        searched = {getattr(mesh, axis) for mesh in Enumeration(space, job).meshes}
        if getattr(space, axis) is None and searched == {1} and _has_plan(space, job, {axis: (2,)}):
            axes_left[axis] = (1, 2)
    for option in SOFTWARE_RANGES:
        other = not getattr(job.software, option) if option in job.software.options else None
        if getattr(space, option) is None and other is not None and _has_plan(space, job, {option: (other,)}):
            axes_left[option] = (False, True)
    return axes_left


def _has_plan(space: SearchSpace, job: Job, ranges: Mapping[str, tuple[Any, ...]]) -> bool:
    """True if a plan with other ranges violates no rule; it may exceed the memory."""
    try:
        wider = that_it_has(job.software, space.model_copy(update=ranges))
        asked = with_options(job, searched_options(wider)[0])
        check_without_plan(asked, wider)
    except SpecError:
        return False
    enumeration = Enumeration(wider, asked)
    return any(True for mesh in enumeration.meshes for _ in enumeration.tables(Counter(), [mesh]))


_AXES = ("tp", "cp", "pp", "dp_replicate", "dp_shard")


def empty_space(space: SearchSpace, software: SoftwareSpec, enumerations: Sequence[Enumeration]) -> Problem:
    """Error for a space without candidates, in terms of the user's ranges.

    Args:
        software: Software of the job; its own restrictions are not reported as user ranges.
    """
    ranges = given_ranges(software, space)
    if any(enumeration.meshes for enumeration in enumerations):
        return _range_problem(space, ranges, "have no plan in common", "widen one of them, or leave it out")
    counts = sorted({enumeration.num_devices for enumeration in enumerations})
    sizes = either(f"{size:,}" for size in counts)
    axes = tuple(name for name in ranges if name in _AXES)
    rule = f"no values make tp x cp x pp x dp_replicate x dp_shard = {sizes} devices"
    if len(axes) == 1:
        fitting = sorted({divisor for size in counts for divisor in divisors(size)})
        return _range_problem(space, axes, rule, f"{axes[0]} must divide {sizes}: {either(fitting)}")
    return _range_problem(space, axes, rule, "change one of them, or leave it out")


def _range_problem(space: SearchSpace, names: tuple[str, ...], rule: str, fix: str) -> Problem:
    ranges = {name: list(getattr(space, name)) for name in names}
    if len(names) == 1:
        return Problem(field=f"search.{names[0]}", value=render_value(ranges[names[0]]), rule=rule, fix=fix)
    shown = ", ".join(f"{name} {render_value(values)}" for name, values in ranges.items())
    return Problem(field="search", value=shown, rule=rule, fix=fix)
