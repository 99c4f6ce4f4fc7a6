"""Rates of the kinds of work that synchronisation recipes are made of, measured by the code that recipes run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Final

import numpy as np
import torch
from torch import Tensor

from flexsearch.cost.profile import LONG_VECTOR, SHORT_VECTOR, WorkRate
from flexsearch.measure.sweeps import Bench
from flexsearch.sync.bits import pack, unit_bytes, unpack
from flexsearch.sync.compression import CHOICE, ROUNDING, drawn, largest, marked
from flexsearch.sync.qsgd import restored, rounded
from flexsearch.sync.sign import packed_signs, unpacked_signs

ELEMENTS: Final = (1 << 12, SHORT_VECTOR // 4, LONG_VECTOR // 4)
"""Of the float32 vectors that are measured: a small one shows what starting takes, the others the rates."""
REPEATS: Final = 5
LONG_S: Final = 0.3
"""What has taken so long in all is not repeated."""
SHARE: Final = 100
"""One of so many entries is selected."""
BITS: Final = 4
BUCKET: Final = 512
COLUMNS: Final = 2

RECIPE: Final = "recipe "
"""What busy neighbours are told, with the kind behind it."""

Prepared = tuple[Callable[[], object], int]
"""What is timed, and the bytes that it counts as."""


def measure_recipe_work(bench: Bench, switch: Callable[[str], None] | None = None) -> dict[str, WorkRate]:
    """By kind of work, its rate on the device of a bench. ``switch``: has busy neighbours do the same, as all replicas
    do at the same time."""
    rates = {}
    for kind, prepare in KINDS.items():
        if switch is not None:
            switch(f"{RECIPE}{kind}")
        rates[kind] = _rate(list(_timed(bench, prepare)))
    scan, both = rates["select"], rates["sort"]
    less = {
        name: max(0.0, getattr(both, name) - SHARE * getattr(scan, name)) for name in ("s_per_byte", "long_s_per_byte")
    }
    rates["sort"] = both.model_copy(update=less)
    return rates


def working(bench: Bench, kind: str) -> Callable[[], object]:
    """Work of a kind on the largest vector, to be called again and again."""
    run, _ = KINDS[kind](_vector(bench, ELEMENTS[-1]))
    return run


def _vector(bench: Bench, n: int) -> Tensor:
    return bench.fill(torch.empty(1, n, device=bench.device)) - 0.5


def _timed(bench: Bench, prepare: Callable[[Tensor], Prepared]) -> Iterator[tuple[int, float]]:
    """(Bytes, seconds) of vectors of all sizes."""
    for n in ELEMENTS:
        run, nbytes = prepare(_vector(bench, n))
        times: list[float] = []
        while len(times) < 2 or (len(times) <= REPEATS and sum(times) < LONG_S):
            start = bench.clock.mark()
            run()
            end = bench.clock.mark()
            bench.clock.wait()
            times.append(bench.clock.between(start, end))
        yield nbytes, median(times[1:])  # the first touches its memory


def _rate(rows: Sequence[tuple[int, float]]) -> WorkRate:
    """The rates of the larger vectors, and the start that the smallest shows beside the first."""
    nbytes, seconds = (np.array(column, float) for column in zip(*rows, strict=True))
    seconds = np.maximum(seconds, 1e-9)
    rate, long_rate = (float(seconds[k] / nbytes[k]) for k in (1, -1))
    start = max(0.0, float(seconds[0] - rate * nbytes[0]))
    rates = np.where(np.arange(len(rows)) == len(rows) - 1, long_rate, rate)
    errors = np.minimum(np.abs((start + rates * nbytes) / seconds - 1.0), 1e9)
    middle, p90 = float(np.median(errors)), float(np.quantile(errors, 0.9))
    return WorkRate(
        n=len(rows), median=middle, p90=p90, s_per_byte=rate, start_s=start, long_s_per_byte=long_rate
    )  # fmt: skip


def _entries(x: Tensor) -> tuple[int, Tensor]:
    """How many entries are selected of a vector, and the places of so many, spread over it."""
    n = x.shape[1]
    k = max(1, n // SHARE)
    return k, torch.arange(k, device=x.device).mul_(n // k).flip(0).unsqueeze(0)


def _add(x: Tensor) -> Prepared:
    other = x.clone()
    return lambda: x + other, x.nbytes


def _select(x: Tensor) -> Prepared:
    x = torch.rand_like(x)
    return lambda: largest(x, 1), x.nbytes


def _sort(x: Tensor) -> Prepared:
    """What is selected with it is taken off afterwards."""
    x = torch.rand_like(x)
    k, _ = _entries(x)
    return lambda: largest(x, k), k * x.element_size()


def _mark(x: Tensor) -> Prepared:
    x = torch.rand_like(x)
    return lambda: marked(x, x.abs() >= 1.0 - 1.0 / SHARE), x.nbytes


def _scatter(x: Tensor) -> Prepared:
    k, at = _entries(x)
    values, places, total = x[:, :k].clone(), at.int(), x.clone()
    return lambda: total.scatter_add_(1, places.long(), values), values.nbytes + places.nbytes


def _draw(x: Tensor) -> Prepared:
    return lambda: x.new_tensor(drawn(ROUNDING, 0, 0, 0).random((1, x.shape[1]))), x.nbytes


def _choose(x: Tensor) -> Prepared:
    k, _ = _entries(x)

    def choose() -> Tensor:
        return x[:, np.sort(drawn(CHOICE, 0, 0).choice(x.shape[1], k, replace=False)).tolist()]

    return choose, k * x.element_size()


def _round(x: Tensor) -> Prepared:
    uniform, top = torch.rand_like(x), (1 << (BITS - 1)) - 1

    def round_() -> Tensor:
        _, level = rounded(x, uniform, top, BUCKET)
        return level.int() | ((x < 0).int() << (BITS - 1))

    return round_, x.nbytes


def _codes(x: Tensor) -> Tensor:
    return (torch.rand_like(x) * (1 << BITS)).int()


def _pack(x: Tensor) -> Prepared:
    codes = _codes(x)
    return lambda: pack(codes, BITS), unit_bytes(x.shape[1], BITS)


def _unpack(x: Tensor) -> Prepared:
    packed = pack(_codes(x), BITS)
    return lambda: unpack(packed, x.shape[1], BITS), unit_bytes(x.shape[1], BITS)


def _restore(x: Tensor) -> Prepared:
    codes, norm = _codes(x), torch.rand(1, x.shape[1] // BUCKET, device=x.device)
    return lambda: restored(codes, norm, BITS, BUCKET), x.nbytes


def _unsign(x: Tensor) -> Prepared:
    signs = packed_signs(x)
    return lambda: unpacked_signs(signs, x.shape[1]).to(x.dtype), x.nbytes


def _call(x: Tensor) -> Prepared:
    """Each is of a column of a small matrix, as those of PowerSGD are."""
    column = torch.rand(1, 64, COLUMNS, device=x.device)[:, :, :1]

    def calls() -> None:
        for _ in range(x.shape[1] // (1 << 10)):
            column * column

    return calls, x.shape[1] // (1 << 10)


def _product(x: Tensor) -> Prepared:
    rows = 1 << (x.shape[1].bit_length() // 2)
    matrix = x.view(1, rows, -1)
    factor = torch.rand(matrix.shape[2], COLUMNS, device=x.device)
    return lambda: matrix @ factor, COLUMNS * x.nbytes


KINDS: Final[Mapping[str, Callable[[Tensor], Prepared]]] = {
    "add": _add,
    "copy": lambda x: (x.clone, x.nbytes),
    "fill": lambda x: (lambda: x.new_zeros(x.shape), x.nbytes),
    "select": _select,
    "sort": _sort,
    "mark": _mark,
    "scatter": _scatter,
    "draw": _draw,
    "choose": _choose,
    "round": _round,
    "pack": _pack,
    "unpack": _unpack,
    "restore": _restore,
    "sign": lambda x: (lambda: packed_signs(x), x.nbytes),
    "unsign": _unsign,
    "convert": lambda x: (x.half, x.nbytes),
    "product": _product,
    "call": _call,
}
"""How each kind is measured, for a vector of a size."""
