"""``simplan init``: a first scenario file, from options or from answers on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import typer

from simplan import catalog
from simplan.catalog.spelling import NamedNodes, find_nodes
from simplan.cli.terminal.output import print_json, print_result, say
from simplan.cli.terminal.scenario_request import NO_SCENARIO, ScenarioRequest
from simplan.cluster.machine import THIS_MACHINE
from simplan.errors import Problem, SpecError
from simplan.io import as_argument, write_text
from simplan.report.text import links_words
from simplan.scenario.names import overrides_with_catalog_names
from simplan.scenario.source import read_source

_FIRST_MODEL, _FIRST_CLUSTER = "llama3-8b", "dgx-h100"


def init_command(request: ScenarioRequest, *, file: Path, searches: bool, force: bool, as_json: bool) -> int:
    """``simplan init``."""
    if file.exists() and not force:
        fix = "name another file, or give --force to overwrite it"
        raise SpecError(Problem(field="--output", value=str(file), rule="exists", fix=fix))
    if request.source == NO_SCENARIO:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            fix = f"name a model, e.g. simplan init {_FIRST_MODEL}; on a terminal, questions ask for it"
            raise SpecError(Problem(field="SCENARIO", rule="is missing", fix=fix))
        request, searches = _asked(request, searches=searches)
    source = read_source(str(request.source), *request.overrides_for(searches=searches), searches=searches)
    job = source.search().job if searches else source.scenario().job
    write_text(file, source.text(file.resolve().parent))
    command = "search" if searches else "predict"
    steps = [f"simplan {command} {as_argument(file)}"]
    if not searches and job.cluster.id == THIS_MACHINE:
        steps.append(f"simplan run {as_argument(file)}")
    if as_json:
        print_json({"schema_version": 1, "kind": "init", "file": str(file), "scenario": source.document.data})
        return 0
    cluster, lines = job.cluster, [f"wrote {file}"]
    what = "a search for the best plan" if searches else "one plan"
    lines.append(f"  {what} of {job.model.name} on {cluster.devices_in_words}")
    if links := links_words(cluster.links):
        lines.append(f"  links: {links}")
    lines += [f"  assumed: {assumption}" for assumption in source.assumptions]
    print_result("\n".join([*lines, "", "Next", *(f"  {step}" for step in steps)]))
    return 0


def import_command(request: ScenarioRequest, *, output: Path | None, as_json: bool) -> int:
    """``simplan import``."""
    source = read_source(str(request.source), request.overrides, request.names, framework=request.framework)
    scenario = source.scenario()
    read = source.configuration
    header = f"Read from {request.source}" + (f" ({read.title})" if read is not None else "")
    text = source.text((output or Path("scenario.yaml")).resolve().parent, header)
    if output is not None:
        write_text(output, text)
    document = {"schema_version": 1, "kind": "import", "name": scenario.name, "scenario": source.document.data}
    if as_json:
        print_json(document | {"text": text, "notes": list(source.notes)})
        return 0
    if output is None:
        print_result(text.rstrip("\n"))
    for note in source.notes:
        say(note)
    if output is not None:
        say(f"wrote {output}; next: simplan predict {as_argument(output)}")
    return 0


def _asked(request: ScenarioRequest, *, searches: bool) -> tuple[ScenarioRequest, bool]:
    """The request with answers to questions for what no option gives."""
    overrides = dict(request.overrides)
    model = typer.prompt("Model, or path of a config.json", default=_FIRST_MODEL, value_proc=_checked(_model))
    if not {"cluster.preset", "cluster.device"} & overrides.keys():
        overrides["cluster.preset"] = typer.prompt(
            "Cluster (`simplan show clusters` lists them)", default=_FIRST_CLUSTER, value_proc=_checked(_cluster)
        )
    overrides = overrides_with_catalog_names(overrides)
    if not {"cluster.num_nodes", "cluster.num_devices"} & overrides.keys():
        overrides["cluster.num_nodes"] = typer.prompt("NamedNodes", default=1, value_proc=_checked(_count))
    if "training.global_batch_size" not in overrides:
        per_node = overrides.get("cluster.devices_per_node")
        per_node = per_node or catalog.cluster(overrides.get("cluster.preset", _FIRST_CLUSTER)).devices_per_node
        devices = overrides.get("cluster.num_nodes", 1) * per_node
        overrides["training.global_batch_size"] = typer.prompt(
            "Sequences per optimizer step",
            default=overrides.get("cluster.num_devices", devices),
            value_proc=_checked(_count),
        )
    if not searches and not any(key.startswith("plan.") for key in overrides):
        searches = typer.confirm("Search for the best plan (no: write one plan)", default=True)
    names = {key: request.names.get(key, key) for key in overrides}
    return replace(request, source=Path(model), overrides=overrides, names=names), searches


def _checked(check: Callable[[str], str | int]) -> Callable[[str], str | int]:
    """Check of an answer; a wrong answer is asked for once more, with the error."""

    def checked(answer: str) -> str | int:
        try:
            return check(str(answer).strip())
        except SpecError as error:
            raise typer.BadParameter(str(error)) from None

    return checked


def _model(answer: str) -> str:
    read_source(answer)
    return answer


def _cluster(answer: str) -> str:
    if not isinstance(find_nodes(answer), NamedNodes):
        catalog.cluster(answer)
    return answer


def _count(answer: str) -> int:
    if not answer.isdecimal() or int(answer) < 1:
        raise SpecError(Problem(field="", value=answer, rule="must be a whole number, at least 1"))
    return int(answer)
