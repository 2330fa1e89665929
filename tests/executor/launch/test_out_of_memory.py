"""A rank without enough memory: what is said of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.launch.errors import RankOutOfMemoryError, out_of_memory_explained, requested_bytes
from executor.launch.rank import RankFiles
from executor.launch.watchdog import read_beat
from executor.run import run_job
from simplan.errors import RunError
from simplan.units import MIB
from tests.executor.conftest import make_job, make_model
from tests.support.problems import says

CPU = torch.device("cpu")
GROUP_BYTES = 16 * MIB
TOO_MUCH_BYTES = 2**60  # more than any machine can map


def test_a_rank_out_of_memory_is_told_with_its_action_and_its_prediction(tmp_path: Path, with_fault: Any) -> None:
    """Its address space is limited by the system; the logits of a microbatch are several times what is left of it."""
    model = make_model("llama", vocab_size=40_000)
    job = make_job("gpipe", pp=2, model=model, predicted_memory_bytes=(100 * MIB, 200 * MIB))
    with pytest.raises(RunError) as caught:
        run_job(job, tmp_path, rank_module=with_fault("memory"))
    text = str(caught.value)
    assert says(text, "rank 1 ran out of memory", "forward of microbatch 2, stage 1 (1F2 of step 1)", "7.3 MiB more")
    assert re.search(r"held [\d.]+ [MG]iB .*\(ulimit -v\) [\d.]+ [MG]iB; ", text)
    assert says(text, "200.0 MiB was predicted", "/1/stderr.log")


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """The list of processes of a control group with little memory: the kernel kills one that wants more."""
    group = Path("/sys/fs/cgroup/memory") / f"simplan{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(GROUP_BYTES))
    except OSError as error:
        pytest.skip(f"no control group for memory can be made here: {error}")
    yield group / "cgroup.procs"
    group.rmdir()


@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_is_told_from_one_that_somebody_kills(small_memory: Path, tmp_path: Path) -> None:
    """Rank 1 is put among the poor before it begins; its part of the model is larger than what they may have."""
    moved: list[int] = []

    def move_rank_1(step: int, of: int) -> None:
        del of
        beat = read_beat(RankFiles(tmp_path, 1).heartbeat)
        if step == 1 and beat is not None:
            small_memory.write_text(str(beat.pid))
            moved.append(beat.pid)

    model = make_model("llama", vocab_size=200_000)
    job = make_job("gpipe", pp=2, model=model, num_steps=1000, predicted_memory_bytes=(100 * MIB, 200 * MIB))
    with pytest.raises(RunError) as caught:
        run_job(job, tmp_path, move_rank_1)
    assert moved
    assert says(str(caught.value), "rank 1", "signal 9", "memory", "200.0 MiB was predicted")


def test_torch_says_what_it_requested_bytes() -> None:
    said = r"asked for 1073741824\.00 GiB more, where the host has .* no peak"
    with pytest.raises(RankOutOfMemoryError, match=said), out_of_memory_explained(CPU, None):
        torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8)
    assert requested_bytes("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has") == 2.5 * 2**30
    assert requested_bytes("std::bad_alloc") is None


def wrapped(error: Exception) -> Exception:
    """As torch's pipelines wrap what a stage raises."""
    outer = RuntimeError("failed to run forward")
    outer.__cause__ = error
    return outer


SHORTAGES = [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")]


@pytest.mark.parametrize("error", [*SHORTAGES, *map(wrapped, SHORTAGES)], ids=repr)
def test_every_lack_of_memory_is_known(error: Exception) -> None:
    with pytest.raises(RankOutOfMemoryError), out_of_memory_explained(CPU, None):
        raise error


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match=r"^boom$"), out_of_memory_explained(CPU, None):
        raise RuntimeError("boom")
