"""What the user fixes: ``"encoder.*: batch=4, devices=0-3"``; the rest is searched.

A pin names operators, by a pattern as in file names over their names or their modules, and what their configs must be:

- ``AXIS=PARTS``: the degree of an axis; ``batch`` and ``parameter`` stand for an operator's first axis of that role;
- ``devices=0-3`` or ``devices=0,2``: exactly these devices;
- ``replicas=N``;
- ``states=whole``, ``optimizer``, ``gradients`` or ``weights``: which states of its weights are kept in parts;
  ``shard=yes`` is ``states=weights``, ``shard=no`` is ``states=whole``;
- ``over=N``: over how many consecutive devices they are sharded; ``over=all``: over all that need them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Final

from flexsearch.errors import StrategyError
from flexsearch.files import printable
from flexsearch.graph import Operator, OperatorGraph
from flexsearch.quantities import MAX_DEVICES
from flexsearch.strategy import OperatorConfig, States, make_config
from flexsearch.strategy.config import Shares, check_shares, read_pin
from flexsearch.strategy.weights import has_weights
from flexsearch.topology import Topology

_ROLES: Final = {"batch": "sample", "sample": "sample", "parameter": "parameter", "attribute": "attribute"}
_STATES: Final = {
    "states": {states.name.lower(): states for states in States},
    "shard": {"yes": States.WEIGHTS, "no": States.WHOLE},
}
MOST_COMPARED: Final = 5000
"""Names that are compared with one that matches nothing."""


@dataclass(frozen=True, slots=True)
class Pin:
    """What one operator's config must be; None: free."""

    degrees: tuple[tuple[str, int], ...] = ()
    devices: tuple[int, ...] | None = None
    replicas: int | None = None
    states: States | None = None
    over: int | None = None
    shares: Shares = ()


@dataclass(frozen=True)
class Pins:
    """A rule for ``Space``: pins by operator index. ``count``: devices of the topology."""

    operators: tuple[Operator, ...]
    pins: dict[int, Pin]
    weighted: frozenset[int]
    count: int

    def __call__(self, operator: int, config: OperatorConfig) -> OperatorConfig:
        """The config nearest to ``config`` that obeys the pin."""
        pin = self.pins.get(operator)
        if pin is None:
            return config
        op = self.operators[operator]
        room = len(pin.devices) if pin.devices is not None else self.count
        degrees = dict(pin.degrees)
        room //= prod(degrees.values()) * (pin.replicas or 1)
        for axis, parts in config.degrees:
            if axis not in degrees:
                # On given devices the product must come out even; elsewhere it need only fit.
                divides = pin.devices is None
                degrees[axis] = next(d for d in range(min(parts, room), 0, -1) if divides or room % d == 0)
                room //= degrees[axis]
        if pin.devices is not None:
            devices = pin.devices
        else:
            used = prod(degrees.values()) * (pin.replicas or min(config.replicas, room))
            spare = (d for d in range(self.count) if d not in config.devices)
            devices = (*config.devices, *spare)[:used]
        states = config.states if pin.states is None else pin.states
        over = config.sharded_over if pin.over is None else pin.over
        kept = len(devices) > 1 and operator in self.weighted
        shares = {axis: row for axis, row in config.shares if degrees[axis] == len(row)} | dict(pin.shares)
        return make_config(op, degrees, devices, shares=shares).sharded(states if kept else States.WHOLE, over)


def parse_pins(texts: Sequence[str], graph: OperatorGraph, topology: Topology) -> Pins | None:
    """The pins of a search; None if there are none. Later ones add to, or replace, what earlier ones say of an
    operator.

    Raises StrategyError, which names the pin and what is wrong with it.
    """
    count, pins = len(topology.devices), dict[int, Pin]()
    for text in texts:
        pattern, settings = read_pin(text)
        matching = _matching(pattern, graph, text)
        for key, value in settings:
            _set(pins, matching, key, value, graph, count, printable(text))
    weighted = frozenset(i for i in range(len(graph.operators)) if has_weights(graph, i))
    for i, pin in pins.items():
        _check(graph.operators[i], pin, count)
    return Pins(graph.operators, pins, weighted, count) if pins else None


def _matching(pattern: str, graph: OperatorGraph, text: str) -> list[int]:
    operators = enumerate(graph.operators)
    matching = [i for i, op in operators if fnmatchcase(op.name, pattern) or fnmatchcase(op.module, pattern)]
    if not matching:
        names = [name for op in graph.operators for name in (op.name, op.module) if name]
        close = difflib.get_close_matches(pattern[:100], names[:MOST_COMPARED], n=3, cutoff=0.3)
        raise StrategyError(
            f"pin {printable(text)!r}: no operator or module of graph {graph.name!r} matches {printable(pattern)!r}",
            f"Did you mean {', '.join(map(repr, close))}?" if close else "",
        )
    return matching


def _set(
    pins: dict[int, Pin], matching: Iterable[int], key: str, value: str, graph: OperatorGraph, count: int, text: str
) -> None:
    """Add one KEY=VALUE to the pins of operators."""
    used, axes = False, set[str]()
    for i in matching:
        op, pin = graph.operators[i], pins.get(i, Pin())
        new: Pin | None = None
        if key == "devices":
            new = replace(pin, devices=_devices(value, count, text))
        elif key == "replicas":
            new = replace(pin, replicas=_number(value, text))
        elif key in _STATES:
            if value not in _STATES[key]:
                words = list(_STATES[key])
                raise StrategyError(f"pin {text!r}: {key} is {', '.join(words[:-1])} or {words[-1]}, not {value!r}")
            new = replace(pin, states=_STATES[key][value])
        elif key == "over":
            new = replace(pin, over=_over(value, text))
        elif (axis := _axis(op, key)) is not None:
            row = [_number(share, text) for share in value.split(":")]
            degrees = dict(pin.degrees) | {axis: len(row) if len(row) > 1 else row[0]}
            shares = {a: old for a, old in pin.shares if a != axis} | ({axis: tuple(row)} if len(row) > 1 else {})
            new = replace(pin, degrees=tuple(degrees.items()), shares=tuple(shares.items()))
        axes |= set(op.splittable)
        if new is not None:
            used, pins[i] = True, new
    if not used:
        raise StrategyError(
            f"pin {text!r}: none of these operators has an axis {key!r} that can be split; they have "
            f"{', '.join(sorted(axes)) or 'none'}. Other keys: batch, parameter, devices, replicas, states, shard, over"
        )


def _axis(op: Operator, key: str) -> str | None:
    if key in op.splittable:
        return key
    role = _ROLES.get(key)
    return next((a.name for a in op.axes if a.role == role and a.name in op.splittable), None) if role else None


def _number(value: str, text: str) -> int:
    if re.fullmatch("0*[1-9][0-9]{0,14}", value) is None:
        raise StrategyError(f"pin {text!r}: {printable(value, 40)!r} is not a number of parts")
    return int(value)


def _over(value: str, text: str) -> int:
    """Devices over which weights are sharded; 0 for all."""
    if value == "all":
        return 0
    if not 1 < (over := _number(value, text)) <= MAX_DEVICES:
        raise StrategyError(f"pin {text!r}: weights are sharded over 2 devices or more; over=all is over all")
    return over


def _devices(value: str, count: int, text: str) -> tuple[int, ...]:
    chosen: dict[int, None] = {}
    for part in value.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        if match is None:
            raise StrategyError(f"pin {text!r}: {printable(value, 40)!r} is not a list of devices such as 0-3 or 0,2")
        first, last = (int(digits[-15:]) if len(digits.lstrip("0")) < 15 else count for digits in (
            match[1], match[2] or match[1]))  # fmt: skip
        devices = range(first, last + 1)
        if last >= count or not devices or any(device in chosen for device in devices):
            raise StrategyError(f"pin {text!r}: devices are 0 to {count - 1}, each once, the smaller number first")
        chosen |= dict.fromkeys(devices)
    return tuple(chosen)


def _check(op: Operator, pin: Pin, count: int) -> None:
    """Raise StrategyError if no config obeys the pin."""
    for axis, parts in pin.degrees:
        if parts > op.sizes[axis]:
            size = op.sizes[axis]
            raise StrategyError(f"pins: operator {op.name!r} has {size} of {axis!r}: too few for {parts} parts")
    check_shares(op, OperatorConfig(pin.degrees, (), shares=pin.shares))
    pieces = prod(parts for _, parts in pin.degrees) * (pin.replicas or 1)
    if pin.devices is None and pieces > count:
        raise StrategyError(f"pins: operator {op.name!r} would be in {pieces} pieces, but there are {count} devices")
    if pin.devices is not None and len(pin.devices) % pieces:
        raise StrategyError(
            f"pins: {pieces} pieces of operator {op.name!r} do not come out even on {len(pin.devices)} devices"
        )
    if pin.devices is not None and pin.replicas is not None and len(pin.devices) != pieces:
        raise StrategyError(
            f"pins: operator {op.name!r}: {pieces} pieces are wanted on {len(pin.devices)} devices; leave replicas out"
        )
