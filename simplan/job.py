"""Training job: the input of predictions, searches and runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from simplan import catalog
from simplan.base import Spec
from simplan.cluster.hardware import BackgroundJob, ClusterSpec
from simplan.errors import Problem, SpecError, did_you_mean
from simplan.model.captured.facts import ComputedIn
from simplan.model.low_precision import LOW_PRECISIONS
from simplan.model.model import ModelSpec
from simplan.model.step_work import StepWork
from simplan.plan.collectives import shares_of_whole
from simplan.plan.placement import Placement
from simplan.plan.plan import ParallelPlan
from simplan.software.software import SoftwareSpec
from simplan.training import Reference, TrainingSpec

_MAX_NUMBERS_LEFT = 4
"""Numbers of replicas left that are predicted."""


@dataclass(frozen=True, slots=True)
class Job:
    """One training job: model, cluster, training, parallel plan and framework.

    Immutable and hashable. The constructor checks nothing; ``simplan.rules`` checks if the parts are compatible.
    """

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    plan: ParallelPlan
    software: SoftwareSpec

    def __post_init__(self) -> None:
        """Gives a captured model its precision, a plan the captured layout, software that of device and optimizer.

        Weights of few bits get the library of the software.

        The head of the model follows the task, and the states of preference training the model's adapters.
        """
        model, software = with_objective(self.model, self.training, self.software)
        if model is not self.model:
            object.__setattr__(self, "model", model)
        if software is not self.software:
            object.__setattr__(self, "software", software)
        if (base := self.training.base_weights) is not None and (
            own := base.of_software(software.base_weights)
        ) != base:
            object.__setattr__(self, "training", self.training.model_copy(update={"base_weights": own}))
        any_layout = self.training.precision == "fp8" and self.cluster.device.kernels.fp8_any_layout
        if self.software.fp8_any_layout != any_layout:
            object.__setattr__(self, "software", self.software.model_copy(update={"fp8_any_layout": any_layout}))
        whole = self.software.with_whole_tensors(self.training)
        if whole is not self.software:
            object.__setattr__(self, "software", whole)
        if self.plan.replication is not None and self.plan.replication.has_workers and whole.zero_grad_set_to_none:
            # what a worker sends to servers, or adds to common parameters, are views of gradients that stay
            object.__setattr__(self, "software", whole.model_copy(update={"zero_grad_set_to_none": False}))
        captured = self.model.captured
        if captured is None:
            return
        wanted = computed_in(self)
        if captured.computed_in != wanted and wanted in captured.graphs:
            model = self.model.model_copy(update={"captured": captured.model_copy(update={"computed_in": wanted})})
            object.__setattr__(self, "model", model)
        if self.plan.tp > 1 and self.plan.tp in captured.degrees:
            splits_tokens = captured.splits_tokens(self.plan.tp)
            if splits_tokens != self.plan.sequence_parallel:
                plan = self.plan.model_copy(update={"sequence_parallel": splits_tokens})
                object.__setattr__(self, "plan", plan)

    def __repr__(self) -> str:
        """Short form of the parts: names and numbers that tell jobs apart."""
        cluster, training = self.cluster, self.training
        return (
            f"Job({self.model.name}, {cluster.devices_in_words}, {self.plan!r}, "
            f"global_batch_size={training.global_batch_size}, {training.precision}, {self.software.title})"
        )

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and data-parallel rank: global_batch_size / (dp x microbatch_size)."""
        return self.training.global_batch_size // self.plan.sequences_per_microbatch

    @property
    def sample(self) -> str:
        """Name of one sample of the batch: ``pair`` where a task trains on pairs, else as ``ModelSpec.sample``."""
        return "pair" if self.training.sequences_per_sample > 1 else self.model.sample

    @property
    def sequences_per_step(self) -> int:
        """Sequences whose gradients a step uses: the global batch without that of dropped replicas, two of a pair."""
        kept = self.plan.dp - self.training.backup_workers
        return self.training.global_batch_size * kept // self.plan.dp * self.training.sequences_per_sample

    def flops_per_step(self, *, full_attention: bool = False) -> int:
        """Model FLOPs of a step without recomputation: of the sequences trained on, and of passes without gradients.

        A pass of the reference model or of mismatched completions is part of the loss, unlike recomputation.
        """
        each = self.model.flops_per_sequence(full_attention=full_attention)
        for name in self.training.passes(self.reference):
            model = self.model if name == "mismatched" else self.model.without_training
            each += model.forward_flops_per_sequence(full_attention=full_attention)
        return self.sequences_per_step * each

    @property
    def plan_in_sequences(self) -> ParallelPlan:
        """The plan with microbatches in sequences, of which a pair is two."""
        plan, each = self.plan, self.training.sequences_per_sample
        if each == 1:
            return plan
        sizes = plan.microbatch_sizes
        scaled = tuple(each * size for size in sizes) if isinstance(sizes, tuple) else sizes
        return plan.model_copy(update={"microbatch_size": each * plan.microbatch_size, "microbatch_sizes": scaled})

    @property
    def reference(self) -> Reference:
        """Origin of the reference's log-probabilities in preference training."""
        return self.training.reference(has_adapters=self.model.lora_rank > 0)

    @property
    def step_work(self) -> StepWork:
        """Work of one step, for comparisons with other jobs."""
        model, cluster = self.model, self.cluster
        devices, number = cluster.devices_in_words, cluster.num_devices
        return StepWork(model.name, model.sample, self.sequences_per_step, model.seq_len, devices, number)

    @property
    def padded_model(self) -> ModelSpec:
        """Model with the vocabulary padded as the software does."""
        return self.software.padded(self.model, self.plan)

    @property
    def server_shares(self) -> tuple[float, ...]:
        """Fraction of the gradients on each parameter server; empty for equal parts, and without servers."""
        collectives = self.plan.collectives
        if collectives is None or collectives.parameter_placement != "whole":
            return ()
        trained = (
            parameter.num_elements
            for layer in self.padded_model.layers
            for parameter in layer.parameters
            if not parameter.frozen and parameter.name not in layer.tied
        )
        return shares_of_whole(trained, collectives.num_servers)

    @property
    def placement(self) -> Placement | None:
        """Devices of the ranks; None if every rank is on the device of its own number."""
        return None if self.plan.placement is None else Placement.of(self.plan)

    @property
    def placement_words(self) -> str:
        """Nodes of the groups of the ranks; empty if every rank is on the device of its own number."""
        placement = self.placement
        return "" if placement is None else placement.words(self.cluster.devices_per_node)

    def node_of(self, rank: int) -> int:
        """Node of a rank."""
        return self.cluster.node_of(self.device_of(rank))

    def device_of(self, rank: int) -> int:
        """Device of a rank."""
        placement = self.placement
        return rank if placement is None else placement.device_of(rank)

    def group_of(self, rank: int) -> int | None:
        """Node group of a rank; None for a cluster of equal nodes."""
        return self.cluster.group_of(self.device_of(rank)) if self.cluster.node_groups else None

    def memory_bytes_of(self, rank: int) -> int | None:
        """Memory of the device of a rank; None if unknown."""
        return self.cluster.device_of(self.device_of(rank)).memory_bytes

    @property
    def stage_groups(self) -> tuple[tuple[int, ...], ...]:
        """By pipeline rank, the node groups of its ranks, ascending; empty for a cluster of equal nodes."""
        if not self.cluster.node_groups:
            return ()
        width = self.plan.num_devices // self.plan.pp
        ranks = [range(width * stage, width * (stage + 1)) for stage in range(self.plan.pp)]
        return tuple(tuple(sorted({self.cluster.group_of(self.device_of(rank)) for rank in own})) for own in ranks)

    @staticmethod
    def full_key(key: str) -> str:
        """Key of a setting with its section, of a key with or without it; see ``full_key``."""
        return full_key(key, _SECTIONS)

    def with_plan(self, plan: ParallelPlan) -> Job:
        """Copy of the job with another plan, such as a search candidate."""
        return replace(self, plan=plan)

    def with_num_devices(self, num_devices: int) -> Job:
        """Copy on another number of devices of the cluster.

        A cluster that grows past one node without an ``inter_link`` gets the link of its catalog preset.
        """
        cluster = self.cluster
        if num_devices == cluster.num_devices:
            return self
        if cluster.is_mixed:
            rule = f"is the sum of cluster.nodes, {cluster.num_devices}, and cannot change while nodes differ"
            fix = "change cluster.nodes, or use equal nodes"
            raise SpecError(Problem(field="cluster.num_devices", value=str(num_devices), rule=rule, fix=fix))
        if cluster.cores_per_node is not None:  # the fraction of CPU memory per rank depends on the number of ranks
            return replace(self, cluster=catalog.cluster(cluster.id, num_devices))
        update: dict[str, object] = {"num_devices": num_devices}
        if num_devices > cluster.devices_per_node and cluster.inter_link is None:
            if cluster.id in catalog.names("clusters"):
                larger = catalog.cluster(cluster.id, num_devices)
                update |= {"inter_link": larger.inter_link, "nics_per_node": larger.nics_per_node}
        elif num_devices <= cluster.devices_per_node:
            update |= {"inter_link": None, "nics_per_node": None}
        return replace(self, cluster=cluster.with_changes(**update))

    def with_changes(self, changes: Mapping[str, Any] | None = None, **keys: Any) -> Job:
        """Copy of the job with other values of some settings, named as in a scenario file.

        >>> from simplan import catalog
        >>> training, cluster = TrainingSpec(global_batch_size=32), catalog.cluster("dgx-h100", 8)
        >>> job = Job(catalog.model("gpt2-124m"), cluster, training, ParallelPlan(), catalog.software("torch"))
        >>> job.with_changes({"plan.dp_shard": 8, "training.precision": "fp16"}).plan.zero_stage
        3
        >>> job.with_changes(tp=4, dp_shard=2).plan
        ParallelPlan(dp_shard=2, tp=4)

        Args:
            changes: New value by setting, such as ``{"plan.tp": 8, "training.global_batch_size": 64}``. Other settings
                follow if they have their default and it depends on these (``ParallelPlan``).
            keys: Settings without their section.

        Raises:
            SpecError: There is no such setting, or a value is wrong.
        """
        by_section: dict[str, dict[str, Any]] = {}
        for setting, value in {**(changes or {}), **keys}.items():
            section, _, name = self.full_key(setting).partition(".")
            by_section.setdefault(section, {})[name] = value
        job, sections = self, tuple(field.name for field in fields(self))
        if "num_devices" in by_section.get("cluster", {}):
            job = self.with_num_devices(by_section["cluster"].pop("num_devices"))
        changed = {}
        for section, values in by_section.items():
            if section not in sections or "" in values:
                fix = did_you_mean(section, sections) if section not in sections else f"write {section}.KEY"
                raise SpecError(Problem(field=section, rule="is no setting of a job", fix=fix))
            try:
                changed[section] = getattr(job, section).with_changes(**values)
            except SpecError as error:
                problems = [replace(each, field=f"{section}.{each.field}") for each in error.problems]
                raise type(error)(problems) from None
        changed_job = replace(job, **changed)
        if by_section.get("plan") and "zero_stage" not in by_section["plan"]:
            return changed_job.with_plan(_with_zero_stage_of_groups(self.plan, changed_job))
        return changed_job


def with_objective(model: ModelSpec, training: TrainingSpec, software: SoftwareSpec) -> tuple[ModelSpec, SoftwareSpec]:
    """Model and framework of a training run, the model with the head of its task, the framework with its states."""
    objective = training.objective
    if model.trains_nothing and objective == "divergence":  # the reference gives logits, and has no loss
        objective = "logits"
    if model.objective != objective:
        model = model.model_copy(update={"objective": objective})
    of_preferences = training.is_of_preferences
    trains_adapters = of_preferences and model.lora_rank > 0
    sequences = training.sequences_per_sample if of_preferences else 0
    if (software.trains_adapters, software.loss_sequences) != (trains_adapters, sequences):
        software = software.model_copy(update={"trains_adapters": trains_adapters, "loss_sequences": sequences})
    return model, software


def computed_in(job: Job) -> ComputedIn:
    """Precision of a captured model's forward pass."""
    training = job.training
    if training.precision in ("fp32", "tf32"):
        return "fp32"
    kinds = {str(key): state for key, state in job.software.states(training, job.plan).items()}
    wide = "bf16" if training.precision in LOW_PRECISIONS else training.precision
    state = kinds.get("pure_bf16" if training.pure_bf16 else wide)
    return "bf16" if state is not None and state.residual == state.activation else "autocast"


_SECTIONS: dict[str, type[Spec]] = {
    "plan": ParallelPlan,
    "training": TrainingSpec,
    "cluster": ClusterSpec,
    "model": ModelSpec,
    "software": SoftwareSpec,
}


def full_key(key: str, sections: Mapping[str, type[Spec]]) -> str:
    """Key with its section, of a key with or without it.

    A key of several sections is that of the first: ``recompute_modules`` of the plan, not of the software, which says
    what there is.

    Args:
        key: A key such as ``tp`` or ``plan.tp``.
        sections: Section -> keys.

    Raises:
        SpecError: No section has the key.
    """
    if "." in key or key in sections:
        return key
    having = [section for section, spec in sections.items() if key in spec.model_fields]
    if having:
        return f"{having[0]}.{key}"
    known = [name for spec in sections.values() for name in spec.model_fields]
    raise SpecError(Problem(field=key, rule="is no key of a scenario", fix=did_you_mean(key, known)))


def _with_zero_stage_of_groups(before: ParallelPlan, job: Job) -> ParallelPlan:
    """Plan of a job with changed degrees: no states are sharded without shards, nor left unsharded by context ranks."""
    plan = job.plan
    shards = plan.dp_shard * plan.cp
    if shards == 1 and plan.dp_replicate > 1:
        return plan.model_copy(update={"zero_stage": 0})
    was_sharded = before.zero_stage == 3 or before.dp_shard * before.cp == 1
    if plan.dp_shard == 1 < shards and plan.zero_stage == 0 and was_sharded and job.software.shards_over_cp:
        return plan.model_copy(update={"zero_stage": 3})
    return plan


def background_job(cluster: ClusterSpec, background: BackgroundJob) -> Job:
    """Job of an entry of ``ClusterSpec.background``, on a cluster of its nodes alone, without a topology."""
    alone = {"background": (), "stragglers": (), "slow_links": (), "jitter": None, "topology": None}
    own = cluster.model_copy(update={**alone, "num_devices": background.plan.num_devices})
    return Job(background.model, own, background.training, background.plan, background.software)


def numbers_left(job: Job) -> list[int]:
    """Numbers of replicas with which a run is predicted to go on, largest first; none if it ends with any replica.

    Of many, these are the largest ones and the smallest.
    """
    replication = job.plan.replication
    if replication is None or replication.min_replicas is None:
        return []
    numbers = list(range(job.plan.dp_replicate - 1, replication.min_replicas - 1, -1))
    return numbers if len(numbers) <= _MAX_NUMBERS_LEFT else [*numbers[: _MAX_NUMBERS_LEFT - 1], numbers[-1]]


def with_replicas_left(job: Job, number: int) -> Job:
    """The job of some of its replicas: their devices, and their part of the batch."""
    plan, replication = job.plan, job.plan.replication
    assert replication is not None
    left = plan.with_changes(
        dp_replicate=number, replication={**replication.model_dump(exclude_defaults=True), "min_replicas": number}
    )
    cluster = job.cluster.model_copy(update={"num_devices": left.num_devices})
    batch = job.training.global_batch_size * number // plan.dp_replicate
    return replace(job, cluster=cluster, plan=left, training=job.training.with_changes(global_batch_size=batch))
