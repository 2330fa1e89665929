"""Scripts that start a training by other scripts: recognized, read, and named in errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simplan.errors import SpecError
from simplan.scenario.source import Source, read_source

_INNER = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --use-mcore-models --num-layers 8 --hidden-size 512 --bf16 "
    "--num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --vocab-size 1024 --micro-batch-size 1 "
    "--tensor-model-parallel-size $1 --global-batch-size $GBS\n"
)


def source_of(folder: Path, text: str, inner: str = _INNER) -> Source:
    """Scenario of a script that may call ``sub/inner.sh``."""
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "inner.sh").write_text(inner)
    script = folder / "start.sh"
    script.write_text(text)
    return read_source(script, {"cluster.preset": "dgx-h100"})


@pytest.mark.parametrize(
    "text",
    [
        "export GBS=64\nbash sub/inner.sh 4\n",
        "#!/bin/bash\nGBS=64\n. sub/inner.sh 4\n",
        "export GBS=64\nsbatch --nodes=1 sub/inner.sh 4\n",
        f"GBS=64\nsbatch <<EOF\n#SBATCH --nodes=1\n{_INNER.replace('$1', '4')}EOF\n",
        f"GBS=64\nsbatch --nodes 1 <<'EOF'\n{_INNER.replace('$1', '4').replace('$GBS', '64')}EOF\n",
    ],
)
def test_wrapper_is_recognized_and_read(text: str, tmp_path: Path) -> None:
    job = source_of(tmp_path, text).scenario().job

    assert (job.plan.tp, job.training.global_batch_size, job.cluster.num_devices) == (4, 64, 8)


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
        ("torchrun x.py args\n", _INNER, r"starts x\.py, whose arguments are of no framework"),
    ],
)
def test_errors_name_lines_and_scripts_as_their_reader_has_them(
    text: str, inner: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as caught:
        source_of(tmp_path, text, inner)

    assert re.search(says, str(caught.value)), caught.value
    assert not re.search(r"\d{7}", str(caught.value))  # lines of other scripts are numbered from a million on


def test_script_that_is_sourced_and_absent_is_said(tmp_path: Path) -> None:
    text = "GBS=64\n. ./blend.sh\n. sub/inner.sh 4\n"

    assert any("source ./blend.sh (line 2): it is not there" in note for note in source_of(tmp_path, text).notes)
