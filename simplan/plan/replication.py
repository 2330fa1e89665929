"""Replication of a plan: what keeps replicas together other than whole gradients in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from simplan.base import Count, Spec, SpecOfKind, named_kind
from simplan.plan.collectives import ParameterPlacement
from simplan.units import counted

ReplicationKind = Literal["local_sgd", "diloco", "streaming_diloco", "parameter_server", "hogwild"]
OuterDtype = Literal["fp32", "fp16", "bf16", "int8", "int4"]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

_OUTER = ("inner_steps", "outer")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "local_sgd": ("inner_steps", "start_step", "min_replicas"),
    "diloco": (*_OUTER, "min_replicas"),
    "streaming_diloco": (*_OUTER, "fragments", "overlap_steps", "mixing"),
    "parameter_server": ("servers", "staleness", "parameter_placement", "server_nodes", "min_replicas"),
    "hogwild": ("lock",),
}
"""Keys of each kind besides ``kind``."""

_INNER_STEPS: dict[ReplicationKind, int] = {"local_sgd": 8, "diloco": 500, "streaming_diloco": 100}
"""Default inner steps: Lin et al. 2018 (H = 8 of ResNet-20), DiLoCo (H = 500) and Streaming DiLoCo (H = 100)."""


class Outer(Spec):
    """The outer optimizer of DiLoCo, which updates parameters by the mean pseudo-gradient of the replicas.

    A pseudo-gradient is the parameters at the beginning of a round minus those after its inner steps (Douillard et al.
    2023, arXiv:2311.08105, whose Nesterov momentum is the default). ``average`` takes the mean parameters themselves.
    """

    optimizer: Literal["nesterov", "average"] = Field("nesterov", description="outer optimizer")
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(0.7, description="for nesterov: outer learning rate")
    momentum: Fraction = Field(0.9, description="for nesterov: outer momentum")
    dtype: OuterDtype = Field("fp32", description="dtype of pseudo-gradients between replicas")
    on_host: bool = Field(False, description="outer parameters and momentum in host memory")

    @model_validator(mode="after")
    def _of_nesterov(self) -> Outer:
        wrong = [key for key in ("lr", "momentum") if key in self.model_fields_set]
        if self.optimizer == "average" and wrong:
            raise ValueError(f"has {' and '.join(wrong)}, and the average has neither; remove it")
        return self

    @model_serializer(mode="wrap")
    def _of_optimizer(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Only keys of the optimizer, so that what is written can be read."""
        hidden = ("lr", "momentum") if self.optimizer == "average" else ()
        return {key: value for key, value in write(self).items() if key not in hidden}

    @property
    def num_states(self) -> int:
        """Copies of the parameters that the outer optimizer keeps between rounds: themselves, and momentum."""
        return 2 if self.optimizer == "nesterov" and self.momentum else 1


class Replication(SpecOfKind):
    """Way in which the ``dp_replicate`` replicas of a plan stay together.

    ``local_sgd`` averages parameters after every ``inner_steps`` steps (Stich 2018, arXiv:1805.09767); with
    ``start_step`` replicas reduce gradients in every step before (post-local SGD, Lin et al. 2018, arXiv:1808.07217).
    ``diloco`` hands the mean pseudo-gradient of a round to an outer optimizer (Douillard et al. 2023,
    arXiv:2311.08105). ``streaming_diloco`` does so for one fragment of the model after the other, while the replicas go
    on for ``overlap_steps`` steps (Douillard et al. 2025, arXiv:2501.18512).

    With ``parameter_server`` workers push gradients to servers and pull parameters. A worker may be ``staleness`` steps
    ahead of the slowest one (SSP, Ho et al. 2013); 0 is synchronous, and ``unbounded`` asynchronous. With ``hogwild``
    processes of one host update shared parameters, by default without a lock (Niu et al. 2011, arXiv:1106.5730).

    With ``min_replicas`` a run goes on without restart when replicas leave, as long as so many are there, and takes in
    replicas that come back. Without, a run ends with any of its replicas.
    """

    keys_of_kinds: ClassVar[Mapping[str, tuple[str, ...]]] = _KEYS

    kind: ReplicationKind = Field(description="how replicas stay together")
    inner_steps: Count = Field(
        500, description="for local_sgd and diloco: steps of a round; default: 8, for diloco 500, for streaming 100"
    )
    start_step: Annotated[int, Field(ge=0, le=10**12)] = Field(
        0, description="for local_sgd: first steps, with whole gradients (post-local SGD)"
    )
    outer: Outer = Field(Outer(), description="for diloco: optimizer, lr, momentum, dtype, on_host of the outer step")
    fragments: Count = Field(4, description="for streaming_diloco: parts of the model, each with its own outer step")
    overlap_steps: Annotated[int, Field(ge=0, le=10**12)] = Field(
        1, description="for streaming_diloco: steps during which a fragment is communicated"
    )
    mixing: Fraction = Field(
        0.5, description="for streaming_diloco: fraction of a replica's own parameters that an outer step keeps"
    )
    servers: Count = Field(1, description="for parameter_server: nodes that each serve some of the parameters")
    staleness: Annotated[int, Field(ge=0, le=10**12)] | Literal["unbounded"] = Field(
        0, description="for parameter_server: steps that a worker may be ahead of the slowest; or unbounded"
    )
    parameter_placement: ParameterPlacement = Field(
        "parts", description="for parameter_server: whole parameters in turn, or an equal part of every one"
    )
    server_nodes: Literal["workers", "apart"] = Field(
        "workers", description="for parameter_server: servers on the workers' nodes, or on nodes of their own"
    )
    lock: bool = Field(False, description="for hogwild: workers update one after the other")
    min_replicas: Count | None = Field(
        None, description="for local_sgd, diloco, parameter_server: fewest with which a run goes on when others leave"
    )

    @model_validator(mode="before")
    @classmethod
    def _default_of_kind(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(kind := data.get("kind"), str) and kind in _INNER_STEPS:
            return {"inner_steps": _INNER_STEPS[kind], **data}
        return data

    @model_validator(mode="after")
    def _no_step_needs_all_replicas(self) -> Replication:
        if self.min_replicas is None:
            return self
        if self.is_synchronous:
            raise ValueError(
                f"has min_replicas = {self.min_replicas} and staleness = {self.staleness}, with which every step waits "
                "for all workers; use staleness = 1 or more, or unbounded"
            )
        if self.start_step:
            raise ValueError(
                f"has min_replicas = {self.min_replicas} and start_step = {self.start_step}: the first steps reduce "
                "gradients over all replicas, so that none of them may leave; use start_step = 0"
            )
        return self

    @model_validator(mode="after")
    def _fragments_follow_each_other(self) -> Replication:
        if self.kind == "streaming_diloco":
            if self.inner_steps % self.fragments:
                raise ValueError(
                    f"has inner_steps = {self.inner_steps}, which fragments = {self.fragments} must divide, as each "
                    "fragment is updated once in as many steps"
                )
            between = self.inner_steps // self.fragments
            if self.overlap_steps > between:
                raise ValueError(
                    f"has overlap_steps = {self.overlap_steps}, and a fragment follows another after {between} steps "
                    f"(inner_steps / fragments); use {between} or less"
                )
        return self

    @property
    def is_synchronous(self) -> bool:
        """True for parameter servers for which all workers wait in every step."""
        return self.kind == "parameter_server" and self.staleness == 0

    @property
    def has_servers(self) -> bool:
        """True for workers that push gradients to parameter servers and do not wait for all others."""
        return self.kind == "parameter_server" and not self.is_synchronous

    @property
    def has_workers(self) -> bool:
        """True if replicas are workers that update common parameters without waiting for all others."""
        return self.has_servers or self.kind == "hogwild"

    @property
    def max_steps_ahead(self) -> int | None:
        """Steps that a worker may be ahead of the slowest one (SSP); None for any number."""
        return self.staleness if self.has_servers and isinstance(self.staleness, int) else None

    def server_rank(self, server: int, num_workers: int, worker: int) -> int:
        """Rank by whose node a server is reached from a worker.

        Servers on the workers' nodes are spread evenly, so that as many servers as nodes are one per node. A server
        apart is as far as a rank of another node.
        """
        if self.server_nodes == "apart":
            return (worker + num_workers // 2) % num_workers
        return server * num_workers // self.servers

    def server_slices(self, sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
        """By server, the slices ``(parameter, begin, end)`` that it serves of parameters with these elements.

        Whole parameters are placed in turn (``shares_of_whole``); else every server has an equal part of all elements
        in sequence.
        """
        if self.parameter_placement == "whole":
            whole = [(index, 0, size) for index, size in enumerate(sizes)]
            return [whole[server :: self.servers] for server in range(self.servers)]
        total, found = sum(sizes), [list[tuple[int, int, int]]() for _ in range(self.servers)]
        for server, own in enumerate(found):
            first, last, before = server * total // self.servers, (server + 1) * total // self.servers, 0
            for index, size in enumerate(sizes):
                begin, end = max(first - before, 0), min(last - before, size)
                if begin < end:
                    own.append((index, begin, end))
                before += size
        return found

    @property
    def has_rounds(self) -> bool:
        """True if replicas train alone for the steps of a round, and meet at its end."""
        return self.kind in _INNER_STEPS

    @property
    def outer_steps(self) -> int:
        """Outer steps of a round: one for each fragment."""
        return self.fragments if self.kind == "streaming_diloco" else 1

    @property
    def steps_beside(self) -> int:
        """Steps during which an outer step communicates; 0 if replicas wait for it."""
        return self.overlap_steps if self.kind == "streaming_diloco" else 0

    @property
    def num_outer_states(self) -> int:
        """Copies of the parameters between rounds, besides those that are trained."""
        return self.outer.num_states if self.has_rounds and self.kind != "local_sgd" else 0

    @property
    def collectives(self) -> tuple[str, ...]:
        """Collectives of outer steps; none for other kinds."""
        if not self.has_rounds:
            return ()
        quantized = self.kind != "local_sgd" and self.outer.dtype in ("int8", "int4")
        return ("all_to_all", "all_gather") if quantized else ("all_reduce",)

    @property
    def words(self) -> str:
        """Description, e.g. ``replicas by diloco (500 inner steps)``."""
        match self.kind:
            case "hogwild":
                detail = "with a lock" if self.lock else "without a lock"
            case "parameter_server":
                many = "server" if self.servers == 1 else "servers"
                whole = ", whole parameters" if self.parameter_placement == "whole" and self.servers > 1 else ""
                detail = f"{self.servers} {many}{whole}, staleness {self.staleness}"
            case _:
                detail = f"{self.inner_steps} inner steps"
        elastic = "" if self.min_replicas is None else f", at least {counted(self.min_replicas, 'replica')}"
        return f"replicas by {self.kind} ({detail}{elastic})"


ReplicationSection = Annotated[
    Replication, BeforeValidator(named_kind, json_schema_input_type=Replication | ReplicationKind)
]
