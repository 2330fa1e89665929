"""Failures, checkpoints and effective time of published runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.goodput.rows import PublishedRow, run_with, solved
from simplan import catalog
from simplan.api import predict
from simplan.goodput.engines.simulate import simulate
from simplan.goodput.rates import mtbf_s
from simplan.goodput.setup import WATERFALL, RunSetup
from simplan.scenario.whole_run.checkpoints import checkpoint_bytes

_DAY_S, _HOUR_S, _MINUTE_S = 86_400.0, 3600.0, 60.0
_RUNS = 200
_FEW_RUNS = 20
_BLOOM_STEP_S, _BLOOM_EVERY = 105.0, 100


def failure_rows() -> Iterator[PublishedRow]:
    """Yields all rows."""
    yield from _llama3()
    yield from _rsc()
    yield from _opt()
    yield from _bloom()
    yield from _delta()
    yield from _others()
    yield _spot()


def _effective(setup: RunSetup, num_runs: int) -> float:
    runs = simulate(setup, num_runs=num_runs)
    compute = runs.waterfall_s[:, WATERFALL.index("compute")]
    return float((compute / runs.time_s).mean())


def _of_days(setup: RunSetup, days: float) -> RunSetup:
    """The run with as many steps as it makes in a mean time."""
    for _ in range(2):
        mean_s = float(simulate(setup, num_runs=_FEW_RUNS).time_s.mean())
        setup = replace(setup, num_steps=round(setup.num_steps * days * _DAY_S / mean_s))
    return setup


def _llama3() -> Iterator[PublishedRow]:
    """54 days of 16,384 H100; a step of 12 s, as at 400 TFLOP/s, checkpoints every hour over the storage's 2 TB/s."""
    setup = run_with(
        "llama3-2024", "dgx-h100", 16_384,
        step_s=12.0, num_steps=360_000, checkpoint_every=300, blocking_s=3.0, load_s=3.0,
        restart_s=5 * _MINUTE_S, spares=900, repair_s=_DAY_S,
    )  # fmt: skip
    runs = simulate(_of_days(setup, 54), num_runs=_RUNS)
    unplanned = [not cause.planned for cause in setup.causes]
    counts = runs.interruptions[:, : len(unplanned)][:, unplanned].sum(axis=1)
    low, high = np.quantile(counts, (0.1, 0.9))
    yield PublishedRow(
        "Llama 3 405B, 16,384 H100: unexpected interruptions in 54 days",
        "419",
        "P",
        "a random half by cause: 217 of 419, doubled",
        f"{counts.mean():.0f} (P10 {low:.0f}, P90 {high:.0f})",
        "met" if low <= 419 <= high else "missed",
    )
    short = replace(setup, checkpoint_every=50, num_steps=100_000)
    lost_min = solved(
        lambda minutes: 1 - _effective(replace(short, restart_s=minutes * _MINUTE_S), _FEW_RUNS), 0.1, 0, 40, 0.5
    )
    yield PublishedRow(
        "the same: effective training time",
        "above 90 %, so at most 16.7 min for each of 466 interruptions",
        "P",
        "",
        f"90 % with a restart of {lost_min:.0f} min and checkpoints every 10 min (5 min of lost work); the restart "
        "time is not published",
        "implied",
    )


def _rsc() -> Iterator[PublishedRow]:
    def hours(num_devices: int) -> float:
        return mtbf_s(run_with("meta-rsc-1", "dgx-a100-80gb", num_devices, num_steps=1)) / _HOUR_S

    per_node_day = "6.50 failures per 1,000 node-days"
    for num_devices, published in ((16_384, "1.8 h"), (131_072, "0.23 h")):
        run = f"Meta RSC-1, {num_devices:,} A100: mean time to failure"
        mtbf = f"{hours(num_devices):.2f} h"
        yield PublishedRow(run, f"{published} (the paper's projection)", "P", per_node_day, mtbf, "fitted")
    for num_devices, published, rate in ((8, "47.7 d", 21.0), (1024, "7.9 h", 23.7)):
        mtbf_h = hours(num_devices)
        mtbf = f"{mtbf_h / 24:.0f} d" if mtbf_h > 100 else f"{mtbf_h:.1f} h"
        yield PublishedRow(
            f"the same, {num_devices:,} A100, observed",
            published,
            "P",
            "",
            f"{mtbf}: one rate cannot give all. Observed are {rate} failures per 1,000 node-days, 3 to 4 times the "
            "6.50 that the projections use",
            "missed",
        )


def _opt() -> Iterator[PublishedRow]:
    def setup(down_h: float) -> RunSetup:
        return run_with(
            "opt-175b", "dgx-a100-80gb", 1024,
            step_s=30.0, num_steps=round(33 * _DAY_S / 30), checkpoint_every=120, diagnosis_s=down_h * _HOUR_S,
            spares=12, repair_s=_DAY_S,
        )  # fmt: skip

    down_h = solved(
        lambda hours: float(simulate(setup(hours), num_runs=_FEW_RUNS).time_s.mean()), 56 * _DAY_S, 0, 24, 0.2
    )
    count = simulate(setup(down_h), num_runs=_FEW_RUNS).interruptions.sum(axis=1).mean()
    yield PublishedRow(
        "OPT-175B, 1,024 A100: restarts",
        "about 90 (chronicles), 105 or more (paper)",
        "P",
        "2 machines a day",
        f"{count:.0f} if nodes fail in the 33 days of training alone, {56 * 2} in all 56 days",
        "missed",
    )
    yield PublishedRow(
        "the same: days for 33 days of compute",
        "56",
        "P",
        "",
        f"56 if each failure stops the job for {down_h:.1f} h, besides lost work; that time is not published "
        "(replacement took hours, and a break and a deleted cluster are in it)",
        "implied",
    )


def _bloom() -> Iterator[PublishedRow]:
    model = {
        "family": "gpt", "num_hidden_layers": 70, "hidden_size": 14_336, "num_attention_heads": 112,
        "vocab_size": 250_880, "seq_len": 2048,
    }  # fmt: skip
    prediction = predict(
        {"model": model},
        cluster="dgx-a100-80gb",
        num_nodes=48,
        software="megatron-deepspeed",
        precision="bf16",
        optimizer="adam",
        dp_shard=8,
        tp=4,
        pp=12,
        sequence_parallel=False,
        zero_stage=1,
        microbatch_size=2,
        global_batch_size=2048,
        recompute="full",
    )
    num_bytes = checkpoint_bytes(prediction)
    yield PublishedRow(
        "BLOOM 176B, 384 A100: checkpoint",
        "2.3 TB (14 bytes of each parameter, 2,295 GiB in the README)",
        "P",
        "",
        f"{num_bytes / 2**30:,.0f} GiB",
        "met" if abs(num_bytes / 2**30 / 2295 - 1) < 0.02 else "missed",
    )
    yield PublishedRow(
        "the same: seconds to write it",
        "40 s",
        "P",
        "the storage's bandwidth",
        f"{num_bytes / 40 / 1e9:.0f} GB/s; no bandwidth is published",
        "implied",
    )
    setup = run_with(
        "bloom", "dgx-a100-80gb", 384,
        step_s=_BLOOM_STEP_S, num_steps=round(118 * _DAY_S / _BLOOM_STEP_S), checkpoint_every=_BLOOM_EVERY,
        blocking_s=40.0, restart_s=15 * _MINUTE_S, spares=1, repair_s=_DAY_S,
    )  # fmt: skip
    runs = simulate(setup, num_runs=_RUNS)
    stops = runs.interruptions.sum(axis=1).sum()
    mean_h = runs.waterfall_s[:, WATERFALL.index("lost_work")].sum() / stops / _HOUR_S
    most_h = (_BLOOM_EVERY * _BLOOM_STEP_S + 40) / _HOUR_S
    yield PublishedRow(
        "the same: work lost to a GPU failure, checkpoints every 100 steps of 105 s",
        "at most 3 h",
        "P",
        "one failure a week",
        f"{mean_h:.1f} h in the mean, at most {most_h:.1f} h",
        "met",
    )
    yield PublishedRow(
        "the same: work lost on 21 March, two steps before a checkpoint after 250",
        "7.3 h",
        "P",
        "",
        f"{248 * _BLOOM_STEP_S / _HOUR_S:.1f} h, the whole interval",
        "met",
    )
    yield PublishedRow(
        "the same: losses of 18, 6 and 11 h",
        "18, 6, 11 h",
        "P",
        "",
        "none: the chronicles ascribe them to hangs of the software at evaluations, which someone had to notice. The "
        "preset has GPU failures alone",
        "missed",
    )


def _delta() -> Iterator[PublishedRow]:
    """Spares with which all nodes are there 99.9 % of the time: a quantile of a Poisson number of nodes in repair."""

    def spares(mean_down: float) -> int:
        number, term, total = 0, math.exp(-mean_down), math.exp(-mean_down)
        while total < 0.999:
            number += 1
            term *= mean_down / number
            total += term
        return number

    memory_h = catalog.reliability("delta-h100")["causes"][0]["mtbf_h"] / 4
    nodes = 264  # 1,056 GPUs in nodes of 4
    spares_at = [spares(nodes * hours / memory_h) / nodes for hours in (2.2, 1 / 12)]
    node_h = solved(lambda hours: -spares(nodes * 2.2 / hours), -0.05 * nodes, 10, 1000, 1)
    spare_share = spares(nodes / 12 / node_h) / nodes
    yield PublishedRow(
        "Delta: spares for 99.9 %, recovery of 2.2 h and of 5 min",
        "5 % and 2 %",
        "P",
        "",
        f"{spares_at[0]:.1%} and {spares_at[1]:.1%} on {nodes} nodes with the memory errors of H100 alone. A node that "
        f"fails every {node_h:.0f} h needs 5 %, and then {spare_share:.1%} at 5 min. The rate of all failures is not "
        "in these facts",
        "missed",
    )


def _others() -> Iterator[PublishedRow]:
    def with_failures(num_devices: int, lost_min: float) -> RunSetup:
        return run_with(
            "llama3-2024", "dgx-h100", num_devices,
            num_steps=150_000, checkpoint_every=6, restart_s=lost_min * _MINUTE_S, spares=900, repair_s=_DAY_S,
        )  # fmt: skip

    limits, half = (_effective(with_failures(12_288, minutes), _FEW_RUNS) for minutes in (25, 12.5))
    yield PublishedRow(
        "MegaScale, 12,288 GPUs: effective time, diagnosis below 10 min, catching up within 15",
        "above 90 %",
        "P",
        "",
        f"{limits:.1%} with both at their limit and the failures of Llama 3's preset, {half:.1%} at half of it. Its "
        'own 100 repairs at the limit take 1.7 days, below 10 % of a run of 18 days or more ("weeks")',
        "met" if limits > 0.9 else "missed",
    )
    lost_min = solved(lambda minutes: 1 - _effective(with_failures(9600, minutes), _FEW_RUNS), 0.03, 0, 40, 0.5)
    yield PublishedRow(
        "ByteRobust, 9,600 GPUs: effective time of a dense model",
        "97 %",
        "P",
        "",
        f"97 % if a failure costs {lost_min:.0f} min with the failures of Llama 3's preset; neither is published",
        "implied",
    )


def _spot() -> PublishedRow:
    zone = catalog.spot_zone("aws-us-west-2a-v100")
    uptime = 1 / (1 + zone["preemptions_per_h"] * zone["wait_h"])
    return PublishedRow(
        "Spot, us-west-2a: 16 instances at one time",
        "42 % of the time",
        "P",
        "",
        f"{uptime**16:.0%} from the zone's rates of one instance, {uptime:.0%} of the time: preemptions are correlated "
        "and rates are not. Use a trace",
        "missed",
    )
