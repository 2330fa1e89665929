"""Atomic file writes: a reader sees the old or the new content, never a part."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write UTF-8 text atomically: to a temporary file in the same folder, synced, then renamed.

    If writing fails, for instance on a full disk, the old content stays. A device or pipe is written to directly.

    Raises:
        OSError: The file cannot be written.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8", newline="")
        return
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
