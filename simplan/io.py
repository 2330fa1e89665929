"""File input and output: bounded reading of YAML and JSON, with errors that name file, line and fix.

Files are untrusted data: size, depth and alias expansion are limited, and no content is executed. A file that cannot be
read or written raises a ``SpecError``.
"""

from __future__ import annotations

import difflib
import errno
import json
import math
import os
import secrets
import shlex
import stat
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from simplan.document import Document, parse_yaml, whole_number
from simplan.errors import Problem, SpecError, file_error
from simplan.problems import parse_model, render_value

__all__ = [
    "MAX_JSON_BYTES",
    "MAX_YAML_BYTES",
    "Document",
    "as_argument",
    "decode_text",
    "folder_of",
    "is_file",
    "json_text",
    "parse_json",
    "parse_model",
    "read_bytes",
    "read_json",
    "read_model",
    "read_text",
    "read_yaml",
    "write_json",
    "write_model",
    "write_text",
    "write_whole",
]

MAX_YAML_BYTES = 4 * 1024 * 1024
MAX_JSON_BYTES = 512 * 1024 * 1024

_STANDARD_INPUT = Path("/dev/stdin")
_OPEN_FILES = frozenset({_STANDARD_INPUT, Path("/dev/fd"), Path("/proc/self/fd")})
"""Folders of files that a shell has already opened, such as ``<(...)``; other pipes may have no writer."""

Model = TypeVar("Model", bound=BaseModel)


def folder_of(path: str | Path) -> Path:
    """Base folder for relative paths in a file: its folder, or the working directory for pipes and standard input."""
    path = Path(path)
    return Path() if _OPEN_FILES & {path, path.parent} else path.parent


def as_argument(path: str | Path) -> str:
    """Format a path as a shell argument for a suggested command.

    >>> as_argument("a b.yaml"), as_argument("/dev/stdin"), as_argument("/dev/fd/63")
    ("'a b.yaml'", '-', 'FILE')
    """
    path = Path(path)
    if path == _STANDARD_INPUT:
        return "-"
    return "FILE" if path.parent in _OPEN_FILES else shlex.quote(str(path))


def read_yaml(path: str | Path) -> Document:
    """Read a YAML file.

    Raises:
        SpecError: The file is not UTF-8 text, is not YAML, or exceeds a limit (4 MiB, 40 levels, 300,000 values after
            alias expansion).
    """
    return parse_yaml(read_text(path, MAX_YAML_BYTES), str(path))


def is_file(path: Path) -> bool:
    """True for a file; False, too, for a name that no file can have, or in a folder that may not be read."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_json(path: str | Path, *, schema_version: int | None = None) -> dict[str, Any]:
    """Read a JSON document written by simplan: one object with ``schema_version``.

    Args:
        schema_version: Required version; None accepts any or a missing one.

    Raises:
        SpecError: The file is not JSON, holds NaN or infinity, or is of another version.
    """
    return parse_json(read_text(path, MAX_JSON_BYTES), str(path), schema_version=schema_version)


def parse_json(text: str, file: str, *, schema_version: int | None = None, kind: str | None = None) -> dict[str, Any]:
    """Parse a JSON document from text; ``file`` is its name for errors.

    Args:
        schema_version: As for ``read_json``.
        kind: Required value of the key ``kind``; None skips the check.

    Raises:
        SpecError: As ``read_json``, or it is of another kind.
    """
    whose = "a file that simplan wrote" if schema_version is not None or kind is not None else "a whole JSON document"
    try:
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float, parse_int=whole_number)
    except json.JSONDecodeError as error:
        raise file_error(file, f"this is not JSON: {error.msg}", f"give {whose}", error.lineno, error.colno) from None
    except _NotFiniteError as error:
        raise file_error(file, f"the file holds {error}, which is no number", "write the file again") from None
    except (RecursionError, ValueError):
        rule = "the file is nested too deeply or holds an absurd number"
        raise file_error(file, rule, f"give {whose}") from None
    if not isinstance(data, dict):
        raise SpecError(Problem(field="", value=render_value(data), rule="must be one JSON object"), file=file)
    _check_header(data, "schema_version", schema_version, file)
    _check_header(data, "kind", kind, file)
    return data


def read_model(path: str | Path, model: type[Model]) -> Model:
    """Read a JSON file with one spec, e.g. a ``Measurement`` or ``Calibration``.

    Raises:
        SpecError: As ``read_json``, or the data is not a ``model``.
    """
    version = model.model_fields.get("schema_version")
    data = read_json(path, schema_version=None if version is None else version.default)
    return parse_model(model, data, file=str(path))


def json_text(data: Any) -> str:
    """Format plain data as JSON text."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def write_json(path: str | Path, data: dict[str, Any]) -> None:
    """Write a JSON document atomically: a reader sees the old or the new file."""
    # NaN in a result is a bug and must not reach a file; json raises ValueError for NaN.
    write_text(Path(path), json_text(data))


def write_model(path: str | Path, model: BaseModel) -> None:
    """Write a spec as JSON; ``read_model`` reads it back."""
    write_json(path, model.model_dump(mode="json"))


class _NotFiniteError(Exception):
    """A JSON file contains a non-finite number."""


def _refuse_constant(name: str) -> float:
    raise _NotFiniteError(name)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _NotFiniteError(text[:20])
    return value


def _check_header(data: dict[str, Any], key: str, wanted: object, file: str) -> None:
    if wanted is None or (data.get(key) == wanted and not isinstance(data.get(key), bool)):
        return
    rule = f"must be {render_value(wanted)}: this program reads nothing else here"
    if key not in data:
        raise SpecError(Problem(field=key, rule=f"is missing; it {rule}"), file=file)
    raise SpecError(Problem(field=key, value=render_value(data[key]), rule=rule), file=file)


def read_text(path: str | Path, max_bytes: int) -> str:
    """Read a file as UTF-8 text; other content and more than ``max_bytes`` raise a ``SpecError``."""
    return decode_text(read_bytes(path, max_bytes), str(path))


def read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """Read a file; more than ``max_bytes`` raise a ``SpecError``."""
    path, file = Path(path), str(path)
    try:
        if path.is_dir():
            raise file_error(file, "is a folder", "name a file in it")
        if path.exists() and not path.is_file() and not _OPEN_FILES & {path, path.parent}:
            raise file_error(file, "is not an ordinary file", "name a text file")
        with path.open("rb") as stream:
            raw = stream.read(max_bytes + 1)
    except SpecError:
        raise
    except FileNotFoundError:
        if path.is_symlink():
            raise file_error(file, f"is a link to {path.readlink()}, which does not exist", "check the link") from None
        raise file_error(file, "does not exist", _nearest_file(path)) from None
    except PermissionError:
        raise file_error(file, "may not be read", "check its permissions") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise file_error(file, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > max_bytes:
        raise file_error(file, f"is larger than {max_bytes // 2**20} MiB", "this is no file for simplan")
    return raw


def decode_text(raw: bytes, file: str) -> str:
    """UTF-8 text of the content of a file; other content raises a ``SpecError``."""
    if b"\0" in raw:
        raise file_error(file, "is a binary file", "give a text file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        rule = f"is not UTF-8 text: byte 0x{raw[error.start]:02x}"
        raise file_error(file, rule, "save it as UTF-8", line) from None


def _nearest_file(path: Path) -> str:
    """Fix for a missing file: a file with a similar name in the same folder."""
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.suffix == path.suffix][:1000]
    except OSError:
        return "check the path"
    close = difflib.get_close_matches(path.name, beside, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else "check the path"


def write_text(path: Path, text: str | bytes) -> None:
    """Write a file atomically; text is UTF-8."""
    try:
        write_whole(path, text)
    except OSError as error:
        fix = "check that its folder exists and may be written"
        raise file_error(str(path), f"cannot be written: {error.strerror or error}", fix) from None


def write_whole(path: Path, text: str | bytes) -> None:
    """Write UTF-8 text or bytes atomically: to a temporary file in the same folder, synced, then renamed.

    If writing fails, for instance on a full disk, the old content stays. A file keeps its permissions. A device or pipe
    is written to directly.

    Raises:
        OSError: The file cannot be written.
    """
    content = text.encode() if isinstance(text, str) else text
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, "its links form a loop")
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    # a new file with a random name, so that no link of another user is followed
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            if target.exists():
                os.fchmod(handle, stat.S_IMODE(target.stat().st_mode))
            stream.write(content)
            stream.flush()
            os.fsync(handle)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
