"""The modules against what LayerSpec says about them, as torch itself accounts for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from executor.models.model import FAMILY_MODULES, MODULES, build_stage
from simplan.model import families as models

CPU = torch.device("cpu")
BATCH = 3
FAMILIES = ["gpt", "llama"]


def test_every_family_has_modules() -> None:
    assert set(MODULES) | set(FAMILY_MODULES) == set(models.FAMILIES)


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
    rotate = block.attention.rotary
    q, k = torch.randn(2, 1, 1, 1, spec.head_dim, dtype=torch.float64).expand(-1, -1, -1, spec.seq_len, -1)
    products = (rotate(q) @ rotate(k).transpose(-1, -2))[0, 0]
    for distance in (0, 1, 5):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(products.diagonal(0)[:1], products.diagonal(-5)[:1], rtol=1e-3)
