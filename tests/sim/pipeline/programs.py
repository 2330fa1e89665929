"""Programs of random pipelines, as ``lower`` writes them, to compare with what the compiled ones say."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from simplan.program.lower import Lowering, lower
from simplan.program.partition import assign_stage_layers
from simplan.program.program import Program
from simplan.program.table import plan_table, unshard_of
from simplan.sim.pipeline.table import PipelineTable, compiled_table
from simplan.spec import catalogue
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.schedules import SCHEDULE_FACTS
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec
from tests.jobs import job_to_lower

SHARDING: dict[str, dict[str, Any]] = {
    "none": {},
    "ddp": {"dp_replicate": 2},
    "zero 1": {"dp_shard": 2, "zero_stage": 1},
    "zero 2": {"dp_shard": 2, "zero_stage": 2},
    "zero 3": {"dp_shard": 2, "zero_stage": 3},
    "hsdp": {"dp_shard": 2, "dp_replicate": 2, "zero_stage": 3},
}
SOFTWARE = catalogue.software("torch")


class Case:
    """A plan, its Program with one operation for each pass through a stage, and its compiled table."""

    def __init__(self, plan: ParallelPlan, program: Program, table: PipelineTable) -> None:
        self.plan, self.program, self.table = plan, program, table

    def __repr__(self) -> str:
        return f"Case({self.plan}, m={self.table.num_microbatches})"


@st.composite
def cases(draw: st.DrawFn, most_microbatches: int = 14) -> Case:
    schedule = draw(st.sampled_from(["naive", "gpipe", "1f1b", "interleaved_1f1b", "zb-h1", "zb-h2", "zb-v"]))
    facts = SCHEDULE_FACTS[schedule]
    p, m = draw(st.integers(2, 4)), draw(st.integers(1, most_microbatches))
    v = facts.virtual_stages or draw(st.integers(2, 5))
    kinds = sorted(SHARDING) if not facts.splits_backward else ["none", "zero 2"]
    sharding = SHARDING[draw(st.sampled_from(kinds))]
    layers = [draw(st.integers(1, 2)) for _ in range(p * v)]
    return case(schedule, p, m, v, sharding, layers, draw(st.sampled_from(["fp32", "bf16"])), tied=draw(st.booleans()))


def case(
    schedule: str,
    p: int,
    m: int,
    v: int,
    sharding: dict[str, Any],
    layers: list[int],
    precision: Any,
    *,
    tied: bool,
    software: SoftwareSpec = SOFTWARE,
) -> Case:
    """The plan of these ranks, microbatches, virtual stages and layers of stages."""
    model = ModelSpec(
        family="gpt",
        num_hidden_layers=sum(layers),
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=32,
        seq_len=8,
        tied_embeddings=tied,
    )
    plan = ParallelPlan(pp=p, virtual_stages=v, schedule=schedule, **sharding)
    table = plan_table(plan, m)
    training = TrainingSpec(global_batch_size=m * plan.dp, precision=precision)
    how = Lowering(level=2, expand_all=False)
    program = lower(job_to_lower(model, training, plan, software), assign_stage_layers(layers), table, how)
    return Case(plan, program, compiled_table(schedule, p, m, v, unshard_of(plan)))
