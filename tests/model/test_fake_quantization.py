"""Simulated quantization: time by microbatch and by token, memory, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import simplan
from simplan.errors import SpecError
from simplan.prediction import Prediction

USUAL: dict[str, Any] = {"device": "h100-sxm-80gb", "num_devices": 1, "seq_len": 1024}
USUAL |= {"pure_bf16": True, "software": "torch"}
INT4 = {"weights": "int4", "group_size": 32}


def predicted(form: dict[str, Any] | None = None, **keys: Any) -> Prediction:
    more = {} if form is None else {"training.fake_quantization": form}
    return simplan.predict("llama3.2-1b", {**USUAL, **more, **keys})


def more_s(form: dict[str, Any], **keys: Any) -> float:
    """Seconds of a step that the simulation takes."""
    return predicted(form, **keys).step_time_s - predicted(**keys).step_time_s


@pytest.mark.slow
def test_weights_are_rounded_once_per_microbatch_and_inputs_per_token() -> None:
    lengths = (4096, 8192, 16384)
    weights = [more_s(INT4, seq_len=length) for length in lengths]
    assert weights == pytest.approx([weights[0]] * 3, rel=0.02)
    first, second, third = (more_s({**INT4, "activations": "int8"}, seq_len=length) for length in lengths)
    assert third - second == pytest.approx(2 * (second - first), rel=0.05)


def test_recomputation_keeps_what_autograd_saves_to_one_block() -> None:
    """16 bytes per weight of all blocks and the head, or of the head and one block."""
    model = predicted().job.model
    blocks = model.num_blocks * (model.layers[1].num_parameters - 2 * model.hidden_size)
    none, full = (
        predicted(INT4, recompute=r).worst_memory.allocated_bytes - predicted(recompute=r).worst_memory.allocated_bytes
        for r in ("none", "full")
    )
    assert none - full == pytest.approx(blocks * (16 + 16 / 32 + 2), rel=0.1)


@pytest.mark.parametrize(
    ("form", "keys", "sentence"),
    [
        ({**INT4, "activations": "mxfp4"}, {}, "rounds weights and inputs alike"),
        ({"weights": "fp8", "group_size": 32}, {}, "is of weights in int4"),
        ({"weights": "int4", "group_size": 100}, {}, "needs groups of 100 inputs, and q has 2,048"),
        (INT4, {"num_devices": 2, "tp": 2}, "with plan.tp = 2"),
        (INT4, {"pure_bf16": False}, "under torch.autocast"),
        (INT4, {"software": "deepspeed", "pure_bf16": False}, "with deepspeed"),
        (INT4, {"software.compiled": True}, "with software.compiled = true"),
        (INT4, {"lora_rank": 8, "lora_dora": True, "task": "lora"}, "with DoRA or OFT"),
        (INT4, {"recompute": "selective"}, "with plan.recompute = selective"),
        (INT4, {"task": "dpo"}, "next to a reference model"),
    ],
)
def test_what_is_not_modeled_is_refused(form: dict[str, Any], keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=r"training\.fake_quantization") as error:
        predicted(form, **keys)
    assert sentence in str(error.value)
