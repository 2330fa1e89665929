"""The modules against what LayerSpec says about them, as torch itself accounts for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from executor.models.model import MODULES, build_stage
from simplan.model import families as models
from tests.executor.conftest import make_model

CPU = torch.device("cpu")
BATCH = 3
FAMILIES = ["gpt", "llama"]


def test_every_family_has_modules() -> None:
    assert MODULES.keys() == models.FAMILIES.keys() - {"captured"}, "whose modules are the user's"


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_do_not_depend_on_the_split(family: str) -> None:
    spec = make_model(family, tied_embeddings=True)
    whole = dict(build_stage(spec, range(4), torch.float64, CPU, seed=3).named_parameters())
    for part in (range(2), range(2, 4)):
        for name, parameter in build_stage(spec, part, torch.float64, CPU, seed=3).named_parameters():
            assert torch.equal(parameter, whole[name if name in whole else "layers.0.wte.weight"])
    other = dict(build_stage(spec, range(4), torch.float64, CPU, seed=4).named_parameters())
    assert not torch.equal(whole["layers.0.wte.weight"], other["layers.0.wte.weight"])


def test_rms_norm_is_torchs() -> None:
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
