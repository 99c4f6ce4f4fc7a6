"""What benchmarks of the search compare: graphs beyond the shipped ones, and the space of FlexFlow's released code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flexsearch.errors import StrategyError
from flexsearch.graph import Operator, OperatorGraph
from flexsearch.strategy import OperatorConfig, Options, make_config
from flexsearch.strategy.baselines import baseline
from flexsearch.strategy.propagate import follow
from flexsearch.topology import Topology

EXPERTS = ("one-weird-trick", "layer-wise")
"""Baselines that the FlexFlow paper calls expert-designed: for convolutional and for recurrent networks."""


def dense_8(batch: int = 16384, width: int = 2304, layers: int = 8) -> OperatorGraph:
    """Dense layers, in turn to four times ``width`` features and back, without activations, and a squared error.

    The default is the model of a report by a user of FlexFlow (flexflow/flexflow-train, issue 217)."""
    return dense(batch, [width * (4 if k % 2 else 1) for k in range(layers + 1)], "dense_8")


def rnnlm_2(batch: int = 64, hidden: int = 2048, vocab: int = 10000) -> OperatorGraph:
    """The paper's RNNLM, unrolled over 2 steps only: small enough to prove an optimum."""
    from flexsearch.graph.importer import import_model
    from flexsearch.zoo import rnnlm

    made = rnnlm(batch, 2, hidden, vocab, device="meta")
    return import_model(made.model, made.inputs, made.loss, targets=made.targets, name="rnnlm_2")


def mlp_4(batch: int = 256, width: int = 4096) -> OperatorGraph:
    """Four linear layers without activations, and a squared error: layers that are best split in turn."""
    return dense(batch, [width] * 5, "mlp_4")


def dense(batch: int, sizes: Sequence[int], name: str) -> OperatorGraph:
    """Linear layers without activations, with so many features between them, and a squared error."""
    from torch import nn, randn

    from flexsearch.graph.importer import import_model

    model = nn.Sequential(*(nn.Linear(a, b, device="meta") for a, b in pairwise(sizes)))
    x, y = (randn(batch, features, device="meta") for features in (sizes[0], sizes[-1]))
    return import_model(model, (x,), nn.functional.mse_loss, targets=y, name=name)


_MADE: dict[str, Callable[[], OperatorGraph]] = {"dense_8": dense_8, "mlp_4": mlp_4, "rnnlm_2": rnnlm_2}


def load_graph(name: str) -> OperatorGraph:
    """A graph of this module, a shipped one, or a file."""
    return _MADE[name]() if name in _MADE else OperatorGraph.load(name)


def options_of(name: str) -> Options:
    """What a graph is trained with: plain SGD in the report on ``dense_8``, else the default."""
    return Options(optimizer="sgd") if name == "dense_8" else Options()


def cluster_called(name: str) -> Topology:
    """A topology by name; ``NAME/4`` is 4 devices of each of its hosts."""
    base, _, each = name.partition("/")
    whole = Topology.load(base)
    if not each:
        return whole
    hosts = [[d for d, device in enumerate(whole.devices) if device.host == host] for host in whole.hosts]
    return whole.subset([d for devices in hosts for d in devices[: int(each)]])


def first_devices(cluster: str, count: int) -> Topology:
    """The first ``count`` devices of a cluster."""
    whole = cluster_called(cluster)
    return whole if count == len(whole.devices) else whole.subset(range(count))


def in_turn(graph: OperatorGraph, topology: Topology) -> dict[str, OperatorConfig]:
    """What an integer program (of another tool) makes of ``mlp_4`` on 2 hosts of 4 GPUs: layers split by output
    features on the transposed mesh and by input features on the plain one, in turn."""
    each = len(topology.devices) // len(topology.hosts)
    plain = tuple(range(len(topology.devices)))
    transposed = tuple(plain[host * each + k] for k in range(each) for host in range(len(topology.hosts)))
    found: dict[str, OperatorConfig] = {}
    config = None
    for k, op in enumerate(graph.operators):
        if op.kind == "linear":
            degrees, devices = (({"o": 4, "i": 2}, transposed), ({"o": 2, "i": 4}, plain))[k % 2]
            config = make_config(op, degrees, devices)
        else:
            assert config is not None
            config = follow(graph, k - 1, config, k)
        found[op.name] = config
    return found


def expert(graph: OperatorGraph, topology: Topology) -> str | None:
    """Name of the expert-designed baseline for a graph; None if there is none."""
    for name in EXPERTS:
        try:
            baseline(name, graph, topology)
        except StrategyError:
            continue
        return name
    return None


@dataclass(frozen=True)
class ReleasedSpace:
    """The space that FlexFlow's released search draws from (``Op::get_random_parallel_config``), as a rule for
    ``search``; workers get it by pickle.

    An operator is split over its batch only, into n equal parts on n consecutive devices. ``counts``: what n may be: a
    divisor of the devices of a host, or all of them times a divisor of the number of hosts. Operators without a batch
    (sums of losses) are computed by each of n devices. Nearest to a config is the largest n that is not above its
    number of devices."""

    operators: tuple[Operator, ...]
    devices: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, graph: OperatorGraph, topology: Topology) -> ReleasedSpace:
        devices, hosts = len(topology.devices), len(topology.hosts)
        inside = {n for n in range(1, devices // hosts + 1) if devices // hosts % n == 0}
        across = {devices // n for n in range(1, hosts + 1) if hosts % n == 0}
        return cls(graph.operators, devices, tuple(sorted(inside | across)))

    def __call__(self, operator: int, config: OperatorConfig) -> OperatorConfig:
        op = self.operators[operator]
        axis = batch_axis(op)
        size = 0 if axis is None else op.sizes[axis]
        n = max(n for n in self.counts if n <= len(config.devices) and size % n == 0)
        first = min(*config.devices, self.devices - n)
        return make_config(op, {} if axis is None else {axis: n}, range(first, first + n))


def batch_axis(op: Operator) -> str | None:
    """The axis along which an operator's batch is split; None if it has none."""
    return next((axis for axis in op.axes_of("sample") if axis in op.splittable and op.sizes[axis] > 1), None)
