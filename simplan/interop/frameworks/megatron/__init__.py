"""Launch scripts of Megatron-LM, and of Megatron-DeepSpeed: in and out."""

from simplan.interop.formats import Format
from simplan.interop.frameworks.megatron.arguments import recognizes
from simplan.interop.frameworks.megatron.reading import TITLE, read
from simplan.interop.frameworks.megatron.writing import export, settings

__all__ = ["FORMAT"]

FORMAT = Format("megatron", TITLE, recognizes, read, settings, export, "megatron-core")
