"""``simplan capture``: the file of a module of the user's own, written by a process of the executor."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from simplan.cli.terminal.output import print_json, print_result
from simplan.cli.terminal.processes import run_executor
from simplan.errors import Problem, SpecError
from simplan.io import write_model
from simplan.model.captured.file import read_captured
from simplan.model.captured.request import CaptureRequest, Reference
from simplan.report.captured import captured_json, captured_text


def capture_command(
    source: str,
    *,
    inputs: str | None,
    loss: str | None,
    name: str | None,
    seq_len: int | None,
    output: Path,
    as_json: bool,
) -> int:
    """``simplan capture``. Functions are imported from the current folder and the environment."""
    own = _of_config(source, seq_len) if source.endswith(".json") else _of_code(source, inputs, loss)
    request = CaptureRequest(**own, name=name or "", folder=str(Path.cwd()))
    write_capture(request, output)
    captured = read_captured(output)
    if as_json:
        print_json(captured_json(captured))
        return 0
    print_result(f"{captured_text(captured)}\nwrote {output}; next: simplan predict {output} --cluster CLUSTER")
    return 0


def write_capture(request: CaptureRequest, output: Path) -> None:
    """Captures in a process of the executor.

    Raises:
        SpecError: The module cannot be captured.
    """
    with tempfile.TemporaryDirectory(prefix="simplan-") as folder:
        file = Path(folder) / "request.json"
        write_model(file, request)
        run_executor(["capture", str(file), "--out", str(output.resolve())], lambda event: None)


def _of_config(source: str, seq_len: int | None) -> dict[str, Any]:
    if not Path(source).is_file():
        raise SpecError(Problem(field="SOURCE", value=source, rule="is no file", fix="give the path of a config.json"))
    return {"config": str(Path(source).resolve()), "seq_len": seq_len or USUAL_LENGTH}


def _of_code(source: str, inputs: str | None, loss: str | None) -> dict[str, Any]:
    factory = Reference.of("SOURCE", source)
    if inputs is None:
        rule, fix = "is missing: forward needs arguments", "name a function of a number of samples that makes them"
        raise SpecError(Problem(field="--inputs", rule=rule, fix=fix))
    return {
        "factory": factory,
        "batch": Reference.of("--inputs", inputs),
        "loss": None if loss is None else Reference.of("--loss", loss),
    }


USUAL_LENGTH = 4096  # tokens
