"""Algorithms of collectives that a plan prescribes, where the library would choose by size and group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pydantic import model_validator

from simplan.base import Count, Spec

ReduceAlgorithm = Literal["ring", "tree", "nvls", "sharp", "halving_doubling", "hierarchical", "parameter_server"]
ShardAlgorithm = Literal["ring", "nvls", "halving_doubling", "hierarchical"]
AllToAllAlgorithm = Literal["pairwise", "hierarchical"]
ParameterPlacement = Literal["whole", "parts"]


class Collectives(Spec):
    """Algorithm of each collective; None for the library's choice.

    NCCL chooses from ``ring``, ``tree`` (double binary trees), ``nvls`` (reduction in the NVLink switch) and
    ``pairwise``. ``sharp`` reduces in the switches between nodes. ``halving_doubling`` is recursive halving and
    doubling. ``hierarchical`` does one collective inside each node and one between nodes. With ``parameter_server``,
    ranks add gradients inside each node. Nodes then push the sums to servers, which are nodes themselves, and pull the
    totals.

    Attributes:
        parameter_servers: Nodes that each serve some of the parameters; None for 1.
        parameter_placement: Parameters of a server. ``parts``: an equal part of every parameter. ``whole``: every
            parameter is on one server, the first on the first, the next on the next, and so on round the servers, as
            TensorFlow places variables. None for ``parts``.
    """

    all_reduce: ReduceAlgorithm | None = None
    all_gather: ShardAlgorithm | None = None
    reduce_scatter: ShardAlgorithm | None = None
    all_to_all: AllToAllAlgorithm | None = None
    parameter_servers: Count | None = None
    parameter_placement: ParameterPlacement | None = None

    @model_validator(mode="after")
    def _servers_serve(self) -> Collectives:
        for name in ("parameter_servers", "parameter_placement"):
            if getattr(self, name) is not None and self.all_reduce != "parameter_server":
                raise ValueError(f"has {name}, and all_reduce is not parameter_server; add it, or remove {name}")
        return self

    @property
    def num_servers(self) -> int:
        """Parameter servers; 0 for another algorithm of the all-reduce."""
        return (self.parameter_servers or 1) if self.all_reduce == "parameter_server" else 0

    def of(self, kind: str) -> str | None:
        """Algorithm of a collective by its name; None for the library's choice."""
        return getattr(self, kind) if kind in _KINDS else None

    def prescribed(self) -> Iterator[tuple[str, str]]:
        """Names of collectives with their algorithms, without those of the library's choice."""
        for kind in _KINDS:
            if (algorithm := getattr(self, kind)) is not None:
                yield kind, algorithm

    @property
    def words(self) -> str:
        """Description, e.g. ``all_reduce by tree, all_to_all by pairwise``."""
        whole = ", whole parameters" if self.parameter_placement == "whole" else ""
        servers = f" (servers: {self.num_servers}{whole})" if self.num_servers else ""
        return ", ".join(f"{kind} by {algorithm}{servers}" for kind, algorithm in self.prescribed())

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Fields of the short form: those that are not None."""
        yield from ((name, value) for name, value in super().__repr_args__() if value is not None)


_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def shares_of_whole(parameters: Iterable[int], num_servers: int) -> tuple[float, ...]:
    """Fraction of all elements on each server, where parameters are placed whole and in turn.

    Source: tensorflow/python/training/device_setter.py (``_RoundRobinStrategy``).

    >>> shares_of_whole([60, 10, 20, 10], 2)
    (0.8, 0.2)

    Args:
        parameters: Elements of each parameter, in the order of the model.
        num_servers: Servers; those that no parameter is left for serve nothing.
    """
    sizes = [*parameters]
    return tuple(sum(sizes[server::num_servers]) / sum(sizes) for server in range(num_servers))


def none_if_empty(collectives: Collectives | None) -> Collectives | None:
    """The algorithms; None if all are the library's choice."""
    return collectives if collectives is not None and collectives.words else None
