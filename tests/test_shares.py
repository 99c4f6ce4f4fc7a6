"""Samples shared out unequally among devices that are not equally fast."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph, chunk, chunks
from flexsearch.lower import lower
from flexsearch.lower.folding import fold
from flexsearch.proof.bound import _lengths, piece_extents
from flexsearch.report.words import treatment
from flexsearch.search import search
from flexsearch.setting import Setting
from flexsearch.simulate import simulate
from flexsearch.strategy import OperatorConfig, Strategy, make_config
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.config import check_config
from flexsearch.strategy.shares import in_whole_numbers, shared_out, speeds
from flexsearch.topology import Topology
from tests.random_strategies import configs
from tests.test_baselines import cnn, mlp


def mixed(fast: int = 2, slow: int = 2, times: float = 3.0) -> Topology:
    """Hosts of one device each; the first ``fast`` ones compute and move so many ``times`` as much."""
    plain = Topology.load(f"ethernet-10g:{fast + slow}")
    devices = tuple(
        d.model_copy(update={
            "model": "fast", "flops": {k: times * f for k, f in d.flops.items()},
            "memory_bandwidth": times * d.memory_bandwidth,
        }) if k < fast else d
        for k, d in enumerate(plain.devices)
    )  # fmt: skip
    return plain.model_copy(update={"name": "mixed", "devices": devices})


def wide(batch: int = 4096) -> OperatorGraph:
    return mlp(batch=batch, width=512)


@given(size=st.integers(0, 500), parts=st.integers(1, 9), shares=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_parts_follow_each_other_and_are_in_proportion(size: int, parts: int, shares: list[int]) -> None:
    assert chunks(size, parts) == [chunk(size, parts, k) for k in range(parts)]
    cut = chunks(size, len(shares), shares)
    assert cut[0][0] == 0 and cut[-1][1] == size and all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    for (low, high), share in zip(cut, shares, strict=True):
        assert abs(high - low - size * share / sum(shares)) < 1.0


@pytest.mark.parametrize(
    ("rates", "shares"),
    [((1.0, 1.0), (1, 1)), ((2.5, 1.0), (5, 2)), ((3.02, 1.0), (3, 1)), ((1.0, 2.0, 4.0), (1, 2, 4))],
)
def test_speeds_in_small_whole_numbers(rates: tuple[float, ...], shares: tuple[int, ...]) -> None:
    assert in_whole_numbers(rates) == shares


def test_a_config_keeps_its_lowest_terms_and_drops_equal_shares() -> None:
    op = wide().operators[0]
    axis = op.axes_of("sample")[0]
    assert make_config(op, {axis: 2}, (0, 1), shares={axis: (6, 2)}).shares == ((axis, (3, 1)),)
    assert make_config(op, {axis: 2}, (0, 1), shares={axis: (2, 2)}).shares == ()
    assert make_config(op, {axis: 2}, (0, 1), shares={axis: (1, 10**6)}).shares == ()  # the first part would be empty


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ((("b", (3, 1, 1)),), "3 are given for 2 parts"),
        ((("i", (3, 1)),), "2 are given for 1 parts"),
        ((("b", (3, 0)),), "leaves a part"),
        ((("b", (1, 10**9)),), "leaves a part"),
    ],
)
def test_shares_that_make_no_sense_are_refused(shares: tuple[tuple[str, tuple[int, ...]], ...], says: str) -> None:
    op = wide().operators[0]
    axis = op.axes_of("sample")[0]
    named = tuple((axis if a == "b" else op.axes_of("reduction")[0], row) for a, row in shares)
    with pytest.raises(StrategyError, match=says):
        check_config(op, OperatorConfig(((axis, 2),), (0, 1), shares=named), 2)


def test_only_samples_are_shared_out() -> None:
    op = wide().operators[0]
    axis = op.axes_of("parameter")[0]
    with pytest.raises(StrategyError, match="only samples"):
        check_config(op, OperatorConfig(((axis, 2),), (0, 1), shares=((axis, (3, 1)),)), 2)


@pytest.mark.parametrize("graph", [wide(), cnn()], ids=lambda g: g.name)
def test_what_follows_is_shared_out_alike_and_no_activation_moves(graph: OperatorGraph) -> None:
    topology = mixed()
    plan = baseline("data-parallel-by-speed", graph, topology)
    assert {row for config in plan.configs.values() for _, row in config.shares} == {(3, 3, 1, 1)}
    tasks = lower(graph, plan, topology, Costs(graph, topology)).tasks
    purposes = {c.purpose for c in tasks.communication if c is not None}
    assert purposes <= {"synchronise", "forward"}
    forward = [c.nbytes for c in tasks.communication if c is not None and c.purpose == "forward"]
    assert max(forward) < 100  # the loss


def test_each_device_gets_a_share_in_proportion_and_the_step_is_faster() -> None:
    graph, topology = wide(), mixed()
    setting = Setting.of(graph, topology)
    times = {
        name: simulate(setting.lower(setting.baseline(name))).makespan_s
        for name in ("data-parallel", "data-parallel-by-speed")
    }
    assert times["data-parallel-by-speed"] < 0.75 * times["data-parallel"]
    with pytest.raises(StrategyError, match="equally fast"):
        baseline("data-parallel-by-speed", graph, Topology.load("ethernet-10g:4"))


def test_a_part_counts_as_the_slowest_of_its_devices() -> None:
    op = wide().operators[0]
    sample, parameter = op.axes_of("sample")[0], op.axes_of("parameter")[0]
    two_by_two = make_config(op, {sample: 2, parameter: 2}, (0, 2, 1, 3))
    assert shared_out(op, two_by_two, (3, 3, 1, 1)).shares == ()  # each part has a slow one
    assert shared_out(op, two_by_two.on((0, 1, 2, 3)), (3, 3, 1, 1)).shares == ((sample, (3, 1)),)


def test_a_search_shares_out_samples_and_the_answer_is_not_below_the_bound() -> None:
    graph, topology = wide(), mixed()
    result = search(graph, topology, Costs(graph, topology), proposals=400, processes=1)
    assert any(config.shares for config in result.strategy.configs.values())
    assert result.bound_s <= result.simulation.makespan_s
    assert speeds(topology) and not speeds(Topology.load("ethernet-10g:4"))


def test_the_file_says_the_shares(tmp_path: Path) -> None:
    graph, topology = wide(), mixed()
    plan = baseline("data-parallel-by-speed", graph, topology)
    plan.save(tmp_path / "plan.json")
    assert '"shares": {"n": [3, 3, 1, 1]}' in (tmp_path / "plan.json").read_text().replace("\n", "")
    assert Strategy.load(tmp_path / "plan.json") == plan


def test_blocks_that_share_out_their_samples_alike_are_folded() -> None:
    graph, topology = wide(), Topology.load("p100:2")
    parts = fold(graph, topology, 2)
    samples = [op.axes_of("sample") for op in graph.operators]
    own = tuple(
        make_config(op, dict.fromkeys(axes, 2), (0, 1), shares=dict.fromkeys(axes, (3, 1)))
        for op, axes in zip(parts.part.operators, samples, strict=True)
    )
    whole = parts.unfold(own)
    assert any(row == (3, 1, 3, 1) for config in whole for _, row in config.shares)
    assert parts.folded(whole) == own
    for op, config in zip(graph.operators, whole, strict=True):
        check_config(op, config, 8)
    uneven = [make_config(op, dict(c.degrees), c.devices, shares={a: (1, 1, 3, 1) for a, _ in c.degrees})
              for op, c in zip(graph.operators, whole, strict=True)]  # fmt: skip
    assert parts.folded(uneven) is None


@settings(derandomize=True, deadline=None, max_examples=40)
@given(data=st.data())
def test_every_unequal_piece_is_among_those_that_the_bound_counts(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(cnn().operators))
    config = data.draw(configs(op, 4))
    extents, parts, _ = piece_extents(op, 4, any_share=True)
    counted: dict[tuple[int, ...], int] = {}
    for *widths, count in zip(*(column.tolist() for column in extents.values()), parts.tolist(), strict=True):
        counted[tuple(widths)] = min(count, counted.get(tuple(widths), count))
    for position in range(len(config.devices)):
        piece = config.intervals(op, position)
        assert counted[tuple(piece[a][1] - piece[a][0] for a in extents)] <= config.parts


def test_shares_are_told_in_few_words() -> None:
    graph, topology = wide(), mixed(4, 4)
    op = graph.operators[0]
    (axis,) = op.axes_of("sample")
    config = make_config(op, {axis: 8}, range(8), shares={axis: (3, 3, 3, 3, 1, 1, 1, 1)})
    assert treatment(graph, topology, op, config) == "batch 4 x 3 : 4 x 1 over 8 hosts"
    two = make_config(op, {axis: 2}, (0, 7), shares={axis: (3, 1)})
    assert treatment(graph, topology, op, two).startswith("batch 3:1 over 2 hosts")


def test_the_bound_of_a_huge_batch_on_unlike_devices_takes_little_memory() -> None:
    op = mlp(batch=2**30).operators[0]
    axis, *_ = op.axes_of("sample")
    extents, parts, share = piece_extents(op, 8, any_share=True)
    assert len(parts) < 200_000 and extents[axis].max() == 2**30 == extents[axis][parts == 1].min()
    whole = (extents[axis] / 2**30)[parts == 2]
    assert (share[parts == 2] <= 1.0).all() and whole.min() == 2.0**-30


@given(size=st.integers(1, 5000), microbatches=st.integers(1, 4))
def test_every_length_is_in_a_row_that_costs_no_more_and_counts_for_no_less(size: int, microbatches: int) -> None:
    length, most, parts = _lengths(size, 4, microbatches, True)
    top = max(1, size // microbatches) + (size % microbatches > 0)
    rows = np.searchsorted(length, np.arange(1, top + 1), side="right") - 1
    assert (length[rows] <= np.arange(1, top + 1)).all() and (most[rows] >= np.arange(1, top + 1)).all()
    assert (most <= length + length // 64).all() and most[-1] == top
    assert parts.tolist() == [1 if n >= max(1, size // microbatches) else 2 for n in length.tolist()]
