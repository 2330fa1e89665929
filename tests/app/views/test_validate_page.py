"""The page Validate: a link starts nothing, and no combination of inputs shows an exception."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import streamlit
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streamlit.testing.v1 import AppTest

from app.components import published
from app.figures.validation import predict_published
from app.fitting import document_text
from app.jobs.job import Jobs, StartedJob, TaskRequest, searches
from app.jobs.run import Run, runs
from app.views.validate import with_settings
from simplan.cli.dashboard import RUN_FLAG
from simplan.predict.step_summary import summarize_step
from simplan.scenario import load_scenario, parse_scenario
from simplan.units import format_time
from simplan.validate.hypotheses import MeasuredTotals, hypotheses
from tests.app.questions import SCENARIOS
from tests.app.test_uploads import LOG, made
from tests.app.views.pages import SMALL, assert_no_bug, opened
from tests.support.problems import says

DEMO = Path(__file__).resolve().parents[3] / "simplan" / "data" / "demo" / "1f1b.yaml"
HERE = {**SMALL, "cluster": {"preset": "this-machine", "num_devices": 4}}


@pytest.mark.parametrize(
    "view", [{}, {"held": "measured"}, {"held": "run"}, {"held": 7, "source": "nonsense", "steps": 0}]
)
def test_the_page_opens(view: dict[str, Any]) -> None:
    assert_no_bug(opened("validate", view=view))


@pytest.mark.parametrize("flag", ["0", "1"])
def test_a_link_starts_no_run(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_FLAG, flag)
    view = {"held": "run", "start run": True, "run": True, "steps": 5}
    page = opened("validate", HERE, view)
    assert_no_bug(page)
    assert runs().last is None
    assert not searches().busy()
    assert ("Run here" in [button.label for button in page.button]) is (flag == "1")


VIEWS = st.fixed_dictionaries(
    {},
    optional={
        "held": st.sampled_from(["published", "measured", "run", "nonsense", 7, None]),
        "source": st.sampled_from(
            ["zero_bubble", "all sources", "heldout/papers", "uploaded file", "../secret", 3, None]
        ),
        "steps": st.sampled_from([5, 10, 7, "x", -1]),
        "start run": st.booleans(),
    },
)
CLUSTERS = st.sampled_from(
    [{"preset": "this-machine", "num_devices": 2}, {"preset": "this-machine"}, {"preset": "dgx-h100"}, {"preset": 5}, 7]
)
MODELS = st.sampled_from([SMALL["model"], {"preset": "resnet-50"}, {"preset": "nothing"}, None])


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["0", "1"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(view=VIEWS, cluster=CLUSTERS, model=MODELS)
def test_no_link_shows_an_exception(view: dict[str, Any], cluster: object, model: object, flag: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_FLAG, flag)
        assert_no_bug(opened("validate", {**SMALL, "cluster": cluster, "model": model}, view))
    assert runs().last is None
    assert not searches().busy()


def test_published_runs_of_the_repository_are_offered() -> None:
    page = opened("validate")
    [source] = [box for box in page.selectbox if box.label == "Source"]
    assert "zero_bubble" in source.options
    assert "papers (held out)" in source.options
    assert "bridge_experts (validation)" in source.options
    assert "Predict runs" in [button.label for button in page.button]


@pytest.mark.parametrize(("source", "words"), [("zero_bubble", "In-sample"), ("heldout/papers", "was fitted on these")])
def test_a_source_is_said_to_be_fitted_or_held_out(source: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = published._read(source)
    assert read.runs
    job = StartedJob(TaskRequest(predict_published, ([replace(read, runs=read.runs[:1])],), reports_progress=True))
    job.run_here()
    monkeypatch.setattr(Jobs, "find", lambda *_: job)
    page = opened("validate", view={"source": source})
    assert_no_bug(page)
    [caption] = [caption.value for caption in page.caption if "errors: " in caption.value]
    assert words in caption


@pytest.mark.parametrize("address", ["localhost", "0.0.0.0"])
def test_folders_of_the_server_are_shown_to_its_own_machine_only(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    option = streamlit.get_option
    monkeypatch.setattr(streamlit, "get_option", lambda key: address if key == "server.address" else option(key))
    folder = Path.cwd() / "simplan-out" / "dashboard" / "20261129-of-mine"
    ends: list[dict[str, Any]] = [
        {"stopped": True, "failed": False},
        {"stopped": False, "failed": True, "stderr_tail": f"error: {folder}/rank0.txt: is damaged"},
        {"stopped": False, "failed": False},
    ]
    for end in ends:
        run = SimpleNamespace(folder=folder, is_going=False, steps_done=3, **end)
        monkeypatch.setattr(runs(), "last", run)
        page = opened("validate", HERE, {"held": "run"})
        assert_no_bug(page)
        text = "\n".join(shown.value for shown in (*page.caption, *page.warning)).replace("\\", "")
        assert "20261129-of-mine" in text
        assert (str(Path.cwd()) in text) is (address == "localhost")


def test_terms_of_a_comparison_sum_to_its_error() -> None:
    def page() -> None:
        from app import uploads
        from app.figures.validation import result_of_files
        from app.views.validate import show_result
        from tests.app.test_uploads import made

        prediction, measurement = made()
        show_result(result_of_files(uploads.prediction_of("p", prediction), uploads.measured_of("m", measurement)))

    shown = AppTest.from_function(page, default_timeout=600).run()
    assert_no_bug(shown)
    _, terms, splits = (table.value for table in shown.dataframe)
    prediction, measurement = (json.loads(content) for content in made())
    measured_s = statistics.median(measurement["step_times_s"])
    assert terms["difference, ms"].sum() == pytest.approx(1e3 * (prediction["step_time_s"] - measured_s), abs=0.01)
    for _, split in splits.groupby("rank"):
        assert split["predicted, ms"].sum() == pytest.approx(1e3 * prediction["step_time_s"], abs=0.01)


def test_a_log_is_shown_beside_the_prediction() -> None:
    def page() -> None:
        from app import uploads
        from app.figures.validation import result_of_files
        from app.views.validate import show_result
        from tests.app.test_uploads import made

        logged = uploads.measured_of("log.yaml", b"step_times_s: [0.35, 0.35]\npeak_device_gib: 20\n")
        show_result(result_of_files(uploads.prediction_of("p", made()[0]), logged))

    shown = AppTest.from_function(page, default_timeout=600).run()
    assert_no_bug(shown)
    assert {metric.label: metric.value for metric in shown.metric}["Measured step"] == "350 ms"
    tables = [table.value for table in shown.dataframe]
    assert [table.columns[0] for table in tables] == ["part"]
    [words] = [info.value for info in shown.info]
    prediction_s = json.loads(made()[0])["step_time_s"]
    assert words.startswith(f"**Your run is {100 * (prediction_s / 0.35 - 1):.1f} % faster than predicted**")
    changes = [text.value for text in shown.markdown if "than predicted" in text.value]
    assert changes
    assert all("a step: your run is" in text and "GiB, measured 20.00" in text for text in changes)
    assert not shown.button, "the prediction is a file, so that there is no scenario to change"
    [parts] = tables
    assert all(words == "" or "x " in words for words in parts["slowdown alone"])
    assert parts["predicted, ms"].sum() == pytest.approx(1e3 * prediction_s, rel=0.02)


def test_measurement_is_compared_with_the_current_scenario() -> None:
    """Numbers equal those from an uploaded prediction; a measurement of another job is refused in a sentence."""
    document = yaml.safe_load((SCENARIOS / "1f1b.yaml").read_text())
    document.pop("expect", None)
    page = opened("validate", document, {"held": "measured"})
    assert "prediction.json" not in [uploader.label for uploader in page.file_uploader]
    prediction, measurement = made()
    page.file_uploader(key="measurement file").upload("m.json", measurement, "application/json").run()
    assert_no_bug(page)
    values = {metric.label: metric.value for metric in page.metric}
    assert values["Predicted step"] == format_time(json.loads(prediction)["step_time_s"])
    assert values["Your run"] == "10.0 % slower"
    page = opened("validate", dict(SMALL), {"held": "measured"})
    page.file_uploader(key="measurement file").upload("m.json", measurement, "application/json").run()
    assert "differs between prediction and measurement" in page.warning[0].value


def test_log_of_another_framework_is_said_before_its_error() -> None:
    small = {**JOB, "model": {"preset": "gpt2-124m"}, "plan": {"dp_replicate": 2, "microbatch_size": 16}}
    small["cluster"] = {"preset": "dgx-h100", "num_devices": 2}
    for software, warns in (("torch", True), ("megatron-core", False)):
        page = opened("validate", {**small, "software": software}, {"held": "measured"})
        page.file_uploader(key="measurement file").upload("log.txt", LOG.encode(), "text/plain").run()
        assert_no_bug(page)
        assert page.info, "compared all the same"
        said = [box.value.replace("\\", "") for box in page.warning]
        assert [says(text, "Megatron-LM", "software: torch") for text in said] == [True] * warns


JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "seq_len": 4096},
    "cluster": {"preset": "dgx-h100", "num_devices": 32, "nic_gbit": 200},
    "training": {"global_batch_size": 128, "precision": "bf16", "optimizer": "adamw"},
    "software": "torch",
    "plan": {"dp_shard": 16, "pp": 2},
}


def step_time_s(document: Any) -> float:
    return summarize_step(parse_scenario(document_text(document)).job).step_time_s


@pytest.mark.parametrize(
    ("change", "run"),
    [
        ("plan.recompute: full", {"plan": {**JOB["plan"], "recompute": "full"}}),
        (
            "1/8 of the bandwidth between nodes (one network card of 8)",
            {"cluster": {**JOB["cluster"], "nic_gbit": 25}},
        ),
    ],
)
def test_applied_explanation_predicts_the_run(change: str, run: dict[str, Any]) -> None:
    """The log is that of the changed job: the button of its row makes the prediction equal to it."""
    seconds = step_time_s({**JOB, **run})
    page = opened("validate", JOB, {"held": "measured"})
    log = f"step_times_s: [{seconds}, {seconds}]".encode()
    page.file_uploader(key="measurement file").upload("log.yaml", log, "text/yaml").run()
    assert_no_bug(page)
    assert "is as predicted" not in page.info[0].value
    page.button(key=f"explanation {change}").click().run()
    assert_no_bug(page)
    assert page.info[0].value == "**Your run is as predicted**, within the 90 % interval."


def test_settings_of_explanations_are_the_predicted_changes() -> None:
    """Each of them read from a scenario's text is the job of the hypothesis, by its step time."""
    job = parse_scenario(document_text(JOB)).job
    seen: set[str] = set()
    for factor in (0.6, 0.9, 1.1, 1.3, 2.0, 10.0):
        for hypothesis in hypotheses(job, step_time_s(JOB), MeasuredTotals(factor * step_time_s(JOB))) or ():
            if hypothesis.settings:
                assert step_time_s(with_settings(JOB, hypothesis.settings)) == pytest.approx(
                    hypothesis.step_time_s, rel=1e-6
                )
                seen |= hypothesis.settings.keys()
    assert {"plan.recompute", "cluster.inter_link", "cluster.stragglers", "software.compiled"} <= seen


def test_pasted_log_is_compared() -> None:
    page = opened("plan")
    page.session_state["details paste"] = True
    page.run()
    page.text_area(key="paste text").set_value("step_times_s: [0.05, 0.05]")
    page.button(key="paste read").click().run()
    assert_no_bug(page)
    assert {metric.label: metric.value for metric in page.metric}["Measured step"] == "50 ms"
    page.button(key="forget log").click().run()
    assert_no_bug(page)
    assert "pasted log" not in page.session_state


def test_small_example_runs_on_this_machine() -> None:
    """It is there with another cluster, and where the scenario has an error, such as 64 devices of this machine."""
    for cluster in (SMALL["cluster"], {"preset": "this-machine", "num_devices": 4096}):
        page = opened("validate", {**SMALL, "cluster": cluster}, {"held": "run"})
        assert_no_bug(page)
        page.button(key="small example").click().run()
        assert_no_bug(page)
        document = page.session_state["simplan document"]
        assert parse_scenario(document_text(document)).job == load_scenario(DEMO).job


def test_prediction_for_thousands_of_devices_needs_no_upload() -> None:
    cluster = {"preset": "dgx-h100", "num_devices": 8192}
    plan = {"dp_replicate": 8192}
    document = {**SMALL, "cluster": cluster, "training": {"global_batch_size": 8192}, "plan": plan}
    page = opened("validate", document, {"held": "measured"})
    page.file_uploader(key="measurement file").upload("log.yaml", b"step_times_s: [0.05, 0.05]", "text/yaml").run()
    assert_no_bug(page)
    assert {metric.label: metric.value for metric in page.metric}["Measured step"] == "50 ms"


def test_installed_package_opens_on_what_works_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "_sources", lambda _: [])
    page = opened("validate")
    assert_no_bug(page)
    [part] = [box for box in page.selectbox if box.label == "Measurements"]
    assert part.value == "measured"
    assert [box.value for box in page.selectbox if box.label == "Prediction"] == ["scenario"]


def test_bar_moves_while_a_machine_is_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run("nonsense: 1", "x", 5)
    run.close()
    for line, share in (("calibrating with 2 ranks ...", 0.0), ("calibrating with 2 ranks: 28 of 100", 0.28)):
        (run.folder / "stderr.txt").write_text(f"note: x\n{line}\n")
        done, words = run.progress
        assert done == share
        assert words.startswith(f"{line} (")
    (run.folder / "rank0.steps.jsonl").write_text("{}\n{}\n")
    assert run.progress == (2 / 7, "step 2")
