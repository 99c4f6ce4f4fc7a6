"""A tensor of which this rank holds some regions, as ``torch.distributed.checkpoint`` writes and reads it.

The protocol that its planners look for (``torch.distributed._checkpointable``) is private to PyTorch, and used in this
module alone. DTensor speaks it, too, but knows no pieces such as ours: unequal, overlapping, on some of the ranks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from flexsearch.graph import Box
from flexsearch.runtime.stored import Chunk


class ShardedTensor(Tensor):
    """A tensor of ``shape``; ``chunks``: the disjoint regions that this rank holds. It has no data of its own: saving
    reads the chunks, loading writes them in place."""

    _chunks: Sequence[Chunk]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[Chunk]) -> ShardedTensor:
        tensor: ShardedTensor = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        tensor._chunks = chunks
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTensor(shape={tuple(self.shape)}, regions={[chunk.box for chunk in self._chunks]})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(
            f"{func} on a tensor of which this rank holds pieces only. Save it by torch.distributed.checkpoint.save, "
            "or ask the step for its state_dict()."
        )

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """What is written: each region once, by one of the ranks that hold all of it."""
        return [
            WriteItem(
                index=MetadataIndex(name, _metadata(chunk.box).offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_metadata(chunk.box),
                    properties=TensorProperties.create_from_tensor(chunk.tensor),
                    size=self.size(),
                ),
            )
            for chunk in self._chunks
            if chunk.complete
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What is read."""
        return [_metadata(chunk.box) for chunk in self._chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The chunk at an offset."""
        for chunk in self._chunks:
            if index.offset is None or _metadata(chunk.box).offsets == index.offset:
                return chunk.tensor
        raise ValueError(f"no region of {index.fqn} begins at {index.offset} on this rank")


def _metadata(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size([low for low, _ in box]), sizes=torch.Size([high - low for low, high in box])
    )
