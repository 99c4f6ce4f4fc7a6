"""Which exchange stands for those that renaming devices by one block makes of it (``flexsearch.lower.folding``),
compiled.

Device d of one block and device d + ``devices`` of the next do the same at the same time. The exchanges that they make
each other's images of are an orbit: the first one of it stands for all, with senders and receivers by their place in a
block. One that all blocks take part in is its own image.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flexsearch.compiled import ONE, U32, U64, ZERO, lean, wide
from flexsearch.packed import packed, zeros

_FACTOR = np.uint64(0xFF51AFD7ED558CCD)
SENDS, RECEIVES = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


@packed
class BlockMap(NamedTuple):
    """Equal blocks, (1,) each: ``replicas`` of them, of ``devices`` devices, ``inside`` of them in a host;
    ``lopsided``: reshards that treat blocks differently, so that one cannot stand for all. ``image``: by resource of
    the whole, that of the first block which stands for it; ``images``: by that, for how many. ``listed``: by device or
    resource, a stamp (``listing``); ``row``: by resource, where it is listed; ``many``: a count by row; ``seen``:
    whether the last one asked for was listed before."""

    replicas: U64
    devices: U64
    inside: U64
    lopsided: U64
    image: U32
    images: U32
    listed: U64
    listing: U64
    row: U64
    many: U64
    seen: U64


def make_block_map(image: U32, replicas: int, devices: int, inside: int) -> BlockMap:
    """That of a folded topology; of another with one replica."""
    room = max(len(image), replicas * devices) + 1
    return zeros(
        BlockMap, replicas=np.array([replicas], np.uint64), devices=np.array([devices], np.uint64),
        inside=np.array([inside], np.uint64), image=image, images=images_of(image), listed=room, row=room, many=room,
    )  # fmt: skip


def images_of(image: U32) -> U32:
    """By resource, how many it is the image of."""
    images: U32 = np.bincount(image).astype(np.uint32)
    return images


@lean
def at_once(exchanges: Any, links: Any, images: Any) -> Any:
    """How many of the exchanges of an orbit keep the same link busy, one after the other: each of them has so many of
    the ``links`` with the same image, of ``images`` in all."""
    return max(ONE, np.uint64(exchanges) * np.uint64(links) // np.uint64(images))


@wide
def mixed(value: Any) -> Any:
    """A hash of a number."""
    value = (value ^ (value >> np.uint64(33))) * _FACTOR
    return value ^ (value >> np.uint64(29))


@lean
def number_of(device: Any, role: Any) -> Any:
    """A number for a device as one that SENDS or RECEIVES (``role``); a set of them has the sum."""
    return mixed(np.uint64(device) * role + role)


@lean
def place_of(blocks: BlockMap, device: Any) -> Any:
    """Place of a device in its block."""
    device = np.uint64(device)
    return device % blocks.devices[0] if device >= blocks.devices[0] else device


@lean
def crosses_blocks(blocks: BlockMap, devices: U32, first: Any, last: Any) -> Any:
    """Whether ``devices[first:last]`` are not all in the first block."""
    k = first
    while k < last and np.uint64(devices[k]) < blocks.devices[0]:
        k += ONE
    return k < last


@lean
def _turned(blocks: BlockMap, device: Any, turn: Any) -> Any:
    """The device that takes the place of another: hosts turn by ``turn // inside``, blocks in them by the rest."""
    inside, size = blocks.inside[0], blocks.devices[0]
    block, place = device // size, device % size
    host = (block // inside + turn // inside) % (blocks.replicas[0] // inside)
    return (host * inside + (block + turn) % inside) * size + place


@lean
def _digest(blocks: BlockMap, devices: U32, first: Any, last: Any, turn: Any, role: Any) -> Any:
    """A number for a set of devices after a turn."""
    total = ZERO
    for k in range(first, last):
        total += number_of(_turned(blocks, np.uint64(devices[k]), turn), role)
    return total


@lean
def orbit_of(
    blocks: BlockMap, send: U32, send_first: Any, send_last: Any, receive: U32, receive_first: Any, receive_last: Any
) -> tuple[Any, Any, Any]:
    """A number for the devices of an exchange, another for its orbit, and how many exchanges that has."""
    own, same = ZERO, True
    for turn in (ZERO, ONE, blocks.inside[0]):  # what both generators leave as it is, all turns do
        digest = _digest(blocks, send, send_first, send_last, turn % blocks.replicas[0], SENDS) + _digest(
            blocks, receive, receive_first, receive_last, turn % blocks.replicas[0], RECEIVES
        )
        if turn == ZERO:
            own = digest
        same = same and digest == own
    if same:
        return own, own, ONE
    least, fixed = own, ONE
    for turn in range(ONE, blocks.replicas[0]):
        digest = _digest(blocks, send, send_first, send_last, turn, SENDS) + _digest(
            blocks, receive, receive_first, receive_last, turn, RECEIVES
        )
        least = min(least, digest)
        if digest == own:
            fixed += ONE
    return own, least, blocks.replicas[0] // fixed


@lean
def add_places(blocks: BlockMap, devices: U32, first: Any, last: Any, to: U32, at: Any) -> Any:
    """Write the places of ``devices[first:last]`` to ``to``, from row ``at`` on, each once; returns the row behind."""
    blocks.listing[0] += ONE
    for k in range(first, last):
        place = place_of(blocks, devices[k])
        if blocks.listed[place] != blocks.listing[0]:
            blocks.listed[place] = blocks.listing[0]
            to[at] = place
            at += ONE
    return at
