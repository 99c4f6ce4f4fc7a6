"""Measured compute times as a file: what `flexsearch profile` writes, and `Costs` reads. Plain data, no torch.

An entry is found by the ``signature`` of an operator's piece: its kind, pattern, attributes, operand types and local
extents, but neither the operator's name nor where the piece lies, so that repeated layers and all pieces of one size
share a measurement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, Strict, model_validator

from flexsearch import quantities
from flexsearch.cost.learned import Learned, Network, Residual
from flexsearch.errors import ProfileError
from flexsearch.files import FileModel, parse, printable, read_json, save
from flexsearch.graph.model import Dtype, Operator
from flexsearch.graph.notation import Dimension, Operand
from flexsearch.quantities import Amount, Bandwidth, Count, FlopRate, LatencySeconds, Seconds, SecondsPerByte, Text
from flexsearch.topology import Device
from flexsearch.topology.kernels import Efficiency, Launches, reported_names

_SILENT = frozenset({"salt", "count"})
"""Attributes that differ between equal layers and cost nothing: a dropout's salt, a divisor."""

_SHORT = {"float": "f", "bfloat": "bf", "complex": "c", "int": "i", "uint": "u", "bool": "bool"}
_CORES = re.compile(r"(one|\d+) (?:server )?(?:cpu )?(?:core|thread)s?")
_GENERIC = frozenset({"", "cpu", "cuda", "gpu", "generic", "generic cpu", "generic gpu", "unknown"})


Optimizer = Literal["sgd", "momentum", "adam"]


class Work(FileModel):
    """What a roofline needs to know of a task: floating point operations, and bytes read and written."""

    flops: Amount
    nbytes: Amount


class Entry(FileModel):
    """One measured piece: seconds (medians over ``repeats``), and the work that the roofline counts for it.
    ``halves_s``: what the backward pass takes in two halves: gradients of what is no weight, and what the forward pass
    takes longer for setting aside what that half reads; then, in a call of autograd of its own, those of the weights.
    ``product``: rows, columns and indices summed away, if
    it is a matrix product. ``host_s``: of a GPU, what its host takes to launch the forward and the backward task, at
    the least."""

    kind: quantities.Name
    dtype: Dtype
    forward_s: Seconds
    backward_s: Seconds
    halves_s: Annotated[tuple[Seconds, Seconds] | None, Strict(False)] = None
    repeats: Annotated[Count, Field(ge=1)]
    forward: Work
    backward: Work
    product: Annotated[tuple[Count, Count, Count] | None, Strict(False)] = None
    host_s: Annotated[tuple[Seconds, Seconds] | None, Strict(False)] = None


class Figures(FileModel):
    """Figures of the device, fitted to operators of many sizes. ``flops``: FLOP/s of large matrix products, by type;
    ``memory_bandwidth``: B/s of the fastest way of reading and writing memory; ``overhead_s``: of a small operator; the
    others as a topology has them (``topology.kernels``), shares of these. ``fits``: by type and work ("float32 loss"),
    how well each size is predicted from the others."""

    flops: dict[Dtype, FlopRate]
    memory_bandwidth: Bandwidth
    overhead_s: LatencySeconds
    efficiency: Efficiency | None = None
    efficiency_full: Efficiency
    launches: Launches
    fits: dict[quantities.Name, Residual] = Field(default_factory=dict)

    def on(self, device: Device) -> Device:
        """A device of the same model with these figures. What it computes in types that were not measured is as much
        slower or faster than its file says as what it computes in float32."""
        reached = self.flops["float32"] / device.flops_for("float32")
        flops = {dtype: reached * rate for dtype, rate in device.flops.items()} | self.flops
        return device.model_copy(
            update={
                "flops": flops, "memory_bandwidth": self.memory_bandwidth, "overhead_s": self.overhead_s,
                "efficiency": self.efficiency or self.efficiency_full, "efficiency_full": self.efficiency_full,
                "launches": self.launches,
            }
        )  # fmt: skip


class UpdateEntry(FileModel):
    """Measured time of an optimizer's step: s per byte of weights, plus s per tensor. ``host_s_per_tensor``: of a GPU,
    what its host takes to launch that."""

    s_per_byte: SecondsPerByte
    s_per_tensor: Seconds
    host_s_per_tensor: Seconds | None = None


SHORT_VECTOR: Final = 4 << 20
LONG_VECTOR: Final = 32 << 20
"""Bytes of two vectors for which work of recipes is measured. C libraries keep the memory of shorter ones, and return
that of longer ones to the system, which hands it out again page by page."""


class WorkRate(Residual):
    """Measured time of a kind of work of synchronisation recipes (``sync.kinds``): s per byte, plus ``start_s``; and
    how well that fits what was measured. ``long_s_per_byte``: for vectors of ``LONG_VECTOR`` bytes and more (None: as
    for those of ``SHORT_VECTOR``)."""

    s_per_byte: SecondsPerByte
    start_s: Seconds
    long_s_per_byte: SecondsPerByte | None = None

    def seconds(self, nbytes: float, vector: int = 0) -> float:
        """Of so many bytes, in work on a vector of ``vector`` bytes; 0 of none."""
        if not nbytes:
            return 0.0
        rate = self.s_per_byte
        if self.long_s_per_byte is not None and vector > SHORT_VECTOR:
            share = min(1.0, (vector - SHORT_VECTOR) / (LONG_VECTOR - SHORT_VECTOR))
            rate += share * (self.long_s_per_byte - rate)
        return self.start_s + nbytes * rate


class ProfileDevice(FileModel):
    """What was measured. ``stands_for``: names of other device models that these measurements may be used for."""

    kind: Literal["cpu", "cuda"]
    model: Text
    threads: Annotated[Count, Field(ge=1)] = 1
    stands_for: Annotated[tuple[Text, ...], Strict(False)] = ()

    def fits(self, device: Device) -> bool:
        """Whether these measurements hold for a device of a topology: it is of the same kind, and its model is the one
        measured, also by the name that drivers report, is listed in ``stands_for``, or is generic. Generic: "cpu",
        "generic" and the like; or a number of cores, as "one server core" and "4 cores", if as many threads were
        measured."""
        if device.kind != self.kind:
            return False
        model = _plain(device.model)
        if model in {_plain(self.model), *map(_plain, self.stands_for)} or model in _GENERIC:
            return True
        if _plain(self.model) in map(_plain, reported_names().get(device.model, ())):
            return True
        if cores := _CORES.fullmatch(model):
            return self.threads == (1 if cores[1] == "one" else int(cores[1]))
        return False

    def __str__(self) -> str:
        return f"{self.kind} {self.model!r}" + (f" with {self.threads} threads" if self.threads > 1 else "")


class Profile(FileModel):
    """Measurements of one device. ``entries``: by signature. ``updates``: by optimizer. ``learned``: what whole steps
    taught beyond them. ``residuals``: by kind of operator, how well its entries fit those of other sizes.
    ``figures``: of the device, by which other sizes are estimated. ``recipe_work``: by kind of work, what recipes
    compute."""

    format: Literal["flexsearch.profile/2"] = "flexsearch.profile/2"
    device: ProfileDevice
    torch: Text
    """Version of PyTorch that was measured."""
    busy_neighbours: Count = 0
    """Number of other processes that did the same kind of work meanwhile."""
    entries: dict[str, Entry] = Field(default_factory=dict)
    updates: dict[Optimizer, UpdateEntry] = Field(default_factory=dict)
    learned: Learned | None = None
    residuals: dict[str, Residual] = Field(default_factory=dict)
    figures: Figures | None = None
    recipe_work: dict[quantities.Name, WorkRate] = Field(default_factory=dict)

    def extended(self, other: Profile) -> Profile:
        """This profile with the measurements of ``other`` added; where both have one, ``other``'s is kept.

        Raises ProfileError if they come from different devices or were measured under different load.
        """
        mine, theirs = (p.device.model_copy(update={"stands_for": ()}) for p in (self, other))
        if mine != theirs:
            raise ProfileError(f"a profile of {mine} cannot be extended by one of {theirs}", "Keep two files.")
        if self.busy_neighbours != other.busy_neighbours:
            raise ProfileError(
                f"a profile measured beside {self.busy_neighbours} busy processes cannot be extended by one measured "
                f"beside {other.busy_neighbours}",
                "Keep two files.",
            )
        return Profile(
            device=mine.model_copy(
                update={"stands_for": tuple(dict.fromkeys((*self.device.stands_for, *other.device.stands_for)))}
            ),
            torch=other.torch,
            busy_neighbours=self.busy_neighbours,
            entries=dict(sorted((self.entries | other.entries).items())),
            updates=self.updates | other.updates,
            learned=other.learned or self.learned,
            residuals=self.residuals | other.residuals,
            figures=other.figures or self.figures,
            recipe_work=self.recipe_work | other.recipe_work,
        )

    def network(self, topology: str) -> Network:
        """What was learned of the network of the topology of this name."""
        return self.learned.network(topology) if self.learned is not None else Network()

    @model_validator(mode="before")
    @classmethod
    def _without_products(cls, data: Any) -> Any:
        """Older files have two figures of matrix products alone, from which the others do not follow."""
        return {k: v for k, v in data.items() if k != "products"} if isinstance(data, dict) else data

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile file, of an older format, too. Raises FileFormatError that names the wrong field."""
        data = read_json(path, "profile")
        return parse(cls, _in_second_format(data), f"file {printable(str(path))}", "profile")

    def save(self, path: str | Path) -> None:
        """Write the profile file, atomically."""
        save(self, path)


def _in_second_format(data: Any) -> Any:
    """What a profile file holds, as files in the second format do: in the first one, attention without a causal mask
    counted as if it had one."""
    if not isinstance(data, dict) or data.get("format") != "flexsearch.profile/1":
        return data
    entries = data.get("entries")
    counted = {key: _counted_twice(key, e) for key, e in entries.items()} if isinstance(entries, dict) else entries
    return data | {"format": "flexsearch.profile/2"} | ({} if entries is None else {"entries": counted})


def _counted_twice(key: str, entry: Any) -> Any:
    """An entry of a file in the first format, with twice the FLOPs if it is attention without a causal mask."""
    if not isinstance(entry, dict) or entry.get("kind") != "attention" or '"causal":true' in key:
        return entry
    works = {name: entry[name] for name in ("forward", "backward") if isinstance(entry.get(name), dict)}
    numbers = {name: work for name, work in works.items() if isinstance(work.get("flops"), int | float)}
    return entry | {name: work | {"flops": 2 * work["flops"]} for name, work in numbers.items()}


def signature(op: Operator, extents: Mapping[str, int], dtypes: Sequence[str], needs: Sequence[bool]) -> str:
    """Stable, readable key of a piece: ``linear b0 i, o i, o -> b0 o | f32* f32* f32* | b0=8 o=4096 i=9216``.

    ``extents``: indices of each axis in the piece. ``dtypes``: of the inputs, then of the outputs. ``needs``: which
    inputs need a gradient (a star). Attributes stand between the pattern and the types.
    """
    return f"{family(op, dtypes, needs)} | {sizes_of(op, extents)}"


def sizes_of(op: Operator, extents: Mapping[str, int]) -> str:
    """The part of the signature that its ``family`` leaves out."""
    return " ".join(f"{axis}={extents[axis]}" for axis in op.access.axes)


def family(op: Operator, dtypes: Sequence[str], needs: Sequence[bool]) -> str:
    """The part of the signature that all pieces of an operator, and all operators that differ in size, share."""
    stars = (*needs, *[False] * (len(dtypes) - len(needs)))
    types = " ".join(_short(dtype) + ("*" if star else "") for dtype, star in zip(dtypes, stars, strict=True))
    return f"{_head(op)} | {types}"


def cpu_model() -> str:
    """Name of this machine's processor, as profiles and probed topologies give it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine() or "cpu"


def _head(op: Operator) -> str:
    attributes = {k: v for k, v in sorted(op.attributes.items()) if k not in _SILENT and v is not None}
    text = json.dumps(attributes, separators=(",", ":")) if attributes else ""
    return f"{op.kind} {_form(op.pattern, op)}" + (f" {text}" if text else "")


def _form(pattern: str, op: Operator) -> str:
    return _unplaced(op.access.inputs) + " -> " + _unplaced(op.access.outputs)


def _unplaced(operands: Sequence[Operand]) -> str:
    """Operands without the offsets of windows, which say where data lies but not how much of it there is."""
    return ", ".join(
        " ".join(str(Dimension(d.axes, d.coefficients, 0, d.merged, d.plain)) for d in o.dimensions) for o in operands
    )


@lru_cache
def _short(dtype: str) -> str:
    match = re.fullmatch(r"([a-z]+)(\d*)", dtype)
    return _SHORT.get(match[1], match[1]) + match[2] if match else dtype


def _plain(model: str) -> str:
    return " ".join(model.casefold().split())
