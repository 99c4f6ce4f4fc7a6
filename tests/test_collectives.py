"""Where ranks leave all-gathers, reduce-scatters and all-to-alls to the backend, as on NCCL, they compute the same.

There is no GPU here: gloo's ranks are told to do as NCCL's. What NCCL itself does with these calls never ran.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from flexsearch.cost import Costs
from flexsearch.cost.communication import Pricing
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.lower import lower
from flexsearch.lower.layout import Entry
from flexsearch.lower.reshard import reshard
from flexsearch.lower.taskgraph import Member
from flexsearch.runtime import collectives
from flexsearch.strategy.baselines import baseline, baselines
from flexsearch.topology import Topology
from flexsearch.topology.parts import FORMS, ONE_CALL
from tests.random_strategies import strategies
from tests.ranks import pool
from tests.staged_plans import deep, staged_plan, tokens_loss
from tests.test_numerics import NOISE, History, _imported, _parallel, _single, _staged, agree

CALLED = FORMS[1:4]
CASES = int(os.environ.get("FLEXSEARCH_NUMERICS_CASES", "4"))


@contextmanager
def as_on_nccl(wrong: bool = False) -> Iterator[Counter[str]]:
    """Gloo's ranks do as NCCL's; how often they call what. ``wrong``: sums leave out what crosses no devices."""
    calls: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ONE_CALL, "gloo", CALLED)
        for module, name in (
            (collectives, "all_gather"), (collectives, "_reduce_scatter"), (dist, "all_to_all_single"),
            (dist, "new_group"),
        ):  # fmt: skip
            patch.setattr(module, name, counted(name.strip("_"), getattr(module, name)))
        if wrong:
            patch.setattr(Member, "summed", property(lambda member: member.what.moves))
        yield calls


def _called(name: str, imported: Imported, file: str, wrong: bool = False) -> tuple[History, Counter[str]]:
    """Training on this rank, and its calls."""
    with as_on_nccl(wrong) as calls:
        return _parallel(name, imported, file, False), calls


def _called_staged(imported: Imported, file: str) -> tuple[History, Counter[str]]:
    with as_on_nccl() as calls:
        return _staged(imported, file, False), calls


def test_layouts_that_shard_weights_gather_and_scatter_by_the_backends_calls() -> None:
    imported, total = _imported("decoder"), Counter[str]()
    expected = _single("decoder")
    for ranks in (2, 3, 4):
        topology = Topology.load(f"ethernet-1g:{ranks}")
        for name in ("fsdp", "megatron", "data-parallel"):
            file = baseline(name, imported.graph, topology).to_file().model_dump_json()
            for history, calls in pool(ranks).run(_called, "decoder", imported, file):
                agree(expected, history)
                total += calls
    assert total["all_gather"] > 0 and total["reduce_scatter"] > 0


@pytest.mark.parametrize("name", ["mlp", "convolutions", "decoder"])
def test_any_strategy_computes_what_one_device_does(name: str) -> None:
    imported, expected = _imported(name), _single(name)

    @settings(
        max_examples=CASES, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    @given(data=st.data(), ranks=st.integers(2, 4))
    def check(data: Any, ranks: int) -> None:
        strategy = data.draw(strategies(imported.graph, Topology.load(f"ethernet-1g:{ranks}"), unequal=False))
        file = strategy.to_file().model_dump_json()
        note(file)
        for history, _ in pool(ranks).run(_called, name, imported, file):
            agree(expected, history)

    check()


def test_any_staged_plan_computes_what_one_device_does() -> None:
    model, tokens, targets = deep()
    imported, total = import_with_constants(model, (tokens,), tokens_loss, targets=targets), Counter[str]()
    alone = baseline("single", imported.graph, Topology.load("ethernet-1g:1")).to_file().model_dump_json()
    (expected,) = pool(1).run(_staged, imported, alone, False)
    for number in range(CASES):
        plan = staged_plan(imported.graph, random.Random(1000 + number))
        file, ranks = plan.to_file().model_dump_json(), pool(len(plan.cluster.devices))
        for history, calls in ranks.run(_called_staged, imported, file):
            agree(expected, history, noise=NOISE)
            total += calls
    assert all(total[name] > 0 for name in ("all_gather", "reduce_scatter", "all_to_all_single"))


def test_the_check_can_fail() -> None:
    imported, topology = _imported("decoder"), Topology.load("ethernet-1g:2")
    file = baseline("fsdp", imported.graph, topology).to_file().model_dump_json()
    expected = _single("decoder")
    for history, calls in pool(2).run(_called, "decoder", imported, file, True):
        assert calls["reduce_scatter"] > 0
        with pytest.raises(AssertionError, match="after step 1"):
            agree(expected, history)


def test_a_group_is_made_once_for_all_steps_and_programs() -> None:
    imported, topology = _imported("decoder"), Topology.load("ethernet-1g:2")
    file = baseline("fsdp", imported.graph, topology).to_file().model_dump_json()
    pool(2).run(_called, "decoder", imported, file)
    for _, calls in pool(2).run(_called, "decoder", imported, file):
        assert calls["new_group"] == 0 < calls["all_gather"]


def _gather(topology: Topology, rows: list[int]) -> tuple[str, int, int, float]:
    """Form, bytes that cross, bytes priced and seconds of gathering parts of so many rows on all devices."""
    first, source = 0, []
    for device, count in enumerate(rows):
        source.append(Entry(device, ((first, first + count), (0, 1000)), device))
        first += count
    destination = [Entry(device, ((0, first), (0, 1000)), 0) for device in range(len(rows))]
    plan = reshard(tuple(source), tuple(destination), 4, topology)
    (exchange,) = plan.exchanges
    return exchange.form, exchange.nbytes, exchange.amount, exchange.transfer.duration_s


def test_equal_parts_are_priced_as_the_call_and_unequal_ones_as_messages() -> None:
    topology = Topology.load("dgx-a100").subset([0, 1, 2, 3])
    pricing, row = Pricing(topology), 3 * 4000
    form, nbytes, amount, seconds = _gather(topology, [100, 100, 100, 100])
    assert (form, nbytes, amount) == ("all_gather", 400 * row, 400 * row)
    assert seconds == pricing.collective("all_gather", range(4), 400 * row).duration_s
    form, nbytes, amount, seconds = _gather(topology, [101, 101, 100, 100])
    assert (form, nbytes, amount) == ("all_gather", 402 * row, 404 * row), "padded"
    form, nbytes, amount, seconds = _gather(topology, [100, 100, 100, 300])
    assert (form, nbytes, amount) == ("all_to_all", 600 * row, 0)


def test_the_rows_say_which_communications_are_calls() -> None:
    imported = _imported("decoder")
    for name, called in (("dgx-a100", {"all_reduce", *CALLED}), ("ethernet-1g:4", {"all_reduce"})):
        topology = Topology.load(name)
        topology = topology.subset(range(4)) if len(topology.devices) > 4 else topology
        for strategy in baselines(imported.graph, topology).values():
            tasks = lower(imported.graph, strategy, topology, Costs(imported.graph, topology)).tasks
            for what in tasks.communication:
                assert what is None or what.one_call == (what.form in called)
