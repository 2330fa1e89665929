"""Scenarios of whole runs that tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simplan.errors import SpecError
from simplan.scenario import Scenario, scenario_from
from simplan.scenario.whole_run.setup import ScenarioRun, scenario_run

SEQ_LEN, BATCH = 32, 64
DOCUMENT: dict[str, Any] = {
    "model": {"family": "gpt", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256,
              "seq_len": SEQ_LEN},
    "cluster": {"preset": "dgx-h100", "num_nodes": 4},
    "training": {"global_batch_size": BATCH},
    "plan": {"dp_replicate": 4, "dp_shard": 8},
    "run": {"num_steps": 1000},
    "reliability": {"device_mtbf_h": 1000},
    "checkpoint": {"interval_steps": 50, "blocking_s": 3},
    "recovery": {"restart_s": 100},
}  # fmt: skip
"""Four nodes, each a replica of a small model."""


def scenario_of(**sections: Any) -> Scenario:
    """The shared scenario with other sections; None leaves one out."""
    document = {**DOCUMENT, **sections}
    return scenario_from({name: section for name, section in document.items() if section is not None})


def run_of(scenario: Scenario) -> ScenarioRun:
    """Numbers of the scenario's run."""
    return scenario_run(scenario, scenario.predict(), Scenario.predict)


def refusal(**sections: Any) -> str:
    """Error of the shared scenario with other sections."""
    with pytest.raises(SpecError) as caught:
        run_of(scenario_of(**sections))
    return str(caught.value)


def written(folder: Path, *lines: str) -> str:
    """Path of a trace with these lines."""
    file = folder / "trace.csv"
    file.write_text("".join(f"{line}\n" for line in lines))
    return str(file)
