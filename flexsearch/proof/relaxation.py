"""Lower bounds for branch and bound: the time without contention of a plan in which only some operators have a config.

The relaxation drops queues for links, sharing of processors, and processor time for moving bytes. It keeps the order of
tasks on each device, all durations, and the communication between operators that both have a config. What remains is a
longest path; contention and further operators can only lengthen it. So is what the host of a device launches: a task
starts no earlier than the launches up to it have taken. Operators without a config are launched at least once.

Operators without a config are bounded by tables, made once, from the last operator to the first. From the start of
operator j's forward pieces on devices A to the end of its backward pieces on devices B at least ``ahead[j, config, A,
B]`` seconds pass, whatever the configs of later operators. Each reader of j contributes the least over its configs; the
start times of its pieces are relaxed to sets of devices that start no earlier than t. A and B are sets of devices; one
more column stands for the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from flexsearch.compiled import F64, I64
from flexsearch.graph import Tensor
from flexsearch.lower import Lowering
from flexsearch.proof.ahead import look_ahead
from flexsearch.proof.bound import ROUNDING, UPDATE_ROUNDING, device_kinds, least_costs
from flexsearch.proof.longest import children
from flexsearch.proof.samples import Moved, Samples, Sync, mask
from flexsearch.proof.tables import NEVER, Tables, make_work, room_ahead
from flexsearch.strategy import OperatorConfig, Options

HEAVY: Final = 50
"""Operators with at least 1/HEAVY of all computing count as heavy; see ``_followers``."""


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
        self.check, self.graph, self.topology = check, lowering.graph, lowering.topology
        self.configs, self.count = configs, len(lowering.topology.devices)
        self.samples = Samples(lowering, options, [row[0] for row in configs])
        self.shape = len(configs), max(map(len, configs))
        kinds = [kind[0] for kind in device_kinds(self.topology.devices)]
        self.costs = lowering.costs
        self.least = [
            float(least_costs(op, i, lowering.costs, kinds, self.count).work[:, -1].min())
            for i, op in enumerate(self.graph.operators)
        ]

    def build(self) -> Tables:
        graph, shape = self.graph, self.shape
        forward, backward = (np.full((*shape, self.count), NEVER) for _ in range(2))
        on, busy = np.zeros(shape, np.int64), np.full(shape, np.inf)
        launch_forward, launch_backward = (np.zeros((*shape, self.count)) for _ in range(2))
        for i, row in enumerate(self.configs):
            for c, config in enumerate(row):
                self.samples.take({i: config})
                forward[i, c], backward[i, c] = self.samples.computing(i), self.samples.computing(i, True)
                launch_forward[i, c] = self.samples.launching(i)
                launch_backward[i, c] = self.samples.launching(i, True)
                on[i, c] = mask(config.devices)
                busy[i, c] = sum(np.maximum(seconds, 0.0).sum() for seconds in (forward[i, c], backward[i, c]))
        columns = {**self._hosts(), **self._edges(), **_Weights(self).columns()}
        shared = self.samples.shared_connections()
        for way in ("there", "back"):
            columns[f"{way}_holds"][np.isin(columns.pop(f"{way}_connection"), shared)] = 0.0
        return Tables(
            choices=_numbers(len(row) for row in self.configs), has_backward=_numbers(graph.has_backward), on=on,
            forward=forward, backward=backward, busy=busy, least_busy=np.array(self.least),
            launch_forward=launch_forward, launch_backward=launch_backward, **columns,
        )  # fmt: skip

    def _hosts(self) -> dict[str, Any]:
        """What launching takes, whatever the configs are."""
        launch = self.samples.launch
        hosted = bool(launch.min() > 0.0)
        at_once = 1.0 / float((1.0 / launch).sum()) if hosted else 0.0
        count = [sum(self.costs.launches(i)[:2]) for i in range(self.shape[0])]
        for tensor in self.graph.of_kind("parameter"):
            if len(readers := self.graph.consumers[tensor.name]) == 1 and tensor.name in self.graph.differentiable:
                count[readers[0][0]] += self.samples.updates
        return {
            "launch_issue": self.samples.issue, "launch_share": at_once / launch if hosted else np.zeros(self.count),
            "least_launch": np.array(count, np.float64) * at_once,
        }  # fmt: skip

    def _edges(self) -> dict[str, Any]:
        graph, samples = self.graph, self.samples
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
            output = self._output(edges[e])
            writes = [samples.written(producer, config, output) for config in self.configs[producer]]
            reads = [samples.read(reader, config, position) for config in self.configs[reader]]
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
                    samples.take({
                        producer: self.configs[producer][writes.index(source)],
                        reader: self.configs[reader][reads.index(need)],
                    })  # fmt: skip
                    there.append(samples.moved(reader, position))
                    back.append(samples.moved(reader, position, True))
        ends = [edge[:2] for edge in edges] + follow
        for _ in follow:  # no layouts: nothing moves
            table.append(len(there))
            width.append(0)
            flows.append(False)
        there.append(samples.nothing())
        back.append(samples.nothing())
        into = _rows([[e for e, edge in enumerate(edges) if edge[1] == i] for i in range(len(graph.operators))])
        # As they are sent: by output, then by reader.
        sent = [*sorted(range(len(edges)), key=lambda e: self._output(edges[e])), *range(len(edges), len(ends))]
        out = _rows([[e for e in sent if ends[e][0] == i] for i in range(len(graph.operators))])
        both = {"there": there, "back": back}
        return {
            "into_first": into[0], "into_last": into[1], "out_first": out[0], "out_last": out[1], "out": out[2],
            "edge_from": _numbers(edge[0] for edge in ends), "edge_to": _numbers(edge[1] for edge in ends),
            "edge_flows": _numbers(flows), "edge_table": _numbers(table), "edge_width": _numbers(width),
            "edge_tensor": _numbers([*(names.index(edge[3]) for edge in edges), *(-1 for _ in follow)]),
            "produced": produced, "wanted": wanted, "layout": layout,
            "there": np.array([m.delays for m in there]), "back": np.array([m.delays for m in back]),
            "there_send": _numbers(m.send for m in there), "back_send": _numbers(m.send for m in back),
            "there_launch": np.array([m.launch for m in there]), "back_launch": np.array([m.launch for m in back]),
            "there_holds": np.array([m.holds for m in there]), "back_holds": np.array([m.holds for m in back]),
            **{f"{way}_connection": np.array([m.connection for m in ms], np.uint64) for way, ms in both.items()},
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


class _Weights:
    """Columns about weights with one reader, and with two. One with more adds only its update to the sum of all work:
    what it costs depends on all of the readers together."""

    def __init__(self, owner: _Builder) -> None:
        self.owner, self.graph, self.samples, self.count = owner, owner.graph, owner.samples, owner.count
        self.weights = [(t, self.graph.consumers[t.name]) for t in self.graph.of_kind("parameter")]
        """With their readers: (operator, position)."""
        self.keys: dict[tuple[int, int], int] = {}
        self.exchanges: list[Sync] = []

    def columns(self) -> dict[str, Any]:
        columns = self._alone() | self._pairs()
        columns["own"] = columns["update"].copy()
        for w, (first, _) in enumerate(columns["pair_reader"]):
            choices = len(self.owner.configs[first])
            columns["own"][first, :choices] += columns["pair_half"][w, 0, columns["pair_variant"][w, 0, :choices]]
        rows, resources = self.exchanges, len(self.owner.topology.resources)
        keys = [self.keys.setdefault((x.bucket, x.key), len(self.keys)) for x in rows]
        buckets = len(self.samples.rows.table.started_by)
        return columns | {
            "sync_key": _numbers(keys), "sync_latency": np.array([x.seconds - x.links.max() for x in rows], np.float64),
            "sync_links": np.array([x.links for x in rows]).reshape(-1, resources),
            "sync_send": _numbers(x.send for x in rows), "sync_receive": _numbers(x.receive for x in rows),
            "second": np.array([x.second for x in rows], np.float64),
            "second_receive": _numbers(x.second_receive for x in rows),
            "sync_bucket": _numbers(x.bucket for x in rows),
            "bucket_after": _numbers(map(self.samples.sent_after, range(buckets))), "keys": _numbers([len(self.keys)]),
        }  # fmt: skip

    def _alone(self) -> dict[str, Any]:
        shape = self.owner.shape
        gathered, update, launch = (np.zeros((*shape, self.count)) for _ in range(3))
        sink = np.full((*shape, self.count), NEVER)
        first, last = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for i, row in enumerate(self.owner.configs):
            mine = [(w, readers[0][1]) for w, (_, readers) in enumerate(self.weights) if _only(readers, i)]
            for c, config in enumerate(row):
                first[i, c] = len(self.exchanges)
                if mine:
                    self.samples.take({i: config})
                for w, position in mine:
                    gathered[i, c] = np.maximum(gathered[i, c], self.samples.gathered(i, position))
                    update[i, c] += self.samples.update(w)
                    launch[i, c] += self.samples.launching_updates(w)
                    self.exchanges += self.samples.synchronised(w)
                last[i, c] = len(self.exchanges)
                self._sink(int(first[i, c]), update[i, c], sink[i, c])
        return {
            "gathered": gathered, "update": update, "launch_update": launch, "sink": sink,
            "sync_first": first, "sync_last": last,
            "least_update": np.array([
                sum(self._least(t) for t, readers in self.weights if _only(readers, i)) for i in range(shape[0])
            ], np.float64),
        }  # fmt: skip

    def _pairs(self) -> dict[str, Any]:
        """Of weights with two readers: a row for each pair of what the readers' configs say about the weight."""
        pairs = [w for w, (_, readers) in enumerate(self.weights) if len(readers) == len({o for o, _ in readers}) == 2]
        variants = np.zeros((len(pairs), 2, self.owner.shape[1]), dtype=np.int64)
        kinds: list[list[list[tuple[int, int]]]] = []
        first_like: list[list[list[OperatorConfig]]] = []
        """By pair, reader and variant: a config."""
        for k, w in enumerate(pairs):
            kinds.append([])
            first_like.append([])
            for r, (i, position) in enumerate(self.weights[w][1]):
                row = self.owner.configs[i]
                asked = [(self.samples.read(i, config, position), config.sharding.rank) for config in row]
                kinds[k].append(list(dict.fromkeys(asked)))
                first_like[k].append([row[asked.index(kind)] for kind in kinds[k][r]])
                variants[k, r, : len(asked)] = [kinds[k][r].index(kind) for kind in asked]
        rows: list[int] = []
        first: list[int] = []
        last: list[int] = []
        update: list[F64] = []
        gathered: list[list[F64]] = []
        sinks: list[F64] = []
        half = np.zeros((len(pairs), 2, max((len(k) for pair in kinds for k in pair), default=0), self.count))
        for k, w in enumerate(pairs):
            rows.append(len(first))
            readers = self.weights[w][1]
            for config in first_like[k][0]:
                self.owner.check()
                for other in first_like[k][1]:
                    self.samples.take({readers[0][0]: config, readers[1][0]: other})
                    first.append(len(self.exchanges))
                    update.append(self.samples.update(w))
                    gathered.append([self.samples.gathered(*reader) for reader in readers])
                    self.exchanges += self.samples.synchronised(w)
                    last.append(len(self.exchanges))
                    sinks.append(np.full(self.count, NEVER))
                    self._sink(first[-1], update[-1], sinks[-1])
            table = np.array(update[rows[k] :]).reshape(len(kinds[k][0]), len(kinds[k][1]), self.count)
            half[k, 0, : len(kinds[k][0])] = table.min(axis=1)
            half[k, 1, : len(kinds[k][1])] = table.min(axis=0)
        several = [t for w, (t, readers) in enumerate(self.weights) if len(readers) > 1 and w not in pairs]
        return {
            "pair_reader": np.array([[o for o, _ in self.weights[w][1]] for w in pairs], np.int64).reshape(-1, 2),
            "pair_variant": variants, "pair_width": _numbers(len(pair[1]) for pair in kinds),
            "pair_row": _numbers(rows), "pair_first": _numbers(first), "pair_last": _numbers(last),
            "pair_update": np.array(update).reshape(-1, self.count),
            "pair_sink": np.array(sinks).reshape(-1, self.count),
            "pair_gathered": np.array(gathered).reshape(-1, 2, self.count), "pair_half": half,
            "pair_least": np.array([self._least(self.weights[w][0]) for w in pairs], np.float64),
            "other_update": np.array([sum(self._least(t) for t in several)], np.float64),
        }  # fmt: skip

    def _least(self, tensor: Tensor) -> float:
        """Seconds of updating a weight once, at least."""
        if tensor.name not in self.graph.differentiable:
            return 0.0
        seconds = min(per_tensor + per_byte * tensor.nbytes for per_byte, per_tensor in self.samples.rates)
        return max(0.0, seconds - UPDATE_ROUNDING * self.count)

    def _sink(self, first: int, update: F64, sink: F64) -> None:
        sink[update > 0.0] = update[update > 0.0]
        for x in self.exchanges[first:]:
            follows = max(update[d] for d in range(self.count) if x.receive >> d & 1)
            if x.second_receive:
                follows = max(follows, *(x.second + update[d] for d in range(self.count) if x.second_receive >> d & 1))
            for d in range(self.count):
                if x.send >> d & 1:
                    sink[d] = max(sink[d], x.seconds + follows)


def _only(readers: Sequence[tuple[int, int]], operator: int) -> bool:
    """Whether an operator alone reads a weight, once."""
    return len(readers) == 1 and readers[0][0] == operator


def _numbers(values: Any) -> I64:
    return np.array([int(v) for v in values], dtype=np.int64)


def _rows(rows: list[list[int]]) -> tuple[I64, I64, I64]:
    """First and last of each list, and the lists end to end."""
    ends = np.cumsum([0, *map(len, rows)])
    return ends[:-1].astype(np.int64), ends[1:].astype(np.int64), _numbers(x for row in rows for x in row)
