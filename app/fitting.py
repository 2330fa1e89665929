"""Scenarios fitted to a change of the form: data parallelism from the other degrees, and values that rules allow.

Functions take and return scenarios as plain data, and never change their arguments.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard, get_args

import yaml

from simplan import catalog
from simplan.cluster.machine import THIS_MACHINE
from simplan.document import parse_yaml
from simplan.errors import Problem, SpecError
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan, Recompute
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.problems import parse_model
from simplan.rules.book import violations
from simplan.rules.rule import nearest_multiples
from simplan.scenario import plan_section, with_searched
from simplan.scenario.file import parts_of
from simplan.scenario.sections import with_software_defaults
from simplan.search import RankedPlan
from simplan.software.software import SoftwareSpec
from simplan.wording import divisors

Document = dict[str, Any]

_DEGREES = ("tp", "cp", "pp", "ep", "etp", "dp_replicate")
_MENDED = (
    *("schedule", "virtual_stages", "tp", "cp", "pp", "ep", "etp"),
    *("dp_replicate", "microbatch_size", "recompute", "zero_stage"),
)
_MAX_DEVICES = 10**6
_BATCH = "training.global_batch_size"


def document_text(data: dict[str, Any]) -> str:
    """YAML text of a scenario; a missing name is derived from the content."""
    named = data if "name" in data else {"name": _name(data), **data}
    text: str = yaml.safe_dump(named, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    return text


def _name(data: dict[str, Any]) -> str:
    """E.g. ``llama3-70b-64-dgx-h100``."""
    model, cluster = section(data, "model"), section(data, "cluster")
    parts = (model.get("preset", model.get("name")), cluster.get("num_devices"), cluster.get("preset"))
    return "-".join(str(part)[:60] for part in parts if part) or "scenario"


def section(document: Document, name: str) -> dict[str, Any]:
    """A section of a scenario; empty if the section is missing or no mapping."""
    inside = document.get(name)
    return inside if isinstance(inside, dict) else {}


class ClusterSize(NamedTuple):
    """Size of a cluster of equal nodes, the last of which may be used in part; None for a number that is unknown."""

    num_nodes: int | None
    devices_per_node: int | None
    num_devices: int | None


def cluster_size(document: Document) -> ClusterSize:
    """Size of the cluster, of which a scenario writes only what its nodes do not say."""
    cluster = section(document, "cluster")
    nodes, per_node, devices = (cluster.get(key) for key in ClusterSize._fields)
    preset = cluster.get("preset")
    if preset == THIS_MACHINE and not {"num_nodes", "num_devices"} & cluster.keys():
        devices = catalog.cluster(THIS_MACHINE).num_devices
    if preset == THIS_MACHINE:
        nodes = 1 if nodes is None else nodes
        devices = nodes if devices is None else devices
        per_node = -(-devices // nodes) if is_count(devices) and is_count(nodes) else None
    elif per_node is None and isinstance(preset, str) and preset in catalog.names("clusters"):
        per_node = catalog.node(preset).devices_per_node
    elif per_node is None and "device" in cluster:
        per_node = 1
    if devices is None and is_count(per_node) and (nodes is None or is_count(nodes)):
        devices = per_node * (nodes or 1)
    if nodes is None and is_count(per_node) and is_count(devices):
        nodes = -(-devices // per_node)
    return ClusterSize(*(number if is_count(number) else None for number in (nodes, per_node, devices)))


def num_devices(document: Document) -> int | None:
    """Number of devices of the cluster; None if the scenario has none."""
    return cluster_size(document).num_devices


def zero_stage(document: Document) -> Any:
    """ZeRO stage of the plan; the one in effect, by default 3 with shards, if the scenario names none."""
    plan, stage = section(document, "plan"), plan_value(document, "zero_stage")
    return plan.get("zero_stage", (3 if is_above_one(plan.get("dp_shard")) else 0) if stage is None else stage)


def fitted(document: Document) -> Document:
    """The scenario with data parallelism set to the devices over the other degrees, and a vocabulary that tp divides.

    Options of pipelines and of tensor parallelism are removed from plans without them.
    """
    document = copy.deepcopy(document)
    plan = document["plan"] = dict(section(document, "plan"))
    devices = num_devices(document)
    degrees = [plan.get(key, 1) for key in ("tp", "cp", "pp")]
    stage, replicas = zero_stage(document), plan.get("dp_replicate", 1)
    if not all(is_count(value) for value in (devices, *degrees, replicas)):
        return document
    assert devices is not None
    used = degrees[0] * degrees[1] * degrees[2]
    if devices % used == 0:
        rest = devices // used
        sharded = stage in (1, 2, 3)
        if not sharded:
            replicas = rest
        elif rest % replicas or replicas == rest:  # no replicas requested, or their number no longer divides
            replicas = 1
        _set(plan, "dp_replicate", replicas if replicas > 1 else None)
        _set(plan, "dp_shard", rest // replicas if sharded else None)
        plan["zero_stage"] = stage
    if degrees[2] == 1:
        _set(plan, "schedule", None)
        _set(plan, "virtual_stages", None)
    else:
        _set(plan, "grad_sync", None)  # torch's pipelines reduce once per step
    if degrees[0] == 1:
        _set(plan, "sequence_parallel", None)
    return _padded(document)


def changed(document: Document, key: str, value: Any) -> Document:
    """The scenario with another value of a plan key, fitted to the devices."""
    plan = section(document, "plan") | {key: value}
    if key == "schedule":
        plan.pop("virtual_stages", None)
        if has_free_stages(value):
            plan["virtual_stages"] = 2
    return fitted(document | {"plan": plan})


def applied(document: Document, changes: Mapping[str, Any]) -> Document:
    """The scenario with changes by setting, as in ``Fix.changes``; None removes a setting."""
    for setting, value in changes.items():
        document = with_value(document, tuple(setting.split(".")), value)
        if setting == "cluster.num_devices":
            document["cluster"].pop("num_nodes", None)
    return document


def with_value(document: Document, path: Sequence[str], value: Any) -> Document:
    """The scenario with a value at a path of keys; None removes the key. A name in place of a mapping is its preset."""
    document = copy.deepcopy(document)
    inside = document
    for name in path[:-1]:
        if not isinstance(inside.get(name), dict):
            inside[name] = {"preset": inside[name]} if isinstance(inside.get(name), str) else {}
        inside = inside[name]
    _set(inside, path[-1], value)
    return document


def with_plan(document: Document, ranked: RankedPlan) -> Document:
    """The scenario with a plan of a search and its software, on the number of devices that the plan needs."""
    cluster = {key: value for key, value in section(document, "cluster").items() if key != "num_nodes"}
    others = ("search", "expect")
    return {
        **{key: value for key, value in with_searched(document, ranked.software).items() if key not in others},
        "cluster": cluster | {"num_devices": ranked.plan.num_devices},
        "plan": plan_section(ranked.plan),
    }


def valid_values(document: Document, key: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Values of a plan key with which the plan violates no rule; all values if there are none."""
    return _valid_values(json.dumps(document, default=str), key, tuple(values)) or tuple(values)


def plan_value(document: Document, key: str) -> Any:
    """Value of a plan key that the prediction uses; None while the plan is invalid."""
    job = _job(document)
    plan = _plan_of(document) if job is None else job.plan
    if plan is not None and key == "grad_sync" and plan.grad_sync is None:
        return "microbatch" if plan.reduces_every_microbatch else "step"
    return None if plan is None else getattr(plan, key)


def degrees_of(document: Document, key: str) -> tuple[int, ...]:
    """Values of a degree of parallelism that the devices allow."""
    devices = num_devices(document)
    if devices is None or not 0 < devices <= _MAX_DEVICES:
        return (1,)
    return valid_values(document, key, divisors(devices))


def microbatch_sizes(document: Document) -> tuple[int, ...]:
    """Microbatch sizes that divide the global batch of a data-parallel rank."""
    plan, batch = section(document, "plan"), section(document, "training").get("global_batch_size")
    dp_replicate, dp_shard = plan.get("dp_replicate", 1), plan.get("dp_shard", 1)
    if not all(is_count(value) for value in (batch, dp_replicate, dp_shard)):
        return (1,)
    batch_of_rank, rest = divmod(batch, dp_replicate * dp_shard)
    return (1,) if rest else valid_values(document, "microbatch_size", divisors(batch_of_rank))


def mended(document: Document) -> tuple[Document, list[str]]:
    """The scenario with values of the plan that its other sections allow, and the changes in words.

    A degree or size becomes the largest smaller one that leaves the fewest violated rules, above all that a plan has
    the devices of its cluster. A batch that these cannot share stays: ``fitting_batches`` has those next to it.
    """
    before, document, notes = document, fitted(document), []
    for key in _MENDED:
        problems = _violations(document)
        if not problems:
            break
        plan = section(document, "plan")
        if key not in plan:
            continue
        unpadded = document | {key: value for key, value in before.items() if key == "model"}
        candidates = [(value, changed(unpadded, key, value)) for value in _smaller(document, key, plan[key])]
        value, best = min(candidates, key=lambda pair: _faults(_violations(pair[1])), default=(None, document))
        left = _violations(best)
        if _faults(left) < _faults(problems):
            solved = next(problem for problem in problems if problem not in left)
            notes.append(f"{key} is now {value}, since {solved.sentence()}")
            document = best
    return document, notes


def num_data_parallel(document: Document) -> int | None:
    """Number of data-parallel ranks of the plan; None while the scenario is invalid apart from its rules."""
    job = _job(document)
    return None if job is None else job.plan.dp


def fitting_batches(document: Document) -> tuple[int, ...]:
    """Global batch sizes next to the scenario's with which its plan is valid; empty if the batch is not at fault."""
    job = _job(document)
    if job is None or all(problem.field != _BATCH for problem in violations(job)):
        return ()
    near = nearest_multiples(job.training.global_batch_size, job.plan.sequences_per_microbatch)
    trainings = {size: job.training.with_changes(global_batch_size=size) for size in near}
    return tuple(size for size, training in trainings.items() if not violations(replace(job, training=training)))


def model_of(document: Document) -> ModelSpec | None:
    """Model of the scenario; None while a section other than the plan is invalid."""
    job = _job(document | {"plan": {}})
    return None if job is None else job.model


def objection(document: Document, other: Document) -> str:
    """Sentence on the first problem of a changed scenario that the scenario itself has not; empty for none."""
    known = {(problem.field, problem.rule) for problem in _problems(document)}
    new = (problem for problem in _problems(other) if (problem.field, problem.rule) not in known)
    return next((problem.sentence() for problem in new), "")


def is_count(value: Any) -> TypeGuard[int]:
    """True for a positive whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_above_one(value: Any) -> bool:
    """True for a whole number above 1."""
    return is_count(value) and value > 1


def has_free_stages(schedule: Any) -> bool:
    """True for schedules whose number of stages per rank is an option."""
    facts = SCHEDULE_FACTS.get(str(schedule))
    return facts is not None and facts.virtual_stages is None


def _smaller(document: Document, key: str, value: Any) -> list[Any]:
    """Values to try instead of one, the closest first."""
    if key == "schedule":
        return [name for name in ("1f1b",) if name != value]
    if key == "recompute":
        return [name for name in get_args(Recompute) if name in ("full", "selective", "none") and name != value]
    if key == "zero_stage":
        return [stage for stage in (2, 1, 0) if is_count(value) and stage < value]
    if not is_count(value):
        return []
    devices = num_devices(document)
    among = divisors(devices) if key in _DEGREES and devices is not None and devices > 0 else range(1, min(value, 64))
    return sorted((candidate for candidate in among if candidate < value), reverse=True)


@lru_cache(maxsize=512)
def _valid_values(key_of_document: str, key: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    document = json.loads(key_of_document)

    def is_valid(value: Any) -> bool:
        job = _job(changed(document, key, value))
        return job is not None and getattr(job.plan, key) == value and not violations(job)

    return tuple(value for value in values if is_valid(value))


def _violations(document: Document) -> list[Problem]:
    """Violated rules of a plan; none if another section or a value of the plan is invalid."""
    job = _job(document)
    return [] if job is None else violations(job)


def _faults(problems: Sequence[Problem]) -> tuple[bool, int, int]:
    """True for a plan of other devices than those of its cluster, the problems without the batch, and all of them."""
    fields = [problem.field for problem in problems]
    return "plan" in fields, len(fields) - fields.count(_BATCH), len(fields)


def _problems(document: Document) -> tuple[Problem, ...]:
    """Problems of the sections of a scenario, or of its job; those of the expectations and the search aside."""
    job = _job(document)
    if job is not None:
        return tuple(violations(job))
    try:
        parts_of(parse_yaml(document_text(document), "scenario"), "scenario").sections.raise_problems()
    except SpecError as error:
        return error.problems
    return ()


def _job(document: Document) -> Job | None:
    others = {key: value for key, value in document.items() if key not in ("plan", "search", "expect")}
    job = _job_without_plan(json.dumps(others, default=str))
    if job is None:
        return None
    plan = _plan_of(document, job.software)
    return None if plan is None else job.with_plan(plan)


def _plan_of(document: Document, software: SoftwareSpec | None = None) -> ParallelPlan | None:
    plan = document.get("plan") or {}
    with suppress(SpecError):
        return parse_model(ParallelPlan, plan if software is None else with_software_defaults(plan, software))
    return None


@lru_cache(maxsize=64)
def _job_without_plan(key: str) -> Job | None:
    with suppress(SpecError):
        parts = parts_of(parse_yaml(document_text(json.loads(key)), "scenario"), "scenario")
        parts.sections.raise_problems()
        return parts.job(ParallelPlan())
    return None


def _padded(document: Document) -> Document:
    """The scenario with the vocabulary rounded up to a multiple of tp, unless the framework pads it."""
    job = _job(document)
    if job is None or not job.model.vocab_size or not job.padded_model.vocab_size % job.plan.tp:
        return document
    tp = job.plan.tp
    return document | {"model": section(document, "model") | {"vocab_size": -(-job.model.vocab_size // tp) * tp}}


def _set(plan: dict[str, Any], key: str, value: Any) -> None:
    """Sets a key; None removes it."""
    if value is None:
        plan.pop(key, None)
    else:
        plan[key] = value
