"""Launch scripts of which no training can be read, and what to give instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from simplan.errors import Problem, SpecError
from simplan.interop.frameworks.shell.launch import TrainingCommand, read_script
from simplan.interop.frameworks.shell.lexer import OTHER_FILE
from simplan.interop.frameworks.shell.shell import MissingScript

_DEEPSPEED = "--deepspeed_config"
_RECIPES = ("run_recipe.py", "setup_experiment.py")
"""Programs of NVIDIA-NeMo/Megatron-Bridge, scripts/ (read 2026-08-22), whose recipes are functions."""
_VARIABLES = ("CONFIG_FILE", "MODULE", "CONFIG", "NGPU", "NNODES", "NPROC_PER_NODE")
"""Variables by which torchtitan's and LLaMA-Factory's programs are told what to train, and where."""
_OVERRIDE = re.compile(r"\+{0,2}(model|trainer)\.\w[\w.]*=")
"""An argument of Hydra's, as NeMo 1.x has them."""
WITHOUT_FILE = "write a scenario, or name model and plan: simplan predict llama3-8b --cluster dgx-h100 --tp 8"
"""Fix of errors about files that are not read."""
_ARGUMENT = re.compile(r"\$\d")


def missing_script(file: str, script: MissingScript) -> SpecError:
    """Error about a script that another one calls and that is not in its folder."""
    rule = f"calls {script.name}, which is not there"
    problem = Problem(
        field="", rule=rule, fix="put it there, or name the script that starts the training", line=script.line
    )
    return SpecError(problem, file=file)


def only_launch(launches: Sequence[TrainingCommand], file: str) -> TrainingCommand:
    """The training that a script starts.

    Raises:
        SpecError: It starts several with different arguments.
    """
    first = launches[0]
    if any(_texts(launch) != _texts(first) for launch in launches[1:]):
        lines = ", ".join(str(launch.line % OTHER_FILE) for launch in launches)
        rule = f"starts {len(launches)} trainings with different arguments (lines {lines})"
        raise SpecError(Problem(field="", rule=rule, fix="keep one of them"), file=file)
    return first


def _texts(launch: TrainingCommand) -> tuple[str, ...]:
    variables = (launch.environment[name].text for name in _VARIABLES if name in launch.environment)
    return (launch.program.text, str(launch.num_devices), *(word.text for word in launch.arguments), *variables)


def recipe_script(launches: Sequence[TrainingCommand], file: str) -> SpecError | None:
    """Error about a script that starts a recipe of Megatron Bridge, or overrides a YAML file; None for others."""
    for launch in launches:
        if launch.program.text.rpartition("/")[2] in _RECIPES:
            rule = f"starts {launch.program.text} of Megatron Bridge, whose recipes are Python functions"
            fix = "give the run_config.yaml of one of its checkpoints, or write a scenario"
            return SpecError(Problem(field="", rule=rule, fix=fix, line=launch.line), file=file)
        if any(_OVERRIDE.match(word.text) for word in launch.arguments):
            rule = f"starts {launch.program.text}, whose arguments replace settings of a YAML file and are not read"
            fix = "write them into that file and give it, or write a scenario"
            return SpecError(Problem(field="", rule=rule, fix=fix, line=launch.line), file=file)
    return None


def unknown_script(text: str, file: str, folder: Path | None) -> SpecError:
    """Error about a script of no framework that simplan knows: what it starts, and what could be given.

    Raises:
        SpecError: The text is no shell script.
    """
    script = read_script(text, file, folder)
    if not script.launches and script.missing:
        return missing_script(file, script.missing[0])
    if (recipe := recipe_script(script.launches, file)) is not None:
        return recipe
    rule, fix, line = "is no launch script of a framework that simplan knows", "--from NAME names its format", None
    if script.launches:
        launch = script.launches[0]
        line, words = launch.line, [word.text for word in launch.arguments]
        rule = f"starts {launch.program.text or 'Python'}, whose arguments are of no framework that simplan knows"
        fix = WITHOUT_FILE
        named = [second for first, second in pairwise(words) if first == _DEEPSPEED]
        named += [word.partition("=")[2] for word in words if word.startswith(f"{_DEEPSPEED}=")]
        if named:
            rule = f"starts {launch.program.text}, which has its model in Python and its plan in {named[0]}"
            fix = f"give that JSON and the model: simplan predict {named[0]} --model llama3-8b"
            if _ARGUMENT.search(named[0]):
                fix = f"name a file with the line: bash {file.rpartition('/')[2]} ARGUMENTS"
    return SpecError(Problem(field="", rule=rule, fix=fix, line=line), file=file)
