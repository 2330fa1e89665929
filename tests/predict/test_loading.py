"""Memory while a checkpoint is loaded: closed forms of a 70B, reported host memory, verdicts, and searches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from simplan import catalog
from simplan.errors import NotModelledError
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.predict.step_summary import summarize_step
from simplan.rules import check_job, violations
from simplan.rules.book import MEMORY_RULES
from simplan.search.enumeration import Enumeration
from simplan.search.space import SearchSpace
from simplan.software.loading_peaks import LoadingPeaks, loading_peaks
from simplan.training import TrainingSpec

NF4 = {"format": "nf4", "double_quantization": True, "storage": "bf16"}
L40S = catalog.device("l40s")
LLAMA = catalog.model("llama3-70b")
ADAPTED = LLAMA.with_changes(lora_rank=16, seq_len=512)
LINEAR = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
WIDE = 2 * 128_256 * 8192 + (2 * 80 + 1) * 8192
PACKED_BYTES = LINEAR * (1 / 2 + 1 / 64 + 4 / (64 * 256)) + 7 * 80 * 1092
"""NF4 with a byte per 64 weights and FP32 per 256 of these, and tables per matrix."""


def job_of(software: str, task: str, plan: ParallelPlan, device: str = "l40s", **options: Any) -> Job:
    training = {"precision": "bf16", "global_batch_size": plan.dp, **options.pop("training", {})}
    model = LLAMA.with_changes(seq_len=512) if task != "lora" else ADAPTED
    node = catalog.cluster("dgx-h100", plan.num_devices)
    cluster = node.with_changes(device=catalog.device(device), **options.pop("cluster", {}))
    profile = catalog.software(software).with_changes(**options)
    return Job(model, cluster, TrainingSpec(task=task, **training), plan, profile)  # type: ignore[arg-type]


def peaks_of(job: Job) -> LoadingPeaks:
    peaks = loading_peaks(job.software, job.model, job.plan, job.training, job.cluster.ranks_per_node)
    assert peaks is not None
    return peaks


def test_qlora_of_a_70b_is_whole_on_each_device_before_it_is_sharded() -> None:
    """Two cards of 48 GB hold shards of NF4, and fail while they load (axolotl issue 1717); so do two of 24 GB."""
    sharded = ParallelPlan(dp_shard=2)
    adapters = peaks_of(job_of("accelerate", "lora", sharded, training={"base_weights": NF4}))
    whole = PACKED_BYTES + 2 * WIDE
    trained = 4 * ADAPTED.num_trained_parameters
    assert adapters.method == "device_map"
    assert adapters.device_bytes == pytest.approx(1.5 * (whole + trained), rel=0.01)
    assert adapters.host_bytes == 0
    assert adapters.mapped_bytes == 2 * LLAMA.num_parameters
    alone = peaks_of(job_of("accelerate", "lora", ParallelPlan(), training={"base_weights": NF4}))
    # without shards, PEFT's FP32 embeddings and head, one of which is still there in 16 bits
    assert alone.device_bytes == pytest.approx(PACKED_BYTES + 4 * WIDE + trained + 2 * 128_256 * 8192, rel=1e-3)
    first = peaks_of(job_of("accelerate", "lora", sharded, training={"base_weights": NF4}, loading="rank0"))
    assert first.device_bytes < 0.55 * whole + 2 * 128_256 * 8192 + trained
    assert first.host_bytes == pytest.approx(PACKED_BYTES, rel=1e-6)


@pytest.mark.parametrize(("method", "copies"), [("cpu", 8), ("broadcast", 8), ("rank0", 1)])
def test_full_fine_tuning_of_a_70b_makes_fp32_copies_on_the_host(method: str, copies: int) -> None:
    """``70 * 4 * 8 GB ~ 2TB of CPU RAM`` (huggingface/blog pull request 1412); one copy if rank 0 alone loads."""
    peaks = peaks_of(job_of("accelerate", "sft", ParallelPlan(dp_shard=8), loading=method))
    assert peaks.host_bytes == copies * 4 * LLAMA.num_parameters


def test_reported_host_memory_lies_between_what_is_needed_and_what_is_mapped() -> None:
    """127 GB on four 24 GB cards (philschmid, FSDP, QLoRA and CPU offloading), 107 GB on two (PEFT's guide of FSDP).

    Counters of used memory have some of the mapped files, which the kernel can drop.
    """
    for devices, reported in ((4, 127e9), (2, 107e9)):
        plan = ParallelPlan(dp_shard=devices, offload_optimizer=True)
        peaks = peaks_of(job_of("accelerate", "lora", plan, training={"base_weights": NF4}, loading="rank0"))
        assert peaks.host_bytes < reported < peaks.host_bytes + peaks.mapped_bytes


def test_zero_3_never_has_the_model_whole() -> None:
    """DeepSpeed's flat buffers of trained shards pass through the host (runtime/zero/utils.py, defragment)."""
    peaks = peaks_of(job_of("deepspeed", "sft", ParallelPlan(dp_shard=8)))
    assert peaks.method == "zero_init"
    assert peaks.device_bytes == pytest.approx(2 * LLAMA.num_parameters / 8 + 2 * 128_256 * 8192, rel=1e-3)
    assert peaks.host_bytes == pytest.approx(2 * LLAMA.num_parameters, rel=1e-3)


def test_predictions_say_that_a_model_cannot_be_loaded_and_the_way_out() -> None:
    plan = ParallelPlan(dp_shard=2, recompute="full")
    job = job_of("accelerate", "lora", plan, training={"base_weights": NF4})
    prediction = predict(job)
    assert prediction.worst_memory.fits
    assert (prediction.fits, prediction.memory_verdict, prediction.fails_to_load) == (False, "does not fit", True)
    assert summarize_step(job).fits is False, "also in verdicts of published runs"
    text = prediction.report()
    assert "does not fit: loading the model needs" in text
    assert "use software.loading: cpu or rank0" in text
    assert violations(job, MEMORY_RULES)
    other = predict(job.with_changes({"software.loading": "rank0"}))
    assert other.fits
    assert other.memory_verdict == "fits"
    assert (other.step_time_s, other.memory) == (prediction.step_time_s, prediction.memory)
    little = predict(job.with_changes({"software.loading": "rank0", "cluster.host_memory_bytes": 32 * 10**9}))
    assert little.host_fits is False
    assert "of the host memory of a node, which has 29.80 GiB" in little.report()


def test_second_model_of_preference_training_is_loaded_next_to_the_trained_one() -> None:
    """TRL loads the reference once the trained model waits on the CPU for its shards, or is on its device."""
    number, largest = LLAMA.num_parameters, 128_256 * 8192
    sharded, whole = ParallelPlan(dp_shard=8), ParallelPlan(dp_replicate=8)
    alone, both = (peaks_of(job_of("accelerate", task, sharded)) for task in ("orpo", "dpo"))
    assert alone.host_bytes == 8 * 4 * number
    assert both.host_bytes == 2 * alone.host_bytes
    assert both.mapped_bytes == alone.mapped_bytes  # one file
    assert both.device_bytes == pytest.approx(alone.device_bytes + 4 * number / 8, rel=1e-6)
    narrow = {"preference": {"reference": "second_model", "reference_dtype": "bf16"}}
    assert peaks_of(job_of("accelerate", "dpo", sharded, training=narrow)).host_bytes == alone.host_bytes
    unsharded = {"preference": {"reference": "second_model", "reference_sharded": False}}
    on_each = peaks_of(job_of("accelerate", "dpo", sharded, training=unsharded))
    assert on_each.device_bytes == pytest.approx(alone.device_bytes + 4 * number, rel=1e-6)
    # without shards the trained model has left the CPU; DDP's buckets of it come last
    alone, both = (peaks_of(job_of("accelerate", task, whole)) for task in ("orpo", "dpo"))
    assert both.host_bytes == alone.host_bytes == 8 * 4 * number
    assert alone.device_bytes == 4 * number + 2 * 250 * 2**20
    assert both.device_bytes == 2 * 4 * number + 2 * 250 * 2**20
    # zero.Init has partitioned the trained model before it gathers the largest tensor of the other
    zero = peaks_of(job_of("deepspeed", "dpo", sharded))
    assert zero.device_bytes == pytest.approx(2 * 2 * number / 8 + 2 * largest, rel=1e-3)
    off = {"preference": {"reference": "precomputed"}}
    assert peaks_of(job_of("accelerate", "dpo", sharded, training=off)) == peaks_of(
        job_of("accelerate", "orpo", sharded)
    )


def test_pretraining_loads_nothing_unless_told() -> None:
    job = job_of("accelerate", "pretrain", ParallelPlan(dp_shard=8), device="h100-sxm-80gb")
    assert predict(job).loading is None
    told = predict(job.with_changes({"software.loading": "cpu"}))
    assert told.loading is not None
    assert told.to_json()["loading"]["host_gib"] == pytest.approx(8 * 4 * LLAMA.num_parameters / 2**30)


def test_searches_reject_plans_that_cannot_be_loaded() -> None:
    """Every plan that shards NF4 has all of it on a card first; without, one replica needs more than a card."""
    job = job_of("accelerate", "lora", ParallelPlan(dp_shard=2), device="rtx-4090", training={"base_weights": NF4})
    rejected = Counter[str]()
    assert not [*Enumeration(SearchSpace(), job).tables(rejected)]
    assert rejected["loading_within_memory"] > 0
    other = Enumeration(SearchSpace(), job.with_changes({"software.loading": "rank0", "cluster.device": L40S}))
    assert [*other.tables(Counter())]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"software.loading": "zero_init"}, "this way of loading with accelerate is not modeled"),
        ({"software.loading": "broadcast", "plan.dp_shard": 1, "plan.dp_replicate": 8}, "without sharded parameters"),
        ({"software.loading": "cpu", "plan.dp_shard": 4, "plan.tp": 2}, "with ranks that split the model"),
    ],
)
def test_other_ways_of_loading_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    job = job_of("accelerate", "sft", ParallelPlan(dp_shard=8), device="h100-sxm-80gb")
    with pytest.raises(NotModelledError, match=words):
        check_job(job.with_changes(changes))
