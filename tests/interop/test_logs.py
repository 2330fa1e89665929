"""Logs of frameworks: public excerpts against what their authors state, and every kind of file against known numbers.

``tests/interop/logs`` has the numbers of public excerpts with their sources. The lines are written here in the layout
of each framework.
"""

from __future__ import annotations

import gzip
import json
import pickle
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplan.errors import SpecError
from simplan.interop.logs.formats import parse_run, read_run
from simplan.validate.logged_run import LoggedRun
from tests.support.yaml_files import read_yaml

LOGS = Path(__file__).parent / "logs"
WITHIN = 0.005
Entry = dict[str, Any]


def megatron_text(entry: Entry) -> str:
    """Lines of the last rank, with memory reports of two ranks, and timers between."""
    lines = ["[before the start of training step] datetime: 2021-05-25 18:00:00"]
    for number, elapsed_ms in entry["steps"]:
        if "step_time_line" in entry:
            lines.append(f"Step Time : {entry['step_time_line']}s GPU utilization: 58.2TFLOP/s/GPU")
        batch = entry.get("global_batch_size")
        size = "" if batch is None else f" global batch size: {batch:5d} |"
        line = (
            f" [2021-05-25 18:00:00] iteration {number:8d}/{1000:8d} | consumed samples: {4 * number:12d} | elapsed "
            f"time per iteration (ms): {elapsed_ms:.1f} | learning rate: 1.497E-04 |{size} lm loss: 8.238016E+00 | "
            "number of nan iterations:   0 |"
        )
        lines.append(wrapped(line) if entry.get("wrapped") else line)
        lines.append("time (ms) | forward-compute: 92.25 | optimizer: 42.31 | batch-generator: 2.72")
        if number == entry["steps"][0][0] and "max_mib" in entry:
            allocated, reserved = entry["max_mib"]
            for rank, part in ((0, 1.0), (7, 0.9)):
                lines.append(
                    f"[Rank {rank}] (after {number} iterations) memory (MB) | allocated: {0.8 * allocated} | max "
                    f"allocated: {part * allocated} | reserved: {reserved} | max reserved: {part * reserved}"
                )
    return "\n".join(lines)


def wrapped(line: str) -> str:
    """A line as a narrow terminal shows it."""
    words, rows = line.split(), [""]
    for word in words:
        if len(rows[-1]) + len(word) > 90:
            rows.append("")
        rows[-1] += f"{word} "
    return "\n".join(rows)


def torchtitan_text(entry: Entry) -> str:
    """Colored lines of two ranks."""
    lines = []
    for step, memory_gib, tokens_per_s in entry["steps"]:
        lines += [
            f"[rank{rank}]:[titan] 2025-06-04 08:51:48,074 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: "
            f"12.2254  \x1b[36mmemory: {memory_gib:5.2f}GiB(28.78%)  \x1b[34mtps: {tokens_per_s - rank:,}  "
            "\x1b[36mtflops: 21.73  \x1b[35mmfu: 2.20%\x1b[39m"
            for rank in (0, 1)
        ]
        lines.append(f"[rank0]:[titan] - validate step: {step + 5}  loss: 9.1  memory: 29.00GiB(30.5%)  tps: 12,000")
    return "\n".join(lines)


def nemo_text(entry: Entry) -> str:
    """A progress bar that is redrawn in one line, or a line for every step."""
    lines = []
    tokens = entry.get("tokens_per_sec_per_gpu", [])
    for index, (step, timing) in enumerate(entry["steps"]):
        if entry["layout"] == "bar":
            bar = (
                f"Epoch 0: : 100%|██████████| {step}/{step} [23:22<00:00, reduced_train_loss=0.186, "
                f"global_step={step - 1}.00, consumed_samples=51200.0, train_step_timing in s={timing}]"
            )
            lines += [bar, bar]
            continue
        used = entry.get("peak_memory_usage")
        memory = "" if used is None else f" peak_memory_usage: {used} | memory_allocated: {used // 2} |"
        rate = f" tokens_per_sec_per_gpu: {tokens[index]} |" if tokens else ""
        lines.append(
            f"Training epoch 0, iteration {step}/{step} | lr: 7.496e-06 | global_batch_size: "
            f"{entry['global_batch_size']} | global_step: {step} |{memory} reduced_train_loss: 11.96 | "
            f"train_step_timing in s: {timing} |{rate} consumed_samples: 6400"
        )
    return ("\r" if entry["layout"] == "bar" else "\n").join(lines)


def transformers_text(entry: Entry) -> str:
    """A dictionary and TrainOutput, or the list of metrics of an example script, after bars of an evaluation."""
    number, runtime = entry["num_steps"], entry["train_runtime"]
    bars = f"\r  50%|█████     | {number // 2}/{number} [02:19<02:19,  1.39s/it]\r 100%|██████████| 25/25 [00:02<00:00]"
    if ":" in runtime:
        return (
            f"  Total train batch size (w. parallel, distributed & accumulation) = {entry['global_batch_size']}\n"
            f"  Total optimization steps = {number}\n{bars}\n***** train metrics *****\n  train_loss = 10.5\n"
            f"  train_runtime            = {runtime}\n  train_samples            = 1024\n"
        )
    metrics = ", ".join(f"'{name}': {entry[name]}" for name in entry if name.startswith("train_"))
    return (
        f"{{'loss': 1.1, 'epoch': 0.15}}\n{bars}\n{{{metrics}, 'epoch': 0.15}}\n"
        f"TrainOutput(global_step={number}, training_loss=1.3, metrics={{{metrics}}})"
    )


LAYOUTS: dict[str, Callable[[Entry], str]] = {
    "megatron": megatron_text,
    "torchtitan": torchtitan_text,
    "nemo": nemo_text,
    "transformers": transformers_text,
}


def every_excerpt() -> Iterator[Any]:
    for framework in LAYOUTS:
        for entry in read_yaml(LOGS / f"{framework}.yaml"):
            yield pytest.param(framework, entry, id=f"{framework}-{entry['name']}")


EXCERPTS = tuple(every_excerpt())


def run_of(text: str, name: str = "train.log") -> LoggedRun:
    run = parse_run(text.encode(), name)
    assert isinstance(run, LoggedRun)
    return run


def typical(run: LoggedRun) -> float:
    """Median of the steady steps, in seconds or in seconds per token or sample."""
    return statistics.median(run.relative_times[index] for index in run.steady.indices)


@pytest.mark.parametrize(("framework", "entry"), EXCERPTS)
def test_step_time_of_public_logs(framework: str, entry: Entry) -> None:
    """The step time is within 0.5 % of the one that the authors of the log state, or of what follows from theirs."""
    run = run_of(LAYOUTS[framework](entry))
    if "stated_tokens_per_s_per_device" in entry:
        stated_s = 1 / entry["stated_tokens_per_s_per_device"]
        assert run.tokens_per_s_per_device is not None
    elif "stated_tokens_per_s" in entry:
        stated_s = entry["seq_len"] * entry["global_batch_size"] / entry["stated_tokens_per_s"]
    else:
        stated_s = entry["stated_s"]
    assert typical(run) == pytest.approx(stated_s, rel=WITHIN)
    assert run.global_batch_size in (None, entry.get("global_batch_size"))
    peaks = {column: values[0] for column, values in run.peaks.items()}
    if "max_mib" in entry:
        allocated, reserved = entry["max_mib"]
        assert peaks == pytest.approx({"allocated": allocated / 1024, "reserved": reserved / 1024})
    elif "stated_peak_reserved_gib" in entry:
        assert peaks == {"reserved": entry["stated_peak_reserved_gib"]}
    else:
        assert peaks == {}  # NeMo's peak_memory_usage does not say what it is


def test_peaks_and_sizes_of_logs() -> None:
    """Bytes of NeMo, and the sizes that torchtitan prints first."""
    line = (
        "Training epoch 0, iteration {0}/99 | global_batch_size: 128 | global_step: {0} | max_memory_reserved: "
        "127785762816 | max_memory_allocated: 115792977920 | train_step_timing in s: 6.08 | consumed_samples: 5888"
    )
    run = run_of("\n".join(line.format(step) for step in range(45, 48)))
    assert run.peaks == {"allocated": (115792977920 / 2**30,), "reserved": (127785762816 / 2**30,)}
    titan = run_of(
        "[rank0]: - Training starts at step 1, with local batch size 1, global batch size 8, sequence length 8192\n"
        "[rank0]: - step:  1  loss: 12.2  wps: 1,478  mfu: 8.65%\n"
    )
    assert (titan.global_batch_size, titan.seq_len, titan.tokens_per_s_per_device) == (8, 8192, (1478.0,))


def test_log_with_memory_reports_alone_gives_their_peaks() -> None:
    report = "[Rank {}] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: {} | max reserved: {}"

    run = run_of("\n".join(report.format(rank, 1024 * (rank + 1), 3072) for rank in range(2)))

    assert (run.peak_allocated_gib, run.peak_reserved_gib) == ((2.0,), (3.0,))
    assert run.step_times_s is None


def test_enough_public_logs() -> None:
    assert len(EXCERPTS) >= 20


def test_steps_and_interruptions_of_a_log() -> None:
    """Warm-up and outliers are named with what the log says before them; other ranks repeat steps."""
    lines = []
    for step in range(1, 41):
        tokens = {1: 400, 2: 3000, 20: 2000, 30: 2500}.get(step, 7000 + step % 3)
        if step == 20:
            lines.append("[rank0]:[titan] - Finished saving the checkpoint in 5.53 seconds.")
        lines += [
            f"[rank{rank}]:[titan] step: {step}  loss: 9.1  memory: 30.9GiB(3%)  tps: {tokens:,}" for rank in (0, 1)
        ]
    run = run_of("\n".join(lines))
    assert run.source == "40 lines with `tps` of torchtitan"
    assert run.steady.num_warmup == 2
    assert [run.number_of(index) for index in run.steady.outliers] == [20, 30]
    assert run.interruptions == {20: "checkpoint"}


def test_batch_that_ramps_up_counts_at_its_last_size() -> None:
    lines = [
        f" iteration {step:8d}/ 9 | elapsed time per iteration (ms): {100.0 * batch} | global batch size: {batch:5d} |"
        for step, batch in enumerate((16, 16, 32, 48, 48, 48), 1)
    ]
    run = run_of("\n".join(lines))
    assert (run.global_batch_size, run.step_times_s, run.step_numbers) == (48, (4.8, 4.8, 4.8), (4, 5, 6))
    assert run.notes == ("3 lines with a smaller batch left out: the batch ramps up",)


DEEPSPEED = (
    "[2022-08-29 06:58:{second:02d},{ms:03d}] [INFO] [timer.py:198:stop] 0/{step}, RunningAvgSamplesPerSec=232.5, "
    "CurrSamplesPerSec={rate}, MemAllocated=0.36GB, MaxMemAllocated={peak}GB"
)


def test_deepspeed_timers() -> None:
    """Throughput of all devices; time stamps give the time that the timer leaves out; set-up memory does not count."""
    setup = "MA 0.06 GB         Max_MA 40.26 GB         CA 0.71 GB         Max_CA 44 GB\n"
    text = setup + "\n".join(
        DEEPSPEED.format(second=step, ms=500, step=step, rate=rate, peak=peak)
        for step, rate, peak in ((10, 227.5, 15.06), (20, 228.0, 15.1), (30, 227.0, 15.06))
    )
    run = run_of(text)
    assert run.samples_per_s == (227.5, 228.0, 227.0)  # two intervals are too few for a median
    assert run.peaks == {"allocated": (15.1,)}
    lines = [DEEPSPEED.format(second=s, ms=250, step=2 * s, rate=227.5, peak=15) for s in range(4)]
    stamped = run_of("\n".join(lines))
    assert (stamped.step_times_s, stamped.step_numbers, stamped.samples_per_s) == ((0.5, 0.5, 0.5), (2, 4, 6), None)
    unstamped = run_of("\n".join([lines[0].partition(" [INFO]")[2], *lines[1:]]))
    assert (unstamped.step_times_s, unstamped.samples_per_s) == (None, (227.5,) * 4)
    logged = run_of("[timer.py:154:stop] 0/25, SamplesPerSec=6.302\n[timer.py:154:stop] 0/50, SamplesPerSec=6.4")
    assert (logged.samples_per_s, logged.source) == ((6.4,), "the last `SamplesPerSec` of DeepSpeed")
    assert any("running mean" in note for note in logged.notes)
    pipeline = run_of("steps: 10 loss: 5.5508 lm loss: 5.5 iter time (s): 0.936 samples/sec: 136.706\n" * 3)
    assert (pipeline.step_times_s, pipeline.samples_per_s) == ((0.936,), (136.706,))


def test_the_wall_time_of_two_timers_is_preferred() -> None:
    """Megatron-DeepSpeed prints both; DeepSpeed's timer leaves out a part of the step, but has the only peak."""
    text = "\n".join(
        f"[2024-03-07 15:27:{step:02d},646] [INFO] [timer.py:260:stop] epoch=0/micro_step={step}/global_step={step}, "
        "RunningAvgSamplesPerSec=58.7, CurrSamplesPerSec=61.35, MemAllocated=6.01GB, MaxMemAllocated=19.52GB\n"
        f" iteration {step:8d}/  317892 | elapsed time per iteration (ms): 14287.5 | global batch size:   768 | "
        "samples per second: 53.753 |"
        for step in (19, 20)
    )
    run = run_of(text)
    assert run.step_times_s == (14.2875, 14.2875)
    assert (run.samples_per_s, run.global_batch_size, run.peaks) == ((53.753,), 768, {"allocated": (19.52,)})


def test_progress_bars_without_timings_give_the_time_between_them() -> None:
    """The first line is of NVIDIA/NeMo-Framework-Launcher, issue 55, where the bar itself says 41.36 s per step."""
    bar = "Epoch 0:   1%|          | {}/77225 [{}<878:01:48, 41.36s/it, loss=3.1, v_num=, reduced_train_loss=3.090]\n"
    first = bar.format(795, "9:07:58")
    assert run_of(first).step_time_s == pytest.approx(41.36, abs=0.005)
    second, next_epoch = bar.format(895, "10:14:38"), bar.format(10, "0:06:50")
    assert run_of(first + second + next_epoch).step_time_s == 40.0


def test_trainer_state() -> None:
    history = [{"loss": 2.0, "step": 500}, {"train_runtime": 4835.1682, "train_steps_per_second": 0.242, "step": 1170}]
    state = {"global_step": 1170, "log_history": history}
    run = run_of(json.dumps(state), "trainer_state.json")
    assert run.step_time_s == pytest.approx(4835.1682 / 1170)
    results = run_of(json.dumps({"train_runtime": 100.0, "train_steps_per_second": 0.25}), "all_results.json")
    assert results.step_time_s == 4.0
    assert any("three decimals" in note for note in results.notes)
    with pytest.raises(SpecError, match="has no train_runtime: the run had not ended"):
        run_of(json.dumps({"global_step": 5, "log_history": history[:1]}), "trainer_state.json")
    with pytest.raises(SpecError, match="has neither a number of steps nor train_steps_per_second"):
        run_of(json.dumps({"train_runtime": 3225.4, "train_samples_per_second": 8.371}), "train_results.json")


def span(name: str, category: str, start_us: float, end_us: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "ts": start_us, "dur": end_us - start_us, "pid": 0, "tid": 7,
        "args": args,
    }  # fmt: skip


def trace() -> dict[str, Any]:
    """Two steps of 100 us on one GPU: 2 x 60 us of compute, 30 us of communication of which 10 us overlap."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}, {"ph": "i", "name": "x", "ts": "no"}]
    for step in (3, 4):
        at = 1000.0 + 100 * step
        events += [
            span(f"ProfilerStep#{step}", "user_annotation", at, at + 100),
            span("aten::mm", "cpu_op", at, at + 20),
            span("gemm", "kernel", at + 5, at + 45, device=0),
            span("gelu", "kernel", at + 40, at + 65, device=0),
            span("ncclDevKernel_AllReduce_Sum_bf16", "kernel", at + 55, at + 85, device=0, stream=20),
        ]
    memory = {"Device Type": 1, "Total Allocated": 3 * 2**30, "Total Reserved": 4 * 2**30}
    events.append({"ph": "i", "name": "[memory]", "ts": 1310, "args": memory})
    return {"traceEvents": events, "distributedInfo": {"rank": 1, "world_size": 2}}


@pytest.mark.parametrize("packed", [False, True])
def test_trace_of_the_profiler(packed: bool) -> None:
    content = json.dumps(trace()).encode()
    run = parse_run(gzip.compress(content) if packed else content, "rank1.pt.trace.json")
    assert isinstance(run, LoggedRun)
    assert run.step_times_s == pytest.approx((100e-6, 100e-6))
    assert run.step_numbers == (3, 4)
    assert run.gpu_time is not None
    assert run.gpu_time.model_dump() == pytest.approx(
        {
            "compute_s": 60e-6,
            "exposed_communication_s": 20e-6,
            "hidden_communication_s": 10e-6,
            "idle_s": 20e-6,
            "rank": 1,
        }
    )
    assert run.peaks == {"allocated": (3.0,), "reserved": (4.0,)}


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 30), st.booleans()), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_parts_of_a_trace_cover_every_microsecond_once(kernels: list[tuple[int, int, bool]]) -> None:
    """Kernels of any order and overlap, counted microsecond by microsecond."""
    events = [span("ProfilerStep#1", "user_annotation", 0, 100)]
    on_cpu = [*events, span("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 0, 100)]  # with its waits
    busy: tuple[set[int], set[int]] = set(), set()
    for start, length, communicates in kernels:
        events.append(span("ncclKernel" if communicates else "gemm", "kernel", start, start + length))
        kind = ("gloo:all_reduce", "user_annotation") if communicates else ("aten::mm", "cpu_op")
        on_cpu.append(span(*kind, start, start + length))
        busy[communicates].update(range(start, min(100, start + length)))
    compute, communication = busy
    run = parse_run(json.dumps({"traceEvents": events}).encode(), "trace.json")
    assert isinstance(run, LoggedRun)
    assert run.gpu_time is not None
    parts = (
        len(compute),
        len(communication - compute),
        len(communication & compute),
        100 - len(compute | communication),
    )
    gpu_time = run.gpu_time
    assert (
        gpu_time.compute_s, gpu_time.exposed_communication_s, gpu_time.hidden_communication_s, gpu_time.idle_s,
    ) == pytest.approx(tuple(1e-6 * part for part in parts), abs=1e-12)  # fmt: skip
    run = parse_run(json.dumps({"traceEvents": on_cpu}).encode(), "trace.json")
    assert isinstance(run, LoggedRun)
    if not communication:
        assert run.gpu_time is None
        return
    assert run.gpu_time is not None
    _, exposed, hidden, _ = parts
    assert run.gpu_time.model_dump() == pytest.approx({
        "compute_s": 1e-6 * (100 - exposed),
        "exposed_communication_s": 1e-6 * exposed,
        "hidden_communication_s": 1e-6 * hidden,
        "idle_s": None,
        "rank": None,
    }, abs=1e-12)  # fmt: skip


PROFILED = """
import sys
import torch
before = torch.ones(1024, 1024)
schedule = torch.profiler.schedule(wait=1, warmup=1, active=3)
with torch.profiler.profile(schedule=schedule, profile_memory=True) as profiler:
    for _ in range(5):
        torch.ones(64, 64) @ torch.ones(64, 64)
        profiler.step()
profiler.export_chrome_trace(sys.argv[1])
"""
"""A training that writes its trace."""


def test_trace_that_torch_writes(tmp_path: Path) -> None:
    """Before profiling, 4 MiB are allocated, which the CPU's memory in the trace lacks: it is no peak."""
    pytest.importorskip("torch")
    file = tmp_path / "trace.json.gz"
    subprocess.run([sys.executable, "-c", PROFILED, str(file)], check=True)  # which has profiled nothing before
    run = read_run(file)
    assert isinstance(run, LoggedRun)
    assert (run.step_numbers, run.gpu_time) == ((2, 3, 4), None)
    assert run.step_times_s is not None
    assert all(time_s > 0 for time_s in run.step_times_s)
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    counted = [event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"]
    assert 0 < max(counted) < 4 * 2**20
    assert run.peaks == {}
    assert any(note.startswith("memory of the CPU is not compared") for note in run.notes)


@given(st.lists(st.tuples(st.sampled_from(["alloc", "free", "segment"]), st.integers(1, 10**9)), max_size=40))
@settings(max_examples=50, deadline=None)
def test_memory_snapshot(actions: list[tuple[str, int]]) -> None:
    """The peak of a history, counted forward, is found from its end in both forms of the file."""
    allocated = reserved = 5 * 2**20
    peaks, live, events = [allocated, reserved], [], []
    for kind, size in actions:
        if kind == "segment":
            reserved += size
            events.append({"action": "segment_alloc", "size": size, "addr": 1})
        elif kind == "alloc":
            allocated += size
            live.append(size)
            events.append({"action": "alloc", "size": size, "frames": [{"name": "f", "line": 3}]})
        elif live:
            allocated -= live[-1]
            events += [{"action": "free_requested", "size": live[-1]}, {"action": "free_completed", "size": live.pop()}]
        peaks = [max(peaks[0], allocated), max(peaks[1], reserved)]
    segments = [{"device": 0, "total_size": reserved, "allocated_size": allocated, "blocks": []}]
    data = {"segments": segments, "device_traces": [[], events], "allocator_settings": {"x": 1.5}}
    expected = {"allocated": peaks[0] / 2**30, "reserved": peaks[1] / 2**30}
    contents = [pickle.dumps(data, protocol) for protocol in range(2, 6)] + [json.dumps(data).encode()]
    for content in contents:
        run = parse_run(content, "snapshot")
        assert isinstance(run, LoggedRun)
        assert {column: peaks[0] for column, peaks in run.peaks.items()} == pytest.approx(expected)
        assert not run.has_time


class Evil:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (Path("/tmp/simplan-was-here"), "x")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps({"segments": [Evil()], "device_traces": []}), "is a pickle with objects, which may run code"),
        (pickle.dumps({"segments": [], "x": {1, 2}}, 2), "is a pickle with objects"),
        (pickle.dumps({"a": 1}), "is no memory snapshot"),
        (pickle.dumps([1]), "something else than a memory snapshot"),
        (pickle.dumps({"segments": [], "device_traces": []}), "nothing was allocated"),
        (b"\x80\x04r\xff\xff\xff\xff.", "is a damaged pickle"),
        (b"\x80\x04" + b"]\x94(" * 1000, "is a damaged pickle"),
        (b"\x80\x04\x8d" + b"\xff" * 8, "is a damaged pickle"),
        (b"\x1f\x8bxx", "is a damaged gzip file"),
        (b"\x7fELF\0\0", "is a binary file"),
        (b"just words\n" * 1000, "has no lines of steps that simplan knows; it knows those of Megatron-LM"),
        (b"", "has no lines of steps"),
        (b'{"traceEvents": []}', "has no ProfilerStep# spans"),
        (b'{"traceEvents": [{"ph": "X", "name": 3, "ts": 1e400}]}', "holds 1e400, which is no number"),
        (b'{"traceEvents": ' + b"[" * 100_000, "nested too deeply|not JSON"),
        (b"iteration 1/ 2 | elapsed time per iteration (ms): 0.0 |", "has no lines of steps"),
        (b"{'loss': 1.0} step: 3 tps: " + b"9" * 400, "has no lines of steps"),
    ],
)  # fmt: skip
def test_other_files_are_refused_in_one_sentence(content: bytes, words: str) -> None:
    with pytest.raises(SpecError, match=words) as refused:
        parse_run(content, "file")
    assert len(refused.value.problems) == 1
    assert not Path("/tmp/simplan-was-here").exists()


def test_archives_that_unpack_to_too_much_are_refused() -> None:
    with pytest.raises(SpecError, match="is more than 256 MiB unpacked"):
        parse_run(gzip.compress(bytes(257 * 2**20), compresslevel=1), "file")
