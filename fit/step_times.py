"""Fits what kernels reach on the step times of published training runs, and says how far off that leaves predictions.

    python -m fit.step_times scenarios/published [--write] [--rounds N]

Fitted are a few rates of each architecture, a few habits of each framework, and what all have in common
(``simplan.spec.rates``); they start from and are drawn to the textbook values of kernels.yaml. A step time is the
longest path through what is done, so near the present constants it is a sum of prices, each so many times
(``simplan.predict.brief.brief_terms``): the fit prices the terms of that sum again, with the very code that predicts,
and then looks for the longest paths anew. ``--write`` replaces kernels_fitted.yaml.

Three errors are printed: of the fit; five-fold, with folds by model and device, so that near-duplicates stay together;
and with a whole source left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from fit.robust import Constant, Floats, minimize
from simplan.accuracy.job import RunJob, job_of_run
from simplan.accuracy.reading import read_published
from simplan.accuracy.schema import PublishedRun
from simplan.cost.compute import KernelCost, kernel_cost
from simplan.errors import SimplanError
from simplan.predict.brief import Term, brief_terms
from simplan.program.program import Excess, LayerWork
from simplan.spec import catalogue
from simplan.spec.rates import AttentionKernel

__all__ = ["FITTED_FILE", "Prices", "Row", "constants_of", "fit", "load_rows", "main"]

FITTED_FILE = Path(catalogue.__file__).parent / "catalog" / "kernels_fitted.yaml"

Values = Mapping[str, float]
"""Constants by name, e.g. ``ampere.matmul_share``, ``torchtitan.traffic``, ``narrow_heads``."""

_ARCHITECTURE: Mapping[str, tuple[float, float, float]] = {  # standard deviation of the logarithm, low, high
    "matmul_share": (0.1, 0.4, 1.0),
    "low_share": (0.15, 0.3, 1.0),
    "bandwidth_share": (0.1, 0.5, 1.0),
}
_KERNELS: tuple[AttentionKernel, ...] = ("flash1", "flash2", "flash3")
_SUSTAINED = (0.2, 0.3, 2.0)  # of each kernel of an architecture
_SOFTWARE: Mapping[str, tuple[float, float, float]] = {
    "traffic": (0.5, 0.3, 4.0),
    "compiled_traffic": (0.5, 0.2, 4.0),
    "matmul_share": (0.07, 0.7, 1.3),
    "launch_s": (0.7, 1e-6, 60e-6),
}
_ALL: Mapping[str, tuple[float, float, float]] = {
    "half_depth": (0.5, 10.0, 1000.0),
    "half_keys": (0.5, 30.0, 2000.0),
    "narrow_heads": (0.1, 0.4, 1.0),
    "misaligned_share": (0.3, 0.02, 1.0),
    "score_traffic": (0.3, 0.7, 3.0),
    "row_scale_share": (0.15, 0.4, 1.0),
    "last_wave": (0.5, 0.05, 1.0),
}
_STD = 0.03  # what step times scatter about a perfect model, roughly
_TRUST = {"good": 1.0, "assumed": 0.3, "noisy": 0.1, "inconsistent": 0.1}
"""What a row counts for: where a source does not print something that sets the work, others had to assume it."""
_FOLDS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A run, and what its step waits for.

    Attributes:
        source: Name of its file.
        run: As published.
        job: The question.
        terms: Sum up to the step time at the constants that they were found with.
    """

    source: str
    run: PublishedRun
    job: RunJob
    terms: tuple[Term, ...]

    @property
    def fold(self) -> int:
        """Of five: runs of one model on one device are in the same one."""
        model = self.job.model
        shape = (model.family, model.hidden_size, model.num_hidden_layers, self.job.cluster.device.id)
        return int(sha256(repr(shape).encode()).hexdigest(), 16) % _FOLDS

    @property
    def measured_s(self) -> float:
        """The published step time."""
        assert self.run.measured.step_time_s is not None
        return self.run.measured.step_time_s

    @property
    def attention_kernel(self) -> AttentionKernel | None:
        """The generation of fused attention that runs."""
        kernels = self.job.cluster.device.kernels.attention
        newest = _KERNELS.index(self.job.software.rates.attention_kernel)
        return next((name for name in reversed(_KERNELS[: newest + 1]) if name in kernels), None)

    def predicted_s(self, prices: Prices) -> float:
        """At given constants, along the paths that were found."""
        return sum(term.times * prices.seconds(self.job, term) for term in self.terms)


class Prices:
    """What terms take at given constants; what several runs ask for is worked out once.

    Args:
        values: The constants; those that are missing are as in the catalogue.
    """

    def __init__(self, values: Values) -> None:
        self._values = values
        self._kernels: dict[tuple[object, ...], KernelCost] = {}
        self._seconds: dict[tuple[object, ...], float] = {}

    def seconds(self, job: RunJob, term: Term) -> float:
        """Of one term."""
        match term.work:
            case LayerWork():
                return self._of_layer(job, term.work)
            case Excess(beside=beside):
                assert isinstance(beside, LayerWork)
                return max(
                    0.0, term.seconds + UNCHANGED.seconds(job, Term(beside, 0.0, 0.0)) - self._of_layer(job, beside)
                )
            case _:
                return term.seconds

    def _of_layer(self, job: RunJob, work: LayerWork) -> float:
        plan, training = job.plan, job.training
        key = (
            job.cluster.device.id,
            job.software.id,
            job.software.compiled,
            training.precision,
            training.fp8_recipe,
            training.optimizer,
            plan.shards_parameters,
            plan.grad_dtype,
            training.task,
        )
        found = self._seconds.get((*key, work))
        if found is None:
            if key not in self._kernels:
                self._kernels[key] = self._kernel_cost(job)
            found = self._seconds[(*key, work)] = self._kernels[key].seconds(work)
        return found

    def _kernel_cost(self, job: RunJob) -> KernelCost:
        device, values = job.cluster.device, self._values
        state = job.software.state(job.training, job.plan)
        architecture: dict[str, Any] = _of(device.architecture, _ARCHITECTURE, values) | _of("", _ALL, values)
        sustained = _of(device.architecture, _KERNELS, values)
        architecture["attention"] = {
            name: share.model_copy(update={"sustained": sustained.get(name, share.sustained)})
            for name, share in device.kernels.attention.items()
        }
        software = _of(job.software.id, _SOFTWARE, values)
        return kernel_cost(
            device.model_copy(update={"kernels": device.kernels.model_copy(update=architecture)}),
            job.training.precision,
            state,
            job.training.optimizer,
            job.software.model_copy(update={"rates": job.software.rates.model_copy(update=software)}),
            shards_parameters=job.plan.shards_parameters,
        )


UNCHANGED = Prices({})


def _of(name: str, fields: Iterable[str], values: Values) -> dict[str, float]:
    """Constants of one owner."""
    prefix = f"{name}." if name else ""
    return {field: values[prefix + field] for field in fields if prefix + field in values}


def load_rows(paths: Sequence[Path], jobs: int = -1) -> list[Row]:
    """All runs with a step time that can be predicted."""
    listed = [(Path(read.file).stem, run) for read in read_published(paths) for run in read.runs or ()]
    timed = [(source, run) for source, run in listed if run.measured.step_time_s is not None]
    found = Parallel(n_jobs=jobs)(delayed(_row)(source, run) for source, run in timed)
    return [row for row in found if row is not None]


def _row(source: str, run: PublishedRun) -> Row | None:
    try:
        job = job_of_run(run)
        asked = (job.model, job.cluster, job.training, job.plan, job.software)
        return Row(source, run, job, brief_terms(*asked, steps_overlap=job.steps_overlap))
    except SimplanError:
        return None


def constants_of(rows: Sequence[Row]) -> list[Constant]:
    """What can be fitted on some runs."""
    by_name: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        for field in _ARCHITECTURE:
            by_name[f"{row.job.cluster.device.architecture}.{field}"].append(index)
        kernel = row.attention_kernel
        if kernel is not None:
            by_name[f"{row.job.cluster.device.architecture}.{kernel}"].append(index)
        for field in _SOFTWARE:
            by_name[f"{row.job.software.id}.{field}"].append(index)
        for field in _ALL:
            by_name[field].append(index)
    return [_constant(name, indices) for name, indices in sorted(by_name.items())]


def _constant(name: str, rows: Sequence[int]) -> Constant:
    owner, _, field = name.rpartition(".")
    if field in _KERNELS:
        return Constant(name, 1.0, *_SUSTAINED, rows)
    if field in _SOFTWARE and owner not in _architectures():
        textbook = getattr(catalogue.software(owner, textbook=True).rates, field)
        return Constant(name, textbook, *_SOFTWARE[field], rows)
    textbook = getattr(catalogue.kernel_rates(owner or "other", textbook=True), field)
    return Constant(name, textbook, *(_ARCHITECTURE if owner else _ALL)[field], rows)


def _architectures() -> set[str]:
    return {catalogue.device(name).architecture for name in catalogue.names("devices")}


def fit(rows: Sequence[Row], start: Values | None = None) -> dict[str, float]:
    """Constants by name."""
    constants = constants_of(rows)
    measured = np.log([row.measured_s for row in rows])

    def residuals(x: Floats, indices: Sequence[int]) -> Floats:
        values = dict(zip((constant.name for constant in constants), map(float, x), strict=True))
        prices = Prices(values)
        return np.array([(np.log(rows[i].predicted_s(prices)) - measured[i]) / _STD for i in indices])

    found = minimize(constants, residuals, _weights(rows), start=start, most_iterations=8)
    return dict(zip((constant.name for constant in constants), map(float, found), strict=True))


def _weights(rows: Sequence[Row]) -> Floats:
    """A source counts as the square root of its runs."""
    sizes = Counter(row.source for row in rows)
    return np.array([_TRUST[row.run.quality] * sizes[row.source] ** -0.5 for row in rows])
