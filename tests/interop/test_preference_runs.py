"""Preference training as settings of axolotl, LLaMA-Factory and TRL say it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simplan.errors import SpecError
from simplan.job import Job
from simplan.scenario.source import scenario_from

_AXOLOTL = (
    "base_model: Qwen/Qwen2.5-7B\nsequence_len: 2048\nmicro_batch_size: 2\ngradient_accumulation_steps: 1\nbf16: true\n"
)
_FACTORY = "model_name_or_path: Qwen/Qwen2.5-7B\ncutoff_len: 2048\nper_device_train_batch_size: 1\nbf16: true\n"
_TRL = " --model_name_or_path Qwen/Qwen2.5-7B --max_length 2048"
READ: dict[str, tuple[str, str, dict[str, Any]]] = {
    "axolotl, dpo": (
        "run.yaml",
        f"{_AXOLOTL}rl: dpo\nadapter: lora\nlora_r: 8\nlora_dropout: 0.05\nrl_beta: 0.2\n",
        {"task": "dpo", "reference": "adapters_off", "lora_dropout": 0.0, "loss": "whole"},
    ),
    "axolotl, ipo with a second model": (
        "run.yaml",
        f"{_AXOLOTL}rl: ipo\nadapter: lora\nlora_r: 8\nrl_adapter_ref_model: true\n",
        {"task": "dpo", "reference": "second_model"},
    ),
    "axolotl, all weights": ("run.yaml", f"{_AXOLOTL}rl: dpo\n", {"task": "dpo", "reference": "second_model"}),
    "axolotl, precomputed": (
        "run.yaml",
        f"{_AXOLOTL}rl: kto\nprecompute_ref_log_probs: true\n",
        {"task": "kto", "reference": "precomputed"},
    ),
    "axolotl, simpo": ("run.yaml", f"{_AXOLOTL}rl: simpo\nsimpo_gamma: 0.5\n", {"task": "simpo", "reference": "none"}),
    "axolotl, reward": ("run.yaml", f"{_AXOLOTL}reward_model: true\nnum_labels: 1\n", {"task": "reward"}),
    "LLaMA-Factory, dpo": (
        "run.yaml",
        f"{_FACTORY}stage: dpo\nfinetuning_type: lora\nlora_rank: 8\npref_beta: 0.1\npref_loss: sigmoid\n",
        {"task": "dpo", "reference": "adapters_off", "lora_rank": 8, "microbatch_size": 1},
    ),
    "LLaMA-Factory, all weights": (
        "run.yaml",
        f"{_FACTORY}stage: dpo\nfinetuning_type: full\npref_loss: hinge\n",
        {"task": "dpo", "reference": "second_model", "reference_dtype": "bf16"},
    ),
    "LLaMA-Factory, a second model": (
        "run.yaml",
        f"{_FACTORY}stage: kto\nfinetuning_type: lora\nlora_rank: 8\nref_model: Qwen/Qwen2.5-7B\n",
        {"task": "kto", "reference": "second_model", "reference_dtype": "bf16"},
    ),
    "LLaMA-Factory, orpo": (
        "run.yaml",
        f"{_FACTORY}stage: dpo\nfinetuning_type: full\npref_loss: orpo\n",
        {"task": "orpo", "reference": "none"},
    ),
    "LLaMA-Factory, reward": (
        "run.yaml",
        f"{_FACTORY}stage: rm\nfinetuning_type: lora\nlora_rank: 8\n",
        {"task": "reward"},
    ),
    "TRL, dpo": (
        "run.sh",
        f"accelerate launch --num_processes 8 trl/scripts/dpo.py{_TRL} --use_peft --lora_r 8 --loss_type ipo",
        {"task": "dpo", "reference": "adapters_off", "loss": "recomputed", "recompute": "full", "lora_dropout": 0.0},
    ),
    "TRL, dropout stays": (
        "run.sh",
        f"accelerate launch --num_processes 8 dpo.py{_TRL} --bf16 --use_peft --disable_dropout false",
        {"task": "dpo", "lora_dropout": 0.05, "loss": "whole"},
    ),
    "TRL, Liger": ("run.sh", f"trl kto{_TRL} --num_processes 8 --use_liger_kernel", {"task": "kto", "loss": "fused"}),
    "TRL, simpo": (
        "run.sh",
        f"accelerate launch --num_processes 8 examples/scripts/cpo.py{_TRL} --bf16 --loss_type simpo",
        {"task": "simpo", "loss": "whole"},
    ),
    "TRL, reward": (
        "run.sh",
        f"accelerate launch --num_processes 8 examples/scripts/reward_modeling.py{_TRL} --bf16",
        {"task": "reward", "loss": "whole"},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_preference_training_is_read(name: str, tmp_path: Path) -> None:
    """Files and commands become their task, reference and loss."""
    file, text, expected = READ[name]
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


REFUSED: dict[str, tuple[str, str]] = {
    "grpo": (f"{_AXOLOTL}rl: grpo\n", 'rl = "grpo": belongs to reinforcement learning'),
    "gdpo": (f"{_AXOLOTL}rl: gdpo\n", 'rl = "gdpo": belongs to reinforcement learning'),
    "ppo": (f"{_FACTORY}stage: ppo\nfinetuning_type: lora\n", 'stage = "ppo": belongs to reinforcement learning'),
    "prm": (f"{_AXOLOTL}process_reward_model: true\n", "trains a reward model of every step of an answer"),
    "few bits under FSDP2": (
        f"{_AXOLOTL}rl: orpo\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\nfsdp_version: 2\nfsdp_config: {{x: 1}}\n",
        "load_in_4bit: is refused by axolotl with FSDP2 and rl = orpo",
    ),
    "packing": (f"{_AXOLOTL}rl: dpo\nsample_packing: true\n", "sample_packing: is not possible in preference"),
    "one example": (
        f"{_AXOLOTL}rl: kto\n".replace("micro_batch_size: 2", "micro_batch_size: 1"),
        "leaves no other completion for the KL term of KTO",
    ),
    "a quantized reference": (
        f"{_FACTORY}stage: dpo\nfinetuning_type: full\nref_model_quantization_bit: 8\n",
        "ref_model_quantization_bit = 8: changes the reference model",
    ),
    "another loss": (f"{_FACTORY}stage: dpo\nfinetuning_type: full\npref_loss: bco\n", 'pref_loss = "bco": is a loss'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_preference_training_is_refused(name: str, tmp_path: Path) -> None:
    """The words are those of the file, each with the reason."""
    text, words = REFUSED[name]
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as error:
        scenario_from(path, {"cluster.preset": "dgx-h100", "cluster.num_devices": 8, "plan.zero_stage": 0})
    assert words in str(error.value)
