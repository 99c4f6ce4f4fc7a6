"""One device: is a plan's step as fast as eager PyTorch, and is it predicted well? Both take turns in one process.

    python -m benchmarks.one_device [--quick] [--json] [--device cpu|cuda] [--models gpt2,resnet50]
                                    [--topology hgx-h100] [--profile FILE] [--causes]

Each model trains by SGD with momentum in the precisions that it is listed with; eager PyTorch computes half precision
under autocast, a plan by its policy. Columns: ``eager_s``, ``ours_s``: seconds of a step, medians of the turns;
``ratio_vs_eager``; ``preset_s``: as predicted by the figures of ``--topology``; ``profile_s``: by a profile that
was measured here, in so many seconds (``profiling_s``); both with the error against ``ours_s``; ``peak_bytes``: what
PyTorch's allocator held at most in our step, against ``predicted_peak_bytes`` (on GPUs; for CPUs there is
``benchmarks.memory_peaks``). ``--profile FILE`` keeps the profile. A CPU computes on one thread; its models are small,
those called tiny take their time for calls alone.
``--causes`` prints the kinds of operators whose predictions miss most in a step that is measured task by task.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.harness import Row, alternate, median, parser, report_tables, say
from benchmarks.worker import LEARNING_RATE, MOMENTUM
from flexsearch.clocks import clock_of
from flexsearch.cost import Costs, Profile
from flexsearch.errors import FlexsearchError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_with_constants
from flexsearch.graph.loading import Loaded, load_callable
from flexsearch.graph.precision import Precision
from flexsearch.lower import Lowered, lower_for_ranks
from flexsearch.measure.profiler import profile_graph
from flexsearch.runtime.parallel import Parallel, distribute
from flexsearch.runtime.timeline import compare, record
from flexsearch.setting import Setting
from flexsearch.simulate import simulate
from flexsearch.strategy import Options, Strategy
from flexsearch.topology import Topology

ROUNDS, TURN_S = 11, 0.3
AUTOCAST: Final[Mapping[str, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}
CAUSES = 12
"""So many kinds of tasks are listed."""


@dataclass(frozen=True)
class Model:
    """A model of the zoo with a batch that fills a device, or is as small as laptops train."""

    target: str
    batch: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    precisions: Sequence[Precision] = ("as-is", "bf16")


_SMALL: Final = {"seq": 32, "layers": 8, "hidden": 128, "heads": 4}
_TINY: Final = {"seq": 8, "layers": 8, "hidden": 32, "heads": 4, "vocab": 100}
GPU: Final[Mapping[str, Model]] = {
    "gpt2": Model("flexsearch.zoo:gpt2", 8, {"seq": 1024}),
    "llama-1b": Model(
        "flexsearch.zoo:llama7b", 4, {"seq": 1024, "layers": 16, "hidden": 2048, "heads": 32, "ffn": 5632}, ("bf16",)
    ),
    "llama-small": Model("flexsearch.zoo:llama7b", 8, {**_SMALL, "ffn": 344, "vocab": 1000}),
    "bert": Model("flexsearch.zoo:bert", 16),
    "resnet50": Model("flexsearch.zoo:resnet50", 64),
    "vgg16": Model("flexsearch.zoo:vgg16", 64, {}, ("as-is",)),
    "alexnet": Model("flexsearch.zoo:alexnet", 256),
}
CPU: Final[Mapping[str, Model]] = {
    "llama-tiny": Model("flexsearch.zoo:llama7b", 1, {**_TINY, "ffn": 44}),
    "gpt2-tiny": Model("flexsearch.zoo:gpt2", 1, _TINY),
    "llama-small": Model("flexsearch.zoo:llama7b", 2, {**_SMALL, "ffn": 344, "vocab": 1000}, ("as-is",)),
    "gpt2-small": Model("flexsearch.zoo:gpt2", 2, {**_SMALL, "vocab": 1000}, ("as-is",)),
    "alexnet": Model("flexsearch.zoo:alexnet", 4, {}, ("as-is",)),
}
MODELS: Final = {"cuda": GPU, "cpu": CPU}
QUICK: Final = {"cuda": ("llama-small", "gpt2"), "cpu": ("llama-tiny", "gpt2-tiny")}
TOPOLOGY: Final = {"cuda": "hgx-h100", "cpu": "ethernet-1g"}
"""Whose first device is the one at hand."""


def made(model: Model, device: str) -> Loaded:
    """The model with its batch on the device, seeded."""
    torch.manual_seed(0)
    return load_callable(model.target, batch=model.batch, device=device, **model.arguments)


def _optimizer(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=LEARNING_RATE, momentum=MOMENTUM)


def eager(model: Model, precision: Precision, device: str) -> Callable[[], Tensor]:
    """A step of plain PyTorch."""
    loaded = made(model, device)
    optimizer = _optimizer(loaded.model.parameters())
    dtype = AUTOCAST.get(precision)

    def step() -> Tensor:
        assert loaded.loss is not None
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = loaded.loss(loaded.model(*loaded.inputs), loaded.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


class Case:
    """A model in one precision, and its plan for one device."""

    def __init__(self, name: str, precision: Precision, topology: Topology, device: str) -> None:
        self.name, self.model, self.precision, self.topology = name, MODELS[device][name], precision, topology
        self.device = device
        loaded = made(self.model, device)
        self.imported = import_with_constants(
            loaded.model, loaded.inputs, loaded.loss, targets=loaded.targets, name=name
        )
        self.graph: OperatorGraph = self.imported.graph
        self.loaded = loaded
        self.options = Options(optimizer="momentum", precision=precision)
        self.strategy: Strategy = Setting.of(self.graph, topology).baseline("single", self.options)

    def lowered(self, profile: Profile | None) -> Lowered:
        """With costs of the preset's figures, or of a profile."""
        return lower_for_ranks(self.graph, self.strategy, self.topology, Costs(self.graph, self.topology, profile))

    def parallel(self) -> Parallel:
        """The step that runs the plan."""
        return distribute(self.loaded.model, self.imported, self.strategy, _optimizer)


def turn(step: Callable[[], object], steps: int, wait: Callable[[], None]) -> float:
    """Seconds of a step, mean of ``steps``; each until it is ``wait``ed for, as where its
    loss is read."""
    wait()
    began = time.perf_counter()
    for _ in range(steps):
        step()
        wait()
    return (time.perf_counter() - began) / steps


def row_of(case: Case, profile: Profile, profiling_s: float, causes: bool) -> list[Row]:
    """Measured beside predicted."""
    ours, theirs = case.parallel(), eager(case.model, case.precision, case.device)
    case.loaded = case.loaded._replace(model=nn.Module())  # or its weights would be there twice
    variants = {"ours": lambda: ours.step(case.loaded.inputs, case.loaded.targets), "eager": theirs}
    wait = clock_of(torch.device(case.device)).wait
    once = {name: max(turn(step, 3, wait), turn(step, 3, wait)) for name, step in variants.items()}
    steps = max(1, math.ceil(TURN_S / min(once.values())))
    turns = alternate({n: lambda s=s: turn(s, steps, wait) for n, s in variants.items()}, ROUNDS)  # type: ignore[misc]
    eager_s, ours_s = median(turns["eager"]), median(turns["ours"])
    del theirs, variants["eager"]
    memory: Row = {}
    preset, profiled = (simulate(case.lowered(p)) for p in (None, profile))
    if case.device == "cuda":
        peak, predicted = _peak(variants["ours"]), profiled.peak_bytes[0]
        memory = {"peak_bytes": peak, "predicted_peak_bytes": predicted, "peak_error": predicted / peak - 1}
    named = {"model": case.name, "precision": case.precision}
    rows: list[Row] = [{
        "table": "steps", **named, "eager_s": eager_s, "ours_s": ours_s, "ratio_vs_eager": ours_s / eager_s,
        "preset_s": preset.makespan_s, "preset_error": preset.makespan_s / ours_s - 1,
        "profile_s": profiled.makespan_s, "profile_error": profiled.makespan_s / ours_s - 1,
        "profiling_s": profiling_s, **memory,
    }]  # fmt: skip
    return rows + (_causes(case, ours, profile) if causes else [])


def _peak(step: Callable[[], object]) -> int:
    """Bytes that the step had at most, with all that is there before it but what is not its own."""
    gc.collect()  # models hold themselves in circles
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _causes(case: Case, ours: Parallel, profile: Profile) -> list[Row]:
    """Kinds of tasks by what they add to the error of the prediction by a profile, in a step that is measured operator
    by operator."""
    inputs, targets = case.loaded.inputs, case.loaded.targets
    lowered = case.lowered(profile)
    timeline = record(ours, lambda: ours.step(inputs, targets))
    predicted, measured, difference = Counter[str](), Counter[str](), Counter[str]()
    kinds = {op.name: op.kind for op in case.graph.operators}
    for row in compare(lowered, simulate(lowered), timeline):
        name = f"{row.kind} {kinds.get(row.name, row.name)}"
        predicted[name] += row.tasks * row.predicted_s  # type: ignore[assignment]
        measured[name] += row.tasks * row.measured_s  # type: ignore[assignment]
        difference[name] += row.difference_s  # type: ignore[assignment]
    worst = sorted(difference, key=lambda name: -abs(difference[name]))[:CAUSES]
    return [
        {"table": "causes", "model": case.name, "precision": case.precision, "tasks": name,
         "predicted_s": predicted[name], "measured_s": measured[name], "difference_s": difference[name]}
        for name in worst
    ]  # fmt: skip


def run(options: Namespace) -> list[Row]:
    """All rows; a case that fails has one with the error, and the others go on."""
    topology, device = Topology.load(options.topology or TOPOLOGY[options.device]).subset([0]), options.device
    rows: list[Row] = []
    profile = Profile.load(options.profile) if options.profile and options.profile.exists() else None
    for name in options.models:
        for precision in MODELS[device][name].precisions:
            say(f"{name}, {precision}")
            case: Case | None = None
            try:
                case = Case(name, precision, topology, device)
                began = time.perf_counter()
                profile = profile_graph(
                    case.graph, device=device, max_parts=options.parts, known=profile,
                    budget_s=options.budget, precision=precision,
                )
                profiling_s = time.perf_counter() - began
                rows += row_of(case, profile, profiling_s, options.causes)
            except (FlexsearchError, RuntimeError) as error:
                say(f"failed: {error}")
                rows.append({"table": "steps", "model": name, "precision": precision, "error": str(error)[-300:]})
            if profile is not None and options.profile:
                profile.save(options.profile)
            case = None
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    return rows


def parser_of_device(description: str | None) -> ArgumentParser:
    """The options of a benchmark of models on one device."""
    made_parser = parser(description)
    made_parser.add_argument("--device", choices=list(MODELS), default="cuda" if torch.cuda.is_available() else "cpu")
    made_parser.add_argument("--models", help="comma-separated")
    made_parser.add_argument("--topology", help="whose first device is the one at hand")
    return made_parser


def one_of(
    made_parser: ArgumentParser, option: str, names: str | None, usual: Sequence[str], every: Iterable[str]
) -> Sequence[str]:
    """The names in an option's text, ``usual`` if it has none. Ends the program if one is not in ``every``."""
    chosen = names.split(",") if names else usual
    if unknown := set(chosen) - set(every):
        made_parser.error(f"--{option}: {', '.join(sorted(unknown))} is none of {', '.join(every)}")
    return chosen


def use_device(made_parser: ArgumentParser, device: str) -> None:
    """A CPU computes on one thread. Ends the program if the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        made_parser.error("this machine has no CUDA device")
    if device == "cpu":
        torch.set_num_threads(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if nothing failed, 2 if there is no such device or model."""
    made_parser = parser_of_device(__doc__)
    made_parser.add_argument("--profile", type=Path, help="keep the profile here, and reuse it")
    made_parser.add_argument("--budget", type=float, help="seconds of profiling each case; default: no limit")
    made_parser.add_argument("--parts", type=int, default=1, help="profile splits into up to so many parts")
    made_parser.add_argument("--causes", action="store_true")
    options = made_parser.parse_args(arguments)
    models = MODELS[options.device]
    few = QUICK[options.device] if options.quick else tuple(models)
    options.models = one_of(made_parser, "models", options.models, few, models)
    use_device(made_parser, options.device)
    rows = run(options)
    report_tables(rows, {"steps": "Steps on one device", "causes": "Where predictions miss"}, options.json)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
