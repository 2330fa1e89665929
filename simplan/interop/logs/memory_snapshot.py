"""Memory snapshots of torch (``torch.cuda.memory._dump_snapshot``): the peak of what the allocator recorded.

A pickle can name any function for its reader to call. Here it is read as data: the reader knows the instructions for
numbers, text, lists, tuples and dictionaries, and refuses every other one, so nothing is imported, made or called.

The peak is found backward from the end of the recorded history, at which the sizes of all segments are known. History
is bounded (``max_entries``), so a peak before it is not seen.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

from simplan.errors import file_error
from simplan.interop.logs.reading import LogReading
from simplan.units import GIB, counted

MAX_BYTES = 64 * 2**20
_TO_JSON = (
    "convert a snapshot that you trust where torch runs, without stacks: "
    "`python -c \"import json, pickle; s = pickle.load(open('snapshot.pickle', 'rb')); "
    "json.dump({k: s[k] for k in ('segments', 'device_traces')}, open('snapshot.json', 'w'), default=str)\"`"
)
_INSTRUCTIONS = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
    pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
    pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8, pickle.BINBYTES, pickle.SHORT_BINBYTES,
    pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.LIST,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.DICT,
    pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET,
)  # fmt: skip
_ALLOCATED = {"alloc": 1, "free_completed": -1}
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class _DataUnpickler(pickle._Unpickler):  # the one in C has no table of instructions
    """Reader of pickles without objects: any instruction that is not in the table ends it."""

    dispatch: ClassVar[dict[int, Any]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _INSTRUCTIONS}

    def find_class(self, module: str, name: str) -> Any:
        """Never; no instruction that is known asks for it."""
        raise pickle.UnpicklingError(f"{module}.{name}")


def is_pickle(content: bytes) -> bool:
    """True for a pickle of protocol 2 or later."""
    return content[:1] == pickle.PROTO and content[1:2] in {bytes([version]) for version in range(2, 6)}


def load_pickle(content: bytes, file: str) -> dict[str, Any]:
    """Data of a pickle that has nothing but data.

    Raises:
        SpecError: The pickle is too large, damaged, or has objects.
    """
    if len(content) > MAX_BYTES:
        raise file_error(file, f"is a pickle of more than {MAX_BYTES // 2**20} MiB", _TO_JSON)
    try:
        data = _DataUnpickler(io.BytesIO(content)).load()
    except KeyError as error:
        code = error.args[0] if error.args else None
        if isinstance(code, int) and code not in _DataUnpickler.dispatch:
            rule = "is a pickle with objects, which may run code when it is read: simplan reads plain data only"
            raise file_error(file, rule, _TO_JSON) from None
        raise file_error(file, "is a damaged pickle", "dump the snapshot again") from None
    except Exception:  # whatever damaged bytes lead to: it is data of others
        raise file_error(file, "is a damaged pickle", "dump the snapshot again") from None
    if not isinstance(data, dict):
        raise file_error(file, "is a pickle of something else than a memory snapshot", "give a snapshot")
    return data


def is_snapshot(data: Mapping[str, Any]) -> bool:
    """True for the data of a snapshot."""
    return isinstance(data.get("segments"), list) and "device_traces" in data


def read_snapshot(data: Mapping[str, Any], file: str) -> LogReading:
    """Read the peaks of a snapshot.

    Raises:
        SpecError: The data is none of a snapshot, or nothing was allocated.
    """
    if not is_snapshot(data):
        raise file_error(file, "is no memory snapshot: it has no segments and device_traces", "give a snapshot")
    segments = [segment for segment in data["segments"] if isinstance(segment, dict)]
    devices = {_size(segment.get("device", 0)) for segment in segments}
    if not segments or len(devices) > 1:
        rule = f"has memory of {len(devices)} devices" if segments else "has no segments: nothing was allocated"
        raise file_error(file, rule, "dump a snapshot of a process with one GPU, during training")
    allocated = sum(_size(segment.get("allocated_size")) for segment in segments)
    reserved = sum(_size(segment.get("total_size")) for segment in segments)
    traces = [trace for trace in data["device_traces"] or [] if isinstance(trace, list)]
    events = [event for trace in traces for event in trace if isinstance(event, dict)]
    peaks = {
        "peak_allocated_gib": _peak(allocated, events, _ALLOCATED),
        "peak_reserved_gib": _peak(reserved, events, _RESERVED),
    }
    others = {name: (peak / GIB,) for name, peak in peaks.items() if 0 < peak < 1e18}
    if not others:
        raise file_error(file, "has segments without sizes", "dump the snapshot again")
    notes = ["the peak is that of the recorded history: an earlier one is not seen"]
    if not events:
        notes = ["no history was recorded, so the peak is what was in use when the snapshot was made"]
    lines = f"{counted(len(segments), 'segment')} and {counted(len(events), 'event')}"
    return LogReading("a memory snapshot of torch", lines, others=others, notes=tuple(notes))


def _peak(end_bytes: int, events: list[dict[str, Any]], signs: Mapping[str, int]) -> int:
    """Largest size on the way back from the end of a history."""
    peak = now = end_bytes
    for event in reversed(events):
        action = event.get("action")
        now -= signs.get(action, 0) * _size(event.get("size")) if isinstance(action, str) else 0
        peak = max(peak, now)
    return peak


def _size(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**60 else 0
