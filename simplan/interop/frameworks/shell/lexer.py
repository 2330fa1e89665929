"""Words and operators of launch scripts, with redirections and here-documents of their commands.

Tokens are those of POSIX.1-2017, Shell Command Language, section 2.3, with ``[[ ]]`` and ``(( ))`` of bash.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from simplan.errors import SpecError, file_error

OTHER_FILE = 1_000_000
"""Lines of the first script that a script calls are counted from here on, those of the second from twice this on."""
_MAX_DEPTH = 40
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(rf"{NAME.pattern}|[@*#?$!0-9-]")
_BRACED = re.compile(r"(#?)(\w+|[@*])(\[[^\]]*\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_BLANKS = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)*")
_REDIRECTION = re.compile(r"\d*(&>>?|<<<|<<-?|[<>]&|>>|>\||<>|<(?!\()|>(?!\())")
_WRITES = (">", ">|", ">>", "&>", "&>>")
_OPERATOR = re.compile(r"&&|\|\||;;|[;&|()\n]")
_TEST_OPERATOR = re.compile(r"&&|\|\||[()<>;&|]")
_ENDS = " \t\n;&|()<>"
_PLAIN = re.compile(rf"[^{_ENDS}'\"\\$`]+")
_IN_QUOTES = re.compile(r'[^"\\$`]+')
_IN_DOCUMENT = re.compile(r"[^\\$`]+")
_IN_BRACKETS = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\\'"(){}]+|.""", re.DOTALL)
_IN_ARITHMETIC = re.compile(r"\\.|[^\\()]+|.", re.DOTALL)


class Part(NamedTuple):
    """Part of a word.

    Attributes:
        kind: ``text``; ``variable``; ``arithmetic``; or ``command``, the output of a command, which nobody runs.
        text: The text; the name of the variable; the expression; or the command as written.
        line: 1-based line.
        quoted: True inside quotes, where spaces do not end words.
        operator: Operator of ``${NAME...}``: ``-``, ``:-`` and the like, ``[@]`` for all elements of an array, ``#``
            for its length, or ``?`` for one that is not read.
        default: Word after the operator.
    """

    kind: str
    text: str
    line: int
    quoted: bool = False
    operator: str = ""
    default: tuple[Part, ...] = ()


SourceWord = tuple[Part, ...]
"""Word as written."""


@dataclass(slots=True)
class HereDocument:
    """Text between ``<<END`` and ``END``, which the lexer fills in at the end of the line.

    Attributes:
        end: The word after the text.
        is_quoted: True for ``<<'END'``, whose variables stay as they are.
        is_indented: True for ``<<-END``, of whose lines tabs are left out.
    """

    end: str
    is_quoted: bool
    is_indented: bool
    text: str = ""
    line: int = 0


class Output(NamedTuple):
    """File of ``> FILE``, or of ``>> FILE``, which appends."""

    file: SourceWord
    appends: bool


def own_line(line: int) -> int | None:
    """Line of the first script; None for one of another script that it calls."""
    return line if line < OTHER_FILE else None


def parse_document(document: HereDocument, file: str) -> SourceWord:
    """Parts of a here-document, in which quotes are text.

    Raises:
        SpecError: A command or an expansion in it is not closed.
    """
    if document.is_quoted:
        lines = enumerate(document.text.splitlines(keepends=True), start=document.line)
        return tuple(Part("text", line, number, quoted=True) for number, line in lines)
    return tuple(Lexer(document.text, file, document.line).quoted_text(""))


class Token(NamedTuple):
    """A word or an operator.

    Attributes:
        text: As written; empty at the end of the script.
        line: 1-based line.
        word: Parts of a word; None for an operator and at the end.
    """

    text: str
    line: int
    word: SourceWord | None = None


@dataclass(slots=True)
class Lexer:
    """Characters of a script as tokens, one at a time."""

    text: str
    file: str
    first_line: int
    depth: int = 0
    position: int = 0
    _newlines: list[int] = field(init=False)
    document: HereDocument | None = None
    output: Output | None = None
    _here_documents: list[HereDocument] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._newlines = [match.start() for match in re.finditer("\n", self.text)]

    def line(self, position: int | None = None) -> int:
        """1-based line of a position, by default the current one."""
        return self.first_line + bisect_left(self._newlines, self.position if position is None else position)

    def error(self, what: str, fix: str = "check quotes, parentheses, if and fi", line: int | None = None) -> SpecError:
        """Error about the text at a line, by default the current one."""
        return file_error(self.file, f"this is no shell script: {what}", fix, (line or self.line()) % OTHER_FILE)

    def descend(self) -> None:
        """Enter a body, a function or a default of ``${NAME:-...}``."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.error("it is nested too deeply", "take the launch command out of it")

    def token(self, *, in_test: bool = False) -> Token:
        """The next token.

        Args:
            in_test: True after ``[[``, where operators are words.
        """
        while True:
            self._skip_blanks()
            if in_test or not self._read_redirection():
                break
        start, line = self.position, self.line()
        if start >= len(self.text):
            return Token("", line)
        if in_test and (match := _TEST_OPERATOR.match(self.text, start)):
            self.position = match.end()
            return Token(match[0], line, (Part("text", match[0], line),))
        if self.text.startswith("((", start):
            self.position += 2
            return Token("((", line, (Part("arithmetic", self._balanced("))"), line),))
        if match := _OPERATOR.match(self.text, start):
            self.position = match.end()
            if match[0] == "\n":
                self._read_here_documents()
            return Token(match[0], line)
        word = self.word()
        return Token(self.text[start : self.position], line, word)

    def word(self) -> SourceWord:
        """Parts of a word, up to a space or an operator."""
        parts: list[Part] = []
        while self.position < len(self.text):
            pair = self.text[self.position : self.position + 2]
            if match := _PLAIN.match(self.text, self.position):
                parts.append(Part("text", match[0], self.line()))
                self.position = match.end()
            elif pair[0] == "'":
                start = self.position
                parts += self._quoted_lines(start + 1, self._upto("'"))
            elif pair[0] == '"':
                parts += self._double_quoted()
            elif pair[0] == "\\":
                parts += self._escaped()
            elif pair == "$'":
                self.position += 1
            elif pair[0] in "$`" or pair in ("<(", ">("):
                parts.append(self._expansion(quoted=False))
            else:
                break
        return tuple(parts)

    def _double_quoted(self) -> Iterator[Part]:
        first = self.line()
        self.position += 1
        yield Part("text", "", first, quoted=True)
        yield from self.quoted_text('"')
        if self.position >= len(self.text):
            raise self.error("a quote is not closed", 'add "', first)
        self.position += 1

    def quoted_text(self, closing: str) -> Iterator[Part]:
        """Parts up to the closing quote, which stays; up to the end, with quotes as text, if it is empty."""
        plain, escaped = (_IN_QUOTES, '"\\$`\n') if closing else (_IN_DOCUMENT, "\\$`\n")
        while self.position < len(self.text):
            pair = self.text[self.position : self.position + 2]
            if match := plain.match(self.text, self.position):
                self.position = match.end()
                yield from self._quoted_lines(match.start(), match[0])
            elif pair[0] == closing:
                return
            elif pair[0] == "\\" and pair[1:] in escaped:
                yield from self._escaped()
            elif pair[0] == "\\":
                yield Part("text", "\\", self.line(), quoted=True)
                self.position += 1
            else:
                yield self._expansion(quoted=True)

    def _quoted_lines(self, start: int, text: str) -> Iterator[Part]:
        """Text between quotes, one part a line."""
        for line, line_text in enumerate(text.splitlines(keepends=True) or [""], start=self.line(start)):
            yield Part("text", line_text, line, quoted=True)

    def _escaped(self) -> Iterator[Part]:
        """Character after a backslash; nothing for the end of a line."""
        following, line = self.text[self.position + 1 : self.position + 2], self.line()
        self.position += 2
        if following != "\n":
            yield Part("text", following, line, quoted=True)

    def _expansion(self, *, quoted: bool) -> Part:
        """``$NAME``, ``${NAME...}``, ``$((...))``, ``$(...)``, backticks or ``<(...)``."""
        start, line = self.position, self.line()
        following = self.text[start + 1 : start + 2]
        if self.text[start] == "`":
            self._upto("`")
            return Part("command", self.text[start : self.position], line, quoted)
        if self.text.startswith("$((", start):
            self.position += 3
            return Part("arithmetic", self._balanced("))"), line, quoted)
        if following == "(":
            self.position += 2
            self._balanced(")")
            return Part("command", self.text[start : self.position], line, quoted)
        if following == "{":
            self.position += 2
            return self._braced(line, quoted=quoted)
        match = _VARIABLE.match(self.text, start + 1)
        self.position = match.end() if match else start + 1
        return Part("variable", match[0], line, quoted) if match else Part("text", "$", line, quoted)

    def _braced(self, line: int, *, quoted: bool) -> Part:
        inside = self._balanced("}")
        match = _BRACED.fullmatch(inside)
        if match is None or (match[3] not in (None, "[@]", "[*]") and not match[3][1:-1].isdecimal()):
            return Part("variable", inside, line, quoted, "?")
        operator = "#" if match[1] else match[4] or match[3] or ""
        default: list[Part] = []
        if match[4]:
            self.descend()
            inner = Lexer(match[5], self.file, line, self.depth)
            while inner.position < len(inner.text):
                character = inner.text[inner.position]
                if parts := inner.word():
                    default += parts
                else:
                    default.append(Part("text", character, line, quoted))
                    inner.position += 1
            self.depth -= 1
        return Part("variable", match[2], line, quoted, operator, tuple(default))

    def _balanced(self, close: str) -> str:
        """Text up to a closing bracket, over brackets and quotes inside, without the bracket."""
        start, opened = self.position, 0
        brackets, inside = "{}" if close == "}" else "()", _IN_ARITHMETIC if close == "))" else _IN_BRACKETS
        while match := inside.match(self.text, self.position):
            if opened == 0 and self.text.startswith(close, self.position):
                self.position += len(close)
                return self.text[start : match.start()]
            if match[0] in ("'", '"') and inside is _IN_BRACKETS:
                raise self.error("a quote is not closed", f"add {match[0]}")
            opened += (match[0] == brackets[0]) - (match[0] == brackets[1])
            self.position = match.end()
        raise self.error("a bracket is not closed", f"add {close}", self.line(start))

    def _upto(self, quote: str) -> str:
        """Text up to a quote, which is consumed with the one at the position."""
        end = self.text.find(quote, self.position + 1)
        if end < 0:
            raise self.error("a quote is not closed", f"add {quote}")
        inside = self.text[self.position + 1 : end]
        self.position = end + 1
        return inside

    def _skip_blanks(self) -> None:
        """Skip spaces, continued lines and comments."""
        match = _BLANKS.match(self.text, self.position)
        self.position = match.end() if match else self.position

    def _read_redirection(self) -> bool:
        """Read a redirection with its file; False if there is none."""
        match = _REDIRECTION.match(self.text, self.position)
        if match is None:
            return False
        self.position = match.end()
        self._skip_blanks()
        start = self.position
        word = self.word()
        if match[1] in ("<<", "<<-"):
            end = self.text[start : self.position]
            self.document = HereDocument(end.strip("'\"\\"), end[:1] in ("'", '"', "\\"), match[1] == "<<-")
            self._here_documents.append(self.document)
        elif match[1] in _WRITES and match[0].removesuffix(match[1]) in ("", "1"):
            self.output = Output(word, match[1].endswith(">>"))
        return True

    def _read_here_documents(self) -> None:
        for document in self._here_documents:
            closing = re.compile(rf"^\t*{re.escape(document.end)}(?:\n|\Z)", re.MULTILINE).search(
                self.text, self.position
            )
            document.text, document.line = self.text[self.position : closing.start() if closing else None], self.line()
            if document.is_indented:
                document.text = re.sub(r"(?m)^\t+", "", document.text)
            self.position = closing.end() if closing else len(self.text)
        self._here_documents.clear()
