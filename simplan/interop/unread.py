"""Settings that no reader knows: which of them may be about another plan, by the words in their names.

``no_effect.yaml`` has the settings that change nothing, each by its whole name. Any other setting that no reader reads
is one of two things: with a word of this table in its name it is refused, as it may be another plan, and without one
it is listed as unknown.

Settings that start ranks on other devices than the GPUs of a cluster are refused in the files of all frameworks.
"""

from __future__ import annotations

import re
from typing import Any

_WORDS = {
    "parallelism": (
        "parallel|pipeline|shard|fsdp|ulysses|sequence_split",
        "dp tp pp cp ep etp vpp vp ddp zero hpz mics ring world",
    ),
    "precision": (
        "precision|autocast|fp8|fp4|fp16|bf16|float8|float4|float16|mxfp|nvfp|int8|int4|dtype",
        "amp half nf4",
    ),
    "quantization": ("quant|4bit|8bit|bitsandbytes", "bnb gptq awq hqq aqlm eetq qat"),
    "adapters": ("lora|adapter|peft|pissa|dora|prompt_tuning|prefix_tuning", "oft boft loha lokr vera ia3 mora"),
    "frozen weights": ("freez|frozen|trainable", "spectrum lisa"),
    "offloading": ("offload|cpu_adam|nvme|zenflow", "kt"),  # KTransformers runs experts on the host
    "another model": ("teacher|distill|reward|critic|rollout|completion_length", "actor ref_model"),
    "images or sound": ("mm_projector", "vision image images video videos audio speech"),
    "the optimizer": (
        "optim|muon|galore|apollo|badam|adam_mini|adafactor|lomo|shampoo|sophia|prodigy",
        "lion soap dion",
    ),
}
"""Subject -> words within a name (alternatives of a regular expression), and words that stand alone in it."""
_PATTERNS = {
    subject: re.compile(rf"{within}|(?<![a-z0-9])(?:{'|'.join(alone.split()) or '(?!)'})(?![a-z])")
    for subject, (within, alone) in _WORDS.items()
}
_DETAILS = frozenset(
    ("optimizer", "optim", "ddp", "fsdp_config", "zero_optimization", "deepspeed_config", "deepspeed", "checkpoint")
)
"""Sections that a plan has in any case: in them the word must be in the setting's own name."""
_OFF = frozenset(("", "0", "false", "no", "none", "null", "off", "disabled", "[]", "{}"))


_CPU_FLAGS = frozenset(
    ("use_cpu", "no_cuda", "cpu", "tpu", "use_tpu", "use_mps_device", "use_xpu", "use_ipex", "use_hpu")
)
_GPU_WORDS = {
    **dict.fromkeys(("accelerator", "device_type", "nproc_per_node"), ("gpu", "cuda", "auto")),
    **dict.fromkeys(("distributed_backend", "ddp_backend", "process_group_backend"), ("nccl",)),
}
"""Last part of a setting -> words of it by which ranks run on GPUs and communicate by NCCL, the usual one first."""
_GPU_WORDS_OF_WHOLE = {"device": ("cuda", "gpu", "auto"), "comm.mode": ("default",)}
"""Setting -> such words. ``fake_backend`` and ``local_tensor`` of torchtitan's ``comm.mode`` communicate nothing."""


def is_device_setting(key: str) -> bool:
    """True for a setting that says on which kind of devices ranks run.

    >>> is_device_setting("accelerate --cpu"), is_device_setting("zero_optimization.offload_optimizer.device")
    (True, False)
    """
    name = _plain(key)
    last = name.rpartition(".")[2]
    return last in _CPU_FLAGS or last in _GPU_WORDS or name in _GPU_WORDS_OF_WHOLE


def usual_device(key: str, value: Any) -> str | None:
    """Value by which ranks run on GPUs, for a setting that says something else; None if it says that.

    >>> usual_device("trainer.accelerator", "tpu"), usual_device("--ddp_backend", "nccl"), usual_device("use_cpu", True)
    ('gpu', None, 'false')
    """
    name, word = _plain(key), str(value).strip().lower()
    last = name.rpartition(".")[2]
    if last in _CPU_FLAGS:
        return "false" if word in ("true", "yes", "y", "on", "1") else None
    known = _GPU_WORDS_OF_WHOLE.get(name) or _GPU_WORDS[last]
    is_usual = value is None or isinstance(value, int) or word.split(":")[-1] in known or word[:1] in ("$", "")
    return None if is_usual else known[0]


def _plain(key: str) -> str:
    """Key without the file or command in front of it."""
    return key.rpartition(": ")[2].rpartition(" ")[2].lower().replace("-", "_").lstrip("_")


def subject_of(key: str, value: Any) -> str | None:
    """Part of a plan that an unknown setting speaks of; None if its name has no such word, or it is off.

    >>> subject_of("tensor_model_parallel_size", 2), subject_of("peft.block_size", 32), subject_of("run_id", 7)
    ('parallelism', 'adapters', None)
    >>> subject_of("--use-fp8-gather", False), subject_of("context_parallel_size", 1)
    (None, None)

    Args:
        key: Key as its users write it; a file or command in front of it does not count.
        value: Its value; None for one that is not known.
    """
    *sections, last = _plain(key).split(".")
    name = ".".join([*(section for section in sections if section not in _DETAILS), last])
    subject = next((subject for subject, pattern in _PATTERNS.items() if pattern.search(name)), None)
    is_one = subject == "parallelism" and str(value) == "1"
    is_off = value is not None and (value == 0 or str(value).strip().lower() in _OFF)
    return None if is_one or is_off else subject
