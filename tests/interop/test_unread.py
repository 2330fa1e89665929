"""Settings that no reader knows, and settings that start no ranks on GPUs: what all readers say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from simplan.errors import SpecError
from simplan.interop.formats import ConfigFile, formats
from simplan.interop.frameworks import tables
from tests.interop.public import nested

MEGATRON = (
    "torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py --bf16 --num-layers 4 --hidden-size 512 "
    "--num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --vocab-size 1024 "
    "--micro-batch-size 1 --global-batch-size 16"
)
BASES: dict[str, dict[str, Any] | str] = {
    "megatron": MEGATRON,
    "bridge": {
        "model.num_layers": 2,
        "train.train_iters": 10,
        "train.global_batch_size": 8,
        "ddp.overlap_grad_reduce": True,
    },
    "nemo_1": {
        "trainer.devices": 8,
        "trainer.num_nodes": 1,
        "model.tensor_model_parallel_size": 1,
        "model.micro_batch_size": 1,
    }
    | {"model.global_batch_size": 8, "model.num_layers": 2, "model.hidden_size": 64, "model.num_attention_heads": 4},
    "nemo_2": {"_target_": "nemo.collections.llm.pretrain", "trainer.strategy.tensor_model_parallel_size": 1},
    "torchtitan": {"training.steps": 10, "parallelism.tensor_parallel_degree": 1},
    "trainer": {"model_name_or_path": "gpt2", "per_device_train_batch_size": 1},
    "accelerate": {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16"},
    "deepspeed": {"zero_optimization.stage": 2, "train_micro_batch_size_per_gpu": 1},
    "fsdp": {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16", "fsdp_config.fsdp_version": 2},
    "axolotl": {"base_model": "gpt2", "micro_batch_size": 1, "sequence_len": 512},
    "factory": {"model_name_or_path": "gpt2", "per_device_train_batch_size": 1, "finetuning_type": "full"},
}
"""Reader -> a file that it reads, as dotted keys or as a command."""
FORMATS = {
    "nemo_1": "nemo", "nemo_2": "nemo", "fsdp": "accelerate", "axolotl": "trainer", "factory": "trainer",
}  # fmt: skip
WORDS = (
    "zzz_parallel_size", "dp_zzz", "zzz_fp8", "zzz_optim", "muon_zzz", "quant_zzz", "zzz_freeze", "zzz_lora",
    "adapter_zzz", "zzz_offload", "teacher_zzz", "zzz_image",
)  # fmt: skip


def sections(reader: str) -> list[str]:
    """Sections of the settings that a reader knows, each with a dot; and the top."""
    names = tables("no_effect").get({"axolotl": "trainer", "factory": "trainer"}.get(reader, reader), "").split()
    # what is written with dots, without the settings of an open list such as betas
    found = {name.rpartition(".")[0] for name in names if not name.startswith("--")}
    extra = {"bridge": {"peft"}, "fsdp": {"fsdp_config"}, "accelerate": {"parallelism_config", "dynamo_config"}}
    first = "" if reader not in ("torchtitan", "nemo_1", "nemo_2", "bridge") else None
    return sorted(
        {f"{each}." for each in {*found, *extra.get(reader, ())} if each} | ({first} if first is not None else set())
    )


def read(reader: str, more: dict[str, Any], folder: Path) -> Any:
    """Configuration of the reader's file with further settings."""
    base = BASES[reader]
    if isinstance(base, str):
        path = folder / "train.sh"
        path.write_text(base + "".join(f" \\\n  {key} {value}" for key, value in more.items()) + "\n")
    elif reader == "torchtitan":
        path = folder / "train.toml"
        path.write_text("\n".join(f"{key} = {value}" for key, value in {**base, **more}.items()))
    else:
        settings = nested({**base, **more})
        path = folder / ("ds.json" if reader == "deepspeed" else "file.yaml")
        path.write_text(json.dumps(settings, indent=1) if reader == "deepspeed" else yaml.safe_dump(settings))
    file = ConfigFile(path, path.read_text())
    reading = formats()[FORMATS.get(reader, reader)].read
    assert reading is not None
    return reading(file)


def unknown_keys(reader: str, names: tuple[str, ...]) -> dict[str, Any]:
    if reader == "megatron":
        kinds = ("--", "--adam-", "--ckpt-", "--moe-", "--tensorboard-", "--no-", "--use-", "--fp8-", "--deepspeed-")
        return {kind + name.replace("_", "-"): 3 for kind in kinds for name in names}
    prefixes = (
        ("", "fsdp_", "lora_", "peft_", "wandb_")
        if reader in ("trainer", "axolotl", "factory", "accelerate")
        else ("",)
    )
    return {f"{section}{before}{name}": 3 for section in sections(reader) for before in prefixes for name in names}


@pytest.mark.parametrize("reader", BASES)
def test_unknown_setting_is_never_without_effect(reader: str, tmp_path: Path) -> None:
    keys = unknown_keys(reader, ("zzz_made_up",))
    try:
        found = read(reader, keys, tmp_path)
    except SpecError as error:  # sections such as fp8_config speak of a plan themselves
        refused = {problem.field for problem in error.problems}
        assert refused < {*keys}
        keys = {key: value for key, value in keys.items() if key not in refused}
        found = read(reader, keys, tmp_path)
    assert {*keys} <= {setting.key for setting in found.unknown}
    assert not [setting for setting in found.no_effect if "zzz" in setting.key]


@pytest.mark.parametrize("reader", BASES)
def test_unknown_setting_with_a_word_of_a_plan_is_an_error(reader: str, tmp_path: Path) -> None:
    keys = unknown_keys(reader, WORDS)
    with pytest.raises(SpecError) as error:
        read(reader, keys, tmp_path)
    lines = {problem.field: problem.line for problem in error.value.problems}
    assert {*keys} <= lines.keys()
    assert all(lines.values())


ELSEWHERE: dict[str, list[Any]] = {
    "use_cpu": [True, "yes"], "no_cuda": [True], "accelerator": ["tpu", "cpu", "neuron"], "ddp_backend": ["gloo"],
    "distributed_backend": ["gloo", "cpu:gloo,cuda:gloo"], "comm.mode": ["fake_backend"],
}  # fmt: skip
ON_GPUS: dict[str, list[Any]] = {
    "use_cpu": [False, "no"], "no_cuda": [False], "accelerator": ["gpu", "auto"], "ddp_backend": ["nccl", None],
    "distributed_backend": ["nccl", "cpu:gloo,cuda:nccl"], "comm.mode": ["default"],
}  # fmt: skip


@pytest.mark.parametrize("reader", BASES)
def test_setting_that_starts_no_ranks_on_gpus_is_refused(reader: str, tmp_path: Path) -> None:
    is_text = reader in ("megatron", "torchtitan")
    sections = {"nemo_1": "trainer.", "nemo_2": "trainer.", "bridge": "dist.", "torchtitan": "comm.", "megatron": "--"}

    def one(name: str, value: Any) -> dict[str, Any]:
        shown = value if not is_text else json.dumps(value) if reader == "torchtitan" else value
        prefix = sections.get(reader, "") if "." not in name or reader == "megatron" else ""
        return {prefix + (name.replace("_", "-") if prefix == "--" else name): shown}

    for name, value in ((name, value) for name, values in ELSEWHERE.items() for value in values):
        with pytest.raises(SpecError, match=r"trains without the GPUs|communicates without NCCL"):
            read(reader, one(name, value), tmp_path)
    for name, value in ((name, value) for name, values in ON_GPUS.items() for value in values):
        if value is None or (is_text and value is False):
            continue
        found = read(reader, one(name, value), tmp_path)
        assert not [setting for setting in found.unknown if name in setting.key.replace("-", "_")]
