"""Parallel plan of a training run, its stages, and the ranks that hold them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from simplan.base import Count, Line, Spec
from simplan.plan.collectives import Collectives, none_if_empty
from simplan.plan.compression import CompressionSection
from simplan.plan.placement import check_placement
from simplan.plan.replication import Replication, ReplicationSection
from simplan.plan.schedules import SCHEDULE_FACTS, check_schedule_name
from simplan.plan.shard import Shard

Recompute = Literal["none", "selective", "selective_op", "selective_layer", "full", "minimal", "qkv_proj_offloaded"]
RecomputeModule = Literal["core_attn", "mla_up_proj", "layernorm", "moe_act", "mlp", "moe", "shared_experts"]


MAX_STAGES = 10_000
"""Stages of the longest pipeline for which one number of ``stage_layers`` stands for all."""
DEPENDENT = ("zero_stage", "sequence_parallel", "virtual_stages", "schedule", "microbatch_size")
"""Fields of a plan with defaults that depend on other fields."""


class ParallelPlan(Spec):
    """One way to parallelize a training run; field names are torchtitan's, or Megatron's where torchtitan has none.

    Defaults that depend on other fields are filled in when the plan is made. ``zero_stage`` is 3 if ``dp_shard`` is
    above 1; scenarios also assume it for ``cp`` above 1 where ``SoftwareSpec.shards_over_cp`` holds.
    ``sequence_parallel`` is on if ``tp`` is above 1. ``schedule`` is ``1f1b`` if ``pp`` is above 1
    (``interleaved_1f1b`` if ``virtual_stages`` is above 1), else ``none``. ``virtual_stages`` is 2 with schedules that
    need two stages per rank.

    ``fsdp_units`` leaves blocks of a captured model in FSDP's root unit, as torch's wrap policies by class and by size.

    ``grad_sync`` says when data-parallel ranks reduce gradients: once per ``step``, or after every ``microbatch``.
    ``None`` is ``microbatch`` for FSDP without a pipeline, else ``step``, as in torch (``reduces_every_microbatch``);
    scenarios assume ``step`` for FSDP where ``SoftwareSpec.defers_reductions`` holds.

    ``microbatch_sizes`` gives every data-parallel rank its own number of sequences per microbatch, in the order of the
    mesh: faster devices can take more. All ranks have the same number of microbatches, ``microbatch_size`` is the
    largest, and gradients are the mean over all sequences. ``balanced`` lets simplan divide dp x ``microbatch_size``
    sequences in proportion to the speed of the devices. ``None`` is ``microbatch_size`` for all ranks.

    ``schedule`` is a schedule of simplan, one from an installed package, or a CSV file with an action table. ``None``
    in ``grad_dtype`` and ``bucket_bytes`` means the framework's own value. ``stage_layers`` is the number of blocks per
    stage, or one number for all stages, ``None`` for a balanced split. Its first and last entries may be 0, for stages
    with the embedding or the head alone.

    ``recompute_modules`` names the modules of a block that ``selective`` recomputes, ``None`` for the attention core.
    ``recompute_layers`` limits recomputation to the first blocks of every stage, ``None`` for all blocks.
    ``offload_optimizer`` is FSDP2's CPUOffloadPolicy: shards of parameters, their gradients and optimizer states are in
    host memory, and the CPU updates them. ``offload_activations`` moves the tensors that blocks save for backward to
    host memory. ``offload_layers`` limits that to the first blocks of the model, ``None`` for all blocks.

    ``collectives`` prescribes algorithms of collectives, ``None`` for those that the library chooses. ``compression``
    has DDP communicate less than whole gradients. ``replication`` is another way to keep the ``dp_replicate`` replicas
    together than whole gradients in every step. Synchronous parameter servers are an algorithm of the all-reduce, so a
    plan with them has ``collectives`` instead.

    Experts have a separate mesh over the ranks of a stage (Liu et al. 2025, arXiv:2504.14960, MoE parallel folding).
    ``etp`` ranks split every expert's matrices, ``ep`` groups of these ranks hold different experts, and the remaining
    ranks replicate them. So ``ep`` may span tensor- and context-parallel ranks.

    ``placement`` orders the axes from the innermost to the outermost one, or lists the device of every rank
    (``simplan.plan.placement``). ``None`` is ``[tp, cp, dp_shard, dp_replicate, pp]``. Ranks keep their numbers.
    """

    dp_replicate: Count = Field(1, description="replicas of the model, or of its shards (DDP, HSDP)")
    dp_shard: Count = Field(1, description="data-parallel ranks that shard the states of zero_stage")
    zero_stage: Annotated[int, Field(ge=0, le=3)] = Field(
        0, description="sharded states: 1 optimizer states, 2 also gradients, 3 also weights (FSDP)"
    )
    reshard_after_forward: bool = Field(True, description="ZeRO-3 frees unsharded weights between forward and backward")
    fsdp_units: Annotated[tuple[Line, ...], Field(min_length=1, max_length=16)] | Count | None = Field(
        None,
        description="blocks of a captured model that FSDP gathers by themselves: names of their classes, or the least "
        "number of parameters; default: all",
    )
    tp: Count = Field(1, description="ranks that split every matrix and its heads")
    sequence_parallel: bool = Field(
        False, description="tensor-parallel ranks also split the tokens of norms and residual sums"
    )
    cp: Count = Field(1, description="ranks that split every sequence")
    cp_comm: Literal["ring", "all_gather", "a2a"] = Field(
        "ring", description="context-parallel attention: ring, all-gather of keys and values, or all-to-all (Ulysses)"
    )
    ep: Count = Field(1, description="ranks with different experts, within dp, cp and tp")
    etp: Count = Field(1, description="ranks that split every expert: 1 or tp")
    pp: Count = Field(1, description="pipeline ranks")
    virtual_stages: Count = Field(1, description="stages per pipeline rank")
    schedule: Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(check_schedule_name)] = Field(
        "none", description="order of forwards and backwards; or a CSV file with a custom action table"
    )
    microbatch_size: Count = Field(1, description="sequences (or images) of a microbatch")
    microbatch_sizes: Annotated[tuple[Count, ...], Field(min_length=1)] | Literal["balanced"] | None = Field(
        None, description="sequences per microbatch of each data-parallel rank; balanced: by the speed of its devices"
    )
    recompute: Recompute = Field(
        "none",
        description="modules recomputed in backward; selective_op and _layer are torchtitan's, the last two MaxText's",
    )
    recompute_modules: tuple[RecomputeModule, ...] | None = Field(
        None, description="for selective: modules of a block, named as in Megatron Core; default: attention core"
    )
    recompute_layers: Count | None = Field(None, description="for full: number of first blocks per stage; default: all")
    stage_layers: tuple[Annotated[int, Field(ge=0, le=10**12)], ...] | None = Field(
        None,
        description=(
            "blocks per stage, in order, or one number for all; default: equal under Megatron and NeMo, else balanced"
        ),
    )
    grad_sync: Literal["step", "microbatch"] | None = Field(
        None,
        description=(
            "when gradients are reduced: once per step, or per microbatch, which lets FSDP accumulate in shards"
        ),
    )
    grad_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="dtype of gradient reduction; default: that of the framework"
    )
    bucket_bytes: Count | None = Field(
        None, description="gradients that are reduced together; default: that of the framework"
    )
    offload_optimizer: bool = Field(
        False, description="FSDP's CPUOffloadPolicy: parameter shards, gradients and optimizer states in host memory"
    )
    offload_activations: bool = Field(
        False, description="activations of blocks that are saved for backward in host memory"
    )
    offload_layers: Count | None = Field(
        None, description="number of first blocks with offloaded activations; default: all"
    )
    collectives: Annotated[Collectives | None, AfterValidator(none_if_empty)] = Field(
        None, description="algorithm of each collective; default: the library's choice by size and group"
    )
    compression: CompressionSection | None = Field(
        None, description="gradients of DDP in fewer bytes: a kind, or a mapping of kind, rank, ratio and others"
    )
    replication: ReplicationSection | None = Field(
        None, description="how replicas stay together: a kind, or a mapping of kind, inner_steps, outer and others"
    )
    placement: Annotated[tuple[str, ...] | tuple[int, ...] | None, BeforeValidator(check_placement)] = Field(
        None,
        description=(
            "axes from inside of nodes outwards; the device of every rank; a hostfile, or a CSV file with rank, node, "
            "device; or network, which keeps nodes of one switch together"
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        filled = dict(data)

        def above_one(key: str) -> bool:
            value = filled.get(key, 1)
            return isinstance(value, int) and value > 1

        filled.setdefault("zero_stage", 3 if above_one("dp_shard") else 0)
        filled.setdefault("sequence_parallel", above_one("tp"))
        if above_one("pp"):
            filled.setdefault("schedule", "interleaved_1f1b" if above_one("virtual_stages") else "1f1b")
            filled.setdefault("virtual_stages", _stages_of(filled["schedule"]))
        layers, stages = filled.get("stage_layers"), (filled.get("pp", 1), filled.get("virtual_stages", 1))
        if all(type(number) is int and number >= 0 for number in (layers, *stages)) and math.prod(stages) <= MAX_STAGES:
            filled["stage_layers"] = (layers,) * math.prod(stages)
        sizes = filled.get("microbatch_sizes")
        if isinstance(sizes, list | tuple) and sizes and all(isinstance(size, int) for size in sizes):
            filled.setdefault("microbatch_size", max(sizes))
        for name in (
            "fsdp_units",
            "stage_layers",
            "recompute_modules",
            "microbatch_sizes",
        ):  # a file has lists, and strict mode wants the tuple itself
            if isinstance(filled.get(name), list):
                filled[name] = tuple(filled[name])
        return _with_synchronous_servers(filled)

    def _without_defaults(self) -> dict[str, Any]:
        """Values of the fields, except those that ``_dependent_defaults`` would fill in.

        >>> ParallelPlan(pp=2).with_changes(pp=1).schedule
        'none'
        >>> ParallelPlan(pp=2, schedule="gpipe").with_changes(pp=4).schedule
        'gpipe'
        """
        fields = super()._without_defaults()
        for name in DEPENDENT:
            others = {other: value for other, value in fields.items() if other != name}
            if getattr(ParallelPlan(**others), name) == fields[name]:
                fields = others
        return fields

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Fields of the short form: those that have another value than their default.

        >>> ParallelPlan(dp_shard=4, tp=2, zero_stage=2)
        ParallelPlan(dp_shard=4, zero_stage=2, tp=2)
        """
        fields = type(self).model_fields
        yield from ((k, v) for k, v in self._without_defaults().items() if v != fields[k].default)

    @property
    def dp(self) -> int:
        """Data-parallel ranks: replicas times shards."""
        return self.dp_replicate * self.dp_shard

    @property
    def sequences_per_microbatch(self) -> int:
        """Sequences of one microbatch of all data-parallel ranks together."""
        return sum(self.sizes_of_ranks)

    @property
    def sizes_of_ranks(self) -> tuple[int, ...]:
        """``(dp,)`` Sequences per microbatch of each data-parallel rank; equal ones before they are balanced."""
        if isinstance(self.microbatch_sizes, tuple):
            return self.microbatch_sizes
        return (self.microbatch_size,) * self.dp

    @property
    def replicas_apart(self) -> bool:
        """True if replicas do not reduce gradients with each other in every step (``replication``)."""
        return self.replication is not None

    @property
    def round_steps(self) -> int:
        """Steps of a round of replicas that train alone between outer steps; 1 if all steps are alike."""
        return self.replication.inner_steps if self.replication is not None and self.replication.has_rounds else 1

    @property
    def gradient_group(self) -> GroupKind:
        """Kind of the group that averages gradients in every step."""
        return "shard" if self.replicas_apart else "dp"

    @property
    def num_averaging(self) -> int:
        """Ranks that average gradients in every step."""
        return (self.dp_shard if self.replicas_apart else self.dp) * self.cp

    @property
    def num_devices(self) -> int:
        """Devices of the plan (``ep`` and ``etp`` reuse the ranks of a stage)."""
        return self.dp * self.tp * self.cp * self.pp

    @cached_property
    def shard(self) -> Shard:
        """Split of every layer over tensor-, context- and expert-parallel ranks."""
        return Shard(
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            cp=self.cp,
            cp_comm=self.cp_comm,
            ep=self.ep,
            etp=self.etp,
        )

    @property
    def expert_ranks(self) -> int:
        """Ranks of a stage over which all experts are spread, once or more: ``ep`` divides them."""
        return self.dp * self.cp * self.tp // self.etp

    @property
    def expert_shards(self) -> int:
        """Ranks over which FSDP shards every expert: ranks of a replica with the same experts; 1 for none."""
        ranks, groups = self.dp_shard * self.cp * self.tp, self.ep * self.etp
        return ranks // groups if self.shards_parameters and ranks % groups == 0 else 1

    @property
    def is_layer_by_layer(self) -> bool:
        """True if collectives or copies of single layers overlap compute, so that single layers are simulated."""
        ring = self.cp > 1 and self.cp_comm == "ring"
        return (self.pp == 1 and self.shards_parameters) or ring or self.offload_activations

    @property
    def shards_parameters(self) -> bool:
        """True for FSDP: parameters and gradients are sharded over the shard group."""
        return self.zero_stage >= 2 and self.dp_shard * self.cp > 1

    @property
    def reshards(self) -> bool:
        """True for FSDP that frees gathered parameters after a forward, and gathers them again in the backward."""
        return self.shards_parameters and self.zero_stage == 3 and self.reshard_after_forward

    @property
    def reduces_every_microbatch(self) -> bool:
        """True if gradients are reduced after every microbatch, not only after the last one.

        By default, FSDP reduces in every backward, so that gradients accumulate in shards (torch 2.13,
        torch/distributed/fsdp/_fully_shard/_fully_shard.py, ``set_requires_gradient_sync``). In pipelines torch turns
        that off until the end of the step (torch/distributed/pipelining/stage.py, ``backward_maybe_with_nosync``).
        """
        if self.grad_sync is None:
            return self.shards_parameters and self.pp == 1
        return self.grad_sync == "microbatch"

    @property
    def shards_optimizer_only(self) -> bool:
        """True for ZeRO-1: only optimizer states are sharded."""
        return self.zero_stage == 1 and self.dp_shard * self.cp > 1

    def recompute_at(self, place: int) -> Recompute:
        """Recomputation mode of the block at a given index of its stage, counted from 0."""
        return self.recompute if self.recompute_layers is None or place < self.recompute_layers else "none"

    @property
    def recomputed(self) -> str:
        """Description of the recomputation, in words."""
        of_modules = "" if self.recompute_modules is None else f" of {', '.join(self.recompute_modules)}"
        number = self.recompute_layers
        blocks = "block" if number == 1 else f"{number} blocks"
        of_each = " of each stage" if self.num_stages > 1 else ""
        first = "" if number is None else f" in the first {blocks}{of_each}"
        return f"{self.recompute}{of_modules}{first}"

    @property
    def num_stages(self) -> int:
        """Pipeline stages: pipeline ranks times virtual stages."""
        return self.pp * self.virtual_stages


def _with_synchronous_servers(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a plan in which synchronous parameter servers are ``collectives``, however they were written."""
    replication = fields.get("replication")
    if isinstance(replication, str) and replication == "parameter_server":
        replication = {"kind": replication}
    if isinstance(replication, dict) and replication.get("kind") == "parameter_server":
        try:
            replication = Replication(**replication)
        except ValidationError:  # which the field itself raises, with its name
            return fields
    if not isinstance(replication, Replication) or not replication.is_synchronous:
        return fields
    if replication.server_nodes == "apart":
        raise ValueError(
            "has replication.server_nodes = apart, and synchronous parameter servers are modeled on the workers' nodes "
            "only; remove it, or use staleness above 0"
        )
    if fields.get("collectives") is not None:
        raise ValueError(
            "has replication.kind = parameter_server and collectives, which both say how gradients are reduced; "
            "remove one of them"
        )
    prescribed = Collectives(
        all_reduce="parameter_server",
        parameter_servers=replication.servers,
        parameter_placement="whole" if replication.parameter_placement == "whole" else None,
    )
    return {**fields, "replication": None, "collectives": prescribed}


def _stages_of(schedule: object) -> int:
    """Stages per rank that a schedule requires; 1 if it does not fix them."""
    facts = SCHEDULE_FACTS.get(schedule) if isinstance(schedule, str) else None
    return 1 if facts is None else facts.virtual_stages or 1


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """Layers of each stage.

    Attributes:
        boundaries: ``num_stages + 1`` increasing indices into ``ModelSpec.layers``; stage s holds
            ``layers[boundaries[s]:boundaries[s + 1]]``. Every layer is in exactly one stage.
    """

    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.boundaries) >= 2
        assert self.boundaries[0] == 0
        assert all(a < b for a, b in zip(self.boundaries, self.boundaries[1:], strict=False)), self.boundaries

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.boundaries) - 1

    def layer_range(self, stage: int) -> range:
        """Indices of the stage's layers."""
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    def stage_layers(self, num_last: int = 1) -> tuple[int, ...]:
        """Blocks of every stage, as in ``plan.stage_layers``; without the embedding and the last ``num_last`` layers.

        >>> StageAssignment((0, 3, 5, 8)).stage_layers()
        (2, 2, 2)
        """
        counts = [end - start for start, end in pairwise(self.boundaries)]
        counts[0] -= 1
        counts[-1] -= num_last
        return tuple(counts)

    def place(self, layer: int) -> int:
        """Index of a layer among the blocks of its stage, from 0; the embedding, layer 0, does not count.

        >>> [StageAssignment((0, 3, 5, 6)).place(layer) for layer in range(6)]
        [0, 0, 1, 0, 1, 0]
        """
        first = self.boundaries[bisect_right(self.boundaries, layer) - 1]
        return layer - max(1, first) if layer else 0


class Place(NamedTuple):
    """Coordinates of a rank on the mesh, outermost axis first."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0


GroupKind = Literal["tp", "cp", "shard", "replicate", "dp", "ep", "etp", "expert", "expert_shard", "pp", "ends", "send"]
"""Kinds of groups: those of ``GROUP_AXES``, both ends of a pipeline, and the two ranks of a transfer between stages."""

_EXPERT_AXES = ("pp", "replica", "same_experts", "ep", "etp")

GROUP_AXES: Mapping[GroupKind, tuple[str, ...]] = MappingProxyType(
    {
        "tp": ("tp",),
        "cp": ("cp",),
        "shard": ("dp_shard", "cp"),
        "replicate": ("dp_replicate",),
        "dp": ("dp_replicate", "dp_shard", "cp"),
        "ep": ("ep",),
        "etp": ("etp",),
        "expert": ("replica", "same_experts"),
        "expert_shard": ("same_experts",),
        "pp": ("pp",),
    }
)
"""The one table of groups: axes of the mesh along which the ranks of a group differ.

- ``tp``: ranks that split the same layers; ``cp``: the same sequences; ``etp``: the same experts.
- ``shard``: ranks over which FSDP and ZeRO shard; with context-parallel ranks, as in torchtitan.
- ``replicate``: ranks that hold the same shard.
- ``dp``: ranks that average their gradients: they hold equal parts of the same stages and process different tokens.
- ``ep``: ranks of the expert all-to-all, each with different experts.
- ``expert``: ranks that sum the gradients of the same experts; ``expert_shard``: those of one replica, over which FSDP
  shards experts.
- ``pp``: ranks of a pipeline, first stage first.
"""

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
STAGE_GROUPS: tuple[GroupKind, ...] = tuple(kind for kind in GROUP_AXES if kind != "pp")
"""Kinds of groups within a stage."""
LAYER_AXES: tuple[GroupKind, ...] = ("tp", "cp", "ep", "etp")
"""Kinds of the groups of collectives inside layers."""


@dataclass(frozen=True, slots=True)
class RankMapping:
    """Mesh ``[pp, dp_replicate, dp_shard, cp, tp]`` of the ranks, pp outermost, as in torchtitan.

    Which device a rank is on is up to the placement (``simplan.plan.placement``).

    Attributes:
        pp, dp_replicate, dp_shard, cp, tp: Ranks along each axis.
        ep: Neighboring groups of ``etp`` ranks that hold different experts.
        etp: Neighboring ranks that split every expert; 1 or ``tp``.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @classmethod
    def of(cls, plan: ParallelPlan) -> RankMapping:
        """The mesh of a plan."""
        return cls(plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.ep, plan.etp)

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return math.prod(self.sizes)

    @property
    def sizes(self) -> Place:
        """Ranks along each axis."""
        return Place(self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that hold the same stages, or shards of them."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    def dp_rank(self, rank: int) -> int:
        """Data-parallel index of a rank: its part of the batch, and its entry of ``plan.microbatch_sizes``."""
        place = self.place(rank)
        return place.dp_replicate * self.dp_shard + place.dp_shard

    def rank(self, place: Place) -> int:
        """Rank at given coordinates of the mesh."""
        pp, dp_replicate, dp_shard, cp, tp = place
        return (((pp * self.dp_replicate + dp_replicate) * self.dp_shard + dp_shard) * self.cp + cp) * self.tp + tp

    def place(self, rank: int) -> Place:
        """Coordinates of a rank on the mesh."""
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        rank, dp_shard = divmod(rank, self.dp_shard)
        pp, dp_replicate = divmod(rank, self.dp_replicate)
        return Place(pp, dp_replicate, dp_shard, cp, tp)

    @property
    def experts(self) -> tuple[int, int, int, int, int]:
        """Mesh of the ranks by the experts that they hold: ``_EXPERT_AXES``, outermost first."""
        replica, size = self.dp_shard * self.cp * self.tp, self.ep * self.etp
        if replica % size:  # experts are spread over several replicas
            return self.pp, self.ranks_per_stage // size, 1, self.ep, self.etp
        return self.pp, self.dp_replicate, replica // size, self.ep, self.etp

    def group(self, kind: GroupKind, rank: int) -> RankGroup:
        """Ranks of a rank's group of one kind, ascending."""
        sizes, varies = mesh_of(self, kind)
        first, rest, stride = 0, rank, 1
        for size, free in zip(reversed(sizes), reversed(varies), strict=True):
            rest, place = divmod(rest, size)
            first += 0 if free else place * stride
            stride *= size
        return _group(sizes, varies, first, kind)

    def like(self, group: tuple[int, ...], rank: int, other: int) -> RankGroup:
        """Group in which another rank communicates as ``rank`` does in ``group``, in the same order of its members.

        The members may be ranks that stand for others, if both ranks have the same place in their stages.
        """
        assert isinstance(group, RankGroup), "groups of a Program have a kind"
        across = other % self.ranks_per_stage - rank % self.ranks_per_stage
        if group.kind in ("pp", "ends"):
            return RankGroup.of(group.kind, (member + across for member in group))
        if group.kind == "send" or not across:
            return RankGroup.of(group.kind, (member + other - rank for member in group))
        theirs, own = self.group(group.kind, rank), self.group(group.kind, other)
        if theirs == group:
            return own
        place = dict(zip(theirs, own, strict=True))  # a broadcast lists its root first
        return RankGroup.of(group.kind, (place[member] for member in group))

    def layer_collective_groups(self, rank: int) -> dict[str, RankGroup]:
        """Ranks of the collectives inside layers, by the axis of ``LayerCollective``."""
        return {axis: self.group(axis, rank) for axis in LAYER_AXES}


class RankGroup(tuple[int, ...]):
    """Ranks that communicate, and the kind of their group.

    The hash is found once: groups of all ranks of a large job are in keys of lookup tables. Groups of equal ranks are
    equal, of whatever kind.
    """

    kind: GroupKind
    _hash: int

    @classmethod
    def of(cls, kind: GroupKind, ranks: Iterable[int]) -> RankGroup:
        """Group of a kind, with its members in this order."""
        group = cls(ranks)
        group.kind = kind
        return group

    def __hash__(self) -> int:
        """Hash of the tuple."""
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash


_Sizes = tuple[int, ...]
_Varies = tuple[bool, ...]


@lru_cache(maxsize=256)
def mesh_of(mapping: RankMapping, kind: GroupKind) -> tuple[_Sizes, _Varies]:
    """Sizes of the mesh that has the groups of a kind, outermost axis first, and the axes along which they vary."""
    axes = GROUP_AXES[kind]
    names = Place._fields if set(axes) <= set(Place._fields) else _EXPERT_AXES
    sizes = mapping.sizes if names is Place._fields else mapping.experts
    return tuple(sizes), tuple(name in axes for name in names)


@lru_cache(maxsize=32)
def _group(sizes: _Sizes, varies: _Varies, first: int, kind: GroupKind) -> RankGroup:
    """Ranks that differ along some axes from a rank that is the first along them, ascending."""
    ranks, stride = [first], 1
    for size, free in zip(reversed(sizes), reversed(varies), strict=True):
        if free:
            ranks = [rank + index * stride for index in range(size) for rank in ranks]
        stride *= size
    return RankGroup.of(kind, ranks)
