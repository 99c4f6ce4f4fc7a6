"""What a rank keeps of a model: its pieces of weights and buffers, and where the other ranks' pieces are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexsearch.errors import RuntimeFailure
from flexsearch.graph import Box, intersect
from flexsearch.graph.fold import derive, sources
from flexsearch.graph.importer import Imported
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import extent, in_range, preferred
from flexsearch.lower import Entry, Layout, Lowered, bounding
from flexsearch.runtime.faults import with_all
from flexsearch.runtime.group import fingerprint
from flexsearch.runtime.microbatches import boxes_in_batch
from flexsearch.runtime.parts import cut
from flexsearch.runtime.regions import Mover, disjoint, everywhere, uncovered, whole
from flexsearch.runtime.state import check_meta, state_names, transient, versions_of, with_versions


class Chunk(NamedTuple):
    """A region of a tensor of the model that this rank holds. ``box``: in the model's own shape; ``tensor``: a view of
    what is stored; ``complete``: whether it is all of one of the regions that the ranks' pieces cut the tensor into,
    which are written once each; ``first``: whether no rank before this one holds that region."""

    box: Box
    tensor: Tensor
    complete: bool
    first: bool


class Stored:
    """The pieces of one rank. ``weights``: parameters by name; ``fixed``: buffers and constants that a step reads, as
    (region held, tensor); ``rest``: of weights that a step reads in part, the regions that no step reads, on the first
    rank that stores a part; ``counters``: buffers that count steps; ``other``: what the loss does not depend on,
    whole."""

    def __init__(
        self, model: nn.Module, imported: Imported, lowered: Lowered, rank: int, device: torch.device,
        initialised: bool = False,
    ) -> None:  # fmt: skip
        self.graph, self.rank, self.device = imported.graph, rank, device
        self.names = state_names(model)
        """Name in the model's state -> name in the graph."""
        tensors = model.state_dict(keep_vars=True)
        self._versions = versions_of(tensors)
        self.shapes = {name: tuple(tensors[name].shape) for name in self.names}
        self.layouts = layouts_of(lowered)
        self._imported = imported
        self._transient = transient(model, set(self.names.values()))
        self.counters: dict[str, Tensor] = {}
        self.other: dict[str, Tensor] = {}
        self.weights: dict[str, nn.Parameter] = {}
        self.fixed: dict[str, tuple[Box, Tensor]] = {}
        self.rest: dict[str, list[tuple[Box, nn.Parameter]]] = {}
        self._read: dict[str, Layout] = {}
        """By name, the part of its layout that steps read, where that is not all."""
        check_meta(imported, self._transient, initialised)
        everything = dict(model.named_parameters()) | dict(model.named_buffers())
        self.loaded = not any(x.is_meta for x in everything.values())
        """Whether the pieces have values yet."""
        self.loads = 0
        """How often they have got others since."""
        differs = _take_values_of_rank_0(everything, device)
        self._keep_weights(everything)
        self._frozen = [(name, p) for name, p in self.parameters if not p.requires_grad]
        self._keep_constants(lowered)
        self._keep_buffers(model)
        self._keep_unused(model)
        self._buffers = {
            name: _on_cpu(tensor).clone()
            for name, tensor in model.named_buffers()
            if any(name in sources(constant) for constant in imported.derived.values())
        }
        """Buffers that constants are computed from."""
        if self.loaded and differs:
            self._derive()

    # ---- set-up

    def _piece(self, box: Box, tensor: Tensor) -> Tensor:
        """A copy of a region, without values if the model has none."""
        if tensor.is_meta:
            return torch.zeros(extent(box), dtype=tensor.dtype, device=self.device)
        return preferred(cut(tensor, whole(tensor.shape), box).to(self.device, copy=True).contiguous())

    def _keep_weights(self, tensors: Mapping[str, Tensor]) -> None:
        for name, layout in self.layouts.items():
            spec = self.graph.tensor[name]
            if spec.kind != "parameter":
                continue
            values = tensors[name].detach().reshape(spec.shape)  # an LSTM's gates have a dimension of their own
            for entry in layout:
                if entry.device == self.rank:
                    self.weights[name] = nn.Parameter(self._piece(entry.box, values), spec.requires_grad)
            missing = uncovered(whole(spec.shape), (entry.box for entry in layout))
            if missing:
                first = layout[0].device
                self._read[name] = layout
                self.layouts[name] = (*layout, *(Entry(first, box, 0) for box in missing))
                if first == self.rank:
                    self.rest[name] = [
                        (box, nn.Parameter(self._piece(box, values), spec.requires_grad)) for box in missing
                    ]

    def _keep_constants(self, lowered: Lowered) -> None:
        for name, box in needs_of(lowered, "constant", self.rank).items():
            values = self._imported.constants[name]
            values = torch.zeros_like(values, device="cpu") if values.is_meta else values
            part = cut(values, whole(values.shape), box).to(self.device, copy=True)
            self.fixed[name] = box, in_range(part, dtype_of(lowered.graph.tensor[name].dtype))

    def _keep_buffers(self, model: nn.Module) -> None:
        for name, tensor in model.named_buffers():
            values = torch.zeros_like(tensor, device=self.device) if tensor.is_meta else tensor.detach()
            if name in self.layouts:
                for entry in self.layouts[name]:
                    if entry.device == self.rank:
                        self.fixed[name] = (
                            entry.box,
                            cut(values, whole(values.shape), entry.box).to(self.device, copy=True),
                        )
            elif name in self.graph.counters:
                self.counters[name] = values.clone()
            else:
                self.other[name] = values.cpu().clone()

    def _keep_unused(self, model: nn.Module) -> None:
        """Parameters that the loss does not depend on stay what they are."""
        for name, tensor in model.named_parameters():
            if name not in self.layouts:
                values = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().cpu().clone()
                self.other[name] = values

    # ---- pieces

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """Whatever steps do to buffers meanwhile (running statistics, counters), they then are as they were."""
        updated = [self.fixed[name][1] for name in self.graph.buffer_updates if name in self.fixed]
        tensors = [*updated, *self.counters.values()]
        before = [tensor.clone() for tensor in tensors]
        try:
            yield
        finally:
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)

    @property
    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by name: pieces of weights, and those rows of them that no step reads."""
        for name, parameter in self.weights.items():
            yield name, parameter
            for k, (_, rest) in enumerate(self.rest.get(name, ())):
                yield f"{name}.unread.{k}", rest

    @property
    def everywhere(self) -> bool:
        """Whether every rank holds every weight whole."""
        ranks = dist.get_world_size()
        specs = [self.graph.tensor[name] for name in self.layouts if self.graph.tensor[name].kind == "parameter"]
        return all({(e.device, e.box) for e in self.layouts[s.name]} == {(r, whole(s.shape)) for r in range(ranks)}
                   for s in specs)  # fmt: skip

    def check_frozen(self) -> None:
        """Raise RuntimeFailure if a weight has been unfrozen of which the plan makes no gradient."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeFailure(
                    f"{name!r} requires a gradient, but was frozen when the plan was made, which makes none of it",
                    "Plan with all weights that are ever trained, and freeze some in the loop: requires_grad_(False).",
                )

    def read_layout(self, name: str) -> Layout:
        """Where the pieces of a tensor lie that steps read."""
        return self._read.get(name, self.layouts.get(name, ()))

    def pieces(self, name: str) -> list[tuple[Box, Tensor]]:
        """What this rank holds of a tensor of the graph, in the order of its layout: (region, stored tensor)."""
        held: list[tuple[Box, Tensor]] = []
        if name in self.weights:
            box = next(entry.box for entry in self.layouts[name] if entry.device == self.rank)
            held.append((box, self.weights[name]))
        held += self.rest.get(name, ())
        if name in self.fixed:
            held.append(self.fixed[name])
        return held

    def entries(self, name: str) -> dict[int, Tensor]:
        """The same by index into the layout."""
        own = [k for k, entry in enumerate(self.layouts[name]) if entry.device == self.rank]
        return {k: tensor.detach() for k, (_, tensor) in zip(own, self.pieces(name), strict=True)}

    def chunks(self, name: str, of: Callable[[Tensor], Tensor | None] = lambda tensor: tensor) -> list[Chunk]:
        """What this rank holds of a tensor of the model's state, in disjoint regions. ``of``: what to show in place of
        a stored tensor, of the same shape (its gradient, the optimizer's state of it); None: nothing."""
        original, shape = self.names[name], self.shapes[name]
        if original not in self.layouts:
            tensor = self.counters.get(original, self.other.get(original))
            shown = of(tensor) if tensor is not None else None
            return [] if shown is None else [Chunk(whole(shape), shown.detach(), True, self.rank == 0)]
        result = []
        for box, stored in self.pieces(original):
            if (tensor := of(stored)) is None:
                continue
            for region, holders in self._regions[original]:
                if (common := intersect(box, region)) is not None:
                    complete, first = common == region, holders[0] == self.rank
                    for own, part in _in_shape(common, self.graph.tensor[original].shape, shape):
                        result.append(Chunk(own, cut(tensor.detach(), box, part).view(extent(own)), complete, first))
        return result

    def model_shape(self, name: str) -> tuple[int, ...]:
        """Shape that the model gives a tensor of the graph."""
        return next(self.shapes[own] for own, original in self.names.items() if original == name)

    def gradients(self) -> list[Chunk]:
        """The gradients that this rank holds, in disjoint regions."""
        first = {original: name for name, original in reversed(self.names.items()) if original in self.layouts}
        return [chunk for name in first.values() for chunk in self.chunks(name, lambda tensor: tensor.grad)]

    @cached_property
    def _regions(self) -> dict[str, list[tuple[Box, list[int]]]]:
        """By tensor, the disjoint regions that the pieces of all ranks cut it into, with the ranks that hold them."""
        result = {}
        for name, layout in self.layouts.items():
            parts = disjoint([entry.box for entry in layout])
            result[name] = [
                (region, [e.device for e in layout if e.box == entry.box])
                for entry, regions in zip(layout, parts, strict=True)
                for region in regions
            ]
        return result

    # ---- the whole state

    def whole(self, name: str) -> Tensor:
        """All of a tensor of the graph that lies in pieces, on the CPU. All ranks must call it."""
        spec, ranks = self.graph.tensor[name], dist.get_world_size()
        copies = tuple(Entry(entry.device, entry.box, 0) for entry in self.layouts[name])
        mover = Mover(copies, everywhere(spec.shape, ranks), self.rank, dtype_of(spec.dtype))
        return mover.run(self.entries(name), self.device)[self.rank].cpu()

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's state under its own names, on every rank (CPU tensors). All ranks must call it."""
        state: dict[str, Tensor] = {}
        done: dict[str, Tensor] = {}
        for name, original in self.names.items():
            if original in self.layouts and original not in done:
                done[original] = self.whole(original)
            tensor = done.get(original, self.counters.get(original, self.other.get(original)))
            if tensor is not None:
                state[name] = tensor.reshape(self.shapes[name]).clone()
        return with_versions(state, self._versions)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a whole model's state. Raises RuntimeFailure on missing or unknown names or wrong shapes, before
        anything is changed."""
        if not isinstance(state, Mapping):
            raise RuntimeFailure(
                f"a state is a dict of tensors by name, not a {type(state).__name__}",
                "Give what state_dict() of the model or of a step returned.",
            )
        for name, shape in self.shapes.items():
            if name not in state:
                raise RuntimeFailure(f"the state has no {name!r}; it holds {len(state)} names for another model?")
            if not isinstance(state[name], Tensor):
                raise RuntimeFailure(f"{name!r} is a {type(state[name]).__name__} in the state, and no tensor")
            if tuple(state[name].shape) != shape:
                raise RuntimeFailure(f"{name!r} has shape {tuple(state[name].shape)} in the state, {shape} here")
        others = (name for name, x in state.items() if isinstance(x, Tensor) and not name.endswith("_extra_state"))
        if (unknown := next((name for name in others if name not in self.shapes), None)) is not None:
            raise RuntimeFailure(f"the state has {unknown!r}, which this model has not", "Leave it out.")
        for name in self.names:
            self.set(name, state[name])
        self._derive({original: state[name] for name, original in self.names.items()})

    @torch.no_grad()
    def set(self, name: str, values: Tensor) -> None:
        """Take this rank's pieces of a tensor of the model's state out of the whole of it."""
        for chunk in self.chunks(name):
            chunk.tensor.copy_(cut(values, whole(values.shape), chunk.box))

    def set_transient(self, name: str, values: Tensor) -> None:
        """Take over a buffer that no state has. ``changed`` then computes what follows from it."""
        for rows in (self._transient, self._buffers, self.other):
            if name in rows:
                rows[name] = values.clone()
        if name in self.fixed:
            box, tensor = self.fixed[name]
            tensor.copy_(cut(values, whole(values.shape), box))

    def changed(self) -> None:
        """Compute what follows from the state, after its pieces have got other values. All ranks must call it."""
        buffers = [name for name in self._buffers if name in self.layouts]
        self._derive({**{name: self.whole(name) for name in buffers}, **self.other})

    def buffers_of(self, imported: Imported) -> dict[str, Tensor]:
        """Values that buffers now have from which constants of another graph of the same model are computed. All ranks
        must call it."""
        values = {**self._transient, **self.other, **self._buffers}
        wanted = {name for constant in imported.derived.values() for name in sources(constant)}
        return values | {name: self.whole(name) for name in sorted(wanted & set(self.layouts))}

    def _derive(self, state: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Compute the constants that follow from buffers, whose values are ``state`` where that has them."""
        self._buffers = {name: _on_cpu(state.get(name, tensor)) for name, tensor in self._buffers.items()}
        for name, constant in self._imported.derived.items():
            if name in self.fixed:
                box, tensor = self.fixed[name]
                values = derive(constant, {**self._transient, **self._buffers})
                tensor.copy_(in_range(cut(values, whole(values.shape), box), tensor.dtype))
        self.loaded = True
        self.loads += 1


def _on_cpu(tensor: Tensor) -> Tensor:
    """The tensor there, unless it has no values."""
    return tensor.detach() if tensor.is_meta else tensor.detach().cpu()


def _take_values_of_rank_0(tensors: Mapping[str, Tensor], device: torch.device) -> bool:
    """Where the ranks' models differ, have that of rank 0. Whether they did."""
    prints: list[str | None] = [None] * dist.get_world_size()
    with with_all("comparing the models"):
        dist.all_gather_object(prints, fingerprint(tensors))
    if len(set(prints)) == 1:
        return False
    for tensor in (x for x in tensors.values() if not x.is_meta):
        moved = tensor.detach().to(device)
        with with_all("taking the values of rank 0's model"):
            dist.broadcast(moved, 0)
        tensor.data.copy_(moved)
    return True


def layouts_of(lowered: Lowered) -> dict[str, Layout]:
    """By name, where weights are stored and buffers that a step reads: one region on each device that has any."""
    layouts = {weight.tensor: weight.plan.storage for weight in lowered.weights}
    needs: dict[str, dict[int, list[Box]]] = {}
    for edge in lowered.edges:
        if lowered.graph.tensor[edge.tensor].kind == "buffer":
            for entry in edge.need:
                needs.setdefault(edge.tensor, {}).setdefault(entry.device, []).append(entry.box)
    for name, of_device in needs.items():
        layouts[name] = tuple(Entry(device, bounding(boxes), 0) for device, boxes in sorted(of_device.items()))
    return layouts


def needs_of(lowered: Lowered, kind: str, rank: int) -> dict[str, Box]:
    """Bounding box of what a rank needs of each tensor of a kind, for all microbatches."""
    boxes: dict[str, list[Box]] = {}
    for edge in lowered.edges:
        if lowered.graph.tensor[edge.tensor].kind == kind:
            needed = [e.box for e in edge.need if e.device == rank]
            boxes.setdefault(edge.tensor, []).extend(
                box for part in needed for box in boxes_in_batch(lowered, edge.tensor, part)
            )
    return {name: bounding(needed) for name, needed in boxes.items() if needed}


def _in_shape(box: Box, shape: Sequence[int], own: Sequence[int]) -> list[tuple[Box, Box]]:
    """A region of a tensor of the graph, in the shape that the model's tensor has: (region there, region here). They
    differ where gates of a recurrent layer have a dimension of their own: each gate is then a region."""
    if tuple(shape) == tuple(own):
        return [(box, box)]
    (first, last), (low, high), *others = box
    size = shape[1]
    return [
        ((((g * size + low), (g * size + high)), *others), ((g, g + 1), (low, high), *others))
        for g in range(first, last)
    ]
