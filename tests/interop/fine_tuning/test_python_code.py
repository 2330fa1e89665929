"""Scripts and notebooks with Unsloth, or TRL and PEFT: what their calls say, and what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from simplan.errors import SpecError
from simplan.job import Job
from simplan.scenario import scenario_from
from simplan.scenario.source import read_source

CARD = {"cluster.device": "rtx-4090"}
INSTALL = """%%capture
import os
if "COLAB_" not in "".join(os.environ.keys()):
    !pip install unsloth
else:
    !pip install --no-deps bitsandbytes \\
        accelerate
"""
LOAD = """from unsloth import FastLanguageModel
import torch
max_seq_length = 2048  # any length
dtype = None
load_in_4bit = True

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Meta-Llama-3.1-8B",
    max_seq_length = max_seq_length,
    dtype = dtype,
    load_in_4bit = load_in_4bit,
)
"""
ADAPT = """model = FastLanguageModel.get_peft_model(
    model,
    r = 2 * 8,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj",
                      "gate_proj", "up_proj", "down_proj",],
    lora_alpha = 16,
    lora_dropout = 0,
    bias = "none",
    use_gradient_checkpointing = "unsloth",
    random_state = 3407,
    use_rslora = False,
    loftq_config = None,
)
"""
DATA = """def texts(examples):
    return {"text": [each + tokenizer.eos_token for each in examples["text"]]}

from datasets import load_dataset
dataset = load_dataset("someone/texts", split = "train").map(texts, batched = True)
"""
TRAIN = """from trl import SFTTrainer
from transformers import TrainingArguments
from unsloth import is_bfloat16_supported

trainer = SFTTrainer(
    model = model,
    tokenizer = tokenizer,
    train_dataset = dataset,
    dataset_text_field = "text",
    max_seq_length = max_seq_length,
    dataset_num_proc = 2,
    packing = False,
    args = TrainingArguments(
        per_device_train_batch_size = 2,
        gradient_accumulation_steps = 4,
        warmup_steps = 5,
        max_steps = 60,
        learning_rate = 2e-4,
        fp16 = not is_bfloat16_supported(),
        bf16 = is_bfloat16_supported(),
        optim = "adamw_8bit",
        seed = 3407,
        output_dir = "outputs",
        report_to = "none",
    ),
)
"""
LATER = """if False:
    model, tokenizer = FastLanguageModel.from_pretrained(model_name = "lora_model", max_seq_length = 64)
    FastLanguageModel.for_inference(model)
"""


def notebook(*cells: str) -> str:
    notebook_cells: list[dict[str, Any]] = [{"cell_type": "markdown", "metadata": {}, "source": ["# Fine-tune"]}]
    for cell in cells:
        lines = cell.splitlines(keepends=True)
        notebook_cells.append(
            {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": lines}
        )
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": notebook_cells})


def job_of(folder: Path, text: str, name: str = "train.py", **more: Any) -> Job:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return scenario_from(path, {**CARD, **more}).job


def test_notebook_becomes_its_run(tmp_path: Path) -> None:
    """Cells with commands of the shell, names of values, a check for BF16, and a cell that does not run."""
    job = job_of(tmp_path, notebook(INSTALL, LOAD, ADAPT, DATA, TRAIN, "trainer.train()", LATER), "run.ipynb")
    model, training, plan = job.model, job.training, job.plan
    assert (model.name, model.seq_len, model.lora_rank) == ("llama3.1-8b", 2048, 16)
    assert model.num_trained_parameters == 41_943_040  # which Unsloth prints for this notebook
    assert (training.task, training.precision, training.optimizer) == ("lora", "bf16", "adamw_8bit")
    assert training.base_weights is not None
    assert training.base_weights.words == "nf4 with double quantization"
    assert (plan.microbatch_size, job.num_microbatches, plan.num_devices) == (2, 4, 1)
    assert (plan.recompute, plan.offload_activations) == ("full", True)
    assert (job.software.id, job.software.loss, job.software.loading) == ("unsloth", "chunked", "auto")
    assert model.input_require_grads


def test_notes_name_what_unsloth_does_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "run.ipynb"
    path.write_text(notebook(LOAD, ADAPT, DATA, TRAIN), encoding="utf-8")
    source = read_source(path, CARD)
    assert source.configuration is not None
    assert source.configuration.unknown == ()
    why = " ".join(words for _, words in source.configuration.not_modeled)
    for words in ("some layers in 16 bits", "two buffers on the device"):
        assert words in why
    path.write_text(notebook(LOAD.replace("Meta-Llama-3.1-8B", "gemma-2b"), ADAPT, DATA, TRAIN), encoding="utf-8")
    other = read_source(path, CARD)
    assert other.configuration is not None
    assert other.document.data["software"]["preset"] == "torch"  # Unsloth's kernels for Gemma are not modeled
    assert "its kernels of norms" in " ".join(words for _, words in other.configuration.not_modeled)


def test_script_has_unsloths_defaults(tmp_path: Path) -> None:
    """Batches of 4 twice, 8-bit AdamW, rank 16 of seven matrices, 2,048 tokens, and inputs of blocks on the host."""
    text = (
        "from unsloth import FastModel\nfrom trl import SFTConfig, SFTTrainer\n"
        'model, tokenizer = FastModel.from_pretrained("unsloth/Qwen3-4B")\nmodel = FastModel.get_peft_model(model)\n'
        "trainer = SFTTrainer(model=model, train_dataset=data(), args=SFTConfig())\n"
    )
    job = job_of(tmp_path, text)
    assert (job.plan.microbatch_size, job.num_microbatches, job.training.optimizer) == (4, 2, "adamw_8bit")
    assert (job.model.lora_rank, job.model.seq_len, job.plan.offload_activations) == (16, 2048, True)
    assert {*job.model.lora_targets} == {"q", "k", "v", "proj", "gate", "up", "down"}
    full = text.replace('"unsloth/Qwen3-4B"', '"unsloth/Qwen3-4B", full_finetuning=True')
    job = job_of(tmp_path, full.replace("model = FastModel.get_peft_model(model)\n", ""))
    assert (job.training.task, job.training.pure_bf16, job.training.base_weights) == ("sft", True, None)
    assert job.model.num_trained_parameters == job.model.num_parameters


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [('"unsloth"', ("full", True)), ("True", ("full", False)), ("False", ("none", False))],
)
def test_checkpointing_is_that_of_the_model(argument: str, wanted: tuple[str, bool], tmp_path: Path) -> None:
    """The argument of the Trainer does not count, and below 512 tokens nothing moves."""
    adapted = ADAPT.replace('"unsloth"', argument)
    train = TRAIN.replace("max_steps = 60", "gradient_checkpointing = False")
    plan = job_of(tmp_path, LOAD + adapted + DATA + train).plan
    assert (plan.recompute, plan.offload_activations) == wanted
    short = job_of(tmp_path, (LOAD + adapted + DATA + train).replace("= 2048", "= 256")).plan
    assert (short.recompute, short.offload_activations) == (wanted[0], False)


DPO = """from unsloth import FastLanguageModel, PatchDPOTrainer
PatchDPOTrainer()
from trl import DPOConfig, DPOTrainer

def main(rank=64):
    model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen2.5-7B-bnb-4bit", max_seq_length=4096)
    model = FastLanguageModel.get_peft_model(model, r=32, use_gradient_checkpointing="unsloth")
    args = DPOConfig(per_device_train_batch_size=2, output_dir=folder())
    DPOTrainer(model=model, ref_model=None, args=args, beta=0.1, max_length=1024, train_dataset=pairs()).train()

if __name__ == "__main__":
    main()
"""
PEFT = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
name = "meta-llama/Meta-Llama-3-8B"
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=bits, device_map="auto", dtype=torch.bfloat16)
adapters = LoraConfig(r=32, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
common = dict(output_dir="out", max_length=1024)
args = SFTConfig(per_device_train_batch_size=4, optim="paged_adamw_8bit", bf16=True, **common)
trainer = SFTTrainer(model=model, args=args, train_dataset=ds, peft_config=adapters)
"""


def test_preference_training_has_the_shorter_length(tmp_path: Path) -> None:
    job = job_of(tmp_path, DPO)
    assert (job.training.task, job.reference, job.model.seq_len) == ("dpo", "adapters_off", 1024)
    assert (job.plan.recompute, job.plan.offload_activations) == ("full", False)


def test_scripts_of_trl_and_peft_are_read(tmp_path: Path) -> None:
    """With the defaults of their classes: FP4 of bitsandbytes, and TRL's loss and recomputation."""
    job = job_of(tmp_path, PEFT)
    assert job.training.base_weights is not None
    assert (job.training.base_weights.words, job.training.optimizer) == ("fp4", "paged_adamw_8bit")
    assert (job.model.lora_rank, job.model.lora_dropout, job.model.lora_targets) == (32, 0.05, ("all",))
    assert (job.software.id, job.software.loss, job.plan.recompute) == ("accelerate", "recomputed", "full")
    assert (job.plan.microbatch_size, job.num_microbatches, job.model.seq_len) == (4, 1, 1024)


ROUTED = """from trl import SFTConfig, SFTTrainer
args = SFTConfig(output_dir="out", per_device_train_batch_size=1, max_length=1024)
adapters = LoraConfig(r=8, target_modules=["q_proj", "gate"])
trainer = SFTTrainer(model="Qwen/Qwen3-30B-A3B", args=args, train_dataset=ds, peft_config=adapters)
"""


def test_routers_and_experts_have_adapters_as_peft_gives_them(tmp_path: Path) -> None:
    """``gate`` is a router, and ``all-linear`` has routers and experts as well (PEFT 0.21 with transformers 5)."""
    named = job_of(tmp_path, ROUTED).model
    assert named.num_trained_parameters == 48 * 8 * ((2048 + 4096) + (2048 + 128))
    every = job_of(tmp_path, ROUTED.replace('["q_proj", "gate"]', '"all-linear"')).model
    assert {*every.lora_targets} == {"all", "router", "experts_gate", "experts_up", "experts_down"}


REFUSED = {
    "a value of the command line": (
        LOAD.replace("= 2048", "= int(argv[1])") + ADAPT + TRAIN,
        "max_seq_length is no plain",
    ),
    "a rank that is computed": (
        LOAD + ADAPT.replace("2 * 8", "rank_of(model)") + TRAIN,
        "get_peft_model: r is no plain value",
    ),
    "a condition": (
        LOAD + "if wants_adapters():\n    " + ADAPT.replace("\n", "\n    ") + "\n" + TRAIN,
        "stands under a condition that no value decides",
    ),
    "unknown keywords": (
        LOAD + ADAPT + TRAIN.replace("seed = 3407", "**more"),
        "TrainingArguments: ** is no plain value",
    ),
    "several trainings": (LOAD + ADAPT + TRAIN + TRAIN, "trains several times, in lines"),
    "reinforcement learning": (
        LOAD + "GRPOTrainer(model=model, reward_funcs=[f], args=GRPOConfig(num_generations=8))\n",
        "GRPOTrainer: belongs to reinforcement learning",
    ),
    "images": (
        (LOAD + ADAPT + TRAIN).replace("FastLanguageModel", "FastVisionModel"),
        "FastVisionModel: is for models of images",
    ),
    "vLLM next to training": (
        LOAD.replace("dtype = dtype", "fast_inference = True") + ADAPT + TRAIN,
        "belongs to generation by vLLM next to training",
    ),
    "weights of FP8": (
        LOAD.replace("dtype = dtype", "load_in_fp8 = True") + ADAPT + TRAIN,
        "on FP8 weights of Unsloth",
    ),
    "an option that nobody knows": (
        LOAD + ADAPT.replace("use_rslora = False", "pipeline_depth = 2") + TRAIN,
        "pipeline_depth",
    ),
    "no Python": (LOAD + "this is no Python\n" + TRAIN, "is a Python script, which simplan does not run"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_code_that_would_be_another_run_is_refused(case: str, tmp_path: Path) -> None:
    """What is not plain, or not modeled, is named with its call; nothing of the code is run."""
    text, sentence = REFUSED[case]
    with pytest.raises(SpecError) as error:
        job_of(tmp_path, text)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "9" * 5000,
        "x = " + "(" * 500 + ")" * 500,
        "x = " + "-" * 3000 + "1",
        "x = 9 ** 9 ** 9 ** 9",
        "if a:\n" * 3,
    ],
)
def test_absurd_code_is_refused_or_read(text: str, tmp_path: Path) -> None:
    """Digits, brackets and powers without end take neither time nor the interpreter down."""
    with contextlib.suppress(SpecError):
        assert job_of(tmp_path, f"{LOAD}{ADAPT}{text}\n{TRAIN}").model.lora_rank == 16
