"""Configurations of torchtitan: public ones read, jobs written and read again, torchtitan's own parser."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simplan import catalog
from simplan.document import Document
from simplan.errors import NotModelledError, SpecError
from simplan.interop.configuration import Setting
from simplan.interop.formats import formats
from simplan.interop.frameworks.torchtitan.reading import configuration_of
from simplan.interop.frameworks.torchtitan.settings import RunSettings, facts
from simplan.interop.frameworks.torchtitan.stages import generated_layers, generated_layers_of_2024
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.scenario.published.reading import read_published
from simplan.scenario.source import Source, read_source
from simplan.training import TrainingSpec
from tests.support.yaml_files import read_yaml

_PUBLIC: list[dict[str, Any]] = read_yaml(Path(__file__).parent / "configurations" / "torchtitan.yaml")
_READ = [configuration for configuration in _PUBLIC if "expect" in configuration]
_REFUSED = [configuration for configuration in _PUBLIC if "refused" in configuration]


def _toml(settings: dict[str, Any]) -> str:
    """TOML with one dotted key a line, in a layout of its own."""
    sections: dict[str, list[str]] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name}={json.dumps(value)}  # a comment = 1")
    return "".join(f"[ {section} ]\n" + "\n".join(lines) + "\n\n" for section, lines in sections.items())


def _arguments(settings: dict[str, Any]) -> str:
    words: list[str] = []
    for key, value in settings.items():
        option = f"--{key.replace('_', '-')}" if len(words) % 2 else f"--{key}"
        words.append(option if value is True else f"{option}={value}" if len(words) % 3 else f"{option} {value}")
    return " \\\n  ".join(words)


def written(case: dict[str, Any], folder: Path) -> Path:
    """File of a case: TOML, or a script that names TOML or a configuration."""
    if "launch" not in case:
        path = folder / "job.toml"
        path.write_text(_toml(case["settings"]), encoding="utf-8")
        return path
    launcher = " ".join(f"--{key} {value}" for key, value in case["launch"].items())
    if "file" in case:
        (folder / "configs").mkdir()
        (folder / "configs" / "job.toml").write_text(_toml(case["file"]), encoding="utf-8")
        named = "--job.config-file ./configs/job.toml"
    else:
        named = f"--module {case['module']} --config {case['config']}"
    path = folder / "launch.sh"
    text = f'srun torchrun {launcher} --rdzv_endpoint "$HEAD:29500" -m torchtitan.train {named} \\\n  '
    path.write_text(f'#!/bin/bash\n{text}{_arguments(case["settings"])} "$@"\n', encoding="utf-8")
    return path


def _chosen(job: Job, section: str, expected: dict[str, Any]) -> dict[str, Any]:
    values = {key: getattr(getattr(job, section), key) for key in expected}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


@pytest.mark.parametrize("case", _READ, ids=lambda case: case["name"])
def test_public_configuration_read(case: dict[str, Any], tmp_path: Path) -> None:
    source = read_source(written(case, tmp_path), case["add"])
    job, expected = source.scenario().job, dict(case["expect"])
    read = source.configuration
    assert read is not None
    assert [setting.key for setting in read.unknown] == expected.pop("unknown", [])
    assert {*expected.pop("not_modeled", [])} <= {setting.key for setting, _ in read.not_modeled}
    for section, values in expected.items():
        assert _chosen(job, section, values) == values


@pytest.mark.parametrize("case", _REFUSED, ids=lambda case: case["name"])
def test_public_configuration_refused(case: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        read_source(written(case, tmp_path), {"cluster.preset": "dgx-h100"})
    assert case["refused"] in str(error.value)


@pytest.mark.parametrize("case", _READ, ids=lambda case: case["name"])
def test_public_configuration_survives_round_trip(case: dict[str, Any], tmp_path: Path) -> None:
    job = read_source(written(case, tmp_path), case["add"]).scenario().job
    assert predict(job).step_time_s > 0
    if job.model.name not in catalog.names("models") and job.training.precision == "fp8":
        return
    if job.training.precision == "fp8":  # version 0.3 has no 405B that is not quantized, and version 0.2 no chunks
        job = job.with_changes({"software.loss": "whole", "software.cuda_graphs": False})
    target = "torchtitan-toml" if job.software.loss == "whole" else "torchtitan"
    exported = formats()[target].export(job, "again")  # type: ignore[misc]
    of_today = _under(job, "torchtitan")
    assert any("torchtitan-2024 is" in note for note in exported.notes) == (of_today != job)
    assert _again(exported.files, tmp_path, case) == of_today


def _under(job: Job, name: str) -> Job:
    """The job under another profile, with its options and its loss: eager in 2024, compiled in 2025."""
    options: dict[str, Any] = {option: getattr(job.software, option) for option in job.software.options}
    is_compiled = {"torchtitan-2024": False, "torchtitan-2025": True}.get(job.software.id, job.software.compiled)
    if is_compiled is not job.software.compiled:
        options["compiled_loss"] = is_compiled
    return replace(job, software=catalog.software(name).model_copy(update=options))


def _again(files: Any, folder: Path, case: dict[str, Any]) -> Job:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    cluster = {key: value for key, value in case["add"].items() if key == "cluster.preset"}
    return read_source(folder / "train.sh", cluster).scenario().job


_CLUSTER = catalog.cluster("dgx-h100", 64)
_PLANS = {
    "hsdp": ParallelPlan(dp_replicate=2, dp_shard=32, recompute="selective_op", microbatch_size=2),
    "ddp": ParallelPlan(dp_replicate=64, grad_sync="microbatch"),
    "kept": ParallelPlan(dp_shard=64, zero_stage=2),
    "context": ParallelPlan(dp_shard=8, cp=8, cp_comm="all_gather", recompute="full"),
    "tensor": ParallelPlan(dp_shard=8, tp=8, recompute="full", microbatch_size=2),
    "offload": ParallelPlan(dp_shard=64, offload_optimizer=True),
    "pipeline": ParallelPlan(
        pp=4,
        dp_shard=16,
        zero_stage=2,
        schedule="interleaved_1f1b",
        virtual_stages=2,
        stage_layers=(3, 4, 4, 5, 4, 4, 4, 4),
    ),
    "resharded": ParallelPlan(pp=4, dp_shard=2, tp=8, microbatch_size=2, stage_layers=(0, 11, 11, 10)),
    "v": ParallelPlan(pp=4, dp_shard=16, zero_stage=2, schedule="zb-v", stage_layers=(4,) * 8),
    "ddp-pipeline": ParallelPlan(pp=4, dp_replicate=16, schedule="gpipe", stage_layers=(8,) * 4),
}


def _job(plan: ParallelPlan, **training: Any) -> Job:
    batch = TrainingSpec(global_batch_size=256, clip_grad_norm=1.0, **training)
    return Job(catalog.model("llama3-8b"), _CLUSTER, batch, plan, catalog.software("torchtitan"))


@pytest.mark.parametrize("target", ["torchtitan", "torchtitan-toml"])
@pytest.mark.parametrize("name", _PLANS)
def test_exported_plan_read_again_is_equal(name: str, target: str, tmp_path: Path) -> None:
    job = _job(_PLANS[name])
    exported = formats()[target].export(job, name)  # type: ignore[misc]
    assert _again(exported.files, tmp_path, {"add": {"cluster.preset": "dgx-h100"}}) == job
    (option,) = [option for option in formats()["torchtitan"].settings(job) if option.comment == "plan.tp"]  # type: ignore[misc]
    assert (option.setting.key, option.setting.value) == ("parallelism.tensor_parallel_degree", job.plan.tp)


@pytest.mark.parametrize("target", ["torchtitan", "torchtitan-toml"])
def test_exported_pure_bf16_read_again_is_equal(target: str, tmp_path: Path) -> None:
    job = _job(ParallelPlan(dp_shard=64), pure_bf16=True)
    exported = formats()[target].export(job, "pure")  # type: ignore[misc]
    assert _again(exported.files, tmp_path, {"add": {"cluster.preset": "dgx-h100"}}) == job


@pytest.mark.parametrize(("target", "recipe"), [("torchtitan", "rowwise"), ("torchtitan-toml", "tensorwise")])
def test_exported_fp8_read_again_is_equal(target: str, recipe: str, tmp_path: Path) -> None:
    software = catalog.software("torchtitan").model_copy(update={"compiled": True, "tp_overlap": "all"})
    plan = ParallelPlan(dp_shard=8, tp=8, recompute="full")
    job = replace(_job(plan, precision="fp8", fp8_recipe=recipe), software=software)
    exported = formats()[target].export(job, "fp8")  # type: ignore[misc]
    assert _again(exported.files, tmp_path, {"add": {"cluster.preset": "dgx-h100"}}) == job


@pytest.mark.parametrize(
    ("parts", "blocks", "loss"), [(["loss"], False, True), (["model"], True, False), ([], False, None)]
)
def test_loss_compiled_apart_from_blocks_is_read(parts: list[str], blocks: bool, loss: bool, tmp_path: Path) -> None:
    """torchtitan 0.2.2, components/loss.py and models/deepseek_v3/train_configs: the head has the other one's layer."""
    settings = {"model.name": "deepseek_v3", "model.flavor": "16B", "compile.enable": True, "compile.components": parts}
    (tmp_path / "run.toml").write_text(_toml(settings))
    job = _read(tmp_path / "run.toml").scenario().job
    software = job.software
    assert (software.compiled, software.compiled_loss) == (blocks, loss)
    heads = {
        compiled: software.model_copy(update={"compiled": compiled, "compiled_loss": None}).layers_of(
            job.model, job.plan
        )
        for compiled in (True, False)
    }
    layers = software.layers_of(job.model, job.plan)
    assert [layer.operators for layer in layers[:-1]] == [layer.operators for layer in heads[blocks][:-1]]
    assert layers[-1].operators == heads[bool(loss)][-1].operators != heads[not loss][-1].operators


_PYTHON = '''
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.qwen3 import model_registry
from torchtitan.models.qwen3.config_registry import qwen3_14b

def base():
    """Docstring."""
    config = qwen3_14b()
    config.training.seq_len = 8192
    config.metrics = MetricsProcessor.Config(log_freq=1)
    config.activation_checkpoint = SelectiveAC.Config()
    return config

def mine():
    config = base()
    config.parallelism = ParallelismConfig(tensor_parallel_degree=4, data_parallel_shard_degree=4)
    config.training.local_batch_size = 3
    config.compile.enable = True
    config.training.unheard_of = 1
    return config

def loops():
    config = base()
    for _ in range(3):
        config.training.seq_len = 1
    return config

def calls():
    config = base()
    config.training.seq_len = __import__("os").system("touch pwned")
    return config
'''


def test_function_in_python_is_read_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab" / "configs").mkdir(parents=True)
    (tmp_path / "lab" / "configs" / "config_registry.py").write_text(_PYTHON)
    command = "torchrun --nproc_per_node 8 --nnodes 2 -m torchtitan.train --module lab.configs --config "
    (tmp_path / "mine.sh").write_text(f"{command}mine --training.local_batch_size 2")
    source = _read(tmp_path / "mine.sh")
    job = source.scenario().job
    assert job.model.name == "qwen3-14b"
    assert (job.model.seq_len, job.plan.microbatch_size, job.plan.recompute) == (8192, 2, "selective_op")
    assert (job.plan.tp, job.plan.dp_shard, job.software.title) == (
        4,
        4,
        "torchtitan, compiled, CUDA graphs, loss in chunks",
    )
    assert source.configuration is not None
    assert [setting.key for setting in source.configuration.unknown] == ["training.unheard_of"]
    for name, words in {"loops": r"in range\(3\)", "calls": "os", "gone": "has no function gone"}.items():
        (tmp_path / "bad.sh").write_text(command + name)
        with pytest.raises(SpecError, match=words):
            _read(tmp_path / "bad.sh")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("job", "target", "words"),
    [
        (_job(ParallelPlan(dp_shard=64, zero_stage=1)), "torchtitan-toml", "plan.zero_stage = 1: cannot be said in"),
        (_job(ParallelPlan(dp_shard=64), precision="fp8"), "torchtitan", "training.fp8_recipe = null"),
        (_job(ParallelPlan(dp_shard=64), precision="nvfp4"), "torchtitan-toml", 'training.precision = "nvfp4"'),
        (_job(ParallelPlan(dp_shard=64), optimizer="lamb"), "torchtitan", "use "),
        (_job(ParallelPlan(dp_shard=64, recompute="selective")), "torchtitan-toml", 'plan.recompute = "selective"'),
        (_job(ParallelPlan(dp_shard=64, offload_activations=True)), "torchtitan", "plan.offload_activations = true"),
        (_job(ParallelPlan(dp_shard=8, tp=8, sequence_parallel=False)), "torchtitan-toml", "plan.sequence_parallel"),
        (replace(_job(ParallelPlan(dp_shard=64)), model=catalog.model("gpt2-1.5b")), "torchtitan", "llama3 debugmodel"),
        (replace(_job(ParallelPlan(dp_shard=64)), software=catalog.software("torch")), "torchtitan", "--software"),
    ],
)
def test_choice_that_torchtitan_lacks_is_refused_by_name(job: Job, target: str, words: str) -> None:
    with pytest.raises(NotModelledError) as error:
        formats()[target].export(job, "job")  # type: ignore[misc]
    assert words in str(error.value)


def test_schedule_of_simplan_is_exported_as_computations(tmp_path: Path) -> None:
    """torch adds sends, all-gathers and reductions to a file, and refuses one that has them."""
    plan = ParallelPlan(pp=4, dp_shard=16, zero_stage=2, schedule="zb-h1", stage_layers=(8,) * 4)
    job = _job(plan)
    exported = formats()["torchtitan-toml"].export(job, "zb")  # type: ignore[misc]
    rows = str(exported.files["schedule.csv"]).splitlines()
    assert rows[3].startswith("3F0,3I0,3F1")
    assert all(cell[1] in "FIWB" for row in rows for cell in row.split(","))
    again = _again(exported.files, tmp_path, {"add": {"cluster.preset": "dgx-h100"}})
    assert again.plan.with_changes(schedule="zb-h1") == plan
    assert predict(again).step_time_s == pytest.approx(predict(job).step_time_s, rel=1e-12)


def test_generated_stages_are_those_of_torchtitan() -> None:
    """By hand from the two functions that generate them, whose sources the docstrings name."""
    assert generated_layers(32, 4) == (8, 9, 8, 7)  # 34 in 4 stages: 9, 9, 8, 8
    assert generated_layers(80, 16) == (5, 6, *(5,) * 13, 4)  # 82 in 16 stages: two of 6, the rest of 5
    assert generated_layers(126, 8) == (15, *(16,) * 6, 15)
    assert generated_layers_of_2024(126, 8) == (15, *(16,) * 6, 15)  # as torchtitan's 405B on 512 GPUs
    with pytest.raises(ValueError, match="too few"):
        generated_layers(2, 8)


_PAGE = Path(__file__).parents[2] / "scenarios" / "published" / "torchtitan.yaml"
_TITAN_RUNS = {run.id: run for file in read_published([_PAGE]) for run in file.runs or ()}


@pytest.mark.parametrize("name", _TITAN_RUNS)
def test_published_run_is_read_with_its_plan(name: str, tmp_path: Path) -> None:
    """Files with the settings that torchtitan's benchmark pages state, beside the runs of scenarios/published."""
    run = _TITAN_RUNS[name]
    job = run.known_job
    plan, year_2025 = job.plan, job.software.id == "torchtitan-2025"
    settings = _settings_of_run(run, job, new=year_2025)
    path = tmp_path / "run.toml"
    path.write_text(_toml(settings), encoding="utf-8")
    read = read_source(path, {"cluster.preset": "dgx-h100", "cluster.num_devices": job.cluster.num_devices})
    again = read.scenario().job
    if plan.pp > 1:  # the tables have ZeRO-3, and torchtitan keeps gathered parameters in pipelines (stages.py)
        plan = plan.with_changes(zero_stage=2)
    assert again.plan == plan
    assert (again.model.num_parameters, again.model.seq_len) == (job.model.num_parameters, job.model.seq_len)
    assert again.training.global_batch_size == job.training.global_batch_size
    assert again.training.precision == job.training.precision
    assert again.software == (_under(job, "torchtitan").software if year_2025 else job.software)


def _settings_of_run(run: Any, job: Job, *, new: bool) -> dict[str, Any]:
    name, flavor = next(
        (name, flavor)
        for name, flavors in facts().models.items()
        for flavor, fields in flavors.items()
        if fields.get("preset", "").replace("llama3.1-405b", "llama3-405b")
        == job.model.name.replace("llama3.1", "llama3")
    )
    degrees, batch = ("parallelism", "local_batch_size") if new else ("training", "batch_size")
    others = "parallelism" if new else "experimental"
    modes = {"selective_op": ("selective", "op"), "selective_layer": ("selective", "2")}
    mode, option = modes.get(job.plan.recompute, (job.plan.recompute, "2"))
    settings = {
        "model.name": name,
        "model.flavor": flavor,
        f"training.{batch}": job.plan.microbatch_size,
        "training.seq_len": job.model.seq_len,
        "training.compile": job.software.compiled,
        f"{degrees}.data_parallel_shard_degree": job.plan.dp_shard,
        f"{degrees}.data_parallel_replicate_degree": job.plan.dp_replicate,
        f"{degrees}.tensor_parallel_degree": job.plan.tp,
        f"{others}.context_parallel_degree": job.plan.cp,
        "activation_checkpoint.mode": mode,
        "activation_checkpoint.selective_ac_option": option,
    }
    if job.plan.pp > 1:
        schedule = {"1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}[job.plan.schedule]
        number = job.num_microbatches
        settings[f"training.{batch}"] = number * job.plan.microbatch_size
        settings[f"{others}.pipeline_parallel_degree"] = job.plan.pp
        settings[f"{others}.pipeline_parallel_schedule"] = schedule
        settings[f"{others}.pipeline_parallel_microbatches"] = number
    if job.software.tp_overlap == "all":
        settings[f"{others}.enable_async_tensor_parallel"] = True
    if job.training.precision == "fp8" and new:
        settings |= {"model.converters": ["float8"], "float8.filter_fqns": ["output"]}
        settings |= {"float8.recipe_name": job.training.fp8_recipe or "tensorwise"}
    elif job.training.precision == "fp8":
        settings["float8.enable_float8_linear"] = True
    return settings


_BAD = {
    "half a file": ("job.toml", "[model]\nname = ", "this is not TOML"),
    "variable of a script": ("job.toml", "[training]\nseq_len = $SEQ\n[model]\n", "this is not TOML"),
    "text for a degree": (
        "job.toml",
        '[model]\nname="llama3"\n[parallelism]\ntensor_parallel_degree="8"\n',
        "whole number",
    ),
    "degrees that do not divide": (
        "run.sh",
        "torchrun --nproc_per_node 8 --nnodes 1 -m torchtitan.train --module llama3 --config llama3_8b "
        "--parallelism.tensor_parallel_degree 3",
        "starts 8 ranks",
    ),
    "batch that does not divide": (
        "job.toml",
        "[model]\n[training]\nlocal_batch_size=3\nglobal_batch_size=32\n[parallelism]\ndata_parallel_shard_degree=4\n",
        "must be a multiple of local batch x data-parallel ranks = 3 x 4",
    ),
    "microbatch that does not divide": (
        "job.toml",
        "[model]\n[training]\nlocal_batch_size=4\n[parallelism]\npipeline_parallel_degree=2\n"
        "pipeline_parallel_microbatch_size=3\n",
        "must divide training.local_batch_size = 4",
    ),
    "stages out of order": (
        "job.toml",
        "[model]\n[parallelism]\npipeline_parallel_degree=2\nmodule_fqns_per_model_part="
        '[["tok_embeddings", "layers.1"], ["layers.0", "norm", "output"]]\n',
        "do not have the blocks 0 to 5",
    ),
    "schedule of torch alone": (
        "job.toml",
        '[model]\n[parallelism]\npipeline_parallel_degree=2\npipeline_parallel_schedule="LoopedBFS"\n',
        "is not modeled yet",
    ),
    "value from outside": (
        "run.sh",
        "torchrun -m torchtitan.train --module llama3 --config llama3_8b --training.seq_len $SEQ_LEN",
        "is not set in the script",
    ),
    "command in a value": (
        "run.sh",
        "torchrun -m torchtitan.train --job.config_file $(touch pwned; echo x.toml)",
        "is the output of a command, which simplan does not run",
    ),
    "missing file": ("run.sh", "torchrun -m torchtitan.train --job.config_file gone.toml", "is neither in"),
    "unknown configuration": (
        "run.sh",
        "MODULE=llama3 CONFIG=llama3_9b ./run_train.sh",
        "did you mean llama3_8b",
    ),
    "other module": (
        "run.sh",
        "torchrun -m torchtitan.train --module mine --config x",
        "is neither a module of torchtitan 0.3",
    ),
    "a list where a name is": (
        "run.sh",
        "torchrun -m torchtitan.train --module llama3 --config one two",
        "--config = ['one', 'two']: is no configuration of llama3",
    ),
    "nothing to start": (
        "run.sh",
        "# torchtitan.train\necho --module llama3 --config llama3_8b\n",
        "no command of it starts",
    ),
    "deep": ("job.toml", "[training]\n[model]\nx=" + "[" * 3000, "nested too deeply"),
    "Python": (
        "mine.py",
        "from torchtitan.models.llama3.config_registry import llama3_8b\n",
        "--module mine --config NAME",
    ),
    "key of a later version": (
        "run.sh",
        "torchrun -m torchtitan.train --module llama3 --config llama3_8b --training.max_context_length 8192",
        "is of a version after 0.3",
    ),
}


@pytest.mark.parametrize("name", _BAD)
def test_bad_file_is_one_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, text, words = _BAD[name]
    (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as error:
        read_source(file, {"cluster.preset": "dgx-h100"})
    assert words in str(error.value)
    assert not (tmp_path / "pwned").exists()


_STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -7, 3, 10**30, 2.5, float("nan"), "", "x", "8", [], [1], [["a"], [1]], {"a": 1}, [[]],
)  # fmt: skip


@pytest.mark.parametrize(
    "others",
    [{}, {"parallelism.pipeline_parallel_degree": 2}, {"model.converters": ["float8"], "training.compile": True}],
    ids=["plain", "pipeline", "fp8"],
)
def test_strange_value_of_any_key_is_an_error_or_a_job(others: dict[str, Any]) -> None:
    """No traceback; a value that the reader takes is checked again by the scenario."""
    for key in [*facts().defaults, *facts().aliases]:
        for value in _STRANGE:
            settings = {"model.name": "llama3", "model.flavor": "8B"} | others | {key: value}
            listed = [Setting(name, value, 1) for name, value in settings.items()]
            try:
                read = configuration_of(RunSettings.of("torchtitan", "job.toml", listed))
                source = Source(Document({**read.document.data, "cluster": "dgx-h100"}, {}), "job.toml", (), {})
                source.scenario()
            except SpecError:
                continue


def test_script_with_two_trainings_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("CONFIG=llama3_8b ./run_train.sh\nCONFIG=llama3_70b ./run_train.sh\n")
    with pytest.raises(SpecError, match=r"2 trainings with different arguments \(lines 1, 2\)"):
        read_source(script, {"cluster.preset": "dgx-h100"})


def test_run_train_takes_its_variables(tmp_path: Path) -> None:
    path = tmp_path / "go.sh"
    path.write_text("export NGPU=16\nMODULE=qwen3 CONFIG=qwen3_14b ./run_train.sh --training.seq_len 8_192 $@\n")
    source = _read(path)
    job = source.scenario().job
    assert (job.cluster.num_devices, job.model.name, job.model.seq_len) == (16, "qwen3-14b", 8192)
    assert job.plan.recompute == "full"
    assert source.configuration is not None
    assert source.configuration.origins["cluster.num_devices"] == "16 (NGPU)"


def test_nccl_algorithms_of_a_script_are_prescribed(tmp_path: Path) -> None:
    path = tmp_path / "go.sh"
    path.write_text("export NCCL_ALGO=Ring\nexport NGPU=16\nMODULE=llama3 CONFIG=llama3_8b ./run_train.sh\n")
    collectives = _read(path).scenario().job.plan.collectives
    assert collectives is not None
    assert [*collectives.prescribed()] == [(kind, "ring") for kind in ("all_reduce", "all_gather", "reduce_scatter")]


def _read(path: Path) -> Source:
    return read_source(path, {"cluster.preset": "dgx-h100"})


@pytest.mark.parametrize("name", ["pipeline", "tensor", "hsdp"])
def test_exported_arguments_pass_torchtitan(name: str, tmp_path: Path) -> None:
    """The words that bash gives torchrun, read by torchtitan's own configuration."""
    pytest.importorskip("torchtitan.models.llama3.config_registry", exc_type=ImportError)
    from torchtitan.config.manager import ConfigManager  # type: ignore[import-not-found,unused-ignore]

    job = _job(_PLANS[name])
    script = str(formats()["torchtitan"].export(job, name).files["train.sh"])  # type: ignore[misc]
    printed = subprocess.run(
        ["bash", "-c", script.replace("\ntorchrun", "\nprintf '%s\\n' torchrun")],
        capture_output=True,
        text=True,
        check=True,
    )
    words = printed.stdout.splitlines()
    arguments = words[words.index("torchtitan.train") + 1 :]
    arguments[arguments.index("--hf_assets_path") + 1] = str(tmp_path)
    config = ConfigManager().parse_args(arguments)
    plan, parallelism = job.plan, config.parallelism
    assert config.model_spec.flavor == "8B"
    assert parallelism.tensor_parallel_degree == plan.tp
    assert parallelism.data_parallel_shard_degree == plan.dp_shard
    assert parallelism.pipeline_parallel_degree == plan.pp
    assert config.training.local_batch_size == 256 // plan.dp if plan.pp > 1 else plan.microbatch_size
    assert type(config.activation_checkpoint).__qualname__ == (
        "NoneType" if plan.recompute == "none" else f"{'FullAC' if plan.recompute == 'full' else 'SelectiveAC'}.Config"
    )
    if plan.pp > 1:
        assert [sum("layers." in name for name in part) for part in parallelism.module_fqns_per_model_part] == [
            *(plan.stage_layers or ())
        ]


def test_named_configurations_are_those_of_torchtitan() -> None:
    """Every configuration of version 0.3 that can be built without a GPU, field by field."""
    registry = pytest.importorskip("torchtitan.models.llama3.config_registry", exc_type=ImportError)
    import importlib

    for module, configurations in facts().configurations.items():
        registry = importlib.import_module(f"torchtitan.models.{module}.config_registry")
        for name, settings in configurations.items():
            if "model.converters" in settings:
                continue  # quantization needs a GPU
            config = getattr(registry, name)()
            assert config.model_spec.flavor == settings["model.flavor"]
            for section in ("training", "parallelism", "compile"):
                default = type(getattr(config, section))()
                for key in ("local_batch_size", "seq_len", "disable_cuda_graphs", "enable", "components"):
                    _compare(config, section, key, settings, default)
                for key in ("tensor_parallel_degree", "expert_parallel_degree", "pipeline_parallel_schedule"):
                    _compare(config, section, key, settings, default)
            mode = {"FullAC.Config": "full", "SelectiveAC.Config": "selective", "NoneType": "none"}
            wanted = settings.get("activation_checkpoint.mode", "selective")
            assert mode[type(config.activation_checkpoint).__qualname__] == wanted


def _compare(config: Any, section: str, key: str, settings: Any, default: Any) -> None:
    if hasattr(default, key):
        wanted = settings.get(f"{section}.{key}", getattr(default, key))
        assert getattr(getattr(config, section), key) == wanted, f"{section}.{key}"
