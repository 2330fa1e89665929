"""The Python API: its names, one road to a job, short forms of results, and sweeps."""

from __future__ import annotations

import ast
import inspect
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import simplan
from simplan.cli import main
from simplan.errors import SpecError
from tests.support.problems import refuses

ROOT = Path(__file__).resolve().parents[1]
FSDP = {
    "model": {"preset": "llama3-8b", "seq_len": 8192},
    "cluster": {"preset": "dgx-h100", "num_nodes": 1},
    "training": {"global_batch_size": 64, "precision": "bf16"},
    "plan": {"dp_shard": 8, "grad_sync": "microbatch"},
}


@pytest.fixture(scope="module")
def job() -> simplan.Job:
    return simplan.make_job(FSDP)


def test_the_public_names_are_these() -> None:
    assert simplan.__all__ == sorted(simplan.__all__)
    assert set(simplan.__all__) == {
        "Fix", "GoodputResult", "Job", "Prediction", "Scenario", "SearchResult", "SearchSpace", "SimplanError",
        "SpecError", "compare", "explain", "fixes", "goodput", "load_scenario", "load_search", "make_job", "predict",
        "search", "sweep",
    }  # fmt: skip
    assert set(simplan.__all__) <= set(dir(simplan))
    with pytest.raises(AttributeError, match="no attribute 'predit'"):
        _ = simplan.predit  # type: ignore[attr-defined]


def test_stubs_have_the_public_names() -> None:
    tree = ast.parse((ROOT / "simplan" / "__init__.pyi").read_text())
    stubbed = {
        alias.asname: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert stubbed == {name: simplan._MODULE_OF[name] for name in simplan.__all__}  # type: ignore[attr-defined]


def test_functions_are_no_folders_whatever_is_imported_first() -> None:
    program = (
        "import inspect, simplan.predict, simplan.search\nfrom simplan.scenario import Scenario\nimport simplan\n"
        "from simplan.predict import predict_step\nfrom simplan import predict, search, explain\n"
        "print(*(inspect.isfunction(getattr(simplan, name)) for name in ('predict', 'search', 'explain')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["True"] * 3


def test_import_loads_no_part_of_simplan() -> None:
    program = (
        "import sys, simplan; print(*(name for name in sys.modules if name.startswith('simplan.') or name == 'numpy'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []


def test_every_function_is_documented_and_typed() -> None:
    for name in simplan.__all__:
        value = getattr(simplan, name)
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            assert signature.return_annotation is not inspect.Signature.empty, name
            assert all(p.annotation is not p.empty for p in signature.parameters.values()), name


def test_a_name_a_file_and_a_mapping_make_the_same_job(job: simplan.Job, tmp_path: Path) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(str(FSDP).replace("'", ""))
    keys: dict[str, Any] = {
        "cluster": "dgx-h100",
        "num_nodes": 1,
        "seq_len": 8192,
        "global_batch_size": 64,
        "precision": "bf16",
    }
    named = simplan.make_job("llama3-8b", **keys, dp_shard=8, grad_sync="microbatch")
    assert job == simplan.make_job(file) == named == simplan.load_scenario(file).job
    assert simplan.make_job(FSDP, {"plan.grad_sync": "step"}).plan.grad_sync == "step"
    with refuses("microbatch", rule="is no key of a scenario", fix="did you mean"):
        simplan.make_job("llama3-8b", microbatch=2)


def test_results_have_short_forms(job: simplan.Job) -> None:
    prediction = simplan.predict(job)
    result = simplan.search(job, {"tp": [1], "pp": [1], "microbatch_size": [1], "recompute": ["none"]})
    for value in (job, prediction, result, job.plan):
        assert len(repr(value)) < 300
        assert "\n" not in repr(value)
    assert repr(job.plan) == "ParallelPlan(dp_shard=8, grad_sync='microbatch')"
    assert f"{prediction.step_time_s:.3f}" in repr(prediction)
    assert f" {prediction.memory_verdict}: " in repr(prediction)


def test_a_sweep_is_a_prediction_for_each_combination(job: simplan.Job) -> None:
    table = simplan.sweep(job, {"plan.tp plan.dp_shard": [(1, 8), (2, 4)], "plan.microbatch_size": [1, 3]})
    assert table[["plan.tp", "plan.dp_shard", "plan.microbatch_size"]].to_numpy().tolist() == [
        [1, 8, 1], [1, 8, 3], [2, 4, 1], [2, 4, 3],
    ]  # fmt: skip
    for tp, dp_shard, row in ((1, 8, 0), (2, 4, 2)):
        plan = FSDP["plan"] | {"tp": tp, "dp_shard": dp_shard}
        alone = simplan.predict(simplan.make_job({**FSDP, "plan": plan}))
        assert table["step_time_s"][row] == alone.step_time_s
        assert table["fits"][row] == alone.fits
        assert table["error"][row] == ""
    assert table["seq_len"].tolist() == [8192] * 4
    assert pd.isna(table["step_time_s"][1])
    assert "must be a multiple of dp x microbatch_size = 8 x 3" in table["error"][1]
    alone = simplan.sweep(job, {"plan.tp": [1, 2, 16, 3]})  # shards fill the devices, where they can
    assert alone["plan.dp_shard"].tolist()[:2] == [8, 4]
    assert alone["step_time_s"].tolist()[:2] == [table["step_time_s"][0], table["step_time_s"][2]]
    assert alone["step_time_s"].isna().tolist() == [False, False, True, True]
    assert "16" in alone["error"][2]
    replicated = simplan.make_job("gpt2-124m", num_nodes=1, dp_replicate=8)
    assert simplan.sweep(replicated, {"plan.pp": [2]})["plan.dp_replicate"].tolist() == [4]
    with pytest.raises(SpecError, match=r"plan\.tq: is not a known key"):
        simplan.sweep(job, {"plan.tq": [1]})
    with pytest.raises(SpecError, match="more than 10,000 combinations"):
        simplan.sweep(job, {"model.seq_len": range(1, 200), "plan.microbatch_size": range(1, 100)})


def test_every_function_takes_the_same_keys(job: simplan.Job) -> None:
    """With and without their section, on a job and on what makes one."""
    keys: dict[str, Any] = {"tp": 2, "dp_shard": 4, "global_batch_size": 32, "compiled": True}
    full = {"plan.tp": 2, "plan.dp_shard": 4, "training.global_batch_size": 32, "software.compiled": True}
    changed = job.with_changes(full)
    assert (changed.plan.tp, changed.training.global_batch_size, changed.software.compiled) == (2, 32, True)
    assert job.with_changes(**keys) == job.with_changes(keys) == changed == simplan.make_job(FSDP, full | keys)
    expected_s = simplan.predict(changed).step_time_s
    for prediction in (simplan.predict(job, **keys), simplan.predict(job, full), simplan.predict(FSDP, **keys)):
        assert prediction.step_time_s == expected_s
    swept = simplan.sweep(FSDP, {"tp dp_shard": [(1, 8), (2, 4)]}, microbatch_size=[1, 2], global_batch_size=32)
    assert swept[["tp", "dp_shard", "microbatch_size"]].to_numpy().tolist() == [
        [1, 8, 1],
        [1, 8, 2],
        [2, 4, 1],
        [2, 4, 2],
    ]
    alone = simplan.sweep(job.with_changes(global_batch_size=32), {"plan.tp": [2], "plan.microbatch_size": [1]})
    assert swept["step_time_s"][2] == alone["step_time_s"][0]
    assert "dp_shard" in simplan.sweep(job, tp=[2])
    space: dict[str, Any] = {"tp": [1], "pp": [1], "microbatch_size": [1, 2], "recompute": ["none"], "top": 1}
    result = simplan.search(FSDP, **space, global_batch_size=32)
    asked = simplan.search(job.with_changes(global_batch_size=32), space)
    mixed = simplan.search(
        job, {"tp": 1, "pp": 1, "recompute": "none"}, microbatch_size=[1, 2], top=1, global_batch_size=32
    )
    assert result.best == asked.best == mixed.best
    for function in (simplan.predict, simplan.search, simplan.sweep, simplan.make_job):
        with pytest.raises(SpecError, match=r"^tq: is no key of a scenario"):
            function(FSDP, tq=1)


def test_results_have_the_texts_of_their_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(yaml.safe_dump(FSDP))
    prediction = simplan.load_scenario(file).predict()
    explanation = simplan.explain(prediction)
    for arguments, text in (
        (["predict", str(file)], prediction.report()),
        (["explain", str(file), "--kernels"], explanation.report(kernels=True)),
    ):
        assert main(arguments) == 0
        assert capsys.readouterr().out.startswith(text.rstrip())
    table = prediction.to_dataframe()
    assert table["rank"].tolist() == list(range(8))
    spent_s = table[[name for name in table if name.endswith("_s")]].sum(axis=1)
    assert spent_s.tolist() == pytest.approx([prediction.step_time_s] * 8)
    assert len(repr(explanation)) < 300


def test_compare_takes_files_and_objects(job: simplan.Job, tmp_path: Path) -> None:
    prediction = simplan.predict(job)
    log = tmp_path / "log.yaml"
    log.write_text(f"step_time_s: {2 * prediction.step_time_s}\n")
    comparison = simplan.compare(prediction, log)
    assert comparison.rows[0].signed_error == pytest.approx(-0.5)
    with pytest.raises(SpecError, match=r"log\.json"):
        simplan.compare(prediction, tmp_path / "log.json")


def test_an_explanation_needs_the_prediction_alone(job: simplan.Job) -> None:
    prediction = simplan.predict(job)
    explanation = simplan.explain(prediction)
    assert sum(term.value for term in explanation.time) == pytest.approx(prediction.step_time_s)


@pytest.mark.slow
def test_the_notebook_prints_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ROOT / "docs" / "notebooks" / "python-api.ipynb"
    stored = json.loads(file.read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    executed = runpy.run_path(str(ROOT / "docs" / "execute.py"))["executed"](stored)

    def texts(notebook: dict[str, Any]) -> list[Any]:
        outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
        return [output.get("text") or output["data"]["text/plain"] for output in outputs]

    assert texts(executed) == texts(stored), "run: python docs/execute.py docs/notebooks/python-api.ipynb"
