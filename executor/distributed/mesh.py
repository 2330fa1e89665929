"""The mesh [pp, dp_replicate, dp_shard, cp, tp] of a job, as one rank sees it: its peers along every axis.

``simplan.plan.plan.RankMapping`` says which rank is where; torch's process groups are made from it, one for each axis
along which this plan communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, _register_process_group, _unregister_process_group
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.futures import Future

from executor.profiling.recorder import Recorder
from simplan.plan.plan import GroupKind, RankMapping
from simplan.plan.shard import Shard
from simplan.program.action import Action
from simplan.program.tables.complete import stage_to_rank
from simplan.runs.measurement import IssuedKind
from simplan.runs.run_spec import RunSpec

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName  # of torch 2.13

    from executor.distributed.replicas.membership import Membership


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, and any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of one axis, and their collectives; every collective is recorded.

    Attributes:
        rank: Index of this rank in the group.
        ranks: Global ranks, in the order of the group; empty without a group.
        group: Process group. Without a group, collectives transfer nothing but return tensors of the right shape, so
            that one rank's compute can be timed alone.
        mesh: Device mesh for DTensor and torch's functional collectives, where layers communicate along the axis.
    """

    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = ()
    group: dist.ProcessGroup | None = None
    recorder: Recorder | None = None
    mesh: DeviceMesh | None = None

    @classmethod
    def silent(cls, axis: str, size: int, device_type: str) -> Peers:
        """The first of some ranks, the others of which are not there."""
        if size == 1:
            return cls()
        return cls(
            size, mesh=RecordedGroup(f"{size} ranks of {axis}, alone", 0, size).mesh(f"{axis}, alone", device_type)
        )

    def meshed(self, axis: str, device_type: str) -> Peers:
        """These ranks with a separate device mesh."""
        return replace(self, mesh=_joined({axis: self}, device_type)) if self.group else self

    @classmethod
    def of(cls, group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int, recorder: Recorder | None) -> Peers:
        """The peers of a global rank in a process group of these ranks."""
        return cls(len(ranks), ranks.index(rank), ranks, group, recorder)

    @property
    def alone(self) -> bool:
        """True if no other rank exists."""
        return self.group is not None and dist.get_backend(self.group) == "fake"

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums over the ranks, in place."""
        if self.group is not None:
            handle = self.issue("all_reduce", x)
            dist.all_reduce(x, group=self.group)
            self.complete(handle)
        return x

    def broadcast(self, x: Tensor, source: int) -> None:
        """Broadcasts a global rank's tensor, in place; records list the source rank first."""
        ranks = (source, *(rank for rank in self.ranks if rank != source))
        handle = -1 if self.recorder is None else self.recorder.issue("broadcast", ranks, x.nbytes)
        dist.broadcast(x, group=self.group, group_src=self.ranks.index(source))
        self.complete(handle)

    def issue(self, kind: IssuedKind, buffer: Tensor, action: Action | None = None) -> int:
        """Records that a collective of a buffer starts, in an action or the current one; gives a handle."""
        return self.issue_bytes(kind, buffer.nbytes, action)

    def issue_bytes(self, kind: IssuedKind, num_bytes: int, action: Action | None = None) -> int:
        """As ``issue``, of a buffer that torch makes."""
        return -1 if self.recorder is None else self.recorder.issue(kind, self.ranks, num_bytes, action)

    def complete(self, handle: int) -> None:
        """Records that it has ended (from any thread)."""
        if self.recorder is not None:
            self.recorder.complete(handle)


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Process groups of one rank by mesh axis. An axis along which the plan does not communicate has this rank alone.

    Attributes:
        shard: Degrees of the split of layers.
        tp, cp, ep: Tensor-, context- and expert-parallel ranks.
        pp: Ranks of the same pipeline, first stage first.
        dp: Ranks that average unsharded gradients (DDP).
        fsdp: Ranks over which parameters (FSDP) or optimizer states (ZeRO-1) are sharded.
        replicate: Ranks that hold the same shard of the parameters, and reduce its gradients in every step (HSDP).
        outer: Ranks that hold the same shard in replicas that train alone and meet in outer steps.
        experts: With expert parallelism, ranks that average the gradients of the same experts; with FSDP, the ranks
            over which these experts are sharded.
        tied: The two ranks of the pipeline that hold a tied embedding.
        dp_mesh: Mesh [replicate, shard] of FSDP; torch requires one parent mesh for it and the mesh of ``tp``.
        members: Membership of replicas that may leave and join, each of which is a world of its own; else None.
        alone: No other rank exists: see ``executor.dry_run.rehearse``.
    """

    shard: Shard = field(default_factory=Shard)
    tp: Peers = field(default_factory=Peers)
    cp: Peers = field(default_factory=Peers)
    ep: Peers = field(default_factory=Peers)
    pp: Peers = field(default_factory=Peers)
    dp: Peers = field(default_factory=Peers)
    fsdp: Peers = field(default_factory=Peers)
    replicate: Peers = field(default_factory=Peers)
    outer: Peers = field(default_factory=Peers)
    experts: Peers = field(default_factory=Peers)
    tied: Peers = field(default_factory=Peers)
    dp_mesh: DeviceMesh | None = None
    members: Membership | None = None
    alone: bool = False

    @classmethod
    def silent(cls, shard: Shard, device_type: str = "cpu") -> ParallelDims:
        """The first rank of a split without process groups: nothing is communicated."""
        axes = ("tp", shard.tp), ("cp", shard.cp), ("ep", shard.ep)
        tp, cp, ep = (Peers.silent(axis, size, device_type) for axis, size in axes)
        return cls(shard, tp, cp, ep)

    @classmethod
    def of(
        cls,
        job: RunSpec,
        rank: int,
        recorder: Recorder,
        *,
        device_type: str = "cpu",
        members: Membership | None = None,
        alone: bool = False,
    ) -> ParallelDims:
        """Makes the process groups of a job; every one of its ranks must call this.

        Args:
            members: See ``ParallelDims``; the default process group is then that of this rank's replica.
            alone: No other rank exists, so only this rank's groups are made.
        """
        plan, mapping, placement = job.plan, RankMapping.of(job.plan), stage_to_rank(job.parsed_table())
        first, last = placement[0], placement[max(placement)]

        def ends(other: int) -> tuple[int, ...]:
            pipeline = mapping.group("pp", other)
            return pipeline[first], pipeline[last]

        world = [rank] if alone else range(rank - dist.get_rank(), rank - dist.get_rank() + dist.get_world_size())

        def peers(kind: GroupKind, wanted: bool = True) -> Peers:
            return _peers(world, rank, recorder, partial(mapping.group, kind), wanted)

        sharded_experts = plan.expert_shards > 1
        tp = peers("tp")
        fsdp = peers("shard", plan.shards_parameters or plan.shards_optimizer_only)
        replicate = peers("replicate", plan.shards_parameters and not plan.replicas_apart)
        replication = plan.replication
        begins_whole = replication is not None and replication.start_step > 0  # with the gradients of all ranks
        axes = {"replicate": replicate, "shard": fsdp if plan.shards_parameters else Peers(), "tp": tp}
        dp_mesh, tp_mesh = _split_mesh(axes, device_type)
        return cls(
            plan.shard,
            pp=peers("pp"),
            dp=peers("dp" if begins_whole else plan.gradient_group, not plan.shards_parameters),
            fsdp=fsdp,
            replicate=replicate,
            outer=_apart(mapping.group("replicate", rank), rank, recorder)
            if members is not None
            else peers("replicate", replication is not None and replication.has_rounds),
            dp_mesh=dp_mesh,
            cp=peers("cp").meshed("cp", device_type),
            tp=replace(tp, mesh=tp_mesh),
            ep=peers("ep").meshed("ep", device_type),
            experts=peers(
                "expert_shard" if sharded_experts else "expert",
                job.model.num_experts > 0 and plan.shard.experts_apart,
            ),
            tied=_peers(world, rank, recorder, ends, job.model.shared_by_ends and first != last),
            members=members,
            alone=alone,
        )

    def without_members(self) -> ParallelDims:
        """Groups of a replica whose outer steps meet nobody, so that its memory can be traced."""
        from executor.distributed.replicas.membership import gloo_group

        store = HashStore()
        group, rank = gloo_group(store, 0, 1, timedelta(minutes=5)), self.outer.ranks[self.outer.rank]
        return replace(self, members=None, outer=Peers.of(group, (rank,), rank, None))

    def local_tokens(self, x: Tensor) -> Tensor:
        """This rank's tokens of whole sequences (batch, seq_len): one of the early parts and its late counterpart.

        Causal attention costs a late token more than an early one; so all ranks have equal work.
        """
        if self.cp.size == 1:
            return x
        return x.index_select(1, self.positions(x.shape[1]).to(x.device))

    def positions(self, seq_len: int) -> Tensor:
        """Positions of this rank's tokens in the sequence, (seq_len / cp) int64."""
        return self.all_positions(seq_len)[self.cp.rank]

    def all_positions(self, seq_len: int) -> Tensor:
        """Positions of the tokens of all context-parallel ranks, (cp, seq_len / cp) int64."""
        if self.cp.size == 1:
            return torch.arange(seq_len).unsqueeze(0)
        parts = torch.arange(seq_len).view(2 * self.cp.size, -1)
        early, late = parts[: self.cp.size], parts[self.cp.size :].flip(0)
        return torch.cat((early, late), dim=1)

    def own_part(self, x: Tensor, dim: int) -> Tensor:
        """The part of a tensor that this tensor-parallel rank has along a dimension."""
        return x.chunk(self.tp.size, dim)[self.tp.rank]

    @property
    def splits_tokens(self) -> bool:
        """Tensor-parallel ranks split the tokens between attention and MLP."""
        return self.shard.sequence_parallel and self.tp.size > 1

    def fsdp_mesh(self, device_type: str, *, experts: bool = False) -> DeviceMesh:
        """The ranks that hold shards or copies of the same parameters: [shard], or [replicate, shard].

        Args:
            experts: Return the mesh of experts under expert parallelism.
        """
        mesh = self.dp_mesh
        if experts:
            mesh = _joined({"replicate": self.replicate, "shard": self.experts}, device_type)
        assert mesh is not None
        return mesh


def _joined(axes: dict[str, Peers], device_type: str) -> DeviceMesh | None:
    """One device mesh of the axes with more than one rank; None without such axes.

    Args:
        axes: Ranks by axis name, outermost first. FSDP's hooks record its collectives; other groups record their own.
    """
    axes = {name: peers for name, peers in axes.items() if peers.group is not None}
    if not axes:
        return None
    groups: list[dist.ProcessGroup] = []
    with unset_fake_temporarily():  # a mesh holds numbers, also where all other tensors are without data
        ranks = torch.tensor(dist.get_rank())
        for name, peers in axes.items():
            ranks = ranks.unsqueeze(-1) + torch.tensor(peers.ranks) - peers.ranks[peers.rank]
            group = peers.group
            assert group is not None
            if name not in ("replicate", "shard"):
                of_ranks = f"ranks {peers.ranks} of {name}"
                group = RecordedGroup(of_ranks, peers.rank, peers.size, group, peers.ranks, peers.recorder)
            groups.append(group)
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(axes))


def _split_mesh(axes: dict[str, Peers], device_type: str) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """All axes but ``tp`` of one mesh, and ``tp``."""
    mesh = _joined(axes, device_type)
    if mesh is None:
        return None, None
    names = mesh.mesh_dim_names or ()
    others = tuple(name for name in names if name != "tp")
    with unset_fake_temporarily():
        if len(others) == len(names):
            return mesh, None
        return (mesh[others], mesh["tp"]) if others else (None, mesh)


def run_timeout() -> timedelta | None:
    """Timeout of the default process group, for ``new_group``; None for torch's own, where it has none (a fake group).

    torch gives other groups 10 minutes on NCCL and 30 on gloo, whatever the default group has: they would end before
    the launcher names the rank that hangs, or while a rank compiles.
    """
    world = dist.group.WORLD
    assert world is not None
    for device in ("cuda", "cpu"):
        try:
            backend = world._get_backend(torch.device(device))
        except RuntimeError:  # the group has no backend of this device
            continue
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def _peers(
    world: Sequence[int],
    rank: int,
    recorder: Recorder,
    members: Callable[[int], tuple[int, ...]],
    wanted: bool = True,
) -> Peers:
    """Makes the process groups of one axis; returns this rank's group, or this rank alone if there is none.

    Args:
        world: Global ranks that make groups: those of the default process group, in order.
    """
    peers, first = Peers(), rank - dist.get_rank()
    for ranks in sorted({members(other) for other in world}) if wanted else []:
        if len(ranks) == 1:
            continue
        group = dist.new_group([other - first for other in ranks], timeout=run_timeout())
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            peers = Peers.of(group, ranks, rank, recorder)
    return peers


def _apart(ranks: tuple[int, ...], rank: int, recorder: Recorder) -> Peers:
    """Peers that no process group joins for good."""
    return Peers(len(ranks), ranks.index(rank), ranks, None, recorder)


def fill_from_own(kind: Literal["reduce_scatter", "all_to_all"], result: Tensor, sent: Tensor, rank: int) -> None:
    """Fills the result of a collective without other ranks from what this rank gave.

    torch's fake process group leaves the result as it was allocated before torch 2.13. Weights trained on that are soon
    not finite, and times of such weights stand for no training.
    """
    flat, sent = result.view(-1), sent.reshape(-1)
    start = rank * flat.numel() if kind == "reduce_scatter" else 0
    part = sent[start : start + flat.numel()]
    flat[: part.numel()].copy_(part)


class RecordedGroup(dist.ProcessGroup):
    """Ranks of one axis, for torch's functional collectives.

    torch calls the methods of a Python process group from C++ (``torch/csrc/distributed/c10d/PyProcessGroup.hpp``);
    names ending in ``_coalesced`` are those of one tensor as well. Each name of torch 2.13 follows that of 2.11.

    Args:
        name: Key of torch's registry. DTensor treats equal meshes as one, even after deletion, so that a process
            must name equal groups alike.
        rank: Index of this rank.
        inner: Group that communicates; None without other ranks: collectives then leave their results unchanged.
        ranks: Global ranks, in the order of the group.
        recorder: Records every collective; None for no record.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        inner: dist.ProcessGroup | None = None,
        ranks: tuple[int, ...] = (),
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = cast("GroupName", name)
        self._inner, self.ranks, self._recorder = inner, ranks, recorder
        self._alone = inner is not None and dist.get_backend(inner) == "fake"
        _unregister_process_group(self._name)
        _register_process_group(self._name, self)

    def mesh(self, axis: str, device_type: str) -> DeviceMesh:
        """One-dimensional mesh of a group without other ranks, also where no process group is there."""
        names = (axis,)
        mesh = DeviceMesh(device_type, list(range(self.size())), mesh_dim_names=names, _init_backend=False, _rank=0)
        mesh._dim_group_names = [self._name]
        mesh._pg_registry[self._name] = self
        return mesh

    def getBackendName(self) -> str:  # noqa: N802
        """Shown by torch in errors."""
        return "recorded"

    def getGroupName(self) -> GroupName:  # noqa: N802
        """Key of torch's registry."""
        return self._name

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        """All-reduce in place."""
        return self._issue("all_reduce", tensors, ("allreduce",), tensors, options)

    def all_gather_single_coalesced(self, gathered: list[Tensor], parts: list[Tensor], opts: Any = None) -> dist.Work:
        """Parts of all ranks, one after the other."""
        names = "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
        return self._issue("all_gather", gathered, names, gathered, parts, opts)

    def reduce_scatter_single_coalesced(self, shards: list[Tensor], parts: list[Tensor], opts: Any = None) -> dist.Work:
        """Own part of the sum."""
        names = "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
        work = self._issue("reduce_scatter", parts, names, shards, parts, opts)
        if self._alone:
            for part, whole in zip(shards, parts, strict=True):
                fill_from_own("reduce_scatter", part, whole, self.rank())
        return work

    def all_to_all_single(
        self, received: Tensor, parts: Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        """Part of every rank for this one."""
        names = "all_to_all_single", "alltoall_base"
        work = self._issue("all_to_all", [parts], names, received, parts, out_sizes, in_sizes, opts)
        if self._alone:
            fill_from_own("all_to_all", received, parts, self.rank())
        return work

    alltoall_base = all_to_all_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _issue(self, kind: IssuedKind, buffers: list[Tensor], names: tuple[str, ...], *arguments: Any) -> dist.Work:
        """Calls the group's method under the first of the names that the group has."""
        if self._inner is None:
            return FakeWork()
        call = getattr(self._inner, next(name for name in names if hasattr(self._inner, name)))
        recorder = self._recorder
        if recorder is None:
            return call(*arguments)  # type: ignore[no-any-return]
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        if not num_bytes:  # torch's PowerSGD also reduces what is empty
            return call(*arguments)  # type: ignore[no-any-return]
        handle = recorder.issue(kind, self.ranks, num_bytes)
        return _RecordedWork(call(*arguments), lambda: recorder.complete(handle))


class _RecordedWork(dist.Work):
    """Tells when the collective has been waited for: on CUDA the current stream waits, not the host.

    Or, of a collective whose future was taken, when callbacks of that may run.
    """

    def __init__(self, inner: dist.Work, complete: Callable[[], None]) -> None:
        super().__init__()
        self._inner, self._complete = inner, complete

    def wait(self, *timeout: Any) -> bool:
        """As torch's."""
        waited = self._inner.wait(*timeout)
        self._complete()
        return waited

    def get_future(self) -> Future[list[Tensor]]:
        """As torch's; callbacks run after the record."""

        def done(future: Future[list[Tensor]]) -> list[Tensor]:
            self._complete()
            return future.value()

        recorded: Future[list[Tensor]] = self._inner.get_future().then(done)
        return recorded
