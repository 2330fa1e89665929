"""Rules about tensor, context and sequence parallelism: divisibility, and support by models."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.job import Job
from simplan.model.families import FAMILIES
from simplan.rules.rule import nearest_multiples, not_modelled, problem_of, rule, undivided, unmodelled
from simplan.units import counted
from simplan.wording import either

_HEADS = ("num_attention_heads", "num_key_value_heads")


@rule("tp must divide num_attention_heads and num_key_value_heads", reads="tp")
def tp_divides_heads(job: Job) -> Iterator[Problem]:
    yield from _tp_divides(job, *_HEADS)


@rule("tp must divide intermediate_size and num_classes", reads="tp")
def tp_divides_sizes(job: Job) -> Iterator[Problem]:
    yield from _tp_divides(job, "intermediate_size", "num_classes")


@rule("tp must divide vocab_size, which this software does not pad; a larger model.vocab_size does", reads="tp")
def tp_divides_vocabulary(job: Job) -> Iterator[Problem]:
    """It divides every vocabulary that the software pads."""
    yield from _tp_divides(job, "vocab_size")


def _tp_divides(job: Job, *keys: str) -> Iterator[Problem]:
    tp = job.plan.tp
    for key in keys:
        size = getattr(job.padded_model, key)
        padded = f", or model.vocab_size = {-(-size // tp) * tp} (padded)" if key == "vocab_size" else ""
        yield from undivided(job, "plan.tp", f"model.{key}", size, or_else=padded)


@rule("sequence_parallel is about tensor-parallel ranks, and tp = 1", reads="sequence_parallel tp")
def sequence_parallel_needs_tp(job: Job) -> Iterator[Problem]:
    if job.plan.sequence_parallel and job.plan.tp == 1:
        sentence = "splits tokens over the tensor-parallel ranks, and tp = 1"
        yield problem_of(job, "plan.sequence_parallel", sentence, "use false, or a larger tp")


@rule("tp x cp must divide seq_len for sequence parallelism", reads="sequence_parallel tp cp")
def sequence_parallel_divides_sequence(job: Job) -> Iterator[Problem]:
    plan, model, unit = job.plan, job.model, job.plan.tp * job.plan.cp
    if not plan.sequence_parallel or plan.tp == 1 or FAMILIES[model.family].task in ("class", "own"):
        return
    if model.seq_len % unit:
        sentence = f"must be a multiple of tp x cp = {unit} for sequence parallelism"
        fix = f"use {either(nearest_multiples(model.seq_len, unit))}, or plan.sequence_parallel = false"
        yield problem_of(job, "model.seq_len", sentence, fix)


@rule("the software has no sequence parallelism", reads="sequence_parallel tp")
def sequence_parallel_of_software(job: Job) -> Iterator[Problem]:
    if job.plan.sequence_parallel and job.plan.tp > 1 and not job.software.sequence_parallelism:
        sentence = f"{job.software.id} does not support sequence parallelism"
        yield problem_of(job, "plan.sequence_parallel", sentence, "write sequence_parallel: false")


@rule("cp_comm is about context-parallel ranks, and cp = 1", reads="cp cp_comm")
def cp_comm_needs_cp(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.cp == 1 and plan.cp_comm != "ring":
        sentence = "selects the communication of context-parallel ranks, and cp = 1"
        yield problem_of(job, "plan.cp_comm", sentence, "remove it, or use a larger cp")


@rule("2 x cp must divide seq_len", reads="cp")
def cp_divides_sequence(job: Job) -> Iterator[Problem]:
    cp, model = job.plan.cp, job.model
    if cp > 1 and FAMILIES[model.family].task != "class" and model.seq_len % (2 * cp):
        sentence = (
            f"must be a multiple of 2 x cp = {2 * cp}: each rank takes an early and a late part of the sequence, "
            "so that causal attention is spread evenly"
        )
        fix = f"use {either(nearest_multiples(model.seq_len, 2 * cp))}, or another plan.cp"
        yield problem_of(job, "model.seq_len", sentence, fix)


@rule("cp x tp must divide the heads for all-to-all", reads="cp cp_comm tp")
def a2a_divides_heads(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.cp == 1 or plan.cp_comm != "a2a":
        return
    for key in _HEADS:
        heads = getattr(job.model, key)
        if heads % (plan.cp * plan.tp):
            sentence = (
                f"cp x tp = {plan.cp * plan.tp} must divide model.{key} = {heads}: all-to-all trades tokens for heads"
            )
            yield problem_of(job, "plan.cp", sentence, "use plan.cp_comm = ring or all_gather, or a smaller cp")


@rule("tp must divide the shared expert", reads="tp")
def tp_divides_shared_expert(job: Job) -> Iterator[Problem]:
    if job.model.num_experts:
        key = "shared_expert_intermediate_size"
        yield from undivided(job, "plan.tp", f"model.{key}", getattr(job.model, key), ": each rank has as many columns")


@rule("tp must divide hidden_size with layers for multi-token prediction", reads="tp")
def tp_divides_mtp(job: Job) -> Iterator[Problem]:
    if job.model.mtp_num_layers:
        why = ", the columns of a projection that ranks split (mtp_num_layers)"
        yield from undivided(job, "plan.tp", "model.hidden_size", job.model.hidden_size, why)


@unmodelled("ring attention on CPU ranks is not modeled", reads="cp cp_comm", reads_cluster=True)
def ring_on_cpus(job: Job) -> Iterator[Problem]:
    if job.plan.cp > 1 and job.plan.cp_comm == "ring" and job.cluster.device.kind == "cpu":
        yield not_modelled(job, "plan.cp_comm", "ring attention on CPU ranks", "use all_gather or a2a")


@unmodelled("context parallelism of some kinds of attention is not modeled", reads="cp")
def cp_of_attention(job: Job) -> Iterator[Problem]:
    words = FAMILIES[job.model.family].whole_attention
    if words and job.plan.cp > 1:
        yield not_modelled(job, "plan.cp", f"context parallelism with {words}", "use 1")


@unmodelled("tensor parallelism with a norm over heads of several ranks is not modeled", reads="tp")
def tp_of_wide_norms(job: Job) -> Iterator[Problem]:
    if job.model.qk_norm == "projection" and job.plan.tp > 1:
        what = "a norm over heads of several ranks (qk_norm = projection)"
        yield not_modelled(job, "plan.tp", what, "use 1")


@unmodelled("tensor parallelism of this model is not modeled", reads="tp")
def tp_modelled(job: Job) -> Iterator[Problem]:
    whole = FAMILIES[job.model.family].whole_layers
    if whole and job.plan.tp > 1 and job.model.captured is None:  # a capture says which degrees there are
        yield not_modelled(job, "plan.tp", f"tensor parallelism of {whole}", "use 1")


@unmodelled("sequence parallelism of this model is not modeled", reads="sequence_parallel tp")
def sequence_parallel_modelled(job: Job) -> Iterator[Problem]:
    family = FAMILIES[job.model.family]
    if job.plan.sequence_parallel and job.plan.tp > 1 and family.task == "class" and not family.whole_layers:
        what = "sequence parallelism of patches and a class token"
        yield not_modelled(job, "plan.sequence_parallel", what, "use false")


@unmodelled("context parallelism of this model is not modeled", reads="cp")
def cp_modelled(job: Job) -> Iterator[Problem]:
    family = FAMILIES[job.model.family]
    if job.plan.cp == 1:
        return
    what = ""
    if family.whole_layers:
        what = f"context parallelism of {family.whole_layers}"
    elif family.task == "class":
        what = "context parallelism of patches and a class token"
    elif family.task == "masked_token":
        what = "context parallelism of a loss over masked tokens, of which ranks have unequal numbers,"
    if what:
        yield not_modelled(job, "plan.cp", what, "use 1")


@unmodelled("ring attention of this model is not modeled", reads="cp cp_comm")
def ring_modelled(job: Job) -> Iterator[Problem]:
    family = FAMILIES[job.model.family]
    if job.plan.cp == 1 or job.plan.cp_comm != "ring":
        return
    if family.whole_layers or family.task in ("class", "masked_token"):
        return  # of which no context parallelism is modeled
    if family.alibi or any(job.model.windows):
        what = f"ring attention {'with ALiBi' if family.alibi else 'in a window'}"
        yield not_modelled(job, "plan.cp_comm", what, "use all_gather or a2a")


@unmodelled("context parallelism of unfused attention is not modeled", reads="cp")
def cp_of_unfused_attention(job: Job) -> Iterator[Problem]:
    if job.plan.cp > 1 and job.software.layers.attention == "unfused":
        what = f"context parallelism of unfused attention, which {job.software.id} has,"
        yield not_modelled(job, "plan.cp", what, "use 1")


@unmodelled("context parallelism of packed documents is Transformer Engine's", reads="cp")
def cp_of_documents(job: Job) -> Iterator[Problem]:
    """TransformerEngine at d0067d0d, context_parallel.py: qkv_format thd, each document in 2 cp equal parts."""
    lengths, plan = job.model.document_lengths, job.plan
    if not lengths or plan.cp == 1:
        return
    what = "context parallelism of several documents in a sequence"
    if job.software.packed_attention != "one_call":
        yield not_modelled(job, "plan.cp", f"{what} with {job.software.id}", "use 1, or software: megatron-bridge")
    elif plan.cp_comm == "all_gather":
        yield not_modelled(job, "plan.cp_comm", what, "use ring or a2a")
    elif min(lengths) < 2 * plan.cp:
        what = f"{what}, one of them of {counted(min(lengths), 'token')},"
        yield not_modelled(job, "plan.cp", what, f"use documents of {2 * plan.cp} tokens or more")
