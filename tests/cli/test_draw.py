"""``simplan draw`` as a user calls it: text, SVG, JSON, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.calls import Simplan, refused


def test_draw_prints_a_line_for_each_rank(simplan: Simplan, scenario: Path) -> None:
    result = simplan("draw", scenario)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("small: one step in ")
    rows = [line for line in lines if line.startswith("rank ")]
    assert [row.split("│")[0].strip() for row in rows] == ["rank 0", "rank 1"]
    assert {len(row) for row in rows} == {100}, "off a terminal a line has 100 columns"
    assert "\033" not in result.stdout, "no color off a terminal"


def test_width_is_that_of_the_rows(simplan: Simplan, scenario: Path) -> None:
    rows = [line for line in simplan("draw", scenario, "--width", "140").stdout.splitlines() if "│" in line]
    assert [len(row) for row in rows] == [140, 140]


def test_json_and_svg_hold_the_same_boxes(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.svg"
    result = simplan("draw", scenario, "--json", "-o", file)
    assert result.returncode == 0
    assert str(file) in result.stderr
    document = json.loads(result.stdout)
    assert (document["kind"], document["schema_version"], document["num_microbatches"]) == ("drawing", 1, 8)
    boxes = [box for row in document["rows"] for box in row["boxes"]]
    assert {box["kind"] for box in boxes} >= {"F", "B", "OPTIM"}
    drawn = ElementTree.parse(file).getroot().findall("{http://www.w3.org/2000/svg}g[@class='box']")
    assert len(drawn) == len(boxes)


def on_terminal(scenario: Path, environment: dict[str, str], columns: int, **more: str) -> str:
    """What the command prints to a terminal of some width."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "simplan", "draw", str(scenario)]
    env = {**environment, "COLUMNS": str(columns), **more}
    with subprocess.Popen(command, stdout=theirs, stdin=theirs, env=env) as process:
        os.close(theirs)
        received = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # Linux's end of file on a terminal
                break
            if not chunk:
                break
            received += chunk
        assert process.wait(600) == 0
    os.close(ours)
    return received.decode()


def test_a_terminal_gets_colour_and_its_width(scenario: Path, environment: dict[str, str]) -> None:
    environment = {key: value for key, value in environment.items() if key != "NO_COLOR"}
    assert "\033[34mF" in on_terminal(scenario, environment, 120)
    plain = on_terminal(scenario, environment, 120, NO_COLOR="1")
    assert "\033" not in plain
    assert {len(line) for line in plain.splitlines() if line.startswith("rank ")} == {120}
    narrow = on_terminal(scenario, environment, 20, NO_COLOR="1")
    assert {len(line) for line in narrow.splitlines() if line.startswith("rank ")} == {60}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-o", "small.png"], "--output = small.png: must end in .svg; write small.svg"),
        (["-o", "small"], "--output = small: must end in .svg; write small.svg"),
        (["-o", "no/small.svg"], "no/small.svg: cannot be written: No such file or directory"),
        (["--width", "59"], "--width"),
        (["--width", "wide"], "--width"),
        (["--width", "nan"], "--width"),
    ],
)
def test_undrawable_input_is_refused(args: list[str], message: str, simplan: Simplan, scenario: Path) -> None:
    refused(simplan("draw", scenario, *args), "error: ", message)


def test_a_folder_is_no_picture(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    said = "error: folder.svg: cannot be written: Is a directory; check that its folder exists and may be written\n"
    refused(simplan("draw", scenario, "-o", "folder.svg"), said)


def test_a_bad_scenario_and_an_unused_calibration_are_refused(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    assert "did you mean" in simplan("draw", tmp_path / "smal.yaml").stderr
    refused(simplan("draw", scenario, "--calibration", tmp_path / "c.json"), "c.json")


@pytest.mark.slow
def test_a_terminal_without_more_than_ascii_gets_the_same_picture(scenario: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "simplan", "draw", str(scenario), "--width", "100"]
    drawings = [
        subprocess.run(command, capture_output=True, text=True, env=environment | more, check=True).stdout
        for more in ({"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "utf-8"})
    ]
    assert drawings[0].isascii()
    assert not drawings[1].isascii()
    assert "?" not in drawings[0]
    assert [len(line) for line in drawings[0].splitlines()] == [len(line) for line in drawings[1].splitlines()]


def test_network_is_drawn_in_place_of_the_step(simplan: Simplan, tmp_path: Path) -> None:
    file = tmp_path / "network.svg"
    job = ("gpt2-124m", "--gpus", "64", "--set", "cluster.topology=superpod-h100", "--network")
    result = simplan("draw", *job, "-o", file)
    assert result.returncode == 0, result.stderr
    assert "rail-optimized, 32 nodes per group, 1:1" in result.stdout
    assert "nic - rail         64   50 GB/s   3.2 TB/s" in result.stdout
    ElementTree.parse(file)
    assert json.loads(simplan("draw", *job, "--json").stdout)["kind"] == "network_drawing"
    refused(
        simplan("draw", *job, "--width", "90"), "--width = 90: has no meaning with --network; remove one of the two"
    )


def test_load_of_links_is_drawn_in_place_of_the_step(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    file = tmp_path / "load.svg"
    sites = "cluster.topology={kind: sites, nodes_per_site: 4, gbit_per_site: 100, latency_s: 0.001}"
    job = ("gpt2-124m", "--gpus", "64", "--set", sites, "--load")
    result = simplan("draw", *job, "-o", file)
    assert result.returncode == 0, result.stderr
    assert "site0.switch -> wan" in result.stdout
    assert "contention costs" in result.stdout
    titles = [title.text or "" for title in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}title")]
    assert any(title.startswith("site0.switch -> wan (12.5 GB/s)") for title in titles)
    assert json.loads(simplan("draw", *job, "--json").stdout)["kind"] == "link_load"
    refused(simplan("draw", scenario, "--load"), "--load: needs links, and the cluster has no topology")
