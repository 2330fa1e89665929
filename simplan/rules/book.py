"""All rules in the order of their errors, and the check of a job; one error lists all violations.

There are two kinds of violation. An impossible job raises ``SpecError``, with the nearest possible values. A known
option that is not modeled yet raises ``NotModelledError``, which names the option, so that none is silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, ModuleType

from simplan.cluster.hardware import BackgroundJob
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.job import Job, background_job
from simplan.model.families.family import LORA
from simplan.optimizers import OPTIMIZERS
from simplan.rules import (
    cluster,
    collectives,
    experts,
    mixed,
    model,
    optimizers,
    parallel,
    recompute,
    replication,
    schedule,
    sharding,
    trained,
    training,
)
from simplan.rules.rule import Rule

_COULD_NOT_BE: tuple[Rule, ...] = (
    model.kv_heads_divide_heads, model.rotary_width_even, model.packs_need_documents, model.documents_fit,
    model.documents_of_two_tokens, model.positions_for_sequence, model.window_pattern_needs_window,
    model.relative_buckets, model.resnet_needs_depths, model.patches_of_image, trained.keys_of_adapters_need_rank,
    trained.lora_targets_exist, trained.lora_ranks_of_targets, trained.lora_rank_within_matrices,
    trained.frozen_parts_exist, trained.gradients_of_frozen_inputs, model.top_k_within_experts,
    model.dense_layers_within_layers,
    model.gate_needs_shared_expert, model.capacity_for_tokens, trained.lora_needs_adapters,
    trained.adapters_need_lora, trained.base_weights_of_adapters, trained.base_weights_of_format,
    trained.base_weights_of_shards, trained.autocast_of_adapters, trained.base_weights_divide,
    trained.fake_quantization_of_format, trained.rotations_divide,
    trained.reference_of_task, trained.keys_of_second_model, trained.head_of_scores, trained.logits_of_rewards,
    trained.second_model_on_host,
    training.chunks_of_loss_are_equal, cluster.link_within_nodes,
    cluster.network_between_nodes, cluster.topology_of_cluster,
    cluster.background_traffic, cluster.background_jobs, cluster.stragglers_of_cluster, cluster.slow_links_of_topology,
    cluster.jitter_of_cluster,
    cluster.devices, cluster.precision_of_cpus, training.recipe_of_fp8,
    optimizers.rank_of_projections, optimizers.blocks_of_badam,
    training.gradients_used_in_backward,
    training.pure_bf16_of_bf16, training.cuda_graphs_of_torchtitan,
    training.microbatch_sizes_of_ranks, training.batch_divides, mixed.libraries_of_nodes,
    cluster.placement_of_all_axes, cluster.placement_of_all_ranks, cluster.placement_of_experts,
    schedule.schedule_goes_with_pipeline, schedule.virtual_stages_of_schedule,
    schedule.split_backward_recompute, schedule.split_backward_reshard, schedule.split_backward_ddp,
    schedule.stages_within_layers, schedule.stage_layers_are_all, training.pipeline_cells,
    parallel.tp_divides_heads, parallel.tp_divides_sizes, parallel.tp_divides_vocabulary,
    parallel.sequence_parallel_needs_tp, parallel.sequence_parallel_divides_sequence,
    parallel.sequence_parallel_of_software,
    parallel.cp_comm_needs_cp, parallel.cp_divides_sequence, parallel.a2a_divides_heads, experts.ep_divides,
    experts.etp_divides, parallel.tp_divides_shared_expert, sharding.zero_stage_of_shards,
    sharding.zero_stage_of_replicas, sharding.few_experts_divide, sharding.reshard_needs_shards,
    sharding.fsdp_units_of_blocks, sharding.buckets_of_ddp, sharding.buckets_need_overlap, sharding.buckets_of_replicas,
    training.grad_sync_of_replicas,
    training.backup_workers_of_replicas, training.data_of_task, training.gratings_of_image,
    training.grad_sync_of_shards, schedule.stages_equal, schedule.virtual_stages_ddp,
    experts.expert_overlap_ranks, experts.expert_overlap_stages,
    experts.expert_overlap_precision, experts.expert_overlap_mtp, parallel.tp_divides_mtp,
    sharding.flat_tensors_of_fsdp, sharding.flat_parameters_of_one_type, sharding.offload_of_sharded_parameters,
    sharding.offload_layers_of_activations, sharding.offload_needs_link,
    recompute.expert_overlap_recompute, recompute.recompute_of_software, recompute.recompute_layers_of_full,
    recompute.recompute_modules_of_selective, recompute.recompute_modules_apart, model.trainer_pipelines,
    collectives.parameter_servers_of_replicas, collectives.collectives_of_groups,
    replication.compression_of_replicas, replication.compression_of_ddp, replication.compression_of_software,
    replication.powersgd_of_matrices, replication.compression_alone, replication.one_bit_adam_of_momentum,
    replication.replication_of_replicas, replication.min_replicas_of_replicas, replication.replication_alone,
    replication.start_step_of_ddp, replication.workers_on_nodes, model.precision_of_capture,
    model.degree_of_capture, model.unused_weights_in_ddp, model.scalar_weights_in_fsdp,
)  # fmt: skip

_NOT_MODELLED: tuple[Rule, ...] = (
    parallel.ring_on_cpus, schedule.schedule_modelled, sharding.grad_dtype_modelled,
    sharding.zero_stage_modelled, experts.sequence_parallel_of_experts, experts.etp_modelled,
    parallel.cp_of_attention, schedule.split_backward_of_experts, experts.expert_dispatch_modelled,
    experts.ep_within_replicas, experts.ep_covers_shards, training.grad_sync_of_experts,
    training.backup_workers_modelled, parallel.tp_of_wide_norms,
    training.grad_sync_modelled, sharding.broadcasts_modelled, sharding.tied_embeddings_sharded, parallel.tp_modelled,
    parallel.sequence_parallel_modelled, parallel.cp_modelled, parallel.ring_modelled,
    sharding.fsdp_units_modelled, model.software_of_modules, model.compiled_capture, model.changed_split_capture,
    model.shared_weights_in_pipelines, model.tensors_between_stages,
    parallel.cp_of_unfused_attention, recompute.recompute_modelled, sharding.sharded_precision_modelled,
    schedule.split_backward_of_convolutions, sharding.offload_of_fsdp2, sharding.offload_of_experts,
    sharding.offload_layers_modelled, sharding.offload_modelled, recompute.recompute_layers_modelled,
    recompute.recompute_modules_modelled, parallel.cp_of_documents, model.documents_modelled,
    trained.adapters_of_experts, trained.magnitudes_modelled, trained.rotations_modelled, trained.adapters_of_ends,
    trained.pipelines_of_frozen_parts, trained.saved_modules_modelled,
    trained.preferences_modelled,
    schedule.split_backward_of_adapters, trained.adapters_in_low_precision, sharding.offload_with_frozen_weights,
    sharding.offload_above_frozen, sharding.flat_parameters_modelled,
    training.training_modelled, training.sharded_training_modelled, training.pure_bf16_modelled,
    cluster.background_jobs_modelled, cluster.software_of_this_machine, mixed.groups_of_equal_devices,
    mixed.microbatch_sizes_of_experts,
    mixed.microbatch_sizes_modelled,
    optimizers.optimizer_of_software, optimizers.optimizer_of_plan, optimizers.pages_of_cuda,
    optimizers.dtypes_of_states,
    training.optimizer_in_backward_modelled,
    training.fused_optimizer_of_torch, training.layerwise_optimizer_modelled, training.norms_modelled,
    training.low_precision_modelled, schedule.split_backward_in_low_precision, schedule.split_backward_compiled,
    sharding.offload_compiled,
    training.chunked_loss_modelled, model.max_predictions_unsplit, model.mtp_modelled,
    trained.mtp_with_adapters, trained.base_weights_of_software, trained.base_weights_of_splits,
    trained.fake_quantization_modelled,
    sharding.mtp_sharded, sharding.loading_modelled, schedule.split_backward_of_mtp, sharding.offload_with_mtp,
    training.low_attention_modelled, model.deepspeed_splits, model.transformers_model, model.transformers_splits,
    model.models_of_code, model.transformers_recompute, model.transformers_split_backward,
    model.transformers_experts_autocast, training.cp_of_low_attention, replication.compression_modelled,
    replication.replication_modelled, replication.workers_of_one_device, replication.workers_alone_on_links,
)  # fmt: skip

RULES: tuple[Rule, ...] = (*_COULD_NOT_BE, *_NOT_MODELLED, training.low_precision_sizes)
"""Every rule of a job."""

SEARCH_RULES: tuple[Rule, ...] = (cluster.tp_in_node, cluster.placed_tp_in_node)
"""Rules that a search applies by default, and that other plans may violate."""

MEMORY_RULES: tuple[Rule, ...] = (sharding.loading_within_memory,)
"""Rules that every plan of a search keeps; a prediction of another plan says that it does not fit."""

BY_NAME: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in (*RULES, *SEARCH_RULES, *MEMORY_RULES)})


_ABOUT: Mapping[ModuleType, Callable[[Job], bool]] = MappingProxyType(
    {
        collectives: lambda job: job.plan.collectives is not None,
        experts: lambda job: (
            job.model.num_experts > 0 or job.software.expert_overlap or job.plan.ep > 1 or job.plan.etp > 1
        ),
        mixed: lambda job: bool(job.cluster.node_groups) or job.plan.microbatch_sizes is not None,
        optimizers: lambda job: (
            OPTIMIZERS[job.training.optimizer].refused_under is not None
            or job.training.optimizer_dtypes is not None
            or job.training.optimizer_rank is not None
        ),
        parallel: lambda job: (
            job.plan.tp > 1 or job.plan.cp > 1 or job.plan.sequence_parallel or job.plan.cp_comm != "ring"
        ),
        recompute: lambda job: (
            job.plan.recompute != "none"
            or job.plan.recompute_layers is not None
            or job.plan.recompute_modules is not None
        ),
        replication: lambda job: job.plan.replication is not None or job.plan.compression is not None,
        trained: lambda job: (
            job.training.task == "lora"
            or job.training.is_of_preferences
            or job.training.preference is not None
            or job.training.base_weights is not None
            or job.training.fake_quantization is not None
            or not job.software.autocast
            or any(getattr(job.model, name) not in (0, False, (), {}, ("all",)) for name in LORA)
        ),
        schedule: lambda job: (
            job.plan.pp > 1
            or job.plan.schedule != "none"
            or job.plan.virtual_stages > 1
            or job.plan.stage_layers is not None
        ),
    }
)
"""Predicates on jobs by module of rules: without the feature of a module, none of its rules can be violated."""


def violations(job: Job, rules: Sequence[Rule] = RULES) -> list[Problem]:
    """Problems of a job, in the order of the rules."""
    return [problem for _, problem in _violated(job, rules)]


def check_job(job: Job, rules: Sequence[Rule] = RULES) -> None:
    """Raises an error for a job that violates rules.

    Raises:
        NotModelledError: The only violations are options that are not modeled yet.
        SpecError: Lists every violation, including options that are not modeled.
    """
    violated = _violated(job, rules)
    if not violated and rules is RULES:
        violated = [*_violated_in_background(job)]
    if not violated:
        return
    problems = [problem for _, problem in violated]
    raise (SpecError if any(rule.modelled for rule, _ in violated) else NotModelledError)(problems)


def _violated(job: Job, rules: Sequence[Rule]) -> list[tuple[Rule, Problem]]:
    without = {module.__name__ for module, has in _ABOUT.items() if not has(job)}
    rules = [rule for rule in rules if rule.problems.__module__ not in without]
    first = [(rule, problem) for rule in rules if not rule.after_others for problem in rule.problems(job)]
    return first or [(rule, problem) for rule in rules if rule.after_others for problem in rule.problems(job)]


def _violated_in_background(job: Job) -> Iterator[tuple[Rule, Problem]]:
    """Violations of background jobs, as fields of the scenario."""
    for index, background in enumerate(job.cluster.background):
        if isinstance(background, BackgroundJob):
            for rule, problem in _violated(background_job(job.cluster, background), RULES):
                yield rule, replace(problem, field=f"cluster.background.{index}.job.{problem.field}")
