"""What a family takes and refuses, how its layers are split, and what masks cost."""

from __future__ import annotations

from typing import Any

import pytest

from simplan.errors import SpecError
from simplan.model.families import FAMILIES
from simplan.model.layer import Attention, Gemm, LayerSpec, Pointwise
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation
from simplan.plan.shard import Shard
from simplan.problems import parse_model
from tests.jobs import problems
from tests.search.jobs import FAMILIES as SMALL
from tests.support.problems import says

SIZES: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 96, "num_attention_heads": 12}
TOKENS: dict[str, Any] = {"vocab_size": 240, "seq_len": 48}
FIELDS: dict[str, dict[str, Any]] = {
    "gpt": TOKENS,
    "llama": {**TOKENS, "intermediate_size": 240},
    "mpt": TOKENS,
    "bert": TOKENS,
    "vit": {"image_size": 28, "patch_size": 4, "num_classes": 24},
    "t5": TOKENS,
}


def model_of(family: str, **fields: Any) -> ModelSpec:
    usual = {"depths": [2, 2]} if family == "resnet" else SIZES | FIELDS[family]
    return parse_model(ModelSpec, {"family": family, **usual, **fields}, prefix=("model",))


def attention_of(layer: LayerSpec) -> Attention:
    (core,) = (kernel for kernel in layer.kernels if isinstance(kernel, Attention))
    return core


@pytest.mark.parametrize(
    ("family", "fields", "sentence"),
    [
        ("gpt", {"image_size": 28}, "model.image_size = 28: is for models of family"),
        ("vit", {"vocab_size": 100}, "model.vocab_size = 100: is for models of family"),
        ("vit", {"tied_embeddings": True}, "model.tied_embeddings = true: is for models of family"),
        ("bert", {"sliding_window": 8}, "model.sliding_window = 8: is for models of family"),
        ("mpt", {"qkv_bias": True}, "model.qkv_bias = true: is for models of family"),
        ("mpt", {"type_vocab_size": 2}, "model.type_vocab_size = 2: ... bert, and family = mpt; remove"),
        ("bert", {"vocab_size": 0}, "model.vocab_size = 0: must be at least 1"),
        ("vit", {"num_classes": -1}, "model.num_classes = -1: must be at least 1"),
        ("llama", {"qk_norm": "heads"}, 'model.qk_norm = "heads": ... known choice; did you mean head?'),
        ("llama", {"sliding_windw": 4}, "model.sliding_windw: is not ... known ... did you mean sliding_window"),
        ("gpt", {"decoder_seq_len": 20}, "model.decoder_seq_len = 20: ... t5, and family = gpt; remove"),
        ("t5", {"num_key_value_heads": 4}, "model.num_key_value_heads = 4: is for models of family"),
        ("t5", {"max_position_embeddings": 512}, "model.max_position_embeddings = 512: is for models of family"),
        ("t5", {"decoder_seq_len": 0}, "model.decoder_seq_len = 0: must be at least 1"),
        ("resnet", {"seq_len": 224}, "model.seq_len = 224: is for models of family"),
        ("resnet", {"hidden_size": 64}, "model.hidden_size = 64: is for models of family"),
        ("resnet", {"layer_type": "bottle"}, 'model.layer_type = "bottle": ... known choice; did you mean bottleneck?'),
        ("resnet", {"depths": [3, 0]}, "model.depths"),
        ("resnet", {"image_size": 0}, "model.image_size = 0: must be at least 1"),
        ("vit", {"depths": [2, 2]}, "model.depths = [2, 2]: ... family = vit; remove"),
    ],
)  # fmt: skip
def test_fields_that_a_family_does_not_have_are_refused_by_name(
    family: str, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SpecError) as caught:
        model_of(family, **fields)
    assert says(str(caught.value), sentence)


def test_missing_sizes_are_those_of_the_family() -> None:
    with pytest.raises(SpecError) as caught:
        parse_model(ModelSpec, {"family": "vit", **SIZES}, prefix=("model",))
    missing = {problem.field for problem in caught.value.problems}
    assert missing == {"model.image_size", "model.patch_size", "model.num_classes", "model.seq_len"}


@pytest.mark.parametrize("family", FIELDS)
def test_a_model_is_itself_when_written_and_read_again(family: str) -> None:
    """What says that there is nothing is no field of another family."""
    model = model_of(family)
    assert ModelSpec.model_validate_json(model.model_dump_json()) == model
    assert model.model_copy(update={"name": "other"}).layers == model.layers


@pytest.mark.parametrize(
    ("model", "plan", "sentence"),
    [
        (model_of("vit", patch_size=5), {}, "model.patch_size = 5: must divide image_size = 28; use 4 or 7"),
        (model_of("vit", seq_len=48), {}, "model.seq_len = 48: ... 49 patches ... use 50"),
        (model_of("bert", max_position_embeddings=32), {}, "model.seq_len = 48: ... most max_position_embeddings = 32"),
        (model_of("llama", sliding_window_pattern=2), {},
         "model.sliding_window_pattern = 2: ... blocks ... sliding_window; give sliding_window"),
        (model_of("vit", num_classes=25), {"tp": 2, "sequence_parallel": False}, "plan.tp = 2: must divide "
         "model.num_classes = 25; use 1 or 5"),
        (model_of("vit"), {"tp": 2}, "plan.sequence_parallel = true: ... not modeled ... use false"),
        (model_of("vit"), {"cp": 2}, "plan.cp = 2: ... not modeled"),
        (model_of("bert"), {"cp": 2}, "plan.cp = 2: context parallelism"),
        (model_of("mpt"), {"cp": 2}, "plan.cp_comm = ring: ring ... ALiBi is not modeled ... use all_gather or a2a"),
        (model_of("llama", sliding_window=8), {"cp": 2}, "plan.cp_comm = ring: ring attention in a window is not"),
    ],
)  # fmt: skip
def test_models_and_splits_that_are_refused(model: ModelSpec, plan: dict[str, Any], sentence: str) -> None:
    [refusal] = problems(model, plan)
    assert says(refusal, sentence)


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("vit", {"tp": 2, "sequence_parallel": False}),
        ("bert", {"tp": 4}),
        ("mpt", {"tp": 2, "cp": 2, "cp_comm": "all_gather"}),
        ("mpt", {"cp": 2, "cp_comm": "a2a", "pp": 2}),
    ],
)
def test_splits_that_are_modelled_pass(family: str, plan: dict[str, Any]) -> None:
    assert problems(model_of(family), plan) == []


@pytest.mark.parametrize(
    ("family", "shard"),
    [
        ("bert", Shard(tp=4)),
        ("vit", Shard(tp=4)),
        ("mpt", Shard(tp=4)),
        ("mpt", Shard(cp=4, cp_comm="a2a")),
        ("mpt", Shard(cp=4, cp_comm="all_gather")),
    ],
    ids=str,
)
def test_ranks_together_do_the_work_of_one(family: str, shard: Shard) -> None:
    """All FLOPs of blocks are split; of the ends, what has no heads and no vocabulary is done by every rank."""
    model = model_of(family)
    whole_of_every_rank = {"bert": "transform", "vit": "conv_proj"}.get(family)
    for whole, part in zip(model.layers, model.layers_of(shard), strict=True):
        doubled = [k for k in whole.kernels if isinstance(k, Gemm) and k.name == whole_of_every_rank]
        added = (shard.tp - 1) * sum(kernel.flops for kernel in doubled)
        assert part.flops() * shard.tp * shard.cp == whole.flops() + added


@pytest.mark.parametrize("window", [1, 7, 16, 47])
def test_a_window_counts_what_queries_meet(window: int) -> None:
    """Against counting pairs; the diagonal counts half, as in half of the square for causal attention."""
    block = model_of("llama", sliding_window=window).layers[1]
    pairs = sum(min(query + 1, window) for query in range(48))
    core = attention_of(block)
    assert core.flops / (4 * 12 * 8) == pytest.approx(pairs - 48 / 2 + (48 - window) / 2, abs=1)
    assert core.computed_flops == core.full_flops == 4 * 48 * 48 * 12 * 8
    assert block.key != model_of("llama").layers[1].key


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    assert model_of("llama", sliding_window=48).layers == model_of("llama").layers


def test_every_so_many_blocks_have_no_window() -> None:
    """Gemma 3's pattern of 6 would leave one of six whole; here one of three."""
    model = model_of("llama", sliding_window=16, sliding_window_pattern=3)
    assert [attention_of(layer).window for layer in model.layers[1:-1]] == [16, 16, 0, 16, 16, 0]


def test_encoders_attend_to_all_tokens() -> None:
    for family in ("bert", "vit"):
        core = attention_of(model_of(family).layers[1])
        assert core.flops == core.full_flops == 4 * model_of(family).seq_len ** 2 * 96


def test_alibi_keeps_a_bias_for_every_head_and_pair() -> None:
    (table,) = model_of("mpt").layers[1].constants
    assert table.elements == 12 * 48 * 48
    (table,) = model_of("mpt").layers_of(Shard(tp=2, cp=2, cp_comm="all_gather"))[1].constants
    assert table.elements == 6 * 24 * 48


def test_values_may_have_heads_of_their_own_width() -> None:
    """DeepSeek-V3: 2 n^2 a (192 + 128), half of it when causal."""
    assert Attention(128, 128, 192, 4096, value_head_dim=128).full_flops == 2 * 4096**2 * 128 * (192 + 128)


def test_post_norm_blocks_norm_their_sums() -> None:
    names = [kernel.name for kernel in model_of("bert").layers[1].kernels if isinstance(kernel, Pointwise)]
    assert names == ["residual1", "norm1", "gelu", "residual2", "norm2"]
    kept = recomputation(model_of("bert").layers[1], "full")
    assert kept.saved == {"input"}
    assert [model_of("bert").layers[1].kernels[index].name for index in kept.kernels][-1] == "norm2"
    [rerun] = kept.reruns
    assert model_of("bert").layers[1].kernels[rerun.needed_by].name == "norm2"


@pytest.mark.parametrize("family", [name for name, of in FAMILIES.items() if not of.fields & {"gated_mlp", "captured"}])
def test_a_gate_is_said_as_the_layers_have_it(family: str) -> None:
    """A family says that its MLPs have a gate where its blocks have weights for one, and takes no other word."""
    model = ModelSpec.model_validate({"family": family, **SMALL[family]})
    names = {parameter.name for layer in model.layers for parameter in layer.parameters}
    has = any(name.endswith("gate.weight") for name in names)
    assert model.gated_mlp is has is FAMILIES[family].gated_mlp
    assert ModelSpec.model_validate({"family": family, **SMALL[family], "gated_mlp": has}) == model
    with pytest.raises(SpecError, match=f"^model.gated_mlp = {str(not has).lower()}: is not modeled: in family = "):
        parse_model(ModelSpec, {"family": family, **SMALL[family], "gated_mlp": not has}, prefix=("model",))


@pytest.mark.parametrize(
    ("family", "gated", "sentence"),
    [
        ("llama", False,
         "false: is not modeled: ... family = llama MLPs ... remove ... family = gpt ... MLPs ... none"),
        ("gpt", True,
         "true: is not modeled: ... family = gpt MLPs ... remove ... family = llama ... gemma2 or gemma3 ... MLPs"),
        ("moe", False, "false: is not modeled: ... family = moe ... remove"),
        ("vit", True, "true: is not modeled: ... family = vit MLPs ... remove"),
    ],
)  # fmt: skip
def test_a_gate_that_a_family_cannot_have_or_lack_is_refused(family: str, gated: bool, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_model(ModelSpec, {"family": family, **SMALL[family], "gated_mlp": gated}, prefix=("model",))
    assert says(str(caught.value), f"model.gated_mlp = {sentence}")
