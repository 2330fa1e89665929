"""Calibration file of a machine: its location, reading, writing, and the kinds of timings that a job needs."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from simplan.cluster.hardware import ClusterSpec, DeviceSpec
from simplan.cost.calibration.format import Calibration
from simplan.errors import Problem, SpecError
from simplan.io import read_model, write_model
from simplan.model.layer import CollectiveKind, LayerCollective
from simplan.model.model import ModelSpec
from simplan.optimizers import LAYERWISE
from simplan.plan.plan import ParallelPlan
from simplan.training import TrainingSpec


def default_path() -> Path:
    """Returns ``calibration.json`` in simplan's folder of the user's cache (XDG_CACHE_HOME, otherwise ~/.cache)."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "simplan" / "calibration.json"


def load(path: Path) -> Calibration | None:
    """Reads a calibration file; returns None if it does not exist.

    Raises:
        SpecError: The file is not a calibration of this version.
    """
    if not path.exists():
        return None
    try:
        return read_model(path, Calibration)
    except SpecError as error:
        fix = "delete the file and run `simplan calibrate`"
        raise SpecError([replace(p, fix=p.fix or fix) for p in error.problems], file=error.file) from None


def save(path: Path, calibration: Calibration) -> None:
    """Writes a calibration atomically: a reader never sees a partial file.

    Raises:
        SpecError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_model(path, calibration)


_MEMORY_TOLERANCE = 0.15  # drivers report less than the nominal memory


def refuse_other_device(calibration: Calibration, cluster: ClusterSpec) -> None:
    """Checks that a calibration was taken on the kind of device that the cluster has.

    The catalog's ``h100-sxm-80gb`` is NVIDIA's ``H100 80GB HBM3``. The first word of the catalog's name must occur in
    the other name, and the memory must agree.

    Raises:
        SpecError: The calibration was taken on another device.
    """
    device, timed_on = cluster.device, str(calibration.environment.get("device") or "an unnamed device")
    timed_bytes = calibration.memory_bytes
    if cluster.cores_per_node is not None:
        alike = calibration.device_kind == "cpu"
    else:
        alike = calibration.device_kind == device.kind and is_named(device, timed_on)
        if alike and device.memory_bytes is not None and timed_bytes is not None:
            alike = abs(timed_bytes / device.memory_bytes - 1) <= _MEMORY_TOLERANCE
    if not alike:
        is_gpu = calibration.device_kind == "gpu"
        of_memory = f" of {timed_bytes / 2**30:.0f} GiB" if is_gpu and timed_bytes is not None else ""
        rule = f"was measured on {timed_on}{of_memory}, which tells nothing about {device.id}"
        fix = f"run `simplan calibrate` on {device.id}, or leave the calibration out"
        raise SpecError(Problem(field="calibration", rule=rule, fix=fix))


def is_named(device: DeviceSpec, driver_name: str) -> bool:
    """Returns True if the first word of the device's catalog name occurs in the name that the driver gives it.

    >>> from simplan import catalog
    >>> is_named(catalog.device("h100-sxm-80gb"), "NVIDIA H100 80GB HBM3")
    True
    >>> is_named(catalog.device("a100-sxm-40gb"), "NVIDIA A100-SXM4-80GB")
    False
    """
    words = re.split(r"[^a-z0-9]+", driver_name.lower())
    first, *others = device.id.lower().split("-")
    sizes = [word for word in others if re.fullmatch(r"\d+gb", word)]
    named = [word for word in words if re.fullmatch(r"\d+gb", word)]
    return first in words and (not sizes or not named or sizes[0] in named)


def kinds_needed(plan: ParallelPlan, model: ModelSpec, training: TrainingSpec) -> frozenset[CollectiveKind]:
    """Returns the kinds of collectives and P2P sends in a step; norms over sharded tensors need an all-reduce."""
    kinds = _of_layers(plan, model) | _of_gradients(plan)
    if model.num_experts and plan.shard.experts_apart and plan.expert_ranks > plan.ep:
        kinds.add(CollectiveKind.ALL_REDUCE)
    if plan.pp > 1:
        kinds.add(CollectiveKind.SEND)
        if model.shared_by_ends and not model.lora_rank:
            kinds.add(CollectiveKind.ALL_REDUCE)
    split = plan.shards_parameters or plan.tp > 1
    if (training.clip_grad_norm is not None and (split or plan.pp > 1)) or (training.optimizer in LAYERWISE and split):
        kinds.add(CollectiveKind.ALL_REDUCE)
    return frozenset(kinds)


def _of_layers(plan: ParallelPlan, model: ModelSpec) -> set[CollectiveKind]:
    kinds: set[CollectiveKind] = set()
    for layer in set(model.layers_of(plan.shard)):
        for kernel in layer.kernels:
            if isinstance(kernel, LayerCollective):
                kinds.update(kind for kind in (kernel.forward, kernel.backward) if kind is not None)
        if any(parameter.partial_gradient for parameter in layer.parameters):
            kinds.add(CollectiveKind.ALL_REDUCE)
    return kinds


def _of_outer_steps(plan: ParallelPlan) -> set[CollectiveKind]:
    """Returns the kinds of outer steps of replicas that train alone."""
    if plan.replication is None:
        return set()
    if plan.replication.has_servers:
        return {CollectiveKind.SEND}
    return {CollectiveKind(kind) for kind in plan.replication.collectives}


def _of_gradients(plan: ParallelPlan) -> set[CollectiveKind]:
    """Returns the kinds that reduce gradients and distribute updates of sharded optimizers."""
    if plan.shards_parameters:
        kinds = {CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER}
        kinds |= _of_outer_steps(plan)
        return kinds | {CollectiveKind.ALL_REDUCE} if plan.dp_replicate > 1 and not plan.replicas_apart else kinds
    kinds = {CollectiveKind.ALL_REDUCE} if plan.num_averaging > 1 else set()
    kinds |= _of_outer_steps(plan)
    if plan.compression is not None:  # whole gradients are predicted as well
        kinds |= {CollectiveKind(kind) for kind in plan.compression.collectives}
    return kinds | {CollectiveKind.BROADCAST} if plan.shards_optimizer_only else kinds
