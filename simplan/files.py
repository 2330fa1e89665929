"""Files that are written whole: a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Writes UTF-8 text beside the file, onto the disk, and then in the file's place.

    When this fails, for instance because the disk is full, what was there before stays. A device or a pipe is written
    to, not replaced.

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
