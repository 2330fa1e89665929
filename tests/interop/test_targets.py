"""Targets of an export by the names of frameworks' profiles."""

from __future__ import annotations

from simplan import catalog
from simplan.errors import NotModelledError
from simplan.interop.formats import export_target, export_targets, formats
from simplan.scenario import scenario_from


def writers_of(profile: str) -> set[str]:
    """Targets that write jobs under a profile."""
    job = scenario_from("llama3-8b", {"cluster.num_devices": 8, "software": profile}).job
    found = set()
    for name, each in formats().items():
        if each.export is not None and each.settings is not None:
            try:
                each.settings(job)
            except NotModelledError as error:
                if any(problem.field.startswith("software") for problem in error.problems):
                    continue
            found.add(name)
    return found


def test_profile_is_exported_by_a_target_that_writes_it() -> None:
    assert all(export_target(target) == target for target in export_targets())
    writers = {profile: writers_of(profile) for profile in catalog.names("software")}
    targets = {profile: export_target(profile) for profile in catalog.names("software")}
    assert sum(map(bool, writers.values())) > 6
    for profile, found in writers.items():
        assert targets[profile] in (found or {""}) or (profile, targets[profile]) == ("nemo", "bridge"), profile
