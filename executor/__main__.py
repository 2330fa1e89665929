"""``python -m executor run JOB.json --out DIR``, ``... calibrate REQUEST.json --out FILE``, ``... rehearse JOB.json``.

``run`` and ``calibrate`` take ``--nodes NODES.json`` where several nodes run them, each with this command; ``run``
takes the job from the leading node there. ``environment --out FILE`` writes what a measurement here would be taken on.

Progress goes to stdout, one JSON object per line; messages to stderr, one sentence each. Exit codes: 0 done, 2 a bad
job or request, 4 the run failed, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from executor.launch.rank import die_with_parent
from simplan.errors import Problem, SimplanError, SpecError

_INTERRUPTED = 130
_Model = TypeVar("_Model", bound=BaseModel)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m executor", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    files = (("run", "JOB.json"), ("calibrate", "REQUEST.json"), ("rehearse", "JOB.json"))
    for name, what in files:
        command = commands.add_parser(name)
        command.add_argument("file", type=Path, metavar=what, nargs="?" if name == "run" else None)
        command.add_argument("--out", type=Path, required=True)
        if name == "rehearse":
            command.add_argument("--rank", type=int, required=True)
            command.add_argument("--fake", action="store_true")
        else:
            command.add_argument("--nodes", type=Path)
    commands.add_parser("environment").add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _terminated)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings about host names are no messages of ours
    try:
        if args.command == "run":
            _run(args.file, args.out, args.nodes)
        elif args.command == "calibrate":
            _calibrate(args.file, args.out, args.nodes)
        elif args.command == "environment":
            _environment(args.out)
        else:
            _rehearse(args.file, args.out, args.rank, fake=args.fake)
    except SimplanError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return _INTERRUPTED
    return 0


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _run(file: Path | None, out_dir: Path, nodes_file: Path | None) -> None:
    from executor.run import run_job, run_on_nodes
    from simplan.program.nodes import Nodes
    from simplan.program.run_spec import RunSpec

    def tell(step: int, of: int) -> None:
        _tell({"event": "step", "step": step, "of": of})

    def note(text: str) -> None:
        _tell({"event": "note", "text": text})

    job = None if file is None else _parse(RunSpec, file)
    if nodes_file is not None:
        run_on_nodes(_parse(Nodes, nodes_file), job, out_dir, tell, on_note=note)
    elif job is not None:
        run_job(job, out_dir, tell, on_note=note)
    else:
        raise SpecError(Problem(field="JOB.json", rule="is missing", fix="give it, or --nodes"))


def _rehearse(file: Path, out: Path, rank: int, *, fake: bool) -> None:
    from executor.dry_run.rehearse import rehearse
    from simplan.files import write_whole
    from simplan.program.run_spec import RunSpec

    def tell(step: int, of: int) -> None:
        _tell({"event": "step", "step": step, "of": of})

    write_whole(out, rehearse(_parse(RunSpec, file), rank, fake=fake, on_progress=tell).model_dump_json(indent=1))


def _environment(out: Path) -> None:
    import torch

    from executor.environment import environment

    out.write_text(json.dumps(environment(1, cuda=torch.cuda.is_available())))


def _calibrate(file: Path, out: Path, nodes_file: Path | None) -> None:
    from executor.calibration.calibrate import calibrate
    from simplan.cost.calibration import CalibrationRequest
    from simplan.program.nodes import Nodes

    def tell(done: int, of: int, what: str) -> None:
        _tell({"event": "progress", "done": done, "of": of, "what": what})

    nodes = None if nodes_file is None else _parse(Nodes, nodes_file)
    calibrate(_parse(CalibrationRequest, file), tell, out, nodes=nodes)


def _tell(event: dict[str, str | int]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _parse(model: type[_Model], file: Path) -> _Model:
    try:
        return model.model_validate_json(file.read_bytes())
    except OSError as error:
        raise SpecError(Problem(field="", rule=f"cannot be read: {error.strerror}"), file=str(file)) from None
    except ValidationError as error:
        raise _bad(file, error) from None


def _bad(file: Path, error: ValidationError) -> SpecError:
    problems = []
    for detail in error.errors(include_url=False):
        field = ".".join(str(part) for part in detail["loc"])
        given = detail.get("input")
        value = repr(given)[:80] if field and isinstance(given, str | int | float | bool) else None
        problems.append(Problem(field=field, value=value, rule=detail["msg"]))
    return SpecError(problems, file=str(file))


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)  # in order: what was measured is kept
    sys.exit(main())
