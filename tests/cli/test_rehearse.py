"""``simplan rehearse`` as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.calls import Simplan, refused


@pytest.mark.slow
def test_memory_of_a_rank_without_a_device(simplan: Simplan, scenario: Path, tmp_path: Path) -> None:
    result = simplan("rehearse", scenario, "--fake", "--rank", "1", "--json", "-o", tmp_path / "r.json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document == json.loads((tmp_path / "r.json").read_text())
    (allocated,) = document["comparison"]["peaks"]
    assert allocated["name"] == "allocated"
    assert abs(allocated["signed_error"]) < 0.03
    assert document["comparison"]["rehearsed"] is None
    assert document["rehearsal"]["rank"] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rank", "2"), "--rank = 2: is no rank of the plan; use 0 to 1, or worst"),
        (("--rank", "first"), "--rank = first: is no rank of the plan"),
    ],
)
def test_a_rank_that_is_none_is_refused(simplan: Simplan, scenario: Path, options: tuple[str, ...], said: str) -> None:
    refused(simplan("rehearse", scenario, *options), said)


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_refused(simplan: Simplan, scenario: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    refused(simplan("rehearse", scenario), "this machine has none; rehearse without a device: --fake")
