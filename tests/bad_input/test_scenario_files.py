"""Every bad file in ``files/`` is refused with exactly the sentences of the ``.txt`` beside it.

The first line of a ``.txt`` is the type of the error, the others are its text with paths relative to the folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from simplan.cluster import machine
from simplan.errors import SpecError
from simplan.scenario import load_scenario
from simplan.units import GIB
from tests.support.problems import refuses

FILES = Path(__file__).parent / "files"


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(machine, "machine_memory_bytes", lambda: 8 * GIB)


@pytest.mark.parametrize("path", sorted(FILES.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.timeout(20)
def test_a_bad_file_is_refused_with_its_sentences(path: Path) -> None:
    kind, _, text = path.with_suffix(".txt").read_text(encoding="utf-8").partition("\n")
    with pytest.raises(SpecError) as caught:
        load_scenario(path)
    assert str(caught.value).replace(f"{FILES}{os.sep}", "") == text.rstrip("\n")
    assert type(caught.value).__name__ == kind
    assert caught.value.exit_code == 2


def test_every_bad_file_has_its_sentences() -> None:
    assert {path.stem for path in FILES.glob("*.yaml")} == {path.stem for path in FILES.glob("*.txt")}


def refusal(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        load_scenario(path)
    return str(caught.value)


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "gpipe.yaml").write_text("name: x\n")
    assert refusal(tmp_path / "gpip.yaml") == (
        f"{tmp_path}/gpip.yaml: does not exist; did you mean {tmp_path}/gpipe.yaml?"
    )
    assert refusal(tmp_path / "no" / "where.yaml") == f"{tmp_path}/no/where.yaml: does not exist; check the path"


def test_a_folder_is_no_scenario(tmp_path: Path) -> None:
    with refuses("", rule="is a folder", file=str(tmp_path)):
        load_scenario(tmp_path)


def test_a_fifo_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert refusal(tmp_path / "pipe.yaml").endswith("is not an ordinary file; name a text file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "secret.yaml"
    path.write_text("name: x\n")
    path.chmod(0)
    assert refusal(path) == f"{path}: may not be read; check its permissions"


def test_a_name_with_a_null_byte(tmp_path: Path) -> None:
    assert "cannot be read: embedded null byte" in refusal(tmp_path / "a\0b.yaml")


def test_a_file_over_the_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    path.write_bytes(b"#" * (4 * 1024 * 1024 + 1))
    with refuses("", rule="is larger than 4 MiB", file=str(path)):
        load_scenario(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    [
        "[" * 4_000_000,
        "{a: " * 1_000_000,
        "[" + "a," * 2_000_000 + "]",
        "".join(f"k{i}: 1\n" for i in range(140_000)),
        "expect: [" + "{}," * 90_000 + "]",
        "model: {preset: " + "m" * 4_000_000 + "}",
        "a" * 4_000_000 + ": 1",
    ],
    ids=["lists", "mappings", "items", "keys", "expectations", "long name", "long key"],
)
def test_an_adversarial_file_of_the_largest_size_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text(text)
    assert len(refusal(path)) < 20_000
