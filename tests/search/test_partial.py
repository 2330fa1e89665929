"""Plans that run as few blocks again as fit, against every number of blocks of every plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.search.alike import Numbers, shown

from simplan.predict import predict
from simplan.search import Question, SearchResult, SearchSpace, search
from simplan.search.candidate import Candidate
from simplan.search.enumeration import Enumeration
from simplan.search.tally import rounded
from simplan.spec import catalogue
from simplan.units import MIB
from tests.search.questions import question

SPACE: dict[str, Any] = {
    "schedule": "1f1b",
    "pp": (1, 2),
    "tp": 1,
    "microbatch_size": 2,
    "recompute": ("none", "full"),
    "zero_stage": (0, 1),
    "top": 4,
}
CAPACITIES = {"torch": 1117 * MIB, "megatron-core": 1116 * MIB}
BLOCKS = 6


def asked_for(software: str) -> Question:
    asked = question(
        num_devices=4,
        memory_bytes=CAPACITIES[software],
        hidden_size=512,
        vocab_size=2048,
        seq_len=256,
        num_hidden_layers=BLOCKS,
    )
    return replace(asked, software=catalogue.software(software))


def found_by(asked: Question, **space: Any) -> SearchResult:
    space_of = SearchSpace.model_validate({**SPACE, **space})
    return search(asked.model, asked.cluster, asked.training, asked.software, space_of, explain=False)


@cache
def every(software: str) -> tuple[tuple[Candidate, int, float], ...]:
    """Every plan that fits with every number of blocks that run again, none and all among them, by ``predict``."""
    asked = asked_for(software)
    enumeration = Enumeration(SearchSpace.model_validate(SPACE), asked)

    def variants(one: Candidate) -> Iterator[Candidate]:
        yield one
        if one.recompute == "full":
            yield from (one._replace(recompute_layers=number) for number in range(1, BLOCKS))

    rows = []
    for candidate in enumeration.candidates(enumeration.meshes, Counter()):
        for one in variants(candidate):
            found = predict(asked.job(one.plan()), name="x")
            if found.worst_memory.wanted_bytes <= CAPACITIES[software]:
                rows.append((one, found.worst_memory.wanted_bytes, rounded(found.step_time_s)))
    return tuple(rows)


def wanted(software: str) -> list[Numbers]:
    """Of the plans that differ in ``recompute_layers`` alone those that need it, with as few blocks as fit."""
    least: dict[Candidate, tuple[Candidate, int, float]] = {}
    fitting = {one for one, _, _ in every(software)}
    rows = []
    for one, size, seconds in every(software):
        family = one._replace(recompute_layers=0)
        if not one.recompute_layers:
            rows.append((one.plan(), size, seconds))
        elif family._replace(recompute="none") not in fitting:
            known = least.get(family)
            if known is None or one.recompute_layers < known[0].recompute_layers:
                least[family] = one, size, seconds
    alike = {(family, seconds) for family, _, seconds in every(software)}
    rows += [(one.plan(), size, s) for family, (one, size, s) in least.items() if (family, s) not in alike]
    return sorted(rows, key=lambda row: row[2])


@pytest.mark.parametrize("software", CAPACITIES)
def test_it_finds_as_few_blocks_as_fit(software: str) -> None:
    result = found_by(asked_for(software))
    best = shown(wanted(software))[: SPACE["top"]]
    assert [plan.plan for plan in result.ranked] == [row[0] for row in best]
    assert [plan.step_time_s for plan in result.ranked] == pytest.approx([row[2] for row in best], rel=1e-3)
    assert [plan.device_bytes for plan in result.ranked] == pytest.approx([row[1] for row in best], rel=1e-3)
    some = [plan.plan.recompute_layers for plan in result.ranked if plan.plan.recompute_layers]
    assert len(some) > 1, "else little was tested"
    space = result.space
    assert space.total == sum(space.rejected.values()) + space.bounded + space.timed


@pytest.mark.parametrize("software", CAPACITIES)
def test_fewer_blocks_are_faster_and_hold_more(software: str) -> None:
    """What the bisection relies on."""
    families: dict[Candidate, list[tuple[int, int, float]]] = {}
    for one, size, seconds in every(software):
        if one.recompute == "full":
            number = one.recompute_layers or BLOCKS
            families.setdefault(one._replace(recompute_layers=0), []).append((number, size, seconds))
    for rows in families.values():
        _, sizes, times_s = zip(*sorted(rows), strict=True)
        assert list(sizes) == sorted(sizes, reverse=True)
        assert list(times_s) == sorted(times_s)


def test_without_it_all_blocks_run_again_or_none() -> None:
    result = found_by(asked_for("torch"), recompute_layers="all", top=50)
    assert all(plan.plan.recompute_layers is None for plan in result.ranked)
    fastest = min(seconds for one, _, seconds in every("torch") if not one.recompute_layers)
    assert result.best is not None
    assert result.best.step_time_s == pytest.approx(fastest, rel=1e-9)


def test_software_that_cannot_does_not() -> None:
    asked = replace(asked_for("megatron-core"), software=catalogue.software("deepspeed-2021"))
    result = found_by(asked, zero_stage=(0, 1), top=50)
    assert all(plan.plan.recompute_layers is None for plan in result.ranked)


def test_how_many_plans_there_are_depends_on_no_ranking() -> None:
    few, many = (found_by(asked_for("torch"), top=top).space for top in (1, 50))
    assert few.total == many.total == sum(many.rejected.values()) + many.bounded + many.timed
    assert few.rejected == many.rejected
    assert many.some_blocks > 0
