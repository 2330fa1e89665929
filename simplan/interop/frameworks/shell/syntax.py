"""Syntax of launch scripts: the part of the shell's grammar that such scripts use, read without running anything.

The grammar is that of POSIX.1-2017, Shell Command Language, section 2.10, with arrays, ``[[ ]]`` and ``(( ))`` of bash.
Of redirections, here-documents and the file of the output are kept. Options of Slurm stand in comments:
``sbatch_settings``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from typing import NamedTuple

from simplan.errors import SpecError
from simplan.interop.configuration import Setting
from simplan.interop.frameworks.shell.lexer import (
    NAME,
    HereDocument,
    Lexer,
    Output,
    Part,
    SourceWord,
    Token,
)

_ASSIGNMENT = re.compile(rf"({NAME.pattern})(\[[^\]\n]*\])?(\+?)=")
_FUNCTION = re.compile(r"[A-Za-z_][\w.:-]*")
_SEPARATORS = ("\n", ";", "&", "|", ";;", "&&", "||")
_INNER = ("then", "else", "elif", "fi", "do", "done", "esac", "}", "in")
_DECLARES = ("export", "local", "declare", "readonly", "typeset", "env")
"""Commands whose assignments are words."""


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
        document: Its last here-document; None without one.
        output: File that it writes; None without one.
    """

    assignments: tuple[Assignment, ...]
    words: tuple[SourceWord, ...]
    line: int
    document: HereDocument | None = None
    output: Output | None = None


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
    """``for`` over words, or ``while`` and ``until``, whose names are empty; the condition is that of ``while``."""

    name: str
    words: tuple[SourceWord, ...]
    body: Body
    line: int
    condition: Body = ()


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
    parser = _Parser(Lexer(text.replace("\r\n", "\n"), file, line))
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


class _Parser:
    """Tokens as commands, by recursive descent.

    Attributes:
        token: The next token.
    """

    def __init__(self, lexer: Lexer) -> None:
        self.lexer = lexer
        self.token = lexer.token()

    def body(self, *ends: str) -> Body:
        """Commands up to one of some words, or up to a closing bracket; it stays."""
        self.lexer.descend()
        commands: list[Command] = []
        while True:
            self._skip(*(separator for separator in _SEPARATORS if separator not in ends))
            if self.token.text in ("", ")", *ends):
                break
            commands.append(self._chain())
        self.lexer.depth -= 1
        return tuple(commands)

    def error(self, what: str, fix: str = "check quotes, parentheses, if and fi", line: int | None = None) -> SpecError:
        return self.lexer.error(what, fix, line or self.token.line)

    def _next(self) -> Token:
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
        compound |= {"for": self._for, "select": self._for, "while": self._while, "until": self._until}
        if token.text in compound:
            self._next()
            command = compound[token.text](token.line)
            self._redirections()
            return command
        if token.text in ("{", "("):
            self._next()
            body = self._body_to("}" if token.text == "{" else ")")
            self._redirections()
            return Branch((((), body),), token.line)
        if token.text == "((" and token.word is not None:
            self._next()
            self._redirections()
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
        return Simple(tuple(assignments), tuple(words), first.line, *self._redirections())

    def _redirections(self) -> tuple[HereDocument | None, Output | None]:
        """Redirections of the command that ends here."""
        document_and_output = self.lexer.document, self.lexer.output
        self.lexer.document = self.lexer.output = None
        return document_and_output

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
        if self.token.text == "((" or NAME.fullmatch(self.token.text):
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
        condition = self._body_to("do")
        return Loop("", (), self._body_to("done"), line, condition)

    def _until(self, line: int) -> Loop:
        return self._while(line)._replace(condition=())

    def _function(self, line: int) -> Function:
        """Function after the word ``function``, with or without brackets."""
        name = self._next()
        if name.word is None:
            raise self.error("function has no name", "name it", line)
        return self._body_of(name)

    def _body_of(self, name: Token) -> Function:
        if self._accept("("):
            self._expect(")", name.line)
        self._skip("\n")
        self.lexer.descend()
        body = (self._command(),)
        self.lexer.depth -= 1
        return Function(name.text, body)
