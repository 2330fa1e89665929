"""How much compute slows beside communication: NCCL's blocks hold multiprocessors that kernels then lack.

A block of NCCL has a multiprocessor to itself, and there is one for every channel: "NCCL CTAs won't share an SM with
compute kernels", two for one NIC, 16 for the eight NICs of a DGX (NVIDIA/nccl issue 689, by its authors); 24 inside a
node of H100 (NVIDIA developer forum, topic 337991), assumed of others. A kernel that fills a device therefore runs at
1 - channels / multiprocessors of its speed while bytes move: 0.78 on an A100, 0.82 on an H100. Measured on four A100,
H100, MI210 and MI250: 18.9 % slower on average, 40 % at most (Lee et al. 2025, arXiv:2507.03114).

Not modelled: that a grid which just fills the device needs a second wave then (twice the time, at worst); memory
bandwidth, of which a collective takes two to three times its bus bandwidth (NVIDIA/nccl issue 1428); power.
"""

from __future__ import annotations

from simplan.cost.route import Route

__all__ = ["beside_s", "lost_share", "num_channels"]

_CHANNELS_INSIDE = 24
_CHANNELS_OF_NIC = 2


def num_channels(route: Route) -> int:
    """Channels of a collective with large messages.

    Args:
        route: Where its ranks are; each device of a node is taken to have a NIC.
    """
    if route.between is None:
        return _CHANNELS_INSIDE
    return min(_CHANNELS_INSIDE, _CHANNELS_OF_NIC * route.local)


def lost_share(route: Route, num_multiprocessors: int) -> float:
    """Part of its speed that a kernel loses beside a collective.

    Args:
        route: Where the ranks of the collective are.
        num_multiprocessors: Of a device, e.g. 108 of an A100 and 132 of an H100.
    """
    return min(0.5, num_channels(route) / num_multiprocessors)


def beside_s(compute_s: float, communication_s: float, lost: float) -> float:
    """Time of compute that starts together with communication.

    It runs at ``1 - lost`` of its speed until one of them ends: a second of communication beside it costs it ``lost``
    seconds.

    >>> beside_s(10.0, 4.0, 0.25), beside_s(3.0, 100.0, 0.25)
    (11.0, 4.0)

    Args:
        compute_s: What it takes alone.
        communication_s: What the communication takes.
        lost: See ``lost_share``.
    """
    return min(compute_s + lost * communication_s, compute_s / (1 - lost))
