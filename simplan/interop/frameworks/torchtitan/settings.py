"""Settings of torchtitan under one name each, whatever version they are of, with its defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from simplan.interop.configuration import Reading, Setting
from simplan.problems import render_value

_PIPELINE = ("degree", "split_points", "schedule", "schedule_csv", "microbatches")
ALIASES: Mapping[str, str] = {
    # until the end of 2024 (pytorch/torchtitan at 3f20451, torchtitan/config_manager.py)
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    **{f"experimental.pipeline_parallel_{key}": f"parallelism.pipeline_parallel_{key}" for key in _PIPELINE},
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.context_parallel_rotate_method": "parallelism.context_parallel_rotate_method",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "float8.enable_float8_linear": "float8.enable_float8_linear",
    # 2025 (6b11290c1, torchtitan/config_manager.py)
    **{
        f"float8.{key}": f"quantize.linear.float8.{key}"
        for key in (
            "enable_fsdp_float8_all_gather",
            "precompute_float8_dynamic_scale_for_fsdp",
            "force_recompute_fp8_weight_in_bwd",
            "recipe_name",
            "filter_fqns",
            "emulate",
        )
    },
    "float8.moe_fqns_prototype": "quantize.grouped_mm.float8.fqns",
    "float8.moe_fqns": "quantize.grouped_mm.float8.fqns",
    **{f"mx.{key}": f"quantize.linear.mx.{key}" for key in ("recipe_name", "filter_fqns")},
    # 0.3 (torchtitan/config/configs.py, manager.py)
    "module": "model.name",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "parallelism.pipeline_parallel_module_fqns_per_model_part": "parallelism.module_fqns_per_model_part",
}
"""Keys of other versions -> key by which simplan reads and writes them."""
_OLD = (
    "training.tensor_parallel_degree", "training.data_parallel", "float8.enable_float8_linear",
    "experimental.pipeline_parallel", "experimental.context_parallel", "experimental.enable_async",
)  # fmt: skip
"""Beginnings of keys that were renamed in March 2025 (785c34c99, the section ``parallelism``), or before."""

DEFAULTS: Mapping[str, Any] = {
    "model.name": "llama3",
    "model.flavor": "debugmodel",
    "model.converters": (),
    "training.local_batch_size": 8,
    "training.global_batch_size": -1,
    "training.seq_len": 2048,
    "training.max_norm": 1.0,
    "training.dtype": "float32",
    "training.mixed_precision_param": "bfloat16",
    "training.enable_cpu_offload": False,
    "optimizer.name": "AdamW",
    "optimizer.implementation": "fused",
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.fsdp_reshard_after_forward": "default",
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.enable_sequence_parallel": True,
    "parallelism.disable_loss_parallel": False,
    "parallelism.enable_async_tensor_parallel": False,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.pipeline_parallel_schedule_csv": "",
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "parallelism.pipeline_parallel_first_stage_less_layers": 1,
    "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.context_parallel_rotate_method": "allgather",
    "parallelism.expert_parallel_degree": 1,
    "parallelism.expert_tensor_parallel_degree": 1,
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "2",
    "compile.enable": False,
    "compile.components": ("model", "loss"),
    "loss": "chunked",
    **dict.fromkeys((
        "compile.backend", "float8.enable_float8_linear", "optimizer.fused",
        "parallelism.context_parallel_load_balancer", "parallelism.expert_parallel_comm_backend",
        "parallelism.module_fqns_per_model_part", "parallelism.pipeline_parallel_layers_per_stage",
        "parallelism.pipeline_parallel_microbatches", "parallelism.pipeline_parallel_split_points",
        "quantize.linear.float8.filter_fqns", "quantize.linear.float8.recipe_name", "training.disable_cuda_graphs",
    )),
}  # fmt: skip
"""Keys that simplan reads, with torchtitan's defaults (238fa9953, torchtitan/config/job_config.py; 0.3.0,
torchtitan/config/configs.py); None for those without."""
OF_2024: Mapping[str, Any] = {"optimizer.implementation": "foreach", "compile.components": ("model",)}
"""Other defaults at the end of 2024 (3f20451; the optimizer is fused since 6e4988550, 2025-02-24)."""
VERSION_0_3: Mapping[str, Any] = {"activation_checkpoint.selective_ac_option": "op"}
"""Other defaults of version 0.3, where SelectiveAC is per operation."""


@dataclass(slots=True)
class RunSettings:
    """Settings of a run by their canonical keys: those of the file, of the configuration that it names, and defaults.

    Attributes:
        reading: RunSettings under the keys that the file has.
        names: Canonical key -> key of the file.
        named: RunSettings of the configuration that the command names.
        name: Name of that configuration; empty for none.
        is_of_2024: True for keys that were renamed by March 2025.
    """

    reading: Reading
    names: Mapping[str, str]
    named: Mapping[str, Any]
    name: str
    is_of_2024: bool

    @classmethod
    def of(
        cls, title: str, file: str, settings: Iterable[Setting], named: Mapping[str, Any] | None = None, name: str = ""
    ) -> RunSettings:
        """Settings of a file, of which the last one of a key counts.

        Args:
            named: RunSettings of the configuration that the command names; None before version 0.3.
        """
        by_key: dict[str, Setting] = {}
        for setting in settings:
            key = ALIASES.get(setting.key, setting.key)
            by_key.pop(key, None)
            by_key[key] = setting
        names = {key: setting.key for key, setting in by_key.items()}
        reading = Reading.of(title, file, by_key.values())
        old = any(key.startswith(_OLD) for key in names.values())
        layers = {} if named is None else {**VERSION_0_3, **named}
        return cls(reading, names, layers, name, old and named is None)

    def __contains__(self, key: str) -> bool:
        """True if the file or the named configuration has the key."""
        return key in self.names or key in self.named

    def __getitem__(self, key: str) -> Any:
        """Value of a canonical key, which counts as read from here on; None if there is no default either."""
        if key in self.names:
            return self.reading.value(self.names[key])
        if key in self.named:
            return self.named[key]
        return (OF_2024 if self.is_of_2024 and key in OF_2024 else DEFAULTS).get(key)

    def key(self, key: str) -> str:
        """Key in the words of the file, or its canonical name."""
        return self.names.get(key, key)

    def word(self, key: str) -> str | None:
        """Value of a key that is text; its rendered value else, which no table has."""
        value = self[key]
        return value if isinstance(value, str | None) else render_value(value)

    def put(self, path: str, value: Any, key: str) -> None:
        """Give a key of the scenario the value that a setting gives."""
        if key in self.names:
            self.reading.put(path, value, self.names[key])
        elif key in self.named and self.name:
            self.reading.put(path, value, f"{key} of torchtitan's {self.name}")
        else:
            self.reading.put(path, value, f"torchtitan's default of {key}")

    def whole(self, key: str, minimum: int = 1) -> int:
        """Whole number of a key; a contradiction is recorded for other values, and the minimum returned."""
        value = self[key]
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            return value
        self.reading.contradiction(self.key(key), f"must be a whole number, at least {minimum}")
        return max(minimum, 1)

    def listed(self, key: str) -> list[str]:
        """Names of a list, or of text with commas; a contradiction is recorded for other values."""
        value = self[key]
        names = value.split(",") if isinstance(value, str) and value else list(value) if _is_list(value) else None
        if names is not None and all(isinstance(name, str) for name in names):
            return names
        if value not in (None, ""):
            self.reading.contradiction(self.key(key), "must be a list of names")
        return []

    def flag(self, key: str) -> bool:
        """True if a flag is on; a contradiction is recorded for values that are not boolean."""
        value = self[key]
        if not isinstance(value, bool | None):
            self.reading.contradiction(self.key(key), "must be true or false")
        return value is True

    def refuse(self, key: str, rule: str, fix: str = "") -> None:
        """Refuse a setting; see ``Reading.refuse``."""
        self.reading.refuse(self.key(key), rule, fix)

    def contradiction(self, key: str, rule: str, fix: str = "") -> None:
        """Record a contradiction; see ``Reading.contradiction``."""
        self.reading.contradiction(self.key(key), rule, fix)

    def not_modeled(self, key: str, why: str) -> None:
        """Note what is left out; a setting that the file does not have is noted under its canonical key."""
        if key not in self.names:
            self.reading.settings[key] = Setting(key, self[key])
        self.reading.not_modeled(self.key(key), why)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
