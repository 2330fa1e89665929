"""Several nodes, one run: what each is asked, and a node's part in it."""

from __future__ import annotations

import hashlib
import re
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from simplan.cli.execute import RunOptions
from simplan.cli.fewer_nodes import refuse_unless_it_can_go_on
from simplan.cli.output import say
from simplan.cli.processes import run_executor
from simplan.cost.calibration import CalibrationRequest
from simplan.errors import Problem, SpecError
from simplan.io import write_model
from simplan.program.nodes import Nodes
from simplan.scenario import Scenario

__all__ = [
    "Meeting",
    "join",
    "join_calibration",
    "nodes_of",
    "nodes_to_time",
    "numbers_of_nodes",
    "refuse_other_number",
    "refuse_without_nodes",
]

_LAST_CALL_S = 30.0  # as torchrun
_NUMBERS = re.compile(r"(?:(?P<least>[0-9]{1,6}):)?(?P<all>[0-9]{1,6})")
_ENDPOINT = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\s]+)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Meeting:
    """The options of ``simplan run`` and ``calibrate`` about nodes, as given."""

    num_nodes: int = 1
    rdzv: str | None = None
    node_rank: int | None = None
    interface: str | None = None
    join_timeout_s: float = 300.0
    min_nodes: int | None = None
    last_call_timeout_s: float | None = None


def numbers_of_nodes(text: str) -> tuple[int | None, int]:
    """What ``N`` or ``MIN:MAX`` says: the fewest that begin and go on (None for ``N``), and all.

    Raises:
        SpecError: It is neither.
    """
    match = _NUMBERS.fullmatch(text)
    least, number = (0, 0) if match is None else (int(match["least"] or match["all"]), int(match["all"]))
    if match is None or not 1 <= least <= number:
        rule = "must be a number of nodes, or MIN:MAX with MIN from 1 to MAX"
        raise SpecError(Problem(field="--nodes", value=text, rule=rule))
    return None if match["least"] is None or least == number else least, number


def nodes_of(scenario: Scenario, options: RunOptions, meeting: Meeting) -> Nodes | None:
    """The request to the other nodes; None for a run on this machine alone.

    Raises:
        SpecError: The options do not fit each other or the scenario.
    """
    cluster, num_nodes = scenario.job.cluster, meeting.num_nodes
    if meeting.last_call_timeout_s is not None and meeting.min_nodes is None:
        value = f"{meeting.last_call_timeout_s:g}"
        rule = "is about runs that may begin with fewer nodes"
        raise SpecError(Problem(field="--last-call-timeout", value=value, rule=rule, fix="give --nodes MIN:MAX"))
    if num_nodes == 1:
        if cluster.num_nodes > 1:
            rule = f"the scenario's cluster has {cluster.num_nodes} nodes"
            fix = f"give --nodes {cluster.num_nodes} --rdzv HOST:PORT on each of them"
            raise SpecError(Problem(field="--nodes", value="1", rule=rule, fix=fix), file=scenario.file)
        refuse_without_nodes(meeting)
        return None
    refuse_other_number(scenario, num_nodes)
    if meeting.min_nodes is not None:
        refuse_unless_it_can_go_on(scenario, meeting.min_nodes, options.checkpointing)
    asked = {"--nodes": f"{meeting.min_nodes or num_nodes}:{num_nodes}", **_asked(scenario, options)}
    if meeting.last_call_timeout_s is not None:
        asked["--last-call-timeout"] = f"{meeting.last_call_timeout_s:g}"
    return _nodes(meeting, cluster.num_devices // num_nodes, asked)


def refuse_other_number(scenario: Scenario, num_nodes: int) -> None:
    """``--nodes`` must be those of the scenario's cluster.

    Raises:
        SpecError: It is another number.
    """
    cluster = scenario.job.cluster
    if cluster.num_devices % num_nodes:
        rule = f"must divide the {cluster.num_devices} devices of the scenario's cluster"
        raise SpecError(Problem(field="--nodes", value=str(num_nodes), rule=rule), file=scenario.file)
    if cluster.num_nodes != num_nodes:
        rule = f"the scenario's cluster has {cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''}"
        fix = f"use --nodes {cluster.num_nodes}, or change cluster.num_nodes"
        raise SpecError(Problem(field="--nodes", value=str(num_nodes), rule=rule, fix=fix), file=scenario.file)


def nodes_to_time(meeting: Meeting, request: CalibrationRequest) -> Nodes:
    """The request to the other nodes of a calibration of what joins them.

    Raises:
        SpecError: The options do not fit each other.
    """
    asked = {"calibrate": "collectives and messages", "--ranks": str(request.num_ranks), "--device": request.device}
    return _nodes(meeting, request.num_ranks, asked | {"--budget": f"{request.budget_s:g}"})


def refuse_without_nodes(meeting: Meeting) -> None:
    """Options about several nodes mean nothing on one.

    Raises:
        SpecError: One of them is given.
    """
    given = {"--rdzv": meeting.rdzv, "--node-rank": meeting.node_rank, "--interface": meeting.interface}
    for option, value in given.items():
        if value is not None:
            rule = "is about several nodes, and --nodes is 1"
            raise SpecError(Problem(field=option, value=str(value), rule=rule, fix="give --nodes too"))


def _nodes(meeting: Meeting, ranks_per_node: int, asked: dict[str, str]) -> Nodes:
    host, port = _endpoint(meeting.rdzv)
    node_rank = meeting.node_rank
    if node_rank is not None and node_rank >= meeting.num_nodes:
        rule = f"must be less than --nodes = {meeting.num_nodes}"
        raise SpecError(Problem(field="--node-rank", value=str(node_rank), rule=rule))
    return Nodes(
        num_nodes=meeting.num_nodes,
        min_nodes=meeting.min_nodes,
        ranks_per_node=ranks_per_node,
        host=host,
        port=port,
        node_rank=0 if node_rank is None and _is_here(host) else node_rank,
        interface=meeting.interface,
        join_timeout_s=meeting.join_timeout_s,
        last_call_timeout_s=_LAST_CALL_S if meeting.last_call_timeout_s is None else meeting.last_call_timeout_s,
        asked=asked,
    )


def join(nodes: Nodes, folder: Path) -> None:
    """Runs this node's part of what node 0 runs; says little, for node 0 shows the result.

    Raises:
        SpecError: The nodes were not asked the same.
        RunError: The run failed, on whichever node.
    """
    say(f"joining node 0 at {nodes.endpoint}")
    folder.mkdir(parents=True, exist_ok=True)
    request = folder / f"{socket.gethostname()}.nodes.json"  # nodes may share a file system
    write_model(request, nodes)
    run_executor(["join", str(request), "--out", str(folder)], lambda event: say(f"note: {event['text']}"))


def join_calibration(nodes: Nodes) -> None:
    """Runs this node's part of what node 0 calibrates.

    Raises:
        SpecError: The nodes were not asked the same.
        RunError: It failed, on whichever node.
    """
    say(f"joining node 0 at {nodes.endpoint}")
    with tempfile.TemporaryDirectory(prefix="simplan-") as folder:
        request = Path(folder) / "nodes.json"
        write_model(request, nodes)
        run_executor(["join-calibration", str(request)], lambda event: None)


def _endpoint(rdzv: str | None) -> tuple[str, int]:
    match = None if rdzv is None else _ENDPOINT.fullmatch(rdzv)
    if match is None or not 0 < int(match["port"]) < 2**16:
        rule = "must say where the nodes meet" if rdzv is None else "must be HOST:PORT"
        raise SpecError(
            Problem(field="--rdzv", value=rdzv, rule=rule, fix="give a name of node 0 and a free port there")
        )
    return match["v6"] or match["host"], int(match["port"])


def _is_here(host: str) -> bool:
    """Whether one of the host's addresses is this machine's: only such an address can be listened on."""
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


def _asked(scenario: Scenario, options: RunOptions) -> dict[str, str]:
    """What must be equal on all nodes; of machines, their number only."""
    cluster = scenario.job.cluster
    sections = {
        "model": scenario.job.model.model_dump_json(),
        "training": scenario.job.training.model_dump_json(),
        "plan": scenario.job.plan.model_dump_json(),
        "software": scenario.job.software.model_dump_json(),
        "cluster": f"{cluster.num_nodes} x {cluster.ranks_per_node} {cluster.device.id}",
    }
    asked = {section: hashlib.sha256(text.encode()).hexdigest()[:16] for section, text in sections.items()}
    flags = {"--steps": options.num_steps, "--warmup": options.num_warmup_steps, "--timeout": options.timeout_s}
    return {"name": scenario.name, **asked, **{flag: str(value) for flag, value in (flags | _kept(options)).items()}}


def _kept(options: RunOptions) -> dict[str, object]:
    """The flags about checkpoints: ranks of all nodes write into one folder and read from it."""
    kept = options.checkpointing
    if kept is None:
        return {"--checkpoint-dir": None}
    return {
        "--checkpoint-dir": kept.folder,
        "--checkpoint-every": kept.every,
        "--restarts": kept.max_restarts,
        "--resume": kept.resume,
    }
