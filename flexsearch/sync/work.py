"""What a recipe computes besides what it sends, as bytes that are read and written, and what it keeps, in bytes.

It follows from the arithmetic of :mod:`flexsearch.sync.recipe`: adding a residual reads two vectors and writes one, and
so on. A step is: work before the first exchange (``before``), work of those who received between exchanges
(``between``), work after the last one (``after``)."""

from __future__ import annotations

from flexsearch.sync.compression import Everything, Sizes
from flexsearch.sync.power_sgd import PowerSGD
from flexsearch.sync.recipe import Recipe
from flexsearch.sync.timing import DiLoCo, LocalSGD

_ADD, _COPY = 3, 2
"""Passes over a vector that adding another one, and copying it, take."""


def before(recipe: Recipe, sizes: Sizes) -> int:
    """Bytes that a replica reads and writes before it sends: what weights have changed by, residual and velocity added,
    encoding."""
    passes = recipe.compression.passes + _ADD * (recipe.compression.feedback + (recipe.correction > 0))
    return (passes + _ADD * _sends_changes(recipe)) * _vector(sizes)


def between(recipe: Recipe, sizes: Sizes, members: int, received: int) -> int:
    """Bytes that a position reads and writes after it ``received`` so many in an exchange that is not the last."""
    server = recipe.server
    if server is not None:
        part = -(-_vector(sizes) // server.shards)
        return received + part + recipe.compression.decoding(members) * part
    return _ADD * received + recipe.compression.merging * _vector(sizes)


def after(recipe: Recipe, sizes: Sizes, members: int, received: int) -> int:
    """Bytes that a replica reads and writes after the last exchange, in which it ``received`` so many: decoding, what
    it sent taken from the residual and the velocity, new weights and references."""
    c, vector = recipe.compression, _vector(sizes)
    total = 0
    if not recipe.partners.exact:
        payloads = 1 + received // max(1, c.nbytes(sizes) or 1)
        total += received + (1 + c.decoding(payloads)) * vector
    elif recipe.server is None and not isinstance(c, Everything):
        total += received + c.decoding(members) * vector
    total += ((_ADD + 1) * c.feedback + _ADD * (recipe.correction > 0)) * vector
    if isinstance(recipe.timing, LocalSGD):
        total += (_COPY + _ADD * _sends_changes(recipe) + 2 * _ADD * isinstance(recipe.timing, DiLoCo)) * vector
    return total


def kept_bytes(recipe: Recipe, sizes: Sizes) -> int:
    """Bytes of the recipe's state that a replica keeps from step to step: residual, velocity, reference weights, outer
    momentum, the factors of PowerSGD."""
    c, rows = recipe.compression, recipe.compression.feedback + (recipe.correction > 0)
    rows += isinstance(recipe.timing, LocalSGD) + isinstance(recipe.timing, DiLoCo)
    factors = sum(b for _, _, b in c.matrices(sizes)) * c.rank if isinstance(c, PowerSGD) else 0
    return rows * _vector(sizes) + factors * sizes.itemsize


def _sends_changes(recipe: Recipe) -> bool:
    """Whether it sends what weights have changed by, not weights themselves."""
    plain = isinstance(recipe.compression, Everything) and (recipe.partners.exact or recipe.partners.weights)
    return isinstance(recipe.timing, LocalSGD) and (isinstance(recipe.timing, DiLoCo) or not plain)


def _vector(sizes: Sizes) -> int:
    return sizes.n * sizes.itemsize


def held_bytes(recipe: Recipe, sizes: Sizes, members: int, hosts: tuple[int, ...]) -> int:
    """Bytes that a replica holds while the recipe runs, beside its gradients or weights and the result: the vector,
    what arrives at once, and what that is decoded to."""
    c, vector = recipe.compression, _vector(sizes)
    received, payloads = 0, 1
    exchanges = () if recipe.asynchronous is not None else recipe.partners.exchanges(members, hosts, c, sizes, 0) or ()
    for exchange in exchanges:
        arriving = [size for _, b, size in exchange.messages() if b == 0]
        if exchange.form != "all_reduce" and sum(arriving) > received:
            received, payloads = sum(arriving), 1 + len(arriving)
    decoded = payloads * vector if received and c.decoding(2) > c.decoding(1) else 0
    return vector + received + decoded
