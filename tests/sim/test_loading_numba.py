"""When the machine code is loaded: facts of a process, so each test has its own."""

from __future__ import annotations

import subprocess
import sys

_TWICE = """
import sys
import simplan
job = simplan.make_job("gpt2-1.5b", {{
    "cluster.preset": "dgx-a100-80gb", "cluster.num_devices": 8, "plan.pp": 8, "training.global_batch_size": {batch},
}})
first = simplan.predict(job)
loaded = ["numba" in sys.modules]
second = simplan.predict(job)
loaded.append("simplan.sim.jitted" in sys.modules)
same = first == second and first.action_level_step_time_s == second.action_level_step_time_s
print(loaded, same and (first.timeline, first.step_time_interval_s) == (second.timeline, second.step_time_interval_s))
"""


def _printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_second_prediction_of_a_process_is_compiled_and_equal() -> None:
    assert _printed(_TWICE.format(batch=256)) == "[False, True] True"


def test_small_predictions_do_not_load_numba() -> None:
    assert _printed(_TWICE.format(batch=16)) == "[False, False] True"
