"""Prediction as text: verdict, time, memory, cost terms with their uncertainty, and assumptions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simplan.documentation import documentation
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.placement import Placement
from simplan.plan.plan import ParallelPlan
from simplan.predict.memory import loading_of
from simplan.prediction import Prediction, RankMemory, TrainingRun
from simplan.program.timeline import Split
from simplan.report.table import format_ranks, format_table_text
from simplan.rules import violations
from simplan.software.loading import LoadingMethod
from simplan.software.loading_peaks import LoadingPeaks
from simplan.units import (
    counted,
    format_bytes,
    format_count,
    format_flop_per_s,
    format_number,
    format_percent,
    format_rate,
    format_time,
)
from simplan.wording import either

if TYPE_CHECKING:
    from simplan.explain import Explanation
    from simplan.search import Fix

_MAX_TERMS = 8
_SHOWN_S = 1e-7
"""Parts of the step below it are rounding errors of the simulation; they print as 0.0 us."""
_MAX_GROUPS = 16
_STAGES_SHOWN = 16


def verdict(prediction: Prediction) -> str:
    """One line: the verdict on memory, the peak-memory rank and the headroom."""
    worst = prediction.worst_memory
    needed_bytes = worst.needed_bytes
    needs = f"rank {worst.rank} needs {format_bytes(needed_bytes)}"
    capacity = prediction.capacity_bytes
    words = prediction.memory_verdict
    if prediction.fails_to_load and worst.fits is not False:
        return f"does not fit: {loading_failure(prediction)}"
    if prediction.host_fits is False:
        return f"does not fit: {_host_memory(prediction)}"
    if words is None or capacity is None:
        return f"{needs}; the catalog does not know the memory of {prediction.job.cluster.device.id}"
    headroom = capacity - needed_bytes
    share = format_percent(abs(headroom) / capacity)
    of = f"{needs} of {format_bytes(capacity)}, {format_bytes(abs(headroom))} ({share})"
    if prediction.fits and worst.short_bytes:
        tensors = format_bytes(worst.unavoidable_bytes)
        takes = f"tensors and context of rank {worst.rank} take {tensors} of {format_bytes(capacity)}"
        return f"{words}: {takes}; {short_of_reserve(worst.short_bytes)}"
    return f"{words}: {of} {'headroom' if prediction.fits else 'over'}{_reaches_over(prediction, worst)}"


def _reaches_over(prediction: Prediction, worst: RankMemory) -> str:
    """End of the 90 % interval on the other side of the device memory; empty for a certain verdict."""
    low, high = map(format_bytes, worst.device_interval_bytes)
    if prediction.memory_verdict in ("fits", "does not fit"):
        return ""
    if prediction.memory_verdict == "unknown":
        return f"; no peak under {prediction.job.software.id} was ever compared, and it may need less"
    return f"; the 90 % interval ends at {high}" if prediction.fits else f"; the 90 % interval starts at {low}"


def memory_interval(interval_bytes: tuple[int, int]) -> str:
    """``90 % interval 63.41 GiB to 72.73 GiB``."""
    return f"90 % interval {' to '.join(map(format_bytes, interval_bytes))}"


def device_memory_words(memory: RankMemory | Explanation) -> str:
    """``48.73 GiB``, or ``48.73 GiB with the allocator's whole reserve`` if the device has no memory for all of it."""
    return format_bytes(memory.device_bytes) + " with the allocator's whole reserve" * bool(memory.short_bytes)


def short_of_reserve(short_bytes: int) -> str:
    """Consequence of an allocator that finds ``short_bytes`` less memory than it would reserve."""
    return (
        f"the allocator would reserve {format_bytes(short_bytes)} more than there is, so it frees blocks and "
        "retries, and steps may be slower than predicted"
    )


def prediction_text(
    prediction: Prediction,
    next_steps: Iterable[str] = (),
    fixes: Sequence[Fix] = (),
    warning: str = "",
    *,
    assumed: Collection[str] = (),
) -> str:
    """Full report of a prediction as text.

    Args:
        prediction: A prediction.
        next_steps: Commands to suggest at the end.
        fixes: Changes with which the job fits.
        warning: Sentence below the verdict; empty for none.
        assumed: ``plan``, ``batch`` or both, if they were not given, to say so.
    """
    headline = verdict(prediction)
    if "plan" in assumed and "does not fit" in headline.partition(":")[0]:
        headline = f"the assumed plan {headline}"
    parts = [
        f"{prediction.name}: {headline}" + (f"\n{warning}" if warning else ""),
        "\n".join(_headline(prediction)),
        "\n".join(_inputs_of_job(prediction, batch_is_assumed="batch" in assumed)),
        *([_node_groups_table(prediction)] if prediction.job.cluster.is_mixed else []),
        _split_table(prediction),
        _worst_memory_table(prediction),
        _rank_memory_table(prediction),
        _terms_table(prediction),
    ]
    if prediction.assumptions:
        parts.append("Assumptions\n" + "\n".join(f"  - {text}" for text in prediction.assumptions))
    if fixes:
        may = " or may fit" if any(fix.is_unsure for fix in fixes) else ""
        parts.append(f"Smallest changes that fit{may}, each predicted\n" + fixes_table(fixes))
    if "does not fit" in headline.partition(":")[0]:
        parts.append(f"What uses the memory, and what shrinks it: {documentation('how-to/troubleshooting')}")
    return "\n\n".join([*parts, *suggestions(next_steps)])


def fixes_table(fixes: Sequence[Fix]) -> str:
    """Table of changes: peak memory, headroom, verdict and step time of each."""
    rows = [
        [
            fix.words,
            format_bytes(fix.device_bytes),
            format_bytes(fix.headroom_bytes),
            fix.memory_verdict or "?",
            format_time(fix.step_time_s),
            f"{100 * fix.step_time_change:+.1f} %",
        ]
        for fix in fixes
    ]
    return format_table_text(["change", "peak memory", "headroom", "verdict", "step time", "vs now"], rows)


def suggestions(next_steps: Iterable[str]) -> list[str]:
    """Paragraph of a report with commands to run next, if there are any."""
    lines = [f"  {text}" for text in next_steps]
    return ["\n".join(["Next", *lines])] if lines else []


def _headline(prediction: Prediction) -> Iterator[str]:
    low_s, high_s = prediction.step_time_interval_s
    yield (
        f"  step time    {format_time(prediction.step_time_s)}  "
        f"(90 % interval {format_time(low_s)} to {format_time(high_s)})"
    )
    worst = prediction.worst_memory
    interval = memory_interval(worst.device_interval_bytes)
    more = f"; {device_memory_words(worst)}" if worst.short_bytes else ""
    yield f"  memory       {format_bytes(worst.needed_bytes)}  ({interval}{more})"
    if prediction.weakest_term is not None:
        yield f"  least known  {prediction.weakest_term.fact}"
    yield f"  throughput   {_throughput(prediction)} per device"
    if prediction.training_run is not None:
        noun = "tokens" if prediction.job.model.sample == "sequence" else f"{prediction.job.model.sample}s"
        yield from _training_run(prediction.training_run, noun)
    yield f"  MFU          {_mfu(prediction)}"
    idle = format_percent(prediction.bubble_fraction)
    yield f"  idle         {idle} of the time between first and last computation (bubble and exposed communication)"
    if prediction.loading is not None:
        yield f"  loading      {_loading(prediction.loading, prediction.capacity_bytes)}"
    if prediction.worst_host_bytes:
        yield f"  host memory  {_host_memory(prediction)}"
    if prediction.network is not None:
        yield f"  {prediction.network.label} {prediction.network.slowest_words()}"
        yield f"  contention   {prediction.network.contention_words()}"
        if words := prediction.network.background_words():
            yield f"  other jobs   {words}"
    if prediction.hashing is not None:
        yield f"  ECMP         {prediction.hashing.words}"
    if prediction.jitter is not None:
        yield f"  jitter       {prediction.jitter.words}"
    if prediction.backup_workers is not None:
        yield f"  backup       {prediction.backup_workers.words}"
    if prediction.compression is not None:
        yield f"  compression  {prediction.compression.words}"
    if prediction.replication is not None:
        yield f"  replication  {prediction.replication.words}"
        for fewer in prediction.replication.left:
            yield f"  goes on      {fewer.words}"


def _training_run(run: TrainingRun, noun: str) -> Iterator[str]:
    days = f"{_rounded(run.days)} days{_interval(run.days_interval)}"
    yield (
        f"  training     {format_count(run.num_tokens)} {noun} in {run.num_steps:,} steps: {days}, "
        f"{_rounded(run.device_hours)} device-hours"
    )
    if run.cost is not None:
        cost = f"{_rounded(run.cost)}{_interval(run.cost_interval)}"
        yield f"  cost         {cost} at {format_number(run.price_per_device_hour or 0.0)} per device-hour"


def _interval(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" ({' to '.join(map(_rounded, interval))})"


def _rounded(value: float) -> str:
    """Three digits, or all digits before the point.

    >>> _rounded(0.04321), _rounded(44.32), _rounded(17_010.4)
    ('0.0432', '44.3', '17,010')
    """
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _host_memory(prediction: Prediction) -> str:
    """Bytes offloaded per rank and per node, next to the host memory of a node."""
    per_rank = format_bytes(max(memory.host_bytes for memory in prediction.memory))
    used, capacity = prediction.worst_host_bytes, prediction.job.cluster.host_memory_bytes
    offloaded = f"{per_rank} offloaded per rank, {format_bytes(used)} per node"
    if capacity is None:
        return offloaded
    if prediction.host_fits:
        return f"{offloaded} of {format_bytes(capacity)}"
    return f"{offloaded}: does not fit, it has {format_bytes(capacity)} ({format_bytes(used - capacity)} over)"


def loading_failure(prediction: Prediction) -> str:
    """Memory that is missing while the model is loaded, and the ways out, of a prediction that ``fails_to_load``."""
    loading, device, host = prediction.loading, prediction.capacity_bytes, prediction.job.cluster.host_memory_bytes
    assert loading is not None
    what, needs, has = "a device", loading.device_bytes, device or 0
    if host is not None and loading.host_bytes > host:
        what, needs, has = "the host memory of a node", loading.host_bytes, host
    others = [way for way in prediction.job.software.checkpoint.methods if _loads_by(prediction, way)]
    fix = f"; use software.loading: {either(others)}" if others else ""
    return (
        f"loading the model needs {format_bytes(needs)} of {what}, which has {format_bytes(has)} "
        f"({format_bytes(needs - has)} over): {loading.words}{fix}"
    )


def _loads_by(prediction: Prediction, way: LoadingMethod) -> bool:
    """True if the model fits while it is loaded in another way."""
    software = prediction.job.software.model_copy(update={"loading": way})
    job = replace(prediction.job, software=software)
    if violations(job):
        return False
    peaks = loading_of(job, prediction.assignment, prediction.table, None)
    return not replace(prediction, job=job, loading=peaks).fails_to_load


def _loading(loading: LoadingPeaks, capacity_bytes: int | None) -> str:
    """Peaks of device and host while the model is loaded, and who loads it."""
    of = "" if capacity_bytes is None else f" of {format_bytes(capacity_bytes)}"
    host = f"host memory {format_bytes(loading.host_bytes)} per node"
    mapped = f" besides {format_bytes(loading.mapped_bytes)} of mapped files" * bool(loading.mapped_bytes)
    return f"device {format_bytes(loading.device_bytes)}{of}, {host}{mapped}: {loading.words}"


def _throughput(prediction: Prediction) -> str:
    if prediction.job.model.sample != "sequence":
        return f"{prediction.samples_per_s_per_device:,.1f} {prediction.job.model.sample}s/s"
    tokens, documents = prediction.tokens_per_s_per_device, prediction.document_tokens_per_s_per_device
    without = f" ({documents:,.0f} without padding)" if documents < tokens else ""
    return f"{tokens:,.0f} tokens/s{without}"


def _mfu(prediction: Prediction) -> str:
    job = prediction.job
    precision = job.training.precision
    if prediction.mfu is None:
        return f"unknown: no {precision} peak is known for {job.cluster.devices_in_words}"
    flops = job.flops_per_step()
    full = prediction.mfu_full_attention
    causal = full is not None and full != prediction.mfu
    palm = f"; {format_percent(full)} with full attention counted (PaLM)" if causal and full is not None else ""
    counted_once = "causal attention, no recompute" if causal else "no recompute"
    counted_once += ", no padding" if job.model.document_share < 1 else ""
    return (
        f"{format_percent(prediction.mfu)} = {format_number(flops / 1e12)} TFLOP ({counted_once}) / "
        f"({format_time(prediction.step_time_s)} x {_peak_words(job)} dense {precision} peak){palm}"
    )


def _peak_words(job: Job) -> str:
    """Dense peak of all devices: ``8 devices x 989 TFLOP/s``, or the sum over unequal devices."""
    cluster, precision = job.cluster, job.training.precision
    if not cluster.is_mixed:
        peak = cluster.device.peak_flop_per_s[precision]
        return f"{counted(cluster.num_devices, 'device')} x {format_flop_per_s(peak)}"
    parts = [
        f"{group.num_nodes * cluster.devices_per_node} x {format_flop_per_s(group.device.peak_flop_per_s[precision])}"
        for group in cluster.node_groups
    ]
    return f"({' + '.join(parts)})"


def _task(job: Job) -> str:
    """Task of preference training with its reference model, and a comma; empty for other tasks."""
    if not job.training.is_of_preferences:
        return ""
    words = {"adapters_off": "adapters off", "second_model": "a second model", "none": ""}
    reference = words.get(job.reference, job.reference)
    return f"{job.training.task}{reference and f' (reference: {reference})'}, "


def _precision(job: Job) -> str:
    training = job.training
    if training.base_weights is not None:
        return f"{training.precision}, base weights in {training.base_weights.words}"
    if training.fake_quantization is not None:
        return f"{training.precision}, simulating {training.fake_quantization.words}"
    if not training.pure_bf16:
        return training.precision
    return (
        f"pure {training.precision}"
        if training.precision in ("bf16", "fp16")
        else f"{training.precision} with pure bf16"
    )


def _inputs(model: ModelSpec) -> str:
    if model.sample != "sequence":
        return f"images of {model.image_size} x {model.image_size}" if model.sample == "image" else "captured from code"
    number = len(model.document_lengths)
    return f"sequences of {model.seq_len} tokens" + (f" with {counted(number, 'document')}" if number else "")


def _inputs_of_job(prediction: Prediction, *, batch_is_assumed: bool) -> Iterator[str]:
    job = prediction.job
    model, cluster, plan, training = job.model, job.cluster, job.plan, job.training
    named = "" if cluster.id == "inline" else f"{cluster.id}: "
    trained = ""
    if model.num_trained_parameters != model.num_parameters:
        how = f"LoRA of rank {model.lora_rank}" if model.lora_rank else f"all but {', '.join(model.frozen)}"
        trained = f" ({format_count(model.num_trained_parameters)} trained, {how})"
    num_tokens = training.global_batch_size * training.sequences_per_sample * model.seq_len
    tokens = "" if model.sample != "sequence" else f" ({num_tokens:,} tokens)"
    mtp = f" and {model.mtp_num_layers} for multi-token prediction" if model.mtp_num_layers else ""
    yield (
        f"  model        {model.name}, {format_count(model.num_parameters)} parameters{trained}, "
        f"{model.num_blocks} layers{mtp}, {_inputs(model)}"
    )
    place = ""
    if cluster.background_jobs:
        place = f" (nodes {format_ranks(cluster.fabric_nodes)} of {cluster.num_fabric_nodes} on the topology)"
    yield (f"  cluster      {named}{cluster.devices_in_words}, {cluster.nodes_in_words}{place}")
    if links := links_words(cluster.links):
        yield f"  links        {'the slowest of all nodes: ' if cluster.is_mixed else ''}{links}"
    per_step = "per step" + " (assumed; give --global-batch-size)" * batch_is_assumed
    yield (
        f"  training     {counted(training.global_batch_size, job.sample)}{tokens} {per_step}, "
        f"{_task(job)}{_precision(job)}, "
        f"{training.update.replace('_foreach', ' (foreach)')}, software {job.software.title}"
    )
    of_rank = microbatch_words(job.num_microbatches, plan.sizes_of_ranks, job.sample)
    yield f"  plan         {plan_words(plan)}; {of_rank}"
    if job.placement_words:
        yield f"  placement    {job.placement_words}"
    if plan.pp > 1:
        blocks = prediction.assignment.stage_layers(model.num_last_layers)
        yield f"  stages       {_in_runs(blocks)} layers (plan.stage_layers), besides embedding and head"


def _node_groups_table(prediction: Prediction) -> str:
    """Table of the step on each group of nodes: which one limits it, waits and memory."""
    headers = ["devices", "ranks", "pipeline ranks", "microbatch", "wait", "", "peak memory", "of", "verdict", "limits"]
    rows = []
    for group in prediction.node_groups:
        capacity = group.worst.capacity_bytes
        row = [
            f"{len(group.ranks)} x {group.device}",
            format_ranks(group.ranks),
            format_ranks(group.pipeline_ranks),
            " or ".join(map(str, group.microbatch_sizes)),
            format_time(group.wait_s),
            format_percent(group.wait_s / prediction.step_time_s),
            format_bytes(group.worst.needed_bytes),
            "?" if capacity is None else format_bytes(capacity),
            group.memory_verdict or "?",
            "yes" if group.limits else "no",
        ]
        rows.append(row)
    several = prediction.job.plan.pp > 1
    kept = [place for place, header in enumerate(headers) if several or header != "pipeline ranks"]
    body = format_table_text([headers[place] for place in kept], [[row[place] for place in kept] for row in rows])
    return f"Node groups\n{body}"


def links_words(links: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Links of a cluster (``ClusterSpec.links``) with their datasheet bandwidth in one direction; empty without any.

    >>> inter = {"name": "tcp-10gbit", "bytes_per_s_per_device": 3.125e8, "bytes_per_s_per_node": 1.25e9}
    >>> links_words({"intra_node": None, "inter_node": inter | {"nics_per_node": 1}})
    'inter-node tcp-10gbit: 1 x 10 Gbit/s per node shared by 4 devices, 312 MB/s each'
    """
    words = []
    if (intra := links.get("intra_node")) is not None:
        words.append(f"intra-node {intra['name']}, {format_rate(intra['bytes_per_s_per_device'])} per device")
    if (inter := links.get("inter_node")) is not None:
        per_node, per_device, cards = (
            inter["bytes_per_s_per_node"],
            inter["bytes_per_s_per_device"],
            inter["nics_per_node"],
        )
        gbit = f"{cards} x {per_node * 8e-9 / cards:g}" if cards else f"{per_node * 8e-9:g}"
        shared = counted(round(per_node / per_device), "device")
        has_number_of_share = not cards and inter["name"] == f"network-{per_device * 8e-9:g}gbit"
        name = "network (InfiniBand or RoCE)" if has_number_of_share else inter["name"]
        words.append(f"inter-node {name}: {gbit} Gbit/s per node shared by {shared}, {format_rate(per_device)} each")
    if (topology := links.get("topology")) is not None:
        words.append(topology["description"])
    return "; ".join(words)


def _in_runs(numbers: Sequence[int]) -> str:
    """Numbers in order; many numbers are shortened to runs of equal ones.

    >>> _in_runs([3, 2, 2, 3]), _in_runs([3, *[2] * 30, 3])
    ('3, 2, 2, 3', '3, 30 x 2, 3')
    """
    runs = [(value, len(list(same))) for value, same in groupby(numbers)]
    if len(numbers) <= _STAGES_SHOWN:
        runs = [(value, 1) for value in numbers]
    return ", ".join(str(value) if count == 1 else f"{count} x {value}" for value, count in runs)


def microbatch_words(number: int, sizes: Sequence[int], sample: str) -> str:
    """Number and size of the microbatches of a data-parallel rank per step.

    Args:
        number: Microbatches of every data-parallel rank.
        sizes: Samples of a microbatch of each rank.
        sample: ``sequence``, ``pair`` or ``image``.

    >>> microbatch_words(16, [1, 1], "sequence"), microbatch_words(1, [1, 3], "sequence")
    ('16 microbatches of 1 sequence per data-parallel rank', '1 microbatch of 1 to 3 sequences per data-parallel rank')
    """
    several = f"{number} microbatches" if number > 1 else "1 microbatch"
    fewest = f"{min(sizes)} to " if min(sizes) < max(sizes) else ""
    return f"{several} of {fewest}{counted(max(sizes), sample)} per data-parallel rank"


def plan_words(plan: ParallelPlan) -> str:
    """Short form of a plan: every degree of parallelism above 1.

    >>> plan_words(ParallelPlan(pp=2, dp_shard=4))
    'pp 2 (1f1b), dp_shard 4 (ZeRO-3)'
    """
    parts = []
    if plan.pp > 1:
        stages = f" x {plan.virtual_stages} stages" if plan.virtual_stages > 1 else ""
        parts.append(f"pp {plan.pp}{stages} ({Path(plan.schedule).name})")
    if plan.dp_replicate > 1:
        parts.append(f"dp_replicate {plan.dp_replicate}")
    if plan.zero_stage and plan.dp_shard * plan.cp > 1:
        kept = "" if plan.reshard_after_forward or plan.zero_stage < 3 else ", not resharded after forward"
        over = f" over {plan.dp_shard * plan.cp} ranks" if plan.cp > 1 else ""
        parts.append(f"dp_shard {plan.dp_shard} (ZeRO-{plan.zero_stage}{over}{kept})")
    if isinstance(plan.fsdp_units, int):
        parts.append(f"FSDP units of {plan.fsdp_units:,} parameters or more")
    elif plan.fsdp_units is not None:
        parts.append(f"FSDP units {', '.join(plan.fsdp_units)}")
    if plan.ep > 1:
        parts.append(f"ep {plan.ep}")
    if plan.etp > 1:
        parts.append(f"etp {plan.etp}")
    if plan.tp > 1:
        parts.append(f"tp {plan.tp}{' with sequence parallelism' if plan.sequence_parallel else ''}")
    if plan.cp > 1:
        parts.append(f"cp {plan.cp} ({plan.cp_comm})")
    if plan.grad_sync == "step" and plan.shards_parameters and plan.pp == 1:
        parts.append("gradients reduced once per step")
    elif plan.grad_sync == "microbatch" and not plan.shards_parameters:
        parts.append("gradients reduced every microbatch")
    if plan.recompute != "none":
        parts.append(f"recompute {plan.recomputed}")
    parts += _locations(plan)
    sections = (plan.collectives, plan.compression, plan.replication)
    parts += [section.words for section in sections if section is not None]
    return ", ".join(parts) or "one device"


def _locations(plan: ParallelPlan) -> Iterator[str]:
    """Tensors on the host, and devices of the ranks."""
    if plan.offload_optimizer:
        yield "parameters and optimizer on the host"
    if plan.offload_activations:
        of = "" if plan.offload_layers is None else f" of {plan.offload_layers} blocks"
        yield f"activations{of} on the host"
    if (placement := Placement.of(plan)) is not None:
        yield f"placement {placement.title}"


def split_parts(split: Split) -> dict[str, float]:
    """Exclusive parts of a rank's step in seconds, by name.

    >>> list(split_parts(Split(1.0, 0.5, 0.2, 0.0, 0.0, 0.1)))
    ['compute', 'recompute', 'exposed communication', 'wait', 'host', 'optimizer']
    """
    names = (field.name for field in fields(split))
    return {name.removesuffix("_s").replace("_", " "): getattr(split, name) for name in names}


def _split_table(prediction: Prediction) -> str:
    parts = {split: split_parts(split) for split in dict.fromkeys(prediction.splits)}  # few differ
    names = [
        name for name in parts[prediction.splits[0]] if any(parts_s[name] >= _SHOWN_S for parts_s in parts.values())
    ]
    cells = {
        split: [f"{format_time(parts_s[name])} {100 * parts_s[name] / prediction.step_time_s:3.0f} %" for name in names]
        for split, parts_s in parts.items()
    }
    pairs = zip(prediction.memory, prediction.splits, strict=True)
    rows = _grouped((memory.rank, cells[split]) for memory, split in pairs)
    headers = ["rank", *(name.replace("communication", "comm") for name in names)]
    return "Step breakdown per rank\n" + _rank_table(headers, rows)


def _worst_memory_table(prediction: Prediction) -> str:
    worst = prediction.worst_memory
    sizes = {str(category).replace("_", " "): num_bytes for category, num_bytes in worst.by_category.items()}
    sizes["allocator reserve"] = worst.reserved_bytes - worst.allocated_bytes
    total = sum(sizes.values())
    rows = [
        [name, format_bytes(num_bytes), format_percent(num_bytes / total)]
        for name, num_bytes in sorted(sizes.items(), key=lambda item: -item[1])
        if num_bytes
    ]
    when = f"during {worst.peak_action}" if worst.peak_action else "between steps"
    return f"Memory of rank {worst.rank} at its peak, {when}\n" + format_table_text(
        ["category", "bytes", "share"], rows
    )


def _rank_memory_table(prediction: Prediction) -> str:
    rows = _grouped(
        (
            memory.rank,
            [
                format_bytes(memory.allocated_bytes),
                format_bytes(memory.reserved_bytes),
                format_bytes(memory.device_bytes),
                str(max(memory.activations_in_flight.values(), default=0)),
            ],
        )
        for memory in prediction.memory
    )
    headers = ["rank", "allocated", "reserved", "device", "microbatches in flight"]
    return "Peak memory per rank\n" + _rank_table(headers, rows)


def _terms_table(prediction: Prediction) -> str:
    terms = sorted((t for t in prediction.terms if t.seconds > 0), key=lambda t: -t.seconds * t.count)
    rows = [
        [t.name, t.provenance, format_time(t.seconds), f"{t.count:g}", f"+/- {100 * t.relative_std:.0f} %"]
        for t in terms[:_MAX_TERMS]
    ]
    more = len(terms) - len(rows)
    note = f"\n  and {more} smaller ones (--json has all, with formulas)" if more > 0 else ""
    headers = ["cost", "source", "each", "per rank", "std"]
    return "Cost terms, largest first\n" + format_table_text(headers, rows, left=2) + note


def _grouped(rows: Iterable[tuple[int, list[str]]]) -> list[list[str]]:
    """Table rows; ranks with equal cells share a row."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, cells in rows:
        groups.setdefault(tuple(cells), []).append(rank)
    return [[format_ranks(ranks), *cells] for cells, ranks in groups.items()]


def _rank_table(headers: list[str], rows: list[list[str]]) -> str:
    hidden = len(rows) - _MAX_GROUPS
    more = f"\n  and {hidden} more groups of ranks (--json has all)" if hidden > 0 else ""
    return format_table_text(headers, rows[:_MAX_GROUPS]) + more
