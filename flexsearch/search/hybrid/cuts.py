"""Where a graph can be cut into stages, and the cut that makes the slowest stage as fast as possible."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexsearch.graph import OperatorGraph
from flexsearch.search.hybrid.constants import NARROW, SHORT
from flexsearch.strategy.weights import has_weights, is_heavy


class Cuts:
    """Cuts of one graph: before which operators a stage may begin. ``native``: only where PyTorch's pipelining can."""

    def __init__(self, graph: OperatorGraph, native: bool = False) -> None:
        self.graph, self.native = graph, native
        self._allowed: dict[int, list[int]] = {}

    @cached_property
    def crossing(self) -> npt.NDArray[np.int64]:
        """Bytes of activations that are made before each operator and read from it on; more than 0 behind the first
        operator that makes one."""
        graph = self.graph
        change = np.zeros(len(graph.operators) + 1, np.int64)
        for tensor in graph.of_kind("activation"):
            readers = [operator for operator, _ in graph.consumers[tensor.name]]
            if readers:
                change[graph.producer[tensor.name] + 1] += tensor.nbytes
                change[max(readers) + 1] -= tensor.nbytes
        return change.cumsum()[:-1]

    @cached_property
    def _shared(self) -> npt.NDArray[np.bool_]:
        """By operator: whether a stage beginning there would part readers of one weight."""
        graph, change = self.graph, np.zeros(len(self.graph.operators) + 1, np.int64)
        for tensor in graph.of_kind("parameter"):
            readers = [operator for operator, _ in graph.consumers[tensor.name]]
            if len(set(readers)) > 1:
                change[min(readers) + 1] += 1
                change[max(readers) + 1] -= 1
        return change.cumsum()[:-1] > 0

    @cached_property
    def _inside(self) -> npt.NDArray[np.bool_]:
        """By operator: whether a stage beginning there would part a module that computes with weights itself."""
        graph, spans = self.graph, dict[str, list[int]]()
        weighted = {op.module for i, op in enumerate(graph.operators) if has_weights(graph, i)}
        for i, op in enumerate(graph.operators):
            parts = op.module.split(".")
            for path in (".".join(parts[: k + 1]) for k in range(len(parts))):
                if path in weighted:
                    spans.setdefault(path, [i, i])[1] = i
        change = np.zeros(len(graph.operators) + 1, np.int64)
        for first, last in spans.values():
            change[first + 1] += 1
            change[last + 1] -= 1
        return change.cumsum()[:-1] > 0

    @cached_property
    def _heavy(self) -> list[int]:
        """Operators that are worth a stage; all, if none is."""
        count = len(self.graph.operators)
        return [i for i in range(count) if is_heavy(self.graph, i)] or list(range(count))

    @cached_property
    def short(self) -> bool:
        """Whether there are so few places that any may be a cut."""
        return self._heavy[-1] - self._heavy[0] <= SHORT

    def allowed(self, stages: int) -> list[int]:
        """Operators before which a stage may begin, ascending from 0: the narrowest places, at least ``stages`` of them
        if there are. Where it can be helped, readers of one weight stay together."""
        if stages not in self._allowed:
            self._allowed[stages] = self._narrow(stages)
        return self._allowed[stages]

    def _narrow(self, stages: int) -> list[int]:
        inner = list(range(self._heavy[0] + 1, self._heavy[-1] + 1))
        if self.native:
            inner = [i for i in inner if not self._inside[i]]
        if self.short:
            return [0, *inner]
        least = min((int(self.crossing[i]) for i in inner), default=0)
        for apart in (self._shared, np.zeros_like(self._shared)):
            for factor in NARROW:
                narrow = [i for i in inner if self.crossing[i] <= factor * least and not apart[i]]
                if len(narrow) >= stages - 1:
                    return [0, *narrow]
        return list(range(len(self.crossing)))

    @cached_property
    def depth(self) -> int:
        """Into how many stages the graph can be cut at its narrowest places."""
        return len(self.allowed(2))

    @cached_property
    def _balances(self) -> dict[bytes, _Balance]:
        return {}

    def balanced(self, seconds: npt.ArrayLike, stages: int) -> tuple[int, ...]:
        """First operator of each of ``stages`` stages, so that the slowest takes as short as possible. ``seconds``: of
        each operator; with a row for each stage where these differ. A dynamic program over the allowed places
        (PipeDream, SOSP 2019, section 3.1, with the devices of each stage given)."""
        places = self.allowed(stages)
        rows = np.atleast_2d(np.asarray(seconds, np.float64))
        ends = np.concatenate([np.zeros((len(rows), 1)), rows.cumsum(axis=1)], axis=1)[:, [*places, rows.shape[1]]]
        table = _Balance(ends)
        if len(rows) == 1:  # more stages go on from fewer
            table = self._balances.setdefault(ends.tobytes(), table)
        return tuple(places[k] for k in table.first(stages))


class _Balance:
    """The dynamic program, for one number of stages after the other. ``ends``: when each place is reached, by stage
    (one row: all are alike)."""

    def __init__(self, ends: npt.NDArray[np.float64]) -> None:
        self.ends, self.count = ends, ends.shape[1] - 1
        self.slowest = ends[0, 1:].copy()
        """Of the runs up to each place, divided into as many stages as have been looked at."""
        self._impossible = ~np.tri(self.count - 1, dtype=bool)
        """By end and begin of the last stage: it would begin behind its end."""
        self.begins: list[npt.NDArray[np.int64]] = []
        """By stage but the first: where the last one begins in the best division of each run."""

    def first(self, stages: int) -> list[int]:
        """Places where the stages begin, ascending from 0."""
        while len(self.begins) < stages - 1:
            self._divide()
        first, at = [], self.count - 1
        for begins in reversed(self.begins[: stages - 1]):
            first.append(int(begins[at]))
            at = first[-1] - 1
        return [0, *reversed(first)]

    def _divide(self) -> None:
        """One stage more."""
        count, done = self.count, self.ends[(len(self.begins) + 1) % len(self.ends)]
        longest = np.maximum(self.slowest[None, :-1], done[2:, None] - done[None, 1:-1])  # (end, begin of the last)
        longest[self._impossible] = np.inf
        best = longest.argmin(axis=1)
        self.begins.append(np.concatenate([[0], best + 1]))
        self.slowest = np.concatenate([[np.inf], longest[np.arange(count - 1), best]])
