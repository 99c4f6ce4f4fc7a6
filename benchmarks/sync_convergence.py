"""Loss and communication of synchronisation recipes, from the same start on the same data.

    python -m benchmarks.sync_convergence [--quick] [--json] [--workers 16] [--dataset text] [--topology ethernet-1g]

Ten configurations in the manner of the coursework that the issue names: exact all-reduce; then, by itself and combined,
a period of 16, gossip with growing distances, and a threshold (configuration 9 has all three); QSGD with 4 bits and
gTop-k beside them. What is trained are simulated ranks in one process; times are simulated.

- ``loss``, ``accuracy``: on held-out data at the end, means over ``seeds``; ``spread``: of accuracy, largest less
  smallest;
- ``comm_s``: what a run takes beyond computing; ``comm_factor``: that of configuration 1 over it;
- ``total_s``: all of it; ``to_loss_s``: until the loss that all of them reach; ``sent_bytes``: by a worker.
"""

from __future__ import annotations

from statistics import mean
from typing import Final

from benchmarks.harness import Row, parser, report, say
from flexsearch.converging import converge
from flexsearch.report.convergence import Convergence, Run
from flexsearch.topology import Topology

TAU: Final = 0.02
"""Of a gradient's entries, and of what weights change by in a period. (At 0.002 half of them are sent, at 8 bytes.)"""
CONFIGURATIONS: Final = (
    "all-reduce",
    "local-sgd:period=16",
    "gossip",
    f"threshold:tau={TAU}",
    "local-sgd:period=16+gossip",
    f"local-sgd:period=16+threshold:tau={TAU}",
    f"gossip+threshold:tau={TAU}",
    "qsgd:bits=4",
    f"local-sgd:period=16+gossip+threshold:tau={TAU}",
    "gtop-k:density=0.01",
)
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
EPOCHS, QUICK_EPOCHS = 6, 1


def rows_of(results: list[Convergence]) -> list[Row]:
    """A row for each configuration, of runs with several seeds."""
    rows: list[Row] = []
    exact = mean(result.runs[0].last.communicated for result in results)
    for k, recipe in enumerate(CONFIGURATIONS):
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


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workers", type=int, nargs="+", default=[16], help="numbers of workers")
    options.add_argument("--dataset", default="text", help="text, digits, or cifar10:FOLDER")
    options.add_argument("--model", default="mlp", help="mlp, cnn, or MODULE:CALLABLE")
    options.add_argument("--topology", default="ethernet-1g", help="a preset whose nodes have one device")
    arguments = options.parse_args()
    seeds, epochs = (QUICK_SEEDS, QUICK_EPOCHS) if arguments.quick else (SEEDS, EPOCHS)
    rows: list[Row] = []
    for workers in arguments.workers:
        results = []
        for seed in seeds:
            say(f"{workers} workers, seed {seed}")
            cluster = Topology.load(f"{arguments.topology}:{workers}")
            results.append(
                converge(
                    CONFIGURATIONS, arguments.model, arguments.dataset, cluster, epochs=epochs, seed=seed,
                    on_epoch=lambda name, epoch: say(f"  {name}: {epoch.loss:.3f}"),
                )
            )  # fmt: skip
        rows += rows_of(results)
    title = f"{arguments.model} on {arguments.dataset}, {epochs} epochs, {arguments.topology}"
    report(rows, title, arguments.json)


if __name__ == "__main__":
    main()
