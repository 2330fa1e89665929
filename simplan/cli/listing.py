"""The catalog as tables, and single entries with the source of every value."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getdoc
from pathlib import Path
from typing import Any, cast

from simplan import catalog
from simplan.catalog.spelling import find
from simplan.cli.calibrations import read
from simplan.cli.terminal.definitions import MINIMAL_SCENARIO, definitions, expectation_fields, scenario_sections
from simplan.cli.terminal.output import print_json, print_result
from simplan.cluster.machine import THIS_MACHINE
from simplan.cost.calibration.format import Calibration
from simplan.cost.calibration.measured_links import catalog_cluster, measured_collectives
from simplan.errors import Problem, SpecError, did_you_mean
from simplan.model.captured.file import read_captured
from simplan.optimizers import (
    OPTIMIZERS,
    REFUSED_WORDS,
    UPDATES,
    OptimizerFacts,
    OptimizerName,
    StoredTensor,
    Widths,
)
from simplan.program.schedules import SCHEDULES
from simplan.report.captured import captured_json, captured_text
from simplan.report.plan_fields import plan_fields
from simplan.report.section_fields import (
    measured_fields,
    model_fields,
    search_space,
    topology_fields,
    training_fields,
    whole_run_fields,
)
from simplan.report.table import format_table_text
from simplan.scenario.schema import cluster_fields, scenario_schema
from simplan.units import format_bytes, format_count, format_flop_per_s, format_percent, format_rate, format_time

Row = dict[str, str]


def show_command(kind: str | None, name: str | None, *, as_json: bool, calibration_file: Path | None = None) -> int:
    """``simplan show``; without a kind, the list of kinds. A calibration is compared with the catalog's links.

    ``schema`` is a JSON Schema of scenario files, with and without ``--json``. A file is that of a captured model.
    """
    if kind == "schema" and name is None:
        print_json(scenario_schema())
        return 0
    if kind is not None and name is None and kind.endswith(".json"):
        captured = read_captured(Path(kind))
        if as_json:
            print_json(captured_json(captured))
        else:
            print_result(captured_text(captured))
        return 0
    kind = _plural(kind)
    if kind is None:
        fix = f"one of {', '.join((*_LISTINGS, 'schema'))}"
        raise SpecError(Problem(field="KIND", rule="is missing", fix=fix))
    if calibration_file is not None:
        return _show_measured(kind, name, calibration_file, as_json=as_json)
    if as_json:
        shown: Any = listing(kind) if name is None else entry(kind, name)
        print_json({"schema_version": 1, "kind": kind, "entries" if name is None else "entry": shown})
    else:
        print_result(listing_text(kind) if name is None else entry_text(kind, name))
    return 0


def _show_measured(kind: str, name: str | None, file: Path, *, as_json: bool) -> int:
    if kind != "links" or name is not None:
        words = kind if name is None else f"{kind} {name}"
        rule = "has no measurements in a calibration: collectives over links have"
        raise SpecError(
            Problem(field="KIND", value=words, rule=rule, fix=f"run `simplan show links --calibration {file}`")
        )
    calibration = read(file)
    assert calibration is not None, "a missing file is refused"
    if as_json:
        rows = [collective._asdict() for collective in measured_collectives(calibration, catalog_cluster(calibration))]
        print_json({"schema_version": 1, "kind": kind, "measured": rows})
    else:
        print_result(measured_links_text(calibration))
    return 0


def measured_links_text(calibration: Calibration) -> str:
    """Measured collectives beside the catalog's estimates, as a text table.

    Raises:
        SpecError: The calibration has no timings of communication.
    """
    cluster = catalog_cluster(calibration)
    measured = measured_collectives(calibration, cluster)
    if not measured:
        fix = "run `simplan calibrate`, or `simplan calibrate --nccl-tests FILE`"
        raise SpecError(Problem(field="calibration", rule="has no timings of collectives", fix=fix))
    headers = [
        "collective",
        "ranks",
        "nodes",
        "sizes",
        "smallest takes",
        "bus bandwidth",
        "catalog",
        "time over catalog",
    ]
    rows = [
        [
            str(collective.kind),
            str(collective.num_ranks),
            str(collective.num_nodes),
            " to ".join(map(format_bytes, collective.num_bytes)),
            format_time(collective.latency_s),
            format_rate(collective.bus_bytes_per_s),
            "" if collective.estimated_bytes_per_s is None else format_rate(collective.estimated_bytes_per_s),
            "" if collective.median_ratio is None else f"{collective.median_ratio:.2f}",
        ]
        for collective in measured
    ]
    device = calibration.environment.get("device") or "this machine"
    against = "no cluster of the catalog has such devices" if cluster is None else f"catalog: links of {cluster.id}"
    return (
        f"{format_table_text(headers, rows, indent=0)}\n\nMeasured on {device}; {against}. Bus bandwidth is that "
        "of the largest size, the last column the median over sizes."
    )


def listing(kind: str) -> list[Row]:
    """Everything of one kind, a row each, as text.

    Raises:
        SpecError: No such kind; names the nearest.
    """
    return _listing_of(kind)()


def listing_text(kind: str) -> str:
    """Entries of a kind as a text table."""
    rows = listing(kind)
    headers = list(rows[0])
    table = format_table_text(headers, [[row[key] for key in headers] for row in rows], indent=0, left=len(headers))
    return f"{table}\n\nMinimal scenario\n{MINIMAL_SCENARIO}" if kind == "scenario" else table


def entry(kind: str, name: str) -> dict[str, Any]:
    """One entry with all its values and sources.

    Raises:
        SpecError: No such kind or entry; names the nearest.
    """
    _listing_of(kind)
    if kind == "reliability":
        return _reliability_entry(name)
    if kind in _ENTRIES:
        name = find(cast("catalog.Kind", kind), name).name or name
        fields: dict[str, Any] = _ENTRIES[kind](name).model_dump(mode="json")
        return fields | ({"source": catalog.topology_source(name)} if kind == "topologies" else {})
    rows = {row["name"]: row for row in listing(kind)}
    if name not in rows:
        fix = _in_catalog(f"{kind}s", name) or did_you_mean(name, rows)
        raise SpecError(Problem(field=kind, value=name, rule="is not known", fix=fix))
    return dict(rows[name])


def entry_text(kind: str, name: str) -> str:
    """Entry as lines of ``key  value``, followed by its sources."""
    flat = _flatten(entry(kind, name))
    sources = {key.removeprefix("sources."): value for key, value in flat.items() if ".sources." in f".{key}"}
    shown = {key: value for key, value in flat.items() if ".sources." not in f".{key}" and value not in (None, "")}
    missing = shown.pop("not_modelled", ())
    width = max(len(key) for key in shown)
    lines = [f"{key:{width}}  {f'{value:.6g}' if isinstance(value, float) else value}" for key, value in shown.items()]
    if missing:
        lines += ["", "Not modeled", *(f"  {what}" for what in missing)]
    if sources:
        lines += ["", "Sources", *(f"  {key}: {value}" for key, value in sources.items())]
    return "\n".join(lines)


def _in_catalog(kind: str, name: str) -> str:
    """Command that shows an entry of the catalog; empty if the catalog has no such kind or entry."""
    kind = kind.replace("topologys", "topologies")
    is_entry = kind in _ENTRIES and any(row["name"] == name for row in listing(kind))
    return f"run `simplan show {kind} {name}`" if is_entry else ""


def _plural(kind: str | None) -> str | None:
    """Kind whose singular was given, such as ``device``; ``model`` and ``cluster`` are kinds themselves."""
    return f"{kind}s" if kind not in _LISTINGS and f"{kind}s" in _LISTINGS else kind


def _listing_of(kind: str) -> Callable[[], list[Row]]:
    if kind not in _LISTINGS:
        sections = (kinds for kinds in _SECTIONS if kind.removesuffix("s") in (row["name"] for row in listing(kinds)))
        section = next(sections, None)
        fix = f"run `simplan show {section}`, which has its values" if section else did_you_mean(kind, _LISTINGS)
        raise SpecError(Problem(field="KIND", value=kind, rule="is not something to show", fix=fix))
    return _LISTINGS[kind]


def _devices() -> list[Row]:
    def row(name: str) -> Row:
        device = catalog.device(name)
        peak = device.peak_flop_per_s
        bandwidth = device.memory_bandwidth_bytes_per_s
        best = next((dtype for dtype in ("bf16", "fp16", "fp32") if dtype in peak), None)
        return {
            "name": name,
            "memory": format_bytes(device.memory_bytes) if device.memory_bytes else "?",
            "bandwidth": format_rate(bandwidth) if bandwidth else "?",
            "dense peak": f"{format_flop_per_s(peak[best])} {best}" if best else "?",
            "link": device.intra_link or "",
        }

    return [row(name) for name in catalog.names("devices")]


def _links() -> list[Row]:
    return [
        {
            "name": link.id,
            "one direction": format_rate(link.bytes_per_s),
            "per": "node" if catalog.network_of_node(link.id, 1) else "device",
            "reached": format_percent(link.bandwidth_share),
            "reducing in the switch": format_percent(link.switch_share) if link.switch_share else "",
            "a step": format_time(link.latency_s),
            "from": "measurements" if link.fitted_on else "textbook",
        }
        for link in (catalog.link(name) for name in catalog.names("links"))
    ]


def _clusters() -> list[Row]:
    def row(name: str) -> Row:
        cluster = catalog.cluster(name)
        across = None if name == THIS_MACHINE else catalog.cluster(name, cluster.devices_per_node + 1).inter_link
        return {
            "name": name,
            "one node": f"{cluster.devices_per_node} x {cluster.device.id}",
            "in a node": cluster.intra_link.id if cluster.intra_link else "",
            "between nodes": across.id if across else "",
        }

    return [row(name) for name in catalog.names("clusters")]


def _topologies() -> list[Row]:
    return [
        {"name": name, "kind": topology.kind, "description": topology.words()}
        for name, topology in ((name, catalog.topology(name)) for name in catalog.names("topologies"))
    ]


def _models() -> list[Row]:
    return [
        {
            "name": model.name,
            "family": model.family,
            "parameters": format_count(model.num_parameters),
            "layers": str(model.num_blocks),
            "hidden": str(model.hidden_size),
            "heads": str(model.num_attention_heads),
            "seq_len": str(model.seq_len),
            "alias of": "" if (same := catalog.canonical_name("models", model.name)) == model.name else same,
        }
        for model in (catalog.model(name) for name in catalog.names("models"))
    ]


def _software() -> list[Row]:
    return [
        {
            "name": software.id,
            "stands for": software.stands_for,
            "precisions": ", ".join([*software.state_bytes, *software.low_precision]),
            "gradient bucket": format_bytes(software.bucket_bytes) if software.grad_overlap else "one for all",
            "buckets overlap backward": "yes" if software.grad_overlap else "no",
            "ZeRO stages": ", ".join(map(str, software.zero_stages)),
            "sequence parallelism": "yes" if software.sequence_parallelism else "no",
            "not modeled": str(len(software.not_modelled) or ""),
        }
        for software in (catalog.software(name) for name in catalog.names("software"))
    ]


def _reliability() -> list[Row]:
    """Presets of ``reliability``, then zones of ``spot``."""

    def preset_row(name: str) -> Row:
        causes = (cause for cause in catalog.reliability(name)["causes"] if cause["per"] != "job")
        per_hour = sum((1 if cause["per"] == "node" else _DEVICES_PER_NODE) / cause["mtbf_h"] for cause in causes)
        return {"name": name, "key": "reliability.preset", "failures": f"{24_000 * per_hour:.3g} per 1,000 node-days"}

    def zone_row(name: str) -> Row:
        zone = catalog.spot_zone(name)
        rate = f"{zone['preemptions_per_h']:.2f} per instance-hour, {zone['wait_h']:.1f} h to the next"
        return {"name": name, "key": "spot.zone", "failures": rate}

    presets, zones = catalog.names("reliability"), catalog.names("spot_zones")
    return [
        *(preset_row(name) | {"of": catalog.about("reliability", name)["description"]} for name in presets),
        *(zone_row(name) | {"of": catalog.about("spot_zones", name)["description"]} for name in zones),
    ]


def _reliability_entry(name: str) -> dict[str, Any]:
    """Preset of ``reliability`` or zone of ``spot``, with its keys and their sources."""
    match = find("spot_zones", name)
    if match.name or match.candidates:
        zone = match.name or name
        return {"id": zone} | catalog.spot_zone(zone) | catalog.about("spot_zones", zone)
    preset = find("reliability", name).name or name
    return {"id": preset} | catalog.reliability(preset) | catalog.about("reliability", preset)


def _schedules() -> list[Row]:
    def row(name: str, doc: str) -> Row:
        order, bubble, *_ = *(" ".join(part.split()) for part in doc.split("\n\n")), ""
        return {"name": name, "order": order, "for p ranks with v stages each, m microbatches": bubble}

    # ``none`` is one rank, where naive's bubble is zero: nothing to choose
    return [row(name, getdoc(schedule) or "") for name, schedule in SCHEDULES.items() if name != "none"]


def _optimizers() -> list[Row]:
    return [_optimizer(name, facts) for name, facts in OPTIMIZERS.items()]


def _optimizer(name: OptimizerName, facts: OptimizerFacts) -> Row:
    matrix = StoredTensor((4096, 4096), is_matrix=True, whole_shape=(4096, 4096))
    copy = 4 * facts.updates_copies  # FP32, and so are its states
    narrow, wide = (
        copy + facts.state_bytes(matrix, Widths(copy or width, copy or width, width, rank=128)) / 4096**2
        for width in (2, 4)
    )
    temporary, refused = facts.temporaries, facts.refused_under or {}
    temporaries = "" if temporary is None else format_bytes(temporary.num_bytes(matrix, Widths(4, 4, 4)))
    if f"{name}_foreach" in UPDATES and UPDATES[f"{name}_foreach"].num_temporaries:  # type: ignore[index]
        temporaries = "with foreach, one as large as all weights"
    return {
        "name": name,
        "package": facts.package,
        "states": f"{facts.num_states} of rank 128" if facts.projects else str(facts.num_states),
        "B per weight in fp32": f"{wide:.4g}",
        "in bf16": f"{narrow:.4g}",
        "temporaries of 4,096 x 4,096": temporaries,
        "not with": ", ".join(REFUSED_WORDS[situation] for situation in refused if situation != "replication"),
        "software": ", ".join(facts.software) or "all",
    }


_LISTINGS: dict[str, Callable[[], list[Row]]] = {
    "devices": _devices,
    "links": _links,
    "clusters": _clusters,
    "topologies": _topologies,
    "models": _models,
    "software": _software,
    "reliability": _reliability,
    "schedules": _schedules,
    "optimizers": _optimizers,
    "metrics": definitions,
    "scenario": scenario_sections,
    "model": model_fields,
    "cluster": cluster_fields,
    "topology": topology_fields,
    "training": training_fields,
    "plan": plan_fields,
    "search-space": search_space,
    "expect": expectation_fields,
    "measured": measured_fields,
    "run": whole_run_fields,
}
_SECTIONS = ("training", "plan", "model", "cluster")
"""Kinds whose rows are keys of a scenario."""
_ENTRIES: dict[str, Callable[[str], Any]] = {
    "devices": catalog.device,
    "links": catalog.link,
    "clusters": catalog.cluster,
    "topologies": catalog.topology,
    "models": catalog.model,
    "software": catalog.software,
}

KINDS = (*_LISTINGS, "schema")
_DEVICES_PER_NODE = 8  # of nodes in the listing of failures


def _flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list) and all(isinstance(item, dict) and "name" in item for item in value):
            for item in value:
                others = (f"{name}: {value_of_item}" for name, value_of_item in item.items() if name != "name")
                flat[f"{prefix}{key}.{item['name']}"] = ", ".join(others)
        else:
            flat[f"{prefix}{key}"] = value
    return flat
