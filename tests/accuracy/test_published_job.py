"""From a run to a question: what becomes of each of its keys."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from simplan import catalog
from simplan.accuracy.framework_defaults import framework_defaults, profile_name
from simplan.accuracy.published_job import job_of_published_run, layers_of_stages
from simplan.accuracy.reading import read_published
from simplan.accuracy.schema import Framework
from simplan.errors import NotModelledError, SpecError
from simplan.predict.step_summary import summarize_step
from simplan.rules import check_job
from simplan.software.software import SoftwareSpec
from tests.accuracy.runs import RESNET, T5, VIT, run

PUBLISHED = Path(__file__).resolve().parents[2] / "scenarios" / "published"


@pytest.mark.parametrize(
    ("framework", "version", "name"),
    [
        ("megatron-lm", "2020", "megatron-lm-2021"),
        ("megatron-lm", "fork by sail-sg (zero-bubble), 2023", "megatron-lm-2023"),
        ("megatron-lm", "23e00ed0963c + torch 2.10", "megatron-core"),
        ("megatron-lm", None, "megatron-core"),
        ("deepspeed", "2021", "deepspeed-2021"),
        ("deepspeed", "0.6, 2022", "megatron-deepspeed"),
        ("nemo", "NeMo24.07, table at commit 164b0097f83a", "nemo"),
        ("nemo", "NeMo-Megatron 23.08", "nemo-2022"),
        ("gpipe", None, "torch"),
    ],
)
def test_a_framework_and_its_date_name_a_profile(framework: str, version: str | None, name: str) -> None:
    found = run(software__framework=framework, software__version=version)
    assert profile_name(found.software, found.plan) == name


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ({"tp": 2, "pp": 2, "dp_replicate": 1}, "megatron-core"),
        ({"dp_replicate": 1, "dp_shard": 2, "zero_stage": 1}, "megatron-core"),
        ({"dp_replicate": 1, "dp_shard": 2, "zero_stage": 3}, "torch"),
        ({}, "torch"),
    ],
)
def test_a_framework_that_is_not_named_is_of_the_lineage_that_such_plans_have(plan: dict[str, Any], name: str) -> None:
    """Tensor parallelism in a pipeline, or optimizer states that are dealt out: as Megatron has them."""
    changes = {f"plan__{key}": value for key, value in plan.items()}
    found = run(software__framework="other", software__version=None, plan__num_microbatches=8, **changes)
    assert profile_name(found.software, found.plan) == name


@pytest.mark.parametrize(
    ("framework", "version", "changes", "note"),
    [
        ("deepspeed", "2023", {"zero_stage": 2}, "plan.zero_stage = 2 with megatron-deepspeed: parameters"),
        ("megatron-lm", "2021", {"zero_stage": 1}, "plan.zero_stage = 1 with megatron-lm-2021: equal numbers"),
        ("nemo", "24.07", {"zero_stage": 3}, "plan.zero_stage = 3 with nemo: parameters are gathered"),
        ("llm-foundry", None, {"zero_stage": 3, "precision": "fp16"}, "plan.precision = fp16 with llm-foundry: el"),
        ("torchtitan", None, {"zero_stage": 2, "precision": "fp16"}, "plan.precision = fp16 with torchtitan-2025: el"),
        ("maxtext", None, {"zero_stage": 3, "precision": "fp8"}, "plan.precision = fp8 with maxtext: quantized"),
        ("maxtext", None, {"zero_stage": 3, "grad_dtype": "bf16"}, "plan.grad_dtype = bf16 with maxtext: kept and red"),
    ],
)
def test_what_a_profile_refuses_is_predicted_as_others_have_it_and_said(
    framework: str, version: str | None, changes: dict[str, Any], note: str
) -> None:
    """In published runs alone: a scenario is refused."""
    plan = {"dp_replicate": 1, "dp_shard": 4, "pp": 1, "schedule": "none", "num_microbatches": 4, **changes}
    device = "h100-sxm-80gb" if changes.get("precision") == "fp8" else "a100-sxm-80gb"
    asked = run(
        software__framework=framework,
        software__version=version,
        cluster__device=device,
        **{f"plan__{key}": value for key, value in plan.items()},
    )
    question = job_of_published_run(asked)
    assert any(said.startswith(note) for said in question.notes), question.notes
    brief = summarize_step(question.job)
    assert brief.step_time_s > 0
    whole = catalog.software(profile_name(asked.software, asked.plan))
    with pytest.raises(ValueError, match="is not modeled"):
        check_job(replace(question.job, software=whole))


def test_every_profile_name_is_known_to_the_catalogue() -> None:
    """As one that there is, or as one that is known to be missing: no other name is a stand-in's."""
    assert set(framework_defaults()) == set(get_args(Framework))
    for framework in framework_defaults().values():
        for name in (*framework.profiles.values(), *framework.combining.values()):
            with suppress(NotModelledError):
                assert catalog.software(name).id == name


@pytest.mark.parametrize(
    ("by_rank", "virtual_stages", "placement", "stages"),
    [
        ((2, 2), 1, "loop", (2, 2)),
        ((3, 4, 4, 3), 4, "loop", (0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0)),
        ((15, 16, 15), 4, "loop", (3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3)),
        ((2, 2), 2, "v", (1, 1, 1, 1)),
    ],
)
def test_layers_of_ranks_are_shared_out_over_their_stages(
    by_rank: tuple[int, ...], virtual_stages: int, placement: Any, stages: tuple[int, ...]
) -> None:
    assert layers_of_stages(by_rank, virtual_stages, placement) == stages


def test_what_a_source_does_not_say_is_filled_in_and_noted() -> None:
    question = job_of_published_run(
        run(cluster__devices_per_node=2, model__tied_embeddings=None, model__vocab_size=1023, plan__tp=2)
    )
    assert question.job.cluster.inter_link is not None
    assert question.job.cluster.inter_link.id == "network-200gbit", "as a DGX A100 has it"
    assert (question.job.model.vocab_size, question.job.model.tied_embeddings) == (1023, True)
    assert question.job.padded_model.vocab_size == 1024, "as Megatron-LM pads it"
    notes = "\n".join(question.notes)
    for words in ("inter_link_gbit_per_device is not known: 200", "padded to 1024", "tied_embeddings is not known"):
        assert words in notes


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(RESNET, 25_557_032), (VIT, 86_567_656), (T5, 60_506_624)],
    ids=["resnet", "vit", "t5"],
)
def test_images_and_pairs_of_texts_are_of_models_as_large_as_published(model: dict[str, Any], parameters: int) -> None:
    """torchvision's num_params; T5-small as its checkpoint. The decoder has tokens of its own."""
    plan: dict[str, Any] = {
        "pp": 1,
        "schedule": "none",
        "dp_replicate": 4,
        "global_batch_size": 64,
        "precision": "fp16",
    }
    plan |= {"optimizer": "sgd_momentum", "fused_optimizer": False, "clip_grad_norm": 1.0}
    asked = run(model=model, software__framework="torch", **{f"plan__{key}": value for key, value in plan.items()})
    question = job_of_published_run(asked)
    assert question.job.model.num_parameters == parameters
    assert question.job.model.decoder_seq_len == model.get("decoder_seq_len", 0)
    training = question.job.training
    assert (training.update, training.clip_grad_norm) == ("sgd_momentum_foreach", 1.0)
    assert question.notes == (), "nothing of it is assumed"
    assert summarize_step(question.job).step_time_s > 0


def test_layouts_heads_and_versions_of_small_models_reach_the_job() -> None:
    resnet = run(model=RESNET, software__channels_last=True, plan__pp=1, plan__schedule="none", plan__dp_replicate=4)
    assert job_of_published_run(resnet).job.software.channels_last
    bert = {"model__family": "bert", "software__framework": "torch", "plan__precision": "fp16"}
    for predictions, rows in ((20, 20), (0, 1)):
        found = job_of_published_run(run(**bert, model__max_predictions_per_seq=predictions)).job
        assert found.model.max_predictions_per_seq == rows
        assert "bert" in found.software.layers.dropout
    for version, widths, compiled in (
        ("21.11, TorchScript with NVFuser", (4, 4), True),
        ("20.06, Apex O2", (2, 2), False),
        ("20.06", (4, 4), False),
    ):
        software = job_of_published_run(run(**bert, software__version=version)).job.software
        state = software.state_bytes["fp16"]
        assert ((state.parameter, state.residual), software.compiled) == (widths, compiled)


def test_gradients_of_llm_c_are_one_buffer() -> None:
    """Of PyTorch's DDP, buckets and gradients: what llm.c has no copy of."""
    for framework, both in (("llm.c", False), ("torch", True)):
        given = run(software__framework=framework, plan__pp=1, plan__schedule="none", plan__dp_replicate=4)
        software = job_of_published_run(given).job.software
        assert (software.ddp_copies_gradients, software.ddp_drops_gradients) == (both, both)


def test_a_vocabulary_is_padded_as_the_software_does_else_as_far_as_tp_needs() -> None:
    megatron = job_of_published_run(run(model__vocab_size=1023, plan__tp=4, plan__dp_replicate=1, plan__pp=1))
    titan = job_of_published_run(
        run(software__framework="torchtitan", model__vocab_size=1023, plan__tp=4, plan__dp_replicate=1, plan__pp=1)
    )
    unknown = job_of_published_run(
        run(software__framework="other", model__vocab_size=1023, plan__tp=2, plan__dp_replicate=1)
    )
    assert unknown.job.software.id == "megatron-lm-2022", "as of a framework that combines both, but not known to pad"
    for question, note in (
        (megatron, "model.vocab_size = 1023: padded to 1024, a multiple of 128 x tp = 512, as megatron-lm-2022 does"),
        (unknown, "model.vocab_size = 1023: padded to 1024, a multiple of tp"),
        (titan, "model.vocab_size = 1023: padded to 1024, a multiple of tp"),
    ):
        assert question.job.padded_model.vocab_size == 1024
        assert [found.partition(";")[0] for found in question.notes if "padded" in found] == [note]


@pytest.mark.parametrize(
    ("devices", "domain", "of_each"),
    [(256, 72, 64), (128, 72, 64), (144, 72, 72), (160, 72, 40), (64, 72, 72), (64, 8, 8)],
)
def test_a_job_on_several_large_domains_takes_as_many_devices_of_each(devices: int, domain: int, of_each: int) -> None:
    plan: dict[str, Any] = {"plan__dp_replicate": devices // 2, "plan__global_batch_size": 8 * devices}
    job = job_of_published_run(run(cluster__num_devices=devices, cluster__devices_per_node=domain, **plan))
    assert job.job.cluster.devices_per_node == of_each
    assert any(f"takes {of_each} of each" in note for note in job.notes) == (of_each != domain)


@pytest.mark.parametrize(("version", "usual"), [("2024", "fused"), ("2022", "unfused")])
def test_what_a_run_says_of_its_software_holds_whatever_is_usual(version: str, usual: str) -> None:
    def software(**said: bool | None) -> SoftwareSpec:
        fields: dict[str, Any] = {f"software__{key}": value for key, value in said.items()}
        return job_of_published_run(
            run(software__framework="megatron-lm", software__version=version, **fields)
        ).job.software

    assert software(flash_attention=None).layers.attention == usual
    assert software(flash_attention=False).layers.attention == "unfused"
    assert software(flash_attention=True).layers.attention == "fused"
    assert software(compile=True).compiled
    assert not software(grad_overlap=False).grad_overlap


EXPERTS: dict[str, Any] = {
    "model__family": "moe",
    "model__moe": {"num_experts": 8, "top_k": 2, "moe_intermediate_size": 64},
}


@pytest.mark.parametrize(
    ("framework", "version", "etp"),
    [
        ("megatron-core", "0.10, 2024", 1),
        ("megatron-bridge", "NeMo container 25.09", 1),
        ("torchtitan", None, 1),
        ("nemo", "24.07", 2),
        ("nemo", "NeMo container 25.04", 1),
        ("megatron-lm", "2023", 2),
        ("maxtext", None, 2),
    ],
)
def test_whether_tensor_parallel_ranks_split_experts_is_the_framework_s(
    framework: str, version: str | None, etp: int
) -> None:
    split: dict[str, Any] = {"plan__tp": 2, "plan__sequence_parallel": True, "plan__dp_shard": 4, "plan__ep": 4}
    question = job_of_published_run(run(software__framework=framework, software__version=version, **split, **EXPERTS))
    assert (question.job.plan.ep, question.job.plan.etp) == (4, etp)
    assert any(note.startswith(f"plan.etp is not known: {etp}") for note in question.notes)
    assert not any(note.startswith("plan.etp") for note in job_of_published_run(run(**EXPERTS)).notes)


def test_an_optimizer_step_that_synchronizes_is_the_same_schedule_and_does_not_overlap() -> None:
    bypassing, synchronous = (job_of_published_run(run(plan__schedule=name)) for name in ("zb-2p", "zb-2p-optsync"))
    assert bypassing.job.plan == synchronous.job.plan
    assert (bypassing.steps_overlap, synchronous.steps_overlap) == (True, False)


def test_every_run_of_this_project_is_a_valid_plan() -> None:
    refused = []
    for read in read_published([PUBLISHED, PUBLISHED.with_name("heldout"), PUBLISHED.with_name("validation")]):
        for published in read.runs or ():
            question = job_of_published_run(published)
            try:
                check_job(question.job)
            except ValueError as error:
                if "more than" not in str(error):  # large steps are not written out in full here
                    refused.append((published.id, str(error)))
    assert not refused


def test_adapters_are_those_of_the_recipe() -> None:
    """Rank 32 beside queries, keys and values (NeMo's launcher); a printed rank holds."""
    nemo: dict[str, Any] = {"software__framework": "nemo", "software__version": "NeMo24.07", "task": "lora"}
    model = job_of_published_run(run(**nemo)).job.model
    assert (model.lora_rank, model.lora_targets) == (32, ("qkv",))
    assert job_of_published_run(run(plan__lora_rank=8, **nemo)).job.model.lora_rank == 8
    other = job_of_published_run(run(software__framework="torchtitan", task="lora"))
    assert (other.job.model.lora_rank, other.job.model.lora_targets) == (32, ("all",))
    assert "plan.lora_rank is not known: 32" in other.notes


@pytest.mark.parametrize(
    ("model", "family", "facts"),
    [
        ({"family": "bert"}, "bert", {"num_blocks": 8}),
        # as many blocks in the decoder; two of gating and one of the result in each MLP
        ({"family": "t5", "gated_mlp": True}, "t5", {"num_blocks": 16, "gated_mlp": True, "decoder_seq_len": 256}),
        ({"family": "moe", "moe": {"num_experts": 8, "top_k": 2, "moe_intermediate_size": 64, "num_dense_layers": 1},
         "mla": {"q_lora_rank": None, "kv_lora_rank": 64} | {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
         "v_head_dim": 32}}, "deepseek", {"num_experts": 8, "kv_lora_rank": 64, "q_lora_rank": None,
         "shared_expert_intermediate_size": 0}),
    ],
)  # fmt: skip
def test_models_of_all_families(model: dict[str, Any], family: str, facts: dict[str, Any]) -> None:
    question = job_of_published_run(run(**{f"model__{key}": value for key, value in model.items()}))
    assert question.job.model.family == family
    assert {key: getattr(question.job.model, key) for key in facts} == facts
    check_job(question.job)


def test_what_a_family_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="num_experts"):
        job_of_published_run(run(model__moe={"num_experts": 8, "top_k": 2, "moe_intermediate_size": 64}))


def test_models_have_as_many_parameters_as_their_source_prints() -> None:
    """llm-foundry prints them to the last digit; MPT's benchmark models are GPTs with learned positions."""
    printed = [
        published
        for read in read_published([PUBLISHED / "mosaic_llm_foundry_mpt.yaml"])
        for published in read.runs or ()
        if published.model.params is not None
    ]
    assert len(printed) > 100
    assert {
        job_of_published_run(published).job.model.num_parameters == published.model.params for published in printed
    } == {True}


def test_what_the_schema_has_no_field_for_is_the_catalogues() -> None:
    """The model has exactly the sizes of one that the catalog knows."""
    sizes: dict[str, Any] = {
        "model__family": "moe",
        "model__num_hidden_layers": 36,
        "model__hidden_size": 2880,
        "model__num_attention_heads": 64,
        "model__num_key_value_heads": 8,
        "model__head_dim": 64,
        "model__vocab_size": 201088,
        "model__moe": {"num_experts": 128, "top_k": 4, "moe_intermediate_size": 2880},
    }
    question = job_of_published_run(run(**sizes))
    assert question.job.model.attention_sinks
    assert question.job.model.expert_bias
    assert question.job.model.windows[:2] == catalog.model("gpt-oss-120b").windows[:2] == (128, 0)
    assert any(note.startswith("as the catalog's gpt-oss-120b, whose sizes it has: ") for note in question.notes)
    other = job_of_published_run(run(**{**sizes, "model__vocab_size": 200_064}))
    assert not other.job.model.expert_bias
    assert not any("catalog's" in note for note in other.notes)


@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "mistral-7b-v0.3"])
def test_a_vocabulary_tells_models_apart_that_differ_in_little_else(name: str) -> None:
    """The older one attends in a window."""
    fields = catalog.model_fields(name)
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    given = {f"model__{size}": fields[size] for size in (*sizes, "vocab_size")}
    question = job_of_published_run(run(**given, model__family="llama", model__gated_mlp=True))
    assert question.job.model.sliding_window == fields.get("sliding_window")
