"""How a training is spread over devices: the parallel plan, its stages and the ranks they sit on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from simplan.spec.base import Count, Spec

__all__ = ["ParallelPlan", "RankMapping", "Recompute", "ScheduleName", "StageAssignment"]

ScheduleName = Literal[
    "none", "naive", "gpipe", "1f1b", "interleaved_1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-2p-optsync", "zb-v"
]
Recompute = Literal["none", "selective", "selective_op", "selective_layer", "full", "minimal", "qkv_proj_offloaded"]


class ParallelPlan(Spec):
    """One way to spread a training over devices; the words are torchtitan's, Megatron's where it has none.

    Defaults that depend on other fields are filled in when the plan is made: ``zero_stage`` is 3 when ``dp_shard``
    is above 1, ``sequence_parallel`` is on when ``tp`` is above 1, and ``schedule`` is ``1f1b`` when ``pp`` is above 1
    (``interleaved_1f1b`` when ``virtual_stages`` is above 1), else ``none``. ``None`` in ``grad_dtype``,
    ``bucket_bytes`` and ``prefetch_depth`` means the software's own value; in ``stage_layers``, a balanced split.
    """

    dp_replicate: Count = 1
    dp_shard: Count = 1
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    reshard_after_forward: bool = True
    tp: Count = 1
    sequence_parallel: bool = False
    cp: Count = 1
    cp_comm: Literal["ring", "all_gather", "a2a"] = "ring"
    ep: Count = 1
    pp: Count = 1
    virtual_stages: Count = 1
    schedule: ScheduleName = "none"
    microbatch_size: Count = 1
    recompute: Recompute = "none"
    stage_layers: tuple[Count, ...] | None = None
    grad_sync: Literal["step", "microbatch"] = "step"
    grad_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    bucket_bytes: Count | None = None
    prefetch_depth: Count | None = None

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
        if isinstance(filled.get("stage_layers"), list):  # a file has lists, and strict mode wants the tuple itself
            filled["stage_layers"] = tuple(filled["stage_layers"])
        return filled

    @property
    def dp(self) -> int:
        """Data-parallel ranks: replicas times shards."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_devices(self) -> int:
        """Devices the plan needs (``ep`` folds into the data-parallel ranks)."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def num_stages(self) -> int:
        """Model parts: pipeline ranks times virtual stages."""
        return self.pp * self.virtual_stages


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """Which layers each stage holds.

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


@dataclass(frozen=True, slots=True)
class RankMapping:
    """Which rank sits where: the mesh ``[pp, dp]``, pp outermost, as torchtitan and Megatron lay it out.

    Attributes:
        pp: Pipeline ranks.
        dp: Data-parallel ranks.
    """

    pp: int
    dp: int

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp

    def rank(self, pp_rank: int, dp_rank: int) -> int:
        """The rank at a place of the mesh."""
        return pp_rank * self.dp + dp_rank

    def place(self, rank: int) -> tuple[int, int]:
        """``(pp_rank, dp_rank)`` of a rank."""
        return divmod(rank, self.dp)

    def dp_group(self, pp_rank: int) -> tuple[int, ...]:
        """Ranks that hold the same stages and average their gradients."""
        return tuple(self.rank(pp_rank, d) for d in range(self.dp))

    def pp_group(self, dp_rank: int) -> tuple[int, ...]:
        """Ranks that form one pipeline, first stage first."""
        return tuple(self.rank(p, dp_rank) for p in range(self.pp))
