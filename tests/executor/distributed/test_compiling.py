"""torch.compile by block: real ranks against one process that is not compiled, and memory against torch's own."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.distributed import compiling
from executor.distributed.compiling import compile_blocks
from executor.run import run_job
from simplan import catalog
from simplan.model.implementations.layer_implementation import LayerImplementation, implemented_layer
from simplan.model.layer import LayerSpec
from simplan.plan.plan import Recompute
from simplan.runs.run_spec import RunSpec
from simplan.validate.compare import predicted_communications
from tests.executor.conftest import RANK_PROGRAMS, Run, make_job, make_model
from tests.executor.distributed.test_level2 import issued
from tests.executor.models.family_models import variant
from tests.executor.models.layer_runs import LayerRun
from tests.executor.train.test_equality import assert_equal_to_one_process
from tests.support.slow import slow_except

COMPILED = catalog.software("torch").model_copy(update={"compiled": True})

# schedule, family, plan
PLANS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one-device": ("none", "llama", {}),
    "one-device-recompute": ("none", "gpt", {"recompute": "full"}),
    "one-device-selective": ("none", "llama", {"recompute": "selective"}),
    "ddp": ("none", "gpt", {"dp_replicate": 2, "bucket_bytes": 40_000}),
    "fsdp": ("none", "llama", {"dp_shard": 2}),
    "fsdp-recompute": ("none", "llama", {"dp_shard": 2, "recompute": "full"}),
    "zero1": ("none", "gpt", {"dp_shard": 2, "zero_stage": 1, "bucket_bytes": 40_000}),
    "tp": ("none", "llama", {"tp": 2}),
    "tp-whole-tokens": ("none", "gpt", {"tp": 2, "sequence_parallel": False}),
    "tp-recompute": ("none", "llama", {"tp": 2, "recompute": "full"}),
    "cp-gather": ("none", "llama", {"cp": 2, "cp_comm": "all_gather", "zero_stage": 3}),
    "pipeline": ("1f1b", "gpt", {"pp": 2}),
    "interleaved": ("interleaved_1f1b", "llama", {"pp": 2, "virtual_stages": 2}),
    "pipeline-fsdp": ("1f1b", "llama", {"pp": 2, "dp_shard": 2}),
}
BLOCKS = product(("gpt", "llama"), ("none", "selective", "full"), ("fp32", "autocast", "cast"))


def compiled_job(name: str, **fields: Any) -> RunSpec:
    schedule, family, plan = PLANS[name]
    model = make_model(family, vocab_size=96)
    return make_job(schedule, model=model, plan=plan, software=COMPILED, **fields)


@pytest.mark.parametrize("name", slow_except([], PLANS))
def test_compiled_ranks_equal_one_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's graphs without their code in C++, which is the same arithmetic; they issue what Level 2 says."""
    job = compiled_job(name, dtype="fp64")
    monkeypatch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
    measurement = run_job(job, tmp_path, rank_module="compiling_worker")
    assert_equal_to_one_process(Run(job, measurement, tmp_path))
    assert all(int((tmp_path / f"graphs.rank{rank.rank}").read_text()) > 0 for rank in measurement.ranks)
    half = None if job.plan.bucket_bytes is None else job.plan.bucket_bytes // 2
    narrow = job.model_copy(update={"plan": job.plan.model_copy(update={"bucket_bytes": half})})
    for rank, predicted in predicted_communications(narrow).items():
        wide = [(kind, ranks, 2 * num_bytes, action) for kind, ranks, num_bytes, action in predicted]
        if half is None:
            assert issued(measurement, rank) == wide
        else:  # the gradients of a block come at once, in an order of torch's queue, so buckets end elsewhere in it
            assert totals(issued(measurement, rank)) == totals(wide)


def totals(messages: list[tuple[Any, Any, int, str]]) -> Counter[tuple[Any, Any, str]]:
    """Bytes by kind, ranks and action."""
    counts: Counter[tuple[Any, Any, str]] = Counter()
    for kind, ranks, num_bytes, action in messages:
        counts[kind, ranks, action] += num_bytes
    return counts


def compiled_run(family: str, recompute: Recompute, precision: str) -> tuple[LayerRun, LayerSpec]:
    """One block of a model, compiled, and the block as it is then."""
    torch._dynamo.reset()
    spec = variant(family)
    run = LayerRun(spec, 1, recompute, precision, prepare=lambda stage: compile_blocks(stage, spec, whole=True))
    layer = implemented_layer(run.layer, LayerImplementation(compiled=True), dropout=False)
    assert layer.key != run.layer.key
    return run, layer


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of itself
@pytest.mark.parametrize(("family", "recompute", "precision"), slow_except([("llama", "none", "autocast")], BLOCKS))
def test_blocks_keep_what_is_predicted(
    family: str, recompute: Recompute, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one block, by torch's trace of allocations; a block that runs again also keeps the state of random numbers."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager_decomp_partition")
    run, layer = compiled_run(family, recompute, precision)
    run.assert_kept(layer=layer, also_bytes=torch.get_rng_state().nbytes if recompute != "none" else 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("precision", ["fp32", "autocast"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_peak_of_a_compiled_block(family: str, precision: str) -> None:
    """Of inductor's code, forward and backward: it is not more than predicted, nor much less."""
    run, layer = compiled_run(family, "none", precision)
    footprint = run.footprint(layer)
    kept = footprint.activations - footprint.input_bytes
    predicted = kept + max(map(sum, footprint.forward + footprint.backward))
    assert 0.85 * predicted <= run.peak() <= 1.03 * predicted
