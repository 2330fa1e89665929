"""What recomputation keeps and repeats, against what each framework documents."""

from __future__ import annotations

import pytest

from simplan import catalog
from simplan.model.implementations.layer_implementation import LayerImplementation, implemented_layer
from simplan.model.layer import LayerCollective, LayerSpec
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation
from simplan.plan.plan import ParallelPlan, Recompute, RecomputeModule
from simplan.plan.shard import Shard
from simplan.program.memory.low_precision_footprint import keeping_quantized
from simplan.training import TrainingSpec
from tests.jobs import problems, tiny_model

LLAMA = tiny_model(
    "llama", num_attention_heads=8, num_key_value_heads=4, intermediate_size=96, vocab_size=128, seq_len=32
)
MODES: tuple[Recompute, ...] = (
    "none", "selective", "selective_op", "selective_layer", "full", "minimal", "qkv_proj_offloaded",
)  # fmt: skip
NORM1, ATTENTION, MLP = ["norm1"], ["rotary", "attention"], ["gate", "up", "silu_multiply"]


def block_of(shard: Shard | None = None) -> LayerSpec:
    return LLAMA.layers_of(shard or Shard())[1]


def kept(layer: LayerSpec, mode: Recompute, block_index: int = 0) -> list[str]:
    names = recomputation(layer, mode, block_index).saved
    return [name for name in layer.tensors if name in names]


def again(layer: LayerSpec, mode: Recompute, block_index: int = 0) -> list[str]:
    return [layer.kernels[index].name for index in recomputation(layer, mode, block_index).kernels]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", [0, -1])
def test_embedding_and_head_are_never_recomputed(mode: Recompute, index: int) -> None:
    layer = LLAMA.layers[index]
    assert recomputation(layer, mode, 1) == recomputation(layer, "none")
    assert recomputation(layer, "none").saved == {tensor.name for tensor in layer.saved}


@pytest.mark.parametrize(
    ("mode", "saved", "runs"),
    [
        ("full", [], [*NORM1, "q", "k", "v", *ATTENTION, "proj", "residual1", "norm2", *MLP]),
        # torchtitan's policy saves products 1, 3, 5, 7 of q, k, v, proj, gate, up, down
        (
            "selective_op",
            ["q output", "v output", "attention output", "attention logsumexp", "gate output", "down output"],
            [*NORM1, "k", "rotary", "proj", "residual1", "norm2", "up", "silu_multiply"],
        ),
        # MaxText's policy saves q, k, v, the projection and both MLP products; attention runs again
        (
            "minimal",
            ["q output", "k output", "v output", "proj output", "gate output", "up output"],
            [*NORM1, *ATTENTION, "residual1", "norm2", "silu_multiply"],
        ),
    ],
)
def test_a_mode_keeps_the_input_and_these_tensors(mode: Recompute, saved: list[str], runs: list[str]) -> None:
    assert kept(block_of(), mode) == ["input", *saved]
    assert again(block_of(), mode) == runs


@pytest.mark.parametrize(("mode", "names"), [("minimal", []), ("qkv_proj_offloaded", ["proj output", "norm2 output"])])
def test_under_xla_exchanges_run_again_with_their_products(mode: Recompute, names: list[str]) -> None:
    assert [
        name for name in again(block_of(Shard(tp=2, sequence_parallel=True)), mode) if name.endswith(" output")
    ] == names


def test_full_exchanges_again_what_forward_exchanged() -> None:
    layer = block_of(Shard(tp=2, sequence_parallel=True))
    names = again(layer, "full")
    repeated = [n for n in names if any(isinstance(k, LayerCollective) and k.name == n for k in layer.kernels)]
    assert repeated == ["norm1 output", "proj output", "norm2 output"]


def test_selective_repeats_the_attention_core_alone() -> None:
    assert again(block_of(), "selective") == ["attention"]
    dropped = set(kept(block_of(), "none")) - set(kept(block_of(), "selective"))
    assert dropped == {"attention logsumexp"}


def test_scattered_sums_are_kept_and_not_taken_again() -> None:
    """Under JAX a policy sees one array, of which a rank keeps its part."""
    split = block_of(Shard(tp=2, sequence_parallel=True))
    for mode in ("selective_op", "minimal"):
        assert "proj output" in kept(split, mode)
        assert "proj output" not in again(split, mode)
    assert split.tensors["proj output"].elements == split.output_elements == block_of().output_elements // 2
    assert "proj" not in again(split, "minimal")


def test_selective_op_keeps_what_experts_are_sent_and_give_back_and_no_product_of_theirs() -> None:
    """Nor the router's; products of the shared expert count on after the attention's: gate is the fifth."""
    fields = {"num_experts": 4, "top_k": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 32}
    model = ModelSpec(**{**LLAMA.model_dump(exclude_unset=True), "family": "moe", **fields})
    layer = model.layers_of(Shard(ep=2))[1]
    matmuls = ["q output", "v output", "attention output", "attention logsumexp", "shared_gate output"]
    assert kept(layer, "selective_op") == [
        "input",
        *matmuls,
        "shared_down output",
        "after expert inputs",
        "results of places",
    ]
    runs = again(layer, "selective_op")
    assert {"shared_up", "router", "dispatch", "experts_gate", "experts_up", "experts_down", "combine"} < set(runs)
    assert {"shared_gate", "expert inputs", "expert outputs"}.isdisjoint(runs)


def test_selective_layer_repeats_every_second_block() -> None:
    for index in range(4):
        like: Recompute = "full" if index % 2 else "none"
        assert recomputation(block_of(), "selective_layer", index) == recomputation(block_of(), like)


def test_offloaded_products_are_neither_on_the_device_nor_repeated() -> None:
    assert kept(block_of(), "qkv_proj_offloaded") == ["input"]
    assert not {"q", "k", "v"} & set(again(block_of(), "qkv_proj_offloaded"))
    assert "proj" in again(block_of(), "qkv_proj_offloaded")


# Modules that run again alone, against what Megatron Core's documentation and source say of each

DEEPSEEK = tiny_model(
    "deepseek", num_hidden_layers=4, intermediate_size=96, vocab_size=128, seq_len=32,
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    num_experts=8, top_k=2, moe_intermediate_size=40, shared_expert_intermediate_size=40, num_dense_layers=1,
)  # fmt: skip
DENSE, EXPERTS = 1, 2
NORMS = {f"norm{number} {what}" for number in (1, 2) for what in ("statistics", "output")}
PLAN = {"dp_shard": 8, "zero_stage": 1, "ep": 8, "recompute": "selective"}


def block(
    index: int = EXPERTS, implementation: LayerImplementation | None = None, shard: Shard | None = None
) -> LayerSpec:
    layer = DEEPSEEK.layers_of(shard or Shard(ep=4))[index]
    return implemented_layer(
        layer, implementation or LayerImplementation(expert_dispatch="all_to_all", fused_gates=True), dropout=False
    )


def dropped(layer: LayerSpec, *modules: RecomputeModule) -> set[str]:
    kept = recomputation(layer, "selective", modules=modules).saved
    return {tensor.name for tensor in layer.saved} - kept


def runs(layer: LayerSpec, *modules: RecomputeModule) -> list[tuple[list[str], str]]:
    """What runs again, and before whose backward, in order."""
    reruns = recomputation(layer, "selective", modules=modules).reruns
    return [([layer.kernels[i].name for i in r.kernels], layer.kernels[r.needed_by].name) for r in reruns]


@pytest.mark.parametrize(
    ("module", "gone", "reruns"),
    [
        ("mla_up_proj", {"q, k and padded v"}, [(["q_b", "kv_b", "rotary", "assemble heads"], "attention")]),
        # when the gradient of their branch arrives
        ("layernorm", NORMS, [(["norm2"], "combine"), (["norm1"], "proj")]),
        ("moe_act", {"experts_gated product"}, [(["experts_silu_multiply"], "experts_down")]),
    ],
)
def test_a_module_runs_again_before_the_backward_that_needs_it(
    module: RecomputeModule, gone: set[str], reruns: list[tuple[list[str], str]]
) -> None:
    assert dropped(block(), module) == gone
    assert runs(block(), module) == reruns


def test_up_projections_gather_their_narrow_inputs_again() -> None:
    layer = block(shard=Shard(tp=2, sequence_parallel=True, ep=4))
    [(names, _)] = runs(layer, "mla_up_proj")
    assert {"q_a_norm output", "kv_a_norm output"} <= set(names)
    assert not {"q_a", "kv_a", "q_a_norm", "kv_a_norm", "rotated part of keys"} & set(names)


def test_norms_that_are_part_of_a_product_do_not_run_again() -> None:
    """TELayerNormColumnParallelLinear: all of a dense Llama, and norm1 of experts behind usual attention."""
    llama = catalog.model("llama3-8b").layers[1]
    mixtral = catalog.model("mixtral-8x7b").layers[1]
    assert not dropped(llama, "layernorm")
    assert dropped(mixtral, "layernorm") == {"norm2 statistics", "norm2 output"}


@pytest.mark.parametrize(
    ("module", "matmuls"), [("moe_act", ["experts_down"]), ("layernorm", ["q_a", "kv_a", "shared_gate"])]
)
def test_in_8_bits_products_quantize_what_is_made_again(module: RecomputeModule, matmuls: list[str]) -> None:
    """They keep no quantized copy of it (set_save_original_input)."""
    software = catalog.software("megatron-core")
    state = software.state(TrainingSpec(global_batch_size=8, precision="fp8"), ParallelPlan())
    layer = keeping_quantized(block(), state.linear, joined=True)
    assert {f"{matmul} input in fp8" for matmul in matmuls} <= dropped(layer, module)


def test_an_activation_in_the_product_is_made_again_by_the_backward_of_the_product() -> None:
    layer = block(
        implementation=LayerImplementation(expert_dispatch="all_to_all", fused_gates=True, fused_experts=True)
    )
    assert dropped(layer, "moe_act") == {"experts_gated product"}
    assert runs(layer, "moe_act") == [([], "experts_down")]


def test_the_second_half_runs_again_to_its_end() -> None:
    dense, experts = block(DENSE), block()
    assert runs(dense, "mlp") == [(["gate", "up", "silu_multiply", "down"], "down")]
    assert dropped(dense, "mlp") == {"gate output", "up output", "gated product"}
    [(names, needed_by)] = runs(experts, "moe")
    assert (names[0], names[-1], needed_by) == ("shared_gate", "combine", "combine")
    assert {"dispatch", "expert inputs", "experts_down", "expert outputs"} < set(names)
    assert not dropped(dense, "moe")
    assert not dropped(experts, "mlp")


def test_the_shared_expert_runs_again_alone() -> None:
    [(names, needed_by)] = runs(block(), "shared_experts")
    assert names == ["shared_gate", "shared_up", "shared_silu_multiply", "shared_down"]
    assert needed_by == "combine"


def test_modules_together_drop_and_repeat_what_each_does_and_in_the_order_of_backward() -> None:
    modules: tuple[RecomputeModule, ...] = ("mla_up_proj", "layernorm", "moe_act")
    alone = [(rerun, module) for module in modules for rerun in runs(block(), module)]
    together = runs(block(), *modules)
    assert {name for names, _ in together for name in names} == {name for (names, _), _ in alone for name in names}
    assert dropped(block(), *modules) == set().union(*(dropped(block(), module) for module in modules))
    assert [needed_by for _, needed_by in together] == ["combine", "experts_down", "proj", "attention"]


def test_no_module_named_is_the_core() -> None:
    assert recomputation(block(), "selective") == recomputation(block(), "selective", modules=("core_attn",))


def test_an_autograd_function_runs_a_block_to_its_end() -> None:
    """The last product and the sum, which nothing asks for (CheckpointFunction.backward)."""
    to_end = block(DENSE, LayerImplementation(full_recompute_pass=True))
    plain = recomputation(block(DENSE), "full")
    assert [to_end.kernels[i].name for i in recomputation(to_end, "full").kernels][-2:] == ["down", "residual2"]
    assert recomputation(to_end, "full").saved == plain.saved
    assert "down" not in [block(DENSE).kernels[i].name for i in plain.kernels]


def test_how_a_plan_says_it_in_words() -> None:
    assert ParallelPlan(recompute="selective", recompute_modules=("moe_act",)).recomputed == "selective of moe_act"
    assert ParallelPlan(recompute="full", recompute_layers=2).recomputed == "full in the first 2 blocks"
    words = "full in the first block of each stage"
    assert ParallelPlan(recompute="full", recompute_layers=1, pp=2).recomputed == words


@pytest.mark.parametrize(
    ("software", "changes", "field", "said"),
    [
        (
            "megatron-core",
            {"recompute": "full", "recompute_modules": ("moe_act",)},
            "recompute_modules",
            "recompute is full",
        ),
        ("megatron-core", {"recompute_modules": ()}, "recompute_modules", "names no module"),
        ("megatron-core", {"recompute_modules": ("moe", "moe")}, "recompute_modules", "names a module twice"),
        ("megatron-core", {"recompute_modules": ("moe", "moe_act")}, "recompute_modules", "is part of moe"),
        ("megatron-core", {"recompute_layers": 2}, "recompute_layers", "recompute is selective"),
        ("megatron-core", {"recompute": "full", "recompute_layers": 5}, "recompute_layers", "more than the 4 blocks"),
        ("torch", {"recompute_modules": ("moe_act",)}, "recompute_modules", "torch does not run this module alone"),
        ("maxtext", {"recompute": "full", "recompute_layers": 1}, "recompute_layers", "is not modeled for maxtext"),
    ],
)
def test_impossible_values_are_refused_by_name(
    software: str, changes: dict[str, object], field: str, said: str
) -> None:
    refusals = problems(DEEPSEEK, {**PLAN, **changes}, software=software)
    assert any(sentence.startswith(f"plan.{field}") and said in sentence for sentence in refusals)


def test_a_module_that_no_block_has_is_refused() -> None:
    plan = {**PLAN, "ep": 1, "recompute_modules": ("moe_act", "layernorm")}
    refusals = problems("llama3-8b", plan, software="megatron-core")
    assert any("no block of the model has such a module apart" in sentence for sentence in refusals)


def test_modules_are_not_run_again_in_two_parts_of_a_backward() -> None:
    plan = {**PLAN, "pp": 4, "dp_shard": 2, "ep": 1, "schedule": "zb-h1", "recompute_modules": ("layernorm",)}
    assert any(
        "in both parts of a backward" in refusal for refusal in problems(DEEPSEEK, plan, software="megatron-core")
    )


@pytest.mark.parametrize("changes", [{"recompute": "full"}, {"recompute_modules": ("moe",)}])
def test_tokens_beside_another_microbatch_are_not_sent_again(changes: dict[str, object]) -> None:
    """overlap_moe_expert_parallel_comm takes neither (transformer_config.py)."""
    overlapping = catalog.software("megatron-core").model_copy(update={"expert_overlap": True})
    [refusal] = problems(DEEPSEEK, {**PLAN, **changes}, software=overlapping)
    assert "would repeat the expert all-to-all" in refusal


def test_delayed_scaling_makes_nothing_again() -> None:
    plan, training = {**PLAN, "recompute_modules": ("moe_act",)}, {"precision": "fp8", "fp8_recipe": "delayed"}
    [refusal] = problems(DEEPSEEK, plan, software="megatron-core", **training)
    assert "with delayed scaling of fp8" in refusal
