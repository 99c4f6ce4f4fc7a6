"""Stages as sets of modules: what a rank of a pipeline keeps of the model, and what it gets from the stage before.

Each rank runs the whole forward of the model on the whole batch of its replica, with stand-ins for the modules of other
stages. What the model computes outside of these modules (masks, positions, additions) is computed on every rank that
needs it, from the batch and from what modules of earlier stages returned; these tensors pass from stage to stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from flexsearch.errors import StrategyError
from flexsearch.graph import Operator, OperatorGraph
from flexsearch.strategy.weights import has_weights, is_heavy

NATIVE = "Search with `flexsearch optimize --space native`, or move the border of the stage."
RANDOM: Final = ("dropout", "uniform", "normal")
"""Operators that give something else each time they are computed."""


@dataclass(frozen=True)
class StageModules:
    """``modules``: of each stage, in the order in which they run. ``entering``: of each stage, the modules of earlier
    ones whose outputs it gets. ``handed``: by these modules, the sizes of one sample of each tensor that passes and
    depends on weights.
    ``shared``: modules that several stages run, which have no weights. ``tied``: trained weights that several stages
    read, each as its name by stage. ``outside``: weights that are in no module of a stage (a table that the model hands
    to a module of one), and the stage that reads each. ``writable``: modules whose outputs the model itself computes
    with, outside of the modules of stages, so that it may write over them. ``beside``: operators of stages after the
    first that are computed from weights, and beside what their stage receives."""

    modules: tuple[tuple[str, ...], ...] = ()
    entering: tuple[tuple[str, ...], ...] = ()
    handed: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    tied: tuple[dict[int, str], ...] = ()
    outside: dict[str, int] = field(default_factory=dict)
    writable: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


def stage_modules(graph: OperatorGraph, stage_of: Sequence[int]) -> StageModules:
    """The stages of ``stage_of`` (by operator) as modules. Raises StrategyError where a model cannot be taken apart so,
    by the first operator that is in the way: one outside of the modules that has weights, is worth a stage or draws
    random numbers."""
    stages = _Stages(graph, stage_of)
    if empty := [stage for stage, names in enumerate(stages.modules) if not names]:
        raise StrategyError(f"stages: stage {empty[0]} has no module of the model", NATIVE)
    needed = [stages.needed(stage) for stage in range(len(stages.modules))]
    for stage in reversed(range(1, len(needed))):  # what comes from further back passes through
        needed[stage - 1] |= {name for name in needed[stage] if stages.home(name) < stage - 1}
    entering = [sorted(names, key=lambda name: graph.producer[name]) for names in needed]
    if apart := [stage for stage, names in enumerate(entering) if stage and not names]:
        raise StrategyError(f"stages: stage {apart[0]} computes nothing from what earlier ones return", NATIVE)
    stages.check()
    handed: dict[str, dict[str, tuple[int, ...]]] = {}
    computed = _computed(graph)
    for name in (name for names in entering for name in names):
        tensors = handed.setdefault(stages.module_of(name), {})
        if name in computed:
            tensors[name] = graph.tensor[name].shape[1:]
    return StageModules(
        tuple(tuple(names) for names in stages.modules),
        tuple(tuple(dict.fromkeys(stages.module_of(name) for name in names)) for names in entering),
        {module: tuple(shapes.values()) for module, shapes in handed.items()},
        stages.shared(),
        _tied(graph, stages),
        stages.outside(),
        stages.writable(),
        stages.beside(computed),
    )


@dataclass
class _Stages:
    """``paths``: by operator, the module that one stage has whole and whose parent it has not; "" for operators
    outside of such modules, None for those of the loss, which is no part of the model."""

    graph: OperatorGraph
    stage_of: Sequence[int]
    paths: list[str | None] = field(init=False)
    modules: list[dict[str, None]] = field(init=False)
    repeated: dict[int, set[int]] = field(default_factory=dict)
    """Operators outside of modules, and the stages that compute them."""

    def __post_init__(self) -> None:
        homes: dict[str, set[int]] = {}
        for op, stage in zip(self.graph.operators, self.stage_of, strict=True):
            for path in _path(op) if op.module != "loss" else ():
                homes.setdefault(path, set()).add(stage)
        self.paths, self.modules = [], [{} for _ in range(1 + max(self.stage_of))]
        lists = _lists(self.graph)
        for op, stage in zip(self.graph.operators, self.stage_of, strict=True):
            paths = (path for path in _path(op) if path and path not in lists)
            whole = next((path for path in paths if len(homes.get(path, ())) == 1), "")
            self.paths.append(None if op.module == "loss" else whole)
            if self.paths[-1]:
                self.modules[stage][whole] = None

    def home(self, tensor: str) -> int:
        """The stage that makes an activation."""
        return self.stage_of[self.graph.producer[tensor]]

    def module_of(self, tensor: str) -> str:
        """The module of a stage that returns an activation; "" if it is made outside of them."""
        return self.paths[self.graph.producer[tensor]] or ""

    def needed(self, stage: int) -> set[str]:
        """What a stage gets of what the modules of earlier ones return. Notes what it computes outside of modules."""
        graph, last = self.graph, stage == len(self.modules) - 1
        needed: set[str] = set()
        seen: set[int] = set()
        todo = [i for i, path in enumerate(self.paths) if path and self.stage_of[i] == stage]
        if last:
            todo += [graph.producer[graph.loss], *(i for i, path in enumerate(self.paths) if path is None)]
        while todo:
            i = todo.pop()
            if i in seen:
                continue
            seen.add(i)
            if self.paths[i] == "":
                self.repeated.setdefault(i, set()).add(stage)
            for name in graph.operators[i].inputs:
                if name not in graph.producer:
                    continue
                if not self.module_of(name):
                    todo.append(graph.producer[name])
                elif self.home(name) < stage:
                    needed.add(name)
        return needed

    def check(self) -> None:
        """Raise StrategyError where ranks would compute something else than the plan, or too much of it."""
        for i, op in enumerate(self.graph.operators):
            if self.paths[i] != "":
                continue
            where = f"module {op.module!r}" if op.module else "the model"
            says = f"stages: operator {op.name!r} is computed by {where} itself, which is in several stages; "
            if has_weights(self.graph, i):
                raise StrategyError(says + "each rank of PyTorch's pipeline would train weights of its own", NATIVE)
            if len(self.repeated.get(i, ())) > 1 and (op.kind in RANDOM or is_heavy(self.graph, i)):
                why = "draw other numbers for it" if op.kind in RANDOM else "compute all of it"
                raise StrategyError(f"{says}{len(self.repeated[i])} ranks would {why}", NATIVE)

    def shared(self) -> tuple[str, ...]:
        """Modules that compute what is outside of the modules of stages: an activation that several layers use."""
        outside = zip(self.graph.operators, self.paths, strict=True)
        return tuple(dict.fromkeys(op.module for op, path in outside if path == "" and op.module))

    def outside(self) -> dict[str, int]:
        """Weights in no module of a stage that operators of one stage read."""
        inside = tuple(f"{name}." for names in self.modules for name in names)
        weights = [t.name for t in self.graph.of_kind("parameter") if not t.name.startswith(inside)]
        readers = {name: {self.stage_of[reader] for reader, _ in self.graph.consumers[name]} for name in weights}
        return {name: stages.pop() for name, stages in readers.items() if len(stages) == 1}

    def writable(self) -> tuple[str, ...]:
        """Modules whose outputs operators read that are in no module of one stage."""
        outside = (i for i, path in enumerate(self.paths) if path == "")
        read = (name for i in outside for name in self.graph.operators[i].inputs if name in self.graph.producer)
        return tuple(dict.fromkeys(module for name in read if (module := self.module_of(name))))

    def beside(self, computed: set[str]) -> tuple[str, ...]:
        """Operators that trained weights lead to and nothing that their stage receives, unless one operator alone, of
        that stage, reads them. ``computed``: what depends on weights."""
        names = []
        for stage in range(1, len(self.modules)):
            reached: set[str] = set()
            for op, path, home in zip(self.graph.operators, self.paths, self.stage_of, strict=True):
                if path and home < stage:
                    reached.update(computed.intersection(op.outputs))
                elif not path or home == stage:
                    if not reached.isdisjoint(op.inputs):
                        reached.update(op.outputs)
                    elif path and not computed.isdisjoint(op.outputs) and not self._read_once(op, stage):
                        names.append(op.name)
        return tuple(names)

    def _read_once(self, op: Operator, stage: int) -> bool:
        """Whether a single operator, of that stage or of no module, reads what ``op`` makes."""
        readers = [i for name in op.outputs for i, _ in self.graph.consumers[name]]
        return len(readers) == 1 and (not self.paths[readers[0]] or self.stage_of[readers[0]] == stage)


def _computed(graph: OperatorGraph) -> set[str]:
    """What depends on weights in a way that has a gradient."""
    computed = {t.name for t in graph.of_kind("parameter") if t.floating}
    for op in graph.operators:
        if op.kind != "detach" and computed.intersection(op.inputs):
            computed.update(name for name in op.outputs if graph.tensor[name].floating)
    return computed


def _lists(graph: OperatorGraph) -> set[str]:
    """Modules all of whose operators are in numbered parts: lists, which nobody calls, or sequences of calls."""
    inside: dict[str, bool] = {}
    for op in graph.operators:
        path = list(_path(op))
        for module, part in pairwise(path):
            inside[module] = inside.get(module, True) and part.rpartition(".")[2].isdigit()
        inside[path[-1]] = False
    return {module for module, numbered in inside.items() if numbered}


def _path(op: Operator) -> Iterable[str]:
    """The modules that an operator is in, from the model ("") on."""
    parts = op.module.split(".") if op.module else []
    return (".".join(parts[:k]) for k in range(len(parts) + 1))


def _tied(graph: OperatorGraph, stages: _Stages) -> tuple[dict[int, str], ...]:
    """The weights that several stages read. Raises StrategyError where their gradients cannot be added up."""
    tied = []
    for tensor in graph.of_kind("parameter"):
        readers = [graph.operators[reader] for reader, _ in graph.consumers[tensor.name]]
        at = [stages.stage_of[graph.index[op.name]] for op in readers]
        if len(set(at)) < 2:
            continue
        if other := next((op for op in readers if op.kind not in ("linear", "embedding")), None):
            raise StrategyError(
                f"stages: stages {min(at)} and {max(at)} read {tensor.name!r}, and {other.name!r}, one of the readers, "
                "is neither a linear layer nor an embedding, which can hold a weight each of their own",
                NATIVE,
            )
        if tensor.requires_grad:
            weight = tensor.name.rpartition(".")[2]
            tied.append({stage: f"{op.module}.{weight}" for stage, op in zip(at, readers, strict=True)})
    return tuple(tied)
