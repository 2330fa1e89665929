"""Numbers of a run as the engines read them, and the results of simulated runs.

What happens in a run, for both engines (``compiled``, and ``reference`` in SimPy), which agree run by run:

1. **Position.** A run is at a number of full steps, at first 0, and ends at ``num_steps``. A step on the nodes of a
   size takes its ``step_s`` and advances by its ``advance``, which is below 1 only where replica groups are missing.
   While a device is slow, steps that begin take ``slow_factor`` times as long.
2. **Pauses.** After the step that reaches a multiple of ``evaluation_every`` full steps comes an evaluation; then, in
   this order, a checkpoint in memory and one in the storage after multiples of their intervals. The end of the run is
   no exception. An asynchronous checkpoint blocks for ``blocking_s`` and counts ``write_s`` later; the next one waits
   for it. Until it counts a failure goes back to the one before.
3. **Age.** Units grow older while they train, pause and restart, not while the job is detecting, diagnosing, waiting
   or in maintenance. Failures of a cause are a power-law process in that age, of all units of the nodes in use.
   Repairs, maintenance and preemptions go on at all times.
4. **Failure.** Steps and pauses since the last checkpoint that the failure leaves are lost work. Then follow
   detection, diagnosis, the change of nodes, and the restart with the load of that checkpoint. A failure in the
   restart begins the same once more. Without a checkpoint the run begins again at step 0, with nothing to load. A
   checkpoint in memory is lost where more than one node is.
5. **Nodes.** A lost node is repaired from the end of the diagnosis on, and then is a spare. With ``restart`` the job
   waits for spares until it has all nodes. With ``shrink`` it takes the spares that are there, restarts on the largest
   size that the nodes allow, and waits below the smallest one; after a repair that allows a larger size it stops as
   planned and restarts. Hot spares that replace all lost nodes restart in ``takeover_s``. With ``continue`` the groups
   of lost nodes leave: the others lose the step in progress, wait for the detection, but not for the diagnosis, and
   ``reconfigure_s``, and go on, with no restart and no load. Once spares or repairs complete a group and ``restart_s``
   has passed, the others wait ``join_s`` after their step and it joins. Below the smallest size all wait for a group;
   if no group is left they restart from the last checkpoint.
6. **Planned stops** (causes with ``planned``, slow devices that are found, maintenance, preemptions whose notice is
   long enough for a checkpoint): the step in progress is lost, a checkpoint is written, its whole writing time
   included, and all goes on as after the diagnosis of a failure. It replaces checkpoints that are due; an evaluation
   in progress begins again. Without checkpoints all work is lost. Before maintenance the job stops early enough to
   write; a window that begins while it does not train delays its restart.
7. **Silent corruption** is found after a time that is exponential in age. Then the run goes back to the newest kept
   checkpoint in storage from before it, or to step 0, and the node of the device is lost.
8. **Spot.** Nodes are preempted by a Poisson process of each node in use. Preempted nodes come back after an
   exponential time, or a node on demand takes their place at once and leaves when a spot node is there, without a stop
   of its own. Without enough notice a preemption is a failure that is noticed by heartbeat. While the job is
   detecting, diagnosing, waiting or in maintenance its nodes leave without a stop. With a trace, as many nodes are
   there as it says, from a random point of it on.
9. **Order.** Times less than a microsecond apart are one instant. At an instant happen first failures, corruption and
   slowing among them; then what is found; then nodes return, nodes on demand leave, spot nodes are preempted or the
   trace changes, maintenance begins, and groups become ready. Last the job goes on. A step, pause or wait that ends at
   that instant has ended, and what has happened stops the next one. Stops are taken one by one in the order in which
   they came, then maintenance, then growth.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

WATERFALL = (
    "compute",
    "evaluation",
    "checkpoint",
    "lost_work",
    "detection",
    "diagnosis",
    "waiting",
    "restart",
    "membership",
    "slow_device",
    "fewer_nodes",
    "maintenance",
)
"""Parts of the time of a run, which sum to it. ``compute`` is the steps of the run on all nodes without a slow device.
``slow_device`` and ``fewer_nodes`` are the excess of steps over that, ``membership`` is ``reconfigure_s`` and
``join_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseSetup:
    """Failures of one cause; see ``sections.Cause``.

    Attributes:
        units_per_node: Units of one node in use; 0 for one unit of the whole job.
        mtbf_s, shape, age_s: Of one unit: (age / mtbf_s) ** shape failures are expected up to an age.
        num_nodes: Nodes that are lost with the unit; 0 for none.
        planned: True for announced stops.
        at_once, timeout: Fractions noticed at once and by timeout; the rest is noticed by heartbeat.
        repair_s: Seconds to repair a lost node.
    """

    name: str
    units_per_node: float
    mtbf_s: float
    shape: float = 1.0
    age_s: float = 0.0
    num_nodes: int = 1
    planned: bool = False
    at_once: float = 0.0
    timeout: float = 0.0
    repair_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A number of nodes on which the job can run.

    Attributes:
        step_s: Seconds of a step.
        advance: Full steps of one step; below 1 where replica groups are missing.
    """

    num_nodes: int
    step_s: float
    advance: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """Numbers of a run; see the module and ``sections``. Times are seconds, 0 or infinity where nothing happens.

    Attributes:
        sizes: Sizes, the whole job first, each with fewer nodes than the one before; one for policy ``restart``.
        devices_per_node: Devices of a node.
        evaluation_every, checkpoint_every, memory_every: Steps between pauses; 0 for none.
        write_s: Seconds from the end of ``blocking_s`` until a checkpoint counts; 0 for synchronous writing.
        keep: Checkpoints in storage that are kept; 0 for all.
        corruption_mtbf_s, slow_mtbf_s, preemption_mtbf_s: Of one device, one device, and one node; infinity for never.
        restart_s: Seconds of a restart with initialization and warm-up, without loading.
        takeover_s: Seconds of a restart by hot spares; infinity for cold ones.
        group_nodes: For ``continue``, nodes of one replica group.
        trace_s, trace_nodes: Times at which the number of available spot nodes changes, the first 0, and that number;
            the last time is the end of the trace. Empty without a trace.
    """

    num_steps: int
    sizes: tuple[Size, ...]
    devices_per_node: int
    policy: str = "restart"
    evaluation_every: int = 0
    evaluation_s: float = 0.0
    checkpoint_every: int = 0
    blocking_s: float = 0.0
    write_s: float = 0.0
    load_s: float = 0.0
    keep: int = 0
    memory_every: int = 0
    memory_blocking_s: float = 0.0
    memory_load_s: float = 0.0
    causes: tuple[CauseSetup, ...] = ()
    detection_s: float = 0.0
    timeout_s: float = 0.0
    corruption_mtbf_s: float = np.inf
    corruption_found_s: float = 0.0
    slow_mtbf_s: float = np.inf
    slow_factor: float = 1.0
    slow_found_s: float = 0.0
    maintenance_every_s: float = np.inf
    maintenance_s: float = 0.0
    restart_s: float = 0.0
    takeover_s: float = np.inf
    diagnosis_s: float = 0.0
    spares: int = 0
    repair_s: float = 0.0
    repair_is_exponential: bool = False
    group_nodes: int = 1
    reconfigure_s: float = 0.0
    join_s: float = 0.0
    preemption_mtbf_s: float = np.inf
    notice_s: float = 0.0
    spot_wait_s: float = 0.0
    on_demand: bool = False
    is_spot: bool = False
    trace_s: tuple[float, ...] = ()
    trace_nodes: tuple[int, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole job."""
        return self.sizes[0].num_nodes

    @property
    def step_s(self) -> float:
        """Seconds of a step of the whole job."""
        return self.sizes[0].step_s

    @property
    def undisturbed_s(self) -> float:
        """Seconds of the run if nothing fails: steps, evaluations and checkpoints."""
        pauses = (
            (self.evaluation_every, self.evaluation_s),
            (self.memory_every, self.memory_blocking_s),
            (self.checkpoint_every, self.blocking_s),
        )
        return self.num_steps * self.step_s + sum(self.num_steps // every * each_s for every, each_s in pauses if every)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Results of simulated runs, one row for each.

    Attributes:
        time_s: (runs,) Seconds of each run.
        waterfall_s: (runs, parts) Seconds of each part of ``WATERFALL``.
        interruptions: (runs, causes + 3) Stops by cause, in the order of the setup, then by silent corruption, slow
            devices and preemptions. Maintenance and growth are none.
        node_s: (runs, 4) Node-seconds: in use on demand or reserved, in use spot, waiting of the job's own nodes
            (detection, diagnosis, waiting, maintenance, and nodes without a place in the size), spares.
        checkpoints: (runs,) Checkpoints written to storage.
    """

    time_s: NDArray[np.float64]
    waterfall_s: NDArray[np.float64]
    interruptions: NDArray[np.int64]
    node_s: NDArray[np.float64]
    checkpoints: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One stretch of the time of a run, for its timeline.

    Attributes:
        kind: A part of ``WATERFALL``; steps are ``compute`` until they are known to be lost.
        num_nodes: Nodes in use.
        step: Position at the end, in full steps.
        cause: Cause of the stop that begins the stretch; empty for none.
    """

    start_s: float
    end_s: float
    kind: str
    num_nodes: int
    step: float
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRun:
    """One simulated run with its stretches, in order and without gaps."""

    time_s: float
    waterfall_s: dict[str, float]
    interruptions: tuple[int, ...]
    node_s: tuple[float, ...]
    num_checkpoints: int
    stretches: tuple[Stretch, ...] = field(default=())
