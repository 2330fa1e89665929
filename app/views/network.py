"""Network: the fabric of the cluster, load of its links over the step, and cost of slow links and placements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import streamlit as st

from app import result_cache, state
from app.components.elements import (
    csv_text,
    download,
    download_report,
    point_value,
    show_drawing,
    show_figure,
    show_metrics,
    show_table,
)
from app.components.scenario_form import show_scenario_form
from app.fields import choice, get, remembered_choice
from app.figures.network import (
    Alternative,
    NetworkResult,
    SlowLinkCost,
    alternatives_figure,
    load_figure,
    network_result,
    placements,
    slow_link_costs,
    slow_link_step_time_s,
    topologies,
)
from app.page import bullets, escaped, run_page
from app.predictions import prediction_text
from app.result_cache import awaited, handed_over
from simplan import catalog
from simplan.network.load import Network
from simplan.plan.placement import listed_words
from simplan.report.drawings.fabric_drawing import rate_words
from simplan.report.text import links_words
from simplan.scenario import Scenario
from simplan.units import counted, format_bytes, format_percent, format_rate, format_time

_LINK, _LOAD, _WHAT_IF = "link", "load of links", "what_if"
_NO_TOPOLOGY = "none"
_LEFT = {90: "90 %", 75: "75 %", 50: "half", 25: "a quarter", 10: "a tenth", 1: "1 %"}
"""Bandwidth that a slow link has left, in percent."""
_MAX_LINKS = 300


def show() -> None:
    """Links and fabric, load over the step, and on request the cost of a slow link, placements or topologies."""
    show_scenario_form()
    _choose_topology()
    document = state.document()
    scenario = result_cache.scenario(document)
    inputs = result_cache.worker_inputs(document)
    result = awaited("predicting the step and the load of its links", network_result, *inputs)
    _show_top(scenario, result)
    _show_fabric(result)
    if result.network is not None:
        _show_load(scenario, result)
    with st.container(horizontal=True):
        if result.network is not None:
            download("Load", f"{scenario.name} load of links", "csv", csv_text(_load_rows(result.network)))
        download("Fabric", f"{scenario.name} fabric", "svg", result.svg)
        download_report(f"{scenario.name} network", lambda: [json.loads(handed_over(prediction_text, *inputs))])
    st.subheader("What if", help="Every alternative is a simulation of the step, which takes time on many ranks")
    others = ("topology", "placement") if result.network is None else ("slow link", "placement")
    match remembered_choice("Alternatives", _WHAT_IF, others, None, widget=st.pills, label_visibility="collapsed"):
        case "slow link":
            _show_slow_link(inputs, result)
        case "topology":
            alternatives = awaited("predicting the step with each topology", topologies, inputs[0])
            _show_alternatives("topologies", alternatives, result)
            st.caption("Choose one above to see its links. The dashed line is the step without a topology.")
        case "placement":
            alternatives = awaited("predicting the step with each placement", placements, inputs[0])
            if len(alternatives) < 2:
                st.caption("The plan has one axis of several ranks, so that there is only one order.")
                return
            _show_alternatives("placements", alternatives, result)
            st.caption(
                "Axes of several ranks, the innermost first; network: nodes of one switch follow each other. "
                "The dashed line is the step of the scenario."
            )


def _choose_topology() -> None:
    """Select box of the topologies of the catalog; one that is written out is shown in the YAML only."""
    with st.columns([1, 3])[0]:
        topology = get(("cluster", "topology"))
        if topology is None or isinstance(topology, str):
            choice(
                "Topology",
                ("cluster", "topology"),
                [None, *catalog.names("topologies")],
                None,
                format_func=lambda name: _NO_TOPOLOGY if name is None else name,
                placeholder=_NO_TOPOLOGY,
                help="cluster.topology: how nodes are joined; its links are simulated",
            )
        else:
            kind = topology.get("kind", "") if isinstance(topology, dict) else ""
            st.text_input("Topology", f"{kind} (see Edit as YAML)", disabled=True)


def _show_top(scenario: Scenario, result: NetworkResult) -> None:
    if words := links_words(scenario.job.cluster.links):
        st.markdown(f"**Links**: {escaped(words)}.")
    network = result.network
    if network is None:
        st.caption(
            "Without a topology, each communication is assumed to have the links to itself: all ranks have the "
            "bandwidth above at the same time, and communications of different groups do not slow each other down. "
            "With a topology, links are simulated, and communications share them."
        )
        return
    change = result.step_time_s / result.alone_s - 1
    busiest = max(network.links, key=lambda load: load.busy_share, default=None)
    show_metrics(
        [
            ("Step time", format_time(result.step_time_s), f"{change:+.2%} compared with no topology"),
            ("Contention", format_time(network.contention_s), "Seconds of the step that waiting for links costs"),
            (
                "Busiest link",
                "none" if busiest is None else format_percent(busiest.busy_share),
                "" if busiest is None else f"Mean busy share of {busiest.name}",
            ),
        ]
    )
    words = network.contention_words()
    st.caption(escaped(f"Contention {words}. Step time {change:+.2%} compared with no topology."))
    if len(result.nodes) > 1:
        st.caption(escaped(f"Rings and trees follow the order of ranks: {_nodes_words(result.nodes)}."))
    if result.faster is not None:
        words = f"Order {_nodes_words(result.faster.nodes)}: {format_time(result.faster.step_time_s)} a step"
        how = "Write plan.placement: network" if result.faster.is_plain else "Start ranks with its hostfile"
        st.info(escaped(f"{words} ({format_percent(result.faster.saving)} less). {how}"))
        with st.expander("Hostfile"):
            st.code("\n".join(result.faster.hostfile), language=None)


def _nodes_words(nodes: Sequence[int]) -> str:
    """Nodes in runs, such as ``nodes 0-3 8-11 4-7``."""
    return f"nodes {listed_words(nodes)}"


def _show_fabric(result: NetworkResult) -> None:
    drawing = result.drawing
    st.subheader("Fabric", help="Sample of the nodes and the switches above them, as `simplan draw --network` draws it")
    show_drawing("fabric", result.svg, alt=f"Fabric of the cluster: {drawing.words}")
    groups = "; ".join(f"{group.lower} - {group.upper}: {rate_words(group)}" for group in drawing.groups)
    color = "" if result.network is None else " Color of a cable: mean load of its busier direction."
    st.caption(escaped(f"{drawing.words}. Links in each direction: {groups}.{color}"))


def _show_load(scenario: Scenario, result: NetworkResult) -> None:
    """Heat map of the links; a click chooses one."""
    assert result.network is not None
    st.subheader("Load of links", help="Busy share of each link over the simulated step, as `simplan draw --load`")
    names = _choosable(result)
    chosen = view if (view := state.view(_LINK)) in names else next(iter(names), "")
    show_figure(
        load_figure(result.rows, result.length_s, chosen),
        f"{scenario.name} load of links",
        alt="Busy share of links over the step",
        key=_LOAD,
        on_select=lambda: _take_link(names),
    )
    hidden = f" {counted(result.num_hidden, 'more loaded link')} not drawn." if result.num_hidden else ""
    st.caption(f"Links of equal load share a row; a click on a bar shows the cost of a slow link.{hidden}")


def _load_rows(network: Network) -> list[dict[str, Any]]:
    """Loaded links as table rows."""
    return [
        {
            "link": load.name,
            "GB/s": load.bytes_per_s / 1e9,
            "bytes a step": load.num_bytes,
            "busy share": load.busy_share,
            "delays, s": load.lost_s,
            "communications": "; ".join(part.name for part in load.communications),
        }
        for load in network.links
    ]


def _choosable(result: NetworkResult) -> list[str]:
    """Links with traffic: those that delay communications most, and those of the figure."""
    assert result.network is not None
    names = [load.name for load in result.network.links[:_MAX_LINKS]]
    return [*dict.fromkeys([*names, *(row.link.name for row in result.rows)])]


def _take_link(names: list[str]) -> None:
    """Chooses the link of the clicked bar."""
    name = point_value(_LOAD)
    if name in names:
        state.set_view(_LINK, name)
        state.set_view(_WHAT_IF, "slow link")


def _show_slow_link(inputs: tuple[str, int], result: NetworkResult) -> None:
    """Cost of one slow link, and of one slow link of each kind."""
    assert result.network is not None
    names = _choosable(result)
    if not names:
        st.caption("No link has traffic: a slow one costs nothing.")
        return
    left, right = st.columns(2, gap="medium")
    with left:
        about = "In one direction. By default the link that delays communications most, else the busiest"
        link = remembered_choice("Link", _LINK, names, names[0], help=about)
    with right:
        percent = remembered_choice(
            "Bandwidth that is left", "left", list(_LEFT), 50, widget=st.select_slider, format_func=_LEFT.get
        )
    load = next(load for load in result.network.links if load.name == link)
    share = percent / 100
    slowed_s = awaited("simulating the slow link", slow_link_step_time_s, inputs[0], link, share)
    more_s = slowed_s - result.step_time_s
    longer = f"{format_time(max(0.0, more_s))} longer ({more_s / result.step_time_s:+.2%})"
    change = longer if more_s > 1e-6 * result.step_time_s else "no longer than before"
    flows = ", ".join(part.name for part in sorted(load.communications, key=lambda part: -part.busy_s)[:3])
    st.markdown(
        f"With {escaped(link)} at {format_rate(share * load.bytes_per_s)} in place of {format_rate(load.bytes_per_s)}, "
        f"a step takes **{format_time(slowed_s)}**, {change}. "
        f"{format_bytes(load.num_bytes)} cross it in a step: {escaped(flows)}."
    )
    costs = awaited("simulating a slow link of each kind", slow_link_costs, *inputs, share)
    show_table([_cost_row(cost, result.step_time_s) for cost in costs])
    st.caption("One link of each kind is slow: the one that delays communications most, else the busiest.")


def _cost_row(cost: SlowLinkCost, step_time_s: float) -> dict[str, Any]:
    return {
        "links": cost.kind,
        "number": cost.num_links,
        "bandwidth": format_rate(cost.bytes_per_s),
        "slow link": cost.link,
        "busy before": format_percent(cost.busy_share),
        "step time": format_time(cost.step_time_s),
        "increase": f"{cost.step_time_s / step_time_s - 1:+.2%}",
    }


def _show_alternatives(what: str, alternatives: tuple[Alternative, ...], result: NetworkResult) -> None:
    """Step time of each alternative, and the reasons of those without a prediction."""
    figure = alternatives_figure(alternatives, result.step_time_s)
    show_figure(figure, f"step time of {what}", alt=f"Step time of the {what} by length")
    refused = [alternative for alternative in alternatives if alternative.refused]
    if refused:
        with st.expander(f"{what.capitalize()} without a prediction ({len(refused)})"):
            st.markdown(bullets(f"{alternative.name}: {alternative.refused}" for alternative in refused))


if __name__ == "__main__":
    run_page(show)
