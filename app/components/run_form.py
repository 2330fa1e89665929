"""Form of a whole run: length, failures, spot nodes, checkpoints, recovery, evaluation, power; and a start for all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

import streamlit as st

from app import state
from app.budget import TOKENS, TOKENS_START, price_of, with_length, with_price, with_spot_price
from app.components.elements import details
from app.components.verdict import show_length, show_price
from app.fields import about, choice, get, number, quantity, switch
from app.fitting import Document, section, with_value
from app.page import escaped
from simplan import catalog
from simplan.goodput.sections import Policy

_NONE, _OWN, _TRACE = "none", "own", "trace"
_FAILURES: Mapping[str, str] = {_NONE: "none", _OWN: "one rate for every device"}
_CHECKPOINTS: Mapping[str, str] = {_NONE: "none", "best": "at the best interval", _OWN: "at an interval"}
_POLICIES = dict(
    zip(get_args(Policy), ("restart on all nodes", "shrink and grow", "continue without the group"), strict=True)
)
_NODES: Mapping[str, str] = {_NONE: "on demand or reserved", _OWN: "spot, at a rate"}
_FALLBACKS = {"wait": "wait for spot nodes", "on_demand": "nodes on demand"}
_SPOT_SOURCES = ("preemptions_per_h", "zone", "trace", "wait_h")
"""Keys of ``spot`` that say when nodes are there."""
_EXAMPLE_PREEMPTIONS_PER_H, _EXAMPLE_WAIT_H = 0.01, 2.0
_RATES = ("device_mtbf_h", "node_mtbf_h", "link_mtbf_h", "causes", "preset")
"""Keys of ``reliability`` that say how often something fails."""
_START: Document = {
    "reliability": {"preset": "llama3-2024", "detection_s": 60},
    "checkpoint": {"interval_s": "best", "blocking_s": 30},
    "recovery": {"restart_s": 600, "spares": 1, "repair_h": 24},
}
_START_PRICE = 2.5
_START_INTERVAL_S = 1800.0
_EXAMPLE_MTBF_H = 50_000.0


def show_run_form() -> None:
    """The form, bound to the sections of the scenario."""
    columns = st.columns(len(_PARTS), gap="medium")
    for column, (title, show) in zip(columns, _PARTS.items(), strict=True):
        with column:
            st.markdown(f"###### {title}")
            show()
    with details("Evaluation, power and more", "run options") as is_open:
        if is_open:
            _show_more()


def started(document: Document) -> Document:
    """The scenario with a length, a price, failures, checkpoints and a recovery, each if it has none."""
    document = {**_START, **document}
    if "run" not in document and section(document, TOKENS[0]).get(TOKENS[1]) is None:
        document = with_length(document, TOKENS_START, TOKENS)
    return document if price_of(document) is not None else with_price(document, _START_PRICE)


def _length() -> None:
    show_length(steps=True)
    show_price()


def _failures() -> None:
    reliability = section(state.current(), "reliability")
    names = {name: catalog.about("reliability", name)["description"] for name in catalog.names("reliability")}
    preset = reliability.get("preset")
    value = preset if isinstance(preset, str) and preset in names else _OWN if reliability else _NONE
    key = "form failures"
    st.session_state[key] = value
    st.selectbox(
        "Failures",
        [*_FAILURES, *names],
        key=key,
        format_func=lambda name: _FAILURES.get(name, name),
        help=f"{about(('reliability', 'preset'))}. {escaped(str(names.get(value, '')))}",
        on_change=lambda: state.set_document(_with_failures(state.document(), st.session_state[key])),
    )
    if value != _NONE:
        if value == _OWN:
            _number("Hours between failures", ("reliability", "device_mtbf_h"))
        _number("Detection, s", ("reliability", "detection_s"), 0.0)


def _with_failures(document: Document, name: str) -> Document:
    """The scenario with failures of a name in the box."""
    kept = {key: value for key, value in section(document, "reliability").items() if key not in _RATES}
    rates: dict[str, Any] = {"device_mtbf_h": _EXAMPLE_MTBF_H} if name == _OWN else {"preset": name}
    return _with_section(document, "reliability", None if name == _NONE else rates | kept)


def _spot() -> None:
    spot, zones = section(state.current(), "spot"), catalog.names("spot_zones")
    trace = spot.get("trace")
    zone = spot.get("zone")
    value = zone if zone in zones else _TRACE if trace is not None else _OWN if spot else _NONE
    key = "form spot"
    st.session_state[key] = value
    words = {**_NODES, _TRACE: f"spot, as in {trace}"}
    st.selectbox(
        "Nodes",
        [*_NODES, *([_TRACE] if value == _TRACE else []), *zones],
        key=key,
        format_func=lambda name: words.get(name, f"spot, {name}"),
        help=f"{about(('spot', 'preemptions_per_h'))}, or published rates of a zone (`simplan show reliability`)",
        on_change=lambda: state.set_document(_with_spot(state.document(), st.session_state[key])),
    )
    if value == _NONE:
        return
    if value == _OWN:
        _number("Preemptions per node-hour", ("spot", "preemptions_per_h"))
        _number("Wait for a node, h", ("spot", "wait_h"), 0.0)
    _number("Notice, s", ("spot", "notice_s"), 0.0)
    choice("Lost nodes are replaced by", ("spot", "fallback"), list(_FALLBACKS), "wait", format_func=_fallback_words)
    price, path = price_of(state.current()), ("price", "spot_device_hour")
    more = about(path, "Set a price first" if price is None else "Empty for the price of all devices")
    quantity("Spot price", path, None, change=with_spot_price, help=more, disabled=price is None)


def _fallback_words(name: Any) -> str:
    return _FALLBACKS.get(name, str(name))


def _with_spot(document: Document, name: str) -> Document:
    """The scenario with spot nodes of a name in the box; a price of spot devices goes with the last of them."""
    kept = {key: value for key, value in section(document, "spot").items() if key not in _SPOT_SOURCES}
    if name == _NONE:
        priced = "spot_device_hour" in section(document, "price")
        return _with_section(with_spot_price(document, None) if priced else document, "spot", None)
    rates: dict[str, Any] = {"preemptions_per_h": _EXAMPLE_PREEMPTIONS_PER_H, "wait_h": _EXAMPLE_WAIT_H}
    return _with_section(document, "spot", (rates if name == _OWN else {"zone": name}) | kept)


def _checkpoints() -> None:
    checkpoint, key = section(state.current(), "checkpoint"), "form checkpoints"
    value = _NONE if not checkpoint else "best" if checkpoint.get("interval_s") == "best" else _OWN
    st.session_state[key] = value
    st.selectbox(
        "Checkpoints",
        list(_CHECKPOINTS),
        key=key,
        format_func=_CHECKPOINTS.__getitem__,
        help=about(("checkpoint", "interval_s")),
        on_change=lambda: state.set_document(_with_checkpoints(state.document(), st.session_state[key])),
    )
    if value == _NONE:
        return
    if value == _OWN and "interval_steps" in checkpoint:
        number("Interval, steps", ("checkpoint", "interval_steps"), None)
    elif value == _OWN:
        _number("Interval, s", ("checkpoint", "interval_s"))
    _number("Blocking, s", ("checkpoint", "blocking_s"))
    more = "In place of blocking seconds: bytes of the plan over it"
    path = ("checkpoint", "storage_bytes_per_s")
    quantity("Storage, GB/s", path, None, scale=1e9, change=partial(_changed, path=path), help=about(path, more))


def _with_checkpoints(document: Document, kind: str) -> Document:
    """The scenario with checkpoints of a kind in the box; the first ones block for as long as those of the start."""
    checkpoint = {
        key: value for key, value in section(document, "checkpoint").items() if not key.startswith("interval")
    }
    interval_s = "best" if kind == "best" else _START_INTERVAL_S
    kept = checkpoint or {"blocking_s": _START["checkpoint"]["blocking_s"]}
    return _with_section(document, "checkpoint", None if kind == _NONE else {"interval_s": interval_s, **kept})


def _recovery() -> None:
    choice(
        "Policy",
        ("recovery", "policy"),
        list(_POLICIES),
        "restart",
        format_func=lambda name: _POLICIES.get(name, str(name)),
    )
    _number("Restart, s", ("recovery", "restart_s"), 0.0)
    number("Spare nodes", ("recovery", "spares"), 0)
    _number("Repair, h", ("recovery", "repair_h"), 0.0)


def _show_more() -> None:
    evaluation, recovery, power = st.columns(3, gap="medium")
    with evaluation:
        path = ("evaluation", "every_steps")
        number("Evaluation every, steps", path, None, change=partial(_changed, path=path))
        _number("Evaluation, s", ("evaluation", "time_s"))
    with recovery:
        _number("Diagnosis, s", ("recovery", "diagnosis_s"), 0.0)
        if section(state.current(), "checkpoint"):
            switch("Asynchronous checkpoints", ("checkpoint", "async_save"), False)
    with power:
        _number("Device, W", ("power", "device_w"))
        _number("Power usage effectiveness", ("power", "pue"), 1.0 if get(("power",)) else None)
        _number("CO2, g per kWh", ("power", "co2_g_per_kwh"))
    st.caption("*Edit as YAML* has all keys: causes of failures, traces of spot nodes, checkpoints in memory and more.")


def _number(label: str, path: tuple[str, str], default: float | None = None) -> None:
    """Widget for a number of a section, which begins with its first key and ends with its last one."""
    quantity(label, path, default, change=partial(_changed, path=path))


def _changed(document: Document, value: float | None, path: tuple[str, str]) -> Document:
    document = with_value(document, path, value)
    return _with_section(document, path[0], document[path[0]] or None)


def _with_section(document: Document, name: str, keys: dict[str, Any] | None) -> Document:
    others = {key: value for key, value in document.items() if key != name}
    return others if keys is None else {**others, name: keys}


_PARTS = {
    "Length and price": _length,
    "Nodes": _spot,
    "Failures": _failures,
    "Checkpoints": _checkpoints,
    "Recovery": _recovery,
}
"""Parts of the form by their title."""
