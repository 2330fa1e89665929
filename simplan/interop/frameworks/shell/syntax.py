"""Syntax of launch scripts: the part of the shell's grammar that such scripts use, read without running anything.

The grammar is that of POSIX.1-2017, Shell Command Language, section 2.10, with arrays, ``[[ ]]`` and ``(( ))`` of bash.
Redirections are skipped. Options of Slurm stand in comments: ``sbatch_settings``.
"""

from __future__ import annotations

import re
import shlex
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from simplan.errors import SpecError, file_error
from simplan.interop.configuration import Setting

OTHER_FILE = 1_000_000
"""Lines of the first script that a script calls are counted from here on, those of the second from twice this on."""
_MAX_DEPTH = 40
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(rf"{_NAME.pattern}|[@*#?$!0-9-]")
_BRACED = re.compile(r"(#?)(\w+|[@*])(\[[^\]]*\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(rf"({_NAME.pattern})(\[[^\]\n]*\])?(\+?)=")
_FUNCTION = re.compile(r"[A-Za-z_][\w.:-]*")
_BLANKS = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)*")
_REDIRECTION = re.compile(r"\d*(&>>?|<<<|<<-?|[<>]&|>>|>\||<>|<(?!\()|>(?!\())")
_OPERATOR = re.compile(r"&&|\|\||;;|[;&|()\n]")
_TEST_OPERATOR = re.compile(r"&&|\|\||[()<>;&|]")
_ENDS = " \t\n;&|()<>"
_PLAIN = re.compile(rf"[^{_ENDS}'\"\\$`]+")
_IN_QUOTES = re.compile(r'[^"\\$`]+')
_IN_BRACKETS = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\\'"(){}]+|.""", re.DOTALL)
_IN_ARITHMETIC = re.compile(r"\\.|[^\\()]+|.", re.DOTALL)
_SEPARATORS = ("\n", ";", "&", "|", ";;", "&&", "||")
_INNER = ("then", "else", "elif", "fi", "do", "done", "esac", "}", "in")
_DECLARES = ("export", "local", "declare", "readonly", "typeset", "env")
"""Commands whose assignments are words."""


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


class Assignment(NamedTuple):
    """``NAME=value``, ``NAME+=value`` or ``NAME=( ... )``.

    Attributes:
        values: Words of an array, or the only word of a plain variable.
        is_indexed: True for ``NAME[...]=value``, which is not read.
    """

    name: str
    values: tuple[SourceWord, ...]
    line: int
    appends: bool
    is_array: bool
    is_indexed: bool


class Simple(NamedTuple):
    """A command with its words, after its assignments; the first word of ``(( ... ))`` is ``((``.

    Attributes:
        document: Text and first line of its last here-document, with ``$`` unescaped; None without one.
    """

    assignments: tuple[Assignment, ...]
    words: tuple[SourceWord, ...]
    line: int
    document: tuple[str, int] | None = None


class Chain(NamedTuple):
    """Commands that depend on each other: ``a && b || c``; the first operator is empty. ``!`` negates a command."""

    commands: tuple[tuple[str, bool, Command], ...]
    line: int


class Branch(NamedTuple):
    """``if``: pairs of condition and body; the condition is empty for ``else``, and for ``{ ... }`` and ``( ... )``."""

    branches: tuple[tuple[Body, Body], ...]
    line: int


class Case(NamedTuple):
    """``case``: patterns with their bodies."""

    word: SourceWord
    branches: tuple[tuple[tuple[SourceWord, ...], Body], ...]
    line: int


class Loop(NamedTuple):
    """``for`` over words, or ``while``, whose name is empty."""

    name: str
    words: tuple[SourceWord, ...]
    body: Body
    line: int


class Function(NamedTuple):
    """Definition of a function."""

    name: str
    body: Body


Command = Simple | Chain | Branch | Case | Loop | Function
Body = tuple[Command, ...]


def parse_script(text: str, file: str, line: int = 1) -> Body:
    """Commands of a script.

    Args:
        file: Its name in errors.
        line: Number of its first line.

    Raises:
        SpecError: The text is no script: an open quote or parenthesis, an ``if`` without ``fi``.
    """
    parser = _Parser(_Lexer(text.replace("\r\n", "\n"), file, line))
    body = parser.body()
    if parser.token.text:
        raise parser.error(f"{parser.token.text} has no beginning")
    return body


def sbatch_settings(text: str) -> Iterator[Setting]:
    """Options of Slurm in the comments of a script, by their long names."""
    long_names = {"N": "nodes", "n": "ntasks", "G": "gpus"}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("#SBATCH"):
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:
            continue
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if not word.startswith("-"):
                continue
            key, joined, value = word.partition("=")
            name, value = long_names.get(key.lstrip("-"), key.lstrip("-")), value if joined else following
            if match := re.fullmatch(r"gpu:(?:[\w.-]+:)?(\d+)", value) if name == "gres" else None:
                name, value = "gpus-per-node", match[1]
            yield Setting(f"#SBATCH --{name}", whole_number(value.rpartition(":")[2]) or value, number)


def whole_number(text: str) -> int | None:
    """Whole number, or the lower of a range of nodes if both are equal."""
    match = re.fullmatch(r"(\d{1,9})(?::\1)?", text)
    return int(match[1]) if match else None


class _Token(NamedTuple):
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
class _Lexer:
    """Characters of a script as tokens, one at a time."""

    text: str
    file: str
    first_line: int
    depth: int = 0
    position: int = 0
    _newlines: list[int] = field(init=False)
    document: tuple[str, int] | None = None
    _here_documents: list[tuple[str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._newlines = [match.start() for match in re.finditer("\n", self.text)]

    def line(self, position: int | None = None) -> int:
        """1-based line of a position, by default the current one."""
        return self.first_line + bisect_left(self._newlines, self.position if position is None else position)

    def error(self, what: str, fix: str = "check quotes, parentheses, if and fi", line: int | None = None) -> SpecError:
        return file_error(self.file, f"this is no shell script: {what}", fix, (line or self.line()) % OTHER_FILE)

    def descend(self) -> None:
        """Enter a body, a function or a default of ``${NAME:-...}``."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.error("it is nested too deeply", "take the launch command out of it")

    def token(self, *, in_test: bool = False) -> _Token:
        """The next token.

        Args:
            in_test: True after ``[[``, where operators are words.
        """
        while True:
            self._skip_blanks()
            if in_test or not self._skip_redirection():
                break
        start, line = self.position, self.line()
        if start >= len(self.text):
            return _Token("", line)
        if in_test and (match := _TEST_OPERATOR.match(self.text, start)):
            self.position = match.end()
            return _Token(match[0], line, (Part("text", match[0], line),))
        if self.text.startswith("((", start):
            self.position += 2
            return _Token("((", line, (Part("arithmetic", self._balanced("))"), line),))
        if match := _OPERATOR.match(self.text, start):
            self.position = match.end()
            if match[0] == "\n":
                self._skip_here_documents()
            return _Token(match[0], line)
        word = self.word()
        return _Token(self.text[start : self.position], line, word)

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
        while self.position < len(self.text):
            pair = self.text[self.position : self.position + 2]
            if match := _IN_QUOTES.match(self.text, self.position):
                self.position = match.end()
                yield from self._quoted_lines(match.start(), match[0])
            elif pair[0] == '"':
                self.position += 1
                return
            elif pair[0] == "\\" and pair[1:] in '"\\$`\n':
                yield from self._escaped()
            elif pair[0] == "\\":
                yield Part("text", "\\", self.line(), quoted=True)
                self.position += 1
            else:
                yield self._expansion(quoted=True)
        raise self.error("a quote is not closed", 'add "', first)

    def _quoted_lines(self, start: int, text: str) -> Iterator[Part]:
        """Text between quotes, one part a line."""
        for line, each in enumerate(text.splitlines(keepends=True) or [""], start=self.line(start)):
            yield Part("text", each, line, quoted=True)

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
            inner = _Lexer(match[5], self.file, line, self.depth)
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

    def _skip_redirection(self) -> bool:
        """Skip a redirection with its file; False if there is none."""
        match = _REDIRECTION.match(self.text, self.position)
        if match is None:
            return False
        self.position = match.end()
        self._skip_blanks()
        start = self.position
        self.word()
        if match[1] in ("<<", "<<-"):
            end = self.text[start : self.position]
            self._here_documents.append((end.strip("'\"\\"), end[:1] in ("'", '"', "\\")))
        return True

    def _skip_here_documents(self) -> None:
        for end, quoted in self._here_documents:
            closing = re.compile(rf"^\t*{re.escape(end)}(?:\n|\Z)", re.MULTILINE).search(self.text, self.position)
            text, line = self.text[self.position : closing.start() if closing else None], self.line()
            self.document = (text if quoted else re.sub(r"\\([$\\`])", r"\1", text)), line
            self.position = closing.end() if closing else len(self.text)
        self._here_documents.clear()


class _Parser:
    """Tokens as commands, by recursive descent.

    Attributes:
        token: The next token.
    """

    def __init__(self, lexer: _Lexer) -> None:
        self.lexer = lexer
        self.token = lexer.token()

    def body(self, *ends: str) -> Body:
        """Commands up to one of some words, or up to a closing bracket; it stays."""
        self.lexer.descend()
        commands: list[Command] = []
        while True:
            self._skip(*(each for each in _SEPARATORS if each not in ends))
            if self.token.text in ("", ")", *ends):
                break
            commands.append(self._chain())
        self.lexer.depth -= 1
        return tuple(commands)

    def error(self, what: str, fix: str = "check quotes, parentheses, if and fi", line: int | None = None) -> SpecError:
        return self.lexer.error(what, fix, line or self.token.line)

    def _next(self) -> _Token:
        """Go to the next token; returns the one before it."""
        before, self.token = self.token, self.lexer.token()
        return before

    def _skip(self, *texts: str) -> None:
        while self.token.text in texts:
            self._next()

    def _accept(self, text: str) -> bool:
        if self.token.text != text:
            return False
        self._next()
        return True

    def _expect(self, text: str, line: int) -> None:
        if not self._accept(text):
            raise self.error(f"{text} is missing", f"add {text}", line)

    def _body_to(self, end: str) -> Body:
        line, body = self.token.line, self.body(end)
        self._expect(end, line)
        return body

    def _chain(self) -> Command:
        line, operator, commands = self.token.line, "", list[tuple[str, bool, Command]]()
        while True:
            self._skip("\n")
            negated = self._accept("!")
            commands.append((operator, negated, self._command()))
            operator = self.token.text
            if operator not in ("&&", "||", "|"):
                break
            self._next()
        _, negated, command = commands[0]
        return Chain(tuple(commands), line) if len(commands) > 1 or negated else command

    def _command(self) -> Command:
        token = self.token
        compound: dict[str, Callable[[int], Command]] = {"if": self._if, "case": self._case, "function": self._function}
        compound |= dict.fromkeys(("for", "select"), self._for) | dict.fromkeys(("while", "until"), self._while)
        if token.text in compound:
            self._next()
            return compound[token.text](token.line)
        if token.text in ("{", "("):
            self._next()
            return Branch((((), self._body_to("}" if token.text == "{" else ")")),), token.line)
        if token.text == "((" and token.word is not None:
            self._next()
            return Simple((), ((Part("text", "((", token.line),), token.word), token.line)
        if token.text in _INNER:
            raise self.error(f"{token.text} has no beginning")
        return self._simple()

    def _simple(self) -> Simple | Function:
        first = self.token
        assignments: list[Assignment] = []
        words: list[SourceWord] = []
        while self.token.word is not None and self.token.text != "((":
            match = _ASSIGNMENT.match(self.token.text)
            if match is not None and (not words or (words[0] and words[0][0].text in _DECLARES)):
                assignments.append(self._assignment(match, self.token.word))
                continue
            words.append(self.token.word)
            if len(words) == 1 and self.token.text == "[[":
                words += self._test()
            self._next()
        if self.token.text in ("(", "(("):
            if self.token.text == "((" or len(words) > 1 or assignments or not _FUNCTION.fullmatch(first.text):
                raise self.error("( is not expected here")
            return self._body_of(first)
        document, self.lexer.document = self.lexer.document, None
        return Simple(tuple(assignments), tuple(words), first.line, document)

    def _assignment(self, match: re.Match[str], word: SourceWord) -> Assignment:
        token = self._next()
        name, appends, is_indexed = match[1], bool(match[3]), match[2] is not None
        if self.token.text == "(" and match.end() == len(token.text):
            return Assignment(name, tuple(self._array(token.line)), token.line, appends, True, is_indexed)
        start = word[0]._replace(text=word[0].text[match.end() :])
        value = (start, *word[1:]) if start.text else word[1:]
        return Assignment(name, (value,), token.line, appends, False, is_indexed)

    def _array(self, line: int) -> Iterator[SourceWord]:
        """Words of an array, over its brackets."""
        self._next()
        while self.token.text != ")":
            if not self.token.text:
                raise self.error("an array is not closed", "add )", line)
            if self.token.word is not None:
                yield self.token.word
            elif self.token.text != "\n":
                raise self.error(f"{self.token.text} is not expected in an array", "add )")
            self._next()
        self._next()

    def _test(self) -> Iterator[SourceWord]:
        """Words after ``[[``, with ``&&`` and the like among them, up to ``]]``, which stays."""
        line = self.token.line
        while self.token.text != "]]":
            self.token = self.lexer.token(in_test=True)
            if not self.token.text:
                raise self.error("[[ is not closed", "add ]]", line)
            if self.token.word is not None:
                yield self.token.word

    def _if(self, line: int) -> Branch:
        branches: list[tuple[Body, Body]] = []
        while not branches or self._accept("elif"):
            branches.append((self._body_to("then"), self.body("elif", "else", "fi")))
        if self._accept("else"):
            branches.append(((), self.body("fi")))
        self._expect("fi", line)
        return Branch(tuple(branches), line)

    def _case(self, line: int) -> Case:
        word = self._next().word or ()
        self._skip("\n")
        self._expect("in", line)
        branches: list[tuple[tuple[SourceWord, ...], Body]] = []
        while True:
            self._skip("\n", ";", ";;")
            if self._accept("esac"):
                return Case(word, tuple(branches), line)
            self._accept("(")
            patterns: list[SourceWord] = []
            while self.token.text != ")":
                if self.token.word is not None:
                    patterns.append(self.token.word)
                elif self.token.text not in ("|", "\n"):
                    raise self.error("a pattern of case is not closed", "add )", line)
                self._next()
            self._next()
            branches.append((tuple(patterns), self.body(";;", "esac")))

    def _for(self, line: int) -> Loop:
        name, words = "", list[SourceWord]()
        if self.token.text == "((" or _NAME.fullmatch(self.token.text):
            name = self._next().text.removeprefix("((")
            self._skip("\n")
        if self._accept("in"):
            while self.token.word is not None:
                words.append(self.token.word)
                self._next()
        self._skip("\n", ";")
        self._expect("do", line)
        return Loop(name, tuple(words), self._body_to("done"), line)

    def _while(self, line: int) -> Loop:
        self._body_to("do")
        return Loop("", (), self._body_to("done"), line)

    def _function(self, line: int) -> Function:
        """Function after the word ``function``, with or without brackets."""
        name = self._next()
        if name.word is None:
            raise self.error("function has no name", "name it", line)
        return self._body_of(name)

    def _body_of(self, name: _Token) -> Function:
        if self._accept("("):
            self._expect(")", name.line)
        self._skip("\n")
        self.lexer.descend()
        body = (self._command(),)
        self.lexer.depth -= 1
        return Function(name.text, body)
