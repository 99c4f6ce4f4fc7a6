"""The efficiencies of ``profiles/dgx-a100.json`` and ``profiles/hgx-h100.json``, fitted anew to published steps, and
what such a fit predicts of models that it did not see. ``python -m benchmarks.truth DATA --fit`` calls it.

Fitted are the six figures of :class:`flexsearch.topology.parts.Efficiency`, from values that no row has taught
(``START``) and with nothing else; by the rows without pipelines (Megatron-LM's first four, vTrain's, llm-foundry's of
each GPU), robustly (Huber's loss). Then all rows of one size of model, of whatever source, are left out in turn. Rows
with pipelines are no part of it: ``python -m benchmarks.truth DATA`` says how they are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from benchmarks.harness import Row, median, say
from flexsearch.cost import Learned
from flexsearch.measure.learning import Figure, Fitted, fit

if TYPE_CHECKING:
    from benchmarks.truth import Case

START: Final = {
    "matrix": 0.7, "matrix_size": 128.0, "attention_forward": 1.0, "attention_backward": 0.7, "memory": 0.8,
    "overhead_s": 10e-6,
}  # fmt: skip
"""Round values of what libraries reach; a fit is drawn to them as far as the rows leave it open."""
SHARES: Final = ("matrix", "attention_forward", "attention_backward", "memory")
"""Figures that times are in inverse proportion to; they are proportional to the others."""
MOST: Final = {"matrix": 1.0, "memory": 1.0, "attention_forward": 2.0, "attention_backward": 2.0}
LONGEST: Final = 4.0
"""No part of a step takes more than so many times what ``START`` says, or less than it divided by that."""
ROUNDS: Final = 1
"""Linearisations before the last one, from which sizes are left out. A second one changed no figure by 1 % (H100)."""
THIN: Final = 3
"""``--quick`` takes one row of so many."""
GPUS: Final = {"A100": "a100", "H100": "h100"}
"""By name of a device, how the names of its clusters begin."""


class Predict(Protocol):
    """Iteration time of a case, s."""

    def __call__(self, case: Case, learned: Learned) -> float: ...


@dataclass(frozen=True)
class Taught:
    """A fit on one GPU. ``cases``: that it was made of; ``fitted``: its figures and residuals."""

    gpu: str
    cases: tuple[Case, ...]
    fitted: Fitted

    def figures(self) -> dict[str, float]:
        return figures_of(self.fitted.point.tolist())


def figures_of(times: Sequence[float]) -> dict[str, float]:
    """Figures of an efficiency. ``times``: of each figure's part of a step, over those that ``START`` makes: nearly
    linear, as shares of a peak are not."""
    return {
        name: start / time if name in SHARES else start * time
        for (name, start), time in zip(START.items(), times, strict=True)
    }


def fit_gpu(gpu: str, cases: Sequence[Case], predict: Predict) -> Taught:
    """The six figures of a GPU by those of the cases that ran on it and have no pipeline."""
    own = tuple(case for case in cases if case.cluster.startswith(GPUS[gpu]) and case.layout.pipeline == 1)
    figures = [
        Figure(name, 1.0, 0.5, start / MOST[name] if name in SHARES else 1.0 / LONGEST, LONGEST)
        for name, start in START.items()
    ]

    @cache
    def seconds(point: tuple[float, ...], number: int) -> float:
        if number == 0:
            say(f"{gpu}: {len(own)} steps with {', '.join(f'{k} {v:.4g}' for k, v in figures_of(point).items())}")
        return predict(own[number], Learned(efficiency=figures_of(point)))

    sizes = sorted({case.model.hidden for case in own})
    fitted = fit(
        lambda point, number: seconds(tuple(point.tolist()), number), [case.measured_s for case in own], figures,
        groups=[sizes.index(case.model.hidden) for case in own], most=len(figures), every=True, rounds=ROUNDS,
    )  # fmt: skip
    return Taught(gpu, own, fitted)


def rows_of(taught: Taught, current: Sequence[float]) -> Iterator[Row]:
    """The figures, then by source and by size of model: errors with the current figures of the profile (their ratios
    predicted / measured: ``current``), in sample, and left out."""
    for name, value in taught.figures().items():
        yield {"gpu": taught.gpu, "part": name, "start": START[name], "fitted": float(f"{value:.4g}")}
    parts: list[tuple[str, Callable[[Case], bool]]] = [("all", lambda case: True)]
    for source in dict.fromkeys(case.source if case.table != "pipelines" else "vtrain" for case in taught.cases):
        parts.append((source, lambda case, source=source: source in (case.source, _table(case))))  # type: ignore[misc]
    for hidden in sorted({case.model.hidden for case in taught.cases}):
        parts.append((f"hidden {hidden}", lambda case, hidden=hidden: case.model.hidden == hidden))  # type: ignore[misc]
    now = np.array(current) - 1.0
    for part, has in parts:
        some = [k for k, case in enumerate(taught.cases) if has(case)]
        row: Row = {"gpu": taught.gpu, "part": part, "rows": len(some)}
        columns = {"current": now, "in_sample": taught.fitted.after, "left_out": taught.fitted.left_out}
        for name, residuals in columns.items():
            row[f"{name}_mape"] = float(np.mean(np.abs(residuals[some])))
        row["left_out_bias"] = median(residuals_of(taught.fitted.left_out, some))
        yield row


def residuals_of(values: Any, some: Sequence[int]) -> list[float]:
    return [float(values[k]) for k in some]


def _table(case: Case) -> str:
    return "vtrain" if case.table == "pipelines" else case.table
