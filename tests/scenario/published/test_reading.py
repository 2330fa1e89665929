"""Files of published runs: groups, and errors as sentences with their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from simplan import catalog
from simplan.accuracy.run import PublishedRun
from simplan.errors import SpecError
from simplan.scenario import load_scenario
from simplan.scenario.published.reading import parse_published, read_published
from tests.accuracy.runs import run, run_data, write_runs
from tests.support.problems import says
from tests.support.published import published_files

PUBLISHED = Path(__file__).resolve().parents[3] / "scenarios" / "published"
HELD_OUT = PUBLISHED.with_name("heldout")


def problems(file: Path) -> str:
    with pytest.raises(SpecError) as caught:
        read_published([file])
    return str(caught.value)


def runs_of(text: str) -> dict[str, PublishedRun]:
    return {run.id: run for run in parse_published(text, "f").runs or ()}


GROUPS = """
meta: {notes: [anything]}
software: megatron-lm-2022
cluster: {device: a100-sxm-80gb, devices_per_node: 8}
training: {precision: bf16, optimizer: adam}
measured: {source: a paper, assumed: [training.optimizer]}
runs:
- model: {preset: gpt2-124m}
  measured: {version: "2022"}
  runs:
  - name: a
    cluster: {num_devices: 4}
    training: {global_batch_size: 8}
    plan: {dp_replicate: 4}
    measured: {step_time_s: 1}
  - name: b
    model: {seq_len: 512}
    software: {layers: {attention: fused}}
    cluster: {num_devices: 2}
    training: {global_batch_size: 8, precision: fp16}
    plan: {pp: 2}
    measured: {step_time_s: 2, peak_allocated_gb: 10, assumed: []}
- name: c
  model: {preset: gpt2-1.5b}
  cluster: {num_devices: 1}
  training: {global_batch_size: 1}
  plan: {}
  measured: {oom: true}
"""


def test_run_has_the_sections_of_its_groups_and_its_own() -> None:
    runs = runs_of(GROUPS)
    a, b, c = (runs[name].known_job for name in "abc")
    assert [job.model.name for job in (a, b, c)] == ["gpt2-124m", "gpt2-124m", "gpt2-1.5b"]
    assert (a.model.seq_len, b.model.seq_len) == (1024, 512)
    assert [job.training.precision for job in (a, b, c)] == ["bf16", "fp16", "bf16"]
    assert [job.software.layers.attention for job in (a, b)] == ["unfused", "fused"]
    assert (runs["a"].measured.assumed, runs["b"].measured.assumed) == (("training.optimizer",), ())
    assert [runs[name].measured.version for name in "abc"] == ["2022", "2022", None]
    assert runs["b"].measured.memory_gib == {"allocated": pytest.approx(10e9 / 2**30)}
    assert runs["c"].measured.oom


def test_error_in_a_group_names_the_run_and_the_line_of_the_group() -> None:
    for wrong, right, place in (
        ("num_attention_head: 12", "seq_len: 512", "f:17:"),
        ("precison: bf16", "precision: bf16", "f:5:"),
    ):
        with pytest.raises(SpecError) as caught:
            parse_published(GROUPS.replace(right, wrong), "f")
        assert place in str(caught.value)
        assert f".{wrong.partition(':')[0]}: is not a known key; did you mean" in str(caught.value)


def test_scenario_with_measured_is_a_single_run(tmp_path: Path) -> None:
    """The same file is a scenario for the other commands, and may set any field of the software's profile."""
    data = run_data(
        software={"preset": "torch", "bucket_bytes": 1, "rates": {"attention_kernel": "flash2"}},
        plan={"dp_replicate": 4},
    )
    file = tmp_path / "one.yaml"
    file.write_text(yaml.safe_dump(data))
    [read] = read_published([file])
    [run] = read.runs or ()
    software = run.known_job.software
    assert load_scenario(file).job == run.job
    assert (software.bucket_bytes, software.rates.attention_kernel) == (1, "flash2")
    assert software.rates.traffic == catalog.software("torch").rates.traffic
    del data["measured"]
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(SpecError, match="is no option of torch"):
        load_scenario(file)


def test_fallback_has_no_constants_fitted_on_the_runs_of_its_framework() -> None:
    known, fallback = run(), run(software__fallback_for="nanotron")
    assert (known.fallback_for, fallback.fallback_for) == (None, "nanotron")
    software = fallback.known_job.software
    assert (software.rates.framework_efficiency, software.rates.fitted_on, software.vocab_multiple) == (1.0, None, 1)
    assert software.memory_spread == catalog.unfitted_memory_spread()
    assert software.state_bytes == known.known_job.software.state_bytes


def test_run_that_is_not_modeled_has_a_reason_in_place_of_a_job() -> None:
    adapters = run(training__task="lora", model__lora_rank=8)
    assert adapters.job is None
    assert says(adapters.reason or "", "training.task = lora: ", "megatron-lm-2022")


def test_notes_tell_what_is_assumed_and_where_settings_stand() -> None:
    sources = {"plan.grad_dtype": "its script", "plan.recompute": "its script"}
    noted = run(measured__assumed=["cluster.device"], measured__sources=sources, measured__notes=["no dropout"])
    assert noted.notes == ("assumed: cluster.device", "no dropout", "plan.grad_dtype, plan.recompute: its script")


def test_folder_is_read_with_its_other_files(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write_runs(tmp_path / "below" / "a.yaml", run_data("a"), run_data("b"))
    (tmp_path / "links.yaml").write_text("meta: {source: x}\nrecords: []\n")
    runs_of = {Path(read.file).name: read.runs for read in read_published([tmp_path])}
    assert runs_of["links.yaml"] is None
    assert [run.id for run in runs_of["a.yaml"] or ()] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"plan__microbatchsize": 2}, "run-1: plan.microbatchsize: ... known ... did you mean microbatch_size"),
        ({"plan__schedule": "1f2b"}, 'run-1: plan.schedule = "1f2b": ... known ... did you mean 1f1b?'),
        ({"cluster__device": "h1000"}, "run-1: cluster.device = h1000: is not in the catalog"),
        ({"cluster__num_devices": 8}, "the plan needs 4 devices and the cluster has 8"),
        ({"training__global_batch_size": 31}, "training.global_batch_size = 31: must be a multiple"),
        ({"plan__stage_layers": [3, 4]}, "run-1: plan.stage_layers"),
        ({"measured__peak_reserved_gib": 5e-324}, "measured.peak_reserved_gib = 5e-324: must be at least 1e-06"),
        ({"measured__step_time": 1.0}, "measured.step_time: is not ... known ... did you mean step_time_s"),
        ({"measured__oom": True}, "step_time_s ... true:"),
        ({"measured__samples_per_s_per_device": 410.0},
         "run-1: measured.samples_per_s_per_device = 410: ... step_time_s and num_devices ... 32.8, and "
         "training.global_batch_size = 32"),
        ({"software__fallback_for": 3}, "software.fallback_for = 3: must be the name of a framework"),
        ({"software__id": "torch"}, 'software.id = "torch": ... name ... profile; write'),
        ({"software__bucket_byte": 3}, "software.bucket_byte: is not ... known ... did you mean bucket_bytes"),
        ({"measured": {}}, "measured: is missing; add measured: {source: ...}"),
        ({"name": ""}, "name: is missing; add a name, unique over all files"),
    ],
)  # fmt: skip
def test_errors_are_sentences(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    told = problems(
        write_runs(tmp_path / "runs.yaml", run_data() | changes if "name" in changes else run_data(**changes))
    )
    assert says(told, sentence)
    assert f"{tmp_path / 'runs.yaml'}:" in told, "with its line"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("runs: {name: a}", "f:1:1: runs: must be a list of runs"),
        ("runs:\n- runs: 3", "f:2:3: runs.0.runs: must be a list of runs"),
        ("runs:\n- 3", "f:2:3: runs.0: must be a mapping (key: value)"),
    ],
)
def test_groups_are_lists_of_mappings(text: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_published(text, "f")
    assert sentence in str(caught.value)


def test_text_may_name_no_file() -> None:
    """A text comes from elsewhere, such as the dashboard."""
    with pytest.raises(SpecError, match=r"run-1: plan\.placement = .*names a file"):
        run(plan__placement="ranks.csv")


def test_name_is_used_once(tmp_path: Path) -> None:
    write_runs(tmp_path / "a.yaml", run_data("same"))
    write_runs(tmp_path / "b.yaml", run_data("same"))
    assert f"name = same: is the name of a run of {tmp_path / 'a.yaml'} as well" in problems(tmp_path)


def test_example_of_the_readme_is_read() -> None:
    text = (PUBLISHED / "README.md").read_text(encoding="utf-8")
    runs = runs_of(text.partition("```yaml\n")[2].partition("```")[0])
    assert [run.known_job.software.compiled for run in runs.values()] == [False, True]


def test_folder_without_files_is_refused(tmp_path: Path) -> None:
    assert "holds no file of runs (*.yaml); name another folder" in problems(tmp_path)


def test_held_out_runs_are_no_others() -> None:
    """None has a name or source of those that constants are fitted on; of small models, source, model and device."""

    def origins(folder: Path) -> dict[str, tuple[str, ...]]:
        origin_of: dict[str, tuple[str, ...]] = {}
        for read in (read for read in published_files() if Path(read.file).is_relative_to(folder)):
            for of_file in read.runs or ():
                origin: tuple[str, ...] = (of_file.measured.source.split(":")[0],)
                if Path(read.file).stem.startswith("small_models_"):
                    origin += (of_file.known_job.model.name, of_file.known_job.cluster.device.id)
                origin_of[of_file.id] = origin
        return origin_of

    held, seen = origins(HELD_OUT), origins(PUBLISHED)
    assert len(held) == 447
    assert not held.keys() & seen.keys()
    assert not set(held.values()) & set(seen.values())


def test_every_run_of_this_project_can_be_predicted() -> None:
    files = published_files()
    runs = [run for read in files for run in read.runs or ()]
    assert len(runs) == 599 + 447 + 132
    assert [run.reason for run in runs if run.job is None] == []
    without = {Path(read.file).stem for read in files if read.runs is None}
    assert {"collectives", "devices", "zero_bubble_profiles"} <= without


def test_models_have_as_many_parameters_as_their_source_prints() -> None:
    """llm-foundry prints them to the last digit; MPT's benchmark models are GPTs with learned positions."""
    [read] = read_published([PUBLISHED / "mosaic_llm_foundry_mpt.yaml"])
    printed = [(run.known_job.model.num_parameters, run.measured.num_parameters) for run in read.runs or ()]
    assert len(printed) > 100
    assert all(counted == source for counted, source in printed)
