"""Scenarios as text, e.g. from the dashboard: data alone, which may not name files of this machine."""

from __future__ import annotations

from simplan.document import Document, parse_yaml
from simplan.errors import Problem, SpecError
from simplan.io import MAX_YAML_BYTES
from simplan.problems import find_place, render_value
from simplan.scenario.file import Scenario, ScenarioParts, named_files, parts_of, scenario_of
from simplan.scenario.search import SearchScenario, search_of


def parse_scenario(text: str, name: str = "scenario") -> Scenario:
    """Reads a scenario from its text.

    Args:
        text: YAML, as a scenario file has it.
        name: Name of the scenario in errors.

    Raises:
        SpecError: See ``load_scenario``; also when the text names a file, which is not opened.
    """
    return scenario_of(_parts(text, name), None)


def parse_search(text: str, name: str = "scenario") -> SearchScenario:
    """Reads a scenario with ``search:`` from its text.

    Raises:
        SpecError: See ``load_search``; also when the text names a file.
    """
    return search_of(_parts(text, name))


def _parts(text: str, name: str) -> ScenarioParts:
    if len(text.encode("utf-8", errors="replace")) > MAX_YAML_BYTES:
        raise SpecError(Problem(field="", rule=f"is larger than {MAX_YAML_BYTES // 2**20} MiB"), file=name)
    document = parse_yaml(text, name)
    refuse_named_files(document, name)
    return parts_of(document, name)


def refuse_named_files(document: Document, name: str) -> None:
    """Refuse keys that name files.

    Raises:
        SpecError: Lists them all.
    """
    problems = []  # keys that name files, which would be read on the server, not on the author's machine
    for path, value in named_files(document.data):
        rule = "names a file, which a scenario given as text cannot bring along"
        fix = "give what the file says in its place, or use the command line"
        problem = Problem(field=".".join(map(str, path)), value=render_value(value), rule=rule, fix=fix)
        problems.append(problem.at(*find_place(document.lines, path)))
    if problems:
        raise SpecError(problems, file=name)
