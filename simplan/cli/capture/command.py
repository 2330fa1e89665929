"""``simplan capture``: the file of a module of the user's own, written by a process of the executor."""

from __future__ import annotations

import hashlib
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simplan.cli.terminal.output import print_json, print_result, say
from simplan.cli.terminal.processes import run_executor
from simplan.cost.calibration.store import default_path
from simplan.errors import Problem, SpecError
from simplan.interop.huggingface import model_types
from simplan.io import is_file, json_text, read_json, write_model
from simplan.model.captured.file import read_captured
from simplan.model.captured.request import CaptureRequest, Reference
from simplan.report.captured import captured_json, captured_text

MAX_DEGREE = 1024
USUAL_LENGTH = 4096  # tokens
_PACKAGES = ("transformers", "torch")
"""Packages that capture an architecture without a family."""


def capture_command(
    source: str,
    *,
    inputs: str | None,
    loss: str | None,
    name: str | None,
    seq_len: int | None,
    images: int | None,
    image_size: str | None,
    tensor_parallel: str | None,
    tp_plan: str | None,
    output: Path,
    as_json: bool,
) -> int:
    """``simplan capture``. Functions are imported from the current folder and the environment."""
    seen = _of_images(images, image_size)
    asked = _of_config(source, seq_len) if source.endswith(".json") else _of_code(source, inputs, loss, seen)
    asked |= seen
    asked |= _of_split(tensor_parallel, tp_plan)
    request = CaptureRequest(**asked, name=name or "", folder=str(Path.cwd()))
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


def _of_images(images: int | None, image_size: str | None) -> dict[str, Any]:
    if image_size is None:
        return {} if images is None else {"images": images}
    height, cross, width = image_size.lower().partition("x")
    if not (
        cross and all(side.isascii() and side.isdigit() and 1 <= int(side) <= _MOST_PIXELS for side in (height, width))
    ):
        rule, fix = f"must be height and width, from 1 to {_MOST_PIXELS:,} pixels", "write 768x1024"
        raise SpecError(Problem(field="--image-size", value=image_size, rule=rule, fix=fix))
    if images == 0:
        raise SpecError(
            Problem(field="--image-size", value=image_size, rule="is of images, and --images = 0", fix="remove it")
        )
    return {"images": 1 if images is None else images, "image_size": (int(height), int(width))}


_MOST_PIXELS = 20_000


def _of_code(source: str, inputs: str | None, loss: str | None, seen: dict[str, Any]) -> dict[str, Any]:
    factory = Reference.of("SOURCE", source)
    if seen:
        rule, fix = (
            "is for a config.json; the batch of your own module has its images",
            "make them in your --inputs function",
        )
        option = "--image-size" if "image_size" in seen else "--images"
        raise SpecError(Problem(field=option, rule=rule, fix=fix))
    if inputs is None:
        rule, fix = "is missing: forward needs arguments", "name a function of a number of samples that makes them"
        raise SpecError(Problem(field="--inputs", rule=rule, fix=fix))
    return {
        "factory": factory,
        "batch": Reference.of("--inputs", inputs),
        "loss": None if loss is None else Reference.of("--loss", loss),
    }


def _of_split(tensor_parallel: str | None, tp_plan: str | None) -> dict[str, Any]:
    if tensor_parallel is None and tp_plan is not None:
        rule, fix = "splits a module over degrees that are missing", "name them: --tensor-parallel 2,4"
        raise SpecError(Problem(field="--tp-plan", value=tp_plan, rule=rule, fix=fix))
    words = (tensor_parallel or "").split(",") if tensor_parallel is not None else []
    if not all(word.isascii() and word.isdigit() and 1 < int(word) <= MAX_DEGREE for word in words):
        rule = f"must be degrees from 2 to {MAX_DEGREE}, separated by commas"
        raise SpecError(Problem(field="--tensor-parallel", value=str(tensor_parallel), rule=rule, fix="write 2,4,8"))
    plan = None if tp_plan is None else Reference.of("--tp-plan", tp_plan)
    return {"tensor_parallel": tuple(sorted({int(word) for word in words})), "tp_plan": plan}


def captured_config(source: Path, seq_len: int | None) -> Path | None:
    """File of the captured model of an architecture that simplan has no family for, in the user's cache.

    Its ``config.json`` is captured with transformers once.

    Args:
        source: Any file, such as a ``config.json``.
        seq_len: Tokens of a sample; None for 4,096.

    Returns:
        None for other files, and where transformers is not installed.

    Raises:
        SpecError: The model cannot be captured.
    """
    if source.suffix != ".json" or not is_file(source):
        return None
    data = read_json(source)
    word = data.get("model_type") if isinstance(data, dict) and "model" not in data else None
    if not isinstance(word, str) or word in model_types() or not all(map(find_spec, _PACKAGES)):
        return None
    length = seq_len or USUAL_LENGTH
    versions = [f"{package} {version(package)}" for package in (*_PACKAGES, "simplan")]
    digest = hashlib.sha256("\n".join([json_text(data), str(length), *versions]).encode())
    title = source.resolve().parent.name if source.name == "config.json" else source.stem
    file = default_path().parent / "captures" / f"{title}-{digest.hexdigest()[:16]}.json"
    if not file.exists():
        told = "" if seq_len else " (--seq-len N for others)"
        say(f"note: capturing {title} with transformers, as simplan has no family {word}: {length:,} tokens{told}")
        request = CaptureRequest(config=str(source.resolve()), seq_len=length, name=title, folder=str(Path.cwd()))
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        write_capture(request, part)
        part.replace(file)
    return file
