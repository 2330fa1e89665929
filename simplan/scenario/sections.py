"""The sections ``model``, ``software`` and ``expect`` of a scenario file, and the document lengths of a model.

A model is a preset or a Hugging Face configuration with overrides, or given inline::

    model: {preset: gpt2-124m, seq_len: 512, num_hidden_layers: 4}
    model: {hf_config: llama/config.json, seq_len: 4096}
    model: {file: unet.json}    # written by simplan capture
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from simplan import catalog
from simplan.accuracy.measured import FALLBACK_FOR
from simplan.document import merged
from simplan.errors import Problem, SpecError
from simplan.interop.huggingface import model_fields_from_config
from simplan.io import folder_of, read_json, read_text
from simplan.model.captured.facts import CapturedModel
from simplan.model.captured.file import read_captured, unpacked
from simplan.model.families import FAMILIES
from simplan.model.families.family import LORA
from simplan.model.model import ModelSpec
from simplan.model.packing import DocumentOptions, DocumentSource, Histogram, Lognormal, represent
from simplan.problems import render_value
from simplan.scenario.collecting import Sections
from simplan.scenario.expectation import Expectation
from simplan.software.software import SoftwareSpec

_MAX_EXPECTATIONS = 1000


def read_model(sections: Sections, data: Any, *, mtp: bool) -> ModelSpec | None:
    """The section ``model``: ``preset`` or ``hf_config`` with overrides, a captured model, or inline.

    Args:
        mtp: True when the software trains the multi-token prediction layers of an ``hf_config``.
    """
    if not sections.is_mapping(data, ("model",), "gpt2-124m"):
        return None
    model_keys = dict(data)
    fields: dict[str, Any] | None = {}
    sources = [key for key in ("preset", "hf_config", "file", "captured") if key in model_keys]
    if len(sources) > 1:
        sections.refuse(("model", sources[1]), f"cannot go with {sources[0]}", fix="keep one of the two")
        return None
    if "file" in model_keys or "captured" in model_keys:
        return _captured(sections, model_keys)
    if "preset" in model_keys:
        fields = sections.look_up(("model", "preset"), catalog.model_fields, model_keys.pop("preset"))
    elif "hf_config" in model_keys:
        fields = _hf_fields(sections, model_keys.pop("hf_config"), model_keys.get("seq_len"), mtp=mtp)
    if fields is None:
        return None
    return _complete_model(sections, {**fields, **model_keys})


def _hf_fields(sections: Sections, name: Any, seq_len: Any, *, mtp: bool) -> dict[str, Any] | None:
    def read(name: str) -> dict[str, Any]:
        path = folder_of(sections.file) / name
        if not name.endswith(".json") and not path.exists():
            rule, fix = (
                "is no file, and nothing is downloaded",
                "download the config.json of the model and give its path",
            )
            raise SpecError(Problem(field="", value=render_value(name), rule=rule, fix=fix))
        try:
            config = read_json(path)
            length = seq_len if seq_len is None or isinstance(seq_len, int) else 1  # refused with the other fields
            title = path.resolve().parent.name or path.stem
            return model_fields_from_config(config, name=title, seq_len=length, mtp=mtp)
        except SpecError as error:
            shown = render_value(name)
            raise type(error)([Problem(field="", value=shown, rule=p.sentence()) for p in error.problems]) from None

    return sections.look_up(("model", "hf_config"), read, name)


def _captured(sections: Sections, model_keys: dict[str, Any]) -> ModelSpec | None:
    """A captured model, by its file or as a word, perhaps with adapters; its sizes are those of the capture."""
    source = "file" if "file" in model_keys else "captured"
    others = model_keys.keys() - {source, "name", "seq_len"} - LORA
    for key in sorted(others):
        rule = f"cannot go with {source}, whose sizes are those of its capture"
        fix = "change the code, and capture it again"
        sections.refuse(("model", key), rule, value=model_keys[key], fix=fix)
    if others:
        return None

    def read(name: str) -> CapturedModel:
        return read_captured(folder_of(sections.file) / name)

    captured = None
    if source == "file":
        captured = sections.look_up(("model", "file"), read, model_keys["file"])
    else:
        try:
            captured = unpacked(model_keys["captured"])
        except SpecError as error:
            sections.keep(error, ("model", "captured"))
    if captured is None:
        return None
    if "seq_len" in model_keys and model_keys["seq_len"] != captured.tokens:
        rule, fix = f"cannot go with {source}, whose sizes are those of its capture", "leave it out"
        if captured.tokens:
            rule = f"cannot go with {source}, which is a capture of {captured.tokens} tokens"
            fix = f"use {captured.tokens}, or capture it again with --seq-len {model_keys['seq_len']}"
        sections.refuse(("model", "seq_len"), rule, value=model_keys["seq_len"], fix=fix)
        return None
    title = model_keys.get("name", captured.name)
    fields = {"name": title, "family": "captured", **{key: model_keys[key] for key in LORA & model_keys.keys()}}
    try:
        return ModelSpec.from_fields({**fields, "captured": captured})  # the object itself, whose layers are known
    except SpecError:
        shown = captured.model_dump(mode="json", exclude_defaults=True)
        return sections.read(ModelSpec, {**fields, "captured": shown}, ("model",))


def _complete_model(sections: Sections, fields: dict[str, Any]) -> ModelSpec | None:
    hidden: Any = fields.get("hidden_size")
    heads: Any = fields.get("num_attention_heads")
    known = isinstance(hidden, int) and isinstance(heads, int) and "head_dim" not in fields
    if known and min(hidden, heads) > 0 and hidden % heads:
        rule, fix = f"must divide hidden_size = {hidden}", f"use {_nearest_divisor(hidden, heads)}, or give head_dim"
        sections.refuse(("model", "num_attention_heads"), rule, value=heads, fix=fix)
        return None
    if isinstance(fields.get("document_lengths"), dict):
        drawn = _draw_documents(sections, fields["document_lengths"], fields.get("seq_len"))
        if drawn is None:
            return None
        fields = fields | drawn
    return sections.read(ModelSpec, fields, ("model",), _examples(fields.get("family")))


def _examples(family: Any) -> dict[str, str]:
    """Required keys of a family, each with its value in the first such model of the catalog; of no family, that key."""
    if not isinstance(family, str) or family not in FAMILIES or family == "captured":
        return {"family": "preset: gpt2-124m, or family: gpt and its required keys (`simplan show model`)"}
    name = next(name for name in catalog.names("models") if catalog.model_fields(name)["family"] == family)
    values = catalog.model(name).model_dump(mode="json")
    return {key: f"{key}: {values[key]} (as in {name})" for key in ModelSpec.required_fields(family)}


def _nearest_divisor(number: int, value: int) -> int:
    below = next(d for d in range(min(value, number, 10**6), 0, -1) if number % d == 0)
    return next((d for d in range(value, min(2 * value - below, number) + 1) if number % d == 0), below)


def read_software(sections: Sections, data: Any, *, is_measured: bool = False) -> SoftwareSpec | None:
    """The section ``software``: a name in the catalog, or ``preset`` with its options.

    Args:
        is_measured: True for a run that was measured, whose stack may differ from a profile in any field.
    """
    if not isinstance(data, dict):
        profile = sections.look_up(("software",), catalog.software, data)
        return profile if profile is None or not is_measured else _as_measured(sections, profile, {})
    chosen = {key: value for key, value in data.items() if key != "preset"}
    profile = sections.look_up(("software", "preset"), catalog.software, data.get("preset", "torch"))
    if profile is None:
        return None
    if is_measured:
        return _as_measured(sections, profile, chosen)
    for key in chosen.keys() - set(profile.options):
        known = f"its options are {', '.join(profile.options)}" if profile.options else "it has no options"
        sections.refuse(("software", key), f"is no option of {profile.id}", value=chosen[key], fix=known)
        return None
    return sections.read(SoftwareSpec, {**profile.model_dump(), **chosen}, ("software",))


_UNFITTED_RATES = {
    "framework_efficiency": 1.0,
    "intra_slowdown": 1.0,
    "inter_slowdown": 1.0,
    "relative_std": None,
    "fitted_on": None,
}
_TORCH_WITHOUT_LIMITS = {
    "ddp_in_pipelines": True,
    "grad_dtypes": ["fp32", "bf16", "fp16"],
    "low_precision": {"nvfp4": {"kept": "wide"}},
}
"""Fields of the profile ``torch`` without limits that are those of the executor alone."""


def _as_measured(sections: Sections, profile: SoftwareSpec, chosen: dict[str, Any]) -> SoftwareSpec | None:
    """Profile with any of its fields changed, also inside of mappings; without fitted constants for a fallback."""
    fields, framework = profile.model_dump(), chosen.get(FALLBACK_FOR)
    if "id" in chosen:
        sections.refuse(("software", "id"), "is the name of the profile", value=chosen["id"], fix="write preset")
    if FALLBACK_FOR in chosen and (not isinstance(framework, str) or not framework):
        sections.refuse(("software", FALLBACK_FOR), "must be the name of a framework", value=framework)
        return None
    if profile.id == "torch":
        fields = merged(fields, _TORCH_WITHOUT_LIMITS)
    if framework is not None:
        # padding of vocabularies is unknown too; nanotron, for example, pads to a multiple of tp
        spread = catalog.unfitted_memory_spread().model_dump()
        fields = merged(fields, {"rates": _UNFITTED_RATES, "vocab_multiple": 1}) | {"memory_spread": spread}
    chosen = {key: value for key, value in chosen.items() if key not in (FALLBACK_FOR, "id")}
    return sections.read(SoftwareSpec, merged(fields, chosen), ("software",))


def read_expectations(sections: Sections, data: Any) -> tuple[Expectation, ...]:
    """The section ``expect``: a list of expectations."""
    if data is None or not isinstance(data, list | tuple):
        fix = "write a list: - {metric: step_time_s, max: 1.5}"
        sections.refuse(("expect",), "must be a list", value=data, fix=fix)
        return ()
    if len(data) > _MAX_EXPECTATIONS:
        rule = f"has {len(data):,} entries, more than {_MAX_EXPECTATIONS:,}"
        sections.refuse(("expect",), rule, fix="use several files")
        return ()
    expectations = [sections.read(Expectation, item, ("expect", index)) for index, item in enumerate(data)]
    return tuple(expectation for expectation in expectations if expectation is not None)


_PATH = ("model", "document_lengths")
_MAX_FILE_BYTES = 4 * 1024 * 1024
_MAX_DIGITS = 12


class _LengthsFile(DocumentOptions):
    """File with lengths of documents, from which a number of lengths is taken evenly."""

    file: Annotated[str, Field(min_length=1, max_length=1000)]


def _draw_documents(sections: Sections, data: dict[str, Any], seq_len: Any) -> dict[str, Any] | None:
    """Model fields ``document_lengths`` and ``packs`` of a distribution; None after a problem.

    Args:
        data, seq_len: Distribution and ``model.seq_len`` as written in the file.
    """
    source = _source(sections, data)
    if source is None:
        return None
    if not isinstance(seq_len, int) or isinstance(seq_len, bool) or seq_len < 1:
        sections.refuse(("model", "seq_len"), "is needed to pack documents", value=seq_len, fix="give a whole number")
        return None
    try:
        lengths, packs = represent(source, seq_len)
    except SpecError as error:
        sections.keep(error, ("model", "seq_len"))
        return None
    return {"document_lengths": list(lengths), "packs": packs.model_dump(mode="json")}


def _source(sections: Sections, data: dict[str, Any]) -> DocumentSource | None:
    kinds = [key for key in ("distribution", "histogram", "file") if key in data]
    if len(kinds) != 1:
        rule = "is a list of lengths, or has one of the keys distribution, histogram and file"
        fix = "write [512, 1024], or {distribution: lognormal, median: 300, sigma: 1.0}"
        sections.refuse(_PATH, rule, value=data, fix=fix)
        return None
    if "distribution" in data:
        return sections.read(Lognormal, data, _PATH)
    if "histogram" in data:
        return sections.read(Histogram, data, _PATH)
    lengths = sections.read(_LengthsFile, data, _PATH)
    if lengths is None:
        return None
    options = lengths.model_dump(exclude={"file"})
    counts = sections.look_up((*_PATH, "file"), lambda name: _counted(folder_of(sections.file) / name), lengths.file)
    return None if counts is None else Histogram(histogram=counts, **options)


def _counted(path: Path) -> dict[int, float]:
    """Documents of a file by their length."""

    def refuse(rule: str, fix: str = "") -> SpecError:
        return SpecError(Problem(field="", value=render_value(path.name), rule=rule, fix=fix))

    try:
        lines = read_text(path, _MAX_FILE_BYTES).splitlines()
    except SpecError as error:
        (problem,) = error.problems
        raise refuse(problem.rule, problem.fix) from None
    counts: Counter[int] = Counter()
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text:
            continue
        if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text)):
            raise refuse(f"line {number} holds {render_value(text)}", "write one whole number of tokens a line")
        counts[int(text)] += 1
    if not counts:
        raise refuse("holds no lengths", "write one whole number of tokens a line")
    return {length: float(count) for length, count in counts.items()}


def with_software_defaults(plan: Any, software: SoftwareSpec) -> Any:
    """Section plan, with what the software does where the plan does not say it.

    These are FSDP over context-parallel ranks alone, and reductions of sharded gradients that wait for the end of the
    step (``SoftwareSpec.shards_over_cp``, ``SoftwareSpec.defers_reductions``).
    """
    if not isinstance(plan, dict):
        return plan
    cp, dp_shard = plan.get("cp", 1), plan.get("dp_shard", 1)
    if "zero_stage" not in plan and software.shards_over_cp and isinstance(cp, int) and cp > 1 and dp_shard == 1:
        plan = {**plan, "zero_stage": 3}
    shards = isinstance(dp_shard, int) and dp_shard > 1 and plan.get("zero_stage", 3) in (2, 3)
    if "grad_sync" not in plan and software.defers_reductions and shards and plan.get("pp", 1) == 1:
        plan = {**plan, "grad_sync": "step"}
    return plan
