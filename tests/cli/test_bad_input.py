"""Bad input at the command line: exit code 2, a sentence with file and line, never a traceback, never a hang."""

from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path

import pytest
import typer.main

from simplan.cli.app import app
from simplan.cli.listing import KINDS
from simplan.cli.terminal.options import OUTPUTS
from simplan.cli.terminal.output import coloured, print_result
from simplan.cost.calibration.format import Calibration
from simplan.cost.calibration.store import save
from tests.cli.calls import Simplan, bash, here, refused
from tests.support.problems import says

CALIBRATION = Calibration(created="2026-01-01T00:00:00Z", device_kind="cpu", num_cores=2, memory_bytes=2**30)


# what is replaced in the good scenario, by what, and what the message must hold; tests/bad_input has all sentences
MISTAKES = {
    "misspelt key": ("num_attention_heads", "num_atention_heads", ":2:", "did you mean num_attention_heads?"),
    "not modeled": ("pp: 2", "pp: 2, grad_dtype: bf16", ":5:", "is not modeled yet"),
    "not YAML": ("plan: {", "plan: }", ":5:", "this is not YAML"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_scenario(name: str, simplan: Simplan, scenario: Path) -> None:
    old, new, place, message = MISTAKES[name]
    scenario.write_text(scenario.read_text().replace(old, new, 1))
    refused(simplan("predict", scenario), "error: ", f"{scenario}{place}", message)


@pytest.mark.parametrize("content", [b"", bytes(range(256)) * 8, b"[" * 100_000, b"#" * (5 * 2**20)])
def test_files_that_are_no_scenario(content: bytes, simplan: Simplan, scenario: Path) -> None:
    scenario.write_bytes(content)
    refused(simplan("predict", scenario), str(scenario))


def test_a_missing_file_names_the_nearest(simplan: Simplan, scenario: Path) -> None:
    refused(simplan("predict", scenario.with_name("smal.yaml")), "smal.yaml", "small.yaml")


def test_a_link_to_nothing_says_so(simplan: Simplan, tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to("gone.yaml")
    refused(simplan("predict", link), "is a link to gone.yaml, which does not exist")


@pytest.mark.parametrize(
    "command",
    [
        "predict {0} -o {0}",
        "predict -o {1} {0}",
        "predict {0} --trace {0}",
        "draw {0} -o {0}",
        "trace {0} -o {1}",
        "export {0} --to slurm -o {0}",
        "search {0} --save-plan {0}",
        "check {0} --junit {0}",
    ],
)
def test_no_output_replaces_its_input(command: str, simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    """Under its own name, or under that of a link to it."""
    link = tmp_path / "link.yaml"
    link.symlink_to(scenario)
    before = scenario.read_text()
    refused(simplan(*command.format(scenario, link).split()), "is the file that the command reads; name another file")
    assert scenario.read_text() == before


def test_every_file_that_a_command_writes_is_one_of_the_outputs() -> None:
    """Options whose help says ``File for``."""
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    options = [param for command in commands for param in command.params if (getattr(param, "help", "") or "")]
    assert {param.name for param in options if param.help.startswith("File for")} - {"write_scenario"} == OUTPUTS


def test_texts_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Our own colors pass; the same colors in a text of the user's, and all that cannot be seen, do not."""
    steering = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode's own classes, independent of our rule
    hidden = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in steering]
    print_result(coloured("green", 32) + " \x1b[31mred " + "".join(set(hidden) - {"\n", "\t"}))
    out = capsys.readouterr().out
    assert out.startswith("\x1b[32mgreen\x1b[0m \\x1b[31mred ")
    assert not set(out.removeprefix("\x1b[32mgreen\x1b[0m").rstrip("\n")) & set(hidden)


STEERING = "n\x1b[31m\x9b5m\u202e\u2066\u200fx"


@pytest.mark.parametrize(
    "command",
    [
        "predict {name}", "predict gpt2-124m --cluster {name}", "predict {file}", "search {file}", "explain {file}",
        "check {file}", "draw {file}", "trace {file} -o {out}", "export {file} --to slurm", "import {file}",
        "compare {file} {file}", "show models {name}", "show {name}", "run {file}", "rehearse {file}", "{name}",
        "predict gpt2-124m --set {name}=1", "predict gpt2-124m --{name} 1",
    ],
)  # fmt: skip
def test_names_of_the_user_cannot_steer_a_terminal(command: str, simplan: Simplan, tmp_path: Path) -> None:
    """Names on the command line, and of a file: its own, a preset and keys."""
    file = tmp_path / f"{STEERING}.yaml"
    named = json.dumps(STEERING)
    file.write_text(
        f"name: {named}\nmodel: {{preset: {named}}}\n{named}: 1\ncluster: {{{named}: 1, preset: {named}}}\n"
    )
    args = [word.format(name=STEERING, file=file, out=tmp_path / "t.json") for word in command.split()]
    result = simplan(*args)
    assert result.returncode == 2
    printed = set(result.stdout + result.stderr)
    assert not [character for character in printed - {"\n"} if not character.isprintable()]


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        (">&-", "error: what is printed cannot be written: its stream is closed\n"),
        ("2>/dev/full", ""),
        ("2>&-", ""),
    ],
)
def test_streams_that_cannot_be_written_to(redirection: str, said: str, environment: dict[str, str]) -> None:
    """Exit code 1 means that an expectation failed, and 70 a bug: neither is true."""
    result = bash(f"{sys.executable} -m simplan show nothing-like-that {redirection}", environment)
    if redirection == ">&-":
        result = bash(f"{sys.executable} -m simplan show metrics {redirection}", environment)
    assert (result.returncode, result.stderr) == (2, said)


def test_a_full_disk_is_told_as_a_sentence(environment: dict[str, str]) -> None:
    result = bash(f"{sys.executable} -m simplan show metrics > /dev/full", environment)
    assert result.returncode == 2
    assert says(result.stderr, "error: ", "cannot be written", "No space left on device\n")


def test_several_mistakes_are_told_at_once(simplan: Simplan, scenario: Path) -> None:
    scenario.write_text(scenario.read_text().replace("hidden_size: 64", "hidden_size: -1").replace("gpipe", "gpip"))
    result = simplan("predict", scenario)
    refused(result, f"{scenario}:2:", f"{scenario}:5:")
    assert all(line.startswith("error: ") for line in result.stderr.splitlines())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["predikt", "x"], "predict"),
        (["predict"], "SCENARIO"),
        (["predict", "--jsn", "x"], "--jsn"),
        (["run", "x", "--steps", "0"], "--steps"),
        (["run", "x", "--timeout", "nan"], "--timeout"),
        (["calibrate", "--budget", "inf"], "--budget"),
        (["calibrate", "--ranks", "many"], "--ranks"),
        (["trace", "x"], "--output"),
        (["show", "devices-of-mine"], "devices"),
        (["show", "devices", "h100"], "h100"),
        (["show", "metrics", "mf"], "mfu"),
    ],
)
def test_bad_usage(args: list[str], message: str, simplan: Simplan) -> None:
    refused(simplan(*args), message)


def test_check_of_a_missing_file_is_a_result(simplan: Simplan) -> None:
    result = simplan("check", "missing.yaml")
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)


def test_this_machine_without_a_calibration_says_what_to_do(simplan: Simplan, scenario: Path) -> None:
    scenario.write_text(here(scenario.read_text()))
    refused(simplan("predict", scenario), str(scenario), "simplan calibrate")
    refused(simplan("predict", scenario, "--calibration", "none.json"), "none.json", "does not exist")


@pytest.mark.parametrize("content", ["", "{}", '{"schema_version": 1, "device_kind": 3}'])
def test_a_broken_calibration(content: str, simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    scenario.write_text(here(scenario.read_text()))
    broken = tmp_path / "calibration.json"
    broken.write_text(content)
    refused(simplan("predict", scenario, "--calibration", broken), str(broken))


def test_compare_with_two_predictions(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    predicted = tmp_path / "predicted.json"
    assert simplan("predict", scenario, "-o", predicted).returncode == 0
    result = simplan("compare", predicted, predicted)
    refused(result, f"{predicted}: is a prediction; `simplan report FIRST.json SECOND.json` compares two predictions, ")
    assert len(result.stderr.splitlines()) == 1


def test_compare_with_a_scenario_and_a_table(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    predicted, log = tmp_path / "predicted.json", tmp_path / "log.csv"
    log.write_text("step,time\n1,2.4\n")
    assert simplan("predict", scenario, "-o", predicted).returncode == 0
    fix = "has no lines of steps that simplan knows; it knows those of Megatron-LM"
    refused(simplan("compare", predicted, log), f"{log}: {fix}")
    refused(simplan("compare", scenario, log), f"{log}: {fix}")
    log.with_suffix(".yaml").write_text("step_time_s: 1\n")
    texts = [simplan("compare", file, log.with_suffix(".yaml")).stdout for file in (predicted, scenario)]
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize("content", ["[1]", '{"schema_version": 2, "kind": "prediction"}'])
def test_compare_with_broken_files(content: str, simplan: Simplan, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(content)
    refused(simplan("compare", broken, broken), str(broken))


def test_outputs_that_cannot_be_written(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    refused(simplan("trace", scenario, "-o", tmp_path / "no" / "trace.json"), "no/trace.json")
    refused(simplan("predict", scenario, "-o", tmp_path), str(tmp_path))
    result = simplan("check", scenario, "--junit", tmp_path / "no" / "junit.xml")
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert "no/junit.xml" in result.stderr


def test_a_precision_that_cannot_be_run_is_refused_by_name(simplan: Simplan, scenario: Path) -> None:
    scenario.write_text(
        scenario.read_text().replace("{global_batch_size: 8}", "{global_batch_size: 8, precision: fp16}")
    )
    refused(simplan("run", scenario), str(scenario), "training.precision = fp16")


def test_every_kind_that_help_names_exists(simplan: Simplan) -> None:
    text = " ".join(simplan("show", "--help").stdout.split()).replace("- ", "-")  # lines end at hyphens
    named = text.partition("KIND")[2].replace("; and the keys of a scenario's ", ", ").replace(" or ", ", ")
    assert ", ".join(KINDS) in named


@pytest.mark.parametrize("command", [["predict"], ["trace", "-o", "t.json"], ["run"]])
def test_a_calibration_of_another_device_is_refused(
    command: list[str], simplan: Simplan, scenario: Path, tmp_path: Path
) -> None:
    file = tmp_path / "c.json"
    refused(simplan(*command, scenario, "--calibration", file), "c.json", "does not exist")
    save(file, CALIBRATION)
    result = simplan(*command, scenario, "--calibration", file)
    refused(result, "calibration: was measured on an unnamed device, which tells nothing about h100-sxm-80gb")
    assert not (tmp_path / "t.json").exists()


def test_check_needs_the_calibration_to_exist_but_not_to_be_used(
    simplan: Simplan, scenario: Path, tmp_path: Path
) -> None:
    file = tmp_path / "c.json"
    refused(simplan("check", scenario, "--calibration", file), "c.json", "does not exist")
    file.write_text("{}")
    refused(simplan("check", scenario, "--calibration", file), "c.json")
    save(file, CALIBRATION)
    assert simplan("check", scenario, "--calibration", file).returncode == 0


def test_accelerators_of_this_machine_are_priced_from_the_catalogue(simplan: Simplan, scenario: Path) -> None:
    here = "{preset: this-machine, device: h100-sxm-80gb, num_devices: 2}"
    scenario.write_text(scenario.read_text().replace("{preset: dgx-h100, num_devices: 2}", here))
    assert simplan("predict", scenario).returncode == 0
    assert "2 passed, 0 failed, 0 skipped" in simplan("check", scenario).stdout
    refused(simplan("calibrate", scenario), "is not the CPU ranks of this-machine", "--ranks N")
