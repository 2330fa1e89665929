"""Adapters as PEFT's, axolotl's, TRL's and LLaMA-Factory's settings say them: matrices, ranks, blocks and dropout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from simplan.interop.frameworks.hugging_face import names
from simplan.interop.frameworks.hugging_face.images import without_frozen
from simplan.interop.frameworks.hugging_face.keys import table
from simplan.interop.frameworks.hugging_face.patterns import in_blocks, is_pattern, names_of
from simplan.interop.frameworks.hugging_face.preference import drops_dropout
from simplan.model.captured.adapters import ALL, pattern_of, targets_of
from simplan.model.captured.facts import CapturedModel
from simplan.model.families import FAMILIES
from simplan.model.module_names import matrices
from simplan.plan.shard import Shard

if TYPE_CHECKING:  # which calls this module
    from simplan.interop.frameworks.hugging_face.run import TrainerRun

_NAMES_FIX = "use all-linear, or names such as q_proj and v_proj"
_TRL_DROPOUT = 0.05


def read_targets(run: TrainerRun) -> None:
    """Read which matrices of which blocks have adapters, their ranks, dropout and kind, and what else is trained."""
    targets = _targets(run) if run.captured is None else _targets_of_capture(run, run.captured)
    if targets is not None and run.captured is not None:
        run.reading.put("model.lora_targets", targets[1], targets[0])
    elif targets is not None:
        where, chosen = targets
        chosen = _there(run, where, chosen)
        run.reading.put("model.lora_targets", _in_blocks(run, chosen), where)
    _read_ranks(run)
    _read_dropout(run)
    _read_saved_modules(run)
    if run.is_oft:
        run.trainer.put("model.lora_oft", True, "finetuning_type")
    for key in ("peft_use_dora", "use_dora"):
        if run.trainer.is_true(key):
            run.trainer.put("model.lora_dora", True, key)


def _there(run: TrainerRun, where: str, chosen: list[str]) -> list[str]:
    """Matrices that the model has: PEFT passes over names that no module has, as long as another one has a module."""
    if run.model is None:
        return chosen
    known = {*matrices(FAMILIES[run.model.family].layers(run.model, Shard())), *names.ENDS.values()}
    named = [name for name in chosen if name.rpartition(".")[2] in known]
    if len(named) == len(chosen) or not named:
        return chosen
    rest = ", ".join(name for name in chosen if name not in named)
    run.reading.not_modeled(where, f"PEFT passes over {rest}, of which {run.model.name} has no linear layers")
    return named


def _targets_of_capture(run: TrainerRun, captured: CapturedModel) -> tuple[str, list[str]] | None:
    """Setting, and linear layers of a captured model: as PEFT finds them, by ends of names or by a pattern."""
    trainer = run.trainer
    key = trainer.first("oft_target") if run.is_oft else trainer.first("lora_target_modules", "lora_target")
    value = trainer.value(key) if key is not None else None
    where = trainer.full("lora_target_linear" if trainer.is_true("lora_target_linear") else key or "")
    words = (
        [value]
        if is_pattern(value)
        else value
        if isinstance(value, list)
        else str(value or "").replace(",", " ").split()
    )
    if trainer.is_true("lora_target_linear"):
        words = [_EVERY, *words]
    if not words:
        where, words = (
            ("the default of LLaMA-Factory", [_EVERY]) if run.is_factory else ("the default of PEFT", _PEFT_NAMES)
        )
    targets = [ALL if word in _EVERY_NAMES else str(word) for word in words]
    paths_of = targets_of(captured, targets)
    there = [target for target in targets if paths_of[target]]
    paths = [*dict.fromkeys(path for target in there for path in paths_of[target])]
    chosen = without_frozen(run, paths)
    if there and len(there) < len(targets):
        rest = ", ".join(target for target in targets if target not in there)
        run.reading.not_modeled(where, f"PEFT passes over {rest}, of which {captured.name} has no linear layers")
    if paths and not chosen:
        run.reading.refuse(where, "has adapters in frozen parts alone", "name linear layers of the language model")
        return None
    return where, (there or targets) if len(chosen) == len(paths) else pattern_of(captured, chosen)


_EVERY = "all-linear"
_EVERY_NAMES = (_EVERY, ALL)
_PEFT_NAMES = ["q_proj", "v_proj"]  # of most models, PEFT utils/constants.py


def _targets(run: TrainerRun) -> tuple[str, list[str]] | None:
    """Setting, and names of matrices in ``model.lora_targets``; None after a refusal."""
    trainer = run.trainer
    key = "oft_target" if run.is_oft else trainer.first("lora_target_modules", "lora_target")
    if run.is_oft and "oft_target" not in trainer:
        return "the default of LLaMA-Factory", ["all"]
    every = trainer.is_true("lora_target_linear")
    value = trainer.value(key) if key is not None else None
    where = trainer.full("lora_target_linear" if every else key or "")
    experts = _experts(run)
    if is_pattern(value) and key is not None and not every:
        matrices = _of_pattern(str(value))
        if matrices is None:
            run.reading.refuse(where, "is a pattern of names, which is not read", _NAMES_FIX)
            return None
        if "language_model" in str(value):
            trainer.not_modeled(key, "weights for images or sound next to the language model take memory")
        return where, [*matrices, *experts]
    words = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
    if every:
        words = ["all-linear", *words]
    if not words and experts:  # PEFT has no default of modules then
        return trainer.full("lora_target_parameters"), experts
    if not words:
        usual = ["all"] if run.is_factory else names.PEFT_TARGETS
        return "the default of " + ("LLaMA-Factory" if run.is_factory else "PEFT"), usual
    known = [name for word in words for name in _matrices(str(word))]
    if "all" in known and not run.tool and run.model is not None and run.model.num_experts:
        # PEFT 0.21 wraps experts and routers, which older transformers had as linear layers
        experts = [*dict.fromkeys([*table("routed"), *experts])]
    ends = [name for name in dict.fromkeys(known) if name in names.ENDS.values()]
    return where, [*(["all", *ends] if "all" in known else dict.fromkeys(known)), *experts]


def _experts(run: TrainerRun) -> list[str]:
    """Names in ``model.lora_targets`` of parameters with adapters, which are experts held as one tensor."""
    key, trainer = "lora_target_parameters", run.trainer
    named = trainer.value(key) or []
    words = [str(word) for word in (named if isinstance(named, list) else [named])]
    if any("gate_up" in word for word in words):
        trainer.not_modeled(key, "gate and up have one adapter; here each has its own")
    return [*dict.fromkeys(name for word in words for name in _matrices(word))]


def _matrices(module: str) -> tuple[str, ...]:
    """Names in ``model.lora_targets`` of a module that a list names by its end; its own name for one of no family."""
    parts = module.lower().replace("shared_experts.", "shared_expert.").split(".")
    for start in range(len(parts)):
        if start and parts[start - 1] not in _OUTSIDE:
            break
        if names_inside := names.ADAPTED.get(".".join(parts[start:])):
            return names_inside
    return (module,)


_OUTSIDE = ("self_attn", "attn", "attention", "mlp", "ffn", "block_sparse_moe")
"""Modules of a block that may stand before a name and say nothing else; shared experts are other matrices."""


def _of_pattern(pattern: str) -> list[str] | None:
    """Names in ``model.lora_targets`` of the matrices that a pattern matches; None for a pattern that is not read.

    A product of alternatives has names that no model has (``mlp.q_proj``), which PEFT passes over.
    """
    matched = names_of(pattern)
    if matched is None:
        return None
    every = {name for inside in names.AROUND.values() for name in inside}
    blocks: dict[str, set[int]] = {}
    matrices: dict[str, None] = {}
    for block, name in in_blocks(matched):
        around, _, last = name.rpartition(".")
        if around in names.AROUND and last in every and last not in names.AROUND[around]:
            continue
        for matrix in _matrices(name):
            if block is None:
                matrices[matrix] = None
            elif matrix == name:  # of a captured module, which has no numbers of blocks
                return None
            else:
                blocks.setdefault(matrix, set()).add(block)
    some = [
        f"blocks.{span}.{name}" for name, numbers in blocks.items() if name not in matrices for span in spans(numbers)
    ]
    return [*matrices, *some] or None


def _in_blocks(run: TrainerRun, chosen: Sequence[str]) -> list[str]:
    """Names of matrices, of some blocks alone where a setting says so."""
    trainer = run.trainer
    key = trainer.first("peft_layers_to_transform", "layers_to_transform")
    if key is None:
        return [*chosen]
    value = trainer.value(key)
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        trainer.refuse(key, "names no blocks by their numbers", "use a list of numbers, the first block being 0")
        return [*chosen]
    return [f"blocks.{span}.{name}" for span in spans(numbers) for name in chosen]


def spans(numbers: Iterable[int]) -> list[str]:
    """Runs of numbers, as ``0-3``.

    >>> spans([4, 0, 1, 2])
    ['0-2', '4']
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _read_ranks(run: TrainerRun) -> None:
    trainer = run.trainer
    key = trainer.first("lora_rank_pattern", "rank_pattern")
    value = trainer.value(key) if key is not None else None
    if not value:
        return
    ranks = {_matrix(str(name)): rank for name, rank in value.items()} if isinstance(value, dict) else {"": 0}
    if "" in ranks:
        trainer.refuse(key or "", "gives ranks to other modules than matrices of blocks", f"{_NAMES_FIX} as its keys")
    else:
        trainer.put("model.lora_rank_pattern", ranks, key or "")


def _matrix(pattern: str) -> str:
    """Name in ``model.lora_targets`` of a pattern of one matrix, in all blocks or in one; empty for others."""
    match = re.fullmatch(
        r"\^?(?:.*\blayers\.(\d+)\.)?(?:[\w.]*\.)?(\w+)\$?", pattern.replace("\\.", ".").replace(".*", "")
    )
    if match is None:
        return ""
    block, last = match.groups()
    (name, *_) = names.ADAPTED.get(last.lower(), ("",))
    return f"blocks.{block}.{name}" if block is not None and name else name


def _read_dropout(run: TrainerRun) -> None:
    """Read dropout; TRL's argument has a default of its own (trl/trainer/model_config.py)."""
    trainer = run.trainer
    value: Any = trainer.value("lora_dropout")
    if run.preference is not None and drops_dropout(run, run.preference[0]):
        return
    origin = trainer.full("lora_dropout")
    if value is None and "use_peft" in trainer:
        value, origin = _TRL_DROPOUT, "the default of TRL's --lora_dropout"
    number = float(value) if isinstance(value, int | float) or _is_number(value) else 0.0
    if number > 0:
        run.reading.put("model.lora_dropout", number, origin)


def _is_number(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d*\.?\d+(e-?\d+)?", value) is not None


def _read_saved_modules(run: TrainerRun) -> None:
    trainer = run.trainer
    key = trainer.first("lora_modules_to_save", "modules_to_save", "additional_target")
    value = trainer.value(key) if key is not None else None
    words = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
    if not words:
        return
    ends = [names.ENDS.get(str(word).rpartition(".")[2], "") for word in words]
    if all(ends):
        trainer.put("model.lora_modules_to_save", [*dict.fromkeys(ends)], key or "")
    else:
        trainer.refuse(
            key or "", "trains other modules than the embedding and the head", "use embed_tokens and lm_head"
        )
