"""Commands and their flags. Implementations are imported at the call of a command, so that help is fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.main

import simplan
from simplan.cli.terminal import completion
from simplan.cli.terminal.options import (
    AsJson,
    CalibrationFile,
    CheckpointDir,
    CheckpointEvery,
    Endpoint,
    FileCommand,
    JsonFile,
    MaxRestarts,
    PriceOption,
    RendezvousConf,
    Resume,
    ScenarioPaths,
    TimedPrecision,
    Tokens,
    Trial,
)
from simplan.cli.terminal.output import complain
from simplan.cli.terminal.scenario_request import ScenarioRequest, takes_scenario, usage_error
from simplan.documentation import documentation
from simplan.errors import SimplanError

_FILE = partial(typer.Option, metavar="FILE")
_COUNT = partial(typer.Option, min=1, metavar="N")
_SECONDS = partial(typer.Option, max=86_400.0, metavar="SECONDS")

app = typer.Typer(
    name="simplan",
    pretty_exceptions_enable=False,  # errors are sentences; see main
    rich_markup_mode=None,  # plain help, equal on every terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)
_command = partial(app.command, cls=FileCommand)


@app.callback(invoke_without_command=True, no_args_is_help=False)
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Version of simplan.")] = False
) -> None:
    """Plan, predict and prove distributed deep-learning training.

    For example: simplan predict llama3-8b --gpus 64 --tp 8; simplan init; simplan demo; simplan show devices

    Exit codes: 0 done, 1 an expectation failed, 2 bad usage or bad file, 3 no plan of a search fits, 4 a run failed,
    130 interrupted.
    """
    from simplan.cli.terminal.output import print_result

    if version:
        print_result(f"simplan {simplan.__version__}")
    elif context.invoked_subcommand is None:
        print_result(context.get_help())


@_command(short_help="Predict one plan: memory, step time and its breakdown.")
@takes_scenario(writes=True)
def predict(
    scenario: ScenarioRequest,
    others: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="OTHERS",
            help="More scenarios, for one table of all; options hold for all.",
            autocompletion=completion.scenarios,
        ),
    ] = None,
    json: AsJson = False,
    trace: Annotated[Path | None, _FILE(help="File for a Perfetto trace (default: none).")] = None,
    output: JsonFile = None,
    tokens: Tokens = None,
    price: PriceOption = None,
    calibration: CalibrationFile = None,
) -> int:
    """Predict one plan: memory, step time and its breakdown; with a number of tokens also days and cost.

    Several scenarios are one table, fastest first.
    """
    from simplan.cli.predict import predict_command

    return predict_command(
        scenario,
        others or (),
        as_json=json,
        trace=trace,
        output=output,
        calibration_file=calibration,
        budget={"num_tokens": tokens, "price_per_device_hour": price},
    )


@_command(short_help="Simulate a training run with failures: days, money and energy.")
@takes_scenario(writes=True, whole_run=True)
def goodput(
    scenario: ScenarioRequest,
    others: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="OTHERS",
            help="More scenarios, for one table of all; options hold for all.",
            autocompletion=completion.scenarios,
        ),
    ] = None,
    json: AsJson = False,
    trials: Annotated[int, _COUNT(max=1_000_000, help="Number of simulated runs.")] = 500,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seed of the failures; equal ones give equal runs.")
    ] = 0,
    runs_file: Annotated[
        Path | None,
        typer.Option("--runs", metavar="FILE", help="File for the simulated runs, Parquet or CSV (default: none)."),
    ] = None,
    trace: Annotated[Path | None, _FILE(help="File for a Perfetto trace of one simulated run (default: none).")] = None,
    trial: Trial = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Numbers of devices to compare, at the same batch and in proportion (default: none).",
        ),
    ] = None,
    recovery: Annotated[
        Path | None,
        _FILE(help="measurement.json of a run with a restart: its times in place of the scenario's (default: none)."),
    ] = None,
    output: JsonFile = None,
    jobs: Annotated[
        int, typer.Option(min=-1, max=4096, metavar="N", help="Number of processes; -1 for one per core.")
    ] = 1,
    calibration: CalibrationFile = None,
) -> int:
    """Simulate a training run with failures, checkpoints and recovery: its end, its cost, and changes that help.

    For example: simplan goodput llama3-8b --gpus 64 --tokens 1e12 --mtbf-h 50000 --checkpoint-every-s best
    --checkpoint-s 30 --restart-s 600 --price 2.5

    The step is that of predict. Sections of the scenario (simplan show run) list possible events; without a
    section nothing of its kind happens. Several scenarios are one table. Expectations of the run are checked.
    """
    from simplan.cli.goodput.command import GoodputOptions, goodput_command

    options = GoodputOptions(
        num_runs=trials,
        seed=seed,
        jobs=jobs,
        runs_file=runs_file,
        trace=trace,
        trial=trial,
        devices=devices,
        recovery=recovery,
    )
    return goodput_command(
        scenario, others or (), as_json=json, output=output, calibration_file=calibration, options=options
    )


@_command(short_help="Find the best plan of a search space, and show why others lost.")
@takes_scenario(writes=True)
def search(
    scenario: ScenarioRequest,
    json: AsJson = False,
    top: Annotated[int | None, _COUNT(max=1000, help="Number of plans to rank (default: 5).")] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Objective: step_time, tokens_per_s_per_device, num_devices, memory or cost; two for a Pareto front "
            "(default: the scenario's, else step_time).",
        ),
    ] = None,
    fewest_devices: Annotated[
        bool, typer.Option("--fewest-devices", help="Short for --objective num_devices.")
    ] = False,
    max_memory_fraction: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION",
            show_default="0.95",
            help="Fraction of the device memory that plans may use; 1 keeps none free.",
        ),
    ] = None,
    from_current: Annotated[
        bool,
        typer.Option(
            "--from-current",
            help="Comparison of the best plan with that of SCENARIO, or if it has none with the best one that has the "
            "given options of a plan: changed settings, main reason, gain and cost.",
        ),
    ] = False,
    largest: Annotated[
        str | None,
        typer.Option(metavar="QUANTITY", help="Quantity to maximize: seq_len, microbatch_size or num_hidden_layers."),
    ] = None,
    hardware: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND @ PRICE,...",
            help="Hardware to compare, each with its best plan; the price of a device and hour is optional, "
            'e.g. "1x RTX 4090 @ 0.35, 2x L40S, 8x H100" (default: none).',
        ),
    ] = None,
    save_plan: Annotated[
        Path | None, _FILE(help="File for a scenario with the best plan, for predict and run.")
    ] = None,
    rank: Annotated[int | None, _COUNT(max=1000, help="Rank of the plan that --save-plan writes (default: 1).")] = None,
    jobs: Annotated[
        int,
        typer.Option(
            min=-1, max=4096, metavar="N", help="Number of processes of a search that takes long; -1 for one per core."
        ),
    ] = -1,
    output: JsonFile = None,
    tokens: Tokens = None,
    price: PriceOption = None,
    calibration: CalibrationFile = None,
) -> int:
    """Find the best plan of a search space, exactly, and show why others lost.

    The scenario has search: instead of plan: (simplan show search-space lists its keys). If no plan fits, the exit code
    is 3, and the report lists changes after which one fits.
    """
    from simplan.cli.search.command import SearchOptions, search_command

    objectives = tuple(objective or ()) or (("num_devices",) if fewest_devices else ())
    options = SearchOptions(
        top=top,
        max_memory_fraction=max_memory_fraction,
        objectives=objectives,
        jobs=jobs or 1,
        save_plan=save_plan,
        rank=rank,
        largest=largest,
        from_current=from_current,
        budget={"num_tokens": tokens, "price_per_device_hour": price},
    )
    if hardware:
        from simplan.cli.search.hardware import compare_hardware

        return compare_hardware(
            scenario, hardware, as_json=json, output=output, options=options, calibration_file=calibration
        )
    return search_command(scenario, as_json=json, output=output, options=options, calibration_file=calibration)


@_command(short_help="Write a first scenario, and name the next command.")
@takes_scenario(required=False)
def init(
    scenario: ScenarioRequest,
    output: Annotated[Path, _FILE("--output", "-o", help="File for the scenario.")] = Path("scenario.yaml"),
    search: Annotated[bool, typer.Option("--search", help="A search for the best plan instead of one plan.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Permission to overwrite the file.")] = False,
    json: AsJson = False,
) -> int:
    """Write a first scenario, complete and with comments, and name the next command.

    Values that are not given are assumed, and listed. On a terminal, without SCENARIO, questions ask for the model, the
    cluster and the batch.
    """
    from simplan.cli.init import init_command

    return init_command(scenario, file=output, searches=search, force=force, as_json=json)


@_command("import", short_help="Write a launch script or configuration of a framework as a scenario.")
@takes_scenario()
def import_scenario(
    scenario: ScenarioRequest,
    output: Annotated[Path | None, _FILE("--output", "-o", help="File for the scenario (default: stdout).")] = None,
    json: AsJson = False,
) -> int:
    """Write a launch script or configuration of a framework as a scenario, with the line of each value as a comment.

    Lists missing values, settings without effect, and settings that are not modeled. Nothing is run or expanded except
    plain variables.
    """
    from simplan.cli.init import import_command

    return import_command(scenario, output=output, as_json=json)


@_command(short_help="Run a plan on this machine, and compare it with its prediction.")
@takes_scenario()
def run(
    scenario: ScenarioRequest,
    json: AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder for the files (default: simplan-out/NAME)."),
    ] = None,
    steps: Annotated[int, _COUNT(max=100_000, help="Number of steady steps to measure.")] = 10,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, max=100_000, metavar="N", show_default="detected", help="Number of warm-up steps."),
    ] = None,
    timeout: Annotated[
        float, _SECONDS(min=1.0, help="Time without progress of a rank after which the run ends.")
    ] = 120.0,
    nnodes: Annotated[
        str,
        typer.Option(
            "--nnodes",
            "--nodes",
            metavar="N|MIN:MAX",
            help="Node count, or MIN:MAX for an elastic run; the same command runs on each node.",
        ),
    ] = "1",
    rdzv_endpoint: Endpoint = None,
    rdzv_conf: RendezvousConf = None,
    checkpoint_dir: CheckpointDir = None,
    checkpoint_every: CheckpointEvery = None,
    max_restarts: MaxRestarts = 0,
    resume: Resume = False,
    fail: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|RATE|scenario",
            help="Faults: a YAML file, killed ranks per hour of the job, or the failures of the scenario.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, metavar="N", help="Seed of drawn failures (default: 0).")] = None,
    time_scale: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            max=1e9,
            metavar="X",
            help="With --fail scenario, its seconds in one second of the run (default: 1).",
        ),
    ] = None,
    recovery: Annotated[
        Path | None,
        _FILE(help="measurement.json of an earlier run with a restart, whose times predict the goodput of this one."),
    ] = None,
    calibration: CalibrationFile = None,
) -> int:
    """Run a plan on this machine's devices, and compare it with its prediction.

    Calibrates first if this machine has no calibration for the scenario. With --nnodes and --rdzv-endpoint, torchrun's
    options, every node runs its ranks, and the node at the endpoint prints the result. With --nnodes MIN:MAX, the run
    starts on the nodes that have joined by the last call. If nodes are lost or preempted (SIGTERM), the others resume
    with fewer data-parallel ranks; if nodes join, with more. With --fail, ranks and nodes meet faults, and measured
    goodput is compared with that of simulated runs.
    """
    from simplan.cli.commands import run_command
    from simplan.cli.execute import RunOptions, checkpointing
    from simplan.cli.nodes import NodeRendezvous, numbers_of_nodes
    from simplan.scenario.whole_run.executed import fault_options

    options = RunOptions(
        num_steps=steps,
        num_warmup_steps=warmup,
        timeout_s=timeout,
        checkpointing=checkpointing(
            checkpoint_dir, checkpoint_every, restarts=0 if checkpoint_dir is None else max_restarts, resume=resume
        ),
        replica_restarts=max_restarts if checkpoint_dir is None else 0,
    )
    rendezvous = NodeRendezvous(numbers_of_nodes(nnodes), rdzv_endpoint, rdzv_conf)
    return run_command(
        scenario,
        as_json=json,
        output=output,
        calibration_file=calibration,
        options=options,
        rendezvous=rendezvous,
        faults=fault_options(fail, seed, time_scale, recovery),
    )


@_command(short_help="Run one rank of a job of any size alone on a local device.")
@takes_scenario()
def rehearse(
    scenario: ScenarioRequest,
    rank: Annotated[
        str, typer.Option(metavar="RANK", help="Number of the rank, or worst for the peak-memory rank.")
    ] = "worst",
    fake: Annotated[
        bool, typer.Option("--fake", help="Tensors without data: memory of any rank, without a device.")
    ] = False,
    steps: Annotated[int, _COUNT(max=10_000, help="Number of steps to measure.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, max=10_000, metavar="N", help="Number of warm-up steps.")] = 2,
    output: JsonFile = None,
    json: AsJson = False,
    calibration: CalibrationFile = None,
) -> int:
    """Run one rank of a job of any size alone on a local device, and compare it with its prediction.

    The rank runs its kernels and its allocator without peers. The simulator combines the measured compute with modeled
    communication into a step time of the full job.
    """
    from simplan.cli.execute import RunOptions
    from simplan.cli.rehearse import rehearse_command

    return rehearse_command(
        scenario,
        rank_asked=rank,
        fake=fake,
        steps=RunOptions(steps, warmup),
        as_json=json,
        output=output,
        calibration_file=calibration,
    )


@_command(short_help="Capture a torch module of your own, to plan it like a built-in model.")
def capture(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="MODULE:FACTORY, a function that makes the module, or a config.json of Hugging Face."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File for the captured model.")],
    inputs: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Function of a number of samples that makes the arguments of forward."
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function of the outputs of forward (default: their own loss, or their sum).",
        ),
    ] = None,
    seq_len: Annotated[
        int | None, _COUNT(max=10**7, help="Tokens of a sample, for a config.json (default: 4096).")
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1000,
            metavar="N",
            help="Images of a sample, for a config.json of a model of images and texts; their tokens are among its "
            "tokens (default: one if the model resizes all to one size, else texts alone).",
        ),
    ] = None,
    image_size: Annotated[
        str | None, typer.Option(metavar="HxW", help="Pixels of each image after resizing, such as 768x1024.")
    ] = None,
    tensor_parallel: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Tensor-parallel degrees to capture as well, such as 2,4,8.")
    ] = None,
    tp_plan: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function that gives the plan for parallelize_module, or takes the module and the mesh and splits it "
            "(default: the plan that transformers has for its model).",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model (default: that of the class).")
    ] = None,
    json: AsJson = False,
) -> int:
    """Capture a torch module of your own: its layers, operators and saved tensors, without a device.

    Runs your code: the functions are imported from the current folder, and forward runs on tensors without data.

    For example: simplan capture unet:build --inputs unet:batch -o unet.json; simplan predict unet.json --gpus 8
    """
    from simplan.cli.capture.command import capture_command

    return capture_command(
        source,
        inputs=inputs,
        loss=loss,
        name=name,
        seq_len=seq_len,
        images=images,
        image_size=image_size,
        tensor_parallel=tensor_parallel,
        tp_plan=tp_plan,
        output=output,
        as_json=json,
    )


@_command(short_help="Run a folder of scenarios on one device, and report errors.")
def suite(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Folders of scenarios, or scenario files.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help="Folder for measurements and the report.")
    ],
    device: Annotated[
        str, typer.Option(metavar="cuda|cpu", help="Device: cuda, or cpu for scenarios of this-machine.")
    ] = "cuda",
    budget: Annotated[float, _SECONDS(min=10.0, help="Time budget of the suite.")] = 520.0,
    limit: Annotated[float, _SECONDS(min=5.0, help="Time limit per scenario.")] = 90.0,
    steps: Annotated[int, _COUNT(max=10_000, help="Number of steady steps to measure per scenario.")] = 10,
    json: AsJson = False,
    calibration: CalibrationFile = None,
) -> int:
    """Run a folder of scenarios on one device, each in a separate process, and report errors of the predictions.

    Calibrates first, unless --calibration names a file. Of scenarios named rehearse-*, the peak-memory rank is
    rehearsed. A scenario that fails is a row of the report. The same command resumes an interrupted suite.
    """
    from simplan.cli.suite import SuiteOptions, suite_command

    options = SuiteOptions(device=device, budget_s=budget, limit_s=limit, num_steps=steps)
    return suite_command(folders, output=output, as_json=json, calibration_file=calibration, options=options)


@_command(short_help="Show the error of a prediction, and the terms that cause it.")
def compare(
    prediction: Annotated[
        Path, typer.Argument(metavar="PREDICTION", help="File that predict -o wrote, or a scenario to predict.")
    ],
    measurement: Annotated[
        Path,
        typer.Argument(
            metavar="MEASUREMENT",
            help="measurement.json of a run, or of executor.record; a log of Megatron-LM, Megatron Bridge, NeMo, "
            "torchtitan, DeepSpeed or the Hugging Face Trainer; a trace of torch.profiler; a memory snapshot; or YAML: "
            "step_times_s: [2.41, 2.39].",
        ),
    ],
    json: AsJson = False,
    output: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="File for a drawing of both on one time axis; FILE.html for a page."),
    ] = None,
    baseline: Annotated[
        list[Path] | None,
        _FILE(
            help="measurement.json of another run, repeatable: its loss against samples and seconds, for runs with "
            "training.data: markov or gratings."
        ),
    ] = None,
) -> int:
    """Show the errors of a prediction, next to the spread of the steps, and the terms that cause them.

    Files are found by content. Steps of the warm-up and interrupted steps of a log are left out, and named. If the log
    lies outside of the prediction's intervals, the job is predicted again with one change at a time. Changes that bring
    it closer are listed.
    """
    from simplan.cli.accuracy import compare_command

    return compare_command(prediction, measurement, as_json=json, output=output, plot=plot, baselines=baseline or ())


@_command(short_help="Measure this machine: layers or kernels, and links.")
def calibrate(
    scenarios: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SCENARIO", help="Scenarios whose layers are timed (default: none, for the kernel grid)."
        ),
    ] = None,
    ranks: Annotated[int | None, _COUNT(max=4096, help="Number of concurrent ranks (default: the scenario's).")] = None,
    budget: Annotated[float, _SECONDS(min=1.0, help="Time budget of the measurements.")] = 240.0,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(metavar="cpu|cuda", help="Device of the ranks (default: cuda if this machine has a GPU)."),
    ] = None,
    dtype: Annotated[
        list[TimedPrecision] | None,
        typer.Option(
            metavar="|".join(TimedPrecision),
            help="Precision of the kernel grid, repeatable (default: fp32 on CPUs, bf16 on GPUs).",
        ),
    ] = None,
    nnodes: Annotated[
        int, _COUNT("--nnodes", "--nodes", max=1_000_000, help="Node count; the same command runs on each node.")
    ] = 1,
    rdzv_endpoint: Endpoint = None,
    rdzv_conf: RendezvousConf = None,
    nccl_tests: Annotated[
        list[Path] | None,
        _FILE(help="Output of nccl-tests or rccl-tests, repeatable: its collectives instead of measurements."),
    ] = None,
    calibration: CalibrationFile = None,
    json: AsJson = False,
) -> int:
    """Measure this machine: layers of scenarios, or kernels over a grid of sizes, for any model.

    Both time collectives and P2P sends. The same command resumes an interrupted calibration. With --nnodes and
    --rdzv-endpoint, only communication is timed, inside nodes and between nodes, and every node saves the result. With
    --nccl-tests, nothing runs: collectives come from the output, everything else from the catalog.
    """
    if nccl_tests:
        from simplan.cli.calibrations import of_nccl_tests

        others = scenarios or ranks or device or dtype or nnodes > 1 or rdzv_endpoint or rdzv_conf
        return of_nccl_tests(nccl_tests, calibration, is_alone=not others, as_json=json)
    from simplan.cli.calibrations import CalibrationTarget
    from simplan.cli.commands import calibrate_command
    from simplan.cli.nodes import NodeRendezvous

    return calibrate_command(
        scenarios or [],
        as_json=json,
        num_ranks=ranks,
        budget_s=budget,
        calibration_file=calibration,
        wanted=CalibrationTarget(device, tuple(map(str, dtype or ()))),
        rendezvous=NodeRendezvous((nnodes, nnodes), rdzv_endpoint, rdzv_conf),
    )


@_command(short_help="Check scenarios against their expectations, for CI.")
def check(
    paths: ScenarioPaths,
    json: AsJson = False,
    output: JsonFile = None,
    junit: Annotated[Path | None, _FILE(help="File for JUnit XML (default: none).")] = None,
    github: Annotated[bool, typer.Option("--github", help="Annotations and a job summary for GitHub Actions.")] = False,
    bless: Annotated[
        bool, typer.Option("--bless", help="Update of expectations whose why begins with 'blessed', before the check.")
    ] = False,
    calibration: CalibrationFile = None,
) -> int:
    """Check scenarios against their expectations, for continuous integration.

    Expectations that need this machine's calibration are skipped unless --calibration names one.
    """
    from simplan.cli.check import check_command

    return check_command(
        paths, as_json=json, output=output, junit=junit, github=github, bless_values=bless, calibration_file=calibration
    )


@_command(
    short_help="Predict published training runs, and show the errors.",
    epilog=f"Schema of the files: {documentation('reference/published-runs')}",
)
def accuracy(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Files of published runs, or folders of them.")],
    json: AsJson = False,
    output: JsonFile = None,
    runs: Annotated[bool, typer.Option("--runs", help="All runs, not only those with the largest errors.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ID", help="Id of a run to predict, in place of all; repeatable."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables in Markdown.")] = False,
    csv: Annotated[Path | None, _FILE(help="File for a CSV table of all runs (default: none).")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg", help="File for a drawing of predicted over measured step times (default: none)."
        ),
    ] = None,
    stage_times: Annotated[
        Path | None, _FILE(help="Profiled stage times instead of the cost model; runs without them are skipped.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=-1, max=4096, metavar="N", help="Number of processes; -1 for one per core.")
    ] = -1,
) -> int:
    """Predict published training runs, and show the errors.

    Runs that cannot be predicted are skipped with a reason. The exit code is 0 regardless of the errors.
    """
    from simplan.cli.accuracy import accuracy_command

    return accuracy_command(
        paths,
        as_json=json,
        output=output,
        every_run=runs,
        only=only or [],
        markdown=markdown,
        csv_file=csv,
        plot_file=plot,
        stage_times=stage_times,
        jobs=jobs or 1,
    )


@_command(short_help="Show every term of step time and memory, with its formula.")
@takes_scenario()
def explain(
    scenario: ScenarioRequest,
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="OTHER",
            help="Second scenario, for the difference of the two; options hold for both.",
            autocompletion=completion.scenarios,
        ),
    ] = None,
    straggler: Annotated[
        list[str] | None,
        typer.Option(
            metavar="rank=N,slowdown=X", help="Slow rank (or node=node2), repeatable: its cost is a sentence."
        ),
    ] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Kernels of every term as well.")] = False,
    json: AsJson = False,
    output: JsonFile = None,
    calibration: CalibrationFile = None,
) -> int:
    """Show every term of step time and memory, with its formula and numbers."""
    from simplan.cli.commands import explain_command

    return explain_command(
        scenario,
        other,
        as_json=json,
        output=output,
        calibration_file=calibration,
        stragglers=straggler or (),
        kernels=kernels,
    )


@_command(short_help="Write the predicted step as a trace for Perfetto.")
@takes_scenario()
def trace(
    scenario: ScenarioRequest,
    output: Annotated[Path | None, _FILE("--output", "-o", help="File for the trace.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Trace on stdout, as one JSON document.")] = False,
    calibration: CalibrationFile = None,
) -> int:
    """Write the predicted step as a trace for Perfetto or chrome://tracing."""
    from simplan.cli.commands import trace_command

    return trace_command(scenario, as_json=json, output=output, calibration_file=calibration)


@_command(short_help="Draw the predicted step, one row per pipeline rank; or the network, or a training run.")
@takes_scenario(whole_run=True)
def draw(
    scenario: ScenarioRequest,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.svg", help="SVG file for the drawing (default: none)."),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            min=60, max=10_000, metavar="N", help="Columns of the drawing (default: the terminal's, else 100)."
        ),
    ] = None,
    network: Annotated[
        bool, typer.Option("--network", help="Links and switches of the cluster in place of the step.")
    ] = False,
    load: Annotated[
        bool, typer.Option("--load", help="Load of the links of cluster.topology over the step, in place of actions.")
    ] = False,
    ways: Annotated[
        bool, typer.Option("--ways", help="Step time over bandwidth for every way to train, in place of the step.")
    ] = False,
    whole_run: Annotated[
        bool,
        typer.Option("--run", help="Timeline, lost time and goodput of the training run, in place of the step."),
    ] = False,
    trial: Trial = None,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="With --run, seed of the failures (default: 0).")
    ] = None,
    json: AsJson = False,
    calibration: CalibrationFile = None,
) -> int:
    """Draw the predicted step: actions and idle time of every pipeline rank.

    With --network, links and switches of the cluster. With --load, the load of links over the step. With --ways, the
    step time over bandwidth for gradient compression, parameter servers, Local SGD and DiLoCo. With --run, the timeline
    of one simulated training run, and the time that all of them lose.
    """
    from simplan.cli.draw import DrawOptions, draw_command

    is_run = whole_run or trial is not None or seed is not None
    asked = {"--network": network, "--load": load, "--ways": ways, "--run": is_run}
    options = DrawOptions(width=width, calibration_file=calibration, seed=seed or 0, trial=trial)
    return draw_command(
        scenario, [name for name, is_asked in asked.items() if is_asked], as_json=json, output=output, options=options
    )


@_command(short_help="Write results as one HTML page that opens anywhere.")
def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="JSON documents that simplan wrote (-o): of predict, search, explain, compare, goodput; "
            "- for standard input.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.html", help="HTML file for the report.")
    ] = Path("report.html"),
) -> int:
    """Write predictions, searches, runs with failures, explanations and comparisons as one HTML page.

    For example: simplan predict A.yaml B.yaml -o plans.json; simplan report plans.json

    The page loads nothing and runs nothing: send it, print it, or keep it with the run.
    """
    from simplan.cli.commands import report_command

    return report_command(files, output)


@_command(short_help="Write a plan as a framework's configuration, or as a job that runs it.")
@takes_scenario()
def export(
    scenario: ScenarioRequest,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="Target: slurm or kubernetes for the executor; a framework; hostfile or slurm-hostfile for the nodes.",
            autocompletion=completion.targets,
        ),
    ],
    output: Annotated[
        Path | None,
        _FILE("--output", "-o", help="File for the result, or folder for several files (default: stdout)."),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            "--nnodes",
            "--nodes",
            metavar="N|MIN:MAX",
            help="Node count, or MIN:MAX for an elastic run (default: the scenario's).",
        ),
    ] = None,
    steps: Annotated[int, _COUNT(max=100_000, help="Number of steady steps to measure.")] = 10,
    checkpoint_dir: CheckpointDir = None,
    checkpoint_every: CheckpointEvery = None,
    max_restarts: MaxRestarts = 0,
    resume: Resume = False,
    json: AsJson = False,
    calibration: CalibrationFile = None,
) -> int:
    """Write a plan as the configuration of a framework; or as a Slurm script or Kubernetes PyTorchJob that runs it.

    An option that the framework cannot express is an error that names it. Under Slurm and Kubernetes, each node runs
    `torchrun ... -m executor.worker JOB OUT`; the file contains the job. Rank 0 writes OUT/measurement.json, which
    `simplan compare` compares with a prediction.
    """
    from simplan.cli.execute import checkpointing
    from simplan.cli.export import export_command

    return export_command(
        scenario,
        target=to,
        as_json=json,
        output=output,
        num_steps=steps,
        calibration_file=calibration,
        nodes=nnodes,
        checkpointing=checkpointing(checkpoint_dir, checkpoint_every, restarts=max_restarts, resume=resume),
    )


@_command()
def show(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            autocompletion=completion.kinds,
            help="Kind: devices, links, clusters, topologies, models, software, reliability, schedules, "
            "optimizers, metrics, scenario; and the keys of a scenario's model, cluster, topology, training, plan, "
            "search-space, expect, measured, run or schema (JSON Schema).",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Name of one entry, for all its values with their sources.",
            autocompletion=completion.entries,
        ),
    ] = None,
    json: AsJson = False,
    calibration: Annotated[
        Path | None, _FILE(help="Calibration whose measured collectives are compared with the catalog's links.")
    ] = None,
) -> int:
    """Show the catalog, scenario keys and definitions of metrics."""
    from simplan.cli.listing import show_command

    return show_command(kind, name, as_json=json, calibration_file=calibration)


@_command()
def dashboard(
    port: Annotated[int, _COUNT(max=65_535, help="Port of the server.")] = 8501,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address of the server; other machines reach all but localhost.")
    ] = "localhost",
    no_browser: Annotated[bool, typer.Option("--no-browser", help="No browser window.")] = False,
    allow_run: Annotated[
        bool, typer.Option("--allow-run", help="Permission to start runs for all machines that reach the pages.")
    ] = False,
) -> int:
    """Serve the dashboard to a browser of this machine.

    Pages plan, predict, run and compare. With --host, other machines reach them, too.
    """
    from simplan.cli.dashboard import dashboard_command

    return dashboard_command(host=host, port=port, browser=not no_browser, allow_run=allow_run)


@_command(short_help="Predict and run a small GPT under five plans, and compare.")
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the files.")] = Path(
        "demo-out"
    ),
    json: AsJson = False,
) -> int:
    """Predict and run a small GPT under DDP, FSDP and three pipelines on two ranks of this machine, and compare."""
    from simplan.cli.demo import demo_command

    return demo_command(output, as_json=json)


_BAD_USAGE = 2
_BUG = 70
_INTERRUPTED = 130


@cache
def _commands(name: str) -> Callable[..., Any]:
    """The parser of one command, or of all if none has this name; making all takes longer than most commands."""
    named = [
        command for command in app.registered_commands if command.callback is not None and _name_of(command) == name
    ]
    small = copy(app)
    small.registered_commands = named or app.registered_commands
    return typer.main.get_command(small)


def _name_of(command: typer.models.CommandInfo) -> str:
    assert command.callback is not None
    return command.name or typer.main.get_command_name(command.callback.__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments after the program's name; None for the arguments of this process.

    Returns:
        The exit code.
    """
    try:
        args = sys.argv[1:] if argv is None else list(argv)
        code = _commands(args[0] if args else "")(args=args, prog_name="simplan", standalone_mode=False)
    except SimplanError as error:
        complain(str(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        return _INTERRUPTED
    except OSError as error:
        complain(f"{error.filename or 'what is printed cannot be written'}: {error.strerror or error}")
        return _BAD_USAGE
    except Exception as error:
        if hasattr(error, "format_message"):  # bad usage; the class's module differs between versions of typer
            complain(f"{usage_error(error)}\n`simplan --help` and `simplan COMMAND --help` list what there is")
            return _BAD_USAGE
        if os.environ.get("SIMPLAN_DEBUG"):
            raise
        complain(
            f"this is a bug of simplan ({type(error).__name__}: {error}); "
            "with SIMPLAN_DEBUG=1 in the environment it shows where, please report that"
        )
        return _BUG
    if code == _INTERRUPTED:
        complain("interrupted")
    return code if isinstance(code, int) else 0
