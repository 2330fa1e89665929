"""Zero-bubble schedules with one stage per rank (Qi et al. 2024, arXiv:2401.10241).

ZB-H1 and ZB-H2 are in a fixed order (section 2, figure 3). zb-1p and zb-2p are built round by round for given stage
times within a memory limit, by the heuristic of section 3.1.
"""

from __future__ import annotations

from itertools import product
from math import ceil
from typing import NamedTuple

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules.shape import PipelineShape, longest_span_s, number_microbatches

_F, _I, _W = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
_ROUNDING = 1e-9  # relative rounding error of sums


def zb_h1(shape: PipelineShape) -> Table:
    """1F1B with I in place of B; W lags by the rank number in microbatches, and fills the gaps at the end.

    Idle time (p-1)(F+I-W), if W is no longer than F and m >= p; 1F1B has (p-1)(F+I+W). Rank r holds at most p-r
    microbatches between F and I, as in 1F1B. Every rank holds at most p between F and W, like the first rank of 1F1B.
    """
    p = shape.num_ranks
    return tuple(_row(rank, shape, num_warmup=p - rank, lag=rank) for rank in range(p))


def zb_h2(shape: PipelineShape) -> Table:
    """ZB-H1 with more warm-up forwards, up to the first backward, so that no rank waits for it.

    Idle time (p-1)(F+I-2W), if W is no longer than F and I and m >= 2p-1: zero if all take equal time. The memory is
    almost double: rank r holds at most 2(p-r)-1 microbatches between F and I, and every rank 2p-1 between F and W.
    """
    p = shape.num_ranks
    return tuple(_row(rank, shape, num_warmup=2 * (p - rank) - 1, lag=2 * rank) for rank in range(p))


def _row(rank: int, shape: PipelineShape, *, num_warmup: int, lag: int) -> tuple[Action, ...]:
    """Runs forwards, then in turn I, the W ``lag`` microbatches behind it, and the next forward, then remaining Ws."""
    assert shape.virtual_stages == 1, shape
    m = shape.num_microbatches
    row = [Action(rank, _F, microbatch) for microbatch in range(min(num_warmup, m))]
    for microbatch in range(m):
        row.append(Action(rank, _I, microbatch))
        if microbatch >= lag:
            row.append(Action(rank, _W, microbatch - lag))
        if microbatch + num_warmup < m:
            row.append(Action(rank, _F, microbatch + num_warmup))
    row += (Action(rank, _W, microbatch) for microbatch in range(max(0, m - lag), m))
    return tuple(row)


def zb_1p(shape: PipelineShape) -> Table:
    """Best order found for the stage times that holds at most p microbatches per rank, the memory of 1F1B.

    A microbatch counts in full from F to I, and by the fraction of its activations that its W needs from I to W.
    """
    return _best(shape, shape.num_ranks, zb_h1(shape))


def zb_2p(shape: PipelineShape) -> Table:
    """Best order found for the stage times that holds at most 2p microbatches per rank, twice the memory of 1F1B.

    Idle time is near zero under three conditions, which the paper assumes: W is at most F and I, a step has about 4p
    microbatches or more, and half of a microbatch's activations is freed after I. The paper's optimizer with and
    without a synchronization of all ranks runs the same table.
    """
    return _best(shape, 2 * shape.num_ranks, zb_h2(shape))


def _best(shape: PipelineShape, memory_limit: int, handcrafted: Table) -> Table:
    """Returns the handcrafted table, which is within memory, or a shorter one built with any tactics."""
    table, span_s = handcrafted, longest_span_s(handcrafted, shape.stage_times)
    for choices in product((False, True), repeat=3):
        built = build(shape, memory_limit, Tactics(*choices))
        if _is_later(span_s, built.longest_span_s):
            table, span_s = built.table(), built.longest_span_s
    return table


class Tactics(NamedTuple):
    """Options of the heuristic, whose benefit depends on the stage times.

    Attributes:
        overrun_first_gradient: A rank that waits for its first gradient starts another forward even if the gradient
            then has to wait for the end of that forward.
        hold_forwards: A rank two forwards ahead of the next rank starts no forward that would end after the next rank's
            forward and backward of this round.
        fill_small_gaps: A W fills every gap, even one shorter than the W. If False, a W fills a shorter gap only if
            waiting would give the rank the longest idle time.
    """

    overrun_first_gradient: bool
    hold_forwards: bool
    fill_small_gaps: bool


def build(shape: PipelineShape, memory_limit: int, tactics: Tactics) -> BuiltPipeline:
    """Builds warm-up forwards up to the first gradient, then rounds of one forward and one I per rank.

    Ws are placed where a rank would wait, and where a forward needs their memory.

    Args:
        memory_limit: Maximum microbatches on a rank, counted in full from F to I and by ``kept_for_weight`` until W.
    """
    assert shape.virtual_stages == 1, shape
    assert 0 <= shape.kept_for_weight <= 1, shape
    assert memory_limit >= 1, memory_limit
    pipeline = BuiltPipeline(shape, memory_limit, tactics)
    pipeline.warm_up()
    for _ in range(1, shape.num_microbatches):
        pipeline.do_round()
    for index in range(shape.num_ranks):
        pipeline.put_pending_weights(index)
    return pipeline


class _Rank:
    """Actions and times of one rank so far.

    Attributes:
        kinds: Kinds of its actions; each kind takes the microbatches in order.
        start_s: Start of the first action, in seconds.
        free_s: End of the last action, in seconds.
        idle_s: Idle time since its first forward, in seconds.
        ends_s: Ends of its forwards and Is, by microbatch, in seconds.
        num_weights: Number of Ws so far.
    """

    def __init__(self) -> None:
        self.kinds: list[ActionKind] = []
        self.start_s = 0.0
        self.free_s = 0.0
        self.idle_s = 0.0
        self.ends_s: dict[ActionKind, list[float]] = {_F: [], _I: []}
        self.num_weights = 0

    @property
    def num_forwards(self) -> int:
        return len(self.ends_s[_F])

    @property
    def num_pending(self) -> int:
        """Number of microbatches between I and W."""
        return len(self.ends_s[_I]) - self.num_weights


class BuiltPipeline:
    """A pipeline being built: the actions of all ranks and their times."""

    def __init__(self, shape: PipelineShape, memory_limit: int, tactics: Tactics) -> None:
        self.shape, self.times = shape, shape.stage_times
        self.memory_limit, self.tactics = memory_limit, tactics
        self.ranks = [_Rank() for _ in range(shape.num_ranks)]
        self.longest_idle_s = 0.0

    @property
    def longest_span_s(self) -> float:
        """The longest time of a rank from the start of its first action to the end of its last, in seconds."""
        return max(rank.free_s - rank.start_s for rank in self.ranks)

    def table(self) -> Table:
        """Returns the actions of every rank."""
        return tuple(
            number_microbatches([(kind, index) for kind in rank.kinds], self.shape.num_microbatches)
            for index, rank in enumerate(self.ranks)
        )

    def warm_up(self) -> None:
        """Adds forwards up to the first gradient, and the first I on every rank."""
        for index in range(len(self.ranks)):
            self.put(index, _F)
        for index, number in enumerate(self.numbers_of_first_forwards()):
            for _ in range(1, number):
                self.put(index, _F)
        for index in reversed(range(len(self.ranks))):
            self.put(index, _I)

    def numbers_of_first_forwards(self) -> list[int]:
        """Returns, per rank, the number of forwards before the first gradient: within memory, decreasing over ranks."""
        times, m = self.times, self.shape.num_microbatches
        numbers = [1]
        gradient_s = self.ranks[-1].free_s + times.backward_input_s[-1]
        for index in reversed(range(len(self.ranks) - 1)):
            gradient_s += times.send_s
            end_s, number = self.ranks[index].free_s, 1
            while number < min(m, self.memory_limit):
                next_end_s = end_s + times.forward_s[index]
                latest_s = end_s if self.tactics.overrun_first_gradient else next_end_s
                if _is_later(latest_s, gradient_s) or not _is_later(gradient_s, end_s):
                    break
                end_s, number = next_end_s, number + 1
            numbers.append(number)
            gradient_s = max(end_s, gradient_s) + times.backward_input_s[index]
        numbers.reverse()
        for index in range(1, len(numbers)):
            before = numbers[index - 1]
            numbers[index] = min(numbers[index], m if before == m else max(before - 1, 1))
        return numbers

    def do_round(self) -> None:
        """Adds one forward, from the first rank that may run one to the last, and one I, from the last to the first."""
        for index in range(self.first_to_forward(), len(self.ranks)):
            for _ in range(self.num_weights_before_forward(index)):
                self.put(index, _W)
            self.fill_gap(index, _F)
            self.put(index, _F)
        for index in reversed(range(len(self.ranks))):
            if index == 0 and self.ranks[0].num_forwards == self.shape.num_microbatches:
                self.put_pending_weights(0)  # no rank waits for the gradients of the first rank
            self.fill_gap(index, _I)
            self.put(index, _I)

    def put_pending_weights(self, index: int) -> None:
        """Adds the Ws of all Is of a rank."""
        for _ in range(self.ranks[index].num_pending):
            self.put(index, _W)

    def put(self, index: int, kind: ActionKind) -> None:
        """Adds the rank's next action of this kind, once its input has arrived."""
        rank, times = self.ranks[index], self.times
        came_s = self.arrival_s(index, kind)
        if came_s > rank.free_s:
            if rank.kinds:
                rank.idle_s += came_s - rank.free_s
                self.longest_idle_s = max(self.longest_idle_s, rank.idle_s)
            else:
                rank.start_s = came_s
            rank.free_s = came_s
        rank.kinds.append(kind)
        if kind is _W:
            rank.num_weights += 1
            rank.free_s += times.backward_weight_s[index]
        else:
            rank.free_s += (times.forward_s if kind is _F else times.backward_input_s)[index]
            rank.ends_s[kind].append(rank.free_s)

    def arrival_s(self, index: int, kind: ActionKind) -> float:
        """Returns the arrival in seconds of the input of the rank's next action of this kind; 0 if it needs none."""
        source = index - 1 if kind is _F else index + 1
        if kind is _W or not 0 <= source < len(self.ranks):
            return 0.0
        return self.ranks[source].ends_s[kind][len(self.ranks[index].ends_s[kind])] + self.times.send_s

    def fill_gap(self, index: int, kind: ActionKind) -> None:
        """Adds Ws while the rank waits for the input of its next action of this kind."""
        rank, weight_s = self.ranks[index], self.times.backward_weight_s[index]
        came_s = self.arrival_s(index, kind)
        while rank.num_pending and not _is_later(rank.free_s + weight_s, came_s):
            self.put(index, _W)
        gap_s = came_s - rank.free_s
        waits_longest = _is_later(rank.idle_s + gap_s, self.longest_idle_s)
        if rank.num_pending and _is_later(came_s, rank.free_s) and (self.tactics.fill_small_gaps or waits_longest):
            self.put(index, _W)

    def first_to_forward(self) -> int:
        """Returns the first rank that runs a forward in this round; all later ranks do too."""
        for index in reversed(range(len(self.ranks))):
            rank = self.ranks[index]
            if rank.num_forwards == self.shape.num_microbatches:
                return index + 1
            if self.tactics.hold_forwards and index + 1 < len(self.ranks) and self.is_too_early(index):
                return index + 1
        return 0

    def is_too_early(self, index: int) -> bool:
        """Returns True if a forward now would not help the next rank and would delay a gradient."""
        rank, later, times = self.ranks[index], self.ranks[index + 1], self.times
        weights_s = self.num_weights_before_forward(index) * times.backward_weight_s[index]
        own_end_s = rank.free_s + weights_s + times.forward_s[index]
        round_end_s = later.free_s + times.forward_s[index + 1] + times.backward_input_s[index + 1] + times.send_s
        return rank.num_forwards >= later.num_forwards + 2 and _is_later(own_end_s, round_end_s)

    def num_weights_before_forward(self, index: int) -> int:
        """Returns the number of Ws that must free their memory before the rank's next forward."""
        rank, kept = self.ranks[index], self.shape.kept_for_weight
        num_whole = rank.num_forwards - len(rank.ends_s[_I])
        excess = num_whole + kept * rank.num_pending + 1 - self.memory_limit
        needed = ceil(excess / kept - _ROUNDING) if excess > _ROUNDING else 0
        assert needed <= rank.num_pending, "forwards of the first rounds fit in"
        return needed


def _is_later(one_s: float, other_s: float) -> bool:
    """Returns True if one time is later by more than rounding error."""
    return one_s > other_s * (1 + _ROUNDING)
