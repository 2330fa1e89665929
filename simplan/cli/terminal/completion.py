"""Names for shell completion; imported by every start, so that it imports the catalog only when a shell asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

_SUFFIXES = (".yaml", ".yml")


def _begun(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


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


def clusters(incomplete: str) -> list[str]:
    """Cluster presets."""
    from simplan import catalog

    return _begun(catalog.names("clusters"), incomplete)


def devices(incomplete: str) -> list[str]:
    """Devices of the catalog."""
    from simplan import catalog

    return _begun(catalog.names("devices"), incomplete)


def software(incomplete: str) -> list[str]:
    """Framework profiles."""
    from simplan import catalog

    return _begun(catalog.names("software"), incomplete)


def models(incomplete: str) -> list[str]:
    """Models of the catalog."""
    from simplan import catalog

    return _begun(catalog.names("models"), incomplete)


def reliability(incomplete: str) -> list[str]:
    """Presets of published failure rates."""
    from simplan import catalog

    return _begun(catalog.names("reliability"), incomplete)


def formats(incomplete: str) -> list[str]:
    """Formats of frameworks' files that are read."""
    from simplan.interop.formats import formats as known

    return _begun((name for name, each in known().items() if each.read is not None), incomplete)


def targets(incomplete: str) -> list[str]:
    """Targets of an export."""
    from simplan.interop.formats import export_targets

    return _begun(export_targets(), incomplete)


def schedules(incomplete: str) -> list[str]:
    """Pipeline schedules."""
    from simplan.plan.schedules import SCHEDULE_FACTS, installed_schedules

    return _begun([*SCHEDULE_FACTS, *installed_schedules()], incomplete)


def precisions(incomplete: str) -> list[str]:
    """Precisions of training."""
    from typing import get_args

    from simplan.training import Precision

    return _begun(get_args(Precision), incomplete)


def recomputations(incomplete: str) -> list[str]:
    """Modes of activation recomputation."""
    from typing import get_args

    from simplan.plan.plan import Recompute

    return _begun(get_args(Recompute), incomplete)


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
