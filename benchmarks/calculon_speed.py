"""CPU time of a prediction over that of Calculon's closed form (Isaev et al. 2023), for one plan.

``CALCULON_SOURCE`` names a checkout of https://github.com/calculon-ai/calculon. It needs pandas and psutil.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.predict_speed import cpu_seconds, job_of
from benchmarks.table import BenchmarkRow
from simplan.predict import predict
from simplan.sim.compiled import load_compiled

_VARIABLE = "CALCULON_SOURCE"
_ROUNDS = 15
_MOST_RATIO = 20.0
_EXECUTION = "examples/3072_t4_p64_d12_mbs4_full.json"
_PLAN = {
    "num_procs": 1024,
    "tensor_par": 8,
    "pipeline_par": 8,
    "data_par": 16,
    "batch_size": 1536,
    "microbatch_size": 1,
    "activation_recompute": "attn_only",
    "optimizer_sharding": False,
}
"""Changes of the example of Calculon, which then is the plan of the prediction."""


def calculon_speed() -> Iterator[BenchmarkRow]:
    """Row for GPT-3 175B, 1F1B on 1,024 A100s; none without a checkout of Calculon."""
    source = os.environ.get(_VARIABLE)
    if not source:
        return
    closed_form = _closed_form(Path(source))
    prediction = partial(predict, job_of("gpt3-175b", "megatron-lm-2022", "1f1b"))
    load_compiled()
    ours_s, theirs_s = [], []
    for _ in range(_ROUNDS):  # in turn, so that both see the same machine
        theirs_s += cpu_seconds(closed_form, 1)
        ours_s += cpu_seconds(prediction, 1)
    ratios = [ours / theirs for ours, theirs in zip(ours_s, theirs_s, strict=True)]
    ratio = statistics.median(ratios)
    yield BenchmarkRow(
        "predict over Calculon's closed form, GPT-3 175B, 1F1B on 1,024 A100s, CPU time",
        f"at most {_MOST_RATIO:g}",
        f"{ratio:.1f} (of {_ROUNDS} rounds {min(ratios):.1f} to {max(ratios):.1f}; "
        f"{1e3 * statistics.median(ours_s):.1f} ms over {1e3 * statistics.median(theirs_s):.1f} ms)",
        ratio <= _MOST_RATIO,
    )


def _closed_form(source: Path) -> Callable[[], object]:
    """Calculon's evaluation of the plan, without reading files."""
    sys.path.insert(0, str(source))
    try:
        calculon: Any = importlib.import_module("calculon")
    finally:
        sys.path.remove(str(source))
    files = ("models/gpt3-175B.json", "systems/a100_80g.json", _EXECUTION)
    application, system, execution = (json.loads((source / file).read_text()) for file in files)
    log = logging.getLogger("calculon")

    def run() -> None:
        devices = calculon.System(system)
        model = calculon.Llm(calculon.Llm.Application(application), log)
        model.compile(devices, calculon.Llm.Execution.from_json({**execution, **_PLAN}))
        model.run(devices)

    return run
