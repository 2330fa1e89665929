"""``simplan export``: a plan as a Slurm script or a Kubernetes manifest that runs it."""

from __future__ import annotations

from pathlib import Path

import simplan
from simplan.catalog.spelling import find
from simplan.cli.calibrations import chosen
from simplan.cli.execute import RunOptions, exported_job, refuse_other_software, refuse_what_is_only_predicted
from simplan.cli.nodes import numbers_of_nodes, refuse_other_number
from simplan.cli.terminal.output import print_json, print_result, say
from simplan.cli.terminal.scenario_request import ScenarioRequest
from simplan.errors import NotModelledError, Problem, SpecError, did_you_mean
from simplan.interop.formats import export_target, export_targets, formats, profile_for
from simplan.interop.hostfiles import HOSTFILES
from simplan.interop.launchers import Launch, claim_of, kubernetes_job, notes_for_pods, slurm_script
from simplan.interop.writing import Exported
from simplan.io import as_argument, write_text
from simplan.report.text import verdict
from simplan.runs.checkpoint import Checkpointing
from simplan.scenario import Scenario
from simplan.scenario.elastic import check_elastic


def export_command(
    request: ScenarioRequest,
    *,
    target: str,
    as_json: bool,
    output: Path | None,
    num_steps: int,
    calibration_file: Path | None,
    nodes: str | None = None,
    checkpointing: Checkpointing | None = None,
) -> int:
    """``simplan export``."""
    named, target = target, _target(target)
    scenario = _with_profile(request, profile_for(target, named), named).scenario()
    refuse_what_is_only_predicted(scenario, "an export")
    _say_if_too_large(scenario)
    write = formats()[target].export if target in formats() else HOSTFILES.get(target)
    if write is not None:
        exported = write(scenario.job, scenario.name)
        return _print_exported(exported, scenario.name, target, output=output, as_json=as_json)
    refuse_other_software(scenario)
    cluster = scenario.job.cluster
    if cluster.num_devices % cluster.num_nodes:
        rule = f"must be a multiple of the {cluster.num_nodes} nodes, as all run as many ranks"
        raise SpecError(
            Problem(field="cluster.num_devices", value=str(cluster.num_devices), rule=rule), file=scenario.file
        )
    gpus = cluster.ranks_per_node if cluster.device.kind == "gpu" else 0
    least = _min_nodes(scenario, nodes, checkpointing)
    if least is not None and checkpointing is not None and target == "kubernetes":
        checkpointing = checkpointing.model_copy(update={"resume": True})  # containers that failed begin again
    options = RunOptions(num_steps, checkpointing=checkpointing)
    job = exported_job(scenario, chosen(scenario, calibration_file), options, least)
    if scenario.job.plan.collectives is not None:
        rule, fix = "the executor leaves algorithms to the library", "remove it"
        raise NotModelledError(Problem(field="plan.collectives", rule=rule, fix=fix))
    launch = Launch(job, cluster.num_nodes, cluster.ranks_per_node, gpus, cluster.cores_per_node, least)
    if target == "slurm":
        text = slurm_script(launch)
    else:
        image = f"simplan:{simplan.__version__}"
        text = kubernetes_job(launch, image)
        say(f"note: the image {image} is yours to make, with simplan[executor] in it")
        for note in notes_for_pods(launch):
            say(f"note: {note}")
        if checkpointing is not None:
            say(f"note: so is the volume claim {claim_of(launch)}, which all pods write to (ReadWriteMany)")
    if as_json:
        print_json({"schema_version": 1, "kind": "export", "name": scenario.name, "target": target, "text": text})
    elif output is None:
        print_result(text.rstrip("\n"))
    if output is not None:
        write_text(output, text)
        say(f"wrote {output}; start it with `{'sbatch' if target == 'slurm' else 'kubectl apply -f'} {output}`")
    return 0


def _target(typed: str) -> str:
    """Target that a name stands for; said if it is another one.

    Raises:
        SpecError: It stands for none.
    """
    target = export_target(typed)
    if not target:
        rule, fix = "is not known", did_you_mean(typed, export_targets())
        if find("software", typed).name:
            rule, fix = "is a framework for which nothing is written", f"targets: {', '.join(export_targets())}"
        raise SpecError(Problem(field="--to", value=typed, rule=rule, fix=fix))
    if target != typed:
        say(f"--to {typed}: target {target}")
    return target


def _with_profile(request: ScenarioRequest, profile: str, named: str) -> ScenarioRequest:
    """Request with the framework of its export, if it is about a model and names none."""
    if not profile or request.is_file or "software" in request.overrides:
        return request
    say(f"--to {named}: software {profile}")
    return request.with_overrides({"software": profile})


def _say_if_too_large(scenario: Scenario) -> None:
    """Say that the prediction for the plan is that it does not fit; what it is exported to would not."""
    prediction = simplan.predict(scenario.job)
    if prediction.fits is False:
        say(f"warning: the plan {verdict(prediction)}; `simplan predict` names changes with which it fits")


def _print_exported(exported: Exported, name: str, target: str, *, output: Path | None, as_json: bool) -> int:
    """Files of a framework: one on standard output or in a file, several in a folder."""
    several = len(exported.files) > 1
    if output is None and several and not as_json:
        rule = f"is missing: {target} takes {len(exported.files):,} files"
        raise SpecError(Problem(field="--output", rule=rule, fix="name a folder"))
    texts = {file: text for file, text in exported.files.items() if isinstance(text, str)}
    if as_json:
        document = {"schema_version": 1, "kind": "export", "name": name, "target": target}
        print_json(document | {"files": texts, "start": exported.start, "notes": list(exported.notes)})
    elif output is None:
        print_result(next(iter(texts.values())).rstrip("\n"))
    if output is not None:
        for file, content in exported.files.items():
            path = output / file if several else output
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, content)
        first = next(iter(exported.files))
        start = exported.start if several else exported.start.replace(as_argument(Path(first)), as_argument(output), 1)
        say(f"wrote {as_argument(output)}; start it with `{start}`")
    for note in exported.notes:
        say(f"note: {note}")
    if target in formats() and formats()[target].settings is not None:  # a configuration, not traces
        say("note: learning rates, rope bases and all else without effect on time and memory have usual values")
    return 0


def _min_nodes(scenario: Scenario, nodes: str | None, checkpointing: Checkpointing | None) -> int | None:
    """Minimum number of nodes to start or continue the run with; None for all nodes.

    Raises:
        SpecError: The scenario has another number of nodes, or the minimum number cannot run the plan.
    """
    if nodes is None:
        return None
    least, number = numbers_of_nodes(nodes)
    refuse_other_number(scenario, number)
    if least == number:
        return None
    check_elastic(scenario, least, checkpointing)
    return least
