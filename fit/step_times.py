"""Fit kernel efficiencies to step times of published training runs, and report the prediction errors.

    python -m fit.step_times scenarios/published [--rounds N] [--keep] [--write]

Fitted are a few rates per architecture, a few framework constants, and common constants (``fit.rates``). They start
from, and are regularized toward, the prior values of kernels.yaml. A step time is the longest path through the work of
a step. Near the present constants it is therefore a sum of costs times counts
(``simplan.predict.step_summary.step_terms``). The fit evaluates the terms of that sum with the code that predicts, and
each round recomputes the longest paths. A source counts as its number of runs to the power of 0.75. ``--write``
replaces kernels_fitted.yaml, and with it what the constants were validated on: known.yaml of the catalog, and
left_out.yaml of ``simplan.accuracy``. With ``--keep`` only these two, for the constants that the catalog has.

Errors are printed in-sample; five-fold by model and device, so that near-duplicates stay together; five-fold by run, as
for a table with missing rows; and with a whole source, device, architecture or framework left out. Predictions on known
ground carry the spread of the second; what is unknown adds the spread of the last four (``fit.known``).
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fit.cross_validation import FOLDS, LEFT_OUT_FILE, errors_text, left_out, left_out_text
from fit.known import (
    KNOWN_FILE,
    LeftOut,
    counts_without,
    coverage_text,
    fit_unknown,
    known_lines,
    left_out_lines,
)
from fit.perturbation import MovedParts, parts_of
from fit.rates import ALL, ARCHITECTURE, KERNELS, NEVER_APART, SOFTWARE, SUSTAINED, TOGETHER
from fit.robust import Constant, Floats, Residuals, Values, constants_text, minimize, number_text, slopes
from fit.rows import FitCosts, FitRow, fold_of, load_rows, part_of
from fit.spread import SpreadEstimate, fit_spread, within, within_left_out
from simplan import catalog
from simplan.accuracy.left_out import LEFT_OUT_FILE as LEFT_OUT_RUNS
from simplan.cost.compute.kernel_cost import is_launched
from simplan.cost.known import ground_of

FITTED_FILE = Path(catalog.__file__).parent / "kernels_fitted.yaml"

_STD = 0.03  # approximate scatter of step times about a perfect model
_TRUST = {"good": 1.0, "assumed": 0.3, "noisy": 0.1, "inconsistent": 0.1}
"""Weight of a row by quality: assumed fields are guesses by the collector of the runs."""
_DIVIDED = 0.25
"""Each of n runs in a file weighs n to the power of minus this, since runs of one file are similar, not equal. A
smaller value lowers held-out errors; 0 would ignore the small files."""
_SMALL_MODELS = 0.25
"""Weight of a run of a small model: constants that large models share serve those first."""
_ITERATIONS = 8
_ITERATIONS_LEFT_OUT = 1
"""Iterations of held-out fits: one Gauss-Newton step from the fit of all rows, whose derivatives serve every held-out
fit (approximate cross-validation: Giordano et al. 2019, A Swiss Army Infinitesimal Jackknife)."""
_PARTS: Mapping[str, Callable[[FitRow], Hashable]] = {
    "source": lambda row: row.source,
    "device": lambda row: row.job.cluster.device.id,
    "architecture": lambda row: row.architecture,
    "framework": lambda row: row.job.software.rates_profile,
}
"""Parts of the runs that are left out, of which the fit then knows less."""


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description="fit kernels on published training runs")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=3, help="how often longest paths are looked for")
    parser.add_argument("--keep", action="store_true", help="keep the constants of the catalog")
    parser.add_argument("--write", action="store_true", help=f"replace {FITTED_FILE.name}")
    arguments = parser.parse_args()
    values = _values(textbook=not arguments.keep)
    for number in range(1 if arguments.keep else arguments.rounds):
        rows = load_rows(arguments.runs, values)
        if not number:
            textbook = log_errors(rows, _values(textbook=True))
        if not arguments.keep:
            values = {field: values[field] for field in ALL} | fit(rows, values)
    print("\n".join(constants_text(constants_of(rows), values)))
    tables = {"textbook": textbook, "fitted": log_errors(rows, values)}
    folds = _left_out(rows, values, tables)
    parts = parts_of(rows, values)
    spread = fit_spread(parts, tables["five-fold"])
    _print_errors(rows, tables, parts, spread)
    grounds, names = [ground_of(row.job) for row in rows], [row.source for row in rows]
    left = {
        name: LeftOut(tables[f"{name} left out"], counts_without(grounds, [of_row(row) for row in rows]))
        for name, of_row in _PARTS.items()
    }
    unknown = fit_unknown(parts, [*left.values()], names, spread)
    print("\n".join(coverage_text(parts, left, spread, unknown)))
    if not arguments.write:
        return
    errors, ids = left["source"].errors, [row.run.id for row in rows]
    known = known_lines(grounds, names, errors, spread, unknown)
    moved = left_out_lines(ids, errors - tables["fitted"], parts, left["source"], spread, unknown)
    written = {KNOWN_FILE: "\n".join([*known, ""]), LEFT_OUT_RUNS: "\n".join([*moved, ""])}
    if not arguments.keep:
        in_order = [folds[fold] for fold in range(FOLDS)]
        written |= {FITTED_FILE: fitted_text(values, rows, spread), LEFT_OUT_FILE: left_out_text(rows, in_order)}
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    print(f"wrote {', '.join(path.name for path in written)}")


def _left_out(rows: Sequence[FitRow], values: Values, tables: dict[str, Floats]) -> dict[Hashable, dict[str, float]]:
    """Add errors with parts left out of the fit to the tables; returns the constants of each fold."""
    priors = {constant.name: constant.textbook for constant in constants_of(rows)}
    derivatives = _derivatives(rows, values)

    def refit(seen: Sequence[FitRow]) -> dict[str, float]:
        return priors | fit(seen, values, _ITERATIONS_LEFT_OUT, derivatives)

    tables["five-fold"], folds = left_out(rows, lambda row: fold_of(row.job, FOLDS), refit, log_errors)
    tables["single runs"], _ = left_out(rows, lambda row: part_of(row.run, FOLDS), refit, log_errors)
    near = _FirstOrder(values, derivatives, dict(zip((row.run.id for row in rows), tables["fitted"], strict=True)))
    for name, of_row in _PARTS.items():
        if name == "source":
            tables[f"{name} left out"], _ = left_out(rows, of_row, refit, log_errors)
        else:
            tables[f"{name} left out"], _ = left_out(rows, of_row, near.fit, near.log_errors, jobs=1)
    return folds


@dataclass(frozen=True, slots=True)
class _FirstOrder:
    """Errors to first order in logarithms of constants, about those of all rows; a fit then takes milliseconds.

    Attributes:
        values: Constants of all rows.
        derivatives: Of residuals, by run and constant.
        errors: Log errors with all constants, by run.
    """

    values: Values
    derivatives: Mapping[str, Mapping[str, float]]
    errors: Mapping[str, float]

    def log_errors(self, rows: Sequence[FitRow], values: Values) -> Floats:
        """Logarithm of predicted over measured step time, by row."""
        moved = {
            name: float(np.log(value / self.values[name])) for name, value in values.items() if name in self.values
        }
        return np.array([self.errors[row.run.id] + _STD * self._moved(row, moved) for row in rows])

    def _moved(self, row: FitRow, moved: Values) -> float:
        return sum(slope * moved.get(name, 0.0) for name, slope in self.derivatives[row.run.id].items())

    def fit(self, rows: Sequence[FitRow]) -> dict[str, float]:
        """Constants of some rows; those that only others depend on have their priors."""
        constants = constants_of(rows)
        names = [constant.name for constant in constants]
        slopes = np.array([[self.derivatives[row.run.id].get(name, 0.0) for name in names] for row in rows])
        errors = np.array([self.errors[row.run.id] for row in rows]) / _STD
        begin = np.log([self.values[name] for name in names])

        def residuals(x: Floats, indices: Sequence[int]) -> Floats:
            return np.asarray((errors + slopes @ (np.log(x) - begin))[list(indices)])

        sizes = Counter(row.source for row in rows)
        weights = np.array([_weight(row, sizes[row.source]) for row in rows])
        priors = _values(textbook=True)
        start = {name: self.values[name] for name in names}
        return priors | minimize(
            constants, residuals, weights, start=start, most_iterations=_ITERATIONS, slopes_at_start=slopes
        )


def _print_errors(
    rows: Sequence[FitRow], tables: Mapping[str, Floats], parts: Sequence[MovedParts], spread: SpreadEstimate
) -> None:
    """Print the tables of errors by source, and the coverage of intervals on known ground."""
    sources: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        sources[row.source].append(index)
    print("\n".join(errors_text({**sources, "all": range(len(rows))}, tables)))
    means = [100 * np.abs(np.expm1(tables["source left out"][indices])).mean() for indices in sources.values()]
    print(f"a whole source left out, median over the sources: {np.median(means):.1f} %")
    five = tables["five-fold"]
    inside, scores = within_left_out(parts, five, [fold_of(row.job, FOLDS) for row in rows])
    print(
        f"inside 90 % intervals: five-fold {100 * within(parts, five, spread).mean():.0f} %, with widths from other "
        f"folds {100 * inside.mean():.0f} % (interval score {scores.mean():.3f})"
    )


def fit(
    rows: Sequence[FitRow],
    start: Values,
    iterations: int = _ITERATIONS,
    derivatives: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, float]:
    """Fit the constants; missing start values are priors.

    Args:
        rows: Runs to fit.
        start: Start values.
        iterations: Maximum number of steps.
        derivatives: Derivatives of residuals at the start, by run and constant; None to compute them.
    """
    constants = constants_of(rows)
    residuals = _residuals(rows, constants)
    sizes = Counter(row.source for row in rows)
    weights = np.array([_weight(row, sizes[row.source]) for row in rows])
    known = None
    if derivatives is not None:
        known = np.array([[derivatives[row.run.id].get(c.name, 0.0) for c in constants] for row in rows])
    return minimize(constants, residuals, weights, start=start, most_iterations=iterations, slopes_at_start=known)


def _residuals(rows: Sequence[FitRow], constants: Sequence[Constant]) -> Residuals:
    """Residuals of runs, in standard deviations of their logarithms."""
    names = [constant.name for constant in constants]
    measured = np.log([row.measured_s for row in rows])

    def residuals(x: Floats, indices: Sequence[int]) -> Floats:
        costs = FitCosts(dict(zip(names, x.tolist(), strict=True)))
        return np.array([(np.log(rows[i].predicted_s(costs)) - measured[i]) / _STD for i in indices])

    return residuals


def _derivatives(rows: Sequence[FitRow], values: Values) -> dict[str, dict[str, float]]:
    """Derivatives of the residuals with respect to logarithms of constants, by run and constant; zeros are left out."""
    constants = constants_of(rows)
    residuals = _residuals(rows, constants)
    x = np.log([values[constant.name] for constant in constants])
    matrix = slopes(constants, residuals, x, residuals(np.exp(x), range(len(rows))))
    return {
        row.run.id: {c.name: float(d) for c, d in zip(constants, slopes, strict=True) if d}
        for row, slopes in zip(rows, matrix, strict=True)
    }


def _weight(row: FitRow, size: int) -> float:
    """Weight of a run in a source of this size."""
    small = _SMALL_MODELS if row.source.startswith("small_models") else 1.0
    return float(small * _TRUST[row.run.measured.quality] * size**-_DIVIDED)


def constants_of(rows: Sequence[FitRow]) -> list[Constant]:
    """Constants that the runs depend on."""
    by_name: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        for field in _architecture_fields(row):
            by_name[row.architecture, field].append(index)
        for field in SOFTWARE:
            unused = "traffic" if row.job.software.compiled else "compiled_traffic"
            if field != unused:
                by_name[row.job.software.rates_profile, field].append(index)
        for field in _common_fields(row):
            by_name["", field].append(index)
    return [_constant(owner, field, indices) for (owner, field), indices in sorted(by_name.items())]


def _architecture_fields(row: FitRow) -> list[str]:
    """Constants of the architecture that a run depends on."""
    linear = row.job.software.state(row.job.training, row.job.plan).linear
    low = None if linear is None else "fp4_efficiency" if row.job.training.precision == "nvfp4" else "fp8_efficiency"
    fields: list[str] = [
        field for field in ARCHITECTURE if field not in ("fp8_efficiency", "fp4_efficiency") or field == low
    ]
    return fields if row.attention_kernel is None else [*fields, row.attention_kernel]


def _common_fields(row: FitRow) -> list[str]:
    """Common constants that a run depends on; the others have no derivative."""
    job = row.job
    software, recipe = job.software, job.training.fp8_recipe or ""
    scores = software.layers.attention == "unfused" or job.model.family in ("t5", "gemma2")
    used = {
        "gemm_split_overhead_s": software.tp_overlap != "none",
        "half_rate_keys": not job.model.depths,
        "head_dim_64_efficiency": not job.model.depths,
        "misaligned_slice_efficiency": scores,
        "softmax_traffic_factor": scores,
        "tile_overhead_s": job.cluster.device.num_sms is not None,
        "tail_wave_fraction": job.cluster.device.num_sms is not None,
        "rowwise_efficiency": recipe.startswith("rowwise"),
        "jitter": job.cluster.num_devices > 1,
        "host_call_s": is_launched(job.cluster.device, software),
        "overlap_slowdown": job.cluster.num_devices > 1,
        "transpose_bytes_per_s": bool(job.model.depths),
        "host_step_overhead_s": software.trainer,
        "host_batch_overhead_s": software.waits_for_batch,
    }
    return [field for field in ALL if used.get(field, True)]


def _constant(owner: str, field: str, rows: Sequence[int]) -> Constant:
    if not owner:
        rates = catalog.kernel_rates("other", textbook=True)
        return Constant(field, getattr(rates, field), *ALL[field], rows)
    if field in SOFTWARE:
        textbook, bounds = getattr(catalog.software(owner, textbook=True).rates, field), SOFTWARE[field]
    elif field in KERNELS:
        textbook, bounds = catalog.kernel_rates(owner, textbook=True).attention[field].sustained, SUSTAINED
    else:
        textbook, bounds = getattr(catalog.kernel_rates(owner, textbook=True), field), ARCHITECTURE[field]
    if owner.startswith(NEVER_APART):
        bounds = bounds._replace(log_std=TOGETHER * bounds.log_std)
    return Constant(f"{owner}.{field}", textbook, *bounds, rows)


def log_errors(rows: Sequence[FitRow], values: Values) -> Floats:
    """Logarithm of predicted over measured step time, by row."""
    costs = FitCosts(values)
    return np.array([np.log(row.predicted_s(costs) / row.measured_s) for row in rows])


def _values(*, textbook: bool) -> dict[str, float]:
    """All constants of the catalog, or their priors; also those without data, so that fits do not depend on others."""
    common = catalog.kernel_rates("other", textbook=textbook)
    values = {field: getattr(common, field) for field in ALL}
    for architecture in {catalog.device(name).architecture for name in catalog.names("devices")}:
        rates = catalog.kernel_rates(architecture, textbook=textbook)
        values |= {f"{architecture}.{field}": getattr(rates, field) for field in ARCHITECTURE}
        values |= {f"{architecture}.{kernel}": share.sustained for kernel, share in rates.attention.items()}
    for name in catalog.names("software"):
        software = catalog.software(name, textbook=textbook).rates
        values |= {f"{name}.{field}": getattr(software, field) for field in SOFTWARE}
    return values


def fitted_text(values: Values, rows: Sequence[FitRow], spread: SpreadEstimate) -> str:
    """Text of kernels_fitted.yaml."""
    return "\n".join([*_lines(values, rows, spread), ""])


def _lines(values: Values, rows: Sequence[FitRow], spread: SpreadEstimate) -> Iterator[str]:
    yield "# Written by `make fit` (python -m fit.step_times), from kernels.yaml and scenarios/published."
    yield "all:"
    for field in ALL:
        if field in values:
            yield f"  {field}: {number_text(values[field])}"
    yield f"  inter_node_std: {spread.between_nodes:.2f}"
    yield "architectures:"
    for owner, of_owner in _by(rows, lambda row: row.architecture):
        yield f"  {owner}:"
        yield from _fields(owner, ARCHITECTURE, values)
        kernels = [
            f"{name}: {number_text(values[f'{owner}.{name}'])}" for name in KERNELS if f"{owner}.{name}" in values
        ]
        if kernels:
            yield f"    attention: {{{', '.join(kernels)}}}"
        yield f'    fitted_on: "{_ids(of_owner)}"'
    yield "software:"
    for owner, of_owner in _by(rows, lambda row: row.job.software.rates_profile):
        yield f"  {owner}:"
        yield from _fields(owner, SOFTWARE, values)
        yield from _spread(owner, of_owner, spread)
    for owner, of_owner in _by(rows, lambda row: row.job.software.id):
        if of_owner[0].job.software.rates_of is not None:
            yield f"  {owner}:"
            yield from _spread(owner, of_owner, spread)


def _spread(owner: str, rows: Sequence[FitRow], spread: SpreadEstimate) -> Iterator[str]:
    """Lines on the uncertainty of a profile; its runs are those that it has itself or that it shares the rates of."""
    yield f"    relative_std: {spread.computing.get(owner, spread.common):.3f}"
    yield f'    fitted_on: "{_ids(rows)}"'


def _fields(owner: str, fields: Iterable[str], values: Values) -> Iterator[str]:
    for field in fields:
        if f"{owner}.{field}" in values:
            yield f"    {field}: {number_text(values[f'{owner}.{field}'])}"


def _by(rows: Sequence[FitRow], owner_of: Callable[[FitRow], str]) -> list[tuple[str, list[FitRow]]]:
    rows_of_owner: dict[str, list[FitRow]] = defaultdict(list)
    for row in rows:
        rows_of_owner[owner_of(row)].append(row)
    return sorted(rows_of_owner.items())


def _ids(rows: Sequence[FitRow]) -> str:
    """Number of runs per file; all runs with a step time are used."""
    names = ", ".join(f"{source} ({len(of_source)})" for source, of_source in _by(rows, lambda row: row.source))
    return f"{len(rows)} runs of scenarios/published: {names}"


if __name__ == "__main__":
    main()
