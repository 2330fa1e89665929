"""Launch scripts as the training command that they start: program, arguments, and the devices of the launcher.

::

    (launch,) = read_launches(text, "train.sh")
    launch.program.text, [word.text for word in launch.arguments], launch.num_devices
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from simplan.errors import file_error
from simplan.interop.configuration import Setting
from simplan.interop.frameworks.shell.lexer import own_line
from simplan.interop.frameworks.shell.outputs import written_file
from simplan.interop.frameworks.shell.shell import Called, MissingScript, Shell
from simplan.interop.frameworks.shell.syntax import parse_script, sbatch_settings, whole_number
from simplan.interop.frameworks.shell.values import Value, Word

_NUMBER = re.compile(r"[-+]?\d(_?\d){0,17}")
_REAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?")
_PYTHON = re.compile(r"(python|python3|python3\.\d+|pypy3?)")
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic.launch")
_LAUNCHERS = (*_TORCHRUN, "deepspeed", "accelerate", "srun", "mpirun", "mpiexec", "mpiexec.hydra", "salloc")
# fmt: off
_WITHOUT_VALUE = frozenset((
    "standalone", "no-python", "use-env", "run-path", "virtual-local-rank", "no-local-rank", "force-multi", "no-ssh",
    "no-ssh-check", "save-pid", "elastic-training", "bind-cores-to-rank", "multi-gpu", "allow-run-as-root",
    "unbuffered", "exclusive", "use-deepspeed", "use-fsdp", "use-megatron-lm", "quiet", "debug", "oversubscribe",
    "label", "no-kill", "cpu", "tpu", "u", "l", "O", "B",
))
# fmt: on
_LONGEST_NUMBER = 40
_NUM_NODES = ("nnodes", "num-nodes", "nodes", "N", "num-machines")
_RANKS_PER_NODE = ("nproc-per-node", "num-gpus", "ntasks-per-node", "npernode")
_RANKS = ("n", "np", "ntasks", "num-processes")
_SLURM_VARIABLES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS",),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}
_BINARY = "\0"


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    """Command that starts a training.

    Attributes:
        program: Script or module that is run; empty text for options without a command.
        arguments: Words after it.
        launchers: Names of the launchers, e.g. ``torchrun`` or ``accelerate``, outermost first.
        options: Options of the last launcher.
        launcher: Settings of the launcher and of ``#SBATCH`` that say how many devices there are.
        num_nodes: Nodes; None if the script does not say.
        ranks_per_node: Ranks per node; None if the script does not say.
        num_devices: Ranks in all; None if the script does not say.
        environment: Variables that are exported, or set for the command.
        line: Line of the script from which it is started, itself or in a script that it calls.
        files: Files that the script has written by then, by their names.
    """

    program: Word
    arguments: tuple[Word, ...]
    launchers: tuple[str, ...]
    options: tuple[Setting, ...]
    launcher: tuple[Setting, ...]
    num_nodes: int | None
    ranks_per_node: int | None
    num_devices: int | None
    environment: Mapping[str, Word]
    line: int
    files: Mapping[str, Value]

    @property
    def node_setting(self) -> Setting | None:
        """Setting with the ranks of each of several nodes; None for one node, and if the script does not say."""
        if self.num_nodes is None or self.num_nodes < 2 or self.ranks_per_node is None:
            return None
        names = {*_RANKS_PER_NODE, "gpus-per-node"}
        return next((option for option in self.launcher if _name_of(option) in names), None)


@dataclass(frozen=True, slots=True)
class Script:
    """A launch script, followed.

    Attributes:
        launches: Commands that start a Python program, those that no undecided condition guards first.
        missing: Scripts that it calls and that are not in its folder.
        unclear: Commands whose program is not known.
    """

    launches: tuple[TrainingCommand, ...]
    missing: tuple[MissingScript, ...]
    unclear: tuple[Called, ...] = ()


def read_launches(
    text: str, file: str, folder: Path | None = None, *, wrappers: frozenset[str] = frozenset()
) -> tuple[TrainingCommand, ...]:
    """Launches of ``read_script``.

    Raises:
        SpecError: See ``read_script``.
    """
    return read_script(text, file, folder, wrappers=wrappers).launches


def read_script(text: str, file: str, folder: Path | None = None, *, wrappers: frozenset[str] = frozenset()) -> Script:
    """Commands of a launch script that start a Python program, and scripts that are not there.

    A file whose first word is an option is taken as arguments without a command.

    Args:
        file: Name of the script in errors.
        folder: Folder of the script, whose scripts it may call; None to follow no other script.
        wrappers: Names of scripts that pass their arguments on to the program, and count as it.

    Raises:
        SpecError: The text is no shell script.
    """
    if _BINARY in text:
        raise file_error(file, "this is no shell script: it is binary", "name a launch script")
    sbatch = {setting.key: setting for setting in sbatch_settings(text)}
    shell = Shell(file, folder, _slurm_variables(sbatch), wrappers)
    first = next((line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")), "")
    shell.run(parse_script(f"python - {text}" if first.startswith("--") else text, file))
    launches = [
        (called, launch) for called in shell.called if (launch := _launch(called, sbatch, wrappers)) is not None
    ]
    launches.sort(key=lambda call_and_launch: call_and_launch[0].condition is not None)
    unclear = (called for called in shell.called if called.words and called.words[0].unknown)
    return Script(tuple(launch for _, launch in launches), tuple(shell.missing), tuple(unclear))


def _slurm_variables(sbatch: Mapping[str, Setting]) -> dict[str, tuple[Value, ...]]:
    """Variables that Slurm sets by the options of the script."""
    values: dict[str, tuple[Value, ...]] = {}
    for option, names in _SLURM_VARIABLES.items():
        setting = sbatch.get(f"#SBATCH --{option}")
        if setting is not None and isinstance(setting.value, int):
            values |= {name: ((Word(str(setting.value), setting.line or 0),),) for name in names}
    return values


def _launch(called: Called, sbatch: Mapping[str, Setting], wrappers: frozenset[str]) -> TrainingCommand | None:
    """The training that a command starts; None if it starts no Python program."""
    words, options, launchers = called.words, list[Setting](), list[str]()
    position, num_before, is_launched = 0, 0, False
    while position < len(words):
        name = words[position].text.rpartition("/")[2]
        is_python = _PYTHON.fullmatch(name) is not None
        is_module = position > 0 and words[position - 1].text in ("-m", "--module")
        if is_python or name in _LAUNCHERS or (name == "launch" and launchers[-1:] == ["accelerate"]):
            if name != "launch" and not is_python:
                launchers.append(name)
                num_before = len(options)
            position = _launcher_options(words, position + 1, options, called.files)
            is_launched = True
        elif name in wrappers or (is_launched and (name.endswith(".py") or is_module or name == "-")):
            program = words[position] if name != "-" else Word("", words[position].line)
            devices = _devices(options, sbatch)
            return TrainingCommand(
                program,
                words[position + 1 :],
                tuple(launchers),
                tuple(options[num_before:]),
                *devices,
                called.environment,
                called.line,
                called.files,
            )
        else:
            position += 1  # a wrapper, or a container with its options
    return None


def _launcher_options(
    words: tuple[Word, ...], position: int, options: list[Setting], files: Mapping[str, Value]
) -> int:
    """Read options of a launcher; position of the first word that is none."""
    while position < len(words):
        word = words[position]
        if not word.text.startswith("-") or word.text == "-":
            return position
        key, joined, value = word.text.partition("=")
        name = key.lstrip("-").replace("_", "-")
        position += 1
        if name in ("m", "module"):
            return position
        known = not word.unknown
        following = words[position] if position < len(words) else None
        if not joined and name not in _WITHOUT_VALUE and following is not None and _is_value(following.text):
            value, known, position = following.text, not following.unknown, position + 1
        is_known = known or written_file(value, files) is not None
        options.append(Setting(key, (whole_number(value) or value) if is_known else None, own_line(word.line)))
    return position


def _is_value(text: str) -> bool:
    return not text.startswith("-") and not text.endswith(".py") and text.rpartition("/")[2] not in _LAUNCHERS


def _devices(
    options: Sequence[Setting], sbatch: Mapping[str, Setting]
) -> tuple[tuple[Setting, ...], int | None, int | None, int | None]:
    """Settings that say how many devices there are; nodes, ranks per node, and ranks in all."""
    by_name = {_name_of(setting): setting for setting in options}
    used: list[Setting] = []

    def number(names: tuple[str, ...], *slurm: str) -> int | None:
        candidates = [by_name.get(name) for name in names] + [sbatch.get(f"#SBATCH --{name}") for name in slurm]
        for setting in candidates:
            if setting is not None and isinstance(setting.value, int):
                used.append(setting)
                return setting.value
        return None

    nodes = number(_NUM_NODES, "nodes")
    per_node = number(_RANKS_PER_NODE, "gpus-per-node", "ntasks-per-node")
    if nodes is None and per_node is not None and not {*_NUM_NODES} & by_name.keys():
        nodes = 1 if {"nproc-per-node", "num-gpus"} & by_name.keys() else None
    in_all = nodes * per_node if nodes is not None and per_node is not None else number(_RANKS, "ntasks", "gpus")
    return tuple(used), nodes, per_node, in_all


def _name_of(setting: Setting) -> str:
    """Name of an option of a launcher or of Slurm."""
    return setting.key.removeprefix("#SBATCH ").lstrip("-").replace("_", "-")


def number_or_text(text: str) -> int | float | str:
    """Value of an argument: a number if it is one, else the text."""
    if _NUMBER.fullmatch(text):
        return int(text)
    return float(text) if _REAL.fullmatch(text) and len(text) < _LONGEST_NUMBER else text
