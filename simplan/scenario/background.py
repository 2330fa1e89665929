"""The key ``cluster.background`` of a scenario file: constant traffic of other jobs, or whole jobs on other nodes.

::

    background:
      - {from: node0, to: node4, gbit: 600}
      - nodes: [4, 5, 6, 7]
        job: {model: {preset: llama3-8b}, training: {global_batch_size: 64}, plan: {dp_shard: 32}}
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from simplan.base import Line, Seconds, Spec
from simplan.cluster.hardware import BackgroundFlow, BackgroundJob, Nodes
from simplan.plan.placement import is_placement_file
from simplan.plan.plan import ParallelPlan
from simplan.plan.schedules import is_table_file
from simplan.problems import Path
from simplan.scenario.collecting import Sections
from simplan.scenario.sections import read_model, read_software, with_software_defaults
from simplan.training import TrainingSection

_PATH: Path = ("cluster", "background")
_EXAMPLE = "{model: {preset: llama3-8b}, training: {global_batch_size: 64}, plan: {dp_shard: 32}}"
_NOT_IN_A_JOB = {
    "cluster": "is that of this scenario: a background job uses the same links, and has no cluster or background",
    "search": "has no meaning for a background job, whose plan is given",
    "expect": "has no meaning for a background job",
}
_FILES = (
    ("model", "hf_config"),
    ("model", "file"),
    ("model", "document_lengths", "file"),
    ("plan", "schedule"),
    ("plan", "placement"),
)
_IS_FILE = {"schedule": is_table_file, "placement": is_placement_file}


class _Entry(Spec):
    """One background job as written; ``job`` is read separately."""

    job: Any
    nodes: Nodes
    offset_s: Seconds = 0.0


class _Job(Spec):
    """The mapping ``job`` as written; the sections are read one by one."""

    name: Annotated[Line, Field(min_length=1, max_length=200)] | None = None
    model: Any
    training: Any
    software: Any = "torch"
    plan: Any


def read_background(sections: Sections, data: Any) -> tuple[BackgroundFlow | BackgroundJob, ...]:
    """Other jobs of ``cluster.background``; invalid ones are left out, after recording their problems."""
    if not isinstance(data, list | tuple):
        fix = "write a list, such as [{from: node0, to: node4, gbit: 100}]"
        sections.refuse(_PATH, "must be a list of other jobs", value=data, fix=fix)
        return ()
    jobs = []
    for index, entry in enumerate(data):
        is_job = isinstance(entry, dict) and {"job", "nodes", "offset_s"} & entry.keys()
        path = (*_PATH, index)
        jobs.append(_job(sections, entry, path) if is_job else sections.read(BackgroundFlow, entry, path))
    return tuple(background_job for background_job in jobs if background_job is not None)


def _job(sections: Sections, data: dict[str, Any], path: Path) -> BackgroundJob | None:
    before = sections.num_problems
    entry, job = sections.read(_Entry, data, path), data.get("job")
    path = (*path, "job")
    if "job" in data and not isinstance(job, dict):
        rule = "must be a mapping with model, training and plan of the other job"
        sections.refuse(path, rule, value=job, fix=f"write {_EXAMPLE}")
    if not isinstance(job, dict):
        return None
    for key, rule in _NOT_IN_A_JOB.items():
        if key in job:
            sections.refuse((*path, key), rule, fix="remove it")
    _refuse_files(sections, job, path)
    sections.read(_Job, {key: value for key, value in job.items() if key not in _NOT_IN_A_JOB}, path)
    if sections.num_problems > before:
        return None
    with sections.moved(("software",), (*path, "software")):
        software = read_software(sections, job.get("software", "torch"))
    with sections.moved(("model",), (*path, "model")):
        model = read_model(sections, job["model"], mtp=software is not None and software.mtp)
    with sections.moved(("training",), (*path, "training")):
        training = sections.read(TrainingSection, job["training"], ("training",))
    with sections.moved(("plan",), (*path, "plan")):
        plan_keys = job["plan"] if software is None else with_software_defaults(job["plan"], software)
        plan = sections.read(ParallelPlan, plan_keys, ("plan",))
    if entry is None or software is None or model is None or training is None or plan is None:
        return None
    return BackgroundJob(
        name=job.get("name", model.name),
        model=model,
        training=training.step,
        plan=plan,
        software=software,
        nodes=entry.nodes,
        offset_s=entry.offset_s,
    )


def _refuse_files(sections: Sections, job: dict[str, Any], path: Path) -> None:
    """Records a problem for each file that a background job names."""
    for keys in _FILES:
        value: Any = job
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        is_file = _IS_FILE.get(keys[-1])
        if value is not None and (is_file is None or (isinstance(value, str) and is_file(value))):
            rule = "is a file, and those of background jobs are not modeled yet"
            sections.refuse((*path, *keys), rule, value=value, fix="write the values in the scenario")
