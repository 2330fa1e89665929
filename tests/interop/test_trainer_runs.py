"""Runs of the Hugging Face stack: public configurations of DeepSpeed, Accelerate and the Trainer, read and written."""

from __future__ import annotations

import json
import pickle
import shlex
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from simplan import catalog
from simplan.errors import NotModelledError, SpecError
from simplan.interop.formats import ConfigFile, changed_settings, formats
from simplan.interop.frameworks.model_names import config_of, preset_of
from simplan.interop.huggingface import model_fields_from_config
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.model.parts.attention import MASK
from simplan.predict import predict
from simplan.scenario import scenario_from
from simplan.scenario.source import read_source
from tests.support.problems import refuses
from tests.support.yaml_files import read_yaml

CONFIGURATIONS = Path(__file__).parent / "configurations"
CASES = [
    (kind, entry)
    for kind in ("deepspeed", "accelerate", "trainer")
    for entry in read_yaml(CONFIGURATIONS / f"{kind}.yaml")
]
ENTRIES = [pytest.param(kind, entry, id=f"{kind}-{entry['name']}") for kind, entry in CASES]
IMPORTED = [pytest.param(k, e, id=f"{k}-{e['name']}") for k, e in CASES if "refused" not in e]


def write(folder: Path, kind: str, entry: dict[str, Any]) -> Path:
    """File of the settings in a layout of its own, with the files that it names."""
    for name, settings in entry.get("files", {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings) if name.endswith(".json") else yaml.safe_dump(settings), encoding="utf-8")
    settings = dict(reversed(entry["settings"].items()))
    if "launch" in entry:
        lines = ["#!/bin/bash", "set -e"]
        words = []
        for number, (key, value) in enumerate(settings.items()):
            text = " ".join(shlex.quote(str(word)) for word in (value if isinstance(value, list) else [value]))
            if number % 3 == 0:
                lines.append(f"VALUE_{number}={text}" if not isinstance(value, list) else f"VALUE_{number}='{text}'")
                text = f"$VALUE_{number}" if isinstance(value, list) else f'"${{VALUE_{number}}}"'
            words.append(f"--{key}={text}" if number % 3 == 1 and not isinstance(value, list) else f"--{key} {text}")
        path = folder / "start.sh"
        path.write_text("\n".join([*lines, " \\\n   ".join([entry["launch"], *words]), ""]), encoding="utf-8")
        return path
    path = folder / ("settings.json" if kind == "deepspeed" else "settings.yaml")
    text = json.dumps(settings, indent=4) if kind == "deepspeed" else yaml.safe_dump(settings, sort_keys=False)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("kind", "entry"), ENTRIES)
def test_public_configuration_becomes_its_plan(kind: str, entry: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, kind, entry)
    if "refused" in entry:
        with pytest.raises(SpecError) as error:
            scenario_from(path, entry["add"])
        assert entry["refused"] in str(error.value)
        return
    source = read_source(path, entry["add"])
    assert source.configuration is not None
    assert source.configuration.format == kind
    job = source.scenario().job
    assert job.software.id == entry["expect"].get("software", "accelerate")
    for section in ("plan", "training", "model"):
        for key, value in entry["expect"].get(section, {}).items():
            read = getattr(getattr(job, section), key)
            assert (read.model_dump(exclude_unset=True) if isinstance(value, dict) else read) == value, key


@pytest.mark.parametrize(("kind", "entry"), IMPORTED)
def test_public_configuration_survives_export(kind: str, entry: dict[str, Any], tmp_path: Path) -> None:
    job = scenario_from(write(tmp_path, kind, entry), entry["add"]).job
    target = "deepspeed" if job.software.id == "deepspeed" or kind == "deepspeed" else "accelerate"
    if job.plan.cp > 1 or (job.software.id == "torch" and target == "deepspeed"):
        with pytest.raises(NotModelledError, match=r"plan\.cp|software"):
            export(job, target)
        return
    assert again(job, target, tmp_path / "exported") == comparable(job)


def export(job: Job, target: str) -> Any:
    write = formats()[target].export
    assert write is not None
    return write(job, "test")


def again(job: Job, target: str, folder: Path) -> Job:
    """The job, exported and imported."""
    for name, content in export(job, target).files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return comparable(scenario_from(folder / "train.sh", {"cluster.preset": job.cluster.id}).job)


def comparable(job: Job) -> Job:
    """The job without the name and the longest positions of its model, which sequences do not reach."""
    model = job.model.model_copy(update={"name": "", "sources": {}})
    return Job(model, job.cluster, job.training, job.plan, job.software)


TRL_LOSS = {"preset": "accelerate", "loss": "recomputed"}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("accelerate", {"plan.dp_shard": 8}),
    "fsdp, reduced once per step": ("accelerate", {"plan.dp_shard": 8, "plan.grad_sync": "step"}),
    "zero 2": ("accelerate", {"plan.dp_shard": 8, "plan.zero_stage": 2, "plan.recompute": "full"}),
    "hsdp": ("accelerate", {"plan.dp_shard": 4, "plan.dp_replicate": 2, "training.precision": "fp16"}),
    "offload": ("accelerate", {"plan.dp_shard": 8, "plan.offload_optimizer": True}),
    "ddp": ("accelerate", {"plan.dp_replicate": 8, "plan.bucket_bytes": 50 * 2**20, "training.precision": "tf32"}),
    "ddp every microbatch": ("accelerate", {"plan.dp_replicate": 8, "plan.grad_sync": "microbatch"}),
    "one device": ("accelerate", {"cluster.num_devices": 1, "training.precision": "fp32"}),
    "foreach": ("accelerate", {"plan.dp_shard": 8, "training.fused_optimizer": False, "training.task": "sft"}),
    "lora": (
        "accelerate",
        {"plan.dp_shard": 8, "training.task": "lora", "model.lora_rank": 16, "model.lora_targets": ["q", "v"]},
    ),
    "qlora": (
        "accelerate",
        {
            "plan.dp_shard": 8,
            "training.task": "lora",
            "model.lora_rank": 16,
            "training.base_weights": {"format": "nf4", "double_quantization": True, "storage": "bf16"},
        },
    ),
    "ds zero 0": ("deepspeed", {"plan.dp_replicate": 8}),
    "ds zero 1": ("deepspeed", {"plan.dp_shard": 8, "plan.zero_stage": 1, "training.optimizer": "adam"}),
    "ds zero 2": ("deepspeed", {"plan.dp_shard": 8, "plan.zero_stage": 2, "training.precision": "fp16"}),
    "ds zero 3": ("deepspeed", {"plan.dp_shard": 8, "plan.zero_stage": 3, "plan.recompute": "full"}),
    "fsdp in pure bf16": ("accelerate", {"plan.dp_shard": 8, "training.pure_bf16": True}),
    "ddp in pure bf16": ("accelerate", {"plan.dp_replicate": 8, "training.pure_bf16": True}),
    "ds in pure bf16": ("deepspeed", {"plan.dp_shard": 8, "plan.zero_stage": 1, "training.pure_bf16": True}),
    "ds clipped": ("deepspeed", {"plan.dp_shard": 8, "plan.zero_stage": 3, "training.clip_grad_norm": 0.5}),
    "liger's loss": ("accelerate", {"plan.dp_shard": 8, "software": {"preset": "accelerate", "loss": "fused"}}),
    "ds with TRL's loss": (
        "deepspeed",
        {"plan.dp_replicate": 8, "training.task": "sft", "software": {"preset": "deepspeed", "loss": "recomputed"}},
    ),
    "dpo": ("accelerate", {"plan.dp_shard": 8, "training.task": "dpo", "software": TRL_LOSS}),
    "dpo of adapters": (
        "accelerate",
        {"plan.dp_shard": 8, "training.task": "dpo", "model.lora_rank": 8, "software": TRL_LOSS},
    ),
    "kto with Liger's loss": (
        "deepspeed",
        {
            "plan.dp_replicate": 8,
            "training.task": "kto",
            "training.preference": "precomputed",
            "software": {"preset": "deepspeed", "loss": "fused"},
        },
    ),
    "simpo": ("accelerate", {"plan.dp_replicate": 8, "training.task": "simpo"}),
    "reward": ("accelerate", {"plan.dp_shard": 8, "training.task": "reward"}),
    "ds offload": ("deepspeed", {"plan.dp_shard": 8, "plan.offload_optimizer": True, "software": "accelerate"}),
}


@pytest.mark.parametrize("name", JOBS)
def test_job_survives_export(name: str, tmp_path: Path) -> None:
    target, overrides = JOBS[name]
    usual = {"cluster.preset": "dgx-h100", "software": target, "model.seq_len": 1024, "plan.microbatch_size": 2}
    if target == "accelerate":
        usual["training.clip_grad_norm"] = 1.0
    full = {**usual, "num_microbatches": 3, **overrides}
    job = scenario_from("llama3.2-1b", {k: v for k, v in full.items() if v is not None}).job
    assert again(job, target, tmp_path) == comparable(job)


@pytest.mark.parametrize(
    ("target", "overrides", "field"),
    [
        ("accelerate", {"plan.tp": 2}, "plan.tp"),
        ("accelerate", {"plan.recompute": "selective_layer"}, "plan.recompute"),
        ("accelerate", {"plan.zero_stage": 2, "software": "torch"}, "software"),
        (
            "deepspeed",
            {"plan.zero_stage": 3, "plan.dp_shard": 4, "plan.dp_replicate": 2, "software": "deepspeed"},
            "dp",
        ),
        ("deepspeed", {}, "software"),
        ("accelerate", {"software": {"preset": "accelerate", "loss": "recomputed"}}, "software.loss"),
    ],
)
def test_job_that_target_cannot_express_is_refused(target: str, overrides: dict[str, Any], field: str) -> None:
    usual = {"cluster.preset": "dgx-h100", "software": "accelerate", "plan.dp_shard": 8 // overrides.get("plan.tp", 1)}
    job = scenario_from("llama3-8b", {**usual, **overrides}).job
    with pytest.raises(NotModelledError, match="cannot be said in") as error:
        export(job, target)
    assert field in str(error.value)


SHARDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FSDP1, full": ({"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"}, {"zero_stage": 3, "dp_shard": 16}),
    "FSDP1, by number": ({"fsdp_sharding_strategy": 2}, {"zero_stage": 2, "dp_shard": 16}),
    "FSDP1, old name": ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {"zero_stage": 2, "dp_shard": 16}),
    "FSDP1, within nodes": (
        {"fsdp_sharding_strategy": "HYBRID_SHARD"},
        {"zero_stage": 3, "dp_shard": 8, "dp_replicate": 2},
    ),
    "FSDP1, nothing": ({"fsdp_sharding_strategy": "NO_SHARD"}, {"zero_stage": 0, "dp_replicate": 16}),
    "FSDP2": ({"fsdp_version": 2}, {"zero_stage": 3, "reshard_after_forward": True, "dp_shard": 16}),
    "FSDP2, kept": (
        {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_sharding_strategy": "FULL_SHARD"},
        {"zero_stage": 2, "dp_shard": 16},
    ),
    "recomputed": ({"fsdp_version": 2, "fsdp_activation_checkpointing": True}, {"recompute": "full"}),
    "on the host": ({"fsdp_version": 2, "fsdp_offload_params": True}, {"offload_optimizer": True}),
}
"""Accelerate 1.15, ``utils/dataclasses.py``, FullyShardedDataParallelPlugin; two nodes of 8."""


@pytest.mark.parametrize("name", SHARDED)
def test_fsdp_strategy_is_its_plan(name: str, tmp_path: Path) -> None:
    settings, expected = SHARDED[name]
    path = tmp_path / "fsdp.yaml"
    launch = {"distributed_type": "FSDP", "num_machines": 2, "num_processes": 16, "mixed_precision": "bf16"}
    path.write_text(yaml.safe_dump({**launch, "fsdp_config": settings}), encoding="utf-8")
    add = {"cluster.preset": "dgx-h100", "model.preset": "llama3-8b", "model.seq_len": 512, "plan.microbatch_size": 1}
    plan = scenario_from(path, {**add, "num_microbatches": 1}).job.plan
    assert {key: getattr(plan, key) for key in expected} == expected


_FSDP = '--fsdp "full_shard auto_wrap"'
_AXOLOTL = "base_model: Qwen/Qwen2.5-7B\nmicro_batch_size: 2\nsequence_len: 2048\noptimizer: adamw_torch_fused\n"
_FACTORY = "model_name_or_path: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 2\ncutoff_len: 2048\n"
_TRL = "accelerate launch --multi_gpu --num_processes 8 trl/scripts/sft.py"
WEIGHTS: dict[str, tuple[str, str, bool, str]] = {
    "Trainer, BF16 without autocast": ("--torch_dtype bfloat16", "bf16", True, "none"),
    "Trainer, BF16 under autocast": ("--bf16 --dtype bfloat16", "bf16", True, "none"),
    "Trainer, mixed": ("--bf16 --torch_dtype float32", "bf16", False, "none"),
    "FSDP, mixed": (f"--bf16 --torch_dtype bfloat16 {_FSDP}", "bf16", False, "none"),  # Accelerate makes FP32 weights
    "FSDP, BF16": (f"--torch_dtype bfloat16 {_FSDP}", "bf16", True, "none"),
    "Trainer, FP16": ("--torch_dtype float16", "fp16", True, "none"),
    "axolotl": (f"{_AXOLOTL}bf16: auto\n", "bf16", True, "none"),
    "axolotl, FP16": (f"{_AXOLOTL}bf16: false\nfp16: false\nfloat16: true\n", "fp16", True, "none"),
    "axolotl without autocast": (f"{_AXOLOTL}bf16: full\n", "bf16", True, "none"),
    "LLaMA-Factory": (f"{_FACTORY}finetuning_type: full\nbf16: true\n", "bf16", False, "full"),
    "LLaMA-Factory, pure": (f"{_FACTORY}finetuning_type: full\npure_bf16: true\n", "bf16", True, "full"),
    "LLaMA-Factory, adapters": (f"{_FACTORY}finetuning_type: lora\npure_bf16: true\n", "bf16", False, "full"),
    "TRL": (f"{_TRL} --model_name_or_path Qwen/Qwen2.5-7B --max_length 512", "bf16", False, "full"),
}
"""Settings -> precision, without FP32 weights, recomputation."""


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_have_the_precision_of_the_program(name: str, tmp_path: Path) -> None:
    """transformers 5.23: modeling_utils.py and trainer.py; accelerate 1.15: utils/fsdp_utils.py; LLaMA-Factory:
    model/adapter.py, init_adapter; axolotl: utils/config, normalize_config; TRL 1: trainer/sft_config.py."""
    text, precision, is_pure, recompute = WEIGHTS[name]
    path = tmp_path / ("run.yaml" if ": " in text else "run.sh")
    if text.startswith("--"):
        text = f"torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --block_size 512 {text}"
    path.write_text(text, encoding="utf-8")
    job = scenario_from(path, {"cluster.preset": "dgx-h100"}).job
    assert (job.training.precision, job.training.pure_bf16, job.plan.recompute) == (precision, is_pure, recompute)


@pytest.mark.parametrize(
    ("command", "field"),
    [("--fp16 --torch_dtype float16", "--torch_dtype"), ("--fp16 --torch_dtype bfloat16", "--torch_dtype")],
)
def test_weights_of_16_bits_under_autocast_of_fp16_are_refused(command: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun train.py --model_name_or_path gpt2 --block_size 512 {command}", encoding="utf-8")
    with pytest.raises(NotModelledError, match=f"{field} = .*without an FP32 copy"):
        scenario_from(path, {"cluster.preset": "dgx-h100"})


def test_deepspeed_batch_of_other_devices_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    path.write_text(json.dumps({**sizes, "zero_optimization": {"stage": 3}}), encoding="utf-8")
    add = {"model.preset": "llama3-8b", "model.seq_len": 512, "cluster.preset": "dgx-h100"}
    assert scenario_from(path, add).job.cluster.num_devices == 8
    with refuses("train_batch_size", "64", rule="is 128 on these devices"):
        scenario_from(path, {**add, "cluster.num_devices": 16})


def test_nccl_algorithms_of_a_script_are_prescribed(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        "export NCCL_ALGO='allreduce:tree'\n"
        "torchrun --nproc_per_node 8 train.py --model_name_or_path meta-llama/Llama-3.1-8B --bf16 \\\n"
        "  --fsdp 'full_shard auto_wrap' --block_size 2048 --per_device_train_batch_size 2\n",
        encoding="utf-8",
    )
    source = read_source(path, {"cluster.preset": "dgx-h100"})
    collectives = source.scenario().job.plan.collectives
    assert collectives is not None
    assert [*collectives.prescribed()] == [("all_reduce", "tree")]


def test_change_of_a_script_is_in_its_words(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        "torchrun --nproc_per_node 8 train.py --model_name_or_path meta-llama/Llama-3.1-8B --bf16 \\\n"
        "  --fsdp 'full_shard auto_wrap' --gradient_checkpointing true --block_size 2048 \\\n"
        "  --per_device_train_batch_size 2 --gradient_accumulation_steps 2\n",
        encoding="utf-8",
    )
    source = read_source(path, {"cluster.preset": "dgx-h100"})
    assert source.configuration is not None
    before = source.scenario().job
    after = before.with_plan(before.plan.with_changes(recompute="none", microbatch_size=1, grad_sync="step"))
    changes = {
        change.key: (change.before, change.after, change.line)
        for change in changed_settings(source.configuration, before, after)
    }
    assert changes == {
        "--gradient_checkpointing": (True, False, 2),
        "--per_device_train_batch_size": (2, 1, 3),
        "--gradient_accumulation_steps": (2, 4, 3),
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8", {"zero_stage": 3, "dp_shard": 8}),
        ("accelerate launch --use_deepspeed --zero_stage 1 --num_processes=4", {"zero_stage": 1, "dp_shard": 4}),
        ("accelerate launch --multi_gpu --num_processes 16 --num_machines 2", {"zero_stage": 0, "dp_replicate": 16}),
        ("torchrun --nnodes 2 --nproc-per-node 8", {"zero_stage": 0, "dp_replicate": 16}),
        ("deepspeed --include localhost:0,1@other:0,1", {"zero_stage": 0, "dp_replicate": 4}),
        ("python", {"dp_replicate": 1, "dp_shard": 1}),
    ],
)
def test_options_of_a_launcher_are_its_plan(options: str, expected: dict[str, int], tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"{options} train.py --model_name_or_path gpt2 --block_size 512 --bf16\n", encoding="utf-8")
    plan = scenario_from(path, {"cluster.preset": "dgx-h100"}).job.plan
    assert {key: getattr(plan, key) for key in expected} == expected


def test_older_name_of_the_batch_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("torchrun --nproc_per_node 8 train.py --model_name_or_path gpt2 --block_size 512 --bf16 ")
    path.write_text(path.read_text() + "--per_gpu_train_batch_size 3 --fsdp full_shard\n")
    assert scenario_from(path, {"cluster.preset": "dgx-h100"}).job.plan.microbatch_size == 3


_PROGRAMS = {
    "torchrun examples/grpo_agent.py --per_device_train_batch_size 1": "grpo_agent.py: belongs to reinforcement learn",
    "trl rloo --model_name_or_path gpt2 --bf16": "trl rloo: belongs to reinforcement learning",
    "torchrun cpo.py --model_name_or_path gpt2 --bf16 --loss_type sigmoid": "--loss_type = .*: is CPO",
    "torchrun train.py --teacher_model gpt2 --per_device_train_batch_size 1": "--teacher_model = .*of another model",
    "torchrun sft_vlm.py --per_device_train_batch_size 1": "sft_vlm.py: belongs to a model of images or sound",
    "torchrun train.py --vision_tower a/b --per_device_train_batch_size 1": "--vision_tower = .*of images or sound",
    "deepspeed x.py --deepspeed": "starts x.py, whose arguments are of no framework",
    "deepspeed x.py --deepspeed $@": "starts x.py, whose arguments are of no framework",
    "python llama_pro.py --model_name_or_path gpt2 --output_dir a": "starts llama_pro.py, whose arguments are of no",
    "torchrun generate.py --model_name_or_path gpt2 --fp16": "starts generate.py, whose arguments are of no",
    "axolotl preprocess run.yaml": "is no launch script",
    "torchrun a.py --fsdp full_shard --bf16\ntorchrun a.py --deepspeed x.json": r"2 trainings .*\(lines 1, 2\)",
}


@pytest.mark.parametrize("command", _PROGRAMS)
def test_program_that_is_no_such_training_is_refused(command: str, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"{command}\n", encoding="utf-8")
    with pytest.raises(SpecError, match=_PROGRAMS[command]):
        scenario_from(path)


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("accelerate launch train.py --per_device_train_batch_size 1 --bf16", "does not say what ranks shard"),
        (
            "deepspeed train.py --deepspeed ds.json --per_device_train_batch_size 1",
            "names the DeepSpeed configuration ds",
        ),
        (
            "deepspeed train.py --deepspeed --deepspeed_config ds.json --per_device_train_batch_size 1",
            "names the DeepSpeed configuration ds.json",
        ),
        ("torchrun train.py --deepspeed $FILE --per_device_train_batch_size 1", "file of DeepSpeed's configuration"),
        ("python train.py --per_device_train_batch_size $SIZE --bf16", "how many sequences a microbatch has"),
        ("torchrun train.py --model_name_or_path a/b --per_device_train_batch_size 1", "names the model a/b"),
        (
            "torchrun train.py --fsdp full_shard --fsdp_config f.json --per_device_train_batch_size 1",
            "names f.json with the settings of FSDP",
        ),
        ("torchrun train.py --use_lora --per_device_train_batch_size 1", "adapters of a rank that it does not say"),
        ("torchrun train.py --gradient_accumulation_steps 2 --batch_size 4", "how many sequences a microbatch has"),
    ],
)
def test_missing_values_of_a_script_are_asked_for(command: str, asked: str, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(command + "\n", encoding="utf-8")
    with pytest.raises(SpecError) as error:
        scenario_from(path)
    sentences = [problem.sentence() for problem in error.value.problems]
    assert [sentence for sentence in sentences if asked in sentence]
    assert [sentence for sentence in sentences if "add --seq-len 4096" in sentence]


def test_exported_files_are_those_of_the_frameworks(tmp_path: Path) -> None:
    """Accelerate's own class reads the YAML, and transformers' own parser the arguments and the model."""
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    transformers = pytest.importorskip("transformers")
    job = scenario_from(
        "qwen3-0.6b",
        {"cluster.preset": "dgx-h100", "software": "accelerate", "plan.dp_shard": 4, "plan.dp_replicate": 2}
        | {"training.clip_grad_norm": 0.5, "plan.microbatch_size": 3, "num_microbatches": 5, "plan.recompute": "full"},
    ).job
    files = export(job, "accelerate").files
    path = tmp_path / "accelerate.yaml"
    path.write_text(files["accelerate.yaml"], encoding="utf-8")
    config = config_args.load_config_from_file(str(path))
    assert (config.num_processes, config.num_machines, config.mixed_precision) == (8, 1, "bf16")
    assert config.distributed_type.value == "FSDP"
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config["fsdp_reshard_after_forward"] is True
    assert config.parallelism_config["parallelism_config_dp_replicate_size"] == 2
    words = []
    for line in files["train.sh"].partition("ARGUMENTS=(")[2].partition("\n)")[0].splitlines():
        words += shlex.split(line, comments=True)
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    arguments = vars(parser.parse_known_args([*words, "--use_cpu"])[0])
    assert arguments["per_device_train_batch_size"] == 3
    assert arguments["gradient_accumulation_steps"] == 5
    assert (arguments["bf16"], arguments["gradient_checkpointing"]) == (True, True)
    assert (str(arguments["optim"]), arguments["max_grad_norm"]) == ("adamw_torch_fused", 0.5)
    (tmp_path / "config.json").write_text(files["model/config.json"], encoding="utf-8")
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (read.num_hidden_layers, read.hidden_size, read.tie_word_embeddings) == (28, 1024, True)


def test_exported_deepspeed_file_is_read_by_deepspeed() -> None:
    """DeepSpeed's own class reads the JSON."""
    config = pytest.importorskip("deepspeed.runtime.config")
    usual = {"cluster.preset": "dgx-h100", "software": "deepspeed", "plan.dp_shard": 8, "training.precision": "fp16"}
    job = scenario_from("llama3-8b", {**usual, "plan.microbatch_size": 2, "num_microbatches": 3}).job
    read = config.DeepSpeedConfig(json.loads(export(job, "deepspeed").files["ds_config.json"]))
    assert (int(read.zero_config.stage), read.float16_config.enabled, read.bfloat16_config.enabled) == (3, True, False)
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (2, 3)
    assert (read.optimizer_name, read.gradient_clipping) == ("adamw", 0.0)


def test_trainer_reads_its_own_json(tmp_path: Path) -> None:
    """A folder with what ``TrainingArguments.to_json_string`` writes, next to a model."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        activation_checkpointing=True,
        use_cpu=True,
        max_grad_norm=0.3,
        optim="adamw_torch",
    )
    text = arguments.to_json_string().replace('"use_cpu": true', '"use_cpu": false')  # written without a GPU
    (tmp_path / "training_args.json").write_text(text, encoding="utf-8")
    model = transformers.LlamaConfig(num_hidden_layers=3, hidden_size=256, num_attention_heads=4, intermediate_size=512)
    (tmp_path / "config.json").write_text(model.to_json_string(), encoding="utf-8")
    add = {"cluster.preset": "dgx-h100", "model.seq_len": 128, "plan.zero_stage": 3, "training.precision": "bf16"}
    source = read_source(tmp_path, add)
    job = source.scenario().job
    assert (job.model.num_hidden_layers, job.model.hidden_size) == (3, 256)
    assert (job.plan.microbatch_size, job.plan.recompute, job.plan.dp_shard) == (4, "full", 8)
    assert (job.training.global_batch_size, job.training.clip_grad_norm) == (64, 0.3)
    assert job.training.fused_optimizer is False
    assert source.configuration is not None
    assert not source.configuration.unknown


@pytest.mark.parametrize("name", catalog.names("models"))
def test_config_of_model_gives_the_model(name: str) -> None:
    model = catalog.model(name)
    config = config_of(model)
    if config is None:
        assert model.family in ("t5", "resnet") or name == "deepseek-moe-16b"  # types that simplan does not read
        return
    fields = model_fields_from_config(config, name=name, seq_len=model.seq_len, mtp=True)
    read = ModelSpec.model_validate(fields)
    assert read.model_copy(update={"sources": model.sources, "name": model.name}) == model


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("unsloth/Llama-3.1-70B", "llama3.1-70b"),
        ("meta-llama/Llama-2-13b-chat-hf", "llama2-13b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen2-1.5B-Instruct", "qwen2.5-1.5b"),
        ("hugging-quants/Meta-Llama-3.1-405B-BNB-NF4-BF16", "llama3.1-405b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mistral-7B-Instruct-v0.2", None),  # no window and another vocabulary: neither v0.1 nor v0.3
        ("google-bert/bert-base-uncased", "bert-base"),
        ("EleutherAI/pythia-6.9b-deduped", "pythia-6.9b"),
        ("mosaicml/mpt-7b", "mpt-7b-alibi"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi3-mini"),
        ("microsoft/Phi-3-mini-128k-instruct", None),  # no window
        ("codellama/CodeLlama-7b-hf", None),
        ("", None),
    ],
)
def test_hub_name_is_preset_of_the_same_shape(name: str, preset: str | None) -> None:
    assert preset_of(name) == preset


@pytest.mark.parametrize("key", ["model_name", "model_id", "base_model"])
def test_model_is_named_by_arguments_of_other_scripts(key: str, tmp_path: Path) -> None:
    """As simplescaling/s1 (train/sft.py) and tloen/alpaca-lora (finetune.py) have them."""
    path = tmp_path / "run.sh"
    path.write_text(
        f"torchrun --nproc_per_node 8 sft.py --{key}=gpt2 --per_device_train_batch_size 1 --block_size 512\n"
    )
    assert scenario_from(path, {"cluster.preset": "dgx-h100"}).job.model.name == "gpt2"


def test_memory_of_zero_states_is_that_of_the_paper(tmp_path: Path) -> None:
    """Rajbhandari et al. 2020, figure 1: 2 bytes of weights and 12 of optimizer states per parameter, over 64 ranks."""
    for stage, weight_bytes, state_bytes in ((0, 2, 12), (1, 2, 12 / 64), (3, 2 / 64, 12 / 64)):
        path = tmp_path / f"zero{stage}.json"
        settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "fp16": {"enabled": True}}
        path.write_text(json.dumps(settings | {"zero_optimization": {"stage": stage}}), encoding="utf-8")
        add = {"model.preset": "gpt2-1.5b", "cluster.preset": "dgx-h100", "cluster.num_nodes": 8, "model.seq_len": 128}
        job = scenario_from(path, add).job
        memory = {str(category): size for category, size in predict(job).memory[0].by_category.items()}
        assert memory["parameters"] == pytest.approx(weight_bytes * job.model.num_parameters, rel=0.01)
        assert memory["optimizer_states"] == pytest.approx(state_bytes * job.model.num_parameters, rel=0.01)


BAD = {
    "half a file": ('{"zero_optimization": {"stage": 3', ".json", "is no JSON file that simplan knows"),
    "no number": ('{"zero_optimization": {"stage": "three"}}', ".json", "stage"),
    "sizes that do not fit": (
        '{"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, '
        '"zero_optimization": {"stage": 2}}',
        ".json",
        "",
    ),
    "nested": ('{"zero_optimization": ' + "[" * 5000, ".json", ""),
    "megatron": ("distributed_type: MEGATRON_LM\nnum_processes: 8\n", ".yaml", "MEGATRON_LM"),
    "absolute paths": (
        "accelerate launch --config_file /etc/passwd train.py --per_device_train_batch_size 1\n",
        ".sh",
        "which is not next to it",
    ),
    "a command inside": (
        "torchrun --nproc_per_node=$(touch FILE) train.py --per_device_train_batch_size $(touch FILE) --bf16\n",
        ".sh",
        "sequences a microbatch has",
    ),
    "nvme": ('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}', ".json", "NVMe"),
    "AdEMAMix": ("per_device_train_batch_size: 1\noptim: ademamix_8bit\n", ".yaml", "other states"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_a_sentence(name: str, tmp_path: Path) -> None:
    text, suffix, part = BAD[name]
    touched = tmp_path / "touched"
    path = tmp_path / f"file{suffix}"
    path.write_text(text.replace("FILE", str(touched)), encoding="utf-8")
    with pytest.raises(SpecError) as error:
        scenario_from(path, {"cluster.preset": "dgx-h100", "model.preset": "llama3-8b", "model.seq_len": 512})
    assert part in str(error.value)
    assert not touched.exists()


def test_uploaded_file_reads_no_other(tmp_path: Path) -> None:
    """Files of the machine that the dashboard runs on are none of an upload's."""
    entry = next(entry for _, entry in CASES if entry["name"] == "peft_run_peft_fsdp")
    path = write(tmp_path, "trainer", entry)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    text = path.read_text(encoding="utf-8").replace("meta-llama/Llama-2-70b-hf", ".")
    with pytest.raises(SpecError) as error:
        read_source(ConfigFile(path, text, reads_others=False), {"cluster.preset": "dgx-h100"})
    assert "names configs/fsdp_config.yaml, which is not next to it" in str(error.value)
    assert "names the model ." in str(error.value)


def test_pickled_arguments_are_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "training_args.bin"
    path.write_bytes(pickle.dumps({"per_device_train_batch_size": 1}))
    with pytest.raises(SpecError, match="binary file"):
        scenario_from(path)


def test_three_numbers_of_a_batch_are_the_devices(tmp_path: Path) -> None:
    """DeepSpeed asserts that the batch is microbatch x accumulation x data-parallel ranks."""
    file = tmp_path / "ds.json"
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    file.write_text(json.dumps(batch | {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    overrides = {"cluster.preset": "dgx-h100", "model.preset": "gpt2-124m", "model.seq_len": 512}
    assert read_source(file, overrides).scenario().job.cluster.num_devices == 8
    file.write_text(json.dumps(batch | {"train_batch_size": 60, "zero_optimization": {"stage": 3}}))
    with refuses("train_batch_size", rule="is not a multiple of 2"):
        read_source(file, overrides)


@pytest.mark.parametrize(("line", "recompute"), [("", "full"), ("disable_gradient_checkpointing: true\n", "none")])
def test_llama_factory_recomputes_by_default(line: str, recompute: str, tmp_path: Path) -> None:
    """LLaMA-Factory, src/llamafactory/model/model_utils/checkpointing.py."""
    file = tmp_path / "sft.yaml"
    file.write_text(
        "model_name_or_path: meta-llama/Llama-3.1-8B\nstage: sft\nfinetuning_type: full\ncutoff_len: 2048\n"
        f"per_device_train_batch_size: 1\nbf16: true\ndo_train: true\n{line}"
    )
    overrides = {"cluster.preset": "dgx-h100", "cluster.num_nodes": 1, "plan.zero_stage": 3}
    assert read_source(file, overrides).document.data["plan"]["recompute"] == recompute


_OF_FACTORY = {"model_name_or_path": "Llama-3.2-1B", "stage": "sft", "finetuning_type": "full", "bf16": True}


@pytest.mark.parametrize(
    ("command", "length", "micro"),
    [
        ("torchrun --nproc_per_node 8 src/train.py run.yaml", 2048, 1),
        ("llamafactory-cli train run.yaml per_device_train_batch_size=4 cutoff_len=512", 512, 4),
        ("deepspeed --num_gpus 8 src/train_bash.py --stage sft --finetuning_type full", 2048, 2),
    ],
)
def test_commands_of_llama_factory_have_its_defaults(command: str, length: int, micro: int, tmp_path: Path) -> None:
    """LLaMA-Factory at ff6d4d1, hparams/parser.py (``read_args``) and data_args.py; src/train_bash.py till 0.7."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(_OF_FACTORY | {"per_device_train_batch_size": 1}))
    path, more = tmp_path / "run.sh", "--model_name_or_path Llama-3.2-1B --per_device_train_batch_size 2 --bf16"
    path.write_text(f"{command} {more if '--stage' in command else ''}\n", encoding="utf-8")
    job = scenario_from(path, {"cluster.preset": "dgx-h100", "plan.zero_stage": 2}).job
    assert (job.model.seq_len, job.plan.microbatch_size, job.plan.recompute) == (length, micro, "full")


_LONG = "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8 --parallelism_config_cp_size 8 train.py "


@pytest.mark.parametrize(
    ("command", "loss"),
    [
        ("trl sft --num_processes 8", "recomputed"),
        ("trl sft --num_processes 8 --loss_type nll", "whole"),
        ("trl sft --num_processes 8 --use_liger_kernel", "fused"),
        (f"{_LONG}--loss_type chunked_nll", "recomputed"),
        ("torchrun --nproc_per_node 8 train.py --use_liger_kernel", "fused"),
        (
            "torchrun --nproc_per_node 8 train.py --use_liger_kernel "
            """--liger_kernel_config '{"fused_linear_cross_entropy": false}'""",
            "whole",
        ),
        ("NPROC_PER_NODE=8 llamafactory-cli train --enable_liger_kernel --stage sft --finetuning_type full", "fused"),
        ("torchrun --nproc_per_node 8 train.py", "whole"),
    ],
)
def test_loss_in_chunks_is_read(command: str, loss: str, tmp_path: Path) -> None:
    """transformers, TRL from version 1.7 on and LLaMA-Factory; Liger's other kernels are listed."""
    path, more = tmp_path / "train.sh", "--model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1 --bf16"
    length = "--cutoff_len 512" if "llama" in command else "--max_length 512"
    path.write_text(f"set -e\n{command} {more} {length}\n", encoding="utf-8")
    source = read_source(path, {"cluster.preset": "dgx-h100"})
    assert source.scenario().job.software.loss == loss
    assert source.configuration is not None
    listed = [why for _, why in source.configuration.not_modeled if "fused norms" in why]
    assert bool(listed) == ("liger_kernel" in command)


_FSDP2 = (
    "fsdp_version: 2\nfsdp_config:\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "  transformer_layer_cls_to_wrap: Qwen2DecoderLayer\n  reshard_after_forward: true\n"
)
_ADAPTERS = f"{_FACTORY}bf16: true\nfinetuning_type: "
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "FSDP2": (_FSDP2, {"zero_stage": 3, "dp_shard": 16, "dp_replicate": 1}),
    "FSDP2, kept": (_FSDP2.replace("true", "false"), {"zero_stage": 2, "dp_shard": 16}),
    "FSDP1 by fsdp_config alone": ("fsdp_config: {sharding_strategy: SHARD_GRAD_OP}\n", {"zero_stage": 2}),
    "a version without a configuration": ("fsdp_version: 2\n", {"zero_stage": 0, "dp_replicate": 16}),
    "in both places": (f"{_FSDP2}  fsdp_version: 2\n", {"zero_stage": 3}),
    "HSDP by shards": (f"{_FSDP2}dp_shard_size: 4\n", {"dp_shard": 4, "dp_replicate": 4, "zero_stage": 3}),
    "HSDP by replicas": (f"{_FSDP2}dp_replicate_size: 4\n", {"dp_shard": 4, "dp_replicate": 4}),
    "sizes of 1 as left out": (f"{_FSDP2}dp_shard_size: 1\ndp_replicate_size: 1\n", {"dp_shard": 16}),
    "three dimensions": (
        f"{_FSDP2}dp_shard_size: 2\ntensor_parallel_size: 2\ncontext_parallel_size: 4\n",
        {"tp": 2, "cp": 4, "dp_shard": 2, "dp_replicate": 1, "cp_comm": "ring", "sequence_parallel": False},
    ),
    "packed, gathers keys": (
        f"{_FSDP2}context_parallel_size: 2\nsample_packing: true\n",
        {"cp": 2, "cp_comm": "ring", "dp_shard": 8},
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_axolotl_shards_and_splits_as_it_says(name: str, tmp_path: Path) -> None:
    """axolotl: core/builders (fsdp_config or fsdp), utils/distributed.py, ring_attn of utils/schemas/enums.py."""
    text, expected = PLANS[name]
    path = tmp_path / "run.yaml"
    path.write_text(f"{_AXOLOTL}bf16: true\n{text}", encoding="utf-8")
    job = scenario_from(path, {"cluster.preset": "dgx-h100", "cluster.num_nodes": 2}).job
    assert {key: getattr(job.plan, key) for key in expected} == expected
    layers = job.software.layers_of(job.model, job.plan)
    assert not any(table.name == MASK for layer in layers for table in layer.constants), "ring-flash-attn has none"


_EFFICIENT = "accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --fsdp_cpu_ram_efficient_loading true"


@pytest.mark.parametrize(
    ("name", "text", "loading"),
    [
        (
            "run.yaml",
            f"{_AXOLOTL}bf16: true\n{_FSDP2}  cpu_ram_efficient_loading: true\nadapter: lora\nlora_r: 8\n",
            "rank0",
        ),
        ("run.yaml", f"{_AXOLOTL}bf16: true\n{_FSDP2}adapter: lora\nlora_r: 8\n", "auto"),
        ("run.sh", f"{_EFFICIENT} train.py --use_peft --lora_r 8", "broadcast"),
        (
            "run.sh",
            f"{_EFFICIENT} train.py --use_peft --lora_r 8 --load_in_4bit --bnb_4bit_quant_storage bfloat16",
            "auto",
        ),
        ("run.sh", f"{_EFFICIENT} train.py", "auto"),
        ("run.yaml", f"{_ADAPTERS}full\nstage: sft\n", "device_map"),
        ("run.yaml", f"{_ADAPTERS}full\nstage: sft\nlow_cpu_mem_usage: false\n", "auto"),
    ],
)
def test_who_loads_the_checkpoint_is_read(name: str, text: str, loading: str, tmp_path: Path) -> None:
    """axolotl: loaders/model.py, _build_model; LLaMA-Factory: model/patcher.py; 4 bits go to every device."""
    more = " --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --bf16 --max_length 512\n"
    path = tmp_path / name
    path.write_text(text + more * name.endswith("sh"), encoding="utf-8")
    overrides = {"cluster.preset": "dgx-h100"} | ({} if name.endswith("sh") else {"cluster.num_nodes": 2})
    assert scenario_from(path, overrides).job.software.loading == loading


FEW_BITS: dict[str, tuple[str, dict[str, Any]]] = {
    "axolotl": (
        f"{_AXOLOTL}adapter: qlora\nload_in_4bit: true\nlora_r: 8\nbf16: true\n",
        {"format": "nf4", "double_quantization": True, "storage": "bf16", "upcast": False},
    ),
    "axolotl, by its library": (
        f"{_AXOLOTL}adapter: qlora\nlora_r: 8\nfp16: true\n"
        "bnb_config_kwargs: {bnb_4bit_quant_type: fp4, bnb_4bit_use_double_quant: false}\n",
        {"format": "fp4", "storage": "bf16", "upcast": False},
    ),
    "axolotl, 8 bits": (
        f"{_AXOLOTL}adapter: lora\nload_in_8bit: true\nlora_r: 8\n",
        {"format": "int8", "upcast": False},
    ),
    "LLaMA-Factory": (
        f"{_ADAPTERS}lora\nquantization_bit: 4\n",
        {"format": "nf4", "double_quantization": True, "storage": "bf16", "upcast": False},
    ),
    "LLaMA-Factory, 8 bits": (f"{_ADAPTERS}lora\nquantization_bit: 8\n", {"format": "int8", "upcast": False}),
    "arguments of TRL": (
        f"{_FACTORY}bf16: true\nuse_peft: true\nlora_r: 8\nload_in_4bit: true\nuse_bnb_nested_quant: true\n",
        {"format": "nf4", "double_quantization": True},
    ),
    "axolotl, with experts": (
        f"{_AXOLOTL}adapter: qlora\nload_in_4bit: true\nlora_r: 8\nbf16: true\nquantize_moe_experts: true\n",
        {"format": "nf4", "double_quantization": True, "experts": True, "storage": "bf16", "upcast": False},
    ),
    "a checkpoint of GPTQ": (
        _AXOLOTL.replace("Qwen2.5-7B", "Qwen2.5-7B-Instruct-GPTQ-Int4") + "adapter: lora\nlora_r: 8\nbf16: true\n",
        {"format": "gptq_int4"},
    ),
}


@pytest.mark.parametrize("name", FEW_BITS)
def test_weights_of_few_bits_are_read(name: str, tmp_path: Path) -> None:
    """axolotl: loaders/model.py; LLaMA-Factory: model/model_utils/quantization.py; TRL: trainer/model_config.py."""
    text, expected = FEW_BITS[name]
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    overrides = {
        "cluster.preset": "dgx-h100",
        "cluster.num_devices": 1,
        "plan.zero_stage": 0,
        "model.preset": "qwen3-30b-a3b" if "moe" in text else "qwen2.5-7b",
    }
    base = scenario_from(path, overrides).job.training.base_weights
    assert base is not None
    assert base.model_dump(exclude_unset=True) == expected


OPTIMIZERS: dict[str, tuple[str, str]] = {
    "adamw_bnb_8bit": ("", "adamw_8bit"),
    "paged_adamw_32bit": ("", "paged_adamw_32bit"),
    "adamw_torch_8bit": (_FSDP2, "adamw_torch_8bit"),
    "ao_adamw_fp8": (_FSDP2, "ao_adamw_fp8"),
    "adafactor": ("", "adafactor"),
    "muon": (_FSDP2, "muon"),
}


_LAYERWISE = {"training.optimizer_in_backward": True, "training.clip_grad_norm": None}
FACTORY_RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "layerwise GaLore": (
        f"{_ADAPTERS}full\npure_bf16: true\nuse_galore: true\ngalore_layerwise: true\ngalore_rank: 64\n",
        1,
        {"training.optimizer": "galore_adamw", "training.optimizer_rank": 64, **_LAYERWISE},
    ),
    "GaLore in 8 bits under DDP": (
        f"{_ADAPTERS}full\nuse_galore: true\noptim: paged_adamw_8bit\n",
        8,
        {"training.optimizer": "galore_adamw_8bit", "training.optimizer_rank": 16, "training.clip_grad_norm": 1.0},
    ),
    "APOLLO of transformers": (
        f"{_ADAPTERS}full\noptim: apollo_adamw_layerwise\noptim_target_modules: [attn, mlp]\noptim_args: rank=1\n",
        1,
        {"training.optimizer": "apollo_adamw", "training.optimizer_rank": 1, **_LAYERWISE},
    ),
    "Adam-mini": (f"{_ADAPTERS}full\nuse_adam_mini: true\n", 8, {"training.optimizer": "adam_mini"}),
    "BAdam": (
        f"{_ADAPTERS.replace('bf16: true', '')}full\nuse_badam: true\n",
        1,
        {
            "training.optimizer": "badam",
            "training.pure_bf16": True,
            "training.precision": "bf16",
            "model.frozen": ("embedding", "head", "blocks.1-27"),
        },
    ),
    "BAdam that stays": (
        f"{_ADAPTERS}full\nuse_badam: true\nbadam_switch_mode: fixed\nbadam_start_block: 27\n",
        1,
        {"model.frozen": ("embedding", "head", "blocks.0-26")},
    ),
    "mcore_adapter": (
        f"{_ADAPTERS}full\ntensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\nsequence_parallel: true\n"
        "use_distributed_optimizer: true\nrecompute_granularity: full\n",
        8,
        {"plan.tp": 2, "plan.pp": 2, "plan.sequence_parallel": True, "plan.zero_stage": 1, "plan.dp_shard": 2,
         "plan.recompute": "full", "plan.grad_dtype": "bf16", "software.id": "megatron-core"},
    ),
    "Megatron Bridge": (
        f"{_ADAPTERS}lora\nuse_distributed_optimizer: true\nmixed_precision: bf16_mixed\n",
        8,
        {"plan.zero_stage": 1, "model.lora_rank": 8, "software.id": "megatron-bridge", "plan.recompute": "none"},
    ),
    "FP8 that converts nothing": (
        f"{_ADAPTERS}full\nfp8: true\ndeepspeed: {{zero_optimization: {{stage: 3}}}}\n",
        8,
        {"training.precision": "bf16", "plan.zero_stage": 3},
    ),
    "ASFT": (
        f"{_ADAPTERS}full\nuse_asft_loss: true\n",
        8,
        {"training.task": "asft", "training.preference.reference_dtype": "bf16", "reference": "second_model"},
    ),
    "adapters without mixed precision": (
        f"{_ADAPTERS.replace('bf16: true', '')}lora\n",
        8,
        {"training.precision": "bf16", "software.autocast": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORY_RUNS)
def test_settings_of_llama_factory_alone_are_read(name: str, tmp_path: Path) -> None:
    """LLaMA-Factory at ff6d4d1: train/trainer_utils.py, train/mca, train/megatron_bridge, train/fp8_utils.py."""
    text, num_devices, expected = FACTORY_RUNS[name]
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    devices = {} if num_devices == 1 else {"cluster.num_devices": num_devices}  # what needs one process has one
    job = scenario_from(path, {"cluster.preset": "dgx-h100", **devices}).job
    assert job.cluster.num_devices == num_devices
    assert {key: attrgetter(key)(job) for key in expected} == expected


@pytest.mark.parametrize(
    ("oft", "expected"), [("", (32, ("all",))), ("oft_block_size: 16\noft_target: q_proj,v_proj\n", (16, ("q", "v")))]
)
def test_oft_of_llama_factory_is_read(oft: str, expected: tuple[int, tuple[str, ...]], tmp_path: Path) -> None:
    """LLaMA-Factory at ff6d4d1, hparams/finetuning_args.py: blocks of 32 in all linear layers by default."""
    path = tmp_path / "run.yaml"
    path.write_text(f"{_ADAPTERS}oft\n{oft}", encoding="utf-8")
    model = scenario_from(path, {"cluster.preset": "dgx-h100", "cluster.num_devices": 8}).job.model
    assert model.lora_oft
    assert (model.lora_rank, model.lora_targets) == expected


@pytest.mark.parametrize("word", OPTIMIZERS)
def test_axolotl_names_optimizers_of_the_table(word: str, tmp_path: Path) -> None:
    """axolotl: utils/schemas/enums.py, CustomSupportedOptimizers, and transformers' OptimizerNames."""
    more, name = OPTIMIZERS[word]
    path = tmp_path / "run.yaml"
    path.write_text(f"{_AXOLOTL}bf16: true\n{more}".replace("adamw_torch_fused", word), encoding="utf-8")
    assert scenario_from(path, {"cluster.preset": "dgx-h100"}).job.training.optimizer == name


def test_axolotl_refuses_8_bits_under_fsdp2(tmp_path: Path) -> None:
    """utils/schemas/validation.py: use adamw_torch_8bit."""
    path = tmp_path / "run.yaml"
    path.write_text(f"{_AXOLOTL}bf16: true\n{_FSDP2}".replace("adamw_torch_fused", "adamw_bnb_8bit"), encoding="utf-8")
    with refuses("optimizer", rule="does not work under FSDP2", fix="use adamw_torch_8bit"):
        scenario_from(path, {"cluster.preset": "dgx-h100"})


_LORA = f"{_AXOLOTL}bf16: true\nadapter: lora\nlora_r: 8\n"
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA of axolotl": (f"{_LORA}peft_use_dora: true\n", {"lora_dora": True}),
    "DoRA of LLaMA-Factory": (f"{_ADAPTERS}lora\nuse_dora: true\n", {"lora_dora": True}),
    "names in modules": (f"{_LORA}lora_target_modules: [self_attn.q_proj, up_proj]\n", {"lora_targets": ("q", "up")}),
    "a pattern": (
        f"{_LORA}lora_target_modules: 'model.layers.[\\d]+.(mlp|cross_attn|self_attn).(up|down|q)_proj'\n",
        {"lora_targets": ("up", "down", "q")},
    ),
    "a pattern of blocks": (
        f"{_LORA}lora_target_modules: '.*\\.layers\\.(0|1|3)\\.self_attn\\.(q|v)_proj'\n",
        {"lora_targets": ("blocks.0-1.q", "blocks.3.q", "blocks.0-1.v", "blocks.3.v")},
    ),
    "parameters of experts": (
        f"{_LORA}lora_target_linear: true\nlora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]\n",
        {"lora_targets": ("all", "experts_gate", "experts_up", "experts_down")},
    ),
    "last blocks": (
        f"{_ADAPTERS}freeze\nfreeze_trainable_layers: 2\n",
        {"frozen": ("embedding", "head", "blocks.0-25")},
    ),
    "first blocks": (
        f"{_ADAPTERS}freeze\nfreeze_trainable_layers: -3\nfreeze_extra_modules: embed_tokens\n",
        {"frozen": ("head", "blocks.3-27")},
    ),
    "modules of a block": (
        f"{_ADAPTERS}freeze\nfreeze_trainable_layers: 1\nfreeze_trainable_modules: self_attn,mlp\n",
        {"frozen": ("embedding", "head", "blocks.0-26", "blocks.27.norm1", "blocks.27.norm2")},
    ),
    "blocks of a stride": (
        f"{_ADAPTERS}freeze\nfreeze_trainable_layers: 2\nuse_llama_pro: true\n",
        {"frozen": ("embedding", "head", "blocks.0-12", "blocks.14-26")},
    ),
    "patterns of what is trained": (
        f"{_AXOLOTL}bf16: true\nunfrozen_parameters: ['^lm_head.weight$', 'model.layers.2[6-9]+.mlp']\n",
        {
            "frozen": (
                "embedding",
                "blocks.0-25",
                *(f"blocks.26-27.{name}" for name in ("k", "norm1", "norm2", "proj", "q", "v")),
            ),
            "input_require_grads": True,
        },
    ),
    "all of a language model": (
        f"{_AXOLOTL}bf16: true\nunfrozen_parameters: [model.language_model.*, lm_head]\n",
        {"frozen": ()},
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_trained_parts_are_those_of_the_tool(name: str, tmp_path: Path) -> None:
    """axolotl: utils/freeze.py; LLaMA-Factory: model/adapter.py; PEFT: tuners/tuners_utils.py. 28 blocks."""
    text, expected = PARTS[name]
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    preset = {"model.preset": "qwen3-30b-a3b"} if "experts" in text else {}
    model = scenario_from(path, {"cluster.preset": "dgx-h100", "cluster.num_nodes": 1, **preset}).job.model
    assert {key: getattr(model, key) for key in expected} == expected


def test_model_of_an_option_is_the_one_that_settings_speak_of(tmp_path: Path) -> None:
    """Blocks are counted in it, and transformers' code for it is not modeled (attention sinks)."""
    path = tmp_path / "run.yaml"
    path.write_text(_AXOLOTL.replace("Qwen2.5-7B", "no-model-of-ours"), encoding="utf-8")
    overrides = {"cluster.preset": "dgx-h100", "cluster.num_nodes": 1, "model.preset": "gpt-oss-20b"}
    assert scenario_from(path, overrides).job.software.id == "torch"
    path.write_text(f"{_ADAPTERS}freeze\n".replace("Qwen2.5-7B", "no-model-of-ours"), encoding="utf-8")
    overrides["model.preset"] = "llama3-8b"
    assert scenario_from(path, overrides).job.model.frozen == ("embedding", "head", "blocks.0-29")


@pytest.mark.parametrize(
    ("text", "recipe"),
    [(f"{_ADAPTERS}full\nfp8: true\n", "rowwise"), (f"{_AXOLOTL}bf16: true\n{_FSDP2}fp8: true\n", None)],
)
def test_fp8_of_torchao_is_read(text: str, recipe: str | None, tmp_path: Path) -> None:
    """axolotl: core/trainers/base.py, by tensor; LLaMA-Factory: train/fp8_utils.py, by row."""
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    job = scenario_from(path, {"cluster.preset": "dgx-h100", "cluster.num_nodes": 1}).job
    assert (job.training.precision, job.software.id) == ("fp8", "torch")
    assert job.training.fp8_recipe == recipe


@pytest.mark.parametrize(
    ("offloads", "adapter", "recompute"),
    [("true", "", "full"), ("legacy", "", "full"), ("true", "lora_r: 8\n", "none")],
)
def test_offloaded_activations_replace_recomputation_of_adapters(
    offloads: str, adapter: str, recompute: str, tmp_path: Path
) -> None:
    """axolotl: loaders/model.py, _apply_activation_checkpointing."""
    path = tmp_path / "run.yaml"
    adapter = f"adapter: lora\n{adapter}" if adapter else ""
    path.write_text(f"{_AXOLOTL}bf16: true\n{adapter}activation_offloading: {offloads}\n", encoding="utf-8")
    plan = scenario_from(path, {"cluster.preset": "dgx-h100", "cluster.num_nodes": 1}).job.plan
    assert (plan.offload_activations, plan.recompute) == (True, recompute)


_CP = "adapter: qlora\nload_in_4bit: true\nlora_r: 8\nbf16: auto\ncontext_parallel_size: 2\n"


@pytest.mark.parametrize("more", ["gradient_checkpointing: true\n", "activation_offloading: true\n"])
def test_context_parallel_qlora_of_axolotl_is_read(more: str, tmp_path: Path) -> None:
    """As in axolotl's examples/nemotron-h and its ALST: replicas of packed weights, and parts of the sequences."""
    path = tmp_path / "run.yaml"
    path.write_text(_AXOLOTL + _CP + more, encoding="utf-8")
    job = scenario_from(path, {"cluster.preset": "dgx-h100", "cluster.num_nodes": 1}).job
    assert (job.plan.cp, job.plan.dp_replicate, job.plan.zero_stage, job.software.id) == (2, 4, 0, "torch")
    assert job.training.base_weights is not None
    assert job.training.base_weights.words == "nf4 with double quantization"
    assert job.plan.offload_activations is more.startswith("activation")
    assert predict(job).step_time_s > 0


REFUSED: dict[str, tuple[str, str]] = {
    "OFT with dropout": (f"{_ADAPTERS}oft\nmodule_dropout: 0.1\n", "module_dropout"),
    "blocks of an unknown model": (
        f"{_ADAPTERS}freeze\n".replace("Qwen/Qwen2.5-7B", "someone/model"),
        "finetuning_type",
    ),
    "frozen adapters": (
        f"{_AXOLOTL}adapter: lora\nlora_r: 8\nunfrozen_parameters: [^lm_head]\n",
        "unfrozen_parameters",
    ),
    "a pattern with counts": (
        f"{_AXOLOTL}adapter: lora\nlora_r: 8\nlora_target_modules: 'q{{2}}_proj'\n",
        "target_modules",
    ),
    "simulated weights of 8 bits": (f"{_AXOLOTL}qat: {{activation_dtype: int8}}\n", "qat.activation_dtype"),
    "simulated weights in NVFP4": (f"{_AXOLOTL}qat: {{weight_dtype: nvfp4}}\n", "qat.weight_dtype"),
    "adapters with Megatron": (f"{_ADAPTERS}lora\npipeline_model_parallel_size: 4\n", "finetuning_type"),
    "layouts of Megatron": (f"{_ADAPTERS}full\npipeline_model_parallel_layout: Et|tL\nuse_mca: true\n", "layout"),
    "fp8 of another library": (f"{_ADAPTERS}full\nfp8: true\nfp8_backend: te\n", "fp8_backend"),
    "fp8 under DeepSpeed": (f"{_ADAPTERS}full\nfp8: true\ndeepspeed: {{zero_optimization: {{stage: 2}}}}\n", "fp8"),
    "GaLore of some matrices": (f"{_ADAPTERS}full\nuse_galore: true\ngalore_target: q_proj\n", "galore_target"),
    "GaLore with adapters": (f"{_ADAPTERS}lora\nuse_galore: true\n", "use_galore"),
    "GaLore without targets": (f"{_ADAPTERS}full\noptim: galore_adamw\n", "optim"),
    "GaLore under DeepSpeed": (f"{_ADAPTERS}full\nuse_galore: true\ndeepspeed: ds.json\n", "deepspeed"),
    "BAdam of ratios": (f"{_ADAPTERS}full\nuse_badam: true\nbadam_mode: ratio\n", "badam_mode"),
    "ASFT with adapters": (f"{_ADAPTERS}lora\nuse_asft_loss: true\n", "use_asft_loss"),
    "prediction": (
        "stage: sft\ncutoff_len: 512\ntemplate: qwen\nfinetuning_type: lora\ndo_predict: true\n",
        "do_predict",
    ),
    "offload": (f"{_ADAPTERS}full\ngradient_checkpointing_kwargs: {{offload: true}}\n", "checkpointing_kwargs.offload"),
    "other adapters": (f"{_AXOLOTL}adapter: llama-adapter\n", "adapter"),
    "weights of another library": (f"{_ADAPTERS}lora\nquantization_bit: 4\nquantization_method: hqq\n", "quantization"),
    "weights of 3 bits": (f"{_ADAPTERS}lora\nquantization_bit: 3\n", "quantization_bit"),
    "experts": (f"{_AXOLOTL}expert_parallel_size: 2\n", "expert_parallel_size"),
    "spectrum": (f"{_AXOLOTL}plugins: [axolotl.integrations.spectrum.SpectrumPlugin]\n", "plugins"),
    "other devices": ("distributed_type: MULTI_NPU\nnum_processes: 8\nmixed_precision: bf16\n", "distributed_type"),
    "images": (f"{_ADAPTERS}lora\nimage_max_pixels: 262144\n", "image_max_pixels"),
    "sound": (f"{_AXOLOTL}processor_type: AutoProcessor\n", "processor_type"),
    "weights of 4 bits by name": (_AXOLOTL.replace("Qwen2.5-7B", "Qwen2.5-7B-GPTQ"), "base_model"),
    "two versions": (f"{_AXOLOTL}{_FSDP2}  fsdp_version: 1\n", "fsdp_config.fsdp_version"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_setting_of_another_plan_is_refused(name: str, tmp_path: Path) -> None:
    text, field = REFUSED[name]
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as error:
        scenario_from(path, {"cluster.preset": "dgx-h100", "cluster.num_nodes": 1})
    assert [problem for problem in error.value.problems if field in problem.field and problem.line]


@pytest.mark.parametrize(
    ("qat", "expected"),
    [
        ("{activation_dtype: int8, weight_dtype: int4}", "weights as int4 in groups of 32, inputs as int8"),
        ("{weight_dtype: int4, group_size: 64}", "weights as int4_fp8 in groups of 64"),
        ("{activation_dtype: fp8, weight_dtype: float8_e4m3fn}", "weights as fp8, inputs as fp8"),
        ("{weight_dtype: mxfp4, activation_dtype: mxfp4, group_size: 32}", "weights as mxfp4, inputs as mxfp4"),
    ],
)
def test_simulated_quantization_of_axolotl_is_read(qat: str, expected: str, tmp_path: Path) -> None:
    """axolotl at 067b021, utils/quantization.py, _make_qat_config; its group size is 32 by default."""
    path = tmp_path / "run.yaml"
    path.write_text(f"{_AXOLOTL}bf16: true\nqat: {qat}\n", encoding="utf-8")
    training = scenario_from(path, {"cluster.preset": "dgx-h100", "cluster.num_nodes": 1}).job.training
    assert training.fake_quantization is not None
    assert training.fake_quantization.words == expected


@pytest.mark.parametrize(
    ("attention", "length", "window"),
    [
        ("attn_implementation: flash_attention_2", 4096, None),
        ("flash_attention: true", 4096, None),
        ("attn_implementation: sdpa", 4096, 4096),
        ("attn_implementation: flash_attention_2", 2048, 4096),
        ("attn_implementation: flash_attention_2", 8192, 4096),
    ],
)
def test_flash_attention_ignores_a_window_as_long_as_sequences(
    attention: str, length: int, window: int | None, tmp_path: Path
) -> None:
    """Of Mistral 7B v0.1, whose window is 4,096; SDPA has a mask tensor at that length."""
    path = tmp_path / "run.yaml"
    text = _AXOLOTL.replace("Qwen/Qwen2.5-7B", "mistralai/Mistral-7B-v0.1").replace("2048", str(length))
    path.write_text(f"{text}bf16: true\n{attention}\n", encoding="utf-8")
    add = {"cluster.preset": "dgx-h100", "cluster.num_nodes": 1}
    assert scenario_from(path, add).job.model.sliding_window == window


@pytest.mark.parametrize("word", ["allgather", "alltoall"])
def test_rotation_of_context_parallelism_makes_no_mask(word: str, tmp_path: Path) -> None:
    """Accelerate 1.15, utils/dataclasses.py: TorchContextParallelConfig; a mask of 2^20 by 2^17 tokens is 128 GiB."""
    path = tmp_path / "cp.yaml"
    sizes = {"parallelism_config_cp_size": 8, "parallelism_config_cp_comm_strategy": word}
    launch = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16"}
    settings = {**launch, "fsdp_config": {"fsdp_version": 2}, "parallelism_config": sizes}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    add = {"cluster.preset": "dgx-h100", "model.preset": "llama3-8b", "model.seq_len": 2**20, "plan.microbatch_size": 1}
    source = read_source(path, {**add, "num_microbatches": 1, "plan.recompute": "full"})
    job = source.scenario().job
    assert job.plan.cp_comm == "ring"
    assert not any(
        table.name == MASK for layer in job.software.layers_of(job.model, job.plan) for table in layer.constants
    )
    assert source.configuration is not None
    assert ("gathered together" in str(source.configuration.not_modeled)) == (word == "allgather")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train run.yaml", {"dp_replicate": 16, "zero_stage": 0}),
        ("axolotl train axo.yaml --num-processes 16", {"dp_shard": 16, "zero_stage": 3}),
        ("axolotl train axo.yaml --launcher torchrun -- --nproc_per_node=8 --nnodes=2", {"dp_shard": 16}),
        ("trl sft --config run.yaml --accelerate_config fsdp2", {"dp_shard": 8, "zero_stage": 3}),
        ("trl sft --config run.yaml --accelerate_config zero2 --num_processes 16 --num_machines 2", {"dp_shard": 16}),
        ("torchrun --nproc_per_node 8 --nnodes 2 run_clm.py args.json", {"dp_replicate": 16}),
    ],
)
def test_devices_and_plan_of_a_tool_are_read(command: str, expected: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{_FACTORY}finetuning_type: full\n" if "llama" in command else _FACTORY)
    (tmp_path / "axo.yaml").write_text(f"{_AXOLOTL}bf16: true\n{_FSDP2}", encoding="utf-8")
    settings = {"model_name_or_path": "gpt2", "per_device_train_batch_size": 1, "block_size": 512, "bf16": True}
    (tmp_path / "args.json").write_text(json.dumps(settings), encoding="utf-8")
    path = tmp_path / "run.sh"
    path.write_text(f"{command}\n", encoding="utf-8")
    plan = scenario_from(path, {"cluster.preset": "dgx-h100"}).job.plan
    assert {key: getattr(plan, key) for key in expected} == expected


def test_file_that_is_no_deepspeed_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps({"id": "q1", "input": "text"}), encoding="utf-8")
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"per_device_train_batch_size": 1, "deepspeed": "data.json"}), encoding="utf-8")
    with refuses("data.json", rule="named as the DeepSpeed configuration"):
        scenario_from(path, {"cluster.preset": "dgx-h100"})


@pytest.mark.parametrize("stage", [2, 3])
def test_stage_on_top_of_replicas_wins(stage: int, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{_FACTORY}finetuning_type: full\nbf16: true\n", encoding="utf-8")
    overrides = {"cluster.preset": "dgx-h100", "cluster.num_nodes": 1, "plan.zero_stage": stage}
    source = read_source(path, overrides)
    plan = source.scenario().job.plan
    assert (plan.zero_stage, plan.dp_shard, plan.dp_replicate) == (stage, 8, 1)
    assert "DDP" not in source.text(tmp_path)
    path = tmp_path / "accelerate.yaml"
    sizes = {"parallelism_config_dp_shard_size": 1, "parallelism_config_dp_replicate_size": 8}
    launch = {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16"}
    path.write_text(yaml.safe_dump({**launch, "parallelism_config": sizes}), encoding="utf-8")
    add = {"model.preset": "gpt2-124m", "model.seq_len": 512, "plan.microbatch_size": 1, "num_microbatches": 1}
    with refuses("plan.zero_stage", str(stage), rule="nothing to shard"):
        read_source(path, {**overrides, **add})


OTHERS = {
    "torchtune's commands": "tune run lora_finetune_single_device --config llama3_1/8B_lora_single_device\n",
    "nanotron": "general: {project: a}\nparallelism: {dp: 8, tp: 1}\ntokens: {sequence_length: 8}\ncheckpoints: {}\n",
    "NeMo AutoModel": "model:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained\n",
    "LLaMA-Factory v1": "model: a\nmodel_class: llm\ndist_config: {name: fsdp2}\ntrain_dataset: d\n",
    "verl": "actor_rollout_ref:\n  model: {path: a}\n",
    "OpenRLHF": "deepspeed --module openrlhf.cli.train_sft --max_len 2048 --pretrain a/b\n",
}


@pytest.mark.parametrize("name", OTHERS)
def test_framework_that_is_not_read_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / ("run.sh" if "--" in OTHERS[name] else "run.yaml")
    path.write_text(OTHERS[name], encoding="utf-8")
    with pytest.raises(SpecError, match=f"looks like a file of {name}, which is not read") as error:
        scenario_from(path, {"cluster.preset": "dgx-h100"})
    assert len(error.value.problems) == 1


def test_file_of_nothing_known_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"stage": "sft", "model_name": "a/b", "training_args": {"max_steps": 3}}', encoding="utf-8")
    with pytest.raises(SpecError, match="is no file of a framework that simplan knows") as error:
        scenario_from(path, {"cluster.preset": "dgx-h100"})
    assert len(error.value.problems) == 1


def test_recomputation_is_that_of_fsdp_and_hosts_have_a_file() -> None:
    usual = {"cluster.preset": "dgx-h100", "plan.dp_shard": 8, "plan.recompute": "full", "training.task": "sft"}
    files = export(scenario_from("llama3-8b", {**usual, "software": "accelerate"}).job, "accelerate").files
    assert "fsdp_activation_checkpointing: true" in files["accelerate.yaml"]
    assert "--gradient_checkpointing false" in files["train.sh"]
    many = {**usual, "software": "deepspeed", "cluster.num_nodes": 2, "plan.dp_shard": 16}
    exported = export(scenario_from("llama3-8b", many).job, "deepspeed")
    assert exported.files["hostfile"] == "node0 slots=8\nnode1 slots=8\n"
    assert "--gradient_checkpointing" in exported.files["train.sh"]
    assert not [note for note in exported.notes if "every node" in note]


def test_settings_of_a_strategy_that_is_off_are_no_errors(tmp_path: Path) -> None:
    """Accelerate reads ``fsdp_config`` under FSDP only."""
    path = tmp_path / "ds.yaml"
    launch = {"distributed_type": "DEEPSPEED", "num_processes": 8, "mixed_precision": "bf16"}
    other = {"fsdp_config": {"fsdp_offload_params": True}, "deepspeed_config": {"zero_stage": 2}}
    path.write_text(yaml.safe_dump({**launch, **other}), encoding="utf-8")
    add = {"cluster.preset": "dgx-h100", "model.preset": "gpt2-124m", "model.seq_len": 512, "plan.microbatch_size": 1}
    source = read_source(path, {**add, "num_microbatches": 1})
    assert (source.scenario().job.plan.zero_stage, source.scenario().job.plan.offload_optimizer) == (2, False)
    assert source.configuration is not None
    assert "fsdp_config.fsdp_offload_params" in {setting.key for setting in source.configuration.no_effect}


_AX_PAIRS = (
    "base_model: Qwen/Qwen2.5-7B\nsequence_len: 2048\nmicro_batch_size: 2\ngradient_accumulation_steps: 1\nbf16: true\n"
)
_LF_PAIRS = "model_name_or_path: Qwen/Qwen2.5-7B\ncutoff_len: 2048\nper_device_train_batch_size: 1\nbf16: true\n"
_OF_TRL = " --model_name_or_path Qwen/Qwen2.5-7B --max_length 2048"
PREFERENCES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "axolotl, dpo": (
        "run.yaml",
        f"{_AX_PAIRS}rl: dpo\nadapter: lora\nlora_r: 8\nlora_dropout: 0.05\nrl_beta: 0.2\n",
        {"task": "dpo", "reference": "adapters_off", "lora_dropout": 0.0, "loss": "whole"},
    ),
    "axolotl, ipo with a second model": (
        "run.yaml",
        f"{_AX_PAIRS}rl: ipo\nadapter: lora\nlora_r: 8\nrl_adapter_ref_model: true\n",
        {"task": "dpo", "reference": "second_model"},
    ),
    "axolotl, all weights": ("run.yaml", f"{_AX_PAIRS}rl: dpo\n", {"task": "dpo", "reference": "second_model"}),
    "axolotl, precomputed": (
        "run.yaml",
        f"{_AX_PAIRS}rl: kto\nprecompute_ref_log_probs: true\n",
        {"task": "kto", "reference": "precomputed"},
    ),
    "axolotl, simpo": (
        "run.yaml",
        f"{_AX_PAIRS}rl: simpo\nsimpo_gamma: 0.5\n",
        {"task": "simpo", "reference": "none"},
    ),
    "axolotl, reward": ("run.yaml", f"{_AX_PAIRS}reward_model: true\nnum_labels: 1\n", {"task": "reward"}),
    "LLaMA-Factory, dpo": (
        "run.yaml",
        f"{_LF_PAIRS}stage: dpo\nfinetuning_type: lora\nlora_rank: 8\npref_beta: 0.1\npref_loss: sigmoid\n",
        {"task": "dpo", "reference": "adapters_off", "lora_rank": 8, "microbatch_size": 1},
    ),
    "LLaMA-Factory, all weights": (
        "run.yaml",
        f"{_LF_PAIRS}stage: dpo\nfinetuning_type: full\npref_loss: hinge\n",
        {"task": "dpo", "reference": "second_model", "reference_dtype": "bf16"},
    ),
    "LLaMA-Factory, a second model": (
        "run.yaml",
        f"{_LF_PAIRS}stage: kto\nfinetuning_type: lora\nlora_rank: 8\nref_model: Qwen/Qwen2.5-7B\n",
        {"task": "kto", "reference": "second_model", "reference_dtype": "bf16"},
    ),
    "LLaMA-Factory, orpo": (
        "run.yaml",
        f"{_LF_PAIRS}stage: dpo\nfinetuning_type: full\npref_loss: orpo\n",
        {"task": "orpo", "reference": "none"},
    ),
    "LLaMA-Factory, reward": (
        "run.yaml",
        f"{_LF_PAIRS}stage: rm\nfinetuning_type: lora\nlora_rank: 8\n",
        {"task": "reward"},
    ),
    "TRL, dpo": (
        "run.sh",
        f"accelerate launch --num_processes 8 trl/scripts/dpo.py{_OF_TRL} --use_peft --lora_r 8 --loss_type ipo",
        {"task": "dpo", "reference": "adapters_off", "loss": "recomputed", "recompute": "full", "lora_dropout": 0.0},
    ),
    "TRL, dropout stays": (
        "run.sh",
        f"accelerate launch --num_processes 8 dpo.py{_OF_TRL} --bf16 --use_peft --disable_dropout false",
        {"task": "dpo", "lora_dropout": 0.05, "loss": "whole"},
    ),
    "TRL, Liger": (
        "run.sh",
        f"trl kto{_OF_TRL} --num_processes 8 --use_liger_kernel",
        {"task": "kto", "loss": "fused"},
    ),
    "TRL, simpo": (
        "run.sh",
        f"accelerate launch --num_processes 8 examples/scripts/cpo.py{_OF_TRL} --bf16 --loss_type simpo",
        {"task": "simpo", "loss": "whole"},
    ),
    "TRL, reward": (
        "run.sh",
        f"accelerate launch --num_processes 8 examples/scripts/reward_modeling.py{_OF_TRL} --bf16",
        {"task": "reward", "loss": "whole"},
    ),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_training_is_read(name: str, tmp_path: Path) -> None:
    """Files and commands become their task, reference and loss."""
    file, text, expected = PREFERENCES[name]
    path = tmp_path / file
    path.write_text(f"{text}\n", encoding="utf-8")
    job = scenario_from(path, {"cluster.preset": "dgx-h100", "cluster.num_devices": 8, "plan.zero_stage": 0}).job
    assert {key: _value(job, key) for key in expected} == expected


def _value(job: Job, key: str) -> Any:
    if key == "reference":
        return job.reference
    if key == "reference_dtype":
        return None if job.training.preference is None else job.training.preference.reference_dtype
    owners = (job.training, job.model, job.plan, job.software)
    return next(getattr(owner, key) for owner in owners if hasattr(owner, key))


OTHER_PREFERENCES: dict[str, tuple[str, str]] = {
    "grpo": (f"{_AX_PAIRS}rl: grpo\n", 'rl = "grpo": belongs to reinforcement learning'),
    "gdpo": (f"{_AX_PAIRS}rl: gdpo\n", 'rl = "gdpo": belongs to reinforcement learning'),
    "ppo": (f"{_LF_PAIRS}stage: ppo\nfinetuning_type: lora\n", 'stage = "ppo": belongs to reinforcement learning'),
    "prm": (f"{_AX_PAIRS}process_reward_model: true\n", "trains a reward model of every step of an answer"),
    "few bits under FSDP2": (
        f"{_AX_PAIRS}rl: orpo\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\nfsdp_version: 2\n",
        "load_in_4bit: is refused by axolotl with FSDP2 and rl = orpo",
    ),
    "packing": (f"{_AX_PAIRS}rl: dpo\nsample_packing: true\n", "sample_packing: is not possible in preference"),
    "one example": (
        f"{_AX_PAIRS}rl: kto\n".replace("micro_batch_size: 2", "micro_batch_size: 1"),
        "leaves no other completion for the KL term of KTO",
    ),
    "a quantized reference": (
        f"{_LF_PAIRS}stage: dpo\nfinetuning_type: full\nref_model_quantization_bit: 8\n",
        "ref_model_quantization_bit = 8: changes the reference model",
    ),
    "another loss": (
        f"{_LF_PAIRS}stage: dpo\nfinetuning_type: full\npref_loss: bco\n",
        'pref_loss = "bco": is a loss',
    ),
}


@pytest.mark.parametrize("name", OTHER_PREFERENCES)
def test_other_preference_training_is_refused(name: str, tmp_path: Path) -> None:
    """The words are those of the file, each with the reason."""
    text, words = OTHER_PREFERENCES[name]
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as error:
        scenario_from(path, {"cluster.preset": "dgx-h100", "cluster.num_devices": 8, "plan.zero_stage": 0})
    assert words in str(error.value)
