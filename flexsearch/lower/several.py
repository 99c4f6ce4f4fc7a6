"""The rows of several steps, one after the other on each device: of devices that need not wait for each other between
steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flexsearch.lower.rows import COMPUTE, FORWARD, READ, RESULT, WAIT, Rows, Schedule, Segments

if TYPE_CHECKING:
    from flexsearch.lower.lowering import Lowered
    from flexsearch.lower.recipes import RecipeGroup

_INTO = {
    "device_steps": "step_first", "communication_first": "missing", "communication_last": "missing",
    "step_first": "step_kind", "link_first": "link", "link_last": "link", "drag_first": "drag", "drag_last": "drag",
    "receiver_first": "receiver", "receiver_last": "receiver", "follower_first": "follower_row",
    "follower_last": "follower_row",
}  # fmt: skip
"""Columns of ``Segments`` that count rows of another one."""


def several(lowered: Lowered, steps: int) -> Rows:
    """The rows of a plan, ``steps`` times: see ``repeated``. Workers that go by themselves take their own loss, and how
    many targets count, for those of all."""
    return repeated(_apart(lowered) if lowered.asynchronous else lowered.rows, lowered.recipe_groups, steps)


def repeated(rows: Rows, groups: Sequence[RecipeGroup], steps: int) -> Rows:
    """Rows of a step, ``steps`` times. Block b of step k has the number ``k * blocks + b``. Workers with a bound pull
    in a step only when the pushes have arrived that their lead allows them to wait for."""
    blocks = len(rows.schedule.kind)
    segments = _tiled(rows.segments, blocks, steps)
    segment = np.concatenate([rows.segment + k * len(rows.segments.device_steps) for k in range(steps)])
    segment = segment.astype(np.uint32)
    more: dict[int, list[tuple[int, int]]] = {}
    missing = segments.missing.copy()
    for block, told in rows.recipes.items():
        group = groups[told.group]
        waiting = group.recipe.asynchronous
        if waiting is None or waiting.lead is None:
            continue
        for step in range(waiting.lead, steps):
            own, earlier = step * blocks + block, (step - waiting.lead) * blocks + block
            pulled, pushed = (int(segments.communication_first[segment[b]]) for b in (own, earlier))
            _wait_for_others(group, own, pulled, pushed, more, missing)
    segments = _with_followers(segments._replace(missing=missing), more)
    table = rows.blocks
    columns = ("kind", "argument", "launches", "stage", "sent_first", "sent_last")
    table = table._replace(**{name: np.tile(getattr(table, name), steps) for name in columns})
    return replace(
        rows, schedule=_repeated(rows.schedule, steps), blocks=table, segments=segments, segment=segment, together={},
        recipes={k * blocks + b: told for k in range(steps) for b, told in rows.recipes.items()},
    )  # fmt: skip


def computing(lowered: Lowered) -> Rows:
    """The rows of a plan without its recipes, as replicas run them that share nothing in a step: what is computed, and
    read from storage. A step is over when what it reads is there, too, be it for a later one."""
    rows, segments = lowered.plain_rows, lowered.plain_rows.segments
    reads = rows.schedule.kind[segments.step_block] == READ
    waited = bool((reads & (segments.step_kind == WAIT)).any())
    rows = _with_steps(rows, (segments.step_kind == COMPUTE) | reads)
    return rows if waited or not reads.any() else _with_reading(rows)


def _with_reading(rows: Rows) -> Rows:
    """Rows in whose last block, the update, devices wait for what they read."""
    segments, block = rows.segments, len(rows.schedule.kind) - 1
    (read,) = np.flatnonzero(rows.schedule.kind == READ).tolist()
    last, first = int(rows.segment[block]), int(segments.communication_first[rows.segment[read]])
    table = int(segments.device_steps[last])
    columns = ("step_kind", "step_block", "step_row", "step_ticks", "step_host")
    steps: list[tuple[int, ...]] = []
    ends = [len(segments.step_kind)]
    for device in range(len(rows.schedule.group)):
        own = slice(int(segments.step_first[table + device]), int(segments.step_first[table + device + 1]))
        steps += zip(*(getattr(segments, name)[own].tolist() for name in columns), strict=True)
        for c in range(first, int(segments.communication_last[rows.segment[read]])):
            if device in segments.receiver[int(segments.receiver_first[c]) : int(segments.receiver_last[c])]:
                steps.append((WAIT, read, c - first, 0, 0))
        ends.append(len(segments.step_kind) + len(steps))
    more = dict(zip(columns, zip(*steps, strict=True), strict=True)) | {
        "device_steps": [len(segments.step_first)], "step_first": ends,
        "communication_first": [segments.communication_first[last]],
        "communication_last": [segments.communication_last[last]],
    }  # fmt: skip
    longer = {
        name: np.concatenate([column, np.array(values, column.dtype)])
        for name, values in more.items()
        for column in (getattr(segments, name),)
    }
    segment = rows.segment.copy()
    segment[block] = len(segments.device_steps)
    return replace(rows, segments=segments._replace(**longer), segment=segment)


def _apart(lowered: Lowered) -> Rows:
    """The rows without steps of communications that bring single numbers: the loss, and what it is divided by."""
    rows, segments = lowered.rows, lowered.rows.segments
    kept = np.ones(len(segments.step_kind), bool)
    single = {
        (block, number)
        for block, row in enumerate(lowered.communications.members)
        for number, members in enumerate(row)
        if rows.schedule.kind[block] in (FORWARD, RESULT)
        and all(not lowered.graph.tensor[lowered.edges[member.key].tensor].shape for member in members)
    }
    for step in np.flatnonzero(segments.step_kind != COMPUTE).tolist():
        kept[step] = (int(segments.step_block[step]), int(segments.step_row[step])) not in single
    return _with_steps(rows, kept)


def _with_steps(rows: Rows, kept: npt.NDArray[np.bool_]) -> Rows:
    """The rows with some of their steps alone."""
    segments, ends = rows.segments, np.concatenate([[0], np.cumsum(kept)])
    columns = ("step_kind", "step_block", "step_row", "step_ticks", "step_host")
    less = {name: getattr(segments, name)[kept] for name in columns}
    return replace(
        rows, segments=segments._replace(step_first=ends[segments.step_first].astype(np.uint32), **less)
    )  # fmt: skip


def _tiled(segments: Segments, blocks: int, steps: int) -> Segments:
    """Segments of each step, in which blocks have their numbers."""
    tiled = {}
    for name, column in segments._asdict().items():
        each = blocks if name in ("step_block", "follower_block") else len(getattr(segments, _INTO.get(name, name)))
        shift = each if name in _INTO or name in ("step_block", "follower_block") else 0
        tiled[name] = np.concatenate([(column + k * shift).astype(column.dtype) for k in range(steps)])
    return Segments(**tiled)


def _repeated(schedule: Schedule, steps: int) -> Schedule:
    """Every device runs its actions so many times."""
    blocks, first, last = len(schedule.kind), [0], list[int]()
    actions: list[tuple[int, int, int]] = []
    for begin, end in zip(schedule.action_first, schedule.action_last, strict=True):
        columns = schedule.block_first, schedule.block_last, schedule.microbatch
        own = list(zip(*(column[begin:end].tolist() for column in columns), strict=True))
        actions += [(low + k * blocks, high + k * blocks, m) for k in range(steps) for low, high, m in own]
        first.append(len(actions))
        last.append(len(actions))
    columns_of = [np.array([action[k] for action in actions], np.uint32) for k in range(3)]
    every = {name: np.tile(getattr(schedule, name), steps) for name in ("kind", "argument", "once", "last")}
    return schedule._replace(
        **every, action_first=np.array(first[:-1], np.uint32), action_last=np.array(last, np.uint32),
        block_first=columns_of[0], block_last=columns_of[1], microbatch=columns_of[2],
    )  # fmt: skip


def _wait_for_others(
    group: RecipeGroup, own: int, pulled: int, pushed: int, more: dict[int, list[tuple[int, int]]], missing: Any
) -> None:  # fmt: skip
    """What a worker pulls in block ``own``, whose communications begin with row ``pulled``, follows what all others
    push in that whose begin with ``pushed``. By worker, a block has the pushes to all shards, then the pulls."""
    server, members = group.recipe.server, len(group.devices)
    assert server is not None
    for worker in range(members):
        pulls = range((2 * worker + 1) * server.shards, (2 * worker + 2) * server.shards)
        for other in (m for m in range(members) if m != worker):
            for push in range(2 * other * server.shards, (2 * other + 1) * server.shards):
                more.setdefault(pushed + push, []).extend((own, pull) for pull in pulls)
        for pull in pulls:
            missing[pulled + pull] += (members - 1) * server.shards


def _with_followers(segments: Segments, more: dict[int, list[tuple[int, int]]]) -> Segments:
    """Segments in which some communications (by their rows) have more followers."""
    if not more:
        return segments
    rows: list[Sequence[tuple[int, int]]] = []
    pairs = list(zip(segments.follower_block.tolist(), segments.follower_row.tolist(), strict=True))
    for c, (first, last) in enumerate(zip(segments.follower_first, segments.follower_last, strict=True)):
        rows.append([*pairs[first:last], *more.get(c, ())])
    ends = np.cumsum([0, *map(len, rows)]).astype(np.uint32)
    flat = np.array([pair for row in rows for pair in row], np.uint32).reshape(-1, 2)
    return segments._replace(
        follower_first=ends[:-1].copy(), follower_last=ends[1:].copy(),
        follower_block=flat[:, 0].copy(), follower_row=flat[:, 1].copy(),
    )  # fmt: skip
