"""Order of ranks: a step whose nodes follow the network, where contention costs time and they do not follow it."""

from __future__ import annotations

from typing import Any, NamedTuple

from simplan.cost.calibration.format import Calibration
from simplan.errors import SpecError
from simplan.plan.hostfile import host_lines, nodes_of
from simplan.predict.step import jobs_of_seeds, predict
from simplan.prediction import Prediction
from simplan.units import format_percent, format_time

_LEAST_SAVING = 0.01
"""Fraction of the step below which an order of nodes is not said to be faster."""
_MAX_SPANS = 1_000_000
"""Operations of a step up to which another order is tried: as many again are simulated."""
_MAX_LINES = 64


class FasterOrder(NamedTuple):
    """Nodes in an order with which the step is shorter.

    Attributes:
        nodes: Nodes of the cluster in the order of their ranks.
        hostfile: Lines of a hostfile with this order.
        step_time_s: Seconds of the step with it.
        saving: Fraction of the step that it saves.
        is_plain: True if ``plan.placement: network`` is this order; False if ranks also keep places of their own.
    """

    nodes: tuple[int, ...]
    hostfile: tuple[str, ...]
    step_time_s: float
    saving: float
    is_plain: bool

    def words(self) -> str:
        """Sentence, and the hostfile if it is short."""
        how = (
            "write plan.placement: network, or start ranks with this hostfile" if self.is_plain else "use this hostfile"
        )
        text = (
            f"Another order of nodes is faster: {format_time(self.step_time_s)} a step "
            f"({format_percent(self.saving)} less), since rings and trees follow the order of ranks; {how}"
        )
        lines = [f"  {line}" for line in self.hostfile[:_MAX_LINES]]
        if len(self.hostfile) > _MAX_LINES:
            lines.append(f"  ... ({len(self.hostfile):,} lines; simplan export --to hostfile writes all)")
        return "\n".join([f"{text}:", *lines])

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"step_time_s": self.step_time_s, "saving": self.saving, "hostfile": list(self.hostfile)}


def faster_order(prediction: Prediction, calibration: Calibration | None = None) -> FasterOrder | None:
    """Predict the step with its nodes in the order of the network.

    Args:
        prediction: Prediction of the job.
        calibration: As for ``predict``.

    Returns:
        None if the order is not at least a hundredth faster, if nodes have this order already or wait for no link, if
        no hostfile can say it, or if the step is too large to simulate again.
    """
    job, network = jobs_of_seeds(prediction.job)[0], prediction.network
    cluster, plan = job.cluster, job.plan
    if network is None or not network.has_contention or cluster.is_mixed or cluster.num_nodes < 3:
        return None
    if cluster.num_devices % cluster.devices_per_node or len(prediction.timeline.spans) > _MAX_SPANS:
        return None
    from simplan.network.order import devices_by_network

    before = tuple(range(cluster.num_devices)) if job.placement is None else job.placement.devices
    after = devices_by_network(cluster, before)
    if after == before:
        return None
    try:
        lines = host_lines(after, cluster.devices_per_node)
    except SpecError:
        return None
    changed = predict(job.with_plan(plan.model_copy(update={"placement": after})), calibration=calibration)
    saving = 1 - changed.step_time_s / prediction.step_time_s
    if saving < _LEAST_SAVING:
        return None
    nodes = nodes_of(after, cluster.devices_per_node)
    return FasterOrder(nodes, lines, changed.step_time_s, saving, after == devices_by_network(cluster))
