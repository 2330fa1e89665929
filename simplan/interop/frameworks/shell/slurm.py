"""Options of Slurm in the comments of a script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from simplan.interop.configuration import Setting

_LONG = {"N": "nodes", "n": "ntasks", "G": "gpus"}


def sbatch_settings(text: str) -> Iterator[Setting]:
    """Options of Slurm in comments, by their long names."""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("#SBATCH"):
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:
            continue
        for position, word in enumerate(words):
            if not word.startswith("-"):
                continue
            key, joined, value = word.partition("=")
            name = _LONG.get(key.lstrip("-"), key.lstrip("-"))
            value = value if joined else "".join(words[position + 1 : position + 2])
            if match := re.fullmatch(r"gpu:(?:[\w.-]+:)?(\d+)", value) if name == "gres" else None:
                name, value = "gpus-per-node", match[1]
            yield Setting(f"#SBATCH --{name}", whole_number(value.rpartition(":")[2]) or value, number)


def whole_number(text: str) -> int | None:
    """Whole number, or the lower of a range of nodes if both are equal."""
    match = re.fullmatch(r"(\d{1,9})(?::\1)?", text)
    return int(match[1]) if match else None
