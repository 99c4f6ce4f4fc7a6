"""Loss and communication of synchronisation recipes, from the same start on the same data.

    python -m benchmarks.sync_convergence [--quick] [--json] [--workers 16 32] [--dataset text] [--topology ethernet-1g]

Ten configurations in the manner of the coursework that the issue names: exact all-reduce; then, by itself and combined,
a period of 16, gossip with growing distances, and a threshold (configuration 9 has all three); QSGD with 4 bits and
gTop-k beside them. What is trained are simulated ranks in one process; times are simulated.

- ``loss``, ``accuracy``: on held-out data at the end, means over ``seeds``; ``spread``: of accuracy, largest less
  smallest;
- ``comm_s``: what a run takes beyond computing; ``comm_factor``: that of configuration 1 over it;
- ``total_s``: all of it; ``to_loss_s``: until the loss that all of them reach; ``sent_bytes``: by a worker.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from math import log2
from multiprocessing import get_context
from statistics import mean

from benchmarks.harness import Row, parser, report, say
from flexsearch.converging import converge
from flexsearch.report.convergence import Convergence, Run
from flexsearch.topology import Topology


def configurations(workers: int) -> tuple[str, ...]:
    """The ten recipes. The threshold leaves a share 1 / log2(P) of the entries: with feedback an entry then waits
    log2(P) exchanges on average, as long as gossip takes to bring it to everyone."""
    threshold = f"adaptive-threshold:density={1 / log2(workers):.4g}"
    return (
        "all-reduce",
        "local-sgd:period=16",
        "gossip",
        threshold,
        "local-sgd:period=16+gossip",
        f"local-sgd:period=16+{threshold}",
        f"gossip+{threshold}",
        "qsgd:bits=4",
        f"local-sgd:period=16+gossip+{threshold}",
        "gtop-k:density=0.01",
    )


SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
EPOCHS, QUICK_EPOCHS = 6, 1


def rows_of(results: list[Convergence]) -> list[Row]:
    """A row for each configuration, of runs with several seeds."""
    rows: list[Row] = []
    exact = mean(result.runs[0].last.communicated for result in results)
    for k, recipe in enumerate(run.name for run in results[0].runs):
        runs: list[Run] = [result.runs[k] for result in results]
        last = [run.last for run in runs]
        times = [t for run, result in zip(runs, results, strict=True) if (t := run.time_to(result.loss)) is not None]
        accuracy, communicated = [e.accuracy for e in last], mean(e.communicated for e in last)
        rows.append({
            "configuration": k + 1, "recipe": recipe, "workers": results[0].workers, "seeds": len(results),
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
    given = options.parse_args()
    seeds, epochs = (QUICK_SEEDS, QUICK_EPOCHS) if given.quick else (SEEDS, given.epochs)
    rest = epochs, given.batch, given.model, given.dataset, given.topology
    with ProcessPoolExecutor(given.processes, get_context("spawn"), one_thread) as pool:
        jobs = {n: [pool.submit(train, n, seed, *rest) for seed in seeds] for n in given.workers}
        rows = [row for of_size in jobs.values() for row in rows_of([job.result() for job in of_size])]
    report(rows, f"{given.model} on {given.dataset}, {epochs} epochs, {given.topology}", given.json)


if __name__ == "__main__":
    main()
