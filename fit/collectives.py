"""Fit link constants to published measurements of collectives, and report the prediction errors.

    python -m fit.collectives scenarios/published/collectives*.yaml [--write]

Fitted per kind of link: latency of a step, bandwidth efficiency of large transfers, and bandwidth efficiency of the
switch for in-network reductions; and one launch time for all links. The constants start from, and are regularized
toward, the values of NCCL's own tuning model in links.yaml. Predictions use ``simplan.cost.communication.nccl``, the
code that users get. Errors of the sizes of one curve are correlated, so a curve counts as few rows. Small transfers
scatter more than large ones, so they weigh less. ``--write`` replaces links_fitted.yaml.

Three errors are printed: in-sample; five-fold, by curve; and leave-one-source-out. Predictions carry the spread of the
last. Links without measurements carry the spread of leaving out a kind of link.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fit.records import Record, kind_of, load_records
from fit.robust import Constant, Floats, minimize
from simplan import catalog
from simplan.cluster.hardware import ClusterSpec, LinkSpec
from simplan.cost.communication.nccl import nccl_ways
from simplan.cost.communication.route import route_of

__all__ = ["FITTED_FILE", "fit", "fitted_text", "log_errors", "main"]

FITTED_FILE = Path(catalog.__file__).parent / "links_fitted.yaml"

_LAUNCH = "launch_s"
_LAUNCH_S = 10e-6  # prior: about 5 us to start a kernel, and another 5 us until the last rank has started
_BOUNDS: Mapping[str, tuple[float, float, float]] = {  # standard deviation of the logarithm, low, high
    "latency_s": (0.3, 1e-6, 10e-6),
    "network.latency_s": (0.7, 3e-6, 300e-6),
    "efa.latency_s": (0.7, 3e-6, 300e-6),
    "bandwidth_share": (0.15, 0.5, 1.0),
    "switch_share": (0.15, 0.4, 1.0),
    _LAUNCH: (0.5, 2e-6, 60e-6),
}
_STD = {"small": 0.25, "medium": 0.25, "large": 0.07}  # approximate scatter of a curve about a perfect formula
_ROWS_OF_CURVE = 2.0  # rows that a curve counts as, per size class
_FOLDS = 5
_NETWORKS = ("network", "efa")
_DIGITS = 4

Values = Mapping[str, float]


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description="fit links on published measurements of collectives")
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help=f"replace {FITTED_FILE.name}")
    arguments = parser.parse_args()
    records = [record for path in arguments.records for record in load_records(path)]
    values = fit(records)
    print("\n".join(_constants_text(values, records)))
    tables = {
        "textbook": log_errors(records, _textbook(records)),
        "fitted": log_errors(records, values),
        "five-fold": _left_out(records, _fold_of(records)),
        "source left out": _left_out(records, lambda record: record.source),
        "kind of link left out": _left_out(records, lambda record: record.kinds[-1]),
    }
    print("\n".join(_errors_text(records, tables)))
    text = fitted_text(values, records, tables["source left out"], tables["kind of link left out"])
    if arguments.write:
        FITTED_FILE.write_text(text, encoding="utf-8")
        print(f"wrote {FITTED_FILE}")


def fit(records: Sequence[Record]) -> dict[str, float]:
    """Fit the constants, by name, e.g. ``nvlink3.latency_s``, ``launch_s``; links without records keep their priors."""
    constants = _constants(records)
    curves = Counter((record.curve, record.size_class) for record in records)
    weights = np.array([min(1.0, _ROWS_OF_CURVE / curves[record.curve, record.size_class]) for record in records])
    std = np.array([_STD[record.size_class] for record in records])
    measured = np.log([record.seconds for record in records])

    def residuals(values: Floats, rows: Sequence[int]) -> Floats:
        named = {constant.name: value for constant, value in zip(constants, values.tolist(), strict=True)}
        chosen = list(rows)
        errors: Floats = (_log_seconds([records[row] for row in chosen], named) - measured[chosen]) / std[chosen]
        return errors

    found = minimize(constants, residuals, weights)
    return {constant.name: value for constant, value in zip(constants, found.tolist(), strict=True)}


def log_errors(records: Sequence[Record], values: Values) -> Floats:
    """Logarithm of predicted over measured time, by record."""
    return _log_seconds(records, values) - np.log([record.seconds for record in records])


def _log_seconds(records: Sequence[Record], values: Values) -> Floats:
    clusters: dict[ClusterSpec | int, ClusterSpec] = {}
    logs = []
    for record in records:
        key = id(record.cluster)
        if key not in clusters:
            clusters[key] = _with_values(record.cluster, values)
        ways = nccl_ways(record.communication, route_of(record.communication.ranks, clusters[key]))
        times_s = [way.seconds(record.communication.num_bytes) for way in ways if way.name.startswith(record.algorithm)]
        logs.append(np.log(min(times_s)))
    return np.array(logs)


def _with_values(cluster: ClusterSpec, values: Values) -> ClusterSpec:
    def changed(link: LinkSpec) -> LinkSpec:
        kind = kind_of(link)
        own = {key.removeprefix(f"{kind}."): value for key, value in values.items() if key.startswith(f"{kind}.")}
        return link.model_copy(update={**own, _LAUNCH: values[_LAUNCH]})

    inside, between = cluster.intra_link, cluster.inter_link
    return cluster.model_copy(
        update={
            "intra_link": inside and changed(inside),
            "inter_link": between and changed(between),
        }
    )


def _constants(records: Sequence[Record]) -> list[Constant]:
    """Constants that the records depend on."""
    constants = [_constant(_LAUNCH, _LAUNCH_S, range(len(records)))]
    for kind in sorted({kind for record in records for kind in record.kinds}):
        rows = [index for index, record in enumerate(records) if kind in record.kinds]
        for field in ("latency_s", "bandwidth_share", "switch_share"):
            textbook = getattr(_textbook_link(kind), field)
            if textbook is not None:
                constants.append(_constant(f"{kind}.{field}", textbook, rows))
    return constants


def _constant(name: str, textbook: float, rows: Sequence[int]) -> Constant:
    log_std, low, high = _BOUNDS.get(name) or _BOUNDS[name.partition(".")[2]]
    return Constant(name, textbook, log_std, low, high, rows)


def _textbook_link(kind: str) -> LinkSpec:
    name = f"{kind}-400gbit" if kind in _NETWORKS else kind
    return catalog.link(name, textbook=True)


def _textbook(records: Sequence[Record]) -> dict[str, float]:
    return {constant.name: constant.textbook for constant in _constants(records)}


def _left_out(records: Sequence[Record], part_of: Callable[[Record], object]) -> Floats:
    """Held-out log errors: each part is predicted by a fit without it."""
    errors = np.zeros(len(records))
    parts = [part_of(record) for record in records]
    for part in dict.fromkeys(parts):
        held = [index for index, own in enumerate(parts) if own == part]
        seen = [record for record, own in zip(records, parts, strict=True) if own != part]
        values = {**_textbook(records), **fit(seen)}
        errors[held] = log_errors([records[index] for index in held], values)
    return errors


def _fold_of(records: Sequence[Record]) -> Callable[[Record], int]:
    """Assign curves to folds in turn."""
    curves = {curve: index % _FOLDS for index, curve in enumerate(sorted({record.curve for record in records}))}
    return lambda record: curves[record.curve]


def _constants_text(values: Values, records: Sequence[Record]) -> Iterable[str]:
    yield f"{'constant':28}{'fitted':>12}{'textbook':>12}{'bounds':>24}"
    for constant in _constants(records):
        value = values[constant.name]
        note = "  at bound" if constant.at_bound(value) else ""
        bounds = f"{constant.low:g} to {constant.high:g}"
        yield f"{constant.name:28}{value:12.4g}{constant.textbook:12.4g}{bounds:>24}{note}"


def _errors_text(records: Sequence[Record], tables: Mapping[str, Floats]) -> Iterable[str]:
    """Table of mean and median absolute percentage errors by link and size class."""
    groups: dict[str, list[int]] = {}
    for index, record in enumerate(records):
        tier = "between nodes" if record.crosses else "inside a node"
        size = {"small": "1 below 1 MiB", "medium": "2 below 64 MiB", "large": "3 64 MiB and more"}[record.size_class]
        for name in (f"{record.kinds[-1]}, {tier}: {size}", f"~ {tier}: {size}", "~~ all"):
            groups.setdefault(name, []).append(index)
    yield ""
    yield f"{'mean / median absolute error, %':48}{'rows':>5}" + "".join(f"{name:>24}" for name in tables)
    for name, rows in sorted(groups.items()):
        cells = [100 * np.abs(np.expm1(errors[rows])) for errors in tables.values()]
        yield f"{name.lstrip('~ '):48}{len(rows):5}" + "".join(f"{c.mean():16.1f} /{np.median(c):6.1f}" for c in cells)


def fitted_text(values: Values, records: Sequence[Record], by_source: Floats, by_kind: Floats) -> str:
    """Text of links_fitted.yaml.

    Args:
        values: Fitted constants by name.
        records: Records of the fit.
        by_source: Log errors of leave-one-source-out.
        by_kind: Log errors of leave-one-kind-of-link-out.
    """
    lines = [
        "# Written by `make fit` (python -m fit.collectives), from links.yaml and scenarios/published.",
        f"launch_s: {_number(values[_LAUNCH])}",
        "# Standard deviation of the logarithm of predicted over measured time: of kinds of links that nobody measured",
        "# (a kind left out of the fit), and below of those that somebody did (a source left out).",
        f"relative_std: {_spread(records, by_kind, lambda record: True)}",
        "links:",
    ]
    for kind in sorted({kind for record in records for kind in record.kinds}):
        lines.append(f"  {kind}:")
        for name, value in values.items():
            if name.startswith(f"{kind}."):
                lines.append(f"    {name.partition('.')[2]}: {_number(value)}")
        tier = _between if kind in _NETWORKS else _inside
        lines.append(f"    relative_std: {_spread(records, by_source, tier)}")
        lines.append(f'    fitted_on: "{_ids([record.id for record in records if kind in record.kinds])}"')
    return "\n".join(lines) + "\n"


def _between(record: Record) -> bool:
    return record.crosses


def _inside(record: Record) -> bool:
    return not record.crosses


def _number(value: float) -> str:
    """Format a number as YAML requires, with a decimal point."""
    text = f"{value:.{_DIGITS}g}"
    return text if "e" not in text or "." in text else text.replace("e", ".0e")


def _spread(records: Sequence[Record], errors: Floats, wanted: Callable[[Record], bool]) -> str:
    """Root mean square error by size class, as YAML."""
    cells = []
    for size in _STD:
        rows = [index for index, record in enumerate(records) if wanted(record) and record.size_class == size]
        cells.append(f"{size}: {float(np.sqrt(np.mean(errors[rows] ** 2))):.2f}")
    return f"{{{', '.join(cells)}}}"


def _ids(ids: Sequence[str]) -> str:
    """Text of ids, with consecutive numbers as ranges."""
    runs: list[tuple[str, int, int]] = []
    for prefix, number in sorted((name.rpartition("-")[0], int(name.rpartition("-")[2])) for name in ids):
        if runs and runs[-1][0] == prefix and number == runs[-1][2] + 1:
            runs[-1] = (prefix, runs[-1][1], number)
        else:
            runs.append((prefix, number, number))
    parts = [f"{prefix}-{first:03}" + (f" to {last:03}" if last > first else "") for prefix, first, last in runs]
    return f"{len(ids)} records of scenarios/published/collectives*.yaml: {', '.join(parts)}"


if __name__ == "__main__":
    main()
