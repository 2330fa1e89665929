"""Launch scripts of which no training can be read, and what to give instead."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from simplan.errors import Problem, SpecError
from simplan.interop.frameworks.shell.evaluate import MissingScript
from simplan.interop.frameworks.shell.launch import read_script

_DEEPSPEED = "--deepspeed_config"


def missing_script(file: str, script: MissingScript) -> SpecError:
    """Error about a script that another one calls and that is not in its folder."""
    rule = f"calls {script.name}, which is not there"
    problem = Problem(
        field="", rule=rule, fix="put it there, or name the script that starts the training", line=script.line
    )
    return SpecError(problem, file=file)


def unknown_script(text: str, file: str, folder: Path | None) -> SpecError:
    """Error about a script of no framework that simplan knows: what it starts, and what could be given.

    Raises:
        SpecError: The text is no shell script.
    """
    script = read_script(text, file, folder)
    if not script.launches and script.missing:
        return missing_script(file, script.missing[0])
    rule, fix, line = "is no launch script of a framework that simplan knows", "--from NAME names its format", None
    if script.launches:
        launch = script.launches[0]
        line, words = launch.line, [word.text for word in launch.arguments]
        rule = f"starts {launch.program.text or 'Python'}, whose arguments are of no framework that simplan knows"
        named = [second for first, second in pairwise(words) if first == _DEEPSPEED]
        named += [word.partition("=")[2] for word in words if word.startswith(f"{_DEEPSPEED}=")]
        if named:
            rule = f"starts {launch.program.text}, which has its model in Python and its plan in {named[0]}"
            fix = f"give that JSON and the model: simplan predict {named[0]} --model llama3-8b"
    return SpecError(Problem(field="", rule=rule, fix=fix, line=line), file=file)
