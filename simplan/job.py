"""Training job: the input of predictions, searches and runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simplan.cluster.hardware import ClusterSpec
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.software.software import SoftwareSpec
from simplan.training import TrainingSpec


@dataclass(frozen=True, slots=True)
class Job:
    """One training job: model, cluster, training, parallel plan and framework.

    Immutable and hashable. The constructor checks nothing; ``simplan.rules`` checks if the parts are compatible.
    """

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    plan: ParallelPlan
    software: SoftwareSpec

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and data-parallel rank: global_batch_size / (dp x microbatch_size)."""
        return self.training.global_batch_size // (self.plan.dp * self.plan.microbatch_size)

    @property
    def padded_model(self) -> ModelSpec:
        """Model with the vocabulary padded as the software does."""
        return self.software.padded(self.model, self.plan)

    def with_plan(self, plan: ParallelPlan) -> Job:
        """Copy of the job with another plan, such as a search candidate."""
        return replace(self, plan=plan)
