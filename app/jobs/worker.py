"""The process that does one piece of work: ``python -m app.jobs.worker``, started by ``app.jobs.job``.

It reads one pickled question from stdin and writes messages to stdout until the last one, ``Done`` or ``Failed``.
SIGINT stops the work with what there is. It is started ahead of its question, so that nobody waits for imports; when
the server is gone, it ends as well.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from app.jobs.messages import Done, Failed, Update
from simplan.accuracy.evaluate import predict_runs
from simplan.accuracy.reading import ReadFile
from simplan.errors import NotModelledError, SimplanError, SpecError
from simplan.scenario import parse_search
from simplan.search import Progress, SearchResult, search

__all__ = ["SEARCHING", "TASKS", "main"]

SEARCHING = "searching"
"""What a search does until all plans are looked at; then it explains the best."""

_PAUSE_S = 0.25
_PROMPT_S, _NICE = 1.5, 15  # the first plans are wanted at once, then pages come first
_Tell = Callable[[Update], None]

_SMALL = """
model: {family: llama, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, intermediate_size: 128,
  vocab_size: 64, seq_len: 32}
cluster: {preset: dgx-h100, num_devices: 2}
training: {global_batch_size: 4}
search: {objectives: [step_time, memory], top: 1, microbatch_size: 1}
"""


def search_plans(text: str, tell: _Tell) -> SearchResult:
    """The best plans of a scenario with a search, told while they are found."""
    asked = parse_search(text)
    told_s, had = 0.0, False

    def on_progress(progress: Progress) -> None:
        nonlocal told_s, had
        found = progress.best_step_time_s is not None
        if time.monotonic() - told_s >= _PAUSE_S or (found and not had) or progress.doing != SEARCHING:
            told_s, had = time.monotonic(), found
            tell(Update(progress.done, progress.total, progress.doing, _known(progress) if found else None))

    return search(
        asked.model,
        asked.cluster,
        asked.training,
        asked.software,
        asked.space,
        name=asked.name,
        soon=True,
        on_progress=on_progress,
    )


def _known(progress: Progress) -> SearchResult:
    """What is known so far; once all plans are looked at that is no interrupted search, only not explained yet."""
    return replace(progress.so_far(), interrupted=progress.doing == SEARCHING)


def predict_published(files: list[ReadFile], tell: _Tell) -> Any:
    """Outcomes of published runs."""
    return predict_runs(files, on_progress=lambda done, of: tell(Update(done, of, "predicting")))


TASKS: dict[str, Callable[[Any, _Tell], Any]] = {"search": search_plans, "accuracy": predict_published}
"""What can be asked, by name."""


def main() -> None:
    """Does what it is asked; after a moment it gives way to the pages."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who started us may have ignored it
    with os.fdopen(os.dup(1), "wb") as channel:
        os.dup2(2, 1)  # what a library prints is no message

        asked_s = math.inf

        def send(message: Update | Done | Failed) -> None:
            if time.monotonic() - asked_s > _PROMPT_S:
                os.setpriority(os.PRIO_PROCESS, 0, _NICE)
            channel.write(pickle.dumps(message))  # in one piece, also when a signal comes
            channel.flush()

        try:
            search_plans(_SMALL, lambda _: None)  # brings machine code into memory
            name, question = pickle.load(sys.stdin.buffer)
            asked_s = time.monotonic()
            send(_answer(name, question, send))
        except (EOFError, BrokenPipeError, KeyboardInterrupt):
            os._exit(0)  # nobody asks, nobody listens; without the interpreter's own words about it


def _answer(name: str, question: Any, tell: _Tell) -> Done | Failed:
    try:
        return Done(TASKS[name](question, tell))
    except SpecError as error:
        return Failed(error.problems, isinstance(error, NotModelledError))
    except SimplanError as error:
        return Failed(bug=str(error))
    except BrokenPipeError:
        raise
    except Exception as error:
        return Failed(bug=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
