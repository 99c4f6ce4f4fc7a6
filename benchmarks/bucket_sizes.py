"""What sizes of buckets cost: data parallelism with each of them, and PyTorch's DDP with its own, in turn; medians.

    python -m benchmarks.bucket_sizes [--quick] [--json] [--model gpt2] [--ranks 2] [--network loopback]
                                      [--profile-dir DIR]

Small buckets overlap earlier, but each takes time to start, and on gloo processor time from what is computed
(``cpu_s`` of a topology). The last row is what a search picks. With ``--quick`` two minutes on two idle cores.
"""

from __future__ import annotations

import math
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.emulated import FULL, QUICK, Machine
from benchmarks.harness import Row, median, parser, report
from benchmarks.layouts import MODELS, OPTIONS
from benchmarks.runtime_vs_torch import NETWORKS, ROUNDS, TURN_S, Case
from benchmarks.worker import DDP, Job
from flexsearch.lower import Lowered
from flexsearch.simulate import makespan
from flexsearch.strategy.baselines import baseline

MEBIBYTES = (0.5, 1, 2, 4, 8, 25, 100)


def buckets(lowered: Lowered) -> int:
    """Communications of gradients."""
    return sum(what is not None and what.purpose == "synchronise" for what in lowered.tasks.communication)


def run(case: Case) -> list[Row]:
    """A row for each size, and one of PyTorch's DDP."""
    files, known = {"DDP, 25 MiB": DDP}, {}
    for mebibytes in MEBIBYTES:
        options = OPTIONS.model_copy(update={"bucket_bytes": int(mebibytes * 2**20)})
        strategy = baseline("data-parallel", case.graph, case.topology, options)
        lowered, path = case.lowered(strategy), case.machine.scratch / f"{mebibytes}.json"
        strategy.save(path)
        name = f"{mebibytes:g} MiB"
        files[name], known[name] = str(path), (buckets(lowered), makespan(lowered))
    predicted_s = max(seconds for _, seconds in known.values())
    steps = max(1, math.ceil(TURN_S / predicted_s))
    job = Job(
        case.model.target, case.model.batch, files, rounds=ROUNDS, steps=steps, warmup=2, together=True, timeline=False,
        timeout_s=90.0 + 30 * predicted_s * len(files) * (2 + ROUNDS * steps), arguments=dict(case.model.arguments),
    )  # fmt: skip
    measured = case.machine.measure(job, case.ranks, case.network)
    taken = {name: median(own.turns_s) for name, own in measured.items()}
    rows: list[Row] = []
    for name, seconds in taken.items():
        count, predicted = known.get(name, (None, None))
        rows.append({
            **case.named, "bucket": name, "buckets": count, "predicted_s": predicted, "measured_s": seconds,
            "ratio_vs_ddp": seconds / taken["DDP, 25 MiB"],
        })  # fmt: skip
    return [*rows, found_row(case)]


def found_row(case: Case) -> Row:
    """What a search picks."""
    found = case.found()
    lowered, name = case.lowered(found), case.setting.name_of(found) or "found"
    bucket = f"searched: {name}, {found.options.bucket_bytes / 2**20:g} MiB"
    return {**case.named, "bucket": bucket, "buckets": buckets(lowered), "predicted_s": makespan(lowered)}


def options_of(arguments: Sequence[str] | None) -> Namespace:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--model", choices=list(MODELS), default="gpt2")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--network", choices=NETWORKS, default="loopback")
    made.add_argument("--profile-dir", type=Path, help="keep measured profile and topologies here, and reuse them")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = options_of(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        effort = QUICK if options.quick else FULL
        machine = Machine(options.profile_dir or Path(scratch), Path(scratch), effort)
        rows = run(Case(machine, options.model, options.ranks, options.network))
    report(rows, "sizes of buckets", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
