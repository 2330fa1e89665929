"""Choices by name and of numbers: clusters as the command line reads them, and a plan or a batch for every size."""

from __future__ import annotations

from typing import Any

import pytest

from app.choosing import (
    kind_of,
    open_links,
    with_adapters,
    with_framework,
    with_kind,
    with_link,
    with_model,
    with_size,
    without_defaults,
)
from app.fitting import cluster_size, document_text, fitting_batches, mended, with_value
from app.labels import label
from app.state import USUAL
from simplan import catalog
from simplan.catalog import Kind
from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.machine import THIS_MACHINE, num_cores
from simplan.errors import SpecError
from simplan.scenario import parse_scenario, scenario_from
from tests.app.questions import is_valid
from tests.support.problems import refuses

Document = dict[str, Any]
ONE: Document = {"model": {"preset": "gpt2-124m"}, "cluster": {"preset": "dgx-h100", "num_devices": 1}}
ONE |= {"training": {"global_batch_size": 144}, "plan": {}}


def cluster_of(document: Document) -> ClusterSpec:
    return parse_scenario(document_text(mended(document)[0])).job.cluster


@pytest.mark.parametrize("name", catalog.names("devices"))
def test_cluster_of_a_device_is_that_of_the_command_line(name: str) -> None:
    document, notes = with_kind(ONE, name)
    assert document["cluster"] == {"device": name, "num_devices": 1}
    assert (kind_of(document), notes) == (name, [])
    for number in (1, 2, 8):
        changed = with_size(document, number, "num_devices")
        overrides: Document = {"cluster.device": name, "cluster.num_devices": number}
        is_open = number > 1 and catalog.device(name).intra_link is None
        assert open_links(changed) == (("intra_link",) if is_open else ())
        if is_open:
            with refuses("cluster.intra_link", rule="is missing"):
                scenario_from("gpt2", overrides)
            changed, overrides["cluster.intra_link"] = with_link(changed, "PCIe 4", "intra_link"), "pcie4"
        assert cluster_of(changed) == scenario_from("gpt2", overrides).job.cluster


@pytest.mark.parametrize("text", ["8x A100 80GB", "2x8 H100", "8x 4090", "4x MI300X", "2x GB200 NVL72"])
def test_typed_hardware_is_that_of_the_command_line(text: str) -> None:
    document, _ = with_kind(ONE, text)
    assert cluster_of(document) == scenario_from("gpt2", {"cluster.preset": text}).job.cluster


@pytest.mark.parametrize("name", [*catalog.names("clusters"), *catalog.names("devices")])
def test_every_kind_replaces_the_nodes_of_the_first_page(name: str) -> None:
    document, _ = mended(with_kind(USUAL, name)[0])
    assert kind_of(document) == name
    if "intra_link" in open_links(document):
        document, _ = mended(with_link(document, "pcie5", "intra_link"))
    assert is_valid(document)
    if name != THIS_MACHINE:
        assert cluster_of(document).num_devices == 64
        back = with_kind(document, "dgx-h100")[0]
        assert cluster_of(back) == cluster_of(USUAL)


@pytest.mark.parametrize(
    ("choose", "text", "candidates"),
    [
        (with_model, "llama-3", "llama3-8b, llama3-70b, llama3-405b"),
        (with_kind, "a100", "dgx-a100-40gb, dgx-a100-80gb"),
        (with_kind, "A100 card", "a100-sxm-80gb, a100-pcie-80gb, a100-sxm-40gb, a100-pcie-40gb"),
        (with_framework, "megatron", "megatron-core, megatron-bridge, megatron-deepspeed"),
    ],
)
def test_unclear_name_says_what_it_may_stand_for(choose: Any, text: str, candidates: str) -> None:
    with pytest.raises(SpecError) as error:
        choose(USUAL, text)
    [problem] = error.value.problems
    assert problem.value == text
    assert candidates in problem.fix
    assert "--device" not in problem.fix, "an option of the command line"


@pytest.mark.parametrize(
    ("cluster", "key", "value", "spelled"),
    [
        ({"num_devices": 64}, "num_nodes", 4, {"num_nodes": 4}),
        ({"num_nodes": 4}, "num_devices", 12, {"num_devices": 12}),
        ({"num_nodes": 4}, "devices_per_node", 4, {"num_nodes": 4, "devices_per_node": 4}),
        ({"num_devices": 64}, "devices_per_node", 4, {"num_devices": 32, "devices_per_node": 4}),
        ({"num_nodes": 4, "devices_per_node": 4}, "devices_per_node", 8, {"num_nodes": 4}),
        ({"num_nodes": 4, "devices_per_node": 4}, "devices_per_node", None, {"num_nodes": 4}),
    ],
)
def test_numbers_are_written_as_they_were_changed(
    cluster: Document, key: str, value: int | None, spelled: Document
) -> None:
    changed = with_size({"cluster": {"preset": "dgx-h100", **cluster}}, value, key)
    assert changed == {"cluster": {"preset": "dgx-h100", **spelled}}


@pytest.mark.parametrize(
    ("key", "value", "spelled"),
    [
        ("num_devices", 4, {"num_devices": 4, "devices_per_node": 4}),
        ("num_devices", 16, {"num_devices": 16, "devices_per_node": 8}),
        ("devices_per_node", 4, {"num_devices": 4, "devices_per_node": 4}),
        ("num_nodes", 2, {"num_nodes": 2, "devices_per_node": 1}),
    ],
)
def test_nodes_of_one_device_grow(key: str, value: int, spelled: Document) -> None:
    single = {"cluster": {"device": "rtx-4090", "num_devices": 1}}
    changed = with_size(single, value, key)
    assert changed == {"cluster": {"device": "rtx-4090", **spelled}}
    assert with_size(with_size(changed, 1, "num_nodes"), 1, "devices_per_node") == single


@pytest.mark.parametrize("model", ["llama3-70b", "gpt2-1.5b"])
@pytest.mark.parametrize("kind", ["dgx-h100", "rtx-4090"])
@pytest.mark.parametrize(
    "plan", [{"tp": 8, "dp_shard": 8, "recompute": "full"}, {"dp_shard": 64, "microbatch_size": 2, "recompute": "full"}]
)
def test_every_number_of_devices_has_a_plan_or_a_batch(model: str, kind: str, plan: Document) -> None:
    document, _ = with_kind({**USUAL, "model": {"preset": model}, "plan": plan}, kind)
    for number in (1, 2, 3, 5, 7, 8, 9, 12, 16, 24, 31, 32, 40, 48, 63, 64):
        changed, _ = mended(with_size(document, number, "num_devices"))
        assert cluster_size(changed).num_devices == number
        batches = fitting_batches(changed)
        assert bool(batches) is not is_valid(changed), number
        for batch in batches:
            with_batch = with_value(changed, ("training", "global_batch_size"), batch)
            assert is_valid(with_batch)
            assert abs(batch - USUAL["training"]["global_batch_size"]) < number * plan.get("microbatch_size", 1)


def test_a_change_of_nodes_keeps_what_is_of_the_job() -> None:
    cluster = {"preset": "dgx-h100", "num_nodes": 2, "price_per_device_hour": 2.5, "devices_per_node": 4}
    document, [note] = with_kind({**USUAL, "cluster": cluster}, "mi300x")
    network = catalog.node("dgx-h100").inter_link
    assert network is not None
    assert network.id in note
    assert document["cluster"] == {
        "device": "mi300x", "num_nodes": 2, "price_per_device_hour": 2.5, "devices_per_node": 4,
        "inter_link": network.id,
    }  # fmt: skip
    assert open_links(document) == ("inter_link",)
    by_card = {key: value for key, value in document["cluster"].items() if key != "inter_link"} | {"nic_gbit": 100}
    assert open_links({"cluster": by_card}) == (), "another key says the network"
    other = with_link({"cluster": by_card}, "InfiniBand 200 gbit", "inter_link")
    assert "nic_gbit" not in other["cluster"]
    assert other["cluster"]["inter_link"] == "network-200gbit"


def test_framework_keeps_the_options_that_it_has() -> None:
    options = {"preset": "torch", "compiled": True, "gradient_as_bucket_view": True}
    document, notes = with_framework({**USUAL, "software": options}, "torchtitan")
    assert document["software"] == {"preset": "torchtitan", "compiled": True}
    assert notes == ["torchtitan has no option gradient_as_bucket_view"]
    assert with_framework(document, "Megatron-Core")[0]["software"] == "megatron-core"


def test_adapters_go_with_their_task_and_model() -> None:
    document = with_adapters(USUAL, 16)
    assert (document["model"]["lora_rank"], document["training"]["task"]) == (16, "lora")
    assert with_model(document, "Qwen3 8B")["model"] == {"preset": "qwen3-8b", "lora_rank": 16}
    without = with_model(document, "ResNet-50")
    assert without["model"] == {"preset": "resnet-50"}
    assert "task" not in without["training"]
    assert with_adapters(document, None) == with_adapters(document, 0) == USUAL


def test_own_values_of_a_topology_are_not_written() -> None:
    document = {**USUAL, "cluster": USUAL["cluster"] | {"topology": "superpod-h100"}}
    changed = with_value(document, ("cluster", "topology", "oversubscription"), 2.0)
    assert changed["cluster"]["topology"] == {"preset": "superpod-h100", "oversubscription": 2.0}
    assert without_defaults(changed) == changed
    assert without_defaults(with_value(changed, ("cluster", "topology", "oversubscription"), 1.0)) == document


def test_this_machine_gets_an_example_that_it_can_run() -> None:
    document, notes = with_kind(USUAL, THIS_MACHINE)
    job = parse_scenario(document_text(mended(document)[0])).job
    assert job.cluster.num_devices <= num_cores()
    assert job.software.executable
    assert job.model.num_parameters < 1e7
    assert "small example" in notes[-1]
    again, notes = with_kind({**document, "cluster": {"preset": "dgx-h100", "num_devices": 4}}, "this machine")
    assert again["model"] == document["model"]
    assert len(notes) == 1, "a small model stays"


KINDS: tuple[Kind, ...] = ("models", "clusters", "devices", "links", "software")


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("Llama 3 70B", "models", "llama3-70b"), ("llama3-70b", "models", "llama3-70b"),
        ("mixtral 8x7b", "models", "mixtral-8x7b"), ("DeepSeek V3", "models", "deepseek-v3"),
        ("8x A100", "clusters", "dgx-a100-80gb"), ("H100 SXM", "clusters", "dgx-h100"),
        ("4090", "devices", "rtx-4090"), ("AMD MI300X", "devices", "mi300x"), ("tpu", "devices", "tpu-v5p"),
        ("A100 PCIe", "devices", "a100-pcie-80gb"), ("Gaudi3", "devices", "gaudi3"), ("NVIDIA L40S", "devices", "l40s"),
        ("PyTorch", "software", "torch"), ("NVLink 4", "links", "nvlink4"),
    ],
)  # fmt: skip
def test_label_has_the_words_that_people_type(text: str, kind: Kind, name: str) -> None:
    assert text.casefold() in label(kind, name).casefold()


@pytest.mark.parametrize("kind", KINDS)
def test_labels_tell_entries_apart(kind: Kind) -> None:
    labels = [label(kind, name) for name in catalog.names(kind)]
    assert len(set(labels)) == len(labels)
    assert [
        text for text, name in zip(labels, catalog.names(kind), strict=True) if not text.endswith(f" · {name}")
    ] == []
    others = [*labels, *catalog.names(kind)]
    assert [(label, other) for label in labels for other in others if other != label and other.startswith(label)] == []
