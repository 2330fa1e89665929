"""JSON of ``--deepspeed_config``: DeepSpeed obeys it, whatever the arguments next to it say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simplan.errors import SpecError
from simplan.scenario.source import Source, read_source

_ARGUMENTS = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    "--vocab-size 1024 --micro-batch-size 2 --global-batch-size 64 --bf16 --deepspeed"
)
_JSON: dict[str, Any] = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": 0.5}


def source_of(folder: Path, more: str = "", **changes: Any) -> Source:
    """Scenario of a script whose JSON has some sections changed."""
    (folder / "ds.json").write_text(json.dumps(_JSON | changes))
    script = folder / "train.sh"
    script.write_text(f"deepspeed --num_gpus 8 pretrain_gpt.py {_ARGUMENTS} {more} --deepspeed_config ds.json\n")
    return read_source(script, {"cluster.preset": "dgx-h100"})


_OTHERS = (
    "--no-pipeline-parallel --ds-sequence-parallel-size 1 --no-async-tensor-model-parallel-allreduce "
    "--log-optimizer-states-to-tensorboard"
)


@pytest.mark.parametrize("more", ["", f"--zero-stage 3 {_OTHERS}"])
def test_json_next_to_a_script_is_read(more: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, more)
    job = source.scenario().job

    assert (job.plan.zero_stage, job.plan.dp_shard, job.training.clip_grad_norm) == (3, 8, 0.5)
    assert not any("no effect" in note and "deepspeed_config" in note for note in source.notes)
    assert not any("does not know" in note for note in source.notes)
    assert source_of(tmp_path, more, gradient_clipping=0).scenario().job.training.clip_grad_norm is None


@pytest.mark.parametrize(
    ("more", "changes", "says"),
    [
        ("--zero-stage 1", {}, "--zero-stage = 1.*contradicts the JSON.*stage 3"),
        ("--zero-stage 3", {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "on the host"),
        ("", {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "parameters on the host"),
        ("", {"zero_optimization": {"stage": 4}}, "is no stage of ZeRO"),
        ("", {"fp16": {"enabled": True}}, "fp16.enabled.*does not have --fp16"),
        ("", {"bf16": {"enabled": False}}, "bf16.enabled.*has --bf16"),
        ("", {"train_batch_size": 32}, "train_batch_size = 32.*--global-batch-size 64"),
        ("", {"train_micro_batch_size_per_gpu": 1}, "per_gpu = 1.*--micro-batch-size 2"),
        ("", {"gradient_accumulation_steps": 8}, "8 data-parallel ranks is not --global-batch-size 64; use 4"),
        ("--clip-grad 1.0", {}, "gradient_clipping = 0.5.*--clip-grad 1.0"),
        ("", {"data_types": {"grad_accum_dtype": "fp8"}}, "is no precision of gradients"),
        ("", {"sequence_parallel_size": 2}, "Ulysses"),
        ("--ds-sequence-parallel-size 2", {}, "--ds-sequence-parallel-size = 2.*Ulysses"),
        ("--no-pipeline-parallel --pipeline-model-parallel-size 2", {}, "goes with one pipeline stage.*is 2"),
    ],
)
def test_json_that_contradicts_its_script_or_is_not_modeled_is_an_error(
    more: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=says):
        source_of(tmp_path, more, **changes)


def test_gradients_have_the_dtype_of_the_json(tmp_path: Path) -> None:
    wide = source_of(tmp_path, zero_optimization={"stage": 1}, data_types={"grad_accum_dtype": "fp32"})

    assert wide.scenario().job.plan.grad_dtype == "fp32"


def test_json_that_is_not_there_is_said(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"deepspeed --num_gpus 8 pretrain_gpt.py {_ARGUMENTS} --zero-stage 1 --deepspeed_config a.json\n")
    source = read_source(script, {"cluster.preset": "dgx-h100"})

    assert any("not modeled: --deepspeed_config" in note and "a.json is not next to" in note for note in source.notes)
    script.write_text(script.read_text().replace("--zero-stage 1", ""))
    with pytest.raises(SpecError, match=r"a\.json, which is not next to the script; put it there"):
        read_source(script, {"cluster.preset": "dgx-h100"})


def test_record_that_is_no_deepspeed_configuration_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    (tmp_path / "a.json").write_text('{"text": "a document"}')
    script.write_text(f"deepspeed --num_gpus 8 pretrain_gpt.py {_ARGUMENTS} --zero-stage 1 --deepspeed_config a.json\n")

    with pytest.raises(SpecError, match="this is no DeepSpeed configuration"):
        read_source(script, {"cluster.preset": "dgx-h100"})
