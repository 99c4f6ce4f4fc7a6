"""Would anything that Megatron-DeepSpeed does explain the rows with pipelines that are predicted too fast?

    python -m benchmarks.truth_causes DATA [--quick] [--json]

For each candidate, seconds that it adds to a step follow from the plan up to a factor of 0 or more; the factor is the
one that makes the mean error of all rows with pipelines (vTrain) least. ``scale``: that factor (1: as the candidate is
named); ``added_s``: the median of what it adds; ``mape``, and the same by degree of tensor parallelism. A cause would
lower that of degrees 2 and 4 without raising that of 8.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from benchmarks.harness import Row, options_with_data, parser, report, say
from benchmarks.truth import PIPELINE_ROWS, Case, Scored, pipeline_cases, predict

NIC: Final = 25e9
"""Bandwidth of a network card, which two GPUs share, B/s."""
MEMORY: Final = 1.9e12
"""What updates read and write a second, B/s."""


def _slots(case: Case) -> int:
    """Microbatches, and those of the bubble."""
    return case.layout.microbatches + case.layout.pipeline - 1


def _boundary(case: Case) -> float:
    """Bytes that a microbatch sends to the next stage, in half precision."""
    return 2.0 * case.model.seq * case.model.hidden * case.batch / case.layout.data / case.layout.microbatches


def _weights(case: Case) -> float:
    """Of a rank, without embeddings."""
    model, layout = case.model, case.layout
    return 12.0 * model.hidden**2 * model.layers / layout.pipeline / layout.tensor


def _embedding(case: Case) -> float:
    return float(case.model.vocab * case.model.hidden) / case.layout.tensor


def _ring(case: Case) -> float:
    return 2.0 * (case.layout.data - 1) / case.layout.data


CAUSES: Final[Mapping[str, Callable[[Case, float], float]]] = {
    "activations are not overlapped": lambda c, _: 2 * _boundary(c) * _slots(c) / (NIC / 2),
    "activations of a tensor group share a card": lambda c, _: 2 * _boundary(c) * c.layout.tensor * _slots(c) / NIC,
    "activations of a server share a card": lambda c, _: 16 * _boundary(c) * _slots(c) / NIC,
    "1 ms for each microbatch (shapes are exchanged)": lambda c, _: 1e-3 * _slots(c),
    "1 ms for each microbatch and stage": lambda c, _: 1e-3 * c.layout.microbatches * c.layout.pipeline,
    "1 ms for each microbatch and layer of a stage (launches)": lambda c, _: (
        1e-3 * c.layout.microbatches * c.model.layers / c.layout.pipeline
    ),
    "gradients in float32": lambda c, _: 2 * _weights(c) * _ring(c) / (NIC / 2),
    "gradients of a server share a card": lambda c, _: 2 * _weights(c) * _ring(c) * 8 / NIC,
    "weights are gathered after the update (ZeRO-1)": lambda c, _: _weights(c) * _ring(c) / (NIC / 2),
    "embeddings of the first and last stage are added up": lambda c, _: 8 * _embedding(c) / (NIC / 2),
    "updates in float32 are not fused": lambda c, _: 34 * _weights(c) / MEMORY,
    "bubbles": lambda c, s: s * (c.layout.pipeline - 1) / c.layout.microbatches,
    "the whole step": lambda c, s: s,
    "the whole step, of tensor degrees 2 and 4": lambda c, s: s * (c.layout.tensor in (2, 4)),
    "the whole step, by tensor groups of a server": lambda c, s: s * (8 // c.layout.tensor - 1),
}
"""Candidates: seconds that they add to a case that is predicted to take so many."""
SCALES: Final = np.concatenate([[0.0], np.geomspace(1e-3, 1e3, 1201)])


def causes(rows: list[Scored]) -> list[Row]:
    """A line without any of them, then one each."""
    measured = np.array([row.case.measured_s for row in rows])
    predicted = np.array([row.predicted_s for row in rows])
    degrees = np.array([row.case.layout.tensor for row in rows])
    lines: list[Row] = []
    for name, seconds in {"none": lambda c, s: 0.0, **CAUSES}.items():
        added = np.array([seconds(row.case, row.predicted_s) for row in rows])
        errors = np.abs((predicted + SCALES[:, None] * added) / measured - 1.0)
        best = int(errors.mean(axis=1).argmin())
        scale = float(SCALES[best])
        line: dict[str, Any] = {"cause": name, "scale": scale, "added_s": float(np.median(scale * added))}
        line["mape"] = float(errors[best].mean())
        for degree in sorted(set(degrees.tolist())):
            line[f"tensor_{degree}"] = float(errors[best][degrees == degree].mean())
        lines.append(line)
    return lines


def main() -> int:
    """Print the table."""
    options = options_with_data(parser(__doc__), PIPELINE_ROWS)
    cases = [c for c in pipeline_cases(options.data) if isinstance(c, Case) and c.layout.pipeline > 1]
    rows = []
    for case in cases[:: 4 if options.quick else 1]:
        say(case.label)
        rows.append(predict(case))
    report(causes(rows), "What would explain rows with pipelines", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
