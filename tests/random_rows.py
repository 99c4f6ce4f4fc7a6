"""Random plans as rows: any segments and schedules that the engine may be given, without a graph behind them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flexsearch.lower.rows import COMPUTE, FORWARD, ISSUE, NEVER, WAIT, Machine, Schedule, Segments

WIDE = ("step_ticks", "step_host", "communication_ticks", "turn", "link_ticks", "drag_ticks")


Step = tuple[int, ...]


@dataclass
class Communication:
    senders: list[int]
    receivers: list[int]
    ticks: int
    links: list[tuple[int, int]]
    drags: list[tuple[int, int]] = field(default_factory=list)
    followers: list[tuple[int, int]] = field(default_factory=list)
    missing: int = 0
    turn: int = NEVER
    connection: int = 0


@dataclass
class Block:
    """Steps of each device (kind, block, row, ticks, and those of launching it if there are any), communications."""

    steps: list[list[Step]]
    communications: list[Communication]


class Arena:
    """Segments, written one by one."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.rows: dict[str, list[int]] = {name: [] for name in Segments._fields}

    def add(self, block: Block) -> int:
        rows = self.rows
        number = len(rows["device_steps"])
        rows["device_steps"].append(len(rows["step_first"]))
        rows["communication_first"].append(len(rows["missing"]))
        for steps in block.steps:
            rows["step_first"].append(len(rows["step_kind"]))
            for kind, of, row, ticks, *host in steps:
                rows["step_kind"].append(kind)
                rows["step_block"].append(of)
                rows["step_row"].append(row)
                rows["step_ticks"].append(ticks)
                rows["step_host"].append(sum(host))
        rows["step_first"].append(len(rows["step_kind"]))
        for c in block.communications:
            rows["communication_ticks"].append(c.ticks)
            rows["missing"].append(len(c.senders) + c.missing)
            rows["turn"].append(c.turn)
            rows["connection"].append(c.connection)
            self._list("link", c.links, ("link", "link_ticks"))
            self._list("drag", c.drags, ("drag", "drag_ticks"))
            self._list("receiver", [(d,) for d in c.receivers], ("receiver",))
            self._list("follower", c.followers, ("follower_block", "follower_row"))
        rows["communication_last"].append(len(rows["missing"]))
        return number

    def _list(self, name: str, items: list[Any], columns: tuple[str, ...]) -> None:
        self.rows[f"{name}_first"].append(len(self.rows[columns[0]]))
        for item in items:
            for column, value in zip(columns, item, strict=True):
                self.rows[column].append(value)
        self.rows[f"{name}_last"].append(len(self.rows[columns[0]]))

    def segments(self) -> Segments:
        def column(name: str) -> Any:
            kind = {"step_kind": np.uint8, "connection": np.uint64}.get(name, np.int64 if name in WIDE else np.uint32)
            return np.array(self.rows[name] or [0], dtype=kind)

        return Segments(**{name: column(name) for name in Segments._fields})


@dataclass
class Case:
    """A random world: a schedule, a machine, and any number of segments for each of its blocks. ``host``: ticks of the
    longest launches; 0: there are no hosts."""

    random: random.Random
    devices: int
    contended: bool
    kinds: list[str]
    stage: list[int]
    schedule: Schedule
    machine: Machine
    arena: Arena
    links: int
    scale: int
    host: int
    blocks: list[Block] = field(default_factory=list)
    segment: list[int] = field(default_factory=list)


def make_case(
    seed: int, microbatches: int | None = None, blocks: int | None = None, scale: int | None = None,
    hosted: bool | None = None,
) -> Case:  # fmt: skip
    """``blocks``: operators of each stage. ``scale``: ticks of the longest rows."""
    r = random.Random(seed)
    devices, stages = r.randint(1, 8), r.randint(1, 3)
    devices = max(devices, stages)
    microbatches = microbatches or r.choice((1, 1, 2, 3, 5, 8, 12))
    contended = r.random() < 0.35
    per_stage = blocks or r.randint(1, 6)
    style = r.choice(("1f1b", "gpipe", "mixed"))
    if seed % 7 == 6:
        style = "breadth-first"
    kinds, stage, once, last = [], [], [], []

    def add(kind: str, of: int) -> None:
        kinds.append(kind)
        stage.append(of)
        once.append(kind in ("gather", "sync", "update"))
        last.append(kind == "sync")

    forward, backward = [], []
    for s in range(stages):
        begin = len(kinds)
        for _ in range(per_stage):
            if r.random() < 0.2:
                add("gather", s)
            add("forward", s)
        forward.append((begin, len(kinds)))
    for s in reversed(range(stages)):
        begin = len(kinds)
        for _ in range(per_stage):
            add("backward", s)
            if r.random() < 0.3:
                add("sync", s)
        backward.append((begin, len(kinds)))
    backward.reverse()
    add("update", -1)
    group = [d * stages // devices for d in range(devices)]
    actions: list[list[tuple[int, int, int]]] = []
    for s in range(stages):
        row = [(*forward[s], m) for m in range(microbatches)]
        back = [(*backward[s], m) for m in range(microbatches)]
        if style == "gpipe":
            plan = row + back
        elif style == "breadth-first":
            plan = row + back[::-1]
        else:
            ahead = min(microbatches, stages - 1 - s)
            if style == "mixed":
                ahead = min(microbatches, (stages - 1 - s) * 2)
            plan = row[:ahead]
            for m in range(microbatches):
                plan += [*row[m + ahead : m + ahead + 1], back[m]]
        actions.append([*plan, (len(kinds) - 1, len(kinds), 0)])
    ends = np.cumsum([0, *map(len, actions)]).astype(np.uint32)
    flat = [action for row in actions for action in row]
    schedule = Schedule(
        kind=np.full(len(kinds), FORWARD, np.uint8), argument=np.arange(len(kinds), dtype=np.uint32),
        once=np.array(once, np.uint8), last=np.array(last, np.uint8), group=np.array(group, np.uint32),
        action_first=ends[:-1].copy(), action_last=ends[1:].copy(),
        block_first=np.array([a[0] for a in flat], np.uint32), block_last=np.array([a[1] for a in flat], np.uint32),
        microbatch=np.array([a[2] for a in flat], np.uint32), microbatches=np.array([microbatches], np.uint32),
        final=np.array([0 if style == "breadth-first" else microbatches - 1], np.uint32),
    )  # fmt: skip
    links = r.randint(1, 4)
    scale = scale or r.choice((1, 3, 50, 10**6))
    processors = [r.randrange(max(1, devices // 2)) if r.random() < 0.5 else d for d in range(devices)]
    shared = {p for p in processors if processors.count(p) > 1}
    turn = [max(1, scale // 3) if processors[d] in shared and r.random() < 0.7 else NEVER for d in range(devices)]
    chance = random.Random(seed ^ 0x5EED)  # of its own, so that worlds without hosts stay what they were
    host = 0
    if chance.random() < 0.4 if hosted is None else hosted:
        host = max(1, chance.choice((scale // 8, scale // 3, scale // 2, 2 * scale)))
    machine = Machine(
        processor=np.array([links + (p if contended else d) for d, p in enumerate(processors)], np.uint32),
        turn=np.array(turn, np.int64), contended=np.array([contended], np.uint8),
        hosted=np.array([host > 0], np.uint8),
        resources=np.array([links + devices], np.uint32),
        slowing=np.array([chance.choice((0, 300, 1000))], np.int64), slows=np.arange(devices + 1, dtype=np.uint32),
        slowed=np.array([chance.randrange(links) for _ in range(devices)], np.uint32),
    )  # fmt: skip
    case = Case(r, devices, contended, kinds, stage, schedule, machine, Arena(devices), links, scale, host)
    for b in range(len(kinds)):
        case.blocks.append(random_block(case, b))
        case.segment.append(case.arena.add(case.blocks[b]))
    return case


def unslowed(devices: int) -> tuple[Any, Any, Any]:
    """Columns of a machine whose links are as fast where devices compute."""
    return np.zeros(1, np.int64), np.zeros(devices + 1, np.uint32), np.zeros(0, np.uint32)


def members(case: Case, b: int) -> list[int]:
    group = case.schedule.group
    return [d for d in range(case.devices) if case.stage[b] in (-1, group[d])]


def random_block(case: Case, b: int) -> Block:
    """Some steps for the devices of a block: waiting for what earlier blocks send them, computing, sending to devices
    of this stage or of a neighbour."""
    r, own = case.random, members(case, b)
    steps: list[list[Step]] = [[] for _ in range(case.devices)]
    for d in own:
        for of, row in _arrivals(case, b, d):
            if r.random() < 0.7:
                steps[d].append((WAIT, of, row, 0))
    computations = 0
    for d in own:
        for _ in range(r.choice((0, 1, 1, 2))):
            steps[d].append((COMPUTE, b, computations, r.choice((0, 1, 1, r.randint(0, case.scale)))))
            computations += 1
    communications: list[Communication] = []
    for row in range(r.choice((0, 1, 1, 2, 4)) if case.kinds[b] != "update" else 0):
        c = random_communication(case, b)
        before = [k for k in range(row) if r.random() < 0.25]
        for k in before:
            communications[k].followers.append((b, row))
        c.missing = len(before)
        if not before or r.random() < 0.5:
            c.senders = r.sample(own, r.randint(1, len(own)))
        for d in c.senders:
            steps[d].append((ISSUE, b, row, 0))
        communications.append(c)
    for d in own:
        if r.random() < 0.3:
            steps[d].append((COMPUTE, b, computations, r.randint(0, case.scale)))
            computations += 1
        for row, c in enumerate(communications):
            if d in c.receivers and r.random() < 0.15:
                steps[d].append((WAIT, b, row, 0))
    return Block([[_launched(case, step) for step in row] for row in steps], communications)


def _launched(case: Case, step: Step) -> Step:
    """A step with a time that launching it takes, if there are hosts."""
    if case.host == 0 or step[0] == WAIT:
        return step
    return *step[:4], case.random.choice((0, 1, case.host, case.random.randint(0, case.host)))


def _arrivals(case: Case, b: int, d: int) -> list[tuple[int, int]]:
    """Communications of earlier blocks that device ``d`` may wait for in block ``b``."""
    last = {"sync", "update"}
    return [
        (of, row)
        for of in range(b)
        for row, c in enumerate(case.blocks[of].communications)
        if d in c.receivers and (case.kinds[of] != "sync" or case.kinds[b] in last) and case.kinds[b] != "gather"
        and (case.kinds[b] != "update" or case.kinds[of] in ("sync", "gather"))
    ]  # fmt: skip


def random_communication(case: Case, b: int) -> Communication:
    r = case.random
    stages = {case.stage[b]}
    if case.kinds[b] == "forward":
        stages.add(case.stage[b] + 1)
    if case.kinds[b] == "backward":
        stages.add(case.stage[b] - 1)
    to = [d for d in range(case.devices) if int(case.schedule.group[d]) in stages]
    ticks = r.choice((0, 1, 2, r.randint(0, case.scale)))
    links = [
        (link, r.choice((ticks, ticks, ticks // 2, ticks + 1)))
        for link in r.sample(range(case.links), r.randint(0, min(2, case.links)))
    ]
    drags = []
    if case.contended and r.random() < 0.5:
        drags = [(case.links + r.randrange(case.devices), r.randint(0, max(1, case.scale // 4)))]
    turn = max(1, case.scale // r.choice((5, 20))) if r.random() < 0.5 else NEVER
    receivers, connection = r.sample(to, r.randint(1, len(to))), r.randrange(4)
    return Communication([], receivers, ticks, links, drags, turn=turn, connection=connection)


# ---- proposals


def random_change(case: Case) -> dict[int, Block]:
    """Other blocks for some; those that waited for what is no longer sent change, too."""
    r = case.random
    changed: dict[int, Block] = {}
    for b in r.sample(range(len(case.blocks)), min(len(case.blocks), r.choice((1, 1, 2)))):
        changed[b] = random_block(case, b) if r.random() < 0.5 else _retimed(case, case.blocks[b])
    blocks = [changed.get(b, block) for b, block in enumerate(case.blocks)]
    for b, block in enumerate(blocks):
        steps = [[s for s in row if s[0] != WAIT or _is_sent(blocks, s, d)] for d, row in enumerate(block.steps)]
        if steps != block.steps:
            changed[b] = Block(steps, block.communications)
    return changed


def _is_sent(blocks: list[Block], step: Step, d: int) -> bool:
    rows = blocks[step[1]].communications
    return step[2] < len(rows) and d in rows[step[2]].receivers


def _retimed(case: Case, block: Block) -> Block:
    """The same with some other durations; where there are hosts, at times only theirs are others."""
    r = case.random
    if case.host and r.random() < 0.5:
        steps = [[_launched(case, step) if r.random() < 0.4 else step for step in row] for row in block.steps]
        return Block(steps, block.communications)

    def retimed(kind: int, b: int, row: int, ticks: int, *host: int) -> Step:
        own = kind, b, row, r.randint(0, case.scale) if kind == COMPUTE and r.random() < 0.4 else ticks
        return _launched(case, own) if host and r.random() < 0.4 else (*own, *host)

    steps = [[retimed(*step) for step in row] for row in block.steps]
    rows = []
    for c in block.communications:
        ticks = r.randint(0, case.scale) if r.random() < 0.4 else c.ticks
        rows.append(replace(c, ticks=ticks))
    return Block(steps, rows)
