"""Cost estimates from a calibration: timed layers, kernels of its grid for other layers, collectives and copies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.analytic import AnalyticCost
from simplan.cost.calibration.format import (
    Calibration,
    CommunicationTiming,
    HostCopyTiming,
    KernelTiming,
    LayerTiming,
    Mixed,
    Sample,
    way_of_mixing,
)
from simplan.cost.calibration.measured_links import timed_ranks
from simplan.cost.communication.collectives import bus_factor, communication_cost
from simplan.cost.compute.grid_cost import GridCost, KernelGrid, of_grid
from simplan.cost.compute.kernels import KernelCost
from simplan.cost.model import CostEstimate, CostPart, Limit, Provenance
from simplan.cost.program_costs import calls_words
from simplan.errors import Problem, SpecError
from simplan.model.layer import (
    Attention,
    CollectiveKind,
    Gemm,
    Kernel,
    LayerCollective,
    LayerSpec,
    Lookup,
    Pointwise,
    has_backward,
)
from simplan.model.low_precision import DEFAULT_RECIPE, Fp8Recipe
from simplan.optimizers import UpdateName
from simplan.plan.placement import Placement
from simplan.program.memory.split_footprint import weighted_kernels
from simplan.program.program import Communication, HostCopy, HostWait, LayerWork, Phase
from simplan.units import counted, format_bytes, format_number, format_rate, format_time

_SYSTEMATIC_STD = 0.04
"""Relative standard deviation between a layer timed alone and the layer inside a step, regardless of repeats."""
_EXTRAPOLATED_STD = 0.3
_CORRECTED_STD = 0.15
"""Relative standard deviation of a closed form that is corrected by another group. On 156 published timings that have
another group of ranks from the same source, corrected errors are 14 % (rms) from 1 MiB to 64 MiB, and 9 % above."""
_OF_PARAMETERS = (Phase.GATHER_COPY, Phase.REDUCE_COPY, Phase.SCALE, Phase.NORM, Phase.OPTIMIZER)
_OF_UPDATES = (Phase.ACCUMULATE, Phase.SCALE, Phase.NORM, Phase.OPTIMIZER)
_READ_ONLY = 0.5  # a norm of gradients only reads: half of the bytes moved by their division


class CalibratedCost:
    """A ``CostModel`` that looks up timings, and marks extrapolations.

    Timings were taken with all ranks busy. If the ranks used more cores than the machine has, a timing includes the
    wait for a core. An estimate is the time alone, because the simulator models the sharing of cores, so the wait is
    divided out.

    Args:
        calibration: The timings.
        dtype, optimizer: Precision and optimizer of the run.
        num_ranks: Ranks of the run per machine.
        fp8_recipe: Scaling of linear layers if the precision is FP8.
        mixed: Method of mixed precision; ignored for other precisions.
        cluster: Cluster whose network gives estimates for groups that were not timed across nodes. None for one
            machine.
        otherwise: Estimates for communication and copies that were not timed, and the kernels of a layer, for devices
            of the catalog; None for none.
        traffic: See ``GridCost``.
        update_fraction: See ``StateBytes``. Updates were timed in FP32.
        placement: Devices of the ranks of communication; None if they are the devices of their own numbers. The ranks
            of ``otherwise`` are devices.
    """

    def __init__(
        self,
        calibration: Calibration,
        *,
        dtype: str,
        optimizer: UpdateName,
        num_ranks: int,
        fp8_recipe: Fp8Recipe = DEFAULT_RECIPE,
        mixed: Mixed = "autocast",
        cluster: ClusterSpec | None = None,
        otherwise: AnalyticCost | None = None,
        traffic: float = 1.0,
        update_fraction: float = 1.0,
        placement: Placement | None = None,
    ) -> None:
        self.placement = placement
        self._calibration = calibration
        self._dtype = dtype
        self._num_ranks = num_ranks
        self._cluster = cluster
        self._otherwise = otherwise
        self._update_fraction = update_fraction
        self._grid_timings = timed = _grid_timings(calibration, dtype, num_ranks)
        self._gpu_kernels: KernelCost | None = None
        self._grid_ranks = timed[0].num_ranks if timed else num_ranks
        way, self._grid = way_of_mixing(dtype, sharded=mixed == "cast"), None
        if timed:
            grid = KernelGrid(timed)
            self._grid = GridCost(grid, optimizer=optimizer, accumulates=way != "cast", traffic=traffic)
            if calibration.device_kind == "gpu" and otherwise is not None and grid.has("launch"):
                wide = _grid_timings(calibration, "fp32", num_ranks)
                self._gpu_kernels = of_grid(otherwise.kernels, grid, KernelGrid(wide) if wide else None)
        self._layers: dict[tuple[str, int], LayerTiming] = {
            (timing.key, timing.microbatch_size): timing
            for timing in calibration.layers
            if (timing.dtype, timing.optimizer, timing.num_ranks) == (dtype, optimizer, num_ranks)
            and (timing.mixed, timing.fp8_recipe) == (way, fp8_recipe)
        }

    def covers(
        self,
        layer_keys: Collection[str],
        microbatch_size: int,
        kinds: Collection[CollectiveKind] = (),
        *,
        host_copies: bool = False,
    ) -> bool:
        """Returns True if the calibration timed all of this with the run's ranks per machine.

        Kernels of the grid do not count as layers; for ``kinds`` see ``simplan.cost.calibration.store``.
        """
        if host_copies and not self._host_copies():
            return False
        here = (t for t in self._calibration.communication if t.num_nodes == 1)
        timed = {t.kind for t in here if t.world_size == self._num_ranks}
        return timed.issuperset(kinds) and all((key, microbatch_size) in self._layers for key in layer_keys)

    def reference_s(self, layer_keys: Collection[str], microbatch_size: int) -> float | None:
        """Returns mean seconds of the executor's reference matmul while these layers, or else the grid, were timed.

        None if it was not timed.
        """
        layers = (self._layers.get((key, microbatch_size)) for key in layer_keys)
        timings = [timing for timing in layers if timing is not None] or self._grid_timings
        found = [timing.reference_s for timing in timings if timing.reference_s is not None]
        return statistics.fmean(found) if found else None

    @property
    def compute_slowdown(self) -> float | None:
        """Time of compute overlapped with collectives over its time alone; None for no timing with this rank count."""
        is_gpu = self._calibration.device_kind == "gpu"
        found = [t.compute_slowdown for t in self._calibration.overlaps if is_gpu or t.num_ranks == self._num_ranks]
        return statistics.median(found) if found else None

    @property
    def overlap_slowdown(self) -> float:
        """See ``CostModel``: as measured, otherwise as without a calibration; 0 on CPUs, whose cores ranks share."""
        if self._calibration.device_kind != "gpu":
            return 0.0
        slowdown = self.compute_slowdown
        if slowdown is not None:
            return 1 - 1 / slowdown
        return 0.0 if self._otherwise is None else self._otherwise.overlap_slowdown

    def compute(self, work: LayerWork) -> CostEstimate:
        """See ``CostModel``.

        Raises:
            SpecError: The calibration has no timing of the layer, at any microbatch size, and no grid.
        """
        only_links = not (self._calibration.layers or self._calibration.kernels)
        if self._otherwise is not None and (work.on_host or only_links):  # the host's CPU was not timed
            return self._otherwise.compute(work)
        timing = self._layers.get((work.layer.key, work.microbatch_size))
        if timing is None:
            estimate = self._untimed_compute(work)
        else:
            estimate = self._estimate_from(work, timing, 1.0, Provenance.CALIBRATED)
        estimate = self._host_bound(work, estimate)
        if self._update_fraction == 1.0 or work.phase not in _OF_UPDATES or work.updates is not None:
            return estimate
        return replace(
            estimate.times(self._update_fraction, "of the bytes"),
            provenance=Provenance.EXTRAPOLATED,
            relative_std=max(estimate.relative_std, _EXTRAPOLATED_STD),
        )

    def _host_bound(self, work: LayerWork, estimate: CostEstimate) -> CostEstimate:
        """Returns the time in which the host issues the operations of a layer, where that is longer.

        Layers and kernels of GPUs were timed with the host ahead of the device.
        """
        if self._gpu_kernels is None or work.phase in _OF_UPDATES + _OF_PARAMETERS:
            return estimate
        calls, call_s = self._gpu_kernels.host_calls(work), self._gpu_kernels.host_call_s
        if calls * call_s <= estimate.seconds:
            return estimate
        part = CostPart("operations of the host", calls * call_s, Limit.HOST, calls_words, (calls, call_s))
        return CostEstimate.of(part, Provenance.CALIBRATED, _EXTRAPOLATED_STD)

    def _estimate_from(
        self, work: LayerWork, timing: LayerTiming, factor: float, provenance: Provenance
    ) -> CostEstimate:
        if work.phase is Phase.RECOMPUTE and work.layer.loss_chunks is not None:
            return CostEstimate.nothing("part of the timed backward", provenance)
        sample = _sample(timing, work.phase)
        if sample is None:
            return CostEstimate.nothing("nothing needs the gradient of the layer's input", provenance)
        if work.phase in _OF_PARAMETERS:
            timed = work.layer.num_parameters if work.phase is Phase.GATHER_COPY else work.layer.num_trained
            factor = work.num_parameters / (timed or 1)
            if work.phase is Phase.NORM:
                factor, provenance = _READ_ONLY * factor, Provenance.EXTRAPOLATED
        else:
            factor *= weight_share(work)
        std = (sample.round_std**2 + _SYSTEMATIC_STD**2) ** 0.5
        if provenance is Provenance.EXTRAPOLATED:
            std = max(std, _EXTRAPOLATED_STD)
        crowding = self._crowding(timing.num_ranks)
        numbers = sample, factor, crowding
        part = CostPart(str(work.phase), sample.mean_s * factor / crowding, Limit.TIMING, _sample_words, numbers)
        return CostEstimate.of(part, provenance, std)

    def _crowding(self, num_ranks: int, threads: int | None = None) -> float:
        """Returns cores used by all ranks during timing over cores of the machine, at least 1; 1 on GPUs.

        A rank computes on an equal number of ``threads`` unless another number is given.
        """
        cores = self._calibration.num_cores
        if self._calibration.device_kind != "cpu" or cores is None:
            return 1.0
        return max(1.0, num_ranks * (threads or max(1, cores // num_ranks)) / cores)

    def _untimed_compute(self, work: LayerWork) -> CostEstimate:
        """Estimates from the grid, otherwise from the nearest timed microbatch size of the same layer.

        A GPU of the catalog has the kernels of the catalog, at the rates of the grid.
        """
        if self._gpu_kernels is not None and work.phase not in _OF_UPDATES + _OF_PARAMETERS:
            return self._gpu_kernels.cost_estimate(work)
        if self._grid is not None:
            return self._grid.cost_estimate(work).times(1 / self._crowding(self._grid_ranks), "cores per rank")
        same = [t for (key, _), t in self._layers.items() if key == work.layer.key]
        if same:
            nearest = min(same, key=lambda t: abs(t.microbatch_size - work.microbatch_size))
            factor = work.microbatch_size / nearest.microbatch_size
            return self._estimate_from(work, nearest, factor, Provenance.EXTRAPOLATED)
        others = sorted({t.dtype for t in self._calibration.kernels})
        grid = f", and its kernels are in {' and '.join(others)} or of ranks with another number of threads"
        raise _missing(
            f"the layer {work.layer.key} in {self._dtype} on {self._num_ranks} ranks{grid if others else ''}",
            f"run `simplan calibrate SCENARIO` with this scenario, or `simplan calibrate --dtype {self._dtype} "
            f"--ranks {self._num_ranks}` for any",
        )

    def communication(self, communication: Communication) -> CostEstimate:
        """See ``CostModel``.

        Raises:
            SpecError: No communication of this kind was timed.
        """
        kind, n = communication.kind, len(communication.ranks)
        if n == 1:
            return CostEstimate.nothing("a group of one", Provenance.CALIBRATED)
        if self.placement is not None:
            communication = communication._replace(ranks=self.placement.devices_of(communication.ranks))
        num_nodes = 1 if self._cluster is None else len({*map(self._cluster.node_of, communication.ranks)})
        timings = [t for t in self._calibration.communication if t.kind == kind and t.num_nodes == num_nodes]
        if self._otherwise is not None and not any(t.num_ranks == n for t in timings):
            return self._corrected(self._otherwise.communication(communication), communication, num_nodes)
        if self._cluster is not None and num_nodes > 1 and not timings:
            return communication_cost(communication, self._cluster)
        if not timings:
            raise _missing(str(kind), f"run `simplan calibrate --ranks {max(2, self._num_ranks)}`")
        # the same group in the same world is best, then the nearest in either
        nearest = min(timings, key=lambda t: (abs(t.num_ranks - n), abs(t.world_size - self._num_ranks)))
        group = (nearest.num_ranks, nearest.world_size)
        cost_estimate = _interpolated(
            [t for t in timings if (t.num_ranks, t.world_size) == group],
            communication.num_bytes,
            str(kind),
            is_same=group == (n, self._num_ranks),
        )
        more = bus_factor(kind, n) / bus_factor(kind, nearest.num_ranks)
        alone = cost_estimate.times(more, f"bytes sent by one of {n} ranks over one of {nearest.num_ranks}")
        return alone.times(1 / self._crowding(nearest.world_size, 1), "cores per rank")

    def _corrected(self, estimate: CostEstimate, communication: Communication, num_nodes: int) -> CostEstimate:
        """Returns an estimate times measured over estimated time of the nearest group, inside nodes or between them."""
        between, num_bytes = num_nodes > 1, communication.num_bytes
        timings = [t for t in self._calibration.communication if t.kind is communication.kind]
        timings = [t for t in timings if (t.num_nodes > 1) == between]
        if not timings or self._cluster is None or self._otherwise is None:
            return estimate
        distance = partial(_distance, num_ranks=len(communication.ranks), num_nodes=num_nodes)
        near = min(timings, key=distance)
        if near.num_ranks > near.num_nodes * self._cluster.devices_per_node:
            return estimate
        group = [t for t in timings if (t.num_ranks, t.num_nodes, t.world_size) == _group(near)]
        measured = _interpolated(group, num_bytes, "")
        expected = self._otherwise.communication(communication._replace(ranks=timed_ranks(near, self._cluster)))
        ratio = measured.seconds / expected.seconds
        of_group = f"{near.num_ranks} ranks on {counted(near.num_nodes, 'node')}"
        return replace(
            estimate.times(ratio, f"measured over estimated, {of_group}"),
            provenance=Provenance.EXTRAPOLATED,
            relative_std=_CORRECTED_STD,
            least_s=0.0,
        )

    def host_copy(self, copy: HostCopy) -> CostEstimate:
        """See ``CostModel``.

        Raises:
            SpecError: No copy was timed with this number of ranks.
        """
        curve = self._host_copies()
        if not curve and self._otherwise is not None:
            return self._otherwise.host_copy(copy)
        if not curve:
            raise _missing(
                f"copies between device and host on {self._num_ranks} ranks",
                "run `simplan calibrate SCENARIO` with this scenario",
            )
        copied = _interpolated(curve, copy.num_bytes, "copy")
        return copied.times(1 / self._crowding(self._num_ranks, 1), "cores per rank")

    def host_wait(self, wait: HostWait) -> CostEstimate:
        """See ``CostModel``."""
        if self._otherwise is not None:
            return self._otherwise.host_wait(wait)
        return CostEstimate.nothing("a bare loop was timed", Provenance.CALIBRATED)

    def _host_copies(self) -> list[HostCopyTiming]:
        """Returns copy timings with the run's ranks per machine."""
        return [t for t in self._calibration.host_copies if t.world_size == self._num_ranks]


def _group(timing: CommunicationTiming) -> tuple[int, int, int]:
    """Returns ranks, nodes and ranks per node of a timing."""
    return timing.num_ranks, timing.num_nodes, timing.world_size


def _distance(timing: CommunicationTiming, num_ranks: int, num_nodes: int) -> float:
    """Returns the difference of two groups in ranks per node and in nodes, as factors."""
    local = math.log(timing.num_ranks / timing.num_nodes) - math.log(num_ranks / num_nodes)
    return abs(local) + abs(math.log(timing.num_nodes / num_nodes))


def _missing(what: str, fix: str) -> SpecError:
    return SpecError(Problem(field="calibration", rule=f"has no timing of {what}", fix=fix))


def _grid_timings(calibration: Calibration, dtype: str, num_ranks: int) -> list[KernelTiming]:
    """Returns kernel timings of a precision; on CPUs, for equal threads per rank and the nearest rank count."""
    cores = None if calibration.device_kind == "gpu" else calibration.num_cores
    timings = [
        t
        for t in calibration.kernels
        if t.dtype == dtype and (cores is None or max(1, cores // t.num_ranks) == max(1, cores // num_ranks))
    ]
    nearest = min({t.num_ranks for t in timings}, key=lambda ranks: abs(ranks - num_ranks), default=0)
    return [t for t in timings if t.num_ranks == nearest]


def _sample(timing: LayerTiming, phase: Phase) -> Sample | None:
    """Returns the timing of a phase; None for an input half of backward without work (no gradient of the input)."""
    return {
        Phase.FORWARD: timing.forward_s,
        Phase.RECOMPUTE: timing.forward_s,
        Phase.BACKWARD: timing.backward_s,
        Phase.BACKWARD_INPUT: timing.backward_input_s,
        Phase.BACKWARD_WEIGHT: timing.backward_weight_s or timing.backward_s,
        Phase.GATHER_COPY: timing.gather_copy_s,
        Phase.REDUCE_COPY: timing.reduce_copy_s,
        Phase.ACCUMULATE: timing.scale_s,
        Phase.SCALE: timing.scale_s,
        Phase.NORM: timing.scale_s,
        Phase.OPTIMIZER: timing.optimizer_s,
    }[phase]


def _interpolated(
    timings: Sequence[CommunicationTiming | HostCopyTiming], num_bytes: int, what: str, *, is_same: bool = True
) -> CostEstimate:
    """Returns the time between timed sizes, linear in bytes; beyond the last size the last slope continues.

    Args:
        timings: Timings over sizes.
        num_bytes: Size in bytes.
        what: Name of the part.
        is_same: False if another group of ranks was timed, which makes the result an extrapolation.
    """
    curve = sorted(timings, key=lambda timing: timing.num_bytes)
    first, last = curve[0], curve[-1]
    if num_bytes <= first.num_bytes or len(curve) == 1:
        base_s = first.seconds.mean_s * max(1.0, num_bytes / first.num_bytes)
        more_bytes = slope = 0.0
    else:
        upper = next((i for i, t in enumerate(curve) if t.num_bytes >= num_bytes), len(curve) - 1)
        low, high = curve[upper - 1], curve[upper]
        slope = (high.seconds.mean_s - low.seconds.mean_s) / (high.num_bytes - low.num_bytes)
        base_s, slope, more_bytes = low.seconds.mean_s, max(0.0, slope), float(num_bytes - low.num_bytes)
    exact = is_same and num_bytes <= last.num_bytes
    spread = statistics.median(t.seconds.round_std for t in curve)
    numbers = base_s, slope, more_bytes, first.num_bytes, last.num_bytes
    return CostEstimate.of(
        CostPart(what, base_s + slope * more_bytes, Limit.TIMING, _interpolated_words, numbers),
        Provenance.CALIBRATED if exact else Provenance.EXTRAPOLATED,
        (spread**2 + (0.1 if exact else _EXTRAPOLATED_STD) ** 2) ** 0.5,
    )


def _interpolated_words(base_s: float, slope: float, more_bytes: float, first_bytes: int, last_bytes: int) -> str:
    more = f" + {format_bytes(more_bytes)} / {format_rate(1 / slope, digits=4)}" if slope and more_bytes else ""
    sizes = f"timed from {format_bytes(first_bytes)} to {format_bytes(last_bytes)}"
    return f"{format_time(base_s, digits=4)}{more} ({sizes})"


def _sample_words(sample: Sample, factor: float, crowding: float) -> str:
    times = "" if factor == 1.0 else f" x {format_number(factor)}"
    if crowding > 1.0:
        times += f" / {format_number(crowding)}"
    low, high = format_time(sample.low_s), format_time(sample.high_s)
    return (
        f"{format_time(sample.mean_s, digits=4)}{times} (mean of {sample.num_repeats}, p10 to p90 {low} to {high}"
        f"{'; shared by ranks on a core' if crowding > 1.0 else ''})"
    )


_FLOPS_PER_ELEMENT = 32
"""FLOPs of a matmul in the time to move one element to or from memory: 40 GFLOP/s per CPU core in FP32 at 5 GB/s. It
only divides a measured time among kernels."""

_SCORE_PASSES = 8  # over scores that are tensors: those of the matmuls, of the bias and of the softmax


def weight_share(work: LayerWork) -> float:
    """Returns the weight of the kernels that run over the weight of all kernels of the layer.

    The weight is FLOPs plus elements moved; collectives have no weight. The work is forward, recomputation or backward.
    """
    if work.kernels is None:
        return 1.0
    kernels = work.layer.kernels
    parts = [_weight(kernel) * _times(work.layer, kernel, work.phase) for kernel in kernels]
    return sum(parts[index] for index in work.kernels) / (sum(parts) or 1)


def _times(layer: LayerSpec, kernel: Kernel, phase: Phase) -> int:
    """Returns how many times a phase repeats a kernel's forward work, as far as kernels differ.

    A full backward repeats all kernels about twice. A GEMM counts one matmul if its weight is frozen or its input needs
    no gradient; kernels without trained parameters before them count zero. Each half of a split backward has one matmul
    per GEMM. All gradients of activations are in the first half; the second half only sums the gradients of other
    weights.
    """
    if phase is Phase.BACKWARD_INPUT:
        return 0 if isinstance(kernel, Lookup) else 1 if isinstance(kernel, Gemm) else 2
    if phase is Phase.BACKWARD_WEIGHT:
        return int(kernel in weighted_kernels(layer))
    if phase is Phase.BACKWARD:
        return kernel.backward_matmuls if isinstance(kernel, Gemm) else 2 * has_backward(kernel)
    return 1


def _weight(kernel: Kernel) -> int:
    match kernel:
        case Gemm(m=m, n=n):
            elements = m * n + kernel.input_elements + kernel.weight_elements
            return kernel.computed_flops + _FLOPS_PER_ELEMENT * elements
        case Attention(num_heads=heads, num_key_value_heads=kv_heads, seq_len=queries):
            widths = kernel.head_dim + (kernel.value_head_dim or kernel.head_dim)
            elements = widths * (heads * queries + kv_heads * (kernel.num_keys or queries))
            elements += _SCORE_PASSES * kernel.num_scores if kernel.eager else 0
            return kernel.computed_flops + _FLOPS_PER_ELEMENT * elements
        case Pointwise(reads=reads, writes=writes):
            return _FLOPS_PER_ELEMENT * (reads + writes)
        case Lookup(rows=rows, width=columns):
            return _FLOPS_PER_ELEMENT * 2 * rows * columns
        case LayerCollective():
            return 0
