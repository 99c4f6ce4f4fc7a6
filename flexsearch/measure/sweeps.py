"""Sweeps: measuring pieces of operators in the surroundings of a training step.

In training an operator's weights were last used a step ago, the activation that it reads was just written, its output
lands in memory that is freshly allocated, and what autograd saves stays until the backward pass is through. Whether
data and code are still in the caches then depends on how much a step touches in between. A loop over one operator shows
none of that. So pieces are measured in **sweeps** that have the shape of a training step: one piece of each operator,
repeated layers too, all forward tasks in the graph's order, then all backward tasks in reverse, each timed on its own.

A rank calls autograd once for a run of operators. So the clock of a backward task runs from when the engine reaches the
gradients of the results to when it has those of the operands: without the call. Where a schedule puts off the gradients
of weights, a rank calls autograd for each layer, and has what operators without weights save set aside, each tensor by
a call of Python, forward and backward. So some sweeps do that and go back twice: for the gradients of what is no
weight, and then, with the call, for those of the weights.

Of small operators the calls are what takes the time, and a call takes longer if other code has run in between. So small
neighbours are a **group**: all their operands are written first, then they run right after each other, as in a step.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence

import torch

from flexsearch.clocks import Clock, clock_of
from flexsearch.cost.profile import Entry
from flexsearch.measure.cases import Case
from flexsearch.measure.runs import (
    Numbers,
    Run,
    Samples,
    backward_tasks,
    forward_tasks,
    grouped,
    hook_s,
    named,
    weight_tasks,
)

ENTRY_S = 0.1
"""After so many seconds of an entry's own time its round is not repeated for it any more in this turn."""
HALVED_SWEEPS = 1
"""So many sweeps of a turn at most measure backward passes in two halves."""
GROUP_BYTES = 1 << 19
"""What pieces side by side that are timed together read and write at most: well within the second cache of a core, so
that operands are still as near as if they had just been written."""
HELD_BYTES = 2 << 30
"""A sweep holds about so much memory; longer graphs are swept in parts."""
AHEAD = 96
"""A device is held back for so many tasks at a time, whose launches fit into its queue of about a thousand."""
HELD_FOR = 3.0
"""Times as long as launching them has taken at the least."""
HOST_S = 1e-3
"""More than a host takes to make the operands of a task and launch it."""
HOST = Clock()
"""That of the host, whatever the device."""


class Bench:
    """Runs sweeps on one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.clock = clock_of(self.device)
        self.queued = self.device.type == "cuda"
        """Whether the device computes what its host launches ahead."""
        self._host_s = HOST_S
        """The least mean time of launching a task of a few."""
        self.numbers = Numbers(self.device)
        self.fill = self.numbers.fill
        self.hook_s = hook_s(self.device)
        self._shown_s = 0.0 if self.queued else self.hook_s
        """What the device's clock has of that."""
        self._near = 0 if self.queued else GROUP_BYTES
        """Groups of pieces that are timed by that clock."""

    def measure(self, cases: Sequence[Case], repeats: int, deadline: float | None = None) -> dict[str, Entry]:
        """Entries of these cases, which stand in the graph's order. What a deadline leaves unmeasured is left out."""
        entries: dict[str, Entry] = {}
        for part in parts(cases):
            if deadline is not None and time.monotonic() > deadline:
                break
            samples = {case.key: Samples(case) for case in part}
            runs = []
            for case in part:
                with named(case):
                    runs.append(Run(case, self.numbers, samples[case.key]))
            for sweep in range(repeats + 1):
                if sweep == 1:
                    for sample in samples.values():
                        sample.forget_first()
                # All go on until all have enough: a sweep over some of the operators leaves more in the caches.
                if all(len(sample.times) >= repeats or sample.spent > ENTRY_S for sample in samples.values()):
                    break
                if sweep > 1 and deadline is not None and time.monotonic() > deadline:
                    break
                # The first one goes piece by piece, so that errors have a name.
                self._add(runs, self.clock, self._near if sweep else 0.0)
            self._measure_hosts(runs, repeats, deadline)
            self._measure_halves(runs, repeats, deadline)
            entries |= {key: sample.entry() for key, sample in samples.items()}
        return entries

    def _add(self, runs: Sequence[Run], clock: Clock, nbytes: float = 0.0) -> None:
        """Note the times of a sweep by groups."""
        self._pass(runs, clock, nbytes)
        for run in runs:
            if clock is HOST:
                run.samples.hosts.append(run.times(clock, self.hook_s))
            else:
                run.samples.times.append(run.times(clock, self._shown_s))

    def _measure_hosts(self, runs: Sequence[Run], repeats: int, deadline: float | None) -> None:
        """Sweeps timed by the host of a device that computes what it launches. What operands it has in which cache is
        nothing to a host: they stand in groups whatever their sizes."""
        for _ in range(repeats if self.queued else 0):
            if deadline is not None and time.monotonic() > deadline and runs[0].samples.hosts:
                break
            self._add(runs, HOST, math.inf)

    def _measure_halves(self, runs: Sequence[Run], repeats: int, deadline: float | None) -> None:
        """Sweeps with backward passes in two halves, if a piece has weights."""
        if any(run.case.costed.trained for run in runs):
            for _ in range(min(repeats, HALVED_SWEEPS)):
                if deadline is not None and time.monotonic() > deadline:
                    break
                self._pass(runs, self.clock, self._near, halved=True)
                for run in runs:
                    run.samples.halves.append(run.halves_times(self.clock, self._shown_s))

    def sweep(self, runs: Sequence[Run]) -> None:
        """One pass forward through the runs and back, of which nothing is kept."""
        self._pass(runs, self.clock)

    def _pass(self, runs: Sequence[Run], clock: Clock, nbytes: float = 0.0, halved: bool = False) -> None:
        """One pass forward through groups of runs and back. ``halved``: back twice, as where the gradients of weights
        are put off."""
        batches = self._batches(runs, nbytes)
        back = [[group[::-1] for group in reversed(batch)] for batch in reversed(batches)]
        gc.disable()  # no pause for a collection inside a measurement
        try:
            for group in self._ahead(batches):
                forward_tasks(group, clock, halved)
            for group in self._ahead(back):
                backward_tasks(group, halved)
            for group in self._ahead(back) if halved else ():
                weight_tasks(group, clock)
        finally:
            gc.enable()
        self.clock.wait()

    def _batches(self, runs: Sequence[Run], nbytes: float) -> list[list[list[Run]]]:
        """The runs in groups of up to ``nbytes`` of operands and results; these in batches for ``_ahead``."""
        size = AHEAD if self.queued else len(runs)
        batches = (runs[k : k + size] for k in range(0, len(runs), size))
        return [list(grouped(batch, nbytes, lambda run: run.case)) for batch in batches]

    def _ahead(self, batches: Sequence[Sequence[list[Run]]]) -> Iterator[list[Run]]:
        """The groups. A device that computes what its host launches is held back for each batch of them until it is
        launched: its kernels then follow each other as fast as it computes them. Before that it does what is left,
        so that the host never waits for room in its queue."""
        for batch in batches:
            if not self.queued:
                yield from batch
                continue
            launches = sum(map(len, batch))
            self.clock.wait()
            self.clock.hold(HELD_FOR * self._host_s * launches)
            began = time.perf_counter()
            yield from batch
            self._host_s = min(time.perf_counter() - began, self._host_s * launches) / launches


def parts(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Runs of consecutive cases that hold a limited amount of memory until their backward passes, which make as much as
    the forward passes."""
    return grouped(cases, HELD_BYTES / 2, lambda case: case)
