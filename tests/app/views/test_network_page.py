"""The page Network: slow links and placements cost what predictions of changed scenarios say; no input breaks it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from app.figures.network import (
    load_figure,
    network_result,
    placements,
    slow_link_costs,
    slow_link_step_time_s,
    topologies,
)
from app.fitting import document_text
from app.jobs.job import Done, Failed, Report, TaskRequest
from simplan.predict import predict
from simplan.scenario import parse_scenario
from tests.app.figures.drawn import checked
from tests.app.questions import TINY, text_of
from tests.app.views.pages import assert_no_bug, complaints, opened, opened_in_session, query_of
from tests.support.slow import slow_except

SHARED: dict[str, Any] = {
    **TINY,
    "cluster": {"preset": "dgx-h100", "num_nodes": 2, "topology": {"kind": "leaf_spine", "nodes_per_leaf": 1}},
    "training": {"global_batch_size": 32},
    "plan": {"dp_shard": 8, "pp": 2},
}
PLAIN = SHARED | {"cluster": {"preset": "dgx-h100", "num_nodes": 2}}


def step_time_s(document: dict[str, Any]) -> float:
    return predict(parse_scenario(document_text(document)).job).step_time_s


@pytest.mark.slow
def test_a_slow_link_costs_what_a_scenario_with_it_says() -> None:
    text = document_text(SHARED)
    costs = slow_link_costs(text, 0, 0.25)
    assert {cost.kind for cost in costs} >= {"nic -> leaf", "leaf -> nic", "leaf -> spine", "spine -> leaf"}
    assert costs[0].step_time_s == max(cost.step_time_s for cost in costs) > network_result(text, 0).step_time_s
    for cost in costs[:2]:
        slow = [{"link": cost.link, "bandwidth_share": 0.25}]
        expected_s = step_time_s(SHARED | {"cluster": {**SHARED["cluster"], "slow_links": slow}})
        assert cost.step_time_s == pytest.approx(expected_s, rel=1e-9)
        assert slow_link_step_time_s(text, cost.link, 0.25) == cost.step_time_s


def test_a_link_that_is_slow_becomes_slower() -> None:
    cable = slow_link_costs(document_text(SHARED), 0, 0.5)[0].link
    half = {**SHARED["cluster"], "slow_links": [{"link": cable, "bandwidth_share": 0.5}]}
    quarter = {**SHARED["cluster"], "slow_links": [{"link": cable, "bandwidth_share": 0.25}]}
    found_s = slow_link_step_time_s(document_text(SHARED | {"cluster": half}), cable, 0.5)
    assert found_s == pytest.approx(step_time_s(SHARED | {"cluster": quarter}), rel=1e-9)


def test_placements_are_all_orders_with_their_predictions() -> None:
    alternatives = placements(document_text(SHARED))
    assert {alternative.name for alternative in alternatives} == {"dp_shard, pp", "pp, dp_shard"}
    assert [alternative.name for alternative in alternatives if alternative.is_current] == ["dp_shard, pp"]
    for alternative in alternatives:
        expected_s = step_time_s(SHARED | {"plan": {**SHARED["plan"], "placement": alternative.name}})
        assert alternative.step_time_s == pytest.approx(expected_s, rel=1e-9)


def test_a_bad_order_of_nodes_is_shown_with_the_hostfile_that_mends_it() -> None:
    """Four nodes on two leaves in turn: the order of the network is that of leaves."""
    links = [{"between": [f"node{node}", f"leaf{node % 2}"], "gbit": 3200} for node in range(4)]
    links += [{"between": [f"leaf{leaf}", "spine"], "gbit": 10} for leaf in (0, 1)]
    cluster = {"preset": "dgx-h100", "num_nodes": 4, "topology": {"kind": "graph", "links": links}}
    document = SHARED | {"cluster": cluster, "plan": {"dp_shard": 32}}
    result = network_result(document_text(document), 0)
    by_network_s = step_time_s(document | {"plan": {"dp_shard": 32, "placement": "network"}})
    assert result.nodes == (0, 1, 2, 3)
    assert result.faster is not None
    assert result.faster.nodes == (0, 2, 1, 3)
    assert result.faster.step_time_s == pytest.approx(by_network_s, rel=1e-9)
    step_times_s = {alternative.name: alternative.step_time_s for alternative in placements(document_text(document))}
    assert step_times_s["network"] == pytest.approx(by_network_s, rel=1e-9)
    page = opened("network", document)
    assert_no_bug(page)
    said = " ".join(element.value for element in (*page.caption, *page.info, *page.code)).replace("\\", "")
    for words in ("follow the order of ranks: nodes 0-3", "Order nodes 0 2 1 3", "node2 slots=8"):
        assert words in said


def test_topologies_that_do_not_suit_are_refused_in_words() -> None:
    alternatives = {alternative.name: alternative for alternative in topologies(document_text(PLAIN))}
    expected_s = step_time_s(PLAIN | {"cluster": {**PLAIN["cluster"], "topology": "one-switch"}})
    assert alternatives["one-switch"].step_time_s == pytest.approx(expected_s, rel=1e-9)
    assert "makes 4096 devices" in alternatives["tpu-v4-pod"].refused


def test_the_busiest_links_are_drawn_beside_those_that_delay() -> None:
    result = network_result(text_of("network/rails"), 0)
    assert result.network is not None
    busiest = max(result.network.links, key=lambda load: load.busy_share)
    assert busiest.series in [row.link.series for row in result.rows]
    figure = checked(load_figure(result.rows, result.length_s, busiest.name))
    assert len(figure.data[0].z) == len(result.rows)


def test_the_page_opens_with_a_link_chosen_in_the_address() -> None:
    page = opened("network", SHARED, {"link": "leaf1 -> spine", "left": 25, "what_if": "slow link"})
    assert_no_bug(page)
    assert complaints(page) == []
    assert any("leaf1" in shown.value and "in place of" in shown.value for shown in page.markdown)
    assert query_of(page)["v.link"] == "leaf1 -> spine"


GRAPH = SHARED | {"cluster": {**PLAIN["cluster"], "topology": "geforce"}}
OPENED = [(PLAIN, None), (TINY, "slow link"), (GRAPH, "placement"), (PLAIN, "topology")]


@pytest.mark.parametrize(
    ("document", "what_if"),
    slow_except(OPENED, product((PLAIN, TINY, GRAPH), (None, "slow link", "placement", "topology"))),
)
def test_the_page_opens_for_other_clusters(document: dict[str, Any], what_if: str | None) -> None:
    page = opened_in_session("network", document, {"link": 7, "left": "x", "what_if": what_if})
    assert_no_bug(page)
    assert complaints(page) == []


@pytest.mark.parametrize("name", ["tpu-v4-pod", "nonsense"])
def test_a_topology_that_cannot_be_leaves_the_choice_of_another(name: str) -> None:
    page = opened("network", SHARED | {"cluster": {**PLAIN["cluster"], "topology": name}})
    assert_no_bug(page)
    assert next(box for box in page.selectbox if box.label == "Topology").value == name


def test_alternatives_are_simulated_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 64 devices, the topologies of the catalog took most of the time of the first load."""
    asked: list[str] = []
    run = TaskRequest.run

    def answer(self: TaskRequest, report: Report) -> Done | Failed:
        asked.append(self.task.__qualname__)
        return run(self, report)

    monkeypatch.setattr(TaskRequest, "run", answer)
    page = opened("network", PLAIN | {"name": "nothing asked"})
    assert_no_bug(page)
    assert asked == ["network_result"]
    page.pills(key="view:what_if").set_value("placement").run()
    assert_no_bug(page)
    assert asked == ["network_result", "placements"]
    assert query_of(page)["v.what_if"] == "placement"
