"""Figures of a device, as a profile has measured them, in words."""

from __future__ import annotations

from collections.abc import Iterator

from flexsearch.cost.profile import Figures
from flexsearch.report.grid import Column, Grid
from flexsearch.report.units import nbytes, percent
from flexsearch.topology.kernels import HALF, Efficiency


def figures_in_words(figures: Figures) -> Iterator[str]:
    """A line for each type's matrix products, and for memory and starts."""
    for dtype, flops in figures.flops.items():
        reached = _efficiency(figures, dtype)
        yield (
            f"Matrix products in {dtype}: {flops:.3g} FLOP/s, half of it where a side is {reached.matrix_size:.3g}; "
            f"convolutions {reached.convolution:.2g} of it, attention {reached.attention_forward:.2g} forward and "
            f"{reached.attention_backward:.2g} backward."
        )
    reached, most = figures.efficiency_full, figures.memory_bandwidth
    shares = [("streaming", reached.memory), *sorted(reached.traffic.items())]
    yield "Memory: " + ", ".join(f"{work} {nbytes(share * most)}/s" for work, share in shares) + "."
    longer = ", ".join(f"{kind} {count}" for kind, count in figures.launches.kernels.items())
    more = f"; so often as long: {longer}" if longer else ""
    yield f"A small operator takes {1e6 * figures.overhead_s:.3g} us{more}."


def fits_grid(figures: Figures) -> Grid:
    """How well the figures predict operators of other sizes."""
    columns = Column("reference operators", "text"), *map(Column, ("n", "median", "90th\npercentile"))
    grid = Grid(columns, "How far off the figures are, each size predicted from the others")
    for work, fit in figures.fits.items():
        grid.add(work, str(fit.n), percent(fit.median), percent(fit.p90))
    return grid


def _efficiency(figures: Figures, dtype: str) -> Efficiency:
    return figures.efficiency_full if dtype not in HALF or figures.efficiency is None else figures.efficiency
