"""How near are predictions to training steps that others measured on real GPU clusters?

    python -m benchmarks.truth DATA [--quick] [--json] [--only fsdp|pipelines|megatron|nccl] [--rows]
                                    [--gradients float32]
    python -m benchmarks.truth DATA --fit [--by size|source] [--gpu A100|H100] [--quick] [--json]
    python -m benchmarks.truth DATA --intervals

``DATA``: the folder of the measurements, or the one that it is in; its files and where they come from (tables whose
files are not there are left out):

- ``llm_foundry_fsdp.csv`` (mosaicml/llm-foundry, benchmarking README): GPT-like models under fully sharded data
  parallelism on A100 and H100; table **fsdp**;
- ``vtrain_multi_node_a100.csv`` (VIA-Research/vTrain): Megatron-DeepSpeed, tensor x data x pipeline on A100;
  table **pipelines**;
- ``nccl_allreduce_a100`` (VIA-Research/vTrain): all-reduces among the GPUs of one server; table **nccl**, by the number
  of GPUs, without plans;
- table **megatron**: Narayanan et al., SC 2021, table 1, whose figures are in ``benchmarks/llm_plans.py``.

Each row's layout, microbatches, recomputation and precision are those of the run that was measured; the step is that of
``flexsearch.search.hybrid.simulate_layout`` on the cluster of the source. Nothing is added by hand.

Gradients of weights are in the type of the weights. llm-foundry's rows in mode PURE say so. Those in mode DEFAULT do
not: Composer documented float32, and had the other until October 2023 (its pull request 2628); the table does not say
which version ran. Nor do the rows in fp16, for which Megatron-LM's default is fp16. ``--gradients float32`` plans all
rows that do not say it with gradients in float32.

- ``mape``: mean of |predicted - measured| / measured; ``median_error``: the median of the same; ``bias``: the median of
  predicted / measured - 1;
- ``tau``: Kendall's tau between predicted and measured, of the rows of one model on one cluster that do the same work,
  averaged over such groups; ``regret``: how much longer than the fastest layout of its group the one takes that is
  predicted to be the fastest, measured, averaged;
- ``unfit``: rows whose plan, as predicted, exceeds the memory that it ran in;
- ``refused``: rows that no plan can express, or that were measured in float8.

A table is told as a whole, by source, model, and degrees of tensor and pipeline parallelism. ``--rows`` prints every
row; ``--intervals`` how many steps the predicted 80 % intervals cover, by source; ``--fit`` the efficiencies that these
rows teach, and how far off they are for sizes, or sources, that were left out (:mod:`benchmarks.truth_fit`).
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, groupby
from math import nan
from pathlib import Path
from typing import Any, Final, get_args

from benchmarks.decoders import Model, graph_of
from benchmarks.harness import Row, median, options_with_data, parser, report, say
from benchmarks.llm_plans import SEQ, TABLE_1, VOCAB, layout_of
from benchmarks.truth_fit import BY, GPUS, THIN, another_code, fit_gpu, rows_of, with_pipelines
from flexsearch.cost import Learned, Profile, ProfileDevice
from flexsearch.cost.communication import Pricing
from flexsearch.errors import FlexsearchError
from flexsearch.files import shipped
from flexsearch.graph import OperatorGraph
from flexsearch.graph.precision import Gradients
from flexsearch.search.hybrid import Layout, simulate_layout
from flexsearch.strategy import Options, States
from flexsearch.topology import Topology

FSDP_ROWS: Final = "llm_foundry_fsdp.csv"
PIPELINE_ROWS: Final = "vtrain_multi_node_a100.csv"
ALL_REDUCES: Final = "nccl_allreduce_a100"
MPT: Final = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip
"""Models of llm-foundry: hidden size, heads, layers."""
MPT_VOCAB: Final = 50368
STATES: Final = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
"""Sharding strategies: whether weights are let go of after the forward pass."""


@dataclass(frozen=True)
class Case:
    """One measured step. ``group``: rows that do the same work, so that their order matters."""

    table: str
    source: str
    group: tuple[object, ...]
    label: str
    model: Model
    batch: int
    cluster: str
    layout: Layout
    options: Options
    measured_s: float
    told: bool = False
    """Whether the source says in which type gradients are added up and sent."""

    def assumed(self, gradients: Gradients) -> Case:
        """The same with ``gradients`` of this type, unless the source says theirs."""
        if self.told:
            return self
        return replace(self, options=self.options.model_copy(update={"gradients": gradients}))


# ---- clusters


def _half_nics(nodes: dict[str, Any]) -> None:
    """Two GPUs share a NIC of 200 Gbit/s: each has half of one, since all send at the same time."""
    for link in nodes["links"]:
        if link["b"] == "fabric":
            link["bandwidth"] = 12.5e9


CLUSTERS: Final[Mapping[str, tuple[str, Callable[[dict[str, Any]], None] | None]]] = {
    "a100_40gb": ("dgx-a100-40gb", None), "a100_80gb": ("dgx-a100", None), "h100_80gb": ("hgx-h100", None),
    "a100_4nic": ("dgx-a100", _half_nics),
}  # fmt: skip
"""By name: a preset, and what is different."""


@cache
def cluster_of(name: str, devices: int) -> Topology:
    """The cluster of a case: whole servers of 8."""
    preset, change = CLUSTERS[name]
    path = shipped("profiles", preset)
    assert path is not None
    data = json.loads(path.read_text())
    if change is not None:
        change(data["nodes"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.json"
        file.write_text(json.dumps({**data, "name": name}))
        return Topology.load(f"{file}:{devices // 8}")


# ---- what was measured


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fsdp_cases(data: Path) -> Iterator[Case | str]:
    """Rows of llm-foundry; of those that cannot be planned, the reason."""
    for row in _rows(data / FSDP_ROWS):
        gpus, name, seq = int(row["gpus"]), row["model"], int(row["sequence"])
        label = f"{row['gpu']} x {gpus}, {name}, seq {seq}, {row['precision']}"
        if "fp8" in row["precision"]:
            yield f"{label}: float8 is no precision of a plan"
            continue
        hidden, heads, layers = MPT[name]
        options = Options(
            optimizer="adam", precision="bf16", reshard_after_forward=STATES[row["sharding"]],
            recompute="full" if row["activation_checkpointing"] == "True" else "none",
        )  # fmt: skip
        yield Case(
            "fsdp", row["gpu"], (label,), f"{label}, {row['micro_batch']} x {row['accumulation']}",
            Model(hidden, heads, layers, MPT_VOCAB, seq, fused=True, bias=False), int(row["global_batch"]), row["gpu"],
            Layout(gpus, 1, 1, int(row["accumulation"]), states=States.WEIGHTS), options, float(row["iteration_s"]),
            told=row["mp_mode"] == "PURE",
        )  # fmt: skip


def pipeline_cases(data: Path) -> Iterator[Case | str]:
    """Rows of vTrain."""
    for row in _rows(data / PIPELINE_ROWS):
        batch, micro, gpus = (int(row[name]) for name in ("global_batch", "micro_batch", "gpus"))
        t, d, p = (int(row[name]) for name in ("tp", "dp", "pp"))
        model = Model(
            int(row["hidden"]), int(row["heads"]), int(row["layers"]), VOCAB, int(row["seq"]), fused=False, bias=True
        )
        yield Case(
            "pipelines", f"{row['parameters_billion']}b", (row["parameters_billion"],),
            f"{row['parameters_billion']}b on {gpus}: t{t} d{d} p{p} b{micro}", model, batch, "a100_4nic",
            Layout(d, t, p, batch // d // micro),
            Options(optimizer="adam", precision="fp16", recompute="full", recompute_blocks=_but_last(model, p)),
            float(row["iteration_ms"]) / 1e3,
        )  # fmt: skip


def _but_last(model: Model, stages: int) -> tuple[int, ...] | None:
    """Layers of each stage that are computed again: none of the last one, which has one microbatch at a time."""
    return (model.layers,) * (stages - 1) + (0,) if stages > 1 else None


def megatron_cases(_: Path) -> Iterator[Case | str]:
    """Rows of the table of SC 2021; its step time by its own formula."""
    for row in TABLE_1:
        h, layers = row.hidden, row.layers
        flops = 96 * row.batch * SEQ * layers * h**2 * (1 + SEQ / (6 * h) + VOCAB / (16 * layers * h))
        model = Model(h, row.heads, layers, VOCAB, SEQ, fused=False, bias=True)
        yield Case(
            "megatron", "sc21", (row.parameters,), f"{row.parameters}b on {row.gpus}", model, row.batch, "a100_80gb",
            layout_of(row), Options(optimizer="adam", precision="fp16", recompute="full"),
            flops / row.gpus / row.tflops / 1e12,
        )  # fmt: skip


TABLES: Final[Mapping[str, Callable[[Path], Iterator[Case | str]]]] = {
    "fsdp": fsdp_cases, "pipelines": pipeline_cases, "megatron": megatron_cases,
}  # fmt: skip
FILES: Final = {"fsdp": FSDP_ROWS, "pipelines": PIPELINE_ROWS, "nccl": ALL_REDUCES}
QUICK: Final = 6
"""Rows of each table with ``--quick``, spread over it."""


# ---- scores


@dataclass(frozen=True)
class Scored:
    """A case with its predicted step. Of the fullest device: ``peak_bytes``, and the bytes that it lacks. ``width``:
    of its 80 % interval to each side, over the prediction."""

    case: Case
    predicted_s: float
    peak_bytes: int = 0
    missing: int = 0
    width: float = nan

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.case.measured_s

    @property
    def inside(self) -> bool:
        """Whether the measured step lies in the interval."""
        return abs(self.predicted_s - self.case.measured_s) <= self.width * self.predicted_s


def predict(case: Case, learned: Learned | None = None, interval: bool = False) -> Scored:
    """Simulate a case. Raises FlexsearchError where no plan expresses it. Where the last stage has no room for the
    activations that it is said to keep, it cannot have kept them: it computes them again, too."""
    graph = graph_of(case.model).resized(case.batch)
    topology = in_ranks(cluster_of(case.cluster, case.layout.devices), case.layout)
    first, options, profile = equal_stages(graph, case), case.options, None
    if learned is not None:
        device = ProfileDevice(kind="cuda", model=topology.devices[0].model)
        profile = Profile(device=device, torch="none", learned=learned)
    _, step = simulate_layout(graph, topology, case.layout, options, profile, first)
    if step.missing and options.recompute_blocks is not None:
        options = options.model_copy(update={"recompute_blocks": None})
        _, step = simulate_layout(graph, topology, case.layout, options, profile, first)
    width = step.estimate.half / step.makespan_s if interval else nan
    return Scored(case, step.makespan_s, max(memory.peak for memory in step.memory), step.missing, width)


def in_ranks(topology: Topology, layout: Layout) -> Topology:
    """The cluster with its devices in the order in which Megatron-LM numbers ranks, tensor x data x pipeline: replicas
    of a stage are next to each other, its neighbours in other servers. A layout has its blocks one after the other."""
    tensor, data = layout.tensor, layout.data
    if layout.pipeline == 1:
        return topology
    return topology.subset([
        (stage * data + block) * tensor + member
        for block in range(data) for stage in range(layout.pipeline) for member in range(tensor)
    ])  # fmt: skip


def equal_stages(graph: OperatorGraph, case: Case) -> tuple[int, ...]:
    """First operator of each stage as Megatron-LM cuts: equally many layers in each."""
    layers, stages = case.model.layers, case.layout.stages
    return (0, *(graph.index[f"blocks.{layers * k // stages}.norm1"] for k in range(1, stages)))


def tau(rows: Sequence[Scored]) -> float | None:
    """Kendall's tau (a) between predicted and measured; None of fewer than three rows."""
    pairs = list(combinations(rows, 2))
    if len(rows) < 3:
        return None
    agree = sum((a.predicted_s - b.predicted_s) * (a.case.measured_s - b.case.measured_s) > 0 for a, b in pairs)
    return 2 * agree / len(pairs) - 1


def regret(rows: Sequence[Scored]) -> float | None:
    """Measured time of the row that is predicted to be the fastest, over the least, - 1."""
    if len(rows) < 3:
        return None
    chosen = min(rows, key=lambda row: row.predicted_s)
    return chosen.case.measured_s / min(row.case.measured_s for row in rows) - 1


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def score(name: str, part: str, rows: Sequence[Scored], refused: int | None = None) -> Row:
    """A line of the table."""
    errors = [abs(row.ratio - 1) for row in rows]
    groups = [list(g) for _, g in groupby(sorted(rows, key=_group), key=_group)]
    return {
        "table": name, "part": part, "rows": len(rows), "refused": refused, "mape": _mean(errors),
        "median_error": median(errors), "bias": median([row.ratio - 1 for row in rows]),
        "tau": _mean(map(tau, groups)), "regret": _mean(map(regret, groups)),
        "unfit": sum(row.missing > 0 for row in rows),
    }  # fmt: skip


PARTS: Final[Mapping[str, Callable[[Case], str]]] = {
    "source": lambda case: case.source, "hidden": lambda case: f"hidden {case.model.hidden}",
    "tensor": lambda case: f"tensor {case.layout.tensor}", "pipeline": lambda case: f"pipeline {case.layout.pipeline}",
    "stages": lambda case: "with pipelines" if case.layout.pipeline > 1 else "without pipelines",
}  # fmt: skip
"""By what a table is told apart: the name of a case's part."""


def scores(name: str, rows: Sequence[Scored], refused: int) -> Iterator[Row]:
    """The lines of a table: all its rows, then those of each part, if there are several."""
    yield score(name, "all", rows, refused)
    for part_of in PARTS.values():
        parts = dict.fromkeys(part_of(row.case) for row in rows)
        if len(parts) > 1:
            for part in parts:
                yield score(name, part, [row for row in rows if part_of(row.case) == part])


def nccl_rows(data: Path, quick: bool) -> Iterator[Row]:
    """Measured all-reduces of one server, and what the figures for each number of GPUs say (``communication.groups`` of
    the cluster), which :mod:`benchmarks.nccl_fit` fits."""
    pricing = Pricing(Topology.load("dgx-a100"))
    for path in sorted((data / ALL_REDUCES).iterdir()):
        with path.open(newline="") as file:
            table = [(int(row[0]), float(row[3]) / 1e9) for row in list(csv.reader(file))[1:]]
        members = int(path.name.removeprefix("AR_GPU").partition("_")[0])
        ratios = [
            pricing.all_reduce(range(members), nbytes).duration_s / seconds
            for nbytes, seconds in table[:: 16 if quick else 1]
        ]
        errors = [abs(ratio - 1) for ratio in ratios]
        yield {
            "table": "nccl", "part": f"{members} GPUs", "rows": len(ratios), "mape": _mean(errors),
            "median_error": median(errors), "largest_error": max(errors), "bias": median([r - 1 for r in ratios]),
        }  # fmt: skip


def _group(row: Scored) -> tuple[str, ...]:
    return tuple(map(str, row.case.group))


def interval_rows(name: str, rows: Sequence[Scored]) -> Iterator[Row]:
    """How many measured steps lie in the 80 % intervals of their predictions, by source."""
    sources = dict.fromkeys(row.case.source for row in rows)
    for part in (None, *(sources if len(sources) > 1 else ())):
        some = [row for row in rows if part in (None, row.case.source)]
        inside = [row.inside for row in some]
        yield {
            "table": name, "part": part or "all", "rows": len(some), "covered": sum(inside),
            "share": sum(inside) / len(some), "half_width": median([row.width for row in some]),
        }  # fmt: skip


def fit_rows(data: Path, quick: bool, gpus: Iterable[str], by: str, gradients: Gradients) -> Iterator[Row]:
    """See :mod:`benchmarks.truth_fit`."""
    every = (case for name in tables_of(data) if name in TABLES for case in TABLES[name](data))
    cases = [case.assumed(gradients) for case in every if isinstance(case, Case)]
    for gpu in gpus:
        own = [case for case in cases if case.cluster.startswith(GPUS[gpu]) and case.layout.pipeline == 1]
        thin = THIN if quick else 1
        taught = fit_gpu(gpu, own[::thin], lambda case, learned: predict(case, learned).predicted_s, by)
        yield from rows_of(taught, [predict(case, interval=True) for case in taught.cases])
        if by == "source" and len({BY[by](case) for case in taught.cases}) > 1:
            yield another_code(taught)
            others = [case for case in cases if case.cluster.startswith(GPUS[gpu])][::thin]
            yield from with_pipelines(taught, others, lambda case, learned: predict(case, learned, True))


def tables_of(data: Path) -> list[str]:
    """The tables whose files are in a folder; "megatron" has none."""
    return [name for name in (*TABLES, "nccl") if name not in FILES or (data / FILES[name]).exists()]


def measure(
    name: str, data: Path, quick: bool, intervals: bool = False, gradients: Gradients = "as-is"
) -> tuple[list[Scored], list[str]]:
    """All cases of a table, simulated, and what could not be planned. ``intervals``: with their widths; ``gradients``:
    where the source does not say it."""
    cases, scored = list(TABLES[name](data)), list[Scored]()
    if quick:
        cases = cases[:: max(1, len(cases) // QUICK)]
    refused = [case for case in cases if isinstance(case, str)]
    for case in cases:
        if isinstance(case, str):
            continue
        say(case.label)
        try:
            scored.append(predict(case.assumed(gradients), interval=intervals))
        except FlexsearchError as error:
            refused.append(f"{case.label}: {error}")
    return scored, refused


def main() -> int:
    """Print the tables."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=(*TABLES, "nccl"), help="one of the tables")
    arguments.add_argument("--rows", action="store_true", help="print every row")
    arguments.add_argument("--fit", action="store_true", help="fit the efficiencies anew, each size left out in turn")
    arguments.add_argument("--gpu", choices=GPUS, help="fit those of one GPU")
    arguments.add_argument("--by", choices=BY, default="size", help="what --fit leaves out in turn")
    arguments.add_argument("--intervals", action="store_true", help="how many steps the 80 %% intervals cover")
    arguments.add_argument("--gradients", choices=get_args(Gradients), default="as-is", help="where no source says it")
    options = options_with_data(arguments, *FILES.values())
    wanted = [name for name in tables_of(options.data) if options.only in (None, name)]
    if not wanted:
        arguments.error(f"{options.data} has no {FILES[options.only]}")
    lines: list[Row] = []
    if options.fit:
        gpus = GPUS if options.gpu is None else [options.gpu]
        rows = list(fit_rows(options.data, options.quick, gpus, options.by, options.gradients))
        report(rows, "Efficiencies fitted to published steps", options.json)
        return 0
    for name in (name for name in wanted if name in TABLES):
        scored, refused = measure(name, options.data, options.quick, options.intervals, options.gradients)
        for reason in refused:
            say(f"refused: {reason}")
        if options.rows:
            lines += [
                {"table": name, "case": row.case.label, "measured_s": row.case.measured_s,
                 "predicted_s": row.predicted_s, "ratio": row.ratio}
                for row in scored
            ]  # fmt: skip
            continue
        if options.intervals:
            lines += interval_rows(name, scored)
        elif scored:
            lines += scores(name, scored, len(refused))
    if "nccl" in wanted and not options.rows and not options.intervals:
        lines += nccl_rows(options.data, options.quick)
    report(lines, "Predicted and measured", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
