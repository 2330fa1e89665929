"""Answers about a whole run from its simulated runs: time to finish, goodput, waterfall, device-hours, cost, energy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simplan.goodput.account import USES, Floats, costs, device_hours, energies_kwh
from simplan.goodput.interval import IntervalCurve
from simplan.goodput.sections import Power, RunPrice
from simplan.goodput.sensitivity import Change, standard_error
from simplan.goodput.setup import WATERFALL, Runs, RunSetup

if TYPE_CHECKING:
    import pandas as pd

GOODPUT_SCHEMA_VERSION = 1
_OTHER_CAUSES = ("silent corruption", "slow device", "preemption")
_INTERVAL_STREAM = 0x57E9
"""Second word of the seed of the factors on the step time, whose stream is their own."""
_P95 = 1.6448536269514722
"""95 % quantile of the standard normal distribution."""
_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoodputResult:
    """Simulated runs of one set-up, and answers from them.

    Attributes:
        name: Name of the scenario.
        setup: Numbers of the run.
        runs: Simulated runs.
        seed: Seed of their failures.
        step_interval_s: 90 % interval of the step time.
        price: Price of device-hours; None for no cost.
        power: Power of devices; None for no energy.
        checkpoint_bytes: Bytes of a checkpoint; None without checkpoints.
        curve: Mean time over the checkpoint interval; None without checkpoints or unplanned failures.
        changes: Worth of single changes.
        memory_verdict: Verdict of the prediction on device memory; None if unknown.
        assumptions: Sentences for the reader.
    """

    name: str
    setup: RunSetup
    runs: Runs
    seed: int
    step_interval_s: tuple[float, float]
    price: RunPrice | None = None
    power: Power | None = None
    checkpoint_bytes: float | None = None
    curve: IntervalCurve | None = None
    changes: tuple[Change, ...] = ()
    memory_verdict: str | None = None
    assumptions: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Mean time and goodput, in one line."""
        return f"GoodputResult({self.name}: {self.mean_time_s / 86_400:.3g} days, goodput {self.goodput:.3f})"

    @property
    def num_runs(self) -> int:
        """Simulated runs."""
        return len(self.runs.time_s)

    @property
    def mean_time_s(self) -> float:
        """Mean seconds to the end of the run."""
        times_s = self.runs.time_s
        same = bool(times_s.min() == times_s.max())  # the mean of equal numbers may differ from them in the last bit
        return float(times_s[0] if same else times_s.mean())

    @property
    def median_run(self) -> int:
        """Number of the run with the median time."""
        return int(np.argsort(self.runs.time_s, kind="stable")[self.num_runs // 2])

    @property
    def goodput(self) -> float:
        """Effective training time ratio: steps on all nodes at the predicted step time, over the mean time."""
        return self.setup.num_steps * self.setup.step_s / self.mean_time_s

    @property
    def waterfall_s(self) -> dict[str, float]:
        """Mean seconds of each part of the time; they sum to the mean time."""
        parts = dict(zip(WATERFALL, map(float, self.runs.waterfall_s.mean(axis=0)), strict=True))
        parts["compute"] += self.mean_time_s - math.fsum(parts.values())  # the rounding of means
        return parts

    @property
    def times_with_step_interval_s(self) -> Floats:
        """(runs,) Seconds of the runs if the step time is uncertain, too: a lognormal factor for each run.

        Evaluations and checkpoints take as long; failures per hour, and the time that each costs, are as they were.
        """
        low_s, high_s = self.step_interval_s
        sigma = math.log(high_s / low_s) / (2 * _P95)
        median = math.sqrt(low_s * high_s) / self.setup.step_s
        normal = np.random.default_rng([self.seed, _INTERVAL_STREAM]).standard_normal(self.num_runs)
        factors = median * np.exp(sigma * normal)
        pauses = self.runs.waterfall_s[:, [WATERFALL.index("evaluation"), WATERFALL.index("checkpoint")]].sum(axis=1)
        times_s: Floats = pauses + factors * (self.runs.time_s - pauses)
        return times_s

    @property
    def causes(self) -> tuple[str, ...]:
        """Names of the columns of ``Runs.interruptions``."""
        return (*(cause.name for cause in self.setup.causes), *_OTHER_CAUSES)

    @property
    def interruptions_by_cause(self) -> dict[str, float]:
        """Mean number of interruptions by cause, the most frequent first, without causes of none."""
        means = dict(zip(self.causes, map(float, self.runs.interruptions.mean(axis=0)), strict=True))
        return {name: means[name] for name in sorted(means, key=lambda name: -means[name]) if means[name]}

    @property
    def device_hours(self) -> Floats:
        """(runs,) Hours of all devices that are paid for, spares included."""
        hours: Floats = device_hours(self.setup, self.runs).sum(axis=1)
        return hours

    @property
    def costs(self) -> Floats | None:
        """(runs,) Cost of the runs; None without a price."""
        return None if self.price is None else costs(self.setup, self.runs, self.price)

    @property
    def energies_kwh(self) -> Floats | None:
        """(runs,) Energy of the runs; None without power."""
        return None if self.power is None else energies_kwh(self.setup, self.runs, self.power)

    @property
    def co2_kg_per_kwh(self) -> float | None:
        """Emissions of the electricity; None if unknown."""
        grams = None if self.power is None else self.power.co2_g_per_kwh
        return None if grams is None else grams / 1000

    def to_json(self) -> dict[str, Any]:
        """JSON document of the result; ``cost`` and the like are means over runs."""
        setup, curve = self.setup, self.curve
        interruptions = self.runs.interruptions.sum(axis=1).astype(float)
        hours = device_hours(setup, self.runs)
        paid, energies, co2 = self.costs, self.energies_kwh, self.co2_kg_per_kwh
        useful_s = setup.num_steps * setup.step_s
        by_interval = _quantiles(self.times_with_step_interval_s)
        return {
            "schema_version": GOODPUT_SCHEMA_VERSION,
            "kind": "goodput",
            "name": self.name,
            "seed": self.seed,
            "trials": self.num_runs,
            "median_trial": self.median_run,
            "num_steps": setup.num_steps,
            "step_time_s": setup.step_s,
            "step_time_interval_s": list(self.step_interval_s),
            "num_nodes": setup.num_nodes,
            "devices_per_node": setup.devices_per_node,
            "spares": setup.spares,
            "memory_verdict": self.memory_verdict,
            "undisturbed_s": setup.undisturbed_s,
            "time_to_finish_s": {**_distribution(self.runs.time_s), "mean": self.mean_time_s},
            "time_to_finish_with_step_interval_s": by_interval,
            "goodput": self.goodput,
            "goodput_quantiles": _quantiles(useful_s / self.runs.time_s),
            "num_interruptions": _distribution(interruptions),
            "interruptions_by_cause": self.interruptions_by_cause,
            "waterfall_s": self.waterfall_s,
            "device_hours": float(self.device_hours.mean()),
            "device_hours_by_use": dict(zip(USES, map(float, hours.mean(axis=0)), strict=True)),
            "cost": None if paid is None else float(paid.mean()),
            "cost_distribution": None if paid is None else _distribution(paid),
            "energy_kwh": None if energies is None else float(energies.mean()),
            "co2_kg": None if energies is None or co2 is None else co2 * float(energies.mean()),
            "num_checkpoints": float(self.runs.checkpoints.mean()),
            "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoint_interval_s": setup.checkpoint_every * setup.step_s or None,
            "best_interval_s": None if curve is None else curve.best.interval_s,
            "young_s": None if curve is None else curve.young_s,
            "daly_s": None if curve is None else curve.daly_s,
            "interval_curve": [] if curve is None else [asdict(point) for point in curve.points],
            "sensitivity": [asdict(change) for change in self.changes],
            "assumptions": list(self.assumptions),
        }

    def report(self) -> str:
        """The text that ``simplan goodput`` prints."""
        from simplan.report.goodput import goodput_text

        return goodput_text(self)

    def to_dataframe(self) -> pd.DataFrame:
        """Table with one row per simulated run: number, time and its parts, interruptions, device-hours and cost.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas as pd

        runs, paid = self.runs, self.costs
        hours = device_hours(self.setup, runs)
        columns: Mapping[str, Any] = {
            "trial": np.arange(self.num_runs),
            "time_s": runs.time_s,
            **{f"{name}_s": runs.waterfall_s[:, place] for place, name in enumerate(WATERFALL)},
            "num_interruptions": runs.interruptions.sum(axis=1),
            **{f"num_{_word(name)}": runs.interruptions[:, place] for place, name in enumerate(self.causes)},
            "num_checkpoints": runs.checkpoints,
            **{f"{name}_device_hours": hours[:, place] for place, name in enumerate(USES)},
            **({} if paid is None else {"cost": paid}),
        }
        return pd.DataFrame(columns)


def _word(name: str) -> str:
    """Name of a cause as part of a column's name."""
    return "_".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


def _quantiles(values: Floats) -> dict[str, float]:
    return {name: float(np.quantile(values, share)) for name, share in _QUANTILES.items()}


def _distribution(values: Floats) -> dict[str, float]:
    """Mean with its standard error, and quantiles."""
    return {"mean": float(values.mean()), **_quantiles(values), "standard_error": standard_error(values)}
