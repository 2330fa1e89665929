from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simplan import catalog
from simplan.cluster.hardware import DeviceSpec
from simplan.document import parse_yaml
from simplan.errors import SpecError
from simplan.io import parse_model, read_json, read_model, read_yaml, write_json, write_model, write_text
from simplan.plan.plan import ParallelPlan
from simplan.runs.measurement import Measurement
from tests.support.problems import is_of, says


def refusal(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        read_json(path, schema_version=1)
    return str(caught.value).replace(str(path), "f")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 1e9),
        ("1.5E-3", 1.5e-3),
        (".5", 0.5),
        ("010", 10),
        ("0x1f", 31),
        ("0o17", 15),
        ("-3", -3),
        ("yes", "yes"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("True", True),
        ("~", None),
        ("'1'", "1"),
        ("-.inf", float("-inf")),
        ("1e", "1e"),
        ("-", None),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    document = parse_yaml(f"a: {text}" if text != "-" else "a:\n- ", "f")
    expected = [None] if text == "-" else value
    assert document.data["a"] == expected
    assert type(document.data["a"]) is type(expected)


numbers = st.integers(-(10**12), 10**12) | st.floats(-1e6, 1e6, allow_nan=False)
texts = st.text("abc \n:#-[{'\"", max_size=6)
keys = st.text("ab-:#1", min_size=1, max_size=4)
plain = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text("xyz", min_size=1, max_size=3), plain, min_size=1))
def test_reads_what_pyyaml_writes(data: dict[str, object]) -> None:
    assert parse_yaml(yaml.safe_dump(data), "f").data == data
    assert parse_yaml(json.dumps(data), "f").data == data


def test_places_are_those_of_the_keys() -> None:
    document = parse_yaml("a: 1\nb:\n  c: {d: 2, e: [3, 4]}\nf: &x {g: 5}\nh: *x\n", "f")
    assert document.lines == {
        ("a",): (1, 1),
        ("b",): (2, 1),
        ("b", "c"): (3, 3),
        ("b", "c", "d"): (3, 7),
        ("b", "c", "e"): (3, 13),
        ("b", "c", "e", 0): (3, 17),
        ("b", "c", "e", 1): (3, 20),
        ("f",): (4, 1),
        ("f", "g"): (4, 8),
        ("h",): (5, 1),
    }
    assert document.data["h"] == {"g": 5}


@pytest.mark.parametrize("levels", [40, 41])
def test_the_depth_limit(levels: int) -> None:
    text = "[" * levels + "1" + "]" * levels
    if levels == 40:
        assert parse_yaml(text, "f").data
        return
    with pytest.raises(SpecError, match="f:1:41: the file is nested deeper than 40 levels"):
        parse_yaml(text, "f")


def test_the_growth_limit_counts_what_aliases_repeat() -> None:
    row = "[" + "x, " * 999 + "x]"

    def text(repeats: int) -> str:
        return f"a: &a {row}\nb: [{', '.join(['*a'] * repeats)}]"

    assert len(parse_yaml(text(297), "f").data["b"]) == 297
    with pytest.raises(SpecError, match=r"f:2:.*: the file holds more than 300,000 values"):
        parse_yaml(text(300), "f")
    with pytest.raises(SpecError, match="16 MiB of text, aliases expanded"):
        parse_yaml(f"a: &a {'x' * 1_000_000}\nb: [{', '.join(['*a'] * 20)}]", "f")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1.5: a", "f:1:1: ... 1.5 ... text; write"),
        ("null: a", "f:1:1: ... null ... text; write"),
        ("? [a]\n: b", "f:1:3: ... must ... mapping; write"),
        ("a: *b", "f:1:4: ... repeats nothing"),
        ("a: 1\nb:\n  c: 1\n  c: 2", "f:4:3: ... twice ... 3"),
        ("a: !!int 3", "f:1:4: ... !!int ... allowed: ... remove"),
        (
            "a:\n\tb: 1",
            "f:2:1: ... YAML: ... character",
        ),
        ("a: \x01", "f:1: ... YAML: ... characters"),
    ],
)
def test_other_than_plain_data_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_yaml(text, "f")
    assert says(str(caught.value), sentence)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(path).data == {"a": 1}


def test_all_problems_of_a_model_at_once() -> None:
    document = parse_yaml(
        "plan:\n  pp: 0\n  tpp: 2\n  zero_stage: true\n  schedule: gpip\n  stage_layers: [1, a]\n", "f"
    )
    with pytest.raises(SpecError) as caught:
        parse_model(ParallelPlan, document.data["plan"], document.lines, "f", prefix=("plan",))
    schedules = "https://simplan.readthedocs.io/how-to/custom-schedule/"
    expected = {
        (2, 3): ("plan.pp", "0", "at least 1", ""),
        (3, 3): ("plan.tpp", None, "not a known key", "tp or pp?"),
        (4, 3): ("plan.zero_stage", "true", "whole number", ""),
        (5, 3): ("plan.schedule", '"gpip"', "known schedule; did you mean gpipe?", ""),
        (6, 21): ("plan.stage_layers.1", '"a"', "whole number", ""),
    }
    told = {(problem.line, problem.column): problem for problem in caught.value.problems}
    assert told.keys() == expected.keys()
    for place, (field, value, rule, fix) in expected.items():
        assert is_of(told[place], field, value, rule=rule, fix=fix)
    assert told[5, 3].rule.endswith(schedules)
    assert f"f:2:3: {told[2, 3].sentence()}" in str(caught.value).splitlines()


def test_problems_inside_mappings_name_the_key() -> None:
    data = {"id": "x", "kind": "gpuu", "peak_flop_per_s": {"bf17": 1.0, "bf16": -1.0}, "memory_bytes": 2.0**20}
    with pytest.raises(SpecError) as caught:
        parse_model(DeviceSpec, data)
    kind, memory, unknown, rate = caught.value.problems
    assert is_of(kind, "kind", '"gpuu"', rule="known choice", fix="did you mean gpu?")
    assert is_of(memory, "memory_bytes", "1048576.0", rule="whole number", fix="write 1048576")
    assert is_of(unknown, "peak_flop_per_s.bf17", rule="known key", fix="did you mean bf16?")
    assert is_of(rate, "peak_flop_per_s.bf16", "-1.0", rule="at least 1")


def test_models_survive_a_round_trip(tmp_path: Path) -> None:
    plan = ParallelPlan.model_validate({"pp": 2, "stage_layers": [1, 2]})
    write_model(tmp_path / "plan.json", plan)
    assert read_model(tmp_path / "plan.json", ParallelPlan) == plan
    write_model(tmp_path / "device.json", catalog.device("h100-sxm-80gb"))
    assert read_model(tmp_path / "device.json", DeviceSpec) == catalog.device("h100-sxm-80gb")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"schema_version": 1, "a": NaN}', "f: ... NaN ... number; write"),
        ('{"schema_version": 1, "a": 1e999}', "f: ... 1e999 ... number; write"),
        ('{"schema_version": 2}', "f: schema_version = 2: ... 1:"),
        ('{"schema_version": true}', "f: schema_version = true: ... 1:"),
        ("{}", "f: schema_version: is missing; ... 1:"),
        ("[1]", "f: [1]: must be one JSON object"),
        ('{"a": ', "f:1:7: ... JSON: Expecting ... give"),
        ("", "f:1:1: ... JSON: Expecting ... give"),
        ("[" * 100_000, "f: ... nested ... deeply ... give"),
        ("9" * 5000, "f: ... nested ... deeply ... give"),
    ],
)  # fmt: skip
def test_bad_json_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    assert says(refusal(path), sentence)


def test_json_of_any_kind_is_asked_for_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": ')
    with pytest.raises(SpecError, match="give a whole JSON document"):
        read_json(path)


def test_json_that_is_no_measurement(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    write_json(path, {"schema_version": 2, "step_times_s": [1, "2"]})
    with pytest.raises(SpecError) as caught:
        read_model(path, Measurement)
    missing, text = caught.value.problems
    assert caught.value.file == str(path)
    assert is_of(missing, "job", rule="is missing", fix="add job")
    assert is_of(text, "step_times_s.1", '"2"', rule="a number", fix="write 2 without quotes")


def test_writing_replaces_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["r.json"]  # noqa: PTH208


def test_writing_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"r.json: cannot be written: No such file or directory; "):
        write_json(tmp_path / "no" / "r.json", {})


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    write_json(path, {"a": 1})

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(SpecError, match="cannot be written: No space left on device"):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the kernel stops the write in the middle."""
    path = tmp_path / "r.json"
    write_json(path, {"a": 1})
    program = (
        "import resource, signal, sys; from pathlib import Path; from simplan.io import write_whole\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "write_whole(Path(sys.argv[1]), 'x' * 100_000)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=False)
    assert "OSError: [Errno 27] File too large" in done.stderr
    assert read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_json(path, {"a": 1})
        assert json.loads(os.read(reader, 1000)) == {"a": 1}
        assert path.is_fifo()
    finally:
        os.close(reader)


def test_permissions_stay(tmp_path: Path) -> None:
    """A secret that only its owner may read stays so."""
    file = tmp_path / "secret.json"
    file.touch(0o600)
    write_text(file, "{}")
    assert file.stat().st_mode & 0o777 == 0o600


def test_temporary_names_are_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that waits at the temporary file's place is not followed: the name differs every time."""
    names: list[str] = []
    replace = Path.replace

    def noting(self: Path, target: Path) -> Path:
        names.append(self.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", noting)
    for _ in range(2):
        write_text(tmp_path / "out.json", "{}")
    assert len(set(names)) == 2


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.symlink_to(second)
    second.symlink_to(first)
    with pytest.raises(SpecError, match="its links form a loop"):
        write_text(first, "{}")
