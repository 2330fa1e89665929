"""Products in bf16 that were timed one by one on B200, against what step times of the same machine say of them.

No fit has seen these kernels (products_b200.csv), but two things are theirs: the rate of the machine's best product,
of which the fit finds the part that training sustains (``matmul_flop_per_s`` of their file), and how much kernels on
several streams hide of each other, so that the grouped ones are right on average (``KernelRates.stream_overlap``).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from simplan import catalog
from simplan.cost.compute.matmul import Matmul, MatmulRates
from tests.cost.rates import changed, cost_of

PEAK = 2.25e15
BEST = 1.474e15
STREAMS = 4
TIMED = pd.read_csv(Path(__file__).parent / "products_b200.csv", comment="#")


def matmuls(**changes: float) -> MatmulRates:
    """Of Megatron Core on the machine."""
    device = catalog.device("b200-sxm").model_copy(update={"matmul_flop_per_s": {"bf16": BEST}})
    return changed(cost_of(device, software="megatron-core", num_devices=1).matmuls, **changes)


def logs(rates: MatmulRates, timed: pd.DataFrame) -> np.ndarray:
    """Logarithms of predicted over measured times."""
    errors = []
    for row in timed.itertuples():
        groups, rows, columns, depth = row.groups, row.rows, row.columns, row.depth
        operands, result = rows * depth + depth * columns, rows * columns
        num_bytes = groups * (2 * operands + (4 * 2 if row.accumulator != "bf16" else 2 + 2 * row.wgrad) * result)
        product = Matmul(rows, columns, depth, groups, num_bytes)
        seconds = rates.part("", product).seconds
        if groups > 1:
            seconds += rates.launches_s(groups, STREAMS) - rates.kernel_overhead_s
        errors.append(np.log(seconds / (product.flops / (row.share * PEAK))))
    return np.array(errors)


def test_the_best_of_them_is_the_machines_rate() -> None:
    assert len(TIMED) == 514 + 108
    assert TIMED.share.max() * PEAK == pytest.approx(BEST, rel=1e-3)


def test_step_times_say_of_large_products_what_was_timed() -> None:
    """Of 250 with 1e12 operations and more."""
    flops = 2.0 * TIMED["rows"] * TIMED["columns"] * TIMED["depth"]
    large = TIMED[(TIMED.groups == 1) & (flops >= 1e12)]
    errors = logs(matmuls(), large)
    assert len(large) == 250
    assert abs(np.median(errors)) < 0.05
    assert np.quantile(np.abs(errors), 0.9) < 0.12


def test_products_of_experts_are_right_on_average() -> None:
    """From 40 groups of 9,832 rows to 256 of 128, which reach 0.08 to 0.51 of the peak."""
    grouped = TIMED[TIMED.groups > 1]
    errors = logs(matmuls(), grouped)
    assert abs(errors.mean()) < 0.16
    assert np.abs(errors).mean() < 0.2
    alone, at_once = (logs(matmuls(stream_overlap=share), grouped).mean() for share in (0.0, 1.0))
    assert alone > 0.2
    assert at_once < errors.mean() < alone
