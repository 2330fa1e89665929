"""Blocks of transformers with PEFT's adapters next to 16-bit weights, as the profile accelerate has them."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.models.model import Stage, build_stage
from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan, Recompute
from simplan.training import TrainingSpec
from tests.executor.models import layer_runs
from tests.executor.models.layer_runs import FACTOR, LayerRun

pytest.importorskip("transformers")

PLAIN = ModelSpec(
    family="llama",
    num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512,
    vocab_size=500, seq_len=64,
)  # fmt: skip
RANK, WITHIN = 2, 0.005
MODULES = {"q": "q_proj", "v": "v_proj", "proj": "o_proj", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class Quoted(nn.Module):
    """``Linear`` of PEFT 0.21 (tuners/lora/layer.py): the statements of its forward, with CUDA's dropout."""

    def __init__(self, base: nn.Module, dropout: float) -> None:
        super().__init__()
        self.base_layer, self.dropout = base, dropout
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)  # type: ignore[arg-type]
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """(..., k) to (..., n)."""
        result = self.base_layer(x)
        dtype = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        result = result + self.lora_B(self.lora_A(self.dropped(x))) * 2.0
        return result.to(dtype)

    def dropped(self, x: Tensor) -> Tensor:
        """The input after dropout."""
        return torch.native_dropout(x, self.dropout, train=True)[0] if self.dropout else x


def adapted(stage: Stage, targets: tuple[str, ...], dropout: float, code: str) -> None:
    """Freezes the weights of a stage and gives linear layers adapters in FP32."""
    stage.requires_grad_(requires_grad=False)
    names = {MODULES[target] for target in targets}
    if code == "peft":
        import peft

        config = peft.LoraConfig(r=RANK, target_modules=sorted(names))
        peft.inject_adapter_in_model(config, stage)
        for name, parameter in stage.named_parameters():
            parameter.data = parameter.data.float() if ".lora_" in name else parameter.data
        return
    for module in [*stage.modules()]:
        for name, child in [*module.named_children()]:
            if name in names:
                setattr(module, name, Quoted(child, dropout))


CASES = [
    pytest.param(targets, autocast, dropout, "quoted", id=f"{'+'.join(targets)}-{autocast}-{dropout}")
    for targets in (("q", "v"), tuple(MODULES))
    for autocast in (True, False)
    for dropout in ((0.0, 0.1) if len(targets) > 2 else (0.0,))
]
PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
CASES += [pytest.param(tuple(MODULES), autocast, 0.0, "peft", marks=PEFT) for autocast in (True, False)]


@pytest.mark.parametrize(("targets", "autocast", "dropout", "code"), CASES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_saved_bytes_and_peak_are_torchs(
    recompute: Recompute,
    targets: tuple[str, ...],
    autocast: bool,
    dropout: float,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every adapter saves a copy of its input; modules hold arguments; frozen matrices save nothing."""

    def build(_: ModelSpec, indices: Any, dtype: Any, *rest: Any, frozen_dtype: torch.dtype) -> Stage:
        return build_stage(PLAIN, indices, dtype, *rest, model_code="transformers").to(frozen_dtype)

    monkeypatch.setattr(layer_runs, "build_stage", build)
    spec = PLAIN.model_copy(update={"lora_rank": RANK, "lora_targets": targets, "lora_dropout": dropout})
    software = catalog.software("accelerate").model_copy(update={"autocast": autocast})
    training, plan = TrainingSpec(global_batch_size=1, task="lora"), ParallelPlan(recompute=recompute)
    precision = "autocast" if autocast else "cast"
    prepare = partial(adapted, targets=targets, dropout=dropout, code=code)
    run = LayerRun(spec, 2, recompute, precision, state=software.state(training, plan), prepare=prepare)
    run.layer = software.layers_of(spec, plan, training)[2]
    run.assert_kept(also_bytes=FACTOR * len(targets))
    if autocast and not dropout:  # the CPU's sums of two dtypes, and its dropout, have copies that CUDA's have not
        run.assert_peak(within=WITHIN)
