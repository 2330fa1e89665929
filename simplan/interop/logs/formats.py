"""Logs found by content: text of a framework, JSON of the Trainer, of a profiler or of a snapshot, or a pickle."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simplan.errors import file_error
from simplan.interop.logs import frameworks, memory_snapshot, profiler
from simplan.interop.logs.reading import LogReading, plain_text
from simplan.io import MAX_JSON_BYTES, decode_text, parse_json, read_bytes
from simplan.runs.measurement import Measurement
from simplan.validate.logged_run import YAML_SUFFIXES, LoggedRun, parse_measured

MAX_TRACE_BYTES = 256 * 2**20
KNOWN_LOGS = "Megatron-LM, Megatron Bridge, NeMo, torchtitan, DeepSpeed and the Hugging Face Trainer"
"""Programs whose logs are read, in words."""
_GZIP = b"\x1f\x8b"
_PEAKS = ("peak_allocated_gib", "peak_reserved_gib", "peak_device_gib")


def read_run(file: str | Path) -> Measurement | LoggedRun:
    """Read a measurement of ``simplan run``, a log, a trace, a snapshot, or values of a log that a person wrote.

    Raises:
        SpecError: The file cannot be read, or is something else.
    """
    return parse_run(read_bytes(file, MAX_JSON_BYTES), str(file))


def parse_run(content: bytes, file: str) -> Measurement | LoggedRun:
    """Parse the content of a file as ``read_run`` does; ``file`` is its name, also used in errors.

    Raises:
        SpecError: As ``read_run``.
    """
    if memory_snapshot.is_pickle(content):
        reading = memory_snapshot.read_snapshot(memory_snapshot.load_pickle(content, file), file)
        return reading.run("")
    if content.startswith(_GZIP):
        content = _unzipped(content, file)
    if content[:1] == b"\xef":
        content = content.removeprefix(b"\xef\xbb\xbf")
    is_json = content[:4096].lstrip()[:1] == b"{"
    if is_json:
        return _parse_json(content, file)
    if file.lower().endswith(YAML_SUFFIXES):
        return parse_measured(decode_text(content, file), file)
    return _parse_text(content, file)


def is_log(text: str) -> bool:
    """True for text with lines of steps, or of memory, that a framework writes."""
    return any(reader(plain_text(text)) is not None for reader in frameworks.READERS)


def _parse_json(content: bytes, file: str) -> Measurement | LoggedRun:
    text = content.decode("utf-8", errors="replace")
    if text.lstrip().startswith("{'"):  # a dictionary that the Trainer printed
        return _parse_text(content, file)
    is_large = len(content) > MAX_TRACE_BYTES
    if is_large and '"traceEvents"' in text:
        rule = f"is a trace of more than {MAX_TRACE_BYTES // 2**20} MiB"
        raise file_error(file, rule, "profile fewer steps, without with_stack")
    text = decode_text(content, file)
    data = parse_json(text, file)
    reading = _reading_of_json(data, file)
    return parse_measured(text, file) if reading is None else reading.run("")


def _reading_of_json(data: Mapping[str, Any], file: str) -> LogReading | None:
    if profiler.is_trace(data):
        return profiler.read_trace(data, file)
    if memory_snapshot.is_snapshot(data):
        return memory_snapshot.read_snapshot(data, file)
    if frameworks.is_trainer_state(data):
        return frameworks.read_trainer_state(data, file)
    return None


def _parse_text(content: bytes, file: str) -> LoggedRun:
    """Read text: times by the first reader that finds any, peaks by the first that finds any."""
    if b"\0" in content:
        raise file_error(file, "is a binary file", "give a log, a trace or a snapshot")
    text = plain_text(content.decode("utf-8", errors="replace"))  # a progress bar may be cut inside a character
    readings = [reading for reader in frameworks.READERS if (reading := reader(text)) is not None]
    if not readings:
        rule = f"has no lines of steps that simplan knows; it knows those of {KNOWN_LOGS}"
        fix = "write YAML: step_times_s: [2.41, 2.39, ...]"
        raise file_error(file, rule, fix)
    main = next((reading for reading in readings if reading.has_time), readings[0])
    others = dict(main.others)
    if not any(name in others for name in _PEAKS):
        for reading in readings:
            others |= {name: reading.others[name] for name in _PEAKS if name in reading.others and name not in others}
    return LogReading(main.title, main.lines, main.quantity, main.steps, others, main.notes).run(text)


def _unzipped(content: bytes, file: str) -> bytes:
    """Content of a gzip file, up to the size of a trace."""
    unzip = zlib.decompressobj(wbits=31)
    try:
        text = unzip.decompress(content, MAX_TRACE_BYTES + 1)
    except zlib.error:
        raise file_error(file, "is a damaged gzip file", "compress it again") from None
    if len(text) > MAX_TRACE_BYTES:
        rule = f"is more than {MAX_TRACE_BYTES // 2**20} MiB unpacked"
        raise file_error(file, rule, "profile fewer steps, without with_stack")
    return text
