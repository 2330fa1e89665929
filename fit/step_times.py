"""Fit kernel efficiencies to step times of published training runs, and report the prediction errors.

    python -m fit.step_times scenarios/published [--rounds N] [--write]

Fitted are a few rates per architecture, a few framework constants, and common constants (``fit.rates``). They start
from, and are regularized toward, the prior values of kernels.yaml. A step time is the longest path through the work of
a step. Near the present constants it is therefore a sum of costs times counts
(``simplan.predict.step_summary.step_terms``). The fit evaluates the terms of that sum with the code that predicts, and
each round recomputes the longest paths. A source counts as its number of runs to the power of 0.75. ``--write``
replaces kernels_fitted.yaml.

Four errors are printed: in-sample; five-fold by model and device, so that near-duplicates stay together; five-fold by
run, as for a table with missing rows; and leave-one-source-out. Predictions of a fitted framework carry the spread of
the second; predictions of other frameworks carry that of the last.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from joblib import Parallel, delayed

from fit.cross_validation import FOLDS, LEFT_OUT_FILE, left_out_text
from fit.fitted_kernels import fitted_text
from fit.perturbation import parts_of
from fit.rates import ALL, ARCHITECTURE, KERNELS, NEVER_APART, SOFTWARE, SUSTAINED, TOGETHER
from fit.robust import Constant, Floats, minimize
from fit.rows import FitCosts, FitRow, Values, fold_of, load_rows, part_of
from fit.spread import fit_spread, unfitted_std, within, within_left_out
from simplan import catalog

__all__ = ["FITTED_FILE", "constants_of", "fit", "left_out", "log_errors", "main"]

FITTED_FILE = Path(catalog.__file__).parent / "kernels_fitted.yaml"

_STD = 0.03  # approximate scatter of step times about a perfect model
_TRUST = {"good": 1.0, "assumed": 0.3, "noisy": 0.1, "inconsistent": 0.1}
"""Weight of a row by quality: assumed fields are guesses by the collector of the runs."""
_DIVIDED = 0.25
"""Each of n runs in a file weighs n to the power of minus this, since runs of one file are similar, not equal. A
smaller value lowers held-out errors; 0 would ignore the small files."""
_ITERATIONS = 8
_ITERATIONS_LEFT_OUT = 3
"""Iterations of held-out fits. They start from the fit of all rows, so three steps converge up to rounding: the median
leave-one-source-out error over sources is 9.35% after three steps and 9.37% after eight."""


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description="fit kernels on published training runs")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=3, help="how often longest paths are looked for")
    parser.add_argument("--write", action="store_true", help=f"replace {FITTED_FILE.name}")
    arguments = parser.parse_args()
    values = _textbook_values()
    for number in range(arguments.rounds):
        rows = load_rows(arguments.runs, values)
        if not number:
            textbook = log_errors(rows, values)
        values = fit(rows, values)
    print("\n".join(_constants_text(values, rows)))
    tables = {
        "textbook": textbook,
        "fitted": log_errors(rows, values),
    }
    tables["five-fold"], folds = left_out(rows, lambda row: fold_of(row.question.job, FOLDS), values)
    tables["single runs"], _ = left_out(rows, lambda row: part_of(row.run, FOLDS), values)
    tables["source left out"], _ = left_out(rows, lambda row: row.source, values)
    parts, five = parts_of(rows, values), tables["five-fold"]
    spread = fit_spread(parts, five)
    unseen = unfitted_std(parts, tables["source left out"], [row.source for row in rows], spread)
    print("\n".join(_errors_text(rows, tables)))
    inside, scores = within_left_out(parts, five, [fold_of(row.question.job, FOLDS) for row in rows])
    outside = within(parts, tables["source left out"], replace(spread, computing={}, common=unseen))
    print(
        f"inside 90 % intervals: five-fold {100 * within(parts, five, spread).mean():.0f} %, with widths from other "
        f"folds {100 * inside.mean():.0f} % (interval score {scores.mean():.3f}), source left out "
        f"{100 * outside.mean():.0f} %"
    )
    text = fitted_text(values, rows, spread, unseen)
    if arguments.write:
        FITTED_FILE.write_text(text, encoding="utf-8")
        in_order = [folds[fold] for fold in range(FOLDS)]
        LEFT_OUT_FILE.write_text(left_out_text(rows, in_order), encoding="utf-8")
        print(f"wrote {FITTED_FILE.name} and {LEFT_OUT_FILE.name}")


def fit(rows: Sequence[FitRow], start: Values, iterations: int = _ITERATIONS) -> dict[str, float]:
    """Fit the constants; return their values by name.

    Args:
        rows: Runs to fit.
        start: Start values by name; missing ones start at the prior.
        iterations: Maximum number of steps.
    """
    constants = constants_of(rows)
    names = [constant.name for constant in constants]
    measured = np.log([row.measured_s for row in rows])

    def residuals(x: Floats, indices: Sequence[int]) -> Floats:
        costs = FitCosts(dict(zip(names, map(float, x), strict=True)))
        return np.array([(np.log(rows[i].predicted_s(costs)) - measured[i]) / _STD for i in indices])

    sizes = Counter(row.source for row in rows)
    weights = np.array([_TRUST[row.run.quality] * sizes[row.source] ** -_DIVIDED for row in rows])
    found = minimize(constants, residuals, weights, start=start, most_iterations=iterations)
    return dict(zip(names, map(float, found), strict=True))


def constants_of(rows: Sequence[FitRow]) -> list[Constant]:
    """Constants that the runs depend on."""
    by_name: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        for field in _architecture_fields(row):
            by_name[row.architecture, field].append(index)
        for field in SOFTWARE:
            unused = "traffic" if row.question.job.software.compiled else "compiled_traffic"
            if field != unused:
                by_name[row.question.job.software.id, field].append(index)
        for field in ALL:
            by_name["", field].append(index)
    return [_constant(owner, field, indices) for (owner, field), indices in sorted(by_name.items())]


def _architecture_fields(row: FitRow) -> list[str]:
    """Constants of the architecture that a run depends on."""
    linear = row.question.job.software.state(row.question.job.training, row.question.job.plan).linear
    low = (
        None
        if linear is None
        else "fp4_efficiency"
        if row.question.job.training.precision == "nvfp4"
        else "fp8_efficiency"
    )
    fields: list[str] = [
        field for field in ARCHITECTURE if field not in ("fp8_efficiency", "fp4_efficiency") or field == low
    ]
    return fields if row.attention_kernel is None else [*fields, row.attention_kernel]


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


def left_out(
    rows: Sequence[FitRow], part_of: Callable[[FitRow], Hashable], start: Values
) -> tuple[Floats, dict[Hashable, dict[str, float]]]:
    """Held-out log errors, and constants by part; each part is predicted by a fit without it.

    Args:
        rows: All runs.
        part_of: Part of a run.
        start: Start values of the fits.
    """
    parts = [part_of(row) for row in rows]
    names = list(dict.fromkeys(parts))
    found = Parallel(n_jobs=-1)(delayed(_without)(rows, [p == part for p in parts], dict(start)) for part in names)
    errors = np.zeros(len(rows))
    for part, (own, _) in zip(names, found, strict=True):
        errors[[p == part for p in parts]] = own
    return errors, {part: values for part, (_, values) in zip(names, found, strict=True)}


def _without(rows: Sequence[FitRow], held: Sequence[bool], start: Values) -> tuple[Floats, dict[str, float]]:
    seen = [row for row, out in zip(rows, held, strict=True) if not out]
    values = _textbook(rows) | fit(seen, start, _ITERATIONS_LEFT_OUT)
    return log_errors([row for row, out in zip(rows, held, strict=True) if out], values), values


def _textbook_values() -> dict[str, float]:
    """Prior values of all constants, including those without data, so that fits do not depend on earlier fits."""
    values = {field: getattr(catalog.kernel_rates("other", textbook=True), field) for field in ALL}
    for architecture in {catalog.device(name).architecture for name in catalog.names("devices")}:
        rates = catalog.kernel_rates(architecture, textbook=True)
        values |= {f"{architecture}.{field}": getattr(rates, field) for field in ARCHITECTURE}
        values |= {f"{architecture}.{kernel}": share.sustained for kernel, share in rates.attention.items()}
    for name in catalog.names("software"):
        software = catalog.software(name, textbook=True).rates
        values |= {f"{name}.{field}": getattr(software, field) for field in SOFTWARE}
    return values


def _textbook(rows: Sequence[FitRow]) -> dict[str, float]:
    return {constant.name: constant.textbook for constant in constants_of(rows)}


def _constants_text(values: Values, rows: Sequence[FitRow]) -> list[str]:
    lines = [f"{'constant':36}{'fitted':>10}{'textbook':>10}{'bounds':>18}{'runs':>6}"]
    for constant in constants_of(rows):
        value = values[constant.name]
        note = "  at bound" if constant.at_bound(value) else ""
        bounds = f"{constant.low:g} to {constant.high:g}"
        numbers = f"{value:10.4g}{constant.textbook:10.4g}{bounds:>18}{len(constant.rows):6}"
        lines.append(f"{constant.name:36}{numbers}{note}")
    return lines


def _errors_text(rows: Sequence[FitRow], tables: dict[str, Floats]) -> list[str]:
    """Table of mean, median and 90th percentile of absolute percentage errors by source."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.source].append(index)
    groups["all"] = list(range(len(rows)))
    head = f"{'mean / median / 90th percentile, %':36}{'runs':>5}" + "".join(f"{name:>24}" for name in tables)
    lines = ["", head]
    for name, indices in groups.items():
        cells = []
        for errors in tables.values():
            sizes = 100 * np.abs(np.expm1(errors[indices]))
            cells.append(f"{sizes.mean():10.1f} /{np.median(sizes):5.1f} /{np.quantile(sizes, 0.9):5.1f}")
        lines.append(f"{name:36}{len(indices):5}" + "".join(cells))
    means = [100 * np.abs(np.expm1(tables["source left out"][i])).mean() for n, i in groups.items() if n != "all"]
    lines.append(f"a whole source left out, median over the sources: {np.median(means):.1f} %")
    return lines


if __name__ == "__main__":
    main()
