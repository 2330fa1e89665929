"""Passes of preference training in forward alone: the reference model, and mismatched completions of KTO.

Nothing is saved in them, and nothing is recomputed. TRL runs the reference after the forward that is trained, whose
saved tensors are there meanwhile, and completions of other prompts before it (huggingface/trl at f2cd577,
trl/trainer/dpo_trainer.py and kto_trainer.py, ``_compute_loss``). Under FSDP and ZeRO-3 a pass all-gathers the weights
again. A second model is another tree of FSDP units, all of which are resharded after their forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simplan.job import Job


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A forward of a microbatch without gradients.

    Attributes:
        name: Name of the pass, in those of its operations.
        job: The job with the model of the pass, in which all weights are frozen unless it is the one that is trained.
        comes_first: The pass comes before the forward that is trained.
        is_apart: The weights are those of a second model.
        is_sharded: The second model is sharded over the ranks that shard parameters.
        stored_bytes: Bytes per weight of a second model; None for those of frozen weights of the framework.
    """

    name: str
    job: Job
    comes_first: bool = False
    is_apart: bool = False
    is_sharded: bool = False
    stored_bytes: int | None = None


def forward_passes(job: Job) -> tuple[ForwardPass, ...]:
    """Passes of one microbatch in forward alone, in their order."""
    reference, preference = job.reference, job.training.preference
    is_apart = reference == "second_model"
    shards = job.plan.shards_parameters and not job.software.holds_whole_weights(job.plan)
    wanted = None if preference is None else preference.reference_sharded
    return tuple(
        ForwardPass(name, _passing(job), comes_first=True)
        if name == "mismatched"
        else ForwardPass(
            name,
            _passing(_frozen(job, has_base=not is_apart)),
            comes_first=job.training.task == "asft",  # LLaMA-Factory, train/sft/trainer.py, compute_loss
            is_apart=is_apart,
            is_sharded=is_apart and shards and wanted is not False,
            stored_bytes=preference.reference_bytes if is_apart and preference is not None else None,
        )
        for name in job.training.passes(reference)
    )


def _passing(job: Job) -> Job:
    """The job of a pass: no recomputation, and a loss in chunks without their gradients."""
    plan = job.plan.model_copy(
        update={"recompute": "none", "recompute_layers": None, "recompute_modules": None, "offload_activations": False}
    )
    chunked = job.software.chunked_loss
    software = job.software
    if chunked is not None and not chunked.recomputed:
        forward = chunked.model_copy(update={"recomputed": True, "fused": False})
        software = software.model_copy(update={"chunked_losses": software.chunked_losses | {software.loss: forward}})
    return replace(job, plan=plan, software=software)


def _frozen(job: Job, *, has_base: bool) -> Job:
    """The job with a model without adapters, all of whose weights are frozen."""
    training = job.training if has_base else job.training.model_copy(update={"base_weights": None})
    return replace(job, model=job.model.without_training, training=training)
