"""Does a plan run as fast as PyTorch's own parts run the same layout? Both take turns in one run; medians.

    python -m benchmarks.runtime_vs_torch [--quick] [--json] [--models llama] [--ranks 2] [--networks loopback,1gbit]
                                          [--layouts fsdp,tensor] [--profile-dir DIR]

Theirs is the file that ``flexsearch export`` writes of the layout: DistributedDataParallel (with several sizes of
buckets), ``fully_shard``, ``parallelize_module``, ``torch.distributed.pipelining``. Ranks are processes of this
machine, one thread each, pinned to two cores in turn, over loopback or in network namespaces with a limited rate.
Predictions rest on a profile and a probe of this machine. Tables:

- ``layouts``: theirs, ours, one process in plain PyTorch, ours as predicted; the largest difference of losses.
- ``one rank``: the same plan on one rank against plain PyTorch, and what a task costs more.
- ``found``: the plan that a search finds, against the fastest of theirs and one process, in one run.
- ``accuracy``: predicted against measured time of our layouts and of one rank.

A layout that fails has a row with the error, and the others go on. Slow networks need root and iproute2. The whole
takes about two hours on two cores, ``--quick`` 5 minutes.
"""

from __future__ import annotations

import math
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy import agreement
from benchmarks.emulated import FULL, QUICK, Machine
from benchmarks.harness import Row, median, parser, report_tables, say
from benchmarks.layouts import LAYOUTS, MODELS, OPTIONS
from benchmarks.worker import DDP, SINGLE, Job, Measured
from flexsearch.api import optimize
from flexsearch.errors import FlexsearchError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.graph.loading import load_callable
from flexsearch.lower import Lowered, lower_for_ranks
from flexsearch.report.export import torch_file
from flexsearch.search.tuning import whole_seconds
from flexsearch.setting import Setting
from flexsearch.simulate import makespan
from flexsearch.strategy import Strategy

NETWORKS = ("loopback", "10gbit", "1gbit")
TABLES = ("layouts", "one rank", "found", "accuracy")
QUICK_LAYOUTS = ["ddp 25 MiB", "fsdp", "tensor", "1f1b", "zero-bubble"]
TURN_S = 0.3
"""A turn has as many steps as are predicted to take so long."""
ROUNDS = 7
"""Turns of each variant, with --quick too: a pause in one of a few short turns would move the median."""


class Case:
    """One model on so many ranks over a network."""

    def __init__(self, machine: Machine, model: str, ranks: int, network: str) -> None:
        self.machine, self.model, self.ranks, self.network = machine, MODELS[model], ranks, network
        made = load_callable(self.model.target, batch=self.model.batch, device="meta", **self.model.arguments)
        groups = ranks if self.model.norms else 1
        self.graph: OperatorGraph = import_model(
            made.model, made.inputs, made.loss, targets=made.targets, name=model, batch_norm_groups=groups
        )
        self.topology = machine.topology(ranks, network)
        self.setting = Setting.of(self.graph, self.topology, machine.profile(self.graph))
        self.named = {"model": model, "ranks": ranks, "network": network}
        self.fastest: tuple[float, str] | None = None
        """Of theirs: seconds, and what a worker takes."""

    def layout(self, name: str) -> Strategy:
        """A layout as a strategy. Raises StrategyError."""
        path = self.machine.scratch / "topology.json"
        self.topology.save(path)
        return LAYOUTS[name](self.graph, str(path), self.ranks, whole_seconds(self.graph, self.setting.costs))

    def found(self) -> Strategy:
        """The plan that a search over splits and layouts finds, as users get it."""
        return optimize(
            self.graph, topology=self.topology, budget=self.machine.effort.budget, profile=self.setting.costs.profile,
            options=OPTIONS,
        )

    def lowered(self, strategy: Strategy) -> Lowered:
        """What the ranks run, with the costs that were measured here."""
        return lower_for_ranks(self.graph, strategy, self.topology, self.setting.costs)

    def exported(self, name: str, strategy: Strategy) -> str:
        """The layout as a file of ordinary PyTorch. Raises StrategyError."""
        path = self.machine.scratch / f"{len(list(self.machine.scratch.iterdir()))}.py"
        path.write_text(torch_file(strategy, self.graph), encoding="utf-8")
        return str(path)

    def measure(self, ours: Strategy, theirs: str | None, predicted_s: float) -> dict[str, Measured]:
        """Ours, theirs (a file, or DDP) and one process, in turn."""
        path = self.machine.scratch / "ours.json"
        ours.save(path)
        steps = max(1, math.ceil(TURN_S / predicted_s))
        job = Job(
            self.model.target, self.model.batch,
            {**({"theirs": theirs} if theirs else {}), "ours": str(path), SINGLE: SINGLE}, rounds=ROUNDS,
            steps=steps, warmup=2, together=True, timeline=False,
            timeout_s=90.0 + 30 * predicted_s * (2 + ROUNDS * steps), arguments=dict(self.model.arguments),
        )  # fmt: skip
        return self.machine.measure(job, self.ranks, self.network)


def layout_row(case: Case, name: str) -> Row:
    """One layout, ours against theirs."""
    strategy = case.layout(name)
    theirs = DDP if name == "ddp 25 MiB" else case.exported(name, strategy)
    predicted_s = makespan(case.lowered(strategy))
    row = _compared("layouts", case, name, case.measure(strategy, theirs, predicted_s), predicted_s)
    case.fastest = min([(row["theirs_s"], theirs), *([case.fastest] if case.fastest else [])])
    return row


def _compared(table: str, case: Case, name: str, measured: dict[str, Measured], predicted_s: float) -> Row:
    theirs_s, ours_s = (median(measured[name].turns_s) for name in ("theirs", "ours"))
    losses = zip(measured["theirs"].losses, measured["ours"].losses, strict=True)
    return {
        "table": table, **case.named, "layout": name, "theirs_s": theirs_s, "ours_s": ours_s,
        "ratio_vs_torch": ours_s / theirs_s, "one_process_s": median(measured[SINGLE].turns_s),
        "predicted_s": predicted_s, "loss_difference": max(abs(a - b) for a, b in losses), "error": None,
    }  # fmt: skip


def one_rank_row(case: Case) -> Row:
    """The plan for one rank against plain PyTorch."""
    strategy = case.setting.baseline("single", OPTIONS)
    lowered = case.lowered(strategy)
    predicted_s = makespan(lowered)
    measured = case.measure(strategy, None, predicted_s)
    measured["theirs"] = measured[SINGLE]
    row = _compared("one rank", case, "single", measured, predicted_s)
    extra_us = 1e6 * (row["ours_s"] - row["theirs_s"]) / len(lowered.tasks)
    return {**row, "tasks": len(lowered.tasks), "overhead_us_per_task": extra_us}


def found_row(case: Case) -> Row:
    """The plan that a search finds against the fastest of theirs that were measured, or DDP."""
    say(f"searching a plan for {case.named}")
    found = case.found()
    name, predicted_s = case.setting.name_of(found) or "found", makespan(case.lowered(found))
    row = _compared("found", case, name, case.measure(found, (case.fastest or (0, DDP))[1], predicted_s), predicted_s)
    return {**row, "speedup_vs_one_process": row["one_process_s"] / row["ours_s"]}


def accuracy_row(rows: Sequence[Row], named: Row) -> Row:
    """Predicted against measured times of ``rows``."""
    predicted, measured = [row["predicted_s"] for row in rows], [row["ours_s"] for row in rows]
    return {"table": "accuracy", **named, "layouts": len(rows), **agreement(predicted, measured)}


def run(machine: Machine, options: Namespace) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    alone = (1, "loopback")
    for model in options.models:
        for ranks, network in [alone, *((r, n) for r in options.ranks for n in options.networks)]:
            named = {"model": model, "ranks": ranks, "network": network}
            parts = ["single"] if ranks == 1 else [*options.layouts, "found"]
            try:
                case = Case(machine, model, ranks, network)
            except (FlexsearchError, OSError, ValueError) as error:
                rows += [_failed(named, part, error) for part in parts]
                continue
            rows += [_row(case, part) for part in parts]
            cases = (ranks, network), alone
            if good := _predicted([r for r in rows if r["model"] == model and (r["ranks"], r["network"]) in cases]):
                rows.append(accuracy_row(good, named))
    if good := _predicted(rows):
        rows.append(accuracy_row(good, {"model": "all", "ranks": None, "network": "all"}))
    return rows


def _predicted(rows: Sequence[Row]) -> list[Row]:
    """The layouts that were measured, and one rank, if there is a layout."""
    good = [row for row in rows if row["table"] in ("layouts", "one rank") and not row["error"]]
    return good if any(row["table"] == "layouts" for row in good) else []


def _row(case: Case, part: str) -> Row:
    say(f"measuring {case.named}: {part}")
    try:
        row = found_row(case) if part == "found" else one_rank_row(case) if part == "single" else layout_row(case, part)
        say(f"{1e3 * row['theirs_s']:.4g} ms theirs, {1e3 * row['ours_s']:.4g} ms ours ({row['ratio_vs_torch']:.3f})")
        return row
    except (FlexsearchError, OSError, ValueError) as error:
        return _failed(case.named, part, error)


def _failed(named: Row, part: str, error: Exception) -> Row:
    say(f"{part} failed: {error}")
    table = {"single": "one rank", "found": "found"}.get(part, "layouts")
    return {"table": table, **named, "layout": part, "error": " ".join(str(error).split())[-300:]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if no measurement failed."""
    made = parser(__doc__)
    choices = {"models": list(MODELS), "networks": list(NETWORKS), "layouts": list(LAYOUTS)}
    for option, names in choices.items():
        made.add_argument(f"--{option}", help=f"comma-separated, of: {', '.join(names)}")
    made.add_argument("--ranks", help="comma-separated; default: 2,4")
    made.add_argument("--profile-dir", type=Path, help="keep measured profile and topologies here, and reuse them")
    options = made.parse_args(arguments)
    quick = {"models": ["llama"], "networks": ["loopback", "1gbit"], "layouts": QUICK_LAYOUTS}
    for option, names in choices.items():
        text = getattr(options, option)
        chosen = text.split(",") if text else (quick if options.quick else choices)[option]
        if unknown := set(chosen) - set(names):
            made.error(f"--{option}: {', '.join(sorted(unknown))} is none of {', '.join(names)}")
        setattr(options, option, chosen)
    try:
        options.ranks = [int(n) for n in (options.ranks or ("2" if options.quick else "2,4")).split(",")]
    except ValueError:
        made.error(f"--ranks {options.ranks}: give numbers, as 2,4")
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(options.profile_dir or Path(scratch), Path(scratch), QUICK if options.quick else FULL)
        rows = run(machine, options)
    report_tables(rows, {table: table for table in TABLES}, options.json)
    return int(any(row.get("error") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
