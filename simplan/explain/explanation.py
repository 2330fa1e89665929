"""Explanation of a prediction: terms that sum to the step time and the memory, each with its formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from simplan.cost.calibration.format import Calibration
from simplan.explain.memory import memory_parts
from simplan.explain.term import ExplainedTerm
from simplan.explain.time import time_parts
from simplan.model.step_work import StepWork
from simplan.predict import Simulated, predict, predict_step
from simplan.prediction import Prediction
from simplan.program.timeline import Split
from simplan.units import counted, format_flop_per_s, format_number, format_percent, format_time


@dataclass(frozen=True, slots=True)
class Explanation:
    """Breakdown of one prediction.

    Attributes:
        name: Name of the scenario.
        rank: Rank whose step is explained: the one with the most compute, the lowest of equal ranks.
        step_time_s: Step time in seconds, the sum of ``time``.
        time: Terms in seconds.
        memory_rank: Rank whose memory is explained: the peak-memory rank.
        device_bytes: Device bytes of that rank at its peak point, the sum of ``memory``.
        short_bytes: Bytes of these for which the device has no memory (``RankMemory.short_bytes``).
        memory_action: Action during the peak; empty for between steps.
        memory: Terms in bytes.
        figures: Derived figures with their formulas.
        links: ``ClusterSpec.links``.
        step_work: Work of the step.
        contention: Cost of contention on links, as a sentence; None for a cluster without a topology.
        advice: Changes that shorten a step with contention, each predicted, as sentences.
        background: Cost of other jobs on these links, as a sentence; empty without any.
        placement: ``Job.placement_words``.
        stragglers: What slow ranks cost, as a sentence; empty without any.
        jitter: What jitter costs, as a sentence; empty without any.
        backup_workers: What dropped gradients change, as a sentence; empty without any.
    """

    name: str
    rank: int
    step_time_s: float
    time: tuple[ExplainedTerm, ...]
    memory_rank: int
    device_bytes: int
    short_bytes: int
    memory_action: str
    memory: tuple[ExplainedTerm, ...]
    figures: tuple[ExplainedTerm, ...]
    links: dict[str, dict[str, Any] | None]
    step_work: StepWork
    contention: str | None = None
    placement: str = ""
    stragglers: str = ""
    jitter: str = ""
    backup_workers: str = ""
    background: str = ""
    advice: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Step time and its largest term, in one line."""
        largest = max(self.time, key=lambda term: term.value)
        of_it = f"{format_percent(largest.value / self.step_time_s)} of it {largest.name}"
        return f"Explanation({self.name}: {format_time(self.step_time_s)} a step on rank {self.rank}, {of_it})"

    def report(self, *, kernels: bool = False) -> str:
        """The text that ``simplan explain`` prints; with ``kernels`` also the kernels of each term."""
        from simplan.report.explanation import explanation_text

        return explanation_text(self, kernels=kernels)

    def to_json(self) -> dict[str, Any]:
        """As a JSON document."""
        return {"schema_version": 1, "kind": "explanation", **asdict(self)}


def explain(
    prediction: Prediction, simulated: Simulated | None = None, *, calibration: Calibration | None = None
) -> Explanation:
    """Break down a prediction into terms that sum to its step time and its memory.

    Args:
        prediction: A prediction.
        simulated: Its simulated step; None to simulate it again.
        calibration: As for ``predict``, to simulate again.
    """
    if simulated is None:
        prediction, simulated = predict_step(prediction.job, name=prediction.name, calibration=calibration)
    rank = max(range(len(prediction.splits)), key=lambda r: (_busy_s(prediction.splits[r]), -r))
    worst = prediction.worst_memory
    return Explanation(
        name=prediction.name,
        rank=rank,
        step_time_s=prediction.step_time_s,
        time=tuple(time_parts(prediction, simulated, rank)),
        memory_rank=worst.rank,
        device_bytes=worst.device_bytes,
        short_bytes=worst.short_bytes,
        memory_action=worst.peak_action,
        memory=tuple(memory_parts(prediction, simulated.program)),
        figures=tuple(_figures(prediction)),
        links=prediction.job.cluster.links,
        step_work=prediction.job.step_work,
        contention=None if prediction.network is None else f"contention {prediction.network.contention_words()}",
        placement=prediction.job.placement_words,
        stragglers=_stragglers(prediction, calibration),
        jitter="" if prediction.jitter is None else f"jitter {prediction.jitter.words}",
        backup_workers="" if prediction.backup_workers is None else prediction.backup_workers.words,
        background="" if prediction.network is None else prediction.network.background_words(),
        advice=_advice(prediction, calibration),
    )


def _advice(prediction: Prediction, calibration: Calibration | None) -> tuple[str, ...]:
    if prediction.network is None:
        return ()
    from simplan.explain.network_advice import network_advice  # imports numba

    return tuple(advice.sentence() for advice in network_advice(prediction, calibration))


def _stragglers(prediction: Prediction, calibration: Calibration | None) -> str:
    """Step time with and without the slow ranks; empty without any."""
    job = prediction.job
    if not job.cluster.stragglers:
        return ""
    others = replace(job, cluster=job.cluster.with_changes(stragglers=()))
    without_s = predict(others, calibration=calibration).step_time_s
    slow = "; ".join(straggler.words for straggler in job.cluster.stragglers)
    longer = format_percent(prediction.step_time_s / without_s - 1)
    return (
        f"{slow} the time of the others to compute: the step takes {format_time(prediction.step_time_s)}, and "
        f"{format_time(without_s)} without ({longer} more), since other ranks wait"
    )


def _busy_s(split: Split) -> float:
    return split.compute_s + split.recompute_s + split.optimizer_s


def _figures(prediction: Prediction) -> Iterator[ExplainedTerm]:
    """Yield throughput and utilization."""
    model, training, cluster = prediction.job.model, prediction.job.training, prediction.job.cluster
    step, devices = format_time(prediction.step_time_s), counted(cluster.num_devices, "device")
    samples = counted(prediction.job.sequences_per_step, model.sample)
    if model.sample != "sequence":
        rate, of_samples = prediction.samples_per_s_per_device, ""
    else:
        rate, of_samples = prediction.tokens_per_s_per_device, f" x {model.seq_len} tokens"
    what = f"{'tokens' if of_samples else 'images'} per second and device"
    yield ExplainedTerm("figures", what, rate, "", f"{samples}{of_samples} / ({step} x {devices})")
    if (documents := prediction.document_tokens_per_s_per_device) < prediction.tokens_per_s_per_device:
        share = f"{format_number(rate)} x {documents / rate:.4g}"
        note = "the share of documents in all tokens"
        yield ExplainedTerm("figures", "tokens of documents per second and device", documents, "", share, note)
    if prediction.mfu is None or prediction.mfu_full_attention is None or prediction.hfu is None:
        return
    if cluster.is_mixed:
        below = f"({step} x {format_flop_per_s(cluster.peak_flop_per_s[training.precision])} of all devices)"
    else:
        below = f"({step} x {devices} x {format_flop_per_s(cluster.device.peak_flop_per_s[training.precision])})"

    def tera(full_attention: bool) -> str:
        flops = prediction.job.flops_per_step(full_attention=full_attention)
        return f"{format_number(flops / 1e12)} TFLOP"

    causal = prediction.mfu != prediction.mfu_full_attention
    how = " (causal attention)" if causal else ""
    yield ExplainedTerm("figures", "MFU", prediction.mfu, "", f"{tera(False)}{how} / {below}")
    if causal:
        full = prediction.mfu_full_attention
        yield ExplainedTerm("figures", "MFU, full attention", full, "", f"{tera(True)} (PaLM's count) / {below}")
    again = prediction.hfu / prediction.mfu
    yield ExplainedTerm(
        "figures", "HFU", prediction.hfu, "", f"{prediction.mfu:.4g} (MFU) x {again:.4g}", "with recomputed FLOPs"
    )
