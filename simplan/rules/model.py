"""Rules between the fields of a model, from its sizes to its experts; limits of transformers' code and of captures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simplan import catalog
from simplan.errors import Problem
from simplan.job import Job, computed_in
from simplan.model.captured.compiled import MAX_FUSED, longest_run
from simplan.model.families import FAMILIES
from simplan.model.layer import MAX_BOUNDARY_TENSORS
from simplan.model.model import ModelSpec
from simplan.plan.schedules import splits_backward
from simplan.rules.rule import nearest_multiples, not_modelled, problem_of, rule, undivided, unmodelled
from simplan.wording import either


@rule("num_key_value_heads must divide num_attention_heads")
def kv_heads_divide_heads(job: Job) -> Iterator[Problem]:
    heads, kv_heads = job.model.num_attention_heads, job.model.num_key_value_heads
    if kv_heads and heads % kv_heads:
        yield from undivided(job, "model.num_key_value_heads", "num_attention_heads", heads)


@rule("heads with rotary positions must have an even width")
def rotary_width_even(job: Job) -> Iterator[Problem]:
    rotated = FAMILIES[job.model.family].rotary
    width, part = getattr(job.model, rotated) if rotated else 0, job.model.partial_rotary_factor
    if part < 1 and part * width % 2:
        sentence = f"must be an even part of model.head_dim = {width}: rotary positions turn pairs"
        near = [f"{2 * pairs / width:g}" for pairs in (part * width // 2, part * width // 2 + 1) if pairs]
        yield problem_of(job, "model.partial_rotary_factor", sentence, f"use {either(near)}")
    elif part == 1 and width % 2:
        sentence = "must be even: rotary positions turn pairs"
        yield problem_of(job, f"model.{rotated}", sentence, f"use {either([d for d in (width - 1, width + 1) if d])}")


@rule("packs says where documents were drawn from, and needs document_lengths")
def packs_need_documents(job: Job) -> Iterator[Problem]:
    if not job.model.document_lengths and job.model.packs is not None:
        sentence = "says where documents were drawn from, and there is no document_lengths"
        yield Problem(field="model.packs", rule=sentence, fix="remove it")


@rule("documents must fit into the sequence, and into the positions of the model")
def documents_fit(job: Job) -> Iterator[Problem]:
    model = job.model
    lengths = model.document_lengths
    if not lengths:
        return
    total, most = sum(lengths), model.max_position_embeddings
    if total > model.seq_len:
        sentence = f"has {total} tokens, and a sequence has seq_len = {model.seq_len}"
        yield _of_documents(job, sentence, f"use shorter documents, or model.seq_len = {total}")
    elif FAMILIES[model.family].position_rows and max(model.segments) > most:
        what = "a document" if max(lengths) > most else "the padding"
        sentence = f"{what} has {max(model.segments)} tokens, and max_position_embeddings = {most}"
        yield _of_documents(job, sentence, f"set model.max_position_embeddings to {max(model.segments)}")


@rule("a document needs two tokens, of which one can be predicted from the other")
def documents_of_two_tokens(job: Job) -> Iterator[Problem]:
    lengths = job.model.document_lengths
    if lengths and max(lengths) == 1:
        sentence = "has no document of two tokens, of which one could be predicted from the other"
        yield _of_documents(job, sentence, "use longer documents")


@rule("seq_len must be at most max_position_embeddings")
def positions_for_sequence(job: Job) -> Iterator[Problem]:
    model, most = job.model, job.model.max_position_embeddings
    if FAMILIES[model.family].position_rows and not model.document_lengths and model.seq_len > most:
        fix = f"use {most}, or set max_position_embeddings to {model.seq_len} as well"
        yield problem_of(job, "model.seq_len", f"must be at most max_position_embeddings = {most}", fix)


@rule("sliding_window_pattern says which blocks have a window, and needs sliding_window")
def window_pattern_needs_window(job: Job) -> Iterator[Problem]:
    if job.model.sliding_window_pattern and job.model.sliding_window is None:
        sentence = "says which blocks have a window, and there is no sliding_window"
        yield problem_of(job, "model.sliding_window_pattern", sentence, "give sliding_window, or remove it")


@rule("relative_attention_buckets must be a multiple of 4")
def relative_buckets(job: Job) -> Iterator[Problem]:
    buckets = job.model.relative_attention_buckets
    if buckets % 4:
        sentence = "must be a multiple of 4: each direction has half of them, of which half are for one distance each"
        yield problem_of(
            job, "model.relative_attention_buckets", sentence, f"use {either(nearest_multiples(buckets, 4))}"
        )


@rule("a ResNet needs blocks in one stage or more")
def resnet_needs_depths(job: Job) -> Iterator[Problem]:
    if job.model.family == "resnet" and not job.model.depths:
        sentence = "must name the blocks of one stage or more"
        yield problem_of(job, "model.depths", sentence, "use [3, 4, 6, 3] for ResNet-50")


@rule("patches must divide an image, and a sequence is its patches and the class token")
def patches_of_image(job: Job) -> Iterator[Problem]:
    model = job.model
    image, patch = model.image_size, model.patch_size
    if not patch:
        return
    yield from undivided(job, "model.patch_size", "image_size", image)
    patches = (image // patch) ** 2
    if image % patch == 0 and model.seq_len != patches + 1:
        sentence = f"must be the {patches} patches of an image and the class token"
        yield problem_of(job, "model.seq_len", sentence, f"use {patches + 1}, or remove it")


@rule("a token can use at most all experts")
def top_k_within_experts(job: Job) -> Iterator[Problem]:
    experts = job.model.num_experts
    if experts and job.model.top_k > experts:
        yield problem_of(job, "model.top_k", f"must be at most num_experts = {experts}", f"use {experts}")


@rule("num_dense_layers must be at most num_hidden_layers")
def dense_layers_within_layers(job: Job) -> Iterator[Problem]:
    dense, blocks = job.model.num_dense_layers, job.model.num_hidden_layers
    if job.model.num_experts and dense > blocks:
        sentence = f"must be at most num_hidden_layers = {blocks}"
        yield problem_of(job, "model.num_dense_layers", sentence, f"use {blocks}")


@rule("shared_expert_gate weighs a shared expert, and needs one")
def gate_needs_shared_expert(job: Job) -> Iterator[Problem]:
    model = job.model
    if model.num_experts and model.shared_expert_gate and not model.shared_expert_intermediate_size:
        sentence = "weighs a shared expert, and shared_expert_intermediate_size = 0"
        yield problem_of(
            job, "model.shared_expert_gate", sentence, "remove it, or give shared_expert_intermediate_size"
        )


@rule("experts that drop no tokens need capacity for the fullest expert")
def capacity_for_tokens(job: Job) -> Iterator[Problem]:
    model, needed = job.model, job.model.expert_imbalance
    if model.num_experts and model.capacity_factor < needed and not model.drop_tokens:
        balanced, fullest = "even balanced experts need", f"the fullest expert needs with expert_imbalance = {needed:g}"
        why = balanced if needed == 1 else fullest
        sentence = f"is less than the {needed:g} that {why}"
        yield problem_of(job, "model.capacity_factor", sentence, f"use {needed:g} or more, or model.drop_tokens = true")


@unmodelled("training of packed documents with this software is not modeled")
def documents_modelled(job: Job) -> Iterator[Problem]:
    if job.model.document_lengths and job.software.packed_attention is None:
        what = f"attention of several documents in a sequence with {job.software.id}"
        yield _of_documents(job, f"{what} is not modeled yet", "remove it")


@unmodelled("multi-token prediction with this software is not modeled")
def mtp_modelled(job: Job) -> Iterator[Problem]:
    if job.model.mtp_num_layers and not job.software.mtp:
        what = f"multi-token prediction with {job.software.id}"
        yield not_modelled(job, "model.mtp_num_layers", what, "use 0, or software: megatron-core")


@unmodelled("logits of some tokens on several tensor- or context-parallel ranks are not modeled", reads="tp cp")
def max_predictions_unsplit(job: Job) -> Iterator[Problem]:
    rows, plan = job.model.max_predictions_per_seq, job.plan
    if rows and max(plan.tp, plan.cp) > 1:
        what = "logits of some tokens on several tensor- or context-parallel ranks"
        yield not_modelled(job, "model.max_predictions_per_seq", what, "use 0, or tp: 1 and cp: 1")


def _of_documents(job: Job, sentence: str, fix: str) -> Problem:
    lengths = job.model.document_lengths
    shown = f"[{lengths[0]}, {lengths[1]}, ..., {lengths[-1]}]" if len(lengths) > 6 else None
    return problem_of(job, "model.document_lengths", sentence, fix, value=shown)


_FAMILIES = ("gpt", "llama", "moe")
_LITGPT_FAMILIES = ("llama", "neox")
_MODELLED: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None,),
    "attention_sinks": (False,),
    "mtp_num_layers": (0,),
    "num_dense_layers": (0,),
    "shared_expert_intermediate_size": (0,),
    "router_bias": (False,),
    "expert_bias": (False,),
    "drop_tokens": (False,),
    "capacity_factor": (1.0,),
    "qk_norm": (None, "head"),
}
"""Supported values of ``ModelSpec`` fields; the first value is the fix."""
_EXPERTS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "qkv_bias": (False,)}
"""Further limits of Mixtral and of Qwen3 with experts."""
_RECOMPUTES = ("none", "full", "selective_layer")
_FIX = "use software torch"


def _unlike_transformers(model: ModelSpec) -> Iterator[tuple[str, Any]]:
    """Yield fields whose values transformers' code does not have, with the nearest value that it has."""
    for field, values in (_MODELLED | (_EXPERTS if model.family == "moe" else {})).items():
        value = getattr(model, field)
        # a window longer than a sequence makes no mask, and one as long does (transformers, masking_utils.py,
        # _ignore_causal_mask_sdpa), except of FlashAttention 2 (modeling_flash_attention_utils.py)
        if value not in values and not (field == "sliding_window" and value > model.seq_len):
            yield field, values[0]


def has_transformers_code(model: ModelSpec) -> bool:
    """True if the code that transformers has for a model is modeled."""
    heads, width = model.num_attention_heads, model.num_attention_heads * model.head_dim
    return (
        model.family in _FAMILIES
        and not any(_unlike_transformers(model))
        and not (model.qkv_bias and (model.attention_bias or model.qk_norm))
        and not (model.family == "gpt" and (width != model.hidden_size or model.num_key_value_heads != heads))
    )


def _is_transformers(job: Job) -> bool:
    return job.software.layers.model_code == "transformers"


_CODES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "litgpt": ("LitGPT's", _LITGPT_FAMILIES),
    "torchtune": ("torchtune's", ("llama",)),
    "unsloth": ("Unsloth's", ("llama",)),
}
"""Code of a model's modules -> whose it is, and families of which it is modeled."""


@unmodelled(
    "of LitGPT's models those of Llama's kind and GPT-NeoX are modeled, of torchtune's and Unsloth's those of Llama's "
    "kind, under data parallelism",
    reads="tp cp pp",
)
def models_of_code(job: Job) -> Iterator[Problem]:
    model, plan, code = job.model, job.plan, job.software.layers.model_code
    if code not in _CODES:
        return
    whose, families = _CODES[code]
    if model.family not in families:
        what = f"{whose} code for this family"
        yield not_modelled(job, "model.family", what, f"use {', '.join(families)}, or software torch")
    if model.qk_norm is not None and (code == "litgpt" or model.qk_norm == "projection"):
        yield not_modelled(job, "model.qk_norm", f"this with {whose} code", "use software torch")
    if code == "unsloth" and not job.software.of_adapters(job.training):
        what = "Unsloth's training of all weights, which runs transformers' modules"
        yield not_modelled(job, "training.task", what, "use lora, or software torch")
    base = job.training.base_weights
    if code == "unsloth" and base is not None and base.format not in ("nf4", "fp4"):
        fix = "use format: nf4, or software torch"
        yield not_modelled(job, "training.base_weights.format", f"{base.format} with Unsloth's kernels", fix)
    for axis in ("tp", "cp", "pp"):
        if getattr(plan, axis) > 1:
            yield not_modelled(job, f"plan.{axis}", f"this with {whose} code", "use 1, or software torch")


@unmodelled("of transformers' models GPT-2, Llama, Qwen2, Qwen3, Mixtral and Qwen3's experts are modeled")
def transformers_model(job: Job) -> Iterator[Problem]:
    model = job.model
    if not _is_transformers(job) or model.captured is not None:
        return
    if model.family not in _FAMILIES:
        what = "transformers' code for this family"
        yield not_modelled(job, "model.family", what, f"use {', '.join(_FAMILIES)}, or software torch")
        return
    for field, nearest in _unlike_transformers(model):
        fix = "remove it" if nearest in (None, False) else f"use {nearest:g}"
        if field == "sliding_window" and model.sliding_window == model.seq_len:
            fix = "remove it if attention is FlashAttention 2, which ignores it then"
        yield not_modelled(job, f"model.{field}", "this with transformers' code", f"{fix}, or {_FIX}")
    if model.qkv_bias and (model.attention_bias or model.qk_norm):
        what = "transformers' Qwen2 with other biases or norms"
        yield not_modelled(job, "model.qkv_bias", what, f"remove it, or {_FIX}")
    heads, width = model.num_attention_heads, model.num_attention_heads * model.head_dim
    if model.family == "gpt" and (width != model.hidden_size or model.num_key_value_heads != heads):
        sentence = "must make up the hidden size in transformers' GPT-2, with as many heads of keys"
        yield problem_of(
            job, "model.num_attention_heads", sentence, f"leave out head_dim and num_key_value_heads, or {_FIX}"
        )


@unmodelled(
    "of transformers' models, the matrices of dense Llamas are split over tensor-parallel ranks",
    reads="tp cp ep shards_parameters",
)
def transformers_splits(job: Job) -> Iterator[Problem]:
    """ColwiseParallel of torch splits nn.Linear, not GPT-2's Conv1D and not grouped experts."""
    if not _is_transformers(job) or job.model.captured is not None:
        return
    plan, model = job.plan, job.model
    for field, what in (("cp", "context"), ("ep", "expert")):
        degree = getattr(plan, field)
        if degree > 1:
            what = f"{what} parallelism of transformers' code"
            yield not_modelled(job, f"plan.{field}", what, f"use 1, or {_FIX}")
    if plan.tp == 1:
        return
    if model.family != "llama":
        name = "GPT-2, whose matrices are no nn.Linear," if model.family == "gpt" else "Mixtral"
        what = f"tensor parallelism of transformers' {name}"
        yield not_modelled(job, "plan.tp", what, f"use 1, or {_FIX}")
    elif job.training.precision in ("bf16", "fp16") and not plan.shards_parameters:
        what = "tensor parallelism of transformers' code under autocast, where every matrix casts what is gathered,"
        yield not_modelled(job, "plan.tp", what, f"use FSDP (dp_shard), or precision fp32, or {_FIX}")


@unmodelled(
    "of transformers' models, whole blocks are recomputed, and nothing is moved to the host",
    reads="recompute offload_activations",
)
def transformers_recompute(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if not _is_transformers(job):
        return
    if plan.recompute not in _RECOMPUTES:
        what = "recomputing parts of transformers' blocks"
        yield not_modelled(job, "plan.recompute", what, f"use {' or '.join(_RECOMPUTES)}, or {_FIX}")
    if plan.offload_activations:
        what = "moving activations of transformers' blocks to the host"
        yield not_modelled(job, "plan.offload_activations", what, f"use false, or {_FIX}")


@unmodelled("backward of transformers' models is not split", reads="schedule")
def transformers_split_backward(job: Job) -> Iterator[Problem]:
    if _is_transformers(job) and splits_backward(job.plan.schedule):
        what = "a split backward of transformers' code"
        yield not_modelled(job, "plan.schedule", what, f"use 1f1b, or {_FIX}")


@unmodelled(
    "transformers' experts are not modeled under autocast, which leaves them in FP32", reads="shards_parameters"
)
def transformers_experts_autocast(job: Job) -> Iterator[Problem]:
    """grouped_mm is on none of autocast's lists (transformers, integrations/moe.py, _grouped_mm)."""
    if _is_transformers(job) and job.model.num_experts and computed_in(job) == "autocast":
        what = "transformers' Mixtral under autocast, which leaves its experts in fp32,"
        yield not_modelled(job, "training.precision", what, f"use fp32, or FSDP (dp_shard), or {_FIX}")


_OF_TRAINER = ("accelerate", "deepspeed")


@rule("the Hugging Face Trainer has no pipelines", reads="pp")
def trainer_pipelines(job: Job) -> Iterator[Problem]:
    if job.software.id in _OF_TRAINER and job.plan.pp > 1:
        yield problem_of(job, "plan.pp", f"is a pipeline, which the Trainer with {job.software.id} has not", "use 1")


@unmodelled("tensor parallelism of DeepSpeed with transformers' models is not modeled", reads="tp")
def deepspeed_splits(job: Job) -> Iterator[Problem]:
    if job.software.id == "deepspeed" and job.plan.tp > 1:
        what = "tensor parallelism of DeepSpeed (AutoTP)"
        yield not_modelled(job, "plan.tp", what, "use 1, or software accelerate")


@rule("a captured model must have been captured in the precision of the job", reads="shards_parameters tp")
def precision_of_capture(job: Job) -> Iterator[Problem]:
    captured = job.model.captured
    if captured is None:
        return
    needed = computed_in(job)
    if job.plan.tp in captured.degrees:
        captured = captured.of_degree(job.plan.tp)
    if needed in captured.graphs:
        return
    reason = captured.refused.get(needed)
    why = f": forward fails in it ({reason})" if reason else ""
    where = "of weights and activations" if needed == "bf16" else "under autocast" if needed == "autocast" else ""
    sentence = f"needs layers computed in {needed if needed != 'autocast' else 'bf16'} {where}".rstrip() + why
    known = [f"training.precision = {word}" for word in _possible(job)]
    yield problem_of(job, "training.precision", sentence, f"use {either(known)}" if known else "capture it again")


def _possible(job: Job) -> list[str]:
    """Precisions in which the job would have layers."""
    captured = job.model.captured
    assert captured is not None, "a job of a captured model"
    jobs = {word: job.with_changes({"training.precision": word}) for word in ("fp32", "bf16")}
    return [word for word, other in jobs.items() if computed_in(other) in captured.graphs]


@rule("a captured model must have been captured with the tensor-parallel degree", reads="tp")
def degree_of_capture(job: Job) -> Iterator[Problem]:
    captured, tp = job.model.captured, job.plan.tp
    if captured is None or tp in captured.degrees:
        return
    degrees = [str(degree) for degree in (*captured.degrees[1:], tp)]
    sentence = f"was not captured: {captured.name} has tensor-parallel degrees {either(captured.degrees)}"
    fix = f"use one of them, or capture it again with --tensor-parallel {','.join(degrees)}"
    if len(captured.degrees) == 1:
        sentence = f"was not captured: {captured.name} is captured without tensor parallelism"
        plan = "" if captured.factory.endswith(".json") else " and your --tp-plan MODULE:FUNCTION"
        fix = f"use 1, or capture it again with --tensor-parallel {tp}{plan}"
    yield problem_of(job, "plan.tp", sentence, fix)


@unmodelled("captured modules are trained by frameworks that take modules")
def software_of_modules(job: Job) -> Iterator[Problem]:
    if job.model.captured is not None and not job.software.trains_modules:
        takes = [name for name in catalog.names("software") if catalog.software(name).trains_modules]
        sentence = f"{job.software.title} with modules of a user's own is not modeled yet"
        yield Problem(field="software", value=job.software.id, rule=sentence, fix=f"use {either(takes)}")


@unmodelled("torch.compile of a captured module compiles its blocks")
def compiled_capture(job: Job) -> Iterator[Problem]:
    captured = job.model.captured
    if captured is None or not job.software.compiled:
        return
    longest = max((longest_run(layer) for layer in job.model.layers if not layer.in_root), default=0)
    if not longest:
        what = "torch.compile of a captured module without blocks"
    elif longest > MAX_FUSED:
        what = f"torch.compile of {longest} memory-bound operators in a row, which are more than one kernel has,"
    else:
        return
    yield not_modelled(job, "software.compiled", what, "use software.compiled = false")


@unmodelled("changes of layers of captured tensor-parallel ranks are not modeled", reads="tp")
def changed_split_capture(job: Job) -> Iterator[Problem]:
    if job.model.captured is None or job.plan.tp == 1:
        return
    changed = {
        "adapters": job.model.lora_rank > 0,
        "torch.compile": job.software.compiled,
        f"{job.training.precision} matmuls": job.training.precision in job.software.low_precision,
    }
    if whats := [what for what, is_so in changed.items() if is_so]:
        what = f"{' and '.join(whats)} on tensor-parallel ranks of a captured module"
        yield not_modelled(job, "plan.tp", what, "use 1")


@unmodelled("weights that several captured layers share are in one pipeline stage", reads="pp")
def shared_weights_in_pipelines(job: Job) -> Iterator[Problem]:
    captured = job.model.captured
    if captured is not None and captured.graph.shared and job.plan.pp > 1:
        what = f"a pipeline of layers that share weights ({_some(captured.graph.shared)})"
        yield not_modelled(job, "plan.pp", what, "use 1")


@rule("weights that are sharded have dimensions", reads="dp_shard zero_stage")
def scalar_weights_in_fsdp(job: Job) -> Iterator[Problem]:
    """Torch 2.13, fully_shard: such a weight has no dimension to shard."""
    if job.model.captured is None or not job.plan.shards_parameters:
        return
    names = [p.name for layer in job.model.layers for p in layer.parameters if not p.shape]
    if names:
        sentence = f"shards weights along a dimension, and {_some([*dict.fromkeys(names)])} has none"
        yield problem_of(job, "plan.zero_stage", sentence, "make it a tensor of one element, or use zero_stage = 1")


@unmodelled("stages hand on few tensors", reads="pp")
def tensors_between_stages(job: Job) -> Iterator[Problem]:
    if job.model.captured is None or job.plan.pp == 1:
        return
    most = max(len(layer.outputs) for layer in job.model.layers)
    if most > MAX_BOUNDARY_TENSORS:
        what = f"a pipeline with {most} tensors between two layers, which is more than {MAX_BOUNDARY_TENSORS},"
        yield not_modelled(job, "plan.pp", what, "use 1")


@rule("unsharded replicas need a gradient of every weight", reads="dp_replicate dp_shard zero_stage")
def unused_weights_in_ddp(job: Job) -> Iterator[Problem]:
    captured, plan = job.model.captured, job.plan
    if captured is not None and captured.unused and plan.dp > 1 and not plan.shards_parameters:
        names = _some([parameter.name for parameter in captured.unused])
        sentence = f"fails with weights that have no part in the loss ({names})"
        yield problem_of(job, "plan.zero_stage", sentence, "freeze or remove them, or use FSDP (zero_stage = 3)")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
