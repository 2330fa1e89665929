"""Tasks that report progress: searches, and predictions of published runs."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Any

from app.jobs.messages import Report, Update
from simplan.accuracy.evaluate import predict_runs
from simplan.accuracy.reading import ReadFile
from simplan.scenario import parse_search
from simplan.search import SearchProgress, SearchResult, search

SEARCHING = "searching"
"""``SearchProgress.doing`` until all plans are evaluated; then the search explains the best plans."""

_PAUSE_S = 0.25
_PACE_S = 8.0

_SMALL = """
model: {family: llama, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, intermediate_size: 128,
  vocab_size: 64, seq_len: 32}
cluster: {preset: dgx-h100, num_devices: 2}
training: {global_batch_size: 4}
search: {objectives: [step_time, memory], top: 1, microbatch_size: 1}
"""


def warm_up() -> None:
    """Imports the modules of predictions and searches, and loads their compiled code."""
    search_plans(_SMALL, lambda _: None)


class Pace:
    """Recent pace of a search.

    A search rejects most plans by rules in the first second, then times the others one by one, the most promising
    first, and prunes the rest together. So the pace of the last seconds gives an upper estimate of the time left.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def left_s(self, now_s: float, done: int, total: int) -> float | None:
        """Upper estimate of the remaining seconds; None in the first seconds and while no plan is done."""
        self._seen.append((now_s, done))
        while self._seen[0][0] < now_s - _PACE_S:
            self._seen.popleft()
        begun_s, before = self._seen[0]
        if now_s - begun_s < _PACE_S / 2 or done == before:
            return None
        return (total - done) * (now_s - begun_s) / (done - before)


def search_plans(text: str, report: Report) -> SearchResult:
    """The best plans of a scenario with a search; reports intermediate results."""
    asked = parse_search(text)
    told_s, had, pace = 0.0, False, Pace()

    def on_progress(progress: SearchProgress) -> None:
        nonlocal told_s, had
        left_s = pace.left_s(time.monotonic(), progress.done, progress.total)
        found = progress.best_step_time_s is not None
        if time.monotonic() - told_s >= _PAUSE_S or (found and not had) or progress.doing != SEARCHING:
            told_s, had = time.monotonic(), found
            known = _known(progress) if found else None
            report(Update(progress.done, progress.total, progress.doing, known, left_s))

    return search(asked.job, asked.space, name=asked.name, on_progress=on_progress)


def _known(progress: SearchProgress) -> SearchResult:
    """Search result so far; after all plans are evaluated the result is complete except for explanations."""
    return replace(progress.so_far(), interrupted=progress.doing == SEARCHING)


def predict_published(files: list[ReadFile], report: Report) -> Any:
    """Outcomes of published runs."""

    def on_progress(done: int, of: int) -> None:
        report(Update(done, of, "predicting"))

    return predict_runs(files, on_progress=on_progress)
