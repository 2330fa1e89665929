"""A stage of a captured model: the user's own module with its loss, and the batches that the user's code makes.

The module is that of the factory in the model's file. Its blocks are the layers that FSDP shards and that backward
recomputes. All other weights are outside of layers, in FSDP's root unit. A stage of a pipeline has the calls of its
layers (``executor.capture.calls``), and of the module what they need.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from executor.capture.calls import CallsPart, SentTensor
from executor.capture.capture import Loss, loss_of, source_hash
from executor.capture.hugging_face import module_of_config
from executor.capture.images import Images, batch_with_images
from executor.capture.recording import record_calls
from executor.capture.splitting import plain, split_module
from executor.capture.user_code import built_with_weights, called, function_of
from executor.distributed.precision import with_fp8_linears
from executor.distributed.recompute import Around, of_block, recompute_block
from executor.models.lora import add_adapter
from executor.models.model import Stage
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.io import read_json
from simplan.model.captured.facts import CapturedImages, CapturedInput, CapturedModel
from simplan.model.captured.request import Reference
from simplan.model.layer import LayerSpec, ParameterSpec
from simplan.model.low_precision import Fp8Recipe
from simplan.plan.plan import Recompute

_FIELD = "model.file"


class CapturedStage(Stage):
    """A captured module, whose forward takes one batch and gives its loss.

    Attributes:
        module: The user's module.
        layers: Its blocks in the stage, by the index of their LayerSpec (as text).
    """

    def __init__(self, module: nn.Module, model: CapturedModel, loss: Loss | None, layer_range: range) -> None:
        nn.Module.__init__(self)
        self.around_layers = None
        self.module, self._model, self._loss, self._layer_range = module, model, loss, layer_range
        blocks = {index: model.module_of(index) for index in layer_range}
        self.layers = {str(index): module.get_submodule(path) for index, path in blocks.items() if path}

    def forward(self, *inputs: Any) -> Tensor:
        """The loss of one batch: a tuple or a dictionary of the arguments of the module's forward."""
        (batch,) = inputs
        args, named = ((), batch) if isinstance(batch, Mapping) else (batch, {})
        return plain(loss_of(self.module(*args, **named), self._loss))

    def with_specs(self, layers: Sequence[LayerSpec]) -> Iterator[tuple[str, nn.Parameter, ParameterSpec]]:
        """See ``Stage.with_specs``; a weight that several layers use is there once."""
        weights = dict(self.module.named_parameters(remove_duplicate=False))
        for name, said in _named_specs(self._model, layers, self._layer_range).items():
            yield f"module.{name}", weights[name], said


class CapturedPart(CapturedStage):
    """A stage of a pipeline, whose forward gives the tensors for the next stage, and at last the loss.

    Args:
        splits_backward: Backward is split, for which torch takes no views.

    Attributes:
        calls: The calls of its layers.
    """

    def __init__(
        self, whole: CapturedStage, calls: CallsPart, layer_range: range, *, splits_backward: bool = False
    ) -> None:
        super().__init__(whole.module, whole._model, whole._loss, layer_range)
        self.calls, self._splits_backward = calls, splits_backward

    @property
    def received(self) -> tuple[SentTensor, ...]:
        """Tensors from the stage before."""
        return self.calls.received

    @property
    def sent(self) -> tuple[SentTensor, ...]:
        """Tensors for the next stage; of the last stage, the loss."""
        return self.calls.sent

    def forward(  # type: ignore[override]
        self, *inputs: Tensor, batch: Any
    ) -> tuple[Tensor, ...] | Tensor:
        """See the class.

        Args:
            inputs: Tensors from the stage before.
            batch: The batch, which all stages have.
        """
        sent = self.calls.run(self.module, inputs, batch, copies_views=self._splits_backward)
        return sent if len(sent) > 1 else sent[0]

    def joined(self, others: Sequence[Stage]) -> Stage:
        """See ``Stage.joined``; a second copy of a weight that two stages share has a name of its own."""
        if not others:
            return self
        joined = Stage(())
        for stage in (self, *others):
            for name, tensor in _named_tensors(stage):
                *path, attribute = name.split(".")
                owner: nn.Module = joined
                for word in path:
                    if word not in owner._modules:
                        owner.add_module(word, nn.Module())
                    owner = owner.get_submodule(word)
                if not isinstance(tensor, nn.Parameter):
                    is_kept = attribute not in stage.get_submodule(".".join(path))._non_persistent_buffers_set
                    owner.register_buffer(attribute, tensor, persistent=is_kept)
                elif attribute in owner._parameters:
                    owner.register_parameter(f"{attribute}_of_last_stage", tensor)
                else:
                    owner.register_parameter(attribute, tensor)
        return joined

    def drop_others(self, layers: Sequence[LayerSpec]) -> None:
        """Drops the weights and buffers of other stages."""
        names = {name.removeprefix("module.") for name, _, _ in self.with_specs(layers)} | self.calls.weights
        kept = {id(x) for name, x in _named_tensors(self.module) if name in names}
        kept.update(id(buffer) for block in self.layers.values() for buffer in block.buffers())
        for part in self.module.modules():
            for held in (part._parameters, part._buffers):
                held.update({name: None for name, x in held.items() if id(x) not in kept})


class StageCut(NamedTuple):
    """The part of a module that one pipeline stage runs, with its batch and dtypes.

    Attributes:
        stage: Number of the stage.
        boundaries: First layer of each stage, and the number of layers.
        batch, num_samples: Batch of a microbatch, and its samples.
        dtype: Dtype of compute.
        kept_dtype: Dtype of weights, and of buffers.
        autocast: Compute under autocast.
        casts_inputs: Blocks cast their inputs to the dtype of compute, as FSDP does.
        splits_backward: See ``CapturedPart``.
    """

    stage: int
    boundaries: tuple[int, ...]
    batch: Any
    num_samples: int
    dtype: torch.dtype
    kept_dtype: torch.dtype
    autocast: bool
    casts_inputs: bool
    splits_backward: bool


def build_captured(
    model: CapturedModel,
    layers: Sequence[LayerSpec],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    recompute: Recompute = "none",
    *,
    recompute_layers: int | None = None,
    tp: DeviceMesh | None = None,
    around_rerun: Around = nullcontext,
    frozen_dtype: torch.dtype | None = None,
    fp8_recipe: Fp8Recipe | None = None,
    cut: StageCut | None = None,
    finish: Callable[[int, nn.Module], None] = lambda index, layer: None,
) -> CapturedStage:
    """Builds the module of a captured model by its factory, with weights that depend on the seed alone.

    Args:
        model: The captured model.
        layers: Its LayerSpecs, as split for one rank.
        dtype: Dtype of weights, and of buffers of floating-point numbers.
        tp: Ranks over which the module is split, by the plan of the capture; None for a whole module.
        frozen_dtype: Dtype of the module itself where its LayerSpecs have adapters, whose dtype is ``dtype``.
        recompute, recompute_layers, around_rerun, fp8_recipe, finish: See ``build_stage``; the last one is called for
            blocks.
        cut: See ``StageCut``; None for the whole module.

    Raises:
        SpecError: The module cannot be built, or is not the one that was captured.
        NotModelledError: It cannot be cut.
    """
    with torch.random.fork_rng(devices=[]):
        _seed(seed)
        module = _built(model)
        _check_same(module, model)
        adapters = _adapters(model, layers)
        if cut is None or adapters:
            _move(module, device if cut is None else None, (frozen_dtype if adapters else None) or dtype)
            for path, (a, b) in adapters.items():
                add_adapter(module.get_submodule(path), a, b, dtype)
    module.train()
    if tp is not None:
        _split(module, model, layers, tp)
    loss = None if not model.loss else function_of(_FIELD, _reference(model.loss))
    stage = CapturedStage(module, model, loss, range(len(layers)))
    for _, parameter, said in stage.with_specs(layers):
        parameter.requires_grad_(not said.frozen)
    if cut is not None:
        stage = _part(stage, layers, cut, device, seed)
        _move(module, device, None if adapters else dtype)
    numbers = {str(i): number for number, i in enumerate(i for i, path in enumerate(model.modules) if path)}
    for place, (index, layer) in enumerate(stage.layers.items()):
        mode = of_block(recompute, numbers[index])
        if fp8_recipe is not None:
            with_fp8_linears(layer, layers[int(index)], fp8_recipe)
        within = recompute_layers is None or place < recompute_layers
        recompute_block(layer, mode if within else "none", around_rerun, is_random=True)
        finish(int(index), layer)
    return stage


def _named_specs(
    model: CapturedModel, layers: Sequence[LayerSpec], layer_range: Iterable[int]
) -> dict[str, ParameterSpec]:
    """ParameterSpecs of some layers by name in the whole module; a weight that several layers use is there once."""
    specs: dict[str, ParameterSpec] = {}
    for index in layer_range:
        path = model.module_of(index)
        for said in layers[index].parameters:
            specs.setdefault(f"{path}.{said.name}" if path and not said.in_root else said.name, said)
    return specs


def _adapters(model: CapturedModel, layers: Sequence[LayerSpec]) -> dict[str, tuple[ParameterSpec, ParameterSpec]]:
    """Linear layer -> its A and B."""
    specs = _named_specs(model, layers, range(len(layers)))
    paths = [name.removesuffix(".lora_a.weight") for name in specs if name.endswith(".lora_a.weight")]
    return {path: (specs[f"{path}.lora_a.weight"], specs[f"{path}.lora_b.weight"]) for path in paths}


def _part(
    whole: CapturedStage, layers: Sequence[LayerSpec], cut: StageCut, device: torch.device, seed: int
) -> CapturedPart:
    """A stage of a pipeline, with what it needs of the module."""
    model = whole._model
    with torch.random.fork_rng(devices=[]):
        _seed(seed)
        recording = record_calls(
            whole.module,
            cut.batch,
            whole._loss,
            blocks=[path for path in model.modules if path],
            starts=model.starts,
            dtype=cut.kept_dtype if cut.autocast else cut.dtype,
            buffer_dtype=cut.kept_dtype,
            device=device,
            autocast=cut.dtype if cut.autocast else None,
            casts_inputs=cut.casts_inputs,
        )
    parts = recording.parts(cut.boundaries)
    for part, after in zip(parts, cut.boundaries[1:-1], strict=False):
        _check_sent(part, model, layers[after - 1], after, cut)
    layer_range = range(*cut.boundaries[cut.stage : cut.stage + 2])
    captured_part = CapturedPart(whole, parts[cut.stage], layer_range, splits_backward=cut.splits_backward)
    captured_part.drop_others(layers)
    return captured_part


def _check_sent(part: CallsPart, model: CapturedModel, before: LayerSpec, layer: int, cut: StageCut) -> None:
    """Raises a NotModelledError unless the tensors between two stages are those of the capture."""
    sizes = [math.prod(sent.shape) for sent in part.sent]
    tensors = [before.tensors[name] for name in before.outputs]
    wanted = [tensor.elements * (1 if tensor.per_microbatch else cut.num_samples) for tensor in tensors]
    if sizes != wanted:
        place = f"where it comes to {model.starts[layer]!r}"
        rule = f"cut {place}, the module hands on tensors of {sizes} elements, and its capture has {wanted}"
        raise NotModelledError(Problem(field="plan.pp", rule=rule, fix="capture the module again, or use 1"))


def _move(module: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> None:
    """Moves a module; fake tensors, of which torch swaps none that has two names, are replaced. None for no change."""
    if not any(isinstance(x, FakeTensor) for _, x in _named_tensors(module)):
        module.to(device, dtype)
        return
    made: dict[Tensor, Tensor] = {}
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for held in tables:
            for name, x in held.items():
                if x is None:
                    continue
                if x not in made:
                    made[x] = x.detach().to(device, dtype if x.is_floating_point() or x.is_complex() else None)
                    if isinstance(x, nn.Parameter):
                        made[x] = nn.Parameter(made[x], requires_grad=x.requires_grad)
                held[name] = made[x]


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, each under all of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class CapturedData:
    """Batches of a captured model: of the user's function, with the images of the capture, or random of its shapes.

    Args:
        model: The captured model.
        seed: Seed of the run.
    """

    def __init__(self, model: CapturedModel, seed: int) -> None:
        self._model, self._seed = model, seed
        self._reference = _reference(model.batch) if model.batch else None
        self._function = function_of(_FIELD, self._reference) if self._reference else self._random
        if model.images is not None:
            self._function = _batch_of_images(model, model.images)

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
        return {tensor.name: _drawn(tensor, num_samples) for tensor in self._model.inputs}


def _batch_of_images(model: CapturedModel, images: CapturedImages) -> Callable[[int], Any]:
    """Function of a number of samples that makes the batch of a capture with images."""
    module, config = module_of_config(read_json(Path(model.factory)))
    wanted = Images(images.number, (images.height, images.width))
    return batch_with_images(module, config, model.tokens, wanted)[0]


def moved(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A batch on a device, with floating-point numbers in a dtype."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype) if leaf.is_floating_point() else leaf.to(device)

    return tree_map(move, batch)


def _drawn(spec: CapturedInput, num_samples: int) -> Tensor:
    shape, dtype = (num_samples, *spec.shape), getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(max(1, spec.high), shape).to(dtype)


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


def _split(module: nn.Module, model: CapturedModel, layers: Sequence[LayerSpec], tp: DeviceMesh) -> None:
    """Splits a module over tensor-parallel ranks, which have equal weights.

    Raises:
        SpecError: The plan is not that of the capture.
    """
    plan = function_of("--tp-plan", _reference(model.tp_plan)) if model.tp_plan else None
    specs = _named_specs(model, layers, range(len(layers)))
    split_module(module, tp, plan, [name for name, said in specs.items() if said.partial_gradient])
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in specs and tuple(parameter.shape) != specs[name].shape:
            rule = f"splits {name} otherwise than when {model.name} was captured"
            raise SpecError(Problem(field="--tp-plan", value=model.tp_plan, rule=rule, fix="capture it again"))


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
