"""What predictions say of packed sequences: throughput, the share of attention, and what waiting may cost."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simplan import catalog
from simplan.cost.analytic import AnalyticCost
from simplan.model.model import ModelSpec
from simplan.model.packing import Lognormal, represent
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.predict.step import attention_s, fullest_excess
from simplan.prediction import Prediction
from simplan.report.text import prediction_text
from tests.cost.rates import cost_of
from tests.jobs import job_of

BASE = catalog.model("llama3-8b").model_copy(update={"seq_len": 4096})
DOCUMENTS = Lognormal(distribution="lognormal", median=300, sigma=1.0, seed=3)


def ask(model: ModelSpec, **plan: Any) -> Prediction:
    return predict(job_of(model, {"dp_replicate": 8, **plan}, global_batch_size=32, task="sft"), name="test")


def packed(*lengths: int) -> ModelSpec:
    return BASE.model_copy(update={"document_lengths": lengths})


def test_equal_documents_cost_their_share_of_attention() -> None:
    """Two documents of half the length have half of the pairs and meet half as many keys; 32 layers, 4 microbatches."""
    whole, halves, quarters = (ask(packed(*[4096 // n] * n)) for n in (1, 2, 4))
    rates, stack = catalog.device("h100-sxm-80gb").kernels, catalog.software("torch").rates
    share = rates.attention["flash3"]
    assert share.half_rate_keys is not None
    half_rate_keys = share.half_rate_keys
    slowest = 1 + rates.jitter * math.sqrt(2 * math.log(8))

    def attention_s(documents: int) -> float:
        keys = 4096 / documents / 2
        rate = 794.5e12 * stack.framework_efficiency * share.sustained * keys / (keys + half_rate_keys)
        return 4 * 32 * 2 * 4096 * 4096**2 / documents / rate * (1 / share.forward + 2.5 / share.backward) * slowest

    # read and written, twice as much in backward
    joined_s = stack.traffic * 4 * 32 * 3 * 2 * 2 * 4096 * 4096 / (rates.bandwidth_efficiency * 3.35e12) * slowest
    kernels_s = 4 * 32 * 2 * rates.kernel_overhead_s * slowest  # one more in forward and in backward
    saved_s, halved_s = attention_s(1) - attention_s(2), attention_s(2) - attention_s(4)
    assert whole.step_time_s - halves.step_time_s == pytest.approx(saved_s - joined_s - 2 * kernels_s, abs=0.004)
    assert halves.step_time_s - quarters.step_time_s == pytest.approx(halved_s - 2 * kernels_s, rel=1e-6)


def test_attention_runs_again_in_the_blocks_that_do() -> None:
    """Of 32 equal blocks, eight more forwards of their cores are a quarter of 32 more."""
    shown = ask(packed(2048, 2048))
    cost = AnalyticCost(shown.job.cluster, cost_of("h100-sxm-80gb"))

    def seconds(**plan: Any) -> float:
        degrees = ParallelPlan(dp_replicate=8, **plan)
        return attention_s(replace(shown.job, plan=degrees), shown.assignment, shown.table, cost)

    none_s, all_s = seconds(), seconds(recompute="full")
    assert all_s > none_s
    some_s = seconds(recompute="full", recompute_layers=8)
    assert some_s - none_s == pytest.approx((all_s - none_s) / 4)


def test_padding_is_said_and_counts_for_nothing() -> None:
    full, half = ask(packed(1024, 1024, 1024, 1024)), ask(packed(1024, 1024))
    assert full.document_tokens_per_s_per_device == full.tokens_per_s_per_device
    assert half.document_tokens_per_s_per_device == half.tokens_per_s_per_device / 2
    assert full.mfu is not None
    assert half.mfu is not None
    assert half.mfu * half.step_time_s == pytest.approx(full.mfu * full.step_time_s / 2, rel=1e-9)
    text = prediction_text(half)
    assert "without padding)" in text
    assert "no padding)" in text
    assert "all sequences are packed alike" in text
    assert "padding)" not in prediction_text(ask(BASE))


def drawn(**plan: Any) -> Prediction:
    lengths, packs = represent(DOCUMENTS, 4096)
    return ask(BASE.model_copy(update={"document_lengths": lengths, "packs": packs}), **plan)


def test_throughput_of_documents_is_that_of_all_packs() -> None:
    prediction = drawn()
    packs = prediction.job.model.packs
    assert packs is not None
    share = prediction.document_tokens_per_s_per_device / prediction.tokens_per_s_per_device
    assert share == pytest.approx(packs.document_share)
    assert share != prediction.job.model.document_share


def sentence(prediction: Prediction) -> str:
    (text,) = (text for text in prediction.assumptions if text.startswith("packs differ"))
    return text


def test_who_waits_is_said() -> None:
    """Ranks that reduce once a step average over their packs; those that wait in every microbatch do not."""
    assert "the fullest of 8 " in sentence(drawn())
    once, often = (
        float(sentence(prediction).split("expected to be at most ")[1].split(" %")[0])
        for prediction in (drawn(), drawn(dp_replicate=1, dp_shard=8))
    )
    assert often == pytest.approx(2 * once, abs=0.2)  # of four packs, or of each
    assert "the fullest of 16 " in sentence(drawn(dp_replicate=4, pp=2, microbatch_size=2))


@pytest.mark.parametrize(("num_ranks", "packs_per_rank"), [(2, 1), (8, 1), (8, 4), (64, 2), (1024, 1)])
def test_the_fullest_is_expected_within_the_bound(num_ranks: int, packs_per_rank: int) -> None:
    """Means of the largest of packs drawn and packed again, greedily, as their statistics were made."""
    _, packs = represent(DOCUMENTS, 4096)
    generator = np.random.default_rng(3)
    pairs: list[int] = []
    pack: Counter[int] = Counter()
    for length in map(int, DOCUMENTS.draw(20_000, generator)):
        length = min(max(length, 1), 4096)
        if sum(n * k for n, k in pack.items()) + length > 4096:
            padding = 4096 - sum(n * k for n, k in pack.items())
            pairs.append(sum(k * n * n for n, k in pack.items()) + padding**2)
            pack.clear()
        pack[length] += 1
    mean = sum(pairs) / len(pairs)
    samples = generator.choice(np.array(pairs), (2000, num_ranks, packs_per_rank)).mean(2).max(1)
    excess = float(samples.mean() / mean - 1)
    assert excess <= fullest_excess(packs, num_ranks, packs_per_rank) * 1.02  # sampled
    assert excess > 0
