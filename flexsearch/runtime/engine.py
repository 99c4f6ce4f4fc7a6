"""One step of one rank: its program as closures over numbered slots, made once. Nothing is decided here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from flexsearch.graph import Box
from flexsearch.graph.images import images
from flexsearch.graph.ops import KernelContext
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import extent, preferred
from flexsearch.runtime import assembly, casts
from flexsearch.runtime.casts import cast, in_parts
from flexsearch.runtime.gradients import is_shared
from flexsearch.runtime.instructions import (
    Add,
    Assemble,
    AwaitSends,
    Backward,
    Deliver,
    Empty,
    Fetch,
    Forward,
    Free,
    Instruction,
    Keep,
    Load,
    Post,
    Program,
    Result,
    Slot,
    Start,
    Update,
    Wait,
)
from flexsearch.runtime.microbatches import box_in_batch
from flexsearch.runtime.parts import cut
from flexsearch.runtime.segment import SegmentRunner
from flexsearch.runtime.wire import Wire

Action = Callable[[], None]


def _nothing() -> None:
    """Nothing."""


class Engine:
    """Executes ``program``. ``weights``: this rank's stored part of each parameter; ``fixed``: buffers and constants by
    name, as (region held, tensor). ``update``: called when all gradients are in place."""

    def __init__(
        self,
        program: Program,
        wire: Wire,
        weights: Mapping[str, torch.nn.Parameter],
        fixed: Mapping[str, tuple[Box, Tensor]],
        update: Callable[[], None],
        context: KernelContext,
        compiler: str | None = None,
    ) -> None:
        self.compiler = compiler
        self.program, self.lowered, self.rank = program, program.lowered, program.device
        self.wire, self.weights, self.fixed, self.update, self.context = wire, weights, fixed, update, context
        self.around: Callable[[Instruction, Action], None] | None = None
        """Called in place of each action, also of those that do nothing, for measuring."""
        self._values: list[Any] = [None] * len(program.slots)
        self.inputs: Mapping[str, tuple[Box, Tensor]] = {}
        """Of the step at hand, as given to ``step``."""
        self.results: dict[str, Tensor] = {}
        """Of the step at hand: the loss, or the outputs of a forward pass."""
        self._images = images(self.lowered.graph)
        self._runners: dict[tuple[int, int], SegmentRunner] = {}
        passes = (instruction for instruction in program.instructions if isinstance(instruction, Backward))
        added = Counter(slot for instruction in passes for slot in instruction.writes)
        self._shared = {slot for slot, times in added.items() if times > 1}
        """Gradients that several backward passes add to."""
        self._own: assembly.Own = {}
        """Gradients of activations that were put together from messages, by slot."""
        self._delivered: set[int] = set()
        """Weights with a gradient, as closures are made in order: the first one needs no sum."""
        self._seen = set[int]()
        """Where gradients of weights lie in memory, in the first step; in every step if operators are compiled."""
        self._together = casts.worthwhile(context.device)
        """Whether weights, and gradients, are cast together."""
        actions = [self._action(instruction) for instruction in program.instructions]
        self._actions = list(self._joined(actions))
        self._all_actions = [action or _nothing for action in actions]

    def step(self, inputs: Mapping[str, tuple[Box, Tensor]]) -> dict[str, Tensor]:
        """Forward, backward, synchronise, update. ``inputs``: by name, (region held, tensor). Returns the results by
        name: the loss, or outputs."""
        self.inputs = inputs
        self.results.clear()
        self._seen.clear()
        try:
            if self.around is None:
                for action in self._actions:
                    action()
            else:
                for instruction, action in zip(self.program.instructions, self._all_actions, strict=True):
                    self.around(instruction, action)
            self.wire.end()
        finally:
            self.inputs = {}
            self._values[:] = [None] * len(self._values)
        self.context.step += 1
        return dict(self.results)

    # ---- instructions as closures

    def _action(self, instruction: Instruction) -> Action | None:
        """None: there is nothing to do."""
        values, wire = self._values, self.wire
        match instruction:
            case Forward():
                return self._runner(instruction.segment, instruction.microbatch).forward(values, instruction)
            case Backward():
                runner = self._runner(instruction.segment, instruction.microbatch)
                return runner.backward(values, instruction, self._shared)
            case Post():
                return wire.post(values, instruction)
            case Start():
                return wire.start(values, instruction)
            case Wait():
                return wire.waiting(values, instruction)
            case AwaitSends():
                return wire.awaiting_sends(instruction)
            case Assemble():
                return assembly.assemble(values, self.lowered, self.rank, instruction, wire, self._images, self._own)
            case Keep():
                return assembly.keep(values, self.lowered, instruction, wire.device)
            case Empty():
                return assembly.empty(values, instruction.slot)
            case Free():
                return self._free(instruction)
            case Load():
                return self._loads([instruction])
            case Fetch():
                return self._fetch(instruction)
            case Deliver():
                return self._deliver(instruction)
            case Add():
                return self._add(instruction)
            case Result():
                return self._result(instruction)
            case Update():
                return self._update
        raise AssertionError(f"no such instruction: {instruction}")

    def _update(self) -> None:
        """Update the weights, of which ranks may still be sent what is stored here."""
        self.wire.end()
        self.update()

    def _joined(self, actions: Sequence[Action | None]) -> Iterator[Action]:
        """The actions of a step; loads that follow each other are one, as there is one for each weight."""
        rows = zip(self.program.instructions, actions, strict=True)
        for _, group in groupby(rows, lambda row: isinstance(row[0], Load)):
            run = list(group)
            if loads := [instruction for instruction, _ in run if isinstance(instruction, Load)]:
                yield self._loads(loads)
            else:
                yield from (action for _, action in run if action is not None)

    def _runner(self, segment: int, microbatch: int) -> SegmentRunner:
        key = segment, microbatch
        if key not in self._runners:
            self._runners[key] = SegmentRunner(
                self.lowered, self.rank, self.program.segments[segment], self.context, microbatch,
                self.compiler,
            )  # fmt: skip
        return self._runners[key]

    def _free(self, instruction: Free) -> Action:
        values, slots = self._values, instruction.slots
        if len(slots) == 1:
            return partial(values.__setitem__, slots[0], None)

        def run() -> None:
            for slot in slots:
                values[slot] = None

        return run

    def _loads(self, instructions: Sequence[Load]) -> Action:
        values, rows = self._values, []
        for instruction in instructions:
            tensor = self.lowered.graph.tensor[instruction.name]
            rows.append((instruction.slot, self.weights[instruction.name], dtype_of(tensor.dtype), tensor.floating))
        lasting = [(-1, torch.empty(0))] * len(rows)
        """Of each weight, where its memory is, and the leaf that stands for it."""

        def run() -> None:
            changed = []
            for k, (slot, weight, _, _) in enumerate(rows):
                place, values[slot] = lasting[k]
                if weight.data_ptr() != place:  # the first step, or somebody has set its data
                    changed.append(k)
            now = [rows[k] for k in changed]
            dtypes = [dtype for _, _, dtype, _ in now]
            leaves = cast([weight.detach() for _, weight, _, _ in now], dtypes, self._together)
            for k, (slot, weight, _, trained), leaf in zip(changed, now, leaves, strict=True):
                values[slot] = leaf.requires_grad_(trained)
                if leaf.data_ptr() == weight.data_ptr():  # no copy in another precision
                    lasting[k] = weight.data_ptr(), leaf

        return run

    def _fetch(self, instruction: Fetch) -> Action:
        values, slot, edge = self._values, instruction.slot, self.lowered.edges[instruction.edge]
        name, dtype = edge.tensor, dtype_of(self.lowered.graph.tensor[edge.tensor].dtype)
        (need,) = {entry.box for entry in edge.need if entry.device == self.rank}
        if self.lowered.graph.tensor[name].kind in ("activation", "parameter"):
            blank = torch.zeros((), dtype=dtype, device=self.context.device).expand(extent(need))

            def put() -> None:
                values[slot] = blank

            return put
        box = box_in_batch(self.lowered, name, need, instruction.microbatch)
        fixed = self.fixed.get(name)

        def run() -> None:
            held, tensor = fixed or self.inputs[name]
            part = preferred(cut(tensor, held, box))
            values[slot] = part if part.dtype == dtype else part.to(dtype)

        return run

    def _deliver(self, instruction: Deliver) -> Action:
        values, rows = self._values, []
        for w, slot in instruction.weights:
            first = w not in self._delivered
            self._delivered.add(w)
            rows.append((self.weights[self.lowered.weights[w].tensor], slot, first))
        parts = in_parts([weight.nbytes for weight, _, _ in rows])
        shared: set[Slot] | None = None
        """Those that need memory of their own. Autograd's graph is the same in every step, and so are these."""

        def run() -> None:
            nonlocal shared
            if shared is None or self.compiler is not None:
                slots = [slot for _, slot, _ in rows if values[slot] is not None]
                shared = {slot for slot in slots if is_shared(values[slot], self._seen)}
            for part in parts:
                give([rows[k] for k in part])

        def give(some: Sequence[tuple[Tensor, Slot, bool]]) -> None:
            assert shared is not None
            if self._together:
                there = [(weight.dtype, slot) for weight, slot, _ in some if values[slot] is not None]
                gradients = cast([values[slot] for _, slot in there], [dtype for dtype, _ in there], True)
                for (_, slot), gradient in zip(there, gradients, strict=True):
                    values[slot] = gradient
            for weight, slot, first in some:
                gradient, values[slot] = values[slot], None
                if gradient is None:  # the loss does not depend on it
                    gradient = torch.zeros_like(weight)
                elif gradient.dtype != weight.dtype:
                    gradient = gradient.to(weight.dtype)
                if not first and weight.grad is not None:
                    weight.grad += gradient
                elif slot in shared:
                    weight.grad = gradient.clone(memory_format=torch.contiguous_format)
                else:
                    weight.grad = gradient

        return run

    def _add(self, instruction: Add) -> Action:
        values, slot, total = self._values, instruction.slot, instruction.total

        def run() -> None:
            before = values[total]
            values[total] = values[slot] if before is None else before + values[slot]

        return run

    def _result(self, instruction: Result) -> Action:
        values, slot, name, results = self._values, instruction.slot, instruction.name, self.results

        def take() -> None:
            results[name] = values[slot]

        if not instruction.kept:
            return take
        kept = self.fixed[name][1]

        def keep_buffer() -> None:
            value = values[slot]
            if value.data_ptr() != kept.data_ptr():  # else it has been updated in place
                kept.copy_(value)

        return keep_buffer
