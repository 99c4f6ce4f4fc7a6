"""``probe`` and ``run``: what happens on real devices, one process for each. Started by hand, they start the ranks on
this machine; started by torchrun, they are a rank."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexsearch.cli import signals, streams
from flexsearch.cli.common import FINITE, JsonOption, check_outputs, file_of, show, stderr, stdout
from flexsearch.cli.models import BatchOption, SetOption, keywords
from flexsearch.errors import RuntimeFailure, StrategyError

if TYPE_CHECKING:
    from flexsearch.cli.learning import Learning
    from flexsearch.cost import Profile
    from flexsearch.measure.learning import Lesson
    from flexsearch.runtime.train import Step, Training
    from flexsearch.strategy import Strategy
    from flexsearch.topology import Topology

RanksOption = Annotated[
    int | None, typer.Option("-n", "--ranks", min=1, max=256, metavar="N", help="Ranks to start on this machine.")
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout", min=1.0, max=1e6, metavar="SECONDS", help="Give up on a silent rank after this time.", **FINITE
    ),
]
PinCoresOption = Annotated[bool, typer.Option("--pin-cores", help="Pin each local process to a core of its own.")]


def probe(
    output: Annotated[Path, typer.Option("--output", "-o", help="Topology file to write.")],
    ranks: RanksOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure for half a minute, less exactly.")] = False,
    backend: Annotated[
        Literal["gloo", "nccl"] | None, typer.Option("--backend", help="Default: nccl where there are CUDA devices.")
    ] = None,
    pin_cores: PinCoresOption = False,
    timeout: TimeoutOption = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Measure a cluster: devices, latency and bandwidth of each pair of ranks, and each collective.

    On several hosts: torchrun --nnodes ... -m flexsearch.cli probe -o topology.json. On one machine: -n N.
    """
    check_outputs({"--output": output})
    if not _is_rank():
        if ranks is None:
            raise RuntimeFailure(
                "the probe runs on every rank",
                "Give -n N for N processes on this machine, or start it on each host with torchrun --nnodes HOSTS "
                "--nproc-per-node N ... -m flexsearch.cli probe -o FILE.",
            )
        _launch(ranks, pin_cores, as_json)
        return
    from flexsearch.measure.probe import main_from_env

    if _first():
        stderr.print(f"measuring {os.environ['WORLD_SIZE']} ranks; this takes up to a minute", soft_wrap=True)
    topology = main_from_env(str(output), quick=quick, backend=backend, timeout_s=timeout)
    if _first():
        _show(as_json, _probed(topology, output), lambda: stdout.print(
            f"{topology.source}\nWrote {output}. Next: flexsearch optimize GRAPH --topology {output}", soft_wrap=True
        ))  # fmt: skip


def run(
    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="Strategy file.")],
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODULE:CALLABLE", help="The model, as for `flexsearch import`.")
    ],
    ranks: RanksOption = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=10**7, metavar="N", help="Training steps.")] = 10,
    batch: BatchOption = None,
    set_: SetOption = None,
    rate: Annotated[float, typer.Option("--lr", min=0.0, metavar="RATE", help="Learning rate.", **FINITE)] = 0.01,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, metavar="N", help="Seed of dropout masks.")] = 0,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile", "-p", metavar="P",
            help="Measured compute times. Default: the prediction in the strategy file. With --trace, the file, which "
            "may be new, learns from the measured times.",
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the predicted and the measured timeline as a Chrome trace.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Pass runs of operators to torch.compile; predictions are for eager code.")
    ] = False,
    tolerate: Annotated[
        bool, typer.Option("--tolerate", help="Go on when other ranks die (gossip, ring, matrix, async, stale).")
    ] = False,
    pin_cores: PinCoresOption = False,
    timeout: TimeoutOption = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Train a model for a few steps under a strategy, and compare measured with predicted times.

    It takes one process for each device of the strategy; -n N starts them on this machine.

    On several hosts: torchrun --nnodes ... -m flexsearch.cli run STRATEGY --model MODULE:CALLABLE.
    """
    check_outputs({"--trace": trace}, strategy, profile, file_of(model))
    learns = profile if trace is not None else None
    check_outputs({"--trace": trace, "--profile": learns}, strategy, file_of(model))
    arguments = keywords(batch, set_)
    if not _is_rank():
        _launch(_check_ranks(strategy, ranks), pin_cores, as_json, tolerate)
        return
    from flexsearch.strategy import Strategy

    plan = Strategy.load(strategy)
    training = _train(
        plan, model, arguments, progress=_Steps(as_json or not _first()), steps=steps, trace=trace is not None,
        profile=None if learns is not None and not learns.exists() else profile, rate=rate, seed=seed,
        timeout_s=timeout, compile=compile, tolerate=tolerate,
    )  # fmt: skip
    if _first():
        data = {"strategy": str(strategy), "model": model, "trace": str(trace) if trace is not None else None}
        _tell(plan, training, data, trace, learns, as_json)


def _train(plan: Strategy, model: str, arguments: dict[str, Any], progress: _Steps, **settings: Any) -> Training:
    """The steps, on this rank. ``settings``: of ``flexsearch.runtime.train.train``."""
    from flexsearch.graph.loading import load_callable
    from flexsearch.runtime.train import train

    loaded = load_callable(model, **arguments)
    _check_batch(plan, model, (loaded.inputs, loaded.targets))
    return train(plan, loaded, progress=progress.step, **settings)


def _tell(
    plan: Strategy, training: Training, data: dict[str, Any], trace: Path | None, learns: Path | None, as_json: bool
) -> None:
    """Write the trace, teach the profile at ``learns``, and print what was measured. ``data``: more for --json."""
    timeline = training.timeline
    if trace is not None and timeline is not None:
        from flexsearch.report import save_trace

        save_trace(trace, training.lowered, training.simulation, timeline.spans, timeline.curves())
    learned = None if learns is None else _learned(plan, training, learns)
    data |= _with_flags(training.summary()) | (learned.data() if learned is not None else {})

    def human() -> None:
        _Steps(silent=False).end(training, trace)
        if learned is not None:
            stdout.print(learned.words(plan.cluster, "task"), soft_wrap=True)

    _show(as_json, data, human)


def _learned(plan: Strategy, training: Training, path: Path) -> Learning:
    """What the timeline of a run teaches the profile at ``path``."""
    from flexsearch.cli.learning import taught
    from flexsearch.cost import Profile
    from flexsearch.measure.traced import learn_from_tasks
    from flexsearch.ranks import meeting_point

    def teach(profile: Profile) -> Lesson:
        timeline = training.timeline
        assert timeline is not None
        return learn_from_tasks(
            training.graph, plan, training.lowered, timeline.spans, timeline.hidden, training.measured_s, profile
        )

    before = Profile.load(path) if path.exists() else None
    return taught(path, before, plan.cluster, meeting_point() is not None, teach)


def _check_ranks(strategy: Path, ranks: int | None) -> int:
    """The number of ranks. Says what is wrong before any process is started."""
    from flexsearch.strategy import Strategy

    plan = Strategy.load(strategy)
    count = len(plan.cluster.devices)
    if ranks is None:
        raise RuntimeFailure(f"{strategy} needs one process for each of {count} devices", f"Give -n {count}.")
    if ranks != count:
        raise RuntimeFailure(
            f"{strategy} is a plan for {count} devices ({plan.topology.name}), so it needs {count} processes, not "
            f"{ranks}",
            f"Give -n {count}, or optimize for a topology of {ranks} devices.",
        )
    return ranks


def _check_batch(plan: Strategy, model: str, batch: Any) -> None:
    """Say that the model is fed something else than the plan was made for, before it is traced with the plan's."""
    actual = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in _tensors(batch)]
    planned = [(spec.shape, spec.dtype) for spec in plan.inputs]
    if actual != planned:
        ours, theirs = (", ".join(f"{dtype} {shape}" for shape, dtype in row) for row in (planned, actual))
        raise StrategyError(
            f"this strategy was made for graph {plan.graph.name!r} with inputs and targets {ours}; {model} gives "
            f"{theirs}",
            "Give the model it was made for, and its --batch and --set.",
        )


def _tensors(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, tuple | list):
        return [tensor for item in tree for tensor in _tensors(item)]
    return [tree] if hasattr(tree, "dtype") else []


def _is_rank() -> bool:
    from flexsearch.ranks import is_rank

    return is_rank()


def _first() -> bool:
    return os.environ.get("RANK") == "0"


def _launch(count: int, pin_cores: bool, as_json: bool, tolerate: bool = False) -> None:
    """This command again, as local ranks. With --json the first of them leaves us the result to print."""
    from flexsearch.children import module
    from flexsearch.runtime.launch import launch

    signals.current.graceful = True  # the ranks must end, too
    try:
        result = launch(module("flexsearch.cli", *sys.argv[1:]), count, pin=pin_cores, grace_s=10.0, tolerate=tolerate)
    except BrokenPipeError as error:
        raise streams.PipeClosed from error
    if as_json:
        streams.emit(result)


def _show(as_json: bool, data: dict[str, Any], human: Callable[[], None]) -> None:
    """As ``show``, from a rank."""
    from flexsearch.runtime.launch import report

    if not (as_json and report(streams.finite(data))):
        show(as_json, data, human)


def _with_flags(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary of a run with a flag beside each loss: JSON has no NaN, and null alone does not say why."""
    steps = [step | {"loss_finite": math.isfinite(step["loss"])} for step in summary["steps"]]
    return summary | {"steps": steps, "loss_finite": all(step["loss_finite"] for step in steps)}


def _probed(topology: Topology, output: Path) -> dict[str, Any]:
    return {
        "topology": topology.name,
        "path": str(output),
        "hosts": len(topology.hosts),
        "backend": topology.communication.backend,
        "devices": [
            {
                "name": d.name, "model": d.model, "float32_flops_per_s": d.flops_for("float32"),
                "memory_bandwidth_bytes_per_s": d.memory_bandwidth, "memory_bytes": d.memory_bytes,
            }
            for d in topology.devices
        ],
        "links": [
            {"a": x.a, "b": x.b, "bandwidth_bytes_per_s": x.bandwidth, "latency_s": x.latency_s} for x in topology.links
        ],
        "factors": topology.communication.factors,
    }  # fmt: skip


class _Steps:
    """Prints each step as it ends, and what it amounts to."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent

    def step(self, done: Step) -> None:
        """One line for one step."""
        from flexsearch.report.units import seconds

        if self.silent:
            return
        if done.step == 0:
            stdout.print(f"{'step':>5}  {'loss':>12}  {'measured':>10}")
        stdout.print(f"{done.step:>5}  {done.loss:>12.6f}  {seconds(done.iteration_s):>10}")

    def end(self, training: Training, trace: Path | None) -> None:
        """Predicted beside measured, and where they differ if that was recorded."""
        from flexsearch.report.units import ratio, seconds, spread

        measured, predicted, ends = training.measured_s, training.predicted_s, training.prediction.interval_s
        told = spread(predicted, ends[1] - predicted) if ends is not None and predicted else seconds(predicted)
        stdout.print(
            f"\nMeasured {seconds(measured)} (median, after warm-up), predicted {told}: measured is "
            f"{ratio(measured / predicted) if predicted else '-'} the prediction.",
            soft_wrap=True,
        )
        if not all(math.isfinite(step.loss) for step in training.steps):
            stdout.print("The loss is not finite; a smaller learning rate (--lr) may help.", soft_wrap=True)
        if training.timeline is not None:
            self._errors(training)
            stdout.print(f"Wrote {trace}; open it in https://ui.perfetto.dev", soft_wrap=True)

    def _errors(self, training: Training) -> None:
        from flexsearch.report.grid import Column, Grid
        from flexsearch.report.units import seconds

        headings = ("tasks", "predicted\n(mean)", "measured\n(mean)", "difference\nin all")
        grid = Grid((Column("task", "text"), *map(Column, headings)), "Where prediction and measurement differ most")
        for row in training.errors()[:12]:
            sign = "-" if row.difference_s < 0 else "+"
            grid.add(
                f"{row.stage_pass} {row.kind} {row.name}".lstrip(), str(row.tasks),
                seconds(row.predicted_s), seconds(row.measured_s),
                sign + seconds(abs(row.difference_s)),
            )  # fmt: skip
        stdout.print(grid)
        self._memory(training)

    def _memory(self, training: Training) -> None:
        from flexsearch.report.grid import Column, Grid
        from flexsearch.report.units import nbytes, signed

        headings = ("predicted\npeak", "measured\npeak", "beyond it\nat most")
        columns = Column("rank", "text"), *map(Column, headings), Column("there, in", "text")
        grid = Grid(columns, "What ranks hold, predicted and measured")
        for row in training.memory_errors():
            grid.add(
                str(row.device), nbytes(row.predicted_peak), nbytes(row.measured_peak),
                signed(row.measured_bytes - row.predicted_bytes, nbytes),
                f"{row.stage_pass} {row.kind} {row.name}".lstrip(),
            )  # fmt: skip
        stdout.print(grid)
