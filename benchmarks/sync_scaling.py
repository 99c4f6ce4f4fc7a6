"""How far data parallelism scales on hosts with 1 Gbit/s, by what replicas send and by how they exchange it; simulated.

    python -m benchmarks.sync_scaling [--quick] [--json] [--workers 4 8 16 32] [--density 0.001]

Table "scaling": hosts with one P100 each, the same batch on every worker. Shi et al. (2019) measured gTop-k on 32 hosts
with one P102-100 each: 2.7 to 12 times the throughput of dense S-SGD, and 1.1 to 1.7 times that of top-k.

- ``one_s``: step of one worker; the efficiency of a plan is that over its step;
- ``overlapped``: data parallelism as flexsearch plans it, whose buckets overlap with the backward pass; ``dense``: one
  ring all-reduce after the backward pass, the paper's S-SGD; ``top_k``, ``gtop_k``: efficiency with that density;
- ``over_dense``, ``over_overlapped``, ``over_top_k``: throughput of gTop-k over theirs.

Table "exchange": an exact mean of ``size_bytes`` on every host of ethernet-1g, by algorithm. ``*_s``: priced;
``*_formula_s``: with alpha the priced start of one message and beta the time of a byte on a link; ``best``: who wins.

Table "forms": a step of data parallelism under exact recipes, over that of data parallelism as it is planned.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import log2
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Row, parser, report, say
from flexsearch.cost.communication import Pricing
from flexsearch.errors import FlexsearchError
from flexsearch.graph import OperatorGraph
from flexsearch.graph.importer import import_model
from flexsearch.graph.resize import resized
from flexsearch.search.recipes import EXACT, exchange_seconds, with_recipe
from flexsearch.setting import Setting
from flexsearch.simulate import makespan, simulate
from flexsearch.strategy import Options
from flexsearch.topology import Topology
from flexsearch.topology.changes import device_named, with_device

WORKERS, QUICK_WORKERS = (4, 8, 16, 32), (4,)
MODELS: Final = ("vgg16", "resnet50", "alexnet", "resnet20", "rnnlm")
QUICK_MODELS: Final = ("resnet20",)
SIZES: Final = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
FORMS: Final = {
    "ring": "all-reduce:form=ring", "tree": "all-reduce:form=tree", "halving": "all-reduce:form=halving-doubling",
    "server": "server:shards=1", "shards": "server:shards={workers}",
}  # fmt: skip

FORM_CASES: Final = tuple((m, t) for m in ("lenet", "mlp", "alexnet") for t in ("ethernet-1g:4", "ethernet-1g:32",
                                                                              "ethernet-10g:32"))  # fmt: skip


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut; one of 1x1 where sizes change."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        convolution = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
        self.body = nn.Sequential(
            convolution(channels, width, stride=stride), nn.BatchNorm2d(width), nn.ReLU(),
            convolution(width, width), nn.BatchNorm2d(width),
        )  # fmt: skip
        same = channels == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet20(batch: int) -> OperatorGraph:
    """ResNet-20 on images of 32 x 32 (He et al., 2015, section 4.2): 0.27 M parameters."""
    with torch.device("meta"):
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        blocks = [Block(a, b, 1 if a == b else 2) for a, b in pairwise(widths)]
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *blocks, *head)
        inputs, targets = torch.empty(batch, 3, 32, 32), torch.empty(batch, dtype=torch.int64)
        return import_model(model, (inputs,), F.cross_entropy, targets=targets, name="resnet20")


def gpu_hosts(count: int) -> Topology:
    """Hosts of ethernet-1g, with one P100 instead of a core."""
    return with_device(Topology.load(f"ethernet-1g:{count}"), device_named("P100"), "nccl")


def step_s(setting: Setting, recipe: str | None) -> float:
    """A step of data parallelism in which all weights synchronise by a recipe, s; None: in buckets that overlap."""
    plan = setting.baseline("data-parallel")
    return setting.row("", plan if recipe is None else with_recipe(plan, recipe)).simulation.makespan_s


def scaling(model: str, workers: tuple[int, ...], density: float) -> list[Row]:
    """A row for each number of workers."""
    graph = resnet20(128) if model == "resnet20" else OperatorGraph.load(model)
    alone = Setting.of(graph, gpu_hosts(1))
    one = alone.row("", alone.baseline("single")).simulation.makespan_s
    recipes = {
        "overlapped": None, "dense": FORMS["ring"], "top_k": f"top-k:density={density}",
        "gtop_k": f"gtop-k:density={density}",
    }  # fmt: skip
    rows: list[Row] = []
    for count in workers:
        say(f"{model}, {count} workers")
        setting = Setting.of(resized(graph, batch=graph.batch * count), gpu_hosts(count))
        took = {name: step_s(setting, recipe) for name, recipe in recipes.items()}
        rows.append({
            "table": "scaling", "model": model, "batch": graph.batch, "workers": count, "one_s": one,
            **{f"{name}_s": seconds for name, seconds in took.items()},
            **{name: one / seconds for name, seconds in took.items()},
            **{f"over_{name}": took[name] / took["gtop_k"] for name in ("dense", "overlapped", "top_k")},
        })  # fmt: skip
    return rows


def formulas(workers: int, nbytes: int, alpha_s: float, beta_s: float) -> dict[str, float]:
    """Seconds of an exact mean by algorithm (Thakur et al., 2005); servers are among the workers and take one message
    after the other."""
    levels, whole = log2(workers), nbytes * beta_s
    part = whole / workers
    return {
        "ring": 2 * (workers - 1) * (alpha_s + part),
        "tree": 2 * levels * (alpha_s + whole),
        "halving": 2 * (levels * alpha_s + (workers - 1) * part),
        "server": 2 * (workers - 1) * (alpha_s + whole),
        "shards": 2 * (workers - 1) * (alpha_s + part),
    }


def exchanges(workers: int, sizes: tuple[int, ...]) -> list[Row]:
    """A row for each size of message."""
    topology = Topology.load(f"ethernet-1g:{workers}")
    alpha = Pricing(topology).transfer("exchange", [(0, 1, 0)]).duration_s
    beta = 1 / min(link.bandwidth for link in topology.links)
    rows: list[Row] = []
    for nbytes in sizes:
        texts = {name: text.format(workers=workers) for name, text in FORMS.items()}
        seconds = {name: exchange_seconds(topology, text, nbytes) for name, text in texts.items()}
        by_formula = formulas(workers, nbytes, alpha, beta)
        rows.append({
            "table": "exchange", "workers": workers, "size_bytes": nbytes,
            **{f"{name}_s": taken for name, taken in seconds.items()},
            **{f"{name}_formula_s": taken for name, taken in by_formula.items()},
            "best": min(seconds, key=seconds.__getitem__), "best_formula": min(by_formula, key=by_formula.__getitem__),
        })  # fmt: skip
    return rows


def forms(model: str, topology: str) -> Row:
    """Steps under exact recipes; none where a form does not fit."""
    say(f"exact forms of {model} on {topology}")
    setting = Setting.of(OperatorGraph.load(model), Topology.load(topology))
    plan = setting.baseline("data-parallel", Options(optimizer="momentum"))
    planned_s, row = makespan(setting.lower(plan)), dict[str, float]()
    for recipe in ("all-reduce", *EXACT):
        try:
            lowered = setting.lower(with_recipe(plan, recipe))
            row[recipe.removeprefix("all-reduce:form=")] = simulate(lowered).makespan_s / planned_s
        except FlexsearchError:  # halving-doubling of three, hierarchical of single devices
            continue
    return {"table": "forms", "model": model, "topology": topology, "planned_s": planned_s, **row}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), help="hosts, powers of two")
    options.add_argument("--models", nargs="+", default=list(MODELS), help="shipped graphs, or resnet20")
    options.add_argument("--density", type=float, default=0.001, help="share of entries that are sent")
    given = options.parse_args()
    workers = QUICK_WORKERS if given.quick else tuple(given.workers)
    models = QUICK_MODELS if given.quick else given.models
    tables = {
        f"scaling efficiency, density {given.density:g}": [
            row for model in models for row in scaling(model, workers, given.density)
        ],
        "an exact mean by size of message": [
            row for count in workers for row in exchanges(count, SIZES[:2] if given.quick else SIZES)
        ],
        "steps under exact recipes, over data parallelism": [
            forms(*case) for case in (FORM_CASES[:1] if given.quick else FORM_CASES)
        ],
    }
    if given.json:
        report([row for rows in tables.values() for row in rows], "", True)
        return
    for title, rows in tables.items():
        report(rows, title, False)


if __name__ == "__main__":
    main()
