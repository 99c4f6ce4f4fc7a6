"""The rows of recipes: what each device computes and sends so that replicas of its weights come to agree.

A group of weights (``recipes``) has a block of its own, which runs once a step, after the backward pass: before the
update if gradients are synchronised, after it if weights are. Nothing of it overlaps with the backward pass: the vector
is complete only then. A position's steps stand in the order in which it takes them: it computes what it sends, and for
every exchange it issues what it sends, waits for what it receives, and merges that. Messages of positions that have
nothing to do with each other are communications of their own.

Workers that go by themselves (``async``, ``stale``) push to the server as soon as they are there. The server updates
when a push arrives, and what the worker pulls follows that; with a bound, it also follows the pushes of all others that
the lead allows it to wait for, in an earlier step (``lower.several``). The optimizer is the server's then: the worker
does not update these weights itself.

These rows are added to those of the plan, whose weights with a recipe are in no bucket. They are not for compiled
proposals: a search changes plans without recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import ZERO
from flexsearch.cost.communication import Pricing, Transfer
from flexsearch.cost.exchanges import independent, price, work_seconds
from flexsearch.cost.tally import turn_of
from flexsearch.cost.ticks import LAUNCH_PARTS, TICK
from flexsearch.direct import direct
from flexsearch.graph import volume
from flexsearch.lower.exchanges import connection_of
from flexsearch.lower.recipes import RecipeGroup
from flexsearch.lower.rows import COMPUTE, ISSUE, RECIPE, RESULT, UPDATE, WAIT, Rows, Schedule, Segments
from flexsearch.lower.taskgraph import Communication, RecipeBlock
from flexsearch.sync import Exchange
from flexsearch.sync.kinds import Work, work
from flexsearch.sync.work import after, alone, before, between
from flexsearch.topology.parts import FORMS

Lowered = Any
"""``lowering.Lowered``, which imports this module."""
_turn_of, _connection_of = getattr(turn_of, "py_func", turn_of), direct(connection_of)


@dataclass
class _Draft:
    """A block that is being written. ``steps``: by device, (kind, number, ticks, host ticks). ``missing``: by
    communication, how many issue it and it follows; ``links`` and ``drags``: (resource, ticks)."""

    group: int
    exchanges: tuple[Exchange, ...] = ()
    steps: dict[int, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    work: list[str] = field(default_factory=list)
    communications: list[Communication] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    links: list[list[tuple[int, int]]] = field(default_factory=list)
    drags: list[list[tuple[int, int]]] = field(default_factory=list)
    ticks: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    connections: list[int] = field(default_factory=list)
    followers: list[list[int]] = field(default_factory=list)


def with_recipes(lowered: Lowered, rows: Rows, step: int) -> Rows:
    """``rows`` of a plan with those that its recipes have in a step (0: the first). Raises StrategyError or RecipeError
    for groups that cannot follow theirs."""
    writer, early, late = _Writer(lowered), list[_Draft](), list[_Draft]()
    rows = _updated_elsewhere(lowered, rows, [g for g in lowered.recipe_groups if g.recipe.asynchronous is not None])
    for number, group in enumerate(lowered.recipe_groups):
        recipe, exact = group.recipe.planned, step < group.recipe.warm_up
        if recipe.asynchronous:
            draft = writer.alone(number, group)
        else:
            exchanges = recipe.exchanges(len(group.devices), group.hosts, group.sizes, step)
            assert exchanges is not None
            draft = writer.together(number, group, exchanges, exact)
        (early if exact or not recipe.updates else late).append(draft)
    return _added(rows, early, late)


def with_exchanges(
    lowered: Lowered, rows: Rows, group: RecipeGroup, exchanges: Sequence[Exchange], exact: bool
) -> Rows:  # fmt: skip
    """``rows`` of a plan with those of one group, which exchanges this in a step. ``exact``: a step of the warm-up."""
    draft = _Writer(lowered).together(0, group, exchanges, exact)
    early = exact or not group.recipe.updates
    return _added(rows, [draft], []) if early else _added(rows, [], [draft])


def with_pushes(lowered: Lowered, rows: Rows, group: RecipeGroup) -> Rows:
    """``rows`` of a plan with those of one group, of all weights, whose workers go by themselves."""
    rows = _updated_elsewhere(lowered, rows, [replace(group, weights=tuple(range(len(lowered.weights))))])
    return _added(rows, [_Writer(lowered).alone(0, group)], [])


class PushCost(NamedTuple):
    """Columns of a push (see ``Segments``): its ticks, its turn, and the ticks of its links and drags."""

    ticks: int
    turn: int
    links: tuple[int, ...]
    drags: tuple[int, ...]


def push_cost(lowered: Lowered, group: RecipeGroup, worker: int, shard: int, nbytes: int) -> PushCost:
    """Of a push of so many bytes, where they depend on the numbers that are sent."""
    draft = _Draft(0)
    _Writer(lowered).push(draft, group, worker, shard, nbytes)
    links, drags = (tuple(t for _, t in rows[0]) for rows in (draft.links, draft.drags))
    return PushCost(draft.ticks[0], draft.turns[0], links, drags)


class _Writer:
    """Writes the blocks of one plan."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered, lowering = lowered, lowered.lowering
        self.pricing = Pricing(lowering.network, lowering.costs.profile)
        self.decisive = lowering.network.decisive
        blocks = lowered.rows.blocks
        self.launch, self.issue = (LAUNCH_PARTS * blocks.launch).tolist(), blocks.issue.tolist()

    def together(self, number: int, group: RecipeGroup, exchanges: Sequence[Exchange], exact: bool) -> _Draft:
        """The block of a recipe in which replicas go together, for what they exchange in a step. ``exact``: it is one
        of the warm-up."""
        recipe, sizes, members = group.recipe.planned, group.sizes, len(group.devices)
        draft = _Draft(number, tuple(exchanges))
        if not exchanges:
            self._compute(draft, group, "scale", dict.fromkeys(range(members), alone(recipe, sizes)))
            return draft
        own = before(recipe, sizes, exchanges[0], exact)
        self._compute(draft, group, "encode", dict.fromkeys(range(members), own))
        for k, exchange in enumerate(exchanges):
            received, place = self._exchange(draft, group, exchange), (k + 1) / len(exchanges)
            if place < 1:
                merged = {p: between(recipe, sizes, members, n, place) for p, n in received.items()}
                self._compute(draft, group, "merge", merged)
            else:
                decoded = {p: after(recipe, sizes, members, received.get(p, 0), exact) for p in range(members)}
                self._compute(draft, group, "decode", decoded)
        return draft

    def alone(self, number: int, group: RecipeGroup) -> _Draft:
        """The block of a recipe in which workers go by themselves. Its communications are, worker by worker, what it
        pushes to each server and what it pulls from each; the server's update is part of the push."""
        recipe, sizes, members = group.recipe.planned, group.sizes, len(group.devices)
        server, draft = recipe.server, _Draft(number)
        assert server is not None
        self._compute(draft, group, "encode", dict.fromkeys(range(members), before(recipe, sizes)))
        shards = list(zip(server.owners(members), server.bounds(sizes.n), strict=True))
        size = len(group.positions)
        for worker in range(members):
            device, pushes, pulls = group.devices[worker], list[int](), list[int]()
            for shard, (_, (a, b)) in enumerate(shards):
                nbytes = recipe.compression.nbytes(sizes.part(b - a)) or 0
                pushes.append(self.push(draft, group, worker, shard, nbytes))
                self._step(draft, device, ISSUE, pushes[-1], 0, self.issue[device])
            for owner, (a, b) in shards:
                back = Exchange("exchange", size, ((b - a) * sizes.itemsize,), ((owner, worker),))
                pull = self._communicate(draft, group, back, [], [device])
                draft.missing[pull] += len(pushes)
                pulls.append(pull)
                self._step(draft, device, WAIT, pull, 0, 0)
            for push in pushes:
                draft.followers[push] += pulls
        self._compute(draft, group, "load", dict.fromkeys(range(members), work(copy=sizes.nbytes)))
        return draft

    def push(self, draft: _Draft, group: RecipeGroup, worker: int, shard: int, nbytes: int) -> int:
        """What a worker sends to a server, with the update that follows; returns its number."""
        members, server = len(group.devices), group.recipe.server
        assert server is not None
        owner, (a, b) = server.owners(members)[shard], server.bounds(group.sizes.n)[shard]
        there = Exchange("exchange", len(group.positions), (nbytes,), ((worker, owner),))
        push = self._communicate(draft, group, there, [group.devices[worker]], [])
        weights = self.lowered.graph.tensor[group.names[0]] if group.names else group.sizes
        self._update(draft, push, group.positions[owner], (b - a) * weights.itemsize, owner < members)
        return push

    def _compute(self, draft: _Draft, group: RecipeGroup, what: str, work_of: Mapping[int, Work]) -> None:
        """Positions do some work."""
        for position, some in work_of.items():
            if some.total():
                device, costs = group.positions[position], self.lowered.lowering.costs
                _, profile = costs.basis(int(costs.kinds[device]))
                rates = {} if profile is None else profile.recipe_work
                processor, vector = self.lowered.topology.devices[device], group.sizes.nbytes
                seconds = work_seconds(some, processor, rates, self._dtype(group), vector)
                ticks = max(1, round(seconds / TICK))
                self._step(draft, device, COMPUTE, len(draft.work), ticks, self.launch[device])
                draft.work.append(what)

    def _exchange(self, draft: _Draft, group: RecipeGroup, exchange: Exchange) -> dict[int, int]:
        """An exchange; returns the bytes that each position receives."""
        received: dict[int, int] = {}
        for part in independent(exchange):
            messages = list(part.messages())
            for _, b, size in messages:
                received[b] = received.get(b, 0) + size
            senders, receivers = ([group.positions[p] for p in sorted({m[k] for m in messages})] for k in (0, 1))
            number = self._communicate(draft, group, part, senders, receivers)
            for device in senders:
                self._step(draft, device, ISSUE, number, 0, self.issue[device])
            for device in receivers:
                self._step(draft, device, WAIT, number, 0, 0)
        return dict(sorted(received.items()))

    def _communicate(
        self, draft: _Draft, group: RecipeGroup, exchange: Exchange, senders: Sequence[int], receivers: Sequence[int]
    ) -> int:
        """One more communication; returns its number. What a server sends to itself takes no time."""
        messages = [(a, b, n) for a, b, n in exchange.messages() if group.positions[a] != group.positions[b]]
        transfer = price(self.pricing, group.positions, exchange) if messages else Transfer(0.0, (), (), ())
        taking = sorted({group.positions[p] for a, b, _ in exchange.messages() for p in (a, b)})
        one_call = self.lowered.topology.communication.in_one_call(exchange.form)
        what = Communication(
            "synchronise", exchange.form, tuple(taking), tuple(senders), tuple(receivers), (), transfer,
            exchange.sent if messages else 0, one_call, group.recipe.words,
        )  # fmt: skip
        draft.communications.append(what)
        links = [(r, round(s / TICK)) for r, s in transfer.links if self.decisive[r]]
        draft.missing.append(len(senders))
        draft.links.append(links)
        draft.drags.append([(r, round(s / TICK)) for r, s in transfer.drag])
        draft.ticks.append(round(transfer.duration_s / TICK))
        draft.turns.append(_turn(self, what, [r for r, _ in links]))
        ends = ({group.positions[m[k]] for m in exchange.messages()} for k in (0, 1))
        draft.connections.append(_connection(self, exchange.form, *ends))
        draft.followers.append([])
        return len(draft.missing) - 1

    def _update(self, draft: _Draft, push: int, device: int, nbytes: int, works: bool) -> None:
        """A push with the update of the server's part behind it: it keeps a dedicated server's processor busy, and
        takes time from the computing of one that ``works``, too."""
        options, costs = self.lowered.options, self.lowered.lowering.costs
        seconds = costs.update(nbytes, 1, device, options.optimizer, options.precision)
        busy = int(self.lowered.topology.processor_of[device]), round(seconds / TICK)
        draft.ticks[push] += busy[1]
        (draft.drags if works else draft.links)[push].append(busy)

    def _step(self, draft: _Draft, device: int, kind: int, number: int, ticks: int, host: int) -> None:
        draft.steps.setdefault(device, []).append((kind, number, ticks, host))

    def _dtype(self, group: RecipeGroup) -> str:
        return str(self.lowered.graph.gradient[group.names[0]].dtype) if group.names else "float32"


# ---- changing rows


def _updated_elsewhere(lowered: Lowered, rows: Rows, groups: Sequence[RecipeGroup]) -> Rows:
    """Rows in which devices do not update the weights of ``groups``, as servers do."""
    if not groups:
        return rows
    elsewhere = {(device, w) for group in groups for device in group.devices for w in group.weights}
    left: dict[int, list[int]] = {device: [] for device, _ in elsewhere}
    for w, weight in enumerate(lowered.weights):
        if weight.plan.sync is not None:
            itemsize = lowered.graph.tensor[weight.tensor].itemsize
            for entry in weight.plan.storage:
                if entry.device in left and (entry.device, w) not in elsewhere:
                    left[entry.device].append(volume(entry.box) * itemsize)
    block, segments, options = len(rows.schedule.kind) - 1, rows.segments, lowered.options
    table, costs = int(segments.device_steps[rows.segment[block]]), lowered.lowering.costs
    ticks, host = segments.step_ticks.copy(), segments.step_host.copy()
    for device, sizes in left.items():
        seconds = costs.update(sum(sizes), len(sizes), device, options.optimizer, options.precision)
        launches = len(sizes) * int(rows.blocks.launches[block]) * int(rows.blocks.launch[device])
        for step in range(int(segments.step_first[table + device]), int(segments.step_first[table + device + 1])):
            if segments.step_kind[step] == COMPUTE:
                ticks[step], host[step] = round(seconds / TICK), launches
    return replace(rows, segments=segments._replace(step_ticks=ticks, step_host=host))


def _added(rows: Rows, early: Sequence[_Draft], late: Sequence[_Draft]) -> Rows:
    """Rows with blocks before and after the update."""
    drafts, first = [*early, *late], len(rows.schedule.kind)
    segments = rows.segments
    numbers = []
    for k, draft in enumerate(drafts):
        numbers.append(len(segments.device_steps))
        segments = _appended(rows, segments, draft, first + k)
    blocks, count = rows.blocks, len(drafts)
    blocks = blocks._replace(
        kind=_longer(blocks.kind, [RECIPE] * count), argument=_longer(blocks.argument, [d.group for d in drafts]),
        launches=_longer(blocks.launches, [LAUNCH_PARTS] * count),
        stage=_longer(blocks.stage, [int(blocks.stage[-1])] * count),
        sent_first=_longer(blocks.sent_first, [0] * count), sent_last=_longer(blocks.sent_last, [0] * count),
    )  # fmt: skip
    told = {
        first + k: RecipeBlock(d.group, d.exchanges, tuple(d.work), tuple(d.communications))
        for k, d in enumerate(drafts)
    }
    return replace(
        rows, schedule=_scheduled(rows.schedule, len(early), len(late)), blocks=blocks, segments=segments,
        segment=_longer(rows.segment, numbers), recipes=told,
    )  # fmt: skip


def _appended(rows: Rows, segments: Segments, draft: _Draft, block: int) -> Segments:
    """Segments with one more, that of a block."""
    devices = len(rows.schedule.group)
    steps = [step for d in range(devices) for step in draft.steps.get(d, ())]
    counts = [len(draft.steps.get(d, ())) for d in range(devices)]
    at, before = len(segments.step_kind), len(segments.missing)
    total = len(draft.communications)

    def lists(values: Sequence[Sequence[Any]], start: int) -> tuple[list[int], list[int]]:
        ends = np.cumsum([start, *map(len, values)]).tolist()
        return ends[:-1], ends[1:]

    links, drags = draft.links, draft.drags
    receivers = [c.receivers for c in draft.communications]
    link_first, link_last = lists(links, len(segments.link))
    drag_first, drag_last = lists(drags, len(segments.drag))
    receiver_first, receiver_last = lists(receivers, len(segments.receiver))
    follower_first, follower_last = lists(draft.followers, len(segments.follower_row))
    followed = [f for row in draft.followers for f in row]
    more = {
        "device_steps": [len(segments.step_first)], "communication_first": [before],
        "communication_last": [before + total], "step_first": np.cumsum([at, *counts]).tolist(),
        "step_kind": [s[0] for s in steps], "step_block": [block] * len(steps), "step_row": [s[1] for s in steps],
        "step_ticks": [s[2] for s in steps], "step_host": [s[3] for s in steps], "communication_ticks": draft.ticks,
        "missing": draft.missing, "turn": draft.turns, "connection": draft.connections,
        "link_first": link_first, "link_last": link_last, "link": [r for row in links for r, _ in row],
        "link_ticks": [t for row in links for _, t in row], "drag_first": drag_first, "drag_last": drag_last,
        "drag": [r for row in drags for r, _ in row], "drag_ticks": [t for row in drags for _, t in row],
        "receiver_first": receiver_first, "receiver_last": receiver_last,
        "receiver": [d for row in receivers for d in row], "follower_first": follower_first,
        "follower_last": follower_last, "follower_block": [block] * len(followed), "follower_row": followed,
    }  # fmt: skip
    return Segments(**{name: _longer(getattr(segments, name), values) for name, values in more.items()})


def _turn(writer: _Writer, what: Communication, links: Sequence[int]) -> int:
    """Ticks after which a communication lets others on its links go first."""
    longest = max((s for _, s in what.transfer.links), default=0.0)
    rates, form, members = writer.pricing.rates, FORMS.index(what.form), len(what.senders)
    return int(_turn_of(rates, rates.bandwidth, form, members, 1, np.array(links, np.uint32), 0, len(links), longest))


def _connection(writer: _Writer, form: str, send: set[int], receive: set[int]) -> int:
    """See ``Segments``."""
    rates, number, one, other = writer.pricing.rates, *map(np.uint64, (FORMS.index(form), len(send), len(receive)))
    there, here = (np.array(sorted(devices), np.uint32) for devices in (send, receive))
    return int(_connection_of(rates, number, there, ZERO, one, here, ZERO, other))


def _longer(column: Any, values: Sequence[int]) -> Any:
    """A column with more rows."""
    return np.concatenate([column, np.array(values, column.dtype)])


def _scheduled(schedule: Schedule, early: int, late: int) -> Schedule:
    """The schedule with blocks that all devices run before the loss is sent and after the update, the last two blocks.
    Devices without a stage run nothing else."""
    blocks, update, result = len(schedule.kind), len(schedule.kind) - 1, len(schedule.kind) - 2
    assert (schedule.kind[update], schedule.kind[result]) == (UPDATE, RESULT)
    actions: list[tuple[int, int, int]] = []
    first, last = [], []
    more = [(blocks, blocks + early), (result, update + 1), (blocks + early, blocks + early + late)]
    for begin, end in zip(schedule.action_first.tolist(), schedule.action_last.tolist(), strict=True):
        first.append(len(actions))
        columns = schedule.block_first, schedule.block_last, schedule.microbatch
        for low, high, microbatch in zip(*(column[begin:end].tolist() for column in columns), strict=True):
            actions.append((low, min(high, result), microbatch))
        final = int(schedule.final[0])
        actions += [(low, high, final) for low, high in more if low < high and (begin < end or low != result)]
        last.append(len(actions))
    actions_of = [np.array(column, np.uint32) for column in zip(*actions, strict=True)]
    count = early + late
    return schedule._replace(
        kind=_longer(schedule.kind, [RECIPE] * count), argument=_longer(schedule.argument, range(count)),
        once=_longer(schedule.once, [1] * count), last=_longer(schedule.last, [1] * count),
        action_first=np.array(first, np.uint32), action_last=np.array(last, np.uint32),
        block_first=actions_of[0], block_last=actions_of[1], microbatch=actions_of[2],
    )  # fmt: skip
