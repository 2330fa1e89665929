"""Fit the uncertainty of peak memory to published peaks, and report its held-out coverage.

    python -m fit.peak_memory scenarios/published [--fine-tuning scenarios/heldout/finetuning_*.yaml]
        [--held-out scenarios/heldout] [--write]

The log of measured over predicted peak follows Student's t with five degrees of freedom, as the log of step times does
(``fit.spread``). Its scale has two independent parts (``simplan.software.rates.MemorySpread``): a fraction of transient
tensors, and, for peaks of the allocator or the device, a fraction of the peak. Persistent tensors have none. Their
bytes are sums of shapes, and the 12 peaks of tensors on B200, which are mostly persistent, are within 0.8%. Either part
alone gives worse held-out interval scores (``alternatives``).

Both parts are common to all frameworks with peaks but Hugging Face's: parts by framework are within a third of the
common ones, and their coverage of held-out runs is lower. Hugging Face's loops load weights first, and what is left of
that in the allocator varies, so they have parts of their own. A source counts as its number of peaks to the power of
0.75, as in ``fit.step_times``.

rehearsed_peaks.yaml has peaks that torch asks of its allocator without a device (``simplan rehearse --fake``). They are
within 0.1% of predictions. They show that the tensors of torch's profile need no wider deviation than those of other
profiles with peaks. They say nothing about devices, so they are not fitted on.

A profile without peaks has no fitted reserve fraction and context either. So its errors are those of predictions of
each source with the reserve fraction and context that a profile without peaks has, and its deviations are the common
ones times a factor with which 90% of the peaks are inside, with equal weight per source.

Loops that fine-tune store and free weights in more ways than are known of each. A third part, of the whole peak, is
theirs, under profiles that were not fitted on peaks of fine-tuning. It has the lowest mean interval score of the peaks
of ``--fine-tuning``, with equal weight per source. Nothing else is fitted on these. ``--write`` replaces
memory_fitted.yaml.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gamma, pi
from pathlib import Path

import numpy as np
import yaml
from joblib import Parallel, delayed

from fit.robust import Floats
from simplan import catalog
from simplan.accuracy.run import PublishedRun
from simplan.errors import SimplanError
from simplan.job import Job
from simplan.predict.memory import RankPeaks, device_memory
from simplan.predict.simulated import NINE_IN_TEN
from simplan.predict.step_summary import summarized_step
from simplan.prediction import MemoryKind
from simplan.scenario import load_scenario
from simplan.scenario.published.reading import read_published
from simplan.units import GIB, counted

FITTED_FILE = Path(catalog.__file__).parent / "memory_fitted.yaml"
REHEARSED_FILE = Path(__file__).parent / "rehearsed_peaks.yaml"
_INSIDE = 0.9
_FREEDOM, _T_NINE_IN_TEN = 5, 2.015  # Student's t has 90% within 2.015 times its scale
_DIVIDED = 0.25
_GRID = np.exp(np.arange(np.log(0.003), np.log(1.0), 0.05))
_LOADING_FIRST = ("accelerate", "deepspeed", "transformers")  # profiles of loops that load weights, Hugging Face's
_UNFITTED = {"reserve_fraction": 0.2, "context_bytes": {"gpu": GIB, "cpu": 0}}
"""Fields of profiles without peaks: the fraction of Megatron Core's relatives, and about 1 GiB of context."""


@dataclass(frozen=True, slots=True)
class PeakRow:
    """A published peak.

    Attributes:
        source: File name of the run.
        software: Profile that predicts it.
        kind: Kind of the peak.
        error: Logarithm of measured over predicted peak.
        unfitted_error: The same without fields of the profile that were fitted on the source.
        transient: Fraction of transient tensors in the predicted peak.
        std: Relative standard deviation under the profile, without the part of fine-tuning.
        is_new: The profile was not fitted on peaks of fine-tuning.
    """

    source: str
    software: str
    kind: MemoryKind
    error: float
    unfitted_error: float
    transient: float
    std: float = 0.0
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Deviations:
    """Relative standard deviations: of transient tensors, and of the memory of allocator and device."""

    transient: float
    allocator: float

    def half_widths(self, rows: Sequence[PeakRow]) -> Floats:
        """Half widths of 90% intervals, in logarithms."""
        return NINE_IN_TEN * _both_parts(rows, np.array(self.transient), np.array(self.allocator))


Parts = Callable[[Sequence[PeakRow], Floats, Floats], Floats]


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description="fit the uncertainty of peak memory")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--fine-tuning", type=Path, nargs="+", default=[], help="runs for the part of fine-tuning")
    parser.add_argument("--held-out", type=Path, nargs="*", default=[], help="runs for a report of coverage only")
    parser.add_argument("--write", action="store_true", help=f"replace {FITTED_FILE.name}")
    arguments = parser.parse_args()
    rows, loading = apart(load_peaks(arguments.runs))
    of_loading = fit(loading)
    for name, parts in alternatives.items():
        inside, scores = held_out(rows, parts)
        print(f"{name:24} source left out: coverage {100 * inside.mean():.0f} %, interval score {scores.mean():.3f}")
    estimate = fit(rows)
    wider = unfitted(rows, estimate)
    print(f"fitted {estimate}, profiles without peaks {wider}")
    by_source = {source: [row for row in rows if row.source == source] for source in dict.fromkeys(_sources(rows))}
    held, _ = held_out(rows)
    for source, of_source in {**by_source, "all": rows}.items():
        indices = [index for index, row in enumerate(rows) if row in of_source]
        print(
            f"{source:32}{len(of_source):4} peaks: inside {100 * _inside(of_source, estimate).mean():.0f} % in-sample, "
            f"{100 * held[indices].mean():.0f} % with the source left out, median half width "
            f"{100 * np.median(estimate.half_widths(of_source)):.1f} %"
        )
    inside = _inside(loading, of_loading)
    half_width = np.median(of_loading.half_widths(loading))
    print(
        f"after loading: {len(loading)} peaks, {of_loading}, inside {100 * inside.mean():.0f} % in-sample, median half "
        f"width {100 * half_width:.1f} %"
    )
    tuned = [row for row in load_peaks(arguments.fine_tuning) if row.is_new]
    finetuning = fine_tuning_std(tuned)
    for source in dict.fromkeys(_sources(tuned)):
        of_source, others = ([row for row in tuned if (row.source == source) == is_own] for is_own in (True, False))
        without = fine_tuning_std(others)
        shares = [
            np.mean(np.abs(_errors(of_source)) <= _with_fine_tuning(of_source, std)) for std in (finetuning, without)
        ]
        print(
            f"fine-tuning, {source}: {len(of_source)} peaks, inside {100 * shares[0]:.0f} % in-sample with "
            f"{finetuning:.3f}, {100 * shares[1]:.0f} % with {without:.3f} of the other sources"
        )
    for path in arguments.held_out:
        others = load_peaks([path])
        print(f"{path}: {len(others)} peaks, inside {100 * _inside(others, wider).mean():.0f} % without a profile")
    rehearsed = load_rehearsed()
    largest = max(abs(math.expm1(row.error)) for row in rehearsed)
    print(f"{REHEARSED_FILE.name}: {len(rehearsed)} peaks, largest error {100 * largest:.2f} %")
    if arguments.write:
        lines = fitted_lines([*rows, *rehearsed, *loading], estimate, of_loading, wider, finetuning)
        FITTED_FILE.write_text("\n".join([*lines, ""]), encoding="utf-8")
        print(f"wrote {FITTED_FILE.name}")


def apart(rows: Sequence[PeakRow]) -> tuple[list[PeakRow], list[PeakRow]]:
    """Peaks of loops that make weights themselves, and of those that load them first."""
    loading = [row for row in rows if row.software in _LOADING_FIRST]
    return [row for row in rows if row.software not in _LOADING_FIRST], loading


def fit(rows: Sequence[PeakRow], parts: Parts | None = None) -> Deviations:
    """Deviations with the highest likelihood on a grid."""
    sizes, errors = Counter(_sources(rows)), _errors(rows)
    weights = np.array([sizes[row.source] ** -_DIVIDED for row in rows])
    deviations = (parts or _both_parts)(rows, _GRID[:, None, None], _GRID[None, :, None])
    scales = np.broadcast_to(deviations, (len(_GRID), len(_GRID), len(rows))) * NINE_IN_TEN / _T_NINE_IN_TEN
    top = gamma((_FREEDOM + 1) / 2) / gamma(_FREEDOM / 2) / np.sqrt(_FREEDOM * pi)
    logs = np.log(top / scales) - (_FREEDOM + 1) / 2 * np.log1p((errors / scales) ** 2 / _FREEDOM)
    transient, allocator = np.unravel_index(int((logs @ weights).argmax()), (len(_GRID), len(_GRID)))
    return Deviations(float(_GRID[transient]), float(_GRID[allocator]))


def unfitted(rows: Sequence[PeakRow], fitted: Deviations) -> Deviations:
    """Deviations of profiles without peaks, so that 90% of the peaks are inside, with equal weight per source."""
    needed = np.abs([row.unfitted_error for row in rows]) / fitted.half_widths(rows)
    weights = _per_source(rows)
    order = np.argsort(needed)
    reached = np.cumsum(weights[order]) / weights.sum()
    factor = float(needed[order][np.searchsorted(reached, _INSIDE)])
    return Deviations(factor * fitted.transient, factor * fitted.allocator)


def fine_tuning_std(rows: Sequence[PeakRow]) -> float:
    """Deviation of whole peaks with the lowest mean interval score beside ``std``, with equal weight per source."""
    if not rows:
        return 0.0
    scores = [_interval_scores(_errors(rows), _with_fine_tuning(rows, std)) @ _per_source(rows) for std in _GRID]
    return float(_GRID[int(np.argmin(scores))])


def held_out(rows: Sequence[PeakRow], parts: Parts | None = None) -> tuple[Floats, Floats]:
    """``(peaks,)`` 1 if inside intervals that are fitted without the source, else 0; and interval scores."""
    inside, scores = np.zeros(len(rows)), np.zeros(len(rows))
    for source in dict.fromkeys(_sources(rows)):
        places = [index for index, row in enumerate(rows) if row.source == source]
        estimate = fit([row for row in rows if row.source != source], parts)
        mine = [rows[index] for index in places]
        scale = np.array(estimate.transient), np.array(estimate.allocator)
        half = NINE_IN_TEN * (parts or _both_parts)(mine, *scale)
        inside[places] = np.abs(_errors(mine)) <= half
        scores[places] = _interval_scores(_errors(mine), half)
    return inside, scores


def load_peaks(paths: Sequence[Path]) -> list[PeakRow]:
    """Published peaks of runs that can be predicted."""
    measured = [
        (Path(read.file).stem, run)
        for read in read_published(paths)
        for run in read.runs or ()
        if run.job is not None and run.measured.memory_gib
    ]
    row_groups = Parallel(n_jobs=-1)(delayed(_rows)(*run_and_peak) for run_and_peak in measured)
    return [row for rows in row_groups for row in rows]


def fitted_lines(
    rows: Sequence[PeakRow], common: Deviations, of_loading: Deviations, wider: Deviations, finetuning: float
) -> Iterator[str]:
    """Lines of memory_fitted.yaml."""
    yield "# Written by `make fit` (python -m fit.peak_memory), from scenarios/published and rehearsed_peaks.yaml."
    runtimes = sorted({catalog.software(row.software).runtime for row in rows})
    yield f"runtimes: [{', '.join(runtimes)}]  # whose peaks were compared"
    yield "unfitted:"
    yield f"  transient_std: {wider.transient:.3f}"
    yield f"  allocator_std: {wider.allocator:.3f}"
    yield f"  finetuning_std: {finetuning:.3f}"
    yield "software:"
    for software in sorted({row.software for row in rows}):
        of_software = [row for row in rows if row.software == software]
        counts = ", ".join(f"{source} ({number})" for source, number in sorted(Counter(_sources(of_software)).items()))
        fitted = of_loading if software in _LOADING_FIRST else common
        yield f"  {software}:"
        yield f"    transient_std: {fitted.transient:.3f}"
        if any(row.kind != "allocated" for row in of_software):
            yield f"    allocator_std: {fitted.allocator:.3f}"
        if software in _LOADING_FIRST:
            yield "    finetuning_std: 0.0"
        yield f'    fitted_on: "{counted(len(of_software), "peak")} of {counts}"'


def _rows(source: str, run: PublishedRun) -> list[PeakRow]:
    try:
        rows = _peak_rows(source, run.known_job, run.measured.memory_gib, steps_overlap=run.steps_overlap)
    except SimplanError:
        return []
    if run.measured.peak_unstated_gib is None:
        return rows
    return [min(rows, key=lambda row: abs(row.error))]  # the nearer kind, as in reports


def _peak_rows(
    source: str, job: Job, measured_gib: Mapping[MemoryKind, float], *, steps_overlap: bool = False
) -> list[PeakRow]:
    peaks = list(summarized_step(job, steps_overlap=steps_overlap).peaks().values())
    plain = replace(job, software=job.software.model_copy(update=_UNFITTED))
    rows, spread = [], job.software.memory_spread
    for kind, gib in measured_gib.items():
        worst = max(peaks, key=lambda peak: _bytes(peak, kind, job))
        predicted, unfitted = _bytes(worst, kind, job), max(_bytes(peak, kind, plain) for peak in peaks)
        rows.append(
            PeakRow(
                source=source,
                software=job.software.id,
                kind=kind,
                error=math.log(gib * GIB / predicted),
                unfitted_error=math.log(gib * GIB / unfitted),
                transient=(transient := (worst.allocated - worst.resting) / predicted),
                std=spread.relative_std(transient, allocated=kind == "allocated", finetunes=False),
                is_new=spread.fitted_on is None or job.software.id not in _LOADING_FIRST,
            )
        )
    return rows


def load_rehearsed() -> list[PeakRow]:
    """Peaks of torch's allocations without a device."""
    peaks = yaml.safe_load(REHEARSED_FILE.read_text(encoding="utf-8"))["allocated_gib"]
    return [
        row
        for file, gib in peaks.items()
        for row in _peak_rows(REHEARSED_FILE.stem, load_scenario(file).job, {"allocated": gib})
    ]


def _bytes(peaks: RankPeaks, kind: MemoryKind, job: Job) -> int:
    return int(getattr(device_memory(peaks, job), f"{kind}_bytes"))


def _sources(rows: Sequence[PeakRow]) -> list[str]:
    return [row.source for row in rows]


def _errors(rows: Sequence[PeakRow]) -> Floats:
    return np.array([row.error for row in rows])


def _per_source(rows: Sequence[PeakRow]) -> Floats:
    """Weights of rows, equal per source."""
    sizes = Counter(_sources(rows))
    return np.array([1 / sizes[row.source] for row in rows])


def _interval_scores(errors: Floats, half_widths: Floats) -> Floats:
    """Interval scores of 90% intervals of measured over predicted (Gneiting and Raftery 2007)."""
    low, high, truth = np.exp(-half_widths), np.exp(half_widths), np.exp(errors)
    return np.asarray(high - low + 2 / (1 - _INSIDE) * (np.maximum(0, low - truth) + np.maximum(0, truth - high)))


def _with_fine_tuning(rows: Sequence[PeakRow], std: float) -> Floats:
    """Half widths of 90% intervals, in logarithms, with a part of fine-tuning."""
    return NINE_IN_TEN * np.hypot([row.std for row in rows], std)


def _inside(rows: Sequence[PeakRow], deviations: Deviations) -> Floats:
    return np.asarray(np.abs([row.error for row in rows]) <= deviations.half_widths(rows), dtype=float)


def _both_parts(rows: Sequence[PeakRow], transient: Floats, allocator: Floats) -> Floats:
    """Relative standard deviations of peaks, as ``MemorySpread.relative_std``, at arrays of deviations."""
    return np.hypot(transient * _transients(rows), allocator * _of_device(rows))


def _transients(rows: Sequence[PeakRow]) -> Floats:
    return np.array([row.transient for row in rows])


def _of_device(rows: Sequence[PeakRow]) -> Floats:
    return np.array([row.kind != "allocated" for row in rows], dtype=float)


alternatives: dict[str, Parts] = {
    "transient and allocator": _both_parts,
    "transient alone": lambda rows, transient, _: transient * _transients(rows),
    "fraction of the peak": lambda rows, transient, _: transient * np.ones(len(rows)),
    "one per kind of peak": lambda rows, transient, allocator: np.where(_of_device(rows) > 0, allocator, transient),
}
"""Widths that are compared by held-out coverage and interval score."""


if __name__ == "__main__":
    main()
