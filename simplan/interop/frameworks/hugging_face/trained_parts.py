"""Parts of a model that a configuration trains, as the parts that it freezes (``model.frozen``).

Sources: axolotl at 067b021, utils/freeze.py and train.py (``unfrozen_parameters``: the beginnings of names of
parameters that stay trained); LLaMA-Factory at ff6d4d1, model/adapter.py (``finetuning_type: freeze``: whole blocks or
modules of some blocks, and modules outside of blocks).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from simplan.interop.frameworks.hugging_face.adapters import spans
from simplan.interop.frameworks.hugging_face.keys import table, whole
from simplan.model.captured.adapters import names_of_parts, parameter_names
from simplan.model.layer import LayerKind
from simplan.model.model import ModelSpec
from simplan.model.module_names import modules

if TYPE_CHECKING:  # which calls this module
    from simplan.interop.frameworks.hugging_face.run import TrainerRun

_FIX = "name a model of the catalog, or write a scenario with model.frozen"
_ENDS = {"embedding": "embed_tokens", "head": "lm_head"}
_ROWS = re.compile(r"\[[\d:]*\]$")
_NUM_PROBED = 512
"""Blocks of a model that nothing says the number of: patterns that train all of them train those of any model."""

Trains = Callable[[str], bool]
"""Test of the name of a module, ``layers.3.mlp.up_proj`` or ``lm_head``: True if it is trained."""


def read_trained_parts(run: TrainerRun) -> None:
    """Read which parts are trained, and write those that are not."""
    trainer = run.trainer
    kind = trainer.first("finetuning_type")
    if kind is not None and str(trainer.value(kind)).lower() == "freeze":
        _read_freeze(run, kind)
        return
    if run.is_factory and trainer.is_true("use_badam"):
        _read_block_of_badam(run)
        return
    patterns = trainer.value("unfrozen_parameters")
    if not patterns:
        return
    if run.adapts:
        rule = "freezes all that its patterns do not match, adapters among them, whose names begin with base_model"
        trainer.refuse("unfrozen_parameters", rule, "remove it: with adapters all else is frozen")
        return
    words = [str(pattern) for pattern in (patterns if isinstance(patterns, list) else [patterns])]
    if any(_ROWS.search(word) for word in words):
        why = "gradients of other rows are set to 0, and have states like all others"
        trainer.not_modeled("unfrozen_parameters", why)
    # a period is one of a name, as in the original
    matched = [re.compile(re.sub(r"\.(?![+*])", r"\\.", _ROWS.sub("", word))) for word in words]
    if run.captured is not None:
        known = parameter_names(run.captured)
        frozen = {name for name in known if not any(pattern.match(name) for pattern in matched)}
        trainer.put("model.frozen", names_of_parts(run.captured, frozen), "unfrozen_parameters")
        return
    wraps = "model.language_model." if any("language_model" in word for word in words) else "model."

    def trains(module: str) -> bool:
        outside = module in _ENDS.values() and module == "lm_head"
        names = [f"{module}.weight" if outside else f"{wraps}{module}.weight"]
        if wraps != "model." and module == "embed_tokens":
            names.append("model.language_model.embed_tokens.weight")
        return any(pattern.match(name) for pattern in matched for name in names)

    if _put_frozen(run, "unfrozen_parameters", trains):
        if any(end in word for word in words for end in _ENDS.values()) and run.reading.written("model.frozen"):
            trainer.put("model.input_require_grads", True, "unfrozen_parameters")
        if wraps != "model.":
            why = "frozen weights for images or sound next to the language model take memory"
            trainer.not_modeled("unfrozen_parameters", why)


def _read_freeze(run: TrainerRun, kind: str) -> None:
    """Read LLaMA-Factory's blocks: the last ones, the first ones of a negative number, or each of a stride."""
    trainer, model = run.trainer, run.model
    number = whole(trainer.value("freeze_trainable_layers", 2))
    inside = _listed(trainer.value("freeze_trainable_modules", "all"))
    extra = _listed(trainer.value("freeze_extra_modules", ""))
    trainer.no_effect(("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"))
    if model is None or not number:
        trainer.refuse(kind, "trains blocks of a model whose number of blocks no file says", _FIX)
        return
    count = model.num_blocks
    if trainer.is_true("use_llama_pro"):
        if number < 0 or count % number:
            trainer.refuse("use_llama_pro", f"needs a number of blocks that divides {count}", "use another one")
            return
        chosen = {*range(count // number - 1, count, count // number)}
    else:
        chosen = {*range(max(0, count - number), count)} if number > 0 else {*range(min(-number, count))}

    def trains(module: str) -> bool:
        match = re.match(r"layers\.(\d+)\.(\w+)", module)
        if match is None:
            return module in extra
        return int(match[1]) in chosen and ("all" in inside or match[2] in inside)

    if _put_frozen(run, kind, trains) and not trainer.is_true("pure_bf16"):
        trainer.not_modeled(kind, "frozen weights stay in 16 bits; here they are as wide as trained ones")


def _read_block_of_badam(run: TrainerRun) -> None:
    """Read the block that BAdam trains; of those that take turns, the first, which needs most time and memory.

    Source: badam 1.4, block_optim.py (``infer_param_groups``: blocks alone, no embedding and no head).
    """
    trainer, key = run.trainer, "use_badam"
    if run.model is None:
        trainer.refuse(key, "trains blocks of a model whose number of blocks no file says", _FIX)
        return
    stays = trainer.value("badam_switch_mode") == "fixed" or whole(trainer.value("badam_switch_interval")) == -1
    block = (whole(trainer.value("badam_start_block")) or 0) if stays else 0
    if _put_frozen(run, key, lambda module: module.startswith(f"layers.{block}.")) and not stays:
        why = "blocks take turns; here the first one, with the longest backward, is trained in every step"
        trainer.not_modeled(key, why)


def _listed(value: object) -> list[str]:
    words = value if isinstance(value, list) else str(value or "").split(",")
    return [str(word).strip() for word in words if str(word).strip()]


def _put_frozen(run: TrainerRun, key: str, trains: Trains) -> bool:
    """Write the parts that are not trained; False after a refusal."""
    model = run.model
    inside = set(_modules()) if model is None else _inside(model)
    count = _NUM_PROBED if model is None else model.num_blocks
    unknown = inside - _modules().keys()
    frozen = {name: {block for block in range(count) if not _is_trained(trains, block, name)} for name in inside}
    in_blocks = any(frozen.values())
    if unknown or (model is None and in_blocks):
        what = "trains a part of the blocks of a model that is not in the catalog"
        run.trainer.refuse(key, what if model is None else f"names modules of a {model.family} that are not read", _FIX)
        return False
    ends = [end for end, module in _ENDS.items() if not trains(module)]
    if model is not None and model.tied_embeddings:
        ends = ["embedding"] * ("embedding" in ends)
    whole_blocks = set.intersection(*frozen.values())
    parts = [f"blocks.{span}" for span in spans(whole_blocks)]
    parts += [f"blocks.{span}.{name}" for name in sorted(inside) for span in spans(frozen[name] - whole_blocks)]
    if not ends and not parts:
        run.trainer.no_effect((key,))
    else:
        run.trainer.put("model.frozen", [*ends, *parts], key)
    return True


def _is_trained(trains: Trains, block: int, name: str) -> bool:
    return any(trains(f"layers.{block}.{module}") for module in _modules()[name])


def _modules() -> Mapping[str, Sequence[str]]:
    """Module of a block -> its names in transformers' code."""
    return table("modules_of_blocks")


def _inside(model: ModelSpec) -> set[str]:
    """Modules of the blocks of a model, each by its own name."""
    blocks = [layer for layer in {*model.layers} if layer.kind is LayerKind.BLOCK]
    with_parameters = {parameter.name.rpartition(".")[0] for layer in blocks for parameter in layer.parameters}
    return with_parameters & modules(blocks).keys()
