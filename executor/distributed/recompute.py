"""Activation checkpointing of blocks and attention cores, in full or except for matmuls whose results are saved.

Private names of torch in use: the modes of selective checkpointing, and the stack of modes (``hide_hooks``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from simplan.errors import Problem
from simplan.plan.plan import Recompute
from simplan.runs.run_spec import RunSpec

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "selective_op", "selective_layer", "full")
"""The modes of a plan that the executor has; with ``selective`` the attention core alone sees to it."""

BlockRecompute = Literal["none", "full", "selective_op"]
"""Recompute mode of one block: save all tensors, only the input, or the input and results of some matmuls."""

Around = Callable[[], AbstractContextManager[None]]
"""Returns the context around a recomputation, which ends early when torch has all saved tensors."""

_aten = torch.ops.aten
_MATMULS = {_aten.mm.default, _aten.addmm.default}
_ATTENTIONS = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
_c10d = torch.ops._c10d_functional
_COLLECTIVES = {_c10d.reduce_scatter_tensor.default, _c10d.all_to_all_single.default}


def of_block(mode: Recompute, number: int) -> BlockRecompute:
    """Recompute mode of one block of the model, counted from 0, under a plan's mode."""
    assert mode in RECOMPUTES, mode
    match mode:
        case "full" | "selective_op":
            return mode
        case "selective_layer":
            return "full" if number % 2 else "none"
        case _:
            return "none"


def recompute_block(
    layer: nn.Module,
    recompute: BlockRecompute,
    around: Around,
    uncounted: tuple[int, int] | None = None,
    *,
    is_random: bool = False,
) -> None:
    """Makes backward recompute a block, in place.

    The recomputed function is ``forward``, inside of the module's hooks: FSDP's hooks run once around forward and once
    around backward. For a layer that forwards some of its inputs unchanged, the function is ``transform``.

    Args:
        uncounted: See ``_EverySecondProduct``.
        is_random: Recomputation uses the random numbers of forward.
    """
    if recompute == "none":
        return
    policy = partial(_EverySecondProduct, uncounted) if recompute == "selective_op" else None
    name = "transform" if hasattr(layer, "transform") else "forward"
    rerun: Any = layer
    rerun.again = getattr(layer, name)  # a compiler may put something else in its place

    def run(*inputs: Any, **named: Any) -> Any:
        function = partial(rerun.again, **named) if named else rerun.again
        return run_again(function, *inputs, around=around, make_policy=policy, is_random=is_random)

    setattr(layer, name, run)


def run_again(
    function: Callable[..., Tensor],
    *inputs: Any,
    around: Around,
    make_policy: Callable[[], Callable[..., CheckpointPolicy]] | None = None,
    is_random: bool = False,
) -> Tensor:
    """Result of a function, which backward recomputes.

    Args:
        inputs: Arguments, saved for backward.
        around: Context around the recomputation; unused under a compiler, where recomputation is part of backward.
        make_policy: Makes the policy of one call, which selects the results to save; None for no saved results.
        is_random: Recomputation uses the random numbers of forward.
    """
    again = partial(checkpoint, function, *inputs, use_reentrant=False, preserve_rng_state=is_random)
    if torch.compiler.is_compiling():
        assert make_policy is None
        compiled: Tensor = again()
        return compiled

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        if make_policy is None:
            return nullcontext(), around()
        both: tuple[AbstractContextManager[None], AbstractContextManager[None]]
        both = create_selective_checkpoint_contexts(make_policy())  # type: ignore[no-untyped-call]
        return both[0], _Both(around(), both[1])

    out: Tensor = again(context_fn=contexts)
    return out


class _EverySecondProduct:
    """Torchtitan's per-op policy: results of every second matmul are saved, starting with the first.

    Results of attention, reduce-scatters and all-to-alls are saved too.

    Args:
        uncounted: Shape of a router's matrix (inputs, outputs), whose matmuls are recomputed and not counted.
    """

    def __init__(self, uncounted: tuple[int, int] | None) -> None:
        self._uncounted = uncounted
        self._num_matmuls = {False: 0, True: 0}  # in recomputation too, about which torch 2.11 asks again

    def __call__(
        self, context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        """For torch's own checkpointing."""
        del kwargs
        is_matmul = operation in _MATMULS and tuple(args[-1].shape) != self._uncounted
        self._num_matmuls[context.is_recompute] += is_matmul
        is_odd = self._num_matmuls[context.is_recompute] % 2 == 1
        keeps = operation in _ATTENTIONS or operation in _COLLECTIVES or (is_matmul and is_odd)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def hide_hooks(modules: Iterable[nn.Module]) -> None:
    """Hides the operations of hooks that modules have by now from selective checkpointing (``selective_op``).

    torch requires the same operations in recomputation as in forward, and FSDP's hooks all-gather at other times.
    """
    hidden: list[TorchDispatchMode] = []

    def hide(*_: Any) -> None:
        modes = _get_current_dispatch_mode_stack()
        if modes and isinstance(modes[-1], _CachingTorchDispatchMode | _CachedTorchDispatchMode):
            hidden.append(_pop_mode())

    def show(*_: Any) -> None:
        if hidden:
            _push_mode(hidden.pop())

    for module in modules:
        module.register_forward_pre_hook(hide, prepend=True)
        module.register_forward_pre_hook(show)
        module.register_forward_hook(hide, prepend=True)
        module.register_forward_hook(show)


class _Both(AbstractContextManager[None]):
    """Two contexts, the second inside of the first; one generator for both would free tensors too early."""

    def __init__(self, outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)


def unmodelled_recompute(job: RunSpec) -> Iterator[Problem]:
    """Problems of recompute modes that the executor lacks, and of selective_op with options that hide its matmuls."""
    mode = job.plan.recompute
    if mode not in RECOMPUTES:
        yield Problem(
            field="plan.recompute",
            value=mode,
            rule="the executor does not recompute like this",
            fix=f"use {', '.join(RECOMPUTES[:-1])} or {RECOMPUTES[-1]}",
        )
    if mode == "selective_op":
        for what, fix in _without_selective_op(job):
            rule = f"the executor does not support selective_op {what}"
            yield Problem(field="plan.recompute", value=mode, rule=rule, fix=f"use selective or full{fix}")


def _without_selective_op(job: RunSpec) -> Iterator[tuple[str, str]]:
    """Options that selective_op does not support, each with a fix."""
    plan, model = job.plan, job.model
    if plan.offload_activations:
        yield "with activations that are moved to the host", ", or offload_activations = false"
    if job.software.compiled:
        yield "of blocks that are compiled", ", or software.compiled = false"
    if job.training.precision == "fp8":
        yield "in fp8", ", or precision = bf16"
    if model.family == "t5":
        yield "of T5, whose attention is not one operation", ""
    if model.lora_rank:
        yield "of matrices with adapters", ", or lora_rank = 0"
    if len(model.segments) > 1:
        yield "of packed documents", ", or no document_lengths"
