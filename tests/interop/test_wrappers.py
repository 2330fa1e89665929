"""Scripts that start a training by other scripts, or write the files that it reads: recognized, read, and named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from simplan.errors import SpecError
from simplan.scenario.source import Source, read_source

_INNER = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --use-mcore-models --num-layers 8 --hidden-size 512 --bf16 "
    "--num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --vocab-size 1024 --micro-batch-size 1 "
    "--tensor-model-parallel-size $1 --global-batch-size $GBS\n"
)


def source_of(folder: Path, text: str, inner: str = _INNER, more: Mapping[str, Any] | None = None) -> Source:
    """Scenario of a script that may call ``sub/inner.sh``."""
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "inner.sh").write_text(inner)
    script = folder / "start.sh"
    script.write_text(text)
    return read_source(script, {"cluster.preset": "dgx-h100", **(more or {})})


_INNERS = {
    "megatron": _INNER,
    "trainer": "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path gpt2 --bf16 --fsdp full_shard "
    "--per_device_train_batch_size $1 --block_size $GBS\n",
    "torchtitan": "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b "
    "--training.local_batch_size $1 --training.global_batch_size $GBS\n",
}
_WRAPPERS = (
    "export GBS=64\nbash sub/inner.sh 4\n",
    "#!/bin/bash\nGBS=64\n. sub/inner.sh 4\n",
    "export GBS=64\nsbatch --nodes=1 sub/inner.sh 4\n",
    "export GBS=64\nsrun --nodes 1 bash sub/inner.sh 4\n",
    "export GBS=64\nsrun --nodes 1 sub/inner.sh 4\n",
    "export GBS=64\nnohup srun bash -x -c 'bash sub/inner.sh 4' > log.txt &\n",
    "export GBS=64\ntrain() {\n{inner}}\nexport -f train\nsrun --nodes 1 bash -c 'train 4'\n",
    "GBS=64\nsbatch <<EOF\n#SBATCH --nodes=1\n{inner4}EOF\n",
    "GBS=64\nsbatch --nodes 1 <<'EOF'\n{inner4of64}EOF\n",
)


@pytest.mark.parametrize("framework", _INNERS)
def test_wrapper_is_recognized_and_read(framework: str, tmp_path: Path) -> None:
    inner = _INNERS[framework]
    four, both = inner.replace("$1", "4"), inner.replace("$1", "4").replace("$GBS", "64")
    expected = source_of(tmp_path, both).document.data

    for text in _WRAPPERS:
        script = text.replace("{inner4of64}", both).replace("{inner4}", four).replace("{inner}", inner)
        assert source_of(tmp_path, script, inner).document.data == expected, script


_NAMED = {
    "megatron": (
        "deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --bf16 "
        "--seq-length 512 --max-position-embeddings 512 --vocab-size 1024 --micro-batch-size 2 --deepspeed "
        "--global-batch-size 64 --deepspeed_config",
        '{"zero_optimization": {\n"stage": VALUE\n}, "bf16": {"enabled": true}, "gradient_clipping": 0.5}',
    ),
    "deepspeed": (
        "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path gpt2 --per_device_train_batch_size 2 --bf16 "
        "--block_size 512 --deepspeed",
        '{"zero_optimization": {"stage": VALUE}, "bf16": {"enabled": "auto"}}',
    ),
    "engine": (
        "deepspeed --num_gpus 8 x.py --batch_size 4 --deepspeed_config",
        '{"zero_optimization": {"stage": VALUE}, "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1}',
    ),
    "launcher": (
        "deepspeed --num_gpus 8 run_clm.py --model_name_or_path gpt2 --per_device_train_batch_size 2 --deepspeed "
        "--block_size 512 --deepspeed_config",
        '{"zero_optimization": {"stage": VALUE}, "bf16": {"enabled": true}}',
    ),
    "accelerate": (
        "accelerate launch --config_file FILE run_clm.py --model_name_or_path gpt2 --per_device_train_batch_size 2 "
        "--block_size 512",
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: VALUE\nfsdp_config:\n  fsdp_version: 2\n",
    ),
    "axolotl": (
        "axolotl train",
        "base_model: gpt2\nmicro_batch_size: VALUE\nsequence_len: 512\nbf16: true\ndatasets:\n  - path: $DATA/x\n",
    ),
    "factory": (
        "NPROC_PER_NODE=8 NNODES=1 llamafactory-cli train",
        "model_name_or_path: gpt2\nper_device_train_batch_size: VALUE\nfinetuning_type: full\ncutoff_len: 512\n",
    ),
    "torchtitan": (
        "torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file",
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = VALUE\nseq_len = 8192\n',
    ),
}
"""Framework -> a command that names a file, as ``FILE`` or at its end, and the file."""
_ASKED: dict[str, dict[str, Any]] = {
    "axolotl": {"cluster.num_devices": 8},
    "engine": {"model.preset": "gpt2", "model.seq_len": 512, "num_microbatches": 1},
}


@pytest.mark.parametrize("framework", _NAMED)
def test_file_that_a_script_writes_is_read_as_one_next_to_it(framework: str, tmp_path: Path) -> None:
    command, text = _NAMED[framework]
    name = "named.toml" if framework == "torchtitan" else "named.json" if text.startswith("{") else "named.yaml"
    launch = command.replace("FILE", name) if "FILE" in command else f"{command} {name}"
    launch_in_run = launch.replace(name, f'"$RUN/{name}"')
    (tmp_path / name).write_text(text.replace("VALUE", "2"))
    more = _ASKED.get(framework)
    expected = source_of(tmp_path, f"{launch}\n", more=more).document.data
    (tmp_path / name).unlink()

    def written(value: str, before: str = "") -> str:
        return f"TWO=2\n{before}cat <<EOF > $RUN/{name}\n{text.replace('VALUE', value)}\nEOF\n{launch_in_run}\n"

    assert source_of(tmp_path, written("$TWO"), more=more).document.data == expected
    unset = r"start\.sh:\d+: .*named\..*: .* = \$THREE: is not set in the script; write its value"
    with pytest.raises(SpecError, match=unset):
        source_of(tmp_path, written("$THREE"), more=more)
    either = "if [ -f x ]; then TWO=3; fi\n"
    with pytest.raises(SpecError, match=r"\$TWO: depends on the condition in line 2"):
        source_of(tmp_path, written("$TWO", either), more=more)


@pytest.mark.parametrize(
    ("text", "inner", "says"),
    [
        ("export GBS=8\nbash sub/inner.sh 2\nbash sub/inner.sh 4\n", _INNER, r"2 trainings .*\(lines 2, 3\)"),
        ("true\nbash elsewhere/inner.sh\n", _INNER, r"start.sh:2: calls elsewhere/inner\.sh, which is not there"),
        ("sbatch gone.slurm\n", _INNER, r"start.sh:1: calls gone\.slurm, which is not there"),
        ("export GBS=64\nbash sub/inner.sh 4\n", f"true\n{_INNER}if true; then\n", r"inner\.sh:3: .*fi is missing"),
        ("export GBS=64\nbash sub/inner.sh\n", _INNER, r"--tensor-model-parallel-size \$1"),
        (
            "export GBS=64\nbash sub/inner.sh 4\n",
            "for GBS in 1 2; do\n" + _INNER + "done\n",
            r"changes in the loop of line 1",
        ),
        ("deepspeed --num_gpus 8 x.py --deepspeed_config=ds.json\n", _INNER, r"starts x\.py.*its plan in ds\.json"),
        ("deepspeed --num_gpus 8 x.py --deepspeed_config ds.json\n", _INNER, r"simplan predict ds\.json --model"),
        ("deepspeed x.py --deepspeed_config $1.json\n", _INNER, r"name a file with the line: bash start\.sh ARGUMENTS"),
        (
            "srun bash -c 'python run_recipe.py --recipe x'\n",
            _INNER,
            r"1: .*give the run_config",
        ),
        ("MEGATRON=1\nbash sub/inner.sh\n", "torchrun a/run_recipe.py\n", r"start.sh:2: .*give the run_config"),
        (_INNER.replace("pretrain_gpt.py", "tasks/main.py --task MSDP-PROMPT"), "", r"--task = .*evaluates a model"),
        (
            f"if [ $1 = x ]; then RUN='torchrun p.py'; fi\neval $RUN {_INNER.partition('.py')[2]}",
            "",
            r"start.sh:2: starts \$RUN, which depends on the condition in line 1.*bash start\.sh ARGUMENTS",
        ),
        ("torchrun x.py args\n", _INNER, r"starts x\.py, whose arguments are of no framework.*; write a scenario"),
        ("torchrun megatron_gpt_pretraining.py ++model.mcore_gpt=True\n", _INNER, r"1: .*write them into that file"),
    ],
)
def test_errors_name_lines_and_scripts_as_their_reader_has_them(
    text: str, inner: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as caught:
        source_of(tmp_path, text, inner)

    assert re.search(says, str(caught.value)), caught.value
    assert not re.search(r"\d{7}", str(caught.value))  # lines of other scripts are numbered from a million on


def test_arguments_that_a_call_gives_decide_conditions(tmp_path: Path) -> None:
    options = 'while [[ $# -gt 1 ]]; do TP=$2; shift; done\nif [ "$2" = f ]; then TP=8; fi\n'
    inner = f"TP=1\n{options}{_INNER.replace('$1', '$TP')}"

    job = source_of(tmp_path, "export GBS=64\nbash sub/inner.sh 4\n", inner).scenario().job

    assert (job.plan.tp, job.training.global_batch_size) == (1, 64)


def test_script_that_is_sourced_and_absent_is_said(tmp_path: Path) -> None:
    text = "GBS=64\n. ./blend.sh\n. sub/inner.sh 4\n"

    assert any("source ./blend.sh (line 2): it is not there" in note for note in source_of(tmp_path, text).notes)
