"""Whether there is any plan within the limits of memory, and which one comes nearest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice

from simplan.search.candidate import Candidate
from simplan.search.enumeration import Enumeration, Mesh
from simplan.search.evaluators import make_evaluator
from simplan.search.floor import MemoryFloor
from simplan.search.question import Question
from simplan.search.space import SearchSpace

__all__ = ["capacity_bytes", "first_fit"]

_MOST_AT_ONCE = 1024


def capacity_bytes(question: Question, space: SearchSpace) -> int | None:
    """Memory of a device that plans may use; None when the catalogue does not know it."""
    memory_bytes = question.cluster.device.memory_bytes
    return None if memory_bytes is None else int(memory_bytes * space.max_memory_fraction)


def first_fit(
    question: Question, space: SearchSpace, witness: Candidate | None = None, failed: set[Candidate] | None = None
) -> Candidate | None:
    """A plan that breaks no rule and fits; None when there is none. Exact, and done at the first.

    Args:
        question: What is asked.
        space: The ranges.
        witness: Tried first: a plan of another question that is likely to fit this one too.
        failed: Plans that are known not to fit; gets those that are found not to.
    """
    failed = set() if failed is None else failed
    enumeration = Enumeration(space, question)
    capacity = capacity_bytes(question, space)
    evaluator = make_evaluator(question)
    known = [] if witness is None or enumeration.rules.first(witness) is not None else [witness]
    candidates = (candidate for candidate in chain(known, _frugal_first(enumeration)) if candidate not in failed)
    if capacity is None:
        return next(candidates, None)
    floor = MemoryFloor(question)

    def may_fit(candidate: Candidate) -> bool:
        may = floor.bytes(candidate) <= capacity and evaluator.least_bytes([candidate])[0] <= capacity
        if not may:
            failed.add(candidate)
        return may

    possible = filter(may_fit, candidates)
    batch_size = 1  # the first candidates are the likeliest
    while batch := list(islice(possible, batch_size)):
        for candidate, size in zip(batch, evaluator.device_bytes(batch), strict=True):
            if size <= capacity:
                return candidate
            failed.add(candidate)
        batch_size = min(2 * batch_size, _MOST_AT_ONCE)
    return None


def _frugal_first(enumeration: Enumeration) -> Iterator[Candidate]:
    """Candidates of meshes that split most first: these need least memory, so most searches end soon."""

    def splits(mesh: Mesh) -> tuple[int, int]:
        return mesh.tp * mesh.pp * mesh.dp_shard * mesh.ep, mesh.tp * mesh.cp

    return enumeration.candidates(sorted(enumeration.meshes, key=splits, reverse=True), Counter())
