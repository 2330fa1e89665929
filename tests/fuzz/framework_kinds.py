"""Damaged configurations of frameworks: public ones, which commands read as scenarios, search from, and write again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.fuzz.campaign import Case, Kind
from tests.fuzz.mutation import Mutator
from tests.interop import public
from tests.interop.test_megatron import script
from tests.interop.test_torchtitan import written
from tests.interop.test_trainer_runs import write

_COMMANDS = ("import",) * 18 + ("predict",) * 3 + ("export", "export", "search")
_PREDICTED = {
    "megatron": {"gpt-345m", "llama-1.5b-deepspeed", "qwen2.5-0.5b-pai", "zero-bubble"},
    "nemo": {"gpt3-126m", "mistral-mistral_7b"},
    "bridge": {"llama3.2-1b-dump", "llama32-1b-pretrain", "llama32-1b-finetune", "llama3-8b-fsdp"},
    "torchtitan": {"llama3 8B", "llama3 debug model", "llama3 8B of June 2025", "H200 benchmark", "python"},
    "deepspeed": {"lf_z2", "lf_z3_offload", "ax_zero1", "acc_zero_stage3_config", "minicpm_zero2"},
    "accelerate": {"trl_fsdp2", "trl_deepspeed_zero1", "trl_context_parallel_2gpu", "ah_zero3"},
    "trainer": {"llamafactory_qwen3_full", "llamafactory_qwen3_lora", "zephyr_sft_full", "axolotl_llama3_fft_fsdp"},
}  # fmt: skip
"""Small configurations: a prediction of one takes less than 0.1 s."""
_TARGETS = ("megatron", "bridge", "torchtitan", "torchtitan-toml", "deepspeed", "accelerate", "slurm")
_OWN_TARGETS = {
    "nemo": ("megatron",), "torchtitan": ("torchtitan", "torchtitan-toml"),
    "trainer": ("accelerate", "deepspeed"),
}  # fmt: skip
_SPACE = (
    "model.num_hidden_layers=2", "search.tp=[1]", "search.pp=[1]", "search.microbatch_size=[1]",
    "search.recompute=[none]",
)  # fmt: skip
_PYTHON = """\
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b

def base():
    config = llama3_8b()
    config.training.local_batch_size = 2
    config.activation_checkpoint = SelectiveAC.Config()
    return config

def mine():
    config = base()
    config.parallelism = ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=4)
    config.activation_checkpoint = FullAC.Config()
    config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(filter_fqns=["lm_head"])])
    config.compile.enable = True
    return config
"""

Write = Callable[[dict[str, Any], Path], Path]
"""Writes the files of a case into a folder; returns the one that a command gets."""


def _torchtitan(case: dict[str, Any], folder: Path) -> Path:
    if case["name"] != "python":
        return written(case, folder)
    package = folder / "lab"
    package.mkdir()
    (package / "config_registry.py").write_text(_PYTHON, encoding="utf-8")
    file = folder / "launch.sh"
    file.write_text("torchrun --nproc_per_node 8 -m torchtitan.train --module lab --config mine\n", encoding="utf-8")
    return file


_WRITERS: dict[str, Write] = {
    "megatron": script,
    "nemo": public.written,
    "bridge": public.written,
    "torchtitan": _torchtitan,
    "deepspeed": lambda case, folder: write(folder, "deepspeed", case),
    "accelerate": lambda case, folder: write(folder, "accelerate", case),
    "trainer": lambda case, folder: write(folder, "trainer", case),
}
CASES = {framework: tuple(public.cases(framework)) for framework in _WRITERS}
CASES["torchtitan"] += ({"name": "python", "add": {"cluster.preset": "dgx-h100"}},)


@cache
def _texts(framework: str, number: int) -> tuple[str, dict[str, str]]:
    """File that a command gets, and all files of a case without damage: path in the folder -> text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = _WRITERS[framework](CASES[framework][number], folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        texts = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in files}
        return str(path.relative_to(folder)), texts


def _damaged(framework: str, number: int, mutator: Mutator, folder: Path) -> Path:
    """Files of a case, one of them damaged: settings that a script or TOML has, values of YAML and JSON, or text."""
    written, texts = _texts(framework, number)
    case = CASES[framework][number]
    if not written.endswith((".yaml", ".json")) and case.get("settings") and mutator.choice((True, True, False)):
        with suppress(AttributeError):  # no mapping: nothing to write
            return _WRITERS[framework](case | {"settings": mutator.changed(case["settings"])}, folder)
    damaged = mutator.choice(tuple(texts))
    for name, text in texts.items():
        if name == damaged:
            suffix = Path(name).suffix
            damage = {".yaml": mutator.yaml, ".json": mutator.json}.get(suffix, mutator.damaged)
            text = damage(text)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return folder / written


def _make(framework: str, mutator: Mutator, folder: Path) -> Case:
    cases = CASES[framework]
    command = mutator.choice(_COMMANDS)
    some = [at for at, case in enumerate(cases) if command == "import" or case["name"] in _PREDICTED[framework]]
    number = mutator.choice(tuple(some))
    file = _damaged(framework, number, mutator, folder)
    settings = public.CLUSTER | cases[number].get("add", {})
    space = _SPACE if command == "search" else ()
    sets = [
        word
        for setting in (*(f"{key}={value}" for key, value in settings.items()), *space)
        for word in ("--set", setting)
    ]
    out = folder / ("exported" if command == "export" else "out.yaml")
    options = {
        "import": mutator.choice(([], ["--json"], ["-o", str(out)])),
        "predict": ["--json"],
        "export": ["--to", mutator.choice((*_TARGETS, *_OWN_TARGETS.get(framework, (framework,)) * 4)), "-o", str(out)],
        "search": ["--from-current", "--jobs", "1"],
    }[command]
    return [command, str(file), *sets, *options], out if "-o" in options else None


FRAMEWORK_KINDS = tuple(Kind(framework, partial(_make, framework)) for framework in _WRITERS)
