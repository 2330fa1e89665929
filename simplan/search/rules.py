"""``check_plan`` for hundreds of thousands of candidates: the same rules in plain Python, each with a stable name.

Every method looks at a few fields of a candidate and names the first rule they break, or None. An enumeration asks
each as soon as its fields are known; ``first`` asks them all. A test holds both against ``check_plan``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from simplan.job import Job
from simplan.spec.cuda_graph_rules import cuda_graph_rules, unmodelled_cuda_graphs
from simplan.spec.low_precision_rules import low_precision_sizes
from simplan.spec.models import FAMILIES
from simplan.spec.plan import ParallelPlan
from simplan.spec.rules import MAX_PIPELINE_CELLS
from simplan.spec.schedules import REFUSED_SCHEDULES, SCHEDULE_FACTS
from simplan.spec.software import SoftwareSpec

__all__ = ["RULES", "Rules", "in_words"]

RULES: Mapping[str, str] = MappingProxyType(
    {
        "devices": "dp_replicate x dp_shard x tp x cp x pp must be the number of devices",
        "tp_in_node": "tensor-parallel groups stay inside a node (search.tp_across_nodes lifts it)",
        "tp_divides_heads": "tp must divide num_attention_heads and num_key_value_heads",
        "tp_divides_sizes": "tp must divide intermediate_size, vocab_size, num_classes and the shared expert, with MTP "
        "hidden_size",
        "tp_modelled": "tensor parallelism of this model is not modelled",
        "cp_divides_sequence": "2 x cp must divide seq_len",
        "cp_modelled": "context parallelism of this model is not modelled",
        "cp_comm_needs_cp": "cp_comm is about context-parallel ranks, and cp = 1",
        "ring_modelled": "ring attention of this model, or on CPU ranks, is not modelled",
        "a2a_divides_heads": "cp x tp must divide the heads for all-to-all",
        "sequence_parallel_needs_tp": "sequence_parallel is about tensor-parallel ranks, and tp = 1",
        "sequence_parallel_of_software": "the software has no sequence parallelism",
        "sequence_parallel_divides_sequence": "tp x cp must divide seq_len for sequence parallelism",
        "sequence_parallel_modelled": "sequence parallelism of this model is not modelled",
        "sequence_parallel_of_experts": "tensor parallelism beside experts goes with sequence parallelism",
        "ep_divides": "ep must divide num_experts and dp_replicate x dp_shard x cp x tp",
        "ep_covers_shards": "ep must be a multiple of dp_shard x cp x tp where whole optimizer states are dealt out",
        "ep_within_replicas": "ep must divide dp_shard x cp x tp, or be a multiple of it, with sharded parameters",
        "stages_within_layers": "every stage needs a layer",
        "stages_equal": "stages must divide the blocks: the software has as many in each",
        "schedule_goes_with_pipeline": "a pipeline needs a schedule, and one rank has none",
        "schedule_modelled": "this schedule is not modelled, or not for this model",
        "virtual_stages_of_schedule": "virtual_stages must be what the schedule takes",
        "expert_overlap_ranks": "exchanges beside another microbatch need experts on several ranks",
        "expert_overlap_stages": "exchanges beside another microbatch need several stages a pipeline rank",
        "expert_overlap_precision": "exchanges beside another microbatch are for weights of 16 bits and less",
        "expert_overlap_recompute": "exchanges beside another microbatch cannot run again with whole layers",
        "cuda_graphs_schedule": "CUDA graphs with this schedule are not modelled",
        "cuda_graphs_recompute": "what CUDA graphs have cannot run again so",
        "cuda_graphs_sharded": "CUDA graphs beside exchanges that overlap cannot have sharded parameters",
        "split_backward_recompute": "a split backward can recompute the attention core alone",
        "split_backward_reshard": "torch loses gradients of a split backward with reshard_after_forward",
        "split_backward_ddp": "DistributedDataParallel does not reduce what a split backward makes",
        "virtual_stages_ddp": "DistributedDataParallel fails with several stages on a rank",
        "zero_stage_of_shards": "dp_shard > 1 needs zero_stage 1, 2 or 3",
        "reshard_needs_shards": "reshard_after_forward is about sharded parameters",
        "mtp_sharded": "sharding of parameters beside layers for multi-token prediction is not modelled",
        "tied_embeddings_sharded": "sharding embeddings tied over two pipeline ranks is not modelled",
        "recompute_modelled": "this recomputation of this model is not modelled",
        "sharded_precision_modelled": "sharding batch norms in half precision is not modelled",
        "sharded_training_modelled": "ZeRO-2 and ZeRO-3 of this task and precision are not modelled for the software",
        "batch_divides": "global_batch_size must be a multiple of dp x microbatch_size",
        "grad_sync_of_replicas": "grad_sync = microbatch is about data-parallel ranks, and there is one",
        "grad_sync_modelled": "gradient reduction after every microbatch of a pipeline or of experts is not modelled",
        "pipeline_cells": f"microbatches x pipeline ranks must be at most {MAX_PIPELINE_CELLS:,}",
        "low_precision_sizes": "matrix products in 8 or 4 bits need sizes that are whole blocks",
        "memory": "the worst device must hold it",
        "max_step_time_s": "a step must be within the deadline",
    }
)
"""What rejects a candidate: name and rule. Those of ``check_plan``, and what a search itself asks."""

_NOT_IN_TORCH: Mapping[str, str] = MappingProxyType(
    {
        "split_backward_reshard": "a split backward with reshard_after_forward is not modelled",
        "split_backward_ddp": "a split backward of replicas whose parameters are whole is not modelled",
        "virtual_stages_ddp": "several stages on a rank of replicas whose parameters are whole are not modelled",
    }
)
"""The same of software that does not run on torch, where torch's own limits say nothing."""


def in_words(name: str, software: SoftwareSpec) -> str:
    """What a rule says to who uses a software."""
    return RULES[name] if software.framework == "torch" else _NOT_IN_TORCH.get(name, RULES[name])


_SPLITS = frozenset(name for name, facts in SCHEDULE_FACTS.items() if facts.splits_backward)


class Rules:
    """The rules for one question.

    Args:
        question: What is asked, whatever its plan.
        tp_across_nodes: Tensor-parallel groups may span nodes.
    """

    def __init__(self, question: Job, *, tp_across_nodes: bool = False) -> None:
        model, cluster, software = question.model, question.cluster, question.software
        family = FAMILIES[model.family]
        self._num_devices = cluster.num_devices
        self._tp_fills = None if tp_across_nodes or cluster.num_nodes == 1 else cluster.devices_per_node
        self._heads = (model.num_attention_heads, model.num_key_value_heads)
        self._sizes = (
            model.intermediate_size, model.vocab_size, model.num_classes, model.shared_expert_intermediate_size,
            model.hidden_size if model.mtp_num_layers else 0,
        )  # fmt: skip
        self._seq_len = model.seq_len
        self._blocks = model.num_blocks
        self._equal_stages = software.equal_stages == "always"
        self._experts = model.num_experts
        self._of_classes = family.task == "class"
        self._latent = model.family == "deepseek"
        self._convolutions = bool(model.depths)
        self._tied = model.tied_embeddings
        self._mtp = model.mtp_num_layers > 0
        self._half = question.training.precision not in ("fp32", "tf32")
        self._batch = question.training.global_batch_size
        self._even = software.optimizer_shards == "elements"
        self._ddp_splits, self._ddp_stages = software.ddp_splits, software.ddp_stages
        self._expert_overlap = software.expert_overlap
        whole = bool(family.whole_layers)
        normed = model.qk_norm == "projection"
        low = next((low for name, low in software.low_precision.items() if name == question.training.precision), None)
        self._question = question
        self.in_low_precision = low is not None
        self._low_sizes: dict[tuple[object, ...], bool] = {}
        self._graphs_with: dict[tuple[tuple[str, object], ...], bool] = {}
        shards = software.states(question.training, ParallelPlan(dp_shard=2, zero_stage=3))
        self._no_shards = not shards or question.training.precision not in {*shards, *software.low_precision}
        self._no_tp = whole or normed
        self._no_cp = whole or self._of_classes or family.task == "masked_token" or bool(model.document_lengths)
        self._no_cp |= software.fp8_dot_product_attention
        self._no_splits = bool(
            self._experts or self._convolutions or model.lora_rank or self.in_low_precision or self._mtp
        )
        self._no_ring = family.alibi or any(model.windows) or cluster.device.kind == "cpu"

    def first(self, c: ParallelPlan) -> str | None:
        """The first rule that a candidate breaks; None when it is a plan."""
        whys = (
            self.mesh(c.tp, c.cp, c.pp, c.dp_replicate, c.dp_shard, c.ep),
            self.sharding(c.tp, c.cp, c.dp_shard, c.zero_stage, c.reshard_after_forward, c.pp, c.ep),
            self.pipeline(c.pp, c.schedule, c.virtual_stages, c.ep),
            self.sharded_pipeline(
                c.schedule, c.virtual_stages, c.dp * c.cp, c.shards_parameters, c.zero_stage, c.reshard_after_forward
            ),
            self.tokens(c.tp, c.sequence_parallel, c.cp, c.cp_comm),
            self.microbatches(c.dp, c.microbatch_size, c.pp, c.schedule),
            self.recompute(c.schedule, c.recompute, c.recompute_modules or ()),
            self.grad_sync(c.pp, c.dp * c.cp, c.ep, c.tp) if c.grad_sync == "microbatch" else None,
        )
        return next((why for why in whys if why is not None), None) or self.low_precision(
            c.tp, c.sequence_parallel, c.cp, c.cp_comm, c.ep, c.microbatch_size
        )

    def mesh(self, tp: int, cp: int, pp: int, dp_replicate: int, dp_shard: int, ep: int) -> str | None:
        """Ranks along each axis."""
        if dp_replicate * dp_shard * tp * cp * pp != self._num_devices:
            return "devices"
        if self._tp_fills is not None and self._tp_fills % tp:
            return "tp_in_node"
        if any(heads % tp for heads in self._heads):
            return "tp_divides_heads"
        if any(size % tp for size in self._sizes):
            return "tp_divides_sizes"
        if tp > 1 and self._no_tp:
            return "tp_modelled"
        if cp > 1:
            if self._no_cp or (self._experts and self._latent):
                return "cp_modelled"
            if self._seq_len % (2 * cp):
                return "cp_divides_sequence"
        if ep > 1 and (not self._experts or self._experts % ep or dp_replicate * dp_shard * cp * tp % ep):
            return "ep_divides"
        if self._expert_overlap and self._experts and not (ep > 1 and self._half):
            return "expert_overlap_precision" if ep > 1 else "expert_overlap_ranks"
        return "stages_within_layers" if pp > self._blocks else None

    def sharding(self, tp: int, cp: int, dp_shard: int, zero_stage: int, reshard: bool, pp: int, ep: int) -> str | None:
        """What is sharded."""
        num_shards = dp_shard * cp
        sharded = zero_stage >= 2 and num_shards > 1
        if dp_shard > 1 and not zero_stage:
            return "zero_stage_of_shards"
        if not reshard and not sharded:
            return "reshard_needs_shards"
        if sharded and self._no_shards:
            return "sharded_training_modelled"
        if sharded and self._mtp:
            return "mtp_sharded"
        if sharded and not self._has_graphs_with(zero_stage=zero_stage):
            return "cuda_graphs_sharded"
        if sharded and pp > 1 and self._tied:
            return "tied_embeddings_sharded"
        if sharded and self._convolutions and self._half:
            return "sharded_precision_modelled"
        if self._experts and ep * tp > 1 and zero_stage and num_shards > 1 and ep % (num_shards * tp):
            if sharded and num_shards * tp % ep:
                return "ep_within_replicas"
            if not sharded and not self._even:
                return "ep_covers_shards"
        return None

    def pipeline(self, pp: int, schedule: str, virtual_stages: int, ep: int) -> str | None:
        """Stages and their schedule."""
        if schedule in REFUSED_SCHEDULES:
            return "schedule_modelled"
        if (pp > 1) != (schedule != "none"):
            return "schedule_goes_with_pipeline"
        if pp == 1:
            return None if virtual_stages == 1 else "virtual_stages_of_schedule"
        wanted = SCHEDULE_FACTS[schedule].virtual_stages
        if virtual_stages != wanted and (wanted is not None or virtual_stages == 1):
            return "virtual_stages_of_schedule"
        if pp * virtual_stages > self._blocks:
            return "stages_within_layers"
        if not self._has_graphs_with(schedule=schedule):
            return "cuda_graphs_schedule"
        if self._equal_stages and self._blocks % (pp * virtual_stages):
            return "stages_equal"
        if self._expert_overlap and ep > 1 and virtual_stages == 1:
            return "expert_overlap_stages"
        return "schedule_modelled" if schedule in _SPLITS and self._no_splits else None

    def sharded_pipeline(
        self, schedule: str, virtual_stages: int, num_replicas: int, sharded: bool, zero_stage: int, reshard: bool
    ) -> str | None:
        """Stages whose gradients several ranks average."""
        if schedule in _SPLITS:
            if sharded and zero_stage == 3 and reshard:
                return "split_backward_reshard"
            if num_replicas > 1 and not sharded and not self._ddp_splits:
                return "split_backward_ddp"
        if virtual_stages > 1 and num_replicas > 1 and not sharded and not self._ddp_stages:
            return "virtual_stages_ddp"
        return None

    def tokens(self, tp: int, sequence_parallel: bool, cp: int, cp_comm: str) -> str | None:
        """How tokens are split over ranks."""
        if sequence_parallel:
            if tp == 1:
                return "sequence_parallel_needs_tp"
            if not self._question.software.sequence_parallelism:
                return "sequence_parallel_of_software"
            if self._of_classes:
                return "sequence_parallel_modelled"
            if self._seq_len % (tp * cp):
                return "sequence_parallel_divides_sequence"
        elif tp > 1 and self._experts:
            return "sequence_parallel_of_experts"
        if cp == 1:
            return None if cp_comm == "ring" else "cp_comm_needs_cp"
        if cp_comm == "ring" and self._no_ring:
            return "ring_modelled"
        if cp_comm == "a2a" and any(heads % (cp * tp) for heads in self._heads):
            return "a2a_divides_heads"
        return None

    def microbatches(self, dp: int, microbatch_size: int, pp: int, schedule: str) -> str | None:
        """How the batch is cut; a step that cannot be truncated is not too long."""
        if self._batch % (dp * microbatch_size):
            return "batch_divides"
        number = self._batch // (dp * microbatch_size)
        facts = SCHEDULE_FACTS.get(schedule)
        found = pp > 1 and facts is not None and facts.needs_times
        return "pipeline_cells" if found and number * pp > MAX_PIPELINE_CELLS else None

    def recompute(self, schedule: str, recompute: str, modules: tuple[str, ...]) -> str | None:
        """What is computed again."""
        if self._convolutions and recompute != "none":
            return "recompute_modelled"
        if self._expert_overlap and recompute == "full":
            return "expert_overlap_recompute"
        if not self._has_graphs_with(recompute=recompute, recompute_modules=modules or None):
            return "cuda_graphs_recompute"
        if schedule in _SPLITS and (recompute not in ("none", "selective") or modules not in ((), ("core_attn",))):
            return "split_backward_recompute"
        return None

    def grad_sync(self, pp: int, num_replicas: int, ep: int, tp: int) -> str | None:
        """Gradients that are reduced after every microbatch."""
        if num_replicas == 1:
            return "grad_sync_of_replicas"
        return "grad_sync_modelled" if pp > 1 or (self._experts and ep * tp > 1) else None

    def _has_graphs_with(self, **fields: object) -> bool:
        """Whether the software's CUDA graphs, if it has any, go with some fields of a plan."""
        software = self._question.software
        if not software.cuda_graphs:
            return True
        known = tuple(fields.items())
        if known not in self._graphs_with:
            plan = ParallelPlan.model_validate({"dp_shard": 2, "zero_stage": 1, **fields})
            model, cluster = self._question.model, self._question.cluster
            cannot_be = next(cuda_graph_rules(model, cluster, plan, software), None)
            unmodelled = next(unmodelled_cuda_graphs(model, plan, software), None)
            self._graphs_with[known] = cannot_be is None and unmodelled is None
        return self._graphs_with[known]

    def low_precision(
        self, tp: int, sequence_parallel: bool, cp: int, cp_comm: str, ep: int, microbatch_size: int
    ) -> str | None:
        """Sizes of matrix products in 8 and 4 bits, once nothing else is wrong; the same for most candidates."""
        if not self.in_low_precision:
            return None
        same = tp, sequence_parallel, cp, cp_comm, ep, microbatch_size
        if same not in self._low_sizes:
            names = "tp", "sequence_parallel", "cp", "cp_comm", "ep", "microbatch_size"
            plan = ParallelPlan().model_copy(update=dict(zip(names, same, strict=True)))
            form = self._question.software.state(self._question.training, plan).linear
            assert form is not None, "a low precision has a format"
            odd = low_precision_sizes(self._question.model, plan, form)
            self._low_sizes[same] = next(odd, None) is not None
        return "low_precision_sizes" if self._low_sizes[same] else None
