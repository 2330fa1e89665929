"""A search spread over processes by joblib, and with its backends over a cluster of machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pickle import dumps
from typing import TYPE_CHECKING

from simplan.search.enumeration import Enumeration, Mesh
from simplan.search.evaluators import make_evaluator
from simplan.search.keep import Keep, Timed
from simplan.search.objective import Goal
from simplan.search.run import explore
from simplan.search.tally import Limits, OnProgress, Tally

if TYPE_CHECKING:
    from simplan.search.evaluator import Evaluator
    from simplan.search.question import Question
    from simplan.search.space import SearchSpace

__all__ = ["explore_in_parallel"]

_PARTS_PER_JOB = 8  # several, so that late parts start from the bounds of early ones and no process waits long
_LEAST_PART = 256


@dataclass(frozen=True, slots=True)
class _Part:
    """What one process is asked: some meshes, and what is best so far elsewhere."""

    question: Question
    space: SearchSpace
    meshes: tuple[Mesh, ...]
    limits: Limits
    seeds: tuple[Timed, ...]
    token: str


def explore_in_parallel(
    enumeration: Enumeration,
    question: Question,
    space: SearchSpace,
    limits: Limits,
    keep: Keep,
    tally: Tally,
    jobs: int,
    on_progress: OnProgress,
) -> None:
    """As ``explore`` of all meshes, in ``jobs`` processes, or workers of the backend that joblib is told to use.

    The best, the front and the rejections are the same as those of one process. How many candidates are bounded
    instead of timed depends on which part ends first.
    """
    from joblib import Parallel, delayed

    token = sha256(dumps(question)).hexdigest()

    def parts() -> Iterator[_Part]:
        for meshes in _shares(enumeration, jobs):
            yield _Part(question, space, meshes, limits, tuple(keep.kept), token)

    pool = Parallel(n_jobs=jobs, return_as="generator_unordered", pre_dispatch=jobs, batch_size=1)
    for kept, counts in pool(delayed(_explore_part)(part) for part in parts()):
        keep.merge(kept)
        tally.merge(counts)
        on_progress(tally, keep)


def _shares(enumeration: Enumeration, jobs: int) -> Iterator[tuple[Mesh, ...]]:
    """Meshes in parts of about equal size, neighbours together: they share costs of layers."""
    share = max(_LEAST_PART, enumeration.total // (_PARTS_PER_JOB * max(1, abs(jobs))))
    part: list[Mesh] = []
    size = 0
    for mesh in enumeration.meshes:
        part.append(mesh)
        size += enumeration.size(mesh)
        if size >= share:
            yield tuple(part)
            part, size = [], 0
    if part:
        yield tuple(part)


_evaluators: dict[str, Evaluator] = {}  # of this process: what it remembers serves the next part


def _explore_part(part: _Part) -> tuple[list[Timed], Tally]:
    if part.token not in _evaluators:
        _evaluators.clear()
        _evaluators[part.token] = make_evaluator(part.question)
    keep = Keep(Goal.of(part.space, part.question), part.space.top)
    keep.merge(list(part.seeds))
    tally = Tally(part.limits.num_misses)
    enumeration = Enumeration(part.space, part.question)
    explore(enumeration, part.meshes, _evaluators[part.token], part.limits, keep, tally)
    return keep.kept, tally
