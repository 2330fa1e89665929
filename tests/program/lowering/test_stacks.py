"""What frameworks keep, against published formulas: bytes a parameter, and activations of Megatron's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simplan import catalog
from simplan.model.layer import CollectiveKind, LayerCollective
from simplan.model.low_precision import Fp8Recipe
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation
from simplan.plan.plan import ParallelPlan
from simplan.program.memory.footprint import layer_footprint
from simplan.program.memory.low_precision_footprint import keeping_quantized, persistent_weight_bytes
from simplan.program.memory.split_footprint import matmul_split_footprint
from simplan.program.program import LayerWork, MemoryCategory, Op, Phase, Program, Stream
from simplan.sim.engine import simulate
from simplan.sim.memory import memory_peak
from simplan.software.software import SoftwareSpec
from simplan.training import TrainingSpec
from tests.jobs import job_of, lowered, problems, states_at_update, tiny_model

S, B, H, A, L, T = 2048, 4, 6144, 64, 48, 8
GPT_22B = ModelSpec(
    family="gpt", num_hidden_layers=L, hidden_size=H, num_attention_heads=A, vocab_size=51200, seq_len=S
)
STATISTICS = 2 * 2 * 4 * S * B  # mean and deviation of both norms in fp32, which the papers leave out
SBH = S * B * H
SCORES = A * S * S * B
FP16 = TrainingSpec(global_batch_size=B, precision="fp16")


def kept(recompute: str, **plan: Any) -> int:
    """Activations of one block of the 22B model in Megatron-LM of 2022."""
    software = catalog.software("megatron-lm-2022")
    parallel = ParallelPlan(microbatch_size=B, **plan)
    block = software.layers_of(GPT_22B, parallel)[1]
    state = software.state(FP16, parallel)
    return layer_footprint(block, B, state, recomputation(block, recompute)).activations  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recompute", "plan", "formula"),
    [
        # Korthikanti et al. 2022 (arXiv:2205.05198), equations 1, 2, 4 and 6; table 2 for full recomputation
        ("none", {}, 34 * SBH + 5 * SCORES + STATISTICS),
        ("none", {"tp": T, "sequence_parallel": False}, 10 * SBH + (24 * SBH + 5 * SCORES) / T + STATISTICS),
        ("none", {"tp": T}, (34 * SBH + 5 * SCORES + STATISTICS) / T),
        ("selective", {"tp": T}, (34 * SBH + STATISTICS) / T),
        ("full", {"tp": T, "sequence_parallel": False}, 2 * SBH),
    ],
)
def test_blocks_of_megatron_keep_what_its_paper_says(recompute: str, plan: dict[str, Any], formula: float) -> None:
    assert kept(recompute, **plan) == formula


def test_a_split_backward_leaves_inputs_and_gradients_of_products() -> None:
    """Qi et al. 2024 (arXiv:2401.10241), table 1: M_B = s b h (34 + 5 a s / h), M_W = 32 s b h."""
    software = catalog.software("megatron-lm-2022")
    block = software.layers_of(GPT_22B, ParallelPlan())[1]
    state = software.state(FP16, ParallelPlan())
    whole = layer_footprint(block, B, state, recomputation(block, "none"))
    split = matmul_split_footprint(block, B, state, whole)
    assert split.activations == 34 * SBH + 5 * SCORES + STATISTICS
    assert split.between_activations == 32 * SBH


TINY = tiny_model("llama", num_key_value_heads=4, intermediate_size=192, seq_len=32)


@pytest.mark.parametrize(
    ("name", "precision", "plan", "formula"),
    [
        # NVIDIA/Megatron-LM at 189e72a, docs/distrib_optimizer.md; 4 of its 20 and 16 / d are there in the step only
        ("megatron-lm-2022", "bf16", {"dp_replicate": 4}, 18),
        ("megatron-lm-2022", "fp16", {"dp_replicate": 4}, 16),
        ("megatron-lm-2022", "fp16", {"dp_replicate": 4, "grad_dtype": "fp32"}, 18),
        ("megatron-lm-2022", "bf16", {"dp_shard": 4, "zero_stage": 1}, 6 + 12 / 4),
        ("megatron-lm-2022", "fp16", {"dp_shard": 4, "zero_stage": 1}, 4 + 12 / 4),
        ("megatron-core", "bf16", {"dp_shard": 4, "zero_stage": 1, "grad_dtype": "bf16"}, 4 + 12 / 4),
        # Rajbhandari et al. 2020 (arXiv:1910.02054), figure 1: P_os with K = 12
        ("megatron-deepspeed", "fp16", {"dp_shard": 4, "zero_stage": 1}, 2 + 2 + 12 / 4),
        # FSDP of fp32 weights, gradients and two moments
        ("torchtitan", "bf16", {"dp_shard": 4}, 16 / 4),
        ("llm-foundry", "bf16", {"dp_shard": 4}, 16 / 4),
        # bf16 weights, fp32 gradients, two fp32 moments and the lower half of the fp32 weights
        ("nemo", "bf16", {"dp_shard": 4, "zero_stage": 1}, 6 + 10 / 4),
    ],
)
def test_bytes_per_parameter_of_frameworks(name: str, precision: str, plan: dict[str, Any], formula: float) -> None:
    program = lowered(job_of(TINY, plan, software=name, num_microbatches=1, precision=precision), 1)
    assert states_at_update(program) == formula * TINY.num_parameters


def test_gradients_in_16_bits_are_widened_for_the_step() -> None:
    """16 / d of NVIDIA/Megatron-LM at 189e72a, docs/distrib_optimizer.md: 4 bytes more while the optimizer runs."""
    job = job_of(
        TINY, {"dp_shard": 4, "zero_stage": 1}, software="megatron-lm-2022", num_microbatches=1, precision="fp16"
    )
    program = lowered(job, 1)
    [update] = [op for op in program.ops if op.rank == 0 and op.memory and op.name == "0OPTIM"]
    assert [effect.during_bytes for effect in update.memory] == [4 / 4 * TINY.num_parameters]


def program_of(software: SoftwareSpec, num_microbatches: int, level: int = 2, **plan: Any) -> Program:
    return lowered(job_of(TINY, plan, software=software, num_microbatches=num_microbatches), level)


def step_time_s(program: Program, seconds: Callable[[Op], float]) -> float:
    return simulate(program, [seconds(op) for op in program.ops]).step_time_s


@pytest.mark.parametrize("m", [2, 5])
def test_stages_that_wait_for_their_communications(m: int) -> None:
    """Two stages take turns: forward 1 s, backward 2 s, a communication c; m + 1 times each, and a communication as
    often."""
    c = 0.25
    program = program_of(catalog.software("megatron-core"), m, 1, pp=2)

    def seconds(op: Op) -> float:
        if op.stream is not Stream.COMPUTE:
            return c
        return {"F": 1.0, "B": 2.0}.get(op.name.strip("0123456789"), 0.0)

    assert step_time_s(program, seconds) == pytest.approx((m + 1) * (1 + 2 + c))


@pytest.mark.parametrize(
    ("way", "recompute", "exposed_s"),
    [
        ("none", "none", 2 * (4 + 6)),
        ("backward", "none", 2 * (4 + 2)),
        ("gathers", "none", 2 * (2 + 2)),
        ("all", "none", 0),
        ("backward", "full", 2 * (4 + 4 + 2)),
        ("gathers", "full", 2 * (2 + 2 + 2)),
        ("all", "full", 0),
    ],
)
def test_exchanges_beside_products_take_no_time(way: str, recompute: str, exposed_s: float) -> None:
    """Of a block four exchanges are in forward and six in backward, of which four are of matrices split by columns.

    Half of forward's, and all but two of backward's, gather. Two gathers and two sums run again.
    """
    software = catalog.software("megatron-core").model_copy(update={"tp_overlap": way})
    program = program_of(software, 1, tp=2, recompute=recompute)
    ops = [program.ops[index] for index in program.by_rank[0]]
    of_blocks = [op for op in ops if op.stream is Stream.TENSOR and "block" in op.name]
    assert len(of_blocks) == 2 * (4 + 6 + (4 if recompute == "full" else 0))
    shorter = step_time_s(program, lambda op: 10.0 if op.stream is Stream.COMPUTE else 0.0)
    longer = step_time_s(program, lambda op: 10.0 if op.stream is Stream.COMPUTE else 1.0 * ("block" in op.name))
    assert longer - shorter == pytest.approx(exposed_s)


@pytest.mark.parametrize(
    ("way", "cuts"), [("none", (0, 0)), ("backward", (0, 0)), ("gathers", (2, 4)), ("all", (4, 6))]
)
def test_products_are_cut_for_every_exchange_that_needs_or_makes_their_parts(way: str, cuts: tuple[int, int]) -> None:
    """Those of two blocks, in forward and in backward; a sum in the background (``backward``) cuts nothing."""
    program = program_of(catalog.software("megatron-core").model_copy(update={"tp_overlap": way}), 1, tp=2)
    works = [work for i in program.by_rank[0] for work in program.ops[i].work if isinstance(work, LayerWork)]
    for phase, number in zip((Phase.FORWARD, Phase.BACKWARD), cuts, strict=True):
        assert sum(work.cuts for work in works if work.phase is phase) == 2 * number
        assert all(work.kernels is not None for work in works if work.cuts)


def test_parameters_that_are_gathered_ahead_are_gathered_beside_forward() -> None:
    plan: dict[str, Any] = {"dp_shard": 4, "zero_stage": 1, "bucket_bytes": 1}
    times, moved = [], []
    for ahead in (False, True):
        software = catalog.software("megatron-bridge").model_copy(update={"overlap_param_gather": ahead})
        program = program_of(software, 1, **plan)
        gathers = [op for op in program.ops if op.name == "all_gather parameters" and op.rank == 0]
        moved.append(sum(op.communication.num_bytes for op in gathers if op.communication))
        of_all = moved[0]

        def seconds(op: Op, of_all: int = of_all) -> float:
            if op.communication and op.name == "all_gather parameters":
                return 8.0 * op.communication.num_bytes / of_all
            return 10.0 if op.stream is Stream.COMPUTE and op.name in ("block 0", "block 1") else 0.0

        times.append(step_time_s(program, seconds))
    embedding = 8.0 * TINY.layers[0].num_parameters / TINY.num_parameters
    first_block = 8.0 * TINY.layers[1].num_parameters / TINY.num_parameters
    assert moved[0] == moved[1] == 2 * TINY.num_parameters
    assert times[0] - times[1] == pytest.approx(8.0 - embedding - first_block)


def test_quantized_inputs_of_split_matrices_are_of_the_own_tokens() -> None:
    """Transformer Engine keeps 8 bits of what a rank has of the tokens, once for queries, keys and values together."""
    software, plan = catalog.software("megatron-bridge"), ParallelPlan(tp=2)
    training = TrainingSpec(global_batch_size=1, precision="fp8")
    block = software.layers_of(TINY, plan)[1]
    quantized = keeping_quantized(block, software.state(training, plan).linear, joined=True)
    tokens, all_tokens, h, i = TINY.seq_len // 2, TINY.seq_len, TINY.hidden_size, TINY.intermediate_size
    elements_of = {tensor.name: tensor.elements - 4 for tensor in quantized.saved if tensor.name.endswith("in fp8")}
    assert elements_of == {
        "q input in fp8": tokens * h,
        "proj input in fp8": all_tokens * h // 2,
        "gate input in fp8": tokens * h,
        "down input in fp8": all_tokens * i // 2,
    }
    assert not any(tensor.name in ("norm1 output", "norm2 output", "gated product") for tensor in quantized.saved)


@pytest.mark.parametrize(("name", "more"), [("megatron-core", 1 + 1), ("megatron-bridge", 1 + 1 - 2)])
def test_quantized_weights_are_held_once_however_many_microbatches_are_under_way(name: str, more: int) -> None:
    """Transformer Engine has two copies in 8 bits beside the weights, or in their place (fp8_param_gather)."""
    jobs = [
        job_of(TINY, {"pp": 2}, software=name, num_microbatches=4, precision=precision) for precision in ("bf16", "fp8")
    ]
    resting = [lowered(job, 1).persistent_bytes[0][MemoryCategory.PARAMETERS] for job in jobs]
    software, plan = jobs[1].software, jobs[1].plan
    state = software.state(jobs[1].training, plan)
    block = keeping_quantized(software.layers_of(TINY, plan)[1], state.linear, joined=True)
    h, i = TINY.hidden_size, TINY.intermediate_size
    matrices, num_scales = 4 * h * h + 3 * h * i, 2 * 7
    assert resting[1] - resting[0] == more * matrices + 4 * num_scales
    activations = sum(tensor.num_bytes(2, 2) for tensor in block.saved)
    assert layer_footprint(block, 1, state, recomputation(block, "none")).activations == activations


@pytest.mark.parametrize(
    "name", ["deepspeed-2021", "llm-foundry", "maxtext", "megatron-deepspeed", "torchtitan", "torchtitan-2025"]
)
def test_whole_gradients_do_not_pile_up_where_every_microbatch_is_reduced(name: str) -> None:
    """They leave FSDP's no_sync alone, or shard what adds up: every unit is reduced once in each of 3 microbatches."""
    software = catalog.software(name)
    programs = [program_of(software, 3, dp_shard=4, grad_sync=when) for when in (None, "step")]
    reduced = [
        sum(
            op.communication is not None and op.communication.kind is CollectiveKind.REDUCE_SCATTER
            for op in program.ops
        )
        for program in programs
    ]
    assert reduced[0] == 3 * reduced[1] > 0
    peaks = [memory_peak(program, 0).by_category[MemoryCategory.GRADIENTS] for program in programs]
    held = software.sharded_state_bytes["bf16"].gradient
    assert peaks[1] - peaks[0] >= held * TINY.layers[1].num_parameters * 3 // 4


def test_keys_gathered_from_ranks_need_a_table_where_all_are_attended_to_at_once() -> None:
    """torch's context parallelism attends to each rank's keys apart; a bias for every position is a table anyway."""
    plan = ParallelPlan(cp=2, cp_comm="all_gather")
    shape = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "seq_len": 32}
    biased = ModelSpec(family="mpt", num_hidden_layers=1, **shape)
    sizes = [
        [table.elements for table in catalog.software(name).layers_of(model, plan)[1].constants if "mask" in table.name]
        for name in ("torch", "torchtitan")
        for model in (TINY, biased)
    ]
    n = TINY.seq_len
    assert sizes == [[n // 2 * n], [4 * 16 * 32], [], [4 * 16 * 32]]


def test_repeated_keys_are_exchanged_as_often_as_there_are_queries_to_a_key() -> None:
    """Of 4 ranks with n tokens: keys and values 2 n h, of all ranks, and fp32 gradients home in 4 hops."""
    shared = TINY.model_copy(update={"family": "llama", "num_key_value_heads": TINY.num_attention_heads // 2})
    plan, tokens = ParallelPlan(cp=4, cp_comm="all_gather"), 2 * TINY.seq_len // 4 * TINY.hidden_size
    block = catalog.software("torchtitan-2025").layers_of(shared, plan)[1]
    collectives = [
        (k.forward, k.backward, k.elements, k.bytes_per_element)
        for k in block.kernels
        if isinstance(k, LayerCollective)
    ]
    gather, ring = CollectiveKind.ALL_GATHER, CollectiveKind.RING
    assert collectives == [(gather, gather, 4 * tokens, None), (None, ring, 4 * tokens, 4)]
    plain = catalog.software("torch").layers_of(shared, plan)[1]
    assert [k.elements for k in plain.kernels if isinstance(k, LayerCollective)] == [4 * tokens // 2]


@pytest.mark.parametrize(("recipe", "width"), [("tensorwise", 1), ("rowwise", 2)])
def test_inputs_scaled_as_a_whole_are_gathered_in_8_bits(recipe: Fp8Recipe, width: int) -> None:
    """Of blocks; sums stay in 16 bits."""
    fields = {"software": "torchtitan-2025", "precision": "fp8", "fp8_recipe": recipe}
    program = lowered(job_of(TINY, {"tp": 2, "dp_shard": 2}, num_microbatches=1, **fields))
    moved = {
        (op.communication.kind, op.communication.num_bytes)
        for op in program.ops
        if "block" in op.name and op.communication and op.stream is Stream.TENSOR
    }
    whole = TINY.seq_len * TINY.hidden_size
    assert moved == {(CollectiveKind.ALL_GATHER, whole * width), (CollectiveKind.REDUCE_SCATTER, whole * 2)}


@pytest.mark.parametrize("name", ["megatron-bridge", "nemo"])
def test_frozen_matrices_in_8_bits_keep_no_input(name: str) -> None:
    """What adapters and attention keep is in 16 bits; matrices have their weights in 8, in rows and in columns.

    Llama 3 8B has 218,103,808 weights in the matrices of a block (2 h^2 + 2 h kv + 3 h f).
    """
    software, plan = catalog.software(name), ParallelPlan()
    fields = catalog.model("llama3-8b").model_dump(exclude_defaults=True)
    model = ModelSpec(**fields, lora_rank=16, lora_targets=("qkv",))
    training = TrainingSpec(global_batch_size=1, precision="fp8", task="lora")
    assert problems(model, software=name, precision="fp8", task="lora") == []
    block = software.layers_of(model, plan)[2]
    state = software.state(training, plan)
    assert keeping_quantized(block, state.linear, joined=True) == block
    whole = 2 * 218_103_808
    stored = state.linear is not None and state.linear.weights == "stored"
    assert persistent_weight_bytes(block, state) == pytest.approx(whole - 2 * 218_103_808 * stored, abs=2 * 7 * 4)
    refusals = problems(model, precision="fp8", task="lora")
    assert any("a frozen matrix in low precision under torch with adapters" in sentence for sentence in refusals)


@pytest.mark.parametrize(("name", "divided"), [("torch", True), ("megatron-core", False), ("torchtitan", True)])
def test_gradients_are_divided_where_losses_are_not(name: str, divided: bool) -> None:
    """Megatron's schedules divide each loss by the number of microbatches; torch's runtime divides gradients."""
    software = catalog.software(name)
    parameters = {
        m: [
            work.num_parameters
            for op in program_of(software, m, 1).ops
            if op.name == "0REDUCE_GRAD"
            for work in op.work
            if isinstance(work, LayerWork)
        ]
        for m in (1, 4)
    }
    assert parameters[1] == []
    assert sum(parameters[4]) == (TINY.num_parameters if divided else 0)


@pytest.mark.parametrize(
    ("software", "plan", "shares", "groups"),
    [
        ("megatron-core", {"dp_shard": 4, "zero_stage": 1, "tp": 2}, 4, [Stream.SHARD, Stream.TENSOR]),
        ("megatron-core", {"dp_replicate": 4, "tp": 2}, 1, [Stream.TENSOR]),
        ("deepspeed", {"dp_shard": 8, "zero_stage": 1}, 8, [Stream.SHARD]),
        ("torchtitan", {"dp_shard": 8, "zero_stage": 3}, 8, [Stream.SHARD]),
    ],
)
def test_clipping_reads_the_gradients_that_a_rank_updates(
    software: str, plan: dict[str, Any], shares: int, groups: list[Stream]
) -> None:
    """Megatron Core, optimizer/clip_grads.py; DeepSpeed, runtime/zero/stage_1_and_2.py: ranks sum norms of parts."""
    model = tiny_model("llama", vocab_size=1024, intermediate_size=192)
    program = lowered(job_of(model, plan, software=software, clip_grad_norm=1.0))
    ops = [program.ops[index] for index in program.by_rank[0]]
    (norm,) = (op for op in ops if op.name == "gradient norm")
    (scale,) = (op for op in ops if op.name == "clip gradients")
    parameters = model.num_parameters // plan.get("tp", 1) // shares
    for op, phase in ((norm, Phase.NORM), (scale, Phase.SCALE)):
        works = [work for work in op.work if isinstance(work, LayerWork)]
        assert {work.phase for work in works} == {phase}
        # norms are whole on all tensor-parallel ranks, and shards are rounded up
        assert sum(work.num_parameters for work in works) == pytest.approx(parameters, rel=0.02)
    reduced = [op for op in ops if "norms" in op.name]
    assert [op.stream for op in reduced] == groups


@pytest.mark.parametrize(
    ("name", "precision", "recipe", "forward", "backward"),
    [
        ("megatron-core", "fp8", "delayed", 1, 1),
        ("megatron-core", "fp8", "blockwise", 1 + 4 / 128, 2 + 8 / 128),
        ("megatron-core", "mxfp8", None, 1 + 1 / 32, 2 + 2 / 32),
        ("megatron-bridge", "nvfp4", None, 1 / 2 + 1 / 16, 1 + 2 / 16),
    ],
)
def test_transformer_engine_gathers_quantized_operands(
    name: str, precision: str, recipe: Fp8Recipe | None, forward: float, backward: float
) -> None:
    """With their scales: inputs along one dimension; output gradients along both, unless they have one scale."""
    model = catalog.model("llama3-8b").model_copy(update={"num_hidden_layers": 2})
    fields: dict[str, Any] = {"software": name, "precision": precision, "fp8_recipe": recipe, "cluster": "dgx-b200"}
    program = lowered(job_of(model, {"tp": 2, "dp_replicate": 2}, num_microbatches=1, **fields))
    whole = model.seq_len * model.hidden_size
    moved = {
        op.communication.num_bytes / whole
        for op in program.ops
        if "block" in op.name
        and op.communication
        and op.communication.kind is CollectiveKind.ALL_GATHER
        and op.stream is Stream.TENSOR
    }
    assert moved == {forward, backward}
