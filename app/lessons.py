"""Lessons of the page Learn: one parallelism technique each, with a scenario to vary and sentences with live numbers.

A lesson is data; the page shows every one of them in the same way. ``{now.step}`` in a sentence is a number of the
chosen plan, ``{first.step}`` the same number of the first plan of the axis, and ``{x}`` the chosen value of the axis;
``numbers_of`` has the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from app.figures.compared import ComparedPlan
from simplan.program.program import MemoryCategory
from simplan.units import format_bytes, format_count, format_percent, format_time

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting of a lesson.

    Attributes:
        label: Label of its widget.
        values: Values to choose from.
        start: Value of a lesson that is opened without a link.
    """

    label: str
    values: tuple[Any, ...]
    start: Any


@dataclass(frozen=True, slots=True)
class Lesson:
    """One technique.

    Attributes:
        title: Name of the technique.
        idea: Description of the technique in two or three sentences, without numbers.
        axis: Setting over which the figure shows a plan per value.
        other: A second setting.
        scenario: Scenario for a value of the axis and of the second setting.
        sentences: Sentences with live numbers, see the module.
        attempt: A change for the reader to try, and what to watch.
        source: Publication of the technique.
    """

    title: str
    idea: str
    axis: Knob
    other: Knob
    scenario: Callable[[Any, Any], Document]
    sentences: tuple[str, ...]
    attempt: str
    source: str


def _scenario(model: Document, devices: int, batch: int, plan: Document, software: Any = "torch") -> Document:
    return {
        "model": model,
        "cluster": {"preset": "dgx-h100", "num_devices": devices},
        "training": {"global_batch_size": batch, "precision": "bf16", "optimizer": "adamw"},
        "software": software,
        "plan": {key: value for key, value in plan.items() if value not in (1, None) or key == "zero_stage"},
    }


_8B: Document = {"preset": "llama3-8b", "seq_len": 8192}


def _ddp(devices: int, network: str) -> Document:
    model = {"preset": "gpt2-1.5b", "vocab_size": 50304}
    document = _scenario(model, devices, 4 * devices, {"dp_replicate": devices, "microbatch_size": 4})
    document["cluster"]["inter_link"] = network
    return document


def _zero(stage: int, devices: int) -> Document:
    degree = {"dp_shard": devices, "zero_stage": stage} if stage else {"dp_replicate": devices}
    # gradients that are there for the whole step, as the paper counts them
    kept = {"preset": "torch", "zero_grad_set_to_none": False}
    return _scenario(_8B, devices, devices, {**degree, "recompute": "full"}, kept)


def _tp(tp: int, sequence_parallel: bool) -> Document:
    plan = {"tp": tp, "dp_shard": 32 // tp, "grad_sync": "microbatch"}
    return _scenario(_8B, 32, 32, plan | ({"sequence_parallel": sequence_parallel} if tp > 1 else {}))


def _pp(microbatches: int, schedule: str) -> Document:
    stages = 2 if schedule == "interleaved_1f1b" else 1
    plan = {"pp": 4, "schedule": schedule, "virtual_stages": stages}
    return _scenario(_8B | {"seq_len": 4096}, 4, microbatches, plan)


def _cp(cp: int, seq_len: int) -> Document:
    plan = {"cp": cp, "dp_shard": 16 // cp, "zero_stage": 3, "recompute": "full"}
    return _scenario(_8B | {"seq_len": seq_len}, 16, 16, plan, "torchtitan")


def _ep(ep: int, microbatch_size: int) -> Document:
    plan = {"ep": ep, "dp_shard": 32, "zero_stage": 1, "recompute": "full", "microbatch_size": microbatch_size}
    return _scenario({"preset": "qwen3-30b-a3b", "seq_len": 4096}, 32, 128, plan, "megatron-core")


def _recompute(recompute: str, microbatch_size: int) -> Document:
    plan = {"dp_shard": 8, "recompute": recompute, "microbatch_size": microbatch_size}
    return _scenario(_8B, 8, 8 * microbatch_size, plan)


LESSONS: Mapping[str, Lesson] = {
    "ddp": Lesson(
        title="Data parallelism (DDP)",
        idea="Every GPU holds the full model and trains on its own part of the batch. After backward, an all-reduce "
        "averages the gradients, in buckets that overlap with the rest of backward.",
        axis=Knob("GPUs", (1, 2, 4, 8, 16, 32, 64), 16),
        other=Knob("Network between nodes", ("network-400gbit", "network-50gbit", "tcp-10gbit"), "network-400gbit"),
        scenario=_ddp,
        sentences=(
            "GPT-2 1.5B on {x} GPUs with 4 sequences each: a step takes {now.step}, against {first.step} on one GPU.",
            "Communication that backward does not hide takes {now.exposed_share} of the step.",
            "Memory stays at {now.memory} per GPU: {now.parameters} of parameters, as much for their gradients, and "
            "{now.optimizer_states} of optimizer states are the same on every rank.",
            "All GPUs together train on {now.rate} tokens/s.",
        ),
        attempt="Choose 16 GPUs and the slowest network. One all-reduce of all gradients must pass it in every step, "
        "regardless of the batch: with a larger batch per GPU, or gradient accumulation, it weighs less.",
        source="Li et al. 2020, arXiv:2006.15704",
    ),
    "zero": Lesson(
        title="ZeRO and FSDP",
        idea="Data-parallel ranks need not all store the same states. ZeRO-1 shards the optimizer states, ZeRO-2 also "
        "the gradients, ZeRO-3 (FSDP) also the parameters, which are all-gathered layer by layer when they are used.",
        axis=Knob("ZeRO stage", (0, 1, 2, 3), 3),
        other=Knob("GPUs", (8, 16, 32, 64), 8),
        scenario=_zero,
        sentences=(
            "Llama 3 8B with ZeRO-{x} needs {now.memory} per GPU, and {first.memory} without sharding: it {now.fits}.",
            "A rank stores {now.parameters} of parameters, {now.gradients} of gradients and {now.optimizer_states} of "
            "optimizer states; without sharding {first.parameters}, {first.gradients} and {first.optimizer_states}.",
            "Communication that compute does not hide takes {now.exposed_share} of a step of {now.step}.",
            "The optimizer updates a shard in {now.optimizer}, and everything in {first.optimizer}.",
        ),
        attempt="Raise the number of GPUs at ZeRO-3. The states of a rank shrink in proportion; activations, logits "
        "and one gathered layer do not.",
        source="Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277",
    ),
    "tp": Lesson(
        title="Tensor parallelism",
        idea="Each matrix of a layer is split over the tensor-parallel ranks, by columns first and by rows next, so "
        "that a block needs two collectives in forward and two in backward. They are on the critical path.",
        axis=Knob("Tensor-parallel ranks", (1, 2, 4, 8), 4),
        other=Knob("Sequence parallelism", (True, False), True),
        scenario=_tp,
        sentences=(
            "Llama 3 8B on 32 GPUs with tp {x}: a step takes {now.step}, against {first.step} without tensor "
            "parallelism.",
            "Activations take {now.activations} instead of {first.activations}, and {now.memory} are used in total.",
            "Exposed communication takes {now.exposed_share} of the step, and compute takes {now.compute} instead of "
            "{first.compute}: smaller matrices reach a smaller fraction of the peak.",
        ),
        attempt="Turn sequence parallelism off. Norms and residuals are then stored in full on every rank, and "
        "activations grow. Communication moves the same bytes: an all-reduce is a reduce-scatter and an all-gather.",
        source="Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198",
    ),
    "pp": Lesson(
        title="Pipeline parallelism",
        idea="The layers are split into stages on different ranks, and the batch into microbatches that pass through "
        "them. A stage only sends its output to the next one. At the start and end of a step, ranks wait for each "
        "other: the bubble.",
        axis=Knob("Microbatches", (4, 8, 16, 32), 8),
        other=Knob("Schedule", ("1f1b", "gpipe", "interleaved_1f1b", "zb-h1"), "1f1b"),
        scenario=_pp,
        sentences=(
            "Llama 3 8B in 4 stages with {x} microbatches: a step takes {now.step}, of which the rank with the longest "
            "compute time waits {now.wait} ({now.wait_share}).",
            "The bubble has a fixed length for a schedule, so that more microbatches make it a smaller fraction: with "
            "{first.x} microbatches the rank waits {first.wait_share}.",
            "The peak-memory rank stores {now.activations} of activations, of all microbatches that are in flight on "
            "it; it needs {now.memory} and {now.fits}.",
        ),
        attempt="Compare the schedules at 32 microbatches. GPipe has about the bubble of 1F1B, but stores the "
        "activations of all microbatches. Interleaved 1F1B and ZB-H1 shorten the bubble. Interleaving stores more on "
        "every rank. ZB-H1 was designed for the peak of 1F1B, and the first rank stores the same. On the later ranks "
        "weight gradients wait, and torch stores their inputs and the gradients of their outputs: more than 1F1B.",
        source="Huang et al. 2019, arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473; Qi et al. 2024, "
        "arXiv:2401.10241",
    ),
    "cp": Lesson(
        title="Context parallelism",
        idea="Each sequence is split over the context-parallel ranks. Only attention needs the other tokens: keys and "
        "values travel around a ring, while the ranks compute with those that they already have.",
        axis=Knob("Context-parallel ranks", (1, 2, 4, 8), 4),
        other=Knob("Sequence length", (8192, 32768, 131072), 131072),
        scenario=_cp,
        sentences=(
            "Llama 3 8B on 16 GPUs with cp {x}: {now.memory} per GPU, against {first.memory} without context "
            "parallelism; it {now.fits}.",
            "Activations take {now.activations} instead of {first.activations}, and logits {now.logits} instead of "
            "{first.logits}: a rank has fewer tokens of the sequence.",
            "A step of the same 16 sequences takes {now.step}, against {first.step}; {now.exposed_share} of it is "
            "exposed communication.",
        ),
        attempt="Choose 8,192 tokens. Attention is then short and hides less of the ring, and the plan fits without "
        "context parallelism.",
        source="Liu et al. 2023, arXiv:2310.01889; Llama team 2024, arXiv:2407.21783, section 3.3",
    ),
    "ep": Lesson(
        title="Expert parallelism",
        idea="The experts of a mixture-of-experts layer are distributed over the expert-parallel ranks. An all-to-all "
        "dispatches each token to the ranks of its experts, and a second one combines the results.",
        axis=Knob("Expert-parallel ranks", (1, 2, 4, 8, 16), 8),
        other=Knob("Microbatch size", (1, 2, 4), 1),
        scenario=_ep,
        sentences=(
            "Qwen3 30B-A3B on 32 GPUs with ep {x} needs {now.memory} per GPU, and {first.memory} with all experts on "
            "every GPU: it {now.fits}.",
            "A step takes {now.step}, against {first.step}; exposed communication is {now.exposed} instead of "
            "{first.exposed}.",
            "Compute takes {now.compute} instead of {first.compute}: each GPU has fewer experts with more tokens each, "
            "so that the grouped GEMMs are larger.",
        ),
        attempt="Choose 16 expert-parallel ranks. A group then spans two nodes, and part of the tokens "
        "pass the network instead of NVLink.",
        source="Lepikhin et al. 2020, arXiv:2006.16668",
    ),
    "recompute": Lesson(
        title="Recomputation",
        idea="Backward needs the activations of forward. Instead of storing them, a rank can store the input of each "
        "block and run the block's forward a second time (activation checkpointing).",
        axis=Knob("Recompute", ("none", "selective", "full"), "full"),
        other=Knob("Microbatch size", (1, 2, 4), 1),
        scenario=_recompute,
        sentences=(
            "Llama 3 8B on 8 GPUs with recompute {x}: {now.memory} per GPU, against {first.memory} with none; it "
            "{now.fits}.",
            "Activations take {now.activations} instead of {first.activations}.",
            "Recomputation takes {now.recompute} ({now.recompute_share}) of a step of {now.step}; without it a step "
            "takes {first.step}.",
            "MFU is {now.mfu} instead of {first.mfu}: it counts only the FLOPs of the model.",
        ),
        attempt="Look at selective: it recomputes the core of attention. FlashAttention already stores almost nothing "
        "of it, so that little memory is saved here.",
        source="Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198",
    ),
}
"""Lessons in the order of the page, by their name in links."""


_FITS: dict[str | None, str] = {None: "may fit: the memory of the device is unknown"}
"""Verdicts on memory inside of a sentence, where they differ from the verdict."""


def numbers_of(plan: ComparedPlan) -> SimpleNamespace | None:
    """Numbers of a plan by the names in sentences of lessons; None for a plan without a prediction.

    A name with ``_share`` is a fraction of the step.
    """
    head = plan.headline
    if head is None:
        return None
    parts = {
        ("exposed" if part == "exposed communication" else part): seconds for part, seconds in plan.split_s.items()
    }
    categories = ("parameters", "gradients", "optimizer_states", "activations", "logits")
    return SimpleNamespace(
        x=plan.name,
        step=format_time(head.step_time_s),
        memory=format_bytes(head.memory.needed_bytes),
        fits=_FITS.get(head.memory_verdict, str(head.memory_verdict)),
        rate=format_count(head.tokens_per_s),
        mfu="unknown" if head.mfu is None else format_percent(head.mfu),
        **{part: format_time(seconds) for part, seconds in parts.items()},
        **{f"{part}_share": format_percent(seconds / head.step_time_s) for part, seconds in parts.items()},
        **{name: format_bytes(head.memory.by_category.get(MemoryCategory(name), 0)) for name in categories},
    )


def sentences_of(lesson: Lesson, now: SimpleNamespace, first: SimpleNamespace) -> list[str]:
    """Sentences of a lesson with the numbers of the chosen plan and of the first one of the axis."""
    return [sentence.format(x=now.x, now=now, first=first) for sentence in lesson.sentences]
