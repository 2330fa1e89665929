"""Published failures and spot zones: valid, with sources, and as their publications have them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from simplan import catalog
from simplan.cli.listing import entry, entry_text, listing
from simplan.goodput.sections import Reliability, Spot
from tests.support.problems import refuses

LLAMA3 = {
    "faulty GPU": 148, "HBM3 memory": 72, "software bug": 54, "network switch or cable": 35, "host maintenance": 32,
    "GPU SRAM": 19, "GPU system processor": 17, "network card": 7, "NCCL watchdog timeout": 7,
    "silent data corruption": 6, "GPU thermal": 6, "SSD": 3, "power supply": 3, "server chassis": 2,
    "IO expansion board": 2, "dependency": 2, "CPU": 2, "system memory": 2,
}  # fmt: skip
"""Unexpected interruptions in 54 days: arXiv 2407.21783, table 5."""


def preset(name: str) -> Reliability:
    return Reliability.model_validate_json(json.dumps(catalog.reliability(name)))


def hours_between_failures(name: str, num_devices: int) -> float:
    """Failures of a job with nodes of 8 devices, each with a link, without planned stops."""
    units = {"device": num_devices, "link": num_devices, "node": num_devices / 8}
    return 1 / sum(units[cause.per] / cause.mtbf_h for cause in preset(name).all_causes if not cause.planned)


@pytest.mark.parametrize("name", catalog.names("reliability"))
def test_preset_is_a_section_and_says_where_each_rate_is_from(name: str) -> None:
    section, about = preset(name), catalog.about("reliability", name)
    assert section.all_causes
    assert about["description"]
    assert about["fitted_on"]
    assert {*about["sources"]} == {"scope", *(f"causes.{cause.name}" for cause in section.causes)}


def test_llama_3_is_a_random_half_of_its_interruptions() -> None:
    assert sum(LLAMA3.values()) == 419
    drawn = np.random.default_rng(0).binomial([*LLAMA3.values()], 0.5)
    half = {name: int(number) for name, number in zip(LLAMA3, drawn, strict=True) if number}
    causes = [cause for cause in preset("llama3-2024").causes if not cause.planned]
    units = {"device": 16384, "link": 16384, "node": 2048}
    assert {c.name: round(54 * 24 * units[c.per] / c.mtbf_h / 2, 4) for c in causes} == pytest.approx(half, rel=1e-4)
    sources = catalog.about("reliability", "llama3-2024")["sources"]
    for name, number in half.items():
        assert re.search(rf"table 5: {LLAMA3[name]}\b.* {number} (were )?drawn", sources[f"causes.{name}"])


def test_rates_give_the_published_times_between_failures() -> None:
    """Published times between failures.

    RSC-1: 1.8 h at 16,384 GPUs and 0.23 h at 131,072. OPT-175B: two machines a day. BLOOM: one GPU a week.
    """
    assert hours_between_failures("meta-rsc-1", 16_384) == pytest.approx(1.8, rel=0.01)
    assert hours_between_failures("meta-rsc-1", 131_072) == pytest.approx(0.23, rel=0.03)
    assert hours_between_failures("opt-175b", 1024) == pytest.approx(12)
    assert hours_between_failures("bloom", 384) == pytest.approx(7 * 24)


@pytest.mark.parametrize("name", catalog.names("spot_zones"))
def test_zone_is_a_section_whose_rates_give_its_availability(name: str) -> None:
    zone, about = Spot.model_validate(catalog.spot_zone(name)), catalog.about("spot_zones", name)
    assert zone.preemptions_per_h is not None
    assert zone.wait_h is not None
    available = float(re.findall(r"available ([\d.]+) %", about["description"])[0]) / 100
    assert 1 / (1 + zone.preemptions_per_h * zone.wait_h) == pytest.approx(available, abs=0.002)
    [numbers] = re.findall(r"(\d+) losses in ([\d.]+) h, ([\d.]+) h without", about["sources"]["wait_h"])
    losses, up_h, down_h = map(float, numbers)
    assert losses / up_h == pytest.approx(zone.preemptions_per_h, rel=1e-3)
    assert down_h / losses == pytest.approx(zone.wait_h, rel=0.02)


def test_show_lists_presets_and_zones_with_sources() -> None:
    names = (*catalog.names("reliability"), *catalog.names("spot_zones"))
    assert [row["name"] for row in listing("reliability")] == [*names]
    assert all(entry("reliability", name)["sources"] for name in names)
    assert "causes.GPU   per: device, mtbf_h: 64512, scope: node" in entry_text("reliability", "bloom")


def test_another_spelling_is_understood_and_an_unknown_name_refused() -> None:
    assert entry("reliability", "Llama 3")["id"] == "llama3-2024"
    assert entry("reliability", "us-west-2b 8xV100")["id"] == "aws-us-west-2b-8xv100"
    with refuses("spot zone", "us-west-2b", rule="may be several spot zones", fix="name one of aws-us-"):
        entry("reliability", "us-west-2b")
    with refuses("reliability", "meta-rsc-3", fix="or give device_mtbf_h"):
        catalog.reliability("meta-rsc-3")
