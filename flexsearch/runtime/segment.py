"""Runs a segment: the kernels of its operators, and its backward pass as a task of its own."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from flexsearch.backward import HANDED_OVER_BYTES, entry_of, gradients_of, handed_over
from flexsearch.graph import Box
from flexsearch.graph.model import Operator
from flexsearch.graph.ops import KernelContext, build_kernel, released_weights
from flexsearch.graph.ops.calls import dtype_of
from flexsearch.graph.ops.local import in_types
from flexsearch.graph.precision import PreciseGraph
from flexsearch.graph.samples import COUNTS
from flexsearch.lower import Lowered
from flexsearch.runtime.body import Body, Call, Kernel, body_of
from flexsearch.runtime.gradients import Place, accumulated, add, empty
from flexsearch.runtime.instructions import Backward, Forward, Key, Segment, Slot
from flexsearch.runtime.instructions import Call as SegmentCall
from flexsearch.runtime.layers import Layer, layers_of
from flexsearch.runtime.microbatches import piece_in_batch
from flexsearch.runtime.parts import slices
from flexsearch.runtime.rewrites import CUTS, JOINT, cut_dimension

Action = Callable[[], None]
LARGE_BYTES = 1 << 20
"""Least bytes of a tensor for which a copy takes longer than the host takes for four views."""


@dataclass
class Pass:
    """What a forward pass leaves for the backward pass: the leaves that get a gradient; where the gradients of results
    enter (``seeds``; None: there is none), in the order of the segment. Of layers: where gradients of results enter
    (``layers``) and those of weights come out (``weights``), what autograd has ``saved`` beside them, for the first
    half of the backward pass alone, and ``between`` the halves the gradients of results (None: there is none). If there
    are no layers, between the halves: what entered (``outputs`` with their ``gradients``). Beside autograd's own saved
    tensors a forward pass leaves no memory here: not the results, and of leaves only shells."""

    leaves: list[Tensor]
    seeds: list[GradientEdge | None]
    layers: Sequence[GradientEdge | None] = ()
    weights: Sequence[GradientEdge] = ()
    saved: list[Tensor | None] = field(default_factory=list)
    between: list[Tensor | None] = field(default_factory=list)
    outputs: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


def _summed(kernels: Sequence[Kernel]) -> Kernel:
    """The sum over microbatches of an operator whose result is of the whole batch."""

    def run(*operands: Tensor | None) -> Tensor:
        size = len(operands) // len(kernels)
        parts = [kernel(*operands[k * size : (k + 1) * size]) for k, kernel in enumerate(kernels)]
        total: Tensor = sum(parts[1:], start=parts[0])
        return total

    return run


def _reading_parts(kernel: Kernel, parts: Mapping[int, tuple[Box, Box]]) -> Kernel:
    """A kernel that reads only parts of these operands: (region held, region read)."""
    where = [(p, slices(held, wanted)) for p, (held, wanted) in parts.items()]

    def run(*operands: Tensor | None) -> Any:
        read = list(operands)
        for p, at in where:
            whole = read[p]
            assert whole is not None
            read[p] = whole[at]
        return kernel(*read)

    return run


def cutting(kernels: Sequence[Kernel], parts: Sequence[tuple[Box, Box]]) -> Kernel:
    """Kernels of which each reads one of the parts (region held, region read) that a tensor is cut into. If that is
    large, autograd puts the parts' gradients together in the order of its memory, so that views above it take no
    copies."""
    dimension = cut_dimension(parts)
    assert dimension is not None
    order = sorted(range(len(parts)), key=lambda k: parts[k][1][dimension])
    sizes = [parts[k][1][dimension][1] - parts[k][1][dimension][0] for k in order]
    layouts: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}

    def run(whole: Tensor) -> tuple[Tensor, ...]:
        strides = whole.stride()
        if strides not in layouts:
            dims = sorted(range(whole.dim()), key=lambda d: -strides[d])
            layouts[strides] = dims, sorted(range(whole.dim()), key=dims.__getitem__)
        dims, back = layouts[strides]
        if whole.nbytes < LARGE_BYTES or dims == back:
            cut = torch.split_with_sizes(whole, sizes, dimension)
        else:
            cut = torch.split_with_sizes(whole.permute(dims), sizes, dims.index(dimension))
            cut = tuple(part.permute(back) for part in cut)
        results: list[Tensor] = [whole] * len(kernels)
        for k, part in zip(order, cut, strict=True):
            result = kernels[k](part)
            results[k] = result[0] if isinstance(result, tuple) else result
        return tuple(results)

    return run


class SegmentRunner:
    """Runs the pieces of a segment's operators on local tensors, for one microbatch."""

    def __init__(
        self, lowered: Lowered, device: int, segment: Segment, context: KernelContext, microbatch: int,
        compiler: str | None = None,
    ) -> None:  # fmt: skip
        """``compiler``: a backend of ``torch.compile``; None: operators run as they are."""
        self.segment, self.compiler = segment, compiler
        leaves = len(segment.leaves)
        self.calls = tuple(
            Call(
                _kernel_of_call(lowered, call, device, context, microbatch),
                tuple(leaves + ~a if a is not None and a < 0 else a for a in call.arguments),
                tuple(leaves + result for result in call.results),
                any(_draws(lowered.graph.operators[o]) for o in call.operators),
            )
            for call in segment.calls
        )
        self.tracked = tuple(k for k, leaf in enumerate(segment.leaves) if leaf.gradient is not None)
        """Leaves that get a gradient."""
        weights = {Key("home", tensor.name) for tensor in lowered.graph.of_kind("parameter")}
        self.stored = {k for k, leaf in enumerate(segment.leaves) if leaf.value in weights}
        """Leaves that are weights as this rank stores them."""
        self.lasting = frozenset[int]() if isinstance(lowered.graph, PreciseGraph) else frozenset(self.stored)
        """Of these, those that are no copies in another precision."""
        self.activations = {k for k, leaf in enumerate(segment.leaves) if _is_activation(lowered, leaf.value)}
        weight_of = {k: _weight_of(lowered, segment.leaves[at].gradient) for k, at in enumerate(self.tracked)}
        self.weights = {k for k, name in weight_of.items() if name is not None}
        """Which of these gradients are those of weights."""
        held = {k: lowered.graph.gradient[name].dtype for k, name in weight_of.items() if name is not None}
        self.held = {k: dtype_of(t) for k, t in held.items() if t != lowered.graph.tensor[str(weight_of[k])].dtype}
        """Types of those of these that are cast."""
        split = segment.halves and compiler is None
        self.layers = layers_of(self.calls, {self.tracked[k] for k in self.weights}) if split else None
        """Where the second half of its backward pass goes on; None: it has no halves, or autograd finds its way."""
        self.released = _released(lowered, segment) if self.layers else ()
        """Those of the layers' weights that the second half does without, as they are gathered: (call, leaf)."""
        self.aside: list[int] = []
        """Leaves that autograd needs for the first half of the backward pass alone."""
        loss = lowered.graph.tensor.get(lowered.graph.loss or "")
        self.one = None if loss is None else torch.ones(loss.shape, dtype=dtype_of(loss.dtype), device=context.device)
        """The gradient of the loss."""

    def forward(self, values: list[Any], instruction: Forward) -> Action:
        """The forward pass as a closure over the slots ``values``: results that leave the segment (detached), and what
        the backward pass needs."""
        first, saved = len(self.segment.leaves), instruction.saved
        gradients = [saved is not None and leaf.gradient is not None for leaf in self.segment.leaves]
        # Of a stored weight there is one leaf in a step; where two gradients of it are told apart, one takes another.
        first_of = {slot: k for k, slot in reversed(tuple(enumerate(instruction.leaves))) if gradients[k]}
        shared = [k in self.stored and first_of.get(slot) == k for k, slot in enumerate(instruction.leaves)]
        sources = tuple(zip(instruction.leaves, gradients, shared, strict=True))
        results = tuple(dict.fromkeys([r for r, _ in instruction.exports] + [r for r, _ in self.segment.seeds]))
        exports = tuple((results.index(result), slot) for result, slot in instruction.exports)
        seeds = tuple(results.index(result) for result, _ in self.segment.seeds)
        layers = self.layers or () if saved is not None else ()
        edges = tuple(place for layer in layers for place in layer.results)
        weights = tuple(read for layer in layers for read in layer.weights)
        wanted = tuple(first + result for result in results)
        released = self.released if weights else ()
        body = body_of(self.calls, first, wanted, self.compiler, edges, weights, released, self.lasting)
        ends = len(results), len(results) + len(edges), len(results) + len(edges) + len(weights)
        mode, tracked = torch.enable_grad if saved is not None else torch.no_grad, self.tracked
        exported = {k for k, _ in exports}
        watched: tuple[Sequence[int], Collection[int]] | None = None if self.compiler is None else ((), ())

        def run() -> None:
            nonlocal watched
            leaves: list[Tensor] = []
            for slot, needs_gradient, at_hand in sources:
                tensor = values[slot]
                if not at_hand:
                    tensor = tensor.detach()
                    if needs_gradient:
                        tensor.requires_grad_()
                leaves.append(tensor)
            with mode():
                if watched is None:
                    computed, *rows = self._watched(body, leaves, ends[2], exported)
                    watched = rows[0], rows[1]
                else:
                    computed = body(*leaves)
            unsaved, copied = watched
            for k, slot in exports:
                values[slot] = computed[k].detach().clone() if k in copied else computed[k].detach()
            if saved is not None:
                for k in unsaved:
                    empty(leaves[k])
                entries = [entry_of(computed[k]) for k in seeds]
                entered, weights_at = (computed[a:b] for a, b in pairwise(ends))
                aside = computed[ends[2]] if layers else []
                values[saved] = Pass([leaves[k] for k in tracked], entries, entered, weights_at, aside)

        return run

    def _watched(
        self, body: Body, leaves: Sequence[Tensor], end: int, exported: Collection[int]
    ) -> tuple[Sequence[Any], list[int], list[int]]:
        """What the operators' body gives; those leaves that autograd does not keep for the backward pass, though a leaf
        itself lives as long as the graph: views of one that are kept hold its memory as long as they are needed; and
        those of the results ``exported`` that are a part of a memory that nothing else keeps, and so get one of their
        own. Weights that are stored whole live anyway. ``end``: where the lists of what is saved aside and otherwise
        are, if there are any; leaves that are in the first alone are ``self.aside``."""
        kept, kept_leaves = set[int](), set[_Geometry]()

        def pack(tensor: Tensor) -> Tensor:
            kept.add(tensor.untyped_storage()._cdata)
            kept_leaves.add(_geometry(tensor))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            computed = body(*leaves)
        for tensor in (tensor for others in computed[end + 1 :] for tensor in others):
            pack(tensor)
        moving = [k for k in self.tracked if k not in self.stored]
        moving = [k for k in moving if _geometry(leaves[k]) not in kept_leaves]
        aside = {_geometry(tensor) for saved in computed[end : end + 1] for tensor in saved}
        self.aside = [k for k in moving if _geometry(leaves[k]) in aside]
        kept |= {memory for memory, *_ in aside}
        kept |= {leaves[k].untyped_storage()._cdata for k in range(len(leaves)) if k not in self.activations}
        read = Counter[int]()
        for k in exported:
            read[computed[k].untyped_storage()._cdata] += computed[k].nbytes
        parts = {memory for memory in read if memory not in kept}
        copied = [
            k for k in exported if (memory := computed[k].untyped_storage())._cdata in parts
            and computed[k].nbytes >= HANDED_OVER_BYTES and read[memory._cdata] < memory.nbytes()
        ]  # fmt: skip
        return computed, [k for k in moving if k not in self.aside], copied

    def backward(self, values: list[Any], instruction: Backward, shared: Collection[Slot]) -> Action:
        """The backward pass (a part of it) as a closure. ``shared``: slots that other backward passes add to, too."""
        part, saved, seeds = instruction.part, instruction.saved, instruction.seeds
        targets = tuple((k, slot) for k, slot in enumerate(instruction.gradients) if slot is not None)
        leaves = tuple(leaf for leaf, _ in targets)
        places = tuple(Place(slot, k in self.weights and slot in shared, self.held.get(k)) for k, slot in targets)
        first, keep = part != "weights", part == "inputs"
        if not first and self.layers is not None:
            return self._of_weights(values, instruction, shared)
        layered = keep and self.layers is not None
        takes = [slot in instruction.takes and (layered or not keep) for slot in seeds]
        sums, casts = tuple(place.slot for place in places if place.in_place), any(place.held for place in places)
        # All leaves are stored weights, and all their gradients are wanted.
        alone = part == "all" and leaves == tuple(range(len(self.tracked))) and self.stored.issuperset(self.tracked)

        def run() -> None:
            passed, entered = values[saved], list[weakref.ref[torch.UntypedStorage]]()
            if first:
                for slot, edge, taken in zip(seeds, passed.seeds, takes, strict=True):
                    gradient = values[slot] if slot is not None else self.one
                    if edge is not None and gradient is not None:
                        passed.outputs.append(edge)
                        if taken and gradient.nbytes >= HANDED_OVER_BYTES:
                            entered.append(weakref.ref(gradient.untyped_storage()))
                            gradient = handed_over(gradient, edge)
                        passed.gradients.append(gradient)
                    if taken and slot is not None:
                        gradient = values[slot] = None
            wanted = [passed.leaves[k] for k in leaves]
            edges = [edge for edge in passed.layers if edge is not None] if layered else []
            if passed.outputs and (wanted or edges):
                gradients: Sequence[Tensor | None]
                if alone or (part == "all" and (casts or any(values[slot] is not None for slot in sums))):
                    gradients = accumulated(values, wanted, places, passed.outputs, passed.gradients)
                else:
                    gradients = gradients_of(passed.outputs, passed.gradients, [*wanted, *edges], keep)
                reached = iter(gradients[len(wanted) :])
                passed.between = [None if edge is None else next(reached) for edge in passed.layers] if edges else []
                add(values, places, gradients[: len(wanted)], (*passed.gradients, *passed.between), entered)
            if layered:
                self._let_go(passed)

        return run

    def _let_go(self, passed: Pass) -> None:
        """Of what the second half of a backward pass does not need."""
        for k in self.aside:
            empty(passed.leaves[self.tracked.index(k)])
        for done in (passed.saved, passed.outputs, passed.gradients, passed.leaves):
            done.clear()

    def _of_weights(self, values: list[Any], instruction: Backward, shared: Collection[Slot]) -> Action:
        """The second half of a backward pass, layer by layer: gradients of the weights from those that the first half
        has left at the layers' results."""
        layers: Sequence[Layer] = self.layers or ()
        saved = instruction.saved
        readers = Counter(leaf for layer in layers for _, leaf in layer.weights)
        slots = {k: slot for k, slot in zip(self.tracked, instruction.gradients, strict=True) if slot is not None}
        held = {at: self.held.get(k) for k, at in enumerate(self.tracked)}
        places_of = {
            leaf: Place(slot, slot in shared or readers[leaf] > 1, held[leaf]) for leaf, slot in slots.items()
        }  # fmt: skip
        rows = [(len(layer.results), [places_of[leaf] for _, leaf in layer.weights]) for layer in layers]

        def run() -> None:
            passed = values[saved]
            between, edges, weights = (list(reversed(x)) for x in (passed.between, passed.layers, passed.weights))
            passed.between.clear()
            for count, places in rows if between else ():
                here = [(edges.pop(), between.pop()) for _ in range(count)]
                wanted = [weights.pop() for _ in places]
                outputs = [edge for edge, gradient in here if edge is not None and gradient is not None]
                gradients = [gradient for edge, gradient in here if edge is not None and gradient is not None]
                if outputs:
                    weight_gradients = gradients_of(outputs, gradients, wanted, False)
                    add(values, places, weight_gradients, (*gradients, *between))
                    del weight_gradients, gradients  # before the next layer's are made

        return run


_Geometry = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def _geometry(tensor: Tensor) -> _Geometry:
    """Which part of which memory a tensor is, and how it lies there: the same for a leaf and what autograd saves of it,
    not for other views."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _is_activation(lowered: Lowered, value: Key) -> bool:
    """Whether a value is an activation, or a copy of one."""
    name = str(value.name) if value.kind == "home" else lowered.edges[int(str(value.name))].tensor
    return lowered.graph.tensor[name].kind == "activation"


def _weight_of(lowered: Lowered, gradient: Key | None) -> str | None:
    """The weight whose gradient a key names."""
    if gradient is None or gradient.kind != "edge gradient":
        return None
    name = lowered.edges[int(str(gradient.name))].tensor
    return name if lowered.graph.tensor[name].kind == "parameter" else None


def _released(lowered: Lowered, segment: Segment) -> frozenset[tuple[int, int]]:
    """(call, leaf) of the gathered weights that no gradient of a weight is made of."""
    released = released_weights(lowered.graph)
    return frozenset(
        (k, a)
        for k, call in enumerate(segment.calls)
        if len(call.operators) == 1
        for p, a in enumerate(call.arguments)
        if a is not None and a >= 0 and (call.operators[0], p) in released
        and segment.leaves[a].value.kind == "edge" and segment.leaves[a].gradient is not None
    )  # fmt: skip


def _draws(op: Operator) -> bool:
    """Whether an operator draws random numbers."""
    return "salt" in op.attributes and float(str(op.attributes.get("dropout", 1.0))) > 0.0


def _kernel_of_call(
    lowered: Lowered, call: SegmentCall, device: int, context: KernelContext, microbatch: int
) -> Kernel:
    """The kernel of a call: that of its operator, or what a rewrite made of those of several."""
    joined = len(call.operators) > 1 and call.kind != CUTS  # it sees to the types of its operands itself
    kernels = [_kernel(lowered, o, device, context, microbatch, not joined) for o in call.operators]
    if call.kind == CUTS:
        return cutting(kernels, [call.parts[k] for k in range(len(kernels))])
    if len(kernels) > 1:
        return JOINT[call.kind]([lowered.graph.operators[o] for o in call.operators], kernels)
    return _reading_parts(kernels[0], call.parts) if call.parts else kernels[0]


def _kernel(
    lowered: Lowered, operator: int, device: int, context: KernelContext, microbatch: int, casting: bool = True
) -> Kernel:
    """The kernel of a device's piece of an operator for a microbatch. ``casting``: in mixed precision, it takes
    operands as the graph has them."""
    op = lowered.graph.operators[operator]
    microbatches = range(lowered.stages.microbatches) if op.kind in COUNTS else (microbatch,)
    kernels = []
    for m in microbatches:
        whole, piece, shapes = piece_in_batch(lowered, operator, device, m)
        kernel = build_kernel(whole, piece, shapes, context)
        if casting and isinstance(lowered.graph, PreciseGraph):
            tensor = lowered.graph.tensor
            input_types, types = ([dtype_of(tensor[name].dtype) for name in names] for names in (op.inputs, op.outputs))
            kernel = in_types(kernel, input_types, types)
        kernels.append(kernel)
    return kernels[0] if len(kernels) == 1 else _summed(kernels)
