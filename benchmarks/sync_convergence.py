"""Loss and communication of synchronisation recipes, from the same start on the same data.

    python -m benchmarks.sync_convergence [--quick] [--json] [--workers 16 32] [--dataset text] [--topology ethernet-1g]
        [--only configurations choice] [--target-accuracy 0.44]

Table "configurations": ten in the manner of the coursework that the issue names: exact all-reduce; then, by itself and
combined, a period of 16, gossip with growing distances, and a threshold (configuration 9 has all three); QSGD with 4
bits and gTop-k beside them. What is trained are simulated ranks in one process; times are simulated.

- ``loss``, ``accuracy``: on held-out data at the end, means over ``seeds``; ``spread``: of accuracy, largest less
  smallest;
- ``comm_s``: what a run takes beyond computing; ``comm_factor``: that of configuration 1 over it;
- ``total_s``: all of it; ``to_loss_s``: until the loss that all of them reach; ``sent_bytes``: by a worker.

Table "choice": the recipe that ``converge --allow all`` chooses with seed 0, by the time to an accuracy, beside every
exact and every single recipe that is tried, all trained to the end with each seed of ``--choice-seeds``.

- ``to_target_s``: mean time to the accuracy; None where a seed does not reach it, ``reached`` says how many do;
- ``over_choice``: that over the choice's; ``raced``: recipes that were trained to choose, ``race_s`` of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import inf
from multiprocessing import get_context
from statistics import mean
from time import perf_counter

from benchmarks.harness import Row, parser, report, say
from flexsearch.converging import converge
from flexsearch.errors import RecipeError, RuntimeFailure
from flexsearch.report.convergence import Convergence, Run
from flexsearch.search.recipes import ALL, EXACT, combinations
from flexsearch.sync.configurations import configurations
from flexsearch.topology import Topology

SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
EPOCHS, QUICK_EPOCHS = 6, 1
TABLES = ("configurations", "choice")
QUICK_ALLOW = ("local-sgd", "top-k")


def rows_of(results: list[Convergence]) -> list[Row]:
    """A row for each configuration, of runs with several seeds."""
    rows: list[Row] = []
    exact = mean(result.runs[0].last.communicated for result in results)
    for k, recipe in enumerate(run.name for run in results[0].runs):
        runs: list[Run] = [result.runs[k] for result in results]
        last = [run.last for run in runs]
        times = [t for run, result in zip(runs, results, strict=True) if (t := result.time_of(run)) is not None]
        accuracy, communicated = [e.accuracy for e in last], mean(e.communicated for e in last)
        rows.append({
            "table": "configurations", "configuration": k + 1, "recipe": recipe, "workers": results[0].workers,
            "seeds": len(results),
            "loss": mean(e.loss for e in last), "accuracy": mean(accuracy), "spread": max(accuracy) - min(accuracy),
            "comm_s": communicated, "comm_factor": exact / communicated, "total_s": mean(e.seconds for e in last),
            "to_loss_s": mean(times), "sent_bytes": mean(e.sent for e in last) / results[0].workers,
        })  # fmt: skip
    return rows


def train(workers: int, seed: int, epochs: int, batch: int, model: str, dataset: str, topology: str) -> Convergence:
    """All configurations with one seed."""
    say(f"{workers} workers, seed {seed}")
    cluster = Topology.load(f"{topology}:{workers}")
    return converge(configurations(workers), model, dataset, cluster, epochs=epochs, batch=batch, seed=seed)


@dataclass(frozen=True)
class Case:
    """Where recipes are compared by the time to an ``accuracy``. ``topology``: a preset; ``allow``: of the choice."""

    workers: int
    epochs: int
    batch: int
    accuracy: float
    allow: tuple[str, ...]
    model: str
    dataset: str
    topology: str

    def trained(self, recipes: Sequence[str], seed: int = 0, allow: Sequence[str] = ()) -> Convergence:
        """Training under recipes, or under what is allowed."""
        return converge(
            recipes, self.model, self.dataset, f"{self.topology}:{self.workers}", epochs=self.epochs,
            batch=self.batch, seed=seed, target_accuracy=self.accuracy, allow=allow,
        )  # fmt: skip


def choose(case: Case) -> Row:
    """The choice with seed 0, and what it took."""
    say(f"{case.workers} workers: choosing among {', '.join(case.allow)}")
    began = perf_counter()
    result = case.trained((), allow=case.allow)
    return {
        "recipe": result.first.name if result.first is not None else "", "raced": result.raced,
        "left_out": result.left_out, "race_s": perf_counter() - began,
    }  # fmt: skip


def time_to(case: Case, recipe: str, seed: int) -> tuple[float | None, float] | None:
    """Time to the accuracy (None: not reached) and the highest accuracy; None: so many workers cannot follow it."""
    try:
        result = case.trained([recipe], seed)
    except (RecipeError, RuntimeFailure):
        return None
    return result.time_of(result.runs[0]), result.runs[0].best("accuracy")


def choice_rows(pool: ProcessPoolExecutor, case: Case, seeds: Sequence[int]) -> list[Row]:
    """The choice first, then all other recipes by their time."""
    chosen = pool.submit(choose, case)
    rows = times_of(pool, case, ["all-reduce", *EXACT, *combinations(case.allow)[0]], seeds)
    choice = chosen.result()
    named = {row["recipe"]: row for row in rows}
    own = named.pop(choice["recipe"], None) or times_of(pool, case, [choice["recipe"]], seeds)[0]
    others = sorted(named.values(), key=lambda row: inf if row["to_target_s"] is None else row["to_target_s"])
    about = {name: choice[name] for name in ("raced", "left_out", "race_s")}
    table: list[Row] = []
    for row in (own, *others):
        both = row["to_target_s"] is not None and own["to_target_s"] is not None
        over = row["to_target_s"] / own["to_target_s"] if both else None
        role, more = ("choice", about) if row is own else ("single", dict.fromkeys(about))
        table.append({**row, "over_choice": over, "role": role, **more})
    return table


def times_of(pool: ProcessPoolExecutor, case: Case, recipes: Sequence[str], seeds: Sequence[int]) -> list[Row]:
    """A row for each recipe that so many workers can follow."""
    jobs = {name: [pool.submit(time_to, case, name, seed) for seed in seeds] for name in recipes}
    rows: list[Row] = []
    for name, futures in jobs.items():
        results = [result for future in futures if (result := future.result()) is not None]
        if not results:
            continue
        times = [time for time, _ in results if time is not None]
        rows.append({
            "table": "choice", "recipe": name, "workers": case.workers, "target_accuracy": case.accuracy,
            "seeds": len(seeds), "reached": len(times),
            "to_target_s": mean(times) if len(times) == len(seeds) else None,
            "best_accuracy": mean(best for _, best in results),
        })  # fmt: skip
    return rows


def one_thread() -> None:
    """Of each process: threads that wait for each other in every small product take longer than one alone."""
    import torch

    torch.set_num_threads(1)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workers", type=int, nargs="+", default=[16, 32], help="numbers of workers")
    options.add_argument("--dataset", default="text", help="text, digits, or cifar10:FOLDER")
    options.add_argument("--model", default="mlp", help="mlp, cnn, or MODULE:CALLABLE")
    options.add_argument("--topology", default="ethernet-1g", help="a preset whose nodes have one device")
    options.add_argument("--epochs", type=int, default=EPOCHS, help="passes over the data")
    options.add_argument("--batch", type=int, default=32, help="samples of a worker's step")
    options.add_argument("--processes", type=int, default=2, help="runs at the same time, one thread each")
    options.add_argument("--only", nargs="+", choices=TABLES, default=TABLES, help="tables")
    options.add_argument("--target-accuracy", type=float, default=0.44, help="of the choice")
    options.add_argument("--choice-seeds", type=int, nargs="+", default=list(SEEDS), help="with which it is checked")
    given = options.parse_args()
    seeds, epochs = (QUICK_SEEDS, QUICK_EPOCHS) if given.quick else (SEEDS, given.epochs)
    names = given.model, given.dataset, given.topology
    allow = QUICK_ALLOW if given.quick else (ALL,)
    target, checked = (0.3, seeds) if given.quick else (given.target_accuracy, tuple(given.choice_seeds))
    tables: dict[str, list[Row]] = {}
    with ProcessPoolExecutor(given.processes, get_context("spawn"), one_thread) as pool:
        if "configurations" in given.only:
            jobs = {n: [pool.submit(train, n, seed, epochs, given.batch, *names) for seed in seeds]
                    for n in given.workers}  # fmt: skip
            tables["configurations"] = [
                row for of_size in jobs.values() for row in rows_of([job.result() for job in of_size])
            ]
        if "choice" in given.only:
            tables["choice"] = [
                row for n in given.workers
                for row in choice_rows(pool, Case(n, epochs, given.batch, target, allow, *names), checked)
            ]  # fmt: skip
    title = f"{given.model} on {given.dataset}, {epochs} epochs, {given.topology}"
    if given.json:
        report([row for rows in tables.values() for row in rows], "", True)
        return
    for name, rows in tables.items():
        report(rows, f"{name}: {title}", False)


if __name__ == "__main__":
    main()
