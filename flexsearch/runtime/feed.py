"""What a rank is fed: its samples of each batch, by the names that the graph has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from flexsearch.errors import RuntimeFailure
from flexsearch.graph import Box, Interval
from flexsearch.graph.batch import rows_per_sample
from flexsearch.graph.importer import Imported
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.lower import Entry, Layout, Lowered
from flexsearch.runtime.regions import everywhere, whole


def one_batch(batch: Any, more: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The batch that a step is called with: step(a, b) is step((a, b)). Raises RuntimeFailure for keyword arguments
    that are none of its own."""
    if named:
        raise RuntimeFailure(
            f"a step has no argument {', '.join(named)}",
            "Pass a batch of keyword arguments as one dict: step(batch), not step(**batch).",
        )
    return (batch, *more) if more else batch


_OTHER_SHAPE = (
    "A plan is for one shape: pad or cut samples to it (of Hugging Face: padding='max_length'), or plan for another."
)
_FEWER_SAMPLES = (
    "Take batches from step.loader, or tell all ranks the number of samples, step(batch, samples=n), if the batch is "
    "smaller than the plan's."
)


class Feed:
    """How batches reach the ranks. ``samples[r]``: [low, high) of the global batch's samples that rank r needs."""

    def __init__(self, imported: Imported, lowered: Lowered) -> None:
        self.graph, self.imported = imported.graph, imported
        self.rows = rows_per_sample(self.graph)
        self.ranks = len(lowered.topology.devices)
        self.samples = [self._needed(lowered, rank) for rank in range(self.ranks)]
        self._bounds_of: dict[tuple[str, int, int], tuple[torch.dtype, int, tuple[int, ...], int, int]] = {}
        self.example: tuple[Any, Any] = None, None
        """Inputs and targets, nested as at import; None where that is not known."""

    def _needed(self, lowered: Lowered, rank: int) -> Interval:
        """From the first sample that a rank needs of the first microbatch to the last one of the last."""
        last = (lowered.stages.microbatches - 1) * lowered.graph.batch
        needed = [
            (entry.box[0][0] // self.rows[edge.tensor], -(-entry.box[0][1] // self.rows[edge.tensor]))
            for edge in lowered.edges
            if edge.tensor in self.rows
            for entry in edge.need
            if entry.device == rank
        ]
        return (min(low for low, _ in needed), last + max(high for _, high in needed)) if needed else (0, 0)

    def range_of(self, rank: int, batch: int) -> Interval:
        """The samples of a rank in a batch of so many: of a smaller one than the plan's, the same share."""
        low, high = self.samples[rank]
        return low * batch // self.graph.batch, high * batch // self.graph.batch

    def layout(self, name: str, shape: Sequence[int], batch: int) -> Layout:
        """Where an input of ``shape`` lies when ``batch`` samples have been fed."""
        if name not in self.rows:
            return everywhere(shape, self.ranks)
        return self.shares(shape, self.rows[name], batch)

    def shares(self, shape: Sequence[int], rows: int, batch: int) -> Layout:
        """The layout of a tensor in which each rank has its samples of ``batch``, ``rows`` rows each."""
        ranges = [self.range_of(rank, batch) for rank in range(self.ranks)]
        return tuple(
            Entry(rank, ((low * rows, high * rows), *whole(shape[1:])), 0)
            for rank, (low, high) in enumerate(ranges)
            if low < high
        )

    def named(self, inputs: Any, targets: Any) -> dict[str, Tensor]:
        """The tensors of a batch by the names of the graph's inputs. Raises RuntimeFailure where they do not match."""
        named: dict[str, Tensor] = {}
        kinds = (
            ("inputs", self.imported.input_names, nested_as(self.example[0], self._ordered(inputs))),
            ("targets", self.imported.target_names, nested_as(self.example[1], targets)),
        )
        for what, names, tree in kinds:
            tensors = _tensors(tree)
            if tensors and len(tensors) != len(names):
                raise RuntimeFailure(f"step got {len(tensors)} {what}, the model was imported with {len(names)}")
            # What was made under torch.inference_mode() can be neither sent nor kept for a backward pass.
            named.update(zip(names, (x.clone() if x.is_inference() else x for x in tensors), strict=False))
        return named

    def pair(self, batch: Any) -> tuple[Any, Any]:
        """(inputs, targets) of a batch as data loaders give it: a pair if the loss takes targets, else the inputs."""
        if not self.imported.target_names or batch is None:
            return batch, None
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
        raise RuntimeFailure(
            f"the loss takes targets, so a batch is a pair (inputs, targets), not a {type(batch).__name__}",
            "Pass step((inputs, targets)).",
        )

    def inputs(self, batch: Any) -> Any:
        """The inputs of a batch, beside which targets may stand."""
        tensors = _tensors(batch)
        paired = isinstance(batch, tuple | list) and len(batch) == 2 and len(tensors) > len(self.imported.input_names)
        return self.pair(batch)[0] if paired else batch

    def _ordered(self, inputs: Any) -> Any:
        """Keyword arguments in the order that they were imported in."""
        names = self.imported.keywords
        if not isinstance(inputs, Mapping):
            if names and len(_tensors(inputs)) > 1:
                raise RuntimeFailure(
                    f"step got inputs without names; the model was imported with {', '.join(names)}",
                    "Pass a dict of these.",
                )
            return inputs
        if set(inputs) != set(names):
            passed, wanted = (", ".join(sorted(map(str, keys))) or "none" for keys in (inputs, names))
            raise RuntimeFailure(f"step got the keyword arguments {passed}; the model was imported with {wanted}")
        return {name: inputs[name] for name in names}

    def region(
        self, name: str, tensor: Tensor, rank: int, batch: int, device: torch.device, own: bool = False
    ) -> tuple[Box, Tensor]:
        """The region of an input that a rank was fed, and the data there. ``own``: cut to the rank's samples. Raises
        RuntimeFailure for another dtype or shape."""
        dtype, rows, size, low, high = self._bounds(name, rank, batch)
        shape = tuple(tensor.shape)
        if dtype != tensor.dtype or (shape != size and not (rows and shape == (high - low, *size[1:]))):
            self._refuse(name, tensor, rank, batch)
        fed = tensor.to(device, non_blocking=True)
        if rows and (own or shape != size):
            return ((low, high), *whole(size[1:])), fed if shape != size else fed[low:high]
        return whole(size), fed

    def _bounds(self, name: str, rank: int, batch: int) -> tuple[torch.dtype, int, tuple[int, ...], int, int]:
        """Of an input: its dtype, rows per sample, the shape that a batch has, [low, high) of the rank's rows."""
        bounds = self._bounds_of.get((name, rank, batch))
        if bounds is None:
            spec, rows = self.graph.tensor[name], self.rows.get(name, 0)
            size = (batch * rows, *spec.shape[1:]) if rows else tuple(spec.shape)
            low, high = (bound * rows for bound in self.range_of(rank, batch))
            self._bounds_of[name, rank, batch] = bounds = dtype_of(spec.dtype), rows, size, low, high
        return bounds

    def _refuse(self, name: str, tensor: Tensor, rank: int, batch: int) -> NoReturn:
        """Say which shapes an input may have."""
        _, rows, size, low, high = self._bounds(name, rank, batch)
        shapes = {size: "the whole batch"}
        if rows:
            shapes.setdefault((high - low, *size[1:]), f"rows {low} to {high} of it")
        wanted = " or ".join(f"{shape} ({what})" for shape, what in shapes.items())
        remedy = ""
        if tensor.dim() == len(size) and tuple(tensor.shape[1:]) != size[1:]:
            remedy = _OTHER_SHAPE
        elif rows and tensor.dim() and tensor.shape[0] < size[0]:
            remedy = _FEWER_SAMPLES
        raise RuntimeFailure(
            f"{name} must be {self.graph.tensor[name].dtype} of shape {wanted}, not "
            f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}", remedy,
        )  # fmt: skip


def _tensors(tree: Any) -> list[Tensor]:
    """Those in a nest, most of which are one tensor or a tuple of some."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, tuple) and all(isinstance(leaf, Tensor) for leaf in tree):
        return list(tree)
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


_VALUES = (bool, int, float, complex, str)


def nested_as(example: Any, tree: Any) -> Any:
    """A part of a batch with its dictionaries in the order of the example's. Raises RuntimeFailure where a value that
    is no tensor, which is a part of the graph, is another one."""
    if isinstance(example, dict) and isinstance(tree, Mapping) and set(example) == set(tree):
        return {name: nested_as(part, tree[name]) for name, part in example.items()}
    if isinstance(example, tuple | list) and isinstance(tree, tuple | list) and len(example) == len(tree):
        return tuple(nested_as(part, other) for part, other in zip(example, tree, strict=True))
    if isinstance(example, _VALUES) and isinstance(tree, _VALUES) and example != tree:
        raise RuntimeFailure(
            f"step got {tree!r} in the batch, where the graph computes with {example!r}, as imported",
            "Make it a tensor where the plan is made, or plan for each value.",
        )
    return tree


def sample_order(length: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """The order of a data set's samples in an epoch, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator).tolist() if shuffle else list(range(length))


def batches(order: Sequence[int], size: int, drop_last: bool) -> Iterator[Sequence[int]]:
    """``order`` in batches of ``size``; the last one may be smaller, unless it is dropped."""
    for first in range(0, len(order), size):
        batch = order[first : first + size]
        if len(batch) == size or not drop_last:
            yield batch


def load(
    dataset: Dataset[Any] | Sequence[Any], parts: Iterable[Sequence[int]], options: Mapping[str, Any]
) -> Iterator[Any]:
    """A rank's part of each batch by a DataLoader; None for a part without samples."""
    indices = [list(part) for part in parts]
    loader = iter(DataLoader(cast(Dataset[Any], dataset), batch_sampler=[part for part in indices if part], **options))
    for part in indices:
        yield next(loader) if part else None


class Loader:
    """A rank's parts of the batches of a data set; each iteration is one epoch, and the next one another.

    ``batches_of(epoch)``: the parts; ``length``: how many; ``epoch``: the first."""

    def __init__(self, batches_of: Callable[[int], Iterator[Any]], length: int, epoch: int) -> None:
        self._batches_of, self._length, self._epoch = batches_of, length, epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._batches_of(epoch)
