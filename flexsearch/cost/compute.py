"""Time of computing: a roofline over what a piece computes and moves, and measurements where there are some.

Roofline (Williams, Waterman, Patterson, CACM 2009): overhead + max(FLOPs / rate, bytes / bandwidth). Everything follows
from the extents of a piece, never from its place, so that a cost does not depend on which piece was asked for first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Final

import numpy as np
import numpy.typing as npt

from flexsearch.cost.costed import Costed
from flexsearch.cost.device import DeviceModel, Numbers, Seconds, in_ticks
from flexsearch.cost.profile import Profile
from flexsearch.cost.ticks import LAUNCH_PARTS, task_seconds, whole
from flexsearch.cost.updates import update_seconds
from flexsearch.errors import ProfileError, TopologyError
from flexsearch.files import printable
from flexsearch.graph.model import OperatorGraph
from flexsearch.graph.ops import KINDS, kind_of
from flexsearch.graph.piece import Piece
from flexsearch.graph.precision import Precision, WideGradientsGraph
from flexsearch.topology import Device, Topology


class Costs:
    """Seconds of compute tasks of a graph on the devices of a topology.

    Times that the graph itself gives (:meth:`OperatorKind.own_seconds`) hold on all devices. Else measurements of
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
        self._models = tuple(DeviceModel(device, profile) for device in classes)
        self._cached_seconds: dict[tuple[int, tuple[int, ...], int], tuple[float, float]] = {}
        self._cached_halves: dict[tuple[int, tuple[int, ...], int], tuple[float, float]] = {}
        self._cached_launches: dict[tuple[int, tuple[int, int, int]], tuple[float, float, float]] = {}
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

    def of_extents(self, operator: int, extents: Sequence[tuple[int, ...]], kind: int) -> npt.NDArray[np.float64]:
        """Seconds of the forward and of the backward task (rows) of pieces of these extents on a kind of device."""
        return np.array([self._seconds(operator, extent, kind) for extent in extents]).T

    def casting(self, operator: int, extents: Sequence[tuple[int, ...]], kind: int) -> npt.NDArray[np.float64]:
        """Seconds that pieces of these extents take on a kind of device to cast the gradients of weights that they make
        to the type in which these are held, behind the task that makes them."""
        costed, model, axes = self._costed[operator], self._models[kind], self._axes[operator]
        if self._halves[operator] == "inputs" or not isinstance(self.graph, WideGradientsGraph):
            return np.zeros(len(extents))
        named = (dict(zip(axes, extent, strict=True)) for extent in extents)
        return np.array([model.casting(costed.cast_bytes(extent)) for extent in named])

    def halves(self, operator: int, extents: Sequence[tuple[int, ...]], kind: int) -> npt.NDArray[np.float64]:
        """Seconds of the halves of backward tasks in two (rows), of pieces of these extents on a kind of device: of
        that which makes the gradients of inputs, and of that which makes those of parameters. Together they take as
        long as the whole, or longer: what the first half reads is set aside, the second is a call of autograd of its
        own."""
        seconds, cached = [], self._cached_halves
        for extent in extents:
            key = self.alike[operator], extent, kind
            if key not in cached:
                cached[key] = self._seconds_of_halves(operator, extent, kind)
            seconds.append(cached[key])
        return np.array(seconds).reshape(-1, 2).T

    def launch_s(self, device: int) -> float:
        """Seconds that the host of a device takes to launch an operator; 0.0 where it has no queue for that."""
        return self._models[self._class_of[device]].launch_s

    def launches(self, operator: int) -> tuple[float, float, float]:
        """How many operators a host launches for a piece: in its forward task, in its backward task, and how many of
        the latter for gradients of parameters alone; in parts of what launching one takes (``LAUNCH_PARTS``). Of kinds
        of devices, the most."""
        key = self.alike[operator], self._costed[operator].launches
        if (cached := self._cached_launches.get(key)) is None:
            cached = self._cached_launches[key] = self._count_launches(operator)
        return cached

    def _count_launches(self, operator: int) -> tuple[float, float, float]:
        costed = self._costed[operator]
        rows = [model.launches(costed, costed.launches) for model in self._models]
        forward, backward, weights = (_in_parts(max(column)) for column in zip(*rows, strict=True))
        if not self.graph.has_backward[operator]:
            return forward, 0.0, 0.0
        if (half := self._halves[operator]) is not None:
            return (0.0, weights, weights) if half == "weights" else (forward, backward - weights, 0.0)
        return forward, backward, weights

    def update_launches(self, optimizer: str, precision: Precision) -> float:
        """The same for the update of a tensor."""
        half = precision != "as-is"
        return _in_parts(max(model.update_launches(optimizer, half) for model in self._models))

    def _seconds(self, operator: int, extents: tuple[int, ...], kind: int) -> tuple[float, float]:
        """Of a piece of these extents on a kind of device."""
        key = self.alike[operator], extents, kind
        if (cached := self._cached_seconds.get(key)) is None:
            named = dict(zip(self._axes[operator], extents, strict=True))
            graph_seconds = kind_of(self.graph.operators[operator]).own_seconds(self.graph.operators[operator], named)
            if graph_seconds is not None:
                forward, backward = in_ticks(*graph_seconds)
            else:
                forward, backward = self._models[kind].seconds(self._costed[operator], named)
            if (half := self._halves[operator]) is not None:
                share = self._costed[operator].weight_share(named)
                own = (0.0, backward * share) if half == "weights" else (forward, backward * (1.0 - share))
                forward, backward = in_ticks(*own)
            cached = self._cached_seconds[key] = forward, backward if self.graph.has_backward[operator] else 0.0
        return cached

    def _seconds_of_halves(self, operator: int, extents: tuple[int, ...], kind: int) -> tuple[float, float]:
        """Of a piece of these extents on a kind of device."""
        backward, costed = self._seconds(operator, extents, kind)[1], self._costed[operator]
        if (half := self._halves[operator]) is not None:
            return (0.0, backward) if half == "weights" else (backward, 0.0)
        named = dict(zip(self._axes[operator], extents, strict=True))
        weights = float(whole(backward * costed.weight_share(named)))
        if not backward or kind_of(costed.op).own_seconds(costed.op, named) is not None:
            return backward - weights, weights
        inputs, weights = self._models[kind].halves(costed, named, backward - weights, backward)
        return (inputs, max(weights, backward - inputs)) if costed.trained else (max(inputs, backward), 0.0)

    def compute_many(self, operator: int, extents: Mapping[str, Numbers], device: int) -> tuple[Seconds, Seconds]:
        """As ``compute``, of many pieces at once: ``extents`` gives an array for every axis, one number a piece."""
        op = self.graph.operators[operator]
        if op.half is not None:
            columns = [extents[axis].tolist() for axis in self._axes[operator]]
            rows = [self._seconds(operator, row, self._class_of[device]) for row in zip(*columns, strict=True)]
            return np.array([f for f, _ in rows]), np.array([b for _, b in rows])
        graph_seconds = kind_of(op).own_seconds(op, extents)
        if graph_seconds is not None:
            forward, backward = (task_seconds(np.asarray(seconds, np.float64)) for seconds in graph_seconds)
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
        half = precision != "as-is"
        model, wide = self._models[self._class_of[device]], isinstance(self.graph, WideGradientsGraph)
        per_byte, per_tensor = model.update_rates(optimizer, half, wide)
        return 2 * per_byte if half else per_byte, per_tensor  # see ``STREAMS``

    def is_measured(self, operator: int, extents: Mapping[str, int], kind: int) -> bool:
        """Whether the cost of a piece of these extents on a kind of device was measured, not estimated."""
        profile = self._models[kind].profile
        return profile is not None and self._costed[operator].signature(extents) in profile.entries

    def basis(self, kind: int) -> tuple[Device, Profile | None]:
        """A kind of device, and the profile that holds for it, if one does."""
        return self._classes[kind], self._models[kind].profile

    def dtype(self, operator: int) -> str:
        """Type in which an operator computes."""
        return self._costed[operator].dtype


def _in_parts(launches: float) -> float:
    """A number of launches in whole parts of one, at least one part if there are any."""
    return max(1, round(launches * LAUNCH_PARTS)) / LAUNCH_PARTS if launches else 0.0


def _check_kernels(devices: Iterable[Device]) -> None:
    """Raise TopologyError where a device counts the kernels of what is no kind of operator."""
    for device in devices:
        for kind in device.launched.kernels:
            if kind not in KINDS:
                raise TopologyError(
                    f'devices.launches.kernels: "{printable(kind)}" is no kind of operator',
                    f"Kinds are {', '.join(sorted(KINDS)[:8])}, ...; a graph file names the kind of each operator.",
                )


def _anonymous(device: Device) -> Device:
    """The device without its name and place: equal ones cost the same."""
    return _Hashable(**{name: getattr(device, name) for name in Device.model_fields} | _NOWHERE)


_NOWHERE: Final = {"name": "any", "host": "any", "processor": None}


class _Hashable(Device):
    """A device as a dictionary key; pydantic would hash its table of FLOP/s."""

    def __hash__(self) -> int:
        return hash((self.kind, self.model, self.memory_bandwidth, tuple(sorted(self.flops.items()))))
