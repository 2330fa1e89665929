"""A prediction, and a measurement made by hand from it, for tests of comparisons."""

from __future__ import annotations

from typing import Any

from simplan import catalog
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict, run_spec_of
from simplan.prediction import Prediction
from simplan.program.action import Action, ActionKind, format_table
from simplan.program.timeline import SpanKind
from simplan.runs.measurement import MeasuredCollective, MeasuredSpan, Measurement, PeakMemory, RankMeasurement
from simplan.units import GIB
from simplan.validate.compare import predicted_communications
from tests.jobs import job_of


def predicted(plan: ParallelPlan, name: str = "test", **sizes: Any) -> Prediction:
    """GPT-2 with four blocks on two devices."""
    fields = {"num_hidden_layers": 4, "tied_embeddings": False, **sizes}
    model = catalog.model("gpt2-124m").model_copy(update=fields)
    return predict(job_of(model, plan, global_batch_size=4), name=name)


def measure(prediction: Prediction, factor: float = 1.0, **changes: Any) -> Measurement:
    """A measurement in which every action took ``factor`` times as long as predicted, at ``factor`` times its start."""
    timed = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.REDUCE_GRAD, ActionKind.OPTIM)
    job = run_spec_of(prediction)
    ranks = []
    for rank in range(2):
        spans = [s for s in prediction.timeline.spans if s.rank == rank and s.stream == "compute"]
        actions = []
        for text in format_table(prediction.table)[rank]:
            kind = Action.parse(text).kind
            optim = kind is ActionKind.OPTIM
            of_action = [s for s in spans if s.action == text and (not optim or s.kind is SpanKind.OPTIMIZER)]
            if kind in timed:
                actions.append(
                    MeasuredSpan(
                        action=text,
                        kind=SpanKind.OPTIMIZER if optim else SpanKind.COMPUTE,
                        start_s=factor * min(s.start_s for s in of_action),
                        end_s=factor * max(s.end_s for s in of_action),
                    )
                )
        moved = {s.action: s for s in prediction.timeline.spans if s.rank == rank and s.stream != "compute"}
        collectives = tuple(
            MeasuredCollective(
                kind=kind,  # type: ignore[arg-type]
                ranks=ranks_,
                num_bytes=size,
                action=text,
                start_s=0.0 if kind == "recv" else factor * moved[text].start_s,  # ranks ask in good time
                end_s=factor * moved[text].end_s,
            )
            for kind, ranks_, size, text in predicted_communications(job)[rank]
        )
        memory = PeakMemory(allocated_bytes=3 * GIB, device_bytes=(5 + rank) * GIB)
        ranks.append(RankMeasurement(rank=rank, peak_memory=memory, actions=tuple(actions), collectives=collectives))
    step_s = factor * prediction.step_time_s
    fields: dict[str, Any] = {
        "job": job,
        "step_times_s": (0.9 * step_s, step_s, step_s, step_s, 1.1 * step_s),
        "ranks": tuple(ranks),
    }
    return Measurement(**(fields | changes))
