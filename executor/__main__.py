"""``python -m executor run JOB.json --out DIR``, ``... calibrate REQUEST.json --out FILE``, ``... rehearse JOB.json``.

On several nodes, ``run`` and ``calibrate`` take ``--nodes NODES.json`` and run on each of them; ``run`` takes the job
from the leading node there. ``gather JOB.json --out DIR --failure REASON`` writes the measurement that a killed ``run``
could not write. ``capture REQUEST.json --out FILE`` captures a module of the user's. ``environment --out FILE`` writes
the facts about this machine that change a measurement.

Progress goes to stdout, one JSON object per line; messages to stderr, one sentence each. Exit codes: 0 done, 2 a bad
job or request, 4 the run failed, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from executor.launch.rank import die_with_parent
from simplan.errors import Problem, RunError, SimplanError, SpecError
from simplan.wording import visible

_INTERRUPTED = 130
_Model = TypeVar("_Model", bound=BaseModel)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m executor", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, file in (
        ("run", _run, "JOB.json"),
        ("calibrate", _calibrate, "REQUEST.json"),
        ("gather", _gather, "JOB.json"),
        ("rehearse", _rehearse, "JOB.json"),
        ("capture", _capture, "REQUEST.json"),
        ("environment", _environment, None),
    ):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--out", type=Path, required=True)
        if file is not None:
            command.add_argument("file", type=Path, metavar=file, nargs="?" if name == "run" else None)
        if name == "gather":
            command.add_argument("--failure", required=True)
        elif name == "rehearse":
            command.add_argument("--rank", type=int, required=True)
            command.add_argument("--fake", action="store_true")
        elif name in ("run", "calibrate"):
            command.add_argument("--nodes", type=Path)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        args.run(args)
    except SimplanError as error:
        sys.stderr.write(f"{visible(str(error))}\n")
        return error.exit_code
    except OSError as error:
        sentence = f"{error.filename or args.out} cannot be written or read: {error.strerror or error}"
        sys.stderr.write(f"{visible(sentence)}\n")
        return RunError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return _INTERRUPTED
    return 0


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _run(args: argparse.Namespace) -> None:
    from executor.run import run_job, run_on_nodes
    from simplan.runs.elastic import RendezvousOptions
    from simplan.runs.run_spec import RunSpec

    job = None if args.file is None else _parse(RunSpec, args.file)
    if args.nodes is not None:
        nodes = _parse(RendezvousOptions, args.nodes)
        run_on_nodes(nodes, job, args.out, _report_step, on_note=_report_note, on_lost=_report_loss)
    elif job is not None:
        run_job(job, args.out, _report_step, on_note=_report_note)
    else:
        raise SpecError(Problem(field="JOB.json", rule="is missing", fix="give it, or --nodes"))


def _gather(args: argparse.Namespace) -> None:
    from executor.run import gather_left
    from simplan.runs.run_spec import RunSpec

    gather_left(_parse(RunSpec, args.file), args.out, args.failure)


def _rehearse(args: argparse.Namespace) -> None:
    from executor.dry_run.rehearse import rehearse
    from simplan.io import write_whole
    from simplan.runs.run_spec import RunSpec

    rehearsal = rehearse(_parse(RunSpec, args.file), args.rank, fake=args.fake, on_progress=_report_step)
    write_whole(args.out, rehearsal.model_dump_json(indent=1))


def _capture(args: argparse.Namespace) -> None:
    from simplan.io import write_whole
    from simplan.model.captured.request import CaptureRequest

    request = _parse(CaptureRequest, args.file)
    with contextlib.redirect_stderr(io.StringIO()):  # logs of libraries, which are no part of an error
        from executor.capture.user_code import capture

        captured = capture(request)
    write_whole(args.out, captured.model_dump_json(exclude_defaults=True))


def _environment(args: argparse.Namespace) -> None:
    import torch

    from executor.profiling.results import environment

    args.out.write_text(json.dumps(environment(1, cuda=torch.cuda.is_available())))


def _calibrate(args: argparse.Namespace) -> None:
    from executor.calibration.calibrate import calibrate
    from simplan.cost.calibration.format import CalibrationRequest
    from simplan.runs.elastic import RendezvousOptions

    def report(done: int, of: int, what: str) -> None:
        _report(event="progress", done=done, of=of, what=what)

    nodes = None if args.nodes is None else _parse(RendezvousOptions, args.nodes)
    calibrate(_parse(CalibrationRequest, args.file), report, args.out, nodes=nodes, on_note=_report_note)


def _report_step(step: int, of: int) -> None:
    _report(event="step", step=step, of=of)


def _report_note(text: str) -> None:
    _report(event="note", text=text)


def _report_loss(for_s: float | None) -> None:
    _report(event="lost", for_s=for_s)


def _report(**event: str | float | None) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _parse(model: type[_Model], file: Path) -> _Model:
    try:
        return model.model_validate_json(file.read_bytes())
    except OSError as error:
        raise SpecError(Problem(field="", rule=f"cannot be read: {error.strerror}"), file=str(file)) from None
    except ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            field, value = ".".join(map(str, detail["loc"])), detail.get("input")
            shown = repr(value)[:80] if field and isinstance(value, str | int | float | bool) else None
            problems.append(Problem(field=field, value=shown, rule=detail["msg"]))
        raise SpecError(problems, file=str(file)) from None


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's warnings about host names are not for users
    die_with_parent(signal.SIGTERM)  # not SIGKILL, so that the measurement is kept
    sys.exit(main())
