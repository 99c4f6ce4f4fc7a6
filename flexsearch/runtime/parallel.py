"""``parallelize``: a model, split as a strategy says, with a training step that is called like a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flexsearch.cost import Costs
from flexsearch.errors import RuntimeFailure, StrategyError
from flexsearch.graph import Box, Interval
from flexsearch.graph.fold import derive
from flexsearch.graph.importer import Imported, import_with_constants
from flexsearch.graph.ops import KernelContext
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import extent, preferred
from flexsearch.graph.prepare import unwrapped
from flexsearch.lower import Entry, Lowered, bounding, lower_for_ranks
from flexsearch.runtime.engine import Engine
from flexsearch.runtime.group import agree, fingerprint, join
from flexsearch.runtime.listing import listing
from flexsearch.runtime.microbatches import boxes_in_batch
from flexsearch.runtime.program import compile_program
from flexsearch.runtime.state import check_meta, rows_per_sample, state_names, transient, unread
from flexsearch.runtime.wire import Wire, cut
from flexsearch.strategy import Strategy

Loss = Callable[..., Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def parallelize(
    model: nn.Module,
    strategy: Strategy,
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer,
    inputs: Any = None,
    targets: Any = None,
    seed: int = 0,
    timeout_s: float = 300.0,
    fuse: bool = True,
) -> Parallel:
    """Split ``model`` over the ranks of this run (one process for each device of the strategy's cluster, torchrun's
    environment or an existing process group).

    ``loss(output, targets)`` as it was given to ``import_model``. ``optimizer`` gets this rank's parts of the weights;
    any optimizer that treats elements alike (SGD, Adam, ...) computes what it would on the whole weights. ``inputs``,
    ``targets``: examples, only needed if they were nested or keyword arguments at import. ``seed``: of dropout masks.
    ``timeout_s``: after which a silent rank is an error. ``fuse=False`` runs operators one by one, for measuring. Where
    the ranks' models differ, rank 0's weights are taken. Raises StrategyError if the strategy was made for another
    model, RuntimeFailure if the ranks do not fit it or each other.
    """

    imported = _trace(model, strategy, loss, inputs, targets)
    return distribute(model, imported, strategy, optimizer, seed=seed, timeout_s=timeout_s, fuse=fuse)


def distribute(
    model: nn.Module,
    imported: Imported,
    strategy: Strategy,
    optimizer: MakeOptimizer,
    *,
    seed: int = 0,
    timeout_s: float = 300.0,
    fuse: bool = True,
) -> Parallel:
    """:func:`parallelize` for a model that has been imported already (``import_with_constants``)."""
    device = join(strategy.cluster, timeout_s)
    lowered = lower_for_ranks(imported.graph, strategy, strategy.cluster, Costs(imported.graph, strategy.cluster))
    agree({
        "graph": imported.graph.content_hash(), "topology": strategy.topology.hash, "strategy": strategy.content_hash(),
        "torch version": torch.__version__,
    })  # fmt: skip
    return Parallel(model, imported, lowered, device, optimizer, seed, timeout_s, fuse)


def _trace(model: nn.Module, strategy: Strategy, loss: Loss | None, inputs: Any, targets: Any) -> Imported:
    """Import the model again with inputs of the strategy's shapes, and check that the graph is the same."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    examples = {s.name: torch.zeros(s.shape, dtype=dtype_of(s.dtype), device=device) for s in strategy.inputs}
    if inputs is None:
        inputs = tuple(tensor for name, tensor in examples.items() if not name.startswith("target"))
    if targets is None:
        found = tuple(tensor for name, tensor in examples.items() if name.startswith("target"))
        targets = found[0] if len(found) == 1 else found or None
    made = strategy.graph
    imported = import_with_constants(model, inputs, loss, targets=targets, name=made.name, tracing=made.tracing)
    if imported.graph.content_hash() != made.hash:
        raise StrategyError(
            f"this strategy was made for graph {made.name!r} ({made.hash}); this model with this "
            f"loss gives another one ({imported.graph.content_hash()}). Give the model and loss it was made for, or "
            "run `flexsearch import` and `flexsearch optimize` again."
        )
    return imported


class Parallel:
    """A model split over the ranks. Made by :func:`parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        imported: Imported,
        lowered: Lowered,
        device: torch.device,
        optimizer: MakeOptimizer,
        seed: int,
        timeout_s: float,
        fuse: bool,
    ) -> None:
        model = unwrapped(model)
        self.rank, self.device, self.lowered, self.graph = dist.get_rank(), device, lowered, imported.graph
        self._names = state_names(model)
        self._rows = rows_per_sample(self.graph)
        state = model.state_dict()
        self._shapes = {name: tuple(state[name].shape) for name in self._names}
        self._storage = {
            weight.tensor: entry
            for weight in lowered.weights
            for entry in weight.plan.storage
            if entry.device == self.rank
        }
        self._buffers = self._held("buffer")
        self._counters: dict[str, Tensor] = {}
        self._other: dict[str, Tensor] = {}
        self.weights: dict[str, nn.Parameter] = {}
        """This rank's part of each weight it stores, by name."""
        self._fixed: dict[str, tuple[Box, Tensor]] = {}
        self._unread: dict[str, tuple[Box, nn.Parameter]] = {}
        """Of weights that a step reads in part: the rest, on the first rank that stores a part."""
        self._imported = imported
        self._transient = transient(model, set(self._names.values()))
        check_meta(imported, self._transient)
        self._loaded = False
        self._take(model)
        trained = [p for p in (*self.weights.values(), *(p for _, p in self._unread.values())) if p.requires_grad]
        self.optimizer = optimizer(trained) if trained else None
        program = compile_program(lowered, self.rank, fuse)
        self._wire = Wire(lowered, self.rank, device, timeout_s)
        self.engine = Engine(
            program, self._wire, self.weights, self._fixed, self._update, KernelContext(seed=seed, device=device)
        )
        self._inputs, self._targets = imported.input_names, imported.target_names

    # ---- training

    def step(self, inputs: Any, targets: Any = None) -> Tensor:
        """Forward, backward, synchronise, update; returns the loss of the whole batch (a scalar) on every rank.

        ``inputs``, ``targets``: tensors, or nested as at import. Each may hold the whole global batch, or only this
        rank's ``sample_range`` of it: of flattened targets the rows of these samples; what does not run over the batch
        (a mask for all samples) is always whole. A rank whose range is empty may pass None. Raises RuntimeFailure if a
        rank has died.
        """
        if not self._loaded:
            raise RuntimeFailure("the model was on the meta device: call load_state_dict before the first step")
        given = _leaves(self._ordered(inputs)), _leaves(targets)
        fed: dict[str, tuple[Box, Tensor]] = {}
        for names, tensors, what in zip((self._inputs, self._targets), given, ("inputs", "targets"), strict=True):
            if tensors and len(tensors) != len(names):
                raise RuntimeFailure(f"step got {len(tensors)} {what}, the model was imported with {len(names)}")
            for name, tensor in zip(names, tensors, strict=False):
                fed[name] = self._feed(name, tensor)
        needed = {
            edge.tensor for edge in self.lowered.edges if any(entry.device == self.rank for entry in edge.need)
        } & {t.name for t in self.graph.of_kind("input")}
        if missing := sorted(needed - set(fed)):
            raise RuntimeFailure(f"rank {self.rank} needs {', '.join(missing)} for its samples; pass it to step")
        loss = self.engine.step(fed)
        for counter in self._counters.values():
            counter += 1
        return loss

    def _ordered(self, inputs: Any) -> Any:
        """Keyword arguments in the order that they were imported in."""
        names = self._imported.keywords
        if not isinstance(inputs, Mapping):
            return inputs
        if set(inputs) != set(names):
            given, wanted = (", ".join(sorted(map(str, keys))) or "none" for keys in (inputs, names))
            raise RuntimeFailure(f"step got the keyword arguments {given}; the model was imported with {wanted}")
        return {name: inputs[name] for name in names}

    def _feed(self, name: str, tensor: Tensor) -> tuple[Box, Tensor]:
        spec = self.graph.tensor[name]
        shapes = {spec.shape: "the whole batch"}
        low, high = (bound * self._rows.get(name, 0) for bound in self.sample_range)
        if name in self._rows:
            shapes.setdefault((high - low, *spec.shape[1:]), f"rows {low} to {high} of it")
        if dtype_of(spec.dtype) != tensor.dtype or tuple(tensor.shape) not in shapes:
            wanted = " or ".join(f"{shape} ({what})" for shape, what in shapes.items())
            raise RuntimeFailure(
                f"{name} must be {spec.dtype} of shape {wanted}, not {str(tensor.dtype).removeprefix('torch.')} of "
                f"shape {tuple(tensor.shape)}"
            )
        box = tuple((0, n) for n in spec.shape)
        if tuple(tensor.shape) != spec.shape:
            box = ((low, high), *box[1:])
        return box, tensor.to(self.device, non_blocking=True)

    def _update(self) -> None:
        if self.optimizer is not None:
            for _, rest in self._unread.values():  # as on one device, where weight decay and momentum reach it too
                rest.grad = torch.zeros_like(rest) if rest.requires_grad else None
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def listing(self) -> str:
        """What this rank runs in a step, as readable Python."""
        return listing(self.engine.program)

    @cached_property
    def sample_range(self) -> Interval:
        """[low, high) of the global batch's samples that this rank needs, for all microbatches; (0, 0) if none."""
        needed = [
            (box[0][0] // self._rows[edge.tensor], -(-box[0][1] // self._rows[edge.tensor]))
            for edge in self.lowered.edges
            if edge.tensor in self._rows
            for entry in edge.need
            if entry.device == self.rank
            for box in boxes_in_batch(self.lowered, edge.tensor, entry.box)
        ]
        return (min(low for low, _ in needed), max(high for _, high in needed)) if needed else (0, 0)

    def sampler(self, length: int, *, shuffle: bool = True, seed: int = 0, epoch: int = 0) -> Iterator[list[int]]:
        """Batch sampler for a data set of ``length`` samples: for each global batch, the indices of this rank's samples
        (for ``DataLoader(batch_sampler=...)`` as a list). The ranks draw the same order; an incomplete last batch is
        left out."""
        batch, (low, high) = self.graph.batch, self.sample_range
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(length, generator=generator).tolist() if shuffle else list(range(length))
        for first in range(0, length - batch + 1, batch):
            yield order[first + low : first + high]

    # ---- state

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's state under the original names, on every rank (CPU tensors). All ranks must call it."""
        state: dict[str, Tensor] = {}
        done: dict[str, Tensor] = {}
        pieces = {w.tensor: w.plan.storage for w in self.lowered.weights} | self._buffer_entries()
        for name, original in self._names.items():
            if original in pieces and original not in done:
                done[original] = self._collect(original, pieces[original])
            found = done.get(original, self._counters.get(original, self._other.get(original)))
            if found is not None:
                state[name] = found.view(self._shapes[name]).clone()
        return state

    def _collect(self, name: str, entries: Sequence[Entry]) -> Tensor:
        """Whole tensor from its pieces: the first holder of each region sends it to everyone."""
        spec = self.graph.tensor[name]
        whole = torch.zeros(spec.shape, dtype=dtype_of(spec.dtype), device=self.device)
        boxes = list(dict.fromkeys(entry.box for entry in entries))
        rest = unread(spec.shape, boxes) if spec.kind == "parameter" else None
        for box in [rest, *boxes] if rest is not None else boxes:
            owner = next(entry.device for entry in entries if box in (rest, entry.box))
            piece = torch.empty(extent(box), dtype=whole.dtype, device=self.device)
            if owner == self.rank:
                held, tensor = self._unread[name] if box is rest else self._local(name)
                piece.copy_(cut(tensor.detach(), held, box))
            dist.broadcast(piece, owner)
            cut(whole, tuple((0, n) for n in spec.shape), box).copy_(piece)
        return whole.cpu()

    def _local(self, name: str) -> tuple[Box, Tensor]:
        if name in self.weights:
            return self._storage[name].box, self.weights[name].detach()
        return self._fixed[name]

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a whole model's state (as ``state_dict`` gives it). Raises RuntimeFailure on missing names or wrong
        shapes, before anything is changed."""
        for name in self._names:
            if name not in state:
                raise RuntimeFailure(f"the state has no {name!r}; it holds {len(state)} names for another model?")
            if tuple(state[name].shape) != self._shapes[name]:
                here = self._shapes[name]
                raise RuntimeFailure(f"{name!r} has shape {tuple(state[name].shape)} in the state, {here} here")
        with torch.no_grad():
            for name, original in self._names.items():
                if original in self.weights:
                    whole = state[name].reshape(self.graph.tensor[original].shape)
                    self.weights[original].copy_(cut(whole, _whole(whole), self._storage[original].box))
                    if original in self._unread:
                        box, rest = self._unread[original]
                        rest.copy_(cut(whole, _whole(whole), box))
                elif original in self._fixed:
                    box, tensor = self._fixed[original]
                    tensor.copy_(cut(state[name], _whole(state[name]), box))
                elif original in self._counters:
                    self._counters[original].copy_(state[name])
                elif original in self._other:
                    self._other[original].copy_(state[name])
            self._derive({original: state[name] for name, original in self._names.items()})
        self._loaded = True

    def _derive(self, state: Mapping[str, Tensor]) -> None:
        """Compute the constants that follow from buffers, whose values are ``state``."""
        for name, constant in self._imported.derived.items():
            if name in self._fixed:
                box, tensor = self._fixed[name]
                whole = derive(constant, {**self._transient, **state})
                tensor.copy_(cut(whole, _whole(whole), box))

    # ---- set-up

    def _held(self, kind: str) -> dict[str, Box]:
        """Bounding box of what this rank needs of each tensor of a kind."""
        boxes: dict[str, list[Box]] = {}
        for edge in self.lowered.edges:
            if self.graph.tensor[edge.tensor].kind == kind:
                found = [entry.box for entry in edge.need if entry.device == self.rank]
                boxes.setdefault(edge.tensor, []).extend(
                    box for part in found for box in boxes_in_batch(self.lowered, edge.tensor, part)
                )
        return {name: bounding(found) for name, found in boxes.items() if found}

    def _buffer_entries(self) -> dict[str, list[Entry]]:
        held: dict[str, list[Entry]] = {}
        for edge in self.lowered.edges:
            if self.graph.tensor[edge.tensor].kind == "buffer":
                held.setdefault(edge.tensor, []).extend(edge.need)
        return held

    def _take(self, model: nn.Module) -> None:
        """Keep this rank's parts of the model's parameters and buffers."""
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        meta = any(tensor.is_meta for tensor in tensors.values())
        prints: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(prints, fingerprint(tensors))
        if len(set(prints)) > 1:
            for tensor in (t for t in tensors.values() if not t.is_meta):
                moved = tensor.detach().to(self.device)
                dist.broadcast(moved, 0)
                tensor.data.copy_(moved)
        stored = {weight.tensor: weight.plan.storage for weight in self.lowered.weights}
        for name, entry in self._storage.items():
            spec = self.graph.tensor[name]
            whole = tensors[name].detach().reshape(spec.shape)  # an LSTM's gates have a dimension of their own
            part = (
                torch.zeros(extent(entry.box), dtype=whole.dtype, device=self.device)
                if meta
                else preferred(cut(whole, _whole(whole), entry.box).to(self.device, copy=True).contiguous())
            )
            self.weights[name] = nn.Parameter(part, requires_grad=spec.requires_grad)
            entries = stored[name]
            rest = unread(spec.shape, (e.box for e in entries)) if entries[0].device == self.rank else None
            if rest is not None:
                part = torch.zeros(extent(rest), dtype=whole.dtype, device=self.device)
                if not meta:
                    part.copy_(cut(whole, _whole(whole), rest))
                self._unread[name] = rest, nn.Parameter(part, requires_grad=spec.requires_grad)
        for name, box in self._held("constant").items():
            whole = self._imported.constants[name]
            whole = torch.zeros_like(whole, device="cpu") if whole.is_meta else whole
            self._fixed[name] = box, cut(whole, _whole(whole), box).to(self.device, copy=True)
        trained = {weight.tensor for weight in self.lowered.weights}
        for name, tensor in model.named_parameters():
            if name not in trained:  # the loss does not depend on it: it stays what it is
                self._other[name] = torch.zeros_like(tensor, device="cpu") if meta else tensor.detach().cpu().clone()
        for name, tensor in model.named_buffers():
            whole = torch.zeros_like(tensor, device=self.device) if tensor.is_meta else tensor.detach()
            if name in self._buffers:
                part = cut(whole, _whole(whole), self._buffers[name]).to(self.device, copy=True)
                self._fixed[name] = self._buffers[name], part
            elif name in self.graph.counters:
                self._counters[name] = whole.clone()
            else:
                self._other[name] = whole.cpu().clone()
        if not meta and len(set(prints)) > 1:
            self._derive({name: tensor.detach().cpu() for name, tensor in model.named_buffers()})
        self._loaded = not meta


def _whole(tensor: Tensor) -> Box:
    return tuple((0, n) for n in tensor.shape)


def _leaves(given: Any) -> list[Tensor]:
    """Tensors of a nested structure, in the order in which the importer numbered them."""
    return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
