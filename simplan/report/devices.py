"""A whole run on several numbers of devices, as a table and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simplan.goodput.result import GoodputResult
from simplan.report.goodput import format_money
from simplan.report.table import format_table_text
from simplan.units import format_count, format_percent, format_span, format_time


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOnDevices:
    """The run on one number of devices with one batch.

    Attributes:
        num_devices: Devices of the job.
        batch_size: Samples of a step.
        num_samples: Samples to the target, in whole steps.
        result: Simulated runs.
    """

    num_devices: int
    batch_size: int
    num_samples: int
    result: GoodputResult


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceComparison:
    """The run on several numbers of devices, the first one with the batch of the scenario.

    Attributes:
        runs: Runs by number of devices, with the batch of the scenario and with one in proportion to the devices.
        sentences: About runs that are left out, samples, and the learning rate.
    """

    runs: tuple[RunOnDevices, ...]
    sentences: tuple[str, ...]

    def speedup(self, run: RunOnDevices) -> float:
        """Mean time of the first run over that of a run."""
        return self.runs[0].result.mean_time_s / run.result.mean_time_s

    def device_hours_factor(self, run: RunOnDevices) -> float:
        """Mean device-hours of a run over those of the first one."""
        return float(run.result.device_hours.mean() / self.runs[0].result.device_hours.mean())

    def to_json(self) -> dict[str, Any]:
        """JSON document; factors are to the first run."""
        runs = [
            {
                "num_devices": run.num_devices,
                "global_batch_size": run.batch_size,
                "num_samples": run.num_samples,
                "speedup": self.speedup(run),
                "device_hours_factor": self.device_hours_factor(run),
                "goodput": run.result.to_json(),
            }
            for run in self.runs
        ]
        return {"schema_version": 1, "kind": "goodput_devices", "runs": runs, "sentences": list(self.sentences)}


def devices_text(comparison: DeviceComparison) -> str:
    """Table of the runs, and the sentences."""
    headers = ["devices", "batch", "samples", "steps", "step", "time to finish", "P90", "goodput", "cost", "speedup",
               "device-hours"]  # fmt: skip
    rows = []
    for run in comparison.runs:
        document = run.result.to_json()
        cost = document["cost"]
        rows.append(
            [
                f"{run.num_devices:,}",
                f"{run.batch_size:,}",
                format_count(run.num_samples),
                f"{document['num_steps']:,}",
                format_time(document["step_time_s"]),
                format_span(run.result.mean_time_s),
                format_span(document["time_to_finish_s"]["p90"]),
                format_percent(run.result.goodput),
                "" if cost is None else format_money(cost),
                f"{comparison.speedup(run):.2f}x",
                f"{comparison.device_hours_factor(run):.2f}x",
            ]
        )
    filled = [place for place in range(len(headers)) if any(row[place] for row in rows)]
    table = format_table_text(
        [headers[place] for place in filled], [[row[place] for place in filled] for row in rows], indent=0, left=0
    )
    return "\n".join([table, "", *(f"- {sentence}" for sentence in comparison.sentences)]).rstrip()
