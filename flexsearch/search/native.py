"""The search among plans that PyTorch's own parts express: meshes of data x tensor, a form for each module.

There are few of them: for every factoring of the devices and every way to keep states, the forms of the modules are
improved one sort at a time (all "layers.*.mlp.up_proj" at once), from Megatron's and from output features on, until no
change of one sort helps.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import OperatorGraph
from flexsearch.search.budget import Budget
from flexsearch.search.evaluate import Configs, Evaluation, Evaluator, better, by_rank
from flexsearch.search.tuning import candidates
from flexsearch.strategy import Options, Prediction, Search, States, Strategy
from flexsearch.strategy.baselines import in_rows, inside_group
from flexsearch.strategy.native import torch_plan
from flexsearch.strategy.tensor_parallel import check_split, flow
from flexsearch.strategy.weights import has_weights
from flexsearch.topology import Topology

Split = Mapping[int, str]
"""Operator (by index) -> the axis along which its layer is split."""


@dataclass(frozen=True)
class NativeResult:
    """``strategy``: the best plan; ``evaluation``: what it costs. ``plans``: so many were simulated."""

    strategy: Strategy
    evaluation: Evaluation
    plans: int
    elapsed_s: float
    stopped: str


class _Over(Exception):
    """The budget is used up."""


def search_native(
    graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, *, budget_s: float | None = None,
    plans: int | None = None, on_progress: Callable[[int, float], None] | None = None,
) -> NativeResult:  # fmt: skip
    """The fastest plan of one stage and one microbatch on all devices that ``torch_plan`` accepts, found within
    ``budget_s`` seconds or ``plans`` simulated plans. ``on_progress``: called with the number of plans and the best
    time (s). Raises StrategyError, with the reason, if the model has no such plan here."""
    return _NativeSearch(graph, topology, costs, options, Budget(budget_s, plans), on_progress).run()


class _NativeSearch:
    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: Costs, options: Options, budget: Budget,
        on_progress: Callable[[int, float], None] | None,
    ) -> None:  # fmt: skip
        self.graph, self.topology, self.budget, self.on_progress = graph, topology, budget, on_progress
        self.evaluate = Evaluator(graph, topology, costs, options)
        self.options = candidates(self.evaluate.lowering, options)
        self.weighted = frozenset(i for i in range(len(graph.operators)) if has_weights(graph, i))
        self.began, self.plans = time.monotonic(), 0
        self.best: tuple[Evaluation, Strategy] | None = None
        self.refused: StrategyError | None = None

    def run(self) -> NativeResult:
        stopped = "splitting one kind of module differently makes no plan faster"
        try:
            starts: list[tuple[tuple[bool, float], int, int, int, dict[int, str]]] = []
            for data, tensor in self._meshes():
                for split in self._starts(tensor):
                    if (start_evaluation := self._best_states(data, tensor, split)[2]) is not None:
                        starts.append((by_rank(start_evaluation), len(starts), data, tensor, split))
            for _, _, data, tensor, split in sorted(starts, key=lambda start: start[:2]):
                self._improve(data, tensor, split)
        except _Over:
            stopped = "the budget was used up"
        except KeyboardInterrupt:
            if self.best is None:
                raise
            stopped = "the search was interrupted"
        if self.best is None:
            assert self.refused is not None
            raise self.refused
        evaluation, strategy = self.best
        strategy.search = Search(seed=0, proposals=self.plans, start="native plans")
        return NativeResult(strategy, evaluation, self.plans, time.monotonic() - self.began, stopped)

    def _meshes(self) -> Iterator[tuple[int, int]]:
        """(data, tensor) of all meshes of all devices, the largest data parallelism first."""
        count, hosts = len(self.topology.devices), len(self.topology.hosts)
        inside = [tensor for tensor in range(1, count + 1) if count % tensor == 0]
        for tensor in sorted(inside, key=lambda n: (n > count // hosts and hosts < count, n)):
            if tensor == 1 or self._splits(tensor):
                yield count // tensor, tensor

    def _starts(self, tensor: int) -> list[dict[int, str]]:
        """Megatron's splits, and all modules by output features, which are gathered at once."""
        if tensor == 1:
            return [{}]
        columns = {
            i: axis for members, axes in self._splits(tensor).items() for i in members
            for axis in axes if self.graph.operators[i].roles[axis] == "parameter"
        }  # fmt: skip
        starts = [self._megatron(tensor), columns]
        return starts[: 1 + (starts[0] != starts[1])]

    def _improve(self, data: int, tensor: int, split: dict[int, str]) -> None:
        """The best plan of one mesh from a split on: how states are kept, the forms of the modules, the buckets."""
        states, options, now = self._best_states(data, tensor, split)
        improved = tensor > 1
        while improved:
            improved = False
            for members, axes in self._splits(tensor).items():
                for axis in ("", *axes):
                    other = {i: a for i, a in split.items() if i not in members}
                    other |= {i: axis for i in members} if axis else {}
                    evaluation = self._evaluate(data, tensor, other, states, options) if other != split else None
                    if evaluation is not None and (now is None or better(evaluation, now)):
                        split, now, improved = other, evaluation, True
        for choice in self.options:
            tuned = options.model_copy(update={"bucket_bytes": choice.bucket_bytes})
            if tuned != options:
                self._evaluate(data, tensor, split, states, tuned)
        self._best_states(data, tensor, split)

    def _best_states(
        self, data: int, tensor: int, split: Split
    ) -> tuple[States, Options, Evaluation | None]:  # fmt: skip
        """How states are best kept under a split; what ``fully_shard`` and the DDP form express."""
        usual = self.options[0].model_copy(update={"reshard_after_forward": False})
        ways = [(States.WHOLE, usual)]
        if data > 1:
            ways += [(States.WEIGHTS, usual)]
            ways += [(States.WEIGHTS, usual.model_copy(update={"reshard_after_forward": True}))]
            if tensor == 1 and usual.precision == "as-is":
                ways.append((States.OPTIMIZER, usual))
        best: tuple[States, Options, Evaluation | None] = (*ways[0], None)
        for states, options in ways:
            evaluation = self._evaluate(data, tensor, split, states, options)
            if evaluation is not None and (best[2] is None or better(evaluation, best[2])):
                best = states, options, evaluation
        return best

    def _evaluate(
        self, data: int, tensor: int, split: Split, states: States, options: Options
    ) -> Evaluation | None:  # fmt: skip
        """What a plan costs; it is kept if it is the best. None: the modules cannot be split so."""
        configs = self._configs(data, tensor, split, states)
        strategy = self._strategy(configs, options)
        try:
            torch_plan(strategy, self.graph)
        except StrategyError as error:
            self.refused = error
            return None
        self.evaluate.use(options)
        evaluation = self.evaluate(configs)
        self.plans += 1
        if self.best is None or better(evaluation, self.best[0]):
            strategy.prediction = Prediction(iteration_s=evaluation.time_s)
            self.best = evaluation, strategy
        if self.on_progress is not None:
            self.on_progress(self.plans, self.best[0].time_s)
        late = self.budget.seconds is not None and time.monotonic() - self.began > self.budget.seconds
        if late or (self.budget.proposals is not None and self.plans >= self.budget.proposals):
            raise _Over
        return evaluation

    def _configs(self, data: int, tensor: int, split: Split, states: States) -> Configs:
        """The plan as PyTorch runs it."""
        inner = list(flow(self.graph, tensor, split).configs)
        rows = in_rows(self.graph, self.topology, inner, tensor, data)
        return tuple(replace(c, states=states) if i in self.weighted else c for i, c in enumerate(rows))

    def _strategy(self, configs: Configs, options: Options) -> Strategy:
        named = {op.name: config for op, config in zip(self.graph.operators, configs, strict=True)}
        return Strategy.make(self.graph, self.topology, named, options)

    def _megatron(self, tensor: int) -> dict[int, str]:
        """Megatron's splits, as far as modules can be split so."""
        inner = inside_group(self.graph, self.topology, tensor)
        allowed = {i: axes for members, axes in self._splits(tensor).items() for i in members}
        return {
            i: axis
            for i, axes in allowed.items() for axis, parts in inner[i].degrees
            if parts == tensor and axis in axes
        }  # fmt: skip

    def _splits(self, tensor: int) -> dict[tuple[int, ...], tuple[str, ...]]:
        """Sorts of modules, as their operators, and the axes along which they can be split in so many parts."""
        sorts: dict[str, list[int]] = {}
        for i in sorted(self.weighted):
            sorts.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", self.graph.operators[i].module), []).append(i)
        splits = {}
        for members in sorts.values():
            op = self.graph.operators[members[0]]
            axes = [a for a in op.splittable if self._possible(members, a, tensor)]
            if axes:
                splits[tuple(members)] = tuple(axes)
        return splits

    def _possible(self, members: list[int], axis: str, tensor: int) -> bool:
        try:
            for i in members:
                check_split(self.graph, i, axis)
        except (StrategyError, KeyError):
            return False
        return all(self.graph.operators[i].sizes[axis] >= tensor for i in members)
