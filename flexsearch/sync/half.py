"""16 bits for each number, in whose arithmetic sums are made: as PyTorch's hooks fp16_compress and bf16_compress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flexsearch.sync.compression import Compression, Mean, Means, Sizes
from flexsearch.sync.exchange import Exchange, Group, Payload
from flexsearch.sync.kinds import Work, work
from flexsearch.sync.options import one_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Half(Compression):
    """``type``: "fp16" or "bf16". What arrives is of the type of what was sent; feedback keeps what rounding took."""

    feedback: bool = False
    type: str = "fp16"

    name: ClassVar[str] = "16-bit"
    changes: ClassVar[str] = "entries are rounded to 16 bits"

    def __post_init__(self) -> None:
        one_of("type of 16-bit", self.type, ("fp16", "bf16"))

    def encode(self, x: Tensor, step: int, ranks: tuple[int, ...]) -> Payload:
        return Payload((x.half() if self.type == "fp16" else x.bfloat16(),))

    def decode(self, payload: Payload, n: int) -> Tensor:
        return payload.parts[0]

    def encoding(self, sizes: Sizes) -> Work:
        return work(convert=sizes.nbytes, copy=2 * sizes.n)

    def decoding(self, sizes: Sizes) -> Work:
        return work(convert=sizes.nbytes)

    def finishing(self, sizes: Sizes, members: int) -> Work:
        return work(convert=2 * sizes.nbytes)

    def nbytes(self, sizes: Sizes) -> int | None:
        return 2 * sizes.n

    def average(
        self, x: Tensor, group: Group, mean: Mean, memory: Any, step: int, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Any]:
        sent = self.encode(x, step, group.ranks).parts[0]
        return mean(sent).to(x.dtype), sent.to(x.dtype), memory

    def exchanges(self, members: int, means: Means, sizes: Sizes) -> list[Exchange] | None:
        return means(sizes.n, 2)
