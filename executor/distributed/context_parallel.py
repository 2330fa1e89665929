"""Causal attention of a rank that has a part of the tokens of every sequence.

Keys and values are all-gathered (as in Llama 3's training, arXiv:2407.21783, section 3.3.2), or an all-to-all trades
tokens for heads (DeepSpeed-Ulysses, arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional

from executor.distributed.mesh import ParallelDims, Peers
from executor.distributed.tensor_parallel import gather_parts

AttentionCore = Callable[..., Tensor]
_HEADS, _TOKENS = 1, 2  # the dimensions
_MAX_CUDNN_HEAD = 128
_CUDNN = 91500  # 9.15.0, after which torch prefers cuDNN's attention


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of (batch, heads, tokens, head_dim) each; keys and values of fewer heads are shared by groups.

    Args:
        mask: Added to the scores, (queries, keys); without it each query meets the keys up to its own.
    """
    return attend(q, k, v, mask, is_causal=mask is None)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
    """Torch's attention, by a fused kernel where it has one."""
    group = q.shape[_HEADS] // k.shape[_HEADS]
    if group > 1 and q.is_cuda and not _fuses_groups(q, is_masked=mask is not None):
        # torch's fallback would keep the scores, 33 GiB more for Llama 3.2 1B at 4,096 tokens (FP32, torch 2.11,
        # measured)
        k, v, group = k.repeat_interleave(group, _HEADS), v.repeat_interleave(group, _HEADS), 1
    return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=group > 1)


def _fuses_groups(q: Tensor, *, is_masked: bool) -> bool:
    """True where torch has a fused kernel on CUDA for keys of fewer heads.

    Of torch 2.11 to 2.13 (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``): FlashAttention takes groups, but
    neither FP32 nor a mask. The memory-efficient kernel takes both and no groups. cuDNN's takes groups and a mask in 16
    bits, with heads of up to 128 elements.
    """
    if q.dtype is torch.float32:
        return False
    width = q.shape[-1]
    return not is_masked or (width <= _MAX_CUDNN_HEAD and width % 8 == 0 and _prefers_cudnn(q.get_device()))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _prefers_cudnn(device: int) -> bool:
    """True for devices on which torch takes cuDNN's attention before its fallback: Hopper and Blackwell."""
    version = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return torch.cuda.get_device_capability(device)[0] in (9, 10) and version > _CUDNN


class ContextAttention:
    """Attention over the tokens of all context-parallel ranks; all layers of a stage share one.

    Args:
        core: ``causal_attention``, recomputed in backward or not.
        seq_len: Tokens of all of them.
    """

    def __init__(self, core: AttentionCore, parallel: ParallelDims, seq_len: int, device: torch.device) -> None:
        self._core, self._cp = core, parallel.cp
        self._by_heads = parallel.shard.cp_comm == "a2a"
        assert self._cp.size == 1 or parallel.shard.cp_comm != "ring"
        positions = parallel.all_positions(seq_len).flatten().to(device)
        self._to_ranks, self._to_sequence = positions, positions.argsort()
        self._own = parallel.positions(seq_len).to(device)
        self._mask: Tensor | None = None

    def tables(self) -> Iterator[Tensor]:
        """Tensors that all layers share: places of tokens, and the mask once it is made."""
        yield from (self._to_ranks, self._to_sequence, self._own)
        if self._mask is not None:
            yield self._mask

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the own queries to all keys; (batch, heads, own tokens, head_dim) each, as is the result."""
        if self._cp.size == 1:
            return self._core(q, k, v)
        if self._by_heads:
            return self._exchanged(q, k, v)
        keys = gather_parts(torch.cat((k, v), _HEADS), self._cp, _TOKENS)
        return self._core(q, *keys.chunk(2, _HEADS), self._mask_like(q))

    def _exchanged(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All tokens, in the order of the sequence, of some heads."""
        by_rank = [torch.unflatten(x, _HEADS, (self._cp.size, -1)) for x in (q, k, v)]
        widths = [x.shape[_HEADS + 1] for x in by_rank]
        packed = torch.cat(by_rank, _HEADS + 1).flatten(_HEADS, _HEADS + 1)
        packed = exchange(packed, self._cp, _HEADS, _TOKENS).index_select(_TOKENS, self._to_sequence)
        out = self._core(*torch.split(packed, widths, _HEADS)).index_select(_TOKENS, self._to_ranks)
        return exchange(out, self._cp, _TOKENS, _HEADS)

    def _mask_like(self, q: Tensor) -> Tensor:
        """Zero where a query meets a gathered key, else minus infinity; made once, in the precision of the queries."""
        if self._mask is None or self._mask.dtype is not q.dtype:
            later = self._own.unsqueeze(1) < self._to_ranks.unsqueeze(0)
            self._mask = torch.zeros(later.shape, dtype=q.dtype, device=q.device).masked_fill_(later, -torch.inf)
        return self._mask


def exchange(x: Tensor, peers: Peers, split_dim: int, gather_dim: int) -> Tensor:
    """All-to-all: splits ``x`` along one dimension and concatenates the received parts along another; differentiable.

    A redistribution of a DTensor does the same, but with an all-gather on gloo (torch 2.13,
    ``torch/distributed/tensor/_collective_utils.py``, ``shard_dim_alltoall``).
    """
    assert peers.mesh is not None
    parts = torch.unflatten(x, split_dim, (peers.size, -1)).movedim(split_dim, 0).contiguous()
    received: Tensor = all_to_all_single_autograd(parts.flatten(0, 1), None, None, peers.mesh.get_group())
    received = torch.unflatten(received, 0, (peers.size, -1))
    return received.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)
