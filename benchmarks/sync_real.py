"""Do recipes take as long on ranks as predicted, and send what they say? Measured over a slow network, beside DDP.

    python -m benchmarks.sync_real [--quick] [--json] [--models llama,alexnet] [--hosts 2,4] [--recipes a,b]
                                   [--profile-dir DIR]

Hosts are network namespaces of this machine (``netns``), 1 Gbit/s each, one thread, pinned to two cores in turn. The
plan is data parallelism; its replicas agree by DDP (PyTorch's), exactly (ours), and by each recipe. Small models take
turns in one run; AlexNet's variants are measured one after another, as they have no room beside each other. A turn has
whole periods of each recipe. ``sent_bytes`` leave the hosts' interfaces, with headers and what ranks send for losses;
``payload_bytes`` are what recipes give to the backend (an all-reduce counts as a ring). ``accuracy``: median error of
predicted times, and Kendall's tau of their order. ``recipe_s``: what the recipe takes of a step on the slowest rank,
``exchange_s`` what of that is exchanges (waiting for others included).

Needs root and iproute2. About half an hour; ``--quick``, 5 minutes.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.accuracy import agreement
from benchmarks.emulated import FULL, QUICK, Machine
from benchmarks.harness import Row, median, parser, report_tables, say
from benchmarks.layouts import MODELS, OPTIONS
from benchmarks.netns import unavailable
from benchmarks.runtime_vs_torch import Case
from benchmarks.worker import DDP, Job
from flexsearch.errors import FlexsearchError
from flexsearch.lower import lower
from flexsearch.search.recipes import with_options
from flexsearch.simulate import Simulation, simulate
from flexsearch.strategy import Strategy
from flexsearch.strategy.records import WeightRecipe

NETWORK: Final = "1gbit"
STEPS: Final = 4
"""Steps of a turn: a whole period of every recipe below."""
RECIPES: Final = (
    "all-reduce", "all-reduce:form=ring", "all-reduce:form=tree", "server", "server:shards=2", "local-sgd:period=4",
    "diloco:period=4", "gossip", "top-k:density=0.01", "gtop-k:density=0.01", "random-k:density=0.01", "qsgd:bits=4",
    "16-bit", "sign:feedback=on", "powersgd:rank=2", "local-sgd:period=4+gossip+top-k:density=0.01",
)  # fmt: skip
QUICK_RECIPES: Final = (
    "all-reduce", "server", "local-sgd:period=4", "gossip", "top-k:density=0.01", "qsgd:bits=4", "16-bit",
)  # fmt: skip
TOGETHER: Final = 50 * 2**20
"""Bytes of weights up to which all variants are alive at once."""


def plans_of(case: Case, recipes: Sequence[str]) -> dict[str, Strategy]:
    """Data parallelism, exact as planned and with each recipe."""
    exact = case.setting.baseline("data-parallel", OPTIONS)
    plans = {"exact": exact}
    for text in recipes:
        plans[text] = with_options(exact, OPTIONS.model_copy(update={"recipes": (WeightRecipe(recipe=text),)}))
    return plans


def predicted(case: Case, plan: Strategy) -> Simulation:
    """The mean step, with the costs that were measured here. Raises FlexsearchError where the recipe does not fit."""
    return simulate(lower(case.graph, plan, case.topology, case.setting.costs))


def rows_of(case: Case, recipes: Sequence[str], rounds: int) -> list[Row]:
    """A row for DDP and for each plan, then one on how near predictions were."""
    plans, simulations, files = plans_of(case, recipes), dict[str, Simulation](), {DDP: DDP}
    for number, (name, plan) in enumerate(plans.items()):
        try:
            simulations[name] = predicted(case, plan)
        except FlexsearchError as error:
            say(f"left out, {name}: {error}")
            continue
        path = case.machine.scratch / f"recipe-{number}.json"
        plan.save(path)
        files[name] = str(path)
    total_s = sum(simulation.makespan_s for simulation in simulations.values())
    say(f"measuring {case.named}: {len(files)} variants, {total_s:.3g} s a step of each")
    small = sum(t.nbytes for t in case.graph.of_kind("parameter")) <= TOGETHER
    job = Job(
        case.model.target, case.model.batch, files, rounds=rounds, steps=STEPS, warmup=STEPS, together=small,
        timeline=False, timeout_s=180.0 + 10 * total_s * STEPS * (1 + rounds), arguments=dict(case.model.arguments),
    )  # fmt: skip
    measured = case.machine.measure(job, case.ranks, case.network)
    ddp_s = median(measured[DDP].turns_s)
    rows: list[Row] = []
    for name, row in measured.items():
        step_s, simulation = median(row.turns_s), simulations.get(name)
        rows.append({
            "table": "recipes", "model": case.named["model"], "hosts": case.ranks, "recipe": name,
            "iteration_s": step_s, "ratio_vs_ddp": ddp_s / step_s,
            "predicted_s": simulation.makespan_s if simulation else None,
            "error_percent": 100 * (simulation.makespan_s / step_s - 1) if simulation else None,
            "recipe_s": row.recipe_s or None, "exchange_s": row.exchange_s or None,
            "sent_bytes": sum(row.sent_bytes), "payload_bytes": sum(row.payload_bytes) or None,
            "predicted_bytes": simulation.moved_bytes if simulation else None,
        })  # fmt: skip
    told = [row for row in rows if row["predicted_s"] is not None]
    times = [row["predicted_s"] for row in told], [row["iteration_s"] for row in told]
    rows.append({
        "table": "accuracy", "model": case.named["model"], "hosts": case.ranks, "recipes": len(told),
        **agreement(*times),
    })  # fmt: skip
    return rows


def run(machine: Machine, options: Namespace) -> list[Row]:
    """All rows; a model that fails does not keep the others from running."""
    rows: list[Row] = []
    for model in options.models:
        for hosts in options.hosts:
            try:
                rows += rows_of(Case(machine, model, hosts, NETWORK), options.recipes, 3 if options.quick else 5)
            except (FlexsearchError, OSError) as error:
                say(f"{model} on {hosts} hosts failed: {error}")
                rows.append({"table": "recipes", "model": model, "hosts": hosts, "error": " ".join(str(error).split())})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if no measurement failed."""
    made = parser(__doc__)
    made.add_argument("--models", help=f"comma-separated, of: {', '.join(MODELS)}")
    made.add_argument("--hosts", help="comma-separated; default: 2,4")
    made.add_argument("--recipes", help="comma-separated, without options that have commas")
    made.add_argument("--profile-dir", type=Path, help="keep measured profile and topologies here, and reuse them")
    options = made.parse_args(arguments)
    if (reason := unavailable()) is not None:
        say(f"this benchmark needs network namespaces: {reason}")
        return 2
    options.models = (options.models or ("llama" if options.quick else "llama,gpt2,alexnet")).split(",")
    if unknown := set(options.models) - set(MODELS):
        made.error(f"--models: {', '.join(sorted(unknown))} is none of {', '.join(MODELS)}")
    options.hosts = [int(n) for n in (options.hosts or ("4" if options.quick else "2,4")).split(",")]
    usual = QUICK_RECIPES if options.quick else RECIPES
    options.recipes = options.recipes.split(",") if options.recipes else usual
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(options.profile_dir or Path(scratch), Path(scratch), QUICK if options.quick else FULL)
        rows = run(machine, options)
    report_tables(rows, {"recipes": "recipes", "accuracy": "accuracy"}, options.json)
    return int(any(row.get("error") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
