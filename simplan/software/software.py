"""Profile of a training framework: precision of states, gradient buckets, buffers, options and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from simplan.base import MAX_COUNT, Count, Natural, NonNegative, Spec
from simplan.model.base_weights import FrozenBase, with_frozen_base
from simplan.model.captured.compiled import compiled_blocks
from simplan.model.fake_quantization import SimulatedLinears, with_fake_quantization
from simplan.model.implementations.expert_dispatch import ExpertDispatch
from simplan.model.implementations.layer_implementation import LayerImplementation, implemented_layers
from simplan.model.implementations.loss_in_chunks import ChunkedLoss, LossMode
from simplan.model.layer import LayerSpec, ParameterSpec
from simplan.model.low_precision import Fp8Recipe, Kept, LinearFormat, LowPrecision, QuantizedWeights, linear_format
from simplan.model.weight_format import WeightLibrary
from simplan.optimizers import OPTIMIZERS, OptimizerName, UpdateName, Widths
from simplan.plan.plan import ParallelPlan, RecomputeModule
from simplan.plan.shard import Shard
from simplan.software.loading import CheckpointLoading, LoadingOption
from simplan.software.rates import FrameworkRates, MemorySpread
from simplan.training import TrainingSpec

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec

_Wide = Literal["fp32", "tf32", "fp16", "bf16", "pure_bf16"]
SoftwareOption = Literal[
    "autocast",
    "broadcast_buffers",
    "channels_last",
    "compiled",
    "compiled_loss",
    "cuda_graphs",
    "dtensor",
    "expert_dispatch",
    "expert_overlap",
    "flat_parameters",
    "flat_shards",
    "fp8_activation_input",
    "fp8_dot_product_attention",
    "fused_experts",
    "grad_overlap",
    "gradient_as_bucket_view",
    "loading",
    "loss",
    "overlap_param_gather",
    "tp_overlap",
    "vocab_multiple",
    "zero_grad_set_to_none",
]
"""Fields of a profile that a user can set."""
TensorOverlap = Literal["none", "backward", "gathers", "all"]
"""Tensor-parallel collectives that overlap matmuls."""


_LOSSES = {True: "compiled loss", False: "eager loss"}
_COMPILED_PASSES = 0.7
"""Bytes of memory-bound kernels with compiled blocks, relative to eager kernels that a calibration timed."""


_STATE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


class LowPrecisionLinears(Spec):
    """Linear layers in one low precision, as a framework implements them.

    Attributes:
        kept: Form in which operands are saved for backward.
        weights: Lifetime of quantized weights that are unsharded. Weights that FSDP all-gathers are quantized every
            time, unless they are ``stored`` quantized.
        keeps_columns: Quantized weights that outlast a microbatch are kept along columns as well, where matmuls of
            backward need them so; else they are transposed every time, which is not in the time.
        recipes: Supported FP8 recipes.
        gathers: Recipes with which tensor-parallel ranks all-gather inputs and output gradients of the linear layers of
            blocks quantized (``simplan.program.lowering.script``); for MXFP8 and NVFP4 these names.
        tp_overlap: ``SoftwareSpec.tp_overlap`` with these linear layers, whatever else it is; None for the same.
        experts: Grouped GEMMs of experts are quantized as well.
        frozen: Matrices with adapters are quantized as well, without the operands of weight gradients.
        eager: Casts are single torch operations in sequence, unless blocks are compiled.
    """

    kept: Kept
    weights: QuantizedWeights = "microbatch"
    keeps_columns: bool = True
    recipes: Annotated[tuple[Fp8Recipe, ...], Field(strict=False)] = ()  # files have lists
    gathers: Annotated[tuple[Fp8Recipe | Literal["mxfp8", "nvfp4"], ...], Field(strict=False)] = ()
    tp_overlap: TensorOverlap | None = None
    experts: bool = False
    frozen: bool = False
    eager: bool = False


class StateBytes(Spec):
    """Bytes per parameter and per element that a framework uses during training.

    Attributes:
        parameter: Weight between steps.
        frozen: Weight that is not trained.
        gradient: Accumulated gradient; with FSDP, unsharded until it is reduced.
        master: Separate FP32 copy of the weight; 0 for none.
        moment: Each state of the optimizer, for example each of Adam's two moments.
        activation: Activation element saved for backward.
        residual: Element of the residual stream saved for backward.
        boundary: Element sent between stages.
        gathered: Weight that FSDP has all-gathered for compute.
        reduced: Gradient during its reduction.
        matmul_gradient: Weight gradient as its matmul writes it; 0 where matmuls accumulate into the stored gradients.
        placeholder: Empty tensor that autograd gets for a gradient accumulated in place: one per shape of the blocks'
            matrices, which stays, and one for the head during its backward; 0 for none.
        unaccumulated: Gradient of a microbatch, stored in addition to the wider one that it is added to; 0 for none.
        flattened: Flat copy of a gradient that the optimizer upcasts; 0 for none.
        weight_copy: Copy of a matrix in the precision of activations, which forward makes for every microbatch and
            saves for backward; 0 for none.
        linear: Quantization format of the linear layers of blocks; None for no quantization. Belongs to one training
            run, not to the catalog.
        base: Frozen weights below adapters, and the precision of adapters, where these are not as frozen and activation
            say; None otherwise. Belongs to one training run, not to the catalog.
        simulated: Simulated quantization of linear layers; None for none. Belongs to one training run, not to the
            catalog.
        rank: Rank of the gradients of which GaLore or APOLLO has states; 0 for other optimizers. Belongs to one
            training run, not to the catalog.
        updated_by: Optimizer that updates unsharded weights in the middle of backward; None for one that runs after it.
            Belongs to one training run, not to the catalog.
        moments: Each of Adam's states, where a run stores them in types of its own. Belongs to one training run, not to
            the catalog.
        gathers_experts: FSDP shards and all-gathers expert-parallel weights. Belongs to one plan, not to the catalog.
        is_flat: FSDP1 has one flat tensor per unit (``SoftwareSpec.flat_parameters``). Belongs to one plan, not to the
            catalog.
    """

    parameter: Count
    frozen: Count
    gradient: Count
    master: NonNegative = 0
    moment: Count = 4
    activation: Count
    residual: Count
    boundary: Count
    gathered: Count
    reduced: Count
    matmul_gradient: Natural
    placeholder: Natural = 0
    unaccumulated: Natural = 0
    flattened: Natural = 0
    weight_copy: Natural = 0
    linear: LinearFormat | None = Field(default=None, exclude=True)
    base: FrozenBase | None = Field(default=None, exclude=True)
    simulated: SimulatedLinears | None = Field(default=None, exclude=True)
    rank: Natural = Field(default=0, exclude=True)
    updated_by: UpdateName | None = Field(default=None, exclude=True)
    moments: tuple[Annotated[int, Field(le=8)], Annotated[int, Field(le=8)]] | None = Field(default=None, exclude=True)
    gathers_experts: bool = Field(default=False, exclude=True)
    is_flat: bool = Field(default=False, exclude=True)

    if TYPE_CHECKING:  # fields without a default may be left out

        def __init__(self, **fields: Any) -> None: ...

    @property
    def widened_bytes(self) -> int:
        """Bytes per gradient of its upcast copy while the optimizer runs; 0 if it is as wide as the master copy."""
        return int(self.master) + self.flattened if self.master > self.gradient else 0

    @property
    def narrowed_bytes(self) -> int:
        """Bytes per gradient of the downcast copy that is reduced just before the update; 0 for none."""
        return self.reduced if self.unaccumulated and self.reduced < self.gradient else 0

    @property
    def accumulation_bytes(self) -> int:
        """Bytes read and written to add a microbatch's gradient to the stored gradient in a separate kernel.

        A narrower gradient is upcast first. Matmuls that accumulate into the stored gradients need no kernel.
        """
        if not self.matmul_gradient:
            return 0
        widened = self.matmul_gradient + int(self.gradient) if self.matmul_gradient != self.gradient else 0
        return widened + self.added_bytes

    @property
    def added_bytes(self) -> int:
        """Bytes read and written to add a gradient to another."""
        return 3 * int(self.gradient)

    @property
    def accumulated(self) -> int:
        """Bytes per unsharded gradient that FSDP accumulates over microbatches: as wide as their reduction or wider.

        FSDP1 accumulates in the precision of its unsharded weights (torch, distributed/fsdp/_runtime_utils.py,
        ``_post_backward_hook``).
        """
        return self.gathered if self.is_flat else max(self.gradient, self.reduced)

    @property
    def update_fraction(self) -> float:
        """Bytes that an update reads and writes relative to FP32: 1/2 for weights of 16 bits without a master copy."""
        return 1 / 2 if not self.master and self.parameter == self.gradient == self.moment == 2 else 1.0

    def elements_of(self, parameter: ParameterSpec, number: int | None = None) -> int:
        """Elements of a parameter, or a number of them, as so many of the width of trained parameters.

        A trained copy of a frozen weight is as wide as that one, and so are its gradient and its states of AdamW.
        """
        number = parameter.num_elements if number is None else number
        return number * int(self.frozen) // int(self.parameter) if parameter.is_copy else number

    def widths(self, *, trainer: bool = False) -> Widths:
        """Widths that states of the optimizer depend on; the optimizer updates the master copy where there is one.

        Args:
            trainer: See ``Widths``.
        """
        first, second = self.moments or (self.moment, self.moment)
        return Widths(first, second, int(self.master) or self.parameter, trainer, self.rank)

    def optimizer_bytes(self, optimizer: OptimizerName) -> float:
        """Bytes of optimizer states and master copy for one parameter, at least; exact unless they depend on shapes."""
        facts = OPTIMIZERS[optimizer]
        if facts.by_tensor:
            return facts.least_state_bytes(self.widths()) + int(self.master)
        return sum(self.moments or [self.moment] * len(facts.states)) + int(self.master)

    @property
    def saved_update_bytes(self) -> int:
        """Bytes per weight that a step of Adam streams less, with states in narrower types than the framework's."""
        return 0 if self.moments is None else 2 * (2 * self.moment - sum(self.moments))

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, data: Any) -> Any:
        """Default widths: residual, matmul_gradient = activation; frozen, gathered = parameter; reduced = gradient."""
        if not isinstance(data, dict):
            return data
        same = {
            "frozen": "parameter",
            "residual": "activation",
            "gathered": "parameter",
            "reduced": "gradient",
            "matmul_gradient": "activation",
        }
        return {key: data[source] for key, source in same.items() if source in data} | data


class SoftwareSpec(Spec):
    """A software profile: everything about a framework that affects time or memory.

    Attributes:
        id: Catalog name.
        stands_for: Versions that the profile describes, with their year.
        state_bytes: Bytes per element by training precision, for unsharded parameters; a precision that is missing is
            not supported. ``pure_bf16`` is BF16 with ``TrainingSpec.pure_bf16``.
        sharded_state_bytes: ``state_bytes`` for parameters that FSDP shards.
        lora_state_bytes, sharded_lora_state_bytes: ``state_bytes`` and ``sharded_state_bytes`` for adapters, with all
            other weights frozen.
        low_precision: Supported precisions of linear layers below 16 bits; everything else is then as for BF16.
        base_weights: Libraries whose weights of few bits the framework trains adapters on; empty for none.
        upcast_frozen: Frozen weights of 16 bits next to those of bitsandbytes become FP32, if ranks do not shard them.
        quantizes_head: The output head is stored in few bits as well.
        holds_graph: The training loop holds the last loss, and so its graph, until the next one is there.
        casts_unpacked: Weights are quantized from another type of 16 bits, in which bitsandbytes unpacks them.
        unpacks_into_buffer: Forward unpacks weights of few bits into one buffer, which stays.
        caches_casts: Autocast holds copies of trained weights until the forward of the model ends, recomputed or not.
        peft_adapters: Adapters are PEFT's, which copy the result of a 4-bit layer before they add to it.
        layers: Implementation of the layers.
        rates: Efficiency of kernels under the framework.
        rates_of: Profile with the same kernels and the same allocator, on which runs were published: ``rates`` and the
            reserve of the allocator are that profile's, fitted on the runs of both; the uncertainty is not. None for
            a profile with its own.
        chunked_losses: Values of ``loss`` other than ``whole`` that the framework has, and what they mean in it.
        checkpoint: The framework's way of loading a checkpoint, without ``loading``.
        options: Fields that a scenario may set.
        runtime: Implementation of data parallelism, pipelines and FSDP, with its limits. ``torch``: DDP rebuilds its
            buckets before the second step, and briefly holds both sets if gradients are views of the first set. A
            pipeline rank has one receive buffer per
            microbatch and direction. Tensors that it sends live to the end of the step, where it waits for all sends.
            Gradients are divided by the number of microbatches once they are complete. ``megatron`` (DeepSpeed's is
            similar): a pipeline rank receives into new tensors, frees tensors once they are sent, divides losses
            instead of gradients, and waits for P2P communication in ``blocking_p2p_schedules``. ``xla``: torch's,
            except that buffers live only while they are used, and FSDP makes no copies into or out of one flat buffer
            per unit, as it does elsewhere.
        bucket_bytes: Size at which DDP closes a gradient bucket; without ``grad_overlap`` there is one for all.
        first_bucket_bytes: Size of the first bucket, smaller so that the reduction starts early.
        waits_for_gradients: Point at which DDP waits for reductions: at the end of a stage's last ``backward``, before
            its sends (torch), or in the ``step``, after all backwards. Reductions without overlap begin there.
        waits_for_batch: Before each forward of a stage the GPU starves while it waits for the microbatch from the host.
        per_rank_tensor_lists: FSDP all-gathers and reduce-scatters matrix by matrix, with a list of one tensor per
            rank. The CPU makes, checks and copies these tensors sequentially, and the device waits.
        live_elements: Limit of gathered elements with ``per_rank_tensor_lists``; None for no limit. FSDP prefetches
            only below the limit. It frees a matrix, and gathers it again, if at least this many elements are used
            before the matrix.
        scatter_gather_p2p: Tensor-parallel ranks with equal tensors each send one part to the next stage, which
            all-gathers the parts.
        reduces_each_microbatch: With sharded parameters and without a pipeline, gradients are always reduced after
            every microbatch; ``plan.grad_sync: step`` is not supported.
        defers_reductions: With sharded parameters, a scenario without ``plan.grad_sync`` reduces gradients once a step.
        prefetch_receive_schedules: Schedules in which a pipeline rank posts the receives for its next forward and next
            backward before the preceding compute. A P2P send then waits only for its sender, and for earlier sends in
            its direction.
        ddp_in_pipelines: DDP reduces the gradients of a split backward, and works with several stages per rank.
        uniform_stages: Blocks per stage without ``stage_layers``: equal numbers ``always`` or ``where_possible``, or a
            balanced split (``no``).
        packed_attention: Attention of packed documents: one kernel call for each (``document_calls``), or ``one_call``
            for all; None if not modeled.
        context_bytes: Device memory of the driver context and the communication library, by device kind.
        zero_stages: Supported values of ``ParallelPlan.zero_stage``.
        shards_over_cp: Context-parallel ranks shard parameters also with a single data-parallel shard: the assumed
            ``zero_stage`` of a plan with ``cp`` above 1 is then the same as with several shards.
        zero2_whole_weights: With ``zero_stage`` 2, ranks hold whole weights also during the optimizer step; else FSDP
            frees them in backward.
        sequence_parallelism: Tensor-parallel ranks can split the tokens of norms and sums as well.
        optimizer_shards: Unit that ZeRO-1 assigns to ranks. ``parameters``: full parameters, which their owners
            broadcast after the update (torch's ZeroRedundancyOptimizer). ``elements``: equal numbers of elements of
            flat buffers, with a reduce-scatter of gradients and an all-gather of updated parameters (Megatron's
            distributed optimizer, DeepSpeed).
        grad_dtypes: Gradient precisions that a plan may request in addition to the framework's own
            (``plan.grad_dtype``).
        separate_grad_accumulator: Gradients wider than the framework's own are accumulated in separate buffers, and
            reduced in the framework's precision.
        flat_updates: Temporaries of the optimizer are single blocks, which do not fit into memory that layers freed.
        recompute_modules: Modules of a block that can be recomputed separately, in addition to the attention core.
        recompute_layers: Recomputation can be limited to the first blocks of every stage.
        mtp: Multi-token prediction is supported.
        reserve_fraction: Memory that the allocator reserves beyond transient memory, as a fraction of it.
        resharding_reserve_fraction: ``reserve_fraction`` where every pass frees gathered parameters; None for the
            same.
        memory_spread: Uncertainty of peak memory.
        compiled_reserve_fraction: ``reserve_fraction`` with compiled blocks, which make fewer temporary tensors; None
            for the same.
        fp8_any_layout: See ``KernelRates``. Belongs to the device of a job, not to the catalog.
        trains_adapters: Adapters are trained by another task than ``lora``, which says so itself. Belongs to the model
            of a job, not to the catalog.
        loss_sequences: Sequences whose log-probabilities a loss on preferences needs at once; 0 for other losses.
            Belongs to the task of a job, not to the catalog.
        trainer: A trainer runs the steps, and loads data, reads results back and logs between them; else a bare loop
            does.
        executable: ``simplan run`` can run plans under this profile; no profile has it of the one that it is ``like``.
        trains_on_preferences: Preference training (``PREFERENCE_TASKS``) runs on the framework.
        trains_modules: Users train ``torch.nn.Module``s of their own with the framework, as they are.
        not_modelled: Features of the framework that are not modeled; predictions treat them as in torch.
        sources: Field name -> source of its value.
    """

    id: str
    stands_for: str = ""
    state_bytes: dict[_Wide, StateBytes]
    sharded_state_bytes: dict[_Wide, StateBytes] = Field(default_factory=dict)
    lora_state_bytes: dict[_Wide, StateBytes] = Field(default_factory=dict)
    sharded_lora_state_bytes: dict[_Wide, StateBytes] = Field(default_factory=dict)
    low_precision: dict[LowPrecision, LowPrecisionLinears] = Field(default_factory=dict)
    base_weights: Annotated[tuple[WeightLibrary, ...], Field(strict=False)] = ()
    upcast_frozen: bool = False
    quantizes_head: bool = False
    holds_graph: bool = False
    casts_unpacked: bool = False
    unpacks_into_buffer: bool = False
    caches_casts: bool = False
    peft_adapters: bool = False
    autocast: bool = Field(
        True,
        description=(
            "Adapters are trained under torch.autocast. Without it, modules compute in the precision of their weights: "
            "adapters, and what prepare_model_for_kbit_training makes FP32, in FP32."
        ),
    )
    layers: LayerImplementation = LayerImplementation()
    rates: FrameworkRates = FrameworkRates()
    rates_of: str | None = None
    compiled: bool = Field(
        False,
        description=(
            "Blocks are compiled (torch.compile), which fuses memory-bound kernels. With runtime torch, blocks save "
            "for backward what torch.compile saves."
        ),
    )
    compiled_loss: bool | None = Field(
        None,
        description=(
            "The loss is compiled, so that backward reads logits in 16 bits and no FP32 copy of them exists. null: it "
            "is where blocks are. Its time follows the blocks in any case."
        ),
    )
    cuda_graphs: bool = Field(
        False,
        description=(
            "Forward and backward are replayed from CUDA graphs: the host launches no single kernels. Memory that the "
            "graphs hold is not counted."
        ),
    )
    dtensor: bool = Field(
        False,
        description=(
            "Tensor-parallel ranks hold DTensors (torch's parallelize_module, NeMo AutoModel), whose dispatch costs "
            "the host time in blocks that are neither compiled nor in CUDA graphs."
        ),
    )
    channels_last: bool = Field(
        False,
        description=(
            "Images and activations of convolutions are stored with channels as the fastest dimension (NHWC), as "
            "kernels for tensor cores need them. Else cuDNN transposes them before and after (NCHW, torch's "
            "default)."
        ),
    )
    loss: LossMode = Field(
        "whole",
        description=(
            "whole: logits of all tokens exist together. chunked: output projection and loss run chunk by chunk, "
            "as the framework does it, and only one chunk's logits exist. recomputed: backward recomputes the "
            "logits of each chunk; else forward computes all gradients. fused: one kernel replaces a chunk's "
            "logits by their gradients (Liger's fused linear cross-entropy)."
        ),
    )
    chunked_losses: dict[LossMode, ChunkedLoss] = Field(default_factory=dict)
    loading: LoadingOption = Field(
        "auto",
        description=(
            "Loading of the checkpoint before the first step. device_map: every rank loads the whole model onto its "
            "device. cpu: every rank loads it on the CPU first. broadcast: as cpu, and rank 0 broadcasts it tensor by "
            "tensor (accelerate's cpu_ram_efficient_loading). rank0: likewise, and other ranks load nothing (axolotl's "
            "FSDP2, with meta tensors). zero_init: DeepSpeed's zero.Init. shards: every rank reads its own shards "
            "(distributed checkpoints). none: random weights, as in pretraining. auto: as the framework does."
        ),
    )
    checkpoint: CheckpointLoading = CheckpointLoading()
    options: Annotated[tuple[SoftwareOption, ...], Field(strict=False)] = ()
    runtime: Literal["torch", "megatron", "xla"] = "torch"
    bucket_bytes: Count = MAX_COUNT
    first_bucket_bytes: Count = MAX_COUNT
    grad_overlap: bool = Field(True, description="Reduction of buckets overlaps backward.")
    gradient_as_bucket_view: bool = Field(
        False,
        description=(
            "Under DDP of runtime torch, gradients are views of its buckets (the argument of "
            "DistributedDataParallel). Else gradients and buckets both exist (torch's default)."
        ),
    )
    broadcast_buffers: bool = Field(
        False,
        description=(
            "Before the first forward of a step, DDP of runtime torch broadcasts the buffers of modules, such as "
            "running statistics of batch norms (torch's default; forward_sync_buffers from torch 2.13 on). Not in "
            "pipelines, whose forwards run under no_sync."
        ),
    )
    zero_grad_set_to_none: bool = Field(
        True,
        description=(
            "Gradients are freed after the update (torch's default), and exist from the first backward on, or under "
            "FSDP from the first reduction on. Those that DDP accumulates without a reduction are then outside of "
            "its buckets. Else gradients are zeroed in place, and count for the whole step. Of runtime torch."
        ),
    )
    flat_shards: bool = Field(
        False,
        description=(
            "FSDP1: each rank has a plain part of one flat tensor per unit, which optimizers of bitsandbytes can "
            "update; else parts of each parameter, as FSDP2 has. Gathers are those of FSDP2."
        ),
    )
    flat_parameters: bool = Field(
        False,
        description=(
            "FSDP1 with use_orig_params=True: all weights of a block are one flat tensor, as is all else, and frozen "
            "ones have gradients where others in it are trained. Gathers are those of FSDP2."
        ),
    )
    waits_for_gradients: Literal["backward", "step"] = "backward"
    waits_for_batch: bool = False
    reduces_each_microbatch: bool = False
    defers_reductions: bool = False
    per_rank_tensor_lists: bool = False
    live_elements: Count | None = None
    scatter_gather_p2p: bool = False
    prefetch_receive_schedules: Annotated[tuple[str, ...], Field(strict=False)] = ()
    ddp_in_pipelines: bool = False
    packed_attention: Literal["document_calls", "one_call"] | None = None
    context_bytes: dict[Literal["gpu", "tpu", "cpu", "other"], NonNegative] = Field(default_factory=dict)
    uniform_stages: Literal["always", "where_possible", "no"] = "no"
    zero_stages: Annotated[tuple[int, ...], Field(strict=False)] = (0, 1, 2, 3)
    shards_over_cp: bool = False
    zero2_whole_weights: bool = False
    sequence_parallelism: bool = True
    optimizer_shards: Literal["parameters", "elements"] = "parameters"
    overlap_param_gather: bool = Field(
        False,
        description=(
            "With optimizer_shards elements, the all-gather of updated parameters overlaps the next forward bucket by "
            "bucket, instead of running at the end of the step."
        ),
    )
    tp_overlap: TensorOverlap = Field(
        "none",
        description=(
            "Tensor-parallel collectives that overlap the matmuls next to them in a block: none; in backward, "
            "those before and after matrices split by columns; gathers, in both directions except sums; or all, "
            "in both directions."
        ),
    )
    expert_dispatch: ExpertDispatch = Field(
        "copies",
        description=(
            "Dispatch of tokens to experts: copies by eager torch modules, all_to_all with fused permutation, or the "
            "libraries deepep and hybridep, which send a token once to each rank."
        ),
    )
    expert_overlap: bool = Field(
        False,
        description=(
            "The expert all-to-all of a microbatch overlaps the compute of another microbatch, whose backward is "
            "next to its forward in the schedule (Megatron Core's overlap_moe_expert_parallel_comm)."
        ),
    )
    fused_experts: bool = Field(
        False, description="Activations of experts, and their casts to FP8, are fused into the matmuls before them."
    )
    fp8_activation_input: bool = Field(
        False,
        description="Forward saves what a gated MLP's activation reads in FP8 (activation_func_fp8_input_store).",
    )
    fp8_dot_product_attention: bool = Field(
        False, description="The attention core is in FP8 where linear layers are in FP8, MXFP8 or NVFP4."
    )
    grad_dtypes: Annotated[tuple[Literal["fp32", "bf16", "fp16"], ...], Field(strict=False)] = ()
    separate_grad_accumulator: bool = False
    flat_updates: bool = False
    recompute_modules: Annotated[tuple[RecomputeModule, ...], Field(strict=False)] = ()
    recompute_layers: bool = False
    mtp: bool = False
    vocab_multiple: Annotated[int, Field(ge=1, le=100_000)] = Field(
        1,
        description=(
            "Vocabularies are padded to a multiple of this times tp; 1 for no padding, where tp has to divide "
            "them. Padding rows are stored, computed and communicated like other rows. The model keeps its "
            "vocab_size. Its parameters and FLOPs (and so MFU) exclude padding, which Megatron's own "
            "num_floating_point_operations includes."
        ),
    )
    reserve_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    resharding_reserve_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    memory_spread: MemorySpread = MemorySpread()
    compiled_reserve_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    fp8_any_layout: bool = Field(default=False, exclude=True)
    trains_adapters: bool = Field(default=False, exclude=True)
    loss_sequences: Natural = Field(default=0, exclude=True)
    trainer: bool = False
    executable: bool = False
    trains_modules: bool = False
    trains_on_preferences: bool = False
    not_modelled: Annotated[tuple[str, ...], Field(strict=False)] = ()
    sources: dict[str, str] = Field(default_factory=dict)

    def loads(self, training: TrainingSpec) -> bool:
        """True if a training run begins with the weights of a checkpoint; pretraining only if ``loading`` says so."""
        return training.task != "pretrain" if self.loading == "auto" else self.loading != "none"

    @property
    def title(self) -> str:
        """Name of the profile, with the options that are set."""
        words: dict[SoftwareOption, str] = {
            "autocast": "" if self.autocast else "no autocast",
            "broadcast_buffers": "" if self.broadcast_buffers else "buffers not broadcast",
            "channels_last": "channels last" if self.channels_last else "",
            "compiled": "compiled" if self.compiled else "",
            "compiled_loss": "" if self.compiled_loss in (None, self.compiled) else _LOSSES[self.compiled_loss],
            "cuda_graphs": "CUDA graphs" if self.cuda_graphs else "",
            "dtensor": "DTensor" if self.dtensor else "",
            "expert_dispatch": self.expert_dispatch if self.expert_dispatch != "copies" else "",
            "expert_overlap": "expert all-to-all overlapped with another microbatch" if self.expert_overlap else "",
            "flat_parameters": "flat parameters" if self.flat_parameters else "",
            "flat_shards": "flat shards" if self.flat_shards else "",
            "fp8_activation_input": "FP8 inputs of activations" if self.fp8_activation_input else "",
            "fp8_dot_product_attention": "FP8 attention" if self.fp8_dot_product_attention else "",
            "fused_experts": "fused experts" if self.fused_experts else "",
            "grad_overlap": "gradient reduction overlapped with backward" if self.grad_overlap else "",
            "gradient_as_bucket_view": "gradients as bucket views" if self.gradient_as_bucket_view else "",
            "loading": "" if self.loading == "auto" else f"loading {self.loading}",
            "loss": "" if self.loss == "whole" else f"loss in {self.loss} chunks".replace("chunked chunks", "chunks"),
            "overlap_param_gather": "parameter all-gather overlapped with forward" if self.overlap_param_gather else "",
            "tp_overlap": "asynchronous tensor parallelism" if self.tp_overlap in ("gathers", "all") else "",
            "vocab_multiple": "",  # predictions tell it where it changes anything
            "zero_grad_set_to_none": "" if self.zero_grad_set_to_none else "gradients zeroed in place",
        }
        return ", ".join([self.id, *(words[option] for option in self.options if words[option])])

    @property
    def settings(self) -> dict[str, Any]:
        """The section ``software`` of a scenario: ``preset``, and the options with their values."""
        return {"preset": self.id, **{option: getattr(self, option) for option in self.options}}

    @property
    def preallocated_receives(self) -> bool:
        """True if a pipeline rank has one receive buffer per microbatch and direction."""
        return self.runtime == "torch"

    @property
    def ddp_copies_gradients(self) -> bool:
        """True if DDP copies gradients into its buckets and back, and so both exist."""
        return self.runtime == "torch" and not self.gradient_as_bucket_view

    @property
    def drops_gradients(self) -> bool:
        """True if gradients exist only from the first backward of a step to its update."""
        return self.runtime == "torch" and self.zero_grad_set_to_none

    @property
    def blocking_p2p_schedules(self) -> tuple[str, ...]:
        """Schedules in which a pipeline rank computes nothing while it sends or receives.

        The rank posts a receive when it needs the tensor, and continues when all transfers are complete.
        """
        return ("naive", "gpipe", "1f1b") if self.runtime == "megatron" else ()

    @property
    def traffic(self) -> float:
        """Bytes of memory-bound kernels relative to eager torch (``FrameworkRates``)."""
        return self.rates.compiled_traffic if self.compiled else self.rates.traffic

    @property
    def rates_profile(self) -> str:
        """Profile whose published runs ``rates`` are fitted on."""
        return self.rates_of or self.id

    @property
    def timed_traffic(self) -> float:
        """``traffic`` relative to kernels of eager torch that a calibration timed.

        These are the kernels of an ``executable`` profile itself. Their fitted efficiency does not apply to them.
        """
        if not self.executable:
            return self.traffic
        return _COMPILED_PASSES if self.compiled else 1.0

    def allocator_reserve(self, *, reshards: bool) -> float:
        """Memory that the allocator reserves beyond transient memory, as a fraction of it.

        Args:
            reshards: See ``ParallelPlan.reshards``.
        """
        compiled = self.compiled_reserve_fraction if self.compiled else None
        resharding = self.resharding_reserve_fraction if reshards else None
        return next(share for share in (resharding, compiled, self.reserve_fraction) if share is not None)

    def layers_of(
        self, model: ModelSpec, plan: ParallelPlan, training: TrainingSpec | None = None
    ) -> tuple[LayerSpec, ...]:
        """Layers of a model, as one rank holds and computes them.

        Args:
            training: Training run, which says the form of frozen weights; None for weights of the usual width.
        """
        base = None
        if training is not None and self._has_frozen_base(training):
            base = self.state(training, plan).base
        is_flat = self.flat_parameters and plan.shards_parameters
        layers = _implemented_layers(self.padded(model, plan), plan.shard, self._implementation, base, is_flat)
        simulates = training is not None and training.fake_quantization is not None
        simulated = self.state(training, plan).simulated if training is not None and simulates else None
        return layers if simulated is None else _simulated_layers(layers, simulated)

    @cached_property
    def _implementation(self) -> LayerImplementation:
        """``layers``, with the options that decide on kernels."""
        return self.layers.model_copy(
            update={
                "compiled": self.compiled and self.runtime == "torch",
                "compiled_in_parts": self.executable,
                "loss": (self.compiles_loss and self.layers.compiled_loss) or self.layers.loss,
                "fused_softmax": self.compiled or self.layers.fused_softmax,
                "documents_in_one_call": self.packed_attention == "one_call",
                "expert_dispatch": self.expert_dispatch,
                "fused_experts": self.fused_experts,
                "eight_bit_gate_inputs": self.fp8_activation_input and self.layers.fused_gates,
                "eight_bit_attention": self.fp8_dot_product_attention,
                "chunked_loss": self.chunked_loss,
            }
        )

    @property
    def compiles_loss(self) -> bool:
        """True if the framework's loss is compiled in this run; False for one that is never, or always."""
        chosen = self.compiled if self.compiled_loss is None else self.compiled_loss
        return chosen and self.layers.compiled_loss is not None

    @property
    def chunked_loss(self) -> ChunkedLoss | None:
        """Chunks of the loss; None for all tokens at once.

        A fused loss on preferences computes the gradients of one sample after the other in forward, without a kernel of
        its own (Liger-Kernel, chunked_loss/fused_linear_preference.py and fused_linear_unpaired_preference.py,
        ``chunk_size = 1``).
        """
        if self.loss != "fused" or not self.loss_sequences:
            return self.chunked_losses.get(self.loss)
        found = self.chunked_losses.get("fused")
        return None if found is None else ChunkedLoss(sequences=self.loss_sequences, recomputed=found.recomputed)

    def padded(self, model: ModelSpec, plan: ParallelPlan) -> ModelSpec:
        """The model with the vocabulary that the framework uses under a plan, perhaps a larger one."""
        return model if self.vocab_multiple == 1 else model.padded(self.vocab_multiple * plan.tp)

    def equal_stage_layers(self, num_blocks: int, num_stages: int) -> tuple[int, ...] | None:
        """Equal numbers of blocks per stage, if the framework uses them; None for the balanced split."""
        if self.uniform_stages == "no" or num_blocks % num_stages:
            return None
        return (num_blocks // num_stages,) * num_stages

    def tensor_overlap(self, state: StateBytes) -> TensorOverlap:
        """Tensor-parallel collectives that overlap matmuls, with the linear layers of a training run."""
        low = None if state.linear is None else self.low_precision.get(state.linear.precision)
        return (None if low is None else low.tp_overlap) or self.tp_overlap

    def splits_gemms(self, state: StateBytes) -> bool:
        """True if tensor-parallel collectives overlap chunks of the matmuls that need or make their tensors."""
        return self.tensor_overlap(state) in ("gathers", "all")

    def of_adapters(self, training: TrainingSpec) -> bool:
        """True if a training run trains adapters of frozen weights."""
        return training.task == "lora" or self.trains_adapters

    def states(self, training: TrainingSpec, plan: ParallelPlan) -> Mapping[_Wide, StateBytes]:
        """Bytes per element by precision that the framework supports for a training run under a plan."""
        if self.of_adapters(training):
            return self.sharded_lora_state_bytes if plan.shards_parameters else self.lora_state_bytes
        return self.sharded_state_bytes if plan.shards_parameters else self.state_bytes

    def state(self, training: TrainingSpec, plan: ParallelPlan) -> StateBytes:
        """Bytes per element of one training run under one plan."""
        kinds = self.states(training, plan)
        low = self.low_precision.get(training.precision)  # type: ignore[arg-type]
        wide = "pure_bf16" if training.pure_bf16 else "bf16" if low is not None else training.precision
        state = self._with_gradients(kinds[wide], plan)  # type: ignore[index]
        if (types := training.optimizer_dtypes) is not None:
            moments = _STATE_BYTES[types.exp_avg], _STATE_BYTES[types.exp_avg_sq]
            # FP32 copies of BF16 weights are those weights and 16 bits more
            state = state.model_copy(update={"moments": moments, "master": min(state.master, 2)})
        if OPTIMIZERS[training.optimizer].updates_copies:
            state = state.model_copy(update={"master": 4, "moment": 4})
        if training.optimizer_rank is not None:
            state = state.model_copy(update={"rank": training.optimizer_rank})
        if self.holds_whole_weights(plan):
            whole = self.lora_state_bytes if self.of_adapters(training) else self.state_bytes
            state = state.model_copy(update={"flattened": whole[wide].flattened})  # type: ignore[index]
        if self._has_frozen_base(training):
            state = self._with_frozen_base(state, training, plan)
        if (fake := training.fake_quantization) is not None:
            width = int(state.gathered if plan.shards_parameters else state.parameter)
            made = SimulatedLinears(fake, width, int(state.activation), plan.microbatch_size)
            state = state.model_copy(update={"simulated": made})
        if low is None:
            return state
        weights = "microbatch" if plan.shards_parameters and low.weights == "step" else low.weights
        form = linear_format(
            training.precision,  # type: ignore[arg-type]
            training.fp8_recipe,
            low.kept,
            weights,
            experts=low.experts,
            eager=low.eager and not self.compiled,
            any_layout=self.fp8_any_layout,
            keeps_columns=low.keeps_columns,
        )
        return state.model_copy(update={"linear": form})

    def _has_frozen_base(self, training: TrainingSpec) -> bool:
        """True if frozen weights, or adapters, are not as ``StateBytes`` says."""
        return (
            training.base_weights is not None
            or not self.autocast
            or (self.peft_adapters and self.of_adapters(training))
        )

    def _with_frozen_base(self, state: StateBytes, training: TrainingSpec, plan: ParallelPlan) -> StateBytes:
        """Widths with frozen weights in few bits, or without autocast."""
        base, narrow = training.base_weights, state.activation
        upcasts = base is not None and (
            base.upcast
            if base.upcast is not None
            else self.upcast_frozen and base.is_of_bitsandbytes and not plan.shards_parameters
        )
        # an embedding or a norm in FP32 makes FP32 hidden states, which linear layers hand on
        frozen, wide = (4, 4) if upcasts else (state.frozen, narrow)
        adapter_bytes = narrow if self.autocast else state.parameter
        weights = None if base is None else base.stored(narrow, compiled=self.compiled)
        if weights is not None and self.casts_unpacked:
            weights = replace(weights, name=f"{weights.name}-cast", casts_unpacked=True)
        if weights is not None and self.unpacks_into_buffer:
            weights = replace(weights, name=f"{weights.name}-buffer", has_buffer=True)
        peft = self.peft_adapters and self.of_adapters(training)
        adapters = state.gathered if plan.shards_parameters else state.parameter
        found = FrozenBase(
            widens=peft and self.autocast and adapters > wide,
            leaves_casts=base is not None and (base.is_of_bitsandbytes or base.format == "awq_int4"),
            weights=weights,
            head=self.quantizes_head,
            holds_graph=self.holds_graph,
            experts=None if base is None else base.stored_experts(narrow),
            activation_bytes=wide,
            compute_bytes=narrow,
            adapter_bytes=adapter_bytes,
            attention_bytes=narrow if self.autocast else wide,
            autocast=self.autocast,
            peft=peft,
        )
        widths = {"frozen": frozen, "activation": wide, "residual": max(wide, state.residual), "boundary": wide}
        apart = {} if self.autocast else {"weight_copy": 0, "matmul_gradient": state.parameter}
        return state.model_copy(update={"base": found, **widths, **apart})

    def with_whole_tensors(self, training: TrainingSpec) -> SoftwareSpec:
        """The profile with an optimizer that needs whole matrices, which ranks then own instead of flat parts.

        Megatron Core has another distributed optimizer for it (``core/optimizer/layer_wise_optimizer.py``): gradients
        are all-reduced, ranks own tensors by size, and updated parameters are all-gathered.
        """
        if self.optimizer_shards == "parameters" or not OPTIMIZERS[training.optimizer].orthogonalizes:
            return self
        return self.model_copy(update={"optimizer_shards": "parameters", "overlap_param_gather": False})

    def holds_whole_weights(self, plan: ParallelPlan) -> bool:
        """True for a plan that shards gradients, and of which ranks hold whole weights in the optimizer step."""
        return self.zero2_whole_weights and plan.shards_parameters and plan.zero_stage == 2

    def gathers_quantized(self, state: StateBytes) -> bool:
        """True if tensor-parallel ranks all-gather quantized operands of the linear layers of blocks."""
        linear = state.linear
        low = None if linear is None else self.low_precision.get(linear.precision)
        return low is not None and linear is not None and linear.recipe in low.gathers

    def _with_gradients(self, state: StateBytes, plan: ParallelPlan) -> StateBytes:
        """Widths with gradients reduced, and if unsharded also accumulated, in the precision that the plan requests."""
        if plan.expert_shards > 1:
            state = state.model_copy(update={"gathers_experts": True})
        if self.flat_parameters and plan.shards_parameters:
            state = state.model_copy(update={"is_flat": True})
        if plan.grad_dtype is None:
            return state
        width = 4 if plan.grad_dtype == "fp32" else 2
        if plan.shards_parameters:
            return state.model_copy(update={"reduced": width})
        apart = state.gradient if self.separate_grad_accumulator and width > state.gradient else 0
        return state.model_copy(update={"gradient": width, "reduced": apart or width, "unaccumulated": apart})


@lru_cache(maxsize=256)
def _implemented_layers(
    model: ModelSpec, shard: Shard, implementation: LayerImplementation, base: FrozenBase | None, is_flat: bool
) -> tuple[LayerSpec, ...]:
    """Cached layers under an implementation: plans of a search share most of them."""
    if base is not None:
        layers = _implemented_layers(model, shard, implementation, None, is_flat)
        made = {layer: with_frozen_base(layer, base) for layer in {*layers}}
        return tuple(made[layer] for layer in layers)
    layers = model.layers_of(shard, is_flat=is_flat)
    if model.captured is not None:
        return compiled_blocks(layers, model.captured.computed_in) if implementation.compiled else layers
    return implemented_layers(layers, implementation, model.family)


@lru_cache(maxsize=256)
def _simulated_layers(layers: tuple[LayerSpec, ...], simulated: SimulatedLinears) -> tuple[LayerSpec, ...]:
    """Cached layers that simulate quantization."""
    made = {layer: with_fake_quantization(layer, simulated) for layer in {*layers}}
    return tuple(made[layer] for layer in layers)
