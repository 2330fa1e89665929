"""Settings of one file of a run, by their own keys, while several files of the run are read together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from simplan.document import Document, parse_yaml
from simplan.errors import SpecError, file_error
from simplan.interop.configuration import Reading, Setting
from simplan.interop.formats import ConfigFile
from simplan.interop.frameworks import names_without_effect, tables
from simplan.interop.frameworks.shell import doubts, restored, written_file
from simplan.io import MAX_YAML_BYTES, folder_of, is_file, read_text

AUTO = "auto"
"""DeepSpeed's word for a value that the Trainer fills in."""
_MAX_PARENTS = 4  # scripts/examples/sft/train.sh is run from the root of its repository


@dataclass(frozen=True, slots=True)
class Keys:
    """Settings of one file in the reading of a run.

    Attributes:
        reading: The run.
        settings: Key within its file -> key in the reading, which has the file's name in front if it is another file.
    """

    reading: Reading
    settings: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        """True if the file has the key with a value that is not ``auto``."""
        full = self.settings.get(key)
        return full is not None and self.reading.settings[full].value != AUTO

    def __bool__(self) -> bool:
        """True if there is such a file."""
        return bool(self.settings)

    def full(self, key: str) -> str:
        """Key in the reading; the key itself if the file does not have it."""
        return self.settings.get(key, key)

    def value(self, key: str, default: Any = None) -> Any:
        """Value of a key, which counts as read; the default if it is absent or ``auto``."""
        full = self.settings.get(key)
        value = None if full is None else self.reading.value(full)
        return default if value is None or value == AUTO else value

    def first(self, *keys: str) -> str | None:
        """The first key that the file has with a value."""
        return next((key for key in keys if key in self), None)

    def is_true(self, key: str) -> bool:
        """True if the file has the key and it is on."""
        return is_true(self.value(key, False))

    def put(self, path: str, value: Any, key: str) -> None:
        """Give a key of the scenario the value that a setting gives."""
        self.reading.put(path, value, self.full(key))

    def no_effect(self, names: Iterable[str]) -> None:
        """Note settings that change neither time nor memory, by their whole names."""
        self.reading.no_effect(*(self.settings[name] for name in names if name in self.settings))

    def note(self, name: str) -> None:
        """Note or refuse settings of a table that have other values than those that change nothing."""
        settings = table(name)
        for key, (same, why) in settings.get("not_modeled", {}).items():
            if self.value(key) is not None and not is_one_of(self.value(key), same):
                self.not_modeled(key, why)
        for key, (same, why) in settings.get("refused", {}).items():
            if self.value(key) is not None and not is_one_of(self.value(key), same):
                self.refuse(key, why, "remove it")

    def sort_rest(self, name: str) -> None:
        """Note settings of a file that nothing has read and that are without an effect (``tables/no_effect.yaml``)."""
        self.no_effect(names_without_effect(name))
        for key in (*table(name).get("not_modeled", ()), *table(name).get("refused", ())):
            self.value(key)  # auto: the program fills in what is not noted

    def not_modeled(self, key: str, why: str) -> None:
        """Note a setting that changes time or memory by something that is left out."""
        if key in self.settings:
            self.reading.not_modeled(self.settings[key], why)

    def refuse(self, key: str, rule: str, fix: str = "") -> None:
        """Record a setting without which the answer would be about another job."""
        self.reading.refuse(self.full(key), rule, fix)

    def view(self, prefixes: tuple[str, ...], rename: Callable[[str], str] = lambda name: name) -> Keys:
        """Settings of one section, by the rest of their keys.

        Args:
            prefixes: Beginnings of the keys, of which the first that fits is cut off.
            rename: Applied to the rest.
        """
        full_names: dict[str, str] = {}
        for key, full in self.settings.items():
            prefix = next((candidate for candidate in prefixes if key.startswith(candidate)), None)
            if prefix is not None:
                full_names[rename(key.removeprefix(prefix))] = full
        return Keys(self.reading, full_names)


def table(name: str) -> Mapping[str, Any]:
    """Table of ``tables/hugging_face.yaml``: what settings of one file, or of one part of it, do to a step."""
    words: Mapping[str, Any] = tables("hugging_face").get(name, {})
    return words


def is_true(value: Any) -> bool:
    """True for the words that argparse and YAML 1.1 take as true."""
    return value is True or (isinstance(value, str) and value.lower() in ("true", "yes", "y", "on", "1")) or value == 1


def is_one_of(value: Any, words: Iterable[Any]) -> bool:
    """True if a value equals one of several, where true and false may be written as words."""
    is_off = str(value).lower() in ("false", "no", "n", "off", "0")
    return any(value == word or (isinstance(word, bool) and (is_true(value) if word else is_off)) for word in words)


def whole(value: Any) -> int | None:
    """Whole number, also one written as text or as 5e8; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if abs(number) < 1e15 and number == int(number) else None


def flattened(document: Document, name: str = "") -> Iterator[tuple[str, Setting]]:
    """Leaves of a document by their dotted keys; values that are null say nothing and are left out.

    Args:
        name: File, written before the keys; empty for the file of the reading itself, whose lines are kept.
    """
    stack: list[tuple[tuple[str, ...], Any]] = [((), document.data)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict) and (value or not path):
            stack += [((*path, str(key)), value[key]) for key in reversed(value)]
        elif value is not None:
            key = ".".join(path)
            line = document.place(path)[0] if not name else None
            yield key, Setting(f"{name}: {key}" if name else key, value, line)


def document_of(file: ConfigFile) -> Document | None:
    """Mapping that a YAML or JSON file has; None if it has none."""
    if file.yaml is not None:
        return file.yaml
    return None if file.json is None else Document(file.json, {})


def named_document(name: str, base: ConfigFile) -> tuple[str, Document] | None:
    """File that another file names, relative to it or to a folder above; None if there is none, or none must be read.

    A file that a launch script writes itself comes first.

    Args:
        name: Name as written. Absolute names are looked up by their last part only.
        base: File that has the name.

    Raises:
        SpecError: The file has no mapping, or settings of it depend on what the script does not say.
    """
    if (written := _written_document(name, base)) is not None:
        return PurePosixPath(name).name, written
    if not base.reads_others:
        return None
    wanted = PurePosixPath(name)
    folder = folder_of(base.path).resolve()
    folders = [folder, *folder.parents][: _MAX_PARENTS + 1]
    inside = not wanted.is_absolute() and ".." not in wanted.parts
    candidates = [parent / wanted for parent in folders] if inside else []
    path = next(
        (candidate for candidate in (*candidates, folder / wanted.name) if wanted.name and is_file(candidate)), None
    )
    return None if path is None else (wanted.name, read_document(path))


def _written_document(name: str, base: ConfigFile) -> Document | None:
    """File that a launch script writes itself; None if it writes no such file."""
    if (written := written_file(name, base.written)) is None:
        return None
    text, unknown = written
    document = _mapping_of(ConfigFile(Path(name), text))
    settings = (setting for _, setting in flattened(document))
    if problems := doubts(PurePosixPath(name).name, settings, unknown):
        raise SpecError(problems, file=base.name)
    return Document(restored(document.data, unknown), document.lines)


def read_document(path: Path) -> Document:
    """Mapping of a YAML or JSON file.

    Raises:
        SpecError: It cannot be read, or has none.
    """
    return _mapping_of(ConfigFile(path, read_text(path, MAX_YAML_BYTES)))


def _mapping_of(file: ConfigFile) -> Document:
    document = document_of(file)
    if document is None:
        parse_yaml(file.text, file.name)
        raise file_error(file.name, "it holds no settings", "write key: value, or a JSON object")
    return document
