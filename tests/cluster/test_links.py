"""Links of the catalog: wiring counted again, constants with their sources and within reason."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

import pytest

from simplan import catalog
from simplan.errors import SpecError

NETWORKS = ("network", "efa")

# nvidia-smi topo -m of a DGX-1V: NVLinks between pairs of devices
DGX_1 = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1, (3, 7): 1,
    (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


def most_rings(links: dict[tuple[int, int], int], n: int) -> int:
    """Rings over all of the first n devices that share no link in one direction, by trying."""
    free = Counter({pair: number for pair, number in links.items() if max(pair) < n})
    rings = set()
    for order in permutations(range(1, n)):
        steps = [*pairwise((0, *order)), (order[-1], 0)]
        pairs = tuple(sorted((min(step), max(step)) for step in steps))
        if all(pair in free for pair in pairs):
            rings.add(pairs)

    def most_disjoint(left: Counter[tuple[int, int]], candidates: list[tuple[tuple[int, int], ...]]) -> int:
        best = 0
        for index, ring in enumerate(candidates):
            rest = left - Counter(ring)
            if sum(rest.values()) == sum(left.values()) - n:
                best = max(best, 1 + most_disjoint(rest, candidates[index:]))
        return best

    # a link carries a ring in each direction
    return 2 * most_disjoint(free, sorted(rings))


@pytest.mark.parametrize("n", [3, 4, 6, 7])
def test_rings_that_close_in_a_dgx_1(n: int) -> None:
    part = catalog.link("nvlink2").part_of_node[8][n]
    assert part == pytest.approx(most_rings(DGX_1, n) / 6, abs=1e-4)


def test_rings_of_all_devices_use_all_links() -> None:
    assert most_rings(DGX_1, 8) == 6
    assert 8 not in catalog.link("nvlink2").part_of_node[8]
    quad = {(a, b): 2 for b in range(4) for a in range(b)}
    assert most_rings(quad, 4) == 6
    assert catalog.link("nvlink2").part_of_node[4][3] == pytest.approx(most_rings(quad, 3) / 6, abs=1e-4)


@pytest.mark.parametrize("name", catalog.names("links"))
def test_every_value_of_a_link_names_its_source(name: str) -> None:
    link = catalog.link(name)
    constants = {"bytes_per_s", "latency_s", "bandwidth_share", "switch_share", "part_of_node", "torus_axes"}
    stated = {field for field in constants if getattr(link, field)}
    assert stated | ({"launch_s"} if link.library == "nccl" else set()) <= set(link.sources)


@pytest.mark.parametrize("name", [name for name in catalog.names("links") if catalog.link(name).fitted_on])
def test_fitted_constants_stay_near_their_textbook(name: str) -> None:
    """Bandwidths within 15 %; steps within a factor of two, but over the transport of a cloud, within twelve."""
    fitted, textbook = catalog.link(name), catalog.link(name, textbook=True)
    assert fitted.bandwidth_share == pytest.approx(textbook.bandwidth_share, rel=0.15)
    if textbook.switch_share is not None:
        assert fitted.switch_share == pytest.approx(textbook.switch_share, rel=0.15)
    factor = 12 if name.startswith("efa") else 2
    assert 1 / factor < fitted.latency_s / textbook.latency_s < factor
    assert fitted.sources["latency_s"].startswith(f"fitted, from {textbook.latency_s:g} (")
    assert "scenarios/published/collectives" in str(fitted.fitted_on)


def test_networks_have_any_rate() -> None:
    for kind in NETWORKS:
        slow, fast = catalog.link(f"{kind}-12.5gbit"), catalog.link(f"{kind}-100gbit")
        assert (slow.bytes_per_s, fast.bytes_per_s) == (12.5e9 / 8, 12.5e9)
        assert slow.latency_s == fast.latency_s
    with pytest.raises(SpecError, match="network-400gbit"):
        catalog.link("networks-400gbit")
    with pytest.raises(SpecError):
        catalog.link("network-0gbit")
