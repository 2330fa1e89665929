"""Which address and which network interface of this node lead to another one."""

from __future__ import annotations

import fcntl
import socket
import struct

from simplan.errors import Problem, SpecError, did_you_mean
from simplan.program.nodes import Nodes

__all__ = ["address_of", "address_towards", "interface_with", "interfaces", "place_in_network"]

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_NAME_BYTES = 16  # IFNAMSIZ


def address_towards(host: str) -> str:
    """The address of this node on the route to a host; nothing is sent.

    Raises:
        OSError: The name is unknown, or no route leads there.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interfaces() -> list[str]:
    """Names of this node's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; None when it has none or does not exist."""
    request = struct.pack(f"{_NAME_BYTES}s240x", interface.encode()[: _NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_with(address: str) -> str | None:
    """The interface that has an IPv4 address, loopback for any address of its network; None when none has."""
    if address.startswith("127."):
        return next((name for name in interfaces() if (address_of(name) or "").startswith("127.")), None)
    return next((name for name in interfaces() if address_of(name) == address), None)


def place_in_network(nodes: Nodes, towards: str) -> tuple[str, str]:
    """The network interface that ranks talk over, and this node's address on it.

    Raises:
        SpecError: None is found, or there is none of the given name.
    """
    if nodes.interface is not None:
        address = address_of(nodes.interface)
        if address is None:
            rule = "is no network interface with an IPv4 address here"
            fix = did_you_mean(nodes.interface, [name for name in interfaces() if address_of(name)])
            raise SpecError(Problem(field="--interface", value=nodes.interface, rule=rule, fix=fix))
        return nodes.interface, address
    try:
        address = address_towards(towards)
        interface = interface_with(address)
    except OSError as error:
        rule = f"cannot be reached from here: {error.strerror}"
        raise SpecError(Problem(field="--rdzv", value=nodes.host, rule=rule)) from None
    if interface is None:
        rule = f"no network interface here has the address {address}, which the route to it starts from"
        raise SpecError(Problem(field="--rdzv", value=nodes.host, rule=rule, fix="give --interface"))
    return interface, address
