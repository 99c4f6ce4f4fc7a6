"""The axes of a machine, and the ordered sets of devices that have its structure."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from flexsearch.search.meshes import Meshes, machine_grid
from flexsearch.topology import Topology
from tests.test_baselines import ethernet


def two_servers_of_four() -> Topology:
    return Topology.load("hgx-h100:2").subset([0, 1, 2, 3, 8, 9, 10, 11])


@pytest.mark.parametrize(
    ("preset", "axes"),
    [
        ("ethernet-1g-4", (4,)),
        ("ethernet-1g-64", (64,)),
        ("hgx-h100", (8,)),
        ("hgx-h100:2", (2, 8)),
        ("dgx-a100:8", (8, 8)),
        ("p100:4", (4, 4)),
        ("k80:4", (4, 2, 2)),  # two GPUs of a board are closer than two boards
    ],
)
def test_the_axes_of_a_machine_follow_from_its_routes(preset: str, axes: tuple[int, ...]) -> None:
    grid = machine_grid(Topology.load(preset))
    assert grid.shape == axes and sorted(grid.ravel().tolist()) == list(range(grid.size))


def test_devices_of_one_host_are_neighbours_in_whatever_order_they_are_listed() -> None:
    shuffled = Topology.load("p100:2").subset([0, 4, 1, 5, 2, 6, 3, 7])
    assert machine_grid(shuffled).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_an_irregular_machine_has_one_axis() -> None:
    meshes = Meshes(Topology.load("p100:2").subset([0, 1, 2, 4, 5]))
    assert meshes.grid.shape == (5,) and meshes.orders == ((0, 1, 2, 3, 4),) and meshes.relabelings == ()


def test_two_servers_of_four_have_a_transposed_order() -> None:
    meshes = Meshes(two_servers_of_four())
    assert meshes.orders == (tuple(range(8)), (0, 4, 1, 5, 2, 6, 3, 7))
    assert set(meshes.blocks(2)) == {(0, 1), (2, 3), (4, 5), (6, 7), (0, 4), (1, 5), (2, 6), (3, 7)}
    assert {(0, 4, 1, 5), (0, 1, 4, 5)} <= set(meshes.blocks(4))
    assert meshes.relabelings == ((0, 4, 1, 5, 2, 6, 3, 7), (0, 2, 4, 6, 1, 3, 5, 7))  # there and back


@pytest.mark.parametrize("preset", ["ethernet-1g-6", "hgx-h100:2", "p100:3", "k80:4"])
def test_blocks_are_distinct_and_those_of_the_own_order_come_first(preset: str) -> None:
    meshes = Meshes(Topology.load(preset))
    for count in (n for n in range(1, meshes.count + 1) if meshes.count % n == 0):
        blocks, plain = meshes.blocks(count), meshes.count // count
        natural = meshes.orders[0]
        assert blocks[:plain] == tuple(natural[k : k + count] for k in range(0, meshes.count, count))
        assert len(set(blocks)) == len(blocks)
        assert all(len(set(block)) == count for block in blocks)
    for renaming in meshes.relabelings:
        assert sorted(renaming) == list(range(meshes.count))
        assert tuple(int(k) for k in np.argsort(renaming)) in meshes.relabelings


def test_a_machine_of_one_axis_has_blocks_of_neighbours_only() -> None:
    meshes = Meshes(ethernet(4))
    assert meshes.blocks(2) == ((0, 1), (2, 3)) and meshes.blocks(4) == ((0, 1, 2, 3),)


@pytest.mark.parametrize("permuted", [0.0, 1.0])
def test_drawn_sets_have_the_order_that_is_asked_for(permuted: float) -> None:
    meshes, rng = Meshes(two_servers_of_four()), np.random.Generator(np.random.PCG64(0))
    for count in (2, 4, 8):
        plain = {tuple(range(k, k + count)) for k in range(0, 8, count)}
        for _ in range(20):
            drawn = meshes.draw(rng, count, permuted)
            assert drawn in meshes.blocks(count) and (drawn in plain) == (permuted == 0.0)
    assert len(meshes.draw(rng, 3, permuted)) == 3


def test_halves_are_cut_at_the_outermost_axis() -> None:
    meshes = Meshes(two_servers_of_four())
    assert meshes.halves((0, 4, 1, 5)) == ({0, 1}, {4, 5})
    assert meshes.halves((0, 1, 2)) == ({0, 1}, {2})
    for devices in permutations(range(4)):
        assert meshes.halves(devices) == ({0, 1}, {2, 3})
