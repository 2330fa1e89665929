"""Whether there is any plan within the limits of memory, and which one comes nearest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from simplan.search.candidate import Candidate
from simplan.search.enumeration import Enumeration, Mesh
from simplan.search.evaluator import Evaluator
from simplan.search.question import Question
from simplan.search.space import SearchSpace

__all__ = ["capacity_bytes", "first_fit"]


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
    evaluator = Evaluator(question)
    known = [] if witness is None or enumeration.rules.first(witness) is not None else [witness]
    candidates = (candidate for candidate in chain(known, _frugal_first(enumeration)) if candidate not in failed)
    if capacity is None:
        return next(candidates, None)

    def may_fit(candidate: Candidate) -> bool:
        may = evaluator.average_bytes(candidate) <= capacity and evaluator.least_bytes(candidate) <= capacity
        if not may:
            failed.add(candidate)
        return may

    possible = filter(may_fit, candidates)
    for candidate in possible:
        [(size, _)] = evaluator.numbers([candidate], 0)
        if size <= capacity:
            return candidate
        failed.add(candidate)
    return None


def _frugal_first(enumeration: Enumeration) -> Iterator[Candidate]:
    """Candidates of meshes that split most first: these need least memory, so most searches end soon."""

    def splits(mesh: Mesh) -> tuple[int, int]:
        return mesh.tp * mesh.pp * mesh.dp_shard * mesh.ep, mesh.tp * mesh.cp

    return enumeration.candidates(sorted(enumeration.meshes, key=splits, reverse=True), Counter())
