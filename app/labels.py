"""Labels of catalog entries in boxes, which browsers filter: the name as people write it, then that of the catalog.

No label begins another label or name: Streamlit's boxes drop the label of their value from a text that begins with it,
so that under the value ``torch`` nobody could type ``torchtitan``.
"""

from __future__ import annotations

import re
from functools import cache

from simplan import catalog
from simplan.catalog import Kind
from simplan.cluster.machine import THIS_MACHINE

_SPELLED = {
    word.lower(): word
    for word in (
        *("ALiBi", "BERT", "DeepSeek", "GPT", "Gemma", "Llama", "MPT", "MT", "Mistral", "Mixtral", "MoE", "NLG"),
        *("NeoX", "OLMoE", "OSS", "Phi", "Pythia", "Qwen", "ResNet", "ViT", "XL", "XXL", "nanoGPT"),
        *("Ada", "Ascend", "Gaudi2", "Gaudi3", "PCIe", "Rubin", "Ti", "Trainium2"),
        *("Accelerate", "Bridge", "Core", "DeepSpeed", "Foundry", "LLM", "LM", "LitGPT", "MLPerf", "MaxText"),
        *("Megatron", "NeMo", "TorchTitan"),
        *("EFA", "ICI", "Loopback", "Network", "NVLink", "SHARP", "TCP", "TPU", "Transformers", "xGMI"),
    )
} | {"torch": "PyTorch"}
"""Words that are neither lower case nor, with digits, upper case."""
_VENDORS = {"mi": "AMD", "tpu": "Google", "gaudi": "Intel", "trainium": "AWS", "ascend": "Huawei"}
"""Vendor by the letters at the beginning of a device's name; the others are NVIDIA's."""
_VERSION = re.compile(r"v\d(\.\d+)?[a-z]?")
_VERSION_BEGINS = re.compile(r"(?<=[a-z]{3})(?=\d)")
"""Position between a model's family and its version, as in ``llama3``."""
_LETTERS = re.compile("[a-z]*")
_GBIT = re.compile(r"(\d+)gbit")


@cache
def label(kind: Kind, name: str) -> str:
    """Label of an entry; a name of no entry, or of another kind, is its own label.

    >>> label("models", "llama3.1-8b"), label("devices", "mi300x"), label("clusters", "dgx-a100-40gb")
    ('Llama 3.1 8B · llama3.1-8b', 'AMD MI300X · mi300x', '8x A100 SXM 40GB · dgx-a100-40gb')
    >>> label("software", "torch"), label("links", "network-400gbit")
    ('PyTorch · torch', 'Network 400 Gbit/s · network-400gbit')
    """
    if kind == "topologies" or not catalog.is_name(kind, name):
        return name
    if name == THIS_MACHINE:
        return f"This machine · {name}"
    if kind in ("models", "links", "software"):
        return f"{_title(_VERSION_BEGINS.sub('-', name))} · {name}"
    if kind == "clusters":
        return f"{catalog.node(name).devices_per_node}x {_title(catalog.device_of(name), names_chips=True)} · {name}"
    beginning = _LETTERS.match(name)
    vendor = _VENDORS.get(beginning[0] if beginning else "", "NVIDIA")
    return f"{vendor} {_title(name, names_chips=True)} · {name}"


def _title(name: str, *, names_chips: bool = False) -> str:
    """Words of a name as people write them; of chips, those without digits are upper case as well."""
    return " ".join(_word(word, upper=names_chips or not word.isalpha()) for word in name.split("-"))


def _word(word: str, *, upper: bool) -> str:
    if rate := _GBIT.fullmatch(word):
        return f"{rate[1]} Gbit/s"
    if word in _SPELLED or not upper or _VERSION.fullmatch(word):
        return _SPELLED.get(word, word)
    return re.sub(r"(?<=\d)X(?=\d)", "x", word.upper())
