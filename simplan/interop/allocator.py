"""Settings of torch's caching allocator in the environment of a script.

Names and syntax: torch 2.9, docs/source/notes/cuda.rst, "Optimizing memory usage with PYTORCH_ALLOC_CONF", which was
PYTORCH_CUDA_ALLOC_CONF before.
"""

from __future__ import annotations

from collections.abc import Mapping

from simplan.interop.configuration import Reading, Setting
from simplan.interop.frameworks.shell import Word, own_line

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments"


def allocator_settings(environment: Mapping[str, Word]) -> tuple[Setting, ...]:
    """The allocator's variables of the environment of a command as settings."""
    words = {name: environment[name] for name in VARIABLES if name in environment}
    return tuple(Setting(name, word.text, own_line(word.line)) for name, word in words.items())


def note_allocator(reading: Reading) -> None:
    """Note what the allocator's variables change, under any section that has them."""
    for key in [key for key in reading.settings if key.rpartition(".")[2] in VARIABLES]:
        options = dict(part.partition(":")[::2] for part in str(reading.value(key)).replace(" ", "").split(","))
        expands = options.pop(_EXPANDABLE, "False").lower() == "true"
        if expands:
            reading.not_modeled(key, "segments that grow leave less memory reserved than the profile's share")
        elif any(options):
            reading.not_modeled(key, "the allocator reserves the profile's share of memory")
