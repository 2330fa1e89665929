"""Explanations of steps on shared links: waiting is in the sum, and advice is what was tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from simplan import catalog
from simplan.cluster.topology import FatTree, Graph, LeafSpine, Sites, Topology
from simplan.explain import explain
from simplan.explain.network_advice import network_advice
from simplan.job import Job
from simplan.predict import predict, predict_step
from simplan.report.drawings.fabric_drawing import draw_fabric
from simplan.report.drawings.fabric_svg import fabric_svg
from simplan.report.drawings.svg import shortened
from simplan.report.explanation import explanation_text
from simplan.report.search import search_text
from simplan.search import search
from simplan.search.space import SearchSpace
from tests.cost.formulas import value_of
from tests.jobs import job_of
from tests.support.problems import says

SVG = "{http://www.w3.org/2000/svg}"
LEAVES = LeafSpine(kind="leaf_spine", nodes_per_leaf=2, oversubscription=16)
SITES = Sites(kind="sites", nodes_per_site=2, gbit_per_site=400, latency_s=0.005)


def job_on(topology: Topology, plan: dict[str, Any] | None = None) -> Job:
    model = catalog.model("gpt2-1.5b").model_copy(update={"num_hidden_layers": 6})
    job = job_of(model, plan or {"dp_shard": 32}, global_batch_size=32, precision="bf16")
    return replace(job, cluster=catalog.cluster("dgx-h100", 32).model_copy(update={"topology": topology}))


@pytest.mark.parametrize("topology", [LEAVES, SITES, LEAVES.with_changes(oversubscription=1.0)], ids=str)
@pytest.mark.parametrize("plan", [{"dp_shard": 32}, {"dp_replicate": 16, "pp": 2}, {"dp_replicate": 32}], ids=str)
def test_every_second_of_a_step_on_links_has_a_line(topology: Topology, plan: dict[str, Any]) -> None:
    prediction, simulated = predict_step(job_on(topology, plan))
    explanation = explain(prediction, simulated)
    assert sum(term.value for term in explanation.time) == pytest.approx(prediction.step_time_s, rel=1e-9)
    waiting, whole_s = 0.0, explanation.step_time_s
    for term in explanation.time:
        assert value_of(term.formula) == pytest.approx(term.value, rel=0.01, abs=1e-9 * whole_s), term.name
        if term.group == "exposed communication":
            if term.name.endswith("waiting for links"):
                waiting += term.value
                continue
            all_s = sum(part.value for part in term.parts)  # overlapped or not
            assert all_s >= term.value * (1 - 1e-9), term.name
            busy, _, _ = term.formula.partition(" - ")
            assert value_of(busy) == pytest.approx(all_s, rel=0.01), term.name
    assert prediction.network is not None
    assert (waiting > 0.01 * whole_s) == prediction.network.has_contention


def test_advice_is_what_a_prediction_of_the_change_says() -> None:
    mixed = tuple(8 * node + local for node in (0, 2, 1, 3) for local in range(8))
    job = job_on(LEAVES, {"dp_shard": 32, "placement": mixed})
    prediction = predict(job)
    advice = {sentence.words: sentence for sentence in network_advice(prediction)}
    changes: dict[str, dict[str, Any]] = {
        "oversubscription 1 removes contention": {"cluster.topology": LEAVES.with_changes(oversubscription=1.0)},
        "give ranks to nodes in the order node0, node1, node2, node3": {"plan.placement": None},
        "shards inside a leaf (dp_shard 16, dp_replicate 2)": {"plan.dp_shard": 16, "plan.dp_replicate": 2},
    }
    for words, change in changes.items():
        changed = predict(job.with_changes(change))
        assert advice[words].step_time_s == pytest.approx(changed.step_time_s, rel=1e-9), words
        assert advice[words].saving == pytest.approx(1 - changed.step_time_s / prediction.step_time_s)
    assert [sentence.saving for sentence in network_advice(prediction)] == sorted(
        (sentence.saving for sentence in advice.values()), reverse=True
    )
    text = explanation_text(explain(prediction))
    assert "each of these changes was tried" in text
    assert "waiting for links" in text
    assert network_advice(predict(job_on(LEAVES.with_changes(oversubscription=1.0)))) == ()


def test_advice_on_a_graph_names_its_cables() -> None:
    links = [{"between": [f"node{node}", f"leaf{node // 2}"], "gbit": 3200.0} for node in range(4)]
    links += [{"between": [f"leaf{leaf}", "spine"], "gbit": 400.0} for leaf in (0, 1)]
    graph = Graph.model_validate({"kind": "graph", "links": links}, strict=False)
    words = [sentence.words for sentence in network_advice(predict(job_on(graph)))]
    assert any(says(text, "8 times", "bandwidth", "2 cables", "leaf0 - spine", "contention") for text in words)


def test_a_search_says_the_slowest_link_and_contention() -> None:
    space = SearchSpace(tp=(1,), pp=(1,), dp_replicate=(1,), zero_stage=(3,), recompute=("none",), top=1)
    result = search(job_on(LEAVES), space)
    assert result.best is not None
    network = predict(job_on(LEAVES).with_plan(result.best.plan)).network
    assert network is not None
    text = search_text(result)
    assert f"  {network.label} {network.slowest_words()}\n" in text
    assert f"  contention   {network.contention_words()}\n" in text
    assert result.best.to_json()["contention"] == network.contention_words()


def test_labels_keep_what_differs() -> None:
    names = [f"pod{pod}.aggregation{switch}" for pod in range(2) for switch in range(2)]
    names += [f"group{group}.router{router}" for group in range(3) for router in range(3)]
    assert len({shortened(name, 13) for name in names}) == len(names)
    assert all(len(shortened(name, 13)) <= 13 for name in names)
    cluster = catalog.cluster("dgx-h100", 128).model_copy(update={"topology": FatTree(kind="fat_tree", radix=8)})
    labels = [label.text for label in ElementTree.fromstring(fabric_svg(draw_fabric(cluster))).iter(f"{SVG}text")]
    shown = [label for label in labels if label is not None and label.startswith("pod") and "…" in label]
    assert len(set(shown)) == len(shown) > 1
