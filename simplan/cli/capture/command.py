"""``simplan capture``: the file of a module of the user's own, written by a process of the executor."""

from __future__ import annotations

import tempfile
from pathlib import Path

from simplan.cli.terminal.output import print_json, print_result
from simplan.cli.terminal.processes import run_executor
from simplan.io import write_model
from simplan.model.captured.file import read_captured
from simplan.model.captured.request import CaptureRequest, Reference
from simplan.report.captured import captured_json, captured_text


def capture_command(
    factory: str, *, inputs: str, loss: str | None, name: str | None, output: Path, as_json: bool
) -> int:
    """``simplan capture``. Functions are imported from the current folder and the environment."""
    request = CaptureRequest(
        factory=Reference.of("MODULE:FACTORY", factory),
        batch=Reference.of("--inputs", inputs),
        loss=None if loss is None else Reference.of("--loss", loss),
        name=name or "",
        folder=str(Path.cwd()),
    )
    with tempfile.TemporaryDirectory(prefix="simplan-") as folder:
        file = Path(folder) / "request.json"
        write_model(file, request)
        run_executor(["capture", str(file), "--out", str(output.resolve())], lambda event: None)
    captured = read_captured(output)
    if as_json:
        print_json(captured_json(captured))
        return 0
    print_result(f"{captured_text(captured)}\nwrote {output}; next: simplan predict {output} --cluster CLUSTER")
    return 0
