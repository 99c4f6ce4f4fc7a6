"""Messages under way where memory has no room for them: sends that are waited for, receives that are posted later."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks import memory_peaks
from flexsearch.cost import Costs
from flexsearch.graph.importer import Imported
from flexsearch.lower import lower_for_ranks
from flexsearch.runtime.instructions import AwaitSends, Post, Program, Start, Wait
from flexsearch.runtime.program import compile_program
from flexsearch.runtime.wire import Wire
from flexsearch.simulate.account import BLOCK_CELLS
from flexsearch.simulate.memory import memory, use_of


@cache
def _imported(name: str) -> Imported:
    return memory_peaks.imported(name)


def _programs(name: str, number: int, seed: int) -> list[Program]:
    graph = _imported(name).graph
    plan = memory_peaks.plan_of(name, graph, number, seed)
    lowered = lower_for_ranks(graph, plan, plan.cluster, Costs(graph, plan.cluster))
    return [compile_program(lowered, device) for device in range(len(plan.cluster.devices))]


def test_a_rank_waits_for_what_it_has_sent_where_it_would_hold_more_than_its_peak() -> None:
    for program in (_programs("images", 13, 4)[k] for k in (0, 3)):
        rows = program.instructions
        waits = [k for k, instruction in enumerate(rows) if isinstance(instruction, AwaitSends)]
        assert waits
        for k in waits:
            assert any(isinstance(row, Start) and any(row.sources) for row in rows[:k])
            assert not isinstance(rows[k + 1], Wait | Start)  # these wait themselves


@pytest.mark.parametrize(("number", "seed", "moves"), [(8, 1, True), (3, 0, False), (4, 1, False), (2, 2, False)])
def test_receives_are_posted_before_a_rank_waits_for_what_comes_later(number: int, seed: int, moves: bool) -> None:
    """And no later than what comes is in the account of memory."""
    behind = 0
    for program in _programs("decoder", number, seed):
        place = {x.task: k for k, x in enumerate(program.instructions) if isinstance(x, Start)}
        waited = -1
        for k, instruction in enumerate(program.instructions):
            if isinstance(instruction, Wait):
                waited = max(waited, place[instruction.task])
            elif isinstance(instruction, Post):
                assert waited < place[instruction.task]
                behind += place[instruction.task] < k
    assert bool(behind) == moves


def test_use_in_the_order_of_a_program_has_the_peak_of_the_account() -> None:
    program = _programs("mlp", 2, 2)[0]
    use, whole = use_of(program.lowered, 0), memory(program.lowered)[0]
    assert use.peak == whole.peak - whole.optimizer == use.after.max()
    assert len(use.after) == 1 + BLOCK_CELLS * len(use.place)


class _Work:
    """A message that has left once somebody waits for it."""

    def __init__(self) -> None:
        self.done = False

    def wait(self) -> None:
        self.done = True


def _wire() -> Any:
    wire: Any = Wire.__new__(Wire)
    wire._sent, wire._sending, wire._issued, wire._unposted = deque(), 0, 0, {}
    return wire


def _send(wire: Any, tensor: torch.Tensor) -> _Work:
    work = _Work()
    wire._note_sent(0, [work], tensor, tensor.nbytes)
    wire._issued += 1
    return work


def test_no_send_is_waited_for_that_stands_behind_a_receive_that_is_not_posted() -> None:
    wire = _wire()
    before = _send(wire, torch.ones(4))
    wire._unposted[7] = wire._issued
    behind = _send(wire, torch.ones(4))
    wire._finish_down_to(0)
    assert before.done and not behind.done
    del wire._unposted[7]
    wire._finish_down_to(0)
    assert behind.done and wire._sending == 0


def test_messages_that_are_parts_of_one_memory_count_it_once_until_the_last_has_left() -> None:
    wire, whole = _wire(), torch.ones(8)
    first, second = _send(wire, whole[:2]), _send(wire, whole[2:4])
    assert wire._sending == whole.nbytes
    wire._finish_down_to(whole.nbytes - 1)
    assert first.done and second.done and wire._sending == 0
