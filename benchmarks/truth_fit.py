"""The efficiencies of ``profiles/dgx-a100.json`` and ``profiles/hgx-h100.json``, fitted anew to published steps, and
what such a fit predicts of models that it did not see. ``python -m benchmarks.truth DATA --fit`` calls it.

Fitted are the six figures of :class:`flexsearch.topology.parts.Efficiency`, from values that no row has taught
(``START``) and with nothing else; by the rows without pipelines (Megatron-LM's first four, vTrain's, llm-foundry's of
each GPU), robustly (Huber's loss). Then all rows of one size of model, of whatever source, are left out in turn. Rows
with pipelines are no part of it: ``python -m benchmarks.truth DATA`` says how they are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from benchmarks.harness import Row, median, say
from flexsearch.cost import Learned
from flexsearch.cost.uncertainty import DEVIATIONS
from flexsearch.measure.learning import Figure, Fitted, fit

if TYPE_CHECKING:
    from benchmarks.truth import Case, Scored

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
CODES: Final = {"fsdp": "llm-foundry", "pipelines": "vtrain", "megatron": "megatron"}
BY: Final[Mapping[str, Callable[[Case], str]]] = {
    "size": lambda case: f"hidden {case.model.hidden}",
    "source": lambda case: CODES[case.table],
}
"""What is left out in turn: rows of one size of model, or of one source, whose code they are of."""
STUDENT: Final = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397)
"""90 % of Student's t, with 1 degree of freedom and more."""
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
    by: str = "size"

    def figures(self) -> dict[str, float]:
        return figures_of(self.fitted.point.tolist())

    def without(self, case: Case) -> dict[str, float] | None:
        """The figures that rows of other groups than this one's teach; None where the case is of no group."""
        group_of = BY[self.by]
        rows = zip(self.cases, self.fitted.others, strict=True)
        return next((figures_of(point.tolist()) for one, point in rows if group_of(one) == group_of(case)), None)


def figures_of(times: Sequence[float]) -> dict[str, float]:
    """Figures of an efficiency. ``times``: of each figure's part of a step, over those that ``START`` makes: nearly
    linear, as shares of a peak are not."""
    return {
        name: start / time if name in SHARES else start * time
        for (name, start), time in zip(START.items(), times, strict=True)
    }


def fit_gpu(gpu: str, cases: Sequence[Case], predict: Predict, by: str = "size") -> Taught:
    """The six figures of a GPU by those of the cases that ran on it and have no pipeline. ``by``: of ``BY``, what is
    left out."""
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

    groups = [BY[by](case) for case in own]
    names = sorted(set(groups))
    fitted = fit(
        lambda point, number: seconds(tuple(point.tolist()), number), [case.measured_s for case in own], figures,
        groups=[names.index(group) for group in groups], most=len(figures), every=True, rounds=ROUNDS,
    )  # fmt: skip
    return Taught(gpu, own, fitted, by)


def rows_of(taught: Taught, current: Sequence[Scored]) -> Iterator[Row]:
    """The figures, then by source and by size of model: errors with the figures of the profile (``current``), in
    sample, and left out; and the share of the steps that lie in intervals as wide as the profile's around what the
    others teach."""
    for name, value in taught.figures().items():
        yield {"gpu": taught.gpu, "part": name, "start": START[name], "fitted": float(f"{value:.4g}")}
    parts: list[tuple[str, Callable[[Case], bool]]] = [("all", lambda case: True)]
    for source in dict.fromkeys(case.source if case.table != "pipelines" else "vtrain" for case in taught.cases):
        parts.append((source, lambda case, source=source: source in (case.source, _table(case))))  # type: ignore[misc]
    for hidden in sorted({case.model.hidden for case in taught.cases}):
        parts.append((f"hidden {hidden}", lambda case, hidden=hidden: case.model.hidden == hidden))  # type: ignore[misc]
    now, width = np.array([row.ratio for row in current]) - 1.0, np.array([row.width for row in current])
    left_out = taught.fitted.left_out
    for part, has in parts:
        some = [k for k, case in enumerate(taught.cases) if has(case)]
        row: dict[str, Any] = {"gpu": taught.gpu, "part": part, "rows": len(some)}
        columns = {"current": now, "in_sample": taught.fitted.after, "left_out": left_out}
        for name, residuals in columns.items():
            row[f"{name}_mape"] = float(np.mean(np.abs(residuals[some])))
        row["left_out_bias"] = median(residuals_of(left_out, some))
        row["left_out_covered"] = float(np.mean(np.abs(left_out[some]) <= (1.0 + left_out[some]) * width[some]))
        yield row


def another_code(taught: Taught) -> Row:
    """The relative standard error of a code that is none of these, by how far each is off that the others predict:
    so that 1.28 of it hold 80 %, as Student's t has it of so few. That is ``error`` of ``code`` in presets."""
    groups = [BY[taught.by](case) for case in taught.cases]
    medians = [
        median(residuals_of(taught.fitted.left_out, [k for k, one in enumerate(groups) if one == group]))
        for group in dict.fromkeys(groups)
    ]
    count = len(medians)
    half = STUDENT[count - 2] * float(np.std(medians, ddof=1)) * float(np.sqrt(1.0 + 1.0 / count))
    return {"gpu": taught.gpu, "part": "another code", "rows": count, "error": half / DEVIATIONS}


def with_pipelines(taught: Taught, cases: Sequence[Case], predict: Callable[[Case, Learned], Scored]) -> Iterator[Row]:
    """The same of rows with pipelines, none of which is in the fit, by what other groups than theirs teach."""
    scored = []
    for case in cases:
        if case.layout.pipeline > 1 and (figures := taught.without(case)) is not None:
            say(case.label)
            scored.append(predict(case, Learned(efficiency=figures)))
    for group in dict.fromkeys(BY[taught.by](row.case) for row in scored):
        some = [row for row in scored if BY[taught.by](row.case) == group]
        ratios = [row.ratio - 1.0 for row in some]
        yield {
            "gpu": taught.gpu, "part": f"{group}, with pipelines", "rows": len(some),
            "left_out_mape": float(np.mean(np.abs(ratios))), "left_out_bias": median(ratios),
            "left_out_covered": float(np.mean([row.inside for row in some])),
        }  # fmt: skip


def residuals_of(values: Any, some: Sequence[int]) -> list[float]:
    return [float(values[k]) for k in some]


def _table(case: Case) -> str:
    return "vtrain" if case.table == "pipelines" else case.table
