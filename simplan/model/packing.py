"""Documents of many lengths packed into sequences, and the one pack that represents them.

Fine-tuning packs several documents into every sequence (Krell et al. 2021, arXiv:2107.02027). A step has thousands of
different packs, and a prediction is of one step. So documents are sampled and packed, and the pack with the average
attention cost is chosen. The spread of the packs is reported with it, because ranks wait for the fullest one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from simplan.base import Count, NonNegative, Positive, Spec
from simplan.errors import Problem, SpecError

NUM_DOCUMENTS = 20_000
"""Number of sampled documents, enough to know the average contents of a pack to about 1%."""

_FEWEST_PACKS = 20
_Lengths = NDArray[np.int64]

Packing = Literal["greedy", "first_fit_decreasing"]
"""``greedy`` takes documents as they come and begins a sequence where one does not fit (torchtune's PackedDataset,
pytorch/torchtune@v0.6.1). ``first_fit_decreasing`` takes the longest first and puts each into the first sequence with
enough space (NeMo's packing_algorithm; Johnson 1973)."""


class DocumentOptions(Spec):
    """Truncation and packing of documents, for every source of lengths.

    Attributes:
        max: Largest length in tokens, to which longer documents are cut; None for the sequence length.
        packing: Packing algorithm.
        seed: Seed of numpy's default_rng; equal seeds give equal packs.
    """

    max: Count | None = None
    packing: Packing = "greedy"
    seed: Annotated[int, Field(ge=0, le=2**32)] = 0


class DocumentSource(DocumentOptions, ABC):
    """Source of document lengths."""

    @abstractmethod
    def draw(self, number: int, generator: np.random.Generator) -> _Lengths:
        """Sample lengths (number) before truncation."""


class Lognormal(DocumentSource):
    """Lengths whose logarithms are normal.

    Attributes:
        distribution: Name of the distribution.
        median: Tokens that half of the documents exceed.
        sigma: Standard deviation of the natural logarithm of the lengths.
    """

    distribution: Literal["lognormal"]
    median: Annotated[float, Field(gt=0, le=10**9)]
    sigma: Annotated[float, Field(ge=0, le=10)]

    def draw(self, number: int, generator: np.random.Generator) -> _Lengths:
        """Sample lengths; see ``DocumentSource``."""
        return np.rint(self.median * np.exp(self.sigma * generator.standard_normal(number))).astype(np.int64)


class Histogram(DocumentSource):
    """Counted lengths.

    Attributes:
        histogram: Number of documents by their number of tokens; only relative frequencies matter.
    """

    histogram: Annotated[dict[int, NonNegative], Field(max_length=100_000)]

    @field_validator("histogram")
    @classmethod
    def _some(cls, counts: dict[int, float]) -> dict[int, float]:
        if not sum(counts.values()):
            raise ValueError("must count one document or more")
        if min(counts) < 1:
            raise ValueError(f"counts documents of {min(counts)} tokens, and they have at least one")
        if max(counts) > 10**12:
            raise ValueError(f"counts documents of {max(counts):,} tokens, more than a trillion")
        return counts

    def draw(self, number: int, generator: np.random.Generator) -> _Lengths:
        """Sample lengths; see ``DocumentSource``."""
        lengths = np.array(list(self.histogram), dtype=np.int64)
        weights = np.array(list(self.histogram.values()))
        return generator.choice(lengths, number, p=weights / weights.sum())


class PackStatistics(Spec):
    """Statistics of all packs, of which one was chosen.

    Attributes:
        packing: Packing algorithm.
        seed: Seed of the generator that sampled the documents (numpy's default_rng).
        num_documents: Documents sampled.
        num_packs: Sequences filled.
        documents_per_pack: Mean number of documents per sequence.
        document_share: Fraction of tokens that belong to documents: the efficiency of packing.
        cut_share: Fraction of documents that were truncated.
        relative_std: Standard deviation over packs of the number of attending token pairs, relative to the mean.
        relative_excess: Attending token pairs of the fullest pack above the mean, relative to the mean.
    """

    packing: Packing
    seed: Annotated[int, Field(ge=0, le=2**32)]
    num_documents: Count
    num_packs: Count
    documents_per_pack: Positive
    document_share: Annotated[float, Field(gt=0, le=1)]
    cut_share: Annotated[float, Field(ge=0, le=1)]
    relative_std: NonNegative
    relative_excess: NonNegative


def represent(source: DocumentSource, seq_len: int) -> tuple[tuple[int, ...], PackStatistics]:
    """Sample ``NUM_DOCUMENTS`` documents and pack them.

    Returns:
        The lengths, longest first, in the pack whose number of token pairs (squares of the lengths, padding included)
        is nearest to the mean over all packs; and the statistics of all packs.

    Raises:
        SpecError: Sequences are so long that the documents fill too few of them to estimate their spread.
    """
    drawn = source.draw(NUM_DOCUMENTS, np.random.default_rng(source.seed))
    most = min(seq_len, source.max or seq_len)
    lengths = np.clip(drawn, 1, most)
    if int(lengths.sum()) < _FEWEST_PACKS * seq_len:
        rule = f"makes sequences too long: {NUM_DOCUMENTS:,} documents, of {lengths.mean():.0f} tokens on average, "
        rule += f"fill fewer than {_FEWEST_PACKS}"
        fix = f"use at most {int(lengths.sum()) // _FEWEST_PACKS}, or list model.document_lengths"
        raise SpecError(Problem(field="model.seq_len", value=str(seq_len), rule=rule, fix=fix))
    packs = _PACKERS[source.packing](lengths, seq_len)
    filled = np.array([sum(pack) for pack in packs])
    pairs = np.array([sum(length**2 for length in pack) for pack in packs], dtype=np.float64)
    pairs += (seq_len - filled).astype(np.float64) ** 2
    nearest = int(np.abs(pairs - pairs.mean()).argmin())
    statistics = PackStatistics(
        packing=source.packing,
        seed=source.seed,
        num_documents=NUM_DOCUMENTS,
        num_packs=len(packs),
        documents_per_pack=sum(map(len, packs)) / len(packs),
        document_share=float(filled.mean() / seq_len),
        cut_share=float((drawn > most).mean()),
        relative_std=float(pairs.std() / pairs.mean()),
        relative_excess=float(pairs.max() / pairs.mean() - 1),
    )
    return tuple(sorted(packs[nearest], reverse=True)), statistics


def _greedy(lengths: _Lengths, seq_len: int) -> list[list[int]]:
    """Pack in order. The last sequence is left out, since it may be incomplete."""
    packs: list[list[int]] = [[]]
    room = seq_len
    for length in lengths.tolist():
        if length > room:
            packs.append([])
            room = seq_len
        packs[-1].append(length)
        room -= length
    return packs[:-1]


def _first_fit_decreasing(lengths: _Lengths, seq_len: int) -> list[list[int]]:
    packs: list[list[int]] = []
    room = np.zeros(len(lengths), dtype=np.int64)
    for length in np.sort(lengths)[::-1].tolist():
        room[len(packs)] = seq_len  # an empty sequence is always available
        place = int((room[: len(packs) + 1] >= length).argmax())
        if place == len(packs):
            packs.append([])
        packs[place].append(length)
        room[place] -= length
    return packs


_PACKERS: dict[Packing, Callable[[_Lengths, int], Sequence[list[int]]]] = {
    "greedy": _greedy,
    "first_fit_decreasing": _first_fit_decreasing,
}
