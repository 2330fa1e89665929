"""Settings that no reader knows: which of them may be about another plan, by the words in their names.

``no_effect.yaml`` has the settings that change nothing, each by its whole name. Any other setting that no reader reads
is one of two things: with a word of this table in its name it is refused, as it may be another plan, and without one
it is listed as unknown.
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
    own = key.rpartition(": ")[2].rpartition(" ")[2].lower().replace("-", "_")
    *sections, last = own.split(".")
    name = ".".join([*(each for each in sections if each not in _DETAILS), last])
    subject = next((subject for subject, pattern in _PATTERNS.items() if pattern.search(name)), None)
    is_one = subject == "parallelism" and str(value) == "1"
    is_off = value is not None and (value == 0 or str(value).strip().lower() in _OFF)
    return None if is_one or is_off else subject
