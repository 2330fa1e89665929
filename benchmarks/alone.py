"""A measurement in a process of its own, whose memory is its own and which nothing has warmed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

__all__ = ["alone"]


def alone(module: str, *arguments: str) -> dict[str, Any]:
    """What ``python -m module`` prints as JSON."""
    command = [sys.executable, "-m", module, *arguments]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found
