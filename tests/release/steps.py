"""Steps of action.yml, run as a runner of GitHub runs them, and a repository of scenarios to run them in."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
_EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
_BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")
"""The ``shell: bash`` of GitHub's documentation."""
_PLAN = """
name: {name}
model: {{preset: gpt2-124m}}
cluster: {{preset: dgx-h100, num_nodes: 1}}
training: {{global_batch_size: 64, precision: bf16}}
plan: {plan}
expect:
  - {{metric: step_time_s, max: {limit}, why: deadline of the project}}
"""


def sample_repository(folder: Path) -> None:
    """Writes scenarios with the exit codes 0, 1 and 2, and a workflow file, which is no scenario."""
    files = {
        "plans/good.yaml": _PLAN.format(name="good", plan="{dp_replicate: 8}", limit=10),
        "plans/with space/small.yaml": _PLAN.format(name="small", plan="{dp_shard: 8}", limit=10),
        "slow/late.yaml": _PLAN.format(name="late", plan="{dp_replicate: 8}", limit=0.001),
        "wrong/five.yaml": _PLAN.format(name="five", plan="{dp_replicate: 5}", limit=10),
        ".github/workflows/test.yml": "on: push\njobs: {}\n",
    }
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@dataclass(frozen=True)
class ActionResult:
    """Exit code of the first failing step, else 0; outputs of the action, and the job summary."""

    exit_code: int
    outputs: dict[str, str]
    summary: str
    log: str


def run_action(
    repository: Path, temporary: Path, environment: Mapping[str, str], *, skip: tuple[str, ...] = (), **inputs: str
) -> ActionResult:
    """Runs the ``run:`` steps with the inputs in place of expressions; ``uses:`` steps bring Python, which is there.

    Args:
        temporary: Folder of the runner (``RUNNER_TEMP``).
        skip: Names of steps to leave out.

    Raises:
        KeyError: An expression of action.yml is unknown, or a required input is not given.
    """
    action: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
    defaults = {name: entry["default"] for name, entry in action["inputs"].items() if "default" in entry}
    assert inputs.keys() <= action["inputs"].keys()
    values = {f"inputs.{name}": value for name, value in (defaults | inputs).items()}
    values["github.action_path"] = str(ROOT)
    files = {name: temporary / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for file in files.values():
        file.write_text("")
    variables = {**environment, "RUNNER_TEMP": str(temporary), **{name: str(file) for name, file in files.items()}}
    code, log = 0, ""
    for step in action["runs"]["steps"]:
        if "uses" in step or step["name"] in skip:
            continue
        of_step = {name: _expanded(text, values) for name, text in step.get("env", {}).items()}
        done = subprocess.run(
            [*_BASH, _expanded(step["run"], {})],
            cwd=repository,
            env=variables | of_step,
            capture_output=True,
            text=True,
            check=False,
        )
        log += done.stdout + done.stderr
        if "id" in step:
            lines = (line.partition("=") for line in files["GITHUB_OUTPUT"].read_text().splitlines())
            values |= {f"steps.{step['id']}.outputs.{name}": value for name, _, value in lines}
        if code := done.returncode:
            break
    outputs = {name: _expanded(entry["value"], values) for name, entry in action["outputs"].items()}
    return ActionResult(code, outputs, files["GITHUB_STEP_SUMMARY"].read_text(), log)


def _expanded(text: str, values: Mapping[str, str]) -> str:
    return _EXPRESSION.sub(lambda match: values[match.group(1)], text)
