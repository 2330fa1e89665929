"""Families of models, each a builder of layers in a module of its own.

To add one: a module with a ``Family`` (its builder puts layers together from parts), its name here, fields that are new
in ``ModelSpec``, and modules that run it in the executor (``CONTRIBUTING.md``).
"""

from __future__ import annotations

from collections.abc import Mapping

from simplan.spec.models.bert import BERT
from simplan.spec.models.deepseek import DEEPSEEK
from simplan.spec.models.family import Family
from simplan.spec.models.gemma2 import GEMMA2
from simplan.spec.models.gpt import GPT
from simplan.spec.models.llama import LLAMA
from simplan.spec.models.moe import MOE
from simplan.spec.models.mpt import MPT
from simplan.spec.models.neox import NEOX
from simplan.spec.models.resnet import RESNET
from simplan.spec.models.t5 import T5
from simplan.spec.models.vit import VIT

__all__ = ["FAMILIES", "Family"]

FAMILIES: Mapping[str, Family] = {"gpt": GPT, "llama": LLAMA, "mpt": MPT, "bert": BERT, "vit": VIT} | {
    "moe": MOE,
    "deepseek": DEEPSEEK,
    "t5": T5,
    "resnet": RESNET,
    "gemma2": GEMMA2,
    "neox": NEOX,
}
"""By name, as in ``ModelSpec.family``."""
