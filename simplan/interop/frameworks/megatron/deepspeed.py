"""JSON of ``--deepspeed_config``, which DeepSpeed's engine obeys where Megatron-DeepSpeed's arguments say otherwise.

Keys, defaults and meanings: deepspeed 0.19.8, runtime/config.py, runtime/zero/config.py and runtime/engine.py;
deepspeedai/Megatron-DeepSpeed at 4efb479, megatron/training.py and megatron/optimizer/__init__.py (clipping is the
engine's alone).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from simplan.errors import file_error
from simplan.interop.configuration import Setting
from simplan.interop.formats import ConfigFile
from simplan.interop.frameworks.hugging_face.keys import Keys, flattened, named_document, whole

if TYPE_CHECKING:  # a reading calls these functions
    from simplan.interop.frameworks.megatron.reading import MegatronReading

OPTION = "--deepspeed_config"
_SECTIONS = (
    "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16",
    "fp16", "bfloat16", "optimizer", "gradient_clipping", "data_types",
)  # fmt: skip
"""Keys of which every configuration of DeepSpeed has one."""
_NO_PIPELINE = "--no-pipeline-parallel"
_ULYSSES = "--ds-sequence-parallel-size"
_DEFAULT = "the default of DeepSpeed, whose engine clips"
_DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def settings_of_file(file: ConfigFile, settings: Iterable[Setting]) -> Iterator[tuple[str, Setting]]:
    """Settings of the JSON that the arguments name, by their keys within it; none if it is not next to the script.

    Raises:
        SpecError: The file holds no configuration of DeepSpeed.
    """
    name = next((str(setting.value) for setting in settings if setting.key == OPTION), "")
    named = named_document(name, file) if name else None
    if named is None:
        return
    name, document = named
    if not {*_SECTIONS} & document.data.keys():
        what = f"this is no DeepSpeed configuration, and the script gives it as {OPTION}"
        raise file_error(name, what, f"give one that has {_SECTIONS[0]}")
    yield from flattened(document, name)


def read_deepspeed(reading: MegatronReading) -> None:
    """Read stage, offloading, precision, batch and clipping of the JSON, and compare them with the arguments."""
    keys = Keys(reading, reading.deepspeed)
    stages = reading.peek("--pipeline-model-parallel-size", 1)
    if _NO_PIPELINE in reading and stages != 1:
        rule = f"goes with one pipeline stage, and --pipeline-model-parallel-size is {stages}"
        reading.contradiction(_NO_PIPELINE, rule, "remove one of them")
    reading.no_effect(_NO_PIPELINE)
    if reading.value(_ULYSSES, 1) != 1:
        reading.refuse(_ULYSSES, "is not modeled: sequence parallelism of DeepSpeed-Ulysses", "use 1")
    if not keys:
        _read_stage_of_arguments(reading)
        return
    reading.value(OPTION)
    _read_stage(reading, keys)
    _read_offload(keys)
    _read_dtypes(reading, keys)
    _compare(reading, keys, "train_micro_batch_size_per_gpu", "--micro-batch-size")
    _compare(reading, keys, "train_batch_size", "--global-batch-size")
    _check_accumulation(reading, keys)
    _compare(reading, keys, "gradient_clipping", "--clip-grad")
    norm = keys.value("gradient_clipping", 0)
    if isinstance(norm, int | float) and norm > 0:
        keys.put("training.clip_grad_norm", float(norm), "gradient_clipping")
    elif "--clip-grad" in reading:
        reading.not_modeled("--clip-grad", f"gradients are not clipped ({_DEFAULT}, and its JSON has no such key)")
    keys.view(("zero_optimization.",)).note("zero")
    keys.note("deepspeed")
    keys.sort_rest("deepspeed")


def _read_stage_of_arguments(reading: MegatronReading) -> None:
    """The stage of a script whose JSON is not there."""
    key, name = "--zero-stage", reading.value(OPTION)
    if key in reading:
        _put_stage(reading, reading.value(key), key)
        what = f"{name} is not next to the script: offloading, clipping and dtypes are DeepSpeed's defaults here"
        reading.not_modeled(OPTION, what)
    elif not reading.is_unsure(key):
        where = (
            f"of {OPTION}, {name}, which is not next to the script" if name else f"of {OPTION}, which it does not name"
        )
        what = f"has its ZeRO stage in the JSON {where}"
        reading.ask("plan.zero_stage", what=what, fix="put it there, or add --set plan.zero_stage=1")


def _read_stage(reading: MegatronReading, keys: Keys) -> None:
    key, stage = "zero_optimization.stage", whole(keys.value("zero_optimization.stage", 0))
    given_stage = whole(reading.value("--zero-stage"))
    if stage not in (0, 1, 2, 3):
        keys.refuse(key, "is no stage of ZeRO", "use 0, 1, 2 or 3")
    elif given_stage is not None and given_stage != stage:
        rule = f"contradicts the JSON of {OPTION}, which has stage {stage} ({keys.full(key)})"
        reading.contradiction("--zero-stage", rule, "give both one stage")
    else:
        _put_stage(reading, stage, keys.full(key) if key in keys else f"the default of DeepSpeed, without {key}")


def _put_stage(reading: MegatronReading, stage: object, key: str) -> None:
    if stage == 0 and "--bf16" in reading:
        why = f"with --bf16, whose optimizer in DeepSpeed shards its states at stage 0 ({key})"
        reading.put("plan.zero_stage", 1, why)
        reading.put("plan.dp_replicate", 1, "BF16_Optimizer shards over all data-parallel ranks")
    else:
        reading.put("plan.zero_stage", stage, key)
        reading.put("plan.dp_replicate" if stage != 0 else "plan.dp_shard", 1, f"with ZeRO stage {stage}")


def _read_offload(keys: Keys) -> None:
    for what in ("optimizer", "param"):
        key = f"zero_optimization.offload_{what}.device"
        if str(keys.value(key, "none")).lower() != "none":
            stores = "optimizer states" if what == "optimizer" else "parameters"
            fix = "remove it, or predict the same model with software: deepspeed"
            keys.refuse(key, f"stores {stores} on the host, which is not modeled yet for Megatron-DeepSpeed", fix)
    if keys.is_true("zero_optimization.cpu_offload"):
        rule = "stores optimizer states on the host, which is not modeled yet for Megatron-DeepSpeed"
        keys.refuse("zero_optimization.cpu_offload", rule, "remove it")


def _read_dtypes(reading: MegatronReading, keys: Keys) -> None:
    for name, words in (("bf16", ("bf16.enabled", "bfloat16.enabled")), ("fp16", ("fp16.enabled",))):
        key, option = keys.first(*words), f"--{name}"
        if key is None or reading.is_unsure(option) or keys.is_true(key) == (option in reading):
            continue
        says = f"contradicts the script, which {'has' if option in reading else 'does not have'} {option}"
        reading.contradiction(keys.full(key), says, f"enable {name} in both, or in neither")
    key = "data_types.grad_accum_dtype"
    dtype_name, wide = keys.value(key), next((half for half in ("bf16", "fp16") if f"--{half}" in reading), "fp32")
    dtype = _DTYPES.get(str(dtype_name))
    if dtype_name is not None and dtype is None:
        keys.refuse(key, "is no precision of gradients", "use fp32, bf16 or fp16")
    elif dtype is not None and dtype != wide:
        keys.put("plan.grad_dtype", dtype, key)


def _compare(reading: MegatronReading, keys: Keys, key: str, option: str) -> None:
    value = keys.value(key)
    if value is not None and option in reading and reading.peek(option) != value:
        rule = f"contradicts the script, which has {option} {reading.peek(option)}"
        reading.contradiction(keys.full(key), rule, "give both one value")
    elif value is not None:
        reading.value(option)


def _check_accumulation(reading: MegatronReading, keys: Keys) -> None:
    """DeepSpeed stops if the batch is not its three factors (runtime/config.py, _batch_assertion)."""
    key = "gradient_accumulation_steps"
    steps, devices = whole(keys.value(key)), reading.arguments.num_devices
    batch, micro = reading.peek("--global-batch-size"), reading.peek("--micro-batch-size", 1)
    degrees = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")
    sizes = [reading.peek(degree, 1) for degree in degrees]
    if (
        steps is None
        or devices is None
        or not all(type(number) is int and number > 0 for number in (batch, micro, *sizes))
    ):
        return
    ranks = devices // (sizes[0] * sizes[1])
    if ranks and steps * micro * ranks != batch:
        rule = f"times --micro-batch-size {micro} and {ranks} data-parallel ranks is not --global-batch-size {batch}"
        reading.contradiction(keys.full(key), rule, f"use {batch // (micro * ranks) or 1}, or remove it")
