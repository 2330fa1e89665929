"""DDP: buckets against torch's own assignment, and a backward in two parts."""

from __future__ import annotations

import pytest

from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.program.lowering.hooks import ddp_buckets
from simplan.program.program import Stream
from simplan.units import MIB
from tests.jobs import job_of, lowered, tiny_model

MODELS = [
    tiny_model(num_hidden_layers=4, hidden_size=256, vocab_size=3000, seq_len=64),
    tiny_model(num_hidden_layers=3, hidden_size=512, vocab_size=30000, seq_len=64, tied_embeddings=False),
    tiny_model("llama", num_hidden_layers=5, hidden_size=384, num_attention_heads=6, num_key_value_heads=2,
               intermediate_size=1000, vocab_size=5000, seq_len=32),
]  # fmt: skip


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


def test_every_gradient_is_reduced_once_after_the_last_second_part() -> None:
    """For frameworks whose DDP reduces what the second part of a backward makes."""
    model = tiny_model(num_hidden_layers=4, tied_embeddings=False)
    software = catalog.software("torch").model_copy(update={"ddp_in_pipelines": True})
    plan = {"pp": 2, "dp_replicate": 2, "schedule": "zb-h1"}
    program = lowered(job_of(model, plan, software=software, num_microbatches=4, precision="fp32"))
    reduced = dict.fromkeys(program.ranks, 0)
    for op in program.ops:
        if op.stream is Stream.DATA:
            assert op.communication is not None
            reduced[op.rank] += op.communication.num_bytes
            assert str(op.action) in ("0W3", "1W3"), "in the last W of each stage"
    of_stage = [sum(layer.num_parameters for layer in part) for part in (model.layers[:3], model.layers[3:])]
    assert reduced == {0: 4 * of_stage[0], 1: 4 * of_stage[0], 2: 4 * of_stage[1], 3: 4 * of_stage[1]}
