"""Losses of all ways as data, and the page and the figure that are made from this data."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.prediction import Prediction, ReplicationWorkers
from simplan.report.table import format_table_markdown
from simplan.runs.measurement import LossPoint, Measurement
from simplan.training import least_loss
from simplan.units import format_time
from simplan.validate.losses import LossComparison, LossCurve, compare_losses

_HEAD = """\
# Loss of ways to train

`make losses` trains one small model in several ways, and writes this page, its figure and the [data](losses.json).
A way is a line of `benchmarks/losses/ways.py`; the scenario is `scenarios/ways/losses.yaml`.

"""
_FIGURE = "![Loss against samples and against seconds, a line for each way](losses.svg)\n\n"
_HOW_TO_READ = """\
- **±:** mean and standard deviation over the seeds. A seed decides about weights and samples, and is the same
  for all ways.
- **final loss:** mean of the last {window} steps, in nats, on samples that the model has not trained on yet.
- **samples:** samples to the loss that both the way and `{first}` training reach, over those of `{first}` training.
- **step time:** median of the steps, without the first ones that have whole gradients, and of the seeds. Other
  programs ran during these runs. So step times are divided by the time of a matmul that every run times between its
  steps, and multiplied by that of the fastest run. They scatter all the same, most of all those of workers that do
  not wait, which time it before their first step only.
- **seconds:** samples times step time, over those of `{first}` training. The ranks share the memory of one machine,
  where compression only costs time. Over a network it saves time:
  [predictions](../explanation/ways-to-train.md#when-it-pays) say how much.

Four workers have four sequences each per step. Of those with `slow worker`, the last computes 4 times as long.
`synchronous` training of four workers has the losses of two.

All ways have AdamW with a learning rate of 0.001; none was tuned. The factors belong to this model, batch and length of
training. They rank the ways, and do not forecast models of billions of parameters.
"""

_STALENESS = """
## Staleness

Updates by other workers between the parameters of a gradient and its update, until the first worker has ended:

"""


def run_data(run: Measurement, prediction: Prediction, settings: Mapping[str, Any]) -> dict[str, Any]:
    """JSON of a measured run.

    Args:
        settings: Settings in which its way differs from the scenario.
    """
    data = {
        "seed": run.job.seed,
        "settings": settings,
        "step_time_s": run.step_time_s,
        "reference_s": run.reference_s,
        "num_samples": [point.num_samples for point in run.loss_curve],
        "losses": [round(point.loss, 4) for point in run.loss_curve],
    }
    expected = prediction.replication
    if run.workers is not None and isinstance(expected, ReplicationWorkers):
        data["staleness"] = {
            "predicted_mean": expected.staleness_mean,
            "mean": run.workers.staleness_mean,
            "predicted_p90": expected.staleness_p90,
            "p90": run.workers.staleness_p90,
        }
    return data


def make_data(job: Job, runs: Mapping[str, Sequence[Mapping[str, Any]]], machine: str) -> dict[str, Any]:
    """JSON document of measured runs.

    Args:
        job: Job of the scenario.
        runs: Runs by way, one per seed (``run_data``); the first way is what others are compared with.
        machine: Date, hardware and versions.
    """
    return {
        "schema_version": 1,
        "kind": "losses",
        "machine": machine,
        "model": job.model.model_dump(mode="json", exclude_defaults=True),
        "data": job.training.data,
        "least_loss": least_loss(job.training.data, job.model.vocab_size),
        "ways": runs,
    }


def curves_of(data: Mapping[str, Any]) -> dict[str, list[LossCurve]]:
    """Loss curves by way, one per seed; all steps of a run take ``step_times_s``."""
    return {
        way: [
            LossCurve.of_points(
                way,
                data["least_loss"],
                [
                    LossPoint(num_samples=samples, seconds=step * step_time_s, loss=loss)
                    for step, (samples, loss) in enumerate(zip(run["num_samples"], run["losses"], strict=True), 1)
                ],
            )
            for run, step_time_s in zip(runs, step_times_s(data, way), strict=True)
        ]
        for way, runs in data["ways"].items()
    }


def step_times_s(data: Mapping[str, Any], way: str) -> list[float]:
    """Step time of each run of a way, at the machine's speed during the fastest run.

    A run times a matmul between its steps. Other programs slow both.
    """
    fastest_s = min(run["reference_s"] for runs in data["ways"].values() for run in runs)
    return [run["step_time_s"] * fastest_s / run["reference_s"] for run in data["ways"][way]]


def page(data: Mapping[str, Any]) -> str:
    """Markdown page of the data."""
    curves = curves_of(data)
    first, *_ = curves
    model, (curve, *_) = ModelSpec.model_validate(data["model"], strict=False), curves[first]
    num_steps, num_samples = len(curve.losses), curve.num_samples[-1]
    size = f"A {model.family} of {model.num_parameters / 1e6:.1f} M parameters"
    batch = f"{num_samples // num_steps} sequences of {model.seq_len} tokens per step, {num_steps} steps"
    tokens = f"`training.data: {data['data']}`, of which the best possible model has the loss {data['least_loss']:.3f}"
    what = f"{data['machine']} {size}, {batch}. The tokens are {tokens}.\n\n"
    words = _HOW_TO_READ.format(window=max(1, num_steps // 20), first=first)
    headers = ["way", "seeds", "final loss", f"above {data['least_loss']:.3f}", "samples", "step time", "seconds"]
    table = format_table_markdown(headers, _rows(data, curves))
    headers = ["way", "mean, predicted", "measured", "90% quantile, predicted", "measured"]
    staleness = format_table_markdown(headers, _staleness_rows(data))
    return f"{_HEAD}{what}{_FIGURE}{table}\n\n{words}{_STALENESS}{staleness}\n"


def _rows(data: Mapping[str, Any], curves: Mapping[str, Sequence[LossCurve]]) -> Iterator[list[str]]:
    first = next(iter(curves))
    seeds = {way: [run["seed"] for run in runs] for way, runs in data["ways"].items()}
    base = dict(zip(seeds[first], curves[first], strict=True))
    for way, of_seeds in curves.items():
        final = [curve.losses[-1] for curve in of_seeds]
        costs = [compare_losses(curve, base[seed]) for seed, curve in zip(seeds[way], of_seeds, strict=True)]
        step_time_s = statistics.median(step_times_s(data, way))
        yield [
            f"`{way}`",
            f"{len(of_seeds)}",
            _mean(final),
            f"{statistics.fmean(final) - data['least_loss']:.3f}",
            *(["1", format_time(step_time_s), "1"] if way == first else _factors(costs, step_time_s)),
        ]


def _staleness_rows(data: Mapping[str, Any]) -> Iterator[list[str]]:
    for way, runs in data["ways"].items():
        measured = [run["staleness"] for run in runs if "staleness" in run]
        if measured:
            keys = ("predicted_mean", "mean", "predicted_p90", "p90")
            yield [
                f"`{way}`",
                *(_mean([staleness[key] for staleness in measured], 2 if key.endswith("mean") else 1) for key in keys),
            ]


def _factors(costs: Sequence[LossComparison], step_time_s: float) -> list[str]:
    samples = _mean([cost.samples_factor for cost in costs], 2)
    return [samples, format_time(step_time_s), _mean([cost.seconds_factor for cost in costs], 2)]


def _mean(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation; the mean alone of one value."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"
