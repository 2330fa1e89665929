"""The modules against what LayerSpec says about them, as torch itself accounts for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.model import build_stage, cross_entropy
from simplan.spec.layer import LayerKind
from simplan.spec.model import ModelSpec

CPU = torch.device("cpu")
BATCH = 3
FAMILIES = ["gpt", "llama"]


def inputs_of(spec: ModelSpec, kind: LayerKind) -> Tensor:
    if kind is LayerKind.EMBEDDING:
        return torch.randint(spec.vocab_size, (BATCH, spec.seq_len))
    return torch.randn(BATCH, spec.seq_len, spec.hidden_size, requires_grad=True)


def run_forward(spec: ModelSpec, stage: nn.Module, kind: LayerKind, x: Tensor, targets: Tensor) -> Tensor:
    out: Tensor = stage(x)
    return cross_entropy(out, targets) if kind is LayerKind.HEAD else out


def saved_bytes(run: Callable[[], Tensor], without: list[Tensor]) -> int:
    """Bytes of the distinct storages that autograd keeps, some tensors' storages left out."""
    left_out = {tensor.untyped_storage().data_ptr() for tensor in without}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()  # kept alive while counted, so that no storage is used twice
    del out
    return sum(kept.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer_index", [0, 1, -1])
def test_parameters_are_those_of_the_layer(family: str, layer_index: int, make_model: Any) -> None:
    spec = make_model(family)
    index = layer_index % len(spec.layers)
    stage = build_stage(spec, [index], torch.float32, CPU, seed=0)
    found = [(name, tuple(p.shape)) for name, p in stage.layers[str(index)].named_parameters()]
    assert found == [(p.name, p.shape) for p in spec.layers[index].parameters]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer_index", [0, 1, -1])
def test_saved_tensors_are_those_of_the_layer(family: str, layer_index: int, make_model: Any) -> None:
    """To the byte, but for the batch itself (tokens and targets, held anyway) and a scalar of the loss."""
    spec = make_model(family)
    index = layer_index % len(spec.layers)
    layer = spec.layers[index]
    stage = build_stage(spec, [index], torch.float32, CPU, seed=0)
    x = inputs_of(spec, layer.kind)
    targets = torch.randint(spec.vocab_size, (BATCH, spec.seq_len))
    batch = [targets, x] if layer.kind is LayerKind.EMBEDDING else [targets]
    tables = list(stage.buffers())
    found = saved_bytes(
        lambda: run_forward(spec, stage, layer.kind, x, targets), [*stage.parameters(), *tables, *batch]
    )
    scalar = 4 if layer.kind is LayerKind.HEAD else 0
    assert found == BATCH * sum(layer.saved_bytes(4)) + scalar


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_complete_in_the_order_of_the_layers(family: str, tied: bool, make_model: Any) -> None:
    spec = make_model(family, tied_embeddings=tied)
    stage = build_stage(spec, range(len(spec.layers)), torch.float32, CPU, seed=0)
    order: list[str] = []
    for name, parameter in stage.named_parameters():
        hook = partial(lambda name, _: order.append(name), name)
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    batch = torch.randint(spec.vocab_size, (2, BATCH, spec.seq_len))
    cross_entropy(stage(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
    wanted = []
    for index, layer in reversed(list(enumerate(spec.layers))):
        names = [layer.parameters[i].name for i in layer.gradient_order]
        wanted += [f"layers.{index}.{name}" for name in names if name not in layer.tied]
    assert order == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_do_not_depend_on_the_split(family: str, make_model: Any) -> None:
    spec = make_model(family, tied_embeddings=True)
    whole = dict(build_stage(spec, range(4), torch.float64, CPU, seed=3).named_parameters())
    for part in (range(2), range(2, 4)):
        for name, parameter in build_stage(spec, part, torch.float64, CPU, seed=3).named_parameters():
            assert torch.equal(parameter, whole[name if name in whole else "layers.0.wte.weight"])
    other = dict(build_stage(spec, range(4), torch.float64, CPU, seed=4).named_parameters())
    assert not torch.equal(whole["layers.0.wte.weight"], other["layers.0.wte.weight"])


def test_rms_norm_is_torchs(make_model: Any) -> None:
    """Values and gradients against torch's own composed RMSNorm."""
    spec = make_model("llama")
    norm = build_stage(spec, [3], torch.float64, CPU, seed=0).layers["3"].norm
    assert isinstance(norm, nn.Module)
    theirs = nn.RMSNorm(spec.hidden_size, eps=1e-5, dtype=torch.float64)
    weight = torch.randn(spec.hidden_size, dtype=torch.float64)
    x = torch.randn(5, 7, spec.hidden_size, dtype=torch.float64)
    grad = torch.randn_like(x)
    results = []
    for module in (norm, theirs):
        module.load_state_dict({"weight": weight})
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.backward(grad)
        (parameter,) = module.parameters()
        results.append((out, leaf.grad, parameter.grad))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


def test_rotary_attention_depends_on_relative_positions_only(make_model: Any) -> None:
    """Su et al. 2021: the product of a rotated query and key is a function of their distance."""
    spec = make_model("llama")
    block: Any = build_stage(spec, [1], torch.float64, CPU, seed=0).layers["1"]
    q, k = torch.randn(2, 1, 1, 1, spec.head_dim, dtype=torch.float64).expand(-1, -1, -1, spec.seq_len, -1)
    block.cos, block.sin = block.cos.double(), block.sin.double()
    products = (block._rotate(q) @ block._rotate(k).transpose(-1, -2))[0, 0]
    for distance in (0, 1, 5):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(products.diagonal(0)[:1], products.diagonal(-5)[:1], rtol=1e-3)
