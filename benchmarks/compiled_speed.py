"""Speed of the compiled engine compared with SimPy, and the largest Programs, each in a separate process.

``python -m benchmarks.compiled_speed NAME`` runs one measurement and prints it as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.alone import alone, peak_bytes
from benchmarks.engine_speed import program_of
from benchmarks.table import BenchmarkRow
from simplan import catalog
from simplan.cost.model import CostModel
from simplan.cost.program_costs import estimate_program
from simplan.job import Job
from simplan.plan.plan import ParallelPlan, RankMapping
from simplan.predict import StepContext, build_program, cost_model, predict, simulate_program
from simplan.prediction import Prediction
from simplan.program.action import ActionKind
from simplan.program.folding import unfolded
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.schedules import PipelineShape, interleaved_1f1b
from simplan.sim.compiled import compile_program
from simplan.sim.engine import simulate
from simplan.training import TrainingSpec

_ROUNDS = 5
_VECTORS = 64
_P, _M, _V = 64, 512, 4
_SECONDS = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0}
_SEND_S = 0.1


def compiled_speed() -> list[BenchmarkRow]:
    """Rows for all measurements of the compiled engine."""
    return [_ratio_row(), _folded_row(), _unfolded_row(), _interleaved_row()]


def _ratio_row() -> BenchmarkRow:
    times = alone("benchmarks.compiled_speed", "ratio")
    ratios = [simpy_s / compiled_s for simpy_s, compiled_s in zip(times["simpy_s"], times["vector_s"], strict=True)]
    simpy_s, vector_s, compile_s = (statistics.median(times[key]) for key in ("simpy_s", "vector_s", "compile_s"))
    return BenchmarkRow(
        "SimPy over compiled engine, Level 2 step of Llama 3 70B, tp 8, pp 4, 32 microbatches, a duration vector",
        "",
        f"{statistics.median(ratios):.0f} (of {_ROUNDS} rounds {min(ratios):.0f} to {max(ratios):.0f}; "
        f"{1e3 * simpy_s:.0f} ms over {1e3 * vector_s:.2f} ms, {_VECTORS} vectors at once; making the arrays of "
        f"{times['num_ops']:,} operations takes {1e3 * compile_s:.0f} ms)",
        ok=True,
    )


def _folded_row() -> BenchmarkRow:
    runs = [alone("benchmarks.compiled_speed", "folded") for _ in range(_ROUNDS)]
    step_s, predict_s = ([run[key] for run in runs] for key in ("step_s", "predict_s"))
    middle_s = statistics.median(step_s)
    return BenchmarkRow(
        "Llama 3.1 405B on 16,384 H100 (tp 8, pp 16, FSDP over 128 without resharding, 16 sequences of 8,192 tokens "
        "a data rank), Level 2: fold, lower, price, simulate",
        "under 1 s",
        f"{middle_s:.2f} s (of {_ROUNDS} processes {min(step_s):.2f} to {max(step_s):.2f}; "
        f"{runs[0]['num_ops']:,} operations of {runs[0]['num_ranks']} ranks); the whole prediction with memory "
        f"and interval, {statistics.median(predict_s):.2f} s",
        middle_s < 1,
    )


def _unfolded_row() -> BenchmarkRow:
    run = alone("benchmarks.compiled_speed", "unfolded")
    total_s = run["lower_s"] + run["price_s"] + run["simpy_s"]
    return BenchmarkRow(
        "the same at Level 1 with all 16,384 ranks written out, in SimPy, no Timeline: lower, price, simulate",
        "under 120 s, under 8 GiB",
        f"{total_s:.0f} s ({run['lower_s']:.0f} + {run['price_s']:.0f} + {run['simpy_s']:.0f}), "
        f"{run['peak_bytes'] / 2**30:.1f} GiB, {run['num_ops']:,} operations; the step is the folded one's to "
        f"{run['difference']:.0e}",
        total_s < 120 and run["peak_bytes"] < 8 * 2**30 and run["difference"] < 1e-9,
    )


def _interleaved_row() -> BenchmarkRow:
    run = alone("benchmarks.compiled_speed", "interleaved")
    return BenchmarkRow(
        f"interleaved 1F1B, p={_P}, m={_M}, v={_V}, Level 1, in SimPy",
        "under 5 s",
        f"{run['simpy_s']:.2f} s ({run['num_ops']:,} operations, which take {run['lower_s']:.1f} s to write; "
        f"compiled: {run['compile_s']:.2f} s for the arrays, {1e3 * run['compiled_s']:.0f} ms for the step)",
        run["simpy_s"] < 5,
    )


def _time(run: Callable[..., Any], *arguments: object) -> tuple[float, Any]:
    start_s = time.perf_counter()
    result = run(*arguments)
    return time.perf_counter() - start_s, result


def _ratio() -> dict[str, Any]:
    prediction = _predicted(ParallelPlan(tp=8, pp=4), "llama3-70b", 32)
    program = build_program(prediction)
    durations_s = estimate_program(program, _cost(prediction)).durations_s
    vectors_s = np.tile(np.array(durations_s), (_VECTORS, 1))
    compile_program(program).step_times_s(vectors_s)  # loads numba
    simpy_s, compile_s, vector_s = [], [], []
    for _ in range(_ROUNDS):  # in turn, so that both see the same machine
        simpy_s.append(_time(simulate, program, durations_s)[0])
        seconds, compiled = _time(compile_program, program)
        compile_s.append(seconds)
        vector_s.append(_time(compiled.step_times_s, vectors_s)[0] / _VECTORS)
    return {"simpy_s": simpy_s, "compile_s": compile_s, "vector_s": vector_s, "num_ops": len(program.ops)}


def _llama_405b() -> Prediction:
    """Prediction for the mesh of Llama Team 2024 (arXiv:2407.21783), table 4, row 2; FSDP without reshard (3.3.2)."""
    plan = ParallelPlan(tp=8, pp=16, dp_shard=128, zero_stage=2, reshard_after_forward=False)
    return _predicted(plan, "llama3.1-405b", 16 * 128)


def _folded() -> dict[str, Any]:
    predict_s, prediction = _time(_llama_405b)
    step_s, simulated = _time(
        lambda: simulate_program(build_program(prediction), _cost(prediction), StepContext.of(prediction.job))
    )
    program = simulated.program
    return {
        "predict_s": predict_s,
        "step_s": step_s,
        "num_ops": len(program.ops),
        "num_ranks": len(program.ranks),
    }


def _unfolded() -> dict[str, Any]:
    prediction = _llama_405b()
    how = Lowering(level=1, folding=unfolded(RankMapping.of(prediction.job.plan)))
    lower_s, program = _time(lower, prediction.job, prediction.assignment, prediction.table, how)
    price_s, program_costs = _time(estimate_program, program, _cost(prediction))
    simpy_s, times = _time(simulate, program, program_costs.durations_s)
    return {
        "lower_s": lower_s,
        "price_s": price_s,
        "simpy_s": simpy_s,
        "num_ops": len(program.ops),
        "peak_bytes": peak_bytes(),
        "difference": abs(times.step_time_s / prediction.action_level_step_time_s - 1),
    }


def _interleaved() -> dict[str, Any]:
    lower_s, program = _time(program_of, interleaved_1f1b(PipelineShape(_P, _M, _V)), _P, _M, _V)
    durations_s = [
        _SEND_S if op.communication else _SECONDS.get(op.action.kind, 0.0) if op.work else 0.0 for op in program.ops
    ]
    simpy_s, times = _time(simulate, program, durations_s)
    compile_program(program).times(durations_s)  # loads numba
    compile_s, compiled = _time(compile_program, program)
    compiled_s, found_s = _time(compiled.step_times_s, np.array([durations_s]))
    assert found_s == [times.step_time_s]
    return {
        "lower_s": lower_s,
        "simpy_s": simpy_s,
        "compile_s": compile_s,
        "compiled_s": compiled_s,
        "num_ops": len(program.ops),
    }


def _predicted(plan: ParallelPlan, model: str, batch: int) -> Prediction:
    cluster = catalog.cluster("dgx-h100", num_devices=plan.num_devices)
    training = TrainingSpec(global_batch_size=batch)
    return predict(Job(catalog.model(model), cluster, training, plan, catalog.software("torch")), name=model)


def _cost(prediction: Prediction) -> CostModel:
    return cost_model(prediction.job, None)


if __name__ == "__main__":
    measurements = {"ratio": _ratio, "folded": _folded, "unfolded": _unfolded, "interleaved": _interleaved}
    print(json.dumps(measurements[sys.argv[1]]()))
