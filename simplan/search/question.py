"""What is asked of a search apart from the space: everything of a scenario but its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simplan.cost.calibration import Calibration
from simplan.errors import SpecError
from simplan.job import Job
from simplan.spec import catalogue
from simplan.spec.hardware import ClusterSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.rules import check_plan
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["Question"]


@dataclass(frozen=True, slots=True)
class Question:
    """What every candidate of a search shares."""

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    software: SoftwareSpec
    calibration: Calibration | None = None

    def job(self, plan: ParallelPlan) -> Job:
        """The job that a plan makes of it."""
        return Job(self.model, self.cluster, self.training, plan, self.software)

    def check(self) -> None:
        """Refuses what no plan could mend.

        Raises:
            SpecError: With every problem.
        """
        plan = ParallelPlan(dp_replicate=self.cluster.num_devices)
        try:
            check_plan(self.job(plan))
        except SpecError as error:
            lasting = [p for p in error.problems if p.field.split(".")[0] != "plan" and "batch" not in p.field]
            if lasting:
                raise type(error)(lasting) from None

    def with_devices(self, num_devices: int) -> Question:
        """The same on another number of devices of the cluster.

        Nodes of a cluster without a network of its own are joined by what the catalogue has for its preset.
        """
        if num_devices == self.cluster.num_devices:
            return self
        update: dict[str, object] = {"num_devices": num_devices}
        if self.cluster.cores_per_node is not None:  # each rank of a CPU has another share of its memory
            return replace(self, cluster=catalogue.cluster(self.cluster.id, num_devices))
        if num_devices > self.cluster.devices_per_node and self.cluster.inter_link is None:
            if self.cluster.id in catalogue.names("clusters"):
                update["inter_link"] = catalogue.cluster(self.cluster.id, num_devices).inter_link
        elif num_devices <= self.cluster.devices_per_node:
            update["inter_link"] = None
        return replace(self, cluster=self.cluster.model_copy(update=update))
