"""Which layers PyTorch's ``parallelize_module`` splits, and how far their outputs flow before they are whole again.

``ColwiseParallel`` splits a linear layer by output features, ``RowwiseParallel`` by input features, and an embedding by
its rows. Between a column-parallel layer and the row-parallel one that takes its output, operators run on local
tensors; that is right only where each of them needs nothing but its own part. Where one needs more, the layer's output
is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexsearch.errors import StrategyError
from flexsearch.graph import Operator, OperatorGraph
from flexsearch.strategy.config import OperatorConfig, make_config
from flexsearch.strategy.propagate import Propagation
from flexsearch.strategy.weights import has_weights

NATIVE = "Search with `flexsearch optimize --space native` for plans that these programs express."
"""What to do about a plan that they do not."""


@dataclass(frozen=True)
class Flow:
    """One group of a tensor-parallel plan. ``configs``: of every operator on the positions of the group, as PyTorch
    runs it. ``gathered``: split layers whose output is made whole; ``cut``: those by input features whose input is
    whole; both by index. ``heads``: modules that divide split features into heads."""

    configs: tuple[OperatorConfig, ...]
    gathered: frozenset[int]
    cut: frozenset[int]
    heads: tuple[str, ...]


def flow(
    graph: OperatorGraph, count: int, split: Mapping[int, str], stage_of: Sequence[int] = ()
) -> Flow:  # fmt: skip
    """Groups of ``count`` devices in which the operators of ``split`` are split along one axis each, and nothing else
    is told. ``stage_of``: by operator; what passes from stage to stage is whole."""
    walk = _Walk(graph, count, split, stage_of)
    gathered: set[int] = set()
    while leaks := walk.leaks(frozenset(gathered)):
        gathered |= leaks
    heads = dict.fromkeys(
        graph.operators[i].module for i in walk.following if graph.operators[i].kind == "view" and walk.divides(i)
    )
    configs = tuple(walk.configs[i] for i in range(len(graph.operators)))
    return Flow(configs, frozenset(gathered), frozenset(walk.cut), tuple(heads))


def check_split(graph: OperatorGraph, operator: int, axis: str) -> None:
    """Raise StrategyError unless ``parallelize_module`` can split an operator with weights along an axis."""
    op = graph.operators[operator]
    names = [name for name in op.inputs if graph.tensor[name].kind == "parameter"]
    layer = op.kind in ("linear", "embedding") and op.roles[axis] in ("parameter", "reduction")
    own = bool(op.module) and all(_own(graph, op, name) for name in names)
    beside = next(iter(computed_beside(graph, operator)), None) if op.kind == "linear" else None
    if not layer or not own or beside is not None:
        why = f"reads {names[0]!r}"
        if not layer:
            why = f"is a {op.kind} split over {axis!r} ({op.roles[axis]})"
        elif beside is not None:
            why = f"is a part of {op.module!r}, which is no nn.Linear: it computes {graph.operators[beside].name!r} too"
        raise StrategyError(
            f"operator {op.name!r} {why}; parallelize_module splits nn.Linear and nn.Embedding by features or rows",
            NATIVE,
        )


def computed_beside(graph: OperatorGraph, operator: int) -> list[int]:
    """The neighbours of a layer that its own module computes too."""
    op = graph.operators[operator]
    makers = [graph.producer[name] for name in op.inputs if name in graph.producer]
    readers = [reader for name in op.outputs for reader, _ in graph.consumers[name]]
    return [
        i for i in (*makers, *readers)
        if graph.operators[i].module == op.module and graph.operators[i].kind != op.kind
    ]  # fmt: skip


def _own(graph: OperatorGraph, op: Operator, parameter: str) -> bool:
    """Whether a parameter is the layer's own, maybe tied to others': it has another name only where another reads it
    too, and is no part of a module inside of the layer's."""
    owner = parameter.rpartition(".")[0]
    readers = {graph.operators[i].module for i, _ in graph.consumers[parameter]}
    return owner == op.module or (len(readers) > 1 and not owner.startswith(f"{op.module}."))


class _Walk:
    """The operators in order, again for each set of layers whose output is gathered."""

    def __init__(
        self, graph: OperatorGraph, count: int, split: Mapping[int, str], stage_of: Sequence[int]
    ) -> None:  # fmt: skip
        self.graph, self.count, self.split = graph, count, split
        self.stage_of = stage_of or [0] * len(graph.operators)
        self.propagation = Propagation(graph)
        self.configs: dict[int, OperatorConfig] = {}
        self.cut: set[int] = set()
        self.following: dict[int, frozenset[int]] = {}
        """Operators whose output is split, and the layers that this comes from."""

    def leaks(self, gathered: frozenset[int]) -> set[int]:
        """Layers whose split output meets an operator that needs it whole. ``gathered``: those that are whole."""
        self.configs, self.cut, self.following = {}, set(), {}
        leaking: set[int] = set()
        for i, op in enumerate(self.graph.operators):
            sources = self._sources(i)
            origins = frozenset[int]().union(*(self.following[source] for source in sources))
            if i in self.split:
                axis = self.split[i]
                self.configs[i] = make_config(op, {axis: self.count}, range(self.count))
                if op.roles[axis] == "reduction":
                    fits = all(config.degree(axis) == self.count for config in self._implied(i, sources))
                    leaking |= origins if not fits else set()
                    if not sources:
                        self.cut.add(i)
                    continue
                leaking |= origins
                if i not in gathered:
                    self.following[i] = frozenset({i})
                    leaking |= {i} if op.sizes[axis] % self.count else set()
            elif (config := self._follows(i, sources)) is not None:
                self.configs[i], self.following[i] = config, origins
            else:
                self.configs[i] = make_config(op, {}, range(self.count))
                leaking |= origins
        return leaking

    def divides(self, operator: int) -> bool:
        """Whether an operator divides a split dimension into several."""
        op = self.graph.operators[operator]
        axes = [axis for axis, _ in self.configs[operator].degrees]
        return any(d.merged and axis in d.axes for axis in axes for d in op.access.inputs[0].dimensions)

    def _sources(self, i: int) -> list[int]:
        """Operators whose split output an operator reads."""
        producers = (self.graph.producer.get(name) for name in self.graph.operators[i].inputs)
        return list(dict.fromkeys(p for p in producers if p is not None and p in self.following))

    def _implied(self, i: int, sources: Sequence[int]) -> list[OperatorConfig]:
        """What an operator would be to take the parts of each of its sources as they are."""
        return [
            self.propagation.over(source, self.configs[source], link)
            for source in sources
            for link in self.propagation.links[source]
            if link.target == i and link.forward
        ]

    def _follows(self, i: int, sources: Sequence[int]) -> OperatorConfig | None:
        """The config of an operator that works on its own part of all that it reads; None: it cannot."""
        op = self.graph.operators[i]
        implied = self._implied(i, sources)
        if not implied or has_weights(self.graph, i) or any(c != implied[0] for c in implied):
            return None
        if implied[0].parts != self.count or any(self.stage_of[s] != self.stage_of[i] for s in sources):
            return None
        axis = implied[0].degrees[0][0]
        split = {name for s in sources for name in self.graph.operators[s].outputs}
        whole = any(  # of what every part reads, each rank would have a part of the gradient alone
            axis in operand.names() or name in self.graph.differentiable
            for operand, name in zip(op.access.inputs, op.inputs, strict=True) if name not in split
        )  # fmt: skip
        kept = all(axis in operand.names() for operand in op.access.outputs)
        touched = (d for o in (*op.access.inputs, *op.access.outputs) for d in o.dimensions if axis in d.axes)
        local = all(d.plain or d.merged for d in touched) and op.sizes[axis] % self.count == 0
        return implied[0] if kept and local and not whole else None
