"""Syntax of launch scripts: the part of the shell's grammar that such scripts use, read without running anything.

The grammar is that of POSIX.1-2017, Shell Command Language, section 2.10, with arrays, ``[[ ]]`` and ``(( ))`` of bash.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from simplan.errors import SpecError, file_error

_MAX_DEPTH = 40
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]\n]*\])?(\+?)=")
_FUNCTION = re.compile(r"(?:function[ \t]+)?([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\)|function[ \t]+([\w.:-]+)")
_REDIRECTION = re.compile(r"\d*(&>>?|<<<|<<-?|[<>]&|>>|>\||<>|<(?!\()|>(?!\())")
_SPECIAL = "@*#?$!-0123456789"
_OPERATORS = ("&&", "||", ";;", ";", "&", "|", "\n")
_ENDS = frozenset(" \t\n;&|()<>")


@dataclass(frozen=True, slots=True)
class Part:
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
"""Word as written; no parts for empty quotes."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """``NAME=value``, ``NAME+=value`` or ``NAME=( ... )``.

    Attributes:
        values: Words of an array, or the only word of a plain variable.
        is_indexed: True for ``NAME[...]=value``, which is not read.
    """

    name: str
    values: tuple[SourceWord, ...]
    line: int
    appends: bool = False
    is_array: bool = False
    is_indexed: bool = False


@dataclass(frozen=True, slots=True)
class Simple:
    """A command with its words, after its assignments."""

    assignments: tuple[Assignment, ...]
    words: tuple[SourceWord, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Commands that depend on each other: ``a && b || c``; the first operator is empty. ``!`` negates a command."""

    commands: tuple[tuple[str, bool, Command], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Branch:
    """``if``: pairs of condition and body, of which the last condition is empty for ``else``."""

    branches: tuple[tuple[Body, Body], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    """``case``: patterns with their bodies."""

    word: SourceWord
    branches: tuple[tuple[tuple[SourceWord, ...], Body], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Loop:
    """``for`` over words, or ``while``, whose name is empty."""

    name: str
    words: tuple[SourceWord, ...]
    body: Body
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    """Definition of a function."""

    name: str
    body: Body
    line: int


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """``{ ... }`` or ``( ... )``."""

    body: Body
    line: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """``(( ... ))`` as a command."""

    expression: SourceWord
    line: int


Command = Simple | Chain | Branch | Case | Loop | Function | CommandGroup | Arithmetic
Body = tuple[Command, ...]


def parse_script(text: str, file: str, line: int = 1) -> Body:
    """Commands of a script.

    Args:
        file: Its name in errors.
        line: Number of its first line.

    Raises:
        SpecError: The text is no script: an open quote or parenthesis, an ``if`` without ``fi``.
    """
    parser = _Parser(text.replace("\r\n", "\n"), file, line)
    body = parser.body(())
    if parser.position < len(parser.text):
        raise parser.error(f"{parser.text[parser.position : parser.position + 10].split()[0]} has no beginning")
    return body


@dataclass(slots=True)
class _Parser:
    """Recursive descent over the characters of a script."""

    text: str
    file: str
    line: int
    position: int = 0
    depth: int = 0
    here_documents: list[tuple[str, bool]] = field(default_factory=list)

    def error(self, what: str, fix: str = "check quotes, parentheses, if and fi", line: int | None = None) -> SpecError:
        return file_error(self.file, f"this is no shell script: {what}", fix, line or self.line)

    def body(self, ends: tuple[str, ...]) -> Body:
        """Commands up to a reserved word or closing bracket, which stays."""
        self._descend()
        commands: list[Command] = []
        while True:
            self._blanks(";&|")
            if self.position >= len(self.text) or self._reserved() in ends or self._peek() == ")":
                break
            commands.append(self._chain())
        self.depth -= 1
        return tuple(commands)

    def _descend(self) -> None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.error("it is nested too deeply", "take the launch command out of it")

    def _chain(self) -> Command:
        first, operator, commands = self.line, "", list[tuple[str, bool, Command]]()
        while True:
            self._blanks("")
            negated = self._accept_word("!")
            self._spaces()
            commands.append((operator, negated, self._command()))
            self._spaces()
            operator = next((each for each in _OPERATORS if self.text.startswith(each, self.position)), "")
            if operator not in ("&&", "||", "|"):
                break
            self.position += len(operator)
        only = commands[0]
        return Chain(tuple(commands), first) if len(commands) > 1 or only[1] else only[2]

    def _command(self) -> Command:
        word, line = self._reserved(), self.line
        compound: dict[str, Callable[[int], Command]] = {"if": self._if, "case": self._case}
        compound |= dict.fromkeys(("for", "select"), self._for) | dict.fromkeys(("while", "until"), self._while)
        if word in compound:
            self.position += len(word)
            command = compound[word](line)
        elif word == "{":
            self.position += 1
            command = CommandGroup(self._body_to("}"), line)
        elif self.text.startswith("((", self.position):
            self.position += 2
            command = Arithmetic((Part("arithmetic", self._upto("))"), line),), line)
        elif self._peek() == "(":
            self.position += 1
            body = self.body(())
            self._expect(")")
            command = CommandGroup(body, line)
        elif word in ("then", "else", "elif", "fi", "do", "done", "esac", "}", "in"):
            raise self.error(f"{word} has no beginning")
        elif match := _FUNCTION.match(self.text, self.position):
            self.position = match.end()
            self._blanks("")
            self._descend()
            function = Function(match[1] or match[2], (self._command(),), line)
            self.depth -= 1
            return function
        else:
            return self._simple()
        while self._redirection():
            pass
        return command

    def _simple(self) -> Simple:
        line = self.line
        assignments: list[Assignment] = []
        words: list[SourceWord] = []
        while True:
            self._spaces()
            if self.position >= len(self.text) or (
                self._peek() in "\n;&|)" and not self.text.startswith("&>", self.position)
            ):
                break
            if self._redirection():
                continue
            match = _ASSIGNMENT.match(self.text, self.position)
            if match is not None and (not words or _declares(words)):
                assignments.append(self._assignment(match))
                continue
            if self._peek() == "(":
                raise self.error("( is not expected here")
            start = self.position
            words.append(self._word())
            if start == self.position:
                raise self.error(f"{self._peek()} is not expected here")
            if len(words) == 1 and self.text[start : self.position] == "[[":
                words += self._test()
        if not words and not assignments and self.position < len(self.text) and self._peek() != "\n":
            self.position += 1
        return Simple(tuple(assignments), tuple(words), line)

    def _assignment(self, match: re.Match[str]) -> Assignment:
        line, self.position = self.line, match.end()
        appends, is_indexed = bool(match[3]), match[2] is not None
        if self._peek() != "(":
            ended = self.position >= len(self.text) or self._peek() in _ENDS
            value = () if ended and not self._is_substitution() else self._word()
            return Assignment(match[1], (value,), line, appends, False, is_indexed)
        self.position += 1
        values: list[SourceWord] = []
        while True:
            self._blanks("")
            if self.position >= len(self.text):
                raise self.error("an array is not closed", "add )", line)
            if self._peek() == ")":
                self.position += 1
                return Assignment(match[1], tuple(values), line, appends, True, is_indexed)
            start = self.position
            values.append(self._word())
            if start == self.position:
                raise self.error(f"{self._peek()} is not expected in an array", "add )")

    def _test(self) -> list[SourceWord]:
        """Words after ``[[``, with ``&&`` and the like among them, up to and with ``]]``."""
        line, words = self.line, list[SourceWord]()
        while True:
            self._blanks("")
            if self.position >= len(self.text):
                raise self.error("[[ is not closed", "add ]]", line)
            start = self.position
            operator = next((each for each in ("&&", "||") if self.text.startswith(each, start)), "")
            if operator or self._peek() in "()<>;&|":
                self.position += len(operator) or 1
                words.append((Part("text", operator or self.text[start], self.line),))
            else:
                words.append(self._word())
                if self.text[start : self.position] == "]]":
                    return words

    def _if(self, line: int) -> Branch:
        branches = [(self._body_to("then"), self.body(("elif", "else", "fi")))]
        while self._accept_word("elif"):
            branches.append((self._body_to("then"), self.body(("elif", "else", "fi"))))
        if self._accept_word("else"):
            branches.append(((), self.body(("fi",))))
        self._expect_word("fi", line)
        return Branch(tuple(branches), line)

    def _case(self, line: int) -> Case:
        self._blanks("")
        word = self._word()
        self._blanks("")
        self._expect_word("in", line)
        branches: list[tuple[tuple[SourceWord, ...], Body]] = []
        while True:
            self._blanks(";")
            if self._accept_word("esac"):
                return Case(word, tuple(branches), line)
            if self._peek() == "(":
                self.position += 1
            patterns: list[SourceWord] = []
            while self.position < len(self.text) and self._peek() != ")":
                self._blanks("|")
                start = self.position
                patterns.append(self._word())
                self._blanks("|")
                if start == self.position:
                    raise self.error("a pattern of case is not closed", "add )", line)
            self._expect(")")
            branches.append((tuple(patterns), self._case_body()))

    def _case_body(self) -> Body:
        commands: list[Command] = []
        while True:
            self._blanks("&|")
            if self.position >= len(self.text) or self.text.startswith(";;", self.position):
                return tuple(commands)
            if self._peek() == ";":
                self.position += 1
            elif self._reserved() == "esac":
                return tuple(commands)
            else:
                commands.append(self._chain())

    def _for(self, line: int) -> Loop:
        self._spaces()
        words: list[SourceWord] = []
        name = _NAME.match(self.text, self.position)
        if name is not None:
            self.position = name.end()
            self._blanks("")
            if self._accept_word("in"):
                self._spaces()
                while self.position < len(self.text) and self._peek() not in "\n;":
                    start = self.position
                    words.append(self._word())
                    self._spaces()
                    if start == self.position:
                        raise self.error("for is not followed by words", line=line)
        elif self.text.startswith("((", self.position):
            self.position += 2
            self._upto("))")
        self._blanks(";")
        self._expect_word("do", line)
        return Loop(name[0] if name else "", tuple(words), self._body_to("done"), line)

    def _while(self, line: int) -> Loop:
        self._body_to("do")
        return Loop("", (), self._body_to("done"), line)

    def _body_to(self, end: str) -> Body:
        line, body = self.line, self.body((end,))
        self._expect_word(end, line)
        return body

    def _word(self) -> SourceWord:
        parts: list[Part] = []
        while self.position < len(self.text) and (self._peek() not in _ENDS or self._is_substitution()):
            character = self._peek()
            if character == "'":
                self.position += 1
                self._text(parts, self._upto("'"), quoted=True)
            elif character == '"':
                self._double_quoted(parts)
            elif character == "\\":
                self._escape(parts)
            elif character in "$`<>":
                self._expansion(parts, quoted=False)
            else:
                start = self.position
                while self.position < len(self.text) and self._peek() not in _ENDS and self._peek() not in "'\"\\$`":
                    self.position += 1
                parts.append(Part("text", self.text[start : self.position], self.line))
        return tuple(parts)

    def _escape(self, parts: list[Part]) -> None:
        following = self.text[self.position + 1 : self.position + 2]
        if following == "\n":
            self.line += 1
        else:
            parts.append(Part("text", following, self.line, True))
        self.position += 2

    def _double_quoted(self, parts: list[Part]) -> None:
        first, self.position = self.line, self.position + 1
        parts.append(Part("text", "", self.line, True))
        while True:
            start = self.position
            while self.position < len(self.text) and self._peek() not in '"\\$`':
                self.position += 1
            self._text(parts, self.text[start : self.position], quoted=True, counts=True)
            if self.position >= len(self.text):
                raise self.error("a quote is not closed", 'add "', first)
            character = self._peek()
            if character == '"':
                self.position += 1
                return
            if character == "\\":
                following = self.text[self.position + 1 : self.position + 2]
                if following and following not in '"\\$`\n':
                    parts.append(Part("text", "\\", self.line, True))
                    self.position += 1
                else:
                    self._escape(parts)
            else:
                self._expansion(parts, quoted=True)

    def _text(self, parts: list[Part], text: str, *, quoted: bool, counts: bool = False) -> None:
        """Add text, one part a line; ``_upto`` has counted its lines already, unless ``counts``."""
        line = self.line if counts else self.line - text.count("\n")
        for number, each in enumerate(text.splitlines(keepends=True) or [""]):
            parts.append(Part("text", each, line + number, quoted))
        if counts:
            self.line += text.count("\n")

    def _is_substitution(self) -> bool:
        return self.text[self.position : self.position + 2] in ("<(", ">(")

    def _expansion(self, parts: list[Part], *, quoted: bool) -> None:
        """``$NAME``, ``${NAME...}``, ``$((...))``, ``$(...)``, backticks or ``<(...)``."""
        line, start, following = self.line, self.position, self.text[self.position + 1 : self.position + 2]
        if self._peek() == "`":
            self.position += 1
            self._upto("`")
            parts.append(Part("command", self.text[start : self.position], line, quoted))
        elif self.text.startswith("$((", start):
            self.position += 3
            parts.append(Part("arithmetic", self._balanced("))"), line, quoted))
        elif following == "(":
            self.position += 2
            self._balanced(")")
            parts.append(Part("command", self.text[start : self.position], line, quoted))
        elif following == "{":
            self.position += 2
            parts.append(self._braced(line, quoted=quoted))
        elif match := _NAME.match(self.text, start + 1):
            self.position = match.end()
            parts.append(Part("variable", match[0], line, quoted))
        elif following and following in _SPECIAL:
            self.position += 2
            parts.append(Part("variable", following, line, quoted))
        elif following == "'" and not quoted:
            self.position += 1
        else:
            self.position += 1
            parts.append(Part("text", self.text[start], line, quoted))

    def _braced(self, line: int, *, quoted: bool) -> Part:
        inside = self._balanced("}")
        match = re.fullmatch(r"(#?)(\w+|[@*])(\[[^\]]*\])?(?:(:?[-=+?])(.*))?", inside, re.DOTALL)
        if match is None or (match[3] not in (None, "[@]", "[*]") and not match[3][1:-1].isdecimal()):
            return Part("variable", inside, line, quoted, "?")
        operator = "#" if match[1] else match[4] or match[3] or ""
        default: SourceWord = ()
        if match[4]:
            self._descend()
            inner, within = _Parser(match[5], self.file, line, depth=self.depth), list[Part]()
            while inner.position < len(inner.text):
                end = inner.text[inner.position]
                if end in _ENDS:
                    within.append(Part("text", end, line, quoted))
                    inner.position += 1
                else:
                    within += inner._word()
            self.depth -= 1
            default = tuple(within)
        return Part("variable", match[2], line, quoted, operator, default)

    def _balanced(self, close: str) -> str:
        """Text up to a closing bracket, over brackets and quotes inside."""
        first, start, opened = self.line, self.position, 0
        bracket = "{}" if close == "}" else "()"
        while self.position < len(self.text):
            character = self._peek()
            if opened == 0 and self.text.startswith(close, self.position):
                inside = self.text[start : self.position]
                self.position += len(close)
                return inside
            if character in "'\"" and close != "))":
                self._quoted(character)
                continue
            opened += (character == bracket[0]) - (character == bracket[1])
            self.line += character == "\n"
            self.position += 2 if character == "\\" else 1
        raise self.error("a bracket is not closed", f"add {close}", first)

    def _quoted(self, quote: str) -> None:
        """Skip quotes inside brackets."""
        first, self.position = self.line, self.position + 1
        while self.position < len(self.text):
            character = self._peek()
            self.line += character == "\n"
            self.position += 2 if character == "\\" and quote == '"' else 1
            if character == quote:
                return
        raise self.error("a quote is not closed", f"add {quote}", first)

    def _upto(self, end: str) -> str:
        """Text up to an ending, which is consumed."""
        found = self.text.find(end, self.position)
        if found < 0:
            what = "a quote is not closed" if end in "'`" else f"{end} is missing"
            raise self.error(what, f"add {end}")
        inside = self.text[self.position : found]
        self.line += inside.count("\n")
        self.position = found + len(end)
        return inside

    def _redirection(self) -> bool:
        """Skip a redirection with its file."""
        match = _REDIRECTION.match(self.text, self.position)
        if match is None:
            return False
        self.position = match.end()
        self._spaces()
        start = self.position
        self._word()
        if match[1] in ("<<", "<<-"):
            self.here_documents.append((self.text[start : self.position].strip("'\"\\"), match[1] == "<<-"))
        return True

    def _blanks(self, separators: str) -> None:
        """Skip spaces, lines, comments, and characters that separate commands."""
        while True:
            self._spaces()
            if self.position >= len(self.text) or self._peek() not in "\n" + separators:
                return
            self.position += 1
            if self.text[self.position - 1] == "\n":
                self.line += 1
                self._skip_here_documents()

    def _skip_here_documents(self) -> None:
        for end, _ in self.here_documents:
            while self.position < len(self.text):
                found = self.text.find("\n", self.position)
                line_end = len(self.text) if found < 0 else found
                line = self.text[self.position : line_end]
                self.position = min(len(self.text), line_end + 1)
                self.line += 1
                if line.lstrip("\t") == end:
                    break
        self.here_documents.clear()

    def _spaces(self) -> None:
        """Skip spaces, continued lines and a comment."""
        while self.position < len(self.text):
            if self._peek() in " \t\r":
                self.position += 1
            elif self.text.startswith("\\\n", self.position):
                self.position += 2
                self.line += 1
            elif self._peek() == "#":
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            else:
                return

    def _peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def _reserved(self) -> str:
        """Plain word at the position, which may be a reserved one."""
        match = re.compile(r"[a-z]+(?=[\s;&|()<>]|$)|[{}!](?=[\s;]|$)").match(self.text, self.position)
        return match[0] if match else ""

    def _accept_word(self, word: str) -> bool:
        if self._reserved() != word:
            return False
        self.position += len(word)
        return True

    def _expect_word(self, word: str, line: int) -> None:
        if not self._accept_word(word):
            raise self.error(f"{word} is missing", f"add {word}", line)

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise self.error(f"{character} is missing", f"add {character}")
        self.position += 1


def _declares(words: list[SourceWord]) -> bool:
    """True after ``export``, ``local`` and the like, whose assignments are words."""
    return words[0][:1] != () and words[0][0].text in ("export", "local", "declare", "readonly", "typeset", "env")
