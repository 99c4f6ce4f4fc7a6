"""Random plans over all that cuts a step: stages, schedules, microbatches, replicas, states kept in parts, and what is
computed or gathered again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexsearch.cost import Costs
from flexsearch.errors import StrategyError
from flexsearch.graph import Operator, OperatorGraph
from flexsearch.graph.weight_gradients import able, weight_gradient_of
from flexsearch.lower import lower_for_ranks
from flexsearch.strategy import OperatorConfig, Options, States, Strategy, make_config
from flexsearch.strategy.stage import ScheduleKind, Stage
from flexsearch.topology import Topology

SCHEDULES: tuple[ScheduleKind, ...] = (
    "gpipe", "1f1b", "interleaved-1f1b", "breadth-first", "zero-bubble", "zero-bubble-v", "dualpipe-v",
)  # fmt: skip


class Block(nn.Module):
    """Attention and a gated MLP, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 5, bias=False), nn.Linear(5, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.25)
        z: Tensor = self.down(F.gelu(self.up(x)))
        return x + z


class Deep(nn.Module):
    """Repeated blocks between an embedding and a head that share a table; targets that do not count."""

    def __init__(self, blocks: int = 3, width: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.head(x)
        return made


def tokens_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean over the targets that count."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=3)


def deep(batch: int = 8) -> tuple[nn.Module, Tensor, Tensor]:
    """The model with a batch, always the same."""
    torch.manual_seed(0)
    return Deep().double(), torch.randint(7, (batch, 3)), torch.randint(7, (batch, 3))


def hosts(count: int) -> Topology:
    """CPUs with a network between them."""
    return Topology.load(f"ethernet-1g:{count}")


def staged_plan(
    graph: OperatorGraph, draw: random.Random, divided: float = 0.0, cluster: Callable[[int], Topology] = hosts
) -> Strategy:  # fmt: skip
    """A legal plan on one to four devices of a ``cluster``. ``divided``: how many of the operators that may have a
    split of their own for the gradients of their weights do."""
    while True:
        try:
            return _attempt(graph, draw, divided, cluster)
        except StrategyError:
            continue


def _attempt(
    graph: OperatorGraph, draw: random.Random, divided: float, cluster: Callable[[int], Topology]
) -> Strategy:  # fmt: skip
    ranks = draw.choice((1, 2, 2, 3, 4, 4))
    topology = cluster(ranks)
    replicas = draw.choice([n for n in (1, 1, 2) if ranks % n == 0])
    block = ranks // replicas
    schedule = draw.choice(SCHEDULES)
    groups = _groups(block, draw)
    held = 2 if schedule in ("zero-bubble-v", "dualpipe-v") else draw.choice((1, 1, 2))
    order = [*groups, *reversed(groups)] if schedule in ("zero-bubble-v", "dualpipe-v") else groups * held
    if draw.random() < 0.15:
        order, schedule = [tuple(range(block))], draw.choice(SCHEDULES)
    count = len(graph.operators)
    cuts = [0, *sorted(draw.sample(range(1, count), len(order) - 1)), count]
    stages, configs = [], {}
    for devices, first, last in zip(order, cuts, cuts[1:], strict=False):
        operators = graph.operators[first:last]
        mesh = tuple(d + k * block for k in range(replicas) for d in devices)
        stages.append(Stage(tuple(op.name for op in operators), mesh, replicas))
        states = draw.choice((*States, None))
        configs.update({op.name: _config(op, devices, draw, states) for op in operators})
        for op in operators:
            if divided and op.name in able(graph) and draw.random() < divided:
                configs[weight_gradient_of(op.name)] = _config(op, devices, draw, States.WHOLE)
    options = Options(
        bucket_bytes=draw.choice((1, 300, 25 * 2**20)), recompute=draw.choice(("none", "none", "full", "attention")),
        recompute_blocks=None, reshard_after_forward=draw.random() < 0.4, prefetch=draw.choice((0, 1, 2)),
    )  # fmt: skip
    if options.recompute != "none" and (chance := draw.random()) < 0.4:
        all_but_last = (count,) * (len(stages) - 1) + (0,)
        options = options.model_copy(update={"recompute_blocks": all_but_last if 0.1 < chance < 0.3 else 1})
    plan = Strategy.make(
        graph, topology, configs, options, stages=stages, microbatches=draw.choice((1, 2, 2, 4)), schedule=schedule
    )
    lower_for_ranks(graph, plan, topology, Costs(graph, topology))  # a microbatch may be too small for its configs
    return plan


def _groups(devices: int, draw: random.Random) -> list[tuple[int, ...]]:
    """Disjoint groups of devices, of different sizes, that are all of them."""
    order = draw.sample(range(devices), devices)
    count = draw.randint(1, devices)
    ends = [0, *sorted(draw.sample(range(1, devices), count - 1)), devices]
    return [tuple(sorted(order[a:b])) for a, b in pairwise(ends)]


def _config(op: Operator, devices: Sequence[int], draw: random.Random, states: States | None) -> OperatorConfig:
    degrees: dict[str, int] = {}
    parts = 1
    for axis in draw.sample(op.splittable, min(len(op.splittable), draw.choice((0, 1, 1, 2)))):
        degrees[axis] = draw.randint(1, max(1, min(2, op.sizes[axis], len(devices) // parts)))
        parts *= degrees[axis]
    replicas = draw.randint(1, len(devices) // parts)
    order = draw.sample(list(devices), parts * replicas)
    samples = [a for a, n in degrees.items() if n > 1 and op.roles[a] == "sample"]
    shares = {a: tuple(draw.randint(1, 3) for _ in range(degrees[a])) for a in samples if draw.random() < 0.3}
    return make_config(op, degrees, order, draw.choice(list(States)) if states is None else states, shares)
