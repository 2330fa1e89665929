"""Value of each modeled behaviour: errors over published runs with it, and with it switched off.

    python docs/notebooks/2026-11-24-ablations/ablate.py scenarios/published/*.yaml --json ablations.json

A behaviour is a field of a job: of its software profile, of how that computes layers, of state widths, of the rates of
its devices, of its plan or its model. A field is set to one value in all published runs whose job it changes, these are
predicted again, and errors are compared by file. Nothing is fitted again: constants were fitted with the behaviour on,
so that what it buys is at most what the table says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from pydantic.fields import FieldInfo

from simplan import catalog
from simplan.accuracy.run import PublishedRun
from simplan.errors import SimplanError
from simplan.job import Job
from simplan.model.implementations.layer_implementation import LayerImplementation, Loss
from simplan.model.model import ModelSpec
from simplan.predict.step_summary import summarize_step
from simplan.scenario.published.reading import read_published
from simplan.software.rates import FrameworkRates
from simplan.software.software import LowPrecisionLinears, SoftwareSpec, StateBytes
from simplan.units import GIB

Change = Callable[[Job], Job]

_STATES = ("state_bytes", "sharded_state_bytes", "lora_state_bytes", "sharded_lora_state_bytes")
_NOT_SWITCHES = {"id", *_STATES, "low_precision", "layers", "rates", "options", "sources", "not_modelled", "framework"}
_NOT_SWITCHES |= {"context_bytes", "zero_stages", "grad_dtypes", "packed_attention", "executable", "ddp_splits"}
_NOT_SWITCHES |= {"sequence_parallelism", "ddp_stages", "bucket_bytes", "first_bucket_bytes"}
"""Facts, and what plans are let through."""
_NEUTRAL_KERNELS: dict[str, Any] = {
    "low_attention": {},
    "half_rate_keys": 0.0,
    "head_dim_64_efficiency": 1.0,
    "softmax_traffic_factor": 1.0,
    "fp8_any_layout": False,
    "rowwise_efficiency": 1.0,
    "unaligned_efficiency": 1.0,
    "misaligned_slice_efficiency": 1.0,
    "small_tile_efficiency": (1.0, 1.0),
    "stream_overlap": 0.0,
    "overlap_slowdown": 0.0,
    "split_s": 0.0,
    "batch_s": 0.0,
}
"""Terms of devices that not all runs have, at what makes them nothing."""


@dataclass(frozen=True, slots=True)
class Ablation:
    """One field at one value in all runs.

    Attributes:
        field: Its name.
        value: What it is set to.
        change: Sets it in a job.
    """

    field: str
    value: str
    change: Change


@dataclass(frozen=True, slots=True)
class Figures:
    """What is predicted of a run: seconds of a step, peaks in GiB by kind, and whether it fits."""

    step_s: float
    fits: bool | None
    memory_gib: dict[str, float]


def ablations() -> Iterator[Ablation]:
    """Every field, at each value that some profile or default has."""
    profiles = [catalog.software(name) for name in catalog.names("software")]
    for name, field in SoftwareSpec.model_fields.items():
        if name not in _NOT_SWITCHES:
            for value in _values(field, [getattr(profile, name) for profile in profiles]):
                yield Ablation(name, _said(value), _software(**{name: value}))
    yield Ablation("tp_overlap", "backward where it is all or gathers", _without_cut_products)
    yield Ablation("packed_attention", "document_calls where it is one_call", _in_calls)
    for way in ("all_to_all", "hybridep"):
        yield Ablation("expert_dispatch", f"{way} where it is none of copies", _dispatch(way))
    for name, field in LayerImplementation.model_fields.items():
        if not field.exclude and name not in ("compiled", "documents_in_one_call", "loss"):
            for value in _values(field, [getattr(profile.layers, name) for profile in profiles]):
                yield Ablation(f"layers.{name}", _said(value), _layers(name, value))
    for word in get_args(Loss)[1:]:
        yield Ablation("layers.loss", f"{get_args(Loss)[0]} where it is {word}", _loss(word))
    for name, off in (("weights", "microbatch"), ("gathers", ()), ("experts", False), ("frozen", False)):
        yield Ablation(f"low_precision.{name}", _said(off), _linears(name, off))
    for name in ("placeholder", "flattened", "weight_copy"):
        yield Ablation(f"state_bytes.{name}", "0", _states(name, lambda _: 0))
    for name in ("frozen", "gathered"):
        yield Ablation(f"state_bytes.{name}", "parameter", _states(name, lambda state: state.parameter))
    yield Ablation("state_bytes.reduced", "gradient", _states("reduced", lambda state: state.gradient))
    for name in ("residual", "boundary", "matmul_gradient"):
        yield Ablation(f"state_bytes.{name}", "activation", _states(name, lambda state: state.activation))
    for name, field in FrameworkRates.model_fields.items():
        if name not in ("relative_std", "fitted_on"):
            yield Ablation(f"rates.{name}", _said(field.default), _rates(name, field.default))
    for name, value in _NEUTRAL_KERNELS.items():
        yield Ablation(f"kernels.{name}", _said(value), _kernels(name, value))
    for name, value in (
        ("recompute_modules", None),
        ("recompute_layers", None),
        ("stage_layers", None),
        ("grad_dtype", None),
        ("offload_activations", False),
    ):
        yield Ablation(f"plan.{name}", _said(value), _plan(name, value))
    yield Ablation("model.mtp_num_layers", "0", _without_mtp)


def _values(field: FieldInfo, of_profiles: list[Any]) -> list[Any]:
    """What most profiles have of a switch or word, and then its default, which is that of torch mostly."""
    words = [value for value in of_profiles if isinstance(value, bool | str)]
    values = [max(words, key=words.count)] if words else []
    values.append(field.get_default(call_default_factory=True))
    return [value for index, value in enumerate(values) if value not in values[:index]]


def _said(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none of all"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _software(**update: Any) -> Change:
    return lambda job: replace(job, software=job.software.model_copy(update=update))


def _without_cut_products(job: Job) -> Job:
    return _software(tp_overlap="backward")(job) if job.software.tp_overlap in ("all", "gathers") else job


def _in_calls(job: Job) -> Job:
    return _software(packed_attention="document_calls")(job) if job.software.packed_attention == "one_call" else job


def _dispatch(way: str) -> Change:
    return lambda job: job if job.software.expert_dispatch == "copies" else _software(expert_dispatch=way)(job)


def _layers(name: str, value: Any) -> Change:
    return lambda job: _software(layers=job.software.layers.model_copy(update={name: value}))(job)


def _loss(word: str) -> Change:
    return lambda job: _layers("loss", get_args(Loss)[0])(job) if job.software.layers.loss == word else job


def _linears(name: str, value: Any) -> Change:
    def changed(job: Job) -> Job:
        low = {key: linears.model_copy(update={name: value}) for key, linears in job.software.low_precision.items()}
        return _software(low_precision=low)(job)

    return changed


def _rates(name: str, value: Any) -> Change:
    return lambda job: _software(rates=job.software.rates.model_copy(update={name: value}))(job)


def _states(name: str, value: Callable[[StateBytes], int]) -> Change:
    def changed(job: Job) -> Job:
        update = {
            kind: {
                precision: state.model_copy(update={name: value(state)})
                for precision, state in getattr(job.software, kind).items()
            }
            for kind in _STATES
        }
        return _software(**update)(job)

    return changed


def _kernels(name: str, value: Any) -> Change:
    def changed(job: Job) -> Job:
        device = job.cluster.device
        device = device.model_copy(update={"kernels": device.kernels.model_copy(update={name: value})})
        return replace(job, cluster=job.cluster.model_copy(update={"device": device}))

    return changed


def _plan(name: str, value: Any) -> Change:
    return lambda job: replace(job, plan=job.plan.model_copy(update={name: value}))


def _without_mtp(job: Job) -> Job:
    if not getattr(job.model, "mtp_num_layers", 0):
        return job
    given = job.model.model_dump(exclude={"layers"}) | {"mtp_num_layers": 0}
    return replace(job, model=ModelSpec.model_validate(given))


def _figures(run: PublishedRun, job: Job) -> Figures | None:
    """The prediction; None where it is refused."""
    try:
        summary = summarize_step(job, steps_overlap=run.steps_overlap)
    except SimplanError:
        return None
    memory_gib = {kind: num_bytes / GIB for kind, num_bytes in summary.peak_bytes.items()}
    return Figures(summary.step_time_s, summary.fits, memory_gib)


def _errors(run: PublishedRun, figures: Figures) -> dict[str, float]:
    """Relative errors of step time and peak memory, absolute, where these were measured."""
    found = {}
    if run.measured.step_time_s is not None:
        found["time"] = abs(figures.step_s / run.measured.step_time_s - 1)
    measured = next(iter(run.measured.memory_gib.items()), None)
    if measured is not None:
        found["memory"] = abs(figures.memory_gib[measured[0]] / measured[1] - 1)
    return found


def _changes(before: Figures, now: Figures) -> bool:
    pairs = [(before.step_s, now.step_s), *((before.memory_gib[k], now.memory_gib[k]) for k in before.memory_gib)]
    return any(abs(a - b) > 1e-9 * abs(a) for a, b in pairs)


def _rows(asked: list[tuple[str, PublishedRun, Figures]], ablation: Ablation) -> Iterator[dict[str, Any]]:
    """One row for each file that has runs whose prediction changes."""
    source: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    touched: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    num: dict[str, int] = defaultdict(int)
    refused: dict[str, int] = defaultdict(int)
    wrong: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for file, run, before in asked:
        job = ablation.change(run.known_job)
        now: Figures | None = before if job == run.job else _figures(run, job)
        if now is None:
            refused[file] += 1
            continue
        changes = _changes(before, now)
        num[file] += changes
        for index, figures in enumerate((before, now)):
            wrong[file][index] += figures.fits is run.measured.oom
        errors = _errors(run, now)
        for what, error in _errors(run, before).items():
            source[file, what].append((error, errors[what]))
            if changes:
                touched[file, what].append((error, errors[what]))
    for file in dict.fromkeys(name for name, *_ in asked):
        if num[file] or refused[file]:
            row: dict[str, Any] = {"field": ablation.field, "value": ablation.value, "file": file, "runs": num[file]}
            row["refused"] = refused[file]
            row["wrong_verdicts"] = wrong[file]
            for what in ("time", "memory"):
                for where, pairs in (("touched", touched[file, what]), ("source", source[file, what])):
                    if pairs and touched[file, what]:
                        row[f"{what}_{where}"] = [len(pairs), *(100 * fmean(side) for side in zip(*pairs, strict=True))]
            yield row


def _differing(field: str) -> int | None:
    """Profiles of the catalog that have the field at another value than its default; None of what is in none."""
    profiles = [catalog.software(name) for name in catalog.names("software")]
    group, _, name = field.rpartition(".")
    if group in ("kernels", "plan", "model"):
        return None
    if group == "low_precision":
        off = LowPrecisionLinears.model_fields[name].default
        return sum(any(getattr(low, name) != off for low in profile.low_precision.values()) for profile in profiles)
    if group == "state_bytes":
        states = ([s for kind in _STATES for s in getattr(profile, kind).values()] for profile in profiles)
        return sum(any(getattr(state, name) != getattr(_plain(state), name) for state in each) for each in states)
    owner = {"": SoftwareSpec, "layers": LayerImplementation, "rates": FrameworkRates}[group]
    info = owner.model_fields[name]
    if info.is_required():
        return len(profiles)
    default = info.get_default(call_default_factory=True)
    return sum(getattr(getattr(p, group) if group else p, name) != default for p in profiles)


def _plain(state: StateBytes) -> StateBytes:
    """The widths that a few of them imply."""
    given = ("parameter", "gradient", "activation", "boundary")
    return StateBytes.model_validate({name: getattr(state, name) for name in given})


def _table(rows: list[dict[str, Any]]) -> str:
    """Markdown, errors in percent: with, and without."""
    lines = [
        "| field | set to | profiles | source | runs | step time of these | of the source | peak memory of these "
        "| wrong verdicts |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [_cell(row.get(key)) for key in ("time_touched", "time_source", "memory_touched")]
        differing = _differing(row["field"])
        wrong, wrong_now = row["wrong_verdicts"]
        cells.append("" if wrong == wrong_now else f"{wrong} → {wrong_now}")
        refused = f" (and {row['refused']} refused)" if row["refused"] else ""
        of = "" if differing is None else str(differing)
        lines.append(
            f"| {row['field']} | {row['value']} | {of} | {Path(row['file']).stem} | {row['runs']}{refused} | "
            f"{' | '.join(cells)} |"
        )
    return "\n".join(lines)


def _cell(figures: list[float] | None) -> str:
    if figures is None:
        return ""
    return f"{figures[1]:.2f} → {figures[2]:.2f} ({figures[2] - figures[1]:+.2f})"


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="errors over published runs with and without each behaviour")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--field", action="append", help="of these fields only")
    parser.add_argument("--json", type=Path, help="rows as a file")
    given = parser.parse_args()
    asked = []
    for read in read_published(given.files):
        for run in read.runs or ():
            figures = None if run.job is None else _figures(run, run.job)
            if figures is not None:
                asked.append((read.file, run, figures))
    rows = []
    for ablation in ablations():
        if not given.field or ablation.field in given.field:
            found = list(_rows(asked, ablation))
            rows += found
            _say(f"{ablation.field} = {ablation.value}: {sum(row['runs'] for row in found)} runs")
            if given.json is not None:
                given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    sys.stdout.write(_table(rows) + "\n")


if __name__ == "__main__":
    main()
