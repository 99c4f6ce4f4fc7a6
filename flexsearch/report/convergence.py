"""Training under several recipes side by side: what was reached, when, and what was sent for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import cycle, pairwise
from typing import Any, Final, Literal

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from flexsearch.cost.uncertainty import Estimate
from flexsearch.report.grid import Column, Grid
from flexsearch.report.style import COLOURS, literal, plain
from flexsearch.report.uncertainty import INTERVAL, time_words
from flexsearch.report.units import digits, nbytes, percent, ratio, seconds, time_unit
from flexsearch.sync.record import Epoch, Staleness

Measure = Literal["loss", "accuracy"]
"""On held-out data: what a run is to reach."""

_MARKERS: Final = "os^Dv*xP"


@dataclass(frozen=True)
class Run:
    """Training under one recipe, by ``name``. ``lossy``: whether it computes something else than data parallelism.
    ``notes``: what to know of it. ``ended``: training ended once it had reached the target, or could not be the first
    to reach it any more. ``step``: a mean step, with what its time rests on (None: training goes on)."""

    name: str
    lossy: bool
    epochs: tuple[Epoch, ...]
    staleness: Staleness | None = None
    notes: tuple[str, ...] = ()
    ended: bool = False
    step: Estimate | None = None

    @property
    def last(self) -> Epoch:
        """After the last epoch."""
        return self.epochs[-1]

    def best(self, measure: Measure = "loss") -> float:
        """The lowest loss, or the highest accuracy, on held-out data."""
        return min(epoch.loss for epoch in self.epochs) if measure == "loss" else max(e.accuracy for e in self.epochs)

    @property
    def step_s(self) -> float:
        """Simulated seconds of a step, on average."""
        return self.last.seconds / self.last.steps

    def time_to(self, target: float, measure: Measure = "loss") -> float | None:
        """Seconds until the loss on held-out data is at most ``target``, or the accuracy at least, on straight lines
        between epochs; None: never."""
        sign = 1.0 if measure == "loss" else -1.0
        goal = sign * target
        reached = [sign * (epoch.loss if measure == "loss" else epoch.accuracy) for epoch in self.epochs]
        if reached[0] <= goal:
            return self.epochs[0].seconds
        for (before, above), (after, below) in pairwise(zip(self.epochs, reached, strict=True)):
            if below <= goal:
                share = (above - goal) / (above - below) if above > below else 1.0
                return before.seconds + share * (after.seconds - before.seconds)
        return None


@dataclass(frozen=True)
class Convergence:
    """Runs from the same weights on the same data. ``model``, ``dataset``, ``topology``: by name. ``batch``: of a
    worker. ``compute_s``: of a step, of the slowest worker. ``overlapped_s``: what a step of plain data parallelism
    takes if gradients are sent while the backward pass goes on (``flexsearch simulate``); None where there is no graph.
    ``asked``: the loss, or the accuracy (share), by ``measure``, to which times are compared; None: the best that all
    runs reach which went on to the end. ``raced``: how many runs were to find the first; ``left_out``: how many recipes
    more so many workers cannot follow, or diverged."""

    runs: tuple[Run, ...]
    model: str
    dataset: str
    topology: str
    workers: int
    batch: int
    parameters: int
    compute_s: float
    overlapped_s: float | None = None
    asked: float | None = None
    measure: Measure = "loss"
    raced: int = 0
    left_out: int = 0

    @property
    def target(self) -> float:
        """To which times are compared."""
        if self.asked is not None:
            return self.asked
        best = [run.best(self.measure) for run in self.runs if not run.ended]
        return max(best) if self.measure == "loss" else min(best)

    def time_of(self, run: Run) -> float | None:
        """Seconds until a run has reached the target; None: never."""
        return run.time_to(self.target, self.measure)

    @property
    def first(self) -> Run | None:
        """The run that reaches the target first; None: none does. Of several, the first of the list."""
        times = [(t, k) for k, run in enumerate(self.runs) if (t := self.time_of(run)) is not None]
        return self.runs[min(times)[1]] if times else None

    def leading(self, count: int) -> Convergence:
        """With those runs alone that went on to the end, and the ``count`` others that are first at the target."""
        times = sorted((t, k) for k, run in enumerate(self.runs) if run.ended and (t := self.time_of(run)) is not None)
        kept = {k for _, k in times[:count]}
        runs = tuple(run for k, run in enumerate(self.runs) if k in kept or not run.ended)
        return replace(self, runs=runs, asked=self.target)

    def table(self) -> Grid:
        """One row for each recipe. The one that is first at the loss is bold."""
        return convergence_table(self)

    def epochs_table(self) -> Grid:
        """One row for each epoch of each recipe."""
        return epochs_table(self)

    def figure(self) -> Figure:
        """Loss and accuracy over simulated time."""
        return convergence_figure(self)

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return convergence_data(self)


def convergence_table(result: Convergence) -> Grid:
    """See :meth:`Convergence.table`. Speed-ups are over the first row."""
    grid = Grid((
        Column("recipe", "text"), Column("loss"), Column("accuracy"), Column(f"step,\n{INTERVAL}"),
        Column("comm.", "number below"),
        Column("sent a step\nby a worker", "number below"), Column(f"to {result.measure}\n{_target(result)}"),
        Column("speed-up"),
    ))  # fmt: skip
    times = [result.time_of(run) for run in result.runs]
    first = min((t for t in times if t is not None), default=None)
    for run, t in zip(result.runs, times, strict=True):
        last = run.last
        gain = ratio(times[0] / t) if times[0] is not None and t else ""
        grid.add(
            run.name, f"{last.loss:.3f}", percent_of(last.accuracy), time_words(run.step or Estimate(run.step_s, {})),
            percent(last.communicated / last.seconds) if last.seconds else "",
            nbytes(last.sent / last.steps / result.workers), seconds(t) if t is not None else "never", gain,
            style="bold" if t is not None and t == first else "",
        )  # fmt: skip
    return grid


def epochs_table(result: Convergence) -> Grid:
    """See :meth:`Convergence.epochs_table`."""
    grid = Grid((
        Column("recipe", "text"), Column("epoch"), Column("time"), Column("train loss", "number below"),
        Column("loss"), Column("accuracy"),
    ))  # fmt: skip
    for run in result.runs:
        for epoch in run.epochs:
            grid.add(
                run.name if epoch.epoch == 1 else "", str(epoch.epoch), seconds(epoch.seconds),
                f"{epoch.train_loss:.3f}", f"{epoch.loss:.3f}", percent_of(epoch.accuracy),
            )  # fmt: skip
    return grid


def _target(result: Convergence) -> str:
    """The target in words."""
    return f"{result.target:.3f}" if result.measure == "loss" else percent_of(result.target)


def percent_of(accuracy: float) -> str:
    """A share with three digits; nothing where accuracy has no meaning."""
    return "" if accuracy != accuracy else f"{100 * accuracy:.1f} %"


def convergence_figure(result: Convergence) -> Figure:
    """See :meth:`Convergence.figure`."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    accurate = any(run.last.accuracy == run.last.accuracy for run in result.runs)
    panels = figure.subplots(1, 2 if accurate else 1, squeeze=False)[0]
    unit, name = time_unit(max(run.last.seconds for run in result.runs) or 1.0)
    for k, (run, colour, marker) in enumerate(zip(result.runs, cycle(COLOURS), cycle(_MARKERS), strict=False)):
        times = [epoch.seconds / unit for epoch in run.epochs]
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}
        style["linestyle"] = ("-", "--", ":")[k // len(COLOURS) % 3]
        panels[0].plot(times, [epoch.loss for epoch in run.epochs], label=literal(run.name, 44), **style)
        if accurate:
            panels[1].plot(times, [100 * epoch.accuracy for epoch in run.epochs], **style)
    by_loss = result.measure == "loss"
    panels[0 if by_loss else -1].axhline(
        result.target if by_loss else 100 * result.target, color="#888888", linestyle="--", linewidth=1
    )
    plain(panels[0], "loss on held-out data")
    if accurate:
        plain(panels[1], "accuracy on held-out data (%)")
    for axes in panels:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: digits(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"simulated time ({name})")
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(literal(headline(result), 110), x=0.01, ha="left", fontsize=10, parse_math=False)
    return figure


def headline(result: Convergence) -> str:
    """What was trained, and where."""
    return (
        f"{result.model} ({result.parameters:,} parameters) on {result.dataset}, {result.workers} workers of "
        f"{result.topology}, batch {result.batch} each"
    )


def remarks(result: Convergence) -> list[str]:
    """How times come about, and what to know of single recipes."""
    words = [
        f"A worker computes {seconds(result.compute_s)} a step; then it encodes, sends and merges. Nothing of that "
        "overlaps with its own computing."
    ]
    if result.overlapped_s is not None:
        words.append(
            f"Plain data parallelism by `flexsearch simulate`, which sends gradients during the backward pass and sums "
            f"the loss over all workers, too: {seconds(result.overlapped_s)} a step."
        )
    if result.raced:
        first = result.first
        words.append(
            f"{first.name} is the first at {result.measure} {_target(result)}, after "
            f"{seconds(result.time_of(first) or 0.0)}, of {result.raced} recipes that were tried "
            f"({result.left_out} more cannot be followed here, or diverge). Training under the others ended when they "
            "could not be first any more."
            if first is not None
            else f"None of {result.raced} recipes reaches {result.measure} {_target(result)}: give more --epochs, or "
            "another target."
        )
    for run in result.runs:
        words += [f"{run.name}: {note}" for note in run.notes]
        if run.staleness is not None:
            s = run.staleness
            words.append(
                f"{run.name}: gradients were {digits(s.mean)} updates old on average, {s.most} at most; the fastest "
                f"worker was up to {s.lead} steps ahead"
            )
    return words


def convergence_data(result: Convergence) -> dict[str, Any]:
    """See :meth:`Convergence.data`. Times in seconds of simulated time; ``loss`` and ``accuracy`` on held-out data."""
    first = result.first
    return {
        "model": result.model, "dataset": result.dataset, "topology": result.topology, "workers": result.workers,
        "batch": result.batch, "parameters": result.parameters, "compute_s": result.compute_s,
        "overlapped_s": result.overlapped_s, "measure": result.measure, "target": result.target,
        "first": first.name if first is not None else None,
        "raced": result.raced, "left_out": result.left_out,
        "runs": [_run_data(run, result) for run in result.runs],
    }  # fmt: skip


def _run_data(run: Run, result: Convergence) -> dict[str, Any]:
    return {
        "recipe": run.name, "lossy": run.lossy, "step_s": run.step_s,
        "interval_s": run.step.interval_s if run.step is not None else None, "time_to_target_s": result.time_of(run),
        "ended": run.ended,
        "notes": list(run.notes), "staleness": asdict(run.staleness) if run.staleness is not None else None,
        "epochs": [_epoch_data(epoch) for epoch in run.epochs],
    }  # fmt: skip


def _epoch_data(epoch: Epoch) -> dict[str, Any]:
    data = asdict(epoch)
    return data | {"accuracy": None if epoch.accuracy != epoch.accuracy else epoch.accuracy}
