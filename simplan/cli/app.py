"""Commands and their flags. Implementations are imported at the call of a command, so that help is fast."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

import simplan
from simplan.cli.terminal.options import (
    AsJson,
    CalibrationFile,
    CheckpointDir,
    CheckpointEvery,
    Endpoint,
    MaxRestarts,
    RendezvousConf,
    Resume,
    ScenarioFile,
    ScenarioPaths,
    TimedPrecision,
)
from simplan.cli.terminal.output import complain
from simplan.documentation import documentation
from simplan.errors import SimplanError

__all__ = ["app", "main"]

app = typer.Typer(
    name="simplan",
    add_completion=False,
    pretty_exceptions_enable=False,  # errors are sentences; see main
    rich_markup_mode=None,  # plain help, equal on every terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True, no_args_is_help=False)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Plan, predict and prove distributed deep-learning training.

    For example: simplan demo; simplan predict SCENARIO; simplan run SCENARIO; simplan show devices

    Exit codes: 0 done, 1 an expectation failed, 2 bad usage or bad file, 3 no plan of a search fits, 4 a run failed,
    130 interrupted.
    """
    from simplan.cli.terminal.output import print_result

    if version:
        print_result(f"simplan {simplan.__version__}")
    elif context.invoked_subcommand is None:
        print_result(context.get_help())


@app.command(short_help="Predict one plan: does it fit, how long is a step, and why.")
def predict(
    scenario: ScenarioFile,
    json: AsJson = False,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Perfetto trace too.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the JSON document too.")
    ] = None,
    calibration: CalibrationFile = None,
) -> int:
    """Predict one plan: does it fit, how long is a step, where does the time go."""
    from simplan.cli.commands import predict_command

    return predict_command(scenario, as_json=json, trace=trace, output=output, calibration_file=calibration)


@app.command(short_help="Find the best plan of a whole space, and say why not the others.")
def search(
    scenario: ScenarioFile,
    json: AsJson = False,
    top: Annotated[int | None, typer.Option(min=1, max=1000, metavar="N", help="Plans to rank (default: 5).")] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="step_time, tokens_per_s_per_device, num_devices, memory or cost; given twice: the Pareto front.",
        ),
    ] = None,
    fewest_devices: Annotated[
        bool, typer.Option("--fewest-devices", help="The same as --objective num_devices.")
    ] = False,
    largest: Annotated[
        str | None,
        typer.Option(
            metavar="QUANTITY", help="The largest seq_len, microbatch_size or num_hidden_layers for which a plan fits."
        ),
    ] = None,
    save_plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a scenario with the best plan, for predict and run.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=-1, max=4096, metavar="N", help="Processes; -1 for one a core.")] = 1,
    calibration: CalibrationFile = None,
) -> int:
    """Find the best plan of a whole space, exactly, and say why not the others.

    The scenario has search: instead of plan: (simplan show search-space lists what it may say). Exit code 3: no plan
    fits; then the report says what would make one.
    """
    from simplan.cli.search import SearchOptions, search_command

    objectives = tuple(objective or ()) or (("num_devices",) if fewest_devices else ())
    options = SearchOptions(top=top, objectives=objectives, jobs=jobs or 1, save_plan=save_plan, largest=largest)
    return search_command(scenario, as_json=json, options=options, calibration_file=calibration)


@app.command(short_help="Run the plan on this machine, and compare with its prediction.")
def run(
    scenario: ScenarioFile,
    json: AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder for the files (default simplan-out/NAME)."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Steady steps to measure.")] = 10,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, max=100_000, metavar="N", show_default="found by their times", help="Steps not counted."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=1.0, max=86_400.0, metavar="SECONDS", help="A rank without progress for so long ends the run."
        ),
    ] = 120.0,
    nnodes: Annotated[
        str,
        typer.Option(
            "--nnodes",
            "--nodes",
            metavar="N|MIN:MAX",
            help="Nodes; the same command runs on each. MIN go on when others go.",
        ),
    ] = "1",
    rdzv_endpoint: Endpoint = None,
    rdzv_conf: RendezvousConf = None,
    checkpoint_dir: CheckpointDir = None,
    checkpoint_every: CheckpointEvery = None,
    max_restarts: MaxRestarts = 0,
    resume: Resume = False,
    calibration: CalibrationFile = None,
) -> int:
    """Run the plan on this machine's devices and show the prediction beside the measurement.

    Calibrates first when this machine has no calibration for the scenario. With --nnodes and --rdzv-endpoint,
    torchrun's options, every node runs its part of the ranks, and the one at the endpoint shows the result. With
    --nnodes MIN:MAX, as many begin as are there after a last call; when some are lost or told to leave (SIGTERM), the
    others go on with fewer data-parallel ranks, and with more when nodes come.
    """
    from simplan.cli.commands import run_command
    from simplan.cli.execute import RunOptions, checkpointing
    from simplan.cli.nodes import NodeRendezvous, numbers_of_nodes

    options = RunOptions(
        num_steps=steps,
        num_warmup_steps=warmup,
        timeout_s=timeout,
        checkpointing=checkpointing(checkpoint_dir, checkpoint_every, restarts=max_restarts, resume=resume),
    )
    meeting = NodeRendezvous(numbers_of_nodes(nnodes), rdzv_endpoint, rdzv_conf)
    return run_command(
        scenario, as_json=json, output=output, calibration_file=calibration, options=options, meeting=meeting
    )


@app.command(short_help="Run one rank of a job of any size alone on the device here.")
def rehearse(
    scenario: ScenarioFile,
    rank: Annotated[
        str, typer.Option(metavar="RANK", help="A rank's number, or worst: the one predicted to need most memory.")
    ] = "worst",
    fake: Annotated[
        bool, typer.Option("--fake", help="On tensors without data: memory of any rank, without any device.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Steps to measure.")] = 5,
    warmup: Annotated[
        int, typer.Option(min=0, max=10_000, metavar="N", help="Steps before them that do not count.")
    ] = 2,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the JSON document too.")
    ] = None,
    json: AsJson = False,
    calibration: CalibrationFile = None,
) -> int:
    """Run one rank of a job of any size alone on the device here, and show its prediction beside it.

    The rank's own kernels and allocator run, and no peer exists; the simulator joins what was measured with modelled
    communication into a step time of the whole job.
    """
    from simplan.cli.rehearse import RehearseOptions, rehearse_command

    options = RehearseOptions(rank=rank, fake=fake, num_steps=steps, num_warmup_steps=warmup)
    return rehearse_command(scenario, as_json=json, output=output, calibration_file=calibration, options=options)


@app.command(short_help="Run a folder of scenarios on one device, and report errors.")
def suite(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Folders of scenarios, or single ones.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help="Folder for measurements and the report.")
    ],
    device: Annotated[
        str, typer.Option(metavar="cuda|cpu", help="cuda, or cpu for scenarios of this-machine.")
    ] = "cuda",
    budget: Annotated[
        float, typer.Option(min=10.0, max=86_400.0, metavar="SECONDS", help="Time for all of it.")
    ] = 520.0,
    limit: Annotated[
        float, typer.Option(min=5.0, max=86_400.0, metavar="SECONDS", help="Time for each scenario.")
    ] = 90.0,
    steps: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Steady steps to measure of each.")] = 10,
    json: AsJson = False,
    calibration: CalibrationFile = None,
) -> int:
    """Run a folder of scenarios on one device, each in a process of its own, and report predicted against measured.

    Calibrates first, unless --calibration names a file. Of scenarios called rehearse-*, the worst rank is rehearsed.
    What fails is a line of the report. The same command again goes on where the last one ended.
    """
    from simplan.cli.suite import SuiteOptions, suite_command

    options = SuiteOptions(device=device, budget_s=budget, limit_s=limit, num_steps=steps)
    return suite_command(folders, output=output, as_json=json, calibration_file=calibration, options=options)


@app.command(short_help="Show where a prediction is off, and which terms carry that.")
def compare(
    prediction: Annotated[Path, typer.Argument(metavar="PREDICTION", help="What predict -o wrote.")],
    measurement: Annotated[
        Path,
        typer.Argument(
            metavar="MEASUREMENT",
            help="The measurement.json of a run, or what its log says: step_times_s: [2.41, 2.39] and so on.",
        ),
    ],
    json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw both on one time axis too; FILE.html for a page.")
    ] = None,
) -> int:
    """Show where a prediction is off: signed errors beside the spread of repeats, and which terms carry them."""
    from simplan.cli.compare import compare_command

    return compare_command(prediction, measurement, as_json=json, plot=plot)


@app.command(short_help="Measure this machine: layers or kernels, and links.")
def calibrate(
    scenarios: Annotated[
        list[Path] | None, typer.Argument(metavar="SCENARIO", help="Scenarios whose shapes to time.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, max=4096, metavar="N", help="Ranks that run at the same time (default: as the scenario's plan)."
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option(min=1.0, max=86_400.0, metavar="SECONDS", help="Most time to spend on measurements.")
    ] = 240.0,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(metavar="cpu|cuda", help="Of the ranks (default: GPUs where there are any)."),
    ] = None,
    dtype: Annotated[
        list[TimedPrecision] | None,
        typer.Option(
            metavar="|".join(TimedPrecision),
            help="Precision of the grid, may be given several times (default: fp32 on CPUs, bf16 on GPUs).",
        ),
    ] = None,
    nnodes: Annotated[
        int,
        typer.Option(
            "--nnodes", "--nodes", min=1, max=1_000_000, metavar="N", help="Nodes; the same command runs on each."
        ),
    ] = 1,
    rdzv_endpoint: Endpoint = None,
    rdzv_conf: RendezvousConf = None,
    calibration: CalibrationFile = None,
    json: AsJson = False,
) -> int:
    """Measure this machine: the layers of scenarios, or, without any, kernels over a grid of sizes for any model.

    Collectives and messages are timed with both. An interrupted calibration goes on where it stopped. With --nnodes
    and --rdzv-endpoint, collectives and messages are timed inside of nodes and across them; all keep what is found.
    """
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
        meeting=NodeRendezvous((nnodes, nnodes), rdzv_endpoint, rdzv_conf),
    )


@app.command(short_help="Check scenarios against their expectations, for CI.")
def check(
    paths: ScenarioPaths,
    json: AsJson = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Annotate files and write the job summary on GitHub.")
    ] = False,
    bless: Annotated[
        bool,
        typer.Option("--bless", help="First write today's values into expectations whose why begins with 'blessed'."),
    ] = False,
    calibration: CalibrationFile = None,
) -> int:
    """Check scenarios against their expectations, for continuous integration.

    Expectations that need this machine's calibration are skipped unless --calibration names one.
    """
    from simplan.cli.check import check_command

    return check_command(
        paths, as_json=json, junit=junit, github=github, bless_values=bless, calibration_file=calibration
    )


@app.command(
    short_help="Predict training runs that others published.",
    epilog=f"Schema of the files: {documentation('reference/published-runs')}",
)
def accuracy(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Files of published runs, or folders of them.")],
    json: AsJson = False,
    runs: Annotated[bool, typer.Option("--runs", help="List every run, not only those that are furthest off.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every run as a row of a CSV file too.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw predicted over measured step times, by file.")
    ] = None,
    stage_times: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Predict from these profiled stage times instead of the cost model; others are skipped.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=-1, max=4096, metavar="N", help="Processes; -1 for one a core.")] = -1,
) -> int:
    """Predict training runs that others published, and show how far off that is.

    Each file has a schema of its own. What cannot be predicted is skipped by name. The
    exit code is 0 whatever the errors.
    """
    from simplan.cli.accuracy import accuracy_command

    return accuracy_command(
        paths,
        as_json=json,
        every_run=runs,
        markdown=markdown,
        csv_file=csv,
        plot_file=plot,
        stage_times=stage_times,
        jobs=jobs or 1,
    )


@app.command(short_help="Show every term of step time and memory, with its formula.")
def explain(
    scenario: ScenarioFile,
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="A second scenario: shows the difference, term by term.")
    ] = None,
    json: AsJson = False,
    calibration: CalibrationFile = None,
) -> int:
    """Show every term of the step time and of the memory, with its formula and its numbers."""
    from simplan.cli.commands import explain_command

    return explain_command(scenario, other, as_json=json, calibration_file=calibration)


@app.command(short_help="Write the predicted step as a trace for Perfetto.")
def trace(
    scenario: ScenarioFile,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="The trace to write.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the trace, which is one JSON document.")] = False,
    calibration: CalibrationFile = None,
) -> int:
    """Write the predicted step as a trace for Perfetto or chrome://tracing."""
    from simplan.cli.commands import trace_command

    return trace_command(scenario, as_json=json, output=output, calibration_file=calibration)


@app.command(short_help="Draw the predicted step, a row for each pipeline rank.")
def draw(
    scenario: ScenarioFile,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.svg", help="Write the picture as SVG too.")
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(min=60, max=10_000, metavar="N", help="Columns of a line (default: the terminal's, else 100)."),
    ] = None,
    json: AsJson = False,
    calibration: CalibrationFile = None,
) -> int:
    """Draw the predicted step: what every pipeline rank does when, and where it idles."""
    from simplan.cli.commands import draw_command

    return draw_command(scenario, as_json=json, output=output, width=width, calibration_file=calibration)


@app.command(short_help="Write a Slurm batch script, or a Kubernetes PyTorchJob.")
def export(
    scenario: ScenarioFile,
    to: Annotated[str, typer.Option("--to", metavar="TARGET", help="slurm or kubernetes.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it to a file (default: print it).")
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            "--nnodes", "--nodes", metavar="N|MIN:MAX", help="As of run; MAX are the nodes of the scenario (default)."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Steady steps to measure.")] = 10,
    checkpoint_dir: CheckpointDir = None,
    checkpoint_every: CheckpointEvery = None,
    max_restarts: MaxRestarts = 0,
    resume: Resume = False,
    json: AsJson = False,
    calibration: CalibrationFile = None,
) -> int:
    """Write what runs the plan on a cluster: a Slurm batch script, or a Kubernetes PyTorchJob.

    Each node runs `torchrun ... -m executor.worker JOB OUT`; the job is in the file. Rank 0 writes
    OUT/measurement.json, which `simplan compare` shows beside a prediction.
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


@app.command()
def show(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help="devices, links, clusters, models, software, schedules, metrics; and the keys of a scenario's model, "
            "cluster, training, plan or search-space.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One entry, with the source of every value.")
    ] = None,
    json: AsJson = False,
) -> int:
    """Show the catalogue and the definitions of metrics."""
    from simplan.cli.listing import show_command

    return show_command(kind, name, as_json=json)


@app.command()
def dashboard(
    port: Annotated[int, typer.Option(min=1, max=65_535, metavar="N", help="Port to serve on.")] = 8501,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to serve on; others than this machine's let others in.")
    ] = "localhost",
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")] = False,
    allow_run: Annotated[
        bool, typer.Option("--allow-run", help="Let pages start runs here even if others reach them.")
    ] = False,
) -> int:
    """Serve the dashboard: plan, see and compare in a browser. On this machine only, unless --host says otherwise."""
    from simplan.cli.dashboard import dashboard_command

    return dashboard_command(host=host, port=port, browser=not no_browser, allow_run=allow_run)


@app.command(short_help="Predict and run a small GPT under five plans, and compare.")
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the files.")] = Path(
        "demo-out"
    ),
    json: AsJson = False,
) -> int:
    """Predict a small GPT under DDP, FSDP and three pipelines, run it on two ranks of this machine, and compare."""
    from simplan.cli.demo import demo_command

    return demo_command(output, as_json=json)


_BAD_USAGE = 2
_BUG = 70
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments after the program's name; None for the arguments of this process.

    Returns:
        The exit code.
    """
    try:
        code = app(args=None if argv is None else list(argv), prog_name="simplan", standalone_mode=False)
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
            complain(f"{error.format_message()}\n`simplan --help` and `simplan COMMAND --help` list what there is")
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
