"""Runs on several nodes: options of torchrun's rendezvous."""

from __future__ import annotations

import hashlib
import re
import socket
from dataclasses import dataclass

from simplan.cli.execute import RunOptions
from simplan.cost.calibration.format import CalibrationRequest
from simplan.errors import Problem, SpecError
from simplan.runs.elastic import RendezvousOptions
from simplan.scenario import Scenario
from simplan.scenario.elastic import check_elastic

_NUMBERS = re.compile(r"(?:(?P<least>[0-9]{1,6}):)?(?P<all>[0-9]{1,6})")
_ENDPOINT = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\s]+)):(?P<port>[0-9]{1,5})")
_CONF = {"join_timeout": 300.0, "last_call_timeout": 30.0, "is_host": -1.0}  # torchrun's own names


@dataclass(frozen=True, slots=True)
class NodeRendezvous:
    """The options of ``simplan run`` and ``calibrate`` about nodes, as given.

    Attributes:
        nodes: ``--nnodes``: the fewest and all.
        endpoint: ``--rdzv-endpoint``.
        conf: ``--rdzv-conf``.
    """

    nodes: tuple[int, int] = (1, 1)
    endpoint: str | None = None
    conf: str | None = None

    @property
    def is_elastic(self) -> bool:
        """True when fewer nodes than the maximum may run."""
        return self.nodes[0] < self.nodes[1]


def numbers_of_nodes(text: str) -> tuple[int, int]:
    """Minimum and maximum number of nodes that ``N`` or ``MIN:MAX`` specifies.

    Raises:
        SpecError: The text is neither ``N`` nor ``MIN:MAX``.
    """
    match = _NUMBERS.fullmatch(text)
    least, number = (0, 0) if match is None else (int(match["least"] or match["all"]), int(match["all"]))
    if match is None or not 1 <= least <= number:
        rule = "must be a number of nodes, or MIN:MAX with MIN from 1 to MAX"
        raise SpecError(Problem(field="--nnodes", value=text, rule=rule))
    return least, number


def nodes_of(scenario: Scenario, options: RunOptions, rendezvous: NodeRendezvous) -> RendezvousOptions | None:
    """The request to the other nodes; None for a run on this machine alone.

    Raises:
        SpecError: The options do not fit each other or the scenario.
    """
    cluster, (least, number) = scenario.job.cluster, rendezvous.nodes
    if number == 1:
        if cluster.num_nodes > 1:
            rule = f"the scenario's cluster has {cluster.num_nodes} nodes"
            fix = f"give --nnodes {cluster.num_nodes} --rdzv-endpoint HOST:PORT on each of them"
            raise SpecError(Problem(field="--nnodes", value="1", rule=rule, fix=fix), file=scenario.file)
        refuse_without_nodes(rendezvous)
        return None
    refuse_other_number(scenario, number)
    replication = scenario.job.plan.replication
    if rendezvous.is_elastic and replication is not None and replication.min_replicas is not None:
        rule = "restarts with fewer nodes, and plan.replication.min_replicas goes on without restart"
        raise SpecError(
            Problem(field="--nnodes", value=f"{least}:{number}", rule=rule, fix=f"use --nnodes {number}"),
            file=scenario.file,
        )
    if rendezvous.is_elastic:
        check_elastic(scenario, least, options.checkpointing)
    return _nodes(rendezvous, cluster.num_devices // number, _requested(scenario, options))


def refuse_other_number(scenario: Scenario, num_nodes: int) -> None:
    """Checks that ``--nnodes`` equals the number of nodes of the scenario's cluster.

    Raises:
        SpecError: It is another number.
    """
    cluster = scenario.job.cluster
    if cluster.num_devices % num_nodes:
        rule = f"must divide the {cluster.num_devices} devices of the scenario's cluster"
        raise SpecError(Problem(field="--nnodes", value=str(num_nodes), rule=rule), file=scenario.file)
    if cluster.num_nodes != num_nodes:
        rule = f"the scenario's cluster has {cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''}"
        fix = f"use --nnodes {cluster.num_nodes}, or change cluster.num_nodes"
        raise SpecError(Problem(field="--nnodes", value=str(num_nodes), rule=rule, fix=fix), file=scenario.file)


def nodes_to_time(rendezvous: NodeRendezvous, request: CalibrationRequest) -> RendezvousOptions:
    """Request to the nodes of a calibration of inter-node communication.

    Raises:
        SpecError: The options do not fit each other.
    """
    requested = {
        "calibrate": "collectives and P2P sends",
        "--ranks": str(request.num_ranks),
        "--device": request.device,
    }
    return _nodes(rendezvous, request.num_ranks, requested | {"--budget": f"{request.budget_s:g}"})


def refuse_without_nodes(rendezvous: NodeRendezvous) -> None:
    """Rejects options for several nodes in a run on one node.

    Raises:
        SpecError: One of them is given.
    """
    for option, value in {"--rdzv-endpoint": rendezvous.endpoint, "--rdzv-conf": rendezvous.conf}.items():
        if value is not None:
            rule = "is about several nodes, and --nnodes is 1"
            raise SpecError(Problem(field=option, value=value, rule=rule, fix="give --nnodes too"))


def _nodes(rendezvous: NodeRendezvous, ranks_per_node: int, requested: dict[str, str]) -> RendezvousOptions:
    host, port = _endpoint(rendezvous.endpoint)
    conf, (least, number) = _conf(rendezvous.conf), rendezvous.nodes
    return RendezvousOptions(
        min_nodes=least,
        max_nodes=number,
        ranks_per_node=ranks_per_node,
        host=host,
        port=port,
        leads=_is_here(host) if conf["is_host"] < 0 else conf["is_host"] > 0,
        join_timeout_s=conf["join_timeout"],
        last_call_timeout_s=conf["last_call_timeout"],
        requested={"--nnodes": f"{least}:{number}", **requested},
    )


def _conf(text: str | None) -> dict[str, float]:
    """Settings of ``--rdzv-conf KEY=NUMBER,KEY=NUMBER``; a negative ``is_host`` means automatic detection.

    Raises:
        SpecError: A key is unknown, or a value is not a number.
    """
    conf = dict(_CONF)
    for entry in (text or "").split(",") if text else ():
        key, _, value = entry.partition("=")
        if key not in conf or not value.replace(".", "", 1).isdigit():
            rule = "must be of join_timeout=SECONDS, last_call_timeout=SECONDS and is_host=0 or 1"
            raise SpecError(Problem(field="--rdzv-conf", value=entry, rule=rule))
        conf[key] = float(value)
    return conf


def _endpoint(text: str | None) -> tuple[str, int]:
    match = None if text is None else _ENDPOINT.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 2**16:
        rule = "must say where the nodes meet" if text is None else "must be HOST:PORT"
        fix = "give a name of one of the nodes and a free port there"
        raise SpecError(Problem(field="--rdzv-endpoint", value=text, rule=rule, fix=fix))
    return match["v6"] or match["host"], int(match["port"])


def _is_here(host: str) -> bool:
    """True when one of the host's addresses belongs to this machine: only those can be bound."""
    try:
        addresses = {(family, address[0]) for family, _, _, _, address in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    for family, address in addresses:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return True
    return False


def _requested(scenario: Scenario, options: RunOptions) -> dict[str, str]:
    """Settings that must be equal on all nodes, with sections as hashes; of a cluster its size and device."""
    cluster, kept = scenario.job.cluster, options.checkpointing
    sections = {
        "model": scenario.job.model.model_dump_json(),
        "training": scenario.job.training.model_dump_json(),
        "plan": scenario.job.plan.model_dump_json(),
        "software": scenario.job.software.model_dump_json(),
        "cluster": f"{cluster.num_nodes} x {cluster.ranks_per_node} {cluster.device.id}",
    }
    requested = {section: hashlib.sha256(text.encode()).hexdigest()[:16] for section, text in sections.items()}
    flags: dict[str, object] = {
        "--steps": options.num_steps,
        "--warmup": options.num_warmup_steps,
        "--timeout": options.timeout_s,
    }
    if options.replica_restarts:
        flags["--max-restarts"] = options.replica_restarts
    if kept is not None:
        flags |= {"--checkpoint-dir": kept.folder, "--checkpoint-every": kept.every}
        flags |= {"--max-restarts": kept.max_restarts, "--resume": kept.resume}
    return {"name": scenario.name, **requested, **{flag: str(value) for flag, value in flags.items()}}
