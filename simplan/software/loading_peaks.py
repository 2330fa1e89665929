"""Peaks of device and host memory while a checkpoint is loaded, before the first step.

Sources, read 2026-11-30:

- transformers 5.23.0: core_model_loading.py (``convert_and_load_state_dict_in_model``: slices of memory-mapped
  safetensors, copied to their device or cast one by one; quantized one by one), quantizers/quantizer_bnb_4bit.py
  (``update_device_map``: the current device of every rank), integrations/deepspeed.py (ZeRO-3)
- accelerate 1.15.0: utils/fsdp_utils.py (``fsdp2_prepare_model``, ``fsdp2_load_full_state_dict``)
- torch 2.13: distributed/fsdp/_fully_shard/_fsdp_init.py (``_move_states_to_device``), nn/parallel/distributed.py
- TRL 1.16.0: trainer/dpo_trainer.py (reference model)
- DeepSpeed at edaa722: runtime/zero/partition_parameters.py, runtime/zero/utils.py (``defragment``)
- Megatron-LM at d98e8a6: core/dist_checkpointing/strategies/torch.py; torchtitan: DCP
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simplan.model.layer import LayerKind, LayerSpec, ParameterSpec
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.software.loading import LoadingMethod
from simplan.software.software import SoftwareSpec
from simplan.training import TrainingSpec
from simplan.units import GIB

CHECKPOINT_BYTES = 2
"""Bytes per element of a checkpoint: an assumption, true of nearly all published models."""
_BROADCAST_BYTES = 2 * 250 * 2**20
"""Flat copies of parameters that DDP broadcasts when it is made: two buckets of 250 MiB (torch 2.13,
nn/parallel/distributed.py, ``broadcast_bucket_size``; csrc/distributed/c10d/comm.cpp, ``broadcast_coalesced``)."""
_WORDS: dict[LoadingMethod, str] = {
    "device_map": "every rank loads the whole model onto its device",
    "cpu": "every rank loads the whole model on the CPU first",
    "broadcast": "every rank loads the whole model on the CPU, and rank 0 broadcasts it tensor by tensor",
    "rank0": "rank 0 alone loads the model, on the CPU, and broadcasts it tensor by tensor",
    "zero_init": "rank 0 reads the checkpoint, and parameters are partitioned as they are made",
    "shards": "every rank reads its own shards",
}
_DIMENSIONS_OF_EXPERTS = 3
OF_SHARDS: tuple[LoadingMethod, ...] = ("broadcast", "rank0", "zero_init")
"""Methods of sharded parameters alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingPeaks:
    """Peaks of memory while a checkpoint is loaded, until every rank has its parameters.

    Attributes:
        method: Method of loading.
        quantizes: Weights are quantized meanwhile.
        device_bytes: Bytes on the device of the rank with the most: tensors, and the context where it is added.
        host_bytes: Bytes that the ranks of a node need in host memory, on the node with the most.
        mapped_bytes: Bytes of files that are mapped on that node. The kernel can drop them, so they are not needed.
    """

    method: LoadingMethod
    quantizes: bool
    device_bytes: int
    host_bytes: int
    mapped_bytes: int

    @property
    def words(self) -> str:
        """Who loads what."""
        return _WORDS[self.method] + " and quantizes it there" * (self.quantizes and self.method == "device_map")

    def fits(self, device_bytes: int | None, host_bytes: int | None) -> bool:
        """True if the model fits while it is loaded, on a device and in the memory of a node; None if it is unknown."""
        return (device_bytes is None or self.device_bytes <= device_bytes) and (
            host_bytes is None or self.host_bytes <= host_bytes
        )

    def to_json(self) -> dict[str, object]:
        """Peaks in GiB, the method, and what it does."""
        return {
            "method": self.method,
            "words": self.words,
            "device_gib": self.device_bytes / GIB,
            "host_gib": self.host_bytes / GIB,
            "mapped_gib": self.mapped_bytes / GIB,
        }


def loading_method(software: SoftwareSpec, plan: ParallelPlan, training: TrainingSpec) -> LoadingMethod | None:
    """Method by which a job loads its model; None for a job that begins with random weights.

    Pretraining loads nothing unless ``software.loading`` says so. Ranks that split layers read their own parts.
    """
    option = software.loading
    if not software.loads(training) or option == "none":
        return None
    if option != "auto":
        return option
    ways, base = software.checkpoint, training.base_weights
    if splits_layers(plan):
        return None if ways.sharded is None else "shards"
    if ways.quantized is not None and base is not None and base.is_quantized_while_loaded:
        return ways.quantized
    return ways.sharded if never_whole(software, plan) else ways.replicated


def splits_layers(plan: ParallelPlan) -> bool:
    """True if ranks hold different parts of the model, besides shards of data parallelism."""
    return max(plan.tp, plan.pp, plan.ep, plan.etp) > 1


def never_whole(software: SoftwareSpec, plan: ParallelPlan) -> bool:
    """True if ranks shard parameters between steps, as in FSDP and ZeRO-3."""
    return plan.shards_parameters and not software.holds_whole_weights(plan)


def loading_peaks(
    software: SoftwareSpec,
    model: ModelSpec,
    plan: ParallelPlan,
    training: TrainingSpec,
    ranks_per_node: int,
    stages: Sequence[Sequence[LayerSpec]] | None = None,
) -> LoadingPeaks | None:
    """Peaks of memory while a job loads its model; None for a job that begins with random weights.

    Args:
        ranks_per_node: Ranks of the fullest node.
        stages: Layers of each pipeline rank; None for all layers on every rank.
    """
    method = loading_method(software, plan, training)
    if method is None:
        return None
    base = training.base_weights
    sizes_of = _Tensors(software, model, plan, training)
    layers_by_rank = stages or [software.layers_of(model, plan, training)]
    trained = _Loaded(method, tuple(map(sizes_of.rank, layers_by_rank)), never_whole(software, plan))
    reference = _reference(software, model, plan, training)
    return LoadingPeaks(
        method=method,
        quantizes=base is not None and base.is_quantized_while_loaded,
        device_bytes=_device_bytes(trained, reference, software, plan),
        host_bytes=_host_bytes(trained, reference, software, plan, ranks_per_node),
        mapped_bytes=max(each.source for each in trained.ranks)
        if software.checkpoint.mapped and method != "shards"
        else 0,
    )


class _Loaded(NamedTuple):
    """A model that is loaded: the one that is trained, or the reference model of preference training.

    Attributes:
        ranks: Sizes of the tensors of each pipeline rank.
        is_sharded: Ranks hold shards of it between steps.
    """

    method: LoadingMethod
    ranks: tuple[_Sizes, ...]
    is_sharded: bool


def _reference(software: SoftwareSpec, model: ModelSpec, plan: ParallelPlan, training: TrainingSpec) -> _Loaded | None:
    """Reference model next to the one that is trained, which is loaded after it; None for none.

    Its weights are whole ones of the checkpoint. TRL 1.16 loads it once the Trainer has moved the trained model to its
    device, and shards it before that one is sharded (trl/trainer/dpo_trainer.py and kto_trainer.py).
    """
    if training.reference(has_adapters=model.lora_rank > 0) != "second_model":
        return None
    preference = training.preference
    alone, frozen = training.model_copy(update={"base_weights": None}), model.without_training
    method = loading_method(software, plan, alone)
    assert method is not None, "ranks that load a trained model load its reference"
    is_sharded = never_whole(software, plan) and (preference is None or preference.reference_sharded is not False)
    sizes_of = _Tensors(software, frozen, plan, alone, None if preference is None else preference.reference_bytes)
    return _Loaded(method, (sizes_of.rank(software.layers_of(frozen, plan, alone)),), is_sharded)


def _host_bytes(
    trained: _Loaded, reference: _Loaded | None, software: SoftwareSpec, plan: ParallelPlan, ranks_per_node: int
) -> int:
    """Bytes that the ranks of a node need in host memory at the peak of loading."""
    ways = software.checkpoint

    def copied(model: _Loaded) -> int:
        copies = {"cpu": ranks_per_node, "broadcast": ranks_per_node, "rank0": 1}.get(model.method, 0)
        if model.method == "device_map" and not ways.mapped:
            copies = ranks_per_node  # torch.load has the file on the CPU first
        return copies * max(each.copied for each in model.ranks)

    def kept(rank: _Sizes, model: _Loaded) -> int:
        return rank.kept * (plan.offload_optimizer and model.is_sharded)

    def during(model: _Loaded) -> int:
        """Bytes while a model is brought where it is trained, with those that stay."""
        flattens = ways.flattens_on_host and model.is_sharded
        more = (
            kept(each, model) + each.flat * flattens + each.largest * (model.method == "shards") for each in model.ranks
        )
        return copied(model) + ranks_per_node * max(more)

    if reference is None:
        return during(trained)
    stays = ranks_per_node * max(kept(each, reference) for each in reference.ranks)
    waiting = copied(trained) if trained.is_sharded else 0  # whole models are on their devices by then
    return max(during(trained) + stays, waiting + during(reference))


def _device_bytes(trained: _Loaded, reference: _Loaded | None, software: SoftwareSpec, plan: ParallelPlan) -> int:
    """Bytes of tensors on the device of the rank with the most at the peak of loading."""
    own = max(_alone_bytes(trained, each, software, plan) for each in trained.ranks)
    if reference is None:
        return own
    [rank], [other] = trained.ranks, reference.ranks
    peak = _alone_bytes(reference, other, software, plan, is_wrapped=False)
    if not trained.is_sharded or trained.method == "device_map":
        before = rank.held
    else:  # on the CPU until the training begins, unless it is partitioned as it is made
        before = _kept_bytes(trained, rank, plan) if trained.method in ("zero_init", "shards") else 0
    kept = _kept_bytes(reference, other, plan)
    if trained.method == "zero_init":
        return max(own, before + peak)
    return max(own + kept, before + peak)


def _kept_bytes(model: _Loaded, rank: _Sizes, plan: ParallelPlan) -> int:
    """Bytes on the device of a rank once a model is where it is trained."""
    if not model.is_sharded:
        return rank.held
    return 0 if plan.offload_optimizer else rank.kept


def _alone_bytes(
    model: _Loaded, rank: _Sizes, software: SoftwareSpec, plan: ParallelPlan, *, is_wrapped: bool = True
) -> int:
    """Bytes of a model's tensors on the device of a rank at the peak of its loading.

    Args:
        is_wrapped: Ranks that hold whole parameters wrap the model in DDP.
    """
    method, kept = model.method, 0 if plan.offload_optimizer else rank.kept
    if method == "shards":
        return kept
    on_device = method == "device_map" or not software.checkpoint.mapped
    whole = max(rank.loaded + rank.made, rank.held + rank.cast) if on_device else rank.held + rank.cast
    if not model.is_sharded:
        broadcasts = is_wrapped and software.runtime == "torch" and plan.dp > 1
        return max(whole, rank.held + min(rank.held, _BROADCAST_BYTES) * broadcasts)
    if method == "device_map":
        return max(whole, rank.held + kept * software.checkpoint.keeps_unsharded)
    return kept + (rank.unit if method == "cpu" else rank.largest)


class _Sizes(NamedTuple):
    """Bytes of tensors of a rank; the first six add up, and of the others the largest counts.

    Attributes:
        loaded: Whole, in the type in which they are loaded.
        held: Whole, as they are in training.
        kept: Of the rank's shard.
        copied: Host memory of a rank that loads them on the CPU, without what is mapped.
        source: In the checkpoint.
        flat: Trained shards, in the type of the checkpoint.
        unit: Of a layer, as in training.
        largest: Of a tensor, as in training.
        made: Temporary copy of a tensor that is quantized or stacked.
        cast: Temporary copy of a tensor that is cast on the device after it was loaded.
    """

    loaded: int = 0
    held: int = 0
    kept: int = 0
    copied: int = 0
    source: int = 0
    flat: int = 0
    unit: int = 0
    largest: int = 0
    made: int = 0
    cast: int = 0

    def plus(self, other: _Sizes, times: int = 1) -> _Sizes:
        """Sizes of both, of ``other`` as often as ``times``."""
        sums = (mine + times * its for mine, its in zip(self[:_SUMS], other[:_SUMS], strict=True))
        return _Sizes(*sums, *map(max, self[_SUMS:], other[_SUMS:]))


_SUMS = _Sizes._fields.index("unit")


class _Tensors:
    """Sizes of the tensors of a job while they are loaded."""

    def __init__(
        self,
        software: SoftwareSpec,
        model: ModelSpec,
        plan: ParallelPlan,
        training: TrainingSpec,
        width: int | None = None,
    ) -> None:
        """``width`` is that of frozen weights in bytes; None for the framework's."""
        self._ways, self._state = software.checkpoint, software.state(training, plan)
        if width is not None:
            self._state = self._state.model_copy(update={"frozen": width})
        shards = plan.shards_parameters
        self._shards = plan.dp_shard * plan.cp if shards else 1, plan.expert_shards if shards else 1
        self._has_adapters = model.lora_rank > 0
        base = training.base_weights
        self._quantizes = base is not None and base.is_quantized_while_loaded

    def rank(self, layers: Sequence[LayerSpec]) -> _Sizes:
        """Sizes of the tensors of a rank's layers; a head that is tied to an embedding there adds none."""
        found, has_embedding = _Sizes(), any(layer.kind is LayerKind.EMBEDDING for layer in layers)
        for key, times in Counter(layer.key for layer in layers).items():
            layer = next(each for each in layers if each.key == key)
            owned = [p for p in layer.parameters if not (has_embedding and p.name in layer.tied)]
            of_layer = _Sizes()
            for parameter in owned:
                of_layer = of_layer.plus(self._tensor(parameter))
            found = found.plus(of_layer._replace(unit=of_layer.held), times)
        return found

    def _tensor(self, parameter: ParameterSpec) -> _Sizes:
        state, ways, number = self._state, self._ways, parameter.num_elements
        shards = self._shards[parameter.expert]
        width = state.frozen if parameter.frozen or parameter.is_copy else state.parameter
        file_bytes = CHECKPOINT_BYTES * number
        if (stored := parameter.stored) is not None:
            held, kept = stored.shard_bytes(parameter.shape, 1), stored.shard_bytes(parameter.shape, shards)
            made = file_bytes if self._quantizes else 0
            source = file_bytes if self._quantizes else held
            copied = (held if self._quantizes else 0) if ways.mapped else source
            return _Sizes(held, held, kept, copied, source, largest=held, made=made)
        held, kept = width * number, width * -(-number // shards)
        if self._has_adapters and not parameter.frozen:  # they are made, not loaded
            return _Sizes(held, held, kept, largest=held)
        loaded_width = width if state.base is None else min(width, state.base.compute_bytes)
        loaded = loaded_width * number
        stacked = ways.stacks_experts and len(parameter.shape) == _DIMENSIONS_OF_EXPERTS
        copied = loaded if stacked or loaded_width != CHECKPOINT_BYTES else 0
        flat = 0 if parameter.frozen else CHECKPOINT_BYTES * -(-number // shards)
        return _Sizes(
            loaded,
            held,
            kept,
            copied if ways.mapped else file_bytes,
            file_bytes,
            flat,
            largest=held,
            made=loaded * stacked,
            cast=loaded * (loaded_width != width),
        )
