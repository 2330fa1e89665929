"""Measurements in a separate process, with cold caches and its own memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any


def alone(module: str, *arguments: str) -> dict[str, Any]:
    """Run ``python -m module`` and parse the JSON that it prints."""
    command = [sys.executable, "-m", module, *arguments]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def peak_bytes() -> int:
    """Largest memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
