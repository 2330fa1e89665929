"""Names for shell completion; imported by every start, so that it imports the catalog only when a shell asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

if TYPE_CHECKING:
    from simplan.catalog import Kind

_SUFFIXES = (".yaml", ".yml")


def _begun(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _of_catalog(kind: Kind) -> Callable[[str], list[str]]:
    """Completion of the entries of a kind."""

    def names(incomplete: str) -> list[str]:
        from simplan import catalog

        return _begun(catalog.names(kind), incomplete)

    return names


models, clusters, devices = _of_catalog("models"), _of_catalog("clusters"), _of_catalog("devices")
software, reliability = _of_catalog("software"), _of_catalog("reliability")


def _choices(module: str, name: str) -> Callable[[str], list[str]]:
    """Completion of the values of a ``Literal``."""
    return lambda incomplete: _begun(get_args(getattr(import_module(module), name)), incomplete)


precisions, recomputations = _choices("simplan.training", "Precision"), _choices("simplan.plan.plan", "Recompute")


def scenarios(incomplete: str) -> list[str]:
    """Scenario files, configurations, folders on the way to them, and models."""
    from simplan import catalog

    return _begun([*_files(incomplete), *catalog.names("models")], incomplete)


def _files(incomplete: str) -> Iterator[str]:
    folder, _, _ = incomplete.rpartition("/")
    base = f"{folder}/" if folder or incomplete.startswith("/") else ""
    try:
        entries = sorted(Path(base or ".").iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield f"{base}{entry.name}/"
        elif entry.suffix in _SUFFIXES or entry.name == "config.json":
            yield f"{base}{entry.name}"


def formats(incomplete: str) -> list[str]:
    """Formats of frameworks' files that are read."""
    from simplan.interop.formats import formats as known

    return _begun((name for name, file_format in known().items() if file_format.read is not None), incomplete)


def targets(incomplete: str) -> list[str]:
    """Targets of an export."""
    from simplan.interop.formats import export_targets

    return _begun(export_targets(), incomplete)


def schedules(incomplete: str) -> list[str]:
    """Pipeline schedules."""
    from simplan.plan.schedules import SCHEDULE_FACTS, installed_schedules

    return _begun([*SCHEDULE_FACTS, *installed_schedules()], incomplete)


def keys(incomplete: str) -> list[str]:
    """Keys of a scenario for ``--set``, each with its equals sign."""
    from simplan.cli.listing import listing

    kinds = ("model", "cluster", "training", "plan", "search-space")
    known = (f"{kind.removesuffix('-space')}.{row['name']}=" for kind in kinds for row in listing(kind))
    of_run = (f"{row['section']}.{row['name']}=" for row in listing("run"))
    return _begun([*known, *of_run, "software="], incomplete)


def kinds(incomplete: str) -> list[str]:
    """Kinds of ``simplan show``."""
    from simplan.cli.listing import KINDS

    return _begun(KINDS, incomplete)


def entries(context: typer.Context, incomplete: str) -> list[str]:
    """Names of the kind that ``simplan show`` was given."""
    from simplan.cli.listing import KINDS, listing

    parameters: dict[str, Any] = context.params
    kind = parameters.get("kind")
    return _begun((row["name"] for row in listing(kind)), incomplete) if kind in KINDS else []
