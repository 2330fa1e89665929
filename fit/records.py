"""Published measurements of collectives, as collectives on clusters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec, LinkSpec
from simplan.cost.communication.collectives import bus_factor
from simplan.io import read_yaml
from simplan.model.layer import CollectiveKind
from simplan.program.program import Communication


@dataclass(frozen=True, slots=True)
class Record:
    """One measured collective.

    Attributes:
        id: Identifier in the file.
        source: Repository or document.
        curve: Name shared by measurements of one run over sizes.
        communication: Timed collective.
        cluster: Cluster of the measurement.
        seconds: Measured seconds.
        algorithm: Requested or reported algorithm: ``ring``, ``tree``, ``NVLS``; empty for NCCL's choice.
    """

    id: str
    source: str
    curve: str
    communication: Communication
    cluster: ClusterSpec
    seconds: float
    algorithm: str

    @property
    def crosses(self) -> bool:
        """True if the collective is between nodes."""
        return self.cluster.num_nodes > 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of links in the cluster."""
        return tuple(kind_of(link) for link in (self.cluster.intra_link, self.cluster.inter_link) if link is not None)

    @property
    def size_class(self) -> str:
        """Size class, as in ``simplan.cluster.hardware.Spread``."""
        num_bytes = self.communication.num_bytes
        return "small" if num_bytes < 2**20 else "medium" if num_bytes < 2**26 else "large"


def load_records(path: Path) -> list[Record]:
    """Records of a file, except those marked ``left_out``."""
    return [_record(row) for row in read_yaml(path).data["records"] if not row.get("left_out")]


def _record(row: dict[str, Any]) -> Record:
    kind = CollectiveKind(row["collective"])
    num_ranks = row["num_devices"]
    node = catalog.NodeEntry(
        id="published",
        device=catalog.device(row["device"]),
        devices_per_node=row["devices_per_node"],
        intra_link=catalog.link(row["intra_link"], textbook=True),
        inter_link=_network(row),
    )
    algorithm = row["algo"] or ""
    return Record(
        id=row["id"],
        source=row["source"].split(":")[0].split("@")[0],
        curve=f"{row['source']} {kind} {num_ranks} {algorithm}",
        communication=Communication(kind, row["bytes"], tuple(range(num_ranks))),
        cluster=catalog.make_cluster(node, num_ranks),
        seconds=_seconds(row, kind, num_ranks),
        algorithm="NVLS" if algorithm == "NVLS" else algorithm[:4].lower(),
    )


def kind_of(link: LinkSpec) -> str:
    """Link name without the rate of a network, e.g. ``network``, ``nvlink4``."""
    return link.id.partition("-")[0] if link.id.endswith("gbit") else link.id


def _network(row: dict[str, Any]) -> LinkSpec | None:
    if row["num_nodes"] == 1:
        return None
    return catalog.network_link(row["inter_link_gbit_per_device"], row.get("network", "network"), textbook=True)


def _seconds(row: dict[str, Any], kind: CollectiveKind, num_ranks: int) -> float:
    """Measured seconds, computed from a bandwidth if no time is given."""
    if row["time_us"] is not None:
        return float(row["time_us"]) * 1e-6
    if row["busbw_gb_s"] is not None:
        return float(row["bytes"] * bus_factor(kind, num_ranks) / (row["busbw_gb_s"] * 1e9))
    return float(row["bytes"] / (row["algbw_gb_s"] * 1e9))
