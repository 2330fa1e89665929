"""Output of the few commands by which launch scripts write configurations: ``cat``, ``echo``, ``printf``, ``sed``."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from simplan.errors import Problem
from simplan.interop.configuration import Setting
from simplan.interop.frameworks.shell.lexer import own_line
from simplan.interop.frameworks.shell.values import Value, Word

COMMANDS = ("cat", "echo", "printf", "sed", "tee", "jq", "envsubst")
"""Commands that start no training, and whose output may be a configuration."""
_ESCAPES = {"\\n": "\n", "\\t": "\t", '\\"': '"', "\\\\": "\\"}
_ESCAPE = re.compile(r"\\[nt\"\\]")
_SUBSTITUTION = re.compile(r"s(?P<mark>[/|#,@:])(?P<old>[\w .\-]+)(?P=mark)(?P<new>.*)(?P=mark)g?;?", re.DOTALL)
"""``s/OLD/NEW/g`` with plain text as OLD."""
_PLACEHOLDER = re.compile(r"__UNKNOWN_\d+__")
_NAMES = ("path", "dir", "name", "file", "project", "team", "group", "repo", "id")
"""Ends of keys that name files and runs."""
_UNQUOTED = re.compile(r"([:=\[,]\s*)(__UNKNOWN_\d+__)(?=\s*(?:[,}\]#\n]|\Z))")


def output_of(words: Sequence[Value], stdin: Value | None, read: Callable[[str], Value | None]) -> Value | None:
    """Text that a command prints; None if it cannot be known.

    Args:
        words: Words of the command.
        stdin: Text that it is given, by a here-document or a pipe; None if there is none, or it is not known.
        read: Text of a file by its name.
    """
    name, arguments = _text(words[0]), words[1:]
    options = [_text(word) for word in arguments if _text(word).startswith("-") and _text(word) != "-"]
    values = [word for word in arguments if _text(word) not in options]
    match name:
        case "cat" | "tee":
            names = [_text(value) for value in values] if name == "cat" else []
            texts = [stdin if name == "-" else read(name) for name in names or ["-"]]
            return None if None in texts else tuple(piece for text in texts for piece in text or ())
        case "echo":
            is_escaped = any("e" in option for option in options)
            text = _spaced(values)
            return _unescaped(text) if is_escaped else text
        case "printf" if values and "%" not in _text(values[0]):
            return _unescaped(values[0])
        case "printf" if values and _text(values[0]) in ("%s", "%s\\n"):
            end = Word("\n" if _text(values[0]) != "%s" else "", 0)
            return tuple(piece for value in values[1:] for piece in (*value, end))
        case "sed" if values and options in ([], ["-e"], ["-i"]):
            return _substituted(values[0], stdin if len(values) == 1 else read(_text(values[1])))
    return None


def written_files(words: Sequence[Value]) -> list[tuple[str, bool]]:
    """Files that a command writes by its arguments, each with True if it appends."""
    texts = [_text(word) for word in words]
    if texts[0] == "tee":
        return [(text, "-a" in texts) for text in texts[1:] if not text.startswith("-")]
    return [(texts[-1], False)] if texts[0] == "sed" and "-i" in texts else []


def written_file(name: str, files: Mapping[str, Value]) -> tuple[str, Mapping[str, Word]] | None:
    """Text of a file that a script has written, with placeholders for unknown parts, and these parts by placeholders.

    None if it has written no such file, or nothing of the file is known. A file in another folder counts if it is the
    only one of that name.
    """
    value = files.get(posixpath.normpath(name))
    if value is None:
        others = [content for other, content in files.items() if posixpath.basename(other) == posixpath.basename(name)]
        value = others[0] if len(others) == 1 else None
    if value is None or all(piece.unknown for piece in value):
        return None
    unknown: dict[str, Word] = {}
    text = ""
    for piece in value:
        if piece.unknown or piece.condition is not None:
            placeholder = f"__UNKNOWN_{len(unknown)}__"
            unknown[placeholder] = piece
            text += placeholder
        else:
            text += piece.text
    return _UNQUOTED.sub(r'\1"\2"', text), unknown


def doubts(name: str, settings: Iterable[Setting], unknown: Mapping[str, Word]) -> list[Problem]:
    """Errors about settings of a written file whose values are placeholders; names of files and runs do not matter."""
    fix = "write its value into the script"
    return [
        Problem(field=f"{name}: {setting.key}", rule=word.doubt, value=word.text, fix=fix, line=own_line(word.line))
        for setting in settings
        if (word := unknown.get(str(setting.value))) is not None and not setting.key.endswith(_NAMES)
    ]


def restored(data: Any, unknown: Mapping[str, Word]) -> Any:
    """Data of a written file, with unknown parts as the script has them in place of their placeholders."""
    if isinstance(data, dict):
        return {key: restored(value, unknown) for key, value in data.items()}
    if isinstance(data, list):
        return [restored(value, unknown) for value in data]
    if isinstance(data, str):
        return _PLACEHOLDER.sub(lambda match: unknown[match[0]].text if match[0] in unknown else match[0], data)
    return data


def _text(value: Value) -> str:
    return "".join(piece.text for piece in value)


def _spaced(values: Sequence[Value]) -> Value:
    line = next((value[0].line for value in values if value), 0)
    spaced = [piece for value in values for piece in (*value, Word(" ", line))]
    return (*spaced[:-1], Word("\n", line))


def _unescaped(value: Value) -> Value:
    return tuple(replace(piece, text=_ESCAPE.sub(lambda match: _ESCAPES[match[0]], piece.text)) for piece in value)


def _substituted(expression: Value, text: Value | None) -> Value | None:
    """Text with one word replaced; None for other expressions of sed."""
    match = _SUBSTITUTION.fullmatch(_text(expression))
    if text is None or match is None:
        return None
    new = next((replace(piece, text=match["new"]) for piece in expression if piece.unknown), None)
    replaced = new or Word(match["new"], expression[0].line)
    pieces: list[Word] = []
    for piece in text:
        first, *others = [piece.text] if piece.unknown else piece.text.split(match["old"])
        pieces.append(replace(piece, text=first))
        for other in others:
            pieces += [replaced, replace(piece, text=other)]
    return tuple(piece for piece in pieces if piece.text)
