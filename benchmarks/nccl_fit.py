"""The figures of all-reduces among GPUs of one server (``communication.groups``), fitted to measured ones.

    python -m benchmarks.nccl_fit DATA [--quick] [--json] [--preset dgx-a100]

``DATA``: the folder of the measurements; of it ``nccl_allreduce_a100`` (VIA-Research/vTrain) is read: for each number
of GPUs, times of 1,024 sizes from 1 to 1,024 MB (``--quick``: of every fourth). x: time that the bytes of a ring's edge
take over the preset's links. By number of parameters, an all-reduce takes

- 2: start + factor x;
- 3: the same, but at least ``least``;
- 5: the less of two such lines, protocols that the library changes between, but at least ``least``.

Minimised is the mean of |fitted / measured - 1|, weighted by size to the power of -0.8: sizes are equally far apart,
and three quarters of them above 256 MB; with -1 every doubling would count alike. It is a pattern search over the
logarithms of the parameters that begins at lines through a few sizes. Told are for each, and for the figures in the
preset: ``mean``, ``median`` and ``largest`` error of all sizes alike, and the mean by size; then the fitted figures,
rounded as presets have them: of a group there ``startup_s`` and ``factor`` are those of 2 parameters, the rest those
of 5.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Row, options_with_data, parser, report
from flexsearch.cost.collectives import ring_edge
from flexsearch.cost.communication import Pricing
from flexsearch.topology import Topology

Vector = npt.NDArray[np.float64]
BANDS: Final = ((0, 4), (4, 16), (16, 64), (64, 256), (256, 2048))
"""Sizes that are told apart, MB (2^20 bytes): above the first, up to the second."""
FIRST_STEP: Final = 0.25
LAST_STEP: Final = 1e-4
"""Of the pattern search: relative changes of a parameter."""
DIGITS: Final = 4
POWER: Final = 0.8
"""Weights of sizes in a fit fall with this power of them."""
BETWEEN: Final = (8, 16, 32, 64, 128, 256)
"""Sizes at which searches for two protocols begin to change from one to the other, MB."""


@dataclass(frozen=True)
class Table:
    """Measured all-reduces among ``members`` GPUs: bytes, seconds, and x (s)."""

    members: int
    nbytes: npt.NDArray[np.int64]
    seconds: Vector
    x: Vector


def tables(data: Path, topology: Topology, quick: bool = False) -> Iterator[Table]:
    """Those of a folder, ascending."""
    bandwidth = topology.route(0, 1).bandwidth
    for path in sorted((data / "nccl_allreduce_a100").iterdir()):
        members = int(path.name.removeprefix("AR_GPU").partition("_")[0])
        with path.open(newline="") as file:
            rows = list(csv.reader(file))[1 :: 4 if quick else 1]
        nbytes = np.array([int(row[0]) for row in rows])
        edges = np.array([ring_edge(members, n) for n in nbytes.tolist()], dtype=float)
        yield Table(members, nbytes, np.array([float(row[3]) / 1e9 for row in rows]), edges / bandwidth)


def _line(p: Vector, x: Vector) -> Vector:
    seconds: Vector = p[0] + p[1] * x
    return seconds


FORMS: Final[Mapping[int, tuple[tuple[str, ...], Callable[[Vector, Vector], Vector]]]] = {
    2: (("startup_s", "factor"), _line),
    3: (("startup_s", "factor", "least_s"), lambda p, x: np.maximum(p[2], _line(p, x))),
    5: (
        ("startup_s", "factor", "other_startup_s", "other_factor", "least_s"),
        lambda p, x: np.maximum(p[4], np.minimum(_line(p, x), _line(p[2:], x))),
    ),
}
"""By number of parameters: their names, and seconds of times x."""


def errors(form: int, p: Vector, table: Table) -> Vector:
    """|fitted / measured - 1| by size."""
    error: Vector = np.abs(np.divide(FORMS[form][1](p, table.x), table.seconds) - 1.0)
    return error


def missed(form: int, p: Vector, table: Table) -> float:
    """What is minimised."""
    return float(np.average(errors(form, p, table), weights=table.nbytes**-POWER))


def fit(form: int, table: Table) -> Vector:
    """The parameters that miss least."""
    searches = [_search(form, np.log(begin), table) for begin in _begins(form, table)]
    at = min(searches, key=lambda one: one[0])[1]
    if form == 5 and at[0] > at[2]:  # the protocol that starts earlier comes first
        at = at[[2, 3, 0, 1, 4]]
    return np.array([float(f"{value:.{DIGITS}g}") for value in np.exp(at)])


def _begins(form: int, table: Table) -> Iterator[Vector]:
    """Where searches begin: lines through the first and the last size, or from each of these to one between them."""
    least = float(table.seconds[0])
    if form != 5:
        yield np.array([*_through(table, 0, -1), least][:form])
        return
    places = np.searchsorted(table.nbytes, np.array(BETWEEN) * 2**20)
    for k in places[(places > 0) & (places < len(table.nbytes) - 1)].tolist():
        yield np.array([*_through(table, 0, k), *_through(table, k, -1), least])


def _through(table: Table, first: int, last: int) -> tuple[float, float]:
    """Start and factor of the line through two sizes."""
    factor = float((table.seconds[last] - table.seconds[first]) / (table.x[last] - table.x[first]))
    return max(float(table.seconds[first]) - factor * float(table.x[first]), 1e-6), max(factor, 1e-3)


def _search(form: int, at: Vector, table: Table) -> tuple[float, Vector]:
    """A pattern search over logarithms: the least that is missed, and where."""
    least, step = missed(form, np.exp(at), table), FIRST_STEP
    while step > LAST_STEP:
        moved = False
        for k, sign in product(range(len(at)), (1.0, -1.0)):
            trial = at.copy()
            trial[k] += sign * step
            error = missed(form, np.exp(trial), table)
            if error < least - 1e-12:
                at, least, moved = trial, error, True
        step = step if moved else step / 2
    return least, at


def scores(table: Table, error: Vector) -> Row:
    """Mean, median and largest error, and the mean by size."""
    megabytes = table.nbytes / 2**20
    by_size = {
        f"mean_to_{high}_mb": float(error[(megabytes > low) & (megabytes <= high)].mean()) for low, high in BANDS
    }
    return {
        "mean": float(error.mean()), "median": float(np.median(error)), "largest": float(error.max()),
        **by_size,
    }  # fmt: skip


def rows(data: Path, topology: Topology, quick: bool) -> Iterator[Row]:
    """By number of GPUs, the errors of each form and of the preset; then the fitted figures."""
    pricing, figures = Pricing(topology), list[Row]()
    for table in tables(data, topology, quick):
        said = np.array([pricing.all_reduce(range(table.members), n).duration_s for n in table.nbytes.tolist()])
        for form, (names, _) in FORMS.items():
            p = fit(form, table)
            yield {"gpus": table.members, "parameters": form, **scores(table, errors(form, p, table))}
            figures.append({"gpus": table.members, "parameters": form, **dict(zip(names, p.tolist(), strict=True))})
        yield {"gpus": table.members, "parameters": topology.name, **scores(table, np.abs(said / table.seconds - 1.0))}
    yield from figures


def main() -> int:
    """Print both tables."""
    arguments = parser(__doc__)
    arguments.add_argument("--preset", default="dgx-a100", help="whose figures and links are meant")
    options = options_with_data(arguments, "nccl_allreduce_a100")
    told: list[Any] = list(rows(options.data, Topology.load(options.preset), options.quick))
    if options.json:
        report(told, "", True)
        return 0
    report([row for row in told if "mean" in row], "Errors of all-reduces in one server", False)
    report([row for row in told if "mean" not in row], "Fitted figures", False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
