"""Time of computing: a roofline over what a piece computes and moves, and measurements where there are some.

Roofline (Williams, Waterman, Patterson, CACM 2009): overhead + max(FLOPs / rate, bytes / bandwidth). Everything follows
from the extents of a piece, never from its place, so that a cost does not depend on which piece was asked for first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flexsearch.compiled import lean
from flexsearch.cost.efficiency import (
    Product,
    product_of,
    task_seconds_of,
    update_rates,
)
from flexsearch.cost.filling import Filling, longer_in_halves
from flexsearch.cost.learned import FULL, TRAFFIC
from flexsearch.cost.profile import Entry, Profile, Work, family, signature
from flexsearch.cost.ticks import FOREVER, TICK, task_seconds, whole
from flexsearch.errors import ProfileError, TopologyError
from flexsearch.files import printable
from flexsearch.graph.model import Operator, OperatorGraph, Tensor
from flexsearch.graph.notation import Operand
from flexsearch.graph.ops import KINDS, backward_flops, forward_flops, kind_of, shipped
from flexsearch.graph.piece import Piece
from flexsearch.graph.precision import Precision
from flexsearch.topology import Device, Topology
from flexsearch.topology.kernels import USUAL, Efficiency

Numbers = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]

STREAMS: Final = {"sgd": 3, "momentum": 5, "adam": 7}
"""Bytes that an update reads and writes, per byte of weights: weight, gradient and state in, weight and state out. With
weights of half precision beside float32 masters and states it is as much for each element: gradient in (2), master in
and out (8), weight out (2), states."""
STATE_COPIES: Final = {"sgd": 0, "momentum": 1, "adam": 2}
"""Tensors of optimizer state for each weight."""


def state_bytes(weight: Tensor, optimizer: str, precision: Precision) -> int:
    """Bytes that the optimizer keeps for each element of a weight. In half precision these are float32 states and a
    float32 master copy (Rajbhandari et al., SC 2020, section 3.1: 12 bytes for adam)."""
    if precision != "as-is" and weight.itemsize == 2:
        return 4 * (STATE_COPIES[optimizer] + 1)
    return weight.itemsize * STATE_COPIES[optimizer]


def bytes_in_training(weight: Tensor, optimizer: str, precision: Precision) -> float:
    """Bytes of a weight, its gradient and what the optimizer keeps of it."""
    return 2 * weight.nbytes + weight.nbytes / weight.itemsize * state_bytes(weight, optimizer, precision)


@dataclass(frozen=True)
class Costed:
    """An operator with what its cost depends on besides its extents. ``needs``: inputs that want a gradient. Of one
    whose backward pass is divided among two (``graph.weight_gradients``), the whole."""

    op: Operator
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    needs: tuple[bool, ...]

    @classmethod
    def of(cls, graph: OperatorGraph, operator: int) -> Costed:
        """Operator number ``operator`` of a graph."""
        op, backward = graph.operators[operator].plain, graph.has_backward[operator]
        return cls(
            op,
            tuple(graph.tensor[name] for name in op.inputs),
            tuple(graph.tensor[name] for name in op.outputs),
            tuple(backward and name in graph.differentiable for name in op.inputs),
        )

    @cached_property
    def dtype(self) -> str:
        """Type in which it computes: of the first floating operand, preferably not of an input or a buffer, which are
        cast before in half precision."""
        floating = [t for t in (*self.inputs, *self.outputs) if t.floating]
        made = (t.dtype for t in floating if t.kind not in ("input", "buffer"))
        return next(made, floating[0].dtype if floating else "float32")

    @cached_property
    def family(self) -> str:
        """Of its signatures."""
        return family(self.op, self.dtypes, self.needs)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the inputs, then of the outputs."""
        return tuple(t.dtype for t in (*self.inputs, *self.outputs))

    def signature(self, extents: Mapping[str, int]) -> str:
        """Key of a piece of these extents in a profile."""
        return signature(self.op, extents, self.dtypes, self.needs)

    def forward(self, extents: Mapping[str, int]) -> Work:
        """FLOPs and bytes of the forward task of a piece with the given extents."""
        flops, nbytes = self.counts(extents)[0]
        return Work(flops=flops, nbytes=nbytes)

    def backward(self, extents: Mapping[str, int]) -> Work:
        """FLOPs and bytes of the backward task: gradients of the outputs and saved inputs in, the needed gradients
        out."""
        flops, nbytes = self.counts(extents)[1]
        return Work(flops=flops, nbytes=nbytes)

    def counts(self, extents: Mapping[str, Any]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """As ``forward`` and ``backward``, as plain numbers; of arrays of extents: arrays."""
        access = self.op.access
        read = [_reached(o, t, extents) * t.itemsize for o, t in zip(access.inputs, self.inputs, strict=True)]
        written = sum(_reached(o, t, extents) * t.itemsize for o, t in zip(access.outputs, self.outputs, strict=True))
        rows = 0 if self._table is None else self._rows(self._table, extents)
        return self._forward_counts(extents, read, written, rows), self._backward_counts(extents, read, written, rows)

    def _forward_counts(
        self, extents: Mapping[str, Any], read: Sequence[Any], written: Any, rows: Any
    ) -> tuple[Any, Any]:  # fmt: skip
        """FLOPs and bytes. ``read``: bytes of the operands; ``written``: of the results; ``rows``: see ``_rows``."""
        if self._free:
            return 0.0, 0.0
        if kind_of(self.op).copies:  # an operand's window may lie outside; all that is written was read once
            moved = written
        else:  # the rows of a table that are looked up, not the table
            moved = sum(nbytes for i, nbytes in enumerate(read) if i != self._table) + rows
        return forward_flops(self.op, extents), moved + written

    def _backward_counts(
        self, extents: Mapping[str, Any], read: Sequence[Any], written: Any, rows: Any
    ) -> tuple[Any, Any]:  # fmt: skip
        """As ``_forward_counts``."""
        reads = kind_of(self.op).backward_reads
        if not any(self.needs) or reads == "nothing" or (reads == "inputs" and self._free):
            return 0.0, 0.0
        made = sum(nbytes for nbytes, need in zip(read, self.needs, strict=True) if need)
        if reads == "gradients":
            saved = 0
        elif self._table is not None:  # clears the table's gradient, adds to the rows
            saved = sum(nbytes for i, nbytes in enumerate(read) if i != self._table) + 2 * rows
        else:
            saved = sum(nbytes for nbytes, t in zip(read, self.inputs, strict=True) if t.floating)
        return backward_flops(self.op, extents, self.needs), written + saved + made

    @cached_property
    def launches(self) -> tuple[int, int, int]:
        """Operators that a host launches in the forward and in the backward task, views among them; of the latter,
        those that make gradients of parameters alone. The backward pass of a contraction takes one for each gradient
        (products, sums of biases), that of other operators one."""
        weights = sum(need and t.kind == "parameter" for need, t in zip(self.needs, self.inputs, strict=True))
        if kind_of(self.op).contraction:
            return 1, sum(self.needs), weights
        return 1, int(any(self.needs)), int(0 < weights == sum(self.needs))

    def weight_share(self, extents: Mapping[str, Any]) -> float:
        """Share of the backward task that makes the gradients of parameters, by FLOPs; of a backward task without
        FLOPs all or nothing: all if it makes no other gradients."""
        if self.gradients is None:
            return float(self.trained)
        own, rest = (float(backward_flops(self.op, extents, needs)) for needs in self.gradients)
        return own / (own + rest) if own > 0.0 else 0.0

    @cached_property
    def gradients(self) -> tuple[tuple[bool, ...], tuple[bool, ...]] | None:
        """By input, whether it is a parameter that wants a gradient, and whether it is something else that does; None
        unless there are both."""
        trained = tuple(need and t.kind == "parameter" for need, t in zip(self.needs, self.inputs, strict=True))
        others = tuple(need and not own for need, own in zip(self.needs, trained, strict=True))
        return (trained, others) if any(trained) and any(others) else None

    @cached_property
    def trained(self) -> bool:
        """Whether it makes gradients of parameters."""
        return any(need and t.kind == "parameter" for need, t in zip(self.needs, self.inputs, strict=True))

    @cached_property
    def product(self) -> Product | None:
        """Axes of the matrix product that it is."""
        return product_of(self.op)

    def product_sizes(self, extents: Mapping[str, Any]) -> tuple[Any, Any, Any] | None:
        """Rows, columns and indices summed away of a piece with these extents, if it is a matrix product."""
        if self.product is None:
            return None
        rows, columns, summed = (prod(extents[axis] for axis in axes) for axes in self.product)
        return rows, columns, summed

    @cached_property
    def _free(self) -> bool:
        return kind_of(self.op).is_free(self.op)

    @cached_property
    def _table(self) -> int | None:
        """Place of the operand of which only some rows are read."""
        return kind_of(self.op).table

    def _rows(self, place: int, extents: Mapping[str, Any]) -> Any:
        """Bytes of the table, the operand at ``place``, that are looked up."""
        return kind_of(self.op).looked_up(self.op, extents) * self.inputs[place].itemsize


class Costs:
    """Seconds of compute tasks of a graph on the devices of a topology.

    Times that the graph itself gives (:meth:`OperatorKind.given_seconds`) hold on all devices. Else measurements of
    ``profile`` come first, for devices that it fits. Its gaps are filled by the roofline times the
    median ratio of measured to roofline of the same kind (where none of that kind was measured: of all). What the
    profile has learned from whole steps comes on top. Where two operators divide the backward pass of one, each has its
    share of it, and the forward pass belongs to the one that makes the gradients of the inputs. Raises ProfileError if
    the profile fits no device.
    """

    def __init__(self, graph: OperatorGraph, topology: Topology, profile: Profile | None = None) -> None:
        self.graph, self.topology, self.profile = graph, topology, profile
        self._costed = tuple(Costed.of(graph, i) for i in range(len(graph.operators)))
        self._axes = tuple(op.access.axes for op in graph.operators)
        self._halves = tuple(op.half for op in graph.operators)
        alike: dict[object, int] = {}
        self.alike = tuple(alike.setdefault(self._key(i), i) for i in range(len(graph.operators)))
        """By operator: the first one of the same shape and cost, whatever its name and place."""
        classes: dict[Device, int] = {}
        self._class_of = tuple(classes.setdefault(_anonymous(d), len(classes)) for d in topology.devices)
        self.kinds = np.array(self._class_of)
        """By device: number of its kind; devices of one kind cost the same."""
        self._classes = tuple(classes)
        _check_kernels(classes)
        self._models = tuple(_Model(device, profile) for device in classes)
        self._known: dict[tuple[int, tuple[int, ...], int], tuple[float, float]] = {}
        self._known_halves: dict[tuple[int, tuple[int, ...], int], tuple[float, float]] = {}
        if profile is not None and not any(model.profile for model in self._models):
            raise ProfileError(
                f"the profile was measured on {profile.device}, but topology {topology.name} has "
                + ", ".join(sorted({f"{d.kind} {d.model!r}" for d in classes}))
                + ". Profile one of these devices, or list the model in the profile's device.stands_for."
            )

    def on(self, topology: Topology) -> Costs:
        """Costs of the same graph on another topology. They share what has been worked out where both have the same
        kinds of devices."""
        if tuple(dict.fromkeys(map(_anonymous, topology.devices))) != self._classes:
            return Costs(self.graph, topology, self.profile)
        other = copy(self)
        other.topology = topology
        other._class_of = tuple(self._classes.index(_anonymous(device)) for device in topology.devices)
        other.kinds = np.array(other._class_of)
        return other

    def _key(self, operator: int) -> tuple[object, ...]:
        """Everything about an operator that its cost depends on, whatever its name and place."""
        op, costed = self.graph.operators[operator], self._costed[operator]
        shapes = tuple(tuple(t.shape) for t in (*costed.inputs, *costed.outputs))
        salt = {"salt": None} if "salt" in op.attributes else {}  # tells random numbers apart, not costs
        attributes = json.dumps({**op.attributes, **salt}, sort_keys=True)
        backward = self.graph.has_backward[operator]
        return op.kind, op.pattern, op.axes, attributes, shapes, costed.dtypes, costed.needs, backward

    def compute(self, operator: int, piece: Piece, device: int) -> tuple[float, float]:
        """Seconds of the forward and of the backward task of a piece; backward is 0.0 where there is none."""
        extents = tuple(high - low for low, high in map(piece.axes.__getitem__, self._axes[operator]))
        return self._seconds(operator, extents, self._class_of[device])

    def pieces(
        self, operator: int, extents: Sequence[tuple[int, ...]], extent_of: npt.NDArray[np.intp],
        device: npt.NDArray[np.uint32],
    ) -> npt.NDArray[np.float64]:  # fmt: skip
        """Seconds of the forward and of the backward tasks (rows) of pieces: piece k has as many indices on each axis
        of the operator's access as ``extents[extent_of[k]]`` says, and is on ``device[k]``."""
        kinds = self.kinds[device]
        found = np.empty((2, len(device)))
        for kind in np.unique(kinds).tolist():
            here = kinds == kind
            found[:, here] = self.of_extents(operator, extents, kind)[:, extent_of[here]]
        return found

    def of_extents(self, operator: int, extents: Sequence[tuple[int, ...]], kind: int) -> npt.NDArray[np.float64]:
        """Seconds of the forward and of the backward task (rows) of pieces of these extents on a kind of device."""
        return np.array([self._seconds(operator, extent, kind) for extent in extents]).T

    def halves(self, operator: int, extents: Sequence[tuple[int, ...]], kind: int) -> npt.NDArray[np.float64]:
        """Seconds of the halves of backward tasks in two (rows), of pieces of these extents on a kind of device: of
        that which makes the gradients of inputs, and of that which makes those of parameters. Together they take as
        long as the whole, or longer: the second is a call of autograd of its own."""
        found, known = [], self._known_halves
        for extent in extents:
            key = self.alike[operator], extent, kind
            if key not in known:
                known[key] = self._seconds_of_halves(operator, extent, kind)
            found.append(known[key])
        return np.array(found).reshape(-1, 2).T

    def launches(self, operator: int) -> tuple[int, int, int]:
        """How many operators a host launches for a piece: in its forward task, in its backward task, and how many of
        the latter for gradients of parameters alone. Of kinds of devices that start several kernels for one, the most.
        """
        kind = self.graph.operators[operator].kind
        kernels = max(device.launched.kernels.get(kind, 1) for device in self._classes)
        forward, backward, weights = (count * kernels for count in self._costed[operator].launches)
        if not self.graph.has_backward[operator]:
            return forward, 0, 0
        if (half := self._halves[operator]) is not None:
            return (0, weights, weights) if half == "weights" else (forward, backward - weights, 0)
        return forward, backward, weights

    def _seconds(self, operator: int, extents: tuple[int, ...], kind: int) -> tuple[float, float]:
        """Of a piece of these extents on a kind of device."""
        key = self.alike[operator], extents, kind
        if (known := self._known.get(key)) is None:
            named = dict(zip(self._axes[operator], extents, strict=True))
            given = kind_of(self.graph.operators[operator]).given_seconds(self.graph.operators[operator], named)
            if given is not None:
                forward, backward = _computing(*given)
            else:
                forward, backward = self._models[kind].seconds(self._costed[operator], named)
            if (half := self._halves[operator]) is not None:
                share = self._costed[operator].weight_share(named)
                own = (0.0, backward * share) if half == "weights" else (forward, backward * (1.0 - share))
                forward, backward = _computing(*own)
            known = self._known[key] = forward, backward if self.graph.has_backward[operator] else 0.0
        return known

    def _seconds_of_halves(self, operator: int, extents: tuple[int, ...], kind: int) -> tuple[float, float]:
        """Of a piece of these extents on a kind of device."""
        backward, costed = self._seconds(operator, extents, kind)[1], self._costed[operator]
        if (half := self._halves[operator]) is not None:
            return (0.0, backward) if half == "weights" else (backward, 0.0)
        named = dict(zip(self._axes[operator], extents, strict=True))
        weights = float(whole(backward * costed.weight_share(named)))
        if not costed.trained or kind_of(costed.op).given_seconds(costed.op, named) is not None:
            return backward - weights, weights
        inputs, weights = self._models[kind].halves(costed, named, backward - weights, backward)
        return inputs, max(weights, backward - inputs)

    def compute_many(self, operator: int, extents: Mapping[str, Numbers], device: int) -> tuple[Seconds, Seconds]:
        """As ``compute``, of many pieces at once: ``extents`` gives an array for every axis, one number a piece."""
        op = self.graph.operators[operator]
        if op.half is not None:
            columns = [extents[axis].tolist() for axis in self._axes[operator]]
            rows = [self._seconds(operator, row, self._class_of[device]) for row in zip(*columns, strict=True)]
            return np.array([f for f, _ in rows]), np.array([b for _, b in rows])
        given = kind_of(op).given_seconds(op, extents)
        if given is not None:
            forward, backward = (task_seconds(np.asarray(seconds, np.float64)) for seconds in given)
        else:
            forward, backward = self._models[self._class_of[device]].seconds_many(self._costed[operator], extents)
        return forward, backward if self.graph.has_backward[operator] else np.zeros_like(backward)

    def update(
        self, nbytes: int, tensors: int, device: int, optimizer: str, precision: Precision = "as-is"
    ) -> float:  # fmt: skip
        """Seconds of the optimizer's update of ``nbytes`` of weights in ``tensors`` tensors."""
        per_byte, per_tensor = self.update_rates(device, optimizer, precision)
        return float(update_seconds(nbytes, tensors, per_byte, per_tensor))

    def update_rates(self, device: int, optimizer: str, precision: Precision = "as-is") -> tuple[float, float]:
        """Seconds that an update takes for each byte of weights, and for each tensor."""
        per_byte, per_tensor = self._models[self._class_of[device]].update_rates(optimizer)
        return per_byte if precision == "as-is" else 2 * per_byte, per_tensor  # see ``STREAMS``

    def measured(self, operator: int, piece: Piece, device: int) -> bool:
        """Whether the cost of this piece was measured, not estimated."""
        extents = {axis: piece.extent(axis) for axis in self._axes[operator]}
        return self.is_measured(operator, extents, self._class_of[device])

    def is_measured(self, operator: int, extents: Mapping[str, int], kind: int) -> bool:
        """The same of a piece of these extents on a kind of device."""
        profile = self._models[kind].profile
        return profile is not None and self._costed[operator].signature(extents) in profile.entries

    def basis(self, kind: int) -> tuple[Device, Profile | None]:
        """A kind of device, and the profile that holds for it, if one does."""
        return self._classes[kind], self._models[kind].profile

    def dtype(self, operator: int) -> str:
        """Type in which an operator computes."""
        return self._costed[operator].dtype


def _check_kernels(devices: Iterable[Device]) -> None:
    """Raise TopologyError where a device counts the kernels of what is no kind of operator."""
    for device in devices:
        for kind in device.launched.kernels:
            if kind not in KINDS:
                raise TopologyError(
                    f'devices.launches.kernels: "{printable(kind)}" is no kind of operator',
                    f"Kinds are {', '.join(sorted(KINDS)[:8])}, ...; flexsearch show GRAPH lists those of a graph.",
                )


class _Model:
    """Costs on one kind of device."""

    def __init__(self, device: Device, profile: Profile | None) -> None:
        self.profile = profile if profile is not None and profile.device.fits(device) else None
        self.device = device
        if self.profile is not None:
            self.device = self._measured_device(self.profile)
        self._compute, self._task_s = 1.0, 0.0
        self._filling: Filling | None = None
        self._longer: dict[str, float] = {}
        if self.profile is not None:
            if (learned := self.profile.learned) is not None:
                self._compute, self._task_s = learned.compute, learned.task_s
            self._filling = Filling(self.profile, self.device)
            self._longer = longer_in_halves(self.profile)

    def _measured_device(self, profile: Profile) -> Device:
        """The device with the figures that the profile measured. Without any, its measurements are compared with the
        usual shares of the peaks, and what they lack is estimated by those."""
        if profile.figures is not None:
            return profile.figures.on(self.device)
        taught = {} if profile.learned is None else profile.learned.efficiency
        plain = bool(profile.entries)
        return self.device.model_copy(
            update={
                "efficiency": None if plain else _replaced(self.device.efficiency, taught, ""),
                "efficiency_full": None if plain else _replaced(self.device.efficiency_full, taught, FULL),
            }
        )

    def seconds(self, costed: Costed, extents: Mapping[str, int]) -> tuple[float, float]:
        if self.profile is not None and (entry := self.profile.entries.get(costed.signature(extents))) is not None:
            seconds = entry.forward_s, entry.backward_s
        else:
            seconds = self._estimated(costed, extents, max)
            if self._filling is not None:
                like, kind, work = costed.family, costed.op.kind, costed.counts(extents)
                ratios = (self._filling.ratio(like, kind, *work[back], backward=bool(back)) for back in (0, 1))
                seconds = tuple(s * ratio for s, ratio in zip(seconds, ratios, strict=True))
        return _computing(*(s * self._compute + self._task_s for s in seconds))

    def halves(
        self, costed: Costed, extents: Mapping[str, int], inputs: float, backward: float
    ) -> tuple[float, float]:  # fmt: skip
        """Seconds of the two halves of a backward task: as measured, or together as much longer than the whole as those
        of the same kind. ``inputs``: of the first by its share of the whole, ``backward``."""
        entry = None if self.profile is None else self.profile.entries.get(costed.signature(extents))
        if entry is not None and entry.halves_s is not None:
            inputs, weights = (s * self._compute + self._task_s for s in entry.halves_s)
        else:
            weights = backward * self._longer.get(costed.op.kind, 1.0) - inputs
        return min(float(whole(inputs)), backward), float(whole(weights))

    def seconds_many(self, costed: Costed, extents: Mapping[str, Numbers]) -> tuple[Seconds, Seconds]:
        """Seconds of forward and backward tasks of pieces given as arrays of extents."""
        kind, count = costed.op.kind, len(next(iter(extents.values()), np.zeros(1)))
        if not shipped(kind) or any(entry.kind == kind for entry in self._entries):
            rows = [self.seconds(costed, {a: int(column[k]) for a, column in extents.items()}) for k in range(count)]
            return np.array([f for f, _ in rows]), np.array([b for _, b in rows])
        filling = self._filling
        forward, backward = (
            np.broadcast_to(
                task_seconds(
                    seconds * (1.0 if filling is None else filling.ratio("", kind, 0.0, 0.0, bool(back)))
                    * self._compute + self._task_s
                ), (count,)
            )
            for back, seconds in enumerate(self._estimated(costed, extents, np.maximum))
        )  # fmt: skip
        return forward, backward

    def _estimated(self, costed: Costed, extents: Mapping[str, Any], most: Callable[[Any, Any], Any]) -> Any:
        """Seconds of the two tasks by the device's figures. ``most``: the larger of two numbers or arrays."""
        kind, sizes = costed.op.kind, costed.product_sizes(extents)
        return tuple(
            task_seconds_of(kind, flops, nbytes, sizes, costed.dtype, self.device, bool(backward), most)
            for backward, (flops, nbytes) in enumerate(costed.counts(extents))
        )

    @property
    def _entries(self) -> Iterable[Entry]:
        return () if self.profile is None else self.profile.entries.values()

    def update_rates(self, optimizer: str) -> tuple[float, float]:
        measured = {} if self.profile is None else self.profile.updates
        for name, entry in measured.items():
            if name == optimizer:
                return entry.s_per_byte * self._compute, entry.s_per_tensor * self._compute
        per_byte, per_tensor = update_rates(self.device, optimizer, STREAMS[optimizer])
        return per_byte * self._compute, per_tensor * self._compute


@lean
def update_seconds(nbytes: Any, tensors: Any, per_byte: Any, per_tensor: Any) -> Any:
    """Seconds of an update of ``nbytes`` of weights in ``tensors`` tensors."""
    return whole(nbytes * per_byte + tensors * per_tensor)


def _computing(forward_s: float, backward_s: float) -> tuple[float, float]:
    """As ``task_seconds``, of two numbers, which takes less than making arrays of them."""
    # ``round`` rounds halves to even, as ``np.rint`` does.
    forward, backward = (max(round(min(s / TICK, FOREVER)), 1) * TICK for s in (forward_s, backward_s))
    return forward, backward


def _replaced(efficiency: Efficiency | None, taught: Mapping[str, float], prefix: str) -> Efficiency | None:
    """With figures in place of its own: those of ``taught`` whose names begin with ``prefix``."""
    own = {name.removeprefix(prefix): value for name, value in taught.items() if name.startswith(prefix)}
    figures = {name: value for name, value in own.items() if name in Efficiency.model_fields}
    traffic = {name.removeprefix(TRAFFIC): value for name, value in own.items() if name.startswith(TRAFFIC)}
    if not figures and not traffic:
        return efficiency
    before = efficiency or USUAL
    return before.model_copy(update={**figures, "traffic": dict(before.traffic) | traffic})


def _anonymous(device: Device) -> Device:
    """The device without its name and place: equal ones cost the same."""
    return _Hashable(**{name: getattr(device, name) for name in Device.model_fields} | _NOWHERE)


_NOWHERE: Final = {"name": "any", "host": "any", "processor": None}


class _Hashable(Device):
    """A device as a dictionary key; pydantic would hash its table of FLOP/s."""

    def __hash__(self) -> int:
        return hash((self.kind, self.model, self.memory_bandwidth, tuple(sorted(self.flops.items()))))


def _reached(operand: Operand, tensor: Tensor, extents: Mapping[str, Any]) -> Any:
    """Elements of ``tensor`` that a piece of these extents reads or writes, as if no window were clipped."""
    count: Any = 1
    for dimension, size in zip(operand.dimensions, tensor.shape, strict=True):
        if dimension.plain:
            count *= extents[dimension.axes[0]]
        elif dimension.merged:
            count *= _at_most(size, prod(extents[a] for a in dimension.axes))
        else:
            pairs = zip(dimension.axes, dimension.coefficients, strict=True)
            count *= _at_most(size, 1 + sum(c * (extents[a] - 1) for a, c in pairs))
    return count


def _at_most(size: int, reached: Any) -> Any:
    return np.minimum(size, reached) if isinstance(reached, np.ndarray) else min(size, reached)
