"""The page for coding agents and llms.txt: what they name exists, and no command is left out."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import typer.main
import yaml

from docs.generate import pages
from simplan.cli.app import app, main
from simplan.documentation import documentation
from tests.release.steps import ROOT

DOCS = ROOT / "docs"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def rows(page: str, head: str) -> list[list[str]]:
    """Cells of the table with this head cell."""
    table = (DOCS / page).read_text().partition(f"\n| {head} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def codes_of_files() -> dict[str, str]:
    return dict(rows("reference/files.md", "code"))


def test_page_for_agents_has_every_command_and_exit_code() -> None:
    """A command has `--json` as the page says, and the codes are those of the page of output files."""
    table = rows("reference/agents.md", "command")
    assert {name.strip("`") for name, *_ in table} == COMMANDS.keys()
    codes = codes_of_files()
    assert {code for *_, cell in table for code in cell.split(", ") if cell} <= codes.keys()
    assert {code for code, *_ in rows("reference/agents.md", "exit code")} == codes.keys()
    without = {
        name for name, command in COMMANDS.items() if not any("--json" in param.opts for param in command.params)
    }
    assert without == {"dashboard", "report"}
    of_expectations = {name.strip("`") for name, _, cell in table if "1" in cell.split(", ")}
    assert of_expectations == set(re.findall(r"`(\w+)`", codes["1"]))


def test_options_of_the_questions_are_those_of_commands() -> None:
    known = {option for command in COMMANDS.values() for param in command.params for option in param.opts}
    asked = {option for row in rows("reference/agents.md", "ask for") for option in re.findall(r"--[\w-]+", row[1])}
    assert len(asked) > 10
    assert asked <= known


def test_keys_of_a_prediction_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """In the JSON of a job that does not fit, so that it has fixes, with a length and a price."""
    plan = ["--cluster", "dgx-h100", "--num-nodes", "1", "--dp-shard", "8", "--microbatch-size", "8"]
    assert main(["predict", "llama2-13b", *plan, "--tokens", "1e9", "--price", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    verdicts, *others = [row[1] for row in rows("reference/agents.md", "key")]
    assert document["memory_verdict"] in re.findall(r"`([a-z ]+)`", verdicts)[1:], "not safe"
    for row in rows("reference/agents.md", "key"):
        for name in re.findall(r"`([\w.]+)`", row[0]):
            value: Any = document
            for part in name.split("."):
                assert part in value, name
                value = value[part]
    [of_run] = [meaning for meaning in others if "days_interval" in meaning]
    assert set(re.findall(r"`(\w+)`", of_run)) <= document["training_run"].keys()


def test_llms_txt_has_the_convention_and_links_to_pages() -> None:
    """A title, a summary as a quotation, then lists of links with a description each (llmstxt.org)."""
    title, summary, *rest = (DOCS / "llms.txt").read_text().split("\n\n")
    assert title == "# simplan"
    assert all(line.startswith("> ") for line in summary.splitlines())
    paths = {*pages(), *(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))}
    known = {documentation(path.removesuffix(".md").removesuffix("/index")) for path in paths}
    lists = [block for block in rest if block.startswith("- ")]
    assert len(lists) == 4
    for line in "\n".join(lists).splitlines():
        link = re.fullmatch(r"- \[[^]]+\]\((\S+)\): \S.*", line)
        assert link is not None, line
        assert link.group(1) in known, line


def test_pages_that_the_action_names_exist() -> None:
    """Inputs and outputs of action.yml are on the page about CI."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    text = (DOCS / "how-to/ci.md").read_text()
    for name in [*action["inputs"], *action["outputs"]]:
        assert f"`{name}`" in text, name
