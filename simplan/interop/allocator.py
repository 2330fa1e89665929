"""Settings of torch's caching allocator in the environment of a script.

Names and syntax: torch 2.9, docs/source/notes/cuda.rst, "Optimizing memory usage with PYTORCH_ALLOC_CONF", which was
PYTORCH_CUDA_ALLOC_CONF before. torchtitan's own script sets expandable_segments:True since 2024-10-22
(pytorch/torchtitan pull request 643). So the reserve of its profile is with it, which torch's and those of the Hugging
Face stack take. SimuMax's scripts do not set it, on whose runs Megatron's is fitted.
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


def note_allocator(reading: Reading, *, grown: bool) -> None:
    """Note what the allocator's variables change, under any section that has them.

    Args:
        grown: The reserve of the framework's profile is fitted on runs with segments that grow.
    """
    for key in [key for key in reading.settings if key.rpartition(".")[2] in VARIABLES]:
        options = dict(part.partition(":")[::2] for part in str(reading.value(key)).replace(" ", "").split(","))
        grows = {"true": True, "false": False}.get(options.pop(_EXPANDABLE, "").lower())
        if grows is not None and grows != grown:
            share = "the profile's share, which is of runs with" if grown else "the profile's share, of runs without"
            reading.not_modeled(key, f"the memory reserved is {share} segments that grow")
        elif any(options):
            reading.not_modeled(key, "the allocator reserves the profile's share of memory")
