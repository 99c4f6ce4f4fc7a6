"""Codes of a few bits, packed into bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def packed_bytes(n: int, bits: int) -> int:
    """Bytes of ``n`` codes."""
    return (n * bits + 7) // 8


def unit_bytes(n: int, bits: int) -> int:
    """Bytes of the units of which ``pack`` makes bytes, for ``n`` codes."""
    return n * bits // _unit(bits)


def pack(codes: Tensor, bits: int) -> Tensor:
    """(rows, n) whole numbers below 2**bits -> (rows, packed_bytes) uint8, lowest bit first."""
    rows, n = codes.shape
    size, unit, each = packed_bytes(n, bits), _unit(bits), bits // _unit(bits)
    codes = codes.byte()
    units = codes.new_zeros(rows, size * 8 // unit)
    for k in range(each):
        units[:, k : n * each : each] = (codes >> (k * unit)) & ((1 << unit) - 1)
    units = units.view(rows, size, 8 // unit)
    total = units[..., 0].clone()
    for k in range(1, 8 // unit):
        total |= units[..., k] << (k * unit)
    return total


def unpack(data: Tensor, n: int, bits: int) -> Tensor:
    """The inverse: (rows, n) int32."""
    rows, size = data.shape
    unit, each = _unit(bits), bits // _unit(bits)
    units = data.new_empty(rows, size, 8 // unit)
    for k in range(8 // unit):
        units[..., k] = (data >> (k * unit)) & ((1 << unit) - 1)
    flat = units.view(rows, size * 8 // unit)
    codes = flat[:, : n * each : each].int()
    for k in range(1, each):
        codes |= flat[:, k : n * each : each].int() << (k * unit)
    return codes


def _unit(bits: int) -> int:
    """Bits that are moved at once: those of a code, if bytes hold whole codes."""
    return bits if 8 % bits == 0 else 1
