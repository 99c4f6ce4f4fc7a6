"""What the benchmark of pipelines compares: random chains of layers, the best pipeline of each by trying all of them,
and the best contiguous split by the objective of dnn-partitioning."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

from flexsearch.graph import OperatorGraph
from flexsearch.graph.dnn_partitioning import File, load_file
from flexsearch.graph.profiled import LayerProfile, ProfiledLayer, profiled_graph
from flexsearch.simulate.staged import StagedSimulators
from flexsearch.strategy import Options, make_config
from flexsearch.strategy.pipeline import Pipeline
from flexsearch.topology import Topology
from flexsearch.topology.parts import FORMS, Communication, Device, Link


def equal_devices(count: int, bandwidth: float) -> Topology:
    """``count`` equal devices on one switch, each with ``bandwidth`` B/s in each direction. Nothing but given times and
    transfers takes long: no latency, no start of a communication, and memory so fast that updates take no time."""
    devices = tuple(
        Device(
            name=f"gpu{k}", kind="cuda", host="host", model="given times", flops={"float32": 1e15},
            memory_bandwidth=1e15, memory_bytes=2**50, overhead_s=0.0,
        )
        for k in range(count)
    )  # fmt: skip
    return Topology(
        name=f"{count} devices at {bandwidth:g} B/s", devices=devices, switches=("switch",),
        links=tuple(Link(a=d.name, b="switch", bandwidth=bandwidth, latency_s=0.0) for d in devices),
        communication=Communication(
            backend="nccl", overhead_s=0.0, message_s=0.0, factors=dict.fromkeys(FORMS, 1.0), groups=()
        ),
    )  # fmt: skip


def random_chain(layers: int, batch: int, seed: int) -> OperatorGraph:
    """A chain of layers with times, activations and weights that differ tenfold, a hundredfold and a hundredfold."""
    draw = random.Random(seed)
    found = [ProfiledLayer("data", (), 0.0, 0.0, 1e4, 0.0, data=True)]
    for k in range(layers):
        forward_s = 1e-3 * 10 ** draw.uniform(0, 1)
        found.append(ProfiledLayer(
            f"layer{k}", (found[-1].name,), forward_s, forward_s * draw.uniform(1, 3), 1e5 * 10 ** draw.uniform(0, 2),
            1e5 * 10 ** draw.uniform(0, 2),
        ))  # fmt: skip
    return profiled_graph(f"chain of {layers}, seed {seed}", LayerProfile(tuple(found), True, batch))


@dataclass(frozen=True)
class Optimum:
    """``plans``: there are so many, of which ``simulated`` could be the fastest."""

    pipeline: Pipeline
    seconds: float
    plans: int
    simulated: int


def best_pipeline(graph: OperatorGraph, topology: Topology, options: Options) -> Optimum:
    """The fastest of all contiguous cuts of a chain x replicas that divide the devices x numbers of microbatches, 1F1B,
    a device for each stage. Plans are simulated in the order of a lower bound, until that of the next one is no less
    than the best time: so none is left out that could be faster."""
    simulators = StagedSimulators(graph, topology)
    plans = sorted(_pipelines(graph, len(topology.devices)), key=lambda plan: plan[0])
    best, seconds, simulated = plans[0][1], math.inf, 0
    for bound_s, pipeline in plans:
        if bound_s * (1 - 1e-6) >= seconds:  # given times are rounded to ticks, microbatch by microbatch
            break
        ends = [*pipeline.first[1:], len(graph.operators)]
        share = simulators.share(pipeline.replicas, pipeline.microbatches)[0].graph
        configs = [
            make_config(share.operators[i], {}, (stage,))
            for stage, (begin, end) in enumerate(zip(pipeline.first, ends, strict=True))
            for i in range(begin, end)
        ]
        took, simulated = simulators.simulator(pipeline, configs, options).seconds, simulated + 1
        if took < seconds:
            best, seconds = pipeline, took
    return Optimum(best, seconds, len(plans), simulated)


def _pipelines(graph: OperatorGraph, devices: int) -> Iterator[tuple[float, Pipeline]]:
    """All plans, with what they take at least (s): a stage computes all microbatches, after the first one came through
    the stages before it; then the last one's gradient goes back through them."""
    layers = graph.operators[:-1]  # the loss stays with the last layer
    times = [(float(op.attributes["forward_s"]), float(op.attributes["backward_s"])) for op in layers]  # type: ignore[arg-type]
    for stages in range(1, min(devices, len(layers)) + 1):
        replicas, rest = divmod(devices, stages)
        if rest or graph.batch % replicas:
            continue
        share = graph.batch // replicas
        counts = [m for m in range(1, share + 1) if share % m == 0]
        for cut in combinations(range(1, len(layers)), stages - 1):
            bounds = (0, *cut, len(layers))
            each = [sum(map(sum, times[a:b])) / replicas for a, b in pairwise(bounds)]
            for count in counts:
                bound_s = max(each[s] + sum(each[:s]) / count for s in range(stages))
                pipeline = Pipeline(replicas, bounds[:-1], tuple((s,) for s in range(stages)), count)
                yield bound_s, pipeline


class Loads:
    """The objective of dnn-partitioning (Tarnawski et al., NeurIPS 2020): load of a device, in ms, is what its nodes
    compute, and what it moves to and from the host: the output of each of its nodes that another device reads, and each
    output of another device that it reads, once."""

    def __init__(self, path: str | Path) -> None:
        self.file: File = load_file(path)
        nodes = {node.id: node for node in self.file.nodes}
        forward = [node for node in self.file.nodes if not node.isBackwardNode]
        self.ids = [node.id for node in forward]
        classes = {node.colorClass: k for k, node in enumerate(forward)}
        self.layer = {n.id: classes[n.colorClass] if n.isBackwardNode else self.ids.index(n.id) for n in nodes.values()}
        """Node -> number of the forward node that it belongs to."""
        self.compute = [0.0] * len(forward)
        self.slow = [0.0] * len(forward)
        """By layer: ms on an accelerator, and on a CPU."""
        self.before = [0] * len(forward)
        """By layer: the layers that it reads, as bits."""
        for node in nodes.values():
            self.compute[self.layer[node.id]] += node.fpgaLatency
            self.slow[self.layer[node.id]] += node.cpuLatency
        readers: dict[int, int] = {}
        costs: dict[int, float] = {}
        for edge in self.file.edges:
            source, reader = self.layer[edge.sourceId], self.layer[edge.destId]
            readers[edge.sourceId] = readers.get(edge.sourceId, 0) | 1 << reader
            costs[edge.sourceId] = max(costs.get(edge.sourceId, 0.0), edge.cost)
            if not nodes[edge.destId].isBackwardNode and not nodes[edge.sourceId].isBackwardNode:
                self.before[reader] |= 1 << source
        self.moves = [(1 << self.layer[i], readers[i], cost) for i, cost in costs.items() if cost]
        """Layer that makes an output, layers that read it, ms."""

    def load(self, part: int) -> float:
        """Of a device with these layers, as bits; ms."""
        total = sum(ms for k, ms in enumerate(self.compute) if part >> k & 1)
        for maker, readers, cost in self.moves:
            if (readers & ~part) if maker & part else (readers & part):
                total += cost
        return total

    def largest(self, parts: Sequence[int]) -> float:
        """The largest load of a split, ms."""
        return max(self.load(part) for part in parts)

    def ideals(self) -> list[int]:
        """All sets of layers that hold what their layers read, as bits, the smaller ones first."""
        found, level = [0], {0}
        while level:
            level = {
                ideal | 1 << k
                for ideal in level
                for k, before in enumerate(self.before)
                if not ideal >> k & 1 and not before & ~ideal
            }
            found += sorted(level)
        return found

    def best(self, accelerators: int, hosts: int = 0) -> float:
        """The smallest largest load of a contiguous split over accelerators and so many CPUs, which take as long as the
        file says and move nothing: dynamic programming over ideals, as the reference solver does; ms."""
        ideals = self.ideals()
        inside = {
            end: [
                (begin, self.load(end & ~begin), sum(ms for k, ms in enumerate(self.slow) if (end & ~begin) >> k & 1))
                for begin in ideals[: at + 1]
                if not begin & ~end
            ]
            for at, end in enumerate(ideals)
        }
        least: list[dict[int, float]] = []  # by CPUs used: the smallest largest load of each ideal
        for used in range(accelerators + 1):
            before, least = least, []
            for cpus in range(hosts + 1):
                here = {}
                for end in ideals:
                    found = 0.0 if not end else math.inf
                    for begin, fast, slow in inside[end]:
                        if used:
                            found = min(found, max(before[cpus][begin], fast))
                        if cpus:
                            found = min(found, max(least[cpus - 1][begin], slow))
                    here[end] = found
                least.append(here)
        return least[-1][ideals[-1]]
