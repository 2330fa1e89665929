"""Adapters as PEFT's, axolotl's, TRL's and LLaMA-Factory's settings say them: matrices, ranks, blocks and dropout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from simplan.interop.frameworks.hugging_face import names
from simplan.interop.frameworks.hugging_face.preference import drops_dropout

if TYPE_CHECKING:  # which calls this module
    from simplan.interop.frameworks.hugging_face.run import TrainerRun

_NAMES_FIX = "use all-linear, or names such as q_proj and v_proj"
_TRL_DROPOUT = 0.05


def read_targets(run: TrainerRun) -> None:
    """Read which matrices of which blocks have adapters, their ranks and dropout, and what is trained beside them."""
    targets = _targets(run)
    if targets is not None:
        where, chosen = targets
        run.reading.put("model.lora_targets", _in_blocks(run, chosen), where)
    _read_ranks(run)
    _read_dropout(run)
    _read_saved_modules(run)


def _targets(run: TrainerRun) -> tuple[str, list[str]] | None:
    """Setting, and names of matrices in ``model.lora_targets``; None after a refusal."""
    trainer = run.trainer
    key = trainer.first("lora_target_modules", "lora_target")
    every = trainer.is_true("lora_target_linear")
    value = trainer.value(key) if key is not None else None
    words = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
    where = trainer.full("lora_target_linear" if every else key or "")
    if every:
        words = ["all-linear", *words]
    if not words:
        usual = ["all"] if run.is_factory else names.PEFT_TARGETS
        return "the default of " + ("LLaMA-Factory" if run.is_factory else "PEFT"), usual
    known = [names.ADAPTED.get(str(word).lower().rpartition(".")[2], "") for word in words]
    if all(known):
        ends = [name for name in dict.fromkeys(known) if name in names.ENDS.values()]
        return where, ["all", *ends] if "all" in known else [*dict.fromkeys(known)]
    pattern = any(mark in str(value) for mark in "(*\\[+") and isinstance(value, str)
    rule = "is a pattern of names, which is not read" if pattern else "names other matrices than those of a block"
    run.reading.refuse(where, rule, _NAMES_FIX)
    return None


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
    return [f"blocks.{span}.{name}" for span in _spans(numbers) for name in chosen]


def _spans(numbers: Iterable[int]) -> list[str]:
    """Runs of numbers, as ``0-3``.

    >>> _spans([4, 0, 1, 2])
    ['0-2', '4']
    """
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found]


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
    found = re.fullmatch(
        r"\^?(?:.*\blayers\.(\d+)\.)?(?:[\w.]*\.)?(\w+)\$?", pattern.replace("\\.", ".").replace(".*", "")
    )
    if found is None:
        return ""
    block, last = found.groups()
    name = names.ADAPTED.get(last.lower(), "")
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
