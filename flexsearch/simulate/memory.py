"""Peak memory of every device, and what it is made of: the account of ``lifetimes``, for reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from flexsearch.direct import direct
from flexsearch.lower import Lowered
from flexsearch.lower.arrays import State
from flexsearch.lower.plan import PlanRows
from flexsearch.lower.templates import Templates
from flexsearch.simulate.account import Account, enter, which_cells
from flexsearch.simulate.lifetimes import Sources, list_spans
from flexsearch.simulate.units import make_account

_list_spans = direct(list_spans)
_enter = direct(enter)

Part = Literal["weights", "gradients", "optimizer", "activations", "buffers"]
PARTS: Final[tuple[Part, ...]] = ("weights", "gradients", "optimizer", "activations", "buffers")
"""In the order of their numbers in ``lifetimes``."""


@dataclass(frozen=True)
class Memory:
    """Bytes in use on a device at the moment of its peak, by what they hold.

    ``weights``: stored; whole copies gathered from sharded ones; buffers and constants of the model. ``gradients``: of
    weights, as the pieces make them and as they are stored. ``optimizer``: its state. ``activations``: inputs, outputs,
    their copies in other layouts, and their gradients. ``buffers``: what is received and used elsewhere, and layouts in
    between. Not counted: workspace inside a kernel, fragmentation, the libraries themselves.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0

    @property
    def peak(self) -> int:
        """The peak, bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


class Span(NamedTuple):
    """Bytes on a device, alive from moment ``first`` to moment ``last``, both included: 2 * block is its computing,
    2 * block + 1 its communicating."""

    device: int
    first: int
    last: int
    nbytes: int
    part: Part


def memory(lowered: Lowered) -> tuple[Memory, ...]:
    """Peak memory by device index of the topology."""
    account, sources, state = _account(lowered)
    return memory_of(account, sources, state)


def spans_of(lowered: Lowered) -> list[Span]:
    """Everything that is counted, with its lifetime."""
    account, sources, state = _account(lowered)
    found: list[Span] = []
    for _ in _units(account, sources, state):
        spans, count = account.spans, int(account.spans.size[0])
        rows = (spans.device, spans.first, spans.last, spans.nbytes, spans.part)
        for device, first, last, nbytes, part in zip(*(row[:count].tolist() for row in rows), strict=True):
            found.append(Span(device, first, last, nbytes, PARTS[part]))
    return found


def memory_of(account: Account, sources: Sources, state: State) -> tuple[Memory, ...]:
    """Peak memory of a plan by device, with an account of no plan."""
    curves = []
    for part in range(len(PARTS)):
        account.cells[:] = 0
        for _ in _units(account, sources, state):
            spans = account.spans
            spans.nbytes[spans.part != part] = 0
            _enter(account, 1)
        curves.append(list(_curves(account)))
    found = []
    for of_device in zip(*curves, strict=True):
        use = np.stack(of_device)
        top = int(use.sum(axis=0).argmax())
        found.append(Memory(*use[:, top].tolist()))
    return tuple(found)


def _account(lowered: Lowered) -> tuple[Account, Sources, State]:
    """An account of no plan, what it is worked out from, and the plan."""
    rows = PlanRows(lowered.lowering, Templates(lowered.lowering, share=False), lowered.options, lowered.stages)
    rows.set(dict(enumerate(lowered.configs)))
    return *make_account(rows), rows.state


def _units(account: Account, sources: Sources, state: State) -> Iterator[int]:
    """All units, each with its spans in ``account.spans``."""
    for unit in range(len(sources.units.root)):
        _list_spans(sources, state, np.uint64(unit), account.spans)
        yield unit


def _curves(account: Account) -> Iterator[npt.NDArray[np.int64]]:
    """Use of each device after each of its cells, in the order in which it runs them; 0 before the first."""
    schedule = account.schedule
    for d, group in enumerate(schedule.group):
        row = [np.zeros(1, np.int64)]
        for a in range(schedule.action_first[group], schedule.action_last[group]):
            which = int(which_cells(np.uint64(schedule.microbatch[a]), np.uint64(schedule.microbatches[0])))
            row.append(account.cells[which, d, 4 * int(schedule.block_first[a]) : 4 * int(schedule.block_last[a])])
        yield np.concatenate(row).cumsum()
