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
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fit.cross_validation import FOLDS, errors_text, left_out
from fit.records import Record, kind_of, load_records
from fit.robust import Constant, Floats, Values, constants_text, minimize, number_text
from simplan import catalog
from simplan.cluster.hardware import ClusterSpec, LinkSpec
from simplan.cost.communication.nccl import nccl_ways
from simplan.cost.communication.route import route_of

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
_NETWORKS = ("network", "efa")


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description="fit links on published measurements of collectives")
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help=f"replace {FITTED_FILE.name}")
    arguments = parser.parse_args()
    records = [record for path in arguments.records for record in load_records(path)]
    values = fit(records)
    print("\n".join(constants_text(_constants(records), values)))
    textbook = {constant.name: constant.textbook for constant in _constants(records)}
    folds = {curve: index % FOLDS for index, curve in enumerate(sorted({record.curve for record in records}))}
    parts: dict[str, Callable[[Record], object]] = {
        "five-fold": lambda record: folds[record.curve],
        "source left out": lambda record: record.source,
        "kind of link left out": lambda record: record.kinds[-1],
    }
    tables = {"textbook": log_errors(records, textbook), "fitted": log_errors(records, values)}
    for name, part_of in parts.items():
        tables[name], _ = left_out(records, part_of, lambda seen: textbook | fit(seen), log_errors)
    print("\n".join(errors_text(_groups(records), tables)))
    text = fitted_text(values, records, tables["source left out"], tables["kind of link left out"])
    if arguments.write:
        FITTED_FILE.write_text(text, encoding="utf-8")
        print(f"wrote {FITTED_FILE}")


def fit(records: Sequence[Record]) -> dict[str, float]:
    """Fit the constants; links without records keep their priors."""
    constants = _constants(records)
    names = [constant.name for constant in constants]
    curves = Counter((record.curve, record.size_class) for record in records)
    weights = np.array([min(1.0, _ROWS_OF_CURVE / curves[record.curve, record.size_class]) for record in records])
    std = np.array([_STD[record.size_class] for record in records])
    measured = np.log([record.seconds for record in records])

    def residuals(values: Floats, rows: Sequence[int]) -> Floats:
        named = dict(zip(names, values.tolist(), strict=True))
        chosen = list(rows)
        errors: Floats = (_log_seconds([records[row] for row in chosen], named) - measured[chosen]) / std[chosen]
        return errors

    return minimize(constants, residuals, weights)


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
        of_kind = {key.removeprefix(f"{kind}."): value for key, value in values.items() if key.startswith(f"{kind}.")}
        return link.model_copy(update={**of_kind, _LAUNCH: values[_LAUNCH]})

    inside, between = cluster.intra_link, cluster.inter_link
    update = {"intra_link": inside and changed(inside), "inter_link": between and changed(between)}
    return cluster.model_copy(update=update)


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


def _groups(records: Sequence[Record]) -> dict[str, list[int]]:
    """Indices of records by link, tier and size class, by tier and size class, and of all."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, record in enumerate(records):
        tier = "between nodes" if record.crosses else "inside a node"
        size = {"small": "1 below 1 MiB", "medium": "2 below 64 MiB", "large": "3 64 MiB and more"}[record.size_class]
        for name in (f"{record.kinds[-1]}, {tier}: {size}", f"~ {tier}: {size}", "~~ all"):
            groups[name].append(index)
    return {name.lstrip("~ "): rows for name, rows in sorted(groups.items())}


def fitted_text(values: Values, records: Sequence[Record], by_source: Floats, by_kind: Floats) -> str:
    """Text of links_fitted.yaml, with log errors of leave-one-source-out and of leave-one-kind-of-link-out."""
    lines = [
        "# Written by `make fit` (python -m fit.collectives), from links.yaml and scenarios/published.",
        f"launch_s: {number_text(values[_LAUNCH])}",
        "# Standard deviation of the logarithm of predicted over measured time: of kinds of links that nobody measured",
        "# (a kind left out of the fit), and below of those that somebody did (a source left out).",
        f"relative_std: {_spread(records, by_kind, range(len(records)))}",
        "links:",
    ]
    for kind in sorted({kind for record in records for kind in record.kinds}):
        lines.append(f"  {kind}:")
        for name, value in values.items():
            if name.startswith(f"{kind}."):
                lines.append(f"    {name.partition('.')[2]}: {number_text(value)}")
        tier = [index for index, record in enumerate(records) if record.crosses == (kind in _NETWORKS)]
        lines.append(f"    relative_std: {_spread(records, by_source, tier)}")
        lines.append(f'    fitted_on: "{_ids([record.id for record in records if kind in record.kinds])}"')
    return "\n".join(lines) + "\n"


def _spread(records: Sequence[Record], errors: Floats, chosen: Sequence[int]) -> str:
    """Root mean square error of the chosen records by size class, as YAML."""
    cells = []
    for size in _STD:
        rows = [index for index in chosen if records[index].size_class == size]
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
