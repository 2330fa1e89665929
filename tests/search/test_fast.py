"""Numbers of many plans at once against ``predict``, which lowers each plan to a Program of its own."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from simplan.predict import predict
from simplan.search.candidate import Candidate
from simplan.search.enumeration import Enumeration
from simplan.search.fast import FastEvaluator, covers_job
from simplan.search.question import Question
from simplan.search.space import SearchSpace
from simplan.spec import catalogue
from simplan.spec.model import ModelSpec
from simplan.spec.training import Precision, TrainingSpec

SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "seq_len": 32}
MODELS = {
    "gpt": ModelSpec(family="gpt", num_hidden_layers=8, **SMALL),
    "gpt untied": ModelSpec(family="gpt", num_hidden_layers=8, tied_embeddings=False, **SMALL),
    "llama": ModelSpec(family="llama", num_hidden_layers=8, num_key_value_heads=2, intermediate_size=128, **SMALL),
    "packed": ModelSpec(
        family="llama", num_hidden_layers=4, intermediate_size=128, document_lengths=(16, 8, 4), **SMALL
    ),
    "windows": ModelSpec(
        family="llama",
        num_hidden_layers=5,
        intermediate_size=128,
        sliding_window=8,
        sliding_window_pattern=2,
        **SMALL,
    ),
    "moe": ModelSpec(
        family="moe",
        num_hidden_layers=4,
        num_dense_layers=1,
        intermediate_size=128,
        num_experts=4,
        top_k=2,
        moe_intermediate_size=32,
        **SMALL,
    ),
    "t5": ModelSpec(family="t5", num_hidden_layers=2, intermediate_size=128, **SMALL),
    "resnet-50": catalogue.model("resnet-50"),
}
SPACE = SearchSpace(tp=(1, 2, 4), cp=(1, 2), cp_comm=("ring", "all_gather", "a2a"), ep=(1,))


def question(name: str, precision: Precision, num_devices: int = 16) -> Question:
    cluster = catalogue.cluster("dgx-h100", num_devices=num_devices)
    training = TrainingSpec(global_batch_size=32, precision=precision)
    return Question(MODELS[name], cluster, training, catalogue.software("torch"))


def some(asked: Question, number: int, seed: int) -> list[Candidate]:
    """Plans of the space, schedules and kinds of sharding evenly."""
    enumeration = Enumeration(SPACE, asked)
    fast = FastEvaluator(asked)
    found = [c for c in enumeration.candidates(enumeration.meshes, Counter()) if fast.covers(c)]
    rng = random.Random(seed)
    rng.shuffle(found)
    kinds = Counter[object]()

    def nth(c: Candidate) -> int:
        kind = c.schedule, c.zero_stage, c.tp > 1, c.cp > 1, c.grad_sync
        kinds[kind] += 1
        return kinds[kind]

    return sorted(found, key=nth)[:number]


@pytest.mark.parametrize("number", [12, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("gpt", "bf16"),
        ("gpt untied", "fp32"),
        ("llama", "bf16"),
        ("llama", "fp8"),
        ("packed", "bf16"),
        ("windows", "fp32"),
        ("moe", "bf16"),
        ("t5", "bf16"),
        ("resnet-50", "fp32"),
    ],
)
def test_numbers_are_those_of_predict(name: str, precision: Precision, number: int) -> None:
    asked = question(name, precision)
    candidates = some(asked, number, seed=len(name))
    fast = FastEvaluator(asked)
    times_s, sizes, bounds_s = (
        fast.step_times_s(candidates),
        fast.device_bytes(candidates),
        fast.least_time_s(candidates),
    )
    assert len(candidates) == number
    for candidate, seconds, size, bound_s in zip(candidates, times_s, sizes, bounds_s, strict=True):
        found = predict(asked.job(candidate.plan()), name="")
        assert seconds == pytest.approx(found.step_time_s, rel=1e-9), candidate
        assert size == max(memory.device_bytes for memory in found.memory), candidate
        assert bound_s <= seconds * (1 + 1e-12), candidate


def test_gradients_reduced_after_every_microbatch_need_no_room_and_more_time() -> None:
    asked = question("llama", "bf16", num_devices=4)
    ways: list[dict[str, Any]] = [
        {"dp_shard": 4, "zero_stage": 3},
        {"dp_shard": 4, "zero_stage": 2, "microbatch_size": 2},
        {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3, "recompute": "full"},
        {"dp_shard": 2, "zero_stage": 3, "tp": 2, "sequence_parallel": True, "microbatch_size": 8},
    ]
    each, once = ([Candidate(grad_sync=sync, **way) for way in ways] for sync in ("microbatch", "step"))
    fast = FastEvaluator(asked)
    assert all(fast.covers(candidate) for candidate in each)
    found = zip(each, fast.step_times_s(each), fast.allocated_bytes(each), strict=True)
    for (candidate, seconds, size), least_s, whole in zip(
        found, fast.step_times_s(once), fast.allocated_bytes(once), strict=True
    ):
        predicted = predict(asked.job(candidate.plan()), name="")
        assert seconds == pytest.approx(predicted.step_time_s, rel=1e-9), candidate
        assert size == max(memory.allocated_bytes for memory in predicted.memory), candidate
        assert seconds > least_s, candidate
        assert size < whole, candidate


def test_a_way_that_tells_blocks_apart_has_stages_of_its_own() -> None:
    """With selective_layer every second block is recomputed, so that stages of odd length are of two kinds."""
    asked = question("gpt untied", "bf16")
    fast = FastEvaluator(asked)
    others: dict[str, Any] = {"dp_replicate": 2, "pp": 8, "schedule": "1f1b"}
    candidates = [Candidate(recompute=recompute, **others) for recompute in ("none", "selective_layer")]
    times_s, sizes = fast.step_times_s(candidates), fast.device_bytes(candidates)
    for candidate, seconds, size in zip(candidates, times_s, sizes, strict=True):
        found = predict(asked.job(candidate.plan()), name="")
        assert seconds == pytest.approx(found.step_time_s, rel=1e-9), candidate
        assert size == max(memory.device_bytes for memory in found.memory), candidate


def test_a_trainers_host_is_waited_for_once() -> None:
    """Equal to predict, and as much longer than in a bare loop as the host takes."""
    asked = question("gpt", "bf16")
    trainer = replace(asked, software=asked.software.model_copy(update={"trainer": True}))
    pipeline: dict[str, Any] = {"pp": 4, "schedule": "1f1b"}
    ways: list[dict[str, Any]] = [
        {"dp_replicate": 16},
        {"dp_replicate": 4, **pipeline},
        {"dp_shard": 16, "zero_stage": 1},
    ]
    candidates = [Candidate(**way) for way in ways]
    times_s, bare_s = (FastEvaluator(each).step_times_s(candidates) for each in (trainer, asked))
    for candidate, seconds, without_s in zip(candidates, times_s, bare_s, strict=True):
        found = predict(trainer.job(candidate.plan()), name="")
        assert seconds == pytest.approx(found.step_time_s, rel=1e-9), candidate
        assert seconds - without_s == pytest.approx(asked.cluster.device.kernels.step_s), candidate
        assert [split.host_s for split in found.splits] == pytest.approx([seconds - without_s] * 16), candidate


def test_uneven_meshes_and_schedules_found_from_times_are_left_to_predict() -> None:
    asked = question("llama", "bf16", num_devices=12)
    fast = FastEvaluator(asked)
    assert not fast.covers(Candidate(dp_replicate=3, tp=4))  # the second group is half in each node
    assert fast.covers(Candidate(dp_replicate=3, tp=1, pp=4, schedule="1f1b")) is False
    even = FastEvaluator(question("llama", "bf16"))
    assert even.covers(Candidate(dp_replicate=4, tp=4))
    assert not even.covers(Candidate(pp=16, schedule="zb-2p"))


def test_what_shares_cores_or_trains_adapters_is_left_to_predict() -> None:
    asked = question("llama", "bf16")
    assert covers_job(asked)
    lora = asked.model.model_copy(update={"lora_rank": 4})
    assert not covers_job(Question(lora, asked.cluster, asked.training, asked.software))
    here = catalogue.cluster("this-machine", num_devices=2)
    assert not covers_job(Question(asked.model, here, asked.training, asked.software))
    for changes in ({"clip_grad_norm": 1.0}, {"optimizer": "lamb"}, {"fused_optimizer": False}):  # not in its sums
        training = asked.training.model_copy(update=changes)
        assert not covers_job(Question(asked.model, asked.cluster, training, asked.software))
    for change in ({"lists_of_shards": True}, {"copies_units": False}, {"live_elements": 1}, {"tp_overlap": "gathers"}):
        software = asked.software.model_copy(update=change)
        assert not covers_job(Question(asked.model, asked.cluster, asked.training, software))
