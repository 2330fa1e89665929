"""Megatron-LM scripts: public ones mean what their authors wrote, and jobs come back as they were written."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import simplan
from simplan.errors import NotModelledError, SpecError
from simplan.interop.formats import changed_settings, formats
from simplan.interop.frameworks import tables
from simplan.job import Job
from simplan.rules import violations
from simplan.scenario import load_scenario
from simplan.scenario.published.reading import read_published
from simplan.scenario.source import make_job, read_source, scenario_from
from tests.interop.public import without_clipping
from tests.support.problems import refuses
from tests.support.slow import examples
from tests.support.yaml_files import read_yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATIONS = read_yaml(Path(__file__).parent / "configurations" / "megatron.yaml")
IMPORTED = [configuration for configuration in CONFIGURATIONS if "expect" in configuration]
REFUSED = [configuration for configuration in CONFIGURATIONS if "refused" in configuration]
PUBLISHED = [configuration for configuration in CONFIGURATIONS if "published" in configuration]
_CLUSTER = {"cluster.preset": "dgx-h100"}


def script(configuration: dict[str, Any], folder: Path) -> Path:
    """Launch script with the arguments of a configuration, half of them in an array, half in a string."""
    words = [
        " ".join(
            [key, *([] if value is True else map(shlex.quote, map(str, value if isinstance(value, list) else [value])))]
        )
        for key, value in configuration["settings"].items()
    ]
    middle = len(words) // 2
    quoted = " \\\n    ".join(words[middle:]).replace('"', '\\"')
    path = folder / f"{configuration['name']}.sh"
    program = configuration.get("program", "pretrain_gpt.py")
    devices = configuration.get("devices", 0)
    nodes = devices // 8 if devices > 8 else 1
    launcher = f"--nnodes {nodes} --nproc_per_node {devices // nodes}" if devices else "--nnodes $N"
    first = "\n".join(f"    {word}" for word in words[:middle])
    call = f"torchrun {launcher} {program} ${{FIRST[@]}}"
    path.write_text(f'#!/bin/bash\nFIRST=(\n{first}\n)\nOTHER="{quoted}"\neval "{call} $OTHER"\n')
    return path


def comparable(job: Job) -> Job:
    """The job without names."""
    return replace(job, model=job.model.model_copy(update={"name": "", "sources": {}}))


def with_stages(job: Job) -> Job:
    """The job with the blocks per stage that it is predicted with, where Megatron-LM has to be told."""
    plan, blocks = job.plan, job.model.num_hidden_layers
    if plan.stage_layers is not None or blocks % plan.num_stages == 0:
        return job
    boundaries = simplan.predict(job).assignment.boundaries
    stages = [after - before for before, after in pairwise(boundaries)]
    stages[0] -= 1
    stages[-1] -= job.model.num_last_layers
    return replace(job, plan=plan.with_changes(stage_layers=tuple(stages)))


@pytest.mark.parametrize("configuration", IMPORTED, ids=lambda configuration: configuration["name"])
def test_public_script_means_what_its_authors_wrote(configuration: dict[str, Any], tmp_path: Path) -> None:
    source = read_source(script(configuration, tmp_path), _CLUSTER | configuration.get("add", {}))
    job = source.scenario().job

    expected = configuration["expect"]
    for section in ("model", "plan", "training"):
        values = {key: getattr(getattr(job, section), key) for key in expected[section]}
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        assert plain == expected[section]
    assert job.software.id == expected["software"]
    assert source.configuration is not None
    known = {"--enable-gpt-oss", "--export-force-local-attention", "--enable-zb-runtime"}
    unknown = {setting.key for setting in source.configuration.unknown} - known
    assert all("pai" in configuration["name"] for _ in unknown), unknown
    assert not violations(job)


@pytest.mark.parametrize("configuration", IMPORTED, ids=lambda configuration: configuration["name"])
def test_public_script_comes_back_from_an_export(configuration: dict[str, Any], tmp_path: Path) -> None:
    add = _CLUSTER | configuration.get("add", {})
    job = scenario_from(script(configuration, tmp_path), add).job
    target = formats()["megatron"]
    assert target.export is not None
    if job.software.id == "megatron-deepspeed":
        with pytest.raises(NotModelledError, match=r"software\.id"):
            target.export(job, "out")
        return

    ((name, text),) = target.export(job, "out").files.items()

    assert isinstance(text, str)
    (tmp_path / name).write_text(text)
    again = scenario_from(tmp_path / name, {"cluster.preset": "dgx-h100"}).job
    assert comparable(again) == comparable(with_stages(job))


@pytest.mark.parametrize("configuration", REFUSED, ids=lambda configuration: configuration["name"])
def test_script_of_another_job_is_refused_with_its_reason(configuration: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(configuration["refused"])):
        scenario_from(script(configuration, tmp_path), _CLUSTER | configuration.get("add", {}))


def test_stages_of_which_most_would_be_empty_are_refused(tmp_path: Path) -> None:
    settings = {
        "--num-layers": 70, "--hidden-size": 64, "--num-attention-heads": 4, "--seq-length": 32,
        "--micro-batch-size": 1, "--pipeline-model-parallel-size": 10**12, "--account-for-loss-in-pipeline-split": True,
    }  # fmt: skip
    with refuses("--pipeline-model-parallel-size", rule="stages, and 70 blocks make at"):
        scenario_from(script({"name": "train", "settings": settings}, tmp_path), _CLUSTER)


@pytest.mark.parametrize("configuration", PUBLISHED, ids=lambda configuration: configuration["name"])
def test_script_of_a_published_run_is_predicted_as_the_run(configuration: dict[str, Any], tmp_path: Path) -> None:
    runs = read_published([ROOT / "scenarios" / "published" / "megatron_sc21_and_2020.yaml"])
    (run,) = (run for read in runs for run in read.runs or () if run.id == configuration["published"])
    job = scenario_from(script(configuration, tmp_path), _CLUSTER | configuration["add"]).job
    published = run.known_job

    of_script = simplan.predict(replace(without_clipping(job), cluster=published.cluster))
    expected = simplan.predict(published)

    assert of_script.step_time_s == pytest.approx(expected.step_time_s, rel=1e-3)
    memory = [prediction.memory[0].device_bytes for prediction in (of_script, expected)]
    assert memory[0] == pytest.approx(memory[1], rel=1e-3)


_JOBS = st.fixed_dictionaries(
    {
        "plan.tp": st.sampled_from([1, 2, 4]),
        "plan.pp": st.sampled_from([1, 2, 4]),
        "plan.cp": st.sampled_from([1, 2]),
        "plan.microbatch_size": st.sampled_from([1, 2]),
        "plan.recompute": st.sampled_from(["none", "full", "selective"]),
        "plan.grad_dtype": st.sampled_from(["bf16", "fp32"]),
        "training.precision": st.sampled_from(["bf16", "fp8"]),
        "software.grad_overlap": st.booleans(),
        "software.tp_overlap": st.sampled_from(["none", "backward", "all"]),
        "model": st.sampled_from(["llama3-8b", "mixtral-8x7b", "gpt3-175b", "deepseek-v2-lite", "qwen3-8b"]),
        "zero": st.booleans(),
        "interleaved": st.booleans(),
    }
)


@settings(max_examples=examples(15, 40), deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(_JOBS)
def test_any_job_of_megatron_core_comes_back_from_an_export(tmp_path_factory: Any, chosen: dict[str, Any]) -> None:
    model, zero, interleaved = (chosen.pop(key) for key in ("model", "zero", "interleaved"))
    software = {key: chosen.pop(key) for key in list(chosen) if key.startswith("software.")}
    split = {"plan.dp_replicate": 1, "plan.zero_stage": 1} if zero else {"plan.dp_shard": 1}
    stages = {"plan.virtual_stages": 2} if interleaved and chosen["plan.pp"] > 1 else {}
    overrides = {"cluster.preset": "dgx-h100", "cluster.num_nodes": 8, "software": "megatron-core", **software}
    try:
        job = make_job(model, {**overrides, **chosen, **split, **stages, "num_microbatches": 8})
    except SpecError:
        assume(False)  # a plan that rules refuse
    target = formats()["megatron"]
    assert target.export is not None
    ((_, text),) = target.export(job, "out").files.items()

    path = tmp_path_factory.mktemp("export") / "out.sh"
    assert isinstance(text, str)
    path.write_text(text)
    assert comparable(scenario_from(path, {"cluster.preset": "dgx-h100"}).job) == comparable(with_stages(job))


_FIELDS = {
    "ffn_hidden_size": "ffn_hidden_size", "swiglu": "gated_linear_unit", "fp8_format": "fp8", "fp4_format": "fp4",
    "num_experts": "num_moe_experts", "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "overlap_moe_expert_parallel_comm": "overlap_moe_expert_parallel_comm",
}  # fmt: skip
"""Argument -> field of TransformerConfig, where the names differ."""
_OF_THE_PROGRAM = {
    "use_mcore_models", "make_vocab_size_divisible_by", "seq_length", "max_position_embeddings", "vocab_size",
    "group_query_attention", "untie_embeddings_and_output_weights", "position_embedding_type", "micro_batch_size",
    "use_distributed_optimizer", "global_batch_size", "optimizer", "num_virtual_stages_per_pipeline_rank",
    "overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32",
    "disable_bias_linear", "no_async_tensor_model_parallel_allreduce",
}  # fmt: skip
"""Arguments of megatron/training/arguments.py (core_v0.16.0) that are no field of TransformerConfig."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("llama3-8b", {"plan.tp": 4, "plan.pp": 2, "plan.virtual_stages": 2, "plan.dp_shard": 1}),
        ("llama3-8b", {"plan.cp": 2, "plan.dp_replicate": 1, "plan.zero_stage": 1, "plan.recompute": "full"}),
        ("mixtral-8x7b", {"plan.ep": 8, "plan.dp_replicate": 1, "plan.zero_stage": 1, "plan.pp": 4}),
        (
            "deepseek-v3",
            {
                "plan.pp": 8, "plan.ep": 8, "plan.tp": 2, "plan.dp_replicate": 1, "plan.zero_stage": 1,
                "plan.stage_layers": [7, 8, 8, 8, 8, 8, 8, 6], "plan.recompute": "selective",
                "plan.recompute_modules": ["mla_up_proj", "moe_act"], "software.expert_dispatch": "deepep",
            },
        ),
        ("gpt3-175b", {"plan.tp": 8, "plan.pp": 4, "plan.dp_shard": 1, "plan.recompute": "full"}),
        ("qwen3-8b", {"plan.tp": 2, "plan.dp_replicate": 1, "plan.zero_stage": 1, "training.precision": "fp8"}),
    ],
)  # fmt: skip
def test_megatron_core_takes_the_arguments_of_an_export(model: str, overrides: dict[str, Any]) -> None:
    core = pytest.importorskip("megatron.core.transformer")
    known = {"cluster.preset": "dgx-h100", "cluster.num_nodes": 16, "software": "megatron-core"}
    job = make_job(model, {**known, "num_microbatches": 8, **overrides})
    write = formats()["megatron"].settings
    assert write is not None
    values = {option.setting.key.removeprefix("--").replace("-", "_"): option.setting.value for option in write(job)}
    ours = {key: value for key, value in values.items() if key not in _OF_THE_PROGRAM}
    kind = core.MLATransformerConfig if ours.get("multi_latent_attention") else core.TransformerConfig
    fields = {_FIELDS.get(key, key): value for key, value in ours.items()}
    if "moe_layer_freq" in fields:
        dense = job.model.num_dense_layers
        fields["moe_layer_freq"] = [0] * dense + [1] * (job.model.num_hidden_layers - dense)
    if fields.pop("pipeline_model_parallel_layout", None) is not None:
        layout = values["pipeline_model_parallel_layout"]
        fields["pipeline_model_parallel_layout"] = core.pipeline_parallel_layer_layout.PipelineParallelLayerLayout(
            layout, job.plan.pp
        )
    config = kind(**fields, pipeline_dtype=core.transformer_config.torch.bfloat16, apply_rope_fusion=False)

    assert config.num_layers == job.model.num_hidden_layers
    assert config.tensor_model_parallel_size == job.plan.tp
    assert config.pipeline_model_parallel_size == job.plan.pp


_SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --vocab-size 512"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--max-position-embeddings 32 --tensor_model_parallel_size 2", "write --tensor-model-parallel-size"),
        ("--max-position-embeddings 32 --tensor-model-parallel-size $TP", "which is not set in the script; add --tp 8"),
        ("--max-position-embeddings 32 --tensor-model-parallel-size $(nproc)", "the output of a command"),
        ("--max-position-embeddings 32 --pipeline-model-parallel-size 3", "3"),
        ("--max-position-embeddings 32 --optimizer soap", "--optimizer = .*is not modeled yet"),
        ("--max-position-embeddings many", "--max-position-embeddings = .*must be a whole number"),
        ("--max-position-embeddings 32 --swiglu --num-experts 4 --moe-layer-freq '__import__(1)'", "cannot be read"),
        ("--max-position-embeddings 32 --pipeline-model-parallel-layout 'Et|(t|)*9999999999'", "is a layout"),
        ("--max-position-embeddings 32 --yaml-cfg a.yaml", "name that file"),
        (
            "--num-experts 4 --swiglu --ffn-hidden-size 64 --moe-expert-capacity-factor x y",
            "must be a number",
        ),
        ('--max-position-embeddings 32 --bf16 "', "a quote is not closed"),
    ],
)
def test_wrong_arguments_give_a_sentence(arguments: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {_SMALL} {arguments}\n")

    with pytest.raises(SpecError, match=says):
        scenario_from(path, _CLUSTER)


def test_missing_values_of_a_script_are_asked_for_at_once(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        "python train.py --micro-batch-size 1 --tensor-model-parallel-size 2 --hidden-size 64 --num-layers 2\n"
    )

    with pytest.raises(SpecError) as caught:
        read_source(path, framework="megatron")

    fixes = [problem.fix for problem in caught.value.problems]
    options = ("--set model.vocab_size=128256", "--seq-len 4096", "--num-devices 64", "--cluster dgx-h100")
    assert fixes == [f"add {option}" for option in options]


def test_scripts_that_a_script_calls_are_read_from_its_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "start.sh").write_text("export TP=2\nbash pretrain_gpt.sh 4 'more args'\nbash ../outside.sh\n")
    (tmp_path / "outside.sh").write_text(f"torchrun x.py {_SMALL} --tensor-model-parallel-size 8\n")
    (folder / "pretrain_gpt.sh").write_text(
        f"#SBATCH --nodes=2\ntorchrun --nproc_per_node $1 --nnodes $# pretrain_gpt.py {_SMALL} "
        "--max-position-embeddings 32 --tensor-model-parallel-size $TP --bf16 ${2:+--swiglu}\n"
    )

    job = scenario_from(folder / "start.sh", _CLUSTER | {"cluster.num_devices": 4}).job

    assert (job.plan.tp, job.plan.dp_replicate) == (2, 2)


def test_scenario_with_arguments_in_its_comments_is_a_scenario(tmp_path: Path) -> None:
    """``simplan import`` writes such comments."""
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py --bf16 --num-layers 4 --hidden-size 512 "
        "--num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --vocab-size 1024 "
        "--micro-batch-size 1 --global-batch-size 16\n"
    )
    source = read_source(script, _CLUSTER)
    written = tmp_path / "scenario.yaml"
    written.write_text(source.text(tmp_path, "Megatron-LM arguments, for --num-layers and --hidden-size"))
    assert "--num-layers = " in written.read_text()
    assert load_scenario(written).job == read_source(written).scenario().job
    assert comparable(load_scenario(written).job) == comparable(source.scenario().job)


@pytest.mark.parametrize(("file", "size"), [("llama2/tokenizer.model", 32000), ("jp-tokenizer-100k.model", None)])
def test_vocabulary_of_another_sentencepiece_file_is_asked_for(file: str, size: int | None, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --bf16 --num-layers 4 --hidden-size 512 --num-attention-heads 8 "
        "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 16 "
        f"--tokenizer-type Llama2Tokenizer --tokenizer-model {file}\n"
    )
    if size is None:
        with pytest.raises(SpecError, match="does not say how many entries the vocabulary has"):
            read_source(script, _CLUSTER)
    else:
        assert scenario_from(script, _CLUSTER).job.model.vocab_size == size


def test_prescribed_algorithms_are_nccls_variable_and_come_back(tmp_path: Path) -> None:
    """The syntax by function is that of NCCL's environment variables; a choice between several is left to NCCL."""
    plan = {"plan.tp": 4, "plan.dp_replicate": 4, "software": "megatron-core", "training.global_batch_size": 64}
    forced = {"all_reduce": "tree", "all_gather": "nvls", "reduce_scatter": "ring"}
    job = scenario_from("llama3-8b", _CLUSTER | plan | {"cluster.num_nodes": 2, "plan.collectives": forced}).job
    target = formats()["megatron"]
    assert target.export is not None

    ((name, text),) = target.export(job, "out").files.items()

    assert "NCCL_ALGO='allreduce:tree;allgather:nvls;reducescatter:ring'" in str(text)
    file = tmp_path / name
    file.write_text(str(text))
    assert scenario_from(file, _CLUSTER).job.plan.collectives == job.plan.collectives
    for value, algorithms in (("Ring", ["ring"] * 3), ("Tree,Ring", None), ("^NVLS", None)):
        file.write_text(re.sub("NCCL_ALGO=\\S+", f"NCCL_ALGO={value}", str(text)))
        source = read_source(file, _CLUSTER)
        read = source.scenario().job.plan.collectives
        assert (read and [algorithm for _, algorithm in read.prescribed()]) == algorithms
        assert any("NCCL_ALGO" in note and "not modeled" in note for note in source.notes) == (algorithms is None)
    hierarchical = job.with_plan(job.plan.with_changes(collectives={"all_reduce": "hierarchical"}))
    with pytest.raises(NotModelledError, match="NCCL_ALGO has no hierarchical"):
        target.export(hierarchical, "out")


@pytest.mark.parametrize("experts", [False, True])
def test_every_pair_of_recomputed_modules_that_megatron_takes_is_taken(experts: bool, tmp_path: Path) -> None:
    """Megatron Core's checks of 0.16 and of August 2026 forbid none of these, present or not."""
    arguments = "torchrun --nproc_per_node 8 pretrain_gpt.py --use-mcore-models --bf16 --swiglu --disable-bias-linear "
    arguments += f"{_SMALL} --position-embedding-type rope --normalization RMSNorm --global-batch-size 64 "
    modules = ["core_attn", "layernorm", "mlp", "moe", "shared_experts", *(["moe_act"] if experts else [])]
    if experts:
        arguments += "--num-experts 8 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 "
        arguments += "--moe-grouped-gemm --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall "
    plan_of = {}
    for pair in combinations_with_replacement(modules, 2):
        path = tmp_path / "train.sh"
        path.write_text(f"{arguments} --recompute-granularity selective --recompute-modules {' '.join(pair)}\n")
        plan_of[pair] = scenario_from(path, _CLUSTER).job.plan

    assert plan_of["core_attn", "layernorm"].recompute_modules == (("core_attn", "layernorm") if experts else None)
    assert plan_of["core_attn", "core_attn"].recompute == "selective"
    assert plan_of["moe", "shared_experts"].recompute_modules == (("moe",) if experts else None)
    assert plan_of["mlp", "mlp"].recompute == ("none" if experts else "selective")


def test_notes_are_about_what_no_override_replaces(tmp_path: Path) -> None:
    """Settings without effect come in the order of the script, not in that of a set."""
    path = tmp_path / "train.sh"
    words = "--lr 1 \\\n --log-throughput \\\n --min-lr 0 \\\n --adam-beta1 0.9 \\\n --bf16 --log-interval 1"
    path.write_text(f"torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {_SMALL} {words}\n")
    (without,) = (note for note in read_source(path, _CLUSTER).notes if "no effect" in note)
    unused = ["--lr", "--log-throughput", "--min-lr", "--adam-beta1", "--log-interval"]
    assert without.rpartition(": ")[2].split(", ") == unused
    for overrides, is_kept in (({}, True), ({"cluster.num_devices": 8}, False)):
        notes = " ".join(read_source(path, _CLUSTER | overrides).notes)
        assert ("cluster.num_devices" in notes or "cluster.num_nodes" in notes) == is_kept


def test_settings_to_remove_are_those_of_the_script(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    words = "--max-position-embeddings 32 --bf16 \\\n --recompute-activations"
    path.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {_SMALL} {words}\n")
    source = read_source(path, _CLUSTER)
    assert source.configuration is not None
    job = source.scenario().job
    changed = changed_settings(source.configuration, job, job.with_changes({"plan.recompute": "none"}))
    assert [(change.key, change.after, change.line) for change in changed] == [("--recompute-activations", None, 2)]


@pytest.mark.parametrize("older", tables("megatron")["older_names"])
def test_older_names_are_shown_as_the_script_has_them(older: str, tmp_path: Path) -> None:
    today = tables("megatron")["older_names"][older]
    words = f"{_SMALL} --max-position-embeddings 32 --tensor-model-parallel-size 1 --bf16 ".replace(today, older)
    path = tmp_path / "train.sh"
    path.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {words}\n")
    assert older in words
    configuration = read_source(path, _CLUSTER).configuration
    assert configuration is not None
    assert older in configuration.names.values()
    assert not {today} & {*configuration.names.values()}
    path.write_text(re.sub(rf"{older} \d+", f"{older} -3", path.read_text()))
    with pytest.raises(SpecError, match=f"{older} = -3"):
        scenario_from(path, _CLUSTER)
    path.write_text(path.read_text().replace(f"{older} -3", f"{older} $NONE"))
    with pytest.raises(SpecError, match=rf"has {older} \$NONE"):
        scenario_from(path, _CLUSTER)
