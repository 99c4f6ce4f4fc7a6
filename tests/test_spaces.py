"""Both spaces are searched, plans of one stage and layouts with microbatches, and the faster plan is the answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flexsearch import optimize
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.planning import plan
from flexsearch.search.hybrid import HybridResult
from flexsearch.search.outcome import SearchResult
from flexsearch.setting import Setting
from flexsearch.spaces import prefers_layout, search_both
from flexsearch.strategy import Options, Strategy
from flexsearch.topology import Topology
from tests.conftest import Cli

SLOW = Topology.load("ethernet-1g:4")


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


@cache
def deep() -> OperatorGraph:
    """Weights and batch are both large, so that only a pipeline with microbatches moves little."""
    batch = torch.empty(512, 1024, device="meta")
    with torch.device("meta"):
        layers = chain.from_iterable((nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8))
        return import_model(nn.Sequential(*layers), batch, _loss, targets=batch)


def test_the_api_takes_the_faster_of_both_plans() -> None:
    strategy = optimize(deep(), topology=SLOW, budget="4s", processes=1)
    assert not strategy.is_plain and strategy.microbatches > 1
    splits = optimize(deep(), topology=SLOW, budget=2000, processes=1)
    assert splits.is_plain  # a number of proposals goes to splits
    setting = Setting.of(deep(), SLOW)
    assert setting.step(strategy).makespan_s < 0.95 * setting.step(splits).makespan_s


def test_the_command_shows_the_best_plan_of_one_stage_beside_the_layout(cli: Cli) -> None:
    deep().save("deep.json")
    ran = cli("optimize", "deep.json", "-t", "ethernet-1g:4", "-b", "4s", "-j", "1", "--json")
    assert ran.code == 0, ran.err
    plans = {row["name"]: row for row in ran.json["plans"]}
    assert ran.json["space"] == "free" and ran.json["microbatches"] > 1
    assert plans["one stage"]["iteration_s"] > ran.json["iteration_s"]
    assert not Strategy.load(Path("strategy.json")).is_plain


def test_a_layout_that_is_slower_stands_beside_the_answer(cli: Cli) -> None:
    ran = cli("optimize", "lenet", "-t", "ethernet-1g:2", "-b", "1s", "-j", "1", "--json")
    assert ran.json["layouts"]["fits"] and ran.json["layouts"]["plans_considered"] > 0
    assert Strategy.load(Path("strategy.json")).is_plain
    for more in (("--space", "splits"), ("--pin", "conv1: batch=2")):
        ran = cli("optimize", "lenet", "-t", "ethernet-1g:2", "-b", "1s", "-j", "1", "--json", *more)
        assert ran.json["layouts"] is None, more


def test_the_faster_plan_is_preferred_by_the_margin_and_one_that_fits_to_one_that_does_not() -> None:
    setting = Setting.of(deep(), SLOW)
    splits = setting.search(200, processes=1, margin=0.0)
    layouts = setting.search_layouts("3s", processes=1)
    gain = 1.0 - layouts.step.makespan_s / splits.simulation.makespan_s
    assert gain > 0.05
    assert prefers_layout(layouts, splits, 0.9 * gain) and not prefers_layout(layouts, splits, 1.1 * gain)
    assert prefers_layout(layouts, replace(splits, feasible=False), 1.1 * gain)
    too_large = replace(layouts, best=replace(layouts.best, used=1.01))
    assert not prefers_layout(too_large, splits, 0.0) and not prefers_layout(None, splits, 0.0)


@pytest.mark.parametrize(
    ("devices", "microbatches", "fits", "stopped", "shares"),
    [
        (4, True, True, "", [6.0, 5.0]),
        (4, False, True, "", [8.0]),  # the model has no microbatches
        (4, False, False, "", [8.0, 5.0]),
        (1, True, True, "", [8.0]),
        (4, True, True, "interrupted", [6.0]),
    ],
)
def test_what_a_budget_is_spent_on(
    devices: int, microbatches: bool, fits: bool, stopped: str, shares: list[float]
) -> None:
    graph = deep() if microbatches else OperatorGraph.load("resnet50")
    done = replace(Setting.of(deep(), SLOW).search(10, processes=1), feasible=fits, stopped=stopped, elapsed_s=3.0)
    given: list[str] = []

    def splits(budget: str) -> SearchResult:
        given.append(budget)
        return done

    def layouts(budget: str) -> HybridResult | None:
        given.append(budget)
        raise StrategyError("no layout suits it")

    assert search_both(8.0, graph, devices, splits, layouts) == (done, None)
    assert given == [f"{share:.6f}s" for share in shares]


def test_a_layout_that_does_not_fit_is_refused_and_so_is_a_space_that_there_is_not() -> None:
    tiny = SLOW.model_copy(
        update={"devices": tuple(d.model_copy(update={"memory_bytes": 2**20}) for d in SLOW.devices)}
    )
    with pytest.raises(StrategyError, match="no layout was found that fits into memory"):
        optimize(deep(), topology=tiny, budget="1s", processes=1, space="layouts")
    for space, budget in (("everything", "1s"), ("layouts", 100)):
        with pytest.raises(StrategyError, match="there is no search with"):
            optimize(deep(), topology=SLOW, budget=budget, space=space)  # type: ignore[arg-type]


def test_a_plan_for_more_devices_is_of_both_spaces_too() -> None:
    planned = plan(Setting.of(deep(), SLOW), "4s", Options(), space="free")
    assert not planned.strategy.is_plain and "microbatches" in planned.words
    assert planned.data_parallel_s is not None and planned.data_parallel_s > planned.step.makespan_s
