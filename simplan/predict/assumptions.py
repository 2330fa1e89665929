"""Assumptions of a prediction, as sentences for its reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simplan.cluster.hardware import ClusterSpec, DeviceSpec
from simplan.cluster.topology import hashed
from simplan.cost.model import Limit, Provenance
from simplan.cost.program_costs import ProgramCosts
from simplan.job import Job
from simplan.model.families import FAMILIES
from simplan.optimizers import OPTIMIZERS
from simplan.plan.replication import Replication
from simplan.prediction import RankMemory
from simplan.program.program import MemoryCategory
from simplan.program.timeline import SpanKind
from simplan.rules.collectives import unused_collectives
from simplan.software.software import SoftwareSpec
from simplan.units import GIB, counted, format_bytes, format_percent

_NOTEWORTHY = 0.01
"""Fraction of computing above which waiting for the host is mentioned."""
_LARGE_BUFFERS = 0.1
"""Fraction of the peak memory above which communication buffers are explained."""


def assumptions(job: Job, program_costs: ProgramCosts, short_bytes: int) -> tuple[str, ...]:
    """Sentences on the assumptions of a prediction.

    Args:
        job, program_costs: Predicted job, and cost estimates of its step.
        short_bytes: Bytes that the allocator would reserve additionally on a larger device; 0 if the plan does not fit.
    """
    return (
        *_of_model(job),
        *_of_plan(job),
        *_of_preferences(job),
        *_of_costs(job, program_costs),
        *_of_machine(job, program_costs, short_bytes),
        *_of_offload(job),
    )


def _of_model(job: Job) -> Iterator[str]:
    """Sentences on the model."""
    model, software = job.model, job.software
    yield from padding_assumption(job)
    if model.captured is not None and model.captured.images is not None:
        yield f"every sequence has {model.captured.images}, as in the capture: those of a run are in its data"
        if model.lora_rank and job.plan.recompute != "none" and not model.captured.input_embeddings:
            yield (
                "a frozen tower has no backward pass: hooks that recomputation makes PEFT set on patch embeddings "
                "(enable_input_require_grads) would give it one, and are not modeled"
            )
    longest, most = max(model.segments), model.max_position_embeddings
    if longest > most > 0:
        what = "a document" if model.document_lengths else "a sequence"
        yield (
            f"{what} of {longest:,} tokens is longer than the model takes (max_position_embeddings = {most:,}): time "
            "and memory are as if it took them"
        )
    if model.family == "deepseek":
        yield "tokens choose among all experts, not among those of a few groups (n_group)"
        if not model.mtp_num_layers:
            with_it = "" if software.mtp else f", which is all that is modeled with {software.id}"
            yield f"no layer predicts a second token, as mtp_num_layers = 0{with_it}"
    if FAMILIES[model.family].soft_cap:
        yield (
            "scores of attention are tensors, as in Hugging Face's eager attention and in Megatron Bridge: kernels "
            "that cap them inside (flash-attn from 2.6 on, flex_attention) are not modeled"
        )


def _of_plan(job: Job) -> Iterator[str]:
    """Sentences on training and plan."""
    training, plan, software = job.training, job.plan, job.software
    if plan.zero_stage and plan.dp_shard * plan.cp == 1:
        yield f"zero_stage = {plan.zero_stage} shards nothing, as dp_shard = 1"
    microbatches = job.num_microbatches
    if plan.shards_parameters and microbatches > 1 and plan.reduces_every_microbatch:
        how = f"as {software.id} does by default"
        yield f"sharded gradients are reduced after each of {microbatches} microbatches, {how}"
    elif plan.shards_parameters and microbatches > 1:
        why = f"in pipelines of {software.id}" if plan.grad_sync is None else "as grad_sync = step"
        yield f"unsharded gradients of {microbatches} microbatches accumulate before reduction, {why}"
    if len(set(plan.sizes_of_ranks)) > 1:
        yield (
            "every data-parallel rank weights its loss by its part of the sequences, so that gradients are the mean "
            f"over all sequences; {software.id} needs a training loop that does so"
        )
    state = software.state(training, plan)
    if state.residual > state.activation:
        name = "FP16" if training.precision == "fp16" else "BF16"
        yield (
            f"under autocast the residual stream is saved in FP32 and other activations in {name}; FSDP's mixed "
            f"precision saves both in {name}, so DDP and ZeRO-1 need more activation memory than FSDP"
        )
    if training.precision == "fp16":
        yield (
            "fp16: of the loss scaler are not modeled its pass over the gradients of a rank (8 bytes each, read and "
            "written once a step) and steps that it skips"
        )
    for kind, algorithm in unused_collectives(job) if plan.collectives is not None else ():
        name = kind.replace("_", "-")
        yield f"the plan has no {name}: no effect of plan.collectives.{kind} = {algorithm}"
    if plan.ep == 1 and software.expert_dispatch in ("deepep", "hybridep"):
        yield "every rank has all experts, as ep = 1: no effect of software.expert_dispatch"


def _of_preferences(job: Job) -> Iterator[str]:
    """Sentences on what preference training counts, and leaves out."""
    training = job.training
    if not training.is_of_preferences:
        return
    passes = len(training.passes(job.reference))
    if training.sequences_per_sample > 1:
        yield (
            "a batch counts pairs of a chosen and a rejected sequence, both of model.seq_len tokens; tokens/s count "
            "both"
        )
    if passes:
        what = "the forward" if passes == 1 else f"the {passes} forwards"
        yield f"MFU counts {what} without gradients of every sequence, and tokens/s do not"
    if job.reference == "precomputed":
        yield "the pass over the data that computes the reference's log-probabilities is before training, in no step"
    if training.task == "kto":
        yield (
            "the KL term is the mean over the microbatch of a rank: TRL averages it over ranks, by a collective of a "
            "few bytes that is not modeled"
        )


def _host_share(program_costs: ProgramCosts) -> float:
    """Fraction of the time of layers in which the device waits for the host; 0 if the host was timed."""
    waiting = total = 0.0
    for term in program_costs.terms:
        estimate = term.cost_estimate
        if estimate.provenance is Provenance.CALIBRATED or term.kind is SpanKind.HOST:
            continue
        total += term.count * estimate.seconds
        waiting += term.count * sum(part.seconds for part in estimate.parts if part.limit is Limit.HOST)
    return waiting / total if total else 0.0


def _of_costs(job: Job, program_costs: ProgramCosts) -> Iterator[str]:
    """Sentences on the sources of cost estimates."""
    cluster, software = job.cluster, job.software
    provenances = {term.cost_estimate.provenance for term in program_costs.terms if term.cost_estimate.seconds > 0}
    known = {Provenance.DATASHEET, Provenance.PUBLISHED}
    if provenances & known and Provenance.CALIBRATED in provenances:
        names = sorted(
            {t.name for t in program_costs.terms if t.cost_estimate.provenance in known and t.cost_estimate.seconds > 0}
        )
        yield f"not timed, so estimated from datasheets: {', '.join(names)}"
    elif provenances & known:
        for device in dict.fromkeys(group.device for group in cluster.node_groups) or (cluster.device,):
            yield _source_of_estimates(device, software, of_transformer=not job.model.depths)
            if device.warning is not None:
                yield f"{device.id}: {device.warning}"
    if Provenance.EXTRAPOLATED in provenances:
        names = sorted({t.name for t in program_costs.terms if t.cost_estimate.provenance is Provenance.EXTRAPOLATED})
        yield f"outside of what was calibrated: {', '.join(names)}"
    if (share := _host_share(program_costs)) > _NOTEWORTHY:
        yield (
            f"{format_percent(share)} of computing is waiting for the host, whose speed is assumed and differs by "
            "several times between machines: `simplan calibrate` on one device measures it"
        )


def _of_machine(job: Job, program_costs: ProgramCosts, short_bytes: int) -> Iterator[str]:
    """Sentences on the device, its allocator, the framework and the links."""
    cluster, software = job.cluster, job.software
    if cluster.device.kind != "cpu":
        share = software.allocator_reserve
        yield (
            f"the allocator reserves {share:.0%} of transient memory in addition, in whole 2 MiB blocks"
            if share
            else "reserved memory is allocated memory in whole 2 MiB blocks; fragmentation is not modeled"
        )
        yield "the rate at which the host issues kernels bounds every layer; loading data takes no time"
    yield from _of_communicators(job)
    if short_bytes:
        yield (
            f"the allocator finds {format_bytes(short_bytes)} less than it would reserve, so it frees cached "
            "blocks and retries; that time is not modeled"
        )
    if software.not_modelled:
        things = counted(len(software.not_modelled), "thing")
        yield f"{things} that {software.id} does and simplan does not model: `simplan show software {software.id}`"
    if cluster.cores_per_node is not None:
        yield f"ranks share {cluster.cores_per_node} cores (processor sharing)"
    if program_costs.beside is not None:
        slowdown = format_percent(program_costs.overlap_slowdown)
        yield f"compute that overlaps communication loses {slowdown} of its throughput"
    if cluster.is_mixed:
        yield "communication between different nodes moves at the rate of the slowest of their links"
    if cluster.stragglers:
        slow = "; ".join(each.words for each in cluster.stragglers)
        yield f"slow ranks: {slow} the time of the others to compute; `simplan explain` says what they cost"
    if cluster.jitter is not None:
        yield (
            f"jitter: {cluster.jitter.words} time, independent for every rank and action (seed {cluster.jitter.seed}); "
            "shown is the simulated step nearest to the mean, and the interval is that of its cost estimates"
        )
    if job.training.backup_workers:
        yield (
            "backup workers: gradients are averaged after backward, once those that are kept are complete, which costs "
            "the same as an all-reduce of all replicas; a dropped replica delays no other and takes the mean; the "
            "effect of dropped gradients on the loss is not predicted"
        )
    if (compression := job.plan.compression) is not None:
        kernels = "; kernels that compress were not timed, and may take half or twice as long"
        yield f"{compression.words}: its effect on the loss is not predicted{kernels}"
    if (replication := job.plan.replication) is not None:
        yield from _of_workers(job, replication)
        equal = "; fragments are of equal size" if replication.outer_steps > 1 else ""
        yield f"{replication.words}: its effect on the loss is not predicted{equal}"
    meets = job.plan.replication is None or not job.plan.replication.has_workers
    if any(term.kind is SpanKind.COMMUNICATION for term in program_costs.terms) and cluster.num_nodes > 1 and meets:
        yield from _of_links(cluster)


def _of_workers(job: Job, replication: Replication) -> Iterator[str]:
    """Sentences on workers that do not wait for all others; none for other replicas."""
    if not replication.has_workers:
        return
    yield (
        "the step time is that in which one gradient per worker is applied; updates by single, stale gradients are no "
        "update by the mean of a global batch, so the loss may need another number of steps"
    )
    if replication.kind == "hogwild":
        yield "shared parameters are updated at the bandwidth of memory that is not shared; caches are not modeled"
        if OPTIMIZERS[job.training.optimizer].num_states:
            yield f"hogwild: every process has states of {job.training.optimizer} of its own, of its own gradients"
        return
    where = "the CPU of a node" if job.cluster.device.kind != "cpu" else "a process of its own"
    apart = " apart, which no device-hours count" if replication.server_nodes == "apart" else ""
    yield (
        f"a parameter server is on {where}{apart}, and has optimizer states; a worker has none, and joins its "
        "gradients in one buffer; transfers share the network of a node max-min fairly, and alone are P2P sends"
    )
    if job.training.optimizer in ("sgd_momentum", "adam", "adamw") and replication.max_steps_ahead is None:
        yield (
            f"{job.training.optimizer} with unbounded staleness may diverge: momentum of 0.9 did in a trial with small "
            "models; sgd is safer, or a lower learning rate"
        )


def _of_communicators(job: Job) -> Iterator[str]:
    """Sentence on buffers of NCCL that device memory leaves out, of a rank with several communicators.

    Source: NCCL 2.30 has 10 MiB at the receiver and 2 MiB at the sender for each channel and peer of a communicator
    inside a node (``src/init.cc``, ``src/transport/p2p.cc``). On four A100 a communicator of two ranks took 544 MB, and
    one of more 688 MB (https://github.com/NVIDIA/nccl/issues/964, 2023-08-16).
    """
    plan, software = job.plan, job.software
    number = sum(size > 1 for size in (plan.tp, plan.cp, plan.ep, plan.dp_shard, plan.dp_replicate))
    number += min(plan.pp - 1, 2)
    counted_bytes = software.context_bytes.get("gpu", 0)
    if job.cluster.device.kind == "gpu" and software.runtime != "xla" and number > 1 and counted_bytes <= GIB:
        yield (
            "of NCCL's buffers, device memory has those of about one communicator, and a rank of this plan has "
            f"{number}: over NVLink each takes 0.5 to 0.7 GiB more"
        )


def _of_links(cluster: ClusterSpec) -> Iterator[str]:
    """Sentences on contention and flapping links."""
    if cluster.topology is None:
        yield "links are not shared with other jobs, and flows do not slow each other down"
        return
    flapping = [slow for slow in cluster.slow_links if slow.period_s is not None]
    if flapping:
        listed = "; ".join(
            f"{slow.link}, {format_percent(slow.bandwidth_share)} of its bandwidth for {slow.slow_s:g} s of every "
            f"{slow.period_s:g} s"
            for slow in flapping
        )
        yield f"flapping links: {listed}, from a fixed time of the step on; no packet is lost or sent again"
    if (own := hashed(cluster.topology)) is not None:
        more = "" if own.num_seeds > 1 else "; num_seeds: 20 says how much other seeds change"
        yield f"a hash picks a path of the fewest links for every connection (ECMP, seed {own.seed}){more}"
    if cluster.background_jobs:
        yield (
            "background jobs repeat their steps, as estimated from datasheets; this step begins with one of theirs, or "
            "offset_s into it, and takes another time at another offset"
        )
    others = "with the background traffic" if cluster.background else "with no other job"
    yield (
        f"communications share the links of the topology max-min fairly, {others}; latency does not grow with load, "
        "and no packet is lost"
    )


def _of_offload(job: Job) -> Iterator[str]:
    """Sentences on host memory."""
    plan, cluster = job.plan, job.cluster
    is_cpu = cluster.device.kind == "cpu"
    if plan.offload_optimizer or plan.offload_activations:
        yield (
            "host and device are one memory here: offloading saves nothing"
            if is_cpu
            else "buffers on the host are pinned, every device has its host link to itself, and the memory of the host "
            "is as fast as all links together"
        )
    if plan.offload_optimizer and not is_cpu:
        yield (
            "the optimizer runs at the bandwidth of the host's memory, of which ranks of a node have equal parts; that "
            "takes enough bound threads (torchrun sets OMP_NUM_THREADS=1 unless it is given); else updates take about "
            "5 times as long, which the 90 % interval of the step time includes"
        )


def buffer_assumption(job: Job, worst: RankMemory) -> tuple[str, ...]:
    """Sentence on the communication buffers of a pipeline of torch; empty if they are at most 10 % of the memory.

    Source: torch 2.13, pipelining/stage.py (``args_recv_info`` and ``grad_recv_info`` have an entry per microbatch) and
    pipelining/schedules.py (sends are waited for after the last action).

    Args:
        worst: Memory of the peak-memory rank.
    """
    num_bytes = worst.by_category.get(MemoryCategory.BUFFERS, 0)
    share = num_bytes / max(1, sum(worst.by_category.values()))
    if job.plan.pp == 1 or not job.software.preallocated_receives or share <= _LARGE_BUFFERS:
        return ()
    return (
        f"communication buffers take {format_bytes(num_bytes)} of rank {worst.rank}: torch's pipelining allocates a "
        f"receive buffer for each of {job.num_microbatches} microbatches from each neighboring stage before the first "
        "step, and keeps sent tensors to the end of the step; Megatron-LM does neither",
    )


def pages_assumption(job: Job, memory: Sequence[RankMemory]) -> Iterator[str]:
    """Sentences on optimizer states in managed memory (bitsandbytes, docs/source/explanations/optimizers.mdx)."""
    worst = max(memory, key=lambda rank: (rank.evicted_bytes, rank.paged_bytes))
    if not worst.paged_bytes:
        return
    yield (
        f"{format_bytes(worst.paged_bytes)} of states of {job.training.optimizer} are in managed memory, as those of "
        "tensors from 100,000 elements on: torch's counters (allocated, reserved) do not have them, the device "
        "(NVML) does as far as there is room, and a rank fits if everything else does"
    )
    link = job.cluster.host_link
    if worst.evicted_bytes:
        seconds = "" if link is None else f", about {4 * worst.evicted_bytes / link.bytes_per_s:.2g} s"
        yield (
            f"{format_bytes(worst.evicted_bytes)} of them have no room and move to the device and back in every "
            f"step, at about half of the bandwidth of the host link{seconds} more, which the step time does not include"
        )


def padding_assumption(job: Job) -> tuple[str, ...]:
    """Sentence on the padded vocabulary; empty if the software does not pad it."""
    size, padded, software = job.model.vocab_size, job.padded_model.vocab_size, job.software
    if padded == size:
        return ()
    multiple = software.vocab_multiple * job.plan.tp
    return (
        f"model.vocab_size = {size}: padded to {padded}, a multiple of {software.vocab_multiple} x tp = {multiple}, as "
        f"{software.id} does; parameters and FLOPs of the model, and MFU, are without padding",
    )


def _source_of_estimates(device: DeviceSpec, software: SoftwareSpec, *, of_transformer: bool) -> str:
    """Source and uncertainty of cost estimates on a device without calibration."""
    name = device.id
    if device.kernels.fitted_on is None:
        return (
            f"{name} is estimated from datasheets: no published run on {device.architecture} was seen; a wide interval"
        )
    if software.rates.fitted_on is None:
        own = f"but none of {software.id}, hence the wide interval"
    elif not of_transformer:
        own = "but none of convolutions, hence the wide interval"
    else:
        own = f"and of {software.rates_profile}" + f", with the kernels of {software.id}" * (
            software.rates_of is not None
        )
    return f"{name} is estimated from datasheets and rates fitted on published runs of {device.architecture}, {own}"
