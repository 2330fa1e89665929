"""A stage of a captured model: the user's own module with its loss, and the batches that the user's code makes.

The module is that of the factory in the model's file. Its blocks are the layers that FSDP shards and that backward
recomputes. All other weights are outside of layers, in FSDP's root unit.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from executor.capture.capture import Loss, loss_of, source_hash
from executor.capture.hugging_face import module_of_config
from executor.capture.user_code import built_with_weights, called, function_of
from executor.distributed.precision import with_fp8_linears
from executor.distributed.recompute import Around, of_block, recompute_block
from executor.models.lora import add_adapter
from executor.models.model import Stage
from simplan.errors import Problem, SpecError
from simplan.io import read_json
from simplan.model.captured.facts import CapturedInput, CapturedModel
from simplan.model.captured.request import Reference
from simplan.model.layer import LayerSpec, ParameterSpec
from simplan.model.low_precision import Fp8Recipe
from simplan.plan.plan import Recompute

_FIELD = "model.file"


class CapturedStage(Stage):
    """A captured module, whose forward takes one batch and gives its loss.

    Attributes:
        module: The user's module.
        layers: Its blocks, by the index of their LayerSpec (as text).
    """

    def __init__(self, module: nn.Module, model: CapturedModel, loss: Loss | None) -> None:
        nn.Module.__init__(self)
        self.around_layers = None
        self.module, self._model, self._loss = module, model, loss
        self.layers = {str(i): module.get_submodule(path) for i, path in enumerate(model.modules) if path}

    def forward(self, *inputs: Any) -> Tensor:
        """The loss of one batch: a tuple or a dictionary of the arguments of the module's forward."""
        (batch,) = inputs
        args, named = ((), batch) if isinstance(batch, Mapping) else (batch, {})
        return loss_of(self.module(*args, **named), self._loss)

    def with_specs(self, layers: Sequence[LayerSpec]) -> Iterator[tuple[str, nn.Parameter, ParameterSpec]]:
        """See ``Stage.with_specs``; a weight that several layers use is there once."""
        for name, said in _named_specs(self._model, layers).items():
            yield f"module.{name}", self.module.get_parameter(name), said


def build_captured(
    model: CapturedModel,
    layers: Sequence[LayerSpec],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    recompute: Recompute = "none",
    *,
    recompute_layers: int | None = None,
    around_rerun: Around = nullcontext,
    frozen_dtype: torch.dtype | None = None,
    fp8_recipe: Fp8Recipe | None = None,
    finish: Callable[[int, nn.Module], None] = lambda index, layer: None,
) -> CapturedStage:
    """Builds the module of a captured model by its factory, with weights that depend on the seed alone.

    Args:
        model: The captured model.
        layers: Its LayerSpecs.
        dtype: Dtype of weights, and of buffers of floating-point numbers.
        frozen_dtype: Dtype of the module itself where its LayerSpecs have adapters, whose dtype is ``dtype``.
        recompute, recompute_layers, around_rerun, fp8_recipe, finish: See ``build_stage``; the last one is called for
            blocks.

    Raises:
        SpecError: The module cannot be built, or is not the one that was captured.
    """
    with torch.random.fork_rng(devices=[]):
        _seed(seed)
        module = _built(model)
        _check_same(module, model)
        adapters = _adapters(model, layers)
        own_dtype = frozen_dtype if adapters and frozen_dtype is not None else dtype
        if any((x.device, x.dtype) != (device, own_dtype) for x in module.parameters()):  # torch swaps no fake tensors
            module = module.to(device, own_dtype)
        for path, (a, b) in adapters.items():
            add_adapter(module.get_submodule(path), a, b, dtype)
    module.train()
    stage = CapturedStage(module, model, None if not model.loss else function_of(_FIELD, _reference(model.loss)))
    for _, parameter, said in stage.with_specs(layers):
        parameter.requires_grad_(not said.frozen)
    for number, (index, layer) in enumerate(stage.layers.items()):
        mode = of_block(recompute, number)
        if fp8_recipe is not None:
            with_fp8_linears(layer, layers[int(index)], fp8_recipe)
        within = recompute_layers is None or number < recompute_layers
        recompute_block(layer, mode if within else "none", around_rerun, is_random=True)
        finish(int(index), layer)
    return stage


def _named_specs(model: CapturedModel, layers: Sequence[LayerSpec]) -> dict[str, ParameterSpec]:
    """ParameterSpecs by name in the whole module; a weight that several layers use is there once."""
    found: dict[str, ParameterSpec] = {}
    for index, layer in enumerate(layers):
        path = model.module_of(index)
        for said in layer.parameters:
            found.setdefault(f"{path}.{said.name}" if path and not said.in_root else said.name, said)
    return found


def _adapters(model: CapturedModel, layers: Sequence[LayerSpec]) -> dict[str, tuple[ParameterSpec, ParameterSpec]]:
    """Linear layer -> its A and B."""
    specs = _named_specs(model, layers)
    paths = [name.removesuffix(".lora_a.weight") for name in specs if name.endswith(".lora_a.weight")]
    return {path: (specs[f"{path}.lora_a.weight"], specs[f"{path}.lora_b.weight"]) for path in paths}


class CapturedData:
    """Batches of a captured model: of the user's function, or random ones of the captured shapes.

    Args:
        model: The captured model.
        seed: Seed of the run.
    """

    def __init__(self, model: CapturedModel, seed: int) -> None:
        self._model, self._seed = model, seed
        self._reference = _reference(model.batch) if model.batch else None
        self._function = function_of(_FIELD, self._reference) if self._reference else self._random

    def batch(self, step: int, microbatch: int, num_samples: int) -> Any:
        """Arguments of forward; the same for every split of the step's microbatches over ranks.

        Args:
            microbatch: Number of the microbatch among all of the step.
        """
        with torch.random.fork_rng(devices=[]):
            _seed((self._seed * 100_003 + step) * 1_000_003 + microbatch)
            if self._reference is None:
                return self._function(num_samples)
            return called(_FIELD, self._reference, self._function, num_samples)

    def _random(self, num_samples: int) -> dict[str, Tensor]:
        return {given.name: _drawn(given, num_samples) for given in self._model.inputs}


def moved(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A batch on a device, with floating-point numbers in a dtype."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype) if leaf.is_floating_point() else leaf.to(device)

    return tree_map(move, batch)


def _drawn(given: CapturedInput, num_samples: int) -> Tensor:
    shape, dtype = (num_samples, *given.shape), getattr(torch, given.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(max(1, given.high), shape).to(dtype)


def _seed(seed: int) -> None:
    """Seeds the generators that user code may use."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _built(model: CapturedModel) -> nn.Module:
    if model.factory.endswith(".json"):
        return module_of_config(read_json(Path(model.factory)), "cpu")[0]
    if not model.factory:
        rule, fix = "names no function that makes the module", "capture it with simplan capture MODULE:FACTORY"
        raise SpecError(Problem(field=_FIELD, value=model.name, rule=rule, fix=fix))
    return built_with_weights(_FIELD, _reference(model.factory))


def _check_same(module: nn.Module, model: CapturedModel) -> None:
    """Raises a SpecError unless the module is the one that was captured."""
    if source_hash(module) != model.source_sha256:
        rule = f"was captured from other code than {model.factory} has now"
        raise SpecError(Problem(field=_FIELD, value=model.name, rule=rule, fix="capture it again"))


def _reference(text: str) -> Reference:
    """A function of the user's code, which is imported from the current folder or the environment."""
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    return Reference.of(_FIELD, text)
