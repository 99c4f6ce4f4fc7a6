"""How well could any model order the layouts of the rows with several layouts (vTrain)?

    python -m benchmarks.truth_order DATA [--quick] [--json]

For each model, Kendall's tau and the regret (see :mod:`benchmarks.truth`) of four predictors:

- ``predicted``: what flexsearch says;
- ``file``: the order in which the file has its rows, which looks like that of its authors' own predictions;
- ``own factor``: flexsearch, times the factor that fits the rows of each layout (tensor x data x pipeline) best: what
  would be left if every layout were right on average;
- ``own line``: (microbatches + stages - 1) x (a + b x samples a microbatch), a and b of 0 or more fitted to the rows
  of each layout by themselves (layouts with fewer than three rows: as measured). No model whose slots grow linearly
  with their samples can do better than about this.

Then, by degrees of tensor and pipeline parallelism, ``scatter``: root mean square of what ``own line`` leaves, of
layouts with at least three rows. What jumps about such a line within one layout is noise, or something that plans do
not say. Last, by model and layout, ``ms``: measured, of a slot, for each layer of its stage and each sample, by samples
a microbatch. Rows of one tensor degree and as many samples run the same kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

import numpy as np

from benchmarks.harness import Row, median, options_with_data, parser, report_tables, say
from benchmarks.truth import PIPELINE_ROWS, Case, Scored, pipeline_cases, predict, regret, tau

LEAST: Final = 3
"""Rows of a layout that a line is fitted to."""


def layout_key(row: Scored) -> tuple[str, int, int, int]:
    """What rows of one layout have in common."""
    layout = row.case.layout
    return row.case.source, layout.tensor, layout.data, layout.pipeline


def own_factor(rows: Sequence[Scored]) -> list[Scored]:
    """The rows of a layout, as predicted times the median of measured over predicted."""
    factor = median([1.0 / row.ratio for row in rows])
    return [replace(row, predicted_s=row.predicted_s * factor) for row in rows]


def own_line(rows: Sequence[Scored]) -> list[Scored]:
    """The rows of a layout by the line that fits them best, by relative error."""
    if len(rows) < LEAST:
        return [replace(row, predicted_s=row.case.measured_s) for row in rows]
    measured = np.array([row.case.measured_s for row in rows])
    slots = np.array([row.case.layout.microbatches + row.case.layout.pipeline - 1 for row in rows], dtype=float)
    samples = np.array([row.case.batch / row.case.layout.data / row.case.layout.microbatches for row in rows])
    terms, fits = np.stack([slots, slots * samples], axis=1), []
    for columns in ([0, 1], [0], [1]):
        scaled = terms[:, columns] / measured[:, None]
        weights, *_ = np.linalg.lstsq(scaled, np.ones(len(rows)), rcond=None)
        if (weights >= 0.0).all():
            fits.append((float(np.square(scaled @ weights - 1.0).sum()), terms[:, columns] @ weights))
    best = min(fits, key=lambda fit: fit[0])[1]
    return [replace(row, predicted_s=float(seconds)) for row, seconds in zip(rows, best, strict=True)]


def order_rows(rows: Sequence[Scored]) -> Iterator[Row]:
    """Tau and regret of each predictor, by model. ``rows``: in the order of the file."""
    layouts = [list(group) for _, group in groupby(sorted(rows, key=layout_key), key=layout_key)]
    predictors: Mapping[str, Sequence[Scored]] = {
        "predicted": rows,
        "file": [replace(row, predicted_s=float(k)) for k, row in enumerate(rows)],
        "own factor": [row for group in layouts for row in own_factor(group)],
        "own line": [row for group in layouts for row in own_line(group)],
    }
    for source in dict.fromkeys(row.case.source for row in rows):
        for name, scored in predictors.items():
            some = [row for row in scored if row.case.source == source]
            yield {"part": source, "predictor": name, "rows": len(some), "tau": tau(some), "regret": regret(some)}


def scatter_rows(rows: Sequence[Scored]) -> Iterator[Row]:
    """What lines leave, by tensor degree and whether there is a pipeline."""
    layouts = [list(group) for _, group in groupby(sorted(rows, key=layout_key), key=layout_key)]
    left = [row for group in layouts if len(group) >= LEAST for row in own_line(group)]
    for tensor, several in sorted({(row.case.layout.tensor, row.case.layout.pipeline > 1) for row in left}):
        some = [r for r in left if (r.case.layout.tensor, r.case.layout.pipeline > 1) == (tensor, several)]
        yield {
            "part": f"tensor {tensor}, {'with' if several else 'without'} pipelines", "rows": len(some),
            "scatter": float(np.sqrt(np.mean([(row.ratio - 1.0) ** 2 for row in some]))),
        }  # fmt: skip


def slot_rows(rows: Sequence[Scored]) -> Iterator[Row]:
    """What was measured, in a form in which rows of the same kernels can be compared."""
    for row in sorted(rows, key=lambda row: (layout_key(row), -row.case.layout.microbatches)):
        source, tensor, data, pipeline = layout_key(row)
        micro = row.case.layout.microbatches
        samples = row.case.batch // data // micro
        each = (micro + pipeline - 1) * (row.case.model.layers / pipeline) * samples
        layout = f"{source}, t{tensor} d{data} p{pipeline}"
        yield {"part": layout, "samples": samples, "ms": 1e3 * row.case.measured_s / each}


def main() -> int:
    """Print the tables."""
    options = options_with_data(parser(__doc__), PIPELINE_ROWS)
    rows = []
    for case in list(pipeline_cases(options.data))[:: 2 if options.quick else 1]:
        if isinstance(case, Case):
            say(case.label)
            rows.append(predict(case))
    tables = {
        "What order could be had": order_rows, "What lines leave": scatter_rows, "Layers of a slot": slot_rows
    }  # fmt: skip
    lines = [{"table": title, **line} for title, made in tables.items() for line in made(rows)]
    report_tables(lines, {title: title for title in tables}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
