"""Codes of a few bits, packed into bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def packed_bytes(n: int, bits: int) -> int:
    """Bytes of ``n`` codes."""
    return (n * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """(rows, n) whole numbers below 2**bits -> (rows, packed_bytes) uint8, lowest bit first."""
    rows, n = codes.shape
    size = packed_bytes(n, bits)
    single = codes.byte().new_zeros(rows, size * 8)
    for bit in range(bits):
        single[:, bit : n * bits : bits] = (codes >> bit) & 1
    single = single.view(rows, size, 8)
    total = single[..., 0].clone()
    for bit in range(1, 8):
        total |= single[..., bit] << bit
    return total


def unpack(data: Tensor, n: int, bits: int) -> Tensor:
    """The inverse: (rows, n) int32."""
    rows, size = data.shape
    single = data.new_zeros(rows, size, 8)
    for bit in range(8):
        single[..., bit] = (data >> bit) & 1
    flat = single.view(rows, size * 8)
    codes = data.new_zeros(rows, n).int()
    for bit in range(bits):
        codes |= flat[:, bit : n * bits : bits].int() << bit
    return codes
