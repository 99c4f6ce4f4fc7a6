"""Plain PyTorch on one device as users run it: is each way predicted well by the figures of a preset? Nothing is
profiled.

    python -m benchmarks.training_codes [--quick] [--json] [--device cpu|cuda] [--models bert-large,resnet101]
                                        [--codes eager,compiled,captured] [--topology hgx-h100]

*eager*: the model under autocast in half precision, and an optimizer that is not fused; *compiled*: model and loss by
``torch.compile``, the same optimizer; *captured*: the same step with its update as one CUDA graph. ``measured_s``:
seconds of a step, median of turns in which all codes alternate; ``compiling_s``: until the first step was there;
``predicted_s`` by ``--code`` of that name, with half of its 80 % interval (``half``) as a share, and whether the
measured step lies in it (``covered``); ``fused_s``: by the figures of the preset as they are.
The models are other ones than those of ``benchmarks.one_device``, which taught what eager code takes to launch.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

import torch
from torch import Tensor

from benchmarks.harness import Row, alternate, median, report, say
from benchmarks.one_device import (
    AUTOCAST,
    TOPOLOGY,
    TURN_S,
    Model,
    made,
    one_of,
    parser_of_device,
    turn,
    use_device,
)
from flexsearch.clocks import clock_of
from flexsearch.errors import FlexsearchError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_with_constants
from flexsearch.setting import Setting
from flexsearch.simulate import simulate
from flexsearch.strategy import Options
from flexsearch.topology import Topology
from flexsearch.topology.changes import with_code
from flexsearch.topology.codes import CodeKind

ROUNDS = 7
WARM: Final = 3
"""Steps before one is captured as a graph."""
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model with the optimizer that trains it."""

    model: Model
    optimizer: str = "momentum"


_SMALL: Final = {"seq": 32, "layers": 8, "hidden": 128, "heads": 4}
_LLAMA: Final = {"layers": 24, "hidden": 1024, "heads": 16, "ffn": 2816}
GPU: Final[Mapping[str, Case]] = {
    "gpt2-medium": Case(
        Model("flexsearch.zoo:gpt2", 8, {"seq": 512, "layers": 24, "hidden": 1024, "heads": 16}, ("bf16",)), "adam"
    ),
    "bert-large": Case(Model("flexsearch.zoo:bert_large", 8, {"seq": 512}, ("bf16",)), "adam"),
    "llama-400m": Case(Model("flexsearch.zoo:llama7b", 4, {"seq": 1024, **_LLAMA}, ("bf16",)), "adam"),
    "llama-400m-short": Case(Model("flexsearch.zoo:llama7b", 2, {"seq": 128, **_LLAMA}, ("bf16",)), "adam"),
    "resnet101": Case(Model("flexsearch.zoo:resnet101", 64, {}, ("bf16",))),
    "inception-v3": Case(Model("flexsearch.zoo:inception_v3", 64, {}, ("bf16", "as-is"))),
}
CPU: Final[Mapping[str, Case]] = {
    "gpt2-small": Case(Model("flexsearch.zoo:gpt2", 2, {**_SMALL, "vocab": 1000}, ("as-is",)), "adam"),
    "llama-small": Case(Model("flexsearch.zoo:llama7b", 2, {**_SMALL, "ffn": 344, "vocab": 1000}, ("as-is",))),
}
MODELS: Final = {"cuda": GPU, "cpu": CPU}
QUICK: Final = {"cuda": ("llama-400m-short",), "cpu": ("llama-small",)}
CODES: Final = {"cuda": ("eager", "compiled", "captured"), "cpu": ("eager",)}


@dataclass
class Plain:
    """A step of plain PyTorch by one of the codes."""

    case: Case
    precision: str
    device: str
    compiled: bool = False
    captured: bool = False
    _loaded: Any = field(init=False)
    _loss: Callable[..., Tensor] = field(init=False)

    def __post_init__(self) -> None:
        loaded = self._loaded = made(self.case.model, self.device)
        loss = loaded.loss
        assert loss is not None
        dtype = AUTOCAST.get(self.precision)

        def loss_of(*inputs: Tensor) -> Tensor:
            with torch.autocast(self.device, dtype, enabled=dtype is not None):
                result: Tensor = loss(loaded.model(*inputs), loaded.targets)
                return result

        self._loss = torch.compile(loss_of) if self.compiled else loss_of
        weights = list(loaded.model.parameters())
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(weights, lr=1e-5, capturable=self.captured)
            if self.case.optimizer == "adam"
            else torch.optim.SGD(weights, lr=1e-5, momentum=0.9)
        )

    def step(self) -> Tensor:
        """Forward, backward, update."""
        loss = self._loss(*self._loaded.inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def ready(self) -> Step:
        """The step as it is to be repeated."""
        if not self.captured:
            self.step()
            return self.step
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


def graph_of(case: Case, name: str) -> OperatorGraph:
    """The graph of its model."""
    loaded = made(case.model, "cpu")
    return import_with_constants(
        loaded.model, loaded.inputs, loaded.loss, targets=loaded.targets, name=name
    ).graph


def predicted(graph: OperatorGraph, options: Options, topology: Topology) -> tuple[float, float]:
    """Seconds of a step by the figures of a topology, and half of the interval as a share."""
    setting = Setting.of(graph, topology)
    simulation = simulate(setting.lower(setting.baseline("single", options)))
    return simulation.makespan_s, simulation.estimate.half / simulation.makespan_s


def rows_of(name: str, precision: str, codes: Sequence[str], topology: Topology, device: str) -> list[Row]:
    """One row for each code."""
    case, wait = MODELS[device][name], clock_of(torch.device(device)).wait
    steps: dict[str, Step] = {}
    compiling: dict[str, float] = {}
    for code in codes:
        began = time.perf_counter()
        plain = Plain(case, precision, device, code in ("compiled", "captured"), code == "captured")
        steps[code] = plain.ready()
        wait()
        compiling[code] = time.perf_counter() - began
    once = {code: max(turn(step, 2, wait), turn(step, 2, wait)) for code, step in steps.items()}
    count = max(1, math.ceil(TURN_S / min(once.values())))
    turns = alternate({code: lambda s=s: turn(s, count, wait) for code, s in steps.items()}, ROUNDS)  # type: ignore[misc]
    graph = graph_of(case, name)
    planned = Options.model_validate({"optimizer": case.optimizer, "precision": precision})
    fused, _ = predicted(graph, planned, topology)
    rows: list[Row] = []
    for code in codes:
        measured = median(turns[code])
        row = {"model": name, "precision": precision, "optimizer": case.optimizer, "code": code,
               "measured_s": measured, "compiling_s": compiling[code], "fused_s": fused,
               "fused_error": fused / measured - 1}  # fmt: skip
        if device == "cuda" and code in get_args(CodeKind):
            seconds, half = predicted(graph, planned, with_code(topology, code))  # type: ignore[arg-type]
            covered = abs(seconds - measured) <= half * seconds
            row |= {"predicted_s": seconds, "error": seconds / measured - 1, "half": half, "covered": covered}
        rows.append(row)
    return rows


def run(options: Namespace) -> list[Row]:
    """All rows; a case that fails has one with the error, and the others go on."""
    topology = Topology.load(options.topology or TOPOLOGY[options.device]).subset([0])
    rows: list[Row] = []
    for name in options.models:
        for precision in MODELS[options.device][name].model.precisions:
            say(f"{name}, {precision}")
            try:
                rows += rows_of(name, precision, options.codes, topology, options.device)
            except (FlexsearchError, RuntimeError) as error:
                say(f"failed: {error}")
                rows.append({"model": name, "precision": precision, "error_text": str(error)[-300:]})
            gc.collect()
            torch.compiler.reset()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if nothing failed, 2 if there is no such device, model or code."""
    made_parser = parser_of_device(__doc__)
    made_parser.add_argument("--codes", help="comma-separated")
    options = made_parser.parse_args(arguments)
    known = MODELS[options.device]
    few = QUICK[options.device] if options.quick else tuple(known)
    options.models = one_of(made_parser, "models", options.models, few, known)
    options.codes = one_of(made_parser, "codes", options.codes, CODES[options.device], CODES["cuda"])
    use_device(made_parser, options.device)
    if options.device == "cpu" and "captured" in options.codes:
        made_parser.error("--codes: steps are captured as graphs on CUDA devices only")
    rows = run(options)
    report(rows, "Steps of plain PyTorch, by code", options.json)
    return int(any("error_text" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
