"""Imports the functions that a request names, and captures the module that they make."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.capture.capture import model_from_module
from simplan.errors import Problem, SpecError
from simplan.io import read_json
from simplan.model.captured.facts import CapturedModel
from simplan.model.captured.request import CaptureRequest, Reference


def capture(request: CaptureRequest) -> CapturedModel:
    """Runs the user's code.

    Raises:
        SpecError: It cannot be imported, fails, or cannot be captured; says where.
    """
    sys.path.insert(0, request.folder)
    if request.config:
        return _of_config(request)
    assert request.factory is not None, "a request has one of both"
    assert request.batch is not None, "a request has one of both"
    module = built(request.factory)
    batch = function_of("--inputs", request.batch)
    loss = None if request.loss is None else function_of("--loss", request.loss)
    made_by = request.batch
    captured = model_from_module(
        module,
        lambda number: called("--inputs", made_by, batch, number),
        loss,
        tensor_parallel=request.tensor_parallel,
        tp_plan=None if request.tp_plan is None else function_of("--tp-plan", request.tp_plan),
    )
    origin = {"factory": str(request.factory), "batch": str(request.batch), "loss": str(request.loss or "")}
    origin |= {"tp_plan": str(request.tp_plan or "")}
    return captured.model_copy(update=origin | ({"name": request.name} if request.name else {}))


def _of_config(request: CaptureRequest) -> CapturedModel:
    from executor.capture.hugging_face import batch_of, module_of_config
    from executor.capture.images import Images, batch_with_images

    if find_spec("transformers") is None:
        rule, fix = (
            "needs transformers, which is not installed here",
            "pip install transformers, or use a built-in family",
        )
        raise SpecError(Problem(field=request.config, rule=rule, fix=fix))
    module, config = module_of_config(read_json(Path(request.config)))
    name = request.name or Path(request.config).resolve().parent.name
    made = None
    batch = batch_of(module, config, request.seq_len, sees=request.images is None)
    if request.images:
        images = Images(request.images, request.image_size)
        batch, made = batch_with_images(module, config, request.seq_len, images)
    try:
        captured = model_from_module(
            module,
            batch,
            name=name,
            tensor_parallel=request.tensor_parallel,
            tp_plan=None if request.tp_plan is None else function_of("--tp-plan", request.tp_plan),
        )
    except SpecError as error:
        fix = "give a batch of your own: simplan capture MODULE:FACTORY --inputs MODULE:FUNCTION"
        problems = [p if p.field.startswith("--t") else replace(p, fix=fix) for p in error.problems]
        raise type(error)(problems) from error
    origin: dict[str, Any] = {"factory": str(request.config), "tp_plan": str(request.tp_plan or ""), "images": made}
    software = captured.software | {"transformers": version("transformers")}
    return captured.model_copy(update=origin | {"software": software})


def built(factory: Reference) -> nn.Module:
    """The module that a factory makes, without memory for weights where the factory allows it."""
    function = function_of("SOURCE", factory)
    try:
        with torch.device("meta"):
            module = function()
    except Exception:
        return built_with_weights("SOURCE", factory)
    return _checked("SOURCE", factory, module)


def built_with_weights(field: str, factory: Reference) -> nn.Module:
    """The module that a factory makes, on the device that it chooses.

    Args:
        field: Name of the factory in sentences.
    """
    return _checked(field, factory, called(field, factory, function_of(field, factory)))


def _checked(field: str, factory: Reference, module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        rule = f"gives {type(module).__name__}, and must give a torch.nn.Module"
        raise SpecError(Problem(field=field, value=str(factory), rule=rule, fix="return the model itself"))
    return module


def function_of(field: str, reference: Reference) -> Callable[..., Any]:
    """The function that a reference names, imported.

    Raises:
        SpecError: There is none, or its module fails.
    """
    try:
        target: Any = importlib.import_module(reference.module)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        rule = f"cannot be imported ({said})"
        fix = "run the command in the folder of your code, or install it"
        raise SpecError(Problem(field=field, value=str(reference), rule=rule, fix=fix)) from error
    for part in reference.function.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        rule = f"is no function of {reference.module}"
        raise SpecError(Problem(field=field, value=str(reference), rule=rule, fix="check its name"))
    function: Callable[..., Any] = target
    return function


def called(field: str, reference: Reference, function: Callable[..., Any], *args: Any) -> Any:
    """Result of a function of the user's code.

    Raises:
        SpecError: It fails; says where.
    """
    try:
        return function(*args)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        rule = f"fails in {frame.filename}, line {frame.lineno}: {type(error).__name__}: {error}"
        argument = f" with {args[0]}" if args else ""
        fix = f"make {reference}({args[0] if args else ''}) work in Python"
        raise SpecError(Problem(field=field, value=f"{reference}{argument}", rule=rule, fix=fix)) from error
