"""The tree of partial plans, compiled: depth first, the least bound first, until a whole plan has to be looked at."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import F64, I64, lean
from flexsearch.packed import packed
from flexsearch.proof.longest import children
from flexsearch.proof.tables import Tables, Work

DONE, PLAN, PAUSE = 0, 1, 2


@packed
class Tree(NamedTuple):
    """Where a search is. ``order``: operators as they get their configs; ``chosen``: config by operator, -1: none yet.
    By depth: ``opened`` (whether the children have been made), ``child`` and ``bound`` (configs and what they prove,
    least first), ``width`` (how many), ``position`` (the next one), ``used`` (mask of devices before). ``listed``:
    devices of each config in its order, -1 after the last. ``group``: the first device that each can be exchanged with.
    ``scalars``: depth, nodes, pruned."""

    order: I64
    chosen: I64
    opened: I64
    child: I64
    bound: F64
    width: I64
    position: I64
    used: I64
    listed: I64
    group: I64
    scalars: I64


@lean
def ascending(listed: I64, group: I64, used: Any) -> Any:
    """Whether new devices of a group come in ascending order after a partial plan on the devices ``used`` (a mask)."""
    for k in range(listed.shape[0]):
        d = listed[k]
        if d < 0:
            break
        if used >> d & 1 == 0:
            for other in range(d):
                if used >> other & 1 == 0 and group[other] == group[d]:
                    return False
            used |= 1 << d
    return True


@lean
def _open(t: Tables, w: Work, tree: Tree, depth: Any, rounding: float) -> None:
    """Make the children of the partial plan at hand, whose bounds are known."""
    operator = tree.order[depth]
    before = tree.bound[depth - 1, tree.position[depth - 1] - 1] if depth > 0 else 0.0
    count = 0
    for c in range(t.choices[operator]):
        if ascending(tree.listed[operator, c], tree.group, tree.used[depth]):
            bound = max(w.bound[c] * rounding, before)
            at = count
            while at > 0 and tree.bound[depth, at - 1] > bound:
                tree.bound[depth, at] = tree.bound[depth, at - 1]
                tree.child[depth, at] = tree.child[depth, at - 1]
                at -= 1
            tree.bound[depth, at] = bound
            tree.child[depth, at] = c
            count += 1
    tree.width[depth] = count
    tree.position[depth] = 0
    tree.opened[depth] = 1
    tree.scalars[1] += count


@lean
def descend(t: Tables, w: Work, ahead: F64, tree: Tree, limit: float, nodes: Any, rounding: float) -> Any:
    """Go on until a plan is complete whose bound is below ``limit`` (PLAN), the tree is done (DONE), or ``nodes``
    partial plans have been bounded in all (PAUSE)."""
    last, whole = tree.order.shape[0] - 1, False
    while True:
        depth = tree.scalars[0]
        operator = tree.order[depth]
        if whole or tree.opened[depth] == 0:
            if not whole and tree.scalars[1] >= nodes:
                return PAUSE
            bound = children(t, w, ahead, tree.chosen, -1 if whole else operator) * rounding
            if whole and bound < limit:
                return PLAN
            if not whole:
                _open(t, w, tree, depth, rounding)
            whole = False
        at = tree.position[depth]
        if at < tree.width[depth] and tree.bound[depth, at] < limit:
            c = tree.child[depth, at]
            tree.position[depth] += 1
            tree.chosen[operator] = c
            if depth == last:
                whole = True
            else:
                tree.used[depth + 1] = tree.used[depth] | t.on[operator, c]
                tree.scalars[0] += 1
                tree.opened[depth + 1] = 0
        else:
            tree.scalars[2] += tree.width[depth] - at
            tree.chosen[operator] = -1
            tree.opened[depth] = 0
            if depth == 0:
                return DONE
            tree.scalars[0] -= 1


@lean
def proved(tree: Tree) -> float:
    """The least bound of all that has not been looked at yet."""
    least = np.inf
    for depth in range(tree.scalars[0] + 1):
        if tree.opened[depth] == 1:
            at = tree.position[depth]
            if at < tree.width[depth]:
                least = min(least, tree.bound[depth, at])
        elif depth > 0:  # chosen, but its children have not been made
            least = min(least, tree.bound[depth - 1, tree.position[depth - 1] - 1])
        else:
            least = 0.0
    return least
