"""A ``config.json`` of an architecture that simplan has no family for: captured with transformers, and kept."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from simplan.cli.capture.command import USUAL_LENGTH, write_capture
from simplan.cli.terminal.output import say
from simplan.cost.calibration.store import default_path
from simplan.interop.huggingface import model_types
from simplan.io import is_file, json_text, read_json
from simplan.model.captured.request import CaptureRequest

_PACKAGES = ("transformers", "torch")


def captured_config(source: Path, seq_len: int | None) -> Path | None:
    """File of the captured model of such a configuration, in simplan's folder of the user's cache.

    Args:
        source: Any file.
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
