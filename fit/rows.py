"""Published training runs as sums of step-time terms, which can be evaluated at any constants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed

from fit.rates import ALL, ARCHITECTURE, KERNELS, SOFTWARE
from fit.robust import Values
from simplan.accuracy.run import PublishedRun
from simplan.cluster.hardware import ClusterSpec, DeviceSpec
from simplan.cost.compute.kernel_cost import kernel_cost
from simplan.cost.compute.kernels import KernelCost
from simplan.errors import SimplanError
from simplan.job import Job
from simplan.predict.step_summary import OverlapSlowdown, StepTerm, step_terms
from simplan.program.program import Communication, HostWait, LayerWork, OverlapRemainder
from simplan.scenario.published.reading import read_published
from simplan.software.rates import AttentionKernel
from simplan.software.software import SoftwareSpec


@dataclass(frozen=True, slots=True, eq=False)
class FitRow:
    """A run, with the terms of its step time.

    Attributes:
        source: File name of the run.
        run: The run, with its job at the constants at which the terms were computed.
        terms: Terms that sum to the predicted step time.
    """

    source: str
    run: PublishedRun
    terms: tuple[StepTerm, ...]

    @property
    def job(self) -> Job:
        """Job of the run."""
        return self.run.known_job

    @property
    def architecture(self) -> str:
        """Architecture of the devices."""
        return self.job.cluster.device.architecture

    @property
    def measured_s(self) -> float:
        """Published step time in seconds."""
        assert self.run.measured.step_time_s is not None
        return self.run.measured.step_time_s

    @property
    def attention_kernel(self) -> AttentionKernel | None:
        """Generation of the fused attention kernel; None if attention is not fused."""
        return self.job.cluster.device.kernels.kernel_of(self.job.software.rates.attention_kernel)

    def predicted_s(self, costs: FitCosts) -> float:
        """Predicted step time at given constants, along the stored longest paths."""
        return sum(term.times * costs.seconds(self.job, term) for term in self.terms)


class FitCosts:
    """Costs of terms at given constants, cached over runs.

    Args:
        values: Constants by name; missing ones keep the value of the request.
    """

    def __init__(self, values: Values) -> None:
        self._values = values
        self._kernels: dict[tuple[object, ...], KernelCost] = {}
        self._seconds: dict[tuple[object, ...], float] = {}

    def seconds(self, job: Job, term: StepTerm) -> float:
        """Seconds of one occurrence of a term."""
        match term.work:
            case LayerWork():
                return self._of_layer(job, term.work)
            case Communication() as communication:
                return term.seconds * self._slowdown(job, communication)
            case OverlapRemainder(communications=communications, beside=beside, sm_fraction=sm_fraction):
                assert not sm_fraction, "no fitted run overlaps expert dispatch with another microbatch"
                whole_s = term.seconds + _UNCHANGED._of_layer(job, beside)
                return max(0.0, whole_s * self._slowdown(job, communications[0]) - self._of_layer(job, beside))
            case OverlapSlowdown():
                return self._values.get("overlap_slowdown", term.seconds)
            case HostWait(reason=reason):
                return self._values.get(f"host_{reason}_overhead_s", term.seconds)
            case _:
                return term.seconds

    def _slowdown(self, job: Job, communication: Communication) -> float:
        """Slowdown of communication at the given constants over that at the constants of the request."""
        rates = job.software.rates
        field = "inter_slowdown" if between_nodes(job.cluster, communication) else "intra_slowdown"
        before: float = getattr(rates, field)
        return self._values.get(f"{job.software.rates_profile}.{field}", before) / before

    def _of_layer(self, job: Job, work: LayerWork) -> float:
        plan, training, software = job.plan, job.training, job.software
        state = (training.precision, training.fp8_recipe, training.update, software.state(training, plan))
        layers = (software.layers.fused_norms, software.layers.fused_gemms, software.layers.padded_matmuls)
        way = (plan.shards_parameters, software.id, software.compiled, software.channels_last, software.cuda_graphs)
        device = job.cluster.device
        numbers = (job.cluster.num_devices, job.num_microbatches)
        key = (device.id, *device.matmul_flop_per_s.items(), *numbers, *state, *way, *layers)
        layer_s = self._seconds.get((*key, work))
        if layer_s is None:
            if key not in self._kernels:
                self._kernels[key] = self._kernel_cost(job)
            layer_s = self._seconds[(*key, work)] = self._kernels[key].seconds(work)
        return layer_s

    def _kernel_cost(self, job: Job) -> KernelCost:
        return kernel_cost(
            _changed_device(job.cluster.device, self._values),
            job.training.precision,
            job.software.state(job.training, job.plan),
            job.training.update,
            _changed_software(job.software, self._values),
            num_devices=job.cluster.num_devices,
            shards_parameters=job.plan.shards_parameters,
            num_microbatches=job.num_microbatches,
        )


_UNCHANGED = FitCosts({})


def fold_of(job: Job, folds: int) -> int:
    """Fold of a job, out of ``folds``; runs of one model on one device, near-duplicates, share a fold."""
    model = job.model
    shape = f"{model.family} {model.hidden_size} {model.num_hidden_layers} {job.cluster.device.id}"
    return int(sha256(shape.encode()).hexdigest(), 16) % folds


def part_of(run: PublishedRun, parts: int) -> int:
    """Part of a run, out of ``parts``, assigned per run, so that near-duplicates fall in different parts."""
    return int(sha256(run.id.encode()).hexdigest(), 16) % parts


def _changed_device(device: DeviceSpec, values: Values) -> DeviceSpec:
    """Device with the constants of its architecture and the common constants."""
    rates: dict[str, Any] = _of(device.architecture, ARCHITECTURE, values) | _of("", ALL, values)
    sustained = _of(device.architecture, KERNELS, values)
    rates["attention"] = {
        name: share.model_copy(update={"sustained": sustained.get(name, share.sustained)})
        for name, share in device.kernels.attention.items()
    }
    return device.model_copy(update={"kernels": device.kernels.model_copy(update=rates)})


def _changed_software(software: SoftwareSpec, values: Values) -> SoftwareSpec:
    """Software profile with its constants."""
    rates = software.rates.model_copy(update=_of(software.rates_profile, SOFTWARE, values))
    return software.model_copy(update={"rates": rates})


def run_at(run: PublishedRun, values: Values) -> PublishedRun:
    """Copy of a run with other constants."""
    job = run.known_job
    cluster = job.cluster.model_copy(update={"device": _changed_device(job.cluster.device, values)})
    software = _changed_software(job.software, values)
    return replace(run, job=replace(job, cluster=cluster, software=software))


def _of(name: str, fields: Iterable[str], values: Values) -> dict[str, float]:
    """Constants of one owner, by field."""
    prefix = f"{name}." if name else ""
    return {field: values[prefix + field] for field in fields if prefix + field in values}


def between_nodes(cluster: ClusterSpec, communication: Communication) -> bool:
    """True if the ranks of a collective are in more than one node."""
    first = cluster.node_of(communication.ranks[0])
    return any(cluster.node_of(rank) != first for rank in communication.ranks)


def load_rows(paths: Sequence[Path], values: Values, jobs: int = -1) -> list[FitRow]:
    """Load all runs with a step time that can be predicted; longest paths are computed at the given constants.

    Runs of frameworks that only have the profile of another framework are left out.
    """
    timed = [
        (Path(read.file).stem, run, dict(values))
        for read in read_published(paths)
        for run in read.runs or ()
        if run.job is not None and run.measured.step_time_s is not None and run.fallback_for is None
    ]
    fit_rows = Parallel(n_jobs=jobs)(delayed(_row)(*run_and_time) for run_and_time in timed)
    return [row for row in fit_rows if row is not None]


def _row(source: str, run: PublishedRun, values: Values) -> FitRow | None:
    run = run_at(run, values)
    try:
        terms = step_terms(run.known_job, steps_overlap=run.steps_overlap)
    except SimplanError:
        return None
    return FitRow(source, run, terms)
