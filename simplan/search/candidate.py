"""One plan of a search: a plain tuple, of which there are hundreds of thousands."""

from __future__ import annotations

from typing import Any, NamedTuple

from simplan.spec.plan import ParallelPlan

__all__ = ["Candidate"]


class Candidate(NamedTuple):
    """What a search varies of a ``ParallelPlan``, under the same names.

    Tuples compare field by field, and so break ties between plans that are equally good. ``recompute_layers`` is 0
    where a plan has none: what runs again does so in all blocks; ``recompute_modules`` is empty where it names none.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    zero_stage: int = 0
    reshard_after_forward: bool = True
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    cp_comm: str = "ring"
    ep: int = 1
    pp: int = 1
    virtual_stages: int = 1
    schedule: str = "none"
    microbatch_size: int = 1
    recompute: str = "none"
    grad_sync: str = "step"
    recompute_layers: int = 0
    recompute_modules: tuple[str, ...] = ()

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_devices(self) -> int:
        """Devices it needs."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def num_stages(self) -> int:
        """Model parts."""
        return self.pp * self.virtual_stages

    @property
    def shards_parameters(self) -> bool:
        """See ``ParallelPlan``."""
        return self.zero_stage >= 2 and self.dp_shard * self.cp > 1

    @property
    def shards_optimizer_only(self) -> bool:
        """See ``ParallelPlan``."""
        return self.zero_stage == 1 and self.dp_shard * self.cp > 1

    def plan(self, base: ParallelPlan | None = None) -> ParallelPlan:
        """The plan.

        Args:
            base: Gives what is not varied.
        """
        return (base or ParallelPlan()).model_copy(update=self.keys())

    def keys(self) -> dict[str, Any]:
        """As a plan has them: None for what it does not say."""
        unsaid = {name: getattr(self, name) or None for name in ("recompute_layers", "recompute_modules")}
        return self._asdict() | unsaid
