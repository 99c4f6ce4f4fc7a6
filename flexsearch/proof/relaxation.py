"""Lower bounds for branch and bound: the time without contention of a plan in which only some operators have a config.

The relaxation drops queues for links, sharing of processors, and processor time for moving bytes. It keeps the order of
tasks on each device, all durations, and the communication between operators that both have a config. What remains is a
longest path; contention and further operators can only lengthen it.

Operators without a config are bounded by tables, made once, from the last operator to the first. From the start of
operator j's forward pieces on devices A to the end of its backward pieces on devices B at least ``ahead[j, config, A,
B]`` seconds pass, whatever the configs of later operators. Each reader of j contributes the least over its configs; the
start times of its pieces are relaxed to sets of devices that start no earlier than t. A and B are sets of devices; one
more column stands for the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np

from flexsearch.compiled import F64, I64
from flexsearch.graph import Flow, Tensor, volume
from flexsearch.lower import Exchange, Lowering, Reshard
from flexsearch.lower.schedule import backward_pass
from flexsearch.proof.ahead import look_ahead
from flexsearch.proof.bound import ROUNDING, device_kinds, least_costs
from flexsearch.proof.longest import children
from flexsearch.proof.tables import NEVER, Tables, make_work, room_ahead
from flexsearch.strategy import OperatorConfig, Options

HEAVY: Final = 50
"""Operators with at least 1/HEAVY of all computing count as heavy; see ``_followers``."""


Moved = tuple[F64, int, F64]
"""Seconds from the end of the last task of device a to the arrival of what device b receives; mask of the senders, if
the first phase is one exchange that keeps its links until it has ended, else 0; and how long that is, by link."""


class Relaxation:
    """Tables for the given choices of configs (by operator), and bounds of partial plans under ``options``. ``check``
    is called now and then while the tables are made; what it raises ends that."""

    def __init__(
        self, lowering: Lowering, options: Options, configs: Sequence[Sequence[OperatorConfig]],
        check: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.configs = configs
        self.tables = _Builder(lowering, options, configs, check or (lambda: None)).build()
        self.ahead = room_ahead(self.tables)
        for operator in reversed(range(len(configs))):
            if check is not None:
                check()
            look_ahead(self.tables, self.ahead, operator)
        self.work = make_work(self.tables)

    def bounds(self, chosen: I64, operator: int) -> F64:
        """Lower bounds (s) of the plans that continue ``chosen`` (number of a config by operator, -1: none yet) with
        each config of ``operator``, all of whose producers must have been chosen."""
        children(self.tables, self.work, self.ahead, chosen, operator)
        bounds: F64 = self.work.bound[: len(self.configs[operator])] * ROUNDING
        return bounds

    def bound(self, chosen: I64) -> float:
        """Lower bound (s) of the plans that continue ``chosen``."""
        return float(children(self.tables, self.work, self.ahead, chosen, -1)) * ROUNDING


class _Builder:
    """Fills the tables."""

    def __init__(
        self, lowering: Lowering, options: Options, configs: Sequence[Sequence[OperatorConfig]],
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        self.check = check
        self.lowering, self.graph, self.topology = lowering, lowering.graph, lowering.topology
        self.options, self.configs, self.count = options, configs, len(lowering.topology.devices)
        self.placed = [[lowering.placed(i, c) for c in row] for i, row in enumerate(configs)]
        self.shape = len(configs), max(map(len, configs))
        kinds = [kind[0] for kind in device_kinds(self.topology.devices)]
        self.least = [
            float(least_costs(op, i, lowering.costs, kinds, self.count).work[:, -1].min())
            for i, op in enumerate(self.graph.operators)
        ]

    def build(self) -> Tables:
        graph, shape = self.graph, self.shape
        forward, backward = (np.full((*shape, self.count), NEVER) for _ in range(2))
        on, busy = np.zeros(shape, np.int64), np.full(shape, np.inf)
        for i, row in enumerate(self.placed):
            for c, placed in enumerate(row):
                devices = list(placed.placement.devices)
                on[i, c] = sum(1 << d for d in devices)
                forward[i, c, devices] = placed.forward_s
                if graph.has_backward[i]:
                    backward[i, c, devices] = placed.backward_s
                busy[i, c] = sum(placed.forward_s) + sum(placed.backward_s)
        return Tables(
            choices=_numbers(len(row) for row in self.configs), has_backward=_numbers(graph.has_backward), on=on,
            forward=forward, backward=backward, busy=busy, least_busy=np.array(self.least), **self._edges(),
            **_Weights(self).columns(),
        )  # fmt: skip

    def _edges(self) -> dict[str, Any]:
        graph = self.graph
        edges = [
            (graph.producer[name], i, p, name)
            for i, op in enumerate(graph.operators)
            for p, name in enumerate(op.inputs)
            if name in graph.producer
        ]
        follow = self._followers({edge[:2] for edge in edges})
        produced, wanted, layout = np.zeros((3, len(edges) + len(follow), self.shape[1]), dtype=np.int64)
        names = list(dict.fromkeys(edge[3] for edge in edges))
        table, width, flows = [], [], []
        there: list[Moved] = []
        back: list[Moved] = []
        for e, (producer, reader, position, name) in enumerate(edges):
            output, itemsize = self._output(edges[e]), graph.tensor[name].itemsize
            writes = [placed.writes[output].number for placed in self.placed[producer]]
            reads = [placed.reads[position].number for placed in self.placed[reader]]
            sources, needs = list(dict.fromkeys(writes)), list(dict.fromkeys(reads))
            produced[e, : len(writes)] = [sources.index(n) for n in writes]
            wanted[e, : len(reads)] = [needs.index(n) for n in reads]
            layout[e, : len(reads)] = reads
            table.append(len(there))
            width.append(len(needs))
            flows.append(name in graph.differentiable and graph.has_backward[reader])
            for source in sources:
                self.check()
                for need in needs:
                    there.append(self._moved(self.lowering.reshard(source, need, itemsize)))
                    flow = self.lowering.reshard(need, source, itemsize) if flows[-1] else None
                    back.append(self._moved(flow) if flow is not None else self._nothing)
        ends = [edge[:2] for edge in edges] + follow
        for _ in follow:  # no layouts: nothing moves
            table.append(len(there))
            width.append(0)
            flows.append(False)
        there.append(self._nothing)
        back.append(self._nothing)
        into = _rows([[e for e, edge in enumerate(edges) if edge[1] == i] for i in range(len(graph.operators))])
        # As they are sent: by output, then by reader.
        sent = [*sorted(range(len(edges)), key=lambda e: self._output(edges[e])), *range(len(edges), len(ends))]
        out = _rows([[e for e in sent if ends[e][0] == i] for i in range(len(graph.operators))])
        return {
            "into_first": into[0], "into_last": into[1], "out_first": out[0], "out_last": out[1], "out": out[2],
            "edge_from": _numbers(edge[0] for edge in ends), "edge_to": _numbers(edge[1] for edge in ends),
            "edge_flows": _numbers(flows), "edge_table": _numbers(table), "edge_width": _numbers(width),
            "edge_tensor": _numbers([*(names.index(edge[3]) for edge in edges), *(-1 for _ in follow)]),
            "produced": produced, "wanted": wanted, "layout": layout,
            "there": np.array([m[0] for m in there]), "back": np.array([m[0] for m in back]),
            "there_send": _numbers(m[1] for m in there), "back_send": _numbers(m[1] for m in back),
            "there_holds": np.array([m[2] for m in there]), "back_holds": np.array([m[2] for m in back]),
        }  # fmt: skip

    def _followers(self, edges: set[tuple[int, int]]) -> list[tuple[int, int]]:
        """Operators that come next on a device without reading what the one before made: the next in the order, the
        next two that take much of all computing, and one that reads the same weight."""
        heavy = [i for i, seconds in enumerate(self.least) if seconds * HEAVY >= sum(self.least)]
        pairs: list[tuple[int, int]] = []
        for i in range(len(self.least)):
            after = [i + 1, *[k for k in heavy if k > i][:2], *self._sharers(i)]
            pairs += [(i, k) for k in dict.fromkeys(after) if k < len(self.least) and (i, k) not in edges]
        return pairs

    def _sharers(self, operator: int) -> list[int]:
        """Later operators that read a weight of this one, and no others do."""
        readers = [[o for o, _ in self.graph.consumers[t.name]] for t in self.graph.of_kind("parameter")]
        return [row[1] for row in readers if len(row) == 2 and row[0] == operator and row[1] > operator]

    def _output(self, edge: tuple[int, int, int, str]) -> int:
        return self.graph.operators[edge[0]].outputs.index(edge[3])

    @cached_property
    def _nothing(self) -> Moved:
        return np.full((self.count, self.count), NEVER), 0, np.zeros(len(self.topology.resources))

    def _takes_turns(self, exchange: Exchange) -> bool:
        """Whether others that are ready later may get the links before it has ended."""
        return exchange.form == "all_reduce" and self.topology.communication.turn_bytes is not None

    def _moved(self, plan: Reshard) -> Moved:
        """What a reshard means to the devices at its two ends."""
        nothing = self._nothing
        if not plan.exchanges:
            return nothing
        phases = [nothing[0].copy() for _ in plan.phases]
        for delays, phase in zip(phases, plan.phases, strict=True):
            for exchange in phase.exchanges:
                at = np.ix_(exchange.senders, exchange.receivers)
                delays[at] = np.maximum(delays[at], exchange.transfer.duration_s)
        send, holds = 0, nothing[2]
        if len(plan.phases[0].exchanges) == 1 and not self._takes_turns(only := plan.phases[0].exchanges[0]):
            send, holds = _mask(only.senders), holds.copy()
            for resource, seconds in only.transfer.links:
                holds[resource] += seconds
        if len(phases) == 1:
            return phases[0], send, holds
        first, second = phases
        both: F64 = (first[:, :, None] + second[None, :, :]).max(axis=1)
        through = np.maximum(first, both)
        if (second > through).any():
            send = 0  # what a second phase sends of its own does not wait for the first
        return np.maximum(through, second), send, holds


class _Weights:
    """Columns about weights with one reader, and with two. One with more adds only its update to the sum of all work:
    what it costs depends on all of the readers together."""

    def __init__(self, owner: _Builder) -> None:
        self.owner, self.graph, self.lowering = owner, owner.graph, owner.lowering
        self.count = owner.count
        options = owner.options
        self.rates = [
            self.lowering.costs.update_rates(d, options.optimizer, options.precision) for d in range(self.count)
        ]
        self.keys: dict[object, int] = {}
        self.exchanges: list[tuple[int, float, F64, int, int, float, int, int]] = []
        """Key, latency, links, senders, receivers, second phase, its receivers, bucket."""
        self.bucket_of: dict[str, int] = {}
        self.after: list[int] = []
        numbers = [t.name for t in self.graph.of_kind("parameter")]
        for operator, buckets in backward_pass(self.graph, self.lowering.buckets(owner.options.bucket_bytes)):
            for weights in buckets:
                self.bucket_of |= dict.fromkeys((numbers[w] for w in weights), len(self.after))
                self.after.append(operator)

    def columns(self) -> dict[str, Any]:
        columns = self._alone() | self._pairs()
        columns["own"] = columns["update"].copy()
        for w, (first, _) in enumerate(columns["pair_reader"]):
            choices = len(self.owner.configs[first])
            columns["own"][first, :choices] += columns["pair_half"][w, 0, columns["pair_variant"][w, 0, :choices]]
        rows = list(zip(*self.exchanges, strict=True)) if self.exchanges else [()] * 8
        resources = len(self.owner.topology.resources)
        return columns | {
            "sync_key": _numbers(rows[0]), "sync_latency": np.array(rows[1], np.float64),
            "sync_links": np.array(rows[2]) if self.exchanges else np.zeros((0, resources)),
            "sync_send": _numbers(rows[3]), "sync_receive": _numbers(rows[4]),
            "second": np.array(rows[5], np.float64), "second_receive": _numbers(rows[6]),
            "sync_bucket": _numbers(rows[7]), "bucket_after": _numbers(self.after),
            "keys": _numbers([len(self.keys)]),
        }  # fmt: skip

    def _readers(self, tensor: Tensor) -> tuple[tuple[int, int], ...]:
        return self.graph.consumers[tensor.name]

    def _alone(self) -> dict[str, Any]:
        graph, shape = self.graph, self.owner.shape
        gathered, update = np.zeros((*shape, self.count)), np.zeros((*shape, self.count))
        sink = np.full((*shape, self.count), NEVER)
        first, last = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        weights = [t for t in graph.of_kind("parameter") if len(self._readers(t)) == 1]
        for i, row in enumerate(self.owner.placed):
            mine = [(t, self._readers(t)[0][1]) for t in weights if self._readers(t)[0][0] == i]
            for c, placed in enumerate(row):
                first[i, c] = len(self.exchanges)
                for tensor, position in mine:
                    sharding = self.owner.configs[i][c].sharding.rank
                    (arrivals,) = self._plan(tensor, [(placed.reads[position].number, i)], sharding, update[i, c])
                    gathered[i, c] = np.maximum(gathered[i, c], arrivals)
                last[i, c] = len(self.exchanges)
                self._sink(int(first[i, c]), update[i, c], sink[i, c])
        return {
            "gathered": gathered, "update": update, "sink": sink, "sync_first": first, "sync_last": last,
            "least_update": np.array([
                sum(self._least(t) for t in weights if self._readers(t)[0][0] == i) for i in range(shape[0])
            ], np.float64),
        }  # fmt: skip

    def _pairs(self) -> dict[str, Any]:
        """Of weights with two readers: a plan for each pair of what the readers' configs say about the weight."""
        weights = [t for t in self.graph.of_kind("parameter") if len({o for o, _ in self._readers(t)}) == 2]
        weights = [t for t in weights if len(self._readers(t)) == 2]
        variants = np.zeros((len(weights), 2, self.owner.shape[1]), dtype=np.int64)
        kinds: list[list[list[tuple[int, int]]]] = []
        for w, tensor in enumerate(weights):
            kinds.append([])
            for r, (i, position) in enumerate(self._readers(tensor)):
                asked = [
                    (placed.reads[position].number, config.sharding.rank)
                    for placed, config in zip(self.owner.placed[i], self.owner.configs[i], strict=True)
                ]
                kinds[w].append(list(dict.fromkeys(asked)))
                variants[w, r, : len(asked)] = [kinds[w][r].index(k) for k in asked]
        rows: list[int] = []
        first: list[int] = []
        last: list[int] = []
        update: list[F64] = []
        gathered: list[list[F64]] = []
        sinks: list[F64] = []
        half = np.zeros((len(weights), 2, max((len(k) for pair in kinds for k in pair), default=0), self.count))
        for w, tensor in enumerate(weights):
            rows.append(len(first))
            (one, _), (two, _) = self._readers(tensor)
            for need, sharding in kinds[w][0]:
                self.owner.check()
                for other, also in kinds[w][1]:
                    first.append(len(self.exchanges))
                    update.append(np.zeros(self.count))
                    gathered.append(self._plan(tensor, [(need, one), (other, two)], max(sharding, also), update[-1]))
                    last.append(len(self.exchanges))
                    sinks.append(np.full(self.count, NEVER))
                    self._sink(first[-1], update[-1], sinks[-1])
            table = np.array(update[rows[w] :]).reshape(len(kinds[w][0]), len(kinds[w][1]), self.count)
            half[w, 0, : len(kinds[w][0])] = table.min(axis=1)
            half[w, 1, : len(kinds[w][1])] = table.min(axis=0)
        several = [t for t in self.graph.of_kind("parameter") if len(self._readers(t)) > 1 and t not in weights]
        return {
            "pair_reader": np.array([[o for o, _ in self._readers(t)] for t in weights], np.int64).reshape(-1, 2),
            "pair_variant": variants, "pair_width": _numbers(len(pair[1]) for pair in kinds),
            "pair_row": _numbers(rows), "pair_first": _numbers(first), "pair_last": _numbers(last),
            "pair_update": np.array(update).reshape(-1, self.count),
            "pair_sink": np.array(sinks).reshape(-1, self.count),
            "pair_gathered": np.array(gathered).reshape(-1, 2, self.count), "pair_half": half,
            "pair_least": np.array([self._least(t) for t in weights], np.float64),
            "other_update": np.array([sum(self._least(t) for t in several)], np.float64),
        }  # fmt: skip

    def _least(self, tensor: Tensor) -> float:
        """Seconds of updating a weight once."""
        if tensor.name not in self.graph.differentiable:
            return 0.0
        return min(per_tensor + per_byte * tensor.nbytes for per_byte, per_tensor in self.rates)

    def _plan(self, tensor: Tensor, readers: list[tuple[int, int]], sharding: int, update: F64) -> list[F64]:
        """Note the synchronisation of a weight whose readers (layout, operator) are known, and add its update. Returns
        when it has been gathered for each reader at the earliest."""
        trained = tensor.name in self.graph.differentiable
        flows = {i: Flow.BOTH if trained and self.graph.has_backward[i] else Flow.VALUE for _, i in readers}
        needs = list(dict.fromkeys((need, flows[i]) for need, i in readers))
        plan = self.lowering.weight(tensor, tuple(n for n, _ in needs), [f for _, f in needs], sharding)
        arrivals = []
        for need, i in readers:
            arrived = np.zeros(self.count)
            gather = plan.forward[needs.index((need, flows[i]))]
            for exchange in gather.exchanges if gather is not None else ():
                on = list(exchange.receivers)
                arrived[on] = np.maximum(arrived[on], exchange.transfer.duration_s)
            arrivals.append(arrived)
        if plan.sync is not None:
            for device, box, _ in plan.storage:
                per_byte, per_tensor = self.rates[device]
                update[device] += per_tensor + per_byte * volume(box) * tensor.itemsize
            later = [exchange for phase in plan.sync.phases[1:] for exchange in phase.exchanges]
            for exchange in plan.sync.phases[0].exchanges:
                self._exchange(exchange, later, tensor)
        return arrivals

    def _exchange(self, exchange: Exchange, later: list[Exchange], tensor: Tensor) -> None:
        links, bucket = np.zeros(len(self.owner.topology.resources)), self.bucket_of[tensor.name]
        # Of what the library has several algorithms for, more bytes may load links less; but they do not end sooner.
        for resource, seconds in exchange.transfer.links if exchange.linear else ():
            links[resource] += seconds
        group = bucket, exchange.form, exchange.senders, exchange.receivers, tensor.dtype
        key = self.keys.setdefault(group, len(self.keys))
        follow = [x for x in later if set(x.senders) & set(exchange.receivers)]
        longest = max(follow, key=lambda x: x.transfer.duration_s, default=None)
        self.exchanges.append((
            key, exchange.transfer.duration_s - links.max(), links, _mask(exchange.senders), _mask(exchange.receivers),
            longest.transfer.duration_s if longest else 0.0, _mask(longest.receivers) if longest else 0, bucket,
        ))  # fmt: skip

    def _sink(self, first: int, update: F64, sink: F64) -> None:
        sink[update > 0.0] = update[update > 0.0]
        for _, latency, links, send, receive, second, second_receive, _ in self.exchanges[first:]:
            follows = max(update[d] for d in range(self.count) if receive >> d & 1)
            if second_receive:
                follows = max(follows, *(second + update[d] for d in range(self.count) if second_receive >> d & 1))
            for d in range(self.count):
                if send >> d & 1:
                    sink[d] = max(sink[d], latency + float(links.max()) + follows)


def _mask(devices: Sequence[int]) -> int:
    return sum(1 << d for d in devices)


def _numbers(values: Any) -> I64:
    return np.array([int(v) for v in values], dtype=np.int64)


def _rows(rows: list[list[int]]) -> tuple[I64, I64, I64]:
    """First and last of each list, and the lists end to end."""
    ends = np.cumsum([0, *map(len, rows)])
    return ends[:-1].astype(np.int64), ends[1:].astype(np.int64), _numbers(x for row in rows for x in row)
