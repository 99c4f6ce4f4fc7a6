"""Rings over direct links inside a host: how many there are, what they carry, and what collectives take there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations

import pytest

from flexsearch.cost.communication import Pricing
from flexsearch.topology import Communication, Link, Topology
from flexsearch.topology.parts import COLLECTIVES
from flexsearch.topology.rings import Lanes, rings

MEGA = 10**6
QUADS = [(a + 4 * half, b + 4 * half) for half in (0, 1) for a, b in combinations(range(4), 2)]
CUBE = {pair: 1 for pair in QUADS} | {(a, a + 4): 1 for a in range(4)}
"""DGX-1 with P100: NVLinks of each pair."""
DOUBLED = CUBE | dict.fromkeys([(0, 3), (1, 2), (2, 3), (4, 7), (5, 6), (6, 7), (0, 4), (1, 5)], 2)
"""DGX-1 with V100."""
FOUR = dict.fromkeys(combinations(range(4), 2), 1)


def lanes(members: int, links: dict[tuple[int, int], int]) -> Lanes:
    both = links | {(b, a): n for (a, b), n in links.items()}
    return tuple(tuple(both.get((a, b), 0) for b in range(members)) for a in range(members))


def server(links: dict[tuple[int, int], int], each: float, nodes: int = 1) -> Topology:
    """GPUs joined by so many NVLinks of ``each`` B/s, and to a switch over PCIe."""
    gpu, size = Topology.load("v100-nvlink-4").devices[0], 1 + max(b for _, b in links)
    names = [[f"node{h}/gpu{d}" for d in range(size)] for h in range(nodes)]
    wires = [(row[a], row[b], n * each) for row in names for (a, b), n in links.items()]
    wires += [(name, "switch", 12.5e9) for row in names for name in row]
    return Topology(
        name="server",
        devices=tuple(
            gpu.model_copy(update={"name": name, "host": f"node{h}"}) for h, row in enumerate(names) for name in row
        ),
        links=tuple(Link(a=a, b=b, bandwidth=bandwidth, latency_s=2e-6) for a, b, bandwidth in wires),
        switches=("switch",), communication=Communication(backend="nccl"),
    )  # fmt: skip


def packs(links: dict[tuple[int, int], int], members: tuple[int, ...], count: int) -> bool:
    """Whether so many closed ways of half a lane, run both ways round, fit among the members."""
    first, *others = members
    ways = [
        [(min(a, b), max(a, b)) for a, b in zip(way, (*way[1:], way[0]), strict=True)]
        for way in ((first, *rest) for rest in permutations(others) if rest[0] < rest[-1])
    ]
    ways = [way for way in ways if all(pair in links for pair in way)]
    free = {pair: 2 * n for pair, n in links.items()}

    def place(left: int, begin: int) -> bool:
        if not left:
            return True
        for k in range(begin, len(ways)):
            if all(free[pair] for pair in ways[k]):
                for pair in ways[k]:
                    free[pair] -= 1
                if place(left - 1, k):
                    return True
                for pair in ways[k]:
                    free[pair] += 1
        return False

    return place(count, 0)


def groups(size: int) -> Iterator[tuple[int, ...]]:
    for members in range(3, size + 1):
        yield from combinations(range(size), members)


@pytest.mark.parametrize("links", [FOUR, CUBE, DOUBLED, {**FOUR, (0, 3): 2, (1, 2): 2, (2, 3): 2}, {**FOUR, (0, 1): 9}])
def test_as_many_rings_as_counted_fit_and_no_more(links: dict[tuple[int, int], int]) -> None:
    size = 1 + max(b for _, b in links)
    table = rings(lanes(size, links))
    for members in groups(size):
        count = int(table[sum(1 << d for d in members)])
        assert packs(links, members, count) and not packs(links, members, count + 1), members


def test_servers_have_the_rings_that_nccl_opens() -> None:
    assert (rings(lanes(8, DOUBLED))[255], rings(lanes(8, CUBE))[255], rings(lanes(4, FOUR))[15]) == (6, 4, 3)
    # NVIDIA/nccl, issue 713: four V100 with two NVLinks for each pair, nchannels="6".
    assert rings(lanes(4, dict.fromkeys(FOUR, 2)))[15] == 6
    # NVIDIA/nccl, issue 301: GPUs 0, 1, 2, 3 and 7 of a DGX-1 form no closed ring.
    assert rings(lanes(8, CUBE))[0b10001111] == 0


def test_bus_bandwidths_are_those_of_all_links() -> None:
    """nccl-tests reach 120 to 130 GB/s on a DGX-1 with V100, and 62 on one with P100."""

    def bus(topology: Topology, members: int) -> float:
        nbytes = 1000 * MEGA
        return 2 * (members - 1) / members * nbytes / Pricing(topology).all_reduce(range(members), nbytes).duration_s

    assert 110e9 < bus(server(DOUBLED, 25e9), 8) < 130e9
    assert 58e9 < bus(server(CUBE, 20e9), 8) < 64e9
    assert bus(Topology.load("p100:1"), 4) == pytest.approx(3 * bus(Topology.load("p100:1"), 2) * 218 / 193, rel=0.02)


@pytest.mark.parametrize("form", COLLECTIVES)
def test_links_are_as_busy_as_the_price_says_and_carry_what_rings_carry(form: str) -> None:
    topology = server(DOUBLED, 25e9)
    pricing, nbytes = Pricing(topology), 840 * MEGA
    transfer = pricing.collective(form, range(8), nbytes)
    assert len({seconds for _, seconds in transfer.links}) == 1 and len(transfer.links) == 2 * len(DOUBLED)
    ring = 2 * 7 * nbytes // 8 if form == "all_reduce" else nbytes // 8
    assert sum(n for _, n in transfer.link_bytes) == 8 * ring
    assert max(n for _, n in transfer.link_bytes) == 2 * ring // 6


def test_rings_through_several_hosts_use_all_links_inside() -> None:
    pricing = Pricing(server(FOUR, 10e9, nodes=2))
    loads = dict(pricing.all_reduce(range(8), 96 * MEGA).link_bytes)
    inside = [n for r, n in loads.items() if "switch" not in pricing.topology.resources[r].name]
    assert len(inside) == 24 and len(set(inside)) == 1
    per_card = 2 * 7 * 96 * MEGA // 8 // 4  # of each of four rings
    assert inside[0] == per_card  # three of four rings cross an edge, over three lanes
