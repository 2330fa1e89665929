"""The stores of a run: on this machine alone, or on the node at the endpoint, which torchrun's rendezvous uses too.

The leading node puts the job into the store, and the other nodes take it from there. At the end every node puts the
measurements of its ranks there, and the reason of a failure.

torch's stores have no password. Here they listen at one address: the loopback without other nodes, else that of the
interface on the route to the endpoint.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from executor.launch.errors import RanksError
from simplan.errors import Problem, RunError, SpecError
from simplan.runs.elastic import RendezvousOptions

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_NAME_BYTES = 16  # IFNAMSIZ
_ANYWHERE = "192.0.2.1"  # RFC 5737: nothing is sent there
_CAUSE_S = 5.0  # for the node with the cause to report it
_COLLECT_S = 30.0
_FAILED_S = 12.0  # ranks that another node has stopped wait 5 s for a signal of their own
LOOPBACK = "127.0.0.1"
LOCAL = "simplan-local"  # name of the rendezvous without other nodes
_LOCAL_S = 60.0
_ANSWER_S = 15  # of the store; without one, the leading node is lost


class Rendezvous:
    """Connection of this node to the other nodes.

    Args:
        job: The job as JSON, on the leading node only.

    Attributes:
        job: The job, the same on all nodes.
        store: Store of the run.
        address: Address of this node for the other nodes.
        environment: Variables that make gloo and NCCL use the interface with that address.

    Raises:
        SpecError: The leading node cannot listen at the endpoint, or its request is another one.
        RunError: The leading node did not answer in time.
    """

    def __init__(self, nodes: RendezvousOptions, job: str | None) -> None:
        assert nodes.leads == (job is not None)
        self.nodes = nodes
        interface, self.address = interface_towards(nodes)
        self._host = listening_address(nodes) if nodes.leads else nodes.host
        self.environment = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        try:
            timeout = timedelta(seconds=nodes.join_timeout_s)
            if nodes.leads:
                self.store = listening_store(self._host, nodes.port, timeout)
            else:
                self.store = TCPStore(nodes.host, nodes.port, wait_for_workers=False, timeout=timeout)
            requested = {**nodes.requested, "torch": str(torch.__version__)}
            if job is not None:
                self.store.set("job", json.dumps({"requested": requested, "job": job}))
            told = json.loads(self.store.get("job"))
        except OSError as error:
            rule = f"cannot be listened on: {os.strerror(error.errno or 0)}"
            raise SpecError(
                Problem(field="--rdzv-endpoint", value=nodes.endpoint, rule=rule, fix="use another port")
            ) from None
        except RuntimeError:
            waited = f"no job was found at {nodes.endpoint} within {nodes.join_timeout_s:g} s"
            raise RunError(f"{waited}; run the same command on {nodes.host} too") from None
        for section in told["requested"] | requested:
            if told["requested"].get(section) != requested.get(section):
                rule = f"is not what {nodes.host} was asked"
                fix = "copy the scenario from there, and use equal options and versions"
                raise SpecError(Problem(field=section, value=requested.get(section), rule=rule, fix=fix))
        self.job: str = told["job"]
        self.store.set_timeout(timedelta(seconds=_ANSWER_S))

    @property
    def address_of_store(self) -> tuple[str, int]:
        """Address of the store as host and port."""
        return self._host, self.nodes.port

    @property
    def endpoint(self) -> str:
        """Address of the store as ``HOST:PORT``."""
        return self.nodes.model_copy(update={"host": self._host}).endpoint

    @property
    def listening(self) -> str:
        """Addresses at which this node listens during the run, as a sentence for the user."""
        store = f"the store of the run listens at {self.endpoint}, and " if self.nodes.leads else ""
        rule = "torch asks for no password, so only the nodes of the run should reach them"
        return f"{store}ranks listen at ports of {self.address}: {rule}"

    def torchrun_settings(self) -> dict[str, str | int]:
        """``rdzv_configs`` of torch's launcher for the existing store."""
        return {
            "is_host": "false",
            "join_timeout": int(self.nodes.join_timeout_s) + 1,
            "last_call_timeout": int(self.nodes.last_call_timeout_s),
            "read_timeout": _ANSWER_S,
        }

    def agreed(self, mine: RanksError) -> RunError:
        """Reason of the failure: that of another node, where this node saw only a consequence."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            if not mine.is_consequence:
                self.store.compare_set("cause", "", f"{socket.gethostname()}: {mine}")
            else:
                self.store.wait(["cause"], timedelta(seconds=_CAUSE_S))
            return RunError(self.store.get("cause").decode())
        return mine

    def has_failed(self) -> bool:
        """True if a node has told the reason of a failure, within some seconds."""
        try:
            self.store.wait(["cause"], timedelta(seconds=_CAUSE_S))
        except (RuntimeError, TimeoutError):
            return False
        return True

    def farewell(self) -> None:
        """Keeps the leading node, which has the store, until the other nodes have ended."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            left = self.store.add("left", 1)
            if self.nodes.leads and left < self.nodes.max_nodes:
                end_s = time.monotonic() + _CAUSE_S
                while self.store.add("left", 0) < self.nodes.max_nodes and time.monotonic() < end_s:
                    time.sleep(0.05)

    def tell(self, text: str) -> None:
        """Tells the other nodes something, once and for all."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self.store.set(f"told/{self.num_told()}", text)
            self.store.add("told", 1)

    def num_told(self) -> int:
        """Number of texts that were told so far; 0 where the store does not answer."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            return int(self.store.add("told", 0))
        return 0

    def told_since(self, number: int) -> Iterator[str]:
        """Yields what was told after a number of texts."""
        for k in range(number, self.num_told()):
            with contextlib.suppress(RuntimeError, TimeoutError):
                yield self.store.get(f"told/{k}").decode()

    def begin(self, ranks: Iterable[int]) -> None:
        """Deletes measurements of these ranks by another node; they start on this node now."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            for rank in ranks:
                self.store.delete_key(f"rank/{rank}")

    def leave(self, files: Mapping[int, Mapping[str, str]]) -> None:
        """Gives the leading node the files of this node's ranks: texts by rank and file name."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            for rank, texts in files.items():
                told = json.dumps({"node": f"{socket.gethostname()} {self.address}", "texts": texts})
                self.store.set(f"rank/{rank}", base64.b64encode(zlib.compress(told.encode())).decode())

    def collect(self, ranks: Iterable[int], *, failed: bool) -> dict[int, tuple[str, dict[str, str]]]:
        """Collects on the leading node, by rank, the node and the files that arrive in time."""
        collected = {}
        end_s = time.monotonic() + (_FAILED_S if failed else _COLLECT_S)
        for rank in ranks:
            left_s = max(0.01, end_s - time.monotonic())
            with contextlib.suppress(RuntimeError, TimeoutError):
                self.store.wait([f"rank/{rank}"], timedelta(seconds=left_s))
                told = json.loads(zlib.decompress(base64.b64decode(self.store.get(f"rank/{rank}"))))
                collected[rank] = (told["node"], told["texts"])
        return collected


def listening_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """A store that listens at one address; torch's own listens at all of this machine.

    Args:
        port: 0 for any free port.

    Raises:
        OSError: The port is in use, or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    handle = listener.detach()  # the store closes it
    return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=handle)


class LocalRendezvous(RendezvousHandler):
    """torchrun's rendezvous on a machine without other nodes: a store on its loopback."""

    def __init__(self) -> None:
        self.store = listening_store(LOOPBACK, 0, timedelta(seconds=_LOCAL_S))
        self._is_closed = False

    @property
    def use_agent_store(self) -> bool:
        """Ranks use this store as well."""
        return True

    def get_backend(self) -> str:
        """Name of this rendezvous."""
        return LOCAL

    def next_rendezvous(self) -> RendezvousInfo:
        """This node is the only one."""
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.store.port))

    def is_closed(self) -> bool:
        """True after ``set_closed``."""
        return self._is_closed

    def set_closed(self) -> None:
        """Called when the ranks have ended."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """No node comes."""
        return 0

    def get_run_id(self) -> str:
        """Name of the run."""
        return "simplan"

    def shutdown(self) -> bool:
        """The store ends with this object."""
        return True


def listening_address(nodes: RendezvousOptions) -> str:
    """Address of the leading node at which the other nodes find the store.

    Where its name stands for 127.0.1.1, that is the address of its default route.
    """
    address = _route_to(nodes.host)
    if address.startswith("127.") and not nodes.host.startswith(("127.", "localhost")):
        with contextlib.suppress(OSError):
            return _route_to(_ANYWHERE)
    return address


def interface_towards(nodes: RendezvousOptions) -> tuple[str, str]:
    """Network interface on the route to the endpoint and this node's address on that interface.

    ``GLOO_SOCKET_IFNAME`` names another interface.

    Raises:
        SpecError: There is no such interface.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is not None:
        if (address := _address_of(interface)) is None:
            rule = "is no network interface with an IPv4 address here"
            raise SpecError(Problem(field="GLOO_SOCKET_IFNAME", value=interface, rule=rule))
        return interface, address
    try:
        address = listening_address(nodes) if nodes.leads else _route_to(nodes.host)
        interface = next((name for _, name in socket.if_nameindex() if _matches(_address_of(name), address)), None)
    except OSError as error:
        rule = f"cannot be reached from here: {error.strerror}"
        raise SpecError(Problem(field="--rdzv-endpoint", value=nodes.host, rule=rule)) from None
    if interface is None:
        rule = f"no network interface here has the address {address}, which the route to it starts from"
        fix = "set GLOO_SOCKET_IFNAME"
        raise SpecError(Problem(field="--rdzv-endpoint", value=nodes.host, rule=rule, fix=fix))
    return interface, address


def _route_to(host: str) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of datagrams: nothing is sent
        return str(probe.getsockname()[0])


def _matches(mine: str | None, address: str) -> bool:
    return mine is not None and (mine == address or (mine.startswith("127.") and address.startswith("127.")))


def _address_of(interface: str) -> str | None:
    request = struct.pack(f"{_NAME_BYTES}s240x", interface.encode()[: _NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
