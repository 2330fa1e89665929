"""Runs commands on damaged files, each within limits of time and memory, and tells those that end as none should.

``python -m tests.fuzz.campaign NUMBER [--seed SEED] [--progress FILE]``: prints each finding with the seed that makes
it again; what FILE tells as done is not done again.

A command may succeed, or refuse its input: then its exit code is 2 (or 1, where expectations fail) and its first line
on stderr begins with ``error:``. Anything else is a finding: another exit code, a traceback, a warning, a hang, more
than 4 GiB, a file that is not whole.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import simplan
import simplan.cli
from simplan.io import json_text, read_yaml
from simplan.plan.plan import ParallelPlan
from simplan.scenario import parse_scenario
from tests.fuzz.mutation import Mutator, Whole
from tests.validate.measuring import measure, predicted

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60
_WAITING = 20  # seconds on a busy machine, or of sleep, for one of CPU time
LIMIT_BYTES = 4 * 2**30
BATCH = 100
"""Inputs for one process: what one leaves behind cannot help or hurt many others."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that ended as none should.

    Attributes:
        seed: Makes the input again.
        args: The command, with the files in its folder.
        what: What it did.
    """

    seed: int
    args: tuple[str, ...]
    what: str


Case = tuple[list[str], Path | None]
"""Arguments of a command, and the file that it writes."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file with the commands that read it.

    Attributes:
        make: Writes damaged files into a folder; returns the command.
        run: Runs the command; returns its exit code. None for ``simplan``.
    """

    name: str
    make: Callable[[Mutator, Path], Case]
    run: Callable[[list[str]], int] | None = None


def _scenario(mutator: Mutator, folder: Path) -> Case:
    file = folder / "scenario.yaml"
    source = mutator.choice(SCENARIOS)
    file.write_text(mutator.yaml(source.read_text()), encoding="utf-8", errors="surrogatepass")
    for companion in ("custom-schedule.csv",):
        shutil.copy(ROOT / "scenarios" / companion, folder)
    command = mutator.choice(("predict", "predict", "predict", "explain", "draw", "trace", "check", "export"))
    out = folder / {"draw": "out.svg"}.get(command, "out.json")
    args = {
        "predict": ["predict", str(file), "-o", str(out)],
        "draw": ["draw", str(file), "-o", str(out)],
        "trace": ["trace", str(file), "-o", str(out)],
        "explain": ["explain", str(file)],
        "check": ["check", str(file), mutator.choice(("--github", "--json"))],
        "export": ["export", str(file), "--to", mutator.choice(("slurm", "kubernetes"))],
    }[command]
    return args, out if "-o" in args else None


def _search(mutator: Mutator, folder: Path) -> Case:
    file = folder / "search.yaml"
    file.write_text(mutator.yaml(SEARCH), encoding="utf-8", errors="surrogatepass")
    return ["search", str(file), "--jobs", "1", "--json"], None


def _schedule(mutator: Mutator, folder: Path) -> Case:
    for name in ("custom-schedule.yaml", "custom-schedule.csv"):
        shutil.copy(ROOT / "scenarios" / name, folder)
    table = folder / "custom-schedule.csv"
    table.write_text(mutator.damaged(table.read_text()), encoding="utf-8", errors="surrogatepass")
    return ["predict", str(folder / "custom-schedule.yaml")], None


def _compared(mutator: Mutator, folder: Path) -> Case:
    prediction, measurement = folder / "prediction.json", folder / "measurement.json"
    texts = {prediction: PREDICTION, measurement: MEASUREMENT}
    for file in texts:
        file.write_text(texts[file])
    file = mutator.choice((prediction, measurement))
    file.write_text(mutator.json(texts[file]), encoding="utf-8", errors="surrogatepass")
    plot = mutator.choice(([], ["--plot", str(folder / "plot.svg")]))
    return ["compare", str(prediction), str(measurement), *plot], None


def _logged(mutator: Mutator, folder: Path) -> Case:
    prediction, log = folder / "prediction.json", folder / "log.yaml"
    prediction.write_text(mutator.choice(LOGGED_PREDICTIONS))
    log.write_text(mutator.yaml(LOG), encoding="utf-8", errors="surrogatepass")
    return ["compare", str(prediction), str(log)], None


def _framework_log(mutator: Mutator, folder: Path) -> Case:
    """Logs as bytes: of a framework, a trace, and a snapshot."""
    prediction, log = folder / "prediction.json", folder / "train.log"
    prediction.write_text(mutator.choice(LOGGED_PREDICTIONS))
    content = mutator.damaged(mutator.choice(FRAMEWORK_LOGS)).encode("utf-8", errors="surrogatepass")
    if mutator.choice((True, False)):
        content = mutator.choice((pickle.dumps(SNAPSHOT), gzip.compress(content)))
        content = content[: mutator.choice((len(content), len(content) - 3, 40))]
    log.write_bytes(content)
    return ["compare", str(prediction), str(log), *mutator.choice(([], ["--json"]))], None


def _published(mutator: Mutator, folder: Path) -> Case:
    file = folder / "published.yaml"
    file.write_text(mutator.yaml(PUBLISHED), encoding="utf-8", errors="surrogatepass")
    return ["accuracy", str(file)], None


def _config(mutator: Mutator, folder: Path) -> Case:
    (folder / "config.json").write_text(mutator.json(CONFIG), encoding="utf-8", errors="surrogatepass")
    (folder / "scenario.yaml").write_text(OF_CONFIG)
    return ["predict", str(folder / "scenario.yaml")], None


def _calibration(mutator: Mutator, folder: Path) -> Case:
    (folder / "scenario.yaml").write_text(HERE)
    file = folder / "calibration.json"
    file.write_text(mutator.json(CALIBRATION), encoding="utf-8", errors="surrogatepass")
    return ["predict", str(folder / "scenario.yaml"), "--calibration", str(file)], None


SCENARIOS = tuple(
    ROOT / "scenarios" / f"{name}.yaml"
    for name in (
        "ddp", "fsdp", "hsdp", "gpipe", "1f1b", "interleaved", "zb-v", "three-dimensions", "moe-expert-parallel", "mla",
        "lora", "fp8", "t5", "vit", "resnet", "bert", "packed", "zero1", "offload-activations", "custom-schedule",
        "context-parallel-ring", "four-dimensions",
    )
)  # fmt: skip
SEARCH = """\
name: searched
model: {family: gpt, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 256, seq_len: 32}
cluster: {preset: dgx-h100, num_devices: 2}
training: {global_batch_size: 2}
search: {tp: [1], pp: [1, 2], zero_stage: [1], microbatch_size: [1], recompute: [none], top: 3,
  max_memory_fraction: 0.9}
"""
SMALL = """\
name: small
model: {family: gpt, num_hidden_layers: 4, hidden_size: 64, num_attention_heads: 4, vocab_size: 256, seq_len: 32}
cluster: {preset: dgx-h100, num_devices: 2}
training: {global_batch_size: 8}
plan: {pp: 2, schedule: gpipe}
"""
HERE = """\
name: here
model: {family: gpt, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 2, vocab_size: 512, seq_len: 32}
cluster: {preset: this-machine, num_devices: 1}
training: {global_batch_size: 1, precision: fp32}
plan: {}
"""
OF_CONFIG = """\
model: {hf_config: config.json, seq_len: 512}
cluster: {preset: dgx-h100, num_devices: 8}
training: {global_batch_size: 8}
plan: {dp_shard: 8}
"""
CONFIG = json.dumps({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False, "mlp_bias": False,
})  # fmt: skip
LOG = "step_times_s: [2.41, 2.39, 2.40, 2.42]\npeak_allocated_gib: 40.0\n"
_ITERATION = " iteration {0:8d}/ 100 | elapsed time per iteration (ms): {0}20.5 | global batch size: 4 | lm loss: 1.0 |"
SNAPSHOT = {
    "segments": [{"device": 0, "total_size": 4096, "allocated_size": 2048}],
    "device_traces": [[{"action": "alloc", "size": 512}, {"action": "free_completed", "size": 512}]],
}
TRACE = [
    {"ph": "X", "cat": category, "name": name, "ts": 1.5, "dur": 20}
    for category, name in (("user_annotation", "ProfilerStep#1"), ("kernel", "gemm"), ("kernel", "ncclKernel"))
]
FRAMEWORK_LOGS = (
    "\n".join(_ITERATION.format(step) for step in range(1, 9)),
    "[rank0]:[titan] step: 1  loss: 12.2  memory: 27.34GiB(28.78%)  tps: 375  mfu: 2.20%\n" * 5,
    "Training epoch 0, iteration 5/49 | global_batch_size: 4 | train_step_timing in s: 2.693 | consumed_samples: 20",
    "epoch=0/micro_step=1/global_step=2, RunningAvgSamplesPerSec=58.7, CurrSamplesPerSec=61.35, MaxMemAllocated=19.5GB",
    "{'loss': 1.0}\n100%|####| 200/200 [03:45<00:00]\n{'train_runtime': 225.8, 'train_steps_per_second': 0.886}",
    json.dumps({"log_history": [{"train_runtime": 100.5, "step": 50}], "global_step": 50}),
    json.dumps({"traceEvents": TRACE}),
    json.dumps(SNAPSHOT),
)
FILES = Path(__file__).parent / "files"
CALIBRATION: str = (FILES / "calibration.json").read_text()
_PREDICTED = predicted(ParallelPlan(pp=2, stage_layers=(2, 2)))
PREDICTION = json_text(_PREDICTED.to_json())
_OF_ONE_DEVICE = simplan.predict(parse_scenario(HERE.replace("this-machine", "dgx-h100")).job)
LOGGED_PREDICTIONS = (json_text(_OF_ONE_DEVICE.to_json()),) * 5 + (PREDICTION,)
"""Predictions for logs: the causes of an error are sought with predictions of changed jobs, which take longer than all
else of an input, and longest for a pipeline."""
MEASUREMENT = measure(_PREDICTED).model_dump_json()
_TORCHTITAN = read_yaml(ROOT / "scenarios" / "published" / "torchtitan.yaml").data
PUBLISHED = json_text({**_TORCHTITAN, "runs": _TORCHTITAN["runs"][:2]})  # JSON is YAML

KINDS = (
    Kind("scenario", _scenario),
    Kind("search", _search),
    Kind("schedule", _schedule),
    Kind("compare", _compared),
    Kind("log", _logged),
    Kind("framework-log", _framework_log),
    Kind("published", _published),
    Kind("config", _config),
    Kind("calibration", _calibration),
)


def run_campaign(kind: Kind, number: int, seed: int, limit_s: int = LIMIT_S) -> Iterator[Finding]:
    """Runs a number of damaged inputs of one kind, from a seed on."""
    _import_modules(kind)
    for first in range(seed, seed + number, BATCH):
        yield from _in_a_process(kind, range(first, min(first + BATCH, seed + number)), limit_s)


@cache
def _import_modules(kind: Kind) -> None:
    """Runs inputs without damage, so that forked processes need not import and compile what commands use."""
    if kind.run is None:  # torch's threads do not survive a fork
        with tempfile.TemporaryDirectory(prefix="simplan-fuzz-") as folder:
            for seed in range(4):
                run_one(kind, seed, Path(folder) / str(seed), mutator=Whole(seed))


def _in_a_process(kind: Kind, seeds: range, limit_s: int) -> list[Finding]:
    """Runs inputs in a forked process, which takes the limit of memory with it."""
    with tempfile.TemporaryDirectory(prefix="simplan-fuzz-") as folder:
        told = Path(folder) / "findings.jsonl"
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES + _mapped_bytes(), resource.RLIM_INFINITY))
                with told.open("w") as stream:
                    for seed in seeds:
                        stream.write(json.dumps({"begun": seed}) + "\n")
                        stream.flush()
                        finding = run_one(kind, seed, Path(folder) / str(seed), limit_s)
                        if finding is not None:
                            stream.write(json.dumps({"args": finding.args, "what": finding.what}) + "\n")
                code = 0
            finally:
                os._exit(code)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        lines = [json.loads(line) for line in told.read_text().splitlines()]
    findings, seed = [], seeds[0]
    for line in lines:
        seed = line.get("begun", seed)
        if "what" in line:
            findings.append(Finding(seed, tuple(line["args"]), line["what"]))
    if ended:
        findings.append(Finding(seed, (kind.name,), f"the process ended with {ended}"))
        rest = range(seed + 1, seeds[-1] + 1)
        findings += _in_a_process(kind, rest, limit_s) if rest else []
    return findings


def _mapped_bytes() -> int:
    """Address space that the process has already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


class _HangError(BaseException):
    """The limit of time has passed."""


def run_one(
    kind: Kind, seed: int, folder: Path, limit_s: int = LIMIT_S, mutator: Mutator | None = None
) -> Finding | None:
    """Runs one input in this process; None if it ends as it should."""
    folder.mkdir()
    args, written = kind.make(mutator or Mutator(seed), folder)
    out, err = io.StringIO(), io.StringIO()

    def hang(number: int, frame: object) -> None:
        raise _HangError

    previous = [(number, signal.signal(number, hang)) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    signal.alarm(_WAITING * limit_s)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ["SIMPLAN_DEBUG"] = "1"
    what = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("error")
            code = (kind.run or simplan.cli.main)(args)
        what = _wrong(code, out.getvalue(), err.getvalue(), written)
    except _HangError:
        what = f"not done after {limit_s} s of CPU time"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in previous:
            signal.signal(number, handler)
    if what is None:
        shutil.rmtree(folder)
        return None
    return Finding(seed, tuple(args), what)


def _wrong(code: int, out: str, err: str, written: Path | None) -> str | None:
    """Fault in the end of a command; None for a proper end."""
    if "Traceback" in err or "Traceback" in out:
        return "it printed a traceback"
    if code not in (0, 1, 2, 3):
        return f"it ended with {code}: {err[-200:]}"
    if code and not (err.strip() or out.strip()):
        return f"it ended with {code} and said nothing"
    if code == 2 and "error" not in (err + out).lower():
        return f"it refused without a sentence: {err[-200:]}"
    if written is not None and written.exists():
        if code:
            return f"it ended with {code} and left {written.name}"
        if written.suffix == ".json":
            json.loads(written.read_text())
    return None


CHUNK = 500
"""Inputs of a kind before the next kind has its turn."""


def main() -> int:
    """Runs inputs of all kinds in turn; writes findings, and what is done, of which nothing is done again."""
    from tests.fuzz.executor_kinds import EXECUTOR_KINDS
    from tests.fuzz.framework_kinds import FRAMEWORK_KINDS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.campaign", description=__doc__)
    parser.add_argument("number", type=int, help="inputs over all kinds")
    parser.add_argument("--seed", type=int, default=0, help="first seed of each kind")
    parser.add_argument("--progress", type=Path, default=Path(os.devnull), help="JSON lines, one a chunk")
    parser.add_argument("--kind", nargs="*", default=(), help="kinds (default: all)")
    options = parser.parse_args()
    kinds = [kind for kind in KINDS + FRAMEWORK_KINDS + EXECUTOR_KINDS if not options.kind or kind.name in options.kind]
    lines = options.progress.read_text().splitlines() if options.progress.is_file() else []
    done = {(line["kind"], line["seed"]) for line in map(json.loads, lines)}
    total, end = 0, options.seed + -(-options.number // len(kinds))
    with options.progress.open("a") as progress:
        for seed in range(options.seed, end, CHUNK):
            for kind in kinds:
                if (kind.name, seed) in done:
                    continue
                before, number = resource.getrusage(resource.RUSAGE_CHILDREN), min(CHUNK, end - seed)
                findings = list(run_campaign(kind, number, seed))
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                for finding in findings:
                    sys.stdout.write(
                        f"{kind.name} {finding.seed}: {finding.what}\n  simplan {' '.join(finding.args)}\n"
                    )
                sys.stdout.flush()
                line = {"kind": kind.name, "seed": seed, "number": number, "cpu_s": round(cpu_s, 2)}
                progress.write(json.dumps(line | {"findings": len(findings)}) + "\n")
                progress.flush()
                total += len(findings)
    sys.stdout.write(f"{total} findings\n")
    return int(bool(total))


if __name__ == "__main__":
    sys.exit(main())
