"""Weights as a safetensors file of Hugging Face, written and read in pieces: each rank touches its own bytes alone.

The format (github.com/huggingface/safetensors): the length of the header as a little-endian uint64, the header as JSON
(name -> dtype, shape, first and last byte), then the tensors, row-major. A weight of several names stands there once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flexsearch.errors import RuntimeFailure
from flexsearch.graph import Box
from flexsearch.runtime.faults import with_all
from flexsearch.runtime.stored import Stored

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Place(NamedTuple):
    """Where a tensor lies in a file: its first byte, type and shape."""

    path: Path
    first: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def array(self, mode: Any) -> np.memmap[Any, Any]:
        """The tensor's elements as integers of their size; only what is touched is read or written."""
        return np.memmap(self.path, f"u{self.dtype.itemsize}", mode, self.first, self.shape or (1,))


def save(folder: str | Path, stored: Stored) -> None:
    """Write ``model.safetensors`` in a folder that all ranks see. All ranks must call it. Raises RuntimeFailure."""
    path, part = Path(folder) / FILE, Path(folder) / f".{FILE}.part"
    names = {original: name for name, original in reversed(stored.names.items())}
    dtypes = _dtypes(stored, names)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names.values():
        if dtypes[name] not in _NAMES:
            raise RuntimeFailure(f"{name!r} is {dtypes[name]}, which safetensors files do not have", "Use save().")
        first, end = end, end + prod(stored.shapes[name]) * dtypes[name].itemsize
        header[name] = {
            "dtype": _NAMES[dtypes[name]], "shape": list(stored.shapes[name]), "data_offsets": [first, end]
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if stored.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.truncate(8 + len(text) + end)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise RuntimeFailure(
                f"no weights can be written to {folder}: {type(error).__name__}: {error}",
                "Name a folder that can be made, on a disk with room.",
            ) from error
    _meet()
    for name in names.values():
        first = 8 + len(text) + header[name]["data_offsets"][0]
        place = _Place(part, first, dtypes[name], stored.shapes[name])
        for chunk in stored.chunks(name):
            if chunk.complete and chunk.first and chunk.tensor.numel():
                array = place.array("r+")
                array[_slices(chunk.box)] = _integers(chunk.tensor).reshape(array[_slices(chunk.box)].shape)
                array.flush()
    _meet()
    if stored.rank == 0:
        os.replace(part, path)
    _meet()


def load(folder: str | Path, stored: Stored) -> None:
    """Read this rank's pieces of what a folder holds: ``model.safetensors``, or the files that its index names. All
    ranks must call it. Raises RuntimeFailure for missing names and other shapes, before anything is changed."""
    places = _read_headers(Path(folder))
    names: dict[str, str] = {}
    for name, original in stored.names.items():
        if name in places:
            names.setdefault(original, name)
    for name, original in stored.names.items():
        if original not in names:
            raise RuntimeFailure(f"the files in {folder} have no {name!r}: they are of another model")
        if places[names[original]].shape != stored.shapes[name]:
            here, there = stored.shapes[name], places[names[original]].shape
            raise RuntimeFailure(f"{name!r} has shape {there} in {folder}, {here} here")
    with torch.no_grad():
        for name in names.values():
            place = places[name]
            for chunk in stored.chunks(name):
                if chunk.tensor.numel():
                    part = np.array(place.array("r")[_slices(chunk.box)])
                    chunk.tensor.copy_(torch.from_numpy(part).view(place.dtype).view(chunk.tensor.shape))
    stored.changed()


def _meet() -> None:
    """Wait for all ranks."""
    with with_all("writing safetensors"):
        dist.barrier()


def _dtypes(stored: Stored, names: Mapping[str, str]) -> dict[str, torch.dtype]:
    """The type of every tensor, which ranks without a piece of it learn from the others."""
    own = {name: chunks[0].tensor.dtype for name in names.values() if (chunks := stored.chunks(name))}
    everyone: list[dict[str, torch.dtype]] = [{}] * dist.get_world_size()
    with with_all("the types of the weights"):
        dist.all_gather_object(everyone, own)
    return {name: dtype for dtypes in everyone for name, dtype in dtypes.items()}


def _integers(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The elements of a tensor as integers of their size."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"u{tensor.element_size()}").reshape(tensor.shape or (1,))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box) or (slice(0, 1),)


def _read_headers(folder: Path) -> dict[str, _Place]:
    index = folder / INDEX
    places: dict[str, _Place] = {}
    try:
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {FILE}
        for name in sorted(files):
            path = folder / Path(name).name
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            for key, entry in header.items():
                if key != "__metadata__":
                    first = 8 + length + int(entry["data_offsets"][0])
                    places[key] = _Place(path, first, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
    except (OSError, ValueError, KeyError, TypeError, MemoryError) as error:
        raise RuntimeFailure(
            f"cannot read safetensors files in {folder}: {type(error).__name__}: {error}",
            f"Name a folder with {FILE}, or with files and {INDEX}.",
        ) from error
    return places
