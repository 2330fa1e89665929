"""Cases of the accuracy benchmark: every strategy on two ranks, combinations on four."""

from __future__ import annotations

from dataclasses import dataclass

from simplan import catalog
from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.prediction import Prediction
from simplan.training import TrainingSpec

MICROBATCH_SIZE = 2
_MODELS = (
    ModelSpec(
        name="gpt",
        family="gpt",
        num_hidden_layers=8,
        hidden_size=256,
        num_attention_heads=4,
        vocab_size=4096,
        seq_len=128,
    ),
    ModelSpec(
        name="llama",
        family="llama",
        num_hidden_layers=6,
        hidden_size=320,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=864,
        vocab_size=4096,
        seq_len=128,
    ),
)
_PLANS = {
    "DDP": ParallelPlan(dp_replicate=2, microbatch_size=2),
    "naive": ParallelPlan(pp=2, schedule="naive", microbatch_size=2),
    "GPipe": ParallelPlan(pp=2, schedule="gpipe", microbatch_size=2),
    "1F1B": ParallelPlan(pp=2, schedule="1f1b", microbatch_size=2),
    "interleaved 1F1B": ParallelPlan(pp=2, virtual_stages=2, microbatch_size=2),
    "ZB-H1": ParallelPlan(pp=2, schedule="zb-h1", microbatch_size=2),
    "ZB-H2": ParallelPlan(pp=2, schedule="zb-h2", microbatch_size=2),
    "ZB-1p": ParallelPlan(pp=2, schedule="zb-1p", microbatch_size=2),
    "ZB-2p": ParallelPlan(pp=2, schedule="zb-2p", microbatch_size=2),
    "ZB-V": ParallelPlan(pp=2, schedule="zb-v", microbatch_size=2),
    "DualPipeV": ParallelPlan(pp=2, schedule="dualpipe-v", microbatch_size=2),
    "ZeRO-1": ParallelPlan(dp_shard=2, zero_stage=1, microbatch_size=2),
    "ZeRO-2": ParallelPlan(dp_shard=2, zero_stage=2, microbatch_size=2),
    "ZeRO-3": ParallelPlan(dp_shard=2, microbatch_size=2),
    "ZeRO-3, recompute full": ParallelPlan(dp_shard=2, microbatch_size=2, recompute="full"),
    "ZeRO-3, recompute selective": ParallelPlan(dp_shard=2, microbatch_size=2, recompute="selective"),
    "TP": ParallelPlan(tp=2, sequence_parallel=False, microbatch_size=2),
    "TP with SP": ParallelPlan(tp=2, microbatch_size=2),
    "CP, all-gather": ParallelPlan(cp=2, cp_comm="all_gather", microbatch_size=2),
    "CP, all-to-all": ParallelPlan(cp=2, cp_comm="a2a", microbatch_size=2),
    "1F1B x ZeRO-3": ParallelPlan(pp=2, dp_shard=2, microbatch_size=2),
    "TP with SP x ZeRO-3": ParallelPlan(tp=2, dp_shard=2, microbatch_size=2),
    "HSDP": ParallelPlan(dp_replicate=2, dp_shard=2, microbatch_size=2),
}
_BOTH_MODELS = ("DDP", "naive", "GPipe", "1F1B", "ZeRO-3", "TP with SP")  # other plans use one model, in turn
_STAGE_LAYERS = {  # fixed, so that every calibration predicts the split that runs
    ("gpt", 2): (5, 3),
    ("llama", 2): (4, 2),
    ("gpt", 4): (2, 2, 2, 2),
    ("llama", 4): (2, 2, 1, 1),
}
TRAINING = TrainingSpec(global_batch_size=16, precision="fp32")


@dataclass(frozen=True, slots=True)
class AccuracyCase:
    """A model and a plan to predict and run."""

    model: ModelSpec
    plan_name: str

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"{self.model.name} {self.plan_name}"

    @property
    def num_ranks(self) -> int:
        """Number of processes on this machine."""
        return self.plan.num_devices

    @property
    def plan(self) -> ParallelPlan:
        """Plan of the case; pipelines have fixed ``stage_layers``."""
        plan = _PLANS[self.plan_name]
        if plan.pp == 1:
            return plan
        return plan.model_copy(update={"stage_layers": _STAGE_LAYERS[self.model.name, plan.num_stages]})

    def predict(self, calibration: Calibration) -> Prediction:
        """Predict the case from one calibration."""
        return predict(
            Job(
                self.model,
                catalog.cluster("this-machine", num_devices=self.num_ranks),
                TRAINING,
                self.plan,
                catalog.software("torch"),
            ),
            name=self.name,
            calibration=calibration,
        )


def cases() -> list[AccuracyCase]:
    """Every plan with one model in turn, basic plans with both; FSDP in pipelines requires untied weights."""
    _, llama = _MODELS
    all_cases = []
    for number, (name, plan) in enumerate(_PLANS.items()):
        models = _MODELS if name in _BOTH_MODELS else (_MODELS[number % len(_MODELS)],)
        if plan.pp > 1 and plan.shards_parameters:
            models = (llama,)
        all_cases += [AccuracyCase(model, name) for model in models]
    return all_cases
