"""Modules that run again alone, against what Megatron Core's documentation and source say of each."""

from __future__ import annotations

import pytest

from simplan import catalog
from simplan.errors import NotModelledError, SpecError
from simplan.job import Job
from simplan.model.implementations.layer_implementation import LayerImplementation, styled
from simplan.model.layer import LayerSpec
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation
from simplan.plan.plan import ParallelPlan, RecomputeModule
from simplan.plan.shard import Shard
from simplan.program.memory.low_precision_footprint import keeping_quantized
from simplan.rules import check_job
from simplan.software.software import SoftwareSpec
from simplan.training.training import TrainingSpec

DEEPSEEK = ModelSpec(
    family="deepseek",
    num_hidden_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    intermediate_size=96,
    vocab_size=128,
    seq_len=32,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    num_experts=8,
    top_k=2,
    moe_intermediate_size=40,
    shared_expert_intermediate_size=40,
    num_dense_layers=1,
)
DENSE, EXPERTS = 1, 2


def block(index: int = EXPERTS, style: LayerImplementation | None = None, shard: Shard | None = None) -> LayerSpec:
    layer = DEEPSEEK.layers_of(shard or Shard(ep=4))[index]
    return styled(layer, style or LayerImplementation(expert_dispatch="all_to_all", fused_gates=True), dropout=False)


def dropped(layer: LayerSpec, *modules: RecomputeModule) -> set[str]:
    kept = recomputation(layer, "selective", modules=modules).saved
    return {tensor.name for tensor in layer.saved} - kept


def runs(layer: LayerSpec, *modules: RecomputeModule) -> list[tuple[list[str], str]]:
    """What runs again, and before whose backward, in order."""
    reruns = recomputation(layer, "selective", modules=modules).reruns
    return [([layer.kernels[i].name for i in r.kernels], layer.kernels[r.needed_by].name) for r in reruns]


def test_up_projections_and_rotation_run_again_before_the_backward_of_the_core() -> None:
    assert dropped(block(), "mla_up_proj") == {"q, k and padded v"}
    assert runs(block(), "mla_up_proj") == [(["q_b", "kv_b", "rotary", "assemble heads"], "attention")]


def test_up_projections_gather_their_narrow_inputs_again() -> None:
    layer = block(shard=Shard(tp=2, sequence_parallel=True, ep=4))
    [(names, _)] = runs(layer, "mla_up_proj")
    assert {"q_a_norm output", "kv_a_norm output"} <= set(names)
    assert not {"q_a", "kv_a", "q_a_norm", "kv_a_norm", "rotated part of keys"} & set(names)


def test_norms_run_again_when_the_gradient_of_their_branch_arrives() -> None:
    names = {f"norm{number} {what}" for number in (1, 2) for what in ("statistics", "output")}
    assert dropped(block(), "layernorm") == names
    assert runs(block(), "layernorm") == [(["norm2"], "combine"), (["norm1"], "proj")]


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


def test_activations_of_experts_run_again_before_the_backward_of_the_last_product() -> None:
    assert dropped(block(), "moe_act") == {"experts_gated product"}
    assert runs(block(), "moe_act") == [(["experts_silu_multiply"], "experts_down")]


def test_an_activation_in_the_product_is_made_again_by_the_backward_of_the_product() -> None:
    layer = block(style=LayerImplementation(expert_dispatch="all_to_all", fused_gates=True, fused_experts=True))
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
        ("maxtext", {"recompute": "full", "recompute_layers": 1}, "recompute_layers", "is not modelled for maxtext"),
    ],
)
def test_what_cannot_be_is_refused_by_name(software: str, changes: dict[str, object], field: str, said: str) -> None:
    fields = {"dp_shard": 8, "zero_stage": 1, "ep": 8, "recompute": "selective", **changes}
    with pytest.raises((SpecError, NotModelledError), match=said) as error:
        check(DEEPSEEK, ParallelPlan.model_validate(fields), software)
    assert f"plan.{field}" in str(error.value)


def test_a_module_that_no_block_has_is_refused() -> None:
    plan = ParallelPlan(dp_shard=8, zero_stage=1, recompute="selective", recompute_modules=("moe_act", "layernorm"))
    dense = catalog.model("llama3-8b")
    with pytest.raises(SpecError, match="no block of the model has such a module apart"):
        check(dense, plan, "megatron-core")


def test_modules_are_not_run_again_in_two_parts_of_a_backward() -> None:
    fields = {"pp": 4, "dp_shard": 2, "zero_stage": 1, "schedule": "zb-h1", "recompute": "selective"}
    with pytest.raises(SpecError, match="in both parts of a backward"):
        check(DEEPSEEK, ParallelPlan.model_validate({**fields, "recompute_modules": ("layernorm",)}), "megatron-core")


@pytest.mark.parametrize("changes", [{"recompute": "full"}, {"recompute": "selective", "recompute_modules": ("moe",)}])
def test_tokens_beside_another_microbatch_are_not_sent_again(changes: dict[str, object]) -> None:
    """overlap_moe_expert_parallel_comm takes neither (transformer_config.py)."""
    overlapping = catalog.software("megatron-core").model_copy(update={"expert_overlap": True})
    plan = ParallelPlan.model_validate({"dp_shard": 8, "zero_stage": 1, "ep": 8, **changes})
    with pytest.raises(SpecError, match="would repeat the expert all-to-all"):
        check(DEEPSEEK, plan, overlapping)


def test_delayed_scaling_makes_nothing_again() -> None:
    fields = {"dp_shard": 8, "zero_stage": 1, "ep": 8, "recompute": "selective", "recompute_modules": ("moe_act",)}
    with pytest.raises(SpecError, match="with delayed scaling of fp8"):
        check(DEEPSEEK, ParallelPlan.model_validate(fields), "megatron-core", precision="fp8", fp8_recipe="delayed")


def check(model: ModelSpec, plan: ParallelPlan, software: str | SoftwareSpec, **training: str) -> None:
    fields = {"global_batch_size": 32, "precision": "bf16", "optimizer": "adamw", **training}
    named = catalog.software(software) if isinstance(software, str) else software
    check_job(Job(model, catalog.cluster("dgx-h100"), TrainingSpec.model_validate(fields), plan, named))
