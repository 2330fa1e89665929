"""The compiled engine against the reference, run by run, and what both promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplan.errors import SpecError
from simplan.goodput.engines import philox
from simplan.goodput.engines.draws import NUM_PURPOSES, Draws
from simplan.goodput.engines.simulate import one_run, simulate
from simplan.goodput.setup import WATERFALL, CauseSetup, OneRun, Runs, RunSetup, Size
from tests.goodput.setups import changed_fields, checkpointed, failures, setups
from tests.support.slow import examples


def stack(rows: Sequence[OneRun]) -> Runs:
    """Runs of the reference as rows."""
    return Runs(
        time_s=np.array([row.time_s for row in rows]),
        waterfall_s=np.array([[row.waterfall_s[part] for part in WATERFALL] for row in rows]),
        interruptions=np.array([row.interruptions for row in rows], np.int64),
        node_s=np.array([row.node_s for row in rows]),
        checkpoints=np.array([row.num_checkpoints for row in rows], np.int64),
    )


def outcome(runs: Callable[[], Runs]) -> Runs | str:
    """Runs, or the error for one that does not finish."""
    try:
        return runs()
    except SpecError as error:
        return str(error)


def test_engines_agree_on_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("simplan.goodput.engines.simulate")  # simplan.goodput is a function for users
    monkeypatch.setattr(module, "_MAX_STOPS", 300)  # some never end
    seen: set[str] = set()

    @settings(max_examples=examples(50, 100))
    @given(setups(), st.integers(0, 2**63 - 1))
    def agree(setup: RunSetup, seed: int) -> None:
        seen.update(changed_fields(setup))
        compiled = outcome(lambda: simulate(setup, num_runs=2, seed=seed))
        reference = outcome(lambda: stack([one_run(setup, seed=seed, number=number) for number in range(2)]))
        if isinstance(reference, str) or isinstance(compiled, str):
            assert reference == compiled
            return
        assert compiled.time_s == pytest.approx(reference.time_s, rel=1e-9)
        assert compiled.waterfall_s == pytest.approx(reference.waterfall_s, rel=1e-9, abs=1e-6)
        assert (compiled.interruptions == reference.interruptions).all()
        assert compiled.node_s == pytest.approx(reference.node_s, rel=1e-9, abs=1e-4)
        assert (compiled.checkpoints == reference.checkpoints).all()
        assert compiled.waterfall_s.sum(axis=1) == pytest.approx(compiled.time_s, rel=1e-9)

    agree()
    of_all = {
        f"{kind.__name__}.{field_of_setup.name}"
        for kind in (RunSetup, CauseSetup, Size)
        for field_of_setup in fields(kind)
    }
    assert of_all == seen


def test_compiled_streams_are_those_of_numpy() -> None:
    seed, number = 2**63 - 1, 7
    draws, blocks = Draws(seed, number), np.zeros((6, philox.WORDS), np.uint64)
    for index in range(9):
        for source in range(2):
            for purpose in range(NUM_PURPOSES):
                stream = NUM_PURPOSES * source + purpose
                ours = philox.uniform(seed, number, stream, index, blocks[stream])
                assert ours == draws.uniform(source, purpose)


def test_equal_seeds_give_equal_bytes() -> None:
    setup = checkpointed(200, causes=(failures(50.0),), restart_s=2.0)
    runs, more = simulate(setup, num_runs=300, seed=3), simulate(setup, num_runs=600, seed=3, jobs=2)
    for field_of_runs in fields(Runs):
        assert getattr(more, field_of_runs.name)[:300].tobytes() == getattr(runs, field_of_runs.name).tobytes()
    assert simulate(setup, num_runs=300, seed=4).time_s.tobytes() != runs.time_s.tobytes()


def test_stretches_cover_the_run_without_gaps() -> None:
    setup = checkpointed(500, causes=(failures(50.0),), detection_s=3.0, restart_s=2.0, evaluation_every=7)
    run = one_run(replace(setup, evaluation_s=4.0))
    ends_s = [0.0, *(stretch.end_s for stretch in run.stretches)]
    assert [stretch.start_s for stretch in run.stretches] == ends_s[:-1]
    assert ends_s[-1] == run.time_s
    assert {stretch.cause for stretch in run.stretches} == {"", "failure"}
    by_kind = {stretch.kind for stretch in run.stretches}
    assert by_kind == {"compute", "evaluation", "lost_work", "detection", "restart"}


def test_nodes_of_a_trace_come_and_go() -> None:
    """Nodes for 1,000 s, none for 1,000 s: the job waits for half of the time."""
    setup = checkpointed(50_000, is_spot=True, trace_s=(0.0, 1000.0, 2000.0), trace_nodes=(1, 0))
    run = simulate(setup, num_runs=1)
    assert run.waterfall_s[0, WATERFALL.index("waiting")] / run.time_s == pytest.approx(0.5, abs=0.02)
    assert run.node_s[0, 1] / run.time_s == pytest.approx(0.5, abs=0.02)
    on_demand = simulate(replace(setup, on_demand=True), num_runs=1)
    assert on_demand.waterfall_s[0, WATERFALL.index("waiting")] == 0
    assert on_demand.node_s[0, 0] / on_demand.time_s == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("changes", [{}, {"trace_s": (0.0, 1000.0), "trace_nodes": (0,)}])
def test_a_run_that_never_ends_is_refused(changes: dict) -> None:
    causes = () if changes else (failures(10.0),)
    setup = checkpointed(1000, checkpoint_every=0, restart_s=100.0, causes=causes, **changes)
    with pytest.raises(SpecError, match="has not finished after"):
        simulate(setup, num_runs=1)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_beyond_the_streams_are_refused(seed: int) -> None:
    with pytest.raises(SpecError, match=r"seed = .*must be from 0 to"):
        simulate(checkpointed(1), num_runs=1, seed=seed)
