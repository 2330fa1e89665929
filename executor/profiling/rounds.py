"""Rounds of replicas that may leave and join, from the records of their ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from executor.profiling.recorder import StepRecord
from simplan.runs.measurement import LossPoint, MeasuredRound
from simplan.runs.run_spec import RunSpec
from simplan.units import counted, format_time


@dataclass(frozen=True, slots=True)
class ElasticSteps:
    """Steps of a run whose replicas may leave and join.

    Attributes:
        rounds: Rounds, in order.
        steps: By step of the run, the records of ranks whose replicas were in its round, in the order of ranks. A step
            of a replica that left before the round ended is lost: it has no record here.
        replicas: By step of the run, the replicas in its round; after the last round, those of that round.
    """

    rounds: tuple[MeasuredRound, ...]
    steps: tuple[tuple[StepRecord, ...], ...]
    replicas: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, job: RunSpec, records: Mapping[int, Sequence[StepRecord]]) -> ElasticSteps:
        """Finds the rounds of a run.

        Args:
            records: Records by global rank; of a repeated step, the last counts.
        """
        num_ranks = job.plan.num_devices // job.plan.dp_replicate
        by_step = {rank: {record.step: record for record in of_rank} for rank, of_rank in records.items()}
        everyone = [record for of_rank in by_step.values() for record in of_rank.values()]
        ends = {record.step + 1: record.members for record in everyone if record.members}
        has_workers = job.plan.replication is not None and job.plan.replication.has_workers
        if has_workers:  # each step is a round of those who took it
            numbers = sorted({record.step for record in everyone})
            ends = {number + 1: tuple(rank for rank in by_step if number in by_step[rank]) for number in numbers}
        rounds, steps, replicas, begin = list[MeasuredRound](), list[tuple[StepRecord, ...]](), [], 0
        last = max((record.step + 1 for record in everyone), default=0)
        members = tuple(range(job.plan.dp_replicate))
        for end in sorted({*ends, last}):
            members = ends.get(end, members)
            ranks = [rank for rank in sorted(by_step) if rank // num_ranks in members]
            of_round = [
                step
                for number in range(begin, end)
                if (step := tuple(by_step[rank][number] for rank in ranks if number in by_step[rank]))
            ]
            if end in ends:
                seconds = sum(map(time_of_updates if has_workers else mean_s, of_round))
                rounds.append(MeasuredRound(end_step=end, replicas=members, seconds=seconds))
            steps += of_round
            replicas += [members] * len(of_round)
            begin = end
        return cls(tuple(rounds), tuple(steps), tuple(replicas))

    def num_samples(self, job: RunSpec) -> list[int]:
        """By step, the samples of replicas in its round since the beginning of the training."""
        of_replica = job.training.global_batch_size // job.plan.dp_replicate
        return list(accumulate(of_replica * len(replicas) for replicas in self.replicas))

    def steady(self, job: RunSpec, num_ranks: int) -> list[int]:
        """Indices of the steps that are measured: of undisturbed rounds with all replicas, after warm-up.

        Args:
            num_ranks: Ranks with records.
        """
        everyone, steady = tuple(range(job.plan.dp_replicate)), list[int]()
        before = everyone
        for measured in self.rounds:
            begin = measured.end_step - job.plan.round_steps
            of_round = [
                index
                for index, step in enumerate(self.steps)
                if begin <= step[0].step < measured.end_step and len(step) == num_ranks
                if not any(record.is_warmup for record in step)
            ]
            if before == measured.replicas == everyone and len(of_round) == job.plan.round_steps:
                steady += of_round
            before = measured.replicas
        return steady

    @property
    def sentences(self) -> list[str]:
        """Sentences on who left and joined, for the user."""
        sentences = []
        for before, after in zip(self.rounds, self.rounds[1:], strict=False):
            left, came = sorted({*before.replicas} - {*after.replicas}), sorted({*after.replicas} - {*before.replicas})
            of_round = f"the round of steps {before.end_step + 1} to {after.end_step}"
            of_round = f"step {after.end_step}" if after.end_step == before.end_step + 1 else of_round
            with_those = f"with {counted(len(after.replicas), 'replica')}"
            if left:
                lost = f"it took {format_time(after.seconds)}, and the one before {format_time(before.seconds)}"
                sentences.append(f"{_named(left)} left in {of_round}, which went on {with_those}: {lost}")
            if came:
                sentences.append(f"{_named(came)} came back for {of_round}, {with_those}")
        return sentences


def time_of_updates(step: Sequence[StepRecord]) -> float:
    """Seconds in which as many gradients are applied as there are workers, at the rates of their steps."""
    return len(step) / sum(1 / (record.end_s - record.start_s) for record in step)


def first_end_s(steps: Sequence[Sequence[StepRecord]]) -> float:
    """Time at which the first worker has taken its last step: from then on, the others go on without it."""
    return min(record.end_s for record in steps[-1])


def curve_of_workers(steps: Sequence[Sequence[StepRecord]], job: RunSpec) -> Iterator[LossPoint]:
    """Yields losses of workers that do not wait for each other, in the order in which their steps ended.

    The first worker takes many steps while a slow one takes its first, so losses of equal steps are of other
    parameters. A point is the mean over as many gradients as there are workers, as a step of all would have. The curve
    ends with the first worker.
    """
    if not steps:
        return
    until_s, begin_s = first_end_s(steps), min(record.start_s for step in steps for record in step)
    records = [record for step in steps for record in step if record.losses and record.end_s <= until_s]
    num_workers, batch = job.plan.dp_replicate, job.training.global_batch_size
    ended = sorted(records, key=lambda record: record.end_s)
    for number, group in enumerate(zip(*[iter(ended)] * num_workers, strict=False), 1):
        loss = statistics.fmean(loss for record in group for loss in record.losses)
        yield LossPoint(num_samples=number * batch, seconds=group[-1].end_s - begin_s, loss=loss)


def mean_s(step: Sequence[StepRecord]) -> float:
    """Mean of the times of ranks that wait for each other at the end of a round only.

    Summed over a round, the times of all ranks are the same: who is early waits.
    """
    return statistics.fmean(record.end_s - record.start_s for record in step)


def _named(replicas: Sequence[int]) -> str:
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"
