"""What kernels reach of a device's peaks, and what its host launches for them: figures of a device, as data.

What a topology file leaves out is as the defaults here say, which were guessed: they are amid what libraries reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Final, Literal

from pydantic import Field, Strict

from flexsearch.files import FileModel, load, shipped
from flexsearch.quantities import Count, Elements, Factor, LatencySeconds, Name, Share, Text

Traffic = Literal["copy", "lookup", "loss", "normalisation", "update", "windows"]
"""Ways of reading and writing memory that may reach another share of its bandwidth than streaming does: copies of parts
of tensors, rows of a table, losses, sums over dimensions (softmax among them), updates of weights, windows of images
(pooling)."""

HALF: Final = ("float16", "bfloat16")


class Efficiency(FileModel):
    """What kernels reach of a device's peaks.

    ``matrix``: share of the FLOP/s that large matrix products reach; a product of an (m, k) and a (k, n) matrix
    reaches ``matrix / ((1 + s/m) (1 + s/n) (1 + s/k))`` with s = ``matrix_size``, in elements. ``unaligned``: the
    most that products reach whose columns n or summed indices k are odd, or multiples of 2 or of 4 and not of 8: tensor
    cores read rows that begin at multiples of 16 bytes. ``convolution``:
    what those of windows reach, over matrix products of their sizes. ``attention_forward``, ``attention_backward``:
    of causal attention in one kernel, whose mask counts as full work, so up to twice what it computes; attention
    without one takes twice as long. ``other``: of operators that are no matrix products, which do no fused
    multiply-adds and hardly ever fill all pipes. ``memory``: share of the bandwidth; ``traffic``: of that of some
    accesses, where it is another one. ``passes``: by kind of operator, or optimizer, the bytes that it moves over those
    of one fused kernel, where it is a chain of several. ``overhead_s``: of each kernel, on the device: from the end of
    one to the begin of the next. The device's own is its host's; a CPU has that alone."""

    matrix: Share = 0.6
    matrix_size: Elements = 0.0
    unaligned: Annotated[tuple[Share, Share, Share], Strict(False)] = (1.0, 1.0, 1.0)
    convolution: Factor = 1.0
    attention_forward: Annotated[Factor, Field(le=2.0)] = 0.6
    attention_backward: Annotated[Factor, Field(le=2.0)] = 0.6
    other: Share = 0.25
    memory: Share = 0.8
    traffic: dict[Traffic, Share] = Field(default_factory=dict)
    passes: dict[Name, Factor] = Field(default_factory=dict)
    overhead_s: LatencySeconds = 2e-6

    def bandwidth_share(self, traffic: Traffic | None = None) -> float:
        """Share of the memory's bandwidth that an access reaches. None: streaming."""
        return self.memory if traffic is None else self.traffic.get(traffic, self.memory)


class Launches(FileModel):
    """What a host launches. ``communication``: launches that handing over a communication takes as long as: an event is
    recorded, the communication's stream waits for it, a kernel is launched. ``sgd``, ``momentum``, ``adam``: passes
    that an update takes for each tensor, on a CPU. ``kernels``: by kind of operator, where one is a chain of
    several kernels (not fused), how many. ``casts``: in mixed precision, for each weight that is cast to half precision
    before a step, and its gradient back behind it; 0 where the optimizer does that with the update."""

    communication: Count = 3
    sgd: Count = 1
    momentum: Count = 2
    adam: Count = 6
    kernels: dict[Name, Annotated[Count, Field(ge=1)]] = Field(default_factory=dict)
    casts: Count = 0

    def update(self, optimizer: str) -> int:
        """Passes of an update for each tensor."""
        return {"sgd": self.sgd, "momentum": self.momentum, "adam": self.adam}[optimizer]


class RecipeWork(FileModel):
    """``profiles/recipe-work.json``: by kind of device, what a byte of each kind of work of recipes (``sync.kinds``)
    takes, in bytes of memory that are read or written in the same time."""

    format: Literal["flexsearch.recipe_work/1"] = "flexsearch.recipe_work/1"
    source: Text
    cuda: dict[Name, Factor]
    cpu: dict[Name, Factor]


@cache
def recipe_passes(kind: Literal["cpu", "cuda"]) -> Mapping[str, float]:
    """Of a device of this kind, for work that no profile has measured."""
    path = shipped("profiles", "recipe-work")
    assert path is not None
    data = load(RecipeWork, path, "recipe work")
    return data.cpu if kind == "cpu" else data.cuda


class GpuNames(FileModel):
    """``profiles/gpu-names.json``: what drivers call the GPUs of presets, by model."""

    format: Literal["flexsearch.gpu_names/1"] = "flexsearch.gpu_names/1"
    source: Text
    names: dict[Name, list[Text]]


@cache
def reported_names() -> Mapping[str, Sequence[str]]:
    """Names by which drivers report the GPUs of presets, by model."""
    path = shipped("profiles", "gpu-names")
    assert path is not None
    return load(GpuNames, path, "names of GPUs").names


USUAL: Final = Efficiency()
USUAL_LAUNCHES: Final = Launches()
"""Of devices that say nothing of them."""
