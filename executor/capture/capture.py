"""Captures a module: its layers and operators, without a device and without weights in memory."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointError

from executor.capture.cutting import Cut, cut
from executor.capture.graph import graph_of, shape_of_sample
from executor.capture.split_trace import trace_split
from executor.capture.splitting import Plan, plain, split_module
from executor.capture.trace import Trace, trace
from executor.capture.values import MAX_ELEMENTS, NEEDS_VALUES, Values, with_values
from simplan.errors import Problem, SpecError
from simplan.model.captured.facts import (
    CapturedGraph,
    CapturedInput,
    CapturedModel,
    CapturedParameter,
    CapturedSplit,
    ComputedIn,
)

Batch = Callable[[int], Any]
"""Gives the arguments of forward for a number of samples, as a tuple or a dictionary."""
Loss = Callable[[Any], Tensor]
"""Gives the loss, a number, from what forward returns."""

_PRECISIONS: tuple[ComputedIn, ...] = ("fp32", "bf16", "autocast")
_SAMPLES = 2, 3
_CPU = torch.device("cpu")


def model_from_module(
    module: nn.Module,
    batch: Batch,
    loss: Loss | None = None,
    *,
    name: str = "",
    precisions: Any = _PRECISIONS,
    tensor_parallel: Sequence[int] = (),
    tp_plan: Plan | None = None,
) -> CapturedModel:
    """Captures a module.

    Args:
        module: The module, on any device, also on ``meta``. It is not changed, and its weights are not copied.
        batch: See ``Batch``. Called with 2 and 3.
        loss: See ``Loss``. None for the output's own ``loss``, or else the sum of the tensors that forward returns.
        name: Name of the model; empty for that of the class.
        precisions: Precisions to capture.
        tensor_parallel: Degrees above 1 for which one rank's part is captured as well, in a fake process group.
        tp_plan: See ``executor.capture.splitting.Plan``; None for the plan of transformers.

    Raises:
        SpecError: The module cannot be captured; says the file and line.
        NotModelledError: Something in it is not modeled.
    """
    batches = {number: batch(number) for number in _SAMPLES}
    whole = _captured(module, batches.values(), loss, precisions)
    splits = [
        CapturedSplit(degree=degree, unused=part.unused, graphs=part.graphs, refused=part.refused)
        for degree in sorted({*tensor_parallel} - {1})
        for part in (_captured_of_rank(module, batches.values(), loss, tuple(whole.graphs), degree, tp_plan),)
    ]
    return CapturedModel(
        format="simplan-captured-model",
        schema_version=1,
        name=name or type(module).__name__,
        source_sha256=source_hash(module),
        software={"torch": version("torch")},
        inputs=tuple(_inputs(batches[2], batches[3])),
        modules=tuple(layer.module for layer in whole.cuts),
        classes=tuple(
            type(module.get_submodule(layer.module)).__name__ if layer.module else "" for layer in whole.cuts
        ),
        starts=tuple(layer.starts for layer in whole.cuts),
        input_embeddings=_input_embeddings(module),
        unused=whole.unused,
        graphs=whole.graphs,
        refused=whole.refused,
        computed_in=next(iter(whole.graphs)),
        splits=tuple(splits),
    )


def _input_embeddings(module: nn.Module) -> tuple[str, ...]:
    """Returns the modules to which ``enable_input_require_grads`` of transformers 5.23 gives a hook, by path."""
    paths, names = {id(inner): path for path, inner in module.named_modules()}, dict[str, None]()
    for inner in module.modules():
        get = getattr(inner, "get_input_embeddings", None)
        if callable(get):
            with suppress(NotImplementedError):
                path = paths.get(id(get()))
                names |= {path: None} if path else {}
    return (*names,)


class _Captured(NamedTuple):
    """Layers of a module, or of the part of it that a tensor-parallel rank has; see ``CapturedModel``."""

    cuts: tuple[Cut, ...]
    unused: tuple[CapturedParameter, ...]
    graphs: dict[ComputedIn, CapturedGraph]
    refused: dict[ComputedIn, str]


def _captured(
    module: nn.Module,
    batches: Collection[Any],
    loss: Loss | None,
    precisions: Sequence[ComputedIn],
    split: Callable[[nn.Module], frozenset[str]] | None = None,
) -> _Captured:
    """Captures a module in several precisions.

    Args:
        split: Makes a module one rank's part; gives names of weights whose gradients are parts. None for none.
    """
    graphs: dict[ComputedIn, CapturedGraph] = {}
    cuts: tuple[Cut, ...] = ()
    refused: dict[ComputedIn, str] = {}
    for precision in precisions:
        try:
            two, three, shapes, partial = _traced(module, batches, loss, precision, split)
        except SpecError as error:
            if not graphs:
                raise
            refused[precision] = str(error)
            continue
        cuts = cut(module, two)
        graphs[precision] = graph_of(two, three, cuts, precision, shapes, partial)
        used = {two.parameters[o.storage] for seen in two.operators for o in seen.reads if o.storage in two.parameters}
    unused = (CapturedParameter(name=key, shape=shape) for key, shape in shapes.items() if key not in used)
    return _Captured(cuts, tuple(unused), graphs, refused)


def _captured_of_rank(
    module: nn.Module,
    batches: Collection[Any],
    loss: Loss | None,
    precisions: Sequence[ComputedIn],
    degree: int,
    plan: Plan | None,
) -> _Captured:
    """The part of the first rank of a tensor-parallel degree.

    Raises:
        SpecError: The plan does not fit the module, or the module does not run in parts.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=degree)
    try:
        mesh = DeviceMesh("cpu", list(range(degree)))
        return _captured(module, batches, loss, precisions, lambda fake: split_module(fake, mesh, plan))
    except SpecError as error:
        raise type(error)(_with_degree(problem, degree) for problem in error.problems) from error
    finally:
        dist.destroy_process_group()


def _with_degree(problem: Problem, degree: int) -> Problem:
    """A problem that one tensor-parallel degree has; what is wrong in the plan has its own fix."""
    of_plan = problem.field.startswith("--")
    fix = problem.fix if of_plan else f"leave {degree} out, or change the plan: a rank has 1/{degree} of what it splits"
    return replace(problem, rule=f"{problem.rule} (--tensor-parallel {degree})", fix=fix)


def source_hash(module: nn.Module) -> str:
    """SHA-256 of the source files of a module's classes, those of torch excepted."""
    files = set()
    for part in module.modules():
        try:
            file = inspect.getsourcefile(type(part))
        except (OSError, TypeError):
            continue
        if file is not None and not file.startswith(_TORCH):
            files.add(file)
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(Path(file).read_bytes())
    return total.hexdigest()


_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)


def _traced(
    module: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None,
    precision: ComputedIn,
    split: Callable[[nn.Module], frozenset[str]] | None,
) -> tuple[Trace, Trace, dict[str, tuple[int, ...]], frozenset[str]]:
    """Traces of two and of three samples, shapes of weights, and names of those whose gradients are parts.

    A batch has its values where operators depend on them.
    """
    try:
        return _traced_once(module, batches, loss, precision, split, has_values=False)
    except _NeedsValuesError:
        if split is not None:
            raise
        return _traced_once(module, batches, loss, precision, split, has_values=True)


def _traced_once(
    module: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None,
    precision: ComputedIn,
    split: Callable[[nn.Module], frozenset[str]] | None,
    *,
    has_values: bool,
) -> tuple[Trace, Trace, dict[str, tuple[int, ...]], frozenset[str]]:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = fake_module(module, dtype)
        fake.train()
        partial = frozenset[str]() if split is None else split(fake)
        run = functools.partial(
            _trace_of, fake, loss=loss, precision=precision, is_split=split is not None, has_values=has_values
        )
        two, three = map(run, batches)
        if len(two.operators) != len(three.operators):  # a first call may fill a cache, such as of rotary angles
            two = run(next(iter(batches)))
        shapes = {key: tuple(parameter.shape) for key, parameter in fake.named_parameters()}
        return two, three, shapes, partial


class _NeedsValuesError(SpecError):
    """A module whose operators depend on values of tensors."""


def _trace_of(
    fake: nn.Module, batch: Any, *, loss: Loss | None, precision: ComputedIn, is_split: bool, has_values: bool
) -> Trace:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    inputs = given_batch(batch, dtype, has_values=has_values)
    named = dict(_named(inputs))
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    context = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "autocast" else nullcontext()

    def run() -> Tensor:
        with context:
            return plain(loss_of(fake(*args, **kwargs), loss))

    try:
        return trace_split(fake, run, named) if is_split else trace(fake, run, named, Values() if has_values else None)
    except SpecError:
        raise
    except NEEDS_VALUES as error:
        raise _NeedsValuesError(_problem(error)) from error
    except Exception as error:
        raise SpecError(_problem(error)) from error


def given_batch(batch: Any, dtype: torch.dtype, *, has_values: bool) -> Any:
    """Arguments of forward: a batch whose tensors have no memory, or, where they are small, their values.

    Args:
        dtype: Dtype of numbers in floating point.
        has_values: Whether values are wanted.
    """

    def given(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if has_values and not leaf.is_meta and leaf.numel() <= MAX_ELEMENTS:
            with unset_fake_temporarily():
                return with_values(leaf, dtype)
        return fake_tensor(leaf, dtype)

    return tree_map(given, batch)


def _problem(error: Exception) -> Problem:
    """Sentence on what could not be captured, with the line of the user's code where it happened."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((_TORCH, _OURS))
    ]
    place = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "forward"
    said = str(error).strip().splitlines()[0][:200] if str(error).strip() else ""
    line = f": {frames[-1].line}" if frames and frames[-1].line else ""
    if isinstance(error, CheckpointError):
        rule, fix = "recomputes on its own with torch.utils.checkpoint", "turn it off: plan.recompute says what to do"
    elif isinstance(error, NEEDS_VALUES):
        rule, fix = f"needs values of tensors, which a capture has not{line}", "use shapes in place of values"
    else:
        rule, fix = f"failed with {type(error).__name__}{f' ({said})' if said else ''}{line}", "run it once with data"
    return Problem(field=place, rule=rule, fix=fix)


def fake_module(
    module: nn.Module,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    originals: dict[int, Tensor] | None = None,
    buffer_dtype: torch.dtype | None = None,
) -> nn.Module:
    """A copy of a module whose tensors have no memory, with weights in the given dtype.

    Args:
        originals: Filled with the tensors of the module that are no parameters, by the ``id`` of their copies.
        buffer_dtype: Dtype of these tensors; None for ``dtype``.
    """
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(fake_tensor(parameter, dtype, device), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    with _CopiesWithoutData(buffer_dtype or dtype, device, {} if originals is None else originals):
        return copy.deepcopy(module, memo)


class _CopiesWithoutData(TorchFunctionMode):
    """Deep copies of tensors, wherever a module keeps them, have no memory."""

    def __init__(self, dtype: torch.dtype, device: torch.device, originals: dict[int, Tensor]) -> None:
        super().__init__()
        self._dtype, self._device, self._originals = dtype, device, originals

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replaces these copies."""
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = made = fake_tensor(tensor, self._dtype, self._device)
        self._originals[id(made)] = tensor
        return made


def fake_tensor(tensor: Tensor, dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """A tensor of the same shape without memory; numbers in floating point have the given dtype."""
    made = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty_like(tensor, device=device, dtype=made, requires_grad=False)


def loss_of(output: Any, loss: Loss | None) -> Tensor:
    """The loss of what forward returns: see ``model_from_module``.

    Raises:
        ValueError: There is none.
    """
    if loss is not None:
        return loss(output)
    loss_of_output = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss_of_output, Tensor):
        return loss_of_output
    parts = [leaf.sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not parts:
        raise ValueError("forward returns no tensor of floating-point numbers")
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _named(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a batch by name."""
    pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    for key, value in pairs:
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        for number, leaf in enumerate(leaves):
            word = key if isinstance(key, str) else f"argument{key}"
            yield (word if len(leaves) == 1 else f"{word}.{number}"), leaf


def _inputs(two: Any, three: Any) -> Iterator[CapturedInput]:
    for (name, less), (_, more) in zip(_named(two), _named(three), strict=True):
        shape = shape_of_sample(less.shape, more.shape)
        integers = not less.is_floating_point() and less.dtype is not torch.bool and not less.is_meta
        high = int(max(less.max(), more.max())) + 1 if integers and less.numel() else 0
        yield CapturedInput(name=name, shape=shape, dtype=str(less.dtype).removeprefix("torch."), high=high)
