"""The nouns of a topology: device, link, communication library; and what is derived from them: resource, route."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, Strict, field_validator, model_validator

from flexsearch import quantities
from flexsearch.files import FileModel, printable
from flexsearch.quantities import (
    Bandwidth,
    Capacity,
    Factor,
    FlopRate,
    LatencySeconds,
    SecondsPerByte,
)
from flexsearch.topology.kernels import HALF, USUAL, USUAL_LAUNCHES, Efficiency, Launches

DTYPES: Final = ("float64", "float32", "bfloat16", "float16")
TF32: Final = "tf32"
"""Among the rates of a device: of float32 products whose factors are rounded to 10 bits of mantissa."""
FORMS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange")
COLLECTIVES: Final = FORMS[:3]
"""Forms for which a library may have algorithms for groups of devices."""
ONE_CALL: Final[dict[str, tuple[str, ...]]] = {"gloo": (), "nccl": FORMS[:4]}
"""Forms that ranks leave to one call of the backend, besides gloo's all-reduce; they send messages for all others.
gloo's own all-gather, reduce-scatter and all-to-all take 1.3 to 2.7 times a ring's time, messages 1.1 to 1.2."""

# Time over the ideal of (bytes on the busiest link / its bandwidth); a reduce_scatter's is also that of other messages
# whose receivers add them up. gloo, at 1 Gbit/s on 2 to 4 hosts: all_reduce, exchange and reduce_scatter (full-duplex
# exchanges and a sum; 1.1-1.24) are measured; all_gather and all_to_all made of exchanges are taken to be near exchange
# (gloo's own reach 1.3-1.8 and 1.5-2.1). nccl: estimates, not measured.
FACTORS: Final[dict[str, dict[str, float]]] = {
    "gloo": {"all_reduce": 1.05, "all_gather": 1.1, "reduce_scatter": 1.15, "all_to_all": 1.1, "exchange": 1.07},
    "nccl": {"all_reduce": 1.25, "all_gather": 1.25, "reduce_scatter": 1.25, "all_to_all": 1.3, "exchange": 1.15},
}
OVERHEAD_S: Final = {"gloo": 100e-6, "nccl": 15e-6}
MESSAGE_S: Final = {"gloo": None, "nccl": 2.75e-6}
"""What a device's next message adds to an exchange of several. gloo: as much as the first one (``overhead_s``): 32
small messages at once between two hosts take 4 ms (``benchmarks/link_sharing.py``). nccl: what each step of the
measured all-reduces below adds to their start."""
TURN_BYTES: Final = {"gloo": 500_000, "nccl": 2**22}
"""See ``Communication.turn_bytes``. gloo, measured: connections share a link evenly, so turns are as short as a
simulation allows; 500 kB predict what ``benchmarks/link_sharing.py`` measures. nccl: communicators share a network card
by their buffers, of 4 MiB each (``NCCL_BUFFSIZE``), so that activations do not wait for the whole all-reduce of a
layer's gradients."""
FORMER_TURN_BYTES: Final = 3_000_000
"""What files of earlier versions say for gloo where nobody chose anything else."""


def _name(value: str) -> str:
    if not value or any(c in "{}" or c.isspace() for c in value) or "->" in value:
        raise ValueError("a name must not be empty and must not contain spaces, braces or arrows")
    return value


Name = Annotated[quantities.Name, AfterValidator(_name)]


class Device(FileModel):
    """One worker of a plan: a GPU, or one rank's share of a CPU. ``flops`` and ``memory_bandwidth`` are plain peaks."""

    name: Name
    kind: Literal["cpu", "cuda"]
    host: Name
    model: quantities.Text
    flops: dict[str, FlopRate]  # by dtype
    memory_bandwidth: Bandwidth
    memory_bytes: Capacity
    memory_fraction: quantities.Share = 1.0  # of it, what plans may use: a driver and libraries need some, too
    processor: Name | None = None  # devices naming the same one take turns on it (emulated hosts too); None: its own
    overhead_s: LatencySeconds  # host time to launch one operator; a GPU computes meanwhile
    efficiency: Efficiency | None = None  # in half precision; None: ``kernels.USUAL``, even where a file says that
    efficiency_full: Efficiency | None = None  # in other types; likewise
    launches: Launches | None = None  # likewise
    tf32: bool = False  # float32 matrix products are computed in TF32 (torch.backends.cuda.matmul.fp32_precision)

    @property
    def usable_bytes(self) -> int:
        """Bytes of memory that plans may use."""
        return int(self.memory_bytes * self.memory_fraction)

    @property
    def launch_s(self) -> float:
        """Host time to launch one operator, where the device computes meanwhile what was launched before: a GPU. 0.0
        where it is a part of the operator's own time."""
        return self.overhead_s if self.kind == "cuda" else 0.0

    @field_validator("efficiency", "efficiency_full", "launches")
    @classmethod
    def _none_if_usual(cls, figures: Efficiency | Launches | None) -> Efficiency | Launches | None:
        """Files of many devices do not repeat what is usual, and equal devices are equal however they are said."""
        return None if figures in (USUAL, USUAL_LAUNCHES) else figures

    def efficiency_for(self, dtype: str) -> Efficiency:
        """What kernels reach that compute in ``dtype``."""
        return (self.efficiency if dtype in HALF else self.efficiency_full) or USUAL

    @property
    def launched(self) -> Launches:
        """What its host launches."""
        return self.launches or USUAL_LAUNCHES

    @field_validator("flops")
    @classmethod
    def _check_dtypes(cls, flops: dict[str, float]) -> dict[str, float]:
        for dtype in flops:
            if dtype not in (*DTYPES, TF32):
                raise ValueError(f'unknown dtype "{printable(dtype)}"; known are {", ".join((*DTYPES, TF32))}')
        if "float32" not in flops:
            raise ValueError("float32 is missing; it stands in for the dtypes that are not given")
        return flops

    def flops_for(self, dtype: str) -> float:
        """Peak FLOP/s for ``dtype``; where the device gives none: float32's, and half of it for float64. A product of
        complex numbers takes four of real ones."""
        if dtype.startswith("complex"):
            return self.flops_for("float64" if dtype == "complex128" else "float32") / 4
        return self.flops.get(dtype, self.flops["float32"] / (2 if dtype == "float64" else 1))

    def rounds(self, dtype: str) -> bool:
        """Whether matrix products in ``dtype`` are computed in TF32."""
        return self.tf32 and dtype == "float32" and TF32 in self.flops

    def product_flops_for(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products."""
        return self.flops[TF32] if self.rounds(dtype) else self.flops_for(dtype)


class Link(FileModel):
    """A wire between two endpoints (devices or switches). ``bandwidth`` is B/s for each direction if ``full`` duplex,
    for both together if ``half``."""

    a: Name
    b: Name
    bandwidth: Bandwidth
    latency_s: LatencySeconds
    duplex: Literal["full", "half"] = "full"


class Protocol(FileModel):
    """One way in which a library moves a collective: ``startup_s``, and ``factor`` as of a ``Group``."""

    startup_s: LatencySeconds
    factor: Factor


class Group(FileModel):
    """What collectives among ``members`` devices of one host take: ``startup_s`` of an all-reduce of a few bytes;
    ``factor``: time over (bytes over the busiest link of a ring / its bandwidth). ``protocols``: that the library
    changes between, of which the faster one counts, but never less than ``least_s``; without them it is the line
    of ``startup_s`` and ``factor``, from which the steps of rings through several hosts follow in any case."""

    members: Annotated[int, Field(ge=2, le=quantities.MAX_DEVICES)]
    startup_s: LatencySeconds
    factor: Factor
    least_s: LatencySeconds = 0.0
    protocols: Annotated[tuple[Protocol, ...], Strict(False), Field(max_length=2)] = ()


# All-reduces of 8 A100 on NVSwitch (300 GB/s in each direction), 1 to 1024 MB: bus bandwidth 193, 218 and 227 GB/s.
# From the measured tables of vTrain (MIT, VIA-Research/vTrain).
GROUPS: Final = (
    Group(members=2, startup_s=46e-6, factor=300 / 193),
    Group(members=4, startup_s=54e-6, factor=300 / 218),
    Group(members=8, startup_s=79e-6, factor=300 / 227),
)


class Communication(FileModel):
    """The library that moves tensors. Time of a communication: overhead + latency + factor * bytes / bandwidth.

    ``overhead_s`` and any missing entry of ``factors`` default to the figures of the ``backend``, and so do the others;
    but ``groups`` are empty where the file gives the factor of a collective: it holds for groups of all sizes then.
    """

    backend: Literal["gloo", "nccl"]
    overhead_s: LatencySeconds = 0.0  # software start of one communication
    factors: dict[str, Factor] = Field(default_factory=dict)  # by form: time / (bytes over busiest link / bandwidth)
    cpu_s: LatencySeconds = 0.0  # computing time that a communication takes from each processor, whatever its bytes
    cpu_s_per_byte: SecondsPerByte = 0.0  # computing time that each byte of a message takes, on each side
    cpu_by_form: dict[str, SecondsPerByte] = Field(default_factory=dict)  # likewise of a form, where it was measured
    busy_factor: Annotated[Factor, Field(ge=1)] = 1.0  # how many times as long it takes where ranks compute meanwhile
    pack_s_per_byte: SecondsPerByte = 0.0  # until an all-reduce begins, for each byte that a rank adds to it
    tensor_by_form: dict[str, LatencySeconds] = Field(default_factory=dict)  # ranks take for each tensor beyond one
    message_s: LatencySeconds = 0.0  # each further message that a device sends or receives in one exchange
    groups: Annotated[tuple[Group, ...], Strict(False)] = ()  # nccl: collectives within one host, ascending by members
    turn_bytes: quantities.Capacity | None = None  # that cross a link before other connections have it; None: all

    @model_validator(mode="before")
    @classmethod
    def _backend_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("backend") not in tuple(FACTORS):
            return data  # the fields' own checks say what is wrong
        backend, factors = data["backend"], data.get("factors", {})
        defaults: dict[str, Any] = {"overhead_s": OVERHEAD_S[backend], "turn_bytes": TURN_BYTES[backend]}
        message_s = MESSAGE_S[backend]
        defaults["message_s"] = data.get("overhead_s", OVERHEAD_S[backend]) if message_s is None else message_s
        if isinstance(factors, dict):
            if backend == "nccl" and not factors.keys() & set(COLLECTIVES):
                defaults["groups"] = GROUPS
            factors = {**FACTORS[backend], **factors}
        return {**defaults, **data, "factors": factors}

    @field_validator("factors", "cpu_by_form", "tensor_by_form")
    @classmethod
    def _check_forms(cls, factors: dict[str, float]) -> dict[str, float]:
        for form in factors:
            if form not in FORMS:
                raise ValueError(f'unknown form "{printable(form)}"; known are {", ".join(FORMS)}')
        return factors

    @field_validator("groups")
    @classmethod
    def _ascending(cls, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        if any(a.members >= b.members for a, b in pairwise(groups)):
            raise ValueError("the numbers of members must ascend")
        if len({len(group.protocols) for group in groups}) > 1 or any(len(group.protocols) == 1 for group in groups):
            raise ValueError("each group must have two protocols, or none of them any")
        return groups

    def cpu_s_per_byte_of(self, form: str) -> float:
        """Computing time that a byte of a form takes from a processor, s. If it is not given: a message's, times the
        ratio of their factors. On CPUs processors move the bytes, on GPUs kernels, which take multiprocessors and
        memory bandwidth from others. The ratio holds between ranks of one machine; on slow networks it is an
        assumption."""
        return self.cpu_by_form.get(form, self.cpu_s_per_byte * self.factors[form] / self.factors["exchange"])

    @property
    def takes_cpu(self) -> bool:
        """Whether communications take computing time."""
        return self.cpu_s > 0.0 or any(self.cpu_s_per_byte_of(form) > 0.0 for form in FORMS)

    def in_one_call(self, form: str) -> bool:
        """Whether ranks leave a communication of this form to one call of the backend, a collective."""
        return form == "all_reduce" or form in ONE_CALL[self.backend]

    def by_group(self, form: str) -> bool:
        """Whether the backend has algorithms of its own for such a call among devices of several hosts."""
        return form in COLLECTIVES and form in ONE_CALL[self.backend]

    def assumed(self) -> set[str]:
        """Fields that files had not always: those of them that are as the backend's own figures, or former ones."""
        usual = Communication(backend=self.backend, overhead_s=self.overhead_s)
        later = (
            "message_s", "groups", "turn_bytes", "cpu_s", "cpu_by_form", "busy_factor", "pack_s_per_byte",
            "tensor_by_form",
        )  # fmt: skip
        former = {"turn_bytes"} if self.backend == "gloo" and self.turn_bytes == FORMER_TURN_BYTES else set()
        return former | {name for name in later if getattr(self, name) == getattr(usual, name)}


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that serves one task at a time. ``bandwidth``: B/s of a link (direction) or a way to storage, memory
    B/s of a processor."""

    kind: Literal["processor", "link", "storage"]
    name: str
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Route:
    """The way of a message: indices into ``Topology.resources``, summed latency (s), smallest bandwidth (B/s).

    From a device to itself there is nothing to cross: no resources, no latency, infinite bandwidth.
    """

    resources: tuple[int, ...]
    latency_s: float
    bandwidth: float
