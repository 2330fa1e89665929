"""A whole run on other numbers of devices: "is twice the hardware worth it?"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from simplan.errors import Problem, SpecError
from simplan.goodput.batch_scaling import learning_rate_rule
from simplan.goodput.result import GoodputResult
from simplan.report.devices import DeviceComparison, RunOnDevices
from simplan.runs.elastic import on_fewer_devices
from simplan.scenario.file import Scenario
from simplan.units import counted

Simulate = Callable[[Scenario], GoodputResult]


def compare_devices(scenario: Scenario, numbers: Sequence[int], simulate: Simulate) -> DeviceComparison:
    """Simulates the run on numbers of devices; data parallelism grows, all other degrees stay.

    Args:
        scenario: Scenario with a length of the run.
        numbers: Numbers of devices. Batches in proportion are to the first.
        simulate: Simulates a scenario.

    Raises:
        SpecError: The run has no length, or the first number of devices cannot run the plan.
    """
    runs: list[RunOnDevices] = []
    sentences: list[str] = []
    batch = scenario.job.training.global_batch_size
    for number in numbers:
        for batch_size in dict.fromkeys((batch, batch * number // numbers[0])):
            try:
                scaled = on_devices(scenario, number, batch_size)
            except SpecError as error:
                if not runs:
                    raise
                words = f"{counted(number, 'device')} with batch {batch_size:,} are left out"
                sentences.append(f"{words}: {error.problems[0].sentence()}")
                continue
            result = simulate(scaled)
            num_samples = result.setup.num_steps * batch_size
            runs.append(RunOnDevices(num_devices=number, batch_size=batch_size, num_samples=num_samples, result=result))
    return DeviceComparison(runs=tuple(runs), sentences=(*sentences, *_about(scenario, runs)))


def on_devices(scenario: Scenario, num_devices: int, batch_size: int) -> Scenario:
    """The scenario on a number of devices with a batch, to the same target.

    States that are sharded over all data-parallel ranks stay so; other plans get more replicas.

    Raises:
        SpecError: The devices cannot run the plan, or the batch is outside the scenario's table.
    """
    job = scenario.job
    plan = on_fewer_devices(job.plan, num_devices)  # which is arithmetic, and holds for more
    is_sharded_over_all = job.plan.dp_replicate == 1 < job.plan.dp_shard
    data_parallel = plan.dp_replicate * plan.dp_shard
    changed = job.with_changes(
        num_devices=num_devices,
        dp_replicate=1 if is_sharded_over_all else plan.dp_replicate,
        dp_shard=data_parallel if is_sharded_over_all else plan.dp_shard,
        global_batch_size=batch_size,
    )
    length: dict[str, int | None] = {"num_steps": None, "num_samples": None, "num_tokens": None}
    law = None if scenario.whole_run is None or scenario.whole_run.run is None else scenario.whole_run.run
    tokens_per_sample = 1 if job.model.sample != "sequence" else job.model.seq_len
    if law is not None and law.samples_at_batch is not None:
        try:
            length["num_steps"] = law.samples_at_batch.num_steps(batch_size, tokens_per_sample)
        except ValueError as error:
            raise SpecError(Problem(field="run.samples_at_batch", rule=str(error)), file=scenario.file) from None
    elif (steps := scenario.budget.steps(job.sequences_per_step, job.model.seq_len)) is not None:
        length["num_samples"] = steps * job.sequences_per_step
    budget = scenario.budget.model_copy(update=length)
    return replace(scenario, job=changed, budget=budget, expect=())


def _about(scenario: Scenario, runs: Sequence[RunOnDevices]) -> list[str]:
    """Sentences about samples and the learning rate, where batches differ."""
    batches = sorted({run.batch_size for run in runs})
    if len(batches) == 1:
        return []
    sentences = []
    section = None if scenario.whole_run is None else scenario.whole_run.run
    if section is None or section.samples_at_batch is None:
        sentences.append(
            "samples to the target are assumed to be those of the scenario at every batch, which is too good for large "
            "ones; run: {samples_at_batch: ...} says how they grow"
        )
    optimizer = scenario.job.training.optimizer
    rule = learning_rate_rule(optimizer)
    factor = rule.factor(batches[-1] / batches[0])
    sentences.append(f"the learning rate of {optimizer} grows {rule.sentence}; here {factor:.3g} times")
    return sentences
