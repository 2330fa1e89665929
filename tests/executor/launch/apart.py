"""A run in a process of its own, as ``simplan run`` has it: with torchrun's agent, which leaves files open."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from simplan.errors import RunError
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import functools, sys
import executor.__main__, executor.run
executor.run.run_job = functools.partial(executor.run.run_job, rank_module=sys.argv.pop())
sys.exit(executor.__main__.main(sys.argv[1:]))
"""


def run_apart(
    job: RunSpec,
    out_dir: Path,
    on_progress: Callable[[int, int], None] = lambda step, of: None,
    rank_module: str = "executor.worker",
) -> Measurement:
    """As ``executor.run.run_job``.

    Raises:
        RunError: The run failed.
    """
    job_file = out_dir.with_suffix(".job.json")
    job_file.write_text(job.model_dump_json())
    command = [sys.executable, "-c", PROGRAM, "run", str(job_file), "--out", str(out_dir), rank_module]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "step":
                on_progress(event["step"], event["of"])
        _, said = process.communicate(timeout=600)
    if process.returncode:
        raise RunError(said.strip())
    return Measurement.model_validate_json((out_dir / "measurement.json").read_bytes())
