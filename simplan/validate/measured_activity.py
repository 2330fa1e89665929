"""Activity of ranks in a measured step, from spans of actions and timestamps of communication.

A collective starts once its last member has issued it. Waits inside an action are known in two cases: blocking calls
(gloo's, except DDP's buckets), and DDP, which only waits after its last bucket. For other communication (NCCL's
streams), all time inside an action counts as compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from simplan.plan.plan import RankMapping
from simplan.program.action import Action, ActionKind
from simplan.runs.measurement import MeasuredCollective, Measurement, RankMeasurement
from simplan.validate.activity import Activity, ActivityShare, Busy, Transfer, busy_span, stream_words
from simplan.validate.measured import computed_spans, is_between_stages, stream_of

_SENDS = {ActionKind.SEND_F: 1, ActionKind.SEND_B: -1}  # receiving stage relative to the sending stage
_COPIES = ("to_host", "from_host")


class _KeyedCollective(NamedTuple):
    """A collective or P2P send of one rank, with a key that its members share."""

    key: tuple[object, ...]
    collective: MeasuredCollective
    action: Action


def measured_activity(measurement: Measurement) -> dict[int, Activity]:
    """Activity by rank in the representative step of a measurement."""
    mapping = RankMapping.of(measurement.job.plan)
    keyed = {rank.rank: list(_keyed(rank.collectives)) for rank in measurement.ranks}
    issued: dict[tuple[object, ...], dict[int, float]] = defaultdict(dict)
    for rank, collectives in keyed.items():
        for entry in collectives:
            issued[entry.key][rank] = entry.collective.start_s
    activities = {rank.rank: _busy_activity(measurement, rank, keyed[rank.rank]) for rank in measurement.ranks}
    arrived: dict[tuple[object, ...], Transfer] = {}
    for rank, collectives in keyed.items():
        for entry in collectives:
            _add_transfer(activities[rank], entry, issued[entry.key], rank, mapping, arrived)
    for rank, collectives in keyed.items():
        _add_sends(activities[rank], collectives, arrived)
    return activities


def _keyed(collectives: Iterable[MeasuredCollective]) -> Iterator[_KeyedCollective]:
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    for collective in collectives:
        action = Action.parse(collective.action)
        key: tuple[object, ...] = (collective.kind, collective.ranks)
        if is_between_stages(collective):
            stage = action.stage + _SENDS.get(action.kind, 0)
            forward = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
            key = ("p2p", collective.ranks, forward, stage, action.microbatch)
        counts[key] += 1
        yield _KeyedCollective((*key, counts[key]), collective, action)


def _busy_activity(measurement: Measurement, rank: RankMeasurement, keyed: list[_KeyedCollective]) -> Activity:
    """Activity of a rank's actions, without their waits."""
    # a dropped rank waits for the mean of the others' gradients
    activity = Activity(idle=ActivityShare.WAIT if rank.is_dropped else ActivityShare.UNEXPLAINED)
    synchronous = measurement.environment.get("backend") != "nccl"
    plan = measurement.job.plan
    buckets = plan.num_averaging > 1 and not plan.shards_parameters
    for span in computed_spans(rank):
        inside = [
            entry.collective
            for entry in keyed
            if not is_between_stages(entry.collective)
            and entry.collective.end_s is not None
            and span.start_s <= entry.collective.start_s <= span.end_s
        ]
        of_ddp = [c for c in inside if buckets and c.kind == "all_reduce" and "B" in span.action]
        still = [(c.start_s, c.end_s or c.start_s) for c in inside if c not in of_ddp] if synchronous else []
        if of_ddp:
            last_s = max(c.end_s or c.start_s for c in of_ddp)
            still.append((max(c.start_s for c in of_ddp), last_s))
        activity.waiting += [(low, min(high, span.end_s)) for low, high in still]
        busy = busy_span(span.action, span.kind, span.start_s, span.end_s)
        activity.busy += _without(busy, still)
    sends = (
        entry.collective for entry in keyed if entry.collective.kind == "send" and is_between_stages(entry.collective)
    )
    ends = [send.end_s for send in sends if send.end_s]
    if ends:  # the pipeline waits for all previous sends
        seen_s = max(ends)
        before = [busy.end_s for busy in activity.busy if busy.end_s <= seen_s]
        activity.waiting.append((max(before, default=seen_s), seen_s))
    if activity.busy:  # a rank that is done waits for the others
        activity.waiting.append((activity.busy[-1].end_s, float("inf")))
    return activity


def _without(busy: Busy, still: list[tuple[float, float]]) -> Iterator[Busy]:
    now_s = busy.start_s
    for low, high in sorted(still):
        if low > now_s:
            yield Busy(now_s, min(low, busy.end_s), busy.share, busy.part)
        now_s = max(now_s, high)
    if now_s < busy.end_s:
        yield Busy(now_s, busy.end_s, busy.share, busy.part)


def _add_transfer(
    activity: Activity,
    keyed_collective: _KeyedCollective,
    issued: dict[int, float],
    rank: int,
    mapping: RankMapping,
    arrived: dict[tuple[object, ...], Transfer],
) -> None:
    """Add communication that a rank waits for; sends are asynchronous and not waited for."""
    collective = keyed_collective.collective
    receives = collective.kind == "recv" and is_between_stages(collective)
    if collective.end_s is None or (is_between_stages(collective) and not receives):
        return
    last = max(issued, key=lambda member: issued[member])
    ready_s = issued[last]
    if receives:
        # completion is seen when the rank waits for it; compute before that says nothing about the transfer
        free_s = max((busy.end_s for busy in activity.busy if busy.end_s <= collective.end_s), default=0.0)
        if free_s > ready_s:
            last, ready_s = rank, free_s
    stream = collective.kind if collective.kind in _COPIES else stream_of(collective, rank, mapping)
    transfer = Transfer(
        min(ready_s, collective.end_s), collective.end_s, stream_words(stream), last if len(issued) > 1 else None
    )
    activity.transfers.append(transfer)
    activity.waiting.append((collective.start_s, transfer.start_s))
    if receives:
        arrived[keyed_collective.key] = transfer


def _add_sends(activity: Activity, keyed: list[_KeyedCollective], arrived: dict[tuple[object, ...], Transfer]) -> None:
    """Add sends, with the transfer times that their receivers recorded."""
    transfers = (arrived.get(send.key) for send in keyed if send.collective.kind == "send")
    activity.transfers += [transfer for transfer in transfers if transfer is not None]
