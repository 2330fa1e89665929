"""Captures of models of images and text with their images, and with parts that are not trained."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.architectures import _FORMULAS
from executor.capture.capture import Batch, model_from_module
from executor.capture.hugging_face import module_of_config
from executor.capture.images import Images, batch_with_images
from simplan.errors import SpecError
from simplan.model.captured.adapters import names_of_parts, parts_of, targets_of, with_adapters, with_frozen
from simplan.model.captured.facts import CapturedImages, CapturedModel
from simplan.model.captured.layers import captured_layers
from simplan.model.layer import Attention, Gemm, LayerSpec
from simplan.model.model import ModelSpec
from tests.executor.capture.test_adapters import RANK
from tests.executor.capture.test_adapters import adapted as adapt
from tests.support.image_models import IMAGE_MODELS, image_config
from tests.support.slow import slow_except

PreTrainedModel = pytest.importorskip("transformers").PreTrainedModel

_LENGTH = 256
TOGETHER = ("pixtral", "mistral3")
"""Models whose towers attend to all images of a microbatch at once, so that FLOPs are those of one sample alone. Of one
sample torch saves other tensors, since fewer copies are needed."""
SAVED = {"pixtral": 0.03, "mistral3": 0.03, "lfm2_vl": 0.1}
"""Relative difference of saved bytes; LFM2-VL writes positions of all images into one tensor."""
SOLVERS = {"qwen3_5": (5e-3, 5e-2)}
"""Relative differences of FLOPs where forward and backward solve triangular systems."""


def _made(kind: str, number: int = 1, length: int = _LENGTH) -> tuple[nn.Module, Batch, CapturedImages]:
    module, config = module_of_config(image_config(kind))
    return module, *batch_with_images(module, config, length, Images(number, IMAGE_MODELS[kind][1]))


@pytest.mark.parametrize("kind", slow_except(["llava"], IMAGE_MODELS))
def test_a_capture_with_images_has_the_parameters_saved_bytes_and_flops_of_a_real_step(kind: str) -> None:
    """Images are part of a real forward and backward pass, with values; attention is counted as torch's matmuls."""
    module, batch, images = _made(kind, 2)
    captured = model_from_module(module, batch, precisions=("fp32",))
    layers = captured_layers(captured)
    assert not captured.unused
    assert sum(module.get_parameter(n).numel() for n in dict(module.named_parameters())) == (
        ModelSpec(name=kind, family="captured", captured=captured).num_parameters
    )
    samples = 1 if kind in TOGETHER else 2
    num_bytes, *flops = _really(module, batch(samples))
    forward, backward = (num_flops / samples for num_flops in flops)
    in_forward, of_backward = SOLVERS.get(kind, (1e-3, 5e-3))
    assert _saved(captured, layers, samples) == pytest.approx(num_bytes, rel=SAVED.get(kind, 1e-3))
    matmuls = [kernel for layer in layers for kernel in layer.kernels if isinstance(kernel, Gemm)]
    attentions = [kernel for layer in layers for kernel in layer.kernels if isinstance(kernel, Attention)]
    of_attention = sum(kernel.flops * (1 + kernel.causal) for kernel in attentions)
    assert sum(kernel.flops for kernel in matmuls) + of_attention == pytest.approx(forward, rel=in_forward)
    of_matmuls = sum(kernel.flops * kernel.backward_matmuls for kernel in matmuls)
    assert of_matmuls + 2 * of_attention == pytest.approx(backward, rel=of_backward)
    assert images.tokens == 1 or images.number * images.tokens < _LENGTH


def _really(module: nn.Module, batch: dict[str, Tensor]) -> tuple[int, int, int]:
    """Bytes that torch saves for backward, without weights and the batch, and FLOPs of both passes."""
    real = module.to_empty(device="cpu").train()
    with torch.no_grad():
        for tensor in (*real.parameters(), *real.buffers()):
            tensor.fill_(0.01) if tensor.is_floating_point() else tensor.zero_()
    held = (*real.parameters(), *real.buffers(), *batch.values())
    known = {tensor.untyped_storage()._cdata for tensor in held}
    alive: WeakSet[_Saved] = WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        alive.add(saved := _Saved(tensor.untyped_storage()))  # a tensor would keep its own graph alive
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = real(**batch).loss
        gc.collect()  # what no gradient needs
        sizes = {saved.storage._cdata: saved.storage.nbytes() for saved in alive}
    del loss
    counters = [FlopCounterMode(display=False, custom_mapping=_FORMULAS) for _ in range(2)]
    with sdpa_kernel(SDPBackend.MATH):
        with counters[0]:
            loss = real(**batch).loss
        with counters[1]:
            loss.backward()
    num_bytes = sum(size for key, size in sizes.items() if key not in known)
    return num_bytes, counters[0].get_total_flops(), counters[1].get_total_flops()


class _Saved:
    """The memory of a tensor that a node of the autograd graph keeps; it ends with the node."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


def _saved(captured: CapturedModel, layers: Sequence[LayerSpec], samples: int) -> int:
    """Bytes that layers save in FP32, without tensors that later layers only read."""
    total = 0
    for index, layer in enumerate(layers):
        roots = layer.storages(4, 4)
        saved = {roots[name].name for operator in layer.operators for name in operator.saves}
        for tensor in {roots[t.name].name: roots[t.name] for t in layer.saved if not t.elsewhere}.values():
            is_held = (
                tensor.forwarded and tensor.name not in saved and not _is_saved_later(captured, index, tensor.name)
            )
            number = 0 if is_held or tensor.elsewhere else 1 if tensor.per_microbatch else samples
            total += number * tensor.num_bytes(4, 4)
    return total


def _is_saved_later(captured: CapturedModel, index: int, name: str) -> bool:
    while name in (layer := captured.graph.layers[captured.graph.order[index]]).outputs:
        name, index = f"input{layer.outputs.index(name)}", index + 1
        after = captured.graph.layers[captured.graph.order[index]]
        if any(name in operator.saves for operator in after.operators):
            return True
    return False


FROZEN = {
    "llava": [("vision_tower", "multi_modal_projector"), ("language_model",)],
    "gemma3": [("vision_tower",), ("vision_tower", "multi_modal_projector", "embed_tokens")],
    "qwen3_vl": [("visual.blocks", "visual.patch_embed"), ("visual",), ("visual.merger",)],
    "mistral3": [("vision_tower", "multi_modal_projector"), ("multi_modal_projector",)],
}


@pytest.mark.parametrize("kind", slow_except(["llava"], FROZEN))
def test_frozen_parts_are_those_of_a_module_whose_parts_need_no_gradient(kind: str) -> None:
    """Backward ends at the lowest trained weight, and what no gradient needs is not saved."""
    module, batch, _ = _made(kind)
    whole = model_from_module(module, batch, precisions=("fp32",))
    for names in FROZEN[kind]:
        chosen = {name for parts in parts_of(whole, names).values() for name in parts}
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in chosen)
        expected = captured_layers(model_from_module(module, batch, precisions=("fp32",)))
        layers = captured_layers(with_frozen(whole, names))
        assert [*map(_sizes, layers)] == [*map(_sizes, expected)]
        assert {*parts_of(whole, names_of_parts(whole, chosen)).values()} == {*parts_of(whole, names).values()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_towers_have_a_backward_where_transformers_gives_embeddings_gradients(kind: str) -> None:
    """With PEFT's adapters in the language model, and enable_input_require_grads; Qwen3-VL's tower has no hook."""
    module, batch, _ = _made(kind)
    plain = model_from_module(module, batch, precisions=("fp32",))
    paths = [path for of_target in targets_of(plain, ("q_proj",)).values() for path in of_target if "language" in path]
    adapted = with_adapters(plain, RANK, tuple(paths), input_grads=True)
    assert isinstance(module, PreTrainedModel)
    adapt(module, paths)
    module.enable_input_require_grads()
    num_bytes, _, backward = _really(module, batch(1))
    layers = captured_layers(adapted)
    assert _saved(adapted, layers, 1) == pytest.approx(num_bytes, rel=5e-3)
    matmuls = [kernel for layer in layers for kernel in layer.kernels if isinstance(kernel, Gemm)]
    cores = [kernel for layer in layers for kernel in layer.kernels if isinstance(kernel, Attention)]
    of_attention = sum(2 * kernel.flops * (1 + kernel.causal) for kernel in cores if kernel.propagates)
    flops = sum(kernel.flops * kernel.backward_matmuls for kernel in matmuls) + of_attention
    assert flops == pytest.approx(backward, rel=5e-3)
    has_hook = any("vision" in path or "visual" in path for path in plain.input_embeddings)
    assert has_hook is (kind != "qwen3_vl")


def _sizes(layer: LayerSpec) -> tuple[Any, ...]:
    flops = layer.backward_flops(full_attention=True)
    return sum(layer.saved_bytes(4, 4)), flops, layer.num_trained, layer.needs_input_gradient


class _Looping(nn.Module):
    """Linear layers that see parts of a batch by themselves, whose lengths are values."""

    def __init__(self, loops: bool) -> None:
        super().__init__()
        self.first, self.second, self._loops = nn.Linear(16, 32), nn.Linear(32, 16), loops

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if not self._loops:
            together: Tensor = self.second(self.first(x).relu())
            return together.exp()
        ends = lengths.cumsum(0).tolist()
        parts = [self.second(self.first(x[end - 4 : end]).relu()) for end in ends]
        return torch.cat(parts).exp()


def test_a_loop_over_samples_counts_as_the_samples_together() -> None:
    """Lengths are values of the batch, and each sample has two rounds of the loop."""

    def batch(number: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(number * 8, 16), torch.full((number * 2,), 4)

    for precision in ("fp32", "autocast"):
        loops, together = (
            _total(captured_layers(model_from_module(_Looping(loops), batch, precisions=(precision,))))
            for loops in (True, False)
        )
        assert loops == together


def _total(layers: Sequence[LayerSpec]) -> tuple[int, int, int]:
    matmuls = [kernel for layer in layers for kernel in layer.kernels if isinstance(kernel, Gemm)]
    return (
        sum(sum(layer.saved_bytes(4, 4)) for layer in layers),
        sum(kernel.flops for kernel in matmuls),
        sum(layer.backward_flops() for layer in layers),
    )


@pytest.mark.parametrize(
    ("kind", "images", "length", "said"),
    [
        ("llava", Images(2), 32, "--seq-len = 32: is less than 2 images of 16 tokens need; use at least 35"),
        ("llava", Images(1, (64, 64)), 64, "--image-size = 64x64: is not the size of the tower.*; use 56x56"),
        ("mistral3", Images(1), 64, "--image-size: is missing: images of mistral3 differ in size"),
        ("mistral3", Images(1, (57, 80)), 64, "has sides that are no multiples of 28.*; use 56x84"),
        ("mllama", Images(1, (56, 560)), 64, "has more than 4 tiles of 56 x 56; use one of 56x56"),
        ("gemma4", Images(1, (960, 960)), 512, "has 400 tokens, of at most 280; use 768x768"),
    ],
)
def test_images_that_a_model_does_not_take(kind: str, images: Images, length: int, said: str) -> None:
    module, config = module_of_config(image_config(kind))
    with pytest.raises(SpecError, match=said):
        batch_with_images(module, config, length, images)
