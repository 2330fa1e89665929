"""Configuration files that simplan reads and writes, found by name or by content."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simplan.catalog.spelling import find
from simplan.document import Document, parse_yaml, whole_number
from simplan.errors import NotModelledError, Problem, SpecError, did_you_mean
from simplan.interop.configuration import Configuration
from simplan.interop.writing import Exported, Option
from simplan.io import folder_of
from simplan.job import Job

if TYPE_CHECKING:
    from simplan.interop.frameworks.shell import Value
    from simplan.search.switch import ChangedSetting


_TARGETS = {
    "megatron-bridge": "bridge",
    "nemo": "bridge",
    "megatron-core": "megatron",
    "megatron-lm": "megatron",
    "megatron-lm-2021": "megatron",
    "megatron-lm-2022": "megatron",
    "torchtitan-2024": "torchtitan",
    "torchtitan-2025": "torchtitan",
    "k8s": "kubernetes",
    "sbatch": "slurm",
}
"""Profile of a framework, or another name -> target of an export with another name."""


@dataclass(frozen=True)
class ConfigFile:
    """Text of a file whose format is not known yet.

    Attributes:
        path: The file; other files that it names are relative to its folder.
        text: Its content.
        reads_others: False if files that it names must not be read, as they are on another machine.
        written: Files that a launch script writes itself, by their names.
        instead: Model that overrides name instead of that of the file: ``preset``, ``hf_config`` or ``file``, with its
            value.
    """

    path: Path
    text: str
    reads_others: bool = True
    written: Mapping[str, Value] = field(default_factory=dict, compare=False)
    instead: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """Name in errors."""
        return str(self.path)

    @property
    def folder(self) -> Path | None:
        """Folder of other files that it may name; None if they must not be read."""
        return folder_of(self.path) if self.reads_others else None

    @cached_property
    def yaml(self) -> Document | None:
        """Content as YAML with a mapping at the top; None if it is something else."""
        try:
            document = parse_yaml(self.text, self.name)
        except SpecError:
            return None
        return document if isinstance(document.data, dict) else None

    @cached_property
    def json(self) -> dict[str, Any] | None:
        """Content as a JSON object; None if it is something else."""
        try:
            data = json.loads(self.text, parse_int=whole_number)
        except (ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) else None


@dataclass(frozen=True, slots=True)
class Format:
    """One framework's configuration.

    Attributes:
        name: Name for ``--from`` and ``--to``.
        title: Framework and kind of file in words.
        recognizes: True for a file of this format, by its content.
        read: Reads such a file; raises ``SpecError``. None for a format that is only written.
        settings: A job in settings of the framework; raises ``NotModelledError``. None for a format that is only read.
        export: Files that run a job, by the job and its name; raises ``NotModelledError``.
        profile: Framework profile of such a file; empty if any will do.
    """

    name: str
    title: str
    recognizes: Callable[[ConfigFile], bool] = lambda file: False
    read: Callable[[ConfigFile], Configuration] | None = None
    settings: Callable[[Job], tuple[Option, ...]] | None = None
    export: Callable[[Job, str], Exported] | None = None
    profile: str = ""


@cache
def formats() -> Mapping[str, Format]:
    """All formats by name, those with the most certain signs first."""
    from simplan.interop import chakra
    from simplan.interop.frameworks import megatron, nemo, torchtitan, torchtune
    from simplan.interop.frameworks.bridge import reading as bridge
    from simplan.interop.frameworks.hugging_face import files as hugging_face

    known: tuple[Format, ...] = (
        torchtitan.FORMAT,
        torchtitan.TOML_FORMAT,
        bridge.FORMAT,
        nemo.FORMAT,
        torchtune.FORMAT,
        *hugging_face.FORMATS,
        megatron.FORMAT,
        chakra.FORMAT,
    )
    return {target.name: target for target in known}


def read_configuration(file: ConfigFile, framework: str | None = None) -> Configuration | None:
    """Read a framework's configuration; None if no framework is named and the file is of none.

    Args:
        framework: Name of the format; None to find it by content.

    Raises:
        SpecError: The format is unknown, or the file is wrong.
    """
    if framework is None and file.yaml is not None and {"model", "cluster"} <= file.yaml.data.keys():
        return None  # a scenario, whatever its comments say
    readers = {name: target.read for name, target in formats().items() if target.read is not None}
    if framework is None:
        recognizing = (name for name in readers if formats()[name].recognizes(file))
        framework = next(recognizing, None)
    if framework is None:
        return None
    if framework not in readers:
        rule, fix = "is no format that simplan reads", did_you_mean(framework, readers)
        raise SpecError(Problem(field="--from", value=framework, rule=rule, fix=fix))
    others = (
        [] if formats()[framework].recognizes(file) else [e.title for e in formats().values() if e.recognizes(file)]
    )
    return replace(readers[framework](file), format=framework, looks_like=", ".join(others))


def profile_for(target: str, name: str) -> str:
    """Framework profile of an export that is asked for by a name of its target; empty if any will do.

    >>> profile_for("bridge", "nemo"), profile_for("megatron", "megatron-lm-2022"), profile_for("slurm", "slurm")
    ('megatron-bridge', 'megatron-lm-2022', '')
    """
    usual = formats()[target].profile if target in formats() else ""
    named = find("software", name).name
    return named if usual and named.startswith(target) else usual


def changed_settings(configuration: Configuration, before: Job, after: Job) -> tuple[ChangedSetting, ...]:
    """Settings of a framework that differ between two jobs, with the lines of the file that the first comes from.

    A framework that cannot express one of the jobs, or that is only read, leaves the keys of the scenario.
    """
    from simplan.search.switch import ChangedSetting, changed_keys, changed_options

    write = formats()[configuration.format].settings if configuration.format in formats() else None
    if write is None:
        return changed_keys(before, after)
    try:
        options = [write(job) for job in (before, after)]
    except NotModelledError:
        return changed_keys(before, after)
    old, new = ({option.setting.key: option.setting.value for option in written} for written in options)
    says = {option.setting.key: option.comment for written in options for option in written}
    keys = dict.fromkeys([*old, *new])
    changed = []
    for key in keys:
        if old.get(key) == new.get(key):
            continue
        written = configuration.settings.get(key)  # such as -1 for the rest of the devices
        other = configuration.settings.get(configuration.names.get(says[key], ""))
        if written is None and other is not None and other.key not in keys:  # another setting of the same meaning
            changed.append(ChangedSetting(other.key, other.value, None, other.line))
            if key in new:
                changed.append(ChangedSetting(key, None, new[key]))
            continue
        value, line = (old.get(key), None) if written is None else (written.value, written.line)
        changed.append(ChangedSetting(key, value, new.get(key), line))
    return (*changed, *changed_options(before, after))


def export_target(name: str) -> str:
    """Target of an export that a name stands for: a target, or the profile of a framework; empty if none.

    >>> export_target("megatron-bridge"), export_target("NeMo"), export_target("Slurm"), export_target("maxtext")
    ('bridge', 'bridge', 'slurm', '')
    """
    profile = find("software", name).name
    plain = name.strip().lower()
    return next(
        (target for target in (plain, _TARGETS.get(plain), _TARGETS.get(profile)) if target in export_targets()), ""
    )


def export_targets() -> tuple[str, ...]:
    """Names of everything that a job can be exported to."""
    from simplan.interop.hostfiles import HOSTFILES

    return (
        *(name for name, target in formats().items() if target.export is not None),
        *HOSTFILES,
        "kubernetes",
        "slurm",
    )
