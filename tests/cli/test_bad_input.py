"""Bad input at the command line: exit code 2, a sentence with file and line, never a traceback, never a hang."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from simplan.cli.listing import KINDS
from simplan.cost.calibration.format import Calibration
from simplan.cost.calibration.store import save

Simplan = Callable[..., "CompletedProcess[str]"]
CALIBRATION = Calibration(created="2026-01-01T00:00:00Z", device_kind="cpu", num_cores=2, memory_bytes=2**30)


def refused(result: CompletedProcess[str], *parts: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    for part in parts:
        assert part in result.stderr


# what is replaced in the good scenario, by what, and what the message must hold
MISTAKES = {
    "misspelt key": ("num_attention_heads", "num_atention_heads", ":2:", "did you mean num_attention_heads?"),
    "wrong type": ("num_hidden_layers: 4", "num_hidden_layers: four", ":2:", 'model.num_hidden_layers = "four"'),
    "number as text": ("global_batch_size: 8", 'global_batch_size: "8"', ":4:", "training.global_batch_size"),
    "true as a number": ("global_batch_size: 8", "global_batch_size: true", ":4:", "training.global_batch_size"),
    "plan does not divide": ("schedule: gpipe", "microbatch_size: 3", ":4:", "must be a multiple of"),
    "degrees do not give the devices": ("pp: 2", "pp: 3", ":5:", "plan"),
    "negative": ("hidden_size: 64", "hidden_size: -64", ":2:", "model.hidden_size = -64"),
    "infinite": ("hidden_size: 64", "hidden_size: .inf", ":2:", "model.hidden_size"),
    "absurd": ("hidden_size: 64", "hidden_size: 1" + "0" * 30, ":2:", "model.hidden_size"),
    "not a number": ("value: 8", "value: .nan", ":7:", "expect"),
    "unknown preset": ("preset: dgx-h100", "preset: dgx-h1000", ":3:", "did you mean dgx-h100"),
    "unknown schedule": ("gpipe", "gpip", ":5:", "did you mean gpipe?"),
    "unknown metric": ("metric: num_microbatches", "metric: num_microbatch", ":7:", "num_microbatches"),
    "unknown section": ("training:", "trainig:", ":4:", "did you mean training?"),
    "duplicated key": ("plan:", "training: {global_batch_size: 4}\nplan:", ":5:", "training"),
    "not modelled": ("pp: 2", "pp: 2, grad_dtype: bf16", ":5:", "is not modelled yet"),
    "experts of a dense model": ("pp: 2", "pp: 2, ep: 2", ":5:", "models of family gpt have none"),
    "tag that builds an object": ("name: small", "name: !!python/object/apply:os.system [ls]", ":1:", "python/object"),
    "not YAML": ("plan: {", "plan: }", ":5:", "this is not YAML"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_scenario(name: str, simplan: Simplan, scenario: Path) -> None:
    old, new, place, message = MISTAKES[name]
    text = scenario.read_text()
    assert old in text
    scenario.write_text(text.replace(old, new, 1))
    refused(simplan("predict", scenario), f"{scenario}{place}", message)


BYTES = {
    "empty": b"",
    "only a comment": b"# nothing\n",
    "binary": bytes(range(256)) * 8,
    "not UTF-8": "name: caf\xe9\n".encode("latin-1"),
    "a list": b"- 1\n- 2\n",
    "deeply nested": b"[" * 100_000,
    "deeply nested blocks": b"\n".join(b" " * i + b"a:" for i in range(3000)),
    "self-expanding": b"a: &a [x, x, x, x, x, x, x, x, x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (i, i, b",".join([b"*%c" % (i - 1)] * 9)) for i in range(ord("b"), ord("l"))),
    "self-containing": b"a: &a [*a]\n",
    "too large": b"#" * (5 * 2**20),
}


@pytest.mark.parametrize("name", BYTES)
def test_files_that_are_no_scenario(name: str, simplan: Simplan, scenario: Path) -> None:
    scenario.write_bytes(BYTES[name])
    refused(simplan("predict", scenario), str(scenario))


def test_a_missing_file_names_the_nearest(simplan: Simplan, scenario: Path) -> None:
    refused(simplan("predict", scenario.with_name("smal.yaml")), "smal.yaml", "small.yaml")


def test_a_link_to_nothing_says_so(simplan: Simplan, tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to("gone.yaml")
    refused(simplan("predict", link), "is a link to gone.yaml, which does not exist")


def test_names_in_files_cannot_steer_a_terminal(simplan: Simplan, scenario: Path) -> None:
    """Colours pass, as our own do; the sequence that sets a window's title does not."""
    scenario.write_text(scenario.read_text().replace("name: small", r'name: "\e]0;title\a"', 1))
    result = simplan("predict", scenario)
    assert result.stdout.startswith(r"\x1b]0;title\x07: fits")


def test_a_full_disk_is_told_as_a_sentence(scenario: Path, environment: dict[str, str]) -> None:
    command = f"{sys.executable} -m simplan show metrics > /dev/full"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 2
    assert result.stderr == "error: what is printed cannot be written: No space left on device\n"


def test_a_folder_is_no_file(simplan: Simplan, tmp_path: Path) -> None:
    refused(simplan("predict", tmp_path), str(tmp_path), "folder")


def test_more_ranks_than_the_machine_holds(simplan: Simplan, scenario: Path) -> None:
    text = scenario.read_text().replace(
        "{preset: dgx-h100, num_devices: 2}", "{preset: this-machine, num_devices: 100000}"
    )
    scenario.write_text(text)
    refused(simplan("run", scenario), f"{scenario}:3:", "100000")


def test_unknown_device(simplan: Simplan, scenario: Path) -> None:
    inline = "{device: h100-sxm-80g, devices_per_node: 2, num_nodes: 1}"
    scenario.write_text(scenario.read_text().replace("{preset: dgx-h100, num_devices: 2}", inline))
    refused(simplan("predict", scenario), f"{scenario}:3:", "did you mean h100-sxm-80gb")


def test_unknown_model(simplan: Simplan, scenario: Path) -> None:
    lines = scenario.read_text().splitlines()
    lines[1] = "model: {preset: gpt2-124}"
    scenario.write_text("\n".join(lines))
    refused(simplan("predict", scenario), f"{scenario}:2:", "did you mean gpt2-124m")


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
        (["show", "device"], "devices"),
        (["show", "devices", "h100"], "h100"),
        (["show", "metrics", "mf"], "mfu"),
        (["check", "missing.yaml"], ""),
    ],
)
def test_bad_usage(args: list[str], message: str, simplan: Simplan) -> None:
    result = simplan(*args)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert message in result.stderr


def test_this_machine_without_a_calibration_says_what_to_do(simplan: Simplan, scenario: Path) -> None:
    scenario.write_text(
        scenario.read_text().replace("dgx-h100", "this-machine").replace("{global", "{precision: fp32, global")
    )
    refused(simplan("predict", scenario), str(scenario), "simplan calibrate")
    refused(simplan("predict", scenario, "--calibration", "none.json"), "none.json", "does not exist")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"schema_version": 99}', '{"schema_version": 1, "device_kind": 3}']
)
def test_a_broken_calibration(content: str, simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    scenario.write_text(
        scenario.read_text().replace("dgx-h100", "this-machine").replace("{global", "{precision: fp32, global")
    )
    broken = tmp_path / "calibration.json"
    broken.write_text(content)
    refused(simplan("predict", scenario, "--calibration", broken), str(broken))


def test_compare_with_two_predictions(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    predicted = tmp_path / "predicted.json"
    assert simplan("predict", scenario, "-o", predicted).returncode == 0
    result = simplan("compare", predicted, predicted)
    refused(result, f"{predicted}: is a prediction; give the measurement.json of a run as the second file")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"schema_version": 2, "kind": "prediction"}', "NaN"])
def test_compare_with_broken_files(content: str, simplan: Simplan, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(content)
    refused(simplan("compare", broken, broken), str(broken))


def test_outputs_that_cannot_be_written(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    refused(simplan("trace", scenario, "-o", tmp_path / "no" / "trace.json"), "no/trace.json")
    refused(simplan("predict", scenario, "-o", tmp_path), str(tmp_path))
    result = simplan("check", scenario, "--junit", tmp_path / "no" / "junit.xml")
    assert result.returncode == 2
    assert "no/junit.xml" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_precision_that_cannot_be_run_is_refused_by_name(simplan: Simplan, scenario: Path) -> None:
    scenario.write_text(
        scenario.read_text().replace("{global_batch_size: 8}", "{global_batch_size: 8, precision: fp16}")
    )
    refused(simplan("run", scenario), str(scenario), "training.precision = fp16")


def test_every_kind_that_help_names_exists(simplan: Simplan) -> None:
    text = " ".join(simplan("show", "--help").stdout.split())
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
