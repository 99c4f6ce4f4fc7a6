"""Training under several recipes side by side: what was reached, when, and what was sent for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import cycle, pairwise
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from flexsearch.report.grid import Column, Grid
from flexsearch.report.style import COLOURS, literal, plain
from flexsearch.report.units import digits, nbytes, percent, ratio, seconds, time_unit
from flexsearch.sync.record import Epoch, Staleness

_MARKERS: Final = "os^Dv*xP"


@dataclass(frozen=True)
class Run:
    """Training under one recipe, by ``name``. ``lossy``: whether it computes something else than data parallelism.
    ``notes``: what to know of it."""

    name: str
    lossy: bool
    epochs: tuple[Epoch, ...]
    staleness: Staleness | None = None
    notes: tuple[str, ...] = ()

    @property
    def last(self) -> Epoch:
        """After the last epoch."""
        return self.epochs[-1]

    @property
    def best_loss(self) -> float:
        """The lowest loss on held-out data."""
        return min(epoch.loss for epoch in self.epochs)

    @property
    def step_s(self) -> float:
        """Simulated seconds of a step, on average."""
        return self.last.seconds / self.last.steps

    def time_to(self, loss: float) -> float | None:
        """Seconds until the loss on held-out data is at most ``loss``, on straight lines between epochs; None:
        never."""
        if self.epochs[0].loss <= loss:
            return self.epochs[0].seconds
        for before, after in pairwise(self.epochs):
            if after.loss <= loss:
                share = (before.loss - loss) / (before.loss - after.loss) if before.loss > after.loss else 1.0
                return before.seconds + share * (after.seconds - before.seconds)
        return None


@dataclass(frozen=True)
class Convergence:
    """Runs from the same weights on the same data. ``model``, ``dataset``, ``topology``: by name. ``batch``: of a
    worker. ``compute_s``: of a step, of the slowest worker. ``overlapped_s``: what a step of plain data parallelism
    takes if gradients are sent while the backward pass goes on (``flexsearch simulate``); None where there is no graph.
    ``asked_loss``: to which times are compared; None: the lowest that all runs reach."""

    runs: tuple[Run, ...]
    model: str
    dataset: str
    topology: str
    workers: int
    batch: int
    parameters: int
    compute_s: float
    overlapped_s: float | None = None
    asked_loss: float | None = None

    @property
    def loss(self) -> float:
        """To which times are compared."""
        return self.asked_loss if self.asked_loss is not None else max(run.best_loss for run in self.runs)

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
        Column("recipe", "text"), Column("loss"), Column("accuracy"), Column("step"), Column("comm.", "number below"),
        Column("sent a step\nby a worker", "number below"), Column("to loss\n" + f"{result.loss:.3f}"),
        Column("speed-up"),
    ))  # fmt: skip
    times = [run.time_to(result.loss) for run in result.runs]
    first = min((t for t in times if t is not None), default=None)
    for run, t in zip(result.runs, times, strict=True):
        last = run.last
        gain = ratio(times[0] / t) if times[0] is not None and t else ""
        grid.add(
            run.name, f"{last.loss:.3f}", percent_of(last.accuracy), seconds(run.step_s),
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
    panels[0].axhline(result.loss, color="#888888", linestyle="--", linewidth=1)
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
    return {
        "model": result.model, "dataset": result.dataset, "topology": result.topology, "workers": result.workers,
        "batch": result.batch, "parameters": result.parameters, "compute_s": result.compute_s,
        "overlapped_s": result.overlapped_s, "loss": result.loss,
        "runs": [_run_data(run, result) for run in result.runs],
    }  # fmt: skip


def _run_data(run: Run, result: Convergence) -> dict[str, Any]:
    return {
        "recipe": run.name, "lossy": run.lossy, "step_s": run.step_s, "time_to_loss_s": run.time_to(result.loss),
        "notes": list(run.notes), "staleness": asdict(run.staleness) if run.staleness is not None else None,
        "epochs": [_epoch_data(epoch) for epoch in run.epochs],
    }  # fmt: skip


def _epoch_data(epoch: Epoch) -> dict[str, Any]:
    data = asdict(epoch)
    return data | {"accuracy": None if epoch.accuracy != epoch.accuracy else epoch.accuracy}
