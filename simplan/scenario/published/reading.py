"""Reader of files of published runs: scenarios with ``measured``, whose common parts are written once.

A file is a group of runs. Its sections are those of every run in ``runs``, which adds keys or gives other values; a run
with ``runs`` is a group itself::

    meta: {notes: [free text]}
    software: torchtitan
    training: {precision: bf16}
    measured: {source: pytorch/torchtitan:docs/performance.md, version: 2024-12}
    runs:
    - model: {preset: llama3-8b}
      runs:
      - {name: a, cluster: {preset: dgx-h100}, plan: {dp_shard: 8}, measured: {step_time_s: 2.8}}
      - ...

A scenario with ``measured`` and without ``runs`` is a single run. Files of the schema before have no ``name`` of runs
but an ``id`` (``simplan.scenario.published.former``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simplan.accuracy.measured import Measured
from simplan.accuracy.run import PublishedRun, ReadFile, sentences, software_section
from simplan.document import Document, Place, merged, parse_yaml
from simplan.document import Path as KeyPath
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.io import folder_of, read_yaml
from simplan.job import Job
from simplan.predict.assumptions import padding_assumption
from simplan.problems import MISSING, find_place, parse_model
from simplan.rules import check_job
from simplan.scenario.file import ScenarioParts, job_of, parts_of
from simplan.scenario.published.former.conversion import converted, has_former_schema, with_former_keys
from simplan.scenario.text import refuse_named_files

_SUFFIXES = (".yaml", ".yml")
_MAX_RUNS = 2_000
_ROUNDING = 0.02  # of printed throughputs and step times


def read_published(paths: Iterable[Path]) -> list[ReadFile]:
    """Read files, and all ``*.yaml`` and ``*.yml`` files below folders.

    Raises:
        SpecError: A file cannot be read, a run is wrong or inconsistent, or two runs have one name.
    """
    read = []
    for path in _files(paths):
        folder = (folder_of(path) / path.name).resolve().parent
        read.append(_read(read_yaml(path), str(path), folder))
    seen: dict[str, str] = {}
    for read_file in read:
        for run in read_file.runs or ():
            if run.id in seen:
                rule = f"is the name of a run of {seen[run.id]} as well"
                problem = Problem(field="name", value=run.id, rule=rule, fix="leave one of the two out")
                raise SpecError(problem, file=read_file.file)
            seen[run.id] = read_file.file
    return read


def _files(paths: Iterable[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)  # a missing file is reported when it is read
            continue
        matching = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not matching:
            problem = Problem(field="", rule="holds no file of runs (*.yaml)", fix="name another folder")
            raise SpecError(problem, file=str(path))
        files += matching
    return list(dict.fromkeys(files))


def parse_published(text: str, name: str) -> ReadFile:
    """Parse a file of runs from YAML text, which may name no files; ``name`` is for errors and tables.

    Raises:
        SpecError: See ``read_published``.
    """
    return _read(parse_yaml(text, name), name, None)


def _read(document: Document, file: str, folder: Path | None) -> ReadFile:
    data = document.data
    if not isinstance(data, dict) or not {"runs", "measured"} & data.keys():
        return ReadFile(file, None)
    if has_former_schema(data):
        conversions = enumerate(converted(document, file))
        return ReadFile(
            file, tuple(_converted(number, *run_and_notes, document, file) for number, run_and_notes in conversions)
        )
    return ReadFile(file, tuple(_run(run, file, folder) for run in run_documents(document, file)))


def run_documents(document: Document, file: str) -> Iterator[Document]:
    """Scenario of each run of a file, with the sections of its groups and the locations of all keys.

    Raises:
        SpecError: ``runs`` is not a list of mappings, or holds too many.
    """
    own_lines: dict[KeyPath, dict[KeyPath, Place]] = {}
    for path, place in document.lines.items():
        length = 0
        while path[length : length + 1] == ("runs",) and len(path) > length + 1:
            length += 2
        own_lines.setdefault(path[:length], {})[path[length:]] = place
    data = {key: value for key, value in document.data.items() if key != "meta"}
    for number, run in enumerate(_runs_of(data, (), {}, {}, own_lines, document, file)):
        if number == _MAX_RUNS:
            raise SpecError(Problem(field="runs", rule=f"holds more than {_MAX_RUNS:,} runs"), file=file)
        yield run


def _runs_of(
    data: Any,
    path: KeyPath,
    common: Mapping[str, Any],
    lines: Mapping[KeyPath, Place],
    own_lines: Mapping[KeyPath, Mapping[KeyPath, Place]],
    document: Document,
    file: str,
) -> Iterator[Document]:
    """Runs of a group, or the run itself if the data has no ``runs``.

    Args:
        path: Keys of the group or run in the file.
        common, lines: Sections of the groups around it, and locations of their keys.
        own_lines: Locations of keys inside of each group and run, by its path.
    """
    field = ".".join(map(str, path))
    if not isinstance(data, dict):
        problem = Problem(field=field, rule="must be a mapping (key: value)").at(*find_place(document.lines, path))
        raise SpecError(problem, file=file)
    runs, shared = data.get("runs", ()), {key: value for key, value in data.items() if key != "runs"}
    if "software" in shared:
        shared["software"] = software_section(shared)
    whole = merged(common, shared)
    lines = {**lines, **own_lines.get(path, {})}
    if "runs" not in data:
        yield Document(whole, lines)
    elif not isinstance(runs, list):
        rule, fix = "must be a list of runs", "write - {name: ..., plan: {...}, measured: {...}}"
        problem = Problem(field=f"{field}.runs".lstrip("."), rule=rule, fix=fix)
        raise SpecError(problem.at(*find_place(document.lines, (*path, "runs"))), file=file)
    else:
        for index, run in enumerate(runs):
            yield from _runs_of(run, (*path, "runs", index), whole, lines, own_lines, document, file)


def _run(document: Document, file: str, folder: Path | None) -> PublishedRun:
    """Run of its scenario.

    Raises:
        SpecError: A section is wrong or missing, or figures contradict each other.
    """
    name = document.data.get("name")
    for key, fix in (("name", "add a name, unique over all files"), ("measured", "add measured: {source: ...}")):
        if not document.data.get(key):
            line = min(document.lines.values(), default=(None, None))
            raise SpecError(Problem(field=key, rule=MISSING, fix=fix).at(*line), file=file)
    try:
        if folder is None:
            refuse_named_files(document, file)
        parts = parts_of(document, file)
        try:
            return _resolved(parts, folder)
        except NotModelledError as error:
            if parts.measured is None:
                raise
            return _without_job(document.data, parts.measured, error)
    except SpecError as error:
        problems = [replace(problem, field=f"{name}: {problem.field}".rstrip(": ")) for problem in error.problems]
        raise type(error)(problems, file=file) from None


def _converted(
    number: int, scenario: dict[str, Any], problem: SpecError | None, document: Document, file: str
) -> PublishedRun:
    """Run of the former schema; one that no scenario can describe has no job."""
    measured = parse_model(Measured, scenario["measured"], document.lines, file, prefix=("runs", number, "measured"))
    try:
        if problem is not None:
            raise problem
        return _resolved(parts_of(Document(scenario, {}), file), None)
    except Exception as error:
        return _without_job(scenario, measured, with_former_keys(error) if isinstance(error, SpecError) else error)


def _without_job(data: Mapping[str, Any], measured: Measured, error: Exception) -> PublishedRun:
    return PublishedRun(data["name"], measured, None, software_section(data), reason=sentences(error))


def _resolved(parts: ScenarioParts, folder: Path | None) -> PublishedRun:
    """Run with its job.

    Raises:
        SpecError: A section is wrong or missing, rules between sections are violated, or figures contradict each other;
            a NotModelledError if nothing is wrong, but not modeled yet.
    """
    job, measured = job_of(parts, folder), parts.measured
    assert measured is not None, "files without it hold no runs"
    try:
        _check_throughput(measured, job)
        check_job(job)
    except SpecError as error:
        raise parts.sections.in_file(error) from None
    notes = (*_notes(measured), *padding_assumption(job))
    return PublishedRun(parts.name, measured, job, software_section(parts.data), notes)


def _notes(measured: Measured) -> Iterator[str]:
    """Sentences on assumed values, on what the prediction lacks, and on settings from elsewhere."""
    if measured.assumed:
        yield f"assumed: {', '.join(measured.assumed)}"
    yield from measured.notes
    keys: dict[str, list[str]] = {}
    for key, source in measured.sources.items():
        keys.setdefault(source, []).append(key)
    yield from (f"{', '.join(named)}: {source}" for source, named in keys.items())


def _check_throughput(measured: Measured, job: Job) -> None:
    """Check that the throughput of a run times its step time is its batch.

    Raises:
        SpecError: They differ by more than rounding.
    """
    rate, seconds = measured.samples_per_s_per_device, measured.step_time_s
    if rate is None or seconds is None or measured.quality == "inconsistent":
        return
    samples, batch = rate * seconds * job.cluster.num_devices, job.training.global_batch_size
    if abs(samples / batch - 1) > _ROUNDING:
        rule = f"times step_time_s and num_devices it is {samples:.4g}, and training.global_batch_size = {batch}"
        field, fix = "measured.samples_per_s_per_device", "correct one of the four"
        raise SpecError(Problem(field=field, value=f"{rate:g}", rule=rule, fix=fix))
