"""Blocks and attention cores that backward runs again, in full or but for the products that are kept.

Used private names of torch: the modes of its selective checkpointing, and the stack that they are on (``hide_hooks``).
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

__all__ = [
    "RECOMPUTES",
    "Around",
    "BlockRecompute",
    "hide_hooks",
    "of_block",
    "recompute_block",
    "run_again",
    "unmodelled_recompute",
]

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "selective_op", "selective_layer", "full")
"""The modes of a plan that the executor has; with ``selective`` the attention core alone sees to it."""

BlockRecompute = Literal["none", "full", "selective_op"]
"""What is done with one block: it keeps all it needs, its input, or that and some products."""

Around = Callable[[], AbstractContextManager[None]]
"""Makes what is entered around a second forward, which ends early where torch needs no more of it."""

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
_ATTENTIONS = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
_c10d = torch.ops._c10d_functional
_COLLECTIVES = {_c10d.reduce_scatter_tensor.default, _c10d.all_to_all_single.default}


def of_block(mode: Recompute, number: int) -> BlockRecompute:
    """What a plan's mode is for one of the model's blocks, counted from 0."""
    assert mode in RECOMPUTES, mode
    match mode:
        case "full" | "selective_op":
            return mode
        case "selective_layer":
            return "full" if number % 2 else "none"
        case _:
            return "none"


def recompute_block(
    layer: nn.Module, recompute: BlockRecompute, around: Around, uncounted: tuple[int, int] | None = None
) -> None:
    """Makes backward run a block again, in place.

    What runs again is its ``forward``, inside of its hooks: so FSDP's run once around forward and once around backward.
    Of a layer that only hands on some of its inputs it is ``transform``.

    Args:
        layer: The block.
        recompute: What of it runs again.
        around: Of that.
        uncounted: As of ``_EverySecondProduct``.
    """
    if recompute == "none":
        return
    policy = partial(_EverySecondProduct, uncounted) if recompute == "selective_op" else None
    name = "transform" if hasattr(layer, "transform") else "forward"
    rerun: Any = layer
    rerun.again = getattr(layer, name)  # a compiler may put something else in its place

    def run(*inputs: Tensor) -> Tensor:
        return run_again(rerun.again, *inputs, around=around, make_policy=policy)

    setattr(layer, name, run)


def run_again(
    function: Callable[..., Tensor],
    *inputs: Any,
    around: Around,
    make_policy: Callable[[], Callable[..., CheckpointPolicy]] | None = None,
) -> Tensor:
    """What a function makes of its inputs; backward runs it again.

    Args:
        function: What runs twice.
        inputs: What it is given, which is kept.
        around: Of the second run. A compiled block has none that could be told from the rest of its backward.
        make_policy: Makes a policy for one run, of which results are kept; None for none.
    """
    again = partial(checkpoint, function, *inputs, use_reentrant=False, preserve_rng_state=False)
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
    """Torchtitan's per-op policy: the first matrix product is kept, the second not, and so on.

    Attention is kept, and so are reduce-scatters and all-to-alls.

    Args:
        uncounted: Shape of the matrix of a router (inputs, outputs), whose products run again and do not count.
    """

    def __init__(self, uncounted: tuple[int, int] | None) -> None:
        self._uncounted, self._num_products = uncounted, 0

    def __call__(
        self, context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        """For torch's own checkpointing."""
        del context, kwargs
        product = operation in _PRODUCTS and tuple(args[-1].shape) != self._uncounted
        self._num_products += product
        keeps = operation in _ATTENTIONS or operation in _COLLECTIVES or (product and self._num_products % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def hide_hooks(modules: Iterable[nn.Module]) -> None:
    """Blocks of ``selective_op`` do not see what hooks do that are registered around the forward of modules by now.

    torch wants the same operations when a block runs again, and FSDP's hooks gather parameters at other times.
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
    """Two contexts, the second inside of the first; one generator for both would let go of tensors too early."""

    def __init__(self, outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)


def unmodelled_recompute(job: RunSpec) -> Iterator[Problem]:
    """Modes that the executor does not have, and selective_op beside what hides its products or was not tried."""
    mode = job.plan.recompute
    if mode not in RECOMPUTES:
        yield Problem(
            field="plan.recompute",
            value=mode,
            rule="the executor does not recompute like this",
            fix=f"use {', '.join(RECOMPUTES[:-1])} or {RECOMPUTES[-1]}",
        )
    if mode == "selective_op":
        for what, fix in _beside_selective_op(job):
            rule = f"the executor does not keep single products {what}"
            yield Problem(field="plan.recompute", value=mode, rule=rule, fix=f"use selective or full{fix}")


def _beside_selective_op(job: RunSpec) -> Iterator[tuple[str, str]]:
    """With what else that would help."""
    plan, model = job.plan, job.model
    if plan.offload_activations:
        yield "beside activations that are moved to the host", ", or offload_activations = false"
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
