"""What docs/ tells people to do, done."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from simplan.predict import predict
from simplan.program.schedules import StageTimes
from simplan.program.schedules.bubble import bubble_rate
from simplan.program.tables.check import check_table
from simplan.program.tables.table import plan_table
from simplan.report.text import prediction_text
from simplan.scenario import load_scenario
from simplan.scenario.search import load_search
from simplan.validate.logged import LoggedRun
from simplan.validate.reading import parse_measured

DOCS = Path(__file__).resolve().parents[1] / "docs"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_files_of_the_readme_are_read(tmp_path: Path) -> None:
    found = []
    for text in blocks((DOCS.parent / "README.md").read_text(), "yaml"):
        file = tmp_path / "file.yaml"
        file.write_text(text)
        if "plan:" in text:
            load_scenario(file)
        elif "search:" in text:
            load_search(file)
        else:
            found.append(parse_measured(text, "log.yaml"))
    [logged] = found
    assert isinstance(logged, LoggedRun)
    assert logged.peak_reserved_gib == (71.2,)


def test_the_devices_of_the_docs_are_predicted(tmp_path: Path) -> None:
    found = blocks((DOCS / "own-device.md").read_text(), "yaml")
    assert len(found) == 2
    for number, text in enumerate(found):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        asked = load_scenario(file)
        prediction = predict(asked.job, name=asked.name)
        assert prediction.fits, "an example of a plan that works"
        assert prediction.mfu is not None
        assert 0.1 < prediction.mfu < 0.7
        assert ("cluster      8 x rtx-5090, 1 node" in prediction_text(prediction)) == (number == 0)


def test_the_schedule_of_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed as its pyproject.toml says: as fast as 1F1B with free messages, and 2(p-1)+1 microbatches held."""
    text = (DOCS / "own-schedule.md").read_text()
    [code], [entry_points], [scenario] = (blocks(text, language) for language in ("python", "toml", "yaml"))
    module = re.search(r"# (\w+\.py)", code)
    assert module is not None
    (tmp_path / module.group(1)).write_text(code)
    info = tmp_path / "eager-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eager\nVersion: 1.0\n")
    name, target = re.findall(r'^([\w-]+) = "(.*)"', entry_points, re.MULTILINE)[0]
    (info / "entry_points.txt").write_text(f"[simplan.schedules]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "eager.yaml"
    file.write_text(scenario)
    assert yaml.safe_load(scenario)["plan"]["schedule"] == name
    plan = load_scenario(file).job.plan
    for p, m in ((2, 4), (3, 7), (4, 3)):
        table = plan_table(plan.model_copy(update={"pp": p}), m)
        check_table(table, p, m)
        compute = tuple(tuple(action for action in row if action.kind.is_compute) for row in table)
        one_f_one_b = plan_table(plan.model_copy(update={"pp": p, "schedule": "1f1b"}), m)
        wanted = tuple(tuple(action for action in row if action.kind.is_compute) for row in one_f_one_b)
        times = StageTimes.equal(p)
        assert bubble_rate(compute, times) == pytest.approx(bubble_rate(wanted, times))
        first = [str(action) for action in compute[0]]
        assert first.index("0B0") == min(2 * (p - 1) + 1, m)


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are here small ones of the same names."""
    small = "model: {preset: gpt2-124m}\ncluster: {preset: dgx-h100}\ntraining: {global_batch_size: 8}\n"
    (tmp_path / "plan.yaml").write_text(small + "plan: {dp_replicate: 8}\n")
    (tmp_path / "llama.yaml").write_text(
        small + "search: {tp: [1], cp: [1], pp: [1], zero_stage: [0, 1], microbatch_size: [1], recompute: [none]}\n"
    )
    monkeypatch.chdir(tmp_path)
    [code] = blocks((DOCS.parent / "README.md").read_text(), "python")
    made: dict[str, Any] = {}
    exec(code, made)
    assert made["prediction"].fits
    assert made["plans"]["step_time_s"].is_monotonic_increasing
    assert made["prediction"].step_time_s >= 0.999 * made["plans"]["step_time_s"][0]
