"""Names of techniques that users try and simplan does not model yet, each with the nearest modeled setting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unmodeled:
    """One technique.

    Attributes:
        what: The technique with its verb (``asynchronous SGD is``), as the rule of an error begins.
        words: Keys and values by which users write the technique, separated by spaces.
        fix: Nearest modeled setting; empty for none.
    """

    what: str
    words: str
    fix: str = ""


_RECORDS = (
    Unmodeled(
        "compression of the weights and gradients of ZeRO (ZeRO++) is",
        "zeroplusplus zero_quantized_weights zero_quantized_gradients",
        "use plan.compression with plan.dp_replicate, or plan.grad_dtype: bf16",
    ),
    Unmodeled(
        "reinforcement learning is",
        "rlhf ppo grpo rl",
        "use training.task: sft, which has the cost of an update of the policy",
    ),
    Unmodeled(
        "an asynchronous pipeline is",
        "pipedream pipedream-2bw pipemare async_pipeline weight_stashing",
        "use plan.schedule: 1f1b",
    ),
)
_BY_WORD = {word: record for record in _RECORDS for word in record.words.split()}

OPTIMIZERS = (
    "8bit", "8-bit", "4bit", "paged", "ademamix", "apollo", "dion", "galore", "grokadamw", "lion", "lomo", "muon",
    "schedule_free", "shampoo", "soap", "sophia", "stable_adamw",
)  # fmt: skip
"""Parts of the names of optimizers with other states, to tell them from misspelt names."""


def unmodeled(word: str) -> Unmodeled | None:
    """The technique that a key or value names; None for any other word."""
    return _BY_WORD.get(word.lower())
