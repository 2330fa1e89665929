"""The key ``topology`` of the section ``cluster``: a name, or a kind and its values.

::

    cluster: {preset: dgx-h100, num_nodes: 64, topology: superpod-h100}
    cluster: {preset: dgx-h100, num_nodes: 64, topology: {preset: superpod-h100, oversubscription: 2}}
    cluster: {preset: dgx-h100, num_nodes: 64, topology: {kind: leaf_spine, nodes_per_leaf: 4, oversubscription: 4}}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.cluster.topology import INNER_KINDS, TOPOLOGIES, AnyTopology, topology_problems
from simplan.errors import SpecError, did_you_mean
from simplan.problems import MISSING, Path
from simplan.scenario.collecting import Sections

_PATH: Path = ("cluster", "topology")


def with_topology(sections: Sections, cluster: ClusterSpec, data: Any) -> ClusterSpec | None:
    """The cluster with the topology of the file; None, after recording the problems, when that is invalid.

    Args:
        data: Value of ``cluster.topology``; None for no topology.
    """
    if data is None:
        return cluster
    topology = _read(sections, data, _PATH, tuple(TOPOLOGIES))
    if topology is None:
        return None
    cluster = cluster.model_copy(update={"topology": topology})
    for problem in topology_problems(cluster):
        path = tuple(int(key) if key.isdecimal() else key for key in problem.field.split("."))
        sections.keep(SpecError(replace(problem, field="")), path)
    return cluster


def _read(sections: Sections, data: Any, path: Path, kinds: Sequence[str]) -> AnyTopology | None:
    """Topology from a name or a mapping; None after recording problems.

    Args:
        kinds: Kinds that are possible here.
    """
    if not isinstance(data, dict):
        fields = sections.look_up(path, catalog.topology_fields, data)
    elif "preset" in data:
        own_keys = {key: value for key, value in data.items() if key != "preset"}
        if "kind" in own_keys:
            sections.refuse((*path, "kind"), "cannot go with preset, which has its own", fix="keep one of the two")
            return None
        fields = sections.look_up((*path, "preset"), catalog.topology_fields, data["preset"])
        fields = None if fields is None else fields | own_keys
    else:
        fields = data
    if fields is None:
        return None
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        rule = MISSING if kind is None else "is not a known choice"
        fix = did_you_mean(kind, kinds) if isinstance(kind, str) else f"one of {', '.join(kinds)}"
        if isinstance(kind, str) and kind in TOPOLOGIES:
            rule, fix = "is not possible here", f"one of {', '.join(kinds)}"
        sections.refuse((*path, "kind"), rule, value=kind, fix=fix)
        return None
    if kind == "sites" and fields.get("inside") is not None:
        inside = _read(sections, fields["inside"], (*path, "inside"), INNER_KINDS)
        if inside is None:
            return None
        fields = fields | {"inside": inside.model_dump(mode="json")}
    return sections.read(TOPOLOGIES[kind], fields, path)
