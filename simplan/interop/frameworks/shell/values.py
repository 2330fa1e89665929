"""Values of a launch script by their parts, of which some may be unknown: splitting, joining and testing them."""

from __future__ import annotations

import operator
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from simplan.interop.frameworks.shell.lexer import OTHER_FILE

UNSET = "is not set in the script"
ARGUMENT = "is an argument of the script"
FILE = ">"
"""First character of the names of files among the variables."""
_MAX_TEST_WORDS = 200
_ENDS_COMMAND = re.compile(r"\d*(&?>|<|\||;|&)")
_TESTS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Word:
    """Word of a command, or a part of one.

    Attributes:
        text: The text, in which unknown parts are as written.
        line: 1-based line of its first character.
        unknown: Reason that the text is not known, as a predicate (``is not set in the script``); empty if it is known.
        condition: Line of the undecided condition that the word depends on; None for none.
    """

    text: str
    line: int
    unknown: str = ""
    condition: int | None = None

    @classmethod
    def of(cls, value: Value, line: int) -> Word:
        """Word of a value that begins in a line."""
        return cls(
            "".join(piece.text for piece in value),
            value[0].line if value else line,
            next((piece.unknown for piece in value if piece.unknown), ""),
            next((piece.condition for piece in value if piece.condition is not None), None),
        )

    @property
    def doubt(self) -> str:
        """Reason that the text is not certain, as a predicate; empty if it is."""
        if self.condition is not None:
            return f"depends on the condition in line {self.condition % OTHER_FILE}, which simplan cannot decide"
        return self.unknown


Value = tuple[Word, ...]
"""Value by its parts, of which some may be unknown."""


def file_key(name: str) -> str:
    """Name of a file among the variables."""
    return FILE + posixpath.normpath(name)


def truth(words: Sequence[Word]) -> bool | None:
    """Truth of ``[ ... ]`` or ``[[ ... ]]``, by its words; None if it depends on what is unknown, or on files."""
    if len(words) > _MAX_TEST_WORDS:
        return None
    texts = [word.text for word in words]
    for joint, decides in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if joint in texts[1:]:
            at = texts.index(joint, 1)
            sides = truth(words[:at]), truth(words[at + 1 :])
            return decides if decides in sides else None if None in sides else not decides
    match texts:
        case ["!", *_]:
            inner = truth(words[1:])
            return None if inner is None else not inner
        case ["-n" | "-z" as kind, text] if words[1].unknown in (UNSET, ARGUMENT):
            return kind == "-z" if text.startswith("$") else None  # as ${NAME:-default} has it
        case _ if any(word.unknown or word.condition for word in words):
            return None
        case ["-n" | "-z" as kind, text]:
            return bool(text) == (kind == "-n")
        case [text]:
            return bool(text)
        case [left, "=" | "==" | "!=" as comparison, right]:
            return fnmatchcase(left, right) == (comparison != "!=")
        case [left, comparison, right] if comparison in _TESTS:
            first, second = _integer(left), _integer(right)
            return None if first is None or second is None else _TESTS[comparison](first, second)
    return None


def merged(
    name: str, before: tuple[Value, ...] | None, after: Sequence[tuple[Value, ...] | None], line: int
) -> tuple[Value, ...]:
    """Elements of a variable after branches, of which it is not known which one is run."""

    def conditional(value: Value) -> Value:
        return tuple(replace(piece, condition=line) for piece in value)

    first = after[0]
    if first is not None and all(result == first for result in after):
        return first
    known = [result for result in after if result is not None]
    if name.startswith(FILE) and all(result == known[0] for result in known):
        return known[0]  # the training needs the file, so that the branch which writes it is run
    start = before or ()
    if all(result[: len(start)] == start for result in known) and (
        start[1:] or any(len(result) != 1 for result in known)
    ):
        return (*start, *(conditional(value) for result in known for value in result[len(start) :]))
    texts, head = [first_of(result) for result in known], first_of(start)
    if head and all(text[len(text) - len(head) :] == head for text in texts):
        added = [piece for text in texts for piece in text[: len(text) - len(head)]]
        return ((*conditional(tuple(added)), *head),)
    if all(text[: len(head)] == head for text in texts):
        rests = [text[len(head) :] for text in texts]
        words = ["".join(piece.text for piece in rest).strip() for rest in rests]
        if all(word.startswith("-") or not word for word in words):
            return ((*head, *(piece for rest in rests for piece in conditional((Word(" ", line), *rest)))),)
    why = f"depends on the condition in line {line % OTHER_FILE}, which simplan cannot decide"
    return ((Word(f"${name}", line, why),),)


def first_of(elements: tuple[Value, ...]) -> Value:
    """First element of a variable; nothing for an empty array."""
    return elements[0] if elements else ()


def runs_of(value: Iterable[Word]) -> Iterator[tuple[Word, bool]]:
    """Pieces of an unquoted value split at spaces; True with a piece that ends a word."""
    for piece in value:
        for text in [piece.text] if piece.unknown else re.findall(r"\s+|\S+", piece.text):
            yield replace(piece, text=text), not piece.unknown and text.isspace()


def split_words(pieces: Iterable[Word]) -> list[Value]:
    """Words of a value, split at spaces."""
    words: list[list[Word]] = [[]]
    for piece, ends in runs_of(pieces):
        if ends:
            words.append([])
        else:
            words[-1].append(piece)
    return [tuple(word) for word in words if word]


def as_evaluated(piece: Word) -> Word:
    """Part of an argument of ``eval``, without the quotes that eval removes; what it would expand is unknown."""
    expands = not piece.unknown and ("$" in piece.text or "`" in piece.text)
    unknown = "is expanded by eval, which simplan does not follow" if expands else piece.unknown
    return replace(piece, text=piece.text.replace('"', ""), unknown=unknown)


def command_of(words: Sequence[Value]) -> Sequence[Value]:
    """Words of a command up to its redirections, or to the next command."""
    texts = ["".join(piece.text for piece in word) for word in words]
    return words[: next((at for at, text in enumerate(texts) if _ENDS_COMMAND.match(text)), len(words))]


def number_of(value: Value) -> int | None:
    """Whole number that a value is; None for anything else."""
    return None if any(piece.unknown for piece in value) else _integer("".join(piece.text for piece in value))


def _integer(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.lstrip("-").isdecimal() and text.isascii() and len(text) <= 19 else None
