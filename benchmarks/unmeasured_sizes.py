"""How far off are times of operators that a profile lacks? On one core, with and without the device's figures.

    python -m benchmarks.unmeasured_sizes [--quick] [--json] [--models gpt2,llama,alexnet,resnet50]

Pieces of all operators of each model are measured, whole ones and splits into up to 4. Then they are predicted from

- ``nothing``: no entry of any model;
- ``whole``: entries of the model's whole operators, of its pieces;
- ``others``: entries of all other models, but for those of the same sizes.

``peaks``: by the peaks that ``flexsearch probe`` measures of this core, the usual shares of them, and what entries say;
``figures``: by the figures that ``flexsearch profile`` fits to reference operators, and what entries say. The error of
a sum is that of all pieces together, |predicted - measured| / measured; the median is of single tasks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from benchmarks.harness import Row, median, parser, report, say
from benchmarks.layouts import MODELS
from flexsearch.allocator import keep_freed_memory
from flexsearch.cost import Costs, Profile, ProfileDevice
from flexsearch.cost.efficiency import work_of
from flexsearch.cost.profile import Entry, Figures, cpu_model
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.graph.loading import load_callable
from flexsearch.measure.cases import Case, plan
from flexsearch.measure.machine import measure
from flexsearch.measure.profiler import measure_entries, measure_figures
from flexsearch.measure.sweeps import Bench
from flexsearch.topology import Communication, Device, Topology
from flexsearch.topology.kernels import USUAL

PARTS = 4
Errors = list[tuple[str, float, float]]
"""(Kind of work, predicted, measured) of tasks, s."""


def graph_of(model: str) -> OperatorGraph:
    """The graph of a model of ``benchmarks.layouts``."""
    named = MODELS[model]
    made = load_callable(named.target, batch=named.batch, device="meta", **named.arguments)
    return import_model(made.model, made.inputs, made.loss, targets=made.targets, name=model)


def core(seconds: float) -> Topology:
    """One core, as ``flexsearch probe`` describes it."""
    found = measure(torch.device("cpu"), seconds)
    device = Device(
        name="core", kind="cpu", host="host", model=cpu_model(), flops=found.flops, overhead_s=found.overhead_s,
        memory_bandwidth=found.copy_bandwidth / USUAL.memory, memory_bytes=1 << 34,
    )  # fmt: skip
    return Topology(
        name="core", devices=(device,), switches=(), links=(), communication=Communication(backend="gloo")
    )  # fmt: skip


def profile_of(entries: Mapping[str, Entry], figures: Figures | None) -> Profile:
    """Of this core."""
    device = ProfileDevice(kind="cpu", model=cpu_model())
    return Profile(device=device, torch=torch.__version__, entries=dict(entries), figures=figures)


def errors(graph: OperatorGraph, cases: Mapping[str, Case], measured: Mapping[str, Entry], costs: Costs) -> Errors:
    """Of all pieces that the profile of ``costs`` lacks."""
    found: Errors = []
    number = {op.name: k for k, op in enumerate(graph.operators)}
    known = set() if costs.profile is None else costs.profile.entries.keys()
    for key, case in cases.items():
        if key in measured and key not in known:
            predicted, entry = costs.compute(number[case.costed.op.name], case.piece, 0), measured[key]
            pairs = zip(predicted, (entry.forward_s, entry.backward_s), strict=True)
            found += [(work_of(entry.kind), p, m) for p, m in pairs if m > 0.0]
    return found


def rows_of(model: str, graphs: Mapping[str, OperatorGraph], entries: Mapping[str, Mapping[str, Entry]],
            here: Topology, figures: Figures) -> Iterator[Row]:  # fmt: skip
    """By what is known, of all work and of each kind."""
    graph, own = graphs[model], entries[model]
    cases = {case.key: case for row in plan(graph, PARTS) for case in row}
    whole = {case.key for row in plan(graph, 1) for case in row}
    others = {key: one for name, of in entries.items() if name != model for key, one in of.items()}
    known = {
        "nothing": {}, "whole": {key: one for key, one in own.items() if key in whole},
        "others": {key: one for key, one in others.items() if key not in own},
    }  # fmt: skip
    for name, given in known.items():
        both = {
            how: errors(graph, cases, own, Costs(graph, here, profile_of(given, fitted)))
            for how, fitted in (("peaks", None), ("figures", figures))
        }
        for work in ("all", *sorted({work for work, _, _ in both["peaks"]})):
            row: dict[str, object] = {"model": model, "known": name, "work": work}
            for how, found in both.items():
                pairs = [(p, m) for of, p, m in found if work in ("all", of)]
                row |= {
                    "tasks": len(pairs), f"{how}_sum_percent": 100 * _of_sum(pairs),
                    f"{how}_median_percent": 100 * median([abs(p / m - 1.0) for p, m in pairs]),
                }  # fmt: skip
            yield row


def _of_sum(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(abs(p - m) for p, m in pairs) / sum(m for _, m in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--models", help=f"comma-separated, of: {', '.join(MODELS)}")
    chosen = options.parse_args(arguments)
    models = chosen.models.split(",") if chosen.models else list(MODELS)
    if unknown := set(models) - set(MODELS):
        options.error(f"--models: {', '.join(sorted(unknown))} is none of {', '.join(MODELS)}")
    seconds, repeats = (3.0, 1) if chosen.quick else (45.0, 5)
    torch.set_num_threads(1)
    keep_freed_memory()
    bench, graphs, entries = Bench("cpu"), {model: graph_of(model) for model in models}, {}
    for model, graph in graphs.items():
        say(f"measuring {model}")
        entries[model] = measure_entries(bench, plan(graph, PARTS), repeats, time.monotonic() + seconds, None)
    say("measuring reference operators")
    here, figures = core(1.0 if chosen.quick else 5.0), measure_figures(bench, {})
    rows = [row for model in models for row in rows_of(model, graphs, entries, here, figures)]
    report(rows, "operators that were not measured", chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
