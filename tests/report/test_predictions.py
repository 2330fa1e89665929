"""Tables of several predictions: their order, and how certain it is."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.predict import predict
from simplan.report.predictions import compared_predictions, predictions_text
from tests.jobs import job_of
from tests.support.problems import says


def document(name: str, cluster: str | ClusterSpec, global_batch_size: int = 32) -> dict[str, Any]:
    job = job_of("llama2-7b", {"dp_shard": 8}, cluster=cluster, global_batch_size=global_batch_size)
    return predict(job, name=name).to_json()


@pytest.fixture(scope="module")
def documents() -> dict[str, dict[str, Any]]:
    node = catalog.cluster("dgx-h100").model_copy(update={"device": catalog.device("gaudi3")})
    clusters: dict[str, str | ClusterSpec] = {
        "a100": "dgx-a100-80gb",
        "h100": "dgx-h100",
        "gaudi3": node,
        "b200": "dgx-b200",
    }
    return {name: document(name, cluster) for name, cluster in clusters.items()}


def test_order_of_other_devices_is_certain_only_if_intervals_are_apart(documents: dict[str, dict[str, Any]]) -> None:
    compared = compared_predictions(documents.values())
    first, *others = compared["predictions"]
    assert first["step_time_s"] == min(predicted["step_time_s"] for predicted in documents.values())
    text = predictions_text(compared)
    lines = {line.split()[0]: line for line in text.splitlines()[1:5]}
    assert "overlap" not in lines[first["name"]]
    for predicted in others:
        apart = predicted["step_time_interval_s"][0] > first["step_time_interval_s"][1]
        assert ("no overlap" in lines[predicted["name"]]) == apart
        assert "overlap" in lines[predicted["name"]]
    assert "Devices differ: " in text
    assert says(text, "No published run on other", "gaudi3", "wide")
    assert "may be faster" in text


def test_rows_are_in_the_order_of_their_throughput(documents: dict[str, dict[str, Any]]) -> None:
    """Of the whole cluster; a smaller batch has the shorter step and the lower throughput."""
    smaller = document("smaller", "dgx-h100", 8)
    assert smaller["step_time_s"] < documents["h100"]["step_time_s"]
    assert smaller["tokens_per_s_per_device"] < documents["h100"]["tokens_per_s_per_device"]
    compared = compared_predictions([smaller, *documents.values()])
    rates = [prediction["tokens_per_s_per_device"] for prediction in compared["predictions"]]
    assert rates == sorted(rates, reverse=True)
    assert "Batches differ: 32 sequences (" in " ".join(compared["notes"])
