"""Runs that go on from checkpoints compute what undisturbed runs compute."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.run import run_job
from executor.train.checkpoint_folder import newest_checkpoint
from simplan.errors import RunError, SpecError
from simplan.runs.checkpoint import CheckpointHeader, Checkpointing
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.training import TrainingSpec
from tests.executor.conftest import RANK_PROGRAMS, make_job, make_model
from tests.support.problems import is_of, says
from tests.support.slow import slow_except

NUM_STEPS = 6
"""All of them: one warm-up step and the steady ones."""


def with_checkpoints(job: RunSpec, folder: Path, num_steps: int = NUM_STEPS, **asked: Any) -> RunSpec:
    checkpointing = Checkpointing(**{"folder": str(folder), "every": 2, **asked})
    return job.model_copy(update={"checkpointing": checkpointing, "num_steps": num_steps - (job.num_warmup_steps or 0)})


def in_two_parts(job: RunSpec, other: RunSpec, folder: Path) -> tuple[Measurement, Measurement]:
    """The first four steps as ``job``, the others as ``other``, which goes on from their checkpoint."""
    first = run_job(with_checkpoints(job, folder / "kept", 4), folder / "first")
    return first, run_job(with_checkpoints(other, folder / "kept", resume=True), folder / "second")


def undisturbed(job: RunSpec, folder: Path, num_steps: int = NUM_STEPS) -> Measurement:
    return run_job(job.model_copy(update={"num_steps": num_steps - (job.num_warmup_steps or 0)}), folder)


def test_a_resumed_run_computes_the_same(tmp_path: Path) -> None:
    job = make_job(dp=2, num_steps=NUM_STEPS - 1)
    whole = undisturbed(job, tmp_path / "whole")
    first, second = in_two_parts(job, job, tmp_path)
    assert first.losses == whole.losses[:4]
    assert second.losses == whole.losses[4:]
    assert second.first_step == 4
    assert second.notes == ("resuming after step 4",)
    assert [timing.step for timing in first.checkpoints] == [2, 4]
    assert all(timing.failure is None for timing in first.checkpoints)
    header, notes = newest_checkpoint(tmp_path / "kept")
    assert header is not None
    assert (header.step, notes) == (6, [])
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-00000004", "step-00000006"]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lamb-fsdp": {
        "plan": {"dp_shard": 2},
        "training": TrainingSpec(global_batch_size=16, precision="fp32", optimizer="lamb", clip_grad_norm=0.3),
    },
    "muon-fsdp": {
        "plan": {"dp_shard": 2},
        "training": TrainingSpec(global_batch_size=16, precision="fp32", optimizer="muon"),
    },
    "adafactor-fsdp": {
        "plan": {"dp_shard": 2},
        "training": TrainingSpec(global_batch_size=16, precision="fp32", optimizer="adafactor_torch"),
    },
    "momentum-zero1": {
        "plan": {"dp_shard": 2, "zero_stage": 1},
        "training": TrainingSpec(global_batch_size=16, precision="fp32", optimizer="sgd_momentum"),
    },
    "fsdp": {"plan": {"dp_shard": 2}},
    "zero1": {"plan": {"dp_shard": 2, "zero_stage": 1}},
    "1f1b": {"schedule": "1f1b", "pp": 2},
    "tp": {"plan": {"tp": 2}},
    "interleaved-fsdp": {"schedule": "interleaved_1f1b", "pp": 2, "plan": {"virtual_stages": 2, "dp_shard": 2}},
    "tp-fsdp": {"plan": {"tp": 2, "dp_shard": 2}},
    "hsdp": {"plan": {"dp_shard": 2, "dp_replicate": 2}},
    "zb-v": {"schedule": "zb-v", "pp": 2},
}


def job_of(case: dict[str, Any], **fields: Any) -> RunSpec:
    tied = case.get("schedule") != "interleaved_1f1b"
    sizes = {key: value for key, value in case.items() if key in LLAMA}
    case = {key: value for key, value in case.items() if key not in LLAMA}
    model = make_model(vocab_size=96, num_hidden_layers=4, tied_embeddings=tied, **sizes)
    job: RunSpec = make_job(model=model, **{**case, **fields})
    return job


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_strategy_goes_on_to_the_last_bit(case: dict[str, Any], tmp_path: Path) -> None:
    job = job_of(case)
    whole = undisturbed(job, tmp_path / "whole")
    _, second = in_two_parts(job, job, tmp_path)
    assert second.losses == whole.losses[4:]


LLAMA = {"family": "llama", "num_attention_heads": 4, "num_key_value_heads": 4}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp 2 to plain": ({"dp": 2}, {}),
    "plain to ddp 2": ({}, {"dp": 2}),
    "fsdp 4 to fsdp 2": ({"plan": {"dp_shard": 4}}, {"plan": {"dp_shard": 2}}),
    "fsdp 2 to hsdp 2x2": ({"plan": {"dp_shard": 2}}, {"plan": {"dp_shard": 2, "dp_replicate": 2}}),
    "fsdp 2 to zero1 4": ({"plan": {"dp_shard": 2}}, {"plan": {"dp_shard": 4, "zero_stage": 1}}),
    "zero1 2 to fsdp 2": ({"plan": {"dp_shard": 2, "zero_stage": 1}}, {"plan": {"dp_shard": 2}}),
    "1f1b to 1f1b x ddp 2": ({"schedule": "1f1b", "pp": 2}, {"schedule": "1f1b", "pp": 2, "dp": 2}),
    "tp x ddp 2 to tp": ({"plan": {"tp": 2}, "dp": 2}, {"plan": {"tp": 2}}),
    "tp x ddp 2 to one": ({"plan": {"tp": 2}, "dp": 2}, {}),
    "tp to fsdp": ({**LLAMA, "plan": {"tp": 2}}, {**LLAMA, "plan": {"dp_shard": 2}}),
    "fsdp x tp to tp 4": ({**LLAMA, "plan": {"tp": 2, "dp_shard": 2}}, {**LLAMA, "plan": {"tp": 4}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_ranks_go_on(change: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    """The same samples, summed in another order."""
    training = TrainingSpec(global_batch_size=16, precision="fp32")

    def job(case: dict[str, Any]) -> RunSpec:
        """Four microbatches on every data-parallel rank."""
        made = job_of(case, dtype="fp64", training=training)
        plan = made.plan.model_copy(update={"microbatch_size": 4 // made.plan.dp})
        return made.model_copy(update={"plan": plan})

    before, after = map(job, change)
    whole = undisturbed(before, tmp_path / "whole")
    _, second = in_two_parts(before, after, tmp_path)
    assert second.losses == pytest.approx(whole.losses[4:], rel=1e-9)


def test_a_run_that_may_not_go_on_is_refused(tmp_path: Path) -> None:
    job = with_checkpoints(make_job(), tmp_path / "kept", 2)
    run_job(job, tmp_path / "first")
    folder = tmp_path / "kept" / "step-00000002"

    def refused(**changes: Any) -> SpecError:
        with pytest.raises(SpecError) as caught:
            run_job(job.model_copy(update=changes), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return caught.value

    def resume(**changes: Any) -> dict[str, Any]:
        return {
            "checkpointing": with_checkpoints(job, tmp_path / "kept", resume=True).checkpointing,
            "num_steps": 5,
            **changes,
        }

    kept = str(tmp_path / "kept")
    [problem] = refused().problems
    assert is_of(problem, "--checkpoint-dir", kept, rule="the newest of step 2", fix="add --resume")
    error = refused(**resume(training=job.training.model_copy(update={"optimizer": "sgd"})))
    assert error.file == str(folder)
    assert is_of(error.problems[0], "training.optimizer", "sgd", rule="training with adamw", fix="use adamw")
    assert is_of(refused(**resume(seed=7)).problems[0], "seed", "7", rule="training with 0")
    assert "all 2 steps" in refused(**resume(num_steps=1)).problems[0].rule


def flip(file: Path) -> str:
    """Turns over one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return f"{file.name} is not as it was written"


def cut(folder: Path) -> str:
    """Cuts off the last byte of a rank's tensors."""
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    return f"{file.name} is not as it was written"


class Forged:
    """An object whose pickle runs a command when it is read."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        """As pickle requests it."""
        return os.system, (f"touch {self.proof}",)


def forge(folder: Path) -> str:
    """Replaces the metadata by one that runs a command, with its right checksum in the header."""
    file = folder / ".metadata"
    replace_with_checksum(file, pickle.dumps(Forged(folder.parent / "forged")))
    return f"{file} is not the metadata of a checkpoint: it asks for posix.system"


def replace_with_checksum(file: Path, content: bytes) -> None:
    """Overwrites a file of a checkpoint, and its checksum in the header."""
    file.write_bytes(content)
    header = CheckpointHeader.model_validate_json((file.parent / "checkpoint.json").read_bytes())
    sums = {**header.file_sha256, file.name: hashlib.sha256(content).hexdigest()}
    (file.parent / "checkpoint.json").write_text(header.model_copy(update={"file_sha256": sums}).model_dump_json())


def forge_tensors(folder: Path) -> str:
    """Replaces a rank's tensors by one of the right dtype and another shape, with its right checksum in the header."""
    file, stream = next(folder.glob("*.distcp")), BytesIO()
    torch.save(torch.zeros(1), stream)
    replace_with_checksum(file, stream.getvalue())
    return f"{file} does not hold the tensors that its metadata describes"


DAMAGES: dict[str, Callable[[Path], str]] = {
    "cut": cut,
    "flipped tensors": lambda folder: flip(next(folder.glob("*.distcp"))),
    "flipped metadata": lambda folder: flip(folder / ".metadata"),
    "forged metadata": forge,
    "forged tensors": forge_tensors,
}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the checkpoints of two and four steps."""
    folder = tmp_path_factory.mktemp("two")
    first = run_job(with_checkpoints(make_job(), folder / "kept", 4), folder / "first")
    assert [timing.step for timing in first.checkpoints] == [2, 4]
    return folder / "kept"


@pytest.mark.parametrize("name", slow_except(["cut", "forged metadata"], DAMAGES))
def test_a_damaged_checkpoint_is_passed_over(name: str, two_checkpoints: Path, tmp_path: Path) -> None:
    kept = shutil.copytree(two_checkpoints, tmp_path / "kept")
    damaged = DAMAGES[name](kept / "step-00000004")
    (kept / ".unfinished-step-00000006").mkdir()
    second = run_job(with_checkpoints(make_job(), kept, resume=True), tmp_path / "second")
    assert second.first_step == 2
    assert second.notes == (
        f"{kept / 'step-00000004'} is passed over: {damaged}",
        "resuming after step 2",
    )
    assert not (kept / "forged").exists()
    assert sorted(path.name for path in kept.iterdir()) == ["step-00000004", "step-00000006"]


def test_metadata_forged_with_its_checksum_is_a_sentence(two_checkpoints: Path, tmp_path: Path) -> None:
    """It lacks a tensor, so that only torch's reading for this model finds it."""
    kept = shutil.copytree(two_checkpoints, tmp_path / "kept")
    file = kept / "step-00000004" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    lacking = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
    del metadata.state_dict_metadata[lacking]
    metadata.storage_data = {k: info for k, info in metadata.storage_data.items() if k.fqn != lacking}
    replace_with_checksum(file, pickle.dumps(metadata))
    with pytest.raises(RunError, match=r"step-00000004 cannot be read.* rank 0: .*; delete"):
        run_job(with_checkpoints(make_job(), kept, resume=True), tmp_path / "second")


@pytest.mark.slow
def test_a_folder_that_ranks_do_not_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has a file system of its own at that place, as another host would."""
    trial = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(trial, check=False, capture_output=True).returncode:
        pytest.skip("a file system of one's own takes root, who may mount")
    monkeypatch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path / "kept"))
    with pytest.raises(RunError) as caught:
        run_job(with_checkpoints(make_job(dp=2), tmp_path / "kept"), tmp_path / "out", rank_module="apart_worker")
    assert says(str(caught.value), "rank 1", "RunError", f"{tmp_path / 'kept'}", "rank 0", "all nodes share")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_told_and_training_goes_on(full_disk: Path, tmp_path: Path) -> None:
    job = make_job(dp=2, model=make_model(vocab_size=6000))
    run = run_job(with_checkpoints(job, full_disk / "kept"), tmp_path / "out")
    assert run.complete
    assert len(run.losses) == NUM_STEPS
    notes = [note for note in run.notes if note.startswith("the checkpoint")]
    assert len(notes) == 3
    # Which it is depends on how much of its file a rank had written when the other one filled the disk.
    cause = r"(a file could not be written to its end|No space left on device)"
    for step, note in zip((2, 4, 6), notes, strict=True):
        assert re.search(rf"step {step} was not written \(rank [01]: {cause}; .* free .*went on$", note)
    assert list((full_disk / "kept").iterdir()) == []
