"""The model traced again: at another batch, or in another mode. Kept for that without its weights."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flexsearch.graph.export import Outputs
from flexsearch.graph.importer import Imported, import_forward, import_with_constants


class Source:
    """``model`` with its ``loss`` and an example batch, nested as at import. ``imported``: what they were traced to;
    ``rows``: rows of each input that a sample has."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., Tensor] | None, inputs: Any, targets: Any, imported: Imported,
        rows: Mapping[str, int],
    ) -> None:  # fmt: skip
        self._model, self._loss, self._imported, self._rows = _without_weights(model), loss, imported, rows
        self._original = weakref.ref(model)
        self._inputs, self._targets = on_meta(inputs), on_meta(targets)
        self._steps: dict[int, Imported] = {}
        self._forwards: dict[tuple[int, bool], tuple[Imported, Outputs]] = {}

    def training(self, batch: int) -> Imported:
        """The training step on ``batch`` samples."""
        if batch not in self._steps:
            graph = self._imported.graph
            inputs, targets = self._examples(batch)
            with _read_as(self._original(), self._model):
                self._steps[batch] = import_with_constants(
                    self._model, inputs, self._loss, targets=targets, name=graph.name, tracing=graph.tracing
                )
        return self._steps[batch]

    def forward(self, batch: int, evaluating: bool) -> tuple[Imported, Outputs]:
        """The forward pass on ``batch`` samples, in evaluation mode or as the model was when it was planned."""
        key = batch, evaluating
        if key not in self._forwards:
            with _mode(self._model, evaluating), _read_as(self._original(), self._model):
                graph = self._imported.graph
                changed = (*graph.buffer_updates, *graph.counters)
                self._forwards[key] = import_forward(self._model, self._examples(batch)[0], graph.tracing, changed)
        return self._forwards[key]

    def _examples(self, batch: int) -> tuple[Any, Any]:
        trees = (self._inputs, self._imported.input_names), (self._targets, self._imported.target_names)
        return _resized(*trees[0], self._rows, batch), _resized(*trees[1], self._rows, batch)


def _resized(tree: Any, names: tuple[str, ...], rows: Mapping[str, int], batch: int) -> Any:
    """A nest of tensors without values, with ``batch`` samples."""
    rest = iter(names)

    def one(tensor: Tensor) -> Tensor:
        name = next(rest)
        shape = (batch * rows[name], *tensor.shape[1:]) if name in rows else tuple(tensor.shape)
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return pytree.tree_map_only(Tensor, one, tree)


def on_meta(tree: Any) -> Any:
    """A nest of tensors without their values."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), tree)


def _without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model with parameters on the meta device; its buffers keep their values, which constants are computed
    from. A model that cannot be copied stays itself."""
    stand_ins: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, stand_ins)
    except Exception:  # modules may hold anything: locks, open files, generators
        return model


@contextmanager
def _read_as(original: nn.Module | None, copied: nn.Module) -> Iterator[None]:
    """For a while, the modules of ``original``, if that is still in use, hold the parameters and buffers of their
    copies: a loss with a penalty on the weights reads those of the model that its author knows."""
    copies = dict(copied.named_modules(remove_duplicate=False))
    before = []
    try:
        for name, module in original.named_modules() if original is not None and original is not copied else ():
            own, of_copy = vars(module), vars(copies.get(name, module))
            before.append((own, own["_parameters"], own["_buffers"]))
            own.update(_parameters=of_copy["_parameters"], _buffers=of_copy["_buffers"])
        yield
    finally:
        for own, parameters, buffers in before:
            own.update(_parameters=parameters, _buffers=buffers)


@contextmanager
def _mode(model: nn.Module, evaluating: bool) -> Iterator[None]:
    """The model in evaluation mode for a while, if ``evaluating``."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if evaluating:
            model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
