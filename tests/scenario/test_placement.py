"""Placements in scenario files: orders of axes, lists of devices, and rank files next to the scenario."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from simplan.errors import SpecError
from simplan.scenario import load_scenario, parse_scenario, scenario_from
from simplan.scenario.file import relocated
from simplan.scenario.search import load_search
from simplan.scenario.text import parse_search
from tests.support.problems import refuses

TEXT = """
name: placed
model: {preset: gpt2-124m, vocab_size: 50304}
cluster: {preset: dgx-h100, num_nodes: 2}
training: {global_batch_size: 16}
plan: {tp: 2, dp_replicate: 8, placement: PLACEMENT}
"""
ROWS = "".join(f"{rank},{rank % 2},{rank // 2}\n" for rank in range(16))


def written(folder: Path, placement: str) -> Path:
    (folder / "placed.yaml").write_text(TEXT.replace("PLACEMENT", placement))
    (folder / "ranks.csv").write_text("rank,node,device\n" + ROWS)
    return folder / "placed.yaml"


def test_rank_file_is_the_order_that_it_writes_out(tmp_path: Path) -> None:
    """Tensor-parallel pairs across two nodes, one rank of each on either."""
    by_file, by_order = (load_scenario(written(tmp_path, text)).job for text in ("ranks.csv", "[dp, tp]"))
    assert by_file.plan.placement == tuple(rank % 2 * 8 + rank // 2 for rank in range(16))
    assert by_file.placement is not None
    assert by_order.placement is not None
    assert by_file.placement.devices == by_order.placement.devices
    assert [by_file.node_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    override = scenario_from(written(tmp_path, "[tp, dp]"), {"plan.placement": str(tmp_path / "ranks.csv")})
    assert override.job.plan == by_file.plan


def test_rank_file_is_found_from_another_folder(tmp_path: Path) -> None:
    data = yaml.safe_load(written(tmp_path, "ranks.csv").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "moved.yaml").write_text(yaml.safe_dump(relocated(data, tmp_path, other)))
    assert load_scenario(other / "moved.yaml").job == load_scenario(tmp_path / "placed.yaml").job


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (
            "none.csv",
            r"placed.yaml:6:32: plan.placement = .*none.csv: cannot be read: No such file or directory; name a",
        ),
        (
            "[tp]",
            r"placed.yaml:6:32: plan.placement = \[tp\]: must name every axis of several ranks, and dp_replicate = 8",
        ),
        ("[0, 1]", r"placed.yaml:6:32: plan.placement = \[0, 1\]: has 2 devices and the plan has 16 ranks"),
        ("tp, dpp", r"placed.yaml:6:32: plan.placement = .*: has 'dpp', which is no axis; did you mean"),
    ],
)
def test_wrong_placement_is_a_sentence_with_its_line(placement: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=said):
        load_scenario(written(tmp_path, placement if "," not in placement or "[" in placement else f'"{placement}"'))


def test_text_cannot_name_a_rank_file() -> None:
    with refuses("plan.placement", rule="names a file, which a scenario"):
        parse_scenario(TEXT.replace("PLACEMENT", "ranks.csv"))


SWAPPED = "node1 slots=8\nnode0 slots=8\n"


def test_hostfiles_and_the_network_name_orders_of_nodes(tmp_path: Path) -> None:
    """In a plan and in a search; two nodes on one leaf follow each other already."""
    (tmp_path / "job.hostfile").write_text(SWAPPED)
    swapped, straight = (*range(8, 16), *range(8)), tuple(range(16))
    assert load_scenario(written(tmp_path, "job.hostfile")).job.plan.placement == swapped
    with refuses("plan.placement", "network", rule="orders nodes by their switches"):
        load_scenario(written(tmp_path, "network"))
    leaves = ", topology: {kind: leaf_spine, nodes_per_leaf: 2}}"
    file = written(tmp_path, "network")
    file.write_text(file.read_text().replace("num_nodes: 2}", f"num_nodes: 2{leaves}"))
    assert load_scenario(file).job.plan.placement == straight
    search = file.read_text().replace("plan:", "search: {placement: [[tp, dp], network, job.hostfile]} #")
    file.write_text(search)
    assert load_search(file).space.placement == (("tp", "dp"), straight, swapped)
    moved = relocated(yaml.safe_load(search), tmp_path, tmp_path / "other")
    assert moved["search"]["placement"] == [["tp", "dp"], "network", "../job.hostfile"]
    with refuses("search.placement.2", rule="names a file, which a scenario"):
        parse_search(search)
