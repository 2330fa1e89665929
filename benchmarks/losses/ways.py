"""Ways to train, and their runs: model, batch and data of ``scenarios/ways/losses.yaml`` on two or four CPU ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from executor.run import run_job
from simplan import load_scenario
from simplan.cli.calibrations import covers, ensure
from simplan.cost.calibration.store import load
from simplan.io import read_model
from simplan.predict import run_spec_of
from simplan.prediction import Prediction
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec

SCENARIO = Path(__file__).resolve().parents[2] / "scenarios" / "ways" / "losses.yaml"
SYNCHRONOUS = "synchronous"
_FOUR_WORKERS = {"cluster.num_devices": 4, "plan.dp_replicate": 4, "plan.microbatch_size": 4}
"""Four workers with the same batch in total."""
_SLOW_WORKER = {**_FOUR_WORKERS, "cluster.stragglers": [{"rank": 3, "slowdown": 4.0}]}
"""The last of four workers computes 4 times as long."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    SYNCHRONOUS: {},
    "fp16": {"plan.compression": {"kind": "fp16"}},
    "int8": {"plan.compression": {"kind": "int8"}},
    "one_bit": {"plan.compression": {"kind": "one_bit", "warmup_share": 0.1}},
    "one_bit_adam": {"plan.compression": {"kind": "one_bit_adam", "warmup_share": 0.1}},
    "powersgd, rank 4": {"plan.compression": {"kind": "powersgd", "rank": 4, "start_step": 2}},
    "powersgd, rank 1": {"plan.compression": {"kind": "powersgd", "rank": 1, "start_step": 2}},
    "powersgd, batched, rank 1": {
        "plan.compression": {"kind": "powersgd", "batched": True, "rank": 1, "start_step": 2}
    },
    "top_k, 1%": {"plan.compression": {"kind": "top_k", "ratio": 0.01}},
    "local_sgd, 8 steps": {"plan.replication": {"kind": "local_sgd", "inner_steps": 8}},
    "diloco, 20 steps": {"plan.replication": {"kind": "diloco", "inner_steps": 20}},
    "streaming_diloco, 20 steps": {
        "plan.replication": {"kind": "streaming_diloco", "inner_steps": 20, "fragments": 2, "overlap_steps": 2}
    },
    "parameter_server, staleness 2": {"plan.replication": {"kind": "parameter_server", "staleness": 2}},
    "parameter_server, unbounded": {"plan.replication": {"kind": "parameter_server", "staleness": "unbounded"}},
    "hogwild": {"plan.replication": {"kind": "hogwild"}},
    "hogwild, lock": {"plan.replication": {"kind": "hogwild", "lock": True}},
    "four workers, unbounded": {
        **_FOUR_WORKERS,
        "plan.replication": {"kind": "parameter_server", "staleness": "unbounded"},
    },
    "slow worker, staleness 2": {**_SLOW_WORKER, "plan.replication": {"kind": "parameter_server", "staleness": 2}},
    "slow worker, unbounded": {
        **_SLOW_WORKER,
        "plan.replication": {"kind": "parameter_server", "staleness": "unbounded"},
    },
}
"""Keys that a way changes in the scenario, by its name in the report; others are compared with the first way."""

SEEDS = (0, 1, 2)
NUM_STEPS = 400
FOLDER = SCENARIO.parents[2] / "build" / "losses"
"""Measurements; an interrupted comparison resumes, and a new way runs alone."""


@dataclass(frozen=True, slots=True)
class LossRun:
    """One run: a way with a seed of weights and samples."""

    way: str
    seed: int

    def prediction(self) -> Prediction:
        """Prediction on this machine, which is timed for it."""
        scenario = load_scenario(SCENARIO)
        scenario = replace(scenario, job=scenario.job.with_changes(dict(WAYS[self.way])))
        FOLDER.mkdir(parents=True, exist_ok=True)
        file = FOLDER / "calibration.json"
        calibration = load(file)  # of any load of the machine: staleness depends on ratios of times
        return scenario.predict(calibration if covers(calibration, scenario) else ensure([scenario], file))

    def job(self) -> RunSpec:
        """The job."""
        job = run_spec_of(
            self.prediction(),
            name=self.way,
            num_steps=NUM_STEPS,
            num_warmup_steps=0,
            seed=self.seed,
            device="cpu",
            profile_memory=False,
            predicted_memory_bytes=(),
        )
        # steps with whole gradients are a part of the training, but not of the measured step time
        whole = job.num_whole_steps
        return job.model_copy(update={"num_steps": NUM_STEPS - whole, "num_warmup_steps": whole})

    def measure(self) -> Measurement:
        """Measurement of the run; read from ``FOLDER`` if the same job has been run."""
        job, out = self.job(), FOLDER / f"{self.way.replace(', ', '-').replace('%', '')}-seed{self.seed}"
        file = out / "measurement.json"
        if file.exists() and (kept := read_model(file, Measurement)).complete and kept.job == job:
            return kept
        return run_job(job, out)
