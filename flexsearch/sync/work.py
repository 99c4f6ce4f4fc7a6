"""What a recipe computes besides what it sends, as amounts of work by kind, and what it keeps, in bytes.

A step of a recipe is: work before the first exchange (``before``), work of those who received between exchanges
(``between``), work after the last one (``after``); each as :mod:`flexsearch.sync.recipe` computes it, from gradients or
weights of their own memory and back. Who goes with whom and what is sent say the rest: ``encoding``, ``merging``,
``finishing`` of partners and compressions. Rates of kinds are for :mod:`flexsearch.cost.exchanges` to say."""

from __future__ import annotations

from flexsearch.sync.compression import Everything, Sizes, Sparse
from flexsearch.sync.exchange import Exchange
from flexsearch.sync.half import Half
from flexsearch.sync.kinds import Work, work
from flexsearch.sync.power_sgd import PowerSGD
from flexsearch.sync.recipe import Recipe
from flexsearch.sync.timing import DiLoCo, LocalSGD


def alone(recipe: Recipe, sizes: Sizes) -> Work:
    """Of a replica in every step, also if it exchanges nothing: its gradients become those of the mean loss of its own
    samples."""
    return work(copy=sizes.nbytes)


def before(recipe: Recipe, sizes: Sizes, first: Exchange | None = None, exact: bool = False) -> Work:
    """Of a replica before it sends: one vector of all pieces, what weights have changed by, residual and velocity
    added, encoding. ``first``: of the exchanges that follow. ``exact``: in a step of warm-up."""
    vector = sizes.nbytes
    done = alone(recipe, sizes) + work(copy=vector)
    if exact:
        return done + work(copy=vector)
    done += work(add=vector * (recipe.compression.feedback + (recipe.correction > 0) + _sends_changes(recipe)))
    done += work(copy=vector * (recipe.correction > 0))
    if first is None:
        return done + recipe.compression.encoding(sizes)
    return done + recipe.partners.encoding(recipe.compression, sizes, first)


def between(recipe: Recipe, sizes: Sizes, members: int, received: int, place: float) -> Work:
    """Of a position after it ``received`` so many bytes in an exchange that is not the last; ``place``: the share of
    the exchanges that is over."""
    return recipe.partners.merging(recipe.compression, sizes, members, received, place)


def after(recipe: Recipe, sizes: Sizes, members: int, received: int, exact: bool = False) -> Work:
    """Of a replica after the last exchange, in which it ``received`` so many bytes: decoding, what it sent taken from
    the residual and the velocity, new weights and references."""
    c, vector = recipe.compression, sizes.nbytes
    if exact:
        return work(copy=vector)
    done = recipe.partners.finishing(c, sizes, members, received)
    corrected = recipe.correction > 0
    done += work(add=vector * (c.feedback + corrected), copy=vector * corrected)
    if recipe.updates:
        done += work(copy=vector)
    if isinstance(recipe.timing, LocalSGD):
        done += work(copy=vector, add=vector * _sends_changes(recipe))
    if isinstance(recipe.timing, DiLoCo):
        done += work(copy=3 * vector, add=2 * vector)
    return done


def kept_bytes(recipe: Recipe, sizes: Sizes) -> int:
    """Bytes of the recipe's state that a replica keeps from step to step: residual, velocity, reference weights, outer
    momentum, the factors of PowerSGD."""
    c, rows = recipe.compression, recipe.compression.feedback + (recipe.correction > 0)
    rows += isinstance(recipe.timing, LocalSGD) + isinstance(recipe.timing, DiLoCo)
    factors = sum(b for _, _, b in c.matrices(sizes)) * c.rank if isinstance(c, PowerSGD) else 0
    return rows * sizes.nbytes + factors * sizes.itemsize


def _sends_changes(recipe: Recipe) -> bool:
    """Whether it sends what weights have changed by, not weights themselves."""
    plain = isinstance(recipe.compression, Everything) and (recipe.partners.exact or recipe.partners.weights)
    return isinstance(recipe.timing, LocalSGD) and (isinstance(recipe.timing, DiLoCo) or not plain)


def held_bytes(recipe: Recipe, sizes: Sizes, members: int, hosts: tuple[int, ...]) -> int:
    """Bytes that a replica holds while the recipe runs, beside its gradients or weights and the result: the vector,
    what arrives at once, and what that is decoded to."""
    c, vector = recipe.compression, sizes.nbytes
    received, payloads = 0, 1
    exchanges = () if recipe.asynchronous is not None else recipe.partners.exchanges(members, hosts, c, sizes, 0) or ()
    for exchange in exchanges:
        arriving = [size for _, b, size in exchange.messages() if b == 0]
        if exchange.form != "all_reduce" and sum(arriving) > received:
            received, payloads = sum(arriving), 1 + len(arriving)
    decoded = payloads * vector if received and not isinstance(c, Sparse | Half | PowerSGD) else 0
    return vector + received + decoded
