"""Nodes and environment of a framework's file: what they say is predicted, refused, or listed as left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from simplan.errors import NotModelledError, SpecError
from simplan.interop.allocator import VARIABLES
from simplan.interop.formats import ConfigFile
from simplan.scenario.source import read_source
from tests.support.problems import says

_MEGATRON = (
    "pretrain_gpt.py --use-mcore-models --bf16 --num-layers 8 --hidden-size 512 --num-attention-heads 8 "
    "--seq-length 512 --max-position-embeddings 512 --vocab-size 1024 --micro-batch-size 1 --global-batch-size 64 "
    "--tensor-model-parallel-size 8"
)
_TORCHTITAN = "-m torchtitan.train --module llama3 --config llama3_8b"
_TRAINER = "--model_name_or_path gpt2 --per_device_train_batch_size 1 --block_size 512 --bf16"
_NEMO: dict[str, Any] = {
    "trainer": {"num_nodes": 4, "devices": 4, "accelerator": "gpu", "precision": "bf16"},
    "model": {
        "tensor_model_parallel_size": 8, "micro_batch_size": 1, "global_batch_size": 64, "encoder_seq_length": 512,
        "num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 512,
        "override_vocab_size": 1024, "mcore_gpt": True,
    },
}  # fmt: skip
_OF_FOUR = {
    "torchrun.sh": f"torchrun --nnodes 4 --nproc_per_node 4 {_MEGATRON}",
    "slurm.sh": f"#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --gpus-per-node=4\nsrun python {_MEGATRON}",
    "titan.sh": f"torchrun --nnodes 4 --nproc_per_node 4 {_TORCHTITAN}",
    "trainer.sh": f"torchrun --nnodes 4 --nproc_per_node 4 run_clm.py {_TRAINER}",
    "accelerate.sh": f"accelerate launch --use_fsdp --num_machines 4 --num_processes 16 run_clm.py {_TRAINER}",
    "nemo.yaml": yaml.safe_dump(_NEMO),
}


@pytest.mark.parametrize("name", _OF_FOUR)
def test_other_ranks_per_node_than_the_clusters_are_an_error(name: str, tmp_path: Path) -> None:
    """On nodes of 8, tensor parallelism over 8 ranks stays on NVLink; on the file's nodes it crosses the network."""
    (tmp_path / name).write_text(_OF_FOUR[name] + "\n")
    with pytest.raises(SpecError, match=r"have 8 devices; .*cluster.devices_per_node=4"):
        read_source(tmp_path / name, {"cluster.preset": "dgx-h100"}).scenario()
    with pytest.raises(SpecError, match=r"nodes of this cluster have 8 devices"):
        read_source(tmp_path / name, {"cluster.preset": "dgx-h100"}, searches=True).search()

    smaller = {"cluster.preset": "dgx-h100", "cluster.devices_per_node": 4}
    cluster = read_source(tmp_path / name, smaller).scenario().job.cluster
    assert (cluster.num_nodes, cluster.num_devices) == (4, 16)
    moved = {"cluster.preset": "dgx-h100", "cluster.num_nodes": 2}
    assert read_source(tmp_path / name, moved).scenario().job.cluster.num_nodes == 2
    domain = read_source(tmp_path / name, {"cluster.preset": "gb200-nvl72"}).scenario().job.cluster
    assert domain.num_nodes == 1  # its hosts have 4 GPUs each


@pytest.mark.parametrize("name", _OF_FOUR)
def test_nodes_of_a_device_have_the_ranks_of_the_file(name: str, tmp_path: Path) -> None:
    """Devices per node come from the file if a device is named and no cluster, unless the nodes are overridden."""
    (tmp_path / name).write_text(_OF_FOUR[name] + "\n")
    device = {"cluster.device": "h100-sxm-80gb", "cluster.inter_link_gbit_per_device": 400}
    cluster = read_source(tmp_path / name, device).scenario().job.cluster
    assert (cluster.devices_per_node, cluster.num_devices) == (4, 16)
    with pytest.raises(SpecError, match="devices_per_node"):
        read_source(tmp_path / name, {**device, "cluster.num_devices": 32}).scenario()


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    ("value", "listed"),
    [
        ("expandable_segments:True", {"megatron.sh", "nemo.yaml"}),
        ("expandable_segments:False", {"titan.sh", "trainer.sh", "accelerate.sh"}),
        ("max_split_size_mb:64", {"megatron.sh", "nemo.yaml", "titan.sh", "trainer.sh", "accelerate.sh"}),
    ],
)
def test_allocators_unlike_those_of_the_profile_s_runs_are_listed(variable: str, value: str, listed: set[str]) -> None:
    """torchtitan's published peaks are of growing segments; torch and the Hugging Face stack have its reserve."""
    nemo = _NEMO | {"env_vars": {variable: value}, "trainer": _NEMO["trainer"] | {"num_nodes": 1, "devices": 8}}
    files = {
        "megatron.sh": f"export {variable}={value}\ntorchrun --nproc_per_node 8 {_MEGATRON}\n",
        "titan.sh": f"{variable}={value} torchrun --nproc_per_node 8 {_TORCHTITAN}\n",
        "trainer.sh": f"export {variable}={value}\ntorchrun --nproc_per_node 8 run_clm.py {_TRAINER}\n",
        "accelerate.sh": f"{variable}={value} accelerate launch --multi_gpu --num_processes 8 run_clm.py {_TRAINER}\n",
        "nemo.yaml": yaml.safe_dump(nemo),
    }

    def notes(name: str, text: str) -> tuple[str, ...]:
        return read_source(ConfigFile(Path(name), text), {"cluster.preset": "dgx-h100"}).notes

    names = {name for name, text in files.items() if any(variable in note for note in notes(name, text))}
    assert names == listed


def read_with(framework: str, name: str, folder: Path) -> tuple[str, ...]:
    """Notes on a file with one more setting, which no reader knows."""
    nemo = _NEMO | {"trainer": _NEMO["trainer"] | {"num_nodes": 1, "devices": 8}}
    nemo["model"] = _NEMO["model"] | {name: 2}
    bridge = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1024, "seq_length": 512}
    of_bridge = {
        "model": bridge | {name: 2},
        "train": {"global_batch_size": 64, "micro_batch_size": 1},
        "ddp": {"a": 1},
    }
    files = {
        "megatron.sh": f"torchrun --nproc_per_node 8 {_MEGATRON} --{name.replace('_', '-')} 2\n",
        "torchtitan.sh": f"torchrun --nproc_per_node 8 {_TORCHTITAN} --training.{name} 2\n",
        "nemo.yaml": yaml.safe_dump(nemo),
        "bridge.yaml": yaml.safe_dump(of_bridge),
    }
    (file,) = (file for file in files if file.startswith(framework))
    (folder / file).write_text(files[file])
    return read_source(folder / file, {"cluster.preset": "dgx-h100", "cluster.num_devices": 8}).notes


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "nemo", "bridge"])
@pytest.mark.parametrize(
    "name", ["ring_parallel_size", "use_muon", "state_offload", "new_fp8_mode", "freeze_first", "oft_rank"]
)
def test_unknown_setting_that_names_another_plan_is_refused(framework: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(NotModelledError) as refused:
        read_with(framework, name, tmp_path)
    (problem,) = refused.value.problems
    assert problem.field.replace("-", "_").endswith(name)
    assert says(problem.rule, "a setting", "does not know", "speaks of")


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "nemo", "bridge"])
def test_other_unknown_settings_are_listed(framework: str, tmp_path: Path) -> None:
    notes = read_with(framework, "new_kernel", tmp_path)
    assert any(note.startswith("may change time or memory") and "kernel" in note for note in notes)
