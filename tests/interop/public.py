"""Configurations that others published: files made of their settings, and jobs compared with what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from simplan.job import Job
from simplan.scenario.source import Source, read_source
from tests.support.yaml_files import read_yaml

CLUSTER = {"cluster.preset": "dgx-h100"}


def cases(framework: str) -> list[dict[str, Any]]:
    """Cases of ``configurations/FRAMEWORK.yaml``: name, source, settings, and what they mean."""
    case_list: list[dict[str, Any]] = read_yaml(Path(__file__).parent / "configurations" / f"{framework}.yaml")
    return case_list


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Mappings of dotted keys."""
    nest: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        here = nest
        for part in path:
            here = here.setdefault(part, {})
        here[last] = value
    return nest


def written(case: dict[str, Any], folder: Path) -> Path:
    """YAML file with the settings of a case, in a layout of its own."""
    file = folder / f"{case['name']}.yaml"
    text = yaml.safe_dump(nested(case["settings"]), indent=4, sort_keys=True, width=60)
    file.write_text("# a comment = 1\n" + text, encoding="utf-8")
    return file


def read(case: dict[str, Any], folder: Path) -> Source:
    """A case with what its file does not say."""
    return read_source(written(case, folder), CLUSTER | case.get("add", {}))


def chosen(job: Job, expected: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Values of a job for the keys of an expectation."""

    def value(section: str, key: str) -> Any:
        value = getattr(getattr(job, section), key)
        return list(value) if isinstance(value, tuple) else value

    return {section: {key: value(section, key) for key in keys} for section, keys in expected.items()}


def without_clipping(job: Job) -> Job:
    """The job of a published run, whose rows do not say that gradients are clipped."""
    return job.with_changes({"training.clip_grad_norm": None})
