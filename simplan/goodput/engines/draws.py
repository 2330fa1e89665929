"""Random numbers of simulated runs: streams by purpose, so that engines may ask in any order.

A stream is numpy's Philox 4x64-10 generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
with the key (seed, number of the run) and a counter whose second word is the number of the stream. So a run has the
same numbers in every process, beside whichever other runs.

The sources of stops are numbered as the columns of ``Runs.interruptions``: the causes of the setup, silent corruption,
slow devices, preemptions. Each has a stream for when, one for how it is noticed, and one for when a node returns.
"""

from __future__ import annotations

from math import log1p

import numpy as np

from simplan.errors import Problem, SpecError

WHEN, NOTICE, RETURN = range(3)
"""Streams of a source: the next event; the way or time to notice it; the time until a lost node is back."""
NUM_PURPOSES = 3
MAX_SEED = 2**63 - 1


class Draws:
    """Random numbers of one run.

    Raises:
        SpecError: The seed is negative or above ``MAX_SEED``.
    """

    def __init__(self, seed: int, number: int) -> None:
        check_seed(seed)
        self._key = np.array([seed, number], np.uint64)
        self._streams: dict[int, np.random.Generator] = {}

    def uniform(self, source: int, purpose: int) -> float:
        """Next number of a stream, uniform in [0, 1)."""
        stream = NUM_PURPOSES * source + purpose
        if stream not in self._streams:
            bits = np.random.Philox(key=self._key, counter=np.array([0, stream, 0, 0], np.uint64))
            self._streams[stream] = np.random.Generator(bits)
        return float(self._streams[stream].random())

    def exponential(self, source: int, purpose: int) -> float:
        """Next number of a stream, exponential with mean 1."""
        return -log1p(-self.uniform(source, purpose))


def check_seed(seed: int) -> None:
    """Raises ``SpecError`` for a seed that is no 63-bit number."""
    if not 0 <= seed <= MAX_SEED:
        raise SpecError(Problem(field="seed", value=str(seed), rule=f"must be from 0 to {MAX_SEED}"))
