"""Variables and commands of a launch script, followed as the shell would, without running anything.

Outputs of commands, arguments of the script and variables that it does not set are unknown, and stay as written. Where
a condition cannot be decided, all branches are followed: an option that only some of them add is *conditional*.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from simplan.errors import file_error
from simplan.interop.frameworks.shell.slurm import sbatch_settings
from simplan.interop.frameworks.shell.syntax import (
    Arithmetic,
    Assignment,
    Body,
    Branch,
    Case,
    Chain,
    Command,
    CommandGroup,
    Function,
    Loop,
    Part,
    Simple,
    SourceWord,
    parse_script,
)
from simplan.io import read_text

_MAX_STEPS, _MAX_CALLS, _MAX_PIECES, _MAX_CHARS = 50_000, 20, 20_000, 400_000
_MAX_EXPRESSION = 200
OTHER_FILE = 1_000_000
"""Lines of the first script that this one calls are counted from here on, those of the second from twice this on."""
_UNSET = "is not set in the script"
_ARGUMENT = "is an argument of the script"
_LARGEST = 2**63
_MAX_ARGUMENTS, _MAX_TEST_WORDS = 100, 200
_ENDS_COMMAND = re.compile(r"\d*(&?>|<|\||;|&)")
_SPECIAL = re.compile(r"[;|&<>()$`\\\"'{}#]")
"""Characters of more than one command of plain words."""
_ASSIGNS = re.compile(r"[A-Za-z_]\w*=")
_SHELLS = ("bash", "sh", "source", ".", "zsh")


@dataclass(frozen=True, slots=True)
class ValuePart:
    """Part of a value.

    Attributes:
        text: The text; as written in the script if it is unknown.
        line: 1-based line.
        unknown: Reason that the text is not known, as a predicate; empty if it is known.
        condition: Line of the undecided condition that the text depends on; None for none.
    """

    text: str
    line: int
    unknown: str = ""
    condition: int | None = None


Value = tuple[ValuePart, ...]


@dataclass(frozen=True, slots=True)
class Word:
    """Word of a command.

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


@dataclass(frozen=True, slots=True)
class Called:
    """Command that the script calls.

    Attributes:
        words: Words of the command, redirections left out.
        environment: Variables that it exports, or sets for this command.
        condition: Line of the undecided condition under which it is called; None for none.
    """

    words: tuple[Word, ...]
    environment: Mapping[str, Word]
    condition: int | None = None


@dataclass(slots=True)
class Shell:
    """State of a script.

    Attributes:
        file: Name of the script in errors.
        folder: Folder of the script, from which it may call others; None to follow no other script.
        variables: Name -> elements; one for a plain variable.
        called: Commands that were called so far.
    """

    file: str
    folder: Path | None = None
    variables: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    called: list[Called] = field(default_factory=list)
    _functions: dict[str, Body] = field(default_factory=dict)
    _exported: set[str] = field(default_factory=set)
    _condition: int | None = None
    _steps: int = 0
    _calls: int = 0
    _num_files: int = 0

    def run(self, body: Body) -> None:
        """Follow commands."""
        for command in body:
            self._status(command)

    def _status(self, command: Command) -> bool | None:
        """Follow a command; its status, None if it cannot be known."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise file_error(self.file, "the script has too many steps", "take the launch command out of it")
        if isinstance(command, Simple):
            return self._simple(command)
        if isinstance(command, Chain):
            return self._chain(command)
        if isinstance(command, Branch):
            self._branch(command)
        elif isinstance(command, Case):
            self._case(command)
        elif isinstance(command, Loop):
            self._loop(command)
        elif isinstance(command, Function):
            self._functions[command.name] = command.body
        elif isinstance(command, CommandGroup):
            self.run(command.body)
        elif isinstance(command, Arithmetic):
            number = _number_of(self._expanded(command.expression))
            return None if number is None else number != 0
        return None

    def _chain(self, chain: Chain) -> bool | None:
        status: bool | None = None
        for joined, negated, command in chain.commands:
            if joined in ("&&", "||"):
                if status is None:
                    result = self._undecided([(command,)], chain.line)
                elif status == (joined == "&&"):
                    result = self._status(command)
                else:
                    continue
            else:
                result = self._status(command)
            status = None if result is None else result != negated
        return status

    def _branch(self, branch: Branch) -> None:
        open_bodies: list[Body] = []
        for condition, body in branch.branches:
            status: bool | None = True
            for command in condition:
                status = self._status(command)
            if status is False:
                continue
            if status and not open_bodies:
                self.run(body)
                return
            open_bodies.append(body)
            if status:  # whatever the conditions above are, one of these bodies is run
                self._undecided(open_bodies, branch.line, one_of_them=True)
                return
        if open_bodies:
            self._undecided(open_bodies, branch.line)

    def _case(self, case: Case) -> None:
        word = Word.of(self._expanded(case.word), case.line)
        if word.unknown:
            catches_all = any(_text(pattern) == "*" for patterns, _ in case.branches for pattern in patterns)
            bodies = [body for _, body in case.branches]
            self._undecided(bodies, case.line, one_of_them=catches_all)
            return
        for patterns, body in case.branches:
            if any(fnmatchcase(word.text, Word.of(self._expanded(pattern), 0).text) for pattern in patterns):
                self.run(body)
                return

    def _loop(self, loop: Loop) -> None:
        words = self._words(loop.words) if loop.words else ()
        if loop.name and len(words) == 1 and words[0] and not any(piece.unknown for piece in words[0]):
            self.variables[loop.name] = words
            self.run(loop.body)
            return
        if loop.name:
            self.variables[loop.name] = (
                (ValuePart(f"${loop.name}", loop.line, f"changes in the loop of line {loop.line}"),),
            )
        self._undecided([loop.body], loop.line)

    def _undecided(self, bodies: list[Body], line: int, *, one_of_them: bool = False) -> bool | None:
        """Follow bodies of which at most one is run, and join their variables."""
        before, outer = self.variables, self._condition
        self._condition = line if outer is None else outer
        states = [] if one_of_them else [dict(before)]
        for body in bodies:
            self.variables = dict(before)
            self.run(body)
            states.append(self.variables)
        self._condition = outer
        self.variables = {
            name: _joined(name, before.get(name), [state.get(name) for state in states], line)
            for name in dict.fromkeys(name for state in states for name in state)
        }
        return None

    def _simple(self, simple: Simple) -> bool | None:
        words = self._words(simple.words)
        texts = [Word.of(word, simple.line) for word in words]
        name = texts[0].text if texts else ""
        own = {each.name: Word.of(_first(self._assigned(each)), each.line) for each in simple.assignments if words}
        if not words or name in ("export", "local", "declare", "readonly", "typeset"):
            for each in simple.assignments:
                self.variables[each.name] = self._assigned(each)
            if name == "export":
                self._exported |= {each.name for each in simple.assignments} | {word.text for word in texts[1:]}
            return True if not words else None
        if name in ("[", "[[", "test"):
            return _Test(texts[1:-1] if name != "test" else texts[1:]).status()
        if name in ("true", ":", "false"):
            return name != "false"
        if name == "unset":
            for word in texts[1:]:
                self.variables.pop(word.text, None)
        elif name in self._functions:
            self._call(name, words)
        elif name == "eval":
            unquoted = [tuple(map(_as_evaluated, word)) for word in words[1:]]
            again = [piece for word in unquoted for piece in (*word, ValuePart(" ", simple.line))]
            self._note(_command_of(_split(again)), own, simple.line)
        elif name in ("echo", "printf", "cd", "mkdir", "set"):
            return None
        else:
            self._note(words, own, simple.line)
        return None

    def _call(self, name: str, words: tuple[Value, ...]) -> None:
        if self._calls >= _MAX_CALLS:
            return
        self._with_arguments(list(words[1:]), self._functions[name])

    def _with_arguments(self, values: list[Value], body: Body) -> None:
        """Follow the commands of a function or script with its own arguments."""
        names = [*map(str, range(1, _MAX_ARGUMENTS)), "@", "*"]
        kept = {key: self.variables.get(key) for key in names}
        given = {str(number): (value,) for number, value in enumerate(values, start=1)}
        self.variables = {key: value for key, value in self.variables.items() if key not in names}
        self.variables |= given | {"@": tuple(values), "*": tuple(values)}
        self._calls += 1
        self.run(body)
        self._calls -= 1
        for key, before in kept.items():
            self.variables.pop(key, None)
            if before is not None:
                self.variables[key] = before

    def _note(self, words: Iterable[Value], own: Mapping[str, Word], line: int) -> None:
        """Note a command; of ``bash -c TEXT``, the commands of the text."""
        values = tuple(words)
        texts = [Word.of(word, line) for word in values]
        if self._follow(texts, own):
            return
        for position, (first, second) in enumerate(pairwise(texts[:-1])):
            is_shell = first.text.rpartition("/")[2] in ("bash", "sh")
            if is_shell and second.text.startswith("-") and second.text.endswith("c") and self._calls < _MAX_CALLS:
                outer = len(self.called)
                self._calls += 1
                self._run_text(values[position + 2], line)
                self._calls -= 1
                wrapper = tuple(texts[:position])
                self.called[outer:] = [replace(each, words=wrapper + each.words) for each in self.called[outer:]]
                return
        exported = {name: Word.of(self.variables[name][0], line) for name in self._exported if self.variables.get(name)}
        self.called.append(Called(tuple(texts), exported | dict(own), self._condition))

    def _run_text(self, value: Value, line: int) -> None:
        """Run the text of ``bash -c``; words of a single plain command keep the lines in which they are written."""
        words = _split(value)
        command = next((at for at, word in enumerate(words) if not _ASSIGNS.match(word[0].text)), len(words))
        if any(_SPECIAL.search(piece.text) for word in words[command:] for piece in word if not piece.unknown):
            text = Word.of(value, line)
            self.run(parse_script(text.text, self.file, text.line))
        else:
            self._note(words[command:], {}, line)

    def _follow(self, words: list[Word], own: Mapping[str, Word]) -> bool:
        """Follow another script of the folder, with its arguments; False if the command calls none."""
        if self.folder is None or self._calls >= _MAX_CALLS:
            return False
        called = words[0].text.rpartition("/")[2] if words else ""
        if called == "sbatch":
            position = next((at for at, word in enumerate(words) if at and self._path_of(word)), None)
        else:
            position = 0 if called.endswith(".sh") else 1 if called in _SHELLS and len(words) > 1 else None
        path = None if position is None else self._path_of(words[position])
        if path is None or position is None:
            return False
        self._num_files += 1
        text, outer = read_text(path, _MAX_CHARS), len(self.called)
        body = parse_script(text, str(path), 1 + self._num_files * OTHER_FILE)
        self.variables |= {name: ((ValuePart(word.text, word.line, word.unknown),),) for name, word in own.items()}
        arguments: list[Value] = [(ValuePart(word.text, word.line, word.unknown),) for word in words[position + 1 :]]
        self._with_arguments(arguments, body)
        if called == "sbatch":
            line = words[0].line
            options = [f"{setting.key.removeprefix('#SBATCH ')}={setting.value}" for setting in sbatch_settings(text)]
            prefix = (Word("srun", line), *(Word(option, line) for option in options), *words[1:position])
            self.called[outer:] = [replace(each, words=prefix + each.words) for each in self.called[outer:]]
        return True

    def _path_of(self, word: Word) -> Path | None:
        """File of the folder that a word names; of a word with an unknown folder, the file of its name."""
        if self.folder is None:
            return None
        name = word.text.rpartition("/")[2] if word.unknown else word.text
        path = (self.folder / name).resolve()
        return path if path.is_relative_to(self.folder.resolve()) and path.is_file() else None

    def _assigned(self, assignment: Assignment) -> tuple[Value, ...]:
        before = self.variables.get(assignment.name, ())
        if assignment.is_indexed:
            text = f"${{{assignment.name}}}"
            return ((ValuePart(text, assignment.line, "is an array with indices, which simplan does not read"),),)
        if assignment.is_array:
            added = self._words(assignment.values)
            values = (*before, *added) if assignment.appends else added
        else:
            value = self._expanded(assignment.values[0])
            first = before[0] if before and assignment.appends else ()
            values = ((*first, *value), *(before[1:] if assignment.appends else ()))
        if (
            sum(map(len, values)) > _MAX_PIECES
            or sum(len(piece.text) for value in values for piece in value) > _MAX_CHARS
        ):
            what = f"the variable {assignment.name} is too long"
            raise file_error(self.file, what, "take the launch command out of the script", assignment.line)
        return values

    def _words(self, words: Iterable[SourceWord]) -> tuple[Value, ...]:
        """Words with their variables expanded and split."""
        return tuple(value for word in words for value in self._fields(word))

    def _fields(self, word: SourceWord) -> list[Value]:
        fields: list[list[ValuePart]] = []
        is_open = False

        def append(pieces: Iterable[ValuePart]) -> None:
            nonlocal is_open
            if not is_open:
                fields.append([])
                is_open = True
            fields[-1] += pieces

        for part in word:
            expanded = self._part(part)
            if part.kind == "text":
                append(expanded[0])
                continue
            for number, element in enumerate(expanded):
                if number:
                    is_open = False
                if part.quoted:
                    append(element)
                    continue
                for text, ends in _runs(element):
                    if ends:
                        is_open = False
                    else:
                        append([text])
        return [tuple(piece for piece in each if piece.text) for each in fields]

    def _expanded(self, word: SourceWord) -> Value:
        """Word without splitting, as in an assignment."""
        pieces: list[ValuePart] = []
        for part in word:
            for number, element in enumerate(self._part(part)):
                pieces += [ValuePart(" ", part.line)] * bool(number) + list(element)
        return tuple(pieces)

    def _part(self, part: Part) -> tuple[Value, ...]:
        """Elements of a part of a word: one, except for all elements of an array."""
        if part.kind == "text":
            return ((ValuePart(part.text, part.line),),)
        if part.kind == "command":
            return ((ValuePart(part.text, part.line, "is the output of a command, which simplan does not run"),),)
        if part.kind == "arithmetic":
            number = self._arithmetic(part.text)
            if number is None:
                return ((ValuePart(f"$(({part.text}))", part.line, "is not known without its variables"),),)
            return ((ValuePart(str(number), part.line),),)
        return self._variable(part)

    def _variable(self, part: Part) -> tuple[Value, ...]:
        found, by_default = self.variables.get(part.text), part.operator.strip(":")
        if by_default in ("-", "=", "+") and part.operator[:1] in ":-=+":
            is_set = found is not None and (part.operator[0] != ":" or any(piece.text for piece in _first(found)))
            if by_default == "+":
                return (self._expanded(part.default) if is_set else (),)
            return (found or ((),))[:1] if is_set else (self._expanded(part.default),)
        written = f"${{{part.text}}}" if part.operator == "?" else f"${part.text}"
        if part.operator == "?":
            return ((ValuePart(written, part.line, "is an expansion that simplan does not read"),),)
        if found is None:
            is_argument = not part.text[0].isalpha() and part.text[0] != "_"
            return ((ValuePart(written, part.line, _ARGUMENT if is_argument else _UNSET),),)
        if part.operator == "#":
            return ((ValuePart(str(len(found)), part.line),),)
        if part.text in ("@", "*") or (part.operator.startswith("[") and part.operator[1] in "@*"):
            return found
        index = int(part.operator[1:-1]) if part.operator.startswith("[") else 0
        return (found[index] if index < len(found) else (),)

    def _arithmetic(self, expression: str) -> int | None:
        """Value of an arithmetic expression; None if a variable of it is unknown."""
        if len(expression) > _MAX_EXPRESSION:
            return None
        text = expression.replace("${", " ").replace("}", " ").replace("$", " ").replace("/", "//")
        try:
            tree = ast.parse(text.replace("&&", " and ").replace("||", " or ").strip(), mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return None
        return self._computed(tree.body)

    def _computed(self, node: ast.expr) -> int | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, int) else None
        if isinstance(node, ast.Name):
            return _number_of(_first(self.variables.get(node.id, ((),))))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._computed(node.operand)
            return None if value is None else -value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            left, right = self._computed(node.left), self._computed(node.right)
            if left is None or right is None or (right == 0 and isinstance(node.op, ast.FloorDiv | ast.Mod)):
                return None
            result = _OPERATIONS[type(node.op)](left, right)
            return result if abs(result) < _LARGEST else None
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            left, right = self._computed(node.left), self._computed(node.comparators[0])
            return None if left is None or right is None else int(_COMPARISONS[type(node.ops[0])](left, right))
        return None


_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_TESTS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


@dataclass(slots=True)
class _Test:
    """Condition of ``[ ... ]`` or ``[[ ... ]]``, by its words."""

    words: list[Word]

    def status(self) -> bool | None:
        """Truth of the condition; None if it depends on what is unknown, or on files."""
        if len(self.words) > _MAX_TEST_WORDS:
            return None
        for joint, decides in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
            texts = [word.text for word in self.words]
            if joint in texts[1:]:
                at = texts.index(joint, 1)
                left, right = _Test(self.words[:at]).status(), _Test(self.words[at + 1 :]).status()
                if decides in (left, right):
                    return decides
                return None if None in (left, right) else not decides
        return self._single()

    def _single(self) -> bool | None:
        words = self.words
        if words and words[0].text == "!":
            inner = _Test(words[1:]).status()
            return None if inner is None else not inner
        if len(words) == 2 and words[0].text in ("-n", "-z") and words[1].unknown in (_UNSET, _ARGUMENT):
            return words[0].text == "-z" if words[1].text.startswith("$") else None  # as ${NAME:-default} has it
        if any(word.unknown or word.condition for word in words):
            return None
        texts = [word.text for word in words]
        if len(texts) == 1:
            return bool(texts[0])
        if texts[:1] in (["-n"], ["-z"]) and len(texts) <= 2:
            return bool("".join(texts[1:])) == (texts[0] == "-n")
        if len(texts) != 3:
            return None
        left, comparison, right = texts
        if comparison in ("=", "==", "!="):
            return fnmatchcase(left, right) == (comparison != "!=")
        numbers = _integer(left), _integer(right)
        if comparison in _TESTS and numbers[0] is not None and numbers[1] is not None:
            return _TESTS[comparison](numbers[0], numbers[1])
        return None


def _joined(
    name: str, before: tuple[Value, ...] | None, after: list[tuple[Value, ...] | None], line: int
) -> tuple[Value, ...]:
    """Elements of a variable after branches, of which it is not known which one is run."""
    first = after[0]
    if first is not None and all(each == first for each in after):
        return first
    known = [each for each in after if each is not None]
    start = before or ()
    if all(each[: len(start)] == start for each in known) and (start[1:] or any(len(each) != 1 for each in known)):
        added = [value for each in known for value in each[len(start) :]]
        return (*start, *(tuple(replace(piece, condition=line) for piece in value) for value in added))
    texts = [each[0] if each else () for each in known]
    head = start[0] if start else ()
    if head and all(text[len(text) - len(head) :] == head for text in texts):
        added_pieces = [piece for text in texts for piece in text[: len(text) - len(head)]]
        return ((*(replace(piece, condition=line) for piece in added_pieces), *head),)
    if all(text[: len(head)] == head for text in texts):
        rests = [text[len(head) :] for text in texts]
        words = ["".join(piece.text for piece in rest).strip() for rest in rests]
        if all(word.startswith("-") or not word for word in words):
            space = ValuePart(" ", line, condition=line)
            added_pieces = [piece for rest in rests for piece in (space, *rest)]
            return ((*head, *(replace(piece, condition=line) for piece in added_pieces)),)
    why = f"depends on the condition in line {line % OTHER_FILE}, which simplan cannot decide"
    return ((ValuePart(f"${name}", line, why),),)


def _first(elements: tuple[Value, ...]) -> Value:
    """First element of a variable; nothing for an empty array."""
    return elements[0] if elements else ()


def _runs(value: Value) -> Iterable[tuple[ValuePart, bool]]:
    """Pieces of an unquoted value split at spaces; True with a piece that ends a word."""
    for piece in value:
        if piece.unknown:
            yield piece, False
            continue
        rest = piece.text
        while rest:
            stripped = rest.lstrip()
            if len(stripped) < len(rest):
                yield replace(piece, text=" "), True
            word = stripped.split(None, 1)[0] if stripped else ""
            if word:
                yield replace(piece, text=word), False
            rest = stripped[len(word) :]


def _split(pieces: Iterable[ValuePart]) -> list[Value]:
    """Words of a value, split at spaces."""
    words: list[list[ValuePart]] = [[]]
    for piece, ends in _runs(tuple(pieces)):
        if ends:
            words.append([])
        else:
            words[-1].append(piece)
    return [tuple(word) for word in words if word]


def _as_evaluated(piece: ValuePart) -> ValuePart:
    """Part of an argument of ``eval``, without the quotes that eval removes; what it would expand is unknown."""
    expands = not piece.unknown and ("$" in piece.text or "`" in piece.text)
    unknown = "is expanded by eval, which simplan does not follow" if expands else piece.unknown
    return replace(piece, text=piece.text.replace('"', ""), unknown=unknown)


def _command_of(words: list[Value]) -> list[Value]:
    """Words of a command up to its redirections, or to the next command."""
    texts = ["".join(piece.text for piece in word) for word in words]
    end = next((at for at, text in enumerate(texts) if _ENDS_COMMAND.match(text)), len(words))
    return words[:end]


def _number_of(value: Value) -> int | None:
    return None if any(piece.unknown for piece in value) else _integer("".join(piece.text for piece in value))


def _integer(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.lstrip("-").isdecimal() and text.isascii() and len(text) <= 19 else None


def _text(word: SourceWord) -> str:
    return "".join(part.text for part in word if part.kind == "text")
