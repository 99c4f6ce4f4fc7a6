"""Is a found plan really faster than data parallelism, and are predictions right? Measured over a slow network.

    python -m benchmarks.hybrid_vs_ddp [--quick] [--json] [--models alexnet,mlp] [--budget 60s] [--profile-dir DIR]

Hosts are network namespaces of this machine (``netns``): 1 Gbit/s each, one thread, pinned to two cores in turn, so
that four hosts share them two by two. For each model the machine is profiled, a plan is searched, and then

1. speed: PyTorch's DistributedDataParallel, the plan, the best of the other baselines (each with the bucket size that
   suits it best) and a single process take turns in one run on four hosts, and their losses are compared. (ResNet-50:
   DDP normalises by the statistics of each rank's samples. The plan is made for that function, too, by
   ``batch_norm_groups=4``; the single process normalises the whole batch, and its losses differ.)
2. accuracy: the plan, baselines and random strategies are run on two hosts with a core each and on four with two to a
   core: predicted beside measured iteration time, whether their order is kept, and where the error sits.

``--picture FILE.png`` draws predicted and measured timelines of data parallelism and of the plan, of the last model.

Needs root and iproute2, and half an hour for each large model (``--quick``: 5 minutes for AlexNet and the MLP).
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.accuracy import accuracy
from benchmarks.emulated import BATCH, BATCH_NORM_GROUPS, FULL, QUICK, Machine, Plans
from benchmarks.harness import Row, median, parser, report_tables, say, spread
from benchmarks.netns import unavailable
from benchmarks.worker import DDP, SINGLE, Job
from flexsearch.errors import FlexsearchError
from flexsearch.report import PlanRow
from flexsearch.report.plots import FORMATS, rendered, timelines
from flexsearch.setting import parse_budget
from flexsearch.strategy import Strategy

HOSTS = 4
PAIR = 2
TITLES = {
    "speed": "Speed on 4 hosts, 1 Gbit/s, two to a core (loss difference: largest, from single "
    "process; with batch norm, from DDP)",
    "accuracy": "Predicted and measured iteration time",
    "summary": "Accuracy (unshared: as if every host had a processor of its own)",
    "causes": "Where predictions err: predicted less measured, percent of the step, mean over the strategies",
}


def speed(plans: Plans) -> list[Row]:
    """DDP, the best plan, the best of the other tuned baselines and a single process, in turn; one row each."""
    effort, plan = plans.machine.effort, plans.found
    best, other = _best_other(plans)
    ours = {"plan": plan, best: other}
    same = {DDP: plans.baselines["data-parallel"], **ours, SINGLE: plans.baselines["single"]}
    named = {"plan": plans.setting.name_of(plan) or "found by the search", best: best}
    predicted = {name: plans.predict(strategy)[1].makespan_s for name, strategy in same.items()}
    say(f"measuring {plans.model}: DDP, plan ({named['plan']}), {best}, single process")
    total = sum(predicted.values())
    rounds = int(min(effort.rounds, max(2, 3 * effort.variant_s // (effort.steps * total))))
    job = Job(
        plans.target, plans.batch, {DDP: DDP, **plans.save(ours), SINGLE: SINGLE}, rounds=rounds,
        steps=effort.steps, warmup=2, together=True, timeline=False,
        timeout_s=180.0 + 8 * total * (2 + rounds * effort.steps), arguments=plans.arguments,
    )  # fmt: skip
    measured = plans.machine.measure(job, plans.hosts)
    ddp_s = median(measured[DDP].turns_s)
    grouped = plans.model in BATCH_NORM_GROUPS
    reference = measured[DDP if grouped else SINGLE].losses
    rows: list[Row] = []
    for name, row in measured.items():
        comparable = name != SINGLE or not grouped
        differences = [abs(a - b) for a, b in zip(row.losses, reference, strict=True)]
        rows.append(
            {
                "table": "speed",
                "model": plans.model,
                "variant": name,
                "strategy": named.get(name, ""),
                "iteration_s": median(row.turns_s),
                "spread_s": spread(row.turns_s),
                "ratio_vs_ddp": ddp_s / median(row.turns_s),
                "ratio_vs_single": median(measured[SINGLE].turns_s) / median(row.turns_s),
                "predicted_iteration_s": predicted[name],
                "loss_difference": max(differences) if comparable else None,
                "loss_difference_first_5_steps": max(differences[:5]) if comparable else None,
                "last_loss": row.losses[-1],
                "sent_bytes_per_rank": max(row.sent_bytes),
            }
        )
    return rows


def picture(plans: Plans, path: Path) -> None:
    """Draw a step of data parallelism above one of the plan, each task as predicted and as measured. Both run operator
    by operator, which takes longer than a step of ``speed``."""
    found = plans.setting.name_of(plans.found) or "found by the search"
    chosen = {"data parallel": plans.baselines["data-parallel"], found: plans.found}
    predicted = {name: plans.predict(strategy) for name, strategy in chosen.items()}
    total = sum(simulation.makespan_s for _, simulation in predicted.values())
    job = Job(
        plans.target, plans.batch, plans.save(chosen), rounds=1, steps=1, warmup=1, together=False,
        timeline=True, timeout_s=180.0 + 30 * total, arguments=plans.arguments,
    )  # fmt: skip
    measured = plans.machine.measure(job, plans.hosts)
    rows = [PlanRow(name, simulation, lowered) for name, (lowered, simulation) in predicted.items()]
    real = {name: (row.timeline.spans, row.timeline.iteration_s) for name, row in measured.items() if row.timeline}
    title = f"{plans.model}, batch {plans.batch}, {plans.hosts} hosts with 1 Gbit/s: predicted and measured"
    path.write_bytes(rendered(timelines(rows, title, most_devices=2, most_links=2, measured=real), path.suffix[1:]))
    say(f"wrote {path}")


def _best_other(plans: Plans) -> tuple[str, Strategy]:
    """The baseline that is predicted to be the fastest, each with the bucket size that suits it best: not data
    parallelism nor a single process, which are measured anyway, nor the plan itself."""
    left_out = {"data-parallel", "single", plans.setting.name_of(plans.found)}
    names = [name for name in plans.baselines if name not in left_out]
    best = min(names, key=lambda name: plans.predict(plans.baselines[name])[1].makespan_s)
    return best, plans.baselines[best]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if every part of it came to its end."""
    made = parser(__doc__)
    made.add_argument("--models", help=f"comma-separated, of {', '.join(BATCH)}")
    made.add_argument("--budget", help='of each search: "60s"')
    made.add_argument("--profile-s", type=float, help="seconds to measure the operators of each model, at most")
    made.add_argument("--rounds", type=int, help="turns of each variant")
    made.add_argument("--batch", type=int, help="of all models, instead of their own")
    made.add_argument("--strategies", type=int, help="that the accuracy is measured on")
    made.add_argument("--profile-dir", type=Path, help="keep measured profile and topologies here, and reuse them")
    made.add_argument("--picture", type=Path, help="a .png or .svg file for the timelines of the last model")
    made.add_argument("--only", choices=("speed", "accuracy"), help="leave the other table out")
    made.add_argument("--hosts", type=int, choices=(PAIR, HOSTS), help="only the accuracy on so many hosts")
    options = made.parse_args(arguments)
    if options.picture is not None and options.picture.suffix[1:] not in FORMATS:
        made.error(f"--picture {options.picture}: it must end in {', '.join(f'.{kind}' for kind in FORMATS)}")
    if (reason := unavailable()) is not None:
        say(f"this benchmark needs network namespaces: {reason}")
        return 2
    models = (options.models or ("alexnet,mlp" if options.quick else ",".join(BATCH))).split(",")
    if unknown := sorted(set(models) - set(BATCH)):
        made.error(f"unknown models: {', '.join(unknown)}; there are {', '.join(BATCH)}")
    effort = QUICK if options.quick else FULL
    if options.budget:
        parse_budget(options.budget)
        effort = dataclasses.replace(effort, budget=options.budget)
    if options.profile_s:
        effort = dataclasses.replace(effort, profile_s=options.profile_s)
    if options.rounds:
        effort = dataclasses.replace(effort, rounds=options.rounds)
    if options.strategies:
        effort = dataclasses.replace(effort, strategies=options.strategies)
    with tempfile.TemporaryDirectory() as scratch:
        rows, failed = run(models, Machine(options.profile_dir or Path(scratch), Path(scratch), effort), options)
    report_tables(rows, TITLES, options.json)
    return int(failed)


def run(models: Sequence[str], machine: Machine, options: Namespace) -> tuple[list[Row], bool]:
    """Rows of the tables that are asked for, and whether any part failed: the others go on without it."""
    rows: list[Row] = []
    failed = False
    for model in models:
        parts: list[tuple[str, int, Callable[[Plans], list[Row]]]] = [
            ("speed", HOSTS, speed), ("accuracy", PAIR, accuracy), ("accuracy", HOSTS, accuracy),
        ]  # fmt: skip
        made: dict[int, Plans] = {}
        for name, hosts, part in parts:
            wanted = options.only in (None, name) and (name == "speed" or options.hosts in (None, hosts))
            if wanted:
                began = time.monotonic()
                try:
                    made[hosts] = made.get(hosts) or Plans(machine, model, hosts, options.batch)
                    rows += part(made[hosts])
                except FlexsearchError as error:
                    say(f"{name} of {model} on {hosts} hosts failed: {error}")
                    failed = True
                say(f"{name} of {model} on {hosts} hosts took {time.monotonic() - began:.0f} s")
    if options.picture is not None and HOSTS in made:
        picture(made[HOSTS], options.picture)
    return rows, failed


if __name__ == "__main__":
    sys.exit(main())
