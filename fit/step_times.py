"""Fits what kernels reach on the step times of published training runs, and says how far off that leaves predictions.

    python -m fit.step_times scenarios/published [--rounds N] [--write]

Fitted are a few rates of each architecture, a few habits of each framework, and what all have in common
(``fit.rates``); they start from and are drawn to the textbook values of kernels.yaml. A step time is the longest path
through what is done, so near the present constants it is a sum of prices, each so many times
(``simplan.predict.step_summary.step_terms``): the fit prices the terms of that sum again, with the very code that
predicts, and each round looks for the longest paths anew. A source counts as its runs to the power of three quarters.
``--write`` replaces kernels_fitted.yaml.

Four errors are printed: of the fit; five-fold, with folds by model and device, so that near-duplicates stay together;
with a fifth of the runs left out that is drawn one by one, as from a table some of whose rows are missing; and with a
whole source left out. The spread of the second is what predictions of a fitted framework carry, that of the
last what those of any other carry.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from joblib import Parallel, delayed

from fit.fitted_kernels import fitted_text
from fit.left_out import FOLDS, LEFT_OUT_FILE, left_out_text
from fit.moved import parts_of
from fit.rates import ALL, ARCHITECTURE, KERNELS, NEVER_APART, SOFTWARE, SUSTAINED, TOGETHER
from fit.robust import Constant, Floats, minimize
from fit.rows import FitCosts, FitRow, Values, fold_of, load_rows, part_of
from fit.spread import fit_spread, unseen_std, within, within_left_out
from simplan import catalog

__all__ = ["FITTED_FILE", "constants_of", "fit", "left_out", "log_errors", "main"]

FITTED_FILE = Path(catalog.__file__).parent / "catalog" / "kernels_fitted.yaml"

_STD = 0.03  # what step times scatter about a perfect model, roughly
_TRUST = {"good": 1.0, "assumed": 0.3, "noisy": 0.1, "inconsistent": 0.1}
"""What a row counts for: where a source does not print something that sets the work, others had to assume it."""
_DIVIDED = 0.25
"""A run of n in a file counts for n to the power of minus this: runs of one file are alike, though not the same. Less
of it makes errors of runs left out smaller, none costs the small files."""
_ITERATIONS = 8
_ITERATIONS_LEFT_OUT = 3
"""Of fits without a part of the rows. They begin at what all rows say, from where three steps go all the way but for
rounding: with a source left out, the median over the sources is 9.35 % after three steps and 9.37 % after eight."""


def main() -> None:
    """The command."""
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
    unseen = unseen_std(parts, tables["source left out"], [row.source for row in rows], spread)
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
    """Constants by name.

    Args:
        rows: What to fit on.
        start: Values to start from; textbook values of those that are missing.
        iterations: Steps at most.
    """
    constants = constants_of(rows)
    names = [constant.name for constant in constants]
    measured = np.log([row.measured_s for row in rows])

    def residuals(x: Floats, indices: Sequence[int]) -> Floats:
        prices = FitCosts(dict(zip(names, map(float, x), strict=True)))
        return np.array([(np.log(rows[i].predicted_s(prices)) - measured[i]) / _STD for i in indices])

    sizes = Counter(row.source for row in rows)
    weights = np.array([_TRUST[row.run.quality] * sizes[row.source] ** -_DIVIDED for row in rows])
    found = minimize(constants, residuals, weights, start=start, most_iterations=iterations)
    return dict(zip(names, map(float, found), strict=True))


def constants_of(rows: Sequence[FitRow]) -> list[Constant]:
    """What can be fitted on some runs."""
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
    """Of its architecture, what a run depends on."""
    linear = row.question.job.software.state(row.question.job.training, row.question.job.plan).linear
    low = None if linear is None else "fp4_share" if row.question.job.training.precision == "nvfp4" else "low_share"
    fields: list[str] = [field for field in ARCHITECTURE if field not in ("low_share", "fp4_share") or field == low]
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
    prices = FitCosts(values)
    return np.array([np.log(row.predicted_s(prices) / row.measured_s) for row in rows])


def left_out(
    rows: Sequence[FitRow], part_of: Callable[[FitRow], Hashable], start: Values
) -> tuple[Floats, dict[Hashable, dict[str, float]]]:
    """Errors of rows by fits that have not seen the part they belong to, and the constants by part.

    Args:
        rows: All rows.
        part_of: Tells parts.
        start: Where these fits start.
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
    """Of all that there is, whether runs say something about it or not: a fit does not depend on the one before."""
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
    """Mean, median and 90th percentile of absolute percentage errors by source."""
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
