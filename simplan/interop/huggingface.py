"""Import of Hugging Face ``config.json`` files, for model types that match a model family of simplan exactly.

Keys that change neither shapes nor costs (initializers, token ids, dropout rates, rotary scaling) are accepted. Keys
that change the model in a way that is not modeled raise an error that names the key, unless they have their neutral
value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from simplan.errors import NotModelledError, Problem, SpecError, did_you_mean
from simplan.interop.frameworks import tables
from simplan.problems import render_value

_USUAL_LENGTH = 4096
_FULL, _IN_WINDOW = "full_attention", "sliding_attention"
_MAY_MISS = frozenset({
    "num_key_value_heads", "head_dim", "attention_bias", "tied_embeddings", "max_position_embeddings", "sliding_window",
    "q_lora_rank", "num_dense_layers", "shared_expert_intermediate_size", "type_vocab_size", "num_channels",
    "partial_rotary_factor",
})  # fmt: skip
"""Fields that a config may omit."""
_RENAMED = {"num_experts": "num_local_experts"}
"""Keys that newer versions of transformers write under another name."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """Mapping of one ``model_type`` to ``ModelSpec``.

    Attributes:
        family: Model family of simplan.
        keys: By field of ``ModelSpec``, the key of the config; dots select nested keys.
        optional: Fields that may be missing.
        neutral: Keys that change the model, with the values that leave it as modeled; absent and null always do.
        fixed: Fields of ``ModelSpec`` that no key gives, with their values.
        windows: True if ``sliding_window`` applies to all layers; False if ``use_sliding_window`` enables it for some.
        window_every: ``sliding_window`` applies to all but every so many layers, unless ``layer_types`` is set; 0 for
            no such type.
        has_sequences: True if the user gives ``seq_len``; False for image models.
        later_tokens: Key with the number of multi-token prediction layers; None if the type has none.
        in_experts: Fields that the config counts in experts of width ``moe_intermediate_size``.
    """

    family: str
    keys: Mapping[str, str]
    optional: frozenset[str] = _MAY_MISS
    neutral: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    windows: bool = False
    window_every: int = 0
    has_sequences: bool = True
    later_tokens: str | None = None
    in_experts: frozenset[str] = frozenset()


@cache
def model_types() -> Mapping[str, ModelType]:
    """Supported model types by ``model_type``: ``tables/model_types.yaml``."""
    return {name: _model_type(**data) for name, data in tables("model_types").items() if not name.startswith("_")}


def _model_type(
    *,
    keys: Iterable[str | Mapping[str, str]],
    neutral: Mapping[str, Any],
    optional: Iterable[str] = (),
    required: Iterable[str] = (),
    in_experts: Iterable[str] = (),
    **others: Any,
) -> ModelType:
    pairs = [pair for key in keys for pair in ([(key, key)] if isinstance(key, str) else key.items())]
    fields = {key: values for key, values in neutral.items() if key != "<<"}
    may_miss = (_MAY_MISS | {*optional}) - {*required}
    neutral = {**neutral.get("<<", {}), **fields}
    return ModelType(keys=dict(pairs), neutral=neutral, optional=may_miss, in_experts=frozenset(in_experts), **others)


def model_fields_from_config(
    config: Mapping[str, Any], *, name: str, seq_len: int | None = None, mtp: bool = False
) -> dict[str, Any]:
    """Convert a Hugging Face config to fields of ``ModelSpec``, which checks and completes them.

    Args:
        config: Content of ``config.json``.
        name: Name of the model.
        seq_len: Tokens per sequence; None only for image models. The config's maximum is no default, since training
            sequences are often much shorter (Llama 3.1: 131,072).
        mtp: Include the multi-token prediction layers, which the software trains. False omits them, as transformers
            does.

    Raises:
        SpecError: Keys or ``seq_len`` are missing or ``model_type`` is unknown.
        NotModelledError: The config uses options that are not modeled yet.
    """
    word = config.get("model_type")
    known = model_types()
    if word not in tuple(known):  # a list or mapping is not hashable
        value = render_value(word) if word is not None else None
        rule = "is missing" if word is None else "is a family that is not modeled yet"
        error = SpecError if word is None else NotModelledError
        fix = "; or ".join(filter(None, (_instead(str(word), config), _CAPTURE if isinstance(word, str) else "")))
        raise error(Problem(field="model_type", value=value, rule=rule, fix=fix))
    kind = known[word]
    values = {field: _read(config, key) for field, key in kind.keys.items()}
    if isinstance(labels := values.get("num_classes"), Mapping):
        values["num_classes"] = len(labels)
    missing = [kind.keys[field] for field, value in values.items() if value is None and field not in kind.optional]
    if missing:
        raise SpecError([Problem(field=key, rule="is missing", fix=f"a {word} config has it") for key in missing])
    fields = {**kind.fixed, **{field: value for field, value in values.items() if value is not None}}
    if mtp and kind.later_tokens is not None and (layers := _look_up(config, kind.later_tokens)):
        fields["mtp_num_layers"] = layers
    width = fields.get("moe_intermediate_size")
    for counted in kind.in_experts & fields.keys():
        if type(fields[counted]) is int and type(width) is int:  # true is no number of experts
            fields[counted] *= width
    if kind.has_sequences:
        if seq_len is None:
            raise SpecError(_no_length(fields.get("max_position_embeddings"), kind))
        fields["seq_len"] = seq_len
    _refuse_unmodelled(config, kind, fields.get("seq_len"))
    if kind.window_every:
        window, layers = fields.pop("sliding_window", None), fields.get("num_hidden_layers")
        fields |= _windows(config, window, layers, config.get("sliding_window_pattern") or kind.window_every)
    return {"name": name, "family": kind.family, **fields}


_CAPTURE = "capture it with transformers: simplan capture config.json -o model.json"


def _instead(word: str, config: Mapping[str, Any]) -> str:
    """Fix for a type that is not read: its family with numbers, or a type that may be misspelled.

    A type of another version (llama4) is another model, and so is one without experts for a model with some.
    """
    by_numbers: Mapping[str, str] = tables("model_types")["_by_numbers"]
    if word in by_numbers:
        return f"write a model with {by_numbers[word]} and the numbers of the config"
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    experts = any(type(part.get(key)) is int and part[key] > 1 for part in parts for key in _NUM_EXPERTS)
    names = [
        name
        for name, kind in model_types().items()
        if (kind.family in ("moe", "deepseek")) == experts and _without_digits(name) != _without_digits(word)
    ]
    return did_you_mean(word, names)


def _without_digits(name: str) -> str:
    return "".join(character for character in name if not character.isdigit())


def _look_up(config: Mapping[str, Any], key: str) -> Any:
    """Value of a dotted key; None if the config lacks it."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _read(config: Mapping[str, Any], key: str) -> Any:
    """As ``_look_up``, also under the name that newer versions of transformers write."""
    value = _look_up(config, key)
    return _look_up(config, _RENAMED[key]) if value is None and key in _RENAMED else value


def _windows(config: Mapping[str, Any], window: Any, num_layers: Any, usual: int) -> dict[str, Any]:
    """Fields for the layers with sliding-window attention.

    Raises:
        SpecError: The number of layer types differs from the number of layers.
        NotModelledError: The pattern is none of: all layers, no layer, all layers except every n-th.
    """
    types = config.get("layer_types")
    if window is None:
        return {}
    if types is None:
        return {"sliding_window": window, "sliding_window_pattern": usual}
    full = [number for number, of in enumerate(types, 1) if of == _FULL] if isinstance(types, list) else []
    every = full[0] if full else 0
    known = isinstance(types, list) and set(map(str, types)) <= {_FULL, _IN_WINDOW}
    if not known or (every and full != list(range(every, len(types) + 1, every))):
        rule = "is not modeled yet"
        fix = f"only {_IN_WINDOW} with {_FULL} in none, every, or every so many layers is"
        raise NotModelledError(Problem(field="layer_types", value=render_value(types), rule=rule, fix=fix))
    if len(types) != num_layers:
        rule = f"has {len(types)} types, and num_hidden_layers = {render_value(num_layers)}"
        raise SpecError(Problem(field="layer_types", rule=rule, fix="give one for each layer"))
    if every == 1:
        return {}
    return {"sliding_window": window, "sliding_window_pattern": every}


def _no_length(longest: Any, kind: ModelType) -> Problem:
    """Error for a missing ``seq_len``, with a usual length as the fix."""
    if not isinstance(longest, int):
        return Problem(field="seq_len", rule="is missing", fix=f"add seq_len: {_USUAL_LENGTH}")
    key = kind.keys["max_position_embeddings"]
    usual = min(longest, _USUAL_LENGTH)
    fix = f"add seq_len: {usual}" + (f", or seq_len: {longest} if they are so long" if longest > usual else "")
    rule = f"is missing: {key} = {longest} is the longest the model takes, not how long yours are"
    return Problem(field="seq_len", rule=rule, fix=fix)


def _refuse_unmodelled(config: Mapping[str, Any], kind: ModelType, length: Any) -> None:
    problems = []
    for key, values in kind.neutral.items():
        value = _look_up(config, key)
        if value is not None and value not in values:
            fix = f"only {' or '.join(render_value(v) for v in values)} is" if values else "only a config without it is"
            problems.append(Problem(field=key, value=render_value(value), rule="is not modeled yet", fix=fix))
    window = config.get("sliding_window")
    in_use = window is not None and config.get("use_sliding_window", kind.windows)
    if in_use and not kind.windows and not (isinstance(window, int) and isinstance(length, int) and window >= length):
        rule = f"a window in some layers is not modeled yet, and sequences of {length} tokens use it"
        fix = f"use seq_len = {window} or less, where the window does nothing"
        problems.append(Problem(field="sliding_window", value=render_value(window), rule=rule, fix=fix))
    if problems:
        raise NotModelledError(problems)
