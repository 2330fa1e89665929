"""Training loop of one rank: builds stages, engine and optimizers, and runs single steps.

Modules that only some plans need are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from executor.distributed.gradients import (
    GradientClipper,
    ShardGroups,
    TiedWeights,
    average_expert_gradients,
    expert_parameters,
    experts_of,
    partial_parameters,
    sum_partial_gradients,
    zero_gradients,
)
from executor.distributed.mesh import ParallelDims, Peers
from executor.distributed.precision import Autocast, compute_dtype, fp8_recipe, weight_dtype
from executor.models.embedding_and_head import OutputHead
from executor.models.lora import trained_parameters
from executor.models.model import Stage, build_stage, split_dimensions
from executor.profiling.recorder import Recorder
from executor.train.data import in_pairs, input_shape, model_batch
from executor.train.loop import LoopEngine
from executor.train.loss import cross_entropy, loss_in_chunks, split_loss
from executor.train.optimizers import make_optimizer, update_in_backward
from simplan.model.captured.layers import blocks_in_root
from simplan.model.families import FAMILIES
from simplan.model.layer import LayerKind
from simplan.plan.plan import RankMapping
from simplan.program.action import Action, ActionKind
from simplan.program.lowering.offload import backward_follows
from simplan.runs.run_spec import RunSpec

if TYPE_CHECKING:
    from executor.distributed.compression import CompressionHook, MomentumCompression
    from executor.distributed.fsdp import StageSharding
    from executor.distributed.pipeline import PipelineEngine, StageModule
    from executor.distributed.replicas.backup_workers import FirstReplicas
    from executor.distributed.replicas.membership import Meeting
    from executor.distributed.replicas.outer import OuterSteps
    from executor.distributed.zero import ShardedOptimizer
    from executor.models.captured import CapturedPart, StageCut
    from executor.train.boundaries import LayerBoundaries
    from executor.train.training_state import TrainingState


class Trainer:
    """Training of one rank.

    Args:
        job: The job; already checked.
        dims: Process groups of the rank by mesh axis.

    Attributes:
        stages: Stages of the rank by index, ascending.
        optimizers: Optimizers of all trained parameters.
        replicas: With backup workers, the replicas of which every step drops the last; else None.
        second_model: Reference model of preference training; None without one of its own.
    """

    def __init__(self, job: RunSpec, rank: int, device: torch.device, dims: ParallelDims, recorder: Recorder) -> None:
        self._job = job
        self._device = device
        self._dims = dims
        self._recorder = recorder
        plan = job.plan
        mapping = RankMapping.of(plan)
        self._data_rank = mapping.dp_rank(rank)
        self._num_microbatches = job.training.global_batch_size // (plan.dp * plan.microbatch_size)
        table = job.parsed_table()
        row = table[mapping.place(rank).pp]
        self._optim_action = row[-1]
        assert self._optim_action.kind is ActionKind.OPTIM

        self._layers = job.software.layers_of(job.model, plan, job.training)
        self._captured_data = self._make_captured_data()
        self.stages: dict[int, Stage] = {}
        for index in sorted({action.stage for action in row}):
            self.stages[index] = self._build_stage(index)
        if plan.offload_activations:
            from executor.distributed.activation_offload import ActivationOffload, HostLink

            blocks = {i for i, layer in enumerate(job.model.layers) if layer.kind is LayerKind.BLOCK}
            offload = ActivationOffload(HostLink(device), recorder, rank, blocks, backward_follows(row))
            for stage in self.stages.values():
                stage.around_layers = partial(offload.forward, tables=stage.shared_tables)
        self._tied = TiedWeights(job, self.stages, dims.tied)
        self._parameters = parameters = [
            parameter for stage in self.stages.values() for parameter in trained_parameters(stage)
        ]
        averages, num_dropped = dims.dp.size > 1 and not plan.shards_parameters, job.training.backup_workers
        self._uses_ddp = averages and not num_dropped
        # with offload, so that FSDP allocates new gradients: the device would wait for accumulation into old ones
        sends_views = plan.replication is not None and plan.replication.has_workers
        self._drops_gradients = plan.offload_optimizer or (job.software.drops_gradients and not sends_views)
        for parameter in [] if self._drops_gradients else parameters:
            parameter.grad = torch.zeros_like(parameter)  # every step finds gradients to add to
        self._groups = ShardGroups.of(job, self.stages.values(), dims)
        self._sharded_optimizer: ShardedOptimizer | None = None
        self._compression = self._make_compression()
        self.optimizers = self._make_optimizers(parameters)
        if job.training.optimizer_in_backward:
            update_in_backward(parameters, self.optimizers)
        self._clipper = self._make_clipper(parameters)
        self._outer = self._make_outer(parameters)
        self.replicas: FirstReplicas | None = None
        self.second_model: nn.Module | None = None
        if num_dropped:
            from executor.distributed.replicas.backup_workers import FirstReplicas

            self.replicas = FirstReplicas(dims.dp, num_dropped, parameters, recorder)
        self._boundaries = self._watched_boundaries(rank)
        modules = {index: self._wrap(stage) for index, stage in self.stages.items()}
        loss = self._loss()
        self._engine: LoopEngine | PipelineEngine
        if dims.pp.size == 1:
            ((index, module),) = modules.items()
            self._engine = LoopEngine(
                module,
                row[:-1],
                parameters,
                self._num_microbatches,
                loss=self._of_microbatch(loss),
                complete_gradients=self._completion(index),
                sync_each=plan.reduces_every_microbatch,
                recorder=recorder,
                replicas=self.replicas,
            )
        else:
            from executor.distributed.pipeline import PipelineEngine  # seconds to import: only where needed

            self._engine = PipelineEngine(
                [self._stage_module(index, module) for index, module in modules.items()],
                table,
                dims.pp,
                num_microbatches=self._num_microbatches,
                loss=loss,
                device=device,
                recorder=recorder,
                alone=dims.alone,
            )
        if self._compression is not None and plan.compression is not None and plan.compression.depends_on_buckets:
            self._settle_buckets(self._compression)

    @property
    def sent(self) -> list[Tensor]:
        """Tensors that are held until the end of the step because they are being sent to another stage."""
        return [] if isinstance(self._engine, LoopEngine) else self._engine.sent

    def batch(self, step: int) -> tuple[Tensor | list[Any], Tensor | None]:
        """Inputs and targets of this rank's part of a step: tokens, (samples, tokens) int64 each, or images.

        Of a captured model, a list of the arguments of every microbatch, and None.
        """
        per_sample = self._job.training.sequences_per_sample
        num_samples = self._num_microbatches * self._job.plan.microbatch_size * per_sample
        if self._captured_data is not None:
            first = self._data_rank * self._num_microbatches
            numbers = range(first, first + self._num_microbatches)
            return [self._captured_data(step, number) for number in numbers], None
        inputs, targets = model_batch(
            self._job.model,
            seed=self._job.seed,
            step=step,
            first_sample=self._data_rank * num_samples,
            num_samples=num_samples,
            data=self._job.training.data,
        )
        if inputs.is_floating_point():
            inputs = inputs.to(weight_dtype(self._job))
        if per_sample == 2:
            inputs, targets = (in_pairs(both, self._job.plan.microbatch_size) for both in (inputs, targets))
        local = self._dims.local_tokens
        # without the first stage inputs are of no use, and images are large
        inputs = local(inputs) if 0 in self.stages else inputs.new_empty(0)
        return inputs.to(self._device), local(targets).to(self._device)

    def step(self, tokens: Tensor | list[Any], targets: Tensor | None) -> list[Tensor]:
        """One optimizer step on a ``batch``; gives the losses of the microbatches where this rank computes them."""
        if self.replicas is not None:
            self.replicas.begin_step()
        if self._boundaries is not None:
            self._boundaries.begin()
        with split_loss(self._dims):
            losses = self._engine.run(tokens, targets)
        self._recorder.begin(self._optim_action)
        model = self._job.model
        if model.num_experts and not self._dims.alone:  # tokens of other ranks are missing, so places cannot be checked
            from executor.models.moe import check_places

            plan = self._job.plan
            check_places(self.stages.values(), model, model.seq_len // (plan.cp * plan.tp))
        self._tied.sum_gradients()
        if self._clipper is not None:
            self._clipper.clip()
        self.update()
        return losses

    def update(self) -> None:
        """Runs OPTIM with complete gradients. Its collectives mostly wait and are outside of the recorded span."""
        if self._boundaries is not None:
            self._boundaries.begin()
        with self._recorder.span(self._optim_action):
            for optimizer in self.optimizers if not self._job.training.optimizer_in_backward else ():
                optimizer.step()
            zero_gradients(self._parameters, drop=self._drops_gradients)
            if self._boundaries is not None:
                self._boundaries.compute_longer()
        if self._sharded_optimizer is not None:
            self._sharded_optimizer.broadcast()
        if self._outer is not None:
            self._outer.after_step(self._recorder.step)
            self._leave_ddp(self._recorder.step + 1)

    def resume(self, step: int) -> None:
        """Goes on after a number of steps, whose state was read into ``state``."""
        if self._compression is not None:
            self._compression.step = step
        if self._outer is not None:
            self._outer.resume(step)
            self._leave_ddp(step)

    def _leave_ddp(self, step: int) -> None:
        """After the first steps of post-local SGD nothing reduces gradients."""
        engine, replication = self._engine, self._job.plan.replication
        assert replication is not None
        if step < replication.start_step or not isinstance(engine, LoopEngine):
            return
        if not isinstance(engine.module, DistributedDataParallel) or self._job.plan.num_averaging > 1:
            return
        self._engine = replace(engine, module=engine.module.module)

    @property
    def meeting(self) -> Meeting | None:
        """Outer step after the last step, of replicas that may leave; None without."""
        return None if self._outer is None else self._outer.meeting

    def hand_on(self) -> None:
        """Sends the state to replicas that join after the last outer step."""
        assert self._dims.members is not None
        self._dims.members.send_state(lambda: self.state().handed_on())

    @property
    def communicates_between_steps(self) -> bool:
        """True if an outer step may be in flight when a step ends."""
        replication = self._job.plan.replication
        return replication is not None and replication.steps_beside > 0

    def finish(self) -> None:
        """Ends the training after its last step: something may be in flight, or needed by other ranks."""
        if self._outer is not None:
            self._outer.finish()
        if self.replicas is not None:
            self.replicas.finish()

    @property
    def local_optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers with the states of this rank; under ZeRO-1, the wrapped optimizer."""
        return [getattr(optimizer, "optim", optimizer) for optimizer in self.optimizers]

    def state(self) -> TrainingState:
        """Content of a checkpoint."""
        from executor.train.training_state import TrainingState

        split: dict[str, int] = {}
        for stage in self.stages.values():
            split |= split_dimensions(stage, self._job)
        return TrainingState(
            [*self.stages.values()],
            self.local_optimizers,
            split,
            self._dims,
            self._device,
            outer=self._outer,
            compression=self._compression,
        )

    def _build_stage(self, index: int) -> Stage:
        job, plan, model = self._job, self._job.plan, self._job.model
        layers = job.assignment.layer_range(index)
        ends = {0, len(model.layers) - 1}
        shared = ends if model.layers[-1].tied and ends <= set(layers) else set()
        if model.captured is not None:
            shared |= blocks_in_root(model.captured, self._layers, plan.fsdp_units)
        sharding = self._sharding(index) if plan.shards_parameters else None
        reshards = plan.zero_stage == 3 and plan.reshard_after_forward and plan.pp == 1

        def finish(number: int, layer: nn.Module) -> None:
            if self._layers[number].compiled:
                from executor.distributed.compiling import compile_block  # a second to import: only where needed

                compile_block(layer, whole=plan.tp * plan.cp * plan.ep == 1)
            if sharding is not None and number not in shared:
                ignored = () if plan.expert_shards > 1 else experts_of(layer, self._layers[number])
                # backward begins with the last one
                sharding.shard(layer, reshards=reshards and number != layers[-1], ignored=ignored)

        if model.captured is not None:
            from executor.models.captured import build_captured

            cut = self._cut(index) if plan.pp > 1 else None
            built: Stage = build_captured(
                model.captured,
                self._layers,
                weight_dtype(job),
                self._device,
                job.seed,
                plan.recompute,
                recompute_layers=plan.recompute_layers,
                tp=self._dims.tp.mesh,
                around_rerun=self._recorder.rerun,
                frozen_dtype=compute_dtype(job),
                fp8_recipe=fp8_recipe(job),
                cut=cut,
                finish=finish,
            )
            if sharding is not None:
                sharding.finish(built, casts_inputs=cut is None)
            return built
        stage = build_stage(
            model,
            layers,
            weight_dtype(job),
            self._device,
            None if self._dims.alone else job.seed,
            self._dims,
            plan.recompute,
            recompute_layers=plan.recompute_layers,
            around_rerun=self._recorder.rerun,
            fp8_recipe=fp8_recipe(job),
            frozen_dtype=compute_dtype(job),
            base_weights=job.training.base_weights,
            fake_quantization=job.training.fake_quantization,
            model_code=job.software.layers.model_code,
            finish=finish,
        )
        if sharding is not None:
            sharding.finish(stage)
        return stage

    def _make_captured_data(self) -> Callable[[int, int], Any] | None:
        """Function of a step and a microbatch's number in it that gives its batch; None for models of families."""
        job = self._job
        if job.model.captured is None:
            return None
        from executor.models.captured import CapturedData, moved

        data, num_samples = CapturedData(job.model.captured, job.seed), job.plan.microbatch_size
        # FSDP casts the batch of a whole module; between stages, tensors keep their dtypes
        in_stages = job.plan.pp > 1 and job.plan.shards_parameters
        dtype = (compute_dtype(job) if in_stages or job.model.lora_rank else None) or weight_dtype(job)
        return lambda step, number: moved(data.batch(step, number, num_samples), self._device, dtype)

    def _cut(self, index: int) -> StageCut:
        """Cut of a stage out of a captured module."""
        from executor.models.captured import StageCut

        job, shards = self._job, self._job.plan.shards_parameters
        assert self._captured_data is not None, "a captured model"
        dtype = compute_dtype(job)
        return StageCut(
            index,
            job.boundaries,
            self._captured_data(0, 0),
            job.plan.microbatch_size,
            dtype or weight_dtype(job),
            (dtype if job.model.lora_rank else None) or weight_dtype(job),
            autocast=dtype is not None and not shards and not job.model.lora_rank,
            casts_inputs=dtype is not None and shards,
            splits_backward=any(a.kind is ActionKind.BACKWARD_INPUT for row in job.parsed_table() for a in row),
        )

    def _sharding(self, index: int) -> StageSharding:
        from executor.distributed.fsdp import StageSharding

        job, plan = self._job, self._job.plan
        return StageSharding(
            self._dims,
            self._device.type,
            compute_dtype=compute_dtype(job),
            unshard=Action(index, ActionKind.UNSHARD) if plan.pp > 1 else None,
            experts=plan.expert_shards > 1 and self._dims.experts.size > 1,
            on_host=plan.offload_optimizer,
        )

    def _make_optimizers(self, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        """One optimizer, or two: ZeRO-1 does not partition experts, which differ between data-parallel ranks."""
        job, plan = self._job, self._job.plan
        make = partial(make_optimizer, job.training.update, groups=self._groups, momentum=self._momentum)
        experts = [e for stage in self.stages.values() for e in expert_parameters(stage, self._layers)]
        ids = {id(expert) for expert in experts}
        others = [parameter for parameter in parameters if id(parameter) not in ids]
        if job.training.optimizer_in_backward:
            return [make([parameter]) for parameter in parameters]
        if plan.shards_optimizer_only:
            from executor.distributed.zero import ShardedOptimizer

            self._sharded_optimizer = ShardedOptimizer(others, self._dims.fsdp, make)
        first = self._sharded_optimizer or make(others)
        return [first, make(experts)] if experts else [first]

    def _make_compression(self) -> CompressionHook | None:
        """Hook of compressed gradients; None for whole ones."""
        compression = self._job.plan.compression
        if compression is None:
            return None
        from executor.distributed.compression import compression_hook

        return compression_hook(compression, self._dims.dp, self._job.num_whole_steps)

    @property
    def _momentum(self) -> MomentumCompression | None:
        """The hook of 1-bit Adam, which compresses the optimizer's momentum; None without."""
        compression = self._job.plan.compression
        of_momentum = compression is not None and compression.of_momentum
        return cast("MomentumCompression", self._compression) if of_momentum else None

    def _settle_buckets(self, hook: CompressionHook) -> None:
        """Runs a backward after which DDP makes its buckets in the order of gradients, as it does only once.

        Errors of compression belong to a bucket, and a run that resumes must compress the same buckets at once.
        Gradients are dropped, and buffers and generators stay as they are.
        """
        buffers = [buffer for stage in self.stages.values() for buffer in stage.buffers()]
        before = [buffer.clone() for buffer in buffers]
        if self._boundaries is not None:
            self._boundaries.begin()
        devices = [self._device] if self._device.type == "cuda" else []
        with hook.passing_on(), torch.random.fork_rng(devices):
            self._engine.run(*self.batch(0))
        for buffer, values in zip(buffers, before, strict=True):
            buffer.copy_(values)
        zero_gradients(self._parameters, drop=self._drops_gradients)

    def _make_outer(self, parameters: list[nn.Parameter]) -> OuterSteps | None:
        """Outer steps of replicas that train alone; None without."""
        replication = self._job.plan.replication
        if replication is None or not replication.has_rounds:
            return None
        from executor.distributed.replicas.outer import OuterSteps

        shards = self._dims.fsdp if self._job.plan.shards_parameters else Peers()
        return OuterSteps(
            replication, parameters, self._dims.outer, shards, self._recorder, self._optim_action, self._dims.members
        )

    def _make_clipper(self, parameters: list[nn.Parameter]) -> GradientClipper | None:
        max_norm = self._job.training.clip_grad_norm
        if max_norm is None:
            return None
        return GradientClipper(max_norm, parameters, self._tied.second_copies, self._groups, self._dims.pp)

    def _wrap(self, stage: Stage) -> nn.Module:
        """A stage that is not sharded computes under autocast and is reduced by DDP."""
        job, dtype = self._job, compute_dtype(self._job)
        if job.plan.shards_parameters:
            return stage
        module: nn.Module = stage
        casts_itself = job.model.captured is not None and job.model.lora_rank > 0
        if dtype is not None and not casts_itself:
            # recomputed blocks have freed their copies
            drops = job.plan.offload_activations or job.plan.recompute not in ("none", "selective")
            module = Autocast(stage, dtype, self._device.type, keeps_copies=not drops)
        if self._uses_ddp:
            from executor.distributed.ddp import wrap_ddp

            ignored = [*expert_parameters(stage, self._layers), *(() if job.model.captured else _tables(stage))]
            as_views = job.software.gradient_as_bucket_view
            module = wrap_ddp(
                module,
                self._dims.dp,
                job.plan.bucket_bytes,
                ignored,
                gradient_as_bucket_view=as_views,
                broadcast_buffers=job.software.broadcast_buffers,
                hook=None if self._compression is None else self._compression.reduce,
            )
        return module

    def _watched_boundaries(self, rank: int) -> LayerBoundaries | None:
        """Boundaries of layers, for a slow rank or a replica that may be late; None for neither."""
        slowdown, replicas = self._job.slowdowns[rank] if self._job.slowdowns else 1.0, self.replicas
        if slowdown == 1.0 and replicas is None:
            return None
        from executor.train.boundaries import LayerBoundaries

        boundaries = LayerBoundaries(slowdown, (lambda: None) if replicas is None else replicas.leave_if_over)
        for stage in self.stages.values():
            boundaries.watch(stage)
        return boundaries

    def _loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Function of the last stage's output and the targets."""
        if self._job.model.captured is not None:
            return lambda loss, targets: loss
        software, last = self._job.software, len(self._job.model.layers) - 1
        chunked = software.chunked_loss
        heads = [stage.layers[str(last)] for stage in self.stages.values() if str(last) in stage.layers]
        if chunked is None or not heads:
            return partial(cross_entropy, parallel=self._dims)
        (head,) = heads
        assert isinstance(head, OutputHead)
        dtype = None if self._job.plan.shards_parameters else compute_dtype(self._job)
        return loss_in_chunks(head, chunked, dtype, self._device)

    def _of_microbatch(self, loss: Callable[[Tensor, Any], Tensor]) -> Callable[[nn.Module, Any, Any], Tensor]:
        """Function of the module, its input and the targets of a microbatch."""
        job = self._job
        if not job.training.is_of_preferences:
            return lambda module, inputs, targets: loss(module(inputs), targets)
        from executor.train.preference import preference_loss

        preference, plan = job.training.preference, job.plan
        is_whole = preference is not None and preference.reference_sharded is False
        sharding = self._sharding(0) if plan.shards_parameters and not is_whole else None
        objective = preference_loss(job, loss, self._device, self._dims, sharding)
        self.second_model = objective.second_model
        return objective

    def _completion(self, index: int) -> Callable[[], None]:
        """Function that reduces partial and expert gradients of a stage; called before division by microbatches."""
        stage, plan = self.stages[index], self._job.plan
        parts = partial_parameters(stage, self._layers)
        experts = [] if plan.expert_shards > 1 else expert_parameters(stage, self._layers)

        def complete() -> None:
            sum_partial_gradients(parts, self._dims.tp)
            average_expert_gradients(experts, plan.dp * plan.cp, self._dims.experts)

        return complete

    def _stage_module(self, index: int, module: nn.Module) -> StageModule:
        """The stage with the boundary tensors of one microbatch."""
        from executor.distributed.pipeline import Boundary, StageModule

        job, plan, model = self._job, self._job.plan, self._job.model
        if model.captured is not None:
            part = cast("CapturedPart", self.stages[index])
            inputs, outputs = (
                [Boundary(sent.shape, sent.dtype, sent.requires_grad) for sent in tensors]
                for tensors in (part.received, part.sent)
            )
            return StageModule(index, module, inputs, outputs, self._completion(index))
        computed, kept = compute_dtype(job) or weight_dtype(job), weight_dtype(job)
        # autocast keeps the residual stream in FP32, except after a frozen embedding
        residual = computed if plan.shards_parameters or model.lora_rank else kept
        layers, boundaries = self._layers, job.boundaries

        def between(boundary: int) -> list[Boundary]:
            layer, last = layers[boundary - 1], boundary == len(layers)
            shapes = layer.output_shapes
            if last and layer.loss_chunks is not None:
                shapes = ((shapes[0][0], model.hidden_size),)
            return [
                Boundary(
                    (plan.microbatch_size, *shape),
                    computed if last or number in layer.matmul_dtype_outputs else residual,
                )
                for number, shape in enumerate(shapes)
            ]

        is_image = FAMILIES[model.family].inputs == "images"
        first = Boundary((plan.microbatch_size, *input_shape(model, plan.shard)), kept if is_image else torch.int64)
        return StageModule(
            index,
            module,
            inputs=between(boundaries[index]) if index > 0 else [first],
            outputs=between(boundaries[index + 1]),
            complete_gradients=self._completion(index),
        )


def _tables(stage: Stage) -> list[Tensor]:
    """Positions and rotary tables, which no checkpoint has: a context-parallel rank has those of its own tokens."""
    return [
        buffer
        for module in stage.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    ]
