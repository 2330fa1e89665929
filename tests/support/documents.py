"""Documents of tests, with some of their keys changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def changed(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a document with other values; ``plan__tp`` is the key ``tp`` of the section ``plan``."""
    data = copy.deepcopy(dict(document))
    for key, value in changes.items():
        section, _, inside = key.partition("__")
        if inside:
            data[section][inside] = value
        else:
            data[section] = value
    return data
