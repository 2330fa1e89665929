"""Files of frameworks that simplan does not read, by their signs, so that an error can name the framework."""

from __future__ import annotations

import re

from simplan.interop.formats import ConfigFile

_TEXT = {
    "torchtune's commands": re.compile(r"(?m:^\s*tune run\b)"),
    "NeMo AutoModel": re.compile(r"\bnemo_automodel\b|(?m:^\s*automodel\s)"),
    "verl": re.compile(r"\bactor_rollout_ref\b|-m verl\."),
    "OpenRLHF": re.compile(r"\bopenrlhf\.(cli|trainer)\b"),
}
"""Framework -> words that its files have anywhere."""
_KEYS = {
    "nanotron": ("parallelism", "tokens", "general", "data_stages", "checkpoints", "tokenizer"),
    "LLaMA-Factory v1": ("dist_config", "kernel_config", "peft_config", "model_class", "sample_backend", "init_config"),
}
"""Framework -> keys at the top of its YAML."""
_LEAST_KEYS = {"nanotron": 4, "LLaMA-Factory v1": 2}
"""Framework -> fewest of these keys that tell its file."""


def framework_that_is_not_read(file: ConfigFile) -> str | None:
    """Framework whose file this seems to be, among those that simplan does not read; None for none of them."""
    for name, sign in _TEXT.items():
        if sign.search(file.text):
            return name
    keys = file.yaml.data.keys() if file.yaml is not None else ()
    return next((name for name, signs in _KEYS.items() if sum(s in keys for s in signs) >= _LEAST_KEYS[name]), None)
