"""DDP buckets against torch's own assignment."""

from __future__ import annotations

import pytest

from simplan.model.model import ModelSpec
from simplan.program.lowering.hooks import ddp_buckets
from simplan.units import MIB

MODELS = [
    ModelSpec(family="gpt", num_hidden_layers=4, hidden_size=256, num_attention_heads=4, vocab_size=3000, seq_len=64),
    ModelSpec(
        family="gpt",
        num_hidden_layers=3,
        hidden_size=512,
        num_attention_heads=8,
        vocab_size=30000,
        seq_len=64,
        tied_embeddings=False,
    ),
    ModelSpec(
        family="llama",
        num_hidden_layers=5,
        hidden_size=384,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=1000,
        vocab_size=5000,
        seq_len=32,
    ),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.family}-{m.hidden_size}")
@pytest.mark.parametrize("limits", [(25 * MIB, MIB), (4 * MIB, 4 * MIB), (10**12, 10**12), (1, 1)])
def test_torch_makes_the_same_buckets(model: ModelSpec, limits: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    ours = ddp_buckets(model.layers, 4, *limits)
    tensors = [
        torch.empty(layer.parameters[i].shape, device="meta")
        for layer in reversed(model.layers)
        for i in layer.gradient_order
        if layer.parameters[i].name not in layer.tied
    ]
    indices, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [limits[1], limits[0]])
    in_order = sorted(indices, key=min)  # torch sorts by first index when asked without one
    assert [b.num_bytes for b in ours] == [sum(tensors[i].nbytes for i in bucket) for bucket in in_order]
    assert sum(b.num_bytes for b in ours) == 4 * model.num_parameters
    assert [b.ready_layer for b in ours] == sorted((b.ready_layer for b in ours), reverse=True)
