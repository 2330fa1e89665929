"""Scenarios, searches and commands with names that people type: equal to those with the names of the catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from simplan.errors import SpecError
from simplan.scenario import load_scenario, load_search, scenario_from
from simplan.scenario.source import read_source
from tests.support.problems import refuses

PLAN = {"training": {"global_batch_size": 64}, "plan": {"dp_shard": 16}}


@pytest.mark.parametrize(
    ("typed", "named", "sentences"),
    [
        ({"preset": "2x8 H100"}, {"preset": "dgx-h100", "num_nodes": 2}, ["2x8 H100: cluster dgx-h100, 2 nodes"]),
        ({"preset": "16x h100"}, {"preset": "dgx-h100", "num_devices": 16}, ["16x h100: cluster dgx-h100, 16 devices"]),
        ({"preset": "8x H100", "num_nodes": 2}, {"preset": "dgx-h100", "num_nodes": 2}, ["8x H100: cluster dgx-h100"]),
        (
            {"preset": "4x H100", "num_devices": 16},
            {"preset": "dgx-h100", "devices_per_node": 4, "num_devices": 16},
            ["4x H100: cluster dgx-h100, 4 per node"],
        ),
        (
            {"preset": "16x A100 PCIe 80GB", "inter_link": "InfiniBand 200 gbit"},
            {"device": "a100-pcie-80gb", "devices_per_node": 8, "num_devices": 16, "inter_link": "network-200gbit"},
            [
                "InfiniBand 200 gbit: link network-200gbit",
                "16x A100 PCIe 80GB: device a100-pcie-80gb, 16 devices, 8 per node",
            ],
        ),
        (
            {"device": {"preset": "MI300X OAM"}, "devices_per_node": 16},
            {"device": {"preset": "mi300x"}, "devices_per_node": 16},
            ["MI300X OAM: device mi300x"],
        ),
        (
            {"nodes": [{"preset": "DGX H100"}, {"preset": "8x A100 80GB"}]},
            {"nodes": [{"preset": "dgx-h100"}, {"preset": "dgx-a100-80gb"}]},
            ["DGX H100: cluster dgx-h100", "8x A100 80GB: cluster dgx-a100-80gb"],
        ),
    ],
)  # fmt: skip
def test_scenario_with_typed_names_is_that_of_the_catalog(
    tmp_path: Path, typed: dict[str, Any], named: dict[str, Any], sentences: list[str]
) -> None:
    file = tmp_path / "typed.yaml"
    model, software = {"preset": "Llama 3.2 1B"}, {"preset": "FSDP2"}
    file.write_text(yaml.safe_dump({"model": model, "cluster": typed, "software": software, **PLAN}))
    scenario = load_scenario(file)
    plain = {"model": {"preset": "llama3.2-1b"}, "cluster": named, "software": {"preset": "torch"}, **PLAN}
    assert scenario.job == scenario_from(plain).job
    assert scenario.assumptions == ("Llama 3.2 1B: model llama3.2-1b", "FSDP2: framework torch", *sentences)
    assert read_source(str(file)).document.data == plain, "as a suggested file has it"
    file.write_text(yaml.safe_dump({"model": model, "cluster": typed, "search": {}, "training": PLAN["training"]}))
    assert load_search(file).assumptions == ("Llama 3.2 1B: model llama3.2-1b", *sentences)


def test_model_is_found_by_what_people_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source in ("meta-llama/Llama-3.1-8B", "Llama 3.1 8B"):
        scenario = scenario_from(source, {"cluster.preset": "4x DGX H100", "plan.tp": 8})
        assert (scenario.name, scenario.job.model.name) == ("llama3.1-8b", "llama3.1-8b")
        assert scenario.job.cluster.num_nodes == 4
        assert scenario.assumptions[:2] == (f"{source}: model llama3.1-8b", "4x DGX H100: cluster dgx-h100, 4 nodes")
    for source, rule in {
        "llama3": "llama3: may be several models; name one of llama3-8b, llama3-70b, llama3-405b",
        "meta-llama/Llama-3.1-9B": "is neither a file nor a model of the catalog; did you mean llama3.1-8b",
        "runs/llama3-8b": "does not exist; check the path",
        "./llama3-8b": "does not exist; check the path",
        "llama3-8b.yaml": "does not exist",
    }.items():
        (tmp_path / "runs").mkdir(exist_ok=True)
        with pytest.raises(SpecError) as caught:
            scenario_from(source)
        assert rule in str(caught.value)


def test_pasted_text_that_is_nothing_known_says_what_was_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "pasted.txt"
    file.write_text("epoch 1 loss 3.2\nepoch 2 loss 2.9\n")
    with pytest.raises(SpecError, match=r"looked for .*scenario.*config.json.*NeMo.*`simplan compare"):
        scenario_from(file)


def test_cluster_that_contradicts_its_name_is_refused() -> None:
    override = {"cluster.preset": "2x8 H100"}
    file = {"model": {"preset": "gpt2"}, "cluster": {"preset": "dgx-v100", "num_nodes": 4}, **PLAN}
    assert scenario_from(file, override).job.cluster.num_devices == 16, "the file's number is that of its own cluster"
    with refuses("cluster.num_nodes", "4", rule='is given twice: "2x8 H100" says', fix="give one of the two"):
        scenario_from(file, {**override, "cluster.num_nodes": 4})


@pytest.mark.parametrize("cluster", [{"device": "rtx-4090", "num_devices": 1}, {"device": "4090"}])
def test_one_device_needs_no_devices_per_node(cluster: dict[str, Any]) -> None:
    scenario = scenario_from("gpt2", {f"cluster.{key}": value for key, value in cluster.items()})
    assert (scenario.job.cluster.num_devices, scenario.job.cluster.devices_per_node) == (1, 1)
    whole = {
        "model": {"preset": "gpt2"},
        "cluster": {"num_devices": 1, **cluster},
        "training": {"global_batch_size": 1},
    }
    assert scenario_from({**whole, "plan": {"dp_replicate": 1}}).job.cluster == scenario.job.cluster
