"""Variables and commands of a launch script, followed as the shell would, without running anything.

Outputs of commands, arguments of the script and variables that it does not set are unknown, and stay as written. Where
a condition cannot be decided, all branches are followed: an option that only some of them add is *conditional*.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path

from simplan.errors import SpecError, file_error
from simplan.interop.frameworks.shell import outputs, syntax
from simplan.interop.frameworks.shell.lexer import OTHER_FILE, HereDocument, Part, SourceWord, parse_document
from simplan.interop.frameworks.shell.syntax import Assignment, Body, Command
from simplan.interop.frameworks.shell.values import (
    ARGUMENT,
    FILE,
    UNSET,
    Value,
    Word,
    as_evaluated,
    command_of,
    file_key,
    first_of,
    merged,
    number_of,
    runs_of,
    split_words,
    truth,
)
from simplan.io import is_file, read_text

_MAX_STEPS, _MAX_CALLS, _MAX_PIECES, _MAX_CHARS = 50_000, 20, 20_000, 400_000
_MAX_EXPRESSION, _MAX_ARGUMENTS = 200, 100
_LARGEST = 2**63
_SPECIAL = re.compile(r"[;|&<>()$`\\\"'{}#]")
"""Characters of more than one command of plain words."""
_ABSENT = re.compile(r"\$\d+")
_ASSIGNS = re.compile(r"[A-Za-z_]\w*=")
_SCRIPTS = (".sh", ".slurm", ".sbatch", ".bash")
_SHELLS = ("bash", "sh", "source", ".", "zsh")
_RUNNERS = (
    "srun", "mpirun", "mpiexec", "salloc", "env", "nohup", "exec", "time", "timeout", "numactl", "singularity",
    "apptainer", "docker", "podman", "stdbuf",
)  # fmt: skip
"""Commands whose arguments are a command."""
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def _position_of_text(words: Sequence[Word]) -> tuple[int | None, int]:
    """Positions of a shell and of its commands in ``srun bash -x -c TEXT``; None if there are none."""
    for position, word in enumerate(words):
        if word.text.rpartition("/")[2] in ("bash", "sh"):
            options = takewhile(lambda option: option.text.startswith("-"), words[position + 1 :])
            for number, option in enumerate(options, start=position + 2):
                if option.text.endswith("c") and not option.text.startswith("--") and number < len(words):
                    return position, number
    return None, 0


@dataclass(frozen=True, slots=True)
class Called:
    """Command that the script calls.

    Attributes:
        words: Words of the command, redirections left out.
        environment: Variables that it exports, or sets for this command.
        line: Line of the first script from which it is called, itself or in another script.
        condition: Line of the undecided condition under which it is called; None for none.
        files: Files that the script has written by then.
    """

    words: tuple[Word, ...]
    environment: Mapping[str, Word]
    line: int
    condition: int | None = None
    files: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MissingScript:
    """Script that is called and is not in the folder.

    Attributes:
        name: Path as written.
        line: Line of the first script from which it is called.
        is_sourced: True for ``source``, by which it may set variables.
    """

    name: str
    line: int
    is_sourced: bool


@dataclass(slots=True)
class Shell:
    """State of a script.

    Attributes:
        file: Name of the script in errors.
        folder: Folder of the script, from which it may call others; None to follow no other script.
        variables: Name -> elements; one for a plain variable. Files that the script writes are among them, by
            ``file_key``.
        wrappers: Names of scripts that count as a program, and are not followed.
        called: Commands that were called so far.
        missing: Scripts that it calls and that are not in the folder.
    """

    file: str
    folder: Path | None = None
    variables: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    wrappers: frozenset[str] = frozenset()
    called: list[Called] = field(default_factory=list)
    missing: list[MissingScript] = field(default_factory=list)
    _functions: dict[str, Body] = field(default_factory=dict)
    _exported: set[str] = field(default_factory=set)
    _condition: int | None = None
    _caller: int | None = None
    _input: Value | None = None
    _steps: int = 0
    _calls: int = 0
    _num_files: int = 0

    def run(self, body: Body) -> bool | None:
        """Follow commands; status of the last one, None if it cannot be known."""
        status: bool | None = True
        for command in body:
            status = self._status(command)
        return status

    def _status(self, command: Command) -> bool | None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise file_error(self.file, "the script has too many steps", "take the launch command out of it")
        match command:
            case syntax.Simple():
                return self._simple(command)
            case syntax.Chain():
                return self._chain(command)
            case syntax.Branch():
                self._branch(command)
            case syntax.Case():
                self._case(command)
            case syntax.Loop():
                self._loop(command)
            case syntax.Function():
                self._functions[command.name] = command.body
        return None

    def _chain(self, chain: syntax.Chain) -> bool | None:
        status: bool | None = None
        for joined, negated, command in chain.commands:
            result: bool | None = None
            if joined != "|":
                self._input = None
            if joined not in ("&&", "||") or status == (joined == "&&"):
                result = self._status(command)
            elif status is None:
                self._undecided([(command,)], chain.line)
            else:
                continue
            status = None if result is None else result != negated
        return status

    def _branch(self, branch: syntax.Branch) -> None:
        open_bodies: list[Body] = []
        for condition, body in branch.branches:
            status = self.run(condition)
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

    def _case(self, case: syntax.Case) -> None:
        word = Word.of(self._expanded(case.word), case.line)
        if word.unknown:
            listed = [[part.text for part in pattern] for patterns, _ in case.branches for pattern in patterns]
            self._undecided([body for _, body in case.branches], case.line, one_of_them=["*"] in listed)
            return
        for patterns, body in case.branches:
            if any(fnmatchcase(word.text, Word.of(self._expanded(pattern), 0).text) for pattern in patterns):
                self.run(body)
                return

    def _loop(self, loop: syntax.Loop) -> None:
        if loop.condition and self.run(loop.condition) is False:
            return
        words = self._words(loop.words)
        if loop.name and len(words) == 1 and words[0] and not any(piece.unknown for piece in words[0]):
            self.variables[loop.name] = words
            self.run(loop.body)
            return
        if loop.name:
            why = f"changes in the loop of line {loop.line % OTHER_FILE}"
            self.variables[loop.name] = ((Word(f"${loop.name}", loop.line, why),),)
        self._undecided([loop.body], loop.line)

    def _undecided(self, bodies: Sequence[Body], line: int, *, one_of_them: bool = False) -> None:
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
            name: merged(name, before.get(name), [state.get(name) for state in states], line)
            for name in dict.fromkeys(name for state in states for name in state)
        }

    def _simple(self, simple: syntax.Simple) -> bool | None:
        words = self._words(simple.words)
        texts = [Word.of(word, simple.line) for word in words]
        name = texts[0].text if texts else ""
        stdin, self._input = self._input, None
        if not words or name in _DECLARES:
            for assignment in simple.assignments:
                self.variables[assignment.name] = self._assigned(assignment)
            if name == "export":
                self._exported |= {assignment.name for assignment in simple.assignments} | {
                    word.text for word in texts[1:]
                }
            return None if words else True
        if name in ("[", "[[", "test"):
            if "#" in self.variables:  # arguments that a known call does not give are empty
                texts = [
                    Word("", word.line) if _ABSENT.fullmatch(word.text) and word.unknown else word for word in texts
                ]
            return truth(texts[1:-1] if name != "test" else texts[1:])
        if name == "((":
            number = number_of(words[1])
            return None if number is None else number != 0
        if name in ("true", ":", "false"):
            return name != "false"
        self._start(simple, words, stdin)
        return None

    def _start(self, simple: syntax.Simple, words: Sequence[Value], stdin: Value | None) -> None:
        """Follow a command that has no status by its words.

        Args:
            stdin: Text that it is given by a pipe; None if there is none, or it is not known.
        """
        texts = [Word.of(word, simple.line) for word in words]
        name = texts[0].text
        assigned = {
            assignment.name: Word.of(first_of(self._assigned(assignment)), assignment.line)
            for assignment in simple.assignments
        }
        if name == "unset":
            for word in texts[1:]:
                self.variables.pop(word.text, None)
        elif name in self._functions:
            self._call(words[1:], self._functions[name])
        elif name == "eval":
            evaluated = [piece for word in words[1:] for piece in (*map(as_evaluated, word), Word(" ", simple.line))]
            self._note(command_of(split_words(evaluated)), assigned, simple.line)
        elif (simple.document is not None or stdin) and self._reads_script(texts):
            self._run_document(simple.document, stdin, texts)
        elif name in outputs.COMMANDS:
            self._write(simple, words, stdin)
        elif name not in ("cd", "mkdir", "set"):
            self._note(words, assigned, simple.line)

    def _write(self, simple: syntax.Simple, words: Sequence[Value], stdin: Value | None) -> None:
        """Note the output of a command, for the file that it goes to, or for the next command of a pipe."""
        if simple.document is not None:
            try:
                stdin = self._expanded(parse_document(simple.document, self.file))
            except SpecError:
                stdin = None
        text = outputs.output_of(words, stdin, self._content)
        self._input = text if simple.output is None else None
        files = outputs.written_files(words)
        if simple.output is not None:
            files.append((Word.of(self._expanded(simple.output.file), simple.line).text, simple.output.appends))
        for name, appends in files:
            before = self._content(name) if appends else ()
            why = "is made by a command that simplan does not run"
            known = (Word("", simple.line, why),) if text is None or before is None else (*before, *text)
            self.variables[file_key(name)] = (known,)

    def _content(self, name: str) -> Value | None:
        """Text of a file that the script has written, or that lies in its folder; None if it cannot be read."""
        if (written := self.variables.get(file_key(name))) is not None:
            return written[0]
        path = self._path_of(Word(name, 0))
        try:
            return None if path is None else (Word(read_text(path, _MAX_CHARS), 0),)
        except SpecError:
            return None

    def _call(self, values: Sequence[Value], body: Body) -> None:
        """Follow the commands of a function or script with its own arguments."""
        if self._calls >= _MAX_CALLS:
            return
        names = [*map(str, range(1, _MAX_ARGUMENTS)), "@", "*", "#"]
        kept = {key: self.variables[key] for key in names if key in self.variables}
        arguments: dict[str, tuple[Value, ...]] = {
            str(number): (value,) for number, value in enumerate(values, start=1)
        }
        arguments |= {"@": tuple(values), "*": tuple(values), "#": ((Word(str(len(values)), 0),),)}
        self.variables = {key: value for key, value in self.variables.items() if key not in names} | arguments
        self._calls += 1
        self.run(body)
        self._calls -= 1
        self.variables = {key: value for key, value in self.variables.items() if key not in names} | kept

    def _note(self, words: Sequence[Value], assigned: Mapping[str, Word], line: int) -> None:
        """Note a command; of ``bash -c TEXT``, the commands of the text."""
        texts = [Word.of(word, line) for word in words]
        if texts and texts[0].text in self._functions:  # exported to the shell that is started
            self._call(words[1:], self._functions[texts[0].text])
            return
        if self._follow(texts, assigned):
            return
        position, text = _position_of_text(texts)
        if position is not None and self._calls < _MAX_CALLS:
            outer = len(self.called)
            self._calls += 1
            self._run_text(words[text], line)
            self._calls -= 1
            self._prefix(outer, texts[:position])
            return
        exported = {name: Word.of(self.variables[name][0], line) for name in self._exported if self.variables.get(name)}
        called_from = line if self._caller is None else self._caller
        files = {name.removeprefix(FILE): values[0] for name, values in self.variables.items() if name[:1] == FILE}
        self.called.append(Called(tuple(texts), exported | dict(assigned), called_from, self._condition, files))

    def _prefix(self, start: int, words: Iterable[Word]) -> None:
        """Put the words of a wrapper before the commands from ``start`` on."""
        self.called[start:] = [replace(called, words=(*words, *called.words)) for called in self.called[start:]]

    def _run_text(self, value: Value, line: int) -> None:
        """Run the text of ``bash -c``; words of a single plain command keep the lines in which they are written."""
        words = split_words(value)
        command = next((at for at, word in enumerate(words) if not _ASSIGNS.match(word[0].text)), len(words))
        if any(_SPECIAL.search(piece.text) for word in words[command:] for piece in word if not piece.unknown):
            text = Word.of(value, line)
            self.run(syntax.parse_script(text.text, self.file, text.line))
        else:
            self._note(words[command:], {}, line)

    def _reads_script(self, words: Sequence[Word]) -> bool:
        """True for ``sbatch``, ``bash`` or a launcher of it that reads its commands from a here-document."""
        names = [word.text.rpartition("/")[2] for word in words]
        at = next((at for at, name in enumerate(names) if name in ("sbatch", *_SHELLS)), None)
        if at is None or self._calls >= _MAX_CALLS:
            return False
        others = [word.text for word in words[at + 1 :]]
        if names[at] == "sbatch":
            return not any(text.endswith(_SCRIPTS) for text in others)
        return all(text.startswith("-") for text in others)

    def _run_document(self, document: HereDocument | None, stdin: Value | None, words: Sequence[Word]) -> None:
        """Follow the commands of a here-document or of a pipe; options of ``sbatch`` are those of the launcher."""
        if document is None:
            text = Word.of(stdin or (), words[0].line)
            script, line = text.text, text.line
        else:
            script, line = document.text, document.line
            script = script if document.is_quoted else re.sub(r"\\([$\\`])", r"\1", script)
        outer = len(self.called)
        self._calls += 1
        self.run(syntax.parse_script(script, self.file, line))
        self._calls -= 1
        if words[0].text.rpartition("/")[2] == "sbatch":
            self._prefix(outer, [Word("srun", words[0].line), *words[1:]])

    def _follow(self, words: Sequence[Word], assigned: Mapping[str, Word]) -> bool:
        """Follow another script of the folder, with its arguments; False if the command calls none."""
        if self.folder is None or self._calls >= _MAX_CALLS or not words:
            return False
        called, position = words[0].text.rpartition("/")[2], self._position_of_script(words)
        path = None if position is None else self._path_of(words[position])
        if path is None or position is None:
            self._note_missing(words, called, position)
            return False
        self._num_files += 1
        caller = self._caller
        self._caller = words[0].line if caller is None else caller
        text, outer = read_text(path, _MAX_CHARS), len(self.called)
        body = syntax.parse_script(text, str(path), 1 + self._num_files * OTHER_FILE)
        self.variables |= {name: ((replace(word, condition=None),),) for name, word in assigned.items()}
        self._call([(replace(word, condition=None),) for word in words[position + 1 :]], body)
        prefix = words[:position] if called in _RUNNERS else ()
        if called == "sbatch":
            options = [
                f"{setting.key.removeprefix('#SBATCH ')}={setting.value}" for setting in syntax.sbatch_settings(text)
            ]
            prefix = [*(Word(text, words[0].line) for text in ("srun", *options)), *words[1:position]]
        self._prefix(outer, prefix)
        self._caller = caller
        return True

    def _position_of_script(self, words: Sequence[Word]) -> int | None:
        """Position of the script that a command calls; None if it calls none."""
        names = [word.text.rpartition("/")[2] for word in words]
        if self.wrappers & {*names}:
            return None
        if names[0] == "sbatch":
            return next((at for at, word in enumerate(words) if at and self._path_of(word)), None)
        start = next((at for at, name in enumerate(names) if name in _SHELLS), None) if names[0] in _RUNNERS else 0
        if start is None:
            return next((at for at, word in enumerate(words) if at and word.text.endswith(_SCRIPTS)), None)
        if names[start].endswith(_SCRIPTS):
            return start
        if names[start] not in _SHELLS:
            return None
        position = next((at for at in range(start + 1, len(words)) if not words[at].text.startswith("-")), None)
        options = [word.text for word in words[start + 1 : position]]
        return None if any(text.endswith("c") for text in options) else position

    def _note_missing(self, words: Sequence[Word], called: str, position: int | None) -> None:
        """Note a script that is called by its name and is not in the folder."""
        if called == "sbatch":
            position = next((at for at, word in enumerate(words) if at and not word.text.startswith("-")), None)
        if position is not None and words[position].text.endswith(_SCRIPTS):
            line = words[0].line if self._caller is None else self._caller
            self.missing.append(MissingScript(words[position].text, line, called in ("source", ".")))

    def _path_of(self, word: Word) -> Path | None:
        """File of the folder that a word names; of a word with an unknown folder, the file of its name."""
        if self.folder is None:
            return None
        name = word.text.rpartition("/")[2] if word.unknown else word.text
        path = (self.folder / name).resolve()
        return path if path.is_relative_to(self.folder.resolve()) and is_file(path) else None

    def _assigned(self, assignment: Assignment) -> tuple[Value, ...]:
        before = self.variables.get(assignment.name, ()) if assignment.appends else ()
        if assignment.is_indexed:
            why = "is an array with indices, which simplan does not read"
            return ((Word(f"${{{assignment.name}}}", assignment.line, why),),)
        if assignment.is_array:
            values = (*before, *self._words(assignment.values))
        else:
            values = ((*first_of(before), *self._expanded(assignment.values[0])), *before[1:])
        pieces = [piece for value in values for piece in value]
        if len(pieces) > _MAX_PIECES or sum(len(piece.text) for piece in pieces) > _MAX_CHARS:
            what, fix = f"the variable {assignment.name} is too long", "take the launch command out of the script"
            raise file_error(self.file, what, fix, assignment.line % OTHER_FILE)
        return values

    def _words(self, words: Iterable[SourceWord]) -> tuple[Value, ...]:
        """Words with their variables expanded and split."""
        return tuple(value for word in words for value in self._fields(word))

    def _fields(self, word: SourceWord) -> list[Value]:
        """Words that one word becomes: parts outside of quotes are split, and an array has a word for each element."""
        fields: list[list[Word]] = []
        is_open = False

        def append(pieces: Iterable[Word]) -> None:
            nonlocal is_open
            if not is_open:
                fields.append([])
                is_open = True
            fields[-1] += pieces

        for part in word:
            for number, element in enumerate(self._part(part)):
                is_open = is_open and number == 0
                if part.quoted or part.kind == "text":
                    append(element)
                    continue
                for piece, ends in runs_of(element):
                    if ends:
                        is_open = False
                    else:
                        append([piece])
        return [tuple(piece for piece in field if piece.text) for field in fields]

    def _expanded(self, word: SourceWord) -> Value:
        """Word without splitting, as in an assignment."""
        pieces: list[Word] = []
        for part in word:
            for number, element in enumerate(self._part(part)):
                pieces += [Word(" ", part.line)] * bool(number) + list(element)
        return tuple(piece for piece in pieces if piece.text)

    def _part(self, part: Part) -> tuple[Value, ...]:
        """Elements of a part of a word: one, except for all elements of an array."""
        text, unknown = part.text, ""
        if part.kind == "variable":
            return self._variable(part)
        if part.kind == "command":
            unknown = "is the output of a command, which simplan does not run"
        elif part.kind == "arithmetic":
            number = self._arithmetic(text)
            text = f"$(({text}))" if number is None else str(number)
            unknown = "is not known without its variables" if number is None else ""
        return ((Word(text, part.line, unknown),),)

    def _variable(self, part: Part) -> tuple[Value, ...]:
        values, by_default = self.variables.get(part.text), part.operator.strip(":")
        if by_default in ("-", "=", "+"):
            is_set = values is not None and (part.operator[0] != ":" or any(piece.text for piece in first_of(values)))
            if by_default == "+":
                return (self._expanded(part.default) if is_set else (),)
            if is_set:
                return (values or ((),))[:1]
            value = self._expanded(part.default)
            if by_default == "=" and part.text.isidentifier():
                self.variables[part.text] = (value,)
            return (value,)
        if part.operator == "?":
            why = "is an expansion that simplan does not read"
            return ((Word(f"${{{part.text}}}", part.line, why),),)
        if values is None:
            is_argument = not part.text[0].isalpha() and part.text[0] != "_"
            return ((Word(f"${part.text}", part.line, ARGUMENT if is_argument else UNSET),),)
        if part.operator == "#":
            return ((Word(str(len(values)), part.line),),)
        if part.text in ("@", "*") or part.operator in ("[@]", "[*]"):
            return values
        index = int(part.operator[1:-1]) if part.operator.startswith("[") else 0
        return (values[index] if index < len(values) else (),)

    def _arithmetic(self, expression: str) -> int | None:
        """Value of an arithmetic expression; None if a variable of it is unknown."""
        if len(expression) > _MAX_EXPRESSION:
            return None
        text = expression.replace("${", " ").replace("}", " ").replace("$", " ").replace("/", "//")
        try:
            return self._computed(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return None

    def _computed(self, node: ast.expr) -> int | None:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return number_of(first_of(self.variables.get(name, ())))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self._computed(operand)
                return None if value is None else -value
            case (
                ast.BinOp(left=left_node, op=operation, right=right_node)
                | ast.Compare(left=left_node, ops=[operation], comparators=[right_node])
            ):
                left, right, compute = (
                    self._computed(left_node),
                    self._computed(right_node),
                    _OPERATORS.get(type(operation)),
                )
                divides = isinstance(operation, ast.FloorDiv | ast.Mod)
                if compute is None or left is None or right is None or (divides and right == 0):
                    return None
                result = int(compute(left, right))
                return result if abs(result) < _LARGEST else None
        return None
