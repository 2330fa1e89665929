"""Reads the file of a captured model, and writes it as a word of a scenario that has no files beside it."""

from __future__ import annotations

import binascii
import zlib
from base64 import b64decode, b64encode
from functools import lru_cache
from pathlib import Path
from typing import Any

from simplan.errors import Problem, SpecError
from simplan.io import MAX_JSON_BYTES, parse_json, read_text
from simplan.model.captured.facts import CapturedModel
from simplan.problems import parse_model

FORMAT = "simplan-captured-model"
_MAX_PACKED_BYTES = 16 * 2**20


def is_captured(data: Any) -> bool:
    """True for the content of such a file."""
    return isinstance(data, dict) and data.get("format") == FORMAT


def read_captured(path: Path) -> CapturedModel:
    """Reads a captured model; files of the same text give one object, so that layers and hashes are made once.

    Raises:
        SpecError: The file is missing or wrong.
    """
    return _captured_of_text(read_text(path, MAX_JSON_BYTES), str(path))


@lru_cache(maxsize=16)
def _captured_of_text(text: str, file: str) -> CapturedModel:
    return captured_of(parse_json(text, file), file)


def captured_of(data: dict[str, Any], file: str) -> CapturedModel:
    """Captured model of the content of a file, whose name is for errors.

    Raises:
        SpecError: It is something else, or wrong.
    """
    if not is_captured(data):
        rule, fix = "is no captured model", "write one: simplan capture MODULE:FACTORY --inputs MODULE:FUNCTION -o FILE"
        raise SpecError(Problem(field="", rule=rule, fix=fix), file=file)
    return parse_model(CapturedModel, data, file=file)


def packed(captured: CapturedModel) -> str:
    """The file in one word: compressed, in base64; equal layers make it short."""
    text = captured.model_dump_json(exclude_defaults=True)
    return b64encode(zlib.compress(text.encode(), 9)).decode()


def unpacked(word: Any) -> CapturedModel:
    """Captured model of ``packed``.

    Raises:
        SpecError: The word is damaged, or too large.
    """
    fix = "copy the whole word, or give the file of simplan capture"
    try:
        unzip = zlib.decompressobj()
        content = unzip.decompress(b64decode(word, validate=True), _MAX_PACKED_BYTES)
    except (TypeError, ValueError, binascii.Error, zlib.error):
        raise SpecError(Problem(field="", rule="is no captured model as a word", fix=fix)) from None
    if not unzip.eof:
        raise SpecError(Problem(field="", rule=f"is cut short, or more than {_MAX_PACKED_BYTES:,} bytes", fix=fix))
    return _captured_of_text(content.decode(errors="replace"), "captured")
