"""Expectations of a scenario, and their evaluation against a prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Annotated, Any

from pydantic import Field, PlainValidator, model_validator

from simplan.base import Line, NonNegative, Spec
from simplan.errors import did_you_mean
from simplan.program.program import MemoryCategory
from simplan.units import GIB

_EXACT = 1e-9
"""Relative tolerance of a value without one: equal up to rounding."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A number (or verdict) of a prediction that can be expected.

    Attributes:
        unit: Unit; empty for ratios, counts and verdicts.
        of: Returns the metric from the prediction's JSON; None for the value of the key ``name``.
        is_of_run: True for a metric of the whole run, whose JSON the prediction's has under ``whole_run``.
    """

    name: str
    definition: str
    unit: str
    of: Callable[[Mapping[str, Any]], float | bool | None] | None = None
    is_of_run: bool = False

    def read(self, prediction: Mapping[str, Any]) -> Any:
        """The metric from the prediction's JSON; None when the prediction lacks it."""
        if self.is_of_run:
            if "whole_run" not in prediction:
                return None
            prediction = prediction["whole_run"]
        return self.of(prediction) if self.of else prediction[self.name]


def _at(path: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda prediction: reduce(getitem, path.split("."), prediction)


def _category(name: str) -> Callable[[Mapping[str, Any]], Any]:
    def read(prediction: Mapping[str, Any]) -> Any:
        worst = prediction["worst_rank"]
        return next(rank["memory_gib"][name] for rank in prediction["ranks"] if rank["rank"] == worst)

    return read


def _in_flight(prediction: Mapping[str, Any]) -> int:
    return max((n for rank in prediction["ranks"] for n in rank["activations_in_flight"].values()), default=0)


def _packing_efficiency(prediction: Mapping[str, Any]) -> float | None:
    tokens = prediction["tokens_per_s_per_device"]
    return prediction["document_tokens_per_s_per_device"] / tokens if tokens else None


def _fits_safely(prediction: Mapping[str, Any]) -> bool | None:
    verdict = prediction["memory_verdict"]
    return None if verdict in (None, "unknown") else verdict == "fits"


def _background_s(prediction: Mapping[str, Any]) -> float | None:
    network = prediction.get("network", {})
    return prediction["step_time_s"] - network["without_background_s"] if "without_background_s" in network else None


def _contention_s(prediction: Mapping[str, Any]) -> float | None:
    return prediction["network"]["contention_s"] if "network" in prediction else None


def _gradients_sent_gib(prediction: Mapping[str, Any]) -> float | None:
    return prediction["compression"]["sent_bytes"] / GIB if "compression" in prediction else None


def _of_replication(key: str, scale: float = 1.0) -> Callable[[Mapping[str, Any]], float | None]:
    """Reads a quantity of replicas that train alone, or do not wait for each other; None without."""

    def read(prediction: Mapping[str, Any]) -> float | None:
        value = prediction.get("replication", {}).get(key)
        return None if value is None else value * scale

    return read


def _slowest_link_gib(prediction: Mapping[str, Any]) -> float | None:
    links = prediction["network"]["links"] if "network" in prediction else []
    return links[0]["num_bytes"] / GIB if links else None


_ALL = (
    Metric("step_time_s", "wall time of one optimizer step at steady state", "s"),
    Metric("action_level_step_time_s", "step time from whole actions, without the overlap inside them", "s"),
    Metric(
        "bubble_fraction",
        "fraction of the time from first to last compute in which compute streams idle, mean over ranks",
        "",
    ),
    Metric("tokens_per_s_per_device", "throughput, padding of packed sequences included", "tokens/s"),
    Metric(
        "document_tokens_per_s_per_device",
        "throughput without padding; the mean over all packs where documents are drawn from a distribution",
        "tokens/s",
    ),
    Metric(
        "packing_efficiency",
        "share of the tokens that are of documents, not padding; the mean over all packs where documents are drawn",
        "",
        _packing_efficiency,
    ),
    Metric("samples_per_s_per_device", "throughput in sequences or images", "1/s"),
    Metric("mfu", "model FLOPs utilization, causal attention counted half, no recomputation", ""),
    Metric("mfu_full_attention", "model FLOPs utilization, full attention counted (PaLM, most papers)", ""),
    Metric("hfu", "hardware FLOPs utilization: as mfu, recomputed FLOPs counted", ""),
    Metric("fits", "whether the job fits on devices and hosts, also while it is loaded", ""),
    Metric(
        "fits_safely",
        "whether the 90 % interval of the worst rank's device memory is within the capacity (verdict: fits)",
        "",
        _fits_safely,
    ),
    Metric(
        "peak_memory_gib",
        "device memory the worst rank wants, with context",
        "GiB",
        _at("peak_memory_gib.device"),
    ),
    Metric("peak_allocated_gib", "memory of the worst rank's tensors", "GiB", _at("peak_memory_gib.allocated")),
    Metric(
        "peak_reserved_gib",
        "memory the worst rank's allocator wants",
        "GiB",
        _at("peak_memory_gib.reserved"),
    ),
    *(
        Metric(f"{name}_gib", f"{name.replace('_', ' ')} of the worst rank at its peak", "GiB", _category(name))
        for name in MemoryCategory
        if name is not MemoryCategory.HOST
    ),
    Metric("host_memory_gib", "what the rank with most has offloaded to the host", "GiB", _at("host_memory_gib.rank")),
    Metric("host_memory_per_node_gib", "the same of all ranks of a node together", "GiB", _at("host_memory_gib.node")),
    Metric("host_fits", "whether that is within the memory of the node", ""),
    Metric("num_trained_parameters", "parameters that are not frozen", ""),
    Metric("worst_rank", "the rank that needs most device memory", ""),
    Metric("num_microbatches", "microbatches per step and data-parallel rank", ""),
    Metric(
        "gradients_sent_gib",
        "what a rank sends for its gradients in a step with plan.compression, as in a ring",
        "GiB",
        _gradients_sent_gib,
    ),
    Metric(
        "updates_per_s",
        "gradients that servers or shared memory apply per second",
        "1/s",
        _of_replication("updates_per_s"),
    ),
    Metric(
        "staleness_mean",
        "updates of other workers since the pull of a gradient's parameters, in the mean",
        "",
        _of_replication("staleness_mean"),
    ),
    Metric("staleness_p90", "the same, in 90 % of the updates at most", "", _of_replication("staleness_p90")),
    Metric(
        "pushed_gib",
        "gradients that a worker pushes to all servers per step",
        "GiB",
        _of_replication("pushed_bytes", 1 / GIB),
    ),
    Metric(
        "held_s", "what a worker waits per step for slower ones (bounded staleness)", "s", _of_replication("held_s")
    ),
    Metric("round_s", "a round of plan.replication, its outer steps included", "s", _of_replication("round_s")),
    Metric("outer_exposed_s", "what outer steps add to the inner steps of a round", "s", _of_replication("exposed_s")),
    Metric(
        "outer_sent_gib",
        "what a rank sends for the outer steps of a round, as in a ring",
        "GiB",
        _of_replication("sent_bytes", 1 / GIB),
    ),
    Metric("background_s", "what the other jobs of cluster.background add to the step", "s", _background_s),
    Metric("contention_s", "what contention on the links of cluster.topology adds to the step", "s", _contention_s),
    Metric(
        "slowest_link_gib",
        "traffic in a step of the link that delays communications most, else of the busiest",
        "GiB",
        _slowest_link_gib,
    ),
    Metric("activations_in_flight", "largest number of microbatches with activations on one stage", "", _in_flight),
)
_OF_RUN = (
    Metric("goodput", "steps at the predicted step time over the mean time to finish of the whole run", "", None, True),
    *(
        Metric(f"time_to_finish_{key}_s", f"{words} time to finish of the simulated runs", "s",
               _at(f"time_to_finish_s.{key}"), True)
        for key, words in (("mean", "mean"), ("p10", "10 % quantile of the"), ("p50", "median"),
                           ("p90", "90 % quantile of the"))
    ),
    Metric("num_interruptions", "mean stops of a run, planned ones included", "", _at("num_interruptions.mean"), True),
    Metric("device_hours", "mean device-hours of the whole run, spares included", "h", None, True),
    Metric("cost", "mean cost of the whole run, in the currency of its price", "", None, True),
    Metric("energy_kwh", "mean energy of the whole run", "kWh", None, True),
    Metric("co2_kg", "mean emissions of the whole run", "kg", None, True),
    Metric("best_interval_s", "checkpoint interval with the shortest mean time to finish", "s", None, True),
    Metric("young_s", "checkpoint interval by Young's formula", "s", None, True),
    Metric("daly_s", "checkpoint interval by Daly's formula", "s", None, True),
)  # fmt: skip
"""Metrics of the whole run."""
OF_INTERVAL = frozenset({"best_interval_s", "young_s", "daly_s"})
"""Metrics that need the curve of checkpoint intervals."""
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in (*_ALL, *_OF_RUN)}
"""Metrics of ``expect`` by name."""


_VERDICTS = ("fits", "fits_safely", "host_fits")


def _known_metric(value: Any) -> str:
    if not isinstance(value, str) or value not in METRICS:
        raise ValueError(f"is not a known metric; {did_you_mean(str(value), METRICS)}")
    return value


def _number_or_verdict(value: Any) -> float | bool:
    if isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < float("inf")):
        return value
    raise ValueError("must be a finite number, true or false")


class Expectation(Spec):
    """One line of ``expect``: a metric and its required value or range.

    Attributes:
        metric: A name in ``METRICS``.
        value: Required value, within the tolerance; without a tolerance, equal up to rounding.
        min: Lower bound, inclusive.
        max: Upper bound, inclusive.
        rel_tol: Allowed deviation relative to ``value``; with ``max`` alone, allowed excess, and with ``min`` alone,
            allowed shortfall.
        abs_tol: Allowed deviation in the metric's unit, likewise; with both, the larger counts.
        why: Source of the expectation.
    """

    metric: Annotated[str, PlainValidator(_known_metric)]
    value: Annotated[float | bool | None, PlainValidator(_number_or_verdict)] = None
    min: Annotated[float, Field(allow_inf_nan=False)] | None = None
    max: Annotated[float, Field(allow_inf_nan=False)] | None = None
    rel_tol: NonNegative | None = None
    abs_tol: NonNegative | None = None
    why: Line = ""

    @model_validator(mode="after")
    def _consistent(self) -> Expectation:
        bounded = self.min is not None or self.max is not None
        if (self.value is not None) == bounded:
            raise ValueError("needs either value, or min or max or both")
        if self.min is not None and self.max is not None and (self.rel_tol is not None or self.abs_tol is not None):
            raise ValueError("rel_tol and abs_tol go with value, min or max; a range of min and max is exact")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min = {self.min:g} must be at most max = {self.max:g}")
        if (self.metric in _VERDICTS) != isinstance(self.value, bool):
            raise ValueError("fits needs value: true or false, and the other metrics a number")
        return self

    @property
    def is_of_run(self) -> bool:
        """True for a metric of the whole run."""
        return METRICS[self.metric].is_of_run

    def tolerance(self, bound: float) -> float:
        """Allowed deviation from a value or bound, in the unit of the metric."""
        relative = self.rel_tol
        if relative is None:
            relative = _EXACT if self.abs_tol is None and self.value is not None else 0.0
        return max(relative * abs(bound), self.abs_tol or 0.0)

    def rule(self) -> str:
        """Required value or range as text: ``at most 80``, ``at most 4.5 + 5 %`` or ``1.31 within 10 %``."""
        tolerances = [f"{100 * self.rel_tol:g} %"] if self.rel_tol is not None else []
        tolerances += [f"{self.abs_tol:g}"] if self.abs_tol is not None else []
        if self.value is None:
            bounds = (("at least", self.min, "-"), ("at most", self.max, "+"))
            stated = ((word, f"{bound:g}", sign) for word, bound, sign in bounds if bound is not None)
            return " and ".join(
                " ".join((word, bound, *([sign, " or ".join(tolerances)] if tolerances else ())))
                for word, bound, sign in stated
            )
        if isinstance(self.value, bool):
            return str(self.value).lower()
        return f"{self.value:g}" + (f" within {' or '.join(tolerances)}" if tolerances else "")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one expectation.

    Attributes:
        actual: Predicted value; None when the prediction lacks the metric.
        passed: True when the predicted value meets the expectation.
        message: One line: metric, actual value, rule.
    """

    expectation: Expectation
    actual: float | bool | None
    passed: bool
    message: str


def evaluate(expectation: Expectation, prediction: Mapping[str, Any]) -> CheckResult:
    """Evaluates one expectation.

    Args:
        prediction: ``Prediction.to_json()``; for a metric of the whole run, ``GoodputResult.to_json()`` under the key
            ``whole_run``.
    """
    metric = METRICS[expectation.metric]
    actual = metric.read(prediction)
    passed = actual is not None and _holds(expectation, actual)
    shown = "unknown" if actual is None else str(actual).lower() if isinstance(actual, bool) else f"{actual:.6g}"
    unit = f" {metric.unit}" if metric.unit and actual is not None else ""
    needs = _needs(prediction) if expectation.metric in ("fits", "fits_safely") else ""
    message = f"{expectation.metric} is {shown}{unit}{needs}, expected {expectation.rule()}"
    return CheckResult(expectation, actual, passed, message)


def _needs(prediction: Mapping[str, Any]) -> str:
    """Device memory that the worst rank needs, and that it has."""
    capacity_gib = prediction["capacity_gib"]
    of = "" if capacity_gib is None else f" of {capacity_gib:.2f} GiB"
    return f" (rank {prediction['worst_rank']} needs {prediction['peak_memory_gib']['device']:.2f} GiB{of})"


def _holds(expectation: Expectation, actual: float | bool) -> bool:
    value = expectation.value
    if isinstance(value, bool) or isinstance(actual, bool):
        return actual is value
    if value is not None:
        return abs(actual - value) <= expectation.tolerance(value)
    above = expectation.min is None or actual >= expectation.min - expectation.tolerance(expectation.min)
    below = expectation.max is None or actual <= expectation.max + expectation.tolerance(expectation.max)
    return above and below
