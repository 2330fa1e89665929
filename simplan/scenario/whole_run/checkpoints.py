"""Bytes of a checkpoint of the states that the plan has, and seconds to write and load it over given bandwidths."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from simplan.errors import Problem, SpecError
from simplan.goodput.sections import CheckpointPolicy
from simplan.optimizers import OPTIMIZERS
from simplan.plan.shard import Shard
from simplan.prediction import Prediction
from simplan.program.memory.states import stored_tensors
from simplan.program.program import MemoryCategory
from simplan.units import format_bytes

_STATES = (MemoryCategory.PARAMETERS, MemoryCategory.OPTIMIZER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Size and times of a checkpoint in storage.

    Attributes:
        num_bytes: Bytes, each once.
        blocking_s: Seconds that training waits.
        write_s: Seconds from then until the checkpoint counts; 0 for synchronous writing.
        load_s: Seconds to load it.
    """

    num_bytes: float
    blocking_s: float
    write_s: float
    load_s: float


def checkpoint_of(policy: CheckpointPolicy, prediction: Prediction) -> Checkpoint:
    """Checkpoint of a plan.

    The slowest of the bandwidths bounds writing. Each rank writes the part of its states that no replica writes. A
    checkpoint is loaded as it is written, with the storage's read bandwidth.
    """
    num_bytes = policy.num_bytes or checkpoint_bytes(prediction)
    device, node = (share * num_bytes for share in _largest_shares(prediction))
    storage = policy.storage_bytes_per_s
    written_s = _seconds(policy, num_bytes, device, node, storage)
    read_s = _seconds(policy, num_bytes, device, node, policy.read_bytes_per_s or storage)
    copy_s = device / policy.copy_bytes_per_s if policy.async_save else written_s
    write_s = written_s if policy.write_s is None else policy.write_s
    return Checkpoint(
        num_bytes=num_bytes,
        blocking_s=copy_s if policy.blocking_s is None else policy.blocking_s,
        write_s=write_s if policy.async_save else 0.0,
        load_s=read_s if policy.load_s is None else policy.load_s,
    )


def checkpoint_bytes(prediction: Prediction) -> float:
    """Bytes of the weights and of the master copies and states of trained ones; with LoRA, of the adapters alone."""
    job = prediction.job
    model, state = job.padded_model, job.software.state(job.training, job.plan)
    trained = model.num_trained_parameters
    saved = trained if job.software.of_adapters(job.training) else model.num_parameters
    facts = OPTIMIZERS[job.training.optimizer]
    if facts.by_tensor:
        tensors = stored_tensors(model.layers_of(Shard()))
        states = sum(facts.state_bytes(tensor, state.widths(trainer=job.software.trainer)) for tensor in tensors)
        return saved * state.parameter + trained * int(state.master) + states
    return saved * state.parameter + trained * state.optimizer_bytes(job.training.optimizer)


def _largest_shares(prediction: Prediction) -> tuple[float, float]:
    """Largest part of the states on one device, and on one node; replicas write a part of theirs each."""
    held = {
        rank_memory.rank: sum(rank_memory.by_category.get(category, 0) for category in _STATES)
        for rank_memory in prediction.memory
    }
    total = sum(held.values())
    nodes = Counter[int]()
    for rank, num_bytes in held.items():
        nodes[prediction.job.node_of(rank)] += num_bytes
    return max(held.values()) / total, max(nodes.values()) / total


def _seconds(policy: CheckpointPolicy, total: float, device: float, node: float, storage: float | None) -> float:
    """Seconds over the slowest of the bandwidths; 0 without any.

    Args:
        total, device, node: Bytes of the job, and the largest of a device and of a node.
    """
    from_device = {"all": device, "node": node, "one": total}[policy.writers]
    from_node = total if policy.writers == "one" else node
    parts = (
        (from_device, policy.device_bytes_per_s),
        (from_node, policy.node_bytes_per_s),
        (total, storage),
    )
    return max(num_bytes / rate if rate else 0.0 for num_bytes, rate in parts)


def check_storage(policy: CheckpointPolicy, num_bytes: float, num_written: int) -> None:
    """Check that the storage takes the checkpoints that are kept.

    Args:
        num_written: Checkpoints of the whole run.

    Raises:
        SpecError: It does not.
    """
    capacity = policy.storage_bytes
    kept = max(1, min(policy.keep or num_written, num_written))
    if capacity is None or kept * num_bytes <= capacity:
        return
    value, size = format_bytes(capacity), format_bytes(num_bytes)
    room = int(capacity // num_bytes)
    if not room:
        rule = f"has no room for a checkpoint of {size}"
        fix = "use a larger storage"
    else:
        which = f"the {kept:,} checkpoints of keep" if policy.keep else f"all {kept:,} checkpoints of the run"
        rule, fix = f"has no room for {which}, each of {size}", f"write checkpoint.keep: {room}, or less"
    raise SpecError(Problem(field="checkpoint.storage_bytes", value=value, rule=rule, fix=fix))
