"""Stand-ins for tensors without values: a model on the meta device is traced as one on the CPU.

On the meta device, what a model makes of Python's numbers has no values, either: the index of ``x[:, [0, 2]]``, or
``torch.tensor([0.5, 2.0], device=x.device)``. PyTorch's fake tensors have a shape and no memory, too, but are said to
be on the CPU, where such numbers stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flexsearch.graph.private import fake_tensors


class StandIns:
    """Of one model. ``needed``: whether a part of it is on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
        self.needed = any(x.is_meta for x in tensors.values())
        self._mode = fake_tensors()
        self._device = next((x.device for x in tensors.values() if not self.needed), torch.device("cpu"))
        self._by_original: dict[int, Tensor] = {}
        self._originals: dict[int, Tensor] = {}
        self._places: list[tuple[dict[str, Any], str, Any, Any]] = []
        """A dictionary of a module, a name there, what it holds, and what it is to hold."""
        for module in model.modules() if self.needed else ():
            own = vars(module)
            for store in (own["_parameters"], own["_buffers"], own):
                for name, value in store.items():
                    if isinstance(value, Tensor | list | tuple) or (isinstance(value, dict) and name[0] != "_"):
                        self._replace(store, name, value)

    def _replace(self, store: dict[str, Any], name: str, value: Any) -> None:
        instead = pytree.tree_map_only(Tensor, self._of, value)
        if any(a is not b for a, b in zip(pytree.tree_leaves(value), pytree.tree_leaves(instead), strict=True)):
            self._places.append((store, name, value, instead))

    def of(self, tree: Any) -> Any:
        """A nest of inputs, each a tensor of its own: a batch may have one twice (labels that are the tokens), but what
        is traced reads each under its own name. Without values and memory, where they or the model have none: they are
        as large as the global batch."""
        seen: set[int] = set()

        def own(tensor: Tensor) -> Tensor:
            again = id(tensor) in seen
            seen.add(id(tensor))
            if self.needed or tensor.is_meta:
                return self._empty(tensor)
            return tensor.detach().clone() if again else tensor

        return pytree.tree_map_only(Tensor, own, tree)

    def put_in(self) -> None:
        """Have the model hold the stand-ins."""
        for store, name, _, instead in self._places:
            store[name] = instead

    def take_out(self) -> None:
        """Have the model hold its own tensors."""
        for store, name, value, _ in self._places:
            store[name] = value

    def restore(self, program: torch.export.ExportedProgram) -> None:
        """Have an exported program hold the model's own tensors."""
        for store in (program.state_dict, program.constants):
            for name, tensor in store.items():
                if id(tensor) in self._originals:
                    store[name] = self._originals[id(tensor)]

    def _of(self, tensor: Tensor) -> Tensor:
        """What stands in for a tensor of the model; itself if it can stay."""
        if self._mode is not None and tensor.device.type == "cpu":
            return tensor
        if (stand_in := self._by_original.get(id(tensor))) is None:
            replacement = self._empty(tensor)
            if isinstance(tensor, nn.Parameter):
                replacement = nn.Parameter(replacement, tensor.requires_grad)
            elif self._mode is not None and not tensor.is_meta:
                replacement = tensor.cpu()  # constants may follow from its values
            stand_in = self._by_original[id(tensor)] = replacement
            self._originals[id(replacement)] = tensor
        return stand_in

    def _empty(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape without values."""
        device = torch.device("meta") if self.needed and self._mode is None else self._device
        with self._mode or nullcontext():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@contextmanager
def on_one_device(model: nn.Module) -> Iterator[StandIns]:
    """Where a part of the model is on the meta device, have all of it on one device for a while: tracing takes no two.

    So buffers that no state brings can have their values already."""
    stand_ins = StandIns(model)
    stand_ins.put_in()
    try:
        yield stand_ins
    finally:
        stand_ins.take_out()
