"""Families of models, each a builder of layers.

To add one: a module with a ``Family`` (its builder composes layers from parts), its name here, new fields in
``ModelSpec``, and modules that run it in the executor (``CONTRIBUTING.md``).
"""

from __future__ import annotations

from collections.abc import Mapping

from simplan.model.families.bert import BERT
from simplan.model.families.captured import CAPTURED
from simplan.model.families.family import Family
from simplan.model.families.gemma import GEMMA, GEMMA2, GEMMA3
from simplan.model.families.gpt import GPT, MPT
from simplan.model.families.llama import LLAMA
from simplan.model.families.moe import DEEPSEEK, MOE
from simplan.model.families.neox import NEOX
from simplan.model.families.resnet import RESNET
from simplan.model.families.t5 import T5
from simplan.model.families.vit import VIT

__all__ = ["FAMILIES", "Family"]

FAMILIES: Mapping[str, Family] = {
    "gpt": GPT,
    "llama": LLAMA,
    "mpt": MPT,
    "bert": BERT,
    "vit": VIT,
    "moe": MOE,
    "deepseek": DEEPSEEK,
    "t5": T5,
    "resnet": RESNET,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "neox": NEOX,
    "captured": CAPTURED,
}
"""Families by name, as in ``ModelSpec.family``."""
