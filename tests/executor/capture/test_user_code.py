"""Functions of a user's code that cannot be imported, fail, or give something else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from executor.capture.user_code import capture
from simplan.errors import SpecError
from simplan.model.captured.request import CaptureRequest, Reference

CODE = """
from torch import nn, zeros

Model = nn.Bilinear


def make():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def batch(number):
    return (zeros(number, 4),)


def fails(number):
    raise ValueError("no data")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_own.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("factory", "batch", "said"),
    [
        (
            "users_own:nothing",
            "users_own:batch",
            "^SOURCE = users_own:nothing: is no function of users_own",
        ),
        ("users_own:Model", "users_own:batch", r"^SOURCE = users_own:Model: fails in .*: TypeError: "),
        ("nowhere:make", "users_own:batch", r"^SOURCE = nowhere:make: cannot be imported \(ModuleNotFoundError: "),
        (
            "users_own:make",
            "users_own:fails",
            r"^--inputs = users_own:fails with 2: fails in .*: ValueError: no data",
        ),
        ("users_own:zeros", "users_own:batch", "^SOURCE = users_own:zeros: "),
    ],
)
def test_errors_of_the_code_are_named(factory: str, batch: str, said: str, folder: str) -> None:
    with pytest.raises(SpecError, match=said):
        capture(CaptureRequest(factory=Reference.of("", factory), batch=Reference.of("", batch), folder=folder))


def test_a_capture_says_where_it_comes_from(folder: str) -> None:
    request = CaptureRequest(
        factory=Reference.of("", "users_own:make"),
        batch=Reference.of("", "users_own:batch"),
        name="mine",
        folder=folder,
    )
    captured = capture(request)
    assert (captured.name, captured.factory, captured.batch) == ("mine", "users_own:make", "users_own:batch")
    assert len(captured.source_sha256) == 64
