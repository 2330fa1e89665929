"""torch.compile by transformer block.

What is compiled is the function of a block, not the module: hooks of FSDP and DDP stay outside of it. Blocks of one
shape share one compilation.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from executor.launch.watchdog import Heartbeat, RankState
from executor.models.model import Stage
from simplan.model.layer import LayerKind
from simplan.model.model import ModelSpec

BACKEND = "inductor"
_BEAT_S = 2.0
_MAX_SHAPES = 256  # kinds of blocks in one process; a calibration has many
_MAX_S = 900.0  # a compilation that takes longer hangs


def compile_block(layer: nn.Module, *, whole: bool) -> None:
    """Compiles a block, in place; torch does so when it first runs.

    Args:
        layer: Before FSDP shards it or DDP wraps its stage.
        whole: Require one graph for the block; otherwise communication runs between compiled parts.
    """
    from torch import _dynamo  # a second to import: only where needed

    _dynamo.config.fail_on_recompile_limit_hit = True  # not eager without a word
    _dynamo.config.recompile_limit = _MAX_SHAPES
    _dynamo.config.optimize_ddp = False  # it would cut blocks at the ends of buckets
    # torch does not compile a function whose recomputed part communicates, so compile only that part
    name = "forward" if whole or not hasattr(layer, "again") else "again"
    setattr(layer, name, torch.compile(getattr(layer, name), backend=BACKEND, fullgraph=whole, dynamic=False))


def compile_blocks(stage: Stage, spec: ModelSpec, *, whole: bool) -> None:
    """Compiles all blocks of a stage, as ``compile_block`` does."""
    for index, layer in stage.layers.items():
        if spec.layers[int(index)].kind is LayerKind.BLOCK:
            compile_block(layer, whole=whole)


@contextmanager
def watched_compilation(heartbeat: Heartbeat) -> Iterator[None]:
    """Keeps the heartbeat alive while torch compiles inside of the block, which may take long."""
    from torch._dynamo.callback import CallbackArgs, callback_handler

    compiles = threading.Event()
    over = threading.Event()

    def begin(args: CallbackArgs) -> None:
        del args
        compiles.set()

    def end(args: CallbackArgs) -> None:
        del args
        compiles.clear()

    def beat() -> None:
        spent_s = 0.0
        while not over.wait(_BEAT_S):
            spent_s = spent_s + _BEAT_S if compiles.is_set() else 0.0
            if 0 < spent_s < _MAX_S:
                heartbeat.beat(RankState.RUNNING, "compiling")

    thread = threading.Thread(target=beat, name="compilation watch", daemon=True)
    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)
