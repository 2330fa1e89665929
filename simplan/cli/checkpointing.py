"""What the flags about checkpoints ask for."""

from __future__ import annotations

from pathlib import Path

from simplan.errors import NotModelledError, Problem, SpecError
from simplan.program.checkpoint import Checkpointing

__all__ = ["checkpointing"]


def checkpointing(
    folder: Path | None, every: int | None, *, restarts: int, resume: bool, num_nodes: int
) -> Checkpointing | None:
    """How a run keeps its state; None for not at all.

    Args:
        folder: ``--checkpoint-dir``.
        every: ``--checkpoint-every``.
        restarts: ``--restarts``.
        resume: ``--resume``.
        num_nodes: ``--nodes``.

    Raises:
        SpecError: A flag is given that means nothing without a folder.
        NotModelledError: Restarts on several nodes.
    """
    if restarts and num_nodes > 1:
        rule = "ranks of several nodes are not restarted by themselves"
        fix = "leave it out, and give the same command again with --resume"
        raise NotModelledError(Problem(field="--restarts", value=str(restarts), rule=rule, fix=fix))
    if folder is None:
        given = (("--checkpoint-every", every is not None), ("--restarts", restarts > 0), ("--resume", resume))
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
