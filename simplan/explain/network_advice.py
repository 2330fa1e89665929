"""Changes that remove contention: of the network, the order of ranks or the plan, each predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from simplan.cluster.topology import AnyTopology, Dragonfly, FatTree, Graph, LeafSpine, Rail, Sites
from simplan.cost.calibration.format import Calibration
from simplan.errors import SpecError
from simplan.explain.rank_order import faster_order
from simplan.job import Job
from simplan.network.build import fabric_of
from simplan.network.load import Network
from simplan.plan.collectives import Collectives
from simplan.predict import predict
from simplan.predict.step import jobs_of_seeds
from simplan.prediction import Prediction
from simplan.rules import violations
from simplan.units import counted, format_percent, format_time

_LEAST_SAVING = 0.01
"""Fraction of the step that a change saves at least."""
_LEFT = 0.05
"""Fraction of the cost of contention that a wider network may leave."""
_ALIKE = 0.9
"""Part of the busy share of a full link from which others would be full next."""
_MAX_DOUBLINGS = 6
_MAX_SPANS = 100_000
"""Operations of a step up to which changes are tried: a dozen steps are simulated."""


@dataclass(frozen=True, slots=True)
class NetworkAdvice:
    """A change that makes the step shorter.

    Attributes:
        words: The change, as an instruction.
        step_time_s: Seconds of the step with it.
        saving: Fraction of the step that it saves.
    """

    words: str
    step_time_s: float
    saving: float

    def sentence(self) -> str:
        """The change and its effect."""
        return f"{self.words}: {format_time(self.step_time_s)} a step ({format_percent(self.saving)} less)"

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def network_advice(prediction: Prediction, calibration: Calibration | None = None) -> tuple[NetworkAdvice, ...]:
    """Try changes against contention; the one that saves most first, and none where contention costs nothing.

    Args:
        prediction: Prediction of the job.
        calibration: As for ``predict``.
    """
    network = prediction.network
    if network is None or not network.has_contention or len(prediction.timeline.spans) > _MAX_SPANS:
        return ()
    prediction = replace(prediction, job=jobs_of_seeds(prediction.job)[0])
    tried = [*_wider(prediction, network, calibration), *_other_plans(prediction, calibration)]
    if (order := faster_order(prediction, calibration)) is not None:
        nodes = ", ".join(f"node{node}" for node in order.nodes[:8]) + (", ..." if len(order.nodes) > 8 else "")
        tried.append(NetworkAdvice(f"give ranks to nodes in the order {nodes}", order.step_time_s, order.saving))
    return tuple(
        sorted((advice for advice in tried if advice.saving >= _LEAST_SAVING), key=lambda advice: -advice.saving)
    )


def _wider(prediction: Prediction, network: Network, calibration: Calibration | None) -> Iterator[NetworkAdvice]:
    """Yield the least doubling of the uplinks with which contention costs almost nothing, or the largest one."""
    job, last = prediction.job, None
    assert job.cluster.topology is not None
    for doubling in range(1, _MAX_DOUBLINGS + 1):
        widened = _with_uplinks(job.cluster.topology, 2**doubling, network)
        if widened is None:
            break
        topology, words = widened
        wider = predict(
            replace(job, cluster=job.cluster.model_copy(update={"topology": topology})), calibration=calibration
        )
        assert wider.network is not None
        left = wider.network.contention_s / network.contention_s
        effect = "removes contention" if left <= _LEFT else f"leaves {format_percent(left)} of contention"
        last = NetworkAdvice(f"{words} {effect}", wider.step_time_s, 1 - wider.step_time_s / prediction.step_time_s)
        if left <= _LEFT:
            break
    if last is not None:
        yield last


def _with_uplinks(topology: AnyTopology, factor: int, network: Network) -> tuple[AnyTopology, str] | None:
    """Topology with wider links between switches, and the change in words; None if they are as wide as the cards."""
    match topology:
        case LeafSpine() if topology.leaves_per_pod is not None and topology.pod_oversubscription > 1:
            ratio = max(1.0, topology.pod_oversubscription / factor)
            changed, words = {"pod_oversubscription": ratio}, f"pod_oversubscription {ratio:g}"
            done = factor >= 2 * topology.pod_oversubscription
        case LeafSpine() | Rail():
            ratio = max(1.0, topology.oversubscription / factor)
            changed, words = {"oversubscription": ratio}, f"oversubscription {ratio:g}"
            done = factor >= 2 * topology.oversubscription
        case FatTree():
            up = min(topology.radix // 2, topology.uplinks * factor)
            ratio = (topology.radix - up) / up
            changed, words = {"oversubscription": ratio}, f"oversubscription {ratio:g}"
            done = factor >= 2 * topology.radix / 2 / topology.uplinks
        case Sites():
            changed = {"gbit_per_site": factor * topology.gbit_per_site}
            words, done = f"{factor * topology.gbit_per_site:g} Gbit/s per site", False
        case Dragonfly():
            changed = {"global_gbit": factor * topology.global_gbit}
            words, done = f"{factor * topology.global_gbit:g} Gbit/s between groups", False
        case Graph():
            return _with_wider_cables(topology, factor, network)
        case _:
            return None
    return None if done else (topology.model_copy(update=changed), words)


def _with_wider_cables(topology: Graph, factor: int, network: Network) -> tuple[AnyTopology, str] | None:
    """Graph with wider cables in place of those that delay communications, or are as busy."""
    delaying = [link for link in network.links if link.lost_s > 0]
    least = _ALIKE * max((link.busy_share for link in delaying), default=1.0)
    busy = [*delaying, *(link for link in network.links if link.busy_share >= least)]
    full = {frozenset(link.name.partition(" #")[0].split(" -> ")) for link in busy}
    chosen = [frozenset(link.between) in full for link in topology.links]
    if not any(chosen):
        return None
    links = tuple(
        link.model_copy(update={"gbit": link.gbit * factor}) if is_full else link
        for link, is_full in zip(topology.links, chosen, strict=True)
    )
    first = topology.links[chosen.index(True)]
    words = f"{factor} times the bandwidth of {counted(sum(chosen), 'cable')}, such as {' - '.join(first.between)},"
    return topology.model_copy(update={"links": links}), words


def _other_plans(prediction: Prediction, calibration: Calibration | None) -> Iterator[NetworkAdvice]:
    """Yield plans that send less over the links between switches, and fit if this one does."""
    for words, job in (*_shards_in_domains(prediction.job), *_rings(prediction.job)):
        if any(violations(job)):
            continue
        try:
            changed = predict(job, calibration=calibration)
        except SpecError:
            continue
        if changed.fits is False and prediction.fits is not False:
            continue
        yield NetworkAdvice(words, changed.step_time_s, 1 - changed.step_time_s / prediction.step_time_s)


def _shards_in_domains(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield plans with shards inside one switch of each level, and replicas across."""
    plan = job.plan
    for name, domain in fabric_of(job.cluster).levels:
        size = int(np.bincount(domain).max()) // (plan.tp * plan.cp)
        if size < 1 or plan.dp_shard <= size or plan.dp_shard % size:
            continue
        changed = plan.model_copy(update={"dp_shard": size, "dp_replicate": plan.dp_replicate * plan.dp_shard // size})
        where = "node" if name == "node" else name
        yield f"shards inside a {where} (dp_shard {size}, dp_replicate {changed.dp_replicate})", job.with_plan(changed)


def _rings(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield the plan with rings for all-reduces that NCCL may run as trees."""
    if job.plan.collectives is None:
        rings = Collectives.model_validate({"all_reduce": "ring"})
        yield (
            "rings for all-reduces (NCCL_ALGO=Ring)",
            job.with_plan(job.plan.model_copy(update={"collectives": rings})),
        )
