"""What the training framework brings: state precision, buckets, buffers and hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from simplan.spec.base import Count, NonNegative, Spec
from simplan.spec.low_precision import Fp8Recipe, Kept, LinearFormat, LowPrecision, linear_format
from simplan.spec.plan import ParallelPlan
from simplan.spec.training import TrainingSpec
from simplan.units import DTYPE_BYTES

__all__ = ["LowPrecisionLinears", "SoftwareSpec", "StateBytes"]


class LowPrecisionLinears(Spec):
    """Linear layers in one low precision, as the framework has them.

    Attributes:
        kept: What they keep of their operands for backward.
        recipes: Of fp8, those that it has.
    """

    kept: Kept
    recipes: Annotated[tuple[Fp8Recipe, ...], Field(strict=False)] = ()  # files have lists


class StateBytes(Spec):
    """Bytes per parameter and per element, as the framework keeps them in memory during training.

    Attributes:
        parameter: The weights between steps.
        frozen: Those of them that are not trained.
        gradient: The accumulated gradient.
        master: A separate fp32 copy of the weights, when there is one.
        activation: Bytes of one activation element that the backward pass keeps.
        residual: The same for the residual stream.
        boundary: Bytes of one element sent between stages.
        gathered: Weights that FSDP has gathered for computing.
        accumulated: Whole gradients that FSDP adds up before it reduces them.
        reduced: Gradients while FSDP reduces them.
        weight_copy: A copy of the matrices in the precision of the activations that forward makes and keeps for
            backward, for every microbatch; 0 for none.
        linear: How the linear layers of blocks are quantized, where they are; of one training, not of a catalogue.
    """

    parameter: Count
    frozen: Count
    gradient: Count
    master: NonNegative = 0
    activation: Count
    residual: Count
    boundary: Count
    gathered: Count
    accumulated: Count
    reduced: Count
    weight_copy: Annotated[int, Field(ge=0)] = 0
    linear: LinearFormat | None = Field(default=None, exclude=True)

    if TYPE_CHECKING:  # fields without a default may be left out

        def __init__(self, **fields: Any) -> None: ...

    def optimizer_bytes(self, optimizer: str) -> int:
        """Bytes of optimizer states for one parameter: two fp32 moments (Adam) or none, and the master copy."""
        return (8 if optimizer in ("adam", "adamw") else 0) + int(self.master)

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, data: Any) -> Any:
        """Unless said otherwise residuals are as wide as activations, weights and gradients are as wide everywhere."""
        if not isinstance(data, dict):
            return data
        same = {
            "frozen": "parameter",
            "residual": "activation",
            "gathered": "parameter",
            "accumulated": "gradient",
            "reduced": "gradient",
        }
        return {key: data[source] for key, source in same.items() if source in data} | data


class SoftwareSpec(Spec):
    """A software profile: everything about a framework that moves time or memory.

    Attributes:
        id: Catalogue name.
        state_bytes: By training precision, where parameters are whole; a precision that is missing is not supported.
        sharded_state_bytes: The same where FSDP shards them.
        lora_state_bytes, sharded_lora_state_bytes: The same where adapters are trained and all other weights frozen.
        low_precision: Which precisions below 16 bits its linear layers have; all else is then as for bf16.
        bucket_bytes: Size at which DDP closes a gradient bucket.
        first_bucket_bytes: Size of the first bucket, smaller so that the reduction starts early.
        grad_overlap: Buckets are reduced while the backward pass still runs.
        gradient_as_bucket_view: Gradients live inside the buckets, so buckets cost no extra memory.
        keep_last_gathered: Without a pipeline, FSDP does not reshard the last unit after forward, since backward begins
            with it.
        backward_prefetch: Units that FSDP gathers ahead in backward.
        blocking_sends: A pipeline rank waits for each of its sends before it goes on; else at the end of the step.
        first_stage_splits: Where a backward is in two parts, the first stage, which has no gradient to hand on, does it
            in two parts as well; else W does all of it.
        ddp_splits: DDP reduces the gradients of a backward in two parts.
        ddp_stages: DDP works with several stages on a rank.
        preallocated_receives: The pipeline runtime keeps one receive buffer per microbatch and direction.
        packed_attention: How documents that share a sequence attend: one call of the kernel for each; None where that
            is not modelled.
        context_bytes: Device memory of the driver context and the communication library, by device kind.
        sources: Field name -> where its value comes from.
    """

    id: str
    state_bytes: dict[Literal["fp32", "tf32", "fp16", "bf16"], StateBytes]
    sharded_state_bytes: dict[Literal["fp32", "tf32", "fp16", "bf16"], StateBytes] = Field(default_factory=dict)
    lora_state_bytes: dict[Literal["fp32", "tf32", "fp16", "bf16"], StateBytes] = Field(default_factory=dict)
    sharded_lora_state_bytes: dict[Literal["fp32", "tf32", "fp16", "bf16"], StateBytes] = Field(default_factory=dict)
    low_precision: dict[LowPrecision, LowPrecisionLinears] = Field(default_factory=dict)
    bucket_bytes: Count
    first_bucket_bytes: Count
    grad_overlap: bool = True
    gradient_as_bucket_view: bool = True
    keep_last_gathered: bool = True
    backward_prefetch: Count = 1
    blocking_sends: bool = False
    first_stage_splits: bool = False
    ddp_splits: bool = False
    ddp_stages: bool = False
    preallocated_receives: bool = True
    packed_attention: Literal["document_calls"] | None = None
    context_bytes: dict[Literal["gpu", "tpu", "cpu", "other"], NonNegative] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)

    def state(self, training: TrainingSpec, plan: ParallelPlan) -> StateBytes:
        """Element widths of one training under one plan."""
        kinds = self.sharded_state_bytes if plan.shards_parameters else self.state_bytes
        if training.task == "lora":
            kinds = self.sharded_lora_state_bytes if plan.shards_parameters else self.lora_state_bytes
        changes: dict[str, Any] = {}
        if plan.grad_dtype is not None:  # FSDP keeps its shards of gradients as wide as those of weights
            names = ("accumulated", "reduced") if plan.shards_parameters else ("gradient", "accumulated", "reduced")
            changes |= dict.fromkeys(names, DTYPE_BYTES[plan.grad_dtype])
        low = self.low_precision.get(training.precision)  # type: ignore[arg-type]
        if low is not None:
            form = linear_format(training.precision, training.fp8_recipe, low.kept)  # type: ignore[arg-type]
            changes["linear"] = form
        state = kinds[training.precision if low is None else "bf16"]  # type: ignore[index]
        return state.model_copy(update=changes) if changes else state
