"""Tables keyed by an enum: a member that a table lacks ends as a KeyError, after all training in the worst case."""

from __future__ import annotations

import importlib
import pkgutil
import re
import warnings
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_COLLECTIVES_OF_LAPS = ("no rank repeats the bytes of others in it, so it has its own formula", "ALL_TO_ALL RING SEND")
_COMPUTES = ("read for compute actions only", "SEND_F RECV_F SEND_B RECV_B UNSHARD RESHARD REDUCE_GRAD OPTIM")
_DRAWN = ("only actions with work on the compute stream are drawn", "SEND_F RECV_F SEND_B RECV_B RESHARD")
PARTIAL = {
    "simplan.cli.terminal.drawing._COLOURS": _DRAWN,
    "simplan.cost.communication.nccl.LAPS": _COLLECTIVES_OF_LAPS,
    "simplan.interop.chakra._COLLECTIVES": ("written as nodes for sends and receives", "RING SEND"),
    "simplan.program.lowering.lower._BACKWARD_PHASE": (
        "read for backwards only",
        "FORWARD SEND_F RECV_F SEND_B RECV_B UNSHARD RESHARD REDUCE_GRAD OPTIM",
    ),
    "simplan.program.tables.check._SENT_BY": (
        "asked whether it has a kind: the kinds that are sent",
        "FORWARD BACKWARD BACKWARD_INPUT BACKWARD_WEIGHT RECV_F RECV_B UNSHARD RESHARD REDUCE_GRAD OPTIM",
    ),
    "simplan.program.tables.complete._UNIT_TIME": _COMPUTES,
    "simplan.report.checks._LEVELS": ("asked whether it has a status: checks that passed are not listed", "PASSED"),
    "simplan.report.checks._TAGS": ("asked whether it has a status: JUnit has no element for it", "PASSED"),
    "simplan.report.drawings.comparison_svg._STRIPES": (
        "asked whether it has a share: drawn as a box, or as the ground",
        "COMPUTE RECOMPUTE WAIT HOST OPTIMIZER",
    ),
    "simplan.report.drawings.drawing.WORDS": _DRAWN,
    "simplan.report.drawings.drawing_svg.COLOURS": _DRAWN,
    "simplan.report.drawings.drawing_text._FILLS": _DRAWN,
    "simplan.search.bounds.in_flight._KINDS": _COMPUTES,
    "simplan.validate.activity._SHARES": ("read for what is computed once on a device", "RECOMPUTE COMMUNICATION HOST"),
    "simplan.validate.activity._STREAMS": ("communication is never on the compute stream", "COMPUTE"),
    "simplan.validate.logged._KINDS": ("asked whether it has a share: these have no cost estimate", "WAIT UNEXPLAINED"),
}  # fmt: skip
"""Tables that lack members on purpose: the reason, and the members. A new member of the enum needs a decision here."""


def modules(package: str) -> Iterator[ModuleType]:
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not info.name.endswith("__main__"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of other packages, while they are imported
                yield importlib.import_module(info.name)


def enum_tables() -> Iterator[tuple[ModuleType, str, Mapping[Any, Any], type[Enum]]]:
    """Module-level mappings whose keys are members of one enum, with the module that assigns them."""
    for module in (*modules("simplan"), *modules("executor")):
        assigned = set(re.findall(r"^(\w+)\b[^=\n]* = ", Path(module.__file__ or "").read_text(), re.MULTILINE))
        for name in assigned & vars(module).keys():
            table = vars(module)[name]
            kinds = {type(key) for key in table} if isinstance(table, Mapping) else set()
            if len(kinds) == 1 and issubclass(kind := kinds.pop(), Enum):
                yield module, name, table, kind


def is_subscripted(module: ModuleType, name: str) -> bool:
    """True if ``NAME[...]`` is read: ``get`` or a loop has no KeyError. Public tables are imported by other modules."""
    files = [Path(module.__file__ or "")] if name.startswith("_") else (ROOT / "simplan").rglob("*.py")
    return any(re.search(rf"\b{name}\[", file.read_text()) for file in files)


def test_tables_have_every_member_of_their_enum() -> None:
    missing = {
        f"{module.__name__}.{name}": {member.name for member in kind if member not in table}
        for module, name, table, kind in enum_tables()
        if is_subscripted(module, name)
    }
    assert {"simplan.validate.activity._STREAMS", "simplan.program.action._WORDS"} <= missing.keys()
    expected = {name: set(members.split()) for name, (_, members) in PARTIAL.items()}
    assert {name: members for name, members in missing.items() if members} == expected
