"""Settings in the words of Megatron Core, which Megatron Bridge and NeMo share: model, plan, precision, optimizer.

Names, defaults and meanings: NVIDIA/Megatron-LM, core_v0.16.0, megatron/core: transformer/transformer_config.py,
model_parallel_config.py, distributed/distributed_data_parallel_config.py, optimizer/optimizer_config.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from simplan.document import Document
from simplan.interop.allocator import note_allocator
from simplan.interop.configuration import Reading, Setting, SettingMapping
from simplan.interop.writing import Writing
from simplan.plan.placement import Placement
from simplan.wording import either

_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_MAX_INTERPOLATIONS = 20
_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "multiply": lambda a, b: a * b,
    "divide_floor": lambda a, b: a // b if b else 0,
}
_SPAN = re.compile(r"\[(\d)\]\*(\d{1,4})")
"""Blocks with or without experts in ``moe_layer_freq``: ``([0]*3+[1]*58)``."""

CP_COMM = {None: "ring", "p2p": "ring", "all_gather": "all_gather", "a2a": "a2a"}
"""``cp_comm_type`` -> ``plan.cp_comm``."""
ORIGIN = "the default of Megatron Core"
WIDE_WEIGHTS = "weights are counted in 16 bits next to those in FP8"
LORA_TARGETS = {
    "all": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    "attention": ("linear_qkv", "linear_proj"),
    "mlp": ("linear_fc1", "linear_fc2"),
    "qkv": ("linear_qkv",),
}
"""``model.lora_targets`` -> modules with adapters, larger groups first."""
TP_PP_DP = ["tp", "cp", "pp", "dp"]
"""Placement by ``use_tp_pp_dp_mapping`` (megatron/training/initialize.py); the only one besides the default."""
Positions = Literal["learned", "rope", "alibi", "none"]
OPTIMIZERS = {"adam": "adam", "sgd": "sgd_momentum", "muon": "muon", "dist_muon": "muon"}
"""``OptimizerConfig.optimizer`` -> ``training.optimizer``; its SGD has a momentum of 0.9."""
_STATE_TYPES = {
    "fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16",
    "fp8": "fp8", "uint8": "fp8",
}  # fmt: skip
"""Types of states of the precision-aware optimizer, as arguments and as torch's dtypes."""


@dataclass(frozen=True, slots=True)
class Words:
    """Prefixes of the keys that are Megatron Core's, in one kind of file.

    Attributes:
        model: Keys of ``TransformerConfig``.
        parallel: Keys of ``ModelParallelConfig``.
        ddp: Keys of ``DistributedDataParallelConfig``.
        optimizer: Keys of ``OptimizerConfig``.
        batch: Prefix of ``micro_batch_size`` and ``global_batch_size``.
        recompute: Prefix of the recomputation keys.
    """

    model: str
    parallel: str
    ddp: str
    optimizer: str
    batch: str
    recompute: str


def flattened(document: Document) -> list[Setting]:
    """Settings of nested mappings with dotted keys; lists are values.

    Objects that name themselves (``{_target_: torch.bfloat16, _call_: false}``) are their name.
    """

    def walk(data: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Setting]:
        for key, value in data.items():
            here = (*path, key)
            named = isinstance(value, dict) and set(value) <= {"_target_", "_call_", "_args_"} and "_target_" in value
            if isinstance(value, dict) and value and not named:
                yield from walk(value, here)
            else:
                yield Setting(".".join(here), value["_target_"] if named else value, document.place(here)[0])

    return [*walk(document.data, ())]


def interpolated(settings: Iterable[Setting], prefix: str = "") -> list[Setting]:
    """Settings with OmegaConf's references and products filled in: ``${.hidden_size}``, ``${multiply:4, 5}``.

    References to unknown keys, and all other resolvers, stay as they are.

    Args:
        prefix: Start of absolute references that is no part of the keys.
    """
    listed = [*settings]
    values = {setting.key: setting.value for setting in listed}

    def resolved(match: re.Match[str], key: str) -> str:
        text = match[1].strip()
        resolver, _, arguments = text.partition(":")
        if resolver in _BINARY:
            numbers = [part.strip() for part in arguments.split(",")]
            if len(numbers) == 2 and all(number.isdecimal() and len(number) < 20 for number in numbers):
                return str(_BINARY[resolver](int(numbers[0]), int(numbers[1])))
            return match[0]
        dots = len(text) - len(text.lstrip("."))
        section = key.split(".")[:-dots] if dots else []
        name = ".".join([*section, text[dots:] if dots else text.removeprefix(prefix)])
        value = values.get(name, match[0])
        return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else match[0]

    def filled(setting: Setting) -> Setting:
        value = setting.value
        for _ in range(_MAX_INTERPOLATIONS):
            if not isinstance(value, str) or "${" not in value or len(value) > 1000:
                break
            value = _INTERPOLATION.sub(lambda match: resolved(match, setting.key), value)
        if value is setting.value or not isinstance(value, str):
            return setting
        return Setting(setting.key, int(value) if value.isdecimal() and len(value) < 20 else value, setting.line)

    return [filled(setting) for setting in listed]


def parallel_matches(words: Words) -> tuple[SettingMapping, ...]:
    """Degrees and batch, for reading and for writing."""
    p = words.parallel
    return (
        SettingMapping(f"{p}tensor_model_parallel_size", "plan.tp", 1),
        SettingMapping(f"{p}pipeline_model_parallel_size", "plan.pp", 1),
        SettingMapping(f"{p}context_parallel_size", "plan.cp", 1),
        SettingMapping(f"{words.batch}micro_batch_size", "plan.microbatch_size"),
        SettingMapping(f"{words.batch}global_batch_size", "training.global_batch_size"),
    )


def read_parallel(reading: Reading, words: Words, *, experts: bool, is_whole: bool = True) -> dict[str, int]:
    """Put degrees, virtual stages, sequence parallelism, expert degrees and batch; returns the degrees.

    Args:
        experts: The model has experts, or may have some.
        is_whole: False for overrides of a recipe, which leave other settings to it.
    """
    p = words.parallel
    degrees = {match.path.partition(".")[2]: reading.whole(match.key) for match in parallel_matches(words)[:3]}
    reading.match(parallel_matches(words))
    key = f"{p}virtual_pipeline_model_parallel_size"
    degrees["vp"] = virtual = reading.whole(key)
    if degrees["pp"] > 1 and (is_whole or key in reading):
        reading.put("plan.virtual_stages", virtual, key if key in reading else "one stage per rank by default")
    key = f"{p}sequence_parallel"
    sequence = reading.truth(key)
    if degrees["tp"] > 1 and (is_whole or key in reading):
        reading.put("plan.sequence_parallel", sequence, key if key in reading else "off by default")
    if degrees["cp"] > 1:
        read_cp_comm(reading, f"{words.model}cp_comm_type")
    for name, path, default in (
        ("expert_model_parallel_size", "ep", 1),
        ("expert_tensor_parallel_size", "etp", degrees["tp"]),
    ):
        degree = reading.whole(p + name, default)
        in_file = reading.settings.get(p + name)
        said = in_file is not None and in_file.value is not None
        if experts and (is_whole or said):
            reading.put(f"plan.{path}", degree, p + name if said else "the default of Megatron Core")
            degrees[path] = degree
    return degrees


def read_placement(reading: Reading, key: str) -> None:
    """Put the placement with pipelines inside of data-parallel groups, if a file asks for it."""
    if reading.truth(key):
        reading.put("plan.placement", TP_PP_DP, key)


def write_placement(writing: Writing, key: str) -> None:
    """Write a placement as ``use_tp_pp_dp_mapping``; refuse any other.

    Raises:
        NotModelledError: Megatron has no such placement, or refuses it (megatron/core/parallel_state.py).
    """
    plan, placement = writing.job.plan, writing.job.placement
    if placement is None:
        return
    other = Placement.of(plan.model_copy(update={"placement": tuple(TP_PP_DP)}))
    if other is None or placement.devices != other.devices:
        writing.refuse("plan.placement", "use [tp, cp, pp, dp], or leave it out")
    if plan.ep > 1 and plan.ep * plan.etp != plan.tp * plan.cp:
        writing.refuse("plan.placement", f"with it, ep x etp must be tp x cp = {plan.tp * plan.cp}; or leave it out")
    writing.set(key, writing.value("plan.placement") is not None, "plan.placement")


def read_cp_comm(reading: Reading, key: str) -> None:
    """Put the communication of context parallelism, one for all blocks."""
    value = reading.value(key)
    kinds = value if isinstance(value, list) and value else [value]
    kind = kinds[0] if all(comm == kinds[0] for comm in kinds) else kinds
    if not isinstance(kind, str | None) or kind not in CP_COMM:
        reading.refuse(key, "is not modeled yet", f"only {', '.join(filter(None, CP_COMM))} in all blocks is")
        return
    reading.put("plan.cp_comm", CP_COMM[kind], key if key in reading else "p2p is the default of Megatron Core")


def check_world(reading: Reading, degrees: Mapping[str, int], world: int | None, key: str, batch: str) -> int | None:
    """Check that the degrees divide the devices and the batch its data-parallel ranks; returns the latter."""
    group = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if world is None:
        return None
    if world % group:
        rule = (
            f"is {world:,} devices, and tensor x pipeline x context parallelism is {group:,}, which does not divide it"
        )
        reading.contradiction(key, rule)
        return None
    dp = world // group
    size, micro = (reading.value(f"{batch}{name}") for name in ("global_batch_size", "micro_batch_size"))
    if type(size) is int and type(micro) is int and micro > 0 and size % (dp * micro):
        rule = f"must be a multiple of micro_batch_size = {micro} times {dp:,} data-parallel ranks"
        reading.contradiction(f"{batch}global_batch_size", rule)
    return dp


def read_recompute(reading: Reading, prefix: str, *, names: tuple[str, str, str, str]) -> None:
    """Put the recomputation.

    Args:
        names: Keys of granularity, method, number of layers and modules, without the prefix.
    """
    granularity, method, number, modules = (f"{prefix}{name}" for name in names)
    mode = reading.value(granularity)
    if mode is None:
        reading.put("plan.recompute", "none", granularity if granularity in reading else "off by default")
        reading.no_effect(method, number, modules)
        return
    if mode == "selective":
        chosen = reading.value(modules)
        reading.put("plan.recompute", "selective", granularity)
        if isinstance(chosen, list):
            put_modules(reading, chosen, modules)
        reading.no_effect(method, number)
        return
    how, layers = reading.value(method), reading.value(number)
    reading.no_effect(modules)
    if mode != "full" or how not in ("uniform", "block"):
        reading.refuse(
            granularity if mode != "full" else method, "is not known", "use full with uniform or block, or selective"
        )
        return
    reading.put("plan.recompute", "full", granularity)
    if how == "block" and layers is not None:
        reading.put("plan.recompute_layers", layers, number)
    elif how == "uniform" and layers not in (None, 1):
        reading.not_modeled(number, "blocks are recomputed one by one, which stores more and recomputes the same")


_INSIDE_MOE = ("moe_act", "shared_experts")
"""Modules that a recomputed ``moe`` has inside."""


def put_modules(reading: Reading, modules: Sequence[Any], key: str, absent: Container[Any] = ()) -> None:
    """Put the modules of selective recomputation that change something.

    Megatron Core takes any combination of its names, also of modules that the model does not have, or that another one
    has inside (core_v0.16.0 and d98e8a6, transformer_config.py, __post_init__).

    Args:
        modules: Names as written.
        key: Setting that names them.
        absent: Names of modules that no block of the model has.
    """
    kept = [module for module in dict.fromkeys(modules) if module not in absent]
    inside = [module for module in kept if module in _INSIDE_MOE] if "moe" in kept else []
    kept = [module for module in kept if module not in inside]
    if inside:
        reading.not_modeled(
            key, f"{' and '.join(inside)} inside of moe are recomputed once, with it; Megatron does it twice"
        )
    if not kept:
        reading.put("plan.recompute", "none", key)
    elif kept != ["core_attn"]:
        reading.put("plan.recompute_modules", kept, key)
    else:
        reading.value(key)


def read_data_parallel(
    reading: Reading, words: Words, *, default: bool, origin: str, fsdp_keys: tuple[str, ...] = ()
) -> None:
    """Put how data-parallel ranks share states: replicas, distributed optimizer, or Megatron FSDP.

    Args:
        default: ``use_distributed_optimizer`` of a file without the key.
        origin: Words on where that comes from.
        fsdp_keys: Further keys that choose Megatron FSDP.
    """
    ddp = words.ddp
    keys = (f"{ddp}use_megatron_fsdp", f"{ddp}use_custom_fsdp", *fsdp_keys)
    fsdp = [key for key in keys if reading.truth(key)]
    strategy = f"{ddp}data_parallel_sharding_strategy"
    shared = [f"{section}use_distributed_optimizer" for section in (ddp, words.optimizer)]
    stages = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    if fsdp:
        kind = reading.word(strategy, "optim_grads_params")
        reading.no_effect(*shared)
        if kind not in stages:
            reading.refuse(strategy, "is not known", f"use {', '.join(stages)}")
            return
        put_sharding(reading, stages[str(kind)], strategy if strategy in reading else fsdp[0])
        _put_instances(reading, ddp, is_sharded=stages[str(kind)] > 0)
        return
    reading.no_effect(strategy)
    said = [key for key in shared if key in reading]
    values = [reading.truth(key) for key in said]
    chosen = any(values) if said else default
    put_sharding(reading, int(chosen), said[0] if said else origin)
    _put_instances(reading, ddp, is_sharded=chosen)


def _put_instances(reading: Reading, ddp: str, *, is_sharded: bool) -> None:
    """Put the groups of data-parallel ranks that each share one copy of the optimizer states."""
    key = f"{ddp}num_distributed_optimizer_instances"
    number = reading.whole(key)
    if is_sharded and number > 1:
        reading.put("plan.dp_replicate", number, key)


def put_sharding(reading: Reading, zero_stage: int, key: str) -> None:
    """Put the ZeRO stage; the degrees follow from the number of devices."""
    if zero_stage:
        reading.put("plan.zero_stage", zero_stage, key)
        reading.put("plan.dp_replicate", 1, f"one group of shards, as {key}" if key in reading else key)
    else:
        reading.put("plan.dp_shard", 1, key)


def put_model(
    reading: Reading,
    *,
    gated: bool,
    moe: bool,
    mla: bool = False,
    positions: Positions,
    layer_norm: bool,
    gate_key: str,
    bias_key: str,
    keys: Mapping[str, str],
    more: Mapping[str, tuple[Any, str]],
    origin: str,
) -> None:
    """Put a decoder: its family, which is one with the same matmuls, its sizes, and notes on what that leaves out.

    Args:
        gated, moe, mla: MLPs have a gate, blocks have experts, attention is DeepSeek's multi-head latent attention.
        positions: Kind of position embedding; ``rope`` includes its variants.
        layer_norm: LayerNorm instead of RMSNorm.
        gate_key, bias_key: Keys on the gate of MLPs, and on biases of linear layers.
        keys: Field of ``ModelSpec`` -> key of the file.
        more: Further fields of the model, each with its value and the key or words on its origin.
        origin: Words on where values come from that the file does not have.
    """
    biases, tied = reading.truth(bias_key, default=True), "model.share_embeddings_and_output_weights"
    plain = "mpt" if positions == "alibi" and not biases else "gpt"
    family = "deepseek" if mla else "moe" if moe else "llama" if gated else plain
    reading.put("model.name", Path(reading.file).stem, "the name of the file")
    reading.put("model.family", family, gate_key if gate_key in reading else origin)
    for name, key in keys.items():
        value = reading.value(key)
        if value is not None:
            reading.put(f"model.{name}", value, key)
    for name, (value, key) in more.items():
        reading.put(f"model.{name}", value, key)
    reading.put("model.tied_embeddings", reading.truth(tied, default=True), tied if tied in reading else origin)
    gpt = family == "gpt"
    if family in ("llama", "moe") and biases:
        reading.put("model.attention_bias", True, bias_key)
        reading.not_modeled(bias_key, "biases of MLPs are left out")
    elif gpt and not biases:
        reading.not_modeled(bias_key, "counted with biases")
    if layer_norm is not (family in ("gpt", "mpt")):
        reading.not_modeled(
            "model.normalization", f"counted as {'LayerNorm' if gpt else 'RMSNorm, which reads no bias'}"
        )
    expected = {"gpt": "learned", "mpt": "alibi"}.get(family, "rope")
    if positions != expected:
        reading.not_modeled("model.position_embedding_type", f"counted as {expected} positions")
    for key in ("model.hidden_dropout", "model.attention_dropout"):
        if bool(reading.value(key, 0.1)) is not gpt:
            reading.not_modeled(key, f"the profile has {'dropout' if gpt else 'no dropout'} in this family")


def window(reading: Reading, key: str) -> dict[str, tuple[Any, str]]:
    """The sliding window, from ``window_size``: keys before a query and after it."""
    value = reading.value(key)
    if isinstance(value, list) and value and type(value[0]) is int and value[0] > 0:
        return {"sliding_window": (value[0], key)}
    return {}


def capacity(reading: Reading, key: str) -> dict[str, tuple[Any, str]]:
    """Capacity slots of experts; without a factor, experts take all their tokens."""
    factor = reading.value(key)
    return {} if factor is None else {"capacity_factor": (factor, key), "drop_tokens": (True, key)}


def dense_layers(reading: Reading, key: str, num_layers: Any) -> dict[str, tuple[Any, str]]:
    """Leading blocks without experts, by ``moe_layer_freq``: 1, a list of 0 and 1, or a sum of such lists as text."""
    value = reading.value(key, 1)
    blocks = value if isinstance(value, list) else []
    if isinstance(value, str):
        blocks = [int(dense) for dense, times in _SPAN.findall(value) for _ in range(int(times))]
        blocks = blocks if _SPAN.sub("", value).strip("()+ ") == "" else []
    if value in (1, None):
        return {}
    dense = blocks.index(1) if 1 in blocks else 0
    if not blocks or blocks != [0] * dense + [1] * (len(blocks) - dense) or len(blocks) != num_layers:
        reading.refuse(key, "is not modeled yet", "only experts in all blocks after the first ones are")
        return {}
    return {"num_dense_layers": (dense, key)} if dense else {}


def grad_dtype(reading: Reading, precision: str, in_fp32: bool | None, key: str) -> None:
    """Put the precision of gradients, if it differs from the profile's: FP32 for BF16, FP16 for FP16."""
    if in_fp32 is None or precision == "fp32":
        return
    if precision == "fp16":
        if in_fp32:
            reading.put("plan.grad_dtype", "fp32", key)
    elif not in_fp32:
        reading.put("plan.grad_dtype", "bf16", key)


def refuse(reading: Reading, table: Mapping[str, Any]) -> None:
    """Refuse settings of a table under ``refused`` that have a value other than null, false or 0."""
    for key, why in table["refused"].items():
        if reading.value(key):
            reading.refuse(key, why)


def sort_rest(reading: Reading, table: Mapping[str, Any], names: Iterable[str], degrees: Mapping[str, int]) -> None:
    """Note settings with which the prediction leaves something out, and those without an effect.

    Args:
        table: ``not_modeled``: setting -> values with which nothing is left out, and what is with others.
        names: Settings without an effect. What is null or empty is off, and is read by that.
        degrees: See ``read_parallel``. Overlaps of communication that a plan does not have leave nothing out.
    """
    note_allocator(reading, grown=False)
    moot = [*["tp_comm_overlap"] * (degrees["tp"] == 1), *["overlap_p2p_comm"] * (degrees["vp"] == 1)]
    for key, (values, why) in table["not_modeled"].items():
        if key in reading and reading.value(key) not in values and not key.endswith(tuple(moot)):
            reading.not_modeled(key, why)
    reading.no_effect(*names)
    for key, setting in reading.settings.items():
        if setting.value in (None, [], {}):
            reading.value(key)


def read_optimizer(reading: Reading, section: str, origin: str) -> None:
    """Put the optimizer of a section with the keys of ``OptimizerConfig``, and the clipping of gradients.

    Args:
        origin: Words on where the optimizer comes from if the file does not have it.
    """
    key = f"{section}optimizer"
    name = str(reading.value(key, "adam"))
    if name not in OPTIMIZERS:
        reading.refuse(key, "is not modeled yet", f"only {' and '.join(OPTIMIZERS)} are")
        return
    decoupled = reading.truth(f"{section}decoupled_weight_decay", default=True)
    chosen = "adamw" if name == "adam" and decoupled else OPTIMIZERS[name]
    reading.put("training.optimizer", chosen, key if key in reading else origin)
    keys = {name: f"{section}{name}_dtype" for name in ("exp_avg", "exp_avg_sq", "main_params")}
    read_types_of_states(reading, f"{section}use_precision_aware_optimizer", keys)
    read_clipping(reading, f"{section}clip_grad")


def read_types_of_states(reading: Reading, switch: str, keys: Mapping[str, str]) -> None:
    """Put the types of states of the precision-aware optimizer, all FP32 by default.

    Args:
        switch: Setting that turns it on.
        keys: State in ``training.optimizer_dtypes`` -> setting with its type.
    """
    if not reading.truth(switch, default=False):
        reading.no_effect(*keys.values())
        return
    types: dict[str, str] = {}
    for name, key in keys.items():
        word = str(reading.value(key, "fp32")).rpartition(".")[2].lower()
        if word not in _STATE_TYPES:
            reading.refuse(key, "is not modeled yet", f"use {either(list(dict.fromkeys(_STATE_TYPES.values())))}")
            return
        types[name] = _STATE_TYPES[word]
    reading.put("training.optimizer_dtypes", types, switch)


def put_length(reading: Reading, *keys: str) -> None:
    """Put the length of sequences from the first of some settings; it is asked for if the file has none."""
    if not reading.copy("model.seq_len", *keys):
        reading.ask("model.seq_len", what="does not say how long sequences are", fix="add --seq-len 4096")


def read_clipping(reading: Reading, key: str, default: float = 1.0) -> None:
    """Put the largest norm of gradients; by default that of Megatron Core's ``OptimizerConfig``."""
    norm = reading.value(key, default)
    if isinstance(norm, int | float) and norm > 0:
        reading.put("training.clip_grad_norm", float(norm), key if key in reading else f"{ORIGIN}: clip_grad = 1")


def read_adapters(reading: Reading, prefix: str) -> None:
    """Put LoRA of Megatron Bridge and NeMo 2.0: ``_target_`` with the class, ``dim`` and ``target_modules``.

    Dropout is that of the input of A by default. ``lora_dtype`` is for layers of torch alone, which Megatron Core's
    models have not (NVIDIA-NeMo/Megatron-Bridge at 0191fc5, src/megatron/bridge/peft/lora.py, ``LoRA.transform``).
    Every other setting of the section says another adapter, and is refused by name.
    """
    section = prefix.removesuffix(".")
    word = reading.value(section)
    if word not in (None, {}, "none", "lora"):
        reading.refuse(section, "is not modeled yet", "only LoRA is: give its _target_ and dim")
        return
    kind, rank, targets = (reading.value(f"{prefix}{name}") for name in ("_target_", "dim", "target_modules"))
    others = [
        key for key, setting in reading.settings.items() if key.startswith(prefix) and setting.value not in (None, [])
    ]
    if word != "lora" and not others:
        return
    if kind is not None and not str(kind).endswith(".LoRA"):
        reading.refuse(f"{prefix}_target_", "is not modeled yet", "only LoRA is")
        return
    unknown = [key for key in others if key.removeprefix(prefix) not in _LORA_SETTINGS]
    for key in unknown:
        reading.refuse(key, "is of an adapter that is not modeled yet", "only LoRA is, by its _target_ and dim")
    if unknown:
        return
    if kind is None and rank is None and word is None:
        fix = f"add {prefix}_target_ with the class of LoRA, or {prefix}dim with its rank"
        reading.refuse(others[0], "changes an adapter that the file does not name", fix)
        return
    put_adapters(
        reading,
        key=next((candidate for candidate in (f"{prefix}_target_", f"{prefix}dim") if candidate in reading), section),
        rank=(rank, f"{prefix}dim") if rank is not None else (32, "LoRA's default"),
        modules=targets if isinstance(targets, list) else LORA_TARGETS["all"],
        modules_key=f"{prefix}target_modules" if targets is not None else "LoRA's default",
    )
    dropout = reading.value(f"{prefix}dropout")
    if dropout not in (None, 0) and reading.peek(f"{prefix}dropout_position") in (None, "pre"):
        reading.put("model.lora_dropout", dropout, f"{prefix}dropout")
    for name, left in _LORA_SETTINGS.items():
        key = f"{prefix}{name}"
        if name == "dropout" and reading.written("model.lora_dropout"):
            continue
        if left and key in reading and reading.value(key) not in (None, False, 0):
            reading.not_modeled(key, left)
        elif key in reading:
            reading.no_effect(key)


_LORA_SETTINGS = {
    **dict.fromkeys(("_target_", "dim", "target_modules", "alpha", "dropout_position", "lora_dtype"), ""),
    **dict.fromkeys(("lora_A_init_method", "lora_B_init_method", "column_init_method", "row_init_method"), ""),
    "dropout": "results of adapters have no dropout (dropout_position: post), and save no mask for it",
    "a2a_experimental": "adapters gather and reduce as their layers do",
}
"""Settings of ``LoRA`` -> what is left out if they are set; nothing for those that are read or change nothing."""


def put_adapters(
    reading: Reading, *, key: str, rank: tuple[Any, str], modules: Iterable[Any], modules_key: str
) -> None:
    """Put LoRA.

    Args:
        key: Setting that turns it on.
        rank: Rank of the adapters, and its setting.
        modules: Modules with adapters, by the names of Megatron Core.
        modules_key: Setting that names them.
    """
    left = frozenset(map(str, modules))
    names = []
    for name, group in LORA_TARGETS.items():
        if left.issuperset(group):
            names.append(name)
            left -= set(group)
    if left or not names:
        reading.refuse(modules_key, "is not modeled yet", f"use {', '.join(LORA_TARGETS['all'])}, or groups of them")
        return
    reading.put("training.task", "lora", key)
    reading.put("model.lora_rank", *rank)
    reading.put("model.lora_targets", names, modules_key)


def has_graphs(reading: Reading, prefix: str) -> bool:
    """True if whole layers are in CUDA graphs; notes graphs of parts of them, which are not modeled."""
    switches = [reading.truth(f"{prefix}{name}") for name in ("enable_cuda_graph", "external_cuda_graph")]
    if not any(switches) and reading.word(f"{prefix}cuda_graph_impl", "none") == "none":
        return False
    for key in (f"{prefix}cuda_graph_scope", f"{prefix}cuda_graph_modules"):
        parts = reading.peek(key)
        named = {str(part) for part in (parts if isinstance(parts, list) else [parts] if parts else [])}
        if not are_whole_layers(named):
            reading.not_modeled(key, "graphs of parts of a layer; kernels are launched one by one")
            return False
    return True


def are_whole_layers(parts: Set[str]) -> bool:
    """True if CUDA graphs of the named parts of a layer hold all of it; no name is all of it."""
    return not parts - {"full", "full_iteration"} or parts >= {"attn", "mlp"}
