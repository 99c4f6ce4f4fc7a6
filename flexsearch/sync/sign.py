"""One bit for each number. Without feedback, signSGD with majority vote (Bernstein et al., 2018): what arrives is the
sign of the sum of signs. With feedback, the sign times the mean magnitude (Karimireddy et al., 2019), averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flexsearch.sync.bits import pack, packed_bytes, unpack
from flexsearch.sync.compression import Compression, Mean, Sizes
from flexsearch.sync.exchange import Group, Payload
from flexsearch.sync.kinds import Work, work

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sign(Compression):
    """Zero counts as positive. Signs are gathered by all, and each counts them."""

    feedback: bool = False

    name: ClassVar[str] = "sign"
    changes: ClassVar[str] = "only signs are sent"

    @property
    def alone(self) -> str:  # type: ignore[override]
        """Why it works only among all."""
        return "" if self.feedback else "a majority is one of all workers"

    @property
    def keeps_size(self) -> bool:  # type: ignore[override]
        """Whether magnitudes arrive, too."""
        return self.feedback

    def encode(self, x: Tensor, step: int, ranks: tuple[int, ...]) -> Payload:
        signs = packed_signs(x)
        return Payload((signs, x.abs().mean(1, keepdim=True))) if self.feedback else Payload((signs, x[:, :0]))

    def decode(self, payload: Payload, n: int) -> Tensor:
        signs, scale = payload.parts
        ones = unpacked_signs(signs, n).to(scale.dtype)
        return ones * scale if self.feedback else ones

    def encoding(self, sizes: Sizes) -> Work:
        return work(sign=sizes.nbytes, add=self.feedback * sizes.nbytes)

    def decoding(self, sizes: Sizes) -> Work:
        return work(unsign=sizes.nbytes, copy=self.feedback * sizes.nbytes)

    def nbytes(self, sizes: Sizes) -> int | None:
        return packed_bytes(sizes.n, 1) + (sizes.itemsize if self.feedback else 0)

    def average(
        self, x: Tensor, group: Group, mean: Mean, memory: Any, step: int, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Any]:
        result, sent, memory = super().average(x, group, mean, memory, step, sizes)
        return (result if self.feedback else result.sign()), sent, memory


def packed_signs(x: Tensor) -> Tensor:
    """(rows, n) -> (rows, packed_bytes), a bit for each: whether it is not negative."""
    return pack((x >= 0).byte(), 1)


def unpacked_signs(data: Tensor, n: int) -> Tensor:
    """(rows, n) of 1 and -1, int32."""
    return unpack(data, n, 1) * 2 - 1
