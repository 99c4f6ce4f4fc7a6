"""Floor 5: training under synchronisation recipes, on simulated ranks, against simulated time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from flexsearch.cost.uncertainty import Estimate
from flexsearch.errors import FlexsearchError, RecipeError, RuntimeFailure
from flexsearch.graph import OperatorGraph
from flexsearch.report.convergence import Convergence, Measure, Run
from flexsearch.search.recipes import EXACT, combinations
from flexsearch.setting import Setting
from flexsearch.simulate.training import Workers
from flexsearch.strategy import Strategy
from flexsearch.sync import Recipe, parse_recipe
from flexsearch.sync.options import number, whole
from flexsearch.sync.record import Epoch
from flexsearch.topology import Topology

if TYPE_CHECKING:
    from torch import nn

    from flexsearch.runtime.replicas import Dataset, Training
    from flexsearch.runtime.replicas.replicas import Loss

OnEpoch = Callable[[str, Epoch], None]
"""Called with the recipe and what it reached."""


PARENTS: Final = 2
"""Combinations of two are tried with the best single recipes, of three with the best of two: with so many. Taken: on 16
workers that leaves about a third of the combinations."""


@dataclass(frozen=True)
class Cluster:
    """Where training is simulated. ``workers``: the first devices of the topology (None: all); those after them can be
    dedicated servers. ``step_s``: seconds that a worker computes in a step (None: as simulated for its device).
    ``slow``: by worker, times as long. ``jitter``: each step takes up to that share longer, by chance."""

    topology: Topology
    workers: int | None = None
    step_s: float | None = None
    slow: Mapping[int, float] | None = None
    jitter: float = 0.0

    def __post_init__(self) -> None:
        most = len(self.topology.devices)
        if most < 2:
            raise RecipeError(f"topology {self.topology.name} has one device", "Use a topology with several.")
        if self.workers is not None:
            whole("number of workers", self.workers, 2, most)
        if self.step_s is not None:
            number("time of a step", self.step_s)
        number("jitter", self.jitter, least=True)
        for worker, factor in (self.slow or {}).items():
            whole("number of a slow worker", worker, 0, self.size - 1)
            number("factor of a slow worker", factor)

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.workers if self.workers is not None else len(self.topology.devices)


def converge(
    recipes: Sequence[str | Recipe] = (),
    model: str | nn.Module = "mlp",
    dataset: str | Dataset = "text",
    topology: str | Topology = "ethernet-1g-4",
    *,
    loss: Loss | None = None,
    workers: int | None = None,
    epochs: int = 3,
    batch: int = 32,
    optimizer: Literal["sgd", "adam"] = "sgd",
    lr: float | None = None,
    momentum: float = 0.9,
    seed: int = 0,
    target_loss: float | None = None,
    target_accuracy: float | None = None,
    allow: Sequence[str] = (),
    step_s: float | None = None,
    slow: Mapping[int, float] | None = None,
    jitter: float = 0.0,
    on_epoch: OnEpoch | None = None,
) -> Convergence:
    """Train a model under each of ``recipes`` (docs/synchronisation.md), from the same weights with the same batches,
    and report loss and accuracy against simulated time.

    ``recipes``: as text ("local-sgd:period=16+gossip"), objects, or strategy files, whose plans compute what data
    parallelism does. ``model``: "mlp", "cnn", MODULE:CALLABLE, or a module, with its ``loss`` of outputs and targets.
    ``dataset``: "digits" (needs scikit-learn), "text", "cifar10:FOLDER", or a ``Dataset``. ``batch``: samples of a
    worker's step. ``lr``: of "sgd" by default 0.1, of "adam" 0.001. ``target_loss`` or ``target_accuracy`` (share): to
    which times are compared; by default the lowest loss that all of ``recipes`` reach. ``allow``: names of recipes, as
    of ``optimize``, or "all": the one that is first at the target (``Convergence.first``) is looked for among all exact
    recipes, all allowed single ones, and combinations with the best of these. Each is trained until it has reached the
    target or, whatever comes, can no longer be the first. ``recipes``, by default all-reduce, are trained to the end.
    ``workers``, ``step_s``, ``slow``, ``jitter``: see :class:`Cluster`.
    Raises RecipeError for a recipe that makes no sense or that the workers cannot follow, DatasetError,
    ImportModelError, TopologyError; RuntimeFailure if training diverges."""
    from flexsearch.runtime.replicas import Training, load_dataset, load_model

    if not recipes and not allow:
        raise RecipeError("there is no recipe", "Give one or more, such as all-reduce, or what is allowed (--allow).")
    raced = combinations(allow) if allow else []
    measure, target = _asked(target_loss, target_accuracy)
    recipes = recipes or ("all-reduce",)
    lr = lr if lr is not None else 0.1 if optimizer == "sgd" else 0.001
    _check_training(epochs, batch, seed, lr, momentum)
    named = Topology.load(topology) if isinstance(topology, str) else topology
    cluster = Cluster(named, workers, step_s, slow, jitter)
    parsed = [(r, None) if _is_file(r) else (r, parse_recipe(r) if isinstance(r, str) else r) for r in recipes]
    data = load_dataset(dataset) if isinstance(dataset, str) else dataset
    training = Training(data, epochs, batch, optimizer, lr, momentum, seed)
    training.steps(cluster.size)  # refused before the work
    title = model if isinstance(model, str) else type(model).__name__
    module, own_loss = load_model(model, data) if isinstance(model, str) else (model, loss)
    if own_loss is None:
        raise RecipeError("a module needs a loss", "Give loss=, a function of outputs and targets.")
    trials = _Trials(cluster, training, module, own_loss, title)
    result = replace(trials.run(parsed, on_epoch), asked=target, measure=measure)
    return trials.race(result, raced, on_epoch) if raced else result


def _check_training(epochs: int, batch: int, seed: int, lr: float, momentum: float) -> None:
    """Raise RecipeError for numbers that no training has."""
    for name, value in (("number of epochs", epochs), ("batch", batch)):
        whole(name, value)
    whole("seed", seed, 0)
    number("learning rate", lr)
    number("momentum", momentum, most=0.999, least=True)


def _asked(loss: float | None, accuracy: float | None) -> tuple[Measure, float | None]:
    """By what times are compared, and to which value, if the user said so."""
    if loss is not None and accuracy is not None:
        raise RecipeError("there are two targets", "Give a loss or an accuracy.")
    if loss is not None:
        number("target loss", loss)
    if accuracy is None:
        return "loss", loss
    number("target accuracy", accuracy, most=1.0)
    return "accuracy", accuracy


def _is_file(recipe: str | Recipe) -> bool:
    return isinstance(recipe, str) and (recipe.endswith(".json") and ":" not in recipe)


class _Trials:
    """The runs of one model on one cluster."""

    def __init__(
        self, cluster: Cluster, training: Training, module: nn.Module, loss: Loss, title: str
    ) -> None:  # fmt: skip
        self.cluster, self.training = cluster, training
        self._module, self._loss, self._title = module, loss, title
        self._overlapped: float | None = None
        slow = tuple((cluster.slow or {}).get(k, 1.0) for k in range(cluster.size))
        where = cluster.topology, cluster.size, slow, cluster.jitter, training.seed
        if cluster.step_s is None:
            self.workers = Workers.of(self._graph, *where)
            self._overlapped = self._whole().yardsticks()["data_parallel_s"]
        else:
            self.workers = Workers.timed(cluster.step_s, *where)

    def run(self, recipes: Sequence[tuple[str | Recipe, Recipe | None]], on_epoch: OnEpoch | None) -> Convergence:
        """Train under each to the end; a strategy file has no recipe."""
        checked = self._replicas()
        for _, recipe in recipes:  # refused before the work
            if recipe is not None:
                recipe.check(self.workers.size, checked.sizes, self.workers.hosts, len(self.cluster.topology.devices))
        plans = {str(name): self._plan(str(name)) for name, recipe in recipes if recipe is None}
        runs: list[Run] = []
        for source, recipe in recipes:
            name = source if isinstance(source, str) else source.words
            run = self.trained(name, recipe or Recipe(), on_epoch)
            if recipe is None:
                run = plans[name].timed(run)
            runs.append(run)
        return Convergence(
            tuple(runs), self._title, self.training.dataset.name, self.cluster.topology.name, self.workers.size,
            self.training.batch, checked.sizes.n, max(self.workers.compute_s), self._overlapped,
        )  # fmt: skip

    def race(self, result: Convergence, rows: Sequence[Sequence[str]], on_epoch: OnEpoch | None) -> Convergence:
        """``result`` with runs of other recipes: all exact ones and those of the first row, then of each further row
        those that contain one of the ``PARENTS`` best of the row before."""
        race = _Race(self, replace(result, asked=result.target), on_epoch)
        race.run(EXACT)
        parents: list[str] | None = None
        for row in rows:
            chosen = [text for text in row if parents is None or any(_contains(text, one) for one in parents)]
            race.run(chosen)
            parents = race.best_of(chosen)
        return replace(
            race.result, runs=tuple(race.runs.values()), raced=len(race.runs) - len(result.runs),
            left_out=race.left_out,
        )  # fmt: skip

    def trained(
        self, name: str, recipe: Recipe, on_epoch: OnEpoch | None, over: Callable[[Run], bool] | None = None
    ) -> Run:
        """Training under a recipe, until it is ``over``."""
        epochs: list[Epoch] = []

        def report(epoch: Epoch) -> bool:
            epochs.append(epoch)
            if on_epoch is not None:
                on_epoch(name, epoch)
            return over is not None and over(Run(name, recipe.lossy, tuple(epochs)))

        trained = self.training.run(recipe, self._replicas(), self.workers, report)
        notes = recipe.warnings(trained.epochs[-1].steps, self.workers.size)
        last = trained.epochs[-1]
        step = self.workers.estimate(last.seconds / last.steps, last.communicated / last.steps)
        return Run(name, recipe.lossy, trained.epochs, trained.staleness, tuple(notes), step=step)

    def _replicas(self) -> Any:
        from copy import deepcopy

        from flexsearch.runtime.replicas import Replicas

        return Replicas(deepcopy(self._module), self._loss, self.cluster.size)

    @cached_property
    def _graph(self) -> OperatorGraph:
        """The model with the batch of all workers."""
        from flexsearch.graph.importer import import_model

        data = self.training.dataset
        at = [k % len(data.inputs) for k in range(self.training.batch * self.cluster.size)]
        self._module.train()
        try:
            return import_model(
                self._module, (data.inputs[at],), self._loss, targets=data.targets[at],
                name=self._title.rpartition(":")[2],
            )  # fmt: skip
        except FlexsearchError as error:
            raise type(error)(error.message, f"{error.remedy} Or say how long a step takes (--step-time).") from error

    def _whole(self) -> Setting:
        """That model on the workers' devices."""
        topology, size = self.cluster.topology, self.cluster.size
        return Setting.of(self._graph, topology if size == len(topology.devices) else topology.subset(range(size)))

    def _plan(self, path: str) -> _Plan:
        setting = self._whole()
        strategy = Strategy.load(Path(path))
        try:
            strategy.check_supported(setting.graph, setting.topology)
        except FlexsearchError as error:
            raise error.at(f"strategy file {path}") from error
        row = setting.row(path, strategy)
        alone_s = max(self.workers.compute_s)
        count = sum(c is not None for c in row.lowered.tasks.communication)
        return _Plan(row.simulation.estimate, row.simulation.moved_bytes, count, alone_s)


class _Race:
    """Runs that end once they have reached the target, or when their clock is past the best time so far: no epoch after
    that can make them the first. ``left_out``: recipes that so many workers cannot follow, or that diverge."""

    def __init__(self, trials: _Trials, result: Convergence, on_epoch: OnEpoch | None) -> None:
        self.result, self.left_out = result, 0
        self.runs = {run.name: run for run in result.runs}
        self._trials, self._on_epoch = trials, on_epoch
        self._best = min((t for run in result.runs if (t := result.time_of(run)) is not None), default=inf)

    def run(self, recipes: Sequence[str]) -> None:
        """Train under recipes, one after the other."""
        for name in recipes:
            if name in self.runs:
                continue
            try:
                run = self._trials.trained(name, parse_recipe(name), self._on_epoch, self._is_over)
            except (RecipeError, RuntimeFailure):
                self.left_out += 1
                continue
            self.runs[name] = replace(run, ended=True)
            time = self.result.time_of(run)
            self._best = min(self._best, inf if time is None else time)

    def _is_over(self, run: Run) -> bool:
        return self.result.time_of(run) is not None or run.last.seconds >= self._best

    def best_of(self, recipes: Sequence[str]) -> list[str]:
        """The ``PARENTS`` of them that reach the target first; of those that do not, the nearest to it."""
        measure = self.result.measure

        def rank(name: str) -> tuple[float, float]:
            time, best = self.result.time_of(self.runs[name]), self.runs[name].best(measure)
            return inf if time is None else time, best if measure == "loss" else -best

        return sorted((name for name in recipes if name in self.runs), key=rank)[:PARENTS]


def _contains(recipe: str, part: str) -> bool:
    return set(part.split("+")) < set(recipe.split("+"))


@dataclass(frozen=True)
class _Plan:
    """A step of a strategy: seconds, bytes, messages; what a worker computes for data parallelism, s."""

    step: Estimate
    moved: int
    messages: int
    compute_s: float

    def timed(self, run: Run) -> Run:
        """What the same training takes under the strategy."""
        return Run(run.name, False, tuple(map(self._timed, run.epochs)), step=self.step)

    def _timed(self, epoch: Epoch) -> Epoch:
        steps, step_s = epoch.steps, self.step.seconds
        return replace(
            epoch, seconds=steps * step_s, communicated=steps * max(0.0, step_s - self.compute_s),
            sent=steps * self.moved, messages=steps * self.messages,
        )  # fmt: skip
