"""``simplan search`` as a user starts it."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from simplan import catalog
from simplan.cli.search.command import slow_search
from simplan.search import RANGES, SearchSpace
from tests.cli.calls import Simplan, refused
from tests.interrupts import heed_interrupts
from tests.jobs import job_of
from tests.support.problems import says

SCENARIO = """\
name: small
model: {family: gpt, num_hidden_layers: 4, hidden_size: 64, num_attention_heads: 4, vocab_size: 256, seq_len: 32}
cluster: {preset: dgx-h100, num_devices: 2}
training: {global_batch_size: 8}
search: {microbatch_size: [1, 2], schedule: [1f1b, zb-h1], recompute: [none, full], top: 3}
"""

LARGE = """\
name: large
model: {preset: llama3-8b}
cluster: {preset: dgx-h100, num_nodes: 4}
training: {global_batch_size: 512, precision: bf16}
search: {cp: 1, tp: [1, 2], top: 1000}
"""
"""Its first plans are soon known; to rank a thousand takes long."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "search.yaml"
    path.write_text(SCENARIO)
    return path


def test_the_report_says_what_is_best_and_why_not_the_others(simplan: Simplan, file: Path) -> None:
    result = simplan("search", file)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("small: best of ")
    for words in ("bottleneck", "sensitivity", "Ranked", "Outcomes of", "rejected: split_backward_recompute", "Next"):
        assert words in result.stdout
    assert "\033" not in result.stdout
    assert f"  simplan search {file} --save-plan plan-2.yaml --rank 2\n" in result.stdout
    assert says(result.stdout, "5 % of the device memory", "no plan is rejected")


def test_plans_whose_tp_does_not_divide_the_vocabulary_are_counted(simplan: Simplan) -> None:
    """50,257 is 29 times a prime. Megatron pads it, torch does not."""
    job = ["gpt2-124m", "--gpus", "2", "--global-batch-size", "4", "--pp", "1"]
    unpadded, padded = (
        json.loads(simplan("search", *job, "--json", *size).stdout)["space"]["rejected"]
        for size in ([], ["--set", "model.vocab_size=50304"])
    )
    assert unpadded["tp_divides_vocabulary"] > 0
    assert "tp_divides_vocabulary" not in padded


@pytest.mark.slow
def test_search_keeps_5_percent_of_memory_free(simplan: Simplan, file: Path) -> None:
    file.write_text(SCENARIO.replace("[1f1b, zb-h1], recompute: [none, full]", "1f1b, recompute: none"))
    (best, *_) = json.loads(simplan("search", file, "--top", "1", "--json").stdout)["ranked"]
    needed = 2**30 * best["peak_memory_gib"]["device"]
    device = f"num_devices: 2, device: {{memory_bytes: {int(1.04 * needed)}}}"
    file.write_text(file.read_text().replace("num_devices: 2", device))
    free = json.loads(simplan("search", file, "--json").stdout)
    assert free["max_memory_fraction"] == 0.95
    assert all(plan["peak_memory_gib"]["device"] * 2**30 <= 0.95 * 1.04 * needed for plan in free["ranked"])
    assert free["space"]["in_headroom"] > 0
    shown = simplan("search", file, "--top", "1").stdout
    assert "5 % of the device memory is kept free; " in shown
    assert "without it (--max-memory-fraction 1)\n" in shown
    whole = json.loads(simplan("search", file, "--max-memory-fraction", "1", "--json").stdout)
    assert whole["best"]["plan"] == best["plan"]
    assert whole["best"]["memory_verdict"] == "may not fit"
    low, high = whole["best"]["peak_memory_interval_gib"]["device"]
    assert low < best["peak_memory_gib"]["device"] < high
    assert "kept free" not in simplan("search", file, "--top", "1", "--max-memory-fraction", "1").stdout


def test_ranked_plans_say_why_they_lost(simplan: Simplan, file: Path) -> None:
    """Text: percent of the best's step; JSON: seconds. Both are the largest difference of the breakdown."""
    shown = simplan("search", file).stdout.partition("Ranked\n")[2].splitlines()
    assert "main difference" in shown[0]
    first, *others = json.loads(simplan("search", file, "--json").stdout)["ranked"]
    assert first["main_difference"] is None
    for line, plan in zip(shown[2:], others, strict=False):
        more_s = {
            name: share * plan["step_time_s"] - first["shares"][name] * first["step_time_s"]
            for name, share in plan["shares"].items()
        }
        name = max(more_s, key=lambda plan: more_s[plan])
        assert plan["main_difference"] == {"category": name, "seconds": pytest.approx(more_s[name])}
        assert f"{100 * more_s[name] / first['step_time_s']:+.1f} % {name.replace('_', ' ')}" in line


def test_another_ranked_plan_is_saved(simplan: Simplan, file: Path, tmp_path: Path) -> None:
    result = simplan("search", file, "--save-plan", "plan.yaml", "--rank", "2", "--json")
    assert (result.returncode, result.stderr) == (0, "wrote plan.yaml\n")
    second = json.loads(result.stdout)["ranked"][1]
    predicted = json.loads(simplan("predict", "plan.yaml", "--json").stdout)
    assert predicted["inputs"]["plan"] == second["plan"]
    assert predicted["step_time_s"] == pytest.approx(second["step_time_s"], rel=1e-9)
    assert predicted["peak_memory_gib"] == second["peak_memory_gib"]
    saved = (tmp_path / "plan.yaml").read_text()
    assert saved.startswith("# Plan 2 of the ranking of `simplan search ")
    assert (yaml.safe_load(saved)["name"], "search" in yaml.safe_load(saved)) == ("small-2", False)


def test_a_plan_is_saved_with_its_software(simplan: Simplan, file: Path, tmp_path: Path) -> None:
    file.write_text(SCENARIO.replace("search: {", "search: {compiled: [false, true], "))
    result = simplan("search", file, "--save-plan", "plan.yaml")
    assert "microbatch size 2, compiled true\n" in result.stdout
    assert "\n  instead      compiled false: step time " in result.stdout
    best = json.loads(simplan("search", file, "--json").stdout)["best"]
    assert best["software"] == {"compiled": True}
    saved = json.loads(simplan("predict", "plan.yaml", "--json").stdout)
    assert saved["step_time_s"] == pytest.approx(best["step_time_s"], rel=1e-9)
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["software"] == {"preset": "torch", "compiled": True}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rank", "4", "--save-plan", "plan.yaml"), "--rank = 4: ... 3 plans ... give --top 4"),
        (("--rank", "2"), "--rank = 2: chooses ... --save-plan"),
        (
            ("--rank", "2", "--save-plan", "plan.yaml", "--largest", "microbatch_size"),
            "--rank = 2: cannot go with --largest, which finds one plan",
        ),
    ],
)
def test_a_rank_that_cannot_be_saved_is_refused(
    simplan: Simplan, file: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    result = simplan("search", file, *flags)
    assert (result.returncode, result.stdout) == (2, "")
    assert says(result.stderr, message)
    assert not (tmp_path / "plan.yaml").exists()


@pytest.mark.slow
def test_fewer_plans_than_the_rank_to_save(simplan: Simplan, file: Path, tmp_path: Path) -> None:
    """The report is printed all the same."""
    result = simplan("search", file, "--top", "1000", "--rank", "1000", "--save-plan", "plan.yaml")
    assert result.returncode == 2
    assert "Ranked" in result.stdout
    assert re.search(r"--rank = 1000: is more than the \d+ ranked plans", result.stderr)
    assert not (tmp_path / "plan.yaml").exists()


def test_no_plan_is_exit_code_3_and_says_what_would_make_one(simplan: Simplan, file: Path) -> None:
    text = SCENARIO.replace("preset: dgx-h100", "preset: dgx-h100, device: {memory_bytes: 800000000}")
    file.write_text(text)
    result = simplan("search", file, "--jobs", "1")  # loky warns of what workers leave on a machine that is too busy
    assert (result.returncode, result.stderr) == (3, "")
    assert result.stdout.startswith("small: none of ")
    for words in ("Near misses", " over, needs ", "Changes that make a plan feasible", "devices with "):
        assert words in result.stdout


def test_the_largest_that_fits(simplan: Simplan, file: Path) -> None:
    result = simplan("search", file, "--largest", "microbatch_size", "--save-plan", "plan.yaml")
    assert (result.returncode, result.stderr) == (0, "wrote plan.yaml\n")
    assert result.stdout.startswith("small: microbatch_size = 2 is the largest of all sizes")
    assert yaml.safe_load((file.parent / "plan.yaml").read_text())["plan"]["microbatch_size"] == 2
    saved = (file.parent / "plan.yaml").read_text()
    assert says(saved.splitlines()[0], "# ", "microbatch_size = 2", "largest", "`simplan search ")
    refused(simplan("search", file, "--largest", "seqlen"), "did you mean seq_len?")


def test_batch_that_was_assumed_does_not_bound_the_largest(simplan: Simplan) -> None:
    asked = ("search", "gpt2-124m", "--gpus", "1", "--largest")
    sentence = (
        "--largest = microbatch_size: is at most the batch of a device, and the batch of 1 was assumed; give --glo"
    )
    refused(simplan(*asked, "microbatch_size"), sentence)
    tokens = simplan(*asked, "microbatch_size", "--global-batch-tokens", "4096", "--json")
    assert json.loads(tokens.stdout)["value"] == 4
    assert "Assumptions\n" in simplan(*asked, "num_hidden_layers", "--set", "search.recompute=[none]").stdout


def test_the_longest_sequence_is_saved_with_its_positions(simplan: Simplan, file: Path) -> None:
    """GPT has a row for every position."""
    memory = "num_devices: 2, device: {memory_bytes: 1500000000}"
    text = SCENARIO.partition("search: ")[0].replace("num_devices: 2", memory)
    file.write_text(text + "search: {pp: 1, tp: 1, recompute: none}\n")
    result = simplan("search", file, "--largest", "seq_len", "--save-plan", "plan.yaml")
    assert result.returncode == 0
    assert result.stdout.endswith("Next\n  simplan predict plan.yaml\n")
    model = yaml.safe_load((file.parent / "plan.yaml").read_text())["model"]
    assert model["seq_len"] == model["max_position_embeddings"] > 1024
    assert simplan("predict", "plan.yaml", "--json").returncode == 0


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ("{objectiv: memory}", "search.objectiv: is not a known key; did you mean objective"),
        ("{schedule: [1f1c]}", 'search.schedule.0 = "1f1c": ... schedule ... searched; did you mean 1f1b?'),
        ("{tp: [2, 0]}", "search.tp.1 = 0: must be at least 1"),
        (
            "{zero_stage: [1, 2]}\nsoftware: megatron-core",
            "zero_stage 0 or 1 ... modeled; write [1]",
        ),
        (
            "{compiled: [true, false]}\nsoftware: megatron-core",
            "search.compiled = [true, false]: ... option of megatron-core; ... cuda_graphs",
        ),
        ("{stage_layers: [3]}", "plan.stage_layers ... --save-plan"),
        ("{recompute_layers: 3}", "search.recompute_layers = 3: ... known choice; known: ... least"),
        ("{}\nplan: {}", "search: cannot go with plan; keep one of the two"),
        ("{}\nexpect: [{metric: fits, value: true}]", "expect: is about the prediction of one plan"),
    ],
)
def test_a_wrong_search_is_refused_with_its_line(simplan: Simplan, file: Path, search: str, message: str) -> None:
    file.write_text("".join(SCENARIO.partition("search: ")[:2]) + search + "\n")
    refused(simplan("search", file), f"{file}:", message)


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ("{tp: [8]}", "search.tp = [8]: ... tp x cp x pp x dp_replicate x dp_shard = 2 ... tp"),
        ("{dp_shard: 3, dp_replicate: 1}", "search = dp_replicate [1], dp_shard [3]: ... tp x cp x pp x"),
        ("{pp: 2, schedule: 1f1b, virtual_stages: 2}", "search = pp [2], schedule ["),
    ],
)
def test_ranges_without_a_plan_are_refused(simplan: Simplan, file: Path, search: str, message: str) -> None:
    file.write_text("".join(SCENARIO.partition("search: ")[:2]) + search + "\n")
    refused(simplan("search", file), message)


def test_predict_and_search_send_each_other_their_files(simplan: Simplan, file: Path, scenario: Path) -> None:
    assert "run `simplan search FILE --save-plan PLAN.yaml`" in simplan("predict", file).stderr
    assert "write search: {} in its place" in simplan("search", scenario).stderr


def test_show_lists_every_key(simplan: Simplan) -> None:
    rows = json.loads(simplan("show", "search-space", "--json").stdout)["entries"]
    assert {row["name"] for row in rows} == set(SearchSpace.model_fields)
    assert [row["name"] for row in rows][: len(RANGES)] == list(RANGES)


@pytest.mark.slow
def test_search_then_predict_run_and_compare_the_plan_it_saved(simplan: Simplan, file: Path) -> None:
    text = SCENARIO.replace("preset: dgx-h100", "preset: this-machine").replace("size: 8}", "size: 8, precision: fp32}")
    file.write_text(
        text.replace(
            "microbatch_size: [1, 2], schedule: [1f1b, zb-h1], recompute: [none, full]",
            "microbatch_size: 2, recompute: none, tp: 1, schedule: 1f1b",
        )
    )
    refused(simplan("search", file), "run `simplan calibrate SCENARIO` first")
    calibration = ("--calibration", "calibration.json")
    assert simplan("calibrate", file, "--budget", "5", *calibration).returncode == 0
    searched = json.loads(simplan("search", file, "--save-plan", "plan.yaml", "--json", *calibration).stdout)
    predicted = json.loads(simplan("predict", "plan.yaml", "-o", "prediction.json", "--json", *calibration).stdout)
    assert predicted["step_time_s"] == pytest.approx(searched["best"]["step_time_s"])
    run = simplan("run", "plan.yaml", "-o", "out", "--steps", "3", *calibration)
    assert run.returncode == 0, run.stderr
    compared = simplan("compare", "prediction.json", "out/measurement.json")
    assert compared.returncode == 0
    assert "step time" in compared.stdout


def test_a_search_that_takes_long_is_announced() -> None:
    """Only where ranks share cores, and there are many plans."""
    job = job_of("llama3-70b", cluster=catalog.cluster("dgx-h100", 128), global_batch_size=512)
    for name in ("torch", "megatron-core"):
        assert slow_search(replace(job, software=catalog.software(name)), SearchSpace()) == ""
    here = replace(job, cluster=job.cluster.model_copy(update={"cores_per_node": 64}))
    assert re.match(r"\d+,\d{3} plans are simulated one by one", slow_search(here, SearchSpace()))
    assert slow_search(here, SearchSpace(tp=(8,), pp=(4,), schedule=("1f1b",))) == ""


def test_interrupting_prints_the_best_so_far(tmp_path: Path, environment: dict[str, str]) -> None:
    """On a terminal, whose progress says when there is a best one."""
    (tmp_path / "large.yaml").write_text(LARGE)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "simplan", "search", "large.yaml", "--save-plan", "plan.yaml", "--jobs", "1"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        preexec_fn=heed_interrupts,
    ) as process:
        os.close(theirs)
        seen = ""
        while "best" not in seen:
            seen += os.read(ours, 4096).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=600)
    os.close(ours)
    assert process.returncode == 130
    assert re.match(r"large: stopped; .*first [\d,]+ plans", out)
    saved = (tmp_path / "plan.yaml").read_text()
    assert says(saved.splitlines()[0], "# ", "`simplan search large.yaml`", "stopped")


@pytest.mark.parametrize(
    ("phase", "workers", "words"),
    [
        pytest.param("bounding candidates", 0, "stopped; best of the first", marks=pytest.mark.slow),
        ("bounding candidates", 1, "stopped; best of the first"),  # while they import
        pytest.param("simulating plans", 2, "stopped; best of the first", marks=pytest.mark.slow),
        pytest.param("explaining plan", 2, "stopped; best of", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_all_processes_in_every_phase(
    tmp_path: Path, environment: dict[str, str], phase: str, workers: int, words: str
) -> None:
    """A terminal's Ctrl-C goes to the workers too."""
    text = LARGE if phase != "explaining plan" else LARGE.replace("1000", "30").replace("[1, 2]", "2, pp: [4, 8]")
    (tmp_path / "large.yaml").write_text(text)
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "simplan", "search", "large.yaml", "--jobs", "2"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    ) as process:
        os.close(theirs)
        seen = ""
        while phase not in seen or _num_workers(process.pid) < workers:
            seen += os.read(ours, 4096).decode(errors="replace")
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=600)
    rest = _until_closed(ours)  # by all of its processes
    assert process.returncode == 130
    assert out.startswith(f"large: {words}")
    assert "Traceback" not in seen + rest
    assert "interrupted" in rest


def _num_workers(parent: int) -> int:
    """Number of children of a process that run a call or import what it needs."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return sum("popen_loky_posix" in Path(f"/proc/{child}/cmdline").read_text() for child in children)


def _until_closed(terminal: int) -> str:
    """What is still written to a terminal, until no process has it open."""
    output = b""
    with suppress(OSError):  # at the end
        while more := os.read(terminal, 4096):
            output += more
    os.close(terminal)
    return output.decode(errors="replace")


TODAY = """name: today
model: {preset: llama3.2-1b, seq_len: 2048}
cluster: {preset: dgx-h100, num_devices: 2}
training: {global_batch_size: 8}
software: megatron-core
plan: {tp: 2}
"""


def test_a_search_from_the_plan_of_today_says_what_to_change(simplan: Simplan, tmp_path: Path) -> None:
    file = tmp_path / "today.yaml"
    file.write_text(TODAY)
    arguments = ["search", "--from-current", file, "--pp", "1"]
    document = json.loads(simplan(*arguments, "--json").stdout)
    switch, best = document["switch"], document["best"]
    assert switch["best"]["step_time_s"] == pytest.approx(best["step_time_s"], rel=1e-9)
    assert switch["current"]["step_time_s"] == json.loads(simplan("predict", file, "--json").stdout)["step_time_s"]
    assert switch["step_time_change"] < -0.05, "a model of 1 B needs no tensor parallelism"
    changed = dict(switch["current"]["plan"])
    for change in switch["changes"]:
        section, _, key = change["key"].partition(".")
        assert section == "plan"
        assert changed[key] == change["before"]
        changed[key] = change["after"]
    assert changed == switch["best"]["plan"]
    text = simplan(*arguments).stdout
    assert "less time a step" in text
    assert "plan.tp 2 -> " in text
    assert "can be resharded" in text
    file.write_text(TODAY.replace("{tp: 2}", json.dumps({k: v for k, v in best["plan"].items() if v is not None})))
    assert "The current plan is the best one" in simplan(*arguments).stdout


@pytest.mark.slow
def test_a_search_from_the_plan_of_options_says_why_it_is_slower(simplan: Simplan, tmp_path: Path) -> None:
    """The command is the last one of the report without a plan; the reason is that of ``explain``."""
    job = ["llama3.2-1b", "--gpus", "2", "--seq-len", "1024", "--global-batch-size", "4"]
    job += ["--software", "megatron-core"]
    plain = simplan("search", *job).stdout
    *_, heading, command = plain.splitlines()
    assert heading.strip().startswith("why another plan is slower")
    assert re.search(r"needs (\S+) GiB of 75\.15 GiB \(95 % of 79\.11 GiB\)", plain)
    suggested = simplan(*shlex.split(command)[1:]).stdout
    assert suggested.splitlines()[:4] == plain.splitlines()[:4], "all plans are searched"
    assert "From the best plan with these options to the best one" in suggested
    document = json.loads(simplan("search", *job, "--pp", "2", "--from-current", "--json").stdout)
    narrow = ["search", *job, "--pp", "2", "--save-plan", tmp_path / "mine.yaml"]
    best_with_options = json.loads(simplan(*narrow, "--json").stdout)["best"]
    assert document["switch"]["current"]["plan"] == best_with_options["plan"], "what is not given is searched"
    assert best_with_options["plan"]["pp"] == 2
    assert document["best"]["plan"]["pp"] == 1
    text = simplan("search", *job, "--pp", "2", "--from-current", "--save-plan", tmp_path / "best.yaml").stdout
    explained = simplan("explain", tmp_path / "mine.yaml", tmp_path / "best.yaml").stdout.splitlines()[1]
    reason = explained.removeprefix("The second step")
    assert f"  why          The step of the best plan{reason}" in text.splitlines()
    file = tmp_path / "space.yaml"
    file.write_text(TODAY.replace("plan: {tp: 2}", "search: {pp: [1]}"))
    of_file = json.loads(simplan("search", file, "--pp", "2", "--from-current", "--json").stdout)
    assert of_file["switch"]["current"]["plan"]["pp"] == 2
    assert of_file["best"]["plan"]["pp"] == 1, "the ranges of the file hold"
    refused(simplan("search", file, "--from-current"), "compares with a plan, and SCENARIO has none; give the options")
    unsharded = ["llama3-8b", "--gpus", "2", "--seq-len", "1024", "--global-batch-size", "2", "--dp-replicate", "2"]
    none = simplan("search", *unsharded, "--from-current")
    assert says(none.stdout, "From the plan with these options", "none", "fits in 95 %")
