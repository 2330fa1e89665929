"""Regular expressions of module names in fine-tuning configurations: the names that a pattern stands for.

PEFT matches a pattern that is one string with the whole name of a module (peft, tuners/tuners_utils.py,
``check_target_module_exists``). Names are those of transformers: ``model.layers.3.self_attn.q_proj``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_MAX_NAMES = 10_000
_MARKS = frozenset("()*+[]\\|?^$")
_TOKEN = re.compile(r"\(\?:|\[(?:\\d|0-9)\]\+?|\\d\+?|\[0-9\]\+?|\.[*+]\??|\\\.|[()|^$]|\w|[.-]")
ANY_NUMBER, ANY_NAME = "#", "*"
"""Parts of a name that a pattern leaves open: digits, and anything."""


class _UnreadError(ValueError):
    """A pattern with more than alternatives, optional groups and open numbers."""


def is_pattern(value: object) -> bool:
    """True for a text with the marks of a regular expression."""
    return isinstance(value, str) and not _MARKS.isdisjoint(value)


def names_of(pattern: str) -> tuple[str, ...] | None:
    r"""Names that a pattern matches; None for a pattern with other means than alternatives and open parts.

    >>> names_of(r"model.layers.[\d]+.(mlp|attn).(up|q)_proj")[:2]
    ('model.layers.#.mlp.up_proj', 'model.layers.#.mlp.q_proj')
    >>> names_of(r".*\.(3|7)\.(a_)?q"), names_of("q{2}")
    (('*.3.a_q', '*.3.q', '*.7.a_q', '*.7.q'), None)
    """
    tokens = _tokens(pattern)
    if tokens is None:
        return None
    try:
        names, rest = _alternatives(tokens)
    except _UnreadError:
        return None
    return None if rest else tuple(dict.fromkeys(names))


def _tokens(pattern: str) -> list[str] | None:
    tokens, place = list[str](), 0
    while place < len(pattern):
        if pattern[place] == "?":
            tokens.append("?")
            place += 1
            continue
        token = _TOKEN.match(pattern, place)
        if token is None:
            return None
        tokens.append(token[0])
        place = token.end()
    return tokens


def _alternatives(tokens: list[str]) -> tuple[list[str], list[str]]:
    """Names of alternatives up to a closing bracket or the end, and the tokens from there on."""
    alternatives: list[str] = []
    while True:
        names, tokens = _sequence(tokens)
        alternatives += names
        if tokens[:1] != ["|"]:
            return alternatives, tokens
        tokens = tokens[1:]


def _sequence(tokens: list[str]) -> tuple[list[str], list[str]]:
    names = [""]
    while tokens and tokens[0] not in (")", "|"):
        parts, tokens = _item(tokens)
        if tokens[:1] == ["?"]:
            parts, tokens = [*parts, ""], tokens[1:]
        names = [name + part for name in names for part in parts]
        if len(names) > _MAX_NAMES:
            raise _UnreadError
    return names, tokens


def _item(tokens: list[str]) -> tuple[list[str], list[str]]:
    first, rest = tokens[0], tokens[1:]
    if first in ("(", "(?:"):
        parts, rest = _alternatives(rest)
        if rest[:1] != [")"]:
            raise _UnreadError
        return parts, rest[1:]
    if first in ("^", "$"):
        return [""], rest
    if first[:2] in (".*", ".+"):
        return [ANY_NAME], rest
    if first[0] == "[" or first[:2] == "\\d":
        return [ANY_NUMBER], rest
    if first == "?":
        raise _UnreadError
    return [first.removeprefix("\\")], rest


_IN_BLOCK = re.compile(r"(?:^|[.*])(?:layers|h|blocks)\.(#|\d+)\.(.+)$")
_WRAPPER = "_checkpoint_wrapped_module."


def in_blocks(names: Iterator[str] | tuple[str, ...]) -> Iterator[tuple[int | None, str]]:
    """Block of each name, None for all blocks, and the name inside of a block.

    >>> [*in_blocks(("model.layers.#.mlp.up_proj", "h.3.attn.c_attn", "*self_attn.q_proj", "lm_head"))]
    [(None, 'mlp.up_proj'), (3, 'attn.c_attn'), (None, 'self_attn.q_proj'), (None, 'lm_head')]
    """
    for name in names:
        plain = name.replace(_WRAPPER, "")
        match = _IN_BLOCK.search(plain)
        if match is None:
            yield None, plain.lstrip(f"{ANY_NAME}.")
        else:
            yield (None if match[1] == ANY_NUMBER else int(match[1])), match[2].lstrip(f"{ANY_NAME}.")
