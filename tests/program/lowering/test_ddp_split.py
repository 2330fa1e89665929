"""DDP and a backward in two parts, for frameworks that reduce what the second part makes."""

from __future__ import annotations

from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.program.lowering.lower import Lowering, lower
from simplan.program.program import Stream
from simplan.program.tables.partition import assign_stage_layers
from simplan.program.tables.table import plan_table
from simplan.training.training import TrainingSpec
from tests.jobs import job_to_lower


def test_every_gradient_is_reduced_once_after_the_last_second_part() -> None:
    model = ModelSpec(
        family="gpt",
        num_hidden_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=64,
        seq_len=16,
        tied_embeddings=False,
    )
    plan = ParallelPlan(pp=2, dp_replicate=2, schedule="zb-h1")
    software = catalog.software("torch").model_copy(update={"ddp_in_pipelines": True})
    training = TrainingSpec(global_batch_size=8, precision="fp32")
    program = lower(
        job_to_lower(model, training, plan, software), assign_stage_layers((2, 2)), plan_table(plan, 4), Lowering(2)
    )
    reduced = dict.fromkeys(program.ranks, 0)
    for op in program.ops:
        if op.stream is Stream.DATA:
            assert op.communication is not None
            reduced[op.rank] += op.communication.num_bytes
            assert str(op.action) in ("0W3", "1W3"), "in the last W of each stage"
    of_stage = [sum(layer.num_parameters for layer in part) for part in (model.layers[:3], model.layers[3:])]
    assert reduced == {0: 4 * of_stage[0], 1: 4 * of_stage[0], 2: 4 * of_stage[1], 3: 4 * of_stage[1]}
