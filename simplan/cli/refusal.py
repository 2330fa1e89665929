"""What node 0 refuses before the nodes have met: the others are told, who would wait for it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from simplan.cli.output import say
from simplan.cli.processes import run_executor
from simplan.errors import SimplanError
from simplan.io import write_model
from simplan.program.nodes import Nodes
from simplan.program.refusal import Refusal

__all__ = ["refusing_for_all"]


@contextlib.contextmanager
def refusing_for_all(nodes: Nodes | None) -> Iterator[None]:
    """On node 0 of several, an error inside of the block ends the run on all nodes.

    Args:
        nodes: How to meet the others; None where there are none.
    """
    try:
        yield
    except SimplanError as error:
        if nodes is not None:
            _tell(nodes, error)
        raise


def _tell(nodes: Nodes, error: SimplanError) -> None:
    say("telling the other nodes that nothing is run")
    with tempfile.TemporaryDirectory(prefix="simplan-") as folder:
        file = Path(folder) / "refusal.json"
        write_model(file, Refusal(nodes=nodes, sentence=str(error), exit_code=error.exit_code))
        with contextlib.suppress(SimplanError):  # the error itself is what matters
            run_executor(["refuse", str(file)], lambda event: None)
