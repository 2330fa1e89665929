"""Small jobs: by hand with ``job``, and drawn with ``jobs``, of which most break a rule or two and some break none."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from pydantic import ValidationError

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.software.software import SoftwareSpec
from tests.jobs import job_of
from tests.search.jobs import FAMILIES

_MODELS: list[dict[str, Any]] = [
    *({} for _ in range(8)),
    {"num_key_value_heads": 3},
    {"head_dim": 5},
    {"sliding_window": 8},
    {"sliding_window_pattern": 2},
    {"qk_norm": "projection"},
    {"document_lengths": (16, 12)},
    {"document_lengths": (30, 12)},
    {"lora_rank": 4},
    {"lora_rank": 4, "lora_targets": ("q", "w")},
    {"lora_targets": ("all",)},
    {"mtp_num_layers": 1},
    {"mtp_num_layers": 2},
    {"top_k": 5},
    {"num_dense_layers": 5},
    {"num_dense_layers": 1},
    {"shared_expert_intermediate_size": 6},
    {"shared_expert_gate": True},
    {"capacity_factor": 1.0, "expert_imbalance": 1.5, "drop_tokens": False},
    {"expert_bias": True},
    {"hidden_size": 256, "intermediate_size": 256, "seq_len": 64},
    {"max_position_embeddings": 8},
    {"tied_embeddings": False},
    {"tied_embeddings": True},
    {"relative_attention_buckets": 6},
    {"patch_size": 3},
    {"depths": ()},
    {"seq_len": 33},
]
_SOFTWARE: list[dict[str, Any]] = [
    *({} for _ in range(6)),
    {"expert_overlap": True},
    {"expert_dispatch": "deepep"},
    {"expert_dispatch": "hybridep", "fused_experts": True},
    {"fp8_dot_product_attention": True},
    {"compiled": True},
]
_COLLECTIVES = (
    {"all_reduce": "parameter_server", "parameter_servers": 2},
    {"all_reduce": "nvls", "all_gather": "ring"},
    {"all_reduce": "halving_doubling"},
    {"all_to_all": "pairwise"},
)
_COMPRESSIONS = ("fp16", {"kind": "powersgd", "rank": 9}, {"kind": "top_k", "ratio": 0.1}, "one_bit", "one_bit_adam")
_CLUSTERS = ("dgx-h100", "dgx-h100", "dgx-h100", "dgx-b200", "this-machine")


def job(
    family: str = "llama",
    plan: dict[str, Any] | None = None,
    *,
    num_devices: int | None = None,
    cluster: str = "dgx-h100",
    cluster_fields: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    software: str | SoftwareSpec = "torch",
    options: dict[str, Any] | None = None,
    **model: Any,
) -> Job:
    """A small job.

    Args:
        family: One of ``FAMILIES``.
        plan, training: Their fields.
        num_devices: Of the cluster, as many as the plan needs unless given.
        cluster, cluster_fields: Its name, and what is changed of it.
        software, options: Its name, or itself, and what is changed of it.
        model: Fields that are changed.
    """
    made = ParallelPlan.model_validate(plan or {})
    where = _cluster(cluster, num_devices or made.num_devices)
    profile = catalog.software(software) if isinstance(software, str) else software
    return job_of(
        ModelSpec.model_validate({"family": family, **FAMILIES[family], **model}),
        made,
        cluster=where.model_copy(update=cluster_fields) if cluster_fields else where,
        software=profile.model_copy(update=options) if options else profile,
        **{"global_batch_size": 8, **(training or {})},
    )


def _cluster(name: str, num_devices: int) -> ClusterSpec:
    if name != "this-machine":
        return catalog.cluster(name, num_devices)
    link = catalog.link("loopback")  # and as many ranks as are asked for, whatever machine this is
    ranks = {"num_devices": num_devices, "devices_per_node": num_devices, "intra_link": link}
    return catalog.cluster(name, 1).model_copy(update=ranks)


@st.composite
def plans(draw: st.DrawFn, *, wild: bool = True) -> dict[str, Any]:
    """Fields of a plan; ``wild`` for those as well that a search does not vary."""

    def rarely(usual: Any, *others: Any, share: int = 3) -> Any:
        return draw(st.sampled_from([usual] * share * len(others) + list(others)))

    schedule = rarely("none", *SCHEDULE_FACTS, *(["zb-2p-optsync", "own.csv"] if wild else []), share=1)
    facts = SCHEDULE_FACTS.get(schedule)
    stages = (1 if facts is None else facts.virtual_stages) or 2
    fields = {
        "dp_replicate": rarely(1, 2, 3),
        "dp_shard": rarely(1, 2, 4, share=1),
        "zero_stage": draw(st.integers(0, 3)),
        "reshard_after_forward": rarely(True, False),
        "tp": rarely(1, 2, 3, 4, share=2),
        "cp": rarely(1, 2, 4),
        "cp_comm": rarely("ring", "all_gather", "a2a", share=1),
        "ep": rarely(1, 2, 3),
        "pp": draw(st.sampled_from([1, 2, 3])) if wild or schedule != "none" else 1,
        "virtual_stages": rarely(stages, 1, 2, 3),
        "schedule": schedule,
        "microbatch_size": rarely(1, 2, 3),
        "recompute": rarely("none", "selective", "full", "selective_op", share=1),
        "grad_sync": rarely(None, "step", "microbatch"),
        "recompute_modules": rarely(None, ("core_attn",), ("mlp",), ("moe_act", "moe"), ("layernorm", "layernorm"), ()),
    }
    fields["sequence_parallel"] = rarely(fields["tp"] > 1, fields["tp"] == 1)
    if wild:
        fields |= {
            "etp": rarely(1, 2, fields["tp"]),
            "recompute_layers": rarely(None, 2, 9),
            "stage_layers": rarely(None, (2, 2), (0, 2, 2), (1, 0, 3), (5, 1)),
            "placement": rarely(
                None, ("tp", "dp"), ("pp", "dp", "cp", "tp"), ("tp", "ep", "dp", "pp"), (1, 0), (2, 1, 0)
            ),
            "grad_dtype": rarely(None, "fp32", "fp16"),
            "bucket_bytes": rarely(None, 2**20),
            "offload_optimizer": rarely(False, True, share=5),
            "offload_activations": rarely(False, True, share=5),
            "offload_layers": rarely(None, 2, share=9),
            "collectives": rarely(None, *_COLLECTIVES),
            "compression": rarely(None, *_COMPRESSIONS),
        }
    return fields


@st.composite
def jobs(draw: st.DrawFn, *, wild: bool = True) -> Job:
    """Jobs of all families and frameworks; ``wild`` for parts that no plan could mend as well."""
    plan = draw(plans(wild=wild))
    family = draw(st.sampled_from(sorted(FAMILIES)))
    profile = catalog.software(draw(st.sampled_from(["torch", "megatron-core", *catalog.names("software")])))
    training = {
        "global_batch_size": draw(st.sampled_from([8, 12, 12, 24, 600_000])),
        "precision": draw(st.sampled_from(["bf16", "bf16", "bf16", "fp32", "tf32", "fp16", "fp8", "mxfp8", "nvfp4"])),
    }
    if wild:
        training |= {
            "task": draw(st.sampled_from(["pretrain", "pretrain", "lora"])),
            "optimizer": draw(st.sampled_from(["adamw", "adamw", "sgd", "lamb"])),
            "fp8_recipe": draw(st.sampled_from([None, None, None, "delayed", "rowwise"])),
            "clip_grad_norm": draw(st.sampled_from([None, None, 1.0])),
            "fused_optimizer": draw(st.sampled_from([None, None, None, True, False])),
        }
    options = draw(st.sampled_from(_SOFTWARE))
    changes = draw(st.sampled_from(_MODELS))
    enough = ParallelPlan.model_validate(plan).num_devices
    asked: dict[str, Any] = {
        "num_devices": draw(st.sampled_from([enough, enough, enough, 4])),
        "cluster": draw(st.sampled_from(_CLUSTERS if wild else _CLUSTERS[:-1])),
        "training": training,
        "software": profile,
        "options": options,
    }
    if wild:
        gone = [{}, {}, {}, {"host_link": None}, {"intra_link": None, "inter_link": None}]
        asked["cluster_fields"] = draw(st.sampled_from(gone))
    try:
        return job(family, plan, **asked, **changes)
    except ValidationError:  # the family has no such field
        return job(family, plan, **asked)
