"""From a PyTorch model and its loss to an operator graph, through ``torch.export``.

The exported program is functional, and decomposed only where no kind of operator knows a torch operator.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from flexsearch.errors import ImportModelError
from flexsearch.graph.export import Loss, Outputs, export_step
from flexsearch.graph.holders import Holder
from flexsearch.graph.imported import Imported
from flexsearch.graph.loading import Loaded, load_callable
from flexsearch.graph.model import OperatorGraph, Tracing
from flexsearch.graph.prepare import plain, refuse_sharded, unwrapped
from flexsearch.graph.refusals import Attributes
from flexsearch.graph.walk import Walk

__all__ = ["Imported", "Loaded", "import_model", "import_with_constants", "load_callable"]


def import_model(
    model: nn.Module,
    example_inputs: Any,
    loss: Loss | None = None,
    *,
    targets: Any = None,
    name: str | None = None,
    opaque: bool = False,
    batch_norm_groups: int = 1,
) -> OperatorGraph:
    """The operator graph of one training step, ``loss(model(*example_inputs), targets)``.

    ``example_inputs``: a tensor, a tuple of arguments or a dict of keyword arguments (a batch as a data collator gives
    it), with the global batch as first dimension; shapes are static. A pair (inputs, targets), as data loaders give it,
    where ``loss`` needs targets and none are passed. ``loss``: called with the model's output and ``targets`` (with the
    output alone if those are None) and returns a scalar; None if the model itself returns it, or a mapping, dataclass
    or named tuple with an item "loss" (``ModelOutput`` of Hugging Face). The model is traced in the mode it is in
    (``model.train()``, ``model.eval()``), on any device; on the meta device it, and a batch, take no memory. What wraps
    it (``torch.compile``, DistributedDataParallel) is taken off; a KV cache is turned off, with a warning. ``opaque``:
    import operators outside the table unsplittable instead of refusing them. ``batch_norm_groups``: let batch
    normalisation in training take the statistics of so many equal parts of the batch, each on its own, which is another
    function than that of the whole batch: what DDP over as many ranks computes (ghost batch normalisation, Hoffer et
    al., 2017). Running statistics are those of the first part, as DDP keeps its first rank's.
    Raises ImportModelError that names the operator, the layer and the line.
    """
    tracing = _tracing(opaque, batch_norm_groups)
    imported = _imported(model, example_inputs, loss, targets, name, tracing)
    for note in imported.notes:
        warnings.warn(note, stacklevel=2)
    return imported.graph


def import_with_constants(
    model: nn.Module,
    example_inputs: Any,
    loss: Loss | None = None,
    *,
    targets: Any = None,
    name: str | None = None,
    tracing: Tracing | None = None,
) -> Imported:
    """As :func:`import_model`, with the values of constants and the names of the arguments."""
    imported = _imported(model, example_inputs, loss, targets, name, tracing or Tracing())
    if not any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        dict(imported.constants)  # now, while the buffers that they are computed from are what they are
    return imported


def import_forward(
    model: nn.Module, example_inputs: Any, tracing: Tracing, changed: Collection[str] = ()
) -> tuple[Imported, Outputs]:
    """The forward pass of ``model`` in the mode it is in: a graph without a loss that changes no buffer, with the names
    of the tensors that the model returns, and how they are nested. ``changed``: buffers that training changes, so that
    no constant may be computed from them. Raises ImportModelError."""
    outputs = Outputs()
    imported = _imported(model, example_inputs, None, None, None, tracing, outputs, changed)
    return replace(imported, graph=_forward_graph(imported.graph, imported.outputs)), outputs


def _forward_graph(graph: OperatorGraph, outputs: Sequence[str]) -> OperatorGraph:
    """What of a graph its outputs depend on."""
    needed, operators = {t.name for t in graph.of_kind("input")} | set(outputs), []
    for op in reversed(graph.operators):
        if needed.intersection(op.outputs):
            needed.update((*op.inputs, *op.outputs))
            operators.append(op)
    tensors = tuple(t for t in graph.tensors if t.name in needed)
    return OperatorGraph(
        name=graph.name, tensors=tensors, operators=tuple(operators[::-1]), loss="", tracing=graph.tracing
    )


def _imported(
    model: nn.Module,
    example_inputs: Any,
    loss: Loss | None,
    targets: Any,
    name: str | None,
    tracing: Tracing,
    outputs: Outputs | None = None,
    changed: Collection[str] = (),
) -> Imported:
    """As :func:`import_with_constants`, whose values are still to be computed."""
    if not isinstance(model, nn.Module):
        raise ImportModelError(f"the model must be an nn.Module, not {type(model).__name__}")
    example_inputs, targets = inputs_and_targets(example_inputs, targets, loss)
    if targets is not None and loss is None:
        raise ImportModelError("targets were given without a loss; give loss=..., or pass them as inputs of the model")
    model = unwrapped(model)
    refuse_sharded(model)
    args, kwargs = _arguments(example_inputs)
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        records = [type(x).__name__ for x in pytree.tree_leaves((args, kwargs)) if is_dataclass(x)]
        raise ImportModelError(
            "there is no tensor among the example inputs",
            f"Say that {records[0]} holds tensors: torch.export.register_dataclass({records[0]})."
            if records
            else "Give a batch as the model takes it, of the global size.",
        )
    for leaf in pytree.tree_leaves((args, kwargs, targets)):
        if isinstance(leaf, torch.Tensor) and not leaf.numel():
            raise ImportModelError(
                f"the example batch has a tensor of shape {tuple(leaf.shape)}, which has no elements",
                "Give a batch of the global size, such as a data loader's first one.",
            )

    def once() -> Imported:
        with plain(model, kwargs) as notes:
            attributes.start()
            program, blocks = export_step(model, loss, args, kwargs, targets, outputs, attributes)
        walk = Walk(program, blocks, model, tracing, changed)
        inputs = walk.arguments((args, kwargs), "input")
        of_targets = walk.arguments(targets, "target")
        imported = walk.run(name or type(model).__name__, inputs, of_targets, outputs is not None)
        return replace(imported, keywords=tuple(kwargs), notes=tuple(notes))

    attributes = Attributes(model, loss)
    imported = once()
    _check_values(attributes, imported, once)
    return imported


def _check_values(attributes: Attributes, imported: Imported, again: Callable[[], Imported]) -> None:
    """Raise ImportModelError if the model computes something else with what a call has changed of its attributes."""
    changed = dict(attributes.changed)

    def reads(keys: Iterable[tuple[Holder, str]]) -> bool:
        with attributes.later({key: changed[key] for key in keys}):
            return not _computes_the_same(imported, again())

    if not changed or not reads(changed):
        return
    by_name: dict[str, list[tuple[Holder, str]]] = {}
    for key in changed:
        by_name.setdefault(key[1], []).append(key)
    *others, last = by_name.values()
    first, *_ = next((keys for keys in others if reads(keys)), last)
    raise attributes.error(first, changed[first])


def _computes_the_same(first: Imported, second: Imported) -> bool:
    return first.graph.content_hash() == second.graph.content_hash() and all(
        torch.equal(x, second.constants[name]) for name, x in first.constants.items() if not x.is_meta
    )


def inputs_and_targets(batch: Any, targets: Any, loss: Loss | None) -> tuple[Any, Any]:
    """A batch as data loaders give it, (inputs, targets), as the two, where ``loss`` needs two arguments and no targets
    are passed; else what is passed."""
    if loss is None or targets is not None or not isinstance(batch, tuple | list) or len(batch) != 2:
        return batch, targets
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
    except (TypeError, ValueError):  # a function of C
        return batch, targets
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    return (batch[0], batch[1]) if len(needed) == 2 else (batch, targets)


def _tracing(opaque: bool, batch_norm_groups: int) -> Tracing:
    if batch_norm_groups < 1:
        raise ImportModelError(f"batch_norm_groups must be at least 1, not {batch_norm_groups}")
    return Tracing(opaque=opaque, batch_norm_groups=batch_norm_groups)


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
