"""Attention cores of each form, and lookup tables that the layers of a stage share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from executor.distributed.context_parallel import AttentionCore, ContextAttention, attend, causal_attention
from executor.distributed.mesh import ParallelDims
from executor.distributed.recompute import Around, run_again
from simplan.model.families import FAMILIES
from simplan.model.model import ModelSpec

_HEADS, _TOKENS = 1, 2  # the dimensions
_SCORES_CAP = 50.0  # Gemma 2, attn_logit_softcapping
ROTARY_BASE = 10_000.0  # RoPE, arXiv:2104.09864
_LARGEST_SLOPE_EXPONENT = 8  # Press et al. 2022, section 3: slopes go down to 2^-8


class StageContext:
    """Objects that the layers of a stage share: attention cores, lookup tables and parallel dimensions.

    Args:
        dims: Parallel dimensions, which determine this rank's tokens and heads.
        device: Device of the tables.
        dtype: Dtype of the tables.
        recompute: Recompute attention cores in backward.

    Attributes:
        tables: Shared tables by name.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dims: ParallelDims,
        device: torch.device,
        dtype: torch.dtype,
        *,
        recompute: bool = False,
        around_rerun: Around = nullcontext,
    ) -> None:
        self._spec, self._dims, self.device, self._dtype = spec, dims, device, dtype
        self._recompute, self._around_rerun = recompute, around_rerun
        self.tables: dict[str, Tensor] = {}
        self._cores: dict[int, ContextAttention] = {}

    def core(self, block: int) -> ContextAttention:
        """The attention core of a block, counted from 0; blocks with equal windows share one."""
        window = self._spec.windows[block]
        if window not in self._cores:
            with torch.device("cpu"):  # not the meta device, on which layers are built
                core = self.maybe_again(self._core(window))
                self._cores[window] = ContextAttention(core, self._dims, self._spec.seq_len, self.device)
        return self._cores[window]

    def shared_tables(self) -> Iterator[Tensor]:
        """Tensors of attention cores, which are no layer's own."""
        for core in self._cores.values():
            yield from core.tables()

    def maybe_again(self, core: AttentionCore) -> AttentionCore:
        """The core, wrapped for recomputation in backward if the stage recomputes."""
        return partial(run_again, core, around=self._around_rerun) if self._recompute else core

    def rotary_tables(self, width: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of position times frequency, (tokens, width) each (Su et al. 2021, arXiv:2104.09864)."""
        if "cos" not in self.tables:
            frequencies = ROTARY_BASE ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
            angles = torch.outer(self._positions().double(), frequencies).repeat(1, 2)
            for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
                self.tables[name] = table.float().to(self.device, self._dtype)
        return self.tables["cos"], self.tables["sin"]

    def own_positions(self) -> Tensor:
        """Positions in their documents of the tokens that this rank has between attention and MLP, int64."""
        positions = self._positions()
        of_rank = self._dims.own_part(positions, 0) if self._dims.splits_tokens else positions
        return of_rank.to(self.device, copy=True)

    def _positions(self) -> Tensor:
        """Position in its document of each of this rank's tokens, (seq_len / cp) int64."""
        with torch.device("cpu"):
            positions = torch.cat([torch.arange(length) for length in self._spec.segments])
            return positions[self._dims.positions(self._spec.seq_len)]

    def _core(self, window: int) -> AttentionCore:
        core, lengths = self._core_of_documents(window), self._spec.segments
        return core if len(lengths) == 1 else DocumentAttention(core, lengths)

    def _core_of_documents(self, window: int) -> AttentionCore:
        family = FAMILIES[self._spec.family]
        if family.soft_cap:
            return CappedAttention(self._spec.seq_len, window, self.device)
        if family.alibi or window:
            return MaskedAttention(self._spec, self._dims, window, self.device)
        return causal_attention if family.causal else full_attention


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """Request to build one layer.

    Attributes:
        index: Index of the layer in ``spec.layers``.
        stage: Objects that the layer shares with other layers of the stage.
    """

    spec: ModelSpec
    index: int
    stage: StageContext

    @property
    def block(self) -> int:
        """Number of a block among blocks, from 0."""
        return self.spec.block_indices().index(self.index)

    @property
    def core(self) -> ContextAttention:
        """A block's attention core."""
        return self.stage.core(self.block)


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of every query to every key; all tensors are (batch, heads, tokens, head_dim)."""
    return attend(q, k, v)


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Soft cap: cap tanh(x / cap), close to x for small x, and never larger than the cap."""
    return torch.tanh(x / cap) * cap


class DocumentAttention:
    """Applies a core to each document and to the padding of packed sequences; concatenates the outputs.

    Alternatives of torch to one call per document were measured (2.13, two CPU cores, sequences of 2048 tokens): one
    call with a mask takes 4 to 19 times as long, nested tensors have no CPU kernel, and ``torch.nn.attention.varlen``
    supports only CUDA and 16-bit dtypes.

    Tensors are split and concatenated in the layout of the projections, (batch, tokens, heads, head_dim). One split
    makes all parts, so that backward concatenates the gradients of all documents in one copy.

    Args:
        lengths: Tokens of each document, and of the padding.
    """

    def __init__(self, core: AttentionCore, lengths: Sequence[int]) -> None:
        self._core, self._lengths = core, list(lengths)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, tokens, head_dim) each, as is the result."""
        parts = (torch.split(x.transpose(_HEADS, _TOKENS), self._lengths, dim=_HEADS) for x in (q, k, v))
        outs = [
            self._core(*(x.transpose(_HEADS, _TOKENS) for x in document)).transpose(_HEADS, _TOKENS)
            for document in zip(*parts, strict=True)
        ]
        return torch.cat(outs, dim=_HEADS).transpose(_HEADS, _TOKENS)


class CappedAttention:
    """Causal attention whose scores are capped (Gemma 2), which torch's fused kernels cannot do; softmax in fp32.

    Args:
        window: Keys up to its own that a query meets; 0 for all of them.
    """

    def __init__(self, seq_len: int, window: int, device: torch.device) -> None:
        positions = torch.arange(seq_len, device=device)
        distances = positions.unsqueeze(1) - positions.unsqueeze(0)
        self._unmet = distances < 0
        if window:
            self._unmet |= distances >= window

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """See ``causal_attention``; the table includes the mask."""
        del mask
        groups = q.shape[_HEADS] // k.shape[_HEADS]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=_HEADS), v.repeat_interleave(groups, dim=_HEADS)
        scores = torch.tanh(q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 / _SCORES_CAP)) * _SCORES_CAP
        scores.masked_fill_(self._unmet, -torch.inf)
        wide = torch.float64 if scores.dtype is torch.float64 else torch.float32
        return functional.softmax(scores, dim=-1, dtype=wide).to(v.dtype) @ v


class MaskedAttention:
    """Causal attention with a table that is added to the scores: ALiBi's bias by distance, or a window mask.

    Args:
        parallel: Parallel dimensions, which determine this rank's heads and tokens.
        window: Attended keys per query, including its own; 0 for all earlier keys.
    """

    def __init__(self, spec: ModelSpec, parallel: ParallelDims, window: int, device: torch.device) -> None:
        self._window = window
        whole = torch.arange(max(spec.segments))
        gathers = parallel.cp.size > 1 and parallel.shard.cp_comm == "all_gather"
        self._keys = (parallel.all_positions(spec.seq_len).flatten() if gathers else whole).to(device)
        self._queries = (parallel.positions(spec.seq_len) if gathers else whole).to(device)
        self._slopes: Tensor | None = None
        if FAMILIES[spec.family].alibi:
            slopes = parallel.own_part(alibi_slopes(spec.num_attention_heads), 0)
            if parallel.cp.size > 1 and not gathers:  # all-to-all of tokens for heads
                slopes = slopes.chunk(parallel.cp.size)[parallel.cp.rank]
            self._slopes = slopes.to(device)
        self._table: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """See ``causal_attention``; the table includes the mask."""
        del mask
        table = self._table_like(q)[..., : q.shape[_TOKENS], : k.shape[_TOKENS]]  # shorter documents have its corner
        return attend(q, k, v, table)

    def _table_like(self, q: Tensor) -> Tensor:
        """(1, heads, queries, keys), or (queries, keys) for all heads; made once, in the precision of the queries."""
        if self._table is None or self._table.dtype is not q.dtype:
            distances = self._queries.unsqueeze(1) - self._keys.unsqueeze(0)
            unmet = distances < 0
            if self._window:
                unmet |= distances >= self._window
            table = torch.zeros(unmet.shape, dtype=q.dtype, device=q.device)
            if self._slopes is not None:
                table = (-self._slopes.view(-1, 1, 1) * distances).to(q.dtype).unsqueeze(0)
            self._table = table.masked_fill_(unmet, -torch.inf)
        return self._table


def alibi_slopes(num_heads: int) -> Tensor:
    """Slope of the bias of each head (float64): 2^(-8 i / a) for i = 1 to a (Press et al. 2022, section 3).

    If a is not a power of two, the slopes are every second slope of the next power of two, then the remaining ones (as
    in MPT).
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    exponents = torch.arange(1, power + 1, dtype=torch.float64) * _LARGEST_SLOPE_EXPONENT / power
    slopes = 2.0**-exponents
    return slopes if power == num_heads else torch.cat((slopes[1::2], slopes[::2]))[:num_heads]
