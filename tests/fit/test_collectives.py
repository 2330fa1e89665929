"""The committed constants are what the fit finds, and leave the errors that the fit reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fit.collectives import fit, log_errors
from fit.records import Record, kind_of, load_records
from simplan import catalog
from simplan.cluster.hardware import LinkSpec
from simplan.cost.communication.collectives import communication_cost

FOLDER = Path(__file__).parent.parent.parent / "scenarios" / "published"
RECORDS = [record for path in sorted(FOLDER.glob("collectives*.yaml")) for record in load_records(path)]


def catalogued(record: Record) -> float:
    """Seconds, by the catalog as users have it."""

    def now(link: LinkSpec | None) -> LinkSpec | None:
        return link and catalog.link(link.id)

    cluster = record.cluster.model_copy(
        update={"intra_link": now(record.cluster.intra_link), "inter_link": now(record.cluster.inter_link)}
    )
    return communication_cost(record.communication, cluster).seconds


def test_the_catalogue_holds_what_the_fit_finds() -> None:
    values = fit(RECORDS)
    assert len(values) == 19
    for name, value in values.items():
        kind, _, field = name.rpartition(".")
        link = catalog.link(f"{kind}-400gbit" if kind in ("network", "efa") else kind or "nvlink3")
        assert getattr(link, field) == pytest.approx(value, rel=2e-3), name


def test_errors_on_the_records() -> None:
    """Half of them are predicted within 6.4 %, of those of 64 MiB and more within 4.9 %; 9.8 % is the mean."""
    chosen = [record for record in RECORDS if not record.algorithm]
    errors = np.array([abs(catalogued(record) / record.seconds - 1) for record in chosen])
    large = np.array([record.size_class == "large" for record in chosen])
    assert len(chosen) > 250
    assert np.median(errors) < 0.07
    assert np.median(errors[large]) < 0.055
    assert errors.mean() < 0.105


def test_the_same_records_by_textbook_are_off_more() -> None:
    textbook = {**dict.fromkeys(fit([]), 0.0), "launch_s": 10e-6}
    assert np.median(np.abs(np.expm1(log_errors(RECORDS, textbook)))) > 0.1


def test_a_record_is_a_communication_on_a_cluster() -> None:
    by_id = {record.id: record for record in RECORDS}
    aws = by_id["coll-270"]
    assert (aws.cluster.num_nodes, aws.communication.num_bytes) == (2, 4 * 2**20)
    assert aws.seconds == pytest.approx(168.6e-6)
    assert [kind_of(link) for link in (aws.cluster.intra_link, aws.cluster.inter_link) if link] == ["nvlink4", "efa"]
    by_bandwidth = by_id["coll-258"]  # 362.9 GB/s of a reduce-scatter of 16 GiB over 8
    assert by_bandwidth.seconds == pytest.approx(16 * 2**30 * 7 / 8 / 362.9e9)
    assert by_bandwidth.algorithm == "ring"
    assert "coll-306" not in by_id  # left out, as the file says
