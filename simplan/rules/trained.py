"""Rules about what is trained: adapters, frozen weights and their form, and the task that says so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import cast

from simplan import catalog
from simplan.errors import Problem
from simplan.job import Job
from simplan.model.base_weights import stored_experts
from simplan.model.captured.adapters import ALL, parameter_names, parts_of, targets_of
from simplan.model.captured.facts import CapturedModel
from simplan.model.captured.linear import linear_layers
from simplan.model.fake_quantization import GROUPED, fake_quantized
from simplan.model.families import FAMILIES
from simplan.model.layer import Gemm, LayerKind, LayerSpec, Role
from simplan.model.low_precision import LowPrecision
from simplan.model.model import ModelSpec
from simplan.model.module_names import PartName, matrices, modules, part_name
from simplan.model.weight_format import FOUR_BITS, PREQUANTIZED, SCALES_PER_BLOCK
from simplan.plan.shard import Shard
from simplan.rules.rule import not_modelled, problem_of, rule, unmodelled
from simplan.training import PREFERENCE_TASKS, REFERENCE_TASKS
from simplan.units import format_bytes
from simplan.wording import either

_ENDS = {"embedding": "wte", "head": "lm_head"}


@rule("the task lora trains adapters, and needs lora_rank")
def lora_needs_adapters(job: Job) -> Iterator[Problem]:
    if job.training.task != "lora" or job.model.lora_rank:
        return
    having = [name for name, family in FAMILIES.items() if "lora_rank" in family.fields]
    known = job.model.family in having
    sentence = "trains adapters, and " + (
        "model.lora_rank = 0" if known else f"those of family {job.model.family} are not modeled yet"
    )
    fix = "give model.lora_rank, e.g. 16" if known else f"use pretrain, or a model of family {either(having)}"
    yield problem_of(job, "training.task", sentence, fix)


@rule("a model with adapters has all other weights frozen, and needs the task lora, or one of preference training")
def adapters_need_lora(job: Job) -> Iterator[Problem]:
    if job.model.lora_rank and not job.software.of_adapters(job.training):
        sentence = f"trains all weights, and model.lora_rank = {job.model.lora_rank} freezes them"
        yield problem_of(job, "training.task", sentence, "use lora, or remove model.lora_rank")


@rule("keys of adapters need lora_rank")
def keys_of_adapters_need_rank(job: Job) -> Iterator[Problem]:
    model = job.model
    if "lora_rank" not in FAMILIES[model.family].fields or model.lora_rank:
        return
    words = {
        "lora_targets": "says which matrices have adapters",
        "lora_rank_pattern": "says which ranks adapters have",
        "lora_dropout": "is of the inputs of adapters",
        "lora_modules_to_save": "says what is trained next to adapters",
        "lora_dora": "gives adapters magnitudes",
        "lora_oft": "makes adapters rotate",
    }
    for name, what in words.items():
        default = ModelSpec.model_fields[name].get_default(call_default_factory=True)
        if getattr(model, name) != default:
            fix = "give lora_rank, e.g. 16, or remove it"
            yield problem_of(job, f"model.{name}", f"{what}, and lora_rank = 0", fix)


@rule("lora_targets must name matrices of a block, the head or the embedding")
def lora_targets_exist(job: Job) -> Iterator[Problem]:
    model = job.model
    if "lora_rank" not in FAMILIES[model.family].fields or not model.lora_rank:
        return
    if model.captured is not None:
        yield from _targets_of_capture(job, model.captured)
        return
    known = matrices(_layers(model))
    for target in model.lora_targets:
        yield from _misnamed(job, "lora_targets", target, known, f"is no matrix of a block of family {model.family}")


def _targets_of_capture(job: Job, captured: CapturedModel) -> Iterator[Problem]:
    names = [ALL, *dict.fromkeys(path.rpartition(".")[2] for path in linear_layers(captured))]
    for target, paths in targets_of(captured, job.model.lora_targets).items():
        if paths:
            continue
        sentence = f"is no linear layer of {captured.name}, and no end of the name of one"
        fix = f"use {either(names)}" if len(names) > 1 else "remove model.lora_rank: there is no linear layer"
        yield problem_of(job, "model.lora_targets", sentence, fix, value=target)


def _misnamed(
    job: Job, field: str, name: str, known: Mapping[str, object], sentence: str, *, whole: bool = False
) -> Iterator[Problem]:
    """Problem of a name of a part that the model lacks; ``whole`` if it may be that of whole layers."""
    part, blocks = part_name(name), job.model.num_blocks
    of_blocks = part is not None and part.kind is LayerKind.BLOCK
    if part is None or (of_blocks and part.inside not in known and (part.inside or not whole)):
        fix = f"use {either(known)}" + (", embedding, head or blocks.0-3" if whole else "")
        yield problem_of(job, f"model.{field}", sentence, fix, value=name)
    elif of_blocks and not _blocks_exist(part, blocks):
        what = f"names blocks that the model has not: its {blocks} blocks are 0 to {blocks - 1}, from low to high"
        yield problem_of(job, f"model.{field}", what, f"use at most {blocks - 1}", value=name)


def _blocks_exist(part: PartName, blocks: int) -> bool:
    last = part.first if part.last is None else part.last
    return part.first <= last < blocks


def _layers(model: ModelSpec) -> tuple[LayerSpec, ...]:
    """Layers of a model whose weights are all trained."""
    return FAMILIES[model.family].layers(model, Shard())


@rule("lora_rank_pattern must give ranks to matrices that have adapters")
def lora_ranks_of_targets(job: Job) -> Iterator[Problem]:
    model = job.model
    if not model.lora_rank_pattern or not model.lora_rank or model.captured is not None:
        return
    known = matrices(_layers(model))
    sentence = f"is no matrix of a block of family {model.family}"
    wrong = [
        each for name in model.lora_rank_pattern for each in _misnamed(job, "lora_rank_pattern", name, known, sentence)
    ]
    yield from wrong
    if wrong:
        return
    adapted = {name for layer in model.layers for name in _ranks(layer)}
    for name in model.lora_rank_pattern:
        part = part_name(name)
        assert part is not None
        chosen = {_ENDS[name]} if name in _ENDS else {*known.get(part.inside, ())}
        if chosen.isdisjoint(adapted):
            what = "gives a rank to matrices without adapters"
            yield problem_of(job, "model.lora_rank_pattern", what, "add them to lora_targets, or remove it", value=name)


def _ranks(layer: LayerSpec) -> dict[str, tuple[int, int]]:
    """Name of each matrix with an adapter -> its rank, and the largest that makes sense: the smaller dimension."""
    shapes = {parameter.name: parameter.shape for parameter in layer.parameters}
    found = {}
    for name in (name for name in shapes if name.endswith(".lora_a.weight")):
        *experts, n, k = shapes[name.replace(".lora_a.", ".")]
        found[name.removesuffix(".lora_a.weight")] = shapes[name][0] // math.prod(experts), min(n, k)
    return found


@rule("an adapter's rank is at most the smaller dimension of its matrix")
def lora_rank_within_matrices(job: Job) -> Iterator[Problem]:
    model = job.model
    if not model.lora_rank or model.captured is not None:
        return
    found = {name: ranks for layer in {*model.layers} for name, ranks in _ranks(layer).items()}
    for name, (rank, most) in found.items():
        if rank > most:
            field = "lora_rank" if rank == model.lora_rank else "lora_rank_pattern"
            what = (
                f"is more than the smaller dimension of {name}, {most}, so that the adapter is larger than its matrix"
            )
            yield problem_of(job, f"model.{field}", what, f"use at most {most}", value=str(rank))
            return


@rule("frozen names parts of the model, and leaves something to train")
def frozen_parts_exist(job: Job) -> Iterator[Problem]:
    model = job.model
    if model.trains_nothing:
        yield problem_of(job, "model.trains_nothing", "is no key of a model", "remove it")
    if not model.frozen:
        return
    if model.lora_rank:
        yield problem_of(
            job, "model.frozen", "is about a model without adapters: with them all else is frozen", "remove it"
        )
        return
    if model.captured is not None:
        yield from _parts_of_capture(job, model.captured)
        return
    known, sentence = modules(_layers(model)), f"is no part of a model of family {model.family}"
    wrong = [each for name in model.frozen for each in _misnamed(job, "frozen", name, known, sentence, whole=True)]
    yield from wrong
    if not wrong and not any(layer.num_trained for layer in model.layers):
        yield problem_of(job, "model.frozen", "freezes all weights, so that nothing is trained", "leave a part out")


def _parts_of_capture(job: Job, captured: CapturedModel) -> Iterator[Problem]:
    found = parts_of(captured, job.model.frozen)
    for name in (name for name, parts in found.items() if not parts):
        modules_there = dict.fromkeys(".".join(each.split(".")[:2]) for each in parameter_names(captured))
        sentence = f"is no module of {captured.name} with weights that take part in the loss"
        yield problem_of(job, "model.frozen", sentence, f"use {either([*modules_there][:8])}", value=name)
    if all(found.values()) and not any(layer.num_trained for layer in job.model.layers):
        yield problem_of(job, "model.frozen", "freezes all weights, so that nothing is trained", "leave a part out")


@rule("input_require_grads is about models with frozen weights")
def gradients_of_frozen_inputs(job: Job) -> Iterator[Problem]:
    if job.model.input_require_grads and not (job.model.lora_rank or job.model.frozen):
        what = "is about weights that are not trained, and all are"
        yield problem_of(job, "model.input_require_grads", what, "remove it, or give model.lora_rank or model.frozen")
    elif job.model.input_require_grads and job.model.captured is not None:
        if not job.model.captured.input_embeddings:
            what = f"is about input embeddings, and {job.model.captured.name} names none"
            yield problem_of(
                job, "model.input_require_grads", what, "remove it, or capture a model of transformers again"
            )
        elif not job.model.lora_rank:
            what = "is not modeled yet with frozen parts of a captured module"
            yield problem_of(job, "model.input_require_grads", what, "remove it")


@unmodelled("adapters in this precision are not modeled for the software")
def adapters_in_low_precision(job: Job) -> Iterator[Problem]:
    precision = job.training.precision
    low = job.software.low_precision.get(cast(LowPrecision, precision))
    if (job.model.lora_rank or job.model.frozen) and low is not None and not low.frozen:
        what = f"a frozen matrix in low precision under {job.software.id}"
        what += " with adapters (model.lora_rank)" if job.model.lora_rank else " (model.frozen)"
        yield not_modelled(job, "training.precision", what, "use bf16")


@unmodelled("adapters with layers for multi-token prediction are not modeled")
def mtp_with_adapters(job: Job) -> Iterator[Problem]:
    model = job.model
    if not model.mtp_num_layers:
        return
    what = f"with model.mtp_num_layers = {model.mtp_num_layers}"
    if model.lora_rank:
        yield not_modelled(job, "model.lora_rank", f"adapters {what}", "use 0")
    elif model.frozen:
        yield not_modelled(job, "model.frozen", f"frozen weights {what}", "remove it")


@unmodelled(
    "adapters of experts and routers are modeled where each rank has all experts", reads="tp ep cp shards_parameters"
)
def adapters_of_experts(job: Job) -> Iterator[Problem]:
    model, software = job.model, job.software
    if not model.lora_rank or not model.num_experts:
        return
    roles = {
        operator.kernel.name: operator.roles
        for layer in {*_layers(model)}
        for operator in layer.operators
        if isinstance(operator.kernel, Gemm)
    }
    named = [(target, part.inside) for target in model.lora_targets if (part := part_name(target)) is not None]
    merged = {Role.EXPERTS, Role.GATING}
    experts = [inside for _, inside in named if not merged.isdisjoint(roles.get(inside, ()))]
    whats = {
        "with model.lora_dropout, which PEFT refuses,": model.lora_dropout > 0,
        "with model.lora_dora, which PEFT refuses,": model.lora_dora,
        "with tensor, expert or context parallelism": max(job.plan.tp, job.plan.ep, job.plan.cp) > 1,
        "with FSDP1's flat parameters": software.flat_parameters and job.plan.shards_parameters,
        f"with {software.id}": not software.base_weights or software.layers.model_code == "transformers",
    }
    for what in (what for what, is_so in whats.items() if is_so and experts):
        fix = "use attention, or all, which leaves experts and routers out"
        yield not_modelled(job, "model.lora_targets", f"an adapter of {experts[0]} {what}", fix)


@unmodelled("adapters of the head and the embedding are modeled for whole, separate matrices", reads="tp")
def adapters_of_ends(job: Job) -> Iterator[Problem]:
    model = job.model
    if not model.lora_rank or model.captured is not None:
        return
    ends = [("lora_targets", name) for name in model.lora_targets if name in _ENDS]
    ends += [("lora_modules_to_save", name) for name in model.lora_modules_to_save]
    for field, name in ends:
        whats = {
            "with tensor parallelism": job.plan.tp > 1,
            "of tied embeddings": model.tied_embeddings,
            "with a loss in chunks": name == "head" and job.software.layers.chunked_loss is not None,
        }
        for what in (what for what, is_so in whats.items() if is_so):
            verb = "an adapter" if field == "lora_targets" else "a trained copy"
            yield not_modelled(job, f"model.{field}", f"{verb} of the {name} {what}", f"remove {name}")


@unmodelled("magnitudes of adapters are modeled as PEFT computes them, for whole matrices without dropout", reads="tp")
def magnitudes_modelled(job: Job) -> Iterator[Problem]:
    model, software = job.model, job.software
    if not (model.lora_dora and model.lora_rank):
        return
    whats = {
        f"with {software.id}": not software.base_weights,
        "with model.lora_dropout, for which PEFT runs the frozen matmul once more": model.lora_dropout > 0,
        "of the embedding": "embedding" in model.lora_targets,
        "with tensor parallelism": job.plan.tp > 1,
        "with a loss in chunks": "head" in model.lora_targets and job.software.layers.chunked_loss is not None,
    }
    for what in (what for what, is_so in whats.items() if is_so):
        yield not_modelled(job, "model.lora_dora", f"DoRA {what}", "use false")


@rule("blocks of rotations divide the inputs of matrices", after_others=True)
def rotations_divide(job: Job) -> Iterator[Problem]:
    model = job.model
    if not (model.lora_oft and model.lora_rank):
        return
    for layer in dict.fromkeys(model.layers):
        gemms = {kernel.name: kernel for kernel in layer.kernels if isinstance(kernel, Gemm)}
        for parameter in layer.parameters:
            name = parameter.name.removesuffix(".oft_r.weight")
            if name != parameter.name and gemms[name].k % model.lora_rank:
                sentence = f"is the size of blocks (lora_oft), and must divide the {gemms[name].k:,} inputs of {name}"
                yield problem_of(job, "model.lora_rank", sentence, "use 32")
                return


@unmodelled("rotations are modeled as PEFT computes them, for whole matrices of blocks without dropout", reads="tp")
def rotations_modelled(job: Job) -> Iterator[Problem]:
    model, software = job.model, job.software
    if not (model.lora_oft and model.lora_rank):
        return
    whats = {
        f"with {software.id}": not software.base_weights,
        "without autocast": not software.autocast,
        "with model.lora_dora": model.lora_dora,
        "with model.lora_dropout": model.lora_dropout > 0,
        "with model.lora_rank_pattern": bool(model.lora_rank_pattern),
        "of the head or the embedding": not _ENDS.keys().isdisjoint(model.lora_targets),
        "of experts": model.num_experts > 0,
        "with tensor parallelism": job.plan.tp > 1,
    }
    for what in (what for what, is_so in whats.items() if is_so):
        yield not_modelled(job, "model.lora_oft", f"OFT {what}", "use false")


@unmodelled(
    "trained copies of modules next to wider adapters are modeled for whole parameters of torch",
    reads="shards_parameters",
)
def saved_modules_modelled(job: Job) -> Iterator[Problem]:
    if not job.model.lora_modules_to_save or not job.software.states(job.training, job.plan):
        return
    state = job.software.state(job.training, job.plan)
    replicated = not job.plan.shards_parameters and not state.master and job.software.runtime == "torch"
    if state.parameter not in (state.frozen, 2 * state.frozen if replicated else 0):
        what = (
            f"a trained copy as wide as the original ({state.frozen} bytes) next to adapters of {state.parameter} bytes"
        )
        yield not_modelled(job, "model.lora_modules_to_save", what, "remove it, or use precision fp32")


@unmodelled("pipelines of partly frozen models are not modeled", reads="pp")
def pipelines_of_frozen_parts(job: Job) -> Iterator[Problem]:
    if job.model.frozen and job.plan.pp > 1:
        what = "a pipeline of which some stages may have no backward (model.frozen)"
        yield not_modelled(job, "plan.pp", what, "use 1")


_BASE_WEIGHTS = "training.base_weights"
_MIN_BLOCK, _MAX_BLOCK = 32, 4096
_WITH_BASE = ("bf16", "fp16", "fp32", "tf32")
_STORED_AS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "tf32": "fp32"}
"""Precision -> type in which FSDP and ZeRO-3 gather weights: packed ones must have it, or they would be cast."""
_WITHOUT_BASE = "or remove training.base_weights"


def _of_base(key: str, value: object, sentence: str, fix: str) -> Problem:
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return Problem(field=f"{_BASE_WEIGHTS}.{key}", value=shown, rule=sentence, fix=fix)


@rule("base_weights is for frozen weights below adapters")
def base_weights_of_adapters(job: Job) -> Iterator[Problem]:
    base, task = job.training.base_weights, job.training.task
    if base is not None and not job.software.of_adapters(job.training):
        sentence = f"is for frozen weights below adapters (training.task = lora), and training.task = {task}"
        fix = f"use training.task = lora with model.lora_rank, {_WITHOUT_BASE}"
        if job.training.is_of_preferences:
            sentence = "is for frozen weights below adapters, and model.lora_rank = 0"
            fix = f"give model.lora_rank, e.g. 16, {_WITHOUT_BASE}"
        yield _of_base("format", base.format, sentence, fix)


@rule("double quantization, block sizes and libraries go with formats that have them")
def base_weights_of_format(job: Job) -> Iterator[Problem]:
    base = job.training.base_weights
    if base is None:
        return
    blocked = base.format in ("nf4", "fp4")
    if base.double_quantization and not blocked:
        sentence = f"quantizes the scales of nf4 and fp4, and training.base_weights.format = {base.format}"
        yield _of_base("double_quantization", True, sentence, "use format: nf4, or remove it")
    if base.storage != "uint8" and not (blocked and base.library != "torchao"):
        sentence = f"is of bitsandbytes' nf4 and fp4, and training.base_weights.format = {base.format}"
        yield _of_base("storage", base.storage, sentence, "remove it")
    if base.library == "torchao" and base.format != "nf4":
        sentence = f"has nf4 alone, and training.base_weights.format = {base.format}"
        yield _of_base("library", base.library, sentence, "use format: nf4, or library: bitsandbytes")
    elif base.library == "torchao" and not base.double_quantization:
        sentence = "always quantizes the scales of nf4"
        yield _of_base("library", base.library, sentence, "write double_quantization: true")
    if base.library == "bitsandbytes" and base.format not in ("nf4", "fp4", "int8"):
        sentence = f"has nf4, fp4 and int8, and training.base_weights.format = {base.format}"
        yield _of_base("library", base.library, sentence, "remove it")
    if base.experts and not (base.is_of_bitsandbytes and blocked):
        sentence = f"is of bitsandbytes' nf4 and fp4, and training.base_weights.format = {base.words}"
        yield _of_base("experts", True, sentence, "use format: nf4 of bitsandbytes, or remove it")
    elif base.experts and not _has_experts(job.model):
        sentence = f"is about experts, and {job.model.name or 'the model'} has none"
        yield _of_base("experts", True, sentence, "remove it")
    if base.keeps_inputs and not (base.is_of_bitsandbytes and blocked):
        sentence = f"is of bitsandbytes' nf4 and fp4, and training.base_weights.format = {base.words}"
        yield _of_base("keeps_inputs", True, sentence, "remove it")
    size = base.block_size
    if size is None:
        return
    if base.format not in FOUR_BITS:
        sentence = f"is of formats with 4 bits, and training.base_weights.format = {base.format}"
        yield _of_base("block_size", size, sentence, "remove it")
    elif not _MIN_BLOCK <= size <= _MAX_BLOCK or size & (size - 1):
        sentence = f"must be a power of two from {_MIN_BLOCK} to {_MAX_BLOCK}"
        nearest = 1 << min(12, max(5, round(math.log2(size))))
        yield _of_base("block_size", size, sentence, f"use {nearest}")


def _has_experts(model: ModelSpec) -> bool:
    """True for a model with experts held as one tensor."""
    return any(stored_experts(layer) for layer in {*model.layers})


@rule("sharded ranks gather weights of few bits as floating-point storage of 4 bits", reads="shards_parameters")
def base_weights_of_shards(job: Job) -> Iterator[Problem]:
    base, plan, software = job.training.base_weights, job.plan, job.software
    if base is None or not plan.shards_parameters:
        return
    whole = "use plan.dp_replicate (DDP)"
    shards = f"plan.zero_stage = {plan.zero_stage}"
    if base.format == "int8":
        sentence = f"cannot be sharded: FSDP and ZeRO-3 take quantized weights of 4 bits only, and {shards}"
        yield _of_base("format", base.format, sentence, f"use format: nf4, or {whole}")
    elif base.format in PREQUANTIZED:
        sentence = f"cannot be sharded: LLaMA-Factory refuses weights that were quantized before with {shards}"
        yield _of_base("format", base.format, sentence, f"use format: nf4 with storage: bf16, or {whole}")
    elif base.format in ("nf4", "fp4") and base.library != "torchao":
        gathered = _STORED_AS.get(job.training.precision, "bf16")
        as_it_is = software.executable and gathered == "fp32"  # FSDP2 without a policy of mixed precision
        if base.storage != gathered and not (as_it_is and base.storage == "uint8"):
            sentence = f"is not the type in which ranks gather weights, which shards need ({shards})"
            yield _of_base("storage", base.storage, sentence, f"use storage: {gathered}, or {whole}")
    if base.upcast:
        sentence = f"is not done under FSDP and ZeRO-3, and {shards}"
        yield _of_base("upcast", True, sentence, f"remove it, or {whole}")


@rule("autocast is an option of training adapters on whole weights", reads="shards_parameters")
def autocast_of_adapters(job: Job) -> Iterator[Problem]:
    if job.software.autocast:
        return
    fix = "remove software.autocast"
    if not job.software.of_adapters(job.training):
        sentence = f"is modeled for adapters (training.task = lora), and training.task = {job.training.task}"
        yield problem_of(job, "software.autocast", sentence, fix)
    elif job.plan.shards_parameters:
        sentence = f"does not go with the mixed precision of plan.zero_stage = {job.plan.zero_stage}"
        yield problem_of(job, "software.autocast", sentence, fix)


@unmodelled("weights of few bits are not modeled for this software or precision")
def base_weights_of_software(job: Job) -> Iterator[Problem]:
    base, software, precision = job.training.base_weights, job.software, job.training.precision
    if base is None:
        return
    library = base.library or "bitsandbytes"
    if library not in software.base_weights:
        sentence = f"in tensors of {library} is not modeled yet with {software.id}"
        known = ("torch", "accelerate", "deepspeed")[: 3 if library == "bitsandbytes" else 2]
        if base.format == "nf4" and software.base_weights:
            other = f"library: {software.base_weights[0]}"
            other += ", double_quantization: true" * (software.base_weights[0] == "torchao")
            yield _of_base("format", base.format, sentence, f"use {other}, or software {either(known)}")
            return
        yield _of_base("format", base.format, sentence, f"use software {either(known)}, {_WITHOUT_BASE}")
    if precision not in _WITH_BASE:
        sentence = f"is not modeled yet with training.precision = {precision}"
        yield _of_base("format", base.format, sentence, "use training.precision = bf16")
    upcasts = base.upcast if base.upcast is not None else software.upcast_frozen and base.is_of_bitsandbytes
    if job.model.captured is not None and upcasts:
        sentence = "makes hidden states FP32, which a capture has in the precision of computation"
        yield _of_base("upcast", True, sentence, "use upcast: false, or a model of a family")
    if software.compiled and library == "bitsandbytes":
        sentence = "is not modeled yet with software.compiled = true: bitsandbytes' functions break its graphs"
        yield _of_base("format", base.format, sentence, "use library: torchao, or software.compiled = false")


@unmodelled("weights of few bits are not modeled with split matrices, or experts split over ranks", reads="tp ep etp")
def base_weights_of_splits(job: Job) -> Iterator[Problem]:
    """Matrices of bitsandbytes are packed into one column, whose chunks keep the state of all of it.

    Source: bitsandbytes 0.50, nn/modules.py, ``Params4bit.__torch_function__`` and ``Linear4bit``; transformers 5.23
    has local kernels of tensor parallelism for its other quantizers alone (distributed/tensor_parallel.py).
    """
    base, plan = job.training.base_weights, job.plan
    if base is None:
        return
    for axis in ("tp", "ep", "etp"):
        if (degree := getattr(plan, axis)) > 1:
            why = ", whose 4-bit matrices are one packed column" * (axis == "tp" and base.is_of_bitsandbytes)
            sentence = f"with {_BASE_WEIGHTS}, weights of few bits{why}, is not modeled yet with plan.{axis} = {degree}"
            fix = "use 1, and dp_replicate, dp_shard, cp or pp"
            yield problem_of(job, f"plan.{axis}", sentence, fix)


@rule(
    "frozen matrices divide into whole blocks and shards of torchao's and GPTQ's formats",
    reads="shards_parameters dp_shard tp",
    after_others=True,
)
def base_weights_divide(job: Job) -> Iterator[Problem]:
    base, plan = job.training.base_weights, job.plan
    if base is None or (base.library != "torchao" and base.format not in PREQUANTIZED):
        return
    size = base.elements_per_scale
    for layer in {*job.software.layers_of(job.model, plan, job.training)}:
        for parameter in layer.parameters:
            if parameter.stored is None:
                continue
            n, k = parameter.shape
            if base.library == "torchao":
                shards = plan.dp_shard if plan.shards_parameters else 1
                unit = size * SCALES_PER_BLOCK * shards
                fits = n * k % unit == 0 and n % shards == 0
                words = f"{unit:,} elements" + (f" and {shards} shards of its rows" if shards > 1 else "")
            else:
                fits, words = k % size == 0, f"groups of {size} inputs"
            if not fits:
                sentence = f"needs {words}, and {parameter.name} is {n:,} x {k:,}"
                fix = "use library: bitsandbytes" if base.library == "torchao" else "use another block_size"
                yield _of_base("format", base.format, sentence, fix)
                return


_SIMULATED = "training.fake_quantization"


@rule("formats of simulated quantization go together, and groups divide the inputs of linear layers", after_others=True)
def fake_quantization_of_format(job: Job) -> Iterator[Problem]:
    form = job.training.fake_quantization
    if form is None:
        return
    if (form.weights == "mxfp4") is not (form.activations == "mxfp4"):
        sentence = f"rounds weights and inputs alike, and {_SIMULATED}.weights = {form.weights}"
        yield problem_of(job, f"{_SIMULATED}.activations", sentence, "use mxfp4 for both, or for none")
    elif form.group_size is not None and form.weights not in GROUPED:
        sentence = f"is of weights in int4, and {_SIMULATED}.weights = {form.weights}"
        yield problem_of(job, f"{_SIMULATED}.group_size", sentence, "remove it")
    elif form.weights in (*GROUPED, "mxfp4"):
        size = form.inputs_per_scale
        for layer in dict.fromkeys(job.model.layers):
            for gemm in fake_quantized(layer):
                if gemm.k % size:
                    sentence = f"needs groups of {size} inputs, and {gemm.name} has {gemm.k:,}"
                    yield problem_of(job, f"{_SIMULATED}.weights", sentence, "use another group_size, or fp8")
                    return


@unmodelled(
    "simulated quantization is modeled for linear layers of torch that are trained whole, or are below adapters",
    reads="tp cp pp ep recompute shards_parameters",
)
def fake_quantization_modelled(job: Job) -> Iterator[Problem]:
    form, training, plan, software = job.training.fake_quantization, job.training, job.plan, job.software
    if form is None:
        return
    state = software.state(training, plan)
    reasons = {
        f"with {software.id}": "torchao" not in software.base_weights,
        "with frozen weights": bool(job.model.frozen or training.base_weights),
        "with DoRA or OFT": bool(job.model.lora_rank) and (job.model.lora_dora or job.model.lora_oft),
        "as mxfp4 with adapters": bool(job.model.lora_rank) and form.weights == "mxfp4",
        "of a captured module": job.model.captured is not None,
        "next to a reference model": training.task in REFERENCE_TASKS,
        f"with training.precision = {training.precision}": training.precision not in _WITH_BASE,
        "under torch.autocast, which casts rounded weights": state.weight_copy > 0,
        "with software.compiled = true": software.compiled,
        f"with plan.recompute = {plan.recompute}": plan.recompute not in ("none", "full"),
        **{
            f"with plan.{axis} = {size}": size > 1 for axis in ("tp", "cp", "pp", "ep") if (size := getattr(plan, axis))
        },
    }
    for what, is_violated in reasons.items():
        if is_violated:
            fix = f"use software torch or accelerate, pure_bf16 or zero_stage = 3, tp = 1, or remove {_SIMULATED}"
            yield problem_of(job, f"{_SIMULATED}.weights", f"is not modeled yet {what}", fix)
            return


_REFERENCE = "training.preference.reference"
_WITH_REFERENCE = ("adapters_off", "second_model", "precomputed")


def _of_preference(job: Job, key: str, sentence: str, fix: str) -> Problem:
    preference = job.training.preference
    value = getattr(preference, key)
    value = job.reference if key == "reference" and value is None else value
    return Problem(field=f"training.preference.{key}", value=str(value).lower(), rule=sentence, fix=fix)


@rule("training.preference says where the log-probabilities of a reference model come from, for dpo and kto")
def reference_of_task(job: Job) -> Iterator[Problem]:
    training, preference = job.training, job.training.preference
    task = training.task
    if preference is None:
        return
    if not training.is_of_preferences:
        sentence = f"is about preference training, and training.task = {task}"
        fix = f"use task {either(PREFERENCE_TASKS)}, or remove it"
        yield Problem(field="training.preference", rule=sentence, fix=fix)
    elif task not in REFERENCE_TASKS and preference.reference in _WITH_REFERENCE:
        sentence = f"is the reference model of {either(REFERENCE_TASKS)}, and training.task = {task} has none"
        yield _of_preference(job, "reference", sentence, "remove it")
    elif task in REFERENCE_TASKS and preference.reference == "none":
        fixes = _WITH_REFERENCE[0 if job.model.lora_rank else 1 : 2 if task == "asft" else 3]
        sentence = f"leaves out the reference model, with which the loss of {task} compares"
        yield _of_preference(job, "reference", sentence, f"use {either(fixes)}, or task orpo or simpo")
    elif task == "asft" and preference.reference == "precomputed":
        sentence = "keeps log-probabilities of whole sequences, and the loss of asft compares all logits"
        yield _of_preference(job, "reference", sentence, "use second_model, or adapters_off with model.lora_rank")
    elif preference.reference == "adapters_off" and not job.model.lora_rank:
        sentence = "is a forward without adapters, and model.lora_rank = 0"
        fix = "use second_model or precomputed, or give model.lora_rank, e.g. 16"
        yield _of_preference(job, "reference", sentence, fix)


@rule("keys of a second model need one, and shards to divide it over", reads="shards_parameters")
def keys_of_second_model(job: Job) -> Iterator[Problem]:
    preference, plan = job.training.preference, job.plan
    if preference is None or not job.training.is_of_preferences:
        return
    for key in ("reference_sharded", "reference_dtype"):
        if getattr(preference, key) is not None and job.reference != "second_model":
            sentence = f"is about a second model, and {_REFERENCE} = {job.reference}"
            yield _of_preference(job, key, sentence, "remove it, or use reference: second_model")
    if job.reference != "second_model":
        return
    if preference.reference_sharded and not plan.shards_parameters:
        sentence = f"needs a plan that shards parameters, and plan.zero_stage = {plan.zero_stage}"
        yield _of_preference(job, "reference_sharded", sentence, "remove it, or use plan.zero_stage = 3")
    narrow = job.training.precision in ("fp32", "tf32") and preference.reference_dtype in ("fp16", "bf16")
    if narrow:
        sentence = f"would compute in 16 bits next to training.precision = {job.training.precision}"
        yield _of_preference(job, "reference_dtype", sentence, "remove it, or use training.precision = bf16")


@rule("reward models have a head of one score, which is trained, and asft compares all logits")
def head_of_scores(job: Job) -> Iterator[Problem]:
    model, task = job.model, job.training.task
    if task in ("reward", "asft") and job.software.loss != "whole":
        why = "has no logits" if task == "reward" else "compares all of them with those of a reference"
        sentence = f"computes logits in chunks, and training.task = {task} {why}"
        yield problem_of(job, "software.loss", sentence, "use software.loss = whole")
    if task != "reward":
        return
    for field in ("lora_targets", "lora_modules_to_save"):
        if "head" in getattr(model, field):
            sentence = "names the head, which training.task = reward replaces by a score that is always trained"
            yield problem_of(job, f"model.{field}", sentence, "remove head", value="head")


@rule("logits next to a score are of reward models")
def logits_of_rewards(job: Job) -> Iterator[Problem]:
    preference = job.training.preference
    if preference is not None and preference.logits and job.training.task != "reward":
        yield _of_preference(
            job, "logits", f"is of reward models, and training.task = {job.training.task}", "use false"
        )


@rule("a second model on the host must fit there", reads="shards_parameters offload_optimizer", reads_cluster=True)
def second_model_on_host(job: Job) -> Iterator[Problem]:
    plan, cluster, host = job.plan, job.cluster, job.cluster.host_memory_bytes
    if job.reference != "second_model" or not plan.offload_optimizer or host is None:
        return
    preference, state = job.training.preference, job.software.state(job.training, plan)
    if preference is not None and preference.reference_sharded is False:  # it is on the device
        return
    width = (None if preference is None else preference.reference_bytes) or state.frozen
    ranks = min(cluster.devices_per_node, cluster.num_devices)
    needed = job.model.num_parameters * width * ranks // (plan.dp_shard * plan.cp)
    if needed > host:
        what = f"is {format_bytes(needed)} of weights on the host of every node, which has {format_bytes(host)}"
        yield Problem(
            field=_REFERENCE,
            value="second_model",
            rule=what,
            fix="use precomputed, or model.lora_rank with adapters_off, or more nodes",
        )


def _has_loss_of_tokens(job: Job) -> bool:
    """True for a captured model whose own loss reads log-probabilities of all tokens, as losses on preferences do."""
    captured = job.model.captured
    return captured is not None and captured.tokens > 0 and not captured.loss and job.training.objective == "tokens"


@unmodelled(
    "preference training is not modeled for this model, software or plan", reads="tp cp pp ep offload_activations"
)
def preferences_modelled(job: Job) -> Iterator[Problem]:
    training, model, plan, software = job.training, job.model, job.plan, job.software
    if not training.is_of_preferences:
        return
    task = f"preference training (training.task = {training.task})" if training.task != "asft" else "training.task asft"
    having = [name for name, each in FAMILIES.items() if "lora_rank" in each.fields and each.task == "next_token"]
    if model.family not in having and not _has_loss_of_tokens(job):
        yield not_modelled(job, "training.task", f"{task} of family {model.family}", f"use {either(having)}")
    if not software.trains_on_preferences:
        takes = [name for name in catalog.names("software") if catalog.software(name).trains_on_preferences]
        yield not_modelled(job, "training.task", f"{task} with {software.id}", f"use software {either(takes)}")
    if model.mtp_num_layers:
        yield not_modelled(job, "model.mtp_num_layers", f"multi-token prediction in {task}", "use 0")
    if model.document_lengths:
        what = f"packing, with which TRL trains on no preferences either, in {task}"
        yield not_modelled(job, "model.document_lengths", what, "remove it")
    chunked = software.chunked_loss
    if chunked is not None and not chunked.recomputed and software.loss != "fused":
        fix = f"use software.loss = {either(['whole', 'recomputed', 'fused'])}"
        what = f"a loss in chunks of tokens whose gradients forward computes, in {task},"
        yield not_modelled(job, "software.loss", what, fix)
    splits = {"pp": "a pipeline", "cp": "a sequence split over ranks", "ep": "experts split over ranks"}
    whole_heads = {"reward": "a score split over ranks", "asft": "a vocabulary split over ranks"}
    splits |= {"tp": whole_heads[training.task]} if training.task in whole_heads else {}
    for axis, what in splits.items():
        if getattr(plan, axis) > 1:
            yield not_modelled(job, f"plan.{axis}", f"{what} in {task}", "use 1, and dp_replicate or dp_shard")
    if plan.offload_activations:
        yield not_modelled(job, "plan.offload_activations", f"activations on the host in {task}", "use false")
    if training.backup_workers:
        yield not_modelled(job, "training.backup_workers", f"dropped replicas in {task}", "use 0")
    if plan.replication is not None:
        what = f"replicas that do not wait for each other in {task}"
        yield Problem(
            field="plan.replication", value=plan.replication.kind, rule=f"{what} is not modeled yet", fix="remove it"
        )
    if training.data != "random":
        yield not_modelled(job, "training.data", f"data with something to learn in {task}", "use random")
