"""The table of a plan: its schedule, FSDP's gathers where its pipeline has them, and schedules of the user's own.

Those are in files or functions of installed packages. Also actions and tables in text form.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.errors import ProgramError, SpecError
from simplan.plan.plan import ParallelPlan
from simplan.program.action import Action, ActionKind, format_table, parse_table
from simplan.program.schedules import PipelineShape, gpipe, interleaved_1f1b, naive
from simplan.program.tables.check import check_table
from simplan.program.tables.complete import complete_table
from simplan.program.tables.custom_schedule import locating
from simplan.program.tables.plan_table import plan_table, unshard_of
from tests.support.problems import refuses, says


@pytest.mark.parametrize(
    ("plan", "unshard"),
    [
        ({"dp_shard": 4}, "none"),
        ({"pp": 2}, "none"),
        ({"pp": 2, "dp_replicate": 2}, "none"),
        ({"pp": 2, "dp_replicate": 2, "zero_stage": 3}, "none"),
        ({"pp": 2, "dp_shard": 2, "zero_stage": 1}, "none"),
        ({"pp": 2, "dp_shard": 2, "zero_stage": 2}, "once"),
        ({"pp": 2, "dp_shard": 2, "reshard_after_forward": False}, "once"),
        ({"pp": 2, "dp_shard": 2}, "window"),
        ({"pp": 2, "cp": 2, "zero_stage": 3}, "window"),
    ],
)
def test_which_plans_gather_by_actions(plan: dict[str, Any], unshard: str) -> None:
    made = ParallelPlan(**plan)
    assert unshard_of(made) == unshard
    table = plan_table(made, 4)
    check_table(table, made.num_stages, 4)
    kinds = {action.kind for row in table for action in row}
    assert (ActionKind.UNSHARD in kinds) == (ActionKind.RESHARD in kinds) == (unshard != "none")


def test_the_schedule_is_the_plans() -> None:
    assert plan_table(ParallelPlan(), 3) == complete_table(naive(PipelineShape(1, 3)))
    assert plan_table(ParallelPlan(pp=2, schedule="gpipe"), 3) == complete_table(gpipe(PipelineShape(2, 3)))
    interleaved = complete_table(interleaved_1f1b(PipelineShape(2, 3, 4)))
    assert plan_table(ParallelPlan(pp=2, virtual_stages=4), 3) == interleaved


ONE_F_ONE_B = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ParallelPlan]:
    """Installs a package with one schedule, ``own``, that has this body; gives a plan of two ranks that names it."""
    monkeypatch.syspath_prepend(tmp_path)
    count = 0

    def install(body: str) -> ParallelPlan:
        nonlocal count
        count += 1
        module = f"{tmp_path.name}_{count}"  # nothing is imported twice in a process
        (tmp_path / f"{module}.py").write_text(f"def own(shape):\n    {body}\n")
        info = tmp_path / "own_schedules-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-schedules\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[simplan.schedules]\nown = {module}:own\n")
        return ParallelPlan(pp=2, schedule="own")

    return install


def from_file(folder: Path, text: str, **plan: Any) -> ParallelPlan:
    file = folder / "own.csv"
    file.write_text(text)
    return ParallelPlan(**{"pp": 2, "schedule": str(file), **plan})


def test_a_table_in_a_file_is_completed_like_the_schedule_it_equals(tmp_path: Path) -> None:
    table = plan_table(from_file(tmp_path, ONE_F_ONE_B), 3)
    assert table == plan_table(ParallelPlan(pp=2, schedule="1f1b"), 3)
    spaced = ONE_F_ONE_B.replace(",", " ,, ").replace("\n", "\r\n\r\n")
    assert plan_table(from_file(tmp_path, spaced), 3) == table


def test_a_table_with_all_its_communications_only_gets_the_optimizer_step(tmp_path: Path) -> None:
    table = plan_table(ParallelPlan(pp=2, schedule="1f1b"), 3)
    text = "\n".join(",".join(str(action) for action in row[:-1]) for row in table)
    assert "SEND_F" in text
    assert plan_table(from_file(tmp_path, text), 3) == table


def test_a_function_of_a_package_may_give_actions_or_their_text(package: Callable[[str], ParallelPlan]) -> None:
    table = plan_table(ParallelPlan(pp=2, schedule="gpipe"), 3)
    body = "return [[f'{r}{k}{i}' for k in 'FB' for i in range(shape.num_microbatches)] for r in range(2)]"
    assert plan_table(package(body), 3) == table
    body = "from simplan.program.schedules import gpipe; return gpipe(shape)"
    assert plan_table(package(body), 3) == table


@pytest.mark.parametrize(
    ("text", "plan", "sentence"),
    [
        (ONE_F_ONE_B.replace("1B1", "1X1"), {}, "own.csv: line 2 (rank 1), column 4: action '1X1': must be"),
        (ONE_F_ONE_B, {"pp": 3}, "2 rows ... pp = 3; use plan.pp = 2"),
        (ONE_F_ONE_B, {"virtual_stages": 2}, "has 2 stages and the plan has 4; use plan.virtual_stages = 1"),
        ("0F0,2F0\n1F0,3F0\n", {}, "has 4 stages and the plan has 2; use plan.virtual_stages = 2"),
        (
            "0F0,0B0\n1F0,1B0\n",
            {},
            "microbatch 0; ... 0 to 2; ... training.global_batch_size",
        ),
        ("", {}, "has 0 rows"),
        (
            "0F0,0F1,0F2,0B0,0B1,0B2\n0F0,1F1,1F2,1B0,1B1,1B2\n",
            {},
            "own.csv: ... 0F0 (line 1, rank 0, column 1; line 2, rank 1, column 1) ... rank 1 ... stage 0",
        ),
        (
            "1F0,0F0,0F1,0F2,0B0,0B1,0B2\n1F1,1F2,1B0,1B1,1B2\n",
            {},
            "own.csv: ... 1F0 (line 1, rank 0, column 1) ... rank 0 ... stage 1 ... rank 1",
        ),
        (
            "0F0,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n",
            {},
            "own.csv: action 0F1 (line 1, rank 0) is missing",
        ),
        (
            "0B0,0F0,0F1,0F2,0B1,0B2\n\n1F0,1B0,1F1,1B1,1F2,1B2\n",
            {},
            "own.csv: ... 0B0 (line 1, rank 0, column 1) ... before 0F0 (line 1, rank 0, column 2)",
        ),
        (
            "0F0,0B0,0F1,0F2,0B1,0B2\n\n1F1,1B1,1F0,1B0,1F2,1B2\n",
            {},
            "rank 1 at 1F1 (line 3, rank 1, column 1) waits for 0F1 (line 1, rank 0, column 3)",
        ),
        (ONE_F_ONE_B.replace("0F0", "0F3"), {}, "has microbatches 0 to 3; a step has microbatches 0 to 2"),
    ],
)
def test_errors_of_a_file_are_named(text: str, plan: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises((SpecError, ProgramError)) as caught:
        plan_table(from_file(tmp_path, text, **plan), 3)
    assert says(str(caught.value), sentence)


def test_an_action_that_is_dropped_or_repeated_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="action 0B2 is missing"):
        check_table(plan_table(from_file(tmp_path, ONE_F_ONE_B.replace(",0B2", "")), 3), 2, 3)
    with pytest.raises(ProgramError, match="action 0F2 occurs 2 times; once is right"):
        check_table(plan_table(from_file(tmp_path, ONE_F_ONE_B.replace("0F2", "0F2,0F2")), 3), 2, 3)


def test_errors_of_a_checked_table_have_locations(tmp_path: Path) -> None:
    """Actions that simplan adds, and missing ones, have the line of their stage."""
    file = from_file(tmp_path, ONE_F_ONE_B.replace("0B2", "0B1")).schedule
    with pytest.raises(ProgramError) as caught, locating(file):
        check_table(plan_table(from_file(tmp_path, ONE_F_ONE_B.replace("0B2", "0B1")), 3), 2, 3)
    twice, reduced, missing = str(caught.value).splitlines()
    assert says(twice, f"{file}: ", "0B1", "line 1, rank 0, column 5; line 1, rank 0, column 6", "2 times")
    assert says(reduced, f"{file}: ", "0REDUCE_GRAD", "line 1, rank 0", "2 times")
    assert says(missing, f"{file}: ", "0B2", "line 1, rank 0", "missing")
    with pytest.raises(ProgramError, match=r"^action 0B1 is missing$"), locating("1f1b"):
        raise ProgramError("action 0B1 is missing")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for name, content in (("missing.csv", None), ("binary.csv", b"\xff\xfe\x00\x81")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(SpecError, match=rf"^plan.schedule = .*{name}: cannot be read: .*; name a CSV file"):
            plan_table(ParallelPlan(pp=2, schedule=str(tmp_path / name)), 3)


def test_failures_of_a_package_are_its_own(package: Callable[[str], ParallelPlan], tmp_path: Path) -> None:
    with refuses("plan.schedule", rule="failed for 2 ranks and 3"):
        plan_table(package("return 1 / 0"), 3)
    with pytest.raises(ProgramError, match="schedule own: action 'nonsense': must be"):
        plan_table(package("return [['nonsense'], []]"), 3)
    plan = package("return []")
    (tmp_path / "own_schedules-1.0.dist-info" / "entry_points.txt").write_text("[simplan.schedules]\nown = nowhere:f\n")
    with refuses("plan.schedule", "own", rule="cannot be loaded from nowhere:f: No"):
        plan_table(plan, 3)


ACTIONS = st.builds(
    lambda stage, kind, microbatch: Action(stage, kind, microbatch if kind.per_microbatch else None),
    st.integers(0, 999),
    st.sampled_from(ActionKind),
    st.integers(0, 9999),
)


@given(st.lists(st.lists(ACTIONS, max_size=8), max_size=4))
def test_text_form_reads_back(rows: list[list[Action]]) -> None:
    table = tuple(tuple(row) for row in rows)
    assert parse_table(format_table(table)) == table


@pytest.mark.parametrize("text", ["0F1", "2SEND_F3", "1B0", "0UNSHARD", "1REDUCE_GRAD", "0I2", "0W2"])
def test_torch_reads_the_same_text(text: str) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs, ours = schedules._Action.from_str(text), Action.parse(text)
    assert (theirs.stage_index, theirs.microbatch_index) == (ours.stage, ours.microbatch)
    assert str(theirs) == str(ours) == text


@pytest.mark.parametrize("text", ["0F0zzz", "", "F0", "0X0", "0F", "0OPTIM3", "-1F0", "0F-1", "0F1 0F2"])
def test_strings_that_are_no_action_are_refused(text: str) -> None:
    with pytest.raises(ProgramError, match="action"):
        Action.parse(text)
