"""Inverse search: the largest model, microbatch or sequence for which some plan fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from simplan.cost.calibration.format import Calibration
from simplan.errors import NoFeasiblePlanError, Problem, SpecError
from simplan.job import Job
from simplan.model.families import FAMILIES
from simplan.plan.plan import ParallelPlan
from simplan.search.enumeration import Enumeration
from simplan.search.evaluation.workers import WorkerPool
from simplan.search.explore import first_fit
from simplan.search.space import SearchSpace, check_without_plan, searched_options, that_it_has, with_options

Quantity = Literal["seq_len", "microbatch_size", "num_hidden_layers"]
QUANTITIES: tuple[str, ...] = ("seq_len", "microbatch_size", "num_hidden_layers")

_STEPS = {"seq_len": 1024, "num_hidden_layers": 1}
_MAX_VALUES = {"seq_len": 2**24, "num_hidden_layers": 2000}
_PIECES = 8


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest value of a quantity with which a plan fits.

    Attributes:
        quantity: Maximized quantity, one of ``QUANTITIES``.
        value: Largest value that was found to fit.
        plan: A plan that fits with this value.
        fitting, failing: Tried values that fit, and that do not. Values between tried ones may behave differently:
            memory grows with the quantity, but the available plans depend on divisors.
        exact: True if all values were tried.
        model_fields: Fields of the model that differ from the job's model.
        software: Options of the software that the search varies, with which the plan fits.
    """

    quantity: str
    value: int
    plan: ParallelPlan
    fitting: tuple[int, ...]
    failing: tuple[int, ...]
    exact: bool
    model_fields: Mapping[str, int] = field(default_factory=dict)
    software: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON document of ``simplan search --largest --json``."""
        return {"schema_version": 1, "kind": "largest", **to_jsonable_python(self)}


def largest(
    job: Job,
    space: SearchSpace,
    quantity: Quantity,
    on_progress: Callable[[int], None] | None = None,
    *,
    calibration: Calibration | None = None,
    jobs: int = 1,
) -> Largest:
    """Find the largest value of a quantity with which some plan of the space fits the devices' memory.

    ``microbatch_size`` tries all sizes of the space, largest first. ``seq_len`` (steps of 1,024 tokens) and
    ``num_hidden_layers`` (steps of 1) double until nothing fits, then refine the gap by eighths down to the step. Each
    value is a separate search that ends at the first plan that fits. If options of the software are searched, each
    combination has its own largest value, and the result is the largest of these.

    Args:
        on_progress: Called with each value before it is tried.
        jobs: Worker processes; see ``search``.

    Raises:
        SpecError: The model has no such quantity, or the memory of the devices is unknown.
        NoFeasiblePlanError: Nothing fits, even with the smallest value.
    """
    space = that_it_has(job.software, space)
    check_without_plan(job, space)
    if job.cluster.largest_memory_bytes is None:
        rule = "does not say how much memory it has, so anything fits"
        raise SpecError(Problem(field="cluster.device", value=job.cluster.device.id, rule=rule))
    fitting, reasons, told = [], [], on_progress or (lambda _: None)
    with WorkerPool(jobs) as workers:
        for options in searched_options(space):
            try:
                of_options = _largest(with_options(job, options), space, quantity, told, calibration, workers)
            except NoFeasiblePlanError as error:
                reasons.append(error)
            else:
                fitting.append(replace(of_options, software=dict(options)))
    if not fitting:
        raise reasons[0]
    return max(fitting, key=lambda of_options: of_options.value)


def _largest(
    job: Job,
    space: SearchSpace,
    quantity: Quantity,
    told: Callable[[int], None],
    calibration: Calibration | None,
    workers: WorkerPool,
) -> Largest:
    if quantity == "microbatch_size":
        return _largest_microbatch(job, space, told, calibration, workers)
    return _Growth(job, space, quantity, told, calibration, workers).largest()


def _largest_microbatch(
    job: Job, space: SearchSpace, told: Callable[[int], None], calibration: Calibration | None, workers: WorkerPool
) -> Largest:
    enumeration = Enumeration(space, job)
    sizes = {size for table in enumeration.tables(Counter()) for size in table["microbatch_size"].tolist()}
    failing: list[int] = []
    for size in sorted(sizes, reverse=True):
        told(size)
        plan = first_fit(job, space.model_copy(update={"microbatch_size": (size,)}), calibration, workers)
        if plan is not None:
            failed = tuple(reversed(failing))
            return Largest("microbatch_size", size, plan, fitting=(size,), failing=failed, exact=True)
        failing.append(size)
    raise NoFeasiblePlanError("no plan fits with any microbatch_size; `simplan search` says what would make one")


class _Growth:
    """Search for the largest value of a model field; each value is tried once."""

    def __init__(
        self,
        job: Job,
        space: SearchSpace,
        quantity: Quantity,
        told: Callable[[int], None],
        calibration: Calibration | None,
        workers: WorkerPool,
    ) -> None:
        model = job.model
        has_sizes_of_code = model.captured is not None and quantity != "microbatch_size"
        if not getattr(model, quantity) or has_sizes_of_code or (quantity == "seq_len" and model.sample != "sequence"):
            rule = f"models of family {model.family} have no {quantity} of their own"
            raise SpecError(Problem(field="--largest", value=quantity, rule=rule, fix="use microbatch_size"))
        self._job, self._space, self._quantity, self._told = job, space, quantity, told
        self._calibration, self._workers = calibration, workers
        self._found: dict[int, ParallelPlan | None] = {}
        self._failed: dict[int, set[ParallelPlan]] = {}

    def largest(self) -> Largest:
        step = _STEPS[self._quantity]
        low = self._smallest(step)
        high = 2 * low
        while high <= _MAX_VALUES[self._quantity] and self._fits(high):
            low, high = high, 2 * high
        while high - low > step and high <= _MAX_VALUES[self._quantity]:
            piece = max(step, -(-(high - low) // _PIECES // step) * step)
            for value in range(low + piece, high, piece):
                if self._fits(value):
                    low = value
            high = min(
                (value for value, fitting_plan in self._found.items() if fitting_plan is None and value > low),
                default=high,
            )
        fitting = tuple(sorted(value for value, fitting_plan in self._found.items() if fitting_plan))
        plan = self._found[fitting[-1]]
        assert plan is not None
        return Largest(
            self._quantity,
            fitting[-1],
            plan,
            fitting=fitting,
            failing=tuple(sorted(value for value, fitting_plan in self._found.items() if fitting_plan is None)),
            exact=False,
            model_fields=self._fields(fitting[-1]),
        )

    def _smallest(self, step: int) -> int:
        """First value that fits: the job's value rounded down to a step, halved until it fits."""
        value: int = max(step, getattr(self._job.model, self._quantity) // step * step)
        while not self._fits(value):
            if value == step:
                tried = f"{self._quantity} = {value:,}"
                raise NoFeasiblePlanError(
                    f"no plan fits with {tried} either; `simplan search` says what would make one"
                )
            value = max(step, value // 2 // step * step)
        return value

    def _fits(self, value: int) -> bool:
        if value not in self._found:
            self._told(value)
            self._found[value] = self._first_fit(value)
        return self._found[value] is not None

    def _fields(self, value: int) -> dict[str, int]:
        """Model fields for a value; ``seq_len`` also extends learned position embeddings if needed."""
        fields: dict[str, int] = {self._quantity: value}
        model = self._job.model
        has_positions = self._quantity == "seq_len" and bool(FAMILIES[model.family].position_rows)
        if has_positions and value > model.max_position_embeddings:
            fields["max_position_embeddings"] = value
        return fields

    def _first_fit(self, value: int) -> ParallelPlan | None:
        try:
            job = replace(self._job, model=self._job.model.model_copy(update=self._fields(value)))
            check_without_plan(job, self._space)
        except SpecError:
            return None
        # a plan that is too large with a smaller value is too large with this one
        failed = set().union(*(plans for smaller, plans in self._failed.items() if smaller < value))
        self._failed[value] = failed
        witness = next((plan for plan in reversed(self._found.values()) if plan), None)
        return first_fit(job, self._space, self._calibration, self._workers, witness, failed)
