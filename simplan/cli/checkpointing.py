"""What the flags about checkpoints ask for."""

from __future__ import annotations

from pathlib import Path

from simplan.errors import Problem, SpecError
from simplan.program.checkpoint import Checkpointing

__all__ = ["checkpointing"]


def checkpointing(folder: Path | None, every: int | None, *, restarts: int, resume: bool) -> Checkpointing | None:
    """How a run keeps its state; None for not at all.

    Args:
        folder: ``--checkpoint-dir``.
        every: ``--checkpoint-every``.
        restarts: ``--max-restarts``.
        resume: ``--resume``.

    Raises:
        SpecError: A flag is given that means nothing without a folder.
    """
    if folder is None:
        given = (("--checkpoint-every", every is not None), ("--max-restarts", restarts > 0), ("--resume", resume))
        problems = [
            Problem(field=flag, rule="needs a folder for checkpoints", fix="add --checkpoint-dir DIR")
            for flag, is_given in given
            if is_given
        ]
        if problems:
            raise SpecError(problems)
        return None
    asked = Checkpointing(folder=str(folder.resolve()), resume=resume, max_restarts=restarts)
    return asked if every is None else asked.model_copy(update={"every": every})
