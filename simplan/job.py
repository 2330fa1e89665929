"""The job: everything a prediction, a search or a run is asked about, in one value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simplan.cluster.hardware import ClusterSpec
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.software.software import SoftwareSpec
from simplan.training.training import TrainingSpec

__all__ = ["Job"]


@dataclass(frozen=True, slots=True)
class Job:
    """One training job: a model, the cluster it is trained on, how it is trained, the parallel plan and the framework.

    Immutable and hashable. Making one checks nothing: ``simplan.rules`` says whether the parts go together.

    Attributes:
        model: Architecture and sequence length.
        cluster: Devices, nodes and links.
        training: Batch, precision, optimizer and task.
        plan: Parallel axes, schedule, recomputation and sharding.
        software: The framework's profile.
    """

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    plan: ParallelPlan
    software: SoftwareSpec

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step on one data-parallel rank: global_batch_size / (dp x microbatch_size)."""
        return self.training.global_batch_size // (self.plan.dp * self.plan.microbatch_size)

    @property
    def padded_model(self) -> ModelSpec:
        """The model as its ranks have it: where the software pads vocabularies, with a larger one."""
        return self.software.padded(self.model, self.plan)

    def with_plan(self, plan: ParallelPlan) -> Job:
        """The same job with another plan, such as a candidate of a search."""
        return replace(self, plan=plan)
