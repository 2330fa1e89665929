"""Tensor parallelism of a user's module: by the user's plan for ``parallelize_module``, or by that of transformers.

Afterwards every weight is a plain tensor, of this rank, so that DDP, FSDP and optimizers take it as any other. The
module sees it as the DTensor that the plan made of it, in forward and where a block is recomputed. A gradient of which
each rank has a part (of a norm over its own tokens) stays a part: ``executor.distributed.gradients`` sums all of them
once per step, where a DTensor would be summed alone in every microbatch.
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, _api, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module, style

from simplan.errors import NotModelledError, Problem, SpecError

Plan = Callable[..., Any]
"""The user's function. Without arguments, or of the module, it gives the dictionary for ``parallelize_module``; of the
module and the mesh, it may also split the module itself."""

_FIELD = "--tp-plan"
_MOST_ARGUMENTS = 2  # the module and the mesh
_NOT_USERS = str(Path(torch.__file__).parent), str(Path(__file__).parent)
_UNRESOLVED = "could not be resolved"
_PARTIAL_STYLE = "replicated_with_grad_allreduce"
_STYLES = frozenset({
    "colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep",
    "embedding_rowwise", "embedding_colwise", "replicate", _PARTIAL_STYLE,
})  # fmt: skip
"""Styles of transformers that are modeled."""


def split_module(
    module: nn.Module, mesh: DeviceMesh, plan: Plan | None, partial: Collection[str] = ()
) -> frozenset[str]:
    """Splits a module in place, over the ranks of a mesh of one dimension; all of them have equal weights.

    Args:
        plan: See ``Plan``; None for the plan that transformers has for its model.
        partial: Names of the weights whose gradients are parts.

    Returns:
        Names of weights whose gradients are parts although no DTensor tells so.

    Raises:
        SpecError: The plan does not fit the module.
        NotModelledError: It has a style that is not modeled.
    """
    tied = _tied(module)
    told = frozenset[str]()
    if plan is None:
        told = _split_by_transformers(module, mesh, tied)
    else:
        with _own_weights():
            _split_by_user(module, mesh, plan)
    _check_tied(module, tied)
    _check_even(module)
    _show_as_dtensors(module, {*partial, *told})
    return told


def plain(loss: Tensor) -> Tensor:
    """A loss that may be a DTensor, as a plain tensor."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


# the user's plan


def _split_by_user(module: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    name = getattr(plan, "__name__", "the plan")
    required = [
        p for p in inspect.signature(plan).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    takes_mesh = len(required) == _MOST_ARGUMENTS
    if len(required) > _MOST_ARGUMENTS:
        rule, fix = f"takes {len(required)} arguments", "take none, the module, or the module and the mesh"
        raise SpecError(Problem(field=_FIELD, value=name, rule=rule, fix=fix))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            styles = plan(*(module, mesh)[: len(required)])
        except Exception as error:
            raise SpecError(_failed(name, error)) from error
    _check_resolved(name, caught)
    if isinstance(styles, Mapping):
        for key, style in styles.items():
            _apply(module, mesh, key, style)
    elif not takes_mesh:
        rule = (
            f"gives {type(styles).__name__}, and must give a dictionary of names of modules and their parallel styles"
        )
        raise SpecError(Problem(field=_FIELD, value=name, rule=rule, fix="return the plan for parallelize_module"))


def _failed(name: str, error: Exception) -> Problem:
    """Sentence on a function that fails, with the line of the user's code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_USERS)]
    place = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    rule = f"fails{place}: {type(error).__name__}: {_first_line(error)}"
    return Problem(field=_FIELD, value=name, rule=rule, fix="make it work in Python, on any rank")


def _first_line(error: Exception) -> str:
    said = str(error).strip()
    return said.splitlines()[0][:200] if said else type(error).__name__


@contextmanager
def _own_weights() -> Iterator[None]:
    """Each rank takes its part of its own weights, as all have the same; torch would send those of the first rank."""
    distribute = distribute_tensor

    def of_own(tensor: Tensor, *args: Any, **kwargs: Any) -> DTensor:
        return distribute(tensor, *args, **{**kwargs, "src_data_rank": None})

    with patch.object(_api, "distribute_tensor", of_own), patch.object(style, "distribute_tensor", of_own):
        yield


def _apply(module: nn.Module, mesh: DeviceMesh, key: Any, style: Any) -> None:
    """Applies one entry of a plan."""
    if not isinstance(key, str) or not isinstance(style, ParallelStyle):
        rule = f"is {style!r}, and must be a style of torch.distributed.tensor.parallel"
        raise SpecError(Problem(field=_FIELD, value=str(key), rule=rule, fix="use ColwiseParallel() or another one"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            parallelize_module(module, mesh, {key: style}, src_data_rank=None)
        except (NotImplementedError, ValueError, RuntimeError, AssertionError, TypeError) as error:
            rule = f"{type(style).__name__} does not go with it ({_first_line(error)})"
            raise SpecError(Problem(field=_FIELD, value=key, rule=rule, fix="use another style, or module")) from error
    _check_resolved(key, caught)


def _check_resolved(name: str, caught: list[warnings.WarningMessage]) -> None:
    """Raises a SpecError where torch warns of a pattern that matches no module; other warnings are of no concern."""
    for warning in caught:
        said = str(warning.message)
        if _UNRESOLVED in said:
            key = said.split("'")[1] if "'" in said else name
            rule, fix = (
                "matches no module",
                "use names of module.named_modules(); * stands for one part of a name",
            )
            raise SpecError(Problem(field=_FIELD, value=key, rule=rule, fix=fix))


# the plan of transformers


def _split_by_transformers(module: nn.Module, mesh: DeviceMesh, tied: Sequence[Sequence[str]]) -> frozenset[str]:
    """Splits a model as ``from_pretrained(tp_plan="auto")`` of transformers 5.23 does: by its own classes of DTensors.

    Args:
        tied: Names of weights that are one tensor. Each is split apart, as before transformers ties them.

    Returns:
        Names of the weights whose gradients are parts. transformers sums these in a hook after every backward, which
        also sums what earlier microbatches have summed; they are summed once per step instead.
    """
    resolve = getattr(module, "_resolve_parallel_plans", None)
    if resolve is None:
        rule, fix = "is missing, and the module is none of transformers 5.23", "name a function that gives your plan"
        raise SpecError(Problem(field=_FIELD, rule=rule, fix=fix))
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    try:
        plan, _, _ = resolve(DistributedConfig(tp_size=mesh.size()))
    except ValueError as error:
        rule, fix = f"is missing, and transformers has none ({error})", "name a function that gives your plan"
        raise SpecError(Problem(field=_FIELD, rule=rule, fix=fix)) from error
    for name, word in plan.items():
        if word not in _STYLES:
            rule = f"{word}, a style of transformers' plan, is not modeled yet"
            fix = "name a function with a plan of your own, or leave --tensor-parallel out"
            raise NotModelledError(Problem(field=_FIELD, value=name, rule=rule, fix=fix))
    for name in (name for names in tied for name in names[1:]):
        owner, _, leaf = name.rpartition(".")
        weight = module.get_parameter(name)
        apart = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
        module.get_submodule(owner).register_parameter(leaf, apart)
    parts = frozenset(name for name, _ in module.named_parameters() if plan.get(name) == _PARTIAL_STYLE)
    apply_tensor_parallelism(module, mesh, {name: word for name, word in plan.items() if word != _PARTIAL_STYLE})
    tie: Callable[[], object] = getattr(module, "tie_weights", lambda: None)
    tie()
    return parts


# checks


def _tied(module: nn.Module) -> list[list[str]]:
    """Names of weights that are one tensor."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [same for same in names.values() if len(same) > 1]


def _check_tied(module: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for names in tied:
        if len({id(parameters[name]) for name in names}) > 1:
            rule = f"splits {' and '.join(names)}, which are one weight, into several"
            fix = "tie them again in a function of the module and the mesh, or leave one of them out"
            raise SpecError(Problem(field=_FIELD, value=names[0], rule=rule, fix=fix))


def _check_even(module: nn.Module) -> None:
    """Raises a SpecError unless all ranks have equal parts."""
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        (placement,), ranks = parameter.placements, parameter.device_mesh.size()
        if type(placement) not in (Shard, Replicate):
            rule, fix = f"has the placement {placement}, which is not modeled yet", "use Shard or Replicate"
            raise NotModelledError(Problem(field=_FIELD, value=name, rule=rule, fix=fix))
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % ranks:
            size = parameter.shape[placement.dim]
            rule = f"has {size} elements in dimension {placement.dim}, which {ranks} ranks cannot split equally"
            fix = "use a degree that divides it, or leave this weight out of the plan"
            raise SpecError(Problem(field="--tensor-parallel", value=f"{ranks}: {name}", rule=rule, fix=fix))


# weights that are plain tensors, and DTensors to their modules


def _show_as_dtensors(module: nn.Module, partial: Collection[str]) -> None:
    """Replaces DTensor weights by the tensors of this rank; their modules read them as DTensors."""
    made: dict[int, nn.Parameter] = {}
    for path, part in list(module.named_modules()):
        shown: dict[str, property] = {}
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                continue
            local_parameter = made.get(id(parameter))
            if local_parameter is None:
                local = parameter.to_local().detach()
                local_parameter = made[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
            part.register_parameter(name, local_parameter)
            is_part = (f"{path}.{name}" if path else name) in partial
            shown[name] = property(_reader(name, parameter.device_mesh, parameter.placements[0], is_part=is_part))
        if shown:
            part.__class__ = type(type(part).__name__, (type(part),), shown)


def _reader(name: str, mesh: DeviceMesh, placement: Placement, *, is_part: bool) -> Callable[[nn.Module], Tensor]:
    def read(module: nn.Module) -> Tensor:
        parameter = module._parameters[name]
        assert parameter is not None
        if isinstance(parameter, DTensor):  # a shard of FSDP, outside of forward
            return parameter
        if not is_part:
            return _from_local(parameter, mesh, placement)
        placed: Tensor = _PartOfGradient.apply(parameter, mesh)  # type: ignore[no-untyped-call]
        return placed

    return read


def _from_local(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return _FROM_LOCAL(tensor, mesh, (placement,), run_check=False)


_FROM_LOCAL = DTensor.from_local
"""torch's own, also while a capture watches those of the plan."""


class _PartOfGradient(torch.autograd.Function):
    """A weight that all ranks have, as a DTensor; its gradient stays the part that this rank has computed."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mesh: DeviceMesh) -> DTensor:
        """DTensor with the memory of the weight."""
        del ctx
        return _from_local(weight, mesh, Replicate())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        """This rank's part."""
        del ctx
        (gradient,) = gradients
        return gradient.redistribute(placements=(Partial(),)).to_local(), None
